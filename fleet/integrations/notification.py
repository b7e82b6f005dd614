"""Build the notification about a judged run: JSON for a webhook, or text for a mail."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from email.message import EmailMessage
from email.utils import formatdate, make_msgid
from pathlib import Path
from typing import Any

from fleet.integrations import scheduler
from fleet.quantities import counted
from fleet.records.load import REPORT_BYTES, require_run
from fleet.report.formatting import cause_action
from schemas import documents
from schemas.errors import RunError, UsageError, printable
from schemas.plans import Plan
from schemas.reports import ACCEPTED, FAIL, INCOMPLETE, PASS, REJECTED, LineKind, VerdictKind, mark
from schemas.run_directory import PAGE, RunDirectory
from schemas.stages import GANG

IN_USE = "busy"
STATES = (ACCEPTED, REJECTED, INCOMPLETE, IN_USE)
MAX_LINES, MAX_HOSTS, MAX_CHARACTERS = 12, 10, 500
"""Maximum number of lines about the report, of hosts in a list of hosts, and of characters in a line."""
_MAX_CAVEATS = 5


def read(directory: Path) -> tuple[dict[str, Any], Plan]:
    """Return the report and the plan of a run. Raise RunError if either is missing or invalid."""
    require_run(directory)
    try:
        report = documents.read(RunDirectory(directory).report, "report", max_bytes=REPORT_BYTES)
        plan = RunDirectory(directory).read_plan()
    except documents.DocumentError as error:
        raise RunError(f"{directory} has no valid report ({error}): run rackproof report {directory}") from None
    return report, plan


def state(report: Mapping[str, Any], plan: Plan) -> tuple[str, dict[str, str]]:
    """Return the state for the notification (one of STATES), and the hosts in use: host -> what uses it.

    The state is the decision on the run. It is `busy` instead if the run is incomplete only because hosts were in use. If a host
    of a gang (one multi-node launch) was in use, the gang stage of its partners is incomplete too. This does not prevent `busy`.
    """
    open_items = [item for item in report["verdicts"] if item["verdict"] != PASS and not item.get("waiver")]
    busy = {item["host"]: item.get("user", "") for item in open_items if item.get("kind") == VerdictKind.IN_USE}
    for item in open_items:  # a host with a failed or incomplete verdict of another kind is not in `busy`
        if item.get("kind") != VerdictKind.IN_USE:
            busy.pop(item["host"], None)
    incomplete_gangs = {host.gang for host in plan.hosts if host.gang and host.name in busy}
    partners = {host.name for host in plan.hosts if host.gang in incomplete_gangs}
    other_items = [
        item
        for item in open_items
        if item["host"] not in busy and not (item["host"] in partners and item.get("stage") == GANG)
    ]
    is_only_in_use = (
        report["decision"] == INCOMPLETE and bool(busy) and not other_items and not report.get("quarantined")
    )
    return (IN_USE if is_only_in_use else str(report["decision"])), busy


def payload(report: Mapping[str, Any], plan: Plan, *, link: str, directory: Path) -> dict[str, Any]:
    """Return the notification as a JSON object. Chat programs show only `text`, so it repeats the most important fields.

    Args:
        report, plan: the run's report and plan.
        link: URL of the directory that contains the run directories. If it is empty, the notification has the path of the report
            instead of its URL.
        directory: the run directory.
    """
    outcome, busy = state(report, plan)
    page_location = f"{link.rstrip('/')}/{plan.run_id}/{PAGE}" if link else _path(RunDirectory(directory).page)
    names = [*busy][:MAX_HOSTS] + ([f"{len(busy) - MAX_HOSTS} more"] if len(busy) > MAX_HOSTS else [])
    decision = f"{mark(simulated=plan.simulated, rehearsal=plan.rehearsal)} {report['decision']}".strip()
    head = f"{decision}: run {plan.run_id}, profile {plan.profile}, {counted(len(plan.hosts), 'host')}"
    head += f" ({plan.reason})" if plan.reason else ""
    head += f"; in use and not measured: {', '.join(names)}" if busy else ""
    shown = [_plain(line) for line in _shown_lines(report)]
    drained = scheduler.still_drained(directory)
    notes = [*_drained_lines(drained, directory), *scheduler.notes(directory)[:MAX_LINES]]
    notes = [_plain(line) for line in notes]
    return {
        "text": "\n".join([_plain(head), *notes, *shown, page_location]),
        "state": outcome,
        "decision": report["decision"],
        "run_id": plan.run_id,
        "profile": plan.profile,
        "rehearsal": plan.rehearsal,
        "simulated": plan.simulated,
        "reason": plan.reason,
        "busy": busy,
        "drained": drained,
        "notes": notes,
        "summary": shown,
        "report": page_location,
    }


def failure(why: str, directory: Path) -> dict[str, Any]:
    """Return the notification that a run has no report. `why` is the reason, `directory` is the run directory."""
    drained, what = scheduler.still_drained(directory), _plain(why)
    name = printable(directory.name)
    lines = [f"incomplete: run {name} has no report: {what}", *_drained_lines(drained, directory)]
    return {
        "text": "\n".join(map(_plain, lines)),
        "state": INCOMPLETE,
        "decision": INCOMPLETE,
        "run_id": name,
        "busy": {},
        "drained": drained,
        "summary": [what],
    }


def _drained_lines(drained: Sequence[str], directory: Path) -> list[str]:
    """Return a line that names the hosts that the run left drained, and how to resume them; empty if there are none."""
    left = [*drained[:MAX_HOSTS], *([f"{len(drained) - MAX_HOSTS} more"] if len(drained) > MAX_HOSTS else [])]
    resume = f"rackproof scheduler resume --run-dir {_path(directory)}"
    return [f"STILL DRAINED in the scheduler: {', '.join(left)}: {resume}"] if drained else []


def _shown_lines(report: Mapping[str, Any]) -> list[str]:
    """Return the lines about the report: counts and caveats, a line for each cause, and lines with further hosts.

    There are at most _MAX_CAVEATS counts and caveats, and at most MAX_LINES lines in all. If lines are left out, one more line
    gives their number. The lines with further hosts ("Failed as well", "Incomplete as well") come last.

    If the report has no causes, return its summary without the lines about checks and criteria. If the report is so old that its
    lines have no kinds, return its whole summary.
    """
    texts, lines = list(report["acceptance"]["summary"]), list(report["acceptance"].get("lines", ()))
    causes = [_cause(cause) for cause in report.get("causes", ())]
    if not causes or len(lines) != len(texts):  # the oldest reports have no `lines` with kinds
        kinds = [line["kind"] for line in lines] if len(lines) == len(texts) else [""] * len(texts)
        return _first(
            [text for kind, text in zip(kinds, texts, strict=True) if kind not in (LineKind.CHECK, LineKind.CRITERIA)]
        )
    replaced = {LineKind.CHECK, LineKind.CRITERIA, LineKind.MORE, LineKind.REASON}
    caveats = [text for line, text in zip(lines, texts, strict=True) if line["kind"] not in replaced]
    hosts = [
        text
        for line, text in zip(lines, texts, strict=True)
        if line["kind"] == LineKind.MORE and "hosts" in line.get("values", ())
    ]
    shown = _first([*caveats[:_MAX_CAVEATS], *causes], MAX_LINES - len(hosts), left_out=len(caveats[_MAX_CAVEATS:]))
    return [*shown, *hosts]


def _first(texts: Sequence[str], most: int = MAX_LINES, left_out: int = 0) -> list[str]:
    """Return the first `most` texts. If lines are left out, add a line with their number.

    `left_out` is the number of lines that the caller has left out.
    """
    more = len(texts[most:]) + left_out
    return [*texts[:most], *([f"… and {counted(more, 'more line')} in the report"] if more > 0 else [])]


def _cause(cause: Mapping[str, Any]) -> str:
    """Return a line about a cause: the verdict, the title, the serial of the part, the reason, and what to do."""
    word = "waived" if cause.get("waiver") else "FAIL" if cause["verdict"] == FAIL else "INCOMPLETE"
    serial = f" (serial {cause['serial']})" if cause.get("serial") else ""
    action = cause_action(cause["verdict"], cause.get("action", "none"), cause.get("problem", ""))
    why = f": {cause['why']}" if cause.get("why") else ""
    return f"{word}: {cause['title']}{serial}{why}{f'; {action}' if action else ''}"


def _path(path: Path) -> str:
    """Return the absolute path as text. Bytes that are not UTF-8 are escaped, because JSON and mails cannot have them."""
    return printable(str(path.absolute()))


def _plain(line: str) -> str:
    """Return `line` with a space for each unprintable character (text from hosts may contain some).

    A line that is longer than MAX_CHARACTERS is cut and ends in `…`.
    """
    text = "".join(character if character.isprintable() else " " for character in str(line))
    return text if len(text) <= MAX_CHARACTERS else f"{text[: MAX_CHARACTERS - 1]}…"


def mail(notification: Mapping[str, Any], to: Collection[str], sender: str) -> str:
    """Return the notification as a mail for sendmail -t. Raise UsageError if an address is invalid."""
    message = EmailMessage()
    try:
        message["Subject"] = str(notification["text"]).splitlines()[0][:200]
        message["To"] = ", ".join(to)
        if sender:
            message["From"] = sender
    except ValueError as error:
        raise UsageError(f"invalid mail address or subject: {error}") from None
    message["Date"] = formatdate()
    message["Message-ID"] = make_msgid(domain="rackproof.invalid")
    message["Auto-Submitted"] = "auto-generated"
    message.set_content(str(notification["text"]))
    return message.as_string()
