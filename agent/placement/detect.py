"""Detect the launcher that started this process, and refuse one that `--launcher` does not name.

With `--launcher torchrun`, a single process that mpirun or srun started is accepted.
"""

from __future__ import annotations

from collections.abc import Mapping

from agent.placement import mpi, slurm
from agent.placement.rank_placement import MPI, SLURM, TORCHRUN, PlacementError, RankPlacement

TORCHRUN_VARIABLE = "TORCHELASTIC_RUN_ID"
SIZE_VARIABLES = {"OMPI_COMM_WORLD_SIZE": MPI, "PMI_SIZE": MPI, "SLURM_STEP_NUM_TASKS": SLURM}
PROGRAMS = {TORCHRUN: "torchrun", MPI: "mpirun", SLURM: "srun"}


def detect_placement(launcher: str, environment: Mapping[str, str]) -> RankPlacement | None:
    """Return this process's placement (its rank and the number of ranks) according to `--launcher`; None for torchrun.

    With torchrun there is no placement yet, because `rackproof launch` and `rackproof run` start torchrun themselves.

    Raises:
        PlacementError: variables are missing or contradict each other, or another launcher started this process.
    """
    if TORCHRUN_VARIABLE in environment:
        raise PlacementError(
            f"{TORCHRUN_VARIABLE} is set: torchrun started this process, and this command would start torchrun again for each "
            "process; start this command once on each host without torchrun, or run `torchrun -m agent.benchmarks`"
        )
    if launcher == MPI:
        return mpi.read_placement(environment)
    if launcher == SLURM:
        if name := mpi.variable_of_mpirun(environment):
            raise PlacementError(
                f"{name} is set: mpirun started this process, perhaps inside a Slurm job; "
                "give --launcher mpi, or start this command with srun alone"
            )
        return slurm.read_placement(environment)
    for name, other in SIZE_VARIABLES.items():
        size = environment.get(name, "")
        if size.isdecimal() and int(size) > 1:
            raise PlacementError(
                f"{name} is {size}: {PROGRAMS[other]} started {size} processes, and each would start all ranks of the host; "
                f"start this command without {PROGRAMS[other]}, or use `rackproof launch --launcher {other}`"
            )
    return None


def detect_rank(environment: Mapping[str, str]) -> RankPlacement | None:
    """Return the placement of a rank that mpirun or srun started directly; None if neither did, or if srun started a single task.

    Raises:
        PlacementError: variables are missing or contradict each other.
    """
    if mpi.variable_of_mpirun(environment):
        return mpi.read_placement(environment)
    if environment.get("SLURM_STEP_NUM_TASKS", "1") != "1":
        return slurm.read_placement(environment)
    return None
