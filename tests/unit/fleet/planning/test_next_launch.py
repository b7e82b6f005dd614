"""Test the decision which hosts are launched together next. The simulated hosts leave records as real hosts do.

A gang is the hosts of one multi-node launch. If a launch fails, the heartbeats of the hosts may report a culprit: the kind of the
fault and the hosts that caused it. If they report none, probes (launches of parts of the gang) find the hosts that do not work
together.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from fleet.judge.criteria import read_packs
from fleet.judge.judge import Evidence
from fleet.planning.next_launch import Decision, LaunchPlan, decide
from fleet.report.merge import merge
from schemas import documents
from schemas.decode import record_from_json
from schemas.plans import Plan
from schemas.records import Culprit, Launch, Observation, Record, to_json
from schemas.reports import FleetReport
from tests import accepted, builders

PACKS = read_packs(())
GBPS = 400.0


def plan(*names: str) -> Plan:
    """Return a plan with the benchmark `memory` for single hosts, and the benchmarks `collective` and `pairs` for the gang."""
    standard = builders.plan(*names, rackproof_fabric_gbps=GBPS)
    planned = standard.stage("gang").benchmarks
    collective = {**planned["collective"], "ops": ["all_reduce"], "graph_ops": []}
    collective["sizes_bytes"] = planned["collective"]["sizes_bytes"][-1:]
    gang = {"collective": collective, "pairs": planned["pairs"]}
    single = {"memory": standard.stage("benchmark").benchmarks["memory"]}
    return builders.with_benchmarks(standard, benchmark=single, gang=gang)


@dataclass
class SimulatedGang:
    """The hosts of a plan with their faults, the launches so far, and the records of the hosts."""

    plan: Plan
    bad: set[str] = field(default_factory=set)
    """Every launch with one of these hosts fails, and no culprit is reported."""
    bad_links: list[frozenset[str]] = field(default_factory=list)
    """Pairs of hosts. Every launch with both hosts of a pair fails, and no culprit is reported."""
    culprit: Callable[[LaunchPlan], Culprit | None] = lambda start: None
    """Returns the culprit that the heartbeats report for a launch; None if they report none."""
    unable: Mapping[str, int] = field(default_factory=dict)
    """Host -> number of a launch. In this and all later launches, one rank of the host has no device.

    The other hosts finish these launches without measurements.
    """
    slow: set[str] = field(default_factory=set)
    """The collectives of a launch with one of these hosts are slow, and so is every pair with one of these hosts."""
    unreachable: set[str] = field(default_factory=set)
    """Hosts whose records cannot be fetched."""
    minimum: int = 2
    """Smallest number of hosts that are launched together."""
    flaky: int = 0
    """How many of the next launches fail as if by chance."""
    started: list[LaunchPlan] = field(default_factory=list)
    """All launches so far, in their order."""
    launches: dict[str, list[Launch]] = field(default_factory=dict)
    """Host -> the launches that its gang record has."""
    _records: dict[str, tuple[Record, Record]] = field(default_factory=dict)

    @property
    def names(self) -> list[str]:
        return [host.name for host in self.plan.hosts]

    def decide(self, evidence: dict[str, Evidence] | None = None) -> Decision:
        present = [name for name in self.names if name not in self.unreachable]
        return decide(self.plan, evidence or self.evidence(), PACKS, present=present, minimum=self.minimum)

    def run_all(self) -> Decision:
        """Run the decided launches until there is nothing left to launch, and return the last decision."""
        for _ in range(60):
            decision = self.decide()
            if not decision.launches:
                return decision
            hosts = [host for start in decision.launches for host in start.members]
            assert len(hosts) == len(set(hosts)), "two simultaneous launches share a host"
            for start in decision.launches:
                self.launch(start)
        raise AssertionError(f"the search does not end: {self.started}")

    def launch(self, start: LaunchPlan) -> None:
        self.started.append(start)
        culprit = self.culprit(start)
        fails = bool(culprit) or self.flaky > 0 or bool(self.bad & set(start.members))
        fails = fails or any(link <= set(start.members) for link in self.bad_links)
        self.flaky -= 1
        for host in start.members:
            if host not in self.unreachable:
                self.launches.setdefault(host, []).append(self._launch_record(start, host, fails, culprit))

    def _launch_record(self, start: LaunchPlan, host: str, fails: bool, culprit: Culprit | None) -> Launch:
        without_device = [name for name in start.members if start.number >= self.unable.get(name, start.number + 1)]
        if without_device:
            fails = host in without_device
            culprit = culprit_of("rank_unable", host, scope="gpu=1") if fails else None
        values: list[Observation] = [] if fails or without_device else self._measured(start, host)
        return replace(
            builders.launch("probe" if start.probe else "gang", start.members, "failed" if fails else "finished"),
            reason=(culprit.text if culprit else "hung") if fails else "",
            number=start.number,
            culprit=culprit,
            ranks=builders.ranks(
                len(self.plan.host(host).devices), first=len(self.plan.host(host).devices) * start.members.index(host)
            ),
            observations=tuple(values),
        )

    def _measured(self, start: LaunchPlan, host: str) -> list[Observation]:
        if start.probe:
            name = {"benchmark": "collective"}
            return [replace(builders.observation("benchmark.duration", 1.0, stage="probe"), params=name)]
        is_slow = bool(self.slow & set(start.members))
        return [
            replace(
                observation,
                params={**observation.params, "world_size": self.plan.ranks(start.members)},
                **self._figure(observation, host, is_slow),
            )
            for observation in builders.results(self.plan, host, "gang")
            if observation.scope.partition("partner=")[2] in ("", *start.members)
        ]

    def _figure(self, observation: Observation, host: str, is_slow: bool) -> dict[str, Any]:
        other = observation.scope.partition("partner=")[2]
        if observation.name == "pairs.bandwidth":
            return {"value": 1e10 if self.slow & {host, other} else 4e10}
        return {"value": 1e9} if is_slow and observation.name.endswith(("busbw", "algbw")) else {}

    def evidence(self) -> dict[str, Evidence]:
        """Return the fetched records. A gang record has the figures of the last launch that was not a probe."""
        by_host = {}
        for host in self.names:
            host_record, gang_record = self._host_records(host)
            launches = self.launches.get(host, [])
            full = [launch for launch in launches if launch.stage == "gang"]
            gang_record = replace(
                gang_record,
                observations=full[-1].observations if full else (),
                launches=tuple(
                    replace(launch, observations=()) if full and launch is full[-1] else launch for launch in launches
                ),
            )
            has_gang_record = launches and host not in self.unreachable
            by_host[host] = Evidence(records=(host_record, *([gang_record] if has_gang_record else [])))
        return by_host

    def _host_records(self, host: str) -> tuple[Record, Record]:
        if host not in self._records:
            host_record, gang_record = builders.records(self.plan, host)
            self._records[host] = host_record, gang_record
        return self._records[host]

    def report(self) -> FleetReport:
        return merge(self.plan, self.evidence(), PACKS)

    def full_launches(self) -> list[tuple[str, ...]]:
        """Return the members of every launch that is not a probe."""
        return [start.members for start in self.started if not start.probe]


def culprit_of(kind: str, *hosts: str, scope: str = "", text: str = "") -> Culprit:
    return Culprit(kind=kind, hosts=hosts, text=text or f"host {', '.join(hosts)}: {kind}", scope=scope)


def stopped_by(culprit: Culprit) -> Callable[[LaunchPlan], Culprit | None]:
    """Return a function that reports this culprit for every launch with one of the culprit's hosts."""
    return lambda start: culprit if set(culprit.hosts) & set(start.members) else None


def decisions(report: FleetReport) -> dict[str, str]:
    return {host.name: host.decision for host in report.hosts}


def faults(report: FleetReport) -> set[tuple[str, str, str]]:
    return {(item.host, item.scope, item.verdict) for item in report.verdicts if item.name == "gang.fault"}


def test_healthy_gang_is_launched_once() -> None:
    gang = SimulatedGang(plan("h1", "h2", "h3"))
    decision = gang.run_all()
    assert gang.started == [LaunchPlan(gang="r1", members=("h1", "h2", "h3"), number=1)]
    assert decision == Decision(launches=(), excluded={})
    assert gang.report().decision == "accepted"


def test_several_gangs_are_launched_at_the_same_time() -> None:
    one_gang = plan("a1", "a2", "b1", "b2")
    two_gangs = replace(one_gang, hosts=tuple(replace(host, gang=host.name[0]) for host in one_gang.hosts))
    first = SimulatedGang(two_gangs).decide()
    assert [(start.gang, start.members, start.number) for start in first.launches] == [
        ("a", ("a1", "a2"), 1),
        ("b", ("b1", "b2"), 1),
    ]


def test_culprit_is_excluded_and_the_other_hosts_are_measured() -> None:
    dead = culprit_of("rank_ended", "h2", scope="gpu=1", text="host h2 gpu=1 rank 3 in phase x: killed by SIGKILL")
    gang = SimulatedGang(plan("h1", "h2", "h3"), culprit=stopped_by(dead))
    decision = gang.run_all()
    assert gang.full_launches() == [("h1", "h2", "h3"), ("h1", "h3")]
    assert decision.excluded == {"h2": dead.text}
    report = gang.report()
    assert decisions(report) == {"h1": "accepted", "h2": "rejected", "h3": "accepted"}
    assert (report.decision, faults(report)) == ("rejected", {("h2", "gpu=1", "fail")})
    verdict = next(item for item in report.verdicts if item.name == "gang.fault")
    assert (verdict.serial, verdict.reason, verdict.action) == ("h2-1", dead.text, "inspect_hardware")
    assert "Gang r1: 2 of 3 hosts were measured together (h1, h3), without h2" in report.acceptance.summary


def test_every_launch_stays_in_the_record() -> None:
    dead = culprit_of("rank_ended", "h2")
    gang = SimulatedGang(plan("h1", "h2", "h3"), culprit=stopped_by(dead))
    gang.run_all()
    launches = {
        host.name: [launch.outcome for launch in host.launches if launch.stage == "gang"]
        for host in gang.report().hosts
    }
    assert launches == {"h1": ["failed", "finished"], "h2": ["failed"], "h3": ["failed", "finished"]}


def test_lost_host_is_reported_by_the_other_hosts_and_not_launched_again() -> None:
    lost = culprit_of("host_silent", "h3")
    gang = SimulatedGang(plan("h1", "h2", "h3"), culprit=stopped_by(lost))
    first = gang.decide()
    gang.unreachable = {"h3"}
    for start in first.launches:
        gang.launch(start)
    decision = gang.run_all()
    assert gang.full_launches() == [("h1", "h2", "h3"), ("h1", "h2")]
    assert decision.excluded == {}
    report = gang.report()
    assert decisions(report) == {"h1": "accepted", "h2": "accepted", "h3": "rejected"}
    assert faults(report) == {("h3", "host", "fail")}
    (stage,) = (item for item in report.verdicts if item.name == "stage.gang")
    assert (stage.host, stage.reason) == ("h3", "nothing was observed; there is no record of the stage from this host")


def test_host_that_was_never_reachable_is_not_launched_and_is_incomplete() -> None:
    gang = SimulatedGang(plan("h1", "h2", "h3"), unreachable={"h3"})
    gang.run_all()
    assert gang.full_launches() == [("h1", "h2")]
    report = gang.report()
    assert decisions(report) == {"h1": "accepted", "h2": "accepted", "h3": "incomplete"}
    assert report.decision == "incomplete"
    assert "Gang r1: 2 of 3 hosts were measured together (h1, h2), without h3" in report.acceptance.summary


@pytest.mark.parametrize("raised", [("h2",), ("h1", "h2", "h3")])
def test_exception_of_a_rank_is_inconclusive_on_every_host_whose_rank_raised_it(raised: tuple[str, ...]) -> None:
    text = 'host h2 rank 2 in phase "join": RuntimeError: Unable to find interface bond0'
    gang = SimulatedGang(plan("h1", "h2", "h3"), culprit=stopped_by(culprit_of("rank_raised", *raised, text=text)))
    gang.run_all()
    others = tuple(host for host in ("h1", "h2", "h3") if host not in raised)
    assert gang.full_launches() == [("h1", "h2", "h3"), *([others] if others else [])], "no probe must be launched"
    report = gang.report()
    assert decisions(report) == {host: "incomplete" if host in raised else "accepted" for host in ("h1", "h2", "h3")}
    assert faults(report) == {(host, "host", "inconclusive") for host in raised}
    assert {item.reason for item in report.verdicts if item.name == "gang.fault"} == {text}
    assert not any("inspect hardware" in line for line in report.acceptance.summary)
    (line,) = (line for line in report.acceptance.summary if "gang.fault" in line)
    subject = raised[0] if len(raised) == 1 else f"{len(raised)} hosts ({', '.join(raised)}): each"
    failed = f"INCOMPLETE: {subject} took part in a failed launch of several hosts: {text}; Measure again"
    assert line.partition(" [")[0] == failed, "the cause must have one line"


def test_two_hosts_that_lost_each_other_are_not_rejected() -> None:
    gang = SimulatedGang(plan("h1", "h2"), culprit=stopped_by(culprit_of("host_silent", "h1", "h2")))
    decision = gang.run_all()
    assert gang.full_launches() == [("h1", "h2")] * 2
    assert set(decision.excluded) == {"h1", "h2"}
    assert decisions(gang.report()) == {"h1": "incomplete", "h2": "incomplete"}
    assert {verdict for _, _, verdict in faults(gang.report())} == {"inconclusive"}


def test_hosts_are_excluded_but_not_rejected_if_half_of_the_gang_is_silent() -> None:
    gang = SimulatedGang(plan("h1", "h2", "h3", "h4"), culprit=stopped_by(culprit_of("host_silent", "h3", "h4")))
    gang.run_all()
    assert gang.full_launches() == [("h1", "h2", "h3", "h4"), ("h1", "h2")]
    assert faults(gang.report()) == {("h3", "host", "inconclusive"), ("h4", "host", "inconclusive")}


def test_fewer_hosts_than_the_minimum_are_not_launched() -> None:
    gang = SimulatedGang(plan("h1", "h2", "h3"), culprit=stopped_by(culprit_of("rank_ended", "h3")), minimum=3)
    gang.run_all()
    assert gang.full_launches() == [("h1", "h2", "h3")]
    report = gang.report()
    assert decisions(report) == {"h1": "incomplete", "h2": "incomplete", "h3": "rejected"}
    assert "Gang r1: no launch of its 3 hosts finished with a result" in report.acceptance.summary


def with_few_figures(planned: Plan) -> Plan:
    """Return the plan with fewer expected observations, to save time."""
    collective = {"ops": ["broadcast"], "sizes_bytes": [8], "graph_ops": []}
    return builders.with_benchmarks(planned, gang={"collective": collective})


@pytest.mark.parametrize("size", [3, 4, 8, 16, 64])
def test_probes_find_the_bad_host_if_no_culprit_is_reported(size: int) -> None:
    names = [f"h{number}" for number in range(size)]
    max_rounds = 0
    for bad in names if size <= 16 else names[::13]:
        gang = SimulatedGang(plan(*names) if size <= 4 else with_few_figures(plan(*names)), bad={bad})
        assert bad in gang.run_all().excluded
        if size <= 4:
            report = gang.report()
            assert decisions(report) == {name: "rejected" if name == bad else "accepted" for name in names}
            assert faults(report) == {(bad, "host", "fail")}
        assert gang.full_launches() == [tuple(names), tuple(name for name in names if name != bad)]
        max_rounds = max(max_rounds, len({start.number for start in gang.started if start.probe}))
    assert max_rounds <= 4, "the number of rounds must not grow with the number of hosts"


def test_only_one_host_of_a_bad_link_is_excluded_but_both_hosts_fail() -> None:
    gang = SimulatedGang(plan(*(f"h{number}" for number in range(6))), bad_links=[frozenset(("h1", "h4"))])
    gang.run_all()
    assert gang.full_launches() == [("h0", "h1", "h2", "h3", "h4", "h5"), ("h0", "h1", "h2", "h3", "h5")]
    report = gang.report()
    assert faults(report) == {("h1", "gang=r1", "fail"), ("h4", "gang=r1", "fail")}
    assert {host for host, decision in decisions(report).items() if decision == "accepted"} == {"h0", "h2", "h3", "h5"}


@pytest.mark.parametrize("names", [("h1", "h2", "h3", "h4"), ("h1", "h2")])
def test_failed_launch_without_a_culprit_is_repeated_if_its_probes_work(names: tuple[str, ...]) -> None:
    """A gang of two hosts has no probes; its failed launch is repeated too."""
    gang = SimulatedGang(plan(*names), flaky=1)
    assert gang.run_all().excluded == {}
    assert gang.full_launches() == [names] * 2
    assert len(gang.started) == 2 or len(names) > 2
    assert gang.report().decision == "accepted"


def test_probe_that_fails_by_chance_excludes_no_host() -> None:
    gang = SimulatedGang(plan("h1", "h2", "h3", "h4"), flaky=2)
    assert gang.run_all().excluded == {}
    assert gang.full_launches() == [("h1", "h2", "h3", "h4")] * 2
    assert gang.report().decision == "accepted"


def test_search_ends_without_a_culprit_if_no_pair_of_hosts_works() -> None:
    names = ("h1", "h2", "h3", "h4")
    gang = SimulatedGang(plan(*names), bad=set(names))
    assert set(gang.run_all().excluded) == set(names)
    assert gang.full_launches() == [names]
    assert decisions(gang.report()) == dict.fromkeys(names, "incomplete")
    assert faults(gang.report()) == {(name, "gang=r1", "inconclusive") for name in names}


def test_finished_launch_with_only_errors_counts_as_failed() -> None:
    """If NCCL cannot start, every rank records an error and finishes."""
    gang = SimulatedGang(plan("h1", "h2", "h3", "h4"), bad={"h2"})

    def without_figures(launch: Launch) -> Launch:
        return replace(launch, outcome="finished", reason="") if launch.stage == "gang" else launch

    for start in gang.decide().launches:
        gang.launch(start)
    gang.launches = {host: [without_figures(launch) for launch in result] for host, result in gang.launches.items()}
    gang.run_all()
    assert gang.full_launches() == [("h1", "h2", "h3", "h4"), ("h1", "h3", "h4")]
    assert faults(gang.report()) == {("h2", "host", "fail")}


def test_collectives_are_measured_again_without_a_host_that_slows_them() -> None:
    gang = SimulatedGang(plan("h1", "h2", "h3", "h4"), slow={"h3"})
    assert gang.run_all().excluded == {}
    assert gang.full_launches() == [("h1", "h2", "h3", "h4"), ("h1", "h2", "h4")]
    report = gang.report()
    assert decisions(report) == {"h1": "accepted", "h2": "accepted", "h3": "rejected", "h4": "accepted"}
    result = {
        (item.host, item.name) for item in report.verdicts if item.verdict == "fail" and item.name.startswith("pairs")
    }
    assert result == {("h3", "pairs.bandwidth")}
    assert "Gang r1: 3 of 4 hosts were measured together (h1, h2, h4), without h3" in report.acceptance.summary


def test_slow_host_is_kept_if_the_collectives_pass() -> None:
    gang = SimulatedGang(replace(plan("h1", "h2", "h3", "h4"), criteria=()), slow={"h3"})
    gang.plan = replace(gang.plan, hosts=tuple(replace(host, fabric_gbps=0.0) for host in gang.plan.hosts))
    gang.run_all()
    assert gang.full_launches() == [("h1", "h2", "h3", "h4")]


@pytest.mark.parametrize("kind", ["host_absent", "rank_ended"])
def test_host_that_started_no_rank_is_excluded_for_the_reason_in_its_record(kind: str) -> None:
    """If the launcher of h2 cannot start, the other hosts report `host_absent`.

    If the launcher exits before any rank starts, all hosts report `rank_ended`.
    """
    gang = SimulatedGang(plan("h1", "h2", "h3"), culprit=stopped_by(culprit_of(kind, "h2")))
    for start in gang.decide().launches:
        gang.launch(start)
    busy = "GPU 0 is used by process 4711"
    (launch,) = gang.launches["h2"]
    gang.launches["h2"] = [
        replace(launch, ranks=(), culprit=launch.culprit if kind == "rank_ended" else None, reason=busy)
    ]
    assert gang.run_all().excluded == {"h2": busy}
    assert gang.full_launches() == [("h1", "h2", "h3"), ("h1", "h3")]
    assert faults(gang.report()) == set(), "the failed launch must not be attributed to a host that started no rank"
    assert decisions(gang.report()) == {"h1": "accepted", "h2": "incomplete", "h3": "accepted"}


@pytest.mark.parametrize(
    ("unable", "launches"),
    [
        ({"h2": 1}, [("h1", "h2", "h3", "h4"), ("h1", "h3", "h4")]),
        ({"h2": 1, "h3": 1}, [("h1", "h2", "h3", "h4"), ("h1", "h4")]),
        ({"h2": 1, "h3": 2}, [("h1", "h2", "h3", "h4"), ("h1", "h3", "h4"), ("h1", "h4")]),
    ],
)
def test_host_with_a_rank_without_device_is_excluded_at_once(
    unable: Mapping[str, int], launches: Sequence[tuple[str, ...]]
) -> None:
    gang = SimulatedGang(plan("h1", "h2", "h3", "h4"), unable=unable)
    gang.run_all()
    assert [start.members for start in gang.started] == launches
    report = gang.report()
    assert faults(report) == {(host, "gpu=1", "inconclusive") for host in unable}
    assert decisions(report) == {
        host: "incomplete" if host in unable else "accepted" for host in ("h1", "h2", "h3", "h4")
    }


@pytest.mark.parametrize(("host", "since"), [("h2", 2), ("h2", 3), ("h3", 5)])
def test_only_the_host_that_lacks_a_device_in_a_probe_is_excluded(host: str, since: int) -> None:
    """The first launch fails without a culprit, as if a GPU had died. In a later probe, the host reports the missing device."""
    gang = SimulatedGang(plan("h1", "h2", "h3", "h4"), flaky=1, unable={host: since})
    assert gang.run_all().excluded == {host: f"host {host}: rank_unable"}
    assert decisions(gang.report()) == {**dict.fromkeys(("h1", "h2", "h3", "h4"), "accepted"), host: "incomplete"}
    assert faults(gang.report()) == {(host, "gpu=1", "inconclusive")}


def test_hosts_of_a_launch_without_measurements_do_not_count_as_measured_together() -> None:
    """In each launch one host lacks a device. The other hosts finish the launch without measurements."""
    for names, unable in ((("h1", "h2"), {"h2": 1}), (("h1", "h2", "h3"), {"h3": 1, "h2": 2})):
        gang = SimulatedGang(plan(*names), unable=unable)
        gang.run_all()
        (line,) = [line for line in gang.report().acceptance.summary if line.startswith("Gang ")]
        assert line == f"Gang r1: no launch of its {len(names)} hosts finished with a result"


def test_missing_device_is_attributed_to_the_host_and_no_gpu_if_its_gpus_were_renumbered() -> None:
    """The GPUs of h2 are renumbered between its records: gpu=0 in the gang record is gpu=1 in the host record."""
    gang = SimulatedGang(plan("h1", "h2", "h3"), unable={"h2": 1})
    gang.run_all()
    evidence = gang.evidence()
    host_record, gang_record = evidence["h2"].records
    gpus = tuple(replace(gpu, index=gpu.index - 1) for gpu in gang_record.gpus if gpu.index)
    renumbered = replace(gang_record, gpus=gpus)
    report = merge(gang.plan, {**evidence, "h2": Evidence(records=(host_record, renumbered))}, PACKS)
    (reported,) = [item for item in report.verdicts if item.name == "gang.fault"]
    assert (reported.host, reported.scope, reported.serial) == ("h2", "host", "")


def test_launch_that_was_started_only_on_some_hosts_excludes_no_host() -> None:
    """The control node was killed while it started the launch, so the started hosts waited for the others in vain."""
    gang = SimulatedGang(plan("h1", "h2", "h3"))
    (first,) = gang.decide().launches
    gang.culprit = stopped_by(culprit_of("host_absent", "h3"))
    gang.launch(first)
    del gang.launches["h3"]
    gang.culprit = lambda start: None
    gang.run_all()
    assert gang.full_launches() == [("h1", "h2", "h3")] * 2
    assert gang.report().decision == "accepted"


def test_host_that_is_absent_from_two_launches_is_excluded() -> None:
    absent = culprit_of("host_absent", "h3")
    gang = SimulatedGang(plan("h1", "h2", "h3"), culprit=stopped_by(absent))
    for _ in range(2):
        for start in gang.decide().launches:
            gang.launch(start)
        gang.launches.pop("h3")
    gang.run_all()
    assert gang.full_launches() == [("h1", "h2", "h3")] * 2 + [("h1", "h2")]


def test_decision_depends_only_on_the_records_and_a_finished_gang_is_not_launched_again() -> None:
    gang = SimulatedGang(plan("h1", "h2", "h3", "h4"), bad={"h2"})
    while starts := gang.decide().launches:
        assert gang.decide().launches == starts
        for start in starts:
            gang.launch(start)
    assert gang.decide().launches == ()
    gang.unreachable = {"h4"}  # the gang record of h4 is missing, but the other hosts finished the launch
    assert gang.decide().launches == ()


@pytest.mark.parametrize("seed", range(20))
def test_every_search_ends_without_rejecting_a_healthy_host(seed: int) -> None:
    draw = random.Random(seed)  # noqa: S311
    names = [f"h{number}" for number in range(draw.randint(3, 9))]
    faulty = draw.sample(names, draw.randint(1, max(1, (len(names) - 1) // 2)))
    dead, bad = faulty[: len(faulty) // 2], faulty[len(faulty) // 2 :]
    gang = SimulatedGang(
        with_few_figures(plan(*names)),
        bad=set(bad),
        culprit=lambda start: next((culprit_of("rank_ended", host) for host in start.members if host in dead), None),
    )
    gang.run_all()
    assert all(gang.full_launches().count(members) <= 2 for members in gang.full_launches())
    healthy = tuple(name for name in names if name not in faulty)
    assert gang.full_launches()[-1] == healthy
    assert decisions(gang.report()) == {name: "accepted" if name in healthy else "rejected" for name in names}


def write_run(gang: SimulatedGang, directory: Path) -> Path:
    """Write the run directory as the playbooks do, and return it."""
    documents.write(directory / "plan.json", json.loads(json.dumps(to_json(gang.plan))))
    for host, evidence in gang.evidence().items():
        for record in evidence.records:
            path = directory / (f"gangs/{record.gang}" if record.gang else "hosts") / f"{host}.json"
            path.parent.mkdir(parents=True, exist_ok=True)
            documents.write(path, json.loads(json.dumps(to_json(record))))
    return directory


def rackproof(*arguments: str | Path, stdin: str = "") -> str:
    done = accepted.rackproof(*arguments, stdin=stdin)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_gangs_command_prints_the_next_launches(tmp_path: Path) -> None:
    gang = SimulatedGang(with_few_figures(plan("h1", "h2", "h3")), culprit=stopped_by(culprit_of("rank_ended", "h2")))
    run = write_run(gang, tmp_path)
    assert json.loads(rackproof("gangs", "--run-dir", run, "--json", "--hosts=-", stdin="h1 h2 h3")) == {
        "launches": [["--members=h1,h2,h3", "--number=1"]],
        "hosts": {"h1": 0, "h2": 0, "h3": 0},
        "excluded": {},
        "awaited": [],
    }
    assert (run / "gangs" / "r1").is_dir(), "a resumed control node first searches this directory for records"
    for start in gang.decide().launches:
        gang.launch(start)
    run = write_run(gang, tmp_path)
    reported = rackproof("gangs", "--run-dir", run).splitlines()
    assert reported == [
        "gang r1, launch 2: h1, h3",
        *(f"{host}: last launch failed: host h2: rank_ended" for host in ("h1", "h2", "h3")),
    ]
    gang.run_all()
    last = gang.launches["h3"].pop()  # h3 is still finishing when the interrupted control node resumes
    run = write_run(gang, tmp_path)
    assert (
        rackproof("gangs", "--run-dir", run, "--await")
        == "nothing to launch yet: first fetch the gang records of h3 again\n"
    )
    assert json.loads(rackproof("gangs", "--run-dir", run, "--await", "--json")) == {
        "launches": [],
        "hosts": {},
        "excluded": {},
        "awaited": ["h3"],
    }
    assert "nothing to launch yet" not in rackproof("gangs", "--run-dir", run, "--await", "--hosts", "h1,h2"), (
        "a host that is not reachable must not be awaited"
    )
    gang.launches["h3"].append(last)
    run = write_run(gang, tmp_path)
    assert rackproof("gangs", "--run-dir", run, "--await") == rackproof("gangs", "--run-dir", run)
    assert (
        rackproof("gangs", "--run-dir", run) == "nothing left to launch\nh2: last launch failed: host h2: rank_ended\n"
    )


def test_launch_is_unchanged_after_its_record_is_written_and_read() -> None:
    gang = SimulatedGang(plan("h1", "h2"))
    gang.run_all()
    launch = replace(gang.launches["h1"][0], culprit=culprit_of("rank_ended", "h2"))
    record = replace(builders.records(gang.plan, "h1")[1], launches=(launch,))
    document = json.loads(json.dumps(to_json(record)))
    documents.validate(document, "record", source="the record")
    assert record_from_json(document) == record
