"""Gangs (a gang: the hosts of one multi-node launch), rank states and heartbeats for tests of the agent's supervisor process."""

from __future__ import annotations

import json
import os
import secrets
import socket
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

from agent.gang.culprit import HOST_SILENT_S, RANK_SILENT_S, SETTLE_S, WATCHERS, GangSnapshot, PeerStatus
from agent.gang.peer_channel import PeerChannel
from agent.gang.protocol import Gang
from agent.gang.rank_state import RankState

NOW = 1000.0
"""Time of a gang snapshot: seconds of the monotonic clock."""
TIMEOUT_S = 60.0
"""Time-out of the process group, in seconds."""
LATE_STATUS_AGE_S, LOST_STATUS_AGE_S = HOST_SILENT_S - 1, HOST_SILENT_S + 0.1
"""Two ages of a host's last status, in seconds. With the first, the host is late; with the second, it counts as lost."""
SILENT_RANK_S = RANK_SILENT_S + 0.1
"""Age of the last heartbeat of a silent rank, in seconds."""
SETTLED_S = SETTLE_S + 0.1
"""Age of the failure or end of a rank, in seconds. It is long enough to know which rank failed first: see SETTLE_S."""
RUNNING_FIELDS = {
    "alive_s": 30.0,
    "grouped": True,
    "phase": "collective all_reduce 8 B",
    "sequence": 7,
    "waiting_s": 0.1,
}
TIMED_OUT_FIELDS = {"failure": "timeout", "failure_age_s": SETTLED_S, "sequence": 7, "waiting_s": TIMEOUT_S}
MEMBERS = ("h1", "h2", "h3")
ADDRESSES = {"h1": "127.0.0.1", "h2": "127.0.0.1", "h3": "127.0.0.3"}
"""Member -> address. The first two members have the same address, like two hosts on one machine."""
CLOCK_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


def rank_state(number: int, **fields: Any) -> RankState:
    """Return the state of a running rank; `fields` replace its fields."""
    return RankState(rank=number, scope=f"gpu={number % 2}", **{**RUNNING_FIELDS, **fields})


def gang_snapshot(
    me: str = "h1",
    hosts: int = 3,
    ages: dict[str, float] | None = None,
    finished: tuple[str, ...] = (),
    **ranks: RankState,
) -> GangSnapshot:
    """Return a snapshot of hosts h1, h2, …, each with two running ranks.

    Args:
        me: host that takes the snapshot.
        hosts: number of hosts.
        ages: host -> age of its status, in seconds; negative: no status yet.
        finished: hosts that have finished.
        ranks: `r3=…` replaces the state of rank 3.
    """
    members = tuple(f"h{number}" for number in range(1, hosts + 1))
    status_ages = dict.fromkeys(members, 0.3) | (ages or {})
    statuses = {
        host: PeerStatus(
            at=NOW - status_ages[host],
            ranks=tuple(ranks.get(f"r{number}", rank_state(number)) for number in (2 * index, 2 * index + 1)),
            finished=host in finished,
        )
        for index, host in enumerate(members)
        if status_ages[host] >= 0
    }
    awaited = tuple(host for host in (members if me in members[:WATCHERS] else members[:WATCHERS]) if host != me)
    return GangSnapshot(
        me=me, members=members, statuses=statuses, awaited=awaited, joined_at=NOW - 500, now=NOW, timeout_s=TIMEOUT_S
    )


def timed_out_ranks(*exceptions: RankState) -> dict[str, RankState]:
    """Return the states of ranks 0 to 5, with the keys `r0` to `r5`. All ranks except those in `exceptions` have timed out."""
    states = {f"r{number}": rank_state(number, **TIMED_OUT_FIELDS) for number in range(6)}
    return states | {f"r{state.rank}": state for state in exceptions}


def make_gang(me: str, port: int, **fields: Any) -> Gang:
    """Return the gang of MEMBERS as its member `me` sees it; `fields` replace fields of the gang."""
    common = {"members": MEMBERS, "addresses": ADDRESSES, "nonce": "0123456789abcdef" * 2, "context": "r1 gang rack1"}
    return Gang(**{"me": me, "port": port, **common, **fields})


@cache
def loopback_address(port: int) -> str:
    """Return a random loopback address, which other processes hardly ever use. The same port always gives the same address."""
    return "127." + ".".join(str(1 + byte % 254) for byte in secrets.token_bytes(3))


def status_line(port: int, greeting: str, **fields: Any) -> bytes:
    """Return a signed status of h3; `fields` replace fields of its message or of the gang."""
    message = {"host": "h3", "token": "t", "number": 1, "finished": False, "greeting": greeting, "ranks": [], **fields}
    gang_fields = {key: message.pop(key) for key in ("nonce", "context", "members") if key in message}
    return make_gang("h3", port, **gang_fields).sign(message)


def poll_until(is_true: Callable[[], bool], *channels: PeerChannel, timeout_s: float = 5.0) -> None:
    """Poll all channels, and publish a status on each, until the condition is true. Fail after `timeout_s`."""
    end = time.monotonic() + timeout_s
    while not is_true():
        assert time.monotonic() < end, f"the condition is not true after {timeout_s:g} s"
        for channel in channels:
            channel.poll(0.005)
            channel.publish_status([rank_state(0)])


def is_closed(connection: socket.socket, listener: PeerChannel) -> bool:
    """Poll the listener once; return whether it has closed the connection."""
    listener.poll(0.01)
    connection.setblocking(False)
    try:
        while connection.recv(1 << 16):
            continue  # discard the greeting
        return True
    except BlockingIOError:
        return False
    except ConnectionError:
        return True


def send_to_receiver(directory: Path, kind: str = "heartbeat", *, rank: int = 0, **fields: Any) -> None:
    """Send a message to the heartbeat receiver in `directory`, as a rank or its guard (the parent process of the rank) does."""
    heartbeat = (
        {"pid": 4711, "phase": "gemm", "sequence": 3, "progress_at": 0.0, "failure": ""} if kind == "heartbeat" else {}
    )
    descriptor = os.open(directory, os.O_RDONLY)
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as channel:
        channel.connect(f"/proc/self/fd/{descriptor}/heartbeats")
        channel.send(json.dumps({"kind": kind, "rank": rank, "at": time.monotonic(), **heartbeat, **fields}).encode())
    os.close(descriptor)


class FakeClock:
    """A `time.monotonic()` whose time a test sets in `now`."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class FakeProc:
    """A fake /proc."""

    def __init__(self, root: Path) -> None:
        self._root = root

    def put(self, pid: int, state: str = "S", *, cpu_s: float = 0.0, parent: int = 1, start_time: int = 7) -> None:
        """Add or replace a process."""
        ticks = int(cpu_s * CLOCK_TICKS_PER_S)
        fields = f"{state} {parent} 0 0 0 0 0 0 0 0 0 {ticks - ticks // 2} {ticks // 2} 0 0 20 0 1 0 {start_time} 0"
        directory = self._root / str(pid)
        directory.mkdir(parents=True, exist_ok=True)
        (directory / "stat").write_text(f"{pid} (a ) b (c) {fields}\n")

    def path(self, name: str) -> Path:
        """Map a path below /proc to this fake /proc. Return any other path unchanged."""
        return self._root / name.removeprefix("/proc/") if name.startswith("/proc/") else Path(name)
