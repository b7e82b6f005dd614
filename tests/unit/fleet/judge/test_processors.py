"""Figures that are slow because the agent could not use all processors of its host do not blame the host."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pytest

from fleet.judge.criteria import read_packs
from fleet.judge.evidence import Evidence
from fleet.judge.judge import judge
from fleet.judge.processors import COUNT, ONLINE, USABLE
from fleet.report.merge import merge
from schemas.records import Metric
from schemas.reports import FAIL, Verdict
from tests import builders

PACKS = read_packs(())
HOSTS = tuple(f"h{number}" for number in range(1, 6))
PLAN = builders.plan(*HOSTS, rackproof_gang="none", rackproof_host_memory_gbyteps=300)
SLOW = {
    "dataloader.sufficiency": 0.1,
    "dataloader.throughput": 500.0,
    "host_memory.total_bandwidth": 5e10,
    "host_compute.throughput": 2e11,
    "checkpoint.save_time": 1e9,
    "host_memory.nodes": 1,
}


def evidence(readings: Mapping[str, int], figures: Mapping[str, object]) -> dict[str, Evidence]:
    """Return the evidence of a healthy fleet, with these readings in each snapshot of h1, and these figures of h1."""
    added = tuple(Metric(name=name, unit="1", values={"host": value}) for name, value in readings.items())
    fleet = builders.evidence(PLAN)
    records = []
    for record in fleet["h1"].records:
        snapshots = tuple(replace(each, metrics=(*each.metrics, *added)) for each in record.snapshots)
        observations = tuple(replace(each, value=figures.get(each.name, each.value)) for each in record.observations)
        records.append(replace(record, snapshots=snapshots, observations=observations))
    return {**fleet, "h1": Evidence(records=tuple(records))}


def failures(readings: Mapping[str, int], figures: Mapping[str, object]) -> list[Verdict]:
    verdicts = judge(PLAN, evidence(readings, figures), PACKS)
    return [item for item in verdicts if item.verdict == FAIL and item.host == "h1" and item.name in figures]


LIMITS = {
    "cpuset": {ONLINE: 192, COUNT: 16, USABLE: 16},
    "cpuset, in a record without the reading of usable processors": {ONLINE: 192, COUNT: 16},
    "quota or isolated processors": {ONLINE: 192, COUNT: 192, USABLE: 16},
}


@pytest.mark.parametrize("limit", LIMITS)
def test_slow_figures_of_an_agent_with_few_processors_name_their_number(limit: str) -> None:
    verdicts = failures(LIMITS[limit], SLOW)
    assert {verdict.name for verdict in verdicts} == {*SLOW}
    for verdict in verdicts:
        assert verdict.action == "configure"
        assert "16 of the 192 processors" in verdict.reason


@pytest.mark.parametrize(
    "readings",
    [{}, {ONLINE: 192}, {COUNT: 16}, {ONLINE: 192, COUNT: 192}, {ONLINE: 192, COUNT: 192, USABLE: 192}],
    ids=str,
)
def test_slow_figures_blame_the_host_if_no_reading_shows_fewer_processors(readings: Mapping[str, int]) -> None:
    verdicts = failures(readings, SLOW)
    assert {verdict.name for verdict in verdicts} == {*SLOW}
    assert {verdict.action for verdict in verdicts} == {"inspect_hardware"}


@pytest.mark.parametrize("limit", LIMITS)
def test_wrong_results_and_slow_gpus_are_faults_in_spite_of_few_processors(limit: str) -> None:
    figures = {"host_compute.wrong_elements": 3, "integrity.wrong_words": 3, "gemm.throughput": 1e12}
    verdicts = failures(LIMITS[limit], figures)
    assert {verdict.name for verdict in verdicts} == {*figures}
    assert "configure" not in {verdict.action for verdict in verdicts}


def test_limit_that_leaves_most_processors_usable_explains_no_slow_figure() -> None:
    figures = {name: value for name, value in SLOW.items() if name != "host_memory.nodes"}
    verdicts = failures({ONLINE: 192, COUNT: 184, USABLE: 184}, figures)
    assert {verdict.name for verdict in verdicts} == {*figures}
    assert {verdict.action for verdict in verdicts} == {"inspect_hardware"}


def test_fewer_than_two_processors_per_gpu_explain_every_low_speed() -> None:
    verdicts = failures({ONLINE: 192, COUNT: 192, USABLE: 3}, {"training.throughput": 1.0, "gemm.throughput": 1e12})
    assert {verdict.action for verdict in verdicts} == {"configure"}


@pytest.mark.parametrize("limit", LIMITS)
def test_limited_processors_are_a_caveat_of_the_report(limit: str) -> None:
    report = merge(PLAN, evidence(LIMITS[limit], {}), PACKS)
    (text,) = [line.text for line in report.acceptance.lines if line.title == "Processors limited"]
    assert text.endswith("h1 (16 of 192)")


def test_host_whose_agent_could_use_all_processors_has_no_caveat() -> None:
    report = merge(PLAN, evidence({ONLINE: 192, COUNT: 192, USABLE: 192}, {}), PACKS)
    assert not [line for line in report.acceptance.lines if line.title == "Processors limited"]
