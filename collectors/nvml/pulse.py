"""What is worth reading while the ranks are at it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pynvml as nvml

from collectors.base import Absent
from collectors.nvml.calls import read, translate
from collectors.nvml.clocks import clock_reasons

Beat = tuple[float, float, float, int]
"""Power in W, SM clock in Hz, temperature in °C, mask of clock event reasons."""


class Pulse:
    """The few readings of chosen GPUs that are worth taking many times a second: under a millisecond a GPU."""

    def __init__(self, devices: Iterable[int]) -> None:
        """Raises OSError where NVML does not answer."""
        try:
            nvml.nvmlInit()
        except nvml.NVMLError as error:
            raise OSError(translate(error).reason) from None
        self._handles: dict[int, Any] = dict.fromkeys(devices)

    def read(self) -> dict[int, Beat | Absent]:
        """NVML index -> its beat, or why that GPU gave none; the others are read all the same."""
        return {index: read(lambda index=index: self._beat(index)) for index in self._handles}  # type: ignore[misc]

    def _beat(self, index: int) -> Beat:
        gpu = self._handles[index] = self._handles[index] or nvml.nvmlDeviceGetHandleByIndex(index)
        return (
            _power_now(gpu),
            nvml.nvmlDeviceGetClockInfo(gpu, nvml.NVML_CLOCK_SM) * 1e6,
            float(nvml.nvmlDeviceGetTemperature(gpu, 0)),
            clock_reasons(gpu),
        )


def _power_now(gpu: Any) -> float:
    """Power at this moment; what `nvmlDeviceGetPowerUsage` gives is from Ampere on a mean over the last second."""
    fields = read(lambda: nvml.nvmlDeviceGetFieldValues(gpu, [nvml.NVML_FI_DEV_POWER_INSTANT]))
    if not isinstance(fields, Absent) and fields[0].nvmlReturn == nvml.NVML_SUCCESS and fields[0].value.uiVal:
        return float(fields[0].value.uiVal) / 1000
    return float(nvml.nvmlDeviceGetPowerUsage(gpu)) / 1000
