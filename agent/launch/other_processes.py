"""Look for processes that use the GPUs of a launch and are not part of it, such as a job that starts while the ranks measure."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence

from agent.launch.process_tree import ProcessTree
from agent.sampling.launch_thread import LaunchThread

PERIOD_S = 2.0
Lister = Callable[[Sequence[int]], Mapping[int, Mapping[int, str]]]
"""Takes GPU indices; returns GPU index -> process id -> name of the process, which may be empty."""


def list_with_nvml(devices: Sequence[int]) -> Mapping[int, Mapping[int, str]]:
    """Return the compute processes that NVML lists for each of these GPUs."""
    from collectors.nvml import compute_processes

    return compute_processes(devices)


class OtherProcessWatch(LaunchThread):
    """Lists the compute processes on the GPUs every PERIOD_S seconds, and keeps those that the supervisor did not start.

    A container may have process ids of its own, while the driver reports those of the host. A process of the launch would then
    look like another one. So nothing is reported unless NVML has listed a process of the launch by its own id.
    """

    def __init__(self, devices: Sequence[int], list_processes: Lister = list_with_nvml) -> None:
        super().__init__("other processes")
        self._devices, self._list_processes = devices, list_processes
        self._tree = ProcessTree(os.getpid())
        self._has_own = False
        self._others: dict[int, str] = {}

    def run(self) -> None:
        while self._devices and not self._ended.wait(PERIOD_S):
            self.look()

    def look(self) -> None:
        """List the processes once."""
        listed = self._list_processes(self._devices)
        self._tree.scan()  # after NVML, so that a rank that has just started is in the tree
        own = set(self._tree.pids())
        self._has_own = self._has_own or any(own.intersection(processes) for processes in listed.values())
        for index, processes in listed.items():
            for pid, name in processes.items():
                # A process that has ended since the list was made may have been a rank that was in no earlier scan.
                if pid not in own and _runs(pid):
                    self._others.setdefault(index, f"process {pid}{f' ({name})' if name else ''}")

    def others(self) -> dict[str, str]:
        """Return the scope of each GPU that another process used -> the first such process, such as `process 4711 (python3)`."""
        return {f"gpu={index}": text for index, text in sorted(self._others.items())} if self._has_own else {}


def _runs(pid: int) -> bool:
    """Return whether the process runs. /proc may not list the processes of other users (mount option hidepid)."""
    if pid <= 0:
        return False
    try:
        os.kill(pid, 0)
    except PermissionError:
        return True
    except (OSError, OverflowError):
        return False
    return True
