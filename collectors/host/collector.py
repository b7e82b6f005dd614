"""The host collector: readings of the processors, memory, kernel and firmware. The slow ones are only in a full snapshot."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from pathlib import Path

from collectors.base import Absent, Family, Value, host_family
from collectors.files import Files, nonempty
from collectors.host import kernel, memory, processor
from collectors.host.memory_modules import memory_modules
from collectors.host.parsing import cpu_model, load_average
from collectors.pcie.device import GPU, PciBus
from collectors.virtual import FIRST_PROCESSOR_BYTES, is_virtual


class HostCollector:
    """Reads the host under `root`. With `full_snapshot` it also reads files of each processor, process and memory module."""

    name = "host"

    def __init__(self, root: Path = Path("/"), full_snapshot: bool = False) -> None:
        self._root = root
        self._full_snapshot = full_snapshot
        self._constants: dict[str, Value] = {}
        self._bus = PciBus(Files(root))

    def collect(self) -> Iterable[Family]:
        files = Files(self._root, cached=True)
        release = files.required("proc/sys/kernel/osrelease", nonempty)
        yield host_family("host.kernel_version", "1", "Kernel release", release)
        first = FIRST_PROCESSOR_BYTES
        model = self._read_once("model", lambda: files.required("proc/cpuinfo", cpu_model, max_bytes=first))
        yield host_family("host.cpu.model", "1", "Processor model", model)
        count = len(os.sched_getaffinity(0))
        yield host_family("host.cpu.count", "1", "Logical CPUs that this process may use", count)
        virtual = self._read_once("virtual", lambda: is_virtual(files))
        yield host_family("host.virtual_machine", "1", "The host is a virtual machine", virtual)
        load = files.required("proc/loadavg", load_average)
        family = host_family("host.load", "1", "Load average over one minute", load, varies=True)
        family.fractional = True
        yield family
        uptime = files.required("proc/uptime", lambda text: float(text.split()[0]))
        yield host_family("host.uptime", "s", "Time since boot", uptime, varies=True)
        for part in (memory.sizes, memory.errors, memory.nodes, kernel.health, kernel.modules, kernel.options):
            yield from part(files)
        if self._full_snapshot:
            for part in (
                memory.modules,
                processor.topology,
                processor.clocks,
                kernel.boot,
                kernel.firmware,
                kernel.processes,
            ):
                yield from part(files)
            yield from memory_modules(files, virtual)
        gpus = self._bus.count(GPU)
        text = "NVIDIA GPUs on the PCI bus, with or without a driver"
        yield host_family("gpu.pci_count", "1", text, gpus, varies=True)

    def _read_once(self, name: str, read: Callable[[], Value | Absent]) -> Value | Absent:
        """Return a reading that never changes. `read` is not called again after it has returned a value, because it may be slow.

        For example, some kernels measure the processors' clocks when /proc/cpuinfo is opened, which takes 10 ms.
        """
        if name not in self._constants:
            value = read()
            if isinstance(value, Absent):
                return value
            self._constants[name] = value
        return self._constants[name]
