"""Compare a run with its baseline: what changed since its hosts were accepted."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from fleet.diff.comparison import Comparison
from fleet.judge.criteria import Criterion, Pack
from fleet.judge.evidence import Evidence
from fleet.judge.pack_selection import criteria_by_id, select_packs
from fleet.quantities import counted
from fleet.records.host_state import accepted_state, host_state
from schemas.baselines import FIGURES_GONE, PARTS, REGRESSED, UNCLEAR, Change
from schemas.plans import Plan, PlannedHost
from schemas.reports import LineKind, SummaryLine

MAX_SUMMARY_LINES = 12


@dataclass(frozen=True, kw_only=True)
class BaselineDiff:
    """What changed since the hosts were accepted."""

    changes: tuple[Change, ...] = ()
    compared: int = 0
    """Number of figures that were compared."""
    figures: int = 0
    """Number of figures of the run, compared or not."""


def diff_against_baseline(plan: Plan, evidence: Mapping[str, Evidence], packs: Sequence[Pack]) -> BaselineDiff:
    """Return what changed since the hosts of a run were accepted; empty if the plan names no baseline."""
    if plan.baseline is None:
        return BaselineDiff()
    comparison = Comparison({host.name for host in plan.hosts})
    for host in plan.hosts:
        add_host(comparison, plan, host, evidence.get(host.name, Evidence()), packs)
    return BaselineDiff(changes=comparison.changes(), compared=comparison.compared, figures=comparison.figures)


def add_host(comparison: Comparison, plan: Plan, host: PlannedHost, evidence: Evidence, packs: Sequence[Pack]) -> None:
    """Compare a host of a run with its accepted record, `evidence.baseline`."""
    criteria = criteria_of(plan, host, evidence, packs)
    accepted = accepted_state(evidence.baseline, evidence.gpus())
    comparison.add(host.name, accepted, host_state(evidence, accepted.shared), criteria)


def criteria_of(plan: Plan, host: PlannedHost, evidence: Evidence, packs: Sequence[Pack]) -> list[Criterion]:
    """Return the criteria that compare a host with its baseline, as the judge selects them."""
    selected_packs = select_packs(plan, host, evidence.gpus(), packs)[0]
    return [item for item in criteria_by_id(selected_packs).values() if item.baseline is not None]


def summary(plan: Plan, diff: BaselineDiff) -> Iterator[SummaryLine]:
    """Yield the lines on the baseline for the summary of the report; none if the plan names no baseline.

    The first line states how much was compared. At most MAX_SUMMARY_LINES regressions and changed parts follow, then the number
    of those left out.
    """
    if plan.baseline is None:
        return
    kinds = Counter(change.kind for change in diff.changes)
    missing = sum(int(change.old or 0) for change in diff.changes if change.kind == FIGURES_GONE)
    parts = sum(kinds[kind] for kind in PARTS)
    unchanged = "nothing regressed, same parts" if diff.compared else "no earlier figures"
    counts = [
        f"{diff.compared} of {diff.figures} figures compared",
        f"{kinds[REGRESSED]} regressed" if kinds[REGRESSED] else "",
        f"{counted(parts, 'part')} differ{'s' if parts == 1 else ''}" if parts else "",
        "" if kinds[REGRESSED] or parts else unchanged,
        f"{kinds[UNCLEAR]} unclear" if kinds[UNCLEAR] else "",
        f"{counted(missing, 'accepted figure')} not measured" if missing else "",
    ]
    values = {"compared": diff.compared, "figures": diff.figures, "regressed": kinds[REGRESSED], "parts": parts}
    title = f"Against the accepted records (baseline {plan.baseline.digest[:12]})"
    yield SummaryLine(kind=LineKind.BASELINE, title=title, text=", ".join(filter(None, counts)), values=values)
    listed = [change for change in diff.changes if change.counts]
    for change in listed[:MAX_SUMMARY_LINES]:
        yield SummaryLine(
            kind=LineKind.BASELINE, title=change.kind.upper(), text=change.text, host=change.host, part=change.scope
        )
    if more := len(listed[MAX_SUMMARY_LINES:]):
        yield SummaryLine(
            kind=LineKind.MORE, text=f"… and {counted(more, 'more change')} in the report", values={"changes": more}
        )
