"""A failed verdict on the number of GPUs names the missing GPUs, the empty slots, and the known causes.

The causes are drivers to which GPUs are bound, and lines in the kernel log. If settings explain all GPUs that the
driver does not list, the action becomes `configure`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest

from fleet.judge.host_view import HostView
from fleet.judge.missing import SlotMap, with_missing_gpus
from schemas.baselines import HOST, HostBaseline, PartBaseline
from schemas.records import Gpu, Metric, Snapshot
from schemas.reports import FAIL, INCONCLUSIVE, PASS, Verdict
from tests import builders
from tests.unit.fleet.judge.small_fleet import host_view, one_figure_plan

PLAN = one_figure_plan("h1", "h2", "h3", "h4", gpu_count=4)
ADDRESSES = [f"0000:0{slot}:00.0" for slot in range(4)]


def gpu(index: int, slot: int) -> Gpu:
    return replace(builders.gpu("h1", slot), index=index, pci_bus_id=ADDRESSES[slot])


def view(
    slots: Sequence[int] = (0, 1, 2, 3),
    *,
    host: str = "h1",
    modules: Mapping[int, int] | None = None,
    plan: Any = PLAN,
    on_bus: Sequence[int] = (),
    snapshots: Sequence[Mapping[str, Mapping[str, Any]]] = ({},),
) -> HostView:
    """Return the view of a host with GPUs in these slots.

    Args:
        slots: slots of the GPUs that the driver lists.
        host: name of the host.
        modules: slot -> module number; None: the number of the slot plus 1.
        plan: the plan of the run.
        on_bus: further slots in which the PCI bus has a GPU; if empty, there is no reading of the bus.
        snapshots: for each snapshot, its further readings: name -> scope -> value.
    """
    of_slot = {slot: slot + 1 for slot in range(4)} if modules is None else modules
    listed = {f"gpu={index}": of_slot[slot] for index, slot in enumerate(slots) if slot in of_slot}
    common: dict[str, Mapping[str, Any]] = {"gpu.module_id": listed, "host.system.product": {"host": "SYS-1"}}
    if on_bus:
        common["pcie.kind"] = {
            **{f"pci={ADDRESSES[slot]}": "gpu" for slot in (*slots, *on_bus)},
            "pci=0000:70:00.0": "network",
        }
        common["gpu.pci_count"] = {"host": len(slots) + len(on_bus)}
    shots = tuple(
        Snapshot(
            stage="preflight", phase="before", at=f"2026-11-21T04:00:0{at}Z", duration_s=0.1,
            metrics=tuple(Metric(name=name, unit="1", values=values) for name, values in {**common, **more}.items()),
        )
        for at, more in enumerate(snapshots)
    )  # fmt: skip
    return host_view(plan, host, snapshots=shots, gpus=tuple(gpu(index, slot) for index, slot in enumerate(slots)))


def slot_map(*hosts: HostView) -> SlotMap:
    slots = SlotMap()
    for host in hosts:
        slots.add(host)
    return slots


FULL = slot_map(view(host="h2"), view(host="h3"))


def failed(name: str = "gpu.count", value: Any = 3, limit: Any = 4, **fields: Any) -> Verdict:
    default = {
        "host": "h1",
        "scope": "host",
        "verdict": FAIL,
        "criterion": "count",
        "reason": "found 3",
        "action": "reseat",
    }
    return Verdict(**{**default, "name": name, "value": value, "limit": limit, **fields})


def result(host: HostView, slots: SlotMap = FULL, **fields: Any) -> tuple[str, str]:
    """Return detail and action of the failed count of a host."""
    verdict = with_missing_gpus(host, failed(**fields), slots)
    assert verdict.reason == ("found 3" if not verdict.detail else f"found 3; {verdict.detail}")
    return verdict.detail, verdict.action


EMPTY_1 = "nothing at PCI 0000:01:00.0 (module 2), where 2 of 2 hosts of its build have a GPU"


@pytest.mark.parametrize(
    "fields",
    [
        {"name": "gpu.links"}, {"verdict": PASS}, {"verdict": INCONCLUSIVE}, {"scope": "gpu=0"}, {"value": 3.0},
        {"limit": None}, {"value": None},
    ],
)  # fmt: skip
def test_only_a_failed_count_of_the_host_is_explained(fields: dict[str, Any]) -> None:
    verdict = failed(**fields)
    assert with_missing_gpus(view((0, 2, 3)), verdict, FULL) is verdict


@pytest.mark.parametrize("name", ["gpu.count", "gpu.pci_count"])
def test_slot_that_is_empty_only_in_this_host_of_the_build_is_named(name: str) -> None:
    assert result(view((0, 2, 3)), name=name) == (EMPTY_1, "reseat")
    two = "nothing at PCI 0000:01:00.0 (module 2), PCI 0000:02:00.0 (module 3), where 2 of 2 hosts of its build have a GPU"
    assert result(view((0, 3)), name=name, value=2) == (two, "reseat")


def test_detail_of_the_verdict_stays_first() -> None:
    verdict = with_missing_gpus(view((0, 2, 3)), failed(detail="by the inventory"), FULL)
    assert verdict.detail == f"by the inventory; {EMPTY_1}"


@pytest.mark.parametrize(
    ("others", "is_named"),
    [
        ([view(host="h2")], False),
        ([view(host="h2"), view(host="h3")], True),
        ([view(host="h2"), view(host="h3"), view((0, 1, 3, 2), host="h4", modules={0: 9, 1: 2, 2: 3, 3: 4})], True),
        ([view(host="h2"), view(host="h3"), *[view(host="h4", modules={at: at + 5 for at in range(4)})] * 2], False),
        ([view(host="h2"), view((0, 1, 2), host="h3")], False),
        ([view(host="h2"), view(host="h3"), *[view((0, 1, 2), host="h4")] * 2], True),
    ],
    ids=[
        "one host",
        "two hosts",
        "two of three hosts",
        "two of four hosts",
        "one complete and one incomplete host",
        "two complete and two incomplete hosts",
    ],
)
def test_slot_is_named_only_if_most_hosts_have_the_same_layout(others: list[HostView], is_named: bool) -> None:
    """At least two hosts, and more than half of the complete hosts, must have this layout. Incomplete hosts do not count."""
    detail, _ = result(view((0, 2, 3)), slot_map(*others))
    assert detail.startswith("nothing at PCI 0000:01:00.0") if is_named else detail == ""


def test_maps_of_groups_of_hosts_are_merged() -> None:
    merged = slot_map(view(host="h2"))
    merged.update(slot_map(view(host="h3")))
    assert result(view((0, 2, 3)), merged) == (EMPTY_1, "reseat")


def test_number_of_empty_slots_must_equal_the_number_of_missing_gpus() -> None:
    assert result(view((0, 2, 3)), value=3, limit=5) == ("", "reseat")
    assert FULL.describe_empty(view((0, 2, 3)), 1, ()) == EMPTY_1
    assert FULL.describe_empty(view((0, 2, 3)), 2, ()) == ""
    assert FULL.describe_empty(view((0, 3)), 1, [ADDRESSES[1]]).startswith("nothing at PCI 0000:02:00.0 (module 3)")
    # The host has no empty slot, so the text names none. No caller asks for 0 slots.
    assert FULL.describe_empty(view(), 0, ()) == "nothing at , where 2 of 2 hosts of its build have a GPU"


def test_caution_is_given_if_only_addresses_identify_the_slots() -> None:
    without = slot_map(view(host="h2", modules={}), view(host="h3", modules={}))
    caution = " (slots are identified by PCI address only: not every GPU reports a module number)"
    expected = f"nothing at PCI 0000:01:00.0, where 2 of 2 hosts of its build have a GPU{caution}"
    assert result(view((0, 2, 3), modules={}), without) == (expected, "reseat")
    text: dict[int, Any] = {0: 1, 1: 2, 2: 3, 3: "four"}
    partly = slot_map(view(host="h2", modules=text), view(host="h3", modules=text))
    assert result(view((0, 2, 3), modules=text), partly) == (f"{EMPTY_1}{caution}", "reseat")


@pytest.mark.parametrize("product", [{}, {"host": 7}])
def test_hosts_of_an_unknown_model_are_compared_by_their_number_of_gpus(product: dict[str, Any]) -> None:
    unknown = ({"host.system.product": product},)
    slots = slot_map(view(host="h2", snapshots=unknown), view(host="h3", snapshots=({"host.system.product": {}},)))
    expected = "nothing at PCI 0000:01:00.0 (module 2), where 2 of 2 hosts with 4 GPUs have a GPU"
    assert result(view((0, 2, 3), snapshots=unknown), slots) == (expected, "reseat")
    assert result(view((0, 2, 3)), slots) == ("", "reseat"), (
        "a host of a known model must not be compared with hosts of an unknown model"
    )


def test_empty_slot_is_identified_by_its_module_if_addresses_moved() -> None:
    moved = {0: 1, 1: 3, 2: 4}  # the GPUs of modules 3 and 4 moved to the addresses of slots 1 and 2
    expected = "nothing in module 2, where 2 of 2 hosts of its build have a GPU"
    assert result(view((0, 1, 2), modules=moved)) == (expected, "reseat")
    assert result(view((0, 1, 2), modules={0: 1, 1: 3, 2: 9})) == ("", "reseat"), "no other host has a module 9"
    assert FULL.describe_empty(view(modules={0: 2, 1: 1, 2: 3, 3: 4}), 0, ()) == "", (
        "modules 1 and 2 are exchanged, but none is missing"
    )
    without = slot_map(view(host="h2", modules={0: 1, 1: 2, 2: 3}), view(host="h3", modules={0: 1, 1: 2, 2: 3}))
    assert result(view((0, 1, 2), modules=moved), without)[0] == "", "the other hosts do not report all module numbers"


def on(*slots: int, **more: Any) -> HostView:
    """Return a host whose driver lists the GPUs in slots 0, 2 and 3. The PCI bus has these GPUs and those in `slots`."""
    return view((0, 2, 3), on_bus=slots, **more)


def test_gpu_on_the_bus_that_the_driver_does_not_list_is_named() -> None:
    assert result(on(1)) == (
        "on the PCI bus, but not listed by the driver: 0000:01:00.0 (see the kernel log)",
        "reseat",
    )
    both = view((0, 3), on_bus=(1,))
    detail, _ = result(both, value=2)
    assert detail == (
        "on the PCI bus, but not listed by the driver: 0000:01:00.0 (see the kernel log); "
        "nothing at PCI 0000:02:00.0 (module 3), where 2 of 2 hosts of its build have a GPU"
    )


def test_bus_without_further_gpus_confirms_the_list_of_the_driver() -> None:
    bus = {"pcie.kind": {f"pci={ADDRESSES[slot]}": "gpu" for slot in (0, 2, 3)}}
    assert result(view((0, 2, 3), snapshots=(bus,))) == (EMPTY_1, "reseat")


def with_accepted(host: HostView, *gpus: Gpu) -> HostView:
    """Return the host with a baseline (record of its acceptance) that lists these GPUs."""
    accepted = PartBaseline(kind=HOST, part=HOST, id="h1", host="h1", runs=(), figures=(), gpus=gpus)
    return HostView(PLAN, PLAN.hosts[0], replace(host.evidence, baseline=HostBaseline(host=accepted)), ())


ACCEPTED = tuple(gpu(slot, slot) for slot in range(4))
SINCE = "present when the host was accepted, missing now: serial h1-1"


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ({}, f"{SINCE} at PCI {ADDRESSES[1]}"),
        ({"pci_bus_id": ""}, f"{SINCE}; {EMPTY_1}"),
        ({"pci_bus_id": ADDRESSES[2]}, f"{SINCE}; {EMPTY_1}"),
        ({"serial": "", "uuid": ""}, EMPTY_1),
    ],
    ids=[
        "with its address",
        "without an address",
        "at an address that another GPU has now",
        "without a serial and a UUID",
    ],
)
def test_absent_gpu_is_named_by_what_the_accepted_record_knows(changed: dict[str, str], expected: str) -> None:
    first, second, *rest = ACCEPTED
    host = with_accepted(view((0, 2, 3)), first, replace(second, **changed), *rest)  # type: ignore[arg-type]
    assert result(host) == (expected, "reseat")


def test_number_of_gpus_absent_since_acceptance_must_equal_the_number_of_missing_gpus() -> None:
    other = replace(ACCEPTED[0], serial="h1-9", uuid="GPU-9", pci_bus_id="0000:09:00.0")
    assert result(with_accepted(view((0, 2, 3)), *ACCEPTED, other)) == (EMPTY_1, "reseat")
    assert result(with_accepted(view((0, 2, 3)), *ACCEPTED[2:])) == (EMPTY_1, "reseat")
    detail, _ = result(with_accepted(view((0, 3), on_bus=(1,)), *ACCEPTED), value=2)
    since = "present when the host was accepted, missing now: serial h1-2 at PCI 0000:02:00.0"
    assert detail == f"on the PCI bus, but not listed by the driver: 0000:01:00.0 (see the kernel log); {since}"


def test_nothing_is_named_if_more_gpus_are_only_on_the_bus_than_are_missing() -> None:
    assert result(view((0, 3), on_bus=(1, 2)), value=2, limit=3) == ("", "reseat")


@pytest.mark.parametrize(
    ("host", "value"),
    [(view((0, 2, 3)), 2), (on(1), 2), (view((0, 2, 3), on_bus=(1,)), 4)],
    ids=["fewer than listed", "fewer than listed, and the bus was read", "more than listed"],
)
def test_nothing_is_named_if_the_count_contradicts_the_list_of_the_driver(host: HostView, value: int) -> None:
    assert result(host, value=value, limit=value + 1) == ("", "reseat")


def test_nothing_is_named_if_a_gpu_is_not_tested_or_has_no_address() -> None:
    partly = replace(PLAN, hosts=tuple(replace(host, devices=(0, 1, 2, 5)) for host in PLAN.hosts))
    slots = slot_map(view(host="h2", plan=partly), view(host="h3", plan=partly))
    assert result(view((0, 2, 3), plan=partly), slots) == ("", "reseat")
    host = view((0, 2, 3))
    first, *rest = host.evidence.records
    bare = replace(first, gpus=(replace(first.gpus[0], pci_bus_id=""), *first.gpus[1:]))
    unnamed = HostView(PLAN, PLAN.hosts[0], replace(host.evidence, records=(bare, *rest)), ())
    assert result(unnamed) == ("", "reseat")


@pytest.mark.parametrize(("value", "limit"), [(4, 4), (5, 4)])
def test_nothing_is_missing_if_the_count_is_not_too_low(value: int, limit: int) -> None:
    log: tuple[dict[str, dict[str, Any]]] = (
        {
            "xid.message": {f"pci={ADDRESSES[1]},message=no_address_space": 1},
            "pcie.driver": {f"pci={ADDRESSES[1]}": "vfio-pci"},
        },
    )
    assert result(view((0, 2, 3), snapshots=log), value=value, limit=limit) == ("", "reseat")


def logged(message: str, *, slot: int = 1, name: str = "xid.message") -> dict[str, dict[str, Any]]:
    return {name: {f"pci={ADDRESSES[slot]},{message}": 1}}


NO_SPACE = "has no address space (BAR): enable Above 4G Decoding, or enlarge the MMIO window of the VM"


@pytest.mark.parametrize(
    ("log", "cause", "action"),
    [
        (logged("message=no_address_space"), NO_SPACE, "configure"),
        (logged("message=fallen_off_the_bus"), "fell off the bus", "reseat"),
        (logged("xid=79", name="xid.count"), "fell off the bus (XID 79)", "reseat"),
        (logged("message=init_failed"), "could not be initialized", "reseat"),
        (logged("message=probe_failed"), "was refused by the driver", "reseat"),
        (logged("message=firmware_missing"), "has no firmware (GSP) in the installed driver packages", "configure"),
        (logged("message=other_driver"), "is in use by another driver, such as nouveau", "configure"),
    ],
)
def test_cause_in_the_kernel_log_is_named_and_a_wrong_setting_has_the_action_configure(
    log: dict[str, dict[str, Any]], cause: str, action: str
) -> None:
    listed = "on the PCI bus, but not listed by the driver: 0000:01:00.0"
    text = f"{listed}; kernel log: the GPU at PCI 0000:01:00.0 {cause}"
    assert result(on(1, snapshots=(log,))) == (text, action)


def test_most_severe_cause_of_a_gpu_is_named() -> None:
    both = {"xid.message": {f"pci={ADDRESSES[1]},message={name}": 1 for name in ("probe_failed", "no_address_space")}}
    assert NO_SPACE in result(on(1, snapshots=(both,)))[0]


def test_no_cause_is_named_for_an_unknown_message_or_a_gpu_that_answers() -> None:
    assert "kernel log:" not in result(on(1, snapshots=(logged("message=other"),)))[0]
    assert "kernel log:" not in result(on(1, snapshots=(logged("message=init_failed", slot=2),)))[0]


def test_gpus_with_the_same_cause_are_named_together() -> None:
    log = {"xid.message": {f"pci={ADDRESSES[slot]},message=no_address_space": 1 for slot in (2, 1)}}
    detail, action = result(view((0, 3), on_bus=(1, 2), snapshots=(log,)), value=2)
    assert detail.endswith(f"kernel log: each GPU at PCI 0000:01:00.0, 0000:02:00.0 {NO_SPACE}")
    assert action == "configure"
    mixed = {
        "xid.message": {f"pci={ADDRESSES[1]},message=no_address_space": 1, f"pci={ADDRESSES[2]},message=init_failed": 1}
    }
    detail, action = result(view((0, 3), on_bus=(1, 2), snapshots=(mixed,)), value=2)
    assert f"the GPU at PCI 0000:01:00.0 {NO_SPACE}; kernel log: the GPU at PCI 0000:02:00.0 could not" in detail
    assert action == "reseat"


def bus_ids(*slots: int) -> dict[str, dict[str, str]]:
    return {"gpu.pci_bus_id": {f"gpu={at}": f"00000000:0{slot}:00.0" for at, slot in enumerate(slots)}}


def log_count(count: int) -> dict[str, dict[str, Any]]:
    return {"xid.message": {f"pci={ADDRESSES[1]},message=init_failed": count}}


@pytest.mark.parametrize(
    ("snapshots", "is_cause"),
    [
        (({**bus_ids(0, 2, 3), **log_count(1)},), True),
        (({**bus_ids(0, 1, 2, 3), **log_count(1)}, {**bus_ids(0, 2, 3), **log_count(1)}), False),
        (({**bus_ids(0, 1, 2, 3), **log_count(1)}, {**bus_ids(0, 2, 3), **log_count(2)}), True),
        (({**bus_ids(0, 1, 2, 3)}, {**bus_ids(0, 2, 3), **log_count(1)}), True),
        (({**bus_ids(0, 1, 2, 3), **logged("message=other", slot=2)}, {**bus_ids(0, 2, 3), **log_count(1)}), True),
        (({**bus_ids(0, 1, 2, 3), **log_count(1)}, {**bus_ids(0, 1, 2, 3), **log_count(2)},
          {**bus_ids(0, 2, 3), **log_count(2)}), False),
        (({**bus_ids(0, 1, 2, 3), **log_count(2)}, {**bus_ids(0, 1, 2, 3), **log_count(1)},
          {**bus_ids(0, 2, 3), **log_count(2)}), True),
        (({**bus_ids(0, 2, 3), **log_count(1)}, {**bus_ids(0, 1, 2, 3), **log_count(1)}), False),
    ],
    ids=[
        "never answered", "answered after the line", "a second line since the last answer", "log not read at the last answer",
        "no line at the last answer", "second line before the last answer", "count fell, then rose after the last answer",
        "answers in the last snapshot",
    ],
)  # fmt: skip
def test_log_line_is_a_cause_only_if_the_gpu_did_not_answer_after_it(
    snapshots: Sequence[Mapping[str, Mapping[str, Any]]], is_cause: bool
) -> None:
    detail, _ = result(on(1, snapshots=snapshots))
    assert ("kernel log: the GPU at PCI 0000:01:00.0 could not be initialized" in detail) is is_cause


@pytest.mark.parametrize(
    ("driver", "is_bound"), [("vfio-pci", True), ("nouveau", True), ("nvidia", False), ("none", False)]
)
def test_gpu_that_is_bound_to_another_driver_is_named_with_the_action_configure(driver: str, is_bound: bool) -> None:
    drivers = {"pcie.driver": {f"pci={ADDRESSES[1]}": driver, f"pci={ADDRESSES[0]}": "vfio-pci"}}
    detail, action = result(on(1, snapshots=({**drivers, **logged("message=init_failed")},)))
    assert (f"the GPU at PCI 0000:01:00.0 is bound to the driver {driver}" in detail) is is_bound
    assert ("kernel log:" in detail) is not is_bound
    assert "0000:00:00.0" not in detail
    assert action == ("configure" if is_bound else "reseat")


@pytest.mark.parametrize(
    ("fields", "on_bus", "action"),
    [
        ({}, (1,), "configure"),
        ({"limit": 5}, (1,), "reseat"),
        ({"limit": 3}, (1,), "reseat"),
        ({"name": "gpu.pci_count"}, (), "reseat"),
    ],
    ids=["all are explained", "one is not explained", "none is missing", "the GPU is not on the bus either"],
)
def test_action_is_to_configure_only_if_settings_explain_all_missing_gpus(
    fields: dict[str, Any], on_bus: tuple[int, ...], action: str
) -> None:
    drivers = {"pcie.driver": {f"pci={ADDRESSES[1]}": "vfio-pci"}}
    assert result(on(*on_bus, snapshots=(drivers,)), **fields)[1] == action


def test_action_is_to_configure_only_if_settings_also_explain_gpus_beyond_the_plan() -> None:
    # The PCI bus has five GPUs. The driver lists three of them, and the settings explain only one more.
    drivers = {"pcie.driver": {f"pci={ADDRESSES[1]}": "vfio-pci"}, "gpu.pci_count": {"host": 5}}
    assert result(on(1, snapshots=(drivers,)))[1] == "reseat"
    # A count that is not a number is ignored.
    not_a_number = {"pcie.driver": {f"pci={ADDRESSES[1]}": "vfio-pci"}, "gpu.pci_count": {"host": "many"}}
    assert result(on(1, snapshots=(not_a_number,)))[1] == "configure"


def test_gpu_that_answered_in_the_last_snapshot_is_not_reported_as_bound_to_another_driver() -> None:
    drivers = {"pcie.driver": {f"pci={ADDRESSES[1]}": "vfio-pci"}}
    assert "is bound to" in result(on(1, snapshots=({**drivers, **bus_ids(0, 2, 3)},)))[0]
    assert "is bound to" not in result(on(1, snapshots=({**drivers, **bus_ids(0, 1, 2, 3)},)))[0]
