"""Every ordered pair of a host's GPUs: how fast one copies to the other, over which link, and whether it may at all."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from fleet.quantities import NONE, finite, number, quantity
from fleet.report.tables.figure import TIMED_OUT, shown
from schemas.records import MEASURED, Observation
from schemas.reports import FAIL, FleetReport, HostReport
from schemas.scopes import Scope

HEATS = 5
_NAMES = ("peer_copy.bandwidth", "peer_copy.access", "peer_copy.latency")

Pair = tuple[int, int]


@dataclass(frozen=True, kw_only=True)
class Square:
    """One pair: GB/s, and what more is known of it."""

    text: str
    note: str
    css: str
    """`heat1` … `heat5`, slowest to fastest of the fleet; `fail` where a criterion failed it; empty on the diagonal."""


@dataclass(frozen=True, kw_only=True)
class Layer:
    """One quantity of all pairs."""

    caption: str
    rows: tuple[tuple[Square, ...], ...]


@dataclass(frozen=True, kw_only=True)
class Matrix:
    """The pairs of one host: rows copy from, columns to."""

    host: str
    devices: tuple[int, ...]
    rows: tuple[tuple[Square, ...], ...]
    layers: tuple[Layer, ...] = ()
    """The same as pictures: one way, both ways, latency."""
    link: str = ""
    """`NV18 between all of them`, or what is odd."""


@dataclass(frozen=True, kw_only=True)
class Peers:
    """The matrices of the hosts that are told one by one, and the span over all pairs of the fleet."""

    pairs: int
    span: str
    matrices: tuple[Matrix, ...]


def peers(report: FleetReport) -> Peers:
    """What was measured between the GPUs of each host; without matrices where nothing was."""
    speeds = [
        value
        for host in report.hosts
        for seen in host.measurements
        if seen.name == "peer_copy.bandwidth" and _direction(seen) == "one_way" and (value := _value(seen)) is not None
    ]
    if not speeds:
        return Peers(pairs=0, span="", matrices=())
    low, middle, high = (quantity(of, "B/s") for of in (min(speeds), statistics.median(speeds), max(speeds)))
    failed = {
        (verdict.host, verdict.scope)
        for verdict in report.verdicts
        if verdict.verdict == FAIL and verdict.name in _NAMES
    }
    ends = (min(speeds), max(speeds))
    found = (_matrix(host, ends, {scope for name, scope in failed if name == host.name}) for host in shown(report))
    return Peers(
        pairs=len(speeds),
        span=f"lowest {low}, median {middle}, highest {high}",
        matrices=tuple(matrix for matrix in found if matrix.devices),
    )


def _direction(seen: Observation) -> str:
    return str(seen.params.get("direction", ""))


def _value(seen: Observation) -> float | None:
    return finite(seen.value) if seen.status == MEASURED else None


def _matrix(host: HostReport, ends: tuple[float, float], failed: set[str]) -> Matrix:
    found: dict[Pair, dict[str, Observation]] = {}
    for seen in host.measurements:
        pair = _pair(seen.scope) if seen.name in _NAMES else None
        if pair:
            kind = seen.name.partition(".")[2]
            found.setdefault(pair, {})[f"{kind} {_direction(seen)}".strip()] = seen
    devices = tuple(sorted({index for pair in found for index in pair}))
    rows = (
        tuple(_square((source, target), found.get((source, target), {}), host, ends, failed) for target in devices)
        for source in devices
    )
    return Matrix(
        host=host.name,
        devices=devices,
        rows=tuple(rows),
        layers=tuple(_layers(found, devices, failed)),
        link=_link(found, host.links),
    )


_LAYERS = (
    ("bandwidth one_way", "One way, GB/s", 1e9),
    ("bandwidth both_ways", "Both ways, GB/s", 1e9),
    ("latency", "Latency, µs", 1e-6),
)


def _layers(
    found: Mapping[Pair, Mapping[str, Observation]], devices: Sequence[int], failed: set[str]
) -> Iterator[Layer]:
    """A picture of each quantity that was measured, its colours by the fastest of the host; of latency none is good."""
    for kind, caption, factor in _LAYERS:
        seen = {pair: kinds[kind] for pair, kinds in found.items() if kind in kinds}
        values = [value for item in seen.values() if (value := _value(item)) is not None]
        ends = (min(values, default=0.0), max(values, default=0.0))
        rows = (tuple(_cell((a, b), seen.get((a, b)), ends, factor, failed) for b in devices) for a in devices)
        if values:
            yield Layer(caption=caption, rows=tuple(rows))


def _cell(pair: Pair, seen: Observation | None, ends: tuple[float, float], factor: float, failed: set[str]) -> Square:
    if pair[0] == pair[1] or seen is None:
        return Square(text="" if pair[0] == pair[1] else NONE, note="", css="")
    value = _value(seen)
    if value is None:
        return Square(text=seen.status, note="", css="inconclusive")
    heat = "" if seen.name.endswith("latency") else _heat(value, ends)
    css = FAIL if f"gpu={pair[0]},peer={pair[1]}" in failed and not seen.name.endswith("latency") else heat
    return Square(text=number(value / factor, 3), note="", css=css)


def _link(found: Mapping[Pair, Mapping[str, Observation]], links: Mapping[str, str]) -> str:
    """How the pairs are linked, and where none may reach the other."""
    kinds = Counter(link for (a, b) in found if (link := links.get(f"gpu={a},peer={b}", "")))
    barred = [pair for pair, seen in found.items() if (access := seen.get("access")) and access.value is False]
    told = [f"{link} between {'all of them' if len(kinds) == 1 else f'{count} pairs'}" for link, count in kinds.items()]
    told += [f"no access: {', '.join(f'GPU {a} to GPU {b}' for a, b in barred[:4])}"] if barred else []
    return "; ".join(told)


def _pair(scope: str) -> Pair | None:
    """`gpu=0,peer=1` as (0, 1)."""
    ends = (Scope.parse(scope).get("gpu"), Scope.parse(scope).get("peer"))
    return (
        (int(ends[0]), int(ends[1])) if all(end.isascii() and end.isdigit() and len(end) < 6 for end in ends) else None
    )


def _square(
    pair: Pair, seen: Mapping[str, Observation], host: HostReport, ends: tuple[float, float], failed: set[str]
) -> Square:
    if pair[0] == pair[1]:
        return Square(text="", note="", css="")
    scope = f"gpu={pair[0]},peer={pair[1]}"
    speed = seen.get("bandwidth one_way")
    value = _value(speed) if speed else None
    text = number(value / 1e9) if value is not None else (speed.status if speed else NONE)
    if speed and speed.samples and speed.samples.stopped == "time":
        text += TIMED_OUT
    css = FAIL if scope in failed else (_heat(value, ends) if value is not None else "inconclusive")
    return Square(text=text, note=", ".join(_notes(seen, host.links.get(scope, ""))), css=css)


def _notes(seen: Mapping[str, Observation], link: str) -> Sequence[str]:
    """Link, that there is no access, the rate both ways, latency."""
    access, both, latency = (seen.get(kind) for kind in ("access", "bandwidth both_ways", "latency"))
    notes = [link] if link else []
    if access and access.value is False:
        notes.append("no access")
    if both and (value := _value(both)) is not None:
        notes.append(f"{number(value / 1e9)} both ways")
    if latency and _value(latency) is not None:
        notes.append(quantity(latency.value, "s", 2))
    return notes


def _heat(value: float, ends: tuple[float, float]) -> str:
    """By the fleet's fastest pair: noise of a few percent is one colour, a pair at half the rate another."""
    share = value / ends[1] if ends[1] else 0.0
    return f"heat{max(1, min(HEATS, 1 + int(share * HEATS * 0.999)))}"
