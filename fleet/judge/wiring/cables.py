"""Find the switch port to which each network port is cabled.

A cause (the conclusion from several verdicts) that names a network port also names this switch port.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

from fleet.judge.wiring.links import HostLinks
from fleet.judge.wiring.planned import planned_lines
from schemas.plans import Part
from schemas.scopes import Scope

Cables = Mapping[tuple[str, str], str]
"""Host and scope of a network part or port (`nic=eth1`, `hca=mlx5_0`, `hca=mlx5_0,port=2`) -> the other ends of its cables
(`leaf0 swp3`). An adapter has the cables of all of its ports."""


def cable_ends(manifest: Sequence[Part], hosts: Iterable[HostLinks]) -> Cables:
    """Return the cables of these hosts: the switch port that the host read, or else the one in the manifest.

    For a port without a link, only the manifest states a switch port, because the host cannot read it.
    """
    ends: dict[tuple[str, str], dict[str, None]] = defaultdict(dict)
    by_host = {host.host: host for host in hosts}
    for host in by_host.values():
        for link in host.links if host.has_record else ():
            for part in dict.fromkeys((*link.parts, *link.ports)) if link.switch_id else ():
                ends[host.host, part][link.end] = None
    for line in planned_lines(manifest):
        links = by_host[line.host].links if line.host in by_host else ()
        of_line = [link for link in links if line.slot in link.names]
        adapter, _, number = line.slot.partition("/")
        unread = {f"nic={adapter}", f"hca={adapter}", f"hca={adapter},port={number or 1}"}
        parts = {part for link in of_line for part in (*link.parts, *link.ports)} or unread
        if not any(link.switch_id for link in of_line):
            for part in parts:
                ends[line.host, part][f"{line.switch} {line.switch_port} by the manifest"] = None
    return {part: " and ".join(names) for part, names in ends.items()}


def cable_of(cables: Cables, host: str, part: str, scopes: Iterable[str]) -> str:
    """Return the switch ports of the cables of a part with findings; empty if they are not known.

    Args:
        cables: the cables.
        host: the host.
        part: scope of the part. If the findings name no port, all cables of the part are returned.
        scopes: scopes of the findings. If they name ports of the part, only the cables of these ports are returned. If no
            cable is known for any single port, all cables of the part are returned.
    """
    ports = [port for port in dict.fromkeys(map(_port, scopes)) if port]
    if ends := dict.fromkeys(cables[host, port] for port in ports if (host, port) in cables):
        return " and ".join(ends)
    has_ports = any(name == host and scope != part and Scope.parse(part).contains(scope) for name, scope in cables)
    return "" if ports and has_ports else cables.get((host, part), "")


def _port(scope: str) -> str:
    """Return the scope of the network port that a scope names; empty if it names none."""
    labels = Scope.parse(scope).labels
    if labels.get("nic"):
        return f"nic={labels['nic']}"
    return f"hca={labels['hca']},port={labels['port']}" if {"hca", "port"} <= labels.keys() else ""
