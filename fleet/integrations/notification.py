"""The verb `notice`: what is told of a run that was judged, for a webhook or as a mail; nothing where nobody is to be told."""

from __future__ import annotations

import argparse
import json
from collections.abc import Collection, Mapping
from email.message import EmailMessage
from email.utils import formatdate, make_msgid
from pathlib import Path
from typing import Any

from fleet.integrations import scheduler
from fleet.records.load import refuse_no_run
from schemas import documents
from schemas.errors import RunError, UsageError
from schemas.plans import Plan, plan_from_json
from schemas.reports import ACCEPTED, INCOMPLETE, PASS, REJECTED, VerdictKind
from schemas.run_directory import PAGE, RunDirectory

IN_USE = "busy"
STATES = (ACCEPTED, REJECTED, INCOMPLETE, IN_USE)
MOST_LINES, MOST_HOSTS = 12, 10
BYTES = 400_000_000


def add_verb(verbs: argparse._SubParsersAction[argparse.ArgumentParser]) -> argparse.ArgumentParser:
    """Add notice to the command."""
    notice = verbs.add_parser(
        "notice",
        help="decision, summary and link of a run as JSON for a webhook, or as a mail; nothing where it is not to be told",
        epilog="example: rackproof notice runs/rack12-20261121 --on rejected,incomplete --link https://runs.example.org",
    )
    notice.add_argument("run_dir", type=Path, help="directory of the run, which has a report")
    notice.add_argument(
        "--on", default=",".join(STATES), help="what is told: accepted, rejected, incomplete, busy (default: all)"
    )
    notice.add_argument(
        "--link", default="", help="URL of the directory of the runs (default: the report's path is told)"
    )
    notice.add_argument(
        "--mail-to", action="append", default=[], metavar="ADDRESS", help="write a mail to this address"
    )
    notice.add_argument(
        "--mail-from", default="", metavar="ADDRESS", help="of the mail (default: the mail program chooses)"
    )
    return notice


def call(options: argparse.Namespace) -> int:
    """Run the verb."""
    on = [word for word in options.on.split(",") if word]
    if unknown := [word for word in on if word not in STATES]:
        raise UsageError(f"--on {unknown[0]}{documents.nearest(unknown[0], STATES)}: choose from {', '.join(STATES)}")
    report, plan = read(options.run_dir)
    told = notice(report, plan, link=options.link, directory=options.run_dir)
    if told["state"] in on or (on and told["drained"]):
        print(mail(told, options.mail_to, options.mail_from) if options.mail_to else json.dumps(told))
    return 0


def read(directory: Path) -> tuple[dict[str, Any], Plan]:
    """Report and plan of a run. Raises RunError where one of them is not there, or is none."""
    refuse_no_run(directory)
    try:
        report = documents.parse(RunDirectory(directory).report.read_bytes(), source="report.json", max_bytes=BYTES)
        plan = plan_from_json(documents.read(RunDirectory(directory).plan, "plan", max_bytes=BYTES))
        documents.validate(report, "report", source="report.json")
    except (OSError, documents.DocumentError) as error:
        raise RunError(f"{directory} has no report that can be read ({error}): rackproof report {directory}") from None
    return report, plan


def state(report: Mapping[str, Any], plan: Plan) -> tuple[str, dict[str, str]]:
    """The decision, but `busy` where it is incomplete only since hosts were in use; and those hosts with the reasons."""
    lost = [item for item in report["verdicts"] if item["verdict"] != PASS and not item.get("waiver")]
    busy = {item["host"]: item["user"] for item in lost if item.get("kind") == VerdictKind.IN_USE}
    for item in lost:  # a host of which something else stands as well is not just in use
        if item.get("kind") != VerdictKind.IN_USE:
            busy.pop(item["host"], None)
    short = {host.gang for host in plan.hosts if host.gang and host.name in busy}
    partners = {host.name for host in plan.hosts if host.gang in short}
    others = [
        item
        for item in lost
        if item["host"] not in busy and not (item["host"] in partners and item.get("stage") == "gang")
    ]
    only = report["decision"] == INCOMPLETE and bool(busy) and not others and not report.get("quarantined")
    return (IN_USE if only else str(report["decision"])), busy


def notice(report: Mapping[str, Any], plan: Plan, *, link: str, directory: Path) -> dict[str, Any]:
    """What is told. `text` alone is enough for a person; chat programs show it."""
    found, busy = state(report, plan)
    where = f"{link.rstrip('/')}/{plan.run_id}/{PAGE}" if link else str(RunDirectory(directory).page.absolute())
    names = [*busy][:MOST_HOSTS] + ([f"{len(busy) - MOST_HOSTS} more"] if len(busy) > MOST_HOSTS else [])
    mark = " ".join(filter(None, ("SIMULATED" if plan.simulated else "", "REHEARSAL" if plan.rehearsal else "")))
    head = f"{mark + ' ' if mark else ''}{report['decision']}: run {plan.run_id}, profile {plan.profile}, {len(plan.hosts)} hosts"
    head += f" ({plan.reason})" if plan.reason else ""
    head += f"; in use and not measured: {', '.join(names)}" if busy else ""
    lines = [_plain(line) for line in report["acceptance"]["summary"]]
    more = [f"… and {len(lines) - MOST_LINES} more lines in the report"] if len(lines) > MOST_LINES else []
    shown = [*lines[:MOST_LINES], *more]
    drained = scheduler.still_drained(directory)
    amiss = (
        [f"NOT GIVEN BACK to the scheduler: {', '.join(drained[:MOST_HOSTS])}: rackproof scheduler resume"]
        if drained
        else []
    )
    amiss = [_plain(line) for line in (*amiss, *scheduler.notes(directory)[:MOST_LINES])]
    return {
        "text": "\n".join([_plain(head), *amiss, *shown, where]),
        "state": found,
        "decision": report["decision"],
        "run_id": plan.run_id,
        "profile": plan.profile,
        "rehearsal": plan.rehearsal,
        "reason": plan.reason,
        "busy": busy,
        "drained": drained,
        "notes": amiss,
        "summary": shown,
        "report": where,
    }


def _plain(line: str) -> str:
    """Without control characters: what hosts say ends in chats and mail programs."""
    return "".join(character if character.isprintable() else " " for character in str(line))[:500]


def mail(told: Mapping[str, Any], to: Collection[str], sender: str) -> str:
    """The same as a mail for sendmail -t."""
    message = EmailMessage()
    try:
        message["Subject"] = str(told["text"]).splitlines()[0][:200]
        message["To"] = ", ".join(to)
        if sender:
            message["From"] = sender
    except ValueError as error:
        raise UsageError(f"an address or the subject cannot stand in a mail: {error}") from None
    message["Date"] = formatdate()
    message["Message-ID"] = make_msgid(domain="rackproof.invalid")
    message["Auto-Submitted"] = "auto-generated"
    message.set_content(str(told["text"]))
    return message.as_string()
