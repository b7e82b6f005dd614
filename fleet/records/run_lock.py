"""Lock a run directory for one playbook, and clean up after an interrupted attempt.

The tasks of a playbook are short-lived processes, so `lock.json` names the process of ansible-playbook. The lock is void as soon
as that process has exited, so even after a `kill -9` the lock need not be removed by hand. Whether the process has exited can be
checked only on the machine, and in the container, in which it was started.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import zipfile
from collections.abc import Iterator
from pathlib import Path

from schemas import documents
from schemas.errors import HeldError
from schemas.locks import (
    Claim,
    claim,
    claim_from_json,
    claim_to_json,
    exclusive,
    process_start_time,
    read_line,
    write_line,
)
from schemas.run_directory import EVENTS, JOURNAL, LOCK, RECORDS, RunDirectory
from schemas.times import utc_now

_TEMPORARY = re.compile(r"\.[\w.-]+\.[a-z0-9_]{8}")
"""Pattern of the names of temporary files of `documents.write_text`."""
_MAX_ACTIVE_RUNS = 200
"""Maximum number of other runs that `lock.json` lists as running."""


def acquire(directory: Path, *, take_over: bool = False) -> str:
    """Lock the run in `directory` for the playbook that this process belongs to.

    Args:
        directory: run directory, created if missing.
        take_over: take the lock even if it is unknown whether its holder, on another machine or in another container, still runs.

    Returns:
        A note for the operator if the previous holder has exited or its lock was taken over; otherwise an empty string.

    Raises:
        HeldError: another process holds the lock, or the run belongs to another user; the message says what to do.
    """
    directory.mkdir(parents=True, exist_ok=True)
    pid, note = playbook() or os.getpid(), ""
    try:
        with exclusive(RunDirectory(directory).lock) as file:
            old = _parse_claim(read_line(file, "lock"))
            mine = claim(directory.name, directory.parent, pid, utc_now())
            if old and old.process != mine.process:
                _refuse_active_holder(directory, old, take_over)
                state = "has exited" if old.is_running() is False else "its lock was taken over"
                note = f"{old.who()} held the lock of this run since {old.since} and {state}"
            write_line(file, claim_to_json(mine))
            # Write our lock before listing the other runs: if two runs start together, at least one of them sees the other.
            mine = claim(directory.name, directory.parent, pid, utc_now(), _active_runs(directory))
            write_line(file, claim_to_json(mine))
            resumed = RunDirectory(directory).plan.exists()
            if resumed:
                remove_partial_files(directory)
            _append_to_journal(directory, "resumed" if resumed else "begun", mine, note)
    except PermissionError as error:
        owner = holder(directory)
        raise HeldError(
            f"{error.filename}: {error.strerror}: the run was begun by {owner.who() if owner else 'another user'}: "
            "resume it as that user, or choose another rackproof_run_id"
        ) from None
    return note


def unlocked_claim(directory: Path, *, take_over: bool = False) -> dict[str, object]:
    """Return the claim of the playbook that this process belongs to, for the run in `directory`, without locking the run.

    The directory need not exist. Raises HeldError, as `acquire` does, if another process holds the run.
    """
    pid, owner = playbook() or os.getpid(), holder(directory)
    if owner and owner.pid != pid:
        _refuse_active_holder(directory, owner, take_over)
    return claim_to_json(claim(directory.name, directory.parent, pid, utc_now(), _active_runs(directory)))


def release(directory: Path, outcome: str) -> None:
    """Unlock the run and record `outcome` in the journal. Do nothing if another playbook holds the lock and may be running."""
    with contextlib.suppress(PermissionError):
        if not RunDirectory(directory).lock.exists():
            return
        with exclusive(RunDirectory(directory).lock) as file:
            owner = _parse_claim(read_line(file, "lock"))
            is_ours = owner is None or (owner.pid in (playbook(), os.getpid()) and owner.is_running())
            if is_ours or (owner and owner.is_running() is False):
                if owner:
                    _append_to_journal(directory, "reported", owner, outcome)
                RunDirectory(directory).lock.unlink()


def holder(directory: Path) -> Claim | None:
    """Return the process that the lock names, which may have exited since; None if there is no readable lock."""
    try:
        descriptor = os.open(RunDirectory(directory).lock, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return None
    try:
        return _parse_claim(read_line(descriptor, "lock"))
    finally:
        os.close(descriptor)


def active_holder(directory: Path) -> Claim | None:
    """Return the holder if it is certainly running and is neither this process nor its playbook."""
    owner = holder(directory)
    return owner if owner and owner.is_running() and owner.pid not in (playbook(), os.getpid()) else None


def _parse_claim(document: dict[str, object] | None) -> Claim | None:
    return claim_from_json(document) if document else None


def _refuse_active_holder(directory: Path, owner: Claim, take_over: bool) -> None:
    """Raise HeldError unless the holder has exited, or its state is unknown and the lock is to be taken over."""
    lives = owner.is_running()
    if lives is False or (lives is None and take_over):
        return
    what = f"run {owner.run_id} is locked by {owner.who()} since {owner.since}"
    if lives:
        raise HeldError(
            f"{what}: wait until it finishes, or stop it (kill {owner.pid}) and repeat this command to resume the run; "
            "for a separate run choose another rackproof_run_id"
        )
    raise HeldError(
        f"{what}; that process is on another machine or in another container, or this machine was renamed, so its state is "
        "unknown: check there; "
        f"if it has exited, set rackproof_take_over (-e rackproof_take_over=true) or remove {RunDirectory(directory).lock}"
    )


def _active_runs(directory: Path) -> tuple[str, ...]:
    """Return the ids of other runs in the same parent directory that are running or may be running."""
    others = (holder(path.parent) for path in sorted(directory.parent.glob(f"*/{LOCK}")) if path.parent != directory)
    return tuple(other.run_id for other in others if other and other.is_running() is not False)[:_MAX_ACTIVE_RUNS]


def running(runs: Path) -> Claim | None:
    """Return the holder of a run in the directory `runs` that is certainly running; None if there is none."""
    owners = (holder(path.parent) for path in sorted(runs.glob(f"*/{LOCK}")))
    return next((owner for owner in owners if owner and owner.is_running()), None)


def playbook() -> int:
    """Return the pid of the ansible-playbook that started this process; 0 if none did.

    Ansible forks workers, which keep the command line of the playbook. So the playbook is the topmost of consecutive ancestors
    with the same command line.
    """
    pid, playbook_pid, words = os.getppid(), 0, [""]
    while pid > 0:
        command = _command(pid)
        if not playbook_pid and _is_playbook(command):
            playbook_pid, words = pid, command
        elif playbook_pid and command == words:
            playbook_pid = pid
        elif playbook_pid:
            break
        pid = _parent(pid)
    return playbook_pid


def _is_playbook(words: list[str]) -> bool:
    """Return whether this is the command line of ansible-playbook.

    Packages may start it with options of Python (Fedora: `python3 -sP`), or as `.ansible-playbook-wrapped` (Nix).
    """
    program, *rest = words
    if not _base_name(program).startswith("python"):
        return _base_name(program).startswith("ansible-playbook")
    while rest and rest[0].startswith("-") and rest[0] != "-m":
        rest = rest[2:] if rest[0] in ("-W", "-X") else rest[1:]
    if rest[:1] == ["-m"]:
        return rest[1:3] == ["ansible", "playbook"] or rest[1:2] == ["ansible.cli.playbook"]
    return bool(rest) and _base_name(rest[0]).lstrip(".").startswith("ansible-playbook")


def _base_name(path: str) -> str:
    return path.rpartition("/")[2]


def _command(pid: int) -> list[str]:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text(encoding="utf-8", errors="replace").split("\0")
    except OSError:
        return [""]


def _parent(pid: int) -> int:
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
    except OSError:
        return 0
    return int(fields[1]) if process_start_time(pid) else 0


def remove_partial_files(directory: Path) -> None:
    """Remove files and last lines that a killed process wrote only in part. Call this only while holding the lock."""
    for path in _run_files(directory):
        if _TEMPORARY.fullmatch(path.name) or (path.suffix == ".whl" and not zipfile.is_zipfile(path)):
            path.unlink(missing_ok=True)
    for name in (JOURNAL, EVENTS):
        _drop_partial_line(directory / name)


def _run_files(directory: Path) -> Iterator[Path]:
    for pattern in ("*", *RECORDS, "agent/*"):
        yield from (path for path in directory.glob(pattern) if path.is_file() and not path.is_symlink())


def _drop_partial_line(path: Path) -> None:
    """Cut off an incomplete last line, which a killed process left."""
    if path.is_symlink() or not path.is_file():
        return
    with path.open("r+b") as file:
        text = file.read()
        if not text.endswith(b"\n"):
            file.truncate(text.rfind(b"\n") + 1)


def _append_to_journal(directory: Path, what: str, by: Claim, note: str) -> None:
    """Append one line to the journal."""
    event = {"at": utc_now(), "what": what, "user": by.user, "host": by.host, "pid": by.pid}
    if note:
        event["note"] = note
    documents.validate(event, "journal", source=JOURNAL)
    _drop_partial_line(RunDirectory(directory).journal)
    with RunDirectory(directory).journal.open("a", encoding="utf-8") as file:
        file.write(json.dumps(event) + "\n")
