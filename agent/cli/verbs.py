"""The verbs that run on a GPU host: arguments to calls."""

from __future__ import annotations

import argparse
import importlib
import json
import logging
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import collectors
from agent.cli.common import complain, run_options
from agent.launch import options as launch_options
from agent.launch import stage as stages
from agent.launch.request import LaunchRequest
from agent.placement.detect import detect_placement
from agent.placement.membership import check_gpu_allocation, find_host, select_members, use_all_processors
from agent.placement.rank_placement import LAUNCHERS, MPI, TORCHRUN, PlacementError, RankPlacement
from agent.run import background, lease
from agent.run.record import HostRun, run_directory
from agent.sampling.snapshot import collect
from agent.soak.soak_run import format_progress
from collectors.base import Absent, scope
from schemas.errors import HeldError
from schemas.probes import GANG, PROBE, probe
from schemas.records import Record
from schemas.studies import CELL
from schemas.timeline import SOAK

log = logging.getLogger(__name__)

NOT_FINISHED = 3
AFTER_DEADLINE_S = 90.0
"""What a supervisor may take, past the deadline of its ranks, to end them and to write the record."""
ELSEWHERE = {
    "doctor": "agent.cli.doctor",
    "soak": "agent.cli.soak",
    "export": "agent.cli.export",
    "stop": "agent.cli.stop",
    "attend": "agent.cli.run_host",
    "tell": "agent.cli.emit_record",
    "busy": "agent.cli.busy",
}
"""Verbs with a module of their own, which is imported where one of them is asked for: a run starts the others a dozen times on
each host, and they need not wait for the judge, which doctor and soak import."""


def add_verbs(verbs: argparse._SubParsersAction[argparse.ArgumentParser], asked: str = "") -> None:
    """Adds the verbs of a GPU host to the command, or what is needed for one of them."""
    _inspect_options(verbs)
    bench = verbs.add_parser(
        "bench",
        parents=[run_options(), launch_options.standalone_options()],
        help="run the plan's benchmarks on this host alone",
        epilog="example: rackproof bench --run-dir /var/lib/rackproof/runs/r1 --host r12-h01",
    )
    bench.set_defaults(call=_bench)
    launch = verbs.add_parser(
        "launch",
        parents=[run_options(), launch_options.standalone_options()],
        help="run this host's part of a gang",
        epilog="examples: rackproof launch --run-dir /var/lib/rackproof/runs/r1 --host r12-h01 --members r12-h01,r12-h02; "
        "mpirun --map-by ppr:1:node rackproof launch --launcher mpi --plan plan.json --run-dir /var/tmp/rackproof/runs/r1. "
        "Exit codes: 0 a record was written, whatever it says; 2 not possible here; 64 wrong usage, such as launcher "
        "variables that are missing or contradict each other; 75 another run has this host.",
    )
    launch.add_argument(
        "--launcher",
        choices=LAUNCHERS,
        default=TORCHRUN,
        help="who started this process: mpi (mpirun) or slurm (srun), which also tell with whom; "
        "torchrun, which is started here: nobody did (default)",
    )
    launch.add_argument(
        "--members",
        default="",
        help="hosts that start together, comma between them (default: this host's gang in the plan)",
    )
    launch.add_argument(
        "--port",
        type=int,
        default=29500,
        help="rendezvous port on the first member; heartbeats take the next two (default: 29500)",
    )
    launch.add_argument(
        "--number",
        type=int,
        default=0,
        help="which launch of the gang this is, or which cell of a study: one that was made is not made again",
    )
    launch.add_argument(
        "--probe", action="store_true", help="only find out, in short, whether these hosts work together"
    )
    launch.add_argument(
        "--admit",
        choices=["anyone", "members"],
        default="anyone",
        help="from whose addresses the rendezvous and the heartbeats take connections (default: anyone)",
    )
    launch.set_defaults(call=_launch)
    wait = verbs.add_parser(
        "wait",
        help="wait for the end of a detached stage; exits 3 where it did not finish well",
        epilog="example: rackproof wait --run-dir /var/lib/rackproof/runs/r1 --host r12-h01 --stage gang",
    )
    wait.add_argument("--run-dir", type=run_directory, required=True, help="directory of the run on this host")
    wait.add_argument("--host", required=True, help="this host's name in the plan")
    wait.add_argument("--stage", required=True, choices=["benchmark", "soak", "gang"])
    wait.set_defaults(call=_wait)
    for verb, module in ELSEWHERE.items():
        if asked in ("", verb):
            importlib.import_module(module).add_verb(verbs)


def _inspect_options(verbs: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    inspect = verbs.add_parser(
        "inspect",
        help="take a snapshot of this host, and begin its record where a plan is given; exits 75 where another run has it",
        epilog="example: rackproof inspect --json",
    )
    inspect.add_argument("--run-dir", type=run_directory, help="add the snapshot to the record of this run")
    inspect.add_argument("--host", help="this host's name in the plan; needed with --run-dir")
    inspect.add_argument("--plan", help="plan to begin the run with; - reads it from standard input")
    inspect.add_argument("--claim", help="lock.json of the run on the control node: who carries it out")
    inspect.add_argument("--take-over", action="store_true", help="end another run that has this host, and take it")
    inspect.add_argument("--stage", default="preflight", help="stage that the snapshot belongs to (default: preflight)")
    inspect.add_argument("--json", action="store_true", help="print the readings as JSON")
    inspect.set_defaults(call=_inspect)


def _inspect(options: argparse.Namespace) -> int:
    if options.run_dir is None:
        named = {
            f"--{name}": getattr(options, name.replace("-", "_")) for name in ("plan", "host", "claim", "take-over")
        }
        if lost := next((f"{name} {value}" for name, value in named.items() if value), ""):
            return complain(
                f"{lost.removesuffix(' True')} without --run-dir: give the directory of the run as well, "
                "or leave it out for a snapshot of this host, which is in no record"
            )
        return _show(options.json)
    if not options.host:
        return complain("--host is missing: give this host's name in the plan")
    if options.plan:
        text = sys.stdin.read() if options.plan == "-" else Path(options.plan).read_text(encoding="utf-8")
        try:
            run = stages.start_run(
                options.run_dir, options.host, text, claim=options.claim, take_over=options.take_over
            )
        except HeldError as held:
            return complain(str(held), lease.HELD)
    else:
        run = HostRun(options.run_dir, options.host)
    record = stages.record_snapshot(run, options.stage, once=bool(options.plan))
    _print_record(record, options.json)
    return 0


def _show(as_json: bool) -> int:
    families, outcome = collect(collectors.build_collectors(full_snapshot=True))
    readings = [
        {"name": family.name, "unit": family.unit, "scope": scope(labels)}
        | ({"status": value.status, "reason": value.reason} if isinstance(value, Absent) else {"value": value})
        for family in families
        for labels, value in family.readings
    ]
    if as_json:
        print(json.dumps({"readings": readings, "collectors": outcome}, indent=1))
        return 0
    for item in readings:
        value = item.get("value", f"{item.get('status')}: {item.get('reason')}")
        unit = "" if item["unit"] == "1" else f" {item['unit']}"
        print(f"{item['scope']:<22} {item['name']:<36} {value}{unit}")
    for name, result in outcome.items():
        if isinstance(result, str):
            log.warning("collector %s: %s", name, result)
    return 0


def _bench(options: argparse.Namespace) -> int:
    try:
        run = _start_run(options)
    except PlacementError as error:
        return complain(str(error))
    except HeldError as held:
        return complain(str(held), lease.HELD)
    return _run_stage(options, run, "benchmark", [run.host.name])


def _launch(options: argparse.Namespace) -> int:
    try:
        placement = detect_placement(options.launcher, os.environ)
        if placement and options.detach:
            return complain(
                f"--detach with --launcher {placement.launcher}: the launcher ends what its process leaves behind"
            )
        if placement and placement.nodes > 1 and options.host:
            return complain(
                f"--host {options.host}: {placement.nodes} hosts were started with this command; leave --host out"
            )
        if placement and not placement.supervises:
            log.info("rank %d: nothing to do; local rank 0 supervises the ranks of this host", placement.rank)
            return 0
        run = _start_run(options, placement)
        members = select_members(run.plan, run.host, options.members, placement)
        if placement:
            check_gpu_allocation(run.host, os.environ)
            if note := use_all_processors() if placement.launcher == MPI else "":
                log.info("%s", note)
    except PlacementError as error:
        return complain(str(error))
    except HeldError as held:
        return complain(str(held), lease.HELD)
    return _run_stage(options, run, PROBE if options.probe else GANG, members)


def _start_run(options: argparse.Namespace, placement: RankPlacement | None = None) -> HostRun:
    """Return the run, started here if there is a `--plan`. Raises PlacementError, HeldError."""
    given = launch_options.read_plan(options)
    host = options.host or find_host(given.plan, os.environ, placement)
    launch_options.check_options(options)
    if given.text:
        run = stages.start_run(options.run_dir, host, given.text)
        stages.record_snapshot(run, "preflight", once=True)
        return run
    return HostRun(options.run_dir, host)


def _run_stage(options: argparse.Namespace, run: HostRun, stage: str, members: Sequence[str]) -> int:
    """Run a stage while no other process of this host does and no other run has the host, and publish the record."""
    try:
        if options.detach:
            lease.renew(run.directory, run.plan)
            return _run_locked(options, run, stage, members)
        with background.exclusive_task(run.directory, "benchmark" if stage == "benchmark" else GANG):
            lease.renew(run.directory, run.plan, stage)
            code = _run_locked(options, run, stage, members)
    except HeldError as held:
        return complain(str(held), lease.HELD)
    if code == 0:
        launch_options.publish_results(options, run)
    return code


def _run_locked(options: argparse.Namespace, run: HostRun, stage: str, members: Sequence[str]) -> int:
    number = getattr(options, "number", 0)
    try:
        if run.plan.study:
            run, stage = run.for_cell(number), CELL
        planned = probe(run.plan.stage(GANG)) if stage == PROBE else run.plan.stage(stage)
        for member in members:
            run.plan.host(member)
    except KeyError as unknown:
        return complain(f"{unknown.args[0]!r} is not in the plan of run {run.plan.run_id}")
    gang = run.host.gang if stage in (GANG, PROBE, CELL) else ""
    if done := stages.already_ran(run.record(gang).launches, stage, members, number):
        print(f"stage {stage} was {done.outcome} at {done.began}; nothing is measured twice")
        return 0
    if options.detach:
        arguments = [argument for argument in sys.argv if argument != "--detach"]
        print(background.start(arguments, run.directory, GANG if gang else stage))
        return 0
    request = LaunchRequest(
        stage=planned,
        members=tuple(members),
        number=number,
        port=getattr(options, "port", 0),
        members_only=getattr(options, "admit", "") == "members",
        interface=options.interface,
        environment=launch_options.rank_environment(options),
    )
    _print_record(stages.run_launch(run, request), options.json)
    return 0


def _wait(options: argparse.Namespace) -> int:
    run = HostRun(options.run_dir, options.host)
    print(background.wait(options.run_dir, options.stage, run.plan.stage(options.stage).longest_s + AFTER_DEADLINE_S))
    if options.stage == SOAK:
        soak = run.record().soak
        print(format_progress(soak) if soak else "nothing was soaked")
        return 0 if soak and soak.ended and not soak.reason else NOT_FINISHED
    gang = run.host.gang if options.stage == GANG else ""
    launches = [launch for launch in run.record(gang).launches if gang or launch.stage == options.stage]
    finished = bool(launches) and launches[-1].outcome == "finished"
    state = lease.state_directory(options.run_dir)
    if other := lease.held_by_other(state, run.plan.run_id):
        log.warning("this host was taken by %s", other.describe())
    elif not finished and options.stage == "benchmark":  # the host leaves the run, and others may have it
        lease.release(state, run.plan.run_id)
    return 0 if finished else NOT_FINISHED


def _print_record(record: Record, as_json: bool) -> None:
    launches = [
        {"stage": launch.stage, "outcome": launch.outcome, "reason": launch.reason} for launch in record.launches
    ]
    if as_json:
        print(json.dumps({"host": record.host, "observations": len(record.everything()), "launches": launches}))
        return
    print(f"{record.host}: {len(record.everything())} observations recorded")
    for launch in launches:
        print(f"stage {launch['stage']}: {launch['outcome']} {launch['reason']}".rstrip())
