"""What keeps a GPU busy, by counters of its own (GPM, from Hopper on): means over the time since the collection before."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import pynvml as nvml

from collectors.base import Absent, Value
from collectors.nvml.calls import UnreadError, binding, call, read, translate, unsupported
from collectors.nvml.gpu import Gpu

LEAST_S = 0.5
"""Two samples have to lie more than 100 ms apart; whoever asks sooner is told the same again."""
FIRST_S = 0.15
"""Between the first two samples of a GPU."""
MIB = float(1 << 20)
PERCENT = 0.01
_ROOT_ONLY = "the driver gives its counters to root alone (RmProfilingAdminOnly in /proc/driver/nvidia/params)"


class GpmKind(NamedTuple):
    """A reading that each GPU has one of. `metric` is its number in NVML (nvmlGpmMetricId_t)."""

    name: str
    unit: str
    counter: bool
    help: str
    metric: int
    factor: float = PERCENT


GPM_KINDS = (
    GpmKind("gpu.gpm.graphics_active", "ratio", False, "Share of time in which any compute or graphics work was active", 1),
    GpmKind("gpu.gpm.sm_active", "ratio", False, "Share of SMs that were busy", 2),
    GpmKind("gpu.gpm.sm_occupancy", "ratio", False, "Warps that were active, over the most there can be", 3),
    GpmKind("gpu.gpm.integer_active", "ratio", False, "Share of time in which SMs did integer operations", 4),
    GpmKind("gpu.gpm.tensor_active", "ratio", False, "Share of time in which the tensor cores were active", 5),
    GpmKind("gpu.gpm.memory_active", "ratio", False, "Bandwidth of the device's memory used, over the most there can be", 10),
    GpmKind("gpu.gpm.fp64_active", "ratio", False, "Share of time in which SMs did FP64 operations, tensor cores aside", 11),
    GpmKind("gpu.gpm.fp32_active", "ratio", False, "Share of time in which SMs did FP32 operations, tensor cores aside", 12),
    GpmKind("gpu.gpm.fp16_active", "ratio", False, "Share of time in which SMs did FP16 operations, tensor cores aside", 13),
    GpmKind("gpu.gpm.pcie_sent", "B/s", False, "Sent over PCIe", 20, MIB),
    GpmKind("gpu.gpm.pcie_received", "B/s", False, "Received over PCIe", 21, MIB),
    GpmKind("gpu.gpm.nvlink_received", "B/s", False, "Received over all NVLinks", 60, MIB),
    GpmKind("gpu.gpm.nvlink_sent", "B/s", False, "Sent over all NVLinks", 61, MIB),
)  # fmt: skip

Figures = Mapping[str, Value | Absent]


class Counters:
    """The newest sample of one GPU. It is NVML's own memory, so the library has to stay open for as long as one is held."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._before: Any = None
        self._spare: Any = None
        self._at = 0.0
        self._told: Figures = {}

    @property
    def held(self) -> bool:
        """Whether a sample is held."""
        return self._before is not None

    def read(self, gpu: Gpu) -> Figures:
        """Every one of GPM_KINDS, over the time since it was last asked for, or why it is not there."""
        if self._told and self._clock() - self._at < LEAST_S:
            return self._told
        found = read(lambda: self._since(gpu))
        self._told = dict.fromkeys((kind.name for kind in GPM_KINDS), found) if isinstance(found, Absent) else found
        return self._told

    def drop(self) -> None:
        """Lets go of what is held: the GPU is lost, or another one has its number."""
        for sample in (self._before, self._spare):
            if sample is not None:
                read(lambda: call("nvmlGpmSampleFree", sample))  # noqa: B023
        self._before = self._spare = None

    def _since(self, gpu: Gpu) -> Figures:
        try:
            if self._before is None:
                self._begin(gpu)
            self._at = self._clock()
            now = self._sample(gpu, self._spare)
        except (nvml.NVMLError, UnreadError) as error:
            self.drop()
            if isinstance(error, nvml.NVMLError_NoPermission):
                raise unsupported(_ROOT_ONLY) from None
            raise
        self._before, self._spare = now, self._before
        return _compared(self._spare, now)

    def _begin(self, gpu: Gpu) -> None:
        """The first sample, and a wait: one alone tells nothing."""
        if not call("nvmlGpmQueryDeviceSupport", gpu.handle).isSupportedDevice:
            raise unsupported("the part has no GPM, which came with Hopper")
        self._before, self._spare = call("nvmlGpmSampleAlloc"), call("nvmlGpmSampleAlloc")
        self._sample(gpu, self._before)
        time.sleep(FIRST_S)

    def _sample(self, gpu: Gpu, place: Any) -> Any:
        return binding("nvmlGpmSampleGet")(gpu.handle, place)


def _compared(before: Any, now: Any) -> Figures:
    """What the two samples tell together. Raises UnreadError."""
    asked = binding("c_nvmlGpmMetricsGet_t")()
    asked.version, asked.numMetrics = nvml.NVML_GPM_METRICS_GET_VERSION, len(GPM_KINDS)
    asked.sample1, asked.sample2 = before, now
    for place, kind in zip(asked.metrics, GPM_KINDS, strict=False):
        place.metricId = kind.metric
    call("nvmlGpmMetricsGet", asked)
    return {
        kind.name: read(lambda: _value(place, kind))  # noqa: B023
        for place, kind in zip(asked.metrics, GPM_KINDS, strict=False)
    }


def _value(place: Any, kind: GpmKind) -> float:
    if place.nvmlReturn:
        raise UnreadError(translate(nvml.NVMLError(place.nvmlReturn)))
    if not math.isfinite(place.value):
        raise UnreadError(Absent(status="error", reason=f"NVML: {place.value} is no figure"))
    return float(place.value) * kind.factor
