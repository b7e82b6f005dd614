"""Render the report as Markdown, for example for a ticket.

Text that a host could influence is put into a code span or a code block. No dialect of Markdown renders links, mentions or HTML
there. In such text, characters that could end the span, the block or a table cell, or begin an HTML tag, are replaced.
"""

from __future__ import annotations

from collections.abc import Iterable

from fleet.quantities import NONE, counted
from fleet.report.changes import changes_section
from fleet.report.formatting import (
    ACTIONS,
    COMPARE,
    DECISIONS,
    MEASURE_AGAIN,
    REHEARSED,
    SIMULATED,
    VERDICTS,
    clean,
    decision_name,
    elapsed,
    format_time,
    status,
)
from fleet.report.grafana import run_dashboard
from fleet.report.markdown_figures import measurements
from fleet.report.markup import FENCED, HARMLESS, code, section, table
from fleet.report.replaced import changes
from fleet.report.tables import headline
from fleet.report.tables.former_runs import seen_before
from fleet.report.tables.reasons import Reason, reasons
from fleet.report.tables.summary_text import render_summary
from fleet.report.tables.versions import components
from schemas.reports import FleetReport, HostReport, Replaced

_MAX_REASONS = 50
_MAX_HOSTS = 6
_MAX_REPLACED = 100


def render_markdown(report: FleetReport, grafana_url: str = "") -> str:
    """Return the decision, its reasons and the main figures; `report.html` has the rest."""
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
        f"- Began {code(format_time(report.began))}, ended {code(format_time(report.ended))}"
        + (f", after {elapsed(report.began, report.ended)}" if elapsed(report.began, report.ended) else ""),
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
    all_reasons = reasons(report.verdicts, report.causes, seen_before(report))
    if not all_reasons:
        # In a large fleet, `left_out` counts the verdicts that are not listed.
        is_judged = report.verdicts or report.left_out
        return "No check failed and none was inconclusive." if is_judged else "No observation was judged."
    rows = table(
        ("Verdict", "Cause", "Host", "Part", "Evidence", "Value and limit", "Action", "Source"),
        (_reason(item) for item in all_reasons[:_MAX_REASONS]),
    )
    more = len(all_reasons) - _MAX_REASONS
    return f"{rows}\n\n… and {counted(more, 'more reason')} in `report.html`." if more > 0 else rows


def _reason(item: Reason) -> tuple[str, ...]:
    hosts = ", ".join(code(host) for host in item.hosts[:_MAX_HOSTS])
    if len(item.hosts) > _MAX_HOSTS:
        hosts += f" and {len(item.hosts) - _MAX_HOSTS} more"
    part = code(item.scope) if item.scope and item.scope != "host" else "host"
    serial = f" serial {code(item.serial)}" if item.serial else ""
    name = code(f"{item.name} {item.params}")
    stage = f", stage {code(item.stage)}" if item.stage else ""
    margin = f" ({item.margin})" if item.margin != NONE else ""
    value = f"{code(item.value)}, wanted {code(item.wanted)}{margin}" if item.value else ""
    seen = f"Seen before: {item.seen}" if item.seen else ""
    explained = [value, *(code(text) for text in (item.why, seen, item.waiver) if text)]
    count = f" × {item.count}" if item.count > 1 else ""
    source = "plan" if item.criterion == "plan" else f"{code(item.criterion)} {code(item.source)}"
    return (
        f"**{_term(item.verdict, VERDICTS)}**{' (waived)' if item.waiver else ''}",
        code(item.title),
        hosts,
        part + serial,
        name + stage + count,
        "; ".join(filter(None, explained)) or NONE,
        _action(item),
        source,
    )


def _action(item: Reason) -> str:
    """Return the action, how to carry it out, and what to do if the cause occurs again afterwards."""
    action = _term(item.action, (*ACTIONS.values(), *COMPARE.values(), MEASURE_AGAIN)) if item.action else NONE
    how = f". {item.handling.now}" if item.handling.now else ""
    return action + how + (f" If it comes back: {item.handling.if_it_returns}" if item.handling.if_it_returns else "")


def _term(text: str, terms: Iterable[str]) -> str:
    """Return a text unchanged if it is one of `terms`, and otherwise as a code span: it may come from a host."""
    return text if text in terms else code(text)


def _coverage(report: FleetReport) -> str:
    coverage = report.coverage
    if not coverage.expected:
        return "The plan expects no observation."
    names = ("expected", "measured", "missing", "error", "skipped", "unsupported")
    return table(names, [[str(getattr(coverage, name)) for name in names]])


def _hosts(report: FleetReport) -> str:
    return table(
        ("Host", "Rack", "Decision", "GPUs", "Measured", "Events"),
        (_host(report, host) for host in report.hosts),
    )


def _host(report: FleetReport, host: HostReport) -> tuple[str, ...]:
    events = [*host.events, *(f"{launch.stage}: {launch.reason}" for launch in host.launches if launch.reason)]
    return (
        code(host.name),
        code(host.rack),
        f"**{_term(decision_name(report, host.decision), {*DECISIONS.values(), *REHEARSED.values(), *SIMULATED.values()})}**",
        "not judged" if report.rehearsal else str(len(host.gpus)),
        f"{host.coverage.measured} of {host.coverage.expected}",
        "; ".join(code(event) for event in events) or NONE,
    )


def _software(report: FleetReport) -> str:
    software = components(report)
    rows = [
        (
            code(component.name)
            + (f" and {counted(component.left_out, 'more version')}" if component.left_out else ""),
            code(value.text),
            str(value.hosts),
            code(value.names) if value.names else "the others",
            str(component.unknown),
        )
        for component in software
        if component.differs
        for value in component.versions
    ]
    alike = [
        code(f"{component.name} {component.versions[0].text}")
        + (f" (missing on {component.unknown})" if component.unknown else "")
        for component in software
        if not component.differs
    ]
    parts = [table(("Component", "Version", "Hosts", "Which", "Missing on"), rows)] if rows else []
    parts += [f"The same on every host that reported it: {', '.join(alike)}."] if alike else []
    return "\n\n".join(parts) or "No host reported its versions."


def _provenance(report: FleetReport) -> str:
    rejected = [f"- Rejected input file: {code(item.path)}: {code(item.reason)}" for item in report.quarantined]
    more = len(report.replaced) - _MAX_REPLACED
    names = "; ".join(
        f"{f'stage {code(stage)}: ' if stage else ''}{', '.join(code(name) for name in figures)}"
        for stage, figures in headline.unjudged(report)
    )
    return "\n".join(
        [
            *(rejected or ["- Rejected input files: none"]),
            *map(_replaced, report.replaced[:_MAX_REPLACED]),
            *([f"- Criteria replaced: {more} more in `report.json`"] if more > 0 else []),
            f"- Measured but not judged by any criterion: {names or 'none'}",
            *(f"- No reference value for {code(name)}: {code(why)}" for name, why in report.unknown.items()),
            f"- Schema {code(report.schema)}, made by Rackproof {code(report.rackproof)}; "
            "the decision is in `report.json`, the full report in `report.html`",
        ]
    )


def _replaced(item: Replaced) -> str:
    what = (
        f"- Criterion replaced: {code(item.criterion)} of the pack {code(item.pack)}, on {counted(item.hosts, 'host')},"
    )
    by = f"by {code(item.by)} of the pack {code(item.by_pack)} (reason: {code(item.source)})"
    return f"{what} {by}. Old rule: {code(item.old)}. New rule: {code(item.new)}. Settings that differ: {code(changes(item))}"
