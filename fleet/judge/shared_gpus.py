"""Attribute slow figures to other processes on the GPU, which may be healthy.

A launch does not start on a GPU that is in use, unless rackproof_share_gpus allows it. But another process may start later.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace

from fleet.judge.evidence import from_benchmark
from fleet.judge.finding import CEILINGS, FLOORS
from fleet.judge.host_view import HostView
from schemas.reports import FAIL, Verdict
from schemas.scopes import Scope

_PROCESSES = "gpu.processes"
NO_SPEEDS = (".accuracy", ".mtu")
"""Last parts of names of figures that are not speeds although their limit is a minimum. Other processes do not lower them."""


def with_other_processes(view: HostView, verdict: Verdict) -> Verdict:
    """Return the verdict. If a speed fails and another process used the GPU, add this to its reason, with the action `configure`.

    Another process used a GPU if the supervisor saw such a process in a launch of the verdict's stage. If processes are allowed
    (rackproof_share_gpus), it is also enough that the GPU had compute processes before or after a stage. For a figure whose scope
    names no GPU, such as `host`, these may be processes on any GPU of the host.
    """
    if verdict.verdict != FAIL or not is_speed(verdict):
        return verdict
    labels = Scope.parse(verdict.scope).labels
    named = {f"gpu={labels[kind]}" for kind in ("gpu", "peer") if kind in labels}
    used = {gpu: process for gpu, process in _used_gpus(view, verdict.stage) if not named or gpu in named}
    if not used:
        return verdict
    gpus_of: dict[str, list[str]] = defaultdict(list)
    for gpu, process in used.items():
        gpus_of[process or "another process"].append(gpu)
    uses = " and ".join(f"{process} used {', '.join(gpus)}" for process, gpus in gpus_of.items())
    allowed = ", which rackproof_share_gpus allows" if view.host.share_gpus else ""
    text = f"{uses}{allowed}: end that process, and measure again"
    detail = "; ".join(filter(None, (text, verdict.detail)))
    return replace(verdict, reason=f"{verdict.reason}; {text}", detail=detail, action="configure")


def is_speed(verdict: Verdict) -> bool:
    """Return whether the verdict judges a benchmark's rate by a minimum, or its time by a maximum.

    A healthy part can miss such a limit because of another process.
    """
    if not from_benchmark(verdict.name) or verdict.name.endswith(NO_SPEEDS):
        return False
    return verdict.operator in FLOORS or (verdict.operator in CEILINGS and verdict.unit == "s")


def _used_gpus(view: HostView, stage: str) -> Iterator[tuple[str, str]]:
    """Yield each GPU that another process used, and the process, if it is known. A GPU may be yielded several times."""
    for snapshot, metric in view.observations.metrics.get(_PROCESSES, ()) if view.host.share_gpus else ():
        if snapshot.phase != "during":  # then the launch has processes of its own
            yield from ((scope, "") for scope, count in metric.values.items() if count)
    for launch in view.evidence.launches():
        if launch.stage == stage:
            yield from launch.other_processes.items()
