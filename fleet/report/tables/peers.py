"""Show the copies between the GPUs of a host as matrices, with a cell for each ordered pair of GPUs.

The figures are bandwidth, latency, link, and whether one GPU can access the memory of the other (peer access).
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from fleet.quantities import counted, measured_number, number, quantity
from fleet.report.tables.figure import EMPTY, TIMED_OUT, TableCell, detailed_hosts
from schemas.records import Observation
from schemas.reports import FAIL, FleetReport, HostReport, Verdict
from schemas.scopes import Scope

HEAT_CLASSES = 5
"""Number of CSS classes: from `heat1` for the slowest pairs to `heat5` for the fastest."""
_NAMES = ("peer_copy.bandwidth", "peer_copy.access", "peer_copy.latency")
_ONE_WAY, _BOTH_WAYS, _LATENCY, _ACCESS = "bandwidth one_way", "bandwidth both_ways", "latency", "access"
_LAYERS = (
    (_ONE_WAY, "One way, GB/s", 1e9),
    (_BOTH_WAYS, "Both ways, GB/s", 1e9),
    (_LATENCY, "Latency, µs", 1e-6),
)
_MAX_DENIED = 4

Pair = tuple[int, int]
Readings = Mapping[str, Observation]
"""The observations of one pair of GPUs: kind of figure (`_kind`) -> observation."""
Failures = set[tuple[str, str]]
"""For each figure that fails a criterion: its kind (`_kind`), and the scope of the pair of GPUs."""
Cells = tuple[tuple[TableCell, ...], ...]


@dataclass(frozen=True, kw_only=True)
class Layer:
    """One figure of all pairs."""

    caption: str
    rows: Cells


@dataclass(frozen=True, kw_only=True)
class PeerMatrix:
    """The pairs of GPUs of one host. A row is the GPU that is copied from, a column the GPU that is copied to."""

    host: str
    devices: tuple[int, ...]
    rows: Cells
    """A cell has the bandwidth one way in GB/s; its note has the other figures of the pair."""
    layers: tuple[Layer, ...]
    """The bandwidths and the latency, each as a matrix of its own."""
    link: str
    """`NV18 between all GPUs`, or each kind of link with its number of pairs; then the pairs without peer access."""


@dataclass(frozen=True, kw_only=True)
class Peers:
    """The matrices of the hosts that the report shows one by one (`detailed_hosts`), and the range over the whole fleet."""

    pairs: int
    """Number of pairs with a measured bandwidth one way, over all hosts."""
    range: str
    """Lowest, median and highest bandwidth one way of these pairs, in words."""
    matrices: tuple[PeerMatrix, ...]


def peers(report: FleetReport) -> Peers:
    """Return the measurements between the GPUs of each host."""
    speeds = [
        value
        for host in report.hosts
        for item in host.measurements
        if _kind(item) == _ONE_WAY and (value := measured_number(item)) is not None
    ]
    if not speeds:
        return Peers(pairs=0, range="", matrices=())
    low, median, high = (quantity(value, "B/s") for value in (min(speeds), statistics.median(speeds), max(speeds)))
    failed: dict[str, Failures] = {}
    for verdict in report.verdicts:
        if verdict.verdict == FAIL and (kind := _kind(verdict)):
            failed.setdefault(verdict.host, set()).add((kind, verdict.scope))
    matrices = (_matrix(host, max(speeds), failed.get(host.name, set())) for host in detailed_hosts(report))
    return Peers(
        pairs=len(speeds),
        range=f"lowest {low}, median {median}, highest {high}",
        matrices=tuple(matrix for matrix in matrices if matrix.devices),
    )


def _kind(item: Observation | Verdict) -> str:
    """Return the kind of figure, such as `bandwidth one_way`; empty for a figure of another benchmark."""
    return f"{item.name.partition('.')[2]} {item.params.get('direction', '')}".strip() if item.name in _NAMES else ""


def _matrix(host: HostReport, fastest: float, failed: Failures) -> PeerMatrix:
    readings: dict[Pair, dict[str, Observation]] = {}
    for item in host.measurements:
        if (kind := _kind(item)) and (pair := _pair(item.scope)):
            readings.setdefault(pair, {})[kind] = item
    devices = tuple(sorted({index for pair in readings for index in pair}))
    rows = (
        tuple(_cell((source, target), readings.get((source, target), {}), host, fastest, failed) for target in devices)
        for source in devices
    )
    return PeerMatrix(
        host=host.name,
        devices=devices,
        rows=tuple(rows),
        layers=tuple(_layers(readings, devices, failed)),
        link=_link(readings, host.links),
    )


def _layers(readings: Mapping[Pair, Readings], devices: Sequence[int], failed: Failures) -> Iterator[Layer]:
    """Yield a matrix for each figure in _LAYERS that was measured. Bandwidths are colored relative to the host's highest."""
    for kind, caption, factor in _LAYERS:
        items = {pair: of_pair[kind] for pair, of_pair in readings.items() if kind in of_pair}
        values = [value for item in items.values() if (value := measured_number(item)) is not None]
        if values:
            rows = (
                tuple(_layer_cell((a, b), items.get((a, b)), max(values), factor, failed) for b in devices)
                for a in devices
            )
            yield Layer(caption=caption, rows=tuple(rows))


def _layer_cell(pair: Pair, item: Observation | None, fastest: float, factor: float, failed: Failures) -> TableCell:
    if pair[0] == pair[1]:
        return TableCell(text="")
    if item is None:
        return EMPTY
    value = measured_number(item)
    if value is None:
        return TableCell(text=item.status, css="inconclusive")
    kind = _kind(item)
    css = "" if kind == _LATENCY else _heat(value, fastest)  # the heat classes are for bandwidths: more is better
    return TableCell(text=number(value / factor, 3), css=FAIL if (kind, _scope(pair)) in failed else css)


def _link(readings: Mapping[Pair, Readings], links: Mapping[str, str]) -> str:
    counts = Counter(link for pair in readings if (link := links.get(_scope(pair), "")))
    denied = [pair for pair, of_pair in readings.items() if (item := of_pair.get(_ACCESS)) and item.value is False]
    texts = [
        f"{link} between {'all GPUs' if count == len(readings) else counted(count, 'pair')}"
        for link, count in counts.items()
    ]
    pairs = ", ".join(f"GPU {source} to GPU {target}" for source, target in denied[:_MAX_DENIED])
    pairs += f" and {len(denied) - _MAX_DENIED} more" if len(denied) > _MAX_DENIED else ""
    return "; ".join([*texts, *([f"no access: {pairs}"] if denied else [])])


def _scope(pair: Pair) -> str:
    return f"gpu={pair[0]},peer={pair[1]}"


def _pair(scope: str) -> Pair | None:
    """Return `gpu=0,peer=1` as (0, 1); None if the scope does not name two GPUs by their index."""
    ends = (Scope.parse(scope).get("gpu"), Scope.parse(scope).get("peer"))
    valid = all(end.isascii() and end.isdigit() and len(end) < 6 for end in ends)
    return (int(ends[0]), int(ends[1])) if valid else None


def _cell(pair: Pair, readings: Readings, host: HostReport, fastest: float, failed: Failures) -> TableCell:
    """Return the bandwidth one way, with the other figures as the note. The cell is marked as failed if any figure fails.

    `fastest` is the highest bandwidth one way of the fleet.
    """
    if pair[0] == pair[1]:
        return TableCell(text="")
    speed = readings.get(_ONE_WAY)
    value = measured_number(speed) if speed else None
    text = number(value / 1e9) if value is not None else (speed.status if speed else EMPTY.text)
    if speed and speed.samples and speed.samples.stopped == "time":
        text += TIMED_OUT
    is_failed = any((kind, _scope(pair)) in failed for kind in (_ONE_WAY, _BOTH_WAYS, _LATENCY, _ACCESS))
    css = FAIL if is_failed else (_heat(value, fastest) if value is not None else "inconclusive")
    return TableCell(text=text, note=", ".join(_notes(readings, host.links.get(_scope(pair), ""))), css=css)


def _notes(readings: Readings, link: str) -> Sequence[str]:
    """Return the notes of a cell: link, `no access`, bandwidth both ways, latency. Unknown figures are left out."""
    access, both, latency = (readings.get(kind) for kind in (_ACCESS, _BOTH_WAYS, _LATENCY))
    notes = [link] if link else []
    if access and access.value is False:
        notes.append("no access")
    if both and (value := measured_number(both)) is not None:
        notes.append(f"{number(value / 1e9)} both ways")
    if latency and measured_number(latency) is not None:
        notes.append(quantity(latency.value, "s", 2))
    return notes


def _heat(value: float, fastest: float) -> str:
    """Return the CSS class of a bandwidth. Each class covers a fifth of the range from 0 to `fastest`.

    So small differences rarely change the color.
    """
    share = value / fastest if fastest else 0.0
    return f"heat{max(1, min(HEAT_CLASSES, 1 + int(share * HEAT_CLASSES * 0.999)))}"
