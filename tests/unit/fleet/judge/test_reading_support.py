"""Test that a reading of a GPU that is unsupported, although GPUs of its kind have it, is missing evidence."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import replace

import pytest

from fleet.judge.criteria import read_packs
from fleet.judge.evidence import Evidence, Planned
from fleet.judge.gather import gather
from fleet.judge.judge import host_views, judge
from fleet.judge.reading_support import ReadingSupport
from schemas.plans import Plan
from schemas.records import UNSUPPORTED, Metric, Record
from schemas.reports import INCONCLUSIVE, Verdict
from tests import builders

PACKS = read_packs([])
PLAN = builders.plan("h1", "h2", "h3", profile="smoke", gpu_count=2)
NAME, REASON = "gpu.recovery_action", "unsupported: not on this GPU"
GPUS = ("gpu=0", "gpu=1")


def with_metric(name: str, change: Callable[[Metric], Metric]) -> Callable[[Record], Record]:
    def changed(record: Record) -> Record:
        snapshots = (
            replace(taken, metrics=tuple(change(item) if item.name == name else item for item in taken.metrics))
            for taken in record.snapshots
        )
        return replace(record, snapshots=tuple(snapshots))

    return changed


def fleet(lacking: dict[str, Collection[str]], name: str = NAME, of: Plan = PLAN) -> dict[str, Evidence]:
    """Return a healthy fleet whose GPUs have the reading, except those in `lacking` (host -> GPUs)."""

    def evidence_of(host: str, evidence: Evidence) -> Evidence:
        without = lacking.get(host, ())
        values = {scope: "none" for scope in GPUS if scope not in without}
        change = with_metric(name, lambda item: replace(item, values=values, absent=dict.fromkeys(without, REASON)))
        return replace(evidence, records=tuple(map(change, evidence.records)))

    return {host: evidence_of(host, evidence) for host, evidence in builders.evidence(of).items()}


def verdicts(evidence: dict[str, Evidence], name: str = NAME, of: Plan = PLAN) -> list[Verdict]:
    return [item for item in judge(of, evidence, PACKS) if item.name == name and item.verdict == INCONCLUSIVE]


@pytest.mark.parametrize(
    "lacking",
    [{"h2": ("gpu=1",)}, {"h2": GPUS}, {"h2": GPUS, "h3": ("gpu=0",)}],
    ids=["one GPU", "all GPUs of a host", "half of the GPUs"],
)
def test_reading_that_most_gpus_of_the_kind_have_is_required(lacking: dict[str, Collection[str]]) -> None:
    found = verdicts(fleet(lacking))
    assert {(item.host, item.scope) for item in found} == {
        (host, gpu) for host, gpus in lacking.items() for gpu in gpus
    }
    count = 6 - sum(map(len, lacking.values()))
    reason = f"{REASON}; {count} of 6 GPUs of this model with the same driver have this reading"
    assert {(item.reason, item.kind) for item in found} == {(reason, UNSUPPORTED)}


def test_reading_that_few_gpus_of_the_kind_have_is_optional() -> None:
    assert verdicts(fleet({"h1": ("gpu=0",), "h2": GPUS, "h3": GPUS})) == []
    assert verdicts(fleet(dict.fromkeys(("h1", "h2", "h3"), GPUS))) == []


def test_gpus_with_another_driver_are_of_another_kind() -> None:
    def with_driver(record: Record, version: str) -> Record:
        driver = Metric(name="driver.version", unit="1", values={"host": version})
        return replace(
            record, snapshots=tuple(replace(taken, metrics=(*taken.metrics, driver)) for taken in record.snapshots)
        )

    def with_drivers(*versions: str) -> dict[str, Evidence]:
        return {
            host: replace(evidence, records=tuple(with_driver(record, version) for record in evidence.records))
            for (host, evidence), version in zip(fleet({"h2": GPUS}).items(), versions, strict=True)
        }

    assert len(verdicts(with_drivers("580.82.07", "580.82.07", "580.82.07"))) == 2
    assert verdicts(with_drivers("580.82.07", "550.54.15", "580.82.07")) == []


def test_gpu_without_a_bridge_may_lack_readings_of_nvlinks() -> None:
    name = "gpu.nvlink.recoveries"
    assert len(verdicts(fleet({"h2": GPUS}, name), name)) == 2
    evidence = fleet({"h2": GPUS}, name)
    change = with_metric("gpu.nvlink.active_links", lambda item: replace(item, values=dict.fromkeys(GPUS, 0)))
    evidence["h2"] = replace(evidence["h2"], records=tuple(map(change, evidence["h2"].records)))
    assert verdicts(evidence, name) == []


def test_counts_of_hosts_can_be_merged() -> None:
    views = host_views(PLAN, fleet({"h2": ("gpu=1",)}), PACKS)
    merged = ReadingSupport()
    for view in views:
        merged.update(gather(Planned(PLAN), [view]).support)
    assert [item.scope for item in merged.judge(views[1])] == ["gpu=1"]
    assert not [item for view in (views[0], views[2]) for item in merged.judge(view)]
