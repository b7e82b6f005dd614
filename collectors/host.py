"""The host: processor, memory, kernel, GPUs on the PCI bus. Plain /proc and /sys."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from pathlib import Path

from collectors.base import HOST, Absent, Family, Value

NVIDIA = "0x10de"
DISPLAY_CLASSES = ("0x0300", "0x0302")


class HostCollector:
    """Reads the host under `root`, `/` but in tests."""

    name = "host"

    def __init__(self, root: Path = Path("/")) -> None:
        self._root = root

    def collect(self) -> Iterable[Family]:
        yield _one("host.kernel_version", "1", "Kernel release", self._text("proc/sys/kernel/osrelease"))
        yield _one("host.cpu.model", "1", "Processor model", self._parsed("proc/cpuinfo", cpu_model))
        yield _one("host.cpu.count", "1", "Processors that this process may use", len(os.sched_getaffinity(0)))
        yield _one("host.load", "1", "Load average over one minute", self._parsed("proc/loadavg", load_average))
        for key, name in (("MemTotal", "total"), ("MemAvailable", "available")):
            value = self._parsed("proc/meminfo", lambda text, key=key: memory(text, key))
            yield _one(f"host.memory.{name}", "B", f"/proc/meminfo {key}", value)
        yield _one(
            "host.uptime", "s", "Time since boot", self._parsed("proc/uptime", lambda text: float(text.split()[0]))
        )
        yield _one("gpu.pci_count", "1", "NVIDIA GPUs on the PCI bus, with or without a driver", self._pci_gpus())

    def _text(self, path: str) -> Value | Absent:
        return self._parsed(path, str.strip)

    def _parsed(self, path: str, parse: object) -> Value | Absent:
        assert callable(parse)  # noqa: S101 - for the type checker
        try:
            value: Value = parse((self._root / path).read_text(encoding="utf-8", errors="replace"))
        except (OSError, ValueError, IndexError) as error:
            return Absent(status="error", reason=f"/{path}: {error}")
        return value

    def _pci_gpus(self) -> Value | Absent:
        devices = self._root / "sys/bus/pci/devices"
        try:
            found = [
                (path / "vendor").read_text().strip() == NVIDIA
                and (path / "class").read_text().strip().startswith(DISPLAY_CLASSES)
                for path in devices.iterdir()
            ]
        except OSError as error:
            return Absent(status="error", reason=f"/sys/bus/pci/devices: {error}")
        return sum(found)


def _one(name: str, unit: str, text: str, value: Value | Absent) -> Family:
    family = Family(name=name, unit=unit, help=text)
    family.add(HOST, value)
    return family


def cpu_model(text: str) -> str:
    """The processor's name out of /proc/cpuinfo. Raises ValueError where it gives none."""
    found = re.search(r"^(?:model name|CPU implementer|Processor)\s*:\s*(.+)$", text, re.MULTILINE)
    if not found:
        raise ValueError("no processor model")
    return found.group(1).strip()


def load_average(text: str) -> float:
    """The one-minute figure out of /proc/loadavg."""
    return float(text.split()[0])


def memory(text: str, key: str) -> int:
    """One line of /proc/meminfo, in bytes. Raises ValueError where it is not there."""
    found = re.search(rf"^{key}:\s+(\d+) kB$", text, re.MULTILINE)
    if not found:
        raise ValueError(f"no {key}")
    return int(found.group(1)) * 1024
