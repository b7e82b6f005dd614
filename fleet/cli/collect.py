"""`rackproof collect`: copy records from logs and volumes into a run directory."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path

from fleet import progress
from fleet.progress import progress_bar
from fleet.quantities import counted
from fleet.records import run_lock
from fleet.records.collect import FIRST, LAST, CollectionResult, RecordCollector
from fleet.records.collect_sources import read_source
from schemas import documents
from schemas.errors import TROUBLE, RunError, printable
from schemas.plans import Plan
from schemas.run_directory import RunDirectory


def add_verb(verbs: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add collect to the command."""
    collect = verbs.add_parser(
        "collect",
        help="copy records from logs and volumes into a run directory, for `rackproof report`",
        description="Copies records (the measurements of one host each) that `rackproof run-host` or `emit-record` wrote "
        "into a log, or left on a volume.",
        epilog="examples: kubectl logs -l app.kubernetes.io/component=host --tail=-1 | rackproof collect runs/r1 -; "
        "rackproof collect runs/r1 logs/*.log /mnt/results. "
        "Exit codes: 0 at least one record was found, and none was rejected or quarantined; 2 no record was found, a record was "
        "rejected or quarantined, a file could not be read, or there is no plan.json; 64 wrong usage; 75 the run is locked. "
        "Missing records are listed; in the report their hosts have inconclusive verdicts.",
    )
    collect.add_argument("run_dir", type=Path, help="directory of the run, with the plan.json that the hosts received")
    collect.add_argument(
        "sources", nargs="+", metavar="SOURCE", help="a log, a directory of logs or records, or - for standard input"
    )
    collect.add_argument(
        "--attempt",
        choices=[FIRST, LAST],
        help="if a host began the run twice, for example because its pod was replaced: take all its records from this attempt "
        "(default: reject the records of both attempts; a record already in the run directory stays)",
    )
    collect.add_argument("--json", action="store_true", help="print the result as JSON")
    collect.set_defaults(call=call)


def call(options: argparse.Namespace) -> int:
    """Run the verb."""
    plan = _plan(options.run_dir)
    frames, problems = [], []
    with progress_bar(sys.stderr):
        progress.begin("reading logs", len(options.sources))
        for source in options.sources:
            source_frames, source_problems = read_source(source)
            frames += source_frames
            problems += source_problems
            progress.advance()
    if not frames and not problems:
        problems.append(
            f"{', '.join(options.sources)}: no record found: collect the whole log (kubectl logs --tail=-1) "
            "of a pod whose `rackproof run-host` has finished"
        )
    run_lock.acquire(options.run_dir)
    with progress_bar(sys.stderr):
        result = RecordCollector(options.run_dir, plan, options.attempt).add(frames)
    result.problems[:0] = problems
    _show(result, options.json)
    return TROUBLE if result.problems else 0


def _plan(directory: Path) -> Plan:
    try:
        return RunDirectory(directory).read_plan()
    except documents.DocumentError as error:
        raise RunError(f"{error}: give the directory that `rackproof plan --run-dir` created") from None


def _show(result: CollectionResult, as_json: bool) -> None:
    if as_json:
        sys.stdout.write(json.dumps(asdict(result)) + "\n")
        return
    sys.stderr.writelines(f"rackproof: {printable(problem)}\n" for problem in result.problems)
    sys.stdout.writelines(f"collected {path}\n" for path in result.added)
    first = ", ".join(result.missing[:8]) + (" …" if len(result.missing) > 8 else "")
    missing = f"{len(result.missing)} missing: {first}" if result.missing else "none missing"
    sys.stdout.write(
        f"{counted(len(result.added), 'record')} collected, {len(result.unchanged)} unchanged, {missing}\n"
    )
