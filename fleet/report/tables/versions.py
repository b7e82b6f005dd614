"""Compare the versions of software and firmware over the fleet: which components differ, and which hosts have which version."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from fleet.report.formatting import join_names
from fleet.scope_text import describe_scopes
from schemas.reports import FleetReport

_ORDER = ("driver", "driver.version", "cuda", "nccl", "torch")
_PART_COMPONENT = re.compile(r"([a-z][a-z0-9_.]*)\[([A-Za-z0-9_.:=,-]+)\]")
_MAX_HOSTS, _MAX_VALUES = 6, 10

ScopesOfHost = Mapping[str, Sequence[str]]


@dataclass(frozen=True, kw_only=True)
class VersionValue:
    """One version of a component, and the hosts that have it."""

    text: str
    hosts: int
    names: str
    """The hosts, with their parts that have this version: `r12-h07, r12-h09 GPU 3`.

    Empty if more than half of the hosts that reported the component have this version.
    """


@dataclass(frozen=True, kw_only=True)
class Component:
    """The versions of one component over the fleet."""

    name: str
    versions: tuple[VersionValue, ...]
    """The most common first."""
    left_out: int
    """Number of versions that are not listed."""
    unknown: int
    """Number of hosts that did not report the component."""

    @property
    def differs(self) -> bool:
        """Return whether hosts, or parts of one host, report different versions."""
        return len(self.versions) > 1


def components(report: FleetReport) -> list[Component]:
    """Return every component that any host reported. Components with several versions are first."""
    by_name: dict[str, dict[str, dict[str, list[str]]]] = {}
    for host in report.hosts:
        for key, text in host.software.items():
            name, scope = _name_and_scope(key)
            by_name.setdefault(name, {}).setdefault(text, {}).setdefault(host.name, []).append(scope)
    result = [_component(name, by_name[name], len(report.hosts)) for name in sorted(by_name, key=version_order)]
    return sorted(result, key=lambda component: not component.differs)


def version_order(name: str) -> tuple[int, str]:
    """Return the sort key of the component `name`: the components in _ORDER are first, then the others by name."""
    return (_ORDER.index(name) if name in _ORDER else len(_ORDER), name)


def _name_and_scope(key: str) -> tuple[str, str]:
    """Split a key such as `gpu.vbios_version[gpu=3]` into name and scope. The scope of a component of the whole host is empty."""
    match = _PART_COMPONENT.fullmatch(key)
    return (match.group(1), match.group(2)) if match else (key, "")


def _component(name: str, values: Mapping[str, ScopesOfHost], host_count: int) -> Component:
    ordered = sorted(values.items(), key=lambda item: (-len(item[1]), item[0]))
    reporting = {host for scopes in values.values() for host in scopes}
    versions = tuple(
        VersionValue(text=text, hosts=len(scopes), names="" if len(scopes) * 2 > len(reporting) else _names(scopes))
        for text, scopes in ordered[:_MAX_VALUES]
    )
    return Component(
        name=name,
        versions=versions,
        left_out=max(0, len(ordered) - _MAX_VALUES),
        unknown=host_count - len(reporting),
    )


def _names(scopes_of: ScopesOfHost) -> str:
    names = [f"{host} {describe_scopes(scopes)}" if any(scopes) else host for host, scopes in scopes_of.items()]
    return join_names(names, _MAX_HOSTS)
