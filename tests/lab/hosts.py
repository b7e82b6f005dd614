"""Start a host of the lab, and build commands that run inside it."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from .machine import NAMESPACES

INIT = Path(__file__).with_name("host-init.sh")
CHECKOUT = Path(__file__).absolute().parents[2]
PRIVATE = ("/dev", "/proc", "/root", "/run", "/sys", "/tmp")
"""Directories on which host-init.sh mounts other file systems, so that the host does not see those of the machine."""
ENVIRONMENT = {
    "HOME": "/root",
    "LANG": "C.UTF-8",
    "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
}


@dataclass(frozen=True)
class Host:
    """One host of the lab."""

    name: str
    address: str
    namespace: str
    """Network namespace, as `ip netns` lists it."""
    pid: int
    """PID of the first process of the host, in the PID namespace of this machine."""

    def inside(self, command: Iterable[str | Path], cwd: Path) -> list[str | Path]:
        """Return the command that runs `command` inside the host, in the directory `cwd` of the host."""
        enter = ["nsenter", f"--target={self.pid}", "--mount", "--uts", "--ipc", "--net", "--pid", "--"]
        return [*enter, "env", "--default-signal", f"--chdir={cwd}", *command]


def boot(directory: Path, name: str, namespace: str) -> subprocess.Popen[str]:
    """Start a host, with its log in `directory`. The host runs until its standard input closes or this Python process ends."""
    (directory / name).mkdir(exist_ok=True)
    extra = outside_root_overlay([CHECKOUT, Path(sys.prefix), Path(sys.base_prefix)])
    command: list[str | Path] = ["nsenter", f"--net={NAMESPACES / namespace}", "--"]
    command += ["unshare", "--mount", "--uts", "--ipc", "--pid", "--fork", "--kill-child", "--"]
    command += ["bash", INIT, directory, name, *extra]
    with (directory / f"{name}.log").open("w") as log:
        return subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=subprocess.STDOUT,
            text=True,
            env=ENVIRONMENT,
            start_new_session=True,
        )


def outside_root_overlay(paths: Iterable[Path]) -> list[Path]:
    """Return those of `paths` that the overlay of / does not contain.

    They are below a directory in PRIVATE, or on another file system than /. A directory is left out if it is below another
    returned directory and on the same file system as that directory.
    """
    device = Path("/").stat().st_dev
    chosen: list[Path] = []
    for path in sorted({path.absolute() for path in paths}):
        replaced = any(path.is_relative_to(directory) for directory in PRIVATE)
        within = any(path.is_relative_to(other) and path.stat().st_dev == other.stat().st_dev for other in chosen)
        if (replaced or path.stat().st_dev != device) and not within:
            chosen.append(path)
    return chosen
