"""Check that the hosts of a multi-node launch report overlapping times for it."""

from __future__ import annotations

import bisect
from collections.abc import Iterator, Mapping

from fleet.judge.evidence import Evidence
from fleet.judge.localization.launches import FINISHED, Attempt, gang_attempts
from fleet.judge.reading_consistency import CLOCK_TOLERANCE_S
from schemas.plans import Plan
from schemas.reports import INCONCLUSIVE, Verdict, VerdictKind
from schemas.stages import GANG
from schemas.times import epoch_seconds


def separate_launches(plan: Plan, evidence: Mapping[str, Evidence]) -> Iterator[Verdict]:
    """Yield a verdict on each host that reports a launch at a time at which no other host reports this launch.

    The hosts of a launch wait for each other, so their times overlap. A host whose clock is wrong, or whose record is of another
    launch, reports other times.
    """
    for gang in plan.gangs() if any(stage.name == GANG for stage in plan.stages) else ():
        for attempt in gang_attempts(plan, evidence, gang):
            if not attempt.number:
                continue  # launches without a number cannot be matched
            for host in _hosts_without_overlap(attempt):
                launch = attempt.launches[host]
                yield Verdict(
                    host=host,
                    scope=f"gang={gang}",
                    name=f"stage.{attempt.stage}",
                    stage=attempt.stage,
                    verdict=INCONCLUSIVE,
                    criterion="plan",
                    kind=VerdictKind.CONTRADICTORY,
                    reason=f"launch {attempt.number} began at {launch.began} and took {launch.duration_s:.0f} s, but no other "
                    "host ran it at that time: the record is of another launch, or the clock of the host is wrong",
                    source="plan",
                )


def _hosts_without_overlap(attempt: Attempt) -> list[str]:
    """Return the hosts whose finished launch does not overlap in time with that of any other host."""
    times: dict[str, tuple[float, float]] = {}
    for host, launch in attempt.launches.items():
        try:
            began = epoch_seconds(launch.began)
        except ValueError:  # `consistency` reports invalid times
            continue
        if launch.outcome == FINISHED:
            times[host] = began, began + launch.duration_s
    if len(times) < 2:
        return []
    begins, ends = sorted(began for began, _ in times.values()), sorted(ended for _, ended in times.values())
    return [
        host
        for host, (began, ended) in times.items()
        # Count the hosts that began before this host ended, minus those that ended before this host began. This host counts, too.
        if bisect.bisect_right(begins, ended + CLOCK_TOLERANCE_S) - bisect.bisect_left(ends, began - CLOCK_TOLERANCE_S)
        <= 1
    ]
