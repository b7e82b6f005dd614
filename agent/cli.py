"""The verbs that run on a GPU host: arguments to calls."""

from __future__ import annotations

import argparse
import json
import shutil
import signal
import socket
import sys
from pathlib import Path

import collectors
from agent import background, cli_export
from agent.doctor import examine, table
from agent.exchange import Exchange
from agent.launch.torchrun import LaunchError, torchrun
from agent.record import HostRun, private_directory
from agent.snapshot import collect, now, take
from agent.supervise import set_aside, supervise
from agent.wire import ExchangeError, Gang
from collectors.base import Absent, scope
from collectors.nvml import obstacles
from fleet.errors import UsageError
from fleet.judge.criteria import read_packs
from schemas.records import Launch, Record, to_json

USAGE, NOT_FINISHED = 64, 3
MOST_GPUS, MOST_SECONDS = 128, 3600.0
AFTER_DEADLINE_S = 90.0
"""What a supervisor may take, past the deadline of its ranks, to end them and to write the record."""


def add_verbs(verbs: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds inspect, doctor, bench, launch, wait and export to the command."""
    _inspect_options(verbs)
    _doctor_options(verbs)
    run = argparse.ArgumentParser(add_help=False)
    run.add_argument("--run-dir", type=Path, required=True, help="directory of the run on this host")
    run.add_argument("--host", required=True, help="this host's name in the plan")
    run.add_argument("--interface", default="", help="network interface for NCCL and gloo (default: they choose)")
    run.add_argument("--detach", action="store_true", help="return at once; `rackproof wait` waits for the end")
    run.add_argument("--json", action="store_true", help="print the outcome as JSON")
    bench = verbs.add_parser(
        "bench",
        parents=[run],
        help="run the plan's benchmarks on this host alone",
        epilog="example: rackproof bench --run-dir /var/lib/rackproof/runs/r1 --host r12-h01",
    )
    bench.set_defaults(call=_bench)
    launch = verbs.add_parser(
        "launch",
        parents=[run],
        help="run this host's part of a gang",
        epilog="example: rackproof launch --run-dir /var/lib/rackproof/runs/r1 --host r12-h01 --members r12-h01,r12-h02",
    )
    launch.add_argument("--members", required=True, help="hosts that start together, in rank order, comma between them")
    launch.add_argument(
        "--port",
        type=int,
        default=29500,
        help="rendezvous port on the first member; heartbeats take the next two (default: 29500)",
    )
    launch.set_defaults(call=_launch)
    wait = verbs.add_parser(
        "wait",
        help="wait for the end of a detached stage; exits 3 where it did not finish well",
        epilog="example: rackproof wait --run-dir /var/lib/rackproof/runs/r1 --host r12-h01 --stage gang",
    )
    wait.add_argument("--run-dir", type=Path, required=True, help="directory of the run on this host")
    wait.add_argument("--host", required=True, help="this host's name in the plan")
    wait.add_argument("--stage", required=True, choices=["benchmark", "gang"])
    wait.set_defaults(call=_wait)
    cli_export.add_verbs(verbs)


def _inspect_options(verbs: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    inspect = verbs.add_parser(
        "inspect",
        help="take a snapshot of this host, and begin its record where a plan is given",
        epilog="example: rackproof inspect --json",
    )
    inspect.add_argument("--run-dir", type=Path, help="add the snapshot to the record of this run")
    inspect.add_argument("--host", help="this host's name in the plan; needed with --run-dir")
    inspect.add_argument("--plan", help="plan to begin the run with; - reads it from standard input")
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
    try:
        packs = read_packs(options.criteria)
    except UsageError as error:
        return _complain(str(error))
    found = examine(
        collectors.start(thorough=True),
        packs,
        host=socket.gethostname(),
        gpu_count=options.gpus,
        wait_s=options.seconds,
    )
    print(json.dumps(to_json(found), indent=1) if options.json else table(found))
    return found.exit_code


def _inspect(options: argparse.Namespace) -> int:
    if options.run_dir is None:
        return _show(options.json)
    if not options.host:
        return _complain("--host is missing: give this host's name in the plan")
    if options.plan:
        text = sys.stdin.read() if options.plan == "-" else Path(options.plan).read_text(encoding="utf-8")
        run = HostRun.begin(options.run_dir, options.host, text)
    else:
        run = HostRun(options.run_dir, options.host)
    snapshot, gpus = take(_collectors(run), stage=options.stage, phase="before")
    _told(run.add(snapshots=[snapshot], gpus=gpus), options.json)
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
    return _stage(options, "benchmark", [options.host])


def _launch(options: argparse.Namespace) -> int:
    return _stage(options, "gang", options.members.split(","))


def _stage(options: argparse.Namespace, stage: str, members: list[str]) -> int:
    run = HostRun(options.run_dir, options.host)
    try:
        planned = run.plan.stage(stage)
        for member in members:
            run.plan.host(member)
    except KeyError as unknown:
        return _complain(f"{unknown.args[0]!r} is not in the plan of run {run.plan.run_id}")
    gang = run.host.gang if stage == "gang" else ""
    done = [
        launch
        for launch in run.record(gang).launches
        if (launch.stage, launch.outcome, launch.members) == (stage, "finished", tuple(members))
    ]
    if done:
        print(f"stage {stage} was finished at {done[-1].began}; nothing is measured twice")
        return 0
    if options.detach:
        arguments = [argument for argument in sys.argv if argument != "--detach"]
        print(background.start(arguments, options.run_dir, stage))
        return 0
    if run.host.device == "gpu" and (found := obstacles(run.host.devices, share=run.host.share_gpus)):
        reason = f"{'; '.join(found)}: end it, or set rackproof_share_gpus to measure beside it"
        _told(run.add(gang, launches=[_not_started(stage, members, planned.deadline_s, reason)]), options.json)
        return 0
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the ranks are ended and not left behind
    work = options.run_dir / "work" / stage
    set_aside(work, options.run_dir / "logs")
    shutil.rmtree(work, ignore_errors=True)
    private_directory(work)
    arrangements = {"stage": stage, "gang": gang, "members": members, "work": work}
    port = getattr(options, "port", 0)
    try:
        command = torchrun(
            run.plan,
            run.host,
            planned,
            members=members,
            work=work,
            data=options.run_dir.parent.parent / "data",
            port=port,
            interface=options.interface,
            uuids={gpu.index: gpu.uuid for gpu in run.record().gpus},
        )
        exchange = _exchange(run, stage, members, port) if len(members) > 1 else None
    except (LaunchError, ExchangeError) as error:
        record = run.add(gang, launches=[_not_started(stage, members, planned.deadline_s, str(error))])
    else:
        record = supervise(
            run,
            _collectors(run),
            command,
            deadline_s=planned.deadline_s,
            report=_progress,
            meanwhile=_collectors(run, thorough=False),
            exchange=exchange,
            patience_s=planned.collective_timeout_s,
            **arrangements,
        )
    _told(record, options.json)
    return 0


def _exchange(run: HostRun, stage: str, members: list[str], port: int) -> Exchange:
    """Heartbeats go beside the rendezvous: the first two members listen, on the next two ports."""
    return Exchange(
        Gang(
            me=run.host.name,
            members=tuple(members),
            addresses={name: run.plan.host(name).address for name in members},
            port=port + 1,
            nonce=run.plan.nonce,
            about=f"{run.plan.run_id} {stage} {run.host.gang}",
        )
    )


def _not_started(stage: str, members: list[str], deadline_s: float, reason: str) -> Launch:
    return Launch(
        stage=stage,
        outcome="failed",
        reason=reason[:4096],
        members=tuple(members),
        began=now(),
        duration_s=0.0,
        deadline_s=deadline_s,
        ranks=(),
        log_tail="",
    )


def _wait(options: argparse.Namespace) -> int:
    run = HostRun(options.run_dir, options.host)
    print(background.wait(options.run_dir, options.stage, run.plan.stage(options.stage).deadline_s + AFTER_DEADLINE_S))
    gang = run.host.gang if options.stage == "gang" else ""
    launches = [launch for launch in run.record(gang).launches if launch.stage == options.stage]
    return 0 if launches and launches[-1].outcome == "finished" else NOT_FINISHED


def _collectors(run: HostRun, *, thorough: bool = True) -> list[collectors.base.Collector]:
    return collectors.start(run.host.devices if run.host.device == "gpu" else None, thorough=thorough)


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


def _complain(message: str) -> int:
    print(f"rackproof: {message}", file=sys.stderr)
    return USAGE
