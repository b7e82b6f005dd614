"""Test verdicts.prom: its metrics can be parsed, and text from hosts stays inside its label."""

from __future__ import annotations

import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from fleet.judge.criteria import read_packs
from fleet.report.merge import merge
from fleet.report.prometheus import LABEL_LIMIT, MAX_FAILURES, render_prometheus
from schemas.plans import Plan
from schemas.reports import FleetReport, Verdict
from schemas.waivers import Waiver
from tests import builders
from tests.accepted import rackproof
from tests.unit.fleet.report.test_report import write_run

Series = dict[str, list[tuple[dict[str, str], float]]]


def report_of(plan: Plan) -> FleetReport:
    return merge(plan, builders.evidence(plan), read_packs([]))


@pytest.fixture(scope="module")
def report() -> FleetReport:
    return report_of(builders.plan("h1", "h2", "h3"))


def failure(**fields: str) -> Verdict:
    default = {"host": "h2", "scope": "gpu=1", "serial": "h2-1", "name": "gpu.remapped_rows.failed", "action": "rma"}
    default |= {"criterion": "row-remap-failed", "verdict": "fail", "reason": "found yes, wanted no"}
    return Verdict(**{**default, **fields})  # type: ignore[arg-type]


def series(text: str) -> Series:
    """Return the labels and the value of each sample, by metric name. Names lack `rackproof_report_`; labels lack `run_id`."""
    values: Series = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = dict(sample.labels)
            assert labels.pop("run_id")
            values.setdefault(sample.name.removeprefix("rackproof_report_"), []).append((labels, sample.value))
    return values


def nonzero(samples: list[tuple[dict[str, str], float]]) -> list[dict[str, str]]:
    """Return the labels of the samples that are not zero."""
    return [labels for labels, value in samples if value]


def test_accepted_fleet_has_decision_and_no_failures(report: FleetReport) -> None:
    metrics = series(render_prometheus(report))
    assert nonzero(metrics["decision"]) == [{"decision": "accepted"}]
    assert nonzero(metrics["host_decision"]) == [
        {"host": host, "rack": "r1", "decision": "accepted"} for host in ("h1", "h2", "h3")
    ]
    assert "failures" not in metrics
    assert metrics["failures_left_out"] == [({}, 0)]
    assert metrics["end_timestamp_seconds"][0][1] == pytest.approx(1795233600)
    for host in report.hosts:
        counts = {
            labels["status"]: value for labels, value in metrics["host_observations"] if labels["host"] == host.name
        }
        assert counts["expected"] == counts["measured"] == host.coverage.expected > 0


def test_failures_have_part_and_action_and_the_most_severe_comes_first(report: FleetReport) -> None:
    failures = (failure(action="monitor", criterion="efficiency-vs-fleet"), failure(), failure())
    metrics = series(render_prometheus(replace(report, decision="rejected", verdicts=(*report.verdicts, *failures))))
    labels = {"host": "h2", "rack": "r1", "gpu": "1", "scope": "gpu=1", "serial": "h2-1"}
    assert metrics["failures"] == [
        ({**labels, "criterion": "row-remap-failed", "action": "rma"}, 2),
        ({**labels, "criterion": "efficiency-vs-fleet", "action": "monitor"}, 1),
    ]
    assert nonzero(metrics["decision"]) == [{"decision": "rejected"}]
    counts = {sample["host"]: value for sample, value in metrics["host_verdicts"] if sample["verdict"] == "fail"}
    assert counts == {"h1": 0, "h2": 3, "h3": 0}


def test_failure_has_value_and_limit_with_unit(report: FleetReport) -> None:
    floor = {
        "operator": "ge",
        "unit": "B/s",
        "name": "memory.bandwidth",
        "stage": "benchmark",
        "params": {"op": "read"},
    }
    slow = replace(failure(criterion="memory-vs-fleet"), value=4.2e12, limit=4.3e12, **floor)  # type: ignore[arg-type]
    text_value = replace(failure(), value="580", limit="570", operator="eq")
    text = render_prometheus(replace(report, verdicts=(*report.verdicts, slow, text_value)))
    metrics = series(text)
    ((labels, value), (limit_labels, limit)) = (metrics[f"failure_{kind}"][0] for kind in ("value", "limit"))
    assert (value, limit) == (4.2e12, 4.3e12)
    assert labels == limit_labels
    assert {key: labels[key] for key in ("serial", "criterion", "name", "params", "unit", "operator")} == {
        "serial": "h2-1", "criterion": "memory-vs-fleet", "name": "memory.bandwidth", "params": "read", "unit": "B/s",
        "operator": "ge",
    }  # fmt: skip
    assert len(metrics["failure_value"]) == 1, "a failure whose value is a text must have no sample of `failure_value`"
    assert subprocess.run(["promtool", "check", "metrics"], input=text, text=True, check=False).returncode == 0


def test_waived_failure_is_exported_only_as_waived(report: FleetReport) -> None:
    waiver = Waiver(criterion="row-remap-failed", who="alice", why="spare ordered", until="2026-12-31", host="h2")
    metrics = series(render_prometheus(replace(report, verdicts=(*report.verdicts, replace(failure(), waiver=waiver)))))
    assert "failures" not in metrics
    assert [value for _, value in metrics["waived"]] == [1]
    assert "failure_value" not in metrics


def test_number_of_passes_is_not_exported_if_the_report_lists_only_exceptions(report: FleetReport) -> None:
    metrics = series(render_prometheus(replace(report, detail="exceptions", verdicts=(failure(),))))
    assert {labels["verdict"] for labels, _ in metrics["host_verdicts"]} == {"fail", "inconclusive"}


def test_accepted_rehearsal_is_exported_as_rehearsal_accepted(report: FleetReport) -> None:
    text = render_prometheus(replace(report, rehearsal=True))
    metrics = series(text)
    assert nonzero(metrics["decision"]) == [{"decision": "REHEARSAL accepted"}]
    assert {labels["decision"] for labels, _ in metrics["host_decision"]} & {"accepted"} == set()
    assert all("REHEARSAL" in line for line in text.splitlines() if line.startswith("# HELP"))


def test_number_of_failure_series_is_limited(report: FleetReport) -> None:
    many = tuple(failure(scope=f"gpu={number}", action="reseat") for number in range(MAX_FAILURES + 20))
    metrics = series(render_prometheus(replace(report, verdicts=(*many, failure(action="rma")))))
    assert len(metrics["failures"]) == MAX_FAILURES
    assert metrics["failures"][0][0]["action"] == "rma"
    assert metrics["failures_left_out"] == [({}, 21)]


@pytest.mark.parametrize(
    "hostile", ['"} 1\nfake 9', "\\", '\\"', "line\nline", "# TYPE fake gauge", "\x1b[31m\u202e", "a" * 5000]
)
def test_host_text_stays_inside_its_label(report: FleetReport, hostile: str) -> None:
    text = render_prometheus(replace(report, verdicts=(failure(serial=hostile, scope=f"hca={hostile}"),)))
    metrics = series(text)
    assert len(metrics["failures"]) == 1
    assert "fake" not in metrics
    note_length = len("… (5000 characters)")
    assert max(len(value) for value in metrics["failures"][0][0].values()) <= LABEL_LIMIT + note_length
    assert "\x1b" not in text
    assert subprocess.run(["promtool", "check", "metrics"], input=text, text=True, check=False).returncode == 0


def test_report_command_writes_verdicts_prom(tmp_path: Path) -> None:
    write_run(tmp_path / "r1", builders.plan("h1", "h2", "h3"))
    rackproof("report", tmp_path / "r1")
    assert nonzero(series((tmp_path / "r1" / "verdicts.prom").read_text())["decision"]) == [{"decision": "accepted"}]
