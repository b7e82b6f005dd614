"""Whether what a soak has found ends it: the host's own record, judged as the plan's `stop_on` says."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from agent.run.record import HostRun
from fleet.judge.criteria import Pack, read_packs
from fleet.judge.evidence import Evidence, from_benchmark
from fleet.judge.judge import judge
from schemas.errors import UsageError
from schemas.records import Record
from schemas.reports import FAIL, Verdict
from schemas.stages import SOAK

FATAL = frozenset({"rma", "inspect_hardware", "reset_gpu", "reboot"})
"""What a finding asks for with which a host is out of work."""
VALUES = ("wrong_words", "wrong_products", "wrong_elements", "mismatches", "identical", "loss_finite")
"""Last parts of what a benchmark finds out of a part's health; the others tell how fast it is."""


def known_packs(run: HostRun) -> tuple[Pack, ...]:
    """The shipped packs, and of those that the inventory names the ones that this host has too."""
    try:
        return read_packs([name for name in run.plan.criteria if not name.endswith((".yml", ".yaml"))])
    except UsageError:
        return read_packs([])


def ending(run: HostRun, record: Record, packs: Sequence[Pack]) -> str:
    """The finding of the host's own by which the policy ends its soak; empty where there is none."""
    policy = run.plan.stage(SOAK).stop_on
    if policy == "never":
        return ""
    alone = replace(
        run.plan,
        hosts=(run.host,),
        manifest=tuple(part for part in run.plan.manifest if part.host == run.host.name),
    )
    found = [item for item in judge(alone, {run.host.name: Evidence(records=(record,))}, packs) if item.verdict == FAIL]
    compared = {item.id for pack in packs for item in pack.criteria if item.same_as_fleet is not None}
    chosen = [item for item in found if policy == "any" or (is_fatal(item) and item.criterion not in compared)]
    if not chosen:
        return ""
    first = chosen[0]
    more = f" (and {len(chosen) - 1} more)" if len(chosen) > 1 else ""
    part = "" if first.scope == "host" else f"{first.scope} "
    return f"{part}{first.name}: {first.reason}; {first.action.replace('_', ' ')}{more}"


def is_fatal(found: Verdict) -> bool:
    """Whether a finding is one of health, with which the host is out of work; how fast it is waits for the report."""
    healthy = not from_benchmark(found.name) and not found.name.startswith("drift.")
    return found.action in FATAL and (healthy or found.name.rpartition(".")[2] in VALUES)
