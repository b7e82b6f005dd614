"""Which host or rank is named as the culprit, and when no culprit is named yet.

The watchers are the first two hosts of a gang (the hosts of one launch): h1 and h2. They receive the statuses of all hosts;
the other hosts receive only those of the watchers. A status reports the states of a host's ranks. Each host has two ranks: 0 and
1 are on h1, 2 and 3 on h2, 4 and 5 on h3. A rank is behind if it has started fewer collective operations than the others.
"""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import Any

import pytest

from agent.gang.culprit import (
    HOST_SILENT_S,
    MAX_TEXT,
    RANK_SILENT_S,
    SAME_MOMENT_S,
    SETTLE_S,
    START_S,
    UNSURE_S,
    GangSnapshot,
    describe_exit,
    find_culprit,
    join_timeout_s,
    unable_rank_culprit,
)
from agent.gang.rank_state import parse_rank_state
from tests.gangs import (
    LATE_STATUS_AGE_S,
    LOST_STATUS_AGE_S,
    NOW,
    SETTLED_S,
    SILENT_RANK_S,
    TIMED_OUT_FIELDS,
    TIMEOUT_S,
    gang_snapshot,
    rank_state,
    timed_out_ranks,
)

NO_AGES = dict.fromkeys(("h1", "h2", "h3"), 0.0)
"""Every status has just arrived, so nothing is added to the ages that it reports (such as `ended_s`)."""
H2_SECOND_AGO = {**NO_AGES, "h2": 1.0}
"""The status of h2 arrived one second ago, so one second is added to each age that it reports."""

NO_CULPRIT: dict[str, GangSnapshot] = {
    "all ranks running": gang_snapshot(),
    "a host is late, but not for long enough to count as lost": gang_snapshot(ages={"h2": LATE_STATUS_AGE_S}),
    "a host is lost and another host is late": gang_snapshot(ages={"h2": LOST_STATUS_AGE_S, "h3": LATE_STATUS_AGE_S}),
    "a finished host sends nothing": gang_snapshot(ages={"h2": LOST_STATUS_AGE_S}, finished=("h2",)),
    "a host has not joined yet": replace(gang_snapshot(ages={"h2": -1}), joined_at=NOW - join_timeout_s(TIMEOUT_S) + 1),
    "a rank sends no heartbeats, but not for long enough to count as silent": gang_snapshot(
        r3=rank_state(3, silent_s=RANK_SILENT_S - 1)
    ),
    "a rank sends no heartbeats because one of its threads holds the GIL": gang_snapshot(
        r3=rank_state(3, silent_s=30.0, busy=True)
    ),
    "a rank sends no heartbeats because it imports torch": gang_snapshot(
        r3=rank_state(3, phase="start", silent_s=SILENT_RANK_S, grouped=False)
    ),
    "a silent rank on which no other rank depends": gang_snapshot(
        **{f"r{n}": rank_state(n, grouped=False, silent_s=SILENT_RANK_S if n == 3 else 0.1) for n in range(6)}
    ),
    "a rank compiles for 50 s while the other ranks wait; their time-out is 60 s": gang_snapshot(
        r3=rank_state(3, sequence=6, waiting_s=None, progress_s=50.0),
        **{f"r{n}": rank_state(n, waiting_s=50.0) for n in (0, 1, 2, 4, 5)},
    ),
    "a rank ended a moment ago; another rank may have ended first": gang_snapshot(
        r3=rank_state(3, ended_s=0.5, exit_code=-9)
    ),
    "a rank ended while a host is late": gang_snapshot(
        ages={"h2": LATE_STATUS_AGE_S}, r5=rank_state(5, ended_s=SETTLED_S, exit_code=1)
    ),
    "a rank ended; another rank has sent no heartbeat for 3 s and may be silent": gang_snapshot(
        r3=rank_state(3, silent_s=3.0), r5=rank_state(5, ended_s=SETTLED_S, exit_code=1)
    ),
    "a rank ended with exit code 0": gang_snapshot(r3=rank_state(3, ended_s=60.0, exit_code=0)),
    "a rank was ended by its launcher": gang_snapshot(
        r3=rank_state(3, ended_s=SETTLED_S, exit_code=-15, terminated_by_launcher=True)
    ),
    "all ranks timed out": gang_snapshot(**{f"r{n}": rank_state(n, **TIMED_OUT_FIELDS) for n in range(6)}),
    "all ranks failed at the same time": gang_snapshot(
        **{f"r{n}": rank_state(n, failure="error", failure_age_s=5.0) for n in range(6)}
    ),
    "a rank failed and the other ranks still wait": gang_snapshot(r3=rank_state(3, failure="error", failure_age_s=5.0)),
    "a rank ended just before its status was sent": gang_snapshot(
        ages=H2_SECOND_AGO, r3=rank_state(3, ended_s=0.0, exit_code=1)
    ),
    "a rank timed out just before its status was sent": gang_snapshot(
        ages=H2_SECOND_AGO,
        r2=rank_state(2, **{**TIMED_OUT_FIELDS, "failure_age_s": 0.0}),
        r3=rank_state(3, sequence=6, waiting_s=None),
    ),
    "a silent rank whose heartbeats name no phase, so it counts as starting": gang_snapshot(
        r3=rank_state(3, phase="", silent_s=SILENT_RANK_S)
    ),
    "the other ranks timed out, but the rank behind has ended with exit code 0": gang_snapshot(
        **timed_out_ranks(rank_state(3, sequence=2, waiting_s=None, ended_s=SETTLED_S, exit_code=0))
    ),
    "a rank without a heartbeat for exactly RANK_SILENT_S": gang_snapshot(r3=rank_state(3, silent_s=RANK_SILENT_S)),
    "a rank without a heartbeat for exactly START_S during its start": gang_snapshot(
        r3=rank_state(3, phase="start", silent_s=START_S, grouped=False)
    ),
    "a rank did not start, and another rank started exactly START_S ago": gang_snapshot(
        r3=rank_state(3, alive_s=None, phase=""), r0=rank_state(0, alive_s=START_S)
    ),
    "a rank failed, and the other ranks timed out exactly SETTLE_S later": gang_snapshot(
        ages=NO_AGES,
        **{
            **{f"r{n}": rank_state(n, **{**TIMED_OUT_FIELDS, "failure_age_s": 3.0}) for n in range(6)},
            "r3": rank_state(3, failure="error", failure_age_s=3.0 + SETTLE_S),
        },
    ),
}


@pytest.mark.parametrize("snapshot", NO_CULPRIT.values(), ids=NO_CULPRIT.keys())
def test_no_culprit_is_named(snapshot: GangSnapshot) -> None:
    assert find_culprit(snapshot) is None


RANK_3 = 'gpu=1 rank 3 in phase "collective all_reduce 8 B"'
NO_INTERFACE = "RuntimeError: Unable to find interface bond0"
CULPRITS: dict[str, tuple[GangSnapshot, str, tuple[str, ...], str]] = {
    "a rank that raised an exception while joining": (
        gang_snapshot(r3=rank_state(3, ended_s=SETTLED_S, exit_code=1, phase="join", exception=NO_INTERFACE)),
        "rank_raised",
        ("h2",),
        f'host h2 rank 3 in phase "join": {NO_INTERFACE}',
    ),
    "a rank behind when another rank was aborted after 80 % of the time-out": (
        gang_snapshot(
            r3=rank_state(3, sequence=6, waiting_s=None),
            r4=rank_state(4, waiting_s=0.8 * TIMEOUT_S, ended_s=SETTLED_S, exit_code=-6),
        ),
        "rank_behind",
        ("h2",),
        f"host h2 {RANK_3}: alive, but",
    ),
    "a rank behind when another rank timed out SETTLE_S ago": (
        gang_snapshot(
            ages=NO_AGES,
            r2=rank_state(2, **{**TIMED_OUT_FIELDS, "failure_age_s": SETTLE_S}),
            r3=rank_state(3, sequence=6, waiting_s=None),
        ),
        "rank_behind",
        ("h2",),
        f"host h2 {RANK_3}: alive, but",
    ),
    "a rank that ended SETTLE_S ago": (
        gang_snapshot(ages=NO_AGES, r3=rank_state(3, ended_s=SETTLE_S, exit_code=1)),
        "rank_ended",
        ("h2",),
        f"host h2 {RANK_3}: ended with exit code 1",
    ),
    "a rank that ended; its last heartbeat is old": (
        gang_snapshot(r3=rank_state(3, ended_s=SETTLED_S, exit_code=1, silent_s=SILENT_RANK_S)),
        "rank_ended",
        ("h2",),
        f"host h2 {RANK_3}: ended with exit code 1",
    ),
    "a rank that ended; the last heartbeat of another rank is UNSURE_S old": (
        gang_snapshot(r3=rank_state(3, ended_s=SETTLED_S, exit_code=1), r5=rank_state(5, silent_s=UNSURE_S)),
        "rank_ended",
        ("h2",),
        f"host h2 {RANK_3}: ended with exit code 1",
    ),
    "a killed rank; SAME_MOMENT_S earlier, another rank ended with exit code 1": (
        gang_snapshot(
            ages=NO_AGES,
            r3=rank_state(3, ended_s=3.0, exit_code=-9),
            r5=rank_state(5, ended_s=3.0 + SAME_MOMENT_S, exit_code=1),
        ),
        "rank_ended",
        ("h2",),
        f"host h2 {RANK_3}: killed by SIGKILL",
    ),
    "a rank silent during its start": (
        gang_snapshot(r3=rank_state(3, phase="start", silent_s=START_S + 1, grouped=False)),
        "rank_absent",
        ("h2",),
        'host h2 gpu=1 rank 3 in phase "start": silent for 60 s during its start',
    ),
    "the same exception on every host": (
        gang_snapshot(
            **{
                f"r{n}": rank_state(
                    n, ended_s=SETTLED_S + n / 10, exit_code=1, phase="join", exception=f"{NO_INTERFACE} (rank {n})"
                )
                for n in range(6)
            }
        ),
        "rank_raised",
        ("h1", "h2", "h3"),
        f'host h3 rank 5 in phase "join": {NO_INTERFACE} (rank 5) (and on 2 more hosts)',
    ),
    "a killed rank; another rank raised an exception at the same moment": (
        gang_snapshot(
            r3=rank_state(3, ended_s=SETTLED_S, exit_code=-11),
            r0=rank_state(
                0, ended_s=SETTLED_S + 0.1, exit_code=1, phase="join", exception="RuntimeError: Connection closed"
            ),
        ),
        "rank_ended",
        ("h2",),
        f"host h2 {RANK_3}: killed by SIGSEGV",
    ),
    "a lost host": (
        gang_snapshot(ages={"h3": LOST_STATUS_AGE_S}),
        "host_silent",
        ("h3",),
        "host h3: no messages for 10 s; check its link, host and supervisor; last seen gpu=0 rank 4 in phase "
        '"collective all_reduce 8 B"; gpu=1 rank 5 in phase "collective all_reduce 8 B"',
    ),
    "two lost hosts": (
        gang_snapshot(hosts=4, ages={"h3": LOST_STATUS_AGE_S, "h4": LOST_STATUS_AGE_S}),
        "host_silent",
        ("h3", "h4"),
        "hosts h3, h4: no messages for 10 s; check their link, host and supervisor; last seen gpu=0 rank 4",
    ),
    "the two hosts of a gang lost each other": (
        gang_snapshot(hosts=2, ages={"h2": LOST_STATUS_AGE_S}),
        "host_silent",
        ("h1", "h2"),
        "hosts h1 and h2: no messages between them for 10 s; check the link, both hosts, and their supervisors",
    ),
    "the first host lost all others": (
        gang_snapshot(ages={"h2": LOST_STATUS_AGE_S, "h3": LOST_STATUS_AGE_S}),
        "cut_off",
        ("h1",),
        "host h1: no messages from any other host for 10 s; check its link first, then the other hosts and their links",
    ),
    "a host lost both watchers, the only hosts that send to it": (
        gang_snapshot(me="h3", hosts=5, ages={"h1": LOST_STATUS_AGE_S, "h2": LOST_STATUS_AGE_S}),
        "cut_off",
        ("h1", "h2"),
        "hosts h1, h2: no messages for 10 s; check their links, hosts and supervisors; if only one host reports this, "
        "check the link of that host",
    ),
    "the third of three hosts lost both watchers": (
        gang_snapshot(me="h3", ages={"h1": LOST_STATUS_AGE_S, "h2": LOST_STATUS_AGE_S}),
        "cut_off",
        ("h1", "h2"),
        "hosts h1, h2: no messages for 10 s",
    ),
    "the second host lost the first": (
        gang_snapshot(me="h2", ages={"h1": LOST_STATUS_AGE_S}),
        "host_silent",
        ("h1",),
        "host h1: no messages for 10 s",
    ),
    "a host did not join": (
        gang_snapshot(ages={"h2": -1}),
        "host_absent",
        ("h2",),
        "host h2: did not join the gang within 120 s; hosts h1, h3 did",
    ),
    "a stopped rank": (
        gang_snapshot(r3=rank_state(3, silent_s=SILENT_RANK_S, stopped=True)),
        "rank_silent",
        ("h2",),
        f"host h2 {RANK_3}: silent for 8 s: its process is stopped",
    ),
    "a rank stopped during its start": (
        gang_snapshot(r3=rank_state(3, silent_s=SILENT_RANK_S, stopped=True, phase="start", grouped=False)),
        "rank_silent",
        ("h2",),
        'host h2 gpu=1 rank 3 in phase "start": silent for 8 s: its process is stopped',
    ),
    "a frozen rank": (
        gang_snapshot(r3=rank_state(3, silent_s=SILENT_RANK_S)),
        "rank_silent",
        ("h2",),
        f"host h2 {RANK_3}: silent for 8 s: its process is frozen, or gets no CPU time",
    ),
    "a silent rank; the other ranks did not depend on it and have ended": (
        gang_snapshot(
            **{
                f"r{n}": rank_state(n, grouped=False, silent_s=SILENT_RANK_S)
                if n == 3
                else rank_state(n, grouped=False, ended_s=20.0, exit_code=0)
                for n in range(6)
            }
        ),
        "rank_silent",
        ("h2",),
        f"host h2 {RANK_3}: silent for 8 s",
    ),
    "a rank did not start": (
        gang_snapshot(r3=rank_state(3, alive_s=None, phase=""), r0=rank_state(0, alive_s=START_S + 1)),
        "rank_absent",
        ("h2",),
        'host h2 gpu=1 rank 3 in phase "start": did not start within 60 s',
    ),
    "a killed rank": (
        gang_snapshot(r3=rank_state(3, ended_s=SETTLED_S, exit_code=-9)),
        "rank_ended",
        ("h2",),
        f"host h2 {RANK_3}: killed by SIGKILL",
    ),
    "a killed rank; other ranks aborted or failed at the same moment": (
        gang_snapshot(
            r3=rank_state(3, ended_s=SETTLED_S, exit_code=-9),
            r2=rank_state(2, ended_s=SETTLED_S, exit_code=-15, terminated_by_launcher=True),
            r0=rank_state(0, ended_s=SETTLED_S + 0.2, exit_code=-6),
            r5=rank_state(5, ended_s=SETTLED_S + 0.1, exit_code=1),
        ),
        "rank_ended",
        ("h2",),
        f"host h2 {RANK_3}: killed by SIGKILL",
    ),
    "a failed rank; another rank aborted later": (
        gang_snapshot(
            r3=rank_state(3, ended_s=SETTLED_S + 3, exit_code=1), r5=rank_state(5, ended_s=SETTLED_S, exit_code=-6)
        ),
        "rank_ended",
        ("h2",),
        f"host h2 {RANK_3}: ended with exit code 1",
    ),
    "two ranks with equal `ended_s`; the rank in the older status ended first": (
        gang_snapshot(
            ages={"h2": 1.0},
            r3=rank_state(3, ended_s=SETTLED_S, exit_code=1),
            r5=rank_state(5, ended_s=SETTLED_S, exit_code=1),
        ),
        "rank_ended",
        ("h2",),
        f"host h2 {RANK_3}: ended with exit code 1",
    ),
    "a rank that ended together with its guard": (
        gang_snapshot(r3=rank_state(3, ended_s=SETTLED_S)),
        "rank_ended",
        ("h2",),
        f"host h2 {RANK_3}: ended with an unknown exit code: its guard, the process that reports the code, ended too",
    ),
    "a rank ended by SIGTERM, but not by its launcher": (
        gang_snapshot(r3=rank_state(3, ended_s=SETTLED_S, exit_code=-15)),
        "rank_ended",
        ("h2",),
        f"host h2 {RANK_3}: killed by SIGTERM",
    ),
    "a rank behind at the time-out": (
        gang_snapshot(**timed_out_ranks(rank_state(3, sequence=6, waiting_s=None, progress_s=TIMEOUT_S))),
        "rank_behind",
        ("h2",),
        f"host h2 {RANK_3}: alive, but the others waited for it until their time-out of 60 s",
    ),
    "the only rank that has not timed out": (
        gang_snapshot(**timed_out_ranks(rank_state(3, waiting_s=None, progress_s=TIMEOUT_S))),
        "rank_behind",
        ("h2",),
        f"host h2 {RANK_3}: alive, but",
    ),
    "a rank behind when NCCL's watchdog aborted the other ranks": (
        gang_snapshot(
            r3=rank_state(3, sequence=6, waiting_s=None, progress_s=TIMEOUT_S),
            **{f"r{n}": rank_state(n, waiting_s=TIMEOUT_S, ended_s=SETTLED_S, exit_code=-6) for n in (0, 1, 2, 4, 5)},
        ),
        "rank_behind",
        ("h2",),
        f"host h2 {RANK_3}: alive, but",
    ),
    "a rank failed on its own long before the time-out": (
        gang_snapshot(**timed_out_ranks(rank_state(3, failure="error", failure_age_s=TIMEOUT_S))),
        "rank_behind",
        ("h2",),
        f"host h2 {RANK_3}: failed before the others, and the others waited",
    ),
}


@pytest.mark.parametrize(("snapshot", "kind", "hosts", "text"), CULPRITS.values(), ids=CULPRITS.keys())
def test_culprit_is_named(snapshot: GangSnapshot, kind: str, hosts: tuple[str, ...], text: str) -> None:
    culprit = find_culprit(snapshot)
    assert culprit is not None
    assert (culprit.kind, culprit.hosts) == (kind, hosts)
    assert culprit.text.startswith(text)
    if kind == "rank_raised":
        assert culprit.scope == "", "an exception must not be attributed to a device"
    elif kind.startswith("rank"):
        assert (culprit.rank, culprit.scope) == (3, "gpu=1")


@pytest.mark.parametrize(
    "invalid_field",
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
def test_invalid_rank_state_is_refused(invalid_field: dict[str, Any]) -> None:
    valid = asdict(rank_state(3))
    assert parse_rank_state(valid) == rank_state(3)
    with pytest.raises(ValueError, match="not a rank state"):
        parse_rank_state({**valid, **invalid_field})


@pytest.mark.parametrize(
    ("exceptions", "phase", "hosts", "text"),
    [
        ({3: "OSError: disk full"}, "", ("h2",), 'host h2 rank 3 in phase "start": OSError: disk full'),
        (
            {3: "no device ib0", 5: "no device ib"},
            "join",
            ("h2", "h3"),
            'host h2 rank 3 in phase "join": no device ib0 (and on 1 more host)',
        ),
        (
            {1: "port 29500 in use", 3: "port 4711 in use", 5: "port 1 in use"},
            "join",
            ("h1", "h2", "h3"),
            'host h1 rank 1 in phase "join": port 29500 in use (and on 2 more hosts)',
        ),
        (
            {3: "no device ib0", 5: "Connection closed by peer"},
            "join",
            ("h2",),
            'host h2 rank 3 in phase "join": no device ib0',
        ),
    ],
)
def test_exception_is_named_with_the_hosts_that_share_it(
    exceptions: dict[int, str], phase: str, hosts: tuple[str, ...], text: str
) -> None:
    """Of the ranks with an exception, the one with the lowest number ended first. Digits in exceptions are not compared."""
    ranks = {
        f"r{number}": rank_state(
            number, ended_s=SETTLED_S - number / 10 + 1, exit_code=1, phase=phase, exception=exception
        )
        for number, exception in exceptions.items()
    }
    culprit = find_culprit(gang_snapshot(**ranks))
    assert culprit is not None
    assert (culprit.kind, culprit.hosts, culprit.text) == ("rank_raised", hosts, text)
    assert culprit.phase == (phase or "start")


def test_rank_with_a_known_reason_takes_precedence_over_an_exception_at_the_same_moment() -> None:
    """A rank that ends closes its connections. Another rank can then raise an exception, and appear to end first."""
    closed = rank_state(1, ended_s=SETTLED_S + 0.1, exit_code=1, phase="join", exception="Connection closed by peer")
    limited = rank_state(3, ended_s=SETTLED_S, exit_code=-6, why="a limit", exception="killed by SIGABRT: a limit")
    culprit = find_culprit(gang_snapshot(ages=NO_AGES, r1=closed, r3=limited))
    assert culprit is not None
    assert (culprit.kind, culprit.hosts) == ("rank_raised", ("h2",))


@pytest.mark.parametrize(
    "fields",
    [
        {"ended_s": SETTLED_S, "exit_code": -6},
        {"silent_s": SILENT_RANK_S},
        {"silent_s": START_S + 1, "phase": "start"},
        {"alive_s": None, "phase": ""},
        {"sequence": 6, "waiting_s": None},
    ],
    ids=["ended", "silent", "silent during its start", "absent", "behind"],
)
def test_rank_with_an_exception_is_named_without_its_device(fields: dict[str, Any]) -> None:
    """The field `exception` names a cause that is not a device."""
    late = "sequence" in fields
    state = rank_state(3, exception="a control group reached its limit", **fields)
    alive = {"r0": rank_state(0, alive_s=START_S + 1)}
    culprit = find_culprit(gang_snapshot(**(timed_out_ranks(state) if late else {**alive, "r3": state})))
    assert culprit is not None
    assert (culprit.kind, culprit.hosts, culprit.scope) == ("rank_raised", ("h2",), "")
    assert culprit.text.startswith("host h2 rank 3 in phase ")
    assert culprit.text.endswith(": a control group reached its limit")


@pytest.mark.parametrize(
    ("more", "others"),
    [
        (0, ""),
        (1, "; 1 more rank of this host cannot either"),
        (2, "; 2 more ranks of this host cannot either"),
    ],
)
def test_rank_that_cannot_take_part_is_named_with_the_number_of_other_such_ranks(more: int, others: str) -> None:
    culprit = unable_rank_culprit("h2", rank_state(3), "no memory", more)
    assert (culprit.kind, culprit.hosts) == ("rank_unable", ("h2",))
    assert (culprit.rank, culprit.scope, culprit.phase) == (3, "gpu=1", "readiness check")
    assert culprit.text == f'host h2 gpu=1 rank 3 in phase "readiness check": cannot take part: no memory{others}'


@pytest.mark.parametrize("excess", [0, 1])
def test_text_is_shortened_to_its_maximum_length(excess: int) -> None:
    prefix = 'host h2 gpu=1 rank 3 in phase "readiness check": cannot take part: '
    why = "x" * (MAX_TEXT - len(prefix) + excess)
    text = unable_rank_culprit("h2", rank_state(3), why, 0).text
    assert text == (f"{prefix}{why}"[: MAX_TEXT - 1] + "…" if excess else f"{prefix}{why}")


# ---- edge cases ----

WAITED = "the others waited for it until their time-out of 60 s"


def culprit_text(snapshot: GangSnapshot) -> str:
    culprit = find_culprit(snapshot)
    return culprit.text if culprit else ""


def test_rank_that_ended_long_enough_ago_is_named_although_another_ended_recently() -> None:
    snapshot = gang_snapshot(
        r3=rank_state(3, ended_s=SETTLED_S, exit_code=1), r5=rank_state(5, ended_s=0.1, exit_code=1)
    )
    assert culprit_text(snapshot).startswith("host h2 gpu=1 rank 3")


def test_earlier_of_two_kills_is_named() -> None:
    snapshot = gang_snapshot(
        r3=rank_state(3, ended_s=SETTLED_S + 0.3, exit_code=-9), r5=rank_state(5, ended_s=SETTLED_S, exit_code=-9)
    )
    assert culprit_text(snapshot).startswith("host h2 gpu=1 rank 3")


def test_killed_launcher_takes_precedence_over_a_rank_that_failed_at_the_same_moment() -> None:
    launcher_killed = rank_state(3, ended_s=SETTLED_S, why="its launcher was killed by SIGKILL")
    snapshot = gang_snapshot(
        r3=launcher_killed, r5=rank_state(5, ended_s=SETTLED_S + 0.3, exit_code=1, failure="error")
    )
    assert culprit_text(snapshot).endswith(
        'rank 3 in phase "collective all_reduce 8 B": its launcher was killed by SIGKILL'
    )


def test_killed_launcher_takes_precedence_over_a_launcher_that_ended_at_the_same_moment() -> None:
    """Both launchers ended before any rank started."""
    not_started: dict[str, Any] = {"alive_s": None, "phase": ""}
    killed = rank_state(
        3, ended_s=SETTLED_S, why="its launcher was killed by SIGKILL before any rank started", **not_started
    )
    snapshot = gang_snapshot(
        r3=killed, r5=rank_state(5, ended_s=SETTLED_S + 0.3, exit_code=1, why="its launcher ended", **not_started)
    )
    assert culprit_text(snapshot).endswith(
        'rank 3 in phase "start": its launcher was killed by SIGKILL before any rank started'
    )


def test_failed_rank_is_no_culprit_if_another_host_ended_its_own_ranks() -> None:
    failed = gang_snapshot(r3=rank_state(3, ended_s=SETTLED_S, exit_code=1))
    assert culprit_text(failed).startswith("host h2 gpu=1 rank 3")
    statuses = {**failed.statuses, "h1": replace(failed.statuses["h1"], aborted=True)}
    assert culprit_text(replace(failed, statuses=statuses)) == ""


def test_later_kill_does_not_explain_an_earlier_failure() -> None:
    snapshot = gang_snapshot(
        r3=rank_state(3, ended_s=SETTLED_S + 3, exit_code=1), r5=rank_state(5, ended_s=SETTLED_S, exit_code=-9)
    )
    assert culprit_text(snapshot).startswith("host h2 gpu=1 rank 3")


def test_failed_rank_takes_precedence_over_a_rank_that_sigterm_ended_earlier() -> None:
    snapshot = gang_snapshot(
        r3=rank_state(3, ended_s=SETTLED_S, exit_code=1), r5=rank_state(5, ended_s=SETTLED_S + 3, exit_code=-15)
    )
    assert culprit_text(snapshot).startswith("host h2 gpu=1 rank 3")


def test_abort_before_the_time_out_is_a_failure_of_the_aborted_rank() -> None:
    early = rank_state(3, ended_s=SETTLED_S, exit_code=-6, waiting_s=5.0)
    assert culprit_text(gang_snapshot(r3=early)).endswith("killed by SIGABRT")
    assert culprit_text(gang_snapshot(r3=replace(early, waiting_s=TIMEOUT_S))) == ""
    assert culprit_text(gang_snapshot(r3=replace(early, waiting_s=None, progress_s=TIMEOUT_S))) == ""
    assert culprit_text(gang_snapshot(r3=replace(early, waiting_s=TIMEOUT_S, exit_code=-11))).endswith(
        "killed by SIGSEGV"
    )


def test_rank_that_is_silent_too_long_during_its_start_is_named() -> None:
    start = rank_state(3, phase="start", silent_s=START_S + 1, alive_s=START_S + 5, grouped=False)
    assert (
        culprit_text(gang_snapshot(r3=start))
        == 'host h2 gpu=1 rank 3 in phase "start": silent for 60 s during its start'
    )
    assert culprit_text(gang_snapshot(r3=replace(start, busy=True))) == ""
    assert culprit_text(gang_snapshot(r3=replace(start, silent_s=START_S - 1))) == ""
    assert culprit_text(gang_snapshot(r3=replace(start, phase="gemm", busy=True, grouped=True))) == ""


def test_phase_of_a_rank_without_heartbeats_is_start() -> None:
    culprit = find_culprit(
        gang_snapshot(r3=rank_state(3, alive_s=None, phase=""), r0=rank_state(0, alive_s=START_S + 1))
    )
    assert culprit is not None
    assert (culprit.kind, culprit.phase) == ("rank_absent", "start")
    culprit = find_culprit(gang_snapshot(r3=rank_state(3, ended_s=SETTLED_S)))
    assert culprit is not None
    assert culprit.phase == "collective all_reduce 8 B"


def test_unstarted_rank_is_not_named_until_another_rank_has_run_long_enough() -> None:
    not_started = rank_state(3, alive_s=None, phase="")
    others = {f"r{number}": rank_state(number, alive_s=START_S - 1) for number in (0, 1, 2, 4, 5)}
    assert culprit_text(gang_snapshot(r3=not_started, **others)) == ""
    assert (
        culprit_text(gang_snapshot(**{f"r{number}": rank_state(number, alive_s=None, phase="") for number in range(6)}))
        == ""
    )


def test_silent_rank_takes_precedence_over_a_rank_that_did_not_start() -> None:
    snapshot = gang_snapshot(
        r3=rank_state(3, silent_s=SILENT_RANK_S),
        r4=rank_state(4, alive_s=None, phase=""),
        r0=rank_state(0, alive_s=START_S + 1),
    )
    assert culprit_text(snapshot).startswith("host h2 gpu=1 rank 3")


def test_silent_rank_is_named_if_another_rank_depends_on_it() -> None:
    snapshot = gang_snapshot(
        r3=rank_state(3, silent_s=SILENT_RANK_S), r0=rank_state(0, grouped=False), r4=rank_state(4, grouped=False)
    )
    assert culprit_text(snapshot).startswith("host h2 gpu=1 rank 3")


def test_first_of_two_silent_ranks_is_named() -> None:
    snapshot = gang_snapshot(r3=rank_state(3, silent_s=SILENT_RANK_S + 1), r4=rank_state(4, silent_s=SILENT_RANK_S))
    assert culprit_text(snapshot).startswith("host h2 gpu=1 rank 3")


def test_failure_just_before_the_timeouts_is_not_named() -> None:
    failed = rank_state(3, failure="error", failure_age_s=SETTLED_S + 1)
    assert culprit_text(gang_snapshot(**timed_out_ranks(failed))) == ""
    assert culprit_text(gang_snapshot(**timed_out_ranks(replace(failed, failure_age_s=SETTLED_S + 3)))).endswith(
        f"failed before the others, and {WAITED}"
    )


def test_age_of_the_status_is_added_to_the_age_of_a_failure() -> None:
    failed = rank_state(3, failure="error", failure_age_s=1.0)
    snapshot = gang_snapshot(
        ages={"h2": 20.0},
        finished=("h2",),
        **{**timed_out_ranks(failed), "r2": rank_state(2, ended_s=1.0, exit_code=0)},
    )
    assert culprit_text(snapshot).endswith(f"failed before the others, and {WAITED}")


def test_failure_after_the_first_timeout_is_not_named() -> None:
    first = replace(rank_state(0, **TIMED_OUT_FIELDS), failure_age_s=10.0)
    assert (
        culprit_text(gang_snapshot(**timed_out_ranks(rank_state(3, failure="error", failure_age_s=5.0), first))) == ""
    )


def test_rank_behind_only_one_of_the_timed_out_ranks_is_not_named() -> None:
    """Rank 0 has started 9 collective operations, rank 3 has started 8, and all other ranks have started 7."""
    ahead, waiting = replace(rank_state(0, **TIMED_OUT_FIELDS), sequence=9), rank_state(2, waiting_s=TIMEOUT_S)
    assert (
        culprit_text(gang_snapshot(**timed_out_ranks(ahead, waiting, rank_state(3, sequence=8, waiting_s=None)))) == ""
    )


def test_first_of_two_failures_is_named() -> None:
    snapshot = gang_snapshot(
        **timed_out_ranks(
            rank_state(3, failure="error", failure_age_s=50.0), rank_state(4, failure="error", failure_age_s=40.0)
        )
    )
    assert culprit_text(snapshot).startswith("host h2 gpu=1 rank 3")


def test_waiting_rank_is_not_the_culprit() -> None:
    working = rank_state(3, sequence=6, waiting_s=None, progress_s=TIMEOUT_S)
    waiting = rank_state(2, sequence=6, waiting_s=TIMEOUT_S)
    assert (
        culprit_text(gang_snapshot(**timed_out_ranks(working, waiting)))
        == f'host h2 gpu=1 rank 3 in phase "{working.phase}": alive, but {WAITED}'
    )
    assert culprit_text(gang_snapshot(**timed_out_ranks(waiting))) == ""
    assert (
        culprit_text(gang_snapshot(**timed_out_ranks(replace(working, sequence=7), replace(waiting, sequence=7)))) == ""
    )


def test_rank_furthest_behind_is_named() -> None:
    """If two ranks are equally far behind, the rank with the longer time without progress is named."""
    lagging = [rank_state(number, sequence=6, waiting_s=None, progress_s=30.0) for number in (2, 3)]
    assert "rank 3" in culprit_text(gang_snapshot(**timed_out_ranks(lagging[0], replace(lagging[1], sequence=5))))
    assert "rank 3" in culprit_text(gang_snapshot(**timed_out_ranks(lagging[0], replace(lagging[1], progress_s=31.0))))


def test_rank_behind_is_not_named_before_one_timeout_is_old_enough() -> None:
    fresh = {**TIMED_OUT_FIELDS, "failure_age_s": 0.5}
    ranks = {f"r{number}": rank_state(number, **fresh) for number in (0, 1, 2, 4, 5)}
    lagging = rank_state(3, sequence=6, waiting_s=None)
    assert culprit_text(gang_snapshot(**ranks, r3=lagging)) == ""
    ranks["r0"] = rank_state(0, **TIMED_OUT_FIELDS)
    assert culprit_text(gang_snapshot(**ranks, r3=lagging)).endswith(WAITED), (
        "one time-out that is old enough must suffice"
    )


def test_last_status_of_a_lost_host_is_ignored() -> None:
    """The last status of a finished host is not ignored."""
    ended = rank_state(5, ended_s=0.5, exit_code=-9)
    assert culprit_text(gang_snapshot(ages={"h3": LOST_STATUS_AGE_S}, r5=ended)).startswith(
        "host h3: no messages for 10 s"
    )
    assert culprit_text(gang_snapshot(ages={"h3": 30.0}, finished=("h3",), r5=ended)).startswith("host h3 gpu=1 rank 5")


def test_lost_host_is_reported_with_its_running_ranks() -> None:
    text = culprit_text(gang_snapshot(ages={"h3": LOST_STATUS_AGE_S}, r4=rank_state(4, ended_s=60.0, exit_code=0)))
    assert text.endswith('supervisor; last seen gpu=1 rank 5 in phase "collective all_reduce 8 B"')
    all_ended = {f"r{number}": rank_state(number, ended_s=60.0, exit_code=0) for number in (4, 5)}
    assert culprit_text(gang_snapshot(ages={"h3": LOST_STATUS_AGE_S}, **all_ended)).endswith(
        "its link, host and supervisor"
    )


def test_rank_that_did_not_start_is_named_although_a_rank_on_which_no_other_depends_is_silent() -> None:
    ranks = {f"r{n}": rank_state(n, grouped=False, alive_s=START_S + 1) for n in range(6)}
    ranks["r3"] = replace(ranks["r3"], silent_s=SILENT_RANK_S)
    assert culprit_text(gang_snapshot(**ranks)) == ""
    ranks["r4"] = replace(ranks["r4"], alive_s=None, phase="")
    assert "rank 4" in culprit_text(gang_snapshot(**ranks))


def test_absent_hosts_are_named_with_those_that_joined() -> None:
    snapshot = replace(gang_snapshot(hosts=4, ages={"h2": -1, "h4": -1}), joined_at=980.0, timeout_s=1.0)
    assert culprit_text(snapshot) == ""
    snapshot = replace(snapshot, joined_at=979.0)
    assert culprit_text(snapshot) == "hosts h2, h4: did not join the gang within 20 s; hosts h1, h3 did"


def test_third_host_names_only_itself_and_the_watchers() -> None:
    """h3 receives statuses only from the watchers h1 and h2. It does not know whether h4 joined."""
    snapshot = replace(gang_snapshot(hosts=4, ages={"h2": -1, "h4": -1}), joined_at=979.0, timeout_s=1.0)
    snapshot = replace(snapshot, me="h3", awaited=("h1", "h2"))
    assert culprit_text(snapshot) == "host h2: did not join the gang within 20 s; hosts h1, h3 did"


def test_long_host_lists_are_shortened() -> None:
    text = culprit_text(gang_snapshot(hosts=23, ages={f"h{number}": LOST_STATUS_AGE_S for number in range(4, 24)}))
    assert "h22, h23: no messages" in text, "up to twenty hosts must be listed"
    text = culprit_text(gang_snapshot(hosts=24, ages={f"h{number}": LOST_STATUS_AGE_S for number in range(4, 25)}))
    assert "h23 and 1 more: no messages" in text
    hosts = {f"h{number}": LOST_STATUS_AGE_S for number in range(4, 29)}
    text = culprit_text(gang_snapshot(hosts=28, ages=hosts))
    assert text.startswith("hosts h4, h5,")
    assert "h23 and 5 more: no messages" in text
    assert "h24" not in text
    assert len(text) <= 2000


def test_old_status_of_a_finished_host_delays_no_verdict() -> None:
    snapshot = gang_snapshot(
        ages={"h2": LATE_STATUS_AGE_S}, finished=("h2",), r5=rank_state(5, ended_s=SETTLED_S, exit_code=1)
    )
    assert culprit_text(snapshot).endswith('rank 5 in phase "collective all_reduce 8 B": ended with exit code 1')


@pytest.mark.parametrize(
    ("timeout_s", "expected_s"), [(1.0, 20.0), (10.0, 20.0), (25.0, 50.0), (60.0, 120.0), (600.0, 120.0)]
)
def test_join_timeout_is_twice_the_process_group_timeout_within_bounds(timeout_s: float, expected_s: float) -> None:
    assert join_timeout_s(timeout_s) == expected_s
    assert expected_s > HOST_SILENT_S


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        (None, "ended with an unknown exit code: its guard, the process that reports the code, ended too"),
        (0, "ended with exit code 0"),
        (1, "ended with exit code 1"),
        (-9, "killed by SIGKILL"),
        (-1, "killed by SIGHUP"),
        (-63, "killed by signal 63"),
    ],
)
def test_exit_code_is_described_in_words(code: int | None, expected: str) -> None:
    assert describe_exit(code) == expected


def test_rank_state_with_a_text_of_the_maximum_length_is_accepted() -> None:
    longest = replace(rank_state(3), phase="x" * 512)
    assert parse_rank_state(asdict(longest)) == longest
