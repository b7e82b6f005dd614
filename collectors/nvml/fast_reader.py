"""Readings of GPUs that are fast enough to be taken many times per second."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any, NamedTuple, TypeVar

import pynvml as nvml

from collectors.base import Absent, ReadingError
from collectors.nvml.calls import decode, gpu_count, open_nvml, try_read
from collectors.nvml.clocks import clock_reasons

T = TypeVar("T")

AVERAGED_S = 1.0
"""Time in seconds over which `nvmlDeviceGetPowerUsage` averages (NVML API reference). GPUs before Ampere, and GA100, do not
average. AVERAGED_S is used for them too. So for these GPUs `agent.sampling.power_wave` requires longer load periods than
necessary."""


class GpuSample(NamedTuple):
    """A GPU at one moment. Only temperature and memory clock may be from an earlier read (`slow_interval` of `FastReader`)."""

    power: float
    """W"""
    clock: float
    """SM clock, in Hz."""
    temperature: float
    """°C"""
    reasons: int
    """Mask of clock event reasons."""
    memory_clock: float
    """Hz"""


class PowerSample(NamedTuple):
    """The power of a GPU."""

    power: float
    """W"""
    averaged_s: float
    """Time over which the power is averaged, in seconds; 0: it is the power at one moment."""


class GpuLimits(NamedTuple):
    """The identity of a GPU, and the limits of its power and clock."""

    uuid: str
    power_limit: float | None
    """Enforced power limit in W; None if not reported."""
    clock_max: float | None
    """Maximum SM clock, in Hz; None if not reported."""


def gpu_indices() -> list[int] | Absent:
    """Return the NVML indices of this host's GPUs, or why NVML does not list them."""

    def count() -> list[int]:
        open_nvml()
        try:
            return list(range(gpu_count()))
        finally:
            nvml.nvmlShutdown()

    indices: list[int] | Absent = try_read(count)
    return indices


class FastReader:
    """Reads power, clocks and temperature of chosen GPUs many times per second. Reading one GPU takes less than 1 ms."""

    def __init__(self, devices: Iterable[int], slow_interval: int = 1) -> None:
        """Open NVML. Temperature and memory clock change slowly, so only every `slow_interval`-th read reads them again.

        Raises:
            OSError: NVML cannot be opened.
        """
        try:
            open_nvml()
        except ReadingError as error:
            raise OSError(error.absent.reason) from None
        self._handles: dict[int, Any] = dict.fromkeys(devices)
        self._slow_interval, self._reads = slow_interval, 0
        self._slow_values: dict[int, tuple[float, float]] = {}
        self.current: int | None = None
        """The GPU that is being read. If a call hangs, this is the GPU that does not answer."""

    def read(self) -> dict[int, GpuSample | Absent]:
        """Return a sample of each GPU by NVML index, or the reason why the GPU could not be read."""
        if self._reads % self._slow_interval == 0:
            self._slow_values = {}
        self._reads += 1
        return {index: self._read(index, self._sample) for index in self._handles}

    def read_power(self) -> dict[int, PowerSample | Absent]:
        """Return the power of each GPU by NVML index, or the reason why the GPU could not be read."""
        return {index: self._read(index, lambda number: _power(self._handle(number))) for index in self._handles}

    def limits(self, index: int) -> GpuLimits | Absent:
        """Return the UUID and the limits of one GPU, or the reason why the GPU could not be read."""
        return self._read(index, self._limits)

    def close(self) -> None:
        """Close NVML."""
        with suppress(nvml.NVMLError):
            nvml.nvmlShutdown()

    def _read(self, index: int, get: Callable[[int], T]) -> T | Absent:
        self.current = index
        value: T | Absent = try_read(lambda: get(index))
        self.current = None
        return value

    def _limits(self, index: int) -> GpuLimits:
        gpu = self._handle(index)
        power = try_read(lambda: nvml.nvmlDeviceGetEnforcedPowerLimit(gpu) / 1000)
        clock = try_read(lambda: nvml.nvmlDeviceGetMaxClockInfo(gpu, nvml.NVML_CLOCK_SM) * 1e6)
        values = [None if isinstance(value, Absent) else float(value) for value in (power, clock)]
        return GpuLimits(decode(nvml.nvmlDeviceGetUUID(gpu)), *values)

    def _handle(self, index: int) -> Any:
        gpu = self._handles[index] = self._handles[index] or nvml.nvmlDeviceGetHandleByIndex(index)
        return gpu

    def _sample(self, index: int) -> GpuSample:
        gpu = self._handle(index)
        slow = self._slow_values.get(index)
        if slow is None:
            temperature = float(nvml.nvmlDeviceGetTemperature(gpu, nvml.NVML_TEMPERATURE_GPU))
            memory_clock = nvml.nvmlDeviceGetClockInfo(gpu, nvml.NVML_CLOCK_MEM) * 1e6
            slow = self._slow_values[index] = (temperature, memory_clock)
        clock = nvml.nvmlDeviceGetClockInfo(gpu, nvml.NVML_CLOCK_SM) * 1e6
        return GpuSample(_power(gpu).power, clock, slow[0], clock_reasons(gpu), slow[1])


def _power(gpu: Any) -> PowerSample:
    """Return the power at this moment. If the driver does not report it, return the value of `nvmlDeviceGetPowerUsage`.

    From Ampere on, except GA100, that value is a mean over the last second.
    """
    fields = try_read(lambda: nvml.nvmlDeviceGetFieldValues(gpu, [nvml.NVML_FI_DEV_POWER_INSTANT]))
    if not isinstance(fields, Absent) and fields[0].nvmlReturn == nvml.NVML_SUCCESS and fields[0].value.uiVal:
        return PowerSample(float(fields[0].value.uiVal) / 1000, 0.0)
    return PowerSample(float(nvml.nvmlDeviceGetPowerUsage(gpu)) / 1000, AVERAGED_S)
