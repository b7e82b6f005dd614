"""A truncated record makes its host incomplete in every output, in fleets of any size."""

from __future__ import annotations

import csv
import importlib.util
import json
import re
import shutil
from collections import Counter
from itertools import chain, repeat
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from fleet.report.tables.hosts import gpu_states
from fleet.simulate.fleet import Fleet, RunWriter, place_faults
from fleet.simulate.records import JUDGED
from schemas import documents
from schemas.records import to_json
from schemas.reports import FAIL, INCONCLUSIVE, PASS, Coverage, HostReport, Verdict
from tests import builders
from tests.accepted import rackproof, report_of

BROKEN = 2
"""Position in the plan of the host whose record is truncated."""
RACK = 4
"""Number of hosts in a rack."""


def write_run(directory: Path, hosts: int, measured: int) -> str:
    """Write a run with records of the first `measured` hosts. Return the name of the host whose record is truncated."""
    fleet = Fleet(hosts=hosts, racks=-(-hosts // RACK), gpus=2, profile="smoke", readings=JUDGED)
    plan = fleet.plan(directory.name, "2026-11-21T04:00:00Z")
    broken = plan.hosts[BROKEN].name
    faults = place_faults([f"truncated_record:{broken}"], plan, fleet.seed)
    documents.write(directory / "plan.json", to_json(plan))
    writer = RunWriter(directory=directory, fleet=fleet, plan=plan, faults={broken: faults})
    for gang, names in writer.batches():
        if int(writer.numbers[names[0]]) < measured:
            writer.write(gang, names)
    return broken


@pytest.mark.parametrize(("hosts", "measured"), [(3, 3), (260, 8)])
def test_host_with_a_truncated_record_is_incomplete_in_every_output(hosts: int, measured: int, tmp_path: Path) -> None:
    run = tmp_path / "run"
    broken = write_run(run, hosts, measured)
    arguments = ["--all-observations", *(["--parquet"] if importlib.util.find_spec("pyarrow") else [])]
    done = rackproof("report", run, *arguments)
    assert done.returncode == 2
    for text in (done.stdout, (run / "report.md").read_text()):
        assert re.search(
            rf"INCOMPLETE(: | +Measure again +){broken} left no usable record: "
            rf"rejected: hosts/{broken}.json: not JSON at offset",
            text,
        )
        assert "SIMULATED INCOMPLETE" in text
    report = report_of(run)
    decisions = {host["name"]: host["decision"] for host in report["hosts"]}
    assert decisions.pop(broken) == "incomplete"
    counts = Counter(decisions.values())
    assert (counts["accepted"], counts["incomplete"]) == (measured - 1, hosts - measured)
    assert report["decision"] == "incomplete"
    assert {item["verdict"] for item in report["verdicts"] if item["host"] == broken} == {"inconclusive"}
    check_page(run, broken, decisions)
    check_markdown_metrics_and_junit(run, broken)
    check_tables(run, broken)
    notification = json.loads(rackproof("notice", run).stdout)
    assert notification["state"] == "incomplete"
    assert f"{broken} left no usable record: rejected" in notification["text"]
    page = rackproof("report", run, "--host", broken, "--json")
    assert (page.returncode, json.loads(page.stdout)["hosts"][0]["decision"]) == (2, "incomplete")
    shutil.rmtree(run)


def embedded(run: Path) -> dict[str, Any]:
    """Return the data in the page, after run-length decoding of its compressed columns."""
    text = (run / "report.html").read_text().partition('<script type="application/json" id="data">')[2]
    data: dict[str, Any] = json.loads(text.partition("</script>")[0])
    for column in ("gpus", "measured", "rack"):
        data[column] = list(chain.from_iterable(repeat(value, count) for value, count in data[column]))
    return data


def check_page(run: Path, broken: str, decisions: dict[str, str]) -> None:
    data = embedded(run)
    number = data["names"].index(broken)
    assert data["decisions"][int(data["decision"][number])] == "simulation incomplete"
    assert data["gpus"][number] == "ii"
    assert data["counts"][str(number)][1] >= 1
    page = data["pages"][str(number)]
    assert [gpu[0] for gpu in page["gpus"]] == ["i", "i"]
    gpus_of_accepted = [
        data["gpus"][data["names"].index(host)] for host, decision in decisions.items() if decision == "accepted"
    ]
    assert set(gpus_of_accepted) <= {"pp"}
    assert gpus_of_accepted


def check_markdown_metrics_and_junit(run: Path, broken: str) -> None:
    rack = broken.partition("-")[0]
    assert f"| `{broken}` | `{rack}` | **simulation incomplete** |" in (run / "report.md").read_text()
    metrics = (run / "verdicts.prom").read_text()
    assert re.search(rf'host_decision\{{decision="SIMULATED incomplete",host="{broken}".*\}} 1.0', metrics)
    assert re.search(rf'host_decision\{{decision="SIMULATED accepted",host="{broken}".*\}} 0.0', metrics)
    assert re.search(rf'host_verdicts\{{host="{broken}".*verdict="inconclusive"\}} 1.0', metrics)
    suites = ElementTree.parse(run / "junit.xml").getroot()  # noqa: S314 - our own file
    (suite,) = (item for item in suites if item.get("hostname") == broken)
    assert (suite.get("errors"), suite.get("tests")) == ("1", "1")
    assert suites[0].find("testcase/error") is not None


def check_tables(run: Path, broken: str) -> None:
    with (run / "observations.csv").open(newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["host"] == broken]
    (missing,) = [row for row in rows if row["name"] == "record"]
    assert (missing["verdict"], missing["status"]) == ("inconclusive", "missing")
    assert {row["verdict"] for row in rows if row["name"] != "record"} == {""}
    assert len(rows) > 1, (
        "only the host record is truncated: the observations of the gang record (of multi-host launches) must remain"
    )
    if (run / "observations.parquet").exists():
        table = importlib.import_module("pyarrow.parquet").read_table(run / "observations.parquet").to_pylist()
        verdicts = {row["verdict"] for row in table if row["host"] == broken}
        assert verdicts <= {"inconclusive", "", None}


@pytest.mark.parametrize(
    ("name", "verdict", "state"),
    [
        ("record", INCONCLUSIVE, INCONCLUSIVE),
        ("stage.benchmark", INCONCLUSIVE, INCONCLUSIVE),
        ("stage.benchmark", PASS, PASS),
        ("driver.version", INCONCLUSIVE, PASS),
    ],
)
@pytest.mark.parametrize("passes_left_out", [True, False])
def test_gpu_passes_only_if_record_and_stages_are_complete(
    name: str, verdict: str, state: str, passes_left_out: bool
) -> None:
    host = HostReport(
        name="h1",
        rack="r1",
        decision="incomplete",
        record="",
        coverage=Coverage(expected=0, measured=0, missing=0, error=0, skipped=0, unsupported=0),
        gpus=(builders.gpu("h1", 0), builders.gpu("h1", 1), builders.gpu("h1", 2)),
    )

    def judged(scope: str, verdict: str, name: str = "gpu.temperature") -> Verdict:
        return Verdict(host="h1", scope=scope, name=name, verdict=verdict, criterion="c", reason="")

    # GPU 2 has no verdict. It passes only if the report leaves out passes, and if record and stages are complete.
    verdicts = [judged("gpu=0", FAIL), judged("gpu=1", PASS), judged("host", verdict, name)]
    states = [item.state for item in gpu_states(host, verdicts, passes_left_out=passes_left_out)]
    assert states == [FAIL, state, state if passes_left_out else INCONCLUSIVE]
