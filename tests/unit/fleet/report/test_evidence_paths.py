"""The page of a host names, for each cause, the record that has its reading or figure, and a command that measures it again."""

from __future__ import annotations

import json
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fleet.judge.criteria import read_packs
from fleet.planning.playbook_profiles import PLAYBOOKS
from fleet.records.load import load
from fleet.report.html.page import render_html
from fleet.report.measure_again import measure_again
from fleet.report.run_report import report_of
from fleet.report.tables.reasons import next_command, reasons
from fleet.simulate.fleet import Fleet, place_faults, write_run
from schemas.plans import LOCAL_RUN, Plan
from schemas.reports import FAIL, FleetReport
from schemas.stages import BENCHMARK, GANG, SOAK
from tests import ROOT

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


def test_page_of_each_host_names_the_record_with_the_value_of_a_cause_of_several_hosts(tmp_path: Path) -> None:
    run = tmp_path / "switch"
    fleet = Fleet(hosts=4, gpus=4, profile="smoke")
    plan = fleet.plan(run.name, "2026-11-01T04:00:00Z")
    write_run(run, fleet, place_faults(("slow_switch:r01-h01:1",), plan, fleet.seed), plan, jobs=1)
    report = report_of(load(run), read_packs([]), jobs=1)
    (cause,) = report.causes
    assert len(cause.hosts) == 4
    data = embedded(report)
    evidence = f"gangs/r01/{report.verdicts[cause.verdicts[0]].host}.json, stage gang"
    for page in data["pages"].values():
        (reason,) = page["reasons"]
        assert evidence in [data["texts"][number] for number in reason[2:]]


def test_page_names_all_records_of_a_host_in_a_gang(run: Path, report: FleetReport) -> None:
    data = embedded(report)
    for host, page in data["pages"].items():
        name = data["names"][int(host)]
        paths = [data["texts"][number] for number in page["records"]]
        assert paths == [f"hosts/{name}.json", f"gangs/r01/{name}.json"]
        assert all((run / path).exists() for path in paths)


def plan_of(profile: str, begun_by: str, *stages: str, **host: Any) -> Plan:
    plan = Fleet(hosts=2, gpus=4, profile="smoke").plan("r1", "2026-11-01T04:00:00Z")
    planned = tuple(replace(plan.stages[0], name=stage) for stage in stages or (BENCHMARK, GANG))
    hosts = (replace(plan.hosts[0], **{"gpu_model": "", **host}),)
    return replace(plan, profile=profile, begun_by=begun_by, stages=planned, hosts=hosts)


@pytest.mark.parametrize(
    ("plan", "playbook", "variables"),
    [
        (plan_of("smoke", "acceptance"), "acceptance", {"rackproof_profile": "smoke"}),
        (plan_of("smoke", ""), "acceptance", {"rackproof_profile": "smoke"}),
        (plan_of("soak", "", SOAK), "burnin", {"rackproof_soak_profile": "soak"}),
        (plan_of("soak", "burnin", SOAK), "burnin", {"rackproof_soak_profile": "soak"}),
        (plan_of("revalidate", "revalidate"), "revalidate", {"rackproof_revalidate_profile": "revalidate"}),
        (plan_of("mine", "acceptance"), "acceptance", {"rackproof_profile": "PATH/mine.yml"}),
        (plan_of("it's my soak", "burnin", SOAK), "burnin", {"rackproof_soak_profile": "PATH/it's my soak.yml"}),
    ],
)
def test_playbook_that_measures_again_gets_the_profile_of_the_run(
    plan: Plan, playbook: str, variables: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    """Ansible reads the variables as the shell passes them."""
    splitter = pytest.importorskip("ansible.parsing.splitter")
    *words, setting = shlex.split(measure_again(plan))
    assert words == ["ansible-playbook", "-i", "INVENTORY", f"playbooks/{playbook}.yml", "-e"]
    assert (json.loads(setting) if setting.startswith("{") else splitter.parse_kv(setting)) == variables


@pytest.mark.parametrize(
    ("host", "options"),
    [
        ({}, "--gpus 4"),
        ({"count_found": True}, "--devices 0,1,2,3"),
        ({"devices": (2, 3)}, "--gpus 2 --devices 2,3"),
        ({"gpu_model": "h200-sxm"}, "--gpus 4 --model h200-sxm"),
    ],
)
def test_run_without_ansible_is_measured_again_without_ansible(host: dict[str, Any], options: str) -> None:
    plan = plan_of("smoke", LOCAL_RUN, BENCHMARK, **host)
    assert measure_again(plan) == f"rackproof run --profile smoke {options}"
    plan = replace(plan, rehearsal=True, profile="my own", criteria=("my site.yml",))
    assert measure_again(plan) == "rackproof run --profile 'PATH/my own.yml' --criteria 'my site.yml'"


def test_next_command_of_a_run_without_ansible_runs_on_its_machine(report: FleetReport) -> None:
    command = measure_again(plan_of("smoke", LOCAL_RUN, BENCHMARK))
    commands = {next_command(item, "r1", command)[1] for item in reasons(report.verdicts, report.causes, {})}
    assert {text for text in commands if not text.startswith("rackproof rma ")} == {command, "rackproof doctor"}


def test_schema_has_each_playbook() -> None:
    values = json.loads((ROOT / "schemas/plan.schema.json").read_text())["properties"]["begun_by"]["enum"]
    assert values == [*PLAYBOOKS, LOCAL_RUN]
