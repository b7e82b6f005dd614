"""The record of one BMC in the run directory: like a host's record, with one snapshot for each attempt to read the BMC."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from fleet.bmc.readings import READABLE
from schemas import VERSION, documents
from schemas.decode import record_from_json
from schemas.plans import Plan
from schemas.records import Record, Snapshot, to_json
from schemas.run_directory import RunDirectory

NEWEST = "bmc.log.newest"
"""Reading with the mark (ID and time) of the newest entry of an event log."""
MAX_SNAPSHOTS = 250
"""Maximum number of snapshots in a record; the oldest are dropped. The schema of records allows 256.

If all snapshots of a stage are dropped, the judge reports that the BMC was not read in this stage."""


def read_record(directory: Path, plan: Plan, host: str) -> Record | None:
    """Return the record of a BMC; None if there is no record, or if the record is damaged or of another run."""
    path = RunDirectory(directory).bmc_record(host)
    with contextlib.suppress(documents.DocumentError):
        record = record_from_json(documents.read(path, "record"), source=str(path))
        if (record.run_id, record.nonce, record.host) == (plan.run_id, plan.nonce, host):
            return record
    return None


def is_damaged(directory: Path, host: str) -> bool:
    """Return whether the record of a BMC exists but cannot be read.

    Such a record must not be replaced by a new one, which would hide that earlier snapshots are lost.
    """
    path = RunDirectory(directory).bmc_record(host)
    try:
        record_from_json(documents.read(path, "record"), source=str(path))
    except documents.DocumentError:
        return os.path.lexists(path)
    return False


def marks(record: Record | None) -> dict[str, str] | None:
    """Return scope of each event log -> mark of its newest entry when it was last read; None if the BMC was never read."""
    readable = [taken for taken in record.snapshots if is_readable(taken)] if record else []
    newest = (metric for taken in readable for metric in taken.metrics if metric.name == NEWEST)
    return {scope: str(value) for metric in newest for scope, value in metric.values.items()} if readable else None


def is_readable(taken: Snapshot) -> bool:
    """Return whether the BMC could be read when the snapshot was taken."""
    return any(metric.name == READABLE and metric.values for metric in taken.metrics)


def add_snapshot(directory: Path, plan: Plan, host: str, taken: Snapshot) -> Record:
    """Add a snapshot to the record of a BMC, atomically, and return the record.

    If the BMC could be read, the snapshot replaces those of failed attempts in the same stage and phase, so that a resumed run
    can complete the record.
    """
    record = read_record(directory, plan, host)
    kept: Sequence[Snapshot] = record.snapshots if record else ()
    if is_readable(taken):
        same = (taken.stage, taken.phase)
        kept = [item for item in kept if is_readable(item) or (item.stage, item.phase) != same]
    base = record or Record(
        run_id=plan.run_id, nonce=plan.nonce, host=host, began=taken.at, ended=taken.at, rackproof=VERSION
    )
    changed = replace(base, ended=taken.at, snapshots=(*kept, taken)[-MAX_SNAPSHOTS:])
    documents.write(RunDirectory(directory).bmc_record(host), to_json(changed))
    return changed
