"""Test how reports show rare cases: figures that were not measured, entries that a table leaves out, and invalid values."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from fleet.report.changes import changes_page
from fleet.report.charts.strip import MAX_DOTS, Axis, Mark, draw_strip
from fleet.report.html import pairs
from fleet.report.html.page import render_html
from fleet.report.markdown import render_markdown
from fleet.report.prometheus import render_prometheus
from fleet.report.tables import devices, gpus, headline, peers, reasons, soak_timeline, timing, workloads
from fleet.report.tables.distributions import distributions
from schemas.baselines import FIGURES_GONE, Change
from schemas.records import ERROR, Observation
from schemas.reports import EXCEPTIONS, FAIL, INCONCLUSIVE, PASS, FleetReport, Judged, Verdict
from schemas.timeline import Event, Series, Soak, Timeline
from tests.unit.fleet.report.test_render import accepted, measured, rejected, two_hosts


def with_measurements(report: FleetReport, change: Callable[[Observation], Observation]) -> FleetReport:
    """Return the report after `change` was applied to each measurement of its first host."""
    first, *others = report.hosts
    return replace(report, hosts=(replace(first, measurements=tuple(map(change, first.measurements))), *others))


def failed_to_measure(name: str, scope: str) -> Callable[[Observation], Observation]:
    """Return a function that turns the observation with this name and scope into an error, and changes no other."""

    def change(item: Observation) -> Observation:
        is_chosen = (item.name, item.scope) == (name, scope)
        return replace(item, status=ERROR, value=None, reason="driver hangs", samples=None) if is_chosen else item

    return change


@pytest.mark.parametrize("render", [render_html, render_markdown])
def test_error_counter_states_how_many_devices_were_not_checked(render: Callable[[FleetReport], str]) -> None:
    report = with_measurements(two_hosts(), failed_to_measure("integrity.wrong_words", "gpu=1"))
    [counter] = gpus.error_counters(report)
    assert (counter.readings, counter.devices, counter.gap) == (3, 3, "not checked on 1 device")
    assert "not checked on 1 device" in render(report)


def test_error_counter_lists_twenty_errors_and_counts_the_others() -> None:
    report = accepted()
    errors = tuple(measured("integrity.wrong_words", 1, "1", f"gpu={index}", pattern="zeros") for index in range(25))
    first, *others = report.hosts
    [counter] = gpus.error_counters(replace(report, hosts=(replace(first, measurements=errors), *others)))
    assert (len(counter.errors), counter.errors[-1]) == (21, "and 5 more")


def test_throttle_reason_that_was_not_measured_is_shown_as_an_error() -> None:
    def with_error(item: Observation) -> Observation:
        is_chosen = item.name == "stress.throttled_share" and item.params["reason"] == "power_cap"
        is_chosen = is_chosen and item.scope == "gpu=0"
        return replace(item, status=ERROR, value=None, reason="driver hangs") if is_chosen else item

    table = gpus.stress(with_measurements(two_hosts(), with_error))
    assert table
    assert [(row.cells[-1].text, row.cells[-1].css) for row in table.rows[:2]] == [
        ("power cap error", "inconclusive"),
        ("power cap 38 %", ""),
    ]


def verdict(**fields: Any) -> Verdict:
    """Return a failed verdict on the bandwidth of copies from GPU 0 to GPU 1; `fields` replaces fields of the verdict."""
    defaults: dict[str, Any] = {
        "host": "gpu-00",
        "scope": "gpu=0,peer=1",
        "name": "peer_copy.bandwidth",
        "params": {"direction": "one_way"},
        "verdict": FAIL,
        "criterion": "peer",
        "reason": "too slow",
    }
    return Verdict(**{**defaults, **fields})


def test_only_the_failing_figure_of_a_pair_of_gpus_is_marked_in_the_matrix_of_pairs() -> None:
    report = replace(two_hosts(), verdicts=(verdict(),))
    matrix = peers.peers(report).matrices[0]
    marked = {layer.caption: layer.rows[0][1].css for layer in matrix.layers}
    assert marked == {"One way, GB/s": "fail", "Both ways, GB/s": "heat5", "Latency, µs": ""}
    assert matrix.rows[0][1].css == "fail"
    slow_latency = replace(report, verdicts=(verdict(name="peer_copy.latency", params={}),))
    assert peers.peers(slow_latency).matrices[0].layers[2].rows[0][1].css == "fail"


def test_failure_of_one_host_is_marked_in_a_row_that_summarizes_many_hosts() -> None:
    report = two_hosts()
    hosts = [replace(report.hosts[index % 2], name=f"gpu-{index:02}") for index in range(6)]
    failure = verdict(host="gpu-03", scope="host", name="checkpoint.identical", params={}, stage="benchmark")
    table = workloads.workloads(replace(report, hosts=tuple(hosts), verdicts=(failure,)))
    assert table
    cells = {row.note: row.cells[-1] for row in table.rows}
    assert (cells["identical"].whole, cells["identical"].css) == ("6 of 6 (1 failing)", "fail")
    assert cells["mfu"].css == ""


def test_inconclusive_verdicts_are_counted_with_or_without_a_value() -> None:
    report = rejected()
    listed = [item for item in report.verdicts if item.name == "gemm.throughput"]
    without_value = replace(listed[-1], host="gpu-00", verdict=INCONCLUSIVE, value=None, limit=None, operator="")
    with_value = replace(listed[-1], verdict=INCONCLUSIVE)
    for verdicts in ((without_value, *listed[:-1], with_value), (*listed[:-1], with_value, without_value)):
        (figure,) = [
            item
            for item in distributions(replace(report, verdicts=verdicts))
            if item.key.name == "gemm.throughput" and item.criteria
        ]
        assert (figure.inconclusive, figure.failed) == (2, 0)


def test_failures_beyond_the_maximum_number_of_dots_are_in_the_histogram() -> None:
    marks = [Mark(float(index), FAIL, "") for index in range(MAX_DOTS + 30)]
    dots, bars = draw_strip([*marks, Mark(500.0, PASS, "")], (), Axis.around([0.0, 500.0]))
    assert len(dots) == MAX_DOTS
    assert bars.count("M") > 1


def test_time_of_every_launch_of_a_stage_is_counted() -> None:
    first = two_hosts().hosts[0]
    (launch,) = first.launches
    twice = replace(first, launches=(replace(launch, number=1, outcome="failed", duration_s=300.0), launch))
    rest = timing._seconds(twice)[timing.StageTime("benchmark", timing.REST)]
    once = timing._seconds(first)[timing.StageTime("benchmark", timing.REST)]
    assert rest == pytest.approx(once + 300.0)


def test_median_bandwidth_of_pairs_of_hosts_is_a_dash_if_no_pair_was_measured() -> None:
    report = accepted()
    first, second = report.hosts
    pair = measured("pairs.bandwidth", 1.0, "1", "nic=rail0,partner=gpu-01")
    item = replace(pair, status=ERROR, value=None, unit="B/s", reason="timed out")
    [matrix] = pairs.pair_matrices(replace(report, hosts=(replace(first, measurements=(item,)), second)))
    assert (matrix.median, matrix.lowest, matrix.failed) == ("–", "", 1)
    assert pairs.host_pairs(replace(first, measurements=(item,)))["median"] == "–"


def with_soak(timeline: Timeline) -> FleetReport:
    """Return a report in which the first host has a soak of one round."""
    soak = Soak(began="2026-11-14T09:30:02Z", planned_s=60, soaked_s=60, finished=1, timeline=timeline)
    report = accepted()
    return replace(report, hosts=(replace(report.hosts[0], soak=soak), report.hosts[1]))


def test_rare_event_is_shown_beside_a_frequent_one() -> None:
    frequent = [
        Event(
            at_s=at, until_s=at, name="gpu.throttle.active", scope="gpu=0,reason=hw_thermal", count=1, text="throttled"
        )
        for at in range(20)
    ]
    rare = Event(at_s=50, until_s=50, name="xid.fatal", scope="gpu=1", count=1, text="rose from 0 to 1")
    [timeline] = soak_timeline.timelines(with_soak(Timeline(bucket_s=60, events=(*frequent, rare), left_out=2)))
    shown = [(event.when, event.text) for event in timeline.events]
    assert shown[0] == ("0 min 00 s", "gpu.throttle.active: throttled")
    assert shown[-1] == ("0 min 50 s", "xid.fatal: rose from 0 to 1")
    assert (len(shown), timeline.left_out) == (7, 16)


@pytest.mark.parametrize("size", ["a text", True, 1e300, None])
def test_soak_series_with_an_invalid_message_size_is_shown(size: Any) -> None:
    full: dict[str, Any] = {"at": (0,), "n": (1,), "low": (1e9,), "mean": (2e9,), "high": (3e9,)}
    rate = {"name": "collective.all_reduce.busbw", "scope": "host", "unit": "B/s"}
    series = (Series(**rate, params={"size_bytes": size}, **full),)
    report = with_soak(Timeline(bucket_s=60, series=series))
    [timeline] = soak_timeline.timelines(report)
    assert (timeline.columns, len(timeline.rates)) == ((), 1)
    assert timeline.summary == "1 min 00 s of 1 min 00 s in 1 round, end not recorded"
    assert "collective" in render_html(report)


def test_markdown_page_of_changes_states_how_many_figures_are_gone() -> None:
    change = Change(
        kind=FIGURES_GONE, host="h1", scope="host", what="figures", old=7, new=None, text="7 figures are gone"
    )
    assert "7 figures are gone" in changes_page("Changes", [], [change])


def test_counts_include_failures_that_the_report_does_not_list() -> None:
    report = rejected()
    (failure,) = [item for item in report.verdicts if item.verdict == FAIL]
    row = Judged(criterion=failure.criterion, name=failure.name, failed=30_000, inconclusive=5)
    large = replace(report, judged=(row,), verdicts=(failure,), left_out=29_999, detail=EXCEPTIONS)
    assert headline.sentence(large) == "30000 checks failed on 1 of 2 hosts. 5 more checks could not be evaluated."
    metrics = render_prometheus(large)
    assert 'rackproof_report_failures_left_out{run_id="rack12-a"} 29999.0' in metrics
    assert "rackproof_report_host_verdicts{" not in metrics, (
        "counts per host must not be exported: they would omit the verdicts that the report does not list"
    )


def test_next_command_for_more_than_20_hosts_says_that_it_names_the_first_20() -> None:
    report = rejected()
    [reason] = [item for item in reasons.reasons(report.verdicts, report.causes, {}) if item.verdict == FAIL][:1]
    for count, sentence in ((20, "Then measure again"), (21, "Then measure again (the first 20 of 21 hosts)")):
        many = replace(reason, is_returned=False, hosts=tuple(f"h{number}" for number in range(count)))
        assert reasons.next_command(many, report.run_id, "PLAYBOOK")[0] == sentence


def test_table_shows_three_limits_and_counts_the_others() -> None:
    report = two_hosts()
    row = devices.device_figures(report)[0]
    passed = next(item for item in report.verdicts if item.name == row.name and item.verdict == PASS and item.limit)
    limits = [(1.0, ">="), (1.0, "<="), (2.0, ">="), (3.0, ">="), (4.0, ">=")]
    verdicts = tuple(replace(passed, limit=limit, operator=operator) for limit, operator in limits)
    row = devices.device_figures(replace(report, verdicts=verdicts))[0]
    assert row.limit_text.count(",") == 2
    assert row.limit_text.endswith(" and 2 more")
