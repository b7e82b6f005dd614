"""Figures of file systems: criteria, comparison of disks of one model, lower limits in the inventory, and planned figures."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from fleet.diagnosis.diagnose import diagnose
from fleet.judge.criteria import read_pack
from fleet.judge.evidence import Evidence
from fleet.judge.judge import judge
from fleet.planning.plan import make_plan, read_profile
from schemas.errors import UsageError
from schemas.plans import plan_from_json
from schemas.records import ERROR, Observation, to_json
from schemas.reports import PASS, Cause
from tests import builders

HOSTS = ("h1", "h2", "h3")
GIB = float(1 << 30)
VALUES = {"bandwidth": 6 * GIB, "iops": 8e5, "latency": 1.5e-4, "wrong_blocks": 0}
Change = Callable[[str, Observation], Observation]


def unchanged(_: str, item: Observation) -> Observation:
    return item


def causes(change: Change = unchanged, **variables: Any) -> list[Cause]:
    """Return the causes of storage verdicts on hosts with two directories. `change`: (host, healthy figure) -> judged figure."""
    named = {"rackproof_local_storage": ["/data1", "/data/2"], **variables}
    plan = builders.plan(*HOSTS, gpu_count=2, rackproof_gang="all", **named)

    def changed(host: str, item: Observation) -> Observation:
        if not item.name.startswith("local_storage."):
            return item
        healthy = replace(item, value=VALUES[item.name.split(".")[1]], params={**item.params, "model": "ACME 3T8"})
        return change(host, healthy)

    evidence = {
        host: Evidence(records=tuple(
            replace(record, observations=tuple(changed(host, item) for item in record.observations))
            for record in of_host.records
        ))
        for host, of_host in builders.evidence(plan).items()
    }  # fmt: skip
    verdicts = judge(plan, evidence, (read_pack("h200-sxm"),))
    assert any(item.name.startswith("local_storage.") and item.verdict == PASS for item in verdicts)
    return [
        item
        for item in diagnose(verdicts, plan.gangs())
        if any(verdicts[number].name.startswith("local_storage.") for number in item.verdicts)
    ]


def on(host: str, scope: str, **change: Any) -> Change:
    """Return a change of figures of one directory. `change`: last part of a figure's name -> (value -> other value)."""

    def changed(name: str, item: Observation) -> Observation:
        kind = item.name.split(".")[1]
        if (name, item.scope) != (host, scope) or kind not in change:
            return item
        return replace(item, value=change[kind](item.value))

    return changed


def test_healthy_directories_pass_and_no_figures_are_planned_without_directories() -> None:
    assert causes() == []
    assert causes(rackproof_storage_floors="together") == []
    plan = builders.plan(*HOSTS)
    assert not any(item.name.startswith("local_storage.") for item in plan.expected)
    assert "local_storage" not in plan.stage("benchmark").benchmarks


@pytest.mark.parametrize(
    ("change", "problem", "words"),
    [
        ({"bandwidth": lambda value: value / 2, "iops": lambda value: value / 2}, "slow-storage", "is slow: disk bandwidth"),
        ({"latency": lambda value: value * 20}, "slow-storage", "disk latency"),
        ({"wrong_blocks": lambda _: 1}, "wrong-results", "returns other data than were written"),
    ],
)  # fmt: skip
def test_bad_disk_is_one_cause_that_names_the_directory(change: dict[str, Any], problem: str, words: str) -> None:
    (cause,) = causes(on("h2", "directory=data:2", **change))
    assert (cause.problem, cause.host, cause.part, cause.action) == (
        problem,
        "h2",
        "directory=data:2",
        "inspect_hardware",
    )
    assert cause.title.startswith("directory /data/2 of h2 ")
    assert words in cause.title


def test_disks_are_compared_only_with_disks_of_their_model() -> None:
    def one_other_model(host: str, item: Observation) -> Observation:
        slow = replace(item, value=item.value / 10, params={**item.params, "model": "OLD 960G"})  # type: ignore[operator]
        return slow if item.scope == "directory=data1" and item.name != "local_storage.latency" else item

    assert causes(one_other_model) == []


def test_directories_that_share_a_disk_are_not_compared_with_directories_alone_on_a_disk() -> None:
    def halved_by_sharing(host: str, item: Observation) -> Observation:
        if host != "h2" or item.name.endswith("wrong_blocks"):
            return item
        factor = 2 if item.name.endswith("latency") else 0.5
        return replace(item, value=item.value * factor, params={**item.params, "directories": 2})  # type: ignore[operator]

    assert causes(halved_by_sharing) == []


@pytest.mark.parametrize(
    ("floors", "failed_operations"),
    [({"local_read": 7.0}, {"read"}), ({"local_read": 5.9, "local_write": 6.1}, {"write"}), ("together", set())],
)
def test_floors_of_the_inventory_are_in_gib_per_second(floors: Any, failed_operations: set[str]) -> None:
    result = causes(rackproof_storage_floors=floors)
    assert {word for item in result for word in ("read", "write") if f"({word}," in item.title} == failed_operations
    assert sum(len(item.parts) for item in result) == (6 if failed_operations else 0), (
        "each directory of each host must fail"
    )
    assert {item.action for item in result} <= {"configure"}, "no disk is at fault if all disks have the same bandwidth"


def test_directory_that_was_not_measured_is_inconclusive_with_its_reason() -> None:
    def hanging(host: str, item: Observation) -> Observation:
        if (host, item.scope) != ("h3", "directory=data1"):
            return item
        reason = "/data1: no answer within 20 s: the file system hangs"
        return replace(item, value=None, status=ERROR, reason=reason)

    (cause,) = causes(hanging)
    assert (cause.host, cause.part, cause.verdict) == ("h3", "directory=data1", "inconclusive")
    assert "the file system hangs" in cause.why


@pytest.mark.parametrize("path", ["/dev", "/dev/nvme0n1", "/dev/disk/by-id/x"])
def test_device_in_place_of_a_directory_is_refused(path: str) -> None:
    with pytest.raises(UsageError, match="test files would overwrite its data"):
        builders.plan("h1", "h2", rackproof_local_storage=[path])


def test_plan_keeps_directories_and_floors() -> None:
    plan = builders.plan("h1", "h2", rackproof_local_storage=["/data1"], rackproof_storage_floors={"local_read": 2})
    host = plan_from_json(to_json(plan)).host("h1")
    assert (host.local_storage, host.storage_floors) == (("/data1",), {"local_read": 2 * GIB})


# ---- shared storage ----

SHARED = {"bandwidth": 4 * GIB, "file_bandwidth": 4 * GIB, "metadata_rate": 3000.0, "checkpoint_bandwidth": 3 * GIB,
          "wrong_bytes": 0, "misread_bytes": 0}  # fmt: skip


def shared_causes(
    change: Change = unchanged, *, together: float = 12 * GIB, without: str = "", **variables: Any
) -> list[Cause]:
    """Return the causes of storage verdicts on four hosts that share a directory.

    Args:
        change: (host, healthy figure) -> judged figure.
        together: bandwidth of all clients together, in B/s.
        without: name (after `shared_storage.`) of the figure that the records lack; empty: they have all figures.
        variables: variables of the inventory.
    """
    named = {"rackproof_shared_storage": ["/mnt/shared"], **variables}
    hosts = (*HOSTS, "h4")
    plan = builders.plan(*hosts, gpu_count=2, rackproof_gang="all", **named)

    def changed(host: str, item: Observation) -> Observation:
        if not item.name.startswith("shared_storage."):
            return item
        about = {"filesystem": "nfs4", "clients": 4}
        return change(host, replace(item, value=SHARED[item.name.split(".")[1]], params={**item.params, **about}))

    all_together = tuple(
        builders.observation(
            f"shared_storage.{name}", value, scope="gang=all,directory=mnt:shared", stage="gang", op=op, clients=clients
        )
        for op in ("read", "write")
        for name, value, clients in (
            ("aggregate_bandwidth", together, 4), ("ramp_bandwidth", 4 * GIB, 1), ("saturation_clients", 2, 4)
        )
        if name != without
    )  # fmt: skip
    evidence = {
        host: Evidence(records=tuple(
            replace(record, observations=(
                *(changed(host, item) for item in record.observations), *(all_together if record.gang else ())
            ))
            for record in of_host.records
        ))
        for host, of_host in builders.evidence(plan).items()
    }  # fmt: skip
    verdicts = judge(plan, evidence, (read_pack("h200-sxm"),))
    assert sum(item.name.startswith("shared_storage.") and item.verdict == PASS for item in verdicts) > 10
    return [
        item
        for item in diagnose(verdicts, plan.gangs())
        if any(verdicts[number].name.startswith("shared_storage.") for number in item.verdicts)
    ]


def test_healthy_clients_pass() -> None:
    assert shared_causes() == []
    assert shared_causes(rackproof_storage_floors="together") == []


def tenth(value: Any) -> Any:
    return value / 10


@pytest.mark.parametrize(
    ("change", "problem", "words"),
    [
        ({"bandwidth": tenth, "metadata_rate": tenth, "checkpoint_bandwidth": tenth}, "slow-storage", "bandwidth of the client"),
        ({"bandwidth": tenth, "file_bandwidth": tenth}, "slow-files", "has files that other hosts read slowly"),
        ({"wrong_bytes": lambda _: 1}, "wrong-results", "holds other data than the host wrote"),
        ({"misread_bytes": lambda _: 9}, "wrong-results", "reads 9 bytes wrong that other hosts read right"),
    ],
)  # fmt: skip
def test_each_kind_of_fault_of_a_shared_directory_is_one_cause(
    change: dict[str, Any], problem: str, words: str
) -> None:
    (cause,) = shared_causes(on("h2", "directory=mnt:shared", **change))
    assert (cause.problem, cause.hosts, cause.part) == (problem, ("h2",), "directory=mnt:shared")
    assert cause.action == "inspect_hardware"
    assert cause.title.startswith("directory /mnt/shared of h2 ")
    assert words in cause.title


def test_slow_file_system_is_one_cause_for_the_whole_gang() -> None:
    (cause,) = shared_causes(together=9 * GIB, rackproof_storage_floors="together")
    assert (cause.part, set(cause.hosts)) == ("gang=all", {*HOSTS, "h4"})
    assert "bandwidth of all clients together" in cause.title


def test_shared_directory_needs_a_gang_and_must_be_the_same_on_all_hosts() -> None:
    with pytest.raises(UsageError, match="rackproof_gang is 'none'"):
        builders.plan("h1", "h2", rackproof_shared_storage=["/mnt/shared"], rackproof_gang="none")
    hosts = builders.inventory("h1", "h2", rackproof_gpu_count=2)
    hosts["h2"]["rackproof_shared_storage"] = ["/mnt/shared"]
    with pytest.raises(UsageError, match="rackproof_shared_storage is"):
        make_plan(read_profile("standard"), hosts, run_id="r1", nonce=builders.NONCE, created=builders.WHEN)


@pytest.mark.parametrize("floors", ["together", {"shared_read": 10.0, "shared_write": 5.0}])
def test_missing_total_bandwidth_of_all_clients_is_inconclusive_if_it_has_a_floor(floors: Any) -> None:
    (cause,) = shared_causes(without="aggregate_bandwidth", rackproof_storage_floors=floors)
    assert (cause.verdict, cause.part, len(cause.hosts)) == ("inconclusive", "directory=mnt:shared", 4)
    assert "the record has no total of all clients" in cause.why
    assert shared_causes(without="aggregate_bandwidth", rackproof_storage_floors={"local_read": 1.0}) == []
