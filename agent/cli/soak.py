"""The verb that goes round a plan's soak: soak."""

from __future__ import annotations

import argparse
import json
import os
import sys

from agent.cli.common import complain, progress, run_options
from agent.exporter.live import Span
from agent.launch import options as given
from agent.launch import stage as stages
from agent.placement.membership import find_host
from agent.placement.rank_placement import PlacementError
from agent.run import background, lease
from agent.soak.soak import FAILURE, NOT_WELL, carry_out, look
from agent.soak.soak_run import SoakRun, told
from schemas.errors import HeldError
from schemas.plans import Stage
from schemas.records import Record, to_json
from schemas.timeline import SOAK


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
        options.host = options.host or find_host(given.plan_of(options), os.environ)
        run = SoakRun(options.run_dir, options.host)
    except PlacementError as error:
        return complain(str(error))
    except KeyError:
        return complain("the plan of this run has no soak: choose a profile that has, such as soak")
    if run.state.ended_by == FAILURE:
        run.reopen()
    if run.state.ended:
        print(told(run.state) + ("" if run.state.reason else "; nothing is measured twice"))
        if run.state.reason and options.looks:
            lease.release(lease.state_of(options.run_dir), run.plan.run_id)
            return NOT_WELL
        return 0
    planned = run.plan.stage(SOAK)
    try:
        if options.detach or options.looks:
            return _begin_soak(options, run, planned)
        with background.alone(options.run_dir, SOAK):
            run = SoakRun(options.run_dir, options.host)  # as whoever was at it has left it
            if not run.state.ended:
                carry_out(
                    run,
                    lambda number, span: _round(options, run, planned, number, span),
                    stages.readers(run, full_snapshot=False),
                    progress,
                )
    except HeldError as held:
        return complain(str(held), lease.HELD)
    print(json.dumps(to_json(run.state)) if options.json else told(run.state))
    return 0


def _round(options: argparse.Namespace, run: SoakRun, planned: Stage, number: int, span: Span) -> Record:
    lease.renew(options.run_dir, run.plan, SOAK)
    return stages.measure(run, planned, [options.host], number, interface=options.interface, span=span)


def _begin_soak(options: argparse.Namespace, run: SoakRun, planned: Stage) -> int:
    """Begins the soak in the background, or goes on with it; with --looks, stays and looks for a while."""
    arguments = [sys.argv[0], SOAK, f"--run-dir={options.run_dir}", f"--host={options.host}"]
    arguments += [f"--interface={options.interface}"] if options.interface else []

    def begin() -> None:
        # A look outlives the playbook that asked for it, and must not begin anew what was stopped since.
        lease.renew(options.run_dir, run.plan, taken=bool(options.looks))
        print(background.start(arguments, options.run_dir, SOAK))

    if not options.looks:
        begin()
        return 0
    line, code = look(options.run_dir, options.host, planned.longest_s / options.looks, begin)
    print(line)
    state = lease.state_of(options.run_dir)
    if taken := lease.another(state, run.plan.run_id):
        print(f"this host was taken by {taken.who()}", file=sys.stderr)
    elif code == NOT_WELL:  # the host leaves the run, and others may have it
        lease.release(state, run.plan.run_id)
    return code
