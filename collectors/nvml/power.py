"""Power, temperature and clocks."""

from __future__ import annotations

import pynvml as nvml

from collectors.base import Absent, ReadingError
from collectors.nvml.gpu import NvmlGpu, field_value
from collectors.nvml.rows import CONSTANT, COUNTER, ONCE, SLOW, SNAPSHOT_ONLY, VARIES, Getter, Row, count, number

_SM, _MEMORY, _GRAPHICS = nvml.NVML_CLOCK_SM, nvml.NVML_CLOCK_MEM, nvml.NVML_CLOCK_GRAPHICS
_SHUTDOWN, _SLOWDOWN = nvml.NVML_TEMPERATURE_THRESHOLD_SHUTDOWN, nvml.NVML_TEMPERATURE_THRESHOLD_SLOWDOWN
_SHUTDOWN_MARGIN, _SLOWDOWN_MARGIN = 193, 194
_NO_STATE = 32


def _from_milli(getter: str) -> Getter:
    """Return a getter that converts milliwatts to watts, or millijoules to joules."""
    return lambda gpu: gpu.query(getter) / 1000


def _limit_bound(index: int) -> Getter:
    """Return a getter of the lowest (0) or highest (1) power limit that can be set."""
    return lambda gpu: gpu.query("PowerManagementLimitConstraints")[index] / 1000


def _hertz(getter: str, clock: int) -> Getter:
    return number(getter, clock, factor=1_000_000)


def _limit_lowered(gpu: NvmlGpu) -> bool:
    return bool(gpu.query("PowerManagementLimit") < gpu.query("PowerManagementDefaultLimit"))


def _clocks_lowered(gpu: NvmlGpu) -> bool:
    """Return whether the graphics or memory clock set for applications is below its default."""
    return any(
        gpu.query("ApplicationsClock", clock) < gpu.query("DefaultApplicationsClock", clock)
        for clock in (_GRAPHICS, _MEMORY)
    )


def _performance_state(gpu: NvmlGpu) -> int:
    state = int(gpu.query("PerformanceState"))
    if state == _NO_STATE:
        raise ReadingError(Absent.error("NVML: performance state unknown"))
    return state


POWER_ROWS = (
    Row("gpu.temperature", "Cel", VARIES, "GPU temperature", count("Temperature", nvml.NVML_TEMPERATURE_GPU)),
    Row("gpu.temperature_margin", "Cel", VARIES, "Margin to the temperature at which the GPU slows down",
        count("MarginTemperature"), SNAPSHOT_ONLY, signed=True),
    Row("gpu.temperature_margin_slowdown", "Cel", CONSTANT,
        "Temperature margin at which the hardware slows the GPU down (below 0 if software does so earlier)",
        lambda gpu: field_value(gpu.field(_SLOWDOWN_MARGIN)), SNAPSHOT_ONLY, signed=True),
    Row("gpu.temperature_margin_shutdown", "Cel", CONSTANT, "Value of the temperature margin at which the GPU shuts down",
        lambda gpu: field_value(gpu.field(_SHUTDOWN_MARGIN)), SNAPSHOT_ONLY, signed=True),
    Row("gpu.temperature_slowdown", "Cel", CONSTANT, "Temperature at which the hardware slows down",
        count("TemperatureThreshold", _SLOWDOWN), SNAPSHOT_ONLY),
    Row("gpu.temperature_shutdown", "Cel", CONSTANT, "Temperature at which the GPU shuts down",
        count("TemperatureThreshold", _SHUTDOWN), SNAPSHOT_ONLY),
    Row("gpu.fan.speed", "ratio", VARIES, "Requested share of the maximum fan speed", number("FanSpeed", factor=0.01),
        SLOW),
    Row("gpu.power", "W", VARIES, "Power drawn", _from_milli("PowerUsage")),
    Row("gpu.power_limit", "W", VARIES, "Power limit in force", _from_milli("EnforcedPowerLimit")),
    Row("gpu.power_limit_set", "W", VARIES, "Configured power limit", _from_milli("PowerManagementLimit"), SLOW),
    Row("gpu.power_limit_default", "W", CONSTANT, "Default power limit", _from_milli("PowerManagementDefaultLimit")),
    Row("gpu.power_limit_min", "W", CONSTANT, "Lowest configurable power limit", _limit_bound(0), ONCE),
    Row("gpu.power_limit_max", "W", CONSTANT, "Highest configurable power limit", _limit_bound(1), ONCE),
    Row("gpu.power_limit_lowered", "1", VARIES, "The power limit is below the default", _limit_lowered, SLOW),
    Row("gpu.energy", "J", COUNTER, "Energy since driver load", _from_milli("TotalEnergyConsumption"), SLOW),
    Row("gpu.performance_state", "1", VARIES, "Performance state: 0 is the fastest", _performance_state),
    Row("gpu.clock.sm", "Hz", VARIES, "SM clock", _hertz("ClockInfo", _SM)),
    Row("gpu.clock.memory", "Hz", VARIES, "Memory clock", _hertz("ClockInfo", _MEMORY)),
    Row("gpu.clock.sm_max", "Hz", CONSTANT, "Maximum SM clock", _hertz("MaxClockInfo", _SM), ONCE),
    Row("gpu.clock.memory_max", "Hz", CONSTANT, "Maximum memory clock", _hertz("MaxClockInfo", _MEMORY), ONCE),
    Row("gpu.clock.application", "Hz", VARIES, "Graphics clock set for applications",
        _hertz("ApplicationsClock", _GRAPHICS), SNAPSHOT_ONLY),
    Row("gpu.clock.memory_application", "Hz", VARIES, "Memory clock set for applications",
        _hertz("ApplicationsClock", _MEMORY), SNAPSHOT_ONLY),
    Row("gpu.clock.lowered", "1", VARIES, "Application clocks are below the default", _clocks_lowered, SNAPSHOT_ONLY),
)  # fmt: skip
