"""In large fleets, passes are counted without creating their verdicts. The report must equal a report made from all verdicts.

If a fault were counted as a pass, its host would be accepted. Each test states the hosts that must have a finding (a verdict that
does not pass).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest

from fleet.judge.criteria import Criterion, Pack, VsBaseline
from fleet.judge.evidence import Evidence, Planned
from fleet.judge.fleet_stats import FleetStats
from fleet.judge.gather import Gatherer
from fleet.judge.judge import host_views, judge
from fleet.judge.paths import slow_transport
from fleet.report.hosts import HostJudge, JudgedHosts, context_of, units
from schemas import quick
from schemas.baselines import HostBaseline, PlannedBaseline
from schemas.plans import Plan
from schemas.records import ERROR, UNSUPPORTED, Metric, Observation, Record, to_json
from schemas.reports import PASS, Verdict
from tests import builders
from tests.unit.fleet.judge.small_fleet import criterion, host_evidence, one_figure_plan, pack, reading

COUNT = 9
NAMES = [f"h{number}" for number in range(1, COUNT + 1)]
H5 = "h5"
SPEED = 4.27e12

FLOOR = criterion("memory.bandwidth", id="floor", operator="ge", value=4.0e12, unit="B/s", stage="benchmark")
FRACTION = criterion("memory.bandwidth", id="fraction", operator="ge", fleet_fraction=0.97, unit="B/s")
THING = criterion(id="thing")
COUNTED = criterion("gpu.counter", id="counted", operator="le", value=0, delta=True)
CLOCK = criterion("gpu.clock", id="clock", operator="ge", fleet_fraction=0.9, optional=True)
VERSION = criterion("driver.version", id="version", scope="host", value=None, same_as_fleet=True)
NCCL = criterion("launch.nccl", id="nccl", scope="host", value=None, same_as_fleet=True)
LINKS = criterion("gpu.links", id="links", value=None, same_as_fleet=True)
RULES = (FLOOR, FRACTION, THING, COUNTED, CLOCK, VERSION, NCCL, LINKS)
PLAN = one_figure_plan(*NAMES)


def healthy_readings(**changes: Any) -> tuple[Metric, ...]:
    """Return the readings of a healthy host.

    `changes`: key -> new value or metric. A key in `values` below replaces that reading, or removes it if the new value is None.
    Any other key adds a metric.
    """
    values = {"thing": 1, "counter": 4, "clock": 1.5e9, "version": "570", "links": 18} | changes
    named = {
        "thing": ("gpu.thing", "gpu=0"), "counter": ("gpu.counter", "gpu=0"), "clock": ("gpu.clock", "gpu=0"),
        "version": ("driver.version", "host"), "links": ("gpu.links", "gpu=0"),
    }  # fmt: skip
    return tuple(
        value if isinstance(value, Metric) else reading(value, name=named[key][0], scope=named[key][1])
        for key, value in values.items()
        if value is not None
    )


def digest(value: str, **over: Any) -> Observation:
    return builders.observation("digest.value", value, scope="gpu=0", workload="gemm", **over)


def healthy_record(host: str, plan: Plan = PLAN) -> Record:
    record = host_evidence(plan, host, *healthy_readings(), software=builders.SOFTWARE).records[0]
    return replace(record, observations=(*record.observations, digest("c0ffee")))


def fleet(plan: Plan = PLAN, **changed: Callable[[Record], Record]) -> dict[str, Evidence]:
    """Return evidence of equal hosts, some of them changed.

    The records are read as from files: the reader returns the same object for equal texts.
    """
    reader = quick.Reader()
    evidence = {}
    for host in plan.hosts:
        changed_record = changed.get(host.name, lambda record: record)(healthy_record(host.name, plan))
        evidence[host.name] = Evidence(records=(read_record(reader, changed_record),))
    return evidence


def read_record(reader: quick.Reader, record: Record) -> Record:
    """Return the record as the quick reader reads it, or unchanged if that reader does not support it."""
    document = reader.record(json.dumps(to_json(record)).encode())
    return document if document is not None else record


def judge_in_parts(
    plan: Plan, evidence: dict[str, Evidence], packs: Sequence[Pack], *, parts: int, in_full: bool
) -> tuple[FleetStats, JudgedHosts]:
    """Return the statistics and the results of all hosts. The hosts are judged in `parts` groups, which are merged.

    `in_full`: whether all verdicts are created; otherwise passes are only counted.
    """
    context = context_of(plan, packs, {}, in_full=in_full)
    shares = [units(plan)[share::parts] for share in range(parts)]
    gatherers = [Gatherer(context.planned) for _ in range(parts)]
    for gatherer, share in zip(gatherers, shares, strict=True):
        for view in host_views(plan.only([name for unit in share for name in unit]), evidence, packs):
            gatherer.add(view)
    stats, *more = [gatherer.finish() for gatherer in gatherers]
    for other in more:
        stats.update(other)
    stats.complete()
    results = []
    for share in shares:
        judge = HostJudge(context, stats)
        for unit in share:
            judge.add(unit, {name: evidence.get(name, Evidence()) for name in unit})
        results.append(judge.finish())
    first, *others = results
    for result in others:
        first.update(result)
    return stats, first


def serials(evidence: dict[str, Evidence]) -> dict[tuple[str, str], str]:
    return {(host, f"gpu={gpu.index}"): gpu.serial for host, of_host in evidence.items() for gpu in of_host.gpus()}


def not_passing(verdicts: Iterable[Verdict]) -> list[Verdict]:
    return sorted((item for item in verdicts if item.verdict != PASS), key=str)


def hosts_with_findings(
    evidence: dict[str, Evidence], *rules: Criterion, plan: Plan = PLAN, packs: Sequence[Pack] = (), parts: int = 2
) -> list[str]:
    """Return the hosts with a verdict that does not pass.

    Check that three ways give the same findings: counting passes, creating all verdicts, and `judge`.
    """
    used = [*(packs or [pack(*(rules or RULES))])]
    _, counted = judge_in_parts(plan, evidence, used, parts=parts, in_full=False)
    _, whole = judge_in_parts(plan, evidence, used, parts=1, in_full=True)
    assert counted.tally.judged(serials(evidence)) == whole.tally.judged(serials(evidence))
    for name, facts in whole.facts.items():
        measured = tuple(sorted(facts.measured))
        assert replace(counted.facts[name], measured=tuple(sorted(counted.facts[name].measured))) == replace(
            facts, measured=measured
        )
    assert not_passing(counted.verdicts) == not_passing(whole.verdicts) == not_passing(judge(plan, evidence, used))
    for name, report in whole.hosts.items():
        assert (counted.hosts[name].decision, counted.hosts[name].coverage) == (report.decision, report.coverage), name
        assert counted.hosts[name].software == report.software
    return sorted({verdict.host for verdict in counted.verdicts})


def with_readings(first: Any = None, last: Any = None) -> Callable[[Record], Record]:
    """Return a change that replaces the readings of the last snapshot by `last`, and of all others by `first` (None: kept)."""

    def change(record: Record) -> Record:
        *early, late = record.snapshots
        early = [replace(snapshot, metrics=first or snapshot.metrics) for snapshot in early]
        return replace(record, snapshots=(*early, replace(late, metrics=last or late.metrics)))

    return change


def with_constant_readings(**over: Any) -> Callable[[Record], Record]:
    """Return a change that gives every snapshot the readings of `healthy_readings(**over)`."""
    return with_readings(healthy_readings(**over), healthy_readings(**over))


def with_figure(value: Any = SPEED, **over: Any) -> Callable[[Record], Record]:
    """Return a change that gives `memory.bandwidth` this value and the fields in `over`."""

    def change(observation: Observation) -> Observation:
        return replace(observation, value=value, **over) if observation.name == "memory.bandwidth" else observation

    return lambda record: replace(record, observations=tuple(map(change, record.observations)))


def without(name: str) -> Callable[[Record], Record]:
    return lambda record: replace(
        record, observations=tuple(observation for observation in record.observations if observation.name != name)
    )


def with_more(*observations: Observation) -> Callable[[Record], Record]:
    return lambda record: replace(record, observations=(*record.observations, *observations))


def with_digest(value: str) -> Callable[[Record], Record]:
    return lambda record: with_more(digest(value))(without("digest.value")(record))


def with_launch(**over: Any) -> Callable[[Record], Record]:
    return lambda record: replace(record, launches=tuple(replace(launch, **over) for launch in record.launches))


def test_equal_hosts_pass() -> None:
    for parts in (1, 2, 3):
        assert hosts_with_findings(fleet(), parts=parts) == []


LOST = reading(absent="error: gone", name="gpu.thing")
NONE = reading(absent="unsupported: no", name="gpu.clock")
CHANGES: dict[str, tuple[Callable[[Record], Record], list[str]]] = {
    "slower than the floor": (with_figure(3.9e12), [H5]),
    "slower than the fleet": (with_figure(4.1e12), [H5]),
    "slower but within every limit": (with_figure(4.25e12), []),
    "a text instead of a figure": (with_figure("fast"), [H5]),
    "a boolean instead of a figure": (with_figure(True), [H5]),
    "a figure with an error": (with_figure(None, status=ERROR, reason="no"), [H5]),
    "a missing figure": (without("memory.bandwidth"), [H5]),
    "an unplanned error": (with_more(
        Observation(name="gemm.throughput", scope="gpu=0", stage="benchmark", unit="FLOP/s", status=ERROR, reason="no")), [H5]),
    "a benchmark result with the name of a reading": (with_more(builders.observation("gpu.thing", 1, scope="gpu=0")), []),
    "a wrong reading": (with_constant_readings(thing=2), [H5]),
    "a reading that is wrong in the last snapshot": (with_readings(last=healthy_readings(thing=2)), [H5]),
    "a reading lost in the last snapshot": (with_readings(last=healthy_readings(thing=LOST)), [H5]),
    "a missing reading": (with_constant_readings(thing=None), [H5]),
    "a counter that rose": (with_readings(last=healthy_readings(counter=5)), [H5]),
    "a constant higher counter": (with_constant_readings(counter=9), []),
    "a counter that fell": (with_readings(last=healthy_readings(counter=0)), [H5]),
    "a low clock": (with_constant_readings(clock=1.0e9), [H5]),
    "a clock that rose slightly": (with_readings(last=healthy_readings(clock=1.51e9)), []),
    "an unsupported clock": (with_constant_readings(clock=NONE), [H5]),
    "a clock with an error": (with_constant_readings(clock=reading(absent="error: gone", name="gpu.clock")), [H5]),
    "a clock that was low before the last snapshot": (with_readings(healthy_readings(clock=1.0e9)), [H5]),
    "another driver before the last snapshot": (with_readings(healthy_readings(version="550")), [H5]),
    "a text instead of a clock": (with_constant_readings(clock="fast"), [H5]),
    "another driver": (with_constant_readings(version="550"), [H5]),
    "another driver in the last snapshot": (with_readings(last=healthy_readings(version="550")), [H5]),
    "a missing driver version": (with_constant_readings(version=None), [H5]),
    "a driver version with an error": (with_constant_readings(version=reading(absent="error: gone", name="driver.version",
        scope="host")), [H5]),
    "a driver version lost in the last snapshot": (
        with_readings(last=healthy_readings(version=reading(absent="error: gone", name="driver.version", scope="host"))), [H5]),
    "a boolean instead of the number of links": (with_constant_readings(links=True), [H5]),
    "fewer links": (with_constant_readings(links=17), [H5]),
    "another NCCL": (lambda record: replace(record, software={**record.software, "nccl": "2.20"}), [H5]),
    "no NCCL": (lambda record: replace(record, software={}), [H5]),
    "another digest": (with_digest("badc0de"), [H5]),
    "a missing digest": (without("digest.value"), []),
    "the serial of another host": (lambda record: replace(record, gpus=(replace(record.gpus[0], serial="h2-0"),)), ["h2", H5]),
    "another GPU model": (lambda record: replace(record, gpus=(replace(record.gpus[0], name="NVIDIA X"),)), [H5]),
    "a launch that failed": (with_launch(outcome="failed", reason="why"), [H5]),
    "a finished launch with a reason": (with_launch(reason="why"), []),
    "a collector that failed": (with_constant_readings(more=reading(absent="error: x", name="collector.ok",
        scope="collector=nvml")), [H5]),
    "a collector that worked": (with_constant_readings(more=reading(1.0, name="collector.thing", scope="host")), []),
    "a version among the readings": (with_constant_readings(more=reading("2.28.9", name="launch.nccl", scope="host")), []),
    "a GPU without any observation": (lambda record: replace(record, snapshots=(), observations=()), [H5]),
    "a wrong reading of a GPU outside the plan": (with_constant_readings(more=reading(2, name="gpu.thing", scope="gpu=1")), [H5]),
    "a clock lost in the last snapshot": (
        with_readings(last=healthy_readings(clock=reading(absent="error: gone", name="gpu.clock"))), [H5]),
    "a clock unsupported in the last snapshot": (with_readings(last=healthy_readings(clock=NONE)), [H5]),
    "an unsupported driver version": (
        with_constant_readings(version=reading(absent="unsupported: no", name="driver.version", scope="host")), [H5]),
    "another serial in the last snapshot": (
        with_readings(healthy_readings(more=reading("a", name="gpu.serial")),
        healthy_readings(more=reading("b", name="gpu.serial"))), [H5]),
}  # fmt: skip
"""Description -> change of the record of h5, and the hosts that must then have a finding (none if the change is no fault)."""


def assert_gathered(plan: Plan, evidence: dict[str, Evidence], packs: Sequence[Pack], parts: int = 1) -> None:
    """Assert that the gatherer collects the same statistics as adding each host separately.

    The statistics also list NCCL transports over which a bandwidth reaches its limit. The gatherer may leave out fast transports.
    """
    gathered, _ = judge_in_parts(plan, evidence, packs, parts=parts, in_full=False)
    plain = FleetStats(Planned(plan))
    for view in host_views(plan, evidence, packs):
        plain.add_identities(view)
        plain.add_values(view)
    plain.complete()
    assert sorted_statistics(gathered) == sorted_statistics(plain)
    for path in gathered.paths.paths ^ plain.paths.paths:
        assert not slow_transport(path[-1], within=False), "a slow transport must be in both statistics"


def sorted_statistics(stats: FleetStats) -> Any:
    """Return all numbers and versions, sorted so that the order of hosts makes no difference."""
    return (
        {
            key: {at: sorted(evidence) for at, evidence in positions.items()}
            for key, positions in stats.figures._values.items()
        },
        stats.figures._of_gangs,
        {key: sorted(map(str, group.by_count())) for key, group in stats.groups._groups.items()},
        {
            kind: {name: sorted(evidence) for name, evidence in series.items()}
            for kind, series in stats.ranks._series.items()
        },
    )


def on_each_host(change: Callable[[int], Callable[[Record], Record]]) -> dict[str, Callable[[Record], Record]]:
    """Return host -> its change. `change` gets the position of the host in the plan."""
    return {name: change(at) for at, name in enumerate(NAMES)}


def test_gathered_statistics_equal_those_of_hosts_that_are_added_one_by_one() -> None:
    def change_host(at: int) -> Callable[[Record], Record]:
        ranks = builders.observation("straggler.compute", 0.1 * (at + 1), scope="gpu=0", unit="s")
        return lambda record: with_more(ranks)(
            with_figure(SPEED + at)(with_constant_readings(clock=1.5e9 + at, thing=1)(record))
        )

    hosts = on_each_host(change_host)
    for parts in (1, 3):
        assert_gathered(PLAN, fleet(**hosts), [pack(*RULES)], parts)
    assert hosts_with_findings(fleet(**hosts)) == []
    # The same holds if records with equal contents are different objects, and if one host reports text instead of a number.
    assert_gathered(
        PLAN, {name: Evidence(records=(hosts[name](healthy_record(name)),)) for name in NAMES}, [pack(*RULES)]
    )
    for odd in (
        with_figure("fast"), with_more(builders.observation("straggler.compute", "slow", scope="gpu=0")),
        with_more(builders.observation("memory.bandwidth", "fast", scope="host")),
    ):  # fmt: skip
        changed = fleet(**{**hosts, H5: lambda record, odd=odd: odd(hosts[H5](record))})
        assert_gathered(PLAN, changed, [pack(FRACTION, CLOCK)])


def test_slow_host_is_found_whatever_transport_the_other_hosts_use() -> None:
    def with_transport(transport: str, speed: float) -> Callable[[Record], Record]:
        common = {"scope": "host", "size_bytes": 1 << 30, "world_size": 1}
        way = builders.observation("collective.transport", transport, scope="host", world_size=1)
        access = builders.observation("peer_copy.access", True, scope="gpu=0,peer=1")
        return with_more(builders.observation("collective.all_reduce.busbw", speed, **common), way, access)

    rule = criterion(
        "collective.all_reduce.busbw", id="busbw", scope="host", operator="ge", fleet_fraction=0.9, unit="B/s"
    )
    reach = criterion("peer_copy.access", id="reach", value=True, scope="peer")
    everywhere = {name: with_transport("SHM/direct", 3.0e10) for name in NAMES}
    assert hosts_with_findings(fleet(**everywhere | {H5: with_transport("SHM/direct", 1.0e10)}), rule, reach) == [H5]
    elsewhere = {name: with_transport("P2P/CUMEM", 3.0e10) for name in NAMES}
    assert hosts_with_findings(fleet(**elsewhere | {H5: with_transport("SHM/direct", 1.0e10)}), rule, reach) == [H5]


def test_text_instead_of_a_number_fails() -> None:
    for name in (H5, "h1"):
        assert name in hosts_with_findings(fleet(**{name: with_figure("fast")}), FRACTION)
        assert name in hosts_with_findings(fleet(**{name: with_figure(True)}), FRACTION)
    assert hosts_with_findings(fleet(h1=with_figure("fast")), FRACTION, parts=1) == ["h1"], (
        "the text must not remove the figures of the other hosts"
    )


def test_benchmark_result_in_a_snapshot_is_evaluated() -> None:
    change = with_constant_readings(more=reading(SPEED, name="memory.bandwidth", scope="gpu=0"))
    assert hosts_with_findings(fleet(**{H5: change}), FLOOR) == []


def test_figures_with_different_parameters_are_judged_separately() -> None:
    read_too = builders.observation("memory.bandwidth", 4.6e12, scope="gpu=0", unit="B/s", op="read", world_size=1)
    evidence = fleet(**dict.fromkeys(NAMES, with_more(read_too)))
    for rule in (FLOOR, FRACTION, replace(FLOOR, operator="gt")):
        assert hosts_with_findings(evidence, rule) == []
    assert hosts_with_findings(evidence, replace(FLOOR, value=None, same_as_fleet=True)) == []


@pytest.mark.parametrize("operator", ["ge", "gt", "le", "lt"])
def test_value_equal_to_the_limit_fails_only_with_a_strict_operator(operator: str) -> None:
    limit = 4.0e12 if operator in ("ge", "gt") else 5.0e12
    evidence = fleet(**on_each_host(lambda at: with_figure(SPEED + at * 1e9)))
    assert hosts_with_findings(evidence, replace(FLOOR, operator=operator, value=limit)) == []
    wrong = {**on_each_host(lambda at: with_figure(SPEED + at * 1e9)), H5: with_figure(limit)}
    assert hosts_with_findings(fleet(**wrong), replace(FLOOR, operator=operator, value=limit)) == (
        [H5] if "t" in operator else []
    )


@pytest.mark.parametrize(
    ("value", "operator", "wrong"), [("fast", "eq", "slow"), (True, "eq", False), (True, "ge", False), (7, "eq", 8)]
)
def test_benchmark_results_that_are_texts_booleans_or_numbers_are_counted(
    value: Any, operator: str, wrong: Any
) -> None:
    rule = criterion("memory.mode", id="mode", operator=operator, value=value, stage="benchmark")
    healthy, faulty = (with_more(builders.observation("memory.mode", mode, scope="gpu=0")) for mode in (value, wrong))
    hosts = dict.fromkeys(NAMES, healthy)
    assert hosts_with_findings(fleet(**hosts), rule) == []
    assert hosts_with_findings(fleet(**{**hosts, H5: faulty}), rule) == [H5]


@pytest.mark.parametrize("description", CHANGES)
def test_change_of_one_host_gives_findings_on_the_expected_hosts(description: str) -> None:
    change, expected_hosts = CHANGES[description]
    assert hosts_with_findings(fleet(**{H5: change})) == expected_hosts


HEAT = criterion("gpu.heat", id="heat", operator="le", value=90)
REPLAYS = criterion("gpu.repeats", id="replays", operator="le", value=3, delta=True)


def with_unique_readings(at: int, *, heat: Sequence[Any] = (40, 41, 42), replays: Sequence[Any] = (5, 6, 8)) -> Any:
    """Return a change that adds two readings to each of the three snapshots.

    `heat` and `replays` are their values in the three snapshots. `at`/64 is added to numbers, so that hosts with different
    `at` have different values. None adds no reading.
    """

    def metric(name: str, value: Any) -> list[Metric]:
        if isinstance(value, Metric):
            return [value]
        unique = value + at / 64 if type(value) in (int, float) else value
        return [reading(unique, name=name)] if value is not None else []

    def change(record: Record) -> Record:
        snapshots = [
            replace(item, metrics=(*item.metrics, *metric(HEAT.name, hot), *metric(REPLAYS.name, count)))
            for item, hot, count in zip(record.snapshots, heat, replays, strict=True)
        ]
        return replace(record, snapshots=tuple(snapshots))

    return change


LOST_HEAT = reading(absent="error: gone", name=HEAT.name)
TWO_HEATS = Metric(name=HEAT.name, unit="1", values={"gpu=0": 40, "gpu=1": 99})


@pytest.mark.parametrize(
    ("readings", "expected_hosts"),
    [
        ({}, []),
        ({"heat": (40, 41, 95)}, [H5]),
        ({"heat": (95, 41, 42)}, [H5]),
        ({"heat": (40, True, 42)}, [H5]),
        ({"heat": ("cold", 41, 42)}, [H5]),
        ({"heat": (40, 41, LOST_HEAT)}, [H5]),
        ({"heat": (40, LOST_HEAT, 42)}, [H5]),
        ({"heat": (40, 41, TWO_HEATS)}, [H5]),
        ({"heat": (40, 41, None)}, [H5]),
        ({"replays": (5, 6, 10)}, [H5]),
        ({"replays": (5, 1, 2)}, [H5]),
        ({"replays": (5, "many", 8)}, [H5]),
        ({"replays": (5, 6, None)}, [H5]),
        ({"replays": (None, 6, 8)}, [H5]),
    ],
)
def test_fault_in_a_reading_that_differs_between_hosts_fails_only_the_host_with_the_fault(
    readings: dict[str, Any], expected_hosts: list[str]
) -> None:
    changes = {name: with_unique_readings(at, **(readings if name == H5 else {})) for at, name in enumerate(NAMES)}
    assert hosts_with_findings(fleet(**changes), HEAT, REPLAYS) == expected_hosts


def test_differing_readings_by_pci_address_belong_to_the_gpu_at_that_address() -> None:
    def by_address(at: int, bus_id: str = "0000:00:00.0") -> Any:
        value = reading(40 + at, name=HEAT.name, scope="pci=0000:00:00.0")

        def change(record: Record) -> Record:
            return with_constant_readings(more=value)(
                replace(record, gpus=(replace(record.gpus[0], pci_bus_id=bus_id),))
            )

        return change

    changes = {name: by_address(at, "0000:77:00.0" if name == H5 else "0000:00:00.0") for at, name in enumerate(NAMES)}
    assert hosts_with_findings(fleet(**changes), HEAT) == [H5]


def test_records_that_the_quick_reader_did_not_read_give_the_same_result() -> None:
    for change, expected_hosts in (
        (with_constant_readings(thing=2), [H5]),
        (with_constant_readings(version="550"), [H5]),
        (with_constant_readings(clock=1.0e9), [H5]),
        (with_constant_readings(), []),
    ):
        evidence = {
            name: Evidence(records=(change(healthy_record(name)) if name == H5 else healthy_record(name),))
            for name in NAMES
        }
        assert hosts_with_findings(evidence) == expected_hosts


def test_integers_and_floats_are_compared_by_value() -> None:
    whole = dict.fromkeys(NAMES, with_constant_readings(clock=1500))
    assert hosts_with_findings(fleet(**whole), CLOCK) == []
    assert hosts_with_findings(fleet(**{**whole, H5: with_constant_readings(clock=1500.5)}), CLOCK) == []


def test_hosts_with_the_gpu_model_of_the_inventory_pass() -> None:
    plan = one_figure_plan(*NAMES, rackproof_gpu_model="h200-sxm")
    assert hosts_with_findings(fleet(plan), plan=plan) == []
    assert hosts_with_findings(fleet(plan), BUSBW_FLOOR, plan=plan) == []


def test_text_instead_of_a_number_affects_no_other_host() -> None:
    words = builders.observation("memory.bandwidth", "fast", scope="host")
    ranks = builders.observation("straggler.compute", "slow", scope="gpu=0")
    for more in (words, ranks):
        evidence = fleet(h1=with_more(more))
        assert set(hosts_with_findings(evidence)) <= {"h1"}


def test_host_without_a_valid_host_record_does_not_pass() -> None:
    for change in (
        lambda _: Evidence(),
        lambda of_host: replace(of_host, problem="unreachable"),
        lambda of_host: replace(of_host, records=(replace(of_host.records[0], gang="r1"),)),
    ):
        evidence = fleet()
        evidence[H5] = change(evidence[H5])
        assert hosts_with_findings(evidence) == [H5]


def test_hosts_with_an_invalid_baseline_do_not_pass() -> None:
    plan = replace(PLAN, baseline=PlannedBaseline(directory="b", digest="0" * 64))
    evidence = {name: replace(of_host, baseline=HostBaseline(problem="x")) for name, of_host in fleet(plan).items()}
    assert hosts_with_findings(evidence, plan=plan) == NAMES


@pytest.mark.parametrize(("count", "expected_hosts"), [(2, ["h1", "h2"]), (3, [])])
def test_fleet_too_small_for_a_median_is_inconclusive(count: int, expected_hosts: list[str]) -> None:
    plan = one_figure_plan(*NAMES[:count])
    assert hosts_with_findings(fleet(plan), FRACTION, plan=plan) == expected_hosts
    # In a fleet that is too small, an optional criterion has no verdict.
    assert hosts_with_findings(fleet(plan), replace(FRACTION, optional=True), plan=plan) == []


@pytest.mark.parametrize("count", [1, 2, 3])
def test_digests_are_compared_if_there_are_at_least_two_hosts(count: int) -> None:
    plan = one_figure_plan(*NAMES[:count])
    evidence = fleet(plan, **{NAMES[0]: with_digest("badc0de")}) if count == 2 else fleet(plan)
    expected_hosts = ["h1", "h2"] if count == 2 else []
    assert hosts_with_findings(evidence, VERSION, LINKS, NCCL, plan=plan) == expected_hosts
    assert hosts_with_findings(fleet(plan), VERSION, LINKS, NCCL, plan=plan) == []
    facts = judge_in_parts(plan, evidence, [pack(VERSION)], parts=1, in_full=False)[1].facts
    assert [of_host.uncompared_digests for of_host in facts.values()] == [
        (("benchmark", "gpu=0"),) if count == 1 else ()
    ] * count


def test_tie_of_two_versions_fails_every_host() -> None:
    plan = one_figure_plan(*NAMES[:4])
    change = with_constant_readings(version="550")
    assert hosts_with_findings(fleet(plan, h1=change, h3=change), VERSION, plan=plan) == NAMES[:4]
    assert hosts_with_findings(fleet(plan, h1=change), VERSION, plan=plan) == ["h1"]


def test_value_that_only_other_hosts_report_is_inconclusive() -> None:
    change = with_constant_readings(version=None)
    assert hosts_with_findings(fleet(**dict.fromkeys(NAMES, change)), VERSION) == []
    assert hosts_with_findings(fleet(h1=change, h2=change), VERSION) == ["h1", "h2"]
    assert hosts_with_findings(fleet(h1=change), replace(VERSION, optional=True)) == []
    assert hosts_with_findings(fleet(h1=with_constant_readings(version=reading(absent="unsupported: no", name="driver.version",
    scope="host"))),
                   replace(VERSION, optional=True)) == []  # fmt: skip
    assert hosts_with_findings(fleet(h1=change), replace(VERSION, same_as_fleet=False)) == []
    lost, none = (healthy_readings(version=reading(absent=why, name="driver.version", scope="host"))
                  for why in ("error: gone", "unsupported: no"))  # fmt: skip
    for first, last, expected_hosts in ((lost, none, []), (none, lost, ["h1"]), (lost, lost, ["h1"])):
        assert (
            hosts_with_findings(fleet(h1=with_readings(first, last)), replace(VERSION, optional=True)) == expected_hosts
        )


@pytest.mark.parametrize(
    ("rule", "has_findings"),
    [
        (criterion(id="own"), False),
        (criterion("gpu.nothing", id="own"), True), (criterion("gpu.nothing", id="own", optional=True), True),
        (criterion("memory.nothing", id="own"), True), (criterion("memory.nothing", id="own", optional=True), False),
        (criterion("memory.nothing", id="own", fleet_fraction=0.9, operator="ge"), True),
        (criterion("gpu.nothing", id="own", fleet_fraction=0.9, operator="ge"), True),
        (criterion("driver.nothing", id="own", scope="host", value=None, same_as_fleet=True), True),
        (criterion("memory.nothing", id="own", value=None, same_as_fleet=True), True),
        (criterion("memory.nothing", id="own", value=None, same_as_fleet=False), False),
        (criterion("memory.bandwidth", id="own", value=None, operator="ge", baseline=VsBaseline(fraction=0.9)), False),
        (criterion("memory.bandwidth", id="own", operator="ge", delta=True), True),
        (criterion("gpu.clock", id="own", operator="ge", delta=True, fleet_fraction=0.9), True),
        (criterion("memory.bandwidth", id="own", operator="ge", variable="fabric_bytes_per_second"), True),
        (criterion("memory.bandwidth", id="own", value=None, same_as_fleet=True), False),
    ],
)  # fmt: skip
def test_criterion_of_the_operator_must_judge_something(rule: Criterion, has_findings: bool) -> None:
    """There are three exceptions.

    - The criterion is optional and on a benchmark result.
    - The criterion is disabled (`same_as_fleet` is False).
    - The criterion compares with a baseline, and the run has none.
    """
    packs = [pack(FLOOR), pack(rule, name="mine", chosen=True)]
    chosen = [packs[0], replace(packs[1], criteria=(replace(rule, origin="mine"),))]
    assert hosts_with_findings(fleet(), packs=chosen) == (NAMES if has_findings else [])
    rehearsal = replace(PLAN, rehearsal=True)
    rehearsed = [pack(FLOOR, name="rehearsal"), chosen[1]]
    hosts = hosts_with_findings(fleet(rehearsal), plan=rehearsal, packs=rehearsed)
    assert hosts in (NAMES, [])  # in a rehearsal, a criterion that matches nothing may have no verdict


def test_criterion_that_matches_nothing_is_inconclusive_beside_a_criterion_that_matches() -> None:
    unmatched = criterion("memory.nothing", id="own", origin="mine")
    for rule in (FLOOR, FRACTION, replace(FLOOR, value=None, same_as_fleet=True)):
        mine = pack(replace(rule, origin="mine"), unmatched, name="mine", chosen=True)
        assert hosts_with_findings(fleet(), packs=[pack(THING), mine]) == NAMES


def test_shipped_criterion_that_matches_nothing_is_inconclusive_if_it_judges_readings() -> None:
    for rule in (criterion("memory.nothing"), criterion("memory.nothing", fleet_fraction=0.9, operator="ge")):
        assert hosts_with_findings(fleet(), rule) == []
    assert hosts_with_findings(fleet(), criterion("gpu.nothing")) == NAMES
    assert hosts_with_findings(fleet(), criterion("gpu.nothing", fleet_fraction=0.9, operator="ge")) == NAMES
    # An optional reading of a GPU may be missing only if the host reports it as unsupported.
    rule = criterion("gpu.nothing", fleet_fraction=0.9, operator="ge", optional=True)
    assert hosts_with_findings(fleet(), rule) == NAMES
    # Readings of a part that a host need not have, such as a disk, may be missing.
    assert hosts_with_findings(fleet(), replace(rule, scope="disk")) == []


@pytest.mark.parametrize(
    ("rule", "values", "expected_hosts"),
    [
        (replace(FLOOR, best_of_run=True), (SPEED + 1, SPEED), []), (replace(FLOOR, best_of_run=True), (SPEED, SPEED + 1), []),
        (FLOOR, (SPEED + 1, SPEED), []), (FLOOR, (SPEED, SPEED + 1), []),
        (FLOOR, (3.0e12, SPEED), NAMES), (FLOOR, (SPEED, SPEED), []),
        (replace(FLOOR, best_of_run=True), (SPEED, SPEED), []),
        (FRACTION, (SPEED, SPEED), []), (FRACTION, (4.26e12, SPEED), []),
        (replace(FLOOR, value=None, same_as_fleet=True), (SPEED, SPEED), []),
        (replace(FLOOR, value=None, same_as_fleet=True), (4.26e12, SPEED), []),
    ],
)  # fmt: skip
def test_repeated_figure_fails_if_one_of_its_values_fails(
    rule: Criterion, values: tuple[float, float], expected_hosts: list[str]
) -> None:
    def repeat_figure(record: Record) -> Record:
        one = next(observation for observation in record.observations if observation.name == "memory.bandwidth")
        launches = tuple(replace(record.launches[0], number=number) for number in range(len(values)))
        return replace(record, observations=tuple(replace(one, value=value) for value in values), launches=launches)

    assert hosts_with_findings(fleet(**dict.fromkeys(NAMES, repeat_figure)), rule) == expected_hosts


def test_figure_may_be_unsupported_if_the_pack_lists_it_in_lacks() -> None:
    none = with_figure(None, status=UNSUPPORTED, reason="no")
    evidence = fleet(**dict.fromkeys(NAMES, none))
    lacking = pack(FLOOR, FRACTION, lacks={"memory.bandwidth": {"op": ("copy",)}})
    assert hosts_with_findings(evidence, packs=[lacking]) == []
    assert hosts_with_findings(evidence, packs=[pack(FLOOR)]) == NAMES
    # The same applies to a criterion that compares hosts with the fleet.
    alike = replace(FLOOR, value=None, same_as_fleet=True)
    assert hosts_with_findings(evidence, packs=[replace(lacking, criteria=(alike,))]) == []

    def add_unsupported_figure(record: Record) -> Record:
        one = next(observation for observation in record.observations if observation.name == "memory.bandwidth")
        return with_more(replace(one, value=None, status=UNSUPPORTED, reason="no"))(record)

    assert (
        hosts_with_findings(
            fleet(**dict.fromkeys(NAMES, add_unsupported_figure)), packs=[replace(lacking, criteria=(alike,))]
        )
        == []
    )


def test_limits_depend_on_the_gpu_model() -> None:
    def change_model(record: Record) -> Record:
        return replace(record, gpus=(replace(record.gpus[0], name="NVIDIA X"),))

    packs = [pack(FLOOR, THING), pack(replace(FLOOR, value=5e12), name="x", gpu_names=("NVIDIA X",))]
    assert hosts_with_findings(fleet(h2=change_model, h7=change_model), packs=packs) == ["h2", "h7"]
    fast = [packs[0], replace(packs[1], criteria=(replace(FLOOR, value=1e12),))]
    assert hosts_with_findings(fleet(h2=change_model), packs=fast) == []
    assert hosts_with_findings(fleet(h2=lambda record: with_figure(2e12)(change_model(record))), packs=fast) == []


def test_equal_versions_pass_on_hosts_that_require_them_and_fail_on_hosts_that_require_another() -> None:
    hosts = [replace(host, driver_version="570" if host.name < "h6" else "580") for host in PLAN.hosts]
    plan = replace(PLAN, hosts=tuple(hosts))
    required = criterion("driver.version", id="required", scope="host", value=None, variable="driver_version")
    evidence = fleet(plan, h2=with_constant_readings(version="570.86"))
    assert hosts_with_findings(evidence, required, plan=plan, parts=1) == ["h6", "h7", "h8", "h9"]


def test_reading_by_pci_address_belongs_to_the_gpu_at_that_address() -> None:
    rule = criterion("gpu.width", id="width", value=16)
    with_width = with_constant_readings(more=reading(16, name="gpu.width", scope="pci=0000:00:00.0"))
    assert hosts_with_findings(fleet(**dict.fromkeys(NAMES, with_width)), rule) == []

    def move_gpu(record: Record) -> Record:
        return with_width(replace(record, gpus=(replace(record.gpus[0], pci_bus_id="0000:77:00.0"),)))

    assert hosts_with_findings(fleet(**{**dict.fromkeys(NAMES, with_width), H5: move_gpu}), rule) == [H5]


def test_criterion_on_the_fabric_applies_only_if_the_inventory_states_the_rate_of_the_fabric() -> None:
    rule = criterion("memory.bandwidth", id="fabric", operator="ge", variable="fabric_bytes_per_second", fraction=0.5)
    for gbps, expected_hosts in ((0, []), (8, []), (80_000, NAMES)):
        plan = one_figure_plan(*NAMES, rackproof_fabric_gbps=gbps) if gbps else PLAN
        assert hosts_with_findings(fleet(plan), rule, plan=plan) == expected_hosts


# Gangs (the hosts of one multi-node launch)


def gang_plan(count: int = 6, size: int = 3) -> Plan:
    """Return a plan of `count` hosts in gangs of `size`. It expects one figure of each gang, each pair of hosts and each GPU."""
    plan = builders.plan(*NAMES[:count], profile="smoke", gpu_count=1)
    names = ("collective.all_reduce.busbw", "pairs.bandwidth", "memory.bandwidth")
    kept = [
        item for item in plan.expected if item.name in names and item.params.get("size_bytes") in (67_108_864, None)
    ]
    kept = [item for item in kept if item.params.get("placement") in (None, "out_of_place") and item.scope != "pair"]
    hosts = tuple(replace(host, gang=f"g{at // size}", rack=f"g{at // size}") for at, host in enumerate(plan.hosts))
    return replace(plan, hosts=hosts, expected=tuple(item for item in kept if item.params.get("op") in (None, "copy")))


GANGS = gang_plan()
BUSBW = criterion(
    "collective.*.busbw", id="busbw", scope="gang", operator="ge", fleet_fraction=0.5, unit="B/s", optional=True
)
BUSBW_FLOOR = criterion("collective.*.busbw", id="busbw-floor", scope="gang", operator="ge", value=1e11, unit="B/s")
GANG_RULES = (FLOOR, BUSBW, BUSBW_FLOOR)


def gang_fleet(
    plan: Plan = GANGS, *, drivers: Mapping[str, str] | None = None, **changed: Callable[[Record], Record]
) -> dict[str, Evidence]:
    """Return evidence of healthy hosts, each with a host record and a gang record.

    Args:
        plan: the plan of the gangs.
        drivers: host -> driver version in its host record; 570 if not given.
        changed: host -> change of its gang record.
    """
    reader, evidence = quick.Reader(), {}
    for host in plan.hosts:
        host_record, gang_record = builders.records(plan, host.name)
        metrics = healthy_readings(version=(drivers or {}).get(host.name, "570"))
        snapshots = tuple(replace(snapshot, metrics=metrics) for snapshot in host_record.snapshots)
        host_record = replace(host_record, snapshots=snapshots)
        gang_record = changed.get(host.name, lambda record: record)(gang_record)
        evidence[host.name] = Evidence(records=(read_record(reader, host_record), read_record(reader, gang_record)))
    return evidence


def gang_figure(name: str, value: Any, **over: Any) -> Callable[[Record], Record]:
    def change(observation: Observation) -> Observation:
        return replace(observation, value=value, **over) if observation.name == name else observation

    return lambda record: replace(record, observations=tuple(map(change, record.observations)))


def gang_hosts_with_findings(evidence: dict[str, Evidence], *rules: Criterion) -> list[str]:
    result = [hosts_with_findings(evidence, *(rules or GANG_RULES), plan=GANGS, parts=parts) for parts in (1, 2)]
    assert result[0] == result[1]
    return result[0]


FIRST, SECOND = ["h1", "h2", "h3"], ["h4", "h5", "h6"]


@pytest.mark.parametrize(
    ("change", "expected_hosts"),
    [
        (gang_figure("collective.all_reduce.busbw", 1.0e10), ["h1", "h2", "h3"]),
        (gang_figure("collective.all_reduce.busbw", 3.0e11), []),
        (gang_figure("pairs.bandwidth", None, status=ERROR, reason="lost"), ["h2"]),
        (gang_figure("pairs.bandwidth", None, status=UNSUPPORTED, reason="no"), ["h2"]),
        (without("pairs.bandwidth"), ["h2"]),
        (with_launch(members=("h1", "h2")), ["h2"]),
        (with_launch(members=("h3", "h2", "h1")), []),
        (with_launch(outcome="failed", reason="why"), ["h2"]),
        (lambda record: replace(record, gang="g1"), []),
    ],
)  # fmt: skip
def test_change_of_one_host_of_a_gang_gives_findings_on_the_expected_hosts(
    change: Any, expected_hosts: list[str]
) -> None:
    assert gang_hosts_with_findings(gang_fleet(h2=change)) == expected_hosts


def test_equal_readings_pass_in_one_gang_and_fail_in_another() -> None:
    rules = (VERSION, replace(VERSION, id="of-rack", among="rack"))
    for drivers, expected_hosts in (
        ({"h5": "550", "h6": "550"}, ["h4"]),
        ({"h4": "550", "h5": "550"}, ["h6"]),
        ({"h1": "550", "h2": "550", "h6": "550"}, ["h3", "h6"]),
        (dict.fromkeys(SECOND, "550"), []),
    ):
        evidence = gang_fleet(drivers=drivers)
        assert gang_hosts_with_findings(evidence, *rules) == expected_hosts
        assert_gathered(GANGS, evidence, [pack(*rules)])


def test_equal_readings_pass_in_one_nvlink_domain_and_fail_in_another_of_the_same_rack() -> None:
    """All hosts up to h5 have the same number of links, but h5 is in the second domain, whose other hosts have fewer links."""
    domains = {name: "d1" if name < H5 else "d2" for name in NAMES}
    plan = replace(PLAN, hosts=tuple(replace(host, nvlink_domain=domains[host.name]) for host in PLAN.hosts))
    fewer = {name: with_constant_readings(links=17) for name in NAMES if name > H5}
    rule = replace(LINKS, id="of-domain", among="domain")
    evidence = fleet(plan, **fewer)
    hosts_with_findings(evidence, rule, plan=plan, parts=1)
    failed = [
        item for item in judge(plan, evidence, [pack(rule)]) if item.criterion == rule.id and item.verdict != PASS
    ]
    assert [item.host for item in failed] == [H5]


def test_healthy_gangs_pass_and_a_slow_gang_fails() -> None:
    assert gang_hosts_with_findings(gang_fleet()) == []
    turned = {
        name: lambda record: replace(record, observations=record.observations[::-1]) for name in (*FIRST, *SECOND)
    }
    assert gang_hosts_with_findings(gang_fleet(**turned)) == []
    assert (
        gang_hosts_with_findings(
            gang_fleet(), *GANG_RULES, replace(BUSBW, id="alike", fleet_fraction=None, same_as_fleet=True)
        )
        == []
    )
    slow = gang_figure("collective.all_reduce.busbw", 1.0e10)
    assert gang_hosts_with_findings(gang_fleet(h4=slow, h5=slow, h6=slow)) == SECOND


def test_slow_pairs_fail_one_host() -> None:
    def slow_pairs(record: Record) -> Record:
        return replace(
            record,
            observations=tuple(
                replace(observation, value=float(observation.value or 0) / 9)
                if observation.name == "pairs.bandwidth"
                else observation
                for observation in record.observations
            ),
        )

    assert gang_hosts_with_findings(gang_fleet(h5=slow_pairs)) == ["h5"]


def test_missing_pairs_of_the_first_host_affect_no_other_host() -> None:
    assert gang_hosts_with_findings(gang_fleet(h1=without("pairs.bandwidth"))) == ["h1"]


@pytest.mark.parametrize("fast", [("NET/IB/0/GDRDMA", "NET/Socket/0"), ("NET/Socket/0", "NET/IB/0/GDRDMA")])
def test_slow_gang_is_found_although_another_gang_is_fast_with_the_same_transport(fast: tuple[str, str]) -> None:
    def with_transport(transport: str, speed: float) -> Callable[[Record], Record]:
        def change(record: Record) -> Record:
            reading = next(reading for reading in record.observations if reading.name == "collective.all_reduce.busbw")
            params = {**reading.params, "transport": transport}
            way = builders.observation("collective.transport", transport, scope=reading.scope, stage=reading.stage)
            return with_more(replace(way, params=params))(gang_figure(reading.name, speed, params=params)(record))

        return change

    plan = gang_plan(9, 3)
    ways = [(fast[0], 2e11), (fast[1], 2e11), ("NET/Socket/0", 3e10)]
    evidence = gang_fleet(plan, **{name: with_transport(*ways[at // 3]) for at, name in enumerate(NAMES)})
    for rule in (BUSBW, BUSBW_FLOOR):
        stats, _ = judge_in_parts(plan, evidence, [pack(rule)], parts=2, in_full=False)
        assert hosts_with_findings(evidence, rule, plan=plan) == NAMES[6:]
        assert {path[-1] for path in stats.paths.paths} - {"NET/IB/0/GDRDMA"} == {"NET/Socket/0"}


def test_figures_of_gangs_are_gathered() -> None:
    own = {
        name: gang_figure("collective.all_reduce.busbw", 3.0e11 if name in FIRST else 2.9e11)
        for name in (*FIRST, *SECOND)
    }
    alike = replace(BUSBW, id="alike", fleet_fraction=None, same_as_fleet=True)
    for rules in (GANG_RULES, (alike,)):
        assert_gathered(GANGS, gang_fleet(**own), [pack(*rules)])


PAIRS = criterion("pairs.bandwidth", id="pairs", scope="partner", operator="ge", value=2e10, unit="B/s")


def with_first_pair(**over: Any) -> Callable[[Record], Record]:
    """Return a change of a record that sets these fields of its first `pairs.bandwidth`."""

    def change(record: Record) -> Record:
        items = list(record.observations)
        at = next(at for at, item in enumerate(items) if item.name == PAIRS.name)
        items[at] = replace(items[at], **over)
        return replace(record, observations=tuple(items))

    return change


def with_first_pair_twice(record: Record) -> Record:
    """Return the record with a second bandwidth of the first pair of hosts, before all other observations."""
    first = next(item for item in record.observations if item.name == PAIRS.name)
    return replace(record, observations=(replace(first, value=4e10), *record.observations))


@pytest.mark.parametrize(
    ("change", "expected_hosts"),
    [
        (lambda record: record, []),
        (with_first_pair(value=1e9), ["h5", "h6"]),
        (with_first_pair(value="fast"), ["h5"]),
        (with_first_pair(value=True), ["h5", "h6"]),
        (with_first_pair(value=None, status=ERROR, reason="lost"), ["h5"]),
        (with_first_pair(unit="bit/s"), ["h5"]),
        (with_first_pair(params={"size_bytes": 8}), ["h5"]),
        (with_first_pair_twice, ["h5"]),
    ],
)
def test_slow_or_invalid_bandwidth_of_a_pair_is_found(
    change: Callable[[Record], Record], expected_hosts: list[str]
) -> None:
    rules = (FLOOR, PAIRS, replace(PAIRS, id="one-partner", where={"partner": "h2"}, value=3e10))
    assert gang_hosts_with_findings(gang_fleet(h5=change), *rules) == expected_hosts
    first_without = gang_hosts_with_findings(gang_fleet(h1=without(PAIRS.name), h5=change), *rules)
    assert first_without == ["h1", *expected_hosts], (
        "missing pairs of the first host must not change the verdicts on other hosts"
    )
