"""A host gets an inconclusive verdict if the times of a launch in its record differ from those in the records of all other hosts.

They differ if more than 300 s (`CLOCK_TOLERANCE_S`) are between the end of the launch on one host and its start on the other.
Each launch in these tests takes 1 s.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime, timedelta

import pytest

from fleet.judge.evidence import Evidence
from fleet.judge.launch_times import separate_launches
from schemas.plans import Plan
from schemas.reports import INCONCLUSIVE, VerdictKind
from schemas.times import epoch_seconds
from tests import builders


def moved(text: str, seconds: float) -> str:
    return (datetime.fromisoformat(text) + timedelta(seconds=seconds)).strftime("%Y-%m-%dT%H:%M:%SZ")


def hosts_with_verdicts(delays: Sequence[float], number: int = 1, outcome: str = "finished") -> list[str]:
    """Return the hosts that get a verdict. `delays`: for each host, by how many seconds the start of its launch is moved."""
    plan = builders.plan(*(f"h{index}" for index in range(1, len(delays) + 1)), profile="smoke", gpu_count=1)
    evidence = {}
    for (host, of_host), delay in zip(builders.evidence(plan).items(), delays, strict=True):
        host_record, gang_record = of_host.records
        launches = tuple(
            replace(item, number=number, outcome=outcome, began=moved(item.began, delay))
            for item in gang_record.launches
        )
        evidence[host] = Evidence(records=(host_record, replace(gang_record, launches=launches)))
    verdicts = list(separate_launches(plan, evidence))
    assert {item.verdict for item in verdicts} <= {INCONCLUSIVE}
    return [item.host for item in verdicts]


YEARS = 10 * 365 * 86400


@pytest.mark.parametrize(
    ("delays", "expected"),
    [
        ((0, 0, 0), []),
        ((0, 200, -200), []),
        ((0, YEARS, 0), ["h2"]),
        ((0, 0, -YEARS), ["h3"]),
        ((0, 302, 0), ["h2"]),
        ((0, 300, 0), []),
        ((0, YEARS), ["h1", "h2"]),
        ((0, 0, YEARS, YEARS), []),  # two hosts report each of the two times, so either may be right
        ((0, 250, 500, 750), []),  # each host reports about the same time as the next one
    ],
)
def test_host_gets_a_verdict_if_no_other_host_reports_the_launch_at_the_same_time(
    delays: Sequence[float], expected: list[str]
) -> None:
    assert hosts_with_verdicts(delays) == expected


def test_launches_that_failed_or_have_no_number_are_not_compared() -> None:
    assert hosts_with_verdicts((0, YEARS), outcome="failed") == []
    assert hosts_with_verdicts((0, YEARS), number=0) == []


def test_moved_time_can_be_parsed() -> None:
    assert epoch_seconds(moved(builders.WHEN, 5)) == epoch_seconds(builders.WHEN) + 5


def two_hosts(profile: str = "smoke") -> tuple[Plan, dict[str, Evidence]]:
    """Return the plan and the evidence of two hosts that report the same launch with start times ten years apart."""
    plan = builders.plan("h1", "h2", profile=profile, gpu_count=1)
    evidence = {}
    for (host, of_host), delay in zip(builders.evidence(plan).items(), (0, YEARS), strict=True):
        host_record, gang_record = of_host.records
        launches = tuple(replace(item, number=1, began=moved(item.began, delay)) for item in gang_record.launches)
        evidence[host] = Evidence(records=(host_record, replace(gang_record, launches=launches)))
    return plan, evidence


def test_verdict_names_the_launch_and_has_the_kind_contradictory() -> None:
    first, _ = separate_launches(*two_hosts())
    assert (first.criterion, first.source, first.kind) == ("plan", "plan", VerdictKind.CONTRADICTORY)
    assert (first.name, first.stage, first.scope) == ("stage.gang", "gang", "gang=r1")
    assert first.reason.startswith(
        f"launch 1 began at {builders.WHEN} and took 1 s, but no other host ran it at that time"
    )


def test_nothing_is_compared_without_a_gang_stage() -> None:
    plan, evidence = two_hosts()
    stages = tuple(stage for stage in plan.stages if stage.name != "gang")
    assert stages
    assert list(separate_launches(replace(plan, stages=stages), evidence)) == []


def test_launch_with_an_invalid_time_is_not_compared() -> None:
    plan, evidence = two_hosts()
    host_record, gang_record = evidence["h1"].records
    launches = tuple(replace(item, began="yesterday") for item in gang_record.launches)
    evidence["h1"] = Evidence(records=(host_record, replace(gang_record, launches=launches)))
    assert list(separate_launches(plan, evidence)) == []
