"""The supervisor, which is the process that runs a launch on one host: its parts, and whole launches.

Its parts derive the outcome, monitor the gang (the hosts of one multi-node launch) and request dumps of PyTorch's flight
recorder.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import select
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from agent.gang import culprit, flight_recorder, monitor
from agent.gang.culprit import HOST_SILENT_S, SETTLE_S, UNSURE_S, PeerStatus
from agent.gang.flight_recorder import dump_flight_records, flight_recorder_env
from agent.gang.heartbeat import HEARTBEAT_DIRECTORY, LAUNCHED, SUPERVISOR
from agent.gang.heartbeat_receiver import HeartbeatReceiver
from agent.gang.monitor import GangMonitor
from agent.gang.peer_channel import PeerChannel
from agent.gang.processes import process_identity
from agent.gang.protocol import Gang
from agent.launch import process_tree, supervise
from agent.launch.outcome import RanksEnd, conclude
from agent.run import work_directory
from agent.run.record import HostRun
from agent.sampling import snapshot_sampler
from agent.sampling.oom import OomWatch
from agent.sampling.thread_limit import ThreadLimitWatch
from collectors.base import Family
from schemas.records import Culprit, Rank, Record, to_json
from schemas.stages import CELL, PROBE, SOAK
from tests import builders
from tests.gangs import FakeClock, loopback_address, send_to_receiver
from tests.launches import launch_program
from tests.unit.agent.sampling.test_oom import Tree
from tests.unit.agent.sampling.test_thread_limit import LOCAL, PidsTree

# ---- the outcome of a launch ----


def rank(number: int, exit_code: int | None, phase: str = "gemm bf16") -> Rank:
    """Return a rank of the record, with `number` as its rank and its local rank."""
    return Rank(rank=number, local_rank=number, phase=phase, exit_code=exit_code, log_tail="")


@pytest.mark.parametrize(
    ("exit_code", "ranks", "outcome", "reason"),
    [
        (0, [rank(0, 0), rank(1, 0)], "finished", ""),
        (None, [rank(0, 0), rank(1, None, "")], "deadline", "not finished after 9 s (rank 1 in start)"),
        (None, [rank(0, 0)], "deadline", "not finished after 9 s (every rank had ended)"),
        (1, [rank(0, 0)], "failed", "the launcher exited with 1: every rank had finished"),
        (
            0,
            [rank(0, None), rank(1, 3, "")],
            "failed",
            "the launcher exited with 0: rank 0 in gemm bf16 (no exit code), rank 1 in start (exit code 3)",
        ),
    ],
)
def test_reason_lists_every_rank_that_failed_or_had_not_ended_at_the_deadline(
    exit_code: int | None, ranks: list[Rank], outcome: str, reason: str
) -> None:
    """`exit_code`: exit code of the launcher; None: the supervisor ended the launcher at the deadline of 9 s."""
    oom_text = "; a process of this launch was killed by the out-of-memory killer" if reason else ""
    for oom_kill, expected in (("", reason), ("killed by the out-of-memory killer", reason + oom_text)):
        end = RanksEnd(exit_code=exit_code, culprit=None, states={}, oom_kill=oom_kill, any_rank_started=True)
        conclusion = conclude(end, host="h1", ranks=ranks, excluded={}, problems=[], deadline_s=9.0)
        assert (conclusion.outcome, conclusion.reason) == (outcome, expected)


# ---- the gang monitor ----


@pytest.fixture
def receiver(tmp_path: Path) -> Iterator[HeartbeatReceiver]:
    """Yield a heartbeat receiver for ranks 0 and 1."""
    receiver = HeartbeatReceiver(tmp_path, {0: "gpu=0", 1: "gpu=1"})
    yield receiver
    receiver.socket.close()


@pytest.fixture
def gang_monitor(receiver: HeartbeatReceiver, clock: FakeClock) -> GangMonitor:
    """Return the monitor of a launch on host h1 alone."""
    return GangMonitor("h1", receiver, None, 60.0)


def test_killed_rank_becomes_the_culprit_after_the_other_ranks_had_time_to_report(
    gang_monitor: GangMonitor, tmp_path: Path, clock: FakeClock
) -> None:
    send_to_receiver(tmp_path)
    send_to_receiver(tmp_path, "end", rank=1, code=-9, terminated_by_launcher=False)
    assert gang_monitor.poll(0.0) is None
    clock.now += SETTLE_S + 0.1
    verdict = gang_monitor.poll(0.0)
    assert verdict is not None
    assert (verdict.kind, verdict.rank, verdict.hosts) == ("rank_ended", 1, ("h1",))
    assert gang_monitor.poll(0.0) is verdict, "the verdict must not change"
    clock.now += 1.0
    assert gang_monitor.poll(0.0) is verdict


def test_end_of_a_rank_is_judged_at_once(gang_monitor: GangMonitor, tmp_path: Path, clock: FakeClock) -> None:
    """When a rank ends, the monitor searches for the culprit at once, even within JUDGE_INTERVAL_S of its last search.

    Here the rank ended 150 s before its message arrives (`at`), so the monitor need not wait SETTLE_S for other ranks.
    """
    clock.now += 50.0
    assert gang_monitor.poll(0.0) is None
    clock.now += 0.05
    send_to_receiver(tmp_path, "end", rank=1, code=-9, terminated_by_launcher=False, at=900.0)
    assert gang_monitor.poll(0.0) is not None


def test_oom_killed_rank_is_reported_with_its_reason(
    receiver: HeartbeatReceiver, tmp_path: Path, clock: FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    tree = Tree(tmp_path / "root", 2)
    monkeypatch.setattr(monitor, "OomWatch", functools.partial(OomWatch, tree.root))
    gang_monitor = GangMonitor("h1", receiver, None, 60.0)
    send_to_receiver(tmp_path, "end", rank=0, code=1, terminated_by_launcher=False)
    send_to_receiver(tmp_path, "end", rank=1, code=-9, terminated_by_launcher=True)
    assert gang_monitor.out_of_memory_reason() == ""
    tree.group("slice/session", kills=1)
    assert [state.why for state in gang_monitor.states().values()] == ["", ""], (
        "rank 0 exited by itself and rank 1 was killed by its launcher, so no reason may be given"
    )
    receiver.close()
    second_receiver = HeartbeatReceiver(tmp_path, {0: "gpu=0", 1: "gpu=1"})
    gang_monitor = GangMonitor("h1", second_receiver, None, 60.0)
    send_to_receiver(tmp_path)
    send_to_receiver(tmp_path, "end", rank=1, code=-9, terminated_by_launcher=False)
    tree.group("slice/session", kills=2)
    reasons = [state.why for state in gang_monitor.states().values()]
    tree.group("slice/session", kills=9)
    assert reasons == [state.why for state in gang_monitor.states().values()], "later kills must not change the reason"
    second_receiver.close()
    assert reasons[0] == ""
    assert reasons[1].startswith("killed by the kernel's out-of-memory killer (oom_kill 1")


ABORTED_EARLY = "killed by SIGABRT: the ranks had not exchanged data yet; "
NO_MORE_THREADS = "libgomp: Thread creation failed: Resource temporarily unavailable\n"
NO_THREAD = "no thread could be created (Thread creation failed: Resource temporarily unavailable)"


@pytest.mark.parametrize(
    ("joined", "code", "output", "is_limited", "kind", "text"),
    [
        (False, -6, "", False, "rank_raised", ABORTED_EARLY),
        (True, -6, "", False, "rank_ended", "killed by SIGABRT"),
        (False, -11, "", False, "rank_ended", "killed by SIGSEGV"),
        (False, 1, "", False, "rank_ended", "ended with exit code 1"),
        (True, -6, "", True, "rank_raised", "killed by SIGABRT: a control group of this launch reached its limit on"),
        (True, 1, NO_MORE_THREADS, False, "rank_raised", f"ended with exit code 1: {NO_THREAD}, because of a limit on"),
        (False, -6, NO_MORE_THREADS, False, "rank_raised", f"killed by SIGABRT: {NO_THREAD}, because of a limit on"),
    ],
)
def test_limit_on_threads_or_an_early_abort_is_no_fault_of_a_device(
    receiver: HeartbeatReceiver,
    tmp_path: Path,
    clock: FakeClock,
    monkeypatch: pytest.MonkeyPatch,
    joined: bool,
    code: int,
    output: str,
    is_limited: bool,
    kind: str,
    text: str,
) -> None:
    """`joined`: whether the ranks have exchanged data. `is_limited`: whether the counter of a control group rises.

    `kind`: kind of the verdict; `rank_raised` means that no device is at fault.
    """
    tree = PidsTree(tmp_path / "root", LOCAL)
    monkeypatch.setattr(monitor, "ThreadLimitWatch", functools.partial(ThreadLimitWatch, tmp_path / "root"))
    gang_monitor = GangMonitor("h1", receiver, None, 60.0)
    gang_monitor.read_output = lambda rank: output if rank == 1 else ""
    send_to_receiver(tmp_path, rank=1, joined=joined, progress_at=clock.now)
    send_to_receiver(tmp_path, "end", rank=1, code=code, terminated_by_launcher=False)
    tree.count("pod", 3, 4 if is_limited else 3)
    gang_monitor.poll(0.0)
    clock.now += SETTLE_S + 0.1
    verdict = gang_monitor.poll(0.0)
    assert verdict is not None
    assert (verdict.kind, verdict.rank) == (kind, 1)
    assert f": {text}" in verdict.text


def test_reached_limit_on_threads_is_the_exception_of_running_ranks(
    receiver: HeartbeatReceiver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank that cannot create a thread may hang, although its device works."""
    tree = PidsTree(tmp_path / "root", LOCAL)
    monkeypatch.setattr(monitor, "ThreadLimitWatch", functools.partial(ThreadLimitWatch, tmp_path / "root"))
    gang_monitor = GangMonitor("h1", receiver, None, 60.0)
    send_to_receiver(tmp_path, rank=1, joined=True)
    assert [state.exception for state in gang_monitor.states().values()] == ["", ""]
    tree.count("pod", 4, 4)
    assert all("reached its limit on" in state.exception for state in gang_monitor.states().values())


class AdvancingClock(FakeClock):
    """A clock that advances by 0.25 s at each reading."""

    def __call__(self) -> float:
        self.now += 0.25
        return self.now


@pytest.fixture
def advancing_clock(monkeypatch: pytest.MonkeyPatch) -> AdvancingClock:
    """Replace `time.monotonic` by the returned clock, and let `select.select` return at once without events."""
    fake = AdvancingClock()
    monkeypatch.setattr(time, "monotonic", fake)
    monkeypatch.setattr(select, "select", lambda *_: ([], [], []))
    return fake


def test_monitor_does_not_wait_after_success(
    receiver: HeartbeatReceiver, tmp_path: Path, advancing_clock: AdvancingClock
) -> None:
    gang_monitor = GangMonitor("h1", receiver, None, 60.0)
    send_to_receiver(tmp_path, "end", code=0, terminated_by_launcher=False)
    before = advancing_clock.now
    assert gang_monitor.await_verdict(0) is None
    assert advancing_clock.now - before < 2.0


@pytest.mark.parametrize(
    "failure",
    [{"launcher_code": 1}, {"failure": "error", "failed_at": 1000.0}, {"rank_code": 1}],
    ids=["launcher failed", "benchmark failed", "rank failed"],
)
def test_monitor_waits_for_a_verdict_after_a_failure(
    receiver: HeartbeatReceiver, tmp_path: Path, advancing_clock: AdvancingClock, failure: dict[str, Any]
) -> None:
    """In `failure`, `launcher_code` and `rank_code` are the exit codes of the launcher and of rank 0.

    Other keys are fields of a heartbeat of rank 0.
    """
    gang_monitor = GangMonitor("h1", receiver, None, 60.0)
    if "failure" in failure:
        send_to_receiver(tmp_path, **failure)
    send_to_receiver(tmp_path, "end", code=failure.get("rank_code", 0), terminated_by_launcher="rank_code" in failure)
    before = advancing_clock.now
    assert gang_monitor.await_verdict(failure.get("launcher_code", 0)) is None
    assert 2 * SETTLE_S <= advancing_clock.now - before < 3 * SETTLE_S


def test_culprit_is_found_after_a_failure(
    receiver: HeartbeatReceiver, tmp_path: Path, advancing_clock: AdvancingClock
) -> None:
    gang_monitor = GangMonitor("h1", receiver, None, 60.0)
    send_to_receiver(tmp_path, "end", code=-11, terminated_by_launcher=False)
    verdict = gang_monitor.await_verdict(1)
    assert verdict is not None
    assert verdict.text.endswith("killed by SIGSEGV")


@pytest.mark.parametrize(
    ("exit_code", "kind", "reported"),
    [
        (-9, "rank_ended", "its launcher was killed by SIGKILL"),
        (1, "rank_raised", "its launcher ended with exit code 1: OSError: [Errno 98] Address already in use"),
    ],
)
def test_rank_terminated_by_its_failed_launcher_is_the_culprit(
    receiver: HeartbeatReceiver,
    tmp_path: Path,
    advancing_clock: AdvancingClock,
    exit_code: int,
    kind: str,
    reported: str,
) -> None:
    gang_monitor = GangMonitor("h1", receiver, None, 60.0)
    send_to_receiver(tmp_path, "end", rank=0, code=-15, terminated_by_launcher=True)
    send_to_receiver(tmp_path, "end", rank=1, code=0, terminated_by_launcher=False)
    verdict = gang_monitor.await_verdict(exit_code, "OSError: [Errno 98] Address already in use")
    assert verdict is not None
    assert (verdict.kind, verdict.scope, verdict.rank) == (kind, "", 0)
    assert verdict.text == f'host h1 rank 0 in phase "start": {reported}'


@pytest.mark.parametrize(
    ("exit_code", "reported"),
    [
        (-9, "was killed by SIGKILL before any rank started"),
        (1, "ended with exit code 1 before any rank started: no libcudart"),
    ],
)
def test_failure_of_a_launcher_before_its_ranks_start_has_a_culprit_only_in_a_gang(
    receiver: HeartbeatReceiver,
    tmp_path: Path,
    advancing_clock: AdvancingClock,
    gang: Callable[..., Gang],
    exit_code: int,
    reported: str,
) -> None:
    """Without a culprit, the other hosts of the gang would wait for the launcher's ranks until the deadline.

    The culprit is the first rank of the launcher, with the launcher's failure as the reason.
    """
    assert GangMonitor("h1", receiver, None, 60.0).await_verdict(exit_code, "no libcudart") is None
    gang_monitor = GangMonitor("h2", receiver, PeerChannel(gang("h2", 3)), 60.0)
    assert gang_monitor._channel
    gang_monitor._channel.statuses = {host: PeerStatus(at=advancing_clock.now, finished=True) for host in ("h1", "h3")}
    verdict = gang_monitor.await_verdict(exit_code, "no libcudart")
    assert verdict is not None
    assert (verdict.kind, verdict.hosts, verdict.scope, gang_monitor.has_started()) == (
        "rank_ended",
        ("h2",),
        "",
        False,
    )
    assert verdict.text == f'host h2 rank 0 in phase "start": its launcher {reported}'
    assert gang_monitor.states()[0].exit_code == (1 if exit_code == 1 else None)
    send_to_receiver(tmp_path, "end", rank=1, code=0, terminated_by_launcher=False)
    assert (gang_monitor.states()[0].why, gang_monitor.has_started()) == ("", True)
    gang_monitor._channel.close()


@pytest.mark.parametrize(("exit_code", "is_named"), [(1, False), (-9, True), (-15, True), (-6, False)])
def test_late_failure_of_a_launcher_has_a_culprit_only_after_a_signal_that_no_other_host_can_cause(
    receiver: HeartbeatReceiver,
    advancing_clock: AdvancingClock,
    gang: Callable[..., Gang],
    exit_code: int,
    is_named: bool,
) -> None:
    """The launcher fails later than OWN_FAILURE_S after its start, before any of its ranks started.

    Exit code 1 and SIGABRT (-6): the launcher may have waited in vain for another host. So this host is not named as the
    culprit. Probes (short launches of parts of the gang) find the cause.

    SIGKILL (-9) and SIGTERM (-15): no other host can cause them, so this host is the culprit.
    """
    gang_monitor = GangMonitor("h2", receiver, PeerChannel(gang("h2", 3)), 60.0)
    advancing_clock.now += 301.0
    assert gang_monitor._channel
    gang_monitor._channel.statuses = {host: PeerStatus(at=advancing_clock.now, finished=True) for host in ("h1", "h3")}
    assert (gang_monitor.await_verdict(exit_code) is not None) == is_named
    gang_monitor._channel.close()


def test_rank_that_failed_before_its_launcher_is_the_culprit(
    receiver: HeartbeatReceiver, tmp_path: Path, advancing_clock: AdvancingClock
) -> None:
    gang_monitor = GangMonitor("h1", receiver, None, 60.0)
    send_to_receiver(tmp_path, "end", rank=0, code=-15, terminated_by_launcher=True)
    send_to_receiver(tmp_path, "end", rank=1, code=3, terminated_by_launcher=False)
    verdict = gang_monitor.await_verdict(1)
    assert verdict is not None
    assert (verdict.rank, verdict.text.rpartition(": ")[2]) == (1, "ended with exit code 3")


def test_terminated_ranks_are_no_culprits_if_their_launcher_did_not_fail(
    receiver: HeartbeatReceiver, tmp_path: Path, advancing_clock: AdvancingClock
) -> None:
    """The launcher has no exit code (None), because the supervisor ends the launch."""
    gang_monitor = GangMonitor("h1", receiver, None, 60.0)
    for rank in (0, 1):
        send_to_receiver(tmp_path, "end", rank=rank, code=-15, terminated_by_launcher=True)
    assert gang_monitor.await_verdict(None) is None
    assert all(state.terminated_by_launcher for state in gang_monitor.states().values())


def test_poll_waits_until_its_timeout_or_a_heartbeat(receiver: HeartbeatReceiver, tmp_path: Path) -> None:
    gang_monitor = GangMonitor("h1", receiver, None, 60.0)
    began = time.monotonic()
    gang_monitor.poll(0.05)
    assert time.monotonic() - began >= 0.05
    send_to_receiver(tmp_path)
    gang_monitor.poll(20.0)
    assert time.monotonic() - began < 10


def test_long_pause_of_the_supervisor_does_not_count_as_silence_of_the_ranks(
    receiver: HeartbeatReceiver, tmp_path: Path, clock: FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pause is long if it exceeds the time-out of the poll by more than 2 s (PAUSE_S)."""
    monkeypatch.setattr(select, "select", lambda *_: ([], [], []))
    gang_monitor = GangMonitor("h1", receiver, None, 60.0)
    send_to_receiver(tmp_path)
    gang_monitor.poll(0.0)
    clock.now += 2.5
    gang_monitor.poll(1.0)
    assert gang_monitor.states()[0].silent_s == 2.5
    clock.now += 3.5
    gang_monitor.poll(1.0)
    assert gang_monitor.states()[0].silent_s == 2.5, "the pause of 3.5 s must not count: the poll was to last 1 s"


# ---- the flight recorders ----


def test_dump_is_requested_from_each_listening_rank_and_awaited(
    tmp_path: Path, clock: FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits: list[float] = []
    sleep = time.sleep

    def wait(seconds: float) -> None:
        if threading.current_thread() is not threading.main_thread():
            sleep(seconds)  # called by a thread of an earlier test
            return
        waits.append(seconds)
        clock.now += seconds
        if len(waits) == 3:
            (tmp_path / "flight.rank0").write_text("")

    monkeypatch.setattr(time, "sleep", wait)
    for number in (0, 1):
        os.mkfifo(tmp_path / f"flight.rank{number}.pipe")
    (tmp_path / "flight.rank2.pipe").symlink_to(tmp_path / "flight.rank0.pipe")
    reader = os.open(tmp_path / "flight.rank0.pipe", os.O_RDONLY | os.O_NONBLOCK)
    before = len(list(Path("/proc/self/fd").iterdir()))
    try:
        dump_flight_records(tmp_path, [0, 1, 2, 3])
        assert os.read(reader, 10) == b"1"
        assert len(waits) == 3
        assert len(list(Path("/proc/self/fd").iterdir())) == before
        (tmp_path / "flight.rank0").unlink()
        dump_flight_records(tmp_path, [0])
        assert sum(waits[3:]) == pytest.approx(flight_recorder.DUMP_S, abs=0.1), (
            "the wait for the file must end after DUMP_S"
        )
    finally:
        os.close(reader)
    waits.clear()
    dump_flight_records(tmp_path, [0, 1])
    assert waits == [], "dump_flight_records must not wait if no rank listens"


# ---- a whole launch ----


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> HostRun:
    """Return the run of host h1 in a rehearsal (a run on CPUs), with short waits in the supervisor."""
    for module in (culprit, monitor):
        monkeypatch.setattr(module, "SETTLE_S", 0.1)
    monkeypatch.setattr(supervise, "POLL_S", 0.02)
    monkeypatch.setattr(supervise, "PROCESS_SCAN_S", 0.02)
    monkeypatch.setattr(process_tree, "GRACE_S", 0.3)
    plan = builders.plan(profile="rehearsal")
    return HostRun.begin(tmp_path / "run", "h1", json.dumps(to_json(plan)))


def rank_result(number: int) -> dict[str, Any]:
    """Return the content of a rank's result file, with one observation."""
    values = {
        "name": "gemm.throughput",
        "scope": f"cpu={number}",
        "stage": "benchmark",
        "unit": "FLOP/s",
        "status": "measured",
    }
    return {"rank": number, "observations": [{**values, "value": 1.0}], "software": {f"lib{number}": "2"}}


def launch(run: HostRun, program: str, collectors: Sequence[MarkerCollector] = (), **fields: Any) -> Record:
    """Supervise a shell program in place of torchrun, with two ranks on this host; return the record.

    Before the program starts, the work directory contains the result files and state files of two ranks that ended with exit
    code 0. `fields` are arguments of `launch_program`.
    """
    work = run.directory / "work"
    work.mkdir()
    for number in (0, 1):
        (work / f"rank{number}.json").write_text(json.dumps(rank_result(number)))
        (work / f"rank{number}.state.json").write_text(json.dumps({"phase": "end", "exit_code": 0}))
    return launch_program(
        run,
        ["sh", "-c", textwrap.dedent(program)],
        environment={**os.environ, "TORCH_NCCL_TRACE_BUFFER_SIZE": "7", HEARTBEAT_DIRECTORY: "/nowhere"},
        ranks={0: 0, 1: 1},
        **{"collectors": collectors, "fast_collectors": collectors, **fields},
    )


def test_ranks_get_the_identity_of_their_supervisor_and_the_path_of_their_dumps(run: HostRun) -> None:
    before = time.monotonic()
    launch(run, 'env > env; pwd > cwd; cat > stdin; cut -d" " -f5,6 /proc/$$/stat > ids; echo $$ >> ids')
    work = run.directory / "work"
    variables = dict(line.partition("=")[::2] for line in (work / "env").read_text().splitlines())
    assert (variables[HEARTBEAT_DIRECTORY], variables[SUPERVISOR]) == (str(work), process_identity(os.getpid()))
    assert before <= float(variables[LAUNCHED]) <= time.monotonic()
    assert (work / "cwd").read_text().strip() == str(work)
    assert (work / "stdin").read_text() == ""
    assert len(set((work / "ids").read_text().split())) == 1, "the program must lead its own session and process group"
    assert variables["TORCH_NCCL_TRACE_BUFFER_SIZE"] == "7", (
        "the environment of the command must take precedence over `flight_recorder_env`"
    )
    assert flight_recorder_env(work)["TORCH_NCCL_TRACE_BUFFER_SIZE"] == "1000"
    assert (variables["TORCH_FR_BUFFER_SIZE"], variables["TORCH_NCCL_DUMP_ON_TIMEOUT"]) == ("1000", "1")
    for name in ("TORCH_NCCL_DEBUG_INFO_TEMP_FILE", "TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_PIPE_FILE"):
        assert variables[name] == str(work / "flight.rank")


def test_record_contains_the_launch_as_requested(run: HostRun) -> None:
    record = launch(
        run, "echo said; echo so >&2", gang="r1", stage="gang", members=("h1", "h2"), number=3, deadline_s=30.0
    )
    (done,) = record.launches
    assert (done.stage, done.members, done.number, done.deadline_s) == ("gang", ("h1", "h2"), 3, 30.0)
    assert (done.outcome, done.reason, done.culprit, done.timeline) == ("finished", "", None, None)
    assert done.log_tail == "said\nso\n"
    assert [(rank.rank, rank.local_rank, rank.exit_code) for rank in done.ranks] == [(0, 0, 0), (1, 1, 0)]
    assert 0 < done.duration_s < 20
    assert (done.observations, len(record.observations)) == ((), 2)
    assert [(taken.stage, taken.phase) for taken in record.snapshots] == [("gang", "before"), ("gang", "after")]
    assert run.record("r1") == record


def test_long_log_is_truncated(run: HostRun, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(work_directory, "MAX_LOG_BYTES", 8)
    assert launch(run, "echo 0123456789").launches[0].log_tail == "01234567"
    assert (run.directory / "work" / "launcher.log").stat().st_size == 8


def test_observations_of_a_probe_are_only_in_its_launch(run: HostRun) -> None:
    record = launch(run, "true", stage=PROBE)
    assert (record.snapshots, record.observations) == ((), ())
    assert [observation.scope for observation in record.launches[0].observations] == ["cpu=0", "cpu=1"]


class MarkerCollector:
    """A collector with a single metric: `marker.` followed by the name of the collector."""

    def __init__(self, name: str) -> None:
        self.name = name

    def collect(self) -> Iterator[Family]:
        yield Family(name=f"marker.{self.name}", unit="1", help="A marker.", readings=[({}, 1)])


@pytest.mark.parametrize(
    ("fast_collectors", "collector"),
    [(None, "full"), ([MarkerCollector("fast")], "fast")],
    ids=["the full collectors", "separate fast collectors"],
)
def test_fast_collectors_are_read_while_the_ranks_run_and_full_collectors_before_and_after(
    run: HostRun, monkeypatch: pytest.MonkeyPatch, fast_collectors: list[MarkerCollector] | None, collector: str
) -> None:
    """`fast_collectors`: None if the full collectors are also the fast ones.

    `collector`: name of the collector that is read while the ranks run.
    """
    monkeypatch.setattr(snapshot_sampler, "PERIOD_S", 0.02)
    fast = [MarkerCollector("full")] if fast_collectors is None else fast_collectors
    record = launch(run, "sleep 0.3", [MarkerCollector("full")], fast_collectors=fast)
    markers = [
        (taken.stage, taken.phase, metric.name)
        for taken in record.snapshots
        for metric in taken.metrics
        if metric.name.startswith("marker.")
    ]
    assert markers == [
        ("benchmark", "before", "marker.full"),
        ("benchmark", "during", f"marker.{collector}"),
        ("benchmark", "after", "marker.full"),
    ]


@pytest.mark.parametrize(
    ("stage", "has_timeline"), [("benchmark", True), ("gang", True), (PROBE, False), (CELL, False), (SOAK, False)]
)
def test_gpu_launch_has_a_timeline_only_in_the_benchmark_and_gang_stages(
    tmp_path: Path, stage: str, has_timeline: bool
) -> None:
    """A timeline is recorded even without NVML; it then has no figures."""
    run = HostRun.begin(tmp_path / "run", "h1", json.dumps(to_json(builders.plan(gpu_count=2))))
    timeline = launch(run, "true", stage=stage).launches[0].timeline
    assert (timeline is not None) == has_timeline


@pytest.mark.parametrize(
    "failing_function",
    [
        "agent.launch.supervise.take_snapshot",
        "agent.launch.supervise.HeartbeatReceiver",
        "tests.launches.LivePublisher",
        "agent.launch.supervise.GangMonitor",
        "agent.launch.supervise._run",
        "agent.run.work_directory.truncate_logs",
    ],
)
def test_failed_supervisor_leaves_no_thread_and_no_socket(
    tmp_path: Path, gang: Callable[..., Gang], monkeypatch: pytest.MonkeyPatch, failing_function: str
) -> None:
    run = HostRun.begin(tmp_path / "runs" / "r1", "h1", json.dumps(to_json(builders.plan(gpu_count=2))))
    receivers: list[HeartbeatReceiver] = []
    before = set(threading.enumerate())

    def open_receiver(directory: Path, ranks: Mapping[int, str]) -> HeartbeatReceiver:
        receivers.append(HeartbeatReceiver(directory, ranks))
        return receivers[-1]

    def fail(*_: Any, **__: Any) -> Any:
        raise OSError("no space left on device")

    monkeypatch.setattr("agent.sampling.telemetry.FastReader", lambda _: SimpleNamespace(read=dict))
    monkeypatch.setattr(supervise, "HeartbeatReceiver", open_receiver)
    monkeypatch.setattr(failing_function, fail)
    with pytest.raises(OSError, match="no space left"):
        launch(run, "true", channel=PeerChannel(gang("h1")))
    for thread in set(threading.enumerate()) - before:
        thread.join(5)
    assert set(threading.enumerate()) <= before
    assert all(receiver.socket.fileno() == -1 for receiver in receivers)
    PeerChannel(gang("h1")).close()  # fails if the failed supervisor still holds the port


def test_unreadable_results_are_named_in_the_reason(run: HostRun) -> None:
    reason = launch(run, "echo [] > rank1.json; exit 2").launches[0].reason
    assert reason.startswith("the launcher exited with 2: every rank had finished; no result of rank 1: ")


def test_launch_whose_launcher_failed_before_any_rank_started_has_no_ranks(
    run: HostRun, gang: Callable[..., Gang], monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (culprit, monitor):
        monkeypatch.setattr(module, "SETTLE_S", 0.1)
    channel = PeerChannel(gang("h1", 2))
    channel.statuses = {"h2": PeerStatus(at=time.monotonic(), finished=True)}
    done = launch(run, "echo 'ImportError: no torch'; exit 1", channel=channel, members=("h1", "h2")).launches[0]
    assert done.reason.endswith("its launcher ended with exit code 1 before any rank started: ImportError: no torch")
    assert (done.outcome, done.ranks) == ("failed", ())


@pytest.mark.parametrize("kind", ["rank_absent", "cut_off"])
def test_launch_with_a_culprit_other_than_its_launcher_lists_its_ranks(
    run: HostRun, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    verdict = Culprit(kind=kind, hosts=("h1",), text="host h1 …")
    monkeypatch.setattr(GangMonitor, "poll", lambda *_: verdict)
    done = launch(run, "sleep 60").launches[0]
    assert (done.culprit, len(done.ranks)) == (verdict, 2)


def test_rank_that_cannot_join_the_process_group_is_the_culprit_in_a_gang(run: HostRun) -> None:
    """Both ranks of h1 end with exit code 0. Rank 1 recorded in its state file why it could not join (`unable`)."""
    why = "the device was lost: CUDA error: uncorrectable ECC error encountered"
    state = json.dumps({"phase": "end", "exit_code": 0, "unable": why})
    lines: list[str] = []
    done = launch(run, f"echo '{state}' > rank1.state.json", members=("h1", "h2"), report=lines.append).launches[0]
    text = f'host h1 cpu=1 rank 1 in phase "readiness check": cannot take part: {why}'
    assert (done.outcome, done.reason, lines) == ("failed", text, [f"stage benchmark: {text}"])
    assert done.culprit == Culprit(
        kind="rank_unable", hosts=("h1",), text=text, scope="cpu=1", rank=1, phase="readiness check"
    )


@pytest.mark.parametrize(
    ("reasons", "unfit", "scope"),
    [
        (["no kernels for this GPU", "no kernels for this GPU"], [], ""),
        (["", "no kernels for this GPU"], [1], ""),
        (["", "the device was lost"], [], "cpu=1"),
        (["the device was lost: ECC", "the device was lost: XID"], [], "cpu=0"),
        (["the device was lost", "no kernels for this GPU"], [1], "cpu=0"),
        (["no kernels for this GPU", "the device was lost"], [0], "cpu=1"),
    ],
)
def test_device_is_not_the_culprit_if_the_software_or_all_devices_of_its_host_are_unfit(
    run: HostRun, reasons: list[str], unfit: list[int], scope: str
) -> None:
    states = [
        json.dumps({"phase": "end", "exit_code": 0, "unable": reason, "is_software_unfit": rank in unfit})
        for rank, reason in enumerate(reasons)
    ]
    program = "; ".join(f"echo '{state}' > rank{rank}.state.json" for rank, state in enumerate(states))
    done = launch(run, program, members=("h1", "h2")).launches[0]
    assert done.culprit
    assert (done.culprit.kind, done.culprit.scope) == ("rank_unable", scope)
    assert done.culprit.text.startswith(f"host h1 {scope} rank ".replace("  ", " "))


def test_invalid_result_files_are_listed_after_the_ranks_that_cannot_join_the_process_group(run: HostRun) -> None:
    state = json.dumps({"phase": "end", "exit_code": 0, "unable": "the device was lost"})
    program = f"echo '{state}' | tee rank0.state.json > rank1.state.json; echo [] > rank1.json"
    done = launch(run, program, members=("h1", "h2")).launches[0]
    assert done.culprit
    assert done.culprit.text.endswith(
        'rank 0 in phase "readiness check": cannot take part: the device was lost; 1 more rank of this host cannot either'
    )
    assert done.reason.startswith(f"{done.culprit.text}; no result of rank 1: ")


def test_deadline_is_reported_despite_a_rank_that_cannot_join_the_process_group(run: HostRun) -> None:
    state = json.dumps({"phase": "end", "exit_code": 0, "unable": "the device was lost"})
    slow = f"echo '{state}' > rank1.state.json; sleep 60"
    done = launch(run, slow, members=("h1", "h2"), deadline_s=0.5).launches[0]
    assert (done.outcome, done.culprit) == ("deadline", None)


def test_launch_on_a_single_host_has_no_culprit_despite_a_rank_that_cannot_join_the_process_group(run: HostRun) -> None:
    state = json.dumps({"phase": "end", "exit_code": 0, "unable": "the device was lost"})
    done = launch(run, f"echo '{state}' > rank1.state.json").launches[0]
    assert (done.outcome, done.culprit) == ("finished", None)


def processes_in(directory: Path) -> list[str]:
    """Return the ids of the processes whose working directory is `directory`."""
    pids = []
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if entry.name.isdigit() and (entry / "cwd").readlink() == directory:
                pids.append(entry.name)
    return pids


def test_launch_is_ended_and_reported_at_its_deadline(run: HostRun) -> None:
    lines: list[str] = []
    done = launch(run, "sleep 60 & sleep 60", report=lines.append, deadline_s=0.5).launches[0]
    assert lines == ["stage benchmark: not finished after 0.5 s; ending all processes of the launch"]
    assert (done.outcome, done.culprit) == ("deadline", None)
    assert processes_in(run.directory / "work") == []


SEND_MESSAGE = """
{python} - <<'END'
import json, socket
with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as channel:
    channel.connect("heartbeats")
    channel.send(json.dumps({message}).encode())
END
sleep 60
"""
"""Shell program that sends the dictionary `message` to the heartbeat receiver in its working directory, and then sleeps."""


def test_launch_ends_at_once_if_a_culprit_is_found(run: HostRun, monkeypatch: pytest.MonkeyPatch) -> None:
    (run.directory / "work").mkdir()
    os.mkfifo(run.directory / "work" / "flight.rank0.pipe")
    reader = os.open(run.directory / "work" / "flight.rank0.pipe", os.O_RDONLY | os.O_NONBLOCK)
    # `launch` fails if the work directory exists, so the pipe waits in `prepared` until the program moves it.
    (run.directory / "work").rename(run.directory / "prepared")
    monkeypatch.setattr(process_tree, "GRACE_S", 60.0)
    monkeypatch.setattr(supervise, "CULPRIT_GRACE_S", 0.1)
    lines: list[str] = []
    message = {"kind": "end", "rank": 1, "at": 0.0, "code": -11, "terminated_by_launcher": False}
    program = "trap '' TERM; mv ../prepared/* .;" + SEND_MESSAGE.format(python=sys.executable, message=message)
    done = launch(run, program, report=lines.append).launches[0]
    assert done.culprit is not None
    assert (done.outcome, done.culprit.kind, done.culprit.rank) == ("failed", "rank_ended", 1)
    assert lines == [f"stage benchmark: {done.culprit.text}; ending all processes of the launch"]
    assert done.reason == done.culprit.text
    assert os.read(reader, 1) == b"", "no dump may be requested if the culprit is a rank that ended"
    os.close(reader)
    assert done.duration_s < 10


# ---- monitors of several hosts ----


@pytest.fixture
def gang(port: int) -> Callable[..., Gang]:
    """Return a function that creates a gang of the hosts h1, h2, …, from the view of host `me`.

    All hosts have the same loopback address.
    """

    def make_gang(me: str, hosts: int = 2) -> Gang:
        members = tuple(f"h{number}" for number in range(1, hosts + 1))
        addresses = dict.fromkeys(members, loopback_address(port))
        return Gang(me=me, members=members, addresses=addresses, port=port, nonce=builders.NONCE, context="r1 gang r1")

    return make_gang


@pytest.fixture
def monitors(tmp_path: Path, gang: Callable[..., Gang]) -> Iterator[list[GangMonitor]]:
    """Yield the monitors of h1 and h2, the hosts of a gang."""
    monitors = []
    for number in (1, 2):
        path = tmp_path / f"h{number}"
        path.mkdir()
        receiver = HeartbeatReceiver(path, {number - 1: "gpu=0"})
        monitors.append(GangMonitor(f"h{number}", receiver, PeerChannel(gang(f"h{number}")), 60.0))
    yield monitors
    for gang_monitor in monitors:
        gang_monitor._receiver.close()
        assert gang_monitor._channel
        gang_monitor._channel.close()


def connect(first: GangMonitor, second: GangMonitor) -> tuple[PeerChannel, PeerChannel]:
    """Poll the monitors of h1 and h2 until each host has the status of the other host; return the channels of h1 and h2."""
    first_channel, second_channel = first._channel, second._channel
    assert first_channel
    assert second_channel
    end = time.monotonic() + 5
    while not (
        "h1" in second_channel.statuses and "h2" in first_channel.statuses and first_channel.statuses["h2"].ranks
    ):
        assert time.monotonic() < end, "the hosts have not exchanged statuses after 5 s"
        for gang_monitor in (first, second):
            gang_monitor.poll(0.005)
    return first_channel, second_channel


def test_verdict_of_the_first_host_reaches_the_host_of_the_culprit(
    monitors: list[GangMonitor], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(culprit, "SETTLE_S", 0.1)
    connect(*monitors)
    send_to_receiver(tmp_path / "h2", "end", rank=1, code=-9, terminated_by_launcher=False)
    end = time.monotonic() + 5
    while not (monitors[0].poll(0.01) and monitors[1].poll(0.01)):
        monitors[1].poll(0.01)
        assert time.monotonic() < end, "the monitors name no culprit after 5 s"
    first, second = monitors[0].poll(0.0), monitors[1].poll(0.0)
    assert first == second
    assert first is not None
    assert first.text == 'host h2 gpu=0 rank 1 in phase "start": killed by SIGKILL'


def test_no_culprit_after_a_host_ended_its_own_ranks(
    monitors: list[GangMonitor], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """h1 ends its own ranks, as a host does at its deadline. The rank of h2 that then fails is not the culprit."""
    monkeypatch.setattr(culprit, "SETTLE_S", 0.1)
    monkeypatch.setattr(monitor, "SETTLE_S", 0.1)
    _, second_channel = connect(*monitors)
    monitors[0].announce_abort()
    exiting = threading.Thread(target=monitors[0].announce_exit, daemon=True)
    exiting.start()
    send_to_receiver(tmp_path / "h2", "end", rank=1, code=1, terminated_by_launcher=False)
    end = time.monotonic() + 5
    while not second_channel.statuses["h1"].finished:
        assert monitors[1].poll(0.01) is None
        assert time.monotonic() < end, "h2 does not know after 5 s that h1 has finished"
    assert second_channel.statuses["h1"].aborted
    assert monitors[1].await_verdict(1) is None
    exiting.join(5)


def test_poll_returns_when_a_rank_of_this_host_sends_a_message(monitors: list[GangMonitor], tmp_path: Path) -> None:
    connect(*monitors)
    for _ in range(5):
        monitors[0].poll(0.01)
    send_to_receiver(tmp_path / "h1", "end", rank=0, code=0, terminated_by_launcher=False)
    began = time.monotonic()
    monitors[0].poll(20.0)
    assert time.monotonic() - began < 10


def test_host_sends_its_last_status_and_waits_only_until_it_is_received(
    monitors: list[GangMonitor], tmp_path: Path, gang: Callable[..., Gang]
) -> None:
    _, second_channel = connect(*monitors)
    send_to_receiver(tmp_path / "h1", "end", code=0, terminated_by_launcher=False)
    monitors[0].poll(0.0)

    def listen() -> None:
        while not second_channel.statuses["h1"].finished:
            second_channel.poll(0.01)

    listener = threading.Thread(target=listen, daemon=True)
    listener.start()
    began = time.monotonic()
    monitors[0].announce_exit()
    listener.join(5)
    assert second_channel.statuses["h1"].finished
    assert second_channel.statuses["h1"].ranks[0].exit_code == 0, (
        "the last status must contain the exit code of the rank"
    )
    assert time.monotonic() - began < monitor.EXIT_ANNOUNCEMENT_S / 2
    assert second_channel.verdict is None
    PeerChannel(gang("h1")).close()  # the port is free for the next launch


def test_supervisor_names_no_culprit_after_its_own_pause(
    monitors: list[GangMonitor], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first_channel, _ = connect(*monitors)
    real_clock = time.monotonic
    monkeypatch.setattr(time, "monotonic", lambda: real_clock() + HOST_SILENT_S + 5)
    assert monitors[0].poll(0.0) is None
    assert time.monotonic() - first_channel.statuses["h2"].at < 5


def test_exiting_host_waits_until_both_watchers_have_answered_its_last_status(
    receiver: HeartbeatReceiver, tmp_path: Path, gang: Callable[..., Gang]
) -> None:
    """The watchers are the first two hosts of a gang. They receive the statuses of all hosts."""
    watchers, channel = [PeerChannel(gang(host, 3)) for host in ("h1", "h2")], PeerChannel(gang("h3", 3))
    gang_monitor = GangMonitor("h3", receiver, channel, 60.0)
    end = time.monotonic() + 5
    while set(channel.statuses) != {"h1", "h2", "h3"}:
        assert time.monotonic() < end, f"h3 has only the statuses of {set(channel.statuses)} after 5 s"
        gang_monitor.poll(0.005)
        for watcher in watchers:
            watcher.poll(0.0)
    send_to_receiver(tmp_path, "end", rank=1, code=3, terminated_by_launcher=True)

    def listen() -> None:
        for watcher in watchers:
            while not watcher.statuses["h3"].finished:
                watcher.poll(0.01)

    listener = threading.Thread(target=listen, daemon=True)
    listener.start()
    began = time.monotonic()
    assert gang_monitor.states()[1].exit_code == 3
    gang_monitor.announce_exit()
    listener.join(5)
    assert [watcher.statuses["h3"].ranks[1].exit_code for watcher in watchers] == [3, 3]
    assert channel._answered == {"h1": channel._number, "h2": channel._number}
    assert time.monotonic() - began < monitor.EXIT_ANNOUNCEMENT_S / 2
    for watcher in watchers:
        watcher.close()


def test_second_watcher_names_a_culprit_only_after_the_first_watcher_has_finished(
    receiver: HeartbeatReceiver, tmp_path: Path, clock: FakeClock, gang: Callable[..., Gang]
) -> None:
    """h1, the first watcher, decides about the culprit while it runs. This host is h2, the second watcher."""
    channel = PeerChannel(gang("h2", 3))
    gang_monitor = GangMonitor("h2", receiver, channel, 60.0)
    send_to_receiver(tmp_path, "end", rank=1, code=-9, terminated_by_launcher=False, at=clock.now - 50)
    for finished, is_named in ((False, False), (True, True)):
        clock.now += 1.0
        channel.statuses = {host: PeerStatus(at=clock.now, finished=finished) for host in ("h1", "h3")}
        culprit_found = gang_monitor.poll(0.0)
        assert (culprit_found is not None) == is_named
    channel.close()


@pytest.mark.parametrize(
    ("me", "ages", "seconds", "settled"),
    [
        ("h1", {"h2": 0.0, "h3": 0.0}, 2 * SETTLE_S - 0.1, False),
        ("h1", {"h2": 0.0, "h3": 0.0}, 2 * SETTLE_S + 0.1, True),
        ("h1", {"h2": 0.0, "h3": UNSURE_S}, 2 * SETTLE_S + 0.1, True),
        ("h1", {"h2": 0.0, "h3": UNSURE_S + 0.5}, 2 * SETTLE_S + 0.1, False),
        ("h1", {"h2": 0.0, "h3": UNSURE_S + 0.5}, 2 * SETTLE_S, False),
        ("h1", {"h2": 0.0}, 2 * SETTLE_S + 0.1, False),
        ("h1", {"h2": 0.0, "h3": None}, 2 * SETTLE_S + 0.1, True),
        ("h2", {"h1": 0.0, "h3": 0.0}, 2 * SETTLE_S + 0.1, False),
        ("h2", {"h1": None, "h3": 0.0}, 2 * SETTLE_S + 0.1, True),
        ("h2", {"h1": 0.0, "h3": 0.0}, HOST_SILENT_S + 2 * SETTLE_S, False),
        ("h2", {"h1": 0.0, "h3": 0.0}, HOST_SILENT_S + 2 * SETTLE_S + 0.1, True),
    ],
)
def test_wait_for_a_verdict_is_longer_if_another_host_decides_or_a_status_is_overdue(
    receiver: HeartbeatReceiver,
    clock: FakeClock,
    gang: Callable[..., Gang],
    me: str,
    ages: dict[str, float | None],
    seconds: float,
    settled: bool,
) -> None:
    """The short wait is 2 * SETTLE_S. The long wait is HOST_SILENT_S longer. Until h1 has finished, h1 decides. Then h2 decides.

    Args:
        me: this host.
        ages: age of the newest status of each other host, in seconds; overdue if above UNSURE_S. None: the host has finished,
            and its status is 5 s old. A host that is missing in `ages` has sent no status, which also counts as overdue.
        seconds: how long the monitor has waited since its launcher ended.
        settled: whether the monitor stops waiting.
    """
    clock.now = UNSURE_S  # a status of the age UNSURE_S then has the time 0, without a rounding error
    channel = PeerChannel(gang(me, 3))
    gang_monitor = GangMonitor(me, receiver, channel, 60.0)
    channel.statuses = {
        host: PeerStatus(at=clock.now - (5.0 if age is None else age), finished=age is None)
        for host, age in ages.items()
    }
    assert gang_monitor._is_settled(seconds) is settled
    channel.close()
