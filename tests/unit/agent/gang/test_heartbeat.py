"""Which culprit is named and when, which messages are accepted, and that no rank outlives its supervisor."""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from agent.gang import transport
from agent.gang.culprit import (
    HOST_SILENT_S,
    RANK_SILENT_S,
    SETTLE_S,
    START_S,
    GangSnapshot,
    PeerStatus,
    find_culprit,
    join_timeout_s,
)
from agent.gang.heartbeat import HEARTBEAT_DIRECTORY, SUPERVISOR, RankHeartbeat
from agent.gang.heartbeat_receiver import HeartbeatReceiver
from agent.gang.monitor import GangMonitor
from agent.gang.peer_channel import PeerChannel
from agent.gang.processes import process_identity, read_process
from agent.gang.protocol import Gang, GangError
from agent.gang.rank_state import RankState, parse_rank_state
from agent.gang.transport import listen
from agent.run.work_directory import MAX_ARCHIVED_ATTEMPTS, MAX_LOG_BYTES, archive_logs, truncate_logs
from schemas.records import Culprit

NOW = 1000.0
TIMEOUT_S = 60.0
AT_WORK = {"alive_s": 30.0, "grouped": True, "phase": "collective all_reduce 8 B", "sequence": 7, "waiting_s": 0.1}


def rank(number: int, **over: Any) -> RankState:
    return RankState(rank=number, scope=f"gpu={number % 2}", **{**AT_WORK, **over})


def view(
    me: str = "h1",
    hosts: int = 3,
    ages: dict[str, float] | None = None,
    finished: tuple[str, ...] = (),
    **ranks: RankState,
) -> GangSnapshot:
    """Return hosts h1 … of two running ranks each. `ranks`: r3=… replaces rank 3; `ages`: of statuses, in seconds."""
    members = tuple(f"h{number}" for number in range(1, hosts + 1))
    heard = dict.fromkeys(members, 0.3) | (ages or {})
    statuses = {
        host: PeerStatus(
            at=NOW - heard[host],
            ranks=tuple(ranks.get(f"r{number}", rank(number)) for number in (2 * location, 2 * location + 1)),
            finished=host in finished,
        )
        for location, host in enumerate(members)
        if heard[host] >= 0
    }
    awaited = tuple(host for host in (members if me in members[:2] else members[:2]) if host != me)
    return GangSnapshot(
        me=me, members=members, statuses=statuses, awaited=awaited, began=NOW - 500, now=NOW, timeout_s=TIMEOUT_S
    )


LATE, LOST = HOST_SILENT_S - 1, HOST_SILENT_S + 0.1
SILENT = RANK_SILENT_S + 0.1
SETTLED = SETTLE_S + 0.1
TIMED_OUT = {"failure": "timeout", "failure_age_s": SETTLED, "sequence": 7, "waiting_s": TIMEOUT_S}

NO_CULPRIT: dict[str, GangSnapshot] = {
    "all at work": view(),
    "a host is late, and not yet silent": view(ages={"h2": LATE}),
    "one is lost, but another may be": view(ages={"h2": LOST, "h3": LATE}),
    "a host that has finished says nothing more": view(ages={"h2": LOST}, finished=("h2",)),
    "a host has not joined yet": replace(view(ages={"h2": -1}), began=NOW - join_timeout_s(TIMEOUT_S) + 1),
    "a rank is late": view(r3=rank(3, silent_s=RANK_SILENT_S - 1)),
    "a rank holds Python's lock": view(r3=rank(3, silent_s=30.0, busy=True)),
    "a rank imports torch": view(r3=rank(3, phase="start", silent_s=SILENT, grouped=False)),
    "silent where the others do not depend on it": view(
        **{f"r{n}": rank(n, grouped=False, silent_s=SILENT if n == 3 else 0.1) for n in range(6)}
    ),
    "compiling for long, others wait": view(
        r3=rank(3, sequence=6, waiting_s=None, progress_s=50.0),
        **{f"r{n}": rank(n, waiting_s=50.0) for n in (0, 1, 2, 4, 5)},
    ),
    "ended a moment ago: another one's end may have been first": view(r3=rank(3, ended_s=0.5, exit_code=-9)),
    "ended while a host is late": view(ages={"h2": LATE}, r5=rank(5, ended_s=SETTLED, exit_code=1)),
    "ended while a rank is late": view(r3=rank(3, silent_s=3.0), r5=rank(5, ended_s=SETTLED, exit_code=1)),
    "ended well": view(r3=rank(3, ended_s=60.0, exit_code=0)),
    "ended by its launcher": view(r3=rank(3, ended_s=SETTLED, exit_code=-15, terminated_by_launcher=True)),
    "all timed out alike": view(**{f"r{n}": rank(n, **TIMED_OUT) for n in range(6)}),
    "all failed alike": view(**{f"r{n}": rank(n, failure="error", failure_age_s=5.0) for n in range(6)}),
    "one failed by itself and the others still wait": view(r3=rank(3, failure="error", failure_age_s=5.0)),
}


@pytest.mark.parametrize("known", NO_CULPRIT.values(), ids=NO_CULPRIT.keys())
def test_no_culprit_while_uncertain(known: GangSnapshot) -> None:
    assert find_culprit(known) is None


def timed_out(*culprits: RankState) -> dict[str, RankState]:
    """Return ranks that have all timed out, except these."""
    return {f"r{n}": rank(n, **TIMED_OUT) for n in range(6)} | {f"r{item.rank}": item for item in culprits}


AT = 'gpu=1 rank 3 in phase "collective all_reduce 8 B"'
NAMED: dict[str, tuple[GangSnapshot, str, tuple[str, ...], str]] = {
    "link, host or supervisor": (
        view(ages={"h3": LOST}),
        "host_silent",
        ("h3",),
        "host h3: no messages for 10 s: its link, host or supervisor; last seen gpu=0 rank 4 in phase "
        '"collective all_reduce 8 B"; gpu=1 rank 5 in phase "collective all_reduce 8 B"',
    ),
    "two of them": (
        view(hosts=4, ages={"h3": LOST, "h4": LOST}),
        "host_silent",
        ("h3", "h4"),
        "hosts h3, h4: no messages",
    ),
    "two that lost each other": (
        view(hosts=2, ages={"h2": LOST}),
        "host_silent",
        ("h1", "h2"),
        "hosts h1 and h2: no messages between them for 10 s: the link, either host, or its supervisor",
    ),
    "the head, that lost all": (
        view(ages={"h2": LOST, "h3": LOST}),
        "cut_off",
        ("h1",),
        "host h1: no messages from any other host for 10 s: its own link, or the links of all others",
    ),
    "a host that lost both watchers": (
        view(me="h3", ages={"h1": LOST, "h2": LOST}),
        "cut_off",
        ("h3",),
        "host h3: no messages",
    ),
    "the head, by the second": (
        view(me="h2", ages={"h1": LOST}),
        "host_silent",
        ("h1",),
        "host h1: no messages for 10 s",
    ),
    "never came": (
        view(ages={"h2": -1}),
        "host_absent",
        ("h2",),
        "host h2: did not join the gang within 120 s; hosts h1, h3 did",
    ),
    "stopped": (
        view(r3=rank(3, silent_s=SILENT, stopped=True)),
        "rank_silent",
        ("h2",),
        f"host h2 {AT}: silent for 8 s: its process is stopped",
    ),
    "stopped while it started": (
        view(r3=rank(3, silent_s=SILENT, stopped=True, phase="start", grouped=False)),
        "rank_silent",
        ("h2",),
        'host h2 gpu=1 rank 3 in phase "start": silent for 8 s: its process is stopped',
    ),
    "frozen": (
        view(r3=rank(3, silent_s=SILENT)),
        "rank_silent",
        ("h2",),
        f"host h2 {AT}: silent for 8 s: its process is frozen, or gets no CPU time",
    ),
    "silent, when all who worked alone have ended": (
        view(
            **{
                f"r{n}": rank(n, grouped=False, silent_s=SILENT)
                if n == 3
                else rank(n, grouped=False, ended_s=20.0, exit_code=0)
                for n in range(6)
            }
        ),
        "rank_silent",
        ("h2",),
        f"host h2 {AT}: silent for 8 s",
    ),
    "never started": (
        view(r3=rank(3, alive_s=None, phase=""), r0=rank(0, alive_s=START_S + 1)),
        "rank_absent",
        ("h2",),
        'host h2 gpu=1 rank 3 in phase "start": did not start within 60 s',
    ),
    "killed": (
        view(r3=rank(3, ended_s=SETTLED, exit_code=-9)),
        "rank_ended",
        ("h2",),
        f"host h2 {AT}: killed by SIGKILL",
    ),
    "killed, and others aborted or failed in the same moment": (
        view(
            r3=rank(3, ended_s=SETTLED, exit_code=-9),
            r2=rank(2, ended_s=SETTLED, exit_code=-15, terminated_by_launcher=True),
            r0=rank(0, ended_s=SETTLED + 0.2, exit_code=-6),
            r5=rank(5, ended_s=SETTLED + 0.1, exit_code=1),
        ),
        "rank_ended",
        ("h2",),
        f"host h2 {AT}: killed by SIGKILL",
    ),
    "failed first, and others were killed by that": (
        view(r3=rank(3, ended_s=SETTLED + 3, exit_code=1), r5=rank(5, ended_s=SETTLED, exit_code=-6)),
        "rank_ended",
        ("h2",),
        f"host h2 {AT}: ended with exit code 1",
    ),
    "an older word makes an older end": (
        view(ages={"h2": 1.0}, r3=rank(3, ended_s=SETTLED, exit_code=1), r5=rank(5, ended_s=SETTLED, exit_code=1)),
        "rank_ended",
        ("h2",),
        f"host h2 {AT}: ended with exit code 1",
    ),
    "gone with its guard": (
        view(r3=rank(3, ended_s=SETTLED)),
        "rank_ended",
        ("h2",),
        f"host h2 {AT}: gone without an exit code, as is its guard process",
    ),
    "a stranger's SIGTERM, where nothing else explains it": (
        view(r3=rank(3, ended_s=SETTLED, exit_code=-15)),
        "rank_ended",
        ("h2",),
        f"host h2 {AT}: killed by SIGTERM",
    ),
    "behind at the time-out": (
        view(**timed_out(rank(3, sequence=6, waiting_s=None, progress_s=TIMEOUT_S))),
        "rank_behind",
        ("h2",),
        f"host h2 {AT}: alive, but the others waited for it until their time-out of 60 s",
    ),
    "the only one not to time out": (
        view(**timed_out(rank(3, waiting_s=None, progress_s=TIMEOUT_S))),
        "rank_behind",
        ("h2",),
        f"host h2 {AT}: alive, but",
    ),
    "behind when NCCL's watchdog aborted the others": (
        view(
            r3=rank(3, sequence=6, waiting_s=None, progress_s=TIMEOUT_S),
            **{f"r{n}": rank(n, waiting_s=TIMEOUT_S, ended_s=SETTLED, exit_code=-6) for n in (0, 1, 2, 4, 5)},
        ),
        "rank_behind",
        ("h2",),
        f"host h2 {AT}: alive, but",
    ),
    "failed by itself long before": (
        view(**timed_out(rank(3, failure="error", failure_age_s=TIMEOUT_S))),
        "rank_behind",
        ("h2",),
        f"host h2 {AT}: failed on its own, and the others waited",
    ),
}


@pytest.mark.parametrize(("known", "kind", "hosts", "text"), NAMED.values(), ids=NAMED.keys())
def test_culprit_is_named(known: GangSnapshot, kind: str, hosts: tuple[str, ...], text: str) -> None:
    result = find_culprit(known)
    assert result is not None
    assert (result.kind, result.hosts) == (kind, hosts)
    assert result.text.startswith(text)
    if kind.startswith("rank"):
        assert (result.rank, result.scope) == (3, "gpu=1")


@pytest.mark.parametrize(
    "spoil",
    [
        {"rank": True},
        {"rank": "3"},
        {"phase": "x" * 513},
        {"silent_s": None},
        {"other": 1},
        {"terminated_by_launcher": 1},
    ],
    ids=str,
)
def test_invalid_rank_state_is_refused(spoil: dict[str, Any]) -> None:
    good = asdict(rank(3))
    assert parse_rank_state(good) == rank(3)
    with pytest.raises(ValueError, match="not a rank state"):
        parse_rank_state({**good, **spoil})


# ---- over TCP ----


@pytest.fixture
def port() -> int:
    """Return a free port whose next port is free too, outside the range that the kernel assigns by itself."""
    while True:
        result = 15_000 + 2 * secrets.randbelow(7_500)
        with contextlib.suppress(OSError), socket.socket() as one, socket.socket() as next_one:
            one.bind(("127.0.0.1", result))
            next_one.bind(("127.0.0.1", result + 1))
            return result


MEMBERS = ("h1", "h2", "h3")
ADDRESSES = {"h1": "127.0.0.1", "h2": "127.0.0.1", "h3": "127.0.0.3"}
"""The first two members share a machine."""


def gang(me: str, port: int, **over: Any) -> Gang:
    common = {"members": MEMBERS, "addresses": ADDRESSES, "nonce": "0123456789abcdef" * 2, "context": "r1 gang rack1"}
    return Gang(**{"me": me, "port": port, **common, **over})


@pytest.fixture
def three(port: int) -> Iterator[dict[str, PeerChannel]]:
    result = {host: PeerChannel(gang(host, port)) for host in MEMBERS}
    yield result
    for each in result.values():
        each.close()


def until(true: Callable[[], bool], *them: PeerChannel, patience_s: float = 5.0) -> None:
    """Poll all channels until the condition holds."""
    ends = time.monotonic() + patience_s
    while not true():
        assert time.monotonic() < ends
        for each in them:
            each.poll(0.005)
            each.publish_status([rank(0)])


def test_all_members_exchange_statuses_and_the_verdict(three: dict[str, PeerChannel]) -> None:
    one, two, last = three.values()
    until(lambda: set(one.statuses) == set(two.statuses) == set(MEMBERS) and len(last.statuses) == 3, *three.values())
    assert one.statuses["h3"].ranks == (rank(0),)
    now = time.monotonic()
    assert [each.is_decider(now) for each in (one, two, last)] == [True, False, False]
    verdict = Culprit(kind="rank_silent", hosts=("h3",), text="host h3 …", scope="gpu=0", rank=4, phase="training")
    one.announce_verdict(verdict)
    until(lambda: two.verdict == last.verdict == verdict, two, last)


def test_second_watcher_decides_if_the_first_is_finished_or_silent(three: dict[str, PeerChannel]) -> None:
    one, two, last = three.values()
    until(lambda: "h1" in two.statuses and "h2" in last.statuses and "h1" in last.statuses, *three.values())
    silent = time.monotonic() + HOST_SILENT_S + 1
    assert two.is_decider(silent)
    one.finished = True
    one.publish_status([], at_once=True)
    until(lambda: two.statuses["h1"].finished and last.statuses["h1"].finished, *three.values())
    assert [each.is_decider(time.monotonic()) for each in (two, last)] == [True, False]


def test_late_answer_does_not_revive_a_finished_host(three: dict[str, PeerChannel]) -> None:
    one, two, _ = three.values()
    until(lambda: "h2" in one.statuses and "h1" in two.statuses, *three.values())
    two.finished = True
    two.publish_status([], at_once=True)
    until(lambda: one.statuses["h2"].finished, one, two)
    two.finished = False  # an older message arrives later, on the other connection
    for _ in range(20):
        one.publish_status([rank(0)], at_once=True)
        one.poll(0.01)
        two.poll(0.01)
    assert one.statuses["h2"].finished


def hung_up(channel: socket.socket, head: PeerChannel) -> bool:
    head.poll(0.01)
    channel.setblocking(False)
    try:
        while channel.recv(1 << 16):
            continue  # its greeting
        return True
    except BlockingIOError:
        return False
    except ConnectionError:
        return True


def word(port: int, greeting: str, **over: Any) -> bytes:
    """Return a status line of h3."""
    said = {"host": "h3", "token": "t", "number": 1, "finished": False, "greeting": greeting, "ranks": [], **over}
    about = {key: said.pop(key) for key in ("nonce", "context", "members") if key in said}
    return gang("h3", port, **about).sign(said)


STRANGERS: dict[str, Callable[[int, str], bytes]] = {
    "another nonce": lambda port, greeting: word(port, greeting, nonce="f" * 32),
    "another run": lambda port, greeting: word(port, greeting, context="r2 gang rack1"),
    "another gang": lambda port, greeting: word(port, greeting, members=("h1", "h3")),
    "no code": lambda port, greeting: word(port, greeting).partition(b" ")[2],
    "HTTP": lambda port, greeting: b"GET / HTTP/1.1\r\n\r\n",
    "bytes": lambda port, greeting: b"\x00\xff\n",
    "a line without end": lambda port, greeting: b"x" * (1 << 18),
    "a host that is no member": lambda port, greeting: word(port, greeting, host="h9"),
    "the head itself": lambda port, greeting: word(port, greeting, host="h1"),
    "recorded in another launch": lambda port, greeting: word(port, "0" * 16),
    "said before": lambda port, greeting: word(port, greeting) * 2,
    "a rank that is none": lambda port, greeting: word(port, greeting, ranks=[{"rank": "3"}]),
    "no list of ranks": lambda port, greeting: word(port, greeting, ranks=3),
}


@pytest.mark.parametrize("stranger", STRANGERS.values(), ids=STRANGERS.keys())
def test_strangers_are_dropped_and_the_gang_continues(
    three: dict[str, PeerChannel], port: int, stranger: Callable[[int, str], bytes]
) -> None:
    one, two, _ = three.values()
    with socket.create_connection(("127.0.0.1", port)) as channel:
        channel.settimeout(0.01)
        greeting = b""
        while not greeting:
            one.poll(0.01)
            try:
                greeting = channel.recv(4096)
            except TimeoutError:
                continue
        opened = gang("h3", port).verify(greeting.strip())
        assert opened is not None
        line = stranger(port, opened["greeting"])
        channel.setblocking(False)
        sent = 0
        ends = time.monotonic() + 5
        while sent < len(line) and time.monotonic() < ends:
            try:
                sent += channel.send(line[sent:])
            except BlockingIOError:
                one.poll(0.01)
            except ConnectionError:
                break
        while not hung_up(channel, one):
            assert time.monotonic() < ends
    until(lambda: "h2" in one.statuses and "h1" in two.statuses, one, two)
    assert "h9" not in one.statuses


def test_silent_connections_are_limited_in_number_and_time(
    three: dict[str, PeerChannel], port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, two, _ = three.values()
    until(lambda: "h2" in one.statuses, one, two)
    silent = [socket.create_connection(("127.0.0.1", port)) for _ in range(60)]
    for _ in range(100):
        one.poll(0.0)
    most = transport.MAX_UNPROVEN + len(MEMBERS)
    assert sum(not hung_up(channel, one) for channel in silent) <= most
    assert time.monotonic() - one.statuses["h2"].at < 5
    monkeypatch.setattr(transport, "PROOF_S", 0.1)
    time.sleep(0.3)
    one.poll(0.0)
    assert all(hung_up(channel, one) for channel in silent[-most:])
    for channel in silent:
        channel.close()
    until(lambda: "h3" in one.statuses, *three.values())


def test_lost_connection_is_reestablished(port: int) -> None:
    head, member = PeerChannel(gang("h1", port)), PeerChannel(gang("h3", port))
    until(lambda: "h3" in head.statuses and "h1" in member.statuses, head, member)
    head.close()
    head = PeerChannel(gang("h1", port))
    until(lambda: "h3" in head.statuses, head, member)
    head.close()
    member.close()


def test_port_in_use_is_reported_with_the_remedy(port: int) -> None:
    with listen("127.0.0.1", port), pytest.raises(GangError, match=f"127.0.0.1 port {port}.*rendezvous_port"):
        PeerChannel(gang("h1", port))


def test_listener_is_not_open_on_other_addresses(three: dict[str, PeerChannel], port: int) -> None:
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.9", port), timeout=1)


# ---- ranks ----


def test_rank_reports_its_progress(tmp_path: Path) -> None:
    work = tmp_path / ("d" * 120)  # longer than the path of a socket may be
    work.mkdir()
    receiver = HeartbeatReceiver(work, {0: "gpu=0", 1: "gpu=1"})
    heartbeat = RankHeartbeat(1, work)
    heartbeat.phase, heartbeat.grouped = "training", True
    with contextlib.suppress(RuntimeError), heartbeat.in_collective():
        heartbeat.send()
        receiver.read()
        inside = receiver.states()[1]
        raise RuntimeError
    heartbeat.record_failure("RuntimeError: Timed out waiting 1000ms for recv operation to complete")
    receiver.read()
    first, second = receiver.states()
    receiver.close()
    assert first.alive_s is None
    assert (inside.phase, inside.sequence, inside.grouped, inside.failure) == ("training", 1, True, "")
    assert inside.waiting_s is not None
    assert inside.waiting_s < 1
    assert second.failure == "timeout"
    assert second.waiting_s is not None, "it failed while waiting"


@pytest.mark.parametrize(
    ("problem", "kind"),
    [
        ("TimeoutError: the device did not end within 60 s", "timeout"),
        ("DistBackendError: wait timeout after 600000ms", "timeout"),
        ("RuntimeError: [gloo/pair.cc] Connection closed by peer [10.0.0.1]:2", "error"),
        ("OutOfMemoryError: CUDA out of memory", "error"),
    ],
)
def test_own_failures_differ_from_timeouts(tmp_path: Path, problem: str, kind: str) -> None:
    receiver = HeartbeatReceiver(tmp_path, {0: "gpu=0"})
    RankHeartbeat(0, tmp_path).record_failure(problem)
    receiver.read()
    assert receiver.states()[0].failure == kind
    receiver.close()


def test_garbage_on_the_socket_is_ignored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    receiver = HeartbeatReceiver(tmp_path, {0: "gpu=0"})
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as channel:
        monkeypatch.chdir(tmp_path)
        channel.connect("heartbeats")
        for line in (b"", b"\xff", b"[]", b"3", b'{"kind":"heartbeat","rank":7}', b'{"kind":"heartbeat","rank":[]}'):
            channel.send(line)
    assert receiver.read() is False
    assert receiver.states()[0].alive_s is None
    receiver.close()


RANK = """
import os, pathlib, signal, sys, time
pathlib.Path(sys.argv[1]).write_text(str(os.getpid()))
{what}
"""


class Guarded:
    """A rank under its guard, as a launcher would start it; `what` is its program."""

    def __init__(self, tmp_path: Path, what: str, supervisor: str = "") -> None:
        (tmp_path / "program.py").write_text(RANK.format(what=what))
        self.receiver = HeartbeatReceiver(tmp_path, {0: "cpu=0"})
        self._pid = tmp_path / "pid"
        self.guard = subprocess.Popen(
            [sys.executable, "-m", "agent.launch.guard", "program", str(self._pid)],
            env={
                **os.environ,
                "PYTHONPATH": str(tmp_path),
                "RANK": "0",
                HEARTBEAT_DIRECTORY: str(tmp_path),
                SUPERVISOR: supervisor,
            },
            start_new_session=True,
        )
        self.until(lambda: self._pid.exists() and bool(self._pid.read_text()))
        self.until(lambda: self.state.alive_s is not None)

    @property
    def pid(self) -> int:
        return int(self._pid.read_text())

    @property
    def state(self) -> RankState:
        self.receiver.read()
        return self.receiver.states()[0]

    def until(self, true: Callable[[], bool], patience_s: float = 10.0) -> None:
        ends = time.monotonic() + patience_s
        while not true():
            assert time.monotonic() < ends
            time.sleep(0.01)

    def end(self) -> None:
        self.guard.kill()
        self.guard.wait()
        self.receiver.close()


@pytest.mark.parametrize(
    ("what", "code", "observed"),
    [
        ("time.sleep(0.6)", 0, 0),
        ("time.sleep(0.6); sys.exit(7)", 7, 7),
        ("time.sleep(0.6); os.kill(os.getpid(), signal.SIGSEGV)", -11, -11),
        ("time.sleep(0.6); os.kill(os.getpid(), signal.SIGKILL)", -9, -9),
    ],
    ids=["well", "badly", "SIGSEGV", "SIGKILL"],
)
def test_launcher_and_supervisor_get_the_exit_of_the_rank(tmp_path: Path, what: str, code: int, observed: int) -> None:
    guarded = Guarded(tmp_path, what)
    assert guarded.guard.wait(timeout=10) == code
    state = guarded.state
    guarded.end()
    assert (state.exit_code, state.terminated_by_launcher) == (observed, False)
    assert state.ended_s is not None


def test_requested_end_is_marked(tmp_path: Path) -> None:
    guarded = Guarded(tmp_path, "time.sleep(60)")
    os.killpg(guarded.guard.pid, signal.SIGTERM)  # as torchrun does
    assert guarded.guard.wait(timeout=10) == -15
    state = guarded.state
    guarded.end()
    assert (state.exit_code, state.terminated_by_launcher) == (-15, True)


def test_stopped_rank_can_be_terminated(tmp_path: Path) -> None:
    guarded = Guarded(tmp_path, "time.sleep(60)")
    os.kill(guarded.pid, signal.SIGSTOP)
    guarded.until(lambda: guarded.state.stopped)
    assert not guarded.state.busy
    guarded.guard.terminate()
    assert guarded.guard.wait(timeout=10) == -15
    guarded.end()


def test_rank_that_holds_pythons_lock_is_busy_and_not_stopped(tmp_path: Path) -> None:
    guarded = Guarded(tmp_path, "sys.setswitchinterval(1000); time.sleep(0.6)\nwhile True: pass")
    guarded.until(lambda: guarded.state.silent_s > 2.5)
    state = guarded.state
    guarded.end()
    assert (state.busy, state.stopped) == (True, False)


@pytest.mark.parametrize("whose", ["guard", "supervisor", "launcher"])
def test_no_rank_outlives_guard_supervisor_or_launcher(tmp_path: Path, whose: str) -> None:
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]) as supervisor:
        if whose == "launcher":
            pids = launched(tmp_path)
        else:
            guarded = Guarded(tmp_path, "time.sleep(60)", process_identity(supervisor.pid))
            pids = [guarded.pid]
            (guarded.guard if whose == "guard" else supervisor).kill()
        ends = time.monotonic() + 5
        while any(read_process(pid) for pid in pids):
            assert time.monotonic() < ends
            time.sleep(0.02)
        if whose != "launcher":
            guarded.until(lambda: guarded.state.ended_s is not None)
            guarded.end()
        supervisor.kill()


def launched(tmp_path: Path) -> list[int]:
    """Start supervisor → launcher → guard → rank, and kill the supervisor; return launcher and rank."""
    (tmp_path / "program.py").write_text(RANK.format(what="time.sleep(60)"))
    launcher = (
        "import os, pathlib, subprocess, sys\n"
        f"pathlib.Path({str(tmp_path / 'launcher')!r}).write_text(str(os.getpid()))\n"
        f"subprocess.run([sys.executable, '-m', 'agent.launch.guard', 'program', {str(tmp_path / 'pid')!r}])"
    )
    supervisor = (
        "import os, subprocess, sys\n"
        "subprocess.run([sys.executable, '-m', 'agent.launch.guard', '--supervisor', str(os.getpid()),"
        f" sys.executable, '-c', {launcher!r}])"
    )
    with subprocess.Popen(
        [sys.executable, "-c", supervisor], env={**os.environ, "PYTHONPATH": str(tmp_path)}
    ) as started:
        ends = time.monotonic() + 10
        while not ((tmp_path / "pid").exists() and (tmp_path / "pid").read_text()):
            assert time.monotonic() < ends
            time.sleep(0.02)
        started.kill()
    return [int((tmp_path / name).read_text()) for name in ("launcher", "pid")]


def test_pause_of_the_supervisor_is_not_silence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    guarded = Guarded(tmp_path, "time.sleep(60)")
    monitor = GangMonitor("h1", guarded.receiver, None, 60.0)
    assert monitor.poll(0.1) is None
    os.kill(guarded.pid, signal.SIGSTOP)
    time.sleep(0.5)
    real = time.monotonic
    monkeypatch.setattr(time, "monotonic", lambda: real() + 60)  # the machine slept
    assert monitor.poll(0.1) is None
    assert guarded.state.silent_s < 5
    monkeypatch.setattr(time, "monotonic", real)
    guarded.end()


# ---- logs ----


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
