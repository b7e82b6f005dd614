"""Read the placement that srun sets: the variables of a job step (SLURM_*), including its node list."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Mapping

from agent.placement.rank_placement import SLURM, PlacementError, RankPlacement, read_number

MAX_HOSTS = 65536
_BY_SRUN = "start this command with srun, which sets the variable"


def read_placement(environment: Mapping[str, str]) -> RankPlacement:
    """Return this process's placement from srun's variables.

    Raises:
        PlacementError: variables are missing, malformed, or contradict each other.
    """
    if "SLURM_PROCID" not in environment:
        is_in_job = "SLURM_JOB_ID" in environment
        raise PlacementError(
            "SLURM_PROCID is not set: "
            + ("inside the job, " if is_in_job else "")
            + "start this command with srun, as in `srun --ntasks-per-node=1 rackproof launch --launcher slurm …`"
        )
    if "SLURM_STEP_NUM_TASKS" not in environment:
        raise PlacementError(
            "SLURM_PROCID is set but SLURM_STEP_NUM_TASKS is not: this process is in the job script, which Slurm runs only once; "
            "in the script, start this command with srun, as in `srun --ntasks-per-node=1 rackproof launch --launcher slurm …`"
        )
    rank, size, local_rank, node, nodes = (
        read_number(environment, name, "srun")
        for name in (
            "SLURM_PROCID",
            "SLURM_STEP_NUM_TASKS",
            "SLURM_LOCALID",
            "SLURM_NODEID",
            "SLURM_STEP_NUM_NODES",
        )
    )
    hosts = expand_node_list(environment.get("SLURM_STEP_NODELIST", ""))
    if hosts and len(hosts) != nodes:
        raise PlacementError(
            f"SLURM_STEP_NODELIST has {len(hosts)} hosts but SLURM_STEP_NUM_NODES is {nodes}: if you set one of them, unset it"
        )
    if not node < nodes:
        raise PlacementError(
            f"SLURM_NODEID is {node}, but it must be less than SLURM_STEP_NUM_NODES, which is {nodes}: if you set one of them, "
            "unset it"
        )
    return RankPlacement(
        launcher=SLURM,
        rank=rank,
        size=size,
        local_rank=local_rank,
        local_size=_count_local_tasks(environment.get("SLURM_STEP_TASKS_PER_NODE", ""), node),
        nodes=nodes,
        hosts=hosts,
        host=environment.get("SLURMD_NODENAME", hosts[node] if hosts else ""),
    )


def _count_local_tasks(text: str, node: int) -> int:
    """Return the number of tasks on host number `node`, from the text of SLURM_STEP_TASKS_PER_NODE.

    `2(x3),1` means that hosts 0 to 2 have two tasks each, and host 3 has one.
    """
    counts: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part.strip())
        if not match:
            raise PlacementError(f"SLURM_STEP_TASKS_PER_NODE is {text!r}, not of the form `1(x2)`: {_BY_SRUN}")
        counts += [int(match[1])] * min(int(match[2] or 1), MAX_HOSTS)
    if node >= len(counts):
        raise PlacementError(
            f"SLURM_STEP_TASKS_PER_NODE is {text!r}, which has the tasks of {len(counts)} hosts, but SLURM_NODEID is {node}: "
            f"{_BY_SRUN}"
        )
    return counts[node]


def expand_node_list(text: str) -> tuple[str, ...]:
    """Expand `n[01-03,7],m` to n01, n02, n03, n7, m.

    Raises:
        PlacementError: the text is not a node list, or has more than MAX_HOSTS hosts.
    """
    # Split at commas outside brackets.
    parts = re.findall(r"(?:[^,\[\]]|\[[^\]]*\])+", text)
    if ",".join(parts) != text:
        raise PlacementError(
            f"the node list {text[:60]!r} in SLURM_STEP_NODELIST is not valid: a bracket is not closed or not opened, or a "
            f"name is missing between commas; {_BY_SRUN}"
        )
    names = list(itertools.islice((name for part in parts for name in _expand_part(part, text)), MAX_HOSTS + 1))
    if len(names) > MAX_HOSTS:
        raise PlacementError(
            f"the node list {text[:60]!r} in SLURM_STEP_NODELIST has more than {MAX_HOSTS} hosts: {_BY_SRUN}"
        )
    return tuple(names)


def _expand_part(part: str, node_list: str) -> Iterator[str]:
    match = re.fullmatch(r"([^\[\]]*)\[([\d,-]+)\](.*)", part)
    if not match:
        if "[" in part or "]" in part:
            raise PlacementError(
                f"the node list {node_list!r} in SLURM_STEP_NODELIST is not valid at {part!r}: {_BY_SRUN}"
            )
        yield part
        return
    for piece in match[2].split(","):
        range_match = re.fullmatch(r"(\d+)(?:-(\d+))?", piece)
        first, last = (range_match[1], range_match[2] or range_match[1]) if range_match else ("1", "0")
        if not 0 <= int(last) - int(first) < MAX_HOSTS:
            raise PlacementError(
                f"the node list {node_list!r} in SLURM_STEP_NODELIST is not valid at {piece!r}: {_BY_SRUN}"
            )
        for value in range(int(first), int(last) + 1):
            yield from _expand_part(f"{match[1]}{value:0{len(first)}}{match[3]}", node_list)
