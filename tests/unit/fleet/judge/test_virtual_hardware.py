"""Hardware that a hypervisor chose, and that differs between virtual machines, leads to no inspection."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from fleet.judge.criteria import read_packs
from fleet.judge.judge import judge
from fleet.judge.virtual_hardware import CHOSEN, REMEDY
from schemas.readings import READINGS
from schemas.records import Metric, Value
from schemas.reports import FAIL, Verdict
from tests.unit.fleet.judge.small_fleet import host_evidence, one_figure_plan

HOSTS = ("h1", "h2", "h3", "h4")
PACKS = read_packs([])
PLAN = one_figure_plan(*HOSTS)
COMPARED = [
    item
    for pack in PACKS
    if pack.name == "h200-sxm"
    for item in pack.criteria
    if item.same_as_fleet and item.action == "inspect_hardware" and item.name in READINGS and not item.group_by
]
"""Criteria on one reading that compare hosts, and that ask for an inspection of the hardware."""


def compared(name: str, values: Mapping[str, Value], *, virtual: bool) -> list[Verdict]:
    """Return the failures of this reading; `values`: host -> its value. The scope is the host, or a part of it."""
    scope = {"host": "host", "infi": "hca=mlx5_0", "netw": "nic=eth0", "pcie": "pci=0000:16:00.0"}.get(
        name[:4], "gpu=0"
    )
    evidence = {
        host: host_evidence(
            PLAN, host,
            Metric(name=name, unit=READINGS[name].unit, values={scope: value}),
            Metric(name="host.virtual_machine", unit="1", values={"host": virtual}),
        )
        for host, value in values.items()
    }  # fmt: skip
    result = judge(PLAN, evidence, PACKS)
    return [item for item in result if item.name == name and item.verdict == FAIL and item.action != "none"]


@pytest.mark.parametrize("name", ["host.cpu.model", "infiniband.hca.board_id", "network.driver", "pcie.kind"])
def test_adapter_or_processor_of_another_kind_is_configured_in_a_virtual_machine_and_inspected_elsewhere(
    name: str,
) -> None:
    values = {host: "one kind" if host != "h3" else "another kind" for host in HOSTS}
    (verdict,) = compared(name, values, virtual=True)
    assert (verdict.host, verdict.action, REMEDY in verdict.reason) == ("h3", "configure", True)
    (verdict,) = compared(name, values, virtual=False)
    assert (verdict.host, verdict.action, REMEDY in verdict.reason) == ("h3", "inspect_hardware", False)


@pytest.mark.parametrize("name", ["gpu.architecture", "gpu.brand"])
def test_gpu_that_differs_is_inspected_in_a_virtual_machine(name: str) -> None:
    values: dict[str, Value] = {host: "Hopper" if host != "h3" else "Ampere" for host in HOSTS}
    (verdict,) = compared(name, values, virtual=True)
    assert (verdict.host, verdict.action) == ("h3", "inspect_hardware")


def test_other_comparisons_that_ask_for_an_inspection_are_of_gpus_fabric_cables_bmcs_and_memory_modules() -> None:
    others = {item.name.split(".")[0] for item in COMPARED if not item.name.startswith(CHOSEN)}
    assert others <= {"gpu", "fabric", "port", "bmc", "host"}
    modules = ("host.dimm.", "host.memory.speed")
    assert all(item.name.startswith((*CHOSEN, *modules)) for item in COMPARED if item.name.startswith("host."))
    assert {"infiniband.hca.board_id", "network.nic_count", "host.cpu.model"} <= {item.name for item in COMPARED}
