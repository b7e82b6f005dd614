"""Find slow and failed parts of simulated fleets: precision and recall of the suspects, number of probe launches, verdicts.

The suspects follow from the pair matrix: the measurements between every two hosts, on each rail (position of a GPU in its host).
If a launch of all hosts fails, probe launches of some of the hosts find the bad hosts and links. A gang is the hosts of one
multi-node launch.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from typing import Any

import pytest

from fleet.judge.evidence import Evidence
from fleet.judge.host_view import HostView
from fleet.judge.localization import (
    Bisection,
    GroupOutcome,
    Pair,
    PairKind,
    ProbeConclusion,
    Suspect,
    find_suspects,
    judge_gangs,
)
from fleet.judge.localization.slow import CHANCE, is_improbable
from schemas import tournament
from schemas.plans import Plan, PlannedHost
from schemas.records import Observation, Record
from schemas.reports import Verdict
from tests import builders

NOISE = 0.03
"""Standard deviation of a measurement, as a share of its true value."""
RATE, TIME = 48e9, 6e-6
"""Bandwidth (B/s) and latency (s) of a healthy pair."""
SIZES = (3, 4, 8, 16, 64, 512, 4096)
"""Sizes of fleets, in hosts. Fleets of two hosts have separate tests, because no measurement shows which of two hosts is slow."""


def all_rounds(hosts: Sequence[str], rounds: int = 0) -> list[tournament.Round]:
    """Return the pairs of each round that is measured; `rounds`: the maximum number of rounds, 0 for all."""
    return [tournament.pairs_of(hosts, number) for number in tournament.select_rounds(len(hosts), rounds)]


@dataclass
class Fleet:
    """A simulated fleet. A pair is as fast as its slowest part.

    `size` is the number of hosts, `rails` the number of GPUs (or RDMA ports) of each host. Of the round-robin schedule of pairs
    (`schemas.tournament`), `rounds` rounds are measured; 0: all. `hosts`, `nics`, `links` and `bad_rails` map slow parts to their
    share of the healthy bandwidth. `delays` maps hosts to the seconds that they add to the latency of their pairs.
    """

    size: int
    rails: int = 4
    seed: int = 0
    rounds: int = 0
    noise: float = NOISE
    hosts: dict[str, float] = field(default_factory=dict)
    nics: dict[tuple[str, int], float] = field(default_factory=dict)
    links: dict[frozenset[str], float] = field(default_factory=dict)
    bad_rails: dict[int, float] = field(default_factory=dict)
    delays: dict[str, float] = field(default_factory=dict)

    @property
    def names(self) -> list[str]:
        return [f"h{number}" for number in range(self.size)]

    def pairs(self) -> list[Pair]:
        """Return the measured pairs of one launch."""
        draw = random.Random(f"{self.seed}/noise")  # noqa: S311
        noise = self.noise
        result = []
        for a, b in itertools.chain.from_iterable(all_rounds(self.names, self.rounds)):
            link_share = self.links.get(frozenset((a, b)), 1.0) if self.links else 1.0
            pair_share = min(link_share, self.hosts.get(a, 1.0), self.hosts.get(b, 1.0))
            delay = self.delays.get(a, 0.0) + self.delays.get(b, 0.0)
            for rail in range(self.rails):
                share = min(
                    pair_share,
                    self.nics.get((a, rail), 1.0),
                    self.nics.get((b, rail), 1.0),
                    self.bad_rails.get(rail, 1.0),
                )
                result.append(
                    Pair(
                        a=a,
                        b=b,
                        rail=rail,
                        bandwidth=RATE * share * draw.gauss(1, noise),
                        latency=(TIME + delay) * draw.gauss(1, noise),
                    )
                )
        return result

    def bad_parts(self) -> set[tuple[str, str]]:
        """Return kind and name of the parts that localization must find."""
        return {
            *(("host", host) for host in (*self.hosts, *self.delays)),
            *(("nic", f"{host} rail {rail}") for host, rail in self.nics),
            *(("rail", f"rail {rail}") for rail in self.bad_rails),
            *(("link", " - ".join(sorted(link))) for link in self.links),
        }


def kinds_and_names(suspects: Iterable[Suspect]) -> set[tuple[str, str]]:
    return {
        (item.kind, " - ".join(sorted(item.where.split(" - "))) if item.kind == "link" else item.where)
        for item in suspects
    }


PARTS = ("host", "nic", "rail", "link", "delay")


def broken(size: int, part: str, count: int, seed: int, rails: int, rounds: int) -> Fleet:
    """Return a fleet with `count` bad parts of one kind (`part`, one of `PARTS`).

    If `part` is "delay", hosts have a higher latency. Other bad parts have 25 to 70 % of the healthy bandwidth.
    """
    draw = random.Random(f"{size}/{part}/{count}/{seed}")  # noqa: S311
    fleet = Fleet(size, rails, seed, rounds)

    def share() -> float:
        return draw.uniform(0.25, 0.70)

    hosts = draw.sample(fleet.names, count)
    if part == "host":
        fleet.hosts = {host: share() for host in hosts}
    elif part == "nic":
        fleet.nics = {(host, draw.randrange(rails)): share() for host in hosts}
    elif part == "delay":
        fleet.delays = {host: draw.uniform(2 * TIME, 1e-3) for host in hosts}
    elif part == "rail":
        fleet.bad_rails = {rail: share() for rail in draw.sample(range(rails), count)}
    else:
        measured = [frozenset(pair) for pairs in all_rounds(fleet.names, rounds) for pair in pairs]
        fleet.links = {link: share() for link in draw.sample(measured, count)}
    return fleet


def most_bad_parts(size: int, part: str, rails: int) -> int:
    """Return how many bad parts of one kind localization can find; at most 5.

    Fewer than half of the hosts may be bad, have a bad NIC or have a higher latency. At most half of the rails may be bad, and at
    most a sixth of the links: with more bad links, hosts seem bad. One bad link is always allowed.
    """
    limit = {"rail": rails // 2, "link": max(1, size * (size - 1) // 12)}.get(part, (size - 1) // 2)
    return min(5, limit)


@dataclass
class Score:
    """How many suspects were right or wrong, and how many bad parts were missed."""

    right: int = 0
    wrong: int = 0
    missed: int = 0

    def add(self, suspected: set[tuple[str, str]], bad_parts: set[tuple[str, str]]) -> None:
        self.right += len(suspected & bad_parts)
        self.wrong += len(suspected - bad_parts)
        self.missed += len(bad_parts - suspected)

    @property
    def precision(self) -> float:
        return self.right / max(1, self.right + self.wrong)

    @property
    def recall(self) -> float:
        return self.right / max(1, self.right + self.missed)


def trials(size: int) -> tuple[int, int, int]:
    """Return how many fleets of `size` hosts a test simulates for each case, and their `Fleet.rails` and `Fleet.rounds`."""
    return {64: (1, 4, 0), 512: (1, 2, 16), 4096: (1, 2, 16)}.get(size, (5, 4, 0))


@pytest.mark.parametrize("size", SIZES)
def test_up_to_five_bad_parts_are_found_with_precision_and_recall_of_at_least_95_percent(size: int) -> None:
    number, rails, rounds = trials(size)
    for part in PARTS if size < 4096 else ("nic",):
        score = Score()
        most = most_bad_parts(size, part, rails)
        counts = [*range(1, most + 1)] if size < 64 else [*{1, most}] if size < 4096 else [most]
        for count, seed in itertools.product(counts, range(number)):
            fleet = broken(size, part, count, seed, rails, rounds)
            score.add(kinds_and_names(find_suspects(fleet.pairs())), fleet.bad_parts())
        print(
            f"{size} hosts, {min(counts)}-{most} bad {part}: precision {score.precision:.3f}, recall {score.recall:.3f}"
        )
        assert score.right
        assert score.precision >= 0.95, part
        assert score.recall >= 0.95, part


def test_simultaneous_faults_of_every_kind_are_separated() -> None:
    score = Score()
    for seed in range(20):
        draw = random.Random(seed)  # noqa: S311
        a, b, c, d, e = draw.sample([f"h{number}" for number in range(16)], 5)
        fleet = Fleet(16, 8, seed, hosts={a: 0.5}, nics={(b, 3): 0.4}, bad_rails={6: 0.6}, delays={e: 5e-5})
        fleet.links = {frozenset((c, d)): 0.3}
        score.add(kinds_and_names(find_suspects(fleet.pairs())), fleet.bad_parts())
    print(f"16 hosts, 5 parts of 5 kinds: precision {score.precision:.3f}, recall {score.recall:.3f}")
    assert score.precision >= 0.95
    assert score.recall >= 0.95


def test_healthy_fleet_has_no_suspect() -> None:
    alarms = {}
    for size in SIZES:
        number, rails, rounds = trials(size)
        number *= 16 if size <= 16 else 1
        alarms[size] = (
            sum(bool(find_suspects(Fleet(size, rails, seed, rounds).pairs())) for seed in range(number)),
            number,
        )
    reported = ", ".join(f"{size} hosts {wrong} of {number}" for size, (wrong, number) in alarms.items())
    print(f"false alarms at {NOISE:.0%} noise: {reported}")
    assert not any(wrong for wrong, _ in alarms.values())


def test_slowdown_of_30_percent_is_detected_and_of_5_percent_is_not() -> None:
    for part in ("host", "link"):
        recall = {}
        for percent in (95, 70):
            score = Score()
            for seed in range(20):
                fleet = broken(16, part, 2, seed, 4, 0)
                fleet.hosts = dict.fromkeys(fleet.hosts, percent / 100)
                fleet.links = dict.fromkeys(fleet.links, percent / 100)
                score.add(kinds_and_names(find_suspects(fleet.pairs())), fleet.bad_parts())
            recall[percent] = score.recall
        print(
            f"16 hosts, 2 bad {part}: recall by share of the healthy speed: "
            + ", ".join(f"{k} %: {v:.2f}" for k, v in recall.items())
        )
        assert recall[70] == 1.0
        assert recall[95] == 0.0


@pytest.mark.parametrize("noise", [0.0, 0.01, 0.10])
def test_noise_of_up_to_10_percent_causes_no_false_alarm_and_hides_no_very_slow_host(noise: float) -> None:
    for seed in range(20):
        assert not find_suspects(Fleet(16, 2, seed, noise=noise).pairs())
    slow = Fleet(16, 2, noise=noise, hosts={"h3": 0.2})
    assert kinds_and_names(find_suspects(slow.pairs())) == {("host", "h3")}


def only(suspects: Sequence[Suspect]) -> Suspect:
    assert len(suspects) == 1, suspects
    return suspects[0]


def test_evidence_on_a_slow_host_with_one_rail_names_its_gpu_and_nic_as_possible_causes() -> None:
    suspect = only(find_suspects(Fleet(8, 1, hosts={"h3": 0.5}).pairs()))
    assert (suspect.kind, suspect.hosts) == ("host", ("h3",))
    assert "its GPU or NIC" in suspect.evidence


def test_slow_host_is_found_although_the_bandwidths_of_healthy_pairs_differ() -> None:
    """The bandwidths (GB/s) were measured over sockets between four H200 of one machine, each of which acted as a host.

    Another process used the GPU of h2.
    """
    measured = {"01": 2.52, "02": 2.27, "03": 2.84, "12": 2.35, "13": 2.77, "23": 2.34}
    pairs = [Pair(a=f"h{a}", b=f"h{b}", rail=0, bandwidth=rate * 1e9) for (a, b), rate in measured.items()]
    result = only(find_suspects(pairs))
    assert (result.kind, result.where, result.confidence) == ("host", "h2", pytest.approx(4 / 5))
    assert "with 3 of 3 healthy hosts" in result.evidence


@pytest.mark.parametrize("rails", [1, 4])
def test_gpu_that_failed_alone_is_suspected_instead_of_its_nic(rails: int) -> None:
    """A GPU failed alone if it failed a test that involves no other host."""
    fleet = Fleet(8, rails, nics={("h5", rails - 1): 0.4})
    suspect = only(find_suspects(fleet.pairs(), failed_alone={("h5", rails - 1): "gpu", ("h1", 0): "gpu"}))
    assert (suspect.kind, suspect.hosts, suspect.rails) == ("gpu", ("h5",), (rails - 1,))


def test_fabric_is_suspected_if_only_the_collective_is_slow() -> None:
    fleet = Fleet(8)
    assert find_suspects(fleet.pairs()) == []
    suspect = only(find_suspects(fleet.pairs(), collective_slow=True))
    assert (suspect.kind, suspect.where) == ("fabric", "")
    slow_host = Fleet(8, hosts={"h1": 0.5})
    assert only(find_suspects(slow_host.pairs(), collective_slow=True)).where == "h1"


def test_no_host_is_called_normal_if_no_pair_could_be_compared() -> None:
    failed = [replace(pair, bandwidth=None, latency=None, failed="timed out") for pair in Fleet(4).pairs()]
    for suspect in find_suspects(failed, collective_slow=True):
        assert "normal" not in suspect.evidence
    unmeasured = [replace(pair, bandwidth=None, latency=None) for pair in Fleet(4).pairs()]
    suspect = only(find_suspects(unmeasured, collective_slow=True))
    assert (suspect.kind, suspect.where, suspect.confidence) == ("fabric", "", 0.5)
    assert suspect.evidence == "the collective over all 4 hosts is slow, and no pair of hosts could be compared"


def test_link_between_the_only_two_hosts_is_suspected_with_confidence_one_half() -> None:
    assert find_suspects(Fleet(2).pairs()) == []
    assert find_suspects([]) == []
    failed = [Pair(a="h0", b="h1", rail=rail, failed="connection closed") for rail in (0, 1)]
    for pairs, slow in ((Fleet(2).pairs(), True), (Fleet(2, nics={("h0", 1): 0.5}).pairs(), False), (failed, False)):
        suspect = only(find_suspects(pairs, collective_slow=slow))
        assert (suspect.kind, suspect.hosts, suspect.confidence) == ("link", ("h0", "h1"), 0.5)
        assert "with two hosts, the cause may be" in suspect.evidence


def with_failures(pairs: Iterable[Pair], fails: Callable[[Pair], bool]) -> list[Pair]:
    """Return the pairs. Each pair for which `fails` returns True has a failure instead of measurements."""
    return [
        replace(pair, bandwidth=None, latency=None, failed="timed out after 30 s") if fails(pair) else pair
        for pair in pairs
    ]


def test_failed_pairs_count_as_slow() -> None:
    pairs = Fleet(6, 2).pairs()
    suspect = only(find_suspects(with_failures(pairs, lambda pair: "h2" in (pair.a, pair.b))))
    assert (suspect.kind, suspect.where, suspect.measured) == ("host", "h2", None)
    suspect = only(find_suspects(with_failures(pairs, lambda pair: {pair.a, pair.b} == {"h2", "h3"})))
    assert (suspect.kind, set(suspect.hosts)) == ("link", {"h2", "h3"})
    assert "timed out after 30 s" in suspect.evidence


def test_link_of_a_failed_pair_is_suspected_if_each_host_was_measured_with_only_one_partner() -> None:
    first = set(all_rounds(Fleet(4).names)[0])
    pairs = [pair for pair in Fleet(4, 2).pairs() if (pair.a, pair.b) in first]
    suspect = only(find_suspects(with_failures(pairs, lambda pair: "h0" in (pair.a, pair.b))))
    assert (suspect.kind, suspect.confidence) == ("link", 0.5)


def test_nic_that_is_slow_with_most_partners_is_one_suspect() -> None:
    slow = {"h3", "h4", "h7", "h8", "h9", "h11", "h12", "h15"}
    pairs = [
        replace(pair, bandwidth=(pair.bandwidth or 0) * 0.4)
        if pair.rail == 1 and "h1" in (pair.a, pair.b) and slow & {pair.a, pair.b}
        else pair
        for pair in Fleet(16, 2).pairs()
    ]
    suspect = only(find_suspects(pairs))
    assert (suspect.kind, suspect.where) == ("nic", "h1 rail 1")
    assert suspect.confidence == pytest.approx(9 / 17)  # (8 + 1) / (15 + 2): slow with 8 of 15 partners


PARTS_OF_HOSTS = {"host", "nic", "gpu"}


def congested(fleet: Fleet, share: float, is_congested: Callable[[Pair], bool] = lambda _: True) -> list[Pair]:
    """Return the pairs of a fleet in a congested network: of the pairs that are congested, this share has half the bandwidth."""
    draw = random.Random(f"{fleet.seed}/{share}/congestion")  # noqa: S311
    return [
        replace(pair, bandwidth=(pair.bandwidth or 0) / (2 if draw.random() < share and is_congested(pair) else 1))
        for pair in fleet.pairs()
    ]


@pytest.mark.parametrize("share", [0.1, 0.2, 0.3])
@pytest.mark.parametrize(("size", "rails"), [(4, 8), (5, 4), (8, 1), (12, 1), (8, 8), (16, 8)])
def test_congestion_of_the_network_makes_no_part_of_a_host_suspect(size: int, rails: int, share: float) -> None:
    fleets = 60 if size * rails < 64 else 12
    result = [find_suspects(congested(Fleet(size, rails, seed), share)) for seed in range(fleets)]
    named = sum(bool(PARTS_OF_HOSTS & {item.kind for item in suspects}) for suspects in result)
    assert named <= (0.1 if rails > 1 else 0.15) * fleets
    if size >= 8 and rails > 1:
        assert all([item.kind for item in suspects] == ["fabric"] for suspects in result)


def test_gang_of_three_hosts_is_too_small_to_recognize_congestion() -> None:
    """Each host has only two pairs. So a host whose two pairs are congested is named, as documented."""
    result = [find_suspects(congested(Fleet(3, 1, seed), 0.2)) for seed in range(200)]
    named = sum(bool(PARTS_OF_HOSTS & {item.kind for item in suspects}) for suspects in result)
    assert 0.04 < named / 200 < 0.2


@pytest.mark.parametrize(("size", "rails", "in_rack"), [(8, 8, 2), (16, 8, 4), (16, 1, 4)])
@pytest.mark.parametrize("share", [0.25, 0.5])
def test_congested_uplinks_of_one_rack_make_no_part_of_its_hosts_suspect(
    size: int, rails: int, in_rack: int, share: float
) -> None:
    rack = {f"h{number}" for number in range(in_rack)}
    for seed in range(10):
        pairs = congested(Fleet(size, rails, seed), share, lambda pair: (pair.a in rack) != (pair.b in rack))
        assert not PARTS_OF_HOSTS & {item.kind for item in find_suspects(pairs)}


@pytest.mark.parametrize(("size", "rails", "share"), [(8, 1, 0.1), (8, 4, 0.2), (8, 8, 0.2), (16, 8, 0.3)])
def test_slow_nic_is_found_in_a_congested_network(size: int, rails: int, share: float) -> None:
    expected = ("nic", "h2 rail 1") if rails > 1 else ("host", "h2")
    fleets = 20 if size < 16 else 5
    result = [
        kinds_and_names(
            find_suspects(congested(Fleet(size, rails, seed, nics={("h2", min(1, rails - 1)): 0.4}), share))
        )
        for seed in range(fleets)
    ]
    assert sum(expected in suspects for suspects in result) >= 0.95 * fleets


@pytest.mark.parametrize("size", [5, 8, 16])
@pytest.mark.parametrize("count", [1, 2, 3])
def test_failed_nics_are_found_in_a_congested_network(size: int, count: int) -> None:
    """Congestion slows exchanges but fails none."""
    bad = {(f"h{number}", number) for number in range(count)}
    pairs = congested(Fleet(size, 4), 0.3)
    failed = with_failures(pairs, lambda pair: bool({(pair.a, pair.rail), (pair.b, pair.rail)} & bad))
    assert {("nic", f"{host} rail {rail}") for host, rail in bad} <= kinds_and_names(find_suspects(failed))


@pytest.mark.parametrize("share", [0.0, 0.01, 0.02])
@pytest.mark.parametrize("bad", [[("h2", 1)], [("h2", 1), ("h5", 3)]])
def test_ports_that_are_slow_with_most_partners_are_found_if_few_other_pairs_are_slow(
    share: float, bad: list[tuple[str, int]]
) -> None:
    for seed in range(5):
        pairs = [
            replace(pair, bandwidth=(pair.bandwidth or 0) / 2)
            if any(rail == pair.rail and host in (pair.a, pair.b) for host, rail in bad)
            and (int(pair.a[1:]) + int(pair.b[1:])) % 3
            else pair
            for pair in congested(Fleet(16, 8, seed), share)
        ]
        result = kinds_and_names(find_suspects(pairs))
        assert {item for item in result if item[0] in PARTS_OF_HOSTS} == {
            ("nic", f"{host} rail {rail}") for host, rail in bad
        }


@pytest.mark.parametrize("edge_count", [2, 15, 4095])
@pytest.mark.parametrize("chance", [0.0, 1e-6, 0.01, 0.3, 0.999, 1.0])
def test_number_of_slow_pairs_is_improbable_if_the_binomial_tail_is_small(edge_count: int, chance: float) -> None:
    probability, one = Fraction(chance), Fraction(1)
    for count in {1, edge_count // 10 + 1, edge_count // 2 + 1, edge_count}:
        if edge_count < 100:
            tail = sum(
                math.comb(edge_count, number) * probability**number * (one - probability) ** (edge_count - number)
                for number in range(count, edge_count + 1)
            )
            assert is_improbable(count, edge_count, chance, 8) is (8 * tail <= CHANCE)
        elif chance <= 0.01 and count > 1:
            assert is_improbable(count, edge_count, chance, 8)


def test_fabric_is_suspected_if_slow_pairs_have_no_common_part() -> None:
    draw = random.Random(1)  # noqa: S311
    pairs = [
        replace(pair, bandwidth=(pair.bandwidth or 0) * (0.5 if draw.random() < 0.1 else 1))
        for pair in Fleet(16, 2).pairs()
    ]
    assert only(find_suspects(pairs)).kind == "fabric"


def test_pairs_are_compared_with_pairs_of_their_kind() -> None:
    """Pairs of hosts in different racks are of another kind (`PairKind`). Here they have half the bandwidth. No host is bad."""
    far = {"h14", "h15"}
    pairs = [
        replace(pair, bandwidth=(pair.bandwidth or 0) * 0.5, kind=PairKind(across=True))
        if len(far & {pair.a, pair.b}) == 1
        else pair
        for pair in Fleet(16, 2).pairs()
    ]
    assert find_suspects(pairs) == []


def test_confidence_grows_with_the_number_of_comparisons() -> None:
    result = [only(find_suspects(Fleet(size, hosts={"h1": 0.5}).pairs())).confidence for size in (3, 4, 8, 64)]
    assert result == pytest.approx([3 / 4, 4 / 5, 8 / 9, 64 / 65])


Faults = tuple[set[str], list[frozenset[str]]]
"""Bad hosts, and bad links; each link is given by its two hosts."""


def run_search(size: int, faults: Faults, together: int = 0) -> ProbeConclusion:
    """Simulate the launches that `Bisection` plans for `size` hosts until it returns a conclusion.

    A group with a bad host or a bad link fails. A group of at least `together` hosts also fails, even if no host or link in it is
    bad; 0 disables this.
    """
    bad, links = faults
    planner, history = Bisection([f"h{number}" for number in range(size)]), []
    while True:
        groups = planner.next_launches(history)
        if isinstance(groups, ProbeConclusion):
            return groups
        hosts = [host for group in groups for host in group]
        assert len(hosts) == len(set(hosts)), "two groups of one launch have a host in common"
        assert all(len(group) > 1 for group in groups)
        history.append(
            [
                GroupOutcome(
                    hosts=tuple(group),
                    worked=not bad & set(group)
                    and not any(link <= set(group) for link in links)
                    and not 0 < together <= len(group),
                )
                for group in groups
            ]
        )
        assert len(history) < 80


def faulty(size: int, hosts: int, links: int, seed: int) -> Faults:
    """Return `hosts` bad hosts, and `links` bad links between other hosts."""
    draw = random.Random(f"{size}/{hosts}/{links}/{seed}")  # noqa: S311
    names = [f"h{number}" for number in range(size)]
    bad = set(draw.sample(names, hosts))
    ends = draw.sample([name for name in names if name not in bad], 2 * links)
    return bad, [frozenset(ends[number : number + 2]) for number in range(0, 2 * links, 2)]


def suspected(conclusion: ProbeConclusion) -> Faults:
    """Return the hosts and links that a conclusion suspects."""
    hosts = {item.where for item in conclusion.suspects if item.kind == "host"}
    return hosts, [frozenset(item.hosts) for item in conclusion.suspects if item.kind == "link"]


@pytest.mark.parametrize("size", SIZES)
def test_bad_hosts_are_found_by_probe_launches(size: int) -> None:
    """A single bad host is found in at most log2(size) + 3 launches."""
    for hosts in range(1, min(5, (size - 1) // 2) + 1):
        most = 0
        for seed in range(20 if size <= 64 else 3 if size < 4096 else 1):
            faults = faulty(size, hosts, 0, seed)
            conclusion = run_search(size, faults)
            assert suspected(conclusion) == faults
            assert set(conclusion.good) == {f"h{number}" for number in range(size)} - faults[0]
            most = max(most, conclusion.launches)
        print(f"{size} hosts, {hosts} bad: at most {most} launches (log2 N + 3 = {math.log2(size) + 3:.1f})")
        assert hosts > 1 or most <= math.log2(size) + 3


@pytest.mark.parametrize("size", SIZES)
def test_two_hosts_that_fail_only_together_are_found(size: int) -> None:
    for hosts, links in ((0, 1), (1, 1), (2, 2)) if size < 4096 else ((1, 1),):
        if 2 * hosts + 2 * links > size:
            continue
        most = 0
        for seed in range(10 if size <= 64 else 1):
            faults = faulty(size, hosts, links, seed)
            conclusion = run_search(size, faults)
            assert suspected(conclusion)[0] == faults[0]
            assert set(suspected(conclusion)[1]) == set(faults[1])
            most = max(most, conclusion.launches)
        print(f"{size} hosts, {hosts} bad, {links} bad links: at most {most} launches")
        assert most <= (2 * math.log2(size) + 5) * max(1, links) + 3 * hosts


def test_link_or_fabric_is_suspected_if_failures_cannot_be_attributed() -> None:
    both = run_search(2, ({"h1"}, []))
    assert [(item.kind, item.hosts, item.confidence) for item in both.suspects] == [("link", ("h0", "h1"), 0.5)]
    none = run_search(5, ({"h0", "h1", "h2", "h3"}, []))
    assert [(item.kind, none.good) for item in none.suspects] == [("fabric", ())]
    many = run_search(16, (set(), []), together=5)  # groups of five or more hosts fail, smaller groups do not
    assert [item.kind for item in many.suspects] == ["fabric"]
    assert len(many.good) == 16


def test_planner_is_deterministic_and_repeats_groups_without_an_outcome() -> None:
    planner = Bisection(["a", "b", "c", "d"])
    first = planner.next_launches([])
    assert first == planner.next_launches([])
    assert isinstance(first, list)
    outcome_of_one_group = [[GroupOutcome(hosts=tuple(first[0]), worked=True)]]
    assert planner.next_launches(outcome_of_one_group) == first[1:]


@pytest.mark.parametrize("count", [*range(12), 33])
def test_tournament_has_every_pair_once_and_every_host_at_most_once_per_round(count: int) -> None:
    hosts = [f"h{number}" for number in range(count)]
    rounds = all_rounds(hosts)
    assert len(rounds) == (0 if count < 2 else count - 1 + count % 2)
    pairs = [frozenset(pair) for played in rounds for pair in played]
    assert len(pairs) == len(set(pairs)) == count * (count - 1) // 2
    for played in rounds:
        assert len({host for pair in played for host in pair}) == 2 * len(played) == count - count % 2
    for host in hosts:
        assert sorted(tournament.partners(hosts, host)) == sorted(set(hosts) - {host})


def test_partial_tournament_gives_all_hosts_equally_many_partners_and_connects_them_in_four_steps() -> None:
    hosts = [f"h{number}" for number in range(512)]
    rounds = all_rounds(hosts, 16)
    assert len(rounds) == 16
    partners = {host: set(tournament.partners(hosts, host, 16)) for host in hosts}
    assert {len(others) for others in partners.values()} == {16}
    reached, steps = {"h0"}, 0
    while len(reached) < len(hosts):
        reached |= {other for host in reached for other in partners[host]}
        steps += 1
    assert steps <= 4


def views(
    plan: Plan, fleet: Fleet, *, both_ends: bool = True, fails: Callable[[Pair], bool] = lambda pair: False
) -> list[HostView]:
    """Return the judge's view of each host of a plan, with the pair measurements of the fleet.

    `both_ends`: whether both hosts of a pair report its measurements, not only the first. `fails`: returns whether a pair failed.
    """
    values: dict[str, list[Observation]] = {host: [] for host in fleet.names}
    for pair in fleet.pairs():
        for host, other in ((pair.a, pair.b), (pair.b, pair.a))[: 1 + both_ends]:
            for name, unit, value in (("bandwidth", "B/s", pair.bandwidth), ("latency", "s", pair.latency)):
                of_pair: dict[str, Any] = (
                    {"status": "error", "reason": "timed out"}
                    if fails(pair)
                    else {"status": "measured", "value": value}
                )
                device = plan.host(host).scopes[pair.rail]
                scope = f"{device},partner={other}"
                values[host].append(Observation(name=f"pairs.{name}", scope=scope, stage="gang", unit=unit, **of_pair))
    return [
        HostView(plan, host, Evidence(records=(record(plan, host), record(plan, host, *values[host.name]))), [])
        for host in plan.hosts
    ]


def record(plan: Plan, host: PlannedHost, *observations: Observation) -> Record:
    """Return the gang record of a host, with these observations. Without observations, return the host record."""
    return Record(
        run_id=plan.run_id,
        nonce=plan.nonce,
        host=host.name,
        gang=host.gang if observations else "",
        began=builders.WHEN,
        ended=builders.WHEN,
        rackproof="0",
        gpus=tuple(builders.gpu(host.name, index) for index in host.devices if host.device == "gpu"),
        observations=observations,
        launches=(builders.launch("gang", plan.gangs()[host.gang]),) if observations else (),
    )


def plan_of(fleet: Fleet, profile: str = "standard") -> Plan:
    return builders.plan(*fleet.names, gpu_count=fleet.rails, profile=profile)


def named_parts(verdicts: Sequence[Verdict], result: str) -> set[tuple[str, str]]:
    """Return host and scope of the verdicts that are `result`: pass, fail or inconclusive."""
    return {(item.host, item.scope) for item in verdicts if item.verdict == result}


def test_healthy_gang_passes_in_bandwidth_and_latency() -> None:
    fleet = Fleet(4, 2)
    verdicts = judge_gangs(views(plan_of(fleet), fleet), [])
    assert {(item.host, item.name, item.verdict) for item in verdicts} == {
        (host, name, "pass") for host in fleet.names for name in ("pairs.bandwidth", "pairs.latency")
    }
    assert {(item.criterion, item.stage, item.basis) for item in verdicts} == {("localise", "gang", "policy")}
    assert all(item.source and item.value for item in verdicts)


def test_slow_nic_fails_but_not_its_gpu_or_another_host() -> None:
    fleet = Fleet(4, 2, nics={("h2", 1): 0.5})
    verdicts = judge_gangs(views(plan_of(fleet), fleet), [])
    (verdict,) = (item for item in verdicts if item.verdict != "pass")
    assert (verdict.verdict, verdict.host, verdict.scope, verdict.part_scope) == ("fail", "h2", "gpu=1", "nic=rail1")
    assert (verdict.serial, "; it is the NIC that GPU 1 (serial h2-1, PCI 0000:" in verdict.detail) == ("", True)
    assert (verdict.name, verdict.unit, verdict.operator, verdict.action) == (
        "pairs.bandwidth",
        "B/s",
        "ge",
        "inspect_hardware",
    )
    assert "suspect NIC h2 rail 1 (confidence 0.80)" in verdict.reason
    assert isinstance(verdict.value, float)
    assert isinstance(verdict.limit, float)
    assert verdict.value < verdict.limit


def test_gpu_with_a_failed_verdict_is_suspected_instead_of_its_nic() -> None:
    fleet = Fleet(4, 2, nics={("h2", 1): 0.5})
    plan = plan_of(fleet)
    alone = Verdict(
        host="h2",
        scope="gpu=1",
        name="host_copy.bandwidth",
        stage="benchmark",
        verdict="fail",
        criterion="x",
        reason="slow",
        action="inspect_hardware",
    )
    (verdict,) = (item for item in judge_gangs(views(plan, fleet), [alone]) if item.verdict == "fail")
    assert "suspect GPU h2 rail 1" in verdict.reason
    attributed = replace(alone, scope="gpu=1,peer=0", part="gpu=0")  # the cause of this failure is GPU 0, not GPU 1
    (verdict,) = (item for item in judge_gangs(views(plan, fleet), [attributed]) if item.verdict == "fail")
    assert "suspect NIC h2 rail 1" in verdict.reason


def test_delayed_host_fails_and_slow_link_is_inconclusive_on_both_hosts() -> None:
    fleet = Fleet(6, 2, delays={"h1": 1e-4}, links={frozenset(("h3", "h4")): 0.4})
    verdicts = judge_gangs(views(plan_of(fleet), fleet), [])
    assert named_parts(verdicts, "fail") == {("h1", "host")}
    assert named_parts(verdicts, "inconclusive") == {("h3", "gang=r1"), ("h4", "gang=r1")}
    assert {item.host for item in verdicts if item.verdict == "pass"} == {"h0", "h2", "h5"}


def test_failed_pair_fails_both_hosts_if_both_work_with_other_hosts() -> None:
    fleet = Fleet(4, 2)
    lost = views(plan_of(fleet), fleet, fails=lambda pair: {pair.a, pair.b} == {"h0", "h1"})
    assert named_parts(judge_gangs(lost, []), "fail") == {("h0", "gang=r1"), ("h1", "gang=r1")}


@pytest.mark.parametrize(
    ("reporting_failure", "expected"), [(("h0",), set()), (("h0", "h1"), {("h0", "gang=r1"), ("h1", "gang=r1")})]
)
def test_link_of_a_pair_fails_only_if_neither_host_measured_the_pair(
    reporting_failure: tuple[str, ...], expected: set[tuple[str, str]]
) -> None:
    fleet = Fleet(4, 2)
    measured = views(plan_of(fleet), fleet)
    lost = views(plan_of(fleet), fleet, fails=lambda pair: {pair.a, pair.b} == {"h0", "h1"})
    mixed = [
        failed if failed.host.name in reporting_failure else healthy
        for healthy, failed in zip(measured, lost, strict=True)
    ]
    assert named_parts(judge_gangs(mixed, []), "fail") == expected


SLOW_COLLECTIVE = Verdict(
    host="h0",
    scope="gang=r1",
    name="collective.all_reduce.busbw",
    stage="gang",
    verdict="fail",
    criterion="x",
    reason="slow",
)


def test_slow_collective_of_two_hosts_fails_their_link_unless_a_setting_explains_it() -> None:
    fleet = Fleet(2, 2)
    both = views(plan_of(fleet), fleet)
    assert judge_gangs(both, []) == []
    assert named_parts(judge_gangs(both, [SLOW_COLLECTIVE]), "fail") == {("h0", "gang=r1"), ("h1", "gang=r1")}
    assert judge_gangs(both, [replace(SLOW_COLLECTIVE, action="configure")]) == []


def test_slow_collective_with_normal_pairs_fails_the_fabric_on_every_host() -> None:
    fleet = Fleet(4, 2)
    verdicts = judge_gangs(views(plan_of(fleet), fleet), [SLOW_COLLECTIVE])
    assert named_parts(verdicts, "fail") == {(host, "gang=r1") for host in fleet.names}
    assert all("suspect fabric" in item.reason for item in verdicts)
    of_setting = judge_gangs(views(plan_of(fleet), fleet), [replace(SLOW_COLLECTIVE, action="configure")])
    assert {item.verdict for item in of_setting} == {"pass"}, (
        "a setting that explains the collective is no fault of the fabric"
    )


def test_measurement_by_one_host_of_a_pair_is_enough_and_hosts_without_pairs_get_no_verdict() -> None:
    fleet = Fleet(4, 2, hosts={"h2": 0.5})
    plan = plan_of(fleet)
    assert named_parts(judge_gangs(views(plan, fleet, both_ends=False), []), "fail") == {("h2", "host")}
    nothing = [HostView(plan, host, Evidence(records=(record(plan, host),)), []) for host in plan.hosts]
    assert judge_gangs(nothing, []) == []


def test_rehearsal_reports_only_gross_faults_of_whole_hosts() -> None:
    """In a rehearsal (a run on CPUs), a slow host fails only below 25 % of the typical bandwidth. A slow NIC does not fail."""
    for share, expected in ((0.4, set()), (0.1, {("h2", "host")})):
        fleet = Fleet(4, 2, hosts={"h2": share}, nics={("h1", 1): 0.05})
        result = judge_gangs(views(plan_of(fleet, "rehearsal"), fleet), [])
        assert named_parts(result, "fail") == expected


def test_rehearsal_uses_the_slower_of_the_two_values_of_a_pair() -> None:
    """A slow host may report a bandwidth that is too high, because it counts data in its socket buffer as sent."""
    fleet = Fleet(4, 1, hosts={"h2": 0.1})
    host_views = views(plan_of(fleet, "rehearsal"), fleet)
    (slow,) = (view for view in host_views if view.host.name == "h2")
    observed = [replace(item, value=10 * item.value) for item in slow.evidence.records[1].observations]
    fast = replace(
        slow.evidence, records=(slow.evidence.records[0], replace(slow.evidence.records[1], observations=observed))
    )
    inflated = [view if view is not slow else HostView(view.plan, view.host, fast, []) for view in host_views]
    assert named_parts(judge_gangs(inflated, []), "fail") == {("h2", "host")}
