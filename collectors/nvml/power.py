"""Power, heat and clocks."""

from __future__ import annotations

import pynvml as nvml

from collectors.base import Absent
from collectors.nvml.calls import UnreadError
from collectors.nvml.gpu import Gpu, value
from collectors.nvml.rows import ONCE, SLOW, THOROUGH, Getter, Row, count, number

_SM, _MEMORY, _GRAPHICS = nvml.NVML_CLOCK_SM, nvml.NVML_CLOCK_MEM, nvml.NVML_CLOCK_GRAPHICS
_SHUTDOWN, _SLOWDOWN = nvml.NVML_TEMPERATURE_THRESHOLD_SHUTDOWN, nvml.NVML_TEMPERATURE_THRESHOLD_SLOWDOWN
_SHUTDOWN_MARGIN, _SLOWDOWN_MARGIN = 193, 194
_NO_STATE = 32


def _watts(getter: str) -> Getter:
    return lambda gpu: gpu.ask(getter) / 1000


def _range(at: int) -> Getter:
    return lambda gpu: gpu.ask("PowerManagementLimitConstraints")[at] / 1000


def _hertz(getter: str, clock: int) -> Getter:
    return number(getter, clock, factor=1_000_000)


def _limit_lowered(gpu: Gpu) -> bool:
    return bool(gpu.ask("PowerManagementLimit") < gpu.ask("PowerManagementDefaultLimit"))


def _clocks_lowered(gpu: Gpu) -> bool:
    """Against the default, not the maximum: parts are shipped with application clocks under it and boost over them."""
    return any(
        gpu.ask("ApplicationsClock", clock) < gpu.ask("DefaultApplicationsClock", clock)
        for clock in (_GRAPHICS, _MEMORY)
    )


def _performance_state(gpu: Gpu) -> int:
    state = int(gpu.ask("PerformanceState"))
    if state == _NO_STATE:
        raise UnreadError(Absent(status="error", reason="NVML: performance state unknown"))
    return state


POWER_ROWS = (
    Row("gpu.temperature", "Cel", False, "GPU temperature", count("Temperature", nvml.NVML_TEMPERATURE_GPU)),
    Row("gpu.temperature_margin", "Cel", False, "How far the GPU is below the temperature that slows it down",
        count("MarginTemperature"), THOROUGH),
    Row("gpu.temperature_margin_slowdown", "Cel", False, "Margin at which the hardware slows down",
        lambda gpu: value(gpu.field(_SLOWDOWN_MARGIN)), THOROUGH),
    Row("gpu.temperature_margin_shutdown", "Cel", False, "Margin at which the GPU shuts down",
        lambda gpu: value(gpu.field(_SHUTDOWN_MARGIN)), THOROUGH),
    Row("gpu.temperature_slowdown", "Cel", False, "Temperature at which the hardware slows down",
        count("TemperatureThreshold", _SLOWDOWN), THOROUGH),
    Row("gpu.temperature_shutdown", "Cel", False, "Temperature at which the GPU shuts down",
        count("TemperatureThreshold", _SHUTDOWN), THOROUGH),
    Row("gpu.fan.speed", "ratio", False, "Share of the highest fan speed that is asked for", number("FanSpeed", factor=0.01),
        SLOW),
    Row("gpu.power", "W", False, "Power drawn", _watts("PowerUsage")),
    Row("gpu.power_limit", "W", False, "Power limit in force", _watts("EnforcedPowerLimit")),
    Row("gpu.power_limit_set", "W", False, "Power limit that was set", _watts("PowerManagementLimit"), SLOW),
    Row("gpu.power_limit_default", "W", False, "The part's power limit", _watts("PowerManagementDefaultLimit")),
    Row("gpu.power_limit_min", "W", False, "Lowest power limit that can be set", _range(0), ONCE),
    Row("gpu.power_limit_max", "W", False, "Highest power limit that can be set", _range(1), ONCE),
    Row("gpu.power_limit_lowered", "1", False, "The power limit was set below the part's own", _limit_lowered, SLOW),
    Row("gpu.energy", "J", True, "Energy since driver load", _watts("TotalEnergyConsumption"), SLOW),
    Row("gpu.performance_state", "1", False, "Performance state: 0 is the fastest", _performance_state),
    Row("gpu.clock.sm", "Hz", False, "SM clock", _hertz("ClockInfo", _SM)),
    Row("gpu.clock.memory", "Hz", False, "Memory clock", _hertz("ClockInfo", _MEMORY)),
    Row("gpu.clock.sm_max", "Hz", False, "Highest SM clock", _hertz("MaxClockInfo", _SM), ONCE),
    Row("gpu.clock.memory_max", "Hz", False, "Highest memory clock", _hertz("MaxClockInfo", _MEMORY), ONCE),
    Row("gpu.clock.application", "Hz", False, "Graphics clock set for applications",
        _hertz("ApplicationsClock", _GRAPHICS), THOROUGH),
    Row("gpu.clock.memory_application", "Hz", False, "Memory clock set for applications",
        _hertz("ApplicationsClock", _MEMORY), THOROUGH),
    Row("gpu.clock.lowered", "1", False, "Application clocks were set below the part's own", _clocks_lowered, THOROUGH),
)  # fmt: skip
