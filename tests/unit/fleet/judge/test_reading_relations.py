"""Readings of one host that contradict each other are named."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fleet.judge.criteria import read_packs
from fleet.judge.judge import host_views
from fleet.judge.reading_relations import COUNTS, WHOLES, list_of, relation_problems
from schemas.readings import READINGS
from schemas.records import Metric, Value
from tests import builders

PLAN = builders.plan("h1", "h2", gpu_count=2)
EVIDENCE = builders.evidence(PLAN)
PACKS = read_packs([])
AT = {(): "host", ("gpu",): "gpu=0", ("numa",): "numa=0", ("pci",): "pci=0000:17:00.0", ("mount",): "mount=a"}
"""Labels of a reading -> a scope with these labels."""


def metric(name: str, **values: Value) -> Metric:
    """Return a reading; `gpu_0` stands for the scope `gpu=0`, and `gpu_0__peer_7` for `gpu=0,peer=7`."""
    scopes = {scope.replace("__", ",").replace("_", "="): value for scope, value in values.items()}
    return Metric(name=name, unit=READINGS[name].unit, values=scopes)


def problems(*metrics: Metric) -> list[tuple[str, str, str]]:
    """Return name, scope and reason of the problems of a record whose last snapshot has only these readings."""
    view = host_views(PLAN, EVIDENCE, PACKS)[0]
    record = view.evidence.records[0]
    *others, last = record.snapshots
    changed = replace(record, snapshots=(*others, replace(last, metrics=metrics)))
    return [(name, scope, reason) for name, scope, reason, _ in relation_problems(view, changed)]


CASES: dict[str, tuple[list[Metric], str, str]] = {
    "value of the host for a reading of GPUs": (
        [metric("gpu.power", host=90.0)],
        "host",
        "this is a reading of each gpu",
    ),
    "value of a GPU for a reading of the host": (
        [metric("host.load", gpu_0=1.0)],
        "gpu=0",
        "this is a reading of the host",
    ),
    "GPU that the record does not list": ([metric("gpu.power", gpu_7=90.0)], "gpu=7", "does not list this GPU"),
    "peer that the record does not list": (
        [metric("gpu.peer.link", gpu_0__peer_7="NV18")],
        "gpu=7",
        "does not list this GPU",
    ),
    "link of a GPU with itself": (
        [metric("gpu.peer.link", gpu_0__peer_0="NV18")],
        "gpu=0,peer=0",
        "between a GPU and itself",
    ),
    "adapter that network.operstate does not list": (
        [metric("network.operstate", nic_eth0="up"), metric("network.carrier", nic_eth0=True, nic_eth1=True)],
        "nic=eth1",
        "but network.operstate was not read for it",
    ),
    "PCI device that pcie.kind does not list": (
        [metric("pcie.kind", pci_0="nvme"), metric("pcie.width", pci_1=16)],
        "pci=1",
        "but pcie.kind was not read for it",
    ),
    "reading without a value, of an adapter that network.operstate does not list": (
        [metric("network.operstate", nic_eth0="up"), replace(metric("network.speed"), absent={"nic=eth1": "error: x"})],
        "nic=eth1",
        "but network.operstate was not read for it",
    ),
    "reading without a value, of a GPU that the record does not list": (
        [replace(metric("gpu.fan.speed"), absent={"gpu=7": "unsupported: x"})],
        "gpu=7",
        "the record does not list this GPU",
    ),
    "reading without a value, in a scope of another kind": (
        [replace(metric("clock.source"), absent={"gpu=0": "unsupported: x"})],
        "gpu=0",
        "this is a reading of the host",
    ),
    "more GPUs counted on the bus than pcie.kind lists": (
        [metric("gpu.pci_count", host=3), metric("pcie.kind", pci_0="gpu", pci_1="gpu", pci_2="network")],
        "host",
        "is 3, but pcie.kind lists 2 GPUs",
    ),
    "fewer links read than the GPU has": (
        [metric("gpu.nvlink.link_count", gpu_0=18), metric("gpu.nvlink.active", gpu_0__link_0=True)],
        "gpu=0",
        "gpu.nvlink.active was read for 1 link",
    ),
}


@pytest.mark.parametrize("kind", CASES)
def test_contradiction_is_named(kind: str) -> None:
    metrics, scope, reason = CASES[kind]
    ((_, result, why),) = problems(*metrics)
    assert result == scope
    assert reason in why


@pytest.mark.parametrize("name", COUNTS)
def test_count_that_is_not_the_number_of_parts_is_named(name: str) -> None:
    listing, label = COUNTS[name], READINGS[COUNTS[name]].labels
    scopes = [",".join(f"{each}={number}" for each in label) for number in range(2)]
    parts = Metric(
        name=listing, unit="1", values={scopes[0]: "x"}, absent={scopes[1]: "unsupported: x", "host": "error: x"}
    )
    assert problems(metric(name, host=2), parts) == []
    ((result, scope, why),) = problems(metric(name, host=3), parts)
    assert (result, scope) == (name, "host")
    assert f"{listing} was read for 2" in why


@pytest.mark.parametrize(
    ("between", "is_possible"), [(3, True), (2, True), (0, False), (8, True), (3000, False), (1.5, False)]
)
def test_number_of_disks_may_differ_in_a_snapshot_without_a_list(between: float, is_possible: bool) -> None:
    """The first snapshot lists 3 disks, and the last one lists 1 disk. The second one has no list, only the count `between`.

    Possible counts are the whole numbers from 1 (the shorter list) to 60 (20 times the longer list).
    """
    view = host_views(PLAN, EVIDENCE, PACKS)[0]
    record = view.evidence.records[0]
    counts = (3, between, 1)
    lists = (("a", "b", "c"), (), ("a",))
    snapshots = tuple(
        replace(
            snapshot,
            metrics=(
                metric("storage.disk.count", host=count),
                *([metric("storage.disk.rotational", **{f"disk_{name}": False for name in names})] if names else []),
            ),
        )
        for snapshot, count, names in zip(record.snapshots, counts, lists, strict=True)
    )
    result = [name for name, *_ in relation_problems(view, replace(record, snapshots=snapshots))]
    assert result == ([] if is_possible else ["storage.disk.count"])


@pytest.mark.parametrize("name", WHOLES)
def test_part_larger_than_the_whole_is_named(name: str) -> None:
    scope = AT[READINGS[name].labels]
    listing = list_of(name)
    more = [Metric(name=listing, unit="1", values={scope: 10})] if listing not in ("", name, WHOLES[name]) else []
    if counted := COUNTS.get(WHOLES[name]):
        (label,) = READINGS[counted].labels
        more.append(Metric(name=counted, unit="1", values={f"{label}={number}": True for number in range(10)}))

    def found(value: int) -> list[tuple[str, str, str]]:
        reading = Metric(name=name, unit="1", values={scope: value})
        return problems(reading, Metric(name=WHOLES[name], unit="1", values={scope: 10}), *more)

    assert found(10) == []
    ((which, where, why),) = found(11)
    assert (which, where, why) == (name, scope, f"is 11, but {WHOLES[name]} is 10")
