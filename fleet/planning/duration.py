"""Estimate how long a run takes per host, from earlier runs of the hosts or from the catalogue."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from fleet.planning.history import history
from fleet.planning.test_selection import PastRun
from schemas.durations import END_S, START_S, expected_durations, stage_s
from schemas.plans import Plan, Stage
from schemas.stages import GANG
from schemas.times import format_span

_MAX_RUNS = 3
"""Number of earlier runs to read, the newest first; reading one takes up to a second."""


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """How long a run takes per host."""

    stages_s: dict[str, float]
    """Stage -> its expected duration in seconds, including start and end of the ranks; empty if any duration is unknown."""
    longest_s: float
    """Seconds after which all stages have reached their deadlines."""
    source: str
    """Where the times are from, in words."""

    def __str__(self) -> str:
        longest = f"at most {format_span(self.longest_s)} by its deadlines"
        if not self.stages_s:
            return f"{longest}; {self.source}"
        stages = ", ".join(f"{stage} {format_span(seconds)}" for stage, seconds in self.stages_s.items())
        return f"about {format_span(sum(self.stages_s.values()))} per host ({stages}), {longest}; {self.source}"


def past_run(plan: Plan, runs: Path, excluded: Path | None) -> PastRun | None:
    """Return the newest run in `runs` with the same profile, at least one common host, and recorded times.

    Return None if none of the newest _MAX_RUNS runs is such a run.
    """
    hosts = {host.name for host in plan.hosts}
    newest = islice(history(runs, hosts, rehearsal=plan.rehearsal, excluded=excluded), _MAX_RUNS)
    return next((run for run in newest if run.profile == plan.profile and run.cost_s), None)


def earlier_durations(plan: Plan, past: PastRun | None) -> dict[str, dict[str, float]]:
    """Return `Plan.durations_s`: the seconds of those benchmarks that had the same settings in an earlier run.

    Empty if the largest number of devices of a host differs between the plan and that run.
    """
    if past is None or past.devices != max(len(host.devices) for host in plan.hosts):
        return {}
    durations = {
        stage.name: {
            name: round(past.cost_s[(stage.name, name)], 3)
            for name, chosen in stage.benchmarks.items()
            if (stage.name, name) in past.cost_s and past.settings.get((stage.name, name)) == chosen
        }
        for stage in plan.stages
    }
    return {stage: times for stage, times in durations.items() if times}


def estimate_duration(plan: Plan, past: PastRun | None) -> Estimate:
    """Return how long a run of the plan takes per host. All hosts are measured at once, and later all gangs at once.

    Args:
        plan: the plan, with the times of the earlier run.
        past: the earlier run, to name it; None: there is none, or it is not known here.
    """
    longest_s = sum(stage.longest_s for stage in plan.stages)
    stages_s = {
        stage.name: stage.duration_s + END_S + START_S if stage.duration_s else _slowest_s(plan, stage)
        for stage in plan.stages
    }
    if not all(stages_s.values()):
        return Estimate(
            stages_s={}, longest_s=longest_s, source="no earlier run of this profile has measured the times"
        )
    run = f"run {past.run_id}" if past else "an earlier run"
    source = f"times of {run}" if plan.durations_s else "times of the catalogue of benchmarks"
    return Estimate(stages_s=stages_s, longest_s=longest_s, source=source)


def _slowest_s(plan: Plan, stage: Stage) -> float:
    """Return the seconds of a stage on the slowest host; 0 if the times are unknown."""
    kinds = {
        (len(host.devices), host.gang if stage.name == GANG else "", host.infiniband_ports, host.verbs_required): host
        for host in plan.hosts
    }
    durations = [expected_durations(plan, host, stage) for host in kinds.values()]
    return max(stage_s(times) if times else 0.0 for times in durations)
