"""Test the causes of a slow port, cable or transport in small gangs, and beside another fault of the same GPU.

A gang is the hosts of one multi-node launch.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from fleet.judge.evidence import Evidence
from fleet.records.load import Run, load
from fleet.report.merge import merge
from fleet.simulate.fleet import Fleet, place_faults, write_run
from fleet.simulate.records import JUDGED
from schemas.records import Observation
from schemas.reports import FAIL, FleetReport
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


@pytest.mark.parametrize("hosts", [2, 4])
@pytest.mark.parametrize("profile", ["smoke", "standard"])
def test_transport_that_slows_all_pairs_is_a_matter_of_configuration(tmp_path: Path, hosts: int, profile: str) -> None:
    run = simulated(tmp_path / "run", hosts=hosts, gpus=3, profile=profile)
    evidence = {host: over_sockets(item) for host, item in run.evidence.items()}
    report = merge(run.plan, evidence, fleets.packs_about(*PACKS))
    assert {(cause.problem, cause.part, cause.action) for cause in report.causes} == {
        ("slow-collectives", "gang=all", "configure")
    }


def over_sockets(evidence: Evidence) -> Evidence:
    """Return the evidence as if NCCL had used TCP between the hosts."""

    def change(item: Observation) -> Observation:
        if item.name == "collective.transport" and item.stage == "gang":
            return replace(item, value="NET/Socket")
        if item.stage == "gang" and "transport" in item.params:
            item = replace(item, params={**item.params, "transport": "NET/Socket"})
        if item.stage != "gang" or not item.name.endswith((".busbw", "pairs.bandwidth")):
            return item
        return replace(item, value=float(item.value or 0) * 0.1, samples=None)

    return replace(
        evidence,
        records=tuple(
            replace(record, observations=tuple(map(change, record.observations))) for record in evidence.records
        ),
    )
