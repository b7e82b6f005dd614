"""Test verdicts on the readings of BMCs: missing readings, failed parts, and serials that differ between a host and its BMC.

The control node reads each BMC several times during a run, at MOMENTS in these tests. The record of the BMC has a snapshot of the
readings for each of these times.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest

from fleet.bmc.readings import NAMES, Readings, unreadable
from fleet.diagnosis.diagnose import diagnose
from fleet.judge.bmc import is_serial, judge_bmc, with_bmc_event, with_bmc_part
from fleet.judge.criteria import read_pack
from fleet.judge.evidence import Evidence
from fleet.judge.host_view import HostView
from fleet.judge.judge import judge
from fleet.report.merge import merge
from schemas.plans import Plan
from schemas.records import Gpu, Metric, Record, Snapshot
from schemas.reports import ACCEPTED, FAIL, INCOMPLETE, INCONCLUSIVE, PASS, REJECTED, Cause, Verdict
from tests import builders
from tests.unit.fleet.judge.small_fleet import criterion, host_evidence, one_figure_plan, pack, reading

HOSTS = ("h1", "h2", "h3")
PLAN = builders.plan(*HOSTS, rackproof_gang="none", rackproof_bmc_address="bmc")
MOMENTS = (("preflight", "before"), ("benchmark", "during"), ("benchmark", "after"))
"""Stage and phase of each snapshot of a BMC."""
LOG = "log=1.SEL"
PACKS = (replace(read_pack("h200-sxm"), criteria=read_pack("bmc").criteria),)
PSUS = "redundancy=PS_Redundancy"
ALARM, LEAK = "50, above its critical limit 45", "Critical: it reports a leak"


def healthy(host: str) -> Readings:
    readings = Readings()
    readings.add("bmc.readable", (), True)
    for number in (1, 2):
        readings.add("bmc.power_supply.health", (f"PSU{number}",), "OK")
        # The BMC numbers the GPUs in the reverse order of the host.
        readings.add("bmc.gpu.serial", (f"GPU{number}",), f"{host}-{2 - number}")
    readings.add("bmc.power_supply.fitted", (), 2)
    readings.add("bmc.power_redundancy.health", ("PS_Redundancy",), "OK")
    readings.add("bmc.fan.health", ("FAN1",), "OK")
    readings.add("bmc.part.health", ("system.1",), "OK")
    readings.add("bmc.inlet.temperature", ("Inlet",), 24.0)
    readings.add("bmc.sensor.alarm", ("Inlet",), "none")
    readings.add("bmc.firmware.version", ("BMC",), "1.2")
    readings.add("bmc.log.entries", ("1.SEL",), 7)
    readings.add("bmc.log.newest", ("1.SEL",), "7 2026-11-03T04:05:06Z")
    readings.add("bmc.log.new_entries", ("1.SEL",), 0)
    return readings


def with_value(metrics: tuple[Metric, ...], name: str, scope: str, value: Any) -> tuple[Metric, ...]:
    """Return the readings with another value of the reading `bmc.{name}` in this scope."""
    return tuple(
        replace(item, values={**item.values, scope: value}, absent={}) if item.name == f"bmc.{name}" else item
        for item in metrics
    )


def with_event(metrics: tuple[Metric, ...], severity: str, text: str) -> tuple[Metric, ...]:
    """Return the readings with one new entry in the event log."""
    changed = with_value(metrics, "event.severity", f"{LOG},entry=8", severity)
    changed = with_value(changed, "event.message", f"{LOG},entry=8", text)
    return with_value(changed, "log.new_entries", LOG, 1)


def bmc_record(host: str, *snapshots: tuple[Metric, ...]) -> Record:
    """Return the record of the host's BMC. Its snapshots have the readings `snapshots`, and healthy readings at later MOMENTS."""
    readings = [*snapshots, *[healthy(host).metrics()] * (len(MOMENTS) - len(snapshots))]
    taken = tuple(
        Snapshot(stage=stage, phase=phase, at=f"2026-11-21T04:00:0{number}Z", duration_s=1.0, metrics=metrics)
        for number, ((stage, phase), metrics) in enumerate(zip(MOMENTS, readings, strict=True))
    )
    at, end = taken[0].at, taken[-1].at
    return Record(run_id=PLAN.run_id, nonce=PLAN.nonce, host=host, began=at, ended=end, rackproof="0", snapshots=taken)


def fleet(**changed: Record | None) -> dict[str, Evidence]:
    """Return the evidence of a healthy fleet. `changed`: host -> the record of its BMC, or None for no record."""
    evidence = builders.evidence(PLAN)
    return {host: replace(item, bmc=changed.get(host, bmc_record(host))) for host, item in evidence.items()}


def findings(evidence: dict[str, Evidence], plan: Plan = PLAN) -> list[Verdict]:
    """Return the verdicts other than passes."""
    return [verdict for verdict in judge(plan, evidence, PACKS) if verdict.verdict != PASS]


def causes(evidence: dict[str, Evidence]) -> list[Cause]:
    return [*diagnose(findings(evidence), {})]


def decision(evidence: dict[str, Evidence]) -> str:
    return merge(PLAN, evidence, PACKS).decision


def test_bmc_that_was_first_read_after_a_launch_is_inconclusive() -> None:
    """If the record of a BMC is lost and the run is resumed, a new record begins, which lacks earlier events."""
    record = bmc_record("h2")
    late = tuple(replace(item, at=item.at.replace("T04", "T05")) for item in record.snapshots)
    record = replace(record, began=late[0].at, ended=late[-1].at, snapshots=late)
    (verdict,) = findings(fleet(h2=record))
    assert (verdict.host, verdict.name, verdict.verdict) == ("h2", "bmc.readable", INCONCLUSIVE)
    assert "was first read at 2026-11-21T05:00:00Z, after a launch" in verdict.reason


def test_healthy_bmcs_are_accepted() -> None:
    evidence = fleet()
    assert findings(evidence) == []
    assert decision(evidence) == ACCEPTED
    serials = [item for item in judge(PLAN, evidence, PACKS) if item.criterion == "bmc-serial"]
    assert [(item.scope, item.verdict) for item in serials if item.host == "h1"] == [("gpu=0", PASS), ("gpu=1", PASS)]


def test_host_without_a_bmc_in_the_inventory_has_no_verdict_on_bmc_readings() -> None:
    plan = builders.plan(*HOSTS, rackproof_gang="none")
    assert not any(host.bmc for host in plan.hosts)
    verdicts = judge(plan, builders.evidence(plan), PACKS)
    assert [item.name for item in verdicts if item.name.startswith("bmc.")] == []


def test_failed_power_supply_and_its_effects_on_redundancy_and_system_are_one_cause() -> None:
    metrics = with_value(healthy("h2").metrics(), "power_supply.health", "psu=PSU2", "Critical: it has no input (0 V)")
    metrics = with_value(metrics, "power_redundancy.health", "redundancy=PS_Redundancy", "Critical")
    metrics = with_value(metrics, "part.health", "part=system.1", "Critical")
    evidence = fleet(h2=bmc_record("h2", healthy("h2").metrics(), healthy("h2").metrics(), metrics))
    (cause,) = causes(evidence)
    assert cause.title == "power supply PSU2 of h2 has the health Critical: it has no input (0 V)"
    assert (cause.part, cause.action, len(cause.verdicts)) == ("psu=PSU2", "inspect_hardware", 3)
    assert decision(evidence) == REJECTED


@pytest.mark.parametrize("has_part", [True, False])
def test_list_of_current_faults_and_the_health_of_the_system_are_one_cause(has_part: bool) -> None:
    metrics = with_value(healthy("h2").metrics(), "part.health", "part=system.1", "Critical")
    metrics = with_value(metrics, "part.health", "part=faults.1.FaultList", "Critical: the power supply 2 has no input")
    if has_part:
        metrics = with_value(metrics, "power_supply.health", "psu=PSU2", "Critical")
    (cause,) = causes(fleet(h2=bmc_record("h2", *[metrics] * len(MOMENTS))))
    assert cause.part == ("psu=PSU2" if has_part else "part=faults.1.FaultList")
    of_list = "part faults.1.FaultList of h2 has the health Critical: the power supply 2 has no input"
    assert cause.title == ("power supply PSU2 of h2 has the health Critical" if has_part else of_list)


def test_chassis_without_a_reason_follows_the_system_with_a_reason() -> None:
    """On HPE, the system names its subsystem with bad health, and the chassis does not."""
    metrics = with_value(healthy("h2").metrics(), "part.health", "part=chassis.1", "Critical")
    metrics = with_value(metrics, "part.health", "part=system.1", "Critical: Storage")
    (cause,) = causes(fleet(h2=bmc_record("h2", *[metrics] * len(MOMENTS))))
    assert cause.title == "part system.1 of h2 has the health Critical: Storage"


@pytest.mark.parametrize(("name", "scope"), [("power_supply.health", "psu=PSU2"), ("fan.health", "fan=FAN1")])
def test_health_that_the_bmc_no_longer_states_is_inconclusive(name: str, scope: str) -> None:
    last = tuple(
        replace(item, values={part: value for part, value in item.values.items() if part != scope},
                absent={scope: "unsupported: no health"}) if item.name == f"bmc.{name}" else item
        for item in healthy("h2").metrics()
    )  # fmt: skip
    evidence = fleet(h2=bmc_record("h2", healthy("h2").metrics(), healthy("h2").metrics(), last))
    (verdict,) = findings(evidence)
    assert (verdict.name, verdict.scope, verdict.verdict) == (f"bmc.{name}", scope, INCONCLUSIVE)
    assert decision(evidence) == INCOMPLETE


@pytest.mark.parametrize(
    ("name", "scope", "value", "title"),
    [
        ("power_redundancy.health", PSUS, "Critical", "redundant group PS_Redundancy of h2 has the health Critical"),
        ("fan.health", "fan=FAN1", "Critical", "fan FAN1 of h2 has the health Critical"),
        ("sensor.alarm", "sensor=Inlet", ALARM, f"sensor Inlet of h2 reads {ALARM}"),
        ("inlet.temperature", "sensor=Inlet", 41.0, "sensor Inlet of h2 has BMC inlet temperature 41 °C, the limit is ≤ 35 °C"),
        ("leak_detector.health", "detector=Plate", LEAK, f"leak detector Plate of h2 has the health {LEAK}"),
        ("firmware.version", "component=BMC", "1.1", "component BMC of h2 has BMC firmware version 1.1, most have 1.2"),
    ],
)  # fmt: skip
def test_cause_of_a_bad_reading_names_the_part(name: str, scope: str, value: Any, title: str) -> None:
    (cause,) = causes(
        fleet(h2=bmc_record("h2", *[with_value(healthy("h2").metrics(), name, scope, value)] * len(MOMENTS)))
    )
    assert cause.title == title
    assert cause.action in ("inspect_hardware", "configure")


@pytest.mark.parametrize(
    ("models", "versions", "differing"),
    [
        # Models and versions are those of Supermicro (mock-up in github.com/NVIDIA/libredfish).
        (["PWS-3K06G-2R", "PWS-3K06G-2R", "PWS-DF009-2F"], ["1.3", "1.3", "1.0"], []),
        (["PWS-3K06G-2R", "PWS-DF009-2F", "PWS-DF009-2F"], ["1.3", "1.0", "1.0"], []),
        (["PWS-3K06G-2R"] * 3, ["1.3", "1.3", "1.0"], ["h3"]),
        ([None] * 3, ["1.3", "1.3", "1.0"], ["h3"]),  # these BMCs do not report the model
    ],
)
def test_firmware_of_power_supplies_is_compared_within_their_model(
    models: list[str | None], versions: list[str], differing: list[str]
) -> None:
    records = {}
    for host, model, version in zip(HOSTS, models, versions, strict=True):
        metrics = with_value(healthy(host).metrics(), "firmware.version", "component=PowerSupply1", version)
        if model:
            metrics = with_value(metrics, "firmware.part", "component=PowerSupply1", model)
        records[host] = bmc_record(host, *[metrics] * len(MOMENTS))
    evidence = fleet(**records)
    assert [(item.host, item.criterion) for item in findings(evidence)] == [
        (host, "bmc-firmware") for host in differing
    ]
    assert decision(evidence) == (REJECTED if differing else ACCEPTED)


def test_host_with_fewer_power_supplies_than_the_others_is_named() -> None:
    metrics = with_value(healthy("h2").metrics(), "power_supply.fitted", "host", 1)
    metrics = tuple(
        replace(item, values={"psu=PSU1": "OK"}) if item.name == "bmc.power_supply.health" else item for item in metrics
    )
    (cause,) = causes(fleet(h2=bmc_record("h2", *[metrics] * len(MOMENTS))))
    assert cause.title == "h2 has number of power supplies 1, most have 2"


def test_new_log_entry_fails_in_its_stage_with_its_text() -> None:
    event = with_event(healthy("h2").metrics(), "Warning", "2026-11-03T05:00:00Z Correctable ECC (@DIMMC1(CPU1))")
    (verdict,) = findings(fleet(h2=bmc_record("h2", healthy("h2").metrics(), healthy("h2").metrics(), event)))
    assert (verdict.stage, verdict.verdict, verdict.criterion) == ("benchmark", FAIL, "bmc-event")
    assert "Correctable ECC (@DIMMC1(CPU1))" in verdict.reason
    (cause,) = diagnose([verdict], {})
    assert cause.title == "event log 1.SEL of h2 has a new warning entry"
    assert "Correctable ECC" in cause.why


@pytest.mark.parametrize("gpus", [1, 2])
def test_gpu_whose_serial_the_bmc_does_not_report_is_named(gpus: int) -> None:
    metrics = with_value(healthy("h1").metrics(), "gpu.serial", "processor=GPU1", "h9-1")
    if gpus == 2:
        metrics = with_value(metrics, "gpu.serial", "processor=GPU2", "h9-0")
    result = causes(fleet(h1=bmc_record("h1", *[metrics] * len(MOMENTS))))
    assert len(result) == gpus
    assert result[0].title.startswith("GPU ")
    assert "reports another serial than its BMC: h1-1 instead of h9-1" in " ".join(cause.title for cause in result)
    assert {cause.verdict for cause in result} == {FAIL}


@pytest.mark.parametrize(
    ("host_serial", "kind", "reported", "verdicts"),
    [
        ("S1X", "system", "S1X", [PASS]), ("S1X", "system", "S2X", [FAIL]), ("S1X", "system", "s1x", [PASS]),
        ("S1X", "chassis", "S1X", [PASS]), ("S1X", "chassis", "C2X", []),
    ],
)  # fmt: skip
def test_serial_of_the_host_is_compared_with_those_of_system_and_chassis(
    host_serial: str, kind: str, reported: str, verdicts: list[str]
) -> None:
    metrics = with_value(healthy("h1").metrics(), f"{kind}.serial", f"{kind}=1", reported)
    evidence = fleet(h1=bmc_record("h1", *[metrics] * len(MOMENTS)))
    record = evidence["h1"].records[0]
    serial = Metric(name="host.system.serial", unit="1", values={"host": host_serial})
    taken = tuple(
        replace(item, metrics=(*(m for m in item.metrics if m.name != serial.name), serial))
        for item in record.snapshots
    )
    evidence["h1"] = replace(evidence["h1"], records=(replace(record, snapshots=taken),))
    result = judge(PLAN, evidence, PACKS)
    assert [item.verdict for item in result if item.name == "bmc.system.serial"] == verdicts


def with_system_serials(evidence: dict[str, Evidence], **serials: str) -> dict[str, Evidence]:
    """Return the evidence, in which these hosts report these system serials."""
    result = dict(evidence)
    for host, text in serials.items():
        (record,) = result[host].records
        serial = Metric(name="host.system.serial", unit="1", values={"host": text})
        taken = tuple(
            replace(item, metrics=(*(m for m in item.metrics if m.name != serial.name), serial))
            for item in record.snapshots
        )
        result[host] = replace(result[host], records=(replace(record, snapshots=taken),))
    return result


def without_gpu_serials(metrics: tuple[Metric, ...]) -> tuple[Metric, ...]:
    """Return the readings of a BMC that reports no serials of GPUs."""
    return tuple(
        replace(item, values={}, absent={"host": "unsupported"}) if item.name == "bmc.gpu.serial" else item
        for item in metrics
    )


def of_bmc(host: str, readings: tuple[Metric, ...]) -> Record:
    """Return the record of the BMC that the inventory names for a host, with these readings at all times."""
    return bmc_record(host, *[readings] * len(MOMENTS))


LOST_SUPPLY = "Critical: it has no input (0 V)"


@pytest.mark.parametrize("serials", ["of the GPUs", "of the system", "of both"])
@pytest.mark.parametrize("host", ["with a record", "without a record"])
def test_bmc_of_another_host_is_one_mistake_of_the_inventory_and_no_part_is_blamed(serials: str, host: str) -> None:
    """h2 has the BMC of h1 in the inventory. This BMC reports a lost power supply. h1 itself has a second, healthy BMC."""
    lost = with_value(healthy("h1").metrics(), "power_supply.health", "psu=PSU2", LOST_SUPPLY)
    if serials != "of the GPUs":
        lost = with_value(lost, "system.serial", "system=1", "S1X")
    if serials == "of the system":
        lost = without_gpu_serials(lost)
    evidence = with_system_serials(fleet(h2=of_bmc("h2", lost)), h1="S1X", h2="S2X", h3="S3X")
    if host == "without a record":
        evidence["h2"] = replace(evidence["h2"], records=(), problem="unreachable")
    plan = builders.plan(*HOSTS, rackproof_gang="none", rackproof_bmc_address="bmc", rackproof_gpu_model="h200-sxm")
    of_bmc_of_h2 = [item for item in findings(evidence, plan) if item.name.startswith("bmc.")]
    assert [(item.host, item.scope, item.verdict, item.action) for item in of_bmc_of_h2] == [
        ("h2", "host", FAIL, "configure")
    ]
    (cause,) = diagnose(of_bmc_of_h2, {})
    assert cause.title == "h2 has the BMC of h1 in the inventory: correct rackproof_bmc_address"
    assert merge(plan, evidence, PACKS).decision != ACCEPTED


def test_two_swapped_bmc_addresses_are_a_mistake_on_both_hosts() -> None:
    evidence = fleet(h1=of_bmc("h1", healthy("h2").metrics()), h2=of_bmc("h2", healthy("h1").metrics()))
    assert [cause.title for cause in causes(evidence)] == [
        "h1 has the BMC of h2 in the inventory: correct rackproof_bmc_address",
        "h2 has the BMC of h1 in the inventory: correct rackproof_bmc_address",
    ]
    assert {cause.action for cause in causes(evidence)} == {"configure"}
    assert decision(evidence) == REJECTED


@pytest.mark.parametrize(
    "reported",
    [
        {"processor=GPU1": "h1-1", "processor=GPU2": "h2-0"},
        {"processor=GPU1": "h2-1", "processor=GPU2": "h3-0"},
        {"processor=GPU1": "x2-1", "processor=GPU2": "x2-0"},
    ],
    ids=["one own serial", "serials of two hosts", "unknown serials"],
)
def test_serials_that_are_not_all_of_one_other_host_are_a_fault_of_the_parts(reported: dict[str, str]) -> None:
    metrics = tuple(
        replace(item, values=reported) if item.name == "bmc.gpu.serial" else item for item in healthy("h1").metrics()
    )
    failed = findings(fleet(h1=of_bmc("h1", metrics)))
    assert failed
    assert {(item.name, item.action) for item in failed} == {("bmc.gpu.serial", "inspect_hardware")}


def test_bmc_is_not_attributed_to_another_host_by_a_shared_chassis_serial() -> None:
    metrics = with_value(without_gpu_serials(healthy("h1").metrics()), "chassis.serial", "chassis=1", "S2X")
    evidence = with_system_serials(fleet(h1=of_bmc("h1", metrics)), h1="S1X", h2="S2X", h3="S3X")
    assert [item for item in findings(evidence) if item.name == "bmc.readable"] == []


def serial_verdicts(metrics: tuple[Metric, ...]) -> dict[str, str]:
    """Return scope -> verdict on the serial, for each GPU of h1 whose serial is judged."""
    verdicts = judge(PLAN, fleet(h1=bmc_record("h1", *[metrics] * len(MOMENTS))), PACKS)
    return {item.scope: item.verdict for item in verdicts if item.criterion == "bmc-serial" and item.host == "h1"}


@pytest.mark.parametrize(("second", "expected"), [(None, {"gpu=1": PASS}), ("H1-0", {"gpu=0": PASS, "gpu=1": PASS})])
def test_bmc_may_report_fewer_gpu_serials_than_the_host_or_another_letter_case(
    second: str | None, expected: dict[str, str]
) -> None:
    metrics = tuple(
        replace(item, values={"processor=GPU1": "h1-1"} | ({"processor=GPU2": second} if second else {}))
        if item.name == "bmc.gpu.serial"
        else item
        for item in healthy("h1").metrics()
    )
    assert serial_verdicts(metrics) == expected


@pytest.mark.parametrize("reported", ["1650422000001", "0000000000000", "", "To Be Filled By O.E.M."])
def test_serials_of_another_form_are_not_compared(reported: str) -> None:
    """A BMC may report the serial of the board instead of that of the GPU module. A healthy GPU must not fail for this."""
    metrics = tuple(
        replace(item, values=dict.fromkeys(item.values, reported)) if item.name == "bmc.gpu.serial" else item
        for item in healthy("h1").metrics()
    )
    assert findings(fleet(h1=bmc_record("h1", *[metrics] * len(MOMENTS)))) == []


def test_unread_bmc_is_inconclusive_and_names_the_cause() -> None:
    why = "credentials refused (HTTP 401)"
    evidence = fleet(h1=bmc_record("h1", *[unreadable(why)] * len(MOMENTS)), h2=None)
    evidence["h2"] = replace(evidence["h2"], bmc_problem="the BMC was not read: bmcs/h2.json is missing")
    result = {item.host: (item.criterion, item.reason) for item in findings(evidence)}
    assert result == {
        "h1": ("bmc-readable", f"error: {why}"),
        "h2": ("plan", "the BMC was not read: bmcs/h2.json is missing"),
    }
    assert decision(evidence) == INCOMPLETE


def test_fault_that_a_bmc_shows_is_reported_even_if_its_host_left_no_record() -> None:
    metrics = with_value(healthy("h2").metrics(), "power_supply.health", "psu=PSU2", "Critical")
    evidence = fleet(h2=bmc_record("h2", *[metrics] * len(MOMENTS)))
    evidence["h2"] = replace(evidence["h2"], records=(), problem="unreachable")
    plan = builders.plan(*HOSTS, rackproof_gang="none", rackproof_bmc_address="bmc", rackproof_gpu_model="h200-sxm")
    assert "power supply PSU2 of h2 has the health Critical" in [
        item.title for item in diagnose(findings(evidence, plan), {})
    ]


def test_bmc_readings_in_the_record_of_a_host_do_not_count() -> None:
    evidence = fleet(h1=bmc_record("h1", *[unreadable("connection refused")] * len(MOMENTS)))
    record = evidence["h1"].records[0]
    forged = tuple(replace(taken, metrics=(*taken.metrics, *healthy("h1").metrics())) for taken in record.snapshots)
    evidence["h1"] = replace(evidence["h1"], records=(replace(record, snapshots=forged),))
    reasons = {item.reason for item in findings(evidence)}
    assert "error: connection refused" in reasons
    assert "the record of the host has this reading, but only the control node reads the BMC" in reasons


# ---- one host with one GPU ----

SMALL = one_figure_plan("h1", rackproof_bmc_address="bmc")
EVENT, FITTED = f"{LOG},entry=8", "bmc.power_supply.fitted"


def bmc_verdicts(
    *snapshots: tuple[Metric, ...], serials: Sequence[str] = (), gpus: Sequence[Gpu] = ()
) -> list[Verdict]:
    """Return the verdicts on a BMC with these readings.

    `serials`: for each snapshot of the host, the system serial that the host read; empty if the host could not read it.
    """
    evidence = host_evidence(SMALL, "h1", gpus=tuple(gpus))
    (record,) = evidence.records
    name = "host.system.serial"
    own = [reading(serial, name=name, scope="host", absent="" if serial else "error: lost") for serial in serials]
    taken = tuple(
        replace(item, metrics=(metric,)) for item, metric in zip(record.snapshots[: len(own)], own, strict=True)
    )
    evidence = replace(evidence, records=(replace(record, snapshots=taken),), bmc=bmc_record("h1", *snapshots))
    return list(judge_bmc(HostView(SMALL, SMALL.hosts[0], evidence, ())))


def with_entries(number: int, *, new: Any, texts: int | None = None) -> tuple[Metric, ...]:
    """Return readings in which the BMC states that its event log has `new` new entries.

    The BMC lists the severities of `number` new entries, and the texts of `texts` new entries (None: `number`).
    """
    metrics = with_value(healthy("h1").metrics(), "log.new_entries", LOG, new)
    of_entries = {
        "bmc.event.severity": {f"{LOG},entry={at}": "OK" for at in range(number)},
        "bmc.event.message": {f"{LOG},entry={at}": "on" for at in range(number if texts is None else texts)},
    }
    return tuple(
        replace(item, values=values, absent={}) if (values := of_entries.get(item.name)) else item for item in metrics
    )


def with_absent(metrics: tuple[Metric, ...], name: str, *scopes: str) -> tuple[Metric, ...]:
    """Return the readings. In these scopes, `bmc.{name}` has the reason "error: lost" for the absence of its value."""
    why = dict.fromkeys(scopes, "error: lost")
    return tuple(replace(item, absent=why) if item.name == f"bmc.{name}" else item for item in metrics)


DIFFER = ("bmc.event.severity", "host", "not every new entry of the event logs has both a severity and a text")
NO_TEXT = ("bmc.event.message", "host", "an entry of an event log has no text")


@pytest.mark.parametrize(
    ("last", "problems"),
    [
        (with_entries(0, new=0), []), (with_entries(2, new=2), []),
        (with_entries(2, new=2, texts=1), [DIFFER]), (with_entries(1, new=1, texts=2), [DIFFER]),
        (with_absent(with_entries(1, new=1), "event.message", "host"), [NO_TEXT]),
        (with_absent(with_entries(0, new=0), "event.message", EVENT), [NO_TEXT]),
        (with_entries(1, new=2), [("bmc.log.new_entries", LOG, "is 2, but 1 new entry is listed")]),
        (with_entries(1, new="all"), [("bmc.log.new_entries", LOG, "is all, but 1 new entry is listed")]),
        # At most 200 entries are listed.
        (with_entries(200, new=201), []),
        (with_entries(199, new=201), [("bmc.log.new_entries", LOG, "is 201, but 199 new entries are listed")]),
        (with_value(healthy("h1").metrics(), "power_supply.fitted", "host", 3),
         [(FITTED, "host", "is 3, but 2 power supplies were read")]),
        # A power supply whose health has no value, but a reason for its absence, counts as read.
        (with_value(with_absent(healthy("h1").metrics(), "power_supply.health", "psu=PSU3", "host"),
                    "power_supply.fitted", "host", 3), []),
    ],
)  # fmt: skip
def test_lists_of_log_entries_and_power_supplies_must_be_complete(
    last: tuple[Metric, ...], problems: list[tuple[str, str, str]]
) -> None:
    shown = [(item.name, item.scope, item.reason) for item in bmc_verdicts(last, last, last)]
    assert list(dict.fromkeys(shown)) == problems
    assert len(shown) == len(MOMENTS) * len(problems)


NEEDED = (
    "bmc.event.severity", "bmc.event.message", "bmc.log.new_entries", "bmc.power_supply.fitted", "bmc.power_supply.health",
    "bmc.fan.health",
)  # fmt: skip


@pytest.mark.parametrize(
    ("change", "problems"),
    [
        (lambda _: unreadable("no route"), []),
        (lambda metrics: [item for item in metrics if item.name != "bmc.readable"],
         [("bmc.readable", "host", "the snapshot does not state whether the BMC could be read")]),
        (lambda metrics: [replace(item, values={}) if item.name == "bmc.readable" else item for item in metrics],
         [("bmc.readable", "host", "the snapshot does not state whether the BMC could be read")]),
        (lambda metrics: [replace(item, unit="Hz") if item.name == "bmc.inlet.temperature" else item for item in metrics],
         [("bmc.inlet.temperature", "host", "has the unit Hz, but this reading is in Cel")]),
        (lambda metrics: with_value(metrics, "fan.health", "psu=FAN2", "OK"),
         [("bmc.fan.health", "psu=FAN2", "read in the scope psu=FAN2, which is not a scope of this reading")]),
        *(
            (lambda metrics, name=name: [item for item in metrics if item.name != name],
             [(name, "host", "missing in the snapshot before preflight")])
            for name in NEEDED
        ),
    ],
    ids=["unreadable", "not stated", "no value", "wrong unit", "wrong scope", *(f"no {name}" for name in NEEDED)],
)  # fmt: skip
def test_missing_or_wrong_reading_is_named_unless_the_bmc_could_not_be_read(
    change: Any, problems: list[tuple[str, str, str]]
) -> None:
    metrics = tuple(change(healthy("h1").metrics()))
    shown = [(item.name, item.scope, item.reason) for item in bmc_verdicts(metrics, metrics, metrics)]
    assert shown[: len(problems)] == problems
    assert len(shown) == len(MOMENTS) * len(problems)


def test_missing_readings_of_a_bmc_are_reported_in_the_order_of_their_names() -> None:
    metrics = tuple(item for item in healthy("h1").metrics() if item.name == "bmc.readable")
    names = [item.name for item in bmc_verdicts(metrics, metrics, metrics)]
    assert names == sorted({*NAMES} - {"bmc.readable"}) * len(MOMENTS)


def test_scope_that_only_some_snapshots_have_is_named_unless_it_is_a_log_entry() -> None:
    metrics = healthy("h1").metrics()
    second_fan = with_value(metrics, "fan.health", "fan=FAN2", "OK")
    assert bmc_verdicts(with_entries(1, new=1), metrics, metrics) == []
    result = [(item.name, item.scope, item.stage, item.reason) for item in bmc_verdicts(metrics, second_fan, metrics)]
    reason = "missing in the snapshot {}, but another snapshot of the BMC has it"
    assert result == [
        ("bmc.fan.health", "fan=FAN2", "preflight", reason.format("before preflight")),
        ("bmc.fan.health", "fan=FAN2", "benchmark", reason.format("after benchmark")),
    ]


@pytest.mark.parametrize("problem", ["", "bmcs/h1.json is missing"])
def test_bmc_without_a_record_gets_one_inconclusive_verdict(problem: str) -> None:
    view = HostView(SMALL, SMALL.hosts[0], replace(host_evidence(SMALL), bmc_problem=problem), ())
    (verdict,) = judge_bmc(view)
    assert (verdict.name, verdict.scope, verdict.verdict) == ("bmc.readable", "host", INCONCLUSIVE)
    assert verdict.reason == (problem or "the BMC was not read")


def test_host_without_a_record_is_judged_only_by_the_readings_of_its_bmc() -> None:
    """Criteria that compare hosts are not applied."""
    plan = one_figure_plan("h1", rackproof_bmc_address="bmc")
    rules = (
        criterion("bmc.readable", id="readable", scope="host", value=True),
        criterion("bmc.firmware.version", id="same", scope="component", same_as_fleet=True, value=None),
        criterion("gpu.thing", id="gpu", origin="mine"),
    )
    evidence = {"h1": Evidence(bmc=bmc_record("h1"), problem="unreachable")}
    verdicts = judge(plan, evidence, [pack(*rules, name="mine", chosen=True)])
    assert [(item.name, item.criterion, item.verdict) for item in verdicts] == [
        ("record", "plan", INCONCLUSIVE),
        ("bmc.readable", "readable", PASS),
    ]


@pytest.mark.parametrize(
    ("times", "ended", "reasons"),
    [
        # The plan and the launch have the time 04:00:00. The plan must precede the snapshots, and the first snapshot the launch.
        # Times in the wrong order are accepted if they differ by at most 5 minutes.
        (("04:00:00", "04:00:01", "04:00:02"), "04:00:02", []),
        (("03:55:00", "04:00:00", "04:10:00"), "04:10:00", []),
        (("03:54:59", "04:00:00", "04:10:00"), "04:10:00", ["the record's times are not in order: 03:54:59 follows 04:00:00"]),
        (("04:00:00", "04:06:00", "04:01:00"), "04:01:00", []),
        (("04:00:00", "04:06:01", "04:01:00"), "04:01:00", ["the record's times are not in order: 04:01:00 follows 04:06:01"]),
        (("04:00:00", "04:00:00", "04:00:02"), "04:00:02", ["two snapshots of the BMC have the same time"]),
        (("04:00:00", "04:00:02", "04:00:02"), "04:00:02", ["two snapshots of the BMC have the same time"]),
        (("04:05:00", "04:06:00", "04:07:00"), "04:07:00", []),
        (("04:05:01", "04:06:00", "04:07:00"), "04:07:00",
         ["the BMC was first read at 04:05:01, after a launch began: which events it logged before is unknown"]),
        (("04:00:00", "04:00:01", "04:00:02"), "04:00:03",
         ["the last snapshot of the BMC has the time 04:00:02, but its record ends at 04:00:03"]),
        (("04:00:00", "later", "04:00:02"), "04:00:02",
         ["the record's times are not in order: later follows 04:00:00",
          "the record's times are not in order: 04:00:02 follows later"]),
    ],
)  # fmt: skip
def test_times_of_a_bmc_record_must_fit_the_plan_and_each_other(
    times: Sequence[str], ended: str, reasons: list[str]
) -> None:
    day = "2026-11-21T"
    record = bmc_record("h1")
    taken = tuple(replace(item, at=f"{day}{at}Z") for item, at in zip(record.snapshots, times, strict=True))
    record = replace(record, began=taken[0].at, ended=f"{day}{ended}Z", snapshots=taken)
    verdicts = judge_bmc(HostView(SMALL, SMALL.hosts[0], replace(host_evidence(SMALL, gpus=()), bmc=record), ()))
    shown = [item.reason.replace(day, "").replace("Z", "") for item in verdicts]
    assert list(dict.fromkeys(shown)) == reasons


def test_attempt_that_could_not_read_a_bmc_is_not_its_first_reading() -> None:
    record = bmc_record("h1", unreadable("no route"))
    taken = tuple(
        replace(item, at=item.at.replace("T04:00", f"T04:0{6 * at}")) for at, item in enumerate(record.snapshots[:2])
    )
    for metrics, is_late in ((taken[0].metrics, True), (taken[1].metrics, False)):
        shots = (replace(taken[0], metrics=metrics), taken[1])
        late = replace(record, ended=shots[-1].at, snapshots=shots)
        verdicts = judge_bmc(HostView(SMALL, SMALL.hosts[0], replace(host_evidence(SMALL), bmc=late), ()))
        assert any("was first read at 2026-11-21T04:06:01Z" in item.reason for item in verdicts) is is_late


@pytest.mark.parametrize(
    ("verdict", "is_explained"),
    [({}, True), ({"verdict": PASS}, False), ({"name": "bmc.fan.health"}, False), ({"scope": f"{LOG},entry=9"}, False)],
)
def test_only_a_failed_verdict_on_a_log_entry_gets_the_text_of_the_entry(
    verdict: dict[str, Any], is_explained: bool
) -> None:
    event = with_event(healthy("h1").metrics(), "Warning", "a fan failed")
    evidence = replace(host_evidence(SMALL), bmc=bmc_record("h1", event, event, event))
    fields = {
        "host": "h1",
        "scope": EVENT,
        "name": "bmc.event.severity",
        "verdict": FAIL,
        "criterion": "c",
        "reason": "bad",
    }
    failed = Verdict(**{**fields, **verdict})
    explained = with_bmc_event(HostView(SMALL, SMALL.hosts[0], evidence, ()), failed)
    text = "the BMC logged during the stage: a fan failed"
    assert explained == (replace(failed, reason=f"bad; {text}", detail=text) if is_explained else failed)


@pytest.mark.parametrize(
    ("verdict", "part"),
    [
        ({}, "psu=PSU2"), ({"verdict": PASS}, ""), ({"name": "bmc.fan_redundancy.health"}, "fan=FAN1"),
        ({"name": "bmc.part.health"}, "psu=PSU2"), ({"name": "bmc.inlet.temperature"}, ""),
        ({"value": "Critical: it has no input"}, ""),
    ],
)  # fmt: skip
def test_failure_of_a_group_of_parts_is_attributed_to_one_failed_part(verdict: dict[str, Any], part: str) -> None:
    """If a power supply and a fan failed, `bmc.part.health` is attributed to the power supply.

    No part is set if the value already states a cause.
    """

    def health(name: str, scope: str, result: str = FAIL) -> Verdict:
        return Verdict(
            host="h1",
            scope=scope,
            name=f"bmc.{name}.health",
            verdict=result,
            criterion="c",
            reason="",
            value="Critical",
        )

    parts = [
        health("fan", "fan=FAN1"), health("power_supply", "psu=PSU1", PASS), health("power_supply", "psu=PSU2"),
        health("power_supply", "psu=PSU3"),
    ]  # fmt: skip
    lost = replace(health("power_redundancy", PSUS), **verdict)
    assert with_bmc_part(lost, parts) == (replace(lost, part=part) if part else lost)
    assert with_bmc_part(lost, parts[1:2]) == lost


@pytest.mark.parametrize(
    ("serials", "reported", "expected"),
    [
        (("A-1", "A-2"), ("A-2", "a-1"), {"gpu=0": PASS, "gpu=1": PASS}),
        # The form of a serial is its length, and whether it has only digits. A serial that the BMC does not report gets a verdict
        # only if the BMC reports at least as many serials of this form as the host.
        (("A-1", "A-2"), ("A-1",), {"gpu=0": PASS}),
        (("A-1", "A-2"), ("A-1", "A-3"), {"gpu=0": PASS, "gpu=1": FAIL}),
        (("A-1", "A-2"), ("A-1", "A-33"), {"gpu=0": PASS}), (("123", "124"), ("123", "A-3"), {"gpu=0": PASS}),
        (("A-1", "A-2"), ("A-1", "A-1"), {"gpu=0": PASS}), (("A-1", "A-2"), ("A-1", "---"), {"gpu=0": PASS}),
        (("A-1", ""), ("A-1",), {"gpu=0": PASS}), (("000", "A-2"), ("000", "A-3"), {"gpu=1": FAIL}),
    ],
)  # fmt: skip
def test_unreported_gpu_serial_fails_only_if_the_bmc_reports_enough_serials_of_its_form(
    serials: Sequence[str], reported: Sequence[str], expected: dict[str, str]
) -> None:
    values = {f"processor=GPU{at}": serial for at, serial in enumerate(reported)}
    metrics = tuple(
        replace(item, values=values) if item.name == "bmc.gpu.serial" else item for item in healthy("h1").metrics()
    )
    gpus = [replace(builders.gpu("h1", at), serial=serial) for at, serial in enumerate(serials)]
    verdicts = bmc_verdicts(metrics, metrics, metrics, gpus=gpus)
    assert {item.scope: item.verdict for item in verdicts} == expected


def test_failed_verdict_on_a_serial_lists_at_most_eight_serials_that_the_bmc_reports() -> None:
    values = {f"processor=GPU{at}": f"A-{at}" for at in range(9)}
    metrics = tuple(
        replace(item, values=values) if item.name == "bmc.gpu.serial" else item for item in healthy("h1").metrics()
    )
    (verdict,) = bmc_verdicts(metrics, metrics, metrics, gpus=[replace(builders.gpu("h1", 0), serial="B-1")])
    assert verdict.limit == "A-0, A-1, A-2, A-3, A-4, A-5, A-6, A-7"


def test_serial_that_the_bmc_reports_and_that_changes_during_the_run_is_inconclusive() -> None:
    first, last = (with_value(healthy("h1").metrics(), "system.serial", "system=1", text) for text in ("S1X", "S2X"))
    (verdict,) = bmc_verdicts(first, first, last)
    assert (verdict.name, verdict.scope, verdict.stage) == ("bmc.system.serial", "system=1", "benchmark")
    assert (verdict.verdict, verdict.reason) == (INCONCLUSIVE, "changed during the run: S1X, then S2X")


@pytest.mark.parametrize("kind", ["system", "chassis"])
def test_last_serial_that_the_host_could_read_is_compared_with_the_serial_of_system_or_chassis(kind: str) -> None:
    metrics = with_value(healthy("h1").metrics(), f"{kind}.serial", f"{kind}=1", "S2X")
    (judged,) = bmc_verdicts(metrics, metrics, metrics, serials=["S2X", ""])
    assert (judged.name, judged.verdict, judged.value) == ("bmc.system.serial", PASS, "S2X")


@pytest.mark.parametrize(
    ("reported", "verdict", "limit", "action", "severity"),
    [("S2X", PASS, "S2X", "none", ""), ("S9X", FAIL, "S9X", "inspect_hardware", "critical")],
)
def test_last_serial_of_the_host_is_compared_and_only_a_failure_has_a_detail_and_an_action(
    reported: str, verdict: str, limit: str, action: str, severity: str
) -> None:
    metrics = with_value(healthy("h1").metrics(), "system.serial", "system=1", reported)
    for serials in (["S2X"], ["S1X", "S2X"]):
        (judged,) = bmc_verdicts(metrics, metrics, metrics, serials=serials)
        assert (judged.name, judged.scope, judged.stage, judged.verdict) == (
            "bmc.system.serial", "host", "preflight", verdict,
        )  # fmt: skip
        assert (judged.value, judged.limit, judged.operator, judged.unit) == ("S2X", limit, "eq", "1")
        assert (judged.criterion, judged.basis, judged.kind) == ("bmc-serial", "policy", "identity")
        assert (judged.action, judged.severity) == (action, severity)
        other = "the same" if verdict == PASS else "S9X"
        assert judged.reason == f"the host reports the serial S2X, its BMC reports {other}"
        assert judged.detail == ("" if verdict == PASS else judged.reason)


@pytest.mark.parametrize("same", ["h1-0", "H1-0"])
def test_failed_verdict_on_a_serial_lists_only_serials_that_no_gpu_of_the_host_has(same: str) -> None:
    """`same`: the serial that the BMC reports for GPU 0, in the letter case of the host or in another."""
    metrics = with_value(healthy("h1").metrics(), "gpu.serial", "processor=GPU1", "h9-9")
    metrics = with_value(metrics, "gpu.serial", "processor=GPU0", same)
    verdicts = bmc_verdicts(metrics, metrics, metrics, gpus=[builders.gpu("h1", index) for index in (0, 1)])
    assert [(item.scope, item.serial, item.verdict, item.limit) for item in verdicts] == [
        ("gpu=0", "h1-0", PASS, "h1-0"),
        ("gpu=1", "h1-1", FAIL, "h9-9"),
    ]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("1650422000001", True), ("h1-0", True), ("7x", True), ("x7", True), ("000012", True),
        ("", False), ("0", False), ("0000", False), ("7", False), ("7777", False), ("0007000", False),
        ("To Be Filled By O.E.M.", False), ("Default string", False), ("System Serial Number", False), ("NONE", False),
    ],
)  # fmt: skip
def test_repeated_characters_and_placeholders_are_no_serial(text: str, expected: bool) -> None:
    """Zeros at both ends are ignored."""
    assert is_serial(text) is expected


# ---- altered evidence ----


def altered_records() -> Iterator[tuple[str, Record]]:
    """Yield pairs: the name of a change, and the record of a healthy BMC with this change.

    A change removes, duplicates, moves or alters one element.
    """
    record = bmc_record(
        "h1", healthy("h1").metrics(), healthy("h1").metrics(), with_event(healthy("h1").metrics(), "OK", "on")
    )
    for number, taken in enumerate(record.snapshots):
        if taken.phase != "during":
            rest = (*record.snapshots[:number], *record.snapshots[number + 1 :])
            yield f"without {taken.phase} {taken.stage}", replace(record, snapshots=rest)

        def changed(metrics: Any, number: int = number, taken: Snapshot = taken) -> Record:
            snapshots = [*record.snapshots]
            snapshots[number] = replace(taken, metrics=tuple(metrics))
            return replace(record, snapshots=tuple(snapshots))

        for metric in taken.metrics:
            where = f"{metric.name} {number}"
            others = [item for item in taken.metrics if item is not metric]
            yield f"without {where}", changed(others)
            yield f"unit of {where}", changed([*others, replace(metric, unit="Hz")])
            yield f"duplicate {where}", changed([*others, metric, metric])
            for scope in metric.values:
                without = {key: value for key, value in metric.values.items() if key != scope}
                yield f"{scope} of {where}", changed([*others, replace(metric, values=without)])
    yield "moved", replace(record, snapshots=(record.snapshots[0], *reversed(record.snapshots[1:])))


def test_altered_record_of_a_bmc_is_not_accepted() -> None:
    evidence, accepted, number = builders.evidence(PLAN)["h1"], [], 0
    for what, record in altered_records():
        view = HostView(PLAN, PLAN.host("h1"), replace(evidence, bmc=record), PACKS)
        number += 1
        if all(verdict.verdict == PASS for verdict in judge_bmc(view)):
            accepted.append(what)
    assert accepted == []
    assert number > 200


def test_catalogue_has_readings_of_bmcs() -> None:
    assert len(NAMES) >= 18
