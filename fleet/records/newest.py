"""Choose the newest run for commands that are given no run."""

from __future__ import annotations

import sys
from pathlib import Path

from schemas import documents
from schemas.errors import UsageError
from schemas.plans import Plan
from schemas.run_directory import PLAN_BYTES, RunDirectory, runs_in
from schemas.times import epoch_seconds

RUNS = Path("runs")
"""Directory in which playbooks and `rackproof run` create run directories."""


def run_or_newest(run_dir: Path | None) -> Path:
    """Return `run_dir`, or the newest run in RUNS if `run_dir` is None. In that case, print the path of the run to stderr.

    Raises:
        UsageError: `run_dir` is None, and there is no run in RUNS.
    """
    if run_dir is not None:
        return run_dir
    runs = newest_first(RUNS)
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
    runs = newest_first(RUNS)
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


def newest_first(directory: Path) -> list[Path]:
    """Return the runs in `directory`, newest first, by the time `created` in the plan, then by name.

    The times of files are not used, because a copy may change their order. Only a run whose plan cannot be read is sorted by the
    time of the plan's file. If it is the newest run, the command reports the damaged plan.
    """
    return sorted(runs_in(directory), key=lambda run: (_created(run), run.name), reverse=True)


def _created(run: Path) -> float:
    path = RunDirectory(run).plan
    try:
        text = documents.read_bytes(path, max_bytes=PLAN_BYTES)
        return epoch_seconds(documents.parse(text, source=str(path), max_bytes=PLAN_BYTES)["created"])
    except (documents.DocumentError, AttributeError, LookupError, TypeError, ValueError):
        return path.stat().st_mtime


def _read_plan(run: Path) -> Plan | None:
    try:
        return RunDirectory(run).read_plan()
    except documents.DocumentError:
        return None


def _hosts_and_kind(plan: Plan) -> tuple[object, ...]:
    return plan.simulated, plan.rehearsal, frozenset(host.name for host in plan.hosts)
