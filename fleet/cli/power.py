"""`rackproof power`: what each criterion can detect, and how often it fails a healthy part."""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path

from fleet.criteria_lint.checked_packs import checked_packs
from fleet.judge.criteria import Pack, located_packs
from fleet.judge.detection import Detection, detection
from fleet.judge.pack_selection import criteria_by_id
from fleet.judge.planted_faults import PATTERNS, comparisons
from fleet.judge.power import MIN_RUNS, power
from fleet.planning.plan import read_profile
from fleet.records.load import Run, load
from fleet.report.detection import markdown_detection, render_detection
from fleet.report.detection_logic import Stages
from fleet.report.planted_faults import render_planted_faults
from fleet.report.power import render_power
from schemas.errors import UsageError

PLANTED_PROFILES = ("standard", "extended")
"""Default profiles of --planted-faults."""
REPORTED_PROFILES = ("smoke", "standard", "extended", "soak")
"""Profiles in the tables that --markdown prints."""


def add_verb(verbs: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add power to the command."""
    verb = verbs.add_parser(
        "power",
        help="estimate from several runs of healthy parts what each criterion detects, and how often it fails a healthy part",
        epilog="examples: rackproof power runs/a runs/b runs/c; for runs of different hosts: rackproof power --pool runs/*; "
        "for the detection of wrong bits: rackproof power --planted-faults runs/a",
    )
    verb.add_argument(
        "run_dirs",
        type=Path,
        nargs="+",
        metavar="run_dir",
        help="directory of a run; give three or more runs of the same hosts, or one or more with --pool or --planted-faults",
    )
    verb.add_argument(
        "--pool",
        action="store_true",
        help="the runs may be of different hosts: print what each criterion detects on each GPU model, but no tables of the "
        "noise of each figure and the false alarms of each limit",
    )
    verb.add_argument(
        "--planted-faults",
        action="store_true",
        help="print the probability with which the benchmarks `digest`, `stress` and `integrity` find wrong bits with the "
        "settings of --profile; two values are taken from the runs: the repetitions per second of `digest`, and the memory that "
        "`integrity` tests",
    )
    verb.add_argument(
        "--profile",
        action="append",
        default=[],
        help=f"with --planted-faults: a profile (name or .yml file); may be repeated; default: {', '.join(PLANTED_PROFILES)}",
    )
    verb.add_argument(
        "--criteria", action="append", default=[], help="additional criteria pack (its name or a .yml file)"
    )
    verb.add_argument("--json", action="store_true", help="print JSON")
    verb.add_argument("--markdown", action="store_true", help="with --pool, print the tables of docs/criteria.md")
    verb.set_defaults(call=call)


def call(options: argparse.Namespace) -> int:
    """Run the verb."""
    if options.planted_faults:
        ignored = {"--pool": options.pool, "--markdown": options.markdown, "--criteria": options.criteria}
        if given := [name for name, value in ignored.items() if value]:
            raise UsageError(f"{given[0]} has no effect on --planted-faults: leave out one of the two")
        return _print_planted_faults(options)
    if options.profile:
        raise UsageError("--profile applies only to --planted-faults: give --planted-faults too")
    if len(options.run_dirs) < MIN_RUNS and not options.pool:
        raise UsageError(
            f"too few run directories ({len(options.run_dirs)}): noise cannot be estimated from fewer than {MIN_RUNS} runs: "
            "give more, or --pool"
        )
    if options.markdown and not options.pool:
        raise UsageError("--markdown prints the tables of pooled runs: give --pool too")
    runs = [load(directory) for directory in options.run_dirs]
    packs = checked_packs(located_packs(runs[0].plan.criteria, options.criteria).values())
    _refuse_repeated_runs(runs)
    pairs = [(run.plan, run.evidence) for run in runs]
    estimate = None if options.pool else power(pairs, packs)
    detections = detection(pairs, packs)
    simulated = any(run.plan.simulated for run in runs)
    if options.json:
        document = {**(dataclasses.asdict(estimate) if estimate else {}), "simulated": simulated}
        print(json.dumps({**document, "detection": [dataclasses.asdict(item) for item in detections]}, indent=1))
        return 0
    if options.markdown:
        print(pooled_markdown(runs, packs, detections), end="")
        return 0
    if simulated:
        print("SIMULATED: figures come from rackproof simulate, not from hardware")
    if estimate:
        print(f"{render_power(estimate)}\n")
    print(render_detection(detections))
    return 0


def _print_planted_faults(options: argparse.Namespace) -> int:
    """Print the probability with which the benchmarks of the profiles find wrong bits."""
    runs = [load(directory) for directory in options.run_dirs]
    _refuse_repeated_runs(runs)
    profiles = [read_profile(name) for name in options.profile or PLANTED_PROFILES]
    found = comparisons([(run.plan, run.evidence) for run in runs], profiles)
    if not found:
        raise UsageError(
            "no run has results of the benchmark `digest` on GPUs: give a run with such results, to estimate its repetitions"
        )
    simulated = any(run.plan.simulated for run in runs)
    if options.json:
        document = {
            "simulated": simulated,
            "patterns": PATTERNS,
            "comparisons": [dataclasses.asdict(item) for item in found],
        }
        print(json.dumps(document, indent=1))
        return 0
    if simulated:
        print("SIMULATED: figures come from rackproof simulate, not from hardware")
    print("\n".join(render_planted_faults(found)))
    return 0


def pooled_markdown(runs: Sequence[Run], packs: Sequence[Pack], detections: Sequence[Detection]) -> str:
    """Return the tables of docs/criteria.md for pooled runs."""
    models = {item.key.model for item in detections}
    criteria = {name: item for pack in packs if pack.name in models for name, item in criteria_by_id([pack]).items()}
    return markdown_detection(detections, _profiles(runs), [*criteria.values()])


def _profiles(runs: Sequence[Run]) -> dict[str, list[Stages]]:
    """Return profile -> its stages with the settings of their benchmarks, as the profile defines them.

    If the settings depend on the planned duration (`duration_s`), the stages of each run with this profile are added.
    """
    profiles: dict[str, list[Stages]] = {}
    for name in REPORTED_PROFILES:
        profile = read_profile(name)
        profiles[name] = [{stage: content["benchmarks"] for stage, content in profile["stages"].items()}]
        if "duration_s" in profile:
            plans = [run.plan for run in runs if run.plan.profile == name]
            profiles[name] += [{stage.name: stage.benchmarks for stage in plan.stages} for plan in plans]
    return profiles


def _refuse_repeated_runs(runs: Sequence[Run]) -> None:
    nonces: set[str] = set()
    for run in runs:
        if run.plan.nonce in nonces:
            raise UsageError(f"run {run.plan.run_id} is given twice: comparing it with itself would show no noise")
        nonces.add(run.plan.nonce)
