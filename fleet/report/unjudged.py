"""What was measured and judged by nothing: the report says so, for a pass without a judgement is none."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from fleet.judge.digests import NAME as DIGEST
from schemas.plans import Plan
from schemas.records import MEASURED
from schemas.reports import HostReport, LineKind, NotJudged, SummaryLine, Verdict
from schemas.stages import BENCHMARK, GANG

_NAMED_OPS = 3
_RATES = frozenset({"B/s", "FLOP/s", "images/s", "tokens/s"})
_SPEEDS = frozenset({"dataloader.sufficiency", "overlap.hidden_share", "overlap.slowdown", "transformer.mfu"})
"""Ratios that tell how fast a thing is."""


def unjudged_bandwidth(plan: Plan, hosts: Sequence[HostReport], verdicts: Sequence[Verdict]) -> list[SummaryLine]:
    """A line for each stage that measured the bandwidth of operations which no criterion spoke of on some host."""
    lines = []
    for stage, what in ((BENCHMARK, "within hosts"), (GANG, "between hosts")):
        measured = {
            (seen.name.split(".")[1], host.name): None
            for host in hosts
            for seen in host.measurements
            if (seen.stage, seen.status) == (stage, MEASURED) and is_busbw(seen.name)
        }
        judged = {
            (item.name.split(".")[1], item.host)
            for item in verdicts
            if item.stage == stage and is_busbw(item.name) and item.limit is not None
        }
        left = [key for key in measured if key not in judged]
        if left and not plan.rehearsal:
            unset = stage == GANG and not any(host.fabric_gbps for host in plan.hosts)
            why = "rackproof_fabric_gbps is not set" if unset else "no criterion for this GPU, count and size"
            text = f"NOT JUDGED{_which(left, list(measured))} ({why})"
            lines.append(SummaryLine(kind=LineKind.NOT_JUDGED, title=f"Bandwidth {what}", text=text))
    return lines


def is_busbw(name: str) -> bool:
    """Whether it is the bandwidth of a collective."""
    return name.startswith("collective.") and name.endswith(".busbw")


def _which(left: Sequence[tuple[str, str]], measured: Sequence[tuple[str, str]]) -> str:
    """` for broadcast, gather on 2 of 8 hosts`; empty where it is all of them."""
    ops, all_ops = ([*dict.fromkeys(op for op, _ in some)] for some in (left, measured))
    hosts, all_hosts = (len({host for _, host in some}) for some in (left, measured))
    told = ", ".join(ops) if len(ops) <= _NAMED_OPS else f"{len(ops)} of {len(all_ops)} operations"
    which = f" for {told}" if len(ops) < len(all_ops) else ""
    return which + (f" on {hosts} of {all_hosts} hosts" if hosts < all_hosts else "")


def _uncompared_digests(hosts: Sequence[HostReport], verdicts: Iterable[Verdict]) -> list[tuple[str, str, str]]:
    """Stage, host and scope of each GPU whose digests were compared with no other GPU's."""
    compared = {
        (item.stage, item.host, item.scope) for item in verdicts if item.name == DIGEST and item.criterion != "plan"
    }
    found = {
        (seen.stage, host.name, seen.scope): None
        for host in hosts
        for seen in host.measurements
        if seen.name == DIGEST and seen.status == MEASURED
    }
    return [place for place in found if place not in compared]


def unjudged_digests(plan: Plan, hosts: Sequence[HostReport], verdicts: Iterable[Verdict]) -> list[SummaryLine]:
    """A line where GPUs had no other to be compared with."""
    left = len({place[1:] for place in _uncompared_digests(hosts, verdicts)})
    if not left or plan.rehearsal:
        return []
    total = sum(len(host.gpus) for host in hosts)
    text = "NOT JUDGED (no GPU of the same model and software to compare with)"
    values = {"not_judged": left, "total": total}
    return [SummaryLine(kind=LineKind.NOT_JUDGED, title=f"Digests of {left} of {total} GPUs", text=text, values=values)]


def speed_unjudged(hosts: Sequence[HostReport], verdicts: Sequence[Verdict]) -> set[str]:
    """Benchmarks whose rates were measured, and of whose speed no criterion speaks."""
    rates = {seen.name for host in hosts for seen in host.measurements if seen.unit in _RATES}
    judged = {item.name for item in verdicts if item.limit is not None} & (rates | _SPEEDS)
    return {name.split(".")[0] for name in rates} - {name.split(".")[0] for name in judged}


def not_judged(hosts: Sequence[HostReport], verdicts: Sequence[Verdict]) -> tuple[NotJudged, ...]:
    """Return everything that was measured and that no criterion judged."""
    judged = {(verdict.stage, verdict.name) for verdict in verdicts if verdict.criterion != "plan"}
    measured = {(seen.stage, seen.name) for host in hosts for seen in host.measurements if seen.status == MEASURED}
    lonely = {
        (stage, DIGEST, host, scope)
        for stage, host, scope in _uncompared_digests(hosts, verdicts)
        if (stage, DIGEST) in judged
    }
    figures = {(stage, name, "", "") for stage, name in measured - judged} | lonely
    return tuple(
        NotJudged(name=name, stage=stage, host=host, scope=scope) for stage, name, host, scope in sorted(figures)
    )
