"""For benchmarks that one rank of each host runs: let the other ranks wait, and read the supervisor's request."""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from agent.benchmarks.runtime.rank_context import RankContext

REPORTING_RANK = 0
WAIT_S = 0.2


def wait_for_reporting_rank(context: RankContext) -> None:
    """Wait until the rank that measures has left the benchmark, for whatever reason."""
    while context.is_present(REPORTING_RANK):
        context.heartbeat.record_progress()
        time.sleep(WAIT_S)


def read_request(context: RankContext) -> dict[str, Any]:
    """Return the supervisor's request; empty without a supervisor."""
    try:
        return dict(json.loads((context.work / "request.json").read_text(encoding="utf-8")))
    except OSError:
        return {}
