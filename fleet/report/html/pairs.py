"""Every two hosts of a gang: what they exchanged, as one picture of the gang and one of each host."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fleet.quantities import finite, quantity
from fleet.report.format import clean
from fleet.report.tables.hosts import anchor_of
from schemas.records import MEASURED, Observation
from schemas.reports import FleetReport, HostReport
from schemas.scopes import Scope

NAME = "pairs.bandwidth"
BANDS = (0.5, 0.75, 0.9, 0.97)
"""Shares of the gang's median that end a colour; under the first the link is lost, over the last there is only noise."""
MOST_HOSTS = 256
"""Of a larger gang the picture would be of points; the slowest pairs are told all the same."""
_SLOWEST = 8

Meeting = tuple[str, str]


@dataclass(frozen=True, kw_only=True)
class Slow:
    """One of the slowest pairs."""

    ends: tuple[tuple[str, str], tuple[str, str]]
    """Name and anchor of both."""
    rail: str
    text: str
    share: str
    """Of the median of the gang."""


@dataclass(frozen=True, kw_only=True)
class Picture:
    """The pairs of one gang: rows and columns are its hosts, a square the slowest of a pair's rails."""

    gang: str
    hosts: tuple[str, ...]
    odd: bool
    """A pair is slow, or failed."""
    rails: int
    pairs: int
    failed: int
    median: str
    lowest: str
    paths: tuple[tuple[str, str], ...]
    """Class and path of the squares of one colour."""
    slowest: tuple[Slow, ...]


def pictures(report: FleetReport) -> list[Picture]:
    """One of each group of hosts that exchanged anything pair by pair."""
    found: dict[Meeting, dict[str, float | None]] = {}
    neighbours: dict[str, set[str]] = {}
    known = {host.name for host in report.hosts}
    for host in report.hosts:
        for rail, partner, seen in _of(host):
            if partner not in known:
                continue
            value = finite(seen.value) if seen.status == MEASURED else None
            key = (min(host.name, partner), max(host.name, partner))
            before = found.setdefault(key, {})
            lower = [told for told in (before.get(rail), value) if told is not None]
            before[rail] = min(lower) if lower and value is not None else None
            neighbours.setdefault(host.name, set()).add(partner)
            neighbours.setdefault(partner, set()).add(host.name)
    order = [host.name for host in report.hosts]
    drawn = [_picture(members, found) for members in _groups(order, neighbours)]
    return sorted(drawn, key=lambda picture: not picture.odd)


def _of(host: HostReport) -> Iterable[tuple[str, str, Observation]]:
    for seen in host.measurements:
        if seen.name == NAME:
            labels = dict(Scope.parse(seen.scope).labels)
            partner = labels.pop("partner", "")
            if partner and partner != host.name and labels:
                yield next(iter(labels.values())), partner, seen


def _groups(order: Sequence[str], neighbours: Mapping[str, set[str]]) -> list[list[str]]:
    """Hosts that met, or met the same: the gangs, as the figures tell them."""
    left, groups = {host: None for host in order if host in neighbours}, []
    while left:
        waiting, members = [next(iter(left))], set()
        while waiting:
            host = waiting.pop()
            if host not in members:
                members.add(host)
                waiting += neighbours.get(host, ())
        groups.append([host for host in order if host in members])
        for host in members:
            left.pop(host, None)
    return groups


def _picture(hosts: Sequence[str], found: Mapping[Meeting, Mapping[str, float | None]]) -> Picture:
    places = {host: number for number, host in enumerate(hosts)}
    own = {key: rails for key, rails in found.items() if key[0] in places}
    values = [value for rails in own.values() for value in rails.values() if value is not None]
    middle = statistics.median(values) if values else 0.0
    cells: dict[tuple[int, int], str] = {}
    for (a, b), rails in own.items():
        known = [value for value in rails.values() if value is not None]
        css = _band(min(known) if len(known) == len(rails) else None, middle)
        cells[places[a], places[b]] = cells[places[b], places[a]] = css
    slow = sorted(
        (value, key, rail) for key, rails in own.items() for rail, value in rails.items() if value is not None
    )
    return Picture(
        gang=f"{clean(hosts[0])} to {clean(hosts[-1])}",
        hosts=tuple(clean(host) for host in hosts),
        odd=bool({*cells.values()} - {"b3", "b4"}),
        rails=max(len(rails) for rails in own.values()),
        pairs=len(own),
        failed=sum(None in rails.values() for rails in own.values()),
        median=quantity(middle, "B/s"),
        lowest=quantity(min(values), "B/s") if values else "",
        paths=tuple(_paths(len(hosts), cells)) if len(hosts) <= MOST_HOSTS else (),
        slowest=tuple(_slow(*item, middle) for item in slow[:_SLOWEST]),
    )


def _slow(value: float, key: Meeting, rail: str, middle: float) -> Slow:
    first, second = ((clean(host), anchor_of(host)) for host in key)
    share = f"{100 * value / middle:.0f} %" if middle else ""
    return Slow(ends=(first, second), rail=rail, text=quantity(value, "B/s"), share=share)


def _band(value: float | None, middle: float) -> str:
    """`b0` lost … `b4` as the rest; `lost` where nothing could be measured."""
    if value is None:
        return "lost"
    share = value / middle if middle else 0.0
    return f"b{sum(share >= end for end in BANDS)}"


def _paths(size: int, cells: Mapping[tuple[int, int], str]) -> Iterable[tuple[str, str]]:
    """The squares of each colour as one path; neighbours in a row are one rectangle."""
    paths: dict[str, list[str]] = {}
    for row in range(size):
        column = 0
        while column < size:
            css, first = cells.get((row, column), ""), column
            while column < size and cells.get((row, column), "") == css:
                column += 1
            if css:
                width = column - first
                paths.setdefault(css, []).append(f"M{first} {row}h{width}v1h-{width}z")
    return [(css, "".join(path)) for css, path in sorted(paths.items())]


def of_host(host: HostReport) -> dict[str, Any]:
    """Partners, rails and rates in GB/s (row by row, None where there is none) with their colours; empty without any."""
    found: dict[str, dict[str, float | None]] = {}
    for rail, partner, seen in _of(host):
        found.setdefault(clean(partner), {})[clean(rail)] = finite(seen.value) if seen.status == MEASURED else None
    values = [value for rails in found.values() for value in rails.values() if value is not None]
    if not found:
        return {}
    middle = statistics.median(values) if values else 0.0
    rails = sorted({rail for own in found.values() for rail in own}, key=lambda rail: (len(rail), rail))
    return {
        "partners": list(found),
        "rails": rails,
        "median": quantity(middle, "B/s"),
        "rates": [
            [round(value / 1e9, 2) if (value := own.get(rail)) is not None else None for rail in rails]
            for own in found.values()
        ],
        "bands": [
            "".join(_band(own[rail], middle)[-1] if rail in own else "-" for rail in rails) for own in found.values()
        ],
    }
