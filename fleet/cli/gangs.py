"""`rackproof gangs`: arguments to calls."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from fleet.criteria_lint.checked_packs import checked_packs
from fleet.planning.next_launch import FEWEST, Decision, decide, untold
from fleet.records.load import load
from fleet.scaling.outcome import next_cell
from schemas import documents
from schemas.errors import UsageError


def add_verb(verbs: argparse._SubParsersAction[argparse.ArgumentParser]) -> argparse.ArgumentParser:
    """Adds gangs to the command."""
    gangs = verbs.add_parser(
        "gangs",
        help="from the gang records fetched so far: which hosts of a run launch together next; none when all is done",
        epilog="example: rackproof gangs --run-dir runs/20261121T040000Z --hosts r12-h01,r12-h02,r12-h03",
    )
    gangs.add_argument("--run-dir", type=Path, required=True, help="directory of the run on the control node")
    gangs.add_argument(
        "--hosts", default="", help="those that can be reached, comma between them; - reads them (default: all planned)"
    )
    gangs.add_argument("--minimum", type=int, default=FEWEST, help="fewest hosts that launch together (default: 2)")
    gangs.add_argument(
        "--await",
        dest="awaiting",
        action="store_true",
        help="the first time: hosts that have no word of a launch that others tell of are waited for, and nothing launches",
    )
    gangs.add_argument(
        "--json",
        action="store_true",
        help="for programs: launches, which of them is each host's, who left and why, and who is awaited",
    )
    return gangs


def call(options: argparse.Namespace) -> int:
    """Runs the verb."""
    run = load(options.run_dir, alone=False, study=True)
    named = sys.stdin.read() if options.hosts == "-" else options.hosts
    present = set(named.replace(",", " ").split()) if options.hosts else {host.name for host in run.plan.hosts}
    planned = [host.name for host in run.plan.hosts]
    if unknown := sorted(present.difference(planned)):
        raise UsageError(
            f"--hosts: {unknown[0]} is not in the plan of run {run.plan.run_id}{documents.nearest(unknown[0], planned)}: "
            "give names that the plan has, comma between them"
        )
    if options.awaiting and (awaited := untold(run.evidence, present)):
        found = Decision(starts=(), left={}, awaited=awaited)
    elif run.plan.study:
        found = next_cell(run.plan, run.evidence, present)
    else:
        found = decide(
            run.plan, run.evidence, checked_packs(run.plan.criteria), present=present, minimum=options.minimum
        )
    for start in found.starts:  # where this is, whoever goes on after us looks for records first
        (options.run_dir / "gangs" / start.gang).mkdir(parents=True, exist_ok=True)
    if options.json:
        print(json.dumps(found.document()))
        return 0
    waits = f"first wait for {', '.join(found.awaited)}" if found.awaited else "nothing is left to launch"
    print("\n".join(map(str, found.starts)) or waits)
    for host, why in found.left.items():
        print(f"{host}: {why}")
    return 0
