"""Let all ranks agree that something cannot be measured, so that no rank waits in a collective for a rank that gave up."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

from agent.benchmarks.runtime.rank_context import RankContext
from agent.gang.heartbeat import describe_error
from schemas.catalogue import outputs
from schemas.records import ERROR

if TYPE_CHECKING:
    from agent.benchmarks.runtime.context import Context

Result = TypeVar("Result")


class CannotMeasureError(Exception):
    """The figures of a benchmark cannot be measured. They are reported as absent with `status`; the message is the reason."""

    def __init__(self, status: str, reason: str) -> None:
        super().__init__(reason)
        self.status = status


def attempt_on_all_ranks(context: Context, work: Callable[[], Result]) -> Result:
    """Return what `work` returns, or raise CannotMeasureError on all ranks if `work` fails on any rank.

    `work` must not use the process group: if a rank fails inside a collective, the other ranks wait there for it.
    """
    problem: CannotMeasureError | None = None
    try:
        result = work()
    except CannotMeasureError as error:
        problem = error
    except Exception as error:  # noqa: BLE001 - torch.compile may raise any exception, and the other ranks must stop too
        problem = CannotMeasureError(ERROR, describe_error(error))
    # A rank on which `work` failed contributes a negative number, from which the others compute the number of that rank.
    lowest, _ = context.min_max_over_ranks(-1 - context.rank if problem else 0)
    if problem:
        log(f"rank {context.rank}: {problem}")
        raise problem
    if lowest < 0:
        raise CannotMeasureError(ERROR, f"rank {-1 - lowest} failed; see its log")
    return result


def report_absent_outputs(context: RankContext, benchmark: str, problem: CannotMeasureError, **params: Any) -> None:
    """Report as absent every output that this rank would report for the benchmark. Each of these observations gets `params`."""
    for output in {output.name: output for output in outputs(benchmark, context.kind)}.values():
        if output.scope == "device" or context.is_reporting_rank:
            scope = context.device_scope if output.scope == "device" else context.world_scope
            status, reason = problem.status, str(problem)
            context.report_absent(output.name, unit=output.unit, scope=scope, status=status, reason=reason, **params)


def log(line: str) -> None:
    """Write a line to this rank's log."""
    sys.stderr.write(f"{line}\n")
    sys.stderr.flush()
