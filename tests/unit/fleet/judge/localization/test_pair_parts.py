"""Failed verdicts on pairs of hosts, and on RDMA ports, get the part at fault (`Verdict.part`).

A slow pair is attributed to a suspect, or to the gang (the hosts of one multi-node launch), but not to a GPU that may be healthy.
If the rail or switch of a slow port fails too, the port is attributed to that part.
"""

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
WITHOUT_GANG = builders.plan("h1", "h2", gpu_count=2, rackproof_gang="none")
(GANG,) = PLAN.gangs()


def verdict(**fields: Any) -> Verdict:
    """Return a verdict with these fields; the default is a failure of the pair of GPU 1 of h1 with h2."""
    default = {"host": "h1", "verdict": FAIL, "criterion": "c", "reason": "slow", "serial": "h1-1"}
    return Verdict(**{**default, "scope": "gpu=1,partner=h2", "name": "pairs.bandwidth", **fields})


def suspect(scope: str = "gpu=1", **fields: Any) -> Verdict:
    """Return a failed verdict on a suspect: a part of h1, by default GPU 1, that the pair matrix shows as slow."""
    return verdict(**{"scope": scope, "serial": "nic-7", **fields})


def attributed(failure: Verdict, *suspects: Verdict, plan: Any = PLAN) -> tuple[str, str]:
    """Return part and serial of the failure after the attribution."""
    views = [host_view(plan, name) for name in ("h1", "h2")]
    (result,) = attribute_pair_failures([failure], suspects, views)
    return result.part, result.serial


@pytest.mark.parametrize(
    ("candidate", "part"),
    [
        (suspect("gpu=1"), "gpu=1"),
        (suspect("host"), "host"),
        (suspect("gpu=0", part="rail=1"), "rail=1"),
        (suspect("gpu=0", verdict=INCONCLUSIVE, part="rail=1"), "rail=1"),
    ],
    ids=["device", "host", "rail", "inconclusive suspect"],
)
def test_slow_pair_is_attributed_to_its_gpu_or_host_or_rail_if_that_is_a_suspect(candidate: Verdict, part: str) -> None:
    """The slow pair is that of GPU 1, which is on rail 1. A verdict on a suspected rail is recognized by its `part`."""
    assert attributed(verdict(), candidate) == (part, "nic-7")


@pytest.mark.parametrize(
    "candidate",
    [
        suspect("gpu=0"),
        suspect("gpu=0", part="rail=0"),
        suspect("gpu=0", part="switch=1"),
        suspect("gpu=1", verdict=PASS),
        suspect("gpu=1", name="ports.bandwidth"),
        suspect("gpu=1", host="h2"),
    ],
    ids=["other device", "other rail", "switch", "passed", "not a suspect for pairs of GPUs", "other host"],
)
def test_slow_pair_is_attributed_to_the_gang_if_neither_its_gpu_nor_host_nor_rail_is_a_suspect(
    candidate: Verdict,
) -> None:
    assert attributed(verdict(), candidate) == (f"gang={GANG}", "")


def test_slow_pair_of_a_gpu_outside_the_plan_is_attributed_to_the_gang() -> None:
    assert attributed(verdict(scope="gpu=7,partner=h2"), suspect("gpu=0", part="rail=1")) == (f"gang={GANG}", "")


def test_slow_pair_of_a_host_without_a_gang_is_attributed_to_the_host() -> None:
    assert attributed(verdict(), plan=WITHOUT_GANG) == ("host", "")


@pytest.mark.parametrize(
    "other",
    [
        verdict(verdict=PASS),
        verdict(name="pairs.wrong_elements"),
        verdict(name="memory.bandwidth"),
        verdict(scope="gpu=1"),
        verdict(part="gpu=0"),
    ],
    ids=["passed", "wrong data", "other figure", "scope without a partner", "already has a part"],
)
def test_other_verdict_keeps_its_part_and_serial(other: Verdict) -> None:
    assert attributed(other, suspect()) == (other.part, other.serial)


PORT = verdict(name=BEST, scope="port=mlx5_0:1", part="own")
"""A failed verdict on a port that is slow even with its best partner."""


@pytest.mark.parametrize("part", ["rail=0", "switch=s1"])
def test_port_that_is_slow_with_every_partner_is_attributed_to_its_rail_or_switch(part: str) -> None:
    assert attributed(PORT, suspect("port=mlx5_0:1", part=part)) == (part, PORT.serial)


@pytest.mark.parametrize(
    "changes",
    [{"part": "gpu=0"}, {"verdict": INCONCLUSIVE}, {"scope": "port=mlx5_1:1"}, {"host": "h2"}],
    ids=["neither rail nor switch", "inconclusive", "other port", "other host"],
)
def test_port_keeps_its_part_without_a_failed_verdict_on_its_rail_or_switch(changes: dict[str, str]) -> None:
    assert attributed(PORT, replace(suspect("port=mlx5_0:1", part="rail=0"), **changes)) == (PORT.part, PORT.serial)
