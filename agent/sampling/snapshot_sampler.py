"""Take snapshots of the host while its ranks run, and select those that the record keeps."""

from __future__ import annotations

import threading
from collections.abc import Sequence

from agent.sampling.snapshot import Stuck, take_snapshot
from collectors.base import Collector
from schemas.records import Snapshot

PERIOD_S = 2.0
GRACE_S = 5.0
"""How long to wait for a snapshot that is being taken when the ranks end."""


class SnapshotSampler(threading.Thread):
    """Takes a snapshot every PERIOD_S, in a thread, so that a driver that blocks does not delay the supervisor.

    If the launch ends with an exception, such as after SIGTERM, the supervisor does not wait for the thread: the sender of the
    signal may wait only a few seconds.
    """

    def __init__(self, collectors: Sequence[Collector], stage: str) -> None:
        super().__init__(name="snapshots", daemon=True)
        self._collectors, self._stage = collectors, stage
        self._stuck: Stuck = {}
        self._selector = SnapshotSelector()
        self._ended = threading.Event()

    def __enter__(self) -> SnapshotSampler:
        self.start()
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        self._ended.set()
        if kind is None:
            self.join(timeout=GRACE_S)

    def run(self) -> None:
        while not self._ended.wait(PERIOD_S):
            snapshot, _ = take_snapshot(self._collectors, stage=self._stage, phase="during", stuck=self._stuck)
            self._selector.add(snapshot)

    def selected(self) -> list[Snapshot]:
        """Return the snapshots that the record keeps."""
        return self._selector.selected()


class SnapshotSelector:
    """Selects the snapshot under the highest load, and the first few with an alarm.

    A throttled GPU draws less power, so the snapshot under the highest load may not show it.
    """

    MAX_ALARMS = 3

    def __init__(self) -> None:
        self._highest: Snapshot | None = None
        self._alarms: list[Snapshot] = []

    def add(self, snapshot: Snapshot) -> None:
        """Consider one more snapshot."""
        if self._highest is None or _power(snapshot) >= _power(self._highest):
            self._highest = snapshot
        if len(self._alarms) < self.MAX_ALARMS and _has_alarm(snapshot):
            self._alarms.append(snapshot)

    def selected(self) -> list[Snapshot]:
        """Return the selected snapshots, in order of time."""
        chosen = [*self._alarms, *([self._highest] if self._highest and self._highest not in self._alarms else [])]
        return sorted(chosen, key=lambda snapshot: snapshot.at)


def _has_alarm(snapshot: Snapshot) -> bool:
    """Return whether a clock is throttled for a reason other than the power limit, or a reading failed."""
    return any(
        (
            metric.name == "gpu.throttle.active"
            and any(value and "power_cap" not in scope for scope, value in metric.values.items())
        )
        or any(reason.startswith("error") for reason in metric.absent.values())
        for metric in snapshot.metrics
    )


def _power(snapshot: Snapshot) -> float:
    metrics = [metric for metric in snapshot.metrics if metric.name == "gpu.power"]
    return sum(float(value) for metric in metrics for value in metric.values.values() if isinstance(value, int | float))
