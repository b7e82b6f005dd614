"""The supervisor, the process that runs a launch on a host, always writes a record and ends all processes of the launch.

Before the launch, unsafe run directories and GPUs that are in use are refused.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from agent.gang import culprit
from agent.gang.monitor import GangMonitor
from agent.launch import process_tree
from agent.run.record import HostRun
from agent.sampling import launch_thread, snapshot_sampler
from collectors.base import Collector, Family
from schemas import documents
from schemas.records import Record, to_json
from tests import builders
from tests.fakes import nvml
from tests.launches import launch_program


@pytest.fixture
def run(tmp_path: Path) -> HostRun:
    """Return the run of host h1 in a rehearsal, which uses CPUs in place of GPUs."""
    plan = builders.plan(profile="rehearsal")
    return HostRun.begin(tmp_path / "run", "h1", json.dumps(to_json(plan)))


def launch(
    run: HostRun,
    program: str,
    collectors: Sequence[Collector] = (),
    fast_collectors: Sequence[Collector] | None = None,
    deadline_s: float = 20.0,
) -> Record:
    """Supervise a Python program in place of torchrun, with two ranks on this host; return the record."""
    work = run.directory / "work"
    work.mkdir()
    return launch_program(
        run,
        [sys.executable, "-c", textwrap.dedent(program)],
        environment={**os.environ, "WORK": str(work)},
        ranks={0: 0, 1: 1},
        deadline_s=deadline_s,
        collectors=collectors,
        fast_collectors=collectors if fast_collectors is None else fast_collectors,
    )


WRITE_RESULTS = """
import json, os, pathlib
work = pathlib.Path(os.environ["WORK"])
result = {"name": "gemm.throughput", "scope": "cpu=0", "stage": "benchmark", "unit": "FLOP/s", "status": "measured", "value": 1.0}
for rank in ranks:
    (work / f"rank{rank}.json").write_text(json.dumps({"rank": rank, "observations": [result], "software": {"torch": "2"}}))
    (work / f"rank{rank}.state.json").write_text(json.dumps({"phase": phase, "exit_code": code}))
"""
"""Code that writes a result file and a state file for each rank in `ranks`. The state has `phase` and the exit code `code`."""


def test_record_has_the_results_of_every_rank(run: HostRun) -> None:
    record = launch(run, "ranks, phase, code = (0, 1), 'end', 0" + WRITE_RESULTS)
    assert [(done.outcome, done.reason) for done in record.launches] == [("finished", "")]
    assert len(record.observations) == 2
    assert record.software == {"torch": "2"}
    assert [snapshot.phase for snapshot in record.snapshots] == ["before", "after"]
    assert documents.read(run.path(), "record")["host"] == "h1"


@pytest.fixture
def aborts(monkeypatch: pytest.MonkeyPatch) -> list[GangMonitor]:
    """Return a list to which each call of `announce_abort` adds its monitor.

    The supervisor calls `announce_abort` if it ends a launch but knows no culprit, for example at the deadline.
    """
    aborts: list[GangMonitor] = []
    monkeypatch.setattr(GangMonitor, "announce_abort", lambda monitor: aborts.append(monitor))
    return aborts


def test_failed_launch_names_the_rank_its_phase_and_its_exit_code(run: HostRun, aborts: list[GangMonitor]) -> None:
    program = (
        "ranks, phase, code = (0,), 'end', 0"
        + WRITE_RESULTS
        + "ranks, phase, code = (1,), 'gemm bf16', 1"
        + WRITE_RESULTS
    )
    record = launch(run, program + "\nprint('the last line')\nraise SystemExit(3)")
    assert record.launches[0].outcome == "failed"
    assert record.launches[0].reason == "the launcher exited with 3: rank 1 in gemm bf16 (exit code 1)"
    assert record.launches[0].log_tail == "the last line\n"
    assert len(record.observations) == 2
    assert not aborts


def test_rank_with_an_invalid_result_is_named_and_other_results_are_kept(run: HostRun) -> None:
    record = launch(
        run,
        "ranks, phase, code = (0,), 'end', 0" + WRITE_RESULTS + "(work / 'rank1.json').write_text('{\"rank\": 1, ')",
    )
    assert len(record.observations) == 1
    assert "no result of rank 1" in record.launches[0].reason
    assert "not JSON at offset" in record.launches[0].reason


STUBBORN = """
import os, signal, subprocess, sys, time
stubborn = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); time.sleep(600)"
child = subprocess.Popen([sys.executable, "-c", stubborn], stdout=subprocess.PIPE, start_new_session=True)
child.stdout.readline()
stopped = subprocess.Popen([sys.executable, "-c", stubborn], stdout=subprocess.PIPE)
stopped.stdout.readline()
os.kill(stopped.pid, signal.SIGSTOP)
(work / "pids").write_text(f"{child.pid} {stopped.pid}")
time.sleep(600)
"""
"""Code that starts two children, which both ignore SIGTERM. One has a session of its own, and the other is stopped (SIGSTOP)."""


def test_deadline_ends_all_processes_and_keeps_the_results(
    run: HostRun, monkeypatch: pytest.MonkeyPatch, aborts: list[GangMonitor]
) -> None:
    """The processes include the two children of STUBBORN."""
    monkeypatch.setattr(process_tree, "GRACE_S", 0.5)
    program = "ranks, phase, code = (0, 1), 'collective all_reduce', None" + WRITE_RESULTS + textwrap.dedent(STUBBORN)
    record = launch(run, program, deadline_s=3.0)
    done = record.launches[0]
    assert done.outcome == "deadline"
    assert done.reason == "not finished after 3 s (rank 0 in collective all_reduce, rank 1 in collective all_reduce)"
    assert len(record.observations) == 2
    assert len(aborts) == 1
    for pid in (run.directory / "work" / "pids").read_text().split():
        assert_ended(int(pid))


def test_child_that_outlives_its_launcher_is_ended(run: HostRun, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_tree, "GRACE_S", 0.5)
    program = "ranks, phase, code = (0, 1), 'end', 0" + WRITE_RESULTS
    program += """
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
(work / "pids").write_text(str(child.pid))
time.sleep(1)  # long enough for the supervisor to scan the processes
os._exit(9)
"""
    record = launch(run, program)
    assert record.launches[0].outcome == "failed"
    assert_ended(int((run.directory / "work" / "pids").read_text()))


LAUNCHER = """
import os, pathlib, subprocess, sys
work = os.environ["WORK"]
command = [sys.executable, "-m", "agent.launch.guard", "rank_program"]
ranks = [subprocess.Popen(command, env={**os.environ, "PYTHONPATH": work, "RANK": str(rank)}) for rank in (0, 1)]
sys.exit(max(abs(rank.wait()) for rank in ranks))
"""
"""Launcher of two ranks, each under its guard."""
RANK_PROGRAM = """
import os, pathlib, signal, time
from agent.gang.heartbeat import rank_heartbeat
rank_heartbeat().phase, rank_heartbeat().grouped = "collective all_reduce 8 B", True
pathlib.Path(os.environ["WORK"], f"pid{os.environ['RANK']}").write_text(str(os.getpid()))
time.sleep(1)
if os.environ["RANK"] == "1":
    os.kill(os.getpid(), signal.SIGNAL)
time.sleep(60)
"""
"""Program of each rank. The test replaces SIGNAL by the name of a signal, which rank 1 sends to itself after 1 s."""


@pytest.mark.parametrize(
    ("signal_name", "kind", "why"),
    [
        ("SIGSTOP", "rank_silent", "silent for 3 s: its process is stopped"),
        ("SIGKILL", "rank_ended", "killed by SIGKILL"),
    ],
)
def test_rank_that_blocks_the_other_ranks_is_the_culprit(
    run: HostRun, monkeypatch: pytest.MonkeyPatch, aborts: list[GangMonitor], signal_name: str, kind: str, why: str
) -> None:
    monkeypatch.setattr(culprit, "RANK_SILENT_S", 3.0)
    work = run.directory / "work"
    program = f"open({str(work / 'rank_program.py')!r}, 'w').write({RANK_PROGRAM.replace('SIGNAL', signal_name)!r})\n{LAUNCHER}"
    launched = launch(run, program).launches[0]
    assert launched.outcome == "failed"
    assert launched.reason == f'host h1 cpu=1 rank 1 in phase "collective all_reduce 8 B": {why}'
    assert launched.culprit is not None
    assert (launched.culprit.kind, launched.culprit.scope, launched.culprit.rank) == (kind, "cpu=1", 1)
    assert run.record().launches[0] == launched
    assert not aborts
    for rank in (0, 1):
        assert_ended(int((work / f"pid{rank}").read_text()))


def test_blocked_driver_does_not_delay_the_supervisor(run: HostRun, monkeypatch: pytest.MonkeyPatch) -> None:
    """A collector blocks for up to 20 s in a snapshot, but the launch ends soon after its ranks."""
    monkeypatch.setattr(snapshot_sampler, "PERIOD_S", 0.1)
    monkeypatch.setattr(launch_thread, "GRACE_S", 0.2)
    ended = threading.Event()

    class Blocking:
        name = "blocking"

        def collect(self) -> Iterator[Family]:
            ended.wait(20)
            yield from ()

    began = time.monotonic()
    record = launch(
        run, "import time; ranks, phase, code = (0, 1), 'end', 0" + WRITE_RESULTS + "time.sleep(1)", [], [Blocking()]
    )
    ended.set()
    assert record.launches[0].outcome == "finished"
    assert time.monotonic() - began < 10


def assert_ended(pid: int, timeout_s: float = 10.0) -> None:
    """Wait for the end of the process; fail if it still runs after the time-out. A zombie counts as ended."""
    end = time.monotonic() + timeout_s
    while time.monotonic() < end:
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except FileNotFoundError:
            return
        if state == "Z":
            return
        time.sleep(0.02)
    pytest.fail(f"process {pid} still runs")


def test_plan_of_another_run_is_refused(run: HostRun) -> None:
    other = to_json(builders.plan(profile="rehearsal")) | {"run_id": "r2"}
    with pytest.raises(documents.DocumentError, match="belongs to run r1"):
        HostRun.begin(run.directory, "h1", json.dumps(other))


def test_error_for_an_unknown_host_suggests_a_similar_host(run: HostRun) -> None:
    with pytest.raises(documents.DocumentError, match=r"host h11 is not in the plan of run r1 \(did you mean h1\?\)"):
        HostRun(run.directory, "h11")


@pytest.mark.parametrize("problem", ["link", "world-writable", "file"])
def test_unsafe_run_directory_is_refused(tmp_path: Path, problem: str) -> None:
    directory = tmp_path / "run"
    if problem == "link":
        (tmp_path / "real").mkdir()
        directory.symlink_to(tmp_path / "real")
    elif problem == "file":
        directory.write_text("")
    else:
        directory.mkdir()
        directory.chmod(0o777)
    with pytest.raises((documents.DocumentError, FileExistsError)):
        HostRun.begin(directory, "h1", json.dumps(to_json(builders.plan(profile="rehearsal"))))


# ---- GPUs that other processes use ----

BUSY = ("gpu.1.ComputeRunningProcesses=4711", "ProcessName.4711=/usr/bin/python3")


def bench(
    tmp_path: Path,
    *lines: str,
    share: bool = False,
    planned: Mapping[str, str] | None = None,
    options: Sequence[str] = (),
    **environment: str,
) -> Record:
    """Return the record after `rackproof bench` on a host with fake GPUs, which NVML lists and CUDA does not.

    `lines`: lines added to the scenario of the fake NVML. `share`: whether GPUs may be in use by other processes. `planned`:
    variables in rackproof_environment. `options`: options of `bench`. `environment`: environment of `bench`.
    """
    library, scenario = nvml.build(tmp_path / "library"), nvml.write(tmp_path / "now", "healthy-h200x4", *lines)
    plan = builders.plan("h1", rackproof_share_gpus=share, rackproof_gang="none")
    stage = replace(plan.stage("benchmark"), benchmarks={"gemm": {"size": 64, "seconds": 0.02}}, deadline_s=60.0)
    hidden = replace(plan.host("h1"), environment={"CUDA_VISIBLE_DEVICES": "", **(planned or {})})
    run = HostRun.begin(
        tmp_path / "runs" / "r1", "h1", json.dumps(to_json(replace(plan, stages=(stage,), hosts=(hidden,))))
    )
    subprocess.run(
        [sys.executable, "-m", "rackproof", "bench", "--run-dir", run.directory, "--host", "h1", *options],
        env={**os.environ, **nvml.environment(library, scenario), **environment},
        cwd=nvml.CHECKOUT,
        check=True,
        timeout=180,
    )
    return run.record()


@pytest.mark.parametrize(
    ("share", "lines", "reason"),
    [
        (False, BUSY, "gpu=1 is in use by process 4711 (/usr/bin/python3)"),
        (True, ("gpu.0.MigMode=1 1",), "gpu=0 is in MIG mode: disable MIG with `nvidia-smi -i 0 -mig 0`"),
    ],
    ids=["busy", "MIG"],
)
def test_busy_or_partitioned_gpu_prevents_the_launch(
    tmp_path: Path, share: bool, lines: tuple[str, ...], reason: str
) -> None:
    record = bench(tmp_path, *lines, share=share)
    assert [(done.stage, done.outcome, done.ranks) for done in record.launches] == [("benchmark", "failed", ())]
    assert record.launches[0].reason.startswith(reason)
    assert record.observations == ()
    assert record.snapshots == ()
    assert not (tmp_path / "runs" / "r1" / "work").exists()


DISTORTING = {
    "CUDA_LAUNCH_BLOCKING": "1",
    "NCCL_P2P_DISABLE": "1",
    "NCCL_SHM_DISABLE": "1",
    "NVIDIA_TF32_OVERRIDE": "1",
    "NCCL_PROTO": "LL",
    "NCCL_MAX_NCHANNELS": "2",
}


@pytest.mark.parametrize("name", DISTORTING)
def test_variable_that_distorts_measurements_prevents_the_launch(tmp_path: Path, name: str) -> None:
    value = DISTORTING[name]
    record = bench(tmp_path, **{name: value})
    assert [(done.outcome, done.ranks, done.reason) for done in record.launches] == [
        (
            "failed",
            (),
            f"{name} is {value} in the environment of this command (its shell, job or pod template), which makes a healthy GPU "
            "look slow or faulty: remove it there, or set it in rackproof_environment or with --env to measure with it",
        )
    ]
    assert record.observations == ()


def test_variables_that_the_operator_sets_for_the_run_do_not_prevent_the_launch(tmp_path: Path) -> None:
    names = [*DISTORTING]
    planned = {name: DISTORTING[name] for name in names[:2]}
    options = [f"--env={name}={DISTORTING[name]}" for name in names[2:]]
    record = bench(tmp_path, planned=planned, options=options, **DISTORTING, **fake_torch(tmp_path))
    check_launcher_started(record)


def test_busy_gpu_that_may_be_shared_does_not_prevent_the_launch(tmp_path: Path) -> None:
    """The ranks start. They measure nothing, because CUDA lists no GPU here, and every observation gives this reason."""
    record = bench(tmp_path, *BUSY, share=True)
    (launched,) = record.launches
    assert (launched.outcome, launched.reason) == ("finished", "")
    assert {observation.status for observation in record.observations} == {"error"}
    assert all(
        "CUDA shows 0 devices: none is left for gpu=" in observation.reason for observation in record.observations
    )
    assert [rank.rank for rank in launched.ranks] == [0, 1]
    phases = [snapshot.phase for snapshot in record.snapshots]
    assert (phases[0], phases[-1]) == ("before", "after")


def test_busy_gpu_outside_the_plan_does_not_prevent_the_launch(tmp_path: Path) -> None:
    """GPU 3, which is not in the plan, is busy."""
    record = bench(tmp_path, "gpu.3.ComputeRunningProcesses=4711", share=False, **fake_torch(tmp_path))
    check_launcher_started(record)
    assert record.snapshots[0].phase == "before"


def fake_torch(directory: Path) -> dict[str, str]:
    """Return the environment of a fake torch, whose import takes no time and ends the launcher at once."""
    (directory / "fake").mkdir()
    (directory / "fake" / "torch.py").write_text("raise SystemExit('fake torch')")
    return {"PYTHONPATH": f"{directory / 'fake'}:{nvml.CHECKOUT}"}


def test_process_that_uses_a_gpu_while_the_ranks_run_is_in_the_record(tmp_path: Path) -> None:
    """The launcher adds two processes to those on GPU 1: itself, and this test, which is no process of the launch."""
    environment = fake_torch(tmp_path)
    (tmp_path / "fake" / "torch.py").write_text(f"""
import os, time
with open(os.environ["RACKPROOF_NVML_SCENARIO"], "a") as scenario:
    scenario.write(f"gpu.1.ComputeRunningProcesses={{os.getpid()}} {os.getpid()}\\nProcessName.{os.getpid()}=pytest\\n")
time.sleep(3)
raise SystemExit("fake torch")
""")
    (launched,) = bench(tmp_path, **environment).launches
    assert launched.other_processes == {"gpu=1": f"process {os.getpid()} (pytest)"}
    assert launched.reason.endswith(f"; gpu=1 was also in use by process {os.getpid()} (pytest)")


def check_launcher_started(record: Record) -> None:
    """Check that the launcher was started and imported the fake torch."""
    (launched,) = record.launches
    assert "fake torch" in launched.log_tail
