"""Neighbors (switch ports at the other end of the cable) of InfiniBand ports, from `smpquery` of infiniband-diags.

Two directed-route packets query only the device at the other end of the cable, so the time does not depend on the size of the
fabric. A switch answers with its GUID, its name, and the port at which the packet arrived. If the device is not a switch, the
result is an error.
"""

from __future__ import annotations

import re
from pathlib import Path

from collectors.base import Absent
from collectors.programs import find_program, run_program
from collectors.wiring.neighbor import Neighbor, clean_text

PROGRAM = "smpquery"
NOT_INSTALLED = Absent.unsupported("infiniband-diags is not installed, so the switch port is not read")
_FIELD = re.compile(r"^([A-Za-z ]+):\.*(.*)$", re.MULTILINE)
_MANAGED = re.compile(r"MF0;([^:;]+):.*")
"""Description of a managed switch: `MF0;NAME:MODEL/U1`."""
_GUID = re.compile(r"0x[0-9a-f]{16}")


def read_port(root: Path, hca: str, port: str) -> Neighbor | Absent:
    """Return the neighbor of an InfiniBand port with a link."""
    path = find_program(root, PROGRAM)
    if path is None:
        return NOT_INSTALLED
    answers = []
    for query in ("nodeinfo", "nodedesc"):
        process = run_program(path, "-C", hca, "-P", port, "-D", query, f"0,{port}")
        if isinstance(process, Absent):
            return process
        if process.returncode:
            why = clean_text(process.stderr or process.stdout) or "no message"
            return Absent.error(
                f"{PROGRAM} {query}: exit code {process.returncode}: {why}: {PROGRAM} needs root and the module ib_umad"
            )
        answers.append(process.stdout)
    try:
        return parse_neighbor(*answers)
    except (ValueError, KeyError) as error:
        return Absent.error(f"{PROGRAM}: output is not understood: {clean_text(error)}")


def parse_neighbor(node_info: str, node_description: str) -> Neighbor | Absent:
    """Return the neighbor from the output of `smpquery nodeinfo` and `smpquery nodedesc`. Raises ValueError or KeyError."""
    fields = dict(_FIELD.findall(node_info))
    name = switch_name(dict(_FIELD.findall(node_description))["Node Description"])
    if (kind := fields["NodeType"]) != "Switch":
        words = {"Channel Adapter": "an adapter", "Router": "a router"}.get(kind, f"of type {clean_text(kind)}")
        return Absent.error(f"the neighbor is {words} ({name or 'without a name'}), not a switch")
    guid, port = fields["Guid"].lower(), int(fields["LocalPort"])
    if not _GUID.fullmatch(guid) or not 0 < port < 255:
        raise ValueError(f"invalid GUID or port: GUID {guid}, port {port}")
    return Neighbor(id=guid, name=name, port=str(port))


def switch_name(description: str) -> str:
    """Return the name in a node description: `leaf01` for `MF0;leaf01:MQM9700/U1`."""
    text = clean_text(description)
    managed = _MANAGED.fullmatch(text)
    return managed[1] if managed else text
