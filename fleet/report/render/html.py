"""The report as one HTML file: no network, no outside style or script, and nothing of a host's that is more than text."""

from __future__ import annotations

import base64
import hashlib
from functools import cache
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup, escape

from fleet.report.render import (
    collectives,
    devices,
    figure,
    format,
    gpus,
    grafana,
    headline,
    hosts,
    peers,
    routes,
    rows,
    timeline,
    timing,
    training,
    versions,
    workloads,
)
from schemas.reports import ACCEPTED, FAIL, FleetReport

_HERE = Path(__file__).parent
_SHOWN_REASONS = 60
_STYLES = ("report.css", "timeline.css")
"""The second where there was a soak."""


def render_html(report: FleetReport, grafana_url: str = "") -> str:
    """The whole report for people. The same report gives the same bytes."""
    soaks = timeline.timelines(report)
    css, js = "\n".join(map(_asset, _STYLES if soaks else _STYLES[:1])), _asset("report.js")
    page = _environment().get_template("report.html.j2")
    return page.render(
        report=report,
        css=Markup(css),  # noqa: S704 - our own file
        js=Markup(js),  # noqa: S704 - our own file
        policy=_policy(css, js),
        run_dashboard=grafana.run_dashboard(report, grafana_url),
        **_headline(report),
        **_hosts(report),
        **_measurements(report),
        soaks=soaks,
        unjudged=headline.unjudged(report),
    ) + "\n"  # fmt: skip


def _headline(report: FleetReport) -> dict[str, Any]:
    """What the banner, the reasons and the coverage say."""
    why = rows.reasons(report.verdicts)
    return {
        "status": format.status(report),
        "tone": headline.tone(report.decision),
        "sentence": headline.sentence(report),
        "notice": headline.REHEARSAL_NOTICE,
        "size": headline.hosts_and_gpus(report),
        "checks": headline.checks(report),
        "manifest": headline.manifest(report),
        "first_reasons": why[:_SHOWN_REASONS],
        "other_reasons": why[_SHOWN_REASONS:],
        "failures": sum(reason.verdict == FAIL for reason in why),
        "coverage": _coverage(report),
    }


def _hosts(report: FleetReport) -> dict[str, Any]:
    """What the rack map and the hosts' sections say."""
    found = hosts.hosts(report)
    return {
        "hosts": found,
        "anchors": hosts.anchors_of(report),
        "racks": hosts.racks(found),
        "versions": versions.versions(report),
        "accepted": ACCEPTED,
    }


def _measurements(report: FleetReport) -> dict[str, Any]:
    """What the sections of figures say."""
    return {
        "times": timing.times(report),
        "charts": collectives.charts(report),
        "many_lines": collectives.MANY_LINES,
        "plot": _PLOT,
        "routes": routes.routes(report),
        "latencies": routes.latencies(report),
        "panels": devices.panels(report),
        "gpu_tables": [table for table in (gpus.speeds(report), gpus.stress(report)) if table],
        "legend": figure.LEGEND,
        "shown": figure.shown(report),
        "checks_made": gpus.checks(report),
        "peers": peers.peers(report),
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


@cache
def _asset(name: str) -> str:
    return (_HERE / name).read_text(encoding="utf-8").strip()


def _policy(css: str, js: str) -> str:
    """The Content-Security-Policy: our style and our script by their hashes, and nothing else from anywhere."""
    return (
        f"default-src 'none'; style-src '{_hash(css)}'; script-src '{_hash(js)}'; base-uri 'none'; form-action 'none'"
    )


def _hash(text: str) -> str:
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"


@cache
def _environment() -> Environment:
    environment = Environment(
        loader=FileSystemLoader(_HERE),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=_plain_text,
    )
    names = ("quantity", "action_name", "params_text", "when", "took", "duration")
    environment.filters.update({name: getattr(format, name) for name in names})
    environment.filters["tone"] = headline.tone
    environment.filters["log"] = escape  # cleaned when it was read, and its lines are kept
    return environment


def _plain_text(value: Any) -> Any:
    """Every text on its way into the page, before it is escaped: one line, no control characters, not without end."""
    return format.clean(value) if isinstance(value, str) and not isinstance(value, Markup) else value
