"""Estimate how long a run takes per host, from an earlier run of the hosts or from the benchmark catalogue."""

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
"""Maximum number of earlier runs to read, the newest first. Reading one run takes up to a second."""


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """How long a run takes per host."""

    stages_s: dict[str, float]
    """Stage -> its expected duration in seconds, including the start and end of its ranks. Empty if the duration of any stage is
    unknown."""
    longest_s: float
    """Maximum duration in seconds: the sum over the stages, if each runs until its deadline."""
    source: str
    """What `stages_s` is estimated from, or why it is empty, in words."""

    def __str__(self) -> str:
        longest = f"at most {format_span(self.longest_s)} (by the deadlines of the stages)"
        if not self.stages_s:
            return f"{longest}; {self.source}"
        stages = ", ".join(f"{stage} {format_span(seconds)}" for stage, seconds in self.stages_s.items())
        return f"about {format_span(sum(self.stages_s.values()))} per host ({stages}), {longest}; {self.source}"


def past_run(plan: Plan, runs: Path, excluded: Path | None) -> PastRun | None:
    """Return the newest earlier run with the profile of the plan and with recorded durations.

    Only the newest _MAX_RUNS runs that measured a host of the plan are considered. None if there is no such run among them.

    Args:
        plan: the plan.
        runs: directory with the directories of earlier runs.
        excluded: directory of a run to leave out.
    """
    hosts = {host.name for host in plan.hosts}
    newest = islice(history(runs, hosts, rehearsal=plan.rehearsal, excluded=excluded), _MAX_RUNS)
    return next((run for run in newest if run.profile == plan.profile and run.cost_s), None)


def earlier_durations(plan: Plan, past: PastRun | None) -> dict[str, dict[str, float]]:
    """Return `Plan.durations_s`: the seconds that benchmarks took in the earlier run `past`.

    Benchmarks that had other settings in that run are left out. The result is empty without an earlier run, or if the largest
    number of devices of a host was different in that run.
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
        plan: the plan. `Plan.durations_s` has the durations from an earlier run.
        past: that earlier run, only to name it; None: there is none, or the caller does not have it.
    """
    longest_s = sum(stage.longest_s for stage in plan.stages)
    stages_s = {
        stage.name: stage.duration_s + END_S + START_S if stage.duration_s else _slowest_s(plan, stage)
        for stage in plan.stages
    }
    if not all(stages_s.values()):
        return Estimate(
            stages_s={}, longest_s=longest_s, source="no earlier run measured how long these benchmarks take"
        )
    run = f"run {past.run_id}" if past else "an earlier run"
    source = f"estimated from the times of {run}" if plan.durations_s else "estimated from the benchmark catalogue"
    return Estimate(stages_s=stages_s, longest_s=longest_s, source=source)


def _slowest_s(plan: Plan, stage: Stage) -> float:
    """Return the expected seconds of a stage on the slowest host; 0 if the durations are unknown."""
    # One host for each combination of what the durations depend on.
    kinds = {
        (len(host.devices), host.gang if stage.name == GANG else "", host.infiniband_ports, host.verbs_required): host
        for host in plan.hosts
    }
    durations = [expected_durations(plan, host, stage) for host in kinds.values()]
    return max(stage_s(times) if times else 0.0 for times in durations)
