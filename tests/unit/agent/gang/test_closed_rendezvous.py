"""torch's rendezvous can be restricted to the members of a gang (the hosts of one multi-node launch).

Product code unpickles no data, so data from another host cannot execute code.
"""

from __future__ import annotations

import ast
import json
import os
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from agent.gang.allow_list import admit_only
from agent.gang.protocol import Gang, GangError
from agent.gang.transport import check_addresses, listen
from agent.launch.request import LaunchRequest
from agent.launch.torchrun import LaunchError, launcher_command
from tests import ROOT, builders

SHIPPED = ("agent", "collectors", "fleet", "schemas", "rackproof", "roles")
UNSAFE = {
    "pickle": "import pickle",
    "pickle under another name": "from pickle import loads as read",
    "marshal inside a function": "def f():\n    import marshal",
    "shelve": "import shelve",
    "dill": "import dill",
    "cloudpickle": "import cloudpickle",
    "connections that unpickle": "from multiprocessing.connection import Listener",
    "all_gather_object": "import torch.distributed as dist\ndist.all_gather_object([], 1)",
    "gather_object": "import torch\ntorch.distributed.gather_object(1)",
    "broadcast_object_list": "from torch.distributed import broadcast_object_list",
    "scatter_object_list": "import torch.distributed as d\nd.scatter_object_list([], [])",
    "send_object_list": "from torch.distributed.distributed_c10d import send_object_list",
    "recv_object_list": "from torch import distributed\ndistributed.recv_object_list([])",
    "rpc": "import torch.distributed.rpc",
    "distributed checkpoints": "from torch.distributed.checkpoint import load",
}
"""Name -> use of an unsafe deserializer, which can execute code from its input. The linter must refuse every entry."""


def lint(*arguments: str, stdin: str | None = None) -> subprocess.CompletedProcess[str]:
    """Run ruff with only the rule TID251, which refuses the APIs that pyproject.toml bans. ruff ignores `noqa` comments here."""
    command = [sys.executable, "-m", "ruff", "check", "--no-cache", "--ignore-noqa", "--select=TID251", *arguments]
    return subprocess.run(command, input=stdin, cwd=ROOT, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("path", ["agent/benchmarks/new.py", "fleet/new.py", "roles/preflight/files/new.py"])
def test_lint_refuses_unsafe_deserialization(path: str) -> None:
    code = "".join(f"# {name}\n{text}\n" for name, text in UNSAFE.items())
    done = lint("--output-format=json", f"--stdin-filename={path}", "-", stdin=code)
    refused = {item["location"]["row"] for item in json.loads(done.stdout) if item["code"] == "TID251"}
    lines, names = code.splitlines(), list(UNSAFE)
    begins = [lines.index(f"# {name}") + 1 for name in names]
    ranges = zip(names, begins, [*begins[1:], len(lines) + 1], strict=True)
    assert [name for name, begin, end in ranges if refused.isdisjoint(range(begin, end))] == []


def test_product_code_does_not_unpickle() -> None:
    done = lint(*SHIPPED)
    assert done.returncode == 0, done.stdout + done.stderr


def unsafe_loads(code: str) -> list[int]:
    """Return the numbers of the lines that use torch.load in any way other than a call with weights_only=True."""
    lines = []
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Attribute) and ast.unparse(node) == "torch.load":
            lines.append(node.lineno)
        if isinstance(node, ast.ImportFrom) and node.module == "torch" and "load" in [name.name for name in node.names]:
            lines.append(node.lineno)
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "torch.load":
            safe = [
                keyword
                for keyword in node.keywords
                if keyword.arg == "weights_only" and ast.unparse(keyword.value) == "True"
            ]
            # The negative number marks a safe use. The return statement leaves out a line if all its uses are safe.
            lines += [-node.func.lineno] * len(safe)
    return sorted(line for line in lines if line > 0 and lines.count(line) > lines.count(-line))


def test_torch_load_reads_weights_only() -> None:
    assert unsafe_loads("import torch\ntorch.load(path)\ntorch.load(path, weights_only=False)") == [2, 3]
    assert unsafe_loads("import torch\nread = torch.load\ntorch.load(path, weights_only=safe)") == [2, 3]
    assert unsafe_loads("import torch\nfrom torch import load\ntorch.load(path, None, weights_only=True)") == [2]
    files = [path for name in SHIPPED for path in (ROOT / name).rglob("*.py")]
    texts = ((path, path.read_text(encoding="utf-8")) for path in files)
    code_by_path = {path: text for path, text in texts if "torch" in text and "load" in text}
    assert any("torch.load(" in code for code in code_by_path.values()), "no code calls torch.load: remove this test"
    assert {path: lines for path, code in code_by_path.items() if (lines := unsafe_loads(code))} == {}


# --- who can connect to a listening socket


def can_connect(listener: socket.socket, source: str) -> bool:
    """Return whether a client with the address `source` can connect and exchange data."""
    with socket.socket(listener.family) as client:
        client.bind((source, 0))
        client.settimeout(0.3)
        try:
            client.connect(listener.getsockname())
        except TimeoutError:
            return False
        client.sendall(b"data")
        listener.settimeout(1)
        with listener.accept()[0] as accepted:
            accepted.settimeout(1)
            accepted.sendall(accepted.recv(16))
        return client.recv(16) == b"data"


def test_only_allowed_addresses_can_connect() -> None:
    with listen("127.0.0.1", 0, ["127.0.0.5", "127.0.0.7", "fe80::1"]) as listener:
        assert {end: can_connect(listener, f"127.0.0.{end}") for end in (1, 4, 5, 6, 7, 8)} == {
            1: True,  # the host itself
            4: False,
            5: True,
            6: False,
            7: True,
            8: False,
        }


def test_empty_allow_list_admits_every_address() -> None:
    with listen("127.0.0.1", 0) as listener:
        assert can_connect(listener, "127.0.0.6")


@pytest.mark.parametrize(
    ("allowed", "expected"), [("::1", True), ("::2", False), ("1::1", False), ("127.0.0.1", False)]
)
def test_only_allowed_ipv6_addresses_can_connect(allowed: str, expected: bool) -> None:
    with socket.socket(socket.AF_INET6) as listener:
        try:
            listener.bind(("::1", 0))
        except OSError:
            pytest.skip("this machine has no IPv6")
        admit_only(listener, [allowed])
        listener.listen()
        assert can_connect(listener, "::1") is expected


def test_hundreds_of_addresses_can_be_allowed() -> None:
    hosts = [f"127.0.{third}.{fourth}" for third in range(2) for fourth in range(1, 255)]
    with listen("127.0.0.1", 0, hosts) as listener:
        assert can_connect(listener, "127.0.1.254")
        assert not can_connect(listener, "127.0.2.1")


# --- address, port and name of the rendezvous


def write_rendezvous(
    work: Path,
    me: str,
    members: Sequence[str],
    *,
    members_only: bool = False,
    stage: str = "gang 1",
    variables: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """Write `rendezvous.json`, the parameters of torch's rendezvous on host `me`, and return its content.

    Also check that the command line has no secret, that the file is private, and that NCCL and gloo get the right interfaces.
    `variables`: environment variables of the launch.
    """
    plan = builders.plan("node1", "node2", profile="rehearsal", rackproof_infiniband_ports=2)
    host = plan.host(me)
    addresses = dict.fromkeys(members, "127.0.0.1")
    gang = Gang.from_plan(plan, host, stage, members, 29500, members_only=members_only)
    gang = Gang(**{**vars(gang), "addresses": addresses})
    request = LaunchRequest(
        stage=plan.stage("gang"), members=gang.members, port=29500, interface="eth7", environment=variables or {}
    )
    command = launcher_command(plan, host, request, gang=gang, work=work, data=work, uuids={})
    rendezvous: dict[str, Any] = json.loads((work / "rendezvous.json").read_text())
    assert not any(rendezvous["name"] in argument or plan.nonce in argument for argument in command.arguments)
    assert (work / "rendezvous.json").stat().st_mode & 0o077 == 0
    assert command.environment["NCCL_SOCKET_IFNAME"] == "=eth7"
    assert command.environment["GLOO_SOCKET_IFNAME"] == ("lo" if len(members) == 1 else "eth7")
    return rendezvous


def test_rendezvous_is_at_the_first_hosts_address(tmp_path: Path) -> None:
    both = [write_rendezvous(tmp_path, me, ["node1", "node2"]) for me in ("node1", "node2")]
    assert [
        (rendezvous["address"], rendezvous["port"], rendezvous["rank"], rendezvous["hosts"]) for rendezvous in both
    ] == [
        ("127.0.0.1", 29500, 0, 2),
        ("127.0.0.1", 29500, 1, 2),
    ]
    assert [rendezvous["admitted"] for rendezvous in both] == [[], []]
    assert both[0]["name"] == both[1]["name"]


def test_rendezvous_of_one_host_is_on_loopback(tmp_path: Path) -> None:
    rendezvous = write_rendezvous(tmp_path, "node2", ["node2"])
    assert (rendezvous["address"], rendezvous["port"], rendezvous["rank"], rendezvous["hosts"]) == (
        "127.0.0.1",
        0,
        0,
        1,
    )


@pytest.mark.parametrize(("variables", "fabric"), [({}, True), ({"NCCL_IB_DISABLE": "1"}, False)])
def test_rdma_ports_are_not_measured_if_nccl_ib_disable_is_set(
    tmp_path: Path, variables: dict[str, str], fabric: bool
) -> None:
    write_rendezvous(tmp_path, "node1", ["node1", "node2"], variables=variables)
    assert json.loads((tmp_path / "request.json").read_text())["fabric"] is fabric


def test_first_host_accepts_only_the_members(tmp_path: Path) -> None:
    both = [write_rendezvous(tmp_path, me, ["node1", "node2"], members_only=True) for me in ("node1", "node2")]
    assert [rendezvous["admitted"] for rendezvous in both] == [["127.0.0.1"], []]  # only the first host listens


@pytest.mark.parametrize(
    ("address", "given", "profile", "interface"),
    [
        ("127.0.0.1", "", "rehearsal", "lo"),
        ("nowhere.invalid", "", "rehearsal", "lo"),
        ("127.0.0.1", "eth7", "rehearsal", "eth7"),
        ("127.0.0.1", "", "smoke", ""),
    ],
)
def test_interface_of_gloo_is_set_if_the_ranks_run_on_cpus(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, address: str, given: str, profile: str, interface: str
) -> None:
    """Without a setting, gloo would use the address to which the host name resolves, which is 127.0.1.1 in many /etc/hosts.

    Ranks run on CPUs in the profile `rehearsal`, and on GPUs in `smoke`.

    `address`: address of node2 in the plan. If it cannot be resolved, node2 uses the address from which it reaches node1.
    `given`: GLOO_SOCKET_IFNAME in the planned environment of node2; empty: not set.
    `interface`: the expected interface; empty: gloo chooses.
    """
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    plan = builders.plan("node1", "node2", profile=profile)
    gang = Gang.from_plan(plan, plan.host("node2"), "gang", ["node1", "node2"], 29500)
    gang = Gang(**{**vars(gang), "addresses": {"node1": "127.0.0.1", "node2": address}})
    request = LaunchRequest(stage=plan.stage("gang"), members=gang.members, port=29500)
    host = replace(plan.host("node2"), environment={"GLOO_SOCKET_IFNAME": given} if given else {})
    command = launcher_command(plan, host, request, gang=gang, work=tmp_path, data=tmp_path, uuids={})
    assert command.environment.get("GLOO_SOCKET_IFNAME", "") == interface


@pytest.mark.parametrize(
    ("addresses", "problem"),
    [
        ({"node1": "198.51.100.1", "node2": "198.51.100.2"}, ""),
        ({"node1": "198.51.100.1", "node2": "nowhere.invalid"}, ""),
        ({"node1": "127.0.0.1", "node2": "127.0.0.1"}, ""),
        ({"node1": "localhost", "node2": "198.51.100.2"}, "host node1: its address localhost is the loopback address "),
        ({"node1": "127.0.1.1", "node2": "198.51.100.2"}, "host node1: its address 127.0.1.1 is the loopback address"),
    ],
)
def test_loopback_address_of_the_first_host_is_reported(addresses: dict[str, str], problem: str) -> None:
    """If the second host used a loopback address for the first host, it would connect to itself and be reported as lost.

    It is no problem if all hosts have loopback addresses: they are then on one machine.
    """
    plan = builders.plan("node1", "node2", profile="rehearsal")
    gang = Gang.from_plan(plan, plan.host("node2"), "gang", ["node1", "node2"], 29500)
    gang = Gang(**{**vars(gang), "addresses": addresses})
    if not problem:
        check_addresses(gang)
        return
    with pytest.raises(GangError) as caught:
        check_addresses(gang)
    assert str(caught.value).startswith(problem)


def test_every_launch_has_its_own_rendezvous_name(tmp_path: Path) -> None:
    names = {
        write_rendezvous(tmp_path, "node1", members, stage=stage)["name"]
        for members in (["node1", "node2"], ["node2", "node1"], ["node1"])
        for stage in ("gang 1", "gang 2")
    }
    assert len(names) == 6
    assert {len(name) for name in names} == {32}


def test_member_whose_address_cannot_be_resolved_is_named_in_the_error(tmp_path: Path) -> None:
    plan = builders.plan("node1", "node2", profile="rehearsal")
    gang = Gang.from_plan(plan, plan.host("node2"), "gang", ["node1", "node2"], 29500, members_only=True)
    gang = Gang(**{**vars(gang), "addresses": {"node1": "nowhere.invalid", "node2": "127.0.0.1"}})
    with pytest.raises(GangError, match=r"nowhere\.invalid has no address here"):
        _ = gang.allowed_addresses
    request = LaunchRequest(stage=plan.stage("gang"), members=gang.members, port=29500)
    with pytest.raises(LaunchError, match=r"host node1: its address nowhere\.invalid cannot be resolved here"):
        launcher_command(plan, plan.host("node2"), request, gang=gang, work=tmp_path, data=tmp_path, uuids={})


RANK = """
import json, os, sys
from agent.benchmarks.__main__ import connect_store
from torch.distributed import TCPStore
store, rank, world_size = connect_store()
store.set(f"started/{rank}", "started")
store.wait([f"started/{other}" for other in range(world_size)])
listening = []
for table in ("tcp", "tcp6"):
    for line in open(f"/proc/{os.getppid()}/net/{table}").readlines()[1:]:
        address, state, inode = (line.split()[number] for number in (1, 3, 9))
        if state == "0A":
            listening.append((address, f"socket:[{inode}]"))
own_sockets = set()
for pid in (os.getpid(), os.getppid()):
    for fd in os.listdir(f"/proc/{pid}/fd"):
        try:
            own_sockets.add(os.readlink(f"/proc/{pid}/fd/{fd}"))
        except OSError:
            pass
store_without_name = TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
with open(f"{sys.argv[1]}.{rank}", "w") as file:
    json.dump({
        "world_size": world_size,
        "listening": [address for address, inode in listening if inode in own_sockets],
        "readable without the name": store_without_name.check([f"rackproof/started/{rank}", f"started/{rank}"]),
    }, file)
store.set(f"done/{rank}", "done")
store.wait([f"done/{other}" for other in range(world_size)])
"""


def test_ranks_of_one_host_listen_on_loopback_only(tmp_path: Path) -> None:
    (tmp_path / "a_rank.py").write_text(RANK)
    rendezvous = {
        "address": "127.0.0.1",
        "port": 0,
        "admitted": [],
        "name": "a-secret-name",
        "rank": 0,
        "hosts": 1,
        "trains": False,
    }
    (tmp_path / "rendezvous.json").write_text(json.dumps(rendezvous))
    subprocess.run(
        [
            *(sys.executable, "-m", "agent.benchmarks.rendezvous", tmp_path / "rendezvous.json"),
            *("--nnodes=1", "--nproc-per-node=2", "--max-restarts=0", "--run-path", "--start-method=fork"),
            *(tmp_path / "a_rank.py", tmp_path / "result"),
        ],
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        check=True,
        timeout=120,
    )
    for rank in range(2):
        result = json.loads((tmp_path / f"result.{rank}").read_text())
        (listening,) = result["listening"]
        assert listening.startswith("0100007F:")  # 127.0.0.1, as the kernel writes it
        assert (result["world_size"], result["readable without the name"]) == (2, False)


def test_port_in_use_is_reported(tmp_path: Path) -> None:
    with listen("127.0.0.1", 0) as taken:
        port = taken.getsockname()[1]
        rendezvous = {
            "address": "127.0.0.1",
            "port": port,
            "admitted": [],
            "name": "n",
            "rank": 0,
            "hosts": 1,
            "trains": False,
        }
        (tmp_path / "rendezvous.json").write_text(json.dumps(rendezvous))
        done = subprocess.run(
            [
                *(sys.executable, "-m", "agent.benchmarks.rendezvous", tmp_path / "rendezvous.json"),
                *("--nnodes=1", "--nproc-per-node=1", "-m", "this"),
            ],
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=False,
            timeout=60,
        )
    assert done.returncode == 1
    assert (
        f"rackproof: cannot listen for the ranks' rendezvous on 127.0.0.1 port {port}: Address already in use"
        in done.stderr
    )
