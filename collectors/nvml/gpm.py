"""GPU performance counters (GPM, from Hopper on): means over the time since the previous collection."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import pynvml as nvml

from collectors.base import Absent, ReadingError, Value
from collectors.nvml.calls import binding, call, translate, try_read, unsupported_error
from collectors.nvml.gpu import NvmlGpu
from collectors.nvml.rows import VARIES

MIN_INTERVAL_S = 0.5
"""If `GpmCounters.read` is called within this time after the last sample, it takes no sample and returns the previous values.
(NVML needs more than 100 ms between samples.)"""
FIRST_INTERVAL_S = 0.15
"""Time between the first two samples of a GPU."""
MIB = float(1 << 20)
PERCENT = 0.01
_ROOT_ONLY = "the driver restricts GPM to root (RmProfilingAdminOnly in /proc/driver/nvidia/params)"


class GpmKind(NamedTuple):
    """A reading with one value per GPU.

    `metric` is its number in NVML (nvmlGpmMetricId_t). `factor` converts NVML's value to `unit`.
    """

    name: str
    unit: str
    change: str
    help: str
    metric: int
    factor: float = PERCENT


GPM_KINDS = (
    GpmKind("gpu.gpm.graphics_active", "ratio", VARIES, "Share of time in which compute or graphics work was active", 1),
    GpmKind("gpu.gpm.sm_active", "ratio", VARIES, "Share of SMs that were busy", 2),
    GpmKind("gpu.gpm.sm_occupancy", "ratio", VARIES, "Active warps as a share of the maximum", 3),
    GpmKind("gpu.gpm.integer_active", "ratio", VARIES, "Share of time in which SMs did integer operations", 4),
    GpmKind("gpu.gpm.tensor_active", "ratio", VARIES, "Share of time in which the tensor cores were active", 5),
    GpmKind("gpu.gpm.memory_active", "ratio", VARIES, "Used memory bandwidth as a share of the maximum", 10),
    GpmKind("gpu.gpm.fp64_active", "ratio", VARIES, "Share of time in which SMs did FP64 operations, tensor cores aside", 11),
    GpmKind("gpu.gpm.fp32_active", "ratio", VARIES, "Share of time in which SMs did FP32 operations, tensor cores aside", 12),
    GpmKind("gpu.gpm.fp16_active", "ratio", VARIES, "Share of time in which SMs did FP16 operations, tensor cores aside", 13),
    GpmKind("gpu.gpm.pcie_sent", "B/s", VARIES, "Data sent over PCIe", 20, MIB),
    GpmKind("gpu.gpm.pcie_received", "B/s", VARIES, "Data received over PCIe", 21, MIB),
    GpmKind("gpu.gpm.nvlink_received", "B/s", VARIES, "Data received over all NVLinks", 60, MIB),
    GpmKind("gpu.gpm.nvlink_sent", "B/s", VARIES, "Data sent over all NVLinks", 61, MIB),
)  # fmt: skip

GpmValues = Mapping[str, Value | Absent]


class GpmCounters:
    """The two newest samples of one GPU. NVML owns the memory of the samples, so NVML must stay open while one is allocated."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._newest: Any = None
        self._older: Any = None
        self._sampled_at = 0.0
        self._values: GpmValues = {}

    @property
    def has_sample(self) -> bool:
        """Whether a sample is allocated."""
        return self._newest is not None

    def read(self, gpu: NvmlGpu) -> GpmValues:
        """Return the value of each of GPM_KINDS, as a mean over the time since the previous sample, or why it is absent.

        Within MIN_INTERVAL_S after a sample, return the values of the previous call.
        """
        if self._values and self._clock() - self._sampled_at < MIN_INTERVAL_S:
            return self._values
        values: GpmValues | Absent = try_read(lambda: self._read(gpu))
        if isinstance(values, Absent):
            values = dict.fromkeys((kind.name for kind in GPM_KINDS), values)
        self._values = values
        return values

    def free(self) -> None:
        """Free the samples. Must be called before this object is dropped."""
        for sample in (self._newest, self._older):
            if sample is not None:
                try_read(lambda: call("nvmlGpmSampleFree", sample))  # noqa: B023
        self._newest = self._older = None

    def _read(self, gpu: NvmlGpu) -> GpmValues:
        try:
            if self._newest is None:
                self._start(gpu)
            self._sampled_at = self._clock()
            sample = self._sample(gpu, self._older)
        except (nvml.NVMLError, ReadingError) as error:
            self.free()
            if isinstance(error, nvml.NVMLError_NoPermission):
                raise unsupported_error(_ROOT_ONLY) from None
            raise
        self._newest, self._older = sample, self._newest
        return _compare(self._older, sample)

    def _start(self, gpu: NvmlGpu) -> None:
        """Take the first sample and wait, because values need two samples."""
        if not call("nvmlGpmQueryDeviceSupport", gpu.handle).isSupportedDevice:
            raise unsupported_error("the GPU has no GPM (introduced with Hopper)")
        self._newest, self._older = call("nvmlGpmSampleAlloc"), call("nvmlGpmSampleAlloc")
        self._sample(gpu, self._newest)
        time.sleep(FIRST_INTERVAL_S)

    def _sample(self, gpu: NvmlGpu, memory: Any) -> Any:
        return binding("nvmlGpmSampleGet")(gpu.handle, memory)


def _compare(previous: Any, current: Any) -> GpmValues:
    """Return the value of each of GPM_KINDS, as a mean over the time between two samples. Raises ReadingError."""
    request = binding("c_nvmlGpmMetricsGet_t")()
    request.version, request.numMetrics = nvml.NVML_GPM_METRICS_GET_VERSION, len(GPM_KINDS)
    request.sample1, request.sample2 = previous, current
    for metric, kind in zip(request.metrics, GPM_KINDS, strict=False):
        metric.metricId = kind.metric
    call("nvmlGpmMetricsGet", request)
    return {
        kind.name: try_read(lambda: _value(metric, kind))  # noqa: B023
        for metric, kind in zip(request.metrics, GPM_KINDS, strict=False)
    }


def _value(metric: Any, kind: GpmKind) -> float:
    if metric.nvmlReturn:
        raise ReadingError(translate(nvml.NVMLError(metric.nvmlReturn)))
    if not math.isfinite(metric.value):
        raise ReadingError(Absent.error(f"NVML: not a finite number: {metric.value}"))
    return float(metric.value) * kind.factor
