"""Check that the figures of RDMA ports agree with each other and with the readings of the ports."""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Iterator, Mapping

from fleet.judge.host_view import HostView
from fleet.judge.port_coverage import BEST, SHARE, VERBS, port_of
from fleet.quantities import number_or_zero
from schemas.records import MEASURED, Observation, Value
from schemas.scopes import Scope

Problem = tuple[str, str, str, str]
"""Name, scope, reason, stage."""
RATE, WIDTH, GUID, LAYER = "infiniband.rate", "infiniband.width", "infiniband.hca.node_guid", "infiniband.link_layer"
TOLERANCE = 0.01
"""Relative difference that a rate may have because it is computed from rounded figures."""
BANDWIDTH, RATIO, MTU = f"{VERBS}.bandwidth", f"{VERBS}.rate_ratio", f"{VERBS}.mtu"
_SETTINGS = ("op", "direction", "memory", "sharing")
"""Parameters that the bandwidth and the share of one test have in common."""


def port_problems(view: HostView) -> Iterator[Problem]:
    """Yield what cannot be right about the figures of ports, or about the adapters of the host."""
    yield from _changed_adapters(view)
    yield from _changed_links(view)
    measured = [item for name in (BANDWIDTH, RATIO) for item in view.observations[name] if item.status == MEASURED]
    if not measured:
        return
    yield from _wrong_rates(view, measured)
    yield from _wrong_best(view, [item for item in measured if item.name == RATIO])
    for item in view.observations[MTU]:
        if item.status == MEASURED and item.value != item.params.get("mtu"):
            yield (
                MTU,
                item.scope,
                f"it is {item.value}, but the test used an MTU of {item.params.get('mtu')}",
                item.stage,
            )
    yield from _different_mtu(view)


def _changed_links(view: HostView) -> Iterator[Problem]:
    """Yield the ports whose link changed its rate or width during the run: figures from before and after are not comparable."""
    seen: dict[tuple[str, str], dict[Value, str]] = defaultdict(dict)
    for name in (RATE, WIDTH):
        for snapshot, metric in view.observations.metrics.get(name, ()):
            for scope, value in metric.values.items():
                seen[name, scope].setdefault(value, snapshot.stage)
    for (name, scope), values in seen.items():
        if len(values) > 1:
            yield name, scope, f"changed during the run: {', then '.join(map(str, values))}", [*values.values()][-1]


def _wrong_rates(view: HostView, measured: list[Observation]) -> Iterator[Problem]:
    """Yield the bandwidths that are not the stated share of the rate of their port.

    If the rate of a port was not read, it is the median of the rates that the port's tests imply (bandwidth divided by share).
    """
    readings: dict[str, set[float]] = defaultdict(set)
    for _, metric in view.observations.metrics.get(RATE, ()):
        for scope, value in metric.values.items():
            readings[scope].add(number_or_zero(value))
    tests: dict[tuple[Value, ...], dict[str, Observation]] = defaultdict(dict)
    for item in measured:
        tests[(item.stage, item.scope, *map(item.params.get, _SETTINGS))][item.name] = item
    rates: dict[str, list[tuple[Observation, float]]] = defaultdict(list)
    for test in tests.values():
        if {BANDWIDTH, RATIO} <= test.keys() and number_or_zero(test[RATIO].value) > 0:
            bandwidth, ways = test[BANDWIDTH], 2 if test[BANDWIDTH].params.get("direction") == "both_ways" else 1
            rate = number_or_zero(bandwidth.value) / number_or_zero(test[RATIO].value) / ways
            rates[port_of(bandwidth.scope)].append((bandwidth, rate))
    for port, of_port in rates.items():
        known = readings.get(port) or {statistics.median_low([rate for _, rate in of_port])}
        for item, rate in of_port:
            wrong = next((value for value in sorted(known) if not math.isclose(rate, value, rel_tol=TOLERANCE)), None)
            if wrong is not None:
                reason = f"bandwidth and share give a rate of {rate:g} B/s, but the port has {wrong:g} B/s"
                yield item.name, item.scope, reason, item.stage


def _wrong_best(view: HostView, ratios: list[Observation]) -> Iterator[Problem]:
    """Yield the best shares that are not the greatest of the shares with all partners."""
    shares: dict[tuple[str, str], dict[str, float]] = defaultdict(dict)
    for item in ratios:
        if SHARE.items() <= item.params.items() and (partner := Scope.parse(item.scope).get("partner")):
            of_port = shares[item.stage, port_of(item.scope)]
            # A port is tested with a partner alone, while all ports transfer, or both: the benchmark keeps the higher share.
            of_port[partner] = max(number_or_zero(item.value), of_port.get(partner, 0.0))
    for item in view.observations[BEST]:
        of_port = shares.get((item.stage, item.scope), {})
        if item.status != MEASURED or not of_port:
            continue
        if item.params.get("partners") != len(of_port):
            partners = item.params.get("partners")
            of = f"{partners} partner{'' if partners == 1 else 's'}"
            reason = f"it is the best of {of}, but the port has shares with {len(of_port)}"
            yield BEST, item.scope, reason, item.stage
        elif not math.isclose(number_or_zero(item.value), max(of_port.values()), rel_tol=TOLERANCE):
            reason = f"it is {item.value}, but the greatest share is {max(of_port.values()):g}"
            yield BEST, item.scope, reason, item.stage


def _different_mtu(view: HostView) -> Iterator[Problem]:
    """Yield each port or pair whose tests used different MTUs, although the two ends of a connection agree on one MTU."""
    used: dict[tuple[str, str], dict[Value, None]] = defaultdict(dict)
    for name in (BANDWIDTH, RATIO, MTU, f"{VERBS}.latency", f"{VERBS}.message_rate"):
        for item in view.observations[name]:
            if item.status == MEASURED and "mtu" in item.params:
                used[item.stage, item.scope][item.params["mtu"]] = None
    for (stage, scope), values in used.items():
        if len(values) > 1:
            yield MTU, scope, f"the tests of the port used the MTUs {', '.join(map(str, values))}", stage


def _changed_adapters(view: HostView) -> Iterator[Problem]:
    """Yield the adapters whose GUID changed during the run, or is missing in a snapshot that has their ports."""
    guids: dict[str, dict[Value, None]] = defaultdict(dict)
    stated: dict[tuple[str, str], Mapping[str, object]] = {}
    for snapshot, metric in view.observations.metrics.get(GUID, ()):
        stated[snapshot.stage, snapshot.phase] = {**metric.values, **metric.absent}
        for scope, value in metric.values.items():
            guids[scope][value] = None
    for scope, values in guids.items():
        if len(values) > 1:
            yield GUID, scope, f"changed during the run: {', then '.join(map(str, values))}", ""
    for snapshot, metric in view.observations.metrics.get(LAYER, ()):
        known = stated.get((snapshot.stage, snapshot.phase), {})
        for scope in sorted({Scope.parse(scope).device for scope in metric.values if guids} - known.keys()):
            yield (
                GUID,
                scope,
                f"missing {snapshot.phase} {snapshot.stage}, although the port of the adapter was read",
                "",
            )
