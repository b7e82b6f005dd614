"""For benchmarks that only one rank of each host runs: let the other ranks wait, and read the request.

The supervisor, which is the process that launches the ranks of a host, writes the request. The request has the benchmarks, their
settings and, for storage benchmarks, the directories to measure.
"""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from agent.benchmarks.runtime.rank_context import RankContext

REPORTING_RANK = 0
"""The local rank that runs these benchmarks and reports the figures of its host."""
WAIT_S = 0.2


def wait_for_reporting_rank(context: RankContext) -> None:
    """Wait until the rank that measures has finished the benchmark, has failed in it, or is lost."""
    while context.is_present(REPORTING_RANK):
        context.heartbeat.record_progress()
        time.sleep(WAIT_S)


def read_request(context: RankContext) -> dict[str, Any]:
    """Return the content of `request.json`; empty if that file cannot be read, for example if the rank has no supervisor."""
    try:
        return dict(json.loads((context.work / "request.json").read_text(encoding="utf-8")))
    except OSError:
        return {}
