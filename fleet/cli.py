"""The verbs that run on the control node: arguments to calls."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import importlib
import json
import secrets
import sys
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from fleet import listed, lock
from fleet.alerts.rules import PACKS, RUNBOOK, rule_file
from fleet.baseline.cli import add_baseline, add_diff, add_judge, baseline, diff, judge, with_waivers
from fleet.baseline.store import planned
from fleet.baseline.waivers import read_waivers
from fleet.choice import refuse_budget, table
from fleet.gangs import FEWEST, decide
from fleet.history import narrowed
from fleet.inventory import Variables, check_addresses, check_variables, hosts_of, read_inventory
from fleet.judge.criteria import Pack, read_pack, read_packs, shipped_packs
from fleet.judge.lint import lint
from fleet.manifest import read_manifest
from fleet.plan import make_plan, read_profile
from fleet.report import one_host, views
from fleet.report.load import PLAN_BYTES, Run, load
from fleet.report.render.checks import checks
from fleet.report.scale import report_of
from fleet.scaling.outcome import next_cell
from fleet.signature.cli import add_sign, add_verify, sign, verify
from fleet.signature.signing import outdated
from schemas import documents, quick
from schemas.errors import RunError, UsageError
from schemas.records import to_json
from schemas.reports import ACCEPTED, INCOMPLETE, REJECTED, FleetReport

USAGE, TROUBLE, HELD = 64, 2, 75
YES = ("true", "yes", "on", "1")
"""What `-e name=value` on the command line makes of true: text."""
EXIT = {ACCEPTED: 0, REJECTED: 1, INCOMPLETE: 2}
ELSEWHERE = {
    "rma": "fleet.rma.cli:rma",
    "watch": "fleet.watch.cli:watch",
    "simulate": "fleet.simulate.cli:simulate",
    "scheduler": "fleet.scheduler:call",
    "notice": "fleet.notice:call",
    "revalidate": "fleet.revalidate:call",
    "collect": "fleet.collect:call",
    "scaling": "fleet.scaling.cli:call",
}
"""Verbs with a module of their own, which is imported where the verb is asked for: playbooks start the others again and again."""


def add_verbs(verbs: argparse._SubParsersAction[argparse.ArgumentParser], asked: str = "") -> None:
    """Adds the verbs of the control node to the command, or what is needed for one of them."""
    plan = verbs.add_parser(
        "plan",
        help="inventory and profile to the observations that must exist; exits 75 where another carries out the run",
        epilog="examples: rackproof plan -i inventory/rack12 --profile smoke; "
        "rackproof plan --hosts n1,n2 --gpus 8 --run-dir runs/r1",
    )
    plan.add_argument(
        "-i",
        "--inventory",
        action="append",
        default=[],
        help="as for ansible-playbook; may be repeated; - reads what `ansible-inventory --list` prints",
    )
    listed.add_options(plan)
    plan.add_argument("--profile", help="profile (default: the inventory's rackproof_profile, else standard)")
    plan.add_argument("--run-dir", type=Path, help="begin a run in this directory; its name is the run id")
    plan.add_argument(
        "--budget",
        help="seconds a host; what does not fit is left out (default: rackproof_budget_s; revalidation profiles only)",
    )
    plan.add_argument(
        "--history", type=Path, help="directory of earlier runs, by which is chosen (default: of --run-dir)"
    )
    plan.add_argument("--json", action="store_true", help="print the whole plan")
    plan.set_defaults(call=_plan)
    _gangs_options(verbs)
    report = verbs.add_parser(
        "report",
        help="judge a run and write its report; exits 0 accepted, 1 rejected, 2 incomplete",
        epilog="example: rackproof report runs/20261121T040000Z",
    )
    report.add_argument("run_dir", type=Path, help="directory of the run")
    report.add_argument("--criteria", action="append", default=[], help="one more pack: a name or a .yml file")
    report.add_argument("--waivers", action="append", default=[], help="a file of waivers, beside those of the plan")
    report.add_argument("--json", action="store_true", help="print decision and summary as JSON")
    views.add_options(report)
    one_host.add_option(report)
    report.set_defaults(call=_report)
    add_judge(verbs).set_defaults(call=lambda options: judge(options, _merged, _report))
    add_baseline(verbs).set_defaults(call=lambda options: baseline(options, _merged))
    add_diff(verbs).set_defaults(call=lambda options: diff(options, _packs))
    add_sign(verbs).set_defaults(call=lambda options: sign(options, _judged))
    add_verify(verbs).set_defaults(call=lambda options: verify(options, _judged))
    for verb, place in ELSEWHERE.items():
        if asked in ("", verb):
            module, _, call = place.partition(":")
            later = importlib.import_module(module)
            later.add_verb(verbs).set_defaults(call=getattr(later, call))
    power = verbs.add_parser(
        "power",
        help="from several runs of the same hosts: what each floor finds, and how often it fails a healthy part",
        epilog="example: rackproof power runs/a runs/b runs/c",
    )
    power.add_argument("run_dirs", type=Path, nargs="+", metavar="run_dir", help="directory of a run; three or more")
    power.add_argument("--criteria", action="append", default=[], help="one more pack: a name or a .yml file")
    power.add_argument("--json", action="store_true", help="print all of it as JSON")
    power.set_defaults(call=_power)
    criteria = verbs.add_parser(
        "criteria",
        help="check criteria packs (exits 0 clean, 1 with findings), list what they ask, or print them as alerts",
        epilog="examples: rackproof criteria lint my-pack.yml; rackproof criteria list h200-sxm; "
        "rackproof criteria alerts my-pack.yml > /etc/prometheus/rackproof.rules.yml",
    )
    criteria.add_argument(
        "what",
        choices=["lint", "list", "alerts"],
        help="check packs against schema, catalogue and physics; print them; or print rules for Prometheus",
    )
    criteria.add_argument(
        "packs",
        nargs="*",
        help="lint: .yml files to check beside the shipped packs; list: names or .yml files; alerts: the same, as well",
    )
    criteria.add_argument(
        "--runbook", default=RUNBOOK, help="alerts: where docs/alerts.md can be read (default: %(default)s)"
    )
    criteria.set_defaults(call=_criteria)


def _packs(names: Sequence[str]) -> tuple[Pack, ...]:
    """The shipped packs and the named ones; raises UsageError where one of those would judge something else than it says."""
    packs = read_packs(names)
    wrong = [str(finding) for pack in packs if pack.chosen for finding in lint(pack)]
    if wrong:
        more = f"\n({len(wrong) - 5} more: rackproof criteria lint)" if len(wrong) > 5 else ""
        raise UsageError("criteria that cannot judge:\n" + "\n".join(wrong[:5]) + more)
    return packs


def _plan(options: argparse.Namespace) -> int:
    if bool(options.inventory) == bool(options.hosts):
        raise UsageError(
            "give the hosts to plan for: either -i with an inventory or --hosts with their names, and not both"
        )
    hosts = listed.hosts_listed(options) if options.hosts else _hosts(options.inventory)
    first = next(iter(hosts.values()))
    profile = read_profile(options.profile or str(first.get("rackproof_profile", "standard")))
    _packs(first.get("rackproof_criteria", ()))
    for name, variables in hosts.items():
        model = variables.get("rackproof_gpu_model", "")
        if model and model not in shipped_packs():
            raise UsageError(
                f"host {name}: rackproof_gpu_model {model} is unknown{documents.nearest(model, shipped_packs())}: "
                f"there are {', '.join(shipped_packs())}"
            )
    named = first.get("rackproof_manifest")
    manifest = read_manifest(named, hosts) if named else ()
    now = datetime.now(UTC)
    budget = options.budget or first.get("rackproof_budget_s")
    refuse_budget(profile, budget)
    chosen, choice = narrowed(
        profile,
        hosts,
        budget=budget,
        runs=options.history or (options.run_dir.parent if options.run_dir else None),
        run_dir=options.run_dir,
        now=now.strftime("%Y-%m-%dT%H:%M:%SZ"),
    )
    run_id = options.run_dir.name if options.run_dir else now.strftime("%Y%m%dT%H%M%SZ")
    plan = make_plan(
        chosen,
        hosts,
        run_id=run_id,
        nonce=secrets.token_hex(16),
        created=now.strftime("%Y-%m-%dT%H:%M:%SZ"),
        manifest=manifest,
        choice=choice,
        waivers=read_waivers(waived, hosts) if (waived := first.get("rackproof_waivers")) else (),
        baseline=planned(first.get("rackproof_baseline"), profile["device"] == "cpu", hosts, options.run_dir),
    )
    document = to_json(plan)
    if options.run_dir:
        take_over = str(first.get("rackproof_take_over", False)).lower() in YES
        document = begin(options.run_dir, json.loads(json.dumps(document)), take_over)
    if options.json:
        print(json.dumps(document, indent=1))
        return 0
    expected = sum(len(plan.scopes_of(host, item)) for host in plan.hosts for item in plan.expected_of(host))
    print(
        f"run {document['run_id']}: profile {plan.profile}, {len(plan.hosts)} hosts, "
        f"{sum(len(host.devices) for host in plan.hosts)} {plan.hosts[0].device} devices, "
        + (f"a study of {len(plan.study.cells)} cells" if plan.study else f"{expected} observations expected")
        + (f", {len(plan.manifest)} parts ordered" if plan.manifest else "")
    )
    if plan.choice:
        print(table(plan.choice))
    return 0


def _hosts(sources: list[str]) -> dict[str, Variables]:
    """The hosts of an inventory, or of the listing on standard input."""
    if sources != ["-"]:
        return read_inventory(sources)
    try:
        listing = documents.parse(sys.stdin.read(), source="the inventory", max_bytes=200_000_000)
    except documents.DocumentError as error:
        raise UsageError(str(error)) from None
    hosts = hosts_of(listing)
    check_variables(hosts)
    check_addresses(hosts)
    return hosts


def begin(directory: Path, document: dict[str, object], take_over: bool = False) -> dict[str, object]:
    """Writes the plan of a new run; of a run that was cut off, the plan that is there holds."""
    path = directory / "plan.json"
    try:
        documents.validate(document, "plan", source="the plan")
    except documents.DocumentError as error:
        raise UsageError(str(error)) from None
    with _room(directory):
        note = lock.take(directory, take_over=take_over)
    if note:
        print(note, file=sys.stderr)
    if path.exists():
        try:
            there = documents.read(path, "plan", max_bytes=PLAN_BYTES)
        except documents.DocumentError as error:
            raise RunError(
                f"{error}: it is damaged, or of another version of Rackproof: choose another rackproof_run_id"
            ) from None
        same = {*document, *there} - {"nonce", "created"}
        differs = sorted(key for key in same if there.get(key) != document.get(key))
        if differs:
            raise UsageError(
                f"run {document['run_id']} was begun with other {', '.join(differs)}{_other_hosts(there, document)}: "
                "choose another rackproof_run_id, or restore the inventory and profile it was begun with"
            )
        return dict(there)
    with _room(directory):
        documents.write(path, document)
    return document


@contextlib.contextmanager
def _room(directory: Path) -> Iterator[None]:
    """Says where it was that something could not be written, since a full disk does not."""
    try:
        yield
    except OSError as error:
        if error.filename:
            raise
        raise RunError(f"{directory}: {error.strerror}: make room, or set rackproof_runs_directory") from None


def _other_hosts(there: Mapping[str, Any], document: Mapping[str, Any]) -> str:
    """Which hosts are not those that the run was begun with, and in what; a few of them."""
    old, new = ({host["name"]: host for host in plan["hosts"]} for plan in (there, document))
    found = [f"{name} is new" for name in new if name not in old] + [
        f"{name} is left out" for name in old if name not in new
    ]
    for name in filter(old.__contains__, new):
        keys = sorted(key for key in {*old[name], *new[name]} if old[name].get(key) != new[name].get(key))
        found += [f"{name}: other {', '.join(keys)}"] if keys else []
    more = [f"and {len(found) - 3} more"] if len(found) > 3 else []
    return f" ({'; '.join(found[:3] + more)})" if found else ""


def _gangs_options(verbs: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    gangs = verbs.add_parser(
        "gangs",
        help="from the gang records fetched so far: which hosts of a run launch together next; none when all is done",
        epilog="example: rackproof gangs --run-dir runs/20261121T040000Z --hosts r12-h01,r12-h02,r12-h03",
    )
    gangs.add_argument("--run-dir", type=Path, required=True, help="directory of the run on the control node")
    gangs.add_argument(
        "--hosts", default="", help="those that can be reached, comma between them; - reads them (default: all planned)"
    )
    gangs.add_argument("--minimum", type=int, default=FEWEST, help="fewest hosts that launch together (default: 2)")
    gangs.add_argument(
        "--json", action="store_true", help="for programs: launches, which of them is each host's, and who left and why"
    )
    gangs.set_defaults(call=_gangs)


def _gangs(options: argparse.Namespace) -> int:
    run = load(options.run_dir, alone=False, study=True)
    named = sys.stdin.read() if options.hosts == "-" else options.hosts
    present = set(named.replace(",", " ").split()) if options.hosts else {host.name for host in run.plan.hosts}
    planned = [host.name for host in run.plan.hosts]
    if unknown := sorted(present.difference(planned)):
        raise UsageError(
            f"--hosts: {unknown[0]} is not in the plan of run {run.plan.run_id}{documents.nearest(unknown[0], planned)}: "
            "give names that the plan has, comma between them"
        )
    if run.plan.study:
        found = next_cell(run.plan, run.evidence, present)
    else:
        found = decide(run.plan, run.evidence, _packs(run.plan.criteria), present=present, minimum=options.minimum)
    for start in found.starts:  # where this is, whoever goes on after us looks for records first
        (options.run_dir / "gangs" / start.gang).mkdir(parents=True, exist_ok=True)
    if options.json:
        print(json.dumps(found.document()))
        return 0
    print("\n".join(map(str, found.starts)) or "nothing is left to launch")
    for host, why in found.left.items():
        print(f"{host}: {why}")
    return 0


def _merged(run_dir: Path, criteria: Sequence[str], waivers: Sequence[str] = ()) -> tuple[Run, FleetReport]:
    """The run and its report: what `report` writes, and what `sign` and `verify` hold report.json against."""
    run = with_waivers(load(run_dir), waivers)
    packs = _packs([*run.plan.criteria, *criteria])
    return run, report_of(run, packs)


def _judged(run_dir: Path, criteria: Sequence[str], waivers: Sequence[str]) -> FleetReport:
    return _merged(run_dir, criteria, waivers)[1]


def _report(options: argparse.Namespace) -> int:
    from fleet.report.render.html import render_html
    from fleet.report.render.markdown import render_markdown
    from fleet.report.render.prometheus import render_prometheus
    from fleet.report.render.text import render_summary

    views.check_options(options)
    _note_that_it_goes_on(options.run_dir)
    if getattr(options, "host", None):
        run = with_waivers(load(options.run_dir), options.waivers)
        return EXIT[one_host.write_page(options, run, _packs([*run.plan.criteria, *options.criteria]))]
    run, report = _merged(options.run_dir, options.criteria, options.waivers)
    document = to_json(report)
    quick.validate(document, "report", source="our own report")
    text = quick.text(document) if run.large else documents.text(document)
    documents.write_text(options.run_dir / "report.json", text)
    documents.write_text(options.run_dir / "report.md", render_markdown(report, run.plan.grafana_url))
    documents.write_text(options.run_dir / "report.html", render_html(report, run.plan.grafana_url))
    documents.write_text(options.run_dir / "verdicts.prom", render_prometheus(report))
    views.write_views(options.run_dir, report, run.evidence, options)
    lock.release(options.run_dir, report.decision)
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
        print(f"report: {options.run_dir / 'report.html'}")
    if note := outdated(options.run_dir):
        print(f"rackproof: {note}", file=sys.stderr)
    return EXIT[report.decision]


def _note_that_it_goes_on(run_dir: Path) -> None:
    """Anybody may look at a run meanwhile; but then nobody must take what is judged for all that there will be."""
    if by := lock.at_it(run_dir):
        print(
            f"rackproof: note: the run goes on, carried out by {by.who()} since {by.since}: this judges what there is of it "
            "so far, and it is reported again at its end",
            file=sys.stderr,
        )


def _power(options: argparse.Namespace) -> int:
    from fleet.judge.power import LEAST_RUNS, power
    from fleet.report.render.power import render_power

    if len(options.run_dirs) < LEAST_RUNS:
        raise UsageError(
            f"{len(options.run_dirs)} of at least {LEAST_RUNS} run directories: noise cannot be told from fewer runs"
        )
    runs = [load(directory) for directory in options.run_dirs]
    packs = _packs([*runs[0].plan.criteria, *options.criteria])
    found = power([(run.plan, run.evidence) for run in runs], packs)
    simulated = any(run.plan.simulated for run in runs)
    document = {**dataclasses.asdict(found), "simulated": simulated}
    head = "SIMULATED: figures of rackproof simulate, not of hardware\n" if simulated else ""
    print(json.dumps(document, indent=1) if options.json else f"{head}{render_power(found)}")
    return 0


def _criteria(options: argparse.Namespace) -> int:
    if options.what == "list":
        print(checks([read_pack(name) for name in options.packs or ["common"]]), end="")
        return 0
    if options.what == "alerts":
        print(rule_file([read_pack(name) for name in (*PACKS, *options.packs)], options.runbook), end="")
        return 0
    packs = [read_pack(name) for name in (*shipped_packs(), *options.packs)]
    findings = dict.fromkeys(finding for pack in packs for finding in lint(pack))
    for finding in findings:
        print(finding)
    checked = len({(item.origin, item.id) for pack in packs for item in pack.criteria})
    if not findings:
        print(f"{len(packs)} packs with {checked} criteria: nothing found")
    return 1 if findings else 0
