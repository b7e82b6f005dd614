"""A failure on a pair of hosts or on a port is attributed to the suspect that contains the device, never to a healthy GPU."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from fleet.judge.localization.pair_parts import attribute_pair_failures
from fleet.judge.port_coverage import BEST
from schemas.reports import FAIL, INCONCLUSIVE, PASS, Verdict
from tests import builders
from tests.unit.fleet.judge.small_fleet import host_view

PLAN = builders.plan("h1", "h2", gpu_count=2)
ALONE = builders.plan("h1", "h2", gpu_count=2, rackproof_gang="none")
(GANG,) = PLAN.gangs()


def verdict(**fields: Any) -> Verdict:
    default = {"host": "h1", "verdict": FAIL, "criterion": "c", "reason": "slow", "serial": "h1-1"}
    return Verdict(**{**default, "scope": "gpu=1,partner=h2", "name": "pairs.bandwidth", **fields})


def suspect(scope: str = "gpu=1", **fields: Any) -> Verdict:
    return verdict(**{"scope": scope, "serial": "nic-7", **fields})


def attributed(failure: Verdict, *suspects: Verdict, plan: Any = PLAN) -> tuple[str, str]:
    """Return part and serial of the failure after the attribution."""
    views = [host_view(plan, name) for name in ("h1", "h2")]
    (result,) = attribute_pair_failures([failure], suspects, views)
    return result.part, result.serial


@pytest.mark.parametrize(
    ("other", "part"),
    [
        (suspect("gpu=1"), "gpu=1"),
        (suspect("host"), "host"),
        (suspect("gpu=0", part="rail=1"), "rail=1"),
        (suspect("gpu=0", verdict=INCONCLUSIVE, part="rail=1"), "rail=1"),
    ],
    ids=["device", "host", "rail", "inconclusive suspect"],
)
def test_slow_pair_is_attributed_to_the_suspect_that_includes_its_rail(other: Verdict, part: str) -> None:
    assert attributed(verdict(), other) == (part, "nic-7")


@pytest.mark.parametrize(
    "other",
    [
        suspect("gpu=0"),
        suspect("gpu=0", part="rail=0"),
        suspect("gpu=0", part="switch=1"),
        suspect("gpu=1", verdict=PASS),
        suspect("gpu=1", name="ports.bandwidth"),
        suspect("gpu=1", host="h2"),
    ],
    ids=["other device", "other rail", "switch", "passed", "not of the pair matrix", "other host"],
)
def test_slow_pair_without_a_suspect_is_attributed_to_the_gang(other: Verdict) -> None:
    assert attributed(verdict(), other) == (f"gang={GANG}", "")


def test_pair_of_a_device_that_is_not_planned_has_no_rail() -> None:
    assert attributed(verdict(scope="gpu=7,partner=h2"), suspect("gpu=0", part="rail=1")) == (f"gang={GANG}", "")


def test_slow_pair_of_a_host_without_a_gang_is_attributed_to_the_host() -> None:
    assert attributed(verdict(), plan=ALONE) == ("host", "")


@pytest.mark.parametrize(
    "other",
    [
        verdict(verdict=PASS),
        verdict(name="pairs.wrong_elements"),
        verdict(name="memory.bandwidth"),
        verdict(scope="gpu=1"),
        verdict(part="gpu=0"),
    ],
    ids=["passed", "wrong data", "not of a pair", "no partner", "has a part already"],
)
def test_verdict_that_is_not_attributed_keeps_its_part_and_serial(other: Verdict) -> None:
    assert attributed(other, suspect()) == (other.part, other.serial)


PORT = verdict(name=BEST, scope="port=mlx5_0:1", part="own")


@pytest.mark.parametrize("part", ["rail=0", "switch=s1"])
def test_port_that_is_slow_with_every_partner_is_attributed_to_its_rail_or_switch(part: str) -> None:
    assert attributed(PORT, suspect("port=mlx5_0:1", part=part)) == (part, PORT.serial)


@pytest.mark.parametrize(
    "changes",
    [{"part": "gpu=0"}, {"verdict": INCONCLUSIVE}, {"scope": "port=mlx5_1:1"}, {"host": "h2"}],
    ids=["part of the host", "inconclusive", "other port", "other host"],
)
def test_port_keeps_its_part_without_a_failed_shared_part(changes: dict[str, str]) -> None:
    assert attributed(PORT, replace(suspect("port=mlx5_0:1", part="rail=0"), **changes)) == (PORT.part, PORT.serial)
