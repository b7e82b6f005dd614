"""Add the run of a report to the history that the operator configured.

This changes neither the report nor the exit code of the command.
"""

from __future__ import annotations

from pathlib import Path

from fleet.history.rows import run_rows
from fleet.history.store import add_run
from fleet.records.load import Run
from schemas.reports import FleetReport


def feed_history(directory: Path, run: Run, report: FleetReport, unread: str = "") -> list[str]:
    """Add a judged run to the history; return warnings and notes, one line each. Raises nothing.

    Args:
        directory: the history.
        run: the run.
        report: its report.
        unread: the message of `with_history`, which may be empty. It is returned with the notes, but only if the run is added.
    """
    try:
        notes, _ = add_run(directory, run_rows(run, report))
    except Exception as error:  # noqa: BLE001 - an error in the history must not prevent the report
        reason = " ".join(str(error).split()) or type(error).__name__
        return [
            f"warning: the run was not added to the history: {reason}. The report is complete. "
            f"Add it later: rackproof history import {run.directory} --history {directory}"
        ]
    return [*([unread] if unread else []), *(f"note: history: {note}" for note in notes)]
