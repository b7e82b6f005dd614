"""Write the page of one host: `rackproof report RUN_DIR --host NAME`.

The report of a large fleet does not show every host in full.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence

from fleet.history.former_runs import with_history
from fleet.judge.criteria import Pack
from fleet.progress import progress_bar
from fleet.records.load import Run
from fleet.report.run_report import report_on_host
from schemas import documents
from schemas.errors import UsageError, writing
from schemas.records import to_json
from schemas.reports import LineKind
from schemas.run_directory import RunDirectory


def add_option(report: argparse.ArgumentParser) -> None:
    """Add the option `--host` to the parser of `rackproof report`."""
    report.add_argument(
        "--host",
        metavar="NAME",
        help="write only the page of this host into RUN_DIR/pages (with --json: print the report on this host as JSON instead)",
    )


def write_page(options: argparse.Namespace, run: Run, packs: Sequence[Pack]) -> str:
    """Write the page as HTML and Markdown, or print the report on the host as JSON; return the decision on the host.

    Raises:
        UsageError: the plan has no such host.
    """
    from rich.text import Text

    from fleet.report.formatting import decision_name
    from fleet.report.html.page import render_html
    from fleet.report.markdown import render_markdown
    from fleet.report.tables.summary_text import summary_blocks
    from fleet.report.terminal import has_colour, render_blocks, width_of

    names = [host.name for host in run.plan.hosts]
    if options.host not in names:
        raise UsageError(
            f"the run has no host {options.host[:80]!r}{documents.nearest(options.host[:80], names)}: choose a host of its plan"
        )
    with progress_bar(sys.stderr):
        report = report_on_host(run, packs, options.host)
    if options.history:
        report, note = with_history(options.history, run.plan, report)
        if note:
            print(f"rackproof: {note}", file=sys.stderr)  # noqa: T201
    document = json.loads(json.dumps(to_json(report)))
    documents.validate(document, "report", source="generated report")
    if options.json:
        print(json.dumps(document, indent=1))  # noqa: T201
        return report.decision
    paths = RunDirectory(options.run_dir)
    page = paths.page_of(options.host)
    with writing(page.parent):
        documents.write_text(page, render_html(report, run.plan.grafana_url))
        documents.write_text(paths.page_of(options.host, "md"), render_markdown(report, run.plan.grafana_url))
    colour, width = has_colour(options.color), width_of()
    head = Text(f"{options.host}: {decision_name(report, report.decision)}")
    blocks = [head, *summary_blocks(report, without=(LineKind.COUNT,)), Text(f"page: {page}")]
    print(render_blocks(blocks, width=width, colour=colour))  # noqa: T201
    return report.decision
