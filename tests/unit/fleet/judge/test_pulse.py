"""Benchmark `pulse` (a load that pauses in each period): verdicts name a bad GPU, and those on healthy hosts pass."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from fleet.judge.criteria import read_packs
from fleet.judge.evidence import Evidence
from fleet.judge.judge import judge
from fleet.report.merge import merge
from schemas.plans import Plan
from schemas.records import ERROR, UNSUPPORTED, Observation
from schemas.reports import FAIL, INCONCLUSIVE
from tests import builders

HOSTS = ("h1", "h2")
OPTIONAL = (("work_share", "1", 1.0), ("amplitude", "W", 590.0), ("slew", "W/s", 6000.0))
"""Name, unit and healthy value of figures that a record need not have."""


def pulse_plan() -> Plan:
    return builders.with_benchmarks(
        builders.plan(*HOSTS, profile="extended", gpu_count=4), benchmark={"pulse": {"periods_ms": [100, 2000]}}
    )


def healthy(plan: Plan, host: str) -> Evidence:
    """Return the evidence of a healthy host: the planned figures, and those of OPTIONAL."""
    more = tuple(
        builders.observation(f"pulse.{name}", value, scope=f"gpu={gpu}", unit=unit, period_ms=2000)
        for name, unit, value in OPTIONAL
        for gpu in range(4)
    )
    records = builders.records(plan, host)
    return Evidence(records=(replace(records[0], observations=(*records[0].observations, *more)), *records[1:]))


def findings(change: Callable[[str, Observation], Observation]) -> set[tuple[str, str, str, str]]:
    """Return criterion, host, scope and verdict of the pulse verdicts that failed or are inconclusive."""
    plan = pulse_plan()
    evidence = {
        host: builders.with_observations(healthy(plan, host), lambda item, host=host: change(host, item))  # type: ignore[misc]
        for host in HOSTS
    }
    return {
        (item.criterion, item.host, item.scope, item.verdict)
        for item in judge(plan, evidence, read_packs([]))
        if item.verdict in (FAIL, INCONCLUSIVE) and item.name.startswith("pulse.")
    }


def bad(name: str, value: Any, host: str = "h2", gpu: int = 3) -> Callable[[str, Observation], Observation]:
    """Return a change that gives `value` to the figure `name` of a GPU.

    Some figures are measured once for each period of the load. Of these, only the one for the period of 2 s is changed.
    """

    def change(measured_host: str, item: Observation) -> Observation:
        chosen = (measured_host, item.name, item.scope) == (host, f"pulse.{name}", f"gpu={gpu}")
        return replace(item, value=value) if chosen and item.params.get("period_ms", 2000) == 2000 else item

    return change


def test_healthy_hosts_have_no_finding() -> None:
    assert findings(lambda _, item: item) == set()


@pytest.mark.parametrize(
    ("name", "value", "criterion"),
    [
        ("wrong_products", 1, "pulse-wrong-products"),
        ("work_share", 0.87, "pulse-work-siblings"),
        ("work", 870.0, "pulse-work-vs-fleet"),
        ("amplitude", 480.0, "pulse-amplitude-vs-fleet"),
        ("kept_share", 0.5, "pulse-kept"),
    ],
)
def test_bad_gpu_is_named(name: str, value: float, criterion: str) -> None:
    assert findings(bad(name, value)) == {(criterion, "h2", "gpu=3", FAIL)}


@pytest.mark.parametrize(("name", "value"), [("work_share", 0.96), ("work", 960.0), ("amplitude", 560.0)])
def test_usual_differences_between_gpus_pass(name: str, value: float) -> None:
    assert findings(bad(name, value)) == set()


def test_unsupported_amplitude_is_not_a_finding_but_an_error_is() -> None:
    def absent(status: str) -> Callable[[str, Observation], Observation]:
        return lambda host, item: (
            replace(item, status=status, value=None, reason="why")
            if (host, item.name, item.scope) == ("h2", "pulse.amplitude", "gpu=3")
            else item
        )

    assert findings(absent(UNSUPPORTED)) == set()
    assert {item[1:] for item in findings(absent(ERROR))} == {("h2", "gpu=3", INCONCLUSIVE)}


def test_missing_work_is_inconclusive() -> None:
    plan = pulse_plan()
    evidence = {host: healthy(plan, host) for host in HOSTS}
    record, *rest = evidence["h2"].records
    kept = tuple(item for item in record.observations if (item.name, item.scope) != ("pulse.work", "gpu=1"))
    evidence["h2"] = Evidence(records=(replace(record, observations=kept), *rest))
    verdicts = judge(plan, evidence, read_packs([]))
    missing = {
        (item.host, item.scope) for item in verdicts if item.name == "pulse.work" and item.verdict == INCONCLUSIVE
    }
    assert missing == {("h2", "gpu=1")}


def test_cause_names_the_pulsed_load_in_words() -> None:
    plan = pulse_plan()
    evidence = {host: healthy(plan, host) for host in HOSTS}
    change = bad("work_share", 0.7)
    evidence["h2"] = builders.with_observations(evidence["h2"], lambda item: change("h2", item))
    report = merge(plan, evidence, read_packs([]))
    titles = [cause.title for cause in report.causes]
    assert any("pulsed load" in title for title in titles), titles
