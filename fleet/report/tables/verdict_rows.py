"""Merge verdicts into table rows.

Similar verdicts share a row, although their parts, message sizes, collective operations or settings differ.
"""

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
"""First element of the key (`_group_key`) of a group that always becomes one row (`_is_one_of_several_operations`)."""


@dataclass(frozen=True, kw_only=True)
class VerdictRow:
    """One or more verdicts of one criterion, stage and result.

    The verdicts in a row may differ in:

    - part and message size
    - value, if they pass
    - collective operation and settings, if they pass the operator `eq`
    - collective operation, settings and limit, if they pass a minimum for several collective operations
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
    """What the limit is based on (`Criterion.basis`), and its source: `measured: 4x H200 SXM`."""
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
    """Return whether the verdict passes a minimum for several collective operations.

    `names`: all figures that the criterion judges in this stage. The names of a family differ only in the operation.
    """
    return verdict.verdict == PASS and verdict.operator in ("ge", "gt") and len(set(map(_family, names))) < len(names)


def _family(name: str) -> str:
    """Return the name with `*` for the collective operation: `collective.*.busbw` for `collective.all_reduce.busbw`.

    A name of any other figure is returned unchanged.
    """
    parts = name.split(".")
    return ".".join([parts[0], "*", *parts[2:]]) if len(parts) > 2 and parts[0] == "collective" else name


def _scope_suffix(scope: str) -> str:
    """Return the labels of the scope after the device, such as a link or a reason; empty for a pair of GPUs.

    So verdicts on different pairs can share a row.
    """
    parsed = Scope.parse(scope)
    return "" if parsed.kind == "peer" else parsed.below


def _rows(group: Sequence[Verdict], merge: bool) -> list[VerdictRow]:
    """Return one row for the group; or one row per verdict, if one row would not show to which part and size a value belongs.

    With `merge`, the result is always one row, with all values or their range. Without `merge`, it is one row in these cases:

    - All verdicts pass, and all values are equal.
    - Every part has one verdict for every message size, and all values are equal.
    - Every part has one verdict, and there is only one message size.
    - There is only one verdict.
    """
    scopes = list(dict.fromkeys(verdict.scope for verdict in group))
    if merge:
        return [_row(group, scopes, equal=False)]
    sizes = list(dict.fromkeys(verdict.params.get("size_bytes") for verdict in group))
    equal = all(_is_same(verdict.value, group[0].value) for verdict in group)
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
    """Return the parameters of a group as text: `bf16, 2 placements, 8 B … 8 GiB (31 sizes)`.

    If a parameter has one value in the whole group, this value is given, otherwise the number of its values. `phase` is left out.
    """
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
    """Return the values of a group, in the order of its verdicts. Numbers have the same unit.

    Of more than _MAX_VALUES numbers, return the lowest and the highest. If any value is not a number, return at most the first
    _MAX_VALUES values.
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
    """Return the limit of a group; if its limits differ, the lowest and the highest."""
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
    """Return `fail` if any verdict is `fail`; `pass` if all are `pass`; otherwise, and without verdicts, `inconclusive`."""
    states = {verdict.verdict for verdict in verdicts}
    if FAIL in states:
        return FAIL
    return PASS if states == {PASS} else INCONCLUSIVE
