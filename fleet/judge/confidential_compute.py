"""Attribute slow copies to confidential computing.

With this mode of the GPUs, all data between host and GPU pass through encrypted buffers in host memory, and GPUs may have no
access to each other's memory. A healthy GPU then misses limits that apply without the mode.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from fleet.judge.host_view import HostView
from fleet.judge.shared_gpus import is_speed
from schemas.reports import FAIL, Verdict

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

    If another verdict on the host (`of_host`) finds a bad link, the action stays the same.
    """
    if verdict.verdict != FAIL or not verdict.name.startswith((*HOST_COPIES, *PEER_ACCESS)):
        return verdict
    if not (is_speed(verdict) or verdict.name == ACCESS):
        return verdict
    if view.observations.last_values(MODE).get("host") is not True:
        return verdict
    detail = "; ".join(filter(None, (TEXT, verdict.detail)))
    has_bad_link = any(other.verdict == FAIL and other.name.startswith(LINKS) for other in of_host)
    action = verdict.action if has_bad_link else "configure"
    return replace(verdict, reason=f"{verdict.reason}; {TEXT}", detail=detail, action=action)
