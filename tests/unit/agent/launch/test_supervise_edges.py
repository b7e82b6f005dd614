"""What the supervisor keeps, whom it ends, and when its watch is over: piece by piece, by a clock and a /proc that are set."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import select
import signal
import stat
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
from agent.gang.rank_state import RankState
from agent.launch import process_tree, supervise
from agent.launch.outcome import RanksEnd, conclude
from agent.launch.process_tree import ProcessTree
from agent.run import work_directory
from agent.run.record import HostRun
from agent.run.work_directory import (
    MAX_ARCHIVED_ATTEMPTS,
    MAX_LOG_BYTES,
    archive_logs,
    benchmark_start_times,
    read_rank_end,
    read_results,
    read_tail,
    truncate_logs,
    write_request,
)
from agent.sampling import snapshot_sampler
from agent.sampling.oom import OomWatch
from agent.sampling.snapshot_sampler import SnapshotSelector
from collectors.base import Family
from schemas.records import Culprit, Metric, Rank, Record, Snapshot, to_json
from schemas.stages import CELL, PROBE, SOAK
from tests import builders
from tests.gangs import FakeClock, FakeProc, loopback_address, send_to_receiver
from tests.launches import launch_program
from tests.unit.agent.sampling.test_oom import Tree

# ---- which snapshots are kept ----


def snapshot(at: int, watts: Any = 0.0, alarm: str = "", absent: str = "") -> Snapshot:
    throttle = {f"gpu=0,reason={name}": name == alarm for name in ("power_cap", "hw_slowdown", "sw_thermal")}
    return Snapshot(
        stage="benchmark",
        phase="during",
        at=f"2026-11-21T04:00:{at:02}Z",
        duration_s=0.1,
        metrics=(
            Metric(name="gpu.power", unit="W", values={"gpu=0": watts, "gpu=1": "none"}),
            Metric(name="gpu.throttle.active", unit="1", values=throttle),
            Metric(
                name="gpu.clock",
                unit="Hz",
                values={"gpu=0": 3e9 - 1e6 * watts},
                absent={"gpu=0": absent} if absent else {},
            ),
        ),
    )


def kept(*seen: Snapshot) -> list[int]:
    selector = SnapshotSelector()
    for each in seen:
        selector.add(each)
    return [int(each.at[-3:-1]) for each in selector.selected()]


def test_the_snapshot_under_the_highest_load_is_kept() -> None:
    assert kept() == []
    assert kept(snapshot(1)) == [1]
    assert kept(snapshot(1, 300.0), snapshot(2, 700.0), snapshot(3, 400)) == [2]


@pytest.mark.parametrize(
    ("alarm", "absent", "kept_too"),
    [
        ("", "", False),
        ("power_cap", "", False),
        ("hw_slowdown", "", True),
        ("", "error: the driver says no", True),
        ("", "unsupported: not on this host", False),
    ],
)
def test_snapshot_with_an_alarm_is_kept(alarm: str, absent: str, kept_too: bool) -> None:
    observed = snapshot(1, 100.0, alarm, absent), snapshot(2, 700.0)
    assert kept(*observed) == ([1, 2] if kept_too else [2])
    assert kept(*reversed(observed)) == ([1, 2] if kept_too else [2]), "in the order of their times"


def test_of_the_snapshots_that_alarm_the_first_three_are_kept_and_none_twice() -> None:
    alarms = [snapshot(number, 500.0 - number, "hw_slowdown") for number in range(5)]
    assert kept(*alarms) == [0, 1, 2]
    assert kept(*alarms, snapshot(9, 700.0)) == [0, 1, 2, 9]


# ---- the process tree ----


class Table:
    """Processes in a /proc of our own, and the signals that they got; SIGKILL, and SIGTERM unless stubborn, ends one."""

    def __init__(self, root: Path) -> None:
        self.proc, self.root = FakeProc(root), root
        self.sent: list[tuple[int, signal.Signals]] = []
        self.stubborn: set[int] = set()
        (root / "self").mkdir(parents=True)
        (root / "99").mkdir()  # gone between two looks
        self.proc.put(1, parent=0)

    def put(self, pid: int, parent: int, start_time: int = 7, state: str = "S") -> None:
        self.proc.put(pid, state, parent=parent, start_time=start_time)

    def remove(self, pid: int) -> None:
        (self.root / str(pid) / "stat").unlink()

    def kill(self, pid: int, number: int) -> None:
        if not (self.root / str(pid) / "stat").exists():
            raise ProcessLookupError
        self.sent.append((pid, signal.Signals(number)))
        if number == signal.SIGKILL or (number == signal.SIGTERM and pid not in self.stubborn):
            self.remove(pid)


@pytest.fixture
def table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Table:
    made = Table(tmp_path / "proc")
    monkeypatch.setattr(process_tree, "Path", lambda name: made.root if name == "/proc" else Path(name))
    monkeypatch.setattr(os, "kill", made.kill)
    return made


def test_a_tree_is_all_that_came_of_a_process_and_nothing_else(table: Table) -> None:
    for pid, parent in ((10, 1), (12, 11), (11, 10), (20, 1), (21, 20)):
        table.put(pid, parent)
    table.put(13, 10, state="Z")
    assert sorted(ProcessTree(10).pids()) == [10, 11, 12]


def test_an_orphan_stays_of_the_tree_and_so_does_what_it_starts(table: Table) -> None:
    table.put(10, 1)
    table.put(11, 10)
    tree = ProcessTree(10)
    table.remove(10)
    table.put(11, 1)
    table.put(12, 11)
    tree.scan()
    assert sorted(tree.alive()) == [11, 12]
    assert sorted(tree.pids()) == [10, 11, 12]


def test_a_stranger_with_the_number_of_one_that_ended_is_none_of_the_tree(table: Table) -> None:
    table.put(10, 1)
    table.put(11, 10)
    tree = ProcessTree(10)
    table.put(11, 1, start_time=8)
    table.put(12, 11)
    tree.scan()
    assert tree.alive() == [10]
    tree.end(0.0)
    assert {pid for pid, _ in table.sent} == {10}


def test_a_tree_is_asked_to_end_and_then_ended(table: Table, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_tree, "GRACE_S", 0.0)
    for pid, parent in ((10, 1), (11, 10), (12, 10)):
        table.put(pid, parent)
    table.stubborn = {11}
    tree = ProcessTree(10)
    table.put(13, 12)  # since the last look
    tree.end()
    sent = {pid: [number for to, number in table.sent if to == pid] for pid in (10, 11, 12, 13)}
    assert sent == {
        10: [signal.SIGTERM],
        11: [signal.SIGTERM, signal.SIGCONT, signal.SIGKILL],
        12: [signal.SIGTERM],
        13: [signal.SIGTERM],
    }
    assert tree.alive() == []


def test_who_ends_within_the_grace_is_not_killed_and_who_comes_meanwhile_is(
    table: Table, clock: FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    table.put(10, 1)
    table.put(11, 10)
    table.stubborn = {10, 11}
    waited: list[float] = []

    def wait(seconds: float) -> None:
        waited.append(seconds)
        clock.now += 1.0
        if len(waited) == 2:
            table.put(12, 11)
        if len(waited) == 3:
            table.remove(10)

    # Its own alone: a thread of an earlier test may sleep, too.
    monkeypatch.setattr(process_tree, "time", SimpleNamespace(sleep=wait, monotonic=clock))
    ProcessTree(10).end(4.5)
    killed = [pid for pid, number in table.sent if number == signal.SIGKILL]
    assert sorted(killed) == [11, 12]
    assert len(waited) == 5, "no longer than the grace"


def test_a_tree_that_has_ended_costs_no_time(table: Table, clock: FakeClock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        process_tree, "time", SimpleNamespace(sleep=lambda _: pytest.fail("it waited"), monotonic=clock)
    )
    table.put(10, 1)
    tree = ProcessTree(10)
    tree.end(60.0)
    tree.end(60.0)
    assert [pid for pid, number in table.sent if number == signal.SIGKILL] == []


# ---- how it ended, in words ----


def rank(number: int, exit_code: int | None, phase: str = "gemm bf16") -> Rank:
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
            "the launcher exited with 0: rank 0 in gemm bf16 (no exit code of its own), rank 1 in start (exit code 3)",
        ),
    ],
)
def test_an_outcome_names_every_rank_that_did_not_end_well(
    exit_code: int | None, ranks: list[Rank], outcome: str, reason: str
) -> None:
    more = "; a process of this launch was killed by the out-of-memory killer" if reason else ""
    for oom_kill, expected in (("", reason), ("killed by the out-of-memory killer", reason + more)):
        end = RanksEnd(exit_code=exit_code, culprit=None, states={}, oom_kill=oom_kill, any_rank_started=True)
        conclusion = conclude(end, host="h1", ranks=ranks, excluded={}, problems=[], deadline_s=9.0)
        assert (conclusion.outcome, conclusion.reason) == (outcome, expected)


SEEN = RankState(rank=0, scope="gpu=0", phase="stress", exit_code=-9)


@pytest.mark.parametrize(
    ("state", "observed", "phase", "exit_code"),
    [
        ({"phase": "end", "exit_code": 3}, SEEN, "end", 3),
        ({"phase": "gemm", "exit_code": None}, SEEN, "gemm", -9),
        ({"phase": "gemm"}, SEEN, "stress", -9),
        ([], SEEN, "stress", -9),
        (None, SEEN, "stress", -9),
        (None, RankState(rank=0, scope="gpu=0", exit_code=-15), "", None),
        (None, RankState(rank=0, scope="gpu=0", exit_code=-9, terminated_by_launcher=True), "", None),
        (None, RankState(rank=0, scope="gpu=0"), "", None),
        (None, RankState(rank=0, scope="gpu=0", exit_code=0), "", 0),
        ({"phase": "x" * 600, "exit_code": 0}, SEEN, "x" * 512, 0),
    ],
)
def test_a_ranks_end_is_what_it_wrote_itself_or_else_what_its_guard_saw(
    tmp_path: Path, state: Any, observed: RankState, phase: str, exit_code: int | None
) -> None:
    if state is not None:
        (tmp_path / "rank5.state.json").write_text(json.dumps(state))
    (tmp_path / "rank5.log").write_text("bye")
    results = read_rank_end(tmp_path, 5, 1, observed)
    assert results == Rank(rank=5, local_rank=1, phase=phase, exit_code=exit_code, log_tail="bye")


# ---- what the ranks left ----


def test_a_benchmark_began_when_the_first_rank_came_to_it(tmp_path: Path) -> None:
    for number, said in enumerate(
        [
            {"begun": {"stress": 30.0, "gemm": 12.0, "no such": 1.0, "memory": 5}},
            {"begun": {"gemm": 11.0, "stress": 31.0, "digest": 8.0}},
            {"begun": []},
            {"phase": "start"},
            [],
        ]
    ):
        (tmp_path / f"rank{number}.state.json").write_text(json.dumps(said))
    assert list(benchmark_start_times(tmp_path, range(7)).items()) == [
        ("digest", 8.0),
        ("gemm", 11.0),
        ("stress", 30.0),
    ]


def result(number: int, **over: Any) -> dict[str, Any]:
    values = {
        "name": "gemm.throughput",
        "scope": f"cpu={number}",
        "stage": "benchmark",
        "unit": "FLOP/s",
        "status": "measured",
    }
    return {"rank": number, "observations": [{**values, "value": 1.0}], "software": {f"lib{number}": "2"}, **over}


def test_what_the_ranks_measured_is_taken_in_their_order(tmp_path: Path) -> None:
    for number in (10, 2):
        (tmp_path / f"rank{number}.json").write_text(json.dumps(result(number)))
    results = read_results(tmp_path, (10, 3, 2))
    assert [observation.scope for observation in results.observations] == ["cpu=2", "cpu=10"]
    assert (results.windows, results.software) == ((), {"lib2": "2", "lib10": "2"})
    assert len(results.problems) == 1
    assert results.problems[0].startswith("no result of rank 3: ")


def test_the_end_of_a_log_is_its_last_bytes(tmp_path: Path) -> None:
    log = tmp_path / "log"
    assert read_tail(log) == ""
    log.write_bytes(b"a\xffbc")
    assert (read_tail(log), read_tail(log, 2), read_tail(log, 3)) == ("a\ufffdbc", "bc", "\ufffdbc")
    log.write_bytes(b"x" * 10_000)
    assert len(read_tail(log)) == 4000


def test_a_request_lies_where_the_ranks_read_it(tmp_path: Path) -> None:
    path = write_request(tmp_path, {"stage": "gang"})
    assert (path.name, json.loads(path.read_text())) == ("request.json", {"stage": "gang"})


def test_only_what_the_ranks_wrote_themselves_is_cut(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(work_directory, "MAX_LOG_BYTES", 8)
    (tmp_path / "else").mkdir()
    for name in ("rank0.log", "flight.rank0", "rank0.json", "else/victim"):
        (tmp_path / name).write_text("123456789")
    (tmp_path / "rank1.log").write_text("12345678")
    (tmp_path / "rank2.log").symlink_to(tmp_path / "else" / "victim")
    os.mkfifo(tmp_path / "flight.rank0.pipe")
    truncate_logs(tmp_path)
    sizes = {path.name: path.lstat().st_size for path in tmp_path.iterdir() if stat.S_ISREG(path.lstat().st_mode)}
    assert sizes == {"rank0.log": 8, "flight.rank0": 8, "rank0.json": 9, "rank1.log": 8}
    assert (tmp_path / "else" / "victim").stat().st_size == 9
    assert not (tmp_path / "flight.rank0.pipe").exists()


def test_the_oldest_attempts_of_the_same_stage_make_room(tmp_path: Path) -> None:
    work, logs = tmp_path / "gang", tmp_path / "logs"
    work.mkdir()
    archive_logs(work, logs)
    assert not logs.exists(), "there was no attempt before"
    for number in range(8):
        (logs / f"gang.{number}").mkdir(parents=True)
        os.utime(logs / f"gang.{number}", (0, 100 - number))  # the last name is the oldest
    (logs / "benchmark.1").mkdir()
    os.utime(logs / "benchmark.1", (0, 0))
    (logs / "gang.file").write_text("")
    (work / "rank0.log").write_text("")
    (work / "request.json").write_text("{}")
    archive_logs(work, logs)
    left = {path.name for path in logs.iterdir()}
    assert left > {"benchmark.1", "gang.file", *(f"gang.{number}" for number in range(7))}
    assert "gang.7" not in left
    assert [path.name for path in work.iterdir()] == ["request.json"]


def test_logs_and_dumps_of_an_attempt_are_kept_and_bounded(tmp_path: Path) -> None:
    for attempt in range(MAX_ARCHIVED_ATTEMPTS + 2):
        work = tmp_path / "work" / "gang"
        work.mkdir(parents=True, exist_ok=True)
        (work / "rank0.log").write_text(f"attempt {attempt}")
        (work / "flight.rank0").write_bytes(b"\x80")
        os.mkfifo(work / "flight.rank0.pipe")
        with (work / "launcher.log").open("wb") as log:
            log.truncate(MAX_LOG_BYTES + 1)
        truncate_logs(work)
        assert not (work / "flight.rank0.pipe").exists()
        archive_logs(work, tmp_path / "logs")
        assert list(work.iterdir()) == []
    kept = sorted((tmp_path / "logs").iterdir())
    assert len(kept) == MAX_ARCHIVED_ATTEMPTS
    assert (kept[-1] / "rank0.log").read_text() == f"attempt {MAX_ARCHIVED_ATTEMPTS + 1}"
    assert (kept[-1] / "flight.rank0").exists()
    assert (kept[-1] / "launcher.log").stat().st_size == MAX_LOG_BYTES


# ---- the watch ----


@pytest.fixture
def receiver(tmp_path: Path) -> Iterator[HeartbeatReceiver]:
    made = HeartbeatReceiver(tmp_path, {0: "gpu=0", 1: "gpu=1"})
    yield made
    made.socket.close()


@pytest.fixture
def watch(receiver: HeartbeatReceiver, clock: FakeClock) -> GangMonitor:
    return GangMonitor("h1", receiver, None, 60.0)


def test_killed_rank_is_named_after_the_peers_had_time_to_report(
    watch: GangMonitor, tmp_path: Path, clock: FakeClock
) -> None:
    send_to_receiver(tmp_path)
    send_to_receiver(tmp_path, "end", rank=1, code=-9, terminated_by_launcher=False)
    assert watch.poll(0.0) is None
    clock.now += SETTLE_S + 0.1
    results = watch.poll(0.0)
    assert results is not None
    assert (results.kind, results.rank, results.hosts) == ("rank_ended", 1, ("h1",))
    assert watch.poll(0.0) is results, "the first verdict stays"
    clock.now += 1.0
    assert watch.poll(0.0) is results


def test_news_are_thought_about_at_once(watch: GangMonitor, tmp_path: Path, clock: FakeClock) -> None:
    clock.now += 50.0
    assert watch.poll(0.0) is None
    clock.now += 0.05
    send_to_receiver(tmp_path, "end", rank=1, code=-9, terminated_by_launcher=False, at=900.0)
    assert watch.poll(0.0) is not None


def test_oom_killed_rank_is_reported_with_its_reason(
    receiver: HeartbeatReceiver, tmp_path: Path, clock: FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    tree = Tree(tmp_path / "root", 2)
    monkeypatch.setattr(monitor, "OomWatch", functools.partial(OomWatch, tree.root))
    watch = GangMonitor("h1", receiver, None, 60.0)
    send_to_receiver(tmp_path, "end", rank=0, code=1, terminated_by_launcher=False)
    send_to_receiver(tmp_path, "end", rank=1, code=-9, terminated_by_launcher=True)
    assert watch.out_of_memory_reason() == ""
    tree.group("slice/session", kills=1)
    assert [state.why for state in watch.states().values()] == ["", ""], "neither ended by a stranger's SIGKILL"
    receiver.close()
    other = HeartbeatReceiver(tmp_path, {0: "gpu=0", 1: "gpu=1"})
    watch = GangMonitor("h1", other, None, 60.0)
    send_to_receiver(tmp_path)
    send_to_receiver(tmp_path, "end", rank=1, code=-9, terminated_by_launcher=False)
    tree.group("slice/session", kills=2)
    why = [state.why for state in watch.states().values()]
    tree.group("slice/session", kills=9)
    assert why == [state.why for state in watch.states().values()], "as it was when it ended"
    other.close()
    assert why[0] == ""
    assert why[1].startswith("killed by the kernel's out-of-memory killer (oom_kill 1")


class Running(FakeClock):
    """A clock that goes on by itself, a second whenever somebody looks."""

    def __call__(self) -> float:
        self.now += 0.25
        return self.now


@pytest.fixture
def running(monkeypatch: pytest.MonkeyPatch) -> Running:
    made = Running()
    monkeypatch.setattr(time, "monotonic", made)
    monkeypatch.setattr(select, "select", lambda *_: ([], [], []))
    return made


def test_no_waiting_after_success(receiver: HeartbeatReceiver, tmp_path: Path, running: Running) -> None:
    watch = GangMonitor("h1", receiver, None, 60.0)
    send_to_receiver(tmp_path, "end", code=0, terminated_by_launcher=False)
    before = running.now
    assert watch.await_verdict(0) is None
    assert running.now - before < 2.0


@pytest.mark.parametrize(
    "wrong",
    [{"code": 1}, {"failure": "error", "failed_at": 1000.0}, {"exit_code": 1}],
    ids=["launcher", "broken", "rank"],
)
def test_after_a_bad_end_the_verdict_is_waited_for_a_while(
    receiver: HeartbeatReceiver, tmp_path: Path, running: Running, wrong: dict[str, Any]
) -> None:
    watch = GangMonitor("h1", receiver, None, 60.0)
    if "failure" in wrong:
        send_to_receiver(tmp_path, **wrong)
    send_to_receiver(tmp_path, "end", code=wrong.get("exit_code", 0), terminated_by_launcher="exit_code" in wrong)
    before = running.now
    assert watch.await_verdict(wrong.get("code", 0)) is None
    assert 2 * SETTLE_S <= running.now - before < 3 * SETTLE_S


def test_culprit_is_named_after_a_failure(receiver: HeartbeatReceiver, tmp_path: Path, running: Running) -> None:
    watch = GangMonitor("h1", receiver, None, 60.0)
    send_to_receiver(tmp_path, "end", code=-11, terminated_by_launcher=False)
    results = watch.await_verdict(1)
    assert results is not None
    assert results.text.endswith("killed by SIGSEGV")


@pytest.mark.parametrize(
    ("exit_code", "reported"), [(-9, "its launcher was killed by SIGKILL"), (1, "its launcher ended with exit code 1")]
)
def test_rank_terminated_by_a_launcher_that_exited_unprompted_is_named(
    receiver: HeartbeatReceiver, tmp_path: Path, running: Running, exit_code: int, reported: str
) -> None:
    watch = GangMonitor("h1", receiver, None, 60.0)
    send_to_receiver(tmp_path, "end", rank=0, code=-15, terminated_by_launcher=True)
    send_to_receiver(tmp_path, "end", rank=1, code=0, terminated_by_launcher=False)
    results = watch.await_verdict(exit_code)
    assert results is not None
    assert (results.kind, results.scope, results.rank) == ("rank_ended", "", 0)
    assert results.text == f'host h1 rank 0 in phase "start": {reported}'


@pytest.mark.parametrize(
    ("exit_code", "reported"),
    [
        (-9, "was killed by SIGKILL before any rank started"),
        (1, "ended with exit code 1 before any rank started: no libcudart"),
    ],
)
def test_a_launcher_that_ends_before_its_ranks_begin_is_named_to_a_gang(
    receiver: HeartbeatReceiver,
    tmp_path: Path,
    running: Running,
    gang: Callable[..., Gang],
    exit_code: int,
    reported: str,
) -> None:
    """The others would wait for its ranks until the deadline. A host that is alone has nobody to tell."""
    assert GangMonitor("h1", receiver, None, 60.0).await_verdict(exit_code, "no libcudart") is None
    watch = GangMonitor("h2", receiver, PeerChannel(gang("h2", 3)), 60.0)
    assert watch._channel
    watch._channel.statuses = {host: PeerStatus(at=running.now, finished=True) for host in ("h1", "h3")}
    results = watch.await_verdict(exit_code, "no libcudart")
    assert results is not None
    assert (results.kind, results.hosts, results.scope, watch.has_started()) == ("rank_ended", ("h2",), "", False)
    assert results.text == f'host h2 rank 0 in phase "start": its launcher {reported}'
    assert watch.states()[0].exit_code == (1 if exit_code == 1 else None)
    send_to_receiver(tmp_path, "end", rank=1, code=0, terminated_by_launcher=False)
    assert (watch.states()[0].why, watch.has_started()) == ("", True)
    watch._channel.close()


@pytest.mark.parametrize(("exit_code", "named"), [(1, False), (-9, True), (-15, True), (-6, False)])
def test_a_launcher_that_ends_late_may_have_waited_for_another(
    receiver: HeartbeatReceiver, running: Running, gang: Callable[..., Gang], exit_code: int, named: bool
) -> None:
    """For the store of the first host, which never came: nobody is named, and short launches find out."""
    watch = GangMonitor("h2", receiver, PeerChannel(gang("h2", 3)), 60.0)
    running.now += 301.0
    assert watch._channel
    watch._channel.statuses = {host: PeerStatus(at=running.now, finished=True) for host in ("h1", "h3")}
    assert (watch.await_verdict(exit_code) is not None) == named
    watch._channel.close()


def test_a_launcher_ends_after_the_rank_that_failed(
    receiver: HeartbeatReceiver, tmp_path: Path, running: Running
) -> None:
    watch = GangMonitor("h1", receiver, None, 60.0)
    send_to_receiver(tmp_path, "end", rank=0, code=-15, terminated_by_launcher=True)
    send_to_receiver(tmp_path, "end", rank=1, code=3, terminated_by_launcher=False)
    results = watch.await_verdict(1)
    assert results is not None
    assert (results.rank, results.text.rpartition(": ")[2]) == (1, "ended with exit code 3")


def test_ranks_that_the_supervisor_ended_are_nobodys_fault(
    receiver: HeartbeatReceiver, tmp_path: Path, running: Running
) -> None:
    watch = GangMonitor("h1", receiver, None, 60.0)
    for rank in (0, 1):
        send_to_receiver(tmp_path, "end", rank=rank, code=-15, terminated_by_launcher=True)
    assert watch.await_verdict(None) is None
    assert all(state.terminated_by_launcher for state in watch.states().values())


def test_poll_waits_until_its_timeout_or_a_heartbeat(receiver: HeartbeatReceiver, tmp_path: Path) -> None:
    watch = GangMonitor("h1", receiver, None, 60.0)
    began = time.monotonic()
    watch.poll(0.05)
    assert time.monotonic() - began >= 0.05
    send_to_receiver(tmp_path)
    watch.poll(20.0)
    assert time.monotonic() - began < 10


def test_full_poll_is_not_taken_for_a_suspended_supervisor(
    receiver: HeartbeatReceiver, tmp_path: Path, clock: FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(select, "select", lambda *_: ([], [], []))
    watch = GangMonitor("h1", receiver, None, 60.0)
    send_to_receiver(tmp_path)
    watch.poll(0.0)
    clock.now += 2.5
    watch.poll(1.0)
    assert watch.states()[0].silent_s == 2.5
    clock.now += 3.5
    watch.poll(1.0)
    assert watch.states()[0].silent_s == 2.5, "that was one"


# ---- the flight recorders ----


def test_each_rank_that_listens_is_asked_for_its_dump_and_waited_for(
    tmp_path: Path, clock: FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits: list[float] = []
    sleep = time.sleep

    def wait(seconds: float) -> None:
        if threading.current_thread() is not threading.main_thread():
            sleep(seconds)  # one that an earlier test has left
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
        assert sum(waits[3:]) == pytest.approx(flight_recorder.DUMP_S, abs=0.1), "not for ever"
    finally:
        os.close(reader)
    waits.clear()
    dump_flight_records(tmp_path, [0, 1])
    assert waits == [], "nobody listens"


# ---- a whole launch ----


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> HostRun:
    for module in (culprit, monitor):
        monkeypatch.setattr(module, "SETTLE_S", 0.1)
    monkeypatch.setattr(supervise, "POLL_S", 0.02)
    monkeypatch.setattr(supervise, "PROCESS_SCAN_S", 0.02)
    monkeypatch.setattr(process_tree, "GRACE_S", 0.3)
    plan = builders.plan(profile="rehearsal")
    return HostRun.begin(tmp_path / "run", "h1", json.dumps(to_json(plan)))


def launch(run: HostRun, program: str, collectors: Sequence[Asked] = (), **over: Any) -> Record:
    """Supervises a shell program in place of torchrun, with two ranks on this host."""
    work = run.directory / "work"
    work.mkdir()
    for number in (0, 1):
        (work / f"rank{number}.json").write_text(json.dumps(result(number)))
        (work / f"rank{number}.state.json").write_text(json.dumps({"phase": "end", "exit_code": 0}))
    return launch_program(
        run,
        ["sh", "-c", textwrap.dedent(program)],
        environment={**os.environ, "TORCH_NCCL_TRACE_BUFFER_SIZE": "7", HEARTBEAT_DIRECTORY: "/nowhere"},
        ranks={0: 0, 1: 1},
        **{"collectors": collectors, "fast_collectors": collectors, **over},
    )


def test_ranks_get_their_supervisor_and_a_dump_directory(run: HostRun) -> None:
    before = time.monotonic()
    launch(run, 'env > env; pwd > place; cat > stdin; cut -d" " -f5,6 /proc/$$/stat > ids; echo $$ >> ids')
    work = run.directory / "work"
    reported = dict(line.partition("=")[::2] for line in (work / "env").read_text().splitlines())
    assert (reported[HEARTBEAT_DIRECTORY], reported[SUPERVISOR]) == (str(work), process_identity(os.getpid()))
    assert before <= float(reported[LAUNCHED]) <= time.monotonic()
    assert (work / "place").read_text().strip() == str(work)
    assert (work / "stdin").read_text() == ""
    assert len(set((work / "ids").read_text().split())) == 1, "a session of its own"
    assert reported["TORCH_NCCL_TRACE_BUFFER_SIZE"] == "7", "the site's word counts"
    assert flight_recorder_env(work)["TORCH_NCCL_TRACE_BUFFER_SIZE"] == "1000"
    assert (reported["TORCH_FR_BUFFER_SIZE"], reported["TORCH_NCCL_DUMP_ON_TIMEOUT"]) == ("1000", "1")
    for name in ("TORCH_NCCL_DEBUG_INFO_TEMP_FILE", "TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_PIPE_FILE"):
        assert reported[name] == str(work / "flight.rank")


def test_what_was_asked_for_stands_in_the_launch(run: HostRun) -> None:
    record = launch(
        run, "echo said; echo so >&2", gang="r1", stage="gang", members=("h1", "h2"), number=3, deadline_s=30.0
    )
    (done,) = record.launches
    assert (done.stage, done.members, done.number, done.deadline_s) == ("gang", ("h1", "h2"), 3, 30.0)
    assert (done.outcome, done.reason, done.culprit, done.timeline) == ("finished", "", None, None)
    assert done.log_tail == "said\nso\n"
    assert [(each.rank, each.local_rank, each.exit_code) for each in done.ranks] == [(0, 0, 0), (1, 1, 0)]
    assert 0 < done.duration_s < 20
    assert (done.observations, len(record.observations)) == ((), 2)
    assert [(taken.stage, taken.phase) for taken in record.snapshots] == [("gang", "before"), ("gang", "after")]
    assert run.record("r1") == record


def test_a_log_without_measure_is_cut(run: HostRun, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(work_directory, "MAX_LOG_BYTES", 8)
    assert launch(run, "echo 0123456789").launches[0].log_tail == "01234567"
    assert (run.directory / "work" / "launcher.log").stat().st_size == 8


def test_a_probe_keeps_what_it_measured_to_itself(run: HostRun) -> None:
    record = launch(run, "true", stage=PROBE)
    assert (record.snapshots, record.observations) == ((), ())
    assert [observation.scope for observation in record.launches[0].observations] == ["cpu=0", "cpu=1"]


class Asked:
    """A collector that tells by whom it was asked."""

    def __init__(self, name: str) -> None:
        self.name = name

    def collect(self) -> Iterator[Family]:
        yield Family(name=f"asked.{self.name}", unit="1", help="Asked.", readings=[({}, 1)])


@pytest.mark.parametrize(
    ("meanwhile", "asked"), [(None, "thorough"), ([Asked("quick")], "quick")], ids=["same", "other"]
)
def test_while_the_ranks_run_the_quick_collectors_are_asked(
    run: HostRun, monkeypatch: pytest.MonkeyPatch, meanwhile: list[Asked] | None, asked: str
) -> None:
    monkeypatch.setattr(snapshot_sampler, "PERIOD_S", 0.02)
    fast = [Asked("thorough")] if meanwhile is None else meanwhile
    record = launch(run, "sleep 0.3", [Asked("thorough")], fast_collectors=fast)
    observed = [
        (taken.stage, taken.phase, metric.name)
        for taken in record.snapshots
        for metric in taken.metrics
        if metric.name.startswith("asked.")
    ]
    assert observed == [
        ("benchmark", "before", "asked.thorough"),
        ("benchmark", "during", f"asked.{asked}"),
        ("benchmark", "after", "asked.thorough"),
    ]


@pytest.mark.parametrize(
    ("stage", "reported"), [("benchmark", True), ("gang", True), (PROBE, False), (CELL, False), (SOAK, False)]
)
def test_gpu_launch_reports_its_telemetry(tmp_path: Path, stage: str, reported: bool) -> None:
    """NVML need not be there: then that is what the timeline tells."""
    run = HostRun.begin(tmp_path / "run", "h1", json.dumps(to_json(builders.plan(gpu_count=2))))
    timeline = launch(run, "true", stage=stage).launches[0].timeline
    assert (timeline is not None) == reported


@pytest.mark.parametrize(
    "broken",
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
    tmp_path: Path, gang: Callable[..., Gang], monkeypatch: pytest.MonkeyPatch, broken: str
) -> None:
    run = HostRun.begin(tmp_path / "runs" / "r1", "h1", json.dumps(to_json(builders.plan(gpu_count=2))))
    receivers: list[HeartbeatReceiver] = []
    before = set(threading.enumerate())

    def open_receiver(directory: Path, ranks: Mapping[int, str]) -> HeartbeatReceiver:
        receivers.append(HeartbeatReceiver(directory, ranks))
        return receivers[-1]

    def refuse(*_: Any, **__: Any) -> Any:
        raise OSError("no space left on device")

    monkeypatch.setattr("agent.sampling.telemetry.FastReader", lambda _: SimpleNamespace(read=dict))
    monkeypatch.setattr(supervise, "HeartbeatReceiver", open_receiver)
    monkeypatch.setattr(broken, refuse)
    with pytest.raises(OSError, match="no space left"):
        launch(run, "true", channel=PeerChannel(gang("h1")))
    for thread in set(threading.enumerate()) - before:
        thread.join(5)
    assert set(threading.enumerate()) <= before
    assert all(receiver.socket.fileno() == -1 for receiver in receivers)
    PeerChannel(gang("h1")).close()  # its port is free


def test_unreadable_results_are_part_of_the_outcome(run: HostRun) -> None:
    reason = launch(run, "echo [] > rank1.json; exit 2").launches[0].reason
    assert reason.startswith("the launcher exited with 2: every rank had finished; no result of rank 1: ")


def test_a_host_whose_launcher_ended_early_has_started_no_rank(
    run: HostRun, gang: Callable[..., Gang], monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that no part of it is to blame. One that lost the others, or a rank that never beat, is another matter."""
    for module in (culprit, monitor):
        monkeypatch.setattr(module, "SETTLE_S", 0.1)
    exchange = PeerChannel(gang("h1", 2))
    exchange.statuses = {"h2": PeerStatus(at=time.monotonic(), finished=True)}
    done = launch(run, "echo 'ImportError: no torch'; exit 1", channel=exchange, members=("h1", "h2")).launches[0]
    assert done.reason.endswith("its launcher ended with exit code 1 before any rank started: ImportError: no torch")
    assert (done.outcome, done.ranks) == ("failed", ())


@pytest.mark.parametrize("kind", ["rank_absent", "cut_off"])
def test_a_host_that_is_to_blame_for_something_else_keeps_its_ranks(
    run: HostRun, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    named = Culprit(kind=kind, hosts=("h1",), text="somebody")
    monkeypatch.setattr(GangMonitor, "poll", lambda *_: named)
    done = launch(run, "sleep 60").launches[0]
    assert (done.culprit, len(done.ranks)) == (named, 2)


@pytest.mark.parametrize(
    ("log", "line"),
    [
        ("", ""), ("gemm …\n\n", "gemm …"),
        ("ImportError: no torch\nsys:1: ResourceWarning: unclosed\n", "ImportError: no torch"),
        ("torch.x.DistError: gone\n\x00\x01\n", "torch.x.DistError: gone"), ("\x1b[31mred\n\x00\n", "[31mred"),
    ],
)  # fmt: skip
def test_the_last_words_of_a_log_are_its_error(tmp_path: Path, log: str, line: str) -> None:
    (tmp_path / "launcher.log").write_text(log)
    assert work_directory.last_error_line(tmp_path / "launcher.log") == line


def test_a_gang_hears_of_a_rank_that_could_not_take_part(run: HostRun) -> None:
    """Every rank of the gang has come to its end, and nothing was measured together: the host itself says for whom."""
    why = "the device was lost: CUDA error: uncorrectable ECC error encountered"
    state = json.dumps({"phase": "end", "exit_code": 0, "unable": why})
    lines: list[str] = []
    done = launch(run, f"echo '{state}' > rank1.state.json", members=("h1", "h2"), report=lines.append).launches[0]
    text = f'host h1 cpu=1 rank 1 in phase "readiness check": cannot take part: {why}'
    assert (done.outcome, done.reason, lines) == ("failed", text, [f"stage benchmark: {text}"])
    assert done.culprit == Culprit(
        kind="rank_unable", hosts=("h1",), text=text, scope="cpu=1", rank=1, phase="readiness check"
    )


def test_other_errors_are_listed_with_the_unable_ranks(run: HostRun) -> None:
    state = json.dumps({"phase": "end", "exit_code": 0, "unable": "the device was lost"})
    both = f"echo '{state}' | tee rank0.state.json > rank1.state.json; echo [] > rank1.json"
    done = launch(run, both, members=("h1", "h2")).launches[0]
    assert done.culprit
    assert done.culprit.text.endswith(
        'rank 0 in phase "readiness check": cannot take part: the device was lost; and 1 more of its ranks'
    )
    assert done.reason.startswith(f"{done.culprit.text}; no result of rank 1: ")


def test_deadline_is_reported_despite_an_unable_rank(run: HostRun) -> None:
    state = json.dumps({"phase": "end", "exit_code": 0, "unable": "the device was lost"})
    slow = f"echo '{state}' > rank1.state.json; sleep 60"
    done = launch(run, slow, members=("h1", "h2"), deadline_s=0.5).launches[0]
    assert (done.outcome, done.culprit) == ("deadline", None)


def test_single_host_reports_why_each_figure_is_missing(run: HostRun) -> None:
    state = json.dumps({"phase": "end", "exit_code": 0, "unable": "the device was lost"})
    done = launch(run, f"echo '{state}' > rank1.state.json").launches[0]
    assert (done.outcome, done.culprit) == ("finished", None)


def at_work_in(directory: Path) -> list[str]:
    """The living processes that were started there."""
    results = []
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if entry.name.isdigit() and (entry / "cwd").readlink() == directory:
                results.append(entry.name)
    return results


def test_launch_is_ended_and_reported_at_its_deadline(run: HostRun) -> None:
    lines: list[str] = []
    done = launch(run, "sleep 60 & sleep 60", report=lines.append, deadline_s=0.5).launches[0]
    assert lines == ["stage benchmark: not finished after 0.5 s; ending all of its processes"]
    assert (done.outcome, done.culprit) == ("deadline", None)
    assert at_work_in(run.directory / "work") == []


TELL = """
{python} - <<'END'
import json, socket
with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as channel:
    channel.connect("heartbeats")
    channel.send(json.dumps({said}).encode())
END
sleep 60
"""


def test_launch_ends_at_once_if_a_culprit_is_named(run: HostRun, monkeypatch: pytest.MonkeyPatch) -> None:
    (run.directory / "work").mkdir()
    os.mkfifo(run.directory / "work" / "flight.rank0.pipe")
    reader = os.open(run.directory / "work" / "flight.rank0.pipe", os.O_RDONLY | os.O_NONBLOCK)
    (run.directory / "work").rename(run.directory / "prepared")
    monkeypatch.setattr(process_tree, "GRACE_S", 60.0)
    monkeypatch.setattr(supervise, "CULPRIT_GRACE_S", 0.1)
    lines: list[str] = []
    said = {"kind": "end", "rank": 1, "at": 0.0, "code": -11, "terminated_by_launcher": False}
    program = "trap '' TERM; mv ../prepared/* .;" + TELL.format(python=sys.executable, said=said)
    done = launch(run, program, report=lines.append).launches[0]
    assert done.culprit is not None
    assert (done.outcome, done.culprit.kind, done.culprit.rank) == ("failed", "rank_ended", 1)
    assert lines == [f"stage benchmark: {done.culprit.text}; ending all of its processes"]
    assert done.reason == done.culprit.text
    assert os.read(reader, 1) == b"", "the others know nothing that its end does not tell"
    os.close(reader)
    assert done.duration_s < 10


# ---- with other hosts ----


@pytest.fixture
def gang(port: int) -> Callable[..., Gang]:
    """A gang on loopback, as one of its hosts knows it."""

    def made(me: str, hosts: int = 2) -> Gang:
        members = tuple(f"h{number}" for number in range(1, hosts + 1))
        addresses = dict.fromkeys(members, loopback_address(port))
        return Gang(me=me, members=members, addresses=addresses, port=port, nonce=builders.NONCE, context="r1 gang r1")

    return made


@pytest.fixture
def two(tmp_path: Path, gang: Callable[..., Gang]) -> Iterator[list[GangMonitor]]:
    """The watches of two hosts of a gang."""
    results = []
    for number in (1, 2):
        path = tmp_path / f"h{number}"
        path.mkdir()
        receiver = HeartbeatReceiver(path, {number - 1: "gpu=0"})
        results.append(GangMonitor(f"h{number}", receiver, PeerChannel(gang(f"h{number}")), 60.0))
    yield results
    for each in results:
        each._receiver.close()
        assert each._channel
        each._channel.close()


def met(one: GangMonitor, two: GangMonitor) -> tuple[PeerChannel, PeerChannel]:
    """Both, once they have heard of each other's rank."""
    here, present = one._channel, two._channel
    assert here
    assert present
    ends = time.monotonic() + 5
    while "h1" not in present.statuses or not here.statuses.get("h2") or here.statuses["h2"].ranks == ():
        assert time.monotonic() < ends
        for each in (one, two):
            each.poll(0.005)
    return here, present


def test_the_head_names_a_rank_of_another_host_and_that_one_hears_of_it(
    two: list[GangMonitor], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(culprit, "SETTLE_S", 0.1)
    met(*two)
    send_to_receiver(tmp_path / "h2", "end", rank=1, code=-9, terminated_by_launcher=False)
    ends = time.monotonic() + 5
    while not (two[0].poll(0.01) and two[1].poll(0.01)):
        two[1].poll(0.01)
        assert time.monotonic() < ends
    first, second = two[0].poll(0.0), two[1].poll(0.0)
    assert first == second
    assert first is not None
    assert first.text == 'host h2 gpu=0 rank 1 in phase "start": killed by SIGKILL'


def test_host_that_ends_its_own_ranks_blames_no_later_failure(
    two: list[GangMonitor], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As at its deadline, which passes before that of a host that began later."""
    monkeypatch.setattr(culprit, "SETTLE_S", 0.1)
    monkeypatch.setattr(monitor, "SETTLE_S", 0.1)
    _, present = met(*two)
    two[0].announce_abort()
    parting = threading.Thread(target=two[0].announce_exit, daemon=True)
    parting.start()
    send_to_receiver(tmp_path / "h2", "end", rank=1, code=1, terminated_by_launcher=False)
    ends = time.monotonic() + 5
    while not present.statuses["h1"].finished:
        assert two[1].poll(0.01) is None
        assert time.monotonic() < ends
    assert present.statuses["h1"].aborted
    assert two[1].await_verdict(1) is None
    parting.join(5)


def test_heartbeat_is_received_at_once_despite_other_sockets(two: list[GangMonitor], tmp_path: Path) -> None:
    met(*two)
    for _ in range(5):
        two[0].poll(0.01)
    send_to_receiver(tmp_path / "h1", "end", rank=0, code=0, terminated_by_launcher=False)
    began = time.monotonic()
    two[0].poll(20.0)
    assert time.monotonic() - began < 10


def test_who_parts_is_heard_and_does_not_wait_any_longer(
    two: list[GangMonitor], tmp_path: Path, gang: Callable[..., Gang]
) -> None:
    _, present = met(*two)
    send_to_receiver(tmp_path / "h1", "end", code=0, terminated_by_launcher=False)
    two[0].poll(0.0)

    def listen() -> None:
        while not present.statuses["h1"].finished:
            present.poll(0.01)

    listener = threading.Thread(target=listen, daemon=True)
    listener.start()
    began = time.monotonic()
    two[0].announce_exit()
    listener.join(5)
    assert present.statuses["h1"].finished
    assert present.statuses["h1"].ranks[0].exit_code == 0, "its last word has the end of its ranks"
    assert time.monotonic() - began < monitor.EXIT_ANNOUNCEMENT_S / 2
    assert present.verdict is None
    PeerChannel(gang("h1")).close()  # the next launch listens there


def test_resumed_host_blames_no_rank(two: list[GangMonitor], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here, _ = met(*two)
    real = time.monotonic
    monkeypatch.setattr(time, "monotonic", lambda: real() + HOST_SILENT_S + 5)
    assert two[0].poll(0.0) is None
    assert time.monotonic() - here.statuses["h2"].at < 5


def test_last_status_waits_for_its_acknowledgement(
    receiver: HeartbeatReceiver, tmp_path: Path, gang: Callable[..., Gang]
) -> None:
    watchers, mine = [PeerChannel(gang(host, 3)) for host in ("h1", "h2")], PeerChannel(gang("h3", 3))
    watch = GangMonitor("h3", receiver, mine, 60.0)
    ends = time.monotonic() + 5
    while set(mine.statuses) != {"h1", "h2", "h3"}:
        assert time.monotonic() < ends
        watch.poll(0.005)
        for each in watchers:
            each.poll(0.0)
    send_to_receiver(tmp_path, "end", rank=1, code=3, terminated_by_launcher=True)

    def listen() -> None:
        for each in watchers:
            while not each.statuses["h3"].finished:
                each.poll(0.01)

    listener = threading.Thread(target=listen, daemon=True)
    listener.start()
    began = time.monotonic()
    assert watch.states()[1].exit_code == 3
    watch.announce_exit()
    listener.join(5)
    assert [each.statuses["h3"].ranks[1].exit_code for each in watchers] == [3, 3]
    assert mine._answered == {"h1": mine._number, "h2": mine._number}
    assert time.monotonic() - began < monitor.EXIT_ANNOUNCEMENT_S / 2
    for each in watchers:
        each.close()


def test_second_watcher_blames_no_host_while_the_first_lives(
    receiver: HeartbeatReceiver, tmp_path: Path, clock: FakeClock, gang: Callable[..., Gang]
) -> None:
    exchange = PeerChannel(gang("h2", 3))
    watch = GangMonitor("h2", receiver, exchange, 60.0)
    send_to_receiver(tmp_path, "end", rank=1, code=-9, terminated_by_launcher=False, at=clock.now - 50)
    for finished, named in ((False, False), (True, True)):
        clock.now += 1.0
        exchange.statuses = {host: PeerStatus(at=clock.now, finished=finished) for host in ("h1", "h3")}
        results = watch.poll(0.0)
        assert (results is not None) == named
    exchange.close()


@pytest.mark.parametrize(
    ("me", "ages", "seconds", "settled"),
    [
        ("h1", {"h2": 0.0, "h3": 0.0}, 2 * SETTLE_S - 0.1, False),
        ("h1", {"h2": 0.0, "h3": 0.0}, 2 * SETTLE_S + 0.1, True),
        ("h1", {"h2": 0.0, "h3": UNSURE_S + 0.5}, 2 * SETTLE_S + 0.1, False),
        ("h1", {"h2": 0.0}, 2 * SETTLE_S + 0.1, False),
        ("h1", {"h2": 0.0, "h3": None}, 2 * SETTLE_S + 0.1, True),
        ("h2", {"h1": 0.0, "h3": 0.0}, 2 * SETTLE_S + 0.1, False),
        ("h2", {"h1": None, "h3": 0.0}, 2 * SETTLE_S + 0.1, True),
        ("h2", {"h1": 0.0, "h3": 0.0}, HOST_SILENT_S + 2 * SETTLE_S - 0.1, False),
        ("h2", {"h1": 0.0, "h3": 0.0}, HOST_SILENT_S + 2 * SETTLE_S + 0.1, True),
    ],
)
def test_verdict_waits_until_every_host_reported_or_is_lost(
    receiver: HeartbeatReceiver,
    clock: FakeClock,
    gang: Callable[..., Gang],
    me: str,
    ages: dict[str, float | None],
    seconds: float,
    settled: bool,
) -> None:
    """`ages`: of the others' words; None: an old one, by which they have finished."""
    exchange = PeerChannel(gang(me, 3))
    watch = GangMonitor(me, receiver, exchange, 60.0)
    exchange.statuses = {
        host: PeerStatus(at=clock.now - (5.0 if age is None else age), finished=age is None)
        for host, age in ages.items()
    }
    assert watch._is_settled(seconds) is settled
    exchange.close()
