"""Begins a run in its directory, or goes on with one that was cut off: its lock is taken, and its plan written or found."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from fleet.planning import run_lock
from fleet.records.load import PLAN_BYTES
from schemas import documents
from schemas.errors import RunError, UsageError


def begin(directory: Path, document: dict[str, object], take_over: bool = False) -> dict[str, object]:
    """Writes the plan of a new run; of a run that was cut off, the plan that is there holds."""
    path = directory / "plan.json"
    try:
        documents.validate(document, "plan", source="the plan")
    except documents.DocumentError as error:
        raise UsageError(str(error)) from None
    holder = run_lock.peek(directory)
    if (not holder or holder.lives() is False) and os.access(path, os.R_OK):
        _there(
            path, document
        )  # before anything of another run is touched; who has it, or that it is another's, comes first
    with _room(directory):
        note = run_lock.take(directory, take_over=take_over)
    if note:
        print(note, file=sys.stderr)
    if there := _there(path, document):
        return there
    with _room(directory):
        documents.write(path, document)
    return document


def _there(path: Path, document: Mapping[str, object]) -> dict[str, object] | None:
    """The plan that is there, which nobody changes any more; None where there is none. Raises where it is another one."""
    if not path.exists():
        return None
    try:
        there = documents.read(path, "plan", max_bytes=PLAN_BYTES)
    except documents.DocumentError as error:
        raise RunError(
            f"{error}: it is damaged, or of another version of Rackproof: choose another rackproof_run_id"
        ) from None
    same = {*document, *there} - {"nonce", "created"}
    differs = sorted(key for key in same if there.get(key) != document.get(key))
    if differs:
        raise UsageError(
            f"run {document['run_id']} was begun with other {', '.join(differs)}{_other_hosts(there, document)}: "
            "choose another rackproof_run_id, or restore the inventory and profile it was begun with"
        )
    return dict(there)


@contextlib.contextmanager
def _room(directory: Path) -> Iterator[None]:
    """Says where it was that something could not be written, since a full disk does not."""
    try:
        yield
    except OSError as error:
        if error.filename:
            raise
        raise RunError(f"{directory}: {error.strerror}: make room, or set rackproof_runs_directory") from None


def _other_hosts(there: Mapping[str, Any], document: Mapping[str, Any]) -> str:
    """Which hosts are not those that the run was begun with, and in what; a few of them."""
    old, new = ({host["name"]: host for host in plan["hosts"]} for plan in (there, document))
    found = [f"{name} is new" for name in new if name not in old] + [
        f"{name} is left out" for name in old if name not in new
    ]
    for name in filter(old.__contains__, new):
        keys = sorted(key for key in {*old[name], *new[name]} if old[name].get(key) != new[name].get(key))
        found += [f"{name}: other {', '.join(keys)}"] if keys else []
    more = [f"and {len(found) - 3} more"] if len(found) > 3 else []
    return f" ({'; '.join(found[:3] + more)})" if found else ""
