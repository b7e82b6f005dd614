"""Parse `ethtool -m`, as text of any version or as JSON (version 6.14 and later).

Families of modules: SFP (SFF-8472), QSFP (SFF-8636), and OSFP and QSFP-DD (CMIS). The names of their rows differ.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping
from typing import Any

from collectors.base import Absent, ReadingError
from collectors.optics.module import ALARM, NO_LIGHT_W, WARNING, Module, clean_text
from schemas.records import is_number

_ROW = re.compile(r"^\t([^:\t]\S.*?|\S)\s*:(?: (.*))?$")
_NUMBER = re.compile(r"(-?\d+(?:\.\d+)?) (?:mW|degrees C|V|mA)\b")
_CHANNEL = re.compile(r"\s*\(Chan(?:nel)? (\d+)\)$")
_HEX_DUMP = re.compile(r"^Offset\s+Values|^0x[0-9a-f]{2,4}:", re.MULTILINE)
_UNREADABLE_V = 6.55
"""A voltage of at least this means that the memory page with the voltage could not be read: all bytes are then 0xFF, and 0xFFFF x
100 µV is 6.5535 V."""
_MAX_LANES = 16
IDENTITY = {
    "vendor_name": "vendor", "vendor_pn": "part_number", "vendor_sn": "serial", "identifier_description": "type",
    "module_state_description": "state", "active_firmware_version": "firmware_version",
}  # fmt: skip
QUANTITIES = {
    "module_temperature": ("temperature", 1.0), "module_voltage": ("voltage", 1.0),
    "laser_bias_current": ("bias", 1e-3), "laser_tx_bias_current": ("bias", 1e-3),
    "laser_output_power": ("tx_power", 1e-3), "transmit_avg_optical_power": ("tx_power", 1e-3),
    "receiver_signal_average_optical_power": ("rx_power", 1e-3), "rcvr_signal_avg_optical_power": ("rx_power", 1e-3),
    "receiver_signal_oma": ("rx_power", 1e-3), "rx_power": ("rx_power", 1e-3), "laser_rx_power": ("rx_power", 1e-3),
}  # fmt: skip
"""Key in `Fields` -> quantity, and factor that converts ethtool's unit to the SI unit. The limits of a quantity have the key
`KEY.limits`."""
FLAGS = {"rx_loss_of_signal": "rx_los", "tx_fault": "tx_fault"}

Fields = dict[str, Any]
"""Key, as in the JSON of ethtool -> value: a text, a number, the numbers of all lanes, the flags of all lanes, or the limits of a
quantity. Limits are a dictionary with keys such as `high_alarm_threshold`."""


def parse_module(output: str) -> Module:
    """Return the module in the output of `ethtool -m`, as JSON (option `-j`) or as text.

    Raises:
        ReadingError: this version of ethtool does not know the type of module, or the output has no module or damaged JSON.
    """
    fields: Fields = {}
    text = output
    if output.lstrip().startswith("["):
        try:
            document, end = json.JSONDecoder(object_pairs_hook=_keep_readings).raw_decode(output.lstrip())
        except (ValueError, RecursionError) as error:
            raise ReadingError(Absent.error(f"ethtool -m: not JSON: {error}")) from error
        fields = document[0] if document and isinstance(document[0], dict) else {}
        text = output.lstrip()[end:]  # ethtool prints the measurements of an SFP as text after the JSON
    fields = {**fields, **_text_fields(text)}
    if "vendor_name" not in fields and "identifier_description" not in fields:
        if _HEX_DUMP.search(output):
            reason = "this version of ethtool does not know the type of the module (OSFP needs 5.18, QSFP112 needs 6.6)"
            raise ReadingError(Absent.unsupported(reason))
        raise ReadingError(Absent.error("ethtool -m: no module in its output"))
    return _module(fields)


def _keep_readings(pairs: Iterable[tuple[str, Any]]) -> Fields:
    """Return a JSON object. Append `.limits` to each key of limits, because ethtool may use the same key for the reading."""
    fields: Fields = {}
    for key, value in pairs:
        is_limits = isinstance(value, dict) and "high_alarm_threshold" in value
        fields.setdefault(f"{key}.limits" if is_limits else key, value)
    return fields


def _text_fields(text: str) -> Fields:
    fields: Fields = {}
    for line in text.splitlines():
        if row := _ROW.match(line):
            _add_row(fields, row[1].strip(), (row[2] or "").strip())
    return fields


def _add_row(fields: Fields, label: str, value: str) -> None:
    channel = _CHANNEL.search(label)
    key = _CHANNEL.sub("", label).lower().replace(" ", "_")
    number = _NUMBER.match(value)
    limit = re.fullmatch(r"(.+)_((?:high|low)_(?:alarm|warning)_threshold)", key)
    described = re.fullmatch(r"0x[0-9a-fA-F]+ \((.*)\)", value)
    if limit and number:
        _table(fields, f"{limit[1]}.limits").setdefault(limit[2], float(number[1]))
    elif channel and number and 1 <= int(channel[1]) <= _MAX_LANES:
        _table(fields, key).setdefault(int(channel[1]), float(number[1]))
    elif number:
        fields.setdefault(key, float(number[1]))
    elif described:
        fields.setdefault(f"{key}_description", described[1])
    elif key in FLAGS:
        fields[key] = [item.strip() == "Yes" for item in value.strip("[] ").split(",")] if "[" in value else []
    else:
        fields.setdefault(key, value)


def _table(fields: Fields, key: str) -> dict[Any, float]:
    """Return the dictionary of lanes or limits at a key. If the key has none, set it to an empty dictionary."""
    table = fields.get(key)
    if not isinstance(table, dict):
        table = fields[key] = {}
    return table


def _module(fields: Fields) -> Module:
    module = Module()
    for key, name in IDENTITY.items():
        if key in fields and (text := clean_text(_text(fields[key]))):
            module.identity[name] = text
    readings = {key: item for key, item in QUANTITIES.items() if key in fields}
    for key, (quantity, factor) in readings.items():
        numbers = _numbers(fields[key])
        values = [value * factor for value in numbers if math.isfinite(value)]
        if quantity in ("rx_power", "tx_power"):
            values = [value if value > NO_LIGHT_W * 1.000001 else 0.0 for value in values]
        if quantity in ("temperature", "voltage"):
            module.values |= {quantity: values[0]} if values else {}
        elif values:
            module.lanes[quantity] = values[:_MAX_LANES]
    for key, (quantity, factor) in QUANTITIES.items():
        if isinstance(limits := fields.get(f"{key}.limits"), Mapping):
            for level in (ALARM, WARNING):
                bounds = [_scaled(limits.get(f"{side}_{level}_threshold"), factor) for side in ("low", "high")]
                module.add_limits(quantity, level, *bounds)
    count = max(map(len, module.lanes.values()), default=0)
    for key, name in FLAGS.items():
        if isinstance(fields.get(key), list):
            module.flags[name] = [flag is True for flag in fields[key]][:_MAX_LANES] or [False] * count
    voltage, temperature = module.values.get("voltage"), module.values.get("temperature")
    module.is_unreadable = voltage is not None and voltage >= _UNREADABLE_V
    if not voltage and not temperature:  # ethtool prints 0 for a copper cable, which has no sensor
        module.values.clear()
    return module


def _text(value: object) -> str:
    """Return a value as text: `1.2` for a version, which in JSON is an object with `major` and `minor`."""
    if isinstance(value, Mapping):
        return ".".join(str(value[key]) for key in ("major", "minor") if key in value)
    return str(value)


def _numbers(value: object) -> list[float]:
    """Return the number of each lane, in the order of the lanes. A list of one number may also belong to the whole module."""
    if isinstance(value, Mapping) and isinstance(value.get("values"), list):
        value = value["values"]
    if isinstance(value, Mapping):
        value = [number for _, number in sorted(value.items())]
    items = value if isinstance(value, list) else [value]
    return [float(item) for item in items if is_number(item)]


def _scaled(value: object, factor: float) -> float | None:
    return value * factor if isinstance(value, int | float) and math.isfinite(value) else None
