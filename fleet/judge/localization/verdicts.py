"""Judge the hosts of each gang (the hosts of one multi-node launch): slow parts, and hosts that stopped a launch.

Slow parts are located in two layers: in the pairs of GPUs, which NCCL connects, and below NCCL in the pairs of RDMA ports. A
verdict on a slow part in one layer states whether the other layer is slow on the same host.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace

from fleet.judge.host_view import HostView
from fleet.judge.localization.faults import judge_faults, with_last_hosts
from fleet.judge.localization.gang_pairs import GangPairs
from fleet.judge.localization.launches import Attempt, gang_attempts
from fleet.judge.localization.matrix import SWITCH
from fleet.judge.localization.port_pairs import FABRIC_PARTS, VerbsPairs
from schemas.reports import FAIL, OF_INVENTORY, PASS, Verdict
from schemas.scopes import Scope


def judge_gangs(views: Iterable[HostView], verdicts: Sequence[Verdict]) -> list[Verdict]:
    """Return the verdicts on the hosts of each gang: hosts that stopped a launch, slow parts, and passes.

    Each host is judged by the last launch that it took part in. So an excluded host is judged by the launch before its exclusion,
    and the other hosts are judged by a later launch, without the excluded host.

    Args:
        views: the hosts with valid records.
        verdicts: earlier verdicts. They show which GPUs failed a check that involves no other host, and whether the collectives
            of a gang are too slow.
    """
    gangs: dict[str, dict[str, HostView]] = defaultdict(dict)
    for view in views:
        if view.host.gang:
            gangs[view.host.gang][view.host.name] = view
    gang_verdicts: list[Verdict] = []
    for gang, members in gangs.items():
        plan = next(iter(members.values())).plan
        attempts = gang_attempts(plan, {host: view.evidence for host, view in members.items()}, gang)
        gang_verdicts += judge_faults(attempts, members)
        for attempt, last_hosts in with_last_hosts(attempts):
            slow_collectives = _slow_collectives(attempt, last_hosts, verdicts)
            of_ports = VerbsPairs(attempt, members, verdicts)
            ports = list(of_ports.verdicts())
            switches = of_ports.switches_of_gpus()
            has_slow_ports = any(item.verdict != PASS for item in ports)
            # A setting of NCCL also slows collectives over normal parts, so they are then no evidence against any part.
            is_evidence = has_slow_ports or any(item.action != "configure" for item in slow_collectives)
            collective_slow = bool(slow_collectives) and is_evidence
            of_nccl = GangPairs(attempt, members, verdicts, collective_slow, switches, of_ports.ports_of_gpus(ports))
            compared = compare_layers(of_nccl, of_ports, ports)
            gang_verdicts += [verdict for verdict in compared if verdict.host in last_hosts]
    return gang_verdicts


def compare_layers(of_nccl: GangPairs, of_ports: VerbsPairs, ports: Sequence[Verdict]) -> list[Verdict]:
    """Return the verdicts on the pairs of GPUs and of ports. Those that do not pass also state what the other layer shows.

    `ports`: the verdicts of `of_ports`.
    """
    nccl = list(of_nccl.verdicts())
    return [
        *(
            _with_port(_with_note(item, _seen_by_ports(item, ports, of_ports.hosts)), ports, _adapters(item, of_ports))
            for item in nccl
        ),
        *(_with_note(item, _seen_by_nccl(item, nccl, of_nccl.hosts)) for item in ports),
    ]


def _adapters(verdict: Verdict, of_ports: VerbsPairs) -> Collection[str]:
    """Return the scopes of the host's adapters on the rail of a verdict on NCCL's pairs; none if the verdict names no rail."""
    labels = Scope.parse(verdict.part)
    number = labels.get("nic").removeprefix("rail") or labels.get("rail")
    return of_ports.adapters_of_gpu(verdict.host, int(number)) if number.isdecimal() else ()


def _with_port(verdict: Verdict, ports: Sequence[Verdict], adapters: Collection[str]) -> Verdict:
    """Return a verdict on NCCL's pairs. Attribute it to the slow part that the pairs of ports of the same host show.

    If they show several slow parts, only those of the verdict's rail count (`adapters`); if these are several too, the verdict is
    not attributed. A verdict on a NIC can be attributed to a port, rail or switch. A verdict in the scope of the gang (on a rail,
    a link or the fabric) can be attributed to a rail or switch.
    """
    failed = [item for item in ports if item.host == verdict.host and item.verdict != PASS]
    slow = {item.part_scope for item in failed}
    if len(slow) > 1:
        slow = {item.part_scope for item in failed if Scope.parse(item.scope).device in adapters}
    (part,) = slow if len(slow) == 1 else ("",)
    kind = Scope.parse(part).device_kind
    is_nic = Scope.parse(verdict.part).device_kind == "nic"
    names_switch = Scope.parse(verdict.part).device_kind == SWITCH
    is_shared = (
        Scope.parse(verdict.scope).is_gang and not names_switch and verdict.verdict != PASS and kind in FABRIC_PARTS
    )
    return replace(verdict, part=part) if is_shared or (is_nic and kind in ("hca", *FABRIC_PARTS)) else verdict


def _seen_by_ports(verdict: Verdict, ports: Sequence[Verdict], hosts: Collection[str]) -> str:
    """Return what the pairs of ports show about the host of a verdict on NCCL's pairs. `hosts`: the hosts with pairs of ports."""
    if verdict.verdict == PASS or verdict.host not in hosts:
        return ""
    if any(item.host == verdict.host and item.verdict != PASS for item in ports):
        return "RDMA below NCCL is slow or fails on this host too: the cause is a port, cable or switch, not NCCL"
    if not any(item.host == verdict.host for item in ports):
        return ""  # the ports of the host were not judged
    return "RDMA below NCCL is normal on this host (verbs.bandwidth): the cause is NCCL or the path of the GPU, not the fabric"


def _seen_by_nccl(verdict: Verdict, nccl: Sequence[Verdict], hosts: Collection[str]) -> str:
    """Return what NCCL's pairs show about the host of a verdict on the pairs of ports. `hosts`: the hosts with NCCL's pairs."""
    if verdict.verdict == PASS or verdict.host not in hosts:
        return ""
    if any(item.host == verdict.host and item.verdict != PASS for item in nccl):
        return "the pairs of GPUs are slow or fail on this host too"
    if not any(item.host == verdict.host for item in nccl):
        return ""  # the pairs of the host were not judged
    return "NCCL is normal on this host (pairs.bandwidth): it uses another port or another path"


def _with_note(verdict: Verdict, note: str) -> Verdict:
    if not note:
        return verdict
    detail = f"{verdict.detail}; {note}" if verdict.detail else note
    return replace(verdict, reason=f"{verdict.reason}; {note}", detail=detail)


def has_slow_collective(attempt: Attempt, last_hosts: Collection[str], verdicts: Iterable[Verdict]) -> bool:
    """Return whether a collective of the gang was too slow, according to the verdicts on `last_hosts`.

    These are the hosts whose last launch was `attempt`.
    """
    return bool(_slow_collectives(attempt, last_hosts, verdicts))


def _slow_collectives(attempt: Attempt, last_hosts: Collection[str], verdicts: Iterable[Verdict]) -> list[Verdict]:
    scope = f"gang={attempt.gang}"
    return [verdict for verdict in verdicts if verdict.host in last_hosts and _is_slow_collective(verdict, scope)]


def _is_slow_collective(verdict: Verdict, scope: str) -> bool:
    is_speed = verdict.name.endswith((".busbw", ".algbw", ".latency"))
    is_of_gang = verdict.scope == scope and verdict.name.startswith("collective.")
    return verdict.verdict == FAIL and is_of_gang and is_speed and verdict.kind not in OF_INVENTORY
