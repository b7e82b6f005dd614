"""Run the benchmarks one after the other: first those that need no process group, then those that need it."""

from __future__ import annotations

import time
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from agent.benchmarks.local_runner import report_missing, run_benchmark, run_local
from agent.benchmarks.runtime import nccl_log
from agent.benchmarks.runtime.context import Context, join_process_group
from schemas.catalogue import BENCHMARKS
from schemas.records import SKIPPED

STORE_ERRORS = (RuntimeError, ValueError)
"""A store of torch raises one of these after its time-out; which one depends on the version of torch."""


def run_all(context: Context, benchmarks: Mapping[str, dict[str, Any]], broken: str = "") -> None:
    """Run the benchmarks that need no process group, then those that need it.

    If any rank cannot join the process group, report all benchmarks that need the group as skipped. If one of these benchmarks
    fails, report the remaining ones as skipped.

    Args:
        broken: why this rank's device is already unusable before the first benchmark; empty if it is usable.
    """
    broken = run_local(context, benchmarks, broken)
    group_benchmarks = [name for name in benchmarks if BENCHMARKS[name].needs_group]
    if not group_benchmarks:
        return
    reason = _check_readiness(context, broken)
    if not reason:
        context.begin("join")
        join_process_group(context)
        # Only the benchmark `collective` reads NCCL's log, and with a single rank it is skipped.
        if "collective" not in group_benchmarks or context.world_size == 1:
            nccl_log.disable()
    for name in group_benchmarks:
        if reason:
            report_missing(context, name, benchmarks[name], SKIPPED, reason)
        elif error := run_benchmark(context, name, benchmarks[name]):
            reason = f"the process group broke in {name}: {error}"
    if not reason:
        context.begin("leave")
        dist.destroy_process_group()


def _check_readiness(context: Context, broken: str) -> str:
    """Return which ranks cannot join the process group, and why; an empty string if all can.

    Without this check, NCCL would wait for a missing rank and not report which rank is missing.
    """
    context.heartbeat.grouped, context.unable = True, broken
    context.begin("readiness check")
    context.store.set(f"roll/{context.rank}", broken or "here")
    # Rank 0 decides for all. If each rank decided alone, a late rank could count as ready on some ranks and as missing on others.
    if context.rank == 0:
        context.store.set("roll", _unready_ranks(context))
    try:
        context.store.wait(["roll"], timedelta(seconds=2 * context.timeout_s + 10))
        return context.store.get("roll").decode()
    except STORE_ERRORS:
        return "rank 0 did not finish the readiness check: rank 0 or its host is lost"


def _unready_ranks(context: Context) -> str:
    deadline = time.monotonic() + context.timeout_s
    unready = []
    for rank in range(context.world_size):
        key = f"roll/{rank}"
        try:
            context.store.wait([key], timedelta(seconds=max(0.1, deadline - time.monotonic())))
            answer = context.store.get(key).decode()
        except STORE_ERRORS:
            answer = f"no answer within {context.timeout_s:g} s"
        if answer != "here":
            unready.append(f"rank {rank} cannot take part: {answer}")
    return "; ".join(unready)[:1000]
