"""Render README.md of an RMA package, for the vendor, from part.json.

Text from hosts is escaped, and is in code spans or fenced blocks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from fleet.quantities import NONE, SIGNS, finite, quantity
from fleet.report.formatting import action_name, clean_log, join_names, params_text
from fleet.report.markup import FENCED, code, section, table
from fleet.report.tables.headline import REHEARSAL_NOTICE, SIMULATED_NOTICE
from fleet.scope_text import describe_scope

_NOTICES = {"REHEARSAL": REHEARSAL_NOTICE, "SIMULATED": SIMULATED_NOTICE}
_FIELD_NAMES = {
    "uuid": "UUID",
    "vbios": "VBIOS",
    "inforom": "InfoROM",
    "bios": "BIOS",
    "psid": "PSID",
    "pci_address": "PCI address",
    "nvml_index": "NVML index",
    "board_id": "Board id",
    "module_id": "Module id",
}
_MAX_LOG_LINES = 60
_MAX_VALUES = 8
"""A finding lists at most this many different values of other parts."""


def render_readme(document: Mapping[str, Any]) -> str:
    """Return the README of one part. `document` is its part.json (`part_document`)."""
    part = document["part"]
    model = part.get("model", part["kind"])
    serial = f", serial {code(part['serial'])}" if part.get("serial") else ", serial unknown"
    mark = f"{document['mark']}: " if document["mark"] else ""
    notice = [f"> **{document['mark']}.** {_NOTICES.get(document['mark'], '')}"] if document["mark"] else []
    action = action_name(document["action"]) or "none"
    run = document["run"]
    count = len(document["findings"])
    failures = f"{count} {'check' if count == 1 else 'checks'}" if count else "no check"
    intro = (
        f"This part failed {failures} in acceptance run {code(run['run_id'])} "
        f"({code(run['began'])} to {code(run['ended'])}, profile {code(run['profile'])}). Requested action: **{action}**."
    )
    parts = [
        f"# {mark}{'Failed' if count else 'Returned'} part: {code(model)}{serial}",
        *notice,
        intro,
        _causes(document["causes"]),
        section("Part", _facts(part)),
        section("Location", _facts(document["slot"])),
        section("Findings", _findings(document["findings"]) if count else "None in this run."),
        *([section("Could not be verified", _inconclusive(document["open"]))] if document["open"] else []),
        section("Counters, first and last reading of the run", _counters(document["counters"])),
        section(
            "Errors in the kernel log (XID, SXid and others)",
            _errors(document["errors"], document.get("errors_not_read", "")),
        ),
        *([section("Host events", _bullets(document["events"]))] if document["events"] else []),
        section("Log excerpts", _logs(document["logs"])),
        section("Versions", _versions(document["versions"]) if document["versions"] else "Not reported."),
        section("How to reproduce", _commands(document["again"])),
        section("Files", _files(run)),
    ]
    return "\n\n".join(parts) + "\n"


def _causes(causes: Sequence[Mapping[str, str]]) -> str:
    lines = []
    for cause in causes:
        why = f" {code(cause['why'])}." if cause["why"] else ""
        waiver = f" ({code(cause['waiver'])})" if cause.get("waiver") else ""
        lines.append(f"- {code(cause['title'])}.{why} {action_name(cause['action'])}{waiver}".rstrip())
    return "\n".join(lines)


def _facts(facts: Mapping[str, Any]) -> str:
    unread = facts.get("not_read", {})
    rows = [(_field_name(key), code(str(text))) for key, text in facts.items() if key != "not_read"]
    rows += [(_field_name(key), f"not read: {code(reason)}") for key, reason in unread.items()]
    return table(("", ""), rows)


def _versions(versions: Mapping[str, str]) -> str:
    return table(("Component", "Version"), [(code(key), code(text)) for key, text in versions.items()])


def _field_name(key: str) -> str:
    """Return the name of a field in words."""
    return _FIELD_NAMES.get(key, key.replace("_", " ").capitalize())


def _findings(findings: Sequence[Mapping[str, Any]]) -> str:
    columns = ("Observation", "Measured", "Limit", "Other parts of this host", "Source of the limit")
    return table(columns, [_finding(item) for item in findings])


def _finding(item: Mapping[str, Any]) -> tuple[str, ...]:
    unit, value, limit = item.get("unit", ""), item.get("value"), item.get("limit")
    params = params_text(item.get("params", {}))
    stage = f", stage {code(item['stage'])}" if item.get("stage") else ""
    name = f"{code(item['name'] + ' ' + params)} on {code(describe_scope(item['scope']))}{stage}"
    sign = SIGNS.get(item.get("operator", ""), "")
    limit_text = f"{sign} {quantity(limit, unit)}".strip() if limit is not None else NONE
    waiver = f" ({code(item['waiver'])})" if item.get("waiver") else ""
    return (
        name + waiver,
        code(quantity(value, unit)) if value is not None else code(item["reason"]),
        code(limit_text) + (f" ({code(item['detail'])})" if item.get("detail") else ""),
        _siblings(item),
        f"{code(item['criterion'])}: {code(item.get('source', ''))}",
    )


def _siblings(item: Mapping[str, Any]) -> str:
    summary, unit = item.get("siblings_summary"), item.get("unit", "")
    if summary:
        minimum, median, maximum = (quantity(summary[key], unit) for key in ("min", "median", "max"))
        return f"{summary['n']}: {code(f'{minimum} … {maximum}, median {median}')}"
    values = sorted({quantity(sibling["value"], unit) for sibling in item.get("siblings", ())})
    return f"{len(item['siblings'])}: {code(join_names(values, _MAX_VALUES))}" if values else "none measured"


def _inconclusive(findings: Sequence[Mapping[str, Any]]) -> str:
    """Return a list of the observations that could not be judged, grouped by reason."""
    names_by_reason: dict[str, dict[str, None]] = {}
    for item in findings:
        names_by_reason.setdefault(item["reason"], {})[f"{item['name']} on {describe_scope(item['scope'])}"] = None
    return "\n".join(f"- {code(reason)}: {', '.join(map(code, names))}" for reason, names in names_by_reason.items())


def _bullets(texts: Sequence[str]) -> str:
    return "\n".join(f"- {code(text)}" for text in texts)


def _counters(counters: Sequence[Mapping[str, Any]]) -> str:
    if not counters:
        return "No counter was read."
    listed = [
        item
        for item in counters
        if item.get("not_read") or any(finite(item.get(key)) != 0 for key in ("before", "after"))
    ]
    unlisted_count = len(counters) - len(listed)
    rows = [
        (
            code(f"{item['name']} {describe_scope(item['scope'])}"),
            code(quantity(item.get("before"), item["unit"])),
            code(quantity(item.get("after"), item["unit"])),
            code(quantity(item.get("rose_by"), item["unit"])),
            code(item["not_read"]) if item.get("not_read") else "",
        )
        for item in listed
    ]
    paragraphs = [table(("Counter", "Before", "After", "Increase", "Not read"), rows)] if rows else []
    others = "All counters" if not listed else "The other counters"
    paragraphs += [f"{others} ({unlisted_count}) stayed at 0; see part.json."] if unlisted_count else []
    return "\n\n".join(paragraphs)


def _errors(errors: Sequence[Mapping[str, Any]], unread: str) -> str:
    unread_note = [f"The log was not read: {code(unread)}. There may have been errors."] if unread else []
    rows = [(code(f"{item['name']} {item['scope']}"), code(str(item["count"]))) for item in errors]
    if not rows and not unread:
        return "None for this part."
    paragraphs = [table(("Error", "Times"), rows)] if rows else []
    return "\n\n".join([*paragraphs, *unread_note])


def _logs(logs: Sequence[Mapping[str, str]]) -> str:
    if not logs:
        return "No process on this part left a log, and no launch failed."
    return "\n\n".join(f"{code(item['what'])}\n\n{_fence(_last_lines(item['text']))}" for item in logs)


def _last_lines(text: str) -> str:
    """Return the last _MAX_LOG_LINES lines of a log, without control characters."""
    lines = clean_log(text).splitlines()
    return "\n".join(lines[-_MAX_LOG_LINES:]) or "(empty)"


def _fence(text: str) -> str:
    return f"```text\n{text.translate(FENCED)}\n```"


def _commands(commands: Sequence[Mapping[str, str]]) -> str:
    return "\n\n".join(
        f"{item['purpose'][:1].upper()}{item['purpose'][1:]} ({code(item['where'])}):\n\n{_fence(item['command'])}"
        for item in commands
    )


def _files(run: Mapping[str, str]) -> str:
    return "\n".join(
        [
            "- `part.json`: the same data for programs, in SI units",
            "- `observations.csv`: every observation of this part, and the failures that this part caused on other parts",
            f"- Written by Rackproof {code(run['rackproof'])}. The report on the whole fleet is `report.html` of the run.",
        ]
    )
