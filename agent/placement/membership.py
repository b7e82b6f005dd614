"""Find this host's name in the plan and the members of its gang (the hosts of one multi-node launch), without a control node."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping, Sequence

from agent.placement import mpi
from agent.placement.detect import PROGRAMS
from agent.placement.rank_placement import PlacementError, RankPlacement
from schemas import documents
from schemas.plans import Plan, PlannedHost


def find_host(plan: Plan, environment: Mapping[str, str], placement: RankPlacement | None = None) -> str:
    """Return this host's name in the plan, from the names that launchers and the host itself use.

    Raises:
        PlacementError: none of these names is in the plan, or they are names of different planned hosts.
    """
    names = {
        f"{variable}={environment[variable]}": environment[variable]
        for variable in _host_variables(environment)
        if variable in environment
    }
    if placement:
        names[f"{placement.host} from {PROGRAMS[placement.launcher]}"] = placement.host
    names[f"this machine's host name {socket.gethostname()}"] = socket.gethostname()
    found = {host: source for source, name in names.items() if name and (host := match_host(plan, name))}
    if len(found) > 1:
        sources = " and ".join(f"{source} (host {host} of the plan)" for host, source in found.items())
        raise PlacementError(
            f"these are names of different hosts: {sources}: unset the wrong variable, or give --host with this host's name in "
            "the plan"
        )
    if found:
        return next(iter(found))
    candidates = ", ".join(dict.fromkeys(name for name in names.values() if name))
    known = ", ".join(host.name for host in plan.hosts[:8]) + (" …" if len(plan.hosts) > 8 else "")
    raise PlacementError(
        f"this host ({candidates}) is not in the plan of run {plan.run_id}, which has {known}: "
        "give --host with its name in the plan, or use the hosts' own host names in the inventory"
    )


def _host_variables(environment: Mapping[str, str]) -> tuple[str, ...]:
    """Return the variables in which the launcher that started this process sets the name of this host.

    mpirun passes its own variables to the processes on all hosts, so SLURMD_NODENAME names the host of mpirun. So does
    PMIX_HOSTNAME with MPICH and Intel MPI. Only Open MPI sets PMIX_HOSTNAME on each host.
    """
    variable = mpi.variable_of_mpirun(environment)
    if not variable:
        return "SLURMD_NODENAME", "PMIX_HOSTNAME"
    return ("PMIX_HOSTNAME",) if variable in mpi.OPEN_MPI else ()


def match_host(plan: Plan, name: str) -> str:
    """Return the name of the planned host with this name or address, with or without domain; empty if none or several match."""
    short = name.split(".")[0]
    for spelling in (name, short):
        named = [host.name for host in plan.hosts if spelling == host.name]
        matches = named or [host.name for host in plan.hosts if spelling == host.address]
        if matches:
            break
    else:
        matches = [host.name for host in plan.hosts if host.name.split(".")[0] == short]
    return matches[0] if len(matches) == 1 else ""


def select_members(plan: Plan, host: PlannedHost, requested: str, placement: RankPlacement | None) -> list[str]:
    """Return the hosts that start together, in rank order: as in `requested`, or as in the plan.

    Args:
        requested: the operator's comma-separated list; empty: the gang of `host`.

    Raises:
        PlacementError: the plan has no gang for this host; a requested host is not in the plan or is named twice; this host
            is not requested; or the launcher started processes on other hosts than planned, or another number of processes.
    """
    members = requested.split(",") if requested else list(plan.gangs().get(host.gang, ()))
    if not members:
        raise PlacementError(
            f"host {host.name} is in no gang of the plan of run {plan.run_id}: make a plan with "
            "rackproof_gang set to 'rack' or 'all', or measure this host alone with `rackproof bench`"
        )
    _check_requested(plan, host, members)
    if placement:
        _check_started_processes(plan, host, members, placement)
    return members


def _check_requested(plan: Plan, host: PlannedHost, members: Sequence[str]) -> None:
    names = [other.name for other in plan.hosts]
    for number, name in enumerate(members):
        if name not in names:
            similar = documents.nearest(name, names)
            raise PlacementError(
                f"--members: {name!r} is not in the plan of run {plan.run_id}{similar}: give names from the plan, comma-separated"
            )
        if name in members[:number]:
            raise PlacementError(f"--members: {name} is named twice: name each host once")
    if host.name not in members:
        raise PlacementError(
            f"--members {','.join(members)}: this host, {host.name}, is missing: add it, "
            "or start this command only on the listed hosts"
        )


def _check_started_processes(plan: Plan, host: PlannedHost, members: Sequence[str], placement: RankPlacement) -> None:
    """Raise PlacementError if the launcher started processes on other hosts than planned, or another number of processes."""
    program = PROGRAMS[placement.launcher]
    started = [match_host(plan, name) or name for name in placement.hosts]
    if started and set(started) != set(members):
        raise PlacementError(
            f"{program} started processes on {', '.join(started)}, but the gang is {', '.join(members)}: make a plan with the "
            f"hosts on which {program} starts processes, or list these hosts with --members"
        )
    local_devices, all_devices = len(host.devices), sum(len(plan.host(name).devices) for name in members)
    one_per_host = placement.local_size == 1 and placement.size == len(members)
    if not one_per_host and (placement.local_size, placement.size) != (local_devices, all_devices):
        raise PlacementError(
            f"{program} started {placement.size} processes, {placement.local_size} on this host; the plan has {len(members)} "
            f"hosts with {all_devices} {host.device} devices, {local_devices} on this host: start one process for each host, or "
            "one for each device"
        )


def use_all_processors() -> str:
    """Let this process and its ranks use every processor that its cpuset allows. Return a message if this added any; else "".

    This is needed because mpirun binds each process to one or two cores, and because CPUAffinity= in the configuration of systemd
    and the kernel option isolcpus exclude processors from the affinity of every process.
    """
    before = os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, {*before, *range(os.sysconf("SC_NPROCESSORS_CONF"))})
    except OSError:
        return ""
    after = os.sched_getaffinity(0)
    if len(after) <= len(before):
        return ""
    return (
        f"this process was bound to {len(before)} processors; now it and its ranks use all {len(after)} of its cpuset"
    )
