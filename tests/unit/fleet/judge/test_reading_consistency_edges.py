"""Test when a reading is a problem of its record: a constant that changes, a time that grows too fast, or a missing reading."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest

from fleet.judge.reading_consistency import is_constant, reading_problems
from schemas.readings import READINGS
from schemas.records import Gpu, Metric, Record, Snapshot

GPU = Gpu(index=0, serial="S1", uuid="U1", name="H200", pci_bus_id="0000:06:00.0")
Readings = Mapping[str, Mapping[str, Any]]


def metric(name: str, values: Mapping[str, Any]) -> Metric:
    """Return a reading. `values`: scope -> value, or the reason why it is absent (`error: ...`, `unsupported: ...`)."""
    unit = READINGS[name].unit if name in READINGS else "s" if name.startswith("collector.") else "1"
    scopes = {scope: value for scope, value in values.items() if not str(value).startswith(("error:", "unsupported:"))}
    absent = {scope: value for scope, value in values.items() if scope not in scopes}
    return Metric(name=name, unit=unit, values=scopes, absent=absent)


def snapshot(second: int, readings: Readings, phase: str = "before", *, duration_s: float = 0.0) -> Snapshot:
    return Snapshot(
        stage="benchmark", phase=phase, at=f"2026-01-01T{second // 3600:02}:{second // 60 % 60:02}:{second % 60:02}Z",
        duration_s=duration_s, metrics=tuple(metric(name, values) for name, values in readings.items()),
    )  # fmt: skip


def problems(*snapshots: Snapshot, gpus: Sequence[Gpu] = (GPU,)) -> list[tuple[str, str, str]]:
    """Return name, scope and reason of each problem of a record with these snapshots."""
    record = Record(
        run_id="r", nonce="n", host="h1", rackproof="1", gpus=tuple(gpus), snapshots=snapshots,
        began="2026-01-01T00:00:00Z", ended="2026-01-01T09:00:00Z",
    )  # fmt: skip
    result = list(reading_problems(record))
    assert {stage for *_, stage in result} <= {"benchmark", ""}
    return [(name, scope, reason) for name, scope, reason, _ in result]


@pytest.mark.parametrize(
    ("name", "constant"),
    [
        ("gpu.serial", True), ("gpu.temperature", False), ("gpu.pcie.replays", False), ("gpu.memory.total", True),
        ("site.version", True), ("site.disk.serial", True), ("site.versions", False), ("site.load", False),
        ("collector.version", False), ("version", True),
    ],
)  # fmt: skip
def test_constant_readings_are_recognized_by_their_names(name: str, constant: bool) -> None:
    assert is_constant(name) is constant


def change_reasons(name: str, *values: Any, scope: str = "host") -> list[str]:
    """Return the reasons of the problems of a reading with these values in successive snapshots."""
    shots = [snapshot(20 * at, {name: {scope: value}}) for at, value in enumerate(values)]
    return [reason for _, _, reason in problems(*shots)]


@pytest.mark.parametrize(
    ("name", "scope", "values", "expected"),
    [
        ("gpu.memory.total", "gpu=0", (1e11, 1e11), []),
        ("gpu.memory.total", "gpu=0", (1e11, 2e11), ["changed during the run: 100000000000.0, then 200000000000.0"]),
        ("gpu.temperature", "gpu=0", (40, 50), []),
        ("site.version", "host", ("1", "2"), ["changed during the run: 1, then 2"]),
        ("collector.version", "host", (1, 2), []),
        ("storage.disk.serial", "disk=sda", ("a", "b"), []),
        ("host.dimm.serial", "mc=0,dimm=0", ("a", "b"), []),
        ("pcie.width_max", "pci=0000:01:00.0", (16, 8), ["changed during the run: 16, then 8"]),
        ("network.speed", "nic=eth0", (0, 5e10), []),
        ("gpu.nvlink.speed", "gpu=0", (2.5e10, 0), []),
        ("gpu.nvlink.speed", "gpu=0", (2.5e10, 5e10), ["changed during the run: 25000000000.0, then 50000000000.0"]),
        ("host.memory.total", "host", (1e11, 1.9e12), []),
        ("host.memory.total", "host", (1e11, 2e12), ["changed during the run: 100000000000.0, then 2000000000000.0"]),
        ("host.memory.total", "host", (2e12, 1e11), ["changed during the run: 2000000000000.0, then 100000000000.0"]),
        ("host.memory.total", "host", ("much", 1e11), ["changed during the run: much, then 100000000000.0"]),
        ("gpu.memory.total", "gpu=0", (1, 2, 1), ["changed during the run: 1, then 2"]),
    ],
)  # fmt: skip
def test_change_of_a_constant_reading_is_usually_a_problem(
    name: str, scope: str, values: Sequence[Any], expected: list[str]
) -> None:
    assert change_reasons(name, *values, scope=scope) == expected


def growth_problems(
    name: str, scope: str, first: float, second: float, *, seconds: int, uptimes: Sequence[Any] = ()
) -> list[tuple[str, str]]:
    """Return scope and reason of each problem of a reading with two values, the second read `seconds` after the first.

    `uptimes`: uptime of the host in the two snapshots; empty: not read.
    """
    shots = []
    for at, value in enumerate((first, second)):
        readings = {name: {scope: value}, **({"host.uptime": {"host": uptimes[at]}} if uptimes else {})}
        shots.append(snapshot(seconds * at, readings, duration_s=1.0))
    return [(where, reason) for _, where, reason in problems(*shots)]


THROTTLED = "gpu.throttle.time", "gpu=0,reason=power_cap"


@pytest.mark.parametrize(
    ("grown", "is_wrong"),
    [(401.0, False), (401.5, True)],  # 100 s between the snapshots, 1 s to take the second one, 300 s of tolerance
)
def test_counted_time_may_grow_by_the_elapsed_time_plus_the_clock_tolerance(grown: float, is_wrong: bool) -> None:
    result = growth_problems(*THROTTLED, 10.0, 10.0 + grown, seconds=100)
    assert result == ([(THROTTLED[1], f"grew by {grown:g} s within 100 s")] if is_wrong else [])


# The uptime rises by 50 s; the second snapshot takes 1 s; the counting delay is 120 s.
@pytest.mark.parametrize(("grown", "is_wrong"), [(171.0, False), (171.5, True)])
def test_counted_time_may_grow_by_the_rise_of_the_uptime_plus_the_counting_delay(grown: float, is_wrong: bool) -> None:
    result = growth_problems(*THROTTLED, 10.0, 10.0 + grown, seconds=100, uptimes=(1000.0, 1050.0))
    assert result == ([(THROTTLED[1], f"grew by {grown:g} s within 50 s")] if is_wrong else [])
    # If an uptime is not a number, the limit is the time between the snapshots plus a higher tolerance.
    assert growth_problems(*THROTTLED, 10.0, 10.0 + grown, seconds=100, uptimes=("long", 1050.0)) == []


def test_throttle_time_must_not_fall_but_uptime_may() -> None:
    assert growth_problems(*THROTTLED, 10.0, 9.0, seconds=100) == [
        (THROTTLED[1], "fell from 10 s to 9 s during the run")
    ]
    assert growth_problems(*THROTTLED, 10.0, 10.0, seconds=100) == []
    assert growth_problems("host.uptime", "host", 10.0, 9.0, seconds=100) == []
    assert growth_problems(*THROTTLED, 10.0, "none", seconds=100) == []  # type: ignore[arg-type]


@pytest.mark.parametrize(("grown", "is_wrong"), [(401.0, False), (402.0, True)])
def test_uptime_may_grow_by_the_elapsed_time_plus_the_clock_tolerance(grown: float, is_wrong: bool) -> None:
    assert bool(growth_problems("host.uptime", "host", 10.0, 10.0 + grown, seconds=100)) is is_wrong


def test_growth_is_not_limited_if_the_time_of_a_snapshot_is_not_valid() -> None:
    first, second = snapshot(0, {THROTTLED[0]: {THROTTLED[1]: 1.0}}), snapshot(9, {THROTTLED[0]: {THROTTLED[1]: 1e9}})
    assert problems(first, replace(second, at="later")) == []


def test_negative_time_between_two_snapshots_is_stated_as_zero() -> None:
    first, second = (
        snapshot(100, {THROTTLED[0]: {THROTTLED[1]: 1.0}}),
        snapshot(0, {THROTTLED[0]: {THROTTLED[1]: 999.0}}),
    )
    assert [reason for *_, reason in problems(first, second)] == ["grew by 998 s within 0 s"]


IDENTITY = {"gpu.serial": "S1", "gpu.uuid": "U1", "gpu.name": "H200", "gpu.pci_bus_id": "0000:06:00.0"}


@pytest.mark.parametrize("name", IDENTITY)
def test_gpu_identity_that_the_record_misstates_is_named(name: str) -> None:
    right, wrong = {name: {"gpu=0": IDENTITY[name]}}, {name: {"gpu=0": "X", "gpu=1": "Y"}}
    stated = (name, "gpu=0", f"every snapshot has X, but the record states {IDENTITY[name]}")
    assert problems(snapshot(0, right), snapshot(20, right)) == []
    assert problems(snapshot(0, wrong), snapshot(20, wrong)) == [stated]
    if name != "gpu.pci_bus_id":  # another check reports a serial, UUID or name that changes during the run
        assert problems(snapshot(0, right), snapshot(20, {name: {"gpu=0": "X"}})) == []
    unknown = replace(GPU, serial="", uuid="", name="", pci_bus_id="")
    assert problems(snapshot(0, wrong), gpus=[unknown]) == []
    assert problems(snapshot(0, {name: {"gpu=7": "X"}})) == []


MISSING = "missing in the snapshot {} benchmark, but other snapshots of the record have it"


def missing(outer: Readings, middle: Readings, phase: str = "after") -> list[tuple[str, str, str]]:
    """Return the problems of a record with the readings `outer` in its first and last snapshot, and `middle` in its second."""
    return problems(snapshot(0, outer), snapshot(20, middle, phase), snapshot(40, outer, "after"))


def test_reading_that_a_full_snapshot_lacks_is_reported_as_missing() -> None:
    both = {"gpu.power": {"gpu=0": 1}, "gpu.utilization": {"gpu=0": 1}}
    one = {"gpu.power": {"gpu=0": 1}}
    assert missing(both, one) == [("gpu.utilization", "host", MISSING.format("after"))]
    named = {item[2] for item in problems(snapshot(0, one), snapshot(20, both, "after"))}
    assert named == {MISSING.format("before")}


@pytest.mark.parametrize(
    ("name", "is_missing"),
    [
        ("gpu.utilization", True),
        ("collector.duration", True),
        ("gpu.temperature_slowdown", False),
        ("site.load", False),
    ],
)
def test_snapshot_during_a_launch_needs_only_the_fast_readings(name: str, is_missing: bool) -> None:
    """Fast readings take little time. Full snapshots, before and after a launch, must have the other readings too."""
    full = {
        "gpu.power": {"gpu=0": 1},
        name: {"host" if name.startswith("collector") else "gpu=0": 1},
        "gpu.minor_number": {"gpu=0": 0},
    }
    during = {"gpu.power": {"gpu=0": 1}}
    result = [reading for reading, _, reason in missing(full, during, "during") if reason == MISSING.format("during")]
    assert (name in result) is is_missing


def test_at_most_three_readings_that_were_read_only_during_a_launch_are_named() -> None:
    full = {"gpu.power": {"gpu=0": 1}}
    more = {**full, **{f"site.r{number}": {"host": 1} for number in range(5)}}
    result = missing(full, more, "during")
    assert result == [
        (f"site.r{number}", "host", "only snapshots during a launch have this reading") for number in range(3)
    ]


@pytest.mark.parametrize(
    ("name", "scope", "other", "is_missing"),
    [
        ("gpu.power", "gpu=1", "gpu=0", True),
        ("host.numa.memory_free", "numa=1", "numa=0", True),
        ("storage.disk.size", "disk=sdb", "disk=sda", False),
        ("xid.count", "gpu=0,xid=79", "gpu=0,xid=13", False),
        ("kernel.event.last_seen", "event=lockup", "event=oom", True),
        ("optics.temperature", "nic=eth1", "nic=eth0", False),
    ],
)
def test_missing_value_is_reported_unless_it_is_of_a_disk_a_module_or_an_xid(
    name: str, scope: str, other: str, is_missing: bool
) -> None:
    log = {"xid.last_seen": {"host": 0.0}}
    full = {name: {scope: 1, other: 1}, **log}
    assert missing(full, {name: {other: 1}, **log}) == ([(name, scope, MISSING.format("after"))] if is_missing else [])


@pytest.mark.parametrize(
    ("first", "last"),
    [
        ({"gpu=0": 1, "gpu=1": 1}, {"gpu=0": 1}),
        ({"gpu=0": 1, "gpu=1": "error: no"}, {"gpu=0": 1}),
        ({"gpu=0": "error: no", "gpu=1": 1}, {"gpu=0": "error: no"}),
    ],
    ids=["value of gpu=1 is gone", "reason of gpu=1 is gone", "only value is gone"],
)
def test_reading_that_lost_a_gpu_is_found_even_if_no_other_reading_changed(
    first: Mapping[str, Any], last: Mapping[str, Any]
) -> None:
    """`reading_problems` skips readings that are the same object in both snapshots, here `gpu.temperature`."""
    before = snapshot(0, {"gpu.temperature": {"gpu=0": 40, "gpu=1": 40}, "gpu.power": first})
    after = replace(snapshot(20, {}, "after"), metrics=(before.metrics[0], metric("gpu.power", last)))
    assert problems(before, after) == [("gpu.power", "gpu=1", MISSING.format("after"))]
    renamed = replace(after, metrics=(before.metrics[0], metric("gpu.utilization", first)))
    assert ("gpu.power", "host", MISSING.format("after")) in problems(before, renamed)


def test_missing_values_are_in_the_order_of_their_scopes() -> None:
    gpus = [f"gpu={index}" for index in range(8)]
    result = missing({"gpu.power": dict.fromkeys(gpus, 1)}, {"gpu.power": {}})
    assert result == [("gpu.power", gpu, MISSING.format("after")) for gpu in gpus]


def test_reading_of_a_disk_is_reported_as_missing_if_the_snapshot_has_another_reading_of_the_disk() -> None:
    full = {
        "storage.disk.size": {"disk=sda": 1, "disk=sdb": 1},
        "storage.disk.rotational": {"disk=sda": 1, "disk=sdb": 1},
    }
    less = {**full, "storage.disk.size": {"disk=sda": 1}}
    assert missing(full, less) == [("storage.disk.size", "disk=sdb", MISSING.format("after"))]
    refused = {**full, "storage.disk.size": {"disk=sda": 1, "disk=sdb": "error: no answer"}}
    assert missing(full, refused) == []


def test_events_are_reported_as_missing_only_if_the_log_was_read() -> None:
    full = {"kernel.event.last_seen": {"event=oom": 1, "event=lockup": 1}, "xid.last_seen": {"host": 0.0}}
    unread = {"kernel.event.last_seen": {"event=oom": 1}, "xid.last_seen": {"host": "error: no log"}}
    assert missing(full, unread) == []


def test_lane_of_an_optical_module_may_be_missing_although_the_module_is_present() -> None:
    lanes = {f"nic=eth0,lane={lane}": 1 for lane in (1, 2)}
    full = {"optics.rx_power": lanes, "network.operstate": {"nic=eth0": "up"}}
    assert missing(full, {**full, "optics.rx_power": {"nic=eth0,lane=1": 1}}) == []


def test_snapshot_with_a_failed_collector_is_not_compared() -> None:
    full = {"gpu.power": {"gpu=0": 1}, "collector.duration": {"host": 1.0}}
    assert missing(full, {"collector.duration": {"host": "error: timed out"}}) == []
    assert problems(snapshot(0, full, "during"), snapshot(20, {}, "during")) == [], (
        "nothing is compared without a full snapshot"
    )
