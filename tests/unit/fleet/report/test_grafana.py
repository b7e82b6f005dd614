"""The dashboards as files: what the generator makes, in the form that Grafana takes, of series that there are."""

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
GRAFANAS_OWN = {"dateTimeAsIso", "dateTimeFromNow"}
PROMETHEUS_OWN = {"up", "ALERTS", "ALERTS_FOR_STATE"}
SERIES = re.compile(r"(?<![\w.])(rackproof[:_][\w:]+|up|ALERTS\w*)(?=[{\[ )]|$)")


def panels(name: str) -> list[dict[str, Any]]:
    """With those of closed rows, without the rows."""
    every = (one for panel in FILES[name]["panels"] for one in (panel, *panel.get("panels", ())))
    return [panel for panel in every if panel["type"] != "row"]


EVERY = [pytest.param(name, panel, id=f"{name} {panel['title']}") for name in FILES for panel in panels(name)]


def overrides(panel: dict[str, Any], key: str) -> list[Any]:
    """What is said of single fields."""
    properties = (item for override in panel["fieldConfig"]["overrides"] for item in override["properties"])
    return [item["value"] for item in properties if item["id"] == key]


@pytest.fixture(scope="module")
def report() -> FleetReport:
    plan = builders.plan("h1", "h2")
    made = merge(plan, builders.evidence(plan), read_packs([]))
    failed = Verdict(host="h1", scope="gpu=1", name="n", verdict="fail", criterion="c", reason="r", action="rma")
    return replace(made, verdicts=(*made.verdicts, failed))


@pytest.fixture(scope="module")
def known(report: FleetReport) -> set[str]:
    """Every series that can be there."""
    exported = re.findall(r"^\| `(\w+)` \| (\w+)", (ROOT / "docs" / "metrics.md").read_text(), re.MULTILINE)
    names = {name for name, _ in exported} | PROMETHEUS_OWN
    names |= {f"{name}_{part}" for name, kind in exported if kind == "histogram" for part in ("bucket", "count", "sum")}
    rules = yaml.safe_load((ROOT / "deploy" / "prometheus" / "rackproof.rules.yml").read_text())["groups"]
    names |= {rule["record"] for group in rules for rule in group["rules"] if "record" in rule}
    return names | set(re.findall(r"^# TYPE (\w+)", render_prometheus(report), re.MULTILINE))


def test_the_files_are_what_the_generator_makes() -> None:
    """After an intended change: python -m deploy.grafana."""
    made = dashboards()
    assert sorted(made) == sorted(path.name for path in (HERE / "dashboards").iterdir())
    for name, text in made.items():
        assert (HERE / "dashboards" / name).read_text() == text, name


def test_the_runbook_is_where_it_is_said_to_be() -> None:
    made = json.loads(dashboards("https://wiki.example/alerts")["rackproof-fleet.json"])
    (runbook,) = (item for item in made["templating"]["list"] if item["name"] == "runbook")
    assert runbook["query"] == runbook["current"]["value"] == "https://wiki.example/alerts"


@pytest.mark.parametrize("name", FILES)
def test_a_dashboard_is_whole(name: str) -> None:
    made = FILES[name]
    assert made["uid"] == name
    assert (made["schemaVersion"], made["tags"], made["editable"]) == (38, ["rackproof"], True)
    assert made["description"]
    numbers = [one["id"] for panel in made["panels"] for one in (panel, *panel.get("panels", ()))]
    assert sorted(numbers) == list(range(1, len(numbers) + 1))
    assert "id" not in made
    (ours, runbook) = made["links"]
    assert (ours["type"], ours["tags"], ours["includeVars"], ours["keepTime"]) == (
        "dashboards",
        ["rackproof"],
        True,
        True,
    )
    assert runbook["url"] == "${runbook}"
    assert {item["name"] for item in made["annotations"]["list"]} == {"Runs", "Stages", "XIDs"}
    assert made["templating"]["list"][0]["name"] == "datasource"


@pytest.mark.parametrize("name", FILES)
def test_panels_fill_the_width_and_do_not_overlap(name: str) -> None:
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
        for one, other in itertools.combinations(positions, 2):
            side_by_side = one["x"] + one["w"] <= other["x"] or other["x"] + other["w"] <= one["x"]
            below = one["y"] + one["h"] <= other["y"] or other["y"] + other["h"] <= one["y"]
            assert side_by_side or below


@pytest.mark.parametrize(("name", "panel"), EVERY)
def test_a_panel_says_what_it_is_and_what_nothing_means(name: str, panel: dict[str, Any]) -> None:
    assert panel["title"]
    assert len(panel["description"]) > 10
    empty = panel["fieldConfig"]["defaults"]["noValue"]
    assert len(empty) >= 4
    assert not re.fullmatch(r"[\d.]+", empty), "nothing is no number"
    assert panel["targets"]
    assert [target["refId"] for target in panel["targets"]] == list("ABCDEFGHIJKLM"[: len(panel["targets"])])
    if panel["type"] in ("timeseries", "stat"):
        assert panel["fieldConfig"]["defaults"]["unit"]


@pytest.mark.parametrize(("name", "panel"), EVERY)
def test_queries_use_only_exported_series(name: str, panel: dict[str, Any], known: set[str]) -> None:
    for target in panel["targets"]:
        named = SERIES.findall(target["expr"])
        assert named
        assert set(named) <= known
        assert set(re.findall(r"\brackproof[:_]\w[\w:]*", target["expr"])) <= set(named)


@pytest.mark.parametrize(("name", "panel"), EVERY)
def test_queries_ask_only_by_variables(name: str, panel: dict[str, Any]) -> None:
    sources = [panel["datasource"], *(target["datasource"] for target in panel["targets"])]
    assert all(source == {"type": "prometheus", "uid": "${datasource}"} for source in sources)
    variables = {item["name"] for item in FILES[name]["templating"]["list"]}
    for target in panel["targets"]:
        used = set(re.findall(r"\$(?!\d)(\w+)", target["expr"]))
        assert used - {"__range", "__rate_interval"} <= variables
        assert bool(target.get("instant")) == (panel["type"] in ("stat", "table"))


def test_units_are_such_as_grafana_knows() -> None:
    known_units = {value for value in vars(units).values() if isinstance(value, str)} | GRAFANAS_OWN
    for name in FILES:
        for panel in panels(name):
            used = [panel["fieldConfig"]["defaults"].get("unit", "none"), *overrides(panel, "unit")]
            assert set(used) <= known_units, panel["title"]


def test_colours_are_colour_blind_safe() -> None:
    ours = {parts.FINE, parts.BUSY, parts.WARN, parts.BAD, parts.GONE, parts.ODD, parts.PLAIN, *parts.EIGHT}
    for name, made in FILES.items():
        colours = re.findall(r'"(?:color|fixedColor|iconColor)": "([^"]+)"', json.dumps(made))
        assert set(colours) <= ours, name


def test_texts_are_those_of_the_panels() -> None:
    written = yaml.safe_load((HERE / "texts.yml").read_text())
    assert {f"rackproof-{name}" for name in written} == set(FILES)
    for name, texts in written.items():
        assert sorted(text["title"] for text in texts.values()) == sorted(
            panel["title"] for panel in panels(f"rackproof-{name}")
        )


def test_links_point_to_existing_dashboards() -> None:
    urls = [
        link["url"] for name in FILES for panel in panels(name) for links in overrides(panel, "links") for link in links
    ]
    assert len(urls) > 5
    for url in urls:
        target = re.match(r"/d/([\w-]+)\?\$\{__url_time_range\}&\$\{datasource:queryparam\}", url)
        assert url.startswith("${runbook}#") or (target and target[1] in FILES), url


def test_rows_of_alerts_lead_to_the_runbook() -> None:
    for name in ("rackproof-fleet", "rackproof-burnin"):
        leading = [panel for panel in panels(name) if "${runbook}#${__data.fields.Alert}" in json.dumps(panel)]
        assert leading
        for panel in leading:
            (columns,) = (
                step["options"]["renameByName"] for step in panel["transformations"] if step["id"] == "organize"
            )
            assert columns["alertname"] == "Alert"


def test_silence_is_drawn_where_its_alert_begins() -> None:
    (alert,) = (alert for group in read_table() for alert in group.alerts if alert.alert == "RackproofRankSilent")
    assert alert.expr.strip() == f"rackproof_rank_silent_seconds > {SILENT_S:g}"


def test_provisioning_is_of_the_form_that_grafana_reads() -> None:
    (source,) = yaml.safe_load((HERE / "provisioning/datasources/rackproof.yml").read_text())["datasources"]
    assert (source["type"], source["access"]) == ("prometheus", "proxy")
    assert "isDefault" not in source, "it is not for us to choose a site's default"
    (provider,) = yaml.safe_load((HERE / "provisioning/dashboards/rackproof.yml").read_text())["providers"]
    assert (provider["type"], provider["options"]["path"]) == ("file", "/var/lib/grafana/dashboards/rackproof")


# ---- the way from the report ----

TO_THE_RUN = "https://grafana.example/ops/d/rackproof-run?var-run_id=r1&from=1795233540000&to=1795233660000"


def test_the_report_leads_to_its_run_at_its_time(report: FleetReport) -> None:
    assert DASHBOARD in FILES
    report = replace(report, began="2026-11-21T04:00:00Z", ended="2026-11-21T04:00:00Z")
    assert run_dashboard(report, "https://grafana.example/ops/") == TO_THE_RUN
    assert f"[The run in Grafana](<{TO_THE_RUN}>)" in render_markdown(report, "https://grafana.example/ops")
    assert f'href="{TO_THE_RUN.replace("&", "&amp;")}"' in render_html(report, "https://grafana.example/ops")


def test_no_link_without_a_grafana_url(report: FleetReport) -> None:
    assert run_dashboard(report, "") == ""
    assert "Grafana" not in render_markdown(report)
    assert "Grafana" not in render_html(report)


def test_the_inventory_says_where_grafana_is(tmp_path: Path) -> None:
    hosts = builders.inventory("h1", "h2", rackproof_gpu_count=2, rackproof_grafana_url="https://grafana.example")
    planned = rackproof("plan", "-i", listing(tmp_path, hosts), "--json")
    assert json.loads(planned.stdout)["grafana_url"] == "https://grafana.example"
    write_run(tmp_path / "r1", replace(builders.plan("h1", "h2"), grafana_url="https://grafana.example"))
    assert rackproof("report", tmp_path / "r1").returncode == 0
    for name in ("report.md", "report.html"):
        assert "https://grafana.example/d/rackproof-run?var-run_id=r1" in (tmp_path / "r1" / name).read_text()


@pytest.mark.parametrize("url", ["javascript:alert(1)", "grafana.example", 'https://g/"><script>', "https://g/ x"])
def test_what_is_no_address_is_refused(tmp_path: Path, url: str) -> None:
    refused = rackproof("plan", "-i", listing(tmp_path, builders.inventory("h1", rackproof_grafana_url=url)))
    assert refused.returncode == 64
    assert "rackproof_grafana_url" in refused.stderr
