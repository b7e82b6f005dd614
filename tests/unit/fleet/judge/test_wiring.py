"""Test the verdicts on cables. Two swapped cables are one cause that names both.

A port that the manifest lists is compared with the manifest. Other ports are compared with the same slot of other hosts.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fleet.cli.cables import cable_rows
from fleet.diagnosis.diagnose import diagnose
from fleet.diagnosis.handling import handling
from fleet.inventory.manifest_file import LINK_COLUMNS, read_manifest
from fleet.judge.criteria import read_packs
from fleet.judge.evidence import Evidence
from fleet.judge.judge import host_view
from fleet.judge.wiring import Wiring, cable_ends, judge_links
from fleet.judge.wiring.exchanges import Orders
from fleet.judge.wiring.links import HostLinks, PortLink, host_links
from fleet.report.html.page import render_html
from fleet.report.merge import merge
from rackproof.main import main
from schemas import documents
from schemas.errors import UsageError
from schemas.plans import LINK, Part, Plan, plan_from_json
from schemas.records import Metric, to_json
from schemas.reports import (
    ACCEPTED,
    FAIL,
    INCOMPLETE,
    INCONCLUSIVE,
    PASS,
    REJECTED,
    Cause,
    FleetReport,
    Verdict,
    VerdictKind,
)
from schemas.scopes import pci_address
from tests import builders
from tests.unit.fleet.judge.small_fleet import criterion, host_evidence, one_figure_plan, pack, reading

Cables = dict[tuple[str, int], tuple[str, str]]
"""(Host, rail) -> (switch, port of the switch). The rail is the number of a NIC of the host: `ens<rail>np0`."""
FASTEST, MANAGEMENT = 50e9, 1.25e9
"""Rate of a port of a rail, and rate of a management port, in B/s."""
FAST = pack(criterion("memory.bandwidth", operator="ge", unit="B/s"))


def hosts_of(count: int) -> list[str]:
    return [f"h{number:02}" for number in range(1, count + 1)]


def rail_optimized(count: int, rails: int = 8, *, pod: int = 0, hosts_in_pod: int = 999) -> Cables:
    """Return the cables of a fleet with one leaf switch for each rail of each pod (a group of hosts).

    `pod`: number of the first pod.
    """
    return {
        (host, rail): (f"leaf{number // hosts_in_pod + pod}-{rail}", f"swp{number % hosts_in_pod + 1}")
        for number, host in enumerate(hosts_of(count))
        for rail in range(rails)
    }


def top_of_rack(count: int, rails: int = 8, hosts_in_rack: int = 4) -> Cables:
    """Return the cables of a fleet in which every NIC of a host goes to the switch of its rack."""
    return {
        (host, rail): (f"tor{number // hosts_in_rack}", f"Ethernet{number % hosts_in_rack * rails + rail}")
        for number, host in enumerate(hosts_of(count))
        for rail in range(rails)
    }


def two_planes(count: int, rails: int = 4) -> Cables:
    """Return the cables of a fleet with two leaves for each rail. A host uses only first leaves or only second leaves."""
    return {
        (host, rail): (f"leaf{rail}{'ab'[number % 2]}", f"swp{number + 1}")
        for number, host in enumerate(hosts_of(count))
        for rail in range(rails)
    }


def mixed_groups(count: int, rails: int = 4) -> Cables:
    """Return the cables of a fleet with two leaves for each rail.

    A host uses the first leaf of some rails and the second leaf of the others.
    """
    return {
        (host, rail): (f"leaf{rail}{'ab'[(number >> rail) % 2]}", f"swp{number + 1}")
        for number, host in enumerate(hosts_of(count))
        for rail in range(rails)
    }


def neighboring_racks(count: int, hosts_in_rack: int = 4) -> Cables:
    """Return the cables of a fleet in which one NIC goes to the switch of the rack, and one to the switch of the next rack."""
    return {
        (host, rail): (f"tor{number // hosts_in_rack + rail}", f"swp{number % hosts_in_rack + 1}")
        for number, host in enumerate(hosts_of(count))
        for rail in range(2)
    }


def alternating(count: int, rails: int, switches: int) -> Cables:
    """Return the cables of a fleet in which the rails of a host go to these switches in turn."""
    return {
        (host, rail): (f"leaf{rail % switches}", f"swp{number}.{rail}")
        for number, host in enumerate(hosts_of(count))
        for rail in range(rails)
    }


def rotate(cables: Cables, host: str, rails: Sequence[int]) -> Cables:
    """Return the cables after a mistake on one host: each cable of `rails` is plugged in where the next one belongs."""
    following = [*rails[1:], rails[0]]
    return {**cables, **{(host, rail): cables[host, other] for rail, other in zip(rails, following, strict=True)}}


def swap(cables: Cables, first: tuple[str, int], second: tuple[str, int]) -> Cables:
    """Return the cables with the switch ends of these two cables exchanged."""
    return {**cables, first: cables[second], second: cables[first]}


def links(cables: Mapping[tuple[str, int], tuple[str, str]], **reasons: str) -> list[HostLinks]:
    """Return the ports of all hosts. If a switch is empty, the host could not read it; `reasons`: host -> the reason."""
    of_host: dict[str, list[PortLink]] = {}
    for (host, rail), (switch, port) in cables.items():
        of_host.setdefault(host, []).append(
            PortLink(
                host=host, scope=f"nic=ens{rail}np0", slot=f"0000:{rail:02x}:00.0", is_fastest=rail < 90,
                names=frozenset({f"ens{rail}np0", f"0000:{rail:02x}:00.0"}), switch=switch,
                switch_id=switch and f"id of {switch}", port=port, reason="" if switch else reasons.get(host, "no answer"),
            )
        )  # fmt: skip
    return [HostLinks(host=host, has_record=True, links=tuple(ports)) for host, ports in of_host.items()]


def plan_of(*lines: Part, hosts: int = 4) -> Plan:
    return replace(one_figure_plan(*hosts_of(hosts)), manifest=lines)


def lines_of(cables: Cables) -> list[Part]:
    """Return the lines of a manifest that lists these cables."""
    return [
        Part(
            host=host,
            kind=LINK,
            slot=f"ens{rail}np0",
            switch=switch,
            switch_port=port,
            origin=f"order.csv line {number}",
        )
        for number, ((host, rail), (switch, port)) in enumerate(cables.items(), 2)
    ]


def compare_hosts(cables: Cables) -> Wiring:
    """Return the verdicts without a manifest: the hosts are compared with each other."""
    return judge_links(plan_of(hosts=len({host for host, _ in cables})), links(cables))


def not_passing(wiring: Wiring) -> set[tuple[str, str, str]]:
    """Return host, scope and verdict of each verdict that is not a pass."""
    return {(item.host, item.scope, item.verdict) for item in wiring.verdicts if item.verdict != PASS}


def causes_of(wiring: Wiring) -> tuple[Cause, ...]:
    return diagnose(wiring.verdicts, {})


# ---- without a manifest ----


HEALTHY = {
    "rails": rail_optimized(16),
    "rails in pods": rail_optimized(24, hosts_in_pod=8),
    "rails in small pods": rail_optimized(12, hosts_in_pod=2),
    "three hosts": rail_optimized(3),
    "racks": top_of_rack(16),
    "racks of different sizes": top_of_rack(9),
    "planes": two_planes(16),
    "mixed groups": mixed_groups(16),
    "two rails": rail_optimized(8, rails=2),
    "neighboring racks": neighboring_racks(12),
    "one switch": alternating(8, rails=8, switches=1),
    "one switch for two rails": {
        key: (f"leaf{key[1] // 2}", port) for key, (_, port) in rail_optimized(8, rails=8).items()
    },
    "two switches in turn": alternating(8, rails=8, switches=2),
    "pods of different sizes": {**rail_optimized(14, rails=4, pod=1), **rail_optimized(5, rails=4)},
    "two rails in pods": rail_optimized(24, rails=2, hosts_in_pod=8),
    "two rails in pods of four": rail_optimized(16, rails=2, hosts_in_pod=4),
    "three rails in pods": rail_optimized(24, rails=3, hosts_in_pod=8),
    "two planes of two rails": two_planes(16, rails=2),
    "mixed groups of two rails": mixed_groups(16, rails=2),
    "mixed groups of three rails": mixed_groups(24, rails=3),
    "one NIC": rail_optimized(8, rails=1),
    "one NIC in racks": top_of_rack(9, rails=1),
}


@pytest.mark.parametrize("name", HEALTHY)
def test_regular_fabric_has_no_finding(name: str) -> None:
    assert not_passing(compare_hosts(HEALTHY[name])) == set()


COMPARED = [
    name for name in HEALTHY if name not in ("rails in small pods", "one NIC in racks", "racks of different sizes")
]
"""Fleets in which each host has at least two others that use at least half of its switches."""


@pytest.mark.parametrize("name", COMPARED)
def test_regular_fabric_is_compared(name: str) -> None:
    """A host is compared with similar hosts: those that use at least half of its switches."""
    wiring = compare_hosts(HEALTHY[name])
    assert len(wiring.verdicts) == len(HEALTHY[name])
    assert wiring.summary == f"{len(HEALTHY[name])} of {len(HEALTHY[name])} ports cabled as on similar hosts"


@pytest.mark.parametrize(
    "name", ["rails", "rails in pods", "three hosts", "two rails", "planes", "two rails in pods", "three rails in pods"]
)
@pytest.mark.parametrize("seed", range(4))
def test_two_swapped_cables_of_a_host_are_one_cause_that_names_both(name: str, seed: int) -> None:
    cables, draw = HEALTHY[name], random.Random(seed)  # noqa: S311 - no secret
    host = draw.choice(sorted({host for host, _ in cables}))
    first, second = sorted(draw.sample(sorted({rail for _, rail in cables}), 2))
    changed = swap(cables, (host, first), (host, second))
    wiring = compare_hosts(changed)
    assert not_passing(wiring) == {(host, f"nic=ens{rail}np0", FAIL) for rail in (first, second)}
    (cause,) = causes_of(wiring)
    ports = [f"NIC ens{rail}np0 of {host}" for rail in (first, second)]
    assert cause.title == f"{' and '.join(sorted(ports))} have their cables swapped"
    assert (cause.problem, cause.action, len(cause.parts)) == ("swapped-cables", "recable", 2)
    for rail, port in zip((first, second), ports, strict=True):
        assert f"{port} at {' '.join(changed[host, rail])}" in cause.why
    assert "Swap the two cables" in handling(cause).now
    assert "No part is faulty" in handling(cause).now
    assert "RMA" not in " ".join(handling(cause))


@pytest.mark.parametrize("faulty", range(1, 6))
def test_each_host_with_swapped_cables_has_one_cause(faulty: int) -> None:
    cables = HEALTHY["rails"]
    for number, host in enumerate(hosts_of(faulty)):
        cables = swap(cables, (host, number), (host, number + 1))
    causes = causes_of(compare_hosts(cables))
    assert [(cause.problem, len(cause.parts)) for cause in causes] == [("swapped-cables", 2)] * faulty
    assert {cause.host for cause in causes} == set(hosts_of(faulty))


@pytest.mark.parametrize("name", ["rails", "rails in pods", "racks", "two rails", "planes"])
def test_cable_at_a_switch_that_no_other_host_uses_is_named(name: str) -> None:
    cables = {**HEALTHY[name], ("h02", 1): ("storage7", "swp9")}
    wiring = compare_hosts(cables)
    assert not_passing(wiring) == {("h02", "nic=ens1np0", FAIL)}
    (cause,) = causes_of(wiring)
    right = HEALTHY[name]["h02", 1][0]
    assert cause.title == f"NIC ens1np0 of h02 is cabled to storage7 swp9; most hosts have {right} there"
    assert (cause.problem, cause.action) == ("wrong-cable", "recable")


def test_host_with_all_cables_at_one_switch_fails_if_other_hosts_have_one_switch_per_rail() -> None:
    cables = {**HEALTHY["rails"], **{("h05", rail): ("tor9", f"swp{rail}") for rail in range(8)}}
    wiring = compare_hosts(cables)
    assert not_passing(wiring) == {("h05", f"nic=ens{rail}np0", FAIL) for rail in range(8)}
    assert wiring.summary == (
        "120 of 120 ports cabled as on similar hosts; 8 ports at the same switch as another port of their host"
    )


@pytest.mark.parametrize(("rails", "length"), [(2, 2), (3, 2), (3, 3), (4, 2), (5, 3), (6, 4), (8, 4)])
def test_hosts_with_the_same_exchange_fail_if_they_are_at_most_a_third(rails: int, length: int) -> None:
    """Some hosts were cabled by the same wrong drawing: each cable in `moved` is plugged in where the next one belongs.

    If these are more than a third of the hosts, no majority shows which hosts are right. The ports then neither pass nor fail.
    """
    draw = random.Random(rails * length)  # noqa: S311 - no secret
    for count in (3, 4, 5, 6, 9, 11, 16):
        moved = draw.sample(range(rails), length)
        order = draw.sample(hosts_of(count), count)
        cables = rail_optimized(count, rails=rails)
        for wrong, host in enumerate(order[: (2 * count - 1) // 3], 1):
            cables = rotate(cables, host, moved)
            wiring = compare_hosts(cables)
            if 3 * wrong <= count:
                ends = {(name, f"nic=ens{rail}np0", FAIL) for name in order[:wrong] for rail in moved}
                assert not_passing(wiring) == ends, (count, wrong)
                continue
            scopes = {f"nic=ens{rail}np0" for rail in moved}
            assert {item.verdict for item in wiring.verdicts if item.scope in scopes} <= {INCONCLUSIVE}, (count, wrong)
            assert not [item for item in wiring.verdicts if item.verdict == FAIL]
            if 2 * len(moved) <= rails:
                assert {item[:2] for item in not_passing(wiring)} == {
                    (name, scope) for name in order for scope in scopes
                }
                assert (
                    wiring.summary
                    == f"{count * (rails - len(moved))} of {count * rails} ports cabled as on similar hosts"
                )
            else:
                assert "NOT COMPARED" in wiring.summary


@pytest.mark.parametrize("seed", range(20))
def test_hosts_with_different_exchanges_fail_if_they_are_at_most_a_third(seed: int) -> None:
    draw = random.Random(seed)  # noqa: S311 - no secret
    count, rails = draw.randint(3, 16), draw.randint(2, 8)
    cables = rail_optimized(count, rails=rails)
    changed = {
        host: draw.sample(range(rails), draw.randint(2, min(rails, 4))) for host in hosts_of(count)[: count // 3]
    }
    for host, moved in changed.items():
        cables = rotate(cables, host, moved)
    ends = {(host, f"nic=ens{rail}np0", FAIL) for host, moved in changed.items() for rail in moved}
    assert not_passing(compare_hosts(cables)) == ends


def test_exchanged_ports_do_not_pass_if_more_than_a_third_of_the_hosts_have_exchanges() -> None:
    """Two hosts have the cables 0 and 1 swapped, two the cables 0 and 2, and two the cables 1 and 2; three hosts are right."""
    cables = rail_optimized(9, rails=6)
    for number, pair in enumerate([(0, 1), (0, 2), (1, 2)] * 2):
        cables = rotate(cables, hosts_of(9)[number], pair)
    passed = {(item.host, item.scope) for item in compare_hosts(cables).verdicts if item.verdict == PASS}
    assert {scope for _, scope in passed} == {f"nic=ens{rail}np0" for rail in (3, 4, 5)}


@pytest.mark.parametrize("bonded", [False, True])
@pytest.mark.parametrize("hosts_in_pod", [4, 8])
@pytest.mark.parametrize("seed", range(3))
def test_cable_of_another_pod_makes_a_host_with_two_cables_inconclusive(
    hosts_in_pod: int, seed: int, bonded: bool
) -> None:
    """One of the two cables is at the switch of its rail in another pod. Nothing shows in which pod the host is."""
    draw, count = random.Random(seed), 3 * hosts_in_pod  # noqa: S311 - no secret
    rail, first = draw.randrange(2), draw.randrange(hosts_in_pod)
    ends = [hosts_of(count)[number] for number in (first, draw.randrange(hosts_in_pod, count))]
    cables = swap(rail_optimized(count, rails=2, hosts_in_pod=hosts_in_pod), (ends[0], rail), (ends[1], rail))
    bond = "bond0" if bonded else ""
    hosts = [replace(host, links=tuple(replace(link, bond=bond) for link in host.links)) for host in links(cables)]
    wiring = judge_links(plan_of(hosts=count), hosts)
    found = {(host, f"nic=ens{number}np0", INCONCLUSIVE) for host in ends for number in range(2) if not bonded}
    assert not_passing(wiring) == found
    for cause in causes_of(wiring):
        assert (cause.problem, cause.verdict, len(cause.parts)) == ("swapped-cables", INCONCLUSIVE, 2)
        assert all(f"at {' '.join(cables[cause.host, number])}" in cause.why for number in range(2))
        assert "manifest" in handling(cause).now


def test_port_passes_if_the_switches_of_its_host_have_no_fixed_partners_in_the_fleet() -> None:
    """Each NIC may be at either leaf of its rail. Nearly all peers of h08 are at leaf00 and leaf10, or at leaf01 and leaf11.

    But hosts that are no peers of h08 have leaf01 and leaf10.
    """
    ends = ["00"] * 7 + ["01"] + ["11"] * 8 + ["10"] * 8
    cables = {
        (host, rail): (f"leaf{rail}{leaves[rail]}", f"swp{number}")
        for number, (host, leaves) in enumerate(zip(hosts_of(24), ends, strict=True))
        for rail in range(2)
    }
    assert not_passing(compare_hosts(cables)) == set()


@pytest.mark.parametrize("rails", [4, 6, 8])
@pytest.mark.parametrize("seed", range(6))
def test_single_unusual_pairs_of_switches_in_a_fabric_without_pods_are_no_mistake(rails: int, seed: int) -> None:
    """Each NIC may be at either leaf of its rail. By chance, few hosts have some pairs of these leaves."""
    draw = random.Random(seed)  # noqa: S311 - no secret
    cables = {
        (host, rail): (f"leaf{rail}{draw.randrange(2)}", f"swp{number}")
        for number, host in enumerate(hosts_of(16))
        for rail in range(rails)
    }
    assert [item for item in compare_hosts(cables).verdicts if item.verdict == INCONCLUSIVE] == []


@pytest.mark.parametrize("rails", [4, 8])
def test_cables_of_which_half_are_in_another_pod_are_inconclusive(rails: int) -> None:
    cables = rail_optimized(24, rails=rails, hosts_in_pod=8)
    for rail in range(rails // 2):
        cables = swap(cables, ("h03", rail), ("h12", rail))
    assert not_passing(compare_hosts(cables)) == {
        (host, f"nic=ens{rail}np0", INCONCLUSIVE) for host in ("h03", "h12") for rail in range(rails)
    }


def test_host_that_read_no_switch_of_a_rail_does_not_show_that_the_order_matters() -> None:
    """Four hosts have the same two switches in any order. Twelve hosts read only the switch of their port for management."""
    cables = {}
    for number, host in enumerate(hosts_of(16)):
        for rail in range(2):
            cables[host, rail] = (f"leaf{(rail + number) % 2}" if number < 4 else "", f"swp{number}.{rail}")
        cables[host, 90] = ("management", f"swp{number}")
    assert not_passing(compare_hosts(cables)) == set()


@pytest.mark.parametrize("rails", [2, 3])
def test_exchange_in_one_pod_is_inconclusive_if_the_hosts_of_other_pods_have_rails(rails: int) -> None:
    cables = rail_optimized(16, rails=rails, hosts_in_pod=4)
    for host in ("h02", "h03"):
        cables = swap(cables, (host, 0), (host, 1))
    wiring = compare_hosts(cables)
    expected = {(host, f"nic=ens{rail}np0", INCONCLUSIVE) for host in hosts_of(4) for rail in range(2)}
    assert not_passing(wiring) == expected
    (cause,) = causes_of(wiring)
    assert (cause.problem, len(cause.hosts), cause.verdict) == ("swapped-cables", 4, INCONCLUSIVE)


def test_cables_without_a_clear_majority_of_one_order_are_one_cause_and_the_hosts_are_incomplete() -> None:
    plan, cables = plan_of(hosts=8), rail_optimized(8, rails=4)
    for host in ("h01", "h02", "h03"):
        cables = swap(cables, (host, 1), (host, 2))
    report = report_on(plan, cables)
    assert {host.decision for host in report.hosts} == {INCOMPLETE}
    assert "Cabling: 16 of 32 ports cabled as on similar hosts" in report.acceptance.summary
    (cause,) = report.causes
    assert (cause.problem, cause.verdict, len(cause.hosts), len(cause.parts)) == ("swapped-cables", INCONCLUSIVE, 8, 16)
    ports = "NIC dev1 of h01, NIC dev1 of h02, NIC dev1 of h03, NIC dev1 of h04 and 12 more"
    assert (
        cause.title
        == f"{ports} may have swapped cables: other hosts have these switches in another order or combination"
    )
    assert cause.why == (
        "8 hosts have the same switches at NIC dev1 and NIC dev2, but in different orders: 5 have leaf0-1 and leaf0-2 (h04, h05, "
        "h06, h07 and 1 more); 3 have leaf0-2 and leaf0-1 (h01, h02, h03). No clear majority of hosts shows which order is right"
    )
    assert "manifest" in handling(cause).now
    listed = [replace(line, slot=line.slot.replace("ens", "dev").removesuffix("np0")) for line in lines_of(cables)]
    assert report_on(plan_of(*listed, hosts=8), cables).decision == ACCEPTED


def test_two_exchanges_are_not_taken_for_one_if_a_switch_has_several_slots() -> None:
    first, second = (tuple(zip("0123", switches, strict=True)) for switches in ("abcc", "ccab"))
    exchanges = Orders({first: ("h1",), second: ("h2",)}).exchanges(first)
    assert {exchange.slots for exchange in exchanges} == {("0", "2"), ("1", "3")}


@pytest.mark.parametrize("swapped", range(1, 8))
def test_order_of_the_ports_of_a_bond_does_not_matter(swapped: int) -> None:
    """Each host has two bonds of two ports. Both bonds go to the same two switches."""
    cables = alternating(8, rails=4, switches=2)
    for number, host in enumerate(hosts_of(swapped)):
        first = number % 2 * 2
        cables = swap(cables, (host, first), (host, first + 1))
    bonded = [
        replace(host, links=tuple(replace(link, bond=f"bond{number // 2}") for number, link in enumerate(host.links)))
        for host in links(cables)
    ]
    wiring = judge_links(plan_of(hosts=8), bonded)
    assert not_passing(wiring) == set()
    assert wiring.summary == "32 of 32 ports cabled as on similar hosts"
    assert "8 of 8 hosts have leaf1 in another slot of bond0" in {item.detail for item in wiring.verdicts}
    without_bonds = compare_hosts(cables)
    assert not_passing(without_bonds) or "NOT COMPARED" in without_bonds.summary


@pytest.mark.parametrize(
    ("ends", "wrong", "right"),
    [
        (("leaf0-0", "leaf9"), 1, "leaf0-1"),
        (("leaf9", "leaf0-1"), 0, "leaf0-0"),
        (("a", "leaf0-0"), 0, "leaf0-1"),
        (("leaf0-1", "leaf9"), 1, "leaf0-0"),
        (("leaf0-0", "leaf0-0"), 1, "leaf0-1"),
        (("leaf0-1", "leaf0-1"), 0, "leaf0-0"),
    ],
)
def test_wrong_cable_of_a_bond_fails(ends: tuple[str, str], wrong: int, right: str) -> None:
    """The bond needs both switches, in any order. On `h03` the order differs from that of the other hosts, which is no fault."""
    cables = swap(rail_optimized(8, rails=4), ("h03", 0), ("h03", 1))
    cables |= {("h05", rail): (end, "swp1") for rail, end in enumerate(ends)}
    bonded = [
        replace(host, links=tuple(replace(link, bond="bond0") for link in host.links[:2]) + host.links[2:])
        for host in links(cables)
    ]
    wiring = judge_links(plan_of(hosts=8), bonded)
    assert not_passing(wiring) == {("h05", f"nic=ens{wrong}np0", FAIL)}
    assert {item.limit for item in wiring.verdicts if item.verdict == FAIL} == {right}


def test_bond_of_an_interface_is_read() -> None:
    plan, cables = plan_of(hosts=1), rail_optimized(1, rails=3)
    member = Metric(name="network.bond.member_up", unit="1", values={"nic=bond0,member=dev1": True})
    result = host_links(host_view(plan, "h01", host_evidence(plan, "h01", *metrics("h01", cables), member), []))
    assert [link.bond for link in result.links] == ["", "bond0", ""]


@pytest.mark.parametrize("rails", [2, 4, 8])
@pytest.mark.parametrize("seed", range(5))
def test_fabric_without_rails_has_no_inconclusive_verdict(rails: int, seed: int) -> None:
    """In such a fabric each NIC may go to any of the switches, so the order does not matter."""
    draw = random.Random(seed)  # noqa: S311 - no secret
    cables = {}
    for host in hosts_of(12):
        order = draw.sample(range(rails), rails)
        cables |= {(host, rail): (f"leaf{switch}", host) for rail, switch in enumerate(order)}
    # `h01` and `h03` are cabled alike, and so are `h02` and `h04`. The two pairs differ in all slots.
    for rail in range(rails):
        for number, host in enumerate(hosts_of(12)[:4]):
            cables[host, rail] = (f"leaf{(rail + number % 2 + 1) % rails}", host)
    wiring = compare_hosts(cables)
    assert INCONCLUSIVE not in {item.verdict for item in wiring.verdicts}


def test_host_of_another_pod_is_not_compared_with_the_others() -> None:
    cables = {**rail_optimized(4), **{(f"x{key[0]}", key[1]): value for key, value in rail_optimized(1, pod=7).items()}}
    assert not_passing(compare_hosts(cables)) == set()


@pytest.mark.parametrize("count", [1, 2])
def test_fewer_than_three_hosts_are_not_compared(count: int) -> None:
    wiring = compare_hosts(swap(rail_optimized(count), ("h01", 0), ("h01", 1)))
    assert wiring.verdicts == ()
    assert wiring.summary == (
        f"NOT COMPARED (hosts with known switches: {count}, at least 3 are needed); list the cables in the manifest (kind link)"
    )


def test_fabric_without_a_majority_is_not_compared() -> None:
    draw = random.Random(1)  # noqa: S311 - no secret
    cables = {(host, rail): (f"leaf{draw.randrange(1000)}", "swp1") for host in hosts_of(6) for rail in range(4)}
    wiring = compare_hosts(cables)
    assert wiring.verdicts == ()
    assert wiring.summary.startswith("NOT COMPARED (no slot has the same switches on a clear majority of hosts)")


def test_port_that_was_not_read_is_inconclusive_if_most_hosts_report_a_switch_in_this_slot() -> None:
    cables = {**HEALTHY["rails"], ("h03", 2): ("", "")}
    (verdict,) = [item for item in compare_hosts(cables).verdicts if item.verdict != PASS]
    assert (verdict.host, verdict.scope, verdict.verdict) == ("h03", "nic=ens2np0", INCONCLUSIVE)
    assert verdict.reason == "15 of 15 hosts have leaf0-2 in this slot; on this host the switch was not read: no answer"


def with_absent(plan: Plan, cables: Cables, host: str, why: str) -> dict[str, Evidence]:
    """Return the evidence of a fleet in which `host` could read none of its switches. `why`: status and reason."""
    of_host = {
        metric.name: replace(metric, values={}, absent=dict.fromkeys(metric.values, why))
        if ".switch" in metric.name
        else metric
        for metric in metrics(host, cables)
    }
    return {**evidence(plan, cables), host: host_evidence(plan, host, *of_host.values())}


@pytest.mark.parametrize(
    ("why", "decision"),
    [
        ("unsupported: lldpd is not installed", ACCEPTED),
        ("error: no LLDP neighbor", INCOMPLETE),
        ("error: lldpctl: exit code 1", INCOMPLETE),
    ],
)
@pytest.mark.parametrize("hosts", [1, 2, 4])
def test_host_with_unread_switches_is_incomplete_if_most_hosts_report_a_switch(
    hosts: int, why: str, decision: str
) -> None:
    """A host without lldpd is an exception: it cannot read its switches, and is accepted."""
    plan, cables = plan_of(hosts=hosts), rail_optimized(hosts, rails=2)
    report = merge(plan, with_absent(plan, cables, "h01", why), (FAST,))
    assert report.hosts[0].decision == (decision if hosts == 4 else ACCEPTED)


def test_majority_is_counted_only_among_hosts_with_a_record() -> None:
    """Two of the three hosts with a record report a switch, so the third host must report its switch too."""
    unread = [HostLinks(host="h04", has_record=False), *links({**rail_optimized(3, rails=1), ("h03", 0): ("", "")})]
    assert not_passing(judge_links(plan_of(hosts=4), unread)) == {("h03", "nic=ens0np0", INCONCLUSIVE)}


def test_port_without_a_link_has_no_cabling_verdict() -> None:
    of_hosts = links({**HEALTHY["rails"], ("h03", 2): ("", "")})
    down = [
        replace(host, links=tuple(replace(link, has_link=bool(link.switch_id)) for link in host.links))
        for host in of_hosts
    ]
    assert not_passing(judge_links(plan_of(hosts=16), down)) == set()


def test_management_ports_are_not_compared() -> None:
    """A management port is slower than the ports of rails, and goes to the management switch of its rack."""
    management = {(host, 99): (f"mgmt{number // 5}", f"{number}") for number, host in enumerate(hosts_of(16))}
    assert not_passing(compare_hosts({**HEALTHY["rails"], **management})) == set()


def test_order_of_the_hosts_does_not_matter() -> None:
    cables = swap(HEALTHY["rails"], ("h04", 1), ("h04", 6))
    expected = compare_hosts(cables)
    shuffled = list(cables.items())
    random.Random(3).shuffle(shuffled)  # noqa: S311 - no secret
    assert not_passing(compare_hosts(dict(shuffled))) == not_passing(expected)


def test_rehearsal_that_requires_no_ports_judges_no_cable() -> None:
    cables = swap(HEALTHY["rails"], ("h04", 1), ("h04", 6))
    assert judge_links(replace(plan_of(*lines_of(cables)), rehearsal=True), links(cables)) == Wiring()


def test_rehearsal_judges_only_the_cables_of_hosts_whose_ports_are_required() -> None:
    cables = rail_optimized(2, rails=1)
    plan = builders.with_benchmarks(plan_of(*lines_of(cables), hosts=2), benchmark={"verbs": {}})
    first, second = plan.hosts
    rehearsal = replace(plan, rehearsal=True, hosts=(replace(first, verbs_required=True), second))
    wiring = judge_links(rehearsal, links(cables))
    assert [(item.host, item.verdict) for item in wiring.verdicts] == [("h01", PASS)]
    assert wiring.summary == "1 of 1 cables as in the manifest"


def test_swapped_cables_of_one_adapter_with_two_ports_are_one_cause() -> None:
    def ports(host: str, switches: tuple[str, str]) -> HostLinks:
        return HostLinks(
            host=host,
            has_record=True,
            links=tuple(
                PortLink(
                    host=host, scope=f"hca=mlx5_0,port={port}", slot=f"0000:19:00.0 port {port}", names=frozenset(),
                    is_fastest=True, switch=switch, switch_id=switch, port=host[1:],
                )
                for port, switch in enumerate(switches, 1)
            ),
        )  # fmt: skip

    fleet = [ports(host, ("ib1", "ib2") if host != "h04" else ("ib2", "ib1")) for host in hosts_of(6)]
    (cause,) = causes_of(judge_links(plan_of(hosts=6), fleet))
    assert cause.title == "adapter mlx5_0 of h04 has the cables of its ports swapped"
    assert cause.why.startswith("adapter mlx5_0, port 1 of h04 at ib2 04 and adapter mlx5_0, port 2 of h04 at ib1 04")


# ---- with a manifest ----


def compare_with_manifest(listed: Cables, found: Cables) -> Wiring:
    """Return the verdicts on the cables `found` if the manifest lists the cables `listed`."""
    return judge_links(plan_of(*lines_of(listed), hosts=4), links(found))


def test_cables_as_in_the_manifest_pass() -> None:
    cables = rail_optimized(4, rails=2)
    wiring = compare_with_manifest(cables, cables)
    assert not_passing(wiring) == set()
    assert wiring.summary == "8 of 8 cables as in the manifest"
    assert {(item.criterion, item.source) for item in wiring.verdicts} == {("manifest-link", "manifest: order.csv")}


@pytest.mark.parametrize(
    ("first", "second"), [(("h01", 0), ("h01", 1)), (("h02", 1), ("h03", 1)), (("h01", 0), ("h04", 1))]
)
def test_cables_swapped_against_the_manifest_are_one_cause(first: tuple[str, int], second: tuple[str, int]) -> None:
    cables = rail_optimized(4, rails=2)
    found = swap(cables, first, second)
    wiring = compare_with_manifest(cables, found)
    assert len(not_passing(wiring)) == 2
    (cause,) = causes_of(wiring)
    assert cause.problem == "swapped-cables"
    assert {(part.host, part.scope) for part in cause.parts} == {
        (host, f"nic=ens{rail}np0") for host, rail in (first, second)
    }
    for end in (first, second):
        text = f"NIC ens{end[1]}np0 of {end[0]} belongs at {' '.join(cables[end])} and is at {' '.join(found[end])}"
        assert text in cause.why


def test_cause_of_a_wrong_cable_names_the_actual_and_the_planned_switch_port() -> None:
    cables = rail_optimized(4, rails=2)
    result = {**cables, ("h02", 0): ("leaf9", "swp40"), ("h03", 1): ("leaf0-1", "swp40")}
    causes = {cause.host: cause for cause in causes_of(compare_with_manifest(cables, result))}
    assert causes["h02"].title == "NIC ens0np0 of h02 is cabled to leaf9 swp40; it belongs at leaf0-0 swp2"
    assert causes["h03"].title == "NIC ens1np0 of h03 is cabled to leaf0-1 swp40; it belongs at leaf0-1 swp3"
    assert {cause.problem for cause in causes.values()} == {"wrong-cable"}


@pytest.mark.parametrize(("other_domain", "is_same"), [("a", True), ("b", False)])
def test_switches_of_the_same_name_differ_if_their_dns_domains_differ(other_domain: str, is_same: bool) -> None:
    """Port ens0np0 is cabled to leaf1.a swp2. Its verdict names ens1np0 only if the manifest lists leaf1.a swp2 for ens1np0."""
    listed = {("h01", 0): ("leaf1.a", "swp1"), ("h01", 1): (f"leaf1.{other_domain}", "swp2")}
    wiring = compare_with_manifest(listed, {("h01", 0): ("leaf1.a", "swp2"), ("h01", 1): ("leaf9", "swp2")})
    assert (", and port ens1np0 of h01 to " in wiring.verdicts[0].detail) == is_same


def test_three_cables_moved_in_a_circle_are_three_causes() -> None:
    cables = rail_optimized(1, rails=3)
    result = {("h01", rail): cables["h01", (rail + 1) % 3] for rail in range(3)}
    wiring = judge_links(plan_of(*lines_of(cables), hosts=1), links(result))
    assert len(causes_of(wiring)) == 3
    assert all(", and port " in item.detail for item in wiring.verdicts)


@pytest.mark.parametrize(
    ("hosts", "reason"),
    [
        ([], "the host left no record"),
        ([HostLinks(host="h01", has_record=False)], "the host left no record"),
        ([HostLinks(host="h01", has_record=True)], "the host reported no switch for any of its ports"),
        (links({("h01", 5): ("leaf", "swp1")}), "the host reported no port of this name; it reported nic=ens5np0"),
        (
            links({("h01", rail): ("leaf", f"swp{rail}") for rail in range(1, 10)}),
            "the host reported no port of this name; it reported nic=ens1np0, nic=ens2np0, nic=ens3np0, nic=ens4np0, "
            "nic=ens5np0, nic=ens6np0, nic=ens7np0, nic=ens8np0 and 1 more",
        ),
        (links({("h01", 0): ("", "")}, h01="lldpctl: exit code 1"), "lldpctl: exit code 1"),
    ],
)
def test_cable_that_was_not_read_is_inconclusive(hosts: list[HostLinks], reason: str) -> None:
    wiring = judge_links(plan_of(*lines_of({("h01", 0): ("leaf01", "swp1")}), hosts=1), hosts)
    (verdict,) = wiring.verdicts
    assert (verdict.verdict, verdict.action) == (INCONCLUSIVE, "none")
    assert verdict.reason == f"port ens0np0 belongs at leaf01 swp1; whether it is there could not be verified: {reason}"


@pytest.mark.parametrize("sent", ["", "00:1f:46:ab:cd:ef", "537"])
def test_port_that_the_switch_does_not_name_is_inconclusive_only_at_the_right_switch(sent: str) -> None:
    """Some switches send a MAC address (netbox-community/netbox issue 5818) or a number in place of the name of a port.

    At the right switch, this is no evidence of a wrong cable. Without a manifest only the switch is compared, so the port passes.
    """
    cables = rail_optimized(4, rails=2)
    result = {**cables, ("h01", 0): (cables["h01", 0][0], sent), ("h02", 1): ("leaf9", sent)}
    verdicts = {item.host: item for item in compare_with_manifest(cables, result).verdicts if item.verdict != PASS}
    assert {host: item.verdict for host, item in verdicts.items()} == {"h01": INCONCLUSIVE, "h02": FAIL}
    expected = f"only `{sent}`, not a name," if sent else "no name"
    assert verdicts["h01"].reason.endswith(f"could not be verified: the switch sends {expected} for its port")
    assert verdicts["h02"].value == f"leaf9 {sent or '(unnamed port)'}"
    assert not_passing(compare_hosts({**HEALTHY["rails"], ("h03", 2): (HEALTHY["rails"]["h03", 2][0], sent)})) == set()


@pytest.mark.parametrize(("listed", "other"), [("00:1f:46:ab:cd:ef", "00:1f:46:ab:cd:00"), ("12", "7")])
def test_manifest_may_name_a_switch_port_by_the_address_or_number_that_the_switch_sends(
    listed: str, other: str
) -> None:
    cables = {("h01", 0): ("leaf01", listed)}
    assert not_passing(compare_with_manifest(cables, cables)) == set()
    result = {("h01", 0): ("leaf01", other)}
    assert not_passing(compare_with_manifest(cables, result)) == {("h01", "nic=ens0np0", FAIL)}


@pytest.mark.parametrize(
    ("switch", "port", "matches"),
    [
        ("leaf01.fab.example", "swp1s0", True),
        ("LEAF01", "SWP1S0", True),
        ("leaf01.other.example", "swp1s0", False),
        ("leaf02", "swp1s0", False),
        ("9c:05:91:aa:01:00", "swp1s0", True),
        ("9c0591aa0100", "etp3b", True),
        ("leaf01", "etp3b", True),
        ("leaf01", "swp1", False),
        ("leaf01", "", False),
        ("", "swp1s0", False),
    ],
)
def test_switch_and_port_match_in_each_form_in_which_operators_write_them(
    switch: str, port: str, matches: bool
) -> None:
    link = PortLink(
        host="h01", scope="nic=a", slot="a", names=frozenset({"a"}), is_fastest=True, switch="leaf01.fab.example",
        switch_id="9c:05:91:aa:01:00", port="swp1s0", label="etp3b",
    )  # fmt: skip
    assert link.is_at(switch, port) is matches


def test_port_that_the_manifest_lists_is_not_also_compared_with_other_hosts() -> None:
    cables = rail_optimized(8, rails=2)
    result = swap(cables, ("h01", 0), ("h01", 1))
    wiring = judge_links(plan_of(*lines_of(cables), hosts=8), links(result))
    assert [item.criterion for item in wiring.verdicts] == ["manifest-link"] * 16
    part = {key: value for key, value in cables.items() if key[0] != "h01"}
    wiring = judge_links(plan_of(*lines_of(part), hosts=8), links(result))
    assert sorted(item.criterion for item in wiring.verdicts) == ["manifest-link"] * 14 + ["rail-switch"] * 2
    assert len(causes_of(wiring)) == 1


# ---- the cable of a faulty port ----


@pytest.mark.parametrize(
    ("name", "scope", "kind"),
    [
        ("verbs.bandwidth", "hca=mlx5_0", VerdictKind.SUSPECT),
        ("verbs.mtu", "hca=mlx5_0,port=1", VerdictKind.LIMIT),
        ("infiniband.state", "hca=mlx5_0,port=1", VerdictKind.LIMIT),
        ("optics.rx_power", "nic=ens0np0,lane=2", VerdictKind.LIMIT),
        ("network.carrier", "nic=ens0np0", VerdictKind.PEERS),
    ],
)
@pytest.mark.parametrize("known_by", ["switch", "manifest", "neither"])
def test_cause_of_a_faulty_port_names_its_cable_if_it_is_known(
    name: str, scope: str, kind: VerdictKind, known_by: str
) -> None:
    cables = rail_optimized(2, rails=2)
    switch, port = cables["h01", 0]
    read = cables if known_by == "switch" else {**cables, ("h01", 0): ("", "")}
    fleet = [replace(host, links=(replace(host.links[0], adapter="mlx5_0"), *host.links[1:])) for host in links(read)]
    lines = lines_of(cables) if known_by == "manifest" else []
    failed = Verdict(host="h01", scope=scope, name=name, verdict=FAIL, criterion="x", kind=kind, reason="bad")
    (cause,) = diagnose([failed], {}, cable_ends(lines, fleet))
    end = {"switch": f"{switch} {port}", "manifest": f"{switch} {port} by the manifest", "neither": ""}[known_by]
    assert [part.cable for part in cause.parts] == [end]
    assert (f" of h01 (cable to {end}) " in cause.title) == bool(end)


@pytest.mark.parametrize("kind", ["hca", "nic"])
@pytest.mark.parametrize("known_by", ["switch", "manifest", "switch of port 1"])
def test_cause_of_an_adapter_with_two_ports_names_only_the_cable_of_the_faulty_port(kind: str, known_by: str) -> None:
    """A technician pulls the cable that the cause names, so the cause must not name the cable of the other port."""

    def link(number: int) -> PortLink:
        is_read = known_by == "switch" or (known_by == "switch of port 1" and number == 1)
        scope = f"hca=mlx5_0,port={number}" if kind == "hca" else f"nic=eth{number}"
        of_nic = {"adapter": "mlx5_0", "adapter_port": str(number)} if kind == "nic" else {}
        switch = {"switch_id": "id", "switch": "leaf0", "port": f"swp{number}"} if is_read else {}
        names = frozenset({f"mlx5_0/{number}", *(("mlx5_0",) if number == 1 else ())})
        return PortLink(
            host="h01", scope=scope, slot=f"a port {number}", names=names, is_fastest=True, **of_nic, **switch
        )

    fleet = [HostLinks(host="h01", has_record=True, links=(link(1), link(2)))]
    slots = {"mlx5_0": "swp1", "mlx5_0/2": "swp2"} if known_by == "manifest" else {}
    lines = [
        Part(host="h01", kind=LINK, slot=slot, switch="leaf0", switch_port=port, origin="x")
        for slot, port in slots.items()
    ]
    cables = cable_ends(lines, fleet)

    def named(name: str, *scopes: str) -> str:
        failed = [
            Verdict(host="h01", scope=scope, name=name, part="hca=mlx5_0", verdict=FAIL, criterion="x", reason="bad")
            for scope in scopes
        ]
        (cause,) = diagnose(failed, {}, cables)
        return cause.parts[0].cable

    suffix = " by the manifest" if known_by == "manifest" else ""
    ends = {number: f"leaf0 swp{number}{suffix}" for number in (1, 2)} | (
        {2: ""} if known_by == "switch of port 1" else {}
    )
    for number, end in ends.items():
        assert named("infiniband.state", f"hca=mlx5_0,port={number}") == end
        if kind == "nic":
            assert named("network.carrier", f"nic=eth{number}") == end
    both = " and ".join(filter(None, ends.values()))
    assert named("infiniband.state", "hca=mlx5_0,port=1", "hca=mlx5_0,port=2") == both
    assert named("verbs.bandwidth", "hca=mlx5_0") == both, (
        "the cause of a verdict on the whole adapter must name all known cables"
    )


@pytest.mark.parametrize(
    ("name", "scope"), [("infiniband.hca.firmware_version", "hca=mlx5_0"), ("gpu.temperature", "gpu=0")]
)
def test_cause_of_firmware_or_a_gpu_names_no_cable(name: str, scope: str) -> None:
    fleet = [replace(host, links=(replace(host.links[0], adapter="mlx5_0"),)) for host in links(rail_optimized(1))]
    failed = Verdict(host="h01", scope=scope, name=name, verdict=FAIL, criterion="x", reason="bad")
    (cause,) = diagnose([failed], {}, cable_ends([], fleet))
    assert [part.cable for part in cause.parts] == [""]


def test_each_interface_of_an_adapter_with_two_ports_has_the_name_of_its_own_port() -> None:
    """In a manifest, `mlx5_0` means port 1 of the adapter. If port 2 had this name too, a line with `mlx5_0` would match both."""
    plan = plan_of(hosts=1)
    readings = [
        Metric(name=f"network.{name}", unit="1", values={f"nic=eth{number}": f"{text}{number}" for number in (1, 2)})
        for name, text in (("switch_id", "id-leaf"), ("switch", "leaf"), ("switch_port", "swp"))
    ]
    interfaces = {f"hca=mlx5_0,port={number}": f"eth{number}" for number in (1, 2)}
    readings.append(Metric(name="infiniband.interface", unit="1", values=interfaces))
    result = host_links(host_view(plan, "h01", host_evidence(plan, "h01", *readings), []))
    ends = cable_ends([], [result])
    assert [ends["h01", f"hca=mlx5_0,port={number}"] for number in (1, 2)] == ["leaf1 swp1", "leaf2 swp2"]
    assert [[name for name in ("mlx5_0", "mlx5_0/2") if name in link.names] for link in result.links] == [
        ["mlx5_0"],
        ["mlx5_0/2"],
    ]


def test_manifest_gives_the_cable_of_a_port_whose_switch_cannot_be_read() -> None:
    lines = [Part(host="h01", kind=LINK, slot="mlx5_0/2", switch="leaf1", switch_port="3", origin="x line 2")]
    ends = cable_ends(lines, [HostLinks(host="h01", has_record=True)])
    assert ends["h01", "hca=mlx5_0"] == "leaf1 3 by the manifest"


# ---- readings, report and manifest file ----


def metrics(host: str, cables: Cables, kind: str = "nic") -> Iterator[Metric]:
    """Yield the cable readings of a host: of Ethernet interfaces (`kind` is `nic`) or of InfiniBand ports (`hca`)."""
    rails = {rail: end for (name, rail), end in cables.items() if name == host}
    prefix, suffix = ("network", "") if kind == "nic" else ("infiniband", ",port=1")
    scopes = {rail: f"{kind}=dev{rail}{suffix}" for rail in rails}
    of_part = {rail: f"{kind}=dev{rail}" for rail in rails}
    rate, address = ("speed", "pci_address") if kind == "nic" else ("rate", "hca.pci_address")

    def metric(name: str, values: Mapping[str, Any], unit: str = "1") -> Metric:
        return Metric(name=f"{prefix}.{name}", unit=unit, values=values)

    yield metric("switch_id", {scopes[rail]: f"id-{switch}" for rail, (switch, _) in rails.items()})
    yield metric("switch", {scopes[rail]: switch for rail, (switch, _) in rails.items()})
    yield metric("switch_port", {scopes[rail]: port for rail, (_, port) in rails.items()})
    yield metric(rate, {scopes[rail]: FASTEST if rail < 8 else MANAGEMENT for rail in rails}, "B/s")
    yield metric(address, {of_part[rail]: f"0000:{rail:02x}:00.0" for rail in rails})


def evidence(plan: Plan, cables: Cables, kind: str = "nic") -> dict[str, Evidence]:
    return {host.name: host_evidence(plan, host.name, *metrics(host.name, cables, kind)) for host in plan.hosts}


def report_on(plan: Plan, cables: Cables, kind: str = "nic") -> FleetReport:
    return merge(plan, evidence(plan, cables, kind), (FAST,))


def test_unverified_cable_of_a_port_without_a_link_is_not_a_second_cause() -> None:
    """The port is down, so its cable cannot be read. Both verdicts are one cause, with the cable end from the manifest."""
    cables = rail_optimized(2, rails=2)
    fleet = links({**cables, ("h02", 1): ("", "")}, h02="the port has no link")
    h01, h02 = (replace(host, links=(host.links[0], replace(host.links[1], adapter="mlx5_1"))) for host in fleet)
    lines = lines_of(cables)
    verdicts = judge_links(plan_of(*lines, hosts=2), [h01, h02]).verdicts
    down = Verdict(
        host="h02", scope="hca=mlx5_1,port=1", name="infiniband.state", verdict=FAIL, criterion="x", reason="DOWN"
    )
    (cause,) = diagnose([down, *verdicts], {}, cable_ends(lines, [h01, h02]))
    assert (cause.problem, cause.part) == ("port-down", "hca=mlx5_1")
    assert [part.cable for part in cause.parts] == [f"{cables['h02', 1][0]} swp2 by the manifest"]


def test_report_names_the_cable_of_a_faulty_port_in_title_and_json() -> None:
    plan, cables = plan_of(hosts=3), rail_optimized(3, rails=2)
    carrier = criterion("network.carrier", id="carrier", scope="nic", value=True)
    of_fleet = {
        host: host_evidence(
            plan, host, *metrics(host, cables), reading(host != "h02", name="network.carrier", scope="nic=dev1")
        )
        for host in hosts_of(3)
    }
    report = merge(plan, of_fleet, (replace(FAST, criteria=(*FAST.criteria, carrier)),))
    (cause,) = report.causes
    switch, port = cables["h02", 1]
    assert cause.title.startswith(f"NIC dev1 of h02 (cable to {switch} {port}) ")
    document = to_json(report)
    documents.validate(document, "report", source="the report")
    assert document["causes"][0]["parts"] == [{"host": "h02", "scope": "nic=dev1", "cable": f"{switch} {port}"}]


def cable_verdicts(report: FleetReport) -> list[Verdict]:
    return [item for item in report.verdicts if ".switch_" in item.name]


@pytest.mark.parametrize("kind", ["nic", "hca"])
def test_report_names_the_swapped_cables_and_rejects_only_their_host(kind: str) -> None:
    plan, cables = plan_of(hosts=4), rail_optimized(4, rails=4)
    healthy = report_on(plan, cables, kind)
    assert healthy.decision == ACCEPTED
    assert "Cabling: 16 of 16 ports cabled as on similar hosts" in healthy.acceptance.summary
    assert "<dt>Cabling</dt><dd>16 of 16 ports cabled as on similar hosts" in render_html(healthy)
    report = report_on(plan, swap(cables, ("h02", 1), ("h02", 3)), kind)
    assert [host.decision for host in report.hosts] == [ACCEPTED, REJECTED, ACCEPTED, ACCEPTED]
    (cause,) = report.causes
    device = "NIC dev{}" if kind == "nic" else "adapter dev{}"
    assert cause.title == f"{device.format(1)} of h02 and {device.format(3)} of h02 have their cables swapped"
    assert any(
        "have their cables swapped" in line and "orrect the cabling" in line for line in report.acceptance.summary
    )


def test_host_that_did_not_report_its_cables_is_incomplete_if_the_manifest_lists_them() -> None:
    cables = rail_optimized(2, rails=1)
    lines = [replace(line, slot="dev0") for line in lines_of(cables)]
    plan = plan_of(*lines, hosts=2)
    of_fleet = {**evidence(plan, cables), "h02": host_evidence(plan, "h02")}
    report = merge(plan, of_fleet, (FAST,))
    assert [host.decision for host in report.hosts] == [ACCEPTED, INCOMPLETE]


def test_run_without_cable_readings_has_no_cabling_line_and_no_verdict() -> None:
    plan = plan_of(hosts=4)
    report = merge(plan, {host.name: host_evidence(plan, host.name) for host in plan.hosts}, (FAST,))
    assert report.decision == ACCEPTED
    assert not cable_verdicts(report)
    assert not [line for line in report.acceptance.summary if line.startswith("Cabling")]


def test_manifest_may_name_a_port_by_its_interface_or_pci_address_or_adapter() -> None:
    plan, cables = plan_of(hosts=1), {("h01", 3): ("leaf", "7")}
    roce = Metric(name="infiniband.interface", unit="1", values={"hca=mlx5_9,port=1": "dev3"})
    for kind, names in (("nic", ("dev3", "0000:03:00.0", "mlx5_9")), ("hca", ("dev3", "dev3/1", "0000:03:00.0"))):
        of_host = host_evidence(plan, "h01", *metrics("h01", cables, kind), roce)
        for name in names:
            line = Part(host="h01", kind=LINK, slot=name, switch="leaf", switch_port="7", origin="a line 1")
            report = merge(replace(plan, manifest=(line,)), {"h01": of_host}, (FAST,))
            assert [item.verdict for item in cable_verdicts(report)] == [PASS], (kind, name)


def test_port_whose_switch_changed_during_the_run_is_inconclusive() -> None:
    plan, cables = plan_of(hosts=4), rail_optimized(4, rails=4)
    of_fleet = evidence(plan, cables)
    (record,) = of_fleet["h02"].records
    moved = tuple(metrics("h02", swap(cables, ("h02", 1), ("h02", 3))))
    first = replace(record.snapshots[0], metrics=moved)
    of_fleet["h02"] = Evidence(records=(replace(record, snapshots=(first, *record.snapshots[1:])),))
    report = merge(plan, of_fleet, (FAST,))
    assert [host.decision for host in report.hosts] == [ACCEPTED, INCOMPLETE, ACCEPTED, ACCEPTED]
    reasons = [item.reason for item in cable_verdicts(report) if item.verdict != PASS]
    assert len(reasons) == 2
    assert "the switch changed during the run: id-leaf0-3, then id-leaf0-1" in reasons[0]


CSV = """host,kind,slot,serial,port,switch,switch_port
h1,gpu,0,165,,,
h1,link,,,ens8f0np0,leaf01,swp1s0
h1,link,,,mlx5_0/1,ib1,3
"""
YAML = """
- {host: h1, kind: gpu, slot: 0, serial: "165"}
- {host: h1, kind: link, port: ens8f0np0, switch: leaf01, switch_port: swp1s0}
- {host: h1, kind: link, port: mlx5_0/1, switch: ib1, switch_port: 3}
"""


@pytest.mark.parametrize(
    ("name", "text"), [("order.csv", CSV), ("order.csv", CSV.replace(",", ";")), ("order.yml", YAML)]
)
def test_manifest_file_may_list_cables(tmp_path: Path, name: str, text: str) -> None:
    (tmp_path / name).write_text(text)
    _, *cables = read_manifest(str(tmp_path / name), ["h1"])
    assert [(part.kind, part.slot, part.switch, part.switch_port, part.serial) for part in cables] == [
        (LINK, "ens8f0np0", "leaf01", "swp1s0", ""),
        (LINK, "mlx5_0/1", "ib1", "3", ""),
    ]


def test_manifest_file_may_list_only_cables(tmp_path: Path) -> None:
    path = tmp_path / "cables.csv"
    path.write_text("host,kind,port,switch,switch_port\nh1,link,0000:1B:00.0,leaf01,swp1\n")
    (part,) = read_manifest(str(path), ["h1"])
    assert (part.slot, part.switch) == ("0000:1b:00.0", "leaf01")


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("h1,link,,,ens1,leaf01,", "switch_port is empty: every link needs host, kind, port, switch, switch_port"),
        ("h1,link,,,,leaf01,swp1", "port is empty"),
        ("h1,link,,165,ens1,leaf01,swp1", "serial must be empty for a link"),
        ("h1,link,0,,ens1,leaf01,swp1", "slot must be empty for a link"),
        ("h1,gpu,1,166,,leaf01,", "switch must be empty for a part"),
        ("h1,link,,,../x,leaf01,swp1", "port '../x'"),
        (f"h1,link,,,ens1,{'x' * 81},swp1", "give at most 80 printable characters"),
        ("h2,link,,,ens1,leaf01,swp1", "host h2 is not in the inventory"),
        ("h1,lnik,,,ens1,leaf01,swp1", "serial is empty"),
        ("h1,link,,,ens8f0np0,leaf01,swp2", "port ens8f0np0 of h1 has a cable already"),
        ("h1,link,,,ens9,LEAF01,swp1s0", "LEAF01 swp1s0 has a cable already"),
    ],
)
def test_invalid_line_for_a_cable_is_refused(tmp_path: Path, row: str, message: str) -> None:
    (tmp_path / "order.csv").write_text(f"{CSV}{row}\n")
    with pytest.raises(UsageError, match=f"order.csv line 5: .*{message}"):
        read_manifest(str(tmp_path / "order.csv"), ["h1"])


def test_plan_with_cables_is_valid_and_read_unchanged() -> None:
    plan = replace(plan_of(hosts=1), manifest=tuple(lines_of({("h01", 0): ("leaf01", "swp1")})))
    document = to_json(plan)
    documents.validate(document, "plan", source="the plan")
    assert plan_from_json(document).manifest == plan.manifest


def test_gpu_far_from_an_adapter_is_a_cause_that_does_not_call_the_gpu_faulty() -> None:
    plan, packs = plan_of(hosts=4), [item for item in read_packs([]) if item.name == "h200-sxm"]
    criteria = tuple(item for item in packs[0].criteria if item.id == "uniform-pcie-nic-path")
    scope = f"pci={pci_address(builders.gpu('h01', 0).pci_bus_id)}"
    paths = {host: "NODE" if host == "h02" else "PIX" for host in hosts_of(4)}
    of_fleet = {
        host: host_evidence(plan, host, reading(path, name="pcie.nic_path", scope=scope))
        for host, path in paths.items()
    }
    report = merge(plan, of_fleet, (replace(FAST, criteria=(*FAST.criteria, *criteria)),))
    (cause,) = report.causes
    assert (
        cause.title == "GPU 0 of h02 is not next to a network adapter as most are: its PCIe path is NODE instead of PIX"
    )
    assert "The GPU is not faulty" in handling(cause).now


# ---- the command `rackproof cables` ----


def test_cables_that_the_cables_command_lists_can_be_read_as_a_manifest(tmp_path: Path) -> None:
    cables = rail_optimized(3, rails=2)
    rows, missing = cable_rows(links(cables))
    assert missing == []
    path = tmp_path / "cables.csv"
    path.write_text("\n".join(",".join(row) for row in [LINK_COLUMNS, *rows]))
    parts = read_manifest(str(path), hosts_of(3))
    assert {(part.host, part.slot): (part.switch, part.switch_port) for part in parts} == {
        (host, f"ens{rail}np0"): end for (host, rail), end in cables.items()
    }


@pytest.mark.parametrize("text", ["=HYPERLINK(1)", "+1", "-1", "@x", "a\nb", "x" * 81, ""])
def test_switch_port_name_that_is_invalid_in_a_manifest_or_unsafe_in_a_spreadsheet_is_not_listed(text: str) -> None:
    rows, missing = cable_rows(links({("h01", 0): ("leaf", text), ("h01", 1): ("leaf", "swp1")}))
    assert [row[-1] for row in rows] == ["swp1"]
    reason = "the switch sends a name that is invalid in a manifest or unsafe in a spreadsheet"
    assert missing[0].startswith(f"NIC ens0np0 of h01: {reason}")


def test_ports_that_cannot_be_listed_have_a_reason() -> None:
    cables = {("h01", 0): ("", ""), ("h01", 1): ("leaf", "swp1"), ("h02", 1): ("leaf", "swp1")}
    others = [HostLinks(host="h03", has_record=False), HostLinks(host="h04", has_record=True)]
    assert cable_rows([*links(cables, h01="no answer"), *others]) == (
        [],
        [
            "h03: no record",
            "h04: no network port was read",
            "NIC ens0np0 of h01: no answer",
            "NIC ens1np0 of h01: several ports report that their cable ends at leaf swp1",
            "NIC ens1np0 of h02: several ports report that their cable ends at leaf swp1",
        ],
    )


def test_switches_that_share_a_name_are_listed_by_their_id() -> None:
    (host,) = links({("h01", 0): ("leaf", "swp1"), ("h01", 1): ("leaf", "swp2")})
    first, second = host.links
    rows, _ = cable_rows([replace(host, links=(replace(first, switch_id="a1"), replace(second, switch_id="a2")))])
    assert [row[3] for row in rows] == ["a1", "a2"]


@pytest.mark.parametrize(
    ("scope", "name"), [("nic=ens8", "ens8"), ("hca=mlx5_0,port=1", "mlx5_0"), ("hca=mlx5_0,port=2", "mlx5_0/2")]
)
def test_port_is_listed_under_its_manifest_name(scope: str, name: str) -> None:
    link = PortLink(host="h01", scope=scope, slot="a", names=frozenset(), is_fastest=True)
    assert link.name == name


def test_cables_command_prints_csv_or_json_and_exits_2_if_a_host_has_no_record(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    assert main(["simulate", str(run), "--hosts", "2", "--gpus", "2", "--profile", "smoke"]) == 0
    capsys.readouterr()
    assert main(["cables", str(run)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[:2] == ["host,kind,port,switch,switch_port", "r01-h01,link,mlx5_0,leaf01-rail0,1"]
    assert len(lines) == 5
    assert main(["cables", str(run), "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert (document["simulated"], len(document["cables"]), document["not_listed"]) == (True, 4, [])
    (run / "hosts" / "r01-h02.json").unlink()
    assert main(["cables", str(run)]) == 2
    assert "not listed: r01-h02: no record\n" in capsys.readouterr().err
