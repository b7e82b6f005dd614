"""Data-parallel training steps in two parts: how long each rank computes, and how long it waits for the other ranks.

In a DDP step the all_reduce of the gradients overlaps with the backward pass, so compute time and waiting time cannot be
separated. NCCL's kernels also spin while they wait, which uses part of the device. So these steps exchange the gradients only
after the backward pass, and each rank times the two parts with its own clock:

* compute: update, forward and backward pass, until the device has finished them. Ranks do not interact.
* exchange: one all_reduce of all gradients. It ends on all ranks at the same time, and the rank that begins last does not wait.
  So the shortest exchange of a step is the communication time, and a rank's exchange minus that time is how long the rank waited.

Two effects of DDP are not measured: that computing and communication overlap (so these steps take longer than DDP's), and that
computing and communication slow each other down. The network is that of the benchmark `transformer`, with its tokens in device
memory. On GPUs `straggler.launch` reports how long the host needed to launch the kernels. If that takes most of the compute time,
the processors of the host limit the speed, and not the GPU alone.

Each reported time, except `straggler.cpu_wait`, is a mean without the highest and the lowest 5 % of the values of all steps: a
single delay does not affect it, but a disturbance in every tenth step does. `straggler.cpu_wait` and the figures that are not
times include every step.
"""

from __future__ import annotations

import contextlib
import gc
import resource
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from agent.benchmarks.compute.gemm import unsupported_reason
from agent.benchmarks.runtime import host_cpu
from agent.benchmarks.runtime.agreement import attempt_on_all_ranks
from agent.benchmarks.runtime.context import Context
from agent.benchmarks.training.training_loop import FlatGradients
from agent.benchmarks.training.transformer import Shape, Transformer, make_tokens
from agent.sampling.statistics import summarize
from schemas.records import UNSUPPORTED

WARM_UP = 4
MIN_STEPS, MAX_STEPS = 20, 1000
TRIMMED = 0.05
"""Share of the values that a mean leaves out at each end: the lowest 5 % and the highest 5 %."""


@dataclass(frozen=True, kw_only=True)
class Step:
    """The parts of one step on this rank, in seconds."""

    compute: float
    launch: float
    """The part of `compute` in which the host launches kernels."""
    exchange: float
    cpu: float
    """CPU time (user and system) of the process's threads during `compute`."""
    preemptions: int
    """Involuntary context switches of the process's threads during `compute`."""


class TimedReplica:
    """The network of one rank, with its gradients in one buffer."""

    def __init__(self, context: Context, shape: Shape) -> None:
        self._context = context
        self.dtype = _choose_dtype(context)
        torch.manual_seed(1)
        with context.device:
            self._model = Transformer(shape)
        self._gradients = FlatGradients(self._model.parameters(), context.world_size)
        self._optimizer = torch.optim.SGD(self._model.parameters(), lr=0.01, momentum=0.9)
        self._tokens = make_tokens(context, shape)

    def compute(self) -> None:
        """Update the weights with the gradients of the previous step, then compute this rank's new gradients."""
        self._optimizer.step()
        mixed = self.dtype != torch.float32
        with torch.autocast(self._context.device.type, dtype=self.dtype) if mixed else contextlib.nullcontext():
            loss = self._model(self._tokens)
        self._gradients.compute(loss)

    def step(self) -> Step:
        """Run and time one step."""
        context, before, began = self._context, resource.getrusage(resource.RUSAGE_SELF), time.perf_counter()
        self.compute()
        launched = time.perf_counter()
        context.synchronize()
        computed, after = time.perf_counter(), resource.getrusage(resource.RUSAGE_SELF)
        with context.heartbeat.in_collective():
            self._gradients.all_reduce()
            context.synchronize()
        return Step(
            compute=computed - began,
            launch=launched - began,
            exchange=time.perf_counter() - computed,
            cpu=after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime,
            preemptions=after.ru_nivcsw - before.ru_nivcsw,
        )


def run(context: Context, settings: Mapping[str, Any]) -> None:
    """Report compute time, wait and CPU time of each rank, and the step time of all ranks."""
    shape = Shape.from_settings(settings)
    replica = attempt_on_all_ranks(context, lambda: _tested_replica(context, shape))
    for _ in range(WARM_UP - 1):
        replica.step()
    last = replica.step()
    (slowest,) = context.max_over_ranks([last.compute + last.exchange])
    count = max(MIN_STEPS, min(MAX_STEPS, int(settings["seconds"] / slowest)))  # the same on every rank
    context.set_phase(f"straggler, {count} steps")
    gc.collect()
    begin, counters_before = time.monotonic(), host_cpu.read_counters()
    steps = [replica.step() for _ in range(count)]
    counters_after, end = host_cpu.read_counters(), time.monotonic()
    params: dict[str, Any] = {key: settings[key] for key in ("layers", "width", "sequence", "batch_size")}
    params["dtype"] = str(replica.dtype).removeprefix("torch.")
    context.request_telemetry(begin, end, **params)
    _report_steps(context, steps, params)
    _report_host(context, host_cpu.usage_between(counters_before, counters_after), count, params)


def _tested_replica(context: Context, shape: Shape) -> TimedReplica:
    """Return the replica after one computation by this rank alone.

    The computation fails if there is too little memory, or if the device does not support the data type.
    """
    replica = TimedReplica(context, shape)
    replica.compute()
    context.synchronize()
    return replica


def _choose_dtype(context: Context) -> torch.dtype:
    if context.device.type != "cuda":
        return torch.float32
    return torch.float16 if unsupported_reason("bf16", context.device) else torch.bfloat16


def _report_steps(context: Context, steps: Sequence[Step], params: Mapping[str, Any]) -> None:
    exchanges = [step.exchange for step in steps]
    communication = [-value for value in context.max_over_ranks([-exchange for exchange in exchanges])]
    waits = [exchange - shortest for exchange, shortest in zip(exchanges, communication, strict=True)]
    step_times = context.max_over_ranks([step.compute + step.exchange for step in steps])
    own: dict[str, Any] = {"scope": context.device_scope, **params}
    parts = {"compute": [step.compute for step in steps], "wait": waits, "cpu_time": [step.cpu for step in steps]}
    if context.device.type == "cuda":
        parts["launch"] = [step.launch for step in steps]
    for name, values in parts.items():
        context.report(f"straggler.{name}", trimmed_mean(values), unit="s", samples=summarize(values), **own)
    context.report("straggler.last_share", waits.count(0.0) / len(waits), unit="1", **own)
    preemptions = statistics.fmean(step.preemptions for step in steps)
    context.report("straggler.preemptions", preemptions, unit="1", **own)
    if context.is_reporting_rank:
        own["scope"] = context.world_scope
        for name, values in (("step_time", step_times), ("communication", communication)):
            context.report(f"straggler.{name}", trimmed_mean(values), unit="s", samples=summarize(values), **own)


def _report_host(context: Context, usage: host_cpu.CpuUsage, steps: int, params: Mapping[str, Any]) -> None:
    waited = usage.waited if isinstance(usage.waited, str) else usage.waited / steps
    figures: dict[str, tuple[float | str, str]] = {
        "cpus": (host_cpu.available_cpus(), "1"),
        "cpu_wait": (waited, "s"),
        "cpu_pressure": (usage.pressure, "1"),
        "cpu_throttled_share": (usage.throttled, "1"),
    }
    for name, (figure, unit) in figures.items():
        common: dict[str, Any] = {"unit": unit, "scope": context.device_scope, **params}
        if isinstance(figure, str):
            context.report_absent(f"straggler.{name}", status=UNSUPPORTED, reason=figure, **common)
        else:
            context.report(f"straggler.{name}", figure, **common)


def trimmed_mean(values: Sequence[float]) -> float:
    """Return the mean without the lowest and the highest 5 % of the values."""
    trimmed = int(len(values) * TRIMMED)
    return statistics.fmean(sorted(values)[trimmed : len(values) - trimmed])
