"""Lock files, and claims, which identify the process that executes a run.

The kernel releases a lock (flock) when the process that holds it ends. But no process of Rackproof runs as long as a playbook
does. So a run also has a claim: a file that identifies the ansible-playbook process so that a later process with the same PID is
not mistaken for it.
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
OLD_START_TIME = b'"born":'
"""Name of the field `start_time` in files of version 1.0."""


@contextlib.contextmanager
def exclusive(path: Path, mode: int = 0o644) -> Iterator[int]:
    """Open the file at `path` and hold an exclusive lock on it. Create a missing file with `mode`."""
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, mode)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            if _is_same_file(path, descriptor):
                yield descriptor
                return
        finally:
            os.close(descriptor)


def _is_same_file(path: Path, descriptor: int) -> bool:
    """Return whether the path still leads to the opened file: while this process waited, another process may have replaced it."""
    try:
        current = path.lstat()
    except FileNotFoundError:
        return False
    opened = os.fstat(descriptor)
    return (current.st_dev, current.st_ino) == (opened.st_dev, opened.st_ino)


def read_line(descriptor: int, schema: str) -> dict[str, Any] | None:
    """Return the validated document in the first line of the file; None if the line is missing, cut off or invalid."""
    text, newline, _ = os.pread(descriptor, LINE_BYTES, 0).replace(OLD_START_TIME, b'"start_time":').partition(b"\n")
    try:
        document = documents.parse(text, source=schema)
        documents.validate(document, schema, source=schema)
    except documents.DocumentError:
        return None
    return dict(document) if newline else None


def write_line(descriptor: int, document: Mapping[str, Any]) -> None:
    """Replace the content of the file with the document, as one line. A reader always gets the old or the new document."""
    text = (json.dumps(document) + "\n").encode()
    # One call writes the whole line, and a signal does not interrupt it. Until the file is truncated, the rest of a longer old
    # line may follow the new line. `read_line` ignores the rest.
    try:
        os.pwrite(descriptor, text, 0)
        os.ftruncate(descriptor, len(text))
    except OSError as error:
        documents.name_file(error, Path(f"/proc/self/fd/{descriptor}").readlink())
        raise


def process_start_time(pid: int) -> str:
    """Return the start time of a process in clock ticks since boot; empty if it is a zombie or does not exist.

    Between two boots of a machine, no two processes have the same PID and start time.
    """
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if fields[0] in ("Z", "X") else fields[19]


def boot_id() -> str:
    """Return the id of the current boot of this machine; empty if it cannot be read."""
    return _text("/proc/sys/kernel/random/boot_id")


@dataclass(frozen=True, kw_only=True)
class Claim:
    """The identity of the process that executes a run.

    The claim is in `lock.json` on the control node, and in the lease by which a run locks a host.
    """

    run_id: str
    user: str
    host: str
    machine: str
    """Machine id of the control node, or its host name if it has none."""
    boot_id: str
    pid_namespace: str
    pid: int
    """The process that runs as long as the run does: ansible-playbook; without a control node, a command on the host."""
    start_time: str
    since: str
    runs: str
    """Directory of the runs on the control node."""
    running: tuple[str, ...] = ()
    """The other runs in that directory that were running at `since`."""

    @property
    def process(self) -> tuple[str, str, str, int, str]:
        """Return the unique identity of the process."""
        return self.machine, self.boot_id, self.pid_namespace, self.pid, self.start_time

    def who(self) -> str:
        """Return the user, host and process for a message."""
        return f"{self.user} on {self.host} (process {self.pid})"

    def is_on(self, machine_id: str, host: str, boot: str) -> bool:
        """Return whether the claim was made on the machine with this machine id, host name and boot id.

        Cloned virtual machines may have the same machine id, so the host name or the boot id must be the same too.
        """
        return self.machine == machine_id and (self.host == host or self.boot_id == boot != "")

    def is_running(self) -> bool | None:
        """Return whether the process is running; None if this machine cannot determine it."""
        if not self.is_on(machine(), socket.gethostname(), boot_id()):
            return None
        if self.boot_id != boot_id():
            return False
        if self.pid_namespace != pid_namespace():
            return None
        return process_start_time(self.pid) == self.start_time != ""


def claim(run_id: str, runs: Path, pid: int, since: str, running: tuple[str, ...] = ()) -> Claim:
    """Return the claim of a process on this machine."""
    return Claim(
        run_id=run_id,
        user=user_name(),
        host=socket.gethostname(),
        machine=machine(),
        boot_id=boot_id(),
        pid_namespace=pid_namespace(),
        pid=pid,
        start_time=process_start_time(pid),
        since=since,
        runs=str(runs.resolve()),
        running=running,
    )


def claim_from_json(document: Mapping[str, Any]) -> Claim:
    """Return the claim in a document that matches lock.schema.json."""
    return Claim(**{**document, "running": tuple(document.get("running", ()))})


def claim_to_json(of: Claim) -> dict[str, Any]:
    """Return the document of a claim. It matches lock.schema.json."""
    return {**vars(of), "running": list(of.running)}


def machine() -> str:
    """Return the machine id of this machine, or its host name if it has none."""
    return _text("/etc/machine-id") or socket.gethostname()


def pid_namespace() -> str:
    """Return the PID namespace of this process; empty if it cannot be read. A container may have its own namespace."""
    try:
        return str(Path("/proc/self/ns/pid").readlink())
    except OSError:
        return ""


def user_name() -> str:
    """Return the name of the account that started this process, or that called sudo; `user UID` if it has no name."""
    with contextlib.suppress(KeyError, OSError):  # a container may have no name for the account
        return os.environ.get("SUDO_USER") or getpass.getuser()
    return f"user {os.getuid()}"


def _text(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""
