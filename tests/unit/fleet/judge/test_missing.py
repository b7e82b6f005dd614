"""The slot of a missing GPU is identified, although the driver numbers the remaining GPUs from 0."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from fleet.judge.criteria import read_packs
from fleet.judge.evidence import Evidence
from fleet.judge.host_view import HostView
from fleet.judge.judge import judge
from fleet.judge.missing import BUS, DENIED, DRIVER, PERMITTED, SlotMap
from fleet.report.tables.summary_text import render_screen
from fleet.simulate.fleet import Fleet, place_faults, write_run
from schemas.baselines import HOST, HostBaseline, PartBaseline
from schemas.plans import Plan
from schemas.records import Gpu, Metric, Record, Snapshot
from schemas.reports import FAIL, INCONCLUSIVE, PASS, REJECTED, Verdict
from tests import builders
from tests.unit.fleet.simulate.test_simulate import CREATED, report_of

PLAN = builders.with_benchmarks(
    builders.plan("h1", "h2", "h3", gpu_count=4, profile="smoke"), benchmark={"memory": {"ops": ["copy"]}}
)
MISSING = 1
"""Slot of h2 whose GPU is missing."""


def host_with_slots(
    name: str,
    slots: Sequence[int],
    *,
    address: Callable[[int], str] = lambda slot: f"0000:{slot:02}:00.0",
    modules: Sequence[int] = (6, 8, 5, 7),
    on_bus: Sequence[int] = (),
    product: str = "SYS-821GE-TNHR",
    plan: Plan = PLAN,
) -> Evidence:
    """Return evidence of a host whose driver lists the GPUs in `slots`. The PCI bus has these GPUs and those in `on_bus`.

    `modules`: module number of the GPU in each slot; if empty, no GPU reports one.
    """
    devices = range(len(slots))
    gpus = tuple(
        replace(builders.gpu(name, slot), index=index, pci_bus_id=address(slot)) for index, slot in enumerate(slots)
    )
    pci = {f"pci={address(slot)}": "gpu" for slot in (*slots, *on_bus)}
    more = (
        Metric(name="gpu.module_id", unit="1", values={f"gpu={at}": modules[slot] for at, slot in enumerate(slots)})
        if modules
        else Metric(name="gpu.module_id", unit="1", absent={"gpu=0": "unsupported: no module"}),
        Metric(name="pcie.kind", unit="1", values={**pci, "pci=0000:70:00.0": "network"}),
        Metric(name="host.system.product", unit="1", values={"host": product}),
    )

    def with_gpu_readings(taken: Snapshot) -> Snapshot:
        kept = (metric for metric in taken.metrics if metric.name not in {metric.name for metric in more})
        counts = {"gpu.count": len(slots), "gpu.pci_count": len(slots) + len(on_bus)}
        counted = (replace(m, values={"host": counts[m.name]}) if m.name in counts else m for m in kept)
        return replace(taken, metrics=(*counted, *more))

    def with_gpus(record: Record) -> Record:
        shots = [with_gpu_readings(builders.snapshot(devices, stage=s.stage, phase=s.phase)) for s in record.snapshots]
        gone = {
            f"{what}={index}" for what in ("gpu", "peer") for index in range(len(slots), len(plan.host(name).devices))
        }
        kept = tuple(
            observation for observation in record.observations if gone.isdisjoint(observation.scope.split(","))
        )
        return replace(record, gpus=gpus, snapshots=tuple(shots), observations=kept)

    return Evidence(records=tuple(with_gpus(record) for record in builders.records(plan, name)))


ALL = range(4)
REMAINING = [slot for slot in ALL if slot != MISSING]
COMPLETE = {name: host_with_slots(name, ALL) for name in ("h1", "h2", "h3")}
"""Evidence of hosts without a missing GPU."""


def findings(plan: Plan = PLAN, **hosts: Evidence) -> list[Verdict]:
    """Return the verdicts that do not pass. `hosts` replaces the evidence of complete hosts."""
    evidence = COMPLETE | hosts
    return [item for item in judge(plan, evidence, read_packs([])) if item.verdict != PASS]


def count_details(verdicts: Sequence[Verdict]) -> dict[str, str]:
    """Return name -> detail of the GPU-count verdicts on h2."""
    return {item.name: item.detail for item in verdicts if item.host == "h2" and item.name in (DRIVER, BUS)}


def test_missing_slot_is_derived_from_identical_hosts() -> None:
    detail = "nothing at PCI 0000:01:00.0 (module 8), where 2 of 2 hosts of its build have a GPU"
    verdicts = findings(h2=host_with_slots("h2", REMAINING))
    assert count_details(verdicts) == {"gpu.count": detail, "gpu.pci_count": detail}
    assert {item.reason for item in verdicts if item.name == "gpu.count"} == {f"found 3, wanted = 4; {detail}"}
    (unseen,) = [item.reason for item in verdicts if item.name == "gpu" and item.host == "h2"]
    assert "the driver lists 3 GPUs and numbers them from 0, so any GPU of the host may be the missing one" in unseen


def test_gpu_still_on_the_bus_is_named_by_its_address() -> None:
    details = count_details(findings(h2=host_with_slots("h2", REMAINING, on_bus=[MISSING])))
    assert details == {"gpu.count": "on the PCI bus, but not listed by the driver: 0000:01:00.0 (see the kernel log)"}


def host_that_loses_a_gpu(name: str, *counts: int | None) -> Evidence:
    """Return evidence of h2. Its GPU in slot MISSING answers only in the first snapshot.

    Args:
        name: name of the reading of the kernel log.
        counts: number of log lines about the GPU in the first snapshot, then in each later one; None: the log cannot be read.
    """
    evidence = host_with_slots("h2", REMAINING)
    host_record, *rest = evidence.records
    below = "xid=79" if name == "xid.count" else "message=fallen_off_the_bus"

    def with_log(taken: Snapshot, slots: Sequence[int], count: int | None) -> Snapshot:
        lines = {} if count is None else {f"pci=0000:0{MISSING}:00.0,{below}": count} if count else {}
        log = [] if count is None else [Metric(name=name, unit="1", values=lines)]
        addresses = {f"gpu={at}": f"00000000:{slot:02}:00.0" for at, slot in enumerate(slots)}
        kept = (item for item in taken.metrics if item.name not in (name, "gpu.pci_bus_id"))
        return replace(taken, metrics=(*kept, Metric(name="gpu.pci_bus_id", unit="1", values=addresses), *log))

    first, *later = host_record.snapshots
    taken = (with_log(first, ALL, counts[0]), *(with_log(item, REMAINING, counts[1]) for item in later))
    return replace(evidence, records=(replace(host_record, snapshots=taken), *rest))


@pytest.mark.parametrize("name", ["xid.count", "xid.message"])
@pytest.mark.parametrize(
    ("counts", "is_cause"),
    [
        ((1, 1), False),  # the GPU answered after this line
        ((1, 2), True),
        ((0, 1), True),
        ((2, 1), True),  # old lines were overwritten, so the remaining line may be new
        ((None, 1), True),
    ],
)
def test_kernel_log_line_is_a_cause_only_if_the_gpu_did_not_answer_afterwards(
    name: str, counts: tuple[int | None, int], is_cause: bool
) -> None:
    detail = count_details(findings(h2=host_that_loses_a_gpu(name, *counts)))[DRIVER]
    assert ("kernel log: the GPU at PCI 0000:01:00.0 fell off the bus" in detail) == is_cause, detail


def test_detail_states_the_cause_in_the_kernel_log_if_no_gpu_answers_any_more() -> None:
    evidence = host_with_slots("h2", [], on_bus=ALL)
    host_record, *rest = evidence.records
    lines = {f"pci=0000:{slot:02}:00.0,xid=79": 1 for slot in ALL}

    def with_log(taken: Snapshot, is_first: bool) -> Snapshot:
        addresses = {f"gpu={slot}": f"00000000:{slot:02}:00.0" for slot in ALL}
        lost = dict.fromkeys(addresses, "error: GPU is lost")
        bus_ids = Metric(
            name="gpu.pci_bus_id", unit="1", values=addresses if is_first else {}, absent={} if is_first else lost
        )
        log = Metric(name="xid.count", unit="1", values={} if is_first else lines)
        kept = (item for item in taken.metrics if item.name not in ("xid.count", "gpu.pci_bus_id"))
        return replace(taken, metrics=(*kept, bus_ids, log))

    taken = tuple(with_log(snapshot, at == 0) for at, snapshot in enumerate(host_record.snapshots))
    lost = replace(
        evidence,
        records=(replace(host_record, gpus=builders.evidence(PLAN)["h2"].records[0].gpus, snapshots=taken), *rest),
    )
    detail = count_details(findings(h2=lost))[DRIVER]
    assert (
        "kernel log: each GPU at PCI 0000:00:00.0, 0000:01:00.0, 0000:02:00.0, 0000:03:00.0 fell off the bus" in detail
    )


@pytest.mark.parametrize("kept_on_bus", [[MISSING], []])
@pytest.mark.parametrize(
    ("name", "below", "cause"),
    [
        ("xid.message", ["message=fallen_off_the_bus"], "fell off the bus"),
        ("xid.message", ["message=init_failed", "message=probe_failed"], "could not be initialized"),
        ("xid.message", ["message=probe_failed"], "was refused by the driver"),
        ("xid.count", ["xid=79", "xid=45"], "fell off the bus (XID 79)"),
    ],
)
def test_detail_states_the_cause_in_the_kernel_log(
    kept_on_bus: list[int], name: str, below: list[str], cause: str
) -> None:
    result = host_with_slots("h2", REMAINING, on_bus=kept_on_bus)
    # A log line about a GPU that answers (slot 0) is no cause.
    log = {f"pci=0000:{slot:02}:00.0,{what}": 1 for slot in (0, MISSING) for what in below}
    logged = add_metrics(result, Metric(name=name, unit="1", values=log))
    place = "on the PCI bus, but not listed by the driver: 0000:01:00.0" if kept_on_bus else reason_for(8)
    assert count_details(findings(h2=logged))[DRIVER] == f"{place}; kernel log: the GPU at PCI 0000:01:00.0 {cause}"


@pytest.mark.parametrize(
    ("logged", "action", "text"),
    [
        (["no_address_space", "probe_failed"], "configure", "has no address space (BAR)"),
        (["open_modules_required", "init_failed"], "configure", "requires NVIDIA's open kernel modules"),
        (["open_modules_unsupported"], "configure", "is not supported by NVIDIA's open kernel modules"),
        (["unsupported_by_driver"], "configure", "is not supported by the installed driver release"),
        (["firmware_missing", "init_failed"], "configure", "has no firmware (GSP)"),
        (["confidential_computing", "init_failed"], "configure", "is not in the confidential computing mode"),
        (["other_driver", "probe_failed"], "configure", "is in use by another driver"),
        (["no_address_space", "fallen_off_the_bus"], "inspect_hardware", "fell off the bus"),
        (["init_failed"], "inspect_hardware", "could not be initialized"),
    ],
)
def test_action_is_to_configure_only_if_a_setting_hides_the_gpu(logged: list[str], action: str, text: str) -> None:
    result = host_with_slots("h2", REMAINING, on_bus=[MISSING])
    log = {f"pci=0000:{MISSING:02}:00.0,message={message}": 1 for message in logged}
    verdicts = findings(h2=add_metrics(result, Metric(name="xid.message", unit="1", values=log)))
    (count,) = [item for item in verdicts if item.name == DRIVER]
    assert (count.verdict, count.action) == (FAIL, action)
    assert text in count.detail


@pytest.mark.parametrize(
    ("driver", "action"),
    [("vfio-pci", "configure"), ("nouveau", "configure"), ("nvidia", "inspect_hardware"), ("none", "inspect_hardware")],
)
def test_driver_of_a_missing_gpu_is_named_only_if_the_gpu_is_bound_to_a_driver_other_than_that_of_nvidia(
    driver: str, action: str
) -> None:
    drivers = {f"pci=0000:{slot:02}:00.0": driver if slot == MISSING else "nvidia" for slot in ALL}
    bound = Metric(name="pcie.driver", unit="1", values=drivers)
    verdicts = findings(h2=add_metrics(host_with_slots("h2", REMAINING, on_bus=[MISSING]), bound))
    (count,) = [item for item in verdicts if item.name == DRIVER]
    assert count.action == action
    text = f"the GPU at PCI 0000:01:00.0 is bound to the driver {driver}"
    assert (text in count.detail) is (action == "configure")


@pytest.mark.parametrize(
    ("denied", "action"),
    [([1, 2], "configure"), ([1], "inspect_hardware"), ([], "inspect_hardware"), ([0, 3], "inspect_hardware")],
)
def test_action_is_to_configure_only_if_the_agent_may_use_none_of_the_missing_gpus(
    denied: list[int], action: str
) -> None:
    permitted = {f"pci=0000:{slot:02}:00.0": slot not in denied for slot in ALL}
    metric = Metric(name=PERMITTED, unit="1", values=permitted)
    result = add_metrics(host_with_slots("h2", [0, 3], on_bus=[1, 2]), metric)
    (count,) = [item for item in findings(h2=result) if item.name == DRIVER]
    assert (count.verdict, count.action) == (FAIL, action)
    both = f"each GPU at PCI 0000:01:00.0, 0000:02:00.0 {DENIED}"
    assert (both in count.detail) is (denied == [1, 2])


def test_host_whose_gpus_are_all_denied_is_to_be_configured() -> None:
    metric = Metric(name=PERMITTED, unit="1", values={f"pci=0000:{slot:02}:00.0": False for slot in ALL})
    result = add_metrics(host_with_slots("h2", [], on_bus=ALL), metric)
    (count,) = [item for item in findings(h2=result) if item.name == DRIVER]
    assert (count.verdict, count.value, count.action) == (FAIL, 0, "configure")
    assert DENIED in count.detail


def test_action_is_to_configure_only_if_the_log_names_a_setting_for_every_missing_gpu() -> None:
    result = host_with_slots("h2", [0, 3], on_bus=[1, 2])
    names = [f"pci=0000:{slot:02}:00.0,message=no_address_space" for slot in (1, 2)]
    for logged, action in ((names, "configure"), (names[:1], "inspect_hardware")):
        log = Metric(name="xid.message", unit="1", values=dict.fromkeys(logged, 1))
        (count,) = [item for item in findings(h2=add_metrics(result, log)) if item.name == DRIVER]
        assert count.action == action
        both = "each GPU at PCI 0000:01:00.0, 0000:02:00.0 has no address space"
        assert (both in count.detail) is (len(logged) == 2)


def test_gpus_outside_the_plan_that_are_bound_to_vfio_do_not_explain_a_missing_gpu() -> None:
    plan = builders.plan("h1", "h2", "h3", gpu_count=2)
    drivers = {f"pci=0000:{slot:02}:00.0": "vfio-pci" if slot > 1 else "nvidia" for slot in ALL}
    bound = Metric(name="pcie.driver", unit="1", values=drivers)
    hosts = {name: host_with_slots(name, [0, 1], on_bus=[2, 3], plan=plan) for name in ("h1", "h3")}
    lost = add_metrics(host_with_slots("h2", [0], on_bus=[1, 2, 3], plan=plan), bound)
    (count,) = [item for item in findings(plan=plan, h2=lost, **hosts) if item.name == DRIVER]
    assert (count.verdict, count.value, count.action) == (FAIL, 1, "inspect_hardware")


def add_metrics(evidence: Evidence, *metrics: Metric) -> Evidence:
    """Return the evidence with these metrics in every snapshot. The first of `metrics` replaces a metric of the same name."""
    return replace(
        evidence,
        records=tuple(
            replace(
                record,
                snapshots=tuple(
                    replace(s, metrics=(*(m for m in s.metrics if m.name != metrics[0].name), *metrics))
                    for s in record.snapshots
                ),
            )
            for record in evidence.records
        ),
    )


def text_on_bus(slot: int) -> str:
    return f"on the PCI bus, but not listed by the driver: 0000:{slot:02}:00.0 (see the kernel log)"


def test_one_of_two_missing_gpus_is_still_on_the_bus() -> None:
    nothing = "nothing at PCI 0000:02:00.0 (module 5), where 2 of 2 hosts of its build have a GPU"
    result = host_with_slots("h2", [0, 3], on_bus=[1])
    assert count_details(findings(h2=result)) == {DRIVER: f"{text_on_bus(1)}; {nothing}", BUS: nothing}
    reason = "present when the host was accepted, missing now: serial h2-2 at PCI 0000:02:00.0"
    assert count_details(findings(h2=with_accepted_gpus(result, *ALL))) == {
        DRIVER: f"{text_on_bus(1)}; {reason}",
        BUS: reason,
    }


def test_no_empty_slot_is_named_if_the_readings_do_not_identify_one() -> None:
    more = host_with_slots("h2", [0, 1, 2], on_bus=[3, 4, 5])
    assert count_details(findings(h2=more)) == {DRIVER: ""}, (
        "three GPUs are only on the bus, so any of them may be the missing one"
    )
    # Two slots (1 and 3) are empty, but the bus lacks only one GPU: it has one in slot 7.
    elsewhere = host_with_slots("h2", [0, 2], on_bus=[7])
    assert count_details(findings(h2=elsewhere)) == {DRIVER: text_on_bus(7), BUS: ""}
    # The GPU of slot 3 has the address that slot 1 has in other hosts.
    renumbered = host_with_slots("h2", [0, 3], on_bus=[2], address=lambda slot: f"0000:0{(0, 9, 2, 1)[slot]}:00.0")
    assert count_details(findings(h2=renumbered)) == {DRIVER: text_on_bus(2), BUS: ""}
    # The driver lists a GPU at an address at which the bus has none.
    off_bus = change_gpus(
        host_with_slots("h2", REMAINING), lambda gpu: replace(gpu, pci_bus_id="0000:55:00.0") if gpu.index == 0 else gpu
    )
    assert count_details(findings(h2=off_bus)) == {DRIVER: "", BUS: ""}


def test_gpus_on_the_bus_are_those_of_the_last_snapshot() -> None:
    (first, *_), now = (
        host_with_slots("h2", REMAINING, on_bus=[MISSING]).records[0].snapshots,
        host_with_slots("h2", REMAINING),
    )
    host_record, *rest = now.records
    snapshots = (first, *host_record.snapshots[1:])
    evidence = replace(now, records=(replace(host_record, snapshots=snapshots), *rest))
    assert count_details(findings(h2=evidence)) == {DRIVER: reason_for(8), BUS: reason_for(8)}


def test_missing_slot_is_named_by_module_if_addresses_differ() -> None:
    detail = "nothing in module 8, where 2 of 2 hosts of its build have a GPU"
    details = count_details(
        findings(h2=host_with_slots("h2", REMAINING, address=lambda slot: f"0000:{slot - (slot > MISSING):02}:00.0"))
    )
    assert details == {"gpu.count": detail, "gpu.pci_count": detail}


def with_accepted_gpus(evidence: Evidence, *slots: int, **changes: str) -> Evidence:
    """Return the evidence with a baseline (record of the host when it was accepted) that has the GPUs of these slots.

    `changes`: fields of each of these GPUs to replace.
    """
    gpus = tuple(replace(builders.gpu("h2", at), **changes) for at in slots)  # type: ignore[arg-type]
    kept = PartBaseline(kind=HOST, part=HOST, id="h2", host="h2", runs=(), figures=(), gpus=gpus)
    return replace(evidence, baseline=HostBaseline(host=kept))


def change_gpus(evidence: Evidence, change: Callable[[Gpu], Gpu | None]) -> Evidence:
    """Return the evidence with a change of each GPU that the driver lists; if `change` returns None, the GPU is removed."""
    return replace(evidence, records=tuple(
        replace(record, gpus=tuple(gpu for each in record.gpus if (gpu := change(each)))) for record in evidence.records
    ))  # fmt: skip


def reason_for(module: int) -> str:
    return f"nothing at PCI 0000:01:00.0 (module {module}), where 2 of 2 hosts of its build have a GPU"


def test_missing_gpu_is_named_by_serial_from_the_accepted_record() -> None:
    detail = "present when the host was accepted, missing now: serial h2-1 at PCI 0000:01:00.0"
    assert count_details(findings(h2=with_accepted_gpus(host_with_slots("h2", REMAINING), *ALL))) == {
        "gpu.count": detail,
        "gpu.pci_count": detail,
    }


def test_missing_gpu_without_a_serial_is_named_by_uuid() -> None:
    h2 = change_gpus(host_with_slots("h2", REMAINING), lambda gpu: replace(gpu, serial=""))
    detail = count_details(findings(h2=with_accepted_gpus(h2, *ALL, serial="")))["gpu.count"]
    assert (
        detail
        == f"present when the host was accepted, missing now: UUID {builders.gpu('h2', 1).uuid} at PCI 0000:01:00.0"
    )


def test_occupied_slot_is_not_reported_as_empty() -> None:
    """The GPU of slot 3 was moved to slot 2: the GPU of slot 2 is gone and slot 3 is empty."""
    moved = change_gpus(
        host_with_slots("h2", [0, 1, 2]), lambda gpu: replace(gpu, serial="h2-3") if gpu.index == 2 else gpu
    )
    detail = "present when the host was accepted, missing now: serial h2-2"
    where = "nothing at PCI 0000:03:00.0 (module 7), where 2 of 2 hosts of its build have a GPU"
    assert count_details(findings(h2=with_accepted_gpus(moved, *ALL))) == dict.fromkeys(
        (DRIVER, BUS), f"{detail}; {where}"
    )


def test_accepted_gpu_without_an_address_is_named_by_its_serial_alone() -> None:
    evidence = with_accepted_gpus(host_with_slots("h2", REMAINING), *ALL)
    assert evidence.baseline
    assert evidence.baseline.host
    without_address = replace(
        evidence.baseline.host, gpus=tuple(replace(gpu, pci_bus_id="") for gpu in evidence.baseline.host.gpus)
    )
    detail = count_details(findings(h2=replace(evidence, baseline=HostBaseline(host=without_address))))[DRIVER]
    assert detail == f"present when the host was accepted, missing now: serial h2-1; {reason_for(8)}"


def test_no_serial_is_named_if_the_baseline_does_not_identify_the_missing_gpu() -> None:
    more = with_accepted_gpus(host_with_slots("h2", REMAINING), 0, 1, 2, 3, 4)
    assert count_details(findings(h2=more)) == dict.fromkeys((DRIVER, BUS), reason_for(8)), (
        "two GPUs of the baseline are gone, but the count is only one too low"
    )


def test_gpu_count_names_no_slot_if_a_gpu_has_no_address_or_is_not_in_the_record() -> None:
    without_address = change_gpus(
        host_with_slots("h2", REMAINING), lambda gpu: replace(gpu, pci_bus_id="") if gpu.index == 0 else gpu
    )
    assert count_details(findings(h2=without_address)) == {DRIVER: "", BUS: ""}
    unlisted = change_gpus(host_with_slots("h2", REMAINING), lambda gpu: None if gpu.index == 1 else gpu)
    assert count_details(findings(h2=unlisted)) == {DRIVER: "", BUS: reason_for(8)}, (
        "the PCI bus shows which slot is empty"
    )


@pytest.mark.parametrize("missing", [0, 2])
def test_no_slot_is_named_if_only_some_gpus_are_tested(missing: int) -> None:
    """GPU 0 is not tested, so the record lacks it. It must not be mistaken for the missing GPU."""
    chosen = replace(PLAN, hosts=tuple(replace(each, devices=(1, 2, 3)) for each in PLAN.hosts))
    present = [slot for slot in ALL if slot != missing]
    evidence = {
        name: change_gpus(host_with_slots(name, ALL), lambda gpu: gpu if gpu.index else None) for name in ("h1", "h3")
    }
    result = host_with_slots("h2", present[1:], on_bus=[present[0]])
    evidence["h2"] = change_gpus(result, lambda gpu: replace(gpu, index=gpu.index + 1))
    assert {item.detail for item in judge(chosen, evidence, read_packs([])) if item.name == DRIVER} == {""}


def test_slot_is_identified_by_address_alone_unless_every_gpu_has_a_module_id() -> None:
    hosts = {name: host_with_slots(name, ALL if name != "h2" else REMAINING, modules=()) for name in ("h1", "h2", "h3")}
    where = "nothing at PCI 0000:01:00.0, where 2 of 2 hosts of its build have a GPU"
    detail = f"{where} (slots are identified by PCI address only: not every GPU reports a module number)"
    assert count_details(findings(**hosts)) == {DRIVER: detail, BUS: detail}
    hosts = {name: host_with_slots(name, ALL if name != "h2" else REMAINING, modules=(6, True, 5, 7)) for name in hosts}
    assert count_details(findings(**hosts)) == {DRIVER: detail, BUS: detail}, "a module id must be a number"


def test_gpu_that_a_reading_reports_as_lost_is_not_beyond_the_driver() -> None:
    """A GPU is beyond the driver if it is in no snapshot, and the driver lists only GPUs with lower indices."""
    last = host_with_slots("h2", [0, 1, 2])
    lost = Metric(name="gpu.name", unit="1", absent={"gpu=3": "error: NVML: GPU is lost"})
    reported = builders.with_snapshot(last, replace(last.records[0].snapshots[-1], metrics=(lost,)))
    for evidence, beyond in ((last, True), (reported, False)):
        view = HostView(PLAN, PLAN.host("h2"), evidence, read_packs([]))
        assert [view.is_beyond_driver(scope) for scope in ("gpu=3", "gpu=3,peer=1", "gpu=1,peer=3", "host")] == [
            beyond, beyond, False, False,
        ]  # fmt: skip


def test_no_gpu_is_beyond_the_driver_if_the_indices_of_the_driver_do_not_start_at_0() -> None:
    evidence = change_gpus(host_with_slots("h2", ALL), lambda gpu: gpu if gpu.index else None)
    assert not HostView(PLAN, PLAN.host("h2"), evidence, read_packs([])).is_beyond_driver("gpu=4")


def test_slot_is_named_only_if_most_hosts_have_the_same_layout() -> None:
    """At least two hosts, and more than half of the hosts without a missing GPU, must have this layout."""
    slots = SlotMap()
    for name, modules in (("h1", (6, 8, 5, 7)), ("h3", (6, 8, 5, 7)), ("h4", (1, 2, 3, 4)), ("h5", (1, 2, 3, 4))):
        slots.add(HostView(PLAN, PLAN.host("h1"), host_with_slots("h1", ALL, modules=modules), read_packs([])))
        result = slots.describe_empty(
            HostView(PLAN, PLAN.host("h2"), host_with_slots("h2", REMAINING), read_packs([])), 1, ()
        )
        assert bool(result) == (name in ("h3", "h4")), name


def test_missing_gpu_is_not_located_by_module_if_its_module_id_is_no_number() -> None:
    slots, modules = SlotMap(), (6, True, 5, 7)  # the module ID of the missing GPU is not a number
    for _ in range(2):
        slots.add(HostView(PLAN, PLAN.host("h1"), host_with_slots("h1", ALL, modules=modules), read_packs([])))
    moved = host_with_slots("h2", REMAINING, modules=modules, address=lambda slot: f"0000:{slot + 10}:00.0")
    assert slots.describe_empty(HostView(PLAN, PLAN.host("h2"), moved, read_packs([])), 1, ()) == ""


def test_slots_that_two_worker_processes_found_are_merged() -> None:
    views = {name: HostView(PLAN, PLAN.host(name), host_with_slots(name, ALL), read_packs([])) for name in ("h1", "h3")}
    slots, slots_of_other_worker = SlotMap(), SlotMap()
    slots.add(views["h1"])
    slots_of_other_worker.add(views["h3"])
    evidence = HostView(PLAN, PLAN.host("h2"), host_with_slots("h2", REMAINING), read_packs([]))
    assert slots.describe_empty(evidence, 1, ()) == "", "one other host is not enough"
    slots.update(slots_of_other_worker)
    assert slots.describe_empty(evidence, 1, ()) == reason_for(8)


@pytest.mark.parametrize(
    "others",
    [
        {"h1": host_with_slots("h1", ALL, product="R760xa"), "h3": host_with_slots("h3", ALL, product="R760xa")},
        {"h1": host_with_slots("h1", ALL, address=lambda slot: f"0000:{slot + 1:02}:00.0", modules=(1, 2, 3, 4))},
        {"h1": host_with_slots("h1", REMAINING)},
    ],
    ids=["other hosts of another build", "other hosts that differ from each other", "no complete host"],
)
def test_no_slot_is_named_if_the_other_hosts_do_not_show_which_slot_is_empty(others: dict[str, Evidence]) -> None:
    assert count_details(findings(h2=host_with_slots("h2", REMAINING), **others)) == {
        "gpu.count": "",
        "gpu.pci_count": "",
    }


def test_no_slot_is_named_if_more_gpus_are_missing_than_slots_are_known() -> None:
    """The plan expects eight GPUs and each host has four, so the other slots are unknown."""
    plan = builders.plan("h1", "h2", "h3", gpu_count=8)
    evidence = {name: host_with_slots(name, ALL, plan=plan) for name in ("h1", "h2", "h3")}
    verdicts = [item for item in judge(plan, evidence, read_packs([])) if item.name == "gpu.count"]
    of_inventory = "no host has what rackproof_gpu_count states, and most hosts have the same other value"
    assert [(item.verdict, item.detail) for item in verdicts] == [(FAIL, of_inventory)] * 3


def test_missing_gpu_is_attributed_to_its_host_in_the_gang(tmp_path: Path) -> None:
    """The rank without a GPU is the last rank of its host, whichever GPU is missing."""
    fleet = Fleet(profile="smoke", hosts=4, racks=1)
    plan = fleet.plan("run", CREATED)
    write_run(tmp_path / "run", fleet, place_faults(["missing_gpu:r01-h02:3"], plan, 0), plan)
    report = report_of(tmp_path / "run")
    assert report.decision == REJECTED
    failed = [item for item in report.verdicts if item.verdict == FAIL]
    assert {(item.host, item.scope, item.name) for item in failed} == {
        ("r01-h02", "host", name) for name in (DRIVER, BUS)
    }
    (reported,) = [item for item in report.verdicts if item.name == "gang.fault"]
    assert (reported.host, reported.scope, reported.verdict) == ("r01-h02", "host", INCONCLUSIVE)
    assert reported.reason.endswith("cannot take part: CUDA shows 7 devices: none is left for gpu=7")
    launches = [launch.members for host in report.hosts for launch in host.launches if host.name == "r01-h01"]
    assert [members for members in launches if len(members) > 1] == [
        ("r01-h01", "r01-h02", "r01-h03", "r01-h04"), ("r01-h01", "r01-h03", "r01-h04"),
    ], "one launch without the faulty host must follow the failed launch"  # fmt: skip
    where = "nothing at PCI 0000:09:00.0 (module 4), where 3 of 3 hosts with 8 GPUs have a GPU"
    assert {item.detail for item in failed} == {where}
    assert re.search(
        rf"FAIL +Inspect the hardware +r01-h02 has 7 of 8 GPUs: {re.escape(where)}", render_screen(report, width=None)
    )
