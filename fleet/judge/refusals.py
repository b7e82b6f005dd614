"""Report the basic readings of a GPU that its driver refuses with an error, such as `Unknown Error` for the temperature.

A GPU that does not have such a reading reports it as unsupported, which is no refusal. A refused reading is missing evidence,
even if no criterion judges its value. A refusal that a later snapshot does not repeat was transient, and gets no verdict.
"""

from __future__ import annotations

from collections.abc import Iterator

from fleet.judge.host_view import HostView
from schemas.records import ERROR
from schemas.reports import Verdict, VerdictKind
from schemas.scopes import Scope

BASIC = (
    "gpu.temperature",
    "gpu.memory.temperature",
    "gpu.power",
    "gpu.power_limit",
    "gpu.power_limit_set",
    "gpu.power_limit_default",
    "gpu.clock.sm",
    "gpu.clock.memory",
    "gpu.clock.sm_max",
    "gpu.clock.memory_max",
    "gpu.memory.total",
    "gpu.memory.used",
    "gpu.utilization",
    "gpu.performance_state",
)
_DERIVED = ("gpu.power_limit_lowered", "gpu.clock.lowered")
_IDENTITY, _RECOVERY = "gpu.uuid", "gpu.recovery_action"


def may_be_transient(name: str) -> bool:
    """Return whether a refusal of this reading needs no verdict if a later snapshot has a value for it."""
    return name in BASIC or name in _DERIVED


def refused_readings(view: HostView) -> Iterator[Verdict]:
    """Yield an inconclusive verdict for each basic reading that the driver refused in the last snapshot with this reading.

    There is no such verdict if a shipped criterion without `same_as_fleet` judges the reading, because that criterion reports the
    refusal. GPUs that do not answer, or that require a recovery action, get no such verdict either.
    """
    refused = {name: absent for name in BASIC if (absent := _last_absent(view, name))}
    if not refused:
        return
    excluded = {*_last_absent(view, _IDENTITY), *view.unmeasured_gpus, *_in_recovery(view)}
    criteria = [item for item in view.criteria().values() if item.origin not in view.operator_packs]
    judged = [item for item in criteria if item.name.startswith("gpu.") and item.same_as_fleet is None]
    for name, absent in refused.items():
        if any(criterion.matches_name(name) for criterion in judged):
            continue
        for scope, (why, stage) in absent.items():
            status, _, reason = why.partition(": ")
            if status == ERROR and Scope.parse(scope).device not in excluded:
                yield view.inconclusive(name, scope, f"the driver refuses it: {reason}", stage, kind=VerdictKind.ERROR)


def _last_absent(view: HostView, name: str) -> dict[str, tuple[str, str]]:
    """Return the scopes without a value in the last snapshot with this reading.

    The result maps each scope to its status and reason (as one text), and to the stage of that snapshot.
    """
    metrics = view.observations.metrics.get(name)
    if not metrics:
        return {}
    snapshot, metric = metrics[-1]
    return {scope: (why, snapshot.stage) for scope, why in metric.absent.items()}


def _in_recovery(view: HostView) -> set[str]:
    metrics = view.observations.metrics.get(_RECOVERY)
    return {scope for scope, action in metrics[-1][1].values.items() if action != "none"} if metrics else set()
