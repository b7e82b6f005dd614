"""The cable of each network port, for the causes that name a port: the switch port at its other end."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

from fleet.judge.wiring.links import HostLinks
from fleet.judge.wiring.planned import planned_lines
from schemas.plans import Part

Cables = Mapping[tuple[str, str], str]
"""Host and scope of a network part (`nic=eth1`, `hca=mlx5_0`) -> the other ends of its cables (`leaf0 swp3`)."""


def cable_ends(manifest: Sequence[Part], hosts: Iterable[HostLinks]) -> Cables:
    """Return the cables of these hosts: as read from the switches, otherwise as in the manifest.

    A port without a link has no neighbor: only the manifest knows where its cable should end.
    """
    ends: dict[tuple[str, str], dict[str, None]] = defaultdict(dict)
    by_host = {host.host: host for host in hosts}
    for host in by_host.values():
        for link in host.links if host.has_record else ():
            for part in link.parts if link.switch_id else ():
                ends[host.host, part][link.end] = None
    for line in planned_lines(manifest):
        links = by_host[line.host].links if line.host in by_host else ()
        of_line = [link for link in links if line.slot in link.names]
        adapter = line.slot.partition("/")[0]
        parts = {part for link in of_line for part in link.parts} or {f"nic={adapter}", f"hca={adapter}"}
        if not any(link.switch_id for link in of_line):
            for part in parts:
                ends[line.host, part][f"{line.switch} {line.switch_port} by the manifest"] = None
    return {part: " and ".join(names) for part, names in ends.items()}
