"""Test the verdicts on NVLink domains of several hosts: one cause names the host at fault. Hosts without a domain are not judged.

IMEX is NVIDIA's daemon that joins the hosts of an NVLink domain.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache
from typing import Any

import pytest

from fleet.diagnosis.diagnose import diagnose
from fleet.judge.criteria import read_packs
from fleet.judge.domain_checks import CRITERION, NODES, TO_SWITCH, TRANSPORT
from fleet.judge.evidence import Evidence, Planned
from fleet.judge.gather import gather
from fleet.judge.judge import host_views, judge, judge_hosts
from fleet.judge.nvlink_domains import CLIQUE, CLUSTER, CONNECTION, NO_DOMAIN, STATE
from schemas.plans import Plan
from schemas.readings import READINGS
from schemas.records import Metric, Observation, Record, Value
from schemas.reports import FAIL, INCONCLUSIVE, PASS, Cause, Verdict
from tests import builders

HOSTS = tuple(f"t{number:02}" for number in range(6))
UUID, OTHER_UUID = "3d2c1b0a-1111-4222-8333-444455556666", "9d2c1b0a-1111-4222-8333-444455556666"
Readings = dict[str, dict[str, Value]]
"""Name -> scope -> value; a value that starts with `unsupported:` or `error:` is absent."""
PACKS = read_packs(())


@cache
def planned(**variables: Any) -> Plan:
    plan = builders.plan(*HOSTS, profile="smoke", gpu_count=2, rackproof_gang="all", **variables)
    return builders.with_benchmarks(plan, gang={"collective": {"ops": ["all_reduce"], "sizes_bytes": [64 << 20]}})


def healthy(host: str, hosts: tuple[str, ...] = HOSTS) -> Readings:
    """Return the readings of a host whose IMEX daemon is connected to the daemons of all other hosts."""
    index = hosts.index(host)
    others = {f"imex={number}": number for number in range(len(hosts)) if number != index}
    return {
        CLUSTER: {"gpu=0": UUID, "gpu=1": UUID},
        CLIQUE: {"gpu=0": 32766, "gpu=1": 32766},
        STATE: {"host": "ready"},
        "fabric.imex.domain_state": {"host": "up"},
        NODES: {"host": len(hosts)},
        "fabric.imex.address": {"host": f"10.88.0.{index}"},
        "fabric.imex.node_address": {f"imex={number}": f"10.88.0.{number}" for number in range(len(hosts))},
        CONNECTION: dict.fromkeys(others, "connected"),
    }


def with_transport(item: Observation, transport: str) -> Observation:
    """Return the observation with this transport: as the value of `collective.transport`, or as the parameter of a figure."""
    if item.name == TRANSPORT:
        return replace(item, value=transport)
    return replace(item, params={**item.params, "transport": transport}) if "transport" in item.params else item


def evidence(
    plan: Plan, change: Callable[[dict[str, Readings]], None], transport: str = "P2P/MNNVL"
) -> dict[str, Evidence]:
    """Return the evidence of a healthy domain after `change` was applied to the readings (host -> readings)."""
    readings = {host.name: healthy(host.name) for host in plan.hosts}
    change(readings)
    result = {}
    for host, of_host in builders.evidence(plan).items():
        model = {"gb200": "NVIDIA GB200"}.get(plan.host(host).gpu_model, "NVIDIA H200")
        records = tuple(
            replace(with_readings(record, readings[host]), gpus=tuple(replace(gpu, name=model) for gpu in record.gpus))
            for record in of_host.records
        )
        result[host] = builders.with_observations(
            replace(of_host, records=records),
            lambda item: with_transport(item, transport),
            gang=True,
        )
    return result


def with_readings(record: Record, readings: Readings) -> Record:
    metrics = [metric(name, values) for name, values in readings.items()]
    snapshots = [
        replace(item, metrics=(*(old for old in item.metrics if old.name not in readings), *metrics))
        for item in record.snapshots
    ]
    return replace(record, snapshots=tuple(snapshots))


def metric(name: str, values: Mapping[str, Value]) -> Metric:
    absent = {scope: value for scope, value in values.items() if str(value).startswith(("unsupported:", "error:"))}
    return Metric(
        name=name,
        unit=READINGS[name].unit,
        values={scope: value for scope, value in values.items() if scope not in absent},
        absent={scope: str(value) for scope, value in absent.items()},
    )


def judged(
    change: Callable[[dict[str, Readings]], None] = lambda readings: None,
    *,
    domain: str = "nvl1",
    transport: str = "P2P/MNNVL",
    **variables: Any,
) -> list[Verdict]:
    """Return the verdicts on the hosts after `change`. `domain`: their NVLink domain in the inventory; empty: none."""
    plan = planned(**({"rackproof_nvlink_domain": domain} if domain else {}), **variables)
    return judge(plan, evidence(plan, change, transport), PACKS)


def not_passing(verdicts: list[Verdict]) -> set[tuple[str, str, str, str]]:
    return {(item.host, item.scope, item.name, item.verdict) for item in verdicts if item.verdict != PASS}


@cache
def healthy_verdicts() -> list[Verdict]:
    return judged()


def findings(verdicts: list[Verdict]) -> set[tuple[str, str, str, str]]:
    """Return the verdicts that are not passes, except those that a healthy domain has too."""
    return not_passing(verdicts) - not_passing(healthy_verdicts())


def causes(verdicts: list[Verdict]) -> list[Cause]:
    usual = {cause.title for cause in diagnose(healthy_verdicts(), planned().gangs())}
    return [cause for cause in diagnose(verdicts, planned().gangs()) if cause.title not in usual]


def test_healthy_domain_passes() -> None:
    verdicts = healthy_verdicts()
    of_domain = [item for item in verdicts if item.criterion == CRITERION]
    assert {item.verdict for item in of_domain} == {PASS}
    assert {item.name for item in of_domain} == {CLUSTER, STATE, NODES, CONNECTION, TRANSPORT}
    assert {item.host for item in of_domain} == {*HOSTS}
    assert not_passing(verdicts) == set()


def with_imex_down(host: str) -> Callable[[dict[str, Readings]], None]:
    """Return a change after which the IMEX daemon of a host does not run, and no other host is connected to it."""

    def change(readings: dict[str, Readings]) -> None:
        number = HOSTS.index(host)
        for other, of_host in readings.items():
            of_host["fabric.imex.domain_state"]["host"] = "degraded"
            if other == host:
                of_host[STATE]["host"] = "unavailable"
                of_host[CONNECTION] = dict.fromkeys(of_host[CONNECTION], "invalid")
            else:
                of_host[CONNECTION][f"imex={number}"] = "never_connected"

    return change


@pytest.mark.parametrize("host", HOSTS)
def test_host_with_imex_down_is_the_only_host_named_and_has_one_cause(host: str) -> None:
    verdicts = judged(with_imex_down(host), transport="NET/IB/GDRDMA+P2P/MNNVL")
    failing = {(name, of_host) for of_host, _, name, verdict in not_passing(verdicts) if name.startswith("fabric.")}
    assert failing == {(STATE, host), (CONNECTION, host)}
    assert {item[0] for item in not_passing(verdicts)} == {host}
    (cause,) = causes(verdicts)
    assert cause.hosts == (host,)
    assert (cause.problem, cause.action) == ("nvlink-domain", "recover_imex_domain")
    assert (
        cause.title == f"{host} has the IMEX daemon (it joins the hosts of an NVLink domain) in the state unavailable"
    )


def test_host_that_no_other_host_reaches_is_named_even_if_its_daemon_is_ready() -> None:
    def change(readings: dict[str, Readings]) -> None:
        with_imex_down("t03")(readings)
        readings["t03"][STATE]["host"] = "ready"

    (cause,) = causes(judged(change))
    assert cause.hosts == ("t03",)
    assert cause.title == "t03 is not connected by IMEX to 5 other hosts of its NVLink domain"
    assert cause.why.startswith("not connected: t00 (never connected), t01 (never connected)")


@pytest.mark.parametrize("state", ["version_mismatch", "node_map_mismatch"])
def test_wrong_version_or_node_map_has_the_action_configure(state: str) -> None:
    def change(readings: dict[str, Readings]) -> None:
        for host, of_host in readings.items():
            for scope in of_host[CONNECTION]:
                if "t02" in (host, HOSTS[int(scope.partition("=")[2])]):
                    of_host[CONNECTION][scope] = state

    (cause,) = causes(judged(change))
    assert (cause.hosts, cause.action) == (("t02",), "configure")


def test_single_broken_connection_is_attributed_to_both_ends() -> None:
    def change(readings: dict[str, Readings]) -> None:
        readings["t01"][CONNECTION]["imex=4"] = "recovering"

    assert findings(judged(change)) == {(host, "host", CONNECTION, FAIL) for host in ("t01", "t04")}


def test_one_lost_connection_to_a_host_outside_the_run_is_not_a_fault() -> None:
    """This happens if a single host is measured again while another host of its domain is repaired."""
    plan = replace(planned(rackproof_nvlink_domain="nvl1"), hosts=planned(rackproof_nvlink_domain="nvl1").hosts[:1])

    def verdict_of(state: str, *, all_others: bool = False) -> str:
        def change(readings: dict[str, Readings]) -> None:
            broken = readings["t00"][CONNECTION] if all_others else ("imex=4",)
            readings["t00"][CONNECTION] |= dict.fromkeys(broken, state)
            readings["t00"]["fabric.imex.domain_state"]["host"] = "degraded"

        (verdict,) = [item for item in judge(plan, evidence(plan, change), PACKS) if item.name == CONNECTION]
        return verdict.verdict

    assert verdict_of("never_connected") == PASS
    assert verdict_of("never_connected", all_others=True) == FAIL
    assert verdict_of("not_reported") == INCONCLUSIVE


def test_connections_that_imex_does_not_report_pass_if_the_domain_is_up() -> None:
    def change(readings: dict[str, Readings]) -> None:
        for of_host in readings.values():
            of_host[CONNECTION] = dict.fromkeys(of_host[CONNECTION], "not_reported")

    assert findings(judged(change)) == set()


def test_connections_that_imex_does_not_report_are_inconclusive_if_the_domain_state_is_unknown() -> None:
    def change(readings: dict[str, Readings]) -> None:
        for of_host in readings.values():
            of_host[CONNECTION] = dict.fromkeys(of_host[CONNECTION], "not_reported")
            of_host["fabric.imex.domain_state"] = {"host": "unsupported: nvidia-imex-ctl of 570 does not report it"}

    of_connections = {item for item in findings(judged(change)) if item[2] == CONNECTION}
    assert of_connections == {(host, "host", CONNECTION, INCONCLUSIVE) for host in HOSTS}


def test_two_hosts_with_imex_down_are_both_named() -> None:
    def change(readings: dict[str, Readings]) -> None:
        with_imex_down("t01")(readings)
        with_imex_down("t04")(readings)

    named = {host for host, _, name, _ in findings(judged(change)) if name.startswith("fabric.imex")}
    assert named == {"t01", "t04"}


PAIRS = [HOSTS[:2], HOSTS[1:4:2], HOSTS[2:4], HOSTS[3:5]]
"""Pairs of hosts: both in the first half of HOSTS, one in each half, or both in the second half."""


@pytest.mark.parametrize("faulty", [*itertools.combinations(HOSTS, 1), *PAIRS])
def test_only_hosts_at_fault_are_named_if_the_last_hosts_are_merged_first(faulty: tuple[str, ...]) -> None:
    def change(readings: dict[str, Readings]) -> None:
        for host in faulty:
            with_imex_down(host)(readings)
            readings[host][STATE]["host"] = "ready"

    plan = planned(rackproof_nvlink_domain="nvl1")
    views = host_views(plan, evidence(plan, change), PACKS)
    total = gather(Planned(plan), views[3:])
    total.update(gather(Planned(plan), views[:3]))
    total.complete()
    verdicts = [item for view in views for item in judge_hosts(plan, [view], total)]
    assert {item.host for item in verdicts if item.name == CONNECTION and item.verdict == FAIL} == {*faulty}


def test_host_without_imex_fails_in_a_domain_of_the_inventory() -> None:
    def change(readings: dict[str, Readings]) -> None:
        with_imex_down("t05")(readings)
        readings["t05"] = {CLUSTER: readings["t05"][CLUSTER], CLIQUE: readings["t05"][CLIQUE],
                           STATE: {"host": "unsupported: no nvidia-imex-ctl"}}  # fmt: skip

    failing = [item for item in judged(change) if item.name == STATE and item.verdict == FAIL]
    assert [(item.host, item.action) for item in failing] == [("t05", "configure")]
    assert "no nvidia-imex-ctl" in failing[0].reason


@pytest.mark.parametrize("reason", ["error: nvidia-imex-ctl -q: no answer within 10 s", "error: run as root"])
def test_imex_that_cannot_be_read_is_inconclusive(reason: str) -> None:
    def change(readings: dict[str, Readings]) -> None:
        readings["t02"][STATE] = {"host": reason}

    assert ("t02", "host", STATE, INCONCLUSIVE) in findings(judged(change))


def test_connections_that_cannot_be_read_are_inconclusive() -> None:
    def change(readings: dict[str, Readings]) -> None:
        readings["t02"]["fabric.imex.address"] = {"host": "error: unknown"}
        readings["t02"][CONNECTION] = dict.fromkeys(readings["t02"][CONNECTION], "error: unknown")

    assert findings(judged(change)) == {("t02", "host", CONNECTION, INCONCLUSIVE)}


def test_domain_with_a_node_count_of_one_fails() -> None:
    def change(readings: dict[str, Readings]) -> None:
        for of_host in readings.values():
            of_host[NODES]["host"] = 1
            of_host[CONNECTION] = {}

    failing = {item for item in findings(judged(change)) if item[2] == NODES}
    assert failing == {(host, "host", NODES, FAIL) for host in HOSTS}


def test_zero_domain_uuid_is_a_fault_in_a_domain_of_the_inventory() -> None:
    def change(readings: dict[str, Readings]) -> None:
        readings["t01"][CLUSTER] = dict.fromkeys(("gpu=0", "gpu=1"), NO_DOMAIN)
        readings["t01"][CLIQUE] = dict.fromkeys(("gpu=0", "gpu=1"), 0)

    failing = [item for item in judged(change) if item.criterion == CRITERION and item.verdict == FAIL]
    assert {(item.host, item.scope, item.name) for item in failing} == {
        ("t01", f"gpu={gpu}", CLUSTER) for gpu in (0, 1)
    }


def test_gpu_that_reports_no_domain_is_inconclusive() -> None:
    def change(readings: dict[str, Readings]) -> None:
        readings["t01"][CLUSTER]["gpu=1"] = "unsupported: the part belongs to no NVLink fabric"

    assert ("t01", "gpu=1", CLUSTER, INCONCLUSIVE) in findings(judged(change))


@pytest.mark.parametrize(("name", "value"), [(CLIQUE, 7), (CLUSTER, OTHER_UUID)])
def test_host_in_another_clique_or_domain_is_named(name: str, value: Value) -> None:
    def change(readings: dict[str, Readings]) -> None:
        readings["t04"][name] = dict.fromkeys(("gpu=0", "gpu=1"), value)

    verdicts = judged(change, transport="NET/IB/GDRDMA+P2P/MNNVL")
    assert findings(verdicts) == {("t04", f"gpu={gpu}", name, FAIL) for gpu in (0, 1)}
    (cause,) = causes(verdicts)
    assert cause.hosts == ("t04",)


@pytest.mark.parametrize(
    "transport", ["NET/IB/GDRDMA", "NET/IB/GDRDMA+P2P/CUMEM", "NET/Socket+P2P/MNNVL", "P2P/MNNVL+unknown"]
)
def test_transport_other_than_mnnvl_fails(transport: str) -> None:
    verdicts = judged(transport=transport)
    (failing,) = [item for item in verdicts if item.name == TRANSPORT and item.verdict == FAIL]
    assert failing.action == "configure"
    assert "NCCL_MNNVL_ENABLE" in failing.reason
    (cause,) = causes(verdicts)
    assert (cause.problem, cause.action) == ("transport", "configure")
    assert f"is without NVLink between hosts: NCCL uses {transport} instead of P2P/MNNVL" in cause.title


def test_verdict_on_a_transport_that_the_inventory_disables_names_the_variable() -> None:
    plan = planned(rackproof_nvlink_domain="nvl1")
    hosts = tuple(replace(host, environment={"NCCL_MNNVL_ENABLE": "0"}) for host in plan.hosts)
    off = replace(plan, hosts=hosts)
    verdicts = judge(off, evidence(off, lambda readings: None, "NET/IB/GDRDMA"), PACKS)
    failing = [item for item in verdicts if item.name == TRANSPORT and item.verdict == FAIL]
    assert len(failing) == 1
    assert all("rackproof_environment sets NCCL_MNNVL_ENABLE=0" in item.detail for item in failing)


@pytest.mark.parametrize("transport", ["P2P/MNNVL", "P2P/MNNVL/read+P2P/MNNVL", "NET/IB/GDRDMA", "SHM"])
def test_hosts_without_a_domain_are_not_judged(transport: str) -> None:
    """The GPUs of an HGX host report a zero domain UUID, and its IMEX daemon may be idle, absent, or in any state."""

    def change(readings: dict[str, Readings]) -> None:
        with_imex_down("t01")(readings)
        for of_host in readings.values():
            of_host[CLUSTER] = dict.fromkeys(("gpu=0", "gpu=1"), NO_DOMAIN)
            of_host[CLIQUE] = dict.fromkeys(("gpu=0", "gpu=1"), 0)
        readings["t02"]["fabric.imex.running"] = {"host": False}
        readings["t03"]["fabric.imex.running"] = {"host": True}
        readings["t04"][STATE] = {"host": "error: nvidia-imex-ctl -q: no answer within 10 s"}

    verdicts = judged(change, domain="", transport=transport)
    assert not [item for item in verdicts if item.criterion == CRITERION]
    assert not_passing(verdicts) == set()


# ---- XID 149 on one GPU, XID 145 on all other GPUs of the domain ----

PCI = {"gpu=0": "0000:00:00.0", "gpu=1": "0000:01:00.0"}


def with_xids(codes: Mapping[str, Mapping[str, str]]) -> Callable[[dict[str, Readings]], None]:
    """Return a change that adds XIDs to kernel logs: host -> GPU -> code, such as `149` (fatal) or `145 nonfatal`."""

    def change(readings: dict[str, Readings]) -> None:
        for host, of_gpu in codes.items():
            counts = {f"pci={PCI[gpu]},xid={code.split()[0]}": 1 for gpu, code in of_gpu.items()}
            fatal = {scope: 1 for (gpu, code), scope in zip(of_gpu.items(), counts, strict=True) if "non" not in code}
            readings[host] |= {"xid.count": counts, "xid.fatal": fatal, "xid.last_seen": {"host": 900.0}}

    return change


def rack(root: str, follower: str) -> dict[str, dict[str, str]]:
    """Return the XIDs of a rack in which GPU 1 of host `root` has XID 149, and all other GPUs have the code `follower`."""
    codes = {host: dict.fromkeys(PCI, follower) for host in HOSTS}
    codes[root]["gpu=1"] = "149"
    return codes


@pytest.mark.parametrize("follower", ["145", "145 nonfatal"])
@pytest.mark.parametrize("root", ["t00", "t04"])
def test_dead_link_and_the_xids_that_it_causes_are_one_cause(root: str, follower: str) -> None:
    verdicts = judged(with_xids(rack(root, follower)))
    (cause,) = causes(verdicts)
    assert (cause.host, cause.part, cause.hosts) == (root, "gpu=1", (root,))
    assert cause.title.startswith(f"GPU 1 of {root} reported an error to its driver (XID 149")
    explained = {verdicts[position].host for position in cause.verdicts}
    assert explained == ({*HOSTS} if follower == "145" else {root})


def test_xids_145_without_a_dead_link_are_separate_causes() -> None:
    codes = {host: dict.fromkeys(PCI, "145") for host in HOSTS[:2]}
    result = causes(judged(with_xids(codes)))
    assert {(cause.host, cause.part) for cause in result} == {(host, gpu) for host in HOSTS[:2] for gpu in PCI}


def test_other_xids_are_not_attributed_to_a_dead_link() -> None:
    codes = rack("t00", "145") | {"t03": {"gpu=0": "145", "gpu=1": "48"}}
    result = causes(judged(with_xids(codes)))
    assert {(cause.host, cause.part) for cause in result} == {("t00", "gpu=1"), ("t03", "gpu=1")}


def test_xids_of_hosts_without_a_common_domain_are_not_attributed_to_a_dead_link() -> None:
    """HGX B200 hosts of one rack report these XIDs too, but each has NVSwitches of its own."""
    codes = {"t00": {"gpu=0": "145", "gpu=1": "149"}, "t03": {"gpu=0": "145"}}
    result = causes(judged(with_xids(codes), domain=""))
    assert {(cause.host, cause.part) for cause in result} == {("t00", "gpu=1"), ("t03", "gpu=0")}


def test_xids_during_the_run_are_attributed_to_a_dead_link() -> None:
    """A nonfatal XID 145 is noticed only because it changes the time of the newest XID."""
    plan = planned(rackproof_nvlink_domain="nvl1")

    def without_xids(record: Record) -> Record:
        first, *later = record.snapshots
        kept = tuple(item for item in first.metrics if not item.name.startswith("xid."))
        quiet = [metric("xid.last_seen", {"host": 0.0}), metric("xid.count", {}), metric("xid.fatal", {})]
        return replace(record, snapshots=(replace(first, metrics=(*kept, *quiet)), *later))

    def judge_without_earlier_xids(codes: Mapping[str, Mapping[str, str]]) -> list[Verdict]:
        fleet = {}
        for host, of_host in evidence(plan, with_xids(codes)).items():
            first, *others = of_host.records
            fleet[host] = replace(of_host, records=(without_xids(first), *others))
        return judge(plan, fleet, PACKS)

    verdicts = judge_without_earlier_xids(rack("t04", "145 nonfatal"))
    (cause,) = causes(verdicts)
    assert (cause.host, cause.part) == ("t04", "gpu=1")
    assert {verdicts[position].host for position in cause.verdicts} == {*HOSTS}
    other = judge_without_earlier_xids(rack("t04", "145 nonfatal") | {"t02": {"gpu=0": "31"}})
    assert {cause.host for cause in causes(other)} == {"t02", "t04"}


# ---- GB200 without a domain in the inventory: the rack is the domain ----


def of_gb200(change: Callable[[dict[str, Readings]], None], **options: Any) -> set[tuple[str, str, str, str]]:
    """Return the verdicts on the NVLink domain that do not pass. The hosts have the GPU model `gb200`.

    `change` is applied to the readings of healthy hosts. `options` are those of `judged`.
    """
    verdicts = judged(change, domain="", rackproof_gpu_model="gb200", **options)
    of_domain = [
        item for item in verdicts if item.criterion in (CRITERION, "rack-nvlink-domain", "rack-nvlink-partition")
    ]
    assert of_domain
    return not_passing(of_domain)


def test_rack_of_gb200_is_a_domain() -> None:
    assert of_gb200(lambda readings: None) == set()
    assert {item[0] for item in of_gb200(with_imex_down("t02")) if item[2].startswith("fabric.")} == {"t02"}


def test_gb200_without_imex_is_judged_by_its_transport_and_not_by_imex() -> None:
    """On Kubernetes, an IMEX daemon runs only while a job runs, so no daemon is found on the hosts."""

    def change(readings: dict[str, Readings]) -> None:
        for host, of_host in readings.items():
            kept = {name: values for name, values in of_host.items() if not name.startswith("fabric.imex")}
            readings[host] = kept | {STATE: {"host": "unsupported: no nvidia-imex-ctl"}}

    assert of_gb200(change) == set()
    assert {item[2] for item in of_gb200(change, transport="NET/IB/GDRDMA")} == {TRANSPORT}


def test_gb200_with_idle_imex_on_every_host_is_not_judged_by_imex() -> None:
    def change(readings: dict[str, Readings]) -> None:
        for host in HOSTS:
            with_imex_down(host)(readings)

    assert of_gb200(change) == set()


def test_zero_domain_uuid_is_a_fault_on_gb200_even_without_a_domain_in_the_inventory() -> None:
    def change(readings: dict[str, Readings]) -> None:
        for of_host in readings.values():
            of_host[CLUSTER] = dict.fromkeys(of_host[CLUSTER], NO_DOMAIN)
            of_host[CLIQUE] = dict.fromkeys(of_host[CLIQUE], 0)

    assert of_gb200(change) == {(host, gpu, CLUSTER, FAIL) for host in HOSTS for gpu in PCI}


NOT_JOINED = {"gpu=0": "unsupported: the part belongs to no NVLink fabric", "gpu=1": "unsupported: no fabric"}


@pytest.mark.parametrize("transport", ["P2P/MNNVL", "NET/IB/GDRDMA"])
def test_gb200_tray_outside_the_fabric_of_its_rack_is_inconclusive(transport: str) -> None:
    """leptonai/gpud pull request 1108: all GPUs of a GB200 tray report the fabric as not supported."""

    def change(readings: dict[str, Readings]) -> None:
        readings["t03"] |= {CLUSTER: NOT_JOINED, CLIQUE: NOT_JOINED}

    expected = {("t03", gpu, CLUSTER, INCONCLUSIVE) for gpu in PCI}
    assert of_gb200(change, transport=transport) == expected


def test_gb200_rack_outside_the_nvlink_fabric_is_inconclusive_if_its_nvlinks_end_at_switches() -> None:
    def change(readings: dict[str, Readings]) -> None:
        for of_host in readings.values():
            # The number of missing NVLinks (here 0) is reported only if the NVLinks of the GPU end at switches.
            of_host |= {CLUSTER: NOT_JOINED, CLIQUE: NOT_JOINED, TO_SWITCH: {"gpu=0": 0, "gpu=1": 0}}

    assert {item[1:] for item in of_gb200(change, transport="NET/IB/GDRDMA")} == {
        (gpu, CLUSTER, INCONCLUSIVE) for gpu in PCI
    }


def test_gb200_board_without_nvswitches_is_not_judged() -> None:
    """GB200 NVL4 boards have no NVSwitch: their four GPUs are in no domain."""

    def change(readings: dict[str, Readings]) -> None:
        for host in readings:
            readings[host] = {name: {"gpu=0": "unsupported: no fabric", "gpu=1": "unsupported: no fabric"}
                              for name in (CLUSTER, CLIQUE, TO_SWITCH)}  # fmt: skip

    verdicts = judged(change, domain="", transport="NET/IB/GDRDMA", rackproof_gpu_model="gb200")
    assert not [item for item in verdicts if item.criterion == CRITERION]
