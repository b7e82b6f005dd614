"""Slow copies of GPUs with confidential computing are a matter of configuration."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from fleet.judge.confidential_compute import MODE, TEXT, with_confidential_compute
from fleet.judge.criteria import read_packs
from fleet.judge.evidence import Evidence
from fleet.judge.judge import judge
from schemas.records import Metric
from schemas.reports import FAIL, Verdict
from tests import builders
from tests.unit.fleet.judge.small_fleet import FAILED, host_view, one_figure_plan

PLAN = builders.plan("h1", gpu_count=2, rackproof_gang="none")
PACKS = read_packs([])


def failures(name: str, value: Any, mode: Any, of: str = "gpu", **readings: Any) -> list[Verdict]:
    """Return the failures of the figure `name` on h1, whose GPUs have this mode (None: not reported) and these readings.

    The figure has the value in the scopes that begin with `of`.
    """
    metrics = () if mode is None else (Metric(name=MODE, unit="1", values={"host": mode}),)
    (record,) = builders.evidence(PLAN)["h1"].records
    snapshots = tuple(
        replace(item, metrics=(*(metric for metric in item.metrics if metric.name != MODE), *metrics))
        for item in (
            builders.snapshot(range(2), stage=each.stage, phase=each.phase, **readings) for each in record.snapshots
        )
    )
    observations = tuple(
        replace(each, value=value) if each.name == name and each.scope.startswith(of) else each
        for each in record.observations
    )
    changed = Evidence(records=(replace(record, snapshots=snapshots, observations=observations),))
    return [item for item in judge(PLAN, {"h1": changed}, PACKS) if item.verdict == FAIL and item.name == name]


COLLECTIVE = "collective.all_gather.busbw"
SLOW = {"host_copy.bandwidth": 9e9, "peer_copy.bandwidth": 9e9, "peer_copy.access": False}


@pytest.mark.parametrize("name", SLOW)
def test_figure_that_the_mode_may_lower_names_the_mode_and_the_action_configure(name: str) -> None:
    verdicts = failures(name, SLOW[name], True)
    assert verdicts
    for verdict in verdicts:
        assert (verdict.action, TEXT in verdict.reason, TEXT in verdict.detail) == ("configure", True, True)


@pytest.mark.parametrize("mode", [False, None])
@pytest.mark.parametrize("name", SLOW)
def test_figure_blames_the_hardware_if_the_mode_is_off_or_unknown(name: str, mode: bool | None) -> None:
    verdicts = failures(name, SLOW[name], mode)
    assert verdicts
    for verdict in verdicts:
        assert verdict.action in ("reseat", "inspect_hardware")
        assert TEXT not in verdict.reason


@pytest.mark.parametrize("name", SLOW)
def test_action_stays_the_same_if_a_link_is_bad(name: str) -> None:
    verdicts = failures(name, SLOW[name], True, gpu__pcie__width=8)
    assert verdicts
    for verdict in verdicts:
        assert verdict.action in ("reseat", "inspect_hardware")
        assert TEXT in verdict.reason


@pytest.mark.parametrize("name", SLOW)
def test_action_stays_the_same_if_another_gpu_with_the_mode_meets_the_limit(name: str) -> None:
    """The mode is the same for all GPUs of a host. So it does not explain that only GPU 1 fails."""
    verdicts = failures(name, SLOW[name], True, of="gpu=1")
    assert {verdict.scope.partition(",")[0] for verdict in verdicts} == {"gpu=1"}
    for verdict in verdicts:
        assert verdict.action in ("reseat", "inspect_hardware")


@pytest.mark.parametrize(("others", "action"), [(True, "inspect_hardware"), (False, "configure")])
def test_host_that_is_slower_than_others_with_the_same_mode_is_not_explained_by_it(others: bool, action: str) -> None:
    hosts = ("h1", "h2", "h3", "h4")
    plan = builders.plan(*hosts, gpu_count=2, rackproof_gang="none")
    evidence = {}
    for host, whole in builders.evidence(plan).items():
        (record,) = whole.records
        mode = Metric(name=MODE, unit="1", values={"host": host == "h1" or others})
        snapshots = tuple(
            replace(item, metrics=(*(metric for metric in item.metrics if metric.name != MODE), mode))
            for item in record.snapshots
        )
        slow = host == "h1"
        figures = tuple(
            replace(item, value=0.85 * float(item.value or 0)) if slow and item.name == COLLECTIVE else item
            for item in record.observations
        )
        evidence[host] = Evidence(records=(replace(record, snapshots=snapshots, observations=figures),))
    result = [
        item for item in judge(plan, evidence, PACKS) if item.criterion == "busbw-vs-fleet" and item.verdict == FAIL
    ]
    assert {item.host for item in result} == {"h1"}
    assert {item.action for item in result} == {action}


@pytest.mark.parametrize(
    ("name", "value"), [("gemm.throughput", 1e12), ("memory.bandwidth", 1e12), ("integrity.wrong_words", 7)]
)
def test_compute_and_wrong_results_do_not_depend_on_the_mode(name: str, value: float) -> None:
    verdicts = failures(name, value, True)
    assert verdicts
    assert not [item for item in verdicts if item.action == "configure" or TEXT in item.reason]


@pytest.mark.parametrize("name", ["pageable_copy.bandwidth", "checkpoint.read_rate", "collective.all_reduce.busbw"])
def test_every_figure_of_copies_or_peer_access_is_explained(name: str) -> None:
    view = host_view(one_figure_plan(), "h1", Metric(name=MODE, unit="1", values={"host": True}))
    failed = replace(FAILED, name=name, operator="ge", action="reseat")
    explained = with_confidential_compute(view, failed, [failed])
    assert (explained.action, explained.detail) == ("configure", TEXT)
    passed = replace(failed, verdict="pass")
    assert with_confidential_compute(view, passed, [passed]) is passed
