"""Test the script of the role `preflight`, which checks a host before anything is installed on it.

The script reports interfaces, addresses and files that the settings name but the host does not have, settings that slow its GPUs,
and directories that cannot be used.
"""

from __future__ import annotations

import ast
import json
import os
import socket
import tempfile
from argparse import Namespace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from agent.run import preflight
from tests import ROOT

VARIABLE_PREFIXES = ("NCCL_", "GLOO_", "CUDA_LAUNCH", "NVIDIA_TF32")


@pytest.fixture
def probe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Return the script as a module, on a host with interfaces bond0 (down), eth0, lo and with RDMA adapters mlx5_0, mlx5_10."""
    for name, state in (("bond0", "down"), ("eth0", "up"), ("lo", "unknown")):
        (tmp_path / "net" / name).mkdir(parents=True)
        (tmp_path / "net" / name / "operstate").write_text(f"{state}\n")
    for name in ("mlx5_0", "mlx5_10"):
        (tmp_path / "infiniband" / name).mkdir(parents=True)
    for name in [name for name in os.environ if name.startswith(VARIABLE_PREFIXES)]:
        monkeypatch.delenv(name)
    monkeypatch.setattr(preflight, "NETWORK", str(tmp_path / "net"))
    monkeypatch.setattr(preflight, "INFINIBAND", str(tmp_path / "infiniband"))
    monkeypatch.setattr(preflight, "NCCL_FILE", str(tmp_path / "nccl.conf"))
    monkeypatch.setattr(preflight, "NCCL_USER_FILE", str(tmp_path / "user.conf"))
    return preflight


@pytest.mark.parametrize(
    "script",
    ["agent/run/preflight.py", "roles/nvidia_driver/files/probe.py", "roles/container_toolkit/files/probe.py"],
)
def test_script_can_be_run_by_an_old_python(script: str) -> None:
    """Newer syntax would cause an error. The script of `preflight` must instead report that the Python is too old.

    Python 3.6 has neither `from __future__ import annotations` nor types such as `dict[str, str]`, except in quotes.
    """
    tree = ast.parse((ROOT / script).read_text(), feature_version=(3, 6))
    assert not [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.module == "__future__"]
    hints = [
        node.annotation for node in ast.walk(tree) if isinstance(node, ast.arg | ast.AnnAssign) and node.annotation
    ]
    hints += [node.returns for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and node.returns]
    assert not [ast.unparse(hint) for hint in hints if isinstance(hint, ast.Subscript | ast.BinOp)]


def network(probe: ModuleType, interface: str = "", address: str = "") -> list[str]:
    return list(probe.network_problems(Namespace(interface=interface, address=address, exporter_address="")))


@pytest.mark.parametrize(
    ("interface", "address", "problem"),
    [
        ("", "", ""),
        ("eth0", "127.0.0.1", ""),
        ("lo", "localhost", ""),
        ("", "::1", ""),
        (
            "bond1",
            "",
            "rackproof_fabric_interface is bond1, but this host has only bond0, eth0, lo: set it to",
        ),
        ("eth", "", "rackproof_fabric_interface is eth, but this host has only"),
        ("bond0", "", "rackproof_fabric_interface is bond0, but this interface is down: check `ip link show bond0`"),
        (
            "",
            "198.51.100.7",
            "rackproof_fabric_address is 198.51.100.7, but no interface of this host has this address",
        ),
        ("", "nowhere.invalid", "rackproof_fabric_address nowhere.invalid cannot be resolved on this host ("),
    ],
)
def test_unusable_interface_or_address_is_a_problem(
    probe: ModuleType, interface: str, address: str, problem: str
) -> None:
    if address == "::1" and not socket.has_ipv6:
        pytest.skip("this machine has no IPv6")
    problems = network(probe, interface, address)
    assert len(problems) == bool(problem)
    assert "".join(problems).startswith(problem)


@pytest.mark.parametrize("address", ["", "127.0.0.1", "0.0.0.0", "::", "localhost", "198.51.100.7", "nowhere.invalid"])
def test_exporter_address_has_the_same_problems_as_the_fabric_address(probe: ModuleType, address: str) -> None:
    problems = list(probe.network_problems(Namespace(interface="", address="", exporter_address=address)))
    fabric = network(probe, address=address)
    assert problems == [text.replace("rackproof_fabric_address", "rackproof_exporter_listen") for text in fabric]
    assert bool(problems) == (address in ("198.51.100.7", "nowhere.invalid"))


@pytest.mark.parametrize(
    ("variables", "problem"),
    [
        ({}, ""),
        ({"NCCL_SOCKET_IFNAME": "eth"}, ""),
        ({"NCCL_SOCKET_IFNAME": "=eth0"}, ""),
        ({"NCCL_SOCKET_IFNAME": "^docker,lo"}, ""),
        ({"NCCL_SOCKET_IFNAME": "ib0,eth0"}, ""),
        (
            {"NCCL_SOCKET_IFNAME": "=eth"},
            "NCCL_SOCKET_IFNAME is =eth in SOURCE, but this host has ",
        ),
        (
            {"NCCL_SOCKET_IFNAME": "^bond,eth,lo"},
            "NCCL_SOCKET_IFNAME is ^bond,eth,lo in SOURCE, which excludes every interface of this host (bond0, eth0, lo)",
        ),
        ({"NCCL_SOCKET_IFNAME": "ib"}, "NCCL_SOCKET_IFNAME is ib in SOURCE, but this host has "),
        ({"NCCL_IB_HCA": "mlx5"}, ""),
        ({"NCCL_IB_HCA": "=mlx5_0:1,mlx5_10:1"}, ""),
        ({"NCCL_IB_HCA": "^mlx5_0"}, ""),
        (
            {"NCCL_IB_HCA": "^mlx5"},
            "NCCL_IB_HCA is ^mlx5 in SOURCE, which excludes every adapter of this host (mlx5_0, mlx5_10): exclude fewer",
        ),
        (
            {"NCCL_IB_HCA": "=mlx5_1"},
            "NCCL_IB_HCA is =mlx5_1 in SOURCE, but this host has mlx5_0, mlx5_10",
        ),
        ({"NCCL_IB_HCA": "mthca", "NCCL_IB_DISABLE": "1"}, ""),
        ({"GLOO_SOCKET_IFNAME": "eth0"}, ""),
        ({"GLOO_SOCKET_IFNAME": "eth1"}, "GLOO_SOCKET_IFNAME in SOURCE is eth1, but this host has only"),
        (
            {"NCCL_TOPO_FILE": "/no/topo.xml"},
            "NCCL_TOPO_FILE is /no/topo.xml in SOURCE, but this host has no such file",
        ),
        ({"NCCL_TOPO_FILE": "/etc/passwd"}, ""),
    ],
)
@pytest.mark.parametrize("source", ["rackproof_environment", "the environment of this host", "nccl.conf"])
def test_variable_that_selects_no_device_or_names_a_missing_file_is_a_problem(
    probe: ModuleType,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    variables: dict[str, str],
    problem: str,
    source: str,
) -> None:
    """In an expected problem, SOURCE stands for the place in which the variable is set."""
    given: dict[str, Any] = {}
    if source == "rackproof_environment":
        given = variables
    elif source == "nccl.conf":
        source = str(tmp_path / "nccl.conf")
        text = "".join(f"{name} = {value} # a comment\n" for name, value in variables.items())
        (tmp_path / "nccl.conf").write_text(f"# a comment\n\n{text}")
    else:
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
    problems = list(probe.environment_problems(os.environ, given))
    assert len(problems) == bool(problem)
    assert "".join(problems).startswith(problem.replace("SOURCE", source))


@pytest.mark.parametrize(
    ("name", "value", "distorts"),
    [
        ("NCCL_P2P_DISABLE", "1", True),
        ("NCCL_P2P_DISABLE", "0", False),
        ("NCCL_SHM_DISABLE", "1", True),
        ("CUDA_LAUNCH_BLOCKING", "1", True),
        ("CUDA_LAUNCH_BLOCKING", "", False),
        ("NVIDIA_TF32_OVERRIDE", "0", True),
        ("NVIDIA_TF32_OVERRIDE", "1", True),
        ("NVIDIA_TF32_OVERRIDE", "", False),
        ("CUBLAS_WORKSPACE_CONFIG", ":4096:8", True),
        ("CUBLAS_WORKSPACE_CONFIG", "", False),
        ("PYTORCH_NO_CUDA_MEMORY_CACHING", "1", True),
        ("NCCL_P2P_USE_CUDA_MEMCPY", "1", True),
        ("NCCL_P2P_USE_CUDA_MEMCPY", "0", False),
        ("NCCL_MAX_P2P_NCHANNELS", "16", True),
        ("NCCL_MAX_P2P_NCHANNELS", "32", False),
        ("NCCL_ALGO", "Ring", True),
        ("NCCL_ALGO", "", False),
        ("NCCL_PROTO", "LL", True),
        ("NCCL_P2P_LEVEL", "LOC", True),
        ("NCCL_P2P_LEVEL", "0", True),
        ("NCCL_P2P_LEVEL", "NVL", False),
        ("NCCL_NET_GDR_LEVEL", "loc", True),
        ("NCCL_NET_GDR_LEVEL", "SYS", False),
        ("NCCL_MAX_NCHANNELS", "2", True),
        ("NCCL_MAX_NCHANNELS", "32", False),
        ("NCCL_MAX_NCHANNELS", "many", False),
        ("NCCL_MAX_CTAS", "1", True),
        ("NCCL_BUFFSIZE", "65536", True),
        ("NCCL_BUFFSIZE", "0x10000", True),
        ("NCCL_BUFFSIZE", "0x400000", False),
        ("NCCL_BUFFSIZE", "8388608", False),
        ("NCCL_NTHREADS", "64", True),
        ("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE", "12.5", True),
        ("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE", "100", False),
        ("NCCL_MIN_NCHANNELS", "32", False),
        ("NCCL_DEBUG", "INFO", False),
    ],
)
def test_variable_that_distorts_measurements_is_a_problem_unless_the_inventory_sets_it(
    probe: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, value: str, distorts: bool
) -> None:
    monkeypatch.setenv(name, value)
    problems = list(probe.environment_problems(os.environ, {}))
    assert len(problems) == distorts
    assert all(f"{name} is {value} in the environment of this host" in problem for problem in problems)
    assert list(probe.environment_problems(os.environ, {name: value})) == []
    monkeypatch.delenv(name)
    (tmp_path / "nccl.conf").write_text(f"{name}={value}\n")
    problems = list(probe.environment_problems(os.environ, {}))
    assert len(problems) == distorts
    assert all(f"{name} is {value} in {tmp_path / 'nccl.conf'}, " in problem for problem in problems)


@pytest.mark.parametrize(
    ("files", "chosen", "slows"),
    [
        ({"nccl.conf": "1", "user.conf": "0"}, "", False),
        ({"nccl.conf": "0", "user.conf": "1"}, "", True),
        ({"user.conf": "1", "job.conf": "0"}, "job.conf", False),
        ({"job.conf": "1"}, "job.conf", True),
        ({"job.conf": "1"}, "", False),
    ],
)
def test_configuration_files_of_nccl_have_the_precedence_that_nccl_gives_them(
    probe: ModuleType, tmp_path: Path, files: dict[str, str], chosen: str, slows: bool
) -> None:
    """The user's file takes precedence over the system's, and NCCL_CONF_FILE replaces the user's file."""
    for name, value in files.items():
        (tmp_path / name).write_text(f"NCCL_P2P_DISABLE={value}\n")
    environment = {"NCCL_CONF_FILE": str(tmp_path / chosen)} if chosen else {}
    assert len(list(probe.environment_problems(environment, {}))) == slows


@pytest.mark.parametrize(
    ("value", "problem"),
    [("mlx5", "NCCL_IB_HCA is mlx5 in rackproof_environment, but this host has no adapter: "), ("^mlx5", "")],
)
def test_nccl_ib_hca_may_exclude_adapters_but_not_select_them_if_the_host_has_none(
    probe: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, value: str, problem: str
) -> None:
    monkeypatch.setattr(probe, "INFINIBAND", str(tmp_path / "absent"))
    problems = list(probe.environment_problems(os.environ, {"NCCL_IB_HCA": value}))
    assert len(problems) == bool(problem)
    assert "".join(problems).startswith(problem)


def directory_problems(probe: ModuleType, tmp_path: Path, **options: Any) -> list[str]:
    values = {
        "prefix": f"{tmp_path}/opt",
        "state": f"{tmp_path}/state",
        "free_bytes": 1,
        "system_torch": True,
        **options,
    }
    return list(probe.directory_problems(Namespace(**values)))


def test_unusable_directories_of_the_agent_are_problems(
    probe: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert directory_problems(probe, tmp_path) == []
    (tmp_path / "file").write_text("")
    assert directory_problems(probe, tmp_path, prefix=f"{tmp_path}/file") == [
        f"{tmp_path}/file is not a directory: correct rackproof_prefix"
    ]
    (problem,) = directory_problems(probe, tmp_path, free_bytes=1 << 62, prefix=f"{tmp_path}/state")[:1]
    assert "are required: free up space, or lower rackproof_minimum_free_bytes" in problem
    mount = Namespace(f_files=10, f_favail=9, f_flag=os.ST_NOEXEC, f_bavail=1, f_frsize=1)
    monkeypatch.setattr(probe.os, "statvfs", lambda _: mount)
    few, noexec = directory_problems(probe, tmp_path)[2:]  # the first two problems are those of rackproof_prefix
    assert (
        few
        == f"{tmp_path}/state has 9 free inodes, and 5000 are required: remove files, or set rackproof_state_directory"
    )
    assert noexec.startswith(
        f"{tmp_path}/state is on a file system that is mounted noexec: set rackproof_state_directory"
    )
    monkeypatch.setattr(
        probe.os, "statvfs", lambda _: Namespace(f_files=0, f_favail=0, f_flag=0, f_bavail=1, f_frsize=1)
    )
    assert directory_problems(probe, tmp_path) == [], (
        "a file system that reports no number of inodes, such as btrfs, must be accepted"
    )


def test_full_temporary_directory_is_a_problem(
    probe: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        probe.tempfile,
        "TemporaryFile",
        lambda dir=None: open("/dev/null" if dir else "/dev/full", "wb"),  # noqa: PTH123, SIM115
    )
    (problem,) = directory_problems(probe, tmp_path)
    assert problem.startswith(
        "no temporary file can be written ([Errno 28] No space left on device): free up space in /tmp"
    )


@pytest.mark.parametrize(("mode", "is_problem"), [(0o755, True), (0o1777, False)])
def test_shared_memory_that_only_another_user_can_write_is_a_problem(mode: int, is_problem: bool) -> None:
    user = os.geteuid()
    with tempfile.TemporaryDirectory() as directory:
        Path(directory).chmod(mode)
        os.seteuid(65534)
        try:
            problems = list(preflight.shared_memory_problems(directory))
        finally:
            os.seteuid(user)
    assert len(problems) == is_problem
    assert all(text.startswith(f"{directory}: no file can be written (Permission denied), and") for text in problems)


def test_full_shared_memory_is_a_problem(probe: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "SHM", str(tmp_path))
    monkeypatch.setattr(
        probe.tempfile,
        "TemporaryFile",
        lambda dir=None: open("/dev/full" if dir else "/dev/null", "wb"),  # noqa: PTH123, SIM115
    )
    (problem,) = directory_problems(probe, tmp_path)
    assert problem.startswith(f"{tmp_path}: no file can be written (No space left on device)")


@pytest.mark.parametrize("problem", ["", "port 9500 is in use"])
def test_clock_that_may_be_ahead_is_stated_only_without_another_problem(
    probe: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], problem: str
) -> None:
    """Only the role finds out whether the connection took that long, and with another problem it does not compare the clocks."""
    monkeypatch.setattr(probe, "problems", lambda options: [problem] if problem else [])
    required = ["--now=0", "--clock-skew=1", "--free-bytes=0", "--prefix=p", "--state=s"]
    monkeypatch.setattr(probe.sys, "argv", ["probe.py", *required, "--exporter-port=1", "--rendezvous-port=2"])
    assert probe.main() == (1 if problem else probe.MAY_BE_AHEAD)
    assert ("chrony" in capsys.readouterr().err) is (not problem)


def test_facts_have_the_boot_id_of_the_machine(
    probe: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "boot_id").write_text("0d8f3e52-6b1c-4c57-9a3e-2f40c1d7b6a9\n")
    monkeypatch.setattr(probe, "BOOT_ID", str(tmp_path / "boot_id"))
    monkeypatch.setattr(probe, "problems", lambda options: ())
    required = ["--now=0", "--clock-skew=inf", "--free-bytes=0", "--prefix=p", "--state=s"]
    monkeypatch.setattr(probe.sys, "argv", ["probe.py", *required, "--exporter-port=1", "--rendezvous-port=2"])
    assert probe.main() == 0
    assert json.loads(capsys.readouterr().out)["boot_id"] == "0d8f3e52-6b1c-4c57-9a3e-2f40c1d7b6a9"
    (tmp_path / "boot_id").unlink()
    assert probe.main() == 0
    assert json.loads(capsys.readouterr().out)["boot_id"] == ""
