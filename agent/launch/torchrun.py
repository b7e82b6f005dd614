"""Build the command that starts the ranks of this host: torchrun, or a launcher without torch if no benchmark needs torch.

The rendezvous is static, so that ranks follow the order of the hosts and only one port is needed. The rendezvous store listens on
one address only: that of the first host of the gang (the hosts of one multi-node launch) or, in a launch on one host, the
loopback address.
"""

from __future__ import annotations

import importlib.util
import json
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from agent.gang.open_files import reason_too_small
from agent.gang.protocol import Gang
from agent.gang.transport import check_addresses, interface_of, own_address, resolve
from agent.launch import guard
from agent.launch.request import LaunchRequest
from agent.launch.supervise import Command
from agent.placement.rank_placement import without_placement
from agent.run.work_directory import write_request
from collectors.files import Files
from collectors.virtual import is_virtual
from schemas.catalogue import BENCHMARKS, needs_torch, settings
from schemas.errors import RackproofError
from schemas.plans import Plan, PlannedHost
from schemas.stages import CELL, GANG

STORAGE = ("local_storage", "shared_storage")
"""Keys of the request to the ranks, one for each kind of storage directory. A key is missing if the inventory names no
directory of that kind."""
LOOPBACK = "lo", "127.0.0.1"
"""Interface and address for the connections between ranks in a launch on one host."""
THREAD_BINDING = ("OMP_PROC_BIND", "OMP_PLACES", "GOMP_CPU_AFFINITY", "KMP_AFFINITY")
"""Environment variables with which OpenMP binds threads to processors."""


class LaunchError(RackproofError):
    """The ranks cannot be started on this host; the message says why and what to do."""


def launcher_command(
    plan: Plan,
    host: PlannedHost,
    request: LaunchRequest,
    *,
    gang: Gang,
    work: Path,
    data: Path,
    uuids: Mapping[int, str],
) -> Command:
    """Return the command that starts this host's ranks of a launch.

    Args:
        plan, host: the run's plan and this host in it.
        request: the launch. The environment variables in it override all others.
        gang: the hosts that start together, in rank order. A single member means a launch on this host alone.
        work: directory for the request to the ranks, their results and their logs.
        data: directory with the training data that the operator provided; it may be empty or missing.
        uuids: NVML index -> expected UUID (empty or missing: unknown). A rank whose GPU has another UUID measures nothing.

    Raises:
        LaunchError: torch is needed and not installed, `host` has too few CPUs, `host` is the first member and its limit on
            open files is too low, or the name of the first member cannot be resolved.
        GangError: on this host, the address of a watcher (one of the first two members) is a loopback address, but this host's
            own address is not (`check_addresses`). Or this host is the first member, only members may connect, and the name of
            a member cannot be resolved.
    """
    stage, members = request.stage, gang.members
    uses_torch = needs_torch(stage.benchmarks)
    if uses_torch and importlib.util.find_spec("torch") is None:
        raise LaunchError(
            f"torch is not installed for {sys.executable}: if the host provides it, set `rackproof_system_torch: true`, "
            "and set rackproof_python to the Python that has torch; otherwise add torch to the wheelhouse"
        )
    needed_cpus, cpus = stage.cpus * len(host.devices), len(os.sched_getaffinity(0))
    if needed_cpus > cpus:
        raise LaunchError(
            f"host {host.name} has {cpus} CPUs, and {len(host.devices)} ranks with {stage.cpus} each need {needed_cpus}: "
            "plan fewer CPUs per rank"
        )
    node_rank = members.index(host.name)
    sizes = [len(plan.host(name).devices) for name in members]
    first_rank = sum(sizes[:node_rank])
    if node_rank == 0 and (reason := reason_too_small(len(members), sum(sizes))):
        raise LaunchError(f"host {host.name}: {reason}")
    rank_request = write_request(
        work,
        {
            "stage": stage.name,
            "world_scope": f"gang={host.gang}" if stage.name in (GANG, CELL) else "host",
            "members": list(members),
            "gang": list(plan.gangs().get(host.gang, ())) if stage.name == GANG else [],
            "addresses": dict(gang.addresses) if len(members) > 1 else {},
            "fabric": bool(host.fabric_gbps or host.infiniband_ports)
            and {**host.environment, **request.environment}.get("NCCL_IB_DISABLE", "0") == "0",
            "virtual": is_virtual(Files(Path("/"))) is True,
            **{kind: list(paths) for kind in STORAGE if (paths := host.directories(kind))},
            **({"nvlink_domain": domain} if (domain := common_domain(plan, members)) else {}),
            "device": host.device,
            "devices": list(host.devices),
            "uuids": {str(index): uuid for index, uuid in uuids.items()},
            "collective_timeout_s": stage.collective_timeout_s,
            "cpus": stage.cpus,
            "benchmarks": {name: _settings(name, chosen, data) for name, chosen in stage.benchmarks.items()},
        },
    )
    placement = {"ranks": len(host.devices), "first_rank": first_rank, "world_size": sum(sizes)}
    rendezvous = _write_rendezvous(gang, node_rank, request, work, placement)
    if len(members) > 1:
        check_addresses(gang)
    environment = _environment(host, _gloo_interface(host, gang, request), request.interface, work)
    launcher = ["agent.benchmarks.without_torch", str(rendezvous), str(rank_request)]
    if uses_torch:
        launcher = [
            *("agent.benchmarks.rendezvous", str(rendezvous)),
            *(f"--nnodes={len(members)}", f"--nproc-per-node={len(host.devices)}", "--max-restarts=0"),
            # Ranks are forks of torchrun, so that each host imports torch only once: the import takes seconds.
            *("--run-path", "--start-method=fork", guard.__file__, "agent.benchmarks", "--request", str(rank_request)),
        ]
    return Command(
        arguments=[sys.executable, "-m", *launcher],
        environment={**environment, **request.environment},
        ranks={first_rank + local_rank: local_rank for local_rank in range(len(host.devices))},
    )


def common_domain(plan: Plan, members: Sequence[str]) -> str:
    """Return the NVLink domain to which all hosts of the launch belong according to the inventory.

    Empty if they do not all belong to the same one, and for a launch on one host.
    """
    domains = {plan.host(name).nvlink_domain for name in members}
    return domains.pop() if len(domains) == 1 and len(members) > 1 else ""


def _write_rendezvous(
    gang: Gang, node_rank: int, request: LaunchRequest, work: Path, placement: Mapping[str, int]
) -> Path:
    """Write the address and the secret name of the rendezvous to a file: `ps` would show command-line arguments to every user.

    Args:
        placement: number of ranks on this host and in the whole launch, and the number of this host's first rank.
    """
    address, port = LOOPBACK[1], 0
    if len(gang.members) > 1:
        first = own_address(gang) if node_rank == 0 else gang.addresses[gang.members[0]]
        port = request.port
        try:
            address = str(resolve(first, port)[1][0])
        except OSError as error:
            raise LaunchError(
                f"host {gang.members[0]}: its address {first} cannot be resolved here: {error.strerror or error}; "
                "set rackproof_fabric_address to a numeric address"
            ) from None
    document = {
        "address": address,
        "port": port,
        "admitted": sorted(gang.allowed_addresses) if node_rank == 0 and len(gang.members) > 1 else [],
        "name": gang.store_prefix,
        "rank": node_rank,
        "hosts": len(gang.members),
        **placement,
        "trains": any(BENCHMARKS[name].trains for name in request.stage.benchmarks),
    }
    path = work / "rendezvous.json"
    path.touch(mode=0o600)
    path.write_text(json.dumps(document), encoding="utf-8")
    return path


def _settings(benchmark: str, chosen: Mapping[str, Any], data: Path) -> dict[str, Any]:
    """Return the settings of a benchmark. A benchmark that reads training data searches `data` before its other directories."""
    values = settings(benchmark, chosen)
    if "data_directories" in values:
        values["data_directories"] = [str(data), *values["data_directories"]]
    return values


def _gloo_interface(host: PlannedHost, gang: Gang, request: LaunchRequest) -> str:
    """Return the interface for gloo; empty if gloo chooses one itself.

    If the ranks of several hosts run on CPUs, and neither the request nor GLOO_SOCKET_IFNAME names an interface, return the
    interface of this host's `own_address`. gloo itself would resolve the host name, which /etc/hosts often maps to 127.0.1.1.
    """
    if len(gang.members) == 1:
        return LOOPBACK[0]
    if request.interface or host.device != "cpu":
        return request.interface
    if chosen := os.environ.get("GLOO_SOCKET_IFNAME"):
        return chosen
    try:
        return interface_of(str(resolve(own_address(gang), 0)[1][0]))
    except OSError:  # the name of this host cannot be resolved here
        return ""


def _environment(host: PlannedHost, gloo_interface: str, interface: str, work: Path) -> dict[str, str]:
    # With the variables in THREAD_BINDING, OpenMP binds the thread that imports torch. torchrun imports torch before it forks the
    # ranks, so all ranks of the host would run on the same processor (https://github.com/pytorch/pytorch/issues/49971).
    inherited = {name: value for name, value in without_placement(os.environ).items() if name not in THREAD_BINDING}
    environment = {
        **inherited,
        "PYTHONUNBUFFERED": "1",
        # torch.compile executes the files in its caches, so they must not be in /tmp, where other users can write.
        "TORCHINDUCTOR_CACHE_DIR": str(work / "inductor"),
        "TRITON_CACHE_DIR": str(work / "triton"),
        # Number GPUs by PCI address, as NVML does, so that an index means the same GPU in CUDA and in NVML.
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
        "CUDA_VISIBLE_DEVICES": ",".join(map(str, host.devices)) if host.device == "gpu" else "",
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
    }
    if interface:
        # With `=`, NCCL matches the exact name instead of a prefix. gloo always matches the exact name.
        environment["NCCL_SOCKET_IFNAME"] = f"={interface}"
    if gloo_interface:
        environment["GLOO_SOCKET_IFNAME"] = gloo_interface
    return {**environment, **host.environment}
