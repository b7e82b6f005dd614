"""Which of the processes that a launcher started this one is, as the launcher's variables tell it.

mpirun and srun tell each process its rank, how many there are, and the same of its host. What is missing, does not fit together
or comes from two launchers at once is named before anything is started, and before torch is imported.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from schemas.errors import UsageError

TORCHRUN, MPI, SLURM = "torchrun", "mpi", "slurm"
LAUNCHERS = (TORCHRUN, MPI, SLURM)
OURS = (
    "PET_",
    "OMPI_",
    "PMI_",
    "PMIX_",
    "MPI_LOCALRANKID",
    "MPI_LOCALNRANKS",
    "SLURM_PROCID",
    "SLURM_LOCALID",
    "SLURM_STEP_",
)
"""Beginnings of the variables that speak of this process alone: the ranks that it starts are others.

PET_: options of torchrun, as Kubeflow's operator sets them."""


class SeatError(UsageError):
    """The launcher's variables do not say which process this is; the message names them and the remedy."""


@dataclass(frozen=True, kw_only=True)
class Seat:
    """One process among those that were launched together."""

    launcher: str
    rank: int
    size: int
    local_rank: int
    local_size: int
    """Processes on this host."""
    nodes: int
    node: int | None = None
    """Which of the hosts this is, where the launcher tells."""
    hosts: tuple[str, ...] = ()
    """Names of the hosts in the launcher's order, where it tells them."""
    host: str = ""
    """This host's name as the launcher spells it, where it does."""

    def __post_init__(self) -> None:
        for what, index, size in (("rank", self.rank, self.size), ("local rank", self.local_rank, self.local_size)):
            if not 0 <= index < size:
                raise SeatError(
                    f"{self.launcher}: {what} {index} of {size} cannot be: the launcher's variables contradict each other, "
                    "as where one was set by hand; unset it"
                )
        if not self.local_size <= self.size or not 1 <= self.nodes <= self.size:
            raise SeatError(
                f"{self.launcher}: {self.local_size} processes on this host, {self.nodes} hosts and {self.size} processes in all "
                "cannot be: the launcher's variables contradict each other, as where one was set by hand; unset it"
            )

    @property
    def leads(self) -> bool:
        """Whether it is the first process on its host, which supervises; the others leave the work to it."""
        return self.local_rank == 0


def number(environment: Mapping[str, str], name: str, launched_by: str) -> int:
    """A variable that is a whole number.

    Raises:
        SeatError: it is missing, or is none.
    """
    text = environment.get(name, "")
    if not text:
        raise SeatError(f"{name} is not set: start it with {launched_by}, or leave --launcher out")
    if not text.isdecimal():
        raise SeatError(f"{name} is {text!r}, which is no whole number: {launched_by} sets it; do not set it by hand")
    return int(text)


def cleared(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables without those that tell a process its place: what it starts has another one."""
    return {key: value for key, value in environment.items() if not key.startswith(OURS)}
