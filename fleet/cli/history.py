"""`rackproof history`: add runs to the history of the fleet, and query it."""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections import Counter
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from fleet.cli.history_output import print_answer, print_rows
from fleet.cli.modes import call_in_mode
from fleet.history.answer import Answer
from fleet.history.clocks import clock_notes
from fleet.history.database import History, no_history
from fleet.history.figure import Selection, figure_answer
from fleet.history.imports import import_output
from fleet.history.index import DEFAULT, KINDS, home, read_index
from fleet.history.part import part_answer
from fleet.history.racks import racks_answer
from fleet.history.repeated import drivers_answer, lemons_answer
from fleet.history.rows import run_rows, timestamp
from fleet.history.store import add_run, merge_runs
from fleet.progress import progress_bar
from fleet.quantities import counted
from fleet.records import run_lock
from fleet.report.judge_run import judge_run
from fleet.report.terminal import add_color_option
from fleet.report.workers import gc_off
from schemas import documents
from schemas.baselines import REAL
from schemas.errors import TROUBLE, RackproofError, UsageError

PAGE = "history.html"
WHAT = ("import", "merge", "part", "figure", "lemons", "drivers", "racks", "page", "metrics", "sql")


def add_verb(verbs: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add history to the command."""
    verb = verbs.add_parser(
        "history",
        help="query the figures and causes of failures of all runs: add runs, follow a part, compare a figure, find what fails "
        "repeatedly or drifts; "
        "exits 0, or 2 if a run could not be added",
        epilog="examples: rackproof history import runs/*; rackproof history part 1652826070058; "
        "rackproof history figure gemm.throughput --settings dtype=bf16 --value 7.1e14; rackproof history lemons; "
        'rackproof history sql "select host, count(*) from causes group by host"',
    )
    verb.add_argument(
        "what",
        choices=WHAT,
        help="import: add run directories, or outputs of nccl-tests, nvbandwidth, DCGM and SuperBench; "
        "merge: merge the files of single runs into one file for each month; part: where a part (by its serial) or a host was, "
        "its figures, failures and repairs; figure: distribution of a figure; lemons: parts, hosts and racks that fail "
        "repeatedly or whose figures drift; drivers: figures that changed with the GPU driver; racks: a row for each rack; page: "
        "write an HTML page about the last months; metrics: print the newest state of each rack as OpenMetrics, or write it to "
        "a file; sql: print the result of one SELECT",
    )
    verb.add_argument(
        "names",
        nargs="*",
        metavar="NAME",
        help="import: run directories, or outputs of other tools; part: a serial or host; figure: the name of a figure; page, "
        "metrics: the file to write; sql: a SELECT",
    )
    verb.add_argument("--history", type=Path, default=DEFAULT, help="directory of the history (default: %(default)s)")
    verb.add_argument(
        "--kind",
        choices=KINDS,
        default=REAL,
        help="kind of runs to query or merge; import: kind of the outputs of other tools (default: %(default)s)",
    )
    verb.add_argument(
        "--settings", default="", help="figure: settings that the figure must have, such as 'dtype=bf16 size=8192'"
    )
    verb.add_argument("--stage", default="", help="figure: only values that were measured in this stage")
    verb.add_argument(
        "--model",
        default="",
        help="figure, import: GPU model, such as 'NVIDIA H200'; import uses it for a file that does not name one",
    )
    verb.add_argument(
        "--value",
        type=float,
        help="figure: also print the percentile of this value, given in the SI unit of the figure",
    )
    verb.add_argument("--all", action="store_true", help="figure: include hosts that were not accepted")
    verb.add_argument("--values", action="store_true", help="part: also print every value")
    verb.add_argument(
        "--criteria",
        action="append",
        default=[],
        help="import: judge the run by this pack too: give each pack that was given to rackproof report",
    )
    verb.add_argument(
        "--waivers", action="append", default=[], help="import: a waiver file that was given to rackproof report"
    )
    form = verb.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="print JSON")
    form.add_argument("--csv", action="store_true", help="print CSV")
    add_color_option(verb)
    modes = {
        "names": "import part figure page metrics sql",
        **dict.fromkeys(("settings", "stage", "value", "all"), "figure"),
        "model": "figure import",
        "values": "part",
        "criteria": "import",
        "waivers": "import",
        "json": "import part figure lemons drivers racks sql",
        "csv": "part figure lemons drivers racks sql",
    }
    verb.set_defaults(call=call_in_mode(call, verb, modes))


def call(options: argparse.Namespace) -> int:
    """Run the verb."""
    if options.what == "import":
        return _import(options)
    if options.what == "merge":
        if read_index(options.history, options.kind) is None:
            raise no_history(options.history, options.kind)
        print(
            f"{counted(merge_runs(options.history, options.kind), 'run')} merged in {home(options.history, options.kind)}"
        )
        return 0
    history = History(options.history, options.kind)
    with gc_off():
        code = _answer(history, options)
    if options.what in ("page", "metrics", "sql"):
        for note in clock_notes(history.index, timestamp(_now())):
            print(f"rackproof: note: {note}", file=sys.stderr)
    for problem in history.problems:  # after the answer, because a query may find more damage
        print(f"rackproof: {problem}", file=sys.stderr)
    return code


def _answer(history: History, options: argparse.Namespace) -> int:
    if options.what == "sql":
        columns, rows = history.select(_one_name(options, "a SELECT"))
        print_rows(options, columns, rows)
        return 0
    if options.what in ("page", "metrics"):
        return _write(history, options)
    answer = _QUESTIONS[options.what](history, options)
    print_answer(options, answer, [*clock_notes(history.index, timestamp(_now())), *answer.notes])
    return 0


def _write(history: History, options: argparse.Namespace) -> int:
    """Write the page, or print the metrics or write them to a file."""
    if options.what == "page":
        from fleet.history_page.page import render_page as render  # imported here, because only `page` needs Jinja
    else:
        from fleet.history.metrics import render_metrics as render  # only `metrics` needs prometheus_client
    text = render(history)
    if options.what == "metrics" and not options.names:
        print(text, end="")
        return 0
    path = Path(_one_name(options, "one file")) if options.names else Path(PAGE)
    documents.write_text(path, text)
    print(f"{options.what}: {path}")
    return 0


def _now() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def _one_name(options: argparse.Namespace, what: str) -> str:
    if len(options.names) != 1 or not str(options.names[0]).strip():
        raise UsageError(f"history {options.what}: give {what}")
    return str(options.names[0])


def _part(history: History, options: argparse.Namespace) -> Answer:
    return part_answer(history, _one_name(options, "one serial or host"), values=options.values)


def _figure(history: History, options: argparse.Namespace) -> Answer:
    if options.value is not None and not math.isfinite(options.value):
        raise UsageError(f"history figure: --value {options.value} is not a finite number: give a value in the SI unit")
    selection = Selection(
        name=_one_name(options, "the name of one figure"),
        settings=options.settings,
        stage=options.stage,
        model=options.model,
        accepted_only=not options.all,
    )
    return figure_answer(history, selection, options.value)


def _without_name(answer: Callable[[History], Answer]) -> Callable[[History, argparse.Namespace], Answer]:
    def ask(history: History, options: argparse.Namespace) -> Answer:
        return answer(history)

    return ask


_QUESTIONS: dict[str, Callable[[History, argparse.Namespace], Answer]] = {
    "part": _part,
    "figure": _figure,
    "lemons": _without_name(lemons_answer),
    "drivers": _without_name(drivers_answer),
    "racks": _without_name(racks_answer),
}


def _import(options: argparse.Namespace) -> int:
    if not options.names:
        raise UsageError("history import: give run directories, such as runs/*, or outputs of other tools")
    failed, added = 0, []
    with progress_bar(sys.stderr):
        for name in options.names:
            try:
                path = Path(name)
                added.append(_import_run(options, path) if path.is_dir() else _import_file(options, path))
            except (RackproofError, OSError) as error:
                print(f"rackproof: {name} was not added: {error}", file=sys.stderr)
                failed += 1
    if options.json:
        print(json.dumps({"added": added, "failed": failed}, indent=1))
    else:
        outcomes = Counter(item["outcome"] for item in added)
        others = [f"{outcomes[outcome]} {outcome}" for outcome in ("replaced", "unchanged") if outcomes[outcome]]
        counts = [
            f"{outcomes['added']} added to {options.history}",
            *others,
            *([f"{failed} not added"] if failed else []),
        ]
        print(", ".join(counts))
        for kind in sorted({str(item["kind"]) for item in added if item.get("kind", REAL) != REAL}):
            print(f"runs of kind {kind} are stored separately: query them with --kind {kind}")
    return TROUBLE if failed else 0


def _import_run(options: argparse.Namespace, directory: Path) -> dict[str, Any]:
    """Judge a run and add it to the history; print the notes of `add_run`."""
    if owner := run_lock.active_holder(directory):
        raise UsageError(
            f"the run is in progress, locked by {owner.who()} since {owner.since}: import it when it is finished"
        )
    run, report = judge_run(directory, options.criteria, options.waivers)
    rows = run_rows(run, report)
    notes, outcome = add_run(options.history, rows)
    for note in notes:
        print(f"rackproof: {directory}: note: {note}", file=sys.stderr)
    return {
        "run": rows.entry["run"],
        "kind": rows.kind,
        "decision": report.decision,
        "outcome": outcome,
        "notes": notes,
    }


def _import_file(options: argparse.Namespace, path: Path) -> dict[str, Any]:
    """Add the figures in an output of another tool to the history; print the notes of `import_output`."""
    imported, outcome, notes = import_output(options.history, options.kind, path, timestamp(_now()), options.model)
    for text in notes:
        print(f"rackproof: {path}: note: {text}", file=sys.stderr)
    return {
        "file": str(path),
        "source": imported.source,
        "version": imported.version,
        "figures": len(imported.rows),
        "outcome": outcome,
        "notes": notes,
    }
