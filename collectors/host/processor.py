"""The processors: topology and clocks."""

from __future__ import annotations

import errno
import os
import statistics
from collections.abc import Callable, Iterable, Iterator
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
    text = (
        "Logical CPUs that this process can use at once: without isolated ones, and not more than its CPU quota allows"
    )
    # The value varies, because a container manager may change the limits of a container while it runs.
    yield host_family("host.cpu.usable", "1", text, usable_processors(files), varies=True)


def usable_processors(files: Files) -> int:
    """Return how many processors this process can use at once.

    This is the number of processors in its affinity that are not isolated, but at most its CPU quota, and at least 1. The
    kernel moves no thread to an isolated processor (isolcpus), even if the affinity of the thread includes it.
    """
    isolated = files.read(f"{_CPUS}/isolated", _cpu_list)
    free = os.sched_getaffinity(0) - (set() if isinstance(isolated, Absent) else isolated)
    return max(1, int(min([len(free), *_quotas(files)])))


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


def _quotas(files: Files) -> Iterator[float]:
    """Yield each CPU quota, in processors, of the control groups of this process and of their parents (cgroup v1 and v2)."""
    lines = files.read("proc/self/cgroup", str.splitlines)
    groups = {""}  # in a container, its own group is the root of the tree
    for line in [] if isinstance(lines, Absent) else lines:
        names = [name for name in line.split(":", 2)[-1].split("/") if name]
        groups |= {"/".join(names[:length]) + "/" for length in range(1, len(names) + 1) if ".." not in names}
    for group in groups:
        limits = [files.read(f"sys/fs/cgroup/{tree}{group}cpu.max", str) for tree in ("", "unified/")]
        for tree in ("cpu/", "cpu,cpuacct/"):
            parts = [files.read(f"sys/fs/cgroup/{tree}{group}cpu.cfs_{name}_us", str) for name in ("quota", "period")]
            limits += [first_absent(*parts) or " ".join(map(str, parts))]
        for limit in limits:
            quota, _, period = ("" if isinstance(limit, Absent) else limit).partition(" ")
            if quota.isdecimal() and period.isdecimal() and int(period):  # without a quota: `max`, or -1 in version 1
                yield int(quota) / int(period)


def _cpu_list(text: str) -> set[int]:
    """Parse `0-2,64` into {0, 1, 2, 64}. Raises ValueError if the text is not such a list."""
    ranges = [part.partition("-") for part in text.split(",") if part]
    return {cpu for first, _, last in ranges for cpu in range(int(first), int(last or first) + 1)}


def _policies(files: Files, file: str, parse: Callable[[str], T]) -> list[T] | Absent:
    """Return the value in `file` of every cpufreq policy with an online processor.

    If any of these values is absent, return the first `Absent` instead.
    """
    policies = files.matching(f"{_CPUS}/cpufreq", r"policy\d+", "no cpufreq driver: the firmware sets the clocks")
    if isinstance(policies, Absent):
        return policies
    values = [
        files.read(f"{_CPUS}/cpufreq/{policy}/{file}", parse) for policy in policies if not _is_inactive(files, policy)
    ]
    if not values:
        return Absent.error(f"/{_CPUS}/cpufreq: no policy has an online processor")
    return first_absent(*values) or [value for value in values if not isinstance(value, Absent)]


def _is_inactive(files: Files, policy: str) -> bool:
    """Return whether all processors of a cpufreq policy are offline.

    The kernel keeps the directory of such a policy. It refuses to read the files (EBUSY), or older kernels show no processors.
    """
    try:
        return not files.text(f"{_CPUS}/cpufreq/{policy}/affected_cpus")
    except OSError as error:
        return error.errno == errno.EBUSY
