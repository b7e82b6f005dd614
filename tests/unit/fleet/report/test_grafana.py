"""The Grafana dashboards: the files match the generator, are valid, and query only series that exist."""

from __future__ import annotations

import itertools
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from grafana_foundation_sdk.models import units

from deploy.grafana import parts
from deploy.grafana.__main__ import dashboards
from deploy.grafana.run_dashboard import SILENT_S
from fleet.integrations.alerts.rules import read_table
from fleet.judge.criteria import read_packs
from fleet.report.grafana import DASHBOARD, run_dashboard
from fleet.report.html.page import render_html
from fleet.report.markdown import render_markdown
from fleet.report.merge import merge
from fleet.report.prometheus import render_prometheus
from schemas.reports import FleetReport, Verdict
from tests import ROOT, builders
from tests.accepted import rackproof
from tests.unit.fleet.planning.test_plan import listing
from tests.unit.fleet.report.test_report import write_run

HERE = ROOT / "deploy" / "grafana"
FILES = {path.stem: json.loads(path.read_text()) for path in sorted((HERE / "dashboards").glob("*.json"))}
OTHER_GRAFANA_UNITS = {"dateTimeAsIso", "dateTimeFromNow"}  # Grafana has these units; the SDK does not list them
PROMETHEUS_SERIES = {"up", "ALERTS", "ALERTS_FOR_STATE"}
SERIES = re.compile(r"(?<![\w.])(rackproof[:_][\w:]+|up|ALERTS\w*)(?=[{\[ )]|$)")


def panels(name: str) -> list[dict[str, Any]]:
    """Return the panels of a dashboard, including those in collapsed rows but not the rows themselves."""
    all_panels = (item for panel in FILES[name]["panels"] for item in (panel, *panel.get("panels", ())))
    return [panel for panel in all_panels if panel["type"] != "row"]


ALL_PANELS = [pytest.param(name, panel, id=f"{name} {panel['title']}") for name in FILES for panel in panels(name)]


def overrides(panel: dict[str, Any], key: str) -> list[Any]:
    """Return the values of the property `key` in the field overrides of the panel."""
    properties = (item for override in panel["fieldConfig"]["overrides"] for item in override["properties"])
    return [item["value"] for item in properties if item["id"] == key]


@pytest.fixture(scope="module")
def report() -> FleetReport:
    plan = builders.plan("h1", "h2")
    accepted = merge(plan, builders.evidence(plan), read_packs([]))
    failed = Verdict(host="h1", scope="gpu=1", name="n", verdict="fail", criterion="c", reason="r", action="rma")
    return replace(accepted, verdicts=(*accepted.verdicts, failed))


@pytest.fixture(scope="module")
def series(report: FleetReport) -> set[str]:
    """Return the names of the series that exporters, recording rules, reports and Prometheus itself can write."""
    exported = re.findall(r"^\| `(\w+)` \| (\w+)", (ROOT / "docs" / "metrics.md").read_text(), re.MULTILINE)
    names = {name for name, _ in exported} | PROMETHEUS_SERIES
    names |= {f"{name}_{part}" for name, kind in exported if kind == "histogram" for part in ("bucket", "count", "sum")}
    rules = yaml.safe_load((ROOT / "deploy" / "prometheus" / "rackproof.rules.yml").read_text())["groups"]
    names |= {rule["record"] for group in rules for rule in group["rules"] if "record" in rule}
    return names | set(re.findall(r"^# TYPE (\w+)", render_prometheus(report), re.MULTILINE))


def test_dashboard_files_match_the_generator() -> None:
    """If you change the generator, write the files with `python -m deploy.grafana`."""
    generated = dashboards()
    assert sorted(generated) == sorted(path.name for path in (HERE / "dashboards").iterdir())
    for name, text in generated.items():
        assert (HERE / "dashboards" / name).read_text() == text, name


def test_dashboard_links_to_the_given_runbook() -> None:
    dashboard = json.loads(dashboards("https://wiki.example/alerts")["rackproof-fleet.json"])
    (runbook,) = (item for item in dashboard["templating"]["list"] if item["name"] == "runbook")
    assert runbook["query"] == runbook["current"]["value"] == "https://wiki.example/alerts"


@pytest.mark.parametrize("name", FILES)
def test_dashboard_has_annotations_links_and_a_data_source(name: str) -> None:
    dashboard = FILES[name]
    assert dashboard["uid"] == name
    assert (dashboard["schemaVersion"], dashboard["tags"], dashboard["editable"]) == (38, ["rackproof"], True)
    assert dashboard["description"]
    numbers = [item["id"] for panel in dashboard["panels"] for item in (panel, *panel.get("panels", ()))]
    assert sorted(numbers) == list(range(1, len(numbers) + 1))
    assert "id" not in dashboard
    (others, runbook) = dashboard["links"]
    assert (others["type"], others["tags"], others["includeVars"], others["keepTime"]) == (
        "dashboards",
        ["rackproof"],
        True,
        True,
    )
    assert runbook["url"] == "${runbook}"
    assert {item["name"] for item in dashboard["annotations"]["list"]} == {"Runs", "Stages", "XIDs"}
    assert dashboard["templating"]["list"][0]["name"] == "datasource"


@pytest.mark.parametrize("name", FILES)
def test_panels_are_within_the_width_of_the_dashboard_and_do_not_overlap(name: str) -> None:
    for group in (
        FILES[name]["panels"],
        *(panel.get("panels", []) for panel in FILES[name]["panels"]),
    ):
        positions = [panel["gridPos"] for panel in group]
        for position in positions:
            assert position["x"] >= 0
            assert position["x"] + position["w"] <= 24
            assert position["w"] > 0
            assert position["h"] > 0
        for first, second in itertools.combinations(positions, 2):
            side_by_side = first["x"] + first["w"] <= second["x"] or second["x"] + second["w"] <= first["x"]
            below = first["y"] + first["h"] <= second["y"] or second["y"] + second["h"] <= first["y"]
            assert side_by_side or below


@pytest.mark.parametrize(("name", "panel"), ALL_PANELS)
def test_panel_has_a_description_and_a_text_for_missing_data(name: str, panel: dict[str, Any]) -> None:
    assert panel["title"]
    assert len(panel["description"]) > 10
    empty = panel["fieldConfig"]["defaults"]["noValue"]
    assert len(empty) >= 4
    assert not re.fullmatch(r"[\d.]+", empty), "missing data must not be shown as a number"
    assert panel["targets"]
    assert [target["refId"] for target in panel["targets"]] == list("ABCDEFGHIJKLM"[: len(panel["targets"])])
    if panel["type"] in ("timeseries", "stat"):
        assert panel["fieldConfig"]["defaults"]["unit"]


@pytest.mark.parametrize(("name", "panel"), ALL_PANELS)
def test_queries_use_only_exported_series(name: str, panel: dict[str, Any], series: set[str]) -> None:
    for target in panel["targets"]:
        named = SERIES.findall(target["expr"])
        assert named
        assert set(named) <= series
        assert set(re.findall(r"\brackproof[:_]\w[\w:]*", target["expr"])) <= set(named)


@pytest.mark.parametrize(("name", "panel"), ALL_PANELS)
def test_queries_use_only_defined_variables(name: str, panel: dict[str, Any]) -> None:
    sources = [panel["datasource"], *(target["datasource"] for target in panel["targets"])]
    assert all(source == {"type": "prometheus", "uid": "${datasource}"} for source in sources)
    variables = {item["name"] for item in FILES[name]["templating"]["list"]}
    for target in panel["targets"]:
        used = set(re.findall(r"\$(?!\d)(\w+)", target["expr"]))
        assert used - {"__range", "__rate_interval"} <= variables
        assert bool(target.get("instant")) == (panel["type"] in ("stat", "table"))


def test_panels_use_only_units_that_grafana_has() -> None:
    known_units = {value for value in vars(units).values() if isinstance(value, str)} | OTHER_GRAFANA_UNITS
    for name in FILES:
        for panel in panels(name):
            used = [panel["fieldConfig"]["defaults"].get("unit", "none"), *overrides(panel, "unit")]
            assert set(used) <= known_units, panel["title"]


def test_colours_are_from_the_palette() -> None:
    palette = {parts.FINE, parts.BUSY, parts.WARN, parts.BAD, parts.GONE, parts.ODD, parts.PLAIN, *parts.GPU_COLOURS}
    for name, dashboard in FILES.items():
        colours = re.findall(r'"(?:color|fixedColor|iconColor)": "([^"]+)"', json.dumps(dashboard))
        assert set(colours) <= palette, name


def test_texts_file_has_exactly_one_entry_for_each_panel() -> None:
    written = yaml.safe_load((HERE / "texts.yml").read_text())
    assert {f"rackproof-{name}" for name in written} == set(FILES)
    for name, texts in written.items():
        assert sorted(text["title"] for text in texts.values()) == sorted(
            panel["title"] for panel in panels(f"rackproof-{name}")
        )


def test_links_point_to_existing_dashboards_or_the_runbook() -> None:
    urls = [
        link["url"] for name in FILES for panel in panels(name) for links in overrides(panel, "links") for link in links
    ]
    assert len(urls) > 5
    for url in urls:
        target = re.match(r"/d/([\w-]+)\?\$\{__url_time_range\}&\$\{datasource:queryparam\}", url)
        assert url.startswith("${runbook}#") or (target and target[1] in FILES), url


def test_rows_of_alert_tables_link_to_the_runbook() -> None:
    for name in ("rackproof-fleet", "rackproof-burnin"):
        linking = [panel for panel in panels(name) if "${runbook}#${__data.fields.Alert}" in json.dumps(panel)]
        assert linking
        for panel in linking:
            (columns,) = (
                step["options"]["renameByName"] for step in panel["transformations"] if step["id"] == "organize"
            )
            assert columns["alertname"] == "Alert"


def test_silence_threshold_of_the_run_dashboard_matches_the_alert() -> None:
    (alert,) = (alert for group in read_table() for alert in group.alerts if alert.alert == "RackproofRankSilent")
    assert alert.expr.strip() == f"rackproof_rank_silent_seconds > {SILENT_S:g}"


def test_provisioning_files_are_valid() -> None:
    (source,) = yaml.safe_load((HERE / "provisioning/datasources/rackproof.yml").read_text())["datasources"]
    assert (source["type"], source["access"]) == ("prometheus", "proxy")
    assert "isDefault" not in source, (
        "the file must not make this the default data source: the site chooses the default"
    )
    (provider,) = yaml.safe_load((HERE / "provisioning/dashboards/rackproof.yml").read_text())["providers"]
    assert (provider["type"], provider["options"]["path"]) == ("file", "/var/lib/grafana/dashboards/rackproof")


# ---- the link from the report to the dashboard ----

RUN_URL = "https://grafana.example/ops/d/rackproof-run?var-run_id=r1&from=1795233540000&to=1795233660000"


def test_report_links_to_the_dashboard_at_the_time_of_the_run(report: FleetReport) -> None:
    assert DASHBOARD in FILES
    report = replace(report, began="2026-11-21T04:00:00Z", ended="2026-11-21T04:00:00Z")
    assert run_dashboard(report, "https://grafana.example/ops/") == RUN_URL
    assert f"[The run in Grafana](<{RUN_URL}>)" in render_markdown(report, "https://grafana.example/ops")
    assert f'href="{RUN_URL.replace("&", "&amp;")}"' in render_html(report, "https://grafana.example/ops")


def test_report_without_a_grafana_url_has_no_link(report: FleetReport) -> None:
    assert run_dashboard(report, "") == ""
    assert "Grafana" not in render_markdown(report)
    assert "Grafana" not in render_html(report)


def test_grafana_url_comes_from_the_inventory(tmp_path: Path) -> None:
    hosts = builders.inventory("h1", "h2", rackproof_gpu_count=2, rackproof_grafana_url="https://grafana.example")
    planned = rackproof("plan", "-i", listing(tmp_path, hosts), "--json")
    assert json.loads(planned.stdout)["grafana_url"] == "https://grafana.example"
    write_run(tmp_path / "r1", replace(builders.plan("h1", "h2"), grafana_url="https://grafana.example"))
    assert rackproof("report", tmp_path / "r1").returncode == 0
    for name in ("report.md", "report.html"):
        assert "https://grafana.example/d/rackproof-run?var-run_id=r1" in (tmp_path / "r1" / name).read_text()


@pytest.mark.parametrize("url", ["javascript:alert(1)", "grafana.example", 'https://g/"><script>', "https://g/ x"])
def test_invalid_grafana_url_is_rejected(tmp_path: Path, url: str) -> None:
    refused = rackproof("plan", "-i", listing(tmp_path, builders.inventory("h1", rackproof_grafana_url=url)))
    assert refused.returncode == 64
    assert "rackproof_grafana_url" in refused.stderr
