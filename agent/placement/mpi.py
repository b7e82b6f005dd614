"""Read the placement that mpirun sets: Open MPI sets OMPI_*, MPICH and Intel MPI set PMI_* and MPI_LOCAL*."""

from __future__ import annotations

from collections.abc import Mapping

from agent.placement.rank_placement import MPI, PlacementError, RankPlacement, read_number

OPEN_MPI = tuple(f"OMPI_COMM_WORLD_{name}" for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE"))
HYDRA = ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS")


def variable_of_mpirun(environment: Mapping[str, str]) -> str:
    """Return the name of a variable which shows that mpirun started this process; empty if there is none.

    srun sets PMI_RANK and PMI_SIZE too. In a job step, they show nothing.
    """
    hydra = HYDRA[2:] if "SLURM_STEP_NUM_TASKS" in environment else HYDRA
    return next((name for name in (*OPEN_MPI, *hydra) if name in environment), "")


def read_placement(environment: Mapping[str, str]) -> RankPlacement:
    """Return this process's placement from mpirun's variables.

    Raises:
        PlacementError: variables are missing, malformed, or contradict each other.
    """
    names = OPEN_MPI if any(name in environment for name in OPEN_MPI) else HYDRA
    if not any(name in environment for name in names):
        raise PlacementError(
            "neither OMPI_COMM_WORLD_RANK nor PMI_RANK is set: start this command with mpirun, as in "
            "`mpirun --map-by ppr:1:node rackproof launch --launcher mpi …`"
        )
    rank, size, local_rank, local_size = (read_number(environment, name, "mpirun") for name in names)
    _check_one_launcher(environment, names, rank, size)
    nodes = environment.get("OMPI_MCA_orte_num_nodes", "")
    estimate = -(-size // local_size) if local_size else 0
    return RankPlacement(
        launcher=MPI,
        rank=rank,
        size=size,
        local_rank=local_rank,
        local_size=local_size,
        nodes=int(nodes) if nodes.isdecimal() and int(nodes) <= size else estimate,
        host=environment.get("PMIX_HOSTNAME", "") if names is OPEN_MPI else "",
    )


def _check_one_launcher(environment: Mapping[str, str], names: tuple[str, ...], rank: int, size: int) -> None:
    """Raise PlacementError if the variables of Open MPI and PMI contradict each other, unless srun started mpirun."""
    for pmi_name, name, value in ((HYDRA[0], names[0], rank), (HYDRA[1], names[1], size)):
        text = environment.get(pmi_name, "")
        if names is OPEN_MPI and text.isdecimal() and int(text) != value and "SLURM_PROCID" not in environment:
            raise PlacementError(
                f"{name} is {value} and {pmi_name} is {text}: two launchers started this process; use one of them"
            )
