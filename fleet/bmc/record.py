"""The record of one BMC in the run directory: a snapshot for each reading. It has the same format as a host's record."""

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
MAX_SNAPSHOTS = 250
"""Maximum number of snapshots; the newest are kept. The schema of records allows 256.

If all snapshots of a stage are dropped, the judge reports that the stage has no reading."""


def read_record(directory: Path, plan: Plan, host: str) -> Record | None:
    """Return the record of a BMC; None if there is none, or if it is damaged or of another run."""
    path = RunDirectory(directory).bmc_record(host)
    with contextlib.suppress(documents.DocumentError):
        record = record_from_json(documents.read(path, "record"), source=str(path))
        if (record.run_id, record.nonce, record.host) == (plan.run_id, plan.nonce, host):
            return record
    return None


def is_damaged(directory: Path, host: str) -> bool:
    """Return whether the record of a BMC exists but cannot be read. A new record would hide that the old readings are lost."""
    path = RunDirectory(directory).bmc_record(host)
    try:
        record_from_json(documents.read(path, "record"), source=str(path))
    except documents.DocumentError:
        return os.path.lexists(path)
    return False


def marks(record: Record | None) -> dict[str, str] | None:
    """Return scope of each event log -> mark of its newest entry at the last reading; None if no reading has succeeded yet."""
    readable = [taken for taken in record.snapshots if is_readable(taken)] if record else []
    newest = (metric for taken in readable for metric in taken.metrics if metric.name == NEWEST)
    return {scope: str(value) for metric in newest for scope, value in metric.values.items()} if readable else None


def is_readable(taken: Snapshot) -> bool:
    """Return whether the BMC could be read."""
    return any(metric.name == READABLE and metric.values for metric in taken.metrics)


def add_snapshot(directory: Path, plan: Plan, host: str, taken: Snapshot) -> Record:
    """Add a reading to the record of a BMC, atomically, and return the record.

    A reading that succeeds replaces failed ones of the same stage and phase, so that a resumed run can complete them.
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
