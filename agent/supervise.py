"""Runs the ranks of one stage under a deadline, and writes a record whatever becomes of them.

torchrun itself can hang (seen for 330 s behind a cut link), and its ranks outlive it: so the whole process tree is found,
by session and by parent, and ended; and every rank has left what it measured so far in a file of its own. Meanwhile the
ranks' heartbeats are watched, here and, in a gang, with the other supervisors: who stops the others is named and the gang
is ended, long before torch gives up.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agent.culprit import BY_REQUEST, RankState
from agent.exchange import Exchange
from agent.heartbeat import ADDRESS, LAUNCHED, SUPERVISOR, Beats, identity
from agent.live import Live, Span
from agent.record import HostRun
from agent.snapshot import now, take
from agent.telemetry import Telemetry
from agent.vigil import FLIGHT, Vigil, dump_flights, flight_recorder
from collectors.base import Collector
from schemas import documents
from schemas.catalogue import BENCHMARKS
from schemas.probes import PROBE
from schemas.records import Culprit, Launch, Observation, Rank, Record, Snapshot, observation_from_json
from schemas.studies import CELL
from schemas.timeline import SOAK

GRACE_S = 5.0
"""Between SIGTERM and SIGKILL."""
CULPRIT_GRACE_S = 1.0
"""The same where somebody was named: torchrun may wait for a lost host where no SIGTERM reaches it."""
SAMPLE_S = 2.0
"""Between two snapshots while the ranks run."""
LOOK_S = 0.2
FAMILY_S = 0.4
TAIL_BYTES = 4000
MOST_LOG_BYTES = 16 << 20
"""Of one log or dump that is kept."""
MOST_ATTEMPTS = 8
"""Whose logs are kept."""


@dataclass(frozen=True, kw_only=True)
class Command:
    """What a launcher made of a stage: a program that starts this host's ranks."""

    arguments: Sequence[str]
    environment: Mapping[str, str]
    ranks: Mapping[int, int]
    """rank -> local_rank of the ranks that run on this host."""


def supervise(
    run: HostRun,
    collectors: Sequence[Collector],
    command: Command,
    *,
    stage: str,
    gang: str,
    members: Sequence[str],
    work: Path,
    deadline_s: float,
    report: Callable[[str], None],
    meanwhile: Sequence[Collector] | None = None,
    exchange: Exchange | None = None,
    patience_s: float = 60.0,
    number: int = 0,
    span: Span | None = None,
) -> Record:
    """Runs the command and returns the record, to which the outcome, the results and three snapshots were added.

    Of a probe, or a cell of a study, no snapshot is kept, and its launch has what it measured.

    Args:
        run: the host's run.
        collectors: asked before and after.
        meanwhile: asked while the ranks run, which slow readings would disturb; None: the same.
        command: what to run.
        stage, gang, members: which stage this is, and who takes part, in rank order.
        work: directory in which the ranks leave results and logs; made here.
        deadline_s: seconds after which the process tree is killed.
        report: told one line at a time what goes on.
        exchange: how the other supervisors of the gang are heard of; None: there are none.
        patience_s: the process group's time-out.
        number: which launch of the gang, or which round of a soak, this is.
        span: of the soak that it is a round of.
    """
    probes = stage in (PROBE, CELL)
    before, gpus = take(collectors, stage=stage, phase="before")
    run.add(gang, snapshots=[] if probes else [before], gpus=gpus)
    began, start = now(), time.monotonic()
    telemetry = Telemetry(run.host.devices) if run.host.device == "gpu" else None
    sampler = Sampler(collectors if meanwhile is None else meanwhile, stage)
    beats = Beats(work, {rank: run.host.scopes[local] for rank, local in command.ranks.items()})
    live = Live(run, stage=stage, deadline_s=deadline_s, work=work, ranks=command.ranks, states=beats.states, span=span)
    vigil = Vigil(run.host.name, beats, exchange, patience_s)
    try:
        exit_code, culprit = _run(command, vigil, stage, work, deadline_s, report)
        states, killed = vigil.states(), vigil.want_of_memory()
    finally:
        vigil.part()
    duration = time.monotonic() - start
    during = sampler.stop()
    if telemetry:
        telemetry.stop()
    after, gpus = take(collectors, stage=stage, phase="after")
    ranks = [_rank(work, rank, local, states[rank]) for rank, local in sorted(command.ranks.items())]
    outcome, reason = _outcome(exit_code, deadline_s, ranks, killed)
    observations, windows, software, problems = results(work, command.ranks)
    if culprit:  # the same words on every host
        outcome, reason, problems = "failed", culprit.text, []
    if telemetry:
        observations += telemetry.observations(windows, observations, stage)
    cap_logs(work)
    launch = Launch(
        stage=stage,
        outcome=outcome,
        reason="; ".join([reason, *problems] if reason else problems)[:4096],
        members=tuple(members),
        began=began,
        duration_s=round(duration, 3),
        deadline_s=deadline_s,
        ranks=tuple(ranks),
        log_tail=tail(work / "launcher.log"),
        culprit=culprit,
        number=number,
        observations=tuple(observations) if probes else (),
        timeline=telemetry.trace(begun(work, command.ranks)) if telemetry and not probes and stage != SOAK else None,
    )
    record = run.add(
        gang,
        snapshots=[] if probes else [*during, after],
        gpus=gpus,
        observations=[] if probes else observations,
        launches=[launch],
        software=software,
    )
    live.stop(record)
    return record


def _run(
    command: Command, vigil: Vigil, stage: str, work: Path, deadline_s: float, report: Callable[[str], None]
) -> tuple[int | None, Culprit | None]:
    """The launcher's exit code, None where we ended it, and for whom it was ended."""
    ends = time.monotonic() + deadline_s
    with (work / "launcher.log").open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "agent.guard", "--leash", str(os.getpid()), *command.arguments],
            env={
                **flight_recorder(work),
                **command.environment,
                ADDRESS: str(work),
                SUPERVISOR: identity(os.getpid()),
                LAUNCHED: repr(time.monotonic()),
            },
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            cwd=work,
            start_new_session=True,
        )
        family = ProcessTree(process.pid)
        vigil.pids = family.pids
        look_at, culprit = 0.0, None
        try:
            while process.poll() is None:
                if time.monotonic() > ends:
                    report(f"stage {stage}: deadline of {deadline_s:g} s passed, ending every process of it")
                    return None, None
                if time.monotonic() > look_at:
                    family.look()
                    look_at = time.monotonic() + FAMILY_S
                if culprit := vigil.look(LOOK_S):
                    return _give_up(culprit, stage, work, sorted(command.ranks), report)
            culprit = vigil.settle(process.returncode)
            return process.returncode, culprit
        finally:
            family.end(CULPRIT_GRACE_S if culprit else None)
            with contextlib.suppress(subprocess.TimeoutExpired):  # one that hangs in the kernel cannot be waited for
                process.wait(timeout=GRACE_S)


def _give_up(
    culprit: Culprit, stage: str, work: Path, ranks: Sequence[int], report: Callable[[str], None]
) -> tuple[None, Culprit]:
    report(f"stage {stage}: {culprit.text}; ending every process of it")
    if culprit.kind != "rank_ended":  # the others know nothing that its end does not tell
        dump_flights(work, ranks)
    return None, culprit


def cap_logs(work: Path) -> None:
    """Cuts what the ranks wrote without measure, and removes what is of no more use."""
    for path in [*work.glob("*.log"), *work.glob(f"{FLIGHT}*")]:
        with contextlib.suppress(OSError):
            if path.is_fifo():
                path.unlink()
            elif not path.is_symlink() and path.stat().st_size > MOST_LOG_BYTES:
                os.truncate(path, MOST_LOG_BYTES)


def set_aside(work: Path, logs: Path) -> None:
    """Keeps the logs and dumps of the attempt before, of which a few are enough."""
    if not any(work.glob("*.log")):
        return
    kept = sorted(
        (path for path in logs.glob(f"{work.name}.*") if path.is_dir()), key=lambda path: path.stat().st_mtime
    )
    for old in kept[: -(MOST_ATTEMPTS - 1)]:
        shutil.rmtree(old, ignore_errors=True)
    place = logs / f"{work.name}.{time.time_ns()}"
    place.mkdir(parents=True)
    for path in [*work.glob("*.log"), *work.glob(f"{FLIGHT}*")]:
        path.rename(place / path.name)


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

    def stop(self) -> list[Snapshot]:
        """What is worth keeping."""
        self._ended.set()
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


class ProcessTree:
    """A process and all that came of it, found by parent and kept by identity, so that an orphan is not lost."""

    def __init__(self, root: int) -> None:
        self._seen: dict[int, str] = {}
        self._root = root
        self.look()

    def look(self) -> None:
        """Takes note of every living descendant."""
        table = {pid: (parent, born) for pid, parent, born in _processes()}
        family = {pid for pid, born in self._seen.items() if table.get(pid, (0, ""))[1] == born} | {self._root}
        grew = True
        while grew:
            more = {pid for pid, (parent, _) in table.items() if parent in family} - family
            family |= more
            grew = bool(more)
        self._seen |= {pid: table[pid][1] for pid in family if pid in table}

    def pids(self) -> list[int]:
        """Of all that ever were."""
        return list(self._seen)

    def alive(self) -> list[int]:
        """Those that still run (a zombie does not)."""
        table = {pid: born for pid, _, born in _processes()}
        return [pid for pid, born in self._seen.items() if table.get(pid) == born]

    def end(self, grace_s: float | None = None) -> None:
        """SIGTERM, then SIGKILL after `grace_s` (GRACE_S where not given), to whatever is left."""
        self.look()
        for number, patience in ((signal.SIGTERM, GRACE_S if grace_s is None else grace_s), (signal.SIGKILL, GRACE_S)):
            for pid in self.alive():
                try:
                    os.kill(pid, number)
                    os.kill(pid, signal.SIGCONT)  # a stopped process takes no SIGTERM
                except ProcessLookupError:
                    continue
            ends = time.monotonic() + patience
            while self.alive() and time.monotonic() < ends:
                time.sleep(0.05)
                self.look()


def _processes() -> list[tuple[int, int, str]]:
    """(pid, parent, start time) of every process that is not a zombie."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text(errors="replace").rpartition(")")[2].split()
            except OSError:
                continue
            if fields[0] not in ("Z", "X"):
                found.append((int(entry.name), int(fields[1]), fields[19]))
    return found


def _outcome(exit_code: int | None, deadline_s: float, ranks: Sequence[Rank], killed: str) -> tuple[str, str]:
    """`killed`: what is known of a process that the kernel killed: the launcher itself, or one that the ranks waited for."""
    more = f"; a process of it was {killed}" if killed else ""
    if exit_code is None:
        silent = ", ".join(f"rank {rank.rank} in {rank.phase or 'start'}" for rank in ranks if rank.exit_code is None)
        return "deadline", f"not finished after {deadline_s:g} s ({silent or 'every rank had ended'}){more}"
    failed = [rank for rank in ranks if rank.exit_code != 0]
    if exit_code or failed:
        who = ", ".join(f"rank {rank.rank} in {rank.phase or 'start'} ({_how(rank.exit_code)})" for rank in failed)
        return "failed", f"the launcher ended with {exit_code}: {who or 'every rank had ended well'}{more}"
    return "finished", ""


def _how(exit_code: int | None) -> str:
    return "no exit of its own" if exit_code is None else f"exit code {exit_code}"


def _state(work: Path, rank: int) -> documents.Json:
    """What a rank last said of itself. Raises OSError or documents.DocumentError where it said nothing that can be read."""
    return documents.parse((work / f"rank{rank}.state.json").read_bytes(), source="state")


def begun(work: Path, ranks: Iterable[int]) -> dict[str, float]:
    """Benchmark -> when the first of these ranks came to it, by the host's monotonic clock, in that order."""
    found: dict[str, float] = {}
    for rank in ranks:
        with contextlib.suppress(OSError, documents.DocumentError, KeyError, AttributeError, TypeError):
            for name, at in _state(work, rank)["begun"].items():
                if name in BENCHMARKS and type(at) is float:
                    found[name] = min(at, found.get(name, at))
    return dict(sorted(found.items(), key=lambda item: item[1]))


def _rank(work: Path, rank: int, local_rank: int, seen: RankState) -> Rank:
    """How a rank ended, by what it wrote itself, its last phase and its exit code, and by what its guard saw."""
    try:
        state = _state(work, rank)
        phase, exit_code = str(state["phase"]), state["exit_code"]
    except (OSError, documents.DocumentError, KeyError, TypeError):
        phase, exit_code = seen.phase, None
    if not isinstance(exit_code, int):
        asked = seen.told or (seen.exit_code is not None and -seen.exit_code in BY_REQUEST)
        exit_code = None if asked else seen.exit_code
    return Rank(
        rank=rank,
        local_rank=local_rank,
        phase=phase[:512],
        exit_code=exit_code,
        log_tail=tail(work / f"rank{rank}.log"),
    )


def results(
    work: Path, ranks: Iterable[int]
) -> tuple[list[Observation], list[Mapping[str, Any]], dict[str, str], list[str]]:
    """What the ranks of this host measured, for which times they want to know what NVML showed, the software they ran
    on, and which of their files cannot be believed."""
    observations: list[Observation] = []
    windows: list[Mapping[str, Any]] = []
    software: dict[str, str] = {}
    problems: list[str] = []
    for rank in sorted(ranks):
        path = work / f"rank{rank}.json"
        try:
            document = documents.read(path, "rank_result")
        except documents.DocumentError as error:
            problems.append(f"no result of rank {rank}: {error}")
            continue
        observations += [observation_from_json(item) for item in document["observations"]]
        windows += document.get("windows", [])
        software |= document["software"]
    return observations, windows, software, problems


def tail(path: Path, size: int = TAIL_BYTES) -> str:
    """The end of a log, as text."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - size))
            return file.read().decode(errors="replace")
    except OSError:
        return ""


def write_request(work: Path, request: Mapping[str, object]) -> Path:
    """What the ranks are to do, as a file that they read."""
    path = work / "request.json"
    documents.write_text(path, json.dumps(request))
    return path
