"""Functions for every rank, with or without torch: compute the fields of its context, redirect its output, run it to its end."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from agent.benchmarks.runtime.rank_context import RankContext
from agent.gang.heartbeat import LAUNCHED, describe_error, rank_heartbeat


def rank_fields(
    request: Mapping[str, Any], work: Path, rank: int, world_size: int, *, launched: float | None = None
) -> dict[str, Any]:
    """Return the fields of this rank's context, from the request and the launcher's variables.

    Args:
        launched: `time.monotonic()` at the start of the launch (default: now). It is used only without a supervisor. A supervisor
            sets the environment variable RACKPROOF_LAUNCHED, which takes precedence.
    """
    return {
        "rank": rank,
        "world_size": world_size,
        "local_rank": int(os.environ.get("LOCAL_RANK", "0")),
        "local_world_size": int(os.environ.get("LOCAL_WORLD_SIZE", "1")),
        "stage": request["stage"],
        "kind": request["device"],
        "devices": tuple(request["devices"]),
        "world_scope": request["world_scope"],
        "work": work,
        "node": int(os.environ.get("GROUP_RANK", "0")),
        "timeout_s": float(request["collective_timeout_s"]),
        "heartbeat": rank_heartbeat(),
        "launched": float(os.environ.get(LAUNCHED, time.monotonic() if launched is None else launched)),
    }


def redirect_output(context: RankContext) -> None:
    """Redirect this rank's stdout and stderr to its own log. File descriptors are replaced, so NCCL's output goes there too."""
    log = os.open(context.work / f"rank{context.rank}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)


def run_to_end(context: RankContext, run: Callable[[], object]) -> None:
    """Run the benchmarks, save the observations and report to the supervisor that this rank has finished or failed."""
    try:
        run()
        context.save()
        context.begin("end")
        # If a rank fails while it exits, the launcher kills the others. So wait until all ranks of this host have saved.
        context.host_barrier()
    except Exception as error:
        context.heartbeat.record_failure(str(error))
        context.set_phase(f"failed: {describe_error(error)}"[:500], 1)
        context.save()
        raise
    context.set_phase("end", 0)
