"""The state of a soak (a long test that repeats rounds of benchmarks) on one host.

It is saved in the host's record and in a checkpoint, so that a new supervisor (the process that runs the rounds) can continue the
soak. Each round is aggregated into the record.
"""

from __future__ import annotations

import json
import re
import shutil
import threading
import time
from dataclasses import replace
from pathlib import Path

from agent.exporter.live import Span
from agent.run.record import HostRun
from agent.run.work_directory import archive_logs, read_results
from agent.sampling.timeline import Recorder
from agent.soak.aggregate import aggregate_rounds, select_launches, select_snapshots
from schemas import documents
from schemas.records import ERROR, MEASURED, Launch, Observation, Record, Snapshot, to_json
from schemas.semantic_validation import soak_problems
from schemas.stages import SOAK
from schemas.timeline import Soak, soak_from_json
from schemas.times import epoch_seconds, format_span, utc_now

CHECKPOINT, CHECKPOINT_BYTES = "soak.json", 32_000_000
ROUND_FILE = "soak.round"
"""File with the number of the running round, next to the directory with the ranks' files."""
CAUSED_BY_INTERRUPTION = re.compile(
    r"SIGTERM|signal 15|SystemExit: 143|Connection (closed|reset) by (remote )?peer|Broken pipe|remote process exited"
    r"|failed to recv, got 0 bytes",
    re.IGNORECASE,
)
"""Errors that ranks report because their supervisor ended: a rank is ended too, or loses its connection to a rank that ended
earlier."""


class SoakRun(HostRun):
    """The run on one host during a soak. Each round is aggregated with the earlier rounds."""

    def __init__(self, directory: Path, host: str) -> None:
        super().__init__(directory, host)
        self._planned_s = self.plan.stage(SOAK).duration_s
        self._state = self._read_state()
        self._base_s = self._state.soaked_s
        """Seconds in which earlier supervisors ran the soak."""
        self._recorder = Recorder(self._state.timeline)
        self._lock = threading.Lock()
        self._began_at = epoch_seconds(self._state.began)
        self._started: float | None = None

    def _read_state(self) -> Soak:
        """Return the newest saved progress: that of the record, or of the checkpoint, which is also written during a round."""
        recorded, checkpoint = self.record().soak, self._read_checkpoint()
        if recorded and recorded.ended and checkpoint:  # only the checkpoint has every series of the timeline
            return replace(recorded, timeline=checkpoint.timeline)
        if checkpoint and (recorded is None or _progress_key(checkpoint) >= _progress_key(recorded)):
            return checkpoint
        return recorded or Soak(began=utc_now(), planned_s=self._planned_s, soaked_s=0.0)

    def _read_checkpoint(self) -> Soak | None:
        """Return the progress in the checkpoint; None if there is none, or it is damaged."""
        try:
            document = documents.read(self.directory / CHECKPOINT, SOAK, max_bytes=CHECKPOINT_BYTES)
        except documents.DocumentError:
            return None
        checkpoint = soak_from_json(document)
        return None if any(soak_problems(checkpoint)) else checkpoint

    @property
    def state(self) -> Soak:
        """The current progress, with every series of the timeline."""
        with self._lock:
            return replace(self._state, soaked_s=round(self.soaked_s, 1), timeline=self._recorder.timeline())

    @property
    def recorder(self) -> Recorder:
        """Records values and events during the rounds."""
        return self._recorder

    @property
    def soaked_s(self) -> float:
        """Seconds in which the soak was running, without interruptions."""
        return self._base_s + (time.monotonic() - self._started if self._started is not None else 0.0)

    @property
    def left_s(self) -> float:
        """Seconds of the planned time that remain."""
        return self._planned_s - self.soaked_s

    def at_s(self, monotonic: float | None = None) -> float:
        """Return the seconds from the start of the soak to a time of the monotonic clock (None: now), without interruptions.

        With interruptions, a pause of days or a wrong clock would make the buckets of the timeline so long that a drift is hidden
        in them.
        """
        return self._base_s + (time.monotonic() if monotonic is None else monotonic) - (self._started or 0.0)

    def start(self) -> None:
        """Start counting the time of the soak."""
        self._started = time.monotonic()

    def span(self) -> Span:
        """Return the beginning, the progress, the expected end and the deadline of the soak. Interruptions delay the last two."""
        ends = time.time() + max(0.0, self.left_s)
        deadline = ends + self.plan.stage(SOAK).deadline_s
        return Span(began=self._began_at, ends=ends, deadline=deadline, progress=self.progress())

    def progress(self) -> float:
        """Return the completed share of the planned time, from 0 to 1."""
        return min(1.0, self.soaked_s / self._planned_s)

    def write_checkpoint(self) -> None:
        """Write the progress, with every series of the timeline, to the file CHECKPOINT."""
        documents.write_text(self.directory / CHECKPOINT, json.dumps(to_json(self.state), allow_nan=False))

    def merge(
        self,
        record: Record,
        snapshots: tuple[Snapshot, ...],
        observations: tuple[Observation, ...],
        launches: tuple[Launch, ...],
    ) -> Record:
        """Return the record with the snapshots, observations and launches of a round aggregated with those of earlier rounds.

        The aggregation bounds the size of the record.
        """
        before = tuple(observation for observation in record.observations if observation.stage == SOAK)
        others = tuple(observation for observation in record.observations if observation.stage != SOAK)
        with self._lock:
            for launch in launches:
                self._count(launch)
            soaked = aggregate_rounds(before, observations, self._recorder, at_s=self.at_s(), number=self._state.rounds)
        state = self.state
        return replace(
            record,
            observations=(*others, *soaked),
            snapshots=(
                *(snapshot for snapshot in record.snapshots if snapshot.stage != SOAK),
                *select_snapshots([s for s in (*record.snapshots, *snapshots) if s.stage == SOAK]),
            ),
            launches=(
                *(launch for launch in record.launches if launch.stage != SOAK),
                *select_launches([launch for launch in (*record.launches, *launches) if launch.stage == SOAK]),
            ),
            soak=replace(state, timeline=self._recorder.timeline(whole=False)),
        )

    def _count(self, launch: Launch) -> None:
        succeeded = launch.succeeded
        self._state = replace(
            self._state, finished=self._state.finished + succeeded, failed=self._state.failed + (not succeeded)
        )
        if not succeeded:
            text = f"round {launch.number}: {launch.reason}"
            self._recorder.add_event(self.at_s(), "soak.round", "host", text)

    def salvage_round(self, work: Path) -> str:
        """Record what the ranks of an interrupted round had measured, and return a message.

        Return an empty text if no round was interrupted, or if the record already has the round.
        """
        if not work.is_dir():
            return ""
        number, recorded = self._running_round(), self.record().soak
        if recorded and 0 < number <= recorded.rounds:
            self.clear_work(work)
            return ""
        observations = read_results(work, range(len(self.host.devices))).observations
        valid = [observation for observation in observations if _is_valid_despite_interruption(observation)]
        with self._lock:
            # A round is counted before it is in the record. If the checkpoint already counts this round, do not count it again.
            if not 0 < number <= self._state.rounds:
                self._state = replace(self._state, cut=self._state.cut + 1)
        self.recorder.add_event(self.at_s(), "soak.cut", "host", "the supervisor ended during the round")
        self.append(observations=valid)
        self.clear_work(work)
        return f"a round was interrupted; its {len(valid)} valid observations are kept"

    def begin_round(self) -> int:
        """Return the number of the next round, and save it.

        If the supervisor is killed, `salvage_round` finds out with this number whether the record already includes the round.
        """
        number = self.state.rounds + 1
        documents.write_text(self.directory / "work" / ROUND_FILE, f"{number}\n")
        return number

    def _running_round(self) -> int:
        """Return the number that `begin_round` saved; 0 if it is missing or damaged."""
        try:
            return int((self.directory / "work" / ROUND_FILE).read_text())
        except (OSError, ValueError):
            return 0

    def clear_work(self, work: Path, *, keep_logs: bool = True) -> None:
        """Remove the files of the ranks of a round; with `keep_logs`, move their logs to the archive first."""
        if keep_logs:
            archive_logs(work, self.directory / "logs")
        shutil.rmtree(work, ignore_errors=True)
        (work.parent / ROUND_FILE).unlink(missing_ok=True)

    def reopen(self) -> None:
        """Record that the soak has not ended, so that it can continue. The number of failed rounds is kept."""
        with self._lock:
            self._state = replace(self._state, ended="", reason="", ended_by="")
        self.append()
        self.write_checkpoint()

    def finish(self, ended_by: str, reason: str) -> Record:
        """Record what ended the soak, and when. `reason` says why it ended before the planned time; empty if it did not."""
        with self._lock:
            self._state = replace(self._state, ended=utc_now(), ended_by=ended_by, reason=reason[:4096])
        record = self.append()
        self.write_checkpoint()
        return record


def _progress_key(soak: Soak) -> tuple[str, int, float]:
    """Return a key by which newer progress sorts after older progress."""
    return soak.began, soak.rounds, soak.soaked_s


def _is_valid_despite_interruption(observation: Observation) -> bool:
    """Return whether the observation was measured, or is an error that the interruption did not cause."""
    if observation.status == ERROR:
        return not CAUSED_BY_INTERRUPTION.search(observation.reason)
    return observation.status == MEASURED


def format_progress(soak: Soak) -> str:
    """Return the progress as one line of text, such as `soak: 2 h 00 min of 24 h 00 min, round 40, 1 failed`."""
    rounds = f"round {soak.rounds}" + (f", {soak.failed} failed" if soak.failed else "")
    progress = f"{format_span(soak.soaked_s)} of {format_span(soak.planned_s)}"
    if not soak.ended:
        return f"soak: {progress}, {rounds}"
    return f"soak: ended after {progress}, {rounds}" + (f": {soak.reason}" if soak.reason else "")
