"""What is worth reading while the ranks are at it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any, NamedTuple, TypeVar

import pynvml as nvml

from collectors.base import Absent
from collectors.nvml.calls import read, text, translate
from collectors.nvml.clocks import clock_reasons

T = TypeVar("T")


class Beat(NamedTuple):
    """A GPU at one moment."""

    power: float
    """W"""
    clock: float
    """Of the SMs, in Hz."""
    temperature: float
    """°C"""
    reasons: int
    """Mask of clock event reasons."""
    memory_clock: float
    """Hz"""


class Bounds(NamedTuple):
    """Which GPU it is, and what its power and its clock are to be seen against."""

    uuid: str
    power_limit: float
    """In force now, in W; 0: it does not tell."""
    clock_max: float
    """Of the SMs, in Hz; 0: it does not tell."""


def present() -> list[int] | Absent:
    """The NVML indices of this host's GPUs."""

    def ask() -> list[int]:
        nvml.nvmlInit()
        try:
            return list(range(nvml.nvmlDeviceGetCount()))
        finally:
            nvml.nvmlShutdown()

    found: list[int] | Absent = read(ask)
    return found


class Pulse:
    """The few readings of chosen GPUs that are worth taking many times a second: under a millisecond a GPU."""

    def __init__(self, devices: Iterable[int], slow: int = 1) -> None:
        """`slow`: temperature and memory clock, which hardly move, are read every so many times only.

        Raises:
            OSError: NVML does not answer.
        """
        try:
            nvml.nvmlInit()
        except nvml.NVMLError as error:
            raise OSError(translate(error).reason) from None
        self._handles: dict[int, Any] = dict.fromkeys(devices)
        self._slow, self._times = slow, 0
        self._kept: dict[int, tuple[float, float]] = {}
        self.asking: int | None = None
        """The GPU that is asked at this moment: where a call hangs, the one that it hangs on."""

    def read(self) -> dict[int, Beat | Absent]:
        """NVML index -> its beat, or why that GPU gave none; the others are read all the same."""
        if self._times % self._slow == 0:
            self._kept = {}
        self._times += 1
        return {index: self._ask(index, self._beat) for index in self._handles}

    def bounds(self, index: int) -> Bounds | Absent:
        """What that GPU is."""
        return self._ask(index, self._bounds)

    def close(self) -> None:
        """Lets go of NVML."""
        with suppress(nvml.NVMLError):
            nvml.nvmlShutdown()

    def _ask(self, index: int, question: Callable[[int], T]) -> T | Absent:
        self.asking = index
        answer: T | Absent = read(lambda: question(index))
        self.asking = None
        return answer

    def _bounds(self, index: int) -> Bounds:
        gpu = self._handle(index)
        limit = read(lambda: nvml.nvmlDeviceGetEnforcedPowerLimit(gpu) / 1000)
        clock = read(lambda: nvml.nvmlDeviceGetMaxClockInfo(gpu, nvml.NVML_CLOCK_SM) * 1e6)
        known = [0.0 if isinstance(each, Absent) else float(each) for each in (limit, clock)]
        return Bounds(text(nvml.nvmlDeviceGetUUID(gpu)), *known)

    def _handle(self, index: int) -> Any:
        gpu = self._handles[index] = self._handles[index] or nvml.nvmlDeviceGetHandleByIndex(index)
        return gpu

    def _beat(self, index: int) -> Beat:
        gpu = self._handle(index)
        slow = self._kept.get(index)
        if slow is None:
            temperature = float(nvml.nvmlDeviceGetTemperature(gpu, nvml.NVML_TEMPERATURE_GPU))
            slow = self._kept[index] = (temperature, nvml.nvmlDeviceGetClockInfo(gpu, nvml.NVML_CLOCK_MEM) * 1e6)
        clock = nvml.nvmlDeviceGetClockInfo(gpu, nvml.NVML_CLOCK_SM) * 1e6
        return Beat(_power_now(gpu), clock, slow[0], clock_reasons(gpu), slow[1])


def _power_now(gpu: Any) -> float:
    """Power at this moment; what `nvmlDeviceGetPowerUsage` gives is from Ampere on a mean over the last second."""
    fields = read(lambda: nvml.nvmlDeviceGetFieldValues(gpu, [nvml.NVML_FI_DEV_POWER_INSTANT]))
    if not isinstance(fields, Absent) and fields[0].nvmlReturn == nvml.NVML_SUCCESS and fields[0].value.uiVal:
        return float(fields[0].value.uiVal) / 1000
    return float(nvml.nvmlDeviceGetPowerUsage(gpu)) / 1000
