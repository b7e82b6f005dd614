"""The page of a host names, for each cause, the record that has its reading or figure, and a command that measures it again."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fleet.judge.criteria import read_packs
from fleet.records.load import load
from fleet.report.html.page import render_html
from fleet.report.run_report import report_of
from fleet.simulate.fleet import Fleet, place_faults, write_run
from schemas.reports import FAIL, FleetReport
from schemas.stages import SOAK
from schemas.timeline import Soak

PLAYBOOK = "ansible-playbook -i INVENTORY playbooks/acceptance.yml -e rackproof_profile=smoke"
FAULTS = {
    "slow_hbm:r01-h01:0": (
        "hosts/r01-h01.json, stage benchmark",
        "rackproof rma runs/evidence --serial SIM00000000 --zip",
    ),
    "ecc:r01-h02:1": (
        "gangs/r01/r01-h02.json, stage gang",
        "ssh r01-h02 sudo /opt/rackproof/bin/rackproof doctor",
    ),
    "slow_nic:r01-h03:2": ("gangs/r01/r01-h03.json, stage gang", PLAYBOOK),  # alone, the host would have no partners
    "bmc_psu_lost:r01-h04": ("bmcs/r01-h04.json, stage gang", f"{PLAYBOOK} --limit r01-h04"),
}
"""Fault -> evidence of its cause, and the next command."""


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("runs") / "evidence"
    fleet = Fleet(hosts=4, gpus=4, profile="smoke", bmcs=True)
    plan = fleet.plan(run.name, "2026-11-01T04:00:00Z")
    write_run(run, fleet, place_faults(tuple(FAULTS), plan, fleet.seed), plan, jobs=1)
    return run


@pytest.fixture(scope="module")
def report(run: Path) -> FleetReport:
    return report_of(load(run), read_packs([]), jobs=1)


def embedded(report: FleetReport) -> dict[str, Any]:
    text = render_html(report).partition('<script type="application/json" id="data">')[2]
    data: dict[str, Any] = json.loads(text.partition("</script>")[0])
    return data


def test_cause_has_the_record_with_its_reading_and_the_command_that_measures_it(run: Path, report: FleetReport) -> None:
    data = embedded(report)
    texts_of_reason = {
        data["names"][int(host)]: [[data["texts"][number] for number in reason[2:]] for reason in page["reasons"]]
        for host, page in data["pages"].items()
    }
    for fault, (evidence, command) in FAULTS.items():
        host = fault.split(":")[1]
        (cause,) = (item for item in report.causes if item.host == host and item.verdict == FAIL)
        (texts,) = (texts for texts in texts_of_reason[host] if texts[0] == cause.title)
        assert evidence in texts
        assert command in texts
        assert report.verdicts[cause.verdicts[0]].name in (run / evidence.partition(",")[0]).read_text()


def test_page_names_all_records_of_a_host_in_a_gang(run: Path, report: FleetReport) -> None:
    data = embedded(report)
    for host, page in data["pages"].items():
        name = data["names"][int(host)]
        paths = [data["texts"][number] for number in page["records"]]
        assert paths == [f"hosts/{name}.json", f"gangs/r01/{name}.json"]
        assert all((run / path).exists() for path in paths)


@pytest.mark.parametrize("evidence", ["a soak", "no record"])
def test_next_command_of_a_burn_in_has_its_playbook_and_profile(evidence: str, report: FleetReport) -> None:
    """If no host has a record with a soak, the stage of the verdicts shows that the run had one."""
    if evidence == "a soak":
        soak = Soak(began=report.began, planned_s=60.0, soaked_s=60.0, finished=1)
        burn_in = replace(report, hosts=tuple(replace(host, soak=soak) for host in report.hosts))
    else:
        burn_in = replace(report, verdicts=tuple(replace(verdict, stage=SOAK) for verdict in report.verdicts))
    texts = embedded(replace(burn_in, profile="my soak.yml"))["texts"]
    commands = [text for text in texts if text.startswith("ansible-playbook")]
    assert commands
    assert all("playbooks/burnin.yml -e rackproof_profile='my soak.yml'" in command for command in commands)
