"""The verb `inspect`: take a snapshot of this host."""

from __future__ import annotations

import argparse
import json
import sys

from agent.cli.common import fail
from agent.cli.stages import print_record
from agent.launch import stage as stages
from agent.run import lease
from agent.run.record import HostRun, read_plan_text, run_directory
from agent.sampling.snapshot import collect
from collectors.base import Absent, scope
from collectors.table import build_collectors
from schemas.errors import HeldError


def add_verb(verbs: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add inspect to the command."""
    parser = verbs.add_parser(
        "inspect",
        help="take a snapshot of this host; with --plan, begin the run first. Exits 75 if another run holds this host",
        epilog="example: rackproof inspect --json",
    )
    parser.add_argument("--run-dir", type=run_directory, help="add the snapshot to the record of this run")
    parser.add_argument("--host", help="this host's name in the plan; required with --run-dir")
    parser.add_argument("--plan", help="plan.json of the run to begin; - reads it from standard input")
    parser.add_argument(
        "--claim", help="content of lock.json in the run directory on the control node; it identifies the operator"
    )
    parser.add_argument(
        "--take-over", action="store_true", help="end another run that holds this host, and take the host"
    )
    parser.add_argument("--stage", default="preflight", help="stage that the snapshot belongs to (default: preflight)")
    parser.add_argument(
        "--json",
        action="store_true",
        help="print as JSON: the readings, or with --run-dir the host's number of observations and its launches",
    )
    parser.set_defaults(call=_inspect)


def _inspect(options: argparse.Namespace) -> int:
    if options.run_dir is None:
        values = {"--plan": options.plan, "--host": options.host, "--claim": options.claim}
        given = [f"{name} {value}" for name, value in values.items() if value]
        given += ["--take-over"] if options.take_over else []
        if given:
            return fail(
                f"{given[0]} without --run-dir: add --run-dir, or omit {given[0].split()[0]} for a snapshot only"
            )
        return _print_snapshot(as_json=options.json)
    if not options.host:
        return fail("--host is missing: give this host's name in the plan")
    if options.plan:
        plan = read_plan_text(options.plan)
        try:
            run = stages.start_run(
                options.run_dir, options.host, plan, claim=options.claim, take_over=options.take_over
            )
        except HeldError as held:
            return fail(str(held), lease.HELD)
    else:
        run = HostRun(options.run_dir, options.host)
    record = stages.record_snapshot(run, options.stage, once=bool(options.plan))
    print_record(record, as_json=options.json)
    return 0


def _print_snapshot(*, as_json: bool) -> int:
    families, outcomes = collect(build_collectors(full_snapshot=True))
    readings = [
        {"name": family.name, "unit": family.unit, "scope": scope(labels)}
        | ({"status": value.status, "reason": value.reason} if isinstance(value, Absent) else {"value": value})
        for family in families
        for labels, value in family.readings
    ]
    if as_json:
        print(json.dumps({"readings": readings, "collectors": outcomes}, indent=1))
        return 0
    for reading in readings:
        value = reading.get("value", f"{reading.get('status')}: {reading.get('reason')}")
        unit = "" if reading["unit"] == "1" else f" {reading['unit']}"
        print(f"{reading['scope']:<22} {reading['name']:<36} {value}{unit}")
    for name, outcome in outcomes.items():
        if isinstance(outcome, str):
            print(f"collector {name}: {outcome}", file=sys.stderr)
    return 0
