"""Group verdicts by cause, so that the same finding is reported once."""

from __future__ import annotations

from collections.abc import Iterable

from fleet.judge.evidence import from_benchmark
from fleet.judge.localization.faults import CRITERION as LOCALISED
from schemas.reports import ACTIONS, FAIL, PASS, Verdict, VerdictKind


def group_by_cause(verdicts: Iterable[Verdict]) -> list[list[Verdict]]:
    """Return the verdicts that do not pass, grouped by cause.

    Equal verdicts of one host form a group, and so do the verdicts that one criterion attributes to one part. Groups follow the
    order of the parts. Within a part, its own readings come before readings of other parts that are attributed to it; then
    the most severe action comes first.
    """
    equal: dict[tuple[object, ...], list[Verdict]] = {}
    attributed = set()
    for verdict in verdicts:
        if verdict.verdict != PASS:
            family = "" if verdict.kind == VerdictKind.IN_USE else verdict.name.partition(".")[0]
            criterion = verdict.criterion if verdict.verdict == FAIL else ""
            content = (family, criterion, verdict.severity, verdict.reason, verdict.waiver)
            equal.setdefault((verdict.verdict, verdict.host, *content), []).append(verdict)
            if verdict.part:
                attributed.add(_part_key(verdict))
    joined: dict[tuple[object, ...], list[Verdict]] = {}
    for key, group in equal.items():
        parts = {_part_key(verdict) for verdict in group}
        (group_key,) = parts if len(parts) == 1 and parts <= attributed else (key,)
        joined.setdefault((*group_key, group[0].severity, group[0].waiver), []).extend(group)
    groups = [sorted(group, key=lambda verdict: verdict.part != "") for group in joined.values()]
    parts_in_order = dict.fromkeys((group[0].host, group[0].part_scope) for group in groups)
    order = {part: position for position, part in enumerate(parts_in_order)}
    return sorted(groups, key=lambda group: (order[group[0].host, group[0].part_scope], *_severity(group[0])))


def _part_key(verdict: Verdict) -> tuple[object, ...]:
    return verdict.verdict, verdict.host, verdict.criterion, verdict.part_scope


def _severity(verdict: Verdict) -> tuple[bool, int]:
    """Return the sort key: a part's own readings before those attributed to it, then by the severity of the action.

    A benchmark figure or a failed launch whose action is to inspect the hardware does not name the fault, so it comes after
    readings that do.
    """
    symptom = verdict.action == "inspect_hardware" and (from_benchmark(verdict.name) or verdict.criterion == LOCALISED)
    action = "reboot" if symptom else verdict.action
    rank = 2 * (ACTIONS.index(action) if action in ACTIONS else len(ACTIONS))
    return verdict.part != "", rank + symptom
