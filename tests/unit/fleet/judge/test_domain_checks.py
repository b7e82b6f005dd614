"""Test the verdicts on the hosts of one NVLink domain, from the readings of a few hosts.

The verdicts are on the membership of each GPU in the domain, on IMEX (the NVIDIA daemon by which hosts share GPU memory), on the
connections of IMEX between the hosts, and on NCCL's transport.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import pytest

from fleet.judge.domain_checks import NODES, TO_SWITCH, TRANSPORT, judge_domains
from fleet.judge.host_view import HostView
from fleet.judge.nvlink_domains import CLIQUE, CLUSTER, CONNECTION, NO_DOMAIN, STATE, NvlinkDomains
from schemas.plans import Plan
from schemas.records import ERROR, Observation, Value
from schemas.reports import FAIL, INCONCLUSIVE, PASS, Verdict
from tests import builders
from tests.unit.fleet.judge.small_fleet import host_evidence, one_figure_plan, pack, stage_snapshots

HOSTS = tuple(f"t{number}" for number in range(7))
UUID, OTHER_UUID = "3d2c1b0a-1111-4222-8333-444455556666", "9d2c1b0a-1111-4222-8333-444455556666"
IN_INVENTORY = one_figure_plan(*HOSTS, rackproof_gang="all", rackproof_nvlink_domain="nvl1")
BY_MODEL = one_figure_plan(*HOSTS, rackproof_gang="all")
"""Plan without an NVLink domain in the inventory: the pack states that a rack of this GPU model is one NVLink domain."""
THREE = HOSTS[:3]
Readings = Mapping[str, Mapping[str, Value]]
"""Name of a reading -> scope -> its value, or a text such as `error: lost` (status and reason) if it has no value."""


def address(host: str) -> str:
    return f"10.88.0.{HOSTS.index(host)}"


def connections(states: Mapping[str, str]) -> Readings:
    """Return the readings of the IMEX connections of a host; `states`: other host -> state of the connection to it."""
    return {
        CONNECTION: {f"imex={HOSTS.index(other)}": state for other, state in states.items()},
        "fabric.imex.node_address": {f"imex={HOSTS.index(other)}": address(other) for other in states},
    }


def healthy(host: str, hosts: Iterable[str] = THREE) -> dict[str, Mapping[str, Value]]:
    """Return the readings of a host that has one GPU and is connected to the other `hosts`."""
    return {
        CLUSTER: {"gpu=0": UUID},
        CLIQUE: {"gpu=0": 1},
        STATE: {"host": "ready"},
        NODES: {"host": len(HOSTS)},
        "fabric.imex.domain_state": {"host": "up"},
        "fabric.imex.address": {"host": address(host)},
        **connections({other: "connected" for other in hosts if other != host}),
    }


def without(readings: Readings, *names: str) -> Readings:
    return {name: values for name, values in readings.items() if name not in names}


def view(host: str, *snapshots: Readings, plan: Plan = IN_INVENTORY, **fields: Any) -> HostView:
    """Return a host with these readings, one mapping for each snapshot."""
    taken = stage_snapshots("gang", *snapshots)
    evidence = host_evidence(plan, host, snapshots=taken, **{"observations": (), **fields})
    return HostView(plan, plan.host(host), evidence, [pack(rack_is_nvlink_domain=plan is BY_MODEL)])


def judged(*views: HostView) -> list[Verdict]:
    domains = NvlinkDomains()
    for each in views:
        domains.add(each)
    return list(judge_domains(views, domains))


def of_name(verdicts: list[Verdict], name: str) -> list[tuple[str, str, str, str]]:
    """Return host, verdict, action and reason of each verdict of this name."""
    return [(item.host, item.verdict, item.action, item.reason) for item in verdicts if item.name == name]


def test_host_without_a_record_or_a_domain_is_not_judged() -> None:
    no_domain = one_figure_plan(*HOSTS)
    assert judged(view("t0", healthy("t0"), plan=no_domain)) == []
    assert judged(view("t0", healthy("t0"), gang="r1")) == [], "a host with only a gang record must not be judged"


# ---- membership ----

NAMED = "the inventory has the host in NVLink domain nvl1"
BY_RACK = "the GPU model implies that the hosts of rack r1 are one NVLink domain"


@pytest.mark.parametrize(
    ("plan", "others", "own", "expected"),
    [
        (IN_INVENTORY, NO_DOMAIN, {CLUSTER: {"gpu=0": UUID}}, (PASS, "none", f"found {UUID}")),
        (
            IN_INVENTORY, NO_DOMAIN, {CLUSTER: {"gpu=0": NO_DOMAIN}},
            (FAIL, "reboot", f"the GPU is in no NVLink domain, but {NAMED}"),
        ),
        (
            BY_MODEL, NO_DOMAIN, {CLUSTER: {"gpu=0": NO_DOMAIN}},
            (FAIL, "reboot", f"the GPU is in no NVLink domain, but {BY_RACK}"),
        ),
        (
            IN_INVENTORY, NO_DOMAIN, {CLUSTER: {"gpu=0": "unsupported: no fabric"}},
            (INCONCLUSIVE, "none", f"{NAMED}, but the GPU reports no domain: no fabric"),
        ),
        (
            IN_INVENTORY, NO_DOMAIN, {"gpu.count": {"gpu=0": 1}},
            (INCONCLUSIVE, "none", f"{NAMED}, but the GPU reports no domain: not read"),
        ),
        (IN_INVENTORY, NO_DOMAIN, {}, None),
        (BY_MODEL, NO_DOMAIN, {CLUSTER: {"gpu=0": "unsupported: no fabric"}, "gpu.count": {"gpu=0": 1}}, None),
        (
            BY_MODEL, UUID, {CLUSTER: {"gpu=0": "unsupported: no fabric"}, "gpu.count": {"gpu=0": 1}},
            (INCONCLUSIVE, "none", f"{BY_RACK}, but the GPU reports no domain: no fabric"),
        ),
        (
            BY_MODEL, NO_DOMAIN, {CLUSTER: {"gpu=0": "unsupported: no fabric"}, TO_SWITCH: {"gpu=0": 0}},
            (INCONCLUSIVE, "none", f"{BY_RACK}, but the GPU reports no domain: no fabric"),
        ),
    ],
)  # fmt: skip
def test_gpu_must_report_a_domain(
    plan: Plan, others: str, own: Readings, expected: tuple[str, str, str] | None
) -> None:
    """A GPU that reports NO_DOMAIN fails. A GPU without any reading gets no verdict here.

    A GPU that has readings, but no value of CLUSTER, is judged only in three cases:

    - The inventory names the domain of the host.
    - Another GPU of the rack reports a domain.
    - The NVLinks of the GPU end at a switch: TO_SWITCH has a value.
    """
    # A temperature is added, because a GPU of which no reading has a value is not judged here.
    own = {**own, "gpu.temperature": {"gpu=0": 40}} if any("unsupported" in str(item) for item in own.values()) else own
    verdicts = judged(view("t0", own, plan=plan), view("t1", {CLUSTER: {"gpu=0": others}}, plan=plan))
    of_first = [item for item in verdicts if item.host == "t0" and item.name == CLUSTER]
    assert [(item.verdict, item.action, item.reason) for item in of_first] == ([expected] if expected else [])
    for item in of_first:
        assert (item.scope, item.serial, item.criterion, item.basis) == ("gpu=0", "t0-0", "nvlink-domain", "published")
        assert (item.value, item.unit) == ((own[CLUSTER]["gpu=0"], "1") if item.verdict != INCONCLUSIVE else (None, ""))
        assert (item.kind, item.operator) == ("missing" if item.verdict == INCONCLUSIVE else "limit", "")


def test_last_reason_for_a_missing_domain_is_stated() -> None:
    snapshots: list[Readings] = [
        {CLUSTER: {"gpu=0": f"error: {why}", "gpu=1": "error: other"}, NODES: {"gpu=0": 1}} for why in ("first", "last")
    ]
    ((_, _, _, reason),) = of_name(judged(view("t0", *snapshots)), CLUSTER)
    assert reason.endswith("reports no domain: last")


# ---- IMEX ----


@pytest.mark.parametrize(
    ("plan", "states", "expected"),
    [
        (IN_INVENTORY, [None], (INCONCLUSIVE, "none", "not read")),
        (IN_INVENTORY, ["error: timed out"], (INCONCLUSIVE, "none", "error: timed out")),
        (
            IN_INVENTORY, ["unsupported: no nvidia-imex-ctl"],
            (FAIL, "configure", f"IMEX is not set up (no nvidia-imex-ctl), but {NAMED}"),
        ),
        (
            IN_INVENTORY, ["error: timed out", "unsupported: gone"],
            (FAIL, "configure", f"IMEX is not set up (gone), but {NAMED}"),
        ),
        (BY_MODEL, [None], None),
        (BY_MODEL, ["unsupported: no nvidia-imex-ctl"], None),
        (BY_MODEL, ["error: timed out", "error: again"], (INCONCLUSIVE, "none", "error: again")),
        (IN_INVENTORY, ["ready"], (PASS, "none", "found ready, wanted ready")),
        (IN_INVENTORY, ["unavailable"], (FAIL, "recover_imex_domain", "found unavailable, wanted ready")),
        (
            IN_INVENTORY, ["starting", "unavailable"],
            (FAIL, "recover_imex_domain", "found unavailable, wanted ready"),
        ),
        (IN_INVENTORY, ["starting", "ready"], (FAIL, "recover_imex_domain", "found starting, wanted ready")),
        (BY_MODEL, ["unavailable"], None),
        (BY_MODEL, ["ready"], (PASS, "none", "found ready, wanted ready")),
    ],
)  # fmt: skip
def test_imex_must_be_ready_if_the_inventory_names_a_domain(
    plan: Plan, states: list[str | None], expected: tuple[str, str, str] | None
) -> None:
    """`states`: the state of IMEX in each snapshot; None: it was not read."""
    snapshots = [{CLUSTER: {"gpu=0": UUID}, **({STATE: {"host": state}} if state else {})} for state in states]
    verdicts = judged(view("t0", *snapshots, plan=plan))
    assert of_name(verdicts, STATE) == ([("t0", *expected)] if expected else [])
    for item in verdicts:
        if item.verdict == FAIL:
            assert (item.scope, item.limit, item.operator, item.unit) == ("host", "ready", "eq", "1")
            assert item.value == ("absent" if item.action == "configure" else item.reason.split()[1].strip(","))
            assert item.detail == (item.reason if item.action == "configure" else "")


def test_unavailable_imex_fails_if_imex_is_ready_on_another_host_of_the_rack() -> None:
    states = {"t0": "unavailable", "t1": "ready"}
    views = [view(host, {STATE: {"host": state}}, plan=BY_MODEL) for host, state in states.items()]
    assert [(host, verdict) for host, verdict, *_ in of_name(judged(*views), STATE)] == [("t0", FAIL), ("t1", PASS)]


@pytest.mark.parametrize(
    ("plan", "count", "expected"),
    [
        (IN_INVENTORY, 7, PASS),
        (IN_INVENTORY, 8, PASS),
        (IN_INVENTORY, 6, FAIL),
        (IN_INVENTORY, "many", None),
        (IN_INVENTORY, "error: lost", None),
        (BY_MODEL, 6, None),
        (replace(IN_INVENTORY, hosts=IN_INVENTORY.hosts[:1]), 0, None),
        (replace(IN_INVENTORY, hosts=IN_INVENTORY.hosts[:2]), 1, FAIL),
        (
            replace(IN_INVENTORY, hosts=(*IN_INVENTORY.hosts[:2], replace(IN_INVENTORY.hosts[2], nvlink_domain="b"))),
            2,
            PASS,
        ),
    ],
)
def test_number_of_hosts_in_the_imex_configuration_is_compared_with_the_inventory(
    plan: Plan, count: Value, expected: str | None
) -> None:
    verdicts = judged(view("t0", {**healthy("t0"), NODES: {"host": count}}, plan=plan))
    result = [item for item in verdicts if item.name == NODES]
    assert [item.verdict for item in result] == ([expected] if expected else [])
    for item in result:
        wanted = sum(host.nvlink_domain == "nvl1" for host in plan.hosts)
        assert (item.value, item.limit, item.operator) == (count, wanted, "ge")
        hosts = "1 host" if count == 1 else f"{count} hosts"
        where = f"{hosts} in the configuration of IMEX; the inventory has {wanted} in NVLink domain nvl1"
        assert item.reason == f"found {where}"
        assert item.action == ("none" if expected == PASS else "configure")


def test_last_reading_of_the_number_of_imex_hosts_is_judged() -> None:
    few = {**healthy("t0"), NODES: {"host": 1}}
    assert [verdict for _, verdict, *_ in of_name(judged(view("t0", few, healthy("t0"))), NODES)] == [PASS]
    assert [verdict for _, verdict, *_ in of_name(judged(view("t0", healthy("t0"), few)), NODES)] == [FAIL]


# ---- connections ----


@pytest.mark.parametrize(
    ("readings", "why"),
    [
        ({}, "the address of this host in the IMEX domain is not known"),
        (connections({"t1": "error: first", "t2": "error: last"}), "last"),
        (connections({"t1": "error: first", "t2": "unsupported: last"}), "first"),
        (connections({"t1": "connected"}), "the address of this host in the IMEX domain is not known"),
    ],
)
def test_connections_of_a_host_without_an_address_are_inconclusive(readings: Readings, why: str) -> None:
    result = of_name(judged(view("t0", {STATE: {"host": "ready"}, **readings})), CONNECTION)
    assert result == [("t0", INCONCLUSIVE, "none", f"the IMEX connections of the host could not be read: {why}")]


def connection_verdict(own: Mapping[str, str], *others: HostView, **readings: Any) -> tuple[str, str, str] | None:
    """Return verdict, action and reason on the connections of t0.

    `own`: other host -> state of the connection to it, as t0 reports it. If the state is "", t0 does not report the connection.
    For hosts that are not in `own`, t0 reports `connected`.
    """
    states = dict.fromkeys(HOSTS[1:], "connected") | dict(own)
    first = {**healthy("t0"), **connections({other: state for other, state in states.items() if state}), **readings}
    result = of_name(judged(view("t0", first), *others), CONNECTION)
    return next((item[1:] for item in result if item[0] == "t0"), None)


BAD = "recovering"
DEGRADED = {"fabric.imex.domain_state": {"host": "degraded"}}


@pytest.mark.parametrize(
    ("own", "expected"),
    [
        ({}, (PASS, "none", "connected to 6 hosts")),
        (dict.fromkeys(HOSTS[1:], ""), None),
        ({"t1": BAD}, (PASS, "none", "5 of 6 hosts are connected; the others are at fault or absent from this run")),
        (
            {"t1": BAD, "t2": "never_connected"},
            (FAIL, "recover_imex_domain", "not connected: 10.88.0.1 (recovering), 10.88.0.2 (never connected)"),
        ),
        (
            dict.fromkeys(HOSTS[1:5], BAD),
            (FAIL, "recover_imex_domain", f"not connected: {', '.join(f'10.88.0.{at} ({BAD})' for at in range(1, 5))}"),
        ),
        (
            dict.fromkeys(HOSTS[1:6], BAD),
            (FAIL, "recover_imex_domain",
             f"not connected: {', '.join(f'10.88.0.{at} ({BAD})' for at in range(1, 5))} and 1 more"),
        ),
        (
            {"t1": BAD, "t2": "version_mismatch"},
            (FAIL, "configure", "not connected: 10.88.0.1 (recovering), 10.88.0.2 (version mismatch)"),
        ),
        (
            {"t1": "not_reported", "t2": "not_reported"},
            (INCONCLUSIVE, "none", "the domain is not up, and IMEX does not report the connection to 2 hosts"),
        ),
        (
            {"t1": BAD, "t2": "not_reported"},
            (INCONCLUSIVE, "none", "the domain is not up, and IMEX does not report the connection to 1 host"),
        ),
    ],
)  # fmt: skip
def test_one_broken_connection_is_attributed_to_the_other_host_and_several_to_this_host(
    own: Mapping[str, str], expected: tuple[str, str, str] | None
) -> None:
    """The other hosts have no record, so only t0 reports the connections."""
    assert connection_verdict(own, **DEGRADED) == expected


def test_connections_that_are_not_reported_pass_if_the_domain_is_up() -> None:
    assert connection_verdict({"t1": "not_reported"}) == (PASS, "none", "connected to 6 hosts")


def test_host_whose_only_connection_is_broken_is_inconclusive() -> None:
    own = dict.fromkeys(HOSTS[2:], "") | {"t1": BAD}
    reason = "no connection works: 1 host at fault or absent from this run"
    assert connection_verdict(own) == (INCONCLUSIVE, "none", reason)


def test_host_that_reports_no_connection_fails_if_others_are_not_connected_to_it() -> None:
    others = [view(host, {**healthy(host), **connections({"t0": BAD})}) for host in ("t2", "t1")]
    expected = (FAIL, "recover_imex_domain", f"not connected: t1 ({BAD}), t2 ({BAD})")
    assert connection_verdict(dict.fromkeys(HOSTS[1:], ""), *others) == expected


def test_verdict_on_failed_connections_has_their_number_and_the_limit_0() -> None:
    broken = {**healthy("t0"), **connections({"t1": BAD, "t2": BAD})}
    (failing,) = [item for item in judged(view("t0", broken)) if item.name == CONNECTION]
    assert (failing.value, failing.limit, failing.operator, failing.detail) == (2, 0, "eq", failing.reason)
    (passing,) = [item for item in judged(view("t0", healthy("t0"))) if item.name == CONNECTION]
    assert (passing.value, passing.limit, passing.scope) == (0, 0, "host")


# ---- NCCL's transport ----

ENV_OFF = replace(
    IN_INVENTORY, hosts=tuple(replace(host, environment={"NCCL_MNNVL_ENABLE": "0"}) for host in IN_INVENTORY.hosts)
)
LAUNCH = builders.launch("gang", THREE)


def transport(value: str, stage: str = "gang", scope: str = "gang=all") -> Observation:
    return builders.observation(TRANSPORT, value, scope=scope, stage=stage)


def transport_verdicts(
    observations: tuple[Observation, ...],
    change: Mapping[str, Readings] | None = None,
    *,
    plan: Plan = IN_INVENTORY,
    hosts: tuple[str, ...] = THREE,
    members: tuple[str, ...] = THREE,
) -> list[tuple[str, str, str, str]]:
    """Return host, verdict, action and detail of each verdict on the transport. Each host reports the observations.

    `change`: host -> its readings; a host that is not in it has healthy readings.
    """
    launches = (builders.launch("gang", members),)
    views = [
        view(host, (change or {}).get(host, healthy(host)), plan=plan, observations=observations, launches=launches)
        for host in hosts
    ]
    verdicts = [item for item in judged(*views) if item.name == TRANSPORT]
    assert all((item.scope, item.stage, item.limit) == ("gang=all", "gang", "P2P/MNNVL") for item in verdicts)
    return [(item.host, item.verdict, item.action, item.detail) for item in verdicts]


def unused(cause: str) -> str:
    """Return the detail of a failed verdict on the transport."""
    return f"NCCL does not use NVLink between the hosts of domain nvl1; {cause}"


CHECK = unused(
    "check NCCL_MNNVL_ENABLE and NCCL_CUMEM_ENABLE in the environment, nvidia-imex-ctl -N, and that processes may use "
    "/dev/nvidia-caps-imex-channels"
)


@pytest.mark.parametrize(
    ("observations", "expected"),
    [
        ((), []),
        ((transport("P2P/MNNVL"),), [("t0", PASS, "none", "")]),
        ((transport("P2P/MNNVL/read+P2P/MNNVL"),), [("t0", PASS, "none", "")]),
        ((transport("P2P/MNNVL+NET/IB"),), [("t0", FAIL, "configure", CHECK)]),
        ((transport("NET/IB"), transport("P2P/MNNVL")), [("t0", PASS, "none", "")]),
        ((transport("NET/IB", stage="benchmark"),), []),
        ((transport("NET/IB", scope="host"),), []),
        ((replace(transport("NET/IB"), status=ERROR, value=None, reason="lost"),), []),
    ],
)
def test_launch_has_one_verdict_on_its_last_transport(
    observations: tuple[Observation, ...], expected: list[tuple[str, str, str, str]]
) -> None:
    assert transport_verdicts(observations) == expected


def test_each_launch_has_a_verdict() -> None:
    on_ib = (transport("NET/IB"),)
    pairs = [("t0", "t1"), ("t2", "t3")]
    launches = {host: (builders.launch("gang", pair),) for pair in pairs for host in pair}
    views = [view(host, healthy(host), observations=on_ib, launches=launches[host]) for host in HOSTS[:4]]
    assert [host for host, *_ in of_name(judged(*views), TRANSPORT)] == ["t0", "t2"]


@pytest.mark.parametrize(
    ("change", "options"),
    [
        ({}, {"members": ("t0",)}),
        ({"t1": {**healthy("t1"), CLIQUE: {"gpu=0": 2}}}, {}),
        ({"t1": {**healthy("t1"), CLUSTER: {"gpu=0": OTHER_UUID}}}, {}),
        ({"t1": without(healthy("t1"), CLUSTER)}, {}),
        ({host: {**healthy(host), CLUSTER: {"gpu=0": NO_DOMAIN}} for host in THREE}, {}),
        ({}, {"hosts": ("t0", "t1")}),
    ],
)
def test_transport_is_judged_only_for_several_hosts_that_are_all_in_one_partition(
    change: Mapping[str, Readings], options: dict[str, Any]
) -> None:
    assert transport_verdicts((transport("NET/IB"),), change, **options) == []


def test_transport_is_attributed_to_the_host_that_imex_does_not_connect() -> None:
    change = {
        "t1": {**healthy("t1"), **connections({"t0": BAD, "t2": BAD})},
        "t0": {**healthy("t0"), **connections({"t1": BAD, "t2": "connected"})},
        "t2": {**healthy("t2"), **connections({"t1": BAD, "t0": "connected"})},
    }
    cause = unused("IMEX does not connect t1 to the others")
    assert transport_verdicts((transport("NET/IB"),), change) == [("t1", FAIL, "configure", cause)]
    off = transport_verdicts((transport("NET/IB"),), change, plan=ENV_OFF)
    assert off == [("t1", FAIL, "configure", unused("rackproof_environment sets NCCL_MNNVL_ENABLE=0"))]


def test_failed_verdict_on_a_transport_that_the_inventory_disables_names_the_variable() -> None:
    one = view("t0", healthy("t0"), plan=ENV_OFF, observations=(transport("NET/IB"),), launches=(LAUNCH,))
    views = [one, *(view(host, healthy(host), plan=ENV_OFF) for host in THREE[1:])]
    (verdict,) = [item for item in judged(*views) if item.name == TRANSPORT]
    detail = unused("rackproof_environment sets NCCL_MNNVL_ENABLE=0")
    assert (verdict.value, verdict.reason) == ("NET/IB", f"found NET/IB, wanted P2P/MNNVL: {detail}")
