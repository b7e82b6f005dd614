"""Merge verdicts into table rows: similar verdicts on several parts, message sizes, operations or settings share a row."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from fleet.quantities import NONE, SIGNS, counted, finite, number, quantity, scale, size
from fleet.report.formatting import is_change, limit_text, margin, margin_text, params_text, value_and_limit
from fleet.scope_text import describe_scopes
from schemas.records import Value
from schemas.reports import FAIL, INCONCLUSIVE, PASS, Verdict
from schemas.scopes import Scope

_MAX_VALUES = 16
_SEVERAL_OPERATIONS = object()
"""First element of the key of each group of verdicts that pass a minimum for several collective operations."""


@dataclass(frozen=True, kw_only=True)
class VerdictRow:
    """One or more verdicts of one criterion, stage and result.

    Verdicts that share a row may differ in their parts, values and message sizes; if they are not passes, the values are equal.
    Passes of `eq` may also differ in operation and settings. Passes of a minimum for several collective operations may
    also differ in operation, settings and limit.
    """

    name: str
    params: str
    scope: str
    stage: str
    value: str
    wanted: str
    margin: str
    verdict: str
    criterion: str
    origin: str
    """Basis and source of the limit."""
    reason: str
    detail: str
    count: int


def merge_verdicts(verdicts: Iterable[Verdict]) -> list[VerdictRow]:
    """Return the verdicts as rows, failures first."""
    verdicts = list(verdicts)
    names: dict[tuple[str, str], set[str]] = {}
    for verdict in verdicts:
        names.setdefault((verdict.criterion, verdict.stage), set()).add(verdict.name)
    groups: dict[tuple[object, ...], list[Verdict]] = {}
    for verdict in verdicts:
        groups.setdefault(_group_key(verdict, names[verdict.criterion, verdict.stage]), []).append(verdict)
    rows = [row for key, group in groups.items() for row in _rows(group, merge=key[0] is _SEVERAL_OPERATIONS)]
    return sorted(rows, key=lambda row: (row.verdict != FAIL, row.verdict != INCONCLUSIVE))


def _group_key(verdict: Verdict, names: Collection[str]) -> tuple[object, ...]:
    family = _family(verdict.name)
    if _is_one_of_several_operations(verdict, names):
        return _SEVERAL_OPERATIONS, verdict.criterion, verdict.stage, family
    why = "" if verdict.verdict == PASS else (verdict.value, verdict.reason)
    # Values that pass `eq` equal the limit, whatever the operation and the settings, so they share a row.
    exact = verdict.verdict == PASS and verdict.operator == "eq"
    settings = tuple((key, value) for key, value in verdict.params.items() if key not in ("size_bytes", "phase"))
    return (
        *(verdict.verdict, family if exact else verdict.name, verdict.criterion, verdict.stage),
        *(verdict.operator, verdict.limit, () if exact else settings, verdict.source, verdict.basis),
        *(_scope_suffix(verdict.scope), why),
    )


def _is_one_of_several_operations(verdict: Verdict, names: Collection[str]) -> bool:
    """Return whether the verdict passes a minimum that judges at least two collective operations; such passes share a row.

    `names` are the names of all verdicts of its criterion and stage.
    """
    return verdict.verdict == PASS and verdict.operator in ("ge", "gt") and len(set(map(_family, names))) < len(names)


def _family(name: str) -> str:
    """Return `collective.*.busbw` for the bus bandwidth of any operation, else the name itself."""
    parts = name.split(".")
    return ".".join([parts[0], "*", *parts[2:]]) if len(parts) > 2 and parts[0] == "collective" else name


def _scope_suffix(scope: str) -> str:
    """Return the labels after the device, such as a link or a reason. The peer is left out, because there are too many pairs."""
    parsed = Scope.parse(scope)
    return "" if parsed.kind == "peer" else parsed.below


def _rows(group: Sequence[Verdict], merge: bool) -> list[VerdictRow]:
    """Return one row for the group, or one per verdict if a joint row would not show which part and size has which value.

    If `merge`, the group is one row with all of its values. Otherwise a joint row has one value, or the values of several parts
    at one message size. Equal verdicts other than passes share a row only if every part has one at every message size.
    """
    scopes = list(dict.fromkeys(verdict.scope for verdict in group))
    if merge:
        return [_row(group, scopes, equal=False)]
    sizes = list(dict.fromkeys(verdict.params.get("size_bytes") for verdict in group))
    equal = all(_is_same(verdict.value, group[0].value) for verdict in group)
    # Equal passes need not list every combination of part and size; failures must.
    complete = len(group) == len(scopes) * len(sizes) or (equal and group[0].verdict == PASS)
    if len(group) == 1 or (complete and (equal or len(sizes) == 1)):
        return [_row(group, scopes, equal)]
    return [_row([verdict], [verdict.scope], equal=True) for verdict in group]


def _is_same(first: Value, second: Value) -> bool:
    return type(first) is type(second) and first == second


def _row(group: Sequence[Verdict], scopes: Sequence[str], equal: bool) -> VerdictRow:
    first = group[0]
    value, limit = value_and_limit(first)
    margins = [share for verdict in group if (share := margin(verdict)) is not None]
    names = {verdict.name for verdict in group}
    return VerdictRow(
        name=first.name if len(names) == 1 else _family(first.name),
        params=_settings(group),
        scope=describe_scopes(scopes),
        stage=first.stage,
        value=value if equal else _values(group),
        wanted=limit if equal else _limits(group),
        margin=margin_text(min(margins)) if margins else NONE,
        verdict=first.verdict,
        criterion=first.criterion,
        origin=": ".join(text for text in (first.basis, first.source.removeprefix(f"{first.basis}, ")) if text),
        reason=first.reason,
        detail=first.detail if equal or len(group) == 1 else "",
        count=len(group),
    )


def _settings(group: Sequence[Verdict]) -> str:
    """Return the parameters that are equal in the group, the number of values of the others, and the range of message sizes."""
    values_of: dict[str, dict[Value, None]] = {}
    for verdict in group:
        for key, value in verdict.params.items():
            values_of.setdefault(key, {})[value] = None
    texts = []
    for key, values in values_of.items():
        if key not in ("phase", "size_bytes"):
            shared = len(values) == 1 and all(key in verdict.params for verdict in group)
            count = counted(len(values), key.replace("_", " "))
            texts.append(params_text({key: next(iter(values))}) if shared else count)
    return ", ".join(text for text in (*texts, _sizes(list(values_of.get("size_bytes", ())))) if text)


def _values(group: Sequence[Verdict]) -> str:
    """Return the values of a group in its order; numbers share one unit.

    Of more than _MAX_VALUES numbers, return the range; of more than _MAX_VALUES other values, return the first ones.
    """
    values = [verdict.value for verdict in group]
    changed = "changed by " if is_change(group[0]) else ""
    numbers = [known for value in values if (known := finite(value)) is not None]
    if len(numbers) < len(values):
        return changed + " · ".join(quantity(value, group[0].unit) for value in values[:_MAX_VALUES])
    factor, unit = scale(max(numbers, key=abs), group[0].unit)
    if len(numbers) > _MAX_VALUES:
        return f"{changed}{number(min(numbers) / factor)} … {number(max(numbers) / factor)} {unit}".rstrip()
    return f"{changed}{' · '.join(number(value / factor) for value in numbers)} {unit}".rstrip()


def _limits(group: Sequence[Verdict]) -> str:
    """Return the limit of a group, or the range of its limits."""
    limits = sorted({known for verdict in group if (known := finite(verdict.limit)) is not None})
    if len(limits) < 2:
        return limit_text(group[0])
    factor, unit = scale(limits[-1], group[0].unit)
    return f"{SIGNS[group[0].operator]} {number(limits[0] / factor)} … {number(limits[-1] / factor)} {unit}".rstrip()


def _sizes(sizes: Sequence[Value]) -> str:
    known = [value for value in sizes if value is not None]
    if len(known) < 3:
        return ", ".join(size(value) for value in known)
    return f"{size(known[0])} … {size(known[-1])} ({len(known)} sizes)"


def worst_verdict(verdicts: Iterable[Verdict]) -> str:
    """Return `fail`, else `inconclusive`, else `pass`; `inconclusive` without verdicts."""
    states = {verdict.verdict for verdict in verdicts}
    if FAIL in states:
        return FAIL
    return PASS if states == {PASS} else INCONCLUSIVE
