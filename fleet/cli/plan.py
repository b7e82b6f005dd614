"""`rackproof plan`: derive from inventory and profile what a run must measure on each host."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

from fleet.history.former_tests import former_tests, is_history
from fleet.inventory import command_line
from fleet.inventory.ansible import Variables, check_listing, read_inventory
from fleet.planning.begin import begin
from fleet.planning.duration import earlier_durations, estimate_duration, past_run
from fleet.planning.plan_run import PlanRequest, plan_run
from fleet.planning.playbook_profiles import PLAYBOOKS
from fleet.planning.test_selection import PastRun, selection_table
from fleet.quantities import counted
from fleet.records import run_lock
from fleet.records.newest import RUNS
from schemas import documents
from schemas.errors import UsageError
from schemas.plans import Plan
from schemas.records import to_json


def add_verb(verbs: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add plan to the command."""
    plan = verbs.add_parser(
        "plan",
        help="derive from inventory and profile what a run must measure on each host, and estimate the time; "
        "exits 75 if the run is locked",
        epilog="examples: rackproof plan -i inventory/rack12 --profile smoke; "
        "rackproof plan --hosts n1,n2 --gpus 8 --run-dir runs/r1",
    )
    plan.add_argument(
        "-i",
        "--inventory",
        action="append",
        default=[],
        help="as for ansible-playbook; may be repeated; - reads the output of `ansible-inventory --list` from standard input",
    )
    command_line.add_options(plan)
    plan.add_argument("--profile", help="profile (default: the inventory's rackproof_profile, else standard)")
    plan.add_argument(
        "--playbook",
        choices=PLAYBOOKS,
        help="refuse a profile that this playbook does not run (the playbook gives this option)",
    )
    plan.add_argument(
        "--only-check",
        action="store_true",
        help="only check the variables of the inventory, for teardown.yml: make no plan and lock no run; print the claim "
        "(JSON) that identifies the playbook to the hosts",
    )
    plan.add_argument("--run-dir", type=Path, help="begin or resume a run in this directory, whose name is the run id")
    plan.add_argument(
        "--budget",
        help="seconds per host, only for profiles with `may_choose: true`, such as revalidate: tests that do not fit are skipped "
        "(default: rackproof_budget_s)",
    )
    plan.add_argument(
        "--history",
        type=Path,
        help="earlier runs from which --budget derives the tests to skip: a history of the fleet, or a directory of runs "
        "(default: the inventory's rackproof_history, else the parent of --run-dir)",
    )
    plan.add_argument("--json", action="store_true", help="print the whole plan")
    plan.set_defaults(call=call)


def call(options: argparse.Namespace) -> int:
    """Run the verb."""
    if bool(options.inventory) == bool(options.hosts):
        raise UsageError("give the hosts to plan for: either -i with an inventory, or --hosts with their names")
    if options.inventory:
        command_line.refuse_with_inventory(options)
    hosts = command_line.hosts_of_options(options) if options.hosts else _hosts(options.inventory)
    directory = options.run_dir
    if options.only_check:
        if directory is None:
            raise UsageError("--only-check without --run-dir: the claim names a run")
        take_over = bool(next(iter(hosts.values())).get("rackproof_take_over", False))
        print(json.dumps(run_lock.unlocked_claim(directory, take_over=take_over)))
        return 0
    store, runs = _earlier_runs(options.history, next(iter(hosts.values())))
    request = PlanRequest(
        profile=options.profile,
        budget=options.budget,
        history=runs,
        stored=partial(_stored_runs, store) if store else None,
        run_dir=directory,
        playbook=options.playbook,
    )
    plan = plan_run(hosts, request, datetime.now(UTC))
    runs = runs or (directory.parent if directory else RUNS)
    past = None if plan.study else past_run(plan, runs, directory)
    plan = replace(plan, durations_s=earlier_durations(plan, past))
    document = to_json(plan)
    if directory:
        take_over = bool(next(iter(hosts.values())).get("rackproof_take_over", False))
        document = begin(directory, json.loads(json.dumps(document)), take_over)
    if options.json:
        print(json.dumps(document, indent=1))
        return 0
    print(f"run {document['run_id']}: {_summary(plan)}")
    if not plan.study:
        print(f"time: {estimate_duration(plan, past)}")
    if plan.choice:
        print(selection_table(plan.choice))
    return 0


def _earlier_runs(option: Path | None, variables: Variables) -> tuple[Path | None, Path | None]:
    """Return the history of the fleet and the directory of earlier runs. At least one of the two is None.

    `--history` names either of them. Without this option, the variable rackproof_history may name a history.
    """
    if option is None:
        store = str(variables.get("rackproof_history") or "")
        return (Path(store) if store else None), None
    return (option, None) if is_history(option) else (None, option)


def _stored_runs(store: Path, hosts: set[str], rehearsal: bool) -> Sequence[PastRun]:
    runs, warning = former_tests(store, hosts, rehearsal=rehearsal)
    if warning:
        print(warning, file=sys.stderr)
    return runs


def _summary(plan: Plan) -> str:
    expected = sum(len(plan.scopes_of(host, item)) for host in plan.hosts for item in plan.expected_of(host))
    return (
        f"profile {plan.profile}, {counted(len(plan.hosts), 'host')}, "
        f"{counted(sum(len(host.devices) for host in plan.hosts), f'{plan.hosts[0].device} device')}, "
        + (
            f"a study of {counted(len(plan.study.cells), 'cell')}"
            if plan.study
            else f"{counted(expected, 'observation')} expected"
        )
        + (f", {counted(len(plan.manifest), 'line')} in the manifest" if plan.manifest else "")
    )


def _hosts(sources: list[str]) -> dict[str, Variables]:
    """Return host -> its variables, from inventories or, if `sources` is `["-"]`, from the JSON listing on standard input."""
    if sources != ["-"]:
        return read_inventory(sources)
    try:
        listing = documents.parse(sys.stdin.read(), source="the inventory", max_bytes=200_000_000)
    except documents.DocumentError as error:
        raise UsageError(str(error)) from None
    return check_listing(listing)
