"""Take snapshots of the host while its ranks run, and select those that the record keeps."""

from __future__ import annotations

from collections.abc import Sequence

from agent.sampling.launch_thread import LaunchThread
from agent.sampling.snapshot import Stuck, take_snapshot
from collectors.base import Collector
from schemas.records import Snapshot

PERIOD_S = 2.0


Alarm = tuple[str, str]
"""Name and scope of a reading that failed, or of a throttle reason that is active (`_alarms`)."""


class SnapshotSampler(LaunchThread):
    """Takes snapshots, with a pause of PERIOD_S before each."""

    def __init__(self, collectors: Sequence[Collector], stage: str) -> None:
        super().__init__("snapshots")
        self._collectors, self._stage = collectors, stage
        self._stuck: Stuck = {}
        self._selector = SnapshotSelector()

    def run(self) -> None:
        while not self._ended.wait(PERIOD_S):
            snapshot, _ = take_snapshot(self._collectors, stage=self._stage, phase="during", stuck=self._stuck)
            self._selector.add(snapshot)

    def selected(self) -> list[Snapshot]:
        """Return the snapshots that the record keeps."""
        return self._selector.selected()


class SnapshotSelector:
    """Selects the snapshot under the highest load, and up to MAX_ALARMS snapshots that together show every alarm.

    The load of a snapshot is the total power of its GPUs. A throttled GPU draws less power, so the snapshot under the highest
    load may not show that a GPU was throttled. If more than MAX_ALARMS snapshots would be needed to show every alarm, the latest
    are left out, and the alarms that only they show are lost.
    """

    MAX_ALARMS = 8
    """Maximum number of snapshots that are selected for their alarms. It is low because a snapshot of four GPUs under load takes
    36 kB (docs/measurements/h200x4-burnin), and a record may have at most `documents.MAX_BYTES`."""

    def __init__(self) -> None:
        self._highest: Snapshot | None = None
        self._alarms: list[tuple[Snapshot, frozenset[Alarm]]] = []

    def add(self, snapshot: Snapshot) -> None:
        """Keep the snapshot if it has the highest load so far, or if it shows a new alarm.

        At most MAX_ALARMS snapshots are kept for their alarms.
        """
        if self._highest is None or _power(snapshot) >= _power(self._highest):
            self._highest = snapshot
        alarms = _alarms(snapshot)
        if alarms <= frozenset().union(*(known for _, known in self._alarms)):
            return
        chosen = [*self._alarms, (snapshot, alarms)]
        for item in self._alarms:  # leave out an earlier snapshot if the others show all of its alarms
            others = [other for other in chosen if other is not item]
            if item[1] <= frozenset().union(*(known for _, known in others)):
                chosen = others
        self._alarms = chosen if len(chosen) <= self.MAX_ALARMS else self._alarms

    def selected(self) -> list[Snapshot]:
        """Return the selected snapshots, in order of time."""
        chosen = [snapshot for snapshot, _ in self._alarms]
        if self._highest and self._highest not in chosen:
            chosen.append(self._highest)
        return sorted(chosen, key=lambda snapshot: snapshot.at)


def _alarms(snapshot: Snapshot) -> frozenset[Alarm]:
    """Return the active throttle reasons other than the power limit, and the readings that failed."""
    throttled = {
        (metric.name, scope)
        for metric in snapshot.metrics
        if metric.name == "gpu.throttle.active"
        for scope, value in metric.values.items()
        if value and "power_cap" not in scope
    }
    failed = {
        (metric.name, scope)
        for metric in snapshot.metrics
        for scope, reason in metric.absent.items()
        if reason.startswith("error")
    }
    return frozenset(throttled | failed)


def _power(snapshot: Snapshot) -> float:
    metrics = [metric for metric in snapshot.metrics if metric.name == "gpu.power"]
    return sum(float(value) for metric in metrics for value in metric.values.values() if isinstance(value, int | float))
