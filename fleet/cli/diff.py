"""`rackproof diff`: arguments to calls."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

from fleet.criteria_lint.checked_packs import checked_packs
from fleet.diff.against_baseline import criteria_of
from fleet.diff.comparison import compare
from fleet.records import baseline_store
from fleet.records.host_state import Sight, accepted, sight, together
from fleet.records.load import Run, load
from fleet.report import changes as shown
from fleet.report.markup import code
from schemas.baselines import REAL
from schemas.errors import RunError, UsageError
from schemas.records import to_json
from schemas.run_directory import is_run

SAME, DIFFERS, TROUBLE = 0, 1, 2

Parser = argparse.ArgumentParser
Verbs = argparse._SubParsersAction


def add_diff(verbs: Verbs[Parser]) -> Parser:
    """Add diff to the command."""
    parser = verbs.add_parser(
        "diff",
        help="what is not as it was: parts, versions, figures beyond noise; exits 0 none, 1 regressed or a part differs, "
        "2 cannot compare, or not all that was known before",
        description="Compares the last run named with those before it, or with a directory of baselines. Of several earlier runs "
        "the figures are settled, and their spread from run to run is the noise.",
        epilog="examples: rackproof diff runs/before runs/after; rackproof diff runs/a runs/b runs/c runs/after --json; "
        "rackproof diff baselines runs/after --markdown",
    )
    parser.add_argument(
        "places", nargs="+", metavar="RUN", help="earlier runs (or a directory of baselines), and the new run last"
    )
    parser.add_argument("--criteria", action="append", default=[], help="one more pack: a name or a .yml file")
    parser.add_argument("--all", action="store_true", help="also what improved, and what nobody judges")
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="print it as JSON")
    form.add_argument("--markdown", action="store_true", help="print it as Markdown")
    return parser


def diff(options: argparse.Namespace) -> int:
    """Run the verb."""
    if len(options.places) < 2:
        raise UsageError("diff: name an earlier run, or a directory of baselines, and the new run")
    *earlier, last = (Path(name) for name in options.places)
    run = load(last)
    new = {host: sight(left) for host, left in run.evidence.items()}
    old, what = _earlier(earlier, run)
    chosen = checked_packs([*run.plan.criteria, *options.criteria])
    criteria = {host.name: criteria_of(run.plan, host, run.evidence[host.name], chosen) for host in run.plan.hosts}
    comparison = compare(old, new, criteria)
    hosts, count = comparison.hosts, comparison.compared
    if not count:
        raise RunError(
            f"{last}: nothing of it can be compared with {what}: no host, part and figure in common. Name runs of the same hosts"
        )
    found = comparison.changes()
    facts = [
        f"old: {what}",
        f"new: run {code(run.plan.run_id)}, profile {code(run.plan.profile)}",
        f"compared: {hosts} hosts, {count} of {comparison.figures} figures",
    ]
    kind = baseline_store.kind_of(run.plan)
    mark = "" if kind == REAL else kind
    if options.json:
        document = {
            "old": [str(place) for place in earlier],
            "new": run.plan.run_id,
            "rehearsal": run.plan.rehearsal,
            "simulated": run.plan.simulated,
            "hosts": hosts,
            "figures": count,
            "figures_measured": comparison.figures,
            "counts": {
                kind: sum(item.kind == kind for item in found) for kind in dict.fromkeys(item.kind for item in found)
            },
            "changes": [to_json(item) for item in found],
        }
        print(json.dumps(document, indent=1))
    elif options.markdown:
        print(shown.markdown(f"{mark.upper()} Changes".strip(), facts, found), end="")
    else:
        head = f"{mark.upper()}: no GPU was looked at\n" if mark else ""
        many = f"{hosts} hosts, {count} of {comparison.figures} figures compared"
        print(f"{head}{what} → {run.plan.run_id}: {many}: {shown.counts(found)}")
        first = shown.text([item for item in found if item.counts or item.untold], everything=True)
        rest = shown.text([item for item in found if not item.counts and not item.untold], everything=options.all)
        for text in filter(None, (first, rest)):
            print(text)
    if any(item.counts for item in found):
        return DIFFERS
    return TROUBLE if any(item.untold for item in found) else SAME


def _earlier(places: Sequence[Path], run: Run) -> tuple[dict[str, Sight], str]:
    """What the hosts showed before, and how that is called."""
    kind = baseline_store.kind_of(run.plan)
    if not is_run(places[0]) and baseline_store.room(places[0], kind).is_dir() and len(places) == 1:
        left = {
            host.name: baseline_store.of_host(places[0], kind, host.name, run.evidence[host.name].gpus())
            for host in run.plan.hosts
        }
        for problem in (found.problem for found in left.values() if found.problem):
            raise RunError(f"{problem}: remove it, or accept a run of that part again")
        return {host: accepted(found) for host, found in left.items()}, f"baseline {places[0]}"
    runs = [load(place) for place in places]
    seen = {run.plan.nonce}
    for before in runs:
        if baseline_store.kind_of(before.plan) != kind:
            raise RunError(
                f"run {before.plan.run_id} is of another kind ({baseline_store.kind_of(before.plan)}) than the new run ({kind})"
            )
        if before.plan.nonce in seen:
            raise UsageError(f"run {before.plan.run_id} is given twice: it would seem to repeat itself perfectly")
        seen.add(before.plan.nonce)
    hosts = dict.fromkeys(host for before in runs for host in before.evidence)
    old = {
        host: together([sight(before.evidence[host]) for before in runs if host in before.evidence]) for host in hosts
    }
    names = ", ".join(before.plan.run_id for before in runs)
    return old, f"run {names}" if len(runs) == 1 else f"runs {names}"
