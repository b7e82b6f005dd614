"""The report as Markdown, to be pasted into a ticket.

Whatever a host may have had a say in stands in a code span, in which no dialect of Markdown sees links, mentions or HTML;
the few characters that could end a span or a table's cell, or that a careless renderer takes for a tag, are replaced.
"""

from __future__ import annotations

from collections.abc import Iterable

from fleet.quantities import NONE
from fleet.report.changes import changes_section
from fleet.report.format import (
    ACTIONS,
    DECISIONS,
    REHEARSED,
    SIMULATED,
    VERDICTS,
    clean,
    decision_name,
    status,
    took,
    when,
)
from fleet.report.grafana import run_dashboard
from fleet.report.markdown_figures import measurements
from fleet.report.markup import FENCED, HARMLESS, code, section, table
from fleet.report.tables import headline
from fleet.report.tables.reasons import Reason, reasons
from fleet.report.tables.summary_text import render_summary
from fleet.report.tables.versions import versions
from schemas.reports import FleetReport, HostReport

_SHOWN_REASONS = 50
_SHOWN_HOSTS = 6


def render_markdown(report: FleetReport, grafana_url: str = "") -> str:
    """The decision, its reasons and the figures behind it; `report.html` has the rest."""
    parts = [
        _head(report, grafana_url),
        section("Reasons", _reasons(report)),
        *changes_section(report),
        section("Coverage", _coverage(report)),
        section("Hosts", _hosts(report)),
        *(section(title, body) for title, body in measurements(report)),
        section("Software", _software(report)),
        section("Provenance", _provenance(report)),
    ]
    return "\n\n".join(parts) + "\n"


def _head(report: FleetReport, grafana_url: str) -> str:
    summary = render_summary(report).translate(FENCED)
    facts = [
        f"- Run: {code(report.run_id)}, profile {code(report.profile)}, Rackproof {code(report.rackproof)}",
        f"- Fleet: {headline.hosts_and_gpus(report)}",
        f"- Began {code(when(report.began))}, ended {code(when(report.ended))}"
        + (f", after {took(report.began, report.ended)}" if took(report.began, report.ended) else ""),
    ]
    dashboard = run_dashboard(report, grafana_url)
    facts += [f"- [The run in Grafana](<{dashboard}>)"] if dashboard else []
    notice = [f"> **{report.mark}.** {headline.notice(report)}"] if report.mark else []
    return "\n\n".join(
        [
            f"# FINAL ACCEPTANCE: {clean(status(report)).translate(HARMLESS)}",
            *notice,
            headline.sentence(report),
            "\n".join(facts),
            f"```text\n{summary}\n```",
        ]
    )


def _reasons(report: FleetReport) -> str:
    why = reasons(report.verdicts)
    if not why:
        return "Nothing failed and nothing was left open." if report.verdicts else "No verdict was reached on anything."
    told = table(
        ("Verdict", "Host", "Part", "Observation", "Found and wanted", "Action", "Source"),
        (_reason(item) for item in why[:_SHOWN_REASONS]),
    )
    more = len(why) - _SHOWN_REASONS
    return f"{told}\n\n… and {more} more reasons in `report.html`." if more > 0 else told


def _reason(item: Reason) -> tuple[str, ...]:
    hosts = ", ".join(code(host) for host in item.hosts[:_SHOWN_HOSTS])
    if len(item.hosts) > _SHOWN_HOSTS:
        hosts += f" and {len(item.hosts) - _SHOWN_HOSTS} more"
    part = code(item.scope) if item.scope and item.scope != "host" else "host"
    serial = f" serial {code(item.serial)}" if item.serial else ""
    name = code(f"{item.name} {item.params}")
    stage = f", stage {code(item.stage)}" if item.stage else ""
    margin = f" ({item.margin})" if item.margin != NONE else ""
    found = f"{code(item.found)}, wanted {code(item.wanted)}{margin}" if item.found else code(item.text)
    detail = f": {code(item.detail)}" if item.found and item.detail else ""
    count = f" × {item.count}" if item.count > 1 else ""
    source = "plan" if item.criterion == "plan" else f"{code(item.criterion)} {code(item.source)}"
    waived = f"; {code(item.waiver)}" if item.waiver else ""
    return (
        f"**{_word(item.verdict, VERDICTS)}**{' (waived)' if item.waiver else ''}",
        hosts,
        part + serial,
        name + stage + count,
        found + detail + waived,
        _word(item.action, ACTIONS.values()) if item.action else NONE,
        source,
    )


def _word(text: str, ours: Iterable[str]) -> str:
    """One of our own words as it is; anything else as code."""
    return text if text in ours else code(text)


def _coverage(report: FleetReport) -> str:
    found = report.coverage
    if not found.expected:
        return "The plan expects no observation, so there is nothing that could have been covered."
    names = ("expected", "measured", "missing", "error", "skipped", "unsupported")
    return table(names, [[str(getattr(found, name)) for name in names]])


def _hosts(report: FleetReport) -> str:
    return table(
        ("Host", "Rack", "Decision", "GPUs", "Measured", "What happened to it"),
        (_host(report, host) for host in report.hosts),
    )


def _host(report: FleetReport, host: HostReport) -> tuple[str, ...]:
    troubles = [*host.events, *(f"{launch.stage}: {launch.reason}" for launch in host.launches if launch.reason)]
    return (
        code(host.name),
        code(host.rack),
        f"**{_word(decision_name(report, host.decision), {*DECISIONS.values(), *REHEARSED.values(), *SIMULATED.values()})}**",
        "not judged" if report.rehearsal else str(len(host.gpus)),
        f"{host.coverage.measured} of {host.coverage.expected}",
        "; ".join(code(trouble) for trouble in troubles) or NONE,
    )


def _software(report: FleetReport) -> str:
    found = versions(report)
    rows = [
        (
            code(version.name) + (f" and {version.left_out} more values" if version.left_out else ""),
            code(value.text),
            str(value.hosts),
            code(value.where) if value.where else "the others",
            str(version.unknown),
        )
        for version in found
        if version.differs
        for value in version.values
    ]
    alike = [
        code(f"{version.name} {version.values[0].text}")
        + (f" (not told by {version.unknown})" if version.unknown else "")
        for version in found
        if not version.differs
    ]
    parts = [table(("Component", "Version", "Hosts", "Which", "Not told by"), rows)] if rows else []
    parts += [f"The same on every host that told it: {', '.join(alike)}."] if alike else []
    return "\n\n".join(parts) or "No host told its versions."


def _provenance(report: FleetReport) -> str:
    strays = [f"- not believed: {code(item.path)}: {code(item.reason)}" for item in report.quarantined]
    names = "; ".join(
        f"{f'stage {code(stage)}: ' if stage else ''}{', '.join(code(name) for name in found)}"
        for stage, found in headline.unjudged(report)
    )
    return "\n".join(
        [
            *(strays or ["- Files that were not believed: none"]),
            f"- Measured, and judged by no criterion: {names or 'none'}",
            *(f"- No figure is known of {code(name)}: {code(why)}" for name, why in report.unknown.items()),
            f"- Schema {code(report.schema)}, made by Rackproof {code(report.rackproof)}; "
            "the decision is in `report.json`, the whole of it to look at in `report.html`",
        ]
    )
