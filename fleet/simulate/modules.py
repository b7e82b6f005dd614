"""Readings of an optical module (transceiver) for two simulated faults: a lane that receives no light, and a degrading cable.

Healthy simulated hosts have no readings of modules, like real hosts on which the program mlxlink is not installed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from schemas.readings import READINGS

PORT = "hca=mlx5_0,port=1"
LANES, DARK = (1, 2, 3, 4), 3
"""Lanes of the module, and the lane that receives no light."""
_LIGHT_W = 1.5e-3
"""Optical power in watts that a lane without a fault receives."""
_MODULE = {"vendor": "SIMULATED", "part_number": "SIM-OSFP-400", "serial": "SIM0000001", "firmware_version": "1.0"}
_COUNTERS = ("port.symbol_errors", "port.fec_uncorrectable", "port.link_downs")


def module_with_dark_lane() -> list[dict[str, Any]]:
    """Return the readings of a module that receives no light on one lane."""
    power = {lane: 0.0 if lane == DARK else _LIGHT_W for lane in LANES}
    return [
        *_identity(),
        _metric("optics.rx_power", _by_lane(power)),
        _metric("optics.rx_power.alarm", _by_lane({lane: "low" if lane == DARK else "none" for lane in LANES})),
        _metric("optics.rx_los", _by_lane({lane: lane == DARK for lane in LANES})),
    ]


def module_on_degrading_cable(launches: int) -> list[dict[str, Any]]:
    """Return the readings of a module after `launches` launches. In each, the port counted errors, but the link stayed up."""
    errors = {name: count * launches for name, count in zip(_COUNTERS, (4000, 12, 0), strict=True)}
    power = dict.fromkeys(LANES, _LIGHT_W)
    counters = [_metric(name, {PORT: count}) for name, count in errors.items()]
    return [*_identity(), _metric("optics.rx_power", _by_lane(power)), *counters]


def _identity() -> Iterator[dict[str, Any]]:
    for name, text in _MODULE.items():
        yield _metric(f"optics.module.{name}", {PORT: text})


def _by_lane(values: Mapping[int, Any]) -> dict[str, Any]:
    return {f"{PORT},lane={lane}": value for lane, value in values.items()}


def _metric(name: str, values: Mapping[str, Any]) -> dict[str, Any]:
    return {"name": name, "unit": READINGS[name].unit, "values": dict(values)}
