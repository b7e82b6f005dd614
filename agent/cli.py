"""The verbs that run on a GPU host: arguments to calls."""

from __future__ import annotations

import argparse
import importlib
import json
import os
import socket
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import collectors
from agent import background, lease
from agent.launch import options as given
from agent.launch import stage as stages
from agent.launch.detect import seat_of
from agent.launch.part import all_processors, enough, host_of, members_of
from agent.launch.seat import LAUNCHERS, MPI, TORCHRUN, Seat, SeatError
from agent.live import Span
from agent.record import HostRun, run_directory
from agent.snapshot import collect
from collectors.base import Absent, scope
from schemas.errors import HeldError
from schemas.plans import Stage
from schemas.probes import GANG, PROBE, probe
from schemas.records import Record, to_json
from schemas.studies import CELL
from schemas.timeline import SOAK

if TYPE_CHECKING:
    from agent.soak import SoakRun

USAGE, NOT_FINISHED = 64, 3
MOST_GPUS, MOST_SECONDS = 128, 3600.0
AFTER_DEADLINE_S = 90.0
"""What a supervisor may take, past the deadline of its ranks, to end them and to write the record."""
ELSEWHERE = {
    "export": "agent.cli_export",
    "stop": "agent.cli_stop",
    "attend": "agent.attend",
    "tell": "agent.tell",
    "busy": "agent.busy",
}
"""Verbs with a module of their own, which is imported where one of them is asked for. A run starts the others a dozen times on
each host; for the same reason the judge and the soak are imported where they are used."""


def add_verbs(verbs: argparse._SubParsersAction[argparse.ArgumentParser], asked: str = "") -> None:
    """Adds the verbs of a GPU host to the command, or what is needed for one of them."""
    _inspect_options(verbs)
    _doctor_options(verbs)
    run = argparse.ArgumentParser(add_help=False)
    run.add_argument("--run-dir", type=run_directory, required=True, help="directory of the run on this host")
    run.add_argument("--host", help="this host's name in the plan (default: found by the names that it goes by)")
    run.add_argument("--interface", default="", help="network interface for NCCL and gloo (default: they choose)")
    run.add_argument("--detach", action="store_true", help="return at once; `rackproof wait` waits for the end")
    run.add_argument("--json", action="store_true", help="print the outcome as JSON")
    bench = verbs.add_parser(
        "bench",
        parents=[run, given.without_ansible()],
        help="run the plan's benchmarks on this host alone",
        epilog="example: rackproof bench --run-dir /var/lib/rackproof/runs/r1 --host r12-h01",
    )
    bench.set_defaults(call=_bench)
    launch = verbs.add_parser(
        "launch",
        parents=[run, given.without_ansible()],
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
    _soak_options(verbs, run)
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


def _soak_options(verbs: argparse._SubParsersAction[argparse.ArgumentParser], run: argparse.ArgumentParser) -> None:
    soak = verbs.add_parser(
        "soak",
        parents=[run],
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


def _doctor_options(verbs: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    doctor = verbs.add_parser(
        "doctor",
        help="look at this host and judge it at once, without a plan; exits 1 where something failed",
        epilog="example: sudo rackproof doctor --gpus 8. Exit codes: 0 nothing found, 1 something failed, "
        "2 nothing failed, but something could not be told.",
    )
    doctor.add_argument(
        "--gpus",
        type=int,
        help="GPUs that this host should have (where left out, what is gone from the PCI bus is not missed, and it exits 2)",
    )
    doctor.add_argument("--criteria", action="append", default=[], help="one more pack: a name or a .yml file")
    doctor.add_argument("--seconds", type=float, default=2.0, help="between two looks at the counters (default: 2)")
    doctor.add_argument("--json", action="store_true", help="print the findings as JSON")
    doctor.set_defaults(call=_doctor)


def _doctor(options: argparse.Namespace) -> int:
    if options.gpus is not None and not 1 <= options.gpus <= MOST_GPUS:
        return _complain(f"--gpus {options.gpus}: give the number of GPUs, 1 to {MOST_GPUS}")
    if not 0 <= options.seconds <= MOST_SECONDS:
        return _complain(f"--seconds {options.seconds:g}: give 0 to {MOST_SECONDS:g} seconds")
    from agent.doctor import examine, table
    from fleet.judge.criteria import read_packs

    found = examine(
        collectors.start(thorough=True),
        read_packs(options.criteria),
        host=socket.gethostname(),
        gpu_count=options.gpus,
        wait_s=options.seconds,
    )
    print(json.dumps(to_json(found), indent=1) if options.json else table(found))
    return found.exit_code


def _inspect(options: argparse.Namespace) -> int:
    if options.run_dir is None:
        named = {
            f"--{name}": getattr(options, name.replace("-", "_")) for name in ("plan", "host", "claim", "take-over")
        }
        if lost := next((f"{name} {value}" for name, value in named.items() if value), ""):
            return _complain(
                f"{lost.removesuffix(' True')} without --run-dir: give the directory of the run as well, "
                "or leave it out for a snapshot of this host, which is in no record"
            )
        return _show(options.json)
    if not options.host:
        return _complain("--host is missing: give this host's name in the plan")
    if options.plan:
        text = sys.stdin.read() if options.plan == "-" else Path(options.plan).read_text(encoding="utf-8")
        try:
            run = stages.take_up(options.run_dir, options.host, text, claim=options.claim, take_over=options.take_over)
        except HeldError as held:
            return _complain(str(held), lease.HELD)
    else:
        run = HostRun(options.run_dir, options.host)
    record = stages.look(run, options.stage, once=bool(options.plan))
    _told(record, options.json)
    return 0


def _show(as_json: bool) -> int:
    families, outcome = collect(collectors.start(thorough=True))
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
            print(f"collector {name}: {result}", file=sys.stderr)
    return 0


def _bench(options: argparse.Namespace) -> int:
    try:
        _begin(options)
    except SeatError as error:
        return _complain(str(error))
    except HeldError as held:
        return _complain(str(held), lease.HELD)
    return given.delivered(options, _alone(options, "benchmark", [options.host]))


def _launch(options: argparse.Namespace) -> int:
    try:
        seat = seat_of(options.launcher, os.environ)
        if seat and options.detach:
            return _complain(
                f"--detach with --launcher {seat.launcher}: the launcher ends what its process leaves behind"
            )
        if seat and seat.nodes > 1 and options.host:
            return _complain(
                f"--host {options.host}: {seat.nodes} hosts were started with this command; leave --host out"
            )
        if seat and not seat.leads:
            _progress(
                f"rank {seat.rank}: the first process of this host supervises its ranks, of which this would be one"
            )
            return 0
        members = _take_part(options, seat)
    except SeatError as error:
        return _complain(str(error))
    except HeldError as held:
        return _complain(str(held), lease.HELD)
    return given.delivered(options, _alone(options, PROBE if options.probe else GANG, members))


def _take_part(options: argparse.Namespace, seat: Seat | None) -> list[str]:
    """Begins the run where it was not begun; who starts together. Raises SeatError, HeldError."""
    plan = _begin(options, seat).plan
    members = members_of(plan, plan.host(options.host), options.members, seat)
    if seat:
        enough(plan.host(options.host), os.environ)
        note = all_processors() if seat.launcher == MPI else ""
        if note:
            _progress(note)
    return members


def _begin(options: argparse.Namespace, seat: Seat | None = None) -> HostRun:
    """The run, begun here where --plan gives one; `options.host` is found where nobody said it. Raises SeatError, HeldError."""
    plan = given.plan_of(options)
    options.host = options.host or host_of(plan, os.environ, seat)
    given.check(options)
    if options.plan:
        run = stages.take_up(options.run_dir, options.host, given.text_of(options))
        stages.look(run, "preflight", once=True)
        return run
    return HostRun(options.run_dir, options.host)


def _alone(options: argparse.Namespace, stage: str, members: list[str]) -> int:
    """Carries out a stage while no other process of this host does, and while no other run has the host."""
    run = HostRun(options.run_dir, options.host)
    try:
        if options.detach:
            lease.renew(options.run_dir, run.plan)
            return _stage(options, stage, members)
        with background.alone(options.run_dir, "benchmark" if stage == "benchmark" else GANG):
            lease.renew(options.run_dir, run.plan, stage)
            return _stage(options, stage, members)
    except HeldError as held:
        return _complain(str(held), lease.HELD)


def _stage(options: argparse.Namespace, stage: str, members: list[str]) -> int:
    run, number = HostRun(options.run_dir, options.host), getattr(options, "number", 0)
    try:
        if run.plan.study:
            run, stage = run.of_cell(number), CELL
        planned = probe(run.plan.stage(GANG)) if stage == PROBE else run.plan.stage(stage)
        for member in members:
            run.plan.host(member)
    except KeyError as unknown:
        return _complain(f"{unknown.args[0]!r} is not in the plan of run {run.plan.run_id}")
    gang = run.host.gang if stage in (GANG, PROBE, CELL) else ""
    done = [launch for launch in run.record(gang).launches if stages.made(launch, stage, members, number)]
    if done:
        print(f"stage {stage} was {done[-1].outcome} at {done[-1].began}; nothing is measured twice")
        return 0
    if options.detach:
        arguments = [argument for argument in sys.argv if argument != "--detach"]
        print(background.start(arguments, options.run_dir, GANG if gang else stage))
        return 0
    record = _measure(options, run, planned, members, number)
    _told(record, options.json)
    return 0


def _measure(
    options: argparse.Namespace,
    run: HostRun,
    planned: Stage,
    members: list[str],
    number: int,
    span: Span | None = None,
) -> Record:
    return stages.measure(
        run,
        planned,
        members,
        number,
        port=getattr(options, "port", 0),
        closed=getattr(options, "admit", "") == "members",
        interface=options.interface,
        span=span,
        exported=given.exported(options),
    )


def _soak(options: argparse.Namespace) -> int:
    from agent.soak import FAILURE, NOT_WELL, SoakRun, carry_out, told

    try:
        options.host = options.host or host_of(given.plan_of(options), os.environ)
        run = SoakRun(options.run_dir, options.host)
    except SeatError as error:
        return _complain(str(error))
    except KeyError:
        return _complain("the plan of this run has no soak: choose a profile that has, such as soak")
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
                    stages.readers(run, thorough=False),
                    _progress,
                )
    except HeldError as held:
        return _complain(str(held), lease.HELD)
    print(json.dumps(to_json(run.state)) if options.json else told(run.state))
    return 0


def _round(options: argparse.Namespace, run: SoakRun, planned: Stage, number: int, span: Span) -> Record:
    lease.renew(options.run_dir, run.plan, SOAK)
    return _measure(options, run, planned, [options.host], number, span)


def _begin_soak(options: argparse.Namespace, run: SoakRun, planned: Stage) -> int:
    """Begins the soak in the background, or goes on with it; with --looks, stays and looks for a while."""
    from agent.soak import NOT_WELL, look

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


def _wait(options: argparse.Namespace) -> int:
    run = HostRun(options.run_dir, options.host)
    print(background.wait(options.run_dir, options.stage, run.plan.stage(options.stage).longest_s + AFTER_DEADLINE_S))
    if options.stage == SOAK:
        from agent.soak import told

        soak = run.record().soak
        print(told(soak) if soak else "nothing was soaked")
        return 0 if soak and soak.ended and not soak.reason else NOT_FINISHED
    gang = run.host.gang if options.stage == GANG else ""
    launches = [launch for launch in run.record(gang).launches if gang or launch.stage == options.stage]
    finished = bool(launches) and launches[-1].outcome == "finished"
    state = lease.state_of(options.run_dir)
    if taken := lease.another(state, run.plan.run_id):
        print(f"this host was taken by {taken.who()}", file=sys.stderr)
    elif not finished and options.stage == "benchmark":  # the host leaves the run, and others may have it
        lease.release(state, run.plan.run_id)
    return 0 if finished else NOT_FINISHED


def _told(record: Record, as_json: bool) -> None:
    launches = [
        {"stage": launch.stage, "outcome": launch.outcome, "reason": launch.reason} for launch in record.launches
    ]
    if as_json:
        print(json.dumps({"host": record.host, "observations": len(record.everything()), "launches": launches}))
        return
    print(f"{record.host}: {len(record.everything())} observations recorded")
    for launch in launches:
        print(f"stage {launch['stage']}: {launch['outcome']} {launch['reason']}".rstrip())


def _progress(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _complain(message: str, code: int = USAGE) -> int:
    print(f"rackproof: {message}", file=sys.stderr)
    return code
