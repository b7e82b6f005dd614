"""A run against its baseline: what is not as it was when its hosts were accepted."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from fleet.diff.comparison import Comparison
from fleet.judge.criteria import Criterion, Pack
from fleet.judge.evidence import Evidence
from fleet.judge.pack_selection import packs_for
from fleet.records.host_state import accepted, sight
from schemas.baselines import FIGURES_GONE, PARTS, REGRESSED, UNCLEAR, Change
from schemas.plans import Plan, PlannedHost
from schemas.reports import LineKind, SummaryLine

MOST_LINES = 12


@dataclass(frozen=True, kw_only=True)
class Since:
    """What came of a comparison with the accepted records, and of how much of the run."""

    changes: tuple[Change, ...] = ()
    compared: int = 0
    figures: int = 0
    """Those of the run, compared or not."""


def since_accepted(plan: Plan, evidence: Mapping[str, Evidence], packs: Sequence[Pack]) -> Since:
    """What is not as it was when the hosts of a run were accepted; nothing where its plan names no baseline."""
    if plan.baseline is None:
        return Since()
    found = Comparison()
    for host in plan.hosts:
        take(found, plan, host, evidence.get(host.name, Evidence()), packs)
    return Since(changes=found.changes(), compared=found.compared, figures=found.figures)


def take(found: Comparison, plan: Plan, host: PlannedHost, left: Evidence, packs: Sequence[Pack]) -> None:
    """Adds a host of a run that is compared with its accepted record, which its evidence has."""
    found.add(host.name, accepted(left.baseline), sight(left), criteria_of(plan, host, left, packs))


def criteria_of(plan: Plan, host: PlannedHost, left: Evidence, packs: Sequence[Pack]) -> list[Criterion]:
    """The criteria by which a host is held against a baseline, as the judge chooses them."""
    applied = packs_for(plan, host, left.gpus(), packs)[0]
    chosen = {item.id: item for pack in applied for item in pack.criteria}
    return [item for item in chosen.values() if item.baseline is not None]


def summary(plan: Plan, since: Since) -> Iterator[SummaryLine]:
    """What of the changes stands on top of the report: how much, and each regression and part that differs."""
    if plan.baseline is None:
        return
    kinds = Counter(change.kind for change in since.changes)
    gone = sum(int(change.old or 0) for change in since.changes if change.kind == FIGURES_GONE)
    parts = sum(kinds[kind] for kind in PARTS)
    told = [
        f"{kinds[REGRESSED]} regressed" if kinds[REGRESSED] else "",
        f"{_count(parts, 'part')} differ" if parts else "",
    ]
    same = "nothing regressed, the parts are the same" if since.compared else "nothing can be told of how they were"
    found = ", ".join(text for text in told if text) or same
    found = f"{since.compared} of {since.figures} figures compared, {found}"
    unclear = f", {kinds[UNCLEAR]} cannot be told" if kinds[UNCLEAR] else ""
    lost = f", {_count(gone, 'accepted figure')} not measured" if gone else ""
    values = {"compared": since.compared, "figures": since.figures, "regressed": kinds[REGRESSED], "parts": parts}
    title = f"Against the accepted records (baseline {plan.baseline.digest[:12]})"
    yield SummaryLine(kind=LineKind.BASELINE, title=title, text=f"{found}{unclear}{lost}", values=values)
    shown = [change for change in since.changes if change.counts]
    for change in shown[:MOST_LINES]:
        yield SummaryLine(
            kind=LineKind.BASELINE, title=change.kind.upper(), text=change.text, host=change.host, part=change.scope
        )
    if more := len(shown[MOST_LINES:]):
        yield SummaryLine(kind=LineKind.MORE, text=f"… and {more} more changes in the report", values={"changes": more})


def _count(number: int, one: str) -> str:
    return f"{number} {one if number == 1 else one + 's'}"
