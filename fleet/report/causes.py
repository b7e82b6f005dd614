"""Verdicts -> what they are about: one group a cause, so that nobody reads the same thing forty times."""

from __future__ import annotations

from collections.abc import Iterable

from schemas.records import SKIPPED
from schemas.reports import FAIL, PASS, Verdict
from schemas.skips import BUSY


def causes(verdicts: Iterable[Verdict]) -> list[list[Verdict]]:
    """Those that do not pass: the equal ones of one host together, and what one criterion has against one part of it.

    In the order in which the parts come first, all that is said of a part together. What a part measured by itself stands before
    what is laid to it.
    """
    equal: dict[tuple[object, ...], list[Verdict]] = {}
    for verdict in verdicts:
        if verdict.verdict != PASS:
            busy = verdict.reason.startswith(f"{SKIPPED}: {BUSY}")
            family = "" if busy else verdict.name.partition(".")[0]
            criterion = verdict.criterion if verdict.verdict == FAIL else ""
            told = (family, criterion, verdict.severity, verdict.reason, verdict.waiver)
            equal.setdefault((verdict.verdict, verdict.host, *told), []).append(verdict)
    joined: dict[tuple[object, ...], list[Verdict]] = {}
    for key, group in equal.items():
        first = group[0]
        one = first.verdict == FAIL and len({verdict.place for verdict in group}) == 1
        of_part = (first.host, first.criterion, first.severity, first.place, first.waiver)
        joined.setdefault(of_part if one else key, []).extend(group)
    places = {place: at for at, place in enumerate(dict.fromkeys(_where(group) for group in joined.values()))}
    ordered = sorted(joined.values(), key=lambda group: places[_where(group)])
    return [sorted(group, key=lambda verdict: verdict.part != "") for group in ordered]


def _where(group: list[Verdict]) -> tuple[str, str]:
    return group[0].host, group[0].place
