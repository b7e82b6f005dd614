"""Build a dashboard from its panels. All dashboards have the same annotations and links."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from grafana_foundation_sdk.builders import dashboard as boards
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models import dashboard

from deploy.grafana.parts import BAD, BUSY, HOSTS, ODD, SOURCE
from deploy.grafana.tables import Column

SCHEMA = 38
"""Schema version of Grafana 10.0. A newer Grafana migrates dashboards to its own version."""
TAG = "rackproof"
MATCH_ALL = ".*"
_SHARED_PARAMETERS = "${__url_time_range}&${datasource:queryparam}"


@dataclass(frozen=True, kw_only=True)
class Section:
    """Panels under a heading."""

    title: str
    panels: Sequence[Any]
    """Panel builders, from left to right. A row has 24 columns."""
    repeat: str = ""
    """Name of a variable. Grafana repeats the section, collapsed, for each value of it; empty: the section is not repeated."""


@dataclass(frozen=True, kw_only=True)
class Board:
    """The content of a dashboard."""

    name: str
    """The UID of the dashboard is `rackproof-` and this name; its file is `rackproof-NAME.json`."""
    title: str
    about: str
    """Description of the dashboard."""
    variables: Sequence[dashboard.VariableModel]
    sections: Sequence[Section]
    since: str = "now-6h"
    """Start of the time range when the dashboard is opened."""
    refresh: str = "30s"
    """Time after which Grafana repeats the queries."""


def variable(
    name: str, label: str, series: str, *, many: bool = True, sort: dashboard.VariableSort | None = None
) -> dashboard.VariableModel:
    """Return a variable whose choices are the values of the label `name` of `series` in the time range.

    With `many`, several values can be chosen at once, or all.
    """
    values = f"label_values({series}, {name})"
    model = dashboard.VariableModel(
        type_val=dashboard.VariableType.QUERY, name=name, label=label, datasource=SOURCE, multi=many, include_all=many,
        all_value=MATCH_ALL if many else None,
        refresh=dashboard.VariableRefresh.ON_TIME_RANGE_CHANGED,
        sort=sort or dashboard.VariableSort.NATURAL_ASC,
        query={"qryType": 1, "query": values, "refId": "PrometheusVariableQueryEditor-VariableQuery"},
    )  # fmt: skip
    if many:
        model.current = dashboard.VariableOption(selected=True, text=["All"], value=["$__all"])
    return model


RACK = variable("rack", "Rack", "rackproof_collector_success")
HOST = variable("host", "Host", 'rackproof_collector_success{rack=~"$rack"}')
ONE_HOST = variable("host", "Host", 'rackproof_collector_success{rack=~"$rack"}', many=False)
GPU = variable("gpu", "GPU", f"rackproof_gpu_info{{{HOSTS}}}", sort=dashboard.VariableSort.NUMERICAL_ASC)
RUN_ID = variable("run_id", "Run", f"rackproof_stage_state{{{HOSTS}}}", sort=dashboard.VariableSort.ALPHABETICAL_DESC)


def _source() -> dashboard.VariableModel:
    return dashboard.VariableModel(
        type_val=dashboard.VariableType.DATASOURCE, name="datasource", label="Prometheus", query="prometheus",
        refresh=dashboard.VariableRefresh.ON_DASHBOARD_LOAD,
    )  # fmt: skip


def _runbook(url: str) -> dashboard.VariableModel:
    option = dashboard.VariableOption(selected=True, text=url, value=url)
    return dashboard.VariableModel(
        type_val=dashboard.VariableType.TEXTBOX,
        name="runbook",
        label="Runbook",
        query=url,
        current=option,
        options=[option],
    )


def to_host() -> tuple[str, str]:
    """Return title and URL of a link in a table cell with a host name. The link opens the dashboard of this host."""
    return "The host", f"/d/rackproof-host?{_SHARED_PARAMETERS}&${{rack:queryparam}}&var-host=${{__value.raw}}"


POSITION = {
    "rack": Column(title="Rack"),
    "host": Column(title="Host", link=to_host()),
    "gpu": Column(title="GPU", width=60),
}
"""Columns that most tables have."""
TO_RUNBOOK = ("What to do", "${runbook}#${__data.fields.Alert}")
"""Title and URL of the link from a table row to the runbook section of the alert in its column `Alert`.

The page opens at its top if it has no section for the alert.
"""


def _annotations() -> list[dashboard.AnnotationQuery]:
    began = f"1000 * max by (run_id) (rackproof_run_started_timestamp_seconds{{{HOSTS}}})"
    booted = f"timestamp(rackproof_host_uptime_seconds{{{HOSTS}}}) - rackproof_host_uptime_seconds{{{HOSTS}}}"
    xid = f"1000 * max by (host) ({booted} + (rackproof_xid_last_seen_seconds{{{HOSTS}}} > 0))"
    running = f'max by (run_id, stage) (rackproof_stage_state{{{HOSTS}, state="running"}}) == 1'
    return [
        _annotation("Runs", began, ODD, "Run {{run_id}} begins", "run_id", at_value=True),
        _annotation("Stages", running, BUSY, "{{stage}} of run {{run_id}}", "stage,run_id"),
        _annotation("XIDs", xid, BAD, "{{host}}: newest XID in the kernel log", "host", at_value=True),
    ]


def _annotation(
    name: str, promql: str, colour: str, title: str, tags: str, *, at_value: bool = False
) -> dashboard.AnnotationQuery:
    """Return an annotation that marks the times at which a series is above 0.

    With `at_value`, the value of the series is the time to mark instead (Unix time in ms).
    """
    return dashboard.AnnotationQuery(
        name=name, datasource=SOURCE, enable=True, icon_color=colour, expr=promql, step="60s", title_format=title,
        tag_keys=tags, use_value_for_time=at_value, built_in=None, hide=None,
    )  # fmt: skip


def _links() -> list[dashboard.DashboardLink]:
    return [
        dashboard.DashboardLink(
            title="Rackproof", type_val=dashboard.DashboardLinkType.DASHBOARDS, tags=[TAG], icon="external link",
            include_vars=True, keep_time=True,
        ),
        dashboard.DashboardLink(title="Runbook", url="${runbook}", icon="doc", target_blank=True),
    ]  # fmt: skip


def document(board: Board, runbook: str) -> str:
    """Return the dashboard as JSON for Grafana; `runbook` is the URL of docs/alerts.md."""
    builder = boards.Dashboard(board.title).uid(f"rackproof-{board.name}").description(board.about).tags([TAG])
    builder = builder.time(board.since, "now").refresh(board.refresh).timezone("browser").editable()
    builder = builder.tooltip(dashboard.DashboardCursorSync.CROSSHAIR)
    for section in board.sections:
        row = boards.Row(section.title)
        if section.repeat:
            row = row.collapsed(True).repeat(section.repeat)
            for panel in section.panels:
                row = row.with_panel(panel)
        builder = builder.with_row(row)
        for panel in () if section.repeat else section.panels:
            builder = builder.with_panel(panel)
    model = builder.build()
    model.templating = dashboard.DashboardDashboardTemplating([_source(), *board.variables, _runbook(runbook)])
    model.annotations = dashboard.AnnotationContainer(_annotations())
    model.links, model.schema_version, model.version = _links(), SCHEMA, 1
    return json.dumps(_normalize(json.loads(json.dumps(model, cls=JSONEncoder))), indent=1, sort_keys=True) + "\n"


def _normalize(model: dict[str, Any]) -> dict[str, Any]:
    """Number the panels, and remove keys that the SDK adds.

    Some versions of Grafana do not accept these keys. With the key `placement`, Grafana 12 and later would show the links and
    annotations only in a menu.
    """
    panels = [nested for panel in model["panels"] for nested in (panel, *panel.get("panels", ()))]
    for number, panel in enumerate(panels, 1):
        panel["id"] = number
        panel.get("options", {}).pop("footer", None)
    for item in (*model["annotations"]["list"], *model["links"]):
        item.pop("placement", None)
    for item in model["templating"]["list"]:
        for key in ("auto", "auto_min", "auto_count", "allowCustomValue"):
            item.pop(key, None)
    return model
