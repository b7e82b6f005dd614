"""Cables of the hosts are compared: which switches belong to a rail, and which ports are not at a switch of their rail.

A rail is the ports in one slot of all hosts. The switches have names such as `a` and `b`: `at a swp1` means at the port `swp1` of
the switch `a`, and `hosts have a in this slot` means that their ports in this slot are at the switch `a`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from fleet.judge.wiring.links import HostLinks, PortLink
from fleet.judge.wiring.rails import CRITERION, SOURCE, compare_rails
from schemas.reports import FAIL, INCONCLUSIVE, PASS, Verdict, VerdictKind


def link(host: str, rail: int, switch: str, **fields: Any) -> PortLink:
    """Return the port of a host in a rail. `switch`: name and ID of its switch; empty: the switch was not read."""
    default: dict[str, Any] = {
        "host": host, "scope": f"nic=eth{rail}", "slot": f"slot{rail}", "names": frozenset(), "is_fastest": True,
        "switch_id": switch, "switch": switch, "port": "swp1" if switch else "", "reason": "" if switch else "no LLDP",
    }  # fmt: skip
    return PortLink(**{**default, **fields})


def host(number: int, *switches: str, **fields: Any) -> HostLinks:
    """Return the host `h<number>`, whose rails 0, 1, ... are at these switches."""
    name = f"h{number}"
    links = tuple(link(name, rail, switch, **fields) for rail, switch in enumerate(switches))
    return HostLinks(host=name, has_record=True, links=links)


def verdicts(hosts: Sequence[HostLinks], **excluded: str) -> dict[tuple[str, str], Verdict]:
    """Return host and scope -> verdict. `excluded`: host -> scope of a port that another check judges."""
    compared = compare_rails(hosts, frozenset(excluded.items()))
    assert compared.hosts == sum(any(item.switch_id for item in each.links) for each in hosts)
    result = {(item.host, item.scope): item for item in compared.verdicts}
    assert len(result) == len(compared.verdicts)
    assert {(item.criterion, item.source, item.basis, item.unit) for item in compared.verdicts} <= {
        (CRITERION, SOURCE, "policy", "1")
    }
    return result


def states(found: Mapping[tuple[str, str], Verdict]) -> dict[str, list[str]]:
    """Return verdict -> the ports that have it, as `h1 eth0`."""
    result: dict[str, list[str]] = {}
    for (name, scope), item in sorted(found.items()):
        result.setdefault(item.verdict, []).append(f"{name} {scope.removeprefix('nic=')}")
    return result


STRAIGHT = [host(number, "a", "b") for number in range(1, 6)]


def test_ports_at_the_switches_of_their_rail_pass() -> None:
    result = verdicts(STRAIGHT)
    assert states(result).keys() == {PASS}
    first = result["h1", "nic=eth0"]
    assert (first.value, first.limit, first.operator, first.action, first.kind) == (
        "a",
        "a",
        "eq",
        "none",
        VerdictKind.PEERS,
    )
    assert (first.reason, first.detail) == (
        "at a swp1: 5 of 5 hosts have a in this slot",
        "5 of 5 hosts have a in this slot",
    )


def test_port_at_another_switch_fails() -> None:
    result = verdicts([*STRAIGHT, host(6, "a", "x")])
    assert states(result)[FAIL] == ["h6 eth1"]
    moved = result["h6", "nic=eth1"]
    assert (moved.value, moved.limit, moved.action, moved.kind) == ("x swp1", "b", "recable", VerdictKind.PEERS)
    assert moved.reason == "at x swp1: 5 of 6 hosts have b in this slot"


def test_two_swapped_ports_have_verdicts_with_the_same_detail() -> None:
    result = verdicts([*STRAIGHT, host(6, "b", "a")])
    first, second = result["h6", "nic=eth0"], result["h6", "nic=eth1"]
    assert {first.kind, second.kind} == {VerdictKind.SWAPPED}
    assert (
        first.detail
        == second.detail
        == (
            "NIC eth0 of h6 at b swp1 and NIC eth1 of h6 at a swp1: on most hosts it is the other way around; swap the two cables"
        )
    )


def test_ports_count_as_swapped_in_pairs_but_not_in_a_circle_of_three() -> None:
    rails = [host(number, "a", "b", "c") for number in range(1, 7)]
    result = verdicts([*rails, host(7, "b", "c", "a")])
    assert {result["h7", f"nic=eth{rail}"].kind for rail in range(3)} == {VerdictKind.PEERS}
    pairs = verdicts([*[host(number, *"abcd") for number in range(1, 7)], host(7, *"badc")])
    assert "eth0 of h7" in pairs["h7", "nic=eth1"].detail
    assert "eth2 of h7" in pairs["h7", "nic=eth3"].detail


@pytest.mark.parametrize(("others", "fails"), [(1, False), (2, True)])
def test_three_hosts_are_needed_for_a_majority(others: int, fails: bool) -> None:
    hosts = [*[host(number, "a", "b", "c", "d") for number in range(1, others + 1)], host(9, "a", "b", "c", "x")]
    assert (states(verdicts(hosts)).get(FAIL, []) == ["h9 eth3"]) is fails


@pytest.mark.parametrize(("right", "wrong", "fails"), [(4, 2, True), (5, 3, False)])
def test_port_fails_only_if_two_thirds_of_the_hosts_use_the_switches_of_its_rail(
    right: int, wrong: int, fails: bool
) -> None:
    hosts = [host(number, "a", "b", "c", "d") for number in range(right)]
    hosts += [host(right + number, "a", "b", "c", f"x{number}") for number in range(wrong)]
    assert len(states(verdicts(hosts)).get(FAIL, [])) == (wrong if fails else 0)


@pytest.mark.parametrize(("count", "fails"), [(1, True), (2, False)])
def test_second_switch_of_a_rail_needs_enough_hosts(count: int, fails: bool) -> None:
    """The second switch needs at least two hosts, and at least a quarter as many hosts as the first switch."""
    hosts = [host(number, "a", "b") for number in range(8)] + [host(8 + number, "a2", "b") for number in range(count)]
    assert bool(states(verdicts(hosts)).get(FAIL)) is fails
    many = [host(number, "a", "b") for number in range(9)] + [host(20 + number, "a2", "b") for number in range(2)]
    assert len(states(verdicts(many)).get(FAIL, [])) == 2


def test_limit_of_a_rail_with_two_switches_names_both_switches() -> None:
    hosts = [host(number, "a", "b") for number in range(4)] + [host(4 + number, "a2", "b") for number in range(4)]
    assert verdicts(hosts)["h0", "nic=eth0"].limit == "a or a2"


def test_switch_of_two_rails_belongs_to_the_rail_with_more_hosts() -> None:
    hosts = [host(number, "a", "b") for number in range(6)] + [host(6 + number, "b", "a") for number in range(2)]
    result = states(verdicts(hosts))
    assert result[FAIL] == ["h6 eth0", "h6 eth1", "h7 eth0", "h7 eth1"]
    two_of_six = [host(number, "a", "b") for number in range(4)] + [host(4 + number, "b", "a") for number in range(2)]
    assert FAIL in states(verdicts(two_of_six))


def test_hosts_of_two_pods_are_compared_within_their_pod() -> None:
    """A pod is a group of hosts with its own switches."""
    pods = [host(number, "a", "b") for number in range(4)] + [host(4 + number, "c", "d") for number in range(4)]
    assert states(verdicts(pods)).keys() == {PASS}
    assert verdicts(pods)["h0", "nic=eth0"].reason == "at a swp1: 4 of 4 hosts have a in this slot"


def test_switch_that_was_not_read_is_inconclusive_if_a_switch_is_expected_and_the_port_has_a_link() -> None:
    unread = verdicts([*STRAIGHT, host(6, "a", "")])["h6", "nic=eth1"]
    assert (unread.verdict, unread.kind, unread.value, unread.limit, unread.operator) == (
        INCONCLUSIVE, VerdictKind.MISSING, None, None, "",
    )  # fmt: skip
    assert (unread.reason, unread.detail, unread.action) == (
        "5 of 5 hosts have b in this slot; on this host the switch was not read: no LLDP", "", "none",
    )  # fmt: skip
    for fields in ({"is_expected": False}, {"has_link": False}):
        other = HostLinks(host="h6", has_record=True, links=(link("h6", 0, "a"), link("h6", 1, "", **fields)))
        assert ("h6", "nic=eth1") not in verdicts([*STRAIGHT, other])


def test_switch_that_changed_during_the_run_gives_one_contradictory_verdict() -> None:
    changed = link("h6", 1, "", has_changed=True, reason="the switch changed during the run: b, then x")
    result = verdicts([*STRAIGHT, HostLinks(host="h6", has_record=True, links=(link("h6", 0, "a"), changed))])
    verdict = result["h6", "nic=eth1"]
    assert (verdict.verdict, verdict.kind, verdict.reason) == (INCONCLUSIVE, VerdictKind.CONTRADICTORY, changed.reason)
    alone = HostLinks(host="h6", has_record=True, links=(changed,))
    assert states(verdicts([*STRAIGHT, alone]))[INCONCLUSIVE] == ["h6 eth1"]
    assert INCONCLUSIVE not in states(verdicts([*STRAIGHT, alone], h6="nic=eth1"))


@pytest.mark.parametrize(("known", "silent", "is_named"), [(4, 2, True), (3, 2, False), (2, 1, True), (1, 1, False)])
def test_host_that_reports_no_switch_is_inconclusive_if_two_thirds_of_the_hosts_report_a_switch(
    known: int, silent: int, is_named: bool
) -> None:
    hosts = [host(number, "a", "b") for number in range(known)] + [
        host(known + number, "", "") for number in range(silent)
    ]
    result = [item for item in verdicts(hosts).values() if item.verdict == INCONCLUSIVE]
    assert len(result) == (2 * silent if is_named else 0)
    if is_named:
        text = f"{known} of {known + silent} hosts report a switch in this slot; on this host the switch was not read: no LLDP"
        assert {item.reason for item in result} == {text}


def test_ports_that_another_check_judges_have_no_verdict() -> None:
    hosts = [*STRAIGHT, host(6, "a", "x"), host(7, "", "")]
    result = verdicts(hosts, h6="nic=eth1", h7="nic=eth0", h1="nic=eth0")
    assert {("h6", "nic=eth1"), ("h7", "nic=eth0"), ("h1", "nic=eth0")}.isdisjoint(result)
    assert {("h6", "nic=eth0"), ("h7", "nic=eth1"), ("h1", "nic=eth1")} <= result.keys()


def test_only_the_fastest_ports_are_rails() -> None:
    def with_management(number: int, switch: str) -> HostLinks:
        name = f"h{number}"
        ports = (link(name, 0, "a"), link(name, 1, "b"), link(name, 2, switch, is_fastest=False))
        return HostLinks(host=name, has_record=True, links=ports)

    result = verdicts([*[with_management(number, "m") for number in range(5)], with_management(5, "other")])
    assert {scope for _, scope in result} == {"nic=eth0", "nic=eth1"}


def hosts_on_one_switch_each(*switches: str) -> list[HostLinks]:
    """Return one host for each of the switches. Both rails of the host are at this switch."""
    return [host(number, switch, switch) for number, switch in enumerate(switches)]


def test_two_ports_at_one_switch_fail_on_a_host_without_peers() -> None:
    """A host without peers shares its switches with no other host.

    Its two ports fail only if at least two thirds of the hosts have different switches in these slots.
    """
    apart = [host(number, f"a{number}", f"b{number}") for number in range(2)]
    result = verdicts([*apart, host(2, "x", "x")])
    assert states(result)[FAIL] == ["h2 eth0", "h2 eth1"]
    verdict = result["h2", "nic=eth0"]
    assert verdict.detail == "at the same switch as NIC eth1; most hosts have different switches in these slots"
    assert (verdict.limit, verdict.operator, verdict.kind) == (None, "", VerdictKind.PEERS)
    assert states(verdicts([*apart, host(2, "x", "y")])) == {}
    assert states(verdicts(hosts_on_one_switch_each("a", "b", "c"))) == {}
    assert FAIL not in states(verdicts([apart[0], host(2, "x", "x")])), "two hosts are too few"
    assert FAIL not in states(verdicts([*apart, host(2, "x", "x"), host(3, "y", "y")])), (
        "half of the hosts is not enough"
    )


def test_host_with_thousands_of_ports_at_one_switch_is_judged() -> None:
    """The ports in the first two slots are compared with the other hosts. No other host has the remaining slots."""
    apart = [host(number, f"a{number}", f"b{number}") for number in range(3)]
    result = states(verdicts([*apart, host(3, *["x"] * 2000)]))
    assert result[FAIL] == ["h3 eth0", "h3 eth1"]


def test_switches_that_were_not_read_do_not_count_as_shared() -> None:
    apart = [host(number, f"a{number}", f"b{number}", f"c{number}") for number in range(3)]
    unread = HostLinks(host="h9", has_record=True, links=(link("h9", 0, "x"), link("h9", 1, ""), link("h9", 2, "")))
    assert FAIL not in states(verdicts([*apart, unread]))
