"""Test the causes of verdicts that are inconclusive although the part was measured: why it was not judged, and the remedy."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import replace

import pytest

from fleet.diagnosis.diagnose import WITHOUT_COMPARISON, diagnose
from fleet.diagnosis.handling import WITHOUT_EVIDENCE, handling
from fleet.judge.criteria import Criterion, VsBaseline, read_packs
from fleet.judge.evidence import Evidence
from fleet.judge.judge import judge
from fleet.report.formatting import COMPARE, MEASURE_AGAIN
from fleet.report.html.page import render_html
from fleet.report.markdown import render_markdown
from fleet.report.merge import merge
from fleet.report.tables.reasons import next_command, reasons
from schemas.baselines import Accepted, HostBaseline, Level, PartBaseline, PlannedBaseline
from schemas.plans import Plan
from schemas.records import Metric
from schemas.reports import FAIL, INCONCLUSIVE, KINDS, PASS, RECORD, Verdict, VerdictKind
from tests import builders
from tests.unit.fleet.judge.small_fleet import criterion, host_evidence, one_figure_plan, pack, reading

WIDTH = "gpu.pcie.width"
Verdicts = tuple[Verdict, ...]


def with_baseline(plan: Plan, evidence: Evidence, *figures: Level, gpu: str = "h1-0") -> tuple[Plan, Evidence]:
    """Return plan and evidence with a baseline that has these figures of the GPU with the serial `gpu`."""
    run = Accepted(run_id="r0", nonce="f" * 32, report="0" * 64, status="PASS", at=builders.WHEN, by="me")
    bandwidth = Level(
        name="memory.bandwidth", stage="benchmark", unit="B/s", value=4.2e12, params=dict(plan.expected[0].params)
    )
    part = PartBaseline(kind="gpu", part="gpu", id=gpu, host="h1", runs=(run,), figures=(*figures, bandwidth))
    host = PartBaseline(kind="host", part="host", id="h1", host="h1", runs=(run,), figures=(bandwidth,))
    planned = PlannedBaseline(directory="b", digest="0" * 64)
    return replace(plan, baseline=planned), replace(evidence, baseline=HostBaseline(host=host, gpus={gpu: part}))


def of_baseline(*figures: Level, fraction: float = 0.9, gpu: str = "h1-0") -> Verdicts:
    """Return the verdicts that do not pass on a PCIe width that is compared with a baseline of these figures."""
    plan = one_figure_plan()
    rule = criterion(WIDTH, value=None, operator="ge", baseline=VsBaseline(fraction=fraction))
    plan, evidence = with_baseline(plan, host_evidence(plan, "h1", reading(16, name=WIDTH)), *figures, gpu=gpu)
    return not_passing(plan, {"h1": evidence}, rule)


def not_passing(plan: Plan, evidence: Mapping[str, Evidence], *criteria: Criterion) -> Verdicts:
    packs = [pack(*criteria)] if criteria else read_packs([])
    return tuple(item for item in judge(plan, evidence, packs) if item.verdict != PASS)


def width(unit: str = "1", **fields: float) -> Level:
    return Level(name=WIDTH, unit=unit, value=16, values={"r0": 16}, **fields)


def too_few() -> Verdicts:
    plan = one_figure_plan()
    rule = criterion(WIDTH, value=None, operator="ge", fleet_fraction=0.9)
    return not_passing(plan, {"h1": host_evidence(plan, "h1", reading(16, name=WIDTH))}, rule)


def without_links() -> Verdicts:
    plan = one_figure_plan()
    rule = criterion("memory.bandwidth", value=None, expected=100.0, fraction=0.9, links=18, operator="ge", unit="B/s")
    unread = Metric(name="gpu.peer.link", unit="1", values={})
    return not_passing(plan, {"h1": host_evidence(plan, "h1", unread)}, rule)


def differing_digests() -> Verdicts:
    plan = builders.plan("h1", gpu_count=2, rackproof_gang="none")
    evidence = builders.with_observations(
        builders.evidence(plan)["h1"],
        lambda item: (
            replace(item, value="00c0ffee00c0ffef") if (item.name, item.scope) == ("digest.value", "gpu=1") else item
        ),
    )
    return not_passing(plan, {"h1": evidence})


CASES: dict[str, tuple[Callable[[], Verdicts], str, str, str]] = {
    "too few parts": (too_few, "too-few-peers", "was not judged on PCIe width", "but a median needs at least 3"),
    "figure that the baseline does not have": (
        of_baseline,
        "no-baseline",
        "was not judged on PCIe width",
        "the accepted record of the part does not have this figure",
    ),
    "part that the baseline does not have": (
        lambda: of_baseline(width(), gpu="other"),
        "no-baseline",
        "has no usable record in the baseline",
        "no accepted record of serial h1-0",
    ),
    "too much noise": (
        lambda: of_baseline(width(sigma=0.2)),
        "noisy-baseline",
        "was not judged on PCIe width",
        "the accepted figure has a noise (sigma) of",
    ),
    "unknown noise": (
        lambda: of_baseline(width("B/s"), fraction=1.0),
        "noisy-baseline",
        "was not judged on PCIe width",
        "the limit needs the noise of the accepted figure, which is unknown",
    ),
    "digests without a majority": (
        differing_digests,
        "no-majority",
        "was not judged on digest value",
        "digests differ and no majority shows which is right",
    ),
    "NVLinks that were not reported": (
        without_links,
        "not-verified",
        "was not judged on memory bandwidth",
        "the host did not report which NVLinks join its GPUs",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_cause_of_a_measured_part_that_was_not_judged_states_why(case: str) -> None:
    verdicts, problem, title, why = CASES[case]
    causes = [cause for cause in diagnose(verdicts(), {}) if cause.problem == problem and title in cause.title]
    assert causes
    for cause in causes:
        assert cause.verdict == INCONCLUSIVE
        assert why in cause.why
        assert "has no result" not in cause.title
        assert handling(cause).now


def test_every_problem_without_a_comparison_has_a_case_a_remedy_and_an_instruction() -> None:
    problems = set(WITHOUT_COMPARISON.values())
    assert problems == {problem for _, problem, _, _ in CASES.values()} - {"not-verified"} == set(COMPARE)
    assert problems <= set(WITHOUT_EVIDENCE)
    assert MEASURE_AGAIN not in COMPARE.values()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["collective.all_reduce.busbw", WIDTH, "digest.value", "network.switch_port", RECORD])
@pytest.mark.parametrize("value", [16, "at leaf0", None])
def test_cause_of_an_inconclusive_verdict_of_any_kind_has_its_reason(
    kind: str, name: str, value: int | str | None
) -> None:
    verdict = Verdict(
        host="h1", scope="gpu=0", name=name, verdict=INCONCLUSIVE, criterion="c", kind=kind, value=value,
        reason="the reason", user="job 7" if kind == VerdictKind.IN_USE else "",
    )  # fmt: skip
    (cause,) = diagnose([verdict], {})
    assert cause.why == "the reason"


def test_report_on_two_hosts_states_that_the_comparison_of_hosts_needs_three() -> None:
    plan = builders.plan("h1", "h2", profile="smoke")
    report = merge(plan, builders.evidence(plan), read_packs(["fleet-relative-hosts"]))
    (cause,) = report.causes
    assert cause.hosts == ("h1", "h2")
    assert re.search(r"was not judged on all_reduce bus bandwidth", cause.title)
    assert cause.why == "the run has 2 hosts of NVIDIA H200 with this figure, but a median needs at least 3"
    (line,) = [line for line in report.acceptance.summary if cause.why in line]
    assert "; Measure more parts [" in line
    (reason,) = reasons(report.verdicts, report.causes, {})
    assert next_command(reason, report.run_id, "PLAYBOOK") == ("", "")
    assert next_command(replace(reason, verdict=FAIL), report.run_id, "PLAYBOOK") != ("", "")
    for text in ("".join(render_markdown(report)), "".join(render_html(report))):
        assert cause.why in text
        assert "Measure as many parts of this model" in text
        assert "has no result" not in text
