"""Simulated fleets: healthy fleets pass, reports name exactly the simulated faults, and no report accepts simulated hardware."""

from __future__ import annotations

import html
import json
import os
import re
import runpy
import signal
import subprocess
import sys
import time
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from fleet.inventory.manifest_file import read_manifest
from fleet.judge.criteria import Pack, read_packs
from fleet.judge.evidence import Evidence
from fleet.judge.judge import judge
from fleet.records.load import load
from fleet.report.formatting import cause_action
from fleet.report.html.page import render_html
from fleet.report.merge import merge
from fleet.report.run_report import report_of as report_of_run
from fleet.rma.parts import PART_ACTIONS
from fleet.simulate.bmcs import FAULTY_SUPPLY, LOG
from fleet.simulate.faults import FAULTS
from fleet.simulate.fleet import Fleet, RunWriter, place_faults, write_run
from fleet.simulate.gpu_data import values_by_level
from fleet.simulate.memory_modules import FAULTY_SLOT
from fleet.simulate.records import JUDGED
from rackproof.main import main
from schemas import documents, quick
from schemas.errors import RunError, UsageError
from schemas.records import Observation, to_json
from schemas.reports import ACCEPTED, FAIL, INCONCLUSIVE, PASS, FleetReport, Verdict, VerdictKind
from tests import ROOT, builders, fleets

CREATED = "2026-11-21T04:00:00Z"
GPU = 1
"""Index of the GPU that has the fault, for faults of a GPU."""


def run_of(directory: Path, *faults: str, jobs: int = 1, **fleet: Any) -> Path:
    """Write a simulated run and return its directory."""
    simulated = Fleet(**{"profile": "smoke", "readings": JUDGED, "gpus": 2, **fleet})
    plan = simulated.plan(directory.name, CREATED)
    write_run(directory, simulated, place_faults(faults, plan, simulated.seed), plan, jobs=jobs)
    return directory


def report_of(directory: Path) -> FleetReport:
    run = load(directory)
    return merge(run.plan, run.evidence, read_packs([]), events=run.events, quarantined=run.quarantined)


# --- the data file


def test_data_file_matches_the_records_and_is_small() -> None:
    path = ROOT / "fleet/simulate/h200-sxm.json"
    text = runpy.run_path(str(ROOT / "docs/measurements/simulation_data.py"))["data_file"]()
    assert path.read_text(encoding="utf-8") == text, "run docs/measurements/simulation_data.py again"
    assert len(text) < 200_000
    assert "docs/measurements" in json.loads(text)["source"]


def test_figures_are_assumed_only_for_benchmarks_without_h200_records() -> None:
    data = json.loads((ROOT / "fleet/simulate/h200-sxm.json").read_text(encoding="utf-8"))
    measured = {figure["name"] for figure in data["figures"] if "source" not in figure}
    assumed = {figure["name"] for figure in data["figures"] if "source" in figure}
    assert {"gemm.throughput", "memory.bandwidth", "stress.throughput", "peer_copy.bandwidth"} <= measured
    without_h200_records = (
        "fashion_mnist.",
        "pairs.",
        "local_storage.",
        "shared_storage.",
        "digest.wrong_",
        "gemm_shapes.",
        "kernel_launch.",
        "pageable_copy.",
        "group_copy.",
        "pulse.",
        "inference.",
        "mixture_of_experts.",
        "loss_curve.",
    )
    assert assumed - measured == {name for name in assumed if name.startswith(without_h200_records)}


def test_simulated_values_are_between_the_measured_minimum_and_maximum() -> None:
    values = values_by_level([100.0, 97.0, 101.0, 2.0])  # median, minimum, maximum, standard deviation
    assert (min(values), max(values)) == (97.0, 101.0)
    # The mean is below the median (100), because the minimum (97) is farther from the median than the maximum (101).
    # It is closer to the median than to the minimum: 98.5 is in the middle.
    assert 98.5 < sum(values) / len(values) < 100.0


# --- healthy fleets


@pytest.mark.parametrize(("hosts", "gpus", "racks"), [(9, 2, 3), (3, 8, 1)])
def test_healthy_fleet_passes(tmp_path: Path, hosts: int, gpus: int, racks: int) -> None:
    report = report_of(run_of(tmp_path / "run", hosts=hosts, gpus=gpus, racks=racks))
    assert {verdict.verdict for verdict in report.verdicts} <= {PASS}
    assert not any(row.failed or row.inconclusive for row in report.judged)
    assert report.coverage.expected == report.coverage.measured > 0
    assert not report.quarantined
    assert report.acceptance.status == "SIMULATED PASS"


TWO_GANGS = {"hosts": 4, "racks": 2}
SHAPES: list[dict[str, Any]] = [
    {"hosts": 1, "gpus": 1, "racks": 1, "gang": "none"},
    {"hosts": 2, "gpus": 1, "racks": 1},
    {"hosts": 2, "racks": 1, "storage": True},
    {"hosts": 3, "gpus": 3, "racks": 1},  # each port is measured with several hosts
    TWO_GANGS,
]


@pytest.mark.parametrize(
    ("profile", "shape"),
    [*(("extended", shape) for shape in SHAPES), *((name, TWO_GANGS) for name in ("smoke", "standard", "revalidate"))],
)
def test_healthy_fleet_is_accepted_with_each_profile(tmp_path: Path, profile: str, shape: dict[str, Any]) -> None:
    report = report_of(run_of(tmp_path / "fleet", profile=profile, **shape))
    assert [cause.title for cause in report.causes] == []
    assert report.decision == ACCEPTED


def test_healthy_fleet_passes_the_standard_profile_with_all_readings(tmp_path: Path) -> None:
    report = report_of(run_of(tmp_path / "run", profile="standard", hosts=2, gpus=8, readings="all"))
    assert [verdict.reason for verdict in report.verdicts if verdict.verdict != PASS] == []
    assert report.acceptance.status == "SIMULATED PASS"


@pytest.mark.parametrize(("hosts", "gpus"), [(1, 1), (1, 2), (1, 3), (2, 1), (2, 2), (2, 3), (3, 1), (3, 3)])
def test_small_fleet_is_accepted_if_healthy_and_rejected_if_all_its_parts_are_equally_slow(
    tmp_path: Path, hosts: int, gpus: int
) -> None:
    gang = "none" if hosts == 1 else "rack"
    run = load(run_of(tmp_path / "run", profile="standard", hosts=hosts, gpus=gpus, gang=gang))
    report = merge(run.plan, run.evidence, read_packs([]))
    assert [(verdict.name, verdict.reason) for verdict in report.verdicts if verdict.verdict != PASS] == []
    assert report.acceptance.status == "SIMULATED PASS"
    assert not any("Bandwidth" in line and "NOT JUDGED" in line for line in report.acceptance.summary)
    measured = {
        item.name for evidence in run.evidence.values() for item in evidence.benchmarks() if item.value is not None
    }
    for family in SLOW_FAMILIES:
        names = {
            name
            for name in measured
            if name.startswith(family) and name.endswith((".busbw", ".bandwidth", ".throughput"))
        }
        if not names:
            continue
        slow = {host: with_slow_figures_only(evidence, names, 1e9) for host, evidence in run.evidence.items()}
        plan = replace(run.plan, expected=tuple(item for item in run.plan.expected if item.name in names))
        assert merge(plan, slow, criteria_on(names)).acceptance.status == "SIMULATED FAIL", family


SLOW_FAMILIES = ("gemm.", "stress.", "memory.", "host_copy.", "peer_copy.", "collective.", "pairs.")
"""Prefixes of the names of figures. The test above slows down the figures of one prefix at a time."""


def with_slow_figures_only(evidence: Evidence, names: set[str], rate: float) -> Evidence:
    """Return the evidence of a host whose parts are all equally slow.

    It has only the figures of these names. No figure is above `rate`.
    """

    def slow_down(item: Observation) -> Observation | None:
        if item.name not in names:
            return None
        slow = isinstance(item.value, float)
        return replace(item, value=min(rate, float(item.value or 0)), samples=None) if slow else item

    return builders.with_observations(builders.with_observations(evidence, slow_down), slow_down, gang=True)


def criteria_on(names: set[str]) -> list[Pack]:
    """Return the packs with only the criteria on these figures, to save time."""
    return [
        replace(pack, criteria=tuple(item for item in pack.criteria if any(map(item.matches_name, names))))
        for pack in read_packs([])
    ]


# --- faults

HOST_FAULTS = {kind: fault for kind, fault in FAULTS.items() if kind not in ("slow_path", "slow_switch", "slow_rail")}
"""Faults of one host. Faults of the fabric are tested in test_simulated_ports.py."""
EXPECTED_CRITERIA: dict[str, str] = {
    "xid79": "xid-79 xid-during-run localise plan",
    "missing_gpu": "gpu-count gpu-pci-count localise plan",
    "ecc": "ecc-uncorrectable-volatile",
    "row_remap_pending": "row-remap-pending",
    "row_remap_failed": "row-remap-failed",
    "pcie_narrow": "pcie-width uniform-pcie-width host-to-device device-to-host",
    "pcie_replays": "pcie-replay",
    "nvlink_down": "nvlink-active nvlink-missing uniform-nvlink-up uniform-nvlink-speed peer-copy",
    "fabric_unhealthy": "fabric-state",
    "thermal": "hw-thermal-time stress-hw-thermal stress-bf16 stress-power gemm-bf16 straggler-compute gemm-fp32-vs-fleet",
    "slow_gpu": "stress-work-per-cycle work-per-cycle-vs-fleet stress-bf16 gemm-bf16 gemm-fp32-vs-fleet straggler-compute",
    "slow_hbm": "hbm-copy memory-vs-fleet",
    "power_limit": "power-limit-lowered uniform-gpu-power-in-force stress-bf16 stress-power",
    "bad_memory_word": "integrity-wrong-words",
    "silent_corruption": "digest-majority",
    "duplicate_serial": "identity-unique bmc-serial",
    "wrong_vbios": "uniform-vbios",
    "missing_observations": "plan",
    "slow_nic": "localise",
    "slow_cable": "localise",
    "dark_lane": "optics-rx-power-alarm optics-rx-los optics-rx-power-vs-fleet",
    "degrading_cable": "port-symbol-errors port-fec-uncorrectable",
    "missing_dimm": "uniform-dimm-populated uniform-dimm-count uniform-host-memory uniform-numa-memory",
    "slow_dimm": "uniform-dimm-rated uniform-memory-speed",
    "slow_host": "localise",
    "slow_disk": "local-storage-bandwidth-fleet local-storage-iops-fleet local-storage-latency-fleet",
    "slow_storage_client": "shared-storage-client-fleet",
    "storage_wrong_byte": "shared-storage-bytes",
    "swapped_cables": "rail-switch",
    "bmc_psu_lost": "bmc-power-supply bmc-power-redundancy",
    "bmc_event": "bmc-event",
    "serial_mismatch": "bmc-serial",
    "wrong_driver": "uniform-driver",
    "imex_down": "nvlink-domain",
    "wrong_clique": "rack-nvlink-partition",
    "hung": "localise plan",
    "unreachable": "plan",
    "no_record": "plan",
    "truncated_record": "plan",
    "stale_record": "plan",
}
"""Fault -> criteria with a verdict other than `pass` on the host with the fault, separated by spaces.

If one of them is `plan`, observations are missing, and the test allows further criteria.
"""
EXPECTED_PROBLEMS: dict[str, str] = {
    "xid79": "gpu-fell-off-bus",
    "missing_gpu": "gpu-missing",
    "ecc": "gpu-memory-errors",
    "row_remap_pending": "gpu-memory-errors",
    "row_remap_failed": "gpu-memory-errors",
    "pcie_narrow": "pcie-link",
    "pcie_replays": "pcie-link",
    "nvlink_down": "nvlink",
    "fabric_unhealthy": "nvlink",
    "thermal": "hot",
    "slow_gpu": "slow-compute",
    "slow_hbm": "slow-memory",
    "power_limit": "power-limited",
    "bad_memory_word": "wrong-results",
    "silent_corruption": "wrong-results",
    "duplicate_serial": "bmc-serial",
    "wrong_vbios": "differs",
    "missing_observations": "not-verified",
    "slow_nic": "slow-network",
    "slow_cable": "slow-network",
    "dark_lane": "module",
    "degrading_cable": "port",
    "missing_dimm": "memory-module-missing",
    "slow_dimm": "memory-module-differs",
    "slow_host": "slow-network",
    "slow_disk": "slow-storage",
    "slow_storage_client": "slow-storage",
    "storage_wrong_byte": "wrong-results",
    "swapped_cables": "swapped-cables",
    "bmc_psu_lost": "bmc-part",
    "bmc_event": "bmc-event",
    "serial_mismatch": "bmc-serial",
    "wrong_driver": "differs",
    "imex_down": "nvlink-domain",
    "wrong_clique": "differs",
    "hung": "stopped-launch",
    "unreachable": "no-record",
    "no_record": "no-record",
    "truncated_record": "no-record",
    "stale_record": "no-record",
}
"""Fault -> `problem` of the one cause to which the report attributes the verdicts on the host with the fault."""
HOST_CANNOT_MEASURE = {"xid79", "missing_gpu", "hung"}
"""Faults of a GPU after which its host cannot run benchmarks on all GPUs."""
EXPECTED_REASONS = {
    "unreachable": "unreachable at Prepare the hosts",
    "no_record": "is missing",
    "truncated_record": "not JSON at offset",
    "stale_record": "nonce",
    "missing_observations": "not observed; the launch finished, so the reason is not known",
    "hung": "not finished after 180 s",
    "slow_nic": "suspect NIC",
    "slow_cable": "suspect NIC",
    "slow_host": "suspect host",
}
"""Fault -> words that the reason of a verdict on the host with the fault must contain."""


@pytest.fixture(scope="module")
def faulty_run(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, str], Path]:
    """Return the host of each fault, and the run directory. A host has at most one fault; the first host of a rack has none."""
    racks = -(-len(HOST_FAULTS) // 7)
    chosen = Fleet(profile="smoke", readings=JUDGED, gpus=2, hosts=8 * racks, racks=racks, nvlink_domains=True,
                   storage=True, bmcs=True)  # fmt: skip
    plan = chosen.plan("faulty", CREATED)
    candidates = [host.name for host in plan.hosts if not host.name.endswith("h01")]
    host_of_fault = dict(zip(HOST_FAULTS, candidates, strict=False))
    directory = tmp_path_factory.mktemp("runs") / "faulty"
    faults = place_faults(
        [f"{kind}:{host}:{GPU}" if FAULTS[kind].of_gpu else f"{kind}:{host}" for kind, host in host_of_fault.items()],
        plan,
        0,
    )
    write_run(directory, chosen, faults, plan)
    return host_of_fault, directory


@pytest.fixture(scope="module")
def faulty_fleet(
    faulty_run: tuple[dict[str, str], Path],
) -> tuple[dict[str, str], dict[str, list[Verdict]], FleetReport]:
    """Return the host of each fault, for each host the verdicts other than pass, and the report."""
    host_of_fault, directory = faulty_run
    report = report_of(directory)
    verdicts_by_host: dict[str, list[Verdict]] = defaultdict(list)
    for verdict in report.verdicts:
        if verdict.verdict != PASS:
            verdicts_by_host[verdict.host].append(verdict)
    return host_of_fault, verdicts_by_host, report


def _kill_own_process(_: RunWriter, *__: object) -> list[Any]:
    os.kill(os.getpid(), signal.SIGKILL)
    return []


def test_killed_process_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RunWriter, "write", _kill_own_process)
    with pytest.raises(RunError, match="one of the 2 processes that write the records was killed"):
        run_of(tmp_path / "run", hosts=16, racks=2, jobs=2)


def test_every_fault_has_an_expectation_and_documentation() -> None:
    assert set(EXPECTED_CRITERIA) == set(HOST_FAULTS)
    text = (ROOT / "docs/simulate.md").read_text(encoding="utf-8")
    assert [kind for kind in FAULTS if f"`{kind}`" not in text] == []


@pytest.mark.parametrize("kind", HOST_FAULTS)
def test_fault_is_reported_on_its_host_and_gpu(
    kind: str, faulty_fleet: tuple[dict[str, str], dict[str, list[Verdict]], FleetReport]
) -> None:
    host_of_fault, verdicts_by_host, report = faulty_fleet
    host = host_of_fault[kind]
    verdicts = verdicts_by_host[host]
    criteria = {item.criterion for item in verdicts}
    assert set(EXPECTED_CRITERIA[kind].split()) <= criteria
    if "plan" not in criteria:
        assert criteria == set(EXPECTED_CRITERIA[kind].split()), "no other criterion may fail on the host"
    contradictions = [item.reason for item in verdicts if item.kind == VerdictKind.CONTRADICTORY]
    assert contradictions == [], "a simulated record must be as consistent as a record of the agent"
    assert not any("resume the run" in item.reason for item in verdicts), (
        "no reason may advise to resume the run, because a simulated run cannot be resumed"
    )
    assert all(
        EXPECTED_REASONS[kind] in item.reason
        for item in verdicts[:1]
        if kind in EXPECTED_REASONS and kind not in HOST_CANNOT_MEASURE
    )
    assert any(EXPECTED_REASONS.get(kind, "") in item.reason for item in verdicts)
    if FAULTS[kind].of_gpu and kind not in HOST_CANNOT_MEASURE:
        scopes = [item.scope.split(",") for item in verdicts]
        names = {f"gpu={GPU}", f"peer={GPU}"} if kind != "swapped_cables" else {"hca=mlx5_0", "hca=mlx5_1"}
        assert all(names & {*parts} for parts in scopes), scopes
    expected = FAIL if any(name != "plan" for name in EXPECTED_CRITERIA[kind].split()) else INCONCLUSIVE
    decision = next(row.decision for row in report.hosts if row.name == host)
    assert decision == {FAIL: "rejected", INCONCLUSIVE: "incomplete"}[expected]


@pytest.mark.parametrize("kind", HOST_FAULTS)
def test_fault_is_one_cause_with_the_right_part(
    kind: str, faulty_fleet: tuple[dict[str, str], dict[str, list[Verdict]], FleetReport]
) -> None:
    host_of_fault, _, report = faulty_fleet
    (cause,) = (cause for cause in report.causes if host_of_fault[kind] in cause.hosts)
    assert cause.problem == EXPECTED_PROBLEMS[kind]
    whole_host = not FAULTS[kind].of_gpu or kind == "missing_gpu"
    of_parts = {
        "slow_nic": "nic=rail1",
        "slow_cable": "nic=rail1",
        "dark_lane": "hca=mlx5_0",
        "degrading_cable": "hca=mlx5_0",
        "slow_disk": "directory=data2",
        "slow_storage_client": "directory=mnt:shared",
        "storage_wrong_byte": "directory=mnt:shared",
        "swapped_cables": "hca=mlx5_0",  # the first of the two adapters
        "bmc_psu_lost": f"psu={FAULTY_SUPPLY}",
        "bmc_event": f"log={LOG}",
        "missing_dimm": FAULTY_SLOT,
        "slow_dimm": FAULTY_SLOT,
        "wrong_clique": "gpu=0",  # the first GPU: all GPUs of the host are in the wrong clique
    }
    assert cause.part == of_parts.get(kind, "host" if whole_host else f"gpu={GPU}")


@pytest.mark.parametrize(("faults", "manifest"), [(2, False), (3, True)])
def test_swapped_cables_are_the_only_causes_in_a_fleet_with_eight_rails(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], faults: int, manifest: bool
) -> None:
    """There is one cause for each fault, and it names the two adapters whose cables are swapped."""
    fleet = {"hosts": 6, "gpus": 8}
    swapped = {f"r01-h{number + 2:02}": number + 1 for number in range(faults)}
    directory = run_of(tmp_path / "faulty", *(f"swapped_cables:{host}:{gpu}" for host, gpu in swapped.items()), **fleet)
    if manifest:
        assert main(["cables", str(run_of(tmp_path / "healthy", **fleet))]) == 0
        (tmp_path / "cables.csv").write_text(capsys.readouterr().out)
        plan = documents.read(directory / "plan.json", "plan")
        names = [host["name"] for host in plan["hosts"]]
        plan["manifest"] = [to_json(part) for part in read_manifest(str(tmp_path / "cables.csv"), names)]
        documents.write(directory / "plan.json", plan)
    report = report_of_run(load(directory), read_packs([]))
    assert {cause.problem for cause in report.causes} == {"swapped-cables"}
    result = {cause.host: {part.scope for part in cause.parts} for cause in report.causes}
    assert result == {host: {f"hca=mlx5_{gpu}", f"hca=mlx5_{gpu + 1}"} for host, gpu in swapped.items()}
    assert {host.name for host in report.hosts if host.decision == "rejected"} == swapped.keys()
    counted = f"{48 - 2 * faults} of 48"
    text = f"{counted} cables as in the manifest" if manifest else f"{counted} ports cabled as on similar hosts"
    assert f"Cabling: {text}" in report.acceptance.summary


def test_slow_rail_of_a_host_with_swapped_cables_is_attributed_to_the_cables(tmp_path: Path) -> None:
    """Swapped cables send the traffic of two rails of r01-h03 over the spine switch.

    This explains why one of these rails is slow, so the NIC of r01-h03 is not reported as slow.
    """
    faults = ("swapped_cables:r01-h03:0", "slow_nic:r01-h03:1", "slow_nic:r01-h06:0")
    report = report_of(run_of(tmp_path / "run", *faults, hosts=8))
    assert {(cause.host, cause.problem) for cause in report.causes} == {
        ("r01-h03", "swapped-cables"),
        ("r01-h06", "slow-network"),
    }


def test_swapped_cables_are_found_at_the_second_leaf_switch(tmp_path: Path) -> None:
    report = report_of(run_of(tmp_path / "run", "swapped_cables:r01-h06:0", hosts=8, hosts_per_leaf=4))
    (cause,) = report.causes
    assert (cause.host, cause.problem) == ("r01-h06", "swapped-cables")


def test_swapped_cables_need_two_adapters() -> None:
    plan = Fleet(profile="smoke", hosts=2, gpus=1).plan("run", CREATED)
    with pytest.raises(UsageError, match="swapped_cables needs 2 GPUs in a host, and r01-h01 has 1"):
        place_faults(["swapped_cables:r01-h01"], plan, 0)


def test_duplicate_serial_needs_a_second_host() -> None:
    plan = Fleet(profile="smoke", hosts=1, gpus=2, gang="none").plan("run", CREATED)
    with pytest.raises(UsageError, match="duplicate_serial needs 2 hosts; add --hosts"):
        place_faults(["duplicate_serial"], plan, 0)


EXPECTED_PACKAGES = {
    "row_remap_failed": "rma",
    "slow_hbm": "rma",
    "bad_memory_word": "rma",
    "silent_corruption": "rma",
    "pcie_narrow": "reseat",
    "pcie_replays": "reseat",
    "missing_gpu": "inspect_hardware",
    "nvlink_down": "inspect_hardware",
    "thermal": "inspect_hardware",
    "slow_gpu": "inspect_hardware",
    "duplicate_serial": "inspect_hardware",
    "slow_nic": "inspect_hardware",
    "slow_cable": "inspect_hardware",
    "dark_lane": "reseat",
    "degrading_cable": "reseat",
    "missing_dimm": "reseat",
    "slow_dimm": "inspect_hardware",
    "slow_host": "inspect_hardware",
    "slow_disk": "inspect_hardware",
    "slow_storage_client": "inspect_hardware",
    "storage_wrong_byte": "inspect_hardware",
    "hung": "inspect_hardware",
    "bmc_psu_lost": "inspect_hardware",
    "bmc_event": "inspect_hardware",
    "serial_mismatch": "inspect_hardware",
}
"""Fault -> action in its RMA package. Other faults have no package, because their action is not in PART_ACTIONS."""


def test_rma_lists_the_causes_of_the_report_with_their_parts_and_actions(
    faulty_run: tuple[dict[str, str], Path],
    faulty_fleet: tuple[dict[str, str], dict[str, list[Verdict]], FleetReport],
    capsys: pytest.CaptureFixture[str],
) -> None:
    host_of_fault, directory = faulty_run
    report = faulty_fleet[2]
    documents.write_text(directory / "report.json", quick.text(to_json(report)))
    assert main(["rma", str(directory), "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert list(dict.fromkeys(row["title"] for row in rows)) == [cause.title for cause in report.causes]
    listed = {(row["title"], row["host"], row["place"], row["serial"], row["action"]) for row in rows if row["path"]}
    assert listed == {
        (cause.title, part.host, part.scope, part.serial, cause.action)
        for cause in report.causes
        if cause.action in PART_ACTIONS
        for part in cause.parts
    }
    actions = {row["host"]: row["action"] for row in rows if row["path"]}
    for kind, host in host_of_fault.items():
        assert actions.get(host) == EXPECTED_PACKAGES.get(kind), kind
    for row in rows:
        if row["path"]:
            part = documents.read(Path(row["path"]) / "part.json", "part")
            assert row["title"] in [cause["title"] for cause in part["causes"]]
            assert (part["action"], part["slot"]["host"], part["slot"]["place"]) == (
                row["action"],
                row["host"],
                row["place"],
            )
            assert part["part"].get("serial", "") == row["serial"]
    page = render_html(report)
    heading_of = {
        html.unescape(title): re.sub("<[^>]+>", "", heading)
        for section in page.split('<section class="action-group')[1:]
        for heading in re.findall(r"<h3>(.*?) <span", section, re.DOTALL)[:1]
        for title in re.findall(r'<p class="title">(.*?)</p>', section)
    }
    for cause in report.causes:
        action = cause_action(FAIL, cause.action, cause.problem) if cause.verdict == FAIL else "Could not be verified"
        assert heading_of[cause.title].endswith(action), cause.title


def test_only_hosts_with_a_fault_have_verdicts_other_than_pass(
    faulty_fleet: tuple[dict[str, str], dict[str, list[Verdict]], FleetReport],
) -> None:
    host_of_fault, verdicts_by_host, report = faulty_fleet
    assert set(verdicts_by_host) == set(host_of_fault.values())
    assert {
        item.host for items in verdicts_by_host.values() for item in items if item.criterion == "identity-unique"
    } == {host_of_fault["duplicate_serial"]}, "the BMCs show which of the two hosts reports a wrong serial"
    assert report.acceptance.status == "SIMULATED FAIL"


@pytest.mark.parametrize("readings", ["judged", "all"])
def test_slow_host_is_excluded_and_the_rest_of_its_gang_measured_again(tmp_path: Path, readings: str) -> None:
    profile = tmp_path / "network.yml"
    profile.write_text(yaml.safe_dump(fleets.NETWORK_PROFILE))
    run = load(run_of(tmp_path / "run", "slow_host:r01-h03", profile=str(profile), hosts=5, readings=readings))
    packs = fleets.packs_about("memory", "collective", "pairs", "verbs")
    failed = [item for item in judge(run.plan, run.evidence, packs) if item.verdict != PASS]
    assert {item.host for item in failed} == {"r01-h03"}
    assert {"localise", "fabric-all-reduce"} <= {item.criterion for item in failed}
    launches = {host: [launch.number for launch in evidence.launches() if launch.stage == "gang"]
                for host, evidence in run.evidence.items()}  # fmt: skip
    assert launches == {f"r01-h{number:02}": [1] if number == 3 else [1, 2] for number in range(1, 6)}


# --- marks of a simulated run


def test_every_report_format_says_simulated(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    directory = run_of(tmp_path / "run", hosts=2)
    before = {path.name for path in directory.iterdir()}
    assert main(["report", str(directory)]) == 0
    assert "FINAL ACCEPTANCE: SIMULATED PASS" in capsys.readouterr().out
    assert main(["report", str(directory), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["simulated"] is True
    reports = [path for path in directory.iterdir() if path.is_file() and path.name not in before]
    assert {"report.json", "report.md", "report.html", "verdicts.prom"} <= {path.name for path in reports}
    for path in reports:
        assert "SIMULATED" in path.read_text(encoding="utf-8"), path.name
    document = json.loads((directory / "report.json").read_text(encoding="utf-8"))
    assert (document["simulated"], document["acceptance"]["status"]) == (True, "SIMULATED PASS")
    prom = (directory / "verdicts.prom").read_text(encoding="utf-8")
    assert 'decision="SIMULATED accepted"' in prom
    assert 'decision="accepted"' not in prom
    page = (directory / "report.html").read_text(encoding="utf-8")
    assert "<title>SIMULATED PASS" in page
    assert "accepts no hardware" in page
    assert main(["watch", str(directory), "--once"]) == 0
    assert "SIMULATED" in capsys.readouterr().out


def test_simulated_records_are_rejected_in_a_real_run(tmp_path: Path) -> None:
    directory = run_of(tmp_path / "run", hosts=2)
    plan = json.loads((directory / "plan.json").read_text(encoding="utf-8"))
    del plan["simulated"]
    documents.write(directory / "plan.json", plan)
    report = report_of(directory)
    assert report.acceptance.status == "INCOMPLETE"
    assert {item.path for item in report.quarantined} >= {"hosts/r01-h01.json", "hosts/r01-h02.json"}
    assert all("simulated yes, expected no" in item.reason for item in report.quarantined)
    assert report.coverage.measured == 0


def test_real_record_is_rejected_in_a_simulated_run(tmp_path: Path) -> None:
    directory = run_of(tmp_path / "run", hosts=2)
    path = directory / "hosts/r01-h02.json"
    record = json.loads(path.read_text(encoding="utf-8"))
    del record["simulated"]
    documents.write(path, record)
    report = report_of(directory)
    assert [item.path for item in report.quarantined] == ["hosts/r01-h02.json"]
    assert report.acceptance.status == "SIMULATED INCOMPLETE"


def test_serials_of_simulated_gpus_start_with_sim(tmp_path: Path) -> None:
    run = load(run_of(tmp_path / "run", hosts=2))
    serials = [gpu.serial for evidence in run.evidence.values() for gpu in evidence.gpus()]
    assert serials == ["SIM00000000", "SIM00000001", "SIM00000100", "SIM00000101"]


# --- reproducibility


def files(directory: Path) -> dict[str, bytes]:
    return {str(path.relative_to(directory)): path.read_bytes() for path in directory.rglob("*") if path.is_file()}


def test_files_do_not_depend_on_the_number_of_processes(tmp_path: Path) -> None:
    faults = ("ecc", "slow_nic", "unreachable")
    by_one_process, by_two_processes = (
        files(run_of(tmp_path / name / "run", *faults, hosts=6, racks=2, jobs=jobs))
        for name, jobs in (("a", 1), ("b", 2))
    )
    assert by_one_process == by_two_processes
    assert "events.jsonl" in by_one_process


def test_another_seed_measures_the_same_gpus_slightly_differently(tmp_path: Path) -> None:
    first, second = (load(run_of(tmp_path / f"run{seed}", hosts=2, seed=seed)) for seed in (1, 2))
    gpus = [[gpu for evidence in run.evidence.values() for gpu in evidence.gpus()] for run in (first, second)]
    assert gpus[0] == gpus[1]
    bandwidths = [
        [
            observed.value
            for evidence in run.evidence.values()
            for observed in evidence.benchmarks()
            if observed.name == "memory.bandwidth"
        ]
        for run in (first, second)
    ]
    assert bandwidths[0] != bandwidths[1]
    assert all(isinstance(first, float) and isinstance(second, float) and abs(first / second - 1) < 0.01
               for first, second in zip(*bandwidths, strict=True))  # fmt: skip


# --- the command


def test_command_prints_the_run_and_its_faults(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    directory = tmp_path / "run"
    command = [
        "simulate",
        str(directory),
        "--hosts",
        "4",
        "--gpus",
        "2",
        "--racks",
        "2",
        "--profile",
        "smoke",
        "--json",
    ]
    assert main([*command, "--fault", "ecc:r02-h01:1", "--fault", "unreachable"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert (document["simulated"], document["hosts"], document["gpus"]) == (True, 4, 8)
    assert document["faults"][0] == {"kind": "ecc", "host": "r02-h01", "gpu": 1}
    assert document["faults"][1]["host"] != "r02-h01"
    assert main(command) == 64  # an existing directory is not changed
    assert "already exists" in capsys.readouterr().err


def test_list_faults_prints_all_kinds(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", "--list-faults"]) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == list(FAULTS)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--fault", "eccc"], "no fault is called eccc (did you mean ecc?)"),
        (["--fault", "ecc:r01-h99"], "no host is called r01-h99"),
        (["--fault", "ecc:r01-h01:8"], "give one of 0 to 7"),
        (["--fault", "wrong_driver:r01-h01:2"], "wrong_driver is a fault of a whole host: leave out :2"),
        (["--hosts", "1", "--gang", "none", *["--fault", "ecc"] * 2], "every host has a fault already"),
        (["--profile", "rehearsal"], "is not simulated"),
        (["--profile", "soak"], "is not simulated"),
        (["--profile", "scaling"], "is not simulated"),
        (["--racks", "9"], "more racks than hosts"),
        (["--hosts", "3", "--racks", "3"], "only 1 host, but a launch needs at least 2: give more hosts"),
        (["--hosts", "1", "--gang", "all"], "--gang all: a gang would have only 1 host"),
        (["--model", "h100-sxm"], "no data of h100-sxm"),
        (["--gpus", "17"], "at most 16"),
    ],
)
def test_unsupported_simulation_is_refused_in_one_error_line(
    arguments: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["simulate", str(tmp_path / "run"), *arguments]) == 64
    output = capsys.readouterr().err
    assert message in output
    assert output.count("\n") == 1
    assert not (tmp_path / "run" / "plan.json").exists()


def test_single_gpu_hosts_without_a_gang_pass_and_unknown_models_are_errors(tmp_path: Path) -> None:
    report = report_of(run_of(tmp_path / "run", hosts=3, gpus=1, gang="none"))
    assert report.acceptance.status == "SIMULATED PASS"
    with pytest.raises(UsageError, match="no data of b200"):
        Fleet(model="b200").plan("run", CREATED)


def test_interrupted_command_prints_no_traceback_and_leaves_no_partial_file(tmp_path: Path) -> None:
    run = tmp_path / "large"
    command = [sys.executable, ROOT / "rackproof", "simulate", run, "--hosts", "400", "--readings", JUDGED]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    while not [*run.glob("hosts/*.json")] and process.poll() is None:
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    assert errors.splitlines()[-1].startswith("rackproof: interrupted; ")
    assert "Traceback" not in errors
    for path in run.glob("hosts/*.json"):
        json.loads(path.read_bytes())
