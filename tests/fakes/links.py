"""Build the /sys of an HGX host, for the `pcie`, `infiniband` and `network` collectors.

The host has eight PCIe switches, each with a GPU, a ConnectX-7 for InfiniBand and an NVMe drive. It also has a ConnectX-6 Dx
(Ethernet, RoCE), a Broadcom NIC and four NVSwitches. Each of these six devices is below a bridge of its own. A test changes the
built tree with the functions under "changes".
"""

from __future__ import annotations

import shutil
import struct
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

GPUS = tuple(f"0000:{0x18 + 0x10 * number:02x}:00.0" for number in range(8))
HCAS = tuple(f"0000:{0x19 + 0x10 * number:02x}:00.0" for number in range(8))
DRIVES = tuple(f"0000:{0x1A + 0x10 * number:02x}:00.0" for number in range(8))
NVSWITCHES = tuple(f"0000:{bus:02x}:00.0" for bus in (0x05, 0x06, 0x07, 0x08))
ROCE_NIC, PLAIN_NIC = "0000:a1:00.0", "0000:a2:00.0"
ROOT_PORTS = tuple(f"0000:{0x15 + 0x10 * number:02x}:01.0" for number in range(8))
GPU_PORTS = tuple(f"0000:{0x17 + 0x10 * number:02x}:00.0" for number in range(8))
"""PCI address of the switch port above each GPU."""
HCA_PORTS = tuple(f"0000:{0x17 + 0x10 * number:02x}:01.0" for number in range(8))
"""PCI address of the switch port above each InfiniBand adapter."""
IB, ROCE = tuple(f"mlx5_{number}" for number in range(8)), "mlx5_8"
ROCE_INTERFACE, PLAIN_INTERFACE = "enp161s0np0", "enp162s0"
ACS_OFF, ACS_KERNEL = 0x00, 0x1D
"""Values of the ACS control register. NCCL needs ACS_OFF. Linux sets ACS_KERNEL when it uses an IOMMU to isolate devices."""
GIB = 1 << 30

ERRORS = (
    "symbol_error", "link_error_recovery", "link_downed", "port_rcv_errors", "port_rcv_remote_physical_errors",
    "port_rcv_switch_relay_errors", "port_xmit_discards", "local_link_integrity_errors", "excessive_buffer_overrun_errors",
    "VL15_dropped", "port_xmit_wait",
)  # fmt: skip
HARDWARE = (
    "packet_seq_err", "out_of_sequence", "local_ack_timeout_err", "rnr_nak_retry_err", "roce_adp_retrans", "np_cnp_sent",
    "rp_cnp_handled",
)  # fmt: skip
STATISTICS = (
    "rx_bytes", "tx_bytes", "rx_errors", "tx_errors", "rx_dropped", "tx_dropped", "rx_crc_errors", "rx_missed_errors",
)  # fmt: skip
AER = {
    "correctable": "RxErr 0\nBadTLP 0\nBadDLLP 0\nRollover 0\nTimeout 0\nNonFatalErr 0\nTOTAL_ERR_COR {}\n",
    "nonfatal": "Undefined 0\nDLP 0\nTLP 0\nCmpltTO 0\nUnsupReq 0\nTOTAL_ERR_NONFATAL {}\n",
    "fatal": "Undefined 0\nDLP 0\nSDES 0\nTLP 0\nCmpltTO 0\nTOTAL_ERR_FATAL {}\n",
}


def build_tree(root: Path, gpus: int = 8) -> Path:
    """Build the tree of a healthy host, and return `root`.

    `gpus` is the number of GPUs, of InfiniBand adapters and of drives. There are half as many NVSwitches, rounded up.
    """
    for number in range(gpus):
        up, down = f"0000:{0x16 + 0x10 * number:02x}:00.0", f"0000:{0x17 + 0x10 * number:02x}"
        numa, switch = number // 4, (ROOT_PORTS[number], up)
        _bridge(root, (), ROOT_PORTS[number], numa)
        _bridge(root, switch[:1], up, numa)
        below = ((GPUS, _gpu), (HCAS, _hca), (DRIVES, _drive))
        for port, (addresses, make) in enumerate(below):
            _bridge(root, switch, f"{down}:{port:02x}.0", numa, acs=ACS_OFF, width=4 if make is _drive else 16)
            make(root, (*switch, f"{down}:{port:02x}.0"), addresses[number], numa)
        _infiniband(root, IB[number], HCAS[number], number)
        write(root, f"proc/driver/nvidia/gpus/{GPUS[number]}/information", f"Device Minor: \t {number}\n")
        write(root, f"dev/nvidia{number}", "")
    _bridge(root, (), "0000:01:01.0", 0)
    for number, address in enumerate(NVSWITCHES[: (gpus + 1) // 2]):
        above = f"0000:01:02.{number}"
        _bridge(root, (), above, 0, speed="16.0", width=4)
        _endpoint(root, (above,), address, 0, ids=("0x10de", "0x22a3", "0x068000"), speed="5.0", width=2)
    for above, address, vendor in (("0000:a0:01.0", ROCE_NIC, "0x15b3"), ("0000:a0:02.0", PLAIN_NIC, "0x14e4")):
        _bridge(root, (), above, 1, speed="16.0")
        _endpoint(root, (above,), address, 1, ids=(vendor, "0x101d", "0x020000"), speed="16.0", width=16)
    _network(root, ROCE_INTERFACE, ROCE_NIC, "mlx5_core", 100_000)
    _network(root, PLAIN_INTERFACE, PLAIN_NIC, "bnxt_en", 25_000)
    _roce(root)
    _virtual_interface(root, "lo", kind="772")
    _virtual_interface(root, "docker0")
    (root / "sys/class/iommu").mkdir(parents=True)
    write(root, "proc/cpuinfo", "processor\t: 0\nflags\t\t: fpu vme vmx\n")
    return root


@contextmanager
def memory_directory() -> Iterator[Path]:
    """Yield a temporary directory, in memory if possible."""
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else None) as folder:
        yield Path(folder)


@contextmanager
def temporary_tree(gpus: int = 8) -> Iterator[Path]:
    """Yield a temporary tree, in memory because it has a thousand small files."""
    with memory_directory() as folder:
        yield build_tree(folder, gpus)


# ---- changes ----


def write(root: Path, path: str, text: str) -> None:
    """Write one file, with the directories above it."""
    (root / path).parent.mkdir(parents=True, exist_ok=True)
    (root / path).write_text(text)


def pci(root: Path, address: str) -> Path:
    """Return the directory of a PCI device."""
    return root / "sys/bus/pci/devices" / address


def port(root: Path, hca: str) -> Path:
    """Return the directory of an adapter's port."""
    return root / "sys/class/infiniband" / hca / "ports/1"


def interface(root: Path, name: str) -> Path:
    """Return the directory of a network interface."""
    return root / "sys/class/net" / name


def set_link(root: Path, address: str, which: str, *, speed: str = "", width: int | None = None) -> None:
    """Set the speed (in GT/s), the width (number of lanes) or both of a PCIe link; `which` is `current` or `max`."""
    if speed:
        (pci(root, address) / f"{which}_link_speed").write_text(f"{speed} GT/s PCIe\n")
    if width is not None:
        (pci(root, address) / f"{which}_link_width").write_text(f"{width}\n")


def set_aer(root: Path, address: str, severity: str, total: int) -> None:
    """Set the total of AER errors of a PCIe device; `severity` is a key of AER."""
    (pci(root, address) / f"aer_dev_{severity}").write_text(AER[severity].format(total))


def set_acs(root: Path, address: str, control: int) -> None:
    """Set the ACS control register of a bridge."""
    (pci(root, address) / "config").write_bytes(config_space(port_type=6, acs=control))


def set_counter(root: Path, hca: str, name: str, value: int) -> None:
    """Set a counter of an adapter's port."""
    folder = "counters" if (port(root, hca) / "counters" / name).exists() else "hw_counters"
    (port(root, hca) / folder / name).write_text(f"{value}\n")


def as_unprivileged(root: Path) -> None:
    """Cut each configuration space to the 64 bytes that an unprivileged process can read."""
    for config in root.glob("sys/devices/**/config"):
        config.write_bytes(config.read_bytes()[:64])


def as_virtual_machine(root: Path) -> None:
    """Build the /sys of a virtual machine with two GPUs and an adapter, without PCIe bridges, link states or AER counters."""
    write(root, "proc/cpuinfo", "processor\t: 0\nflags\t\t: fpu vme hypervisor\n")
    for number, ids in enumerate((_GPU_IDS, _GPU_IDS, _HCA_IDS)):
        folder = _device(root, (), f"0000:00:0{number + 4}.0", -1, ids)
        (folder / "config").write_bytes(config_space()[:256])
        (folder / "resource").write_text(_RESOURCE)


def add_bond(root: Path, name: str, states: dict[str, str]) -> None:
    """Add a bond; `states` maps the interfaces of the bond to their MII status, such as `up` or `down`."""
    _virtual_interface(root, name)
    write(root, f"sys/class/net/{name}/bonding/slaves", " ".join(states) + "\n")
    for slave, state in states.items():
        write(root, f"sys/class/net/{slave}/bonding_slave/mii_status", f"{state}\n")


SWITCH_ROOT, SWITCH_UP, SWITCH_DOWN, SWITCH_HCA = "0000:b0:01.1", "0000:b1:00.0", "0000:b2:00.0", "0000:b3:00.0"
"""PCI addresses of an adapter with a PCIe switch: root port, upper and lower end of the switch, the adapter's function."""
SWITCH_GPU = "0000:b6:00.0"


def add_roce_port(root: Path, number: int, phys_port_name: str | None, state: tuple[str, str]) -> None:
    """Add or change a port of the adapter ROCE. `phys_port_name`: that of its interface; None if the port has no interface."""
    ports = root / "sys/class/infiniband" / ROCE / "ports"
    if number != 1:
        shutil.copytree(ports / "1", ports / str(number))
    write(ports, f"{number}/state", f"{state[0]}\n")
    write(ports, f"{number}/phys_state", f"{state[1]}\n")
    if phys_port_name is None:
        (ports / f"{number}/gid_attrs/ndevs/0").unlink(missing_ok=True)
    else:
        interface = f"rep{number}"
        write(ports, f"{number}/gid_attrs/ndevs/0", f"{interface}\n")
        write(root, f"sys/class/net/{interface}/phys_port_name", f"{phys_port_name}\n")


def add_adapter_with_switch(root: Path) -> None:
    """Add a ConnectX-7 that contains a PCIe switch, and a GPU below this switch, as in a Lenovo SD665-N V3 or DGX H100."""
    bridge = ("0x15b3", "0x1979", "0x060400")
    _bridge(root, (), SWITCH_ROOT, 1)
    above = (SWITCH_ROOT,)
    for address in (SWITCH_UP, "0000:b2:02.0", "0000:b4:00.0", "0000:b5:00.0"):
        _endpoint(root, above, address, 1, ids=bridge, speed="32.0", width=16)
        above = (*above, address)
    _gpu(root, above, SWITCH_GPU, 1)
    _endpoint(root, (SWITCH_ROOT, SWITCH_UP), SWITCH_DOWN, 1, ids=bridge, speed="32.0", width=16)
    _hca(root, (SWITCH_ROOT, SWITCH_UP, SWITCH_DOWN), SWITCH_HCA, 1)


EFA, EFA_NIC = "rdmap163s0", "0000:a3:00.0"
EFA_COUNTERS = {
    "rx_drops": 18, "retrans_pkts": 3321, "retrans_timeout_events": 2, "unresponsive_remote_events": 0,
    "impaired_remote_conn_events": 1, "rdma_read_wr_err": 0, "rdma_write_wr_err": 0, "keep_alive_rcvd": 9912,
}  # fmt: skip


def add_efa(root: Path) -> None:
    """Add the EFA adapter of an AWS instance. Its port has the counters EFA_COUNTERS."""
    _device(root, ("0000:a0:01.0",), EFA_NIC, 1, ("0x1d0f", "0xefa2", "0x020000"))
    folder = _class_device(root, "infiniband", EFA, EFA_NIC)
    files = {
        "fw_ver": "0.0.0.0", "node_guid": "0000:0000:0000:0000", "ports/1/link_layer": "Unspecified",
        "ports/1/state": "4: ACTIVE", "ports/1/phys_state": "5: LinkUp", "ports/1/rate": "100 Gb/sec (4X EDR)",
        "ports/1/lid": "0x0", "ports/1/sm_lid": "0x0", "hw_counters/cmds_err": "0",
        **{f"ports/1/hw_counters/{name}": value for name, value in EFA_COUNTERS.items()},
    }  # fmt: skip
    for name, text in files.items():
        write(folder, name, f"{text}\n")
    (pci(root, EFA_NIC) / "driver").symlink_to("../../../bus/pci/drivers/efa")


def config_space(*, port_type: int = 0, payload: int = 1, read: int = 5, acs: int | None = None) -> bytes:
    """Return a configuration space of 4096 bytes. Its capabilities are power management, PCI Express, AER and, with `acs`, ACS.

    Args:
        port_type: 0: an endpoint; 4: a root port; 6: a downstream port of a switch.
        payload: setting of the device: the largest payload is 128 * 2**payload bytes.
        read: setting of the device: the largest read request is 128 * 2**read bytes.
        acs: value of the ACS control register; None: no ACS.
    """
    space = bytearray(4096)
    struct.pack_into("<HHHH", space, 0, 0x10DE, 0x2330, 0x0146, 0x0010)
    space[0x34] = 0x40
    struct.pack_into("<BB", space, 0x40, 0x01, 0x60)
    struct.pack_into(
        "<BBHIH", space, 0x60, 0x10, 0, 0x0002 | port_type << 4, 0x8001, 0x0010 | payload << 5 | read << 12
    )
    struct.pack_into("<I", space, 0x100, 0x0001 | 2 << 16 | (0x148 << 20 if acs is not None else 0))
    if acs is not None:
        struct.pack_into("<IHH", space, 0x148, 0x000D | 1 << 16, 0x005F, acs)
    return bytes(space)


# ---- construction ----

_GPU_IDS, _HCA_IDS = ("0x10de", "0x2330", "0x030200"), ("0x15b3", "0x1021", "0x020700")
_RESOURCE = "\n".join(
    (
        "0x0000382042000000 0x0000382042ffffff 0x000000000014220c",
        "0x0000000000000000 0x0000000000000000 0x0000000000000000",
        "0x0000380000000000 0x0000381fffffffff 0x000000000014220c",
        "0x0000000000000000 0x0000000000000000 0x0000000000000000",
        "0x0000382040000000 0x0000382041ffffff 0x000000000014220c",
        *["0x0000000000000000 0x0000000000000000 0x0000000000000000"] * 8,
    )
)


def _device(root: Path, above: tuple[str, ...], address: str, numa: int, ids: tuple[str, str, str]) -> Path:
    location = "/".join((f"sys/devices/pci{(*above, address)[0][:7]}", *above, address))
    folder, known = root / location, root / "sys/bus/pci/devices"
    folder.mkdir(parents=True)
    known.mkdir(parents=True, exist_ok=True)
    (known / address).symlink_to(f"../../../{location.removeprefix('sys/')}")
    for name, text in zip(("vendor", "device", "class", "numa_node", "power_state"), (*ids, numa, "D0"), strict=True):
        (folder / name).write_text(f"{text}\n")
    (folder / "subsystem").symlink_to(Path("../" * (len(above) + 3)) / "bus/pci")
    return folder


def _endpoint(
    root: Path, above: tuple[str, ...], address: str, numa: int, *, ids: tuple[str, str, str], speed: str, width: int
) -> None:
    folder = _device(root, above, address, numa, ids)
    for which in ("current", "max"):
        set_link(root, address, which, speed=speed, width=width)
    for severity in AER:
        set_aer(root, address, severity, 0)
    (folder / "config").write_bytes(config_space())
    (folder / "resource").write_text(_RESOURCE)


def _bridge(
    root: Path, above: tuple[str, ...], address: str, numa: int, *, speed: str = "32.0", width: int = 16, acs: int = 0
) -> None:
    _endpoint(root, above, address, numa, ids=("0x1000", "0xc030", "0x060400"), speed=speed, width=width)
    set_acs(root, address, acs)


def _gpu(root: Path, above: tuple[str, ...], address: str, numa: int) -> None:
    _endpoint(root, above, address, numa, ids=_GPU_IDS, speed="32.0", width=16)


def _hca(root: Path, above: tuple[str, ...], address: str, numa: int) -> None:
    _endpoint(root, above, address, numa, ids=_HCA_IDS, speed="32.0", width=16)


def _drive(root: Path, above: tuple[str, ...], address: str, numa: int) -> None:
    _endpoint(root, above, address, numa, ids=("0x144d", "0xa824", "0x010802"), speed="16.0", width=4)


def _class_device(root: Path, kind: str, name: str, address: str) -> Path:
    """Add a directory below a PCI device, with a link `device` to the PCI device, and a link from /sys/class to the directory."""
    below = pci(root, address).resolve() / kind / name
    below.mkdir(parents=True)
    (below / "device").symlink_to("../..")
    links = root / "sys/class" / kind
    links.mkdir(parents=True, exist_ok=True)
    (links / name).symlink_to(Path("../..") / below.relative_to((root / "sys").resolve()))
    return below


def _infiniband(root: Path, hca: str, address: str, number: int) -> Path:
    folder = _class_device(root, "infiniband", hca, address)
    files = {
        "fw_ver": "28.39.1002", "board_id": "MT_0000000838", "hca_type": "MT4129",
        "node_guid": f"a088:c203:0012:340{number}", "ports/1/link_layer": "InfiniBand", "ports/1/state": "4: ACTIVE",
        "ports/1/phys_state": "5: LinkUp", "ports/1/rate": "400 Gb/sec (4X NDR)", "ports/1/lid": f"0x{number + 17:x}",
        "ports/1/sm_lid": "0x1", "ports/1/counters/port_rcv_data": "1000", "ports/1/counters/port_xmit_data": "2000",
        **{f"ports/1/counters/{name}": "0" for name in ERRORS},
        **{f"ports/1/hw_counters/{name}": "0" for name in HARDWARE},
    }  # fmt: skip
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(f"{text}\n")
    return folder


def _roce(root: Path) -> None:
    ports = _infiniband(root, ROCE, ROCE_NIC, 8) / "ports/1"
    for name, text in {
        "link_layer": "Ethernet", "rate": "100 Gb/sec (4X EDR)", "lid": "0x0", "sm_lid": "0x0",
        "gid_attrs/ndevs/0": ROCE_INTERFACE,
        **{f"gid_attrs/types/{index}": ("IB/RoCE v1", "RoCE v2")[index % 2] for index in range(4)},
    }.items():  # fmt: skip
        write(ports, name, f"{text}\n")


def _network(root: Path, name: str, address: str, driver: str, megabits: int) -> None:
    folder = _class_device(root, "net", name, address)
    files = {
        "type": "1", "operstate": "up", "carrier": "1", "carrier_changes": "2", "speed": megabits, "duplex": "full",
        "mtu": "9000", "address": f"b8:3f:d2:00:00:{address[5:7]}", "phys_port_name": "p0",
        **{f"statistics/{statistic}": "0" for statistic in STATISTICS},
    }  # fmt: skip
    for file, text in files.items():
        write(folder, file, f"{text}\n")
    (pci(root, address) / "driver").symlink_to(f"../../../bus/pci/drivers/{driver}")


def _virtual_interface(root: Path, name: str, kind: str = "1") -> None:
    location = f"devices/virtual/net/{name}"
    write(root, f"sys/{location}/type", f"{kind}\n")
    (root / "sys/class/net" / name).symlink_to(f"../../{location}")
