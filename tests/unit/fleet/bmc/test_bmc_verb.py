"""Test `rackproof bmc`, which reads the BMCs of a run's hosts.

The tests check the stored readings and the verdicts in the report. They also check that no credentials are stored. The BMCs are
simulated, by sushy-tools or by the server in `tests.fakes.bmc`.
"""

from __future__ import annotations

import io
import json
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from fleet.bmc.readings import unreadable
from fleet.bmc.record import add_snapshot, is_readable, marks, read_record
from schemas import documents
from schemas.plans import Plan, plan_from_json
from schemas.records import Record, Snapshot, to_json
from schemas.times import utc_now
from tests import ROOT, accepted
from tests.fakes import bmc
from tests.fakes.bmc import SEL

CANARIES = (bmc.USER, bmc.PASSWORD)
"""Credentials. They must not appear in files of the run, in outputs, or in the arguments or environment of a process."""


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Return the directory of a run of one healthy host. According to the plan, this host has a BMC."""
    directory = accepted.run_directory(tmp_path / "r1", hosts=("h1",), change=began_a_minute_ago)
    plan = plan_of(directory)
    changed = replace(plan, created=utc_now(), hosts=tuple(replace(host, bmc=True) for host in plan.hosts))
    documents.write(directory / "plan.json", to_json(changed))
    return directory


def began_a_minute_ago(record: Record) -> Record:
    """Return the record with the times of a run that began a minute ago.

    The tests read the BMC now. The judge does not accept a first reading long after the launches began.
    """
    began = time.time() - 60
    at = [
        time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(began + 2 * step)) for step in range(len(record.snapshots) + 2)
    ]
    snapshots = tuple(replace(item, at=at[step]) for step, item in enumerate(record.snapshots))
    launches = tuple(replace(item, began=at[1]) for item in record.launches)
    return replace(record, began=at[0], ended=at[-1], snapshots=snapshots, launches=launches)


def plan_of(directory: Path) -> Plan:
    return plan_from_json(json.loads((directory / "plan.json").read_text()))


@contextmanager
def sushy(directory: Path, certificate: Path) -> Iterator[int]:
    """Serve the Redfish resources in `directory` (one JSON file each) over HTTPS with sushy-tools; yield the TCP port."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    program = Path(sys.executable).with_name("sushy-static")
    process = subprocess.Popen(
        [program, "--mockup-files", directory, "--interface", "127.0.0.1", "--port", str(port),
         "--ssl-certificate", certificate, "--ssl-key", certificate.with_suffix(".key")],
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    try:
        for _ in range(200):
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", port)) == 0:
                    break
            time.sleep(0.05)
        yield port
    finally:
        process.kill()
        process.wait()


def bmc_variables(port: int, certificate: Path) -> str:
    """Return the inventory variables of the BMC of h1, as the JSON that `rackproof bmc` reads from its standard input."""
    fields = {"address": f"127.0.0.1:{port}", "user": bmc.USER, "password": bmc.PASSWORD, "ca": str(certificate)}
    return json.dumps({"h1": {f"rackproof_bmc_{name}": value for name, value in fields.items()}})


def test_lost_supply_and_new_event_are_reported_and_no_credential_is_stored(tmp_path: Path, run: Path) -> None:
    certificate, resources = bmc.make_certificate(tmp_path), bmc.old_schema()
    with sushy(bmc.write_mockup(resources, tmp_path / "mockup"), certificate) as port:
        text = bmc_variables(port, certificate)
        command = [sys.executable, ROOT / "rackproof", "bmc", run, "--stage", "preflight", "--phase", "before"]
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        proc = Path(f"/proc/{process.pid}")
        visible = (proc / "cmdline").read_bytes() + (proc / "environ").read_bytes()
        output, _ = process.communicate(text.encode(), timeout=60)
        assert output == b"1 of 1 BMCs read\n"
        resources[SEL]["Members"].append(bmc.entry(2, "Power Supply 2 AC lost", "Critical"))
        resources[SEL]["Members@odata.count"] = 2
        bmc.write_mockup(bmc.lost_supply(resources), tmp_path / "mockup")
        done = accepted.rackproof("bmc", run, "--stage", "benchmark", "--phase", "after", stdin=text)
        assert done.stdout == "1 of 1 BMCs read\n"
    assert accepted.call("report", run) == 1
    titles = [cause["title"] for cause in accepted.report_of(run)["causes"]]
    assert titles == [
        "power supply Power_Supply_Bay_2 of h1 has the health Critical: it has no input (0 V)",
        "event log 1.SEL of h1 has a new critical entry",
    ]
    written = b"".join(path.read_bytes() for path in run.rglob("*") if path.is_file())
    assert b"Power Supply 2 AC lost" in written
    assert [canary for canary in CANARIES if canary.encode() in written + output + visible] == []


def test_refused_credentials_and_missing_readings_are_inconclusive(tmp_path: Path, run: Path) -> None:
    certificate = bmc.make_certificate(tmp_path)
    with bmc.serve(bmc.Service(bmc.old_schema()), certificate) as served:
        text = bmc_variables(served.port, certificate).replace(bmc.PASSWORD, "wrong-canary")
        done = accepted.rackproof("bmc", run, "--stage", "preflight", "--phase", "before", stdin=text)
    assert done.stderr == "rackproof: BMC of h1: credentials refused (HTTP 401)\n"
    assert "canary" not in (run / "bmcs" / "h1.json").read_text() + done.stdout + done.stderr
    assert accepted.call("report", run) == 2
    reasons = {item["reason"] for item in accepted.report_of(run)["verdicts"]}
    assert reasons >= {"error: credentials refused (HTTP 401)", "the BMC was not read after benchmark"}


def test_invalid_input_is_refused_and_not_printed(run: Path) -> None:
    for text in ("canary", "[]", '{"h1": {"rackproof_bmc_password": 1234, "rackproof_bmc_user": "canary"}}'):
        done = accepted.rackproof("bmc", run, "--stage", "preflight", "--phase", "before", stdin=text)
        assert done.returncode == 64
        assert "canary" not in done.stderr
        assert "1234" not in done.stderr


def snapshot(stage: str, phase: str, *, readable: bool) -> Snapshot:
    """Return a snapshot of a BMC; if it is not `readable`, the BMC did not answer."""
    metric = unreadable("no answer")[0]
    metrics = (replace(metric, values={"host": True}, absent={}),) if readable else (metric,)
    return Snapshot(stage=stage, phase=phase, at=utc_now(), duration_s=1.0, metrics=metrics)


def test_successful_reading_replaces_only_failed_readings_of_the_same_stage_and_phase(run: Path) -> None:
    """The first reading in the stage `preflight` fails. The second succeeds and replaces it.

    Then the run is resumed. The readings of the resumed run are added, because the earlier ones succeeded.
    """
    plan = plan_of(run)
    before_resume = [("preflight", "before", False), ("preflight", "before", True), ("benchmark", "after", True)]
    for stage, phase, readable in [*before_resume, ("preflight", "before", True), ("benchmark", "after", False)]:
        record = add_snapshot(run, plan, "h1", snapshot(stage, phase, readable=readable))
    assert [(item.stage, is_readable(item)) for item in record.snapshots] == [
        ("preflight", True), ("benchmark", True), ("preflight", True), ("benchmark", False),
    ]  # fmt: skip
    assert read_record(run, plan, "h1") == record
    assert read_record(run, replace(plan, nonce="f" * 32), "h1") is None
    assert marks(record) == {}  # the BMC was read, but has no event log
    assert marks(None) is None  # the BMC has never been read


def test_invalid_and_unplanned_records_of_bmcs_are_listed_as_quarantined(run: Path) -> None:
    path = run / "bmcs" / "h1.json"
    path.parent.mkdir()
    path.write_text("{")
    path.with_name("h9.json").symlink_to(path)  # the plan has no host h9
    assert accepted.call("report", run) == 2
    report = accepted.report_of(run)
    assert {item["path"] for item in report["quarantined"]} == {"bmcs/h1.json", "bmcs/h9.json"}
    assert any(item["reason"].startswith("rejected: bmcs/h1.json") for item in report["verdicts"])


def test_damaged_record_of_a_bmc_is_reported_and_not_replaced(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = run / "bmcs" / "h1.json"
    path.parent.mkdir()
    path.write_text("{")
    monkeypatch.setattr("sys.stdin", io.StringIO('{"h1": {"rackproof_bmc_address": "127.0.0.1:1"}}'))
    accepted.call("bmc", run, "--stage=benchmark", "--phase=after")
    assert path.read_text() == "{"
    assert "h1: its record is damaged" in capsys.readouterr().err
