"""What only one process at a time may do, and names by which a process is known for ever.

A lock of the kernel (flock) ends with the process that holds it, however that ends. Where no process lives as long as what is
to be kept to oneself, as with a playbook whose tasks come and go, a file names the process that does, so exactly that a later
process of the same number is not taken for it.
"""

from __future__ import annotations

import contextlib
import fcntl
import getpass
import json
import os
import socket
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from schemas import documents

LINE_BYTES = 64_000


@contextlib.contextmanager
def exclusive(path: Path, mode: int = 0o644) -> Iterator[int]:
    """The file at `path`, open and locked: whoever else opens it so waits. It is made, with `mode`, where it is not there."""
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, mode)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            if _still_there(path, descriptor):
                yield descriptor
                return
        finally:
            os.close(descriptor)


def _still_there(path: Path, descriptor: int) -> bool:
    """False where the file was removed while we waited for it."""
    try:
        found = path.lstat()
    except FileNotFoundError:
        return False
    mine = os.fstat(descriptor)
    return (found.st_dev, found.st_ino) == (mine.st_dev, mine.st_ino)


def read_line(descriptor: int, schema: str) -> dict[str, Any] | None:
    """The document in the first line of the file, checked; None where there is none, or only a part of one."""
    text, newline, _ = os.pread(descriptor, LINE_BYTES, 0).partition(b"\n")
    try:
        found = documents.parse(text, source=schema)
        documents.validate(found, schema, source=schema)
    except documents.DocumentError:
        return None
    return dict(found) if newline else None


def write_line(descriptor: int, document: Mapping[str, Any]) -> None:
    """Puts the document into the file as its only line: a reader finds the old one or the new one, and no file beside it."""
    text = (json.dumps(document) + "\n").encode()
    os.pwrite(descriptor, text, 0)  # one call, which no signal cuts; what is left of a longer line comes after it
    os.ftruncate(descriptor, len(text))


def born(pid: int) -> str:
    """When a process began, in clock ticks since boot; with the pid it names one process. Empty for none or a zombie."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if fields[0] in ("Z", "X") else fields[19]


def boot_id() -> str:
    """Which boot of this machine this is."""
    return _text("/proc/sys/kernel/random/boot_id")


@dataclass(frozen=True, kw_only=True)
class Claim:
    """Who carries out a run: `lock.json` on the control node, and part of each host's lease."""

    run_id: str
    user: str
    host: str
    machine: str
    """Machine id of the control node; its host name where it has none."""
    boot_id: str
    pid_namespace: str
    pid: int
    """The process that lasts as long as the run is carried out: ansible-playbook."""
    born: str
    since: str
    runs: str
    """Directory of the runs on the control node."""
    running: tuple[str, ...] = ()
    """The other runs of that directory that were being carried out at `since`."""

    @property
    def process(self) -> tuple[str, str, str, int, str]:
        """What no other process has in common with this one."""
        return self.machine, self.boot_id, self.pid_namespace, self.pid, self.born

    def who(self) -> str:
        """For people."""
        return f"{self.user} on {self.host} (process {self.pid})"

    def lives(self) -> bool | None:
        """Whether its process runs; None where that cannot be told from here."""
        if self.machine != machine():
            return None
        if self.boot_id != boot_id():
            return False
        if self.pid_namespace != pid_namespace():
            return None
        return born(self.pid) == self.born != ""


def claim(run_id: str, runs: Path, pid: int, since: str, running: tuple[str, ...] = ()) -> Claim:
    """The claim of a process of this machine."""
    return Claim(
        run_id=run_id,
        user=_user(),
        host=socket.gethostname(),
        machine=machine(),
        boot_id=boot_id(),
        pid_namespace=pid_namespace(),
        pid=pid,
        born=born(pid),
        since=since,
        runs=str(runs.resolve()),
        running=running,
    )


def claim_from_json(document: Mapping[str, Any]) -> Claim:
    """The claim in a document that lock.schema.json has passed."""
    return Claim(**{**document, "running": tuple(document.get("running", ()))})


def machine() -> str:
    """What tells this machine from every other."""
    return _text("/etc/machine-id") or socket.gethostname()


def pid_namespace() -> str:
    """Within which process numbers mean what they mean here: a container has its own."""
    try:
        return str(Path("/proc/self/ns/pid").readlink())
    except OSError:
        return ""


def _user() -> str:
    with contextlib.suppress(KeyError, OSError):  # an account without a name, as in a container
        return os.environ.get("SUDO_USER") or getpass.getuser()
    return f"user {os.getuid()}"


def _text(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""
