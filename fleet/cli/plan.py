"""`rackproof plan`: arguments to calls."""

from __future__ import annotations

import argparse
import json
import secrets
import sys
from datetime import UTC, datetime
from pathlib import Path

from fleet.criteria_lint.checked_packs import checked_packs
from fleet.inventory import command_line
from fleet.inventory.ansible import Variables, check_addresses, check_variables, hosts_of, read_inventory
from fleet.inventory.manifest_file import read_manifest
from fleet.inventory.waivers_file import read_waivers
from fleet.judge.criteria import shipped_packs
from fleet.planning.begin import begin
from fleet.planning.history import apply_budget
from fleet.planning.plan import make_plan, read_profile
from fleet.planning.test_selection import refuse_budget, table
from fleet.records.baseline_store import planned
from schemas import documents
from schemas.errors import UsageError
from schemas.records import to_json

YES = ("true", "yes", "on", "1")
"""What `-e name=value` on the command line makes of true: text."""


def add_verb(verbs: argparse._SubParsersAction[argparse.ArgumentParser]) -> argparse.ArgumentParser:
    """Add plan to the command."""
    plan = verbs.add_parser(
        "plan",
        help="inventory and profile to the observations that must exist; exits 75 where another carries out the run",
        epilog="examples: rackproof plan -i inventory/rack12 --profile smoke; "
        "rackproof plan --hosts n1,n2 --gpus 8 --run-dir runs/r1",
    )
    plan.add_argument(
        "-i",
        "--inventory",
        action="append",
        default=[],
        help="as for ansible-playbook; may be repeated; - reads what `ansible-inventory --list` prints",
    )
    command_line.add_options(plan)
    plan.add_argument("--profile", help="profile (default: the inventory's rackproof_profile, else standard)")
    plan.add_argument("--run-dir", type=Path, help="begin a run in this directory; its name is the run id")
    plan.add_argument(
        "--budget",
        help="seconds a host; what does not fit is left out (default: rackproof_budget_s; revalidation profiles only)",
    )
    plan.add_argument(
        "--history", type=Path, help="directory of earlier runs, by which is chosen (default: of --run-dir)"
    )
    plan.add_argument("--json", action="store_true", help="print the whole plan")
    return plan


def call(options: argparse.Namespace) -> int:
    """Run the verb."""
    if bool(options.inventory) == bool(options.hosts):
        raise UsageError(
            "give the hosts to plan for: either -i with an inventory or --hosts with their names, and not both"
        )
    hosts = command_line.hosts_listed(options) if options.hosts else _hosts(options.inventory)
    first = next(iter(hosts.values()))
    profile = read_profile(options.profile or str(first.get("rackproof_profile", "standard")))
    checked_packs(first.get("rackproof_criteria", ()))
    for name, variables in hosts.items():
        model = variables.get("rackproof_gpu_model", "")
        if model and model not in shipped_packs():
            raise UsageError(
                f"host {name}: rackproof_gpu_model {model} is unknown{documents.nearest(model, shipped_packs())}: "
                f"there are {', '.join(shipped_packs())}"
            )
    named = first.get("rackproof_manifest")
    manifest = read_manifest(named, hosts) if named else ()
    now = datetime.now(UTC)
    budget = options.budget or first.get("rackproof_budget_s")
    refuse_budget(profile, budget)
    chosen, choice = apply_budget(
        profile,
        hosts,
        budget=budget,
        runs=options.history or (options.run_dir.parent if options.run_dir else None),
        run_dir=options.run_dir,
        now=now.strftime("%Y-%m-%dT%H:%M:%SZ"),
    )
    run_id = options.run_dir.name if options.run_dir else now.strftime("%Y%m%dT%H%M%SZ")
    plan = make_plan(
        chosen,
        hosts,
        run_id=run_id,
        nonce=secrets.token_hex(16),
        created=now.strftime("%Y-%m-%dT%H:%M:%SZ"),
        manifest=manifest,
        choice=choice,
        waivers=read_waivers(waived, hosts) if (waived := first.get("rackproof_waivers")) else (),
        baseline=planned(first.get("rackproof_baseline"), profile["device"] == "cpu", hosts, options.run_dir),
    )
    document = to_json(plan)
    if options.run_dir:
        take_over = str(first.get("rackproof_take_over", False)).lower() in YES
        document = begin(options.run_dir, json.loads(json.dumps(document)), take_over)
    if options.json:
        print(json.dumps(document, indent=1))
        return 0
    expected = sum(len(plan.scopes_of(host, item)) for host in plan.hosts for item in plan.expected_of(host))
    print(
        f"run {document['run_id']}: profile {plan.profile}, {len(plan.hosts)} hosts, "
        f"{sum(len(host.devices) for host in plan.hosts)} {plan.hosts[0].device} devices, "
        + (f"a study of {len(plan.study.cells)} cells" if plan.study else f"{expected} observations expected")
        + (f", {len(plan.manifest)} parts ordered" if plan.manifest else "")
    )
    if plan.choice:
        print(table(plan.choice))
    return 0


def _hosts(sources: list[str]) -> dict[str, Variables]:
    """The hosts of an inventory, or of the listing on standard input."""
    if sources != ["-"]:
        return read_inventory(sources)
    try:
        listing = documents.parse(sys.stdin.read(), source="the inventory", max_bytes=200_000_000)
    except documents.DocumentError as error:
        raise UsageError(str(error)) from None
    hosts = hosts_of(listing)
    check_variables(hosts)
    check_addresses(hosts)
    return hosts
