"""The verb that goes round a plan's soak: soak."""

from __future__ import annotations

import argparse
import json
import logging
import os
import sys
from functools import partial

from agent.cli.common import complain, run_options
from agent.exporter.live import Span
from agent.launch import options as launch_options
from agent.launch import stage as stages
from agent.launch.request import LaunchRequest
from agent.placement.membership import find_host
from agent.placement.rank_placement import PlacementError
from agent.run import background, lease
from agent.soak.soak import ENDED_EARLY, FAILURE, run_soak, wait_for_soak
from agent.soak.soak_run import SoakRun, format_progress
from schemas.errors import HeldError
from schemas.records import Record, to_json
from schemas.timeline import SOAK

log = logging.getLogger(__name__)


def add_verb(verbs: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds soak to the command."""
    soak = verbs.add_parser(
        "soak",
        parents=[run_options()],
        help="go round the plan's soak until its time is over; a soak that was cut off goes on",
        epilog="example: rackproof soak --run-dir /var/lib/rackproof/runs/r1 --host r12-h01 --looks 48. "
        "Exit codes of a look: 0 it is over, 3 it ended before its time, 4 it goes on, 75 another run has this host.",
    )
    soak.add_argument(
        "--looks",
        type=int,
        default=0,
        metavar="N",
        help="begin or go on in the background, and tell how far it is after an Nth of the planned time, or at its end",
    )
    soak.set_defaults(call=_soak)


def _soak(options: argparse.Namespace) -> int:
    try:
        host = options.host or find_host(launch_options.read_plan(options).plan, os.environ)
        run = SoakRun(options.run_dir, host)
    except PlacementError as error:
        return complain(str(error))
    except KeyError:
        return complain("the plan of this run has no soak: choose a profile that has one, such as soak")
    if run.state.ended_by == FAILURE:
        run.reopen()
    if run.state.ended:
        print(format_progress(run.state) + ("" if run.state.reason else "; nothing is measured twice"))
        if run.state.reason and options.looks:
            lease.release(lease.state_directory(options.run_dir), run.plan.run_id)
            return ENDED_EARLY
        return 0
    try:
        if options.detach or options.looks:
            return _start_in_background(options, run)
        with background.exclusive_task(options.run_dir, SOAK):
            run = SoakRun(options.run_dir, host)  # as the process that ran it before has left it
            if not run.state.ended:
                run_soak(
                    run,
                    partial(_run_round, run, options.interface),
                    stages.host_collectors(run, full_snapshot=False),
                    partial(log.info, "%s"),
                )
    except HeldError as held:
        return complain(str(held), lease.HELD)
    print(json.dumps(to_json(run.state)) if options.json else format_progress(run.state))
    return 0


def _run_round(run: SoakRun, interface: str, number: int, span: Span) -> Record:
    lease.renew(run.directory, run.plan, SOAK)
    request = LaunchRequest(
        stage=run.plan.stage(SOAK), members=(run.host.name,), number=number, interface=interface, span=span
    )
    return stages.run_launch(run, request)


def _start_in_background(options: argparse.Namespace, run: SoakRun) -> int:
    """Start the soak in the background, or continue it; with --looks, wait for a share of the planned time."""
    arguments = [sys.argv[0], SOAK, f"--run-dir={options.run_dir}", f"--host={run.host.name}"]
    arguments += [f"--interface={options.interface}"] if options.interface else []

    def start() -> None:
        # This process may outlive the playbook that started it, and must not restart a soak that was stopped since.
        lease.renew(options.run_dir, run.plan, taken=bool(options.looks))
        print(background.start(arguments, options.run_dir, SOAK))

    if not options.looks:
        start()
        return 0
    longest_s = run.plan.stage(SOAK).longest_s
    line, code = wait_for_soak(options.run_dir, run.host.name, longest_s / options.looks, start)
    print(line)
    state = lease.state_directory(options.run_dir)
    if other := lease.held_by_other(state, run.plan.run_id):
        log.warning("this host was taken by %s", other.describe())
    elif code == ENDED_EARLY:  # the host leaves the run, and others may have it
        lease.release(state, run.plan.run_id)
    return code
