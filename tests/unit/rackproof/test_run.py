"""Test `rackproof run`, which checks that one machine is ready, and then measures and judges it, without Ansible."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
from argparse import Namespace
from dataclasses import replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import pytest
import yaml

from agent.run import preflight, readiness
from agent.run.readiness import Gpus
from collectors.base import Absent
from collectors.nvml import NotOpened
from fleet.planning.plan import read_profile
from fleet.report.merge import merge
from rackproof.local_run import Machine, single_host_plan, single_host_profile
from schemas import documents
from schemas.errors import UsageError
from schemas.plans import LOCAL_RUN, Plan
from tests import ROOT, builders
from tests.fakes import nvml

NOW = datetime(2026, 11, 21, 4, tzinfo=timezone.utc)
DRIVER_NOT_LOADED = Absent(status="error", reason="Driver Not Loaded")
TINY = {
    "schema": "rackproof.profile/1",
    "summary": "the smallest profile",
    "device": "cpu",
    "processes_per_host": 2,
    "stages": {
        "benchmark": {
            "deadline_s": 60,
            "collective_timeout_s": 30,
            "benchmarks": {"digest": {"size": 64, "seconds": 0.1}},
        },
        "gang": {
            "deadline_s": 60,
            "collective_timeout_s": 30,
            "benchmarks": {"pairs": {}, "overlap": {"size": 64, "size_bytes": 65536, "repetitions": 2}},
        },
    },
}


WHERE = "import agent, rackproof, schemas; print({agent.__file__, rackproof.__file__, schemas.__file__})"
"""Python program that prints from which files it imports three packages of Rackproof."""


def package_locations(directory: Path, **variables: str) -> str:
    """Return the output of two Python processes, a parent and its child.

    The parent imports Rackproof and prints one path: the file of `schemas`. The child runs WHERE, which prints three paths.
    `directory` is the first entry of `sys.path` in the parent.
    """
    program = (
        f"import sys, subprocess; sys.path[0] = sys.argv[1]; import rackproof, schemas;"
        f"print(schemas.__file__, flush=True); subprocess.run([sys.executable, '-c', {WHERE!r}], check=True)"
    )
    environment = {**os.environ, **variables}
    command = [sys.executable, "-c", program, directory]
    return subprocess.run(command, cwd="/", env=environment, capture_output=True, text=True, check=True).stdout


def test_packages_of_other_software_do_not_hide_those_of_rackproof(tmp_path: Path) -> None:
    for name in ("agent", "schemas"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("raise ImportError('other software')")
    output = package_locations(Path("/nowhere"), PYTHONPATH=str(tmp_path))
    assert output.count(f"{ROOT}/") == 4
    completed = run(tmp_path, "--help", PYTHONPATH=str(tmp_path))
    assert (completed.returncode, completed.stderr) == (0, "")


def test_child_process_uses_the_packages_of_a_checkout_that_is_not_installed(tmp_path: Path) -> None:
    for name in ("agent", "rackproof", "schemas"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text((ROOT / name / "__init__.py").read_text())
    assert package_locations(tmp_path).count(f"{tmp_path}/") == 4


def run(directory: Path, *arguments: str | Path, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, ROOT / "rackproof", "run", *arguments],
        env={**os.environ, **variables},
        cwd=directory,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


# --- the whole command


def test_rehearsal_is_measured_once_and_judged_each_time(tmp_path: Path) -> None:
    (tmp_path / "tiny.yml").write_text(yaml.safe_dump(TINY))
    options = ["--profile", tmp_path / "tiny.yml", "--run-dir", tmp_path / "here" / "r1", "--host", "me"]
    first = run(tmp_path, *options)
    print(first.stdout, first.stderr)
    assert first.returncode == 0
    assert "FINAL ACCEPTANCE: REHEARSAL PASS" in first.stdout
    assert re.search(r"^Silent corruption +PASS$", first.stdout, re.MULTILINE)
    report = documents.read(tmp_path / "here/r1/report.json", "report")
    assert [(host["name"], host["decision"]) for host in report["hosts"]] == [("me", "accepted")]
    record = documents.read(tmp_path / "here/r1/hosts/me.json", "record")
    observed = {observation["name"] for observation in record["observations"]}
    assert "overlap.hidden_share" in observed, "`rackproof run` must also run the benchmarks of the stage `gang`"
    assert not any(name.startswith("pairs") for name in observed)
    assert [snapshot["phase"] for snapshot in record["snapshots"]][:2] == ["before", "before"]
    again = run(tmp_path, *options, "--json")
    assert again.returncode == 0
    assert "nothing is measured again" in again.stderr
    assert json.loads(again.stdout)["acceptance"]["status"] == "REHEARSAL PASS"
    other = run(tmp_path, *options, "--criteria", "rehearsal")
    assert other.returncode == 64
    assert "run r1 was begun with other values" in other.stderr


def test_machine_without_gpus_is_reported_and_a_rehearsal_suggested(tmp_path: Path) -> None:
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch/__init__.py").write_text("raise SystemExit('torch was imported')")
    done = run(tmp_path, "--gpus", "8", PYTHONPATH=str(tmp_path))
    assert (done.returncode, done.stdout) == (2, "")
    assert "there is no NVIDIA GPU on this machine's PCI bus" in done.stderr
    assert "`rackproof run --profile rehearsal` tries every stage on CPUs" in done.stderr
    assert done.stderr.count("\n") == 1
    assert not (tmp_path / "runs").exists(), "the directory of runs must not be created"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--profile", "standart"], "unknown profile standart (did you mean standard?)"),
        (
            ["--profile", "rehearsal", "--gpus", "8"],
            "--gpus or --devices with profile rehearsal, which uses no GPU",
        ),
        (["--profile", "soak"], "profile soak has no stage benchmark"),
        (["--duration", "20m"], "--duration with profile standard, whose times are fixed"),
        (["--gpus", "0"], "--gpus 0: give the number of GPUs, 1 to 128"),
        (["--devices", "gpu0"], "--devices gpu0: give NVML indices such as 0,1,2"),
        (["--epochs", "0"], "--epochs 0: give at least 1"),
        (["--model", "h2000-sxm"], "unknown --model h2000-sxm"),
        (
            ["--run-dir", "x/runs"],
            "x/runs: a directory named runs is for several runs: give a directory in it, such as",
        ),
    ],
)
def test_wrong_usage_is_reported(
    arguments: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from rackproof.main import main

    assert main(["run", "--run-dir", str(tmp_path / "r1"), *arguments]) == 64
    assert message in capsys.readouterr().err


def test_several_processes_started_by_mpirun_are_rejected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    from rackproof.main import main

    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "4")
    assert main(["run", "--profile", "rehearsal", "--run-dir", str(tmp_path / "r1")]) == 64
    assert "OMPI_COMM_WORLD_SIZE is 4: mpirun started 4 processes" in capsys.readouterr().err
    assert not (tmp_path / "r1").exists()


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return nvml.build(tmp_path_factory.mktemp("nvml"))


def test_readiness_problems_are_listed(library: Path, tmp_path: Path) -> None:
    """torch is a build without CUDA, and the run directory cannot be created.

    The driver lists four GPUs, of which CUDA_VISIBLE_DEVICES hides two.
    """
    (tmp_path / "file").touch()
    present = nvml.environment(library, nvml.scenario("healthy-h200x4"))
    done = run(tmp_path, "--gpus", "4", "--run-dir", tmp_path / "file" / "r1", CUDA_VISIBLE_DEVICES="0,1", **present)
    print(done.stderr)
    assert done.returncode == 2
    lines = [line.removeprefix("rackproof: ") for line in done.stderr.splitlines()]
    assert any("was built without CUDA: install a build for CUDA" in line for line in lines)
    assert f"{tmp_path}/file/r1: Not a directory: give a --run-dir that this user can write to" in lines
    assert "CUDA_VISIBLE_DEVICES=0,1 hides GPU 2, 3: unset the variable, or give --devices 0,1" in lines


@pytest.mark.parametrize("visible", ["", "-1"])
def test_option_devices_is_not_suggested_if_all_gpus_are_hidden(visible: str) -> None:
    (problem,) = readiness._hidden_gpus([0, 1], {"CUDA_VISIBLE_DEVICES": visible})
    assert problem == f"CUDA_VISIBLE_DEVICES={visible} hides GPU 0, 1: unset the variable"


# --- the number of GPUs


def gpus(on_bus: int | Absent, answering: int | Absent, given: int = 0) -> Gpus:
    return Gpus(on_bus=on_bus, answering=answering, given=given)


def test_different_gpu_counts_of_bus_and_driver_are_reported() -> None:
    assert gpus(8, 8).disagreement() == ""
    assert gpus(8, 8).expected == 8
    lost = gpus(8, 7)
    assert lost.expected == 8, "the lost GPU must be expected, so that the report lists it as missing"
    assert "the PCI bus has 8 NVIDIA GPUs but the driver reports 7" in lost.disagreement()
    assert "but the driver reports 8" in gpus(0, 8).disagreement()
    in_container = gpus(8, 2, given=2)
    assert in_container.expected == 2
    assert in_container.disagreement() == "this container or job was given 2 of the 8 GPUs on the machine's PCI bus"
    assert gpus(8, 1, given=2).expected == 2
    assert "the driver reports 1" in gpus(8, 1, given=2).disagreement()


def test_reason_is_reported_if_no_gpu_can_be_measured() -> None:
    assert readiness.reason_without_gpus(gpus(8, 8)) == ""
    assert "8 NVIDIA GPUs are present but the driver reports none (Driver Not Loaded)" in readiness.reason_without_gpus(
        gpus(8, DRIVER_NOT_LOADED)
    )
    denied = NotOpened.error("Unknown Error: /dev/nvidiactl: Operation not permitted: start the container again")
    assert readiness.reason_without_gpus(gpus(8, denied)).endswith(
        "Operation not permitted: start the container again)"
    )
    assert "there is no NVIDIA GPU on this machine's PCI bus" in readiness.reason_without_gpus(
        gpus(0, DRIVER_NOT_LOADED)
    )
    unreadable = Absent.error("Permission denied")
    assert "the PCI bus cannot be read (Permission denied)" in readiness.reason_without_gpus(
        gpus(unreadable, DRIVER_NOT_LOADED)
    )


def test_device_nodes_are_counted_only_in_a_container(tmp_path: Path) -> None:
    (tmp_path / "dev").mkdir()
    for name in ("nvidia0", "nvidia5", "nvidiactl"):
        (tmp_path / "dev" / name).touch()
    read = {"gpu.pci_count": 8, "gpu.count": 2}
    assert readiness.gpus_of(read, {}, tmp_path) == gpus(8, 2, given=0)
    assert readiness.gpus_of(read, {"KUBERNETES_SERVICE_HOST": "10.0.0.1"}, tmp_path) == gpus(8, 2, given=2)
    write_pid_namespace(tmp_path, "pid:[4026531836]")
    assert readiness.gpus_of(read, {}, tmp_path) == gpus(8, 2, given=0)


def write_pid_namespace(root: Path, name: str) -> None:
    (root / "proc/self/ns").mkdir(parents=True)
    (root / "proc/self/ns/pid").symlink_to(name)


@pytest.mark.parametrize("mark", readiness.CONTAINER_MARKS)
def test_file_of_a_container_runtime_marks_a_container(tmp_path: Path, mark: str) -> None:
    assert not readiness.in_container({}, tmp_path)
    (tmp_path / mark).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / mark).touch()
    assert readiness.in_container({}, tmp_path)


@pytest.mark.parametrize(
    ("mount", "given"),
    [
        ("udev /dev devtmpfs rw,nosuid 0 0", 0),
        ("tmpfs /dev tmpfs rw,nosuid 0 0", 2),
        ("udev /dev/null devtmpfs rw,nosuid 0 0", 2),
    ],
)
def test_device_nodes_are_counted_only_if_the_container_has_its_own_dev(tmp_path: Path, mount: str, given: int) -> None:
    (tmp_path / "dev").mkdir()
    (tmp_path / ".singularity.d").mkdir()
    for name in ("nvidia0", "nvidia1"):
        (tmp_path / "dev" / name).touch()
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/mounts").write_text(f"overlay / overlay rw 0 0\n{mount}\n")
    assert readiness.gpus_of({"gpu.pci_count": 3, "gpu.count": 2}, {}, tmp_path).given == given


def test_pid_namespace_identifies_a_container_without_marks(tmp_path: Path) -> None:
    """Containers of nerdctl and ctr have no marks."""
    write_pid_namespace(tmp_path, "pid:[4026532201]")
    (tmp_path / "dev").mkdir()
    for name in ("nvidia0", "nvidia1"):
        (tmp_path / "dev" / name).touch()
    counted = readiness.gpus_of({"gpu.pci_count": 8, "gpu.count": 2}, {}, tmp_path)
    assert (counted.given, counted.expected) == (2, 2)


def test_gpus_that_a_job_may_not_use_are_not_expected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "dev").mkdir()
    for number in range(8):
        (tmp_path / f"dev/nvidia{number}").touch()
    access, denied = os.access, [str(tmp_path / f"dev/nvidia{number}") for number in range(4)]
    monkeypatch.setattr(os, "access", lambda path, mode: access(path, mode) and (not mode or str(path) not in denied))
    some = readiness.gpus_of({"gpu.pci_count": 8, "gpu.count": 4}, {}, tmp_path)
    assert (some.expected, some.disagreement()) == (
        4,
        "this container or job was given 4 of the 8 GPUs on the machine's PCI bus",
    )
    lost = readiness.gpus_of({"gpu.pci_count": 8, "gpu.count": 3}, {}, tmp_path)
    assert lost.expected == 4
    denied += [str(tmp_path / f"dev/nvidia{number}") for number in range(4, 8)]
    reason = readiness.reason_without_gpus(readiness.gpus_of({"gpu.pci_count": 8, "gpu.count": 0}, {}, tmp_path))
    assert reason.startswith(
        "8 NVIDIA GPUs are present but the driver reports none: this session may not use /dev/nvidia*"
    )


# --- the environment


@pytest.fixture
def ready_root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a directory that stands in for `/` on a machine without problems. It has a fake torch for CUDA 12.8."""
    (tmp_path / "dev/shm").mkdir(parents=True)
    write_torch(tmp_path, "cuda: Optional[str] = '12.8'")
    spec = importlib.util.spec_from_file_location("torch", tmp_path / "torch/__init__.py")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: spec)
    monkeypatch.setattr(readiness, "SHM_BYTES", 1)
    monkeypatch.setattr(preflight, "NCCL_FILE", str(tmp_path / "nccl.conf"))
    monkeypatch.setattr(preflight, "NCCL_USER_FILE", str(tmp_path / ".nccl.conf"))
    return tmp_path


def write_torch(root: Path, cuda: str) -> None:
    (root / "torch").mkdir(exist_ok=True)
    (root / "torch/__init__.py").touch()
    (root / "torch/version.py").write_text(f"__version__ = '2.7.0'\n{cuda}\n")


def readiness_problems(
    root: Path, *, cpu: bool = False, variables: dict[str, str] | None = None, **read: Any
) -> list[str]:
    readings = {"host.memory.available": 64 << 30, "driver.cuda_version": "12.8", **read}
    return readiness.problems(readings, (0, 1), root / "run", cpu=cpu, environment=variables or {}, root=root)


def test_healthy_machine_has_no_problem(ready_root: Path) -> None:
    assert readiness_problems(ready_root) == []
    assert readiness_problems(ready_root, cpu=True) == []
    assert readiness_problems(ready_root, variables={"CUDA_VISIBLE_DEVICES": "0,1,2"}) == []


def test_torch_needs_cuda_that_the_driver_supports(ready_root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_torch(ready_root, "cuda: Optional[str] = '13.0'")
    (line,) = readiness_problems(ready_root)
    assert line.startswith(
        "torch 2.7.0 is built for CUDA 13.0, but the driver supports at most 12.8: update the driver"
    )
    (ready_root / readiness.COMPATIBILITY).mkdir(parents=True)
    (ready_root / readiness.COMPATIBILITY / "libcuda.so.1").touch()
    assert readiness_problems(ready_root) == [], "with NVIDIA's compatibility package there must be no problem"
    write_torch(ready_root, "cuda: Optional[str] = None")
    assert readiness_problems(ready_root) == [
        "torch 2.7.0 was built without CUDA: install a build for CUDA (https://pytorch.org)"
    ]
    assert readiness_problems(ready_root, cpu=True) == []
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert readiness_problems(ready_root, cpu=True)[0].startswith(f"torch is not installed for {sys.executable}")
    assert readiness.problems({}, (0, 1), ready_root / "run", cpu=True, uses_torch=False, root=ready_root) == []


def test_too_little_memory_is_reported(ready_root: Path) -> None:
    assert readiness_problems(ready_root, **{"host.memory.available": 3 << 30}) == [
        "3.0 GiB of memory are available, and 2 GPUs need 8.0 GiB: free up memory"
    ]
    (ready_root / "sys/fs/cgroup").mkdir(parents=True)
    (ready_root / "sys/fs/cgroup/memory.max").write_text(f"{1 << 30}\n")
    (ready_root / "sys/fs/cgroup/memory.current").write_text(f"{1 << 29}\n")
    (line,) = readiness_problems(ready_root, cpu=True)
    assert line.startswith(
        "0.5 GiB are free within the memory limit of this container or job, and 2 processes need 1.0 GiB"
    )
    (ready_root / "sys/fs/cgroup/memory.max").write_text("max\n")
    assert readiness_problems(ready_root) == []


def test_too_little_shared_memory_is_reported_with_the_remedy(
    ready_root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(readiness, "SHM_BYTES", 1 << 60)
    (line,) = readiness_problems(ready_root)
    assert "start the container with --ipc=host or --shm-size=1g" in line
    assert readiness_problems(ready_root, cpu=True) == []


@pytest.mark.parametrize("cpu", [False, True])
def test_shared_memory_that_cannot_be_written_is_reported_with_its_path_and_the_remedy(
    ready_root: Path, cpu: bool
) -> None:
    (ready_root / "dev/shm").rmdir()
    (line,) = readiness_problems(ready_root, cpu=cpu)
    assert line.startswith(
        f"{ready_root}/dev/shm: no file can be written (No such file or directory), and torch, NCCL and"
    )
    assert line.endswith("or mount a tmpfs with mode 1777 there")
    assert readiness.problems({}, (0,), ready_root / "run", cpu=True, uses_torch=False, root=ready_root) == []


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("CUDA_LAUNCH_BLOCKING", "1"),
        ("NCCL_P2P_DISABLE", "1"),
        ("NCCL_SHM_DISABLE", "1"),
        ("NVIDIA_TF32_OVERRIDE", "0"),
    ],
)
def test_variable_that_distorts_measurements_is_reported_with_its_place_and_the_remedy(
    ready_root: Path, name: str, value: str
) -> None:
    ending = "which makes a healthy GPU look slow or faulty: remove it there"
    assert readiness_problems(ready_root, variables={name: value}) == [
        f"{name} is {value} in the environment of this command (its shell, job or pod template), {ending}"
    ]
    assert readiness_problems(ready_root, variables={name: value}, cpu=True) == []
    (ready_root / "nccl.conf").write_text(f"{name} = {value}\n")
    assert readiness_problems(ready_root) == [f"{name} is {value} in {ready_root}/nccl.conf, {ending}"]


def test_variables_that_select_network_devices_do_not_matter_on_one_host(ready_root: Path) -> None:
    assert readiness_problems(ready_root, variables={"NCCL_IB_HCA": "mlx5_99", "GLOO_SOCKET_IFNAME": "bond7"}) == []


# --- the plan


def options(tmp_path: Path, **chosen: Any) -> Namespace:
    given = {"run_dir": tmp_path / "r1", "gpus": None, "devices": None, "host": "me", "model": "", "criteria": []}
    given |= {"validation_only": False, "duration": None, "epochs": None, "batch_size": None, "share_gpus": False}
    return Namespace(**{**given, **chosen})


def planned(tmp_path: Path, profile: str = "standard", gpu_count: int = 4, **chosen: Any) -> Plan:
    machine = Machine(gpus=gpus(gpu_count, gpu_count), readings={})
    return single_host_plan(options(tmp_path, **chosen), single_host_profile(read_profile(profile)), machine, NOW)


def test_requested_or_all_devices_are_planned(tmp_path: Path) -> None:
    assert planned(tmp_path, gpus=8).hosts[0].devices == tuple(range(8)), (
        "all 8 requested GPUs must be planned, so that the report lists the 4 missing ones"
    )
    assert not planned(tmp_path, gpus=8).hosts[0].count_found  # given with --gpus
    host = planned(tmp_path).hosts[0]
    assert (host.devices, host.count_found) == ((0, 1, 2, 3), True)
    assert planned(tmp_path, devices="1,3").hosts[0].devices == (1, 3)
    with pytest.raises(UsageError, match="lists 2 GPUs, but rackproof_gpu_count is 4"):
        planned(tmp_path, devices="1,3", gpus=4)
    assert not planned(tmp_path, "rehearsal").hosts[0].count_found


def test_duration_scales_the_extended_profile(tmp_path: Path) -> None:
    short, usual = (planned(tmp_path, "extended", duration=duration).stages[0] for duration in ("20m", None))
    assert short.benchmarks["stress"]["seconds"] < usual.benchmarks["stress"]["seconds"] / 3
    with pytest.raises(UsageError, match="rackproof_extended_duration"):
        planned(tmp_path, "extended", duration="soon")


def test_training_options_are_in_the_plan(tmp_path: Path) -> None:
    benchmarks = planned(tmp_path, epochs=5, batch_size=128).stage("benchmark").benchmarks
    assert (benchmarks["training"]["epochs"], benchmarks["training"]["batch_size"]) == (5, 128)
    assert "training" not in planned(tmp_path, validation_only=True).stage("benchmark").benchmarks
    assert "collective" in planned(tmp_path, validation_only=True).stage("benchmark").benchmarks


@pytest.mark.parametrize("profile", ["smoke", "standard", "rehearsal"])
def test_single_host_profile_includes_the_gang_benchmarks(profile: str) -> None:
    whole, single = read_profile(profile)["stages"], single_host_profile(read_profile(profile))["stages"]
    assert single.keys() == {"benchmark"}
    assert single["benchmark"]["benchmarks"].keys() == {
        *whole["benchmark"]["benchmarks"],
        *whole["gang"]["benchmarks"],
    } - {"pairs"}
    host_benchmarks = whole["benchmark"]["benchmarks"]
    assert {name: single["benchmark"]["benchmarks"][name] for name in host_benchmarks} == host_benchmarks
    assert single["benchmark"]["deadline_s"] <= whole["benchmark"]["deadline_s"] + whole["gang"]["deadline_s"]


def test_plan_tells_that_the_run_needs_no_ansible(tmp_path: Path) -> None:
    assert planned(tmp_path).begun_by == LOCAL_RUN


def test_report_says_that_no_gpu_count_was_given() -> None:
    plan = builders.plan("h1", rackproof_gang="none")
    line = "GPU count: the number of GPUs to expect was not given (rackproof run --gpus), so a missing GPU may go unnoticed on h1"
    assert line not in merge(plan, {}, ()).acceptance.summary
    counted = replace(plan, hosts=tuple(replace(host, count_found=True) for host in plan.hosts))
    assert line in merge(counted, {}, ()).acceptance.summary


def test_machine_leased_to_a_playbook_run_is_not_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A lease is the exclusive use of a machine by one run: two runs at the same time would slow each other down."""
    from agent.run import lease
    from rackproof.main import main

    state = tmp_path / "state"
    (state / "runs").mkdir(parents=True)
    playbook_plan = builders.plan("h1", profile="rehearsal", rackproof_gang="none")
    lease.acquire(state / "runs" / "r1", playbook_plan, lease.load_claim(None, "r1", state / "runs" / "r1"))
    monkeypatch.setattr(lease, "STATE", state)
    assert main(["run", "--profile", "rehearsal", "--run-dir", str(tmp_path / "mine")]) == lease.HELD
    assert not (tmp_path / "mine/plan.json").exists()
