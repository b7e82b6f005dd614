"""The placement of this process among the processes that a launcher started, from the launcher's variables.

mpirun and srun set the rank, the number of processes, the local rank and the number of processes on the host. Missing or
contradictory variables are reported before any process is started and before torch is imported.
"""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from schemas.errors import UsageError

TORCHRUN, MPI, SLURM = "torchrun", "mpi", "slurm"
LAUNCHERS = (TORCHRUN, MPI, SLURM)
PROCESS_VARIABLES = (
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
"""Prefixes of variables that apply only to this process and not to the ranks that it starts.

PET_ variables are options of torchrun; Kubeflow's operator sets them."""


class PlacementError(UsageError):
    """The launcher's variables or an option do not permit a launch; the message names the wrong ones and says what to do."""


@dataclass(frozen=True, kw_only=True)
class RankPlacement:
    """The position of one process among all processes of a launch, on all hosts."""

    launcher: str
    rank: int
    size: int
    """Number of processes on all hosts."""
    local_rank: int
    local_size: int
    """Number of processes on this host."""
    nodes: int
    """Number of hosts."""
    hosts: tuple[str, ...] = ()
    """Names of the hosts in the launcher's order; empty if the launcher does not report them."""
    host: str = ""
    """This host's name as the launcher spells it; empty if the launcher does not report it."""

    def __post_init__(self) -> None:
        for name, index, size in (("rank", self.rank, self.size), ("local rank", self.local_rank, self.local_size)):
            if not 0 <= index < size:
                raise PlacementError(
                    f"{self.launcher}: {name} {index} of {size} is not possible: the number must be less than {size}; "
                    "the launcher's variables contradict each other: unset those that were set by hand"
                )
        if not self.local_size <= self.size or not 1 <= self.nodes <= self.size:
            raise PlacementError(
                f"{self.launcher}: {self.local_size} processes on this host, {self.nodes} hosts and {self.size} processes in "
                "total are not possible: the total must be at least as high as each of the others; the launcher's variables "
                "contradict each other: unset those that were set by hand"
            )

    @property
    def supervises(self) -> bool:
        """Whether this process is the first on its host and supervises the ranks. The other processes do nothing."""
        return self.local_rank == 0


def read_number(environment: Mapping[str, str], name: str, launcher: str) -> int:
    """Return the value of a variable that must be a whole number.

    Raises:
        PlacementError: the variable is missing or not a whole number.
    """
    text = environment.get(name, "")
    if not text:
        raise PlacementError(f"{name} is not set: start this command with {launcher}, or omit --launcher")
    if not text.isdecimal():
        raise PlacementError(f"{name} is {text!r}, not a whole number: {launcher} sets it; do not set it by hand")
    return int(text)


def without_placement(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the environment without the variables in PROCESS_VARIABLES, for child processes, which have other placements."""
    return {key: value for key, value in environment.items() if not key.startswith(PROCESS_VARIABLES)}


DENIED = (
    "this session may not use /dev/nvidia*, because a device cgroup of Slurm or systemd, or the mode of the files, denies it; "
    "start this command outside of the job or service, or allow the devices"
)


def count_device_nodes(root: Path) -> int:
    """Return the number of device nodes of NVIDIA GPUs that this process may use.

    In a container, only the nodes of its own GPUs exist. Elsewhere, the nodes of all GPUs exist, but a device cgroup may deny
    their use (`denied_device_nodes`).
    """
    return len(device_nodes(root)) - len(denied_device_nodes(root))


def denied_device_nodes(root: Path) -> list[Path]:
    """Return the device nodes of NVIDIA GPUs that this process may not use.

    A device cgroup of Slurm or systemd, or the mode of the node, denies it. access(2) checks both. Opening the nodes would
    initialize the GPUs.
    """
    return [path for path in device_nodes(root) if not os.access(path, os.R_OK | os.W_OK)]


def device_nodes(root: Path) -> list[Path]:
    """Return the device nodes of NVIDIA GPUs, whether or not this process may use them."""
    return sorted(path for path in root.glob("dev/nvidia*") if re.fullmatch(r"nvidia\d+", path.name))


def visible_devices(environment: Mapping[str, str]) -> list[str] | None:
    """Return the GPUs in CUDA_VISIBLE_DEVICES; None if it is not set.

    CUDA ignores the first invalid entry, such as -1, and all that follow it (CUDA C++ Programming Guide, CUDA Environment
    Variables).
    """
    text = environment.get("CUDA_VISIBLE_DEVICES")
    if text is None:
        return None
    devices = (device.strip() for device in text.split(","))
    return list(itertools.takewhile(lambda device: device.isdecimal() or device.startswith(("GPU-", "MIG-")), devices))
