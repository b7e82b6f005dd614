"""Group verdicts into reasons for the decision, one per cause."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from fleet.quantities import NONE, finite
from fleet.report.causes import group_by_cause
from fleet.report.formatting import ACTIONS, action_name, margin, params_text, signed_percent, value_and_limit
from fleet.report.scope_text import describe_scopes
from fleet.report.tables.verdict_rows import VerdictRow, merge_verdicts
from schemas.reports import CRITICAL, FAIL, Verdict
from schemas.scopes import Scope

_MANY_HOSTS = 4
"""Findings of one criterion on at least this many whole hosts are shown as one."""


@dataclass(frozen=True, kw_only=True)
class Reason:
    """Why the fleet, or one of its hosts, is not accepted."""

    verdict: str
    hosts: tuple[str, ...]
    """More than one if several whole hosts have the same reason."""
    scope: str
    """Empty if the reason applies to several different parts."""
    serial: str
    stage: str
    name: str
    params: str
    value: str
    """Empty if the verdict has no value and limit; then only `text` describes it."""
    wanted: str
    margin: str
    text: str
    detail: str
    """Explanation of the value or the limit, if there is one."""
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

    @property
    def is_whole_host(self) -> bool:
        """Return whether the reason applies to whole hosts, not to a part with a serial."""
        return self.scope in ("", "host") and not self.serial


def reasons(verdicts: Iterable[Verdict]) -> list[Reason]:
    """Return one reason per cause: failures by the severity of their action, then inconclusive, then waived."""
    hosts_of: dict[Reason, list[str]] = {}
    for reason in map(_reason, sorted(group_by_cause(verdicts), key=_urgency)):
        key = replace(reason, hosts=()) if reason.is_whole_host else reason
        hosts_of.setdefault(key, []).extend(reason.hosts)
    return [replace(reason, hosts=tuple(hosts)) for reason, hosts in hosts_of.items()]


def _urgency(group: Sequence[Verdict]) -> tuple[bool, bool, bool, int]:
    first = group[0]
    return first.waiver is not None, first.verdict != FAIL, first.severity != CRITICAL, _action_rank(first.action)


def _action_rank(action: str) -> int:
    actions = list(ACTIONS)
    return actions.index(action) if action in actions else actions.index("monitor")


def _reason(group: Sequence[Verdict]) -> Reason:
    first = group[0]
    scopes = list(dict.fromkeys(verdict.scope for verdict in group))
    attributed = any(verdict.part for verdict in group)
    one_part = (
        attributed or len(scopes) == 1 or all(Scope.parse(scope).device_kind in ("gpu", "cpu") for scope in scopes)
    )
    compared = first.value is not None and first.limit is not None and first.operator != ""
    value, limit = value_and_limit(first) if compared else ("", "")
    same_figure = len({(verdict.name, params_text(verdict.params)) for verdict in group}) == 1
    return Reason(
        verdict=first.verdict,
        hosts=(first.host,),
        scope=describe_scopes([first.part_scope] if attributed else scopes) if one_part else "",
        serial=first.serial if len({verdict.serial for verdict in group}) == 1 else "",
        stage=first.stage if len({verdict.stage for verdict in group}) == 1 else "",
        name=first.name if len({verdict.name for verdict in group}) == 1 else f"{first.name.partition('.')[0]}.*",
        params=params_text(first.params) if same_figure else "",
        value=value,
        wanted=limit,
        margin=signed_percent(margin(first)) if compared else NONE,
        text=first.reason,
        detail=first.detail,
        action=action_name(first.action),
        source=first.source,
        criterion=first.criterion,
        more=tuple(merge_verdicts(group)) if len(group) > 1 else (),
        count=len(group),
        share=_share(first),
        severity=first.severity,
        waiver=str(first.waiver or ""),
    )


def _share(verdict: Verdict) -> float | None:
    value, limit = finite(verdict.value), finite(verdict.limit)
    return round(value / limit, 4) if value is not None and limit and verdict.operator != "eq" else None


def merge_reasons(reasons: Sequence[Reason]) -> list[Reason]:
    """Merge inconclusive reasons with the same cause, and failures of one criterion on many whole hosts."""
    groups: dict[tuple[object, ...], list[Reason]] = {}
    for reason in reasons:
        key: tuple[object, ...] = (len(groups),)
        if reason.is_whole_host:
            key = (reason.criterion, reason.waiver)
            if reason.verdict != FAIL:
                key = (reason.hosts, reason.text, reason.waiver)
        groups.setdefault(key, []).append(reason)
    merged: list[Reason] = []
    for group in groups.values():
        if group[0].verdict != FAIL:
            merged.append(_merge_same_cause(group))
        else:
            merged += group if len(group) < _MANY_HOSTS else [_merge_hosts(group)]
    return sorted(merged, key=lambda reason: not reason.serial) if merged and merged[0].verdict == FAIL else merged


def _merge_same_cause(group: Sequence[Reason]) -> Reason:
    if len(group) == 1:
        return group[0]
    names = ", ".join(dict.fromkeys(reason.name for reason in group))
    rows = tuple(row for reason in group for row in reason.more)
    stage = group[0].stage if len({reason.stage for reason in group}) == 1 else ""
    count = sum(reason.count for reason in group)
    return replace(group[0], name=names, params="", stage=stage, more=rows, count=count, scope="")


def _merge_hosts(group: Sequence[Reason]) -> Reason:
    """Return the worst of the reasons, with all hosts."""
    worst = min(group, key=lambda reason: -abs(1 - (reason.share if reason.share is not None else 1)))
    hosts = tuple(dict.fromkeys(host for reason in group for host in reason.hosts))
    detail = f"the worst of {len(group)} findings, on {worst.hosts[0]}{f'; {worst.detail}' if worst.detail else ''}"
    return replace(worst, hosts=hosts, detail=detail, count=sum(reason.count for reason in group), more=())
