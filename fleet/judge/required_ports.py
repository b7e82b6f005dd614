"""Check that enough RDMA ports were measured, if the inventory sets `rackproof_verbs_required` for the host.

At least `rackproof_infiniband_ports` ports must be measured, or one port if the inventory does not set that variable. This number
may include ports of a storage network, which the inventory excludes from NCCL. These need not be measured.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import replace
from typing import Any

from fleet.judge.fabric_ports import INFINIBAND
from fleet.judge.host_view import HostView
from fleet.judge.port_coverage import VERBS, port_of
from schemas.benchmarks.communication import NOT_USED_BY_NCCL
from schemas.records import ERROR, MEASURED, Observation
from schemas.reports import Verdict
from schemas.scopes import Scope
from schemas.stages import GANG

PARTNER_PARAM = "only_partner"
"""Parameter of a verdict on a port that was not measured. It names the partner host if the port has only one."""
LEAST_SHARE = 0.5
"""An active port is not a port of the fabric if its rate is below this share of the rate of the host's fastest port with the same
link layer."""


def unmeasured_ports(view: HostView) -> Iterator[Verdict]:
    """Yield inconclusive verdicts for each stage that measured fewer RDMA ports than the inventory requires.

    The candidates are the ports that may belong to the fabric and that have a reason why they were not measured.
    - With more candidates than missing ports, it is not known which of them should have been measured. Only the host gets a
      verdict.
    - Otherwise each candidate gets a verdict, unless one of its reasons is an error, which another check reports.
    - With fewer candidates than missing ports, for example because the host has too few ports, the host gets a verdict too.
    """
    name = f"{VERBS}.bandwidth"
    stages = [stage.name for stage in view.plan.stages if VERBS in stage.benchmarks]
    for stage in stages if view.host.verbs_required else ():
        figures = [item for item in view.observations[name] if item.stage == stage]
        measured = {port_of(item.scope) for item in figures if item.status == MEASURED}
        absent: dict[str, list[Observation]] = defaultdict(list)
        for item in figures:
            if (port := port_of(item.scope)) not in measured:
                absent[port].append(item)
        wanted = _wanted(view, measured, absent)
        missing = wanted - len(measured)
        if missing <= 0 or (stage == GANG and not view.host.gang):
            continue
        ports = [port for port in sorted(absent) if port and _may_be_of_fabric(view, port)]
        named = ports if len(ports) <= missing else []
        for port in named:
            if all(item.status != ERROR for item in absent[port]):  # another check reports errors
                reason = f"the port was not measured, and rackproof_verbs_required is set: {_reasons(absent[port])}"
                partners = {Scope.parse(item.scope).get("partner") or "" for item in absent[port]}
                only = {PARTNER_PARAM: partners.pop()} if len(partners) == 1 and "" not in partners else {}
                yield replace(view.inconclusive(name, port, reason, stage), params=only)
        if missing > len(named):
            others = [item for port, items in absent.items() if port not in named for item in items]
            why = _reasons(others) or f"the host has no {'other ' if measured or named else ''}RDMA port"
            reason = f"{len(measured)} of {wanted} required RDMA ports were measured, and rackproof_verbs_required is set: {why}"
            yield view.inconclusive(name, "host", reason, stage)


def _wanted(view: HostView, measured: AbstractSet[str], absent: Mapping[str, Sequence[Observation]]) -> int:
    """Return how many ports must be measured.

    If fewer ports than `rackproof_infiniband_ports` remain without those that NCCL_IB_HCA of the inventory excludes, the number
    includes the excluded ports.
    """
    stated, hca = view.host.infiniband_ports, view.host.environment.get("NCCL_IB_HCA")
    reason = NOT_USED_BY_NCCL.format(hca)
    excluded = {port for port, items in absent.items() if hca and all(item.reason == reason for item in items)}
    used = measured | {port for port in absent if port} - excluded
    return max(1, stated if len(used) >= stated else stated - len(excluded))


def _reasons(items: Sequence[Observation]) -> str:
    return "; ".join(dict.fromkeys(item.reason for item in items))


def _may_be_of_fabric(view: HostView, port: str) -> bool:
    """Return whether the port may belong to the fabric.

    It does not if it is an Ethernet port on a host with InfiniBand, or an active port with a low rate (LEAST_SHARE).
    """
    layers, rates = _last(view, "infiniband.link_layer"), _last(view, "infiniband.rate")
    if layers.get(port) != INFINIBAND and INFINIBAND in layers.values():
        return False
    fastest = max((rate for scope, rate in rates.items() if layers.get(scope) == layers.get(port)), default=0.0)
    return not (_last(view, "infiniband.active").get(port) and rates.get(port, fastest) < LEAST_SHARE * fastest)


def _last(view: HostView, name: str) -> dict[str, Any]:
    """Return scope -> last value of a reading."""
    metrics = view.observations.metrics.get(name, ())
    return {scope: value for _, metric in metrics for scope, value in metric.values.items()}
