"""Test the diagnosis: every verdict that does not pass belongs to exactly one cause.

A cause names the faulty part, and also contains the verdicts on the effects of the fault. `PROBLEMS` lists the faults that the
diagnosis can name, each before its effects.
"""

from __future__ import annotations

import itertools
import random
import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleet.diagnosis import words
from fleet.diagnosis.diagnose import WITHOUT_COMPARISON, diagnose
from fleet.diagnosis.handling import HANDLING, OF_ACTION, WITHOUT_EVIDENCE, handling
from fleet.diagnosis.problems import PROBLEMS
from fleet.judge.criteria import read_packs
from fleet.judge.direction import MUST_BE_ZERO
from fleet.judge.required_ports import PARTNER_PARAM
from schemas.catalogue import BENCHMARKS
from schemas.records import ERROR, SKIPPED
from schemas.reports import ACTIONS, FAIL, INCONCLUSIVE, KINDS, PASS, Cause, Verdict, VerdictKind
from schemas.waivers import Waiver

GANGS = {"r1": ("a", "b", "c")}
"""Gang (hosts that launch together) -> its hosts."""
NAMES = (
    "record",
    "xid.count",
    "gpu.count",
    "gpu.nvlink.missing_links",
    "gpu.throttle.active",
    "stress.throughput",
    "collective.all_reduce.busbw",
    "driver.version",
    "stage.gang",
    "storage.disk.count",
)
SCOPES = ("host", "gpu=0", "gpu=1", "gpu=1,xid=79", "gpu=1,reason=hw_thermal", "gpu=0,peer=1", "gang=r1", "disk=sda")
WAIVER = Waiver(criterion="x", who="Ann", why="known", until="2026-12-31", host="a")


def failed(name: str, scope: str = "gpu=1", host: str = "a", **changes: Any) -> Verdict:
    """Return a failed verdict."""
    values = {"value": 1, "limit": 0, "operator": "eq", "unit": "1", "action": "inspect_hardware"} | changes
    return Verdict(
        host=host, scope=scope, name=name, verdict=FAIL, criterion=name, reason=f"found {values['value']}", **values
    )


def missing(name: str, scope: str = "host", host: str = "a", **changes: Any) -> Verdict:
    """Return an inconclusive verdict without a value."""
    fields = {"kind": VerdictKind.MISSING, "reason": "not observed"} | changes
    return Verdict(host=host, scope=scope, name=name, verdict=INCONCLUSIVE, criterion="plan", **fields)


def summary(causes: Sequence[Cause]) -> list[tuple[str, str, str, int]]:
    """Return problem, first host, part and number of verdicts of each cause."""
    return [(cause.problem, cause.host, cause.part, len(cause.verdicts)) for cause in causes]


def test_all_consequences_of_a_lost_gpu_are_one_cause() -> None:
    verdicts = [
        missing("stage.benchmark", kind=VerdictKind.UNFINISHED),
        missing("collective.all_reduce.busbw", kind=SKIPPED),
        missing("gpu.temperature", "gpu=1", kind=ERROR),
        failed("xid.last_seen", "host", part="gpu=1", kind=VerdictKind.CHANGE),
        failed("xid.count", "gpu=1,xid=79", action="reboot"),
        failed("gang.fault", "gpu=1", kind=VerdictKind.SUSPECT),
        missing("stage.gang", host="b", stage="gang", kind=VerdictKind.UNFINISHED),
    ]
    (cause,) = diagnose(verdicts, GANGS)
    assert (cause.problem, cause.part, cause.hosts, cause.action) == ("gpu-fell-off-bus", "gpu=1", ("a",), "reboot")
    assert cause.title == "GPU 1 of a fell off the PCIe bus (XID 79)"
    assert verdicts[cause.verdicts[0]].name == "xid.count", "the first verdict of the cause must name the fault"
    assert len(cause.verdicts) == len(verdicts)


def test_hot_gpu_explains_only_its_own_slow_figures() -> None:
    slow = {"value": 8.0, "limit": 10.0, "operator": "ge", "unit": "FLOP/s"}
    verdicts = [
        failed("stress.throughput", "gpu=1", params={"dtype": "bf16"}, **slow),
        failed("gpu.throttle.active", "gpu=1,reason=hw_thermal", value=True, limit=False),
        failed("stress.throughput", "gpu=0", params={"dtype": "bf16"}, **slow),
    ]
    hot, slow_gpu = diagnose(verdicts, {})
    assert hot.title == "GPU 1 of a is slowed down by heat; sustained matrix products (bf16) 20 % below the limit"
    assert (hot.confidence, slow_gpu.confidence) == ("certain", "likely")
    assert (slow_gpu.problem, slow_gpu.part, slow_gpu.verdicts) == ("slow-compute", "gpu=0", (2,))


def test_two_independent_faults_of_one_gpu_are_two_causes() -> None:
    verdicts = [
        failed("gpu.nvlink.missing_links"),
        failed("peer_copy.bandwidth", "gpu=0,peer=1", part="gpu=1", value=1.0, limit=2.0, operator="ge"),
        failed("gpu.throttle.active", "gpu=1,reason=sw_thermal", value=True, limit=False),
        failed("gemm.throughput", value=1.0, limit=2.0, operator="ge"),
    ]
    assert summary(diagnose(verdicts, {})) == [("nvlink", "a", "gpu=1", 2), ("hot", "a", "gpu=1", 2)]


def test_power_brake_is_not_heat() -> None:
    (cause,) = diagnose([failed("gpu.throttle.active", "gpu=1,reason=power_brake", value=True, limit=False)], {})
    assert cause.problem == "power-limited"


def test_hosts_with_the_same_deviation_share_a_cause() -> None:
    old = {"kind": VerdictKind.PEERS, "value": "570.1", "limit": "580.2"}
    verdicts = [failed("driver.version", "host", host, **old) for host in "abc"]
    verdicts += [failed("driver.version", "host", "d", **(old | {"value": "565.3"}))]
    of_three, of_one = diagnose(verdicts, {})
    assert (of_three.hosts, of_one.hosts) == (("a", "b", "c"), ("d",))
    assert of_three.title == "3 hosts (a, b, c): each has driver version 570.1, most have 580.2"


def test_slow_figure_of_several_hosts_is_one_cause_with_the_worst_host_first() -> None:
    verdicts = [
        failed("variants.throughput", "host", f"h{number}", value=6e14 - number * 1e13, limit=7e14, operator="ge")
        for number in range(5)
    ]
    (cause,) = diagnose(verdicts, {})
    assert (cause.host, sorted(cause.hosts), cause.verdicts[0]) == ("h4", ["h0", "h1", "h2", "h3", "h4"], 4)


def test_inconclusive_fault_does_not_explain_a_failure() -> None:
    verdicts = [
        missing("gang.fault", kind=VerdictKind.SUSPECT, stage="gang"),
        missing("stage.gang", kind=VerdictKind.UNFINISHED, stage="gang"),
        failed("collective.all_reduce.busbw", "gang=r1", value=1.0, limit=2.0, operator="ge", stage="gang"),
        failed("collective.all_reduce.busbw", "gang=r1", "b", value=1.0, limit=2.0, operator="ge", stage="gang"),
    ]
    slow, fault = diagnose(verdicts, GANGS)[-2:]
    assert (fault.problem, fault.verdict, len(fault.verdicts)) == ("stopped-launch", INCONCLUSIVE, 2)
    assert (slow.problem, slow.verdict) == ("slow-collectives", FAIL)
    assert slow.title.endswith("is slow: all_reduce bus bandwidth 1, the limit is ≥ 2 (50 % off)")


def test_cause_is_as_severe_as_its_most_severe_verdict() -> None:
    verdicts = [
        failed("gpu.throttle.time", "gpu=1,reason=hw_thermal", severity="warning"),
        failed("stress.throughput", value=1.0, limit=2.0, operator="ge", severity="critical"),
    ]
    (cause,) = diagnose(verdicts, {})
    assert (cause.problem, cause.severity) == ("hot", "critical")


def test_parts_with_the_same_serial_are_named_together() -> None:
    verdicts = [
        replace(
            failed("gpu.serial", "gpu=6", host, kind=VerdictKind.IDENTITY, value="S1", limit=None),
            criterion="identity-unique",
        )
        for host in ("a", "b")
    ]
    (cause,) = diagnose(verdicts, {})
    assert cause.title == "2 parts (GPU 6 of a, GPU 6 of b): each has the serial S1, which must be unique"


def test_serial_of_the_manifest_that_no_host_has_is_not_called_a_duplicate() -> None:
    not_found = failed("gpu.serial", "host", kind=VerdictKind.IDENTITY, value="S9", limit=None)
    (cause,) = diagnose([replace(not_found, criterion="manifest")], {})
    assert cause.title == "a differs from the manifest: serial S9"


def test_lowered_power_limit_is_named_with_its_value() -> None:
    verdicts = [
        failed("gpu.power_limit", value=550.0, limit=700.0, operator="ge", unit="W"),
        failed("gpu.power_limit_lowered", value=True, limit=False),
    ]
    (cause,) = diagnose(verdicts, {})
    assert cause.title.startswith("GPU 1 of a has its power limit lowered to 550 W instead of 700 W")


def test_silent_corruption_is_named_without_the_digest() -> None:
    (cause,) = diagnose([failed("digest.value", value="ab", limit="cd", params={"workload": "gemm"})], {})
    assert cause.title == "GPU 1 of a computes other results than its peers, without an error (gemm)"


def test_title_of_wrong_copies_between_two_gpus_names_both_gpus() -> None:
    (cause,) = diagnose([failed("digest.wrong_peer_copies", "gpu=1,peer=6", value=3, limit=0)], {})
    title = "GPU 1 of a and GPU 6 copy wrong data between them: not known whether one of the GPUs or a link is at fault"
    assert cause.title == title


@pytest.mark.parametrize(
    ("name", "params"),
    [
        ("digest.mismatches", {"workload": "copy"}),
        ("digest.value", {"workload": "copy"}),
        ("host_copy.wrong_bytes", {"direction": "both_ways"}),
        ("pageable_copy.wrong_bytes", {}),
    ],
)
def test_title_of_wrong_host_copies_lists_every_part_that_may_be_at_fault(name: str, params: dict[str, Any]) -> None:
    (cause,) = diagnose([failed(name, params=params)], {})
    assert cause.problem == "wrong-host-copies"
    assert cause.title.endswith("not known whether the GPU, its PCIe link or the memory of the host is at fault")
    assert "RMA" not in handling(cause).now
    assert "memory of the host" in handling(cause).if_it_returns


@pytest.mark.parametrize("name", ["digest.wrong_peer_copies", "peer_copy.wrong_bytes", "pairs.wrong_elements"])
def test_gpu_with_wrong_transfers_is_not_sent_to_the_vendor_before_its_links_are_inspected(name: str) -> None:
    scope = "gpu=1,partner=b" if name.startswith("pairs") else "gpu=1,peer=6"
    (cause,) = diagnose([failed(name, scope)], {})
    assert cause.problem in ("wrong-peer-copies", "wrong-messages")
    assert "not known whether" in cause.title
    assert not handling(cause).if_it_returns.startswith("return")


def test_wrong_copies_of_a_gpu_with_wrong_memory_are_not_a_separate_cause() -> None:
    verdicts = [
        failed("digest.mismatches", params={"workload": "copy"}),
        failed("peer_copy.wrong_bytes", "gpu=0,peer=1"),
        failed("integrity.wrong_words", action="rma"),
        failed("host_copy.wrong_bytes", "gpu=3"),
    ]
    memory, copies = diagnose(verdicts, {})
    assert (memory.problem, memory.part, memory.action, len(memory.verdicts)) == ("wrong-results", "gpu=1", "rma", 3)
    assert (copies.problem, copies.part) == ("wrong-host-copies", "gpu=3")


@pytest.mark.parametrize("name", ["collective.all_reduce.wrong_elements", "checkpoint.identical"])
def test_title_of_wrong_data_says_that_a_gpu_may_be_at_fault(name: str) -> None:
    (cause,) = diagnose([failed(name, "host", value=3, limit=0)], {})
    assert (cause.problem, "not known whether a GPU" in cause.title) == ("wrong-results", True)


PORT_DOWN = {
    "infiniband.phys_state": ("Disabled", "LinkUp"),
    "infiniband.state": ("DOWN", "ACTIVE"),
    "infiniband.active": (False, True),
}
NIC_DOWN = {"network.carrier": (False, True), "network.operstate": ("down", "up")}


@pytest.mark.parametrize(
    "readings",
    [PORT_DOWN, NIC_DOWN, PORT_DOWN | NIC_DOWN],
    ids=["InfiniBand port", "Ethernet interface", "RoCE port and its interface"],
)
def test_port_without_a_link_is_one_cause(readings: dict[str, tuple[Any, Any]]) -> None:
    """The interface of a RoCE port is attributed to the adapter of the port."""
    adapter = any(name in PORT_DOWN for name in readings)
    verdicts = [
        failed(name, "hca=mlx5_1,port=1" if name in PORT_DOWN else "nic=eth1", part="hca=mlx5_1" if adapter else "", value=value,
               limit=limit, kind=VerdictKind.PEERS, action="reseat")
        for name, (value, limit) in readings.items()
    ]  # fmt: skip
    verdicts += [
        failed("fabric_ports.active", "host", value=7, limit=8, operator="ge"),
        *(missing("verbs.bandwidth", "hca=mlx5_1,port=1", stage=stage) for stage in ("benchmark", "gang")),
    ] if adapter else []  # fmt: skip
    other = failed("infiniband.state", "hca=mlx5_2,port=1", "b", value="DOWN", limit="ACTIVE", kind=VerdictKind.PEERS)
    port, of_other = sorted(diagnose([*verdicts, other], GANGS), key=lambda cause: cause.host)
    part = "hca=mlx5_1" if adapter else "nic=eth1"
    assert (port.problem, port.part, len(port.verdicts)) == ("port-down", part, len(verdicts))
    assert (of_other.part, len(of_other.verdicts)) == ("hca=mlx5_2", 1)


def test_port_whose_only_partner_is_down_is_not_a_separate_cause() -> None:
    lost = {"stage": "gang", "reason": "b measures no port on this rail", "params": {PARTNER_PARAM: "b"}}
    verdicts = [
        failed("infiniband.state", "hca=mlx5_1,port=1", "b", value="DOWN", limit="ACTIVE", kind=VerdictKind.PEERS),
        missing("verbs.bandwidth", "hca=mlx5_1,port=1", "a", **lost),
        missing("verbs.bandwidth", "hca=mlx5_1,port=1", "c", **lost | {"params": {PARTNER_PARAM: "a"}}),
    ]
    down, other = diagnose(verdicts, GANGS)
    assert (down.problem, down.hosts, down.verdicts) == ("port-down", ("b",), (0, 1))
    assert other.hosts == ("c",), "the port of host c was to be measured with host a, whose port is not down"


@pytest.mark.parametrize(
    ("name", "problem"),
    [("optics.rx_los", "module"), ("infiniband.state", "port-down"), ("infiniband.link_layer", "port-protocol")],
)
def test_fault_of_a_port_does_not_explain_errors_of_the_other_port_of_the_adapter(name: str, problem: str) -> None:
    kind = VerdictKind.LIMIT if problem == "module" else VerdictKind.PEERS
    verdicts = [
        failed(name, "hca=mlx5_0,port=2", value="DOWN", limit="ACTIVE", kind=kind, action="reseat"),
        failed("infiniband.symbol_error", "hca=mlx5_0,port=2", action="reseat"),
        failed("infiniband.symbol_error", "hca=mlx5_0,port=1", action="reseat"),
    ]
    cables = {("a", f"hca=mlx5_0,port={number}"): f"leaf{number}" for number in (1, 2)}
    causes = {cause.verdicts: (cause.problem, cause.parts[0].cable) for cause in diagnose(verdicts, {}, cables)}
    assert causes == {(0, 1): (problem, "leaf2"), (2,): ("infiniband.symbol_error", "leaf1")}


def test_unmeasured_port_belongs_to_the_fault_of_the_same_port_of_its_partner() -> None:
    """The unmeasured port is mlx5_1 of host a. Its only partner, host b, has a fault of mlx5_0 and one of mlx5_1.

    The fault of mlx5_0 comes first in `PROBLEMS`, but the fault of the port with the same name is chosen.
    """
    peers = {"kind": VerdictKind.PEERS, "host": "b"}
    verdicts = [
        failed("infiniband.link_layer", "hca=mlx5_0,port=1", value="Ethernet", limit="InfiniBand", **peers),
        failed("infiniband.state", "hca=mlx5_1,port=1", value="DOWN", limit="ACTIVE", **peers),
        missing("verbs.bandwidth", "hca=mlx5_1,port=1", "a", stage="gang", params={PARTNER_PARAM: "b"}),
    ]
    causes = diagnose(verdicts, GANGS)
    assert {(cause.part, cause.verdicts) for cause in causes} == {("hca=mlx5_0", (0,)), ("hca=mlx5_1", (1, 2))}


@pytest.mark.parametrize(
    ("name", "scope", "candidate"),
    [
        ("loss_curve.deviation", "gpu=1", "its PCIe link"),
        ("loss_curve.wrong_losses", "gpu=1", "memory of the host"),
        ("collective.all_reduce.wrong_elements", "gang=r1", "the network"),
        ("fashion_mnist.wrong_parameters", "gang=r1", "the network"),
        ("checkpoint.identical", "gang=r1", "the storage"),
    ],
)
def test_wrong_result_names_the_parts_that_its_data_crosses(name: str, scope: str, candidate: str) -> None:
    (cause,) = diagnose([failed(name, scope)], {})
    assert candidate in cause.title.partition("not known whether")[2]


def test_cable_of_a_port_with_the_wrong_protocol_needs_no_work() -> None:
    """dsx-ai-factory/infra-controller issue 3624: an adapter left in InfiniBand mode shows as a port without a link."""
    peers = {"kind": VerdictKind.PEERS, "part": "hca=mlx5_7"}
    verdicts = [
        failed(name, "hca=mlx5_7,port=1", value=value, limit=limit, action="reseat", **peers)
        for name, (value, limit) in PORT_DOWN.items()
    ]
    protocol = {"value": "InfiniBand", "limit": "Ethernet", "action": "configure"}
    verdicts += [
        failed("infiniband.link_layer", "hca=mlx5_7,port=1", **peers, **protocol),
        failed("fabric_ports.rate", "host", value=350e9, limit=400e9, operator="ge", unit="B/s", action="reseat"),
    ]
    (cause,) = diagnose(verdicts, {})
    assert (cause.problem, cause.part, cause.action) == ("port-protocol", "hca=mlx5_7", "configure")
    assert "link layer InfiniBand, most have Ethernet" in cause.title
    assert "cable needs no work" in handling(cause).now


@pytest.mark.parametrize(
    ("port", "problem"),
    [
        ({"name": "infiniband.link_layer", "kind": VerdictKind.PEERS, "action": "configure"}, "port-protocol"),
        ({"name": "optics.module.fault"}, "module"),
    ],
)
def test_fault_of_one_port_does_not_hide_that_the_whole_host_is_slow(port: dict[str, Any], problem: str) -> None:
    slow = {"stage": "gang", "value": 10e9, "limit": 40e9, "operator": "ge", "unit": "B/s"}
    verdicts = [
        failed(scope="hca=mlx5_7,port=1", value="InfiniBand", limit="Ethernet", **port),
        failed("pairs.bandwidth", "host", kind=VerdictKind.SUSPECT, **slow),
        failed("collective.all_reduce.busbw", "gang=r1", **slow),
        missing("verbs.bandwidth", "hca=mlx5_7,port=1", stage="gang"),
    ]
    causes = {cause.problem: cause for cause in diagnose(verdicts, GANGS)}
    assert causes.keys() == {problem, "slow-network"}
    assert causes["slow-network"].part == "host"
    assert causes["slow-network"].verdicts[0] == 1


def test_port_with_another_mtu_is_one_cause() -> None:
    sizes: dict[str, Any] = {"unit": "B", "action": "configure"}
    verdicts = [
        failed("verbs.mtu", "hca=mlx5_1,port=1", **sizes | {"value": 512.0, "limit": 1024.0, "operator": "ge"}),
        failed(
            "network.mtu",
            "nic=eth1",
            part="hca=mlx5_1",
            kind=VerdictKind.PEERS,
            **sizes | {"value": 700.0, "limit": 1500.0},
        ),
    ]
    (cause,) = diagnose(verdicts, {})
    assert (cause.problem, cause.part, cause.action) == ("mtu", "hca=mlx5_1", "configure")


def test_title_names_the_link_that_is_down_and_not_its_speed() -> None:
    verdicts = [
        failed("gpu.nvlink.speed", "gpu=1,link=3", value=0.0, limit=26e9, operator="ge", unit="B/s"),
        failed("gpu.nvlink.missing_links", value=1, limit=0),
    ]
    (cause,) = diagnose(verdicts, {})
    assert cause.title == "GPU 1 of a has 1 NVLink down"


def test_missing_evidence_of_several_hosts_with_one_reason_is_one_cause() -> None:
    verdicts = [missing(name, host=host) for host in "ab" for name in ("training.loss", "stage.benchmark")]
    (cause,) = diagnose(verdicts, {})
    assert (cause.hosts, len(cause.verdicts), cause.problem) == (("a", "b"), 4, "not-verified")


def test_host_that_another_host_stopped_is_not_the_cause() -> None:
    verdicts = [
        missing("stage.gang", host="b", stage="gang", kind=VerdictKind.UNFINISHED, reason="a stopped it"),
        failed("gang.fault", "gpu=1", "a", kind=VerdictKind.SUSPECT, stage="gang"),
        missing("stage.gang", host="z", stage="gang", kind=VerdictKind.UNFINISHED, reason="a stopped it"),
    ]
    stopped, other = diagnose(verdicts, GANGS)
    assert (stopped.problem, stopped.hosts, stopped.verdicts) == ("stopped-launch", ("a",), (1, 0))
    assert other.hosts == ("z",), "host z is not in the gang of host a"


def test_waived_failure_does_not_explain_an_unwaived_failure() -> None:
    verdicts = [
        failed("gpu.throttle.active", "gpu=1,reason=hw_thermal", waiver=WAIVER),
        failed("stress.throughput", "gpu=1", value=1.0, limit=2.0, operator="ge"),
    ]
    open_cause, waived = diagnose(verdicts, {})
    assert (open_cause.problem, open_cause.waiver, waived.waiver) == ("slow-compute", None, WAIVER)


def test_hosts_that_are_one_machine_have_one_cause_that_names_no_part() -> None:
    def slow(
        host: str, name: str, scope: str, machine: str = "a, b and c", value: float = 5.0, **fields: Any
    ) -> Verdict:
        verdict = failed(name, scope, value=value, limit=10.0, operator="ge", unit="B/s", action="configure")
        return replace(verdict, host=host, serial="s", kind=VerdictKind.SHARED_MACHINE, user=machine, **fields)

    verdicts = [
        slow("a", "host_copy.bandwidth", "gpu=0", value=4.0, detail="they are one machine"),
        slow("a", "host_memory.bandwidth", "numa=0"),
        slow("b", "host_compute.throughput", "host"),
        slow("c", "collective.all_reduce.busbw", "gang=g", stage="gang"),
        slow("d", "host_copy.bandwidth", "gpu=0", "d and e"),
    ]
    first, second = diagnose(verdicts, {"g": ("a", "b", "c")})
    assert (first.problem, first.hosts, first.part, first.serial) == ("shared-machine", ("a", "b", "c"), "host", "")
    assert first.title.startswith("3 hosts (a, b, c): each was measured while several hosts shared one machine: ")
    assert "(60 % off)" in first.title
    assert first.why == "they are one machine"
    assert {(part.scope, part.serial) for part in first.parts} == {("host", "")}
    assert len(first.verdicts) == 4
    assert (second.hosts, second.title.split(":")[0]) == (
        ("d",),
        "d was measured while several hosts shared one machine",
    )
    assert "in the inventory as one host" in handling(first).now


@pytest.mark.parametrize(
    "name", ["gpu.vbios_version", "host.cpu.count", "infiniband.link_downed", "storage.nvme.spare"]
)
def test_failed_reading_without_a_known_problem_is_its_own_cause(name: str) -> None:
    (cause,) = diagnose([failed(name, "host", value=3, limit=5, operator="ge")], {})
    assert cause.problem == name
    assert cause.title == f"a has {words.label(name)} 3, the limit is ≥ 5"


def test_ids_of_problems_are_unique() -> None:
    assert len({problem.id for problem in PROBLEMS}) == len(PROBLEMS)


VERDICTS = st.builds(
    Verdict,
    host=st.sampled_from("abcd"),
    scope=st.sampled_from(SCOPES),
    name=st.sampled_from(NAMES),
    verdict=st.sampled_from((PASS, FAIL, INCONCLUSIVE)),
    criterion=st.sampled_from(("x", "plan")),
    kind=st.sampled_from(KINDS),
    reason=st.sampled_from(("one", "two")),
    part=st.sampled_from(("", "gpu=1")),
    stage=st.sampled_from(("preflight", "gang")),
    value=st.sampled_from((None, True, 1, 2.5, "text", float("inf"))),
    limit=st.sampled_from((None, False, 0, 2.0, "other")),
    operator=st.sampled_from(("eq", "ge", "le", "")),
    unit=st.sampled_from(("1", "B/s", "Cel", "s")),
    action=st.sampled_from(("none", "rma", "reboot")),
    waiver=st.sampled_from((None, None, WAIVER)),
)


@given(st.lists(VERDICTS, max_size=40), st.randoms(use_true_random=False))
def test_every_verdict_has_one_cause_in_any_order(verdicts: list[Verdict], rng: random.Random) -> None:
    causes = diagnose(verdicts, GANGS)
    explained = sorted(position for cause in causes for position in cause.verdicts)
    assert explained == [position for position, verdict in enumerate(verdicts) if verdict.verdict != PASS]
    for cause in causes:
        of_cause = [verdicts[position] for position in cause.verdicts]
        assert (cause.verdict == FAIL) == any(verdict.verdict == FAIL for verdict in of_cause)
        assert {verdict.waiver for verdict in of_cause} == {cause.waiver}
        assert set(cause.hosts) <= {verdict.host for verdict in of_cause}
        assert cause.title
    shuffled = list(verdicts)
    rng.shuffle(shuffled)
    again = diagnose(shuffled, GANGS)
    assert sorted(map(content, again)) == sorted(map(content, causes))


def test_causes_do_not_depend_on_the_order_of_verdicts_that_differ_only_in_value() -> None:
    """The two verdicts on c are one cause. In every order, its first verdict must be the one with a value.

    The cause on a has no value, so it must stay separate.
    """
    verdicts = [
        replace(failed("record", scope), host=host, kind=VerdictKind.PEERS, value=value, limit=None, reason="one")
        for host, scope, value in (("c", "gpu=1", None), ("c", "gpu=1", True), ("a", "host", None))
    ]
    orders = [diagnose(list(order), {}) for order in itertools.permutations(verdicts)]
    assert len({tuple(sorted(content(cause)[1][0] for cause in causes)) for causes in orders}) == 1
    assert {len(causes) for causes in orders} == {2}


def content(cause: Cause) -> tuple[str, list[str], int]:
    """Return the content of a cause that must not depend on the order of the verdicts."""
    return cause.problem, sorted(cause.hosts), len(cause.verdicts)


def test_every_action_has_a_text_and_handling_refers_to_existing_problems() -> None:
    assert set(ACTIONS) - set(OF_ACTION) == {"none"}
    ids = {*(problem.id for problem in PROBLEMS), *WITHOUT_COMPARISON.values()}
    readings = {item.name for pack in read_packs([]) for item in pack.criteria}
    assert {problem for problem, _, _ in HANDLING if problem} | set(WITHOUT_EVIDENCE) <= ids | readings | {"software"}
    assert {action for _, action, _ in HANDLING} <= set(ACTIONS)
    (lost,) = diagnose([failed("xid.count", "gpu=1,xid=79", action="reboot")], {})
    assert "Drain the host" in handling(lost).now
    assert "reseat the GPU" in handling(lost).if_it_returns
    inconclusive = replace(lost, verdict=INCONCLUSIVE)
    assert handling(inconclusive) == handling(replace(inconclusive, problem="x"))
    assert handling(replace(lost, problem="x", action="none")) == ("", "")


@pytest.mark.parametrize(
    ("problem", "action", "part", "expected", "unexpected"),
    [
        ("slow-network", "inspect_hardware", "nic=rail1", "cable", "baseboard"),
        ("slow-network", "inspect_hardware", "host", "healthy", "RMA"),
        ("pcie-link", "reseat", "gpu=3", "Reseat the GPU", "PCI address"),
        ("pcie-link", "reseat", "pci=0000:5e:00.0", "PCI address", "GPU"),
        ("infiniband.symbol_error", "reseat", "hca=mlx5_0,port=1", "cable", "power it off"),
        ("storage.nvme.media_errors", "inspect_hardware", "disk=nvme0n1", "disk", "GPU"),
        ("dataloader.sufficiency", "inspect_hardware", "host", "CPUs", "RMA"),
        ("slow-workload", "inspect_hardware", "gang=r1", "CPUs", "RMA"),
        ("host.module.nouveau", "reboot", "host", "blacklist of modprobe", "GPU"),
    ],
)
def test_handling_depends_on_the_kind_of_part(
    problem: str, action: str, part: str, expected: str, unexpected: str
) -> None:
    (cause,) = diagnose([failed("xid.count", "gpu=1,xid=79", action="reboot")], {})
    text = " ".join(handling(replace(cause, problem=problem, action=action, part=part)))
    assert expected in text
    assert unexpected not in text


SOFTWARE = (
    "software.",
    "driver.",
    "container.",
    "clock.",
    "host.module.",
    "fabric.manager.",
    "pcie.acs.",
    "gpu.fabric.cl",
)
"""Beginnings of the names of readings of software, and of settings of a host or of the NVLink fabric."""


@pytest.mark.parametrize(
    "name",
    [
        *(f"gpu.{name}" for name in ("ecc.enabled", "ecc.change_pending", "mig.enabled", "mig.change_pending")),
        *(f"gpu.{name}" for name in ("compute_mode", "power_limit_lowered", "clock.lowered", "power_limit")),
        *(f"gpu.{name}" for name in ("accounting.enabled", "addressing_mode", "virtualization", "gsp.enabled")),
        *("host.persistence_daemon", "infiniband.unmanaged"),
        *sorted({item.name for pack in read_packs([]) for item in pack.criteria if item.name.startswith(SOFTWARE)}),
    ],
)
def test_no_part_is_returned_because_of_software_or_a_setting(name: str) -> None:
    judging = [criterion for pack in read_packs([]) for criterion in pack.criteria if criterion.name == name]
    assert judging
    for criterion in judging:
        assert criterion.action in ("configure", "reset_gpu", "reboot")
        kind = VerdictKind.PEERS if criterion.same_as_fleet else VerdictKind.LIMIT
        scope = "host" if criterion.scope == "host" else "gpu=1"
        (cause,) = diagnose([failed(name, scope, action=criterion.action, severity=criterion.severity, kind=kind)], {})
        now, if_it_returns = handling(cause)
        assert now
        assert if_it_returns.startswith("find ")
        assert not re.search("RMA|diagnostic|replace|inspect|reseat", f"{now} {if_it_returns}")


@pytest.mark.parametrize("action", [action for action in ACTIONS if action != "none"])
@pytest.mark.parametrize("name", ["software.nccl.version", "host.module.gdrdrv"])
def test_criterion_of_a_site_on_software_leads_to_no_part_whatever_its_action(name: str, action: str) -> None:
    (cause,) = diagnose([failed(name, "host", action=action)], {})
    now, if_it_returns = handling(cause)
    assert now
    assert not re.search("RMA|diagnostic|replace|inspect|reseat", f"{now} {if_it_returns}", re.IGNORECASE)


def test_port_that_no_subnet_manager_has_activated_needs_no_work_on_its_cable() -> None:
    port = "hca=mlx5_0,port=1"
    peers = {"action": "reseat", "kind": VerdictKind.PEERS}
    (cause,) = diagnose(
        [
            failed("infiniband.unmanaged", port, action="configure", severity="warning", value=True, limit=False),
            failed("infiniband.state", port, value="INIT", limit="ACTIVE", **peers),
            failed("infiniband.active", port, value=False, limit=True, **peers),
        ],
        {},
    )
    assert (cause.problem, cause.action, len(cause.verdicts)) == ("port-unmanaged", "configure", 3)
    assert "cable needs no work" in handling(cause).now


@pytest.mark.parametrize(
    ("mode", "command"), [("ecc", "nvidia-smi -i PCI_ADDRESS -e 1"), ("mig", "nvidia-smi -i PCI_ADDRESS -mig 0")]
)
def test_mode_that_the_next_reset_changes_needs_only_the_reset(mode: str, command: str) -> None:
    wrong = failed(f"gpu.{mode}.enabled", action="configure", severity="critical")
    pending = failed(f"gpu.{mode}.change_pending", action="reset_gpu", severity="critical")
    (cause,) = diagnose([wrong], {})
    assert command in handling(cause).now
    (cause,) = diagnose([wrong, pending], {})
    assert (cause.action, len(cause.verdicts)) == ("reset_gpu", 2)
    assert command not in handling(cause).now


def test_nvlinks_and_slow_figures_of_a_partitioned_gpu_follow_from_its_partitioning() -> None:
    verdicts = [
        failed("gpu.mig.enabled", action="configure", severity="critical"),
        failed("gpu.nvlink.active_links", value=0, limit=18),
        failed("gpu.nvlink.missing_links", value=18, limit=0),
        failed("gemm.throughput", value=1.0, limit=2.0, operator="ge"),
        missing("stage.benchmark", kind=VerdictKind.UNFINISHED),
        failed("gpu.ecc.uncorrectable_volatile", action="reset_gpu"),
        failed("gpu.nvlink.active_links", "gpu=2", value=0, limit=18),
    ]
    assert {item[:3]: item[3] for item in summary(diagnose(verdicts, {}))} == {
        ("mig-mode", "a", "gpu=1"): 5,
        ("gpu-memory-errors", "a", "gpu=1"): 1,
        ("nvlink", "a", "gpu=2"): 1,
    }


def test_waived_cause_needs_no_handling() -> None:
    (cause,) = diagnose([failed("xid.count", "gpu=1,xid=79", action="reboot")], {})
    assert handling(replace(cause, waiver=WAIVER)) == ("", "")


@pytest.mark.parametrize("name", ["gpu.throttle.active", "stress.throttled_share"])
def test_power_brake_is_a_fault_of_the_power_supply(name: str) -> None:
    reason = {"params": {"reason": "hw_power_brake"}} if name.startswith("stress") else {}
    scope = "gpu=1" if reason else "gpu=1,reason=hw_power_brake"
    (cause,) = diagnose([failed(name, scope, action="inspect_hardware", **reason)], {})
    assert cause.problem == "power-limited"
    assert "power supplies" in handling(cause).now


SLOWDOWN = {"value": 1.0, "limit": 0.05, "params": {"reason": "hw_slowdown"}}


def test_hardware_slowdown_explains_slow_figures_and_leads_to_the_power_supply() -> None:
    verdicts = [
        failed("stress.throttled_share", action="inspect_hardware", **SLOWDOWN),
        failed("stress.throughput", value=1e14, limit=2e14, operator="ge", action="rma"),
        failed("gemm.throughput", value=1e14, limit=2e14, operator="ge", action="rma"),
    ]
    (cause,) = diagnose(verdicts, {})
    assert (cause.problem, cause.verdicts, cause.action) == ("power-limited", (0, 1, 2), "inspect_hardware")
    assert "slowed down by its hardware (HW Slowdown), not by heat, for 100 % of the stress test" in cause.title
    assert "power supplies" in handling(cause).now


@pytest.mark.parametrize(("reason", "problem"), [("hw_thermal", "hot"), ("hw_power_brake", "power-limited")])
def test_hardware_slowdown_belongs_to_the_reason_that_the_driver_states(reason: str, problem: str) -> None:
    verdicts = [
        failed("stress.throttled_share", value=1.0, limit=0.0, params={"reason": reason}),
        failed("stress.throttled_share", **SLOWDOWN),
    ]
    (cause,) = diagnose(verdicts, {})
    assert (cause.problem, cause.verdicts) == (problem, (0, 1))
    assert "HW Slowdown" not in cause.title


def test_adapter_that_is_slow_on_its_own_is_not_explained_by_its_slow_host() -> None:
    """A slow host explains slow transfers to other hosts, but not slow transfers within the host (stage `benchmark`)."""
    share = {"value": 0.5, "limit": 0.8, "operator": "ge"}
    verdicts = [
        failed(
            "pairs.bandwidth", "host", stage="gang", kind=VerdictKind.SUSPECT, value=2e10, limit=4e10, operator="ge"
        ),
        failed("verbs.best_ratio", "hca=mlx5_0,port=1", stage="gang", **share),
        failed("verbs.best_ratio", "hca=mlx5_1,port=1", stage="gang", **share),
        failed("verbs.rate_ratio", "hca=mlx5_1,port=1", stage="benchmark", **share),
    ]
    assert sorted(summary(diagnose(verdicts, GANGS))) == [
        ("slow-network", "a", "host", 3),
        ("verbs.rate_ratio", "a", "hca=mlx5_1", 1),
    ]


def test_lane_without_received_light_explains_errors_of_its_port_and_slow_collectives() -> None:
    port = "hca=mlx5_2,port=1"
    verdicts = [
        failed("port.symbol_errors", port, action="reseat"),
        failed("infiniband.symbol_error", port, action="reseat"),
        failed("optics.rx_power", f"{port},lane=3", value=0.0, limit=2e-4, unit="W", action="reseat"),
        failed("optics.rx_power.alarm", f"{port},lane=3", value="low", limit="none", action="reseat"),
        failed("optics.rx_power.alarm", f"{port},lane=1", value="low", limit="none", action="reseat"),
        failed("collective.all_reduce.busbw", "gang=r1"),
        failed("port.symbol_errors", "hca=mlx5_3,port=1", action="reseat"),
    ]
    causes = diagnose(verdicts, GANGS)
    assert {item[:3] for item in summary(causes)} == {("module", "a", "hca=mlx5_2"), ("port", "a", "hca=mlx5_3")}
    (module,) = (cause for cause in causes if cause.problem == "module")
    assert "received light on lanes 1, 3 is below the module's own alarm limit" in module.title
    assert len(module.verdicts) == 6
    assert "clean both ends of the fibre" in handling(module).now


@pytest.mark.parametrize(
    ("name", "scope", "value", "text"),
    [
        ("optics.module.fault", "port=1", True, "switched itself off"),
        ("optics.rx_los", "port=1,lane=2", True, "receives no signal on lane 2"),
        ("optics.temperature.warning", "port=1", "high", "temperature is above the module's own warning limit"),
        ("port.fec_uncorrectable", "port=1", 3, "has uncorrectable FEC blocks 3"),
        ("optics.rx_los", "port=1,lane=tx3", True, "receives no signal on lane tx3"),
    ],
)
def test_title_of_a_module_says_what_is_wrong(name: str, scope: str, value: Any, text: str) -> None:
    (cause,) = diagnose([failed(name, f"nic=eth0,{scope}", value=value, limit="none", action="reseat")], {})
    assert text in cause.title


def test_low_accuracy_is_a_wrong_result() -> None:
    (cause,) = diagnose([failed("fashion_mnist.accuracy", "host", value=0.3, limit=0.9, action="inspect_hardware")], {})
    assert cause.problem == "wrong-results"


def test_heat_is_reported_with_the_temperature_under_load_and_its_duration() -> None:
    verdicts = [
        failed("gpu.throttle.active", "gpu=1,reason=hw_thermal"),
        failed("stress.throttled_share", value=0.63, limit=0, params={"reason": "hw_thermal"}),
        replace(failed("stress.temperature", value=88.0, limit=90.0, unit="Cel"), verdict=PASS),
    ]
    (cause,) = diagnose(verdicts, {})
    assert cause.title == "GPU 1 of a is slowed down by heat (88 °C under load, for 63 % of the stress test)"
    assert cause.verdicts == (0, 1)


@pytest.mark.parametrize(
    ("name", "params", "text"),
    [
        (
            "local_storage.wrong_blocks",
            {"first_wrong": "offset 4096"},
            "2 wrong blocks or more, the first at offset 4096",
        ),
        ("local_storage.wrong_blocks", {}, "2 wrong blocks or more"),
        ("integrity.wrong_words", {"wrong_addresses": 1, "wrong_bits": "17"}, "2 wrong words at 1 address, bits 17"),
        (
            "integrity.wrong_words",
            {"wrong_addresses": 2, "wrong_bits": "3, 9"},
            "2 wrong words at 2 addresses, bits 3, 9",
        ),
        ("integrity.wrong_words", {"wrong_addresses": 1, "wrong_bits": ""}, "2 wrong words"),
        ("integrity.wrong_words", {}, "2 wrong words"),
        (
            "shared_storage.wrong_bytes",
            {"first_wrong": "shard 1 byte 12345", "readers": "b"},
            "2 wrong bytes, the first in shard 1 byte 12345, as read by b",
        ),
        ("shared_storage.wrong_bytes", {}, "2 wrong bytes"),
    ],
)
def test_title_says_where_the_wrong_data_are_if_the_record_states_it(
    name: str, params: dict[str, Any], text: str
) -> None:
    (cause,) = diagnose([failed(name, "directory=scratch", value=2, params=params)], {})
    assert cause.title.endswith(text)


WRONG_RESULTS = sorted(
    {
        output.name
        for benchmark in BENCHMARKS.values()
        for output in benchmark.outputs
        if output.name.rpartition(".")[2] in MUST_BE_ZERO and "{" not in output.name
    }
    | {"loss_curve.deviation"}
)


@pytest.mark.parametrize("name", WRONG_RESULTS)
def test_wrong_results_are_not_attributed_to_heat_or_called_slow(name: str) -> None:
    """A GPU with wrong results is returned to the vendor (action `rma`) even if it is hot."""
    wrong = failed(name, "gpu=1", value=3, limit=0, action="rma")
    hot = failed("gpu.throttle.active", "gpu=1,reason=hw_thermal", value=True, limit=False)
    for verdicts in ([wrong], [wrong, hot]):
        cause = next(item for item in diagnose(verdicts, {}) if item.problem.startswith("wrong-"))
        assert (cause.part, cause.action) == ("gpu=1", "rma")
        assert "is slow" not in cause.title


def test_every_count_of_wrong_items_must_be_zero() -> None:
    last = {output.name.rpartition(".")[2] for benchmark in BENCHMARKS.values() for output in benchmark.outputs}
    assert {name for name in last if name.startswith("wrong_")} <= MUST_BE_ZERO
