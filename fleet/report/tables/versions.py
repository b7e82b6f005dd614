"""The version matrix: what every host has alike in a line, and what differs with the hosts that are the odd ones."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from fleet.report.scope_text import describe_scopes
from schemas.reports import FleetReport

_ORDER = ("driver", "driver.version", "cuda", "nccl", "torch")
_OF_A_PART = re.compile(r"([a-z][a-z0-9_.]*)\[([A-Za-z0-9_.:=,-]+)\]")
_MANY_HOSTS, _MANY_VALUES = 6, 10


@dataclass(frozen=True, kw_only=True)
class Value:
    """One version of a component, and who has it."""

    text: str
    hosts: int
    where: str
    """The hosts, where it is not the one that most have: `r12-h07, r12-h09 GPU 3`."""


@dataclass(frozen=True, kw_only=True)
class Version:
    """One component over the fleet."""

    name: str
    values: tuple[Value, ...]
    """The commonest first; of very many, the commonest."""
    left_out: int
    """Further values."""
    unknown: int
    """Hosts that did not say."""

    @property
    def differs(self) -> bool:
        """Not every host that told it has the same."""
        return len(self.values) > 1


def versions(report: FleetReport) -> list[Version]:
    """Every component that any host told a version of, those that differ first."""
    found: dict[str, dict[str, dict[str, list[str]]]] = {}
    for host in report.hosts:
        for key, text in host.software.items():
            name, scope = _component(key)
            found.setdefault(name, {}).setdefault(text, {}).setdefault(host.name, []).append(scope)
    made = [_version(name, found[name], len(report.hosts)) for name in sorted(found, key=version_order)]
    return sorted(made, key=lambda version: not version.differs)


def version_order(name: str) -> tuple[int, str]:
    """What launches run on comes first, the rest by name."""
    return (_ORDER.index(name) if name in _ORDER else len(_ORDER), name)


def _component(key: str) -> tuple[str, str]:
    """`gpu.vbios_version[gpu=3]` as name and scope; a component that is the same throughout its host has no scope."""
    match = _OF_A_PART.fullmatch(key)
    return (match.group(1), match.group(2)) if match else (key, "")


def _version(name: str, values: Mapping[str, Mapping[str, Sequence[str]]], hosts: int) -> Version:
    ordered = sorted(values.items(), key=lambda item: (-len(item[1]), item[0]))
    told = {host for places in values.values() for host in places}
    shown = [
        Value(text=text, hosts=len(places), where="" if len(places) * 2 > len(told) else _where(places))
        for text, places in ordered[:_MANY_VALUES]
    ]
    return Version(
        name=name, values=tuple(shown), left_out=max(0, len(ordered) - _MANY_VALUES), unknown=hosts - len(told)
    )


def _where(places: Mapping[str, Sequence[str]]) -> str:
    named = [
        f"{host} {describe_scopes(scopes)}" if any(scopes) else host
        for host, scopes in list(places.items())[:_MANY_HOSTS]
    ]
    more = [f"{len(places) - _MANY_HOSTS} more"] if len(places) > _MANY_HOSTS else []
    return ", ".join(named) + (f" and {more[0]}" if more else "")
