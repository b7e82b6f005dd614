"""A job or container with fewer GPUs than planned is refused before the first snapshot."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from agent.placement.rank_placement import PlacementError
from agent.run import readiness
from agent.run.readiness import check_gpu_allocation
from rackproof.main import main
from schemas.records import to_json
from tests import builders

POD = {"KUBERNETES_SERVICE_HOST": "10.0.0.1"}
PLANNED = 4


def machine(root: Path, *, on_bus: int, nodes: int) -> Path:
    """Create the files of a machine with `on_bus` GPUs on its PCI bus and `nodes` device nodes of GPUs; return `root`."""
    (root / "dev").mkdir()
    for name in [*(f"nvidia{number}" for number in range(nodes)), "nvidiactl", "nvidia-uvm"]:
        (root / "dev" / name).touch()
    for number in range(on_bus):
        address = f"0000:{number + 1:02x}:00.0"
        device = root / "sys/devices/pci0000:00" / address
        device.mkdir(parents=True)
        (device / "class").write_text("0x030200\n")
        (device / "vendor").write_text("0x10de\n")
        link = root / "sys/bus/pci/devices" / address
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(device)
    return root


def check(environment: dict[str, str], root: Path) -> None:
    check_gpu_allocation(builders.plan(gpu_count=PLANNED), "h1", environment, root)


@pytest.mark.parametrize(("visible", "count"), [("0,1", 2), ("0", 1), ("", 0), ("NoDevFiles", 0), ("GPU-1a,GPU-2b", 2)])
def test_job_with_fewer_gpus_than_ranks_is_refused(tmp_path: Path, visible: str, count: int) -> None:
    with pytest.raises(PlacementError) as error:
        check({"CUDA_VISIBLE_DEVICES": visible}, machine(tmp_path, on_bus=8, nodes=8))
    assert f"4 ranks on host h1, but CUDA_VISIBLE_DEVICES={visible} has {count} GPUs: ask the scheduler" in str(
        error.value
    )


@pytest.mark.parametrize("environment", [{}, {"CUDA_VISIBLE_DEVICES": "0,1,2,3"}])
def test_job_with_enough_gpus_is_not_refused(tmp_path: Path, environment: dict[str, str]) -> None:
    check(environment, machine(tmp_path, on_bus=4, nodes=4))


def test_job_that_may_not_open_the_device_nodes_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Slurm with ConstrainDevices lets a job open only the device nodes of its own GPUs."""
    root = machine(tmp_path, on_bus=4, nodes=4)
    monkeypatch.setattr(os, "access", lambda path, _mode: Path(path).name not in ("nvidia2", "nvidia3"))
    with pytest.raises(
        PlacementError, match="access to /dev/nvidia2, /dev/nvidia3 is denied: ask the scheduler for 4 GPUs"
    ):
        check({}, root)


def test_denied_gpus_beyond_the_planned_ones_do_not_matter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = machine(tmp_path, on_bus=8, nodes=8)
    monkeypatch.setattr(os, "access", lambda path, _mode: int(Path(path).name.removeprefix("nvidia")) < PLANNED)
    check({}, root)


@pytest.mark.parametrize(
    ("environment", "on_bus", "nodes"),
    [
        (POD, 8, 2),
        (POD, 8, 0),
        (POD, 3, 2),
        (POD | {"NVIDIA_VISIBLE_DEVICES": "GPU-1,GPU-2"}, 4, 2),
        (POD | {"NVIDIA_VISIBLE_DEVICES": "all"}, 4, 2),
        ({"container": "podman", "NVIDIA_VISIBLE_DEVICES": "0,1"}, 4, 2),
        ({"container": "podman", "NVIDIA_VISIBLE_DEVICES": "void"}, 4, 2),
    ],
)
def test_container_with_fewer_gpus_than_planned_is_refused(
    tmp_path: Path, environment: dict[str, str], on_bus: int, nodes: int
) -> None:
    with pytest.raises(PlacementError) as error:
        check(environment, machine(tmp_path, on_bus=on_bus, nodes=nodes))
    assert f"this container was given {nodes} of the {on_bus} GPUs on the machine's PCI bus" in str(error.value)


@pytest.mark.parametrize(
    ("environment", "on_bus", "nodes"),
    [
        ({}, 4, 3),
        ({}, 3, 3),
        (POD, 3, 3),
        (POD, 8, 4),
        (POD | {"NVIDIA_VISIBLE_DEVICES": "GPU-1,GPU-2,GPU-3"}, 3, 3),
        ({"container": "docker", "NVIDIA_VISIBLE_DEVICES": "all"}, 4, 3),
    ],
    ids=["driver-fails", "off-the-bus", "off-the-bus-in-a-pod", "enough", "all-of-the-bus", "all-that-work"],
)
def test_allocation_is_not_refused_if_it_is_enough_or_hardware_is_missing(
    tmp_path: Path, environment: dict[str, str], on_bus: int, nodes: int
) -> None:
    """A GPU is missing if it is not on the PCI bus or its driver fails. The report shows missing GPUs."""
    check(environment, machine(tmp_path, on_bus=on_bus, nodes=nodes))


def test_rehearsal_needs_no_gpu(tmp_path: Path) -> None:
    plan = builders.plan(profile="rehearsal")
    check_gpu_allocation(plan, "h1", {"CUDA_VISIBLE_DEVICES": "", **POD}, machine(tmp_path, on_bus=4, nodes=0))


def test_run_reports_the_gpus_that_its_container_does_not_have(tmp_path: Path) -> None:
    root = machine(tmp_path, on_bus=4, nodes=2)
    problems = readiness.problems(
        {}, range(4), tmp_path / "run", cpu=False, uses_torch=False, environment=POD, root=root
    )
    assert any("this container was given 2 of the 4 GPUs" in problem for problem in problems)


@pytest.mark.parametrize(
    ("verb", "options"),
    [
        ("bench", ["--host", "h1"]),
        ("launch", ["--host", "h1"]),
        ("launch", ["--launcher", "slurm"]),
        ("run-host", ["--host", "h1"]),
    ],
)
def test_verb_refuses_too_few_gpus_before_the_first_snapshot(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    verb: str,
    options: list[str],
) -> None:
    (tmp_path / "plan.json").write_text(json.dumps(to_json(builders.plan(gpu_count=PLANNED))))
    variables = {
        "SLURM_JOB_ID": "7",
        "SLURM_PROCID": "0",
        "SLURM_LOCALID": "0",
        "SLURM_NODEID": "0",
        "SLURMD_NODENAME": "h1",
        "SLURM_STEP_NUM_TASKS": "2" if "slurm" in options else "1",
        "SLURM_STEP_NUM_NODES": "2",
        "SLURM_STEP_NODELIST": "h[1-2]",
        "SLURM_STEP_TASKS_PER_NODE": "1(x2)",
        "CUDA_VISIBLE_DEVICES": "0,1",
    }
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    run_dir = tmp_path / "run"
    assert main([verb, "--plan", str(tmp_path / "plan.json"), "--run-dir", str(run_dir), *options]) == 64
    assert "4 ranks on host h1, but CUDA_VISIBLE_DEVICES=0,1 has 2 GPUs" in capsys.readouterr().err
    assert not run_dir.exists()
