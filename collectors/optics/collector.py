"""Read the module and the physical layer of every Ethernet, InfiniBand and RoCE port, with ethtool and mlxlink.

A scope is the set of labels that names a port. A port of an RDMA adapter has the same scope as in the `infiniband` collector
(`hca=mlx5_0,port=1`). Any other Ethernet port has the scope of the `network` collector plus the label `port`, which is always 1
(`nic=eth0,port=1`).

ethtool reads ports with an Ethernet interface. mlxlink reads the first port of NVIDIA adapters. If both read a port, readings
from ethtool take precedence, with one exception. If only mlxlink has measurements of the module's lanes, all readings of the
module come from mlxlink.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from collectors import infiniband, network
from collectors.base import Absent, Family, Labels, ReadingError, empty_families
from collectors.deadline import call_with_deadline
from collectors.files import Files
from collectors.optics import mlxlink
from collectors.optics.ethtool import Ethtool
from collectors.optics.kinds import KINDS, OF_LANES, POWER_BOUNDS
from collectors.optics.mlxlink_program import run_mlxlink
from collectors.optics.module import NO_LINK, Module, Readings, absent_module
from collectors.optics.port import COUNTERS, OF_LANE, PortReadings, absent_port, merge
from collectors.programs import find_program

DEADLINE_S = 16.0
"""Time limit for all ports together. A module answers over a slow bus, and a stuck bus blocks the caller."""
NVIDIA = "0x15b3"
VIRTUAL_DRIVERS = frozenset({"ena", "gve", "hv_netvsc", "virtio_net", "vmxnet3"})
VIRTUAL_FUNCTIONS = frozenset({"0x1014", "0x1016", "0x1018", "0x101a", "0x101c", "0x101e"})
"""PCI device IDs of virtual functions of ConnectX-4 to ConnectX-8 (Linux, mlx5/core/main.c). In a virtual machine a virtual
function looks like an adapter, but mlxlink takes 10 s for it and reads nothing."""
_TOOLS = ("mlxlink", "mstlink")


@dataclass(frozen=True, kw_only=True)
class Port:
    """A port. `interface` is the name for ethtool, and `adapter` is the name for mlxlink.

    Either name is empty if its tool cannot read the port.
    """

    labels: Labels
    interface: str
    adapter: str
    has_link: bool
    is_virtual: bool = False
    """Whether the interface has a driver of VIRTUAL_DRIVERS. Such a port has no module and no FEC."""


class OpticsCollector:
    """Reads the ports under `root`, but only in a full snapshot, because reading one module takes up to a second."""

    name = "optics"

    def __init__(self, root: Path = Path("/"), full_snapshot: bool = False) -> None:
        self._root = root
        self._files = Files(root)
        self._full_snapshot = full_snapshot

    def collect(self) -> Iterable[Family]:
        ports = self._ports() if self._full_snapshot else []
        if not ports:
            return []
        labels = (*sorted({next(iter(port.labels)) for port in ports}), "port")
        families = empty_families(KINDS, (f"port.{name}" for name in COUNTERS), varying=KINDS)
        for name, family in families.items():
            family.labels = (*labels, "lane") if name in OF_LANES else labels
            family.bounds = POWER_BOUNDS if family.unit == "W" else None
        ethtool = Ethtool(find_program(self._root, "ethtool"))
        paths = (find_program(self._root, tool) for tool in _TOOLS)
        tool = next((path for path in paths if path), None)
        readers = {number: partial(self._read, port, ethtool, tool) for number, port in enumerate(ports)}
        results = call_with_deadline(readers, DEADLINE_S)
        known = {number: result[0] for number, result in results.items() if not isinstance(result, Absent)}
        modules = _module_readings(ports, known)
        for number, result in results.items():
            module, link = (
                (absent_module(result), absent_port(result))
                if isinstance(result, Absent)
                else (modules[number], result[1])
            )
            for prefix, readings in (("optics", module), ("port", link)):
                for (name, lane), value in readings.items():
                    scope = {**ports[number].labels, "lane": lane} if lane else ports[number].labels
                    families[f"{prefix}.{name}"].add(scope, value)
        return families.values()

    def _ports(self) -> list[Port]:
        """Return the ports that a tool can read. No tool reads an EFA adapter, which has no Ethernet interface."""
        files, ports = self._files, []
        try:
            interfaces = files.names(network.CLASS)
        except FileNotFoundError:
            interfaces = []
        nics = [name for name in interfaces if network.is_nic(files, name)]
        for hca in infiniband.adapters(files):
            for index, number in enumerate(infiniband.ports(files, hca)):
                path = f"{infiniband.CLASS}/{hca}/ports/{number}"
                interface = files.read(f"{path}/gid_attrs/ndevs/0", str, missing="none", refused="none")
                port = Port(
                    labels={"hca": hca, "port": number},
                    interface=interface if isinstance(interface, str) and interface in nics else "",
                    adapter=hca if index == 0 and self._is_readable(f"{infiniband.CLASS}/{hca}/device") else "",
                    has_link="LinkUp" in str(files.read(f"{path}/phys_state", str)),
                )
                ports += [port] if port.interface or port.adapter else []
        known = {port.interface for port in ports}
        for nic in nics:
            if nic not in known:
                path = f"{network.CLASS}/{nic}"
                port = Port(
                    labels={"nic": nic, "port": "1"},
                    interface=nic,
                    adapter="",
                    has_link=files.read(f"{path}/carrier", str, refused="down") == "1",
                    is_virtual=files.target_name(f"{path}/device/driver") in VIRTUAL_DRIVERS,
                )
                ports.append(port)
        return ports

    def _is_readable(self, device: str) -> bool:
        """Return whether mlxlink can read the adapter whose sysfs directory is `device`."""
        vendor, identity = (self._files.read(f"{device}/{name}", str) for name in ("vendor", "device"))
        return vendor == NVIDIA and identity not in VIRTUAL_FUNCTIONS

    def _read(self, port: Port, ethtool: Ethtool, tool: Path | None) -> tuple[Module | Absent, PortReadings]:
        """Return the module, or why it could not be read, and the readings of the port."""
        modules: list[Module | Absent] = []
        links: list[PortReadings] = []
        if port.is_virtual:
            modules.append(Absent.unsupported("the interface is virtual and has no module"))
            links.append(ethtool.statistics(port.interface))
        elif port.interface:
            modules.append(ethtool.module(port.interface, has_link=port.has_link))
            links += [ethtool.fec(port.interface, has_link=port.has_link), ethtool.statistics(port.interface)]
        if port.adapter:
            rows = run_mlxlink(tool, port.adapter)
            modules.append(_module(rows))
            link = absent_port(rows) if isinstance(rows, Absent) else mlxlink.port_of(rows)
            # Counters from ethtool take precedence, and mlxlink's `counter_age` is not their age.
            links.append(
                {key: value for key, value in link.items() if key[0] != "counter_age"} if port.interface else link
            )
        none = Absent.unsupported("the tools for this port do not report it" if port.has_link else NO_LINK)
        return _best_module(modules), merge(*links, absent_port(none, without=OF_LANE))


def _best_module(modules: list[Module | Absent]) -> Module | Absent:
    """Return the module of one port. `modules` has the result of each tool for this module, by precedence.

    The first result with measurements of lanes is used, or else the first Module. If no tool could read the module, the result is
    the first Absent with the status `error`, or else the first Absent.
    """
    known = [module for module in modules if isinstance(module, Module)]
    best = next((module for module in known if module.lanes), known[0] if known else None)
    return best or min((item for item in modules if isinstance(item, Absent)), key=lambda item: item.status)


def _module_readings(ports: Sequence[Port], modules: Mapping[int, Module | Absent]) -> dict[int, Readings]:
    """Return the readings of the module of each port; the keys are indices in `ports`.

    Ports may share a module: each then shows all lanes of the module, but only some are its own.
    """
    links: dict[object, list[bool]] = defaultdict(list)
    keys = {number: item.identity_key if isinstance(item, Module) else None for number, item in modules.items()}
    for number, key in keys.items():
        links[key or number].append(ports[number].has_link)
    return {
        number: absent_module(item)
        if isinstance(item, Absent)
        else item.readings(
            has_link=ports[number].has_link,
            links=links[keys[number] or number],
        )
        for number, item in modules.items()
    }


def _module(rows: mlxlink.Rows | Absent) -> Module | Absent:
    try:
        return rows if isinstance(rows, Absent) else mlxlink.module_of(rows)
    except ReadingError as error:
        return error.absent
