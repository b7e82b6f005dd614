"""Estimate how long a run takes per host, from earlier runs of the hosts or from the catalogue."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from fleet.judge.drift import format_span
from fleet.planning.history import history
from fleet.planning.test_selection import START_S, UNKNOWN_COST_S, PastRun
from schemas.catalogue import BENCHMARKS
from schemas.plans import Plan

CATALOGUE_PROFILE = "standard"
"""Profile of the times in the catalogue."""
_MAX_RUNS = 3
"""Number of earlier runs to read, the newest first; reading one takes up to a second."""


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """How long a run takes per host."""

    stages_s: dict[str, float]
    """Stage -> its expected duration in seconds, including the start of the ranks; empty if no times are known."""
    longest_s: float
    """Time after which all stages have reached their deadlines."""
    source: str
    """Where the times are from, in words."""

    def __str__(self) -> str:
        longest = f"at most {format_span(self.longest_s)} by its deadlines"
        if not self.stages_s:
            return f"{longest}; {self.source}"
        stages = ", ".join(f"{stage} {format_span(seconds)}" for stage, seconds in self.stages_s.items())
        return f"about {format_span(sum(self.stages_s.values()))} per host ({stages}), {longest}; {self.source}"


def past_run(plan: Plan, runs: Path, excluded: Path | None) -> PastRun | None:
    """Return the newest run in `runs` with the same profile, a common host and recorded times.

    None if none of the newest _MAX_RUNS runs has these.
    """
    hosts = {host.name for host in plan.hosts}
    newest = islice(history(runs, hosts, rehearsal=plan.rehearsal, excluded=excluded), _MAX_RUNS)
    return next((run for run in newest if run.profile == plan.profile and run.cost_s), None)


def estimate_duration(plan: Plan, past: PastRun | None) -> Estimate:
    """Return how long a run of the plan takes per host. Hosts, and gangs, are measured in parallel.

    Args:
        plan: the plan.
        past: an earlier run of the same profile; None: the times in the catalogue are used.
    """
    longest_s = sum(stage.longest_s for stage in plan.stages)
    if past is None and plan.rehearsal:
        return Estimate(
            stages_s={}, longest_s=longest_s, source="no earlier run of this profile has measured the times"
        )
    costs = past.cost_s if past else {}
    stages_s = {
        stage.name: START_S
        + (stage.duration_s or sum(costs.get((stage.name, name), _default_s(name)) for name in stage.benchmarks))
        for stage in plan.stages
    }
    other = "" if plan.profile == CATALOGUE_PROFILE else "; the tests of this profile may take a different time"
    source = f"times of run {past.run_id}" if past else f"times of profile {CATALOGUE_PROFILE} on four GPUs{other}"
    return Estimate(stages_s=stages_s, longest_s=longest_s, source=source)


def _default_s(name: str) -> float:
    return BENCHMARKS[name].cost_s if name in BENCHMARKS else UNKNOWN_COST_S
