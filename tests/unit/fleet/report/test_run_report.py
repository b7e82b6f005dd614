"""The findings in a report do not depend on the size of the fleet, the number of processes or the order of records."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fleet.judge.judge import judge
from fleet.records.load import Run, load
from fleet.report import hosts
from fleet.report import merge as merge_module
from fleet.report.merge import merge
from fleet.report.run_report import report_of, report_on_host
from fleet.report.workers import Share, map_shares
from schemas import documents, quick
from schemas.errors import RunError
from schemas.plans import GPU, LINK, BenchmarkChoice, BudgetSelection, Part, Plan
from schemas.records import Metric, Observation, Record, to_json
from schemas.reports import ALL, EXCEPTIONS, FAIL, INCONCLUSIVE, PASS, FleetReport, Verdict
from schemas.waivers import Waiver
from tests import builders, fleets

PACKS = fleets.packs_about("gemm", "memory", "digest", "collective", "gpu", "software", "port", "optics")
"""The criteria on the benchmarks of `small_fleet` and on what the faults below change."""
Change = Callable[[Record], Record]


def for_observations(change: Callable[[Observation], Observation]) -> Change:
    """Return a function that applies `change` to each observation of a record."""
    return lambda record: replace(record, observations=tuple(map(change, record.observations)))


def set_to(name: str, scope: str, value: Any) -> Change:
    """Return a function that sets the value of each observation with this name and scope."""

    def change(observation: Observation) -> Observation:
        return (
            replace(observation, value=value) if (observation.name, observation.scope) == (name, scope) else observation
        )

    return for_observations(change)


def with_error(record: Record) -> Record:
    """Return the record with an error in place of its first memory bandwidth."""
    measured = next(observation for observation in record.observations if observation.name == "memory.bandwidth")
    error = replace(measured, status="error", value=None, reason="no memory")
    return replace(
        record,
        observations=tuple(error if observation is measured else observation for observation in record.observations),
    )


def without_measurements(record: Record) -> Record:
    """Return the record of a host whose launches left a log and no observation."""
    launches = tuple(replace(launch, log_tail="CUDA error") for launch in record.launches)
    return replace(record, observations=(), launches=launches)


def with_ecc_error(record: Record) -> Record:
    """Return the record with two uncorrectable errors of GPU 1 in the last snapshot."""
    *before, last = record.snapshots
    metrics = tuple(
        replace(metric, values={**metric.values, "gpu=1": 2})
        if metric.name == "gpu.ecc.uncorrectable_volatile"
        else metric
        for metric in last.metrics
    )
    return replace(record, snapshots=(*before, replace(last, metrics=metrics)))


def with_duplicate_serial(record: Record) -> Record:
    """Return the record with a GPU that has the serial of a GPU of the first host."""
    first, *others = record.gpus
    return replace(record, gpus=(replace(first, serial="r00000-h0-0"), *others))


def without_gpu(record: Record) -> Record:
    """Return the record of a host on which neither driver nor PCI bus shows GPU 1.

    The report compares the host with the others to name the empty slot.
    """
    counts = ("gpu.count", "gpu.pci_count")
    snapshots = tuple(
        replace(
            snapshot, metrics=tuple(replace(m, values={"host": 1}) if m.name in counts else m for m in snapshot.metrics)
        )
        for snapshot in record.snapshots
    )
    return replace(record, gpus=record.gpus[:1], snapshots=snapshots)


def with_other_nccl(record: Record) -> Record:
    return replace(record, software={**record.software, "nccl": "2.20.1"})


FAULTS: dict[str, Change | None] = {
    "duplicate serial": with_duplicate_serial,
    "slower than the datasheet": set_to("gemm.throughput", "gpu=1", 1e14),
    "slower than the fleet": set_to("memory.bandwidth", "gpu=0", 4.1e12),
    "wrong bits": set_to("digest.value", "gpu=1", "0123456789abcdef"),
    "not measured": with_error,
    "ECC error": with_ecc_error,
    "missing GPU": without_gpu,
    "other NCCL version": with_other_nccl,
    "no record": None,
    "record of another run": lambda record: replace(record, nonce="f" * 32),
}
"""Fault -> change of the host record, or None to leave this record out.

`duplicate serial` must not be on the first host, because it copies a serial from there.
"""


FAULTY_PORTS = {"port.status_opcode": ("hca=mlx5_0,port=1", 15), "optics.rx_los": ("hca=mlx5_0,port=2,lane=1", True)}


def with_two_faulty_ports(record: Record) -> Record:
    """Return the record with a different fault on each of two ports of one adapter."""
    metrics = [Metric(name=name, unit="1", values={scope: value}) for name, (scope, value) in FAULTY_PORTS.items()]
    snapshots = (replace(item, metrics=(*item.metrics, *metrics)) for item in record.snapshots)
    return replace(record, snapshots=tuple(snapshots))


def small_fleet(directory: Path, *faults: str, count: int = 10) -> Run:
    """Write and load a fleet with few benchmarks.

    The first fault is on the sixth host, or on the last host of a smaller fleet. Each further fault is on the next host.
    """
    plan = fleets.plan(count, gpu_count=2, gangs=count % 8 != 1)  # no gangs if a gang would have a single host
    kept = {"benchmark": ("gemm", "memory", "digest"), "gang": ("collective",)}
    plan = builders.with_benchmarks(
        plan, **{stage.name: {name: stage.benchmarks[name] for name in kept[stage.name]} for stage in plan.stages}
    )
    changes = {
        plan.hosts[(min(5, count - 1) + number) % count].name: FAULTS[fault] for number, fault in enumerate(faults)
    }
    fleets.write(directory, plan, changes)
    for name, change in changes.items():
        if change in (with_duplicate_serial, without_gpu):  # the gang record must list the same GPUs as the host record
            record = change(fleets.records(plan, name)[1])
            documents.write_text(directory / "gangs" / record.gang / f"{name}.json", fleets.text(record))
    return load(directory)


@pytest.fixture
def brief(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let reports on more than four hosts omit verdicts that are `pass`, and the measurements of accepted hosts."""
    monkeypatch.setattr(hosts, "FULL_HOSTS", 4)
    monkeypatch.setattr(hosts, "MEASURED_HOSTS", 4)


def exceptions(report: FleetReport) -> list[tuple[str, ...]]:
    return sorted(
        (item.host, item.criterion, item.name, item.scope, item.reason)
        for item in report.verdicts
        if item.verdict != PASS
    )


IN_ONE_RUN = [fault for fault in FAULTS if fault not in ("missing GPU", "no record", "record of another run")]
"""Faults that are tested together in one run. Each of the other faults is tested in a run of its own."""


@pytest.mark.parametrize(
    "faults",
    [(), IN_ONE_RUN, *([fault] for fault in FAULTS if fault not in IN_ONE_RUN)],
    ids=lambda faults: ", ".join(faults),
)
def test_brief_report_matches_the_full_report(
    tmp_path: Path, faults: Sequence[str], request: pytest.FixtureRequest
) -> None:
    run = small_fleet(tmp_path, *faults)
    full = report_of(run, PACKS, jobs=1)
    request.getfixturevalue("brief")
    reports = [report_of(run, PACKS, jobs=jobs) for jobs in (1, 2)]
    evidence = dict(reversed(list(run.evidence.items())))
    reports.append(merge(run.plan, evidence, PACKS, events=run.events, quarantined=run.quarantined))
    faulty = {run.plan.hosts[(5 + number) % 10].name for number in range(len(faults))}
    assert {host for host, *_ in exceptions(full)} == faulty
    for report in reports:
        assert (report.detail, full.detail) == (EXCEPTIONS, ALL)
        assert exceptions(report) == exceptions(full)
        assert report.left_out + len(report.verdicts) == len(full.verdicts)
        for name in ("judged", "decision", "acceptance", "coverage", "unjudged", "unknown", "quarantined", "ended"):
            assert getattr(report, name) == getattr(full, name), name
        for host, full_host in zip(report.hosts, full.hosts, strict=True):
            for name in ("name", "decision", "coverage", "gpus", "software", "packs", "events"):
                assert getattr(host, name) == getattr(full_host, name), (host.name, name)
    slots = [item.detail for item in full.verdicts if item.name == "gpu.count" and item.verdict == FAIL]
    slot = (
        "nothing at PCI 0000:01:00.0, where 9 of 9 hosts with 2 GPUs have a GPU "
        "(slots are identified by PCI address only: not every GPU reports a module number)"
    )
    assert slots == ([slot] if "missing GPU" in faults else [])


@pytest.mark.parametrize("count", [7, 8, 9, 10])
def test_report_does_not_depend_on_the_number_of_hosts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, count: int
) -> None:
    """For a fleet of any size with one slow host, the report has the same findings as `judge` on the evidence of all hosts."""
    monkeypatch.setattr(hosts, "FULL_HOSTS", 7)
    monkeypatch.setattr(hosts, "MEASURED_HOSTS", 9)
    run = small_fleet(tmp_path, "slower than the datasheet", count=count)
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


def launch_together(directory: Path, plan: Plan, members: dict[str, tuple[str, ...]]) -> None:
    """Replace the members of the launches in gang records; `members`: host -> the new members in its record."""
    for name, together in members.items():
        for record in (record for record in fleets.records(plan, name) if record.gang):
            launches = tuple(replace(launch, members=together) for launch in record.launches)
            path = directory / "gangs" / record.gang / f"{name}.json"
            documents.write_text(path, fleets.text(replace(record, launches=launches)))


@pytest.mark.usefixtures("brief")
@pytest.mark.parametrize("case", ["smaller gang", "two groups", "slow host"])
def test_brief_and_full_report_name_the_same_groups_of_hosts_measured_together(tmp_path: Path, case: str) -> None:
    run = small_fleet(tmp_path, *(["slower than the datasheet"] if case == "slow host" else []))
    gang = next(iter(run.plan.gangs().values()))
    groups = {"smaller gang": [gang[:-1]], "two groups": [gang[:4], gang[4:]]}.get(case, [])
    launch_together(tmp_path, run.plan, {name: group for group in groups for name in group})
    run = load(tmp_path)
    brief, full = report_of(run, PACKS, jobs=1), full_report(run)
    assert brief.acceptance == full.acceptance
    lines = [line for line in full.acceptance.summary if line.startswith("Gang ")]
    assert len(lines) == {"smaller gang": 1, "two groups": 2}.get(case, 0)


@pytest.mark.usefixtures("brief")
@pytest.mark.parametrize("is_small", [True, False])
def test_page_of_one_host_shows_chosen_benchmarks_waivers_and_simulation(tmp_path: Path, is_small: bool) -> None:
    run = small_fleet(tmp_path, "slower than the datasheet", count=3 if is_small else 10)
    slow, healthy = run.plan.hosts[2 if is_small else 5].name, run.plan.hosts[0].name
    (criterion,) = {item.criterion for item in full_report(run).verdicts if item.verdict == FAIL and item.host == slow}
    waiver = Waiver(criterion=criterion, host=slow, who="Ada Example", why="agreed in annex 3", until="2099-12-31")
    items = [
        BenchmarkChoice(stage="benchmark", benchmark=name, chosen=name != "gemm", cost_s=1, why="")
        for name in ("memory", "gemm")
    ]
    choice = BudgetSelection(budget_s=60, cost_s=20, runs=0, items=tuple(items))
    run = replace(run, plan=replace(run.plan, waivers=(waiver,), choice=choice))
    for name, status in ((slow, "PASS WITH WAIVERS"), (healthy, "PASS")):
        page = report_on_host(run, PACKS, name, jobs=1).acceptance
        assert page.status == f"{status} (1 of 2 benchmarks chosen)"
        assert "NOT CHOSEN, so not judged: gemm (benchmark)" in page.summary
    simulated = report_on_host(replace(run, plan=replace(run.plan, simulated=True)), PACKS, healthy, jobs=1).acceptance
    assert simulated.summary[0] == f"Host {healthy} alone: simulation passed"


@pytest.mark.usefixtures("brief")
def test_report_does_not_depend_on_the_number_of_processes(tmp_path: Path) -> None:
    run = small_fleet(tmp_path, "slower than the fleet", count=18)
    texts = {quick.text(to_json(report_of(run, PACKS, jobs=jobs))) for jobs in (1, 2, 3)}
    assert len(texts) == 1
    document = json.loads(texts.pop())
    documents.validate(document, "report", source="the report")


@pytest.mark.usefixtures("brief")
@pytest.mark.parametrize("case", ["only logs", "rejected by the manifest"])
def test_report_has_measurements_of_the_same_hosts_with_any_number_of_processes(
    tmp_path: Path, case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (hosts, merge_module):
        monkeypatch.setattr(module, "MEASURED_HOSTS", 2)
    plan = fleets.plan(6, gpu_count=1, gangs=False)
    names = [host.name for host in plan.hosts]
    if case == "rejected by the manifest":
        serials = {name: fleets.records(plan, name)[0].gpus[0].serial for name in names} | {names[3]: "another"}
        parts = (Part(host=name, kind=GPU, slot="0", serial=serial) for name, serial in serials.items())
        plan = replace(plan, manifest=tuple(parts))
    change = without_measurements if case == "only logs" else with_error
    fleets.write(tmp_path, plan, dict.fromkeys(names, change))
    run = load(tmp_path)
    first, second = (report_of(run, PACKS, jobs=jobs) for jobs in (1, 2))
    assert first.hosts == second.hosts
    shown = [host.name for host in first.hosts if host.measurements or any(launch.log_tail for launch in host.launches)]
    assert shown == names[:2]
    assert (first.hosts[3].decision == "rejected") == (case == "rejected by the manifest")


def _kill_own_process(context: Run, share: Share) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def test_killed_process_is_an_error(tmp_path: Path) -> None:
    run = small_fleet(tmp_path, count=3)
    with pytest.raises(RunError, match="one of the 2 processes that judge the hosts was killed"):
        map_shares(_kill_own_process, run, [[("h1",)], [("h2",)]])


def test_cable_of_each_faulty_port_is_named_in_the_report_and_on_the_page_of_the_host(tmp_path: Path) -> None:
    plan = fleets.plan(3, gpu_count=2, gangs=False)
    name = plan.hosts[1].name
    ends = {"mlx5_0": ("leaf1", "swp1"), "mlx5_0/2": ("leaf2", "swp9")}
    lines = [
        Part(host=name, kind=LINK, slot=slot, switch=switch, switch_port=port, origin="x line 2")
        for slot, (switch, port) in ends.items()
    ]
    plan = replace(plan, manifest=tuple(lines))
    fleets.write(tmp_path, plan, {name: with_two_faulty_ports})
    run = load(tmp_path)
    reports = report_of(run, PACKS, jobs=1), report_on_host(run, PACKS, name, jobs=1)
    for report in reports:
        cables = {cause.problem: cause.parts[0].cable for cause in report.causes if cause.problem in ("port", "module")}
        assert cables == {"port": "leaf1 swp1 by the manifest", "module": "leaf2 swp9 by the manifest"}


@pytest.mark.usefixtures("brief")
def test_page_of_one_host_has_the_verdicts_and_figures_that_the_report_omits(tmp_path: Path) -> None:
    run = small_fleet(tmp_path, "slower than the fleet")
    report, full = report_of(run, PACKS, jobs=1), full_report(run)
    assert not any(host.measurements for host in report.hosts if host.decision == "accepted")
    for name in (run.plan.hosts[5].name, run.plan.hosts[6].name):
        host_report = report_on_host(run, PACKS, name, jobs=1)
        assert host_report.detail == ALL
        assert sorted(map(str, host_report.verdicts)) == sorted(
            str(item) for item in full.verdicts if item.host == name
        )
        assert host_report.hosts == tuple(host for host in full.hosts if host.name == name)


@pytest.mark.parametrize("place", ["the first host", "the last host"])
@pytest.mark.parametrize("kind", ["many hosts", "one host", "one part"])
def test_many_verdicts_on_one_fault_do_not_displace_the_verdict_on_another(
    kind: str, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The many verdicts are on figures of a gang on each of its hosts, on the parts of one host, or on one part.

    The other verdict is on another check or, if the many are on one part, on another part that fails the same check.
    """
    monkeypatch.setattr(merge_module, "MAX_VERDICTS", 40)
    monkeypatch.setattr(merge_module, "MAX_VERDICTS_OF_HOST", 10)

    def failed(host: str, name: str, scope: str) -> Verdict:
        return Verdict(host=host, name=name, scope=scope, verdict=FAIL, criterion="x", reason="x")

    if kind == "many hosts":
        many = [failed(f"h{host}", f"collective.{op}", "gang=r1") for host in range(30) for op in ("a", "b", "c")]
    elif kind == "one host":
        many = [failed("h0", "network.carrier", f"nic=eth{at}") for at in range(90)]
    else:
        many = [failed("h0", "gpu.nvlink.active", f"gpu=0,link={at}") for at in range(90)]
    if kind == "one part":
        other = failed("h0", "gpu.nvlink.active", "gpu=1,link=0")
    else:
        other = failed("h0" if kind == "one host" else f"h{29 * (place == 'the last host')}", "xid.count", "gpu=1")
    all_verdicts = [*many, other] if place == "the last host" else [other, *many]
    listed = merge_module._limit_verdicts(all_verdicts)
    assert other in listed
    assert len(listed) == (40 if kind == "many hosts" else 10)
    assert listed == [verdict for verdict in all_verdicts if verdict in listed], "the order is kept"


@pytest.mark.parametrize("place", ["the first host", "the last host"])
@pytest.mark.parametrize("name", ["record", "gpu.ecc.enabled"])
def test_failures_do_not_displace_the_reason_why_a_host_is_incomplete(
    name: str, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The host has no record, or records without a reading of each GPU. The failures alone exceed the maximum."""
    monkeypatch.setattr(merge_module, "MAX_VERDICTS", 40)
    monkeypatch.setattr(merge_module, "MAX_VERDICTS_OF_HOST", 10)
    verdict = Verdict(host="h0", name="x", scope="host", verdict=FAIL, criterion="x", reason="x")
    failures = [
        replace(verdict, host=f"h{host}", name=f"collective.{at}", scope="gang=r1")
        for host in range(30)
        for at in range(3)
    ]
    host = "h0" if place == "the first host" else "h29"
    scopes = ["host"] if name == "record" else [f"gpu={gpu}" for gpu in range(8)]
    missing = [replace(verdict, host=host, name=name, scope=scope, verdict=INCONCLUSIVE) for scope in scopes]
    listed = merge_module._limit_verdicts(sorted([*failures, *missing], key=lambda item: int(item.host[1:])))
    assert [item for item in listed if item.verdict == INCONCLUSIVE] == missing[:1]
    assert len(listed) == 40


def test_failures_on_many_hosts_do_not_displace_the_reason_for_the_decision_on_the_last_host(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Half of the hosts have no record. Each GPU of the others fails two checks."""
    monkeypatch.setattr(merge_module, "MAX_VERDICTS", 40)
    verdict = Verdict(host="h0", name="record", scope="host", verdict=INCONCLUSIVE, criterion="plan", reason="x")
    verdicts = [replace(verdict, host=f"h{host}") for host in range(0, 30, 2)]
    verdicts += [
        replace(verdict, host=f"h{host}", name=name, criterion=name, scope=f"gpu={gpu}", verdict=FAIL)
        for host in range(1, 30, 2)
        for gpu in range(8)
        for name in ("gpu.driver.version", "gpu.vbios.version")
    ]
    listed = merge_module._limit_verdicts(sorted(verdicts, key=lambda item: int(item.host[1:])))
    assert len(listed) == 40
    assert {item.host for item in listed} == {item.host for item in verdicts}
