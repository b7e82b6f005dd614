"""Find the host or rank that blocks a gang (the hosts of one multi-node launch), from the statuses of all supervisors.

A supervisor is the process that runs the launch on one host and monitors its ranks.

torch does not report what blocks the gang: if a rank is stopped or a link is cut, every rank fails at the time-out of the process
group, and no error names the cause. Therefore each rank reports its progress to its supervisor, outside the process group. Each
supervisor forwards the states of its ranks to the watchers, the first two hosts of the gang (`agent/gang/peer_channel.py`).
"""

from __future__ import annotations

import re
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from agent.gang.rank_state import RankState
from schemas.records import CUT_OFF, RAISED, Culprit

RANK_SILENT_S = 8.0
"""After this long without a heartbeat, a rank counts as silent, unless its process is busy (`RankState.busy`)."""
HOST_SILENT_S = 10.0
"""A host that has sent no status for this long counts as lost."""
UNSURE_S = 1.6
"""A host whose newest status is older than this may be lost. Until that is certain, no culprit is named. A rank whose newest
heartbeat is older than this may be silent. Until that is certain, an ended rank is not named as the culprit."""
SETTLE_S = 2.0
"""When a rank ends, other ranks end as a result. After this time all of these ranks have reported their end, so it is known which
rank ended first."""
START_S = 60.0
"""A starting rank can be silent for this long without a fault: importing torch and initializing the driver block all threads."""
TERMINATION_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
"""After a rank has failed, its launcher ends the other ranks of the host with these signals."""
SAME_MOMENT_S = 0.5
"""Ranks that end less than this time apart count as simultaneous, because their reports may arrive in the wrong order."""
FATAL_SIGNALS = (signal.SIGKILL, signal.SIGSEGV, signal.SIGBUS, signal.SIGILL, signal.SIGFPE)
"""The end of another rank does not cause these signals. It can cause SIGABRT, which is therefore not listed."""
WATCHERS = 2
"""The first WATCHERS hosts of a gang receive the statuses of all hosts. The others receive only the watchers' statuses."""
MAX_TEXT, MAX_HOSTS = 2000, 20


@dataclass(frozen=True, kw_only=True)
class PeerStatus:
    """The newest status of one supervisor."""

    at: float
    """Time of arrival, by the receiver's monotonic clock."""
    ranks: tuple[RankState, ...] = ()
    finished: bool = False
    """Whether the host has finished its launch and sends no more statuses."""
    aborted: bool = False
    """Whether the host ended its ranks itself, after the deadline of the launch or an interrupt."""


@dataclass(frozen=True, kw_only=True)
class GangSnapshot:
    """The state of the gang as one supervisor sees it."""

    me: str
    members: tuple[str, ...]
    statuses: Mapping[str, PeerStatus]
    """Newest status of this host, and of each host that has sent one."""
    awaited: tuple[str, ...]
    """Hosts that send their statuses to this host: all others if this host is a watcher, otherwise the watchers."""
    joined_at: float
    """When a host last joined the gang: the start of the launch on this host, or the first status of another host that this host
    received. By the monotonic clock of this host."""
    now: float
    """Time of this snapshot, by the same clock."""
    timeout_s: float
    """Time-out of the process group."""

    def age_s(self, host: str) -> float:
        """Return the age of a host's status, in seconds."""
        return self.now - self.statuses[host].at

    def unfinished(self) -> list[str]:
        """Return the awaited hosts that have not finished."""
        return [host for host in self.awaited if host not in self.statuses or not self.statuses[host].finished]


@dataclass(frozen=True, kw_only=True)
class _Report:
    """The state of a rank in the status of its host, and the age of that status in seconds."""

    host: str
    rank: RankState
    age_s: float

    @property
    def ended_ago_s(self) -> float:
        return (self.rank.ended_s or 0.0) + self.age_s

    @property
    def failed_ago_s(self) -> float:
        failure_age_s = self.rank.ended_s if self.rank.failure_age_s is None else self.rank.failure_age_s
        return (failure_age_s or 0.0) + self.age_s


def find_culprit(gang: GangSnapshot) -> Culprit | None:
    """Return the host or rank that blocks the gang; None if there is none, or while it is not certain which.

    First look for a lost host, because ranks on other hosts die or time out when a host is lost. Then look for a rank that
    failed, a silent rank, a rank that did not start, and last a rank that the others waited for until their time-out. Before
    that time-out a slow rank is not a culprit, because compilation can take long. If a host has ended its own ranks
    (`PeerStatus.aborted`), ranks on other hosts fail as a result, so no culprit is named.
    """
    if _is_unsettled(gang) or any(status.aborted for status in gang.statuses.values()):
        return None
    return _find_lost_host(gang) or _find_rank_at_fault(gang)


def _is_unsettled(gang: GangSnapshot) -> bool:
    """Return whether a host has sent no status for more than UNSURE_S, but not yet for long enough to count as lost."""
    return any(UNSURE_S < gang.age_s(host) <= HOST_SILENT_S for host in gang.unfinished() if host in gang.statuses)


def _find_lost_host(gang: GangSnapshot) -> Culprit | None:
    unfinished = gang.unfinished()
    silent = [host for host in unfinished if host in gang.statuses and gang.age_s(host) > HOST_SILENT_S]
    if not silent:
        return _find_absent_host(gang, unfinished)
    silence = f"for {HOST_SILENT_S:g} s"
    if len(gang.members) == 2:
        text = f"hosts {' and '.join(gang.members)}: no messages between them {silence}; check the link, both hosts"
        return Culprit(kind="host_silent", hosts=gang.members, text=f"{text}, and their supervisors")
    if len(silent) == len(unfinished) > 1:
        return _lost_contact(gang, silent, silence)
    possessive = "its" if len(silent) == 1 else "their"
    text = f"{_host_list(silent)}: no messages {silence}; check {possessive} link, host and supervisor"
    running = [rank for host in silent for rank in gang.statuses[host].ranks if rank.ended_s is None]
    if running:
        text += f"; last seen {'; '.join(_describe_rank(rank) for rank in running)}"
    return Culprit(kind="host_silent", hosts=tuple(silent), text=_shorten(text))


def _lost_contact(gang: GangSnapshot, silent: Sequence[str], silence: str) -> Culprit:
    """Return the culprit if all hosts from which this host awaits statuses are silent: this host or those hosts may have failed.

    A watcher awaits statuses from all hosts, so its own link is the likely cause, and it names itself. A host that is not a
    watcher awaits statuses only from the watchers, and names them. If in fact its own link failed, the watchers name this host,
    and their report takes precedence.
    """
    if gang.me in gang.members[:WATCHERS]:
        text = f"host {gang.me}: no messages from any other host {silence}; check its link first, then the other hosts"
        return Culprit(kind=CUT_OFF, hosts=(gang.me,), text=f"{text} and their links")
    text = f"{_host_list(silent)}: no messages {silence}; check their links, hosts and supervisors; if only one host"
    return Culprit(kind=CUT_OFF, hosts=tuple(silent), text=f"{text} reports this, check the link of that host")


def _find_absent_host(gang: GangSnapshot, unfinished: Sequence[str]) -> Culprit | None:
    absent = [host for host in unfinished if host not in gang.statuses]
    timeout = join_timeout_s(gang.timeout_s)
    if not absent or gang.now - gang.joined_at <= timeout:
        return None
    # This list may be incomplete, because only watchers receive the statuses of all hosts.
    joined = [host for host in gang.members if host in gang.statuses or host == gang.me]
    text = f"{_host_list(absent)}: did not join the gang within {timeout:g} s; {_host_list(joined)} did"
    return Culprit(kind="host_absent", hosts=tuple(absent), text=_shorten(text))


def join_timeout_s(timeout_s: float) -> float:
    """Return the maximum time between two hosts that join the gang, given the time-out of the process group.

    It does not limit the time until all hosts have joined: Ansible starts a launch on a few hosts at a time, and with a slow
    connection the last of hundreds of hosts starts minutes after the first.
    """
    return min(120.0, max(20.0, 2 * timeout_s))


def _find_rank_at_fault(gang: GangSnapshot) -> Culprit | None:
    """Return the rank at fault, or None.

    Call this only if no host is lost: each status must be recent, or the last one of a finished host.
    """
    reports = [
        _Report(host=host, rank=rank, age_s=gang.now - status.at)
        for host, status in gang.statuses.items()
        for rank in status.ranks
    ]
    return (
        _find_ended_rank(reports, gang.timeout_s)
        or _find_silent_rank(reports)
        or _find_late_rank(reports, gang.timeout_s)
    )


def _find_ended_rank(reports: Sequence[_Report], timeout_s: float) -> Culprit | None:
    """Return the rank that failed first. Ranks that their launcher or a time-out ended do not count (`_failed_on_its_own`).

    Return None if there is none. Also return None while another rank may be silent, because it may be the cause (UNSURE_S), and
    while an earlier failure of another rank may not be reported yet (SETTLE_S).
    """
    if any(report.rank.silent_s > UNSURE_S and _can_be_silent(report.rank) for report in reports):
        return None
    ended = [report for report in reports if _failed_on_its_own(report.rank, timeout_s)]
    # Ranks that a termination signal ended are left out, unless all of these ranks ended that way.
    ended = [report for report in ended if not _was_signalled(report.rank, TERMINATION_SIGNALS)] or ended
    if not any(report.ended_ago_s >= SETTLE_S for report in ended):
        return None
    oldest_s = max(report.ended_ago_s for report in ended)
    same_moment = [report for report in ended if oldest_s - report.ended_ago_s <= SAME_MOMENT_S]
    # If ranks ended simultaneously, prefer one whose end another rank cannot cause: by a fatal signal, with an unknown exit code,
    # or with a known cause that is no device.
    fatal = [
        report
        for report in same_moment
        if report.rank.exit_code is None
        or (report.rank.why and report.rank.exception)
        or _was_signalled(report.rank, FATAL_SIGNALS)
    ]
    first = max(fatal or same_moment, key=lambda report: report.ended_ago_s)
    return _rank_culprit("rank_ended", first, first.rank.why or describe_exit(first.rank.exit_code), ended)


def _raised_culprit(first: _Report, failed: Sequence[_Report]) -> Culprit:
    """Return a culprit that names every host on which a rank has this exception. These hosts may share its cause."""
    cause = _without_numbers(first.rank.exception)
    same = [report.host for report in failed if _without_numbers(report.rank.exception) == cause]
    hosts = tuple(dict.fromkeys(same or [first.host]))
    others = len(hosts) - 1
    more = f" (and on {others} more host{'s' if others > 1 else ''})" if others else ""
    text = f"host {first.host} {_describe_rank(replace(first.rank, scope=''))}: {first.rank.exception}{more}"
    return Culprit(
        kind=RAISED, hosts=hosts, text=_shorten(text), rank=first.rank.rank, phase=first.rank.phase or "start"
    )


def _without_numbers(text: str) -> str:
    """Return the text without digits. Rank numbers, ports and addresses differ between hosts that fail for the same reason."""
    return re.sub(r"[0-9]+", "", text)


def _failed_on_its_own(rank: RankState, timeout_s: float) -> bool:
    """Return whether a rank failed, and neither its launcher nor a time-out ended it."""
    failed = rank.ended_s is not None and rank.exit_code != 0
    return failed and not rank.terminated_by_launcher and not _has_timed_out(rank, timeout_s)


def _was_signalled(rank: RankState, signals: Sequence[signal.Signals]) -> bool:
    return rank.exit_code is not None and -rank.exit_code in signals


def unable_rank_culprit(host: str, rank: RankState, why: str, more: int) -> Culprit:
    """Return the culprit for a rank that could not join the process group. `more`: number of other such ranks on the host."""
    others = f"; {more} more rank{'s' if more > 1 else ''} of this host cannot either" if more else ""
    report = _Report(host=host, rank=replace(rank, phase="readiness check", exception=""), age_s=0.0)
    return _rank_culprit("rank_unable", report, f"cannot take part: {why}{others}")


def describe_exit(exit_code: int | None) -> str:
    """Return an exit code in words."""
    if exit_code is None:
        return "ended with an unknown exit code: its guard, the process that reports the code, ended too"
    if exit_code < 0:
        try:
            return f"killed by {signal.Signals(-exit_code).name}"
        except ValueError:
            return f"killed by signal {-exit_code}"
    return f"ended with exit code {exit_code}"


def _has_timed_out(rank: RankState, timeout_s: float) -> bool:
    """Return whether a rank waited too long for other ranks: it reported a time-out, or NCCL's watchdog aborted it (SIGABRT)."""
    waited_s = rank.waiting_s or rank.progress_s
    return rank.failure == "timeout" or (rank.exit_code == -signal.SIGABRT and waited_s >= 0.8 * timeout_s)


def _is_starting(rank: RankState) -> bool:
    return rank.phase in ("", "start")


def _can_be_silent(rank: RankState) -> bool:
    """Return whether missing heartbeats of this rank indicate a fault.

    They do if the rank has sent a heartbeat, runs and is not busy. While the rank starts, they do only if its process is also
    stopped (SIGSTOP).
    """
    is_running = rank.ended_s is None and rank.alive_s is not None
    return is_running and not rank.busy and (rank.stopped or not _is_starting(rank))


def _find_silent_rank(reports: Sequence[_Report]) -> Culprit | None:
    """Return the silent rank whose heartbeats stopped first.

    If no rank is silent, return a rank that did not start in time. Do the same if other ranks run and do not depend on one
    another. Return None if there is none.
    """
    running = [report for report in reports if report.rank.ended_s is None]
    silent = [report for report in running if _can_be_silent(report.rank) and report.rank.silent_s > RANK_SILENT_S]
    if not silent:
        return _find_late_start(running)
    others = [report for report in running if report not in silent]
    # Ranks that do not depend on one another continue, and only the measurements of the silent rank are missing.
    if others and not any(report.rank.grouped for report in others):
        return _find_late_start(others)
    first = max(silent, key=lambda report: report.rank.silent_s)
    why = "its process is stopped" if first.rank.stopped else "its process is frozen, or gets no CPU time"
    return _rank_culprit("rank_silent", first, f"silent for {RANK_SILENT_S:g} s: {why}")


def _find_late_start(running: Sequence[_Report]) -> Culprit | None:
    """Return a rank that did not start in time; None if there is none.

    Such a rank has sent no heartbeat, although another rank sent its first more than START_S ago; or it has sent one, and then
    none for more than START_S during its start.
    """
    another_started_long_ago = any((report.rank.alive_s or 0.0) > START_S for report in running)
    for report in running:
        rank = report.rank
        if rank.alive_s is None and another_started_long_ago:
            return _rank_culprit("rank_absent", report, f"did not start within {START_S:g} s")
        is_stuck = _is_starting(rank) and not rank.busy and rank.silent_s > START_S
        if rank.alive_s is not None and is_stuck:
            return _rank_culprit("rank_absent", report, f"silent for {START_S:g} s during its start")
    return None


def _find_late_rank(reports: Sequence[_Report], timeout_s: float) -> Culprit | None:
    """Return the rank that the others waited for until their time-out; None if there is none.

    Also return None until SETTLE_S after a time-out.
    """
    timed_out = [report for report in reports if _has_timed_out(report.rank, timeout_s)]
    if not any(report.failed_ago_s >= SETTLE_S for report in timed_out):
        return None
    first_timeout_ago_s = max(report.failed_ago_s for report in timed_out)
    waited = f"the others waited for it until their time-out of {timeout_s:g} s"
    failed = [
        report
        for report in reports
        if report.rank.failure == "error"
        and report.rank.failure_age_s is not None
        and report.failed_ago_s > first_timeout_ago_s + SETTLE_S
    ]
    if failed:
        first = max(failed, key=lambda report: report.failed_ago_s)
        return _rank_culprit("rank_behind", first, f"failed before the others, and {waited}")
    others = [report for report in reports if not _has_timed_out(report.rank, timeout_s)]
    late = _find_furthest_behind(others, timed_out)
    return _rank_culprit("rank_behind", late, f"alive, but {waited}") if late else None


def _find_furthest_behind(others: Sequence[_Report], timed_out: Sequence[_Report]) -> _Report | None:
    """Return the running rank that has started the fewest collective operations, if every rank in `timed_out` has started more.

    A rank that waits in an operation is not returned. If only one rank of `others` still runs, and does not wait, return it
    however many operations it has started.
    """
    reached = min(report.rank.sequence for report in timed_out)
    running = [report for report in others if report.rank.ended_s is None]
    behind = [report for report in running if report.rank.waiting_s is None and report.rank.sequence < reached]
    if not behind and len(running) == 1 and running[0].rank.waiting_s is None:
        behind = running
    return min(behind, key=lambda report: (report.rank.sequence, -report.rank.progress_s), default=None)


def _rank_culprit(kind: str, report: _Report, why: str, failed: Sequence[_Report] = ()) -> Culprit:
    """Return the culprit for a rank. If the rank has an exception, also name the hosts of `failed` ranks with the same one."""
    rank = report.rank
    if rank.exception:
        return _raised_culprit(report, failed)
    return Culprit(
        kind=kind,
        hosts=(report.host,),
        text=_shorten(f"host {report.host} {_describe_rank(rank)}: {why}"),
        scope=rank.scope,
        rank=rank.rank,
        phase=rank.phase or "start",
    )


def _describe_rank(rank: RankState) -> str:
    return f'{rank.scope} rank {rank.rank} in phase "{rank.phase or "start"}"'.lstrip()


def _host_list(names: Sequence[str]) -> str:
    more = f" and {len(names) - MAX_HOSTS} more" if len(names) > MAX_HOSTS else ""
    return f"host{'s' if len(names) > 1 else ''} {', '.join(names[:MAX_HOSTS])}{more}"


def _shorten(text: str) -> str:
    return text if len(text) <= MAX_TEXT else f"{text[: MAX_TEXT - 1]}…"
