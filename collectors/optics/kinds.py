"""The readings of modules and ports: unit, help, and which of them belong to a lane."""

from __future__ import annotations

from collectors.optics.module import FLAGS, LANE, LIMITS, MODULE
from collectors.optics.port import COUNTERS, LINK, OF_LANE

_UNITS = {"temperature": "Cel", "voltage": "V", "rx_power": "W", "tx_power": "W", "bias": "A"}
_NAMES = {
    "temperature": "Temperature of the module", "voltage": "Supply voltage of the module", "rx_power": "Received optical power",
    "tx_power": "Transmitted optical power", "bias": "Bias current of the laser",
}  # fmt: skip


def _limit_help(name: str) -> str:
    quantity, limit = name.split(".")
    level, side = limit.split("_")
    return f"{_NAMES[quantity]}: {side} {level} limit of the module"


KINDS = {
    "optics.module.vendor": ("1", "Vendor of the module or cable"),
    "optics.module.part_number": ("1", "Part number of the module or cable"),
    "optics.module.serial": ("1", "Serial of the module or cable"),
    "optics.module.firmware_version": ("1", "Firmware of the module"),
    "optics.module.type": ("1", "Type of the module"),
    "optics.module.state": ("1", "State of the module (CMIS)"),
    "optics.module.fault": ("1", "The module reports a fault and has switched off"),
    **{f"optics.{name}": (_UNITS[name], _NAMES[name]) for name in (*MODULE, *LANE)},
    **{
        f"optics.{name}.{level}": (
            "1",
            f"{_NAMES[name]}: below (low), above (high) or within (none) the {level} limits of the module",
        )
        for level in ("alarm", "warning")
        for name in (*MODULE, *LANE)
    },
    **{f"optics.{name}": ("W", _limit_help(name)) for name in LIMITS},
    "optics.rx_los": ("1", "The lane receives no signal"),
    "optics.tx_fault": ("1", "The transmitter of the lane has a fault"),
    **{f"port.{name}": kind for name, kind in LINK.items()},
    **{f"port.{name}": ("1", text) for name, text in COUNTERS.items()},
}
POWER_BOUNDS = (0.0, 1.0)
"""Lowest and highest possible power of a lane in watts. Modules send a few milliwatts."""
OF_LANES = frozenset(f"optics.{name}{end}" for name in LANE for end in ("", ".alarm", ".warning")) | {
    *(f"optics.{name}" for name in FLAGS), *(f"port.{name}" for name in OF_LANE),
}  # fmt: skip
"""Readings of a lane. The others belong to a module or a port."""
