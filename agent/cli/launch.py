"""The verb `launch`: run this host's part of a gang (the hosts of one multi-node launch)."""

from __future__ import annotations

import argparse
import os

from agent.cli.common import fail, print_progress, run_options
from agent.cli.stages import run_stage, start_run
from agent.launch import options as launch_options
from agent.placement.detect import detect_placement
from agent.placement.membership import select_members
from agent.placement.rank_placement import LAUNCHERS, TORCHRUN, PlacementError
from agent.run import lease
from schemas.errors import HeldError
from schemas.stages import GANG, PROBE

MAX_PORT = 65533


def add_verb(verbs: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add launch to the command."""
    parser = verbs.add_parser(
        "launch",
        parents=[run_options(), launch_options.standalone_options()],
        help="run this host's part of a gang (the hosts of one multi-node launch)",
        epilog="examples: rackproof launch --run-dir /var/lib/rackproof/runs/r1 --host r12-h01 --members r12-h01,r12-h02; "
        "mpirun --map-by ppr:1:node rackproof launch --launcher mpi --plan plan.json --run-dir /var/tmp/rackproof/runs/r1. "
        "Exit codes: 0 the launch ended, whatever its result, or there was nothing to do (with --detach: the launch was "
        "started); 2 the plan or the run directory cannot be used; 3 with --detach --wait: the launch did not finish; 64 wrong "
        "usage, such as missing or contradictory launcher variables; 75 another run holds this host, or "
        "the run was stopped on it.",
    )
    parser.add_argument(
        "--launcher",
        choices=LAUNCHERS,
        default=TORCHRUN,
        help="how this command was started. torchrun (default): separately on each host, without mpirun or srun; mpi: by "
        "mpirun on all hosts; slurm: by srun on all hosts. The variables that mpirun or srun sets must agree with the plan",
    )
    parser.add_argument(
        "--members",
        default="",
        help="comma-separated hosts that start together (default: this host's gang in the plan)",
    )
    parser.add_argument(
        "--port",
        type=int,
        default=29500,
        help="rendezvous port N on the first member (default: 29500). The members send their statuses to port N+1 of the first "
        "member and port N+2 of the second",
    )
    parser.add_argument(
        "--number",
        type=int,
        default=0,
        help="number of this launch of the gang, or in a scaling study the number of the cell (one measurement of the study). If "
        "these hosts have already had a launch with this number, the command does nothing, even if that launch failed. 0 "
        "(default): the command does nothing if a launch of these hosts has finished",
    )
    parser.add_argument(
        "--probe", action="store_true", help="run only a short launch that tests whether these hosts work together"
    )
    parser.add_argument(
        "--admit",
        choices=["anyone", "members"],
        default="anyone",
        help="which hosts can connect to the rendezvous port and the two ports after it (default: anyone)",
    )
    parser.set_defaults(call=_launch)


def _launch(options: argparse.Namespace) -> int:
    if not 0 < options.port <= MAX_PORT:
        return fail(f"--port {options.port}: give 1 to {MAX_PORT}; the two ports after it are used as well")
    try:
        placement = detect_placement(options.launcher, os.environ)
        if placement and options.detach:
            return fail(
                f"--detach with --launcher {placement.launcher}: omit --detach, because the launcher would end the background "
                "process"
            )
        if placement and placement.nodes > 1 and options.host:
            return fail(
                f"--host {options.host}: the launcher started this command on {placement.nodes} hosts; omit --host"
            )
        if placement and not placement.supervises:
            print_progress(f"rank {placement.rank}: nothing to do; local rank 0 supervises the ranks of this host")
            return 0
        run = start_run(options, placement)
        members = select_members(run.plan, run.host, options.members, placement)
    except PlacementError as error:
        return fail(str(error))
    except HeldError as held:
        return fail(str(held), lease.HELD)
    return run_stage(options, run, PROBE if options.probe else GANG, members)
