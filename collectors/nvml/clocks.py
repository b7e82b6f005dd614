"""What holds the clocks down, now and for how long since the driver was loaded."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pynvml as nvml

from collectors.base import Absent, Value
from collectors.nvml import gpu as fields
from collectors.nvml.calls import UnreadError, read, unsupported
from collectors.nvml.gpu import Gpu, value

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
"""Reason -> the fields that count its nanoseconds: the first of them that the driver has."""
ANY_THERMAL = "thermal"
"""The one thermal counter of drivers that do not tell software's slowdown from the hardware's."""


def throttling(gpu: Gpu) -> Iterator[tuple[str, Value | Absent]]:
    """Each of THROTTLE_REASONS, and whether it holds now."""
    bits = read(lambda: clock_reasons(gpu.handle))
    for reason, mask in THROTTLE_REASONS.items():
        yield reason, bits if isinstance(bits, Absent) else bool(int(bits) & mask)


def clock_reasons(handle: Any) -> int:
    """The mask of clock event reasons. Raises NVMLError."""
    try:
        return int(nvml.nvmlDeviceGetCurrentClocksEventReasons(handle))
    except nvml.NVMLError_FunctionNotFound:  # drivers before R535 have it under its old name only
        return int(nvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle))


def throttle_times(gpu: Gpu) -> Iterator[tuple[str, Value | Absent]]:
    """Each reason, and the seconds for which it held the clocks down."""
    found = {reason: read(lambda: _seconds(gpu, numbers)) for reason, numbers in THROTTLE_TIMES.items()}  # noqa: B023
    yield from found.items()
    apart = [found["sw_thermal"], found["hw_thermal"]]
    lost = [each for each in apart if isinstance(each, Absent)]
    if len(lost) < len(apart):
        yield ANY_THERMAL, unsupported("told apart as sw_thermal and hw_thermal").absent
    elif all(each.status == "unsupported" for each in lost):
        yield ANY_THERMAL, read(lambda: _seconds(gpu, (fields.THERMAL_POLICY,)))
    else:
        yield ANY_THERMAL, next(each for each in lost if each.status == "error")


def _seconds(gpu: Gpu, numbers: tuple[int, ...]) -> float:
    why = UnreadError(Absent(status="unsupported", reason="NVML: Not Supported"))
    for number in numbers:
        field = gpu.field(number)
        try:
            nanoseconds = float(value(field))
        except UnreadError as missing:
            why = missing if missing.absent.status == "error" else why
            continue
        if field.valueType == fields.WIDE:  # anything narrower is what other drivers have under that number
            return nanoseconds / 1e9
    raise why
