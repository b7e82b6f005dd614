"""Detection of out-of-memory kills, from the kernel's counters in both versions of control groups and from the kernel log."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import pytest

from agent.gang.rank_state import RankState, parse_rank_state
from agent.launch.outcome import RanksEnd, conclude
from agent.run import background
from agent.sampling import oom
from agent.sampling.oom import OomWatch
from schemas.records import to_json

MB = 1_000_000


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


class Tree:
    """The /proc and /sys of a process in the control group `slice/session`.

    `version`: 1 or 2, the version of the control groups; 0: no group counts kills, only /proc/vmstat does.
    """

    def __init__(self, root: Path, version: int) -> None:
        self.root, self._version = root, version
        line = {1: "4:memory:/slice/session\n0::/\n", 2: "0::/slice/session\n"}.get(version, "0::/\n")
        write(root / "proc/self/cgroup", line)
        self.top = root / "sys/fs/cgroup" / ("memory" if version == 1 else "")
        if version:
            self.group("slice", limit=500 * MB)
            self.group("slice/session")
        self.machine(0)

    def machine(self, kills: int) -> None:
        """Write the counter of the whole machine."""
        write(self.root / "proc/vmstat", f"nr_free_pages 4711\noom_kill {kills}\n")

    def group(self, name: str, kills: int = 0, hits: int = 0, limit: int | None = None) -> None:
        """Write the counters of a group. `hits`: how often it reached its memory limit; `limit`: bytes, None for no limit."""
        if self._version == 1:
            write(self.top / name / "memory.oom_control", f"oom_kill_disable 0\nunder_oom 0\noom_kill {kills}\n")
            write(self.top / name / "memory.failcnt", f"{hits}\n")
            write(self.top / name / "memory.limit_in_bytes", f"{9223372036854771712 if limit is None else limit}\n")
        else:
            write(self.top / name / "memory.events", f"low 0\nmax 9\noom {hits}\noom_kill {kills}\n")
            write(self.top / name / "memory.max", f"{'max' if limit is None else limit}\n")


@pytest.fixture(params=[1, 2])
def tree(tmp_path: Path, request: pytest.FixtureRequest) -> Tree:
    """Return the files of a process in version 1 or 2 of the control groups."""
    return Tree(tmp_path, request.param)


def test_kill_at_the_limit_of_a_parent_group_names_the_limit(tree: Tree) -> None:
    memory = OomWatch(tree.root)
    assert memory.describe_kill() == ""
    tree.group("slice/session", kills=1)
    tree.group("slice", kills=1, hits=3, limit=500 * MB)
    assert memory.describe_kill() == "killed by the kernel's out-of-memory killer (oom_kill 1, limit 500 MB)"


def test_kill_below_every_limit_means_the_host_had_no_memory_left(tree: Tree) -> None:
    memory = OomWatch(tree.root)
    tree.group("slice/session", kills=2)
    assert (
        memory.describe_kill()
        == "killed by the kernel's out-of-memory killer (oom_kill 2, the host had no memory left)"
    )


def test_kill_before_the_launch_or_of_another_process_is_not_reported(tree: Tree) -> None:
    tree.group("slice/session", kills=5)
    memory = OomWatch(tree.root)
    tree.machine(7)
    tree.group("slice", kills=6, hits=1, limit=500 * MB)
    assert memory.describe_kill([4711]) == ""


LOG = "6,{number},{at},-;Out of memory: Killed process {pid} (python3) total-vm:94692kB, anon-rss:30464kB\n"


@pytest.mark.parametrize(
    ("log", "message"),
    [
        (None, "killed by the kernel's out-of-memory killer (oom_kill 1 on this host)"),
        (
            (10**15, 4711),
            "killed by the kernel's out-of-memory killer (kernel log: Out of memory: Killed process 4711 (python3))",
        ),
        ((10**15, 4712), ""),
        ((1, 4711), ""),
    ],
    ids=["unreadable log", "process of the launch", "another process", "before the launch"],
)
def test_kernel_log_decides_if_no_control_group_counts_kills(
    tmp_path: Path, log: tuple[int, int] | None, message: str
) -> None:
    """`log`: time of the logged kill, in µs since boot, and PID of the killed process; None: the log is unreadable."""
    tree = Tree(tmp_path, version=0)
    memory = OomWatch(tmp_path)
    tree.machine(1)
    if log:
        write(tmp_path / "dev/kmsg", LOG.format(number=0, at=log[0], pid=log[1]))
    assert memory.describe_kill([4711]) == message


def test_unreadable_counters_report_no_kill(tmp_path: Path) -> None:
    assert oom.read_groups(tmp_path) == []
    assert OomWatch(tmp_path).describe_kill([1]) == ""


@pytest.mark.parametrize("text", ["", "{", "[1]", '[{"path": 1}]'])
def test_invalid_saved_counters_report_no_kill(tmp_path: Path, text: str) -> None:
    write(tmp_path / "gang.memory", text)
    assert oom.describe_kill_since_save(tmp_path / "gang.memory") == ""


def test_parent_group_reports_the_kill_if_its_child_group_is_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The group of a session disappears with its last process, but version 2 also counts the kill in the parent groups."""
    tree = Tree(tmp_path, version=2)
    monkeypatch.setattr(oom, "read_groups", partial(oom.read_groups, tmp_path))
    oom.save_counters(tmp_path / "bench.memory")
    assert len(json.loads((tmp_path / "bench.memory").read_text())) == 3, "the group, its parent and the machine"
    assert oom.describe_kill_since_save(tmp_path / "bench.memory") == ""
    tree.group("slice", kills=1, hits=1, limit=500 * MB)
    for path in sorted((tree.top / "slice/session").iterdir()):
        path.unlink()
    assert oom.describe_kill_since_save(tmp_path / "bench.memory").endswith("(oom_kill 1, limit 500 MB)")


def test_rank_state_sent_to_other_hosts_keeps_its_reason() -> None:
    state = RankState(rank=1, scope="gpu=1", why="killed by the kernel")
    assert parse_rank_state(json.loads(json.dumps(to_json(state)))) == state


def test_oom_kill_without_a_culprit_is_reported_only_if_the_launcher_failed() -> None:
    killed = "killed by the kernel's out-of-memory killer (oom_kill 1, limit 500 MB)"
    for exit_code, outcome, reason in (
        (-9, "failed", f"the launcher exited with -9: every rank had finished; a process of this launch was {killed}"),
        (0, "finished", ""),
    ):
        end = RanksEnd(exit_code=exit_code, culprit=None, states={}, oom_kill=killed, any_rank_started=True)
        conclusion = conclude(end, host="h1", ranks=[], excluded={}, problems=[], deadline_s=20.0)
        assert (conclusion.outcome, conclusion.reason) == (outcome, reason)


def test_limit_on_threads_is_reported_if_ranks_hang_until_the_deadline() -> None:
    end = RanksEnd(
        exit_code=None, culprit=None, states={}, oom_kill="", any_rank_started=True, thread_limit="a limit was reached"
    )
    conclusion = conclude(end, host="h1", ranks=[], excluded={}, problems=[], deadline_s=20.0)
    assert (conclusion.outcome, conclusion.reason) == (
        "deadline",
        "not finished after 20 s (every rank had ended); a limit was reached",
    )


def test_writable_directory_reports_no_problem(tmp_path: Path) -> None:
    assert list(background._why_unwritable(tmp_path)) == []
