"""Decide whether a soak of this host ends early because of a failed criterion (a finding).

The host's record is judged, and the plan's `stop_on` policy selects the findings that end the soak.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from agent.run.record import HostRun
from fleet.judge.criteria import Pack, read_packs
from fleet.judge.evidence import Evidence, from_benchmark
from fleet.judge.judge import judge
from schemas.catalogue import counts_wrong_results
from schemas.errors import UsageError
from schemas.records import Record
from schemas.reports import ACTIONS, FAIL, Verdict
from schemas.stages import SOAK

FATAL = frozenset(ACTIONS) - {"configure", "reseat", "recable", "monitor", "none"}
"""Actions, such as `rma`, for which a host must be taken out of service. A finding with another action is never fatal."""
HEALTH_FIGURES = ("identical", "loss_finite")
"""Last components of the names of benchmark figures that show whether a part is healthy. A finding on a
benchmark figure is fatal only if it is on such a figure or on a count of wrong results."""


def read_known_packs(run: HostRun) -> tuple[Pack, ...]:
    """Return all shipped criteria packs, and after them the packs that the plan names.

    Packs that the plan names as files (`.yml`, `.yaml`) are left out, because they are on the control node. If another named pack
    is not installed on this host, return only the shipped packs.
    """
    try:
        return read_packs([name for name in run.plan.criteria if not name.endswith((".yml", ".yaml"))])
    except UsageError:
        return read_packs([])


def stopping_finding(run: HostRun, record: Record, packs: Sequence[Pack]) -> str:
    """Return the text of the finding that ends this host's soak according to the `stop_on` policy; empty if none does."""
    policy = run.plan.stage(SOAK).stop_on
    if policy == "never":
        return ""
    own_plan = replace(
        run.plan,
        hosts=(run.host,),
        manifest=tuple(part for part in run.plan.manifest if part.host == run.host.name),
    )
    verdicts = judge(own_plan, {run.host.name: Evidence(records=(record,))}, packs)
    failed = [verdict for verdict in verdicts if verdict.verdict == FAIL]
    compared = {item.id for pack in packs for item in pack.criteria if item.same_as_fleet is not None}
    stopping = [
        verdict for verdict in failed if policy == "any" or (is_fatal(verdict) and verdict.criterion not in compared)
    ]
    if not stopping:
        return ""
    first = stopping[0]
    more = f" (and {len(stopping) - 1} more)" if len(stopping) > 1 else ""
    part = "" if first.scope == "host" else f"{first.scope} "
    return f"{part}{first.name}: {first.reason}; {first.action.replace('_', ' ')}{more}"


def is_fatal(verdict: Verdict) -> bool:
    """Return whether the host must be taken out of service because of a finding. Findings about speed are not fatal."""
    is_reading = not from_benchmark(verdict.name) and not verdict.name.startswith("drift.")
    shows_health = counts_wrong_results(verdict.name) or verdict.name.rpartition(".")[2] in HEALTH_FIGURES
    return verdict.action in FATAL and (is_reading or shows_health)
