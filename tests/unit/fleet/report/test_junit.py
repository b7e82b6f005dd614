"""Test junit.xml, from which CI systems read the decision. It is valid XML, even if a host reports text that XML forbids."""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from junitparser import Error, Failure, JUnitXml, Skipped, TestSuite

from fleet.judge.criteria import read_packs
from fleet.judge.judge import Evidence
from fleet.report.judge_run import judge_run
from fleet.report.junit import render_junit
from fleet.report.merge import merge
from fleet.report.run_report import report_of
from fleet.simulate.faults import FAULTS
from fleet.simulate.fleet import Fleet, place_faults
from fleet.simulate.fleet import write_run as write_simulation
from fleet.simulate.records import JUDGED
from rackproof.main import main
from schemas.reports import EXCEPTIONS, Cause, CausePart, FleetReport, Judged, Verdict
from schemas.waivers import Waiver
from tests import builders
from tests.simulated import Document, simulate
from tests.unit.fleet.report.test_report import write_run

PLAN = builders.plan("h1", "h2", "h3", profile="smoke")
REPORT_WITHOUT_RECORDS = merge(PLAN, {}, read_packs([]))


@pytest.fixture(scope="module")
def report() -> FleetReport:
    return merge(PLAN, builders.evidence(PLAN), read_packs([]))


def failure(**fields: object) -> Verdict:
    default = {"host": "h2", "scope": "gpu=1", "serial": "h2-1", "name": "gpu.remapped_rows.failed", "action": "rma"}
    default |= {"criterion": "row-remap-failed", "verdict": "fail", "reason": "found True, wanted = False"}
    return Verdict(**{**default, **fields})  # type: ignore[arg-type]


def read(report: FleetReport) -> dict[str, TestSuite]:
    document = JUnitXml.fromstring("".join(render_junit(report)).encode())
    for suite in document:
        counts = (suite.tests, suite.failures, suite.errors, suite.skipped)
        suite.update_statistics()
        assert counts == (suite.tests, suite.failures, suite.errors, suite.skipped), "the counts in the file are wrong"
    return {suite.name: suite for suite in document}


def results(suites: Iterable[TestSuite], kind: type) -> list[tuple[str, str, str]]:
    return [
        (suite.name, case.name, item.message)
        for suite in suites
        for case in suite
        for item in case.result
        if isinstance(item, kind)
    ]


def check_names(report: FleetReport) -> dict[str, list[str]]:
    """Check that the names of the cases of each suite are distinct; return suite -> names of the cases that do not pass."""
    suites = read(report)
    for suite in suites.values():
        names = [case.name for case in suite]
        assert len(names) == len(set(names)), [name for name in names if names.count(name) > 1]
    return {name: [case.name for case in suite if case.result] for name, suite in suites.items()}


def test_no_test_case_fails_for_an_accepted_fleet(report: FleetReport) -> None:
    suites = read(report)
    assert list(suites) == ["fleet", "h1", "h2", "h3"]
    assert sum(suite.tests for suite in suites.values()) == len(report.verdicts) + 1
    assert all(not case.result for suite in suites.values() for case in suite)
    assert suites["h1"].hostname == "h1"


def test_failed_verdict_fails_its_test_case_and_the_decision(report: FleetReport) -> None:
    suites = read(
        replace(report, decision="rejected", verdicts=(*report.verdicts, failure(limit=False, operator="eq")))
    )
    failures = results(suites.values(), Failure)
    assert [(suite, name) for suite, name, _ in failures] == [
        ("fleet", "decision"),
        ("h2", "row-remap-failed: gpu.remapped_rows.failed gpu=1 serial h2-1"),
    ]
    assert not results(suites.values(), Error)
    (case,) = [case for case in suites["h2"] if case.result]
    assert case.result[0].type == "rma"
    assert "action: Return the part (RMA)" in case.result[0].text


def test_inconclusive_check_is_an_error_and_never_skipped() -> None:
    evidence = builders.evidence(PLAN)
    evidence["h2"] = Evidence(problem="no record: hosts/h2.json is missing")
    suites = read(merge(PLAN, evidence, read_packs([])))
    errors = {(suite, message) for suite, _, message in results(suites.values(), Error)}
    assert ("h2", "h2 left no usable record: hosts/h2.json is missing") in errors
    assert {suite for suite, _ in errors} == {"fleet", "h2"}
    assert not results(suites.values(), Skipped)


def test_verdicts_of_one_cause_are_one_failure(report: FleetReport) -> None:
    first, second = (
        failure(),
        failure(name="gpu.memory.unrepairable", criterion="memory", host="h3", action="inspect_hardware"),
    )
    number = len(report.verdicts)
    cause = Cause(
        problem="gpu-memory-errors", title="GPU 1 of h2 has a memory row that could not be remapped", why="", verdict="fail",
        host="h2", hosts=("h2",), part="gpu=1",
        parts=(CausePart(host="h2", scope="gpu=1", serial="h2-1"),), confidence="certain",
        verdicts=(number, number + 1), serial="h2-1", action="rma",
    )  # fmt: skip
    suites = read(replace(report, verdicts=(*report.verdicts, first, second), causes=(cause,)))
    (failed,) = results(suites.values(), Failure)
    assert failed == ("h2", "gpu-memory-errors gpu=1", cause.title)
    (case,) = [case for case in suites["h2"] if case.result]
    assert case.result[0].type == "rma"
    for expected in ("serial: h2-1", "h3 gpu=1: gpu.memory.unrepairable", "action: Return the part (RMA)"):
        assert expected in case.result[0].text


def test_waived_failure_is_a_skipped_test_case_with_the_waiver_in_its_message(report: FleetReport) -> None:
    waiver = Waiver(criterion="row-remap-failed", who="alice", why="spare ordered", until="2026-12-31", host="h2")
    suites = read(replace(report, verdicts=(*report.verdicts, failure(waiver=waiver))))
    ((suite, name, message),) = results(suites.values(), Skipped)
    assert (suite, name.split(":")[0]) == ("h2", "row-remap-failed")
    assert message == "fail, waived by alice until 2026-12-31: spare ordered: found True, wanted = False"
    assert not results(suites.values(), Failure) + results(suites.values(), Error)


def test_incomplete_report_without_verdicts_has_an_error_for_the_fleet_and_for_each_host(report: FleetReport) -> None:
    hosts = tuple(replace(host, decision="incomplete") for host in report.hosts)
    suites = read(replace(report, decision="incomplete", verdicts=(), hosts=hosts))
    assert [(suite, name) for suite, name, _ in results(suites.values(), Error)] == [
        (suite, "decision") for suite in ("fleet", "h1", "h2", "h3")
    ]


@pytest.mark.parametrize(("flag", "mark"), [("rehearsal", "REHEARSAL"), ("simulated", "SIMULATED")])
def test_rehearsal_and_simulation_are_marked_in_every_suite(report: FleetReport, flag: str, mark: str) -> None:
    suites = read(replace(report, **{flag: True}))  # type: ignore[arg-type]
    assert list(suites) == [f"{mark} {name}" for name in ("fleet", "h1", "h2", "h3")]
    assert {case.classname.split(".")[0] for suite in suites.values() for case in suite} == {mark}


def test_report_on_a_large_fleet_lists_each_passed_criterion_once(report: FleetReport) -> None:
    row = Judged(criterion="gemm-bf16", name="gemm.throughput", params={"dtype": "bf16"}, passed=6, source="measured")
    large = replace(
        report, detail=EXCEPTIONS, verdicts=(), judged=(row, replace(row, criterion="none-passed", passed=0))
    )
    suites = read(large)
    assert [case.name for case in suites["fleet"]] == ["decision", "gemm-bf16: gemm.throughput (bf16): passed"]
    assert [[case.name for case in suites[host]] for host in ("h1", "h2", "h3")] == [["decision"]] * 3
    assert not [case for suite in suites.values() for case in suite if case.result]


HOSTILE = [
    "]]>",
    '"/><testcase name="x"/>',
    "<!--",
    "&amp;&#0;",
    "\x00\x1b[31m",
    "\ufffe\uffff",
    "\ud800",
    "a\u202eb",
    "\r\n",
]


@pytest.mark.parametrize("text", HOSTILE)
def test_host_text_is_escaped_in_junit(report: FleetReport, text: str) -> None:
    hostile = failure(reason=text, serial=text, detail=text, params={"op": text}, scope=f"hca={text}", source=text)
    suites = read(replace(report, verdicts=(*report.verdicts, hostile)))
    assert suites["h2"].tests == len([verdict for verdict in report.verdicts if verdict.host == "h2"]) + 1
    assert len(results(suites.values(), Failure)) == 1


@settings(max_examples=50)
@given(st.text(alphabet=st.characters(exclude_categories=()), max_size=60))
def test_report_with_any_text_is_valid_xml(text: str) -> None:
    suites = read(replace(REPORT_WITHOUT_RECORDS, causes=(), verdicts=(failure(host="h1", reason=text, serial=text),)))
    assert len(results([suites["h1"]], Failure)) == 1


def faults_of_one_host() -> list[tuple[str, ...]]:
    """Return several combinations of faults. All faults are on the host r01-h02."""
    generator = random.Random(4)  # noqa: S311
    measured = sorted(
        FAULTS.keys() - {"unreachable", "no_record", "truncated_record", "stale_record", "hung", "missing_gpu"}
    )
    chosen = [("wrong_driver", "wrong_clique", "silent_corruption"), *(generator.sample(measured, 6) for _ in range(5))]
    return [
        tuple(f"{kind}:r01-h02{f':{generator.randrange(2)}' if FAULTS[kind].of_gpu else ''}" for kind in kinds)
        for kinds in chosen
    ]


@pytest.mark.parametrize("faults", faults_of_one_host())
def test_cases_of_a_faulty_host_have_distinct_names_with_and_without_waivers(
    tmp_path: Path, faults: tuple[str, ...]
) -> None:
    fleet = Fleet(hosts=3, gpus=2, profile="smoke", readings=JUDGED, nvlink_domains=True, storage=True, bmcs=True)
    plan = fleet.plan("r1", builders.WHEN)
    write_simulation(tmp_path / "r1", fleet, place_faults(faults, plan, fleet.seed), plan, jobs=1)
    run, report = judge_run(tmp_path / "r1", [])
    assert check_names(report)["SIMULATED r01-h02"]
    criteria = sorted({item.criterion for item in report.verdicts if item.verdict == "fail"})
    waivers = tuple(
        Waiver(criterion=name, who="alice", why="known", until="2999-12-31", host="r01-h02", scope=scope)
        for name in criteria
        for scope in ("gpu=0", "")
    )
    report = report_of(replace(run, plan=replace(run.plan, waivers=waivers)), read_packs([]))
    assert check_names(report)["SIMULATED r01-h02"]


def test_each_setting_that_differs_on_a_host_is_a_separate_test_case(tmp_path: Path) -> None:
    def other_kernel(record: Document) -> None:
        for snapshot in record["snapshots"] if record["host"] == "r01-h02" else ():
            for metric in snapshot["metrics"]:
                if metric["name"] == "host.kernel_version":
                    metric["values"] = {"host": "6.1.0-other"}

    run = simulate(tmp_path / "r1", "wrong_driver:r01-h02", change=other_kernel)
    names = check_names(judge_run(run, [])[1])["SIMULATED r01-h02"]
    assert names == ["differs: driver.version", "differs: host.kernel_version"]


ANY_CAUSE = st.builds(
    Cause,
    problem=st.sampled_from(["differs", "not-verified", "slow-memory", "x" * 500]), title=st.just("a"), why=st.just(""),
    verdict=st.sampled_from(["fail", "inconclusive"]), host=st.just("h2"), hosts=st.just(("h2",)),
    part=st.sampled_from(["host", "gpu=1", "gpu=1 (2)"]), parts=st.just(()), confidence=st.just("certain"),
    verdicts=st.sampled_from([(), (0,), (1,)]),
    waiver=st.sampled_from([
        None, *(Waiver(criterion=name, who="alice", why=why, until="2026-12-31", host="h2")
                for name, why in (("a", "known"), ("a", "old"), ("b", "known")))]),
)  # fmt: skip


@given(causes=st.lists(ANY_CAUSE, max_size=30), texts=st.lists(st.sampled_from(["a", "a\ufffe", "a\uffff", "b" * 600])))
@settings(max_examples=100, deadline=None)
def test_cases_have_distinct_names_whatever_the_report_contains(causes: list[Cause], texts: list[str]) -> None:
    verdicts = (*REPORT_WITHOUT_RECORDS.verdicts[:2], *(failure(name=text) for text in texts))
    check_names(replace(REPORT_WITHOUT_RECORDS, verdicts=verdicts, causes=tuple(causes)))


def test_report_command_writes_junit_xml(tmp_path: Path) -> None:
    write_run(tmp_path / "r1", PLAN)
    (tmp_path / "r1" / "hosts" / "h3.json").unlink()
    assert main(["report", str(tmp_path / "r1")]) == 2
    document = JUnitXml.fromfile(str(tmp_path / "r1" / "junit.xml"))
    assert {suite.name for suite in document if suite.errors} == {"fleet", "h3"}
