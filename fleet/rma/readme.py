"""Render README.md of a package, which a vendor reads first. Text from hosts is in code spans and fences that it cannot break."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from fleet.quantities import NONE, SIGNS, finite, quantity
from fleet.report.formatting import action_name, clean_log, params_text
from fleet.report.markup import FENCED, code, section, table
from fleet.report.scope_text import describe_scope
from fleet.report.tables.headline import REHEARSAL_NOTICE, SIMULATED_NOTICE

_NOTICES = {"REHEARSAL": REHEARSAL_NOTICE, "SIMULATED": SIMULATED_NOTICE}
_NAMES = {
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
_LOG_LINES = 60


def render_readme(document: Mapping[str, Any]) -> str:
    """Return the README of one part."""
    part = document["part"]
    what = " ".join(text for text in (part.get("model", part["kind"]),) if text)
    serial = f", serial {code(part['serial'])}" if part.get("serial") else ", serial unknown"
    mark = f"{document['mark']}: " if document["mark"] else ""
    notice = [f"> **{document['mark']}.** {_NOTICES.get(document['mark'], '')}"] if document["mark"] else []
    action = action_name(document["action"]) or "none"
    run = document["run"]
    intro = (
        f"This part failed {len(document['findings'])} criteria in acceptance run {code(run['run_id'])} "
        f"({code(run['began'])} to {code(run['ended'])}, profile {code(run['profile'])}). Requested action: **{action}**."
    )
    parts = [
        f"# {mark}Failed part: {code(what)}{serial}",
        *notice,
        intro,
        section("Part", _facts(part)),
        section("Location", _facts(document["slot"])),
        section("Findings", _findings(document["findings"])),
        *([section("Could not be verified", _open(document["open"]))] if document["open"] else []),
        section("Counters, first and last reading of the run", _counters(document["counters"])),
        section(
            "GPU errors in the kernel log (XID, SXid)", _errors(document["errors"], document.get("errors_not_read", ""))
        ),
        *([section("Host events", _list(document["events"]))] if document["events"] else []),
        section("Log excerpts", _logs(document["logs"])),
        section("Versions", _versions(document["versions"]) if document["versions"] else "Not reported."),
        section("How to reproduce", _commands(document["again"])),
        section("Files", _files(run)),
    ]
    return "\n\n".join(parts) + "\n"


def _facts(facts: Mapping[str, Any]) -> str:
    unread = facts.get("not_read", {})
    rows = [(_named(key), code(str(text))) for key, text in facts.items() if key != "not_read"]
    rows += [(_named(key), f"not read: {code(why)}") for key, why in unread.items()]
    return table(("", ""), rows)


def _versions(versions: Mapping[str, str]) -> str:
    return table(("Component", "Version"), [(code(key), code(text)) for key, text in versions.items()])


def _named(key: str) -> str:
    """Return a field name in words."""
    return _NAMES.get(key, key.replace("_", " ").capitalize())


def _findings(findings: Sequence[Mapping[str, Any]]) -> str:
    columns = ("Observation", "Measured", "Limit", "Other parts of this host", "Action", "Source of the limit")
    return table(columns, [_finding(item) for item in findings])


def _finding(item: Mapping[str, Any]) -> tuple[str, ...]:
    unit, value, limit = item.get("unit", ""), item.get("value"), item.get("limit")
    params = params_text(item.get("params", {}))
    stage = f", stage {code(item['stage'])}" if item.get("stage") else ""
    name = f"{code(item['name'] + ' ' + params)} on {code(describe_scope(item['scope']))}{stage}"
    sign = SIGNS.get(item.get("operator", ""), "")
    wanted = f"{sign} {quantity(limit, unit)}".strip() if limit is not None else NONE
    waived = f" ({code(item['waiver'])})" if item.get("waiver") else ""
    return (
        name,
        code(quantity(value, unit)) if value is not None else code(item["reason"]),
        code(wanted) + (f" ({code(item['detail'])})" if item.get("detail") else ""),
        _siblings(item),
        (action_name(item["action"]) or NONE) + waived,
        f"{code(item['criterion'])}: {code(item.get('source', ''))}",
    )


def _siblings(item: Mapping[str, Any]) -> str:
    blocks, unit = item.get("siblings_summary"), item.get("unit", "")
    if blocks:
        low, middle, high = (quantity(blocks[key], unit) for key in ("min", "median", "max"))
        return f"{blocks['n']}: {code(f'{low} … {high}, median {middle}')}"
    values = sorted({quantity(other["value"], unit) for other in item.get("siblings", ())})
    return f"{len(item['siblings'])}: {code(', '.join(values[:8]))}" if values else "none measured"


def _open(findings: Sequence[Mapping[str, Any]]) -> str:
    """Group observations by reason."""
    alike: dict[str, dict[str, None]] = {}
    for item in findings:
        alike.setdefault(item["reason"], {})[f"{item['name']} on {describe_scope(item['scope'])}"] = None
    return "\n".join(f"- {code(why)}: {', '.join(map(code, names))}" for why, names in alike.items())


def _list(texts: Sequence[str]) -> str:
    return "\n".join(f"- {code(text)}" for text in texts)


def _counters(counters: Sequence[Mapping[str, Any]]) -> str:
    if not counters:
        return "No counter was read."
    shown = [item for item in counters if item.get("not_read") or finite(item.get("after")) != 0 or item.get("rose_by")]
    rest = len(counters) - len(shown)
    rows = [
        (
            code(f"{item['name']} {describe_scope(item['scope'])}"),
            code(quantity(item.get("before"), item["unit"])),
            code(quantity(item.get("after"), item["unit"])),
            code(quantity(item.get("rose_by"), item["unit"])),
            code(item["not_read"]) if item.get("not_read") else "",
        )
        for item in shown
    ]
    blocks = [table(("Counter", "Before", "After", "Increase", "Not read"), rows)] if rows else []
    others = "All counters" if not shown else "The other counters"
    blocks += [f"{others} ({rest}) stayed at 0; see part.json."] if rest else []
    return "\n\n".join(blocks)


def _errors(errors: Sequence[Mapping[str, Any]], unread: str) -> str:
    lost = [f"The log was not read: {code(unread)}. There may have been errors."] if unread else []
    rows = [(code(f"{item['name']} {item['scope']}"), code(str(item["count"]))) for item in errors]
    blocks = [table(("Error", "Times"), rows)] if rows else [] if unread else ["None for this part."]
    return "\n\n".join([*blocks, *lost])


def _logs(logs: Sequence[Mapping[str, str]]) -> str:
    if not logs:
        return "No process on this part left a log, and no launch failed."
    return "\n\n".join(f"{code(item['what'])}\n\n{_fence(_end(item['text']))}" for item in logs)


def _end(text: str) -> str:
    lines = clean_log(text).splitlines()
    return "\n".join(lines[-_LOG_LINES:]) or "(empty)"


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
            "- `observations.csv`: every observation of this part",
            f"- Written by Rackproof {code(run['rackproof'])}. Every limit has a source; `report.html` of the run shows the "
            "whole fleet.",
        ]
    )
