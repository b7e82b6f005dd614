"""Begin a run in its directory, or resume an interrupted one: acquire the lock, then write or read the plan."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from fleet.records import run_lock
from schemas import documents
from schemas.errors import RunError, UsageError
from schemas.run_directory import PLAN_BYTES, RunDirectory


def begin(directory: Path, document: dict[str, object], take_over: bool = False) -> dict[str, object]:
    """Write the plan of a new run and return it; for an interrupted run, return the plan that it began with.

    Args:
        directory: the directory of the run.
        document: the plan that the present inventory and profile give.
        take_over: take the lock even from a process on another machine, whose state cannot be checked from here.

    Raises:
        UsageError: the plan is invalid, or differs from the plan that the run began with.
        RunError: the plan in the directory is damaged, or the disk is full.
        HeldError: another process holds the run, or the run belongs to another user.
        OSError: a file cannot be written.
    """
    path = RunDirectory(directory).plan
    try:
        documents.validate(document, "plan", source="the plan")
    except documents.DocumentError as error:
        raise UsageError(str(error)) from None
    holder = run_lock.holder(directory)
    if (not holder or holder.is_running() is False) and os.access(path, os.R_OK):
        # Refuse a different plan before `acquire` changes files of the run. This is skipped if the run is locked or its plan is
        # not readable, because the message of `acquire` is then better.
        _existing_plan(path, document)
    with _named_directory(directory):
        note = run_lock.acquire(directory, take_over=take_over)
    if note:
        print(note, file=sys.stderr)
    if plan := _existing_plan(path, document):
        return plan
    with _named_directory(directory):
        documents.write(path, document, mode=documents.SECRET)  # it contains the nonce
    return document


def _existing_plan(path: Path, document: Mapping[str, object]) -> dict[str, object] | None:
    """Return the plan that the run began with; None if the directory has no plan yet.

    Raises:
        RunError: the plan is damaged.
        UsageError: the plan differs from `document`.
    """
    if not path.exists():
        return None
    try:
        plan = documents.read(path, "plan", max_bytes=PLAN_BYTES)
    except documents.DocumentError as error:
        raise RunError(
            f"{error}: the plan is damaged or was written by another version of Rackproof: choose another rackproof_run_id"
        ) from None
    # The excluded fields may differ each time a plan is made: `durations_s` comes from the newest runs, and `rackproof plan` may
    # begin a run that a playbook resumes.
    compared = {*document, *plan} - {"nonce", "created", "durations_s", "begun_by"}
    different = sorted(key for key in compared if plan.get(key) != document.get(key))
    if different:
        raise UsageError(
            f"run {document['run_id']} was begun with other values of {', '.join(different)}{_host_differences(plan, document)}: "
            "choose another rackproof_run_id, or restore the inventory and profile that the run began with"
        )
    return dict(plan)


@contextlib.contextmanager
def _named_directory(directory: Path) -> Iterator[None]:
    """Convert an OSError that names no file, such as the error of a full disk, to a RunError that names the directory."""
    try:
        yield
    except OSError as error:
        if error.filename:
            raise
        raise RunError(
            f"{directory}: {error.strerror}: free some space, or set rackproof_runs_directory to another path"
        ) from None


def _host_differences(old_plan: Mapping[str, Any], new_plan: Mapping[str, Any]) -> str:
    """Return in words up to three differences between the hosts of two plans; empty if the hosts are the same."""
    old, new = ({host["name"]: host for host in plan["hosts"]} for plan in (old_plan, new_plan))
    differences = [f"{name} is new" for name in new if name not in old]
    differences += [f"{name} is missing" for name in old if name not in new]
    for name in filter(old.__contains__, new):
        keys = sorted(key for key in {*old[name], *new[name]} if old[name].get(key) != new[name].get(key))
        differences += [f"{name} has another value of {', '.join(keys)}"] if keys else []
    more = [f"and {len(differences) - 3} more"] if len(differences) > 3 else []
    return f" ({'; '.join(differences[:3] + more)})" if differences else ""
