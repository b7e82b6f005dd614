"""A host whose record has times outside the run is incomplete. The cause is the host's clock, not a GPU."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fleet.judge.criteria import read_packs
from fleet.judge.evidence import Evidence
from fleet.records.load import load, received_at
from fleet.report.judge_run import judge_run
from fleet.report.merge import merge
from schemas import documents
from schemas.plans import Plan
from schemas.records import to_json
from schemas.reports import ACCEPTED, INCOMPLETE, INCONCLUSIVE, PASS, FleetReport
from schemas.run_directory import RunDirectory, record_name
from schemas.times import epoch_seconds, utc_now
from tests import ROOT, builders
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


@pytest.mark.parametrize(
    ("plan_s", "record_s", "received"),
    [
        pytest.param(0, 600, 600, id="the clocks agree"),
        pytest.param(-3600, -3000, 600, id="the clock of the file server is an hour behind"),
        pytest.param(240, 840, 600, id="the clock of the file server is four minutes ahead"),
        pytest.param(-3601, -3001, None, id="more than an hour behind"),
        pytest.param(-PLANNED, -PLANNED, None, id="all files are of 1970"),
        pytest.param(-PLANNED, 600, None, id="the plan is of 1970"),
        pytest.param(-600, -600, None, id="all files have the same time, before the plan"),
        pytest.param(0, 0, None, id="all files have the same time, that of the plan"),
        pytest.param(86400, 86400, None, id="all files have the same time, a day later"),
        pytest.param(86400, 86401, None, id="copied a day later"),
        pytest.param(0, -1, None, id="the record is older than the plan"),
    ],
)
def test_time_of_a_record_is_known_only_from_files_with_plausible_times(
    plan_s: float, record_s: float, received: float | None
) -> None:
    """`plan_s` and `record_s` are the times of the two files, in seconds after the creation of the plan."""
    result = received_at(PLANNED, PLANNED + plan_s, PLANNED + record_s)
    assert result == (None if received is None else PLANNED + received)


def write_run(directory: Path, plan: Plan, ahead: timedelta) -> None:
    """Write a run that was planned now, and records that end `ahead` from now."""
    documents.write(RunDirectory(directory).plan, to_json(plan))
    time.sleep(0.1)  # the kernel updates the clock of file times only every 10 ms, or more rarely
    for host, evidence in HEALTHY.items():
        late = datetime.now(UTC) + ahead - datetime.fromisoformat(evidence.records[0].ended)
        documents.write(directory / record_name(host), to_json(shifted_by(evidence.records[0], late)))


def clock_findings(directory: Path) -> set[str]:
    run = load(directory)
    fleet = merge(run.plan, run.evidence, read_packs([]))
    return {item.host for item in fleet.verdicts if item.name == "record.clock"}


def test_clock_of_a_host_is_ahead_if_its_record_ends_after_the_record_arrived(tmp_path: Path) -> None:
    plan = replace(PLAN, created=utc_now())
    write_run(tmp_path / "run", plan, timedelta(hours=1))
    assert clock_findings(tmp_path / "run") == {"h1", "h2"}
    write_run(tmp_path / "run", plan, timedelta(minutes=4))
    assert clock_findings(tmp_path / "run") == set()
    assert all(abs(load(tmp_path / "run").evidence[host].received[""] - time.time()) < 60 for host in HEALTHY)
    # A simulation invents the times in its records, so the times of its files are not used.
    documents.write(tmp_path / "run" / "plan.json", to_json(replace(plan, simulated=True)))
    assert load(tmp_path / "run").evidence["h1"].received == {}


KEPT = ("h200x1", "h200x1-scaling", "h200x1-standard-twice", "h200x2-burnin", "h200x2-two-hosts")
"""Runs in docs/measurements: of one host, a study, of two hosts without a gang, with a soak, and of two hosts in a gang."""


def set_file_times(directory: Path, times: Callable[[], float]) -> None:
    for path in directory.rglob("*"):
        os.utime(path, (moment := times(), moment))


@pytest.mark.parametrize("name", KEPT)
@settings(max_examples=3, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_evidence_of_a_copied_run_does_not_depend_on_its_file_times(
    tmp_path: Path, name: str, data: st.DataObject
) -> None:
    kept = ROOT / "docs/measurements" / name
    run = load(kept, study=True)
    copy = tmp_path / name
    if not copy.exists():
        shutil.copytree(kept, copy)
    ended = max(epoch_seconds(record.ended) for host in run.evidence.values() for record in host.records)
    planned = epoch_seconds(run.plan.created)
    moments = st.one_of(st.just(0.0), st.floats(0, ended), st.floats(planned - 7200, ended))
    if data.draw(st.booleans(), label="uniform"):
        moment = data.draw(moments)
        set_file_times(copy, lambda: moment)
    else:
        set_file_times(copy, lambda: data.draw(moments))
    copied = load(copy, study=True)
    for host in run.evidence:
        assert copied.evidence[host] == run.evidence[host]


def test_decision_on_an_archived_run_is_that_on_the_run(tmp_path: Path) -> None:
    kept = ROOT / "docs/measurements/h200x2-burnin"
    archive = ["tar", "-C", str(kept), "--mtime=@0", "-cf", str(tmp_path / "run.tar"), "."]
    subprocess.run(archive, check=True)
    (tmp_path / "run").mkdir()
    subprocess.run(["tar", "-C", str(tmp_path / "run"), "-xf", str(tmp_path / "run.tar")], check=True)
    assert (tmp_path / "run" / "plan.json").stat().st_mtime == 0
    one, other = (judge_run(directory, [], [])[1] for directory in (kept, tmp_path / "run"))
    assert (one.decision, one.verdicts) == (other.decision, other.verdicts)
