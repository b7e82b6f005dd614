"""Resume interrupted runs, and refuse simultaneous use of a run directory or a host.

On the control node, a lock allows only one playbook at a time in a run directory. On each host, a lease allows only one run at a
time. The lock and the lease each have a claim, which identifies the operator and the process of a run.
"""

from __future__ import annotations

import json
import os
import shlex
import signal
import socket
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
from agent.cli.wait import NOT_FINISHED, wait_for_stage
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
def other_process() -> Iterator[subprocess.Popen[bytes]]:
    """Yield a running process, which stands in for the playbook of another operator."""
    with subprocess.Popen(["sleep", "600"]) as process:
        yield process
        process.kill()


def make_claim(pid: int, directory: Path, **changes: object) -> Claim:
    """Return a claim to the run in `directory` by process `pid` of alice on control1. `changes`: fields to replace."""
    claim = locks.claim(directory.name, directory.parent, pid, "2026-11-21T04:00:00.000000Z")
    return replace(claim, **{"user": "alice", "host": "control1", **changes})  # type: ignore[arg-type]


def write_claim(directory: Path, by: Claim) -> None:
    """Lock the run in `directory` with this claim."""
    directory.mkdir(parents=True, exist_ok=True)
    with locks.exclusive(directory / run_directory.LOCK) as file:
        locks.write_line(file, {**vars(by), "running": list(by.running)})


def read_journal(directory: Path) -> list[dict[str, object]]:
    """Return the events of the run's journal, each of which must be valid."""
    lines = (directory / run_directory.JOURNAL).read_text().splitlines()
    events = [json.loads(line) for line in lines]
    for event in events:
        documents.validate(event, "journal", source="journal")
    return events


# --- the lock of a run directory


def test_error_for_a_second_operator_names_the_holder_and_the_remedy(
    tmp_path: Path, other_process: subprocess.Popen[bytes]
) -> None:
    write_claim(tmp_path / "r1", make_claim(other_process.pid, tmp_path / "r1"))
    with pytest.raises(HeldError) as error:
        run_lock.acquire(tmp_path / "r1")
    assert str(error.value) == (
        f"run r1 is locked by alice on control1 (process {other_process.pid}) since 2026-11-21T04:00:00.000000Z: "
        f"wait until it finishes, or stop it (kill {other_process.pid}) and repeat this command to resume the run; "
        "for a separate run choose another rackproof_run_id"
    )
    with pytest.raises(HeldError):  # the lock of a running process cannot be taken over
        run_lock.acquire(tmp_path / "r1", take_over=True)
    assert not (tmp_path / "r1" / run_directory.JOURNAL).exists()


def test_lock_of_a_killed_playbook_is_void(tmp_path: Path) -> None:
    with subprocess.Popen(["sleep", "600"]) as process:
        write_claim(tmp_path / "r1", make_claim(process.pid, tmp_path / "r1"))
        process.kill()
    assert run_lock.acquire(tmp_path / "r1") == (
        f"alice on control1 (process {process.pid}) held the lock of this run since 2026-11-21T04:00:00.000000Z and has exited"
    )


@pytest.mark.parametrize(
    ("change", "is_alive"),
    [
        ({}, True),
        ({"start_time": "1"}, False),  # the process id was reused
        ({"boot_id": "another", "host": socket.gethostname()}, False),  # the machine was rebooted
        (
            {"boot_id": "another", "host": "control9"},
            None,
        ),  # a clone of the machine, or the machine was renamed and rebooted
        ({"host": "control9"}, True),  # the machine was renamed
        ({"boot_id": "", "host": "control9"}, None),
        ({"pid_namespace": "pid:[1]"}, None),  # process ids of another container are unknown here
        ({"machine": "another", "boot_id": "another"}, None),
    ],
)
def test_holder_is_alive_dead_or_unknown(
    change: dict[str, str], is_alive: bool | None, tmp_path: Path, other_process: subprocess.Popen[bytes]
) -> None:
    """`is_alive`: whether the process of the claim is running; None: unknown."""
    assert make_claim(other_process.pid, tmp_path / "r1", **change).is_running() is is_alive


def test_lock_of_a_holder_on_another_machine_needs_take_over(tmp_path: Path) -> None:
    write_claim(tmp_path / "r1", make_claim(1, tmp_path / "r1", machine="another"))
    with pytest.raises(HeldError, match=r"state is unknown.* rackproof_take_over"):
        run_lock.acquire(tmp_path / "r1")
    note = run_lock.acquire(tmp_path / "r1", take_over=True)
    assert "held the lock of this run" in note
    assert note.endswith("and its lock was taken over")


@pytest.mark.parametrize("text", ["", '{"run_id": "r1", "user"', "\0" * 100, "null\n", '{"run_id": "r1"}\n'])
def test_damaged_lock_does_not_block_its_run(text: str, tmp_path: Path) -> None:
    (tmp_path / "r1").mkdir()
    (tmp_path / "r1" / run_directory.LOCK).write_text(text)
    assert run_lock.acquire(tmp_path / "r1") == ""
    assert run_lock.holder(tmp_path / "r1")


def test_journal_has_start_resumptions_and_report(tmp_path: Path) -> None:
    run_lock.acquire(tmp_path / "r1")
    (tmp_path / "r1" / "plan.json").write_text("{}")
    run_lock.acquire(tmp_path / "r1")
    with (tmp_path / "r1" / run_directory.JOURNAL).open("a") as file:
        file.write('{"at": "2026-')  # an incomplete line, as if its writer had been killed
    run_lock.acquire(tmp_path / "r1")
    run_lock.release(tmp_path / "r1", "accepted")
    assert not (tmp_path / "r1" / run_directory.LOCK).exists()
    assert [event["what"] for event in read_journal(tmp_path / "r1")] == ["begun", "resumed", "resumed", "reported"]


def test_release_keeps_the_lock_of_another_operator(tmp_path: Path, other_process: subprocess.Popen[bytes]) -> None:
    write_claim(tmp_path / "r1", make_claim(other_process.pid, tmp_path / "r1"))
    run_lock.release(tmp_path / "r1", "accepted")
    assert run_lock.holder(tmp_path / "r1")


def test_claim_lists_the_other_runs_that_are_or_may_be_running(
    tmp_path: Path, other_process: subprocess.Popen[bytes]
) -> None:
    write_claim(tmp_path / "live", make_claim(other_process.pid, tmp_path / "live"))
    write_claim(tmp_path / "elsewhere", make_claim(1, tmp_path / "elsewhere", machine="another"))
    write_claim(tmp_path / "dead", make_claim(other_process.pid, tmp_path / "dead", start_time="1"))
    run_lock.acquire(tmp_path / "r1")
    claim = run_lock.holder(tmp_path / "r1")
    assert claim
    assert claim.running == ("elsewhere", "live")


PLAYBOOK = """
import subprocess, sys, time
done = subprocess.run(["/bin/sh", "-c", sys.argv[-2]])
print(done.returncode, flush=True)
time.sleep(float(sys.argv[-1]))
"""
"""A fake ansible-playbook. Its last two arguments: a shell command, which it runs and whose exit code it prints, and the seconds
for which it then sleeps."""


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """Return a directory with a fake ansible-playbook and its inventory."""
    (tmp_path / "ansible-playbook").write_text(PLAYBOOK)
    listing = {
        "gpu_hosts": {"hosts": ["h1"]},
        "_meta": {"hostvars": {"h1": {"rackproof_profile": "rehearsal", "rackproof_gang": "none"}}},
    }
    (tmp_path / "inventory.json").write_text(json.dumps(listing))
    return tmp_path


def start_playbook(checkout: Path, seconds: float) -> subprocess.Popen[str]:
    """Start the fake ansible-playbook, which plans the run `r1` through a shell and then sleeps for `seconds`."""
    plan = f"{sys.executable} {ROOT / 'rackproof'} plan -i - --run-dir {checkout}/runs/r1 < {checkout}/inventory.json"
    return subprocess.Popen(
        [sys.executable, checkout / "ansible-playbook", plan, str(seconds)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def test_second_playbook_of_a_run_is_refused_until_the_first_is_killed(checkout: Path) -> None:
    with start_playbook(checkout, 600) as first:
        assert first.stdout
        assert [first.stdout.readline().split()[0] for _ in range(3)] == ["run", "time:", "0"]
        holder = run_lock.holder(checkout / "runs" / "r1")
        assert holder
        assert holder.pid == first.pid
        with start_playbook(checkout, 0) as second:
            output = second.communicate()[0]
        assert f"(process {first.pid}) since {holder.since}: wait until it finishes" in output
        assert output.endswith("\n75\n")
        first.kill()
    with start_playbook(checkout, 0) as third:
        output = third.communicate()[0]
    assert f"(process {first.pid}) held the lock of this run since {holder.since} and has exited" in output
    assert output.endswith("\n0\n")
    assert [event["what"] for event in read_journal(checkout / "runs" / "r1")] == ["begun", "resumed"]


@pytest.mark.parametrize(
    "command",
    [
        ["ansible-playbook"],
        ["-sP", "ansible-playbook"],  # Fedora's package
        ["-X", "utf8", "-I", "ansible-playbook"],
        [".ansible-playbook-wrapped"],  # the package of Nix
        ["-s", "-m", "ansible", "playbook"],
        ["-m", "ansible.cli.playbook"],
    ],
)
def test_playbook_is_recognized_however_python_starts_it(command: list[str], tmp_path: Path) -> None:
    (tmp_path / "ansible" / "cli").mkdir(parents=True)
    for package in ("ansible", "ansible/cli"):
        (tmp_path / package / "__init__.py").touch()
    for name in ("ansible-playbook", ".ansible-playbook-wrapped", "ansible/__main__.py", "ansible/cli/playbook.py"):
        (tmp_path / name).write_text(PLAYBOOK)
    print_pid = (
        f"import sys; sys.path.insert(0, {str(ROOT)!r}); from fleet.records import run_lock; print(run_lock.playbook())"
    )
    words = [sys.executable, *command, shlex.join([sys.executable, "-c", print_pid]), "0"]
    with subprocess.Popen(words, cwd=tmp_path, stdout=subprocess.PIPE, text=True) as process:
        assert process.communicate()[0].split() == [str(process.pid), "0"]


def test_exactly_one_of_several_simultaneous_playbooks_gets_the_run(checkout: Path) -> None:
    playbooks = [start_playbook(checkout, 600) for _ in range(3)]
    try:
        codes = []
        for process in playbooks:
            assert process.stdout
            codes.append(next(int(line) for line in process.stdout if line.strip().isdigit()))
    finally:
        for process in playbooks:
            process.kill()
            process.communicate()
    assert sorted(codes) == [0, 75, 75]


def test_leftover_files_of_a_killed_run_are_removed(tmp_path: Path) -> None:
    run = tmp_path / "r1"
    kept = {
        "plan.json": "{}",
        "hosts/h1.json": "{}",
        "gangs/a/h1.json": "{}",
        "report.json": "{}",
        ".hidden": "a file of the operator",
    }
    leftover = {
        ".report.json.ab3_x9zz": "{",
        "hosts/.h1.json.abcdefgh": "",
        "gangs/a/.h1.json.abcdefgh": "",
        "agent/a.whl": "PK",
    }
    for name, text in {**kept, **leftover}.items():
        (run / name).parent.mkdir(parents=True, exist_ok=True)
        (run / name).write_text(text)
    (run / "events.jsonl").write_text('{"at": 1}\n{"at": 2}\n{"at"')
    run_lock.acquire(run)
    present = {str(path.relative_to(run)) for path in run.rglob("*") if path.is_file()}
    assert present == {*kept, "events.jsonl", run_directory.LOCK, run_directory.JOURNAL}
    assert (run / "events.jsonl").read_text() == '{"at": 1}\n{"at": 2}\n'


def test_shorter_line_replaces_a_longer_one_completely(tmp_path: Path) -> None:
    path = tmp_path / "lease.json"
    for runs in ("/a/very/long/directory/of/runs", "/runs"):
        with locks.exclusive(path) as file:
            locks.write_line(file, {**vars(make_claim(1, tmp_path / "r1", runs=runs)), "running": []})
    assert json.loads(path.read_text())["runs"] == "/runs"


def test_waiter_for_a_removed_lock_file_locks_the_new_one(tmp_path: Path) -> None:
    path, order = tmp_path / "lock.json", []

    def lock_again() -> None:
        with locks.exclusive(path):
            order.append(path.exists())

    with locks.exclusive(path):
        waiting = threading.Thread(target=lock_again)
        waiting.start()
        time.sleep(0.1)
        assert order == []
        path.unlink()
    waiting.join()
    assert order == [True]


# --- the lease of a host


def make_plan(run_id: str = "r1") -> Plan:
    """Return a plan of the profile `rehearsal` with this run id."""
    return replace(builders.plan(profile="rehearsal"), run_id=run_id)


def claim_since(state: Path, run_id: str, since: str, **changes: object) -> Claim:
    """Return the claim of run `run_id`, made at `since` (HH:MM) by a process that has ended."""
    made = {"since": f"2026-11-21T{since}:00.000000Z", "start_time": "another"}
    return replace(make_claim(1, state / "control" / run_id), **(made | changes))  # type: ignore[arg-type]


def acquire(state: Path, run_id: str, since: str = "04:00", *, take_over: bool = False, **changes: object) -> str:
    """Acquire this host for a run. Return the message about the run from which it was taken; empty if it was free."""
    (state / "runs").mkdir(exist_ok=True)
    return lease.acquire(
        state / "runs" / run_id, make_plan(run_id), claim_since(state, run_id, since, **changes), take_over=take_over
    )


def read_lease(state: Path) -> dict[str, object]:
    document: dict[str, object] = documents.read(state / "lease.json", "lease")
    return document


def set_lease_age(state: Path, seconds: float) -> None:
    """Set the last renewal of the lease to this many seconds ago."""
    at = datetime.now(timezone.utc) - timedelta(seconds=seconds)
    (state / "lease.json").write_text(
        json.dumps({**read_lease(state), "renewed": at.strftime("%Y-%m-%dT%H:%M:%SZ")}) + "\n"
    )


OTHER_OPERATOR = {"machine": "another", "user": "bob", "host": "control2"}


def test_another_run_is_refused_and_the_holder_is_named(tmp_path: Path) -> None:
    assert acquire(tmp_path, "r1") == ""
    before = read_lease(tmp_path)
    with pytest.raises(HeldError) as error:
        acquire(tmp_path, "r2", "05:00", **OTHER_OPERATOR)
    assert f"held by run r1 of alice on control1 since {before['since']}" in str(error.value)
    assert "rackproof_take_over" in str(error.value)
    assert read_lease(tmp_path) == before


@pytest.mark.parametrize(
    ("first", "second", "may_take"),
    [
        ({}, {}, True),
        ({}, {"boot_id": "another"}, True),  # the control node was rebooted
        ({}, {"host": "control9"}, True),  # the control node was renamed
        (
            {},
            {"boot_id": "another", "host": "control9"},
            False,
        ),  # a clone, or the control node was renamed and rebooted
        ({"boot_id": ""}, {"boot_id": "", "host": "control9"}, False),
        ({}, {"machine": "another", "boot_id": "another"}, False),
    ],
)
def test_newer_run_takes_the_host_of_an_interrupted_run_only_on_the_same_control_node(
    tmp_path: Path, first: dict[str, str], second: dict[str, str], *, may_take: bool
) -> None:
    acquire(tmp_path, "r1", **first)
    if may_take:
        assert acquire(tmp_path, "r2", "05:00", **second).endswith("that run is no longer running")
    else:
        with pytest.raises(HeldError, match="rackproof_take_over"):
            acquire(tmp_path, "r2", "05:00", **second)


def test_run_keeps_its_lease_when_resumed(tmp_path: Path) -> None:
    acquire(tmp_path, "r1")
    since = read_lease(tmp_path)["since"]
    assert acquire(tmp_path, "r1", "05:00", user="carol") == ""
    assert read_lease(tmp_path)["since"] == since
    assert read_lease(tmp_path)["by"]["user"] == "carol"  # type: ignore[index]


def test_same_run_id_with_another_nonce_is_another_run(tmp_path: Path) -> None:
    """The nonce in a plan distinguishes runs of the same id by different operators."""
    acquire(tmp_path, "r1")
    other = replace(make_plan("r1"), nonce="f" * 32)
    with pytest.raises(HeldError):
        lease.acquire(tmp_path / "runs" / "r1", other, claim_since(tmp_path, "r1", "05:00", **OTHER_OPERATOR))


def test_run_cannot_release_the_host_of_another_run_with_the_same_id(tmp_path: Path) -> None:
    acquire(tmp_path, "r1")
    nonce = make_plan("r1").nonce
    assert lease.held_by_other(tmp_path, "r1", nonce) is None
    assert lease.held_by_other(tmp_path, "r1") is None, "without its nonce, a run is identified by its id alone"
    other = lease.held_by_other(tmp_path, "r1", "f" * 32)
    assert other
    assert other.nonce == nonce
    assert lease.release(tmp_path, "r1", "f" * 32, end=True) == ""
    assert (tmp_path / "lease.json").exists()
    lease.release(tmp_path, "r1", nonce)
    assert not (tmp_path / "lease.json").exists()


def test_end_of_a_stage_does_not_release_a_host_that_another_run_of_the_same_id_has_taken(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(background, "wait", lambda *_: "the stage has ended")
    acquire(tmp_path, "r1")
    directory = tmp_path / "runs" / "r1"
    plan = replace(make_plan("r1"), nonce="f" * 32)
    run = HostRun.begin(directory, plan.hosts[0].name, json.dumps(to_json(plan)))
    assert wait_for_stage(run, "benchmark") == NOT_FINISHED
    assert "this host was taken by run r1 of alice" in capsys.readouterr().err
    assert (tmp_path / "lease.json").exists()


def test_lease_expires_after_the_longest_deadline_of_a_stage_plus_the_idle_time(tmp_path: Path) -> None:
    acquire(tmp_path, "r1")
    longest = max(stage.deadline_s for stage in make_plan().stages)
    assert read_lease(tmp_path)["lasts_s"] == longest + lease.IDLE_S
    set_lease_age(tmp_path, longest + lease.IDLE_S - 30)
    with pytest.raises(HeldError):
        acquire(tmp_path, "r2", "05:00", **OTHER_OPERATOR)
    set_lease_age(tmp_path, longest + lease.IDLE_S + 30)
    assert acquire(tmp_path, "r2", "05:00", **OTHER_OPERATOR).startswith("taken over from run r1 of alice on control1")


EXPORT = """
import sys
from rackproof import main as rackproof
from agent.cli import export
from agent.run import lease
export.FRESH_S = lease.IDLE_S = 0.1
sys.exit(rackproof.main(["export", "--for-run", "--port=0", "--sample-hz=0", "--state", sys.argv[1]]))
"""
"""The exporter of a run. It exits if the run has ended and the last scrape is more than IDLE_S (here 0.1 s) ago."""


def test_exporter_detects_the_end_of_its_run(tmp_path: Path) -> None:
    """The exporter must detect the end itself: no playbook stops it if the control node has crashed."""
    end_of_run = EndOfRun(tmp_path)
    recent_s, long_ago_s = lease.IDLE_S - 1, lease.IDLE_S + 1
    assert not end_of_run.is_reached(long_ago_s)  # no run has held the host yet
    acquire(tmp_path, "r1")
    assert not end_of_run.is_reached(long_ago_s)
    set_lease_age(tmp_path, float(str(read_lease(tmp_path)["lasts_s"])) + 1)
    assert not end_of_run.is_reached(recent_s)
    assert end_of_run.is_reached(long_ago_s)
    acquire(tmp_path, "r2", **OTHER_OPERATOR)
    assert not end_of_run.is_reached(long_ago_s)


def test_exporter_exits_after_the_end_of_its_run(tmp_path: Path) -> None:
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


def test_host_is_taken_from_a_run_that_is_no_longer_running(tmp_path: Path) -> None:
    """The claim of r2 is newer than that of r1, and lists no run as running."""
    acquire(tmp_path, "r1")
    assert "that run is no longer running" in acquire(tmp_path, "r2", "05:00", running=())


@pytest.mark.parametrize(
    ("since", "changes"),
    [
        ("05:00", {"running": ("r1",)}),  # the claim lists r1 as running
        ("03:00", {}),  # r1 began at 04:00, after this claim was made, so the claim could not list it
        ("05:00", {"runs": "/elsewhere"}),  # the claim lists only runs in /elsewhere, and r1 is in another directory
    ],
)
def test_host_is_not_taken_from_a_run_that_is_or_may_be_running(
    since: str, changes: dict[str, object], tmp_path: Path
) -> None:
    acquire(tmp_path, "r1")
    with pytest.raises(HeldError):
        acquire(tmp_path, "r2", since, **changes)


def test_host_is_not_taken_while_the_process_of_the_claim_runs(
    tmp_path: Path, other_process: subprocess.Popen[bytes]
) -> None:
    acquire(tmp_path, "r1", pid=other_process.pid, start_time=locks.process_start_time(other_process.pid))
    with pytest.raises(HeldError):
        acquire(tmp_path, "r2", "05:00")
    other_process.kill()
    other_process.wait()
    assert "that run is no longer running" in acquire(tmp_path, "r2", "05:00")


@pytest.mark.parametrize(("second", "may_take"), [("pid:[1]", True), (locks.pid_namespace(), False)])
def test_host_is_taken_from_a_run_in_another_container_only_if_the_control_node_knows_that_the_run_has_ended(
    second: str, tmp_path: Path, *, may_take: bool
) -> None:
    """The claim of a run without a control node is made in this container. Then nobody knows whether the first run has ended."""
    acquire(tmp_path, "r1", pid_namespace="pid:[1]")
    if may_take:
        assert "that run is no longer running" in acquire(tmp_path, "r2", "05:00", pid_namespace=second)
    else:
        with pytest.raises(HeldError, match="wait until that run ends"):
            acquire(tmp_path, "r2", "05:00", pid_namespace=second)


SUPERVISOR = """
import sys, time
from pathlib import Path
from agent.run import lease
from tests.unit.agent.run.test_resume import make_plan
lease.renew(Path(sys.argv[1]) / "runs" / "r1", make_plan("r1"), "benchmark")
print("up", flush=True)
time.sleep(600)
"""


@pytest.fixture
def supervisor(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """Yield a running supervisor of run r1. That run holds the lease of the host."""
    acquire(tmp_path, "r1")
    command = [sys.executable, "-c", SUPERVISOR, str(tmp_path)]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout
        assert process.stdout.readline() == "up\n"
        yield process
        process.kill()


def test_host_with_a_running_stage_is_not_taken_even_if_the_lease_is_old(
    tmp_path: Path, supervisor: subprocess.Popen[str]
) -> None:
    set_lease_age(tmp_path, 1e6)
    with pytest.raises(HeldError, match=f"running stage benchmark as process {supervisor.pid} "):
        acquire(tmp_path, "r2", "05:00")
    supervisor.kill()
    supervisor.wait()
    assert acquire(tmp_path, "r2", "05:00")


def test_take_over_ends_the_supervisor_of_the_other_run(tmp_path: Path, supervisor: subprocess.Popen[str]) -> None:
    assert acquire(tmp_path, "r2", take_over=True, **OTHER_OPERATOR).startswith("taken over by force from run r1")
    assert supervisor.wait() == -signal.SIGTERM
    with pytest.raises(HeldError, match="held by run r2 of bob"):
        lease.renew(tmp_path / "runs" / "r1", make_plan("r1"))


def test_only_the_run_itself_releases_the_host(tmp_path: Path) -> None:
    acquire(tmp_path, "r1")
    lease.release(tmp_path, "r2")
    assert (tmp_path / "lease.json").exists()
    lease.release(tmp_path, "r1")
    assert not (tmp_path / "lease.json").exists()


def test_stop_does_not_end_another_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    acquire(tmp_path, "r1")
    exporter, claim = (
        str(tmp_path / "exporter"),
        json.dumps({**vars(claim_since(tmp_path, "r2", "05:00", **OTHER_OPERATOR)), "running": []}),
    )
    for options in (["--run-dir", "/x/runs/r2", "--claim", claim], ["--run-dir", "/x/runs/r2"], ["--claim", claim]):
        assert rackproof.main(["stop", exporter, *options]) == lease.HELD
        assert "this host is held by run r1 of alice" in capsys.readouterr().err
    assert rackproof.main(["stop", exporter, "--run-dir", "/x/runs/r1"]) == 0
    assert not (tmp_path / "lease.json").exists()


@pytest.mark.parametrize(
    "options", [["--run-dir", "/x/runs/r1", "--end"], ["--take-over"], ["--run-dir", "/x/runs/r2", "--take-over"]]
)
def test_stop_ends_the_supervisor_on_request(
    tmp_path: Path, supervisor: subprocess.Popen[str], options: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert rackproof.main(["stop", str(tmp_path / "exporter"), *options]) == 0
    assert supervisor.wait() == -signal.SIGTERM
    assert capsys.readouterr().out.startswith(f"ended stage benchmark of run r1 (process {supervisor.pid})\n")
    assert not (tmp_path / "lease.json").exists()


def test_stop_keeps_a_running_stage_by_default(
    tmp_path: Path, supervisor: subprocess.Popen[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert rackproof.main(["stop", str(tmp_path / "exporter"), "--run-dir", "/x/runs/r1"]) == 0
    assert f"stage benchmark of run r1 is still running (process {supervisor.pid})" in capsys.readouterr().out
    assert supervisor.poll() is None
    assert (tmp_path / "lease.json").exists()


def test_stop_ends_a_background_process_that_the_lease_does_not_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir = tmp_path / "runs" / "r1"
    acquire(tmp_path, "r1")
    start = "from pathlib import Path; from agent.run import background; "
    start += f"background.start(['-c', 'import time; time.sleep(600)'], Path({str(run_dir)!r}), 'soak')"
    subprocess.run([sys.executable, "-c", start], cwd=ROOT, check=True)
    assert rackproof.main(["stop", str(tmp_path / "exporter"), "--run-dir", str(run_dir), "--end"]) == 0
    assert capsys.readouterr().out == "soak ended\nexporter is not running\n"
    assert not background.is_running(run_dir, "soak")


@pytest.mark.parametrize("is_running", [True, False])
def test_stop_reports_whether_it_ended_a_process(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], is_running: bool
) -> None:
    start = "from pathlib import Path; from agent.run import background; "
    start += (
        f"background.start(['-c', 'import time; time.sleep(600)'], Path({str(tmp_path)!r}) / 'exporter', 'exporter')"
    )
    if is_running:
        subprocess.run([sys.executable, "-c", start], cwd=ROOT, check=True)
    assert rackproof.main(["stop", "--json", str(tmp_path / "exporter")]) == 0
    message = "exporter ended" if is_running else "exporter is not running"
    assert json.loads(capsys.readouterr().out) == {"ended": is_running, "messages": [message]}


def test_start_waits_until_the_process_is_ready(tmp_path: Path) -> None:
    ready = tmp_path / "ready"
    # The text in the log does not make the process ready: `start` must wait for `notify_ready`.
    program = "import pathlib, time; from agent.run import background; print('listening', flush=True); time.sleep(0.2)"
    program += f"; pathlib.Path({str(ready)!r}).touch(); background.notify_ready(); time.sleep(600)"
    assert start_and_wait(tmp_path, program).stdout.startswith("exporter started as process")
    try:
        assert ready.exists()
        assert start_and_wait(tmp_path, program).stdout.startswith("exporter already runs as process")
    finally:
        assert background.stop(tmp_path, "exporter").has_ended


def test_process_that_ends_before_it_is_ready_is_an_error(tmp_path: Path) -> None:
    failed = start_and_wait(tmp_path, "import sys; sys.exit('rackproof: cannot listen')")
    # Python shows an OSError without an error number as `[Errno None]`.
    assert "BackgroundError: [Errno None] cannot listen" in failed.stderr


def start_and_wait(directory: Path, program: str) -> subprocess.CompletedProcess[str]:
    """Return the result of a process that starts `program` in the background and waits until `program` is ready."""
    start = "from pathlib import Path; from agent.run import background; "
    start += (
        f"print(background.start(['-c', {program!r}], Path({str(directory)!r}), 'exporter', wait_until_ready=True))"
    )
    return subprocess.run([sys.executable, "-c", start], cwd=ROOT, capture_output=True, text=True, check=False)


def make_unkillable_stage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Name this test process as the process of the stage `benchmark` in `tmp_path`, and let os.kill do nothing."""
    (tmp_path / "benchmark.pid").write_text(f"{os.getpid()} {locks.process_start_time(os.getpid())}\n")
    (tmp_path / "benchmark.log").write_text("")
    monkeypatch.setattr(background, "GRACE_S", 0.01)
    monkeypatch.setattr(os, "kill", lambda pid, number: None)


def test_unkillable_process_is_not_reported_as_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_unkillable_stage(tmp_path, monkeypatch)
    message = str(background.stop(tmp_path, "benchmark"))
    assert message.startswith(f"benchmark still runs: process {os.getpid()} hangs in the kernel")
    assert background.wait(tmp_path, "benchmark", -1.0) == f"{message}\n"


def test_stage_is_not_ended_because_the_clock_was_set(tmp_path: Path) -> None:
    """By a clock that was set forward, the stage started a day ago."""
    (tmp_path / "benchmark.log").touch()
    with subprocess.Popen(["sleep", "0.5"]) as stage:
        (tmp_path / "benchmark.pid").write_text(f"{stage.pid} {locks.process_start_time(stage.pid)}\n")
        os.utime(tmp_path / "benchmark.pid", times=(0, time.time() - 86400))
        background.wait(tmp_path, "benchmark", 60.0)
    assert stage.returncode == 0


def test_stop_succeeds_if_the_process_ends_before_the_signal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_unkillable_stage(tmp_path, monkeypatch)

    def end(pid: int, number: int) -> None:
        (tmp_path / "benchmark.pid").unlink()
        raise ProcessLookupError

    monkeypatch.setattr(os, "kill", end)
    assert background.stop(tmp_path, "benchmark").has_ended


@pytest.mark.parametrize("text", ["", "1", "x 1", "\x00 \x00"])
def test_process_with_a_damaged_pid_file_counts_as_not_running(text: str, tmp_path: Path) -> None:
    (tmp_path / "benchmark.pid").write_text(text)
    assert not background.is_running(tmp_path, "benchmark")


def test_wait_for_a_stage_that_the_plan_lacks_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    acquire(tmp_path, "r1")
    documents.write(tmp_path / "runs" / "r1" / "plan.json", to_json(make_plan("r1")))
    arguments = ["wait", f"--run-dir={tmp_path / 'runs' / 'r1'}", "--host=h1", "--stage=soak"]
    assert rackproof.main(arguments) == 64
    assert "--stage soak: not in the plan of run r1; it has: " in capsys.readouterr().err


def test_repeated_stage_prints_the_record_on_stdout_and_the_note_on_stderr(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    acquire(tmp_path, "r1")
    run = HostRun.begin(tmp_path / "runs" / "r1", "h1", json.dumps(to_json(make_plan("r1"))))
    run.append(launches=[builders.launch("benchmark", ("h1",))])
    assert rackproof.main(["bench", f"--run-dir={run.directory}", "--host=h1", "--json"]) == 0
    printed = capsys.readouterr()
    assert json.loads(printed.out)["launches"][0]["outcome"] == "finished"
    assert "it is not measured again" in printed.err


def test_poll_of_a_stopped_soak_does_not_acquire_the_host_again(tmp_path: Path) -> None:
    """`rackproof soak --looks` polls a soak, and renews the lease with `only_if_held`."""
    acquire(tmp_path, "r1")
    lease.renew(tmp_path / "runs" / "r1", make_plan("r1"), only_if_held=True)
    lease.release(tmp_path, "r1")
    with pytest.raises(HeldError, match="run r1 was stopped on this host: resume it to continue"):
        lease.renew(tmp_path / "runs" / "r1", make_plan("r1"), only_if_held=True)
    assert not (tmp_path / "lease.json").exists()


def test_poll_of_a_stopped_soak_keeps_the_expired_lease_of_the_next_run(tmp_path: Path) -> None:
    acquire(tmp_path, "r2")
    path = tmp_path / "lease.json"
    expired = json.loads(path.read_text()) | {"renewed": "2020-01-01T00:00:00Z"}
    path.write_text(json.dumps(expired) + "\n")
    with pytest.raises(HeldError, match="run r1 was stopped on this host"):
        lease.renew(tmp_path / "runs" / "r1", make_plan("r1"), only_if_held=True)
    assert json.loads(path.read_text()) == expired


def test_stop_without_a_run_directory_ends_no_stage(tmp_path: Path, supervisor: subprocess.Popen[str]) -> None:
    assert rackproof.main(["stop", str(tmp_path / "exporter")]) == lease.HELD
    assert supervisor.poll() is None


# --- repeated and simultaneous commands on a host


@pytest.fixture
def run(tmp_path: Path) -> HostRun:
    return HostRun.begin(tmp_path / "runs" / "r1", "h1", plan_text())


def plan_text() -> str:
    return json.dumps(to_json(make_plan()))


def run_at_once(*commands: Sequence[str], stdin: str = "") -> list[str]:
    """Run the Python commands at the same time; return their outputs. All must succeed."""
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    processes = [subprocess.Popen([sys.executable, *command], cwd=ROOT, text=True, **pipes) for command in commands]
    outputs = [process.communicate(stdin)[0] for process in processes]
    assert [process.returncode for process in processes] == [0] * len(commands), outputs
    return outputs


def test_resumed_run_keeps_its_first_snapshot(tmp_path: Path) -> None:
    """The counters in later snapshots are compared with those in the first snapshot, so it must not be replaced.

    Three `inspect` commands run at the same time, because a command of a killed playbook may still run while the next playbook
    starts the same command.
    """
    directory = tmp_path / "runs" / "r1"
    directory.parent.mkdir()
    inspect = ["rackproof", "inspect", "--plan", "-", "--run-dir", str(directory), "--host", "h1"]
    run_at_once(inspect, inspect, inspect, stdin=plan_text())
    before = (directory / "record.json").read_text()
    assert [(snapshot["stage"], snapshot["phase"]) for snapshot in json.loads(before)["snapshots"]] == [
        ("preflight", "before")
    ]
    run_at_once(inspect, stdin=plan_text())
    assert (directory / "record.json").read_text() == before


@pytest.mark.parametrize("name", ["plan.json", "record.json"])
def test_damaged_file_on_the_host_is_reported_with_the_remedy(name: str, run: HostRun) -> None:
    run.append()
    (run.directory / name).write_text("")
    with pytest.raises(
        documents.DocumentError, match=f"{name}: empty, which is not JSON: .* delete {run.directory} on it"
    ):
        HostRun.begin(run.directory, "h1", plan_text()).record()


def test_simultaneous_additions_to_a_record_are_all_kept(run: HostRun) -> None:
    def add(number: int) -> None:
        snapshot = Snapshot(stage=f"s{number}", phase="before", at=builders.WHEN, duration_s=0.0, metrics=())
        HostRun(run.directory, "h1").append(snapshots=[snapshot])

    threads = [threading.Thread(target=add, args=(number,)) for number in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert {snapshot.stage for snapshot in run.record().snapshots} == {f"s{number}" for number in range(12)}


def test_figures_of_a_repeated_stage_move_into_its_last_launch_that_started_ranks(run: HostRun) -> None:
    first, second, other, failed = (
        builders.launch(stage, ("h1",), outcome)
        for stage, outcome in (("smoke", "finished"), ("smoke", "finished"), ("gang", "finished"), ("smoke", "failed"))
    )
    old, kept, new = (
        builders.observation("gemm.throughput", value, stage=stage)
        for value, stage in ((1.0, "smoke"), (2.0, "gang"), (3.0, "smoke"))
    )
    record = replace(run.record(), launches=(first, second, other, failed), observations=(old, kept))
    merged = run.merge(record, (), (new,), (first,))
    assert merged.observations == (kept, new)
    assert merged.launches == (first, replace(second, observations=(old,)), other, failed, first)


def test_background_process_runs_once_if_several_commands_start_it_at_once(tmp_path: Path) -> None:
    arguments = "['-c', 'import time; time.sleep(600)']"
    start = "from pathlib import Path; from agent.run import background; "
    start += f"print(background.start({arguments}, Path({str(tmp_path)!r}), 'stage'))"
    outputs = run_at_once(*[["-c", start]] * 4)
    pid = int((tmp_path / "stage.pid").read_text().split()[0])
    os.kill(pid, signal.SIGKILL)
    assert sorted(outputs) == sorted(
        [f"stage started as process {pid}\n", *[f"stage already runs as process {pid}\n"] * 3]
    )


def test_exclusive_task_waits_for_the_end_of_the_same_task_in_another_process(tmp_path: Path) -> None:
    hold = f"import sys, time; sys.path.insert(0, {str(ROOT)!r}); from pathlib import Path; from agent.run import background\n"
    hold += f"with background.exclusive_task(Path({str(tmp_path)!r}), 'stage'):\n    print('up', flush=True); time.sleep(600)"
    with subprocess.Popen([sys.executable, "-c", hold], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout
        assert process.stdout.readline() == "up\n"
        threading.Timer(0.5, process.kill).start()
        began = time.monotonic()
        with background.exclusive_task(tmp_path, "stage"):
            assert time.monotonic() - began >= 0.4


def test_hosts_of_a_run_may_not_share_a_state_directory(tmp_path: Path) -> None:
    """Hosts that share a state directory would overwrite each other's records.

    They share it if it is on a network file system, or if two hosts of the inventory are the same machine.
    """
    plan = json.dumps(to_json(builders.plan("h1", "h2", profile="smoke")))
    with pytest.raises(documents.DocumentError, match="host h9 is not in the plan"):
        HostRun.begin(tmp_path / "r1", "h9", plan)
    HostRun.begin(tmp_path / "r1", "h1", plan)
    HostRun.begin(tmp_path / "r1", "h1", plan)
    with pytest.raises(documents.DocumentError) as caught:
        HostRun.begin(tmp_path / "r1", "h2", plan)
    assert f"{tmp_path / 'r1'} is in use by host h1 in the same run: each host needs its own state directory" in str(
        caught.value
    )
    HostRun.begin(tmp_path / "r2", "h2", plan)
    assert sorted(path.name for path in (tmp_path / "r1").iterdir()) == ["host", "plan.json"]


def test_files_of_a_new_run_are_on_the_disk_before_they_get_their_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise a power loss could leave empty files with these names."""
    synced: list[int] = []
    monkeypatch.setattr(os, "fsync", lambda descriptor: synced.append(os.fstat(descriptor).st_ino))
    HostRun.begin(tmp_path / "r1", "h1", plan_text())
    assert [path.name for path in (tmp_path / "r1").iterdir() if path.stat().st_ino not in synced] == []


def test_only_one_of_many_hosts_gets_a_shared_state_directory(tmp_path: Path) -> None:
    hosts = [f"h{number}" for number in range(12)]
    plan = json.dumps(to_json(builders.plan(*hosts, profile="smoke")))
    refused = []

    def begin(host: str) -> None:
        try:
            HostRun.begin(tmp_path / "run", host, plan)
        except documents.DocumentError:
            refused.append(host)

    threads = [threading.Thread(target=begin, args=(host,)) for host in hosts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(refused) == len(hosts) - 1
    assert (tmp_path / "run" / "host").read_text() not in refused
