"""A host whose record has times outside the run is incomplete. The cause is the host's clock, not a GPU."""

from __future__ import annotations

import os
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest

from fleet.judge.criteria import read_packs
from fleet.judge.evidence import Evidence
from fleet.records.load import load
from fleet.report.merge import merge
from schemas import documents
from schemas.records import to_json
from schemas.reports import ACCEPTED, INCOMPLETE, INCONCLUSIVE, PASS, FleetReport
from schemas.run_directory import RunDirectory, record_name
from schemas.times import epoch_seconds
from tests import builders
from tests.unit.fleet.judge.test_consistency import shifted_by

PLAN = builders.plan("h1", "h2", rackproof_gang="none")
HEALTHY = builders.evidence(PLAN)
PLANNED = epoch_seconds(PLAN.created)
RECEIVED = epoch_seconds(builders.WHEN) + 60


def report(evidence: dict[str, Evidence]) -> FleetReport:
    return merge(PLAN, HEALTHY | evidence, read_packs([]))


def with_clock(hours: float) -> Evidence:
    """Return the evidence of h2 with a clock that is ahead by `hours`; negative `hours`: behind."""
    records = tuple(shifted_by(record, timedelta(hours=hours)) for record in HEALTHY["h2"].records)
    return replace(HEALTHY["h2"], records=records, received={"": RECEIVED})


@pytest.mark.parametrize(
    ("hours", "reason"),
    [
        (
            3,
            "h after the control node received it: the clock of the host is ahead of that of the control node, or "
            "the record was changed",
        ),
        (-3, "3.0 h before the run was planned at 2026-11-21T04:00:00Z: it is of an earlier run, or the clock"),
    ],
)
def test_host_with_a_wrong_clock_is_incomplete_and_no_gpu_is_at_fault(hours: float, reason: str) -> None:
    fleet = report({"h2": with_clock(hours)})
    assert [(host.name, host.decision) for host in fleet.hosts] == [("h1", ACCEPTED), ("h2", INCOMPLETE)]
    (verdict,) = [item for item in fleet.verdicts if item.verdict != PASS]
    assert (verdict.name, verdict.scope, verdict.verdict) == ("record.clock", "host", INCONCLUSIVE)
    assert reason in verdict.reason
    assert [(cause.problem, cause.part) for cause in fleet.causes] == [("clock-skew", "host")]


@pytest.mark.parametrize("minutes", [-4, 4])
def test_clock_may_differ_by_less_than_five_minutes(minutes: int) -> None:
    assert [host.decision for host in report({"h2": with_clock(minutes / 60)}).hosts] == [ACCEPTED, ACCEPTED]


def test_file_time_before_the_plan_is_not_used() -> None:
    """Such a time does not show when the record was received: an archive may give every file the same old time."""
    old = replace(with_clock(0), received={"": RECEIVED - 1e6})
    assert [host.decision for host in report({"h2": old}).hosts] == [ACCEPTED, ACCEPTED]


def test_time_at_which_a_record_was_received_is_that_of_its_file(tmp_path: Path) -> None:
    paths = RunDirectory(tmp_path)
    documents.write(paths.plan, to_json(PLAN))
    for host, evidence in HEALTHY.items():
        documents.write(tmp_path / record_name(host), to_json(evidence.records[0]))
        os.utime(tmp_path / record_name(host), (RECEIVED, RECEIVED))
    run = load(tmp_path)
    assert {host: run.evidence[host].received for host in HEALTHY} == {host: {"": RECEIVED} for host in HEALTHY}
    # The clock of the file server is an hour behind. `load` derives this from the time of the plan's file, and corrects the times
    # of the records' files.
    os.utime(paths.plan, (PLANNED - 3600, PLANNED - 3600))
    for host in HEALTHY:
        os.utime(tmp_path / record_name(host), (RECEIVED - 3600, RECEIVED - 3600))
    run = load(tmp_path)
    assert {host: run.evidence[host].received for host in HEALTHY} == {host: {"": RECEIVED} for host in HEALTHY}
    # A simulation invents the times in its records, so the times of its files are not used.
    documents.write(paths.plan, to_json(replace(PLAN, simulated=True)))
    assert load(tmp_path).evidence["h1"].received == {}
