"""The NVLink fabric of the host: NVSwitches on its PCI bus, the fabric manager, and IMEX, which shares GPU memory between hosts.

The `nvml` collector reads the fabric state of each GPU. Of the NVSwitches, this collector reads only those on the host's PCI bus.
It cannot read switches that are passed through to a virtual machine, are in a separate tray, or are behind a NIC as on HGX B200.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

from collectors.base import HOST_LABELS, Absent, Family, Value, host_family
from collectors.files import Files
from collectors.imex import imex_families
from collectors.namespaces import has_own_pid_namespace
from collectors.pcie.device import NVSWITCH, PciBus

MANAGER, IMEX = "nv-fabricmanager", "nvidia-imex"
_COMM_LENGTH = 15
"""Length to which the kernel truncates process names."""
_MANAGER_PID = "run/nvidia-fabricmanager/nv-fabricmanager.pid"
_SWITCHES = "proc/driver/nvidia-nvswitch/devices"
_NO_SWITCH = Absent.unsupported("no NVSwitch on the PCI bus")


class FabricCollector:
    """Reads /proc, /sys, /run and /usr/bin under `root`.

    With `full_snapshot` it also reports whether IMEX runs (it reads the names of all processes) and the IMEX domain (it runs
    `nvidia-imex-ctl`).
    """

    name = "fabric"

    def __init__(self, root: Path = Path("/"), full_snapshot: bool = False) -> None:
        self._root = root
        self._full_snapshot = full_snapshot
        self._files = Files(root)
        self._bus = PciBus(self._files)

    def collect(self) -> Iterable[Family]:
        switches = self._bus.count(NVSWITCH)
        yield host_family("fabric.nvswitch.count", "1", "NVSwitches on the PCI bus", switches, varies=True)
        probed = self._probed(switches)
        yield host_family("fabric.nvswitch.probed", "1", "NVSwitches bound to the driver", probed, varies=True)
        yield self._firmware()
        running = self._manager_running(switches)
        yield host_family("fabric.manager.running", "1", "The fabric manager runs", running, varies=True)
        missing = running if isinstance(running, Absent) else _NO_SWITCH if not switches else not running
        yield host_family(
            "fabric.manager.missing",
            "1",
            "The host has NVSwitches, and the fabric manager does not run",
            missing,
            varies=True,
        )
        if self._full_snapshot:
            yield host_family(
                "fabric.imex.running",
                "1",
                "IMEX, the daemon for GPU memory shared between hosts, runs",
                self._imex(),
                varies=True,
            )
            yield from imex_families(self._root)

    def _probed(self, switches: int | Absent) -> Value | Absent:
        if not isinstance(switches, Absent) and not switches:
            return _NO_SWITCH
        try:
            return len(self._files.names(_SWITCHES))
        except OSError as error:
            return Absent.error(f"/{_SWITCHES}: {error.strerror}")

    def _firmware(self) -> Family:
        family = Family(name="fabric.nvswitch.bios_version", unit="1", help="Firmware of the NVSwitch")
        try:
            addresses = self._files.names(_SWITCHES)
        except FileNotFoundError:
            addresses = []
        except OSError as error:
            addresses = []
            family.add(HOST_LABELS, Absent.error(f"/{_SWITCHES}: {error.strerror}"))
        for address in addresses:
            if self._files.exists(f"{_SWITCHES}/{address}/information"):
                version = self._files.required(f"{_SWITCHES}/{address}/information", _bios_version)
                family.add({"pci": address}, version)
        return family

    def _manager_running(self, switches: int | Absent) -> bool | Absent:
        """Return whether the fabric manager runs; `unsupported` if it does not run and the PCI bus has no NVSwitch."""
        if self._manager_pid_is_alive():
            return True
        if isinstance(switches, Absent):
            return switches
        # Reading the names of all processes is slow, so it is done only on hosts with NVSwitches.
        return self._is_running(MANAGER) if switches else _NO_SWITCH

    def _manager_pid_is_alive(self) -> bool:
        try:
            pid = int(self._files.text(_MANAGER_PID))
            return self._files.text(f"proc/{pid}/comm") == MANAGER[:_COMM_LENGTH]
        except (OSError, ValueError):
            return False

    def _is_running(self, program: str) -> bool | Absent:
        """Return whether the process `program` runs; an error if it is not found and some processes may not be visible."""
        try:
            pids = [name for name in self._files.names("proc") if name.isdigit()]
        except OSError as error:
            return Absent.error(f"/proc: {error.strerror}")
        hidden = "1" not in pids
        for pid in pids:
            try:
                if self._files.text(f"proc/{pid}/comm") == program[:_COMM_LENGTH]:
                    return True
            except PermissionError:
                hidden = True
            except OSError:
                continue  # the process has exited in the meantime
        if hidden or has_own_pid_namespace(self._files):
            return Absent.error(f"{program}: the host's processes are not visible: run as root on the host")
        return False

    def _imex(self) -> bool | Absent:
        running = self._is_running(IMEX)
        if running is not False or self._files.exists(f"usr/bin/{IMEX}"):
            return running
        return Absent.unsupported(f"/usr/bin/{IMEX} is not installed")


def _bios_version(text: str) -> str:
    match = re.search(r"^BIOS Version: +([0-9a-f.]+)$", text, re.MULTILINE)
    if not match:
        raise ValueError("the driver reports no BIOS version")
    return match.group(1)
