"""`rackproof diff`: compare the parts, versions and figures of runs."""

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.table import Table
from rich.text import Text

from fleet.baseline.compare import RunComparison, compare_runs
from fleet.quantities import counted
from fleet.records import baseline_store
from fleet.records.newest import newest_two
from fleet.report.changes import changes_blocks, changes_page, count_by_kind
from fleet.report.markup import code
from fleet.report.terminal import add_color_option, has_colour, render_blocks, width_of
from schemas.baselines import REAL, Change
from schemas.errors import UsageError
from schemas.records import to_json

SAME, DIFFERS, UNKNOWN = 0, 1, 2
"""Exit codes; a run differs if a figure regressed or a part changed."""


def add_verb(verbs: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add diff to the command."""
    parser = verbs.add_parser(
        "diff",
        help="compare runs: parts, versions, and figures that changed by more than their noise; "
        "exits 0 if no figure regressed and no part changed, 1 if one did, 2 if the runs are not comparable, an earlier "
        "figure was not measured again, or it is unclear whether a figure or part changed",
        description="Compares the run that is given last with the runs given before it, or with a directory of baselines. "
        "If several earlier runs are given, a figure is compared with the median of its values in them. The spread of these "
        "values is the noise of the figure.",
        epilog="examples: rackproof diff; rackproof diff runs/before runs/after; rackproof diff runs/a runs/b runs/c runs/after "
        "--json; rackproof diff baselines runs/after --markdown",
    )
    parser.add_argument(
        "runs",
        nargs="*",
        type=Path,
        metavar="RUN",
        help="earlier runs (or a directory of baselines), and the new run last (default: the two newest runs of the same "
        "hosts in runs/)",
    )
    parser.add_argument(
        "--criteria", action="append", default=[], help="additional criteria pack (its name or a .yml file)"
    )
    parser.add_argument(
        "--all",
        action="store_true",
        help="also show improvements, new figures, and changes that are neither better nor worse",
    )
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="print the changes as JSON")
    form.add_argument("--markdown", action="store_true", help="print the changes as Markdown")
    add_color_option(parser)
    parser.set_defaults(call=call)


def call(options: argparse.Namespace) -> int:
    """Run the verb."""
    if len(options.runs) == 1:
        raise UsageError("diff: give an earlier run, or a directory of baselines, and the new run")
    *earlier, last = options.runs or newest_two()
    compared = compare_runs(earlier, last, options.criteria)
    changes = compared.comparison.changes()
    if options.json:
        print(json.dumps(_document(compared, earlier, changes), indent=1))
    elif options.markdown:
        print(_markdown(compared, changes), end="")
    else:
        blocks = _blocks(compared, changes, everything=options.all)
        print(render_blocks(blocks, width=width_of(), colour=has_colour(options.color)))
    if any(change.counts for change in changes):
        return DIFFERS
    return UNKNOWN if any(change.is_unreported for change in changes) else SAME


def _document(compared: RunComparison, earlier: Sequence[Path], changes: Sequence[Change]) -> dict[str, Any]:
    plan, comparison = compared.run.plan, compared.comparison
    return {
        "old": [str(path) for path in earlier],
        "new": plan.run_id,
        "rehearsal": plan.rehearsal,
        "simulated": plan.simulated,
        "hosts": comparison.hosts,
        "figures": comparison.compared,
        "figures_measured": comparison.figures,
        "counts": dict(Counter(change.kind for change in changes)),
        "changes": [to_json(change) for change in changes],
    }


def _mark(compared: RunComparison) -> str:
    kind = baseline_store.kind_of(compared.run.plan)
    return "" if kind == REAL else kind.upper()


def _markdown(compared: RunComparison, changes: Sequence[Change]) -> str:
    plan, comparison = compared.run.plan, compared.comparison
    facts = [
        f"old: {compared.earlier}",
        f"new: run {code(plan.run_id)}, profile {code(plan.profile)}",
        f"compared: {counted(comparison.hosts, 'host')}, {comparison.compared} of {comparison.figures} figures",
    ]
    return changes_page(f"{_mark(compared)} Changes".strip(), facts, changes)


def _blocks(compared: RunComparison, changes: Sequence[Change], *, everything: bool) -> list[Table | Text]:
    plan, comparison, mark = compared.run.plan, compared.comparison, _mark(compared)
    counts = f"{counted(comparison.hosts, 'host')}, {comparison.compared} of {comparison.figures} figures compared"
    return [
        *([Text(f"{mark}: no GPU was measured")] if mark else []),
        Text(f"{compared.earlier} → {plan.run_id}: {counts}: {count_by_kind(changes)}"),
        *changes_blocks(changes, everything=everything),
    ]
