"""torchrun: the default launcher. Static rendezvous, so that ranks follow the order of the hosts and one port is enough.

The store listens on the first host's address in the plan alone; with one host, where nobody else can reach it.
"""

from __future__ import annotations

import importlib.util
import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from agent.gang.protocol import Gang
from agent.gang.transport import own_address, resolve
from agent.launch import guard
from agent.launch.supervise import Command
from agent.placement.rank_placement import without_placement
from agent.run.work_directory import write_request
from schemas.catalogue import BENCHMARKS, settings
from schemas.errors import RackproofError
from schemas.plans import Plan, PlannedHost, Stage
from schemas.stages import CELL, GANG

LOOPBACK = "lo", "127.0.0.1"
"""Where the ranks of one host meet."""


class LaunchError(RackproofError):
    """The ranks cannot be started on this host; the message says why and what to do."""


def torchrun(
    plan: Plan,
    host: PlannedHost,
    stage: Stage,
    *,
    gang: Gang,
    work: Path,
    data: Path,
    port: int,
    interface: str,
    uuids: Mapping[int, str],
    exported: Mapping[str, str] | None = None,
) -> Command:
    """The torchrun of this host's part of a stage.

    Args:
        gang: who starts together, in rank order; `host` is one of them. One member: this host alone.
        work: where request, results and logs go.
        data: where the operator's training data was staged, if any was.
        port: the rendezvous on the first member.
        interface: network interface for NCCL and gloo; empty: they choose.
        uuids: NVML index -> UUID, where known: a rank that is given another GPU measures nothing.
        exported: variables that the operator gives the ranks, before all others.

    Raises:
        LaunchError: torch is not there, `host` is not a member, or the first member's name cannot be resolved.
        GangError: only members are to be admitted, and one's name cannot be resolved.
    """
    members = gang.members
    if importlib.util.find_spec("torch") is None:
        raise LaunchError(
            f"torch is not installed for {sys.executable}: where the host brings one, set rackproof_system_torch and the "
            "Python that has it, rackproof_python; or put torch into the wheelhouse"
        )
    if host.name not in members:
        raise LaunchError(f"host {host.name} is not among the members {', '.join(members)}")
    if stage.cpus * len(host.devices) > (there := len(os.sched_getaffinity(0))):
        raise LaunchError(
            f"host {host.name} gives {there} CPUs, and {len(host.devices)} ranks with {stage.cpus} each need "
            f"{stage.cpus * len(host.devices)}: ask for fewer a rank"
        )
    node_rank = members.index(host.name)
    first_rank = sum(len(plan.host(name).devices) for name in members[:node_rank])
    request = write_request(
        work,
        {
            "stage": stage.name,
            "world_scope": f"gang={host.gang}" if stage.name in (GANG, CELL) else "host",
            "members": list(members),
            "gang": list(plan.gangs().get(host.gang, ())) if stage.name == GANG else [],
            "device": host.device,
            "devices": list(host.devices),
            "uuids": {str(index): uuid for index, uuid in uuids.items()},
            "collective_timeout_s": stage.collective_timeout_s,
            "cpus": stage.cpus,
            "benchmarks": {name: _settings(name, chosen, data) for name, chosen in stage.benchmarks.items()},
        },
    )
    return Command(
        arguments=[
            *(
                sys.executable,
                "-m",
                "agent.benchmarks.rendezvous",
                str(_meeting(gang, node_rank, port, work, stage)),
            ),
            *(f"--nnodes={len(members)}", f"--nproc-per-node={len(host.devices)}", "--max-restarts=0"),
            # Forks of torchrun itself: torch, which takes seconds to import, is there once a host and not once a rank more.
            *("--run-path", "--start-method=fork", guard.__file__, "agent.benchmarks", "--request", str(request)),
        ],
        environment={**_environment(host, interface, work, alone=len(members) == 1), **(exported or {})},
        ranks={first_rank + local: local for local in range(len(host.devices))},
    )


def _meeting(gang: Gang, node_rank: int, port: int, work: Path, stage: Stage) -> Path:
    """Where and under which name the ranks meet, and whether they train, as a file: `ps` shows arguments to everybody."""
    place: dict[str, object] = {"address": LOOPBACK[1], "port": 0, "admitted": []}
    if len(gang.members) > 1:
        first = own_address(gang) if node_rank == 0 else gang.addresses[gang.members[0]]
        try:
            place = {"address": str(resolve(first, port)[1][0]), "port": port, "admitted": []}
        except OSError as error:
            raise LaunchError(
                f"host {gang.members[0]} has no address here: {first}: {error.strerror or error}; "
                "give a number as rackproof_fabric_address"
            ) from None
        if node_rank == 0:
            place["admitted"] = sorted(gang.allowed_addresses)
    path = work / "rendezvous.json"
    path.touch(mode=0o600)
    path.write_text(
        json.dumps(
            {
                **place,
                "name": gang.store_prefix,
                "rank": node_rank,
                "hosts": len(gang.members),
                "trains": any(BENCHMARKS[name].trains for name in stage.benchmarks),
            }
        ),
        encoding="utf-8",
    )
    return path


def _settings(benchmark: str, chosen: Mapping[str, Any], data: Path) -> dict[str, Any]:
    """The plan's settings; what trains looks for staged data first."""
    values = settings(benchmark, chosen)
    if "data_directories" in values:
        values["data_directories"] = [str(data), *values["data_directories"]]
    return values


def _environment(host: PlannedHost, interface: str, work: Path, *, alone: bool) -> dict[str, str]:
    environment = {
        **without_placement(os.environ),
        "PYTHONUNBUFFERED": "1",
        # What torch.compile builds is run: it must not lie where others can write, as /tmp is.
        "TORCHINDUCTOR_CACHE_DIR": str(work / "inductor"),
        "TRITON_CACHE_DIR": str(work / "triton"),
        # NVML numbers GPUs by PCI address; CUDA must do the same for an index to mean one part.
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
        "CUDA_VISIBLE_DEVICES": ",".join(map(str, host.devices)) if host.device == "gpu" else "",
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
    }
    if interface:
        # `=` asks NCCL for exactly this name; gloo takes names as they are.
        environment |= {"NCCL_SOCKET_IFNAME": f"={interface}", "GLOO_SOCKET_IFNAME": interface}
    if alone:
        environment["GLOO_SOCKET_IFNAME"] = LOOPBACK[0]
    return {**environment, **host.environment}
