"""Check that each RDMA port, and each pair of ports of two hosts, has all figures of the benchmark `verbs`.

A missing figure is accepted if the record states a reason. The plan does not list the ports of a host: its active InfiniBand and
RoCE ports are taken from its readings. The pairs of hosts (a host and its partner) follow from the setting `rounds`. The figures
of a partner are evidence too: if it measured four ports with a host, the host must have figures, or reasons, for four ports.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fleet.judge.host_view import HostView
from fleet.quantities import counted
from schemas.catalogue import BENCHMARKS, settings
from schemas.records import ERROR, MEASURED, Observation, Value
from schemas.reports import Verdict
from schemas.scopes import Scope
from schemas.stages import GANG
from schemas.tournament import partners

VERBS = "verbs"
"""Name of the benchmark that measures RDMA ports."""
BEST = "verbs.best_ratio"
LAYERS = ("InfiniBand", "Ethernet")
"""Link layers of the ports that `verbs` measures."""
_TEST_OF = {"verbs.rate_ratio": "verbs.bandwidth", "verbs.mtu": "verbs.bandwidth"}
"""Figure -> another figure of the same test. If the test has no result, the record states the reason only for the latter."""
_BOTH_WAYS = {"direction": "both_ways"}
SHARE = {"op": "write", "direction": "one_way", "memory": "host"}
"""Parameters of the test for which the port also reports its best `verbs.rate_ratio` over all partners (BEST)."""


@dataclass(frozen=True)
class PortFigure:
    """A figure that every port, or every pair of ports, must have."""

    name: str
    params: Mapping[str, Value]

    @property
    def test(self) -> str:
        """Return the name under which the record states the reason if the test has no result."""
        return _TEST_OF.get(self.name, self.name)

    @property
    def is_of_both_hosts(self) -> bool:
        """Return whether both hosts of a pair must have the figure.

        A figure without the parameter `direction` is reported only by the host of the pair that comes first in the gang.
        """
        return "direction" in self.params

    @property
    def is_both_ways(self) -> bool:
        """Return whether the test sends both ways at once. If it fails, only the first host of the pair states why."""
        return _BOTH_WAYS.items() <= self.params.items()

    def is_stated_by(self, items: Sequence[Observation]) -> bool:
        """Return whether one of the observations is this figure or the reason why it does not exist."""
        return any(
            item.name in (self.name, *((self.test,) if item.status != MEASURED else ()))
            and self.params.items() <= item.params.items()
            for item in items
        )


class PortStatements:
    """What a host states about its ports in one stage: figures, and reasons why there are none."""

    def __init__(self, view: HostView, stage: str) -> None:
        self.by_scope: dict[str, list[Observation]] = defaultdict(list)
        """Scope of a port, or of a port and a partner -> figures of its tests, and reasons why single tests have no figure."""
        self.excused: set[str] = set()
        """Scopes with a reason why none of their tests has a figure."""
        self.failed_partners: set[str] = set()
        """Partners with which nothing was measured, because of an error."""
        self.is_excused = False
        """Whether the host states a reason why none of its ports has a figure."""
        for name in {output.name for output in BENCHMARKS[VERBS].outputs}:
            for item in view.observations[name]:
                if item.stage == stage:
                    self._add(item)

    def _add(self, item: Observation) -> None:
        """Add a figure, or the reason for its absence, to the scopes to which it applies."""
        scope = Scope.parse(item.scope)
        if item.status == MEASURED or "sharing" in item.params:
            self.by_scope[item.scope].append(item)
        elif not scope.get("hca"):
            self.is_excused = True
        else:
            self.excused.add(item.scope)
            if item.status == ERROR and scope.get("partner"):
                self.failed_partners.add(scope.get("partner"))  # such an error is reported only for the first port

    def ports(self) -> set[str]:
        """Return the scopes of the ports with a figure other than BEST, or with a reason why a single test has none."""
        return {port_of(scope) for scope, items in self.by_scope.items() if any(item.name != BEST for item in items)}

    def ports_with(self, partner: str) -> set[str]:
        """Return the ports for which the host has a figure, or a reason for its absence, with this partner."""
        scopes = {*self.by_scope, *self.excused}
        return {port_of(scope) for scope in scopes if Scope.parse(scope).get("partner") == partner}

    def failed_with(self, partner: str) -> list[Observation]:
        """Return the reasons why tests with this partner have no result."""
        return [
            item
            for scope, items in self.by_scope.items()
            if Scope.parse(scope).get("partner") == partner
            for item in items
            if item.status != MEASURED
        ]

    def has_share(self, port: str) -> bool:
        """Return whether the port has a `verbs.rate_ratio` with the parameters SHARE, from which BEST is computed."""
        return any(
            item.name == "verbs.rate_ratio" and item.status == MEASURED and SHARE.items() <= item.params.items()
            for scope, items in self.by_scope.items()
            if port_of(scope) == port
            for item in items
        )

    def measured_with(self, partner: str) -> set[str]:
        """Return the ports that were measured with this partner.

        Figures that only one host of a pair must have are ignored.
        """
        return {
            port_of(scope)
            for scope, items in self.by_scope.items()
            if Scope.parse(scope).get("partner") == partner
            and any(item.status == MEASURED and "direction" in item.params for item in items)
        }


def port_of(scope: str) -> str:
    """Return the scope of the port without the partner."""
    labels = Scope.parse(scope).labels
    return ",".join(f"{key}={value}" for key, value in labels.items() if key != "partner")


def silent_ports(view: HostView) -> Iterator[Verdict]:
    """Yield an inconclusive verdict for each port with unexplained missing figures in a stage other than the gang stage.

    Stages whose last launch on the host failed are skipped: other verdicts report them.
    """
    for stage, chosen in _stages(view, in_gang=False):
        statements = PortStatements(view, stage)
        if statements.is_excused:
            continue
        figures = list(planned_figures(chosen, ("alone",)))
        for port in sorted(_ports(view) - statements.excused):
            yield from _missing(view, stage, port, figures, statements.by_scope.get(port, ()))


def silent_pairs(views: Collection[HostView]) -> Iterator[Verdict]:
    """Yield an inconclusive verdict for each port or pair of ports with unexplained missing figures in the gang stage.

    Args:
        views: all hosts of one or more gangs (a gang: the hosts of one multi-node launch).
    """
    of_gang: dict[str, dict[str, tuple[HostView, PortStatements]]] = defaultdict(dict)
    for view in views:
        if view.host.gang and any(_stages(view, in_gang=True)):
            of_gang[view.host.gang][view.host.name] = view, PortStatements(view, GANG)
    for hosts in of_gang.values():
        for view, statements in hosts.values():
            if not statements.is_excused:
                yield from _silent_pairs_of(view, statements, {name: each for name, (_, each) in hosts.items()})


def _silent_pairs_of(
    view: HostView, statements: PortStatements, of_hosts: Mapping[str, PortStatements]
) -> Iterator[Verdict]:
    """Yield the verdicts of `silent_pairs` on one host. `of_hosts` has the statements of all hosts of its gang."""
    chosen, host = dict(_stages(view, in_gang=True))[GANG], view.host.name
    planned, members = view.plan.gangs()[view.host.gang], view.members(GANG)
    others = [name for name in partners(planned, host, int(chosen["rounds"])) if name in members]
    figures = list(planned_figures(chosen, chosen["sharings"]))
    stated = {port_of(scope) for scope in (*statements.by_scope, *statements.excused)}
    ports = sorted(_ports(view) - statements.excused)
    for port in ports if others else ():
        if port not in stated:
            yield from _missing(view, GANG, port, figures, ())
        elif _has_best(chosen) and statements.has_share(port):
            yield from _missing(view, GANG, port, [PortFigure(BEST, {})], statements.by_scope.get(port, ()))
    for partner in others:
        if partner in statements.failed_partners:
            continue
        theirs = of_hosts.get(partner)
        failed = theirs.failed_with(host) if theirs else []
        yield from _uneven(view, partner, statements, theirs)
        is_first = planned.index(host) < planned.index(partner)
        for scope in [f"{port},partner={partner}" for port in ports if port in stated]:
            expected = [
                figure
                for figure in figures
                if is_first or (figure.is_of_both_hosts and not (figure.is_both_ways and figure.is_stated_by(failed)))
            ]
            if scope not in statements.excused:
                yield from _missing(view, GANG, scope, expected, statements.by_scope.get(scope, ()))


def _uneven(
    view: HostView, partner: str, statements: PortStatements, theirs: PortStatements | None
) -> Iterator[Verdict]:
    """Yield a verdict if the partner measured more ports with this host than this host has figures or reasons for."""
    measured = len(theirs.measured_with(view.host.name)) if theirs else 0
    stated = len(statements.ports_with(partner))
    if stated < measured:
        ports = counted(measured, "RDMA port")
        reason = f"{partner} measured {ports} with this host, but this host has figures or reasons for only {stated}"
        yield view.inconclusive(f"{VERBS}.bandwidth", "host", reason, GANG)


def _missing(
    view: HostView, stage: str, scope: str, figures: Sequence[PortFigure], items: Sequence[Observation]
) -> Iterator[Verdict]:
    """Yield one verdict if figures of a port or pair are neither measured nor explained."""
    missing = [figure for figure in figures if not figure.is_stated_by(items)]
    if not missing:
        return
    names = ", ".join(dict.fromkeys(figure.name for figure in missing))
    reason = f"the launch finished, but there is no figure and no reason for its absence: {names}"
    if not items and not Scope.parse(scope).get("partner") and missing[0].name != BEST:
        what = "the port is active or tested in another stage"
        reason = f"{what}, but has neither a figure nor a reason why it was not measured"
    yield view.inconclusive(missing[0].name, scope, reason, stage, missing[0].params if items else None)


def _stages(view: HostView, *, in_gang: bool) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield each stage with `verbs` whose last launch succeeded on the host, and the settings of `verbs`."""
    for stage in view.plan.stages:
        launches = [launch for launch in view.evidence.launches() if launch.stage == stage.name]
        if VERBS in stage.benchmarks and (stage.name == GANG) is in_gang and launches and launches[-1].succeeded:
            yield stage.name, settings(VERBS, stage.benchmarks[VERBS])


def planned_figures(chosen: Mapping[str, Any], sharings: Sequence[str]) -> Iterator[PortFigure]:
    """Yield the figures that a port must have with these settings of `verbs`; `sharings`: values of the parameter `sharing`."""
    for output in BENCHMARKS[VERBS].outputs:
        if _TEST_OF.get(output.name, output.name).removeprefix(f"{VERBS}.") not in chosen["figures"]:
            continue
        values = [sharings if key == "sharing" else chosen[setting] for key, setting in output.over.items()]
        for combination in itertools.product(*values):
            yield PortFigure(output.name, dict(zip(output.over, combination, strict=True)))


def _has_best(chosen: Mapping[str, Any]) -> bool:
    """Return whether the settings of `verbs` include the test with the parameters SHARE, so that the ports report BEST."""
    bandwidth = next(output for output in BENCHMARKS[VERBS].outputs if output.name == "verbs.bandwidth")
    in_settings = all(value in chosen[bandwidth.over[key]] for key, value in SHARE.items())
    return in_settings and "bandwidth" in chosen["figures"]


def _ports(view: HostView) -> set[str]:
    """Return the scopes of the ports that must have figures: active ports, and ports with a figure or reason in any stage."""
    layers, states = (
        [metric for _, metric in view.observations.metrics.get(name, ())]
        for name in ("infiniband.link_layer", "infiniband.active")
    )
    of_layer = {scope for metric in layers for scope, layer in metric.values.items() if layer in LAYERS}
    active = {scope for metric in states for scope, state in metric.values.items() if state is True}
    stages = [stage.name for stage in view.plan.stages if VERBS in stage.benchmarks]
    return (of_layer & active).union(*(PortStatements(view, stage).ports() for stage in stages))
