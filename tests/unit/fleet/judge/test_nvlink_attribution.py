"""Broken connections between the hosts of an NVLink domain are attributed to the hosts at fault.

IMEX is NVIDIA's daemon that joins the hosts of a domain. Each host reports the state of its daemon, and the state of its
connection to each other daemon.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pytest

from fleet.judge.host_view import HostView
from fleet.judge.nvlink_domains import CLIQUE, CLUSTER, CONNECTION, NO_DOMAIN, STATE, NvlinkDomains
from schemas.records import Value
from tests.unit.fleet.judge.test_domain_checks import HOSTS, UUID, address, connections, view

NAME = "domain nvl1"
BAD, INVALID = "recovering", "invalid"
Broken = Mapping[str, Mapping[str, str]]
"""Host -> other host -> state of the connection."""


def member(host: str, broken: Mapping[str, str], *, ready: bool = True, has_address: bool = True) -> HostView:
    """Return a host that is connected to all others, except those in `broken`: other host -> state of the connection."""
    states = {other: "connected" for other in HOSTS if other != host} | dict(broken)
    readings: dict[str, Mapping[str, Value]] = {STATE: {"host": "ready" if ready else "unavailable"}}
    if has_address:
        readings["fabric.imex.address"] = {"host": address(host)}
    return view(host, {**readings, **connections(states)})


def domain_of(broken: Broken, *, not_ready: tuple[str, ...] = ()) -> tuple[NvlinkDomains, dict[str, HostView]]:
    """Return the domain of the hosts in `broken`, and a view of each host."""
    domains = NvlinkDomains()
    views = {host: member(host, others, ready=host not in not_ready) for host, others in broken.items()}
    for each in views.values():
        domains.add(each)
    return domains, views


@pytest.mark.parametrize(
    ("broken", "not_ready", "attributed"),
    [
        ({"t0": {}, "t1": {}}, (), {}),
        ({"t0": {"t1": BAD}, "t1": {}}, (), {"t0": {"t1": BAD}, "t1": {"t0": BAD}}),
        ({"t0": {"t1": BAD}, "t1": {"t0": BAD}}, (), {"t0": {"t1": BAD}, "t1": {"t0": BAD}}),
        ({"t0": {"t1": BAD}, "t1": {}}, ("t0",), {"t0": {"t1": BAD}}),
        ({"t0": {"t1": BAD}, "t1": {}}, ("t1",), {"t1": {"t0": BAD}}),
        ({"t0": {"t1": BAD, "t2": BAD}, "t1": {}, "t2": {}}, (), {"t0": {"t1": BAD, "t2": BAD}}),
        ({"t0": {"t2": BAD}, "t1": {"t2": BAD}, "t2": {}}, (), {"t2": {"t0": BAD, "t1": BAD}}),
        # A host whose daemon does not work is at fault, even if another host has more broken connections.
        (
            {"t0": {"t1": BAD, "t2": BAD, "t3": BAD}, "t1": {}, "t2": {}, "t3": {}}, ("t3",),
            {"t3": {"t0": BAD}, "t0": {"t1": BAD, "t2": BAD}},
        ),
        # The host with most broken connections is at fault, then the host with most of the broken connections that remain.
        (
            {"t0": {"t1": BAD, "t2": BAD, "t3": BAD}, "t4": {"t5": BAD, "t6": BAD}, "t1": {}, "t5": {}}, (),
            {"t0": {"t1": BAD, "t2": BAD, "t3": BAD}, "t4": {"t5": BAD, "t6": BAD}},
        ),
        # t1 and t2 have two broken connections each. t1 is at fault, because its address is lower.
        # Then one connection remains. It is attributed to both ends.
        (
            {"t3": {"t2": BAD}, "t2": {"t1": BAD}, "t1": {"t0": BAD}, "t0": {}}, (),
            {"t1": {"t0": BAD, "t2": BAD}, "t2": {"t3": BAD}, "t3": {"t2": BAD}},
        ),
        # If both ends have only one broken connection, the end that is not in the run is at fault.
        ({"t0": {"t1": BAD}}, (), {}),
        ({"t6": {"t1": BAD}}, (), {}),
        # `invalid` means that this end could not read the state. Then the state from the other end is used.
        (
            {"t0": {"t1": INVALID, "t2": BAD}, "t1": {"t0": "version_mismatch"}, "t2": {"t0": INVALID}}, (),
            {"t0": {"t1": "version_mismatch", "t2": BAD}},
        ),
        ({"t0": {"t1": BAD, "t2": INVALID}, "t1": {"t0": "version_mismatch"}}, (), {"t0": {"t1": BAD, "t2": INVALID}}),
    ],
)  # fmt: skip
def test_broken_connections_are_attributed_to_the_host_at_fault(
    broken: Broken, not_ready: tuple[str, ...], attributed: Broken
) -> None:
    domains, views = domain_of(broken, not_ready=not_ready)
    names = {address(host): host for host in HOSTS}
    result = {
        host: {names.get(other, other): state for other, state in domains.broken(each).items()}
        for host, each in views.items()
    }
    assert {host: others for host, others in result.items() if others} == attributed


def test_other_end_is_named_by_its_host_or_else_by_its_address() -> None:
    domains, views = domain_of({"t0": {"t1": BAD, "t2": BAD}, "t1": {}})
    assert domains.broken(views["t0"]) == {"t1": BAD, "10.88.0.2": BAD}


def test_host_without_an_address_is_not_at_fault() -> None:
    domains = NvlinkDomains()
    views = [member("t0", {"t1": BAD, "t2": BAD}, ready=False, has_address=False), member("t1", {}), member("t2", {})]
    for each in views:
        domains.add(each)
    assert [domains.broken(each) for each in views] == [{}, {}, {}]


@pytest.mark.parametrize(
    ("broken", "not_ready", "hosts", "at_fault"),
    [
        ({"t0": {}, "t1": {}}, (), ("t0", "t1"), ""),
        ({"t1": {}, "t0": {}}, ("t0", "t1"), ("t0", "t1"), "t0"),
        ({"t0": {}, "t1": {}}, ("t1",), ("t0", "t1"), "t1"),
        ({"t0": {}, "t1": {}}, ("t1",), ("t0",), ""),
        ({"t0": {}, "t1": {"t2": BAD}, "t2": {}}, ("t0",), ("t0", "t1", "t2"), "t1"),
        ({"t0": {"t1": BAD, "t2": BAD}, "t1": {}, "t3": {}}, ("t3",), ("t0", "t1", "t3"), "t0"),
        ({"t0": {"t1": BAD, "t2": BAD}, "t1": {}, "t3": {}}, ("t3",), ("t1", "t3"), "t3"),
        ({"t0": {"t2": BAD}, "t1": {"t2": BAD}, "t2": {}}, (), ("t0", "t1", "t2"), "t2"),
    ],
)
def test_host_with_most_attributed_connections_is_at_fault(
    broken: Broken, not_ready: tuple[str, ...], hosts: tuple[str, ...], at_fault: str
) -> None:
    """If no connection is attributed to any of `hosts`, a host whose daemon does not work is at fault."""
    assert domain_of(broken, not_ready=not_ready)[0].host_at_fault(NAME, hosts) == at_fault


def test_host_whose_state_of_imex_is_unknown_is_not_at_fault() -> None:
    domains = NvlinkDomains()
    domains.add(view("t0", {"fabric.imex.address": {"host": address("t0")}}))
    assert domains.host_at_fault(NAME, ("t0",)) == ""
    assert not domains.has_imex(NAME)


def test_host_that_is_added_later_changes_the_attribution() -> None:
    domains, views = domain_of({"t0": {"t1": BAD}})
    assert domains.host_at_fault(NAME, HOSTS) == "", "the other end is not in the run"
    domains.add(member("t1", {}))
    assert domains.broken(views["t0"]) == {"t1": BAD}
    more, _ = domain_of({"t2": {"t1": BAD}})
    domains.update(more)
    assert domains.broken(views["t0"]) == {}, "two hosts are not connected to t1"
    assert domains.host_at_fault(NAME, HOSTS) == "t1"


def test_domain_has_imex_only_if_the_daemon_of_some_host_works() -> None:
    domains, _ = domain_of({"t0": {}, "t1": {}}, not_ready=("t0",))
    assert [domains.has_imex(name) for name in (NAME, "domain other")] == [True, False]
    domains, _ = domain_of({"t0": {}, "t1": {}}, not_ready=("t0", "t1"))
    assert not domains.has_imex(NAME)


def test_cliques_of_hosts_are_the_pairs_of_domain_uuid_and_clique_id_of_their_gpus() -> None:
    domains = NvlinkDomains()
    domains.add(view("t0", {CLUSTER: {"gpu=0": UUID, "gpu=1": UUID}, CLIQUE: {"gpu=0": 1, "gpu=1": 2}}))
    domains.add(view("t1", {CLUSTER: {"gpu=0": UUID}}))
    domains.add(view("t2", {CLIQUE: {"gpu=0": 3}}))
    pairs = {host: domains.cliques(NAME, [host]) for host in HOSTS[:4]}
    nothing = {(NO_DOMAIN, None)}
    assert pairs == {"t0": {(UUID, 1), (UUID, 2)}, "t1": {(UUID, None)}, "t2": nothing, "t3": nothing}
    assert domains.cliques(NAME, ["t0", "t1"]) == pairs["t0"] | pairs["t1"]
    assert domains.cliques("domain other", ["t0"]) == nothing


@pytest.mark.parametrize(
    ("uuids", "is_reported"), [({"gpu=0": NO_DOMAIN}, False), ({}, False), ({"gpu=0": NO_DOMAIN, "gpu=1": UUID}, True)]
)
def test_domain_is_reported_if_any_gpu_reports_a_domain_uuid_other_than_zero(
    uuids: Mapping[str, Value], is_reported: bool
) -> None:
    domains = NvlinkDomains()
    domains.add(view("t0", {CLUSTER: {"gpu=0": NO_DOMAIN}}))
    domains.add(view("t1", {CLUSTER: uuids}))
    assert domains.is_reported(NAME) == is_reported
    assert not domains.is_reported("domain other")


STATES = connections({"t1": "connected", "t2": BAD, "t3": "not_reported", "t4": "not_reported"})


@pytest.mark.parametrize(
    ("domain_states", "unreported"), [([], 2), (["up"], 0), (["degraded"], 2), (["up", "degraded"], 2)]
)
def test_unreported_connections_do_not_count_if_every_snapshot_reports_the_domain_as_up(
    domain_states: list[str], unreported: int
) -> None:
    readings = [{"fabric.imex.domain_state": {"host": state}} for state in domain_states] or [{}]
    domains = NvlinkDomains()
    first = view("t0", *({**STATES, **each} for each in readings))
    domains.add(first)
    result = domains.member(first)
    assert (result.peers, result.unreported, result.broken) == (4, unreported, {"10.88.0.2": BAD})


@pytest.mark.parametrize(
    ("states", "is_ready"),
    [
        ([], None),
        (["ready"], True),
        (["unavailable"], False),
        (["ready", "unavailable"], False),
        (["unavailable", "ready"], False),
        (["error: lost"], None),
    ],
)
def test_daemon_of_a_member_works_if_every_reading_is_ready(states: list[str], is_ready: bool | None) -> None:
    domains = NvlinkDomains()
    first = view("t0", *({STATE: {"host": state}} for state in states))
    domains.add(first)
    assert domains.member(first).is_ready is is_ready


def test_last_address_of_a_host_is_used_and_a_peer_without_an_address_is_named_by_scope() -> None:
    domains = NvlinkDomains()
    states = {CONNECTION: {"imex=1": BAD}}
    first = view("t0", {**states, "fabric.imex.address": {"host": "a"}}, {"fabric.imex.address": {"host": "b"}})
    domains.add(first)
    assert domains.member(first).address == "b"
    assert domains.member(first).broken == {"imex=1": BAD}
    other = view("t1", {})
    domains.add(other)
    assert domains.member(other).address == ""


def test_host_without_a_host_record_or_without_a_domain_is_no_member() -> None:
    domains = NvlinkDomains()
    first = member("t0", {}, ready=True)
    plan = replace(first.plan, hosts=tuple(replace(host, nvlink_domain="") for host in first.plan.hosts))
    domains.add(HostView(plan, plan.host("t0"), first.evidence, ()))
    domains.add(view("t1", {STATE: {"host": "ready"}}, gang="all"))
    assert not domains.has_imex(NAME)
    assert not domains.has_imex("")
