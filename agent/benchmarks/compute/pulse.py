"""Pulsed load: matrix products for half of each period, idle for the other half, on all GPUs in phase.

In a launch of one host, the GPUs are also loaded one after the other, each while the others are idle. A wave is a sequence of
periods of equal length.

A weak power supply or regulator carries a steady load, but fails if the load jumps from idle to full: clocks fall, products are
wrong, or the GPU is lost. All GPUs of a launch, of one host or several, begin each period at the same time. Meanwhile the
supervisor (the agent's process that launches the ranks) reads the power of the GPUs more often than NVML updates it.
"""

from __future__ import annotations

import contextlib
import statistics
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from agent.benchmarks.compute.gemm import build_product, unsupported_reason
from agent.benchmarks.runtime.common_start import CommonStart, Start
from agent.benchmarks.runtime.context import Context
from agent.benchmarks.runtime.host_rank import read_request
from agent.benchmarks.runtime.timing import cuda_event
from agent.sampling.power_wave import FAST_TELEMETRY
from agent.sampling.statistics import summarize
from schemas.catalogue import BENCHMARKS, expand
from schemas.records import UNSUPPORTED

LEAST_PERIODS = 2
DUTY = 0.5
"""Share of a period in which the GPU is loaded."""
LATEST = 0.1
"""A period counts as kept only if its load begins at most this share of the period after the scheduled time."""
DEPTH = 2
"""Number of products in the GPU's queue: enough that the GPU never waits for the host, few enough that the load ends in time."""
SPIN_S = 0.001
"""The host does not sleep in the last SPIN_S seconds before a period begins or the wave ends: a sleep may last too long."""
TURN_S = 0.01
"""Seconds from the end of the pause (IDLE_S) to the first period of a GPU that is loaded alone. The ranks of the other
GPUs check every TURN_S seconds whether the turn of this GPU has ended."""
IDLE_S = 0.2
"""Pause before the first period of each wave, so that the GPU is idle before this period as it is before the later ones."""


def run(context: Context, settings: Mapping[str, Any]) -> None:
    """Report for each period length the number of products in a period, and how exactly the periods were kept.

    Also report `pulse.wrong_products`, one number for all period lengths together. The last product of each period must be
    bit-identical to the very first product. The very first and the very last product are also checked against the factors.
    """
    dtype, size = settings["dtype"], settings["size"]
    if reason := unsupported_reason(dtype, context.device):
        _report_unsupported(context, settings, reason)
        return
    members = [str(name) for name in read_request(context).get("members", [])]
    start = CommonStart(context, members)
    load = Load(context, dtype, size)
    common: dict[str, Any] = {"scope": context.device_scope, "dtype": dtype, "size": size}
    try:
        with _fast_telemetry(context):
            for period_ms in settings["periods_ms"]:
                context.set_phase(f"pulse {period_ms} ms, all GPUs")
                _measure_together(context, load, start, settings["seconds"], {**common, "period_ms": period_ms})
            for period_ms in settings["alone_periods_ms"] if len(members) < 2 else ():
                _measure_alone(context, load, settings["seconds"], {**common, "period_ms": period_ms})
        load.verify()
    finally:  # wrong products count even if the GPU fails later
        if load.is_verified or load.wrong:
            context.report("pulse.wrong_products", load.wrong, unit="1", **common)


def _report_unsupported(context: Context, settings: Mapping[str, Any], reason: str) -> None:
    units = {output.name: output.unit for output in BENCHMARKS["pulse"].outputs}
    for item in expand(context.stage, "pulse", settings, context.kind):
        if item.name in units:
            common: dict[str, Any] = {"unit": units[item.name], "scope": context.device_scope, **item.params}
            context.report_absent(item.name, status=UNSUPPORTED, reason=reason, **common)


@contextlib.contextmanager
def _fast_telemetry(context: Context) -> Iterator[None]:
    """Request fast power readings: the supervisor takes them while any rank's marker file exists."""
    marker = context.work / f"{FAST_TELEMETRY}.{context.rank}"
    marker.touch()
    try:
        yield
        context.host_barrier("end")
    finally:
        marker.unlink(missing_ok=True)


class Load:
    """Matrix products on this rank's device, and the number of wrong products."""

    def __init__(self, context: Context, dtype: str, size: int) -> None:
        self.wrong = 0
        self.is_verified = False
        self._context = context
        self._on_gpu = context.device.type == "cuda"
        self._multiply, self._count_wrong_rows = build_product(dtype, size, context.device, seed=1)
        self._product = self._multiply()
        self._expected = self._product.clone()
        self._verify_last()
        self._seconds = statistics.median(context.time(self._multiply, 5))

    def run_until(self, end: float) -> int:
        """Multiply so that the last product ends at about `end` (`time.monotonic()`); return the number of products.

        Raises:
            TimeoutError: the device hangs.
        """
        pending: deque[torch.cuda.Event] = deque()
        count = 0
        while True:
            while pending and pending[0].query():  # type: ignore[no-untyped-call]
                pending.popleft()
            if end - time.monotonic() < (len(pending) + 0.5) * self._seconds:
                break
            if len(pending) < DEPTH:
                self._product = self._multiply()
                count += 1
                if self._on_gpu:
                    pending.append(cuda_event())
                    pending[-1].record()
        if pending:
            self._context.wait_for(pending[-1], pause_s=0.0)  # a pause would lengthen the load of short periods
        return count

    def compare(self) -> None:
        """Compare the last product with the first one; if they differ, count the last one as wrong."""
        differs = (self._product != self._expected).any()
        self._context.synchronize()  # has a time-out, unlike reading the result
        self.wrong += int(differs)

    def verify(self) -> None:
        """Check the last product against its factors, and mark the load as verified."""
        self._verify_last()
        self.is_verified = True

    def _verify_last(self) -> None:
        self.wrong += int(self._count_wrong_rows() > 0)


@dataclass(kw_only=True)
class Wave:
    """Measurements of consecutive periods. Times are those of `time.monotonic()`."""

    start: float
    period_s: float
    work: list[int] = field(default_factory=list)
    """Products in each period."""
    begun: list[float] = field(default_factory=list)
    """When the load of each period began."""
    loaded_s: list[float] = field(default_factory=list)
    """How long the load of each period lasted."""

    @property
    def end(self) -> float:
        """Return when the last period ends according to the schedule."""
        return self.start + len(self.work) * self.period_s

    @property
    def delays_s(self) -> list[float]:
        """Return how many seconds after the scheduled time the load of each period began."""
        return [at - self.start - number * self.period_s for number, at in enumerate(self.begun)]

    @property
    def kept_share(self) -> float:
        """Return the share of the periods that began in time and ran a product. If it is low, the load was no square wave."""
        kept = [
            work > 0 and delay <= LATEST * self.period_s for work, delay in zip(self.work, self.delays_s, strict=True)
        ]
        return sum(kept) / len(kept)

    @property
    def periods_s(self) -> list[float]:
        """Return the measured length of each period in seconds: from the start of its load to the start of the next load."""
        return [later - earlier for earlier, later in zip(self.begun, self.begun[1:], strict=False)]

    @property
    def mean_work(self) -> float:
        """Return the mean number of products per period. A median would be too coarse: a short period has few products."""
        return statistics.fmean(self.work)


def run_wave(
    load: Load, start: float, period_s: float, seconds: float, keep_alive: Callable[[], object] = lambda: None
) -> Wave:
    """Load the device during the first half of each period, for `seconds` rounded to whole periods, at least two.

    Call `keep_alive` in each period, after the load.
    """
    wave = Wave(start=start, period_s=period_s)
    for number in range(max(LEAST_PERIODS, round(seconds / period_s))):
        begin = start + number * period_s
        _wait_until(begin)
        wave.begun.append(time.monotonic())
        wave.work.append(load.run_until(begin + DUTY * period_s))
        wave.loaded_s.append(time.monotonic() - wave.begun[-1])
        load.compare()
        keep_alive()
    _wait_until(wave.end)
    return wave


def _wait_until(moment: float) -> None:
    while (remaining := moment - time.monotonic()) > 0:
        time.sleep(max(0.0, min(remaining - SPIN_S, 1.0)))


def _measure_together(
    context: Context, load: Load, common_start: CommonStart, seconds: float, common: Mapping[str, Any]
) -> None:
    time.sleep(IDLE_S if context.kind == "gpu" else 0.0)
    start = common_start.agree(f"{common['period_ms']} ms")
    wave = _run(context, load, start.at, seconds, common, "all_gpus")
    _report_periods(context, wave, start, common)
    context.report("pulse.work", wave.mean_work, unit="1", samples=summarize(wave.work), **common)
    _report_share(context, wave.mean_work, common)


def _run(context: Context, load: Load, start: float, seconds: float, common: Mapping[str, Any], sharing: str) -> Wave:
    period_s = common["period_ms"] / 1000
    wave = run_wave(load, start, period_s, seconds, context.heartbeat.record_progress)
    context.request_telemetry(wave.start, wave.end, **{**_params(common), "sharing": sharing})
    return wave


def _params(common: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in common.items() if key != "scope"}


def _report_periods(context: Context, wave: Wave, start: Start, common: Mapping[str, Any]) -> None:
    context.report("pulse.period", summarize(wave.periods_s), unit="s", **common)
    duty = summarize([seconds / wave.period_s for seconds in wave.loaded_s])
    context.report("pulse.duty", duty, unit="1", **common)
    context.report("pulse.kept_share", wave.kept_share, unit="1", **common)
    errors = [max(0.0, delay) + start.uncertainty_s for delay in wave.delays_s]
    context.report("pulse.phase_error", summarize(errors), unit="s", **common)
    context.report("pulse.clock_uncertainty", start.uncertainty_s, unit="s", **common)


def _report_share(context: Context, work: float, common: Mapping[str, Any]) -> None:
    """Report this GPU's work (mean number of products per period), divided by the median work of the host's GPUs."""
    name, step = f"pulse/work/{context.node}", common["period_ms"]
    context.store.set(f"{name}/{step}/{context.local_rank}", repr(work))
    context.host_barrier(f"work {step}")
    keys = [f"{name}/{step}/{rank}" for rank in context.present_ranks()]
    values = [float(context.store.get(key).decode()) for key in keys if context.store.check([key])]
    if len(values) > 1 and (median := statistics.median(values)):
        context.report("pulse.work_share", work / median, unit="1", devices=len(values), **common)
        return
    reason = (
        "more than half of the GPUs of this host finished no product"
        if len(values) > 1
        else "no other GPU of this host to compare with"
    )
    context.report_absent("pulse.work_share", unit="1", status=UNSUPPORTED, reason=reason, **common)


def _measure_alone(context: Context, load: Load, seconds: float, common: Mapping[str, Any]) -> None:
    """Load the GPUs of the host one after the other, each while the others are idle."""
    prefix = f"pulse/alone/{context.node}/{common['period_ms']}"
    for rank in range(context.local_world_size):
        context.set_phase(f"pulse {common['period_ms']} ms, rank {rank} alone")
        if rank == context.local_rank:
            time.sleep(IDLE_S if context.kind == "gpu" else 0.0)
            wave = _run(context, load, time.monotonic() + TURN_S, seconds, common, "alone")
            context.report("pulse.alone_work", wave.mean_work, unit="1", samples=summarize(wave.work), **common)
            context.store.set(f"{prefix}/{rank}", "done")
        deadline = time.monotonic() + max(seconds, LEAST_PERIODS * common["period_ms"] / 1000) + context.timeout_s
        while (
            context.is_present(rank) and not context.store.check([f"{prefix}/{rank}"]) and time.monotonic() < deadline
        ):
            context.heartbeat.record_progress()
            time.sleep(TURN_S)
