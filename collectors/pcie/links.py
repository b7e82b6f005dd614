"""The PCIe links of GPUs, NVSwitches, network adapters and NVMe drives, and of the ports above them."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from collectors.base import HOST, Absent, Family, Value
from collectors.pcie import acs, config
from collectors.pcie.device import GPU, NETWORK, Bus, Device
from collectors.sysfs import PCI_DEVICES, Tree, families, numa_node

GENERATIONS = {2.5: 1, 5.0: 2, 8.0: 3, 16.0: 4, 32.0: 5, 64.0: 6}
"""GT/s a lane -> PCIe generation."""
NO_PORT = Absent(status="unsupported", reason="no port above it is seen")
VIRTUAL = Absent(status="unsupported", reason="a virtual machine's ports are not the machine's")
COHERENT = Absent(status="unsupported", reason="the GPU hangs on its CPU by NVLink-C2C")
NO_AER = "device, firmware or kernel gives the operating system no AER counters"
_NO_LINK = "the device shows no PCIe link"
_LOST_WIDTH, _NO_WIDTHS = 63, (0, 255)
SEVERITIES = ("correctable", "nonfatal", "fatal")

KINDS = {
    "pcie.device_count": ("1", "GPUs, NVSwitches, NVIDIA/Mellanox network adapters and NVMe drives on the PCI bus"),
    "pcie.generation": ("1", "PCIe generation of the link now; GPUs lower it when idle"),
    "pcie.width": ("1", "Lanes of the link now"),
    "pcie.generation_max": ("1", "PCIe generation that the device can do"),
    "pcie.width_max": ("1", "Lanes that the device has"),
    "pcie.port.generation_max": ("1", "PCIe generation that the port above the device can do"),
    "pcie.port.width_max": ("1", "Lanes of the port above the device"),
    "pcie.slowed": ("1", "The link runs under the speed that both ends can do; GPUs and network adapters"),
    "pcie.narrowed": ("1", "The link has fewer lanes than both ends; GPUs and network adapters"),
    **{f"pcie.aer.{name}": ("1", f"Errors that the device reported, {name}") for name in SEVERITIES},
    **{f"pcie.port.aer.{name}": ("1", f"Errors that the port above reported, {name}") for name in SEVERITIES},
    "pcie.kind": ("1", "What the device is"),
    "pcie.port.address": ("1", "PCI address of the port above the device"),
    "pcie.power_state": ("1", "Power state of the device"),
    "pcie.numa_node": ("1", "NUMA node that the device is near"),
}
COUNTERS = [name for name in KINDS if ".aer." in name]


class PcieCollector:
    """Reads the PCI bus under `root`, `/` but in tests.

    `thorough` reads what does not change while a host is up too: payload sizes, BARs, IOMMU, ACS.
    """

    name = "pcie"

    def __init__(self, root: Path = Path("/"), thorough: bool = False) -> None:
        self._tree = Tree(root)
        self._thorough = thorough
        self._bus = Bus(self._tree)
        self._virtual: bool | None = None

    def collect(self) -> Iterable[Family]:
        found = families(KINDS, COUNTERS)
        try:
            devices = self._bus.devices()
        except FileNotFoundError:
            found["pcie.device_count"].add(HOST, Absent(status="unsupported", reason=f"no /{PCI_DEVICES}: no PCI bus"))
            return [found["pcie.device_count"]]
        found["pcie.device_count"].add(HOST, len(devices))
        for device in devices:
            for name, value in self._readings(device).items():
                found[name].add({"pci": device.address}, value)
        rest = self._settings(devices) if self._thorough else []
        return [*(family for family in found.values() if family.readings), *rest]

    def _settings(self, devices: list[Device]) -> list[Family]:
        return [
            *config.settings(self._tree, devices),
            *acs.redirection(self._tree, devices, virtual=self._is_virtual()),
        ]

    def _is_virtual(self) -> bool:
        """Whether this is a virtual machine. The first processors of /proc/cpuinfo tell; it is long."""
        if self._virtual is None:
            start = self._tree.reading("proc/cpuinfo")
            self._virtual = isinstance(start, str) and " hypervisor" in start
        return self._virtual

    def _readings(self, device: Device) -> dict[str, Value | Absent]:
        path = f"{PCI_DEVICES}/{device.address}"
        port = f"{PCI_DEVICES}/{device.bridges[0]}" if device.bridges else ""
        found: dict[str, Value | Absent] = {}
        found["pcie.generation"], found["pcie.width"] = self._link(path, "current")
        found |= self._limits(device, path, port)
        for severity in SEVERITIES:
            found[f"pcie.aer.{severity}"] = self._errors(path, severity)
            found[f"pcie.port.aer.{severity}"] = self._errors(port, severity) if port else NO_PORT
        if device.kind in (GPU, NETWORK):
            # NVSwitches are only managed over PCIe, and drives stand behind backplanes slower than both ends.
            found["pcie.slowed"] = self._short(device, found, "generation")
            found["pcie.narrowed"] = self._short(device, found, "width")
        if self._thorough:
            found["pcie.kind"] = device.kind
            found["pcie.port.address"] = device.bridges[0] if device.bridges else NO_PORT
            found["pcie.power_state"] = self._tree.reading(f"{path}/power_state", missing="this kernel tells no state")
            found["pcie.numa_node"] = self._tree.reading(
                f"{path}/numa_node", numa_node, missing="a kernel without NUMA"
            )
        return found

    def _limits(self, device: Device, path: str, port: str) -> dict[str, Value | Absent]:
        if device.limits:
            return device.limits
        generation, width = self._link(path, "max")
        above = self._link(port, "max") if port else (NO_PORT, NO_PORT)
        found = {"pcie.generation_max": generation, "pcie.width_max": width}
        found |= {"pcie.port.generation_max": above[0], "pcie.port.width_max": above[1]}
        if not any(isinstance(value, Absent) and value.status == "error" for value in found.values()):
            device.limits = found
        return found

    def _link(self, path: str, which: str) -> tuple[Value | Absent, Value | Absent]:
        """Generation and lanes, `current` or `max`."""
        speed = self._tree.reading(f"{path}/{which}_link_speed", missing=_NO_LINK)
        width = self._tree.reading(f"{path}/{which}_link_width", int, missing=_NO_LINK)
        if width == _LOST_WIDTH:
            lost = Absent(status="error", reason="its registers read as all ones: the device does not answer")
            return lost, lost
        if width in _NO_WIDTHS:
            width = Absent(status="unsupported", reason=_NO_LINK)
        return generation(speed) if isinstance(speed, str) else speed, width

    def _errors(self, path: str, severity: str) -> Value | Absent:
        return self._tree.reading(f"{path}/aer_dev_{severity}", total, missing=NO_AER)

    def _short(self, device: Device, found: dict[str, Value | Absent], what: str) -> Value | Absent:
        """Whether the link has less of it than both ends can do."""
        if device.coherent or self._is_virtual():
            return COHERENT if device.coherent else VIRTUAL
        ends = [found[f"pcie.{name}"] for name in (what, f"{what}_max", f"port.{what}_max")]
        absent = [value for value in ends if isinstance(value, Absent)]
        if absent:
            return absent[0]
        now, *most = (value for value in ends if isinstance(value, int))
        return now < min(most)


def generation(speed: str) -> Value | Absent:
    """`32.0 GT/s PCIe` -> 5."""
    number = speed.split(" ", 1)[0]
    try:
        return GENERATIONS[float(number)]
    except ValueError:
        return Absent(status="unsupported", reason=f"the link speed reads {speed or 'empty'}")
    except KeyError:
        return Absent(status="error", reason=f"no PCIe generation has {speed}")


def total(text: str) -> int:
    """The sum at the end of an AER counter file. Raises ValueError where there is none."""
    for line in reversed(text.splitlines()):
        if line.startswith("TOTAL_ERR_"):
            return int(line.split()[-1])
    raise ValueError("no total")
