"""Attribute slow copies to confidential computing.

With this mode of the GPUs, all data between host and GPU pass through encrypted buffers in host memory, and GPUs may have no
access to each other's memory. A healthy GPU then misses limits that apply without the mode.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from fleet.judge.evaluate import holds
from fleet.judge.host_view import HostView
from fleet.judge.shared_gpus import is_speed
from schemas.records import MEASURED
from schemas.reports import FAIL, PASS, Verdict

MODE = "driver.confidential_compute"
HOST_COPIES = ("host_copy.", "pageable_copy.", "checkpoint.", "dataloader.", "kernel_launch.")
PEER_ACCESS = ("peer_copy.", "group_copy.", "collective.", "pairs.", "model_parallel.")
"""Prefixes of the names of figures that depend on copies between host and GPU, and on access between GPUs."""
ACCESS = "peer_copy.access"
LINKS = ("gpu.nvlink.", "gpu.pcie.", "pcie.")
"""Prefixes of the names of readings that fail if a link of a GPU is bad, whatever the mode."""
TEXT = (
    "confidential computing is on, which encrypts all copies between host and GPU, and may disable access between GPUs: switch "
    "it off to measure the hardware, or judge these figures by criteria of your own"
)


def with_confidential_compute(view: HostView, verdict: Verdict, of_host: Sequence[Verdict]) -> Verdict:
    """Return the verdict. If confidential computing may explain the failure, name it, and set the action to `configure`.

    The action stays the same if the mode does not explain the failure (`_shows_fault`). `of_host` are the verdicts on the host.
    """
    if verdict.verdict != FAIL or not verdict.name.startswith((*HOST_COPIES, *PEER_ACCESS)):
        return verdict
    if not (is_speed(verdict) or verdict.name == ACCESS):
        return verdict
    if view.observations.last_values(MODE).get("host") is not True:
        return verdict
    detail = "; ".join(filter(None, (TEXT, verdict.detail)))
    action = verdict.action if _shows_fault(view, verdict, of_host) else "configure"
    return replace(verdict, reason=f"{verdict.reason}; {TEXT}", detail=detail, action=action)


def _shows_fault(view: HostView, verdict: Verdict, of_host: Sequence[Verdict]) -> bool:
    """Return whether something else than the mode must be the cause of a failure.

    That is so in three cases:
    - A link of the host is bad.
    - Another part of the host meets the same limit. The mode is the same for all GPUs of a host.
    - The limit comes from the fleet, and the other hosts have the same mode.
    """
    if any(other.verdict == FAIL and other.name.startswith(LINKS) for other in of_host):
        return True
    others = (item for item in view.observations[verdict.name] if item.scope != verdict.scope)
    if any(
        item.status == MEASURED
        and (item.stage, item.params) == (verdict.stage, verdict.params)
        and holds(verdict.operator, item.value, verdict.limit)
        for item in others
    ):
        return True
    criterion = view.criteria().get(verdict.criterion)
    is_same_mode = not any(other.verdict != PASS and other.name == MODE for other in of_host)
    return criterion is not None and criterion.vs_fleet and is_same_mode
