"""`rackproof judge`: judge an earlier run again, with other criteria."""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import sys
from pathlib import Path

from fleet.cli import report as report_verb
from fleet.progress import progress_bar
from fleet.records.load import REPORT_BYTES, require_run
from fleet.report.formatting import clean
from fleet.report.judge_run import EXIT_CODES, judge_report
from fleet.report.rejudge import change_lines, changed_verdicts, drop_omitted_passes
from fleet.report.terminal import add_color_option
from schemas import documents
from schemas.errors import RunError
from schemas.run_directory import RunDirectory


def add_verb(verbs: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add judge to the command."""
    parser = verbs.add_parser(
        "judge",
        help="judge an earlier run again, with other criteria, and print the changes; exit codes as for report",
        epilog="example: rackproof judge runs/20261121T040000Z --criteria tighter.yml",
    )
    parser.add_argument("run_dir", type=Path, help="directory of a run that has a report.json")
    parser.add_argument(
        "--criteria", action="append", default=[], help="additional criteria pack (its name or a .yml file)"
    )
    parser.add_argument("--waivers", action="append", default=[], help="a waiver file in addition to those of the plan")
    parser.add_argument("--write", action="store_true", help="write the new report; by default nothing is written")
    parser.add_argument("--json", action="store_true", help="print the changes as JSON")
    add_color_option(parser)
    parser.set_defaults(call=call)


def call(options: argparse.Namespace) -> int:
    """Run the verb."""
    require_run(options.run_dir)
    path = RunDirectory(options.run_dir).report
    if not path.exists():
        raise RunError(
            f"{path}: no such file: there is nothing to compare with; run `rackproof report {options.run_dir}`"
        )
    try:
        old = documents.read(path, "report", max_bytes=REPORT_BYTES)
    except documents.DocumentError as error:
        raise RunError(f"{error}: run `rackproof report {options.run_dir}`") from None
    with progress_bar(sys.stderr):
        new = judge_report(options.run_dir, options.criteria, options.waivers)
    changes = drop_omitted_passes(changed_verdicts(old, new), old)
    if options.json:
        document = {
            "run_id": new.run_id,
            "was": {"decision": old["decision"], "status": old["acceptance"]["status"], "rackproof": old["rackproof"]},
            "decision": new.decision,
            "status": new.acceptance.status,
            "rackproof": new.rackproof,
            "changes": [{"kind": change.kind, "old": change.old, "new": change.new} for change in changes],
            "left_out": old.get("left_out", 0),
        }
        print(json.dumps(document, indent=1))
    else:
        for line in change_lines(old, new, changes):
            print(clean(line, 600))
    if not options.write:
        return EXIT_CODES[new.decision]
    with contextlib.redirect_stdout(io.StringIO() if options.json else sys.stdout):
        return report_verb.call(options)
