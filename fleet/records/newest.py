"""Choose the newest run for commands that are given no run."""

from __future__ import annotations

import sys
from pathlib import Path

from schemas import documents
from schemas.errors import UsageError
from schemas.plans import Plan
from schemas.run_directory import RunDirectory, runs_in

RUNS = Path("runs")
"""Directory in which playbooks and `rackproof run` create run directories."""


def run_or_newest(run_dir: Path | None) -> Path:
    """Return `run_dir`, or the newest run in RUNS if `run_dir` is None. In that case, print the path of the run to stderr.

    Raises:
        UsageError: `run_dir` is None, and there is no run in RUNS.
    """
    if run_dir is not None:
        return run_dir
    runs = _newest_first()
    if not runs:
        raise UsageError(
            f"no run in {RUNS.absolute()}: give the directory of a run, or change to the directory that has {RUNS}/"
        )
    sys.stderr.write(f"rackproof: newest run: {runs[0]}\n")
    return runs[0]


def newest_two() -> tuple[Path, Path]:
    """Return two runs in RUNS: the last earlier run that is comparable with the newest run, and the newest run.

    Comparable runs have the same hosts and are both real, both rehearsals or both simulations. Print the paths of the two runs to
    stderr.

    Raises:
        UsageError: RUNS has no run, the plan of the newest run is not readable, or no earlier run is comparable with it.
    """
    runs = _newest_first()
    newest = _read_plan(runs[0]) if runs else None
    for earlier in runs[1:]:
        plan = _read_plan(earlier)
        if newest and plan and _hosts_and_kind(plan) == _hosts_and_kind(newest):
            sys.stderr.write(f"rackproof: newest runs of the same hosts: {earlier} and {runs[0]}\n")
            return earlier, runs[0]
    problem = f"no run in {RUNS.absolute()}"
    if runs:
        problem = (
            f"no earlier run has the same hosts and kind (real, rehearsal or simulation) as {runs[0]}"
            if newest
            else f"the plan of {runs[0]} is not readable"
        )
    raise UsageError(f"diff: {problem}: give an earlier run, or a directory of baselines, and the new run")


def _newest_first() -> list[Path]:
    """Return the runs in RUNS, newest first, by the time at which the plan was written."""
    return sorted(runs_in(RUNS), key=lambda run: (RunDirectory(run).plan.stat().st_mtime_ns, run.name), reverse=True)


def _read_plan(run: Path) -> Plan | None:
    try:
        return RunDirectory(run).read_plan()
    except documents.DocumentError:
        return None


def _hosts_and_kind(plan: Plan) -> tuple[object, ...]:
    return plan.simulated, plan.rehearsal, frozenset(host.name for host in plan.hosts)
