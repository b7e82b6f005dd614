"""A host's part in a run while it soaks: the record, which every round is folded into, and how far the soak is."""

from __future__ import annotations

import json
import re
import shutil
import threading
import time
from dataclasses import replace
from datetime import datetime
from pathlib import Path

from agent.exporter.live import Span
from agent.run.record import HostRun
from agent.run.work_directory import results, set_aside
from agent.sampling.snapshot import now
from agent.sampling.timeline import Recorder
from agent.soak.aggregate import few_launches, few_snapshots, folded
from schemas import documents
from schemas.records import ERROR, MEASURED, Launch, Observation, Record, Snapshot, to_json
from schemas.stages import SOAK
from schemas.timeline import Soak, soak_from_json

CHECKPOINT, CHECKPOINT_BYTES = "soak.json", 32_000_000
ROUND = "soak.round"
"""Beside the ranks' files: the number of the round that is under way."""
OUR_DOING = re.compile(
    r"SIGTERM|signal 15|SystemExit: 143|Connection (closed|reset) by (remote )?peer|Broken pipe|remote process exited"
    r"|failed to recv, got 0 bytes",
    re.IGNORECASE,
)
"""Errors of a round that was cut off: its ranks were ended with their supervisor, some before others."""


class SoakRun(HostRun):
    """A host's part in a run while it soaks: what a round brings is folded into what the rounds before brought."""

    def __init__(self, directory: Path, host: str) -> None:
        super().__init__(directory, host)
        self._planned_s = self.plan.stage(SOAK).duration_s
        self._state = self._last()
        self._base_s = self._state.soaked_s
        self._recorder = Recorder(self._state.timeline)
        self._lock = threading.Lock()
        self._began_at = _seconds(self._state.began)
        self._started: float | None = None
        self._offset_s = 0.0

    def _last(self) -> Soak:
        """How far it was when that was last written: beside the record, where a round was cut off."""
        found = self.record().soak
        try:
            there = soak_from_json(documents.read(self.directory / CHECKPOINT, SOAK, max_bytes=CHECKPOINT_BYTES))
        except documents.DocumentError:
            there = None
        if found and found.ended and there:  # the checkpoint has more series
            return replace(found, timeline=there.timeline)
        if there and (found is None or (there.began, there.soaked_s) >= (found.began, found.soaked_s)):
            return there
        return found or Soak(began=now(), planned_s=self._planned_s, soaked_s=0.0)

    @property
    def state(self) -> Soak:
        """How far it is now, with every series."""
        with self._lock:
            return replace(self._state, soaked_s=round(self.soaked_s, 1), timeline=self._recorder.timeline())

    @property
    def recorder(self) -> Recorder:
        """Takes what is seen meanwhile."""
        return self._recorder

    @property
    def soaked_s(self) -> float:
        """Seconds in which it was carried out."""
        return self._base_s + (time.monotonic() - self._started if self._started is not None else 0.0)

    @property
    def left_s(self) -> float:
        """Seconds to go."""
        return self._planned_s - self.soaked_s

    def at_s(self, monotonic: float | None = None) -> float:
        """Seconds since it began, by the clock of this process from its start on: one that is set must not turn time back."""
        return self._offset_s + (time.monotonic() if monotonic is None else monotonic) - (self._started or 0.0)

    def start(self) -> None:
        """From here on time counts."""
        self._started = time.monotonic()
        self._offset_s = max(0.0, time.time() - self._began_at, self._base_s)

    def span(self) -> Span:
        """When it began, and when it will be over if nobody cuts it off."""
        ends = time.time() + max(0.0, self.left_s)
        deadline = ends + self.plan.stage(SOAK).deadline_s
        return Span(began=self._began_at, ends=ends, deadline=deadline, progress=self.progress())

    def progress(self) -> float:
        """The share that is done."""
        return min(1.0, self.soaked_s / self._planned_s)

    def checkpoint(self) -> None:
        """Writes down how far it is."""
        documents.write_text(self.directory / CHECKPOINT, json.dumps(to_json(self.state), allow_nan=False))

    def grown(
        self,
        record: Record,
        snapshots: tuple[Snapshot, ...],
        observations: tuple[Observation, ...],
        launches: tuple[Launch, ...],
    ) -> Record:
        """The record with one more round, and no larger for it."""
        ours = tuple(seen for seen in record.observations if seen.stage == SOAK)
        others = tuple(seen for seen in record.observations if seen.stage != SOAK)
        with self._lock:
            for launch in launches:
                done = launch.good
                self._state = replace(
                    self._state, finished=self._state.finished + done, failed=self._state.failed + (not done)
                )
                if not done:
                    self._recorder.note(self.at_s(), "soak.round", "host", f"round {launch.number}: {launch.reason}")
            ours = tuple(folded(ours, observations, self._recorder, at_s=self.at_s(), number=self._state.rounds))
        state = self.state
        return replace(
            record,
            observations=(*others, *ours),
            snapshots=(
                *(taken for taken in record.snapshots if taken.stage != SOAK),
                *few_snapshots([taken for taken in (*record.snapshots, *snapshots) if taken.stage == SOAK]),
            ),
            launches=(
                *(launch for launch in record.launches if launch.stage != SOAK),
                *few_launches([launch for launch in (*record.launches, *launches) if launch.stage == SOAK]),
            ),
            soak=replace(state, timeline=self._recorder.timeline(whole=False)),
        )

    def salvage(self, work: Path) -> str:
        """Folds in what the ranks of a round that was cut off had measured, and tells of it; nothing where there was none."""
        if not work.is_dir():
            return ""
        number, recorded = self._under_way(), self.record().soak
        if recorded and 0 < number <= recorded.rounds:
            self.clear(work)
            return ""
        seen = [item for item in results(work, range(len(self.host.devices)))[0] if _counts(item)]
        with self._lock:
            if not 0 < number <= self._state.rounds:  # the checkpoint may have counted what the record lacks
                self._state = replace(self._state, cut=self._state.cut + 1)
        self.recorder.note(self.at_s(), "soak.cut", "host", "the round was cut off with its supervisor")
        self.add(observations=seen)
        self.clear(work)
        return f"a round was cut off; {len(seen)} figures that it had measured count"

    def begin_round(self) -> int:
        """The number of the next round, which is written down: after a kill it tells whether the record has that round."""
        number = self.state.rounds + 1
        documents.write_text(self.directory / "work" / ROUND, f"{number}\n")
        return number

    def _under_way(self) -> int:
        """Number of the round that was begun last; 0 where that is not known."""
        try:
            return int((self.directory / "work" / ROUND).read_text())
        except (OSError, ValueError):
            return 0

    def clear(self, work: Path, *, keep_logs: bool = True) -> None:
        """Removes what the ranks of a round left."""
        if keep_logs:
            set_aside(work, self.directory / "logs")
        shutil.rmtree(work, ignore_errors=True)
        (work.parent / ROUND).unlink(missing_ok=True)

    def reopen(self) -> None:
        """Where it had ended because nothing came to its end, it is tried again; the rounds that failed stay counted."""
        with self._lock:
            self._state = replace(self._state, ended="", reason="", ended_by="")
        self.add()
        self.checkpoint()

    def finish(self, by: str, reason: str) -> Record:
        """It is over: before its time, where a reason is given."""
        with self._lock:
            self._state = replace(self._state, ended=now(), ended_by=by, reason=reason[:4096])
        record = self.add()
        self.checkpoint()
        return record


def _counts(seen: Observation) -> bool:
    """Whether it counts though its round was cut off: what was measured, and an error that is not of our own making."""
    return seen.status == MEASURED or (seen.status == ERROR and not OUR_DOING.search(seen.reason))


def _seconds(moment: str) -> float:
    return datetime.fromisoformat(moment.replace("Z", "+00:00")).timestamp()


def told(soak: Soak) -> str:
    """How far it is, on one line for people."""
    rounds = f"round {soak.rounds}" + (f", {soak.failed} of them failed" if soak.failed else "")
    time_ = f"{_span(soak.soaked_s)} of {_span(soak.planned_s)}"
    if not soak.ended:
        return f"soak: {time_}, {rounds}"
    return f"soak: ended after {time_}, {rounds}" + (f": {soak.reason}" if soak.reason else "")


def _span(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min" if hours else f"{minutes} min {rest:02d} s" if minutes else f"{rest} s"
