"""A host with a record of another host is incomplete. Two machines that report the same GPUs are rejected."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fleet.judge.criteria import read_packs
from fleet.judge.duplicates import with_foreign_records
from fleet.judge.evidence import Evidence
from fleet.report.merge import merge
from schemas.records import Metric, Record
from schemas.reports import ACCEPTED, FAIL, INCOMPLETE, REJECTED, FleetReport
from tests import builders

PLAN = builders.plan("h1", "h2", "h3", "h4")
HEALTHY = builders.evidence(PLAN)
ALONE, GANG = 0, 1
GUID = "infiniband.hca.node_guid"


def delivered(record: Record, host: str) -> Record:
    """Return the record with the name of another host."""
    return replace(record, host=host)


def report(**records: tuple[Record, ...]) -> FleetReport:
    """Return the report of the healthy fleet in which these hosts have other records."""
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
            "hosts/h1.json and hosts/h2.json are of one machine: each lists the GPUs h1-0, h1-1"
        )
    with_same_adapter = {
        "h1": tuple(with_adapter(record, "b8ce:f603:00aa:0001") for record in HEALTHY["h1"].records),
        "h2": tuple(with_adapter(record, "b8ce:f603:00aa:0001") for record in records),
    }
    fleet = report(**with_same_adapter)
    assert decisions(fleet) == {"h1": INCOMPLETE, "h2": INCOMPLETE}
    assert not [item for item in fleet.verdicts if item.criterion == "identity-unique"]


def test_two_machines_with_the_same_gpus_are_rejected() -> None:
    """They have adapters of their own, so the identities of the GPUs of one of them are forged."""
    h1 = tuple(with_adapter(record, "b8ce:f603:00aa:0001") for record in HEALTHY["h1"].records)
    h2 = tuple(with_adapter(delivered(record, "h2"), "b8ce:f603:00aa:0002") for record in HEALTHY["h1"].records)
    fleet = report(h1=h1, h2=h2)
    assert decisions(fleet) == {"h1": REJECTED, "h2": REJECTED}
    failed = {(item.host, item.scope) for item in fleet.verdicts if item.criterion == "identity-unique"}
    assert failed == {(host, f"gpu={index}") for host in ("h1", "h2") for index in (0, 1)}


def test_record_is_foreign_only_if_all_gpus_and_adapters_differ() -> None:
    alone, gang = HEALTHY["h2"].records
    swapped = replace(gang, gpus=(replace(gang.gpus[0], serial="new", uuid="GPU-new"), *gang.gpus[1:]))
    assert with_foreign_records(Evidence(records=(alone, swapped))).foreign == ()
    # All GPUs were swapped, but the adapter is the same.
    other = replace(gang, gpus=HEALTHY["h1"].records[GANG].gpus)
    records = tuple(with_adapter(record, "b8ce:f603:00aa:0001") for record in (alone, other))
    assert with_foreign_records(Evidence(records=records)).foreign == ()
    assert with_foreign_records(Evidence(records=(alone, other))).foreign == (other,)
    # A record without GPUs is not of another machine.
    assert with_foreign_records(Evidence(records=(alone, replace(gang, gpus=())))).foreign == ()
