"""`rackproof scaling`: write the page of a scaling study from the records of its cells.

A study measures the same training with several combinations of settings, such as the number of hosts. A cell is the launch with
one combination.
"""

from __future__ import annotations

import argparse
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

from fleet.records import run_lock
from fleet.records.load import load
from fleet.report.formatting import clean
from fleet.scaling.page import render_html, render_lines, render_markdown, summarize
from fleet.scaling.published import RUNS
from fleet.scaling.results import StudyResults, evaluate_study
from schemas import documents
from schemas.errors import TROUBLE, UsageError, writing
from schemas.plans import Plan
from schemas.records import to_json
from schemas.studies import Study

SCHEMA = "rackproof.scaling/1"
COMPLETE = 0
MAX_PRICE = 1e12


def add_verb(verbs: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add scaling to the command."""
    scaling = verbs.add_parser(
        "scaling",
        help="write the page of a scaling study; exits 0 complete (except cells that inventory or budget exclude), 2 incomplete",
        epilog="example: rackproof scaling runs/study1 --price 12 --currency USD. Run a study with playbooks/scaling.yml, or on "
        "one machine with rackproof run --profile scaling. Exit codes: 0 every cell (combination of settings) was measured, "
        "except for those that need more hosts than the inventory has, or that came after the budget was spent; 2 a cell failed "
        "or is missing, no cell was measured, or there is no run; 64 wrong usage; 74 the page could not be written.",
    )
    scaling.add_argument("run_dir", type=Path, help="directory of the run")
    scaling.add_argument(
        "--price",
        type=float,
        help="price of a host per hour, in place of the study's; cells that the study's cost limit excluded stay excluded",
    )
    scaling.add_argument("--currency", help="currency of the price, such as USD (default: the study's)")
    scaling.add_argument("--json", action="store_true", help="print scaling.json")
    scaling.set_defaults(call=call)


def call(options: argparse.Namespace) -> int:
    """Run the verb."""
    if options.price is not None and not 0 < options.price <= MAX_PRICE:
        raise UsageError(
            f"--price {options.price}: give the price of a host per hour, more than 0 and at most {MAX_PRICE:g}"
        )
    if options.currency is not None and not re.fullmatch(r"[^\s<>&|`]{1,8}", options.currency):
        raise UsageError(f"--currency {options.currency}: give a short name, such as USD")
    run = load(options.run_dir, only_gangs=True, study=True)
    if run.plan.study is None:
        raise UsageError(f"{options.run_dir} is not a scaling study: run rackproof report {options.run_dir}")
    rejected = tuple(clean(f"{item.path}: {item.reason}") for item in run.quarantined)
    results = replace(evaluate_study(run.plan, run.evidence, price=options.price), rejected=rejected)
    currency = clean(run.plan.study.currency if options.currency is None else options.currency)
    document = _document(run.plan, run.plan.study, results, currency)
    texts = {  # render all before writing the first, so that the files are consistent
        "scaling.json": documents.text(document),
        "scaling.md": render_markdown(run.plan, results, currency),
        "scaling.html": render_html(run.plan, results, currency),
    }
    with writing(options.run_dir):
        for name, text in texts.items():
            documents.write_text(options.run_dir / name, text)
        run_lock.release(options.run_dir, summarize(results))
    if options.json:
        print(texts["scaling.json"], end="")
    else:
        print(f"{summarize(results)}\n{render_lines(results, currency)}")
        for line in rejected:
            print(f"rejected: {line}")
        print(f"page: {options.run_dir / 'scaling.html'}")
    return COMPLETE if results.is_complete else TROUBLE


def _document(plan: Plan, study: Study, results: StudyResults, currency: str) -> dict[str, Any]:
    """Return the JSON document of the study. Unknown values are left out."""
    return {
        "schema": SCHEMA,
        "run_id": plan.run_id,
        "profile": plan.profile,
        "rehearsal": plan.rehearsal,
        "complete": results.is_complete,
        "stopped": results.stopped,
        "hours": results.hours,
        "cost": results.cost,
        "currency": currency,
        "gpus": results.gpus,
        "software": results.software,
        "rejected": results.rejected,
        "study": to_json(study),
        "cells": [json.loads(json.dumps(to_json(row))) for row in results.rows],
        "published": [to_json(run) for run in RUNS],
    }
