"""Derive the outcome of one launch: finished, failed or past its deadline, and the reason."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

from agent.gang.culprit import unable_rank_culprit
from agent.gang.rank_state import RankState
from schemas.records import Culprit, Gpu, Launch, Observation, Rank, Snapshot

MAX_REASON = 4096


@dataclass(frozen=True, kw_only=True)
class LaunchOutcome:
    """Everything that one launch adds to the record."""

    launch: Launch
    snapshots: tuple[Snapshot, ...] = ()
    gpus: tuple[Gpu, ...] = ()
    observations: tuple[Observation, ...] = ()
    software: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class RanksEnd:
    """How the ranks of this host ended."""

    exit_code: int | None
    """Exit code of the launcher; None if the supervisor ended it."""
    culprit: Culprit | None
    """The host or rank that caused the end of the launch; None if none was found."""
    states: Mapping[int, RankState]
    oom_kill: str
    """How the kernel's out-of-memory killer ended a process of this launch, in words; empty if it ended none."""
    any_rank_started: bool
    thread_limit: str = ""
    """Which limit on processes and threads this launch reached, in words; empty if there is no sign of it."""
    last_line: str = ""
    """Last line of the launcher's output that names an error; if there is none, the last line of the output."""
    other_processes: Mapping[str, str] = field(default_factory=dict)
    """As in `Launch`."""


@dataclass(frozen=True, kw_only=True)
class Conclusion:
    """How a launch ended, and why."""

    outcome: str
    reason: str
    culprit: Culprit | None = None


def conclude(
    end: RanksEnd,
    *,
    host: str,
    ranks: Sequence[Rank],
    excluded: Mapping[int, str],
    problems: Sequence[str],
    deadline_s: float,
    software_unfit: Collection[int] = (),
) -> Conclusion:
    """Return how the launch ended.

    Args:
        end: how the ranks ended.
        host: this host.
        ranks: the ranks of this host.
        excluded: rank -> why it could not join the process group. Such a rank makes the launch fail. Empty for a launch on one
            host, which does not fail in this case.
        problems: result files that cannot be used.
        deadline_s: deadline of the launch.
        software_unfit: those of the excluded ranks whose devices the software of this host does not support.
    """
    if end.culprit:
        text = f"{end.culprit.text}{_describe_others(end)}"
        return Conclusion(outcome="failed", reason=text[:MAX_REASON], culprit=end.culprit)
    outcome, reason = _outcome_and_reason(end, deadline_s, ranks)
    culprit = None
    if outcome == "finished" and excluded:
        rank, why = min(excluded.items(), key=lambda item: item[0] in software_unfit)  # a faulty device comes first
        are_all_excluded = len(excluded) == len(ranks) > 1 and len({*excluded.values()}) == 1
        state = end.states[rank]
        if rank in software_unfit or are_all_excluded:
            state = replace(state, scope="")  # the host is at fault, not this device
        culprit = unable_rank_culprit(host, state, why, len(excluded) - 1)
        outcome, reason = "failed", culprit.text
    if outcome == "failed" and not _has_started(end, ranks):
        problems = ()  # no rank could write a result
    text = "; ".join([reason, *problems] if reason else problems)
    return Conclusion(outcome=outcome, reason=text[:MAX_REASON], culprit=culprit)


def _outcome_and_reason(end: RanksEnd, deadline_s: float, ranks: Sequence[Rank]) -> tuple[str, str]:
    """Return the outcome and the reason, which is empty if the launch finished.

    The reason names an out-of-memory kill of any process of the launch, because the ranks may have needed that process. It names
    a limit on processes and threads, because ranks may hang if they cannot create a thread.
    """
    causes = f"; a process of this launch was {end.oom_kill}" if end.oom_kill else ""
    causes += f"; {end.thread_limit}" if end.thread_limit else ""
    causes += _describe_others(end)
    if end.exit_code is None:
        running = ", ".join(f"rank {rank.rank} in {rank.phase or 'start'}" for rank in ranks if rank.exit_code is None)
        return "deadline", f"not finished after {deadline_s:g} s ({running or 'every rank had ended'}){causes}"
    failed = [rank for rank in ranks if rank.exit_code != 0]
    if end.exit_code and not _has_started(end, ranks):
        detail = f": {end.last_line}" if end.last_line else ""
        return "failed", f"the launcher exited with {end.exit_code} before any rank started{detail}{causes}"
    if end.exit_code or failed:
        ends = ", ".join(
            f"rank {rank.rank} in {rank.phase or 'start'} ({_describe_end(rank.exit_code)})" for rank in failed
        )
        return "failed", f"the launcher exited with {end.exit_code}: {ends or 'every rank had finished'}{causes}"
    return "finished", ""


def _describe_others(end: RanksEnd) -> str:
    """Return which other processes used the GPUs, with a leading semicolon; empty if there were none."""
    return "".join(f"; {gpu} was also in use by {process}" for gpu, process in end.other_processes.items())


def _has_started(end: RanksEnd, ranks: Sequence[Rank]) -> bool:
    return end.any_rank_started or any(rank.phase for rank in ranks)


def _describe_end(exit_code: int | None) -> str:
    return "no exit code" if exit_code is None else f"exit code {exit_code}"
