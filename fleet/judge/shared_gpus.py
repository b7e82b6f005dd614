"""Attribute slow figures to other processes on the GPU, if the inventory allows them (rackproof_share_gpus).

The GPU may then be healthy.
"""

from __future__ import annotations

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

    Another process used a GPU if the GPU had compute processes before or after a stage. For a figure whose scope names no GPU,
    such as `host`, these may be processes on any GPU of the host.
    """
    if not view.host.share_gpus or verdict.verdict != FAIL or not is_speed(verdict):
        return verdict
    labels = Scope.parse(verdict.scope).labels
    named = {f"gpu={labels[kind]}" for kind in ("gpu", "peer") if kind in labels}
    shared = [gpu for gpu in dict.fromkeys(_used_gpus(view)) if not named or gpu in named]
    if not shared:
        return verdict
    text = f"another process used {', '.join(shared)}, which rackproof_share_gpus allows: end that process, and measure again"
    detail = "; ".join(filter(None, (text, verdict.detail)))
    return replace(verdict, reason=f"{verdict.reason}; {text}", detail=detail, action="configure")


def is_speed(verdict: Verdict) -> bool:
    """Return whether the verdict judges a benchmark's rate by a minimum, or its time by a maximum.

    A healthy part can miss such a limit because of another process.
    """
    if not from_benchmark(verdict.name) or verdict.name.endswith(NO_SPEEDS):
        return False
    return verdict.operator in FLOORS or (verdict.operator in CEILINGS and verdict.unit == "s")


def _used_gpus(view: HostView) -> Iterator[str]:
    """Yield the scopes of GPUs that had compute processes before or after a stage, when the run has no processes itself."""
    for snapshot, metric in view.observations.metrics.get(_PROCESSES, ()):
        if snapshot.phase != "during":
            yield from (scope for scope, count in metric.values.items() if count)
