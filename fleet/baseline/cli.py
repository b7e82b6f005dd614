"""`rackproof baseline`, `diff` and `judge`: arguments to calls."""

from __future__ import annotations

import argparse
import contextlib
import getpass
import io
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

from fleet import lock
from fleet.baseline import store
from fleet.baseline.accept import REPORT, REPORT_BYTES, By, accept
from fleet.baseline.rejudge import compared as without_left_out
from fleet.baseline.rejudge import lines, rejudged
from fleet.baseline.sight import Sight, accepted, sight, together
from fleet.baseline.waivers import read_waivers
from fleet.choice import left_out
from fleet.diff import compare, criteria_of
from fleet.judge.criteria import Pack
from fleet.report.load import Run, load, refuse_no_run
from fleet.report.render import changes as shown
from fleet.report.render.format import clean
from fleet.report.render.markup import code
from schemas import documents
from schemas.baselines import GPU, REAL, REHEARSAL, SIMULATED, Kept
from schemas.errors import HeldError, RunError, UsageError
from schemas.records import to_json
from schemas.reports import ACCEPTED, INCOMPLETE, REJECTED, FleetReport
from schemas.waivers import Waiver

SAME, DIFFERS, TROUBLE = 0, 1, 2
_NAMED = 6
EXIT = {ACCEPTED: 0, REJECTED: 1, INCOMPLETE: 2}

Parser = argparse.ArgumentParser
Verbs = argparse._SubParsersAction
Packs = Callable[[Sequence[str]], tuple[Pack, ...]]
Merged = Callable[[Path, Sequence[str], Sequence[str]], tuple[Run, FleetReport]]


# --- baseline


def add_baseline(verbs: Verbs[Parser]) -> Parser:
    """Adds baseline to the command."""
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
        "--baseline", type=Path, default=store.DEFAULT, help="directory of the baselines (default: %(default)s)"
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
    """Runs the verb."""
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
        if by_now := lock.at_it(Path(name)):
            raise HeldError(
                f"{name}: carried out by {by_now.who()} since {by_now.since}: accept it when it is reported"
            )
    for number, name in enumerate(options.names):
        run, report = merged(Path(name), options.criteria, options.waivers)
        _refuse_part(run)
        taken = accept(run, report, options.baseline, by, anew=options.replace and not number)
        if not options.json:
            print(_taken(run, taken, options.baseline))
    if options.json:
        print(json.dumps([_short(one) for one in taken], indent=1))
    return SAME


def _refuse_part(run: Run) -> None:
    """Raises RunError where benchmarks were left out for want of time: what was not measured would seem never to have been."""
    if names := left_out(run.plan):
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
    told = [f"run {run.plan.run_id}: {len(taken) - gpus} hosts and {gpus} GPUs in {store.room(directory, kind)}{mark}"]
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
    found = list(store.everything(options.baseline, options.kind))
    if options.json:
        print(json.dumps([_short(one) for one in found], indent=1))
        return SAME
    if not found:
        print(f"no baseline of kind {options.kind} in {options.baseline}")
    for one in found:
        last = one.runs[-1]
        place = f"{one.host} {one.slot}".strip()
        print(
            f"{one.part:5}{clean(one.id):28} {place:24} {len(one.figures):4} figures, {_runs(len(one.runs))}, "
            f"last {last.run_id} ({last.status}) at {last.at} by {clean(last.by)}"
        )
    return SAME


def _show(options: argparse.Namespace) -> int:
    if len(options.names) != 1:
        raise UsageError("baseline show: name one host, or one serial (rackproof baseline list has them)")
    name = options.names[0]
    everything = list(store.everything(options.baseline, options.kind))
    found = [one for one in everything if one.id == name]
    if not found:
        near = documents.nearest(name, (one.id for one in everything))
        raise UsageError(
            f"no baseline of {name}{near} of kind {options.kind} in {options.baseline}: {_elsewhere(options)}"
        )
    if options.json:
        print(json.dumps([to_json(one) for one in found], indent=1))
        return SAME
    for one in found:
        print("\n".join(_told(one)))
    return SAME


def _elsewhere(options: argparse.Namespace) -> str:
    """Where the name may be found: in a baseline of another kind, or in the list."""
    name = options.names[0]
    for kind in (REAL, REHEARSAL, SIMULATED):
        if kind != options.kind and any(one.id == name for one in store.everything(options.baseline, kind)):
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
        unit = "" if level.unit == "1" else f" {level.unit}"
        sigma = f"{level.sigma * 100:.2g} % (sigma) from run to run" if level.sigma is not None else "noise not known"
        out = f", {level.left_out} left out" if level.left_out else ""
        runs = _runs(len(level.values))
        lines_.append(
            f"  {level.name}[{clean(params)}]{place} {level.stage}: {level.value:.5g}{unit}, {runs}, {sigma}{out}"
        )
    return lines_


def _runs(count: int) -> str:
    return "1 run" if count == 1 else f"{count} runs"


def given(names: Sequence[str], run: Run) -> tuple[Waiver, ...]:
    """The waivers of those files that can be for the hosts of the run."""
    hosts = {host.name for host in run.plan.hosts}
    return tuple(waiver for name in names for waiver in read_waivers(name, hosts))


# --- diff


def add_diff(verbs: Verbs[Parser]) -> Parser:
    """Adds diff to the command."""
    parser = verbs.add_parser(
        "diff",
        help="what is not as it was: parts, versions, figures beyond noise; exits 0 none, 1 regressed or a part differs, "
        "2 cannot compare, or not all that was known before",
        description="Compares the last run named with those before it, or with a directory of baselines. Of several earlier runs "
        "the figures are settled, and their spread from run to run is the noise.",
        epilog="examples: rackproof diff runs/before runs/after; rackproof diff runs/a runs/b runs/c runs/after --json; "
        "rackproof diff baselines runs/after --markdown",
    )
    parser.add_argument(
        "places", nargs="+", metavar="RUN", help="earlier runs (or a directory of baselines), and the new run last"
    )
    parser.add_argument("--criteria", action="append", default=[], help="one more pack: a name or a .yml file")
    parser.add_argument("--all", action="store_true", help="also what improved, and what nobody judges")
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="print it as JSON")
    form.add_argument("--markdown", action="store_true", help="print it as Markdown")
    return parser


def diff(options: argparse.Namespace, packs: Packs) -> int:
    """Runs the verb."""
    if len(options.places) < 2:
        raise UsageError("diff: name an earlier run, or a directory of baselines, and the new run")
    *earlier, last = (Path(name) for name in options.places)
    run = load(last)
    new = {host: sight(left) for host, left in run.evidence.items()}
    old, what = _earlier(earlier, run)
    chosen = packs([*run.plan.criteria, *options.criteria])
    criteria = {host.name: criteria_of(run.plan, host, run.evidence[host.name], chosen) for host in run.plan.hosts}
    comparison = compare(old, new, criteria)
    hosts, count = comparison.hosts, comparison.compared
    if not count:
        raise RunError(
            f"{last}: nothing of it can be compared with {what}: no host, part and figure in common. Name runs of the same hosts"
        )
    found = comparison.changes()
    facts = [
        f"old: {what}",
        f"new: run {code(run.plan.run_id)}, profile {code(run.plan.profile)}",
        f"compared: {hosts} hosts, {count} of {comparison.figures} figures",
    ]
    kind = store.kind_of(run.plan)
    mark = "" if kind == REAL else kind
    if options.json:
        document = {
            "old": [str(place) for place in earlier],
            "new": run.plan.run_id,
            "rehearsal": run.plan.rehearsal,
            "simulated": run.plan.simulated,
            "hosts": hosts,
            "figures": count,
            "figures_measured": comparison.figures,
            "counts": {
                kind: sum(item.kind == kind for item in found) for kind in dict.fromkeys(item.kind for item in found)
            },
            "changes": [to_json(item) for item in found],
        }
        print(json.dumps(document, indent=1))
    elif options.markdown:
        print(shown.markdown(f"{mark.upper()} Changes".strip(), facts, found), end="")
    else:
        head = f"{mark.upper()}: no GPU was looked at\n" if mark else ""
        many = f"{hosts} hosts, {count} of {comparison.figures} figures compared"
        print(f"{head}{what} → {run.plan.run_id}: {many}: {shown.counts(found)}")
        first = shown.text([item for item in found if item.counts or item.untold], everything=True)
        rest = shown.text([item for item in found if not item.counts and not item.untold], everything=options.all)
        for text in filter(None, (first, rest)):
            print(text)
    if any(item.counts for item in found):
        return DIFFERS
    return TROUBLE if any(item.untold for item in found) else SAME


def _earlier(places: Sequence[Path], run: Run) -> tuple[dict[str, Sight], str]:
    """What the hosts showed before, and how that is called."""
    kind = store.kind_of(run.plan)
    if not (places[0] / "plan.json").exists() and store.room(places[0], kind).is_dir() and len(places) == 1:
        left = {
            host.name: store.of_host(places[0], kind, host.name, run.evidence[host.name].gpus())
            for host in run.plan.hosts
        }
        for problem in (found.problem for found in left.values() if found.problem):
            raise RunError(f"{problem}: remove it, or accept a run of that part again")
        return {host: accepted(found) for host, found in left.items()}, f"baseline {places[0]}"
    runs = [load(place) for place in places]
    seen = {run.plan.nonce}
    for before in runs:
        if store.kind_of(before.plan) != kind:
            raise RunError(
                f"run {before.plan.run_id} is of another kind ({store.kind_of(before.plan)}) than the new run ({kind})"
            )
        if before.plan.nonce in seen:
            raise UsageError(f"run {before.plan.run_id} is given twice: it would seem to repeat itself perfectly")
        seen.add(before.plan.nonce)
    hosts = dict.fromkeys(host for before in runs for host in before.evidence)
    old = {
        host: together([sight(before.evidence[host]) for before in runs if host in before.evidence]) for host in hosts
    }
    names = ", ".join(before.plan.run_id for before in runs)
    return old, f"run {names}" if len(runs) == 1 else f"runs {names}"


# --- judge


def add_judge(verbs: Verbs[Parser]) -> Parser:
    """Adds judge to the command."""
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
    path = options.run_dir / REPORT
    if not path.exists():
        raise RunError(
            f"{path}: no such file: there is nothing to compare with; run `rackproof report {options.run_dir}`"
        )
    try:
        old = documents.read(path, "report", max_bytes=REPORT_BYTES)
    except documents.DocumentError as error:
        raise RunError(f"{error}: run `rackproof report {options.run_dir}`") from None
    _, now = merged(options.run_dir, options.criteria, options.waivers)
    found = without_left_out(rejudged(old["verdicts"], now), old)
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


def with_waivers(run: Run, names: Sequence[str]) -> Run:
    """The run with more waivers than its plan has."""
    more = given(names, run)
    return replace(run, plan=replace(run.plan, waivers=(*run.plan.waivers, *more))) if more else run
