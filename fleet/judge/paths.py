"""Slow collectives that talk over a slow path: software is named before any hardware is blamed for them.

Only where the path is not the one that such ranks talk by when all is well, and no link is known to be bad: else a bad link
would pass for a setting.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import replace

from fleet.judge.evidence import HostView
from schemas.records import MEASURED, Value
from schemas.reports import FAIL, PASS, Verdict
from schemas.scopes import Scope

CHECK_WITHIN = (
    "check NCCL_P2P_* and NCCL_SHM_* in the environment, and peer access between the GPUs (nvidia-smi topo -p2p r)"
)
CHECK_BETWEEN = (
    "check NCCL_* in the environment (NCCL_IB_DISABLE, NCCL_IB_HCA, NCCL_NET), the IB devices (ibv_devinfo), and the module "
    "nvidia_peermem or DMA-BUF"
)
CHECK_NVLS = "check NCCL_NVLS_ENABLE in the environment, and that the fabric manager runs"
LINKS = ("peer_copy.", "gpu.nvlink.")
"""What a failure of shows that the way between two GPUs is bad, whatever NCCL made of it."""

Path = tuple[str, str, str, Value, Value]
"""Criterion, observation, stage, size in bytes, transport."""


def normal_paths(found: Iterable[tuple[HostView, Sequence[Verdict]]]) -> set[Path]:
    """The transports over which some ranks reach what a criterion wants: they explain no failure of others."""
    return {
        path_of(view, verdict)
        for view, verdicts in found
        for verdict in verdicts
        if verdict.verdict == PASS and is_bandwidth(verdict)
    }


def with_lost_path(view: HostView, verdict: Verdict, of_host: Sequence[Verdict], normal: set[Path]) -> Verdict:
    """The verdict; where it fails a bandwidth and NCCL's path explains it, with the path in front, and no part to act on.

    The action stays where a link of the host fails by itself. A missing NVLS gets the remedy.

    Args:
        view: the host.
        verdict: on that host.
        of_host: every verdict on it.
        normal: as `normal_paths` has it.
    """
    if verdict.verdict != FAIL:
        return verdict
    if verdict.name == "collective.nvls" and verdict.value is False:
        return replace(verdict, reason=f"{verdict.reason}; {CHECK_NVLS}", detail=CHECK_NVLS)
    lost = _transport(view, verdict) if is_bandwidth(verdict) and path_of(view, verdict) not in normal else ""
    if not lost:
        return verdict
    detail = "; ".join(text for text in (lost, verdict.detail) if text)
    bad_link = any(other.verdict == FAIL and other.name.startswith(LINKS) for other in of_host)
    action = verdict.action if bad_link else "none"
    return replace(verdict, reason=f"{lost}; {verdict.reason}", detail=detail, action=action)


def is_bandwidth(verdict: Verdict) -> bool:
    """Whether it is about the bandwidth of a collective."""
    return verdict.name.startswith("collective.") and verdict.name.endswith(".busbw")


def path_of(view: HostView, verdict: Verdict) -> Path:
    """The way that the ranks of a figure talk."""
    size = verdict.params.get("size_bytes")
    return verdict.criterion, verdict.name, verdict.stage, size, _told(view, verdict, "transport")


def _transport(view: HostView, verdict: Verdict) -> str:
    """What is slow about the transports that NCCL chose for this figure's ranks, or empty."""
    told = _told(view, verdict, "transport")
    names = re.split(r"[,;|+\s]+", told) if isinstance(told, str) else []
    if Scope.parse(verdict.scope).is_gang:
        slow = next((name for name in names if _slow_between(name)), "")
        if slow.upper().startswith("NET/SOCKET"):
            return f"the ranks talk over {slow}, not InfiniBand: NCCL's fast path is lost; {CHECK_BETWEEN}"
        return (
            f"the ranks talk over {slow} without GPUDirect RDMA: NCCL's fast path is lost; {CHECK_BETWEEN}"
            if slow
            else ""
        )
    slow = next((name for name in names if name.upper().startswith(("SHM", "NET"))), "")
    if not slow or not _has_peers(view):
        return ""
    return f"the ranks talk over {slow}, not P2P: NCCL's fast path is lost; {CHECK_WITHIN}"


def _has_peers(view: HostView) -> bool:
    """Whether GPUs of the model reach each other's memory: where they do not, NCCL goes through the host's."""
    return any(item.speaks_of("peer_copy.access") and item.value is True for item in view.criteria().values())


def _slow_between(name: str) -> bool:
    upper = name.upper()
    return upper.startswith("NET/SOCKET") or (upper.startswith("NET/IB") and "GDRDMA" not in upper)


def _told(view: HostView, verdict: Verdict, kind: str) -> Value:
    """What the launch observed of its path, else what the figure itself says."""
    seen = [
        item.value
        for item in view.observations.get(f"collective.{kind}", ())
        if (item.stage, item.scope) == (verdict.stage, verdict.scope) and item.status == MEASURED
    ]
    return seen[-1] if seen else verdict.params.get(kind)
