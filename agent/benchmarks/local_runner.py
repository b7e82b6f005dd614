"""Run one benchmark, or all that need no process group, and report the reason for every figure that could not be measured.

This module does not import torch, so that a stage whose benchmarks do not need torch starts without it.
"""

from __future__ import annotations

import importlib
import time
from collections.abc import Mapping
from typing import Any

from agent.benchmarks.links.pair_scopes import expected_scopes
from agent.benchmarks.runtime.agreement import CannotMeasureError, log, report_absent_outputs
from agent.benchmarks.runtime.host_rank import read_request
from agent.benchmarks.runtime.rank_context import RankContext
from agent.gang.heartbeat import describe_error
from schemas.catalogue import BENCHMARKS, DURATION, expand, settings
from schemas.records import ERROR
from schemas.scopes import directory_scope


def run_local(context: RankContext, benchmarks: Mapping[str, dict[str, Any]], broken: str = "") -> str:
    """Run the benchmarks that need no process group.

    Return why this rank's device cannot be used afterwards, or an empty string.

    Args:
        broken: why the device cannot be used before the first benchmark; empty if it can.
    """
    for name in benchmarks:
        if BENCHMARKS[name].needs_group:
            continue
        if broken:
            context.begin(name)
            context.leave()
            report_missing(context, name, benchmarks[name], ERROR, broken)
        else:
            run_benchmark(context, name, benchmarks[name])
            broken = context.device_error()
    return broken


def run_benchmark(context: RankContext, name: str, chosen: Mapping[str, Any]) -> str:
    """Run one benchmark; return the error that ended it.

    Return an empty string if the benchmark finished, or if it raised CannotMeasureError.
    """
    context.begin(name)
    log(f"{name} …")
    began, problem = time.monotonic(), ""
    try:
        module = importlib.import_module(f"agent.benchmarks.{BENCHMARKS[name].group}.{name}")
        module.run(context, settings(name, chosen))
    except CannotMeasureError as error:
        report_absent_outputs(context, name, error)
    except Exception as error:  # noqa: BLE001 - a benchmark that fails is a result, and the next benchmark still runs
        problem = describe_error(error)
        log(f"{name}: {problem}")
        if BENCHMARKS[name].needs_group:
            context.heartbeat.record_failure(problem)
        report_missing(context, name, chosen, ERROR, problem)
    finally:
        context.leave()
    if not problem:
        context.release_memory()
    duration: dict[str, Any] = {
        "unit": "s",
        "scope": "host" if context.is_reporting_rank else context.device_scope,
        "benchmark": name,
    }
    if problem:  # on every rank: if a rank fails after its other figures, only the missing duration shows this
        context.report_absent(DURATION.name, status=ERROR, reason=problem, **duration)
    elif context.is_reporting_rank:
        context.report(DURATION.name, time.monotonic() - began, **duration)
    context.save()
    return problem


def report_missing(context: RankContext, name: str, chosen: Mapping[str, Any], status: str, reason: str) -> None:
    """Report `reason` for every output of the benchmark that this rank should have reported and has not.

    Two kinds of output are left out: the duration, and outputs that the supervisor computes from its own samples.
    """
    for expected in expand(context.stage, name, chosen, context.kind):
        output = next((output for output in BENCHMARKS[name].outputs if output.makes(expected.name)), DURATION)
        for scope in [] if output.sampled or output is DURATION else _scopes(context, name, expected.scope, chosen):
            if not context.has_reported(expected.name, scope, expected.params):
                context.report_absent(
                    expected.name, unit=output.unit, scope=scope, status=status, reason=reason, **expected.params
                )


def _scopes(context: RankContext, benchmark: str, kind: str, chosen: Mapping[str, Any]) -> list[str]:
    """Return the scopes of the kind `kind` (such as `device` or `pair`) that this rank reports for the benchmark."""
    if kind == "peers":
        return expected_scopes(context, settings("pairs", chosen))
    if kind == "directory":
        paths = read_request(context).get(BENCHMARKS[benchmark].directories, []) if context.is_reporting_rank else []
        return [directory_scope(path) for path in paths]
    if kind == "device":
        return [context.device_scope]
    if kind == "pair":
        return [context.pair_scope(peer) for peer in range(context.local_world_size) if peer != context.local_rank]
    return [context.world_scope] if context.is_reporting_rank else []
