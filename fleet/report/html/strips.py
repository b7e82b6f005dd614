"""Every figure that was judged, and every figure of single devices, as a strip: where its values lie, and the limits."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from fleet.quantities import finite, quantity
from fleet.report.format import is_change
from fleet.report.html.strip import (
    ORDERED,
    SEVERE,
    Same,
    Seen,
    Strip,
    badness,
    bars_of,
    domain,
    dots_of,
    far_of,
    first_of,
    label_of,
    marks,
    percent_at,
    settings_of,
    wanted_text,
    wants,
    whole,
)
from fleet.report.tables.figure import Key, key_of
from fleet.report.tables.gpus import ELSEWHERE
from fleet.report.titles import TITLES, title
from schemas.records import MEASURED
from schemas.reports import ALL, FAIL, INCONCLUSIVE, FleetReport, Judged
from schemas.scopes import Scope

HEALTH = "Health"


@dataclass(frozen=True, kw_only=True)
class Group:
    """The figures of one benchmark, or of the health readings."""

    title: str
    strips: tuple[Strip, ...]
    others: tuple[Strip, ...]
    """Those that no criterion speaks of."""
    same: tuple[Same, ...]

    @property
    def failed(self) -> int:
        """Strips with a failure."""
        return sum(bool(strip.failed) for strip in self.strips)


@dataclass
class _Figure:
    """What is gathered of one figure."""

    unit: str
    changes: bool = False
    values: dict[tuple[str, str], Seen] = field(default_factory=dict)
    limits: dict[tuple[str, float], None] = field(default_factory=dict)
    criteria: dict[str, None] = field(default_factory=dict)
    open: int = 0


def groups(report: FleetReport) -> list[Group]:
    """Health first, then the benchmarks in their order; within each those that fail first."""
    found: dict[str, tuple[list[Strip], list[Same]]] = {}
    if report.detail == ALL:
        drawn = [(key[0], _of_values(key, figure)) for key, figure in _figures(report).items() if figure.values]
    else:
        drawn = [(rows[0].name, made) for rows in _rows(report.judged) if (made := _of_rows(rows))]
    for name, made in drawn:
        strips, same = found.setdefault(_title(name), ([], []))
        if isinstance(made, Strip):
            strips.append(made)
        else:
            same.append(made)
    return [
        Group(
            title=name,
            strips=tuple(sorted((strip for strip in strips if strip.criteria), key=lambda strip: not strip.failed)),
            others=tuple(strip for strip in strips if not strip.criteria),
            same=tuple(same),
        )
        for name, (strips, same) in sorted(found.items(), key=lambda item: _place(item[0]))
    ]


def _title(name: str) -> str:
    first = name.removeprefix("drift.").partition(".")[0]
    return title(first) if first in TITLES else HEALTH


def _place(name: str) -> int:
    return [HEALTH, *TITLES.values()].index(name)


def _figures(report: FleetReport) -> dict[Key, _Figure]:
    """By what they are: values from the verdicts, and those of single devices that nobody judged."""
    found: dict[Key, _Figure] = {}
    for verdict in report.verdicts:
        key, value, limit = key_of(verdict), finite(verdict.value), finite(verdict.limit)
        if value is None or not verdict.operator:
            if verdict.verdict == INCONCLUSIVE and key in found:
                found[key].open += 1
            continue
        figure = found.setdefault(key, _Figure(unit=verdict.unit, changes=is_change(verdict)))
        figure.criteria[verdict.criterion] = None
        if limit is not None:
            figure.limits[verdict.operator, limit] = None
        place = (verdict.host, verdict.scope)
        before = figure.values.get(place)
        if before is None or SEVERE[verdict.verdict] < SEVERE.get(before.state, 3):
            figure.values[place] = Seen(*place, value, verdict.verdict)
    for host in report.hosts:
        for seen in host.measurements:
            number = finite(seen.value)
            if (
                seen.status != MEASURED
                or number is None
                or seen.name in ELSEWHERE
                or not Scope.parse(seen.scope).is_one_device
            ):
                continue
            figure = found.setdefault(key_of(seen), _Figure(unit=seen.unit))
            figure.values.setdefault((host.name, seen.scope), Seen(host.name, seen.scope, number, "unjudged"))
    return found


def _of_values(key: Key, figure: _Figure) -> Strip | Same:
    values = list(figure.values.values())
    numbers = [value.value for value in values]
    limits = list(figure.limits)
    label, settings = label_of(key, figure.changes), settings_of(dict(key[2]), key[1])
    failed = sum(value.state == FAIL for value in values)
    if min(numbers) == max(numbers) and not failed:
        wanted = " and ".join(wanted_text(*limit, figure.unit) for limit in limits[:2])
        same = quantity(whole(numbers[0]), figure.unit)
        return Same(label=label, settings=settings, value=same, wanted=wanted, count=len(values))
    drawn = [limit for _, limit in limits][:2] if len(limits) <= 4 else [min(limit for _, limit in limits)]
    low, high = domain([*numbers, *drawn])
    dots, bars = marks(values, figure.unit, low, high)
    operators = {operator for operator, _ in limits}
    far = sorted(
        (value for value in values if value.state != "unjudged"),
        key=lambda value: (SEVERE[value.state], badness(value.value, limits)),
    )
    return Strip(
        label=label,
        settings=settings,
        count=len(values),
        failed=failed,
        open=figure.open,
        median=quantity(statistics.median(numbers), figure.unit),
        lowest=quantity(min(numbers), figure.unit),
        highest=quantity(max(numbers), figure.unit),
        wanted=wants(limits, figure.unit),
        criteria=tuple(figure.criteria),
        limits=tuple(percent_at(limit, low, high) for limit in drawn),
        below=bool(operators & {"ge", "gt"}),
        axis=(quantity(low, figure.unit, 3), quantity(high, figure.unit, 3)),
        dots=tuple(dots),
        bars=bars,
        far=tuple(far_of(value, limits, figure.unit) for value in first_of(far) if failed or operators & {*ORDERED}),
    )


def _rows(judged: Iterable[Judged]) -> list[list[Judged]]:
    """The rows of one figure, one of each criterion."""
    found: dict[tuple[object, ...], list[Judged]] = {}
    for row in judged:
        found.setdefault((row.name, row.stage, tuple(row.params.items()), row.unit), []).append(row)
    return list(found.values())


def _of_rows(rows: Sequence[Judged]) -> Strip | Same | None:
    """A strip of a large fleet, from how its values are spread."""
    spreads = [(row, row.spread) for row in rows if row.spread and row.operator]
    if not spreads:
        return None
    first, spread = max(spreads, key=lambda pair: pair[1].n)
    key: Key = (first.name, first.stage, tuple(first.params.items()))
    limits = [(row.operator, limit) for row, _ in spreads if (limit := finite(row.limit)) is not None]
    failed = max(row.failed for row in rows)
    label, settings = label_of(key, changes=False), settings_of(first.params, first.stage)
    wanted = wants(limits, first.unit)
    if spread.min == spread.max and not failed:
        same = quantity(whole(float(spread.p50)), first.unit)
        return Same(label=label, settings=settings, value=same, wanted=" and ".join(wanted), count=spread.n)
    drawn = [limit for _, limit in limits][:2]
    low, high = domain([spread.min, spread.max, *drawn])
    step = (spread.max - spread.min) / max(len(spread.bins), 1)
    spans = [
        (percent_at(spread.min + number * step, low, high), 100 * step / (high - low), count)
        for number, count in enumerate(spread.bins)
        if count
    ]
    beyond = [
        Seen(far.host, far.scope, value, far.verdict)
        for row in rows
        for far in row.farthest
        if (value := finite(far.value)) is not None
    ]
    unlike = list({(one.host, one.scope): one for one in beyond}.values())
    failing = [one for one in unlike if one.state == FAIL]
    unlike.sort(key=lambda one: (SEVERE.get(one.state, 3), badness(one.value, limits)))
    return Strip(
        label=label,
        settings=settings,
        count=spread.n,
        failed=failed,
        open=max(row.inconclusive for row in rows),
        median=quantity(spread.p50, first.unit),
        lowest=quantity(spread.min, first.unit),
        highest=quantity(spread.max, first.unit),
        wanted=wanted,
        criteria=tuple(row.criterion for row in rows),
        limits=tuple(percent_at(limit, low, high) for limit in drawn),
        below=any(operator in ("ge", "gt") for operator, _ in limits),
        axis=(quantity(low, first.unit, 3), quantity(high, first.unit, 3)),
        dots=tuple(dots_of(failing, first.unit, low, high)),
        bars=bars_of(spans),
        far=tuple(far_of(one, limits, first.unit) for one in first_of(unlike)),
    )
