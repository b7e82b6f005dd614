"""Describe how ranks communicate: NCCL's transport, NVLS, channels, algorithms, and the latency of small messages."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from fleet.quantities import NONE, finite, quantity, size
from fleet.report.formatting import join_names
from fleet.report.tables.figure import Table, TableCell, TableRow, rank_group
from schemas.catalogue import BENCHMARKS
from schemas.records import MEASURED, Observation, Value
from schemas.reports import FleetReport
from schemas.scopes import Scope

_KINDS = ("transport", "nvls", "channels")
_MAX_NAMES = 6


@dataclass(frozen=True, kw_only=True)
class CommunicationPath:
    """One combination of transport, NVLS, channels and algorithms, and the hosts and gangs that used it."""

    used_by: str
    transport: str
    nvls: str
    channels: str
    algorithms: str
    """`RING/SIMPLE: all_gather, broadcast`: algorithm and protocol, then the operations that used them at their largest size."""


def communication_paths(report: FleetReport) -> list[CommunicationPath]:
    """Return each combination of transport, NVLS, channels and algorithms, with the hosts and gangs that used it."""
    users: dict[tuple[str, ...], list[str]] = {}
    for user, observations in _by_user(report).items():
        suffixes = ((item.name.rpartition(".")[2], item) for item in observations)
        kinds = {suffix: item for suffix, item in suffixes if suffix in _KINDS}
        algorithms = _algorithms(observations)
        if kinds or algorithms:
            key = (*(_text(kinds.get(kind)) for kind in _KINDS), algorithms)
            users.setdefault(key, []).append(user)
    return [
        CommunicationPath(
            used_by=join_names(names, _MAX_NAMES), transport=key[0], nvls=key[1], channels=key[2], algorithms=key[3]
        )
        for key, names in users.items()
    ]


def _text(observation: Observation | None) -> str:
    if observation is None:
        return NONE
    if observation.status != MEASURED:
        return f"{observation.status}: {observation.reason}"
    return quantity(observation.value, observation.unit)


def _by_user(report: FleetReport) -> dict[str, list[Observation]]:
    """Return host or gang (the hosts of one multi-node launch) -> its observations of collective operations.

    All hosts of a gang report the same observations. The gang has each of them once.
    """
    users: dict[str, dict[tuple[str, tuple[tuple[str, Value], ...]], Observation]] = {}
    for host in report.hosts:
        for item in host.measurements:
            if item.name.startswith("collective."):
                user = rank_group(host.name, item).label()
                users.setdefault(user, {})[(item.name, tuple(item.params.items()))] = item
    return {user: list(items.values()) for user, items in users.items()}


def _is_gang(item: Observation) -> bool:
    return Scope.parse(item.scope).is_gang


def _algorithms(observations: Sequence[Observation]) -> str:
    largest: dict[tuple[str, Value], tuple[float, str]] = {}
    for item in observations:
        key, message = (item.name.split(".")[1], item.params.get("placement")), finite(item.params.get("size_bytes"))
        names = [str(item.params[name]) for name in ("algorithm", "protocol") if item.params.get(name)]
        if item.name.endswith(".busbw") and message and names and message >= largest.get(key, (0.0, ""))[0]:
            largest[key] = (message, "/".join(names))
    operations: dict[str, dict[str, None]] = {}
    for (op, _), (_, text) in largest.items():
        operations.setdefault(text, {})[op] = None
    return "; ".join(f"{text}: {', '.join(ops)}" for text, ops in operations.items())


def latencies(report: FleetReport) -> list[Table]:
    """Return a table of latencies within hosts and one between hosts, for operations launched one by one and in a CUDA graph.

    The tables have only the message sizes that were measured in a CUDA graph. A table without such sizes is left out.
    """
    groups = list(_by_user(report).values())
    tables = (
        _latency_table("Latency within each host", [items for items in groups if not _is_gang(items[0])]),
        _latency_table("Latency between hosts", [items for items in groups if _is_gang(items[0])]),
    )
    return [table for table in tables if table]


def _latency_table(caption: str, groups: Sequence[Sequence[Observation]]) -> Table | None:
    launched, in_graph = _by_operation(groups, "latency"), _by_operation(groups, "graph_latency")
    sizes = sorted({message for by_size in in_graph.values() for message in by_size})
    if not sizes:
        return None
    order = {str(op): number for number, op in enumerate(BENCHMARKS["collective"].settings["ops"])}
    medians = f", medians over {len(groups)} groups of ranks" if len(groups) > 1 else ""
    return Table(
        caption=f"{caption}{medians}: launched one by one, and in a CUDA graph",
        groups=tuple((size(message), 2) for message in sizes),
        columns=("launched", "graph") * len(sizes),
        rows=tuple(
            TableRow(
                head=op.replace("_", " "),
                note="",
                cells=tuple(
                    TableCell(text=_median(values.get(op, {}).get(message, ())))
                    for message in sizes
                    for values in (launched, in_graph)
                ),
            )
            for op in sorted(in_graph, key=lambda op: (order.get(op, len(order)), op))
        ),
    )


def _by_operation(groups: Sequence[Sequence[Observation]], kind: str) -> dict[str, dict[int, list[float]]]:
    """Return operation -> message size in bytes -> measured values of `kind` in seconds, over all groups of ranks."""
    values: dict[str, dict[int, list[float]]] = {}
    for item in (item for items in groups for item in items):
        message, value = finite(item.params.get("size_bytes")), finite(item.value)
        _, op, name, *_ = [*item.name.split("."), "", ""]
        if name == kind and message and value is not None and item.status == MEASURED:
            values.setdefault(op, {}).setdefault(int(message), []).append(value)
    return values


def _median(values: Sequence[float]) -> str:
    return quantity(statistics.median(values), "s") if values else NONE
