"""Test the pages of network adapters: each has everything that the host reports about the adapter, and nothing else."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from fleet.judge.criteria import read_packs
from fleet.report.html.host_data import embedded_data
from fleet.report.html.page import MAX_BYTES, render_html
from fleet.report.merge import merge
from schemas.documents import validate
from schemas.records import to_json
from schemas.reports import FleetReport, HostReport
from tests import builders
from tests.fakes import adapters


@pytest.fixture(scope="module")
def report() -> FleetReport:
    """Return the report on two hosts. On `h1`, a lane of `mlx5_0` is dark, and the port of `mlx5_0` counted symbol errors."""
    plan = builders.plan("h1", "h2", profile="smoke")
    evidence = dict(builders.evidence(plan))
    before, after = adapters.metrics(1, symbol_errors=2000), adapters.metrics(1, adapters.DARK, symbol_errors=5000)
    evidence["h1"] = adapters.with_adapters(evidence["h1"], before, after)
    healthy = adapters.metrics(2)
    evidence["h2"] = adapters.with_adapters(evidence["h2"], healthy, healthy)
    record, *others = evidence["h1"].records
    test = {"op": "write", "direction": "one_way", "memory": "host"}
    port = "hca=mlx5_0,port=1"
    figures = [
        adapters.figure("verbs.bandwidth", port, 48e9, "B/s", sharing="alone", **test),
        *(
            adapters.figure("verbs.bandwidth", f"{port},partner={name}", rate, "B/s", sharing="together", **test)
            for name, rate in (("h2", 21e9), ("h3", 49e9))
        ),
    ]
    record = replace(record, observations=(*record.observations, *figures))
    evidence["h1"] = replace(evidence["h1"], records=(record, *others))
    return merge(plan, evidence, read_packs([]))


def data_of(report: FleetReport) -> dict[str, Any]:
    page = render_html(report)
    assert len(page.encode()) <= MAX_BYTES
    data: dict[str, Any] = json.loads(page.rpartition('id="data">')[2].partition("</script>")[0])
    return data


def texts(data: dict[str, Any], item: Any) -> Any:
    """Return the item with its indices into `data["texts"]` replaced by the texts."""
    if isinstance(item, list):
        return [texts(data, each) for each in item]
    return data["texts"][item] if isinstance(item, int) else item


def host(report: FleetReport, name: str) -> HostReport:
    return next(host for host in report.hosts if host.name == name)


def test_report_has_every_reading_of_each_adapter_once(report: FleetReport) -> None:
    for host_report in report.hosts:
        first, second = host_report.adapters
        assert (first.name, first.scopes, first.slot) == ("mlx5_0", ("hca=mlx5_0", "pci=0000:1a:00.0"), "0000:1a:00.0")
        for adapter, other in ((first, second), (second, first)):
            keys = [(item.name, item.scope) for item in adapter.readings]
            assert len(set(keys)) == len(keys)
            assert not {scope for _, scope in keys} & {item.scope for item in other.readings}
    scopes = {
        (metric.name, scope)
        for metric in adapters.metrics(2)
        for scope in (*metric.values, *metric.absent)
        if scope != "host" and not scope.startswith("pci=0000:0")
    }
    assert scopes == {(item.name, item.scope) for each in host(report, "h2").adapters for item in each.readings}
    validate(to_json(report), "report", source="report")


def test_counter_has_its_increase_in_the_run_and_its_rate_before_the_run(report: FleetReport) -> None:
    readings = {(item.name, item.scope): item for item in host(report, "h1").adapters[0].readings}
    counter = readings["infiniband.symbol_error", "hca=mlx5_0,port=1"]
    assert (counter.value, counter.increase) == (5000, 3000)
    assert counter.per_hour == pytest.approx(2000 / 240)  # 864 000 s (240 h) of uptime
    (unchanged,) = (item for item in host(report, "h2").adapters[0].readings if item.name == "infiniband.symbol_error")
    assert (unchanged.increase, unchanged.per_hour) == (None, None)


def test_page_of_an_adapter_has_causes_limits_lanes_and_figures(report: FleetReport) -> None:
    data = data_of(report)
    page = data["pages"]["0"]
    name, state, summary, slot, causes, sections, figures = page["adapters"][0]
    assert texts(data, [name, slot]) == ["mlx5_0", "0000:1a:00.0"]
    assert "50 GB/s" in texts(data, summary)
    assert "nearest to GPU 0 (PIX)" in texts(data, summary)
    assert state == "f"
    titles = [texts(data, page["reasons"][at][2]) for at in causes]
    assert titles
    assert all("mlx5_0" in title for title in titles)
    title, rows, _, _, columns, lanes, pictures = sections[1]
    assert texts(data, title) == "Port 1"
    (symbol,) = (texts(data, row) for row in rows if texts(data, row[0]) == "Port counter symbol_error")
    assert symbol[1:4] == ["5000", "3000", "8.333 an hour"]
    assert symbol[-1] == "f"
    assert {"Received optical power", "Transmitted optical power"} <= set(texts(data, columns))
    assert [letter for *_, letter in lanes].count("f") == 1
    _, limits, points = pictures[0]
    assert limits == sorted(limits)
    assert [power for _, power, _ in points].count(None) == 1
    assert points[4][1:] == [None, "f"]
    rows_of_figures = [texts(data, row) for row in figures]
    assert [row[2:5] for row in rows_of_figures] == [
        ["", "48 GB/s", ""], ["2 partners", "21 GB/s … 49 GB/s", "h2"],
    ]  # fmt: skip


def test_healthy_adapters_have_no_finding(report: FleetReport) -> None:
    page = data_of(report)["pages"]
    assert page["0"]["adapters"][1][1] == "p"
    assert page["0"]["adapters"][1][4] == []
    assert [adapter[1] for adapter in page["1"]["adapters"]] == ["p", "p"]


def test_lane_reading_without_any_value_is_listed_with_its_reason(report: FleetReport) -> None:
    first = host(report, "h1")
    names = ("optics.rx_power", "optics.tx_power")
    readings = tuple(
        replace(item, value=None, reason="error: the module does not answer") if item.name in names else item
        for item in first.adapters[0].readings
    )
    changed = replace(first, adapters=(replace(first.adapters[0], readings=readings), *first.adapters[1:]))
    data = data_of(replace(report, hosts=(changed, report.hosts[1])))
    absent = [texts(data, item) for *_, absent, _, _, _ in data["pages"]["0"]["adapters"][0][5] for item in absent]
    assert ["Received optical power, Transmitted optical power", "error: the module does not answer"] in absent


def test_adapter_without_any_verdict_is_not_shown_as_passed(report: FleetReport) -> None:
    unjudged = data_of(replace(report, verdicts=(), causes=()))["pages"]
    assert [adapter[1] for page in unjudged.values() for adapter in page["adapters"]] == [""] * 4


def test_hosts_without_adapters_have_no_pages_of_adapters() -> None:
    plan = builders.plan("h1", profile="smoke", rackproof_gang="none")
    report = merge(plan, builders.evidence(plan), read_packs([]))
    assert report.hosts[0].adapters == ()
    assert "adapters" not in data_of(report)["pages"]["0"]


def test_too_large_report_omits_pages_of_adapters_first(report: FleetReport) -> None:
    size = len(embedded_data(report, MAX_BYTES).encode())
    pages = json.loads(embedded_data(report, size - 200))["pages"]
    assert len(pages) == 2
    assert pages["0"]["adapters"]
    assert pages["1"]["adapters"] == []
