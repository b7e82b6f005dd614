"""A GPU that was slow while another process used it is not called faulty. A GPU with wrong results is always called faulty."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from fleet.judge import judge
from fleet.judge.criteria import read_packs
from fleet.judge.evidence import Evidence
from fleet.judge.reboots import BOOT_ID
from fleet.records.load import load
from schemas.plans import Plan
from schemas.records import Metric, Record
from schemas.reports import FAIL, Verdict
from tests import ROOT

RUN = load(ROOT / "docs" / "measurements" / "h200x2-slowed-0.2")
"""A measured run in which another process used GPU 0 and slowed it down."""
[HOST] = RUN.plan.hosts


def verdicts(plan: Plan = RUN.plan, change: Callable[[Record], Record] = lambda record: record) -> list[Verdict]:
    """Return the failed verdicts on RUN, with `change` applied to its records."""
    evidence = RUN.evidence[HOST.name]
    changed: dict[str, Evidence] = {
        HOST.name: replace(evidence, records=tuple(change(record) for record in evidence.records))
    }
    failed = [verdict for verdict in judge.judge(plan, changed, read_packs([])) if verdict.verdict == FAIL]
    assert failed
    return failed


def with_processes(count: int) -> Callable[[Record], Record]:
    """Return a change after which each GPU has `count` processes in every snapshot outside of the launches."""

    def metric(item: Metric) -> Metric:
        return replace(item, values=dict.fromkeys(item.values, count)) if item.name == "gpu.processes" else item

    def change(record: Record) -> Record:
        snapshots = tuple(
            replace(each, metrics=tuple(map(metric, each.metrics))) if each.phase != "during" else each
            for each in record.snapshots
        )
        return replace(record, snapshots=snapshots)

    return change


def test_gpu_that_was_slow_with_another_process_must_be_measured_again() -> None:
    for verdict in verdicts():
        assert (verdict.part_scope, verdict.action) == ("gpu=0", "configure")
        assert (
            "another process used gpu=0, which rackproof_share_gpus allows: end that process, and measure again"
            in verdict.detail
        )


@pytest.mark.parametrize("reason", ["sharing not allowed", "no process on the GPU"])
def test_slow_gpu_is_faulty_if_sharing_is_not_allowed_or_no_other_process_used_it(reason: str) -> None:
    plan = replace(RUN.plan, hosts=(replace(HOST, share_gpus=False),)) if reason == "sharing not allowed" else RUN.plan
    for verdict in verdicts(plan, with_processes(0 if reason == "no process on the GPU" else 1)):
        assert verdict.action != "configure"
        assert "another process" not in verdict.reason


@pytest.mark.parametrize("stage", ["benchmark", "gang"])
def test_slow_gpu_is_not_faulty_if_another_process_started_during_the_stage(stage: str) -> None:
    def change(record: Record) -> Record:
        launches = tuple(
            replace(launch, other_processes={"gpu=0": "process 4711 (train)"} if launch.stage == stage else {})
            for launch in record.launches
        )
        return replace(with_processes(0)(record), launches=launches)

    plan = replace(RUN.plan, hosts=(replace(HOST, share_gpus=False),))
    for verdict in verdicts(plan, change):
        is_excused = verdict.stage == stage
        assert (verdict.action == "configure") is is_excused
        text = "process 4711 (train) used gpu=0: end that process, and measure again"
        assert (text in verdict.detail) is is_excused


def test_gpu_that_is_slow_with_all_partners_is_not_faulty_if_another_process_used_it() -> None:
    run = load(ROOT / "docs" / "measurements" / "h200x4-four-hosts")

    def changed(record: Record, *, is_used: bool) -> Record:
        """Return the record of a host of its own machine, in a gang in which all pairs with host2 are slow."""
        observations = tuple(
            replace(each, value=each.value * 0.1)
            if isinstance(each.value, float)
            and each.name == "pairs.bandwidth"
            and "host2" in (record.host, each.scope.rpartition("=")[2])
            else each
            for each in record.observations
        )
        snapshots = tuple(
            replace(each, metrics=tuple(item for item in each.metrics if item.name != BOOT_ID))
            for each in record.snapshots
        )
        used = {"gpu=1": "process 4711 (train)"} if is_used and record.host == "host2" else {}
        launches = tuple(replace(each, other_processes=used) for each in record.launches)
        return replace(record, observations=observations, snapshots=snapshots, launches=launches)

    for is_used in (False, True):
        evidence = {
            host: replace(each, records=tuple(changed(record, is_used=is_used) for record in each.records))
            for host, each in run.evidence.items()
        }
        [verdict] = [
            each
            for each in judge.judge(run.plan, evidence, read_packs([]))
            if (each.verdict, each.name) == (FAIL, "pairs.bandwidth")
        ]
        assert (verdict.host, verdict.part_scope) == ("host2", "host")
        assert verdict.action == ("configure" if is_used else "inspect_hardware")


def test_wrong_result_is_a_fault_of_the_gpu_even_with_another_process() -> None:
    def change(record: Record) -> Record:
        observations = tuple(
            replace(each, value=3) if (each.name, each.scope) == ("stress.wrong_products", "gpu=0") else each
            for each in record.observations
        )
        return replace(record, observations=observations)

    [verdict] = [each for each in verdicts(change=change) if each.name == "stress.wrong_products"]
    assert verdict.action == "inspect_hardware"
    assert "another process" not in verdict.reason
