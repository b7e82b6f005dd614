"""Check that every NUMA node has its figures. The plan requires only the number of nodes and the total bandwidth of the host."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from typing import Any

from fleet.judge.host_view import HostView
from schemas.catalogue import settings
from schemas.records import MEASURED
from schemas.reports import Verdict

HOST_MEMORY = "host_memory"
"""Benchmark that measures the memory of each NUMA node."""


def silent_nodes(view: HostView) -> Iterator[Verdict]:
    """Yield an inconclusive verdict for each figure for which a node reports neither a value nor a reason for its absence."""
    for stage in view.plan.stages:
        counts = [item for item in view.observations[f"{HOST_MEMORY}.nodes"] if item.stage == stage.name]
        if HOST_MEMORY not in stage.benchmarks or not counts or counts[-1].status != MEASURED:
            continue  # `missing_observations` reports that the number of nodes is missing
        nodes = counts[-1].value if isinstance(counts[-1].value, int | float) else 0
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
