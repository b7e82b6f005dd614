"""Publish the progress of a run for the exporter: `runs/live.json`, next to the run directories.

The run directories are private, so the account that runs the exporter cannot read them. The supervisor (the process that runs a
stage) therefore replaces this file atomically every PERIOD_S. The file contains the run, its stages, and the newest figures
(measured values with their labels) of the ranks, but no nonce, address or log.
"""

from __future__ import annotations

import contextlib
import json
import math
import re
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from agent.exporter.figures import Json, RankFiles, newest_figures
from agent.exporter.stage_progress import StageProgress, count, expected_counts
from agent.gang.rank_state import RankState
from agent.run.lease import RUNS
from agent.run.record import HostRun
from agent.sampling.launch_thread import LaunchThread
from schemas import VERSION, documents
from schemas.catalogue import BENCHMARKS
from schemas.records import Launch, Observation, Record, to_json
from schemas.stages import SOAK
from schemas.timeline import Soak
from schemas.times import epoch_seconds

FILE = "live.json"
SCHEMA = "rackproof.live/1"
PERIOD_S, SILENT_S = 2.0, 30.0
"""Time between two writes of the file while a stage runs. After SILENT_S without a write, the supervisor is considered lost."""
CLOCK_STEP_S = 1.0
"""If the host's clock differs by more than this from what the monotonic clock predicts, it has been set."""
PHASES = ("start", "join", "readiness check", "leave", "end", "failed")
"""Prefixes of the phases in which a rank runs no benchmark. Any other phase begins with the name of a benchmark."""


@dataclass(frozen=True, kw_only=True)
class Span:
    """The times of a soak, in seconds since 1970, and its progress (0 to 1) at the start of the current round."""

    began: float
    ends: float
    """No round begins after this time."""
    deadline: float
    """Latest end of the last round."""
    progress: float

    def shifted(self, step_s: float) -> Span:
        """Return the same span after the host's clock has been set forward by `step_s` (negative: back)."""
        return replace(self, began=self.began + step_s, ends=self.ends + step_s, deadline=self.deadline + step_s)

    def fields(self, now: float, round_began: float) -> Json:
        """Return begin, deadline and progress of the whole soak. In the document, they replace those of the current round."""
        remaining = max(self.ends - round_began, 1.0)
        done = self.progress + (1 - self.progress) * (now - round_began) / remaining
        return {"began": self.began, "deadline": self.deadline, "progress": max(0.0, min(1.0, done))}

    def expected_end(self, round_ends: float, round_s: float) -> float:
        """Return when the last round is expected to end. A round that is running at the time `ends` still runs to its end.

        Args:
            round_ends: expected end of the current round.
            round_s: expected duration of a round.
        """
        return round_ends + math.ceil(max(0.0, self.ends - round_ends) / round_s) * round_s


class LivePublisher(LaunchThread):
    """Publishes a stage while it runs."""

    def __init__(
        self,
        run: HostRun,
        states: Callable[[], Sequence[RankState]],
        *,
        stage: str,
        deadline_s: float,
        work: Path,
        ranks: Iterable[int],
        span: Span | None = None,
    ) -> None:
        """Prepare the publisher.

        Args:
            run: the host's run.
            states: returns the current state of each rank.
            stage, deadline_s: stage and deadline of the launch.
            work: directory of the ranks' results.
            ranks: numbers of the ranks of this host.
            span: times of the soak, if the launch is a round of a soak.
        """
        super().__init__("live")
        self._run, self._stage, self._states = run, stage, states
        self._began, self._deadline_s, self._span = time.time(), deadline_s, span
        self._clock_offset_s = self._began - time.monotonic()
        numbers = tuple(ranks)
        self._files = [RankFiles(work, rank) for rank in numbers]
        self._progress = StageProgress(run, stage, work, numbers, time.monotonic())

    def run(self) -> None:
        try:
            document = None if live_path(self._run) is None else build_document(self._run)
        except documents.DocumentError:  # the supervisor reads the record too, and reports the error
            return
        while document:
            stage = next((each for each in document["stages"] if each["name"] == self._stage), None)
            if stage is None:
                stage = {"name": self._stage}
                document["stages"].append(stage)
            stage.pop("ended", None)
            stage |= self._running_fields()
            _write(self._run, document)
            if self._ended.wait(PERIOD_S):
                return

    def _follow_clock(self) -> None:
        """Adapt begin and deadline if the host's clock has been set.

        The supervisor measures the deadline with the monotonic clock. Without this, a step of the clock, for example when NTP
        first synchronizes it, would make the stage look overdue.
        """
        step_s = time.time() - time.monotonic() - self._clock_offset_s
        if abs(step_s) > CLOCK_STEP_S:
            self._clock_offset_s += step_s
            self._began += step_s
            self._span = self._span.shifted(step_s) if self._span else None

    def _running_fields(self) -> Json:
        self._follow_clock()
        observations = [item for files in self._files for item in files.observations()]
        training = [item for files in self._files for item in files.training_progress()]
        figures, left_out = newest_figures(observations, training)
        fields: Json = {
            "state": "running",
            "began": self._began,
            "deadline": self._began + self._deadline_s,
            "ranks": [_rank_fields(state) for state in self._states() if state.ended_s is None],
            "figures": figures,
            "left_out": left_out,
        }
        now = time.monotonic()
        left_s, share = self._progress.remaining_s(now, observations), self._progress.share(observations)
        if left_s is not None:
            elapsed_s, ends = now - self._progress.start, time.time() + left_s
            fields["progress"] = elapsed_s / (elapsed_s + left_s)
            fields["expected_end"] = self._span.expected_end(ends, self._progress.expected_s) if self._span else ends
        elif share is not None:
            fields["progress"] = share
        return fields | (self._span.fields(time.time(), self._began) if self._span else {})


def publish_record(run: HostRun, record: Record | None = None) -> None:
    """Write the file from the run's records on this host. `record`: one of these records, if the caller has already read it."""
    with contextlib.suppress(documents.DocumentError):
        _write(run, build_document(run, record))


def publish_idle(run: HostRun) -> None:
    """Write the file from the run's records, unless a stage of this run is running: then its supervisor writes the file."""
    path = live_path(run)
    if path is None:
        return
    with contextlib.suppress(documents.DocumentError):
        published = documents.read(path, "live")
        fresh = published["run"]["run_id"] == run.plan.run_id and 0 <= time.time() - published["written"] < SILENT_S
        if fresh and any(stage["state"] == "running" for stage in published["stages"]):
            return
    publish_record(run)


def live_path(run: HostRun) -> Path | None:
    """Return the path of FILE; None if the run directory is not in a directory `runs`: the exporter reads FILE only there."""
    return run.directory.parent / FILE if run.directory.absolute().parent.name == RUNS else None


def _write(run: HostRun, document: Json) -> None:
    path = live_path(run)
    if path:
        with contextlib.suppress(OSError):
            documents.write_text(path, json.dumps({**document, "written": time.time()}, allow_nan=False), durable=False)


def build_document(run: HostRun, record: Record | None = None) -> Json:
    """Return the content of FILE from the records of the run: the outcome and the figures of each stage."""
    gangs = dict.fromkeys(["", *([run.host.gang] if run.host.gang else [])])
    records = [record if record and record.gang == gang else run.record(gang) for gang in gangs]
    launches = [launch for record in records for launch in record.launches]
    observations = [item for record in records for item in record.observations]
    names = dict.fromkeys([stage.name for stage in run.plan.stages] + [launch.stage for launch in launches])
    stages = [
        _stage_fields(
            name,
            [launch for launch in launches if launch.stage == name],
            [item for item in observations if item.stage == name],
            sum(expected_counts(run, name).values()),
        )
        for name in names
    ]
    if soak := records[0].soak:
        for stage in stages:
            stage |= _soak_fields(soak, run.plan.stage(SOAK).deadline_s) if stage["name"] == SOAK else {}
    return {
        "schema": SCHEMA,
        "run": {
            "run_id": run.plan.run_id,
            "rack": run.host.rack,
            "profile": run.plan.profile,
            "gang": run.host.gang,
            "device": run.host.device,
            "rehearsal": run.plan.rehearsal,
            "rackproof": VERSION,
            "began": epoch_seconds(records[0].began),
        },
        "stages": stages,
    }


def _soak_fields(soak: Soak, round_deadline_s: float) -> Json:
    """Return begin, progress, state and end of the whole soak. In the document, they replace those of its last round."""
    fields: Json = {"began": epoch_seconds(soak.began), "progress": min(1.0, soak.soaked_s / soak.planned_s)}
    if not soak.ended:
        deadline = time.time() + max(0.0, soak.planned_s - soak.soaked_s) + round_deadline_s
        return fields | {"state": "running", "deadline": deadline}
    ended = epoch_seconds(soak.ended)
    return fields | {"state": "failed" if soak.reason else "finished", "deadline": ended, "ended": ended}


def _stage_fields(name: str, launches: Sequence[Launch], observations: Sequence[Observation], expected: int) -> Json:
    if not launches:
        return {"name": name, "state": "planned"}
    last, items = launches[-1], [to_json(item) for item in observations]
    figures, left_out = newest_figures(items)
    began = epoch_seconds(last.began)
    return {
        "name": name,
        "state": last.outcome,
        "attempts": dict(Counter(launch.outcome for launch in launches)),
        "began": began,
        "deadline": began + last.deadline_s,
        "ended": began + last.duration_s,
        "figures": figures,
        "left_out": left_out,
    } | ({"progress": min(1.0, count(items) / expected)} if expected else {})


def _rank_fields(state: RankState) -> Json:
    return {
        "rank": state.rank,
        "scope": state.scope,
        "at": phase_label(state.phase),
        "silent_s": round(state.silent_s, 3),
        "waiting_s": round(state.waiting_s or 0.0, 3),
    }


def phase_label(phase: str) -> str:
    """Return the first word of `phase` if that word is a benchmark.

    Otherwise return the entry of PHASES with which `phase` begins; if there is none, return `start`.
    """
    word = re.split(r"[ ,:]", phase, maxsplit=1)[0]
    return word if word in BENCHMARKS else next((known for known in PHASES if phase.startswith(known)), PHASES[0])
