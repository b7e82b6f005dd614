"""`rackproof report`: judge a run and write its report."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from fleet.history.feed import feed_history
from fleet.history.former_runs import with_history
from fleet.progress import progress_bar
from fleet.records import run_lock
from fleet.records.load import Run
from fleet.records.newest import run_or_newest
from fleet.report import formats, one_host
from fleet.report.judge_run import EXIT_CODES, judge_run, load_run
from fleet.report.tables.summary_text import render_screen
from fleet.report.terminal import add_color_option, has_colour, width_of
from fleet.report.workers import gc_off
from fleet.signature.signing import warn_if_changed
from schemas import documents, quick
from schemas.errors import UsageError, writing
from schemas.records import to_json
from schemas.reports import FleetReport
from schemas.run_directory import RunDirectory


def add_verb(verbs: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add report to the command."""
    report = verbs.add_parser(
        "report",
        help="judge a run and write its report; exits 0 accepted, 1 rejected, 2 incomplete, 74 not written",
        epilog="examples: rackproof report; rackproof report runs/20261121T040000Z",
    )
    report.add_argument("run_dir", type=Path, nargs="?", help="directory of the run (default: the newest in runs/)")
    report.add_argument(
        "--criteria", action="append", default=[], help="additional criteria pack (its name or a .yml file)"
    )
    report.add_argument("--waivers", action="append", default=[], help="a waiver file in addition to those of the plan")
    report.add_argument(
        "--history",
        type=Path,
        help="compare the run with the history in this directory, then add the run to the history (docs/history.md)",
    )
    report.add_argument(
        "--json",
        action="store_true",
        help="print the keys decision, rehearsal, simulated and acceptance of report.json",
    )
    formats.add_flags(report)
    one_host.add_option(report)
    add_color_option(report)
    report.set_defaults(call=call)


def call(options: argparse.Namespace) -> int:
    """Run the verb."""
    flags = formats.flags_of(options)
    _refuse_ignored(options, flags)
    options.run_dir = run_or_newest(options.run_dir)
    _note_in_progress(options.run_dir)
    if getattr(
        options, "host", None
    ):  # `rackproof judge --write` also calls this function, without `host` and `history`
        run, packs = load_run(options.run_dir, options.criteria, options.waivers)
        return EXIT_CODES[one_host.write_page(options, run, packs)]
    with progress_bar(sys.stderr), gc_off():
        run, report, document, unread = _judge_and_write(options, flags)
    if options.json:
        summary = {
            "decision": report.decision,
            "rehearsal": report.rehearsal,
            "simulated": report.simulated,
            "acceptance": document["acceptance"],
        }
        print(json.dumps(summary))
    else:
        print(render_screen(report, width=width_of(), colour=has_colour(options.color)))
        print(f"report: {RunDirectory(options.run_dir).page}")
    if history := getattr(options, "history", None):
        for note in feed_history(history, run, report, unread):
            print(f"rackproof: {note}", file=sys.stderr)
    if note := warn_if_changed(options.run_dir):
        print(f"rackproof: {note}", file=sys.stderr)
    return EXIT_CODES[report.decision]


def _refuse_ignored(options: argparse.Namespace, flags: frozenset[str]) -> None:
    """Raise UsageError if an option is given that has no effect with --host, which writes one page only."""
    if getattr(options, "host", None) and flags:
        raise UsageError(f"{min(flags)} has no effect with --host: leave out one of the two")


def _judge_and_write(
    options: argparse.Namespace, flags: frozenset[str]
) -> tuple[Run, FleetReport, dict[str, Any], str]:
    """Judge the run, compare it with former runs, write its report in the selected formats and release the run's lock.

    Returns:
        Run, report, report as JSON document, and a message. The message says why the comparison with the history is missing or
        lacks runs; it is empty if nothing is wrong or no history is given.
    """
    run, report = judge_run(options.run_dir, options.criteria, options.waivers)
    unread = ""
    if history := getattr(options, "history", None):
        report, unread = with_history(history, run.plan, report)
    document = to_json(report)
    documents.validate(document, "report", source="generated report")
    text = quick.text(document)
    with writing(options.run_dir):
        documents.write_text(RunDirectory(options.run_dir).report, text)
        formats.write_formats(options.run_dir, formats.RenderInput(report=report, run=run, flags=flags))
        run_lock.release(options.run_dir, report.decision)
    return run, report, document, unread


def _note_in_progress(run_dir: Path) -> None:
    """Print a note if the run is in progress, because its report is not final."""
    if owner := run_lock.active_holder(run_dir):
        print(
            f"rackproof: note: the run is still in progress, locked by {owner.who()} since {owner.since}: this report covers "
            "the measurements so far; the run writes its report again when it finishes",
            file=sys.stderr,
        )
