"""A host with a record of another host is incomplete. Two machines that report the same GPUs are rejected."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fleet.judge.criteria import read_packs
from fleet.judge.duplicates import DuplicateSerials, duplicate_identities, with_foreign_records
from fleet.judge.evidence import Evidence
from fleet.report.merge import merge
from schemas.records import Gpu, Metric, Record
from schemas.reports import ACCEPTED, FAIL, INCOMPLETE, INCONCLUSIVE, REJECTED, FleetReport, Verdict
from tests import builders
from tests.unit.fleet.judge.small_fleet import host_evidence, one_figure_plan

PLAN = builders.plan("h1", "h2", "h3", "h4")
HEALTHY = builders.evidence(PLAN)
ALONE, GANG = 0, 1
"""Positions of the host record and of the gang record among the records of a host."""
GUID = "infiniband.hca.node_guid"
ONE, TWO = "b8ce:f603:00aa:0001", "b8ce:f603:00aa:0002"
"""GUIDs of two adapters."""


def delivered(record: Record, host: str) -> Record:
    """Return the record as if `host` had delivered it."""
    return replace(record, host=host)


def report(**records: tuple[Record, ...]) -> FleetReport:
    """Return the report on the healthy fleet after the records of these hosts were replaced."""
    evidence = HEALTHY | {host: Evidence(records=of_host) for host, of_host in records.items()}
    return merge(PLAN, evidence, read_packs([]))


def decisions(fleet: FleetReport) -> dict[str, str]:
    """Return the decision on each host that is not accepted."""
    return {host.name: host.decision for host in fleet.hosts if host.decision != ACCEPTED}


def reason(fleet: FleetReport, host: str) -> str:
    """Return the reason of the verdict on the records of a host."""
    (verdict,) = (item for item in fleet.verdicts if (item.host, item.name) == (host, "record"))
    return verdict.reason


@pytest.mark.parametrize("kind", [ALONE, GANG])
def test_only_the_host_that_has_a_record_of_another_host_is_incomplete(kind: int) -> None:
    records = list(HEALTHY["h2"].records)
    records[kind] = delivered(HEALTHY["h1"].records[kind], "h2")
    fleet = report(h2=tuple(records))
    assert decisions(fleet) == {"h2": INCOMPLETE}
    assert not [item for item in fleet.verdicts if item.verdict == FAIL]
    own, foreign = ("gangs/r1/h2.json", "hosts/h2.json") if kind == ALONE else ("hosts/h2.json", "gangs/r1/h2.json")
    assert f"{own} lists the GPUs h2-0, h2-1" in reason(fleet, "h2")
    assert f"{foreign} lists the GPUs h1-0, h1-1, which h1 reports too" in reason(fleet, "h2")
    assert "has records that contradict each other or the plan" in [
        cause.title.removeprefix("h2 ") for cause in fleet.causes
    ]


def test_hosts_whose_gang_records_were_swapped_are_incomplete() -> None:
    swapped = {
        host: (HEALTHY[host].records[ALONE], delivered(HEALTHY[other].records[GANG], host))
        for host, other in (("h1", "h2"), ("h2", "h1"))
    }
    fleet = report(**swapped)
    assert decisions(fleet) == {"h1": INCOMPLETE, "h2": INCOMPLETE}
    assert not [item for item in fleet.verdicts if item.verdict == FAIL]
    assert "gangs/r1/h1.json lists the GPUs h2-0, h2-1, which h2 reports too" in reason(fleet, "h1")


def with_adapter(record: Record, guid: str) -> Record:
    """Return the record with an adapter in every snapshot."""
    adapter = Metric(name=GUID, unit="1", values={"hca=mlx5_0": guid})
    return replace(
        record, snapshots=tuple(replace(item, metrics=(*item.metrics, adapter)) for item in record.snapshots)
    )


def test_hosts_with_all_records_of_one_machine_are_incomplete() -> None:
    """An inventory that names one machine twice gives such records."""
    records = tuple(delivered(record, "h2") for record in HEALTHY["h1"].records)
    fleet = report(h2=records)
    assert decisions(fleet) == {"h1": INCOMPLETE, "h2": INCOMPLETE}
    assert not [item for item in fleet.verdicts if item.verdict == FAIL]
    for host in ("h1", "h2"):
        assert reason(fleet, host).startswith(
            f"hosts/h1.json and hosts/h2.json are of one machine: hosts/{host}.json lists the GPUs h1-0, h1-1"
        )
    with_same_adapter = {
        "h1": tuple(with_adapter(record, ONE) for record in HEALTHY["h1"].records),
        "h2": tuple(with_adapter(record, ONE) for record in records),
    }
    fleet = report(**with_same_adapter)
    assert decisions(fleet) == {"h1": INCOMPLETE, "h2": INCOMPLETE}
    assert not [item for item in fleet.verdicts if item.criterion == "identity-unique"]


def test_two_machines_with_the_same_gpus_are_rejected() -> None:
    """Each machine has an adapter of its own, so one of the machines reports forged identities of its GPUs."""
    h1 = tuple(with_adapter(record, ONE) for record in HEALTHY["h1"].records)
    h2 = tuple(with_adapter(delivered(record, "h2"), TWO) for record in HEALTHY["h1"].records)
    fleet = report(h1=h1, h2=h2)
    assert decisions(fleet) == {"h1": REJECTED, "h2": REJECTED}
    failed = {(item.host, item.scope) for item in fleet.verdicts if item.criterion == "identity-unique"}
    assert failed == {(host, f"gpu={index}") for host in ("h1", "h2") for index in (0, 1)}


def test_record_is_foreign_only_if_all_gpus_and_adapters_differ() -> None:
    """A foreign gang record was written by another machine than the record of the host."""
    alone, gang = HEALTHY["h2"].records
    swapped = replace(gang, gpus=(replace(gang.gpus[0], serial="new", uuid="GPU-new"), *gang.gpus[1:]))
    assert with_foreign_records(Evidence(records=(alone, swapped))).foreign == ()
    # All GPUs were swapped, but the adapter is the same.
    other = replace(gang, gpus=HEALTHY["h1"].records[GANG].gpus)
    records = tuple(with_adapter(record, ONE) for record in (alone, other))
    assert with_foreign_records(Evidence(records=records)).foreign == ()
    assert with_foreign_records(Evidence(records=(alone, other))).foreign == (other,)
    assert with_foreign_records(Evidence(records=(alone, gang, other))).foreign == (other,)
    # A record without GPUs is not foreign.
    assert with_foreign_records(Evidence(records=(alone, replace(gang, gpus=())))).foreign == ()


# ---- duplicate identities, without a report ----


SMALL = one_figure_plan("h1")
Fleet = dict[str, Evidence]


def part(serial: str, uuid: str | None = None, index: int = 0) -> Gpu:
    """Return a GPU with this serial and UUID (default: a UUID that contains the serial)."""
    return replace(
        builders.gpu("h1", index), index=index, serial=serial, uuid=f"GPU-{serial}" if uuid is None else uuid
    )


def machine(*serials: str, guid: str = "", mac: str = "", virtual: bool = False) -> Evidence:
    """Return a host with GPUs of these serials and, if given, an adapter with that GUID and an interface with that MAC."""
    metrics = [
        Metric(name=name, unit="1", values={scope: value})
        for name, scope, value in (
            (GUID, "hca=mlx5_0", guid), ("network.address", "nic=eth0", mac), ("host.virtual_machine", "host", virtual)
        )
        if value
    ]  # fmt: skip
    gpus = tuple(part(serial, index=index) for index, serial in enumerate(serials))
    return host_evidence(SMALL, "h1", *metrics, gpus=gpus, observations=(), launches=())


def known(fleet: Fleet, *, adapters: bool = True) -> DuplicateSerials:
    """Return the identities that the hosts report; `adapters`: whether to include those of adapters and interfaces."""
    serials = DuplicateSerials()
    for host, evidence in fleet.items():
        serials.add(host, evidence, adapters=adapters)
    return serials


def verdicts(fleet: Fleet) -> list[Verdict]:
    return duplicate_identities(fleet, known(fleet))


@pytest.mark.parametrize("identity", [{"guid": ONE}, {"mac": "b8:ce:f6:aa:00:01"}])
def test_hosts_with_the_same_adapter_are_duplicates_unless_adapters_are_excluded(identity: dict[str, str]) -> None:
    fleet = {"h1": machine("A", **identity), "h2": machine("B", **identity)}
    assert known(fleet).hosts() == {"h1", "h2"}
    assert known(fleet, adapters=False).hosts() == set()
    assert [(item.host, item.scope, item.reason[-2:]) for item in verdicts(fleet)] == [
        ("h1", next(iter(fleet["h1"].records[0].snapshots[0].metrics[0].values)), "h2"),
        ("h2", next(iter(fleet["h1"].records[0].snapshots[0].metrics[0].values)), "h1"),
    ]


@pytest.mark.parametrize(
    ("identity", "is_unique"),
    [
        *(({"mac": f"{first}:ce:f6:aa:00:01"}, False) for first in ("02", "06", "0a", "0E", "52")),
        *(({"mac": f"{first}:ce:f6:aa:00:01"}, True) for first in ("00", "0C", "0D", "b8")),
        *(({"guid": f"{first}ce:f603:00aa:0001"}, False) for first in ("02", "06", "0a", "0E", "52")),
        *(({"guid": f"{first}ce:f603:00aa:0001"}, True) for first in ("00", "0C", "0D", "b8")),
        ({"mac": "00:00:00:00:00:00"}, False),
        ({"guid": "0000:0000:0000:0000"}, False),
        # Made from the MAC address 52:54:00:12:34:56, which is local: with the bit inverted, as by Soft-RoCE, and as it is.
        ({"guid": "5054:00ff:fe12:3456"}, False),
        ({"guid": "5254:00ff:fe12:3456"}, False),
    ],
)
def test_local_identities_and_zeros_identify_no_adapter(identity: dict[str, str], is_unique: bool) -> None:
    lower = {kind: value.lower() for kind, value in identity.items()}
    fleet = {"h1": machine("A", **identity), "h2": machine("B", **lower)}
    assert bool(known(fleet).hosts()) is is_unique


HYPER_V = {"guid": "0015:5dff:fe33:ff13", "mac": "00:15:5d:33:ff:13"}
PHYSICAL = {"guid": ONE, "mac": "b8:ce:f6:aa:00:01"}


@pytest.mark.parametrize("identities", [HYPER_V, PHYSICAL])
def test_adapters_of_virtual_machines_have_no_identity(identities: dict[str, str]) -> None:
    """The hypervisor chooses GUIDs and MAC addresses."""
    fleet = {name: machine(name, **identities, virtual=True) for name in ("h1", "h2")}
    assert verdicts(fleet) == []
    assert verdicts(fleet | {"h3": machine("h3", **identities)}) == []
    # Only the GPUs show whether two hosts, or two records of a host, are of one machine.
    other = machine("h1", guid=TWO, virtual=True)
    assert known({"h1": fleet["h1"], "x": other}).same_machine("x", other) == ["h1"]
    assert with_gang_record(fleet["h1"], fleet["h2"]).foreign
    assert not with_gang_record(fleet["h1"], other).foreign


def test_one_gpu_of_two_virtual_machines_fails() -> None:
    fleet = {name: machine("A", name, **HYPER_V, virtual=True) for name in ("h1", "h2")}
    assert {(item.host, item.scope) for item in verdicts(fleet)} == {("h1", "gpu=0"), ("h2", "gpu=0")}


def test_two_hosts_are_one_machine_if_one_of_them_has_all_gpus_of_the_other() -> None:
    serials = ("A", "B", "C")
    fleet = {f"h{number}": machine(*serials) for number in (6, 2, 5, 1, 4, 3)}
    fleet |= {"one": machine("B"), "other": machine("A", "X"), "none": machine("Y")}
    counts = known(fleet)
    assert counts.same_machine("h1", fleet["h1"]) == ["h2", "h3", "h4", "h5", "h6", "one"]
    assert counts.same_machine("one", fleet["one"]) == ["h1", "h2", "h3", "h4", "h5", "h6"]
    assert counts.same_machine("other", fleet["other"]) == counts.same_machine("none", fleet["none"]) == []


def test_host_that_reports_an_adapter_is_the_same_machine_only_if_the_adapter_is_shared_too() -> None:
    """All hosts share the GPU, and h1 and h2 also share the adapter.

    h4 reports no adapter, so the shared GPU is enough to make it the same machine as the others.
    """
    fleet = {
        "h1": machine("A", guid=ONE),
        "h2": machine("A", guid=ONE),
        "h3": machine("A", guid=TWO),
        "h4": machine("A"),
    }
    counts = known(fleet)
    assert [counts.same_machine(host, evidence) for host, evidence in fleet.items()] == [
        ["h2"], ["h1"], [], ["h1", "h2", "h3"],
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("gpus", "hosts"),
    [
        ((part("A", "u1"), part("A", "u2", 1)), set()),
        ((part("A", "u1"), part("B", "u1", 1)), {"h1"}),
        ((part("A", ""), part("A", "", 1)), {"h1"}),
        ((part("0000", ""), part("0000", "", 1)), set()),
        ((part("", ""), part("", "", 1)), set()),
    ],
    ids=["one board", "one UUID", "one serial", "zeros", "no identity"],
)
def test_gpus_of_one_host_may_share_a_serial_if_their_uuids_differ(gpus: tuple[Gpu, ...], hosts: set[str]) -> None:
    assert known({"h1": host_evidence(SMALL, "h1", gpus=gpus)}).hosts() == hosts


@pytest.mark.parametrize(
    ("serials", "listed"),
    [("A", "the GPUs A;"), ("ABC", "the GPUs A, B, C;"), ("ABCD", "the GPUs A, B, C and 1 more;")],
)
def test_records_of_one_machine_are_inconclusive_and_at_most_three_gpus_are_listed(serials: str, listed: str) -> None:
    fleet = {"h2": machine(*serials), "h1": machine(*serials)}
    for verdict, host in zip(verdicts(fleet), ("h2", "h1"), strict=True):
        assert (verdict.host, verdict.scope, verdict.name) == (host, "host", "record")
        assert (verdict.verdict, verdict.criterion, verdict.kind) == (INCONCLUSIVE, "plan", "contradictory")
        assert verdict.source == "plan"
        assert verdict.reason.startswith(
            f"hosts/h1.json and hosts/h2.json are of one machine: hosts/{verdict.host}.json lists {listed}"
        )


def test_merged_groups_of_hosts_have_the_duplicates_of_the_whole_fleet() -> None:
    fleet = {"h1": machine("A", "B"), "h2": machine("A", "C"), "h3": machine("A", "B"), "h4": machine("D")}
    whole, merged = known(fleet), DuplicateSerials()
    for part_of_fleet in (["h3", "h4"], ["h2"], ["h1"]):
        merged.update(known({host: fleet[host] for host in part_of_fleet}))
    assert merged.hosts() == whole.hosts() == {"h1", "h2", "h3"}
    for host, evidence in fleet.items():
        assert merged.same_machine(host, evidence) == whole.same_machine(host, evidence)
    assert duplicate_identities(fleet, merged) == duplicate_identities(fleet, whole)
    key = ("gpu.serial", "A")
    assert (
        merged.others(key, ("h2", "gpu=0")) == whole.others(key, ("h2", "gpu=0")) == [("h1", "gpu=0"), ("h3", "gpu=0")]
    )


def test_duplicate_gpu_fails_and_the_reason_names_the_gpu_with_the_same_identity() -> None:
    failed = verdicts({"h1": machine("A", "B"), "h2": machine("X", "B")})
    assert [(item.host, item.scope, item.serial, item.name, item.value) for item in failed] == [
        (host, "gpu=1", "B", name, value)
        for host in ("h1", "h2")
        for name, value in (("gpu.serial", "B"), ("gpu.uuid", "GPU-B"))
    ]
    assert {(item.verdict, item.criterion, item.kind, item.action, item.basis) for item in failed} == {
        (FAIL, "identity-unique", "identity", "inspect_hardware", "policy")
    }
    assert [item.reason for item in failed] == ["also reported by GPU 1 of h2"] * 2 + [
        "also reported by GPU 1 of h1"
    ] * 2


@pytest.mark.parametrize(
    ("confirmed", "failing"),
    [
        ({"h1": True, "h2": False, "h3": False}, {"h2", "h3"}),
        ({"h1": True, "h2": False}, {"h1", "h2", "h3"}),  # h3 may have the part, and h1 may not
        ({"h1": True, "h2": True, "h3": False}, {"h1", "h2", "h3"}),
        ({"h1": False, "h2": False, "h3": False}, {"h1", "h2", "h3"}),
        ({}, {"h1", "h2", "h3"}),
    ],
)
def test_gpu_passes_only_if_its_bmc_confirms_its_serial_and_those_of_all_others_contradict_theirs(
    confirmed: dict[str, bool], failing: set[str]
) -> None:
    fleet = {"h1": machine("A", "B"), "h2": machine("X", "B"), "h3": machine("Y", "B")}
    duplicates = DuplicateSerials()
    for host, evidence in fleet.items():  # as in a fleet that is judged in parts
        of_host = DuplicateSerials()
        of_host.add(host, evidence, confirmed_by_bmc={"gpu=1": confirmed[host]} if host in confirmed else {})
        duplicates.update(of_host)
    assert {item.host for item in duplicate_identities(fleet, duplicates)} == failing


def test_interfaces_of_one_host_may_share_an_address() -> None:
    address = Metric(
        name="network.address", unit="1", values=dict.fromkeys(("nic=eth0", "nic=eth1"), "b8:ce:f6:aa:00:01")
    )
    fleet = {host: host_evidence(SMALL, "h1", address, gpus=(part(host),), observations=()) for host in ("h1", "h2")}
    assert verdicts({"h1": fleet["h1"]}) == []
    shared = verdicts(fleet)
    assert [(item.host, item.scope, item.serial) for item in shared] == [
        (host, scope, "") for host in ("h1", "h2") for scope in ("nic=eth0", "nic=eth1")
    ]
    assert shared[0].reason.count(" of h2") == 2
    assert " of h1" not in shared[0].reason


def with_gang_record(own: Evidence, other: Evidence) -> Evidence:
    """Return a host with the host record of `own` and, as its gang record, the record of `other`."""
    return with_foreign_records(Evidence(records=(*own.records, replace(other.records[0], gang="g"))))


def test_gang_record_of_another_machine_is_named_with_the_hosts_that_report_its_parts() -> None:
    fleet = {"h1": machine("A"), "h2": with_gang_record(machine("B"), machine("A"))}
    (verdict,) = verdicts(fleet)
    assert (verdict.host, verdict.name, verdict.verdict, verdict.kind) == (
        "h2",
        "record",
        INCONCLUSIVE,
        "contradictory",
    )
    lists = "hosts/h2.json lists the GPUs B; gangs/g/h2.json lists the GPUs A"
    machines = f"the records of this host are of different machines: {lists}"
    assert verdict.reason.startswith(f"{machines}, which h1 reports too; a record of another host was delivered")
    # More hosts may report the part: h0 in its own record, h3 in a gang record of another machine.
    fleet |= {"h0": machine("A"), "h3": with_gang_record(machine("C"), machine("A"))}
    (of_h2,) = (item for item in verdicts(fleet) if item.host == "h2")
    assert of_h2.reason.startswith(f"{machines}, which h0 and h1 and h3 report too; ")
    merged = DuplicateSerials()
    for host, evidence in fleet.items():
        merged.update(known({host: evidence}))
    assert [item for item in duplicate_identities(fleet, merged) if item.host == "h2"] == [of_h2]


@pytest.mark.parametrize(
    ("own", "gang", "is_foreign"),
    [
        (machine("A"), machine("B"), True), (machine("A", "B"), machine("B"), False), (machine("A"), machine(), False),
        (machine("A", guid=ONE), machine("B", guid=ONE), False), (machine("A", guid=ONE), machine("B", guid=TWO), True),
        (machine("A", guid=ONE), machine("B"), True), (machine(guid=ONE), machine("B"), False),
    ],
)  # fmt: skip
def test_gang_record_is_foreign_if_no_part_is_the_same_as_in_the_record_of_the_host(
    own: Evidence, gang: Evidence, is_foreign: bool
) -> None:
    """Only kinds of parts (GPU, adapter) that both records have are compared. With no such kind, the record is not foreign."""
    evidence = with_gang_record(own, gang)
    assert bool(evidence.foreign) is is_foreign
    assert [record.gang for record in (*evidence.records, *evidence.foreign)] == ["", "g"]
    assert len(evidence.records) == (1 if is_foreign else 2)


@pytest.mark.parametrize(("serial", "is_foreign"), [("S1X", False), ("0000", True), ("System Serial Number", True)])
def test_gang_record_with_the_same_host_serial_is_not_foreign(serial: str, is_foreign: bool) -> None:
    """A placeholder for a serial is not compared."""
    metric = Metric(name="host.system.serial", unit="1", values={"host": serial})
    own, gang = (host_evidence(SMALL, "h1", metric, gpus=(part(name),)) for name in ("A", "B"))
    assert bool(with_gang_record(own, gang).foreign) is is_foreign
