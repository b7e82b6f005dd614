"""Verdicts as rows of a table: what says the same is said once."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from fleet.quantities import NONE, finite, number, quantity, scale, size
from fleet.report.format import found_and_wanted, is_change, margin, params_text, percent, wanted
from fleet.report.tables.places import scopes_name
from schemas.records import Value
from schemas.reports import FAIL, INCONCLUSIVE, PASS, Verdict
from schemas.scopes import Scope

_MANY_VALUES = 16
_ALL = object()


@dataclass(frozen=True, kw_only=True)
class Row:
    """One or more verdicts that differ only in their place, or only in the size of a message."""

    name: str
    params: str
    scope: str
    stage: str
    found: str
    wanted: str
    margin: str
    verdict: str
    criterion: str
    origin: str
    """What kind of number the limit is, and where it comes from."""
    reason: str
    detail: str
    count: int


def fold(verdicts: Iterable[Verdict]) -> list[Row]:
    """Every verdict as a row, failures first; rows that say the same of several parts or sizes are one."""
    verdicts = list(verdicts)
    names: dict[tuple[str, str], set[str]] = {}
    for verdict in verdicts:
        names.setdefault((verdict.criterion, verdict.stage), set()).add(verdict.name)
    groups: dict[tuple[object, ...], list[Verdict]] = {}
    for verdict in verdicts:
        if _is_one_of_many(verdict, names[(verdict.criterion, verdict.stage)]):
            groups.setdefault((_ALL, verdict.criterion, verdict.stage, _family(verdict.name)), []).append(verdict)
            continue
        why = "" if verdict.verdict == PASS else (verdict.value, verdict.reason)
        # What is exactly as it must be says the same whatever its settings: it is told once for all of them.
        exact = verdict.verdict == PASS and verdict.operator == "eq"
        plain = tuple((key, value) for key, value in verdict.params.items() if key not in ("size_bytes", "phase"))
        key = (
            *(verdict.verdict, _family(verdict.name) if exact else verdict.name, verdict.criterion, verdict.stage),
            *(verdict.operator, verdict.limit, () if exact else plain, verdict.source, verdict.basis),
            *(_tail(verdict.scope), why),
        )
        groups.setdefault(key, []).append(verdict)
    rows = [row for key, group in groups.items() for row in _rows(group, one=key[0] is _ALL)]
    return sorted(rows, key=lambda row: (row.verdict != FAIL, row.verdict != INCONCLUSIVE))


def _is_one_of_many(verdict: Verdict, names: Collection[str]) -> bool:
    """A floor that holds for every operation of a collective is told once, where it holds: which is fast is told elsewhere."""
    return verdict.verdict == PASS and verdict.operator in ("ge", "gt") and len(set(map(_family, names))) < len(names)


def _family(name: str) -> str:
    """`collective.*.busbw` for the bus bandwidth of any operation, else the name itself."""
    parts = name.split(".")
    return ".".join([parts[0], "*", *parts[2:]]) if len(parts) > 2 and parts[0] == "collective" else name


def _tail(scope: str) -> str:
    """What rows are told apart by, beside the device: a link, a reason. Of pairs of GPUs there are too many."""
    parsed = Scope.parse(scope)
    return "" if parsed.kind == "peer" else parsed.below


def _rows(group: Sequence[Verdict], one: bool) -> list[Row]:
    """One row where only one thing differs within the group, or the values are all the same; else one a verdict."""
    scopes = list(dict.fromkeys(verdict.scope for verdict in group))
    if one:
        return [_row(group, scopes, alike=False)]
    sizes = list(dict.fromkeys(verdict.params.get("size_bytes") for verdict in group))
    alike = all(_same(verdict.value, group[0].value) for verdict in group)
    # Passes that are alike say the same of any settings; of a failure every place must be told as it is.
    full = len(group) == len(scopes) * len(sizes) or (alike and group[0].verdict == PASS)
    if len(group) == 1 or (full and (alike or len(sizes) == 1)):
        return [_row(group, scopes, alike)]
    return [_row([verdict], [verdict.scope], alike=True) for verdict in group]


def _same(first: Value, second: Value) -> bool:
    return type(first) is type(second) and first == second


def _row(group: Sequence[Verdict], scopes: Sequence[str], alike: bool) -> Row:
    first = group[0]
    found, limit = found_and_wanted(first)
    margins = [share for verdict in group if (share := margin(verdict)) is not None]
    names = {verdict.name for verdict in group}
    return Row(
        name=first.name if len(names) == 1 else _family(first.name),
        params=_settings(group),
        scope=scopes_name(scopes),
        stage=first.stage,
        found=found if alike else _values(group),
        wanted=limit if alike else _wanted(group),
        margin=percent(min(margins)) if margins else NONE,
        verdict=first.verdict,
        criterion=first.criterion,
        origin=": ".join(text for text in (first.basis, first.source.removeprefix(f"{first.basis}, ")) if text),
        reason=first.reason,
        detail=first.detail if alike or len(group) == 1 else "",
        count=len(group),
    )


def _settings(group: Sequence[Verdict]) -> str:
    """The parameters that all share, how many values the others have, and the sizes from smallest to largest."""
    found: dict[str, dict[Value, None]] = {}
    for verdict in group:
        for key, value in verdict.params.items():
            found.setdefault(key, {})[value] = None
    texts = []
    for key, values in found.items():
        if key not in ("phase", "size_bytes"):
            one = len(values) == 1 and all(key in verdict.params for verdict in group)
            texts.append(params_text({key: next(iter(values))}) if one else f"{len(values)} {key.replace('_', ' ')}s")
    return ", ".join(text for text in (*texts, _sizes(list(found.get("size_bytes", ())))) if text)


def _values(group: Sequence[Verdict]) -> str:
    """The values of a group in the order of its scopes, under one unit where they are numbers."""
    values = [verdict.value for verdict in group]
    changed = "changed by " if is_change(group[0]) else ""
    numbers = [known for value in values if (known := finite(value)) is not None]
    if len(numbers) < len(values):
        return changed + " · ".join(quantity(value, group[0].unit) for value in values[:_MANY_VALUES])
    factor, unit = scale(max(numbers, key=abs), group[0].unit)
    if len(numbers) > _MANY_VALUES:
        return f"{changed}{number(min(numbers) / factor)} … {number(max(numbers) / factor)} {unit}".rstrip()
    return f"{changed}{' · '.join(number(value / factor) for value in numbers)} {unit}".rstrip()


def _wanted(group: Sequence[Verdict]) -> str:
    """What was wanted of a group, from the lowest to the highest where the fleet's medians differ."""
    limits = sorted({known for verdict in group if (known := finite(verdict.limit)) is not None})
    if len(limits) < 2:
        return wanted(group[0])
    factor, unit = scale(limits[-1], group[0].unit)
    return f"≥ {number(limits[0] / factor)} … {number(limits[-1] / factor)} {unit}".rstrip()


def _sizes(sizes: Sequence[Value]) -> str:
    known = [value for value in sizes if value is not None]
    if len(known) < 3:
        return ", ".join(size(value) for value in known)
    return f"{size(known[0])} … {size(known[-1])} ({len(known)} sizes)"


def worst(verdicts: Iterable[Verdict]) -> str:
    """`fail`, else `inconclusive`, else `pass`; `inconclusive` where there is no verdict at all."""
    found = {verdict.verdict for verdict in verdicts}
    if FAIL in found:
        return FAIL
    return PASS if found == {PASS} else INCONCLUSIVE
