"""Find figures that were measured but not judged. The report names them, because a figure without a verdict is not a pass."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence, Set

from fleet.judge.digests import NAME as DIGEST
from fleet.judge.paths import is_bandwidth_name
from fleet.report.facts import HostFacts, fleet_figures
from schemas.plans import Plan
from schemas.reports import HostReport, Judged, LineKind, NotJudged, SummaryLine
from schemas.stages import BENCHMARK, GANG
from schemas.timeline import RATES

_MAX_OPERATIONS = 3
_SPEEDS = frozenset(
    {"dataloader.sufficiency", "overlap.hidden_share", "overlap.slowdown", "transformer.mfu", "mixture_of_experts.mfu"}
)
"""Names of figures that are ratios, but show how fast a benchmark ran. A verdict on one of them judges the benchmark's speed."""

Facts = Mapping[str, HostFacts]
"""Host -> its facts, in the order of the plan."""


def unjudged_bandwidth(plan: Plan, facts: Facts) -> list[SummaryLine]:
    """Return a line for each stage in which the bandwidth of a collective operation was measured but not judged on some host."""
    lines = []
    with_fabric_rate = {host.name for host in plan.hosts if host.fabric_gbps}
    for stage, what in ((BENCHMARK, "within hosts"), (GANG, "between hosts")):
        measured = {
            (name.split(".")[1], host): None
            for host, of_host in facts.items()
            for figure_stage, name, _ in of_host.measured
            if figure_stage == stage and is_bandwidth_name(name)
        }
        judged = {
            (name.split(".")[1], host)
            for host, of_host in facts.items()
            for figure_stage, name in of_host.judged_bandwidths
            if figure_stage == stage
        }
        unjudged = [key for key in measured if key not in judged]
        if unjudged and not plan.rehearsal:
            unjudged_hosts = {host for _, host in unjudged}
            text = f"NOT JUDGED{_which(unjudged, list(measured))} ({_why(stage, unjudged_hosts, with_fabric_rate)})"
            lines.append(SummaryLine(kind=LineKind.NOT_JUDGED, title=f"Bandwidth {what}", text=text))
    return lines


def _why(stage: str, unjudged: Set[str], with_fabric_rate: Set[str]) -> str:
    """Return why the bandwidth was not judged on the hosts `unjudged`."""
    no_criterion = "no criterion for this GPU model, number of GPUs and message size"
    without_rate = unjudged - with_fabric_rate if stage == GANG else set()
    if not without_rate:
        return no_criterion
    if without_rate == unjudged:
        return "rackproof_fabric_gbps is not set"
    return f"rackproof_fabric_gbps is not set on {len(without_rate)} of these hosts; on the others, {no_criterion}"


def _which(unjudged: Sequence[tuple[str, str]], measured: Sequence[tuple[str, str]]) -> str:
    """Return which operations were not judged and on how many hosts: ` for broadcast, gather on 2 of 8 hosts`.

    Empty if every measured operation and every host is affected.
    """
    operations, all_operations = ([*dict.fromkeys(name for name, _ in keys)] for keys in (unjudged, measured))
    hosts, all_hosts = (len({host for _, host in keys}) for keys in (unjudged, measured))
    names = ", ".join(operations)
    if len(operations) > _MAX_OPERATIONS:
        names = f"{len(operations)} of {len(all_operations)} operations"
    which = f" for {names}" if len(operations) < len(all_operations) else ""
    return which + (f" on {hosts} of {all_hosts} hosts" if hosts < all_hosts else "")


def unjudged_digests(plan: Plan, hosts: Sequence[HostReport], facts: Facts) -> list[SummaryLine]:
    """Return one line if there are GPUs whose digests could not be compared with those of another GPU; else none.

    A digest is a checksum of the results of a computation, which must be equal on equal GPUs (`fleet/judge/digests.py`).
    """
    gpus = {(host, scope) for host, of_host in facts.items() for _, scope in of_host.uncompared_digests}
    if not gpus or plan.rehearsal:
        return []
    total = sum(len(host.gpus) for host in hosts)
    text = (
        "NOT JUDGED (no digests of another GPU with the same model and the same versions of driver, torch, CUDA, cuBLAS, "
        "cuDNN, NCCL and Rackproof)"
    )
    values = {"not_judged": len(gpus), "total": total}
    title = f"Digests of {len(gpus)} of {total} GPUs"
    return [SummaryLine(kind=LineKind.NOT_JUDGED, title=title, text=text, values=values)]


def uncompared_hosts(plan: Plan, hosts: Sequence[HostReport]) -> list[SummaryLine]:
    """Return one line if there are hosts that could not be compared with any other host; else none.

    Sizes, settings and versions of a host are compared only with hosts of the same GPU model and the same gang (the hosts of one
    multi-node launch).
    """
    if plan.rehearsal:
        return []
    gangs = {host.name: host.gang for host in plan.hosts}
    group_sizes = Counter(
        (frozenset(gpu.name for gpu in host.gpus), gangs.get(host.name)) for host in hosts if host.gpus
    )
    alone = sum(count == 1 for count in group_sizes.values())
    if not alone:
        return []
    which = f" on {alone} of {len(hosts)} hosts" if alone < len(hosts) else ""
    why = "memory, processors, ports, settings and versions: no other host of the same GPU model and gang"
    return [SummaryLine(kind=LineKind.NOT_JUDGED, title="Host comparison", text=f"NOT COMPARED{which} ({why})")]


def speed_unjudged(facts: Facts, judged: Sequence[Judged]) -> set[str]:
    """Return the benchmarks that measured a rate but whose speed was not judged.

    The speed of a benchmark is judged if at least one of its rates or of its figures in _SPEEDS was compared with a limit.
    """
    rates = {name for _, name, unit in fleet_figures(facts) if unit in RATES}
    with_limit = {row.name for row in judged if row.operator} & (rates | _SPEEDS)
    return {name.split(".")[0] for name in rates} - {name.split(".")[0] for name in with_limit}


def not_judged(facts: Facts, judged: Sequence[Judged]) -> tuple[NotJudged, ...]:
    """Return every measured figure that no criterion judged.

    If digests were judged on other GPUs, each GPU whose digests could not be compared is an entry of its own.
    """
    rows = {(row.stage, row.name) for row in judged if row.criterion != "plan"}
    measured = {(stage, name) for stage, name, _ in fleet_figures(facts)}
    figures = {
        (stage, name, "", "") for stage, name in measured if (stage, name) not in rows and ("", name) not in rows
    }
    figures |= {
        (stage, DIGEST, host, scope)
        for host, of_host in facts.items()
        for stage, scope in of_host.uncompared_digests
        if (stage, DIGEST) in rows
    }
    return tuple(
        NotJudged(name=name, stage=stage, host=host, scope=scope) for stage, name, host, scope in sorted(figures)
    )
