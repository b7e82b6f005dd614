"""What the lab needs of this machine, and what it has on it while it runs: network namespaces and a run directory.

Every name begins with the lab's own, `rp-PID-START-N`: the process that holds the lab, when that process started (PIDs
come round again) and a number. So labs do not meet, and what a process that is gone has left can be told from all else.
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
"""Program: the Debian package that has it."""
CAPABILITIES = {"CAP_NET_ADMIN": 12, "CAP_SYS_ADMIN": 21}


class LabError(Exception):
    """The lab could not do what was asked."""


class LabUnavailable(LabError):  # noqa: N818 - it names a state of the machine
    """This machine lacks something that the lab needs."""


def requirements_missing() -> list[str]:
    """What this machine lacks, each with its remedy; empty where the lab can run."""
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
    """A new run directory; its name is the new lab's, and it takes part in no other."""
    number = 0
    while True:
        path = RUN / f"rp-{os.getpid()}-{_started(os.getpid())}-{number}"
        with contextlib.suppress(FileExistsError):
            path.mkdir(mode=0o700)
            return path
        number += 1


def remove(lab: str) -> None:
    """Kill every process in the lab's namespaces, delete the namespaces and its run directory. May be repeated."""
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
    """Remove what labs of processes that no longer exist have left."""
    owned = [match for path in (*_entries(NAMESPACES), *_entries(RUN)) if (match := OWNED.fullmatch(path.name))]
    for lab in {match["lab"] for match in owned if _started(int(match["pid"])) != match["start"]}:
        remove(lab)


def _entries(directory: Path) -> list[Path]:
    return list(directory.iterdir()) if directory.is_dir() else []


def _started(pid: int) -> str | None:
    """When a process started, in clock ticks since boot; None where there is no such process."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except OSError:
        return None
    return stat.rpartition(")")[2].split()[19]  # the program's name, in brackets, may hold anything


def _inside(namespaces: Iterable[Path]) -> set[int]:
    """The processes in these network namespaces. A process that has ended and waits for its parent is in none."""
    wanted = set()
    for path in namespaces:
        with contextlib.suppress(OSError):  # another lab's sweep may have been faster
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
