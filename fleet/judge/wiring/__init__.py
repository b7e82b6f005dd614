"""Judge the cables between hosts and switches.

A cable that the manifest (the operator's list of parts and cables) lists must be as listed. All other cables are compared
between hosts.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from fleet.judge.host_view import HostView
from fleet.judge.wiring.cables import cable_ends
from fleet.judge.wiring.links import HostLinks, host_links
from fleet.judge.wiring.planned import covered_ports, judge_planned, planned_lines
from fleet.judge.wiring.rails import MIN_HOSTS, compare_rails
from fleet.quantities import counted
from schemas.plans import Plan
from schemas.reports import PASS, Verdict

__all__ = ["Wiring", "cable_ends", "host_links", "judge_links", "judge_wiring"]


@dataclass(frozen=True, kw_only=True)
class Wiring:
    """The verdicts on the cables of a fleet."""

    verdicts: tuple[Verdict, ...] = ()
    summary: str = ""
    """How the cables were compared, and with what result, in words.

    It is empty if nothing can be compared: no host has ports to judge, or no switch was read and the manifest lists no cable.
    """


def judge_wiring(plan: Plan, views: Iterable[HostView]) -> Wiring:
    """Return the verdicts on the cables of these hosts."""
    return judge_links(plan, map(host_links, views))


def judge_links(plan: Plan, hosts: Iterable[HostLinks]) -> Wiring:
    """Return the verdicts on the cables of hosts, given the network ports of each host."""
    judged = {host.name for host in plan.hosts if plan.judges_ports(host)}
    if not judged:
        return Wiring()
    by_host = {host.host: host for host in hosts if host.host in judged}
    lines = [line for line in planned_lines(plan.manifest) if not plan.rehearsal or line.host in judged]
    planned = judge_planned(lines, by_host)
    # A host without a record has an inconclusive verdict already, so its ports are not compared.
    complete = [host for host in by_host.values() if host.has_record]
    rails = compare_rails(complete, covered_ports(lines, by_host))
    texts = []
    if lines:
        passed = sum(verdict.verdict == PASS for verdict in planned)
        texts.append(f"{passed} of {len(lines)} cables as in the manifest")
    if compared := len(rails.verdicts) - rails.shared:
        ports = sum(verdict.verdict == PASS for verdict in rails.verdicts)
        texts.append(f"{ports} of {compared} ports cabled as on similar hosts")
    if rails.shared:
        texts.append(f"{counted(rails.shared, 'port')} at the same switch as another port of their host")
    elif not compared and rails.hosts and not lines:
        few = f"hosts with known switches: {rails.hosts}, at least {MIN_HOSTS} are needed"
        why = few if rails.hosts < MIN_HOSTS else "no slot has the same switches on a clear majority of hosts"
        texts.append(f"NOT COMPARED ({why}); list the cables in the manifest (kind link)")
    if rails.unjudged and (compared or rails.shared or lines):
        why = f"fewer than {MIN_HOSTS} similar hosts, or no clear majority"
        texts.append(f"{counted(rails.unjudged, 'port')} NOT COMPARED ({why})")
    return Wiring(verdicts=(*planned, *rails.verdicts), summary="; ".join(texts))
