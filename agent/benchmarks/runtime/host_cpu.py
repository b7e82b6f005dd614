"""The processors (logical CPUs) of a rank: which it uses, and how long its threads waited for one.

The waiting time shows whether busy processors or a CPU quota slowed the rank down. It comes from counters of the kernel, which
are read only before and after a benchmark.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from agent.sampling.cgroups import cgroup_chains

NO_DELAYS = "the kernel does not report how long threads waited for a processor (/proc/PID/task/TID/schedstat)"
NO_PRESSURE = (
    "the kernel does not report CPU pressure (/proc/pressure/cpu needs CONFIG_PSI; some kernels also need psi=1)"
)
NO_QUOTA = "no cgroup of the process reports periods of a CPU quota (nr_periods in cpu.stat)"

Periods = tuple[int, int]
"""Number of periods of a cgroup's CPU quota, and number of those in which the quota was used up."""


@dataclass(frozen=True, kw_only=True)
class CpuCounters:
    """The kernel's counters at one moment; a field is empty or None if the kernel does not have that counter."""

    time: float
    delays: Mapping[int, int]
    """Thread -> nanoseconds in which the thread was runnable but waited for a processor."""
    pressure: int | None
    """Microseconds in which at least one process of the host waited for a processor."""
    quotas: Mapping[Path, Periods]
    """Directory of a cgroup -> the periods of its CPU quota."""


def read_counters(root: Path = Path("/")) -> CpuCounters:
    """Return the counters now."""
    return CpuCounters(
        time=time.monotonic(),
        delays=dict(_read_delays(root)),
        pressure=_read_pressure(root),
        quotas=dict(_read_quotas(root)),
    )


def available_cpus() -> int:
    """Return the number of processors that this process may use."""
    return len(os.sched_getaffinity(0))


def pin_to_cpus(cpus: int, local_rank: int) -> None:
    """Limit this process and its children to `cpus` processors that no other rank of the host uses.

    The first hardware thread of every core is assigned before any second thread, because two ranks on the two threads of one core
    would share that core.

    Raises:
        ValueError: fewer than `cpus` processors are left for this rank.
    """
    available = sorted(os.sched_getaffinity(0))
    selected = select_cpus(available, cpus, local_rank)
    if len(selected) < cpus:
        raise ValueError(
            f"too few processors: this process may use {len(available)}; rank {local_rank} needs {cpus}, "
            f"and the ranks before it on this host need {local_rank * cpus}"
        )
    os.sched_setaffinity(0, selected)


def select_cpus(available: Sequence[int], cpus: int, local_rank: int, root: Path = Path("/")) -> list[int]:
    """Return the processors of one local rank: the next `cpus` of `available` after those of the local ranks before it.

    If `available` has too few processors, return fewer than `cpus`.
    """

    def thread_number(cpu: int) -> int:
        try:
            text = (root / f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list").read_text()
            siblings = parse_cpu_list(text)
            return [sibling for sibling in available if sibling in siblings].index(cpu)
        except (OSError, ValueError):
            return 0  # the core is unknown, so `cpu` counts as the first thread of a core

    ordered = sorted(available, key=lambda cpu: (thread_number(cpu), cpu))
    return ordered[local_rank * cpus : (local_rank + 1) * cpus]


def parse_cpu_list(text: str) -> set[int]:
    """Parse `0-2,64` into {0, 1, 2, 64}. Raises ValueError if the text is not such a list."""
    ranges = [part.partition("-") for part in text.strip().split(",") if part]
    return {cpu for first, _, last in ranges for cpu in range(int(first), int(last or first) + 1)}


@dataclass(frozen=True, kw_only=True)
class CpuUsage:
    """Increase of the counters between two readings. If a figure is missing, its field has the reason as text."""

    waited: float | str
    """Seconds in which threads of the process were runnable but waited for a processor, summed over the threads."""
    pressure: float | str
    """Share of the time in which at least one process of the host waited for a processor."""
    throttled: float | str
    """Share of the quota periods in which a CPU quota was used up: the highest among the process's cgroup and its parents."""


def usage_between(first: CpuCounters, last: CpuCounters) -> CpuUsage:
    """Return the increase of the counters from `first` to `last`."""
    waited = sum(max(0, value - first.delays.get(thread, 0)) for thread, value in last.delays.items()) / 1e9
    pressure: float | str = NO_PRESSURE
    if first.pressure is not None and last.pressure is not None:
        pressure = max(0, last.pressure - first.pressure) / 1e6 / max(last.time - first.time, 1e-9)
    shares = [
        (stopped - first.quotas[group][1]) / max(1, periods - first.quotas[group][0])
        for group, (periods, stopped) in last.quotas.items()
        if group in first.quotas
    ]
    return CpuUsage(
        waited=waited if last.delays else NO_DELAYS,
        pressure=pressure,
        throttled=max(shares) if shares else NO_QUOTA,
    )


def _read_delays(root: Path) -> Iterator[tuple[int, int]]:
    for file in (root / "proc/self/task").glob("*/schedstat"):
        try:
            yield int(file.parent.name), int(file.read_text().split()[1])
        except (OSError, ValueError, IndexError):  # the thread has just ended
            continue


def _read_pressure(root: Path) -> int | None:
    try:
        line = (root / "proc/pressure/cpu").read_text().splitlines()[0]  # some avg10=… avg60=… avg300=… total=…
        return int(line.rpartition("total=")[2])
    except (OSError, ValueError, IndexError):
        return None


def _read_quotas(root: Path) -> Iterator[tuple[Path, Periods]]:
    """Yield directory and quota periods of the process's cgroup and of each parent cgroup (cgroup v1 or v2).

    Cgroups that do not report quota periods are left out.
    """
    for chain in cgroup_chains("cpu", root):
        for directory in chain:
            if periods := _read_periods(directory / "cpu.stat"):
                yield directory, periods


def _read_periods(path: Path) -> Periods | None:
    try:
        counters = dict(line.split() for line in path.read_text().splitlines())
        return int(counters["nr_periods"]), int(counters["nr_throttled"])
    except (OSError, ValueError, KeyError):
        return None
