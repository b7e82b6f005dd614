"""The host collector: which readings it has, and which of them a scrape has time for."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from pathlib import Path

from collectors.base import Absent, Family, Value
from collectors.host import kernel, memory, processor
from collectors.host.files import Files, one, text
from collectors.host.parsing import cpu_model, load_average
from collectors.pcie.device import GPU, Bus
from collectors.sysfs import Tree


class HostCollector:
    """Reads the host under `root`, `/` but in tests."""

    name = "host"

    def __init__(self, root: Path = Path("/"), thorough: bool = False) -> None:
        """`thorough`: also what takes a file a processor, a process or a memory module."""
        self._root = root
        self._thorough = thorough
        self._known: dict[str, Value] = {}
        self._bus = Bus(Tree(root))

    def collect(self) -> Iterable[Family]:
        files = Files(self._root)
        first = processor.FIRST_PROCESSOR_BYTES
        yield one("host.kernel_version", "1", "Kernel release", files.required("proc/sys/kernel/osrelease", text))
        model = self._once("model", lambda: files.required("proc/cpuinfo", cpu_model, first_bytes=first))
        yield one("host.cpu.model", "1", "Processor model", model)
        yield one("host.cpu.count", "1", "Processors that this process may use", len(os.sched_getaffinity(0)))
        virtual = self._once("virtual", lambda: processor.virtual(files))
        yield one("host.virtual_machine", "1", "A hypervisor runs this kernel", virtual)
        yield one("host.load", "1", "Load average over one minute", files.required("proc/loadavg", load_average))
        yield one("host.uptime", "s", "Time since boot", files.required("proc/uptime", _uptime))
        for part in (memory.memories, memory.errors, memory.nodes, kernel.health, kernel.modules, kernel.options):
            yield from part(files)
        if self._thorough:
            for part in (memory.modules, processor.topology, processor.clocks, kernel.firmware, kernel.processes):
                yield from part(files)
        yield one("gpu.pci_count", "1", "NVIDIA GPUs on the PCI bus, with or without a driver", self._bus.count(GPU))

    def _once(self, name: str, read: Callable[[], Value | Absent]) -> Value | Absent:
        """What cannot change. Opening /proc/cpuinfo makes some kernels wait 10 ms for the processors' clocks."""
        if name not in self._known:
            value = read()
            if isinstance(value, Absent):
                return value
            self._known[name] = value
        return self._known[name]


def _uptime(text: str) -> float:
    return float(text.split()[0])
