"""Test boundary cases of the diagnosis: which verdicts a cause explains, and how causes are joined, ordered and named.

The list of problems (`PROBLEMS` of fleet/diagnosis) has the faults that the diagnosis can name, each before its effects.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from fleet.diagnosis.diagnose import diagnose
from fleet.judge.link_faults import FOLLOWS_HOST, FOLLOWS_PART
from fleet.judge.localization.gang_pairs import LINK_PARAM
from fleet.judge.required_ports import PARTNER_PARAM
from schemas.reports import FAIL, INCONCLUSIVE, PASS, Cause, Verdict, VerdictKind
from tests.unit.fleet.diagnosis.test_diagnose import GANGS, WAIVER, failed, missing, summary

SLOW: dict[str, Any] = {"value": 8.0, "limit": 10.0, "operator": "ge", "unit": "FLOP/s"}


def causes(*verdicts: Verdict) -> list[Cause]:
    """Return the causes of the verdicts; check that every verdict other than a pass has exactly one cause."""
    result = list(diagnose(verdicts, GANGS))
    explained = sorted(position for cause in result for position in cause.verdicts)
    assert explained == [at for at, item in enumerate(verdicts) if item.verdict != PASS], (
        "each verdict other than a pass must have exactly one cause"
    )
    return result


def summaries(*verdicts: Verdict) -> list[tuple[str, str, str, int]]:
    """Return problem, first host, part and number of verdicts of each cause."""
    return summary(causes(*verdicts))


def follower(host: str = "b", *, of: tuple[str, str] = ("a", "gpu=1"), **fields: Any) -> Verdict:
    """Return a failure of GPU 0 of `host` that follows from the dead NVLink of another GPU.

    This other GPU is the root of the failure; `of` has its host and scope.
    """
    params = {FOLLOWS_HOST: of[0], FOLLOWS_PART: of[1]}
    return failed("xid.count", "gpu=0,xid=145", host, **{"params": params, **fields})


DEAD_LINK = failed("xid.count", "gpu=1,xid=149")
"""The failure of GPU 1 of host a, which has a dead NVLink."""


def test_followers_of_a_dead_link_belong_to_its_cause() -> None:
    assert summaries(DEAD_LINK, follower(), follower("c")) == [("gpu-error", "a", "gpu=1", 3)]


@pytest.mark.parametrize(
    "other",
    [
        follower(of=("a", "gpu=7")),
        follower(of=("c", "gpu=1")),
        follower(waiver=WAIVER),
        follower(params={}),
    ],
    ids=["root on another GPU", "root on another host", "waived", "without a root"],
)
def test_failure_that_does_not_belong_to_the_dead_link_has_a_separate_cause(other: Verdict) -> None:
    assert len(summaries(DEAD_LINK, other)) == 2


def test_followers_on_one_part_with_different_roots_do_not_belong_to_the_dead_link() -> None:
    second = follower(of=("c", "gpu=3"), value=2)
    assert sorted(count for *_, count in summaries(DEAD_LINK, follower(), second)) == [1, 2]


def test_verdicts_that_a_follower_explains_belong_to_the_cause_of_its_root() -> None:
    stopped = missing("stage.gang", host="b", stage="gang", kind=VerdictKind.UNFINISHED)
    assert summaries(DEAD_LINK, follower(), stopped) == [("gpu-error", "a", "gpu=1", 3)]


def test_followers_of_a_gpu_that_also_fell_off_the_bus_belong_to_the_cause_gpu_fell_off_bus() -> None:
    """All XIDs of such a GPU belong to the problem `gpu-fell-off-bus`, so the GPU has no separate cause `gpu-error`."""
    fell = failed("xid.count", "gpu=1,xid=79")
    assert summaries(fell, DEAD_LINK, follower(), follower("c")) == [("gpu-fell-off-bus", "a", "gpu=1", 4)]


def test_follower_without_a_waiver_belongs_to_the_error_without_a_waiver() -> None:
    waived = failed("xid.last_seen", "gpu=1", waiver=WAIVER)
    expected = [("gpu-error", "a", "gpu=1", 2), ("gpu-error", "a", "gpu=1", 1)]
    assert summaries(DEAD_LINK, waived, follower()) == expected
    assert summaries(waived, DEAD_LINK, follower()) == expected


def test_followers_do_not_belong_to_an_nvlink_problem_of_their_root() -> None:
    nvlink = failed("gpu.nvlink.missing_links")
    assert len(summaries(nvlink, follower())) == 2
    assert ("gpu-error", "a", "gpu=1", 2) in summaries(nvlink, DEAD_LINK, follower())


def passed(name: str, scope: str = "gpu=1", value: float = 62.0, host: str = "a") -> Verdict:
    """Return a passing verdict on a temperature of `value` °C."""
    return replace(
        failed(name, scope, host, value=value, limit=90.0, operator="le", unit="Cel"), verdict=PASS, severity=""
    )


@pytest.mark.parametrize(
    ("temperature", "is_named"),
    [
        (passed("stress.temperature"), True),
        (passed("stress.temperature", "gpu=0"), False),
        (passed("stress.temperature", host="b"), False),
        (passed("gpu.temperature"), False),
    ],
    ids=["under load", "other GPU", "other host", "not under load"],
)
def test_title_of_a_hot_gpu_states_only_its_own_temperature_under_load(temperature: Verdict, is_named: bool) -> None:
    hot = failed("gpu.throttle.active", "gpu=1,reason=hw_thermal", value=True, limit=False)
    (cause,) = causes(hot, temperature)
    assert ("62" in cause.title) is is_named


@pytest.mark.parametrize(("share", "text"), [(0.25, ", for 25 % of the stress test"), (0.0, ""), (None, "")])
def test_title_of_a_hot_gpu_states_how_long_it_was_slowed_down_if_that_is_known(share: float | None, text: str) -> None:
    hot = failed("gpu.throttle.active", "gpu=1,reason=hw_thermal", value=True, limit=False)
    slowed = failed("stress.throttled_share", value=share, limit=0.0, params={"reason": "hw_thermal"})
    (cause,) = causes(hot, slowed, passed("stress.temperature"))
    assert cause.title.endswith(f"is slowed down by heat (62 °C under load{text})")


def test_only_the_title_of_the_problem_hot_states_the_temperature_if_the_gpu_has_two_problems() -> None:
    hot = failed("gpu.throttle.active", "gpu=1,reason=hw_thermal", value=True, limit=False)
    version = failed("gpu.vbios_version", kind=VerdictKind.PEERS, value="1", limit="2")
    result = causes(hot, version, passed("stress.temperature"))
    assert {cause.problem: "62" in cause.title for cause in result} == {"hot": True, "differs": False}


def test_title_of_another_problem_does_not_state_the_temperature() -> None:
    (cause,) = causes(failed("gpu.nvlink.missing_links"), passed("stress.temperature"))
    assert "62" not in cause.title


def test_inconclusive_verdicts_with_the_same_reason_are_one_cause_that_names_the_host() -> None:
    same = [missing("gpu.power", f"gpu={at}", reason="refused") for at in range(2)]
    other = missing("gpu.power", "gpu=2", reason="timed out")
    assert sorted(summaries(*same, other)) == [("not-verified", "a", "gpu=2", 1), ("not-verified", "a", "host", 2)]
    assert summaries(*same[:1]) == [("not-verified", "a", "gpu=0", 1)]
    assert len(summaries(*same, replace(same[0], waiver=WAIVER))) == 2
    assert len(summaries(same[0], replace(same[1], kind=VerdictKind.ERROR))) == 2


def test_failures_of_one_reading_are_one_cause_for_each_part() -> None:
    two = [failed("site.thing", f"gpu={at}") for at in range(2)]
    assert summaries(*two) == [("site.thing", "a", "gpu=0", 1), ("site.thing", "a", "gpu=1", 1)]
    assert summaries(two[0], replace(two[0], criterion="other")) == [("site.thing", "a", "gpu=0", 2)]


@pytest.mark.parametrize(
    ("fields", "count"),
    [
        ({"scope": "host", **SLOW}, 1),
        ({"scope": "gpu=1", **SLOW}, 2),
        ({"scope": "gang=r1", **SLOW}, 1),
        ({"scope": "gang=r1", "value": None, "limit": None}, 2),
    ],
    ids=["hosts", "parts", "gangs", "gangs without values"],
)
def test_number_of_causes_of_the_same_failure_on_two_hosts(fields: dict[str, Any], count: int) -> None:
    assert len(summaries(*[failed("site.figure", host=host, **fields) for host in "ab"])) == count


def test_hosts_share_a_cause_only_with_the_same_waiver_and_criterion() -> None:
    first = failed("site.figure", "host", **SLOW)
    second = replace(first, host="b")
    assert len(summaries(first, second)) == 1
    assert len(summaries(first, replace(second, waiver=WAIVER))) == 2
    assert len(summaries(first, replace(second, criterion="other"))) == 2
    assert len(summaries(first, replace(second, name="site.other"))) == 2


def peers(host: str, value: Any = "1", limit: Any = "2", **fields: Any) -> Verdict:
    """Return the failure of a host whose version `value` differs from the version `limit` of most hosts."""
    return failed("site.version", "host", host, kind=VerdictKind.PEERS, value=value, limit=limit, **fields)


def test_hosts_that_differ_in_the_same_way_share_a_cause() -> None:
    assert len(summaries(peers("a"), peers("b"))) == 1
    assert len(summaries(peers("a"), peers("b", "3"))) == 2
    assert len(summaries(peers("a"), peers("b", limit="3"))) == 2
    absent = [peers(host, None, None) for host in "ab"]
    assert len(summaries(*absent)) == 1
    assert len(summaries(absent[0], replace(absent[1], reason="other"))) == 2


@pytest.mark.parametrize(
    ("first", "changes"),
    [
        (peers("a"), {"name": "site.other"}),
        (failed("x.y", "host", kind=VerdictKind.SUSPECT, params={LINK_PARAM: "a - b"}), {"params": {LINK_PARAM: "a - c"}}),
        (failed("x.y", "host", kind=VerdictKind.SHARED_MACHINE, user="a and b"), {"user": "a and c"}),
    ],
    ids=["other reading", "other path", "other machine"],
)  # fmt: skip
def test_one_host_may_have_several_problems_of_one_kind(first: Verdict, changes: dict[str, Any]) -> None:
    """A second verdict that differs only in its value has the same cause. With `changes`, it has a separate cause."""
    assert len(summaries(first, replace(first, value=2))) == 1
    assert len(summaries(first, replace(first, **changes))) == 2


def test_missing_reading_belongs_to_the_failed_reading_of_the_same_problem_and_part() -> None:
    wrong = failed("gpu.ecc.uncorrected")
    assert len(summaries(wrong, missing("gpu.ecc.corrected", "gpu=1"))) == 1
    assert len(summaries(wrong, missing("gpu.ecc.corrected", "gpu=0"))) == 2
    assert len(summaries(wrong, missing("gpu.power", "gpu=1"))) == 2
    assert len(summaries(peers("a"), missing("gpu.power", "host"))) == 2, (
        "a deviation from other hosts must not explain a missing reading"
    )


def test_fault_that_stops_measurements_explains_only_missing_measurements() -> None:
    fell = failed("xid.count", "gpu=1,xid=79")
    assert len(summaries(fell, missing("storage.bandwidth"))) == 1
    assert len(summaries(fell, failed("storage.disk.count", "host"))) == 2
    assert len(summaries(fell, failed("storage.disk.count", "host", kind=VerdictKind.MISSING))) == 2
    assert len(summaries(fell, missing("storage.disk.count", kind=VerdictKind.PEERS))) == 2
    assert len(summaries(failed("gpu.nvlink.missing_links"), missing("storage.bandwidth"))) == 2


@pytest.mark.parametrize(
    ("suspect", "scope", "count"),
    [
        ("host", "gpu=0,partner=b", 1),
        ("gang=r1", "gpu=0,partner=b", 1),
        ("nic=rail1", "gpu=0,partner=b", 2),
        ("nic=rail1", "gpu=0", 1),
    ],
)
def test_slow_adapter_explains_no_pairs_that_are_attributed_to_the_gang(suspect: str, scope: str, count: int) -> None:
    """`suspect`: the slow part; `nic=rail1` is an adapter. `scope`: scope of a failure that is attributed to the gang.

    A scope with a `partner` is a pair of GPUs.
    """
    slow = failed("pairs.bandwidth", suspect, kind=VerdictKind.SUSPECT, stage="gang", **SLOW)
    of_gang = failed("pairs.latency", scope, part="gang=r1", stage="gang")
    assert len(summaries(slow, of_gang)) == count


@pytest.mark.parametrize("hosts", ["ab", "ba"])
def test_hosts_with_swapped_cables_share_a_cause_that_names_both_hosts_in_order(hosts: str) -> None:
    swapped = [
        failed("network.switch_id", "host", host, kind=VerdictKind.SWAPPED, detail="swap them", value="s") for host in hosts
    ]  # fmt: skip
    (cause,) = causes(*swapped)
    assert cause.title.startswith("a and b have")
    assert len(summaries(swapped[0], replace(swapped[1], detail="swap others"))) == 2


def test_problem_of_a_port_names_the_cable_unless_the_problem_is_a_wrong_cable() -> None:
    """The title of the problem `wrong-cable` already names both ends of the cable. `site.thing` is no reading of a port."""
    verdicts = [failed(name, "nic=eth1", value="x") for name in ("network.switch_id", "network.carrier", "site.thing")]
    cables = {(cause.problem, cause.parts[0].cable) for verdict in verdicts
              for cause in diagnose([verdict], {}, {("a", "nic=eth1"): "leaf0 swp3"})}  # fmt: skip
    assert cables == {("wrong-cable", ""), ("port-down", "leaf0 swp3"), ("site.thing", "")}


def test_ends_of_one_slow_path_share_a_cause_that_names_the_path() -> None:
    ends = [
        failed("pairs.bandwidth", "host", host, kind=VerdictKind.SUSPECT, params={LINK_PARAM: "a - b"}, **SLOW)
        for host in "ab"
    ]
    (cause,) = causes(*ends)
    assert cause.title.startswith("path a - b ")
    other = replace(ends[1], params={LINK_PARAM: "b - c"})
    assert len(summaries(ends[0], other)) == 2


@pytest.mark.parametrize(
    ("hosts", "subject"),
    [
        ("a", "a "),
        ("ab", "2 hosts (a, b): each "),
        ("abcd", "4 hosts (a, b, c, d): each "),
        ("abcde", "5 hosts (a, b, c, d and 1 more): each "),
    ],
)
def test_title_names_up_to_four_hosts(hosts: str, subject: str) -> None:
    (cause,) = causes(*[peers(host) for host in hosts])
    assert cause.title.startswith(subject)


def test_title_names_the_parts_or_their_common_rail_or_switch() -> None:
    parts = [replace(peers(host), scope="gpu=1") for host in "ab"]
    assert causes(*parts)[0].title.startswith("2 parts (GPU 1 of a, GPU 1 of b): each ")
    assert causes(peers("a"), parts[1])[0].title.startswith("2 parts (a, GPU 1 of b): each ")
    for part in ("rail=1", "switch=1"):
        slow = [failed("verbs.bandwidth", "host", host, part=part, kind=VerdictKind.SUSPECT, **SLOW) for host in "ab"]
        (cause,) = causes(*slow)
        assert cause.title.startswith(f"{part.replace('=', ' ')} (2 hosts) ")
        assert [(item.host, item.scope) for item in cause.parts] == [("a", part), ("b", part)]


def order(*verdicts: Verdict) -> list[int]:
    """Return the position in `verdicts` of the first (most important) verdict of each cause, in the order of the causes."""
    return [cause.verdicts[0] for cause in causes(*verdicts)]


def test_causes_are_ordered_by_waiver_verdict_severity_and_action() -> None:
    reseat = failed("site.a", "gpu=0", action="reseat")
    rma = failed("site.b", "gpu=1", action="rma")
    warning = failed("site.c", "gpu=2", action="monitor")
    unknown_action = failed("site.d", "gpu=3", action="dance", severity="critical")
    waived = failed("site.e", "gpu=4", action="rma", waiver=WAIVER)
    inconclusive = missing("site.f", "gpu=5")
    assert order(inconclusive, waived, unknown_action, warning, reseat, rma) == [5, 4, 2, 3, 0, 1]


def test_first_verdict_of_a_cause_is_the_most_important() -> None:
    same = [
        failed("site.a", "gpu=0", action="monitor"),
        failed("site.a", "gpu=0", action="rma", value=2),
        failed("site.a", "gpu=0", action="reseat", value=3),
    ]
    (cause,) = causes(*same)
    assert (cause.verdicts, cause.action, cause.severity) == ((1, 2, 0), "rma", "critical")
    # A verdict whose scope names the faulty part comes before a verdict on another scope that is attributed to this part.
    of_part = failed("site.a", "gpu=1", part="gpu=0", action="rma")
    assert causes(of_part, same[1])[0].verdicts == (1, 0)
    assert causes(replace(of_part, scope="gpu=0", part="gpu=1"), replace(same[1], scope="gpu=1"))[0].verdicts == (1, 0)
    # The value that is farther from its limit comes first.
    values = [failed("site.a", "gpu=0", value=value, limit=10.0, operator="ge") for value in (9.0, 5.0)]
    assert causes(*values)[0].verdicts == (1, 0)


def test_failure_is_the_first_verdict_of_a_cause_that_also_has_an_inconclusive_verdict() -> None:
    slow = failed("pairs.bandwidth", "host", kind=VerdictKind.SUSPECT)
    unclear = missing("gang.time", kind=VerdictKind.SUSPECT)
    (cause,) = causes(unclear, slow)
    assert (cause.verdicts, cause.verdict) == ((1, 0), FAIL)


def test_failing_host_is_the_first_host_of_a_cause_that_also_has_an_inconclusive_host() -> None:
    fields: dict[str, Any] = {"kind": VerdictKind.PEERS, "criterion": "x", "reason": "two versions"}
    unclear = replace(missing("site.version"), **fields)
    wrong = replace(failed("site.version", "host", "b", value=None, action="rma"), **fields)
    (cause,) = causes(unclear, wrong)
    assert (cause.host, cause.hosts, cause.verdict, cause.action, cause.verdicts) == (
        "b",
        ("b", "a"),
        FAIL,
        "rma",
        (1, 0),
    )


def test_cause_without_a_known_problem_is_certain_if_a_reading_failed_and_unknown_if_it_is_missing() -> None:
    assert [causes(item)[0].confidence for item in (failed("site.x"), missing("site.x"))] == ["certain", "unknown"]


def test_cause_with_a_failure_and_an_inconclusive_verdict_has_verdict_and_action_of_the_failure() -> None:
    unfinished = missing("stage.gang", kind=VerdictKind.UNFINISHED, stage="gang")
    (cause,) = causes(failed("gpu.count", "host", action="rma"), unfinished)
    assert (cause.verdict, cause.action) == (FAIL, "rma")
    (alone,) = causes(unfinished)
    assert (alone.verdict, alone.action) == (INCONCLUSIVE, "none")


@pytest.mark.parametrize(
    ("scope", "part", "explained"),
    [
        ("gpu=0,peer=1", "", True),
        ("gpu=1,peer=0", "", True),
        ("gpu=0,peer=1", "gpu=0", False),
        ("gpu=0,peer=2", "", False),
    ],
)
def test_fault_of_a_gpu_explains_its_slow_pairs_unless_they_are_attributed_to_the_other_gpu(
    scope: str, part: str, explained: bool
) -> None:
    pair = failed("peer_copy.bandwidth", scope, part=part, value=1.0, limit=2.0, operator="ge")
    assert (len(summaries(failed("gpu.nvlink.missing_links"), pair)) == 1) is explained


PORT = "hca=mlx5_0,port=1"


def test_port_that_is_down_explains_the_missing_measurement_of_its_partner() -> None:
    down = failed("infiniband.active", PORT, "b", value=False, limit=True)
    unmeasured = missing("verbs.bandwidth", PORT, params={PARTNER_PARAM: "b"}, stage="gang")
    assert len(summaries(down, unmeasured)) == 1
    assert len(summaries(down, replace(unmeasured, params={PARTNER_PARAM: "c"}))) == 2
    assert len(summaries(replace(down, verdict=INCONCLUSIVE, kind=VerdictKind.MISSING), unmeasured)) == 2

    carrier = failed("network.carrier", "nic=eth1", "b", value=False, limit=True)
    assert len(summaries(carrier, unmeasured)) == 1
    assert len(summaries(replace(carrier, scope="host"), unmeasured)) == 2


def test_problem_without_a_port_number_explains_readings_of_every_port_of_the_adapter() -> None:
    carrier = failed("network.carrier", "nic=eth1", part="hca=mlx5_0", value=False, limit=True)
    assert len(summaries(carrier, failed("infiniband.symbol_error", PORT))) == 1


def test_measurement_with_a_partner_belongs_to_the_fault_of_the_partner() -> None:
    faults = [failed("xid.count", "gpu=1,xid=79", host) for host in "ac"]
    pair = missing("pairs.bandwidth", "gpu=0,partner=c", "b", stage="gang")
    assert set(summaries(*faults, pair)) == {
        ("gpu-fell-off-bus", "a", "gpu=1", 1),
        ("gpu-fell-off-bus", "c", "gpu=1", 2),
    }


def test_missing_result_belongs_to_the_cause_that_is_first_in_the_list_of_problems() -> None:
    fell = failed("xid.count", "gpu=1,xid=79", "c")
    stopped = missing("stage.gang", host="b", stage="gang", kind=VerdictKind.UNFINISHED)
    assert set(summaries(DEAD_LINK, fell, stopped)) == {
        ("gpu-error", "a", "gpu=1", 1),
        ("gpu-fell-off-bus", "c", "gpu=1", 2),
    }


NVLINK = failed("gpu.nvlink.missing_links")
IN_GANG = failed("collective.all_reduce.busbw", "gang=r1", "b", stage="gang", **SLOW)
"""The verdict of host b on a slow figure of the gang. Every host of the gang has a verdict on this figure."""


def test_slow_figure_of_a_gang_belongs_to_the_fault_of_one_of_its_hosts() -> None:
    assert summaries(NVLINK, *(replace(IN_GANG, host=host) for host in "abc")) == [("nvlink", "a", "gpu=1", 4)]


@pytest.mark.parametrize(
    "others",
    [
        [replace(IN_GANG, waiver=WAIVER)],
        [replace(IN_GANG, host="z")],
        [replace(IN_GANG, name="fashion_mnist.throughput")],
        [replace(IN_GANG, scope="host")],
        [replace(IN_GANG, kind=VerdictKind.SUSPECT)],
        [IN_GANG, failed("pairs.bandwidth", "gpu=0,partner=c", "b", part="gang=r1", stage="gang", **SLOW)],
    ],
    ids=[
        "waived",
        "host outside the gang",
        "figure of no collective",
        "of the host alone",
        "suspect",
        "beside slow pairs",
    ],
)
def test_slow_figure_does_not_belong_to_a_fault_that_may_not_be_its_cause(others: list[Verdict]) -> None:
    """The fault: NVLinks of host a are down."""
    assert len(summaries(NVLINK, *others)) == 2


def test_wrong_result_of_a_gang_has_a_separate_cause() -> None:
    """Wrong results come before slow parts in the list of problems, so a slow host does not explain them."""
    wrong = failed("collective.all_reduce.wrong_elements", "gang=r1", "b", stage="gang")
    slow = failed("pairs.bandwidth", "host", kind=VerdictKind.SUSPECT, stage="gang", **SLOW)
    assert {name for name, *_ in summaries(slow, wrong)} == {"slow-network", "wrong-results"}


def test_problem_of_a_whole_gang_explains_no_verdict_of_another_host() -> None:
    transport = failed("collective.transport", "gang=r1", "a", value="SHM", limit="IB", stage="gang")
    assert len(summaries(transport, replace(transport, host="b"))) == 2
    assert len(summaries(replace(transport, scope="host"), replace(transport, host="b"))) == 2, (
        "a problem must not explain the same problem of another host"
    )
    assert len(summaries(transport, IN_GANG)) == 2


@pytest.mark.parametrize("at", [0, 1])
def test_slow_figure_of_a_gang_belongs_to_the_first_fault_in_the_list_of_problems(at: int) -> None:
    heat = failed("gpu.throttle.active", "gpu=1,reason=hw_thermal", "a", value=True, limit=False)
    faults = [replace(NVLINK, host="c"), heat]
    assert set(summaries(*faults[at:], *faults[:at], IN_GANG)) == {
        ("nvlink", "c", "gpu=1", 2),
        ("hot", "a", "gpu=1", 1),
    }
    second = replace(NVLINK, host="c")
    assert set(summaries(*[NVLINK, second][at:], *[NVLINK, second][:at], IN_GANG)) == {
        ("nvlink", "a", "gpu=1", 2), ("nvlink", "c", "gpu=1", 1)
    }  # fmt: skip


def test_fault_explains_missing_results_of_another_host_only_in_the_same_gang() -> None:
    """The fault and the result must have the same waiver. In stages other than `gang`, each host runs alone."""
    stopped = missing("stage.gang", host="b", stage="gang", kind=VerdictKind.UNFINISHED)
    fell = failed("xid.count", "gpu=1,xid=79")
    assert len(summaries(fell, stopped)) == 1
    assert len(summaries(fell, replace(stopped, waiver=WAIVER))) == 2
    assert len(summaries(replace(fell, host="z"), stopped)) == 2
    assert len(summaries(fell, replace(stopped, stage="benchmark"))) == 2


def causes_of_each_rotation(verdicts: Sequence[Verdict]) -> set[frozenset[tuple[str, frozenset[str], int]]]:
    """Diagnose each rotation of the verdicts; return the different sets of causes (problem, hosts, number of verdicts)."""
    rotated = [diagnose([*verdicts[at:], *verdicts[:at]], GANGS) for at in range(len(verdicts))]
    return {frozenset((item.problem, frozenset(item.hosts), len(item.verdicts)) for item in each) for each in rotated}


def test_order_of_the_verdicts_does_not_change_the_causes() -> None:
    verdicts = [DEAD_LINK, follower(), peers("a"), peers("b"), failed("site.a", "gpu=0"), missing("site.b", "gpu=0"), *[
        failed("site.figure", "host", host, **SLOW) for host in "abc"
    ]]  # fmt: skip
    assert len(causes_of_each_rotation(verdicts)) == 1


def test_host_with_thousands_of_faulty_parts_is_diagnosed() -> None:
    """If each failure were compared with each faulty part, this test would take minutes."""
    faults = [failed("optics.rx_los", f"nic=eth{at},lane=1", value=True, limit=False) for at in range(3_000)]
    effects = [failed("network.carrier", f"nic=eth{at}", value=False, limit=True) for at in range(1_500, 4_500)]
    assert sorted(len(cause.verdicts) for cause in causes(*faults, *effects)) == [1] * 3_000 + [2] * 1_500


def test_gang_with_thousands_of_faulty_parts_is_diagnosed() -> None:
    """If each verdict were compared with the faulty parts of all hosts, this test would take half a minute.

    Each host has four ports without light. The last host also has ports that could be measured only with the first host, and
    figures that follow from no fault.
    """
    hosts = tuple(f"h{at:04}" for at in range(2_000))
    faults = [
        failed("optics.rx_los", f"hca=m{at},port=1", host, value=True, limit=False) for host in hosts for at in range(4)
    ]
    unmeasured = [
        missing("verbs.bandwidth", f"hca=m{at},port=2", hosts[-1], params={PARTNER_PARAM: hosts[0]}) for at in range(4)
    ]
    others = [failed(f"site.figure{at}", "nic=eth9", hosts[-1]) for at in range(6_000)]
    result = diagnose([*faults, *unmeasured, *others], {"r1": hosts})
    explained = {cause.part for cause in result if cause.host == hosts[0] and len(cause.verdicts) == 2}
    assert explained == {"hca=m0", "hca=m1", "hca=m2", "hca=m3"}
    assert len(result) == len(faults) + len(others)


@pytest.mark.parametrize(("part", "hosts"), [("rail=1", [("a", "b"), ("d",)]), ("switch=s1", [("a", "b", "d")])])
def test_hosts_at_one_rail_or_switch_have_one_cause_although_their_figures_differ(
    part: str, hosts: list[tuple[str, ...]]
) -> None:
    """Host b was judged by another launch, with other figures. Host d is in another gang, which has a rail 1 of its own."""
    figures = {"a": ("verbs.bandwidth", 7.0), "b": ("pairs.bandwidth", 6.0), "d": ("verbs.bandwidth", 7.0)}
    verdicts = [
        failed(name, "hca=m1,port=1", host, part=part, kind=VerdictKind.SUSPECT, **{**SLOW, "value": value})
        for host, (name, value) in figures.items()
    ]
    result = diagnose(verdicts, {**GANGS, "r2": ("d",)})
    assert sorted(tuple(sorted(cause.hosts)) for cause in result) == hosts


def test_title_of_slow_paths_on_one_rail_has_the_number_of_hosts() -> None:
    verdicts = [
        failed(
            "pairs.bandwidth",
            "gang=r1",
            host,
            part="rail=1",
            kind=VerdictKind.SUSPECT,
            params={LINK_PARAM: path},
            **SLOW,
        )
        for host, path in (("a", "a - b"), ("b", "a - b"), ("c", "c - d"), ("d", "c - d"))
    ]
    (cause,) = diagnose(verdicts, {"r1": tuple("abcd")})
    assert cause.title.startswith("rail 1 (4 hosts) is slow")
