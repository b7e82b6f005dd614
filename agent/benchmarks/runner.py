"""The benchmarks one after the other: of each its figures, or for every one that it owes the reason why there is none."""

from __future__ import annotations

import importlib
import sys
import time
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from agent.benchmarks.links import pairs
from agent.benchmarks.runtime import nccl_log
from agent.benchmarks.runtime.context import Context, failed, join
from schemas.catalogue import BENCHMARKS, DURATION, expand, settings
from schemas.records import ERROR, SKIPPED

NOT_THERE = (RuntimeError, ValueError)
"""What torch's stores raise when they have waited long enough, by version."""


def run_all(context: Context, benchmarks: Mapping[str, dict[str, Any]], broken: str = "") -> None:
    """First what each rank does with its own device, then what all do together: a lost GPU costs only its own figures."""
    alone = [name for name in benchmarks if not BENCHMARKS[name].needs_group]
    together = [name for name in benchmarks if BENCHMARKS[name].needs_group]
    for name in alone:
        if broken:
            context.begin(name)
            context.leave()
            _fill(context, name, benchmarks[name], ERROR, broken)
        else:
            _run(context, name, benchmarks[name])
            broken = device_lost(context)
    why = _roll_call(context, broken) if together else ""
    if together and not why:
        context.begin("join")
        join(context)
        if "collective" not in together or context.world_size == 1:
            nccl_log.hush()  # nobody reads what NCCL has to say
    for name in together:
        if why:
            _fill(context, name, benchmarks[name], SKIPPED, why)
        elif error := _run(context, name, benchmarks[name]):
            why = f"the process group broke in {name}: {error}"
    if together and not why:
        context.begin("leave")
        dist.destroy_process_group()


def _run(context: Context, name: str, chosen: dict[str, Any]) -> str:
    """Runs one benchmark; returns what it broke on, or an empty string."""
    context.begin(name)
    print(f"{name} …", file=sys.stderr, flush=True)
    began, problem = time.monotonic(), ""
    try:
        importlib.import_module(f"agent.benchmarks.{BENCHMARKS[name].group}.{name}").run(
            context, settings(name, chosen)
        )
        if context.kind == "gpu":
            torch.cuda.empty_cache()
    except Exception as error:  # noqa: BLE001 - a benchmark that fails is a result; the next one still runs
        status, problem = failed(error)
        print(f"{name}: {problem}", file=sys.stderr, flush=True)  # the rank's log
        if BENCHMARKS[name].needs_group:
            context.heart.fail(problem)
        _fill(context, name, chosen, status, problem)
    finally:
        context.leave()
    duration: dict[str, Any] = {
        "unit": "s",
        "scope": "host" if context.speaks_for_world else context.device_scope,
        "benchmark": name,
    }
    if problem:  # told by every rank, since the figures that it was to bring may all have been made before
        context.absent(DURATION.name, status=ERROR, reason=problem, **duration)
    elif context.speaks_for_world:
        context.measured(DURATION.name, time.monotonic() - began, **duration)
    context.save()
    return problem


def device_lost(context: Context) -> str:
    """Why the device can do nothing any more, or an empty string: after some errors CUDA refuses all that follows."""
    try:
        torch.zeros(1, device=context.device).add_(1)
        context.synchronize()  # waits only so long: a kernel that hangs would hold up whoever reads the result
    except (RuntimeError, TimeoutError) as error:
        return f"the device was lost: {failed(error)[1]}"
    return ""


def _roll_call(context: Context, broken: str) -> str:
    """Who cannot take part in the process group, by name and reason; an empty string where all can.

    NCCL itself would wait for a rank that is not there, and name nobody.
    """
    context.heart.grouped, context.unable = True, broken
    context.begin("roll call")
    context.store.set(f"roll/{context.rank}", broken or "here")
    # One rank decides for all: each by itself, a rank that is late would be in for some and out for others.
    if context.rank == 0:
        context.store.set("roll", _absent_ranks(context))
    try:
        context.store.wait(["roll"], timedelta(seconds=2 * context.timeout_s + 10))
        return context.store.get("roll").decode()
    except NOT_THERE:
        return "rank 0 called no roll: it, or its host, is lost"


def _absent_ranks(context: Context) -> str:
    ends = time.monotonic() + context.timeout_s
    absent = []
    for rank in range(context.world_size):
        key = f"roll/{rank}"
        try:
            context.store.wait([key], timedelta(seconds=max(0.1, ends - time.monotonic())))
            said = context.store.get(key).decode()
        except NOT_THERE:
            said = f"did not come within {context.timeout_s:g} s"
        if said != "here":
            absent.append(f"rank {rank} cannot take part: {said}")
    return "; ".join(absent)[:1000]


def _fill(context: Context, name: str, chosen: dict[str, Any], status: str, reason: str) -> None:
    """Says why, for every output that the benchmark owes and has not made."""
    for item in expand(context.stage, name, chosen, context.kind):
        output = next((output for output in BENCHMARKS[name].outputs if output.makes(item.name)), DURATION)
        for scope in [] if output.sampled or output is DURATION else _scopes(context, item.scope, chosen):
            made = any(
                seen.name == item.name and seen.scope == scope and item.params.items() <= seen.params.items()
                for seen in context.observations
            )
            if not made:
                context.absent(item.name, unit=output.unit, scope=scope, status=status, reason=reason, **item.params)


def _scopes(context: Context, kind: str, chosen: dict[str, Any]) -> list[str]:
    """The scopes of that kind for which this rank speaks."""
    if kind == "peers":
        return pairs.scopes(context, settings("pairs", chosen))
    if kind == "device":
        return [context.device_scope]
    if kind == "pair":
        return [context.pair_scope(peer) for peer in range(context.local_world_size) if peer != context.local_rank]
    return [context.world_scope] if context.speaks_for_world else []
