"""What holds the clocks down."""

from __future__ import annotations

from typing import Any

import pynvml as nvml

from collectors.base import Absent, Family, Labels
from collectors.nvml.calls import read

THROTTLE_REASONS = {
    "power_cap": nvml.nvmlClocksEventReasonSwPowerCap,
    "hw_slowdown": nvml.nvmlClocksThrottleReasonHwSlowdown,
    "sw_thermal": nvml.nvmlClocksEventReasonSwThermalSlowdown,
    "hw_thermal": nvml.nvmlClocksThrottleReasonHwThermalSlowdown,
    "hw_power_brake": nvml.nvmlClocksThrottleReasonHwPowerBrakeSlowdown,
}


def throttling(devices: dict[int, Any], labels: dict[int, Labels]) -> Family:
    """Each of THROTTLE_REASONS on each GPU."""
    family = Family(name="gpu.throttle.active", unit="1", help="Clocks are held down for this reason")
    for index, gpu in devices.items():
        bits = gpu if isinstance(gpu, Absent) else read(lambda: clock_reasons(gpu))  # noqa: B023
        for reason, mask in THROTTLE_REASONS.items():
            family.add(
                {**labels[index], "reason": reason}, bits if isinstance(bits, Absent) else bool(int(bits) & mask)
            )
    return family


def clock_reasons(gpu: Any) -> int:
    """The mask of clock event reasons. Raises NVMLError."""
    try:
        return int(nvml.nvmlDeviceGetCurrentClocksEventReasons(gpu))
    except nvml.NVMLError_FunctionNotFound:  # drivers before R535 have it under its old name only
        return int(nvml.nvmlDeviceGetCurrentClocksThrottleReasons(gpu))
