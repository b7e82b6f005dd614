"""Test the verbs (subcommands) `run-host` and `emit-record`: member discovery, printed records, and wrong usage.

Some tests of wrong usage also cover other verbs of the agent.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest

from agent.cli import emit_record, run_host
from agent.gang import discovery
from agent.gang.discovery import PORT_OFFSET, discover_members
from agent.gang.protocol import MAX_BYTES, Gang
from agent.run import lease
from agent.run.record import HostRun
from rackproof import main as command
from schemas import documents, frames
from schemas.plans import Plan
from schemas.records import to_json
from tests import builders

HOSTS = ("h1", "h2", "h3")


@pytest.fixture
def port() -> int:
    """Return the first of four consecutive free ports below the range of ephemeral ports."""
    while True:
        first = random.randrange(10_000, 30_000)  # noqa: S311
        with contextlib.ExitStack() as stack, contextlib.suppress(OSError):
            for number in range(first, first + 4):
                stack.enter_context(socket.socket()).bind(("127.0.0.1", number))
            return first


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor() as pool:
        yield pool


def gang(me: str, port: int, nonce: str = builders.NONCE) -> Gang:
    """Return the gang (the hosts of one multi-node launch) as host `me` sees it.

    `port` is the rendezvous port of the ranks. `Gang.port` is the port after it.
    """
    addresses = {"h1": "127.0.0.1", "h2": "127.0.0.2", "h3": "127.0.0.3"}
    return Gang(me=me, members=HOSTS, addresses=addresses, port=port + 1, nonce=nonce, context="r1 meeting all")


def start_discovery(
    threads: ThreadPoolExecutor, port: int, *hosts: str, timeout_s: float = 20.0
) -> dict[str, Future[list[str]]]:
    return {host: threads.submit(discover_members, gang(host, port), timeout_s) for host in hosts}


def test_all_hosts_get_all_members_in_plan_order(threads: ThreadPoolExecutor, port: int) -> None:
    discoveries = start_discovery(threads, port, "h3", "h2")
    time.sleep(0.2)
    discoveries |= start_discovery(threads, port, "h1")
    assert {host: discovery.result(20) for host, discovery in discoveries.items()} == {
        host: list(HOSTS) for host in HOSTS
    }


def test_discovery_returns_the_present_hosts_if_a_host_is_absent(threads: ThreadPoolExecutor, port: int) -> None:
    discoveries = start_discovery(threads, port, "h1", "h3", timeout_s=2.0)
    assert {host: discovery.result(20) for host, discovery in discoveries.items()} == {
        "h1": ["h1", "h3"],
        "h3": ["h1", "h3"],
    }


def test_second_host_collects_members_if_the_first_host_is_absent(threads: ThreadPoolExecutor, port: int) -> None:
    discoveries = start_discovery(threads, port, "h2", "h3", timeout_s=2.0)
    assert {host: discovery.result(20) for host, discovery in discoveries.items()} == {
        "h2": ["h2", "h3"],
        "h3": ["h2", "h3"],
    }


def test_single_host_finds_no_other_members(port: int) -> None:
    """h3 tries to connect to h1 and then to h2, but neither listens. h1 waits for the others, and finds only itself."""
    assert discover_members(gang("h3", port), 0.5) == []
    assert discover_members(gang("h1", port), 0.5) == ["h1"]


def test_discovery_ignores_http_clients_and_hosts_with_another_nonce(threads: ThreadPoolExecutor, port: int) -> None:
    first = threads.submit(discover_members, gang("h1", port), 4.0)
    stranger = threads.submit(discover_members, gang("h2", port, nonce="f" * 32), 2.0)
    address = ("127.0.0.1", port + 1 + PORT_OFFSET)
    http_client = retry(lambda: socket.create_connection(address, timeout=1))
    try:
        http_client.sendall(b"GET / HTTP/1.1\r\n")
        member = threads.submit(discover_members, gang("h3", port), 4.0)
        assert member.result(20) == first.result(20) == ["h1", "h3"]
        assert stranger.result(20) in ([], ["h2"]), "a host with another nonce must not find other members"
    finally:
        http_client.close()


@pytest.mark.parametrize("answer", [b"x" * (MAX_BYTES + 1), b"x"])
def test_answer_of_an_unknown_process_is_limited_in_size_and_time(answer: bytes) -> None:
    """Without a time limit, a process that sends a byte from time to time would block the discovery forever."""
    ours, theirs = socket.socketpair()
    with ours, theirs, ThreadPoolExecutor() as pool:
        sent = pool.submit(theirs.sendall, answer)
        began = time.monotonic()
        with contextlib.suppress(TimeoutError):
            assert discovery._receive_members(gang("h2", 1), ours, 0.2) == []
        assert time.monotonic() - began < 5
        ours.close()
        with contextlib.suppress(OSError):
            sent.result(5)


def retry(connect: Callable[[], socket.socket]) -> socket.socket:
    """Call `connect` until it succeeds, for up to 5 s."""
    for _ in range(100):
        try:
            return connect()
        except OSError:
            time.sleep(0.05)
    raise AssertionError("no process listens")


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """Return a run directory on host h1, with the plan of h1 and h2 and the records of h1."""
    plan: Plan = builders.plan("h1", "h2", profile="smoke", gpu_count=1)
    directory = tmp_path / "runs" / "r1"
    documents.write(directory / "plan.json", to_json(plan))
    for record in builders.records(plan, "h1"):
        documents.write(directory / (f"gangs/{record.gang}.json" if record.gang else "record.json"), to_json(record))
    return directory


def test_printed_records_can_be_read_from_the_log(run_dir: Path) -> None:
    done = subprocess.run(
        [sys.executable, command.__file__, "emit-record", "--run-dir", run_dir, "--host", "h1"],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "RACKPROOF_NODE": "gpu-a"},
    )
    records, problems = frames.read(done.stdout.splitlines(), source="log")
    assert problems == []
    assert [(record.host, record.gang, record.node) for record in records] == [
        ("h1", "", "gpu-a"),
        ("h1", "r1", "gpu-a"),
    ]
    assert [record.text for record in records] == [
        (run_dir / "record.json").read_bytes(),
        (run_dir / "gangs" / "r1.json").read_bytes(),
    ]


def test_records_of_a_plan_are_printed_from_the_default_run_directory(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("agent.run.lease.STATE", run_dir.parents[1])
    assert command.main(["emit-record", f"--plan={run_dir / 'plan.json'}", "--host=h1"]) == 0
    records, problems = frames.read(capfd.readouterr().out.splitlines(), source="log")
    assert ([(record.host, record.gang) for record in records], problems) == ([("h1", ""), ("h1", "r1")], [])


def test_missing_record_is_an_error_and_standard_output_is_empty(
    run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for path in (run_dir / "record.json", run_dir / "gangs" / "r1.json"):
        path.unlink()
    assert command.main(["emit-record", "--run-dir", str(run_dir), "--host", "h1"]) == 2
    output = capsys.readouterr()
    assert output.out == ""
    assert "has no record of h1 yet" in output.err


def test_record_of_another_host_is_not_printed(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["emit-record", "--run-dir", str(run_dir), "--host", "h2"]) == 2
    output = capsys.readouterr()
    assert frames.MARK not in output.out
    assert "a record of h1, not of h2" in output.err


def test_invalid_record_is_not_printed(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (run_dir / "record.json").write_text('{"schema": "rackproof.record/1"', encoding="utf-8")
    assert command.main(["emit-record", "--run-dir", str(run_dir), "--host", "h1"]) == 2
    output = capsys.readouterr()
    assert frames.MARK not in output.out
    assert "record.json: not JSON" in output.err


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        ([], 64, "--plan is missing"),
        (["--plan=nowhere.json"], 2, "nowhere.json: No such file or directory"),
        (["--plan=PLAN", "--meet-within=0"], 64, "--meet-within 0: give more than 0"),
        (["--plan=PLAN", "--port=65533"], 64, "--port 65533: give 1 to 65532"),
        (["--plan=PLAN", "--results=/proc/none"], 2, "/proc/none"),
        (["--plan=PLAN", "--env=x"], 64, "--env x: write NAME=VALUE"),
        (["--plan=PLAN", "--host=h9"], 2, "host h9 is not in the plan of run r1"),
        (["--plan=PLAN"], 64, "is not in the plan of run r1, which has h1, h2"),
    ],
)
def test_wrong_usage_is_refused_and_no_record_is_printed(
    arguments: list[str], code: int, message: str, run_dir: Path, tmp_path: Path
) -> None:
    arguments = [argument.replace("PLAN", str(run_dir / "plan.json")) for argument in arguments]
    done = subprocess.run(
        [sys.executable, command.__file__, "run-host", f"--run-dir={tmp_path / 'new' / 'runs' / 'r1'}", *arguments],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout) == (code, "")
    assert message in done.stderr
    # `run-host` calls the verb `inspect`, which creates the run directory and then rejects h9. In all other cases `run-host`
    # itself refuses the command line, before it calls a verb.
    assert not (tmp_path / "new").exists() or "h9" in message


@pytest.mark.parametrize("verb", ["bench", "busy", "inspect", "launch", "run-host"])
def test_plan_that_is_not_text_is_an_error_with_its_path(
    verb: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = tmp_path / "plan.json"
    plan.write_bytes(b"\x1f\x8b\x08 compressed")
    assert command.main([verb, f"--plan={plan}", "--host=h1", f"--run-dir={tmp_path / 'r1'}"]) == 2
    assert f"--plan {plan}: not UTF-8 at offset 1" in capsys.readouterr().err


def test_record_is_printed_even_if_it_cannot_be_copied_to_the_results(
    run_dir: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    run = HostRun(run_dir, "h1")
    options = argparse.Namespace(run_dir=run_dir, host="h1", results=Path("/proc/none"), quiet=False)
    with pytest.raises(OSError, match="/proc/none"):
        run_host.HostRunner(options, run.plan, "")._emit(run)
    records, problems = frames.read(capfd.readouterr().out.splitlines(), source="log")
    assert ([record.gang for record in records], problems) == (["", "r1"], [])


def test_exit_code_of_a_quiet_run_says_whether_there_is_a_record(run_dir: Path, tmp_path: Path) -> None:
    run = HostRun(run_dir, "h1")
    options = argparse.Namespace(run_dir=run_dir, host="h1", results=tmp_path, quiet=True)
    assert run_host.HostRunner(options, run.plan, "")._emit(run) == 0
    for gang in ("", run.host.gang):
        run.path(gang).unlink()
    assert run_host.HostRunner(options, run.plan, "")._emit(run) == emit_record.NO_RECORD


@pytest.mark.parametrize("port", [0, 65534])
def test_launch_refuses_port_0_and_the_two_highest_ports(port: int, capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["launch", "--run-dir=/nowhere", f"--port={port}"]) == 64
    assert f"--port {port}: give 1 to 65533" in capsys.readouterr().err


def test_verbs_do_not_inherit_placement_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    """mpirun, srun and Kubeflow's operator set placement variables, such as the rank of a process."""
    kubeflow = {
        "RANK": "1",
        "WORLD_SIZE": "2",
        "PET_NNODES": "2",
        "PET_NODE_RANK": "1",
        "MASTER_ADDR": "m",
        "MASTER_PORT": "1",
    }
    mpirun = {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2", "PMIX_RANK": "1"}
    for name, value in {**kubeflow, **mpirun, "NCCL_DEBUG": "WARN"}.items():
        monkeypatch.setenv(name, value)
    environment = run_host._environment()
    assert not {*kubeflow, *mpirun} & set(environment)
    assert environment["NCCL_DEBUG"] == "WARN"


@pytest.mark.parametrize(
    ("members", "reason"), [([], "no answer from h1 and h2 within 1 s"), (["h3"], "h1, h2 did not connect within 1 s")]
)
def test_reason_for_no_launch_names_the_other_hosts(
    members: list[str], reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = builders.plan(*HOSTS, profile="smoke", gpu_count=1)
    run = HostRun.begin(tmp_path / "runs" / "r1", "h3", json.dumps(to_json(plan)))
    options = argparse.Namespace(run_dir=run.directory, host="h3", port=29500, meet_within=1.0)
    reasons: list[str] = []
    monkeypatch.setattr(run_host, "discover_members", lambda *_: members)
    monkeypatch.setattr(run_host, "record_not_started", lambda *arguments: reasons.append(arguments[-1]))
    run_host.HostRunner(options, plan, "")._launch_gang(run)
    assert reasons == [f"no other host to launch with: {reason}"]


@pytest.mark.parametrize("has_record", [True, False])
def test_terminated_run_prints_the_record_if_the_inspection_wrote_one(
    has_record: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    plan = builders.plan("h1", profile="smoke", gpu_count=1, rackproof_gang="none")
    text = json.dumps(to_json(plan))
    options = argparse.Namespace(run_dir=tmp_path / "runs" / "r1", host="h1", results=None, detach=False, quiet=False)

    def interrupt(_: object, verb: str, __: str, claim: str, **___: object) -> int:
        pid = lease.load_claim(claim.removeprefix("--claim="), "r1", options.run_dir).pid
        assert (verb, pid) == ("inspect", os.getpid()), "the claim must name the process that runs as long as the run"
        run = HostRun.begin(options.run_dir, "h1", text)
        if has_record:
            documents.write(run.path(), to_json(builders.records(plan, "h1")[0]))
        raise run_host.TerminationRequested

    monkeypatch.setattr(run_host.HostRunner, "_run_verb", interrupt)
    assert run_host.HostRunner(options, plan, text).run() == 143
    out, err = capfd.readouterr()
    assert (bool(out), "there is no record" in err) == (has_record, not has_record)
