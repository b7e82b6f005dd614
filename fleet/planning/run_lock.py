"""One playbook at a time on a run directory, and what an attempt that was cut off left there.

The tasks of a playbook are processes that come and go, so `lock.json` names the one that stays: ansible-playbook. It is void
as soon as that process is gone, which on its own machine can be told exactly; nobody has to clean up after a `kill -9`.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import zipfile
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

from schemas import documents
from schemas.errors import HeldError
from schemas.locks import Claim, born, claim, claim_from_json, exclusive, read_line, write_line

LOCK, JOURNAL, EVENTS, PLAN = "lock.json", "journal.jsonl", "events.jsonl", "plan.json"
_TEMPORARY = re.compile(r"\.[\w.-]+\.[a-z0-9_]{8}")
"""As documents.write_text names what is not written to its end."""
_MOST_RUNNING = 200


def take(directory: Path, *, take_over: bool = False) -> str:
    """Makes the playbook that this process belongs to the one that carries out the run in `directory`.

    Args:
        directory: of the run; made where it is not there.
        take_over: also where the one who has it is on another machine and cannot be asked whether it still runs.

    Returns:
        A line for people where the run had been held by another that is gone; else nothing.

    Raises:
        HeldError: another has it; the message says who, since when, and what to do.
    """
    directory.mkdir(parents=True, exist_ok=True)
    pid, note = playbook() or os.getpid(), ""
    try:
        with exclusive(directory / LOCK) as file:
            there = _claim(read_line(file, "lock"))
            mine = claim(directory.name, directory.parent, pid, _now())
            if there and there.process != mine.process:
                _refuse(directory, there, take_over)
                note = f"{there.who()} had this run since {there.since} and is gone"
            write_line(file, _json(mine))
            # Told only now: who began before that moment is seen here, and who begins later sees this one.
            mine = claim(directory.name, directory.parent, pid, _now(), _running(directory))
            write_line(file, _json(mine))
            resumed = (directory / PLAN).exists()
            if resumed:
                tidy(directory)
            _journal(directory, "resumed" if resumed else "begun", mine, note)
    except PermissionError as error:
        there = peek(directory)
        raise HeldError(
            f"{error.filename}: {error.strerror}: the run was begun by {there.who() if there else 'another user'}: "
            "resume it as that user, or choose another rackproof_run_id"
        ) from None
    return note


def release(directory: Path, outcome: str) -> None:
    """Gives the run back where this process's playbook has it, or one that is gone, and notes what was decided."""
    with contextlib.suppress(PermissionError):
        if not (directory / LOCK).exists():
            return
        with exclusive(directory / LOCK) as file:
            there = _claim(read_line(file, "lock"))
            ours = there is None or (there.pid in (playbook(), os.getpid()) and there.lives())
            if ours or (there and there.lives() is False):
                if there:
                    _journal(directory, "reported", there, outcome)
                (directory / LOCK).unlink()


def peek(directory: Path) -> Claim | None:
    """Who has the run, or had it when it was cut off; None where nobody does."""
    try:
        descriptor = os.open(directory / LOCK, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return None
    try:
        return _claim(read_line(descriptor, "lock"))
    finally:
        os.close(descriptor)


def at_it(directory: Path) -> Claim | None:
    """Who carries the run out at this moment, where that is certain and neither this process nor its own playbook."""
    there = peek(directory)
    return there if there and there.lives() and there.pid not in (playbook(), os.getpid()) else None


def _claim(document: dict[str, object] | None) -> Claim | None:
    return claim_from_json(document) if document else None


def _json(held: Claim) -> dict[str, object]:
    return {**vars(held), "running": list(held.running)}


def _refuse(directory: Path, there: Claim, take_over: bool) -> None:
    """Raises HeldError unless the one who has the run is gone."""
    lives = there.lives()
    if lives is False or (lives is None and take_over):
        return
    what = f"run {there.run_id} is carried out by {there.who()} since {there.since}"
    if lives:
        raise HeldError(
            f"{what}: wait for its end, or end it there (kill {there.pid}) and start this again, which resumes it; "
            "for a run of its own choose another rackproof_run_id"
        )
    raise HeldError(
        f"{what}, which cannot be asked from here whether it still runs: look there, and if it does not, "
        f"set rackproof_take_over (-e rackproof_take_over=true) or remove {directory / LOCK}"
    )


def _running(directory: Path) -> tuple[str, ...]:
    """The other runs beside this one that are carried out now, as far as anybody can tell."""
    others = (peek(path.parent) for path in sorted(directory.parent.glob(f"*/{LOCK}")) if path.parent != directory)
    return tuple(other.run_id for other in others if other and other.lives() is not False)[:_MOST_RUNNING]


def playbook() -> int:
    """The ansible-playbook that this process belongs to; 0 where it was started by hand.

    Between it and us are a worker, which is a copy of it, a shell and the module that starts commands.
    """
    pid, found, words = os.getppid(), 0, [""]
    while pid > 0:
        command = _command(pid)
        if not found and _is_playbook(command):
            found, words = pid, command
        elif found and command == words:
            found = pid
        elif found:
            break
        pid = _parent(pid)
    return found


def _is_playbook(words: list[str]) -> bool:
    names = [word.rpartition("/")[2] for word in words[:4]]
    script = names[1:2] if names[0].startswith("python") else names[:1]
    return "".join(script).startswith("ansible-playbook") or names[1:] == ["-m", "ansible", "playbook"]


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
    return int(fields[1]) if born(pid) else 0


def tidy(directory: Path) -> None:
    """Removes what a process that was killed had not written to its end. Only for who has the run."""
    for path in _files(directory):
        if _TEMPORARY.fullmatch(path.name) or (path.suffix == ".whl" and not zipfile.is_zipfile(path)):
            path.unlink(missing_ok=True)
    for name in (JOURNAL, EVENTS):
        _drop_torn_line(directory / name)


def _files(directory: Path) -> Iterator[Path]:
    for pattern in ("*", "hosts/*", "gangs/*/*", "agent/*"):
        yield from (path for path in directory.glob(pattern) if path.is_file() and not path.is_symlink())


def _drop_torn_line(path: Path) -> None:
    """What was not written to its end was not told; the attempt that resumes tells it again."""
    if path.is_symlink() or not path.is_file():
        return
    with path.open("r+b") as file:
        text = file.read()
        if not text.endswith(b"\n"):
            file.truncate(text.rfind(b"\n") + 1)


def _journal(directory: Path, what: str, by: Claim, note: str) -> None:
    """Adds one line to the journal."""
    event = {"at": _now(), "what": what, "user": by.user, "host": by.host, "pid": by.pid}
    if note:
        event["note"] = note
    documents.validate(event, "journal", source=JOURNAL)
    _drop_torn_line(directory / JOURNAL)
    with (directory / JOURNAL).open("a", encoding="utf-8") as file:
        file.write(json.dumps(event) + "\n")


def _now() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
