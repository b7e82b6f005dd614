"""How long benchmarks take: from an earlier run with the same settings, or else from the table of benchmarks.

From these durations, a host derives how much of a stage is done and how long the rest takes. The control node
uses them to estimate how long a run takes, and to scale a profile to a duration that the operator requests.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from schemas.benchmarks import Cost
from schemas.catalogue import BENCHMARKS, settings
from schemas.plans import Plan, PlannedHost, Stage
from schemas.stages import GANG
from schemas.tournament import select_rounds

START_S, END_S = 7.5, 1.2
"""Time for the ranks of a stage to start and to rendezvous, and time for them to end. Measured (docs/measurements): 2.8 to 12.9 s
to start (12.9 s after a boot), and 0.5 to 3.9 s to end."""
UNKNOWN_S = 30.0
"""Duration that a benchmark outside the catalogue is assumed to have."""


@dataclass(frozen=True, kw_only=True)
class Size:
    """The GPUs and hosts of a launch."""

    gpus: int
    """GPUs of one host."""
    hosts: int = 1
    ports: int = 0
    """RDMA ports of a host."""


def expected_s(benchmark: str, chosen: Mapping[str, Any], size: Size) -> float:
    """Return the expected seconds of a benchmark on GPUs with these settings; 0 if it needs peers and the launch has none."""
    entry = BENCHMARKS.get(benchmark)
    if entry is None:
        return UNKNOWN_S
    if entry.needs_peers and size.gpus * size.hosts < 2:
        return 0.0
    values = settings(benchmark, chosen)
    return entry.cost_s + sum(_cost_s(cost, values, size) for cost in entry.costs)


def _cost_s(cost: Cost, values: Mapping[str, Any], size: Size) -> float:
    seconds = cost.seconds + sum(float(values[key]) for key in cost.timed)
    repetitions = math.prod(
        len(value) if isinstance(value := values[key], list | tuple) else value for key in cost.over
    )
    return seconds * repetitions * _factor(cost.per, values, size)


def _factor(per: str, values: Mapping[str, Any], size: Size) -> float:
    if per in ("round", "port_round"):
        rounds = len(select_rounds(size.hosts, int(values["rounds"])))
        return rounds if per == "round" or size.ports else 0
    return {
        "": 1.0,
        "gpu": size.gpus,
        "gpu_of_host": size.gpus if size.hosts == 1 else 0,
        "further_gpu": size.gpus - 1,
        "pair": size.gpus * (size.gpus - 1),
        "peers": float(size.gpus * size.hosts > 1),
        "doubling": math.log2(size.gpus * size.hosts),
        "port": size.ports if size.hosts == 1 else 0,
    }[per]


def size_of(plan: Plan, host: PlannedHost, stage: str) -> Size:
    """Return the size of the host's launches in a stage."""
    hosts = len(plan.gangs().get(host.gang, ())) if stage == GANG else 1
    ports = host.infiniband_ports or (len(host.devices) if host.verbs_required else 0)
    return Size(gpus=len(host.devices), hosts=max(1, hosts), ports=ports)


def expected_durations(plan: Plan, host: PlannedHost, stage: Stage) -> dict[str, float]:
    """Return benchmark -> expected seconds, in the order in which the benchmarks run; empty if the durations are unknown.

    In a rehearsal, durations are known only from an earlier run, because the table of benchmarks is for GPUs.
    """
    measured = plan.durations_s.get(stage.name, {})
    if plan.rehearsal and not measured.keys() >= stage.benchmarks.keys():
        return {}
    size = size_of(plan, host, stage.name)
    # Ranks run the benchmarks that need the process group after all others.
    names = sorted(stage.benchmarks, key=lambda name: name in BENCHMARKS and BENCHMARKS[name].needs_group)
    return {
        name: measured[name] if name in measured else expected_s(name, stage.benchmarks[name], size) for name in names
    }


def stage_s(durations: Mapping[str, float]) -> float:
    """Return the seconds of a launch of these benchmarks, with the start and the end of the ranks."""
    return START_S + sum(durations.values()) + END_S


def remaining_s(
    durations: Mapping[str, float], began: Mapping[str, float], elapsed_s: float, share: float = 0.0
) -> float:
    """Return the seconds until a launch is expected to end.

    Args:
        durations: benchmark -> expected seconds, from `expected_durations`.
        began: benchmark -> seconds from the start of the launch to the start of the benchmark, for those that have started.
        elapsed_s: seconds since the start of the launch.
        share: share of the current benchmark's observations that have been made. If the benchmark takes longer than expected, for
            example over a slow network, its remaining time is computed from this share.
    """
    waiting = sum(seconds for name, seconds in durations.items() if name not in began) + END_S
    if not began:
        return max(0.0, START_S - elapsed_s) + waiting
    current = max(began, key=lambda name: began[name])
    spent_s = elapsed_s - began[current]
    left_s = durations.get(current, 0.0) - spent_s
    if left_s < 0 and share > 0:
        left_s = spent_s * (1 - share) / share
    return max(0.0, left_s) + waiting
