"""The verb `soak`: repeat the plan's soak rounds until the planned time has passed."""

from __future__ import annotations

import argparse
import json
import os
import sys
from functools import partial

from agent.cli.common import fail, print_progress, print_started, run_options
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
from schemas.plans import Stage
from schemas.records import Record, to_json
from schemas.stages import SOAK


def add_verb(verbs: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add soak to the command."""
    parser = verbs.add_parser(
        "soak",
        parents=[run_options()],
        help="repeat the plan's soak rounds until the planned time has passed; an interrupted soak continues",
        epilog="example: rackproof soak --run-dir /var/lib/rackproof/runs/r1 --host r12-h01 --looks 48. "
        "Exit codes with --looks: 0 finished, 3 ended early, 4 still running, 75 another run holds this host.",
    )
    parser.add_argument(
        "--looks",
        type=int,
        default=0,
        metavar="N",
        help="start or continue the soak in the background, wait until it ends but at most 1/N of its maximum duration, and "
        "print its progress. With --json, print an object with the keys progress and started",
    )
    parser.set_defaults(call=_soak)


def _soak(options: argparse.Namespace) -> int:
    if options.looks < 0:
        return fail(f"--looks {options.looks}: give 1 or more, or omit the option to soak without reports of progress")
    if options.wait and not options.looks:
        return fail("--wait does not apply to a soak. Give --looks 1, which waits until the soak has ended")
    try:
        host = options.host or find_host(launch_options.read_plan(options).plan, os.environ)
        run = SoakRun(options.run_dir, host)
    except PlacementError as error:
        return fail(str(error))
    except KeyError:
        return fail("the plan of this run has no soak: choose a profile that has one, such as `soak`")
    if run.state.ended_by == FAILURE:
        run.reopen()
    if run.state.ended:
        _print_state(run, options, "" if run.state.reason else "; it is not measured again")
        if run.state.reason and options.looks:
            lease.release(lease.state_directory(options.run_dir), run.plan.run_id, run.plan.nonce)
            return ENDED_EARLY
        return 0
    stage = run.plan.stage(SOAK)
    try:
        if options.detach or options.looks:
            return _run_in_background(options, run, stage)
        with background.exclusive_task(options.run_dir, SOAK):
            run = SoakRun(options.run_dir, host)  # read again: another process may have continued the soak
            if not run.state.ended:
                run_soak(
                    run,
                    partial(_run_round, run, options.interface),
                    stages.host_collectors(run, full_snapshot=False),
                    print_progress,
                )
    except HeldError as held:
        return fail(str(held), lease.HELD)
    _print_state(run, options)
    return 0


def _print_state(run: SoakRun, options: argparse.Namespace, note: str = "") -> None:
    progress = format_progress(run.state) + note
    if options.looks:
        _print_poll(options, progress, has_started=False)
    else:
        print(json.dumps(to_json(run.state)) if options.json else progress)


def _print_poll(options: argparse.Namespace, progress: str, *, has_started: bool) -> None:
    print(json.dumps({"progress": progress, "started": has_started}) if options.json else progress)


def _run_round(run: SoakRun, interface: str, number: int, span: Span) -> Record:
    lease.renew(run.directory, run.plan, SOAK)
    request = LaunchRequest(
        stage=run.plan.stage(SOAK), members=(run.host.name,), number=number, interface=interface, span=span
    )
    return stages.run_launch(run, request)


def _run_in_background(options: argparse.Namespace, run: SoakRun, stage: Stage) -> int:
    """Start or continue the soak in the background. With --looks, then wait and print its progress. Return the exit code."""
    arguments = [sys.argv[0], SOAK, f"--run-dir={options.run_dir}", f"--host={run.host.name}"]
    arguments += [f"--interface={options.interface}"] if options.interface else []

    def start() -> None:
        # With --looks, this process may outlive the playbook that started it. If `rackproof stop` has ended the soak and released
        # the host in the meantime, the soak must not start again.
        lease.renew(options.run_dir, run.plan, only_if_held=bool(options.looks))
        started = background.start(arguments, options.run_dir, SOAK)
        starts.append(started.is_new)
        if not (options.looks and options.json):
            print_started(started, as_json=options.json)

    starts: list[bool] = []
    if not options.looks:
        start()
        return 0
    line, code = wait_for_soak(options.run_dir, run.host.name, stage.longest_s / options.looks, start)
    _print_poll(options, line, has_started=any(starts))
    state = lease.state_directory(options.run_dir)
    if other := lease.held_by_other(state, run.plan.run_id, run.plan.nonce):
        print(f"this host was taken by {other.describe()}", file=sys.stderr)
    elif code == ENDED_EARLY:  # the run is over on this host, so other runs may use the host
        lease.release(state, run.plan.run_id, run.plan.nonce)
    return code
