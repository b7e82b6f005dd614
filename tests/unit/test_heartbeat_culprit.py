"""Who is named where several could be: one thing is changed from a case in which somebody is, or nobody."""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import Any

import pytest

from agent.gang.culprit import HOST_SILENT_S, START_S, GangSnapshot, describe_exit, find_culprit, join_timeout_s
from agent.gang.rank_state import parse_rank_state
from tests.unit.test_heartbeat import LATE, LOST, SETTLED, SILENT, TIMED_OUT, TIMEOUT_S, rank, timed_out, view

WAITED = "the others waited for it until their time-out of 60 s"


def text(known: GangSnapshot) -> str:
    found = find_culprit(known)
    return found.text if found else ""


def test_the_end_of_one_is_told_although_another_ended_a_moment_ago() -> None:
    known = view(r3=rank(3, ended_s=SETTLED, exit_code=1), r5=rank(5, ended_s=0.1, exit_code=1))
    assert text(known).startswith("host h2 gpu=1 rank 3")


def test_of_two_that_died_in_one_moment_the_first_is_named() -> None:
    known = view(r3=rank(3, ended_s=SETTLED + 0.3, exit_code=-9), r5=rank(5, ended_s=SETTLED, exit_code=-9))
    assert text(known).startswith("host h2 gpu=1 rank 3")


def test_who_fails_at_once_where_a_launcher_is_gone_is_not_to_blame() -> None:
    left = rank(3, ended_s=SETTLED, why="its launcher was killed by SIGKILL")
    known = view(r3=left, r5=rank(5, ended_s=SETTLED + 0.3, exit_code=1, failure="error"))
    assert text(known).endswith('rank 3 in phase "collective all_reduce 8 B": its launcher was killed by SIGKILL')


def test_whose_launcher_was_killed_is_told_before_those_that_ended_by_it() -> None:
    """In one moment, as far as clocks tell, before any rank started."""
    began: dict[str, Any] = {"alive_s": None, "phase": ""}
    killed = rank(3, ended_s=SETTLED, why="its launcher was killed by SIGKILL before any rank started", **began)
    known = view(r3=killed, r5=rank(5, ended_s=SETTLED + 0.3, exit_code=1, why="its launcher ended", **began))
    assert text(known).endswith('rank 3 in phase "start": its launcher was killed by SIGKILL before any rank started')


def test_who_fails_after_a_host_has_ended_its_ranks_has_lost_a_peer() -> None:
    failed = view(r3=rank(3, ended_s=SETTLED, exit_code=1))
    assert text(failed).startswith("host h2 gpu=1 rank 3")
    left = {**failed.statuses, "h1": replace(failed.statuses["h1"], aborted=True)}
    assert text(replace(failed, statuses=left)) == ""


def test_who_was_killed_later_did_not_bring_about_what_failed_before() -> None:
    known = view(r3=rank(3, ended_s=SETTLED + 3, exit_code=1), r5=rank(5, ended_s=SETTLED, exit_code=-9))
    assert text(known).startswith("host h2 gpu=1 rank 3")


def test_a_request_explains_an_end_only_where_nothing_else_does() -> None:
    known = view(r3=rank(3, ended_s=SETTLED, exit_code=1), r5=rank(5, ended_s=SETTLED + 3, exit_code=-15))
    assert text(known).startswith("host h2 gpu=1 rank 3")


def test_an_abort_long_before_the_time_out_is_a_ranks_own() -> None:
    early = rank(3, ended_s=SETTLED, exit_code=-6, waiting_s=5.0)
    assert text(view(r3=early)).endswith("killed by SIGABRT")
    assert text(view(r3=replace(early, waiting_s=TIMEOUT_S))) == ""
    assert text(view(r3=replace(early, waiting_s=None, progress_s=TIMEOUT_S))) == ""
    assert text(view(r3=replace(early, waiting_s=TIMEOUT_S, exit_code=-11))).endswith("killed by SIGSEGV")


def test_a_rank_that_stays_silent_in_its_start_is_absent() -> None:
    start = rank(3, phase="start", silent_s=START_S + 1, alive_s=START_S + 5, grouped=False)
    assert text(view(r3=start)) == 'host h2 gpu=1 rank 3 in phase "start": silent for 60 s during its start'
    assert text(view(r3=replace(start, busy=True))) == ""
    assert text(view(r3=replace(start, silent_s=START_S - 1))) == ""
    assert text(view(r3=replace(start, phase="gemm", busy=True, grouped=True))) == ""


def test_a_rank_that_has_said_nothing_is_in_its_start() -> None:
    found = find_culprit(view(r3=rank(3, alive_s=None, phase=""), r0=rank(0, alive_s=START_S + 1)))
    assert found is not None
    assert (found.kind, found.phase) == ("rank_absent", "start")
    found = find_culprit(view(r3=rank(3, ended_s=SETTLED)))
    assert found is not None
    assert found.phase == "collective all_reduce 8 B"


def test_a_rank_that_never_began_is_absent_only_once_another_has_long_begun() -> None:
    never = rank(3, alive_s=None, phase="")
    others = {f"r{number}": rank(number, alive_s=START_S - 1) for number in (0, 1, 2, 4, 5)}
    assert text(view(r3=never, **others)) == ""
    assert text(view(**{f"r{number}": rank(number, alive_s=None, phase="") for number in range(6)})) == ""


def test_a_silent_rank_counts_for_more_than_an_absent_one() -> None:
    known = view(r3=rank(3, silent_s=SILENT), r4=rank(4, alive_s=None, phase=""), r0=rank(0, alive_s=START_S + 1))
    assert text(known).startswith("host h2 gpu=1 rank 3")


def test_a_silent_rank_is_named_once_any_of_the_others_depends_on_it() -> None:
    known = view(r3=rank(3, silent_s=SILENT), r0=rank(0, grouped=False), r4=rank(4, grouped=False))
    assert text(known).startswith("host h2 gpu=1 rank 3")


def test_of_two_silent_ranks_the_one_that_fell_silent_first_is_named() -> None:
    known = view(r3=rank(3, silent_s=SILENT + 1), r4=rank(4, silent_s=SILENT))
    assert text(known).startswith("host h2 gpu=1 rank 3")


def test_who_failed_together_with_the_time_outs_is_not_to_blame() -> None:
    failed = rank(3, failure="error", failure_age_s=SETTLED + 1)
    assert text(view(**timed_out(failed))) == ""
    assert text(view(**timed_out(replace(failed, failure_age_s=SETTLED + 3)))).endswith(
        f"failed on its own, and {WAITED}"
    )


def test_what_failed_is_as_old_as_its_hosts_last_word() -> None:
    failed = rank(3, failure="error", failure_age_s=1.0)
    known = view(ages={"h2": 20.0}, finished=("h2",), **{**timed_out(failed), "r2": rank(2, ended_s=1.0, exit_code=0)})
    assert text(known).endswith(f"failed on its own, and {WAITED}")


def test_who_failed_after_the_first_time_out_is_not_to_blame() -> None:
    first = replace(rank(0, **TIMED_OUT), failure_age_s=10.0)
    assert text(view(**timed_out(rank(3, failure="error", failure_age_s=5.0), first))) == ""


def test_who_is_as_far_as_any_that_waited_in_vain_does_not_lag() -> None:
    ahead, waiting = replace(rank(0, **TIMED_OUT), sequence=9), rank(2, waiting_s=TIMEOUT_S)
    assert text(view(**timed_out(ahead, waiting, rank(3, sequence=8, waiting_s=None)))) == ""


def test_of_two_that_failed_by_themselves_the_first_is_named() -> None:
    known = view(
        **timed_out(rank(3, failure="error", failure_age_s=50.0), rank(4, failure="error", failure_age_s=40.0))
    )
    assert text(known).startswith("host h2 gpu=1 rank 3")


def test_who_waits_is_not_the_one_that_is_waited_for() -> None:
    working = rank(3, sequence=6, waiting_s=None, progress_s=TIMEOUT_S)
    waiting = rank(2, sequence=6, waiting_s=TIMEOUT_S)
    assert (
        text(view(**timed_out(working, waiting)))
        == f'host h2 gpu=1 rank 3 in phase "{working.phase}": alive, but {WAITED}'
    )
    assert text(view(**timed_out(waiting))) == ""
    assert text(view(**timed_out(replace(working, sequence=7), replace(waiting, sequence=7)))) == ""


def test_of_two_that_lag_the_one_that_did_least_is_named_or_the_one_idle_for_longest() -> None:
    lagging = [rank(number, sequence=6, waiting_s=None, progress_s=30.0) for number in (2, 3)]
    assert "rank 3" in text(view(**timed_out(lagging[0], replace(lagging[1], sequence=5))))
    assert "rank 3" in text(view(**timed_out(lagging[0], replace(lagging[1], progress_s=31.0))))


def test_a_time_out_a_moment_ago_may_not_be_the_last() -> None:
    fresh = {**TIMED_OUT, "failure_age_s": 0.5}
    ranks = {f"r{number}": rank(number, **fresh) for number in (0, 1, 2, 4, 5)}
    lagging = rank(3, sequence=6, waiting_s=None)
    assert text(view(**ranks, r3=lagging)) == ""
    ranks["r0"] = rank(0, **TIMED_OUT)
    assert text(view(**ranks, r3=lagging)).endswith(WAITED), "the first was long enough ago"


def test_what_a_host_said_before_it_fell_silent_is_no_news() -> None:
    """Three hosts have lost one another; the head decides by what it sees itself."""
    gone = rank(5, ended_s=0.5, exit_code=-9)
    assert text(view(ages={"h3": LOST}, r5=gone)).startswith("host h3: no messages for 10 s")
    assert text(view(ages={"h3": 30.0}, finished=("h3",), r5=gone)).startswith("host h3 gpu=1 rank 5")


def test_a_lost_host_is_told_with_the_ranks_that_it_still_had() -> None:
    found = text(view(ages={"h3": LOST}, r4=rank(4, ended_s=60.0, exit_code=0)))
    assert found.endswith('supervisor; last seen gpu=1 rank 5 in phase "collective all_reduce 8 B"')
    both = {f"r{number}": rank(number, ended_s=60.0, exit_code=0) for number in (4, 5)}
    assert text(view(ages={"h3": LOST}, **both)).endswith("its link, host or supervisor")


def test_hosts_that_did_not_come_are_named_with_those_that_did() -> None:
    known = replace(view(hosts=4, ages={"h2": -1, "h4": -1}), began=980.0, timeout_s=1.0)
    assert text(known) == ""
    known = replace(known, began=979.0)
    assert text(known) == "hosts h2, h4: did not join the gang within 20 s; hosts h1, h3 did"


def test_many_hosts_are_counted() -> None:
    found = text(view(hosts=23, ages={f"h{number}": LOST for number in range(4, 24)}))
    assert "h22, h23: no messages" in found, "twenty are told"
    found = text(view(hosts=24, ages={f"h{number}": LOST for number in range(4, 25)}))
    assert "h23 and 1 more: no messages" in found
    hosts = {f"h{number}": LOST for number in range(4, 29)}
    found = text(view(hosts=28, ages=hosts))
    assert found.startswith("hosts h4, h5,")
    assert "h23 and 5 more: no messages" in found
    assert "h24" not in found
    assert len(found) <= 2000


def test_a_late_host_that_finished_holds_nothing_up() -> None:
    known = view(ages={"h2": LATE}, finished=("h2",), r5=rank(5, ended_s=SETTLED, exit_code=1))
    assert text(known).endswith('rank 5 in phase "collective all_reduce 8 B": ended with exit code 1')


@pytest.mark.parametrize(
    ("patience_s", "found"), [(1.0, 20.0), (10.0, 20.0), (25.0, 50.0), (60.0, 120.0), (600.0, 120.0)]
)
def test_a_gang_comes_together_within_twice_its_time_out(patience_s: float, found: float) -> None:
    assert join_timeout_s(patience_s) == found
    assert found > HOST_SILENT_S


@pytest.mark.parametrize(
    ("code", "told"),
    [
        (None, "gone without an exit code, as is its guard process"),
        (0, "ended with exit code 0"),
        (1, "ended with exit code 1"),
        (-9, "killed by SIGKILL"),
        (-1, "killed by SIGHUP"),
        (-63, "killed by signal 63"),
    ],
)
def test_an_end_in_words(code: int | None, told: str) -> None:
    assert describe_exit(code) == told


def test_a_state_is_taken_up_to_its_longest_text() -> None:
    longest = replace(rank(3), phase="x" * 512)
    assert parse_rank_state(asdict(longest)) == longest
