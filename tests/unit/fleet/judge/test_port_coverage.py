"""Each active RDMA port, and each pair of ports of two hosts, must have its figures, or a reason why it was not measured.

The share of a test (`verbs.rate_ratio`) is its bandwidth divided by the rate of the port, or by twice the rate if the test sends
both ways. The best share of a port (`verbs.best_ratio`) is its greatest share over all partners (the other hosts with which it
was tested).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from fleet.judge.evidence import Evidence
from fleet.judge.host_view import HostView
from fleet.judge.port_coverage import PortStatements, planned_figures, port_of, silent_pairs, silent_ports
from schemas.catalogue import settings
from schemas.records import ERROR, SKIPPED, Launch, Metric, Observation
from tests import builders
from tests.unit.fleet.judge.small_fleet import host_evidence, one_figure_plan

CHOSEN = {"figures": ["bandwidth", "latency"], "ops": ["write"], "directions": ["one_way", "both_ways"], "memories": ["host"],
          "sharings": ["together"]}  # fmt: skip
PLAN = builders.with_benchmarks(
    builders.plan("h1", "h2", "h3", gpu_count=1), benchmark={"verbs": CHOSEN}, gang={"verbs": CHOSEN}
)
HOSTS = ("h1", "h2", "h3")
SETTINGS = settings("verbs", CHOSEN)


def port(number: int = 0, partner: str = "") -> str:
    return f"hca=mlx5_{number},port=1" + (f",partner={partner}" if partner else "")


def figures(scope: str, stage: str, sharings: tuple[str, ...], *, both_only: bool = False) -> list[Observation]:
    """Return every planned figure of a port or a pair. `both_only`: only the figures that both hosts of a pair must have."""
    return [
        builders.observation(item.name, 1.0, scope=scope, stage=stage, **item.params)
        for item in planned_figures(SETTINGS, sharings)
        if item.is_of_both_hosts or not both_only
    ]


def best(number: int = 0) -> Observation:
    return builders.observation("verbs.best_ratio", 0.9, scope=port(number), stage="gang")


def pair_figures(host: str, number: int = 0) -> list[Observation]:
    """Return the figures of one port of `host` with every partner, and the best share of the port.

    The host that comes second in a pair has only the figures that both hosts must have.
    """
    others = [name for name in HOSTS if name != host]
    return [
        item for other in others for item in figures(port(number, other), "gang", ("together",), both_only=host > other)
    ] + [best(number)]


def view(
    host: str, *observations: Observation, active: tuple[int, ...] = (0,), plan: Any = PLAN, failed: bool = False
) -> HostView:
    ports = {port(number): True for number in active}
    metrics = (
        Metric(name="infiniband.link_layer", unit="1", values=dict.fromkeys(ports, "InfiniBand")),
        Metric(name="infiniband.active", unit="1", values=ports),
    )
    outcome = ("failed", "rank 0 ended") if failed else ("finished", "")
    launches = (builders.launch("benchmark", (host,), *outcome), builders.launch("gang", HOSTS, *outcome))
    evidence = host_evidence(one_figure_plan(*HOSTS), host, *metrics, launches=launches, observations=observations)
    return HostView(plan, plan.host(host), evidence, ())


def replace_launches(evidence: Evidence, launches: tuple[Launch, ...]) -> Evidence:
    return replace(evidence, records=tuple(replace(record, launches=launches) for record in evidence.records))


def absent(
    scope: str, reason: str = "no cable", *, stage: str = "gang", status: str = SKIPPED, **params: Any
) -> Observation:
    item = builders.observation("verbs.bandwidth", 1.0, scope=scope, stage=stage, **params)
    return replace(item, status=status, value=None, reason=reason)


ALONE = figures(port(), "benchmark", ("alone",))
NEITHER = "the port is active or tested in another stage, but has neither a figure nor a reason why it was not measured"


def alone(*observations: Observation, **fields: Any) -> list[tuple[str, str, str]]:
    """Return name, scope and reason of the verdicts on the ports of h1 in the stage `benchmark` (tests without a partner)."""
    result = list(silent_ports(view("h1", *observations, **fields)))
    assert {item.stage for item in result} <= {"benchmark"}
    return [(item.name, item.scope, item.reason) for item in result]


def test_port_with_all_figures_is_complete() -> None:
    assert ALONE
    assert alone(*ALONE) == []


def test_active_port_with_neither_figures_nor_reasons_is_named_once() -> None:
    assert alone(active=(1, 0)) == [("verbs.bandwidth", port(0), NEITHER), ("verbs.bandwidth", port(1), NEITHER)]


def test_missing_figure_of_a_port_is_named() -> None:
    rest = [item for item in ALONE if item.name != "verbs.latency"]
    reason = "the launch finished, but there is no figure and no reason for its absence: verbs.latency"
    assert alone(*rest) == [("verbs.latency", port(), reason)]
    (result,) = silent_ports(view("h1", *rest))
    assert result.params == next(
        item.params for item in planned_figures(SETTINGS, ("alone",)) if item.name == "verbs.latency"
    )
    (result,) = silent_ports(view("h1"))
    assert result.params == {}


def test_figure_with_other_settings_or_of_another_stage_does_not_count() -> None:
    first, *rest = ALONE
    assert len(alone(replace(first, params={**first.params, "memory": "gpu"}), *rest)) == 1
    assert len(alone(*[replace(item, stage="gang") for item in ALONE])) == 1


@pytest.mark.parametrize(
    "reason",
    [absent(port(), stage="benchmark"), absent("host", stage="benchmark")],
    ids=["of the port", "of all ports"],
)
def test_one_reason_for_all_tests_of_a_port_is_enough(reason: Observation) -> None:
    assert alone(reason) == []
    assert alone(replace(reason, stage="gang")) == [("verbs.bandwidth", port(), NEITHER)]


def test_reason_for_one_test_excuses_only_the_figures_of_that_test() -> None:
    of_test = {item.name: item for item in ALONE if item.name in ("verbs.bandwidth", "verbs.latency")}
    bandwidth = replace(of_test["verbs.bandwidth"], status=ERROR, value=None, reason="timed out")
    others = [
        item for item in ALONE
        if not (item.name in ("verbs.bandwidth", "verbs.rate_ratio", "verbs.mtu") and item.params == bandwidth.params)
    ]  # fmt: skip
    assert alone(bandwidth, *others) == []
    latency = replace(of_test["verbs.latency"], status=ERROR, value=None, reason="timed out")
    assert alone(latency, *[item for item in ALONE if item.name != "verbs.bandwidth"]) != []


def test_no_figures_are_required_if_the_launch_failed_or_no_port_is_active_or_verbs_is_not_planned() -> None:
    assert alone(failed=True) == []
    assert alone(active=()) == []
    without = builders.with_benchmarks(PLAN, benchmark={"training": {}}, gang={"verbs": CHOSEN})
    assert alone(plan=without) == []


@pytest.mark.parametrize("outcome", [("finished", ""), ("failed", "rank 0 ended")])
@pytest.mark.parametrize("before", [(), (("failed", "rank 0 ended"),), (("finished", ""),)])
def test_only_the_last_launch_of_the_stage_itself_decides_whether_its_figures_are_required(
    outcome: tuple[str, str], before: tuple[tuple[str, str], ...]
) -> None:
    """`before`: outcomes of earlier launches of the stage. The last launch of the other stage always has the opposite outcome."""
    opposite = ("failed", "rank 0 ended") if outcome[0] == "finished" else ("finished", "")
    launches = (
        *(builders.launch("benchmark", ("h1",), *each) for each in before),
        builders.launch("benchmark", ("h1",), *outcome),
        builders.launch("gang", HOSTS, *opposite),
    )
    host = view("h1")
    host = HostView(PLAN, host.host, replace_launches(host.evidence, launches), ())
    assert bool(list(silent_ports(host))) is (outcome[0] == "finished")


def test_port_that_another_stage_measured_is_required_even_if_it_is_not_active() -> None:
    assert alone(*pair_figures("h1", 3), active=()) == [("verbs.bandwidth", port(3), NEITHER)]


def together(change: Any = lambda host, items: items, **active: tuple[int, ...]) -> list[tuple[str, str, str, str]]:
    """Return host, name, scope and reason of the verdicts on the ports and pairs of the gang stage.

    Args:
        change: (host, its healthy figures) -> its figures in the record.
        active: host -> numbers of its active ports. On the other hosts only port 0 is active.
    """
    views = [view(host, *change(host, pair_figures(host)), active=active.get(host, (0,))) for host in HOSTS]
    result = list(silent_pairs(views))
    assert {item.stage for item in result} <= {"gang"}
    return [(item.host, item.name, item.scope, item.reason) for item in result]


def of_h1(change: Any) -> Any:
    """Return a change for `together` that applies `change` to the figures of h1 only."""
    return lambda host, items: change(items) if host == "h1" else items


def test_pairs_with_all_figures_are_complete() -> None:
    assert together() == []


def test_second_host_of_a_pair_needs_only_the_figures_that_both_hosts_must_have() -> None:
    one_sided = [item.name for item in planned_figures(SETTINGS, ("together",)) if not item.is_of_both_hosts]
    assert one_sided
    result = together(of_h1(lambda items: [item for item in items if item.name not in one_sided]))
    assert [(host, scope) for host, _, scope, _ in result] == [("h1", port(0, "h2")), ("h1", port(0, "h3"))]

    def without_ratio_on_h3(host: str, items: list[Observation]) -> list[Observation]:
        return [item for item in items if item.name != "verbs.rate_ratio" or host != "h3"]

    assert {host for host, *_ in together(without_ratio_on_h3)} == {"h3"}


def test_port_with_neither_figures_nor_reasons_in_the_gang_stage_is_named_once() -> None:
    assert together(h1=(0, 1)) == [("h1", "verbs.bandwidth", port(1), NEITHER)]


def test_best_share_is_required_of_a_port_with_shares() -> None:
    without = of_h1(lambda items: [item for item in items if item.name != "verbs.best_ratio"])
    reason = "the launch finished, but there is no figure and no reason for its absence: verbs.best_ratio"
    assert together(without) == [("h1", "verbs.best_ratio", port(), reason)]


def test_best_share_is_not_required_of_a_port_without_shares() -> None:
    def failed(items: list[Observation]) -> list[Observation]:
        """Return the figures of a host whose bandwidth tests all failed."""
        kept = [item for item in items if item.name not in ("verbs.best_ratio", "verbs.rate_ratio", "verbs.mtu")]
        return [
            replace(item, status=ERROR, value=None, reason="no") if item.name == "verbs.bandwidth" else item
            for item in kept
        ]

    assert together(of_h1(failed)) == []


def test_reason_excuses_the_pair_or_the_port_or_the_host_for_which_it_is_stated() -> None:
    def only_h3(items: list[Observation]) -> list[Observation]:
        return [item for item in items if "partner=h2" not in item.scope]

    named = {(host, scope) for host, _, scope, _ in together(of_h1(only_h3))}
    assert ("h1", port(0, "h2")) in named
    excused = together(of_h1(lambda items: [*only_h3(items), absent(port(0, "h2"))]))
    assert ("h1", port(0, "h2")) not in {(host, scope) for host, _, scope, _ in excused}
    for scope in (port(), "host"):
        result = together(of_h1(lambda items, scope=scope: [absent(scope)]))
        # h2 and h3 each measured a port with h1. So h1 must state figures or reasons for both partners. A reason for the port
        # names no partner, so h1 gets a verdict. A reason for the whole host excuses both partners.
        assert {where for host, _, where, _ in result if host == "h1"} == ({"host"} if scope == port() else set())


def test_failed_test_with_a_partner_excuses_all_ports_with_that_partner() -> None:
    """A skipped test excuses only its own port."""

    def failed(items: list[Observation]) -> list[Observation]:
        return [*[item for item in items if "partner=h2" not in item.scope], absent(port(5, "h2"), status=ERROR)]

    assert [scope for host, _, scope, _ in together(of_h1(failed)) if host == "h1" and "partner=h2" in scope] == []

    def skipped(items: list[Observation]) -> list[Observation]:
        return [*[item for item in items if "partner=h2" not in item.scope], absent(port(5, "h2"))]

    assert [scope for host, _, scope, _ in together(of_h1(skipped)) if host == "h1" and "partner=h2" in scope] == [
        port(0, "h2")
    ]


def test_host_is_inconclusive_if_its_partner_measured_more_ports() -> None:
    def two_ports(host: str, items: list[Observation]) -> list[Observation]:
        return [*items, *pair_figures(host, 1)] if host == "h1" else items

    uneven = [item for item in together(two_ports) if "RDMA ports with this host" in item[3]]
    text = "h1 measured 2 RDMA ports with this host, but this host has figures or reasons for only 1"
    assert uneven == [("h2", "verbs.bandwidth", "host", text), ("h3", "verbs.bandwidth", "host", text)]


def test_only_the_first_host_of_a_pair_must_state_why_a_bidirectional_test_failed() -> None:
    def failed(host: str, items: list[Observation]) -> list[Observation]:
        both = [item for item in items if item.params.get("direction") == "both_ways" and "partner=h2" in item.scope]
        if host == "h1":
            lost = [
                replace(item, status=ERROR, value=None, reason="no") for item in both if item.name == "verbs.bandwidth"
            ]
            return [*[item for item in items if item not in both], *lost]
        if host == "h2":
            return [
                item for item in items if item.params.get("direction") != "both_ways" or "partner=h1" not in item.scope
            ]
        return items

    assert together(failed) == []
    missing_only_on_second_host = [
        item for item in together(lambda host, items: failed(host, items) if host == "h2" else items) if item[0] == "h2"
    ]
    assert [scope for _, _, scope, _ in missing_only_on_second_host] == [port(0, "h1")]


def test_host_without_a_gang_or_a_finished_launch_has_no_verdicts_on_pairs() -> None:
    plan = replace(PLAN, hosts=tuple(replace(host, gang="") for host in PLAN.hosts))
    assert list(silent_pairs([view("h1", plan=plan)])) == []
    assert list(silent_pairs([view("h1", failed=True)])) == []
    assert list(silent_pairs([HostView(PLAN, PLAN.hosts[0], Evidence(), ())])) == []


def test_statements_of_a_host_are_what_it_measured_and_why_the_rest_is_missing() -> None:
    items = (
        *figures(port(0, "h2"), "gang", ("together",)), best(0), best(4), absent(port(1, "h2")),
        absent(port(2, "h3"), status=ERROR), absent(port(3), sharing="together"),
    )  # fmt: skip
    statements = PortStatements(view("h1", *items), "gang")
    assert statements.ports() == {port(0), port(3)}
    assert statements.excused == {port(1, "h2"), port(2, "h3")}
    assert statements.failed_partners == {"h3"}
    assert not statements.is_excused
    assert statements.ports_with("h2") == {port(0), port(1)}
    assert statements.measured_with("h2") == {port(0)}
    assert (statements.has_share(port(0)), statements.has_share(port(1))) == (True, False)
    assert PortStatements(view("h1", absent("host")), "gang").is_excused
    assert port_of(port(0, "h2")) == port(0)
