"""The processors: how many of what, how they are clocked, and whether a hypervisor lies beneath."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable
from typing import TypeVar

from collectors.base import Absent, Family, Value
from collectors.host.files import Files, one, text
from collectors.host.parsing import cpu_clocks, hypervisor

T = TypeVar("T")
FIRST_PROCESSOR_BYTES = 8192
"""Enough of /proc/cpuinfo for its first processor. The whole of it is a megabyte on a large host."""
_CPUS = "sys/devices/system/cpu"
_VIRTUAL_PRODUCTS = ("KVM", "Virtual Machine", "VMware", "Google Compute Engine", "QEMU")


def virtual(files: Files) -> Value | Absent:
    """Whether this is a virtual machine; `unsupported` where nothing tells."""
    told = files.required("proc/cpuinfo", hypervisor, first_bytes=FIRST_PROCESSOR_BYTES)
    if not isinstance(told, Absent) or told.status == "error":
        return told
    product = files.text("sys/class/dmi/id/product_name")
    known = isinstance(product, str) and any(part in product for part in _VIRTUAL_PRODUCTS)
    return True if known or files.exists("sys/hypervisor/type") else told


def topology(files: Files) -> Iterable[Family]:
    """Sockets, cores and threads that are online."""
    found = files.names(_CPUS, r"cpu\d+", "this kernel does not list its processors")
    cpus = [] if isinstance(found, Absent) else found
    online = {}
    for cpu in cpus:
        siblings = files.text(f"{_CPUS}/{cpu}/topology/thread_siblings_list")
        if isinstance(siblings, str):  # an offline processor has no topology
            online[cpu] = siblings
    places = [files.read(f"{_CPUS}/{cpu}/topology/physical_package_id", int) for cpu in online]
    sockets = {socket for socket in places if isinstance(socket, int) and socket >= 0}
    without = found if isinstance(found, Absent) else Absent(status="unsupported", reason="the firmware does not tell")
    yield one("host.cpu.sockets", "1", "Processor sockets", len(sockets) or without)
    yield one("host.cpu.cores", "1", "Processor cores online", len(set(online.values())) or without)
    yield one("host.cpu.threads", "1", "Processor threads online", len(online) or without)


def clocks(files: Files) -> Iterable[Family]:
    """Governor and clocks. A file a processor, and the kernel may wait before it tells a clock: not for a scrape."""
    governors = _policies(files, "scaling_governor", text)
    value = governors if isinstance(governors, Absent) else ",".join(sorted(set(governors)))
    yield one("host.cpu.governor", "1", "Frequency governors of the processors", value)
    allowed = _policies(files, "scaling_max_freq", int)
    clock = allowed if isinstance(allowed, Absent) else min(allowed) * 1000
    yield one("host.cpu.clock_allowed", "Hz", "Highest clock that the least free processor may take", clock)
    highest = _policies(files, "cpuinfo_max_freq", int)
    clock = highest if isinstance(highest, Absent) else max(highest) * 1000
    yield one("host.cpu.clock_max", "Hz", "Highest clock of the fastest processor", clock)
    now = files.required("proc/cpuinfo", cpu_clocks)
    lowest = now if isinstance(now, Absent) else round(min(now))
    yield one("host.cpu.clock_now_min", "Hz", "Lowest clock of the processors now; low where they idle", lowest)
    middle = now if isinstance(now, Absent) else round(statistics.median(now))
    yield one("host.cpu.clock_now_median", "Hz", "Median clock of the processors now; low where they idle", middle)


def _policies(files: Files, file: str, parse: Callable[[str], T]) -> list[T] | Absent:
    """What a file of each cpufreq policy says, or why one of them says nothing."""
    policies = files.names(f"{_CPUS}/cpufreq", r"policy\d+", "no cpufreq driver: the firmware clocks the processors")
    if isinstance(policies, Absent):
        return policies
    told = [files.read(f"{_CPUS}/cpufreq/{policy}/{file}", parse) for policy in policies]
    values = [value for value in told if not isinstance(value, Absent)]
    absent = [value for value in told if isinstance(value, Absent)]
    return absent[0] if absent else values
