"""Start a run on this host and run one of its stages, for the verbs that measure."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence

from agent.cli.common import fail, print_started
from agent.cli.wait import NOT_FINISHED, wait_for_stage
from agent.launch import options as launch_options
from agent.launch import stage as stages
from agent.launch.request import LaunchRequest
from agent.placement.membership import find_host
from agent.placement.rank_placement import RankPlacement
from agent.run import background, lease
from agent.run.readiness import check_gpu_allocation
from agent.run.record import HostRun
from schemas.errors import HeldError
from schemas.probes import probe
from schemas.records import Record
from schemas.stages import BENCHMARK, CELL, GANG, GANG_STAGES, PREFLIGHT, PROBE


def start_run(options: argparse.Namespace, placement: RankPlacement | None = None) -> HostRun:
    """Return the run of --run-dir. With --plan, first begin the run and take its first snapshot.

    Raises:
        PlacementError: the host is not in the plan, this process may use fewer GPUs than planned, `--plan -` is given with
            --detach, or an --env is malformed.
        HeldError: another run holds this host.
    """
    given = launch_options.read_plan(options)
    host = options.host or find_host(given.plan, os.environ, placement)
    launch_options.check_options(options)
    if given.text or placement:
        check_gpu_allocation(given.plan, host, os.environ)
    if given.text:
        run = stages.start_run(options.run_dir, host, given.text)
        stages.record_snapshot(run, PREFLIGHT, once=True)
        return run
    return HostRun(options.run_dir, host)


def run_stage(options: argparse.Namespace, run: HostRun, stage: str, members: Sequence[str]) -> int:
    """Run a stage in this process, or with --detach in the background; return the exit code (75: another run holds the host).

    In this process: first wait until no other process of this run on this host runs the same verb (`bench` or `launch`). Then run
    the stage, and if its exit code is 0, copy the records to --results (if given).

    In the background: return as soon as the stage is started. With --wait, return when it has ended: NOT_FINISHED if it did not
    finish.
    """
    task = BENCHMARK if stage == BENCHMARK else GANG
    try:
        if options.detach:
            lease.renew(run.directory, run.plan)
            return _run_stage(options, run, stage, members, task)
        with background.exclusive_task(run.directory, task):
            lease.renew(run.directory, run.plan, stage)
            code = _run_stage(options, run, stage, members, task)
    except HeldError as held:
        return fail(str(held), lease.HELD)
    if code == 0:
        launch_options.publish_results(options, run)
    return code


def _run_stage(options: argparse.Namespace, run: HostRun, stage: str, members: Sequence[str], task: str) -> int:
    number = getattr(options, "number", 0)
    whole_run = run  # in a scaling study, `run` is replaced by the run of a single cell
    try:
        if run.plan.study:
            run, stage = run.for_cell(number), CELL
        planned = probe(run.plan.stage(GANG)) if stage == PROBE else run.plan.stage(stage)
    except KeyError as error:
        known = [item.name for item in run.plan.stages] + (
            [f"cell 1 to {len(run.plan.study.cells)}"] if run.plan.study else []
        )
        return fail(f"{error.args[0]!r} is not in the plan of run {run.plan.run_id}; it has: {', '.join(known)}")
    gang = run.host.gang if stage in GANG_STAGES else ""
    record = run.record(gang)
    if earlier := stages.find_earlier_launch(record.launches, stage, members, number):
        note = f"stage {stage}: launched at {earlier.began}, outcome {earlier.outcome}; it is not measured again"
        print(note, file=sys.stderr if options.json else sys.stdout)
        if options.json:
            print_record(record, as_json=True)
        return NOT_FINISHED if options.detach and options.wait and earlier.outcome != "finished" else 0
    if options.detach:
        arguments = [argument for argument in sys.argv if argument not in ("--detach", "--wait")]
        started = background.start(arguments, run.directory, task)
        if not options.wait:
            print_started(started, as_json=options.json)
            return 0
        log = sys.stderr if options.json else sys.stdout
        print(started, file=log)
        code = wait_for_stage(whole_run, task, log)
        if not started.is_new and gang and not _is_recorded(run, stage, members, number, since=len(record.launches)):
            # The process that already ran had another launch of the gang, with other members or another number. If
            # `rackproof stop` ended it, no further launch may start.
            lease.renew(whole_run.directory, whole_run.plan, only_if_held=True)
            print(background.start(arguments, run.directory, task), file=log)
            code = wait_for_stage(whole_run, task, log)
        if options.json:
            print_record(whole_run.record(gang), as_json=True)
        return code
    request = LaunchRequest(
        stage=planned,
        members=tuple(members),
        number=number,
        port=getattr(options, "port", 0),
        members_only=getattr(options, "admit", "") == "members",
        interface=options.interface,
        environment=launch_options.rank_environment(options),
    )
    print_record(stages.run_launch(run, request), as_json=options.json)
    return 0


def _is_recorded(run: HostRun, stage: str, members: Sequence[str], number: int, *, since: int) -> bool:
    """Return whether the record has this launch, however it ended, after its first `since` launches."""
    launches = run.record(run.host.gang).launches[since:]
    return (stage, tuple(members), number) in {(launch.stage, launch.members, launch.number) for launch in launches}


def print_record(record: Record, *, as_json: bool) -> None:
    """Print the record's number of observations, and the outcome of each of its launches."""
    launches = [
        {"stage": launch.stage, "outcome": launch.outcome, "reason": launch.reason} for launch in record.launches
    ]
    if as_json:
        print(json.dumps({"host": record.host, "observations": len(record.all_observations()), "launches": launches}))
        return
    print(f"{record.host}: {len(record.all_observations())} observations recorded")
    for launch in launches:
        print(f"stage {launch['stage']}: {launch['outcome']}" + (f": {launch['reason']}" if launch["reason"] else ""))
