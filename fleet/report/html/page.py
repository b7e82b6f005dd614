"""Render the report as one HTML file without network access, external styles or scripts; text from hosts is only text.

The decision, the reasons and every fleet figure are in the page's HTML. The hosts are in embedded data, from which the script
draws the map, the list and the page of each host. If the file would be too large, pages of accepted hosts are left out first,
and the page names the command that writes them.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup, escape

from fleet import quantities
from fleet.report import formatting, grafana, scope_text
from fleet.report.html import host_data, launch_traces, pairs, strips
from fleet.report.tables import (
    collectives,
    communication,
    figure,
    gpus,
    headline,
    hosts,
    peers,
    soak_timeline,
    timing,
    training,
    versions,
    workloads,
)
from fleet.report.tables.reasons import Reason, reasons, together
from schemas.reports import ACCEPTED, FAIL, FleetReport

MOST_BYTES = 2_000_000
"""Of the file, whatever the fleet."""
_SPARE = 20_000
_HERE = Path(__file__).parent
_SHOWN_REASONS, _MOST_REASONS = 12, 200
"""Of one action: so many at once, so many in all; the hosts' pages have the others."""
_MOST_FILES = 100
_MOST_GAPS = 12
_MOST_CHANGES = 200
_MOST_LINES = 1000
"""Of hosts that are not accepted, for readers without a script; of more the names alone."""
_STYLES = ("report.css", "timeline.css")
"""The second where something is shown over time."""
_END = "</script>\n"


@dataclass(frozen=True, kw_only=True)
class Duty:
    """The reasons that ask for one action."""

    title: str
    tone: str
    first: Sequence[Reason]
    rest: Sequence[Reason]
    left_out: int
    count: int
    hosts: int


def render_html(report: FleetReport, grafana_url: str = "") -> str:
    """The whole report for people. The same report gives the same bytes."""
    soaks = soak_timeline.timelines(report)
    over_time = soaks or launch_traces.hosts_with_courses(report)
    css, js = "\n".join(map(asset, _STYLES if over_time else _STYLES[:1])), asset("report.js")
    page = environment().get_template("report.html.j2").render(
        report=report,
        css=Markup(css),  # noqa: S704 - our own file
        policy=policy(css, js),
        run_dashboard=grafana.run_dashboard(report, grafana_url),
        **_headline(report),
        **_measurements(report),
        racks=hosts.racks(report),
        brief=sum(host.decision != ACCEPTED for host in report.hosts) > _MOST_LINES,
        anchors=hosts.host_anchors(report),
        versions=versions.versions(report),
        accepted=ACCEPTED,
        changes=_changes(report) if report.baseline else None,
        soaks=soaks,
        unjudged=headline.unjudged(report),
        files=report.quarantined[:_MOST_FILES],
    )  # fmt: skip
    end = f"<script>{js}{_END}</body>\n</html>\n"
    begin = f'{page}\n<script type="application/json" id="data">'
    room = MOST_BYTES - _SPARE - len(begin.encode()) - len(end.encode()) - len(_END)
    return f"{begin}{host_data.embedded(report, room)}{_END}{end}"


def _headline(report: FleetReport) -> dict[str, Any]:
    """What the banner, the reasons and the coverage say."""
    duties = _duties(reasons(report.verdicts))
    return {
        "status": formatting.status(report),
        "tone": headline.tone(report.decision),
        "sentence": headline.sentence(report),
        "notice": headline.notice(report),
        "size": headline.hosts_and_gpus(report),
        "checks": headline.checks(report),
        "manifest": headline.manifest(report),
        "caveats": [escape(line) for line in headline.caveats(report)],  # as long as they are
        "duties": duties,
        "coverage": _coverage(report),
        "gaps": _gaps(report),
    }


def _duties(given: Sequence[Reason]) -> list[Duty]:
    """What to do, the gravest first; then what is not known; then what somebody answers for."""
    found: dict[tuple[str, str], list[Reason]] = {}
    for reason in given:
        if reason.waiver:
            key = "Waived", "waived"
        elif reason.verdict == FAIL:
            key = reason.action or "Failed, with no action named", FAIL
        else:
            key = "Not known", "inconclusive"
        found.setdefault(key, []).append(reason)
    return [_duty(title, tone, own) for (title, tone), own in found.items()]


def _duty(title: str, tone: str, own: Sequence[Reason]) -> Duty:
    told = together(own)
    return Duty(
        title=title,
        tone=tone,
        first=told[:_SHOWN_REASONS],
        rest=told[_SHOWN_REASONS:_MOST_REASONS],
        left_out=max(0, len(told) - _MOST_REASONS),
        count=len(own),
        hosts=len({host for reason in own for host in reason.hosts}),
    )


def _changes(report: FleetReport) -> dict[str, Any]:
    """What differs from the accepted records: as many lines as are read, and how many there are."""
    found = report.changes
    return {
        "rows": [
            {
                "kind": change.kind.replace("_", " "),
                "counts": change.counts,
                "host": change.host,
                "part": scope_text.describe_scope(change.scope) if change.scope not in ("", "host") else "",
                "serial": change.serial,
                "what": change.what,
                "settings": formatting.params_text(change.params),
                "old": quantities.quantity(change.old, change.unit),
                "new": quantities.quantity(change.new, change.unit),
                "share": formatting.signed_percent(change.share) if change.share is not None else "",
                "noise": formatting.percent(change.noise) if change.noise is not None else "",
                "text": change.text,
            }
            for change in found[:_MOST_CHANGES]
        ],
        "count": len(found),
        "hosts": len({change.host for change in found}),
        "counting": sum(change.counts for change in found),
    }


def _measurements(report: FleetReport) -> dict[str, Any]:
    """What the sections of figures say."""
    return {
        "times": timing.times(report),
        "charts": collectives.charts(report),
        "many_lines": collectives.MANY_LINES,
        "plot": _PLOT,
        "routes": communication.routes(report),
        "latencies": communication.latencies(report),
        "figures": strips.groups(report),
        "gpu_tables": [table for table in (gpus.speeds(report), gpus.stress(report)) if table],
        "legend": figure.LEGEND,
        "shown": figure.shown(report),
        "checks_made": gpus.checks(report),
        "peers": peers.peers(report),
        "pairs": pairs.pictures(report),
        "trainings": training.table(report),
        "workloads": workloads.workloads(report),
    }


_PLOT = {
    "width": collectives.WIDTH,
    "height": collectives.HEIGHT,
    "left": collectives.LEFT,
    "right": collectives.WIDTH - collectives.RIGHT,
    "bottom": collectives.HEIGHT - collectives.BOTTOM,
}


def _coverage(report: FleetReport) -> list[dict[str, Any]]:
    """The parts of the bar: name, count, where it begins and how wide it is in percent, and what it means."""
    meanings = {
        "measured": "seen, with a value",
        "missing": "not there at all",
        "error": "tried, and failed",
        "skipped": "not tried",
        "unsupported": "the hardware or software has none",
    }
    total = max(report.coverage.expected, 1)
    parts, begin = [], 0.0
    for name, meaning in meanings.items():
        count = int(getattr(report.coverage, name))
        width = 100 * count / total
        parts.append({"name": name, "count": count, "x": f"{begin:.2f}", "width": f"{width:.2f}", "meaning": meaning})
        begin += width
    return parts


def _gaps(report: FleetReport) -> dict[str, Any]:
    """The hosts of which most is not known."""
    found = [host for host in report.hosts if host.coverage.measured < host.coverage.expected]
    found.sort(key=lambda host: host.coverage.measured / max(host.coverage.expected, 1))
    return {"first": found[:_MOST_GAPS], "count": len(found)}


@cache
def asset(name: str, directory: Path = _HERE) -> str:
    """Return a style sheet or script that goes into a page."""
    return (directory / name).read_text(encoding="utf-8").strip()


def policy(css: str, js: str) -> str:
    """The Content-Security-Policy: our style and our script by their hashes, and nothing else from anywhere."""
    return (
        f"default-src 'none'; style-src '{_hash(css)}'; script-src '{_hash(js)}'; base-uri 'none'; form-action 'none'"
    )


def _hash(text: str) -> str:
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"


@cache
def environment(*directories: Path) -> Environment:
    """Return the templates of this package and of `directories`; every text from elsewhere is cleaned and escaped."""
    found = Environment(
        loader=FileSystemLoader([_HERE, *directories]),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=_plain_text,
    )
    names = ("action_name", "params_text", "when", "took", "duration")
    found.filters.update({name: getattr(formatting, name) for name in names})
    found.filters["quantity"] = quantities.quantity
    found.filters["tone"] = headline.tone
    found.filters["log"] = escape  # cleaned when it was read, and its lines are kept
    found.filters["drawn"] = Markup  # paths of our own numbers, which are longer than any text
    found.filters["count"] = lambda value: quantities.number(int(value), 12)
    return found


def _plain_text(value: Any) -> Any:
    """Every text on its way into the page, before it is escaped: one line, no control characters, not without end."""
    return formatting.clean(value) if isinstance(value, str) and not isinstance(value, Markup) else value
