"""What a run on this host is at, for its exporter to tell: runs/live.json, beside the directories of the runs.

Those are private, and the exporter is an account of its own that reads and writes nothing. So whoever runs a stage writes here,
every EVERY_S and in one step, what anybody may know: run, stages, the ranks' newest figures. No nonce, address or log is in it.
"""

from __future__ import annotations

import contextlib
import json
import re
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from agent.exporter.figures import Json, Results, fold
from agent.gang.rank_state import RankState
from agent.run.record import HostRun
from schemas import VERSION, documents
from schemas.catalogue import BENCHMARKS
from schemas.records import Launch, Observation, Record, to_json
from schemas.stages import SOAK
from schemas.timeline import Soak

FILE, RUNS = "live.json", "runs"
SCHEMA = "rackproof.live/1"
EVERY_S, SILENT_S = 2.0, 30.0
"""A stage of which nothing was written for SILENT_S has lost its supervisor."""
GRACE_S = 5.0
PHASES = ("start", "join", "readiness check", "leave", "end", "failed")
"""What a rank may be at beside the benchmarks."""


@dataclass(frozen=True, kw_only=True)
class Span:
    """Of a stage that goes round again and again: seconds since 1970, and the share that was done when this round began."""

    began: float
    ends: float
    """From when on no other round begins."""
    deadline: float
    progress: float

    def told(self, now: float, since: float) -> Json:
        """What takes the place of the one round's; `since` is when that began."""
        left = max(self.ends - since, 1.0)
        done = self.progress + (1 - self.progress) * (now - since) / left
        return {"began": self.began, "deadline": self.deadline, "progress": max(0.0, min(1.0, done))}


class Live(threading.Thread):
    """Tells while a stage runs. A thread of its own: a driver that blocks must not silence it, nor a slow disk anybody else."""

    def __init__(
        self,
        run: HostRun,
        *,
        stage: str,
        deadline_s: float,
        work: Path,
        ranks: Iterable[int],
        states: Callable[[], Sequence[RankState]],
        span: Span | None = None,
    ) -> None:
        """`work` is where the ranks of those numbers leave their results, `states` how they are at this moment, `span` that of
        the soak that this is a round of."""
        super().__init__(name="live", daemon=True)
        self._run, self._stage, self._states = run, stage, states
        self._began, self._deadline_s, self._span = time.time(), deadline_s, span
        self._results = [Results(work, rank) for rank in ranks]
        self._owed = owed(run, stage)
        self._ended = threading.Event()
        self.start()

    def run(self) -> None:
        try:
            told = None if place(self._run) is None else document(self._run)
        except documents.DocumentError:  # is told by who cannot go on without
            return
        while told:
            stage = next((each for each in told["stages"] if each["name"] == self._stage), None)
            if stage is None:
                stage = {"name": self._stage}
                told["stages"].append(stage)
            stage.pop("ended", None)
            stage |= self._now()
            _write(self._run, told)
            if self._ended.wait(EVERY_S):
                return

    def _now(self) -> Json:
        seen = [item for result in self._results for item in result.read()]
        figures, left_out = fold(seen, [item for result in self._results for item in result.now()])
        found = {
            "state": "running",
            "began": self._began,
            "deadline": self._began + self._deadline_s,
            "ranks": [_rank(state) for state in self._states() if state.ended_s is None],
            "figures": figures,
            "left_out": left_out,
        } | ({"progress": min(1.0, _made(seen) / self._owed)} if self._owed else {})
        return found | (self._span.told(time.time(), self._began) if self._span else {})

    def end(self) -> None:
        """Tells no more."""
        self._ended.set()

    def stop(self, record: Record) -> None:
        """The stage is over, as the record says."""
        self.end()
        self.join(timeout=GRACE_S)
        with contextlib.suppress(documents.DocumentError):
            _write(self._run, document(self._run, record))


def tell(run: HostRun) -> None:
    """Tells how the run stands, by whoever carried out its stage."""
    with contextlib.suppress(documents.DocumentError):
        _write(run, document(run))


def publish(run: HostRun) -> None:
    """Tells how the run stands while no stage of it runs; where one does, it is told by that one's supervisor."""
    path = place(run)
    if path is None:
        return
    with contextlib.suppress(documents.DocumentError):  # a record that cannot be believed is told by who needs it
        told = document(run)
        with contextlib.suppress(documents.DocumentError):
            there = documents.read(path, "live")
            fresh = there["run"]["run_id"] == run.plan.run_id and 0 <= time.time() - there["written"] < SILENT_S
            if fresh and any(stage["state"] == "running" for stage in there["stages"]):
                return
        _write(run, told)


def place(run: HostRun) -> Path | None:
    """Where the file lies; None for a run whose directory is not among others, which has no exporter."""
    return run.directory.parent / FILE if run.directory.absolute().parent.name == RUNS else None


def _write(run: HostRun, told: Json) -> None:
    path = place(run)
    if path:
        with contextlib.suppress(OSError):
            documents.write_text(path, json.dumps({**told, "written": time.time()}, allow_nan=False), durable=False)


def document(run: HostRun, record: Record | None = None) -> Json:
    """What the records say: of each stage how it ended and what was measured in it."""
    gangs = dict.fromkeys(["", *([run.host.gang] if run.host.gang else [])])
    records = [record if record and record.gang == gang else run.record(gang) for gang in gangs]
    launches = [launch for record in records for launch in record.launches]
    seen = [item for record in records for item in record.observations]
    names = dict.fromkeys([stage.name for stage in run.plan.stages] + [launch.stage for launch in launches])
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
            "began": _seconds(records[0].began),
        },
        "stages": [
            _stage(
                name,
                [launch for launch in launches if launch.stage == name],
                [item for item in seen if item.stage == name],
                owed(run, name),
            )
            | (_soaked(soak, run.plan.stage(SOAK).deadline_s) if name == SOAK and (soak := records[0].soak) else {})
            for name in names
        ],
    }


def _soaked(soak: Soak, round_s: float) -> Json:
    """What a soak tells of its stage, beyond the last of its rounds: it goes on until it is said to be over."""
    began, share = _seconds(soak.began), min(1.0, soak.soaked_s / soak.planned_s)
    common = {"began": began, "progress": share}
    if not soak.ended:
        return common | {
            "state": "running",
            "deadline": time.time() + max(0.0, soak.planned_s - soak.soaked_s) + round_s,
        }
    ended = _seconds(soak.ended)
    return common | {"state": "failed" if soak.reason else "finished", "deadline": ended, "ended": ended}


def _stage(name: str, launches: Sequence[Launch], seen: Sequence[Observation], owes: int) -> Json:
    if not launches:
        return {"name": name, "state": "planned"}
    last, observations = launches[-1], [to_json(item) for item in seen]
    figures, left_out = fold(observations)
    began = _seconds(last.began)
    return {
        "name": name,
        "state": last.outcome,
        "attempts": dict(Counter(launch.outcome for launch in launches)),
        "began": began,
        "deadline": began + last.deadline_s,
        "ended": began + last.duration_s,
        "figures": figures,
        "left_out": left_out,
    } | ({"progress": min(1.0, _made(observations) / owes)} if owes else {})


def _seconds(moment: str) -> float:
    return datetime.fromisoformat(moment.replace("Z", "+00:00")).timestamp()


def owed(run: HostRun, stage: str) -> int:
    """How many observations the ranks of this host owe in the stage; what the supervisor adds at its end is not among them."""
    return sum(
        len(run.plan.scopes_of(run.host, item))
        for item in run.plan.expected_of(run.host)
        if item.stage == stage and not _sampled(item.name)
    )


def _sampled(name: str) -> bool:
    benchmark = BENCHMARKS.get(name.split(".")[0])
    return benchmark is not None and any(output.sampled and output.makes(name) for output in benchmark.outputs)


def _made(seen: Iterable[Json]) -> int:
    return len({(item["name"], item["scope"], str(item.get("params"))) for item in seen if not _sampled(item["name"])})


def _rank(state: RankState) -> Json:
    return {
        "rank": state.rank,
        "scope": state.scope,
        "at": at(state.phase),
        "silent_s": round(state.silent_s, 3),
        "waiting_s": round(state.waiting_s or 0.0, 3),
    }


def at(phase: str) -> str:
    """The benchmark that a rank's phase is of, or one of PHASES."""
    word = re.split(r"[ ,:]", phase, maxsplit=1)[0]
    return word if word in BENCHMARKS else next((known for known in PHASES if phase.startswith(known)), PHASES[0])
