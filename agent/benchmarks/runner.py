"""Run the benchmarks one after the other, and report the reason for every figure that could not be measured."""

from __future__ import annotations

import gc
import importlib
import time
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from agent.benchmarks.links import pairs
from agent.benchmarks.runtime import nccl_log
from agent.benchmarks.runtime.agreement import CannotMeasureError, log, report_absent_outputs
from agent.benchmarks.runtime.context import Context, join_process_group
from agent.benchmarks.runtime.host_rank import read_request
from agent.gang.heartbeat import describe_error
from schemas.catalogue import BENCHMARKS, DURATION, expand, settings
from schemas.records import ERROR, SKIPPED
from schemas.scopes import directory_scope

STORE_ERRORS = (RuntimeError, ValueError)
"""The errors that torch's stores raise after their time-out, depending on the version."""


def run_all(context: Context, benchmarks: Mapping[str, dict[str, Any]], broken: str = "") -> None:
    """Run the benchmarks of single devices first, then those of all ranks, which are skipped if a GPU is lost.

    Args:
        broken: why this rank's device cannot be used; empty if it can.
    """
    local = [name for name in benchmarks if not BENCHMARKS[name].needs_group]
    collective = [name for name in benchmarks if BENCHMARKS[name].needs_group]
    for name in local:
        if broken:
            context.begin(name)
            context.leave()
            _report_missing(context, name, benchmarks[name], ERROR, broken)
        else:
            run_benchmark(context, name, benchmarks[name])
            broken = device_error(context)
    if not collective:
        return
    reason = _check_readiness(context, broken)
    if not reason:
        context.begin("join")
        join_process_group(context)
        if "collective" not in collective or context.world_size == 1:
            nccl_log.disable()  # only the collective benchmark reads NCCL's log
    for name in collective:
        if reason:
            _report_missing(context, name, benchmarks[name], SKIPPED, reason)
        elif error := run_benchmark(context, name, benchmarks[name]):
            reason = f"the process group broke in {name}: {error}"
    if not reason:
        context.begin("leave")
        dist.destroy_process_group()


def run_benchmark(context: Context, name: str, chosen: Mapping[str, Any]) -> str:
    """Run one benchmark; return the error that ended it. Return an empty string if it finished, or if it cannot be measured."""
    context.begin(name)
    log(f"{name} …")
    began, problem = time.monotonic(), ""
    try:
        module = importlib.import_module(f"agent.benchmarks.{BENCHMARKS[name].group}.{name}")
        module.run(context, settings(name, chosen))
    except CannotMeasureError as error:
        report_absent_outputs(context, name, error)
    except Exception as error:  # noqa: BLE001 - a benchmark that fails is a result; the next one still runs
        problem = describe_error(error)
        log(f"{name}: {problem}")
        if BENCHMARKS[name].needs_group:
            context.heartbeat.record_failure(problem)
        _report_missing(context, name, chosen, ERROR, problem)
    finally:
        context.leave()
    if not problem:
        gc.collect()
        if context.kind == "gpu":
            torch.cuda.empty_cache()
    duration: dict[str, Any] = {
        "unit": "s",
        "scope": "host" if context.is_reporting_rank else context.device_scope,
        "benchmark": name,
    }
    if problem:  # on every rank: if the error came after the last figure, nothing else in the record shows it
        context.report_absent(DURATION.name, status=ERROR, reason=problem, **duration)
    elif context.is_reporting_rank:
        context.report(DURATION.name, time.monotonic() - began, **duration)
    context.save()
    return problem


def device_error(context: Context) -> str:
    """Return why the device can no longer be used, or an empty string. After some errors every CUDA call fails."""
    try:
        torch.zeros(1, device=context.device).add_(1)
        context.synchronize()  # has a time-out, unlike reading the result of a kernel that hangs
    except (RuntimeError, TimeoutError) as error:
        return f"the device was lost: {describe_error(error)}"
    return ""


def _check_readiness(context: Context, broken: str) -> str:
    """Return which ranks cannot join the process group, and why; an empty string if all can.

    NCCL would wait for a missing rank, and would not report which rank it is.
    """
    context.heartbeat.grouped, context.unable = True, broken
    context.begin("readiness check")
    context.store.set(f"roll/{context.rank}", broken or "here")
    # Rank 0 decides for all. If each rank decided alone, some could see a late rank as ready and others as missing.
    if context.rank == 0:
        context.store.set("roll", _unready_ranks(context))
    try:
        context.store.wait(["roll"], timedelta(seconds=2 * context.timeout_s + 10))
        return context.store.get("roll").decode()
    except STORE_ERRORS:
        return "rank 0 did not finish the readiness check: the rank or its host is lost"


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


def _report_missing(context: Context, name: str, chosen: Mapping[str, Any], status: str, reason: str) -> None:
    """Report the reason for every output of the benchmark that this rank should report and has not."""
    for expected in expand(context.stage, name, chosen, context.kind):
        output = next((output for output in BENCHMARKS[name].outputs if output.makes(expected.name)), DURATION)
        for scope in [] if output.sampled or output is DURATION else _scopes(context, name, expected.scope, chosen):
            reported = any(
                observation.name == expected.name
                and observation.scope == scope
                and expected.params.items() <= observation.params.items()
                for observation in context.observations
            )
            if not reported:
                context.report_absent(
                    expected.name, unit=output.unit, scope=scope, status=status, reason=reason, **expected.params
                )


def _scopes(context: Context, benchmark: str, kind: str, chosen: Mapping[str, Any]) -> list[str]:
    """Return the scopes of that kind that this rank reports for the benchmark."""
    if kind == "peers":
        return pairs.expected_scopes(context, settings("pairs", chosen))
    if kind == "directory":
        paths = read_request(context).get(BENCHMARKS[benchmark].directories, []) if context.is_reporting_rank else []
        return [directory_scope(path) for path in paths]
    if kind == "device":
        return [context.device_scope]
    if kind == "pair":
        return [context.pair_scope(peer) for peer in range(context.local_world_size) if peer != context.local_rank]
    return [context.world_scope] if context.is_reporting_rank else []
