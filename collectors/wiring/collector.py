"""Read which switch port each Ethernet and InfiniBand port is connected to."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from pathlib import Path

from collectors import infiniband, network
from collectors.base import Absent, Family, Labels, empty_families
from collectors.deadline import call_with_deadline
from collectors.files import Files
from collectors.programs import find_program, run_program
from collectors.wiring.infiniband import read_port
from collectors.wiring.lldp import read_lldp
from collectors.wiring.neighbor import Neighbor

DEADLINE_S = 15.0
"""Time limit for all InfiniBand ports together, which are read in parallel."""
KINDS = {
    "switch": ("1", "Name of the switch at the other end of the cable"),
    "switch_id": ("1", "{} of the switch at the other end of the cable"),
    "switch_port": ("1", "Port of the switch at the other end of the cable"),
    "switch_port_label": ("1", "Description of the port of the switch"),
}
DOWN = Absent.unsupported("no link")
SILENT = (
    "no LLDP neighbor: the switch sends no LLDP frames, or its first frame (one every 30 s) has not arrived yet, or firmware of "
    "the NIC or DPU takes the frames (mlx5: mlxconfig LLDP_NB_RX_MODE; BlueField: DPU mode)"
)
FIRMWARE_AGENTS = {"ice": ("fw-lldp-agent", "on", "off"), "i40e": ("disable-fw-lldp", "off", "on")}
"""Driver -> name of a private flag (of ethtool), value that enables the LLDP agent in the NIC's firmware, value that disables it.
While the agent is enabled, it takes all LLDP frames."""


class WiringCollector:
    """Queries lldpd and infiniband-diags, if they are installed, in full snapshots only."""

    name = "wiring"

    def __init__(self, root: Path = Path("/"), full_snapshot: bool = False) -> None:
        self._root, self._files = root, Files(root)
        self._full_snapshot = full_snapshot

    def collect(self) -> Iterable[Family]:
        if not self._full_snapshot:
            return []
        return [
            *_families("network", "Chassis ID (LLDP)", self._ethernet()),
            *_families("infiniband", "GUID", self._infiniband()),
        ]

    def _ethernet(self) -> Iterable[tuple[Labels, Neighbor | Absent]]:
        try:
            names = self._files.names(network.CLASS)
        except FileNotFoundError:
            return
        nics = [name for name in names if network.is_nic(self._files, name)]
        neighbors = read_lldp(self._root) if nics else {}
        for nic in nics:
            if isinstance(neighbors, Absent):
                yield {"nic": nic}, neighbors
            else:
                yield {"nic": nic}, neighbors[nic] if nic in neighbors else self._why_silent(nic)

    def _why_silent(self, nic: str) -> Absent:
        """Return why an Ethernet port has no neighbor although lldpd answers."""
        path = f"{network.CLASS}/{nic}"
        if self._files.read(f"{path}/carrier", str, missing="none", refused="down") != "1":
            return DOWN
        flag, taken, wanted = FIRMWARE_AGENTS.get(str(self._files.target_name(f"{path}/device/driver")), ("", "", ""))
        ethtool = find_program(self._root, "ethtool") if flag else None
        process = run_program(ethtool, "--show-priv-flags", nic) if ethtool else None
        flags = [] if process is None or isinstance(process, Absent) else process.stdout.splitlines()
        if [flag, taken] in [[part.strip() for part in line.split(":")] for line in flags]:
            return Absent.error(
                f"no LLDP neighbor: firmware of the NIC takes the frames; run ethtool --set-priv-flags {nic} {flag} {wanted}"
            )
        return Absent.error(SILENT)

    def _infiniband(self) -> Iterable[tuple[Labels, Neighbor | Absent]]:
        calls = {}
        for hca in infiniband.adapters(self._files):
            for port in infiniband.ports(self._files, hca):
                path = f"{infiniband.CLASS}/{hca}/ports/{port}"
                if self._files.read(f"{path}/link_layer", str) == infiniband.INFINIBAND:
                    calls[hca, port] = partial(self._neighbor, path, hca, port)
        for (hca, port), neighbor in call_with_deadline(calls, DEADLINE_S).items():
            yield {"hca": hca, "port": port}, neighbor

    def _neighbor(self, path: str, hca: str, port: str) -> Neighbor | Absent:
        has_link = self._files.required(f"{path}/phys_state", infiniband.parse_state) == "LinkUp"
        return read_port(self._root, hca, port) if has_link else DOWN


def _families(prefix: str, id_name: str, ports: Iterable[tuple[Labels, Neighbor | Absent]]) -> list[Family]:
    """Return the families of all ports of one kind (`prefix`); an empty list if the host has no such port."""
    kinds = {f"{prefix}.{name}": (unit, text.format(id_name)) for name, (unit, text) in KINDS.items()}
    if prefix == "infiniband":
        del kinds["infiniband.switch_port_label"]  # InfiniBand reports no description of the port
    families = empty_families(kinds, varying=kinds)
    for labels, neighbor in ports:
        readings = neighbor if isinstance(neighbor, Absent) else neighbor.readings()
        for name, family in families.items():
            family.add(labels, readings if isinstance(readings, Absent) else readings[name.removeprefix(f"{prefix}.")])
    return [family for family in families.values() if family.readings]
