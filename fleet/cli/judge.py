"""`rackproof judge`: arguments to calls."""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from fleet.baseline.accept import REPORT_BYTES
from fleet.records.load import Run, refuse_no_run
from fleet.report.format import clean
from fleet.report.rejudge import compared as without_left_out
from fleet.report.rejudge import lines, rejudged
from schemas import documents
from schemas.errors import RunError
from schemas.reports import ACCEPTED, INCOMPLETE, REJECTED, FleetReport
from schemas.run_directory import RunDirectory

EXIT = {ACCEPTED: 0, REJECTED: 1, INCOMPLETE: 2}

Parser = argparse.ArgumentParser
Verbs = argparse._SubParsersAction
Merged = Callable[[Path, Sequence[str], Sequence[str]], tuple[Run, FleetReport]]


def add_judge(verbs: Verbs[Parser]) -> Parser:
    """Add judge to the command."""
    parser = verbs.add_parser(
        "judge",
        help="judge an old run again, under other criteria, and print what that changes; exits as report does",
        epilog="example: rackproof judge runs/20261121T040000Z --criteria tighter.yml",
    )
    parser.add_argument("run_dir", type=Path, help="directory of a run that has a report.json")
    parser.add_argument("--criteria", action="append", default=[], help="one more pack: a name or a .yml file")
    parser.add_argument("--waivers", action="append", default=[], help="a file of waivers, beside those of the plan")
    parser.add_argument("--write", action="store_true", help="write the report anew; without it nothing is written")
    parser.add_argument("--json", action="store_true", help="print what changes as JSON")
    parser.set_defaults(parquet=False, all_observations=False)
    return parser


def judge(options: argparse.Namespace, merged: Merged, report: Callable[[argparse.Namespace], int]) -> int:
    """Runs the verb; `report` writes the report, where that is asked for."""
    refuse_no_run(options.run_dir)
    path = RunDirectory(options.run_dir).report
    if not path.exists():
        raise RunError(
            f"{path}: no such file: there is nothing to compare with; run `rackproof report {options.run_dir}`"
        )
    try:
        old = documents.read(path, "report", max_bytes=REPORT_BYTES)
    except documents.DocumentError as error:
        raise RunError(f"{error}: run `rackproof report {options.run_dir}`") from None
    _, now = merged(options.run_dir, options.criteria, options.waivers)
    found = without_left_out(rejudged(old, now), old)
    if options.json:
        document = {
            "run_id": now.run_id,
            "was": {"decision": old["decision"], "status": old["acceptance"]["status"], "rackproof": old["rackproof"]},
            "decision": now.decision,
            "status": now.acceptance.status,
            "rackproof": now.rackproof,
            "changes": [{"kind": item.kind, "old": item.old, "new": item.new} for item in found],
            "left_out": old.get("left_out", 0),
        }
        print(json.dumps(document, indent=1))
    else:
        for line in lines(old, now, found):
            print(clean(line, 600))
    if not options.write:
        return EXIT[now.decision]
    with contextlib.redirect_stdout(io.StringIO() if options.json else sys.stdout):
        return report(options)
