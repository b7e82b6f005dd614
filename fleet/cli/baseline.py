"""`rackproof baseline`: store the figures of hosts and GPUs from accepted runs, and show them."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

from fleet.baseline.accept import Approval, PartKey, accept, key
from fleet.cli.modes import call_in_mode
from fleet.planning.test_selection import skipped_tests
from fleet.progress import progress_bar
from fleet.quantities import counted, quantity
from fleet.records import baseline_store, run_lock
from fleet.records.load import Run
from fleet.report.formatting import clean
from fleet.report.judge_run import judge_run
from schemas import documents
from schemas.baselines import GPU, REAL, REHEARSAL, SIMULATED, PartBaseline
from schemas.errors import HeldError, RunError, UsageError
from schemas.locks import user_name
from schemas.records import to_json

_NAMED = 6


def add_verb(verbs: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add baseline to the command."""
    parser = verbs.add_parser(
        "baseline",
        help="store the figures of hosts and GPUs from runs with the decision `accepted`, and print the stored figures",
        epilog="examples: rackproof baseline accept runs/20261121T040000Z --why 'hand-over of rack 12'; "
        "rackproof baseline list; rackproof baseline show r12-h03; rackproof baseline show 1652826070058 --json",
    )
    parser.add_argument(
        "what",
        choices=["accept", "show", "list"],
        help="accept: add runs to the baselines of their hosts and GPUs (rackproof report must have given each run the decision "
        "`accepted`); show: print the baseline of one host or GPU; list: print one line for each baseline",
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help="accept: run directories; show: a host or a serial")
    parser.add_argument(
        "--baseline",
        type=Path,
        default=baseline_store.DEFAULT,
        help="directory of the baselines (default: %(default)s)",
    )
    parser.add_argument(
        "--by", help="accept: name of the person who adds the run to the baselines (default: the user name)"
    )
    parser.add_argument("--why", default="", help="accept: reason, such as the hand-over of a rack")
    parser.add_argument(
        "--replace",
        action="store_true",
        help="accept: start new baselines, without the earlier accepted runs of these hosts and GPUs",
    )
    parser.add_argument(
        "--criteria", action="append", default=[], help="accept: a criteria pack that was given to rackproof report"
    )
    parser.add_argument(
        "--waivers", action="append", default=[], help="accept: a waiver file that was given to rackproof report"
    )
    parser.add_argument(
        "--kind",
        choices=[REAL, REHEARSAL, SIMULATED],
        default=REAL,
        help="show, list: print baselines of this kind. `gpu`: from runs on GPUs; `rehearsal`: from rehearsals, which run on "
        "CPUs; `simulated`: from runs that rackproof simulate wrote (default: %(default)s)",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    accept_only = dict.fromkeys(("by", "why", "replace", "criteria", "waivers"), "accept")
    modes = {**accept_only, "kind": "show list", "names": "accept show"}
    parser.set_defaults(call=call_in_mode(call, parser, modes))


def call(options: argparse.Namespace) -> int:
    """Run the verb."""
    if options.what == "accept":
        return _accept(options)
    return _show(options) if options.what == "show" else _list(options)


def _accept(options: argparse.Namespace) -> int:
    if not options.names:
        raise UsageError("baseline accept: give the directory of a run whose report has the decision `accepted`")
    now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    by = Approval(who=_one_line(options.by or user_name(), 200), at=now, why=_one_line(options.why, 1000))
    accepted: dict[PartKey, PartBaseline] = {}
    for name in options.names:
        if owner := run_lock.active_holder(Path(name)):
            raise HeldError(
                f"{name}: run locked by {owner.who()} since {owner.since}: accept it after its report is written"
            )
    for name in options.names:
        with progress_bar(sys.stderr):
            run, report = judge_run(Path(name), options.criteria, options.waivers)
        _refuse_reduced_profile(run)
        baselines = accept(run, report, options.baseline, by, replace_runs=options.replace, replaced=accepted)
        accepted |= {key(baseline): baseline for baseline in baselines}
        if not options.json:
            print(_accepted(run, baselines, options.baseline))
    if options.json:
        print(json.dumps([_short(baseline) for baseline in accepted.values()], indent=1))
    return 0


def _one_line(text: str, limit: int) -> str:
    return " ".join(text.split())[:limit]


def _refuse_reduced_profile(run: Run) -> None:
    """Raise RunError if a time budget skipped tests: the baseline would lack their figures."""
    if names := skipped_tests(run.plan):
        more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
        raise RunError(
            f"run {run.plan.run_id} skipped tests of the profile {run.plan.profile} because of rackproof_budget_s: "
            f"{', '.join(names[:_NAMED])}{more}; only a run of the whole profile can be a baseline: "
            "repeat the run without rackproof_budget_s"
        )


def _accepted(run: Run, baselines: Sequence[PartBaseline], directory: Path) -> str:
    gpus = sum(baseline.part == GPU for baseline in baselines)
    kind = baselines[0].kind if baselines else REAL
    mark = "" if kind == REAL else f" ({kind.upper()}: compared only with runs of this kind)"
    accepted = [item for baseline in baselines for item in baseline.runs if item.run_id == run.plan.run_id]
    waived = sorted({text for item in accepted for text in item.waivers})
    outliers = sum(level.left_out for baseline in baselines for level in baseline.figures)
    path = baseline_store.kind_directory(directory, kind)
    lines = [
        f"run {run.plan.run_id}: {counted(len(baselines) - gpus, 'host')} and {counted(gpus, 'GPU')} in {path}{mark}"
    ]
    lines += [f"accepted with a waiver: {clean(text)}" for text in waived]
    lines += (
        [
            f"outliers ignored: {counted(outliers, 'value')} (far from the values of the same figure in other accepted runs of "
            "the same host or GPU)"
        ]
        if outliers
        else []
    )
    return "\n".join(lines)


def _short(baseline: PartBaseline) -> dict[str, object]:
    return {
        "kind": baseline.kind,
        "part": baseline.part,
        "id": baseline.id,
        "host": baseline.host,
        "slot": baseline.slot,
        "runs": [run.run_id for run in baseline.runs],
        "figures": len(baseline.figures),
    }


def _list(options: argparse.Namespace) -> int:
    baselines = list(baseline_store.all_baselines(options.baseline, options.kind))
    if options.json:
        print(json.dumps([_short(baseline) for baseline in baselines], indent=1))
        return 0
    if not baselines:
        print(f"no baseline of kind {options.kind} in {options.baseline}")
    for item in baselines:
        last, noun = item.runs[-1], "figure" if len(item.figures) == 1 else "figures"
        print(
            f"{item.part:5}{clean(item.id):28} {clean(f'{item.host} {item.slot}').strip():24} {len(item.figures):4} {noun}, "
            f"{counted(len(item.runs), 'run')}, last {last.run_id} ({last.status}) at {last.at} by {clean(last.by)}"
        )
    return 0


def _show(options: argparse.Namespace) -> int:
    if len(options.names) != 1:
        raise UsageError("baseline show: give one host or one serial; `rackproof baseline list` lists them")
    name = options.names[0]
    baselines = list(baseline_store.all_baselines(options.baseline, options.kind))
    matching = [item for item in baselines if item.id == name]
    if not matching:
        near = documents.nearest(name, (item.id for item in baselines))
        raise UsageError(f"no baseline of {name}{near} of kind {options.kind} in {options.baseline}: {_hint(options)}")
    if options.json:
        print(json.dumps([to_json(item) for item in matching], indent=1))
        return 0
    for item in matching:
        print("\n".join(_lines(item)))
    return 0


def _hint(options: argparse.Namespace) -> str:
    """Return the other kind that has a baseline of this name, or the command that lists all baselines of this kind."""
    name = options.names[0]
    for kind in (REAL, REHEARSAL, SIMULATED):
        if kind != options.kind and any(
            item.id == name for item in baseline_store.all_baselines(options.baseline, kind)
        ):
            return f"there is a baseline of kind {kind}: give --kind {kind}"
    return f"list all with `rackproof baseline list --baseline {options.baseline} --kind {options.kind}`"


def _lines(baseline: PartBaseline) -> list[str]:
    lines = [
        f"{baseline.part} {clean(baseline.id)}, last accepted in {clean(f'{baseline.host} {baseline.slot}')}".rstrip()
    ]
    for run in baseline.runs:
        why = f": {clean(run.why)}" if run.why else ""
        lines.append(f"  run {run.run_id} ({run.status}) at {run.at} by {clean(run.by)}{why}")
        lines += [f"    {clean(text)}" for text in run.waivers]
    for level in baseline.figures:
        params = ",".join(f"{key}={value}" for key, value in level.params.items())
        within = f" {clean(level.within)}" if level.within else ""
        sigma = f"{level.sigma * 100:.2g} % (sigma) from run to run" if level.sigma is not None else "noise unknown"
        outliers = f", {counted(level.left_out, 'outlier')} ignored" if level.left_out else ""
        lines.append(
            f"  {level.name}[{clean(params)}]{within} {level.stage}: {quantity(level.value, level.unit, 5)}, "
            f"{counted(len(level.values), 'run')}, {sigma}{outliers}"
        )
    return lines
