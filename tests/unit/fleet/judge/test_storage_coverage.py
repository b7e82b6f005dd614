"""A record with a client's bandwidth to a shared directory must also have the total of all clients, if the total has a floor.

A client is a host that measures the directory. A floor is a lower limit in the inventory.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from fleet.judge.storage_coverage import silent_totals
from schemas.records import SKIPPED, Observation
from schemas.reports import INCONCLUSIVE, Verdict
from tests import builders
from tests.unit.fleet.judge.small_fleet import host_view, one_figure_plan

PLAN = one_figure_plan("h1")
HOST = replace(PLAN.hosts[0], storage_floors={"shared_read": 1.0})


def figure(name: str = "bandwidth", directory: str = "data", op: str = "read", stage: str = "gang") -> Observation:
    return builders.observation(f"shared_storage.{name}", 1e9, scope=f"directory={directory}", op=op, stage=stage)


def verdicts_on_totals(*observations: Observation) -> list[Verdict]:
    """Return the verdicts on missing totals in a record of these observations."""
    return list(silent_totals(host_view(replace(PLAN, hosts=(HOST,)), observations=observations)))


def test_missing_total_of_a_directory_with_a_floor_is_inconclusive() -> None:
    (verdict,) = verdicts_on_totals(figure())
    assert (verdict.name, verdict.scope, verdict.stage) == (
        "shared_storage.aggregate_bandwidth",
        "directory=data",
        "gang",
    )
    assert (verdict.verdict, verdict.params) == (INCONCLUSIVE, {"op": "read"})
    assert verdict.reason == "the bandwidth of this client was measured, but the record has no total of all clients"


@pytest.mark.parametrize(
    ("other", "count"),
    [
        (figure("aggregate_bandwidth"), 0),
        (figure("aggregate_bandwidth", directory="scratch"), 1),
        (figure("aggregate_bandwidth", op="write"), 1),
        (figure("aggregate_bandwidth", stage="benchmark"), 1),
    ],
    ids=["same directory, operation and stage", "other directory", "other operation", "other stage"],
)
def test_total_of_another_directory_operation_or_stage_does_not_count(other: Observation, count: int) -> None:
    assert len(verdicts_on_totals(figure(), other)) == count


@pytest.mark.parametrize(
    "client",
    [figure(op="write"), replace(figure(), status=SKIPPED, value=None, reason="left out")],
    ids=["no floor for writes", "client not measured"],
)
def test_total_is_required_only_with_a_floor_and_a_figure_of_this_client(client: Observation) -> None:
    assert verdicts_on_totals(client) == []
