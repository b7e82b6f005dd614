"""Verdicts as reasons for a decision, one a cause: what says the same is said once."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from fleet.quantities import NONE, finite
from fleet.report.causes import causes
from fleet.report.format import ACTIONS, action_name, found_and_wanted, margin, params_text, percent
from fleet.report.tables.places import scopes_name
from fleet.report.tables.rows import Row, fold
from schemas.reports import CRITICAL, FAIL, Verdict
from schemas.scopes import Scope

_MANY_ALIKE = 4
"""So many findings of one criterion on whole hosts are told as one."""


@dataclass(frozen=True, kw_only=True)
class Reason:
    """Why the fleet, or one host of it, is not accepted."""

    verdict: str
    hosts: tuple[str, ...]
    """Several where the same thing, of no part in particular, is true of each."""
    scope: str
    """Empty where the reason holds for several unlike places."""
    serial: str
    stage: str
    name: str
    params: str
    found: str
    """Empty where the verdict compares nothing; then `text` says it all."""
    wanted: str
    margin: str
    text: str
    detail: str
    """What explains the value or the limit, where something does."""
    action: str
    source: str
    criterion: str
    more: tuple[Row, ...]
    """All verdicts that this reason stands for, where it is more than one."""
    count: int
    share: float | None = None
    """The value as a share of its limit, where both are numbers."""
    severity: str = ""
    waiver: str = ""
    """Who answers for it, why and until when; the verdict stays what it is."""


def reasons(verdicts: Iterable[Verdict]) -> list[Reason]:
    """One reason a cause: failures by the gravity of their action, then what is inconclusive."""
    ordered = sorted(causes(verdicts), key=_urgency)
    alike: dict[Reason, list[str]] = {}
    for found in map(_reason, ordered):
        # A part has a serial and a place of its own to name; what is true of whole hosts is said once for all of them.
        whole = not found.serial and found.scope in ("", "host")
        alike.setdefault(replace(found, hosts=()) if whole else found, []).extend(found.hosts)
    return [replace(found, hosts=tuple(hosts)) for found, hosts in alike.items()]


def _urgency(group: Sequence[Verdict]) -> tuple[bool, bool, bool, int]:
    """What somebody answers for comes last, what failed before what is not known, what is critical before the rest."""
    first = group[0]
    return waiver_text(first) != "", first.verdict != FAIL, first.severity != CRITICAL, _gravity(first.action)


def waiver_text(verdict: Verdict) -> str:
    """`waived by NAME until DAY: WHY`; empty where nobody answers for it."""
    return str(verdict.waiver or "")


def _gravity(action: str) -> int:
    known = list(ACTIONS)
    return known.index(action) if action in known else known.index("monitor")


def _reason(group: Sequence[Verdict]) -> Reason:
    first = group[0]
    scopes = list(dict.fromkeys(verdict.scope for verdict in group))
    laid = any(verdict.part for verdict in group)
    one_place = laid or len(scopes) == 1 or all(Scope.parse(scope).device_kind in ("gpu", "cpu") for scope in scopes)
    compared = first.value is not None and first.limit is not None and first.operator != ""
    found, limit = found_and_wanted(first) if compared else ("", "")
    alike = len({(verdict.name, params_text(verdict.params)) for verdict in group}) == 1
    return Reason(
        verdict=first.verdict,
        hosts=(first.host,),
        scope=scopes_name([first.place] if laid else scopes) if one_place else "",
        serial=first.serial if len({verdict.serial for verdict in group}) == 1 else "",
        stage=first.stage if len({verdict.stage for verdict in group}) == 1 else "",
        name=first.name if len({verdict.name for verdict in group}) == 1 else f"{first.name.partition('.')[0]}.*",
        params=params_text(first.params) if alike else "",
        found=found,
        wanted=limit,
        margin=percent(margin(first)) if compared else NONE,
        text=first.reason,
        detail=first.detail,
        action=action_name(first.action),
        source=first.source,
        criterion=first.criterion,
        more=tuple(fold(group)) if len(group) > 1 else (),
        count=len(group),
        share=_share(first),
        severity=first.severity,
        waiver=waiver_text(first),
    )


def _share(verdict: Verdict) -> float | None:
    value, limit = finite(verdict.value), finite(verdict.limit)
    return round(value / limit, 4) if value is not None and limit and verdict.operator != "eq" else None


def together(found: Sequence[Reason]) -> list[Reason]:
    """The same with less to read: what is unknown for one cause told once, and one criterion that many whole hosts fail."""
    groups: dict[tuple[object, ...], list[Reason]] = {}
    for reason in found:
        whole = reason.scope in ("", "host") and not reason.serial
        key: tuple[object, ...] = (len(groups),)
        if reason.verdict != FAIL and whole:
            key = (reason.hosts, reason.text, reason.waiver)
        elif whole:
            key = (reason.criterion, reason.waiver)
        groups.setdefault(key, []).append(reason)
    told = []
    for group in groups.values():
        if group[0].verdict != FAIL:
            told.append(_of_one_cause(group))
        else:
            told += group if len(group) < _MANY_ALIKE else [_of_many_hosts(group)]
    return sorted(told, key=lambda reason: not reason.serial) if told and told[0].verdict == FAIL else told


def _of_one_cause(group: Sequence[Reason]) -> Reason:
    names = list(dict.fromkeys(reason.name for reason in group))
    if len(group) == 1:
        return group[0]
    rows = tuple(row for reason in group for row in reason.more)
    stage = group[0].stage if len({reason.stage for reason in group}) == 1 else ""
    count = sum(reason.count for reason in group)
    return replace(group[0], name=", ".join(names), params="", stage=stage, more=rows, count=count, scope="")


def _of_many_hosts(group: Sequence[Reason]) -> Reason:
    """The worst of them, with every host."""
    first = min(group, key=lambda reason: -abs(1 - (reason.share if reason.share is not None else 1)))
    hosts = tuple(dict.fromkeys(host for reason in group for host in reason.hosts))
    detail = f"the worst of {len(group)} findings, on {first.hosts[0]}{f'; {first.detail}' if first.detail else ''}"
    return replace(first, hosts=hosts, detail=detail, count=sum(reason.count for reason in group), more=())
