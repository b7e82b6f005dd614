"""Rules on the scopes of readings, and on readings that must agree: counts of parts, lists of parts, and upper bounds."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from fleet.judge.reading_relations import list_of, relation_problems
from schemas.readings import READINGS
from schemas.records import Metric, Snapshot
from tests.unit.fleet.judge.small_fleet import host_view, one_figure_plan

PLAN = one_figure_plan("h1", gpu_count=2)


def metric(name: str, values: dict[str, Any], **absent: str) -> Metric:
    return Metric(name=name, unit="1", values=values, absent=absent)


def problems(*snapshots: list[Metric]) -> list[tuple[str, str, str]]:
    """Return name, scope and reason of each problem of a record. Each list of readings becomes a snapshot of the record."""
    shots = tuple(
        Snapshot(
            stage="benchmark", phase="before", at=f"2026-11-21T04:00:0{at}Z", duration_s=0.1, metrics=tuple(metrics)
        )
        for at, metrics in enumerate(snapshots)
    )
    view = host_view(PLAN, snapshots=shots)
    result = list(relation_problems(view, view.evidence.records[0]))
    assert {stage for *_, stage in result} <= {"benchmark"}
    return [(name, scope, reason) for name, scope, reason, _ in result]


def wrong_scope(name: str, scope: str, kind: str) -> tuple[str, str, str]:
    return name, scope, f"read in the scope {scope}, but this is a reading of {kind}"


PORT_KIND = "each port of an RDMA adapter (`hca=NAME,port=NUMBER`) or of an Ethernet interface (`nic=NAME,port=1`)"


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (metric("gpu.power", {"gpu=0": 1}), []),
        (metric("gpu.power", {"gpu=0": 1, "host": 1}), [wrong_scope("gpu.power", "host", "each gpu")]),
        (metric("gpu.power", {"gpu=0": 1}, host="error: no"), []),
        (Metric(name="gpu.power", unit="1", absent={"nic=0": "error: no", "gpu=0": "error: no"}),
         [wrong_scope("gpu.power", "nic=0", "each gpu")]),
        (metric("host.load", {"host": 1}), []),
        (metric("host.load", {"gpu=0": 1}), [wrong_scope("host.load", "gpu=0", "the host")]),
        (metric("collector.duration", {"host": 1}), []),
        (metric("collector.duration", {"gpu=0": 1}), [wrong_scope("collector.duration", "gpu=0", "the host")]),
        (metric("site.thing", {"anywhere=0": 1}), []),
        (metric("gpu.nvlink.crc_errors", {"gpu=0": 1, "gpu=1,link=3": 1}), []),
        (metric("gpu.nvlink.crc_errors", {"host": 1}), [wrong_scope("gpu.nvlink.crc_errors", "host", "each gpu and link")]),
        (metric("port.status", {"nic=eth0,port=1": "x", "hca=mlx5_0,port=2": "x"}), []),
        (metric("port.status", {"nic=eth0,port=2": "x"}), [wrong_scope("port.status", "nic=eth0,port=2", PORT_KIND)]),
        (metric("port.status", {"hca=mlx5_0,port=0": "x"}), [wrong_scope("port.status", "hca=mlx5_0,port=0", PORT_KIND)]),
        (Metric(name="port.status", unit="1", absent={"nic=eth0,port=0": "unsupported: x"}),
         [wrong_scope("port.status", "nic=eth0,port=0", PORT_KIND)]),
        (metric("xid.count", {"xid=79": 1, "pci=0000:01:00.0,xid=79": 1}), []),
    ],
)  # fmt: skip
def test_scope_of_a_reading_must_name_parts_of_the_right_kind(
    given: Metric, expected: list[tuple[str, str, str]]
) -> None:
    assert [item for item in problems([given]) if "read in the scope" in item[2]] == expected


def test_gpu_that_the_record_does_not_list_is_named_once() -> None:
    power = metric("gpu.power", {"gpu=0": 1, "gpu=3": 1, "gpu=2": 1})
    reason = "has readings, but the record does not list this GPU"
    expected = [("gpu.serial", "gpu=2", reason), ("gpu.serial", "gpu=3", reason)]
    assert problems([power], [power]) == expected
    assert problems([metric("gpu.power", {"gpu=3": 1})], [power]) == expected, (
        "GPUs must be in the order of their indexes"
    )


def test_path_of_a_gpu_to_itself_is_named() -> None:
    paths = metric("gpu.peer.link", {"gpu=0,peer=1": "NV18", "gpu=1,peer=1": "X"})
    assert problems([paths]) == [("gpu.peer.link", "gpu=1,peer=1", "read between a GPU and itself")]


@pytest.mark.parametrize(("stated", "is_wrong"), [(2, False), (3, True), (1, True)])
def test_link_count_must_equal_the_number_of_links_that_were_read(stated: int, is_wrong: bool) -> None:
    links = metric("gpu.nvlink.active", {"gpu=0,link=0": True, "gpu=0,link=1": True})
    count = metric("gpu.nvlink.link_count", {"gpu=0": stated, "gpu=1": 18})
    reason = f"is {stated}, but gpu.nvlink.active was read for 2 links"
    assert problems([links, count]) == ([("gpu.nvlink.link_count", "gpu=0", reason)] if is_wrong else [])


NICS = metric("network.operstate", {"nic=eth0": "up", "nic=eth1": "up"})
UUIDS = metric("gpu.uuid", {"gpu=0": "a"})


@pytest.mark.parametrize(
    ("stated", "reason"),
    [(2, ""), (1, "is 1, but gpu.uuid was read for 2 parts"), (3, "is 3, but gpu.uuid was read for 2 parts"),
     ("two", "is two, but gpu.uuid was read for 2 parts")],
)  # fmt: skip
def test_count_includes_parts_without_a_value(stated: Any, reason: str) -> None:
    uuids = Metric(
        name="gpu.uuid", unit="1", values={"gpu=0": "a"}, absent={"gpu=1": "error: lost", "host": "error: x"}
    )
    result = problems([uuids, metric("gpu.count", {"host": stated})])
    assert result == ([("gpu.count", "host", reason)] if reason else [])


@pytest.mark.parametrize(("stated", "is_wrong"), [(1, True), (2, False), (40, False), (41, True)])
def test_count_of_interfaces_may_be_up_to_twenty_times_the_number_in_another_snapshot(
    stated: int, is_wrong: bool
) -> None:
    """The second snapshot has no list of interfaces, so its count is compared with the list of the first snapshot."""
    result = problems([NICS], [metric("network.nic_count", {"host": stated})])
    assert result == (
        [("network.nic_count", "host", f"is {stated}, but network.operstate was read for 2 parts")] if is_wrong else []
    )


@pytest.mark.parametrize(("stated", "is_wrong"), [(0, True), (1, False), (2, False), (3, True)])
def test_gpu_count_must_be_between_the_lowest_and_highest_number_of_gpus_in_other_snapshots(
    stated: int, is_wrong: bool
) -> None:
    two = metric("gpu.uuid", {"gpu=0": "a", "gpu=1": "b"})
    result = problems([UUIDS], [two], [metric("gpu.count", {"host": stated})])
    assert result == (
        [("gpu.count", "host", f"is {stated}, but gpu.uuid was read for 1 or 2 parts")] if is_wrong else []
    )


def test_count_is_checked_only_if_the_parts_and_the_count_were_read() -> None:
    assert problems([metric("gpu.count", {"host": 7})]) == []
    assert problems([UUIDS, Metric(name="gpu.count", unit="1", absent={"host": "error: no"})]) == []


@pytest.mark.parametrize(
    ("used", "total", "expected"),
    [
        ({"gpu=0": 8, "gpu=1": 9}, {"gpu=0": 8, "gpu=1": 9}, []),
        ({"gpu=0": 8.5, "gpu=1": 9}, {"gpu=0": 8, "gpu=1": 9}, [("gpu=0", "is 8.5, but gpu.memory.total is 8")]),
        ({"gpu=0": 9}, {"gpu=1": 8}, []),
        ({"gpu=0": "all", "gpu=1": 9}, {"gpu=0": 8, "gpu=1": 9}, []),
        ({"gpu=0": 9, "gpu=1": 9}, {"gpu=0": "much", "gpu=1": 8}, [("gpu=1", "is 9, but gpu.memory.total is 8")]),
    ],
)
def test_used_memory_must_not_exceed_total_memory(
    used: dict[str, Any], total: dict[str, Any], expected: list[tuple[str, str]]
) -> None:
    result = problems([metric("gpu.memory.used", used), metric("gpu.memory.total", total)])
    assert result == [("gpu.memory.used", scope, reason) for scope, reason in expected]


@pytest.mark.parametrize(("stated", "is_wrong"), [(0, False), (2, False), (3, True), ("many", False)])
def test_count_of_gpus_on_the_bus_must_not_exceed_the_number_that_pcie_kind_lists(stated: Any, is_wrong: bool) -> None:
    kinds = metric("pcie.kind", {"pci=0000:01:00.0": "gpu", "pci=0000:02:00.0": "gpu", "pci=0000:03:00.0": "network"})
    result = problems([kinds, metric("gpu.pci_count", {"host": stated})])
    assert result == ([("gpu.pci_count", "host", f"is {stated}, but pcie.kind lists 2 GPUs")] if is_wrong else [])
    assert problems([metric("gpu.pci_count", {"host": stated})]) == []


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (metric("network.speed", {"nic=eth0": 1}), []),
        (metric("network.speed", {"nic=eth9": 1}), ["nic=eth9"]),
        (
            Metric(name="network.speed", unit="1", values={"nic=eth0": 1}, absent={"nic=eth8": "error: no"}),
            ["nic=eth8"],
        ),
        (metric("network.speed", {"nic=eth0": 1}, host="error: no"), []),
        (metric("network.bond.member_up", {"bond=bond0,nic=eth9": True}), []),
    ],
)
def test_reading_of_a_part_that_is_not_in_the_list_of_parts_is_named(given: Metric, expected: list[str]) -> None:
    result = [item for item in problems([NICS], [given]) if "was read for" in item[2]]
    assert result == [
        (given.name, scope, f"was read for {scope}, but network.operstate was not read for it") for scope in expected
    ]
    assert [item for item in problems([given]) if "was read for" in item[2]] == []


@pytest.mark.parametrize(
    ("name", "listing"),
    [
        ("host.dimm.size", "host.dimm.populated"), ("host.dimm.label", ""), ("network.speed", "network.operstate"),
        ("network.bond.mode", ""), ("pcie.acs.enabled", ""), ("pcie.width", "pcie.kind"),
        ("storage.nvme.wear", "storage.disk.rotational"), ("gpu.power", ""),
    ],
)  # fmt: skip
def test_prefix_of_a_reading_decides_which_reading_lists_the_parts(name: str, listing: str) -> None:
    assert list_of(name) == listing


@pytest.mark.parametrize(
    ("name", "scope", "is_right"),
    [
        ("optics.temperature", "hca=mlx5_0,port=1", True),
        ("optics.temperature", "nic=eth0,port=1", True),
        ("optics.temperature", "gpu=0,port=1", False),
        ("xid.count", "xid=79", True),
        ("xid.count", "host", True),
        ("xid.count", "nic=eth0,xid=79", False),
    ],
)
def test_optics_scope_names_an_adapter_or_interface_but_an_xid_scope_needs_no_part(
    name: str, scope: str, is_right: bool
) -> None:
    labels = READINGS[name].labels
    # Drop the label `port` if the reading does not declare it.
    scope = ",".join(label for label in scope.split(",") if label.split("=")[0] != "port" or "port" in labels)
    result = [item for item in problems([metric(name, {scope: 1})]) if "read in the scope" in item[2]]
    assert bool(result) is not is_right


def test_readings_of_a_planned_gpu_are_no_problem_even_if_the_record_does_not_list_it() -> None:
    view = host_view(PLAN, gpus=host_view(PLAN).gpus[:1], snapshots=())
    shot = Snapshot(
        stage="benchmark", phase="before", at="2026-11-21T04:00:00Z", duration_s=0.1,
        metrics=(metric("gpu.power", {"gpu=0": 1, "gpu=1": 1}),),
    )  # fmt: skip
    assert list(relation_problems(view, replace(view.evidence.records[0], snapshots=(shot,)))) == []


@pytest.mark.parametrize("name", ["gpu.nvlink.active", "gpu.nvlink.link_count"])
def test_links_and_their_count_are_compared_only_if_both_were_read(name: str) -> None:
    scope = "gpu=0,link=0" if name.endswith("active") else "gpu=0"
    assert problems([metric(name, {scope: 7})]) == []
