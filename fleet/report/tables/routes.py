"""How the ranks talked: NCCL's transport, NVLS, channels and choices, and what small messages cost with and without a graph."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from fleet.quantities import NONE, finite, quantity, size
from fleet.report.tables.figure import Cell, Row, Table
from fleet.report.tables.places import scope_name
from schemas.catalogue import BENCHMARKS
from schemas.records import MEASURED, Observation, Value
from schemas.reports import FleetReport
from schemas.scopes import Scope

_KINDS = ("transport", "nvls", "channels")
_FEW = 6


@dataclass(frozen=True, kw_only=True)
class Route:
    """One way of talking, and who talked so."""

    where: str
    transport: str
    nvls: str
    channels: str
    choices: str
    """`RING/SIMPLE: all_gather, broadcast`: algorithm and protocol at the largest size of each operation."""


def routes(report: FleetReport) -> list[Route]:
    """A line for each way of talking, with the hosts and gangs that talked so."""
    found: dict[tuple[str, ...], list[str]] = {}
    for place, seen in _places(report).items():
        told = {item.name.rpartition(".")[2]: item for item in seen if item.name.rpartition(".")[2] in _KINDS}
        choices = _choices(seen)
        if told or choices:
            key = (*(_text(told.get(kind)) for kind in _KINDS), choices)
            found.setdefault(key, []).append(place)
    return [
        Route(where=_where(places), transport=key[0], nvls=key[1], channels=key[2], choices=key[3])
        for key, places in found.items()
    ]


def _where(places: Sequence[str]) -> str:
    more = f" and {len(places) - _FEW} more" if len(places) > _FEW else ""
    return ", ".join(places[:_FEW]) + more


def _text(seen: Observation | None) -> str:
    if seen is None:
        return NONE
    return quantity(seen.value, seen.unit) if seen.status == MEASURED else f"{seen.status}: {seen.reason}"


def _places(report: FleetReport) -> dict[str, list[Observation]]:
    """Host, or gang, -> what its ranks observed of collectives; what a gang did each member tells, and it is told once."""
    found: dict[str, dict[tuple[str, tuple[tuple[str, Value], ...]], Observation]] = {}
    for host in report.hosts:
        for seen in host.measurements:
            if seen.name.startswith("collective."):
                gang = Scope.parse(seen.scope).is_gang
                place = scope_name(seen.scope) if gang else host.name
                place = place if gang or seen.stage == "benchmark" else f"{place}, {seen.stage}"
                found.setdefault(place, {})[(seen.name, tuple(seen.params.items()))] = seen
    return {place: list(items.values()) for place, items in found.items()}


def _choices(seen: Sequence[Observation]) -> str:
    largest: dict[tuple[str, Value], tuple[float, str]] = {}
    for item in seen:
        key, message = (item.name.split(".")[1], item.params.get("placement")), finite(item.params.get("size_bytes"))
        chosen = [str(item.params[name]) for name in ("algorithm", "protocol") if item.params.get(name)]
        if item.name.endswith(".busbw") and message and chosen and message >= largest.get(key, (0.0, ""))[0]:
            largest[key] = (message, "/".join(chosen))
    groups: dict[str, dict[str, None]] = {}
    for (op, _), (_, text) in largest.items():
        groups.setdefault(text, {})[op] = None
    return "; ".join(f"{text}: {', '.join(ops)}" for text, ops in groups.items())


def latencies(report: FleetReport) -> list[Table]:
    """Small messages, launched one by one and in a CUDA graph: within hosts and between them, medians over the places."""
    tables = []
    for gang, caption in ((False, "Latency within each host"), (True, "Latency between hosts")):
        table = _latency(caption, [items for place, items in _places(report).items() if _is_gang(items) == gang])
        if table:
            tables.append(table)
    return tables


def _is_gang(seen: Sequence[Observation]) -> bool:
    return Scope.parse(seen[0].scope).is_gang


def _latency(caption: str, places: Sequence[Sequence[Observation]]) -> Table | None:
    graphs = _by_op(places, "graph_latency")
    launched = _by_op(places, "latency")
    sizes = sorted({message for found in graphs.values() for message in found})
    if not sizes:
        return None
    order = {str(op): number for number, op in enumerate(BENCHMARKS["collective"].settings["ops"])}
    many = f", medians of {len(places)}" if len(places) > 1 else ""
    return Table(
        caption=f"{caption}{many}: launched one by one, then in a CUDA graph",
        groups=tuple((size(message), 2) for message in sizes),
        columns=("launched", "graph") * len(sizes),
        rows=tuple(
            Row(
                head=op.replace("_", " "),
                note="",
                cells=tuple(
                    Cell(text=_median(found.get(op, {}).get(message, ())))
                    for message in sizes
                    for found in (launched, graphs)
                ),
            )
            for op in sorted(graphs, key=lambda op: (order.get(op, len(order)), op))
        ),
    )


def _by_op(places: Sequence[Sequence[Observation]], kind: str) -> dict[str, dict[int, list[float]]]:
    found: dict[str, dict[int, list[float]]] = {}
    for seen in places:
        for item in seen:
            message, value = finite(item.params.get("size_bytes")), finite(item.value)
            _, op, name, *_ = [*item.name.split("."), "", ""]
            if name == kind and message and value is not None and item.status == MEASURED:
                found.setdefault(op, {}).setdefault(int(message), []).append(value)
    return found


def _median(values: Sequence[float]) -> str:
    return quantity(statistics.median(values), "s") if values else NONE
