"""Attribute slow figures to other processes on the GPU, if the inventory allows such processes: the GPU may be healthy."""

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
"""Ends of the names of figures that have a lower limit, but are no speeds: other processes do not lower them."""


def with_other_processes(view: HostView, verdict: Verdict) -> Verdict:
    """Return the verdict. If a speed fails, and other processes used the GPU, add the GPU's scope and the action `configure`.

    A GPU counts as used by other processes if it had compute processes outside of the launches of the run. A figure of the whole
    host counts as a figure of all its GPUs.
    """
    if not view.host.share_gpus or verdict.verdict != FAIL or not is_speed(verdict):
        return verdict
    labels = Scope.parse(verdict.scope).labels
    named = {f"gpu={labels[kind]}" for kind in ("gpu", "peer") if kind in labels}
    shared = [gpu for gpu in dict.fromkeys(_used_gpus(view)) if not named or gpu in named]
    if not shared:
        return verdict
    text = f"another process used {', '.join(shared)} (rackproof_share_gpus): end it, and measure again"
    detail = "; ".join(filter(None, (text, verdict.detail)))
    return replace(verdict, reason=f"{verdict.reason}; {text}", detail=detail, action="configure")


def is_speed(verdict: Verdict) -> bool:
    """Return whether the limit is a minimum rate or a maximum time: a healthy part that another process uses may miss it."""
    if not from_benchmark(verdict.name) or verdict.name.endswith(NO_SPEEDS):
        return False
    return verdict.operator in FLOORS or (verdict.operator in CEILINGS and verdict.unit == "s")


def _used_gpus(view: HostView) -> Iterator[str]:
    """Yield the GPUs with compute processes before or after a stage, when no process of the run exists."""
    for snapshot, metric in view.observations.metrics.get(_PROCESSES, ()):
        if snapshot.phase != "during":
            yield from (scope for scope, count in metric.values.items() if count)
