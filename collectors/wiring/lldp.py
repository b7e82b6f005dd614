"""Neighbors of Ethernet ports, from the LLDP daemon of the host (`lldpctl`)."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from collectors.base import Absent
from collectors.programs import find_program, run_program
from collectors.wiring.neighbor import Neighbor, clean_text

NOT_INSTALLED = Absent.unsupported("lldpd is not installed, so the switch port is not read")
NOT_A_SWITCH = Absent.error(
    "the LLDP neighbor is a network adapter, not a switch: the frames come from the LLDP agent of this NIC, or from another host"
)
_SWITCHES = ("Bridge", "Router")
_UNNAMED_PORTS = ("mac", "local")
"""Types of port ID whose value need not be the name of the port. For `mac`, and for `local` if the value is a number, the
description of the port is used as its name."""
_SUBINTERFACE = re.compile(r".+\.\d{1,4}")
"""Name of a VLAN interface (`sfp1.665`)."""


def read_lldp(root: Path) -> Mapping[str, Neighbor | Absent] | Absent:
    """Return interface -> neighbor, without interfaces that have none.

    Return an Absent if lldpd is not installed or gives no valid answer.
    """
    path = find_program(root, "lldpctl")
    if path is None:
        return NOT_INSTALLED
    process = run_program(path, "-f", "json0")
    if isinstance(process, Absent):
        return process
    if process.returncode:
        why = clean_text(process.stderr or process.stdout) or "no message"
        return Absent.error(f"lldpctl: exit code {process.returncode}: {why}: lldpd must run, and lldpctl needs root")
    try:
        return parse_lldp(process.stdout)
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        return Absent.error(f"lldpctl: output is not understood: {clean_text(error) or type(error).__name__}")


def parse_lldp(text: str) -> dict[str, Neighbor | Absent]:
    """Return interface -> neighbor, from the output of `lldpctl -f json0`, or `-f json`.

    An interface without a neighbor is not in the result. Raises ValueError, LookupError, TypeError, AttributeError or
    RecursionError if the text is not such output.
    """
    neighbors: dict[str, list[Neighbor]] = {}
    for lldp in _items(json.loads(text)["lldp"] if text.strip() else _no_document()):
        for name, interface in _interfaces(lldp):
            neighbors.setdefault(name, []).extend(filter(None, [_neighbor(interface)]))
    return {name: _only(of_interface) for name, of_interface in neighbors.items()}


def _no_document() -> Any:
    raise ValueError("no output")


def _items(value: Any) -> list[Any]:
    """Return a list as it is, and any other value in a list: `-f json` writes a list of one item as the item itself."""
    return value if isinstance(value, list) else [value]


def _interfaces(lldp: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    for item in _items(lldp.get("interface", [])):
        if isinstance(item.get("name"), str):
            yield item["name"], item
        else:
            yield from item.items()


def _neighbor(interface: Mapping[str, Any]) -> Neighbor | None:
    """Return the neighbor; None if it is a network adapter.

    A neighbor counts as an adapter if it has no name, and either none of the capabilities _SWITCHES is enabled or its port and
    chassis have the same ID.
    """
    chassis, name = _chassis(interface)
    port = _items(interface["port"])[0]
    chassis_id, port_id = _items(chassis["id"])[0], _items(port["id"])[0]
    capabilities = _items(chassis.get("capability", []))
    switches = any(item.get("type") in _SWITCHES and item.get("enabled") for item in capabilities)
    if not name and (not switches or chassis_id["value"] == port_id["value"]):
        return None
    label, port_name = _text(port.get("descr")), clean_text(port_id["value"])
    if label and port_id["type"] in _UNNAMED_PORTS and (port_id["type"] == "mac" or port_name.isdecimal()):
        port_name = label  # Juniper switches send the SNMP index of the port as its ID
    if not port_name or not clean_text(chassis_id["value"]):
        raise ValueError("a neighbor without a port ID or chassis ID")
    if port_name == clean_text(chassis_id["value"]):
        port_name = ""  # the switch sends its own ID as the ID of each port
    return Neighbor(id=clean_text(chassis_id["value"]), name=name, port=port_name, label=label)


def _chassis(interface: Mapping[str, Any]) -> tuple[Mapping[str, Any], str]:
    """Return the chassis and its name. In `-f json` the name is the key of the chassis."""
    (chassis,) = _items(interface["chassis"])[:1]
    if "id" in chassis:
        return chassis, _text(chassis.get("name"))
    ((name, chassis),) = chassis.items()
    return chassis, clean_text(name)


def _text(value: Any) -> str:
    first = (_items(value) or [None])[0]
    return clean_text(first["value"] if isinstance(first, dict) else first or "")


def _only(neighbors: list[Neighbor]) -> Neighbor | Absent:
    """Return the only neighbor of an interface. If the list is empty, all neighbors were adapters: return NOT_A_SWITCH.

    Several neighbors are an error: a switch without LLDP may have forwarded their frames. But one switch port may be listed
    several times. For two minutes after LLDP was configured on the switch, lldpd lists a port twice: without the name of the
    port, and with it. A port may also be listed once more for each VLAN (`sfp1` and `sfp1.665`). In both cases the entry with the
    name and without a VLAN is returned.
    """
    ports = {(item.id, item.port) for item in neighbors if item.port}
    named = {switch for switch, _ in ports}
    different = [
        item
        for item in dict.fromkeys(neighbors)
        if not (_SUBINTERFACE.fullmatch(item.port) and (item.id, item.port.rpartition(".")[0]) in ports)
        and (item.port or item.id not in named)
    ]
    if not different:
        return NOT_A_SWITCH
    if len(different) > 1:
        names = ", ".join(f"{item.name or item.id} {item.port}".strip() for item in different[:4])
        return Absent.error(f"{len(different)} LLDP neighbors on one port: {names}")
    return different[0]
