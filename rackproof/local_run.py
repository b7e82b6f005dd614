"""`rackproof run`: the acceptance of this one machine, without Ansible: look, plan, measure, judge, report.

It stands above both sides, the agent that measures here and the control node's plan and report, as the playbooks do elsewhere.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import secrets
import socket
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import collectors
from agent.launch import stage as stages
from agent.launch.request import LaunchRequest
from agent.placement.detect import detect_placement
from agent.placement.rank_placement import TORCHRUN
from agent.run import lease, readiness
from agent.run.readiness import Gpus
from agent.sampling.snapshot import collect
from collectors.base import Absent, Value
from fleet.inventory.ansible import check_variables
from fleet.judge.criteria import read_packs, shipped_packs
from fleet.planning.begin import begin
from fleet.planning.plan import make_plan, read_profile
from fleet.records.load import load
from fleet.scaling.outcome import GANG as STUDIED
from fleet.scaling.outcome import next_cell
from schemas import documents
from schemas.errors import RunError, UsageError
from schemas.plans import Plan, plan_from_json
from schemas.probes import GANG
from schemas.records import to_json
from schemas.run_directory import RunDirectory
from schemas.studies import CELL

USAGE, TROUBLE, INTERRUPTED = 64, 2, 130
MOST_GPUS = 128
BENCHMARK = "benchmark"
OF_SEVERAL_HOSTS = ("pairs",)
"""What a host cannot do alone."""
HOST_DIRECTORY = "host"
STATE = Path("/var/lib/rackproof")
"""Where a run of the playbooks keeps this host, which it then has to itself."""


@dataclass(frozen=True, kw_only=True)
class Machine:
    """What was found here before anything was started."""

    gpus: Gpus
    readings: Mapping[str, Value | Absent]


def add_verbs(verbs: argparse._SubParsersAction[argparse.ArgumentParser], _asked: str = "") -> None:
    """Add run to the command."""
    run = verbs.add_parser(
        "run",
        help="accept this one machine, without Ansible; exits 0 accepted, 1 rejected, 2 incomplete or not possible",
        epilog="examples: rackproof run --gpus 8; rackproof run --profile rehearsal (no GPU needed). The same --run-dir again "
        "goes on with a run that was cut off. Exit codes: 0 accepted, 1 rejected, 2 incomplete, or this machine cannot be "
        "measured as it is, 64 wrong usage, 75 another run has this machine.",
    )
    run.add_argument(
        "--profile", default="standard", help="what is measured: smoke, standard, rehearsal, scaling, or a .yml file"
    )
    run.add_argument(
        "--run-dir", type=Path, help="directory of the run, for everything (default: runs/ and the UTC time)"
    )
    run.add_argument(
        "--gpus",
        type=int,
        metavar="N",
        help="GPUs that were ordered; without it what is found is taken, and the report says that "
        "nobody said how many there should be",
    )
    run.add_argument("--devices", help="NVML indices of the GPUs under test, comma between them (default: all)")
    run.add_argument("--model", default="", help="criteria pack of the GPUs that were ordered, such as h200-sxm")
    run.add_argument("--host", help="this machine's name in the report (default: its own)")
    run.add_argument("--validation-only", action="store_true", help="everything but the training")
    run.add_argument("--epochs", type=int, help="epochs of the training")
    run.add_argument("--batch-size", type=int, help="images a rank and step in the training")
    run.add_argument("--share-gpus", action="store_true", help="measure although other processes use the GPUs")
    run.add_argument("--criteria", action="append", default=[], help="one more pack: a name or a .yml file")
    run.add_argument("--json", action="store_true", help="print decision and summary as JSON")
    run.set_defaults(call=_checked)


def _checked(options: argparse.Namespace) -> int:
    """Our own errors as a message and the documented exit code."""
    try:
        return _run(options)
    except KeyboardInterrupt:
        return _complain("interrupted; the same --run-dir again goes on with it", INTERRUPTED)


def _run(options: argparse.Namespace) -> int:
    detect_placement(TORCHRUN, os.environ)
    now = datetime.now(timezone.utc)
    options.run_dir = (options.run_dir or Path("runs") / now.strftime("%Y%m%dT%H%M%SZ")).absolute()
    profile = read_profile(options.profile)
    profile = profile if "study" in profile else alone(profile)
    cpu = profile["device"] == "cpu"
    _check(options, cpu=cpu)
    machine = look()
    if not cpu and (why := readiness.no_gpus(machine.gpus)):
        return _complain(why, TROUBLE)
    plan = plan_of(options, profile, machine, now)
    host = plan.hosts[0]
    found = readiness.problems(
        machine.readings, host.devices, options.run_dir, cpu=cpu, share=host.share_gpus, environment=os.environ
    )
    if found:
        for problem in found:
            _complain(problem, TROUBLE)
        return TROUBLE
    if not cpu and (note := machine.gpus.disagreement()):
        _say(f"note: {note}")
    if taken := _taken(plan.run_id):
        return _complain(f"this machine is held by {taken.describe()}: wait for its end", lease.HELD)
    document = begin(options.run_dir, json.loads(json.dumps(to_json(plan))))
    if "study" in document:
        _study(options.run_dir, document)
        return _told("scaling", options)
    _measure(options.run_dir, document)
    return _told("report", options)


def _check(options: argparse.Namespace, *, cpu: bool) -> None:
    """Raise UsageError if the options are wrong or contradict each other."""
    if cpu and (options.gpus is not None or options.devices):
        raise UsageError(
            f"--gpus and --devices with the profile {options.profile}, which looks at no GPU: leave one of them out"
        )
    if options.gpus is not None and not 1 <= options.gpus <= MOST_GPUS:
        raise UsageError(f"--gpus {options.gpus}: give the number of GPUs, 1 to {MOST_GPUS}")
    if options.devices and not re.fullmatch(r"\d+(,\d+)*", options.devices):
        raise UsageError(f"--devices {options.devices}: give NVML indices such as 0,1,2")
    for name in ("epochs", "batch_size"):
        value = getattr(options, name)
        if value is not None and value < 1:
            raise UsageError(f"--{name.replace('_', '-')} {value}: give at least 1")
    if options.model and options.model not in shipped_packs():
        raise UsageError(
            f"--model {options.model} is unknown{documents.nearest(options.model, shipped_packs())}: "
            f"there are {', '.join(shipped_packs())}"
        )
    read_packs(options.criteria)


def look() -> Machine:
    """What there is here."""
    read = readiness.readings(collect(collectors.build_collectors())[0])
    return Machine(gpus=readiness.gpus_of(read, os.environ), readings=read)


def alone(profile: Mapping[str, Any]) -> dict[str, Any]:
    """The profile for one host: what it has several hosts do together, this one does with its own devices.

    Raises:
        UsageError: it has no stage that is carried out once.
    """
    stages_of = profile["stages"]
    if BENCHMARK not in stages_of:
        raise UsageError(
            f"profile {profile['name']} has the stages {', '.join(stages_of)}, and `rackproof run` carries out {BENCHMARK}: "
            "choose smoke, standard or rehearsal; a soak is begun by playbooks/burnin.yml"
        )
    stage, gang = dict(stages_of[BENCHMARK]), stages_of.get(GANG)
    more = {
        name: settings
        for name, settings in (gang["benchmarks"] if gang else {}).items()
        if name not in stage["benchmarks"] and name not in OF_SEVERAL_HOSTS
    }
    if gang and more:
        stage["benchmarks"] = {**stage["benchmarks"], **more}
        stage["deadline_s"] += gang["deadline_s"]
    return {**profile, "stages": {BENCHMARK: stage}}


def plan_of(options: argparse.Namespace, profile: Mapping[str, Any], machine: Machine, now: datetime) -> Plan:
    """The plan of this one host.

    Raises:
        UsageError: a value cannot be planned with; the message names it.
    """
    devices = [int(index) for index in options.devices.split(",")] if options.devices else None
    count = options.gpus or (len(devices) if devices else machine.gpus.most)
    name = options.host or re.sub(r"[^A-Za-z0-9_.-]", "-", socket.gethostname()) or "localhost"
    variables: dict[str, Any] = {
        "rackproof_rack": "local",
        "rackproof_gang": "none",
        "rackproof_validation_only": options.validation_only,
        "rackproof_share_gpus": options.share_gpus,
        **({"rackproof_criteria": options.criteria} if options.criteria else {}),
        **({"rackproof_epochs": options.epochs} if options.epochs else {}),
        **({"rackproof_batch_size": options.batch_size} if options.batch_size else {}),
        **({"rackproof_gpu_model": options.model} if options.model else {}),
        **({"rackproof_gpu_count": count} if profile["device"] == "gpu" else {}),
        **({"rackproof_gpu_devices": devices} if devices else {}),
    }
    check_variables({name: variables})
    plan = make_plan(
        profile,
        {name: variables},
        run_id=options.run_dir.name,
        nonce=secrets.token_hex(16),
        created=now.strftime("%Y-%m-%dT%H:%M:%SZ"),
    )
    found_only = profile["device"] == "gpu" and options.gpus is None
    return replace(plan, hosts=tuple(replace(host, count_found=found_only) for host in plan.hosts))


def _taken(run_id: str) -> lease.Lease | None:
    try:
        return lease.held_by_other(STATE, run_id)
    except OSError:  # not ours to read
        return None


def _measure(directory: Path, document: Mapping[str, Any]) -> None:
    """Two snapshots and the benchmarks under the supervisor, into the host's record; a stage that finished is not repeated."""
    plan = plan_from_json(document)
    host, planned = plan.hosts[0].name, plan.stage(BENCHMARK)
    run = stages.start_run(directory / HOST_DIRECTORY, host, json.dumps(document))
    record = stages.record_snapshot(run, "preflight", once=True)
    try:
        if stages.already_ran(record.launches, BENCHMARK, [host], 0):
            _say("the benchmarks were carried out before: nothing is measured twice")
            return
        count, kind = len(run.host.devices), "processes on CPUs" if plan.rehearsal else "GPUs"
        _say(f"run {plan.run_id}: {plan.profile} on {count} {kind} of {host}, {planned.deadline_s:g} s at most")
        record = stages.run_launch(run, LaunchRequest(stage=planned, members=(host,)))
        for launch in record.launches[-1:]:
            _say(f"stage {launch.stage}: {launch.outcome} {launch.reason}".rstrip())
    finally:
        documents.write_text(RunDirectory(directory).record(host), run.path().read_text(encoding="utf-8"))


def _study(directory: Path, document: Mapping[str, Any]) -> None:
    """The cells of a scaling study that one host can measure, each under the supervisor; none is launched twice."""
    plan = plan_from_json(document)
    host, cells = plan.hosts[0].name, plan.study.cells if plan.study else ()
    run = stages.start_run(directory / HOST_DIRECTORY, host, json.dumps(document))
    stages.record_snapshot(run, "preflight", once=True)
    own = {gang: run.path(gang) for gang in ("", STUDIED)}
    while True:
        for gang, path in own.items():
            if path.exists():
                documents.write_text(RunDirectory(directory).record(host, gang), path.read_text(encoding="utf-8"))
        starts = next_cell(plan, load(directory, alone=False, study=True).evidence, {host}).launches
        if not starts:
            return
        number = starts[0].number
        if any((launch.stage, launch.number) == (CELL, number) for launch in run.record(STUDIED).launches):
            raise RunError(
                f"{run.path(STUDIED)} has a cell {number} that {directory} has not: choose another --run-dir"
            )
        _say(f"cell {number} of {len(cells)}: {json.dumps(to_json(cells[number - 1]))}")
        cell = run.for_cell(number)
        request = LaunchRequest(stage=cell.plan.stage(CELL), members=(host,), number=number)
        record = stages.run_launch(cell, request)
        _say(f"cell {number}: {record.launches[-1].outcome} {record.launches[-1].reason}".rstrip())


def _told(verb: str, options: argparse.Namespace) -> int:
    """As `rackproof report`, or of a study `rackproof scaling`, does it."""
    from rackproof.main import main

    return main([verb, str(options.run_dir), *(["--json"] if options.json else [])])


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _complain(message: str, code: int) -> int:
    print(f"rackproof: {message}", file=sys.stderr)
    return code
