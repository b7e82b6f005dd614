"""A soak: the same short launch again and again, until the time is over, a finding ends it, or nothing comes to an end any more.

Each round is folded into the record, and how far the soak is stands, CHECKPOINT_S old at most, in `soak.json` beside it: whoever
is killed, host, supervisor or control node, costs the round that was under way and no more, of which what was measured counts.
"""

from __future__ import annotations

import contextlib
import json
import re
import shutil
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from pathlib import Path

from agent import background
from agent.fold import few_launches, few_snapshots, folded
from agent.live import Span, tell
from agent.record import HostRun
from agent.snapshot import now, take
from agent.supervise import results, set_aside
from agent.telemetry import Beating
from agent.timeline import Recorder
from collectors.base import Absent, Collector
from collectors.nvml import Beat, Pulse
from fleet.judge.criteria import Pack, read_packs
from fleet.judge.evidence import Evidence, from_benchmark
from fleet.judge.verdict import judge
from schemas import documents
from schemas.errors import UsageError
from schemas.records import ERROR, MEASURED, Launch, Observation, Record, Snapshot, to_json
from schemas.reports import FAIL, Verdict
from schemas.timeline import SOAK, Soak, soak_from_json

CHECKPOINT_S = 30.0
LOOK_S = 10.0
"""Between two looks at the counters."""
PULSE_S = 0.5
MOST_FAILED = 3
"""Rounds in a row that did not come to their end: another one will not either."""
BREATH_S = 5.0
"""Before the round after one that failed."""
ROUND = "soak.round"
"""Beside the ranks' files: the number of the round that is under way."""
OUR_DOING = re.compile(
    r"SIGTERM|signal 15|SystemExit: 143|Connection (closed|reset) by (remote )?peer|Broken pipe|remote process exited"
    r"|failed to recv, got 0 bytes",
    re.IGNORECASE,
)
"""Errors of a round that was cut off: its ranks were ended with their supervisor, some before others."""
CHECKPOINT, CHECKPOINT_BYTES = "soak.json", 32_000_000
TIME, FINDING, FAILURE = "time", "finding", "failure"
"""By what a soak ends."""
FATAL = frozenset({"rma", "inspect_hardware", "reset_gpu", "reboot"})
"""What a finding asks for with which a host is out of work."""
VALUES = ("wrong_words", "wrong_products", "wrong_elements", "mismatches", "identical", "loss_finite")
"""Last parts of what a benchmark finds out of a part's health; the others tell how fast it is."""
MOST_BEGUN = 3
"""In one look."""
STILL, NOT_WELL = 4, 3
"""Exit codes of a look at a soak: it goes on; it ended, or was ended, before its time."""


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


class Watcher(threading.Thread):
    """Looks at the GPUs and the counters while the rounds go on, and writes down how far the soak is."""

    def __init__(self, run: SoakRun, collectors: Sequence[Collector]) -> None:
        super().__init__(name="soak", daemon=True)
        self._run, self._collectors = run, collectors
        self._pulses: Pulses | None = None
        self._ended = threading.Event()
        self._written = 0.0
        self.start()

    def run(self) -> None:
        while True:
            if self._run.host.device == "gpu" and not (self._pulses and self._pulses.is_alive()):
                if self._pulses:
                    self._run.recorder.note(self._run.at_s(), "gpu.power", "host", self._pulses.problem)
                self._pulses = Pulses(self._run)
            seen, _ = take(self._collectors, stage=SOAK, phase="during")
            self._run.recorder.see(self._run.at_s(), seen)
            if time.monotonic() - self._written > CHECKPOINT_S - LOOK_S:
                with contextlib.suppress(OSError):  # a full disk is told by whoever writes the record
                    self._run.checkpoint()
                self._written = time.monotonic()
            if self._ended.wait(LOOK_S):
                return

    def stop(self) -> None:
        """No more looks."""
        self._ended.set()
        if self._pulses:
            self._pulses.stop()
        self.join(timeout=LOOK_S)


class Pulses(Beating):
    """Power, clocks, temperature and what holds them down, of every GPU, over the whole soak."""

    def __init__(self, run: SoakRun) -> None:
        super().__init__(lambda: Pulse(run.host.devices), PULSE_S)
        self._run = run
        self.start()

    @property
    def problem(self) -> str:
        """Why it reads no more."""
        return self._error or "NVML was not asked any more"

    def take(self, at: float, beats: Mapping[int, Beat | Absent]) -> None:
        self._run.recorder.beats(self._run.at_s(at), beats)


def carry_out(
    run: SoakRun,
    launch: Callable[[int, Span], Record],
    collectors: Sequence[Collector],
    report: Callable[[str], None],
    sleep: Callable[[float], None] = time.sleep,
) -> Record:
    """Goes round until the soak is over.

    Args:
        run: the host's run.
        launch: carries out the round of that number, and returns the record with it.
        collectors: asked for counters meanwhile.
        report: told one line at a time what goes on.
    """
    run.start()
    if cut := run.salvage(run.directory / "work" / SOAK):
        report(cut)
    watcher = Watcher(run, collectors)
    try:
        by, reason = _rounds(run, launch, report, sleep)
    finally:
        watcher.stop()
    record = run.finish(by, reason)
    tell(run)
    return record


def _rounds(
    run: SoakRun, launch: Callable[[int, Span], Record], report: Callable[[str], None], sleep: Callable[[float], None]
) -> tuple[str, str]:
    """By what the soak ends, and why before its time; empty where it does not."""
    packs, failed = known_packs(run), 0
    while run.left_s > 0:
        record = launch(run.begin_round(), run.span())
        last = next(launch for launch in reversed(record.launches) if launch.stage == SOAK)
        failed = 0 if last.good else failed + 1
        run.clear(run.directory / "work" / SOAK, keep_logs=failed > 0)
        run.checkpoint()
        report(told(run.state))
        if reason := ending(run, record, packs):
            return FINDING, reason
        if failed >= MOST_FAILED:
            return FAILURE, f"{failed} rounds in a row did not come to their end: {last.reason}"
        if failed:
            sleep(BREATH_S)
    return TIME, ""


def _counts(seen: Observation) -> bool:
    """Whether it counts though its round was cut off: what was measured, and an error that is not of our own making."""
    return seen.status == MEASURED or (seen.status == ERROR and not OUR_DOING.search(seen.reason))


def known_packs(run: SoakRun) -> tuple[Pack, ...]:
    """The shipped packs, and of those that the inventory names the ones that this host has too."""
    try:
        return read_packs([name for name in run.plan.criteria if not name.endswith((".yml", ".yaml"))])
    except UsageError:
        return read_packs([])


def ending(run: HostRun, record: Record, packs: Sequence[Pack]) -> str:
    """The finding of the host's own by which the policy ends its soak; empty where there is none."""
    policy = run.plan.stage(SOAK).stop_on
    if policy == "never":
        return ""
    alone = replace(
        run.plan,
        hosts=(run.host,),
        manifest=tuple(part for part in run.plan.manifest if part.host == run.host.name),
    )
    found = [item for item in judge(alone, {run.host.name: Evidence(records=(record,))}, packs) if item.verdict == FAIL]
    compared = {item.id for pack in packs for item in pack.criteria if item.same_as_fleet is not None}
    chosen = [item for item in found if policy == "any" or (is_fatal(item) and item.criterion not in compared)]
    if not chosen:
        return ""
    first = chosen[0]
    more = f" (and {len(chosen) - 1} more)" if len(chosen) > 1 else ""
    part = "" if first.scope == "host" else f"{first.scope} "
    return f"{part}{first.name}: {first.reason}; {first.action.replace('_', ' ')}{more}"


def is_fatal(found: Verdict) -> bool:
    """Whether a finding is one of health, with which the host is out of work; how fast it is waits for the report."""
    healthy = not from_benchmark(found.name) and not found.name.startswith("drift.")
    return found.action in FATAL and (healthy or found.name.rpartition(".")[2] in VALUES)


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


def look(directory: Path, host: str, seconds: float, begin: Callable[[], object]) -> tuple[str, int]:
    """Waits until the soak has ended or `seconds` are over; one whose supervisor was lost is begun again.

    Returns:
        A line for people and the exit code: 0, NOT_WELL or STILL.
    """
    ends, begun = time.monotonic() + seconds, 0
    while True:
        goes_on = background.runs(directory, SOAK)
        state = SoakRun(directory, host).state if not goes_on else None
        if state and state.ended:
            return told(state), NOT_WELL if state.reason else 0
        if not goes_on and begun < MOST_BEGUN:
            begin()
            begun += 1
        if time.monotonic() >= ends:
            return told(SoakRun(directory, host).state), STILL
        time.sleep(min(1.0, max(0.05, ends - time.monotonic())))


def _seconds(moment: str) -> float:
    return datetime.fromisoformat(moment.replace("Z", "+00:00")).timestamp()
