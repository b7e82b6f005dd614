"""The monitor of a launch: when it searches for a culprit, and how it reports a failed launcher and the end of the launch.

A culprit is the host or rank that blocks a gang (the hosts of one launch).
"""

from __future__ import annotations

import select
import socket
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, cast

import pytest

from agent.gang import monitor
from agent.gang.culprit import SETTLE_S, GangSnapshot, PeerStatus, join_timeout_s
from agent.gang.heartbeat_receiver import HeartbeatReceiver
from agent.gang.monitor import EXIT_ANNOUNCEMENT_S, OWN_FAILURE_S, PAUSE_S, GangMonitor
from agent.gang.peer_channel import PeerChannel
from agent.gang.rank_state import RankState
from schemas.records import Culprit
from tests.gangs import FakeClock, make_gang, send_to_receiver

CULPRIT = Culprit(kind="host_silent", hosts=("h3",), text="host h3: no messages")


class FakeChannel:
    """A `PeerChannel` without sockets. `poll` does not wait: it advances the fake clock by its argument `seconds`."""

    def __init__(self, clock: FakeClock) -> None:
        self.gang = make_gang("h1", 1)
        self.statuses: dict[str, Any] = {}
        self.verdict: Culprit | None = None
        self.finished = self.aborted = self.is_closed = False
        self.polls: list[float] = []
        self.pauses: list[float] = []
        self.polls_until_delivery = 0
        self.published: list[tuple[Sequence[RankState], bool, bool]] = []
        """Ranks, `at_once` and `finished` of each published status."""
        self._clock = clock

    def watch_socket(self, channel: socket.socket) -> None:
        """Ignore the socket: tests poll without waiting."""

    def poll(self, seconds: float) -> None:
        self.polls.append(seconds)
        self._clock.now += seconds

    def publish_status(self, ranks: Sequence[RankState], *, at_once: bool = False) -> None:
        self.published.append((ranks, at_once, self.finished))

    def compensate_pause(self, seconds: float) -> None:
        self.pauses.append(seconds)

    def announce_verdict(self, verdict: Culprit) -> None:
        self.verdict = verdict

    def is_decider(self, now: float) -> bool:
        return True

    def is_delivered(self) -> bool:
        return len(self.polls) >= self.polls_until_delivery

    def close(self) -> None:
        self.is_closed = True


@pytest.fixture
def receiver(tmp_path: Path) -> Iterator[HeartbeatReceiver]:
    receiver = HeartbeatReceiver(tmp_path, {0: "gpu=0", 1: "gpu=1"})
    yield receiver
    receiver.close()


@pytest.fixture
def channel(clock: FakeClock) -> FakeChannel:
    return FakeChannel(clock)


@pytest.fixture
def waits(clock: FakeClock, monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Replace `select.select` by a fake that does not block. Return the list of its time-outs, in seconds.

    Each call advances the fake clock by 0.125 s, unless its time-out is 0.
    """
    seconds: list[float] = []

    def wait(*arguments: Any) -> tuple[list[int], list[int], list[int]]:
        seconds.append(arguments[-1])
        clock.now += 0.125 if arguments[-1] else 0.0
        return [], [], []

    monkeypatch.setattr(select, "select", wait)
    return seconds


@pytest.fixture
def lone_monitor(receiver: HeartbeatReceiver, waits: list[float]) -> GangMonitor:
    """Return the monitor of a launch on one host, which has no channel to other hosts."""
    return GangMonitor("h1", receiver, None, 60.0)


@pytest.fixture
def gang_monitor(receiver: HeartbeatReceiver, channel: FakeChannel) -> GangMonitor:
    """Return the monitor of a host that reaches the other hosts through the fake `channel`."""
    return GangMonitor("h1", receiver, cast(PeerChannel, channel), 60.0)


@pytest.fixture
def searches(clock: FakeClock, monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Return a list to which each search for a culprit appends its time. No search finds a culprit."""
    times: list[float] = []

    def find_no_culprit(gang: GangSnapshot) -> None:
        times.append(clock.now)

    monkeypatch.setattr(monitor, "find_culprit", find_no_culprit)
    monkeypatch.setattr(monitor, "JUDGE_INTERVAL_S", 0.25)
    return times


def test_culprit_is_searched_for_once_per_interval_and_when_a_rank_starts(
    lone_monitor: GangMonitor, tmp_path: Path, clock: FakeClock, searches: list[float]
) -> None:
    for _ in range(5):
        lone_monitor.poll(0.0)
        clock.now += 0.125
    assert searches == [1000.0, 1000.25, 1000.5]
    send_to_receiver(tmp_path)
    lone_monitor.poll(0.0)
    assert searches[3:] == [1000.625], "the first heartbeat of a rank must cause a search at once"
    clock.now += 0.125
    lone_monitor.poll(0.0)
    assert searches[4:] == []


def test_host_is_absent_only_if_no_host_has_joined_for_the_join_timeout(
    gang_monitor: GangMonitor, channel: FakeChannel, clock: FakeClock
) -> None:
    """Ansible starts a launch on a few hosts at a time."""
    late_s = join_timeout_s(60.0) + 1
    culprits = []
    for joined, wait_s in ((["h1"], late_s - 5), (["h1", "h2"], late_s)):
        end = clock.now + wait_s
        while clock.now < end:
            channel.statuses = {host: PeerStatus(at=clock.now) for host in joined}
            culprits.append(gang_monitor.poll(0.0))
            clock.now += PAUSE_S
    channel.statuses = {host: PeerStatus(at=clock.now) for host in ("h1", "h2")}
    culprit = gang_monitor.poll(0.0)
    assert {*culprits[:-1]} == {None}
    assert culprit
    assert (culprit.kind, culprit.hosts) == ("host_absent", ("h3",))


def test_pause_of_the_supervisor_does_not_make_a_host_absent(
    gang_monitor: GangMonitor, channel: FakeChannel, clock: FakeClock
) -> None:
    """While the supervisor is stopped (SIGSTOP, or its virtual machine is paused), it does not read that other hosts join."""
    timeout_s = join_timeout_s(60.0)
    for seconds in (0.0, timeout_s + 60.0, PAUSE_S):
        clock.now += seconds
        channel.statuses = {host: PeerStatus(at=clock.now) for host in ("h1", "h2")}
        assert gang_monitor.poll(0.0) is None
    for _ in range(int(timeout_s / PAUSE_S)):  # in steps that are no pause
        clock.now += PAUSE_S
        channel.statuses = {host: PeerStatus(at=clock.now) for host in ("h1", "h2")}
        result = gang_monitor.poll(0.0)
    assert result
    assert (result.kind, result.hosts) == ("host_absent", ("h3",))


def test_verdict_of_another_host_is_returned_at_once(
    gang_monitor: GangMonitor, channel: FakeChannel, searches: list[float]
) -> None:
    assert gang_monitor.poll(0.0) is None
    channel.verdict = CULPRIT
    assert gang_monitor.poll(0.0) is CULPRIT
    assert len(searches) == 1, "there must be no search after another host has announced its verdict"


@pytest.mark.parametrize(("pause_s", "silent_s"), [(PAUSE_S, PAUSE_S), (PAUSE_S + 0.25, 0.0)])
def test_only_a_short_pause_of_the_monitor_counts_as_silence_of_a_rank(
    lone_monitor: GangMonitor, tmp_path: Path, clock: FakeClock, pause_s: float, silent_s: float
) -> None:
    send_to_receiver(tmp_path)
    lone_monitor.poll(0.0)
    clock.now += pause_s
    lone_monitor.poll(0.0)
    assert lone_monitor.states()[0].silent_s == silent_s


def test_long_pause_of_the_monitor_does_not_age_statuses(
    gang_monitor: GangMonitor, channel: FakeChannel, clock: FakeClock
) -> None:
    clock.now += PAUSE_S + 1.0
    gang_monitor.poll(0.0)
    gang_monitor.poll(0.0)
    assert channel.pauses == [PAUSE_S + 1.0]


def test_failure_of_the_launcher_is_given_as_the_reason_why_its_rank_ended(
    lone_monitor: GangMonitor, tmp_path: Path
) -> None:
    send_to_receiver(tmp_path, "end", rank=0, code=-15, terminated_by_launcher=True)
    lone_monitor.await_verdict(3, "no space left")
    assert lone_monitor.states()[0].why == "its launcher ended with exit code 3: no space left"
    assert lone_monitor.states()[1].why == ""


@pytest.mark.parametrize(("after_s", "counts_as_ended"), [(OWN_FAILURE_S - 1, True), (OWN_FAILURE_S, False)])
def test_first_rank_counts_as_ended_only_if_the_launcher_fails_early(
    gang_monitor: GangMonitor, clock: FakeClock, after_s: float, counts_as_ended: bool
) -> None:
    """No rank has started. If the launcher fails early enough, the first rank counts as ended since that moment."""
    clock.now += after_s
    ended_at = clock.now
    gang_monitor.await_verdict(1)
    clock.now = ended_at + 20.0
    assert gang_monitor.states()[0].ended_s == (20.0 if counts_as_ended else None)
    assert gang_monitor.states()[1].ended_s is None


def test_lone_monitor_awaits_a_verdict_for_twice_the_settling_time(
    lone_monitor: GangMonitor, clock: FakeClock, waits: list[float]
) -> None:
    assert lone_monitor.await_verdict(1) is None
    assert clock.now == 1000.0 + 2 * SETTLE_S
    assert max(waits) <= 0.2, "each wait must be short, so that a verdict is returned soon"


@pytest.mark.parametrize(("polls_until_delivery", "waited_s"), [(0, 0.0), (5, 0.5), (10_000, EXIT_ANNOUNCEMENT_S)])
def test_exit_is_announced_until_the_status_is_delivered_or_the_maximum_time_has_passed(
    gang_monitor: GangMonitor,
    channel: FakeChannel,
    receiver: HeartbeatReceiver,
    polls_until_delivery: int,
    waited_s: float,
) -> None:
    channel.polls_until_delivery = polls_until_delivery
    gang_monitor.announce_exit()
    assert sum(channel.polls) == pytest.approx(waited_s, abs=0.11)
    ((ranks, at_once, finished),) = channel.published
    assert ([rank.rank for rank in ranks], at_once, finished) == ([0, 1], True, True)
    assert channel.is_closed
    assert receiver.socket.fileno() == -1
