"""Figures of RDMA ports: the criteria that judge them, and verdicts on ports that lack a required figure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import pytest

from fleet.judge.criteria import Pack, read_pack
from fleet.judge.evidence import Evidence
from fleet.judge.judge import judge
from schemas.records import Metric, Observation
from schemas.reports import INCONCLUSIVE, PASS
from tests import builders

HOSTS = ("h1", "h2", "h3")
RATE = 5e10
"""Rate of every port (B/s)."""
SETTINGS = {"op": "write", "direction": "one_way", "memory": "host", "sharing": "alone"}


def figure(name: str, value: float, port: int, stage: str = "benchmark", **settings: Any) -> Observation:
    """Return a figure of port 1 of the adapter `mlx5_<port>`. `settings`: parameters that replace or complete SETTINGS."""
    units = {
        "bandwidth": "B/s",
        "rate_ratio": "1",
        "mtu": "B",
        "latency": "s",
        "message_rate": "1/s",
        "best_ratio": "1",
    }
    params = {**(SETTINGS if name in ("bandwidth", "rate_ratio", "mtu") else {}), **settings, "rail": port}
    params |= {} if name == "best_ratio" else {"mtu": int(value) if name == "mtu" else 4096}
    return builders.observation(
        f"verbs.{name}", value, scope=f"hca=mlx5_{port},port=1", unit=units[name], stage=stage, **params
    )


def healthy_port(port: int, host: str = "h1") -> list[Observation]:
    """Return the figures of a healthy port in the profile `standard`: its own, and those with each other host as its partner."""
    return [
        *transfers(port, {"memory": "host"}), *transfers(port, {"memory": "gpu"}),
        figure("latency", 2e-6, port, sharing="alone"), figure("message_rate", 4e6, port, sharing="alone"),
        figure("best_ratio", 0.98, port, "gang", partners=2),
        *(item for other in HOSTS if other != host for item in with_partner(port, host, other)),
    ]  # fmt: skip


def transfers(port: int, settings: Mapping[str, Any], stage: str = "benchmark") -> list[Observation]:
    """Return the figures of a healthy transfer with these settings."""
    ways = 2 if settings.get("direction") == "both_ways" else 1
    values = {"bandwidth": 0.98 * RATE * ways, "rate_ratio": 0.98, "mtu": 4096.0}
    return [figure(name, value, port, stage, **settings) for name, value in values.items()]


def with_partner(port: int, host: str, other: str) -> list[Observation]:
    """Return the figures of a port of `host` with the partner `other`. Only the first host of a pair reports the latency."""
    items = [
        *transfers(port, {"sharing": "together"}, "gang"),
        *transfers(port, {"sharing": "together", "direction": "both_ways"}, "gang"),
        *([figure("latency", 3e-6, port, "gang", sharing="together")] if host < other else []),
    ]
    return [replace(item, scope=f"{item.scope},partner={other}") for item in items]


def absent(status: str, reason: str, scope: str = "host") -> Observation:
    """Return an observation of the bandwidth that has this status and reason in place of a value."""
    return Observation(name="verbs.bandwidth", scope=scope, stage="benchmark", unit="B/s", status=status, reason=reason)


@cache
def packs() -> tuple[Pack, ...]:
    """Return the pack `h200-sxm` with only those of its criteria that judge RDMA ports."""
    pack = read_pack("h200-sxm")
    return (replace(pack, criteria=tuple(item for item in pack.criteria if item.name.startswith("verbs."))),)


def findings(
    figures: Mapping[str, Sequence[Observation]],
    readings: Sequence[Metric] = (),
    members: Sequence[str] = HOSTS,
    of: str = "verbs.",
    last: Sequence[Metric] = (),
    **variables: Any,
) -> set[tuple[str, str, str, str]]:
    """Return host, scope, criterion and verdict of each verdict on RDMA ports that is not a pass.

    Args:
        figures: host -> its figures.
        readings: readings that are added to every snapshot of every record.
        members: the hosts of the gang launch (the launch on several hosts together). Other hosts have no gang record.
        of: prefix of the names of the figures or readings whose verdicts are returned.
        last: readings that the last snapshot of every record gets in place of `readings`; empty: it gets `readings` too.
        variables: variables of the inventory.
    """
    plan = builders.plan(*HOSTS, gpu_count=2, rackproof_gang="all", **variables)
    stages = {stage.name: {"verbs": stage.benchmarks["verbs"]} for stage in plan.stages if "verbs" in stage.benchmarks}
    plan, evidence = builders.with_benchmarks(plan, **stages), {}
    for host, of_host in builders.evidence(plan).items():
        records = [
            replace(
                record,
                snapshots=tuple(
                    replace(item, metrics=(*item.metrics, *(last if last and item is record.snapshots[-1] else readings)))
                    for item in record.snapshots
                ),
                launches=tuple(replace(item, members=tuple(members) if record.gang else (host,)) for item in record.launches),
                observations=(*record.observations, *(
                    item for item in figures.get(host, ()) if (item.stage == "gang") == bool(record.gang)
                )),
            )
            for record in of_host.records
            if host in members or not record.gang
        ]  # fmt: skip
        evidence[host] = Evidence(records=tuple(records))
    verdicts = judge(plan, evidence, packs())
    return {
        (item.host, item.scope, item.criterion, item.verdict)
        for item in verdicts
        if item.name.startswith(of) and item.verdict != PASS
    }


def fleet(**changed: Observation) -> dict[str, Sequence[Observation]]:
    """Return the figures of healthy hosts with two ports each. `changed`: host -> a figure that replaces the healthy figure."""
    healthy = {host: [*healthy_port(0, host), *healthy_port(1, host)] for host in HOSTS}
    for host, bad in changed.items():
        healthy[host] = [*(item for item in healthy[host] if figure_key(item) != figure_key(bad)), bad]
    return {host: tuple(items) for host, items in healthy.items()}


def with_numbers_of_partners(items: Sequence[Observation]) -> list[Observation]:
    """Return the figures of a host; each `best_ratio` states the number of partners with which its port was measured."""
    shared = [item.scope for item in items if item.name == "verbs.rate_ratio" and item.params["direction"] == "one_way"]
    counts = {item.scope: sum(scope.startswith(f"{item.scope},partner=") for scope in shared) for item in items}
    return [
        replace(item, params={**item.params, "partners": counts[item.scope]})
        if item.name == "verbs.best_ratio"
        else item
        for item in items
    ]


def figure_key(item: Observation) -> tuple[object, ...]:
    """Return what identifies a figure: two observations with the same key are of the same figure."""
    return item.name, item.scope, item.stage, *(item.params.get(key) for key in SETTINGS)


def test_healthy_ports_pass() -> None:
    assert findings(fleet()) == set()


@pytest.mark.parametrize(
    ("bad", "criteria"),
    [
        (figure("rate_ratio", 0.85, 1), {"verbs-port-rate"}),
        (figure("rate_ratio", 0.49, 1), {"verbs-port-rate", "verbs-port-rate-any"}),
        (figure("rate_ratio", 0.49, 1, op="read"), {"verbs-port-rate-any"}),
        (figure("bandwidth", 0.80 * RATE, 1), {"verbs-port-fleet"}),
        (figure("mtu", 1024.0, 1), {"verbs-port-mtu"}),
        (figure("latency", 9e-6, 1, sharing="alone"), {"verbs-port-latency"}),
        (figure("message_rate", 1e6, 1, sharing="alone"), {"verbs-port-messages"}),
        (figure("best_ratio", 0.49, 1, "gang", partners=2), {"verbs-best-partner"}),
        (figure("best_ratio", 0.49, 1, "gang", partners=1), set()),  # the only partner may be the slow one
    ],
)
def test_bad_figure_fails_exactly_these_criteria(bad: Observation, criteria: set[str]) -> None:
    # Verdicts of the criterion `plan` are left out: they say that the changed figure contradicts other figures.
    result = {item for item in findings(fleet(h2=bad)) if item[2] != "plan"}
    assert result == {("h2", "hca=mlx5_1,port=1", criterion, "fail") for criterion in criteria}


def test_host_without_ports_or_perftest_needs_no_figures_of_ports() -> None:
    assert findings({}) == set()
    skipped = absent("skipped", "ib_write_bw not found")
    unsupported = absent("unsupported", "the port has no link", "hca=mlx5_0,port=1")
    assert findings({"h1": [skipped, unsupported]}) == set()


def test_failed_test_of_a_port_is_inconclusive() -> None:
    error = absent("error", "no result within 21 s", "hca=mlx5_0,port=1")
    result = {(host, scope, verdict) for host, scope, _, verdict in findings({"h1": [error]})}
    assert result == {("h1", "hca=mlx5_0,port=1", INCONCLUSIVE)}


@pytest.mark.parametrize(("ports", "variables", "missing"), [
    (2, {}, 0), (2, {"rackproof_infiniband_ports": 2}, 0), (2, {"rackproof_infiniband_ports": 3}, 1), (0, {}, 1),
])  # fmt: skip
def test_host_that_measured_too_few_ports_is_inconclusive(ports: int, variables: dict[str, Any], missing: int) -> None:
    figures = {host: [item for port in range(ports) for item in healthy_port(port, host)] for host in HOSTS}
    result = findings(figures, rackproof_verbs_required=True, **variables)
    assert result == ({(host, "host", "plan", INCONCLUSIVE) for host in HOSTS} if missing else set())
    assert findings(figures, **variables) == set(), "without `rackproof_verbs_required`, no port is required"


def verdicts_on_required_ports(
    ports: int, *reasons: Observation, links: Sequence[Metric] = (), wanted: int = 2
) -> set[tuple[str, str]]:
    """Return host and scope of each verdict of the criterion `plan` on h1.

    Args:
        ports: number of ports that every host measured.
        reasons: observations of h1 that say why a port was not measured.
        links: readings of the links of every host.
        wanted: number of ports that every host must measure.
    """
    figures = {host: [item for port in range(ports) for item in healthy_port(port, host)] for host in HOSTS}
    figures["h1"] += [*reasons, *(replace(item, stage="gang") for item in reasons)]
    result = findings(figures, links, rackproof_verbs_required=True, rackproof_infiniband_ports=wanted)
    assert {verdict for *_, verdict in result} <= {INCONCLUSIVE}
    return {(host, scope) for host, scope, criterion, _ in result if host == "h1" and criterion == "plan"}


DOWN = absent("unsupported", "the port has no link", "hca=mlx5_1,port=1")
SLOW = absent(
    "unsupported", "not a port of the fabric: it has less than half the rate of the fastest port", "hca=mlx5_2,port=1"
)


def links_of(**layers: tuple[str, float, bool]) -> list[Metric]:
    """Return the readings of port 1 of each adapter. `layers`: adapter -> link layer, rate (B/s), whether the port is active."""
    names = {"link_layer": "1", "rate": "B/s", "active": "1"}
    return [
        Metric(
            name=f"infiniband.{name}",
            unit=unit,
            values={f"hca={hca},port=1": value[number] for hca, value in layers.items()},
        )
        for number, (name, unit) in enumerate(names.items())
    ]


def test_required_port_that_was_not_measured_is_named_if_an_observation_states_the_reason() -> None:
    assert verdicts_on_required_ports(1, DOWN) == {("h1", DOWN.scope)}
    assert verdicts_on_required_ports(1, absent("error", "no result within 21 s", DOWN.scope)) == {("h1", DOWN.scope)}
    assert verdicts_on_required_ports(2, SLOW) == set(), "as many ports as required were measured"


def test_missing_ports_are_reported_on_the_host_if_no_observation_of_a_port_states_the_reason() -> None:
    of_host = absent("skipped", "ib_write_bw not found")
    assert verdicts_on_required_ports(0, of_host) == {("h1", "host")}
    assert verdicts_on_required_ports(1, DOWN, wanted=3) == {("h1", DOWN.scope), ("h1", "host")}
    assert verdicts_on_required_ports(0, DOWN, of_host) == {("h1", DOWN.scope), ("h1", "host")}


@pytest.mark.parametrize(
    ("other", "scope"),
    [
        (("Ethernet", 5e10, True), DOWN.scope),
        (("InfiniBand", 1.25e10, True), DOWN.scope),
        (("InfiniBand", 5e9, False), "host"),
        (("InfiniBand", 5e10, True), "host"),
    ],
    ids=[
        "mlx5_2 is Ethernet",
        "mlx5_2 has a link, but is slow",
        "mlx5_2 has no link, so its rate does not count",
        "mlx5_2 may be a fabric port",
    ],
)
def test_unmeasured_port_is_named_only_if_it_must_be_the_missing_one(
    other: tuple[str, float, bool], scope: str
) -> None:
    """Two ports are required, but only mlx5_0 was measured. The missing one is mlx5_1 or mlx5_2.

    If mlx5_2 cannot be a port of the fabric, mlx5_1 is named. If mlx5_2 can be one, the host is named.
    """
    links = links_of(mlx5_0=("InfiniBand", 5e10, True), mlx5_1=("InfiniBand", 1e9, False), mlx5_2=other)
    assert verdicts_on_required_ports(1, DOWN, SLOW, links=links) == {("h1", scope)}


def test_each_port_of_an_adapter_counts_as_one_port() -> None:
    both = {
        host: [
            replace(item, scope=item.scope.replace("port=1", f"port={port}"))
            for port in (1, 2)
            for item in healthy_port(0, host)
        ]
        for host in HOSTS
    }
    assert findings(both, rackproof_verbs_required=True, rackproof_infiniband_ports=2) == set()


def test_verdict_on_a_port_with_only_one_partner_names_this_partner() -> None:
    """If a port of h2 is down, the diagnosis attributes the verdict on h1 to h2."""
    plan = builders.plan("h1", "h2", gpu_count=2, rackproof_gang="all", rackproof_verbs_required=True)
    plan = builders.with_benchmarks(
        plan,
        **{stage.name: {"verbs": stage.benchmarks["verbs"]} for stage in plan.stages if "verbs" in stage.benchmarks},
    )
    lost = replace(absent("skipped", "h2 measures no port on this rail", "hca=mlx5_1,port=1,partner=h2"), stage="gang")
    evidence = {
        host: Evidence(
            records=tuple(
                replace(record, observations=(*record.observations, lost)) if record.gang and host == "h1" else record
                for record in of_host.records
            )
        )
        for host, of_host in builders.evidence(plan).items()
    }
    named = [item.params for item in judge(plan, evidence, packs()) if item.scope == "hca=mlx5_1,port=1"]
    assert {"only_partner": "h2"} in named


PORT = "hca=mlx5_1,port=1"
"""Scope of the port that the tests below change."""


def readings(layer: str = "InfiniBand", *, is_active: bool = True) -> list[Metric]:
    """Return the readings of the links of two ports."""
    ports = [f"hca=mlx5_{number},port=1" for number in range(2)]
    values = {"infiniband.link_layer": layer, "infiniband.active": is_active}
    return [Metric(name=name, unit="1", values=dict.fromkeys(ports, value)) for name, value in values.items()]


def without(of_port: str, stage: str = "", instead: Sequence[Observation] = ()) -> dict[str, Sequence[Observation]]:
    """Return the figures of a fleet. h1 has `instead` in place of its healthy figures whose scopes begin with `of_port`.

    An empty `stage` removes the figures of all stages.
    """
    figures = fleet()
    kept = [item for item in figures["h1"] if not item.scope.startswith(of_port) or stage not in ("", item.stage)]
    return figures | {"h1": [*kept, *instead]}


@pytest.mark.parametrize("layer", ["InfiniBand", "Ethernet"])
@pytest.mark.parametrize("stage", ["benchmark", "gang"])
def test_active_port_with_neither_figures_nor_a_reason_is_inconclusive(layer: str, stage: str) -> None:
    assert ("h1", PORT, "plan", INCONCLUSIVE) in findings(without(PORT, stage), readings(layer))
    assert findings(fleet(), readings(layer)) == set()


def test_host_without_any_figure_of_its_active_ports_is_inconclusive() -> None:
    """This holds even if no host has a figure, because a run that lost all figures must not be accepted."""
    ports = {"hca=mlx5_0,port=1", PORT}
    assert findings({}, readings()) == {(host, port, "plan", INCONCLUSIVE) for host in HOSTS for port in ports}


@pytest.mark.parametrize(
    ("stages", "instead"),
    [
        (("benchmark", "gang"), absent("skipped", "ib_write_bw not found")),
        (("benchmark", "gang"), absent("unsupported", "not a port of the fabric", PORT)),
    ],
    ids=["perftest is missing", "port outside the fabric"],
)
def test_no_figure_is_required_of_a_port_if_an_observation_states_the_reason(
    stages: Sequence[str], instead: Observation
) -> None:
    """The partners of h1 state a reason too: `h1 measures no port on this rail`."""
    scope = "" if instead.scope == "host" else PORT
    figures = without(scope or "hca", "", [replace(instead, stage=stage) for stage in stages])
    lost = scope or "hca"
    for other in ("h2", "h3"):
        kept = [item for item in figures[other] if not (item.scope.startswith(lost) and "partner=h1" in item.scope)]
        ports = [scope] if scope else ["hca=mlx5_0,port=1", PORT]
        skipped = [absent("skipped", "h1 measures no port on this rail", f"{port},partner=h1") for port in ports]
        figures[other] = [*kept, *(replace(item, stage="gang") for item in skipped)]
    figures = {host: with_numbers_of_partners(items) for host, items in figures.items()}
    assert findings(figures, readings()) == set()


def test_no_figure_is_required_of_ports_without_a_link_or_without_a_link_layer() -> None:
    assert findings({}, readings(is_active=False)) == set()
    assert findings({}, readings("Unspecified")) == set()


@pytest.mark.parametrize("lost", sorted({item.name + item.scope for item in fleet()["h1"] if PORT in item.scope}))
def test_each_figure_of_a_port_or_pair_is_required(lost: str) -> None:
    figures = fleet()
    figures["h1"] = [item for item in figures["h1"] if item.name + item.scope != lost]
    result = findings(figures, readings())
    assert ("h1", lost[lost.index("hca=") :], "plan", INCONCLUSIVE) in result
    assert {item[0] for item in result} == {"h1"}


@pytest.mark.parametrize("name", ["bandwidth", "latency"])
def test_figures_of_one_test_are_not_required_if_an_observation_states_the_reason(name: str) -> None:
    """A transfer without a result has no bandwidth, and therefore no `rate_ratio` and no `mtu`."""
    own, figures = ("bandwidth", "rate_ratio", "mtu") if name == "bandwidth" else (name,), fleet()
    lost = [
        item
        for item in figures["h1"]
        if item.scope == PORT and item.stage == "benchmark" and item.name.removeprefix("verbs.") in own
        and item.params.get("memory") != "host"
    ]  # fmt: skip
    kept = [item for item in figures["h1"] if item not in lost]
    reason = replace(lost[0], status="unsupported", value=None, reason="perftest is not built for CUDA")
    assert findings({**figures, "h1": [*kept, reason]}, readings()) == set()
    assert findings({**figures, "h1": kept}, readings()) == {("h1", PORT, "plan", INCONCLUSIVE)}


def test_partner_that_missed_a_round_causes_one_verdict() -> None:
    """h1 reports the missed round once, on its first port. The figures that h1 therefore lacks have no verdicts of their own."""
    figures = fleet()
    kept = [item for item in figures["h1"] if "partner=h2" not in item.scope]
    error = replace(absent("error", "h2 did not take part in round 1", "hca=mlx5_0,port=1,partner=h2"), stage="gang")
    figures["h1"] = with_numbers_of_partners([*kept, error])
    result = {item for item in findings(figures, readings()) if item[0] == "h1" and item[2] == "plan"}
    assert result == {("h1", "hca=mlx5_0,port=1,partner=h2", "plan", INCONCLUSIVE)}


def test_ports_that_the_partners_measured_are_required_even_without_readings() -> None:
    figures = fleet()
    figures["h1"] = []
    result = findings(figures)
    assert result == {("h1", "host", "plan", INCONCLUSIVE)}


def test_pair_is_not_required_if_one_of_its_hosts_was_not_in_the_launch() -> None:
    """Only the hosts of a launch must have figures with each other. The launch here is of h1 and h2, without h3."""
    figures = {host: [item for item in items if "h3" not in item.scope] for host, items in fleet().items()}
    without_h3 = {host: with_numbers_of_partners(items) for host, items in figures.items()}
    assert findings(without_h3, readings(), members=("h1", "h2")) == set()
    assert findings(without_h3, readings()), "with h3 in the launch, the figures with h3 must be reported as missing"
