"""Judge the run in a directory: the shared part of `report`, `judge`, `baseline accept`, `sign` and `verify`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from fleet.criteria_lint.checked_packs import checked_packs
from fleet.inventory.waivers_file import with_waiver_files
from fleet.judge.criteria import Pack
from fleet.records.load import Run, load
from fleet.report.run_report import report_of
from schemas.reports import ACCEPTED, INCOMPLETE, REJECTED, FleetReport

EXIT_CODES = {ACCEPTED: 0, REJECTED: 1, INCOMPLETE: 2}
"""Decision -> exit code of the verbs that judge a run."""


def load_run(run_dir: Path, criteria: Sequence[str], waivers: Sequence[str] = ()) -> tuple[Run, Sequence[Pack]]:
    """Return the run in a directory and every pack that may apply to it.

    Args:
        run_dir: the run directory.
        criteria: packs in addition to those of the plan: names or files.
        waivers: waiver files in addition to those of the plan.
    """
    run = with_waiver_files(load(run_dir), waivers)
    return run, checked_packs([*run.plan.criteria, *criteria])


def judge_run(run_dir: Path, criteria: Sequence[str], waivers: Sequence[str] = ()) -> tuple[Run, FleetReport]:
    """Return the run in a directory and its report; arguments as for `load_run`."""
    run, packs = load_run(run_dir, criteria, waivers)
    return run, report_of(run, packs)


def judge_report(run_dir: Path, criteria: Sequence[str], waivers: Sequence[str] = ()) -> FleetReport:
    """Return the report of the run in a directory; arguments as for `load_run`."""
    return judge_run(run_dir, criteria, waivers)[1]
