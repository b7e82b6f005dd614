"""Build the matrices of the benchmark `pairs`: the bandwidth between the two hosts of each measured pair.

The report has a matrix for each gang (the hosts of one multi-node launch). The page of a host has a matrix of this host: a row
per partner and a column per rail.

A rail is the path between GPUs of equal local rank on the two hosts. It is named by the index of the GPU.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fleet.quantities import NONE, measured_number, quantity
from fleet.report.formatting import clean
from fleet.report.links import host_anchor
from schemas.records import Observation
from schemas.reports import FleetReport, HostReport
from schemas.scopes import Scope

NAME = "pairs.bandwidth"
BANDS = (0.5, 0.75, 0.9, 0.97)
"""Bounds between the color bands, as shares of the median rate in the matrix. A rate below the first bound suggests a lost link.
A rate at or above the last bound is normal."""
MAX_HOSTS = 256
"""A larger gang has no matrix, because its cells would be too small; its slowest pairs are still listed."""
_MAX_SLOWEST = 8

HostPair = tuple[str, str]
Rates = Mapping[str, float | None]
"""Rail -> rate in B/s; the rate is None if it could not be measured."""


@dataclass(frozen=True, kw_only=True)
class SlowPair:
    """One of the slowest rates, with its pair and its rail."""

    ends: tuple[tuple[str, str], tuple[str, str]]
    """Name and link (`host_anchor`) of each of the two hosts."""
    rail: str
    text: str
    """The rate with its unit."""
    share: str
    """The rate in percent of the median rate of the gang; empty if the median is 0."""


@dataclass(frozen=True, kw_only=True)
class PairMatrix:
    """The pairs of one gang. A cell of the matrix shows the rate of a pair on its slowest rail."""

    gang: str
    """Names of the first and the last host of the gang: `h1 to h8`."""
    hosts: tuple[str, ...]
    suspicious: bool
    """Whether any rate is below 90 % of the median, or could not be measured."""
    rails: int
    """Number of rails."""
    pairs: int
    """Number of pairs."""
    failed: int
    """Number of pairs with a rate that could not be measured."""
    median: str
    lowest: str
    """Lowest rate of any pair on any rail; empty if no rate was measured."""
    paths: tuple[tuple[str, str], ...]
    """For each color of the matrix: the CSS class, and the SVG path of the cells of this color. Empty above MAX_HOSTS hosts."""
    rail_names: tuple[str, ...]
    rail_paths: tuple[tuple[str, str], ...]
    """Like `paths`, for the picture with a row per rail and a column per host. Also empty if there is only one rail."""
    slowest: tuple[SlowPair, ...]


def pair_matrices(report: FleetReport) -> list[PairMatrix]:
    """Return a matrix for each gang, suspicious ones first.

    Hosts are in the same matrix if pairs with an observation connect them, directly or through other hosts.
    """
    rates: dict[HostPair, dict[str, float | None]] = {}
    neighbours: dict[str, set[str]] = {}
    names = {host.name for host in report.hosts}
    for host in report.hosts:
        for rail, partner, observation in _pairs_of(host):
            if partner not in names:
                continue
            value = measured_number(observation)
            of_pair = rates.setdefault((min(host.name, partner), max(host.name, partner)), {})
            known = of_pair.get(rail, value)
            of_pair[rail] = None if known is None or value is None else min(known, value)
            neighbours.setdefault(host.name, set()).add(partner)
            neighbours.setdefault(partner, set()).add(host.name)
    order = [host.name for host in report.hosts]
    matrices = [_matrix(members, rates) for members in _connected(order, neighbours)]
    return sorted(matrices, key=lambda matrix: not matrix.suspicious)


def _pairs_of(host: HostReport) -> Iterable[tuple[str, str, Observation]]:
    """Yield rail, partner and observation for each `pairs.bandwidth` of a host."""
    for observation in host.measurements:
        if observation.name == NAME:
            labels = dict(Scope.parse(observation.scope).labels)
            partner = labels.pop("partner", "")
            if partner and partner != host.name and labels:
                yield next(iter(labels.values())), partner, observation


def _connected(order: Sequence[str], neighbours: Mapping[str, set[str]]) -> list[list[str]]:
    """Return the groups of hosts that `neighbours` connects. Groups, and hosts within a group, are in the order of `order`."""
    remaining, groups = {host: None for host in order if host in neighbours}, []
    while remaining:
        waiting, members = [next(iter(remaining))], set()
        while waiting:
            host = waiting.pop()
            if host not in members:
                members.add(host)
                waiting += neighbours.get(host, ())
        groups.append([host for host in order if host in members])
        for host in members:
            remaining.pop(host, None)
    return groups


def _matrix(hosts: Sequence[str], rates: Mapping[HostPair, Rates]) -> PairMatrix:
    indexes = {host: index for index, host in enumerate(hosts)}
    gang_rates = {pair: rails for pair, rails in rates.items() if pair[0] in indexes}
    values = [value for rails in gang_rates.values() for value in rails.values() if value is not None]
    median = statistics.median(values) if values else 0.0
    cells: dict[tuple[int, int], str] = {}
    for (first, second), rails in gang_rates.items():
        known = [value for value in rails.values() if value is not None]
        css = _band(min(known) if len(known) == len(rails) else None, median)
        row, column = indexes[first], indexes[second]
        cells[row, column] = cells[column, row] = css
    names = sorted({rail for rails in gang_rates.values() for rail in rails}, key=_natural)
    slowest = sorted(
        (value, pair, rail) for pair, rails in gang_rates.items() for rail, value in rails.items() if value is not None
    )
    return PairMatrix(
        gang=f"{clean(hosts[0])} to {clean(hosts[-1])}",
        hosts=tuple(clean(host) for host in hosts),
        suspicious=bool({*cells.values()} - {"b3", "b4"}),
        rails=len(names),
        pairs=len(gang_rates),
        failed=sum(None in rails.values() for rails in gang_rates.values()),
        median=quantity(median, "B/s") if values else NONE,
        lowest=quantity(min(values), "B/s") if values else "",
        paths=tuple(_paths(len(hosts), len(hosts), cells)) if len(hosts) <= MAX_HOSTS else (),
        rail_names=tuple(clean(name) for name in names),
        rail_paths=tuple(_rail_paths(indexes, names, gang_rates)) if len(names) > 1 and len(hosts) <= MAX_HOSTS else (),
        slowest=tuple(_slow_pair(*item, median) for item in slowest[:_MAX_SLOWEST]),
    )


def _natural(rail: str) -> tuple[int, str]:
    """Return a key that sorts `9` before `10`."""
    return len(rail), rail


def _rail_paths(
    indexes: Mapping[str, int], names: Sequence[str], rates: Mapping[HostPair, Rates]
) -> Iterable[tuple[str, str]]:
    """Return the paths of a picture in which each cell shows the rate of the fastest pair of a host on a rail.

    A cell is slow only if all pairs of the host are slow on the rail. So a single slow cell points to a NIC, a slow row to a
    rail, and a slow column to a host.
    """
    best: dict[tuple[int, int], float | None] = {}
    for pair, of_pair in rates.items():
        for host in pair:
            for rail, value in of_pair.items():
                cell = names.index(rail), indexes[host]
                known = best.get(cell)
                best[cell] = known if value is None else max(value, known or 0.0)
    values = [value for value in best.values() if value is not None]
    median = statistics.median(values) if values else 0.0
    return _paths(len(names), len(indexes), {cell: _band(value, median) for cell, value in best.items()})


def _slow_pair(value: float, pair: HostPair, rail: str, median: float) -> SlowPair:
    first, second = ((clean(host), host_anchor(host)) for host in pair)
    share = f"{100 * value / median:.0f} %" if median else ""
    return SlowPair(ends=(first, second), rail=rail, text=quantity(value, "B/s"), share=share)


def _band(value: float | None, median: float) -> str:
    """Return the CSS class of a rate: `b0` (below half of the median) to `b4` (normal); `lost` if it could not be measured."""
    if value is None:
        return "lost"
    share = value / median if median else 0.0
    return f"b{sum(share >= end for end in BANDS)}"


def _paths(rows: int, columns: int, cells: Mapping[tuple[int, int], str]) -> Iterable[tuple[str, str]]:
    """Return CSS class and SVG path of each color. Adjacent cells of a row that have the same color are one rectangle."""
    paths: dict[str, list[str]] = {}
    for row in range(rows):
        column = 0
        while column < columns:
            css, first = cells.get((row, column), ""), column
            while column < columns and cells.get((row, column), "") == css:
                column += 1
            if css:
                width = column - first
                paths.setdefault(css, []).append(f"M{first} {row}h{width}v1h-{width}z")
    return [(css, "".join(path)) for css, path in sorted(paths.items())]


def host_pairs(host: HostReport) -> dict[str, Any]:
    """Return the matrix of one host; empty if the host has no observation of a pair.

    `partners` and `rails` are the heads of its rows and columns, and `median` is its median rate as text. `rates` has a list for
    each partner, with one rate in GB/s per rail. A rate that was not measured is None. `bands` has a text for each partner, with
    one character per rail: the last character of the CSS class (`_band`), or `-` if there is no observation.
    """
    by_partner: dict[str, dict[str, float | None]] = {}
    for rail, partner, observation in _pairs_of(host):
        by_partner.setdefault(clean(partner), {})[clean(rail)] = measured_number(observation)
    if not by_partner:
        return {}
    values = [value for rates in by_partner.values() for value in rates.values() if value is not None]
    median = statistics.median(values) if values else 0.0
    rails = sorted({rail for rates in by_partner.values() for rail in rates}, key=_natural)
    return {
        "partners": list(by_partner),
        "rails": rails,
        "median": quantity(median, "B/s") if values else NONE,
        "rates": [
            [round(value / 1e9, 2) if (value := rates.get(rail)) is not None else None for rail in rails]
            for rates in by_partner.values()
        ],
        "bands": [
            "".join(_band(rates[rail], median)[-1] if rail in rates else "-" for rail in rails)
            for rates in by_partner.values()
        ],
    }
