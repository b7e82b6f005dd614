"""Test the causes of a slow port, cable or transport in small gangs, and beside another fault of the same GPU.

A gang is the hosts of one multi-node launch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from fleet.judge.evidence import Evidence
from fleet.records.load import Run, load
from fleet.report.merge import merge
from fleet.simulate.fleet import Fleet, place_faults, write_run
from fleet.simulate.records import JUDGED
from schemas.records import SKIPPED, Observation
from schemas.reports import FAIL, INCONCLUSIVE, FleetReport
from tests import fleets

CREATED = "2026-11-21T04:00:00Z"
HOST = "r01-h02"
PACKS = ("memory", "collective", "pairs", "verbs", "infiniband", "network", "gpu", "gemm", "host_copy", "stress", "xid")


def simulated(directory: Path, *faults: str, hosts: int, gpus: int, profile: str = "standard") -> Run:
    fleet = Fleet(profile=profile, readings=JUDGED, gpus=gpus, hosts=hosts, gang="all")
    plan = fleet.plan(directory.name, CREATED)
    write_run(directory, fleet, place_faults(faults, plan, 0), plan)
    return load(directory)


def causes(run: Run) -> list[tuple[str, str, str, str]]:
    """Return problem, host, part and action of each cause; check that each has a failure."""
    report: FleetReport = merge(run.plan, run.evidence, fleets.packs_about(*PACKS))
    assert {cause.verdict for cause in report.causes} <= {FAIL}
    return [(cause.problem, cause.host, cause.part, cause.action) for cause in report.causes]


@pytest.mark.parametrize(
    ("fault", "hosts", "gpus", "expected"),
    [
        ("slow_nic", 2, 2, ("slow-network", HOST, "hca=mlx5_1")),
        ("slow_nic", 2, 1, ("slow-network", HOST, "hca=mlx5_0")),
        ("slow_nic", 4, 1, ("slow-network", HOST, "hca=mlx5_0")),
        ("slow_cable", 4, 1, ("slow-network", HOST, "hca=mlx5_0")),
        # Both ports are normal in loopback, so either end of the cable, or a switch, may be at fault.
        ("slow_cable", 2, 2, ("slow-path", "r01-h01", "gang=all")),
        ("slow_cable", 2, 1, ("slow-path", "r01-h01", "gang=all")),
    ],
)
def test_slow_port_or_cable_is_the_only_cause_in_a_small_gang(
    tmp_path: Path, fault: str, hosts: int, gpus: int, expected: tuple[str, str, str]
) -> None:
    run = simulated(tmp_path / "run", f"{fault}:{HOST}:{gpus - 1}", hosts=hosts, gpus=gpus)
    assert causes(run) == [(*expected, "inspect_hardware")]


def test_results_that_the_other_host_lacks_belong_to_the_missing_gpu(tmp_path: Path) -> None:
    """A gang of two hosts cannot launch without the faulty one, so its other host stays without some results."""
    run = simulated(tmp_path / "run", f"missing_gpu:{HOST}:1", hosts=2, gpus=2)
    assert causes(run) == [("gpu-missing", HOST, "host", "inspect_hardware")]


NIC = ("slow-network", HOST, "nic=rail1", "inspect_hardware")


@pytest.mark.parametrize(
    ("fault", "expected"),
    [
        ("wrong_vbios", {NIC, ("differs", HOST, "gpu=1", "configure")}),
        ("ecc", {NIC, ("gpu-memory-errors", HOST, "gpu=1", "reset_gpu")}),
        ("pcie_narrow", {("pcie-link", HOST, "gpu=1", "reseat")}),
    ],
)
def test_gpu_is_suspected_only_of_slow_pairs_that_its_other_fault_explains(
    tmp_path: Path, fault: str, expected: set[tuple[str, str, str, str]]
) -> None:
    """The profile `smoke` measures no port without its GPU."""
    run = simulated(tmp_path / "run", f"slow_cable:{HOST}:1", f"{fault}:{HOST}:1", hosts=4, gpus=3, profile="smoke")
    assert set(causes(run)) == expected


def test_check_that_all_gpus_fail_does_not_hide_a_slow_cable(tmp_path: Path) -> None:
    """A driver or a setting may slow the copies of all GPUs. That does not explain why the pairs of one GPU are slower."""
    run = simulated(tmp_path / "run", f"slow_cable:{HOST}:1", hosts=4, gpus=3, profile="smoke")

    def change(item: Observation) -> Observation:
        is_copy = item.name == "host_copy.bandwidth"
        return replace(item, value=float(item.value or 0) * 0.2, samples=None) if is_copy else item

    evidence = {host: changed(item, change) for host, item in run.evidence.items()}
    report = merge(run.plan, evidence, fleets.packs_about(*PACKS))
    shown = [(cause.problem, cause.host, cause.part, cause.action) for cause in report.causes]
    assert [item for item in shown if item[0] != "slow-host-copies"] == [NIC]


def test_port_whose_tests_were_skipped_is_not_known_to_be_normal(tmp_path: Path) -> None:
    """Beside a normal port, another VBIOS would make the GPU a suspect."""
    run = simulated(tmp_path / "run", f"slow_cable:{HOST}:1", f"wrong_vbios:{HOST}:1", hosts=2, gpus=3)

    def change(item: Observation) -> Observation:
        is_of_port = item.name.startswith("verbs.")
        return replace(item, status=SKIPPED, value=None, samples=None, reason="busy") if is_of_port else item

    evidence = {host: changed(item, change) for host, item in run.evidence.items()}
    report = merge(run.plan, evidence, fleets.packs_about(*PACKS))
    failed = {(cause.problem, cause.part) for cause in report.causes if cause.verdict == FAIL}
    assert failed == {("slow-path", "gang=all"), ("differs", "gpu=1")}


@pytest.mark.parametrize("hosts", [2, 4])
@pytest.mark.parametrize("profile", ["smoke", "standard"])
def test_transport_that_slows_all_pairs_is_a_matter_of_configuration(tmp_path: Path, hosts: int, profile: str) -> None:
    run = simulated(tmp_path / "run", hosts=hosts, gpus=3, profile=profile)
    evidence = {host: over_sockets(item) for host, item in run.evidence.items()}
    report = merge(run.plan, evidence, fleets.packs_about(*PACKS))
    assert {(cause.problem, cause.part, cause.action) for cause in report.causes} == {
        ("slow-collectives", "gang=all", "configure")
    }


@pytest.mark.parametrize("hosts", [2, 4])
@pytest.mark.parametrize("profile", ["smoke", "standard"])
def test_path_that_is_a_little_slower_than_others_over_tcp_is_not_the_cause(
    tmp_path: Path, hosts: int, profile: str
) -> None:
    """Connections over TCP are not equally fast, so this shows no fault of a path until NCCL uses the normal transport."""
    run = simulated(tmp_path / "run", hosts=hosts, gpus=3, profile=profile)
    evidence = {host: scaled_path(over_sockets(item), 0.7) for host, item in run.evidence.items()}
    report = merge(run.plan, evidence, fleets.packs_about(*PACKS))
    assert {(cause.problem, cause.verdict, cause.action) for cause in report.causes} == {
        ("slow-collectives", FAIL, "configure"),
        ("slow-path", INCONCLUSIVE, "none"),
    }


@pytest.mark.parametrize("hosts", [2, 4])
@pytest.mark.parametrize("transport", ["NET/IB", "NET/IB/GDRDMA"])
def test_broken_path_is_no_matter_of_configuration_if_others_are_normal_over_the_same_transport(
    tmp_path: Path, hosts: int, transport: str
) -> None:
    run = simulated(tmp_path / "run", hosts=hosts, gpus=3, profile="smoke")
    evidence = {host: scaled_path(over(item, transport), 0.001) for host, item in run.evidence.items()}
    report = merge(run.plan, evidence, fleets.packs_about(*PACKS))
    failures = {(item.host, item.action) for item in report.verdicts if item.verdict == FAIL}
    assert failures == {("r01-h01", "inspect_hardware"), ("r01-h02", "inspect_hardware")}


def over_sockets(evidence: Evidence) -> Evidence:
    """Return the evidence as if NCCL had used TCP between the hosts."""

    def change(item: Observation) -> Observation:
        if item.stage != "gang" or not item.name.endswith((".busbw", "pairs.bandwidth")):
            return item
        return replace(item, value=float(item.value or 0) * 0.1, samples=None)

    return changed(over(evidence, "NET/Socket"), change)


def over(evidence: Evidence, transport: str) -> Evidence:
    """Return the evidence as if NCCL had reported this transport between the hosts."""

    def change(item: Observation) -> Observation:
        if item.name == "collective.transport" and item.stage == "gang":
            return replace(item, value=transport)
        if item.stage == "gang" and "transport" in item.params:
            return replace(item, params={**item.params, "transport": transport})
        return item

    return changed(evidence, change)


def scaled_path(evidence: Evidence, factor: float) -> Evidence:
    """Return the evidence with another bandwidth between the first two hosts on rail 1."""
    scopes = ("gpu=1,partner=r01-h01", "gpu=1,partner=r01-h02")

    def change(item: Observation) -> Observation:
        is_of_path = item.name == "pairs.bandwidth" and item.scope in scopes
        return replace(item, value=float(item.value or 0) * factor, samples=None) if is_of_path else item

    is_end = {record.host for record in evidence.records} & {"r01-h01", "r01-h02"}
    return changed(evidence, change) if is_end else evidence


def changed(evidence: Evidence, change: Callable[[Observation], Observation]) -> Evidence:
    return replace(
        evidence,
        records=tuple(
            replace(record, observations=tuple(map(change, record.observations))) for record in evidence.records
        ),
    )
