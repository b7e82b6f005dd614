"""The processors: topology and clocks."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable
from typing import TypeVar

from collectors.base import Absent, Family, first_absent, host_family
from collectors.files import Files, nonempty
from collectors.host.parsing import cpu_clocks

T = TypeVar("T")
_CPUS = "sys/devices/system/cpu"


def topology(files: Files) -> Iterable[Family]:
    """Yield the numbers of sockets, cores and threads that are online."""
    cpus = files.matching(_CPUS, r"cpu\d+", "the kernel does not list its processors")
    siblings = {}
    for cpu in [] if isinstance(cpus, Absent) else cpus:
        threads = files.read(f"{_CPUS}/{cpu}/topology/thread_siblings_list", nonempty)
        if isinstance(threads, str):  # an offline processor has no topology
            siblings[cpu] = threads
    packages = [files.read(f"{_CPUS}/{cpu}/topology/physical_package_id", int) for cpu in siblings]
    sockets = {package for package in packages if isinstance(package, int) and package >= 0}
    unknown = first_absent(cpus) or Absent.unsupported("the firmware reports no topology")
    yield host_family("host.cpu.sockets", "1", "Processor sockets", len(sockets) or unknown)
    yield host_family("host.cpu.cores", "1", "Processor cores online", len(set(siblings.values())) or unknown)
    yield host_family("host.cpu.threads", "1", "Processor threads online", len(siblings) or unknown)


def clocks(files: Files) -> Iterable[Family]:
    """Yield frequency governors and clocks. Too slow for a scrape: each processor has its own files, some slow to read."""
    governors = _policies(files, "scaling_governor", nonempty)
    value = governors if isinstance(governors, Absent) else ",".join(sorted(set(governors)))
    yield host_family("host.cpu.governor", "1", "Frequency governors of the processors", value)
    allowed = _policies(files, "scaling_max_freq", int)
    clock = allowed if isinstance(allowed, Absent) else min(allowed) * 1000
    yield host_family("host.cpu.clock_allowed", "Hz", "Lowest of the processors' frequency limits", clock, varies=True)
    highest = _policies(files, "cpuinfo_max_freq", int)
    clock = highest if isinstance(highest, Absent) else max(highest) * 1000
    yield host_family("host.cpu.clock_max", "Hz", "Maximum clock of the fastest processor", clock)
    current = files.required("proc/cpuinfo", cpu_clocks)
    lowest = current if isinstance(current, Absent) else round(min(current))
    text = "Lowest current clock; low if processors are idle"
    yield host_family("host.cpu.clock_now_min", "Hz", text, lowest, varies=True)
    median = current if isinstance(current, Absent) else round(statistics.median(current))
    text = "Median current clock; low if processors are idle"
    yield host_family("host.cpu.clock_now_median", "Hz", text, median, varies=True)


def _policies(files: Files, file: str, parse: Callable[[str], T]) -> list[T] | Absent:
    """Return the value in `file` of every cpufreq policy. If any value is absent, return the first `Absent` instead."""
    policies = files.matching(f"{_CPUS}/cpufreq", r"policy\d+", "no cpufreq driver: the firmware sets the clocks")
    if isinstance(policies, Absent):
        return policies
    values = [files.read(f"{_CPUS}/cpufreq/{policy}/{file}", parse) for policy in policies]
    return first_absent(*values) or [value for value in values if not isinstance(value, Absent)]
