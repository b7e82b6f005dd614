"""A PCIe link that is as fast as its slot allows is a matter of configuration; a link below that is a bad contact."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fleet.judge.criteria import read_packs
from fleet.judge.judge import judge
from fleet.judge.slot_limits import REMEDY
from schemas.records import Snapshot
from schemas.reports import FAIL, SEVERITY
from tests import builders

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
