"""Render the report as one HTML file that needs no network access. Text from hosts is always escaped.

The HTML has the decision, the reasons for it, and every figure of the fleet. The data of the hosts is embedded as JSON, from
which a script draws the map of the hosts, their list, and a page for each host. If the file would be too large, a part of this
data is left out (`host_data.embedded_data`), and the file shows the command that writes the rest.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup, escape

from fleet import quantities
from fleet.report import formatting, grafana
from fleet.report.changes import has_values
from fleet.report.hosts import MEASURED_HOSTS
from fleet.report.html import host_data, launch_traces, pairs, power_waves, strips
from fleet.report.links import adapter_anchor, host_anchors
from fleet.report.tables import (
    collectives,
    communication,
    figure,
    former_runs,
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
from fleet.report.tables.reasons import Reason, next_command, reasons, reset_command
from fleet.scope_text import describe_scope
from schemas.records import Gpu
from schemas.reports import ACCEPTED, FAIL, INCONCLUSIVE, FleetReport
from schemas.scopes import Scope, pci_address

MAX_BYTES = 2_000_000
"""Intended maximum size of the file in bytes: what does not fit is left out. Some data of each host is never left out, so the
file of a very large fleet is larger than this."""
_RESERVE = 10_000
"""Bytes below MAX_BYTES that stay free."""
_HERE = Path(__file__).parent
_FIRST_REASONS, _MAX_REASONS = 12, 200
"""Under one heading, the first 12 reasons are visible at once, and the next ones, up to the 200th, can be unfolded. Further
reasons are only on the pages of the hosts."""
_MAX_FILES = _MAX_REPLACED = 100
_MAX_GAPS = 12
_MAX_CHANGES = 200
_MAX_OPEN_HOSTS = 1000
"""If the script does not run, the page lists the hosts that are not accepted, with their decisions. If there are more such hosts
than this number, it lists only their names."""
_STYLES = ("report.css", "timeline.css")
"""Style sheets of the page; `timeline.css` is included only if the page has plots over time or over runs."""
_END = "</script>\n"


@dataclass(frozen=True, kw_only=True)
class ActionGroup:
    """The reasons under one heading: failures with the same action, checks that could not be verified, or waived reasons."""

    title: str
    tone: str
    first: Sequence[Reason]
    """The reasons that are shown at once."""
    rest: Sequence[Reason]
    """The reasons that can be unfolded."""
    left_out: int
    """Number of further reasons, which the section leaves out."""
    count: int
    """Number of all reasons."""
    hosts: int
    """Number of hosts with one of the reasons."""


def render_html(report: FleetReport, grafana_url: str = "") -> str:
    """Return the report as one HTML file. The same arguments give the same bytes."""
    soaks = soak_timeline.timelines(report)
    over_time = (
        soaks
        or launch_traces.hosts_with_traces(report)
        or power_waves.hosts_with_waves(report)
        or former_runs.has_trends(report)
    )
    css, js = "\n".join(map(asset, _STYLES if over_time else _STYLES[:1])), asset("report.js")
    page = environment().get_template("report.html.j2").render(
        report=report,
        css=Markup(css),  # noqa: S704 - our own file
        policy=policy(css, js),
        run_dashboard=grafana.run_dashboard(report, grafana_url),
        **_headline(report),
        **_measurements(report),
        racks=hosts.racks(report),
        names_only=sum(host.decision != ACCEPTED for host in report.hosts) > _MAX_OPEN_HOSTS,
        anchors=host_anchors(report),
        components=versions.components(report),
        changes=_changes(report) if report.baseline else None,
        soaks=soaks,
        unjudged=headline.unjudged(report),
        files=report.quarantined[:_MAX_FILES],
        replaced=report.replaced[:_MAX_REPLACED],
    )  # fmt: skip
    end = f"<script>{js}{_END}</body>\n</html>\n"
    begin = f'{page}\n<script type="application/json" id="data">'
    budget = MAX_BYTES - _RESERVE - len(begin.encode()) - len(end.encode()) - len(_END)
    return f"{begin}{host_data.embedded_data(report, budget)}{_END}{end}"


def _headline(report: FleetReport) -> dict[str, Any]:
    """Return the template variables of banner, reasons and coverage."""
    return {
        "status": formatting.status(report),
        "tone": headline.tone(report.decision),
        "sentence": headline.causes_sentence(report) or headline.sentence(report),
        "verdicts_sentence": headline.sentence(report),
        "numbers": headline.numbers(report),
        "certificate": headline.certificate(report),
        "parts": headline.parts_to_return(report),
        "causes": sum(cause.waiver is None for cause in report.causes),
        "notice": headline.notice(report),
        "checks": headline.checks(report),
        # A template cuts long texts (`_plain_text`). `escape` returns Markup, which is not cut.
        "caveats": [escape(line) for line in headline.caveats(report)],
        **_reasons(report),
        "coverage": _coverage(report),
        "gaps": _gaps(report),
    }


def _reasons(report: FleetReport) -> dict[str, Any]:
    """Return the template variables of the section with the reasons for the decision."""
    groups = _action_groups(reasons(report.verdicts, report.causes, former_runs.seen_before(report)))
    shown = [reason for group in groups for reason in (*group.first, *group.rest)]
    gpus_of = {host.name: host.gpus for host in report.hosts}
    return {
        "action_groups": groups,
        "evidence": strips.evidence(report, shown),
        "gpus_of": gpus_of,
    }


def _slot(reason: Reason, gpus_of: Mapping[str, Sequence[Gpu]]) -> dict[str, Any]:
    """Return PCI address and position of the GPU that the reason is about, and the number of GPUs of its host.

    The result is empty if the reason is about several hosts, or not about a GPU that the host reported.
    """
    scope = Scope.parse(reason.lead.part_scope)
    gpus = gpus_of.get(reason.lead.host, ())
    if len(reason.hosts) > 1 or scope.device_kind != "gpu":
        return {}
    at = next((at for at, gpu in enumerate(gpus) if gpu.index == scope.index), None)
    if at is None:
        return {}
    bus_id = gpus[at].pci_bus_id
    return {"address": pci_address(bus_id) if bus_id else "", "at": at, "of": len(gpus)}


def _action_groups(all_reasons: Sequence[Reason]) -> list[ActionGroup]:
    """Return the failures grouped by action, then a group of what could not be verified, then a group of what is waived.

    The groups of failures are in the order in which their actions first appear in `all_reasons`. The reasons have the
    order of `FleetReport.causes`: critical failures come first.
    """
    groups: dict[tuple[str, str], list[Reason]] = {}
    for reason in all_reasons:
        if reason.waiver:
            key = "Waived", "waived"
        elif reason.verdict == FAIL:
            key = reason.action or "Failed", FAIL
        else:
            key = "Could not be verified", INCONCLUSIVE
        groups.setdefault(key, []).append(reason)
    return [_action_group(title, tone, members) for (title, tone), members in groups.items()]


def _action_group(title: str, tone: str, members: Sequence[Reason]) -> ActionGroup:
    return ActionGroup(
        title=title,
        tone=tone,
        first=members[:_FIRST_REASONS],
        rest=members[_FIRST_REASONS:_MAX_REASONS],
        left_out=max(0, len(members) - _MAX_REASONS),
        count=len(members),
        hosts=len({host for reason in members for host in reason.hosts}),
    )


def _changes(report: FleetReport) -> dict[str, Any]:
    """Return the template variables of the section with the changes since the baseline."""
    changes = report.changes
    return {
        "rows": [
            {
                "kind": change.kind.replace("_", " "),
                "counts": change.counts,
                "host": change.host,
                "part": describe_scope(change.scope) if change.scope not in ("", "host") else "",
                "serial": change.serial,
                "what": change.what,
                "settings": formatting.params_text(change.params),
                "old": quantities.quantity(change.old, change.unit),
                "new": quantities.quantity(change.new, change.unit),
                "share": formatting.signed_percent(change.share) if change.share is not None else "",
                "noise": formatting.percent(change.noise) if change.noise is not None else "",
                "text": "" if has_values(change) else change.text,
            }
            for change in changes[:_MAX_CHANGES]
        ],
        "count": len(changes),
        "hosts": len({change.host for change in changes}),
        "counting": sum(change.counts for change in changes),
    }


def _measurements(report: FleetReport) -> dict[str, Any]:
    """Return the template variables of the sections with figures."""
    return {
        "times": timing.times(report),
        "charts": collectives.charts(report),
        "many_lines": collectives.MANY_LINES,
        "frame": collectives.FRAME,
        "paths": communication.communication_paths(report),
        "latencies": communication.latencies(report),
        "figures": strips.groups(report),
        "gpu_tables": [table for table in (gpus.speeds(report), gpus.stress(report)) if table],
        "legend": " ".join([figure.LEGEND, *([former_runs.LEGEND] if report.history else [])]),
        "detailed": figure.detailed_hosts(report),
        "error_counters": gpus.error_counters(report),
        "peers": peers.peers(report),
        "pairs": pairs.pair_matrices(report),
        "trainings": training.training_table(report),
        "workloads": workloads.workloads(report),
    }


def _coverage(report: FleetReport) -> list[dict[str, Any]]:
    """Return the parts of the coverage bar: name, count, meaning, position and width in percent."""
    meanings = {
        "measured": "has a value",
        "missing": "not reported",
        "error": "the measurement failed",
        "skipped": "not attempted",
        "unsupported": "not available in this hardware or software",
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
    """Return the hosts with the lowest coverage, and the number of hosts on which an expected observation was not measured."""
    incomplete = [host for host in report.hosts if host.coverage.measured < host.coverage.expected]
    incomplete.sort(key=lambda host: host.coverage.measured / max(host.coverage.expected, 1))
    return {"first": incomplete[:_MAX_GAPS], "count": len(incomplete)}


@cache
def asset(name: str, directory: Path = _HERE) -> str:
    """Return the text of a style sheet or script that is embedded in a page."""
    return (directory / name).read_text(encoding="utf-8").strip()


def policy(css: str, js: str) -> str:
    """Return the Content-Security-Policy that allows only this style sheet and this script, by their hashes."""
    return (
        f"default-src 'none'; style-src '{_hash(css)}'; script-src '{_hash(js)}'; base-uri 'none'; form-action 'none'"
    )


def _hash(text: str) -> str:
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"


@cache
def environment(*directories: Path) -> Environment:
    """Return the template environment of this package and `directories`; it cleans and escapes every inserted text."""
    templates = Environment(
        loader=FileSystemLoader([_HERE, *directories]),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=_plain_text,
    )
    names = ("action_name", "params_text", "format_time", "elapsed", "duration")
    templates.filters.update({name: getattr(formatting, name) for name in names})
    templates.filters["quantity"] = quantities.quantity
    templates.globals["next_command"] = next_command
    templates.globals["reset_command"] = reset_command
    templates.globals["id"] = id
    templates.globals["measured_hosts"] = MEASURED_HOSTS
    templates.globals["slot_of"] = _slot
    templates.globals["adapter_anchor"] = adapter_anchor
    templates.filters["tone"] = headline.tone
    templates.filters["log"] = escape  # a log is already cleaned, and has several lines
    templates.filters["svg_path"] = Markup  # made of our own numbers, so it needs no escaping, and it must not be cut
    templates.filters["count"] = lambda value: quantities.number(int(value), 12)
    return templates


def _plain_text(value: Any) -> Any:
    """Clean and cut a text before a template inserts it; Jinja then escapes it. Return Markup and other values unchanged."""
    return formatting.clean(value) if isinstance(value, str) and not isinstance(value, Markup) else value
