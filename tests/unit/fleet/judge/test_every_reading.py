"""Every reading (from a collector) and every figure (from a benchmark) is judged, or INFORMATIONAL gives the reason why not.

The cases are generated. Each reading of a complete host and each figure of a plan gets a bad value. The extent of the
fault is one part, then one host, then all hosts.

If INFORMATIONAL lists the reading or figure, the judge must not find the bad value, except as an impossible value. Otherwise, the
judge must find it, with two exceptions:
- There are criteria on the reading or figure, but none of them can find a fault of this extent (`can_find`).
- There is no criterion on the figure, and the fault is on all hosts. The judge finds a bad figure without a criterion only by a
  comparison between parts, such as the digests of GPUs.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import pytest

from collectors.nvml.clocks import ANY_THERMAL, THROTTLE_REASONS, THROTTLE_TIMES
from fleet.judge.criteria import Criterion, Pack, name_matches, read_pack
from fleet.judge.evidence import Evidence
from fleet.judge.informational import INFORMATIONAL, reason_of
from fleet.judge.judge import judge
from fleet.judge.uniformity import WITHIN_HOST
from schemas.catalogue import BENCHMARKS, DURATION, Expectation
from schemas.plans import Plan
from schemas.readings import BMC, READINGS
from schemas.records import SKIPPED, Metric, Observation, Record, Snapshot, Value
from schemas.reports import PASS
from schemas.scopes import Scope
from tests import builders
from tests.fakes import links, nvml, whole

HOSTS = ("h1", "h2", "h3")
MODEL, GPU_NAME = "h100-sxm", "NVIDIA H100 80GB HBM3"
HOSTS_WITH_FAULT = {"one part": 1, "one host": 1, "all hosts": len(HOSTS)}
"""Extent of a fault -> number of hosts that have it."""
UNIQUE = ("gpu.serial", "gpu.uuid", "infiniband.hca.node_guid", "network.address")
"""Readings that identify a part. Their bad value is the identity of a part of another host."""
PORTS = (
    "infiniband.link_layer", "infiniband.state", "infiniband.phys_state", "infiniband.active", "infiniband.rate",
)  # fmt: skip
"""Readings of ports. The totals `fabric_ports.*` follow from them, so criteria on these totals judge the readings too."""
EVENTS: Mapping[str, tuple[str, Value]] = {
    "xid.count": ("pci=0000:18:00,xid=79", 1),
    "xid.fatal": ("pci=0000:18:00,xid=145", 1),
    "xid.message": ("pci=0000:18:00,message=fallen_off_the_bus", 1),
    "kernel.event.count": ("disk=nvme0n1,event=nvme_timeout", 1),
    "bmc.event.severity": ("log=SEL,entry=7", "Critical"),
    "sxid.count": ("pci=0000:05:00,fatal=yes,sxid=20034", 1),
}
"""Readings that a healthy host does not have -> scope and value of a fault."""


@dataclass(frozen=True)
class PlanAndPacks:
    """A plan that expects no figures, and the packs with which its hosts are judged."""

    plan: Plan
    packs: tuple[Pack, ...]


@pytest.fixture(scope="module")
def metrics(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Metric]:
    """Return every reading of a healthy host, by name."""
    with links.memory_directory() as folder:
        root, library = whole.build_host(folder), nvml.build(tmp_path_factory.mktemp("nvml"))
        output = whole.run_program(root, library, requests="before\n")
    read = {
        item["name"]: Metric(**{"values": {}, "absent": {}, **item})
        for item in json.loads(output)["snapshot"]["metrics"]
    }
    # The collector counts the processors of this machine, so `host.cpu.count` gets the number in the fake files.
    read["host.cpu.count"] = replace(read["host.cpu.count"], values=read["host.cpu.threads"].values)
    return {name: read[name] if name in read and _scopes(read[name]) else not_on_this_host(name) for name in READINGS}


def _scopes(metric: Metric) -> list[str]:
    return [*metric.values, *metric.absent]


def not_on_this_host(name: str) -> Metric:
    """Return the reading without a value: the host does not have the part, such as a bond, or its adapters lack the counter."""
    if name.startswith("infiniband."):
        absent = {f"hca={links.IB[0]},port=1": "unsupported: the adapter has no such counter"}
        return Metric(name=name, unit=READINGS[name].unit, values={}, absent=absent)
    scope = ",".join(f"{label}=0" for label in READINGS[name].labels) or "host"
    return Metric(name=name, unit=READINGS[name].unit, values={}, absent={scope: "unsupported: not on this host"})


@cache
def plan_and_packs() -> PlanAndPacks:
    plan = builders.plan(
        *HOSTS, profile="standard", gpu_count=8, rackproof_gang="all", rackproof_fabric_gbps=400, rackproof_gpu_model=MODEL,
        nvidia_driver_version="580",
    )  # fmt: skip
    return PlanAndPacks(plan=replace(plan, expected=()), packs=(read_pack(MODEL),))


@cache
def criteria_on(*names: str) -> tuple[Criterion, ...]:
    """Return the criteria on these readings and, for one of PORTS, those on `fabric_ports`."""
    wanted = {*names}
    return tuple(
        item
        for item in read_pack(MODEL).criteria
        if any(item.matches_name(name) for name in wanted)
        or (item.name.startswith("fabric_ports.") and wanted & {*PORTS})
    )


def snapshots(values: Iterable[Metric], last: Iterable[Metric]) -> tuple[Snapshot, ...]:
    """Return the snapshots of a run. The last snapshot has the readings `last`, the earlier ones have `values`."""
    phases = (("preflight", "before", values), ("benchmark", "before", values), ("benchmark", "after", last))
    return tuple(
        Snapshot(stage=stage, phase=phase, at=f"2026-11-21T04:00:0{number}Z", duration_s=0.1, metrics=tuple(metrics))
        for number, (stage, phase, metrics) in enumerate(phases)
    )


def not_passing(plan: Plan, packs: tuple[Pack, ...], evidence: Mapping[str, Evidence]) -> set[tuple[str, ...]]:
    """Return criterion, name, host and scope of each verdict that is not a pass."""
    verdicts = judge(plan, evidence, packs)
    return {(item.criterion, item.name, item.host, item.scope) for item in verdicts if item.verdict != PASS}


# ---- readings of the collectors ----


@cache
def record_of(host: str) -> Record:
    """Return the record of a host. `evidence_of` replaces the snapshots of the record.

    The judge requires figures of each active RDMA port, even if the plan expects none. These hosts have such ports, but no
    figures. So the record states why `verbs.bandwidth` was not measured.
    """
    gpus = tuple(
        replace(builders.gpu(host, index), name=GPU_NAME, pci_bus_id=f"0000{links.GPUS[index]}") for index in range(8)
    )
    (record,) = builders.records(
        replace(plan_and_packs().plan, hosts=(replace(plan_and_packs().plan.host(host), gang=""),)), host
    )
    unmeasured = Observation(
        name="verbs.bandwidth",
        scope="host",
        stage="benchmark",
        unit="B/s",
        status=SKIPPED,
        reason="ib_write_bw not found",
    )
    return replace(record, gpus=gpus, observations=(*record.observations, unmeasured))


def evidence_of(
    host: str, healthy: Mapping[str, Metric], faulty: Metric | None = None, *, is_change: bool = False
) -> Evidence:
    """Return the evidence of a host; the faulty reading is in all snapshots, or with `is_change` only in the last one."""
    own = {name: unique(metric, host) if name in UNIQUE else metric for name, metric in healthy.items()}
    bad = own | ({faulty.name: faulty} if faulty else {})
    values = snapshots((own if is_change else bad).values(), bad.values())
    of_host, of_bmc = ([of_source(taken, is_bmc=is_bmc) for taken in values] for is_bmc in (False, True))
    record = record_of(host)
    return Evidence(
        records=(replace(record, snapshots=tuple(of_host)),), bmc=replace(record, snapshots=tuple(of_bmc), gpus=())
    )


def of_source(taken: Snapshot, *, is_bmc: bool) -> Snapshot:
    """Return the snapshot with only the readings that the BMC reports, or only those that the host itself reports."""
    return replace(taken, metrics=tuple(item for item in taken.metrics if item.name.startswith(BMC) is is_bmc))


def unique(metric: Metric, host: str) -> Metric:
    """Return the reading with the identities of this host's parts."""
    number = HOSTS.index(host)
    values: dict[str, Value] = {}
    for index, scope in enumerate(metric.values):
        if metric.name.startswith("gpu."):
            values[scope] = getattr(builders.gpu(host, index), metric.name.removeprefix("gpu."))
        else:
            values[scope] = f"b8:ce:f6:00:{number:02x}:{index:02x}"
    return replace(metric, values=values)


def bad_values(metric: Metric, value: Value) -> Iterator[Value]:
    """Yield bad values: the other boolean, another text, or numbers that are too low or too high."""
    if isinstance(value, bool):
        yield not value
    elif isinstance(value, int | float):
        yield value * 0.5 if isinstance(value, float) else value // 2
        yield value * 2
        yield value + 10**10 if isinstance(value, int) else value + 1e10
        yield value - 100
    else:
        yield "other"


def with_healthy_values(metric: Metric) -> Metric:
    """Return the reading with a healthy value: a boolean `prefer` of a criterion, else the host's value, else `healthy_value`."""
    preferred = [item.prefer for item in criteria_on(metric.name) if item.prefer is not None]
    if preferred and isinstance(preferred[0], bool):
        return replace(metric, values=dict.fromkeys(metric.values or metric.absent, preferred[0]), absent={})
    if metric.values:
        return metric
    return replace(metric, values=dict.fromkeys(metric.absent, healthy_value(metric)), absent={})


def healthy_value(metric: Metric) -> Value:
    """Return a healthy value for a reading that the host does not support: the limit of a criterion, or 1 if none has a limit."""
    for item in read_pack(MODEL).criteria:
        if item.matches_name(metric.name) and item.value is not None:
            return item.value
    return 1.0 if READINGS[metric.name].unit != "1" else 1


def alterations(metric: Metric, scopes: Iterable[str]) -> Iterator[tuple[Metric, bool]]:
    """Yield the reading with bad values in these scopes, and whether the values are bad only in the last snapshot of the run."""
    chosen = list(scopes)
    if metric.name in UNIQUE:
        yield (
            replace(
                metric,
                values={**metric.values, **dict.fromkeys(chosen, next(iter(unique(metric, "h2").values.values())))},
            ),
            False,
        )
        return
    options = [list(bad_values(metric, metric.values[scope])) for scope in chosen]
    for values in zip(*options, strict=True):
        for is_change in (False, True):
            yield replace(metric, values={**metric.values, **dict(zip(chosen, values, strict=True))}), is_change


@dataclass(frozen=True)
class Healthy:
    """A fleet of healthy hosts with few readings. `findings`: the verdicts on these hosts, except passes.

    The readings are `metric`, those that its criteria group by, and all of PORTS if `metric` is one of them.
    """

    metric: Metric
    readings: Mapping[str, Metric]
    packs: tuple[Pack, ...]
    fleet: Mapping[str, Evidence]
    findings: set[tuple[str, ...]]


def healthy_fleet(metrics: Mapping[str, Metric], name: str) -> Healthy:
    related = {reading for item in criteria_on(name) for reading in item.group_by} | (
        {*PORTS} if name in PORTS else set()
    )
    readings = {other: metrics[other] for other in metrics if other == name or other in related}
    if name in EVENTS:
        readings[name] = replace(metrics[name], values={}, absent={})
    else:
        readings[name] = with_healthy_values(metrics[name])
    packs = (replace(plan_and_packs().packs[0], criteria=criteria_on(name)),)
    evidence = {host: evidence_of(host, readings) for host in HOSTS}
    return Healthy(readings[name], readings, packs, evidence, not_passing(plan_and_packs().plan, packs, evidence))


def criteria_that_find(healthy: Healthy, name: str, extent: str) -> set[str]:
    """Try bad values until a criterion finds one; return all criteria that find this value, or an empty set."""
    if name in EVENTS:
        scope, value = EVENTS[name]
        cases = [(replace(healthy.metric, values={scope: value}), False)]
    else:
        cases = [case for scopes in scopes_of(healthy.metric, extent) for case in alterations(healthy.metric, scopes)]
    for faulty, is_change in cases:
        hosts = HOSTS[: HOSTS_WITH_FAULT[extent]]
        changed = {host: evidence_of(host, healthy.readings, faulty, is_change=is_change) for host in hosts}
        after = not_passing(plan_and_packs().plan, healthy.packs, {**healthy.fleet, **changed}) - healthy.findings
        criteria = {item for item, reading, *_ in after if reading == name or reading.startswith("fabric_ports.")}
        if reason_of(name):
            criteria -= {"plan"}  # the criterion `plan` reports impossible values of all readings
        if criteria:
            return criteria
    return set()


def scopes_of(metric: Metric, extent: str) -> list[list[str]]:
    """Return groups of scopes that are faulty together.

    For `one part`, each group has one scope: the first one of each `reason` or `event`. If the scopes have neither label, the
    only group has the first scope. For other extents, one group has all scopes.
    """
    if extent != "one part":
        return [list(metric.values)]
    first: dict[str, str] = {}
    for scope in metric.values:
        first.setdefault(Scope.parse(scope).get("reason") + Scope.parse(scope).get("event"), scope)
    return [[scope] for scope in first.values()]


def can_find(criterion: Criterion, extent: str) -> bool:
    """Return whether a criterion can find a fault of this extent.

    A criterion that compares parts cannot find a fault that all of them have. A criterion that compares with a baseline finds
    nothing here, because the evidence has no baseline.
    """
    if criterion.baseline is not None:
        return False
    compares = bool(criterion.same_as_fleet or criterion.vs_fleet)
    within_host = criterion.among in WITHIN_HOST
    return not (within_host and extent != "one part") and not (compares and extent == "all hosts")


@pytest.mark.parametrize("name", READINGS)
def test_bad_reading_is_found_or_informational(metrics: Mapping[str, Metric], name: str) -> None:
    if reason_of(name) and not criteria_on(name):
        return  # without a criterion, a bad value cannot be found
    healthy = healthy_fleet(metrics, name)
    for extent in HOSTS_WITH_FAULT:
        if reason_of(name):
            criteria = criteria_that_find(healthy, name, extent)
            assert not criteria, f"{name} is judged: remove it from fleet/judge/informational.py"
        elif not criteria_on(name) or any(can_find(item, extent) for item in criteria_on(name)):
            assert criteria_that_find(healthy, name, extent), (
                f"no criterion finds a bad {name} on {extent}: add one, or a reason to fleet/judge/informational.py"
            )


THROTTLING = [
    *(("gpu.throttle.active", reason) for reason in THROTTLE_REASONS),
    *(("gpu.throttle.time", reason) for reason in (*THROTTLE_TIMES, ANY_THERMAL)),
    *(("stress.throttled_share", reason) for reason in THROTTLE_REASONS),
]


@pytest.mark.parametrize(("name", "throttling"), THROTTLING)
def test_each_reason_of_throttling_is_judged_or_informational(name: str, throttling: str) -> None:
    is_judged = any(item.where.get("reason", throttling) == throttling for item in criteria_on(name))
    assert is_judged is not bool(reason_of(name, {"reason": throttling}))


def complete_fleet(metrics: Mapping[str, Metric], **changed: Mapping[str, Metric]) -> set[tuple[str, ...]]:
    """Return the verdicts, except passes, on hosts with all readings except EVENTS. `changed`: host -> readings to replace."""
    healthy = {name: metric for name, metric in metrics.items() if name not in EVENTS}
    packs = (replace(plan_and_packs().packs[0], criteria=criteria_on(*READINGS)),)
    evidence = {host: evidence_of(host, {**healthy, **changed.get(host, {})}) for host in HOSTS}
    return not_passing(plan_and_packs().plan, packs, evidence)


def test_healthy_fleet_of_complete_hosts_has_no_finding(metrics: Mapping[str, Metric]) -> None:
    """Findings on the readings EVENTS are left out: healthy hosts do not have these readings, so criteria on them cannot pass."""
    assert {item for item in complete_fleet(metrics) if item[1] not in EVENTS} == set()


def test_host_without_one_adapter_is_found_and_the_adapter_is_named(metrics: Mapping[str, Metric]) -> None:
    def without(metric: Metric) -> Metric:
        return replace(metric, values={scope: value for scope, value in metric.values.items() if "mlx5_3" not in scope},
                       absent={scope: why for scope, why in metric.absent.items() if "mlx5_3" not in scope})  # fmt: skip

    fewer = {name: without(metric) for name, metric in metrics.items() if name.startswith("infiniband.")}
    fewer["infiniband.port_count"] = replace(metrics["infiniband.port_count"], values={"host": 8})
    findings = {item for item in complete_fleet(metrics, h2=fewer) if item[1] not in EVENTS}
    assert findings == {
        ("uniform-port-count", "infiniband.port_count", "h2", "host"),
        ("uniform-adapter-board", "infiniband.hca.board_id", "h2", "hca=mlx5_3"),
        ("fabric-ports-rate", "fabric_ports.rate", "h2", "host"),
    }


# ---- figures of the benchmarks ----

FIGURES_MODEL = "h200-sxm"


def settings_of(item: Expectation) -> tuple[tuple[str, Value], ...]:
    """Return the parameters that are texts, such as `op`, except `placement`. Numbers, such as message sizes, are left out."""
    return tuple((key, value) for key, value in item.params.items() if isinstance(value, str) and key != "placement")


@cache
def measuring_plan() -> Plan:
    return builders.plan(
        *HOSTS,
        profile="standard",
        with_all_sizes=True,
        gpu_count=8,
        rackproof_gang="all",
        rackproof_fabric_gbps=400,
        rackproof_gpu_model=FIGURES_MODEL,
        rackproof_host_memory_gbyteps=200,
    )


@cache
def planned_figures() -> Mapping[tuple[str, tuple[tuple[str, Value], ...]], tuple[Expectation, ...]]:
    """Return name and settings of each figure -> the observations that the plan expects."""
    figures: dict[tuple[str, tuple[tuple[str, Value], ...]], list[Expectation]] = {}
    for item in measuring_plan().expected:
        figures.setdefault((item.name, settings_of(item)), []).append(item)
    return {key: tuple(items) for key, items in figures.items()}


def figure_evidence(plan: Plan, host: str) -> Evidence:
    """Return the evidence of a host with the figures that the plan expects, and only the readings that `only_links` keeps."""
    records = tuple(
        replace(record, snapshots=tuple(only_links(snapshot) for snapshot in record.snapshots))
        for record in builders.records(plan, host)
    )
    return in_all_records(Evidence(records=records), with_details)


def only_links(snapshot: Snapshot) -> Snapshot:
    """Return the snapshot with only two readings: the NVLinks between GPUs, on which limits depend, and the serial of each GPU,
    without which the GPU would count as missing.
    """
    metrics = tuple(item for item in snapshot.metrics if item.name in ("gpu.peer.link", "gpu.serial"))
    return replace(snapshot, metrics=metrics)


def in_all_records(evidence: Evidence, change: Any) -> Evidence:
    """Return the evidence with `change` applied to every figure of the host record and of the gang record."""
    return builders.with_observations(builders.with_observations(evidence, change), change, gang=True)


def with_details(item: Observation) -> Observation:
    """Return the figure. Two figures are changed so that they pass: `pairs.bandwidth` gets a value that suits ports of 400 Gb/s,
    and `fashion_mnist.accuracy` gets the parameters by which its criterion selects figures.
    """
    if item.name == "pairs.bandwidth":
        return replace(item, value=4.0e10)
    if item.name == "fashion_mnist.accuracy":
        return replace(item, params={**item.params, "data": "fashion-mnist", "epochs": 20})
    return item


def changes(scope: str) -> Iterator[Any]:
    """Yield functions that change figures of this scope (empty: of all scopes) to bad values: too low, too high or different."""
    for factor in (0.02, 100.0, None):

        def change(item: Observation, factor: float | None = factor) -> Observation:
            if scope and item.scope != scope:
                return item
            if isinstance(item.value, bool):
                return replace(item, value=not item.value)
            if isinstance(item.value, int | float):
                return replace(item, value=item.value * factor if factor else item.value + 1)
            return replace(item, value="other")

        yield change


@dataclass(frozen=True)
class HealthyFigure:
    """Healthy hosts with the figures of one name and settings. `findings`: the verdicts on these hosts, except passes."""

    plan: Plan
    criteria: tuple[Criterion, ...]
    packs: tuple[Pack, ...]
    fleet: Mapping[str, Evidence]
    findings: set[tuple[str, ...]]


def healthy_figure(name: str, settings: tuple[tuple[str, Value], ...]) -> HealthyFigure:
    plan = replace(measuring_plan(), expected=planned_figures()[(name, settings)])
    criteria = tuple(item for item in read_pack(FIGURES_MODEL).criteria if item.matches_name(name))
    packs = (replace(read_pack(FIGURES_MODEL), criteria=criteria),)
    evidence = {host: figure_evidence(plan, host) for host in HOSTS}
    return HealthyFigure(plan, criteria, packs, evidence, not_passing(plan, packs, evidence))


@pytest.mark.parametrize(("name", "settings"), planned_figures(), ids=lambda value: str(value))
def test_bad_figure_is_found_or_informational(name: str, settings: tuple[tuple[str, Value], ...]) -> None:
    healthy = healthy_figure(name, settings)
    for extent in HOSTS_WITH_FAULT:
        finding = criteria_that_find_a_figure(healthy, name, extent)
        if reason_of(name, dict(settings)):
            assert not finding, f"{name} is judged by {finding}: remove it from fleet/judge/informational.py"
        elif any(can_find(item, extent) for item in healthy.criteria) or (
            not healthy.criteria and extent != "all hosts"
        ):
            assert finding, f"no criterion finds a bad {name} {dict(settings)} on {extent}"


def criteria_that_find_a_figure(healthy: HealthyFigure, name: str, extent: str) -> set[str]:
    """Try bad values until a criterion finds one; return all criteria that find this value, or an empty set."""
    scopes = [item.scope for item in healthy.fleet["h1"].benchmarks() if item.name == name]
    for change in changes(scopes[0] if extent == "one part" else ""):
        changed = {host: in_all_records(healthy.fleet[host], change) for host in HOSTS[: HOSTS_WITH_FAULT[extent]]}
        after = not_passing(healthy.plan, healthy.packs, {**healthy.fleet, **changed}) - healthy.findings
        if finding := {criterion for criterion, figure, *_ in after if figure == name and criterion != "plan"}:
            return finding
    return set()


def test_every_output_of_the_catalogue_is_planned_judged_or_informational() -> None:
    """The tests above do not cover figures that the profile does not measure, or that some healthy hosts do not have."""
    outputs = {output.name for benchmark in BENCHMARKS.values() for output in benchmark.outputs}
    planned = {name for name, _ in planned_figures()}
    missing = {
        name for name in outputs if not any(name_matches(re.sub(r"\{\w+\}", "*", name), other) for other in planned)
    }
    judged = {name for name in missing if any(item.matches_name(name) for item in read_pack(FIGURES_MODEL).criteria)}
    assert {name for name in missing - judged if not reason_of(name)} == set()


def test_every_informational_reason_is_for_an_existing_reading_or_figure() -> None:
    outputs = {output.name for benchmark in BENCHMARKS.values() for output in benchmark.outputs}
    names = {*READINGS, DURATION.name, *(re.sub(r"\{\w+\}", "all_reduce", name) for name in outputs)}
    assert [item for item in INFORMATIONAL if not any(name_matches(item.split()[0], name) for name in names)] == []
