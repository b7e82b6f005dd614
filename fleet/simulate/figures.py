"""What the benchmarks of a stage would have measured: an observation with a slot for each that the plan expects."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from fleet.simulate.assumed import GANG_LATENCY_S, GANG_SHARE, GANG_SPREAD, SCALING, WITH_NVLS
from fleet.simulate.measured import Measured, between, levels, shortened
from fleet.simulate.template import GANG, HOST, Cell, Slot
from schemas.catalogue import BENCHMARKS, DURATION, Expectation, possible, settings
from schemas.plans import Plan, PlannedHost
from schemas.stages import GANG as GANG_STAGE

Doc = dict[str, Any]
LARGE = 1 << 20
"""Bytes from which on bandwidth and not latency says how long a collective takes."""
NVLS_RANKS = 8
_SHUFFLED = {"stress.flop_per_cycle": 1, "stress.power": 2, "stress.temperature": 3}
"""Figures whose best GPU may not be the best in throughput."""
_GROWS, _SHRINKS = ("throughput", "flops"), ("duration", "save_time", "restore_time")
"""With the ranks, last parts of what a world measures together."""


@dataclass(frozen=True, kw_only=True)
class Crowd:
    """The devices that measure together."""

    stage: str
    ranks: int
    per_host: int
    """Of them, on each host."""
    partners: int = 0
    """Hosts of the gang that this one meets."""


def observations(measured: Measured, plan: Plan, host: PlannedHost, crowd: Crowd) -> Iterator[Doc]:
    """Everything that a host in order measures in a stage, in the order in which the benchmarks run."""
    for item in plan.expected_of(host):
        if item.stage != crowd.stage or not possible(item.name, crowd.ranks):
            continue
        for scope, group in _scopes(plan, host, item, crowd):
            for content in _contents(measured, plan, host, item, crowd):
                yield {"name": item.name, "scope": scope, "stage": item.stage, **content(group)}


def _scopes(plan: Plan, host: PlannedHost, item: Expectation, crowd: Crowd) -> Iterator[tuple[Any, str]]:
    """Where it is measured, and what its draw hangs on."""
    group = _group(item)
    if item.scope == "peers":
        for partner in range(crowd.partners):
            for scope in host.scopes:
                yield Cell(f"partner{partner}", f'"{scope},partner=%s"'), f"{scope}/{partner}/{group}"
    elif item.scope == "world" and item.stage == GANG_STAGE:
        yield Cell("gang", '"gang=%s"'), group
    else:
        for scope in plan.scopes_of(host, item):
            yield scope, f"{scope}/{group}"


def _group(item: Expectation) -> str:
    """What is drawn together: the figures of one load, of one operation, of one training."""
    first, second = item.name.split(".")[:2]
    if first == "stress":
        return first
    if first == "collective":
        return f"{first}/{second}/{item.params.get('placement', '')}"
    if item.scope == "world":
        return f"{first}/{sorted(item.params.items())}"
    return f"{item.name}/{sorted(item.params.items())}"


def _contents(measured: Measured, plan: Plan, host: PlannedHost, item: Expectation, crowd: Crowd) -> Iterator[Any]:
    """For each figure that answers: group -> unit, status, params and value."""
    whose = GANG if item.scope == "world" and item.stage == GANG_STAGE else HOST
    if item.name.startswith("collective.") and item.name.count(".") == 2:
        params, unit, texts = _collective(measured, item, crowd, host.fabric_gbps)
        yield _content(params, unit, texts, whose)
        return
    benchmark = str(item.params.get("benchmark")) if item.name == DURATION.name else item.name.split(".")[0]
    chosen = (
        settings(benchmark, plan.stage(item.stage).benchmarks.get(benchmark, {})) if benchmark in BENCHMARKS else {}
    )
    for figure in _told(measured, item, crowd):
        params = {key: chosen[key] if _single(chosen.get(key)) else value
                  for key, value in figure.get("params", {}).items()}  # fmt: skip
        params |= dict(item.params)
        if item.scope == "world" or benchmark in ("transformer",):
            params["world_size"] = crowd.ranks
        yield _content(params, figure["unit"], _texts(measured, figure, item, crowd), whose)


def _told(measured: Measured, item: Expectation, group: Crowd) -> Sequence[Mapping[str, Any]]:
    """The figures that answer an expectation; what no data file need hold is said here."""
    if item.name == DURATION.name and not any(
        figure["params"].get("benchmark") == item.params.get("benchmark") for figure in measured.figures[DURATION.name]
    ):
        return [{"unit": "s", "value": 5.0, "params": dict(item.params)}]
    if item.name == "collective.nvls":
        return [{"unit": "1", "value": has_nvls(group)}]
    if item.name == "collective.transport" and group.stage == GANG_STAGE:
        return [{"unit": "1", "value": "NET/IB"}]
    return measured.of(item)


def _single(value: Any) -> bool:
    return isinstance(value, int | float | str) and not isinstance(value, bool)


def _content(params: Doc, unit: str, texts: Sequence[str] | str, whose: str) -> Any:
    """Group -> the rest of an observation."""
    given = {"unit": unit, "status": "measured", **({"params": params} if params else {})}
    if isinstance(texts, str):
        return lambda _group: {**given, **json.loads(f"{{{texts}}}")}
    return lambda group: {**given, "**": Slot(texts=texts, group=group, whose=whose)}


def _texts(measured: Measured, figure: Mapping[str, Any], item: Expectation, group: Crowd) -> Sequence[str] | str:
    """The members `value` and `samples`: one text, or one for each level."""
    if "value" in figure:
        return f'"value":{json.dumps(figure["value"])}'
    if item.name in ("stress.clock", "stress.efficiency"):
        values = _derived(measured, item)
    else:
        values = levels(_grown(measured, figure["spread"], item, group), _SHUFFLED.get(item.name, 0))
        if item.scope == "world" and figure["unit"] == "s":
            values.reverse()  # a fast part takes little time
    return written(values, figure.get("samples"))


def _derived(measured: Measured, item: Expectation) -> list[float]:
    """What follows from others: clock = throughput / work in a cycle, efficiency = throughput / power."""
    other = "stress.flop_per_cycle" if item.name == "stress.clock" else "stress.power"
    above, below = ("stress.throughput", other)
    result = [
        levels(measured.of(Expectation(stage=item.stage, name=name, scope="device", params=item.params))[0]["spread"],
               _SHUFFLED.get(name, 0))
        for name in (above, below)
    ]  # fmt: skip
    return [one / two for one, two in zip(*result, strict=True)]


def _grown(measured: Measured, spread: Sequence[float], item: Expectation, group: Crowd) -> list[float]:
    """A figure of all ranks together, on another number of them than it was measured on: weak scaling, assumed."""
    doublings = math.log2(group.ranks / measured.measured_ranks)
    last = item.name.rpartition(".")[2]
    factor = 1.0
    if item.scope == "world" and item.name.split(".")[0] != "straggler":
        if last in _GROWS:
            factor = (2 * SCALING) ** doublings
        elif last == "step_time":
            factor = SCALING**-doublings
        elif last in _SHRINKS and item.name != DURATION.name:
            factor = (2 * SCALING) ** -doublings if item.name == "fashion_mnist.duration" else 1.0
    return [value * factor for value in spread]


def written(values: Sequence[float], samples: Mapping[str, Any] | None) -> list[str]:
    """The members `value` and `samples` for each value."""
    texts = shortened(values)
    if not samples:
        return [f'"value":{text}' for text in texts]
    rest = "".join(f',"{key}":{json.dumps(samples[key])}' for key in ("cv", "precision", "stopped") if key in samples)
    lows, highs = (shortened(value * samples[key] for value in values) for key in ("min", "max"))
    return [
        f'"value":{text},"samples":{{"n":{samples["n"]},"min":{low},"p50":{text},"max":{high}{rest}}}'
        for text, low, high in zip(texts, lows, highs, strict=True)
    ]


def has_nvls(group: Crowd) -> bool:
    """Whether NCCL would use NVLink SHARP: with the eight GPUs of a host it does; with our four it was off."""
    return group.stage != GANG_STAGE and group.ranks >= NVLS_RANKS


def _collective(
    measured: Measured, item: Expectation, group: Crowd, fabric_gbps: float
) -> tuple[Doc, str, Sequence[str] | str]:
    """Params, unit and texts of one figure of a collective operation."""
    _, op, kind = item.name.split(".")
    size, placement = (
        int(item.params["size_bytes"]),
        str(item.params.get("placement", "")),
    )
    curve = _curve(measured, op, placement, "graph_latency" if kind == "graph_latency" else "latency")
    params = {**dict(item.params), "world_size": group.ranks, **curve["params"]}
    if kind == "graph_latency":
        return params, "s", _latencies(measured, op, placement, kind, size, group, fabric_gbps)[1]
    between_hosts = group.stage == GANG_STAGE
    params |= {
        "transport": "NET/IB" if between_hosts else "P2P/CUMEM",
        "nvls": has_nvls(group),
        "algorithm": "NVLS" if has_nvls(group) and op in WITH_NVLS and size >= LARGE else _at(curve, "algorithm", size),
        "protocol": _at(curve, "protocol", size),
    }
    if kind == "wrong_elements":
        return params, "1", '"value":0'
    seconds, texts = _latencies(measured, op, placement, "latency", size, group, fabric_gbps)
    if kind == "latency":
        return params, "s", texts
    factor = bus_factor(curve["factor"], measured.measured_ranks, group.ranks) if kind == "busbw" else 1.0
    return params, "B/s", written([size * factor / value for value in seconds], None)


def _curve(measured: Measured, op: str, placement: str, kind: str) -> Mapping[str, Any]:
    """Return the curve of an operation, or of the nearest placement or graph that a record has."""
    tried = [(op, placement, kind), (op, "out_of_place", kind), (op, "in_place", kind), (op, placement, "latency"),
             (op, "out_of_place", "latency")]  # fmt: skip
    return next(measured.curves[key] for key in tried if key in measured.curves)


def _at(curve: Mapping[str, Any], key: str, size: int) -> str:
    index = sum(point[0] < size for point in curve["points"])
    values = [value for count, value in curve[key] for _ in range(count)]
    return str(values[min(index, len(values) - 1)])


def bus_factor(factor: float, measured_ranks: int, ranks: int) -> float:
    """Bus over algorithm bandwidth on so many ranks, from what it was on others: 2(n-1)/n, (n-1)/n, or no matter how many."""
    share = (measured_ranks - 1) / measured_ranks
    for times in (2.0, 1.0):
        if math.isclose(factor, times * share, rel_tol=1e-3):
            return times * (ranks - 1) / ranks
    return factor


@lru_cache(maxsize=4096)
def _cached(model: str, op: str, placement: str, kind: str, size: int, group: Crowd, fabric_gbps: float) -> Any:
    from fleet.simulate.measured import read

    measured = read(model)
    curve = _curve(measured, op, placement, kind)
    factor = bus_factor(curve.get("factor", 1.0), measured.measured_ranks, group.ranks)
    if group.stage == GANG_STAGE:
        # A fabric that the inventory does not name is taken for one of 400 Gb/s a GPU.
        bandwidth = (fabric_gbps or 400.0) * 1e9 / 8 * group.per_host * GANG_SHARE
        seconds = GANG_LATENCY_S * (0.6 if kind == "graph_latency" else 1.0) + size * factor / bandwidth
        spread = [seconds, seconds * (1 - GANG_SPREAD), seconds * (1 + GANG_SPREAD), seconds * GANG_SPREAD / 2]
    else:
        spread = between(curve["points"], size)
        if kind == "latency" and size >= LARGE and group.ranks != measured.measured_ranks:
            faster = WITH_NVLS.get(op, 1.0) if has_nvls(group) else 1.0
            spread = [value * factor / curve["factor"] / faster for value in spread]
    values = levels(spread)
    return values, written(values, curve.get("samples"))


def _latencies(
    measured: Measured, op: str, placement: str, kind: str, size: int, group: Crowd, fabric_gbps: float
) -> tuple[Sequence[float], Sequence[str]]:
    """Seconds at each level, and their texts."""
    result: tuple[Sequence[float], Sequence[str]] = _cached(
        measured.model, op, placement, kind, size, group, fabric_gbps
    )
    return result
