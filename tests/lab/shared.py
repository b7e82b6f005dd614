"""Mount a directory of this machine in every lab host, like the shared file system of a cluster.

`python -m tests.lab.shared PID DIRECTORY AT` mounts DIRECTORY at the path AT in the mount namespace of process PID.
"""

from __future__ import annotations

import ctypes
import os
import sys
from pathlib import Path

from .lab import Lab
from .processes import run

OPEN_TREE, MOVE_MOUNT, CLONE_NEWNS = 428, 429, 0x20000
AT_FDCWD, OPEN_TREE_CLONE, MOVE_MOUNT_F_EMPTY_PATH = -100, 1, 4


def share(lab: Lab, directory: Path, at: str) -> None:
    """Mount `directory` at the path `at` of every host."""
    directory.mkdir(parents=True, exist_ok=True)
    for host in lab.hosts:
        lab.on(host.name, "mkdir", "-p", at)
        run([sys.executable, "-m", "tests.lab.shared", str(host.pid), directory, at], timeout=20)


def main(pid: str, directory: str, at: str) -> None:
    """Mount `directory` at the path `at` in the mount namespace of process `pid`.

    The directory has no path in that namespace. So this function clones the directory as a mount in the namespace of its own
    process, enters the namespace of process `pid`, and attaches the clone there.
    """
    kernel = ctypes.CDLL(None, use_errno=True)

    def call(*arguments: object) -> int:
        result = int(kernel.syscall(*arguments))
        if result < 0:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
        return result

    mount = call(OPEN_TREE, AT_FDCWD, directory.encode(), OPEN_TREE_CLONE)
    with Path(f"/proc/{pid}/ns/mnt").open("rb") as namespace:
        if kernel.setns(namespace.fileno(), CLONE_NEWNS):
            raise OSError(ctypes.get_errno(), "setns")
    call(MOVE_MOUNT, mount, b"", AT_FDCWD, at.encode(), MOVE_MOUNT_F_EMPTY_PATH)


if __name__ == "__main__":
    main(*sys.argv[1:])
