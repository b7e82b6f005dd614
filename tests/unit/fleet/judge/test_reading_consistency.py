"""Snapshots of one record must not contradict each other or the GPUs that the record lists.

The tests cover missing readings, changed constants, and counted times that fall or grow too fast.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from fleet.judge.reading_consistency import reading_problems
from schemas.readings import READINGS
from schemas.records import Gpu, Metric, Record, Snapshot

GPU = Gpu(index=0, serial="S1", uuid="U1", name="H200", pci_bus_id="0000:06:00.0")
READ = {
    "gpu.memory.total": {"gpu=0": 1e11},
    "gpu.temperature": {"gpu=0": 40},
    "gpu.pci_bus_id": {"gpu=0": "0000:06:00.0"},
    "gpu.temperature_slowdown": {"gpu=0": 95},
    "gpu.throttle.time": {"gpu=0,reason=power_cap": 50.0},
    "host.uptime": {"host": 1000.0},
    "host.numa.memory_total": {"numa=0": 1e11},
    "gpu.nvlink.speed": {"gpu=0,link=0": 2.5e10},
    "pcie.bar1.size": {"pci=0000:06:00.0": 1e11},
    "storage.disk.serial": {"disk=sda": "D1"},
    "xid.count": {},
}
FULL_ONLY = ("gpu.temperature_slowdown", "pcie.bar1.size", "storage.disk.serial")
"""Readings that snapshots during a launch do not have."""
Changes = dict[str, dict[str, object] | None]


def snapshot(number: int, phase: str, changes: Changes) -> Snapshot:
    """Return snapshot `number`. One is taken every 20 s. `changes`: reading -> its values; None omits the reading."""
    readings: Changes = {**READ, "host.uptime": {"host": 1000.0 + 20 * number}, **changes}
    metrics = tuple(
        Metric(name=name, unit=READINGS[name].unit, values=values)  # type: ignore[arg-type]
        for name, values in readings.items()
        if values is not None and (phase != "during" or name not in FULL_ONLY or name in changes)
    )
    at = f"2026-01-01T00:{20 * number // 60:02}:{20 * number % 60:02}.5Z"
    return Snapshot(stage="benchmark", phase=phase, at=at, duration_s=0.5, metrics=metrics)


def record_of(*snapshots: Snapshot, gpu: Gpu = GPU) -> Record:
    times = {"began": "2026-01-01T00:00:00Z", "ended": "2026-01-01T00:02:00Z"}
    return Record(run_id="r", nonce="n", host="h1", rackproof="1", gpus=(gpu,), snapshots=snapshots, **times)


def problems(
    before: Changes | None = None, during: Changes | None = None, after: Changes | None = None, gpu: Gpu = GPU
) -> list[tuple[str, str, str]]:
    """Return name, scope and reason of the problems of a record of three snapshots with these changes."""
    snapshots = (
        snapshot(0, "before", before or {}),
        snapshot(1, "during", during or {}),
        snapshot(2, "after", after or {}),
    )
    return [problem[:3] for problem in reading_problems(record_of(*snapshots, gpu=gpu))]


def moved(first: Changes, last: Changes) -> dict[str, Changes]:
    """Return these changes: `first` before the launch, `last` after it.

    The snapshot during the launch gets `first` too, but without readings that only full snapshots have (`full_only`).
    """
    during = {name: values for name, values in first.items() if not READINGS[name].full_only}
    return {"before": first, "during": during, "after": last}


HEALTHY: dict[str, dict[str, Changes]] = {
    "nothing changes": {},
    "a GPU gets warm": {"during": {"gpu.temperature": {"gpu=0": 70}}},
    "throttled for the whole launch": {"after": {"gpu.throttle.time": {"gpu=0,reason=power_cap": 90.0}}},
    "the driver counts throttled time late": {"after": {"gpu.throttle.time": {"gpu=0,reason=power_cap": 150.0}}},
    "an XID error occurs": {"after": {"xid.count": {"pci=0000:06:00.0,xid=31": 1}}},
    "a disk is replaced by another of the same name": {"after": {"storage.disk.serial": {"disk=sda": "D2"}}},
    "a link goes down": {"after": {"gpu.nvlink.speed": {"gpu=0,link=0": 0}}},
    "a hypervisor takes memory of a NUMA node": {"after": {"host.numa.memory_total": {"numa=0": 5e10}}},
    "a power manager lowers limits and clocks": moved(
        {"gpu.power_limit_set": {"gpu=0": 700.0}, "gpu.clock.lowered": {"gpu=0": False}},
        {"gpu.power_limit_set": {"gpu=0": 600.0}, "gpu.clock.lowered": {"gpu=0": True}},
    ),
    "a service starts": moved(
        {"host.persistence_daemon": {"host": False}, "gpu.persistence.enabled": {"gpu=0": False}},
        {"host.persistence_daemon": {"host": True}, "gpu.persistence.enabled": {"gpu=0": True}},
    ),
    "a service writes the CDI specification again": moved(
        {"container.cdi.current": {"host": False}}, {"container.cdi.current": {"host": True}}
    ),
    "the snapshots are taken by two processes with different limits": moved(
        {"host.ulimit.nofile": {"host": 1024}}, {"host.ulimit.nofile": {"host": 1048576}}
    ),
    "a hypervisor takes memory of the host": moved(
        {"host.memory.total": {"host": 2e12}}, {"host.memory.total": {"host": 1.9e12}}
    ),
    "a disk is removed": {"after": {"storage.disk.serial": {}}},
}


@pytest.mark.parametrize("changes", HEALTHY.values(), ids=HEALTHY)
def test_reading_that_may_change_is_not_a_problem(changes: dict[str, Changes]) -> None:
    assert problems(**changes) == []


MISSING = "missing in the snapshot {}, but other snapshots of the record have it"
WRONG: dict[str, tuple[dict[str, Changes], tuple[str, str, str]]] = {
    "a reading is missing before the launch": (
        {"before": {"gpu.memory.total": None}},
        ("gpu.memory.total", "host", MISSING.format("before benchmark")),
    ),
    "a reading is missing during the launch": (
        {"during": {"gpu.memory.total": None}},
        ("gpu.memory.total", "host", MISSING.format("during benchmark")),
    ),
    "a reading that is empty in other snapshots is missing after the launch": (
        {"after": {"xid.count": None}},
        ("xid.count", "host", MISSING.format("after benchmark")),
    ),
    "a value is missing during the launch": (
        {"during": {"gpu.temperature": {}}},
        ("gpu.temperature", "gpu=0", MISSING.format("during benchmark")),
    ),
    "a reading exists only during the launch": (
        {"before": {"gpu.temperature": None}, "after": {"gpu.temperature": None}},
        ("gpu.temperature", "host", "only snapshots during a launch have this reading"),
    ),
    "a size changes": (
        {"during": {"gpu.memory.total": {"gpu=0": 1e8}}},
        ("gpu.memory.total", "gpu=0", "changed during the run: 100000000000.0, then 100000000.0"),
    ),
    "the memory of a NUMA node shrinks a thousandfold": (
        {"after": {"host.numa.memory_total": {"numa=0": 1e8}}},
        ("host.numa.memory_total", "numa=0", "changed during the run: 100000000000.0, then 100000000.0"),
    ),
    "a temperature limit changes": (
        {"after": {"gpu.temperature_slowdown": {"gpu=0": 0.095}}},
        ("gpu.temperature_slowdown", "gpu=0", "changed during the run: 95, then 0.095"),
    ),
    "the address of a GPU changes": (
        {"during": {"gpu.pci_bus_id": {"gpu=0": "0000:07:00.0"}}},
        ("gpu.pci_bus_id", "gpu=0", "changed during the run: 0000:06:00.0, then 0000:07:00.0"),
    ),
    "the BAR1 size of a PCI device changes": (
        {"after": {"pcie.bar1.size": {"pci=0000:06:00.0": 1e8}}},
        ("pcie.bar1.size", "pci=0000:06:00.0", "changed during the run: 100000000000.0, then 100000000.0"),
    ),
    "a link gets another speed": (
        {"after": {"gpu.nvlink.speed": {"gpu=0,link=0": 2.5e13}}},
        ("gpu.nvlink.speed", "gpu=0,link=0", "changed during the run: 25000000000.0, then 25000000000000.0"),
    ),
    "throttled for longer than the time between the snapshots": (
        {"after": {"gpu.throttle.time": {"gpu=0,reason=power_cap": 50_000.0}}},
        ("gpu.throttle.time", "gpu=0,reason=power_cap", "grew by 49950 s within 20 s"),
    ),
    "throttled time falls": (
        {"after": {"gpu.throttle.time": {"gpu=0,reason=power_cap": 0.05}}},
        ("gpu.throttle.time", "gpu=0,reason=power_cap", "fell from 50 s to 0.05 s during the run"),
    ),
    "the uptime jumps": (
        {"after": {"host.uptime": {"host": 1_040_000.0}}},
        ("host.uptime", "host", "grew by 1.03898e+06 s within 20 s"),
    ),
}


@pytest.mark.parametrize(("changes", "problem"), WRONG.values(), ids=WRONG)
def test_reading_that_contradicts_another_snapshot_is_named(
    changes: dict[str, Changes], problem: tuple[str, str, str]
) -> None:
    assert problem in problems(**changes)


def test_snapshot_with_a_failed_collector_is_not_compared() -> None:
    before, after = snapshot(0, "before", {}), snapshot(2, "after", {"gpu.temperature": None})
    failed = Metric(name="collector.nvml", unit="s", absent={"host": "error: did not return within 20 s"})
    assert list(reading_problems(record_of(before, after))) != []
    assert list(reading_problems(record_of(before, replace(after, metrics=(*after.metrics, failed))))) == []


def test_record_whose_gpu_has_another_address_than_the_snapshots_is_named() -> None:
    reason = "every snapshot has 0000:06:00.0, but the record states 0000:08:00.0"
    assert problems(gpu=replace(GPU, pci_bus_id="0000:08:00.0")) == [("gpu.pci_bus_id", "gpu=0", reason)]
