"""Test the collectors, the exporter and the profile `smoke` on a host with NVIDIA GPUs: `make test-gpu`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from agent.benchmarks.links.rdma_ports import _nvml_gpus
from agent.exporter.exporter import serve
from agent.sampling.snapshot import take_snapshot
from collectors.table import build_collectors
from fleet.judge.criteria import read_packs
from fleet.judge.judge import Evidence
from fleet.planning.plan import make_plan, read_profile
from fleet.report.merge import merge
from schemas import documents
from schemas.benchmarks import DIGEST_WORKLOADS
from schemas.decode import record_from_json
from schemas.plans import Plan
from schemas.records import MEASURED, UNSUPPORTED, Observation, Record, to_json
from schemas.scopes import pci_address
from tests import builders

pytestmark = pytest.mark.gpu
ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def count() -> int:
    """Return the number of GPUs of this host. Without a GPU these tests fail; they are not skipped."""
    listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=True).stdout
    return len([line for line in listed.splitlines() if line.startswith("GPU ")])


def test_snapshot_has_every_gpu_and_lacks_only_unsupported_readings(count: int) -> None:
    taken, gpus = take_snapshot(build_collectors(), stage="test", phase="before")
    assert [gpu.index for gpu in gpus] == list(range(count))
    assert len({gpu.serial for gpu in gpus}) == len({gpu.uuid for gpu in gpus}) == count
    assert all(why.startswith("unsupported: ") for metric in taken.metrics for why in metric.absent.values())


@pytest.fixture
def url() -> Iterator[str]:
    with serve(build_collectors(), "127.0.0.1", 0) as server:
        yield f"http://127.0.0.1:{server.port}/metrics"


def test_gpus_found_without_nvml_are_in_the_order_of_nvml() -> None:
    _, gpus = take_snapshot(build_collectors(), stage="test", phase="before")
    assert _nvml_gpus(Path("/")) == [pci_address(gpu.pci_bus_id) for gpu in gpus]


def test_scrape_has_the_power_of_every_gpu(count: int, url: str) -> None:
    page = urllib.request.urlopen(url, timeout=10).read().decode()
    assert len([line for line in page.splitlines() if line.startswith("rackproof_gpu_power_watts{")]) == count
    assert 'rackproof_collector_success{collector="nvml"} 1.0' in page


def run_profile(count: int, tmp_path: Path, profile: str = "smoke") -> tuple[Plan, Record]:
    """Run a profile on this host; return plan and record."""
    variables: dict[str, Any] = {"rackproof_gpu_count": count, "rackproof_gang": "none", "ansible_host": "127.0.0.1"}
    plan = make_plan(
        read_profile(profile), {"here": variables}, run_id="gpu", nonce=builders.NONCE, created=builders.WHEN
    )
    run_options = ("--run-dir", str(tmp_path / "run"), "--host", "here")
    for arguments, stdin in ((("inspect", "--plan", "-"), json.dumps(to_json(plan))), (("bench",), None)):
        done = subprocess.run(
            [sys.executable, str(ROOT / "rackproof"), *arguments, *run_options],
            input=stdin,
            env={**os.environ, "PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}"},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
    return plan, record_from_json(documents.read(tmp_path / "run" / "record.json", "record"))


def test_gpu_in_use_is_not_measured_and_its_process_is_reported(count: int, tmp_path: Path) -> None:
    user = subprocess.Popen(
        [sys.executable, "-c", "import torch; torch.zeros(1, device='cuda:0'); print('ready', flush=True); input()"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    try:
        assert user.stdout is not None
        user.stdout.readline()
        _, record = run_profile(count, tmp_path)
    finally:
        user.communicate(b"\n")
    assert f"gpu=0 is in use by process {user.pid}" in record.launches[-1].reason
    assert not record.observations


USER = """
import pathlib, sys, time
while not pathlib.Path(sys.argv[1]).is_dir():
    time.sleep(0.1)
import torch
torch.zeros(1, device="cuda:0")
time.sleep(10)
"""
"""A program that uses GPU 0 for ten seconds, from when the work directory of the launch exists."""


def test_process_that_starts_on_a_gpu_during_the_launch_is_in_the_record(count: int, tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", USER, tmp_path / "run" / "work" / "benchmark"]) as user:
        _, record = run_profile(count, tmp_path)
    [launch] = record.launches
    assert list(launch.other_processes) == ["gpu=0"]
    assert launch.other_processes["gpu=0"].startswith(f"process {user.pid}")


def test_smoke_profile_measures_everything_in_its_plan(count: int, tmp_path: Path) -> None:
    plan, record = run_profile(count, tmp_path)
    report = merge(plan, {"here": Evidence(records=(record,))}, read_packs([]))
    for line in report.acceptance.summary:
        print(line)
    assert report.coverage.measured == report.coverage.expected > 0, [item.reason for item in record.launches]
    digests = {(item.params["workload"], item.value) for item in record.observations if item.name == "digest.value"}
    assert len(digests) == 3, digests  # one for each of the three workloads, the same on all GPUs
    wrong = [item for item in record.observations if item.name.endswith("wrong_elements") and item.status == MEASURED]
    assert {item.value for item in wrong} == ({0} if count > 1 else set())


# 17 s: one second for each of the 16 workloads, and one for the copies between GPUs.
DIGESTS = """---
schema: rackproof.profile/1
summary: all digests
device: gpu
stages:
  benchmark:
    deadline_s: 300
    collective_timeout_s: 60
    benchmarks:
      digest: {workloads: [WORKLOADS], peer_copies: [round_trip], seconds: 17.0}
"""


def test_digests_of_all_workloads_are_the_same_in_two_launches_and_on_all_gpus(count: int, tmp_path: Path) -> None:
    profile = tmp_path / "digests.yml"
    profile.write_text(DIGESTS.replace("WORKLOADS", ", ".join(DIGEST_WORKLOADS)))
    observed: list[Observation] = []
    for launch in ("first", "second"):
        (tmp_path / launch).mkdir()
        _, record = run_profile(count, tmp_path / launch, str(profile))
        observed += [item for item in record.observations if item.name.startswith("digest.")]
    for item in observed:
        print(item.name, item.scope, item.status, item.value, item.reason, item.params)
    assert not [item for item in observed if item.status not in (MEASURED, UNSUPPORTED)]
    assert {item.value for item in observed if item.name != "digest.value" and item.status == MEASURED} == {0}
    digests = {(item.params["workload"], item.value) for item in observed if item.name == "digest.value"}
    assert len(digests) == len(DIGEST_WORKLOADS), digests
    peer_copies = [item for item in observed if item.name == "digest.wrong_peer_copies"]
    assert len(peer_copies) == 2 * count * (count - 1)  # one for each ordered pair of GPUs in each of two launches


DETERMINISTIC = """
import torch
from agent.benchmarks.compute.digest_workloads import WORKLOADS, unsupported_workload

torch.use_deterministic_algorithms(True)
gpu = torch.device("cuda:0")
for name, prepare in WORKLOADS.items():
    if unsupported_workload(name, gpu):
        continue
    computation = prepare(1024, gpu)
    first, second = computation.compute().clone(), computation.compute()
    torch.cuda.synchronize()
    assert torch.equal(first.view(torch.uint8), second.view(torch.uint8)), name
    print(name)
"""


def test_digest_workloads_use_no_operation_that_torch_regards_as_nondeterministic(count: int) -> None:
    done = subprocess.run(
        [sys.executable, "-c", DETERMINISTIC],
        env={
            **os.environ,
            "PYTHONPATH": f"{ROOT}",
            "CUBLAS_WORKSPACE_CONFIG": ":4096:8",  # without it, torch refuses matrix products as not deterministic
        },
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    checked = done.stdout.split()
    print(*checked)
    assert set(checked) | {"gemm_fp4"} == set(DIGEST_WORKLOADS)  # only gemm_fp4 may be unsupported
