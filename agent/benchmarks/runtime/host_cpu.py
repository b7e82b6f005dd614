"""What a rank's process got of its host's processors between two moments: whether a CPU that was busy or withheld held it up.

Everything here is counted by the kernel anyway, so that two looks, before and after, tell it, and the ranks are not disturbed.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

NO_DELAYS = "the kernel does not tell how long threads waited for a processor (/proc/PID/task/TID/schedstat)"
NO_PRESSURE = (
    "the kernel does not tell the pressure on its processors (/proc/pressure/cpu: CONFIG_PSI, or psi=1 at boot)"
)
NO_QUOTA = "no cgroup of the process can have a CPU quota"

Periods = tuple[int, int]
"""Of a cgroup's quota: how many have passed, and in how many of them it was used up."""


@dataclass(frozen=True, kw_only=True)
class Look:
    """The kernel's counters at one moment; empty or None where it has none."""

    at: float
    delays: Mapping[int, int]
    """Thread -> nanoseconds for which it could have run, and had no processor."""
    pressure: int | None
    """Microseconds for which anything on the host waited for a processor."""
    quotas: Mapping[Path, Periods]


def look(root: Path = Path("/")) -> Look:
    """The counters now. `root` is another in tests."""
    return Look(at=time.monotonic(), delays=dict(_delays(root)), pressure=_pressure(root), quotas=dict(_quotas(root)))


def processors() -> int:
    """On how many processors this process may run."""
    return len(os.sched_getaffinity(0))


def confine(cpus: int, place: int, root: Path = Path("/")) -> None:
    """Leaves this process, and what it starts, so many processors of its own: the rank of that place among its host's ranks.

    Of each core one thread first: two ranks on the two threads of a core would have half of it each.

    Raises:
        ValueError: so many are not there. With fewer, another thing would be measured than what is told.
    """
    there = sorted(os.sched_getaffinity(0))
    mine = chosen(there, cpus, place, root)
    if len(mine) < cpus:
        raise ValueError(f"{len(there)} processors are there, and rank {place} of this host needs {cpus} of its own")
    os.sched_setaffinity(0, mine)


def chosen(there: Sequence[int], cpus: int, place: int, root: Path = Path("/")) -> list[int]:
    """Which of the processors."""

    def turn(cpu: int) -> int:
        try:
            text = (root / f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list").read_text()
            return [sibling for sibling in there if sibling in cpu_list(text)].index(cpu)
        except (OSError, ValueError):
            return 0

    ordered = sorted(there, key=lambda cpu: (turn(cpu), cpu))
    return ordered[place * cpus : (place + 1) * cpus]


def cpu_list(text: str) -> set[int]:
    """`0-2,64` -> 0, 1, 2, 64. Raises ValueError."""
    ends = [part.partition("-") for part in text.strip().split(",")]
    return {cpu for first, _, last in ends for cpu in range(int(first), int(last or first) + 1)}


@dataclass(frozen=True, kw_only=True)
class Spent:
    """What came between two looks; a text says why a figure is not there."""

    waited: float | str
    """Seconds for which threads of the process could have run and had no processor, all of them together."""
    pressure: float | str
    """Share of the time in which anything on the host waited for a processor."""
    throttled: float | str
    """Share of the periods in which a CPU quota stopped the process: the worst of its cgroup and of those above it."""


def between(first: Look, last: Look) -> Spent:
    """What the counters rose by."""
    waited = sum(max(0, value - first.delays.get(thread, 0)) for thread, value in last.delays.items()) / 1e9
    pressure: float | str = NO_PRESSURE
    if first.pressure is not None and last.pressure is not None:
        pressure = max(0, last.pressure - first.pressure) / 1e6 / max(last.at - first.at, 1e-9)
    shares = [
        (stopped - first.quotas[group][1]) / max(1, periods - first.quotas[group][0])
        for group, (periods, stopped) in last.quotas.items()
        if group in first.quotas
    ]
    return Spent(
        waited=waited if last.delays else NO_DELAYS,
        pressure=pressure,
        throttled=max(shares) if shares else NO_QUOTA,
    )


def _delays(root: Path) -> Iterator[tuple[int, int]]:
    for file in (root / "proc/self/task").glob("*/schedstat"):
        try:
            yield int(file.parent.name), int(file.read_text().split()[1])
        except (OSError, ValueError, IndexError):  # a thread that has just ended
            continue


def _pressure(root: Path) -> int | None:
    try:
        line = (root / "proc/pressure/cpu").read_text().splitlines()[0]  # some avg10=… avg60=… avg300=… total=…
        return int(line.rpartition("total=")[2])
    except (OSError, ValueError, IndexError):
        return None


def _quotas(root: Path) -> Iterator[tuple[Path, Periods]]:
    """The process's cgroup and those above it that count periods, of either version."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, own = line.split(":", 2)
        mounts = {"": ("", "unified")}.get(controllers, (controllers, "cpu") if "cpu" in controllers.split(",") else ())
        for mount in mounts:
            top = root / "sys/fs/cgroup" / mount
            group = top / own.strip("/")
            for place in (group, *(parent for parent in group.parents if parent.is_relative_to(top))):
                if periods := _periods(place / "cpu.stat"):
                    yield place, periods


def _periods(path: Path) -> Periods | None:
    try:
        counted = dict(line.split() for line in path.read_text().splitlines())
        return int(counted["nr_periods"]), int(counted["nr_throttled"])
    except (OSError, ValueError, KeyError):
        return None
