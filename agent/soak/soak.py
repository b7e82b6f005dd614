"""A soak: the same short launch again and again, until the time is over, a finding ends it, or nothing comes to an end any more.

Each round is folded into the record, and how far the soak is stands, CHECKPOINT_S old at most, in `soak.json` beside it: whoever
is killed, host, supervisor or control node, costs the round that was under way and no more, of which what was measured counts.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from agent.exporter.live import Span, tell
from agent.run import background
from agent.sampling.snapshot import take
from agent.sampling.telemetry import Beating
from agent.soak.soak_run import SoakRun, told
from agent.soak.stop_on import ending, known_packs
from collectors.base import Absent, Collector
from collectors.nvml import FastReader, GpuSample
from schemas.records import Record
from schemas.stages import SOAK

CHECKPOINT_S = 30.0
LOOK_S = 10.0
"""Between two looks at the counters."""
PULSE_S = 0.5
MOST_FAILED = 3
"""Rounds in a row that did not come to their end: another one will not either."""
BREATH_S = 5.0
"""Before the round after one that failed."""
TIME, FINDING, FAILURE = "time", "finding", "failure"
"""By what a soak ends."""
MOST_BEGUN = 3
"""In one look."""
STILL, NOT_WELL = 4, 3
"""Exit codes of a look at a soak: it goes on; it ended, or was ended, before its time."""


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
        self.join(timeout=LOOK_S)
        if self._pulses:  # a look that was under way may have begun them
            self._pulses.stop()


class Pulses(Beating):
    """Power, clocks, temperature and what holds them down, of every GPU, over the whole soak."""

    def __init__(self, run: SoakRun) -> None:
        super().__init__(lambda: FastReader(run.host.devices), PULSE_S)
        self._run = run
        self.start()

    @property
    def problem(self) -> str:
        """Why it reads no more."""
        return self._error or "NVML was not asked any more"

    def take(self, at: float, beats: Mapping[int, GpuSample | Absent]) -> None:
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
