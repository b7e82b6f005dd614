"""Which culprit is named among several: each test changes one fact of a case with or without a culprit."""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import Any

import pytest

from agent.gang.culprit import HOST_SILENT_S, START_S, GangSnapshot, describe_exit, find_culprit, join_timeout_s
from agent.gang.rank_state import parse_rank_state
from tests.unit.agent.gang.test_heartbeat import (
    LATE,
    LOST,
    SETTLED,
    SILENT,
    TIMED_OUT,
    TIMEOUT_S,
    rank,
    timed_out,
    view,
)

WAITED = "the others waited for it until their time-out of 60 s"


def text(known: GangSnapshot) -> str:
    result = find_culprit(known)
    return result.text if result else ""


def test_settled_end_is_named_despite_a_recent_one() -> None:
    known = view(r3=rank(3, ended_s=SETTLED, exit_code=1), r5=rank(5, ended_s=0.1, exit_code=1))
    assert text(known).startswith("host h2 gpu=1 rank 3")


def test_first_of_two_simultaneous_deaths_is_named() -> None:
    known = view(r3=rank(3, ended_s=SETTLED + 0.3, exit_code=-9), r5=rank(5, ended_s=SETTLED, exit_code=-9))
    assert text(known).startswith("host h2 gpu=1 rank 3")


def test_rank_that_fails_with_a_lost_launcher_is_not_named() -> None:
    left = rank(3, ended_s=SETTLED, why="its launcher was killed by SIGKILL")
    known = view(r3=left, r5=rank(5, ended_s=SETTLED + 0.3, exit_code=1, failure="error"))
    assert text(known).endswith('rank 3 in phase "collective all_reduce 8 B": its launcher was killed by SIGKILL')


def test_killed_launcher_is_named_before_its_victims() -> None:
    """All at the same moment, before any rank started."""
    began: dict[str, Any] = {"alive_s": None, "phase": ""}
    killed = rank(3, ended_s=SETTLED, why="its launcher was killed by SIGKILL before any rank started", **began)
    known = view(r3=killed, r5=rank(5, ended_s=SETTLED + 0.3, exit_code=1, why="its launcher ended", **began))
    assert text(known).endswith('rank 3 in phase "start": its launcher was killed by SIGKILL before any rank started')


def test_failure_after_an_abort_names_no_culprit() -> None:
    failed = view(r3=rank(3, ended_s=SETTLED, exit_code=1))
    assert text(failed).startswith("host h2 gpu=1 rank 3")
    left = {**failed.statuses, "h1": replace(failed.statuses["h1"], aborted=True)}
    assert text(replace(failed, statuses=left)) == ""


def test_later_kill_does_not_explain_an_earlier_failure() -> None:
    known = view(r3=rank(3, ended_s=SETTLED + 3, exit_code=1), r5=rank(5, ended_s=SETTLED, exit_code=-9))
    assert text(known).startswith("host h2 gpu=1 rank 3")


def test_termination_signal_is_named_last() -> None:
    known = view(r3=rank(3, ended_s=SETTLED, exit_code=1), r5=rank(5, ended_s=SETTLED + 3, exit_code=-15))
    assert text(known).startswith("host h2 gpu=1 rank 3")


def test_early_abort_is_the_ranks_own_failure() -> None:
    early = rank(3, ended_s=SETTLED, exit_code=-6, waiting_s=5.0)
    assert text(view(r3=early)).endswith("killed by SIGABRT")
    assert text(view(r3=replace(early, waiting_s=TIMEOUT_S))) == ""
    assert text(view(r3=replace(early, waiting_s=None, progress_s=TIMEOUT_S))) == ""
    assert text(view(r3=replace(early, waiting_s=TIMEOUT_S, exit_code=-11))).endswith("killed by SIGSEGV")


def test_rank_silent_during_start_is_absent() -> None:
    start = rank(3, phase="start", silent_s=START_S + 1, alive_s=START_S + 5, grouped=False)
    assert text(view(r3=start)) == 'host h2 gpu=1 rank 3 in phase "start": silent for 60 s during its start'
    assert text(view(r3=replace(start, busy=True))) == ""
    assert text(view(r3=replace(start, silent_s=START_S - 1))) == ""
    assert text(view(r3=replace(start, phase="gemm", busy=True, grouped=True))) == ""


def test_rank_without_heartbeats_is_in_start() -> None:
    result = find_culprit(view(r3=rank(3, alive_s=None, phase=""), r0=rank(0, alive_s=START_S + 1)))
    assert result is not None
    assert (result.kind, result.phase) == ("rank_absent", "start")
    result = find_culprit(view(r3=rank(3, ended_s=SETTLED)))
    assert result is not None
    assert result.phase == "collective all_reduce 8 B"


def test_unstarted_rank_is_absent_once_another_has_run_long() -> None:
    never = rank(3, alive_s=None, phase="")
    others = {f"r{number}": rank(number, alive_s=START_S - 1) for number in (0, 1, 2, 4, 5)}
    assert text(view(r3=never, **others)) == ""
    assert text(view(**{f"r{number}": rank(number, alive_s=None, phase="") for number in range(6)})) == ""


def test_silent_rank_precedes_an_absent_one() -> None:
    known = view(r3=rank(3, silent_s=SILENT), r4=rank(4, alive_s=None, phase=""), r0=rank(0, alive_s=START_S + 1))
    assert text(known).startswith("host h2 gpu=1 rank 3")


def test_silent_rank_is_named_once_another_depends_on_it() -> None:
    known = view(r3=rank(3, silent_s=SILENT), r0=rank(0, grouped=False), r4=rank(4, grouped=False))
    assert text(known).startswith("host h2 gpu=1 rank 3")


def test_first_of_two_silent_ranks_is_named() -> None:
    known = view(r3=rank(3, silent_s=SILENT + 1), r4=rank(4, silent_s=SILENT))
    assert text(known).startswith("host h2 gpu=1 rank 3")


def test_failure_together_with_timeouts_is_not_named() -> None:
    failed = rank(3, failure="error", failure_age_s=SETTLED + 1)
    assert text(view(**timed_out(failed))) == ""
    assert text(view(**timed_out(replace(failed, failure_age_s=SETTLED + 3)))).endswith(
        f"failed on its own, and {WAITED}"
    )


def test_failure_is_as_old_as_the_status_of_its_host() -> None:
    failed = rank(3, failure="error", failure_age_s=1.0)
    known = view(ages={"h2": 20.0}, finished=("h2",), **{**timed_out(failed), "r2": rank(2, ended_s=1.0, exit_code=0)})
    assert text(known).endswith(f"failed on its own, and {WAITED}")


def test_failure_after_the_first_timeout_is_not_named() -> None:
    first = replace(rank(0, **TIMED_OUT), failure_age_s=10.0)
    assert text(view(**timed_out(rank(3, failure="error", failure_age_s=5.0), first))) == ""


def test_rank_level_with_a_timed_out_rank_is_not_behind() -> None:
    ahead, waiting = replace(rank(0, **TIMED_OUT), sequence=9), rank(2, waiting_s=TIMEOUT_S)
    assert text(view(**timed_out(ahead, waiting, rank(3, sequence=8, waiting_s=None)))) == ""


def test_first_of_two_failures_is_named() -> None:
    known = view(
        **timed_out(rank(3, failure="error", failure_age_s=50.0), rank(4, failure="error", failure_age_s=40.0))
    )
    assert text(known).startswith("host h2 gpu=1 rank 3")


def test_waiting_rank_is_not_the_culprit() -> None:
    working = rank(3, sequence=6, waiting_s=None, progress_s=TIMEOUT_S)
    waiting = rank(2, sequence=6, waiting_s=TIMEOUT_S)
    assert (
        text(view(**timed_out(working, waiting)))
        == f'host h2 gpu=1 rank 3 in phase "{working.phase}": alive, but {WAITED}'
    )
    assert text(view(**timed_out(waiting))) == ""
    assert text(view(**timed_out(replace(working, sequence=7), replace(waiting, sequence=7)))) == ""


def test_furthest_behind_or_longest_idle_rank_is_named() -> None:
    lagging = [rank(number, sequence=6, waiting_s=None, progress_s=30.0) for number in (2, 3)]
    assert "rank 3" in text(view(**timed_out(lagging[0], replace(lagging[1], sequence=5))))
    assert "rank 3" in text(view(**timed_out(lagging[0], replace(lagging[1], progress_s=31.0))))


def test_recent_timeout_is_not_settled() -> None:
    fresh = {**TIMED_OUT, "failure_age_s": 0.5}
    ranks = {f"r{number}": rank(number, **fresh) for number in (0, 1, 2, 4, 5)}
    lagging = rank(3, sequence=6, waiting_s=None)
    assert text(view(**ranks, r3=lagging)) == ""
    ranks["r0"] = rank(0, **TIMED_OUT)
    assert text(view(**ranks, r3=lagging)).endswith(WAITED), "the first was long enough ago"


def test_stale_status_of_a_silent_host_is_ignored() -> None:
    """Three hosts have lost one another; the first decides by its own ranks."""
    gone = rank(5, ended_s=0.5, exit_code=-9)
    assert text(view(ages={"h3": LOST}, r5=gone)).startswith("host h3: no messages for 10 s")
    assert text(view(ages={"h3": 30.0}, finished=("h3",), r5=gone)).startswith("host h3 gpu=1 rank 5")


def test_lost_host_is_reported_with_its_running_ranks() -> None:
    result = text(view(ages={"h3": LOST}, r4=rank(4, ended_s=60.0, exit_code=0)))
    assert result.endswith('supervisor; last seen gpu=1 rank 5 in phase "collective all_reduce 8 B"')
    both = {f"r{number}": rank(number, ended_s=60.0, exit_code=0) for number in (4, 5)}
    assert text(view(ages={"h3": LOST}, **both)).endswith("its link, host or supervisor")


def test_absent_hosts_are_named_with_those_that_joined() -> None:
    known = replace(view(hosts=4, ages={"h2": -1, "h4": -1}), began=980.0, timeout_s=1.0)
    assert text(known) == ""
    known = replace(known, began=979.0)
    assert text(known) == "hosts h2, h4: did not join the gang within 20 s; hosts h1, h3 did"


def test_long_host_lists_are_shortened() -> None:
    result = text(view(hosts=23, ages={f"h{number}": LOST for number in range(4, 24)}))
    assert "h22, h23: no messages" in result, "twenty are listed"
    result = text(view(hosts=24, ages={f"h{number}": LOST for number in range(4, 25)}))
    assert "h23 and 1 more: no messages" in result
    hosts = {f"h{number}": LOST for number in range(4, 29)}
    result = text(view(hosts=28, ages=hosts))
    assert result.startswith("hosts h4, h5,")
    assert "h23 and 5 more: no messages" in result
    assert "h24" not in result
    assert len(result) <= 2000


def test_late_finished_host_delays_nothing() -> None:
    known = view(ages={"h2": LATE}, finished=("h2",), r5=rank(5, ended_s=SETTLED, exit_code=1))
    assert text(known).endswith('rank 5 in phase "collective all_reduce 8 B": ended with exit code 1')


@pytest.mark.parametrize(
    ("patience_s", "result"), [(1.0, 20.0), (10.0, 20.0), (25.0, 50.0), (60.0, 120.0), (600.0, 120.0)]
)
def test_join_timeout_is_twice_the_group_timeout_within_bounds(patience_s: float, result: float) -> None:
    assert join_timeout_s(patience_s) == result
    assert result > HOST_SILENT_S


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        (None, "gone without an exit code, as is its guard process"),
        (0, "ended with exit code 0"),
        (1, "ended with exit code 1"),
        (-9, "killed by SIGKILL"),
        (-1, "killed by SIGHUP"),
        (-63, "killed by signal 63"),
    ],
)
def test_exit_code_in_words(code: int | None, expected: str) -> None:
    assert describe_exit(code) == expected


def test_longest_valid_text_is_accepted() -> None:
    longest = replace(rank(3), phase="x" * 512)
    assert parse_rank_state(asdict(longest)) == longest
