"""The process tree of a launch: which processes are in it, and which signals they get."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from types import SimpleNamespace

import pytest

from agent.launch import process_tree
from agent.launch.process_tree import ProcessTree
from tests.gangs import FakeClock, FakeProc


class FakeProcesses:
    """Processes in a fake /proc, and the signals sent to them.

    SIGKILL ends each process. SIGTERM ends the processes that are not in `ignoring_sigterm`.
    """

    def __init__(self, root: Path) -> None:
        self.proc, self.root = FakeProc(root), root
        self.sent: list[tuple[int, signal.Signals]] = []
        self.ignoring_sigterm: set[int] = set()
        (root / "self").mkdir(parents=True)
        (root / "99").mkdir()  # without `stat`, like a process that ended between the listing and the read
        self.proc.put(1, parent=0)

    def put(self, pid: int, parent: int, start_time: int = 7, state: str = "S") -> None:
        self.proc.put(pid, state, parent=parent, start_time=start_time)

    def remove(self, pid: int) -> None:
        (self.root / str(pid) / "stat").unlink()

    def kill(self, pid: int, number: int) -> None:
        if not (self.root / str(pid) / "stat").exists():
            raise ProcessLookupError
        self.sent.append((pid, signal.Signals(number)))
        if number == signal.SIGKILL or (number == signal.SIGTERM and pid not in self.ignoring_sigterm):
            self.remove(pid)


@pytest.fixture
def processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeProcesses:
    fake = FakeProcesses(tmp_path / "proc")
    monkeypatch.setattr(process_tree, "Path", lambda name: fake.root if name == "/proc" else Path(name))
    monkeypatch.setattr(os, "kill", fake.kill)
    return fake


def test_tree_is_the_process_and_its_descendants(processes: FakeProcesses) -> None:
    for pid, parent in ((10, 1), (12, 11), (11, 10), (20, 1), (21, 20)):
        processes.put(pid, parent)
    processes.put(13, 10, state="Z")
    assert sorted(ProcessTree(10).pids()) == [10, 11, 12]


def test_orphan_and_its_children_remain_in_the_tree(processes: FakeProcesses) -> None:
    processes.put(10, 1)
    processes.put(11, 10)
    tree = ProcessTree(10)
    processes.remove(10)
    processes.put(11, 1)
    processes.put(12, 11)
    tree.scan()
    assert sorted(tree.alive()) == [11, 12]
    assert sorted(tree.pids()) == [10, 11, 12]


def test_process_with_a_reused_pid_is_not_in_the_tree(processes: FakeProcesses) -> None:
    processes.put(10, 1)
    processes.put(11, 10)
    tree = ProcessTree(10)
    processes.put(11, 1, start_time=8)
    processes.put(12, 11)
    tree.scan()
    assert tree.alive() == [10]
    tree.end(0.0)
    assert {pid for pid, _ in processes.sent} == {10}


def test_tree_gets_sigterm_and_then_sigkill(processes: FakeProcesses, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_tree, "GRACE_S", 0.0)
    for pid, parent in ((10, 1), (11, 10), (12, 10)):
        processes.put(pid, parent)
    processes.ignoring_sigterm = {11}
    tree = ProcessTree(10)
    processes.put(13, 12)  # started after the scan by the constructor of ProcessTree
    tree.end()
    sent = {pid: [number for to, number in processes.sent if to == pid] for pid in (10, 11, 12, 13)}
    assert sent == {
        10: [signal.SIGTERM],
        11: [signal.SIGTERM, signal.SIGCONT, signal.SIGKILL],
        12: [signal.SIGTERM],
        13: [signal.SIGTERM],
    }
    assert tree.alive() == []


def test_only_processes_that_remain_after_the_grace_period_are_killed(
    processes: FakeProcesses, clock: FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    processes.put(10, 1)
    processes.put(11, 10)
    processes.ignoring_sigterm = {10, 11}
    waits: list[float] = []

    def wait(seconds: float) -> None:
        waits.append(seconds)
        clock.now += 1.0
        if len(waits) == 2:
            processes.put(12, 11)
        if len(waits) == 3:
            processes.remove(10)

    # Replace `time` in process_tree only: a thread of an earlier test may call time.sleep, too.
    monkeypatch.setattr(process_tree, "time", SimpleNamespace(sleep=wait, monotonic=clock))
    ProcessTree(10).end(4.5)
    killed = [pid for pid, number in processes.sent if number == signal.SIGKILL]
    assert sorted(killed) == [11, 12]
    assert len(waits) == 5, "the 4.5 s after SIGTERM take five waits of 1 s; after SIGKILL, `end` must not wait"


def test_end_does_not_wait_for_processes_that_have_ended(
    processes: FakeProcesses, clock: FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        process_tree,
        "time",
        SimpleNamespace(sleep=lambda _: pytest.fail("`end` waited for processes that have ended"), monotonic=clock),
    )
    processes.put(10, 1)
    tree = ProcessTree(10)
    tree.end(60.0)
    tree.end(60.0)
    assert [pid for pid, number in processes.sent if number == signal.SIGKILL] == []


def test_names_of_processes_may_contain_anything(processes: FakeProcesses) -> None:
    """A name may contain parentheses, spaces and bytes that are not UTF-8."""
    processes.put(10, 1)
    (processes.root / "11").mkdir()
    fields = b"S 10 0 0 0 0 0 0 0 0 0 0 0 0 0 20 0 1 0 44 0"
    (processes.root / "11" / "stat").write_bytes(b"11 (\xff) Z 1 (a) " + fields)
    tree = ProcessTree(10)
    assert sorted(tree.alive()) == [10, 11]
    assert tree._start_times == {10: "7", 11: "44"}


@pytest.mark.parametrize(("state", "is_alive"), [("R", True), ("D", True), ("T", True), ("Z", False), ("X", False)])
def test_process_is_alive_unless_it_is_a_zombie_or_dead(processes: FakeProcesses, state: str, is_alive: bool) -> None:
    processes.put(10, 1)
    tree = ProcessTree(10)
    processes.put(10, 1, state=state)
    assert tree.alive() == ([10] if is_alive else [])


def test_process_that_never_ran_has_an_empty_tree(processes: FakeProcesses) -> None:
    tree = ProcessTree(10)
    tree.end(0.0)
    assert (tree.pids(), tree.alive(), processes.sent) == ([], [], [])


@pytest.mark.parametrize(("grace_s", "polls"), [(None, 8), (0.0, 4), (2.0, 6)])
def test_end_waits_after_each_signal_if_the_process_remains(
    processes: FakeProcesses, clock: FakeClock, monkeypatch: pytest.MonkeyPatch, grace_s: float | None, polls: int
) -> None:
    """Process 10 belongs to another user, so it gets neither signal. GRACE_S is 4 s.

    Args:
        grace_s: how long `end` waits after SIGTERM; None: GRACE_S. After SIGKILL, it always waits GRACE_S.
        polls: number of waits in total, four of them after SIGKILL. Each wait advances the fake clock by 1 s.
    """
    monkeypatch.setattr(process_tree, "GRACE_S", 4.0)
    processes.put(10, 1)
    events: list[object] = []

    def refuse(pid: int, number: int) -> None:
        events.append(number)
        raise PermissionError

    def wait(seconds: float) -> None:
        assert seconds == 0.05
        events.append("wait")
        clock.now += 1.0

    monkeypatch.setattr(os, "kill", refuse)
    monkeypatch.setattr(process_tree, "time", SimpleNamespace(sleep=wait, monotonic=clock))
    ProcessTree(10).end(grace_s)
    assert events == [signal.SIGTERM, *["wait"] * (polls - 4), signal.SIGKILL, *["wait"] * 4]
