"""The report as Markdown, to be pasted into a ticket.

Whatever a host may have had a say in stands in a code span, in which no dialect of Markdown sees links, mentions or HTML;
the few characters that could end a span or a table's cell, or that a careless renderer takes for a tag, are replaced.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from fleet.report.render import collectives, devices, headline, training
from fleet.report.render.format import (
    ACTIONS,
    DECISIONS,
    NONE,
    REHEARSED,
    VERDICTS,
    clean,
    decision_name,
    status,
    took,
    when,
)
from fleet.report.render.hosts import versions
from fleet.report.render.rows import Reason, reasons
from fleet.report.render.text import render_summary
from schemas.reports import FleetReport, HostReport

_FENCED = str.maketrans({"`": "ˋ", "<": "‹", ">": "›"})
_HARMLESS = {**_FENCED, ord("|"): "¦"}
_SHOWN_REASONS = 50
_SHOWN_HOSTS = 6
_CELL_LIMIT = 300


def render_markdown(report: FleetReport) -> str:
    """The decision, its reasons and the figures behind it; `report.html` has the rest."""
    parts = [
        _head(report),
        _section("Reasons", _reasons(report)),
        _section("Coverage", _coverage(report)),
        _section("Hosts", _hosts(report)),
        _section("Collectives", _collectives(report)),
        _section("Devices", _devices(report)),
        _section("Training", _training(report)),
        _section("Software", _software(report)),
        _section("Provenance", _provenance(report)),
    ]
    return "\n\n".join(parts) + "\n"


def code(text: str, limit: int = _CELL_LIMIT) -> str:
    """`text` as a code span that nothing in it can leave."""
    inside = clean(text, limit).translate(_HARMLESS).strip()
    return f"`{inside}`" if inside else NONE


def _section(title: str, body: str) -> str:
    return f"## {title}\n\n{body}"


def _table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _head(report: FleetReport) -> str:
    summary = render_summary(report).translate(_FENCED)
    facts = [
        f"- Run: {code(report.run_id)}, profile {code(report.profile)}, Rackproof {code(report.rackproof)}",
        f"- Fleet: {headline.hosts_and_gpus(report)}",
        f"- Began {code(when(report.began))}, ended {code(when(report.ended))}"
        + (f", after {took(report.began, report.ended)}" if took(report.began, report.ended) else ""),
    ]
    notice = [f"> **REHEARSAL.** {headline.REHEARSAL_NOTICE}"] if report.rehearsal else []
    return "\n\n".join(
        [
            f"# FINAL ACCEPTANCE: {clean(status(report)).translate(_HARMLESS)}",
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
    table = _table(
        ("Verdict", "Host", "Part", "Observation", "Found and wanted", "Action", "Source"),
        (_reason(item) for item in why[:_SHOWN_REASONS]),
    )
    more = len(why) - _SHOWN_REASONS
    return f"{table}\n\n… and {more} more reasons in `report.html`." if more > 0 else table


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
    count = f" × {item.count}" if item.count > 1 else ""
    source = "plan" if item.criterion == "plan" else f"{code(item.criterion)} {code(item.source)}"
    return (
        f"**{_word(item.verdict, VERDICTS)}**",
        hosts,
        part + serial,
        name + stage + count,
        found,
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
    return _table(names, [[str(getattr(found, name)) for name in names]])


def _hosts(report: FleetReport) -> str:
    return _table(
        ("Host", "Rack", "Decision", "GPUs", "Measured", "What happened to it"),
        (_host(report, host) for host in report.hosts),
    )


def _host(report: FleetReport, host: HostReport) -> tuple[str, ...]:
    troubles = [*host.events, *(f"{launch.stage}: {launch.reason}" for launch in host.launches if launch.reason)]
    return (
        code(host.name),
        code(host.rack),
        f"**{_word(decision_name(report, host.decision), {*DECISIONS.values(), *REHEARSED.values()})}**",
        "not judged" if report.rehearsal else str(len(host.gpus)),
        f"{host.coverage.measured} of {host.coverage.expected}",
        "; ".join(code(trouble) for trouble in troubles) or NONE,
    )


def _collectives(report: FleetReport) -> str:
    found = collectives.charts(report)
    if not found:
        return "No bandwidth of any collective operation was measured."
    places = {"host": "within each host", "gang": "between hosts"}
    rows = [(code(chart.op), places[chart.kind], str(chart.lines), code(chart.peak), _wanted(chart)) for chart in found]
    return _table(("Operation", "Where", "Measured by", "Bus bandwidth", "Criterion"), rows)


def _wanted(chart: collectives.Chart) -> str:
    return "; ".join(code(limit.title) for limit in chart.limits) or "none"


def _devices(report: FleetReport) -> str:
    rows = [
        (
            code(f"{panel.name} {strip.label}"),
            str(strip.count),
            *(code(text) for text in (strip.lowest, strip.median, strip.highest)),
            code(strip.limit_text) if strip.limit_text else "no criterion",
            f"**{strip.failed}**" if strip.failed else "0",
            f"**{strip.absent}**" if strip.absent else "0",
        )
        for panel in devices.panels(report)
        for strip in panel.strips
    ]
    columns = ("Figure", "Devices", "Lowest", "Median", "Highest", "Wanted", "Failing", "Without a figure")
    return _table(columns, rows) if rows else "Nothing was measured of any single device."


def _training(report: FleetReport) -> str:
    rows = [
        (
            code(row.place) + (" **fail**" if row.failed else ""),
            code(row.network),
            "**synthetic**" if row.synthetic else code(row.data),
            *(code(row.throughput), code(row.step_time), code(row.loss_ratio), code(row.accuracy)),
            code(row.problem),
        )
        for row in training.table(report).rows
    ]
    columns = ("Where", "Network", "Data", "Throughput", "Step", "Loss, last to first", "Accuracy", "Why not")
    return _table(columns, rows) if rows else "No training was reported."


def _software(report: FleetReport) -> str:
    rows = [
        (
            code(version.name),
            ", ".join(f"{code(text)} ({count})" for text, count in version.values),
            str(version.unknown),
        )
        for version in versions(report)
    ]
    return _table(("Component", "Version (hosts)", "Not told by"), rows) if rows else "No host told its versions."


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
            f"- Schema {code(report.schema)}, made by Rackproof {code(report.rackproof)}; "
            "the decision is in `report.json`, the whole of it to look at in `report.html`",
        ]
    )
