"""srun: the variables of a job step (SLURM_*), and the names in a node list."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from agent.placement.rank_placement import SLURM, Seat, SeatError, number

MOST_HOSTS = 65536
STARTED_BY = "srun"


def seat(environment: Mapping[str, str]) -> Seat:
    """This process's place as srun tells it.

    Raises:
        SeatError: variables are missing or contradict each other.
    """
    if "SLURM_PROCID" not in environment:
        inside = "SLURM_JOB_ID" in environment
        raise SeatError(
            "SLURM_PROCID is not set: "
            + ("inside the job, " if inside else "")
            + "start it with srun, as `srun --ntasks-per-node=1 rackproof launch --launcher slurm …`"
        )
    if "SLURM_STEP_NUM_TASKS" not in environment:
        raise SeatError(
            "SLURM_PROCID is set and SLURM_STEP_NUM_TASKS is not: this is the job's script itself, which runs once; start "
            "it with srun, as `srun --ntasks-per-node=1 rackproof launch --launcher slurm …`"
        )
    rank, size, local_rank, node, nodes = (
        number(environment, name, STARTED_BY)
        for name in (
            "SLURM_PROCID",
            "SLURM_STEP_NUM_TASKS",
            "SLURM_LOCALID",
            "SLURM_NODEID",
            "SLURM_STEP_NUM_NODES",
        )
    )
    hosts = expand(environment.get("SLURM_STEP_NODELIST", ""))
    if hosts and len(hosts) != nodes:
        raise SeatError(
            f"SLURM_STEP_NODELIST names {len(hosts)} hosts, SLURM_STEP_NUM_NODES says {nodes}: unset what was set by hand"
        )
    if not node < nodes:
        raise SeatError(f"SLURM_NODEID is {node} of {nodes} hosts: unset what was set by hand")
    return Seat(
        launcher=SLURM,
        rank=rank,
        size=size,
        local_rank=local_rank,
        local_size=_tasks_here(environment.get("SLURM_STEP_TASKS_PER_NODE", ""), node),
        nodes=nodes,
        node=node,
        hosts=hosts,
        host=environment.get("SLURMD_NODENAME", hosts[node] if hosts else ""),
    )


def _tasks_here(text: str, node: int) -> int:
    """`2(x3),1` -> tasks on that host."""
    counts: list[int] = []
    for part in text.split(","):
        found = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part.strip())
        if not found:
            raise SeatError(f"SLURM_STEP_TASKS_PER_NODE is {text!r}: srun sets it, as `1(x2)`; start it with srun")
        counts += [int(found[1])] * min(int(found[2] or 1), MOST_HOSTS)
    if node >= len(counts):
        raise SeatError(f"SLURM_STEP_TASKS_PER_NODE {text} speaks of {len(counts)} hosts, and this is number {node}")
    return counts[node]


def expand(text: str) -> tuple[str, ...]:
    """`n[01-03,7],m` -> n01, n02, n03, n7, m.

    Raises:
        SeatError: it is no such list.
    """
    # Apart at commas outside brackets.
    parts = re.findall(r"(?:[^,\[\]]|\[[^\]]*\])+", text)
    if ",".join(parts) != text:
        raise SeatError(f"the node list {text[:60]!r} cannot be read: its brackets or commas do not fit")
    names = [name for part in parts for name in _names(part, text)]
    if len(names) > MOST_HOSTS:
        raise SeatError(f"the node list {text[:60]} names more than {MOST_HOSTS} hosts")
    return tuple(names)


def _names(part: str, whole: str) -> Iterator[str]:
    found = re.fullmatch(r"([^\[\]]*)\[([\d,-]+)\](.*)", part)
    if not found:
        if "[" in part or "]" in part:
            raise SeatError(f"the node list {whole!r} cannot be read at {part!r}")
        yield part
        return
    for piece in found[2].split(","):
        range_of = re.fullmatch(r"(\d+)(?:-(\d+))?", piece)
        first, last = (range_of[1], range_of[2] or range_of[1]) if range_of else ("1", "0")
        if not 0 <= int(last) - int(first) < MOST_HOSTS:
            raise SeatError(f"the node list {whole!r} cannot be read at {piece!r}")
        for value in range(int(first), int(last) + 1):
            yield from _names(f"{found[1]}{value:0{len(first)}}{found[3]}", whole)
