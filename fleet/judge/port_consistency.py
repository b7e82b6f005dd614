"""Check that the figures of RDMA ports agree with each other and with the readings of the ports.

The figures come from the benchmark `verbs`. The share of a test (`verbs.rate_ratio`) is its bandwidth divided by the rate of the
port. If PCIe is slower than the port, the bandwidth is divided by the rate of PCIe (parameter `pcie_rate`) instead. If the test
sends both ways, the divisor is doubled.

The best share (`verbs.best_ratio`) of a port is its greatest share over all partners (the other hosts with which it was tested).
"""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Iterator, Mapping

from fleet.judge.host_view import HostView
from fleet.judge.port_coverage import BEST, SHARE, VERBS, port_of
from fleet.quantities import counted, number_or_zero
from schemas.records import MEASURED, Observation, Value
from schemas.scopes import Scope

Problem = tuple[str, str, str, str]
"""Name and scope of a figure or reading, why it cannot be right, and its stage (empty: no particular stage)."""
RATE, WIDTH, GUID, LAYER = "infiniband.rate", "infiniband.width", "infiniband.hca.node_guid", "infiniband.link_layer"
TOLERANCE = 0.01
"""Relative difference that is accepted between two rates or shares, because they are computed from rounded figures."""
BANDWIDTH, RATIO, MTU = f"{VERBS}.bandwidth", f"{VERBS}.rate_ratio", f"{VERBS}.mtu"
_SETTINGS = ("op", "direction", "memory", "sharing")
"""Parameters that are equal for the bandwidth and the share of one test."""


def port_problems(view: HostView) -> Iterator[Problem]:
    """Yield each figure of a port, and each reading of a link or adapter, that cannot be right."""
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
                f"the value is {item.value}, but the parameter `mtu` is {item.params.get('mtu')}",
                item.stage,
            )
    yield from _different_mtu(view)


def _changed_links(view: HostView) -> Iterator[Problem]:
    """Yield each port whose rate or width changed during the run: its figures before and after the change are not comparable."""
    values_of: dict[tuple[str, str], dict[Value, str]] = defaultdict(dict)
    for name in (RATE, WIDTH):
        for snapshot, metric in view.observations.metrics.get(name, ()):
            for scope, value in metric.values.items():
                values_of[name, scope].setdefault(value, snapshot.stage)
    for (name, scope), values in values_of.items():
        if len(values) > 1:
            yield name, scope, f"changed during the run: {', then '.join(map(str, values))}", [*values.values()][-1]


def _wrong_rates(view: HostView, measured: list[Observation]) -> Iterator[Problem]:
    """Yield each bandwidth that does not fit its share.

    The bandwidth divided by the share must be the rate of the port, or a lower `pcie_rate` of the test. If the test sends both
    ways, it must be twice that rate. If no snapshot has the rate of the port, the rate is computed from the port's tests without
    `pcie_rate`: it is the median of the rates that follow from them.
    """
    readings: dict[str, set[float]] = defaultdict(set)
    for _, metric in view.observations.metrics.get(RATE, ()):
        for scope, value in metric.values.items():
            readings[scope].add(number_or_zero(value))
    tests: dict[tuple[Value, ...], dict[str, Observation]] = defaultdict(dict)
    for item in measured:
        tests[(item.stage, item.scope, *map(item.params.get, _SETTINGS))][item.name] = item
    rates: dict[str, list[tuple[Observation, float, float]]] = defaultdict(list)
    for test in tests.values():
        if {BANDWIDTH, RATIO} <= test.keys() and number_or_zero(test[RATIO].value) > 0:
            bandwidth, ways = test[BANDWIDTH], 2 if test[BANDWIDTH].params.get("direction") == "both_ways" else 1
            rate = number_or_zero(bandwidth.value) / number_or_zero(test[RATIO].value) / ways
            limit = number_or_zero(test[RATIO].params.get("pcie_rate")) or math.inf
            rates[port_of(bandwidth.scope)].append((bandwidth, rate, limit))
    for port, of_port in rates.items():
        full = [rate for _, rate, limit in of_port if limit == math.inf] or [math.inf]
        known = readings.get(port) or {statistics.median_low(full)}
        for item, rate, limit in of_port:
            possible = sorted({min(value, limit) for value in known})
            wrong = next((value for value in possible if not math.isclose(rate, value, rel_tol=TOLERANCE)), None)
            if wrong is not None:
                reason = f"the bandwidth and its {RATIO} imply a port rate of {rate:g} B/s instead of {wrong:g} B/s"
                yield item.name, item.scope, reason, item.stage


def _wrong_best(view: HostView, ratios: list[Observation]) -> Iterator[Problem]:
    """Yield each best share that is not the greatest share over all partners, or that states a wrong number of partners."""
    shares: dict[tuple[str, str], dict[str, float]] = defaultdict(dict)
    for item in ratios:
        if SHARE.items() <= item.params.items() and (partner := Scope.parse(item.scope).get("partner")):
            of_port = shares[item.stage, port_of(item.scope)]
            # A port may have two shares with a partner: tested alone, and while all ports transfer. The higher one counts.
            of_port[partner] = max(number_or_zero(item.value), of_port.get(partner, 0.0))
    for item in view.observations[BEST]:
        of_port = shares.get((item.stage, item.scope), {})
        if item.status != MEASURED or not of_port:
            continue
        if item.params.get("partners") != len(of_port):
            partners = item.params.get("partners")
            of = f"{partners} partner{'' if partners == 1 else 's'}"
            reason = f"it is the best of {of}, but {RATIO} was measured with {counted(len(of_port), 'partner')}"
            yield BEST, item.scope, reason, item.stage
        elif not math.isclose(number_or_zero(item.value), max(of_port.values()), rel_tol=TOLERANCE):
            reason = f"it is {item.value}, but the greatest {RATIO} is {max(of_port.values()):g}"
            yield BEST, item.scope, reason, item.stage


def _different_mtu(view: HostView) -> Iterator[Problem]:
    """Yield each port, or pair of ports, whose tests state different MTUs. Not all can be right: the MTU never changes."""
    used: dict[tuple[str, str], dict[Value, None]] = defaultdict(dict)
    for name in (BANDWIDTH, RATIO, MTU, f"{VERBS}.latency", f"{VERBS}.message_rate"):
        for item in view.observations[name]:
            if item.status == MEASURED and "mtu" in item.params:
                used[item.stage, item.scope][item.params["mtu"]] = None
    for (stage, scope), values in used.items():
        if len(values) > 1:
            yield MTU, scope, f"the tests of the port used different MTUs: {', '.join(map(str, values))}", stage


def _changed_adapters(view: HostView) -> Iterator[Problem]:
    """Yield each adapter whose GUID changed during the run, or is missing in a snapshot that has readings of its ports."""
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
                f"missing in the snapshot {snapshot.phase} {snapshot.stage}, which has readings of the adapter's ports",
                "",
            )
