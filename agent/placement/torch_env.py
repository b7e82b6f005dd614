"""`python -m agent.benchmarks` as mpirun, srun or torchrun start it, one process a GPU: looked at before torch is imported.

torch reads RANK, WORLD_SIZE, MASTER_ADDR and so on; mpirun and srun tell the same under names of their own.
"""

from __future__ import annotations

import argparse
import os
import re
import socket
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from agent.placement.detect import PROGRAMS, TORCHRUN_MARK, placed
from agent.placement.rank_placement import SLURM, Seat, SeatError, number
from schemas.errors import RackproofError

USAGE, TROUBLE = 64, 2
PORT = 29500
NEEDED = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
BY_TORCH = ("RANK", "WORLD_SIZE")


class ImpossibleError(RackproofError):
    """It cannot be done on this host now; the message says why and what to do."""


def check(arguments: Sequence[str] = (), root: Path = Path("/")) -> None:
    """Sets the variables that torch reads, or ends the process with a message: 64 wrong usage, 2 not possible here.

    A rank that a supervisor started, which has a request, was placed by it.
    """
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--request")
    parser.add_argument("--results", type=Path)
    options, _ = parser.parse_known_args(arguments)
    if options.request:
        return
    try:
        os.environ |= variables(os.environ)
        enough_gpus(os.environ, root)
        if options.results:
            writable(options.results)
        if os.environ.get("RANK") == "0" and TORCHRUN_MARK not in os.environ:
            free(int(os.environ["MASTER_PORT"]))
    except SeatError as error:
        _end(str(error), USAGE)
    except ImpossibleError as error:
        _end(str(error), TROUBLE)


def _end(message: str, code: int) -> None:
    sys.stderr.write(f"agent.benchmarks: {message}\n")
    sys.exit(code)


def variables(environment: Mapping[str, str]) -> dict[str, str]:
    """What torch is to be told of this process's place; nothing where it is alone, or was told.

    Raises:
        SeatError: variables are missing, contradict each other, or come from two launchers.
    """
    if TORCHRUN_MARK in environment:
        return {}  # whatever started torchrun
    seat = placed(environment)
    if any(name in environment for name in BY_TORCH):
        return _by_torchs_names(environment, seat)
    return _of(seat, environment) if seat else {}


def _by_torchs_names(environment: Mapping[str, str], seat: Seat | None) -> dict[str, str]:
    missing = [name for name in NEEDED if not environment.get(name)]
    if missing:
        there = ", ".join(name for name in NEEDED if name in environment)
        raise SeatError(
            f"{there} is set and {', '.join(missing)} is not: start it with torchrun, or set all of {', '.join(NEEDED)}"
        )
    rank, size = (number(environment, name, "torchrun") for name in BY_TORCH)
    number(environment, "MASTER_PORT", "torchrun")
    if rank >= size:
        raise SeatError(f"RANK is {rank} and WORLD_SIZE is {size}: ranks go from 0 to WORLD_SIZE - 1")
    if seat is None:
        return {}
    if (rank, size) != (seat.rank, seat.size):
        raise SeatError(
            f"RANK is {rank} of {size}, and {PROGRAMS[seat.launcher]} says {seat.rank} of {seat.size}: two launchers placed this "
            "process; unset RANK and WORLD_SIZE, or start it without the other"
        )
    return {key: value for key, value in _of(seat, environment).items() if key not in environment}


def _of(seat: Seat, environment: Mapping[str, str]) -> dict[str, str]:
    """A place in torch's words."""
    if seat.rank % seat.local_size != seat.local_rank:
        remedy = "srun --distribution=block" if seat.launcher == SLURM else "mpirun --map-by slot, or ppr:N:node"
        raise SeatError(
            f"rank {seat.rank} is number {seat.local_rank} on its host: a host's ranks must follow each other; {remedy}"
        )
    address = environment.get("MASTER_ADDR") or ("127.0.0.1" if seat.nodes == 1 else next(iter(seat.hosts), ""))
    if not address:
        raise SeatError(
            f"MASTER_ADDR is not set, and mpirun started {seat.nodes} hosts without telling which has rank 0: "
            "mpirun -x MASTER_ADDR=ADDRESS …"
        )
    port = environment.get("MASTER_PORT") or str(PORT)
    if not port.isdecimal() or not 0 < int(port) < 65536:
        raise SeatError(f"MASTER_PORT is {port!r}: give a port, 1 to 65535")
    return {
        "RANK": str(seat.rank),
        "WORLD_SIZE": str(seat.size),
        "LOCAL_RANK": str(seat.local_rank),
        "LOCAL_WORLD_SIZE": str(seat.local_size),
        "GROUP_RANK": str(seat.rank // seat.local_size),
        "MASTER_ADDR": address,
        "MASTER_PORT": port,
    }


def enough_gpus(environment: Mapping[str, str], root: Path = Path("/")) -> None:
    """Raises SeatError where this host has GPUs, and fewer than ranks: two ranks on one GPU measure neither."""
    ranks, there = environment.get("LOCAL_WORLD_SIZE", "1"), visible(environment, root)
    if ranks.isdecimal() and 0 < there < int(ranks):
        chosen = environment.get("CUDA_VISIBLE_DEVICES")
        by = f"CUDA_VISIBLE_DEVICES={chosen} shows" if chosen else "it has"
        raise SeatError(f"{ranks} ranks on this host, and {by} {there} GPUs: start as many ranks a host as it has GPUs")


def visible(environment: Mapping[str, str], root: Path = Path("/")) -> int:
    """How many GPUs a process here can use: device nodes, which is what a container is given, or what the driver lists."""
    nodes = len([path for path in root.glob("dev/nvidia*") if re.fullmatch(r"nvidia\d+", path.name)])
    there = nodes or len(list(root.glob("proc/driver/nvidia/gpus/*")))
    chosen = environment.get("CUDA_VISIBLE_DEVICES")
    named = [word for word in (chosen or "").split(",") if word.strip() not in ("", "-1", "NoDevFiles")]
    return there if chosen is None else min(there, len(named))


def writable(directory: Path) -> None:
    """Raises ImpossibleError where no file can be made there; the directory is made where it is missing."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=directory):
            pass
    except OSError as error:
        raise ImpossibleError(
            f"{directory}: {error.strerror or error}: give another directory, or the right to write there"
        ) from None


def free(port: int) -> None:
    """Raises ImpossibleError where the first rank could not listen, as torch does: on every address."""
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as channel:
            channel.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            channel.bind(("", port))
            channel.listen(1)
    except OSError as error:
        raise ImpossibleError(
            f"port {port}, where the ranks are to meet: {error.strerror or error}; set MASTER_PORT to another for all ranks"
        ) from None
