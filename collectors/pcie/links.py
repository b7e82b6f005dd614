"""The PCIe links of GPUs, NVSwitches, network adapters and NVMe drives, and of the ports above them."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from pathlib import Path

from collectors.base import HOST_LABELS, Absent, Family, Value, empty_families, first_absent
from collectors.files import Files
from collectors.pcie.acs import acs_families
from collectors.pcie.affinity import affinity_families
from collectors.pcie.config import configuration_families
from collectors.pcie.device import GPU, NETWORK, Device, PciBus
from collectors.sysfs import DRIVER_GPUS, PCI_DEVICES, parse_numa_node
from collectors.virtual import is_virtual

GENERATIONS = {2.5: 1, 5.0: 2, 8.0: 3, 16.0: 4, 32.0: 5, 64.0: 6}
"""GT/s per lane -> PCIe generation."""
NO_PORT = Absent.unsupported("no port above the device is visible")
VIRTUAL = Absent.unsupported("in a virtual machine, the ports are not those of the host")
COHERENT = Absent.unsupported("the GPU is attached to its CPU by NVLink-C2C")
NO_AER = "no AER counters: the device, the firmware or the kernel does not provide them"
NO_DRIVER = "the driver of NVIDIA does not list the GPU"
_NO_LINK = "the device has no PCIe link"
_LOST_WIDTH, _NO_WIDTHS = 63, (0, 255)
"""Link widths in /sys. 63: the device does not answer, and all six bits of the register field read as 1. 0 or 255: the device has
no link."""
SEVERITIES = ("correctable", "nonfatal", "fatal")

KINDS = {
    "pcie.device_count": (
        "1",
        "GPUs, NVSwitches, NVMe drives, and network adapters of NVIDIA or with 16 lanes on the PCI bus",
    ),
    "pcie.generation": ("1", "Current PCIe generation of the link; GPUs lower it when idle"),
    "pcie.width": ("1", "Current lanes of the link"),
    "pcie.generation_max": ("1", "PCIe generation that the device supports"),
    "pcie.width_max": ("1", "Lanes that the device supports"),
    "pcie.port.generation_max": ("1", "PCIe generation that the port above the device supports"),
    "pcie.port.width_max": ("1", "Lanes that the port above the device supports"),
    "pcie.slowed": ("1", "The link is slower than both ends support; GPUs and network adapters only"),
    "pcie.narrowed": ("1", "The link has fewer lanes than both ends support; GPUs and network adapters only"),
    **{f"pcie.aer.{name}": ("1", f"AER errors of the device, {name}") for name in SEVERITIES},
    **{f"pcie.port.aer.{name}": ("1", f"AER errors of the port above the device, {name}") for name in SEVERITIES},
    "pcie.kind": ("1", "Kind of the device"),
    "pcie.port.address": (
        "1",
        "PCI address of the port above the device; a PCIe switch inside an adapter is part of the adapter",
    ),
    "pcie.power_state": ("1", "Power state of the device"),
    "pcie.numa_node": ("1", "NUMA node of the device"),
    "pcie.driver": ("1", "Driver that the GPU is bound to; `none` if the GPU has no driver"),
    "pcie.permitted": ("1", "This process has permission to use the device file of the GPU"),
}
COUNTERS = [name for name in KINDS if ".aer." in name]
VARYING = [
    f"pcie.{name}"
    for name in ("device_count", "generation", "width", "slowed", "narrowed", "power_state", "driver", "permitted")
]


class PcieCollector:
    """Reads the PCI bus from /sys under `root`.

    A full snapshot also reads kind, port, power state, driver and NUMA node, the configuration (payload, BARs, IOMMU, ACS), and
    the PCIe path from each GPU to its nearest network adapters.
    """

    name = "pcie"

    def __init__(self, root: Path = Path("/"), full_snapshot: bool = False) -> None:
        self._files = Files(root)
        self._full_snapshot = full_snapshot
        self._bus = PciBus(self._files)
        self._virtual: bool | None = None

    def collect(self) -> Iterable[Family]:
        families = empty_families(KINDS, COUNTERS, VARYING)
        device_count = families["pcie.device_count"]
        try:
            devices = self._bus.devices()
        except FileNotFoundError:
            device_count.add(HOST_LABELS, Absent.unsupported(f"no /{PCI_DEVICES}: no PCI bus"))
            return [device_count]
        device_count.add(HOST_LABELS, len(devices))
        for device in devices:
            for name, value in self._readings(device).items():
                families[name].add({"pci": device.address}, value)
        constant = self._constant_families(devices) if self._full_snapshot else []
        return [*(family for family in families.values() if family.readings), *constant]

    def _constant_families(self, devices: list[Device]) -> list[Family]:
        virtual = self._is_virtual()
        return [
            *configuration_families(self._files, devices),
            *acs_families(self._files, devices, is_virtual=virtual),
            *affinity_families(self._files, devices, absent=VIRTUAL if virtual else None),
        ]

    def _is_virtual(self) -> bool:
        """Return whether this is known to be a virtual machine."""
        if self._virtual is None:
            self._virtual = is_virtual(self._files) is True
        return self._virtual

    def _readings(self, device: Device) -> dict[str, Value | Absent]:
        path = f"{PCI_DEVICES}/{device.address}"
        link_end = f"{PCI_DEVICES}/{device.link_end}"
        port = f"{PCI_DEVICES}/{device.port}" if device.port else ""
        readings: dict[str, Value | Absent] = {}
        readings["pcie.generation"], readings["pcie.width"] = self._link(link_end, "current")
        readings |= self._limits(device, link_end, port)
        for severity in SEVERITIES:
            counts = [self._error_count(end, severity) for end in dict.fromkeys((path, link_end))]
            readings[f"pcie.aer.{severity}"] = _total(counts)
            readings[f"pcie.port.aer.{severity}"] = self._error_count(port, severity) if port else NO_PORT
        if device.kind in (GPU, NETWORK):
            # Other kinds are left out. NVSwitches use PCIe only for management. The backplane between an NVMe drive and its port
            # may support less than both.
            readings["pcie.slowed"] = self._is_below_limits(device, readings, "generation")
            readings["pcie.narrowed"] = self._is_below_limits(device, readings, "width")
        if self._full_snapshot:
            readings["pcie.kind"] = device.kind
            readings["pcie.port.address"] = device.port or NO_PORT
            readings["pcie.power_state"] = self._files.read(
                f"{path}/power_state", str, missing="the kernel does not report the power state"
            )
            if device.kind == GPU:
                is_bound = self._files.exists(f"{path}/driver")
                readings["pcie.driver"] = self._files.target_name(f"{path}/driver") if is_bound else "none"
                readings["pcie.permitted"] = self._is_permitted(device)
            readings["pcie.numa_node"] = self._files.read(
                f"{path}/numa_node", parse_numa_node, missing="the kernel has no NUMA support"
            )
        return readings

    def _limits(self, device: Device, path: str, port: str) -> dict[str, Value | Absent]:
        if device.limits:
            return device.limits
        generation, width = self._link(path, "max")
        port_generation, port_width = self._link(port, "max") if port else (NO_PORT, NO_PORT)
        limits = {"pcie.generation_max": generation, "pcie.width_max": width}
        limits |= {"pcie.port.generation_max": port_generation, "pcie.port.width_max": port_width}
        if not any(isinstance(value, Absent) and value.status == "error" for value in limits.values()):
            device.limits = limits
        return limits

    def _link(self, path: str, which: str) -> tuple[Value | Absent, Value | Absent]:
        """Return PCIe generation and lanes of the link of the device or port at `path`; `which` is `current` or `max`."""
        speed = self._files.read(f"{path}/{which}_link_speed", str, missing=_NO_LINK)
        width: Value | Absent = self._files.read(f"{path}/{which}_link_width", int, missing=_NO_LINK)
        if width == _LOST_WIDTH:
            lost = Absent.error("the device does not answer: its registers read as all ones")
            return lost, lost
        if width in _NO_WIDTHS:
            width = Absent.unsupported(_NO_LINK)
        return parse_generation(speed) if isinstance(speed, str) else speed, width

    def _is_permitted(self, device: Device) -> bool | Absent:
        """Return whether this process may open the device file of a GPU.

        A device cgroup of Slurm or systemd, or the mode of the file, may forbid this. Then NVML does not list the GPU. access(2)
        checks both. Opening the file would initialize the GPU, and might hang.
        """
        minor = self._files.read(f"{DRIVER_GPUS}/{device.address}/information", parse_minor, missing=NO_DRIVER)
        if isinstance(minor, Absent):
            return minor
        if not self._files.exists(f"dev/nvidia{minor}"):
            return Absent.unsupported(f"no /dev/nvidia{minor}")
        return os.access(self._files.path(f"dev/nvidia{minor}"), os.R_OK | os.W_OK)

    def _error_count(self, path: str, severity: str) -> Value | Absent:
        return self._files.read(f"{path}/aer_dev_{severity}", parse_total, missing=NO_AER)

    def _is_below_limits(self, device: Device, readings: dict[str, Value | Absent], name: str) -> Value | Absent:
        """Return whether the current generation or width (`name`) of the link is lower than both ends support."""
        if device.is_coherent or self._is_virtual():
            return COHERENT if device.is_coherent else VIRTUAL
        values = [readings[f"pcie.{key}"] for key in (name, f"{name}_max", f"port.{name}_max")]
        if absent := first_absent(*values):
            return absent
        current, *limits = (value for value in values if isinstance(value, int))
        return current < min(limits)


def _total(counts: Iterable[Value | Absent]) -> Value | Absent:
    """Return the sum of counts. Those that are `unsupported` are left out, unless all are."""
    listed = list(counts)
    numbers = [count for count in listed if isinstance(count, int)]
    failed = [count for count in listed if isinstance(count, Absent) and (count.status == "error" or not numbers)]
    return failed[0] if failed else sum(numbers)


def parse_generation(speed: str) -> Value | Absent:
    """Return the PCIe generation of a link speed: 5 for `32.0 GT/s PCIe`.

    If the text has no number (`Unknown`), or no generation has this speed, return an Absent with the reason.
    """
    number = speed.split(" ", 1)[0]
    try:
        return GENERATIONS[float(number)]
    except ValueError:
        return Absent.unsupported(f"the link speed is not a number: {speed!r}")
    except KeyError:
        return Absent.error(f"no PCIe generation has the link speed {speed}")


def parse_minor(text: str) -> int:
    """Return the number of a GPU's device file, from its file `information` of the driver. Raises ValueError if it has none."""
    match = re.search(r"^Device Minor:\s+(\d+)$", text, re.MULTILINE)
    if not match:
        raise ValueError("no line Device Minor")
    return int(match[1])


def parse_total(text: str) -> int:
    """Return the number in the last total line (`TOTAL_ERR_COR 3`) of an AER counter file. Raises ValueError if none exists."""
    for line in reversed(text.splitlines()):
        if line.startswith("TOTAL_ERR_"):
            return int(line.split()[-1])
    raise ValueError("no line with TOTAL_ERR_")
