"""Read from /sys the RDMA ports of this host.

The fabric is the network that connects the GPU hosts. Between hosts, each port is measured with one port of a partner host.
The functions select the ports of the fabric, the partner's port, and the GPU nearest to a port.
"""

from __future__ import annotations

import contextlib
import operator
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from pathlib import Path

from agent.benchmarks.links.nccl_rdma import NO_GID, NcclRdma
from agent.benchmarks.links.pcie_links import Links, links_above
from schemas.benchmarks.communication import NOT_USED_BY_NCCL
from schemas.representors import ports_with_a_cable

CLASS, VERBS_CLASS = "sys/class/infiniband", "sys/class/infiniband_verbs"
INFINIBAND, ROCE = "InfiniBand", "Ethernet"
CHANNEL_ADAPTER = "1: CA"
"""`node_type` of an adapter whose queue pairs perftest can connect; an adapter for iWARP or EFA has another type."""
LEAST_SHARE = 0.5
"""A port whose rate is less than this share of the fastest port's rate is not a port of the fabric. If the host has InfiniBand
ports, the fastest of these is the fastest port."""
NCCL_DEFAULTS = NcclRdma()
_NAME = re.compile(r"[\w.-]{1,64}")


@dataclass(frozen=True, kw_only=True)
class RdmaPort:
    """One port of an adapter."""

    hca: str
    number: int
    slot: str
    """PCI address of the adapter, and number of the port: `0000:16:00.0/1`. A software adapter has no PCI address:
    the name of its network interface is used, or the name of the adapter if there is no interface. Hosts of one type have equal
    slots."""
    rail: int
    """Index of the port in the list of this host's ports. Ports with `can_connect` come first; the order is otherwise by slot."""
    link_layer: str
    """`InfiniBand`, `Ethernet` (RoCE), or anything else."""
    rate: float
    """Data rate in B/s, one way; 0 if the port is not active, its rate is unknown, or `can_connect` is false."""
    gid_index: int
    """Index of the GID that NCCL uses on a RoCE port; -1 if there is none, 0 if the link is not Ethernet."""
    gid_type: str
    """Such as `RoCE v2 IPv4`, `RoCE v2 IPv6` or `RoCE v2 link-local`; empty if `gid_index` is -1; `IB` if the link is not
    Ethernet."""
    numa_node: str
    """NUMA node of the adapter; `unknown` if the platform does not state it."""
    pci_path: str
    """The path from the root of the PCI bus over its bridges to the adapter, see `_pci_path`; empty for a software adapter."""
    cpus: tuple[int, ...]
    """Processors near the adapter; empty if unknown."""
    unusable: str = ""
    """Why the port is not measured; empty if it is measured."""
    is_active: bool = True
    """Whether the port has a link that can transfer data."""
    can_connect: bool = True
    """Whether perftest can connect the port's queue pairs; false for adapters for iWARP and EFA."""
    device_problem: str = ""
    """Why the device file of the adapter cannot be opened, with the remedy; empty if it can."""
    pkey_index: int = 0
    """Index of the InfiniBand partition key (P_Key) with which the port is measured; 0 if the link is not InfiniBand."""
    service_level: int = 0
    """Service level (SL) of the packets; on a VLAN of RoCE, it is their priority."""
    traffic_class: int = 0
    """Traffic class of the packets (DSCP and ECN bits); 0 if the link is not Ethernet."""
    links: Links = ()
    """The PCIe links above the adapter; empty for a software adapter, and in a virtual machine, which does not show them."""

    @property
    def scope(self) -> str:
        """Return the scope of the port's observations."""
        return f"hca={self.hca},port={self.number}"


def fabric_ports(
    fabric_stated: bool, root: Path = Path("/"), *, is_virtual: bool = False, nccl: NcclRdma = NCCL_DEFAULTS
) -> list[RdmaPort]:
    """Return the RDMA ports of the host in the order of `rail`; `unusable` says why a port is not measured.

    Args:
        fabric_stated: whether the inventory states a fabric, and `NCCL_IB_DISABLE` does not forbid RDMA. If False, RoCE ports
            are not measured: they may carry other traffic, and the virtual NICs of a cloud look like RoCE ports.
        root: the root of the file system.
        is_virtual: whether this is a virtual machine. Its PCIe links are not those of the host.
        nccl: the settings with which NCCL uses the ports.
    """
    ports = list(_ports(root, nccl))
    ports.sort(key=lambda port: (not port.can_connect, port.slot))
    used = [port for port in ports if nccl.uses(port.hca, port.number)]
    has_infiniband = any(port.link_layer == INFINIBAND and port.can_connect for port in used)
    fastest = max((port.rate for port in used if has_infiniband is (port.link_layer == INFINIBAND)), default=0.0)
    return [
        replace(
            port,
            rail=rail,
            unusable=port.unusable or _not_fabric(port, has_infiniband, fabric_stated, fastest, nccl),
            links=() if is_virtual else port.links,
        )
        for rail, port in enumerate(ports)
    ]


def _not_fabric(port: RdmaPort, has_infiniband: bool, fabric_stated: bool, fastest: float, nccl: NcclRdma) -> str:
    if port.link_layer not in (INFINIBAND, ROCE):
        return f"perftest needs InfiniBand or RoCE, but the link layer of the port is {port.link_layer}"
    if not nccl.uses(port.hca, port.number):
        return NOT_USED_BY_NCCL.format(nccl.hca)
    if port.link_layer == ROCE and has_infiniband:
        return "not a port of the fabric: it is Ethernet, and the host has InfiniBand ports"
    if port.link_layer == ROCE and not fabric_stated:
        return (
            "RoCE ports are measured only if the inventory states rackproof_fabric_gbps or rackproof_infiniband_ports, "
            "and NCCL_IB_DISABLE is 0 or not set"
        )
    if not port.is_active:
        return "the port has no link"
    if not port.rate:
        return "the port is active, but its rate cannot be read"
    if port.rate < LEAST_SHARE * fastest:
        return "not a port of the fabric: it has less than half the rate of the fastest port"
    network = f" in NCCL_IB_ADDR_RANGE, {nccl.network}" if nccl.network else ""
    return f"the port has no {nccl.version} address{network}" if (port.gid_index, port.gid_type) == NO_GID else ""


def partner_port(port: RdmaPort, own_slots: Sequence[str], partner_slots: Sequence[str]) -> str | None:
    """Return the slot of the partner's port with which `port` is measured; None if the partner has no such port.

    If the two hosts have any slot in common, the partner's port is the one with the same slot as `port`. Otherwise it is the one
    at the same position in `partner_slots` as `port` in `own_slots`.
    """
    if set(own_slots) & set(partner_slots):
        return port.slot if port.slot in partner_slots else None
    position = own_slots.index(port.slot)
    return partner_slots[position] if position < len(partner_slots) else None


def _ports(root: Path, nccl: NcclRdma) -> Iterator[RdmaPort]:
    """Yield the ports of every adapter except virtual functions and SMI devices. Ports of representors are left out.

    An SMI device (`rdma dev add smi1 type SMI parent mlx5_0`) has the ports of the single planes of a ConnectX-8 port, and only
    subnet managers can use it. Unlike the adapter of the same PCI function, it has no verbs device.

    Each port has `rail` 0, because its rail is not yet known.
    """
    adapters = {path: path / "device" for path in _entries(root / CLASS) if _NAME.fullmatch(path.name)}
    files = {_text(entry / "ibdev"): entry.name for entry in _entries(root / VERBS_CLASS)}
    usable = {device.resolve() for path, device in adapters.items() if path.name in files}
    for path, device in adapters.items():
        is_smi_device = path.name not in files and device.resolve() in usable
        if (device / "physfn").exists() or is_smi_device:
            continue
        kind = _text(path / "node_type")
        for port in _ports_with_a_cable(root, path) if kind else ():
            problem = _device_problem(root, path.name, files.get(path.name, ""))
            rdma_port = replace(_port(path.name, device, port, nccl), device_problem=problem)
            yield (
                rdma_port
                if kind == CHANNEL_ADAPTER
                else replace(rdma_port, rate=0.0, can_connect=False, unusable=_wrong_kind(kind))
            )


def _ports_with_a_cable(root: Path, adapter: Path) -> list[Path]:
    """Return the directories of an adapter's ports, without those of representors."""
    ports = [port for port in _entries(adapter / "ports") if port.name.isdecimal()]
    names: dict[str, str | None] = {}
    for port in ports:
        interface = _text(port / "gid_attrs/ndevs/0")
        has_interface = bool(interface) or _text(port / "link_layer") != ROCE
        names[port.name] = _text(root / "sys/class/net" / interface / "phys_port_name") if has_interface else None
    return [adapter / "ports" / number for number in ports_with_a_cable(names)]


def _device_problem(root: Path, hca: str, name: str) -> str:
    """Return why the device file of an adapter cannot be opened. Empty if it can, or if sysfs does not state its `name`.

    A container shows the adapters of the machine in sysfs, but has only the device files that are passed to it.
    """
    if not name:
        return ""
    file = f"dev/infiniband/{name}"
    try:
        os.close(os.open(root / file, os.O_RDWR | os.O_CLOEXEC))
    except (FileNotFoundError, PermissionError) as error:
        return (
            f"/{file}, the device file of {hca}, cannot be opened: {error.strerror}. If this is a container, pass "
            "/dev/infiniband to it (docs/container.md); if this is a job, its device cgroup must allow the file"
        )
    except OSError:
        return ""  # perftest then reports the problem
    return ""


def _wrong_kind(kind: str) -> str:
    return (
        f"perftest can only use adapters of type '{CHANNEL_ADAPTER}' (channel adapter), but this one has type '{kind}'"
    )


def _port(hca: str, device: Path, path: Path, nccl: NcclRdma) -> RdmaPort:
    layer, state, physical = (_text(path / name) for name in ("link_layer", "state", "phys_state"))
    has_link = physical.endswith("LinkUp")
    is_active = has_link and state.endswith("ACTIVE")
    unusable = "the link is up, but no subnet manager has activated it" if has_link and not is_active else ""
    index, kind = nccl.gid(_gids(path)) if layer == ROCE else (0, "IB")
    pci_path = _pci_path(device)
    adapter = pci_path.rpartition("/")[2] or _text(path / "gid_attrs/ndevs/0") or hca
    node = _text(device / "numa_node")
    return RdmaPort(
        hca=hca,
        number=int(path.name),
        slot=f"{adapter}/{path.name}",
        rail=0,
        link_layer=layer or "unknown",
        rate=_rate(_text(path / "rate")) if is_active else 0.0,
        gid_index=index,
        gid_type=kind,
        numa_node=node if node.isdecimal() else "unknown",
        pci_path=pci_path,
        cpus=_cpus(_text(device / "local_cpulist")),
        unusable=unusable if state and physical else "the state of the port cannot be read",
        is_active=is_active,
        pkey_index=nccl.pkey_index if layer == INFINIBAND else 0,
        service_level=nccl.service_level,
        traffic_class=nccl.traffic_class if layer == ROCE else 0,
        links=links_above(device),
    )


def _gids(path: Path) -> dict[int, tuple[str, str]]:
    """Return index -> GID and type of each entry of a port's GID table that is in use."""
    return {
        int(entry.name): (_text(path / "gids" / entry.name), of_type)
        for entry in _entries(path / "gid_attrs/types")
        if entry.name.isdecimal() and (of_type := _text(entry))
    }


def _rate(text: str) -> float:
    """Return the rate in B/s of `400 Gb/sec (4X NDR)`; 0 if the text has another form."""
    match = re.match(r"(\d+(?:\.\d+)?) Gb/sec", text)
    return float(match[1]) * 1e9 / 8 if match else 0.0


def _pci_path(device: Path) -> str:
    """Return a path such as `pci0000:15/0000:15:01.0/0000:16:00.0`; empty if the adapter is not on the PCI bus."""
    with contextlib.suppress(OSError):
        parts = device.resolve(strict=True).parts
        start = next((number for number, part in enumerate(parts) if part.startswith("pci")), None)
        if start is not None and re.fullmatch(r"[\da-f:.]+", parts[-1]):
            return "/".join(parts[start:])
    return ""


def _cpus(text: str) -> tuple[int, ...]:
    """Return the processors in a list such as `0-23,96-119`; empty if it has another form."""
    if not re.fullmatch(r"\d{1,5}(-\d{1,5})?(,\d{1,5}(-\d{1,5})?)*", text):
        return ()
    ranges = [part.split("-") for part in text.split(",")]
    return tuple(cpu for ends in ranges for cpu in range(int(ends[0]), int(ends[-1]) + 1))


def _entries(path: Path) -> list[Path]:
    try:
        return sorted(path.iterdir(), key=lambda entry: (len(entry.name), entry.name))
    except OSError:
        return []  # no adapter, or it was removed


def _text(path: Path) -> str:
    """Return the text of a file of sysfs in one line; empty if it cannot be read (a free GID entry gives EINVAL)."""
    try:
        return " ".join(path.read_text(encoding="ascii", errors="replace").split())[:200]
    except OSError:
        return ""


def nearest_gpu(port: RdmaPort, devices: Sequence[int], root: Path = Path("/")) -> str:
    """Return the PCI address of the GPU under test that shares the most bridges with the adapter; empty if no GPU is under test.

    Args:
        port: a port of the adapter.
        devices: NVML indices of the GPUs under test.
    """
    gpus = [_pci_path(root / "sys/bus/pci/devices" / address) for address in _nvml_gpus(root)]
    tested = [gpus[index] for index in devices if index < len(gpus)]
    own = port.pci_path.split("/")
    shared = [sum(1 for _ in takewhile(bool, map(operator.eq, own, path.split("/")))) for path in tested]
    return tested[shared.index(max(shared))].rpartition("/")[2] if tested else ""


def _nvml_gpus(root: Path) -> list[str]:
    """Return the PCI addresses of the GPUs that NVML lists, in the order of its indices, which is that of the addresses.

    NVML lists the GPUs that NVIDIA's driver uses and whose device node this process can open. So a GPU of a virtual machine, or
    of another container or job, has no index.
    """
    gpus = []
    for path in sorted((root / "proc/driver/nvidia/gpus").glob("*/information")):
        with contextlib.suppress(OSError):
            minor = re.search(
                r"^Device Minor:\s*(\d+)", path.read_text(encoding="ascii", errors="replace"), re.MULTILINE
            )
            if minor:
                os.close(os.open(root / f"dev/nvidia{minor[1]}", os.O_RDWR | os.O_CLOEXEC))
                gpus.append(path.parent.name)
    return gpus
