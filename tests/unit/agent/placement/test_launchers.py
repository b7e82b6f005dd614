"""Launches by mpirun, srun and torchrun, and plans without an inventory.

mpirun and srun set variables from which a process reads its placement: its rank, its local rank, and the numbers of processes
and hosts. Wrong variables are reported before torch is imported.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from agent.gang.protocol import Gang
from agent.launch import stage
from agent.launch.options import publish_results, rank_environment, standalone_options
from agent.launch.request import LaunchRequest
from agent.launch.torchrun import launcher_command
from agent.placement import detect, membership, mpi, slurm, torch_env
from agent.placement.rank_placement import (
    MPI,
    SLURM,
    TORCHRUN,
    PlacementError,
    RankPlacement,
    visible_devices,
    without_placement,
)
from agent.run import preflight
from agent.run.record import HostRun
from rackproof.main import main
from schemas import documents
from schemas.plans import Plan
from schemas.records import Metric, Snapshot, to_json
from tests import ROOT, builders


def open_mpi(rank: int = 0, size: int = 4, local_rank: int = 0, local_size: int = 2, **more: str) -> dict[str, str]:
    """Return the variables that the mpirun of Open MPI sets in a process, and `more`."""
    numbers = {"RANK": rank, "SIZE": size, "LOCAL_RANK": local_rank, "LOCAL_SIZE": local_size}
    return {**{f"OMPI_COMM_WORLD_{name}": str(value) for name, value in numbers.items()}, **more}


def hydra(rank: int = 0, size: int = 4, local_rank: int = 0, local_size: int = 2, **more: str) -> dict[str, str]:
    """Return the variables that Hydra, the mpirun of MPICH and Intel MPI, sets in a process, and `more`."""
    numbers = {"PMI_RANK": rank, "PMI_SIZE": size, "MPI_LOCALRANKID": local_rank, "MPI_LOCALNRANKS": local_size}
    return {**{name: str(value) for name, value in numbers.items()}, **more}


def srun(rank: int = 0, size: int = 2, local_rank: int = 0, node: int = 0, **more: str) -> dict[str, str]:
    """Return the variables that srun sets in a process of a job step on h1 and h2, and `more`."""
    return {
        "SLURM_JOB_ID": "7",
        "SLURM_PROCID": str(rank),
        "SLURM_STEP_NUM_TASKS": str(size),
        "SLURM_LOCALID": str(local_rank),
        "SLURM_NODEID": str(node),
        "SLURM_STEP_NUM_NODES": "2",
        "SLURM_STEP_NODELIST": "h[1-2]",
        "SLURM_STEP_TASKS_PER_NODE": f"{size // 2}(x2)",
        **more,
    }


# --- placement by the launcher's variables


@pytest.mark.parametrize("variables", [open_mpi(3, 4, 1), hydra(3, 4, 1)], ids=["open-mpi", "hydra"])
def test_placement_is_read_from_mpirun(variables: dict[str, str]) -> None:
    assert mpi.read_placement(variables) == RankPlacement(
        launcher=MPI, rank=3, size=4, local_rank=1, local_size=2, nodes=2
    )


def test_placement_is_read_from_srun() -> None:
    placement = slurm.read_placement(srun(rank=3, size=4, local_rank=1, node=1))
    assert (placement.rank, placement.local_rank, placement.local_size, placement.nodes) == (3, 1, 2, 2)
    assert (placement.hosts, placement.host, placement.supervises) == (("h1", "h2"), "h2", False)


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("n1", ("n1",)),
        ("n[1-3]", ("n1", "n2", "n3")),
        ("r1-n[08-10,12],x", ("r1-n08", "r1-n09", "r1-n10", "r1-n12", "x")),
        ("r[1-2]n[1-2]", ("r1n1", "r1n2", "r2n1", "r2n2")),
        ("n[1-2]-ib", ("n1-ib", "n2-ib")),
    ],
)
def test_node_list_of_slurm_is_expanded(text: str, names: tuple[str, ...]) -> None:
    assert slurm.expand_node_list(text) == names


@pytest.mark.parametrize("text", ["n[1-", "n[3-1]", "n[a-b]", "n[0-99999999]", "n[1,,2]", "n[0-9999][0-9999]"])
def test_invalid_node_list_is_refused(text: str) -> None:
    with pytest.raises(PlacementError, match="node list"):
        slurm.expand_node_list(text)


WRONG_LAUNCHER_VARIABLES = [
    (MPI, {}, "neither OMPI_COMM_WORLD_RANK nor PMI_RANK is set: start this command with mpirun"),
    (MPI, {"OMPI_COMM_WORLD_RANK": "0"}, "OMPI_COMM_WORLD_SIZE is not set: start this command with mpirun"),
    (MPI, open_mpi(OMPI_COMM_WORLD_SIZE="two"), "OMPI_COMM_WORLD_SIZE is 'two', not a whole number"),
    (MPI, open_mpi(rank=4, size=4), "mpi: rank 4 of 4 is not possible"),
    (MPI, open_mpi(local_rank=2), "mpi: local rank 2 of 2 is not possible"),
    (
        MPI,
        open_mpi(size=2, local_size=3),
        "3 processes on this host, 1 hosts and 2 processes in total are not possible",
    ),
    (
        MPI,
        open_mpi(rank=1) | {"PMI_RANK": "0", "PMI_SIZE": "4"},
        "OMPI_COMM_WORLD_RANK is 1 and PMI_RANK is 0: two launchers",
    ),
    (MPI, {"PMI_RANK": "0", "PMI_SIZE": "2"}, "MPI_LOCALRANKID is not set"),
    (MPI, open_mpi(TORCHELASTIC_RUN_ID="x"), "TORCHELASTIC_RUN_ID is set: torchrun started this process"),
    (SLURM, {}, "SLURM_PROCID is not set: start this command with srun"),
    (
        SLURM,
        {"SLURM_JOB_ID": "7", "SLURM_PROCID": "0"},
        "this process is in the job script, which Slurm runs only once; in the script, start this command with srun",
    ),
    (SLURM, srun(node=2), "SLURM_NODEID is 2, but it must be less than SLURM_STEP_NUM_NODES, which is 2"),
    (SLURM, srun(SLURM_STEP_NODELIST="h[1-3]"), "SLURM_STEP_NODELIST has 3 hosts but SLURM_STEP_NUM_NODES is 2"),
    (SLURM, srun(SLURM_STEP_TASKS_PER_NODE="many"), "SLURM_STEP_TASKS_PER_NODE is 'many'"),
    (SLURM, srun() | open_mpi(), "OMPI_COMM_WORLD_RANK is set: mpirun started this process"),
    (SLURM, srun() | hydra(), "MPI_LOCALRANKID is set: mpirun started this process"),
    (TORCHRUN, open_mpi(), "OMPI_COMM_WORLD_SIZE is 4: mpirun started 4 processes, and each would start all ranks"),
    (TORCHRUN, srun(), "SLURM_STEP_NUM_TASKS is 2: srun started 2 processes"),
    (TORCHRUN, {"TORCHELASTIC_RUN_ID": "x"}, "this command would start torchrun again"),
]
"""Launcher that the user chose, variables of the process, and a part of the error's message."""


@pytest.mark.parametrize(("launcher", "variables", "message"), WRONG_LAUNCHER_VARIABLES)
def test_wrong_launcher_variables_are_reported(launcher: str, variables: dict[str, str], message: str) -> None:
    with pytest.raises(PlacementError) as error:
        detect.detect_placement(launcher, variables)
    assert message in str(error.value)


def test_single_process_of_another_launcher_is_allowed() -> None:
    """If srun or mpirun starts a single process, that process may start torchrun: no other process starts the same ranks.

    Examples: a shell in a Slurm job of one task, `mpirun -np 1`.
    """
    variables = {"SLURM_JOB_ID": "7", "SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1", "OMPI_COMM_WORLD_SIZE": "1"}
    assert detect.detect_placement(TORCHRUN, variables) is None


def test_mpirun_inside_a_slurm_job_decides_the_placement() -> None:
    assert detect.detect_placement(MPI, srun() | open_mpi(rank=2, size=4, local_rank=0)) == mpi.read_placement(
        open_mpi(2, 4, 0)
    )


def test_placement_variables_are_not_passed_to_child_processes() -> None:
    """Child processes run in the same Slurm job and on the same node, so SLURM_JOB_ID and SLURM_NODEID stay right for them."""
    assert without_placement({**open_mpi(), **hydra(), **srun(), "PMIX_RANK": "0", "NCCL_DEBUG": "INFO"}).keys() == {
        "NCCL_DEBUG",
        "SLURM_JOB_ID",
        "SLURM_NODEID",
    }


# --- ranks that mpirun or srun starts directly


def test_rank_of_hydra_in_a_shell_of_srun_has_the_placement_of_hydra() -> None:
    shell = srun(size=1, SLURM_STEP_NUM_NODES="1", SLURM_STEP_NODELIST="h1", SLURM_STEP_TASKS_PER_NODE="1")
    assert detect.detect_rank(shell | hydra(3, 4, 1)) == mpi.read_placement(hydra(3, 4, 1))


def test_rank_of_srun_has_the_placement_of_srun_although_srun_sets_variables_of_pmi() -> None:
    variables = srun(rank=1, node=1, PMI_RANK="1", PMI_SIZE="2")
    assert detect.detect_rank(variables) == slurm.read_placement(variables)


def test_ranks_get_the_variables_of_torch() -> None:
    variables = torch_env.torch_variables(open_mpi(3, 4, 1, MASTER_ADDR="10.0.0.1"))
    assert variables == {
        "RANK": "3",
        "WORLD_SIZE": "4",
        "LOCAL_RANK": "1",
        "LOCAL_WORLD_SIZE": "2",
        "GROUP_RANK": "1",
        "MASTER_ADDR": "10.0.0.1",
        "MASTER_PORT": "29500",
    }
    assert torch_env.torch_variables(open_mpi(1, 2, 1, 2))["MASTER_ADDR"] == "127.0.0.1"
    assert torch_env.torch_variables(srun(rank=1, node=1))["MASTER_ADDR"] == "h1"
    assert torch_env.torch_variables({}) == {}
    assert torch_env.torch_variables(open_mpi() | {"TORCHELASTIC_RUN_ID": "x", "RANK": "7"}) == {}, (
        "ranks of torchrun under mpirun must keep torchrun's variables"
    )
    consistent = {"RANK": "3", "WORLD_SIZE": "4", "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "1234"}
    assert torch_env.torch_variables(open_mpi(3, 4, 1) | consistent | {"LOCAL_RANK": ""}) == {
        "LOCAL_RANK": "1",
        "LOCAL_WORLD_SIZE": "2",
        "GROUP_RANK": "1",
    }


RENDEZVOUS = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
"""The variables from which torch reads the address of the rendezvous."""
WRONG_RANK_VARIABLES = [
    (open_mpi(), "MASTER_ADDR is not set, and mpirun does not report which of the 2 hosts has rank 0"),
    (open_mpi(MASTER_ADDR="a", MASTER_PORT="99999"), "MASTER_PORT is '99999'"),
    (open_mpi(rank=2, local_rank=1, MASTER_ADDR="a"), "mpirun --map-by slot"),
    ({"RANK": "0"}, "the environment has RANK, but not WORLD_SIZE, MASTER_ADDR, MASTER_PORT"),
    ({"RANK": "", "WORLD_SIZE": "2"}, "the environment has WORLD_SIZE, but not RANK, MASTER_ADDR, MASTER_PORT"),
    ({"RANK": ""}, "RANK or WORLD_SIZE is empty: start this command with torchrun"),
    ({"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "a", "MASTER_PORT": "99999"}, "MASTER_PORT is '99999'"),
    ({"RANK": "2", "WORLD_SIZE": "2", **RENDEZVOUS}, "RANK is 2 and WORLD_SIZE is 2"),
    ({**open_mpi(), "RANK": "1", "WORLD_SIZE": "4", **RENDEZVOUS}, "two launchers started this process"),
]
"""Variables of the process, and a part of the error's message."""


@pytest.mark.parametrize(("variables", "message"), WRONG_RANK_VARIABLES)
def test_wrong_rank_variables_are_reported(variables: dict[str, str], message: str) -> None:
    with pytest.raises(PlacementError) as error:
        torch_env.torch_variables(variables)
    assert message in str(error.value)


def make_device_nodes(root: Path, count: int) -> Path:
    """Create the device nodes of `count` GPUs below `root`; return `root`."""
    (root / "dev").mkdir()
    for name in [*(f"nvidia{number}" for number in range(count)), "nvidiactl", "nvidia-uvm"]:
        (root / "dev" / name).touch()
    return root


def test_more_ranks_than_gpus_are_refused(tmp_path: Path) -> None:
    root = make_device_nodes(tmp_path, 4)
    torch_env.check_gpu_count({"LOCAL_WORLD_SIZE": "4"}, root)
    with pytest.raises(PlacementError, match="8 ranks on this host, but it has 4 GPUs"):
        torch_env.check_gpu_count({"LOCAL_WORLD_SIZE": "8"}, root)
    with pytest.raises(PlacementError, match="4 ranks on this host, but with CUDA_VISIBLE_DEVICES=2 it has 1 GPU:"):
        torch_env.check_gpu_count({"LOCAL_WORLD_SIZE": "4", "CUDA_VISIBLE_DEVICES": "2"}, root)
    torch_env.check_gpu_count({"LOCAL_WORLD_SIZE": "8"}, tmp_path / "no-gpus")


# --- this host's part of a gang (the hosts of one multi-node launch)


@pytest.fixture
def plan() -> Plan:
    """Return a plan of one gang: h1 and h2 with two ranks each."""
    return builders.plan(profile="rehearsal")


def placement(size: int, local_size: int, **more: Any) -> RankPlacement:
    """Return the placement of rank 0 if mpirun starts `size` processes, `local_size` on each host."""
    return RankPlacement(
        launcher=MPI, rank=0, size=size, local_rank=0, local_size=local_size, nodes=size // local_size, **more
    )


def test_host_is_found_in_the_plan_by_its_name_or_address(plan: Plan) -> None:
    assert membership.find_host(plan, {"SLURMD_NODENAME": "h2"}) == "h2"
    assert membership.find_host(plan, {"PMIX_HOSTNAME": "h1.example.org"}) == "h1"
    assert membership.find_host(plan, {}, placement(2, 1, host="10.0.0.2")) == "h2"
    with pytest.raises(
        PlacementError, match=r"this host \(stranger, .*\) is not in the plan of run r1, which has h1, h2"
    ):
        membership.find_host(plan, {"SLURMD_NODENAME": "stranger"})


@pytest.mark.parametrize(
    ("name", "host"), [("10.0.0.9", ""), ("10.0.0.2", "h2"), ("h2", "h2"), ("h2.example.org", "h2")]
)
def test_address_of_two_hosts_names_neither(name: str, host: str) -> None:
    plan = builders.plan("h1", "h2", "h3")
    addresses = dict(zip(("h1", "h2", "h3"), ("10.0.0.9", "10.0.0.2", "10.0.0.9"), strict=True))
    plan = replace(plan, hosts=tuple(replace(item, address=addresses[item.name]) for item in plan.hosts))
    assert membership.match_host(plan, name) == host


BATCH_SCRIPT = {"SLURM_JOB_ID": "7", "SLURM_PROCID": "0", "SLURMD_NODENAME": "h1"}
"""Variables of a job script on h1. mpirun passes them to its processes on all hosts."""


@pytest.mark.parametrize(
    "variables",
    [
        BATCH_SCRIPT | hydra(rank=1, size=2, local_size=1),
        BATCH_SCRIPT | hydra(rank=1, size=2, local_size=1, PMIX_HOSTNAME="h1"),
        srun(SLURMD_NODENAME="h1") | hydra(rank=1, size=2, local_size=1),
        BATCH_SCRIPT | open_mpi(rank=1, size=2, local_size=1),
        BATCH_SCRIPT | open_mpi(rank=1, size=2, local_size=1, PMIX_HOSTNAME="h2"),
    ],
    ids=["hydra", "hydra-with-inherited-pmix", "hydra-in-a-step", "open-mpi", "open-mpi-with-pmix"],
)
def test_remote_process_of_mpirun_in_a_slurm_job_ignores_the_host_name_in_inherited_variables(
    plan: Plan, monkeypatch: pytest.MonkeyPatch, variables: dict[str, str]
) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: "h2")
    assert membership.find_host(plan, variables) == "h2"
    assert membership.find_host(plan, variables, mpi.read_placement(variables)) == "h2"


@pytest.mark.parametrize("more", [{}, {"PMI_RANK": "1", "PMI_SIZE": "2"}], ids=["without-pmi", "with-pmi"])
def test_process_of_srun_takes_its_name_from_srun(
    plan: Plan, monkeypatch: pytest.MonkeyPatch, more: dict[str, str]
) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: "node-of-another-name")
    assert membership.find_host(plan, srun(rank=1, node=1, SLURMD_NODENAME="h2", **more)) == "h2"


@pytest.mark.parametrize("variable", ["SLURMD_NODENAME", "PMIX_HOSTNAME"])
def test_names_of_two_planned_hosts_are_refused(plan: Plan, monkeypatch: pytest.MonkeyPatch, variable: str) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: "h2.example.org")
    with pytest.raises(PlacementError) as error:
        membership.find_host(plan, {variable: "h1"})
    assert f"{variable}=h1 (host h1 of the plan) and this machine's host name h2.example.org (host h2" in str(
        error.value
    )


def publish(tmp_path: Path, plan: Plan, name: str, began: str, boot: str) -> Path:
    """Publish a record of h1 from the run directory `name`; return the published file."""
    documents.write(tmp_path / name / "plan.json", to_json(plan))
    run = HostRun(tmp_path / name, "h1")
    values, absent = ({"host": boot}, {}) if boot else ({}, {"host": "error: not readable"})
    metric = Metric(name="host.boot_id", unit="1", values=values, absent=absent)
    snapshot = Snapshot(stage="preflight", phase="before", at=began, duration_s=1.0, metrics=(metric,))
    record = replace(run.record(), began=began, snapshots=(snapshot,))
    documents.write(run.path(), to_json(record))
    publish_results(standalone_options().parse_args(["--results", str(tmp_path / "results")]), run)
    return tmp_path / "results/hosts/h1.json"


FIRST, LATER = "2026-07-01T10:00:00.000000Z", "2026-07-01T10:00:01.000000Z"


def test_record_of_another_machine_is_not_replaced(tmp_path: Path, plan: Plan) -> None:
    published = publish(tmp_path, plan, "first", FIRST, "boot-1")
    before = published.read_bytes()
    with pytest.raises(documents.DocumentError) as error:
        publish(tmp_path, plan, "second", LATER, "boot-2")
    assert published.read_bytes() == before
    for text in (FIRST, "boot-1", LATER, "boot-2", str(published), str(tmp_path / "second/record.json")):
        assert text in str(error.value)


@pytest.mark.parametrize(
    ("began", "boot"),
    [(FIRST, "boot-1"), (FIRST, "boot-2"), (LATER, "boot-1"), (LATER, "")],
    ids=["continued", "continued-after-a-reboot", "begun-again", "boot-unknown"],
)
def test_machine_replaces_its_own_record(tmp_path: Path, plan: Plan, began: str, boot: str) -> None:
    publish(tmp_path, plan, "first", FIRST, "boot-1")
    assert documents.read(publish(tmp_path, plan, "second", began, boot), "record")["began"] == began


@pytest.mark.parametrize("text", ["", '{"schema": "rackproof.record/2", "host', "[]", "{}"])
def test_damaged_record_is_replaced(tmp_path: Path, plan: Plan, text: str) -> None:
    publish(tmp_path, plan, "first", FIRST, "boot-1").write_text(text)
    assert documents.read(publish(tmp_path, plan, "second", LATER, "boot-2"), "record")["began"] == LATER


def test_record_of_an_earlier_run_is_replaced(tmp_path: Path, plan: Plan) -> None:
    publish(tmp_path, plan, "first", FIRST, "boot-1")
    later = replace(plan, nonce="0" * 32)
    assert documents.read(publish(tmp_path, later, "second", LATER, "boot-2"), "record")["nonce"] == later.nonce


@pytest.mark.parametrize("started", [placement(2, 1), placement(4, 2)], ids=["one-per-host", "one-per-rank"])
def test_launcher_may_start_one_process_per_host_or_per_rank(plan: Plan, started: RankPlacement) -> None:
    assert membership.select_members(plan, plan.host("h1"), "", started) == ["h1", "h2"]


@pytest.mark.parametrize("started", [placement(8, 4), placement(3, 1), placement(1, 1)])
def test_number_of_processes_that_differs_from_the_plan_is_refused(plan: Plan, started: RankPlacement) -> None:
    with pytest.raises(PlacementError, match="start one process for each host, or one for each device"):
        membership.select_members(plan, plan.host("h1"), "", started)


def test_wrong_hosts_of_a_gang_are_refused(plan: Plan) -> None:
    with pytest.raises(PlacementError, match=r"mpirun started processes on h1, h3, but the gang is h1, h2"):
        membership.select_members(plan, plan.host("h1"), "", placement(2, 1, hosts=("h1", "h3")))
    with pytest.raises(PlacementError, match="'h9' is not in the plan of run r1"):
        membership.select_members(plan, plan.host("h1"), "h1,h9", None)
    with pytest.raises(PlacementError, match="h1 is named twice: name each host once"):
        membership.select_members(plan, plan.host("h1"), "h1,h1", None)
    with pytest.raises(
        PlacementError,
        match="--members h2: this host, h1, is missing: add it, or start this command only on the listed hosts",
    ):
        membership.select_members(plan, plan.host("h1"), "h2", None)


@pytest.mark.parametrize(
    ("variable", "devices"),
    [
        ("0, 1", ["0", "1"]),
        ("0,-1,1", ["0"]),
        ("-1", []),
        ("", []),
        ("NoDevFiles", []),
        ("1,,0", ["1"]),
        ("GPU-8f6d,MIG-1a2b,x,0", ["GPU-8f6d", "MIG-1a2b"]),
    ],
)
def test_first_invalid_device_and_all_after_it_are_ignored_as_by_cuda(variable: str, devices: list[str]) -> None:
    assert visible_devices({"CUDA_VISIBLE_DEVICES": variable}) == devices
    assert visible_devices({}) is None


def test_ranks_get_nccl_settings_but_no_variables_of_launchers(
    plan: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {**open_mpi(), "PET_NODE_RANK": "1", "NCCL_DEBUG": "WARN", "NCCL_ALGO": "Ring"}.items():
        monkeypatch.setenv(name, value)
    parser = standalone_options()
    options = parser.parse_args(["--ethernet", "--nccl-debug", "INFO", "--env", "NCCL_NET=Socket", "--env", "A=b=c"])
    request = LaunchRequest(
        stage=plan.stage("gang"),
        members=("h1", "h2"),
        port=29500,
        interface="eth0",
        environment=rank_environment(options),
    )
    gang = Gang.from_plan(plan, plan.host("h1"), "gang 0", request.members, 29500)
    command = launcher_command(plan, plan.host("h1"), request, gang=gang, work=tmp_path, data=tmp_path, uuids={})
    values = {
        key: value for key, value in command.environment.items() if key.startswith(("NCCL_", "OMPI", "PET_", "A"))
    }
    assert {key: values.get(key) for key in ("A", "NCCL_NET", "NCCL_ALGO")} == {
        "A": "b=c",
        "NCCL_NET": "Socket",
        "NCCL_ALGO": "Ring",
    }
    assert (values["NCCL_DEBUG"], values["NCCL_IB_DISABLE"], values["NCCL_SOCKET_IFNAME"]) == ("INFO", "1", "=eth0")
    assert not any(key.startswith(("OMPI", "PET_")) for key in values)


BINDING = {
    "OMP_PROC_BIND": "true",
    "OMP_PLACES": "cores",
    "GOMP_CPU_AFFINITY": "0",
    "KMP_AFFINITY": "granularity=fine,compact,1,0",
}
"""Variable with which OpenMP binds the threads of a rank to processors -> a value."""


@pytest.mark.parametrize("source", ["the shell", "rackproof_environment", "--env"])
@pytest.mark.parametrize("name", BINDING)
def test_openmp_binds_ranks_only_if_the_operator_of_the_run_says_so(
    name: str, source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for other in BINDING:
        monkeypatch.delenv(other, raising=False)
    given = {name: BINDING[name]}
    if source == "the shell":
        monkeypatch.setenv(name, BINDING[name])
    environment = given if source == "rackproof_environment" else {}
    plan = builders.plan("h1", rackproof_gang="none", rackproof_environment=environment)
    options = given if source == "--env" else {}
    request = LaunchRequest(stage=plan.stage("benchmark"), members=("h1",), environment=options)
    gang = Gang.from_plan(plan, plan.host("h1"), "benchmark", request.members, 29500)
    command = launcher_command(plan, plan.host("h1"), request, gang=gang, work=tmp_path, data=tmp_path, uuids={})
    binding = {key: value for key, value in command.environment.items() if key in BINDING}
    assert binding == ({} if source == "the shell" else given)


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two processors")
@pytest.mark.parametrize("step", ["snapshot", "launch"])
def test_process_that_was_bound_to_one_processor_measures_with_all(step: str, tmp_path: Path) -> None:
    """CPUAffinity= of systemd, isolcpus and mpirun bind a process, but do not forbid other processors."""
    plan = builders.plan("h1", rackproof_gang="none")
    run = HostRun.begin(tmp_path, "h1", json.dumps(to_json(plan)))
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(before)})
    try:
        if step == "launch":
            stage.run_launch(run, LaunchRequest(stage=plan.stage("benchmark"), members=("h1",)))
        else:
            (snapshot,) = stage.record_snapshot(run, "preflight", once=True).snapshots
            counts = [metric.values for metric in snapshot.metrics if metric.name == "host.cpu.count"]
            assert counts == [{"host": len(os.sched_getaffinity(0))}]
        assert os.sched_getaffinity(0) >= before
    finally:
        os.sched_setaffinity(0, before)


@pytest.mark.parametrize("interface", ["", "eth0"])
@pytest.mark.parametrize("hosts", [["h1"], ["h1", "h2"]], ids=["alone", "together"])
def test_launch_command_matches_the_golden_file(
    hosts: list[str], interface: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The golden file has the command, the environment and the input files of the ranks. UPDATE_GOLDEN=1 rewrites it."""
    plan, update = builders.plan("h1", "h2"), os.environ.get("UPDATE_GOLDEN")
    for name in os.environ:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PATH", "/usr/bin")
    host = plan.host(hosts[-1])
    launch_request = LaunchRequest(
        stage=plan.stage("gang" if len(hosts) > 1 else "benchmark"),
        members=tuple(hosts),
        port=29500,
        interface=interface,
    )
    gang = replace(Gang.from_plan(plan, host, "gang 0", hosts, 29500), addresses=dict.fromkeys(hosts, "10.0.0.1"))
    uuids = {0: "GPU-a", 1: "GPU-b"}
    command = launcher_command(
        plan, host, launch_request, gang=gang, work=tmp_path, data=tmp_path / "data", uuids=uuids
    )
    rendezvous = json.loads((tmp_path / "rendezvous.json").read_text())
    request = json.loads((tmp_path / "request.json").read_text())
    rendezvous["name"] = "a secret" if rendezvous["name"] else ""
    request["benchmarks"] = sorted(request["benchmarks"])
    assert request.pop("virtual") in (True, False)  # it depends on the machine
    values = {"command": [*command.arguments], "environment": command.environment, "ranks": command.ranks}
    text = json.dumps({**values, "rendezvous.json": rendezvous, "request.json": request}, indent=1, sort_keys=True)
    text = text.replace(str(tmp_path), "WORK").replace(sys.executable, "PYTHON").replace(f"{ROOT}/", "") + "\n"
    golden = (
        ROOT
        / "tests"
        / "golden"
        / f"launch-{'together' if len(hosts) > 1 else 'alone'}{interface and '-' + interface}.json"
    )
    if update:
        golden.write_text(text)
    assert golden.read_text() == text


def test_host_without_a_responding_gpu_starts_no_ranks(tmp_path: Path) -> None:
    plan = builders.plan("h1", rackproof_gang="none")
    run = HostRun.begin(tmp_path / "run", "h1", json.dumps(to_json(plan)))
    (launch,) = stage.run_launch(run, LaunchRequest(stage=plan.stage("benchmark"), members=("h1",))).launches
    assert (launch.outcome, launch.ranks) == ("failed", ())
    assert launch.reason.startswith("the plan has 2 GPUs on host h1, and the driver reports none (")


def test_launch_without_shared_memory_names_its_path_and_the_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(preflight, "SHM", str(tmp_path / "shm"))
    plan = builders.plan("h1", rackproof_gang="none")
    run = HostRun.begin(tmp_path / "run", "h1", json.dumps(to_json(plan)))
    (launch,) = stage.run_launch(run, LaunchRequest(stage=plan.stage("benchmark"), members=("h1",))).launches
    assert (launch.outcome, launch.ranks) == ("failed", ())
    assert launch.reason.startswith(f"{tmp_path}/shm: no file can be written (No such file or directory), and torch")


# --- a plan without an inventory


def test_hosts_on_the_command_line_are_planned_as_one_gang(capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--gpus", "8", "--model", "h200-sxm", "--epochs", "3"]
    assert main(["plan", "--hosts", "n2=10.0.0.2,n1", *options, "--profile", "smoke", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    hosts = [
        (host["name"], host["address"], host["gang"], len(host["devices"]), host["gpu_model"])
        for host in document["hosts"]
    ]
    assert hosts == [("n2", "10.0.0.2", "listed", 8, "h200-sxm"), ("n1", "n1", "listed", 8, "h200-sxm")]
    assert {stage["name"]: stage for stage in document["stages"]}["gang"]["benchmarks"]["training"]["epochs"] == 3
    assert main(["plan", "--hosts", "n1", "--gpus", "8", "--json"]) == 0
    assert "gang" not in {stage["name"] for stage in json.loads(capsys.readouterr().out)["stages"]}, (
        "one host must have no gang"
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "either -i with an inventory, or --hosts with their names"),
        (["--hosts", "a,b", "-i", "inventory/example"], "either -i with an inventory, or --hosts with their names"),
        (["--hosts", "a,a", "--gpus", "8"], "--hosts names a twice"),
        (["--hosts", "a=10.0.0.1,b=10.0.0.1", "--gpus", "8"], "hosts a and b have the same address 10.0.0.1"),
        (["--hosts", "a,", "--gpus", "8"], "host '': a host name may have only letters"),
        (["--hosts", "a,b"], "host a: rackproof_gpu_count is missing"),
    ],
)
def test_invalid_hosts_option_is_refused(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", *arguments]) == 64
    assert message in capsys.readouterr().err


# --- whole programs: messages and exit codes, without an import of torch


@pytest.fixture(scope="module")
def torch_trap(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a directory with a fake torch whose import ends the process."""
    directory = tmp_path_factory.mktemp("trap")
    (directory / "torch").mkdir()
    (directory / "torch/__init__.py").write_text("raise SystemExit('torch was imported')")
    return directory


def run_program(
    torch_trap: Path, variables: Mapping[str, str], *arguments: str | Path
) -> subprocess.CompletedProcess[str]:
    """Run `python -m` with `arguments`, with `variables` added to the environment; `import torch` imports the fake torch.

    Variables that mpirun or srun has set for this test process are removed first.
    """
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("OMPI_", "PMI", "SLURM_"))}
    return subprocess.run(
        [sys.executable, "-m", *arguments],
        env={**environment, "PYTHONPATH": str(torch_trap), **variables},
        cwd=ROOT,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


@pytest.fixture
def taken_port() -> Iterator[int]:
    """Yield a port on which another socket listens."""
    with socket.socket() as channel:
        channel.bind(("127.0.0.1", 0))
        channel.listen()
        yield channel.getsockname()[1]


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"RANK": "0"}, "the environment has RANK, but not WORLD_SIZE"),
        (open_mpi(), "MASTER_ADDR is not set"),
        ({**open_mpi(), "RANK": "1", "WORLD_SIZE": "4", **RENDEZVOUS}, "two launchers started this process"),
    ],
)
def test_wrong_usage_exits_with_64_before_torch_is_imported(
    torch_trap: Path, variables: dict[str, str], message: str
) -> None:
    done = run_program(torch_trap, variables, "agent.benchmarks")
    assert (done.returncode, done.stdout) == (64, "")
    assert done.stderr.startswith("agent.benchmarks: ")
    assert message in done.stderr


def test_rank_with_valid_variables_imports_torch(torch_trap: Path) -> None:
    assert "torch was imported" in run_program(torch_trap, open_mpi(1, 2, 1, 2), "agent.benchmarks").stderr


def test_unwritable_results_fail_before_torch_is_imported(torch_trap: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    done = run_program(torch_trap, {}, "agent.benchmarks", "--results", tmp_path / "file" / "results")
    assert done.returncode == 2
    assert f"{tmp_path}/file/results: Not a directory: give another directory" in done.stderr


def test_port_in_use_fails_before_torch_is_imported(torch_trap: Path, taken_port: int) -> None:
    done = run_program(torch_trap, open_mpi(0, 2, 0, 2, MASTER_PORT=str(taken_port)), "agent.benchmarks")
    assert done.returncode == 2
    assert f"rendezvous port {taken_port}: Address already in use; set MASTER_PORT" in done.stderr


RUN_LAUNCHES = """
import contextlib, io, json, os, sys
from rackproof.main import main
outcomes = []
for variables, arguments in json.loads(sys.argv[1]):
    output = io.StringIO()
    os.environ.update(variables)
    with contextlib.redirect_stderr(output), contextlib.redirect_stdout(output):
        try:
            code = main(arguments)
        except SystemExit as end:
            code = end.code
    for name in variables:
        del os.environ[name]
    outcomes.append([code, output.getvalue()])
print(json.dumps([outcomes, "torch" in sys.modules]))
"""


def run_launches(torch_trap: Path, *cases: tuple[Mapping[str, str], Sequence[object]]) -> list[tuple[int, str]]:
    """Run `rackproof launch` for all cases in the same process, which must not import torch. Return exit codes and outputs."""
    (torch_trap / "launches.py").write_text(RUN_LAUNCHES)
    calls = [[dict(variables), ["launch", *map(str, arguments)]] for variables, arguments in cases]
    done = run_program(torch_trap, {}, "launches", json.dumps(calls))
    assert done.returncode == 0, done.stderr
    outcomes, has_torch = json.loads(done.stdout)
    assert not has_torch
    return [tuple(outcome) for outcome in outcomes]


def test_launch_prints_one_line_and_exits_with_the_documented_code(
    torch_trap: Path, tmp_path: Path, plan: Plan
) -> None:
    (tmp_path / "plan.json").write_text(json.dumps(to_json(plan)))
    (tmp_path / "file").touch()
    by_mpi = ["--launcher", "mpi", "--plan", tmp_path / "plan.json"]
    run_dir, host = ["--run-dir", tmp_path / "run"], {"PMIX_HOSTNAME": "h1"}
    outcomes = run_launches(
        torch_trap,
        ({}, [*by_mpi, *run_dir]),
        (open_mpi() | {"TORCHELASTIC_RUN_ID": "x"}, [*by_mpi, *run_dir]),
        (open_mpi() | host, ["--plan", tmp_path / "plan.json", *run_dir]),
        (open_mpi(0, 8, 0, 4) | host, [*by_mpi, *run_dir]),
        (open_mpi() | host, [*by_mpi, *run_dir, "--host", "h1"]),
        (open_mpi() | host, [*by_mpi, *run_dir, "--detach"]),
        (open_mpi() | host, [*by_mpi, *run_dir, "--env", "NCCL_DEBUG"]),
        (open_mpi() | host, [*by_mpi, "--run-dir", tmp_path / "file" / "run"]),
        (open_mpi() | host, [*by_mpi, *run_dir, "--results", tmp_path / "file" / "results"]),
        (open_mpi(1, 4, 1) | host, [*by_mpi, "--run-dir", tmp_path / "untouched"]),
    )
    expected = [
        (64, "neither OMPI_COMM_WORLD_RANK nor PMI_RANK is set"),
        (64, "TORCHELASTIC_RUN_ID is set"),
        (64, "use `rackproof launch --launcher mpi`"),
        (64, "mpirun started 8 processes, 4 on this host; the plan has 2 hosts with 4 cpu devices, 2 on this host"),
        (64, "--host h1: the launcher started this command on 2 hosts"),
        (64, "--detach with --launcher mpi"),
        (64, "--env NCCL_DEBUG: write NAME=VALUE"),
        (2, f"{tmp_path}/file: File exists"),
        (2, f"{tmp_path}/file/results: Not a directory"),
        (0, "rank 1: nothing to do; local rank 0 supervises"),
    ]
    for (code, output), (expected_code, message) in zip(outcomes, expected, strict=True):
        assert code == expected_code, output
        assert message in output
        assert output.count("\n") == 1, output
    assert not (tmp_path / "untouched").exists(), "a process that does not supervise must write nothing"


def test_port_in_use_is_recorded_and_launch_exits_with_0(torch_trap: Path, tmp_path: Path, taken_port: int) -> None:
    """mpirun ends all processes as soon as one exits with an error, but the supervisors of the other hosts must continue."""
    plan = builders.plan(profile="rehearsal")
    plan = replace(plan, hosts=tuple(replace(host, address="127.0.0.1") for host in plan.hosts))
    (tmp_path / "plan.json").write_text(json.dumps(to_json(plan)))
    options = [
        "--launcher",
        "mpi",
        "--plan",
        tmp_path / "plan.json",
        "--run-dir",
        tmp_path / "run",
        "--port",
        taken_port - 1,  # the first host listens for statuses on the next port, `taken_port`
    ]
    results = ["--results", tmp_path / "results"]
    ((code, output),) = run_launches(torch_trap, (open_mpi(PMIX_HOSTNAME="h1"), [*options, *results]))
    assert code == 0
    record = documents.read(tmp_path / "results/gangs/r1/h1.json", "record")
    (launch,) = record["launches"]
    assert launch["outcome"] == "failed"
    assert (
        f"cannot listen for the gang's statuses on 127.0.0.1 port {taken_port}: Address already in use"
        in launch["reason"]
    )
    assert "stage gang: failed" in output, output
    assert documents.read(tmp_path / "results/plan.json", "plan")["run_id"] == "r1"
    assert documents.read(tmp_path / "results/hosts/h1.json", "record")["snapshots"]
