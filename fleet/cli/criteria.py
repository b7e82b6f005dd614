"""`rackproof criteria`: check, list and propose criteria packs, and print them as alert rules.

It also lists the lowest software versions without a published vulnerability.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

from fleet.advisories.rebuild import rebuild
from fleet.cli.modes import call_in_mode
from fleet.criteria_lint.lint import lint
from fleet.history.database import History
from fleet.history.index import DEFAULT, KINDS
from fleet.history.propose import models, pack_text, propose
from fleet.integrations.alerts.rules import PACKS, RUNBOOK, rule_file
from fleet.judge.advisories import shipped_advisories
from fleet.judge.criteria import read_pack, read_packs, shipped_packs
from fleet.judge.power import DETECTION_PROBABILITY, MAX_FALSE_ALARM
from fleet.report.advisories_table import floors_blocks, floors_json
from fleet.report.checks import checks
from fleet.report.criteria_table import criteria_blocks, criteria_of, criterion_json, pack_json, packs_blocks
from fleet.report.terminal import add_color_option, has_colour, render_blocks, width_of
from schemas.baselines import REAL
from schemas.errors import RunError, UsageError


def add_verb(verbs: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add criteria to the command."""
    criteria = verbs.add_parser(
        "criteria",
        help="check criteria packs (exits 0 clean, 1 with findings), list them, propose one from the history, "
        "print them as alert rules; list the lowest software versions without a published vulnerability",
        epilog="examples: rackproof criteria lint my-pack.yml; rackproof criteria list; "
        "rackproof criteria list h200-sxm; rackproof criteria versions; "
        "rackproof criteria propose --model 'NVIDIA H200' > proposed.yml; "
        "rackproof criteria alerts my-pack.yml > /etc/prometheus/rackproof.rules.yml",
    )
    criteria.add_argument(
        "what",
        choices=["lint", "list", "alerts", "versions", "propose"],
        help="lint: check packs against their schema, the catalogue of observations and the datasheets of GPUs; list: print "
        "packs or criteria; alerts: print rules for Prometheus; versions: print the lowest software versions without a published "
        "vulnerability, and the age of the list of vulnerabilities; propose: print a pack with limits from the accepted runs in "
        "the history, for review",
    )
    criteria.add_argument(
        "packs",
        nargs="*",
        help="lint: .yml files to check in addition to the shipped packs; list, alerts: names or .yml files "
        "(list without names: print one row for each shipped pack)",
    )
    criteria.add_argument("--all", action="store_true", help="list: print the criteria of every shipped pack")
    form = criteria.add_mutually_exclusive_group()
    form.add_argument(
        "--json",
        action="store_true",
        help="list, versions: print JSON, which also names the source of each criterion or version",
    )
    form.add_argument(
        "--markdown", action="store_true", help="list: print a Markdown page in the form of docs/checks.md"
    )
    add_color_option(criteria)
    criteria.add_argument("--runbook", default=RUNBOOK,
                          help="alerts: URL of docs/alerts.md, to which each rule links (default: %(default)s)")  # fmt: skip
    criteria.add_argument(
        "--rebuild",
        nargs=2,
        type=Path,
        metavar=("BULLETINS", "OSV"),
        help="versions: print a new list of vulnerabilities, built from checkouts of NVIDIA/product-security and golang/vulndb",
    )
    criteria.add_argument(
        "--history", type=Path, default=DEFAULT, help="propose: directory of the history (default: %(default)s)"
    )
    criteria.add_argument("--kind", choices=KINDS, default=REAL, help="propose: kind of runs (default: %(default)s)")
    criteria.add_argument("--model", default="", help="propose: GPU model, such as 'NVIDIA H200'")
    criteria.add_argument("--power", type=_probability, default=DETECTION_PROBABILITY,
                          help="propose: probability with which a proposed limit finds the loss that is stated in its "
                          "`source` (default: %(default)s)")  # fmt: skip
    criteria.add_argument("--false-alarm", type=_probability, default=MAX_FALSE_ALARM,
                          help="propose: highest probability with which a healthy part fails a proposed limit "
                          "(default: %(default)s)")  # fmt: skip
    modes = {
        "packs": "lint list alerts",
        "all": "list",
        "json": "list versions",
        "markdown": "list",
        "runbook": "alerts",
        "rebuild": "versions",
        **dict.fromkeys(("history", "kind", "model", "power", "false_alarm"), "propose"),
    }
    criteria.set_defaults(call=call_in_mode(call, criteria, modes))


def _probability(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a number between 0 and 1")
    return value


def call(options: argparse.Namespace) -> int:
    """Run the verb."""
    if options.what == "list":
        return _list(options)
    if options.what == "versions":
        return _versions(options)
    if options.what == "propose":
        return _propose(options)
    if options.what == "alerts":
        shipped = shipped_packs()
        named = [pack for pack in read_packs(options.packs) if pack.chosen]
        # `read_packs` has marked all named packs as `chosen`. Remove this mark from shipped packs: their criteria override those
        # of PACKS with the same id. A criterion of any other pack must have `replaces` to override one.
        named = [replace(pack, chosen=pack.name not in shipped) for pack in named]
        print(rule_file([*map(read_pack, PACKS), *named], options.runbook), end="")
        return 0
    packs = [read_pack(name) for name in (*shipped_packs(), *options.packs)]
    # `read_packs` refuses a criterion that has the id of an earlier criterion but no `replaces`. Packs of GPU models are not
    # checked in this way, because packs of different models use the same ids.
    read_packs([name for name in options.packs if not read_pack(name).gpu_names])
    findings = dict.fromkeys(finding for pack in packs for finding in lint(pack))
    for finding in findings:
        print(finding)
    checked = len({(item.origin, item.id) for pack in packs for item in pack.criteria})
    if not findings:
        print(f"{len(packs)} packs with {checked} criteria: no findings")
    return 1 if findings else 0


def _propose(options: argparse.Namespace) -> int:
    """Print a pack for a GPU model, with limits derived from the figures in the history."""
    history = History(options.history, options.kind)
    for problem in history.problems:
        print(f"rackproof: {problem}", file=sys.stderr)
    known = list(models(history))
    if options.model not in known:
        raise UsageError(
            f"criteria propose --model {options.model!r}: no accepted host in {options.history} has this model: "
            f"{'give one of ' + ', '.join(known) if known else 'first add accepted runs with rackproof history import'}"
        )
    proposal = propose(history, options.model, power=options.power, false_alarm=options.false_alarm)
    if not proposal.floors:
        raise RunError(
            f"no limit can be proposed for {options.model}: {'; '.join(proposal.left_out[:3]) or 'no figures'}"
        )
    print(pack_text(proposal), end="")
    return 0


def _versions(options: argparse.Namespace) -> int:
    """Print the lowest versions without a published vulnerability; with `--rebuild`, print a new list of advisories instead."""
    if options.rebuild:
        print(rebuild(*options.rebuild), end="")
        return 0
    now, advisories = datetime.now(UTC).isoformat(), shipped_advisories()
    if options.json:
        print(json.dumps(floors_json(advisories, now), indent=1))
    else:
        blocks = floors_blocks(advisories, now)
        print(render_blocks(blocks, width=width_of(), colour=has_colour(options.color)))
    return 0


def _list(options: argparse.Namespace) -> int:
    """Print one row for each shipped pack; with pack names or `--all`, print the criteria of these packs instead."""
    names = [*(shipped_packs() if options.all else ()), *options.packs]
    packs = [read_pack(name) for name in names or shipped_packs()]
    if options.markdown:
        print(checks(packs), end="")
    elif options.json:
        items = [criterion_json(item) for item in criteria_of(packs)] if names else [pack_json(pack) for pack in packs]
        print(json.dumps(items, indent=1))
    else:
        blocks = criteria_blocks(packs) if names else packs_blocks(packs)
        print(render_blocks(blocks, width=width_of(), colour=has_colour(options.color)))
    return 0
