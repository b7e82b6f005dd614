"""Clock throttling: the reasons that are active, and how long each reason has throttled the clocks since driver load."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pynvml as nvml

from collectors.base import Absent, ReadingError, Value
from collectors.nvml import gpu as fields
from collectors.nvml.calls import try_read, unsupported_error
from collectors.nvml.gpu import NvmlGpu, field_value

THROTTLE_REASONS = {
    "power_cap": nvml.nvmlClocksEventReasonSwPowerCap,
    "hw_slowdown": nvml.nvmlClocksThrottleReasonHwSlowdown,
    "sw_thermal": nvml.nvmlClocksEventReasonSwThermalSlowdown,
    "hw_thermal": nvml.nvmlClocksThrottleReasonHwThermalSlowdown,
    "hw_power_brake": nvml.nvmlClocksThrottleReasonHwPowerBrakeSlowdown,
}
THROTTLE_TIMES = {
    "power_cap": (fields.POWER_POLICY,),
    "sync_boost": (fields.SYNC_BOOST,),
    "board_limit": (fields.BOARD_LIMIT,),
    "reliability": (fields.RELIABILITY,),
    "sw_thermal": fields.SW_THERMAL,
    "hw_thermal": fields.HW_THERMAL,
    "hw_power_brake": fields.POWER_BRAKE,
}
"""Reason -> numbers of NVML fields that count the nanoseconds for which it throttled the clocks. The first field that the driver
has is used."""
ANY_THERMAL = "thermal"
"""Reason whose time includes software and hardware thermal slowdown, for drivers that do not count the two separately."""


def throttling(gpu: NvmlGpu) -> Iterator[tuple[str, Value | Absent]]:
    """Yield each of THROTTLE_REASONS, and whether it is active now."""
    bits = try_read(lambda: clock_reasons(gpu.handle))
    for reason, mask in THROTTLE_REASONS.items():
        yield reason, bits if isinstance(bits, Absent) else bool(int(bits) & mask)


def clock_reasons(handle: Any) -> int:
    """Return the mask of clock event reasons. Raises NVMLError."""
    try:
        return int(nvml.nvmlDeviceGetCurrentClocksEventReasons(handle))
    except nvml.NVMLError_FunctionNotFound:  # drivers before R535 have the old name only
        return int(nvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle))


def throttle_times(gpu: NvmlGpu) -> Iterator[tuple[str, Value | Absent]]:
    """Yield each reason, and the seconds for which it has throttled the clocks."""
    times = {reason: try_read(lambda: _seconds(gpu, numbers)) for reason, numbers in THROTTLE_TIMES.items()}  # noqa: B023
    yield from times.items()
    thermal = [times["sw_thermal"], times["hw_thermal"]]
    absent = [time for time in thermal if isinstance(time, Absent)]
    if len(absent) < len(thermal):
        yield ANY_THERMAL, Absent.unsupported("reported separately as sw_thermal and hw_thermal")
    elif all(time.status == "unsupported" for time in absent):
        yield ANY_THERMAL, try_read(lambda: _seconds(gpu, (fields.THERMAL_POLICY,)))
    else:
        yield ANY_THERMAL, next(time for time in absent if time.status == "error")


def _seconds(gpu: NvmlGpu, numbers: tuple[int, ...]) -> float:
    failure = unsupported_error("NVML: Not Supported")
    for number in numbers:
        field = gpu.field(number)
        try:
            nanoseconds = float(field_value(field))
        except ReadingError as error:
            failure = error if error.absent.status == "error" else failure
            continue
        # A driver may use this number for another field. The value of that field has another type than WIDE and is ignored.
        if field.valueType == fields.WIDE:
            return nanoseconds / 1e9
    raise failure
