"""Slow RDMA ports, cables and switches are found by measurements without NCCL.

Two layers are measured between the hosts of a gang (the hosts of one multi-node launch): NCCL between pairs of GPUs, and RDMA
between pairs of ports. Failed and inconclusive verdicts on one layer state what the other layer shows. A rail is a set with one
port of each host: the port with the number of the rail.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest

from fleet.judge.host_view import HostView
from fleet.judge.localization import Pair, find_suspects, judge_gangs
from fleet.judge.localization import verdicts as localization_verdicts
from fleet.judge.localization.port_pairs import ADDRESS, NEAREST
from schemas.plans import Plan
from schemas.records import Metric, Observation, Snapshot
from schemas.reports import Verdict
from tests import builders
from tests.unit.fleet.judge.localization.test_localization import Fleet, Score, broken, named_parts, plan_of, views

RATE = 5e10
"""Data rate of a port in B/s."""
HEALTHY = 48e9
"""Bandwidth of a healthy pair of a `Fleet` in B/s."""
Sent = Callable[[str, str, int], float]
"""Sender, receiver and rail -> share of the healthy bandwidth."""


def port_figures(host: str, partner: str, rail: int, share: float, **params: Any) -> list[Observation]:
    """Return the bandwidth with which a host sent to a partner on a rail: `share` of RATE, or an error if the share is 0."""
    scope = f"hca=mlx5_{rail},port=1,partner={partner}"
    settings: dict[str, Any] = {
        "op": "write",
        "direction": "one_way",
        "memory": "host",
        "sharing": "together",
        "rail": rail,
    } | params
    outcome: dict[str, Any] = (
        {"status": "measured", "value": RATE * share} if share else {"status": "error", "reason": "packets are lost"}
    )
    name = "verbs.bandwidth"
    return [Observation(name=name, scope=scope, stage="gang", unit="B/s", params=settings, **outcome)]


def with_ports(plan: Plan, nccl: Fleet, ports: Sequence[Pair], sent: Sent = lambda *_: 1.0) -> list[HostView]:
    """Return the judge's view of each host. The pairs of GPUs are measured as in `nccl`, the pairs of ports as in `ports`.

    `sent(sender, receiver, rail)` returns the factor by which the bandwidth of a pair of ports is multiplied in this direction.
    """
    both = views(plan, nccl)
    figures: dict[str, list[Observation]] = {host: [] for host in nccl.names}
    for pair in ports:
        for host, other in ((pair.a, pair.b), (pair.b, pair.a)):
            share = (pair.bandwidth or 0) / HEALTHY * sent(host, other, pair.rail)
            figures[host] += port_figures(host, other, pair.rail, share)
    return [_with_figures(plan, view, figures[view.host.name]) for view in both]


def _with_figures(plan: Plan, view: HostView, figures: Sequence[Observation]) -> HostView:
    host_record, gang_record = view.evidence.records
    gang_record = replace(gang_record, observations=(*gang_record.observations, *figures))
    return HostView(plan, view.host, replace(view.evidence, records=(host_record, gang_record)), [])


def of_layer(verdicts: Sequence[Verdict], benchmark: str) -> list[Verdict]:
    """Return the verdicts on the figures of `benchmark`: `pairs` (NCCL, between GPUs) or `verbs` (between ports)."""
    return [item for item in verdicts if item.name.startswith(f"{benchmark}.")]


def test_healthy_ports_pass_without_a_note_on_nccl() -> None:
    fleet = Fleet(4, 2)
    verdicts = judge_gangs(with_ports(plan_of(fleet), fleet, fleet.pairs()), [])
    assert {(item.host, item.verdict) for item in of_layer(verdicts, "verbs")} == {
        (name, "pass") for name in fleet.names
    }
    assert not any("NCCL" in item.reason for item in verdicts)


def test_hosts_without_port_figures_are_judged_by_the_pairs_of_gpus() -> None:
    fleet = Fleet(4, 2, nics={("h2", 1): 0.5})
    plan = plan_of(fleet)
    assert judge_gangs(with_ports(plan, fleet, []), []) == judge_gangs(views(plan, fleet), [])


def test_slow_port_is_named_by_host_and_port_and_explains_the_pairs_of_gpus() -> None:
    fleet = Fleet(4, 2, nics={("h2", 1): 0.5})
    verdicts = judge_gangs(with_ports(plan_of(fleet), fleet, fleet.pairs()), [])
    (port,) = (item for item in of_layer(verdicts, "verbs") if item.verdict != "pass")
    assert (port.host, port.scope, port.part_scope, port.verdict) == (
        "h2",
        "hca=mlx5_1,port=1",
        "hca=mlx5_1",
        "fail",
    )
    assert "suspect NIC h2 rail 1" in port.reason
    assert port.reason.endswith("the pairs of GPUs are slow or fail on this host too")
    (gpu,) = (item for item in of_layer(verdicts, "pairs") if item.verdict != "pass")
    assert gpu.detail.endswith("the cause is a port, cable or switch, not NCCL")
    assert gpu.part_scope == "hca=mlx5_1", "both verdicts on the fault must name the same part"


@pytest.mark.parametrize(
    ("rails", "ports", "part"),
    [
        pytest.param(2, {"nics": {("h2", 1): 0.5}}, "hca=mlx5_1", id="its port is slow"),
        pytest.param(1, {"nics": {("h2", 0): 0.5}}, "host", id="its port is slow, and the host has no other"),
        pytest.param(2, {"hosts": {"h2": 0.5}}, "nic=rail1", id="all ports of the host are slow"),
        pytest.param(2, {"bad_rails": {1: 0.5}}, "rail=1", id="its rail is slow"),
        pytest.param(2, {}, "gpu=1", id="its port is normal"),
        pytest.param(2, {"nics": {("h2", 0): 0.5}}, "gpu=1", id="the port of another GPU is slow"),
        pytest.param(2, {"nics": {("h1", 1): 0.5}}, "gpu=1", id="the port of another host is slow"),
    ],
)
def test_gpu_with_another_failure_is_suspected_only_if_its_port_is_normal(
    rails: int, ports: dict[str, Any], part: str
) -> None:
    nccl = Fleet(4, rails, nics={("h2", rails - 1): 0.5})
    alone = Verdict(
        host="h2",
        scope=f"gpu={rails - 1}",
        name="gpu.vbios_version",
        verdict="fail",
        criterion="uniform-vbios",
        reason="differs",
        action="configure",
    )
    verdicts = judge_gangs(with_ports(plan_of(nccl), nccl, Fleet(4, rails, **ports).pairs()), [alone])
    (gpu,) = (item for item in of_layer(verdicts, "pairs") if item.verdict != "pass")
    assert gpu.part_scope == part


def test_slow_nccl_with_normal_ports_is_not_attributed_to_the_fabric() -> None:
    fleet = Fleet(4, 2, nics={("h2", 1): 0.5})
    verdicts = judge_gangs(with_ports(plan_of(fleet), fleet, Fleet(4, 2).pairs()), [])
    assert {item.verdict for item in of_layer(verdicts, "verbs")} == {"pass"}
    (gpu,) = (item for item in of_layer(verdicts, "pairs") if item.verdict != "pass")
    assert gpu.host == "h2"
    assert gpu.detail.endswith("the cause is NCCL or the path of the GPU, not the fabric")


def test_detail_of_a_slow_port_states_that_normal_nccl_uses_another_port_or_path() -> None:
    ports = Fleet(4, 2, nics={("h2", 1): 0.5})
    verdicts = judge_gangs(with_ports(plan_of(ports), Fleet(4, 2), ports.pairs()), [])
    assert {item.verdict for item in of_layer(verdicts, "pairs")} == {"pass"}
    (port,) = (item for item in verdicts if item.verdict != "pass")
    assert port.detail.endswith("NCCL is normal on this host (pairs.bandwidth): it uses another port or another path")


def test_layer_without_a_verdict_on_the_host_is_not_called_normal() -> None:
    ports = Fleet(4, 2, nics={("h2", 1): 0.5})
    verdicts = judge_gangs(with_ports(plan_of(ports), Fleet(4, 2), ports.pairs()), [])
    (slow,) = (item for item in verdicts if item.verdict != "pass")
    others = [item for item in of_layer(verdicts, "pairs") if item.host != "h2"]
    assert localization_verdicts._seen_by_nccl(slow, others, ["h2"]) == ""
    assert localization_verdicts._seen_by_ports(slow, others, ["h2"]) == ""


def test_verdict_gets_a_note_only_if_it_failed_on_a_host_that_the_other_layer_measured() -> None:
    ports = Fleet(4, 2, nics={("h2", 1): 0.5})
    verdicts = judge_gangs(with_ports(plan_of(ports), Fleet(4, 2), ports.pairs()), [])
    slow = next(item for item in verdicts if item.verdict != "pass")
    passed = next(item for item in verdicts if item.host == "h2" and item.verdict == "pass")
    for note in (localization_verdicts._seen_by_nccl, localization_verdicts._seen_by_ports):
        for verdict, measured_hosts, is_noted in ((slow, ["h2"], True), (slow, ["h1"], False), (passed, ["h2"], False)):
            assert bool(note(verdict, verdicts, measured_hosts)) is is_noted


@pytest.mark.parametrize(
    ("scope", "slow", "part"),
    [
        ("gang=r1", ["rail=1"], "rail=1"),
        ("gang=r1", ["switch=s1"], "switch=s1"),
        ("gang=r1", ["hca=mlx5_1"], ""),
        ("gang=r1", ["rail=1", "rail=2"], ""),
        ("gpu=1", ["rail=1"], "rail=1"),
        ("gpu=1", ["hca=mlx5_1"], "hca=mlx5_1"),
        ("gpu=1", ["host"], "nic=rail1"),
    ],
)
def test_nccl_verdict_is_attributed_to_the_only_slow_part_that_the_ports_show(
    scope: str, slow: list[str], part: str
) -> None:
    """`slow`: the parts of the failed verdicts on ports. `part`: the part of the NCCL verdict after the comparison with these.

    Before the comparison, a verdict with the scope `gpu=1` has the part `nic=rail1`. It can be attributed to a rail, switch or
    port. A verdict with the scope `gang=r1` has no part. It can be attributed to a rail or switch only.
    """

    def verdict(of_scope: str, of_part: str, result: str = "fail") -> Verdict:
        return Verdict(host="h2", scope=of_scope, part=of_part, name="pairs.bandwidth", verdict=result, criterion="c",
                       reason="slow")  # fmt: skip

    of_nccl = verdict(scope, "nic=rail1" if scope == "gpu=1" else "")
    ports = [verdict("hca=mlx5_1,port=1", each) for each in slow]
    assert localization_verdicts._with_port(of_nccl, ports, ()).part == part
    others = [replace(item, host="h1") for item in ports] + [replace(item, verdict="pass") for item in ports]
    assert localization_verdicts._with_port(of_nccl, others, ()) == of_nccl


@pytest.mark.parametrize(
    ("near", "part"), [({"hca=mlx5_1"}, "switch=s1"), ({"hca=mlx5_5"}, "hca=mlx5_5"), ({"hca=mlx5_2"}, "nic=rail1"),
                       ({"hca=mlx5_1", "hca=mlx5_5"}, "nic=rail1"), (set(), "nic=rail1")],
)  # fmt: skip
def test_of_two_slow_parts_the_one_of_the_adapter_near_the_gpu_is_chosen(near: set[str], part: str) -> None:
    """The ports show two slow parts. The NCCL verdict is attributed to one of them, or it keeps its part `nic=rail1`.

    `near`: the adapters that the GPU of the verdict is likely to use.
    """
    slow = Verdict(
        host="h2", scope="gpu=1", part="nic=rail1", name="pairs.bandwidth", verdict="fail", criterion="c", reason="slow"
    )
    ports = [
        replace(slow, scope="hca=mlx5_1,port=1", part="switch=s1"),
        replace(slow, scope="hca=mlx5_5,port=1", part="hca=mlx5_5"),
    ]
    assert localization_verdicts._with_port(slow, ports, near).part == part


@pytest.mark.parametrize("nearest", ["one adapter each", "the other adapter", "both adapters", "unknown"])
def test_two_slow_ports_of_a_host_explain_the_pairs_of_their_gpus(nearest: str) -> None:
    """Two of the five ports of h2 are slow. `nearest`: the adapters nearest to GPU 0 and to GPU 1."""
    fleet = Fleet(5, 5, nics={("h2", 0): 0.5, ("h2", 1): 0.6})
    addresses = {f"hca=mlx5_{rail}": f"0000:{rail + 1:02x}:00.0" for rail in range(5)}
    first, second = list(addresses.values())[:2]
    of_gpus = {
        "one adapter each": (first, second), "the other adapter": (second, first),
        "both adapters": (f"{first} {second}", f"{first} {second}"), "unknown": None,
    }[nearest]  # fmt: skip
    metrics = [Metric(name=ADDRESS, unit="1", values=addresses)]
    if of_gpus:
        metrics.append(Metric(name=NEAREST, unit="1", values={"gpu=0": of_gpus[0], "gpu=1": of_gpus[1]}))
    taken = Snapshot(stage="gang", phase="after", at=builders.WHEN, duration_s=0.1, metrics=tuple(metrics))
    plan = plan_of(fleet)
    with_readings = [
        HostView(plan, view.host, builders.with_snapshot(view.evidence, taken), [])
        for view in with_ports(plan, fleet, fleet.pairs())
    ]
    result = {
        item.scope: item.part_scope
        for item in of_layer(judge_gangs(with_readings, []), "pairs")
        if item.verdict != "pass"
    }
    order = (1, 0) if nearest == "the other adapter" else (0, 1)
    assert result == {"gpu=0": f"hca=mlx5_{order[0]}", "gpu=1": f"hca=mlx5_{order[1]}"}


def test_slow_collective_with_normal_pairs_and_ports_is_not_attributed_to_the_fabric() -> None:
    fleet = Fleet(4, 2)
    slow = Verdict(host="h0", scope="gang=r1", name="collective.all_reduce.busbw", stage="gang", verdict="fail",
                   criterion="x", reason="slow")  # fmt: skip
    verdicts = judge_gangs(with_ports(plan_of(fleet), fleet, fleet.pairs()), [slow])
    failed = [item for item in verdicts if item.verdict == "fail"]
    assert {item.host for item in failed} == {*fleet.names}
    assert all("not the fabric" in item.reason for item in failed)


@pytest.mark.parametrize("is_sender", [True, False])
def test_port_that_is_slow_in_one_direction_is_found(is_sender: bool) -> None:
    fleet = Fleet(4, 2)

    def sent(host: str, other: str, rail: int) -> float:
        return 0.5 if rail == 1 and (host if is_sender else other) == "h2" else 1.0

    verdicts = judge_gangs(with_ports(plan_of(fleet), fleet, fleet.pairs(), sent), [])
    assert named_parts(verdicts, "fail") == {("h2", "hca=mlx5_1,port=1")}
    assert named_parts(verdicts, "inconclusive") == set()


@pytest.mark.parametrize(
    "skips", [0, 1], ids=["one failed test of each pair", "a failed and a skipped test of each pair"]
)
def test_port_whose_pairs_all_fail_is_named(skips: int) -> None:
    """The profile `extended` tests the rails of two hosts one by one, then all at once.

    The second test skips a rail if the first test of this rail failed.
    """
    fleet = Fleet(4, 2)

    def sent(host: str, other: str, rail: int) -> float:
        return float("h2" not in (host, other) or rail == 0)

    plan, of_hosts = plan_of(fleet), []
    for view in with_ports(plan, fleet, fleet.pairs(), sent):
        failed = [item for record in view.evidence.records for item in record.observations if item.status == "error"]
        skipped = [replace(item, status="skipped", reason="an earlier test of the rail failed") for item in failed]
        of_hosts.append(_with_figures(plan, view, skipped * skips))
    assert named_parts(judge_gangs(of_hosts, []), "fail") == {("h2", "hca=mlx5_1,port=1")}


@pytest.mark.parametrize("size", [2, 3, 4])
def test_hosts_pass_if_only_one_host_of_one_pair_reports_errors(size: int) -> None:
    fleet = Fleet(size, 2)

    def sent(host: str, other: str, _: int) -> float:
        return float((host, other) != ("h0", "h1"))

    verdicts = judge_gangs(with_ports(plan_of(fleet), fleet, fleet.pairs(), sent), [])
    assert {item.host for item in of_layer(verdicts, "verbs") if item.verdict != "pass"} == set()


def test_no_port_fails_if_a_host_reports_errors_with_only_half_of_its_partners() -> None:
    fleet = Fleet(5, 1)

    def sent(host: str, other: str, _: int) -> float:
        return float(host != "h0" or other not in ("h1", "h2"))

    verdicts = judge_gangs(with_ports(plan_of(fleet), fleet, fleet.pairs(), sent), [])
    assert {item.verdict for item in of_layer(verdicts, "verbs")} == {"pass"}


def test_port_that_reports_errors_with_every_partner_is_named() -> None:
    fleet = Fleet(4, 2)

    def sent(host: str, _: str, rail: int) -> float:
        return float((host, rail) != ("h2", 1))

    verdicts = judge_gangs(with_ports(plan_of(fleet), fleet, fleet.pairs(), sent), [])
    assert named_parts(verdicts, "fail") == {("h2", "hca=mlx5_1,port=1")}
    assert named_parts(verdicts, "inconclusive") == set()


def test_slow_cable_between_the_only_two_hosts_is_inconclusive_on_both() -> None:
    fleet = Fleet(2, 2)
    verdicts = judge_gangs(
        with_ports(plan_of(fleet), fleet, fleet.pairs(), lambda host, other, rail: 0.5 if rail else 1.0), []
    )
    assert {(item.host, item.verdict) for item in of_layer(verdicts, "verbs")} == {
        ("h0", "inconclusive"),
        ("h1", "inconclusive"),
    }


def test_only_figures_of_one_way_writes_in_host_memory_are_compared() -> None:
    fleet = Fleet(4, 1)
    plan = plan_of(fleet)
    healthy = with_ports(plan, fleet, fleet.pairs())
    others = [
        _with_figures(plan, view, [item for other in fleet.names if other != view.host.name for item in [
            *port_figures(view.host.name, other, 0, 0.1, op="read"), *port_figures(view.host.name, other, 0, 0.1, memory="gpu"),
            *port_figures(view.host.name, other, 0, 1.9, direction="both_ways")]])
        for view in healthy
    ]  # fmt: skip
    assert judge_gangs(others, []) == judge_gangs(healthy, [])


def test_figures_with_an_invalid_partner_or_rail_or_port_are_ignored() -> None:
    fleet = Fleet(4, 1)
    plan = plan_of(fleet)
    healthy = with_ports(plan, fleet, fleet.pairs())
    with_invalid_figures = [
        _with_figures(plan, view, [
            *port_figures(view.host.name, "h9", 0, 0.1), *port_figures(view.host.name, view.host.name, 0, 0.1),
            *(replace(item, params={"rail": "0"}) for item in port_figures(view.host.name, "h1", 0, 0.1)),
            *(replace(item, scope="host") for item in port_figures(view.host.name, "h1", 0, 0.1))])
        for view in healthy
    ]  # fmt: skip
    assert judge_gangs(with_invalid_figures, []) == judge_gangs(healthy, [])


SLOW_SWITCHES: dict[str, tuple[int, dict[str, Any], set[tuple[str, str]]]] = {
    "one of the four switches of a rail": (4, {"s1r2": 0.5}, {("switch", "s1r2")}),
    "the switch of most hosts": (9, {"s0r2": 0.5}, {("switch", "s0r2")}),
    "the only switch of a rail, so the rail is named": (16, {"s0r2": 0.5}, {("rail", "rail 2")}),
    "both switches of a rail, so the rail is named": (8, {"s0r2": 0.5, "s1r2": 0.5}, {("rail", "rail 2")}),
    "one switch, one NIC at this switch and one NIC elsewhere": (
        4, {"s1r2": 0.5, "h5/2": 0.3, "h9/0": 0.5}, {("switch", "s1r2"), ("nic", "h9 rail 0")},
    ),
    "all four hosts at one switch, so the hosts are named": (
        4, {"h4": 0.5, "h5": 0.5, "h6": 0.5, "h7": 0.5}, {("host", f"h{n}") for n in (4, 5, 6, 7)},
    ),
    "one of the two switches of a rail, and one NIC at the other": (
        8, {"s0r2": 0.5, "h9/2": 0.6}, {("switch", "s0r2"), ("nic", "h9 rail 2")},
    ),
    "a switch of each of two rails": (8, {"s0r1": 0.5, "s1r2": 0.5}, {("switch", "s0r1"), ("switch", "s1r2")}),
    "three of the four NICs at one switch, so the NICs are named": (
        4, {"h4/1": 0.5, "h5/1": 0.5, "h6/1": 0.5}, {("nic", f"h{n} rail 1") for n in (4, 5, 6)},
    ),
}  # fmt: skip
"""Case -> three values: the number of hosts at each leaf switch, the slow parts, and the expected suspects.

The slow parts map a part to its share of the healthy bandwidth. A part is a switch (`s1r2`: the second switch of rail 2), a host
(`h5`) or a NIC (`h5/2`: the NIC of h5 on rail 2).
"""


@pytest.mark.parametrize("case", SLOW_SWITCHES)
def test_ports_that_share_a_slow_switch_are_one_suspect(case: str) -> None:
    per_leaf, slow, expected = SLOW_SWITCHES[case]
    fleet = Fleet(16, 4)
    switches = {(f"h{host}", rail): f"s{host // per_leaf}r{rail}" for host in range(16) for rail in range(4)}

    def share(pair: Pair, host: str) -> float:
        names = (host, f"{host}/{pair.rail}", switches[host, pair.rail])
        return min(float(slow.get(name, 1.0)) for name in names)

    pairs = [
        replace(pair, bandwidth=(pair.bandwidth or 0) * min(share(pair, pair.a), share(pair, pair.b)))
        for pair in fleet.pairs()
    ]
    suspects = find_suspects(pairs, switches=switches)
    assert {(suspect.kind, suspect.where) for suspect in suspects} == expected


@pytest.mark.parametrize("slow", [{0}, {0, 1}, {0, 1, 2}, {0, 1, 2, 3}])
def test_known_rate_of_the_ports_shows_slow_rails_even_if_all_rails_are_slow(slow: set[int]) -> None:
    """Without the rate (last assertion), slow rails are found only if at most two of the four rails are slow."""
    fleet = Fleet(8, 4, bad_rails=dict.fromkeys(slow, 0.5))
    pairs = fleet.pairs()
    suspects = find_suspects(pairs, least={pair.kind: 0.8 * RATE for pair in pairs})
    assert {(suspect.kind, suspect.rails) for suspect in suspects} == {("rail", (rail,)) for rail in slow}
    assert len(find_suspects(pairs)) == (len(slow) if len(slow) <= 2 else 0)


def found(verdicts: Sequence[Verdict]) -> set[tuple[str, str]]:
    """Return kind and name of the suspects in the verdicts on ports, in the form of `Fleet.bad_parts`."""
    parts = set()
    for item in of_layer(verdicts, "verbs"):
        if item.verdict != "pass":
            _, kind, *name = item.reason.partition(" (confidence")[0].split(" ", 2)
            text = f"rail {name[0]}" if kind == "rail" else " ".join(name)
            parts.add((kind.lower(), " - ".join(sorted(text.split(" - "))) if kind == "link" else text))
    return parts


def test_one_to_five_faulty_parts_among_sixteen_hosts_with_eight_rails_are_found() -> None:
    """All faulty parts of a fleet are of one kind. At most three rails are faulty. Precision and recall are at least 95 %."""
    for part in ("nic", "link", "rail", "host"):
        score, counts = Score(), (1, 3) if part == "rail" else (1, 3, 5)
        for count in counts:
            fleet = broken(16, part, count, 0, 8, 0)
            score.add(
                found(judge_gangs(with_ports(plan_of(fleet), Fleet(16, 8), fleet.pairs()), [])), fleet.bad_parts()
            )
        print(
            f"16 hosts, 8 rails, 1-{counts[-1]} bad {part}: precision {score.precision:.3f}, recall {score.recall:.3f}"
        )
        assert score.right
        assert score.precision >= 0.95, part
        assert score.recall >= 0.95, part


def test_faults_of_several_kinds_are_separated() -> None:
    score = Score()
    for seed in range(2):
        a, b, c, d = random.Random(seed).sample([f"h{number}" for number in range(16)], 4)  # noqa: S311
        fleet = Fleet(16, 8, seed, hosts={a: 0.5}, nics={(b, 3): 0.4}, bad_rails={6: 0.6})
        fleet.links = {frozenset((c, d)): 0.3}
        score.add(found(judge_gangs(with_ports(plan_of(fleet), Fleet(16, 8), fleet.pairs()), [])), fleet.bad_parts())
    print(f"16 hosts, 8 rails, 4 parts of 4 kinds: precision {score.precision:.3f}, recall {score.recall:.3f}")
    assert score.precision >= 0.95
    assert score.recall >= 0.95
