"""A missing reading is inconclusive if at least half of the parts of the same kind have it, or if every host must have it.

A part is a GPU, a host or a part of a host, such as a port. Among other things, parts of the same kind have the same GPU model
and driver.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace

import pytest

from fleet.judge.criteria import read_packs
from fleet.judge.evidence import Evidence, Planned
from fleet.judge.gather import gather
from fleet.judge.judge import host_views, judge
from fleet.judge.reading_support import PATHS, ReadingSupport
from schemas.plans import Plan
from schemas.records import UNSUPPORTED, Metric, Record, Snapshot
from schemas.reports import INCONCLUSIVE, Verdict
from tests import builders

PACKS = read_packs([])
PLAN = builders.plan("h1", "h2", "h3", profile="smoke", gpu_count=2)
NAME, REASON = "gpu.recovery_action", "unsupported: not on this GPU"
GPUS = ("gpu=0", "gpu=1")


def with_metric(name: str, change: Callable[[Metric], Metric]) -> Callable[[Record], Record]:
    """Return a change of a record that applies `change` to the reading `name` in every snapshot."""

    def changed(record: Record) -> Record:
        snapshots = (
            replace(taken, metrics=tuple(change(item) if item.name == name else item for item in taken.metrics))
            for taken in record.snapshots
        )
        return replace(record, snapshots=tuple(snapshots))

    return changed


def fleet(unsupported: dict[str, Collection[str]], name: str = NAME, of: Plan = PLAN) -> dict[str, Evidence]:
    """Return a healthy fleet whose GPUs have the reading `name`, except those in `unsupported` (host -> GPUs)."""

    def evidence_of(host: str, evidence: Evidence) -> Evidence:
        without = unsupported.get(host, ())
        values = {scope: "none" for scope in GPUS if scope not in without}
        change = with_metric(name, lambda item: replace(item, values=values, absent=dict.fromkeys(without, REASON)))
        return replace(evidence, records=tuple(map(change, evidence.records)))

    return {host: evidence_of(host, evidence) for host, evidence in builders.evidence(of).items()}


def verdicts(evidence: dict[str, Evidence], name: str = NAME, of: Plan = PLAN) -> list[Verdict]:
    return [item for item in judge(of, evidence, PACKS) if item.name == name and item.verdict == INCONCLUSIVE]


@pytest.mark.parametrize(
    "unsupported",
    [{"h2": ("gpu=1",)}, {"h2": GPUS}, {"h2": GPUS, "h3": ("gpu=0",)}],
    ids=["one GPU", "all GPUs of a host", "half of the GPUs"],
)
def test_reading_that_at_least_half_of_the_gpus_of_the_same_kind_have_is_required(
    unsupported: dict[str, Collection[str]],
) -> None:
    result = verdicts(fleet(unsupported))
    assert {(item.host, item.scope) for item in result} == {
        (host, gpu) for host, gpus in unsupported.items() for gpu in gpus
    }
    count = 6 - sum(map(len, unsupported.values()))
    reason = f"{REASON}; {count} of 6 GPUs of this model with the same driver have this reading"
    assert {(item.reason, item.kind) for item in result} == {(reason, UNSUPPORTED)}


def test_reading_that_less_than_half_of_the_gpus_of_the_same_kind_have_is_optional() -> None:
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


def test_gpu_without_active_nvlinks_may_lack_readings_of_nvlinks() -> None:
    name = "gpu.nvlink.recoveries"
    assert len(verdicts(fleet({"h2": GPUS}, name), name)) == 2
    evidence = fleet({"h2": GPUS}, name)
    change = with_metric("gpu.nvlink.active_links", lambda item: replace(item, values=dict.fromkeys(GPUS, 0)))
    evidence["h2"] = replace(evidence["h2"], records=tuple(map(change, evidence["h2"].records)))
    assert verdicts(evidence, name) == []


PAIRS = ("gpu=0,peer=1", "gpu=1,peer=0")


def without_paths(hosts: Collection[str], pairs: Collection[str], *, reported: bool) -> dict[str, Evidence]:
    """Return a healthy fleet in which these hosts lack the path of these pairs of GPUs: unsupported, or not reported at all."""

    def lacking(metric: Metric) -> Metric:
        values = {pair: path for pair, path in metric.values.items() if pair not in pairs}
        return replace(metric, values=values, absent=dict.fromkeys(pairs, REASON) if reported else {})

    return {
        host: replace(evidence, records=tuple(map(with_metric(PATHS, lacking), evidence.records)))
        if host in hosts
        else evidence
        for host, evidence in builders.evidence(PLAN).items()
    }


@pytest.mark.parametrize("reported", [True, False])
def test_path_between_gpus_is_required_if_most_hosts_report_it(reported: bool) -> None:
    """The paths decide which hosts are compared. Without them, a slow collective would be compared with nothing."""
    result = verdicts(without_paths(["h2"], PAIRS, reported=reported), PATHS)
    assert {(item.host, item.scope) for item in result} == {("h2", pair) for pair in PAIRS}
    assert verdicts(without_paths(["h1", "h2", "h3"], PAIRS, reported=reported), PATHS) == []
    assert verdicts(without_paths(["h2"], PAIRS[:1], reported=reported), PATHS) == [], "the other GPU reports the path"


def test_path_to_a_gpu_that_the_driver_does_not_list_is_not_required() -> None:
    evidence = without_paths(["h2"], PAIRS, reported=False)
    lost = (replace(item, gpus=item.gpus[:1]) for item in evidence["h2"].records)
    assert verdicts(evidence | {"h2": replace(evidence["h2"], records=tuple(lost))}, PATHS) == []


def test_counts_of_hosts_can_be_merged() -> None:
    views = host_views(PLAN, fleet({"h2": ("gpu=1",)}), PACKS)
    merged = ReadingSupport()
    for view in views:
        merged.update(gather(Planned(PLAN), [view]).support)
    assert [item.scope for item in merged.judge(views[1])] == ["gpu=1"]
    assert not [item for view in (views[0], views[2]) for item in merged.judge(view)]


PORTS = ("hca=mlx5_0,port=1", "hca=mlx5_1,port=1")
READINGS_OF_PORTS = {"infiniband.state": "ACTIVE", "infiniband.symbol_error": 0}


def fleet_with_ports(change: Callable[[Metric], Metric | None], of: Plan = PLAN) -> dict[str, Evidence]:
    """Return a healthy fleet whose hosts have two ports. `change` is applied to each metric of h2; None removes the metric."""

    def metrics(host: str, taken: Snapshot) -> Iterator[Metric]:
        others = [item for item in taken.metrics if item.name not in READINGS_OF_PORTS]
        ports = [
            Metric(name=name, unit="1", values=dict.fromkeys(PORTS, value)) for name, value in READINGS_OF_PORTS.items()
        ]
        for metric in (*others, *ports):
            changed = change(metric) if host == "h2" else metric
            if changed is not None:
                yield changed

    def changed(record: Record) -> Record:
        snapshots = tuple(replace(taken, metrics=tuple(metrics(record.host, taken))) for taken in record.snapshots)
        return replace(record, snapshots=snapshots)

    return {
        host: replace(evidence, records=tuple(map(changed, evidence.records)))
        for host, evidence in builders.evidence(of).items()
    }


def unsupported(name: str, *scopes: str) -> Callable[[Metric], Metric]:
    """Return a change that makes a reading unsupported in these scopes; if none are given, in all its scopes."""

    def change(metric: Metric) -> Metric:
        if metric.name != name:
            return metric
        lacking = scopes or (*metric.values, *metric.absent)
        values = {scope: value for scope, value in metric.values.items() if scope not in lacking}
        return replace(metric, values=values, absent={**metric.absent, **dict.fromkeys(lacking, REASON)})

    return change


def removed(name: str, *scopes: str) -> Callable[[Metric], Metric | None]:
    """Return a change that removes the values in these scopes; if none are given, the whole reading."""

    def change(metric: Metric) -> Metric | None:
        if metric.name != name:
            return metric
        values = {scope: value for scope, value in metric.values.items() if scope not in scopes}
        return replace(metric, values=values) if scopes else None

    return change


COUNTER = "infiniband.symbol_error"


@pytest.mark.parametrize(
    ("change", "name", "scopes", "reason"),
    [
        (
            unsupported(COUNTER),
            COUNTER,
            PORTS,
            f"{REASON}; 2 of 3 hosts with the same GPUs, driver and gang have this reading",
        ),
        (
            unsupported(COUNTER, PORTS[1]),
            COUNTER,
            PORTS[1:],
            f"{REASON}; 2 of 3 hosts with the same GPUs, driver and gang have this reading",
        ),
        (
            removed(COUNTER),
            COUNTER,
            PORTS,
            "missing; 2 of 3 hosts with the same GPUs, driver and gang have this reading",
        ),
        (
            removed(COUNTER, PORTS[0]),
            COUNTER,
            PORTS[:1],
            "missing; 2 of 3 hosts with the same GPUs, driver and gang have this reading",
        ),
        (
            removed("infiniband.state"),
            "infiniband.state",
            ("host",),
            "missing; 2 of 3 hosts with the same GPUs, driver and gang have this reading",
        ),
        (
            unsupported("clock.synchronized"),
            "clock.synchronized",
            ("host",),
            f"{REASON}; 2 of 3 hosts with the same GPUs, driver and gang have this reading",
        ),
    ],
)
def test_reading_that_most_hosts_of_the_same_kind_have_is_required(
    change: Callable[[Metric], Metric | None], name: str, scopes: Sequence[str], reason: str
) -> None:
    result = [item for item in verdicts(fleet_with_ports(change), name) if item.kind == UNSUPPORTED]
    assert {(item.host, item.scope, item.reason) for item in result} == {("h2", scope, reason) for scope in scopes}


def test_reading_that_less_than_half_of_the_hosts_of_the_same_kind_have_is_optional() -> None:
    plan = builders.plan("h2", "h3", "h4", profile="smoke", gpu_count=2)
    evidence = fleet_with_ports(lambda metric: metric, plan)
    for host in ("h3", "h4"):
        change = with_metric(COUNTER, unsupported(COUNTER))
        evidence[host] = replace(evidence[host], records=tuple(map(change, evidence[host].records)))
    assert [item for item in verdicts(evidence, COUNTER, plan) if item.kind == UNSUPPORTED] == []


@pytest.mark.parametrize("name", ["storage.state.read_only", "clock.synchronized"])
@pytest.mark.parametrize("change", [unsupported, removed])
def test_reading_that_every_host_must_have_is_required_even_of_a_single_host(
    name: str, change: Callable[[str], Callable[[Metric], Metric | None]]
) -> None:
    alone = builders.plan("h2", profile="smoke", gpu_count=2, rackproof_gang="none")
    assert verdicts(fleet_with_ports(lambda metric: metric, alone), name, alone) == []
    reasons = [item.reason for item in verdicts(fleet_with_ports(change(name), alone), name, alone)]
    assert any(reason.endswith("; every host must have this reading") for reason in reasons)


def test_clock_synchronization_may_be_unsupported_on_a_virtual_machine() -> None:
    """The hypervisor may set the clock of a virtual machine."""
    alone = builders.plan("h2", profile="smoke", gpu_count=2, rackproof_gang="none")

    def virtual(metric: Metric) -> Metric:
        if metric.name == "host.virtual_machine":
            return replace(metric, values={"host": True}, absent={})
        return unsupported("clock.synchronized")(metric)

    assert verdicts(fleet_with_ports(virtual, alone), "clock.synchronized", alone) == []
