"""This host's part of a gang, where nobody says it: its name in the plan, and who starts together with it."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping, Sequence

from agent.placement.detect import PROGRAMS
from agent.placement.rank_placement import Seat, SeatError
from schemas.plans import Plan, PlannedHost

NAMED = ("SLURMD_NODENAME", "PMIX_HOSTNAME")
"""Variables in which a launcher spells this host's name."""


def host_of(plan: Plan, environment: Mapping[str, str], seat: Seat | None = None) -> str:
    """This host's name in the plan, by the names that it goes by.

    Raises:
        SeatError: the plan has none of them.
    """
    own = [*([seat.host] if seat else []), *(environment.get(name, "") for name in NAMED), socket.gethostname()]
    candidates = list(dict.fromkeys(name for name in own if name))
    for name in candidates:
        if found := named(plan, name):
            return found
    known = ", ".join(host.name for host in plan.hosts[:8]) + (" …" if len(plan.hosts) > 8 else "")
    raise SeatError(
        f"this host is {', '.join(candidates)}, which the plan of run {plan.run_id} does not have ({known}): "
        "give its name in the plan as --host, or name the hosts in the inventory as they name themselves"
    )


def named(plan: Plan, name: str) -> str:
    """The host of that name, whether with its domain or without; empty where the plan has none, or several."""
    for spelled in (name, name.split(".")[0]):
        for host in plan.hosts:
            if spelled in (host.name, host.address):
                return host.name
    short = [host.name for host in plan.hosts if host.name.split(".")[0] == name.split(".")[0]]
    return short[0] if len(short) == 1 else ""


def members_of(plan: Plan, host: PlannedHost, asked: str, seat: Seat | None) -> list[str]:
    """Who starts together, in the plan's order, and as the launcher has it.

    Args:
        asked: the operator's list, comma between them; empty: the gang of `host`.

    Raises:
        SeatError: the plan has no gang for this host, or the launcher started others than these.
    """
    members = asked.split(",") if asked else list(plan.gangs().get(host.gang, ()))
    if not members:
        raise SeatError(
            f"host {host.name} is in no gang of the plan of run {plan.run_id}: plan it with rackproof_gang rack or all, "
            "or run its own stage with `rackproof bench`"
        )
    unknown = [name for name in members if name not in {other.name for other in plan.hosts}]
    if unknown:
        raise SeatError(f"{unknown[0]!r} is not in the plan of run {plan.run_id}")
    if seat:
        _fits(plan, host, members, seat)
    return members


def _fits(plan: Plan, host: PlannedHost, members: Sequence[str], seat: Seat) -> None:
    """Raises SeatError where other hosts, or another number of processes, were started than the plan has."""
    program = PROGRAMS[seat.launcher]
    started = [named(plan, name) or name for name in seat.hosts]
    if started and set(started) != set(members):
        raise SeatError(
            f"{program} started {', '.join(started)}, the gang is {', '.join(members)}: plan those hosts, or give --members"
        )
    devices, of_all = len(host.devices), sum(len(plan.host(name).devices) for name in members)
    one_a_host = seat.local_size == 1 and seat.size == len(members)
    if not one_a_host and (seat.local_size, seat.size) != (devices, of_all):
        raise SeatError(
            f"{program} started {seat.size} processes, {seat.local_size} on this host; the plan has {len(members)} hosts with "
            f"{of_all} {host.device} devices, {devices} on this host: start one process a host, or one a device"
        )


def enough(host: PlannedHost, environment: Mapping[str, str]) -> None:
    """Raises SeatError where the scheduler gave this job fewer GPUs than the plan has ranks."""
    chosen = environment.get("CUDA_VISIBLE_DEVICES")
    if host.device != "gpu" or chosen is None:
        return
    given = len([word for word in chosen.split(",") if word.strip() not in ("", "-1", "NoDevFiles")])
    wanted = len(host.devices)
    if given < wanted:
        raise SeatError(
            f"{wanted} ranks on host {host.name}, and CUDA_VISIBLE_DEVICES={chosen} gives {given} GPUs: ask the scheduler for "
            f"{wanted} a host (srun --gpus-per-node={wanted}, without --gpus-per-task), or plan fewer"
        )


def all_processors() -> str:
    """Lets the ranks use every processor that the host, or its container, gives: mpirun binds each process to a core or two.

    Returns a line for people where that was so.
    """
    before = len(os.sched_getaffinity(0))
    try:
        os.sched_setaffinity(0, range(os.sysconf("SC_NPROCESSORS_CONF")))
    except OSError:
        return ""
    after = len(os.sched_getaffinity(0))
    return (
        f"the launcher had bound this process to {before} processors; its ranks use all {after}"
        if after > before
        else ""
    )
