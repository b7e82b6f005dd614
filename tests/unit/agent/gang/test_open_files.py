"""The limit on open files (`ulimit -n`) of the processes of a launch: it is raised, and it is an error if it is too small."""

from __future__ import annotations

import contextlib
import os
import resource
import selectors
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from agent.benchmarks.runtime.key_store import KeyStore
from agent.gang import open_files, transport
from agent.gang.open_files import MAX_SOFT_LIMIT, OTHER_FILES, raise_soft_limit, reason_too_small
from agent.gang.protocol import Gang
from agent.launch.request import LaunchRequest
from agent.launch.torchrun import LaunchError, launcher_command
from tests import ROOT, builders

UNLIMITED = resource.RLIM_INFINITY
CLIENTS = 200
SERVE = """
import asyncio, socket
from agent.benchmarks.runtime.key_store import KeyServer
listener = socket.create_server(("127.0.0.1", 0), backlog=500)
print(listener.getsockname()[1], flush=True)
asyncio.run(KeyServer("launch").serve(listener))
"""


class Limits:
    """Replaces the limits of this process. `refused`: the kernel refuses every change."""

    def __init__(self, soft: int, hard: int, *, refused: bool = False) -> None:
        self.pair, self.refused = (soft, hard), refused

    def get(self, _: int) -> tuple[int, int]:
        """Return the soft and the hard limit."""
        return self.pair

    def set(self, _: int, pair: tuple[int, int]) -> None:
        """Set both limits."""
        if self.refused:
            raise PermissionError(1, "Operation not permitted")
        self.pair = pair


def replace_limits(monkeypatch: pytest.MonkeyPatch, soft: int, hard: int, *, refused: bool = False) -> Limits:
    limits = Limits(soft, hard, refused=refused)
    monkeypatch.setattr(open_files.resource, "getrlimit", limits.get)
    monkeypatch.setattr(open_files.resource, "setrlimit", limits.set)
    return limits


@pytest.mark.parametrize(
    ("soft", "hard", "raised"),
    [
        (1024, 524_288, 524_288),
        (1024, 1024, 1024),
        (1024, 1 << 30, MAX_SOFT_LIMIT),
        (1024, UNLIMITED, MAX_SOFT_LIMIT),
        (1 << 30, 1 << 30, 1 << 30),
        (UNLIMITED, UNLIMITED, UNLIMITED),
    ],
)
def test_soft_limit_is_raised_and_never_lowered(
    monkeypatch: pytest.MonkeyPatch, soft: int, hard: int, raised: int
) -> None:
    limits = replace_limits(monkeypatch, soft, hard)
    raise_soft_limit()
    assert limits.pair == (raised, hard)


def test_refusal_of_the_kernel_leaves_the_limit_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    limits = replace_limits(monkeypatch, 1024, 524_288, refused=True)
    raise_soft_limit()
    assert limits.pair == (1024, 524_288)


@pytest.mark.parametrize(("hosts", "is_raised"), [(2, False), (600, False), (1000, True), (4000, True)])
def test_listener_raises_the_limit_only_for_a_gang_that_needs_it(
    monkeypatch: pytest.MonkeyPatch, hosts: int, is_raised: bool
) -> None:
    """The judge compares the limits of all hosts. So the two hosts that listen must not raise theirs without need."""
    names = tuple(f"h{number}" for number in range(hosts))
    gang = Gang(
        me="h0", members=names, addresses=dict.fromkeys(names, "127.0.0.1"), port=29500, nonce="n", context="gang 0"
    )
    limits = replace_limits(monkeypatch, 1024, 524_288)
    with transport.listen("127.0.0.1", 0) as listener, selectors.DefaultSelector() as selector:
        transport.GangListener(gang, listener, selector, lambda *_: True)
    assert limits.pair == (524_288 if is_raised else 1024, 524_288)


def test_store_of_a_launch_serves_more_clients_than_the_soft_limit_allows() -> None:
    """The launcher runs the store. Its supervisor has a soft limit that is smaller than the number of clients."""
    command = [
        sys.executable,
        "-m",
        "agent.launch.guard",
        "--supervisor",
        str(os.getpid()),
        sys.executable,
        "-c",
        SERVE,
    ]
    server = subprocess.Popen(
        command,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (CLIENTS // 2, 4 * CLIENTS)),
    )
    with server, contextlib.ExitStack() as cleanup:
        cleanup.callback(server.kill)
        assert server.stdout
        port = int(server.stdout.readline())
        stores = [KeyStore("127.0.0.1", port, "launch", limit_s=0) for _ in range(CLIENTS)]
        for number, store in enumerate(stores):
            cleanup.callback(store.close)
            store.set(f"rank/{number}", "here")
        assert stores[0].check([f"rank/{number}" for number in range(CLIENTS)])


@pytest.mark.parametrize(("hosts", "gpus"), [(110, 8), (114, 8), (32, 72), (4000, 8)])
@pytest.mark.parametrize("spare", [-1, 0])
def test_hard_limit_is_too_small_if_it_is_below_ranks_and_hosts_and_other_files(
    monkeypatch: pytest.MonkeyPatch, hosts: int, gpus: int, spare: int
) -> None:
    needed = hosts + hosts * gpus + OTHER_FILES
    replace_limits(monkeypatch, 64, needed + spare)
    reason = reason_too_small(hosts, hosts * gpus)
    if spare >= 0:
        assert not reason
        return
    assert reason.startswith(f"a process may have {needed - 1} files open (ulimit -Hn), and ")
    assert (
        f" needs {needed}, because it keeps a connection to each of {hosts * gpus} ranks and {hosts} hosts: " in reason
    )
    assert "LimitNOFILE" in reason


@pytest.mark.parametrize(("host", "is_refused"), [("h1", True), ("h2", False)])
def test_first_host_names_a_limit_that_is_too_small_before_the_launch(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, host: str, is_refused: bool
) -> None:
    plan = builders.plan("h1", "h2")
    request = LaunchRequest(stage=plan.stage("gang"), members=("h1", "h2"), port=29500)
    gang = Gang.from_plan(plan, plan.host(host), "gang 0", request.members, 29500)
    gang = replace(gang, addresses=dict.fromkeys(request.members, "127.0.0.1"))
    replace_limits(monkeypatch, 64, 100)
    outcome = pytest.raises(LaunchError, match="host h1: a process may have 100 files open")
    with outcome if is_refused else contextlib.nullcontext():
        launcher_command(plan, plan.host(host), request, gang=gang, work=tmp_path, data=tmp_path, uuids={})
