"""`rackproof gangs`: print the next launches of each gang (the hosts of one multi-node launch)."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from fleet.criteria_lint.checked_packs import checked_packs
from fleet.planning.next_launch import MIN_HOSTS, Decision, decide, hosts_missing_launch
from fleet.records.load import load
from fleet.scaling.results import next_cell
from schemas import documents
from schemas.errors import UsageError
from schemas.run_directory import RunDirectory


def add_verb(verbs: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add gangs to the command."""
    gangs = verbs.add_parser(
        "gangs",
        help="decide from the records of the multi-node launches so far which hosts of a run launch together next",
        epilog="example: rackproof gangs --run-dir runs/20261121T040000Z --hosts r12-h01,r12-h02,r12-h03",
    )
    gangs.add_argument("--run-dir", type=Path, required=True, help="directory of the run on the control node")
    gangs.add_argument(
        "--hosts",
        default="",
        help="reachable hosts, comma-separated; - reads them from stdin (default: all planned hosts)",
    )
    gangs.add_argument(
        "--minimum",
        type=int,
        default=MIN_HOSTS,
        help="smallest number of hosts in a launch (default: 2); a launch that searches for a faulty host may have fewer",
    )
    gangs.add_argument(
        "--await",
        dest="awaiting",
        action="store_true",
        help="for the first call of a playbook: if hosts have not recorded a launch that another host has recorded, print these "
        "hosts (awaited hosts) and no launch. Their launch may still be running: fetch their records again",
    )
    gangs.add_argument(
        "--json",
        action="store_true",
        help="print as JSON: the launches, the launch of each host, the excluded hosts with reasons, and the awaited hosts",
    )
    gangs.set_defaults(call=call)


def call(options: argparse.Namespace) -> int:
    """Run the verb."""
    run = load(options.run_dir, only_gangs=True, study=True)
    names = sys.stdin.read() if options.hosts == "-" else options.hosts
    present = set(names.replace(",", " ").split()) if options.hosts else {host.name for host in run.plan.hosts}
    planned = [host.name for host in run.plan.hosts]
    if unknown := sorted(present.difference(planned)):
        raise UsageError(
            f"--hosts: {unknown[0]} is not in the plan of run {run.plan.run_id}{documents.nearest(unknown[0], planned)}: "
            "give names from the plan, comma-separated"
        )
    if options.awaiting and (awaited := hosts_missing_launch(run.evidence, present)):
        decision = Decision(launches=(), excluded={}, awaited=awaited)
    elif run.plan.study:
        decision = next_cell(run.plan, run.evidence, present)
    else:
        decision = decide(
            run.plan, run.evidence, checked_packs(run.plan.criteria), present=present, minimum=options.minimum
        )
    # The directory gangs/NAME marks a gang that may have launched. A playbook that resumes the run fetches the records of all
    # marked gangs before it calls this verb.
    for launch in decision.launches:
        RunDirectory(options.run_dir).record("", launch.gang).parent.mkdir(parents=True, exist_ok=True)
    if options.json:
        print(json.dumps(decision.document()))
        return 0
    otherwise = "nothing left to launch"
    if decision.awaited:
        otherwise = f"nothing to launch yet: first fetch the gang records of {', '.join(decision.awaited)} again"
    print("\n".join(map(str, decision.launches)) or otherwise)
    for host, why in decision.excluded.items():
        print(f"{host}: last launch failed: {why}")
    return 0
