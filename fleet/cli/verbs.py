"""The verbs that run on the control node: arguments to calls."""

from __future__ import annotations

import argparse
import importlib
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from fleet.cli import gangs, plan
from fleet.cli.baseline import add_baseline, baseline
from fleet.cli.diff import add_diff, diff
from fleet.cli.judge import add_judge, judge
from fleet.cli.sign import add_sign, add_verify, sign, verify
from fleet.criteria_lint.checked_packs import checked_packs
from fleet.inventory.waivers_file import with_waivers
from fleet.records import run_lock
from fleet.records.load import Run, load
from fleet.report import formats, one_host
from fleet.report.scale import report_of
from fleet.signature.signing import outdated
from schemas import documents, quick
from schemas.errors import writing
from schemas.records import to_json
from schemas.reports import ACCEPTED, INCOMPLETE, REJECTED, FleetReport
from schemas.run_directory import RunDirectory

EXIT = {ACCEPTED: 0, REJECTED: 1, INCOMPLETE: 2}
ELSEWHERE = {
    "rma": "fleet.cli.rma:rma",
    "watch": "fleet.cli.watch:watch",
    "simulate": "fleet.cli.simulate:simulate",
    "scheduler": "fleet.integrations.scheduler:call",
    "notice": "fleet.integrations.notification:call",
    "revalidate": "fleet.integrations.revalidate:call",
    "collect": "fleet.records.collect:call",
    "scaling": "fleet.cli.scaling:call",
    "power": "fleet.cli.power:call",
    "criteria": "fleet.cli.criteria:call",
}
"""Verbs with a module of their own, which is imported where the verb is asked for: playbooks start the others again and again."""


def add_verbs(verbs: argparse._SubParsersAction[argparse.ArgumentParser], asked: str = "") -> None:
    """Adds the verbs of the control node to the command, or what is needed for one of them."""
    plan.add_verb(verbs).set_defaults(call=plan.call)
    gangs.add_verb(verbs).set_defaults(call=gangs.call)
    report = verbs.add_parser(
        "report",
        help="judge a run and write its report; exits 0 accepted, 1 rejected, 2 incomplete, 74 not written",
        epilog="example: rackproof report runs/20261121T040000Z",
    )
    report.add_argument("run_dir", type=Path, help="directory of the run")
    report.add_argument("--criteria", action="append", default=[], help="one more pack: a name or a .yml file")
    report.add_argument("--waivers", action="append", default=[], help="a file of waivers, beside those of the plan")
    report.add_argument("--json", action="store_true", help="print decision and summary as JSON")
    formats.add_options(report)
    one_host.add_option(report)
    report.set_defaults(call=_report)
    add_judge(verbs).set_defaults(call=lambda options: judge(options, _merged, _report))
    add_baseline(verbs).set_defaults(call=lambda options: baseline(options, _merged))
    add_diff(verbs).set_defaults(call=diff)
    add_sign(verbs).set_defaults(call=lambda options: sign(options, _judged))
    add_verify(verbs).set_defaults(call=lambda options: verify(options, _judged))
    for verb, place in ELSEWHERE.items():
        if asked in ("", verb):
            module, _, call = place.partition(":")
            later = importlib.import_module(module)
            later.add_verb(verbs).set_defaults(call=getattr(later, call))


def _merged(run_dir: Path, criteria: Sequence[str], waivers: Sequence[str] = ()) -> tuple[Run, FleetReport]:
    """The run and its report: what `report` writes, and what `sign` and `verify` hold report.json against."""
    run = with_waivers(load(run_dir), waivers)
    packs = checked_packs([*run.plan.criteria, *criteria])
    return run, report_of(run, packs)


def _judged(run_dir: Path, criteria: Sequence[str], waivers: Sequence[str]) -> FleetReport:
    return _merged(run_dir, criteria, waivers)[1]


def _report(options: argparse.Namespace) -> int:
    from fleet.report.html.page import render_html
    from fleet.report.markdown import render_markdown
    from fleet.report.prometheus import render_prometheus
    from fleet.report.tables.summary_text import render_summary

    formats.check_options(options)
    _note_in_progress(options.run_dir)
    if getattr(options, "host", None):
        run = with_waivers(load(options.run_dir), options.waivers)
        return EXIT[one_host.write_page(options, run, checked_packs([*run.plan.criteria, *options.criteria]))]
    run, report = _merged(options.run_dir, options.criteria, options.waivers)
    document = to_json(report)
    documents.validate(document, "report", source="our own report")
    text = quick.text(document) if run.large else documents.text(document)
    paths = RunDirectory(options.run_dir)
    with writing(options.run_dir):
        documents.write_text(paths.report, text)
        documents.write_text(paths.markdown, render_markdown(report, run.plan.grafana_url))
        documents.write_text(paths.page, render_html(report, run.plan.grafana_url))
        documents.write_text(paths.metrics, render_prometheus(report))
        formats.write_views(options.run_dir, report, run.evidence, options)
        run_lock.release(options.run_dir, report.decision)
    if options.json:
        print(
            json.dumps(
                {
                    "decision": report.decision,
                    "rehearsal": report.rehearsal,
                    "simulated": report.simulated,
                    "acceptance": document["acceptance"],
                }
            )
        )
    else:
        print(render_summary(report))
        print(f"report: {paths.page}")
    if note := outdated(options.run_dir):
        print(f"rackproof: {note}", file=sys.stderr)
    return EXIT[report.decision]


def _note_in_progress(run_dir: Path) -> None:
    """Note that the run is not finished, so that its report is not taken for the final one."""
    if by := run_lock.active_holder(run_dir):
        print(
            f"rackproof: note: the run is still in progress, locked by {by.who()} since {by.since}: this report covers what "
            "was measured so far; the run writes its report again when it finishes",
            file=sys.stderr,
        )
