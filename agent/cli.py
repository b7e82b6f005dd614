"""The verbs that run on a GPU host: arguments to calls."""

from __future__ import annotations

import argparse
import json
import shutil
import signal
import sys
import threading
from pathlib import Path

import collectors
from agent import background
from agent.exporter import serve
from agent.launch.torchrun import LaunchError, torchrun
from agent.record import HostRun, private_directory
from agent.snapshot import collect, now, take
from agent.supervise import supervise
from collectors.base import Absent, scope
from collectors.nvml import obstacles
from schemas.records import Launch, Record

USAGE, NOT_FINISHED = 64, 3
AFTER_DEADLINE_S = 90.0
"""What a supervisor may take, past the deadline of its ranks, to end them and to write the record."""


def add_verbs(verbs: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds inspect, bench, launch, wait and export to the command."""
    _inspect_options(verbs)
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
    launch.add_argument("--port", type=int, default=29500, help="rendezvous port on the first member (default: 29500)")
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
    export = verbs.add_parser(
        "export",
        help="serve the collectors to Prometheus",
        epilog="example: rackproof export --listen 10.0.12.1 --port 9836",
    )
    export.add_argument("--listen", default="127.0.0.1", help="address to listen on (default: 127.0.0.1)")
    export.add_argument("--port", type=int, default=9836, help="port to listen on (default: 9836)")
    export.add_argument("--gpus", help="NVML indices to look at, comma between them (default: all)")
    export.add_argument("--detach", type=Path, metavar="DIRECTORY", help="return at once; process id and log go there")
    export.set_defaults(call=_export)
    stop = verbs.add_parser(
        "stop",
        help="end what `export --detach` started",
        epilog="example: rackproof stop /var/lib/rackproof/exporter",
    )
    stop.add_argument("directory", type=Path, help="directory that was given to --detach")
    stop.set_defaults(call=_stop)


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
    except LaunchError as error:
        record = run.add(gang, launches=[_not_started(stage, members, planned.deadline_s, str(error))])
    else:
        record = supervise(
            run, _collectors(run), command, deadline_s=planned.deadline_s, report=_progress, **arrangements
        )
    _told(record, options.json)
    return 0


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


def _export(options: argparse.Namespace) -> int:
    gpus = [int(index) for index in options.gpus.split(",")] if options.gpus else None
    if options.detach:
        arguments = [sys.argv[0], "export", "--listen", options.listen, "--port", str(options.port)]
        arguments += ["--gpus", options.gpus] if options.gpus else []
        print(background.start(arguments, options.detach, "exporter", until="listening"))
        return 0
    try:
        server, thread = serve(collectors.start(gpus), options.listen, options.port)
    except OSError as error:
        return _complain(
            f"cannot listen on {options.listen} port {options.port}: {error.strerror}; choose another --port"
        )
    print(f"listening on http://{options.listen}:{options.port}/metrics", file=sys.stderr, flush=True)
    background.notify_systemd()
    ended = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: ended.set())
    ended.wait()
    server.shutdown()
    thread.join()
    server.server_close()
    return 0


def _stop(options: argparse.Namespace) -> int:
    print(background.stop(options.directory, "exporter"))
    return 0


def _collectors(run: HostRun) -> list[collectors.base.Collector]:
    return collectors.start(run.host.devices if run.host.device == "gpu" else None, thorough=True)


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
