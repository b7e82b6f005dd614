"""Prepare the environment variables that torch needs, for `python -m agent.benchmarks` without Rackproof's supervisor.

If mpirun or srun started the process, set the variables that are missing. Check the variables that are already set.

torch reads RANK, WORLD_SIZE, MASTER_ADDR and others. mpirun and srun set the same values under other names. Importing torch
takes seconds. This module does not import it, so that wrong variables are reported at once.
"""

from __future__ import annotations

import argparse
import os
import socket
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from agent.placement.detect import PROGRAMS, TORCHRUN_VARIABLE, detect_rank
from agent.placement.rank_placement import (
    SLURM,
    PlacementError,
    RankPlacement,
    device_nodes,
    read_number,
    visible_devices,
)
from schemas.errors import RackproofError, UsageError

DEFAULT_PORT = 29500
REQUIRED = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


class NotPossibleError(RackproofError):
    """The command is not possible on this host at present; the message says why and what to do."""


def prepare_environment(arguments: Sequence[str]) -> None:
    """Set the variables that torch reads, or exit with a message. Exit codes: 64 wrong usage, 2 not possible on this host.

    With `--request`, do nothing: the supervisor that started this rank has set the variables.
    """
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--request")
    parser.add_argument("--results", type=Path)
    options, _ = parser.parse_known_args(arguments)
    if options.request:
        return
    try:
        os.environ |= torch_variables(os.environ)
        check_gpu_count(os.environ)
        if options.results:
            check_writable(options.results)
        if os.environ.get("RANK") == "0" and TORCHRUN_VARIABLE not in os.environ:
            check_port_is_free(int(os.environ["MASTER_PORT"]))
    except (UsageError, NotPossibleError) as error:
        sys.stderr.write(f"agent.benchmarks: {error}\n")
        sys.exit(error.exit_code)


def torch_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that torch needs and the launcher did not set.

    Empty if none is missing, if no launcher started this process, or if srun started only this process.

    Raises:
        PlacementError: variables are missing, contradict each other, or come from two launchers.
    """
    if TORCHRUN_VARIABLE in environment:
        return {}  # torchrun has set them, even if mpirun or srun started torchrun
    placement = detect_rank(environment)
    if any(name in environment for name in ("RANK", "WORLD_SIZE")):
        return _missing_variables(environment, placement)
    return _from_placement(placement, environment) if placement else {}


def _missing_variables(environment: Mapping[str, str], placement: RankPlacement | None) -> dict[str, str]:
    """Return the variables of the placement that the environment lacks, such as LOCAL_RANK.

    First check that all variables in REQUIRED are set, and that RANK and WORLD_SIZE are those of the placement.
    """
    missing = [name for name in REQUIRED if not environment.get(name)]
    if missing:
        given = ", ".join(name for name in REQUIRED if environment.get(name))
        problem = (
            f"the environment has {given}, but not {', '.join(missing)}" if given else "RANK or WORLD_SIZE is empty"
        )
        raise PlacementError(f"{problem}: start this command with torchrun, or set all of {', '.join(REQUIRED)}")
    rank, size = (read_number(environment, name, "torchrun") for name in ("RANK", "WORLD_SIZE"))
    _check_port(environment["MASTER_PORT"])
    if rank >= size:
        raise PlacementError(f"RANK is {rank} and WORLD_SIZE is {size}: ranks go from 0 to WORLD_SIZE - 1")
    if placement is None:
        return {}
    if (rank, size) != (placement.rank, placement.size):
        raise PlacementError(
            f"RANK and WORLD_SIZE are {rank} and {size}, but {PROGRAMS[placement.launcher]} set {placement.rank} and "
            f"{placement.size}: two launchers started this process; unset RANK and WORLD_SIZE, or use only one launcher"
        )
    return {key: value for key, value in _from_placement(placement, environment).items() if not environment.get(key)}


def _from_placement(placement: RankPlacement, environment: Mapping[str, str]) -> dict[str, str]:
    """Return torch's variables for a placement."""
    if placement.rank % placement.local_size != placement.local_rank:
        remedy = (
            "use srun --distribution=block"
            if placement.launcher == SLURM
            else "use mpirun --map-by slot, or ppr:N:node"
        )
        raise PlacementError(
            f"rank {placement.rank} has local rank {placement.local_rank} of {placement.local_size}, not "
            f"{placement.rank % placement.local_size}: every host must have equally many ranks, with consecutive numbers; "
            f"{remedy}"
        )
    default_address = "127.0.0.1" if placement.nodes == 1 else next(iter(placement.hosts), "")
    address = environment.get("MASTER_ADDR") or default_address
    if not address:
        raise PlacementError(
            f"MASTER_ADDR is not set, and mpirun does not report which of the {placement.nodes} hosts has rank 0: "
            "give the address of that host with mpirun -x MASTER_ADDR=ADDRESS …"
        )
    port = environment.get("MASTER_PORT") or str(DEFAULT_PORT)
    _check_port(port)
    return {
        "RANK": str(placement.rank),
        "WORLD_SIZE": str(placement.size),
        "LOCAL_RANK": str(placement.local_rank),
        "LOCAL_WORLD_SIZE": str(placement.local_size),
        "GROUP_RANK": str(placement.rank // placement.local_size),
        "MASTER_ADDR": address,
        "MASTER_PORT": port,
    }


def _check_port(port: str) -> None:
    if not port.isdecimal() or not 0 < int(port) < 65536:
        raise PlacementError(f"MASTER_PORT is {port!r}: give a port, 1 to 65535")


def check_gpu_count(environment: Mapping[str, str], root: Path = Path("/")) -> None:
    """Raise PlacementError if this host has GPUs, but fewer GPUs than ranks: ranks that share a GPU measure too low rates."""
    ranks, gpus = environment.get("LOCAL_WORLD_SIZE", "1"), count_visible_gpus(environment, root)
    if ranks.isdecimal() and 0 < gpus < int(ranks):
        variable = environment.get("CUDA_VISIBLE_DEVICES")
        source = f"with CUDA_VISIBLE_DEVICES={variable} " if variable else ""
        count = f"{gpus} GPU{'' if gpus == 1 else 's'}"
        raise PlacementError(f"{ranks} ranks on this host, but {source}it has {count}: start one rank for each GPU")


def count_visible_gpus(environment: Mapping[str, str], root: Path = Path("/")) -> int:
    """Return how many GPUs a process on this host can use.

    Count the device nodes, because a container has only those of its own GPUs. Without device nodes, count the GPUs that
    the driver lists.
    """
    gpus = len(device_nodes(root)) or len(list(root.glob("proc/driver/nvidia/gpus/*")))
    visible = visible_devices(environment)
    return gpus if visible is None else min(gpus, len(visible))


def check_writable(directory: Path) -> None:
    """Create the directory if it is missing; raise NotPossibleError if no file can be created in it."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=directory):
            pass
    except OSError as error:
        raise NotPossibleError(
            f"{directory}: {error.strerror or error}: give another directory, or permission to write there"
        ) from None


def check_port_is_free(port: int) -> None:
    """Raise NotPossibleError if the port is in use on any IPv4 address of this host. On rank 0, torch listens on all of them."""
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as channel:
            channel.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            channel.bind(("", port))
            channel.listen(1)
    except OSError as error:
        raise NotPossibleError(
            f"rendezvous port {port}: {error.strerror or error}; set MASTER_PORT to another port for all ranks"
        ) from None
