"""Run a soak: repeat the same benchmarks until the planned time has passed.

Each repetition is a launch, called a round. Its results are aggregated with those of the earlier rounds in the record. The soak
ends early if several rounds in a row fail, or if the plan's `stop_on` policy ends it because of a finding (a failed criterion).
About every CHECKPOINT_S, and after each round, the progress is written to `soak.json` next to the record. If the host or the
supervisor fails, only the running round is interrupted, and the figures that this round had already measured are kept.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from agent.exporter.live import Span, publish_record
from agent.run import background
from agent.sampling.sample_log import GpuSamples
from agent.sampling.snapshot import Stuck, take_snapshot
from agent.sampling.telemetry import NvmlPoller
from agent.soak.soak_run import SoakRun, format_progress
from agent.soak.stop_on import read_known_packs, stopping_finding
from collectors.base import Collector
from collectors.nvml import FastReader
from schemas.records import Record
from schemas.stages import SOAK

CHECKPOINT_S = 30.0
COUNTERS_S = 10.0
"""Pause between two snapshots of the counters."""
SAMPLE_S = 0.5
"""Pause between two samples of the GPUs."""
MAX_FAILED = 3
"""The soak ends after this many failed rounds in a row."""
PAUSE_S = 5.0
"""Pause after a failed round."""
TIME, FINDING, FAILURE = "time", "finding", "failure"
"""Why a soak ended: its planned time has passed, a finding stopped it, or MAX_FAILED rounds in a row failed."""
MAX_STARTS = 3
"""Maximum number of times that one call of `wait_for_soak` starts the supervisor."""
STILL_RUNNING, ENDED_EARLY = 4, 3
"""Exit codes of `wait_for_soak`."""


class SoakWatcher(threading.Thread):
    """Context manager with a thread that reads the GPUs and the counters during all rounds, and writes checkpoints."""

    def __init__(self, run: SoakRun, collectors: Sequence[Collector]) -> None:
        super().__init__(name="soak", daemon=True)
        self._run, self._collectors = run, collectors
        self._poller: SoakPoller | None = None
        self._ended = threading.Event()
        self._checkpoint_at = 0.0
        self._stuck: Stuck = {}

    def __enter__(self) -> SoakWatcher:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self.join(timeout=COUNTERS_S)
        if self._poller:
            self._poller.stop()

    def run(self) -> None:
        while True:
            if self._run.host.device == "gpu" and not (self._poller and self._poller.is_alive()):
                if self._poller:
                    self._run.recorder.add_event(self._run.at_s(), "gpu.power", "host", self._poller.problem)
                self._poller = SoakPoller(self._run)
                self._poller.start()
            snapshot, _ = take_snapshot(self._collectors, stage=SOAK, phase="during", stuck=self._stuck)
            self._run.recorder.add_counters(self._run.at_s(), snapshot)
            if time.monotonic() - self._checkpoint_at > CHECKPOINT_S - COUNTERS_S:
                with contextlib.suppress(OSError):  # a full disk is reported when the record is written
                    self._run.write_checkpoint()
                self._checkpoint_at = time.monotonic()
            if self._ended.wait(COUNTERS_S):
                return


class SoakPoller(NvmlPoller):
    """Records power, clocks, temperature and throttling of every GPU over the whole soak."""

    def __init__(self, run: SoakRun) -> None:
        super().__init__(lambda: FastReader(run.host.devices), SAMPLE_S)
        self._run = run

    @property
    def problem(self) -> str:
        """Why the poller has stopped reading."""
        return self._error or "the NVML poller stopped"

    def handle(self, at: float, samples: GpuSamples) -> None:
        self._run.recorder.add_samples(self._run.at_s(at), samples)


def run_soak(
    run: SoakRun,
    launch: Callable[[int, Span], Record],
    collectors: Sequence[Collector],
    report: Callable[[str], None],
    sleep: Callable[[float], None] = time.sleep,
) -> Record:
    """Run rounds until the soak ends, and return the record.

    Args:
        run: the soak on this host.
        launch: called with a round's number and the soak's times and progress; runs the round, adds it to the record and returns
            the record.
        collectors: read for counters during the rounds.
        report: called with one line of progress at a time.
        sleep: waits the given number of seconds.
    """
    run.start()
    if note := run.salvage_round(run.directory / "work" / SOAK):
        report(note)
    with SoakWatcher(run, collectors):
        ended_by, reason = _run_rounds(run, launch, report, sleep)
    record = run.finish(ended_by, reason)
    publish_record(run)
    return record


def _run_rounds(
    run: SoakRun, launch: Callable[[int, Span], Record], report: Callable[[str], None], sleep: Callable[[float], None]
) -> tuple[str, str]:
    """Run rounds; return what ended the soak (TIME, FINDING or FAILURE), and the reason if it ended before its planned time."""
    packs, failed = read_known_packs(run), 0
    while run.left_s > 0:
        record = launch(run.begin_round(), run.span())
        last = next(launch for launch in reversed(record.launches) if launch.stage == SOAK)
        failed = 0 if last.succeeded else failed + 1
        run.clear_work(run.directory / "work" / SOAK, keep_logs=failed > 0)
        run.write_checkpoint()
        report(format_progress(run.state))
        if reason := stopping_finding(run, record, packs):
            return FINDING, reason
        if failed >= MAX_FAILED:
            return FAILURE, f"{failed} rounds in a row failed: {last.reason}"
        if failed:
            sleep(PAUSE_S)
    return TIME, ""


def wait_for_soak(directory: Path, host: str, seconds: float, start: Callable[[], object]) -> tuple[str, int]:
    """Wait until the soak has ended or `seconds` have passed.

    If the soak has not ended and its supervisor is not running, call `start`, at most MAX_STARTS times.

    Returns:
        A message for the operator, and the exit code: 0 (the soak ended after its planned time), ENDED_EARLY or STILL_RUNNING.
    """
    end, starts = time.monotonic() + seconds, 0
    while True:
        running = background.is_running(directory, SOAK)
        state = SoakRun(directory, host).state if not running else None
        if state and state.ended:
            return format_progress(state), ENDED_EARLY if state.reason else 0
        if not running and starts < MAX_STARTS:
            start()
            starts += 1
        if time.monotonic() >= end:
            return format_progress(SoakRun(directory, host).state), STILL_RUNNING
        time.sleep(min(1.0, max(0.05, end - time.monotonic())))
