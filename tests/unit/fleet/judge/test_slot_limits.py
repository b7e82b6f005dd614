"""A PCIe link that fails has the action `reseat`, or `configure` if reseating cannot help.

Reseating cannot help if the slot allows no more, or if all GPUs in virtual machines have equally few lanes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pytest

from fleet.judge.criteria import VsBaseline, read_packs
from fleet.judge.evidence import Evidence
from fleet.judge.judge import judge
from fleet.judge.slot_limits import REMEDY, LaneCounts, with_slot_limit
from schemas.records import Metric, Snapshot
from schemas.reports import FAIL, SEVERITY
from tests import builders
from tests.unit.fleet.judge.small_fleet import FAILED, criterion, host_view, one_figure_plan, pack

PACKS = read_packs(())
PLAN = builders.plan("h1", profile="smoke", gpu_count=2, rackproof_gang="none")


def with_link(snapshot: Snapshot, name: str, value: int, supported: int | None) -> Snapshot:
    """Return the snapshot with a reading of the link of GPU 1, and with the value that GPU 1 and its slot support."""
    metrics = []
    for metric in snapshot.metrics:
        if metric.name == name:
            metric = replace(metric, values={**metric.values, "gpu=1": value})
        if metric.name == f"{name}_max":
            left = {scope: each for scope, each in metric.values.items() if scope != "gpu=1"}
            absent = {**metric.absent, "gpu=1": "unsupported: Not Supported"}
            metric = replace(
                metric,
                values=left if supported is None else left | {"gpu=1": supported},
                absent=absent if supported is None else {},
            )
        metrics.append(metric)
    return replace(snapshot, metrics=tuple(metrics))


@pytest.mark.parametrize(
    ("name", "value", "supported", "action"),
    [
        ("gpu.pcie.width", 8, 8, "configure"),
        ("gpu.pcie.width", 8, 16, "reseat"),
        ("gpu.pcie.width", 8, None, "reseat"),
        ("gpu.pcie.width", 4, 8, "reseat"),
        ("gpu.pcie.generation", 4, 4, "configure"),
        ("gpu.pcie.generation", 3, 5, "reseat"),
    ],
)
def test_action_is_configure_only_if_the_link_is_as_fast_as_its_slot_allows(
    name: str, value: int, supported: int | None, action: str
) -> None:
    evidence = builders.evidence(PLAN)
    records = tuple(
        replace(record, snapshots=tuple(with_link(item, name, value, supported) for item in record.snapshots))
        for record in evidence["h1"].records
    )
    evidence["h1"] = replace(evidence["h1"], records=records)
    verdicts = judge(PLAN, evidence, PACKS)
    (verdict,) = [item for item in verdicts if item.name == name and item.verdict == FAIL]
    assert (verdict.scope, verdict.action, verdict.severity) == ("gpu=1", action, SEVERITY[action])
    assert verdict.reason.endswith(REMEDY) == (action == "configure")


def actions(plan_hosts: Mapping[str, tuple[int, ...]], *, virtual: bool = True) -> dict[str, str]:
    """Return `HOST GPU` -> action, for each GPU that fails because of its lanes; `plan_hosts`: host -> lanes of its GPUs."""
    count = len(next(iter(plan_hosts.values())))
    plan = builders.plan(*plan_hosts, profile="smoke", gpu_count=count, rackproof_gang="none")
    evidence = builders.evidence(plan)
    machine = Metric(name="host.virtual_machine", unit="1", values={"host": virtual})
    for host, lanes in plan_hosts.items():
        values = {f"gpu={index}": number for index, number in enumerate(lanes)}
        (record,) = evidence[host].records
        snapshots = [
            builders.snapshot(range(count), stage=item.stage, phase=item.phase, gpu__pcie__width=values)
            for item in record.snapshots
        ]
        with_kind = tuple(replace(item, metrics=(*item.metrics, machine)) for item in snapshots)
        evidence[host] = Evidence(records=(replace(record, snapshots=with_kind),))
    verdicts = judge(plan, evidence, PACKS)
    return {
        f"{item.host} {item.scope}": item.action
        for item in verdicts
        if item.name == "gpu.pcie.width" and item.verdict == FAIL
    }


@pytest.mark.parametrize("hosts", [{"h1": (8,)}, {"h1": (8, 8)}, {"h1": (8, 8), "h2": (8, 8)}], ids=str)
def test_action_is_configure_if_all_gpus_in_virtual_machines_have_equally_few_lanes(
    hosts: dict[str, tuple[int, ...]],
) -> None:
    assert set(actions(hosts).values()) == {"configure"}
    assert set(actions(hosts, virtual=False).values()) == {"reseat"}


@pytest.mark.parametrize("hosts", [{"h1": (8, 16)}, {"h1": (8, 4)}, {"h1": (8, 8), "h2": (16, 16)}], ids=str)
def test_failing_gpus_are_reseated_if_their_numbers_of_lanes_differ(hosts: dict[str, tuple[int, ...]]) -> None:
    assert set(actions(hosts).values()) == {"reseat"}


@pytest.mark.parametrize(("had_more", "action"), [(True, "reseat"), (False, "configure")])
def test_gpu_of_a_virtual_machine_with_fewer_lanes_than_in_its_accepted_record_is_reseated(
    had_more: bool, action: str
) -> None:
    metrics = (
        Metric(name="host.virtual_machine", unit="1", values={"host": True}),
        Metric(name="gpu.pcie.width", unit="1", values={"gpu=0": 8}),
    )
    of_datasheet = criterion("gpu.pcie.width", id="sheet", value=16)
    of_record = criterion("gpu.pcie.width", id="record", operator="ge", value=None, baseline=VsBaseline(fraction=1.0))
    view = host_view(one_figure_plan(), "h1", *metrics, packs=[pack(of_datasheet, of_record)])
    lanes = LaneCounts()
    lanes.add(view)
    failed = [
        replace(FAILED, scope="gpu=0", name="gpu.pcie.width", criterion=item, value=8, action="reseat")
        for item in (("sheet", "record") if had_more else ("sheet",))
    ]
    assert {with_slot_limit(view, item, failed, lanes).action for item in failed} == {action}


def test_lanes_of_several_hosts_are_merged() -> None:
    counts = []
    for width in (8, 8, 4):
        count = LaneCounts()
        machine = Metric(name="host.virtual_machine", unit="1", values={"host": True})
        lanes = Metric(name="gpu.pcie.width", unit="1", values={"gpu=0": width})
        count.add(host_view(one_figure_plan(), "h1", machine, lanes))
        counts.append(count)
    assert counts[0].are_equal("NVIDIA H200")
    counts[0].update(counts[1])
    assert counts[0].are_equal("NVIDIA H200")
    counts[0].update(counts[2])
    assert not counts[0].are_equal("NVIDIA H200")
    assert not counts[0].are_equal("NVIDIA H100")
