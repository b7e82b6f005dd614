"""The index of a host's observations knows in which scopes the host measured anything."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fleet.judge.evidence import Evidence
from fleet.judge.observation_index import ObservationIndex
from tests import builders

PLAN = builders.plan("h1", "h2")
(RECORD, *_) = builders.evidence(PLAN)["h1"].records


@pytest.mark.parametrize("left", ["snapshots", "observations"])
def test_scope_with_a_reading_or_a_benchmark_figure_is_measured(left: str) -> None:
    without = {name: () for name in ("snapshots", "observations") if name != left}
    index = ObservationIndex(Evidence(records=(replace(RECORD, **without),)))
    assert index.measured_at("gpu=0")
    assert not index.measured_at("gpu=99")


def test_scope_whose_figures_have_no_value_is_not_measured() -> None:
    failed = tuple(replace(item, status="error", value=None, reason="not started") for item in RECORD.observations)
    index = ObservationIndex(Evidence(records=(replace(RECORD, snapshots=(), observations=failed),)))
    assert not index.measured_at("gpu=0")
