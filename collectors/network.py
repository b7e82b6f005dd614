"""Ethernet interfaces with hardware of their own: link, speed, errors. Plain /sys/class/net."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from collectors.base import HOST, Absent, Family, Value
from collectors.sysfs import Tree, families, natural

CLASS = "sys/class/net"
_ETHERNET = "1"
_DOWN = "the interface is down"
_NO_SPEED = Absent(status="unsupported", reason="no link, or hardware that tells no speed")
_NO_DUPLEX = Absent(status="unsupported", reason="no link, or hardware that tells no duplex")

STATISTICS = ("rx_errors", "tx_errors", "rx_dropped", "tx_dropped", "rx_crc_errors", "rx_missed_errors")
KINDS = {
    "network.nic_count": ("1", "Ethernet interfaces with hardware of their own"),
    "network.operstate": ("1", "State of the interface"),
    "network.carrier": ("1", "The interface has a link"),
    "network.carrier_changes": ("1", "How often the link came and went"),
    "network.speed": ("B/s", "Speed of the link, one way"),
    "network.duplex": ("1", "Duplex of the link"),
    "network.half_duplex": ("1", "Only one end of the link can talk at a time"),
    "network.mtu": ("B", "Largest packet"),
    **{f"network.{name}": ("1", f"Interface statistic {name}") for name in STATISTICS},
    "network.driver": ("1", "Driver of the interface"),
    "network.address": ("1", "Hardware address"),
    "network.pci_address": ("1", "PCI address of the adapter"),
    "network.bond.slave_count": ("1", "Interfaces of a bond"),
    "network.bond.slaves_up": ("1", "Interfaces of a bond that have a link"),
}
COUNTERS = ["network.carrier_changes", *(f"network.{name}" for name in STATISTICS)]

Readings = dict[str, Value | Absent]
"""By name, without the leading `network.`."""


class NetworkCollector:
    """Reads the interfaces under `root`, `/` but in tests.

    Interfaces without a device (bridges, veth), on USB (the virtual NIC of a management controller), of virtual functions
    and of the switch in a NIC, and IPoIB, which the `infiniband` collector sees from below, are left out.
    """

    name = "network"

    def __init__(self, root: Path = Path("/"), thorough: bool = False) -> None:
        self._tree = Tree(root)
        self._thorough = thorough

    def collect(self) -> Iterable[Family]:
        found = families(KINDS, COUNTERS)
        try:
            interfaces = self._tree.names(CLASS)
        except FileNotFoundError:
            interfaces = []
        nics = [name for name in interfaces if self._is_nic(f"{CLASS}/{name}")]
        found["network.nic_count"].add(HOST, len(nics))
        for nic in nics:
            for name, value in self._nic(f"{CLASS}/{nic}").items():
                found[f"network.{name}"].add({"nic": nic}, value)
        for bond in interfaces:
            if self._tree.has(f"{CLASS}/{bond}/bonding"):
                for name, value in self._bond(f"{CLASS}/{bond}").items():
                    found[f"network.bond.{name}"].add({"nic": bond}, value)
        return [family for family in found.values() if family.readings]

    def _is_nic(self, path: str) -> bool:
        if not self._tree.has(f"{path}/device") or self._tree.has(f"{path}/device/physfn"):
            return False
        try:
            if self._tree.text(f"{path}/type") != _ETHERNET:
                return False
        except OSError:
            return False  # gone since the interfaces were listed
        port = self._tree.reading(f"{path}/phys_port_name", missing="none", refused="none")
        representor = isinstance(port, str) and ("vf" in port or "sf" in port)
        return not representor and self._tree.base(f"{path}/device/subsystem") != "usb"

    def _nic(self, path: str) -> Readings:
        read = self._tree.reading
        duplex = read(f"{path}/duplex", missing=_DOWN, refused=_DOWN)
        found: Readings = {
            "operstate": read(f"{path}/operstate"),
            "carrier": read(f"{path}/carrier", lambda text: text == "1", refused=_DOWN),
            "carrier_changes": read(f"{path}/carrier_changes", natural),
            "speed": read(f"{path}/speed", speed, missing=_DOWN, refused=_DOWN),
            "duplex": _NO_DUPLEX if duplex == "unknown" else duplex,
        }
        found["half_duplex"] = found["duplex"] if isinstance(found["duplex"], Absent) else duplex == "half"
        for name in STATISTICS:
            found[name] = read(f"{path}/statistics/{name}", natural)
        if self._thorough:
            found["mtu"] = read(f"{path}/mtu", natural)
            found["driver"] = self._tree.base(f"{path}/device/driver")
            found["address"] = read(f"{path}/address")
            found["pci_address"] = self._tree.pci_address(path)
        return found

    def _bond(self, path: str) -> Readings:
        slaves = self._tree.reading(f"{path}/bonding/slaves")
        if isinstance(slaves, Absent):
            return {"slave_count": slaves, "slaves_up": slaves}
        names = str(slaves).split()
        states = [self._tree.reading(f"{CLASS}/{name}/bonding_slave/mii_status") for name in names]
        lost = next((state for state in states if isinstance(state, Absent)), None)
        return {"slave_count": len(names), "slaves_up": lost or states.count("up")}


def speed(text: str) -> Value | Absent:
    """Mb/s as the kernel writes it -> B/s. Raises ValueError."""
    megabits = int(text)
    return megabits * 1e6 / 8 if megabits > 0 else _NO_SPEED
