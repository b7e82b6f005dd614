"""`rackproof baseline`: arguments to calls."""

from __future__ import annotations

import argparse
import getpass
import json
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path

from fleet.baseline.accept import By, accept
from fleet.planning.test_selection import skipped_tests
from fleet.quantities import quantity
from fleet.records import baseline_store, run_lock
from fleet.records.load import Run
from fleet.report.formatting import clean
from schemas import documents
from schemas.baselines import GPU, REAL, REHEARSAL, SIMULATED, Kept
from schemas.errors import HeldError, RunError, UsageError
from schemas.records import to_json
from schemas.reports import FleetReport

_NAMED = 6

Parser = argparse.ArgumentParser
Verbs = argparse._SubParsersAction
Merged = Callable[[Path, Sequence[str], Sequence[str]], tuple[Run, FleetReport]]


def add_baseline(verbs: Verbs[Parser]) -> Parser:
    """Add baseline to the command."""
    parser = verbs.add_parser(
        "baseline",
        help="what hosts and GPUs showed when they were accepted: take an accepted run into it, show it, list it",
        epilog="examples: rackproof baseline accept runs/20261121T040000Z --why 'hand-over of rack 12'; "
        "rackproof baseline list; rackproof baseline show r12-h03; rackproof baseline show 1652826070058 --json",
    )
    parser.add_argument("what", choices=["accept", "show", "list"], help="what to do")
    parser.add_argument(
        "names", nargs="*", metavar="NAME", help="accept: directories of runs; show: a host or a serial"
    )
    parser.add_argument(
        "--baseline",
        type=Path,
        default=baseline_store.DEFAULT,
        help="directory of the baselines (default: %(default)s)",
    )
    parser.add_argument("--by", help="accept: who accepts (default: the account)")
    parser.add_argument("--why", default="", help="accept: what for")
    parser.add_argument("--replace", action="store_true", help="accept: begin anew, without the runs accepted before")
    parser.add_argument("--criteria", action="append", default=[], help="accept: as the run was reported with")
    parser.add_argument("--waivers", action="append", default=[], help="accept: as the run was reported with")
    parser.add_argument(
        "--kind",
        choices=[REAL, REHEARSAL, SIMULATED],
        default=REAL,
        help="show, list: of which runs (default: %(default)s)",
    )
    parser.add_argument("--json", action="store_true", help="print it as JSON")
    return parser


def baseline(options: argparse.Namespace, merged: Merged) -> int:
    """Run the verb."""
    if options.what == "accept":
        return _accept(options, merged)
    return _show(options) if options.what == "show" else _list(options)


def _accept(options: argparse.Namespace, merged: Merged) -> int:
    if not options.names:
        raise UsageError("baseline accept: name the directory of an accepted run")
    now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    by = By(
        who=" ".join((options.by or getpass.getuser()).split())[:200], at=now, why=" ".join(options.why.split())[:1000]
    )
    taken: list[Kept] = []
    for name in options.names:
        if by_now := run_lock.active_holder(Path(name)):
            raise HeldError(
                f"{name}: run locked by {by_now.who()} since {by_now.since}: accept it after its report is written"
            )
    for number, name in enumerate(options.names):
        run, report = merged(Path(name), options.criteria, options.waivers)
        _refuse_part(run)
        taken = accept(run, report, options.baseline, by, anew=options.replace and not number)
        if not options.json:
            print(_taken(run, taken, options.baseline))
    if options.json:
        print(json.dumps([_short(one) for one in taken], indent=1))
    return 0


def _refuse_part(run: Run) -> None:
    """Raise RunError if benchmarks were left out for want of time: what was not measured would seem never to have been."""
    if names := skipped_tests(run.plan):
        more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
        raise RunError(
            f"run {run.plan.run_id} left out {', '.join(names[:_NAMED])}{more} of {run.plan.profile} (rackproof_budget_s): "
            "only a run of the whole profile can be a baseline; run it without the budget"
        )


def _taken(run: Run, taken: Sequence[Kept], directory: Path) -> str:
    gpus = sum(one.part == GPU for one in taken)
    kind = taken[0].kind if taken else REAL
    mark = "" if kind == REAL else f" ({kind.upper()}: compared with nothing but such runs)"
    waived = sorted({text for one in taken for text in one.runs[-1].waivers})
    lost = sum(level.left_out for one in taken for level in one.figures)
    told = [
        f"run {run.plan.run_id}: {len(taken) - gpus} hosts and {gpus} GPUs in {baseline_store.room(directory, kind)}{mark}"
    ]
    told += [f"accepted with a waiver: {clean(text)}" for text in waived]
    told += [f"{lost} measurements lie too far from those of other runs, and were left out"] if lost else []
    return "\n".join(told)


def _short(kept: Kept) -> dict[str, object]:
    return {
        "kind": kept.kind,
        "part": kept.part,
        "id": kept.id,
        "host": kept.host,
        "slot": kept.slot,
        "runs": [run.run_id for run in kept.runs],
        "figures": len(kept.figures),
    }


def _list(options: argparse.Namespace) -> int:
    found = list(baseline_store.everything(options.baseline, options.kind))
    if options.json:
        print(json.dumps([_short(one) for one in found], indent=1))
        return 0
    if not found:
        print(f"no baseline of kind {options.kind} in {options.baseline}")
    for one in found:
        last = one.runs[-1]
        place = f"{one.host} {one.slot}".strip()
        print(
            f"{one.part:5}{clean(one.id):28} {place:24} {len(one.figures):4} figures, {_runs(len(one.runs))}, "
            f"last {last.run_id} ({last.status}) at {last.at} by {clean(last.by)}"
        )
    return 0


def _show(options: argparse.Namespace) -> int:
    if len(options.names) != 1:
        raise UsageError("baseline show: name one host, or one serial (rackproof baseline list has them)")
    name = options.names[0]
    everything = list(baseline_store.everything(options.baseline, options.kind))
    found = [one for one in everything if one.id == name]
    if not found:
        near = documents.nearest(name, (one.id for one in everything))
        raise UsageError(
            f"no baseline of {name}{near} of kind {options.kind} in {options.baseline}: {_elsewhere(options)}"
        )
    if options.json:
        print(json.dumps([to_json(one) for one in found], indent=1))
        return 0
    for one in found:
        print("\n".join(_told(one)))
    return 0


def _elsewhere(options: argparse.Namespace) -> str:
    """Where the name may be found: in a baseline of another kind, or in the list."""
    name = options.names[0]
    for kind in (REAL, REHEARSAL, SIMULATED):
        if kind != options.kind and any(one.id == name for one in baseline_store.everything(options.baseline, kind)):
            return f"it has one of kind {kind}: give --kind {kind}"
    return f"rackproof baseline list --baseline {options.baseline} --kind {options.kind} has them"


def _told(kept: Kept) -> list[str]:
    lines_ = [f"{kept.part} {clean(kept.id)}, last accepted in {kept.host} {kept.slot}".rstrip()]
    for run in kept.runs:
        why = f": {clean(run.why)}" if run.why else ""
        lines_.append(f"  run {run.run_id} ({run.status}) at {run.at} by {clean(run.by)}{why}")
        lines_ += [f"    {clean(text)}" for text in run.waivers]
    for level in kept.figures:
        params = ",".join(f"{key}={value}" for key, value in level.params.items())
        place = f" {clean(level.within)}" if level.within else ""
        sigma = f"{level.sigma * 100:.2g} % (sigma) from run to run" if level.sigma is not None else "noise not known"
        out = f", {level.left_out} left out" if level.left_out else ""
        runs = _runs(len(level.values))
        lines_.append(
            f"  {level.name}[{clean(params)}]{place} {level.stage}: {quantity(level.value, level.unit, 5)}, {runs}, {sigma}{out}"
        )
    return lines_


def _runs(count: int) -> str:
    return "1 run" if count == 1 else f"{count} runs"
