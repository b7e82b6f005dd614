"""`rackproof run`: acceptance-test one machine without Ansible.

The verb inspects, plans, measures, judges and reports. The code of the agent and of the control node runs on the same machine.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import secrets
import socket
from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from agent.cli.common import fail, print_progress
from agent.launch import stage as stages
from agent.launch.request import LaunchRequest
from agent.placement.detect import detect_placement
from agent.placement.rank_placement import TORCHRUN
from agent.run import lease, readiness
from agent.run.readiness import Gpus
from agent.sampling.snapshot import collect
from collectors.base import Absent, Value
from collectors.table import build_collectors
from fleet.inventory.ansible import check_variables
from fleet.judge.criteria import read_packs, shipped_packs
from fleet.planning.begin import begin
from fleet.planning.duration import earlier_durations, estimate_duration, past_run
from fleet.planning.plan import make_plan, read_profile
from fleet.quantities import counted
from fleet.records.load import load
from fleet.scaling.results import GANG as STUDIED
from fleet.scaling.results import next_cell
from schemas import documents
from schemas.catalogue import needs_torch
from schemas.errors import INTERRUPTED, TROUBLE, RunError, UsageError
from schemas.plans import LOCAL_RUN, Plan, plan_from_json
from schemas.records import to_json
from schemas.run_directory import RunDirectory
from schemas.stages import BENCHMARK, CELL, GANG, PREFLIGHT

MAX_GPUS = 128
MULTI_HOST_BENCHMARKS = ("pairs",)
HOST_DIRECTORY = "host"
"""Directory in the run directory for the agent's own records."""


@dataclass(frozen=True, kw_only=True)
class Machine:
    """The state of this machine before anything is started."""

    gpus: Gpus
    readings: Mapping[str, Value | Absent]


def add_verb(verbs: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add run to the command."""
    run = verbs.add_parser(
        "run",
        help="acceptance-test this machine without Ansible; exits 0 accepted, 1 rejected, 2 incomplete or not possible",
        epilog="examples: rackproof run --gpus 8; rackproof run --profile rehearsal (no GPU needed). To resume an interrupted "
        "run, repeat the command with its --run-dir. Exit codes: 0 accepted, 1 rejected, 2 incomplete or this machine cannot run "
        "the benchmarks, 64 wrong usage, 75 another run has locked this machine.",
    )
    run.add_argument(
        "--profile", default="standard", help="smoke, standard, extended, rehearsal, scaling, or a .yml file"
    )
    run.add_argument("--run-dir", type=Path, help="directory of the run (default: runs/ and the UTC time)")
    run.add_argument(
        "--gpus",
        type=int,
        metavar="N",
        help="number of GPUs that were ordered (default: the number of indices in --devices, or else the number of GPUs of this "
        "machine; without --gpus, the report states that no number was given)",
    )
    run.add_argument("--devices", help="NVML indices of the GPUs under test, comma-separated (default: all)")
    run.add_argument("--model", default="", help="criteria pack of the GPUs that were ordered, such as h200-sxm")
    run.add_argument("--host", help="name of this machine in the report (default: its host name)")
    run.add_argument("--validation-only", action="store_true", help="skip the training benchmarks")
    run.add_argument(
        "--duration", help="approximate measuring time of the profile 'extended', such as 20m or 2h (default: 1h)"
    )
    run.add_argument("--epochs", type=int, help="epochs of the training")
    run.add_argument("--batch-size", type=int, help="training images per rank and step")
    run.add_argument("--share-gpus", action="store_true", help="measure even if other processes use the GPUs")
    run.add_argument(
        "--criteria", action="append", default=[], help="an additional criteria pack: a name or a .yml file"
    )
    run.add_argument("--json", action="store_true", help="print decision and summary as JSON")
    run.set_defaults(call=call)


def call(options: argparse.Namespace) -> int:
    """Run the verb."""
    try:
        return _run(options)
    except KeyboardInterrupt:
        return fail("interrupted; to resume the run, start it again with the same --run-dir", INTERRUPTED)


def _run(options: argparse.Namespace) -> int:
    detect_placement(TORCHRUN, os.environ)
    now = datetime.now(timezone.utc)
    options.run_dir = (options.run_dir or Path("runs") / now.strftime("%Y%m%dT%H%M%SZ")).absolute()
    profile = read_profile(options.profile)
    profile = profile if "study" in profile else single_host_profile(profile)
    cpu = profile["device"] == "cpu"
    _check_options(options, profile)
    machine = inspect_machine()
    if not cpu and (reason := readiness.reason_without_gpus(machine.gpus)):
        return fail(reason, TROUBLE)
    plan = single_host_plan(options, profile, machine, now)
    host = plan.hosts[0]
    problems = readiness.problems(
        machine.readings,
        host.devices,
        options.run_dir,
        cpu=cpu,
        uses_torch=any(needs_torch(stage.benchmarks) for stage in plan.stages),
        share=host.share_gpus,
        environment=os.environ,
    )
    if problems:
        for problem in problems:
            fail(problem, TROUBLE)
        return TROUBLE
    if not cpu and (note := machine.gpus.disagreement()):
        print_progress(f"note: {note}")
    if other := _other_lease(plan):
        return fail(f"this machine is held by {other.describe()}: wait until that run ends", lease.HELD)
    past = None if plan.study else past_run(plan, options.run_dir.parent, options.run_dir)
    plan = replace(plan, durations_s=earlier_durations(plan, past))
    document = begin(options.run_dir, json.loads(json.dumps(to_json(plan))))
    if "study" in document:
        _run_study(options.run_dir, document)
        return _run_verb("scaling", options)
    _measure(options.run_dir, document)
    return _run_verb("report", options)


def _check_options(options: argparse.Namespace, profile: Mapping[str, Any]) -> None:
    """Raise UsageError if the options are wrong, contradict each other or have no effect."""
    if options.run_dir.name == lease.RUNS:  # the lease and the live figures of the run would be outside its directory
        raise UsageError(
            f"--run-dir {options.run_dir}: a directory named {lease.RUNS} is for several runs: give a directory in it, such as "
            f"{options.run_dir / 'r1'}"
        )
    if options.duration and "duration_s" not in profile:
        raise UsageError(
            f"--duration with profile {options.profile}, whose times are fixed: omit it, or use --profile extended"
        )
    if profile["device"] == "cpu" and (options.gpus is not None or options.devices):
        raise UsageError(
            f"--gpus or --devices with profile {options.profile}, which uses no GPU: omit them or choose another profile"
        )
    if options.gpus is not None and not 1 <= options.gpus <= MAX_GPUS:
        raise UsageError(f"--gpus {options.gpus}: give the number of GPUs, 1 to {MAX_GPUS}")
    if options.devices and not re.fullmatch(r"\d+(,\d+)*", options.devices):
        raise UsageError(f"--devices {options.devices}: give NVML indices such as 0,1,2")
    for name in ("epochs", "batch_size"):
        value = getattr(options, name)
        if value is not None and value < 1:
            raise UsageError(f"--{name.replace('_', '-')} {value}: give at least 1")
    if options.model and options.model not in shipped_packs():
        raise UsageError(
            f"unknown --model {options.model}{documents.nearest(options.model, shipped_packs())}: "
            f"choose from {', '.join(shipped_packs())}"
        )
    read_packs(options.criteria)


def inspect_machine() -> Machine:
    """Read the state of this machine."""
    readings = readiness.readings(collect(build_collectors())[0])
    return Machine(gpus=readiness.gpus_of(readings, os.environ), readings=readings)


def single_host_profile(profile: Mapping[str, Any]) -> dict[str, Any]:
    """Return the profile with only its benchmark stage, which also gets the gang stage's benchmarks except MULTI_HOST_BENCHMARKS.

    Raises:
        UsageError: the profile has no benchmark stage.
    """
    profile_stages = profile["stages"]
    if BENCHMARK not in profile_stages:
        raise UsageError(
            f"profile {profile['name']} has no stage {BENCHMARK}, the only stage that `rackproof run` runs (the profile has "
            f"{', '.join(profile_stages)}): choose smoke, standard, extended or rehearsal; run a soak with playbooks/burnin.yml"
        )
    stage, gang = dict(profile_stages[BENCHMARK]), profile_stages.get(GANG)
    gang_benchmarks = {
        name: settings
        for name, settings in (gang["benchmarks"] if gang else {}).items()
        if name not in stage["benchmarks"] and name not in MULTI_HOST_BENCHMARKS
    }
    if gang and gang_benchmarks:
        stage["benchmarks"] = {**stage["benchmarks"], **gang_benchmarks}
        stage["deadline_s"] += gang["deadline_s"]
    return {**profile, "stages": {BENCHMARK: stage}}


def single_host_plan(options: argparse.Namespace, profile: Mapping[str, Any], machine: Machine, now: datetime) -> Plan:
    """Return the plan of a run on this machine only.

    Raises:
        UsageError: an option has an invalid value.
    """
    devices = [int(index) for index in options.devices.split(",")] if options.devices else None
    count = options.gpus or (len(devices) if devices else machine.gpus.expected)
    name = options.host or re.sub(r"[^A-Za-z0-9_.-]", "-", socket.gethostname()) or "localhost"
    variables: dict[str, Any] = {
        "rackproof_rack": "local",
        "rackproof_gang": "none",
        "rackproof_validation_only": options.validation_only,
        "rackproof_share_gpus": options.share_gpus,
        **({"rackproof_criteria": options.criteria} if options.criteria else {}),
        **({"rackproof_extended_duration": options.duration} if options.duration else {}),
        **({"rackproof_epochs": options.epochs} if options.epochs else {}),
        **({"rackproof_batch_size": options.batch_size} if options.batch_size else {}),
        **({"rackproof_gpu_model": options.model} if options.model else {}),
        **({"rackproof_gpu_count": count} if profile["device"] == "gpu" else {}),
        **({"rackproof_gpu_devices": devices} if devices else {}),
    }
    plan = make_plan(
        profile,
        check_variables({name: variables}),
        run_id=options.run_dir.name,
        nonce=secrets.token_hex(16),
        created=now.strftime("%Y-%m-%dT%H:%M:%SZ"),
        begun_by=LOCAL_RUN,
    )
    count_detected = profile["device"] == "gpu" and options.gpus is None
    return replace(plan, hosts=tuple(replace(host, count_found=count_detected) for host in plan.hosts))


def _other_lease(plan: Plan) -> lease.Lease | None:
    try:
        return lease.held_by_other(lease.STATE, plan.run_id, plan.nonce)
    except OSError:  # no permission to read the lease
        return None


def _measure(directory: Path, document: Mapping[str, Any]) -> None:
    """Run the benchmarks, unless an earlier attempt has finished them.

    Copy the host's record from HOST_DIRECTORY to the run directory, even if the launch fails.
    """
    plan = plan_from_json(document)
    host, planned = plan.hosts[0].name, plan.stage(BENCHMARK)
    run = stages.start_run(directory / HOST_DIRECTORY, host, json.dumps(document))
    record = stages.record_snapshot(run, PREFLIGHT, once=True)
    try:
        if stages.find_earlier_launch(record.launches, BENCHMARK, [host], 0):
            print_progress("the benchmarks have already finished: nothing is measured again")
            return
        count = len(run.host.devices)
        devices = f"{count} process{'' if count == 1 else 'es'} on CPUs" if plan.rehearsal else counted(count, "GPU")
        print_progress(f"run {plan.run_id}: {plan.profile} on {devices} of {host}, {estimate_duration(plan, None)}")
        record = stages.run_launch(run, LaunchRequest(stage=planned, members=(host,)))
        for launch in record.launches[-1:]:
            print_progress(f"stage {launch.stage}: {launch.outcome} {launch.reason}".rstrip())
    finally:
        documents.write_text(RunDirectory(directory).record(host), run.path().read_text(encoding="utf-8"))


def _run_study(directory: Path, document: Mapping[str, Any]) -> None:
    """Measure those cells of a scaling study that need only one host. A cell is one combination of settings.

    A cell whose launch is in the record is not measured again.

    Raises:
        RunError: a cell was launched, but its record in the run directory is rejected, so the cell would be launched forever.
    """
    plan = plan_from_json(document)
    host, cells = plan.hosts[0].name, plan.study.cells if plan.study else ()
    run = stages.start_run(directory / HOST_DIRECTORY, host, json.dumps(document))
    stages.record_snapshot(run, PREFLIGHT, once=True)
    records = {gang: run.path(gang) for gang in ("", STUDIED)}
    while True:
        for gang, path in records.items():
            if path.exists():
                documents.write_text(RunDirectory(directory).record(host, gang), path.read_text(encoding="utf-8"))
        launches = next_cell(plan, load(directory, only_gangs=True, study=True).evidence, {host}).launches
        if not launches:
            return
        number = launches[0].number
        if any((launch.stage, launch.number) == (CELL, number) for launch in run.record(STUDIED).launches):
            raise RunError(
                f"{run.path(STUDIED)} has cell {number}, but its copy in {directory} is rejected: choose another --run-dir"
            )
        print_progress(f"cell {number} of {len(cells)}: {json.dumps(to_json(cells[number - 1]))}")
        cell = run.for_cell(number)
        request = LaunchRequest(stage=cell.plan.stage(CELL), members=(host,), number=number)
        record = stages.run_launch(cell, request)
        print_progress(f"cell {number}: {record.launches[-1].outcome} {record.launches[-1].reason}".rstrip())


def _run_verb(verb: str, options: argparse.Namespace) -> int:
    """Run another verb on the run directory."""
    from rackproof.main import main

    return main([verb, str(options.run_dir), *(["--json"] if options.json else [])])
