"""A reboot during the run is found, even if the host had been up only for minutes before the reboot."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.soak.aggregate import select_snapshots
from fleet.judge.criteria import read_packs
from fleet.judge.reading_consistency import CLOCK_TOLERANCE_S, UPTIME
from fleet.judge.reboots import BOOT_ID, reboots
from fleet.report.merge import merge
from schemas.records import Metric, Snapshot
from schemas.reports import ACCEPTED, INCOMPLETE
from tests import builders

START = datetime(2026, 11, 21, 4, tzinfo=UTC)
Moment = tuple[float, float | None, str | None]
"""Clock (s), uptime (s) and boot ID of a snapshot; None: the snapshot lacks the reading."""


def snapshots_of(moments: Sequence[Moment]) -> list[Snapshot]:
    return [
        Snapshot(
            stage="soak",
            phase="before",
            at=f"{START + timedelta(seconds=clock):%Y-%m-%dT%H:%M:%S.%fZ}",
            duration_s=0.1,
            metrics=tuple(
                Metric(name=name, unit=unit, values={} if value is None else {"host": value})
                for name, unit, value in ((UPTIME, "s", uptime), (BOOT_ID, "1", boot))
            ),
        )
        for clock, uptime, boot in moments
    ]


def found(moments: Sequence[Moment]) -> list[int]:
    """Return the position of each snapshot that follows a reboot."""
    snapshots = snapshots_of(moments)
    uptimes, boot_ids = ([(item, item.metrics[position]) for item in snapshots] for position in (0, 1))
    return [snapshots.index(later) for _, later in reboots(uptimes, boot_ids)]


@pytest.mark.parametrize(
    ("moments", "expected"),
    [
        pytest.param([(0, 600, "a"), (3600, 4200, "a")], [], id="the host stays up"),
        pytest.param([(0, 600, "a"), (7200, 5400, "b")], [1], id="booted ten minutes before the run"),
        pytest.param([(0, 600, "a"), (60, None, None), (7200, 5400, "b")], [2], id="snapshot during a launch"),
        pytest.param([(0, 9e5, "a"), (7200, 5400, "a")], [1], id="the uptime falls"),
        pytest.param([(0, 60, "a"), (120, 70, "b")], [1], id="booted a minute before the run"),
        pytest.param([(0, 60, "a"), (120, None, "b")], [1], id="uptime not readable"),
        pytest.param([(0, 600, None), (7200, 5400, None)], [1], id="boot ID not readable"),
        pytest.param([(0, 600, "a"), (7200, 5400, None)], [1], id="boot ID not readable after the reboot"),
        pytest.param([(0, 600, "a"), (7200, 5400, None), (7300, 5500, "b")], [1, 2], id="boot ID read later"),
        pytest.param([(0, 600, "a"), (7200, 5400, None), (7300, 5500, "a")], [], id="clock corrected by 40 minutes"),
        pytest.param([(0, 9e5, None), (7200, 9e5 + 60, None)], [], id="clock corrected on a host that is up for days"),
        pytest.param([(0, 600, None), (3600, 3950, None)], [], id="clock corrected by four minutes"),
        pytest.param([(0, 600, ""), (3600, 4200, "b")], [], id="empty boot ID"),
        pytest.param([(0, None, None), (3600, None, None)], [], id="nothing readable"),
    ],
)
def test_reboot_is_found_by_boot_id_or_uptime(moments: list[Moment], expected: list[int]) -> None:
    assert found(moments) == expected


@st.composite
def hosts(draw: st.DrawFn) -> tuple[list[Moment], list[tuple[float, float, int]]]:
    """Return the snapshots of a host that reboots at random, and for each snapshot the true time, uptime and boot number.

    In each snapshot the clock has a different error of up to half of CLOCK_TOLERANCE_S.
    """
    steps = st.tuples(st.floats(1, 20_000), st.booleans(), st.floats(0, 1), st.floats(0, 1800))
    true_s, booted, boot = 0.0, -draw(st.floats(30, 10_000)), 0
    moments, truth = [], []
    for pause, reboots_now, share, outage in draw(st.lists(steps, min_size=2, max_size=6)):
        if reboots_now:
            booted, boot = true_s + share * pause + outage, boot + 1
            true_s += outage
        true_s += pause
        clock = true_s + draw(st.floats(-0.49, 0.49)) * CLOCK_TOLERANCE_S
        if not moments or clock > moments[-1][0]:
            moments.append((clock, true_s - booted, str(boot)))
            truth.append((true_s, true_s - booted, boot))
    return moments, truth


@given(hosts())
def test_boot_ids_show_exactly_the_reboots(
    host: tuple[list[Moment], list[tuple[float, float, int]]],
) -> None:
    moments, truth = host
    assert found(moments) == [i for i in range(1, len(truth)) if truth[i][2] != truth[i - 1][2]]


@given(hosts())
def test_without_boot_ids_only_reboots_in_the_first_minutes_after_a_boot_are_missed(
    host: tuple[list[Moment], list[tuple[float, float, int]]],
) -> None:
    moments, truth = host
    positions = set(found([(clock, uptime, None) for clock, uptime, _ in moments]))
    for i in range(1, len(truth)):
        (before_s, before_up, before), (after_s, after_up, after) = truth[i - 1 : i + 1]
        lost_s = (after_s - before_s) - (after_up - before_up)
        if before == after:
            assert i not in positions
        elif lost_s > 2 * CLOCK_TOLERANCE_S:
            assert i in positions


@pytest.mark.parametrize(("boot", "decision"), [("a", ACCEPTED), ("b", INCOMPLETE)])
def test_host_is_accepted_only_if_its_boot_id_never_changes(boot: str, decision: str) -> None:
    plan = builders.plan("h1", "h2", rackproof_gang="rack")
    evidence = builders.evidence(plan)
    for position in range(len(evidence["h2"].snapshots()) - 1):
        records, number = [], 0
        for record in evidence["h2"].records:
            snapshots = []
            for snapshot in record.snapshots:
                value = boot if number > position else "a"
                others = [metric for metric in snapshot.metrics if metric.name != BOOT_ID]
                metric = Metric(name=BOOT_ID, unit="1", values={"host": value})
                snapshots.append(replace(snapshot, metrics=(*others, metric)))
                number += 1
            records.append(replace(record, snapshots=tuple(snapshots)))
        fleet = merge(plan, evidence | {"h2": replace(evidence["h2"], records=tuple(records))}, read_packs([]))
        assert [host.decision for host in fleet.hosts] == [ACCEPTED, decision]


def test_soak_keeps_the_snapshots_before_and_after_a_reboot() -> None:
    """At the end of the soak, the uptime is longer than it was before the reboot."""
    kept: tuple[Snapshot, ...] = ()
    rounds = snapshots_of([
        (number * 600, 300 + number * 600 if number < 5 else number * 600 - 2700, "a" if number < 5 else "b")
        for number in range(20)
    ])  # fmt: skip
    for snapshot in rounds:
        kept = select_snapshots([*kept, snapshot])
    assert [rounds.index(snapshot) for snapshot in kept] == [0, 4, 5, 19]
