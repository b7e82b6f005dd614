"""The memory modules (DIMMs) of a host are compared with those of other hosts, with each other, and with the inventory.

The cause of a failure names the slot of the module, or the host.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from fleet.diagnosis.diagnose import diagnose
from fleet.judge.judge import judge
from fleet.simulate.memory_modules import memory_module_metrics
from schemas.records import Metric
from schemas.reports import FAIL, INCONCLUSIVE, Cause
from tests.unit.fleet.judge.small_fleet import host_evidence, one_figure_plan
from tests.unit.fleet.judge.test_stated import pack_of

CRITERIA = (
    "uniform-dimm-populated", "uniform-dimm-count", "uniform-dimm-size", "uniform-dimm-rated", "uniform-memory-speed",
    "uniform-host-memory", "uniform-numa-memory", "dimm-count", "memory-speed",
)  # fmt: skip
SLOT = "dimm=P2-DIMMA1"
GIB = 1 << 30


def modules(**changed: Any) -> tuple[Metric, ...]:
    """Return the readings of a healthy host with changes.

    `changed`: name of a reading (with `__` for `.`) -> its new value. If the reading has a value for each module, only that of
    the module in SLOT changes. If it has one for each NUMA node, only that of node 1 changes.
    """
    readings = {item["name"]: item for item in memory_module_metrics()}
    readings["host.memory.total"] = {"name": "host.memory.total", "unit": "B", "values": {"host": 1007 * GIB}}
    nodes = {"numa=0": 503 * GIB, "numa=1": 504 * GIB}
    readings["host.numa.memory_total"] = {"name": "host.numa.memory_total", "unit": "B", "values": nodes}
    for key, value in changed.items():
        name = key.replace("__", ".")
        scope = {"host.numa.memory_total": "numa=1"}.get(
            name, SLOT if ".dimm." in name and "count" not in name else "host"
        )
        readings[name] = {**readings[name], "values": {**readings[name]["values"], scope: value}}
    return tuple(Metric(**item) for item in readings.values())


MISSING = modules(
    host__dimm__populated=False, host__dimm__count=15, host__memory__total=944 * GIB, host__numa__memory_total=441 * GIB
)
SLOW = modules(host__dimm__speed_rated=4_400_000_000, host__memory__speed=4_400_000_000)
HEALTHY = modules()
NOT_READ = tuple(
    Metric(
        name=item.name,
        unit=item.unit,
        values={},
        absent={"host": "error: /sys/firmware/dmi/tables/DMI: Permission denied"},
    )
    for item in HEALTHY
    if item.name not in ("host.memory.total", "host.numa.memory_total")
)
NO_TABLE = tuple(
    Metric(name=item.name, unit=item.unit, values={}, absent={"host": "unsupported: none"}) for item in NOT_READ
)


def causes(readings: Mapping[str, Sequence[Metric]], **variables: Any) -> list[Cause]:
    """Return the causes of verdicts that do not pass. `readings`: host -> its readings; `variables`: inventory variables."""
    plan = one_figure_plan(*readings, **variables)
    evidence = {host: host_evidence(plan, host, *metrics) for host, metrics in readings.items()}
    verdicts = judge(plan, evidence, (pack_of("h200-sxm", *CRITERIA),))
    return list(diagnose(verdicts, {}))


@pytest.mark.parametrize("hosts", [2, 3])
def test_missing_module_is_one_cause_at_its_slot(hosts: int) -> None:
    fleet = {f"h{number}": HEALTHY for number in range(2, hosts + 1)}
    (cause,) = causes({"h1": MISSING, **fleet})
    assert (cause.host, cause.part, cause.action, cause.verdict) == ("h1", SLOT, "reseat", FAIL)
    assert cause.title.startswith(
        "memory slot P2-DIMMA1 of h1 has no memory module, or one that the firmware does not detect"
    )
    assert len(cause.verdicts) == 4


@pytest.mark.parametrize(
    ("stated", "readings"),
    [(16, HEALTHY), (15, MISSING), (None, MISSING), (12, HEALTHY)],
    ids=["16 stated and present", "15 stated and present", "none stated", "12 stated and 16 present"],
)
def test_single_host_needs_only_the_modules_that_the_inventory_states(
    stated: int | None, readings: Sequence[Metric]
) -> None:
    assert causes({"h1": readings}, **({"rackproof_dimm_count": stated} if stated else {})) == []


def test_single_host_with_fewer_modules_than_stated_fails() -> None:
    (cause,) = causes({"h1": MISSING}, rackproof_dimm_count=16)
    assert (cause.part, cause.action, cause.title) == ("host", "reseat", "h1 has 15 of 16 memory modules")


def test_module_with_a_lower_rated_speed_explains_the_speed_of_the_host() -> None:
    (cause,) = causes({"h1": SLOW, "h2": HEALTHY})
    assert (cause.part, cause.action, len(cause.verdicts)) == (SLOT, "inspect_hardware", 2)
    (cause,) = causes({"h1": SLOW})
    assert (cause.part, cause.title) == (
        SLOT, "memory slot P2-DIMMA1 of h1 has rated speed 4400 MT/s, most have 4800 MT/s",
    )  # fmt: skip


def test_module_of_another_size_is_named() -> None:
    (cause,) = causes({"h1": modules(host__dimm__size=32 * GIB)})
    assert (cause.part, cause.action) == (SLOT, "inspect_hardware")


def test_hosts_with_two_equally_common_sizes_of_modules_pass() -> None:
    sizes = {f"dimm={number}": (32 if number % 2 else 64) * GIB for number in range(16)}
    readings = (
        Metric(name="host.dimm.size", unit="B", values=sizes),
        Metric(name="host.dimm.type", unit="1", values=dict.fromkeys(sizes, "DDR5")),
    )
    assert causes({"h1": readings}) == []
    assert causes({"h1": readings, "h2": readings}) == []


def test_lower_speed_of_all_modules_is_one_cause() -> None:
    low = modules(host__memory__speed=4_000_000_000)
    for readings, variables in (({"h1": low, "h2": HEALTHY}, {}), ({"h1": low}, {"rackproof_memory_mts": 4800})):
        (cause,) = causes(readings, **variables)
        assert (cause.part, cause.title) == ("host", "h1 runs its memory at 4000 MT/s instead of 4800 MT/s")
    assert causes({"h1": low}, rackproof_memory_mts=4000) == []


@pytest.mark.parametrize("unread", [NOT_READ, NO_TABLE], ids=["DMI table not readable", "no DMI table"])
def test_host_without_readings_of_modules_is_inconclusive_only_if_modules_are_expected(
    unread: Sequence[Metric],
) -> None:
    """Modules are expected if another host reports them, or if the inventory states their number."""
    assert causes({"h1": unread, "h2": unread}) == []
    for readings, variables in (({"h1": unread, "h2": HEALTHY}, {}), ({"h1": unread}, {"rackproof_dimm_count": 16})):
        inconclusive = causes(readings, **variables)
        assert {(cause.host, cause.verdict) for cause in inconclusive} == {("h1", INCONCLUSIVE)}
    assert causes({"h1": ()}, rackproof_dimm_count=16), (
        "a record from which the readings were removed must not be accepted"
    )
    assert causes({"h1": (), "h2": ()}) == [], "records of earlier releases, which lack the readings, must be accepted"
    assert causes({"h1": (), "h2": HEALTHY})
