"""Judge a run, for the commands `report`, `judge`, `baseline accept`, `sign`, `verify` and `history`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from fleet.criteria_lint.checked_packs import checked_packs
from fleet.inventory.waivers_file import with_waiver_files
from fleet.judge.criteria import Pack, located_packs
from fleet.records.load import Run, load
from fleet.report.run_report import report_of
from schemas.reports import ACCEPTED, INCOMPLETE, REJECTED, FleetReport

EXIT_CODES = {ACCEPTED: 0, REJECTED: 1, INCOMPLETE: 2}
"""Decision of a report -> exit code of `rackproof report`, `judge` and `revalidate`."""


def load_run(run_dir: Path, criteria: Sequence[str], waivers: Sequence[str] = ()) -> tuple[Run, Sequence[Pack]]:
    """Return a run and its criteria packs: the shipped packs, those in the plan, and `criteria`.

    Args:
        run_dir: the directory of the run.
        criteria: names or files of additional packs, and files in place of those that the plan names (`located_packs`).
        waivers: waiver files, whose waivers are added to those in the plan.
    """
    run = with_waiver_files(load(run_dir), waivers)
    return run, checked_packs(located_packs(run.plan.criteria, criteria).values())


def judge_run(run_dir: Path, criteria: Sequence[str], waivers: Sequence[str] = ()) -> tuple[Run, FleetReport]:
    """Return a run and its report. The arguments are those of `load_run`."""
    run, packs = load_run(run_dir, criteria, waivers)
    return run, report_of(run, packs)


def judge_report(run_dir: Path, criteria: Sequence[str], waivers: Sequence[str] = ()) -> FleetReport:
    """Return the report of a run. The arguments are those of `load_run`."""
    return judge_run(run_dir, criteria, waivers)[1]
