"""Write fake programs `lldpctl` and `smpquery` below a root. They print what the real programs print on a rail-optimized host."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.fakes import links

SWITCH_PORTS = {links.ROCE_INTERFACE: ("leaf01", "swp1s0"), links.PLAIN_INTERFACE: ("mgmt01", "Ethernet8")}
"""Interface -> name of the switch that it is connected to, and the port of this switch."""
SMPQUERY = """#!/bin/sh
# smpquery -C HCA -P PORT -D QUERY 0,PORT
number=${2#mlx5_}
if [ "$6" = nodedesc ]; then
  echo "Node Description:......................MF0;ib-leaf0$number:MQM9700/U1"
else
  echo "# Node info: DR path slid 65535; dlid 65535; $7"
  echo "NodeType:........................Switch"
  echo "Guid:............................0xfc6a1c0300aa0${number}00"
  echo "LocalPort:.......................1"
fi
"""


def install_programs(root: Path) -> None:
    """Write both fake programs."""
    neighbors = [neighbor(nic, name, port) for nic, (name, port) in SWITCH_PORTS.items()]
    write_program(root, "lldpctl", f"#!/bin/sh\ncat <<'END'\n{lldp(*neighbors)}\nEND\n")
    write_program(root, "smpquery", SMPQUERY)


def write_program(root: Path, name: str, script: str) -> None:
    """Write an executable script to /usr/sbin under the root."""
    path = root / "usr/sbin" / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(script)
    path.chmod(0o755)


def lldp(*neighbors: Mapping[str, Any]) -> str:
    """Return the output of `lldpctl -f json0`."""
    return json.dumps({"lldp": [{"interface": list(neighbors)} if neighbors else {}]})


def neighbor(nic: str, name: str, port: str, *, kind: str = "ifname", description: str = "") -> dict[str, Any]:
    """Return the neighbor of one NIC as an item of the list `interface` in the output of `lldpctl -f json0`."""
    port_fields: dict[str, Any] = {"id": [{"type": kind, "value": port}], "ttl": [{"value": "120"}]}
    if description:
        port_fields["descr"] = [{"value": description}]
    chassis = {
        "id": [{"type": "mac", "value": f"9c:05:91:aa:{sum(name.encode()) % 256:02x}:00"}],
        "name": [{"value": name}],
        "capability": [{"type": "Bridge", "enabled": True}, {"type": "Router", "enabled": True}],
    }
    return {"name": nic, "via": "LLDP", "rid": "1", "chassis": [chassis], "port": [port_fields]}
