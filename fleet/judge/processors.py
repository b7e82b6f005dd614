"""Attribute slow figures of a host's processors to a limit on the processors that the agent could use.

A cpuset, a CPU quota or the kernel option isolcpus may limit the agent to fewer processors than the host has. The host may then
be healthy.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from fleet.judge.host_view import HostView
from fleet.judge.shared_gpus import is_speed
from schemas.reports import FAIL, Verdict

COUNT, ONLINE, USABLE = "host.cpu.count", "host.cpu.threads", "host.cpu.usable"
BOUND = ("checkpoint.", "dataloader.", "host_compute.", "host_memory.", "kernel_launch.", "pageable_copy.")
"""Prefixes of figures that depend on the number of processors."""
NODES = "host_memory.nodes"
"""The number of NUMA nodes with processors that the agent could use."""
MOST = 0.9
"""With at least this share of the processors, a speed that depends on them loses too little to miss a limit."""
MIN_PER_GPU = 2
"""With fewer processors for each GPU under test, every speed may be low, because a GPU waits for the process that launches its
work."""


def with_processor_limit(view: HostView, verdict: Verdict) -> Verdict:
    """Return the verdict. If too few processors may explain the failure, add their number, with the action `configure`.

    This applies to speeds that depend on the processors, and to the numbers of processors and of NUMA nodes. With fewer than
    MIN_PER_GPU processors for each GPU under test, it applies to every speed.
    """
    if verdict.verdict != FAIL or not (is_speed(verdict) or verdict.name in (COUNT, NODES)):
        return verdict
    limit = limited_processors(view, verdict.stage)
    if not limit:
        return verdict
    usable, online = limit
    if is_speed(verdict) and usable >= MOST * online:
        return verdict
    if not verdict.name.startswith((*BOUND, COUNT)) and usable >= MIN_PER_GPU * len(view.host.devices):
        return verdict
    text = (
        f"the agent could use only {usable} of the {online} processors of the host (cpuset, CPU quota or isolcpus): remove this "
        "limit, and measure again"
    )
    detail = "; ".join(filter(None, (text, verdict.detail)))
    return replace(verdict, reason=f"{verdict.reason}; {text}", detail=detail, action="configure", severity="")


def limited_processors(view: HostView, stage: str = "") -> tuple[int, int] | None:
    """Return how many processors the agent could use, and how many are online; None if it could use all, or if this is unknown.

    The first number is the lowest in the snapshots of the stage; without `stage`, the lowest in all snapshots.
    """
    usable = min(_values(view, stage, USABLE, COUNT), default=None)
    online = max(_values(view, "", ONLINE), default=0)
    return (usable, online) if usable is not None and usable < online else None


def _values(view: HostView, stage: str, *names: str) -> Iterator[int]:
    for name in names:
        for snapshot, metric in view.observations.metrics.get(name, ()):
            value = metric.values.get("host")
            if isinstance(value, int) and stage in ("", snapshot.stage):
                yield value
