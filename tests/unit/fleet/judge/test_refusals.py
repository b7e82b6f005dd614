"""If the driver refuses a basic reading of a GPU, the host gets an inconclusive verdict: evidence is missing.

There is no such verdict if another verdict reports the problem, or if a later snapshot has a value for the reading. Basic
readings are those in `BASIC` (fleet/judge/refusals.py), such as temperature and power.
"""

from __future__ import annotations

from typing import Any

import pytest

from fleet.judge.criteria import Pack
from fleet.judge.refusals import may_be_transient, refused_readings
from schemas.records import Metric, Snapshot
from schemas.reports import INCONCLUSIVE, VerdictKind
from tests.unit.fleet.judge.small_fleet import criterion, host_view, one_figure_plan, pack

PLAN = one_figure_plan("h1", gpu_count=2)
POWER = "gpu.power"


def metric(name: str = POWER, why: str = "error: Unknown Error", scope: str = "gpu=0") -> Metric:
    """Return a reading that gpu=1 has. `why`: reason why `scope` lacks it; empty: no scope lacks it."""
    return Metric(name=name, unit="W", values={"gpu=1": 90.0}, absent={scope: why} if why else {})


def refused(
    *snapshots: Metric, packs: tuple[Pack, ...] = (), more: tuple[Metric, ...] = ()
) -> list[tuple[str, str, str]]:
    """Return name, scope and reason of each verdict. Each metric in `snapshots` becomes a snapshot, which also has `more`."""
    shots = [
        Snapshot(stage=f"stage{at}", phase="before", at="2026-11-21T04:00:00Z", duration_s=0.1, metrics=(item, *more))
        for at, item in enumerate(snapshots)
    ]
    verdicts = list(refused_readings(host_view(PLAN, snapshots=tuple(shots), packs=packs)))
    assert {(item.verdict, item.kind, item.stage) for item in verdicts} <= {
        (INCONCLUSIVE, VerdictKind.ERROR, f"stage{len(shots) - 1}")
    }
    return [(item.name, item.scope, item.reason) for item in verdicts]


REFUSED = [(POWER, "gpu=0", "the driver refuses it: Unknown Error")]


@pytest.mark.parametrize(
    ("snapshots", "expected"),
    [
        ([metric()], REFUSED),
        ([metric(why=""), metric()], REFUSED),
        ([metric(), metric(why="")], []),
        ([metric(why="unsupported: no sensor")], []),
        ([metric(scope="gpu=0,sensor=1")], [(POWER, "gpu=0,sensor=1", REFUSED[0][2])]),
        ([metric("gpu.energy")], []),
    ],
    ids=[
        "refused",
        "refused only in the last snapshot",
        "refused only in the first snapshot",
        "unsupported",
        "part of a GPU",
        "not a basic reading",
    ],
)
def test_basic_reading_that_the_driver_refuses_in_the_last_snapshot_is_inconclusive(
    snapshots: list[Metric], expected: list[tuple[str, str, str]]
) -> None:
    assert refused(*snapshots) == expected


@pytest.mark.parametrize(
    ("other", "expected"),
    [
        (Metric(name="gpu.uuid", unit="1", values={"gpu=1": "u"}, absent={"gpu=0": "error: GPU is lost"}), []),
        (Metric(name="gpu.uuid", unit="1", values={"gpu=0": "u"}, absent={"gpu=1": "error: GPU is lost"}), REFUSED),
        (Metric(name="gpu.recovery_action", unit="1", values={"gpu=0": "reset"}), []),
        (Metric(name="gpu.recovery_action", unit="1", values={"gpu=0": "none", "gpu=1": "reset"}), REFUSED),
    ],
    ids=["GPU does not answer", "other GPU does not answer", "GPU needs recovery", "other GPU needs recovery"],
)
def test_refusal_by_a_gpu_that_needs_recovery_or_does_not_answer_is_not_reported(
    other: Metric, expected: list[tuple[str, str, str]]
) -> None:
    assert refused(metric(), more=(other,)) == expected


def test_refusal_is_reported_if_the_gpu_needs_recovery_only_in_an_earlier_snapshot() -> None:
    needs = Metric(name="gpu.recovery_action", unit="1", values={"gpu=0": "reset"})
    first = Snapshot(stage="preflight", phase="before", at="2026-11-21T04:00:00Z", duration_s=0.1, metrics=(needs,))
    last = Snapshot(
        stage="benchmark", phase="after", at="2026-11-21T04:00:00Z", duration_s=0.1,
        metrics=(metric(), Metric(name="gpu.recovery_action", unit="1", values={"gpu=0": "none"})),
    )  # fmt: skip
    assert len(list(refused_readings(host_view(PLAN, snapshots=(first, last))))) == 1


def test_refusal_by_a_gpu_without_any_reading_or_benchmark_result_is_not_reported() -> None:
    lost = Metric(name=POWER, unit="W", values={"gpu=1": 90.0}, absent={"gpu=0": "error: GPU is lost"})
    shots = (Snapshot(stage="preflight", phase="before", at="2026-11-21T04:00:00Z", duration_s=0.1, metrics=(lost,)),)
    assert list(refused_readings(host_view(PLAN, snapshots=shots, observations=()))) == []


@pytest.mark.parametrize(
    ("judging", "is_reported"),
    [
        ({"name": POWER}, False),
        ({"name": "gpu.*"}, False),
        ({"name": "gpu.energy"}, True),
        ({"name": "host.*"}, True),
        ({"name": POWER, "value": None, "same_as_fleet": True}, True),
    ],
    ids=[
        "judged",
        "judged by a pattern",
        "other reading judged",
        "pattern of other readings",
        "only compared with the fleet",
    ],
)
def test_refusal_of_a_reading_that_a_shipped_criterion_judges_is_not_reported(
    judging: dict[str, Any], is_reported: bool
) -> None:
    shipped = pack(criterion("gpu.thing"), criterion(id="c2", **judging))
    assert refused(metric(), packs=(shipped,)) == (REFUSED if is_reported else [])


def test_refusal_is_reported_even_if_a_criterion_that_the_site_wrote_judges_the_reading() -> None:
    """A criterion on the reading makes this verdict unnecessary only if Rackproof ships the criterion."""
    own = criterion(POWER, origin="site")
    assert refused(metric(), packs=(pack(), pack(own, name="site", chosen=True))) == REFUSED


@pytest.mark.parametrize(
    ("name", "expected"),
    [("gpu.power", True), ("gpu.clock.lowered", True), ("gpu.power_limit_lowered", True), ("gpu.uuid", False)],
)
def test_refusal_of_basic_and_derived_readings_may_be_transient(name: str, expected: bool) -> None:
    """A derived reading states whether one reading is below another, such as the power limit below its default."""
    assert may_be_transient(name) is expected
