"""Which optional readings are compared between parts of one kind, and which share of the parts makes a reading required.

A part is a GPU, a host or a part of a host, such as a memory module. Among other things, parts of one kind have the same GPU
model and driver.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest

from fleet.judge.criteria import Criterion, VsBaseline
from fleet.judge.host_view import HostView
from fleet.judge.reading_support import ReadingSupport
from schemas.records import UNSUPPORTED, Metric, Snapshot
from tests.unit.fleet.judge.small_fleet import criterion, host_view, one_figure_plan, pack

PLAN = one_figure_plan(*[f"h{at}" for at in range(1, 7)], gpu_count=2)
NO = "unsupported: no sensor"
OPTIONAL = (
    criterion("gpu.power", id="power", operator="le", optional=True),
    criterion("gpu.nvlink.active_links", id="links", operator="le", optional=True),
    criterion("host.dimm.size", id="dimm", operator="le", optional=True, scope=""),
    criterion("storage.state.read_only", id="state", value=False, optional=True, scope=""),
    criterion("clock.synchronized", id="clock", value=True, optional=True, scope="host"),
    criterion("host.bios.version", id="bios", value=None, same_as_fleet=True, optional=True, scope="host"),
)


def metric(name: str, values: Mapping[str, Any] | None = None, **absent: str) -> Metric:
    """Return a reading; `absent`: `gpu0` or `host` -> reason."""
    scopes = {f"gpu={key[3:]}" if key.startswith("gpu") else key: why for key, why in absent.items()}
    return Metric(name=name, unit="1", values=values or {}, absent=scopes)


def host(
    name: str, *metrics: Metric, rules: Sequence[Criterion] = OPTIONAL, plan: Any = PLAN, **fields: Any
) -> HostView:
    return host_view(plan, name, *metrics, packs=[pack(*rules)], **fields)


def verdicts(*views: HostView, judged: int = 0, name: str = "") -> list[tuple[str, str, str]]:
    """Return name, scope and reason of each verdict on `views[judged]`. `name`: only verdicts on this reading; empty: on any."""
    support = ReadingSupport()
    for view in views:
        support.add(view)
    support.finish()
    result = list(support.judge(views[judged]))
    assert {item.kind for item in result} <= {UNSUPPORTED}
    return [(item.name, item.scope, item.reason) for item in result if name in ("", item.name)]


POWER = metric("gpu.power", {"gpu=0": 90.0, "gpu=1": 90.0})
NO_POWER = metric("gpu.power", gpu0=NO, gpu1=NO)
SAME_MODEL = "GPUs of this model with the same driver have this reading"


@pytest.mark.parametrize(
    ("others", "count"),
    [([POWER], "2 of 4"), ([POWER, POWER], "4 of 6"), ([POWER, NO_POWER], ""), ([NO_POWER], ""),
     ([metric("gpu.power", {"gpu=0": 90.0}, gpu1=NO), POWER], "3 of 6")],
)  # fmt: skip
def test_reading_is_required_if_at_least_half_of_the_gpus_have_it(others: list[Metric], count: str) -> None:
    views = [host("h1", NO_POWER), *[host(f"h{at}", other) for at, other in enumerate(others, 2)]]
    reason = f"{NO}; {count} {SAME_MODEL}"
    assert verdicts(*views, name="gpu.power") == (
        [("gpu.power", gpu, reason) for gpu in ("gpu=0", "gpu=1")] if count else []
    )


@pytest.mark.parametrize(("others", "count"), [((POWER, NO_POWER), 0), ((POWER, NO_POWER, POWER), 2)])
def test_counts_of_groups_of_hosts_are_merged(others: tuple[Metric, ...], count: int) -> None:
    support, other = ReadingSupport(), ReadingSupport()
    support.add(host("h1", NO_POWER))
    for at, item in enumerate(others, 2):
        other.add(host(f"h{at}", item))
    support.finish()
    other.finish()
    support.update(other)
    assert len([item for item in support.judge(host("h1", NO_POWER)) if item.name.startswith("gpu.")]) == count


@pytest.mark.parametrize(
    ("other", "is_same_kind"),
    [
        ([metric("driver.version", {"host": "570"})], True),
        ([metric("driver.version", {"host": "580"})], False),
        ([metric("driver.version", {"host": "570"}), metric("host.virtual_machine", {"host": True})], False),
        ([metric("driver.version", {"host": "570"}), metric("host.virtual_machine", {"host": False})], True),
    ],
    ids=["same driver", "other driver", "virtual machine", "not a virtual machine"],
)
def test_gpus_of_one_kind_have_the_same_driver_and_are_all_inside_or_all_outside_virtual_machines(
    other: list[Metric], is_same_kind: bool
) -> None:
    first = host("h1", NO_POWER, metric("driver.version", {"host": "570"}))
    assert bool(verdicts(first, host("h2", POWER, *other), name="gpu.power")) is is_same_kind


def test_only_unsupported_readings_of_planned_gpus_are_judged() -> None:
    other = host("h2", POWER)
    assert verdicts(host("h1", metric("gpu.power", gpu7=NO)), other, name="gpu.power") == []
    assert verdicts(host("h1", metric("gpu.power", gpu0="error: GPU is lost")), other, name="gpu.power") == []
    rehearsal = replace(PLAN, hosts=tuple(replace(item, device="cpu") for item in PLAN.hosts))
    assert verdicts(host("h1", NO_POWER, plan=rehearsal), host("h2", POWER, plan=rehearsal), name="gpu.power") == []


def test_readings_of_nvlink_are_required_only_of_gpus_with_links() -> None:
    links = metric("gpu.nvlink.active_links", {"gpu=0": 18, "gpu=1": 18})
    first = metric("gpu.nvlink.active_links", {"gpu=0": 0}, gpu1=NO)
    assert verdicts(host("h1", first), host("h2", links), name="gpu.nvlink.active_links") == []
    speed = criterion("gpu.nvlink.speed", id="speed", operator="le", optional=True)
    rules = (*OPTIONAL, speed)
    full = host("h2", links, metric("gpu.nvlink.speed", {"gpu=0": 1, "gpu=1": 1}), rules=rules)
    lacking = metric("gpu.nvlink.speed", gpu0=NO, gpu1=NO)
    assert len(verdicts(host("h1", links, lacking, rules=rules), full, name="gpu.nvlink.speed")) == 2
    one = metric("gpu.nvlink.active_links", {"gpu=0": 18, "gpu=1": 0})
    assert verdicts(host("h1", one, lacking, rules=rules), full, name="gpu.nvlink.speed") == [
        ("gpu.nvlink.speed", "gpu=0", f"{NO}; 2 of 3 {SAME_MODEL}")
    ]


@pytest.mark.parametrize(
    ("rule", "is_compared"),
    [
        ({"operator": "le", "optional": True}, True),
        ({"operator": "le", "optional": False}, False),
        ({"value": None, "same_as_fleet": True, "optional": True}, False),
        ({"value": None, "baseline": VsBaseline(), "optional": True}, False),
    ],
)
def test_reading_of_gpus_is_compared_if_an_optional_criterion_with_a_limit_judges_it(
    rule: dict[str, Any], is_compared: bool
) -> None:
    rules = (criterion("gpu.power", **rule),)
    assert bool(verdicts(host("h1", NO_POWER, rules=rules), host("h2", POWER, rules=rules))) is is_compared


KIND = "hosts with the same GPUs, driver and gang have this reading"


@pytest.mark.parametrize(
    ("own", "reason"),
    [
        ([], f"missing; 1 of 2 {KIND}"),
        ([metric("host.bios.version", host=NO)], f"{NO}; 1 of 2 {KIND}"),
        ([metric("host.bios.version", host="error: no")], ""),
        ([metric("host.bios.version", {"host": "1"})], ""),
    ],
    ids=["missing", "unsupported", "error", "read"],
)
def test_reading_of_a_host_is_required_if_half_of_the_hosts_of_its_kind_have_it(own: list[Metric], reason: str) -> None:
    views = [host("h1", *own), host("h2", metric("host.bios.version", {"host": "1"}))]
    result = verdicts(*views, name="host.bios.version")
    assert result == ([("host.bios.version", "host", reason)] if reason else [])


@pytest.mark.parametrize(
    ("rule", "is_compared"),
    [
        ({"operator": "le", "optional": True}, True),
        ({"operator": "le", "optional": False}, False),
        ({"value": None, "same_as_fleet": True, "optional": True}, True),
        ({"value": None, "same_as_fleet": False, "optional": True}, False),
        ({"value": None, "baseline": VsBaseline(), "optional": True}, False),
    ],
)
def test_reading_of_hosts_is_compared_if_an_optional_criterion_has_a_limit_or_compares_hosts(
    rule: dict[str, Any], is_compared: bool
) -> None:
    rules = (criterion("host.bios.version", scope="host", **rule),)
    views = [host("h1", rules=rules), host("h2", metric("host.bios.version", {"host": "1"}), rules=rules)]
    assert bool(verdicts(*views)) is is_compared


@pytest.mark.parametrize(
    "name", ["container.runc.version", "storage.pool.healthy", "optics.temperature", "bmc.sensor.alarm"]
)
def test_readings_of_equipment_that_only_some_hosts_have_are_not_compared(name: str) -> None:
    rules = (criterion(name, operator="le", optional=True, scope=""),)
    views = [host("h1", rules=rules), host("h2", metric(name, {"host": 1}), rules=rules)]
    assert verdicts(*views) == []


def test_kind_of_a_host_depends_on_its_gang_its_gpu_model_and_its_number_of_gpus() -> None:
    gang = replace(PLAN, hosts=(replace(PLAN.hosts[0], gang="a"), replace(PLAN.hosts[1], gang="b"), *PLAN.hosts[2:]))
    read = metric("host.bios.version", {"host": "1"})
    assert verdicts(host("h1", plan=gang), host("h2", read, plan=gang), name="host.bios.version") == []
    fewer = replace(PLAN, hosts=(replace(PLAN.hosts[0], devices=(0,)), *PLAN.hosts[1:]))
    assert verdicts(host("h1", plan=fewer), host("h2", read, plan=fewer), name="host.bios.version") == []
    other = host("h1", gpus=tuple(replace(gpu, name="NVIDIA H100") for gpu in host("h1").gpus), rules=OPTIONAL)
    assert verdicts(other, host("h2", read), name="host.bios.version") == []


SLOTS = metric("host.dimm.populated", {"mc=0,dimm=0": True, "mc=0,dimm=1": True, "mc=0,dimm=2": False})


def test_each_listed_part_of_a_host_is_compared_with_the_same_part_of_other_hosts() -> None:
    size = {"mc=0,dimm=0": 64, "mc=0,dimm=1": 64}
    full = host("h2", SLOTS, metric("host.dimm.size", size))
    one = host("h1", SLOTS, metric("host.dimm.size", {"mc=0,dimm=0": 64}))
    assert verdicts(one, full, name="host.dimm.size") == [("host.dimm.size", "mc=0,dimm=1", f"missing; 1 of 2 {KIND}")]
    assert verdicts(full, one, name="host.dimm.size") == []
    absent = replace(metric("host.dimm.size", {"mc=0,dimm=0": 64}), absent={"mc=0,dimm=1": NO})
    assert verdicts(host("h1", SLOTS, absent), full, name="host.dimm.size") == [
        ("host.dimm.size", "mc=0,dimm=1", f"{NO}; 1 of 2 {KIND}")
    ]
    error = replace(absent, absent={"mc=0,dimm=1": "error: bus"})
    assert verdicts(host("h1", SLOTS, error), full, name="host.dimm.size") == []
    none = metric("host.dimm.size", host=NO)
    assert len(verdicts(host("h1", SLOTS, none), full, name="host.dimm.size")) == 2


def test_host_without_the_list_of_parts_lacks_no_part() -> None:
    full = host("h2", SLOTS, metric("host.dimm.size", {"mc=0,dimm=0": 64, "mc=0,dimm=1": 64}))
    assert verdicts(host("h1"), full, name="host.dimm.size") == []


def test_list_of_parts_is_itself_a_reading_of_the_host() -> None:
    rules = (criterion("host.dimm.populated", operator="eq", value=True, optional=True, scope=""),)
    views = [host("h1", rules=rules), host("h2", SLOTS, rules=rules)]
    assert verdicts(*views) == [("host.dimm.populated", "host", f"missing; 1 of 2 {KIND}")]


@pytest.mark.parametrize(
    ("name", "more", "is_required"),
    [
        ("storage.state.read_only", [], True),
        ("clock.synchronized", [], True),
        ("clock.synchronized", [metric("host.virtual_machine", {"host": True})], False),
        ("storage.state.read_only", [metric("host.virtual_machine", {"host": True})], True),
        ("host.bios.version", [], False),
    ],
)
def test_reading_that_every_host_must_have_is_required_even_in_a_fleet_of_one_host(
    name: str, more: list[Metric], is_required: bool
) -> None:
    result = verdicts(host("h1", metric(name, host=NO), *more), name=name)
    assert result == ([(name, "host", f"{NO}; every host must have this reading")] if is_required else [])


def test_nothing_is_missing_if_a_collector_failed_or_the_host_was_not_read() -> None:
    read = host("h2", metric("host.bios.version", {"host": "1"}))
    failed = metric("collector.duration", host="error: timed out")
    assert verdicts(host("h1", failed), read, name="host.bios.version") == []
    assert verdicts(host("h1", metric("collector.duration", {"host": 1.0})), read, name="host.bios.version") != []
    assert verdicts(host("h1", snapshots=()), read) == []


def read_in_turn(*groups: Sequence[Metric]) -> HostView:
    """Return h1 with one snapshot for each group of readings."""
    shots = tuple(
        Snapshot(stage="benchmark", phase="before", at=f"2026-11-21T04:00:0{at}Z", duration_s=0.1, metrics=tuple(group))
        for at, group in enumerate(groups)
    )
    return host("h1", snapshots=shots)


BIOS, NO_BIOS = metric("host.bios.version", {"host": "1"}), metric("host.bios.version", host=NO)
FAILED, READ = metric("collector.duration", host="error: no"), metric("collector.duration", {"host": 1.0})


@pytest.mark.parametrize(
    ("groups", "other", "count"),
    [
        (([POWER], [NO_POWER]), [POWER], 2),
        (([NO_POWER], [POWER]), [POWER], 0),
        (([BIOS], [NO_BIOS]), [BIOS], 1),
        (([NO_BIOS], [BIOS]), [BIOS], 0),
        (([NO_BIOS, READ], [FAILED]), [BIOS], 0),
        (([NO_BIOS, FAILED], [READ]), [BIOS], 1),
        (([SLOTS], [metric("host.dimm.populated", {"mc=0,dimm=0": True})]),
         [SLOTS, metric("host.dimm.size", {"mc=0,dimm=0": 64, "mc=0,dimm=1": 64})], 1),
    ],
    ids=["lost by GPUs", "GPUs have it now", "lost by the host", "host has it now", "collector failed", "collector works now",
         "slot is gone"],
)  # fmt: skip
def test_last_snapshot_decides_what_a_host_lacks(
    groups: Sequence[Sequence[Metric]], other: Sequence[Metric], count: int
) -> None:
    result = verdicts(read_in_turn(*groups), host("h2", *other))
    assert len([reason for *_, reason in result if "every host" not in reason]) == count


def test_host_does_not_lack_a_list_of_parts_if_one_part_has_an_error() -> None:
    """An error does not show whether the host supports the list."""
    rules = (criterion("host.dimm.populated", operator="eq", value=True, optional=True, scope=""),)
    mixed = Metric(name="host.dimm.populated", unit="1", absent={"mc=0,dimm=0": NO, "mc=0,dimm=1": "error: no"})
    assert verdicts(host("h1", mixed, rules=rules), host("h2", SLOTS, rules=rules)) == []
