"""The first look at a large fleet: whom it flags, and that what it counts is what the judge says, host by host.

Whoever is flagged for nothing is only judged at length; whoever is not flagged though something is wrong would be accepted.
So each test says exactly who is flagged.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest

from fleet.judge import expectations
from fleet.judge.criteria import Criterion, Pack, VsBaseline
from fleet.judge.evidence import Evidence, HostView, Planned
from fleet.judge.fleet_stats import Known
from fleet.judge.judge import judge
from fleet.judge.localization import judge_pairs
from fleet.judge.pack_selection import criteria_of, packs_for
from fleet.judge.survey import Survey, kinds_of
from fleet.judge.tally import Tally
from schemas import quick
from schemas.baselines import HostBaseline, PlannedBaseline
from schemas.plans import Plan
from schemas.records import ERROR, UNSUPPORTED, Metric, Observation, Record, Snapshot, to_json
from schemas.reports import PASS, Judged, Verdict
from tests import builders
from tests.unit.test_judge_edges import criterion, left, pack, reading, small

COUNT = 9
NAMES = [f"h{number}" for number in range(1, COUNT + 1)]
ODD = "h5"
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
PLAN = small(*NAMES)


def shown(**over: Any) -> tuple[Metric, ...]:
    """What a healthy host's collectors read."""
    values = {"thing": 1, "counter": 4, "clock": 1.5e9, "version": "570", "links": 18} | over
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


def record(host: str, plan: Plan = PLAN) -> Record:
    made = left(plan, host, *shown(), software={"nccl": "2.28"}).records[0]
    return replace(made, observations=(*made.observations, digest("c0ffee")))


def fleet(plan: Plan = PLAN, **changed: Callable[[Record], Record]) -> dict[str, Evidence]:
    """Hosts that are alike, but for what is done to some; read as hosts' files are, so that equal words are one object."""
    reader = quick.Reader()
    told = {}
    for host in plan.hosts:
        one = changed.get(host.name, lambda made: made)(record(host.name, plan))
        told[host.name] = Evidence(records=(read(reader, one),))
    return told


def read(reader: quick.Reader, one: Record) -> Record:
    found = reader.record(json.dumps(to_json(one)).encode())
    return found if found is not None else one


def look(plan: Plan, told: dict[str, Evidence], packs: Sequence[Pack], parts: int = 1) -> Survey:
    """The first look, in several parts, up to where the whole fleet is known."""
    planned, places = Planned(plan), {host.name: at for at, host in enumerate(plan.hosts)}
    surveys = []
    for share in range(parts):
        survey = Survey(planned, places)
        for unit in units(plan)[share::parts]:
            part = plan.only(unit)
            views = [HostView(part, host, told.get(host.name, Evidence()), packs) for host in part.hosts]
            looked = [survey.look(view) for view in views]
            well = [one for one in looked if one is not None]
            survey.flagged |= {view.host.name for view, one in zip(views, looked, strict=True) if one is None}
            more: list[Verdict] = []
            if len(well) == len(views) and part.hosts[0].gang:
                more = [
                    *judge_pairs(views, ()),
                    *expectations.divided(part, {view.host.name: view.evidence for view in views}),
                ]
            if len(well) < len(views) or any(verdict.verdict != PASS for verdict in more):
                survey.uneasy |= set(unit)
                more = []
            survey.take(well, more)
        survey.forget()
        surveys.append(survey)
    first, *others = surveys
    for other in others:
        first.update(other)
    names = [host.name for host in plan.hosts]
    first.settle(names)
    first.commit(names, {host: gang for gang in plan.gangs().values() for host in gang})
    return first


def units(plan: Plan) -> list[tuple[str, ...]]:
    return [*plan.gangs().values()] or [(host.name,) for host in plan.hosts]


def rows(plan: Plan, told: dict[str, Evidence], packs: Sequence[Pack], survey: Survey) -> tuple[Judged, ...]:
    """What the first look counted, and what the full judgement of those that are not well adds."""
    tally = survey.tally
    for unit in units(plan):
        if survey.uneasy.isdisjoint(unit):
            continue
        part = plan.only(unit)
        evidence = {name: told.get(name, Evidence()) for name in unit}
        for verdict in judge(part, evidence, packs, survey.known, evidence.keys() - survey.flagged):
            host = part.host(verdict.host)
            used = criteria_of(packs_for(part, host, evidence[verdict.host].gpus(), packs)[0])
            if not survey.counted(verdict, used):
                tally.add(verdict)
    return tally.judged(serials(told))


def serials(told: dict[str, Evidence]) -> dict[tuple[str, str], str]:
    return {(host, f"gpu={gpu.index}"): gpu.serial for host, one in told.items() for gpu in one.gpus()}


def plain(plan: Plan, told: dict[str, Evidence], packs: Sequence[Pack]) -> tuple[Judged, ...]:
    """The same by the judge alone."""
    tally = Tally(Planned(plan), {host.name: at for at, host in enumerate(plan.hosts)})
    for verdict in judge(plan, told, packs):
        tally.add(verdict)
    return tally.judged(serials(told))


def flagged(
    told: dict[str, Evidence], *rules: Criterion, plan: Plan = PLAN, packs: Sequence[Pack] = (), parts: int = 2
) -> list[str]:
    """Whom the first look flags; after it was held against the judge."""
    used = [*(packs or [pack(*(rules or RULES))])]
    survey = look(plan, told, used, parts)
    found = sorted(survey.flagged)
    assert rows(plan, told, used, survey) == plain(plan, told, used)
    return found


def with_readings(first: Any = None, last: Any = None) -> Callable[[Record], Record]:
    """Other readings in the first snapshot and in the last."""

    def change(made: Record) -> Record:
        one, two = made.snapshots
        return replace(
            made, snapshots=(replace(one, metrics=first or one.metrics), replace(two, metrics=last or two.metrics))
        )

    return change


def both(**over: Any) -> Callable[[Record], Record]:
    return with_readings(shown(**over), shown(**over))


def with_figure(value: Any = SPEED, **over: Any) -> Callable[[Record], Record]:
    def one(seen: Observation) -> Observation:
        return replace(seen, value=value, **over) if seen.name == "memory.bandwidth" else seen

    return lambda made: replace(made, observations=tuple(map(one, made.observations)))


def without(name: str) -> Callable[[Record], Record]:
    return lambda made: replace(made, observations=tuple(seen for seen in made.observations if seen.name != name))


def with_more(*seen: Observation) -> Callable[[Record], Record]:
    return lambda made: replace(made, observations=(*made.observations, *seen))


def with_digest(value: str) -> Callable[[Record], Record]:
    return lambda made: with_more(digest(value))(without("digest.value")(made))


def with_launch(**over: Any) -> Callable[[Record], Record]:
    return lambda made: replace(made, launches=tuple(replace(launch, **over) for launch in made.launches))


def test_nobody_is_flagged_where_all_are_alike() -> None:
    for parts in (1, 2, 3):
        assert flagged(fleet(), parts=parts) == []


LOST = reading(absent="error: gone", name="gpu.thing")
NONE = reading(absent="unsupported: no", name="gpu.clock")
FAULTS: dict[str, tuple[Callable[[Record], Record], list[str]]] = {
    "slower than the floor": (with_figure(3.9e12), [ODD]),
    "slower than the fleet": (with_figure(4.1e12), [ODD]),
    "a little slower": (with_figure(4.25e12), []),
    "a text for a figure": (with_figure("fast"), [ODD]),
    "a flag for a figure": (with_figure(True), [ODD]),
    "a figure that could not be had": (with_figure(None, status=ERROR, reason="no"), [ODD]),
    "a figure that is not there": (without("memory.bandwidth"), [ODD]),
    "an error that nobody asked for": (with_more(
        Observation(name="gemm.throughput", scope="gpu=0", stage="benchmark", unit="FLOP/s", status=ERROR, reason="no")), [ODD]),
    "what no benchmark makes": (with_more(builders.observation("gpu.thing", 1, scope="gpu=0")), [ODD]),
    "a reading that is wrong": (both(thing=2), [ODD]),
    "a reading that is wrong later": (with_readings(last=shown(thing=2)), [ODD]),
    "a reading that is lost": (with_readings(last=shown(thing=LOST)), [ODD]),
    "a reading that is missing": (both(thing=None), [ODD]),
    "a counter that rose": (with_readings(last=shown(counter=5)), [ODD]),
    "a counter that stands higher": (both(counter=9), []),
    "a counter that fell": (with_readings(last=shown(counter=0)), [ODD]),
    "a clock that is low": (both(clock=1.0e9), [ODD]),
    "a clock that changed": (with_readings(last=shown(clock=1.51e9)), [ODD]),
    "a clock that is not told": (both(clock=NONE), []),
    "a clock that is lost": (both(clock=reading(absent="error: gone", name="gpu.clock")), [ODD]),
    "a clock that was low earlier": (with_readings(shown(clock=1.0e9)), [ODD]),
    "a driver that was another earlier": (with_readings(shown(version="550")), [ODD]),
    "a clock told in words": (both(clock="fast"), [ODD]),
    "another driver": (both(version="550"), [ODD]),
    "another driver later": (with_readings(last=shown(version="550")), [ODD]),
    "a driver that is not told": (both(version=None), [ODD]),
    "a driver that is lost": (both(version=reading(absent="error: gone", name="driver.version", scope="host")), [ODD]),
    "a driver that is lost later": (
        with_readings(last=shown(version=reading(absent="error: gone", name="driver.version", scope="host"))), [ODD]),
    "as many links as others, as a flag": (both(links=True), [ODD]),
    "fewer links": (both(links=17), [ODD]),
    "another NCCL": (lambda made: replace(made, software={"nccl": "2.20"}), [ODD]),
    "no NCCL": (lambda made: replace(made, software={}), [ODD]),
    "other bits": (with_digest("badc0de"), [ODD]),
    "no bits": (without("digest.value"), []),
    "another's serial": (lambda made: replace(made, gpus=(replace(made.gpus[0], serial="h2-0"),)), ["h2", ODD]),
    "another model": (lambda made: replace(made, gpus=(replace(made.gpus[0], name="NVIDIA X"),)), [ODD]),
    "a launch that failed": (with_launch(outcome="failed", reason="why"), [ODD]),
    "a launch with a word on it": (with_launch(reason="why"), [ODD]),
    "a collector that failed": (both(more=reading(absent="error: x", name="collector.ok", scope="collector=nvml")), [ODD]),
    "a collector that worked": (both(more=reading(1.0, name="collector.duration", scope="collector=nvml")), []),
    "versions among the readings": (both(more=reading("2.28", name="launch.nccl", scope="host")), [ODD]),
    "a GPU of which nothing is told": (lambda made: replace(made, snapshots=(), observations=()), [ODD]),
    "a reading of another GPU that is wrong": (both(more=reading(2, name="gpu.thing", scope="gpu=1")), [ODD]),
    "a clock that is lost later": (with_readings(last=shown(clock=reading(absent="error: gone", name="gpu.clock"))), [ODD]),
    "a clock that is not told any more": (with_readings(last=shown(clock=NONE)), [ODD]),
    "a driver that it has not": (
        both(version=reading(absent="unsupported: no", name="driver.version", scope="host")), [ODD]),
    "another serial later": (
        with_readings(shown(more=reading("a", name="gpu.serial")), shown(more=reading("b", name="gpu.serial"))), [ODD]),
}  # fmt: skip


def known_of(plan: Plan, told: dict[str, Evidence], packs: Sequence[Pack], parts: int = 1) -> None:
    """The first look knows of the fleet what the judge gathers host by host."""
    survey = look(plan, told, packs, parts)
    whole = Known(Planned(plan), [HostView(plan, host, told[host.name], packs) for host in plan.hosts])
    judge(plan, told, packs, whole)
    assert figures(survey.known) == figures(whole)
    usual = {item.id for used in packs for item in used.criteria if item.same_as_fleet}  # nobody compares them by words
    assert survey.known.normal == {path for path in whole.normal if path[0] not in usual}


def figures(known: Known) -> Any:
    """All numbers and versions, whatever the order in which hosts came."""
    return (
        {key: {place: sorted(told) for place, told in places.items()} for key, places in known.fleet._values.items()},
        known.fleet._together,
        {key: sorted(map(str, group.told())) for key, group in known.groups._groups.items()},
        {kind: {name: sorted(told) for name, told in series.items()} for kind, series in known.ranks._series.items()},
    )


def each(change: Callable[[int], Callable[[Record], Record]]) -> dict[str, Callable[[Record], Record]]:
    """Something else on every host."""
    return {name: change(at) for at, name in enumerate(NAMES)}


def test_the_fleet_is_known_by_what_each_host_shows() -> None:
    def own(at: int) -> Callable[[Record], Record]:
        ranks = builders.observation("straggler.compute", 0.1 * at, scope="gpu=0", unit="s")
        return lambda made: with_more(ranks)(with_figure(SPEED + at)(both(clock=1.5e9 + at, thing=1)(made)))

    hosts = each(own)
    for parts in (1, 3):
        known_of(PLAN, fleet(**hosts), [pack(*RULES)], parts)
    assert flagged(fleet(**hosts)) == []
    # As well where no reader knows their words again, and where the first or another tells in words what all tell in numbers.
    known_of(PLAN, {name: Evidence(records=(hosts[name](record(name)),)) for name in NAMES}, [pack(*RULES)])
    for odd in (
        with_figure("fast"), with_more(builders.observation("straggler.compute", "slow", scope="gpu=0")),
        with_more(builders.observation("memory.bandwidth", "fast", scope="host")),
    ):  # fmt: skip
        changed = fleet(**{**hosts, ODD: lambda made, odd=odd: odd(hosts[ODD](made))})
        known_of(PLAN, changed, [pack(FRACTION, CLOCK)])


def test_a_way_that_the_fleet_finds_fast_enough_explains_nobody_who_is_slow() -> None:
    def over(transport: str, speed: float) -> Callable[[Record], Record]:
        common = {"scope": "host", "size_bytes": 1 << 30}
        way = builders.observation("collective.transport", transport, scope="host")
        access = builders.observation("peer_copy.access", True, scope="gpu=0,peer=1")
        return with_more(builders.observation("collective.all_reduce.busbw", speed, **common), way, access)

    rule = criterion(
        "collective.all_reduce.busbw", id="busbw", scope="host", operator="ge", fleet_fraction=0.9, unit="B/s"
    )
    reach = criterion("peer_copy.access", id="reach", value=True, scope="peer")
    everywhere = {name: over("SHM/direct", 3.0e10) for name in NAMES}
    assert flagged(fleet(**everywhere | {ODD: over("SHM/direct", 1.0e10)}), rule, reach) == [ODD]
    elsewhere = {name: over("P2P/CUMEM", 3.0e10) for name in NAMES}
    assert flagged(fleet(**elsewhere | {ODD: over("SHM/direct", 1.0e10)}), rule, reach) == [ODD]


def test_a_text_for_a_figure_is_told_where_only_the_fleet_has_a_limit() -> None:
    for name in (ODD, "h1"):
        assert name in flagged(fleet(**{name: with_figure("fast")}), FRACTION)
        assert name in flagged(fleet(**{name: with_figure(True)}), FRACTION)
    assert flagged(fleet(h1=with_figure("fast")), FRACTION, parts=1) == ["h1"], (
        "the others tell the fleet their figures all the same"
    )


def test_what_a_benchmark_makes_is_none_of_the_collectors() -> None:
    change = both(more=reading(SPEED, name="memory.bandwidth", scope="gpu=0"))
    assert flagged(fleet(**{ODD: change}), FLOOR) == [ODD]


def test_a_figure_of_several_settings_is_several_figures() -> None:
    read_too = builders.observation("memory.bandwidth", 4.6e12, scope="gpu=0", unit="B/s", op="read")
    told = fleet(**dict.fromkeys(NAMES, with_more(read_too)))
    for rule in (FLOOR, FRACTION, replace(FLOOR, operator="gt")):
        assert flagged(told, rule) == []
    assert flagged(told, replace(FLOOR, value=None, same_as_fleet=True)) == NAMES  # one of them is as on no other


@pytest.mark.parametrize("operator", ["ge", "gt", "le", "lt"])
def test_figures_that_differ_are_counted_by_how_good_they_are(operator: str) -> None:
    limit = 4.0e12 if operator in ("ge", "gt") else 5.0e12
    told = fleet(**each(lambda at: with_figure(SPEED + at * 1e9)))
    assert flagged(told, replace(FLOOR, operator=operator, value=limit)) == []
    wrong = {**each(lambda at: with_figure(SPEED + at * 1e9)), ODD: with_figure(limit)}
    assert flagged(fleet(**wrong), replace(FLOOR, operator=operator, value=limit)) == ([ODD] if "t" in operator else [])


@pytest.mark.parametrize(
    ("value", "operator", "wrong"), [("fast", "eq", "slow"), (True, "eq", False), (True, "ge", False), (7, "eq", 8)]
)
def test_words_and_flags_of_benchmarks_are_counted(value: Any, operator: str, wrong: Any) -> None:
    rule = criterion("memory.mode", id="mode", operator=operator, value=value, stage="benchmark")
    well, ill = (with_more(builders.observation("memory.mode", told, scope="gpu=0")) for told in (value, wrong))
    hosts = dict.fromkeys(NAMES, well)
    assert flagged(fleet(**hosts), rule) == []
    assert flagged(fleet(**{**hosts, ODD: ill}), rule) == [ODD]


def test_what_the_plan_expects_is_counted_by_how_it_was_told() -> None:
    lacking = pack(FLOOR, lacks={"memory.bandwidth": {"op": ("copy",)}})
    none = with_figure(None, status=UNSUPPORTED, reason="no")
    for change, status in ((both(), "measured"), (none, "unsupported")):
        told = fleet(h1=change)["h1"]
        one = Survey(Planned(PLAN), {"h1": 0}).look(HostView(PLAN, PLAN.host("h1"), told, [lacking]))
        assert one is not None
        assert (one.program.statuses, one.partners) == ({status: 1}, 0)
        assert one.program.kinds == kinds_of(told)
        assert [(seen.name, seen.status) for seen in kinds_of(told)] == [("memory.bandwidth", status)]


@pytest.mark.parametrize("fault", FAULTS)
def test_one_fault_flags_one_host(fault: str) -> None:
    change, who = FAULTS[fault]
    assert flagged(fleet(**{ODD: change})) == who


def test_words_that_no_reader_knows_again_are_judged_host_by_host() -> None:
    for change, who in ((both(thing=2), [ODD]), (both(version="550"), [ODD]), (both(clock=1.0e9), [ODD]), (both(), [])):
        told = {name: Evidence(records=(change(record(name)) if name == ODD else record(name),)) for name in NAMES}
        assert flagged(told) == who


def test_whole_numbers_and_others_are_counted_as_they_are() -> None:
    whole = dict.fromkeys(NAMES, both(clock=1500))
    assert flagged(fleet(**whole), CLOCK) == []
    assert flagged(fleet(**{**whole, ODD: both(clock=1500.5)}), CLOCK) == []


def test_the_model_that_the_inventory_names_passes_host_by_host() -> None:
    plan = small(*NAMES, rackproof_gpu_model="h200-sxm")
    assert flagged(fleet(plan), plan=plan) == []
    assert flagged(fleet(plan), BUSBW_FLOOR, plan=plan) == []


def test_figures_that_some_other_part_tells_in_words_cost_nobody_a_pass() -> None:
    words = builders.observation("memory.bandwidth", "fast", scope="host")
    ranks = builders.observation("straggler.compute", "slow", scope="gpu=0")
    for more in (words, ranks):
        told = fleet(h1=with_more(more))
        assert set(flagged(told)) <= {"h1"}


def test_hosts_of_which_nothing_can_be_believed_are_flagged() -> None:
    for change in (
        lambda one: Evidence(),
        lambda one: replace(one, problem="unreachable"),
        lambda one: replace(one, records=(replace(one.records[0], gang="r1"),)),
    ):
        told = fleet()
        told[ODD] = change(told[ODD])
        assert flagged(told) == [ODD]


def test_a_run_with_a_baseline_is_judged_in_full() -> None:
    plan = replace(PLAN, baseline=PlannedBaseline(directory="b", digest="0" * 64))
    told = {name: replace(one, baseline=HostBaseline(problem="x")) for name, one in fleet(plan).items()}
    assert flagged(told, plan=plan) == NAMES


@pytest.mark.parametrize(("count", "who"), [(2, ["h1", "h2"]), (3, [])])
def test_a_fleet_that_is_too_small_to_compare_with_is_told_host_by_host(count: int, who: list[str]) -> None:
    plan = small(*NAMES[:count])
    assert flagged(fleet(plan), FRACTION, plan=plan) == who
    survey = look(plan, fleet(plan), [pack(FRACTION)])
    assert survey.unlimited() == ({("benchmark", "memory.bandwidth")} if who else set())
    # Where it is optional nothing is then told, and nobody is flagged.
    assert flagged(fleet(plan), replace(FRACTION, optional=True), plan=plan) == []
    survey = look(plan, fleet(plan), [pack(replace(FRACTION, optional=True))])
    assert survey.unlimited() == ({("benchmark", "memory.bandwidth")} if who else set())


@pytest.mark.parametrize("count", [1, 2, 3])
def test_who_is_alone_is_compared_with_nobody(count: int) -> None:
    plan = small(*NAMES[:count])
    told = fleet(plan, **{NAMES[0]: with_digest("badc0de")}) if count == 2 else fleet(plan)
    who = ["h1", "h2"] if count == 2 else []
    assert flagged(told, VERSION, LINKS, NCCL, plan=plan) == who
    assert flagged(fleet(plan), VERSION, LINKS, NCCL, plan=plan) == []
    survey = look(plan, told, [pack(VERSION)])
    lonely = survey.lonely(NAMES[:count])
    assert [*lonely] == (["h1"] if count == 1 else [])
    for name, verdicts in lonely.items():
        assert [(item.host, item.scope, item.name) for item in verdicts] == [(name, "gpu=0", "digest.value")]


def test_where_as_many_show_one_version_as_another_all_are_flagged() -> None:
    plan = small(*NAMES[:4])
    change = both(version="550")
    assert flagged(fleet(plan, h1=change, h3=change), VERSION, plan=plan) == NAMES[:4]
    assert flagged(fleet(plan, h1=change), VERSION, plan=plan) == ["h1"]


def test_only_whoever_does_not_tell_what_others_tell_is_flagged() -> None:
    change = both(version=None)
    assert flagged(fleet(**dict.fromkeys(NAMES, change)), VERSION) == []
    assert flagged(fleet(h1=change, h2=change), VERSION) == ["h1", "h2"]
    assert flagged(fleet(h1=change), replace(VERSION, optional=True)) == []
    assert flagged(fleet(h1=both(version=reading(absent="unsupported: no", name="driver.version", scope="host"))),
                   replace(VERSION, optional=True)) == []  # fmt: skip
    assert flagged(fleet(h1=change), replace(VERSION, same_as_fleet=False)) == []
    lost, none = (shown(version=reading(absent=why, name="driver.version", scope="host"))
                  for why in ("error: gone", "unsupported: no"))  # fmt: skip
    for first, last, who in ((lost, none, []), (none, lost, ["h1"]), (lost, lost, ["h1"])):
        assert flagged(fleet(h1=with_readings(first, last)), replace(VERSION, optional=True)) == who


@pytest.mark.parametrize(
    ("rule", "all_of_them"),
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
def test_a_criterion_of_the_operators_that_speaks_of_nothing_is_told(rule: Criterion, all_of_them: bool) -> None:
    packs = [pack(FLOOR), pack(rule, name="mine", chosen=True)]
    mine = [packs[0], replace(packs[1], criteria=(replace(rule, origin="mine"),))]
    assert flagged(fleet(), packs=mine) == (NAMES if all_of_them else [])
    cpus = replace(PLAN, rehearsal=True)
    rehearsed = [pack(FLOOR, name="rehearsal"), mine[1]]
    whole = flagged(fleet(cpus), plan=cpus, packs=rehearsed)
    assert whole in (NAMES, [])  # a rehearsal may be judged at length, and is counted alike


def test_a_silent_criterion_of_the_operators_is_told_beside_others_that_speak() -> None:
    silent = criterion("memory.nothing", id="own", origin="mine")
    for rule in (FLOOR, FRACTION, replace(FLOOR, value=None, same_as_fleet=True)):
        mine = pack(replace(rule, origin="mine"), silent, name="mine", chosen=True)
        assert flagged(fleet(), packs=[pack(THING), mine]) == NAMES


def test_a_shipped_criterion_that_speaks_of_nothing_says_nothing_of_benchmarks() -> None:
    for rule in (criterion("memory.nothing"), criterion("memory.nothing", fleet_fraction=0.9, operator="ge")):
        assert flagged(fleet(), rule) == []
    assert flagged(fleet(), criterion("gpu.nothing")) == NAMES
    assert flagged(fleet(), criterion("gpu.nothing", fleet_fraction=0.9, operator="ge")) == NAMES
    # What a GPU may lack it must still say so.
    rule = criterion("gpu.nothing", fleet_fraction=0.9, operator="ge", optional=True)
    assert flagged(fleet(), rule) == NAMES
    assert flagged(fleet(), replace(rule, scope="disk")) == []


@pytest.mark.parametrize(
    ("rule", "values", "who"),
    [
        (replace(FLOOR, best_of_run=True), (SPEED + 1, SPEED), []), (replace(FLOOR, best_of_run=True), (SPEED, SPEED + 1), []),
        (FLOOR, (SPEED + 1, SPEED), []), (FLOOR, (SPEED, SPEED + 1), []),
        (FLOOR, (3.0e12, SPEED), NAMES), (FLOOR, (SPEED, SPEED), []),
        (replace(FLOOR, best_of_run=True), (SPEED, SPEED), []),
        (FRACTION, (SPEED, SPEED), []), (FRACTION, (4.26e12, SPEED), NAMES),
        (replace(FLOOR, value=None, same_as_fleet=True), (SPEED, SPEED), []),
        (replace(FLOOR, value=None, same_as_fleet=True), (4.26e12, SPEED), NAMES),
    ],
)  # fmt: skip
def test_a_figure_that_was_made_twice(rule: Criterion, values: tuple[float, float], who: list[str]) -> None:
    def twice(made: Record) -> Record:
        one = next(seen for seen in made.observations if seen.name == "memory.bandwidth")
        return replace(made, observations=tuple(replace(one, value=value) for value in values))

    assert flagged(fleet(**dict.fromkeys(NAMES, twice)), rule) == who


def test_a_part_that_lacks_a_figure_by_nature_is_no_gap() -> None:
    none = with_figure(None, status=UNSUPPORTED, reason="no")
    told = fleet(**dict.fromkeys(NAMES, none))
    lacking = pack(FLOOR, FRACTION, lacks={"memory.bandwidth": {"op": ("copy",)}})
    assert flagged(told, packs=[lacking]) == []
    assert flagged(told, packs=[pack(FLOOR)]) == NAMES
    # What a criterion wants to be alike, and was not measured, is told.
    alike = replace(FLOOR, value=None, same_as_fleet=True)
    assert flagged(told, packs=[replace(lacking, criteria=(alike,))]) == NAMES

    def later(made: Record) -> Record:
        one = next(seen for seen in made.observations if seen.name == "memory.bandwidth")
        return with_more(replace(one, value=None, status=UNSUPPORTED, reason="no"))(made)

    assert flagged(fleet(**dict.fromkeys(NAMES, later)), packs=[replace(lacking, criteria=(alike,))]) == NAMES


def test_hosts_of_several_kinds_are_judged_each_by_its_own() -> None:
    """The same words mean another thing of another model, on another bus, by other packs."""

    def other(made: Record) -> Record:
        return replace(made, gpus=(replace(made.gpus[0], name="NVIDIA X"),))

    packs = [pack(FLOOR, THING), pack(replace(FLOOR, value=5e12), name="x", gpu_names=("NVIDIA X",))]
    assert flagged(fleet(h2=other, h7=other), packs=packs) == ["h2", "h7"]
    fast = [packs[0], replace(packs[1], criteria=(replace(FLOOR, value=1e12),))]
    assert flagged(fleet(h2=other), packs=fast) == []
    assert flagged(fleet(h2=lambda made: with_figure(2e12)(other(made))), packs=fast) == []


def test_what_the_bus_says_is_told_of_the_gpu_at_that_address() -> None:
    rule = criterion("gpu.width", id="width", value=16)
    told = both(more=reading(16, name="gpu.width", scope="pci=0000:00:00.0"))
    assert flagged(fleet(**dict.fromkeys(NAMES, told)), rule) == []

    def moved(made: Record) -> Record:
        return told(replace(made, gpus=(replace(made.gpus[0], pci_bus_id="0000:77:00.0"),)))

    assert flagged(fleet(**{**dict.fromkeys(NAMES, told), ODD: moved}), rule) == [ODD]


def test_the_fabric_is_judged_where_the_inventory_states_its_rate() -> None:
    rule = criterion("memory.bandwidth", id="fabric", operator="ge", variable="fabric_bytes_per_second", fraction=0.5)
    for gbps, who in ((0, []), (8, []), (80_000, NAMES)):
        plan = small(*NAMES, rackproof_fabric_gbps=gbps) if gbps else PLAN
        assert flagged(fleet(plan), rule, plan=plan) == who


# Gangs


def gang_plan(count: int = 6, size: int = 3) -> Plan:
    """Gangs of so many hosts, of which one figure together and their pairs are asked."""
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
TOGETHER = (FLOOR, BUSBW, BUSBW_FLOOR)


def gangs(plan: Plan = GANGS, **changed: Callable[[Record], Record]) -> dict[str, Evidence]:
    """Own records and gang records of hosts in order; a change is made to the gang record."""
    reader, told = quick.Reader(), {}
    for host in plan.hosts:
        alone, shared = builders.records(plan, host.name)
        alone = replace(alone, snapshots=tuple(short(taken) for taken in alone.snapshots))
        shared = changed.get(host.name, lambda made: made)(shared)
        told[host.name] = Evidence(records=(read(reader, alone), read(reader, shared)))
    return told


def short(taken: Snapshot) -> Snapshot:
    return replace(taken, metrics=shown())


def gang_figure(name: str, value: Any, **over: Any) -> Callable[[Record], Record]:
    def one(seen: Observation) -> Observation:
        return replace(seen, value=value, **over) if seen.name == name else seen

    return lambda made: replace(made, observations=tuple(map(one, made.observations)))


def uneasy(told: dict[str, Evidence], *rules: Criterion) -> tuple[list[str], list[str]]:
    packs = [pack(*(rules or TOGETHER))]
    for parts in (1, 2):
        survey = look(GANGS, told, packs, parts)
        found = sorted(survey.flagged), sorted(survey.uneasy)
        assert rows(GANGS, told, packs, survey) == plain(GANGS, told, packs)
    return found


FIRST, SECOND = ["h1", "h2", "h3"], ["h4", "h5", "h6"]


@pytest.mark.parametrize(
    ("change", "who", "whose"),
    [
        (gang_figure("collective.all_reduce.busbw", 1.0e10), ["h2"], FIRST),
        (gang_figure("collective.all_reduce.busbw", 3.0e11), [], []),
        (gang_figure("pairs.bandwidth", None, status=ERROR, reason="lost"), ["h2"], FIRST),
        (gang_figure("pairs.bandwidth", None, status=UNSUPPORTED, reason="no"), ["h2"], FIRST),
        (without("pairs.bandwidth"), ["h2"], FIRST),
        (with_launch(members=("h1", "h2")), ["h2"], FIRST),
        (with_launch(members=("h3", "h2", "h1")), [], []),
        (with_launch(outcome="failed", reason="why"), ["h2"], FIRST),
        (lambda made: replace(made, gang="g1"), None, None),
    ],
)  # fmt: skip
def test_a_gang_of_which_something_is_to_be_told_is_judged_again(change: Any, who: Any, whose: Any) -> None:
    found = uneasy(gangs(h2=change))
    if who is not None:
        assert found == (who, whose)


def test_gangs_in_order_are_not_judged_again_and_their_passes_are_counted() -> None:
    assert uneasy(gangs()) == ([], [])
    turned = {name: lambda made: replace(made, observations=made.observations[::-1]) for name in (*FIRST, *SECOND)}
    assert uneasy(gangs(**turned)) == ([], [])
    assert uneasy(gangs(), *TOGETHER, replace(BUSBW, id="alike", fleet_fraction=None, same_as_fleet=True)) == ([], [])
    slow = gang_figure("collective.all_reduce.busbw", 1.0e10)
    assert uneasy(gangs(h4=slow, h5=slow, h6=slow)) == (SECOND, SECOND)


def test_a_slow_pair_makes_its_gang_uneasy_and_flags_nobody() -> None:
    def slow(made: Record) -> Record:
        return replace(
            made,
            observations=tuple(
                replace(seen, value=float(seen.value or 0) / 9) if seen.name == "pairs.bandwidth" else seen
                for seen in made.observations
            ),
        )

    assert uneasy(gangs(h5=slow)) == ([], SECOND)


def test_whoever_is_first_without_its_pairs_draws_no_other_gang_with_it() -> None:
    assert uneasy(gangs(h1=without("pairs.bandwidth"))) == (["h1"], FIRST)


@pytest.mark.parametrize("fast", [("NET/IB/0/GDRDMA", "NET/Socket/0"), ("NET/Socket/0", "NET/IB/0/GDRDMA")])
def test_the_way_of_each_gang_is_its_own(fast: tuple[str, str]) -> None:
    def over(transport: str, speed: float) -> Callable[[Record], Record]:
        def change(made: Record) -> Record:
            seen = next(seen for seen in made.observations if seen.name == "collective.all_reduce.busbw")
            way = builders.observation("collective.transport", transport, scope=seen.scope)
            return with_more(replace(way, stage=seen.stage))(gang_figure(seen.name, speed)(made))

        return change

    plan = gang_plan(9, 3)
    ways = [(fast[0], 2e11), (fast[1], 2e11), ("NET/Socket/0", 3e10)]
    told = gangs(plan, **{name: over(*ways[at // 3]) for at, name in enumerate(NAMES)})
    for rule in (BUSBW, BUSBW_FLOOR):
        survey = look(plan, told, [pack(rule)], 2)
        assert rows(plan, told, [pack(rule)], survey) == plain(plan, told, [pack(rule)])
        assert {path[-1] for path in survey.known.normal} == set(fast)


def test_what_gangs_did_together_is_known_of_each() -> None:
    own = {
        name: gang_figure("collective.all_reduce.busbw", 3.0e11 if name in FIRST else 2.9e11)
        for name in (*FIRST, *SECOND)
    }
    alike = replace(BUSBW, id="alike", fleet_fraction=None, same_as_fleet=True)
    for rules in (TOGETHER, (alike,)):
        known_of(GANGS, gangs(**own), [pack(*rules)])
    one = Survey(Planned(GANGS), {"h1": 0}).look(
        HostView(GANGS.only(tuple(FIRST)), GANGS.host("h1"), gangs()["h1"], [pack(FLOOR)])
    )
    assert one is not None
    assert (one.partners, one.program.statuses) == (2, {"measured": 2})


def test_a_criterion_on_pairs_is_judged_at_length() -> None:
    rule = criterion("pairs.bandwidth", id="pairs", scope="partner", operator="ge", value=0, unit="B/s")
    assert uneasy(gangs(), FLOOR, rule) == ([*FIRST, *SECOND], [*FIRST, *SECOND])
