"""The functions of `agent.launch.supervise`: what they call, in which order and with which arguments. Processes are fakes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from agent.gang.rank_state import RankState
from agent.launch import supervise
from agent.launch.outcome import LaunchOutcome, RanksEnd
from agent.launch.supervise import Command, LaunchSpec
from agent.run import work_directory
from schemas.records import RAISED, Culprit, Launch, Rank
from schemas.stages import CELL, PROBE, SOAK
from tests import builders
from tests.gangs import FakeClock


def make_spec(work: Path, **fields: Any) -> LaunchSpec:
    """Return the spec of a launch of ranks 3 and 2, in this order, so that a test fails if the code does not sort the ranks."""
    return LaunchSpec(
        **{
            "stage": "benchmark",
            "host": builders.plan(profile="rehearsal").host("h1"),
            "members": ("h1",),
            "command": Command(arguments=["torchrun", "--standalone"], environment={}, ranks={3: 1, 2: 0}),
            "work": work,
            "deadline_s": 9.0,
            **fields,
        }
    )


def culprit(kind: str = "cut_off", host: str = "h1") -> Culprit:
    return Culprit(kind=kind, hosts=(host,), text=f"host {host} …")


# ---- the loop that polls the gang monitor ----


class FakeLaunch:
    """Replaces the launcher, its process tree and its gang monitor.

    The launcher exits with code 4 after `polls` polls of the gang monitor. `culprits`: number of a poll (the first is 1) -> the
    culprit that this poll returns. `late_culprit`: the culprit that the gang monitor returns after the launcher's exit. `events`:
    the calls, in order.
    """

    pid, pids = 77, ()

    def __init__(self, polls: int, culprits: Mapping[int, Culprit], late_culprit: Culprit | None) -> None:
        self.polls, self.culprits, self.late_culprit = polls, culprits, late_culprit
        self.events: list[Any] = []
        self.polled = 0
        self.returncode = 4
        self.monitor: Any = SimpleNamespace(
            pids=None,
            poll=self.poll_monitor,
            await_verdict=self.await_verdict,
            announce_abort=lambda: self.events.append("abort"),
        )

    def poll(self) -> int | None:
        return self.returncode if self.polled >= self.polls else None

    def poll_monitor(self, seconds: float) -> Culprit | None:
        assert seconds == supervise.POLL_S
        self.polled += 1
        return self.culprits.get(self.polled)

    def await_verdict(self, exit_code: int, last_line: str) -> Culprit | None:
        self.events.append(("verdict", exit_code, last_line))
        return self.late_culprit

    def scan(self) -> None:
        self.events.append("scan")

    def end(self, grace_s: float | None) -> None:
        self.events.append(("end", grace_s))

    def wait(self, timeout: float) -> None:
        self.events.append(("wait", timeout))
        raise subprocess.TimeoutExpired("torchrun", timeout)


def run_fake(
    work: Path,
    monkeypatch: pytest.MonkeyPatch,
    polls: int = 5,
    culprits: Mapping[int, Culprit] | None = None,
    late_culprit: Culprit | None = None,
    **fields: Any,
) -> tuple[Any, list[Any]]:
    """Run a fake launch. Return the result of `_run` (exit code of the launcher, culprit), and the calls in order.

    Each reading of the clock advances it by 0.25 s.
    """
    fake = FakeLaunch(polls, culprits or {}, late_culprit)
    clock = FakeClock()
    clock.now = 0.0

    def advance() -> float:
        clock.now += 0.25
        return clock.now

    (work / "launcher.log").write_text("bye\n")
    monkeypatch.setattr(supervise, "time", SimpleNamespace(monotonic=advance))
    monkeypatch.setattr(supervise, "_start", lambda spec, path: fake.events.append(path.name) or fake)
    monkeypatch.setattr(supervise, "ProcessTree", lambda pid: fake.events.append(pid) or fake)
    monkeypatch.setattr(supervise, "dump_flight_records", lambda path, ranks: fake.events.append(("dump", path, ranks)))
    result = supervise._run(make_spec(work, **fields), fake.monitor, fake.events.append)
    assert fake.monitor.pids is fake.pids
    return result, fake.events


STARTED = ["launcher.log", 77]
"""The first calls: start the launcher with this log file; create the process tree of process 77, the launcher."""


def test_processes_are_scanned_at_the_first_poll_and_then_at_intervals(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervise, "PROCESS_SCAN_S", 0.6)
    result, events = run_fake(tmp_path, monkeypatch, polls=4)
    assert result == (4, None)
    assert events == [*STARTED, "scan", "scan", ("verdict", 4, "bye"), ("end", None), ("wait", supervise.GRACE_S)]


def test_culprit_that_is_found_after_the_end_of_the_launcher_shortens_the_grace_period(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    late = culprit()
    result, events = run_fake(tmp_path, monkeypatch, polls=0, late_culprit=late)
    assert result == (4, late)
    assert events[2:] == [("verdict", 4, "bye"), ("end", supervise.CULPRIT_GRACE_S), ("wait", supervise.GRACE_S)]


@pytest.mark.parametrize(
    ("kind", "has_dumps"), [("cut_off", True), ("rank_silent", True), ("rank_ended", False), (RAISED, False)]
)
def test_flight_recorder_dumps_are_requested_in_rank_order_unless_a_rank_ended_or_raised_an_exception(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, has_dumps: bool
) -> None:
    found = culprit(kind)
    result, events = run_fake(tmp_path, monkeypatch, culprits={2: found})
    assert result == (None, found)
    assert events[2:] == [
        *("scan", "scan", "stage benchmark: host h1 …; ending all processes of the launch"),
        *([("dump", tmp_path, [2, 3])] if has_dumps else []),
        *(("end", supervise.CULPRIT_GRACE_S), ("wait", supervise.GRACE_S)),
    ]


def test_abort_at_the_deadline_is_announced_to_the_gang_before_the_ranks_are_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervise, "PROCESS_SCAN_S", 100.0)
    result, events = run_fake(tmp_path, monkeypatch, polls=99, deadline_s=1.5)
    text = "stage benchmark: not finished after 1.5 s; ending all processes of the launch"
    assert result == (None, None)
    assert events[2:] == ["scan", text, "abort", ("end", None), ("wait", supervise.GRACE_S)]


@pytest.mark.parametrize("fails", [False, True])
def test_end_of_the_ranks_is_announced_even_after_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails: bool
) -> None:
    events: list[Any] = []
    (tmp_path / "launcher.log").write_text("ValueError: bad\nbye\n")
    monitor = SimpleNamespace(
        states=lambda: {2: "state"},
        out_of_memory_reason=lambda: "killed",
        thread_limit_reason=lambda: "limited",
        has_started=lambda: True,
        announce_exit=lambda: events.append("exit"),
    )
    monkeypatch.setattr(supervise, "GangMonitor", lambda *arguments: events.append(arguments) or monitor)
    result = culprit()
    monkeypatch.setattr(supervise, "_run", lambda *_: (1 / 0) if fails else (7, result))
    receiver, channel, spec = object(), object(), make_spec(tmp_path, collective_timeout_s=33.0)
    if fails:
        with pytest.raises(ZeroDivisionError):
            supervise._monitor_ranks(spec, receiver, channel, print)  # type: ignore[arg-type]
    else:
        assert supervise._monitor_ranks(spec, receiver, channel, print) == RanksEnd(  # type: ignore[arg-type]
            exit_code=7,
            culprit=result,
            states={2: "state"},  # type: ignore[dict-item]
            oom_kill="killed",
            any_rank_started=True,
            thread_limit="limited",
            last_line="ValueError: bad",
        )
    assert events == [("h1", receiver, channel, 33.0), "exit"]


def test_launcher_starts_through_the_guard_in_a_new_session(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The guard becomes the launcher. The kernel kills the launcher when the supervisor ends."""
    started: list[Any] = []
    monkeypatch.setattr(supervise.subprocess, "Popen", lambda *args, **fields: started.append((args, fields)))
    supervise._start(make_spec(tmp_path), tmp_path / "log")
    ((arguments, fields),) = started
    command = [sys.executable, "-m", "agent.launch.guard", "--supervisor", str(os.getpid()), "torchrun", "--standalone"]
    assert arguments == (command,)
    assert (fields["stdin"], fields["stderr"]) == (subprocess.DEVNULL, subprocess.STDOUT)
    assert (fields["stdout"].name, fields["stdout"].mode) == (str(tmp_path / "log"), "wb")
    assert (fields["cwd"], fields["start_new_session"]) == (tmp_path, True)


# ---- the results ----


class FakeTelemetry:
    """Telemetry that adds one observation.

    The value of the observation is a text of the stage, the number of time windows and the number of the ranks' observations, so
    that tests can check these arguments.
    """

    def observations(self, windows: Sequence[Any], observations: Sequence[Any], stage: str) -> list[Any]:
        return [builders.observation("gpu.power", f"{stage} {len(windows)} {len(observations)}", unit="W")]

    def trace(self, start_times: Mapping[str, float]) -> Any:
        return f"timeline {start_times}"


def write_rank(work: Path, rank: int, *, unable: str = "", exit_code: int | None = 0) -> None:
    """Write the result, the last state and the log of a rank. `unable`: why the rank could not join the process group."""
    result = {
        "name": "gemm.throughput", "scope": f"cpu={rank}", "stage": "benchmark", "unit": "FLOP/s", "status": "measured",
        "value": 1.0,
    }  # fmt: skip
    document = {"rank": rank, "observations": [result], "software": {f"lib{rank}": "2"}}
    (work / f"rank{rank}.json").write_text(json.dumps(document))
    state = {"phase": "end", "exit_code": exit_code, "unable": unable, "begun": {"gemm": 12.0 + rank}}
    (work / f"rank{rank}.state.json").write_text(json.dumps(state))
    (work / f"rank{rank}.log").write_text(f"log {rank}")


def ranks_end(**fields: Any) -> RanksEnd:
    """Return a successful end of ranks 2 and 3; `fields` replace its fields."""
    states = {rank: RankState(rank=rank, scope=f"cpu={rank}") for rank in (2, 3)}
    return RanksEnd(
        **{"exit_code": 0, "culprit": None, "states": states, "oom_kill": "", "any_rank_started": True, **fields}
    )


def collect_results(
    work: Path, end: RanksEnd, report: Any = pytest.fail, *, telemetry: Any = None, **fields: Any
) -> LaunchOutcome:
    """Return the outcome of a launch whose ranks ended as in `end`, with the results in `work`.

    `fields` replace fields of the launch's spec.
    """
    return supervise._collect_results(
        make_spec(work, **fields), end, telemetry, report, began="2026-11-21T04:00:00Z", duration_s=1.2345678
    )


def test_outcome_has_the_ranks_and_their_results_in_rank_order(tmp_path: Path) -> None:
    for number in (3, 2):
        write_rank(tmp_path, number)
    (tmp_path / "launcher.log").write_text("said")
    outcome = collect_results(tmp_path, ranks_end(), number=5, members=("h1", "h2"))
    ranks = [
        Rank(rank=number, local_rank=number - 2, phase="end", exit_code=0, log_tail=f"log {number}")
        for number in (2, 3)
    ]
    assert outcome.launch == Launch(
        stage="benchmark",
        outcome="finished",
        reason="",
        members=("h1", "h2"),
        began="2026-11-21T04:00:00Z",
        duration_s=1.235,
        deadline_s=9.0,
        ranks=tuple(ranks),
        log_tail="said",
        number=5,
    )
    assert [observation.scope for observation in outcome.observations] == ["cpu=2", "cpu=3"]
    assert outcome.software == {"lib2": "2", "lib3": "2"}


@pytest.mark.parametrize(
    ("stage", "is_in_launch", "has_timeline"),
    [
        ("benchmark", False, True),
        ("gang", False, True),
        (SOAK, False, False),
        (PROBE, True, False),
        (CELL, True, False),
    ],
)
def test_telemetry_adds_an_observation_and_in_the_benchmark_and_gang_stages_a_timeline(
    tmp_path: Path, stage: str, is_in_launch: bool, has_timeline: bool
) -> None:
    for number in (3, 2):
        write_rank(tmp_path, number)
    outcome = collect_results(tmp_path, ranks_end(), telemetry=FakeTelemetry(), stage=stage)
    result = [observation.value for observation in outcome.launch.observations or outcome.observations]
    assert result == [1.0, 1.0, f"{stage} 0 2"]
    assert (outcome.launch.observations != (), outcome.observations != ()) == (is_in_launch, not is_in_launch)
    assert outcome.launch.timeline == ("timeline {'gemm': 14.0}" if has_timeline else None)


@pytest.mark.parametrize(("members", "is_failed"), [(("h1",), False), (("h1", "h2"), True)])
def test_rank_that_cannot_join_the_process_group_fails_only_a_launch_on_several_hosts(
    tmp_path: Path, members: tuple[str, ...], is_failed: bool
) -> None:
    write_rank(tmp_path, 2)
    write_rank(tmp_path, 3, unable="no device")
    lines: list[str] = []
    launch = collect_results(tmp_path, ranks_end(), lines.append, members=members).launch
    assert launch.outcome == ("failed" if is_failed else "finished")
    assert (launch.culprit is not None, lines) == (is_failed, [f"stage benchmark: {launch.reason}"] * is_failed)
    assert len(launch.ranks) == 2


@pytest.mark.parametrize(
    ("kind", "host", "any_rank_started", "has_ranks"),
    [
        ("rank_ended", "h1", False, False),  # no rank started: the launcher ended
        ("rank_ended", "h1", True, True),
        ("rank_ended", "h2", False, True),
        ("rank_raised", "h1", False, False),  # no rank started, because of a limit on threads
        ("rank_raised", "h1", True, True),
        ("rank_raised", "h2", False, True),
        ("cut_off", "h1", False, True),
    ],
)
def test_ranks_are_left_out_if_the_launcher_of_this_host_failed_before_they_started(
    tmp_path: Path, kind: str, host: str, any_rank_started: bool, has_ranks: bool
) -> None:
    result = culprit(kind, host)
    launch = collect_results(tmp_path, ranks_end(culprit=result, any_rank_started=any_rank_started)).launch
    assert (launch.culprit, launch.outcome, launch.reason) == (result, "failed", result.text)
    assert len(launch.ranks) == (2 if has_ranks else 0)


def test_problem_with_the_results_is_part_of_the_reason_and_logs_are_truncated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(work_directory, "MAX_LOG_BYTES", 8)
    write_rank(tmp_path, 2)
    write_rank(tmp_path, 3, exit_code=None)
    (tmp_path / "rank3.json").unlink()
    (tmp_path / "launcher.log").write_text("0123456789")
    launch = collect_results(tmp_path, ranks_end(exit_code=None, oom_kill="killed")).launch
    expected = "not finished after 9 s (rank 3 in end); a process of this launch was killed; no result of rank 3: "
    assert (launch.outcome, launch.reason[: len(expected)]) == ("deadline", expected)
    assert (launch.log_tail, (tmp_path / "launcher.log").read_text()) == ("01234567", "01234567")


# ---- the whole launch ----


class FakeSampler:
    """A sampler that returns one snapshot: a tuple of "during" and the sampler's arguments."""

    def __init__(self, collectors: Sequence[Any], stage: str) -> None:
        self.arguments = collectors, stage

    def __enter__(self) -> FakeSampler:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def selected(self) -> list[Any]:
        return [("during", *self.arguments)]


@pytest.mark.parametrize("stage", ["benchmark", PROBE])
def test_snapshots_are_kept_unless_the_launch_is_a_probe(
    tmp_path: Path, clock: FakeClock, monkeypatch: pytest.MonkeyPatch, stage: str
) -> None:
    events: list[Any] = []

    def take_snapshot(collectors: Sequence[Any], *, stage: str, phase: str) -> Any:
        events.append((collectors, stage, phase))
        return phase, (f"gpus {phase}",)

    @contextmanager
    def live(read_states: Any) -> Iterator[None]:
        assert [state.scope for state in read_states()] == ["cpu=0", "cpu=1"]
        events.append("live")
        yield
        events.append("not live")

    def monitor_ranks(spec: LaunchSpec, receiver: Any, channel: Any, _: Any) -> RanksEnd:
        events.append((type(receiver).__name__, channel.name))
        clock.now += 2.5
        return ranks_end()

    for name, value in (
        ("take_snapshot", take_snapshot), ("SnapshotSampler", FakeSampler), ("_monitor_ranks", monitor_ranks),
        ("utc_now", lambda: "now"),
    ):  # fmt: skip
        monkeypatch.setattr(supervise, name, value)
    outcome = supervise.supervise(
        make_spec(tmp_path, stage=stage, collectors=("full",), fast_collectors=("fast",)),  # type: ignore[arg-type]
        record_start=lambda snapshots, gpus: events.append((snapshots, gpus)),
        report=pytest.fail,
        channel=SimpleNamespace(name="channel", close=lambda: events.append("closed")),  # type: ignore[arg-type]
        live=live,
    )
    assert events == [
        (("full",), stage, "before"),
        (() if stage == PROBE else ("before",), ("gpus before",)),
        "live",
        ("HeartbeatReceiver", "channel"),
        (("full",), stage, "after"),
        "not live",
        "closed",
    ]
    assert outcome.snapshots == (() if stage == PROBE else (("during", ("fast",), stage), "after"))
    assert outcome.gpus == ("gpus after",)
    assert (outcome.launch.began, outcome.launch.duration_s) == ("now", 2.5)


def test_launch_of_one_host_needs_no_channel_and_no_publisher_of_rank_states(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervise, "_monitor_ranks", lambda spec, receiver, channel, report: ranks_end())
    outcome = supervise.supervise(make_spec(tmp_path), record_start=lambda *_: None, report=pytest.fail)
    assert [(snapshot.stage, snapshot.phase) for snapshot in outcome.snapshots] == [("benchmark", "after")]


@pytest.mark.parametrize("device", ["gpu", "cpu"])
def test_only_a_launch_on_gpus_has_telemetry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, device: str) -> None:
    monkeypatch.setattr(supervise, "Telemetry", lambda devices, work, _: nullcontext((devices, work)))
    spec = make_spec(tmp_path)
    with supervise._telemetry(replace(spec, host=replace(spec.host, device=device, devices=(4, 5)))) as telemetry:
        assert telemetry == (((4, 5), tmp_path) if device == "gpu" else None)
