"""A run that is cut off goes on where it was, and nobody else gets in: the lock, the lease, and what is left behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pytest

from agent.cli.export import EndOfRun
from agent.run import background, lease
from agent.run.record import HostRun
from fleet.records import run_lock
from rackproof import main as rackproof
from schemas import documents, locks, run_directory
from schemas.errors import HeldError
from schemas.locks import Claim
from schemas.plans import Plan
from schemas.records import Snapshot, to_json
from tests import ROOT, builders


@pytest.fixture
def bystander() -> Iterator[subprocess.Popen[bytes]]:
    """A process that lives, as somebody else's playbook would."""
    with subprocess.Popen(["sleep", "600"]) as process:
        yield process
        process.kill()


def of(pid: int, directory: Path, **changes: object) -> Claim:
    """The claim of that process on the run in `directory`."""
    claim = locks.claim(directory.name, directory.parent, pid, "2026-11-21T04:00:00.000000Z")
    return replace(claim, user="alice", host="control1", **changes)  # type: ignore[arg-type]


def write_claim(directory: Path, by: Claim) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    with locks.exclusive(directory / run_directory.LOCK) as file:
        locks.write_line(file, {**vars(by), "running": list(by.running)})


def journal(directory: Path) -> list[dict[str, object]]:
    lines = (directory / run_directory.JOURNAL).read_text().splitlines()
    events = [json.loads(line) for line in lines]
    for event in events:
        documents.validate(event, "journal", source="journal")
    return events


# --- the lock


def test_second_operator_sees_holder_start_and_remedy(tmp_path: Path, bystander: subprocess.Popen[bytes]) -> None:
    write_claim(tmp_path / "r1", of(bystander.pid, tmp_path / "r1"))
    with pytest.raises(HeldError) as refused:
        run_lock.acquire(tmp_path / "r1")
    assert str(refused.value) == (
        f"run r1 is locked by alice on control1 (process {bystander.pid}) since 2026-11-21T04:00:00.000000Z: "
        f"wait until it finishes, or stop it (kill {bystander.pid}) and start this again to resume the run; "
        "for a separate run choose another rackproof_run_id"
    )
    with pytest.raises(HeldError):  # one that can be asked is not passed over
        run_lock.acquire(tmp_path / "r1", take_over=True)
    assert not (tmp_path / "r1" / run_directory.JOURNAL).exists()


def test_lock_of_a_killed_playbook_is_void(tmp_path: Path) -> None:
    with subprocess.Popen(["sleep", "600"]) as gone:
        write_claim(tmp_path / "r1", of(gone.pid, tmp_path / "r1"))
        gone.kill()
    assert run_lock.acquire(tmp_path / "r1") == (
        f"alice on control1 (process {gone.pid}) held the lock of this run since 2026-11-21T04:00:00.000000Z and has exited"
    )


@pytest.mark.parametrize(
    ("change", "lives"),
    [
        ({}, True),
        ({"born": "1"}, False),  # another process has the number now
        ({"boot_id": "another"}, False),  # the machine was booted again
        ({"pid_namespace": "pid:[1]"}, None),  # a container's numbers mean nothing here
        ({"machine": "another", "boot_id": "another"}, None),
    ],
)
def test_holder_liveness_is_exact_or_unknown(
    change: dict[str, str], lives: bool | None, tmp_path: Path, bystander: subprocess.Popen[bytes]
) -> None:
    assert of(bystander.pid, tmp_path / "r1", **change).lives() is lives


def test_holder_that_cannot_be_asked_is_passed_over_only_on_demand(tmp_path: Path) -> None:
    write_claim(tmp_path / "r1", of(1, tmp_path / "r1", machine="another"))
    with pytest.raises(HeldError, match=r"state is unknown.* rackproof_take_over"):
        run_lock.acquire(tmp_path / "r1")
    assert "held the lock of this run" in run_lock.acquire(tmp_path / "r1", take_over=True)


@pytest.mark.parametrize("text", ["", '{"run_id": "r1", "user"', "\0" * 100, "null\n", '{"run_id": "r1"}\n'])
def test_truncated_lock_blocks_no_run(text: str, tmp_path: Path) -> None:
    (tmp_path / "r1").mkdir()
    (tmp_path / "r1" / run_directory.LOCK).write_text(text)
    assert run_lock.acquire(tmp_path / "r1") == ""
    assert run_lock.holder(tmp_path / "r1")


def test_run_is_begun_resumed_and_given_back(tmp_path: Path) -> None:
    run_lock.acquire(tmp_path / "r1")
    (tmp_path / "r1" / "plan.json").write_text("{}")
    run_lock.acquire(tmp_path / "r1")
    with (tmp_path / "r1" / run_directory.JOURNAL).open("a") as file:
        file.write('{"at": "2026-')  # killed while it wrote
    run_lock.acquire(tmp_path / "r1")
    run_lock.release(tmp_path / "r1", "accepted")
    assert not (tmp_path / "r1" / run_directory.LOCK).exists()
    assert [event["what"] for event in journal(tmp_path / "r1")] == ["begun", "resumed", "resumed", "reported"]


def test_report_by_another_operator_releases_nothing(tmp_path: Path, bystander: subprocess.Popen[bytes]) -> None:
    write_claim(tmp_path / "r1", of(bystander.pid, tmp_path / "r1"))
    run_lock.release(tmp_path / "r1", "accepted")
    assert run_lock.holder(tmp_path / "r1")


def test_claim_names_the_other_runs_that_are_carried_out(tmp_path: Path, bystander: subprocess.Popen[bytes]) -> None:
    write_claim(tmp_path / "live", of(bystander.pid, tmp_path / "live"))
    write_claim(tmp_path / "elsewhere", of(1, tmp_path / "elsewhere", machine="another"))
    write_claim(tmp_path / "dead", of(bystander.pid, tmp_path / "dead", born="1"))
    run_lock.acquire(tmp_path / "r1")
    mine = run_lock.holder(tmp_path / "r1")
    assert mine
    assert mine.running == ("elsewhere", "live")


PLAYBOOK = """
import subprocess, sys, time
done = subprocess.run(["/bin/sh", "-c", sys.argv[1]])
print(done.returncode, flush=True)
time.sleep(float(sys.argv[2]))
"""


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """Where such playbooks run: what each of them reads is there before the first of them starts."""
    (tmp_path / "ansible-playbook").write_text(PLAYBOOK)
    listing = {
        "gpu_hosts": {"hosts": ["h1"]},
        "_meta": {"hostvars": {"h1": {"rackproof_profile": "rehearsal", "rackproof_gang": "none"}}},
    }
    (tmp_path / "inventory.json").write_text(json.dumps(listing))
    return tmp_path


def playbook(checkout: Path, seconds: float) -> subprocess.Popen[str]:
    """A process that is an ansible-playbook as far as its command line goes, and plans through a shell."""
    plan = f"{sys.executable} {ROOT / 'rackproof'} plan -i - --run-dir {checkout}/runs/r1 < {checkout}/inventory.json"
    return subprocess.Popen(
        [sys.executable, checkout / "ansible-playbook", plan, str(seconds)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def test_of_two_playbooks_on_one_run_the_second_is_refused_until_the_first_is_killed(checkout: Path) -> None:
    with playbook(checkout, 600) as first:
        assert first.stdout
        assert [first.stdout.readline().split()[0] for _ in range(2)] == ["run", "0"]
        mine = run_lock.holder(checkout / "runs" / "r1")
        assert mine
        assert mine.pid == first.pid
        with playbook(checkout, 0) as second:
            reported = second.communicate()[0]
        assert f"(process {first.pid}) since {mine.since}: wait until it finishes" in reported
        assert reported.endswith("\n75\n")
        first.kill()
    with playbook(checkout, 0) as third:
        reported = third.communicate()[0]
    assert f"(process {first.pid}) held the lock of this run since {mine.since} and has exited" in reported
    assert reported.endswith("\n0\n")
    assert [event["what"] for event in journal(checkout / "runs" / "r1")] == ["begun", "resumed"]


def test_many_at_once_make_one_plan(checkout: Path) -> None:
    """Whoever comes first has it; nobody sees half of anything."""
    started = [playbook(checkout, 600) for _ in range(4)]
    try:
        codes = []
        for process in started:
            assert process.stdout
            codes.append(next(int(line) for line in process.stdout if line.strip().isdigit()))
    finally:
        for process in started:
            process.kill()
            process.communicate()
    assert sorted(codes) == [0, 75, 75, 75]


def test_what_a_killed_attempt_left_is_removed_and_nothing_else(tmp_path: Path) -> None:
    run = tmp_path / "r1"
    kept = {
        "plan.json": "{}",
        "hosts/h1.json": "{}",
        "gangs/a/h1.json": "{}",
        "report.json": "{}",
        ".hidden": "an operator's",
    }
    left = {
        ".report.json.ab3_x9zz": "{",
        "hosts/.h1.json.abcdefgh": "",
        "gangs/a/.h1.json.abcdefgh": "",
        "agent/a.whl": "PK",
    }
    for name, text in {**kept, **left}.items():
        (run / name).parent.mkdir(parents=True, exist_ok=True)
        (run / name).write_text(text)
    (run / "events.jsonl").write_text('{"at": 1}\n{"at": 2}\n{"at"')
    run_lock.acquire(run)
    present = {str(path.relative_to(run)) for path in run.rglob("*") if path.is_file()}
    assert present == {*kept, "events.jsonl", run_directory.LOCK, run_directory.JOURNAL}
    assert (run / "events.jsonl").read_text() == '{"at": 1}\n{"at": 2}\n'


def test_shorter_line_overwrites_a_longer_one(tmp_path: Path) -> None:
    path = tmp_path / "lease.json"
    for runs in ("/a/very/long/directory/of/runs", "/runs"):
        with locks.exclusive(path) as file:
            locks.write_line(file, {**vars(of(1, tmp_path / "r1", runs=runs)), "running": []})
    assert json.loads(path.read_text())["runs"] == "/runs"


def test_who_waits_for_a_file_that_is_removed_gets_the_next_one(tmp_path: Path) -> None:
    path, order = tmp_path / "lock.json", []

    def second() -> None:
        with locks.exclusive(path):
            order.append(path.exists())

    with locks.exclusive(path):
        waiting = threading.Thread(target=second)
        waiting.start()
        time.sleep(0.1)
        assert order == []
        path.unlink()
    waiting.join()
    assert order == [True]


# --- the lease


def plan(run_id: str = "r1") -> Plan:
    return replace(builders.plan(profile="rehearsal"), run_id=run_id)


def claim(state: Path, run_id: str, since: str, **changes: object) -> Claim:
    return replace(of(1, state / "control" / run_id), since=f"2026-11-21T{since}:00.000000Z", **changes)  # type: ignore[arg-type]


def acquire(state: Path, run_id: str, since: str = "04:00", *, take_over: bool = False, **changes: object) -> str:
    (state / "runs").mkdir(exist_ok=True)
    return lease.acquire(
        state / "runs" / run_id, plan(run_id), claim(state, run_id, since, **changes), take_over=take_over
    )


def lying(state: Path) -> dict[str, object]:
    result: dict[str, object] = documents.read(state / "lease.json", "lease")
    return result


def aged(state: Path, seconds: float) -> None:
    """The lease as it would be had it been renewed that long ago."""
    at = datetime.now(timezone.utc) - timedelta(seconds=seconds)
    (state / "lease.json").write_text(json.dumps({**lying(state), "renewed": at.strftime("%Y-%m-%dT%H:%M:%SZ")}) + "\n")


ELSEWHERE = {"machine": "another", "user": "bob", "host": "control2"}


def test_another_run_is_refused_with_the_holder(tmp_path: Path) -> None:
    assert acquire(tmp_path, "r1") == ""
    before = lying(tmp_path)
    with pytest.raises(HeldError) as refused:
        acquire(tmp_path, "r2", "05:00", **ELSEWHERE)
    assert f"held by run r1 of alice on control1 since {before['since']}" in str(refused.value)
    assert "rackproof_take_over" in str(refused.value)
    assert lying(tmp_path) == before


def test_same_run_goes_on_with_its_lease(tmp_path: Path) -> None:
    acquire(tmp_path, "r1")
    since = lying(tmp_path)["since"]
    assert acquire(tmp_path, "r1", "05:00", user="carol") == ""
    assert lying(tmp_path)["since"] == since
    assert lying(tmp_path)["by"]["user"] == "carol"  # type: ignore[index]


def test_same_name_of_another_plan_is_another_run(tmp_path: Path) -> None:
    acquire(tmp_path, "r1")
    other = replace(plan("r1"), nonce="f" * 32)
    with pytest.raises(HeldError):
        lease.acquire(tmp_path / "runs" / "r1", other, claim(tmp_path, "r1", "05:00", **ELSEWHERE))


def test_lease_ends_when_nothing_was_heard_for_longer_than_the_longest_stage(tmp_path: Path) -> None:
    acquire(tmp_path, "r1")
    longest = max(stage.deadline_s for stage in plan().stages)
    assert lying(tmp_path)["lasts_s"] == longest + lease.IDLE_S
    aged(tmp_path, longest + lease.IDLE_S - 30)
    with pytest.raises(HeldError):
        acquire(tmp_path, "r2", "05:00", **ELSEWHERE)
    aged(tmp_path, longest + lease.IDLE_S + 30)
    assert acquire(tmp_path, "r2", "05:00", **ELSEWHERE).startswith("taken over from run r1 of alice on control1")


EXPORT = """
import sys
from rackproof import main as rackproof
from agent.cli import export
from agent.run import lease
export.FRESH_S = lease.IDLE_S = 0.1
sys.exit(rackproof.main(["export", "--for-run", "--port=0", "--sample-hz=0", "--state", sys.argv[1]]))
"""


def test_exporter_detects_the_end_of_its_run(tmp_path: Path) -> None:
    """A host that left the run is not told to stop its exporter."""
    end_of_run = EndOfRun(tmp_path)
    scraped, idle = lease.IDLE_S - 1, lease.IDLE_S + 1
    assert not end_of_run.is_reached(idle)  # no run yet: the host is only monitored
    acquire(tmp_path, "r1")
    assert not end_of_run.is_reached(idle)
    aged(tmp_path, float(str(lying(tmp_path)["lasts_s"])) + 1)
    assert not end_of_run.is_reached(scraped)
    assert end_of_run.is_reached(idle)
    acquire(tmp_path, "r2", **ELSEWHERE)
    assert not end_of_run.is_reached(idle)


def test_exporter_exits_after_its_run(tmp_path: Path) -> None:
    acquire(tmp_path, "r1")
    command = [sys.executable, "-c", EXPORT, tmp_path]
    with subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True) as exporter:
        assert exporter.stderr
        assert "listening on" in exporter.stderr.readline()
        time.sleep(1)
        assert exporter.poll() is None
        assert lease.release(tmp_path, "r1") == ""
        assert exporter.wait(timeout=10) == 0
        assert "run finished" in exporter.stderr.read()


def test_control_node_that_knows_the_other_run_is_over_takes_the_host(tmp_path: Path) -> None:
    acquire(tmp_path, "r1")
    assert "is no longer running" in acquire(tmp_path, "r2", "05:00")


@pytest.mark.parametrize(
    ("since", "changes"),
    [
        ("05:00", {"running": ("r1",)}),  # it is carried out
        ("03:00", {}),  # it began later than who asks, who cannot know
        ("05:00", {"runs": "/elsewhere"}),  # another directory of runs: nothing is known of it
    ],
)
def test_control_node_that_does_not_know_it_over_does_not(
    since: str, changes: dict[str, object], tmp_path: Path
) -> None:
    acquire(tmp_path, "r1")
    with pytest.raises(HeldError):
        acquire(tmp_path, "r2", since, **changes)


SUPERVISOR = """
import sys, time
from pathlib import Path
from agent.run import lease
from tests.unit.agent.run.test_resume import plan
lease.renew(Path(sys.argv[1]) / "runs" / "r1", plan("r1"), "benchmark")
print("up", flush=True)
time.sleep(600)
"""


@pytest.fixture
def supervisor(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """Measures for r1, which has the host."""
    acquire(tmp_path, "r1")
    command = [sys.executable, "-c", SUPERVISOR, str(tmp_path)]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout
        assert process.stdout.readline() == "up\n"
        yield process
        process.kill()


def test_host_on_which_a_stage_runs_is_not_taken_however_old_the_lease(
    tmp_path: Path, supervisor: subprocess.Popen[str]
) -> None:
    aged(tmp_path, 1e6)
    with pytest.raises(HeldError, match=f"its stage benchmark as process {supervisor.pid} "):
        acquire(tmp_path, "r2", "05:00")
    supervisor.kill()
    supervisor.wait()
    assert acquire(tmp_path, "r2", "05:00")


def test_taking_over_ends_what_the_other_run_does_here(tmp_path: Path, supervisor: subprocess.Popen[str]) -> None:
    assert acquire(tmp_path, "r2", take_over=True, **ELSEWHERE).startswith("taken over by force from run r1")
    assert supervisor.wait() == -signal.SIGTERM
    with pytest.raises(HeldError, match="held by run r2 of bob"):
        lease.renew(tmp_path / "runs" / "r1", plan("r1"))


def test_only_the_run_itself_gives_the_host_back(tmp_path: Path) -> None:
    acquire(tmp_path, "r1")
    lease.release(tmp_path, "r2")
    assert (tmp_path / "lease.json").exists()
    lease.release(tmp_path, "r1")
    assert not (tmp_path / "lease.json").exists()


def test_stop_leaves_alone_what_another_run_has(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    acquire(tmp_path, "r1")
    exporter, by = (
        str(tmp_path / "exporter"),
        json.dumps({**vars(claim(tmp_path, "r2", "05:00", **ELSEWHERE)), "running": []}),
    )
    for asks in (["--run-dir", "/x/runs/r2", "--claim", by], ["--run-dir", "/x/runs/r2"], ["--claim", by]):
        assert rackproof.main(["stop", exporter, *asks]) == lease.HELD
        assert "this host is held by run r1 of alice" in capsys.readouterr().err
    assert rackproof.main(["stop", exporter, "--run-dir", "/x/runs/r1"]) == 0
    assert not (tmp_path / "lease.json").exists()


@pytest.mark.parametrize(
    "asks", [["--run-dir", "/x/runs/r1", "--end"], ["--take-over"], ["--run-dir", "/x/runs/r2", "--take-over"]]
)
def test_stop_ends_what_measures_here(
    tmp_path: Path, supervisor: subprocess.Popen[str], asks: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert rackproof.main(["stop", str(tmp_path / "exporter"), *asks]) == 0
    assert supervisor.wait() == -signal.SIGTERM
    assert capsys.readouterr().out.startswith(f"ended stage benchmark of run r1 (process {supervisor.pid})\n")
    assert not (tmp_path / "lease.json").exists()


def test_the_end_of_a_playbook_ends_no_stage_that_goes_on(
    tmp_path: Path, supervisor: subprocess.Popen[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert rackproof.main(["stop", str(tmp_path / "exporter"), "--run-dir", "/x/runs/r1"]) == 0
    assert f"stage benchmark of run r1 is still running (process {supervisor.pid})" in capsys.readouterr().out
    assert supervisor.poll() is None
    assert (tmp_path / "lease.json").exists()


def test_stop_ends_what_has_only_begun(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_dir = tmp_path / "runs" / "r1"
    acquire(tmp_path, "r1")
    start = "from pathlib import Path; from agent.run import background; "
    start += f"background.start(['-c', 'import time; time.sleep(600)'], Path({str(run_dir)!r}), 'soak')"
    subprocess.run([sys.executable, "-c", start], cwd=ROOT, check=True)
    assert rackproof.main(["stop", str(tmp_path / "exporter"), "--run-dir", str(run_dir), "--end"]) == 0
    assert capsys.readouterr().out == "soak ended\nexporter does not run\n"
    assert not background.is_running(run_dir, "soak")


def test_poll_does_not_restart_a_stopped_stage(tmp_path: Path) -> None:
    acquire(tmp_path, "r1")
    lease.renew(tmp_path / "runs" / "r1", plan("r1"), taken=True)
    lease.release(tmp_path, "r1")
    with pytest.raises(HeldError, match="run r1 was stopped on this host: resume it to continue"):
        lease.renew(tmp_path / "runs" / "r1", plan("r1"), taken=True)
    assert not (tmp_path / "lease.json").exists()


def test_stop_without_a_run_ends_no_stage(tmp_path: Path, supervisor: subprocess.Popen[str]) -> None:
    assert rackproof.main(["stop", str(tmp_path / "exporter")]) == lease.HELD
    assert supervisor.poll() is None


# --- what a host does when it is asked again


@pytest.fixture
def run(tmp_path: Path) -> HostRun:
    return HostRun.begin(tmp_path / "runs" / "r1", "h1", text())


def text() -> str:
    return json.dumps(to_json(plan()))


def together(*commands: Sequence[str], stdin: str = "") -> list[str]:
    """The outputs of commands that are started at once, and all end well."""
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    started = [subprocess.Popen([sys.executable, *command], cwd=ROOT, text=True, **pipes) for command in commands]
    said = [process.communicate(stdin)[0] for process in started]
    assert [process.returncode for process in started] == [0] * len(commands), said
    return said


def test_run_that_goes_on_keeps_its_first_snapshot(tmp_path: Path) -> None:
    """Counters are compared with it; and two commands at once, one of a playbook that was killed, are as one."""
    directory = tmp_path / "runs" / "r1"
    directory.parent.mkdir()
    inspect = ["rackproof", "inspect", "--plan", "-", "--run-dir", str(directory), "--host", "h1"]
    together(inspect, inspect, inspect, stdin=text())
    before = (directory / "record.json").read_text()
    assert [(snapshot["stage"], snapshot["phase"]) for snapshot in json.loads(before)["snapshots"]] == [
        ("preflight", "before")
    ]
    together(inspect, stdin=text())
    assert (directory / "record.json").read_text() == before


def test_nothing_is_lost_where_several_add_to_a_record_at_once(run: HostRun) -> None:
    def add(number: int) -> None:
        snapshot = Snapshot(stage=f"s{number}", phase="before", at=builders.WHEN, duration_s=0.0, metrics=())
        HostRun(run.directory, "h1").append(snapshots=[snapshot])

    threads = [threading.Thread(target=add, args=(number,)) for number in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert {observed.stage for observed in run.record().snapshots} == {f"s{number}" for number in range(12)}


def test_started_twice_at_once_it_runs_once(tmp_path: Path) -> None:
    arguments = "['-c', 'import time; time.sleep(600)']"
    start = "from pathlib import Path; from agent.run import background; "
    start += f"print(background.start({arguments}, Path({str(tmp_path)!r}), 'stage'))"
    said = together(*[["-c", start]] * 4)
    pid = int((tmp_path / "stage.pid").read_text().split()[0])
    os.kill(pid, signal.SIGKILL)
    assert sorted(said) == sorted([f"stage started as process {pid}\n", *[f"stage runs as process {pid}\n"] * 3])


def test_who_comes_while_a_stage_is_carried_out_waits_for_its_end(tmp_path: Path) -> None:
    hold = f"import sys, time; sys.path.insert(0, {str(ROOT)!r}); from pathlib import Path; from agent.run import background\n"
    hold += f"with background.exclusive_task(Path({str(tmp_path)!r}), 'stage'):\n    print('up', flush=True); time.sleep(600)"
    with subprocess.Popen([sys.executable, "-c", hold], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout
        assert process.stdout.readline() == "up\n"
        threading.Timer(0.5, process.kill).start()
        began = time.monotonic()
        with background.exclusive_task(tmp_path, "stage"):
            assert time.monotonic() - began >= 0.4
