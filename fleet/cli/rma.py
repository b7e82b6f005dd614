"""`rackproof rma`: write what a vendor needs to replace each failed part."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fleet.judge.evidence import Evidence
from fleet.records.load import REPORT_BYTES, Run, load, require_run
from fleet.records.newest import run_or_newest
from fleet.report.formatting import clean
from fleet.report.observations import COLUMNS, SharedFields, rows, rows_as_csv
from fleet.report.terminal import width_of
from fleet.rma.files import package_names, to_json_text, write_package
from fleet.rma.listing import Package, cause_rows, render_rows
from fleet.rma.operator_reason import parts_with_serial, with_reason
from fleet.rma.part_document import ReportFacts, part_document
from fleet.rma.parts import HOST, FailedPart, failed_parts, is_within
from fleet.rma.readme import render_readme
from schemas import documents
from schemas.errors import RunError, UsageError
from schemas.reports import PASS, Cause, CausePart, Verdict, mark
from schemas.run_directory import RunDirectory
from schemas.waivers import Waiver


def add_verb(verbs: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add rma to the command."""
    verb = verbs.add_parser(
        "rma",
        help="write what a vendor needs for each part that the report says to return, inspect or reseat: rma/<serial>/ in the "
        "run directory",
        description="Prints the causes of the report with their actions; with --serial or --host, only those of the named parts. "
        "Writes rma/<serial>/ (README.md, part.json, observations.csv) for every part in a host that must be returned, inspected "
        "or reseated.",
        epilog="examples: rackproof rma; rackproof rma runs/rack12; rackproof rma runs/rack12 --serial 1650123000456 --zip; "
        "rackproof rma --serial 1650123000456 --reason 'RackproofFatalXid: XID 79'. "
        "Exit codes: 0 written, or no part needs work; 2 no valid report of this run; 64 the named host or part has no failure.",
    )
    verb.add_argument("run_dir", type=Path, nargs="?", help="directory of the run (default: the newest in runs/)")
    verb.add_argument(
        "--serial",
        help="only the part with this serial, even if the report does not say to return, inspect or reseat it",
    )
    verb.add_argument("--host", help="only the failed parts of this host, including those that need no work themselves")
    verb.add_argument(
        "--reason",
        help="return the part of --serial for this reason, such as an alert, even if the run found no failure in it",
    )
    verb.add_argument("--zip", action="store_true", help="also write rma/<serial>.zip")
    verb.add_argument(
        "--json",
        action="store_true",
        help="print the causes as JSON, each with host, place, serial, slot, action, and the path of its package",
    )
    verb.set_defaults(call=call)


def call(options: argparse.Namespace) -> int:
    """Run the verb."""
    if options.reason is not None and (options.serial is None or not options.reason.strip()):
        raise UsageError("--reason: give a text that is not empty, and --serial with the serial of the part to return")
    options.run_dir = run_or_newest(options.run_dir)
    require_run(options.run_dir)
    report = _report(options.run_dir)
    run = load(options.run_dir)
    if report["run_id"] != run.plan.run_id:
        raise RunError(
            f"{options.run_dir}: report.json is of run {clean(report['run_id'])}, but the plan is of run {run.plan.run_id}: "
            f"run rackproof report {options.run_dir}"
        )
    verdicts, causes, facts = [_verdict(item) for item in report["verdicts"]], _causes(report), _facts(report)
    failed = failed_parts(causes, verdicts)
    is_named = options.serial is not None or options.host is not None
    wanted = [part for part in failed if (part.needs_part_work or is_named) and options.host in (None, part.host)]
    entries = [(part, part_document(part, run.plan, facts, _evidence(run, part))) for part in wanted]
    chosen = [item for item in entries if options.serial in (None, item[1]["part"].get("serial"))]
    if options.reason is not None:
        returned = [part for part, _ in chosen] or parts_with_serial(run.evidence, _hosts(options, run), options.serial)
        parts = [with_reason(part, options.reason) for part in returned]
        chosen = [(part, part_document(part, run.plan, facts, _evidence(run, part))) for part in parts]
        causes = [*(part.causes[0] for part in parts), *causes]
    if is_named and not chosen:
        raise UsageError(_nothing_written(options, failed, entries))
    packages: dict[tuple[str, str], Package] = {}
    for (part, document), name in zip(chosen, package_names([document for _, document in chosen]), strict=True):
        files = {
            "README.md": render_readme(document),
            "part.json": to_json_text(document),
            "observations.csv": _observations(facts, run, part),
        }
        packages[part.host, part.scope] = Package(
            path=write_package(options.run_dir, name, files, options.zip),
            model=document["part"].get("model", document["part"]["kind"]),
            slot=document["slot"].get("pci_address", ""),
        )
    rows = [row for row in cause_rows(causes, packages, any_action=is_named) if row.package or not is_named]
    if options.json:
        print(json.dumps([{"mark": facts.mark, **row.as_json()} for row in rows], indent=1))
    else:
        print(render_rows(rows, facts.mark, width_of()))
    return 0


def _hosts(options: argparse.Namespace, run: Run) -> list[str]:
    """Return the host in `--host`, which may be absent from the run; without `--host`, return all hosts of the run."""
    return [options.host] if options.host is not None else list(run.evidence)


def _report(run_dir: Path) -> Mapping[str, Any]:
    try:
        document: Mapping[str, Any] = documents.read(RunDirectory(run_dir).report, "report", max_bytes=REPORT_BYTES)
    except documents.DocumentError as error:
        raise RunError(f"{error}: run rackproof report {run_dir}") from None
    return document


def _verdict(item: Mapping[str, Any]) -> Verdict:
    waiver = item.get("waiver")
    return Verdict(**{**item, "waiver": Waiver(**waiver) if waiver else None})


def _causes(report: Mapping[str, Any]) -> list[Cause]:
    if "causes" not in report and any(item["verdict"] != PASS for item in report["verdicts"]):
        raise RunError(
            "report.json is of an earlier version of Rackproof and has no causes: run rackproof report again"
        )
    return [
        Cause(
            **{
                **item,
                "parts": tuple(CausePart(**part) for part in item["parts"]),
                "hosts": tuple(item["hosts"]),
                "verdicts": tuple(item["verdicts"]),
                "waiver": Waiver(**item["waiver"]) if item.get("waiver") else None,
                "why": item.get("why", ""),
            }
        )
        for item in report.get("causes", ())
    ]


def _facts(report: Mapping[str, Any]) -> ReportFacts:
    hosts = {host["name"]: host for host in report["hosts"]}
    return ReportFacts(
        decision=report["decision"],
        mark=mark(simulated=report.get("simulated", False), rehearsal=report["rehearsal"]),
        ended=report["ended"],
        rackproof=report["rackproof"],
        racks={name: host["rack"] for name, host in hosts.items()},
        software={name: host.get("software", {}) for name, host in hosts.items()},
        events={name: host.get("events", ()) for name, host in hosts.items()},
    )


def _evidence(run: Run, part: FailedPart) -> Evidence:
    return run.evidence.get(part.host, Evidence())


def _nothing_written(
    options: argparse.Namespace, failed: Sequence[FailedPart], entries: Sequence[tuple[FailedPart, Mapping[str, Any]]]
) -> str:
    """Return the error message if `--host` and `--serial` select no failed part (with `--reason`: no part)."""
    if options.reason is not None:
        searched = clean(options.host) if options.host is not None else "any host of this run"
        return f"{clean(options.serial)}: no part of {searched} has this serial; give the run and the host that had the part"
    serials = [document["part"].get("serial", "") for _, document in entries]
    known = list(dict.fromkeys(serials if options.serial is not None and entries else [part.host for part in failed]))
    available = ", ".join(clean(text) for text in known[:10] if text) or "nothing"
    named = options.serial if options.serial is not None and entries else options.host or options.serial
    remedy = "; to return the part anyway: --reason TEXT" if options.serial is not None else ""
    return f"{clean(named)}: no failure in this run{documents.nearest(named, known)}; failures on: {available}{remedy}"


def _observations(facts: ReportFacts, run: Run, part: FailedPart) -> str:
    """Return observations.csv: the observations of the part, and some of other parts of its host.

    An observation of another part is included if its verdict failed and is attributed to this part.
    """
    head = SharedFields(mark=facts.mark, run_id=run.plan.run_id)
    observed = rows(part.host, facts.racks.get(part.host, ""), _evidence(run, part), [*part.findings, *part.open])
    attributed = {(verdict.scope, verdict.name) for verdict in part.findings if verdict.part and verdict.scope != HOST}
    selected = [row for row in observed if is_within(row.scope, part.scope) or (row.scope, row.name) in attributed]
    return ",".join(COLUMNS) + "\r\n" + rows_as_csv(head, selected)
