"""The control groups of this process (cgroup v1 and v2)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

UNLIMITED = 1 << 60
"""A limit of at least this many bytes counts as no limit. A group without a limit reports almost 2**63 in cgroup v1, and the word
`max` in cgroup v2."""


def cgroup_chains(controller: str, root: Path) -> Iterator[list[Path]]:
    """Yield one list for each cgroup hierarchy: the directory of this process's group, then those of its parent groups.

    A hierarchy of version 1 is included if it has the controller. The hierarchy of version 2 is always included, because
    /proc/self/cgroup does not list its controllers. If the path of the group in /proc/self/cgroup contains `..`, the group is
    not below the directory where the hierarchy is mounted. The list then has only that directory.
    """
    try:
        lines = (root / "proc/self/cgroup").read_text(errors="replace").splitlines()
    except OSError:
        return
    tree = root / "sys/fs/cgroup"
    for line in lines:
        if line.count(":") < 2:
            continue
        _, controllers, path = line.split(":", 2)
        if not controllers:  # version 2
            tops = [tree / "unified" if (tree / "unified").is_dir() else tree]
        elif controller in controllers.split(","):
            tops = [tree / name for name in dict.fromkeys((controllers, controller)) if (tree / name).is_dir()][:1]
        else:
            continue
        for top in tops:
            group = top / (path.lstrip("/") if ".." not in path else "")
            yield [group, *(parent for parent in group.parents if parent.is_relative_to(top))]


def read_number(path: Path) -> int | None:
    """Return the number in a file of a control group; None if the file has no number (`max`) or cannot be read."""
    try:
        text = path.read_text(errors="replace").strip()
    except OSError:
        return None
    return int(text) if text.isdecimal() else None


def memory_left(root: Path = Path("/")) -> int | None:
    """Return how many bytes this process may still allocate before one of its control groups reaches its memory limit.

    Return None if no group has a limit. The limits of all groups that contain this process apply: those of a container, a batch
    job or a systemd slice, and of their parent groups. The inactive part of the file cache (`inactive_file`) is subtracted from
    the usage of a group, because the kernel reclaims that part first.
    """
    tree = root / "sys/fs/cgroup"
    # In a container, /proc/self/cgroup may have the path of the group on the host, which does not exist in the container. There
    # the group of the container is mounted as the root of the hierarchy (version 2: `tree`, version 1: `tree / "memory"`).
    chains = [*cgroup_chains("memory", root), [tree, tree / "memory"]]
    remaining = []
    for group in dict.fromkeys(group for chain in chains for group in chain):
        for limit_file, use_file, cache in (
            ("memory.max", "memory.current", "inactive_file"),
            ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
        ):
            limit, used = read_number(group / limit_file), read_number(group / use_file)
            if limit is not None and used is not None and limit < UNLIMITED:
                remaining.append(max(0, limit - max(0, used - _statistic(group, cache))))
    return min(remaining, default=None)


def _statistic(group: Path, name: str) -> int:
    """Return a value of the file `memory.stat`, in bytes; 0 if it is missing."""
    try:
        lines = (group / "memory.stat").read_text(errors="replace").splitlines()
    except OSError:
        return 0
    values = [value for key, _, value in (line.partition(" ") for line in lines) if key == name]
    return int(values[0]) if values and values[0].isdecimal() else 0
