"""Check that this machine has what the lab needs, and manage its network namespaces and run directory.

The name of every namespace and run directory begins with the name of its lab, `rp-PID-START-N`. PID and START identify the
process that uses the lab: its PID and its start time, because a PID alone may be reused. N counts the labs of this process from
0. Labs therefore do not conflict, and the leftovers of a process that has exited are recognized.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import time
from collections.abc import Iterable
from pathlib import Path

from .processes import SEARCH_PATH, run

RUN = Path("/run")
NAMESPACES = RUN / "netns"
OWNED = re.compile(r"(?P<lab>rp-(?P<pid>\d+)-(?P<start>\d+)-\d+)(-[a-z0-9]+)?")
PROGRAMS = {
    "hostname": "hostname",
    "ip": "iproute2",
    "nsenter": "util-linux",
    "unshare": "util-linux",
    "pivot_root": "util-linux",
    "ssh": "openssh-client",
    "ssh-keygen": "openssh-client",
    "sshd": "openssh-server",
    "prometheus": "prometheus",
    "promtool": "prometheus",
}
"""Program -> Debian package."""
CAPABILITIES = {"CAP_NET_ADMIN": 12, "CAP_SYS_ADMIN": 21}


class LabError(Exception):
    """An operation of the lab failed."""


class LabUnavailable(LabError):  # noqa: N818 - the name describes a state of the machine
    """This machine lacks something that the lab needs."""


def requirements_missing() -> list[str]:
    """Return what this machine lacks, each with its remedy; empty if the lab can run."""
    missing = [
        f"the program {program} (Debian package {package})"
        for program, package in PROGRAMS.items()
        if shutil.which(program, path=SEARCH_PATH) is None
    ]
    if os.geteuid() != 0:
        return ["root (run the tests with sudo)", *missing]
    status = Path("/proc/self/status").read_text()
    capabilities = int(re.findall(r"^CapEff:\s*(\w+)$", status, re.MULTILINE)[0], 16)
    lacking = [
        f"{name} (in a container: --privileged)" for name, bit in CAPABILITIES.items() if not capabilities >> bit & 1
    ]
    return lacking + missing


def claim() -> Path:
    """Create and return a run directory for a new lab. Its name is the name of the lab."""
    number = 0
    while True:
        path = RUN / f"rp-{os.getpid()}-{_started(os.getpid())}-{number}"
        with contextlib.suppress(FileExistsError):
            path.mkdir(mode=0o700)
            return path
        number += 1


def remove(lab: str) -> None:
    """Kill all processes in the lab's namespaces; delete the namespaces and the run directory. Repeated calls are allowed."""
    names = [path for path in _entries(NAMESPACES) if (owned := OWNED.fullmatch(path.name)) and owned["lab"] == lab]
    deadline = time.monotonic() + 10
    while pids := _inside(names):
        if time.monotonic() > deadline:
            raise LabError(f"processes of {lab} survive SIGKILL: {sorted(pids)}")
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.01)
    for path in names:
        run(["ip", "netns", "delete", path.name], check=False, timeout=10)
    shutil.rmtree(RUN / lab, ignore_errors=True)


def sweep() -> None:
    """Remove the leftovers of labs whose process no longer exists."""
    owned = [match for path in (*_entries(NAMESPACES), *_entries(RUN)) if (match := OWNED.fullmatch(path.name))]
    for lab in {match["lab"] for match in owned if _started(int(match["pid"])) != match["start"]}:
        remove(lab)


def _entries(directory: Path) -> list[Path]:
    return list(directory.iterdir()) if directory.is_dir() else []


def _started(pid: int) -> str | None:
    """Return the start time of a process in clock ticks since boot, or None if it does not exist."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except OSError:
        return None
    return stat.rpartition(")")[2].split()[19]  # the program name before `)` may contain spaces and parentheses


def _inside(namespaces: Iterable[Path]) -> set[int]:
    """Return the PIDs of the processes in these network namespaces, without zombies."""
    wanted = set()
    for path in namespaces:
        with contextlib.suppress(OSError):  # another process may have removed the namespace
            wanted.add(_identity(path))
    pids = set()
    for process in Path("/proc").iterdir():
        if process.name.isdigit():
            with contextlib.suppress(OSError):
                if _identity(process / "ns" / "net") in wanted:
                    pids.add(int(process.name))
    return pids


def _identity(path: Path) -> tuple[int, int]:
    status = path.stat()
    return status.st_dev, status.st_ino
