"""Parse the output of `mlxlink -m -c` (NVIDIA MFT) or `mstlink -m -c` (mstflint), as JSON or as text.

All values are texts. `N/A` may mean that there is no link or no module, or that the value is not supported. The exit code of
mlxlink is 0 even if the link is down.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from typing import Any

from collectors.base import Absent, ReadingError, Value
from collectors.optics.module import ALARM, NO_LIGHT_W, NO_LINK, Module, clean_text
from collectors.optics.port import PortReadings

_ANSI = re.compile(r"\x1b\[[0-9;]*m")
_ROW = re.compile(r"^(\S.*?) *: *(.*)$")
LEAST_RATE = 1e-50
"""A bit error rate below this means that no error was counted: mlxlink then prints 15E-255."""
_MAX_LANES = 16
IDENTITY = {
    "Vendor Name": "vendor", "Vendor Part Number": "part_number", "Vendor Serial Number": "serial", "Identifier": "type",
    "FW Version": "firmware_version",
}  # fmt: skip
STATES = {"Ready state": "ModuleReady", "LowPwr state": "ModuleLowPwr", "Fault state": "ModuleFault"}
"""State of a module, as mlxlink prints it -> name of the state in CMIS, which ethtool prints."""
RATES = {"raw_ber": "Raw Physical BER", "effective_ber": "Effective Physical BER", "symbol_ber": "Symbol BER"}
COUNTERS = {
    "symbol_errors": "Symbol Errors", "fec_uncorrectable": "Effective Physical Errors", "link_downs": "Link Down Counter",
    "link_recoveries": "Link Error Recovery Counter",
}  # fmt: skip
INFINIBAND_GIGABITS = {
    "SDR": 10.0, "DDR": 20.0, "QDR": 40.0, "FDR10": 41.0, "FDR": 56.0, "EDR": 100.0, "HDR": 200.0, "NDR": 400.0, "XDR": 800.0,
}  # fmt: skip
"""InfiniBand speed -> its nominal rate in Gb/s over four lanes. It only serves to find the fastest of several speeds."""
_NOT_REPORTED = Absent.unsupported("mlxlink does not report it")

Rows = Mapping[str, str]


def parse_rows(output: str) -> Rows:
    """Return the output of mlxlink as key -> text. Values of lanes are separated by commas.

    Each key is in only one section of the output.

    Raises:
        ReadingError: the output is damaged JSON or JSON with a failed status, or it has no link state.
    """
    text = _ANSI.sub("", output)
    if not text.lstrip().startswith("{"):
        rows = {match[1]: match[2].strip() for line in text.splitlines() if (match := _ROW.match(line))}
    else:
        rows = dict(_json_rows(text))
    if "State" not in rows:
        raise ReadingError(Absent.error("mlxlink: no link state in its output"))
    return rows


def _json_rows(text: str) -> Rows:
    try:
        document = json.loads(text)
        status, sections = document["status"], document["result"]["output"]
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise ReadingError(Absent.error(f"mlxlink: unexpected JSON: {type(error).__name__}: {error}"[:200])) from error
    if not isinstance(status, dict) or status.get("code") != 0:
        message = status.get("message") if isinstance(status, dict) else status
        raise ReadingError(Absent.error(f"mlxlink: {clean_text(str(message))}"))
    rows = {}
    for section in sections.values() if isinstance(sections, dict) else ():
        for key, value in section.items() if isinstance(section, dict) else ():
            rows[str(key)] = _joined(value)
    return rows


def _joined(value: Any) -> str:
    if isinstance(value, Mapping):
        items = value.get("values", ())
        return ",".join(map(str, items)) if isinstance(items, list) else ""
    return str(value)


def has_link(rows: Rows) -> bool:
    """Return whether the link is up."""
    return rows.get("State") == "Active" or rows.get("Physical state") in ("LinkUp", "ETH_AN_FSM_ENABLE")


def module_of(rows: Rows) -> Module:
    """Return the module. Raises ReadingError with the status `unsupported` if there is none."""
    module = Module()
    for key, name in IDENTITY.items():
        if text := _text(rows.get(key)):
            module.identity[name] = clean_text(text)
    if not module.identity.get("vendor") and not module.identity.get("part_number"):
        raise ReadingError(Absent.unsupported("no module"))
    if state := _text(rows.get("Module State")):
        module.identity["state"] = STATES.get(state, clean_text(state))
    _add_quantity(module, "temperature", rows.get("Temperature [C]"), lambda value: value)
    _add_quantity(module, "voltage", rows.get("Voltage [mV]"), lambda value: value / 1e3)
    _add_quantity(module, "bias", rows.get("Bias Current [mA]"), lambda value: value / 1e3)
    _add_quantity(module, "rx_power", rows.get("Rx Power Current [dBm]"), watts)
    _add_quantity(module, "tx_power", rows.get("Tx Power Current [dBm]"), watts)
    for key, name in (("Rx LOS [per lane]", "rx_los"), ("Tx Fault [per lane]", "tx_fault")):
        flags = (rows.get(key) or "").split(",")
        if all(flag.strip() in ("0", "1") for flag in flags):
            module.flags[name] = [flag.strip() == "1" for flag in flags][:_MAX_LANES]
    return module


def watts(dbm: float) -> float:
    """Convert dBm to W. The result is 0 for a power of at most NO_LIGHT_W."""
    power = 10 ** (dbm / 10) * 1e-3 if dbm < 100 else math.inf
    return power if power > NO_LIGHT_W * 1.000001 else 0.0


def _add_quantity(module: Module, quantity: str, text: str | None, convert: Any) -> None:
    """Parse a text and add its values and alarm limits to the module.

    Examples: `52 [-5..75]`; for two lanes, `1.886,1.989 [-10.41..6]`. The limits are in brackets.
    """
    match = re.fullmatch(r"([-+\d.,einfEINF ]+?)(?: *\[(-?[\d.]+)\.\.(-?[\d.]+)\])?", (text or "").strip())
    try:
        values = [convert(float(item)) for item in match[1].split(",")] if match else []
        limits = [convert(float(limit)) for limit in match.groups()[1:] if limit] if match else []
    except ValueError:
        return
    if not values or not all(map(math.isfinite, values)):
        return
    if len(limits) == 2:
        module.add_limits(quantity, ALARM, limits[0], limits[1])
    if quantity in ("temperature", "voltage"):
        module.values[quantity] = values[0]
    else:
        module.lanes[quantity] = values[:_MAX_LANES]


def port_of(rows: Rows) -> PortReadings:
    """Return the readings of the port.

    A counter that mlxlink prints as `N/A` is `unsupported` and not 0. If there is no link, mlxlink prints `N/A` for all counters.
    The reason of each Absent then has the text and the opcode with which mlxlink explains the missing link.
    """
    opcode, status = _text(rows.get("Status Opcode")), clean_text(_text(rows.get("Recommendation")))
    is_up = has_link(rows)
    absent = (
        _NOT_REPORTED if is_up else Absent.unsupported(f"{NO_LINK}: {status or 'no reason reported'} (opcode {opcode})")
    )
    readings: PortReadings = {("fec_mode", ""): clean_text(_text(rows.get("FEC"))) or absent}
    for name, key in RATES.items():
        readings[name, ""] = _rate(rows.get(key), absent)
    for name, key in COUNTERS.items():
        readings[name, ""] = _count(rows.get(key), absent)
    errors = _text(rows.get("Raw Physical Errors Per Lane")).split(",")[:_MAX_LANES]
    counts = {("raw_errors", str(lane)): _count(text, absent) for lane, text in enumerate(errors, 1)}
    has_counts = any(not isinstance(count, Absent) for count in counts.values())
    readings |= counts if has_counts else {("raw_errors", ""): absent}
    minutes = _number(rows.get("Time Since Last Clear [Min]"))
    readings["counter_age", ""] = absent if minutes is None else minutes * 60
    readings["status_opcode", ""] = int(opcode) if is_up and opcode.isdecimal() else absent
    readings["status", ""] = status if is_up and status else absent
    readings["speed", ""] = (clean_text(_text(rows.get("Speed"))) if is_up else "") or absent
    for name, key in (("enabled_speed", "Enabled Link Speed"), ("cable_speed", "Supported Cable Speed")):
        speed = fastest(_text(rows.get(key) or rows.get(f"{key} (Ext.)")))
        readings[name, ""] = (speed if is_up else "") or absent
    return readings


def fastest(text: str) -> str:
    """Return the fastest of the speeds in `NDR,HDR,SDR` or `0x00018000 (400G_4X,200G_4X)`; empty if no speed is known."""
    speeds = re.sub(r"^0x[0-9a-fA-F]+ \((.*)\)$", r"\1", text.strip()).split(",")
    known = [(_gigabits(speed), speed) for speed in map(clean_text, speeds) if _gigabits(speed)]
    return max(known)[1] if known else ""


def _gigabits(speed: str) -> float:
    """Return the rate in Gb/s of a speed as mlxlink prints it: 400 (of four lanes) for `NDR`, 200 for `200G_4X`; 0 if unknown."""
    match = re.match(r"(\d{1,4}(?:\.\d)?)G", speed)
    return float(match[1]) if match else INFINIBAND_GIGABITS.get(speed, 0.0)


def _text(value: str | None) -> str:
    """Return the text; empty for `N/A`."""
    text = (value or "").strip()
    return "" if text in ("N/A", "N/A,N/A,N/A,N/A") else text


def _number(value: str | None) -> float | None:
    try:
        number = float(_text(value))
    except ValueError:
        return None
    return number if math.isfinite(number) and number >= 0 else None


def _rate(value: str | None, absent: Absent) -> Value | Absent:
    number = _number(value)
    if number is None or number > 1:
        return absent
    return number if number >= LEAST_RATE else 0.0


def _count(value: str | None, absent: Absent) -> Value | Absent:
    text = _text(value)
    return int(text) if text.isascii() and text.isdecimal() else absent
