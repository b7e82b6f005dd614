"""`rackproof power`: what a limit can detect, and how often it fails a healthy part."""

from __future__ import annotations

import argparse
import dataclasses
import json
from pathlib import Path

from fleet.criteria_lint.checked_packs import checked_packs
from fleet.judge.power import MIN_RUNS, power
from fleet.records.load import load
from fleet.report.power import render_power
from schemas.errors import UsageError


def add_verb(verbs: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add power to the command."""
    verb = verbs.add_parser(
        "power",
        help="estimate from several runs what each limit detects, and how often it fails a healthy part",
        epilog="example: rackproof power runs/a runs/b runs/c",
    )
    verb.add_argument("run_dirs", type=Path, nargs="+", metavar="run_dir", help="directory of a run; three or more")
    verb.add_argument("--criteria", action="append", default=[], help="an additional pack: a name or a .yml file")
    verb.add_argument("--json", action="store_true", help="print JSON")
    verb.set_defaults(call=call)


def call(options: argparse.Namespace) -> int:
    """Run the verb."""
    if len(options.run_dirs) < MIN_RUNS:
        raise UsageError(
            f"{len(options.run_dirs)} run directories: give at least {MIN_RUNS}; noise cannot be estimated from fewer runs"
        )
    runs = [load(directory) for directory in options.run_dirs]
    packs = checked_packs([*runs[0].plan.criteria, *options.criteria])
    estimate = power([(run.plan, run.evidence) for run in runs], packs)
    simulated = any(run.plan.simulated for run in runs)
    document = {**dataclasses.asdict(estimate), "simulated": simulated}
    head = "SIMULATED: figures come from rackproof simulate, not from hardware\n" if simulated else ""
    print(json.dumps(document, indent=1) if options.json else f"{head}{render_power(estimate)}")
    return 0
