"""Test `rackproof report`: invalid records are quarantined (reported and not judged), and the exit code shows the decision."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fleet.judge.criteria import Pack, read_packs
from fleet.judge.evidence import Evidence
from fleet.records.load import load
from fleet.report.facts import BUSY, STOLEN, HostFacts
from fleet.report.html.page import render_html
from fleet.report.markdown import render_markdown
from fleet.report.merge import merge
from fleet.report.summary import untested_gpus
from fleet.report.tables.headline import checks
from schemas import documents
from schemas.catalogue import BENCHMARKS
from schemas.errors import RunError
from schemas.plans import Plan
from schemas.records import Metric, Observation, Snapshot, to_json
from schemas.reports import FleetReport
from tests import ROOT, builders, fleets
from tests.accepted import rackproof

PACKS = read_packs([])
FEW_CRITERIA = fleets.packs_about("memory", "host")
"""For tests of records and events, in which other criteria do not matter."""


@pytest.fixture(scope="module")
def healthy_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the run directory of three healthy hosts."""
    directory = tmp_path_factory.mktemp("healthy") / "r1"
    write_run(directory, builders.plan("h1", "h2", "h3", profile="smoke"))
    return directory


@pytest.fixture
def run(healthy_run: Path, tmp_path: Path) -> Path:
    """Return a copy of the healthy run. The test may change the copy."""
    return shutil.copytree(healthy_run, tmp_path / "r1")


def write_run(directory: Path, plan: Plan) -> None:
    """Write the plan and the records of healthy hosts."""
    documents.write(directory / "plan.json", to_json(plan))
    for host in plan.hosts:
        for record in builders.records(plan, host.name):
            folder = f"gangs/{record.gang}" if record.gang else "hosts"
            builders.write_record(directory / folder / f"{host.name}.json", record)


def report_of(directory: Path, packs: Sequence[Pack] = PACKS) -> FleetReport:
    loaded = load(directory)
    return merge(loaded.plan, loaded.evidence, packs, events=loaded.events, quarantined=loaded.quarantined)


def stolen_caveat(*snapshots: tuple[str, Any, Any]) -> str:
    """Return the caveat on stolen processor time of host h2. Each snapshot: stage, seconds busy and stolen since boot."""
    plan = builders.plan("h1", "h2", profile="smoke")
    evidence, added = builders.evidence(plan), []
    for stage, *values in snapshots:
        metrics = tuple(
            Metric(name=name, unit="s", values={} if value is None else {"host": value})
            for name, value in zip((BUSY, STOLEN), values, strict=True)
        )
        added.append(Snapshot(stage=stage, phase="during", at=builders.WHEN, duration_s=0.1, metrics=metrics))
    *others, last = evidence["h2"].records
    evidence["h2"] = Evidence(records=(*others, replace(last, snapshots=(*last.snapshots, *added))))
    report = merge(plan, evidence, FEW_CRITERIA)
    return "".join(line.text for line in report.acceptance.lines if line.title == "Processor time stolen")


@pytest.mark.parametrize(
    ("snapshots", "share"),
    [
        ([("benchmark", 100.0, 5.0), ("benchmark", 180.0, 25.0)], "h2 (20 % in stage benchmark)"),
        ([("benchmark", 100.0, 5.0), ("benchmark", 150.0, 5.1), ("benchmark", 180.0, 25.0)], "h2 (20 % in stage benchmark)"),
        ([("gang", 100.0, 5.0), ("gang", 180.0, 25.0), ("soak", 200.0, 25.0), ("soak", 250.0, 75.0)], "h2 (50 % in stage soak)"),
        ([("benchmark", 100.0, 5.0), ("benchmark", 190.0, 15.0)], ""),  # 10 % is the limit
        ([("benchmark", 100.0, 900.0), ("benchmark", 180.0, 900.0)], ""),  # stolen before the run
        ([("gang", 100.0, 5.0), ("benchmark", 180.0, 25.0)], ""),  # one snapshot of each stage
        ([("benchmark", 100.0, 25.0), ("benchmark", 20.0, 5.0)], ""),  # a reboot
        ([("benchmark", 100.0, None), ("benchmark", 180.0, None)], ""),
        ([("benchmark", 100.0, 0.0), ("benchmark", 100.0, 0.0)], ""),
    ],
)  # fmt: skip
def test_stolen_processor_time_of_a_stage_above_the_limit_is_a_caveat(
    snapshots: list[tuple[str, Any, Any]], share: str
) -> None:
    text = stolen_caveat(*snapshots)
    assert text.endswith(share)
    assert bool(text) == bool(share)


def test_hosts_whose_gpus_another_process_used_during_a_launch_are_a_caveat() -> None:
    plan = builders.plan("h1", "h2", profile="smoke")
    evidence = builders.evidence(plan)
    *others, last = evidence["h2"].records
    [launch] = last.launches
    used = replace(launch, other_processes={"gpu=1": "process 4711 (train)"})
    evidence["h2"] = Evidence(records=(*others, replace(last, launches=(used,))))
    [line] = [item for item in merge(plan, evidence, FEW_CRITERIA).acceptance.lines if item.title == "GPUs in use"]
    assert line.text.endswith(f": h2 (gpu=1 in stage {launch.stage}: process 4711 (train))")


def test_accepted_run_exits_0_and_writes_its_reports(run: Path) -> None:
    process = rackproof("report", run)
    assert (process.returncode, process.stderr) == (0, "")
    assert "FINAL ACCEPTANCE: PASS Hosts 3 of 3 accepted (6 GPUs)" in " ".join(process.stdout.split())
    report = documents.read(run / "report.json", "report", max_bytes=10_000_000)
    assert report["decision"] == "accepted"
    assert report["acceptance"]["status"] == "PASS"
    assert report["coverage"]["expected"] == report["coverage"]["measured"] > 0
    assert {"report.html", "report.md"} <= {path.name for path in run.iterdir()}


def test_host_option_prints_the_reasons_and_writes_the_page_of_this_host(run: Path) -> None:
    path = run / "hosts" / "h2.json"
    text = path.read_text()
    path.write_text(text[: len(text) // 2])
    process = rackproof("report", run, "--host", "h2")
    first, *lines, last = process.stdout.splitlines()
    assert (process.returncode, first, last) == (2, "h2: incomplete", f"page: {run / 'pages' / 'h2.html'}")
    assert any(
        line.startswith("INCOMPLETE") and "h2 left no usable record: rejected: hosts/h2.json: not JSON" in line
        for line in lines
    )
    assert not any("h1" in line or "FINAL" in line for line in lines)
    assert (run / "pages" / "h2.html").is_file()
    assert rackproof("report", run, "--host", "h1").stdout.splitlines()[0] == "h1: accepted"


def test_json_has_decision_and_summary(run: Path) -> None:
    (run / "hosts" / "h2.json").unlink()
    process = rackproof("report", run, "--json")
    document = json.loads(process.stdout)
    assert process.returncode == 2
    assert (document["decision"], document["acceptance"]["status"]) == ("incomplete", "INCOMPLETE")
    assert any("h2" in line and "hosts/h2.json is missing" in line for line in document["acceptance"]["summary"])


def test_deleted_record_makes_only_its_host_incomplete(run: Path) -> None:
    (run / "hosts" / "h2.json").unlink()
    report = report_of(run, FEW_CRITERIA)
    assert report.decision == "incomplete"
    assert {verdict.host for verdict in report.verdicts if verdict.verdict != "pass"} == {"h2"}
    assert {host.name: host.decision for host in report.hosts} == {
        "h1": "accepted",
        "h2": "incomplete",
        "h3": "accepted",
    }
    assert all(host.measurements for host in report.hosts if host.name != "h2")


def stale(path: Path) -> None:
    path.write_text(path.read_text().replace('"run_id": "r1"', '"run_id": "r0"'))


def other_nonce(path: Path) -> None:
    path.write_text(path.read_text().replace(builders.NONCE, "f" * 32))


def other_host(path: Path) -> None:
    path.write_text(path.read_text().replace('"host": "h2"', '"host": "h1"'))


def other_version(path: Path) -> None:
    path.write_text(path.read_text().replace("rackproof.record/2", "rackproof.record/9"))


def truncated(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:500])


def linked(path: Path) -> None:
    path.rename(path.parent.parent / "elsewhere.json")
    path.symlink_to(path.parent.parent / "elsewhere.json")


def sparse(path: Path) -> None:
    with path.open("ab") as file:
        file.truncate(10_000_000_000)


@pytest.mark.parametrize(
    ("corrupt", "reason"),
    [
        (stale, "run r0, expected r1"),
        (other_nonce, "nonce"),
        (other_host, "host h1, expected h2"),
        (other_version, "rackproof.record/9"),
        (truncated, "not JSON at offset"),
        (linked, "symbolic links"),
        (sparse, f"more than the allowed {documents.MAX_BYTES}"),
    ],
)
def test_invalid_record_is_quarantined(run: Path, corrupt: Callable[[Path], None], reason: str) -> None:
    corrupt(run / "hosts" / "h2.json")
    report = report_of(run, FEW_CRITERIA)
    assert report.decision == "incomplete"
    assert [item.path for item in report.quarantined] == ["hosts/h2.json"]
    assert reason in report.quarantined[0].reason
    not_passed = [verdict for verdict in report.verdicts if verdict.verdict != "pass"]
    assert [(verdict.host, verdict.verdict) for verdict in not_passed] == [("h2", "inconclusive")]
    assert "hosts/h2.json" in not_passed[0].reason


def test_record_of_an_unplanned_host_is_quarantined(run: Path) -> None:
    shutil.copy(run / "hosts" / "h1.json", run / "hosts" / "h9.json")
    report = report_of(run, FEW_CRITERIA)
    assert [(item.path, item.reason) for item in report.quarantined] == [
        ("hosts/h9.json", "the plan expects no such record")
    ]
    assert report.decision == "accepted"


def test_events_make_a_host_inconclusive_until_the_play_succeeds_on_it(run: Path) -> None:
    unreachable = {
        "at": builders.WHEN,
        "play": "Gang",
        "what": "unreachable",
        "host": "h3",
        "task": "Run the launch",
        "message": "ssh: timed out",
    }
    (run / "events.jsonl").write_text(f"{json.dumps(unreachable)}\n")
    report = report_of(run, FEW_CRITERIA)
    not_passed = [verdict for verdict in report.verdicts if verdict.verdict != "pass"]
    assert [(verdict.host, verdict.reason) for verdict in not_passed] == [
        ("h3", "unreachable at Gang: Run the launch: ssh: timed out")
    ]
    passed = {"at": builders.WHEN, "play": "Gang", "what": "passed"}
    for hosts, decision in ((["h1"], "incomplete"), (["h1", "h3"], "accepted")):
        with (run / "events.jsonl").open("a") as journal:
            journal.write(json.dumps({**passed, "hosts": hosts}) + "\n")
        assert report_of(run, FEW_CRITERIA).decision == decision


def test_reason_for_a_missing_or_rejected_record_names_the_remedy(run: Path) -> None:
    """If events.jsonl has a failure of the host, the reason gives this failure instead of the remedy."""
    failed = {
        "at": builders.WHEN,
        "play": "Gang",
        "what": "failed",
        "host": "h3",
        "task": "Wait",
        "message": "it ended",
    }
    (run / "events.jsonl").write_text(f"{json.dumps(failed)}\n")
    for host in ("h1", "h3"):
        (run / "hosts" / f"{host}.json").unlink()
    truncated(run / "hosts" / "h2.json")
    reasons = {
        verdict.host: verdict.reason for verdict in report_of(run, FEW_CRITERIA).verdicts if verdict.verdict != "pass"
    }
    assert reasons["h1"] == "no record: hosts/h1.json is missing; resume the run, or collect the record again"
    assert reasons["h2"].startswith("rejected: hosts/h2.json: not JSON")
    assert reasons["h2"].endswith("; resume the run, or collect the record again")
    assert reasons["h3"] == "no record: hosts/h3.json is missing; failed at Gang: Wait: it ended"


def test_invalid_lines_of_the_event_file_are_quarantined(run: Path) -> None:
    (run / "events.jsonl").write_text('{"at": "now"}\nnot json\n')
    assert [item.path for item in report_of(run, FEW_CRITERIA).quarantined] == ["events.jsonl", "events.jsonl"]
    assert report_of(run, FEW_CRITERIA).decision == "incomplete"


def test_rehearsal_status_says_rehearsal(tmp_path: Path) -> None:
    plan = builders.plan(profile="rehearsal")
    status = merge(plan, {}, PACKS).acceptance.status
    assert status == "REHEARSAL INCOMPLETE"


def test_merge_does_not_depend_on_the_order_of_evidence(run: Path) -> None:
    loaded = load(run)
    backwards = dict(reversed(list(loaded.evidence.items())))
    assert merge(loaded.plan, loaded.evidence, PACKS) == merge(loaded.plan, backwards, PACKS)


@pytest.mark.parametrize(
    ("name", "message"), [("nowhere", "plan.json: No such file"), (".", "plan.json: No such file")]
)
def test_directory_without_a_plan_exits_2(tmp_path: Path, name: str, message: str) -> None:
    process = rackproof("report", tmp_path / name)
    assert process.returncode == 2
    assert message in process.stderr


def test_links_between_gpus_are_in_the_report(run: Path) -> None:
    for path in run.rglob("h1.json"):
        record = json.loads(path.read_text())
        for snapshot in record["snapshots"]:
            (link,) = [metric for metric in snapshot["metrics"] if metric["name"] == "gpu.peer.link"]
            link["values"]["gpu=0,peer=1"] = "NV17"
        path.write_text(json.dumps(record))
    assert rackproof("report", run).returncode == 1, (
        "a path with 17 links must fail, because the other hosts have paths with 18 links"
    )
    report = documents.read(run / "report.json", "report", max_bytes=10_000_000)
    assert [host["links"]["gpu=0,peer=1"] for host in report["hosts"]] == ["NV17", "NV18", "NV18"]
    assert {host["links"]["gpu=1,peer=0"] for host in report["hosts"]} == {"NV18"}


def test_reason_for_a_missing_reference_value_is_reported(run: Path) -> None:
    loaded = load(run)
    unknown = {"gemm.throughput": "no published value", "gpu.not_measured": "no published value either"}
    packs = [replace(pack, unknown=unknown) if pack.name == "h200-sxm" else pack for pack in PACKS]
    report = merge(loaded.plan, loaded.evidence, packs)
    assert report.unknown == {"gemm.throughput": "no published value"}
    assert "no published value" in render_html(report)
    assert "no published value" in render_markdown(report)


def test_summary_has_the_state_of_each_benchmark(run: Path) -> None:
    def summary_without(name: str) -> tuple[str, ...]:
        loaded = load(run)
        incomplete = builders.with_observations(
            loaded.evidence["h2"],
            lambda item: None if item.name == name and item.params.get("benchmark", "stress") == "stress" else item,
        )
        return merge(loaded.plan, {**loaded.evidence, "h2": incomplete}, PACKS).acceptance.summary

    for name in ("stress.power", "benchmark.duration"):
        summary = summary_without(name)
        assert "Stress: INCOMPLETE" in summary
        assert "GEMM: PASS" in summary
        assert "Host and GPU health: PASS" in summary


def summary_after(run: Path, change: Callable[[Observation], Observation | None]) -> tuple[str, ...]:
    """Return the summary after changing the observations of every host."""
    loaded = load(run)
    evidence = {host: builders.with_observations(of_host, change) for host, of_host in loaded.evidence.items()}
    return merge(loaded.plan, evidence, PACKS).acceptance.summary


def test_check_whose_speed_is_not_judged_is_marked(tmp_path: Path) -> None:
    """Training rates are compared with other hosts or a baseline, and this run has neither."""
    write_run(tmp_path / "r1", builders.plan("h1", gpu_count=4, rackproof_gang="none", with_all_ops=True))
    report = report_of(tmp_path / "r1")
    summary = report.acceptance.summary
    assert report.acceptance.status == "PASS"
    for title in ("Training", "Training variants", "Transformer"):
        assert f"{title}: PASS (values; speed not judged)" in summary
    for title in ("GEMM", "Host copies", "Collectives", "Checkpoint", "Data loading"):
        assert f"{title}: PASS" in summary
    states = {check.title: (check.word, check.state) for check in checks(report)}
    assert states["Training"] == ("PASS (values; speed not judged)", "pass")
    assert "PASS (values; speed not judged)" in render_html(report)


def test_speed_is_judged_in_a_large_enough_fleet(tmp_path: Path) -> None:
    write_run(tmp_path / "r1", builders.plan("h1", "h2", "h3"))
    summary = report_of(tmp_path / "r1").acceptance.summary
    assert {"Training: PASS", "Training variants: PASS", "Transformer: PASS"} <= set(summary)


def test_summary_names_the_operations_that_were_not_judged(tmp_path: Path) -> None:
    plan = builders.plan("h1", "h2", gpu_count=4, rackproof_gang="none", with_all_ops=True)
    write_run(tmp_path / "r1", plan)
    unknown = {"broadcast", "gather"}

    def without_large_sizes(item: Observation) -> Observation | None:
        is_unknown = item.name.startswith("collective.") and item.name.split(".")[1] in unknown
        return None if is_unknown and item.params["size_bytes"] >= SMALLEST_JUDGED else item

    line = "Bandwidth within hosts: NOT JUDGED"
    reason = "(no criterion for this GPU model, number of GPUs and message size)"
    assert not any(item.startswith(line) for item in report_of(tmp_path / "r1").acceptance.summary)
    assert f"{line} for broadcast, gather {reason}" in summary_after(tmp_path / "r1", without_large_sizes)
    unknown |= {"reduce", "scatter"}
    assert f"{line} for 4 of 10 operations {reason}" in summary_after(tmp_path / "r1", without_large_sizes)
    unknown |= {name.split(".")[1] for name in BUSBW}
    assert f"{line} {reason}" in summary_after(tmp_path / "r1", without_large_sizes)


def test_summary_counts_the_hosts_on_which_no_operation_is_judged(tmp_path: Path) -> None:
    write_run(tmp_path / "r1", builders.plan("h1", "h2", gpu_count=4, rackproof_gang="none"))
    loaded = load(tmp_path / "r1")

    def without_large_sizes(item: Observation) -> Observation | None:
        return None if item.name in BUSBW and item.params["size_bytes"] >= SMALLEST_JUDGED else item

    evidence = {**loaded.evidence, "h2": builders.with_observations(loaded.evidence["h2"], without_large_sizes)}
    summary = merge(loaded.plan, evidence, PACKS).acceptance.summary
    why = "no criterion for this GPU model, number of GPUs and message size"
    assert f"Bandwidth within hosts: NOT JUDGED on 1 of 2 hosts ({why})" in summary


@pytest.mark.parametrize(
    ("with_rate", "why"),
    [
        ((), "rackproof_fabric_gbps is not set"),
        (("h1",), "on 2 of 3 hosts (rackproof_fabric_gbps is not set)"),
    ],
)
def test_bandwidth_between_hosts_is_not_judged_on_hosts_without_a_fabric_rate(
    tmp_path: Path, with_rate: tuple[str, ...], why: str
) -> None:
    plan = builders.plan("h1", "h2", "h3", profile="smoke")
    hosts = tuple(replace(host, fabric_gbps=3200.0 if host.name in with_rate else 0.0) for host in plan.hosts)
    write_run(tmp_path / "r1", replace(plan, hosts=hosts))
    (line,) = (item for item in report_of(tmp_path / "r1").acceptance.summary if item.startswith("Bandwidth between"))
    assert "NOT JUDGED" in line
    assert why in line


SMALLEST_JUDGED = 64 << 20
"""Size in bytes of the smallest message whose bus bandwidth has a criterion with a fixed limit."""
BUSBW = tuple(f"collective.{op}.busbw" for op in BENCHMARKS["collective"].settings["ops"])


PACK = """\
---
schema: rackproof.criteria/1
summary: site
criteria:
  - id: site
    name: memory.bandwidth
    where: {{op: copy}}
    operator: ge
    value: {value}
    unit: {unit}
    action: rma
    basis: policy
    source: "the contract, annex 3"
{more}
"""


BETWEEN_HOSTS = """\
schema: rackproof.criteria/1
summary: site
criteria:
  - id: site
    name: collective.*.busbw
    stage: gang
    operator: ge
    value: 1.0e+9
    unit: B/s
    action: inspect_hardware
    basis: policy
    source: "the contract, annex 3"
"""


def test_bandwidth_between_hosts_is_judged_by_a_limit_that_needs_no_fabric_rate(tmp_path: Path) -> None:
    """Such limits are those of sites and those of NVLink domains."""
    plan = builders.plan("h1", "h2", "h3", profile="smoke")
    write_run(tmp_path / "r1", replace(plan, hosts=tuple(replace(host, fabric_gbps=0.0) for host in plan.hosts)))
    (tmp_path / "site.yml").write_text(BETWEEN_HOSTS)
    process = rackproof("report", tmp_path / "r1", "--criteria", tmp_path / "site.yml")
    assert process.returncode == 0, process.stdout + process.stderr
    assert "Bandwidth between hosts" not in process.stdout


def criteria(path: Path, value: str = "4.0e+12", unit: str = "B/s", more: str = "") -> Path:
    path.write_text(PACK.format(value=value, unit=unit, more=more))
    return path


def test_site_criteria_are_applied_and_named(run: Path, tmp_path: Path) -> None:
    process = rackproof("report", run, "--criteria", criteria(tmp_path / "site.yml"))
    assert process.returncode == 0
    assert "Criteria h200-sxm, site" in " ".join(process.stdout.split())
    assert rackproof("report", run, "--criteria", criteria(tmp_path / "site.yml", "9.0e+12")).returncode == 1


def test_site_criterion_with_a_wrong_unit_is_rejected(run: Path, tmp_path: Path) -> None:
    process = rackproof("report", run, "--criteria", criteria(tmp_path / "contract.yml", "9500", "GB/s"))
    assert process.returncode == 64
    assert "contract: site: GB/s: not the unit of the observation; use B/s" in process.stderr
    assert not (run / "report.json").exists()


def test_site_criterion_without_a_matching_observation_is_not_a_pass(run: Path, tmp_path: Path) -> None:
    pack = criteria(tmp_path / "gang.yml", more="    stage: gang")
    process = rackproof("report", run, "--criteria", pack)
    assert process.returncode == 2
    assert "no observation matches this criterion" in process.stdout
    optional = criteria(tmp_path / "optional.yml", more="    stage: gang\n    optional: true")
    assert rackproof("report", run, "--criteria", optional).returncode == 0


def test_shared_gpus_are_a_caveat(tmp_path: Path) -> None:
    write_run(tmp_path / "shared", builders.plan("h1", "h2", "h3", profile="smoke", rackproof_share_gpus=True))
    shown = " ".join(rackproof("report", tmp_path / "shared").stdout.split())
    assert (
        "GPUs shared other processes were allowed to use the GPUs during the run (rackproof_share_gpus) on h1, h2, h3"
        in shown
    )


@pytest.mark.parametrize("indices", [(0, 1), (0, 0)], ids=["indices 0 and 1", "both indices 0"])
def test_gpus_outside_the_plan_are_a_caveat(indices: tuple[int, int]) -> None:
    """h1 has two more GPUs than the inventory states. h2 and h3 are one machine with the GPUs A and B; h2 tests A, h3 tests B.

    `indices`: the indices of A and B. If h2 and h3 are containers, each can see its GPU as GPU 0.
    """
    hosts = builders.plan("h1", "h2", "h3").hosts
    halves = [replace(host, devices=(index,)) for index, host in zip(indices, hosts[1:], strict=True)]
    facts = {
        "h1": HostFacts(gpus_on_bus=4),
        "h2": HostFacts(gpus_on_bus=2, gpus_under_test=frozenset("A")),
        "h3": HostFacts(gpus_on_bus=2, gpus_under_test=frozenset("B")),
    }
    (line,) = untested_gpus([hosts[0], *halves], facts, [("h2", "h3")])
    assert line.text.endswith("(rackproof_gpu_count, rackproof_gpu_devices): h1 (2 of 4)")
    # If both hosts test A, one GPU of the machine is not tested, whether the report knows that they are one machine or not.
    same = {**facts, "h1": HostFacts(), "h3": facts["h2"]}
    for machines in ([], [("h2", "h3")]):
        (line,) = untested_gpus([hosts[0], *halves], same, machines)
        assert line.text.endswith("h2 (1 of 2), h3 (1 of 2)")
    assert list(untested_gpus(hosts, dict.fromkeys(facts, HostFacts(gpus_on_bus=2)), [])) == []


@pytest.mark.parametrize(
    ("library", "subcommand", "remedy"),
    [
        ("jinja2", "report", "pip install 'rackproof[control]' (in a checkout: pip install '.[control]')"),
        ("pynvml", "doctor", "pip install 'rackproof' (in a checkout: pip install '.')"),
    ],
)
def test_error_about_a_missing_library_names_the_remedy(
    healthy_run: Path, library: str, subcommand: str, remedy: str
) -> None:
    program = (
        f"import sys; sys.modules[{library!r}] = None; from rackproof.main import main; sys.exit(main(sys.argv[1:]))"
    )
    command = [sys.executable, "-c", program, subcommand, *([str(healthy_run)] if subcommand == "report" else [])]
    process = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert (process.returncode, process.stdout) == (2, "")
    assert f"{library} is not installed for {sys.executable}: use the Python" in process.stderr
    assert remedy in process.stderr


def test_unreadable_plan_is_a_permission_error(tmp_path: Path) -> None:
    (tmp_path / "plan.json").write_text("{}")
    (tmp_path / "plan.json").chmod(0)
    user = os.geteuid()
    try:
        if user == 0:  # root may read every file, so the test reads this file as another user
            os.seteuid(65534)
        with pytest.raises(RunError, match="Permission denied: read the run as the user who made it"):
            load(tmp_path)
    finally:
        os.seteuid(user)


@pytest.mark.parametrize("options", [[], ["--host=h1"]])
def test_report_that_cannot_be_written_exits_74(run: Path, options: list[str]) -> None:
    """The exit code must not be 2, which means that the decision is incomplete."""
    page = run / ("pages/h1.html" if options else "report.html")
    page.mkdir(parents=True)
    process = rackproof("report", run, *options)
    assert (process.returncode, process.stdout) == (74, "")
    assert f"rackproof: {page}: Is a directory; the report is old or incomplete" in process.stderr
