"""Readings of an optical module (transceiver) for two simulated faults: a lane that receives no light, and a degrading cable.

Healthy simulated hosts have no readings of modules, like real hosts on which the program mlxlink is not installed.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from schemas.readings import READINGS

Doc = dict[str, Any]
PORT = "hca=mlx5_0,port=1"
LANES, DARK = (1, 2, 3, 4), 3
"""Lanes of the module, and the lane that receives no light."""
_LIGHT_W = 1.5e-3
"""Optical power in watts that a lane without a fault receives."""
_MODULE = {"vendor": "SIMULATED", "part_number": "SIM-OSFP-400", "serial": "SIM0000001", "firmware_version": "1.0"}
_COUNTERS = ("port.symbol_errors", "port.fec_uncorrectable", "port.link_downs")


def darken_lane(metrics: list[Doc]) -> None:
    """Change the readings of a snapshot (`metrics`): the module receives no light on one lane."""
    _add_module(metrics)
    _set(metrics, "optics.rx_power", _by_lane({DARK: 0.0}))
    _set(metrics, "optics.rx_power.alarm", _by_lane({lane: "low" if lane == DARK else "none" for lane in LANES}))
    _set(metrics, "optics.rx_los", _by_lane({lane: lane == DARK for lane in LANES}))


def degrade_cable(metrics: list[Doc], launches: int) -> None:
    """Change the readings of a snapshot (`metrics`) that was taken after `launches` launches.

    In each launch, the port counted errors, but the link stayed up.
    """
    _add_module(metrics)
    for name, count in zip(_COUNTERS, (4000, 12, 0), strict=True):
        _set(metrics, name, {PORT: count * launches})


def _add_module(metrics: list[Doc]) -> None:
    """Add the readings of a module without a fault, unless the snapshot has readings of the module already."""
    if any(metric["name"] == "optics.rx_power" for metric in metrics):
        return
    for name, text in _MODULE.items():
        _set(metrics, f"optics.module.{name}", {PORT: text})
    _set(metrics, "optics.rx_power", _by_lane(dict.fromkeys(LANES, _LIGHT_W)))


def _by_lane(values: Mapping[int, Any]) -> Doc:
    return {f"{PORT},lane={lane}": value for lane, value in values.items()}


def _set(metrics: list[Doc], name: str, values: Mapping[str, Any]) -> None:
    """Set the reading `name` to `values` (scope -> value). Its other scopes keep their values."""
    metric = next((metric for metric in metrics if metric["name"] == name), None)
    if metric is None:
        metrics.append(metric := {"name": name, "unit": READINGS[name].unit, "values": {}})
    metric["values"] |= values
