"""Test that the clock collector reads synchronization, offset, errors and clock source of the kernel clock."""

from __future__ import annotations

from pathlib import Path

import pytest

from collectors.base import HOST_LABELS, Absent, Value
from collectors.clock import ClockCollector, ClockState, read_clock
from tests.fakes import host

SYNCHRONIZED = ClockState(offset=-2.5e-5, error_max=0.031, error_estimated=0.0004)
UNSYNCHRONIZED = ClockState(offset=0.0, error_max=16.0, error_estimated=16.0)
VIRTUAL_CPUINFO = "model name\t: A CPU\nflags\t: fpu hypervisor\n"


def readings(root: Path, state: ClockState) -> dict[str, Value | Absent]:
    """Return name -> reading. The host has the files under `root`, and its kernel clock has this state."""
    families = list(ClockCollector(root, lambda: state).collect())
    assert all([labels for labels, _ in family.readings] == [HOST_LABELS] for family in families)
    return {family.name: family.readings[0][1] for family in families}


def test_synchronized_clock_has_every_reading(tmp_path: Path) -> None:
    assert readings(host.build_tree(tmp_path), SYNCHRONIZED) == {
        "clock.synchronized": True,
        "clock.offset": -2.5e-5,
        "clock.error_max": 0.031,
        "clock.error_estimated": 0.0004,
        "clock.source": "tsc",
    }


def test_unsynchronized_clock_reports_its_maximum_error(tmp_path: Path) -> None:
    values = readings(host.build_tree(tmp_path), UNSYNCHRONIZED)
    assert values["clock.synchronized"] is False
    assert values["clock.error_max"] == 16.0


def test_unsynchronized_clock_of_a_virtual_machine_is_unsupported(tmp_path: Path) -> None:
    root = host.build_tree(tmp_path, cpuinfo=VIRTUAL_CPUINFO)
    absent = readings(root, UNSYNCHRONIZED)["clock.synchronized"]
    assert isinstance(absent, Absent)
    assert absent.status == "unsupported"
    assert readings(root, SYNCHRONIZED)["clock.synchronized"] is True


def test_failed_adjtimex_is_an_error(tmp_path: Path) -> None:
    def refused() -> ClockState:
        raise PermissionError(1, "Operation not permitted")

    values = {
        family.name: family.readings[0][1] for family in ClockCollector(host.build_tree(tmp_path), refused).collect()
    }
    assert values.pop("clock.source") == "tsc"
    wrong = Absent(status="error", reason="adjtimex: [Errno 1] Operation not permitted")
    assert values == dict.fromkeys(
        ("clock.synchronized", "clock.offset", "clock.error_max", "clock.error_estimated"), wrong
    )


def test_missing_clock_source_is_unsupported(tmp_path: Path) -> None:
    absent = readings(host.build_minimal_tree(tmp_path), SYNCHRONIZED)["clock.source"]
    assert isinstance(absent, Absent)
    assert absent.status == "unsupported"


def test_real_clock_is_read() -> None:
    state = read_clock()
    assert 0 <= state.error_max <= 17
    assert state.offset == pytest.approx(0, abs=1)
    values = [value for family in ClockCollector().collect() for _, value in family.readings]
    assert [value for value in values if isinstance(value, Absent) and value.status == "error"] == []
