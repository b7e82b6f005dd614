"""Test waivers: a waived failure is still listed as a failure; an expired waiver does not apply.

Missing data are waived only with `absent: true`.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fleet.inventory.waivers_file import read_waivers
from fleet.judge.waivers import WaiverMatcher, covers, summary
from schemas import documents
from schemas.errors import UsageError
from schemas.reports import FAIL, INCONCLUSIVE, PASS, Verdict
from schemas.waivers import Waiver
from tests import builders
from tests.accepted import call, report_of, run_directory, slowed
from tests.unit.fleet.judge.small_fleet import FAILED, waiver

WAIVER = Waiver(
    criterion="hbm-copy", host="h1", who="Ada Example", why="known slow, replaced in May", until="2026-12-31"
)
SLOW = slowed("memory.bandwidth", 0.5, op="copy")


def failed_verdict(**over: object) -> Verdict:
    fields = {"host": "h1", "scope": "gpu=0", "serial": "S1", "name": "memory.bandwidth", "verdict": FAIL}
    return Verdict(**{**fields, "criterion": "hbm-copy", "reason": "found 1, wanted 2", "action": "rma", **over})  # type: ignore[arg-type]


def write_waivers(path: Path, *waivers: dict[str, object]) -> Path:
    """Write a waivers file and return its path. A field that a waiver does not state has a default value."""
    common = {
        "criterion": "hbm-copy",
        "who": "Ada Example",
        "why": "known slow, replaced in May",
        "until": "2026-12-31",
    }
    lines = ["schema: rackproof.waivers/1", "waivers:"]
    for fields in waivers:
        shown = {
            key: str(value).lower() if isinstance(value, bool) else f'"{value}"'
            for key, value in {**common, **fields}.items()
        }
        lines.append(f"  - {{{', '.join(f'{key}: {value}' for key, value in shown.items())}}}")
    path.write_text("\n".join(lines) + "\n")
    return path


@pytest.mark.parametrize(
    ("over", "verdict", "expected"),
    [
        ({}, FAILED, True),
        ({"criterion": "d"}, FAILED, False),
        ({"host": "h2"}, FAILED, False),
        ({"host": "", "serial": "s1"}, FAILED, True),
        ({"host": "", "serial": "s1"}, replace(FAILED, host="h9", scope="gpu=7"), True),
        ({"serial": "s2"}, FAILED, False),
        ({"name": "a.b"}, FAILED, True),
        ({"name": "a"}, FAILED, False),
        ({"scope": "gpu=1"}, FAILED, True),
        ({"scope": "gpu=1"}, replace(FAILED, scope="gpu=1,link=2"), True),
        ({"scope": "gpu=1"}, replace(FAILED, scope="gpu=11"), False),
        ({"absent": True}, FAILED, False),
        ({}, replace(FAILED, verdict=INCONCLUSIVE), False),
        ({"absent": True}, replace(FAILED, verdict=INCONCLUSIVE), True),
        ({"absent": True}, replace(FAILED, verdict=INCONCLUSIVE, name="record"), False),
        ({"absent": True}, replace(FAILED, verdict=INCONCLUSIVE, name="gpu"), False),
        ({"absent": True}, replace(FAILED, verdict=INCONCLUSIVE, name="host.events"), False),
        ({"absent": True}, replace(FAILED, verdict=INCONCLUSIVE, name="stage.gang"), False),
        ({}, replace(FAILED, name="record"), True),
    ],
)
def test_waiver_covers_matching_verdicts(over: Any, verdict: Verdict, expected: bool) -> None:
    assert covers(waiver(**over), verdict, verdict.serial) is expected


def test_waiver_expires_after_its_last_day() -> None:
    for day, waived in (("2026-11-20", True), ("2026-11-21T23:59:59Z", True), ("2026-11-22T00:00:00Z", False)):
        verdict = WaiverMatcher((waiver(),), day, {}).apply(replace(FAILED, detail="x"))
        assert (verdict.waiver is not None) is waived
        assert verdict.verdict == FAIL
        expired = "its waiver by me expired on 2026-11-21 (known)"
        assert verdict.reason == ("bad" if waived else f"bad; {expired}")
        assert verdict.detail == ("x" if waived else f"x; {expired}")
    by_serial = WaiverMatcher((waiver(host="", serial="s1"),), "2026-11-21", {})
    assert by_serial.apply(FAILED).waiver
    assert by_serial.apply(replace(FAILED, serial="")).waiver is None
    assert WaiverMatcher((waiver(),), "2026-11-21", {}).apply(replace(FAILED, verdict=PASS)).waiver is None
    old_and_new = (waiver(until="2026-11-01"), waiver(until="2026-12-01"))
    assert WaiverMatcher(old_and_new, "2026-11-21", {}).apply(FAILED).waiver == old_and_new[1]
    assert (
        WaiverMatcher(old_and_new, "2026-11-21", {}).apply(replace(FAILED, waiver=old_and_new[0])).waiver
        == old_and_new[0]
    )


def test_report_states_the_result_of_each_waiver() -> None:
    used, idle, old, absent = waiver(), waiver(host="h2"), waiver(host="h3", until="2026-11-20"), waiver(absent=True)
    verdicts = [replace(FAILED, waiver=used), replace(FAILED, waiver=used), FAILED, replace(FAILED, waiver=absent)]
    misspelt = waiver(host="gpu1")
    waivers = (used, idle, misspelt, old, absent)
    lines = summary(waivers, verdicts, "2026-11-21T00:00:00Z", ["h1", "h2", "h3", "gpu-1"])
    assert [str(line) for line in lines] == [
        "WAIVED: c on h1: 2 failed verdicts, accepted by me until 2026-11-21: known",
        "Waiver not used: c on h2 (by me until 2026-11-21)",
        "Waiver not used: c on gpu1 (by me until 2026-11-21): no host gpu1 in this run (did you mean gpu-1?)",
        "Waiver EXPIRED on 2026-11-20: c on h3 (by me)",
        "WAIVED: c on h1: 1 inconclusive verdict, accepted by me until 2026-11-21: known",
    ]


def test_waived_verdict_is_still_a_failure_and_has_the_waiver() -> None:
    verdict = WaiverMatcher([WAIVER], builders.WHEN, {}).apply(failed_verdict())
    assert (verdict.verdict, verdict.reason, verdict.waiver) == (FAIL, "found 1, wanted 2", WAIVER)
    assert not verdict.blocks_acceptance
    assert failed_verdict().blocks_acceptance


def test_run_with_a_waived_failure_passes_with_waivers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = run_directory(tmp_path / "r1", change=SLOW)
    assert call("report", run) == 1
    plain = {item["criterion"] for item in report_of(run)["verdicts"] if item["verdict"] == FAIL}
    lines = [{"criterion": criterion, "host": "h1", "scope": "gpu=0"} for criterion in sorted(plain)]
    capsys.readouterr()
    assert call("report", run, "--waivers", write_waivers(tmp_path / "w.yml", *lines)) == 0
    report, shown = report_of(run), " ".join(capsys.readouterr().out.split())
    assert (report["decision"], report["acceptance"]["status"]) == ("accepted", "PASS WITH WAIVERS")
    assert "FINAL ACCEPTANCE: PASS WITH WAIVERS" in shown
    assert "WAIVED hbm-copy on h1 gpu=0: 1 failed verdict, accepted by Ada Example until 2026-12-31" in shown
    assert "Memory bandwidth FAIL (waived)" in shown
    assert "1/4 GPUs" in shown
    waived = [item for item in report["verdicts"] if "waiver" in item]
    assert {(item["verdict"], item["criterion"]) for item in waived} == {(FAIL, criterion) for criterion in plain}
    for view in ("report.md", "report.html"):
        assert "Ada Example" in (run / view).read_text()
        assert "PASS WITH WAIVERS" in (run / view).read_text()


def test_expired_waiver_does_not_prevent_rejection(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = run_directory(tmp_path / "r1", change=SLOW)
    waivers = write_waivers(tmp_path / "w.yml", {"host": "h1", "until": "2026-11-20"})
    assert call("report", run, "--waivers", waivers) == 1
    shown = " ".join(capsys.readouterr().out.split())
    assert "its waiver by Ada Example expired on 2026-11-20" in shown
    assert "Waiver EXPIRED on 2026-11-20 hbm-copy on h1 (by Ada Example)" in shown


def test_unused_waiver_is_reported_and_changes_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = run_directory(tmp_path / "r1")
    assert call("report", run, "--waivers", write_waivers(tmp_path / "w.yml", {"host": "h2"})) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "FINAL ACCEPTANCE: PASS Hosts" in shown
    assert "Waiver not used hbm-copy on h2 (by Ada Example until 2026-12-31)" in shown


@pytest.mark.parametrize("verb", ["report", "judge"])
def test_waiver_of_a_misspelt_host_is_reported_with_the_nearest_host(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], verb: str
) -> None:
    run = run_directory(tmp_path / "r1", change=SLOW)
    assert call("report", run) == 1
    capsys.readouterr()
    waivers = write_waivers(tmp_path / "w.yml", {"host": "h11"})
    assert call(verb, run, "--waivers", waivers, *(["--write"] if verb == "judge" else [])) == 1
    (line,) = [item for item in report_of(run)["acceptance"]["lines"] if item["title"] == "Waiver not used"]
    assert line["text"].endswith(": no host h11 in this run (did you mean h1?)")
    if verb == "report":
        shown = " ".join(capsys.readouterr().out.split())
        assert "no host h11 in this run (did you mean h1?)" in shown


def test_missing_figure_is_waived_by_host_and_name(tmp_path: Path) -> None:
    def without(record: builders.Record) -> builders.Record:
        kept = tuple(
            observation
            for observation in record.observations
            if observation.name != "stress.power" or record.host == "h2"
        )
        return replace(record, observations=kept)

    run = run_directory(tmp_path / "r1", change=without)
    assert call("report", run) == 2
    without_name = write_waivers(tmp_path / "vague.yml", {"criterion": "stress-power", "host": "h1"})
    assert call("report", run, "--waivers", without_name) == 2
    named = {"criterion": "plan", "host": "h1", "name": "stress.power", "absent": True}
    assert call("report", run, "--waivers", write_waivers(tmp_path / "named.yml", named)) == 0
    assert report_of(run)["acceptance"]["status"] == "PASS WITH WAIVERS"


def test_host_without_record_cannot_be_waived(tmp_path: Path) -> None:
    run = run_directory(tmp_path / "r1")
    (run / "hosts" / "h2.json").unlink()
    waivers = write_waivers(tmp_path / "w.yml", {"criterion": "plan", "host": "h2", "name": "record", "absent": True})
    assert call("report", run, "--waivers", waivers) == 64
    assert call("report", run) == 2


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ({}, "waivers.0"),  # a waiver needs a host or serial
        ({"host": "h1", "until": "2026-02-30"}, "invalid date '2026-02-30' in `until`"),
        ({"host": "h1", "why": "short"}, "waivers.0.why"),
        ({"host": "h1", "hots": "h1"}, "unknown hots (did you mean host?)"),
        ({"host": "h1", "absent": True}, "'name' is a required property"),
        ({"host": "h1", "criterion": "plan"}, "write `absent: true` with host and name"),
        ({"host": "h1", "name": "stage.gang", "absent": True}, "cannot be waived"),
    ],
)
def test_invalid_waiver_is_refused(line: dict[str, object], message: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError) as refused:
        read_waivers(str(write_waivers(tmp_path / "w.yml", line)), {"h1"})
    assert message in str(refused.value)


def test_last_day_of_a_waiver_needs_no_quotes(tmp_path: Path) -> None:
    path = write_waivers(tmp_path / "w.yml", {"host": "h1"})
    path.write_text(path.read_text().replace('"2026-12-31"', "2026-12-31"))
    assert [waiver.until for waiver in read_waivers(str(path), {"h1"})] == ["2026-12-31"]


def test_waivers_are_stored_in_the_plan(tmp_path: Path) -> None:
    path = write_waivers(tmp_path / "w.yml", {"host": "h1"}, {"host": "elsewhere"}, {"serial": "S9"})
    waivers = read_waivers(str(path), {"h1", "h2"})
    assert [waiver.host or waiver.serial for waiver in waivers] == ["h1", "S9"]
    # The figure is below the floor of the pack, but within the limit relative to the median of the fleet.
    slow = slowed("memory.bandwidth", 0.974, op="copy")
    run = run_directory(tmp_path / "r1", change=slow, waivers=waivers)
    path.unlink()
    call("report", run)
    states = {item["criterion"]: "waiver" in item for item in report_of(run)["verdicts"] if item["verdict"] == FAIL}
    assert states["hbm-copy"] is True


def test_plan_records_the_waivers_of_the_file_that_the_inventory_names(tmp_path: Path) -> None:
    path = write_waivers(tmp_path / "w.yml", {"host": "h2"}, {"host": "elsewhere"})
    hosts = builders.inventory(
        "h1", "h2", rackproof_gpu_count=2, rackproof_gang="none", rackproof_profile="smoke", rackproof_waivers=str(path)
    )
    listing = tmp_path / "inventory.json"
    listing.write_text(json.dumps({"gpu_hosts": {"hosts": list(hosts)}, "_meta": {"hostvars": hosts}}))
    run = tmp_path / "runs" / "r1"
    assert call("plan", "-i", listing, "--run-dir", run) == 0
    (planned,) = documents.read(run / "plan.json", "plan")["waivers"]
    assert (planned["host"], planned["origin"]) == ("h2", "w.yml waiver 1")
    write_waivers(path, {"host": "h1"})  # a run cannot be resumed with other waivers
    assert call("plan", "-i", listing, "--run-dir", run) == 64
