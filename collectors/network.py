"""Ethernet interfaces with hardware: link, speed, errors, bonds and teams. Reads only /sys/class/net and /proc/net/bonding."""

from __future__ import annotations

import errno
import re
from collections.abc import Iterable, Mapping
from pathlib import Path

from collectors.base import HOST_LABELS, Absent, Family, Value, empty_families, first_absent
from collectors.files import Files
from collectors.sysfs import parse_natural, pci_address
from schemas.representors import is_representor

CLASS, BONDS = "sys/class/net", "proc/net/bonding"
_ETHERNET = "1"
_DOWN = "the interface is down"
_NO_SPEED = Absent.unsupported("no link, or the hardware reports no speed")
_NO_DUPLEX = Absent.unsupported("no link, or the hardware reports no duplex mode")
_NO_INTERFACES = "the kernel lists no network interface"
_PERMANENT = re.compile(r"^Permanent HW addr: ([0-9a-f]{2}(?::[0-9a-f]{2}){5})$", re.MULTILINE)

STATISTICS = ("rx_errors", "tx_errors", "rx_dropped", "tx_dropped", "rx_crc_errors", "rx_missed_errors")
KINDS = {
    "network.nic_count": ("1", "Ethernet interfaces with hardware"),
    "network.operstate": ("1", "State of the interface"),
    "network.carrier": ("1", "The interface has a link"),
    "network.carrier_changes": ("1", "Times that the link went up or down"),
    "network.speed": ("B/s", "Speed of the link, one way"),
    "network.duplex": ("1", "Duplex mode of the link"),
    "network.half_duplex": ("1", "The link is half duplex"),
    "network.mtu": ("B", "Largest packet (MTU)"),
    **{f"network.{name}": ("1", f"Interface statistic {name}") for name in STATISTICS},
    "network.driver": ("1", "Driver of the interface"),
    "network.address": ("1", "MAC address (of a member of a bond: the permanent one)"),
    "network.pci_address": ("1", "PCI address of the adapter"),
    "network.bond.slave_count": ("1", "Interfaces in the bond"),
    "network.bond.slaves_up": ("1", "Interfaces in the bond that have a link"),
    "network.bond.member_up": ("1", "The bond or team can use the interface"),
}
MTU_BOUNDS = (68.0, 65_536.0)
"""Lowest and highest credible MTU in bytes. The lowest is from RFC 791, the highest is the MTU of the loopback interface."""
COUNTERS = ["network.carrier_changes", *(f"network.{name}" for name in STATISTICS)]

Readings = dict[str, Value | Absent]
"""Name of the reading without `network.` (of a bond: without `network.bond.`) -> value, or why it is absent."""


class NetworkCollector:
    """Reads the interfaces under `root`. `identity` adds driver, MAC and PCI address; `full_snapshot` adds these and the MTU.

    It reads bonds and teams, but omits all other interfaces without hardware (bridges, veth). It also omits USB interfaces (the
    virtual NIC of a management controller), virtual functions, representors (interfaces of the internal ports of a NIC's switch),
    and IPoIB interfaces (see the `infiniband` collector).
    """

    name = "network"

    def __init__(self, root: Path = Path("/"), full_snapshot: bool = False, identity: bool = False) -> None:
        self._files = Files(root)
        self._full_snapshot = full_snapshot
        self._identity = identity or full_snapshot

    def collect(self) -> Iterable[Family]:
        families = empty_families(KINDS, COUNTERS, varying=KINDS)
        listed = self._files.matching(CLASS, ".+", _NO_INTERFACES)
        interfaces = [] if isinstance(listed, Absent) else sorted(listed)
        nics = [name for name in interfaces if is_nic(self._files, name)]
        families["network.mtu"].bounds = MTU_BOUNDS
        count: Value | Absent = listed if isinstance(listed, Absent) and listed.status == "error" else len(nics)
        families["network.nic_count"].add(HOST_LABELS, count)
        permanent = self._permanent_addresses() if self._identity else {}
        for nic in nics:
            readings = self._nic(f"{CLASS}/{nic}")
            if nic in permanent:
                readings["address"] = permanent[nic]
            for name, value in readings.items():
                families[f"network.{name}"].add({"nic": nic}, value)
        for bond in interfaces:
            if self._files.exists(f"{CLASS}/{bond}/bonding"):
                for name, value in self._bond(f"{CLASS}/{bond}").items():
                    families[f"network.bond.{name}"].add({"nic": bond}, value)
        for master in self._masters(interfaces):
            for member, is_up in self._members(master).items():
                families["network.bond.member_up"].add({"nic": master, "member": member}, is_up)
        return [family for family in families.values() if family.readings]

    def _nic(self, path: str) -> Readings:
        read, required = self._files.read, self._files.required
        duplex = read(f"{path}/duplex", str, missing=_DOWN, refused=_DOWN)
        readings: Readings = {
            "operstate": required(f"{path}/operstate", str),
            "carrier": required(f"{path}/carrier", lambda text: text == "1", refused=_DOWN),
            "carrier_changes": required(f"{path}/carrier_changes", parse_natural),
            "speed": read(f"{path}/speed", parse_speed, missing=_DOWN, refused=_DOWN),
            "duplex": _NO_DUPLEX if duplex == "unknown" else duplex,
        }
        readings["half_duplex"] = first_absent(readings["duplex"]) or duplex == "half"
        for name in STATISTICS:
            readings[name] = required(f"{path}/statistics/{name}", parse_natural)
        if self._full_snapshot:
            readings["mtu"] = required(f"{path}/mtu", parse_natural)
        if self._identity:
            readings["driver"] = self._files.target_name(f"{path}/device/driver")
            readings["address"] = required(f"{path}/address", str)
            readings["pci_address"] = pci_address(self._files, path)
        return readings

    def _bond(self, path: str) -> Readings:
        slaves = self._files.required(f"{path}/bonding/slaves", str)
        if isinstance(slaves, Absent):
            return {"slave_count": slaves, "slaves_up": slaves}
        names = slaves.split()
        states = [self._files.required(f"{CLASS}/{name}/bonding_slave/mii_status", str) for name in names]
        return {"slave_count": len(names), "slaves_up": first_absent(*states) or states.count("up")}

    def _bonds(self) -> list[str]:
        """Return the bonds that /proc lists."""
        try:
            return self._files.names(BONDS)
        except FileNotFoundError:
            return []  # the bonding module is not loaded

    def _permanent_addresses(self) -> dict[str, str]:
        """Return member of a bond -> its permanent MAC address. In /sys all members of a bond have the address of the bond."""
        listed = [self._files.read(f"{BONDS}/{bond}", parse_addresses) for bond in self._bonds()]
        return {
            member: address
            for of_bond in listed
            if not isinstance(of_bond, Absent)
            for member, address in of_bond.items()
        }

    def _masters(self, interfaces: Iterable[str]) -> list[str]:
        """Return the bonds, and the interfaces that have other interfaces as members: teams, bridges and others."""
        bonds = self._bonds()
        members = [f"{CLASS}/{name}/master" for name in interfaces if self._files.exists(f"{CLASS}/{name}/master")]
        masters = {self._files.target_name(link) for link in members}
        bonds += [name for name in interfaces if self._files.exists(f"{CLASS}/{name}/bonding")]
        return sorted({*bonds, *(name for name in masters if isinstance(name, str))})

    def _members(self, master: str) -> Mapping[str, Value | Absent]:
        """Return member -> whether the bond or team can use it; empty if `master` is neither a bond nor a team.

        The state of a bond's member may be readable in both /sys and /proc. Then the value is True only if both report that the
        bond can use it.
        """
        if not self._files.exists(f"{CLASS}/{master}/bonding") and not self._files.exists(f"{BONDS}/{master}"):
            return self._team_members(master)
        listed = self._files.read(f"{BONDS}/{master}", parse_bond)
        members = self._bond_members(f"{CLASS}/{master}/bonding")
        for member, is_up in {} if isinstance(listed, Absent) else listed.items():
            known = members.get(member, is_up)
            members[member] = is_up if isinstance(known, Absent) else known is True and is_up
        return members

    def _bond_members(self, path: str) -> dict[str, Value | Absent]:
        """Return member -> whether it has a link and, with LACP, is in the aggregator that the bond uses."""
        slaves, mode = self._files.read(f"{path}/slaves", str), self._files.read(f"{path}/mode", str)
        in_use = self._files.read(f"{path}/ad_aggregator", parse_natural)
        members: dict[str, Value | Absent] = {}
        for slave in slaves.split() if isinstance(slaves, str) else ():
            state = self._files.required(f"{CLASS}/{slave}/bonding_slave/mii_status", str)
            aggregator = self._files.read(f"{CLASS}/{slave}/bonding_slave/ad_aggregator_id", parse_natural)
            uses_lacp = isinstance(mode, str) and mode.startswith("802.3ad")
            is_in_other = uses_lacp and isinstance(in_use, int) and isinstance(aggregator, int) and aggregator != in_use
            members[slave] = state if isinstance(state, Absent) else state == "up" and not is_in_other
        return members

    def _team_members(self, name: str) -> dict[str, Value | Absent]:
        """Return member -> whether it has a link; empty if the interface is not a team.

        The uevent file of a bridge, bond or VRF has a DEVTYPE; that of a team or of Open vSwitch has none. Open vSwitch is
        recognized by an interface name that begins with `ovs-`.
        """
        path = f"{CLASS}/{name}"
        lower = self._files.matching(path, r"lower_.+", "no member")
        if isinstance(lower, Absent) or name.startswith("ovs-") or self._files.exists(f"{path}/device"):
            return {}
        has_type = self._files.read(f"{path}/uevent", lambda text: "DEVTYPE=" in text)
        names = [link.removeprefix("lower_") for link in lower]
        masters = {self._files.target_name(f"{CLASS}/{member}/master") for member in names}
        if has_type is not False or masters != {name}:
            return {}
        carriers = {
            member: self._files.required(f"{CLASS}/{member}/carrier", lambda text: text == "1", refused=_DOWN)
            for member in names
        }
        down = Absent.unsupported(_DOWN)
        return {member: False if carrier == down else carrier for member, carrier in carriers.items()}


def is_nic(files: Files, name: str) -> bool:
    """Return whether NetworkCollector reads the interface as a NIC."""
    path = f"{CLASS}/{name}"
    if not files.exists(f"{path}/device") or files.exists(f"{path}/device/physfn"):
        return False
    try:
        if files.text(f"{path}/type") != _ETHERNET:
            return False
    except OSError as error:
        if error.errno != errno.EINVAL and files.exists(path):
            raise
        return False  # the interface was removed after the interfaces were listed, or is being removed (EINVAL)
    return not is_representor(phys_port_name(files, name)) and files.target_name(f"{path}/device/subsystem") != "usb"


def phys_port_name(files: Files, name: str) -> str:
    """Return the name that the driver gives to the port of an interface; empty if it cannot be read."""
    port = files.read(f"{CLASS}/{name}/phys_port_name", str, missing="none", refused="none")
    return port if isinstance(port, str) else ""


def parse_bond(text: str) -> dict[str, bool]:
    """Return member of a bond -> whether it has a link and, with LACP, is in the active aggregator.

    `text` is the content of a file in /proc/net/bonding.
    """
    head, *slaves = _sections(text)
    active = re.search(r"Active Aggregator Info:\s+Aggregator ID: (\d+)", head)
    members = {}
    for slave in slaves:
        state, aggregator = (
            re.search(r"^MII Status: (.+)$", slave, re.MULTILINE),
            re.search(r"^Aggregator ID: (\d+)", slave, re.MULTILINE),
        )
        is_in_other = bool(active and aggregator and active[1] != aggregator[1])
        members[slave.split()[0]] = bool(state) and state[1].strip() == "up" and not is_in_other  # type: ignore[index]
    return members


def parse_addresses(text: str) -> dict[str, str]:
    """Return member of a bond -> its permanent MAC address, from a file in /proc/net/bonding."""
    found = {section.split()[0]: _PERMANENT.search(section) for section in _sections(text)[1:]}
    return {member: match[1] for member, match in found.items() if match}


def _sections(text: str) -> list[str]:
    """Return the sections of a file in /proc/net/bonding: of the bond, and then of each member, beginning with its name."""
    return re.split(r"^Slave Interface: ", text, flags=re.MULTILINE)


def parse_speed(text: str) -> Value | Absent:
    """Return the speed in B/s. The text is a number of Mb/s (megabits per second). Raises ValueError."""
    megabits = int(text)
    return megabits * 1e6 / 8 if megabits > 0 else _NO_SPEED
