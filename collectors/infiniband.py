"""InfiniBand, RoCE and EFA ports: state, rate, firmware, error counters. Reads /sys/class/infiniband.

For Soft-RoCE, it also reads /sys/class/net.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path

from collectors import network
from collectors.base import HOST_LABELS, Absent, Family, Value, empty_families, first_absent
from collectors.efa import EFA_COUNTERS, read_efa
from collectors.files import Files
from collectors.sysfs import parse_natural, parse_numa_node, pci_address
from schemas.representors import ports_with_a_cable

CLASS, VERBS_CLASS = "sys/class/infiniband", "sys/class/infiniband_verbs"
ROCE, INFINIBAND = "Ethernet", "InfiniBand"
NO_LINK = Absent.unsupported("the port has no link")
_NO_COUNTER = "the adapter has no such counter"
_REFUSED = Absent.unsupported("the adapter does not allow this counter to be read")
_ASK_AGAIN_S = 3600.0
"""Seconds after which a counter that the adapter refused to return is read again. The kernel logs each refusal. (An HGX B200 has
four adapters that refuse counters.)"""
_RATE = re.compile(r"([\d.]+) Gb/sec(?: \((\d+)X\b.*\))?$")
_GIDS = 16
"""Number of GID table entries to read. Each IP address of the port has two entries, for RoCE v1 and v2."""

KINDS = {
    "infiniband.port_count": ("1", "InfiniBand, RoCE and EFA ports"),
    "infiniband.hca.firmware_version": ("1", "Firmware of the adapter"),
    "infiniband.hca.board_id": ("1", "Board ID of the adapter"),
    "infiniband.hca.type": ("1", "Type of the adapter"),
    "infiniband.hca.node_guid": ("1", "GUID of the adapter"),
    "infiniband.hca.pci_address": ("1", "PCI address of the adapter"),
    "infiniband.hca.numa_node": ("1", "NUMA node of the adapter"),
    "infiniband.link_layer": ("1", "Link layer of the port, such as InfiniBand or Ethernet (RoCE)"),
    "infiniband.state": ("1", "State of the port"),
    "infiniband.phys_state": ("1", "Physical state of the port"),
    "infiniband.active": ("1", "The port is active: it can carry traffic"),
    "infiniband.unmanaged": ("1", "The link is up, but no subnet manager has activated it"),
    "infiniband.rate": ("B/s", "Data rate of the link, one way"),
    "infiniband.width": ("1", "Lanes of the link"),
    "infiniband.narrowed": ("1", "The InfiniBand link has one lane only"),
    "infiniband.lid": ("1", "LID of the port, from the subnet manager"),
    "infiniband.sm_lid": ("1", "LID of the subnet manager"),
    "infiniband.interface": ("1", "Network interface of the RoCE port"),
    "infiniband.roce_v2": ("1", "The port has a RoCE v2 address"),
}
ERRORS = {
    "symbol_error": 16, "link_error_recovery": 8, "link_downed": 8, "port_rcv_errors": 16,
    "port_rcv_remote_physical_errors": 16, "port_xmit_discards": 16, "local_link_integrity_errors": 4,
    "excessive_buffer_overrun_errors": 4, "VL15_dropped": 16, "port_xmit_wait": 32,
}  # fmt: skip
"""File in `counters` -> width of the counter in bits (Linux, drivers/infiniband/core/sysfs.c). A counter stops at the highest
value of that width."""
HARDWARE = {
    "packet_seq_err": ("packet_seq_err", "seq_err_naks_rcvd"), "out_of_sequence": ("out_of_sequence", "oos_drop_count"),
    "local_ack_timeout_err": ("local_ack_timeout_err", "to_retransmits"),
    "rnr_nak_retry_err": ("rnr_nak_retry_err", "rnr_naks_rcvd"), "roce_adp_retrans": ("roce_adp_retrans",),
    "np_cnp_sent": ("np_cnp_sent", "tx_cnp_pkts", "cnpSent"), "rp_cnp_handled": ("rp_cnp_handled", "rx_cnp_pkts", "cnpHandled"),
}  # fmt: skip
"""Reading -> names of its file in `hw_counters`: that of the driver mlx5, then those of bnxt_re and irdma."""
DATA = ("port_rcv_data", "port_xmit_data")
"""Files in `counters` that count words of _WORD_BYTES."""
_WORD_BYTES = 4
COUNTERS = {
    **{f"infiniband.{name.lower()}": ("1", f"Port counter {name}") for name in ERRORS},
    **{f"infiniband.{name}": ("1", f"Hardware counter {name}") for name in HARDWARE},
    **{f"infiniband.{name}": ("B", f"Port counter {name}, in bytes") for name in DATA},
    **{f"infiniband.{name}": ("1", text) for name, text in EFA_COUNTERS.items()},
}

Readings = dict[str, Value | Absent]
"""Name of the reading without the leading `infiniband.` -> value."""


class InfinibandCollector:
    """Reads the adapters under `root`. With `full_snapshot` it also reads LIDs, and for RoCE the interface and the GID types.

    Virtual functions, SMI devices and ports of representors are left out. An adapter without hardware, such as Soft-RoCE, is read
    only if it uses a physical interface.
    """

    name = "infiniband"

    def __init__(
        self, root: Path = Path("/"), full_snapshot: bool = False, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._files = Files(root)
        self._clock = clock
        self._refused_at: dict[str, float] = {}
        """Path of a refused counter -> time of `clock` when it was refused."""
        self._full_snapshot = full_snapshot

    def collect(self) -> Iterable[Family]:
        families = empty_families({**KINDS, **COUNTERS}, COUNTERS, varying=KINDS)
        port_count = 0
        for hca in adapters(self._files):
            for name, value in self._adapter(f"{CLASS}/{hca}").items():
                families[f"infiniband.{name}"].add({"hca": hca}, value)
            for port in ports(self._files, hca):
                port_count += 1
                path = f"{CLASS}/{hca}/ports/{port}"
                efa = read_efa(self._files, path, partial(self._counter, parse=parse_natural))
                for name, value in (self._port(path) | efa).items():
                    families[f"infiniband.{name}"].add({"hca": hca, "port": port}, value)
        families["infiniband.port_count"].add(HOST_LABELS, port_count)
        return [family for family in families.values() if family.readings]

    def _adapter(self, path: str) -> Readings:
        missing = "the driver does not report it"
        return {
            "hca.firmware_version": self._files.read(f"{path}/fw_ver", str, missing=missing),
            "hca.board_id": self._files.read(f"{path}/board_id", str, missing=missing),
            "hca.type": self._files.read(f"{path}/hca_type", str, missing=missing),
            "hca.node_guid": self._files.required(f"{path}/node_guid", str),
            "hca.numa_node": self._files.read(
                f"{path}/device/numa_node", parse_numa_node, missing="the kernel has no NUMA support"
            ),
            "hca.pci_address": pci_address(self._files, path),
        }

    def _port(self, path: str) -> Readings:
        layer = self._files.required(f"{path}/link_layer", str)
        state = self._files.required(f"{path}/state", parse_state)
        physical = self._files.required(f"{path}/phys_state", parse_state)
        readings: Readings = {"link_layer": layer, "state": state, "phys_state": physical}
        readings["active"] = state if isinstance(state, Absent) else state == "ACTIVE"
        readings["unmanaged"] = is_unmanaged(state, physical)
        readings |= self._link(path, layer, physical)
        for name, bits in ERRORS.items():
            readings[name.lower()] = self._counter(f"{path}/counters/{name}", partial(parse_counter, bits=bits))
        for name in DATA:
            readings[name] = self._counter(f"{path}/counters/{name}", lambda text: parse_natural(text) * _WORD_BYTES)
        for name, files in HARDWARE.items():
            file = next((file for file in files if self._files.exists(f"{path}/hw_counters/{file}")), name)
            readings[name] = self._counter(f"{path}/hw_counters/{file}", parse_natural)
        return readings | (self._addresses(path, layer) if self._full_snapshot else {})

    def _counter(self, path: str, parse: Callable[[str], Value | Absent]) -> Value | Absent:
        now = self._clock()
        if path in self._refused_at and now - self._refused_at[path] < _ASK_AGAIN_S:
            return _REFUSED
        value = self._files.read(path, parse, missing=_NO_COUNTER, refused=_REFUSED.reason)
        if value == _REFUSED:
            self._refused_at[path] = now
        return value

    def _link(self, path: str, layer: Value | Absent, physical: Value | Absent) -> Readings:
        names = ("rate", "width", "narrowed")
        if isinstance(physical, Absent) or physical != "LinkUp":
            # While the port has no link, its file `rate` does not contain a valid rate.
            return dict.fromkeys(names, physical if isinstance(physical, Absent) else NO_LINK)
        text = self._files.required(f"{path}/rate", str)
        if isinstance(text, Absent):
            return dict.fromkeys(names, text)
        rate, width = parse_rate(text)
        narrowed = width if isinstance(width, Absent) else width == 1
        # Two lanes are no fault: a splitter cable (HDR100, NDR200) gives each port two of the four lanes. A healthy RoCE or EFA
        # port may report one lane.
        return {"rate": rate, "width": width, "narrowed": narrowed if layer == INFINIBAND else False}

    def _addresses(self, path: str, layer: Value | Absent) -> Readings:
        readings: Readings = {
            name: self._files.required(f"{path}/{name}", lambda text: int(text, 16)) for name in ("lid", "sm_lid")
        }
        if layer == ROCE:
            readings["interface"] = port_interface(self._files, path)
            paths = [f"{path}/gid_attrs/types/{index}" for index in range(_GIDS)]
            types = [self._files.required(of_type, str, refused="free") for of_type in paths]
            readings["roce_v2"] = "RoCE v2" in types
        return readings


def adapters(files: Files) -> list[str]:
    """Return the names of the physical adapters, and of the Soft-RoCE adapters that use a physical interface."""
    try:
        names = files.names(CLASS)
    except FileNotFoundError:
        return []
    return _without_smi_devices(files, [name for name in names if _is_physical(files, f"{CLASS}/{name}")])


def _without_smi_devices(files: Files, names: list[str]) -> list[str]:
    """Return the names without those of SMI devices (`rdma dev add smi1 type SMI parent mlx5_0`).

    An SMI device has the ports of the single planes of a ConnectX-8 port, and only subnet managers can use it. Unlike the adapter
    of the same PCI function, it has no verbs device.
    """
    of_function: dict[str, list[str]] = {}
    for name in names:
        of_function.setdefault(_function(files, name), []).append(name)
    if len(of_function) == len(names):
        return names
    entries = files.matching(VERBS_CLASS, r"uverbs\d+", "none")
    listed = [] if isinstance(entries, Absent) else entries
    usable = {files.read(f"{VERBS_CLASS}/{entry}/ibdev", str) for entry in listed}
    return [name for name in names if name in usable or usable.isdisjoint(of_function[_function(files, name)])]


def _function(files: Files, name: str) -> str:
    """Return the directory of the PCI function or other device that has the adapter; the name if it is not known."""
    try:
        return files.target(f"{CLASS}/{name}").rpartition("/")[0]
    except OSError:
        return name


def _is_physical(files: Files, path: str) -> bool:
    if files.exists(f"{path}/device"):
        return not files.exists(f"{path}/device/physfn")
    interface = files.read(f"{path}/parent", str, missing="none", refused="none")  # Soft-RoCE has no `device`
    return isinstance(interface, str) and network.is_nic(files, interface)


def ports(files: Files, hca: str) -> list[str]:
    """Return the numbers of an adapter's ports, without those of representors."""
    path = f"{CLASS}/{hca}/ports"
    try:
        numbers = files.names(path)
    except FileNotFoundError:
        return []  # the adapter was removed after the adapters were listed
    if len(numbers) < 2:
        return numbers
    return ports_with_a_cable({number: _phys_port_name(files, f"{path}/{number}") for number in numbers})


def _phys_port_name(files: Files, path: str) -> str | None:
    """Return `phys_port_name` of the interface of an Ethernet port; None if it has no interface. Empty for other ports."""
    if files.read(f"{path}/link_layer", str) != ROCE:
        return ""
    interface = port_interface(files, path)
    return network.phys_port_name(files, interface) if isinstance(interface, str) and interface else None


def port_interface(files: Files, path: str) -> str | Absent:
    """Return the network interface of the RoCE port whose directory in sysfs is `path`."""
    return files.required(f"{path}/gid_attrs/ndevs/0", str, refused="the port has no address")


def parse_state(text: str) -> str:
    """Return the name of a port state: `ACTIVE` for `4: ACTIVE`. Raises ValueError."""
    number, colon, name = text.partition(": ")
    if not colon or not number.isdigit():
        raise ValueError(f"not a port state: {text or 'empty'}")
    return name


def is_unmanaged(state: Value | Absent, physical: Value | Absent) -> Value | Absent:
    """Return whether the link is up, but no subnet manager has activated the port."""
    return first_absent(state, physical) or (physical == "LinkUp" and state in ("INIT", "ARMED"))


def parse_rate(text: str) -> tuple[Value | Absent, Value | Absent]:
    """Return the rate in B/s and the number of lanes: 50e9 and 4 for `400 Gb/sec (4X NDR)`."""
    match = _RATE.match(text)
    if not match:
        unknown = Absent.error(f"not a link rate: {text or 'empty'}")
        return unknown, unknown
    width = int(match[2]) if match[2] else Absent.unsupported("the driver reports no width")
    return float(match[1]) * 1e9 / 8, width


def parse_counter(text: str, bits: int) -> Value | Absent:
    """Return a counter; an `error` if it has its maximum value; `unsupported` if the text is not a number. Raises ValueError."""
    if not text[:1].isdigit():
        return Absent.unsupported(f"{_NO_COUNTER}: {text or 'empty'}")  # N/A (no PMA)
    number = parse_natural(text)
    if number == (1 << bits) - 1:
        return Absent.error(f"saturated at {number}: clear it (perfquery -R)")
    return number
