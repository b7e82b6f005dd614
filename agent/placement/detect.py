"""Who launched this process: one launcher, and the one that was asked for."""

from __future__ import annotations

from collections.abc import Mapping

from agent.placement import mpi, slurm
from agent.placement.rank_placement import MPI, SLURM, TORCHRUN, Seat, SeatError

TORCHRUN_MARK = "TORCHELASTIC_RUN_ID"
COUNTS = {"OMPI_COMM_WORLD_SIZE": MPI, "PMI_SIZE": MPI, "SLURM_STEP_NUM_TASKS": SLURM}
PROGRAMS = {TORCHRUN: "torchrun", MPI: "mpirun", SLURM: "srun"}


def seat_of(launcher: str, environment: Mapping[str, str]) -> Seat | None:
    """This process's place by the launcher that `rackproof launch` was told of; None by torchrun, which it starts itself.

    Raises:
        SeatError: variables are missing or contradict each other, or another launcher started this process.
    """
    if TORCHRUN_MARK in environment:
        raise SeatError(
            f"{TORCHRUN_MARK} is set: torchrun started this process, and rackproof launch would start torchrun again for "
            "each; start it once a host, or run `torchrun -m agent.benchmarks`"
        )
    if launcher == MPI:
        return mpi.seat(environment)
    if launcher == SLURM:
        if "OMPI_COMM_WORLD_SIZE" in environment:
            raise SeatError(
                "SLURM_PROCID and OMPI_COMM_WORLD_SIZE are both set: mpirun started this process, and two launchers cannot both "
                "place it; give --launcher mpi, or leave mpirun out"
            )
        return slurm.seat(environment)
    for name, other in COUNTS.items():
        count = environment.get(name, "")
        if count.isdecimal() and int(count) > 1:
            raise SeatError(
                f"{name} is {count}: {PROGRAMS[other]} started {count} processes of this, and each would launch the whole host; "
                f"give --launcher {other}"
            )
    return None


def placed(environment: Mapping[str, str]) -> Seat | None:
    """The place of a rank that was started by mpirun or srun themselves; None where neither started more than one.

    Raises:
        SeatError: variables are missing or contradict each other.
    """
    if any(mark in environment for mark in mpi.OPEN_MPI) or (
        any(mark in environment for mark in mpi.HYDRA) and "SLURM_STEP_NUM_TASKS" not in environment
    ):
        return mpi.seat(environment)
    if environment.get("SLURM_STEP_NUM_TASKS", "1") != "1":
        return slurm.seat(environment)
    return None
