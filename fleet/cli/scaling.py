"""`rackproof scaling`: write the page of a scaling study from the records of its cells."""

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
from fleet.scaling.outcome import Outcome, outcome
from fleet.scaling.page import render_html, render_lines, render_markdown, sentence
from fleet.scaling.published import RUNS
from schemas import documents
from schemas.errors import TROUBLE, UsageError, writing
from schemas.plans import Plan
from schemas.records import to_json
from schemas.studies import Study

SCHEMA = "rackproof.scaling/1"
MEASURED = 0
MOST_PRICE = 1e12


def add_verb(verbs: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add scaling to the command."""
    scaling = verbs.add_parser(
        "scaling",
        help="write the page of a scaling study; exits 0 complete (except for what inventory or budget exclude), 2 incomplete",
        epilog="example: rackproof scaling runs/study1 --price 12 --currency USD. Run a study with playbooks/scaling.yml, or on "
        "one machine with rackproof run --profile scaling. Exit codes: 0 every cell was measured, except for those that need "
        "more hosts than the inventory has or exceed the budget; 2 a cell failed or is missing, or there is no run; "
        "64 wrong usage; 74 the page could not be written.",
    )
    scaling.add_argument("run_dir", type=Path, help="directory of the run")
    scaling.add_argument(
        "--price",
        type=float,
        help="price of a host per hour, in place of the study's; it does not change what stopped the study",
    )
    scaling.add_argument("--currency", help="currency of the price, such as USD (default: the study's)")
    scaling.add_argument("--json", action="store_true", help="print scaling.json")
    scaling.set_defaults(call=call)


def call(options: argparse.Namespace) -> int:
    """Run the verb."""
    if options.price is not None and not 0 < options.price <= MOST_PRICE:
        raise UsageError(
            f"--price {options.price}: give the price of a host per hour, more than 0 and at most {MOST_PRICE:g}"
        )
    if options.currency is not None and not re.fullmatch(r"[^\s<>&|`]{1,8}", options.currency):
        raise UsageError(f"--currency {options.currency}: give a short name, such as USD")
    run = load(options.run_dir, alone=False, study=True)
    if run.plan.study is None:
        raise UsageError(f"{options.run_dir} is not a scaling study: run rackproof report {options.run_dir}")
    refused = tuple(clean(f"{item.path}: {item.reason}") for item in run.quarantined)
    study_outcome = replace(outcome(run.plan, run.evidence, price=options.price), refused=refused)
    currency = clean(run.plan.study.currency if options.currency is None else options.currency)
    document = _document(run.plan, run.plan.study, study_outcome, currency)
    written = {  # render all before writing the first, so that the files are consistent
        "scaling.json": documents.text(document),
        "scaling.md": render_markdown(run.plan, study_outcome, currency),
        "scaling.html": render_html(run.plan, study_outcome, currency),
    }
    with writing(options.run_dir):
        for name, text in written.items():
            documents.write_text(options.run_dir / name, text)
        run_lock.release(options.run_dir, sentence(study_outcome))
    if options.json:
        print(written["scaling.json"], end="")
    else:
        print(f"{sentence(study_outcome)}\n{render_lines(study_outcome, currency)}")
        for line in refused:
            print(f"rejected: {line}")
        print(f"page: {options.run_dir / 'scaling.html'}")
    return MEASURED if study_outcome.complete else TROUBLE


def _document(plan: Plan, study: Study, study_outcome: Outcome, currency: str) -> dict[str, Any]:
    """Return the JSON document of the study. Unknown values are left out."""
    return {
        "schema": SCHEMA,
        "run_id": plan.run_id,
        "profile": plan.profile,
        "rehearsal": plan.rehearsal,
        "complete": study_outcome.complete,
        "stopped": study_outcome.stopped,
        "hours": study_outcome.hours,
        "cost": study_outcome.cost,
        "currency": currency,
        "gpus": study_outcome.gpus,
        "software": study_outcome.software,
        "not_believed": study_outcome.refused,
        "study": to_json(study),
        "cells": [json.loads(json.dumps(to_json(row))) for row in study_outcome.rows],
        "published": [to_json(run) for run in RUNS],
    }
