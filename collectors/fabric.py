"""The NVLink fabric as the host sees it: NVSwitches on the PCI bus, and the daemons that must run for GPUs to use them.

What each GPU says of the fabric is read with NVML. NVSwitches that are not on the bus (passed to another machine, in a tray of
their own, or behind a NIC as on HGX B200) are not seen here.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from pathlib import Path

from collectors.base import HOST, Absent, Family, Value
from collectors.pcie.device import NVSWITCH, Bus
from collectors.sysfs import Tree

MANAGER, IMEX = "nv-fabricmanager", "nvidia-imex"
_COMM_LENGTH = 15
"""The kernel keeps that much of a process' name."""
_FIRST_PID_NAMESPACE = "pid:[4026531836]"
_MANAGER_PID = "run/nvidia-fabricmanager/nv-fabricmanager.pid"
_NONE = Absent(status="unsupported", reason="no NVSwitch on the PCI bus")


class FabricCollector:
    """Reads the host under `root`, `/` but in tests.

    Args:
        root: where /proc, /sys, /run and /usr are.
        thorough: for a snapshot, whether IMEX runs is told too: that takes a look at every process.
    """

    name = "fabric"

    def __init__(self, root: Path = Path("/"), thorough: bool = False) -> None:
        self._root = root
        self._thorough = thorough
        self._bus = Bus(Tree(root))

    def collect(self) -> Iterable[Family]:
        switches = self._bus.count(NVSWITCH)
        yield _one("fabric.nvswitch.count", "NVSwitches on the PCI bus", switches)
        yield _one("fabric.nvswitch.probed", "NVSwitches that the driver works with", self._probed(switches))
        yield self._versions()
        manager = self._manager(switches)
        yield _one("fabric.manager.running", "The fabric manager runs", manager)
        missing = manager if isinstance(manager, Absent) else _NONE if not switches else not manager
        yield _one("fabric.manager.missing", "There are NVSwitches, and no fabric manager that sets them up", missing)
        if self._thorough:
            yield _one(
                "fabric.imex.running", "IMEX, the daemon for GPU memory shared between hosts, runs", self._imex()
            )

    def _probed(self, switches: int | Absent) -> Value | Absent:
        if not isinstance(switches, Absent) and not switches:
            return _NONE
        try:
            return len(os.listdir(self._root / "proc/driver/nvidia-nvswitch/devices"))  # noqa: PTH208 - names suffice
        except OSError as error:
            return Absent(status="error", reason=f"/proc/driver/nvidia-nvswitch/devices: {error.strerror}")

    def _versions(self) -> Family:
        family = Family(name="fabric.nvswitch.bios_version", unit="1", help="Firmware of the NVSwitch")
        for path in sorted((self._root / "proc/driver/nvidia-nvswitch/devices").glob("*/information")):
            try:
                found = re.search(r"^BIOS Version: +([0-9a-f.]+)$", path.read_text(), re.MULTILINE)
            except OSError as error:
                family.add({"pci": path.parent.name}, Absent(status="error", reason=str(error)))
                continue
            unknown = Absent(status="error", reason="the driver does not know it")
            family.add({"pci": path.parent.name}, found.group(1) if found else unknown)
        return family

    def _manager(self, switches: int | Absent) -> bool | Absent:
        """Whether it runs. Where it does not and has nothing to do, there is no need of it."""
        if self._runs_as_noted():
            return True
        if isinstance(switches, Absent):
            return switches
        # To look for it among all processes costs a scrape too much, where nothing depends on it.
        return self._running(MANAGER) if switches else _NONE

    def _runs_as_noted(self) -> bool:
        try:
            pid = int((self._root / _MANAGER_PID).read_text())
            return (self._root / f"proc/{pid}/comm").read_text().strip() == MANAGER[:_COMM_LENGTH]
        except (OSError, ValueError):
            return False

    def _running(self, program: str) -> bool | Absent:
        """Whether a process of that name runs; an error where processes of others are hidden from this one."""
        try:
            pids = [name for name in os.listdir(self._root / "proc") if name.isdigit()]  # noqa: PTH208
        except OSError as error:
            return Absent(status="error", reason=f"/proc: {error.strerror}")
        hidden = "1" not in pids
        for pid in pids:
            try:
                if (self._root / "proc" / pid / "comm").read_text().strip() == program[:_COMM_LENGTH]:
                    return True
            except PermissionError:
                hidden = True
            except OSError:
                continue  # it has ended since
        if hidden or self._in_container():
            return Absent(
                status="error", reason=f"{program}: the host's processes are not visible: run as root on the host"
            )
        return False

    def _in_container(self) -> bool:
        """In a PID namespace of its own, which has its own process 1."""
        try:
            return (self._root / "proc/self/ns/pid").readlink() != Path(_FIRST_PID_NAMESPACE)
        except OSError:
            return False

    def _imex(self) -> bool | Absent:
        running = self._running(IMEX)
        if running is not False or (self._root / "usr/bin" / IMEX).exists():
            return running
        return Absent(status="unsupported", reason=f"/usr/bin/{IMEX} is not installed")


def _one(name: str, text: str, value: Value | Absent) -> Family:
    family = Family(name=name, unit="1", help=text)
    family.add(HOST, value)
    return family
