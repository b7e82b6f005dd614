"""The report on a run directory: the same at any size, by any number of processes, in any order of records."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fleet.judge.criteria import read_packs
from fleet.judge.judge import judge
from fleet.records.load import Run, load
from fleet.report import hosts, workers
from fleet.report.merge import merge
from fleet.report.run_report import report_of, report_on_host
from schemas import documents, quick
from schemas.plans import Choice, Chosen, Plan
from schemas.records import Observation, Record, to_json
from schemas.reports import ALL, EXCEPTIONS, FAIL, PASS, FleetReport
from schemas.waivers import Waiver
from tests import fleets

PACKS = read_packs(())
Change = Callable[[Record], Record]


def changed(change: Callable[[Observation], Observation]) -> Change:
    """A record with something done to its observations."""
    return lambda record: replace(record, observations=tuple(map(change, record.observations)))


def set_to(name: str, scope: str, value: Any) -> Change:
    """One figure as it should not be."""

    def change(observation: Observation) -> Observation:
        return (
            replace(observation, value=value) if (observation.name, observation.scope) == (name, scope) else observation
        )

    return changed(change)


def unmeasured(record: Record) -> Record:
    """A figure that could not be had."""
    lost = next(observation for observation in record.observations if observation.name == "memory.bandwidth")
    error = replace(lost, status="error", value=None, reason="no memory")
    return replace(
        record, observations=tuple(error if observation is lost else observation for observation in record.observations)
    )


def counted_up(record: Record) -> Record:
    """An uncorrectable error in the last snapshot."""
    *before, last = record.snapshots
    metrics = tuple(
        replace(metric, values={**metric.values, "gpu=1": 2})
        if metric.name == "gpu.ecc.uncorrectable_volatile"
        else metric
        for metric in last.metrics
    )
    return replace(record, snapshots=(*before, replace(last, metrics=metrics)))


def twin(record: Record) -> Record:
    """A serial that the first host has too."""
    first, *others = record.gpus
    return replace(record, gpus=(replace(first, serial="r00000-h0-0"), *others))


def without_one(record: Record) -> Record:
    """A GPU that neither driver nor bus has; the report tells its slot by the other hosts."""
    counts = ("gpu.count", "gpu.pci_count")
    shots = tuple(
        replace(shot, metrics=tuple(replace(m, values={"host": 1}) if m.name in counts else m for m in shot.metrics))
        for shot in record.snapshots
    )
    return replace(record, gpus=record.gpus[:1], snapshots=shots)


def other_driver(record: Record) -> Record:
    return replace(record, software={**record.software, "nccl": "2.20.1"})


FAULTS: dict[str, Change | None] = {
    "slow by the datasheet": set_to("gemm.throughput", "gpu=1", 1e14),
    "slow by the fleet": set_to("memory.bandwidth", "gpu=0", 4.1e12),
    "wrong bits": set_to("digest.value", "gpu=1", "0123456789abcdef"),
    "an error": unmeasured,
    "an ECC error": counted_up,
    "a twin": twin,
    "a GPU missing": without_one,
    "another NCCL": other_driver,
    "no record": None,
    "another run's": lambda record: replace(record, nonce="f" * 32),
    "nothing": lambda record: record,
}


def small(directory: Path, fault: str = "nothing", count: int = 10) -> Run:
    """Write and load a fleet of a few hosts, one of them with a fault."""
    of = fleets.plan(count, gpu_count=2, gangs=count % 8 != 1)  # a gang has two hosts or more
    name, change = of.hosts[min(5, count - 1)].name, FAULTS[fault]
    fleets.write(directory, of, {name: change})
    if change in (twin, without_one):  # both of its records tell what GPUs it has
        record = change(fleets.records(of, name)[1])  # type: ignore[misc]
        documents.write_text(directory / "gangs" / record.gang / f"{name}.json", fleets.text(record))
    return load(directory)


@pytest.fixture
def brief(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reports on more than four hosts list exceptions alone, and hold no measurements of accepted hosts."""
    monkeypatch.setattr(hosts, "FULL_HOSTS", 4)
    monkeypatch.setattr(hosts, "MEASURED_HOSTS", 4)


def exceptions(report: FleetReport) -> list[tuple[str, ...]]:
    return sorted(
        (item.host, item.criterion, item.name, item.scope, item.reason)
        for item in report.verdicts
        if item.verdict != PASS
    )


@pytest.mark.parametrize("fault", FAULTS)
def test_brief_report_says_what_the_full_one_says(tmp_path: Path, fault: str, request: pytest.FixtureRequest) -> None:
    run = small(tmp_path, fault)
    full = report_of(run, PACKS, jobs=1)
    request.getfixturevalue("brief")
    reports = [report_of(run, PACKS, jobs=jobs) for jobs in (1, 2)]
    evidence = dict(reversed(list(run.evidence.items())))
    reports.append(merge(run.plan, evidence, PACKS, events=run.events, quarantined=run.quarantined))
    assert bool(exceptions(full)) == (fault != "nothing")
    for report in reports:
        assert (report.detail, full.detail) == (EXCEPTIONS, ALL)
        assert exceptions(report) == exceptions(full)
        assert report.left_out + len(report.verdicts) == len(full.verdicts)
        for name in ("judged", "decision", "acceptance", "coverage", "unjudged", "unknown", "quarantined", "ended"):
            assert getattr(report, name) == getattr(full, name), name
        for mine, theirs in zip(report.hosts, full.hosts, strict=True):
            for name in ("name", "decision", "coverage", "gpus", "software", "packs", "events"):
                assert getattr(mine, name) == getattr(theirs, name), (mine.name, name)
    slots = [item.detail for item in full.verdicts if item.name == "gpu.count" and item.verdict == FAIL]
    where = "nothing at PCI 0000:01:00.0, by the address alone, where 9 of 9 hosts with 2 GPUs have one"
    assert slots == ([where] if fault == "a GPU missing" else [])


@pytest.mark.parametrize("count", [hosts.FULL_HOSTS - 1, hosts.FULL_HOSTS, hosts.FULL_HOSTS + 1, 63, 64, 65, 200])
def test_report_does_not_depend_on_the_number_of_hosts(
    tmp_path: Path, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One slow host in a fleet of any size: the same findings, which are what the judge alone says of every host."""
    monkeypatch.setattr(workers, "ONE_PROCESS_HOSTS", 100)
    run = small(tmp_path, "slow by the datasheet", count)
    first, second = (report_of(run, PACKS, jobs=jobs) for jobs in (1, 2))
    assert first == second
    evidence = dict(run.evidence.items())
    verdicts = judge(run.plan, evidence, PACKS)
    assert exceptions(first) == sorted(
        (item.host, item.criterion, item.name, item.scope, item.reason) for item in verdicts if item.verdict != PASS
    )
    assert sum(row.passed for row in first.judged) == sum(item.verdict == PASS for item in verdicts)
    slow = run.plan.hosts[5].name
    assert {host.name: host.decision for host in first.hosts if host.decision != "accepted"} == {slow: "rejected"}
    lines = [line for line in first.acceptance.summary if slow in line]
    assert [line.partition(":")[0] for line in lines] == ["FAIL"]
    kinds = {line for line in first.acceptance.summary if line.endswith((": PASS", ": FAIL"))}
    assert {"GEMM: FAIL", "Memory bandwidth: PASS"} <= kinds
    measured = sum(bool(host.measurements) for host in first.hosts)
    assert measured == (count if count <= hosts.MEASURED_HOSTS else 1)
    assert (first.detail == ALL) == (count <= hosts.FULL_HOSTS)


def full_report(run: Run) -> FleetReport:
    """Return the report that lists every verdict."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hosts, "FULL_HOSTS", 1000)
        return report_of(run, PACKS, jobs=1)


def launch_together(directory: Path, of: Plan, members: dict[str, tuple[str, ...]]) -> None:
    """Change the members of the launches of these hosts."""
    for name, together in members.items():
        for record in (record for record in fleets.records(of, name) if record.gang):
            launches = tuple(replace(launch, members=together) for launch in record.launches)
            path = directory / "gangs" / record.gang / f"{name}.json"
            documents.write_text(path, fleets.text(replace(record, launches=launches)))


@pytest.mark.usefixtures("brief")
@pytest.mark.parametrize("case", ["a smaller gang", "two groups", "another host is slow"])
def test_brief_report_says_who_measured_together(tmp_path: Path, case: str) -> None:
    run = small(tmp_path, "slow by the datasheet" if case == "another host is slow" else "nothing")
    gang = next(iter(run.plan.gangs().values()))
    groups = {"a smaller gang": [gang[:-1]], "two groups": [gang[:4], gang[4:]]}.get(case, [])
    launch_together(tmp_path, run.plan, {name: group for group in groups for name in group})
    run = load(tmp_path)
    result, plain = report_of(run, PACKS, jobs=1), full_report(run)
    assert result.acceptance == plain.acceptance
    lines = [line for line in plain.acceptance.summary if line.startswith("Gang ")]
    assert len(lines) == {"a smaller gang": 1, "two groups": 2}.get(case, 0)


@pytest.mark.usefixtures("brief")
@pytest.mark.parametrize("plainly", [True, False])
def test_page_of_one_host_has_the_status_with_its_caveats(tmp_path: Path, plainly: bool) -> None:
    run = small(tmp_path, "slow by the datasheet", 3 if plainly else 10)
    slow, well = run.plan.hosts[2 if plainly else 5].name, run.plan.hosts[0].name
    (criterion,) = {item.criterion for item in full_report(run).verdicts if item.verdict == FAIL and item.host == slow}
    waiver = Waiver(criterion=criterion, host=slow, who="Ada Example", why="agreed in annex 3", until="2099-12-31")
    items = [
        Chosen(stage="benchmark", benchmark=name, chosen=name != "gemm", cost_s=1, why="")
        for name in ("memory", "gemm")
    ]
    choice = Choice(budget_s=60, cost_s=20, runs=0, items=tuple(items))
    run = replace(run, plan=replace(run.plan, waivers=(waiver,), choice=choice))
    for name, status in ((slow, "PASS WITH WAIVERS"), (well, "PASS")):
        page = report_on_host(run, PACKS, name, jobs=1).acceptance
        assert page.status == f"{status} (1 of 2 benchmarks chosen)"
        assert "NOT CHOSEN, so not judged: gemm (benchmark)" in page.summary


@pytest.mark.usefixtures("brief")
def test_report_is_the_same_by_any_number_of_processes(tmp_path: Path) -> None:
    run = small(tmp_path, "slow by the fleet", 24)
    texts = {quick.text(to_json(report_of(run, PACKS, jobs=jobs))) for jobs in (1, 2, 3)}
    assert len(texts) == 1
    document = json.loads(texts.pop())
    documents.validate(document, "report", source="the report")


@pytest.mark.usefixtures("brief")
def test_page_of_one_host_brings_back_what_the_report_leaves_out(tmp_path: Path) -> None:
    run = small(tmp_path, "slow by the fleet")
    report, plain = report_of(run, PACKS, jobs=1), full_report(run)
    assert not any(host.measurements for host in report.hosts if host.decision == "accepted")
    for name in (run.plan.hosts[5].name, run.plan.hosts[6].name):
        alone = report_on_host(run, PACKS, name, jobs=1)
        assert alone.detail == ALL
        assert sorted(map(str, alone.verdicts)) == sorted(str(item) for item in plain.verdicts if item.host == name)
        assert alone.hosts == tuple(host for host in plain.hosts if host.name == name)
