"""mpirun: Open MPI (OMPI_*), and the launchers of MPICH and Intel MPI (PMI_*, MPI_LOCAL*)."""

from __future__ import annotations

from collections.abc import Mapping

from agent.placement.rank_placement import MPI, Seat, SeatError, number

OPEN_MPI = tuple(f"OMPI_COMM_WORLD_{name}" for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE"))
HYDRA = ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS")


def seat(environment: Mapping[str, str]) -> Seat:
    """This process's place as mpirun tells it.

    Raises:
        SeatError: variables are missing or contradict each other.
    """
    names = OPEN_MPI if any(name in environment for name in OPEN_MPI) else HYDRA
    if not any(name in environment for name in names):
        raise SeatError(
            "neither OMPI_COMM_WORLD_RANK nor PMI_RANK is set: start it with mpirun, as "
            "`mpirun --map-by ppr:1:node rackproof launch --launcher mpi …`"
        )
    rank, size, local_rank, local_size = (number(environment, name, "mpirun") for name in names)
    _agree(environment, names, rank, size)
    told = environment.get("OMPI_MCA_orte_num_nodes", "")
    counted = -(-size // local_size) if local_size else 0
    return Seat(
        launcher=MPI,
        rank=rank,
        size=size,
        local_rank=local_rank,
        local_size=local_size,
        nodes=int(told) if told.isdecimal() and int(told) <= size else counted,
        host=environment.get("PMIX_HOSTNAME", ""),
    )


def _agree(environment: Mapping[str, str], names: tuple[str, ...], rank: int, size: int) -> None:
    """Open MPI and a PMI of something else, as where mpirun was started by srun's, may each tell a rank of their own."""
    for other, mine, value in ((HYDRA[0], names[0], rank), (HYDRA[1], names[1], size)):
        text = environment.get(other, "")
        if names is OPEN_MPI and text.isdecimal() and int(text) != value and "SLURM_PROCID" not in environment:
            raise SeatError(
                f"{mine} is {value} and {other} is {text}: two launchers started this process; use one of them"
            )
