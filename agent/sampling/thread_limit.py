"""Detect whether a launch reached a limit on processes and threads, from the kernel's counters and the output of its ranks.

A rank that cannot create a thread aborts, exits or waits without end, as if its device were faulty. The kernel counts for each
control group how often a limit was reached. It does not count this for the limit of a user (`ulimit -u`), and a container cannot
read the counters of a group outside it, such as that of its Kubernetes pod. The output of the rank is then the only evidence.
"""

from __future__ import annotations

import re
import resource
from pathlib import Path

from agent.sampling.cgroups import cgroup_chains, read_number

REMEDY = (
    "raise the limit (of a user: ulimit -u; of a container: --pids-limit; of a Kubernetes pod: podPidsLimit of the kubelet; of a "
    "systemd unit: TasksMax)"
)
_NO_THREAD = re.compile(
    r"can't start new thread"  # Python
    r"|(?:Thread creation|pthread_create) failed[^\n]*Resource temporarily unavailable"  # libgomp, OpenBLAS, NCCL
    r"|std::system_error'\s+what\(\):\s+Resource temporarily unavailable"  # libstdc++
    r"|RuntimeError: Resource temporarily unavailable"  # torch, after an std::system_error
    r"|OMP: System error #11\b"  # OpenMP of LLVM and Intel
)


class ThreadLimitWatch:
    """Detects limits that were reached since the creation of this object."""

    def __init__(self, root: Path = Path("/")) -> None:
        self._groups = _groups(root)
        self._before = {group: _hits(group) for group in self._groups}

    def describe_hit(self, output: str = "") -> str:
        """Return which limit was reached, with the remedy; empty if there is no sign of it.

        Args:
            output: what a failed rank printed. It matters only if no counter has risen.
        """
        if any(_hits(group) > self._before[group] for group in self._groups):
            limits = [str(limit) for group in self._groups if (limit := read_number(group / "pids.max")) is not None]
            numbers = f" (pids.max is {', '.join(limits)})" if limits else ""
            return f"a control group of this launch reached its limit on processes and threads{numbers}: {REMEDY}"
        if message := _NO_THREAD.search(output):
            limit, _ = resource.getrlimit(resource.RLIMIT_NPROC)
            number = "" if limit == resource.RLIM_INFINITY else f" (ulimit -u is {limit})"
            text = " ".join(message[0].split())
            return f"no thread could be created ({text}), because of a limit on processes and threads{number}: {REMEDY}"
        return ""


def _groups(root: Path) -> list[Path]:
    """Return the control groups of this process that count how often a limit was reached, innermost first."""
    tree = root / "sys/fs/cgroup"
    # In a container, the path in /proc/self/cgroup may not exist, and the container's group is mounted as the root.
    chains = [*cgroup_chains("pids", root), [tree, tree / "pids"]]
    groups = dict.fromkeys(group for chain in chains for group in chain)
    return [group for group in groups if (group / "pids.events").is_file()]


def _hits(group: Path) -> int:
    """Return how often the limit was reached.

    Since Linux 6.11, `pids.events` also counts what happens in groups below, and `pids.events.local` does not. In an older
    kernel, the `pids.events` of the process's group also counts how often the limit of a parent group was reached.
    """
    for name in ("pids.events.local", "pids.events"):
        try:
            counted = re.search(r"^max (\d+)$", (group / name).read_text(errors="replace"), re.MULTILINE)
        except OSError:
            continue
        return int(counted[1]) if counted else 0
    return 0
