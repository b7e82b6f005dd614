"""A snapshot that lacks a reading is reported if another reading of the snapshot shows that the reading must exist."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pytest

from fleet.judge.criteria import read_packs
from fleet.judge.derived_readings import MODULE, OF_INTERFACES, OF_MODULES, derived_problems
from fleet.judge.evidence import Evidence
from fleet.report.merge import merge
from schemas.records import Metric, Snapshot, Value
from schemas.reports import ACCEPTED, INCOMPLETE, INCONCLUSIVE
from tests import builders

PLAN = builders.plan("h1", profile="smoke", gpu_count=1, rackproof_gang="none")
HOST, PORT, LANE = "host", "hca=mlx5_0,port=1", "hca=mlx5_0,port=1,lane=1"
POWER = {"rx_power": 1e-3, "tx_power": 1.2e-3}
LIMITS = {"alarm_low": 1e-4, "alarm_high": 3e-3, "warning_low": 2e-4, "warning_high": 2e-3}


def module() -> dict[str, Metric]:
    """Return the readings of a healthy optical module with one lane."""
    metrics = {name: _metric(name, {LANE: _healthy(name)}) for name in OF_MODULES if _is_of_lane(name)}
    metrics |= {name: _metric(name, {PORT: _healthy(name)}) for name in OF_MODULES if not _is_of_lane(name)}
    metrics[MODULE] = _metric(MODULE, {PORT: "QSFP28"})
    for quantity in POWER:
        for limit, value in LIMITS.items():
            name = f"optics.{quantity}.{limit}"
            metrics[name] = _metric(name, {PORT: value}, "W")
    return metrics


def _is_of_lane(name: str) -> bool:
    return name.split(".")[1] in ("rx_power", "tx_power", "bias", "rx_los", "tx_fault")


def _healthy(name: str) -> Value:
    if name.endswith(("alarm", "warning")):
        return "none"
    if name.endswith(("fault", "rx_los")):
        return False
    return POWER.get(name.removeprefix("optics."), {"optics.temperature": 45.0, "optics.voltage": 3.3}.get(name, 6e-3))


def _metric(name: str, values: Mapping[str, Value], unit: str = "") -> Metric:
    units = {"optics.temperature": "Cel", "optics.voltage": "V", "optics.bias": "A"}
    unit = unit or units.get(name, "W" if name in ("optics.rx_power", "optics.tx_power") else "1")
    return Metric(name=name, unit=unit, values=values)


def software() -> dict[str, Metric]:
    """Return the readings of a host with a CDI specification, and a fabric manager for its NVSwitches."""
    versions = ("software.driver_module.version", "software.driver_library.version", "software.fabric_manager.version")
    values: dict[str, Value] = dict.fromkeys((*versions, "container.cdi.driver_version"), "580.1")
    values |= {"container.cdi.gpus": 1, "container.cdi.current": True, "software.driver_library.matches": True}
    values |= {
        "software.fabric_manager.matches": True,
        "software.driver_module.open": True,
        "fabric.nvswitch.probed": 4,
    }
    return {name: _metric(name, {HOST: value}) for name, value in values.items()}


def bond() -> dict[str, Metric]:
    """Return the readings of a bond with two members."""
    members: dict[str, Value] = {"nic=bond0,member=eth0": True, "nic=bond0,member=eth1": True}
    counts: Mapping[str, Value] = {"nic=bond0": 2}
    names = ("network.bond.slave_count", "network.bond.slaves_up")
    return {"network.bond.member_up": _metric("network.bond.member_up", members)} | {
        name: _metric(name, counts) for name in names
    }


def judged(metrics: Mapping[str, Metric]) -> tuple[str, set[tuple[str, str]]]:
    """Return the decision on a host whose snapshots have these readings, and name and scope of its inconclusive verdicts."""
    (record,) = builders.evidence(PLAN)["h1"].records
    snapshots = []
    for taken in record.snapshots:
        others = [metric for metric in taken.metrics if metric.name not in metrics]
        snapshots.append(replace(taken, metrics=(*others, *metrics.values())))
    evidence = {"h1": Evidence(records=(replace(record, snapshots=tuple(snapshots)),))}
    report = merge(PLAN, evidence, read_packs([]))
    shown = {(item.name, item.scope) for item in report.verdicts if item.verdict == INCONCLUSIVE}
    return report.hosts[0].decision, shown


def problems(readings: Mapping[str, Metric]) -> list[tuple[str, str]]:
    """Return name and scope of each problem of a snapshot with only these readings."""
    metrics = tuple(readings.values())
    taken = Snapshot(stage="benchmark", phase="after", at=builders.WHEN, duration_s=0.1, metrics=metrics)
    result = list(derived_problems(taken, readings))
    assert {stage for *_, stage in result} <= {"benchmark"}
    return [(name, scope) for name, scope, *_ in result]


def without(readings: Mapping[str, Metric], *names: str) -> dict[str, Metric]:
    return {name: metric for name, metric in readings.items() if name not in names}


CONTAINER = {"collector.container": _metric("collector.container", {HOST: 0.1})}
MATCHES, MANAGER = "software.driver_library.matches", "software.fabric_manager.matches"
MEMBER = "network.bond.member_up"
INTERFACE = {name: _metric(name, {HOST: 0.1}) for name in OF_INTERFACES}
ALARM, REASON = "optics.rx_power.alarm", "unsupported: hidden"


@pytest.mark.parametrize(
    ("readings", "expected"),
    [
        (module(), []), (software(), []), (bond(), []), ({}, []),
        # Some readings must be in the snapshot if a certain other reading is in it (TOGETHER).
        (without(software(), MATCHES), [(MATCHES, HOST)]),
        (software() | {MATCHES: Metric(name=MATCHES, unit="1")}, [(MATCHES, HOST)] * 2),
        (without(software(), MATCHES, "software.driver_library.version"), []),
        (CONTAINER, [("container.toolkit.present", HOST)]),
        ({"collector.container": Metric(name="collector.container", unit="s", absent={HOST: REASON})}, []),
        # A reading that is derived from other readings must have a value, unless one of the others is 0, false or missing.
        (software() | {MATCHES: Metric(name=MATCHES, unit="1", absent={HOST: REASON})}, [(MATCHES, HOST)]),
        (software() | {MANAGER: Metric(name=MANAGER, unit="1", absent={HOST: REASON}),
                       "fabric.nvswitch.probed": _metric("fabric.nvswitch.probed", {HOST: 0})}, []),
        # Each bond with members needs a reading of its members: a value, or the reason why a value is absent.
        (without(bond(), MEMBER), [(MEMBER, "nic=bond0")]),
        (bond() | {MEMBER: Metric(name=MEMBER, unit="1", absent={"nic=bond0,member=eth0": REASON})}, []),
        (bond() | {MEMBER: Metric(name=MEMBER, unit="1", absent={"nic=bond0": REASON})}, []),
        (bond() | {MEMBER: _metric(MEMBER, {"nic=bond1,member=eth0": True})}, [(MEMBER, "nic=bond0")]),
        ({"network.bond.slave_count": _metric("network.bond.slave_count", {"nic=bond0": 0})}, []),
        ({"network.bond.slave_count": _metric("network.bond.slave_count", {"nic=bond0": 1, "nic=bond1": 1}),
          MEMBER: _metric(MEMBER, {"nic=bond0,member=eth0": True, "nic=bond1,member=eth1": True})}, []),
        # A host with an Ethernet interface needs readings of its optical modules.
        (INTERFACE, [(MODULE, HOST)]), (without(INTERFACE, "network.mtu"), []),
        (INTERFACE | {"network.mtu": Metric(name="network.mtu", unit="B")}, []),
        (without(module(), "optics.bias"), [("optics.bias", PORT)]),
        (module() | {"optics.bias": Metric(name="optics.bias", unit="A", absent={PORT: REASON})}, []),
        # An alarm is checked only if the module reports its low and its high limit.
        (without(module(), f"{ALARM}_low") | {ALARM: _metric(ALARM, {LANE: "?"})}, []),
        # A module whose type (MODULE) is absent for a stated reason still needs all other readings.
        ({MODULE: Metric(name=MODULE, unit="1", absent={PORT: REASON})}, [(name, PORT) for name in OF_MODULES]),
    ],
)  # fmt: skip
def test_missing_reading_is_a_problem_if_another_reading_requires_it(
    readings: Mapping[str, Metric], expected: list[tuple[str, str]]
) -> None:
    assert problems(readings) == expected


@pytest.mark.parametrize(
    ("power", "sides"),
    [
        (0.9e-4, ["low"]), (1.1e-4, ["none"]), (1e-3, ["none"]), (2.9e-3, ["none"]), (3.1e-3, ["high"]),
        # The record rounds power and limits to six digits. Two values of the alarm are accepted if the power is near a limit.
        (1e-4, ["low", "none"]), (1.000005e-4, ["low", "none"]), (0.999995e-4, ["low", "none"]), (1.00002e-4, ["none"]),
        (3e-3, ["none", "high"]), (3.000015e-3, ["none", "high"]), (3.00006e-3, ["high"]),
    ],
)  # fmt: skip
def test_alarm_must_name_the_side_of_the_limits_on_which_the_power_is(power: float, sides: list[str]) -> None:
    name, quantity = "optics.rx_power.alarm", {"optics.rx_power": _metric("optics.rx_power", {LANE: power})}
    possible = [
        side
        for side in ("low", "none", "high")
        if (name, LANE) not in problems(module() | quantity | {name: _metric(name, {LANE: side})})
    ]
    assert possible == sides
    assert (name, LANE) in problems(module() | quantity | {name: _metric(name, {})})


@pytest.mark.parametrize(("power", "expected"), [(5e-3, "high"), (3e-3, "none"), (1e-4, "none"), (1e-5, "low")])
def test_wrong_alarm_states_the_power_and_the_limits(power: float, expected: str) -> None:
    name = "optics.tx_power.alarm"
    readings = module() | {
        "optics.tx_power": _metric("optics.tx_power", {LANE: power}),
        name: _metric(name, {LANE: "?"}),
    }
    taken = Snapshot(stage="gang", phase="after", at=builders.WHEN, duration_s=0.1, metrics=tuple(readings.values()))
    text = f'is "?", but the power is {power:g} W and the limits are 0.0001 W to 0.003 W, so it must be "{expected}"'
    assert (name, LANE, text, "gang") in list(derived_problems(taken, readings))


@pytest.mark.parametrize("readings", [module(), software(), bond()], ids=["module", "software", "bond"])
def test_complete_readings_are_accepted(readings: dict[str, Metric]) -> None:
    assert judged(readings) == (ACCEPTED, set())


def unsupported(metric: Metric) -> Metric:
    return replace(metric, values={}, absent=dict.fromkeys(metric.values, "unsupported: hidden"))


@pytest.mark.parametrize(
    "name", ["container.cdi.current", "software.driver_library.matches", "software.fabric_manager.matches"]
)
def test_derived_reading_of_the_host_cannot_be_hidden(name: str) -> None:
    readings = software()
    assert judged(readings | {name: unsupported(readings[name])}) == (INCOMPLETE, {(name, HOST)})
    without = {key: metric for key, metric in readings.items() if key != name}
    decision, shown = judged(without | {name: replace(readings[name], values={})})
    assert (decision, (name, HOST) in shown) == (INCOMPLETE, True)


@pytest.mark.parametrize(
    ("shown", "name"),
    [
        ({"collector.container": {HOST: 0.1}}, "container.toolkit.present"),
        ({"collector.software": {HOST: 0.1}}, "software.driver_module.version"),
        ({"container.toolkit.version": {HOST: "1.18.1"}}, "container.cdi.gpus"),
        (
            {
                "collector.optics": {HOST: 0.1},
                "network.mtu": {"nic=eth0": 9000},
                "network.operstate": {"nic=eth0": "up"},
            },
            MODULE,
        ),
    ],
)
def test_leaving_out_all_readings_of_a_collector_is_detected(shown: dict[str, dict[str, Value]], name: str) -> None:
    """`name`: a reading that must be reported as missing, because the snapshot has the readings `shown`."""
    units = {"network.mtu": "B", **{each: "s" for each in shown if each.startswith("collector.")}}
    readings = {each: _metric(each, values, units.get(each, "")) for each, values in shown.items()}
    assert (name, HOST) in judged(readings)[1]
    failed = {
        each: replace(metric, values={}, absent=dict.fromkeys(metric.values, "error: x"))
        for each, metric in readings.items()
    }
    # A failed collector has no duration. It need not report any reading.
    if any(each.startswith("collector.") for each in shown):
        assert (name, HOST) not in judged(failed)[1]


def test_fabric_manager_without_nvswitches_need_not_match_the_driver() -> None:
    readings = software()
    name = "software.fabric_manager.matches"
    none = {"fabric.nvswitch.probed": _metric("fabric.nvswitch.probed", {HOST: 0})}
    assert judged(readings | none | {name: unsupported(readings[name])}) == (ACCEPTED, set())


@pytest.mark.parametrize("name", OF_MODULES)
def test_reading_of_a_module_cannot_be_left_out(name: str) -> None:
    readings = module()
    decision, shown = judged({**readings, name: replace(readings[name], values={})})
    assert (decision, (name, PORT) in shown) == (INCOMPLETE, True)


@pytest.mark.parametrize("quantity", POWER)
@pytest.mark.parametrize("level", ["alarm", "warning"])
def test_alarm_follows_from_the_power_and_its_limits(quantity: str, level: str) -> None:
    readings = module()
    name = f"optics.{quantity}.{level}"
    assert judged(readings | {name: unsupported(readings[name])}) == (INCOMPLETE, {(name, LANE)})
    dark = {f"optics.{quantity}": _metric(f"optics.{quantity}", {LANE: 1e-5})}
    decision, shown = judged(readings | dark)
    assert (decision, (name, LANE) in shown) == (INCOMPLETE, True)
    # At the limit itself, both `low` and `none` are accepted, because the power is rounded.
    limit = {f"optics.{quantity}": _metric(f"optics.{quantity}", {LANE: LIMITS[f"{level}_low"]})}
    assert (name, LANE) not in judged(readings | limit)[1]


def test_module_that_does_not_report_limits_need_not_report_alarms() -> None:
    readings = module()
    names = [name for name in readings if ".alarm" in name or ".warning" in name]
    assert judged(readings | {name: unsupported(readings[name]) for name in names}) == (ACCEPTED, set())


def test_members_of_a_bond_cannot_be_left_out() -> None:
    readings = bond()
    name = "network.bond.member_up"
    decision, shown = judged(readings | {name: replace(readings[name], values={})})
    assert (decision, (name, "nic=bond0") in shown) == (INCOMPLETE, True)
