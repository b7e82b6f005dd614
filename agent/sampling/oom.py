"""Was a process killed for want of memory? By what the kernel counts of it, and by its log where that can be read.

Such a rank is simply gone, by SIGKILL, as if somebody had ended it. The kernel counts its kills for each control group
(`oom_kill`), and for the whole machine; a kill that was not counted while we watched was none of its own.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from collectors import kernel_log
from schemas import documents

NO_LIMIT = 1 << 60
"""Version 1 of the control groups says so of a group without one."""
_KILLED_FOR_IT = "killed by the kernel for want of memory"
_KILLED = re.compile(r"((?:Memory cgroup o|O)ut of memory): Killed process (\d+) \((.{1,64}?)\)")


@dataclass(frozen=True, kw_only=True)
class Group:
    """A control group, or the machine, as it is now."""

    path: str
    """Below it the kernel counts; empty for the machine."""
    kills: int
    hits: int = 0
    """How often its own limit was met."""
    limit: int | None = None
    """In bytes."""


def groups(root: Path = Path("/"), process: str = "self") -> list[Group]:
    """The control groups that hold the process, its own first and those above it after it; last the machine."""
    found = []
    for place, top in _places(root, process):
        while place.is_relative_to(top):
            if group := _group(place):
                found.append(group)
            place = place.parent
        if found:
            break
    machine = _machine(root)
    return [*found, *([machine] if machine else [])]


def _places(root: Path, process: str) -> list[tuple[Path, Path]]:
    """(its own group, the topmost one) in each hierarchy that may count memory."""
    try:
        lines = (root / f"proc/{process}/cgroup").read_text(errors="replace").splitlines()
    except OSError:
        return []
    tree, found = root / "sys/fs/cgroup", []
    for _, controllers, path in (line.split(":", 2) for line in lines if line.count(":") >= 2):
        below = path.lstrip("/") if ".." not in path else ""
        if "memory" in controllers.split(","):
            found.append((tree / "memory" / below, tree / "memory"))
        elif not controllers:
            top = tree / "unified" if (tree / "unified").is_dir() else tree
            found.append((top / below, top))
    return found


def _group(place: Path) -> Group | None:
    """None where the kernel counts nothing there, as at the root of version 2, or the group is gone."""
    if kept := _counts(place / "memory.events"):
        hits = (_counts(place / "memory.events.local") or kept).get("oom", 0)
        limit = _number(place / "memory.max")
    elif kept := _counts(place / "memory.oom_control"):
        hits, limit = _number(place / "memory.failcnt") or 0, _number(place / "memory.limit_in_bytes")
    if "oom_kill" not in kept:
        return None
    return Group(
        path=str(place), kills=kept["oom_kill"], hits=hits, limit=None if limit and limit > NO_LIMIT else limit
    )


def _counts(path: Path) -> dict[str, int]:
    try:
        fields = [line.split() for line in path.read_text(errors="replace").splitlines()]
    except OSError:
        return {}
    return {pair[0]: int(pair[1]) for pair in fields if len(pair) == 2 and pair[1].isdecimal()}


def _number(path: Path) -> int | None:
    try:
        text = path.read_text(errors="replace").strip()
    except OSError:
        return None
    return int(text) if text.isdecimal() else None


class Memory:
    """Watches from its making on."""

    def __init__(self, root: Path = Path("/")) -> None:
        self._root = root
        self._before, self._began = groups(root), time.clock_gettime(time.CLOCK_BOOTTIME)

    def killed(self, pids: Collection[int] = ()) -> str:
        """That one of our processes was killed for want of memory, in words; empty where nothing says so.

        Args:
            pids: theirs, as far as they are known: where no control group of ours counts, the kernel's log is asked for them.
        """
        said = since(self._before, self._root)
        if not said or self._before[0].path:
            return said
        logged = self._logged(pids)
        return said if logged is None else logged and f"{_KILLED_FOR_IT} ({logged})"

    def _logged(self, pids: Collection[int]) -> str | None:
        """What the kernel's log has of them since we watch; None where it cannot be read."""
        try:
            lines = kernel_log.read_log(self._root / "dev/kmsg", commands=()).lines
        except OSError:
            return None
        for line in reversed(lines):
            found = _KILLED.search(kernel_log.message(line))
            if found and int(found[2]) in pids and kernel_log.uptime(line) >= self._began:
                return f"kernel log: {found[0]}"
        return ""


def since(before: Sequence[Group], root: Path = Path("/")) -> str:
    """Kills counted since then in the nearest group that is still there, in words; empty where there were none."""
    there = [(group, now) for group in before if (now := _again(group, root))]
    # The machine counts everybody's kills: it is asked only where no control group of ours ever counted.
    if not there or (not there[0][0].path and len(before) > 1):
        return ""
    count = there[0][1].kills - there[0][0].kills
    if count <= 0:
        return ""
    if not there[0][0].path:
        return f"{_KILLED_FOR_IT} (oom_kill {count} on this host)"
    met = [now.limit for earlier, now in there if now.limit is not None and now.hits > earlier.hits]
    why = f"limit {min(met) / 1e6:.0f} MB" if met else "the host had none left"
    return f"{_KILLED_FOR_IT} (oom_kill {count}, {why})"


def _again(group: Group, root: Path) -> Group | None:
    return _group(Path(group.path)) if group.path else _machine(root)


def _machine(root: Path) -> Group | None:
    kills = _counts(root / "proc/vmstat").get("oom_kill")
    return None if kills is None else Group(path="", kills=kills)


def remember(path: Path) -> None:
    """Writes down what is counted now, for `told` after the end of a process that cannot speak any more."""
    documents.write_text(path, json.dumps([asdict(group) for group in groups()]))


def told(path: Path) -> str:
    """What was killed for want of memory since `remember`, in words; empty where nothing was, or nothing was remembered."""
    try:
        before = [Group(**item) for item in json.loads(path.read_bytes())]
    except (OSError, ValueError, TypeError):
        return ""
    return since(before)
