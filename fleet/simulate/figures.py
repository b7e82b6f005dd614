"""Make the observations that healthy hosts report: those that the plan expects, and those of each NUMA node.

A level is a number that states how good a part (such as a GPU) is, see `gpu_data`. The value of most observations depends on the
level of the part: the template of a record has a slot for the value, with one text for each level. When the template is rendered,
the levels of the slots are drawn at random, for each host or for its gang (the hosts of one multi-node launch).
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from fleet.simulate.assumptions import (
    DEFAULT_FABRIC_GBPS,
    GANG_LATENCY_S,
    GANG_SHARE,
    GANG_SPREAD,
    NVLS_SPEEDUP,
    SCALING_EFFICIENCY,
)
from fleet.simulate.gpu_data import GpuData, interpolate, json_numbers, read_gpu_data, values_by_level
from fleet.simulate.ports import VERBS, verbs_seconds
from fleet.simulate.template import GANG, HOST, Placeholder, Slot
from schemas.catalogue import BENCHMARKS, DURATION, Expectation, can_observe, settings
from schemas.plans import Plan, PlannedHost
from schemas.records import UNSUPPORTED
from schemas.stages import GANG as GANG_STAGE

Doc = dict[str, Any]
LARGE_BYTES = 1 << 20
"""A collective of at least this size is large: bandwidth, not latency, determines its duration."""
MIN_NVLS_RANKS = 8
"""Assumed minimum number of ranks on a host with which NCCL uses NVLink SHARP. NCCL did not use it on the four measured H200."""
_SHUFFLES = {"stress.flop_per_cycle": 1, "stress.power": 2, "stress.temperature": 3}
"""Figure -> seed that shuffles its values over the levels.

Without the shuffle, the GPU with the highest throughput would have the highest value of this figure too.
"""
HOST_COPIES = ("host_copy.bandwidth", "host_copy.wrong_bytes")
"""Figures with the parameter `devices`: how many GPUs of the host copied at the same time."""
_RATES = ("throughput", "flops")
"""A figure whose name ends with one of these words grows with the number of ranks, if all ranks measure it together."""


@dataclass(frozen=True, kw_only=True)
class SimulatedRanks:
    """The ranks of one launch."""

    stage: str
    ranks: int
    """Number of ranks on all hosts of the launch."""
    ranks_per_host: int
    partners: int = 0
    """Number of other hosts with which this host is measured in pairs."""


def healthy_observations(data: GpuData, plan: Plan, host: PlannedHost, group: SimulatedRanks) -> Iterator[Doc]:
    """Yield the observations of a healthy host in a stage, in the order in which the benchmarks run."""
    for expectation in plan.expected_of(host):
        if expectation.stage != group.stage or not can_observe(expectation.name, group.ranks):
            continue
        bodies = list(_bodies(data, plan, host, expectation, group))
        for scope, draw_group in _scopes(plan, host, expectation, group):
            for body in bodies:
                yield {"name": expectation.name, "scope": scope, "stage": expectation.stage, **body(draw_group)}
        if expectation.name == "host_memory.nodes":
            yield from _node_observations(data, expectation.stage, group)


def _node_observations(data: GpuData, stage: str, group: SimulatedRanks) -> Iterator[Doc]:
    """Yield the figures of the memory of each NUMA node. The plan does not list these figures."""
    nodes = range(int(data.figures["host_memory.nodes"][0]["value"]))
    for name in ("host_memory.bandwidth", "host_memory.latency", "host_memory.wrong_elements"):
        for figure in data.figures[name]:
            params = dict(figure.get("params", {}))
            expectation = Expectation(stage=stage, name=name, scope="numa", params=params)
            body = _body(params, figure["unit"], _member_texts(data, figure, expectation, group), HOST)
            for node in nodes:
                scope = f"numa={node}"
                yield {"name": name, "scope": scope, "stage": stage, **body(f"{scope}/{name}/{sorted(params.items())}")}


def _scopes(
    plan: Plan, host: PlannedHost, expectation: Expectation, group: SimulatedRanks
) -> Iterator[tuple[Any, str]]:
    """Yield each scope of an expectation, and the group of slots to which the value at this scope belongs."""
    draw_group = _draw_group(expectation)
    if expectation.scope == "peers":
        for partner in range(group.partners):
            for scope in host.scopes:
                yield Placeholder(f"partner{partner}", f'"{scope},partner=%s"'), f"{scope}/{partner}/{draw_group}"
    elif expectation.scope == "world" and expectation.stage == GANG_STAGE:
        yield Placeholder("gang", '"gang=%s"'), draw_group
    else:
        for scope in plan.scopes_of(host, expectation):
            yield scope, f"{scope}/{draw_group}"


def _draw_group(expectation: Expectation) -> str:
    """Return the name of a group of slots, without a scope. Slots of one group have the same level.

    These share a group:

    - all `stress` figures
    - the figures of one collective that have the same placement
    - of each other benchmark: the figures with the scope `world` that have the same parameters
    """
    first, second = expectation.name.split(".")[:2]
    if first == "stress":
        return first
    if first == "collective":
        return f"{first}/{second}/{expectation.params.get('placement', '')}"
    if expectation.scope == "world":
        return f"{first}/{sorted(expectation.params.items())}"
    return f"{expectation.name}/{sorted(expectation.params.items())}"


def _bodies(
    data: GpuData, plan: Plan, host: PlannedHost, expectation: Expectation, group: SimulatedRanks
) -> Iterator[Any]:
    """Yield a function for each figure that matches the expectation.

    The function takes the group of a slot, and returns the unit, status, params and value of an observation.
    """
    drawn_by = GANG if expectation.scope == "world" and expectation.stage == GANG_STAGE else HOST
    if expectation.name.startswith("collective.") and expectation.name.count(".") == 2:
        params, unit, texts = _collective_body(data, expectation, group, host.fabric_gbps)
        yield _body(params, unit, texts, drawn_by)
        return
    benchmark = (
        str(expectation.params.get("benchmark"))
        if expectation.name == DURATION.name
        else expectation.name.split(".")[0]
    )
    planned = (
        settings(benchmark, plan.stage(expectation.stage).benchmarks.get(benchmark, {}))
        if benchmark in BENCHMARKS
        else {}
    )
    for figure in _figures_for(data, plan, expectation, group):
        params = {key: planned[key] if _is_scalar(planned.get(key)) else value
                  for key, value in figure.get("params", {}).items()}  # fmt: skip
        params |= dict(expectation.params)
        if expectation.scope == "world" or benchmark == "transformer":
            params["world_size"] = group.ranks
        if expectation.name in HOST_COPIES:
            params["devices"] = group.ranks_per_host if params["sharing"] == "all_gpus" else 1
        if "unsupported" in figure:
            absent = {"unit": figure["unit"], "status": UNSUPPORTED, "params": params, "reason": figure["unsupported"]}
            yield lambda _draw_group, absent=absent: absent
            continue
        yield _body(params, figure["unit"], _member_texts(data, figure, expectation, group), drawn_by)


def _figures_for(
    data: GpuData, plan: Plan, expectation: Expectation, group: SimulatedRanks
) -> Sequence[Mapping[str, Any]]:
    """Return the figures for an expectation: those of the data file, or figures made here.

    Made here are the duration of `verbs`, durations that the data file lacks, the transport of collectives between hosts, and
    whether collectives use NVLink SHARP.
    """
    if expectation.name == DURATION.name and expectation.params.get("benchmark") == VERBS:
        return [{"unit": "s", "value": verbs_seconds(plan, group.stage), "params": dict(expectation.params)}]
    if expectation.name == DURATION.name and not any(
        figure["params"].get("benchmark") == expectation.params.get("benchmark")
        for figure in data.figures[DURATION.name]
    ):
        return [{"unit": "s", "value": 5.0, "params": dict(expectation.params)}]
    if expectation.name == "collective.nvls":
        return [{"unit": "1", "value": has_nvls(group)}]
    if expectation.name == "collective.transport" and group.stage == GANG_STAGE:
        return [{"unit": "1", "value": "NET/IB/GDRDMA"}]
    return data.figures_of(expectation)


def _is_scalar(value: Any) -> bool:
    return isinstance(value, int | float | str) and not isinstance(value, bool)


def _body(params: Doc, unit: str, texts: Sequence[str] | str, drawn_by: str) -> Any:
    """Return a function that takes the group of the slot and returns the observation without name, scope and stage.

    Args:
        params: parameters of the observation.
        unit: unit of the value.
        texts: the members `value` and `samples` as JSON: one text if they are fixed, else a list with one text for each level.
        drawn_by: `HOST`: the level of the slot is drawn for each host. `GANG`: it is drawn once for the gang.
    """
    members = {"unit": unit, "status": "measured", **({"params": params} if params else {})}
    if isinstance(texts, str):
        return lambda _draw_group: {**members, **json.loads(f"{{{texts}}}")}
    return lambda group: {**members, "**": Slot(texts=texts, group=group, drawn_by=drawn_by)}


def _member_texts(
    data: GpuData, figure: Mapping[str, Any], expectation: Expectation, group: SimulatedRanks
) -> Sequence[str] | str:
    """Return the members `value` and `samples` as JSON: one text if they are fixed, else a list with one text for each level."""
    if "value" in figure:
        return f'"value":{json.dumps(figure["value"])}'
    if expectation.name in ("stress.clock", "stress.efficiency"):
        values = _derived_values(data, expectation)
    else:
        # A higher level means a faster part, which takes less time.
        is_falling = expectation.scope == "world" and figure["unit"] == "s"
        spread = _scaled_spread(data, figure["spread"], expectation, group)
        samples = tuple(figure["samples"].items()) if "samples" in figure else ()
        return _level_texts(tuple(spread), _SHUFFLES.get(expectation.name, 0), is_falling, samples)
    return value_members(values, figure.get("samples"))


@lru_cache(maxsize=4096)
def _level_texts(
    spread: Sequence[float], shuffle: int, is_falling: bool, samples: Iterable[tuple[str, Any]]
) -> Sequence[str]:
    """Return the members `value` and `samples` as JSON at each level. `is_falling`: a higher level has a lower value."""
    values = values_by_level(spread, shuffle)
    return value_members(values[::-1] if is_falling else values, dict(samples))


def _derived_values(data: GpuData, expectation: Expectation) -> list[float]:
    """Return the clock (throughput / work per cycle) or the efficiency (throughput / power) at each level."""
    divisor = "stress.flop_per_cycle" if expectation.name == "stress.clock" else "stress.power"
    numerators, denominators = (
        values_by_level(
            data.figures_of(Expectation(stage=expectation.stage, name=name, scope="device", params=expectation.params))[
                0
            ]["spread"],
            _SHUFFLES.get(name, 0),
        )
        for name in ("stress.throughput", divisor)
    )
    return [numerator / denominator for numerator, denominator in zip(numerators, denominators, strict=True)]


def _scaled_spread(
    data: GpuData, spread: Sequence[float], expectation: Expectation, group: SimulatedRanks
) -> list[float]:
    """Return the spread of a figure on the ranks of `group`.

    A figure that all ranks measure together is scaled from `data.measured_ranks` to the ranks of `group` if it is a rate, a step
    time or the duration of `fashion_mnist`. The spread of other figures, and of all figures of `straggler`, is unchanged.
    """
    doublings = math.log2(group.ranks / data.measured_ranks)
    kind = expectation.name.rpartition(".")[2]
    factor = 1.0
    if expectation.scope == "world" and expectation.name.split(".")[0] != "straggler":
        if kind in _RATES:
            factor = (2 * SCALING_EFFICIENCY) ** doublings
        elif kind == "step_time":
            factor = SCALING_EFFICIENCY**-doublings
        elif expectation.name == "fashion_mnist.duration":
            factor = (2 * SCALING_EFFICIENCY) ** -doublings
    return [value * factor for value in spread]


def value_members(values: Sequence[float], samples: Mapping[str, Any] | None) -> list[str]:
    """Return the members `value` and `samples` as JSON for each value.

    In the argument `samples`, `min` and `max` are shares of the value.
    """
    texts = json_numbers(values)
    if not samples:
        return [f'"value":{text}' for text in texts]
    statistics = "".join(
        f',"{key}":{json.dumps(samples[key])}' for key in ("cv", "precision", "stopped") if key in samples
    )
    lows, highs = (json_numbers(value * samples[key] for value in values) for key in ("min", "max"))
    return [
        f'"value":{text},"samples":{{"n":{samples["n"]},"min":{low},"p50":{text},"max":{high}{statistics}}}'
        for text, low, high in zip(texts, lows, highs, strict=True)
    ]


def has_nvls(group: SimulatedRanks) -> bool:
    """Return whether NCCL is assumed to use NVLink SHARP among the ranks of `group`."""
    return group.stage != GANG_STAGE and group.ranks >= MIN_NVLS_RANKS


def _collective_body(
    data: GpuData, expectation: Expectation, group: SimulatedRanks, fabric_gbps: float
) -> tuple[Doc, str, Sequence[str] | str]:
    """Return params and unit of one figure of a collective, and its members `value` and `samples` as JSON."""
    _, op, kind = expectation.name.split(".")
    size, placement = int(expectation.params["size_bytes"]), str(expectation.params.get("placement", ""))
    curve = _curve(data, op, placement, "graph_latency" if kind == "graph_latency" else "latency")
    params = {**dict(expectation.params), "world_size": group.ranks, **curve["params"]}
    if kind == "graph_latency":
        return params, "s", _latencies(data, op, placement, kind, size, group, fabric_gbps)[1]
    between_hosts = group.stage == GANG_STAGE
    uses_nvls = has_nvls(group) and op == "all_reduce" and size >= LARGE_BYTES
    params |= {
        "transport": "NET/IB/GDRDMA" if between_hosts else "P2P/CUMEM",
        "nvls": has_nvls(group),
        "algorithm": "NVLS" if uses_nvls else _setting_at(curve, "algorithm", size),
        "protocol": _setting_at(curve, "protocol", size),
    }
    if kind == "wrong_elements":
        return params, "1", '"value":0'
    if kind == "latency":
        return params, "s", _latencies(data, op, placement, kind, size, group, fabric_gbps)[1]
    factor = bus_factor(curve["factor"], data.measured_ranks, group.ranks) if kind == "busbw" else 1.0
    return params, "B/s", _bandwidths(data.model, op, placement, size, factor, group, fabric_gbps)


@lru_cache(maxsize=4096)
def _bandwidths(
    model: str, op: str, placement: str, size: int, factor: float, group: SimulatedRanks, fabric_gbps: float
) -> Sequence[str]:
    """Return the bandwidth of a collective at each level as JSON member `value`. `factor`: bus / algorithm bandwidth."""
    seconds, _ = _latencies(read_gpu_data(model), op, placement, "latency", size, group, fabric_gbps)
    return value_members([size * factor / value for value in seconds], None)


def _curve(data: GpuData, op: str, placement: str, kind: str) -> Mapping[str, Any]:
    """Return the curve of collective `op`. If it was not measured, return that of another placement, or of the kind `latency`."""
    candidates = (
        (op, placement, kind),
        (op, "out_of_place", kind),
        (op, "in_place", kind),
        (op, placement, "latency"),
        (op, "out_of_place", "latency"),
    )
    return next(data.curves[key] for key in candidates if key in data.curves)


def _setting_at(curve: Mapping[str, Any], key: str, size: int) -> str:
    """Return the `algorithm` or `protocol` (`key`) that NCCL used at `size` bytes, or at the next larger measured size."""
    index = sum(point[0] < size for point in curve["points"])
    values = [value for count, value in curve[key] for _ in range(count)]
    return str(values[min(index, len(values) - 1)])


def bus_factor(factor: float, measured_ranks: int, ranks: int) -> float:
    """Return the quotient of bus bandwidth and algorithm bandwidth on `ranks` ranks.

    On n ranks, this quotient is 2(n-1)/n, (n-1)/n or a constant, depending on the collective. `factor` is the quotient on
    `measured_ranks` ranks. It shows which of the three formulas the collective has.
    """
    measured_share = (measured_ranks - 1) / measured_ranks
    for multiple in (2.0, 1.0):
        if math.isclose(factor, multiple * measured_share, rel_tol=1e-3):
            return multiple * (ranks - 1) / ranks
    return factor


@lru_cache(maxsize=4096)
def _cached_latencies(
    model: str, op: str, placement: str, kind: str, size: int, group: SimulatedRanks, fabric_gbps: float
) -> Any:
    data = read_gpu_data(model)
    curve = _curve(data, op, placement, kind)
    factor = bus_factor(curve.get("factor", 1.0), data.measured_ranks, group.ranks)
    if group.stage == GANG_STAGE:
        bandwidth = (fabric_gbps or DEFAULT_FABRIC_GBPS) * 1e9 / 8 * group.ranks_per_host * GANG_SHARE
        seconds = GANG_LATENCY_S * (0.6 if kind == "graph_latency" else 1.0) + size * factor / bandwidth
        spread = [seconds, seconds * (1 - GANG_SPREAD), seconds * (1 + GANG_SPREAD), seconds * GANG_SPREAD / 2]
    else:
        spread = interpolate(curve["points"], size)
        # The time of a large collective is proportional to its bus factor, and NVLink SHARP shortens it.
        if kind == "latency" and size >= LARGE_BYTES and group.ranks != data.measured_ranks:
            speedup = NVLS_SPEEDUP.get(op, 1.0) if has_nvls(group) else 1.0
            spread = [value * factor / curve["factor"] / speedup for value in spread]
    values = values_by_level(spread)
    return values, value_members(values, curve.get("samples"))


def _latencies(
    data: GpuData, op: str, placement: str, kind: str, size: int, group: SimulatedRanks, fabric_gbps: float
) -> tuple[Sequence[float], Sequence[str]]:
    """Return the duration of a collective in seconds at each level, and the same as JSON members `value` and `samples`."""
    latencies: tuple[Sequence[float], Sequence[str]] = _cached_latencies(
        data.model, op, placement, kind, size, group, fabric_gbps
    )
    return latencies
