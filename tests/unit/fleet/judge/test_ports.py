"""Ports: optical modules of one part number are compared with each other, and error counters are judged by their rate.

The reason of a failure names the module in the port.

`hosts_with_findings` judges the hosts in three ways, which must agree: by creating all verdicts, by counting passes, and with
`judge`.
"""

from __future__ import annotations

import math
from typing import Any

import pytest

from fleet.judge.counter_rate import least_rate
from fleet.judge.criteria import Criterion
from fleet.judge.evidence import Evidence
from fleet.judge.judge import judge
from schemas.records import Metric, Value
from schemas.reports import FAIL, Verdict
from tests.unit.fleet.judge.small_fleet import criterion, pack
from tests.unit.fleet.judge.test_passes import (
    H5,
    NAMES,
    PLAN,
    assert_gathered,
    fleet,
    hosts_with_findings,
    with_readings,
)

PORT = "hca=mlx5_0,port=1"
LIGHT = criterion(
    "optics.rx_power", id="light", operator="ge", fleet_fraction=0.25, optional=True, unit="W", scope="lane"
)
RATE = criterion("port.symbol_errors", id="rate", operator="le", value=120, per_hour=True, optional=True, scope="port")
RISING = criterion(
    "port.symbol_errors", id="rising", operator="le", value=3600, per_hour=True, delta=True, optional=True, scope="port"
)
HOURS_UP = 100
FIRST_S, LAST_S = HOURS_UP * 3600.0, HOURS_UP * 3600.0 + 2.0
"""Uptime of a host in its first and in its last snapshot, in seconds."""


def metric(name: str, unit: str = "1", **scopes: Value) -> Metric:
    """Return a reading with a value for each scope: `lane_1` is lane 1 of PORT, `port` is PORT itself, `host` is the host."""
    named = {"host": "host", "port": PORT}
    values = {named.get(key) or f"{PORT},{key.replace('_', '=')}": value for key, value in scopes.items()}
    return Metric(name=name, unit=unit, values=values)


def module_readings(watts: float, part_number: str = "AO-400", lanes: int = 2) -> list[Metric]:
    """Return the readings of an optical module. Its first lane receives `watts`; its other lanes receive 1 mW each."""
    powers = {"lane_1": watts, **{f"lane_{lane}": 1e-3 for lane in range(2, lanes + 1)}}
    module = [("vendor", "ACME"), ("part_number", part_number), ("serial", "S1")]
    return [
        metric("optics.rx_power", "W", **powers),
        *(metric(f"optics.module.{key}", port=text) for key, text in module),
    ]


def symbol_error_readings(
    first: int, last: int | None = None, *, age_s: float | None = None
) -> tuple[list[Metric], list[Metric]]:
    """Return the readings of PORT in the first and in the last snapshot.

    Args:
        first: symbol errors in the first snapshot.
        last: symbol errors in the last snapshot; None: as in the first.
        age_s: seconds since the counters were cleared; None: not read.
    """
    age = [] if age_s is None else [metric("port.counter_age", "s", port=age_s)]
    return (
        [metric("host.uptime", "s", host=FIRST_S), metric("port.symbol_errors", port=first), *age],
        [
            metric("host.uptime", "s", host=LAST_S),
            metric("port.symbol_errors", port=first if last is None else last),
            *age,
        ],
    )


def with_metrics(first: list[Metric], last: list[Metric] | None = None) -> Any:
    return with_readings(tuple(first), tuple(last or first))


def fleet_of(healthy: Any, odd: Any) -> dict[str, Evidence]:
    """Return a fleet in which H5 is `odd` and every other host is `healthy`."""
    return fleet(**{name: odd if name == H5 else healthy for name in NAMES})


def verdicts(evidence: dict[str, Evidence], *rules: Criterion) -> list[Verdict]:
    """Return the failed verdicts of these criteria."""
    ids = {rule.id for rule in rules}
    return [item for item in judge(PLAN, evidence, [pack(*rules)]) if item.criterion in ids and item.verdict == FAIL]


@pytest.mark.parametrize(("watts", "found"), [(1e-3, []), (2.6e-4, []), (2.4e-4, [H5]), (0.0, [H5])])
def test_lane_with_little_light_fails_and_its_module_is_named(watts: float, found: list[str]) -> None:
    evidence = fleet_of(with_metrics(module_readings(1e-3)), with_metrics(module_readings(watts)))
    assert hosts_with_findings(evidence, LIGHT) == found
    assert_gathered(PLAN, evidence, [pack(LIGHT)])
    failed = verdicts(evidence, LIGHT)
    assert [(item.host, item.scope) for item in failed] == [(host, f"{PORT},lane=1") for host in found]
    assert all("module ACME AO-400, serial S1" in item.reason for item in failed)


def test_modules_of_different_part_numbers_are_not_compared_with_each_other() -> None:
    evidence = fleet_of(with_metrics(module_readings(1e-3)), with_metrics(module_readings(1e-5, "AO-100-LR", lanes=1)))
    assert hosts_with_findings(evidence, LIGHT) == []
    assert_gathered(PLAN, evidence, [pack(LIGHT)])


def test_modules_of_unknown_part_number_are_not_compared() -> None:
    evidence = fleet_of(with_metrics(module_readings(1e-3)[:1]), with_metrics(module_readings(1e-5)[:1]))
    assert hosts_with_findings(evidence, LIGHT) == []
    assert_gathered(PLAN, evidence, [pack(LIGHT)])


@pytest.mark.parametrize(
    ("count", "found", "age_s"),
    [
        (0, [], None),
        (120 * HOURS_UP, [], None),
        (120 * HOURS_UP + 1, [H5], None),
        (120 * 24, [], 60.0),  # cleared a minute ago, but the rate is computed over at least 24 h
        (120 * 24 + 1, [H5], 60.0),
        (120 * 48, [], 48 * 3600.0),
        (120 * 48 + 1, [H5], 48 * 3600.0),
    ],
)
def test_counter_that_does_not_increase_is_judged_by_its_rate_before_the_run(
    count: int, found: list[str], age_s: float | None
) -> None:
    evidence = fleet_of(
        with_metrics(*symbol_error_readings(0, age_s=age_s)), with_metrics(*symbol_error_readings(count, age_s=age_s))
    )
    assert hosts_with_findings(evidence, RATE, RISING) == found


def test_reason_states_how_much_was_counted_before_the_run_and_over_which_time() -> None:
    evidence = fleet_of(with_metrics(*symbol_error_readings(0)), with_metrics(*symbol_error_readings(40_000)))
    (failed,) = verdicts(evidence, RATE, RISING)
    assert failed.criterion == "rate"
    assert failed.reason.replace("\N{NARROW NO-BREAK SPACE}", " ") == (
        "found 400 an hour, wanted ≤ 120 an hour (40 000 counted in 4.17 days before the run, unchanged during the run)"
    )
    assert (failed.value, failed.unit) == (400.0, "1/h")


def test_reason_says_at_most_24_h_if_the_counters_were_cleared_less_than_24_h_ago() -> None:
    evidence = fleet_of(
        with_metrics(*symbol_error_readings(0, age_s=60.0)),
        with_metrics(*symbol_error_readings(120 * 24 + 24, age_s=60.0)),
    )
    (failed,) = verdicts(evidence, RATE, RISING)
    assert "counted in at most 24 h before the run" in failed.reason


def test_counter_that_increases_fails_in_the_stage_in_which_it_increased() -> None:
    evidence = fleet_of(with_metrics(*symbol_error_readings(5)), with_metrics(*symbol_error_readings(5, 2005)))
    assert hosts_with_findings(evidence, RATE, RISING) == [H5]
    (failed,) = verdicts(evidence, RATE, RISING)
    assert (failed.criterion, failed.stage) == ("rising", "benchmark")
    reason = failed.reason.replace("\N{NARROW NO-BREAK SPACE}", " ")
    # The run takes 2 s, but the rate is computed over at least five minutes: 2000 errors in five minutes are 24 000 an hour.
    # The reason states the lower confidence limit of that rate (`least_rate`).
    assert "changed by 22 422 an hour" in reason
    assert "2000 in stage benchmark; the rate is at least this, with a confidence of 99.87 %" in reason


@pytest.mark.parametrize(("count", "found"), [(0, []), (300, []), (340, []), (370, [H5])])
def test_count_in_a_short_run_may_exceed_the_limit_by_chance(count: int, found: list[str]) -> None:
    """The limit of RISING, 3600 errors an hour, is 300 in five minutes.

    A port whose true rate is the limit may count 340 in five minutes by chance, but hardly 370.
    """
    evidence = fleet_of(with_metrics(*symbol_error_readings(5)), with_metrics(*symbol_error_readings(5, 5 + count)))
    assert hosts_with_findings(evidence, RISING) == found


@pytest.mark.parametrize("count", [5, 22, 121, 1000])
def test_least_rate_is_the_lower_limit_of_a_poisson_mean(count: int) -> None:
    """If the returned rate is the true mean, the probability of `count` or more events in an hour is about 0.00135.

    A normally distributed value exceeds its mean by more than three standard deviations with the same probability.
    """
    mean = least_rate(count, hours=1.0)
    fewer = sum(math.exp(number * math.log(mean) - mean - math.lgamma(number + 1)) for number in range(count))
    assert mean < count
    assert 1 - fewer < 0.0017
    assert 1 - fewer > 0.001


def test_equal_counters_of_hosts_with_different_uptimes_have_different_rates() -> None:
    """All hosts count 5000 errors; only H5, which was booted an hour ago, has a high rate."""
    recent = [metric("host.uptime", "s", host=3600.0), metric("port.symbol_errors", port=5000)]
    evidence = fleet_of(with_metrics(*symbol_error_readings(5000)), with_metrics(recent))
    assert hosts_with_findings(evidence, RATE) == [H5]


def test_rate_without_an_uptime_is_inconclusive() -> None:
    no_uptime = [metric("port.symbol_errors", port=5)]
    evidence = fleet_of(with_metrics(*symbol_error_readings(5)), with_metrics(no_uptime))
    assert hosts_with_findings(evidence, RATE) == [H5]
    assert not verdicts(evidence, RATE)


@pytest.mark.parametrize(
    ("name", "part"),
    [("network.rx_crc_errors", "hca=mlx5_0"), ("network.carrier_changes", "hca=mlx5_0"), ("network.mtu", "hca=mlx5_0"),
     ("network.switch_port_label", "")],
)  # fmt: skip
def test_verdict_on_the_link_of_a_roce_interface_is_attributed_to_the_adapter(name: str, part: str) -> None:
    """The label of the switch port is not a reading of the link, so its verdict is attributed to no part."""
    rule = criterion(name, id="interface", operator="le", value=0, scope="nic")
    interface = Metric(name="infiniband.interface", unit="1", values={PORT: "eth4"})
    serial = metric("optics.module.serial", port="S1")

    def readings(value: int) -> list[Metric]:
        unit = "B" if name.endswith("mtu") else "1"
        return [Metric(name=name, unit=unit, values={"nic=eth4": value, "nic=eth5": 0}), interface, serial]

    evidence = fleet_of(with_metrics(readings(0)), with_metrics(readings(1500)))
    assert hosts_with_findings(evidence, rule) == [H5]
    (failed,) = verdicts(evidence, rule)
    assert (failed.scope, failed.part) == ("nic=eth4", part)
    assert failed.reason.endswith("module serial S1")
