"""InfiniBand and RoCE ports: state, rate, firmware, error counters. Plain /sys/class/infiniband."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path

from collectors.base import HOST, Absent, Family, Value
from collectors.sysfs import Tree, families, natural, numa_node

CLASS = "sys/class/infiniband"
ROCE, INFINIBAND = "Ethernet", "InfiniBand"
NO_LINK = Absent(status="unsupported", reason="the port has no link")
_NO_COUNTER = "the adapter has no such counter"
_RATE = re.compile(r"([\d.]+) Gb/sec(?: \((\d+)X\b.*\))?$")
_GIDS = 16
"""Entries of the GID table that are looked at: an address takes two, for RoCE v1 and v2."""

KINDS = {
    "infiniband.port_count": ("1", "InfiniBand and RoCE ports of adapters"),
    "infiniband.hca.firmware_version": ("1", "Firmware of the adapter"),
    "infiniband.hca.board_id": ("1", "Board of the adapter"),
    "infiniband.hca.type": ("1", "Kind of the adapter"),
    "infiniband.hca.node_guid": ("1", "GUID of the adapter"),
    "infiniband.hca.pci_address": ("1", "PCI address of the adapter"),
    "infiniband.hca.numa_node": ("1", "NUMA node that the adapter is near"),
    "infiniband.link_layer": ("1", "InfiniBand, or Ethernet: RoCE"),
    "infiniband.state": ("1", "State of the port"),
    "infiniband.phys_state": ("1", "Physical state of the port"),
    "infiniband.active": ("1", "The port carries traffic"),
    "infiniband.unmanaged": ("1", "The link is up, and no subnet manager has made it active"),
    "infiniband.rate": ("B/s", "Rate of the link, one way"),
    "infiniband.width": ("1", "Lanes of the link"),
    "infiniband.narrowed": ("1", "An InfiniBand link came up with one lane"),
    "infiniband.lid": ("1", "Address that the subnet manager gave the port"),
    "infiniband.sm_lid": ("1", "Address of the subnet manager"),
    "infiniband.interface": ("1", "Network interface of a RoCE port"),
    "infiniband.roce_v2": ("1", "The port has an address for RoCE v2"),
}
ERRORS = {
    "symbol_error": 16, "link_error_recovery": 8, "link_downed": 8, "port_rcv_errors": 16,
    "port_rcv_remote_physical_errors": 16, "port_xmit_discards": 16, "local_link_integrity_errors": 4,
    "excessive_buffer_overrun_errors": 4, "VL15_dropped": 16, "port_xmit_wait": 32,
}  # fmt: skip
"""Files of `counters` -> bits of the counter (Linux, drivers/infiniband/core/sysfs.c). It stays at its end when it gets there."""
HARDWARE = (
    "packet_seq_err", "out_of_sequence", "local_ack_timeout_err", "rnr_nak_retry_err", "roce_adp_retrans", "np_cnp_sent",
    "rp_cnp_handled",
)  # fmt: skip
DATA = ("port_rcv_data", "port_xmit_data")
_WORD_BYTES = 4
COUNTERS = {
    **{f"infiniband.{name.lower()}": ("1", f"Port counter {name}") for name in ERRORS},
    **{f"infiniband.{name}": ("1", f"Hardware counter {name}") for name in HARDWARE},
    **{f"infiniband.{name}": ("B", f"Port counter {name}, in bytes") for name in DATA},
}

Readings = dict[str, Value | Absent]
"""By name, without the leading `infiniband.`."""


class InfinibandCollector:
    """Reads the adapters under `root`, `/` but in tests.

    `thorough` reads what the subnet manager and the network gave the ports too. Adapters without hardware (soft RoCE) and
    virtual functions beside their physical one are left out.
    """

    name = "infiniband"

    def __init__(self, root: Path = Path("/"), thorough: bool = False) -> None:
        self._tree = Tree(root)
        self._thorough = thorough

    def collect(self) -> Iterable[Family]:
        found = families({**KINDS, **COUNTERS}, COUNTERS)
        ports = 0
        for hca in self._adapters():
            for name, value in self._adapter(f"{CLASS}/{hca}").items():
                found[f"infiniband.{name}"].add({"hca": hca}, value)
            for port in self._ports(hca):
                ports += 1
                for name, value in self._port(f"{CLASS}/{hca}/ports/{port}").items():
                    found[f"infiniband.{name}"].add({"hca": hca, "port": port}, value)
        found["infiniband.port_count"].add(HOST, ports)
        return [family for family in found.values() if family.readings]

    def _adapters(self) -> list[str]:
        try:
            names = self._tree.names(CLASS)
        except FileNotFoundError:
            return []  # no adapter, or no driver of one
        device = {name: f"{CLASS}/{name}/device" for name in names}
        return [name for name in names if self._tree.has(device[name]) and not self._tree.has(f"{device[name]}/physfn")]

    def _ports(self, hca: str) -> list[str]:
        try:
            return self._tree.names(f"{CLASS}/{hca}/ports")
        except OSError:
            return []  # gone since the adapters were listed

    def _adapter(self, path: str) -> Readings:
        untold = "the driver does not tell"
        return {
            "hca.firmware_version": self._tree.reading(f"{path}/fw_ver", missing=untold),
            "hca.board_id": self._tree.reading(f"{path}/board_id", missing=untold),
            "hca.type": self._tree.reading(f"{path}/hca_type", missing=untold),
            "hca.node_guid": self._tree.reading(f"{path}/node_guid"),
            "hca.numa_node": self._tree.reading(f"{path}/device/numa_node", numa_node, missing="a kernel without NUMA"),
            "hca.pci_address": self._tree.pci_address(path),
        }

    def _port(self, path: str) -> Readings:
        layer = self._tree.reading(f"{path}/link_layer")
        state = self._tree.reading(f"{path}/state", state_name)
        physical = self._tree.reading(f"{path}/phys_state", state_name)
        found: Readings = {"link_layer": layer, "state": state, "phys_state": physical}
        found["active"] = state if isinstance(state, Absent) else state == "ACTIVE"
        found["unmanaged"] = unmanaged(state, physical)
        found |= self._link(path, layer, physical)
        for name, bits in ERRORS.items():
            found[name.lower()] = self._counter(f"{path}/counters/{name}", partial(unsaturated, bits=bits))
        for name in DATA:
            found[name] = self._counter(f"{path}/counters/{name}", lambda text: natural(text) * _WORD_BYTES)
        for name in HARDWARE:
            found[name] = self._counter(f"{path}/hw_counters/{name}", natural)
        return found | (self._addresses(path, layer) if self._thorough else {})

    def _counter(self, path: str, parse: Callable[[str], Value | Absent]) -> Value | Absent:
        return self._tree.reading(path, parse, missing=_NO_COUNTER, refused=_NO_COUNTER)

    def _link(self, path: str, layer: Value | Absent, physical: Value | Absent) -> Readings:
        names = ("rate", "width", "narrowed")
        if isinstance(physical, Absent) or physical != "LinkUp":
            # What the kernel tells of a port without a link is not its rate.
            return dict.fromkeys(names, physical if isinstance(physical, Absent) else NO_LINK)
        text = self._tree.reading(f"{path}/rate")
        if isinstance(text, Absent):
            return dict.fromkeys(names, text)
        rate, width = rate_and_width(text)
        narrowed = width if isinstance(width, Absent) else width == 1
        # Half of four lanes is what a splitter cable gives by design (HDR100, NDR200); RoCE and EFA count lanes otherwise.
        return {"rate": rate, "width": width, "narrowed": narrowed if layer == INFINIBAND else False}

    def _addresses(self, path: str, layer: Value | Absent) -> Readings:
        found: Readings = {
            name: self._tree.reading(f"{path}/{name}", lambda text: int(text, 16)) for name in ("lid", "sm_lid")
        }
        if layer == ROCE:
            found["interface"] = self._tree.reading(f"{path}/gid_attrs/ndevs/0", refused="the port has no address")
            kinds = [self._tree.reading(f"{path}/gid_attrs/types/{index}", refused="free") for index in range(_GIDS)]
            found["roce_v2"] = "RoCE v2" in kinds
        return found


def state_name(text: str) -> str:
    """`4: ACTIVE` -> `ACTIVE`. Raises ValueError."""
    number, colon, name = text.partition(": ")
    if not colon or not number.isdigit():
        raise ValueError(f"no state: {text or 'empty'}")
    return name


def unmanaged(state: Value | Absent, physical: Value | Absent) -> Value | Absent:
    """Whether the port waits, with its link up, for a subnet manager."""
    for part in (state, physical):
        if isinstance(part, Absent):
            return part
    return physical == "LinkUp" and state in ("INIT", "ARMED")


def rate_and_width(text: object) -> tuple[Value | Absent, Value | Absent]:
    """`400 Gb/sec (4X NDR)` -> 50e9 B/s and 4 lanes."""
    found = _RATE.match(str(text))
    if not found:
        unknown = Absent(status="error", reason=f"no rate: {text or 'empty'}")
        return unknown, unknown
    width = int(found[2]) if found[2] else Absent(status="unsupported", reason="the driver tells no width")
    return float(found[1]) * 1e9 / 8, width


def unsaturated(text: str, bits: int) -> Value | Absent:
    """A counter that can still rise; at its end it hides what comes after. Raises ValueError."""
    if not text[:1].isdigit():
        return Absent(status="unsupported", reason=f"{_NO_COUNTER}: {text or 'empty'}")  # N/A (no PMA)
    number = natural(text)
    if number == (1 << bits) - 1:
        return Absent(status="error", reason=f"stands at its end, {number}, and cannot rise: clear it (perfquery -R)")
    return number
