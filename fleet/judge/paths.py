"""Slow collectives that talk over a slow path: software is named before any hardware is blamed for them."""

from __future__ import annotations

import re
from dataclasses import replace

from fleet.judge.evidence import HostView
from schemas.records import MEASURED, Value
from schemas.reports import FAIL, Verdict

CHECK_WITHIN = (
    "check NCCL_P2P_* and NCCL_SHM_* in the environment, and peer access between the GPUs (nvidia-smi topo -p2p r)"
)
CHECK_BETWEEN = (
    "check NCCL_* in the environment (NCCL_IB_DISABLE, NCCL_IB_HCA, NCCL_NET), the IB devices (ibv_devinfo), and the module "
    "nvidia_peermem or DMA-BUF"
)
CHECK_NVLS = "check NCCL_NVLS_ENABLE in the environment, and that the fabric manager runs"


def with_lost_path(view: HostView, verdict: Verdict) -> Verdict:
    """The verdict, where it fails a bandwidth and NCCL's path explains it: with the path in front, and no part to act on."""
    parts = verdict.name.split(".")
    if verdict.verdict != FAIL or parts[0] != "collective" or parts[-1] != "busbw":
        return verdict
    lost = _transport(view, verdict) or _nvls(view, verdict)
    if not lost:
        return verdict
    detail = "; ".join(text for text in (lost, verdict.detail) if text)
    return replace(verdict, reason=f"{lost}; {verdict.reason}", detail=detail, action="none")


def _transport(view: HostView, verdict: Verdict) -> str:
    """What is slow about the transports that NCCL chose for this figure's ranks, or empty."""
    told = _told(view, verdict, "transport")
    names = re.split(r"[,;|+\s]+", told) if isinstance(told, str) else []
    if verdict.scope.startswith("gang="):
        slow = next((name for name in names if _slow_between(name)), "")
        if slow.upper().startswith("NET/SOCKET"):
            return f"the ranks talk over {slow}, not InfiniBand: NCCL's fast path is lost; {CHECK_BETWEEN}"
        return (
            f"the ranks talk over {slow} without GPUDirect RDMA: NCCL's fast path is lost; {CHECK_BETWEEN}"
            if slow
            else ""
        )
    slow = next((name for name in names if name.upper().startswith(("SHM", "NET"))), "")
    return f"the ranks talk over {slow}, not P2P: NCCL's fast path is lost; {CHECK_WITHIN}" if slow else ""


def _slow_between(name: str) -> bool:
    upper = name.upper()
    return upper.startswith("NET/SOCKET") or (upper.startswith("NET/IB") and "GDRDMA" not in upper)


def _nvls(view: HostView, verdict: Verdict) -> str:
    """NVLS is off where the model's criteria know what it brings, and the one that failed was not made for its absence."""
    criteria = view.criteria()
    failed = criteria.get(verdict.criterion)
    if _told(view, verdict, "nvls") is not False or (failed and failed.where.get("nvls") is False):
        return ""
    expected = any(item.where.get("nvls") is True and item.stage in ("", verdict.stage) for item in criteria.values())
    return f"NVLS is off; {CHECK_NVLS}" if expected else ""


def _told(view: HostView, verdict: Verdict, kind: str) -> Value:
    """What the launch observed of its path, else what the figure itself says."""
    seen = [
        item.value
        for item in view.observations.get(f"collective.{kind}", ())
        if (item.stage, item.scope) == (verdict.stage, verdict.scope) and item.status == MEASURED
    ]
    return seen[-1] if seen else verdict.params.get(kind)
