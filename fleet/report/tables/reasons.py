"""Format the causes as reasons for the decision."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from fleet.quantities import NONE, finite
from fleet.report.formatting import action_name, margin, params_text, signed_percent, value_and_limit
from fleet.report.tables.verdict_rows import VerdictRow, merge_verdicts
from fleet.scope_text import describe_scope
from schemas.reports import FAIL, Cause, Verdict


@dataclass(frozen=True, kw_only=True)
class Reason:
    """Why the fleet, or one of its hosts, is not accepted: a cause with its leading evidence, formatted."""

    title: str
    verdict: str
    hosts: tuple[str, ...]
    scope: str
    serial: str
    stage: str
    name: str
    params: str
    value: str
    """Empty if the leading verdict has no value and limit."""
    wanted: str
    margin: str
    why: str
    """The explanation by the leading verdict, if there is one."""
    action: str
    source: str
    criterion: str
    more: tuple[VerdictRow, ...]
    """All verdicts of the reason, if there are several."""
    count: int
    share: float | None = None
    """The value as a share of its limit, if both are numbers."""
    severity: str = ""
    waiver: str = ""
    """The waiver: person, reason and last day. The verdict is unchanged."""


def reasons(verdicts: Sequence[Verdict], causes: Iterable[Cause]) -> list[Reason]:
    """Return one reason per cause, in their order: failures by the severity of their action, then inconclusive, then waived."""
    return [_reason(cause, [verdicts[position] for position in cause.verdicts]) for cause in causes]


def _reason(cause: Cause, group: Sequence[Verdict]) -> Reason:
    first = group[0]
    compared = first.value is not None and first.limit is not None and first.operator != ""
    value, limit = value_and_limit(first) if compared else ("", "")
    return Reason(
        title=cause.title,
        verdict=cause.verdict,
        hosts=cause.hosts,
        scope=describe_scope(cause.part),
        serial=cause.serial if len(cause.hosts) == 1 else "",
        stage=first.stage,
        name=first.name,
        params=params_text(first.params),
        value=value,
        wanted=limit,
        margin=signed_percent(margin(first)) if compared else NONE,
        why=cause.why,
        action=action_name(cause.action) if cause.verdict == FAIL else "",
        source=first.source,
        criterion=first.criterion,
        more=tuple(merge_verdicts(group)) if len(group) > 1 else (),
        count=len(group),
        share=_share(first),
        severity=cause.severity,
        waiver=str(cause.waiver or ""),
    )


def _share(verdict: Verdict) -> float | None:
    value, limit = finite(verdict.value), finite(verdict.limit)
    return round(value / limit, 4) if value is not None and limit and verdict.operator != "eq" else None
