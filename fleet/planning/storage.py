"""Read from the inventory which directories are measured, and the bandwidths that their file systems must reach (floors)."""

from __future__ import annotations

from collections.abc import Mapping

from fleet.inventory.ansible import Variables
from schemas.errors import UsageError

GIB = 1 << 30
PRESETS: Mapping[str, Mapping[str, float]] = {
    "together": {"local_read": 2, "local_write": 1, "shared_read": 10, "shared_write": 5}
}
"""Name in rackproof_storage_floors -> floors in GiB/s. `together`: Together AI's requirements on clusters (docs/storage.md)."""


def storage_floors(variables: Variables) -> dict[str, float]:
    """Return the required bandwidths in B/s; empty if the inventory has none."""
    floors = variables.get("rackproof_storage_floors", {})
    return {key: float(value * GIB) for key, value in (PRESETS[floors] if isinstance(floors, str) else floors).items()}


def local_directories(name: str, variables: Variables) -> tuple[str, ...]:
    """Return the directories to measure on disks of the host. Raise UsageError if one is below `/dev`."""
    return _directories(name, variables, "rackproof_local_storage")


def shared_directories(name: str, variables: Variables, *, has_gang: bool) -> tuple[str, ...]:
    """Return the directories to measure on file systems that the host shares with other hosts.

    Args:
        name: the host.
        variables: its variables.
        has_gang: whether the profile has the stage `gang`, in which several hosts are measured together.

    Raises:
        UsageError: a directory is below `/dev`, or cannot be measured because the host is in no gang.
    """
    directories = _directories(name, variables, "rackproof_shared_storage")
    if directories and has_gang and variables.get("rackproof_gang") == "none":
        raise UsageError(
            f"host {name}: only the hosts of a gang measure rackproof_shared_storage, and rackproof_gang is 'none': set "
            "rackproof_gang to 'all', or name the directory in rackproof_local_storage"
        )
    return directories


def _directories(name: str, variables: Variables, variable: str) -> tuple[str, ...]:
    """Return the directories in a variable of the inventory. Raise UsageError if one is below `/dev`."""
    for directory in (directories := variables.get(variable, ())):
        if f"{directory}/".startswith("/dev/"):
            raise UsageError(
                f"host {name}: {variable} has the device {directory}: test files would overwrite its data; "
                "name a directory of a mounted file system"
            )
    return tuple(directories)
