"""Snapshots of the host while its ranks run, and which of them the record gets."""

from __future__ import annotations

import threading
from collections.abc import Sequence

from agent.sampling.snapshot import take
from collectors.base import Collector
from schemas.records import Snapshot

SAMPLE_S = 2.0
"""Between two snapshots while the ranks run."""
GRACE_S = 5.0
"""For a snapshot that is being taken when the ranks have ended."""


class Sampler(threading.Thread):
    """Takes a snapshot every SAMPLE_S while the ranks run. A thread: a driver that blocks must not hold up the watch."""

    def __init__(self, collectors: Sequence[Collector], stage: str) -> None:
        super().__init__(name="sampler", daemon=True)
        self._collectors, self._stage = collectors, stage
        self._watch = Watch()
        self._ended = threading.Event()
        self.start()

    def run(self) -> None:
        while not self._ended.wait(SAMPLE_S):
            snapshot, _ = take(self._collectors, stage=self._stage, phase="during")
            self._watch.see(snapshot)

    def end(self) -> None:
        """No more snapshots."""
        self._ended.set()

    def stop(self) -> list[Snapshot]:
        """Ends it, and waits for it; what is worth keeping."""
        self.end()
        self.join(timeout=GRACE_S)
        return self._watch.kept()


class Watch:
    """The snapshots taken while ranks run: kept are the one under the highest load and the first few that alarm.

    A GPU that is throttled draws less than its best, so the highest load alone would hide it.
    """

    MOST_ALARMS = 3

    def __init__(self) -> None:
        self._highest: Snapshot | None = None
        self._alarms: list[Snapshot] = []

    def see(self, snapshot: Snapshot) -> None:
        """Takes note of one more."""
        if self._highest is None or _power(snapshot) >= _power(self._highest):
            self._highest = snapshot
        if len(self._alarms) < self.MOST_ALARMS and _alarms(snapshot):
            self._alarms.append(snapshot)

    def kept(self) -> list[Snapshot]:
        """What the record gets, in the order in which it was seen."""
        chosen = [*self._alarms, *([self._highest] if self._highest and self._highest not in self._alarms else [])]
        return sorted(chosen, key=lambda snapshot: snapshot.at)


def _alarms(snapshot: Snapshot) -> bool:
    """Whether clocks are held down for another reason than the power limit, or a reading could not be had."""
    return any(
        (
            metric.name == "gpu.throttle.active"
            and any(value and "power_cap" not in scope for scope, value in metric.values.items())
        )
        or any(why.startswith("error") for why in metric.absent.values())
        for metric in snapshot.metrics
    )


def _power(snapshot: Snapshot) -> float:
    watts = [metric for metric in snapshot.metrics if metric.name == "gpu.power"]
    return sum(float(value) for metric in watts for value in metric.values.values() if isinstance(value, int | float))
