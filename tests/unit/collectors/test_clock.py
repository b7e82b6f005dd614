"""Whether the system clock is synchronized, by the state of the kernel's clock."""

from __future__ import annotations

from pathlib import Path

import pytest

from collectors.base import HOST, Absent, Value
from collectors.clock import ClockCollector, ClockState, read_clock
from tests.fakes import host

KEPT = ClockState(offset=-2.5e-5, error_max=0.031, error_estimated=0.0004)
LOST = ClockState(offset=0.0, error_max=16.0, error_estimated=16.0)
VIRTUAL = "model name\t: A CPU\nflags\t: fpu hypervisor\n"


def readings(root: Path, expected: ClockState) -> dict[str, Value | Absent]:
    families = list(ClockCollector(root, lambda: expected).collect())
    assert all([labels for labels, _ in family.readings] == [HOST] for family in families)
    return {family.name: family.readings[0][1] for family in families}


def test_a_clock_that_is_kept(tmp_path: Path) -> None:
    assert readings(host.tree(tmp_path), KEPT) == {
        "clock.synchronized": True,
        "clock.offset": -2.5e-5,
        "clock.error_max": 0.031,
        "clock.error_estimated": 0.0004,
        "clock.source": "tsc",
    }


def test_a_clock_that_nothing_keeps(tmp_path: Path) -> None:
    values = readings(host.tree(tmp_path), LOST)
    assert values["clock.synchronized"] is False
    assert values["clock.error_max"] == 16.0


def test_a_virtual_machine_may_leave_its_clock_to_its_host(tmp_path: Path) -> None:
    root = host.tree(tmp_path, cpuinfo=VIRTUAL)
    absent = readings(root, LOST)["clock.synchronized"]
    assert isinstance(absent, Absent)
    assert absent.status == "unsupported"
    assert readings(root, KEPT)["clock.synchronized"] is True


def test_a_clock_that_cannot_be_asked(tmp_path: Path) -> None:
    def refused() -> ClockState:
        raise PermissionError(1, "Operation not permitted")

    values = {family.name: family.readings[0][1] for family in ClockCollector(host.tree(tmp_path), refused).collect()}
    assert values.pop("clock.source") == "tsc"
    wrong = Absent(status="error", reason="adjtimex: [Errno 1] Operation not permitted")
    assert values == dict.fromkeys(
        ("clock.synchronized", "clock.offset", "clock.error_max", "clock.error_estimated"), wrong
    )


def test_a_machine_without_a_choice_of_sources(tmp_path: Path) -> None:
    absent = readings(host.bare(tmp_path), KEPT)["clock.source"]
    assert isinstance(absent, Absent)
    assert absent.status == "unsupported"


def test_real_clock_is_read() -> None:
    expected = read_clock()
    assert 0 <= expected.error_max <= 17
    assert expected.offset == pytest.approx(0, abs=1)
    values = [value for family in ClockCollector().collect() for _, value in family.readings]
    assert [value for value in values if isinstance(value, Absent) and value.status == "error"] == []
