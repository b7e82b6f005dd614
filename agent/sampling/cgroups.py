"""The control groups of this process (cgroup v1 and v2)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path


def cgroup_chains(controller: str, root: Path) -> Iterator[list[Path]]:
    """Yield a list for each hierarchy that may have this controller: the group of this process, then its parent groups.

    If this process is in a group outside this mount (its path contains `..`), the list has only the root of the mount.
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
    """Return the number in a file of a control group; None if it has none, such as `max`."""
    try:
        text = path.read_text(errors="replace").strip()
    except OSError:
        return None
    return int(text) if text.isdecimal() else None
