"""Data-parallel training steps taken apart: how long each rank computes by itself, and how long it waits for the others.

In a step of DDP the all_reduce of the gradients hides behind the backward pass, and a rank's waiting behind its computing:
from outside the two cannot be told apart, and NCCL's kernels, which spin while they wait, take part of the device besides. So
these steps exchange the gradients only when the backward pass is over, as DDP does after `no_sync`, and a rank takes the times
of two parts, one after the other, by its own clock:

* compute: update, forward and backward pass, until the device has done them. No rank meets another in it.
* exchange: one all_reduce of all gradients. It ends for all ranks at once, so who came last waited for nobody: of each step
  the shortest exchange of all ranks is the communication, and what another's took longer is its wait.

What is not measured: the step is longer than DDP's by what DDP would hide, and computing is not slowed down by communication
beside it. The network is the transformer, on tokens that are on the device, large enough that a GPU and not its launches
decide, as in real trainings: `straggler.launch` says how long the host took to tell the device what to do.

The figures of a rank are means over the middle 90 % of the steps: one hiccup does not show in them, and what disturbs every
tenth step does.
"""

from __future__ import annotations

import contextlib
import gc
import resource
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from agent.benchmarks.compute.gemm import unsupported
from agent.benchmarks.runtime import host_cpu
from agent.benchmarks.runtime.context import Context
from agent.benchmarks.training.training import CannotMeasureError, attempt, tell_absent
from agent.benchmarks.training.transformer import Transformer, tokens
from agent.sampling.statistics import summarize
from schemas.records import UNSUPPORTED

WARM_UP = 4
LEAST_STEPS, MOST_STEPS = 20, 1000
TRIMMED = 0.05
"""Share of the steps left out at either end."""


@dataclass(frozen=True, kw_only=True)
class Step:
    """Where the time of one step went on this rank, in seconds."""

    compute: float
    launch: float
    """Of the computing: until the host had told the device all of it."""
    exchange: float
    cpu: float
    """Of the process's threads, user and system, while it computed."""
    preemptions: int
    """How often a thread lost its processor to another while it computed."""


class Replica:
    """The network and its gradients, in one buffer that one all_reduce averages."""

    def __init__(self, context: Context, settings: dict[str, Any]) -> None:
        self._context = context
        self.dtype = _dtype(context)
        torch.manual_seed(1)
        with context.device:
            self._model = Transformer(int(settings["layers"]), int(settings["width"]), int(settings["heads"]))
        self._parameters = list(self._model.parameters())
        sizes = [parameter.numel() for parameter in self._parameters]
        self._flat = torch.zeros(sum(sizes), device=context.device)
        for parameter, part in zip(self._parameters, self._flat.split(sizes), strict=True):  # type: ignore[no-untyped-call]
            parameter.grad = part.view_as(parameter)
        self._optimizer = torch.optim.SGD(self._parameters, lr=0.01, momentum=0.9)
        self._tokens = tokens(context, int(settings["batch_size"]), int(settings["sequence"]))

    def compute(self) -> None:
        """Takes the gradients of the step before for an update, and leaves this rank's new ones."""
        self._optimizer.step()
        mixed = self.dtype != torch.float32
        with torch.autocast(self._context.device.type, dtype=self.dtype) if mixed else contextlib.nullcontext():
            loss = self._model(self._tokens) / self._context.world_size
        gradients = torch.autograd.grad(loss, self._parameters)
        torch.cat([gradient.flatten() for gradient in gradients], out=self._flat)

    def step(self) -> Step:
        """One step, its two parts by the clock."""
        context, before, began = self._context, resource.getrusage(resource.RUSAGE_SELF), time.perf_counter()
        self.compute()
        launched = time.perf_counter()
        context.synchronize()
        computed, after = time.perf_counter(), resource.getrusage(resource.RUSAGE_SELF)
        with context.heart.together():
            dist.all_reduce(self._flat)
            context.synchronize()
        return Step(
            compute=computed - began,
            launch=launched - began,
            exchange=time.perf_counter() - computed,
            cpu=after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime,
            preemptions=after.ru_nivcsw - before.ru_nivcsw,
        )


def run(context: Context, settings: dict[str, Any]) -> None:
    """Reports of each rank its computing, its waiting and what it got of its host's CPU; of all together the step."""
    try:
        _measure(context, settings)
    except CannotMeasureError as problem:
        tell_absent(context, "straggler", problem)
    finally:
        gc.collect()


def _measure(context: Context, settings: dict[str, Any]) -> None:
    replica = attempt(context, lambda: _tried(context, settings))
    for _ in range(WARM_UP - 1):
        replica.step()
    last = replica.step()
    (slowest,) = context.slowest([last.compute + last.exchange])
    count = max(LEAST_STEPS, min(MOST_STEPS, int(float(settings["seconds"]) / slowest)))  # the same on every rank
    context.phase(f"straggler, {count} steps")
    gc.collect()
    begin, before = time.monotonic(), host_cpu.look()
    steps = [replica.step() for _ in range(count)]
    after, end = host_cpu.look(), time.monotonic()
    params: dict[str, Any] = {key: int(settings[key]) for key in ("layers", "width", "sequence", "batch_size")}
    params["dtype"] = str(replica.dtype).removeprefix("torch.")
    context.window(begin, end, **params)
    _report(context, steps, params)
    _report_host(context, host_cpu.between(before, after), count, params)


def _tried(context: Context, settings: dict[str, Any]) -> Replica:
    """The network, tried out alone: what the device cannot do, or has no memory for, comes out here."""
    replica = Replica(context, settings)
    replica.compute()
    context.synchronize()
    return replica


def _dtype(context: Context) -> torch.dtype:
    if context.device.type != "cuda":
        return torch.float32
    return torch.float16 if unsupported("bf16", context.device) else torch.bfloat16


def _report(context: Context, steps: Sequence[Step], params: dict[str, Any]) -> None:
    exchanges = [step.exchange for step in steps]
    communication = [-value for value in context.slowest([-exchange for exchange in exchanges])]
    waits = [own - least for own, least in zip(exchanges, communication, strict=True)]
    whole = context.slowest([step.compute + step.exchange for step in steps])
    own: dict[str, Any] = {"scope": context.device_scope, **params}
    figures = {"compute": [step.compute for step in steps], "wait": waits, "cpu_time": [step.cpu for step in steps]}
    if context.device.type == "cuda":
        figures["launch"] = [step.launch for step in steps]
    for name, values in figures.items():
        context.measured(f"straggler.{name}", middle(values), unit="s", samples=summarize(values), **own)
    context.measured("straggler.last_share", waits.count(0.0) / len(waits), unit="1", **own)
    preemptions = statistics.fmean(step.preemptions for step in steps)
    context.measured("straggler.preemptions", preemptions, unit="1", **own)
    if context.speaks_for_world:
        own["scope"] = context.world_scope
        for name, values in (("step_time", whole), ("communication", communication)):
            context.measured(f"straggler.{name}", middle(values), unit="s", samples=summarize(values), **own)


def _report_host(context: Context, spent: host_cpu.Spent, steps: int, params: dict[str, Any]) -> None:
    waited = spent.waited if isinstance(spent.waited, str) else spent.waited / steps
    told: dict[str, tuple[float | str, str]] = {
        "cpus": (host_cpu.processors(), "1"),
        "cpu_wait": (waited, "s"),
        "cpu_pressure": (spent.pressure, "1"),
        "cpu_throttled_share": (spent.throttled, "1"),
    }
    for name, (found, unit) in told.items():
        own: dict[str, Any] = {"unit": unit, "scope": context.device_scope, **params}
        if isinstance(found, str):
            context.absent(f"straggler.{name}", status=UNSUPPORTED, reason=found, **own)
        else:
            context.measured(f"straggler.{name}", found, **own)


def middle(values: Sequence[float]) -> float:
    """The mean of the values but the lowest and the highest 5 % of them."""
    left_out = int(len(values) * TRIMMED)
    return statistics.fmean(sorted(values)[left_out : len(values) - left_out])
