"""What passes or fails by what the whole fleet shows: put aside until all hosts have been looked at."""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from fleet.judge.criteria import Criterion
from fleet.judge.paths import Path
from schemas.records import Value
from schemas.reports import Verdict


@dataclass(kw_only=True)
class Claim:
    """Figures, one a part, of which the fleet says whether they pass: all of one criterion, settings and group."""

    criterion: Criterion
    template: Verdict
    key: Any
    values: array[float] = field(default_factory=lambda: array("d"))
    hosts: array[int] = field(default_factory=lambda: array("L"))
    """Where the host stands in the plan."""
    scopes: array[int] = field(default_factory=lambda: array("L"))
    names: list[str] = field(default_factory=list)
    """Of the scopes."""

    places: dict[str, int] = field(default_factory=dict)
    ways: dict[Path, array[int]] = field(default_factory=dict)
    """Which parts talked that way, where it is about a collective."""

    def add(self, value: float, host: int, scope: str, way: Path | None = None) -> None:
        """One more part."""
        if way is not None:
            self.ways.setdefault(way, array("L")).append(len(self.values))
        at = self.places.get(scope)
        if at is None:
            at = self.places[scope] = len(self.names)
            self.names.append(scope)
        self.values.append(value)
        self.hosts.append(host)
        self.scopes.append(at)

    def update(self, other: Claim) -> None:
        """The parts of other hosts."""
        for way, parts in other.ways.items():
            self.ways.setdefault(way, array("L")).extend(part + len(self.values) for part in parts)
        for value, host, scope in zip(other.values, other.hosts, other.scopes, strict=True):
            self.add(value, host, other.names[scope])

    def parts(self) -> Iterator[tuple[Value, int, str]]:
        """Value, place of the host, and scope of each."""
        whole = isinstance(self.template.value, int)
        for value, host, scope in zip(self.values, self.hosts, self.scopes, strict=True):
            yield int(value) if whole and value.is_integer() else value, host, self.names[scope]


@dataclass(kw_only=True)
class Same:
    """Parts that show one value, of which the fleet says whether it is the usual one."""

    criterion: str
    value: Value
    template: Verdict
    key: Any
    parts: list[tuple[int, str]] = field(default_factory=list)
    """Place of the host, and scope."""


@dataclass(kw_only=True)
class Many:
    """Hosts that had the same outcome by one criterion, which is kept so that no other has its id."""

    outcome: list[Verdict]
    count: int = 0
    hosts: list[tuple[int, str]] = field(default_factory=list)
    """The first of them."""
