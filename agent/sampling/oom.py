"""Detect whether the kernel killed a process because memory ran out, from the kernel's counters and, if readable, its log.

The end of such a process looks like that of a process which a user killed: both end with SIGKILL. But the kernel counts its
out-of-memory kills (`oom_kill`) for each control group and for the whole machine. So the counters are read before a launch, and
again when a rank has ended.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from agent.sampling.cgroups import cgroup_chains, read_number
from collectors import kernel_log
from schemas import documents

NO_LIMIT = 1 << 60
"""In cgroup v1, a limit above this value means that the group has no limit."""
_OOM_KILL = "killed by the kernel's out-of-memory killer"
_KERNEL_MESSAGE = re.compile(r"((?:Memory cgroup o|O)ut of memory): Killed process (\d+) \((.{1,64}?)\)")


@dataclass(frozen=True, kw_only=True)
class ControlGroup:
    """The counters of a control group, or of the machine."""

    path: str
    """Directory of the group; empty for the machine."""
    kills: int
    hits: int = 0
    """How often the memory limit of this group, not that of a parent group, was reached."""
    limit: int | None = None
    """Memory limit of the group in bytes; None: no limit, or unknown."""


def read_groups(root: Path = Path("/")) -> list[ControlGroup]:
    """Return the control groups of this process that count kills: its own group, then its parent groups, and last the machine."""
    groups: list[ControlGroup] = []
    for chain in cgroup_chains("memory", root):
        groups = [group for path in chain if (group := _read_group(path))]
        if groups:
            break
    machine = _read_machine(root)
    return [*groups, *([machine] if machine else [])]


def _read_group(path: Path) -> ControlGroup | None:
    """Return the counters of a group; None if it no longer exists or does not count kills, like the root of cgroup v2."""
    if counters := _read_counters(path / "memory.events"):
        hits = (_read_counters(path / "memory.events.local") or counters).get("oom", 0)
        limit = read_number(path / "memory.max")
    elif counters := _read_counters(path / "memory.oom_control"):
        hits, limit = read_number(path / "memory.failcnt") or 0, read_number(path / "memory.limit_in_bytes")
    if "oom_kill" not in counters:
        return None
    return ControlGroup(
        path=str(path), kills=counters["oom_kill"], hits=hits, limit=None if limit and limit > NO_LIMIT else limit
    )


def _read_counters(path: Path) -> dict[str, int]:
    try:
        fields = [line.split() for line in path.read_text(errors="replace").splitlines()]
    except OSError:
        return {}
    return {pair[0]: int(pair[1]) for pair in fields if len(pair) == 2 and pair[1].isdecimal()}


class OomWatch:
    """Detects out-of-memory kills since the creation of this object."""

    def __init__(self, root: Path = Path("/")) -> None:
        self._root = root
        self._before, self._began = read_groups(root), time.clock_gettime(time.CLOCK_BOOTTIME)

    def describe_kill(self, pids: Collection[int] = ()) -> str:
        """Return a description of how the kernel killed a process of this launch; empty if there is no sign of a kill.

        Args:
            pids: processes of this launch. They matter only if no control group counts kills. The counter of the machine is then
                used, which includes kills of other processes. So a kill is described only if the kernel log names one of these
                processes, or if the log cannot be read.
        """
        kill = describe_kills_since(self._before, self._root)
        if not kill or self._before[0].path:
            return kill
        message = self._kernel_message(pids)
        return kill if message is None else message and f"{_OOM_KILL} ({message})"

    def _kernel_message(self, pids: Collection[int]) -> str | None:
        """Return the last message that the kernel killed one of these processes since the creation of this object.

        Return an empty text if there is no such message, and None if the log cannot be read.
        """
        try:
            lines = kernel_log.read_log(self._root / "dev/kmsg", commands=()).lines
        except OSError:
            return None
        for line in reversed(lines):
            match = _KERNEL_MESSAGE.search(kernel_log.messages(line)[0])
            if match and int(match[2]) in pids and kernel_log.uptime(line) >= self._began:
                return f"kernel log: {match[0]}"
        return ""


def describe_kills_since(before: Sequence[ControlGroup], root: Path = Path("/")) -> str:
    """Return a description of the kills since the counters in `before` were read; empty if there are none.

    Only the counter of one group is used: the innermost group that still exists. The counter of the machine includes kills of
    other processes, so it is used only if `before` has no control group.
    """
    pairs = [(group, now) for group in before if (now := _read_again(group, root))]
    if not pairs or (not pairs[0][0].path and len(before) > 1):
        return ""
    nearest_before, nearest_now = pairs[0]
    count = nearest_now.kills - nearest_before.kills
    if count <= 0:
        return ""
    if not nearest_before.path:
        return f"{_OOM_KILL} (oom_kill {count} on this host)"
    limits = [now.limit for earlier, now in pairs if now.limit is not None and now.hits > earlier.hits]
    reason = f"limit {min(limits) / 1e6:.0f} MB" if limits else "the host had no memory left"
    return f"{_OOM_KILL} (oom_kill {count}, {reason})"


def _read_again(group: ControlGroup, root: Path) -> ControlGroup | None:
    return _read_group(Path(group.path)) if group.path else _read_machine(root)


def _read_machine(root: Path) -> ControlGroup | None:
    kills = _read_counters(root / "proc/vmstat").get("oom_kill")
    return None if kills is None else ControlGroup(path="", kills=kills)


def save_counters(path: Path) -> None:
    """Save the current counters, for `describe_kill_since_save` after a process has ended."""
    documents.write_text(path, json.dumps([asdict(group) for group in read_groups()]))


def describe_kill_since_save(path: Path) -> str:
    """Return a description of the kills since `save_counters` wrote `path`; empty if there are none, or no saved counters."""
    try:
        before = [ControlGroup(**item) for item in json.loads(path.read_bytes())]
    except (OSError, ValueError, TypeError):
        return ""
    return describe_kills_since(before)
