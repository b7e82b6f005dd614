"""Compare a run with earlier runs of its hosts, or with their baselines."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from fleet.criteria_lint.checked_packs import checked_packs
from fleet.diff.against_baseline import criteria_of
from fleet.diff.comparison import Comparison, compare
from fleet.judge.criteria import located_packs
from fleet.judge.gpu_identity import shared_serials
from fleet.records import baseline_store
from fleet.records.host_state import HostState, accepted_state, host_state, merge_states
from fleet.records.load import Run, load
from schemas.errors import RunError, UsageError
from schemas.run_directory import is_run


@dataclass(frozen=True, kw_only=True)
class RunComparison:
    """A run, what it was compared with, and the result."""

    run: Run
    earlier: str
    """What the run was compared with, as text: `run r1`, `runs r1, r2` or `baseline DIRECTORY`."""
    comparison: Comparison


def compare_runs(earlier: Sequence[Path], last: Path, criteria: Sequence[str]) -> RunComparison:
    """Compare the run in `last` with earlier runs, or with the one directory of baselines in `earlier`.

    Raises:
        RunError: nothing can be compared, the baseline of a part is invalid, or the runs are of different kinds (`gpu`,
            `rehearsal`, `simulated`).
        UsageError: a run is given twice, or the criteria are invalid.
    """
    run = load(last)
    old, name = _earlier_states(earlier, run)
    shared = {host: state.shared for host, state in old.items()}
    new = {host: host_state(evidence, shared.get(host, frozenset())) for host, evidence in run.evidence.items()}
    packs = checked_packs(located_packs(run.plan.criteria, criteria).values())
    by_host = {host.name: criteria_of(run.plan, host, run.evidence[host.name], packs) for host in run.plan.hosts}
    comparison = compare(old, new, by_host)
    if not comparison.compared:
        raise RunError(f"{last}: no host, part and figure in common with {name}: give runs of the same hosts")
    return RunComparison(run=run, earlier=name, comparison=comparison)


def _earlier_states(directories: Sequence[Path], run: Run) -> tuple[Mapping[str, HostState], str]:
    """Return the earlier state of each host, and its source as text."""
    first, kind = directories[0], baseline_store.kind_of(run.plan)
    has_plan = is_run(first)
    if len(directories) == 1 and not has_plan and baseline_store.kind_directory(first, kind).is_dir():
        return _accepted_states(first, kind, run), f"baseline {first}"
    runs = [load(directory) for directory in directories]
    nonces = {run.plan.nonce}
    for earlier in runs:
        other = baseline_store.kind_of(earlier.plan)
        if other != kind:
            raise RunError(
                f"run {earlier.plan.run_id} is of kind {other}, but the new run is of kind {kind}: give runs of one kind "
                "(gpu: a run that tests GPUs; rehearsal; simulated)"
            )
        if earlier.plan.nonce in nonces:
            raise UsageError(f"run {earlier.plan.run_id} is given twice: comparing it with itself would show no change")
        nonces.add(earlier.plan.nonce)
    states = {}
    for host in dict.fromkeys(host for earlier in runs for host in earlier.evidence):
        of_host = [other.evidence[host] for other in (*runs, run) if host in other.evidence]
        shared = frozenset[str]().union(*(shared_serials(evidence.gpus()) for evidence in of_host))
        states[host] = merge_states(
            [host_state(earlier.evidence[host], shared) for earlier in runs if host in earlier.evidence]
        )
    names = ", ".join(earlier.plan.run_id for earlier in runs)
    return states, f"run {names}" if len(runs) == 1 else f"runs {names}"


def _accepted_states(directory: Path, kind: str, run: Run) -> dict[str, HostState]:
    baselines = {
        host.name: baseline_store.of_host(directory, kind, host.name, run.evidence[host.name].gpus())
        for host in run.plan.hosts
    }
    for problem in (baseline.problem for baseline in baselines.values() if baseline.problem):
        raise RunError(f"{problem}: remove the file, or accept a run of that host or GPU again")
    return {host: accepted_state(baseline, run.evidence[host].gpus()) for host, baseline in baselines.items()}
