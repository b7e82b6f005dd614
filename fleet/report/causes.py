"""Verdicts -> what they are about: one group a cause, so that nobody reads the same thing forty times."""

from __future__ import annotations

from collections.abc import Iterable

from fleet.judge.evidence import from_benchmark
from fleet.judge.localization.faults import CRITERION as LOCALISED
from schemas.reports import ACTIONS, FAIL, PASS, Verdict, VerdictKind


def causes(verdicts: Iterable[Verdict]) -> list[list[Verdict]]:
    """Those that do not pass: the equal ones of one host together, and what one criterion lays to one part of it.

    In the order in which the parts come first, all that is said of a part together, the gravest first. What a part measured by
    itself stands before what is laid to it.
    """
    equal: dict[tuple[object, ...], list[Verdict]] = {}
    laid = set()
    for verdict in verdicts:
        if verdict.verdict != PASS:
            family = "" if verdict.kind == VerdictKind.IN_USE else verdict.name.partition(".")[0]
            criterion = verdict.criterion if verdict.verdict == FAIL else ""
            told = (family, criterion, verdict.severity, verdict.reason, verdict.waiver)
            equal.setdefault((verdict.verdict, verdict.host, *told), []).append(verdict)
            if verdict.part:
                laid.add(_part(verdict))
    joined: dict[tuple[object, ...], list[Verdict]] = {}
    for key, group in equal.items():
        parts = {_part(verdict) for verdict in group}
        (which,) = parts if len(parts) == 1 and parts <= laid else (key,)
        joined.setdefault((*which, group[0].severity, group[0].waiver), []).extend(group)
    groups = [sorted(group, key=lambda verdict: verdict.part != "") for group in joined.values()]
    places = {place: at for at, place in enumerate(dict.fromkeys((group[0].host, group[0].place) for group in groups))}
    return sorted(groups, key=lambda group: (places[group[0].host, group[0].place], *_gravity(group[0])))


def _part(verdict: Verdict) -> tuple[object, ...]:
    return verdict.verdict, verdict.host, verdict.criterion, verdict.place


def _gravity(verdict: Verdict) -> tuple[bool, int]:
    """What a part itself shows before what is laid to it, then by what it asks for.

    A figure, and a launch that ended, for which hardware is to be inspected, tell that something is wrong and not what: after
    readings that do.
    """
    suffers = verdict.action == "inspect_hardware" and (from_benchmark(verdict.name) or verdict.criterion == LOCALISED)
    action = "reboot" if suffers else verdict.action
    grave = 2 * (ACTIONS.index(action) if action in ACTIONS else len(ACTIONS))
    return verdict.part != "", grave + suffers
