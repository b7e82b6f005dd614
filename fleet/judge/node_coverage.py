"""Check that every NUMA node has its figures, and that the benchmarks could use every node and every processor of the host.

The plan requires only the number of nodes and the total bandwidth of the host. The number counts only the nodes that the
benchmark could use.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from typing import Any

from fleet.judge.host_view import HostView
from schemas.catalogue import settings
from schemas.records import MEASURED
from schemas.reports import Verdict
from schemas.scopes import HOST

HOST_MEMORY = "host_memory"
"""Benchmark that measures the memory of each NUMA node."""
OF_PROCESSORS = (HOST_MEMORY, "host_compute")
"""Benchmarks that use one thread on each core."""
CPU_COUNT, CPUS_ONLINE = "host.cpu.count", "host.cpu.threads"
"""Number of processors that the run could use, and number of processors that are online."""
PROCESSORS = "host.numa.processors"
BOUND = (
    "the launcher, a cpuset, or a limit of the job or container bound the run to some of the host's processors; give the run all "
    "of them, or waive this if some are reserved (docs/host-memory.md)"
)


def unused_nodes(view: HostView) -> Iterator[Verdict]:
    """Yield an inconclusive verdict if the run could not use all NUMA nodes or processors, and so measured only some of them.

    A rehearsal is not checked, because it measures no hardware.
    """
    stages = [stage for stage in view.plan.stages if any(name in stage.benchmarks for name in OF_PROCESSORS)]
    if not stages or view.plan.rehearsal:
        return
    usable, online = (view.observations.last_values(name).get(HOST) for name in (CPU_COUNT, CPUS_ONLINE))
    if isinstance(usable, int | float) and isinstance(online, int | float) and usable < online:
        reason = f"the run could use only {usable:g} of the {online:g} processors that are online: {BOUND}"
        yield view.inconclusive(CPU_COUNT, HOST, reason)
    expected = _measurable_nodes(view)
    for stage in stages:
        measured = _measured_nodes(view, stage.name)
        if measured is not None and expected is not None and measured != expected:
            reason = f"{measured:g} NUMA nodes were measured, but the host has {expected} with processors and memory"
            reason += f": {BOUND}" if measured < expected else ""
            yield view.inconclusive(f"{HOST_MEMORY}.nodes", HOST, reason, stage.name)


def _measurable_nodes(view: HostView) -> int | None:
    """Return the number of NUMA nodes with processors and memory; None if the record has no readings of processors of nodes.

    Other nodes, such as CXL memory, have no figures. A host without NUMA nodes counts as one node.
    """
    if PROCESSORS not in view.observations:
        return None  # a record of an older version
    memory = view.observations.last_values("host.numa.memory_total")
    processors = view.observations.last_values(PROCESSORS)
    return max(1, sum(bool(count) and memory.get(node) != 0 for node, count in processors.items()))


def _measured_nodes(view: HostView, stage: str) -> float | None:
    """Return the number of nodes that the benchmark measured in this stage; None if missing, which is reported elsewhere."""
    counts = [item for item in view.observations[f"{HOST_MEMORY}.nodes"] if item.stage == stage]
    value = counts[-1].value if counts and counts[-1].status == MEASURED else None
    return value if isinstance(value, int | float) else None


def silent_nodes(view: HostView) -> Iterator[Verdict]:
    """Yield an inconclusive verdict for each figure for which a node reports neither a value nor a reason for its absence."""
    for stage in view.plan.stages:
        nodes = _measured_nodes(view, stage.name)
        if HOST_MEMORY not in stage.benchmarks or nodes is None:
            continue  # `missing_observations` reports that the number of nodes is missing
        for name, params in _figures(settings(HOST_MEMORY, stage.benchmarks[HOST_MEMORY]), has_remote=nodes > 1):
            items = [item for item in view.observations[name] if item.stage == stage.name]
            scopes = {item.scope for item in items if params.items() <= item.params.items()}
            if len(scopes) < nodes:
                reason = f"only {len(scopes)} of {nodes:g} NUMA nodes report this figure or a reason for its absence"
                yield view.inconclusive(name, "host", reason, stage.name, params)


def _figures(chosen: Mapping[str, Any], *, has_remote: bool) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield name and parameters of each figure that every node must have."""
    placements = [placement for placement in chosen["placements"] if placement == "local" or has_remote]
    yield f"{HOST_MEMORY}.wrong_elements", {}
    for placement in placements:
        yield f"{HOST_MEMORY}.latency", {"placement": placement}
    for op, placement in itertools.product(chosen["ops"], placements):
        yield f"{HOST_MEMORY}.bandwidth", {"op": op, "placement": placement}
