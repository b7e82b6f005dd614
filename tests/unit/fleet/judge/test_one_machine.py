"""Several hosts of the inventory may be one machine. If they were measured at the same time, this explains most slow figures.

Equal boot IDs identify one machine. A wrong boot ID may change the action of a failure, but never whether a host is accepted.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import datetime, timedelta
from typing import Any

import pytest

from fleet.judge.criteria import read_packs
from fleet.judge.evidence import Evidence
from fleet.judge.host_view import HostView
from fleet.judge.one_machine import BOOT_ID, Machines, with_one_machine
from fleet.records.load import load
from fleet.report.merge import merge
from schemas.catalogue import BENCHMARKS
from schemas.plans import Plan
from schemas.records import Launch, Metric, Observation, Snapshot
from schemas.reports import ACCEPTED, FAIL, INCONCLUSIVE, PASS, REJECTED, FleetReport, Verdict, VerdictKind
from schemas.timeline import Soak
from tests import ROOT, builders
from tests.unit.fleet.judge.small_fleet import host_view, one_figure_plan

PLAN = one_figure_plan("h1", "h2", "h10")
START = datetime.fromisoformat(builders.WHEN)
RUN = load(ROOT / "docs" / "measurements" / "h200x1-standard-twice")
"""A run on two H200 GPUs of one machine, which were measured as two hosts at the same time. No record has a boot ID."""
HOSTS = tuple(host.name for host in RUN.plan.hosts)
TOGETHER = f"{' and '.join(HOSTS)} are the same machine and were measured at the same time"


def at(seconds: float) -> str:
    return (START + timedelta(seconds=seconds)).isoformat()


def launch(began_s: float, ended_s: float, stage: str = "benchmark", **fields: Any) -> Launch:
    return replace(builders.launch(stage, ("h1",)), began=at(began_s), duration_s=ended_s - began_s, **fields)


def view(host: str, boot: Any = "A", *launches: Launch, plan: Plan = PLAN, **fields: Any) -> HostView:
    """Return a host with a boot ID (None: not reported), by default measured from second 0 to 100."""
    values = {} if boot is None else {"host": boot}
    absent = {"host": "unsupported: no file"} if boot is None else {}
    reading = Metric(name=BOOT_ID, unit="1", values=values, absent=absent)
    return host_view(plan, host, reading, launches=launches or (launch(0, 100),), **fields)


def slow(name: str = "host_copy.bandwidth", **fields: Any) -> Verdict:
    default = {"host": "h1", "scope": "gpu=0", "serial": "s", "operator": "ge", "unit": "B/s", "stage": "benchmark"}
    default |= {"verdict": FAIL, "criterion": "c", "reason": "found 1", "action": "reseat", "detail": "of the fleet"}
    return Verdict(**{**default, "name": name, **fields})


def annotated(verdict: Verdict, *views: HostView) -> Verdict:
    """Return the verdict, with a note if its host shares a machine with another host. The hosts are added in reverse order."""
    machines = Machines()
    for each in reversed(views):
        part = Machines()
        part.add(each)
        machines.update(part)
    machines.complete()
    (result,) = with_one_machine(views, [verdict], machines)
    return result


def is_annotated(verdict: Verdict, *views: HostView) -> bool:
    result = annotated(verdict, *views)
    assert result is verdict or result.kind == VerdictKind.SHARED_MACHINE
    return result is not verdict


TEXT = (
    "are the same machine and were measured at the same time: list this machine as one host in the inventory, "
    "and measure again"
)


def test_slow_figure_names_all_hosts_of_the_machine_and_stays_a_failure() -> None:
    verdict = slow()
    result = annotated(verdict, view("h10"), view("h2"), view("h1"))
    names = "h1, h2 and h10"
    assert result == replace(
        verdict, action="configure", kind=VerdictKind.SHARED_MACHINE, user=names,
        reason=f"found 1; {names} {TEXT}", detail=f"{names} {TEXT}; of the fleet",
    )  # fmt: skip
    assert annotated(slow(detail=""), view("h2"), view("h1")).detail == f"h1 and h2 {TEXT}"


def test_long_list_of_hosts_is_cut() -> None:
    plan = one_figure_plan(*(f"h{number}" for number in range(1, 11)))
    views = [view(host.name, plan=plan) for host in plan.hosts]
    assert annotated(slow(), *views).user == "h1, h2, h3, h4, h5, h6, h7, h8 and 2 more"


def test_speed_of_exactly_five_benchmarks_does_not_depend_on_the_processors() -> None:
    """Benchmarks of load pulses and of training are not among them: the processors begin each pulse and launch each kernel."""
    names = {name for name, benchmark in BENCHMARKS.items() if benchmark.gpu_bound}
    assert names == {"gemm", "gemm_shapes", "memory", "integrity", "stress"}


@pytest.mark.parametrize("benchmark", BENCHMARKS)
def test_every_speed_that_the_processors_affect_is_annotated(benchmark: str) -> None:
    views = view("h1"), view("h2")
    for output in BENCHMARKS[benchmark].outputs:
        for name in (output.name.replace("{op}", "all_reduce"), f"drift.{output.name}"):
            is_speed = not name.endswith((".accuracy", ".mtu"))
            expected = is_speed and not BENCHMARKS[benchmark].gpu_bound
            assert is_annotated(slow(name, operator="ge", unit=output.unit), *views) == expected
            assert is_annotated(slow(name, operator="le", unit="s"), *views) == expected
            assert not is_annotated(slow(name, operator="le", unit="1"), *views)
            assert not is_annotated(slow(name, operator="eq", unit="1"), *views)


@pytest.mark.parametrize(
    "fields",
    [{"verdict": PASS}, {"verdict": INCONCLUSIVE}, {"name": "host.cpu.clock_max"}, {"host": "h9"}],
    ids=["pass", "inconclusive", "a reading", "an unknown host"],
)
def test_only_a_failed_figure_of_a_host_on_the_shared_machine_is_annotated(fields: Mapping[str, Any]) -> None:
    assert not is_annotated(slow(**fields), view("h1"), view("h2"))


@pytest.mark.parametrize(
    ("boots", "expected"),
    [
        (("A", "A"), True),
        (("A", "B"), False),
        ((None, None), False),
        (("A", None), False),
        (("", ""), False),
        ((7, 7), False),
        ((True, True), False),
    ],
)
def test_hosts_are_one_machine_only_if_they_report_the_same_text_as_boot_id(
    boots: Sequence[Any], expected: bool
) -> None:
    views = [view(host, boot) for host, boot in zip(("h1", "h2"), boots, strict=True)]
    assert is_annotated(slow(), *views) == expected
    machines = Machines()
    for each in views:
        machines.add(each)
    assert machines.shared() == ([("h1", "h2")] if expected else [])


def test_failure_gets_no_note_if_no_record_has_the_reading_of_the_boot_id() -> None:
    assert not is_annotated(slow(), host_view(PLAN, "h1"), host_view(PLAN, "h2"))


def test_host_that_rebooted_is_the_same_machine_as_before() -> None:
    def snapshot(boot: str, second: int) -> Snapshot:
        reading = Metric(name=BOOT_ID, unit="1", values={"host": boot})
        return Snapshot(stage="benchmark", phase="before", at=at(second), duration_s=0.1, metrics=(reading,))

    rebooted = host_view(PLAN, "h1", snapshots=(snapshot("A", 0), snapshot("B", 1)), launches=(launch(0, 100),))
    assert annotated(slow(), rebooted, view("h2", "A"), view("h10", "B")).user == "h1, h2 and h10"


@pytest.mark.parametrize(
    ("own", "other", "expected"),
    [
        ([launch(0, 10)], [launch(9, 20)], True),
        ([launch(9, 20)], [launch(0, 10)], True),
        ([launch(0, 10)], [launch(2, 3)], True),
        ([launch(0, 10)], [launch(10, 20)], False),
        ([launch(10, 20)], [launch(0, 10)], False),
        ([launch(0, 10)], [launch(5, 20, "gang")], True),
        ([launch(0, 10), launch(20, 30, "gang")], [launch(20, 30, "gang")], False),
        ([launch(0, 10, "gang")], [launch(0, 10)], False),
        # The second launch replaced the first. So the first launch keeps its `observations`, and they are not judged.
        ([launch(0, 10, observations=(builders.observation("x", 1, unit="1"),)), launch(20, 30)], [launch(0, 10)], False),
        ([launch(0, 10)], [launch(0, 10, outcome="deadline")], True),
        ([replace(launch(0, 10), began="yesterday")], [launch(0, 10)], False),
        ([launch(0, 10)], [replace(launch(0, 10), began="yesterday")], False),
    ],
    ids=[
        "other launch began later", "other launch began earlier", "other launch lies within", "other launch came after",
        "other launch came before", "other launch in another stage", "overlap only outside the stage of the figure",
        "no launch of the stage of the figure", "overlap only in a replaced launch", "other launch failed",
        "time of the launch is invalid", "time of the other launch is invalid",
    ],
)  # fmt: skip
def test_launch_in_the_stage_of_the_figure_must_overlap_with_a_launch_of_another_host(
    own: Sequence[Launch], other: Sequence[Launch], expected: bool
) -> None:
    assert is_annotated(slow(), view("h1", "A", *own), view("h2", "A", *other)) == expected


@pytest.mark.parametrize(
    ("ended", "began_s", "expected"),
    [("", 50, True), ("", 110, False), (at(200), 150, True), (at(200), 210, False)],
    ids=["within the time soaked so far", "after the time soaked so far", "before the end", "after the end"],
)
def test_soak_counts_as_one_measurement_from_its_start_to_its_end(ended: str, began_s: float, expected: bool) -> None:
    soak = Soak(began=at(0), planned_s=300, soaked_s=100, ended=ended)
    views = view("h1", "A", launch(-9, -8), soak=soak), view("h2", "A", launch(began_s, began_s + 1))
    assert is_annotated(slow("drift.transformer.throughput", stage="soak"), *views) == expected
    assert is_annotated(slow(host="h2"), *views) == expected


@pytest.mark.parametrize(
    ("host", "boots", "fields", "hosts"),
    [
        ("h10", ("A", "A", "B"), {"scope": "gang=all"}, "h1 and h2"),
        ("h1", ("A", "A", "B"), {"scope": "gang=all"}, "h1 and h2"),
        ("h10", ("A", "A", "B"), {}, None),
        ("h10", ("A", "B", "C"), {"scope": "gang=all"}, None),
        ("h10", ("A", "A", "B"), {"scope": "gang=all", "stage": "soak"}, None),
        ("h10", ("A", "A", "B"), {"scope": "gang=all", "unit": "1", "operator": "le"}, None),
    ],
    ids=[
        "gang figure of a third host",
        "gang figure of a host on the shared machine",
        "figure of a third host",
        "three machines",
        "another stage",
        "a number without a unit instead of a speed",
    ],
)
def test_figure_of_a_gang_depends_on_all_hosts_of_the_gang(
    host: str, boots: Sequence[str], fields: Mapping[str, Any], hosts: str | None
) -> None:
    plan = one_figure_plan("h1", "h2", "h10", rackproof_gang="all")
    views = [
        view(name, boot, launch(0, 10, "gang"), plan=plan)
        for name, boot in zip(("h1", "h2", "h10"), boots, strict=True)
    ]
    verdict = slow("collective.all_reduce.busbw", host=host, **{"stage": "gang", **fields})
    assert annotated(verdict, *views).user == (hosts or "")


def test_hosts_of_a_rehearsal_may_be_one_machine() -> None:
    plan = replace(PLAN, rehearsal=True)
    assert not is_annotated(slow(), view("h1", plan=plan), view("h2", plan=plan))


# ---- a run on real hardware ----


def with_boot(evidence: Evidence, boot: str | None) -> Evidence:
    """Return the evidence with the boot ID `boot` in each snapshot. If `boot` is None, return the evidence unchanged."""
    if boot is None:
        return evidence
    reading = Metric(name=BOOT_ID, unit="1", values={"host": boot})

    def changed(snapshot: Snapshot) -> Snapshot:
        return replace(snapshot, metrics=(*snapshot.metrics, reading))

    records = tuple(replace(record, snapshots=tuple(map(changed, record.snapshots))) for record in evidence.records)
    return replace(evidence, records=records)


def changed_figures(evidence: Evidence, changes: Mapping[str, Any]) -> Evidence:
    """Return the evidence with changed figures. `changes`: name of a figure -> a factor, or a function of the old value."""

    def change(item: Observation) -> Observation:
        if item.name not in changes or item.value is None:
            return item
        value = changes[item.name]
        return replace(item, value=value(item.value) if callable(value) else item.value * value, samples=None)

    records = tuple(
        replace(record, observations=tuple(map(change, record.observations))) for record in evidence.records
    )
    return replace(evidence, records=records)


def moved(evidence: Evidence, seconds: float) -> Evidence:
    """Return the evidence with the start of all launches moved by `seconds`."""

    def later(each: Launch) -> Launch:
        return replace(each, began=(datetime.fromisoformat(each.began) + timedelta(seconds=seconds)).isoformat())

    return replace(
        evidence, records=tuple(replace(item, launches=tuple(map(later, item.launches))) for item in evidence.records)
    )


def report(boots: Sequence[str | None] = ("A", "A"), later_s: float = 0, **changes: Any) -> FleetReport:
    """Return the report on the run with changed evidence.

    Args:
        boots: boot IDs of the first and the second host; None: not reported.
        later_s: by how many seconds the launches of the second host are later.
        changes: changed figures of the first host, as in `changed_figures`; `__` stands for `.`.
    """
    first, second = (with_boot(RUN.evidence[host], boot) for host, boot in zip(HOSTS, boots, strict=True))
    names = {name.replace("__", "."): value for name, value in changes.items()}
    evidence = {HOSTS[0]: changed_figures(first, names), HOSTS[1]: moved(second, later_s)}
    return merge(RUN.plan, evidence, read_packs([]))


def failures(result: FleetReport) -> list[Verdict]:
    found = [verdict for verdict in result.verdicts if verdict.verdict == FAIL]
    assert found
    return found


def lines(result: FleetReport) -> dict[str, str]:
    return {line.title: line.text for line in result.acceptance.lines}


def test_healthy_hosts_on_one_machine_are_accepted_with_a_caveat() -> None:
    result = report()
    assert result.decision == ACCEPTED
    assert lines(result)["Hosts on one machine"] == f"{', '.join(HOSTS)} share a machine (the same host.boot_id)"
    assert "GPUs not tested" not in lines(result), "each host tests one of the two GPUs of the machine"
    for boots in (("A", "B"), (None, None)):
        assert "Hosts on one machine" not in lines(report(boots))
        assert lines(report(boots))["GPUs not tested"].endswith(", ".join(f"{host} (1 of 2)" for host in HOSTS))


def test_slow_copies_and_data_loading_are_one_cause_that_names_no_part() -> None:
    result = report(host_copy__bandwidth=0.6, dataloader__sufficiency=0.1)
    assert result.decision == REJECTED
    names = {verdict.name for verdict in failures(result)}
    assert names == {"host_copy.bandwidth", "dataloader.sufficiency"}
    assert {verdict.action for verdict in failures(result)} == {"configure"}
    (cause,) = result.causes
    assert (cause.problem, cause.part, cause.serial, cause.action) == ("shared-machine", "host", "", "configure")
    assert cause.title.startswith(f"{HOSTS[0]} was measured while several hosts shared one machine: ")
    assert cause.why.startswith(TOGETHER)
    assert len(cause.verdicts) == len(failures(result))


@pytest.mark.parametrize("reason", ["different machines", "not reported", "one after the other"])
def test_slow_copies_have_the_action_reseat_if_no_shared_machine_explains_them(reason: str) -> None:
    boots = {"different machines": ("A", "B"), "not reported": (None, None)}.get(reason, ("A", "A"))
    result = report(boots, 3600 if reason == "one after the other" else 0, host_copy__bandwidth=0.6)
    assert {verdict.action for verdict in failures(result)} == {"reseat"}
    assert "same machine" not in "".join(cause.title + cause.why for cause in result.causes)


@pytest.mark.parametrize("name", ["gemm__throughput", "memory__bandwidth", "stress__throughput"])
def test_gpu_that_is_slow_by_itself_is_faulty_on_a_shared_machine_too(name: str) -> None:
    result = report(**{name: 0.5})
    assert {verdict.action for verdict in failures(result)} <= {"inspect_hardware", "rma"}
    assert all(cause.part == "gpu=0" for cause in result.causes)


def test_wrong_results_are_faults_on_a_shared_machine_too() -> None:
    def one_wrong(value: float) -> float:
        return value + 1

    changes = {
        "host_copy__wrong_bytes": one_wrong,
        "stress__wrong_products": one_wrong,
        "host_memory__wrong_elements": one_wrong,
    }
    result = report(**changes, fashion_mnist__accuracy=0.5)
    assert {verdict.name for verdict in failures(result)} >= {"stress.wrong_products", "fashion_mnist.accuracy"}
    assert all(verdict.kind != VerdictKind.SHARED_MACHINE for verdict in failures(result))
    assert all(verdict.action == "inspect_hardware" for verdict in failures(result))


# ---- a host that reports the boot ID of another host ----

FIGURES = sorted(
    {item.name for evidence in RUN.evidence.values() for item in evidence.benchmarks() if isinstance(item.value, float)}
)


def outcome(result: FleetReport) -> list[tuple[Any, ...]]:
    """Return what must not depend on boot IDs: most fields of each verdict, and the decision on each host."""
    return [
        (item.host, item.scope, item.serial, item.part, item.name, item.stage, item.criterion, item.verdict, item.severity,
         item.value, item.limit, item.waiver)
        for item in result.verdicts
    ] + [(host.name, host.decision) for host in result.hosts]  # fmt: skip


@pytest.mark.parametrize("seed", range(3))
def test_boot_id_never_changes_whether_a_host_is_accepted(seed: int) -> None:
    rng = random.Random(seed)  # noqa: S311 - selects test data
    changes = {name.replace(".", "__"): rng.choice((0.3, 0.8, 3.0)) for name in rng.sample(FIGURES, 12)}
    changes["host_copy__bandwidth"] = 0.3
    plain = report((None, None), **changes)
    assert plain.decision == REJECTED
    annotations = 0
    for boots in (("A", "A"), ("A", "B"), ("x" * 5000, "x" * 5000)):
        other = report(boots, **changes)
        assert outcome(other) == outcome(plain)
        assert other.decision == plain.decision
        for new, old in zip(other.verdicts, plain.verdicts, strict=True):
            assert new.action in (old.action, "configure")
            assert new == old or (new.kind, old.verdict) == (VerdictKind.SHARED_MACHINE, FAIL)
            annotations += new != old
    assert annotations
