"""Stages whose benchmarks need no torch: their launcher, their ranks, and the key-value store that the ranks share."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from agent.benchmarks.runtime import key_store
from agent.benchmarks.runtime.key_store import KeyServer, KeyStore
from agent.gang.protocol import Gang
from agent.gang.transport import listen
from agent.launch.request import LaunchRequest
from agent.launch.torchrun import launcher_command
from schemas.catalogue import BENCHMARKS, needs_torch
from tests import builders

ROOT = Path(__file__).parents[4]
NAME = "a-secret-name"
"""Name of the launch, which each client of the store must send first."""
TORCH_FREE = sorted(name for name, benchmark in BENCHMARKS.items() if not benchmark.needs_torch)


@contextmanager
def store_server() -> Iterator[int]:
    """Yield the port of a running key-value store."""
    with listen("127.0.0.1", 0) as listener:
        serving, started = [], threading.Event()

        async def serve() -> None:
            serving.extend([asyncio.get_running_loop(), asyncio.create_task(KeyServer(NAME).serve(listener))])
            started.set()
            await asyncio.gather(*serving[1:], return_exceptions=True)

        thread = threading.Thread(target=lambda: asyncio.run(serve()))
        thread.start()
        assert started.wait(10)
        yield listener.getsockname()[1]
        loop, task = serving
        loop.call_soon_threadsafe(task.cancel)
        thread.join()


def client(port: int) -> KeyStore:
    """Return a client of the store that sends the name of the launch."""
    return KeyStore("127.0.0.1", port, NAME, limit_s=10)


def test_client_reads_a_value_that_another_client_set() -> None:
    with store_server() as port:
        first, second = client(port), client(port)
        assert not second.check(["a"])
        first.set("a", "1\n✓")
        assert (second.check(["a"]), second.check(["a", "b"]), second.get("a").decode()) == (True, False, "1\n✓")
        with pytest.raises(RuntimeError, match="no key b"):
            second.get("b")
        first.close()
        second.close()


@pytest.mark.parametrize(
    "sent",
    [
        b"another-name\n",
        b"",
        b"\xff\n",
        b"a" * 100 + b"\n",
        *(NAME.encode() + b"\n" + line for line in (b"{", b"[" * 99, b"\n")),
    ],
    ids=[
        "wrong name",
        "request without a name",
        "name not UTF-8",
        "long name",
        "not JSON",
        "99 opening brackets",
        "empty line",
    ],
)
def test_client_with_a_wrong_name_or_an_invalid_message_is_disconnected(sent: bytes) -> None:
    with store_server() as port:
        with socket.create_connection(("127.0.0.1", port), timeout=10) as stranger:
            stranger.sendall(sent + b'{"set": "a", "value": "1"}\n')
            assert stranger.recv(100) == b""
        store = client(port)
        assert not store.check(["a"])
        store.close()


@pytest.mark.parametrize("asked", [1, {}, {"set": "a"}, {"set": 1, "value": "1"}, {"get": ["a"]}, {"check": "a"}])
def test_answer_to_an_invalid_request_is_none(asked: Any) -> None:
    with store_server() as port:
        store = client(port)
        assert store._ask(asked) is None
        store.close()


def test_message_that_is_too_long_ends_the_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(key_store, "MAX_BYTES", 1000)
    with store_server() as port:
        store = client(port)
        with pytest.raises(RuntimeError, match="the store of the launch"):
            store.set("a", "1" * 2000)
        store.close()


def test_ended_store_is_reported() -> None:
    with store_server() as port:
        store = client(port)
        store.set("a", "1")
    with pytest.raises(RuntimeError, match="the store of the launch"):
        store.check(["a"])
    store.close()
    with pytest.raises(RuntimeError, match=f"no store at 127.0.0.1 port {port}: Connection refused"):
        KeyStore("127.0.0.1", port, NAME, limit_s=0)


def test_stage_needs_torch_if_one_of_its_benchmarks_does() -> None:
    assert TORCH_FREE == ["local_storage", "shared_storage", "verbs"]
    assert [needs_torch(names) for names in (TORCH_FREE, ["verbs", "gemm"])] == [False, True]
    assert needs_torch([]), "the ranks of a stage without benchmarks join a process group of torch"


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def start_hosts(tmp_path: Path, members: Sequence[str], sitecustomize: str) -> list[subprocess.Popen[bytes]]:
    """Start a stage whose only benchmark is `verbs`, with two ranks on each host; return the launcher of each host.

    All hosts are this machine. `sitecustomize`: code that Python runs at the start of each launcher and rank.
    """
    plan = builders.plan("h1", "h2", profile="rehearsal")
    stage = replace(plan.stage("gang" if len(members) > 1 else "benchmark"), benchmarks={"verbs": {}})
    (tmp_path / "sitecustomize.py").write_text(sitecustomize)
    started, port = [], free_port()
    for name in members:
        gang = replace(
            Gang.from_plan(plan, plan.host(name), "gang 0", members, port),
            addresses=dict.fromkeys(members, "127.0.0.1"),
        )
        work = tmp_path / name
        work.mkdir()
        request = LaunchRequest(stage=stage, members=tuple(members), port=port)
        command = launcher_command(plan, plan.host(name), request, gang=gang, work=work, data=work, uuids={})
        secret = json.loads((work / "rendezvous.json").read_text())["name"]
        assert not any(secret in argument for argument in command.arguments), (
            "every user can see the arguments of a process, so the name of the launch must not be one of them"
        )
        environment = {**command.environment, "PYTHONPATH": f"{tmp_path}:{ROOT}"}
        with (tmp_path / f"{name}.log").open("wb") as log:
            started.append(subprocess.Popen(command.arguments, env=environment, cwd=work, stdout=log, stderr=log))
    return started


NO_TORCH = "import sys\nsys.modules['torch'] = None\n"
"""Code for `sitecustomize`: importing torch raises an exception."""
RANK_1_FAILS = """
from agent.benchmarks import rank
run_to_end = rank.run_to_end
def run(context, benchmarks):
    if context.rank == 1:
        raise OSError("broken")
    run_to_end(context, lambda: __import__("time").sleep(1000))
rank.run_to_end = run
"""
"""Code for `sitecustomize`: rank 1 raises an exception, and the other ranks hang."""


@pytest.mark.parametrize("members", [("h1",), ("h1", "h2")], ids=["one host", "two hosts"])
def test_ranks_run_without_torch(tmp_path: Path, members: Sequence[str]) -> None:
    started = start_hosts(tmp_path, members, NO_TORCH)
    codes = [process.wait(timeout=60) for process in started]
    logs = "".join(path.read_text() for path in sorted(tmp_path.glob("**/*.log")))
    assert codes == [0] * len(members), logs
    for number, name in enumerate(members):
        results = [json.loads((tmp_path / name / f"rank{2 * number + rank}.json").read_text()) for rank in range(2)]
        assert [item["software"] for item in results] == [{}, {}]
        states = [json.loads((tmp_path / name / f"rank{item['rank']}.state.json").read_text()) for item in results]
        assert [(state["phase"], state["exit_code"]) for state in states] == [("end", 0)] * 2
        assert [item["name"] for item in results[0]["observations"]] == ["benchmark.duration"], (
            "without an RDMA port, only the duration must be reported"
        )


def test_rank_that_fails_ends_the_launch(tmp_path: Path) -> None:
    (process,) = start_hosts(tmp_path, ("h1",), NO_TORCH + RANK_1_FAILS)
    assert process.wait(timeout=60) == 1
    assert "OSError: broken" in "".join(path.read_text() for path in tmp_path.glob("**/*.log"))
    assert not subprocess.run(["pgrep", "-f", str(tmp_path)], capture_output=True, check=False).stdout, (
        "no process of the launch may remain"
    )


SECOND_HOST_HANGS = """
import os
from agent.benchmarks import rank
run_to_end = rank.run_to_end
def run(context, benchmarks):
    run_to_end(context, (lambda: __import__("time").sleep(1000)) if context.node == 1 else lambda: None)
rank.run_to_end = run
"""
"""Code for `sitecustomize`: the ranks of the second host hang, and those of the first host end at once."""


def set_timeout(tmp_path: Path, seconds: float) -> str:
    """Return code for `sitecustomize` that sets the time-out of collectives in the request of the first host's launcher."""
    return f"""
import json, pathlib, sys
path = pathlib.Path({str(tmp_path)!r}) / "h1" / "request.json"
if path.exists():
    path.write_text(json.dumps({{**json.loads(path.read_text()), "collective_timeout_s": {seconds}}}))
"""


def end_hosts(*started: subprocess.Popen[bytes]) -> None:
    """End the launchers, and wait until they have ended."""
    for process in started:
        process.terminate()
        process.wait(timeout=10)


def test_first_host_waits_for_a_hung_host_no_longer_than_the_time_out_of_collectives(tmp_path: Path) -> None:
    first, hung = start_hosts(tmp_path, ("h1", "h2"), NO_TORCH + SECOND_HOST_HANGS + set_timeout(tmp_path, 6.0))
    try:
        assert first.wait(timeout=40) == 0
        assert hung.poll() is None
        assert "the ranks of h2 did not end within 6 s after those of this host" in (tmp_path / "h1.log").read_text()
    finally:
        end_hosts(first, hung)


def test_first_host_does_not_wait_for_a_host_whose_ranks_failed(tmp_path: Path) -> None:
    fails = SECOND_HOST_HANGS.replace('__import__("time").sleep(1000)', "1 / 0")
    started = start_hosts(tmp_path, ("h1", "h2"), NO_TORCH + fails)
    try:
        assert [process.wait(timeout=40) for process in started] == [0, 1]
    finally:
        end_hosts(*started)
    assert "did not end" not in (tmp_path / "h1.log").read_text()


def test_port_in_use_is_reported(tmp_path: Path) -> None:
    with listen("127.0.0.1", 0) as taken:
        config = {
            "rank": 0,
            "address": "127.0.0.1",
            "port": taken.getsockname()[1],
            "admitted": [],
            "name": "n",
            "ranks": 1,
        }
        (tmp_path / "rendezvous.json").write_text(json.dumps(config))
        command = [sys.executable, "-m", "agent.benchmarks.without_torch", tmp_path / "rendezvous.json", "request.json"]
        done = subprocess.run(
            command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=60, env=os.environ
        )
    assert done.returncode == 1
    assert done.stderr.startswith("rackproof: cannot listen for the ranks' rendezvous on 127.0.0.1 port ")
