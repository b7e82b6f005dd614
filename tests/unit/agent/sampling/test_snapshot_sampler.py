"""The thread that takes snapshots while the ranks run, and the selection of the snapshots that are kept."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest

from agent.sampling import launch_thread, snapshot_sampler
from agent.sampling.snapshot_sampler import SnapshotSampler, SnapshotSelector
from collectors.base import Family
from schemas.records import Metric, Snapshot


class Counter:
    """A collector that counts its calls, returns the count, and sets `is_second` at the second call."""

    name = "counter"

    def __init__(self) -> None:
        self.count, self.is_second = 0, threading.Event()

    def collect(self) -> Iterator[Family]:
        self.count += 1
        if self.count == 2:
            self.is_second.set()
        yield Family(name="gpu.power", unit="W", help="A count.", readings=[({"gpu": "0"}, self.count)])


def test_snapshots_are_taken_in_a_daemon_thread_until_the_ranks_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(snapshot_sampler, "PERIOD_S", 0.01)
    counter = Counter()
    with SnapshotSampler([counter], "gang") as sampler:
        assert (sampler.name, sampler.daemon) == ("snapshots", True), (
            "a blocked driver must not delay the exit of the supervisor"
        )
        assert counter.is_second.wait(10)
    assert not sampler.is_alive()
    (snapshot,) = sampler.selected()
    assert (snapshot.stage, snapshot.phase) == ("gang", "during")
    assert {metric.name: metric.values for metric in snapshot.metrics}["gpu.power"] == {"gpu=0": counter.count}


def test_no_snapshot_is_taken_before_the_first_period_ends() -> None:
    counter = Counter()
    with SnapshotSampler([counter], "gang") as sampler:
        pass
    assert (counter.count, sampler.selected()) == (0, [])


@pytest.mark.parametrize("error", [None, SystemExit])
def test_supervisor_waits_for_the_thread_unless_an_exception_ended_the_launch(
    monkeypatch: pytest.MonkeyPatch, error: type[BaseException] | None
) -> None:
    sampler, waits = SnapshotSampler([], "gang"), list[float]()
    monkeypatch.setattr(sampler, "join", lambda timeout: waits.append(timeout))
    sampler.__exit__(error, None, None)
    assert sampler._ended.is_set()
    assert waits == ([] if error else [launch_thread.GRACE_S])


def test_sampler_passes_its_dictionary_of_stuck_collectors_to_each_snapshot(monkeypatch: pytest.MonkeyPatch) -> None:
    """`take_snapshot` does not call the collectors in this dictionary that still block."""
    calls: list[Any] = []

    def take(collectors: Any, **fields: Any) -> Any:
        calls.append((collectors, fields))
        sampler._ended.set()
        return snapshot(1), ()

    monkeypatch.setattr(snapshot_sampler, "PERIOD_S", 0.0)
    monkeypatch.setattr(snapshot_sampler, "take_snapshot", take)
    collectors: list[Any] = ["a"]
    sampler = SnapshotSampler(collectors, "gang")
    sampler.run()
    assert calls == [(collectors, {"stage": "gang", "phase": "during", "stuck": {}})]
    assert calls[0][1]["stuck"] is sampler._stuck
    assert sampler.selected() == [snapshot(1)]


# ---- the selection ----


def snapshot(at: int, watts: Any = 0.0, *alarms: str, **throttled: Any) -> Snapshot:
    """Return a snapshot taken at second `at`.

    Args:
        at: second of the minute.
        watts: power of GPU 0.
        alarms: names of alarms. Each of these alarms is a clock that could not be read.
        throttled: throttle reason -> whether it is active on GPU 0. Each active reason except `power_cap` is an alarm.
    """
    return Snapshot(
        stage="benchmark",
        phase="during",
        at=f"2026-11-21T04:00:{at:02}Z",
        duration_s=0.1,
        metrics=(
            Metric(name="gpu.power", unit="W", values={"gpu=0": watts, "gpu=1": "none", "gpu=2": 5}),
            Metric(name="gpu.energy", unit="J", values={"gpu=0": 1e9 / (at + 1)}),
            Metric(
                name="gpu.throttle.active",
                unit="1",
                values={f"gpu=0,reason={reason}": value for reason, value in throttled.items()},
            ),
            Metric(name="gpu.clock", unit="Hz", absent={f"gpu={alarm}": "error: lost" for alarm in alarms}),
            # Not an alarm: this reading is unsupported and did not fail, although its reason contains the word "error".
            Metric(name="gpu.fan", unit="1", absent={f"gpu={at}": "unsupported: error-free, but without a fan"}),
        ),
    )


def selected(*snapshots: Snapshot) -> list[int]:
    """Return for each kept snapshot the second at which it was taken."""
    selector = SnapshotSelector()
    for taken in snapshots:
        selector.add(taken)
    return [int(taken.at[-3:-1]) for taken in selector.selected()]


@pytest.mark.parametrize(
    ("snapshots", "expected"),
    [
        ((snapshot(1, 9.0), snapshot(2, 9.0)), [2]),
        ((snapshot(1, 9.0), snapshot(2, 8.5)), [1]),
        ((snapshot(1, 9), snapshot(2, 9.5), snapshot(3, "x")), [2]),
        ((snapshot(1, 9.0, "a"), snapshot(2, 1.0)), [1]),
        ((snapshot(3, 1.0, "a"), snapshot(2, 9.0)), [2, 3]),
        ((snapshot(1, 1.0, "a"), snapshot(2, 0.0, "a"), snapshot(3, 9.0)), [1, 3]),
        ((snapshot(1, 1.0, "a"), snapshot(2, 0.0, "a", "b"), snapshot(3, 9.0)), [2, 3]),
        ((snapshot(1, 1.0, "a"), snapshot(2, 0.0, "b"), snapshot(3, 0.0, "a", "b", "c"), snapshot(4, 9.0)), [3, 4]),
        ((snapshot(1, 1.0, "a", "b"), snapshot(2, 0.0, "b", "c"), snapshot(3, 0.0, "c", "d"), snapshot(4, 9)), [1, 3, 4]),
        ((snapshot(1, 9.0, "a"), snapshot(2, 0.0, "b"), snapshot(3, 0.0, "a", "b")), [1, 2]),
        ((snapshot(1, 0.0, hw_slowdown=True), snapshot(2, 9.0)), [1, 2]),
        ((snapshot(1, 0.0, hw_slowdown=False), snapshot(2, 9.0)), [2]),
        ((snapshot(1, 0.0, power_cap=True), snapshot(2, 9.0)), [2]),
    ],
)  # fmt: skip
def test_highest_load_and_every_alarm_are_kept(snapshots: tuple[Snapshot, ...], expected: list[int]) -> None:
    """`expected`: the seconds at which the kept snapshots were taken. The load of a snapshot is the total power of its GPUs."""
    assert selected(*snapshots) == expected


@pytest.mark.parametrize("count", [8, 9])
def test_at_most_eight_snapshots_with_alarms_are_kept(count: int) -> None:
    alarms = [snapshot(number, 0.0, f"alarm {number}") for number in range(count)]
    assert selected(*alarms, snapshot(30, 9.0)) == [*range(8), 30]
    # The snapshot of second 20 also shows the alarms of seconds 0 and 1, so the snapshots of these two are no longer needed.
    assert selected(*alarms, snapshot(20, 0.0, "alarm 0", "alarm 1", "more"), snapshot(30, 9.0)) == [
        *range(2, 8),
        20,
        30,
    ]
