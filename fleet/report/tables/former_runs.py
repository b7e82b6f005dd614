"""Format the comparison of a report with former runs: percentiles of figures, earlier values, and causes seen before."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from fleet.judge.baseline import comparison_key
from fleet.quantities import quantity
from fleet.report.charts.spark import WIDTH, Axes, path
from fleet.report.formatting import params_text
from fleet.scope_text import describe_scope
from schemas.baselines import Key
from schemas.records import Observation
from schemas.reports import FigureHistory, FleetReport, PartHistory, SeenBefore

LEGEND = (
    "Percentile 42 of 310: former runs accepted 310 parts with the same model, driver, stage and settings, and 42 % of these "
    "parts have a lower value. A part with an equal value counts as half a part."
)
_MAX_RUN_NAME = 100


@dataclass(frozen=True, kw_only=True)
class FormerRow:
    """One figure of one part, compared with former runs."""

    name: str
    settings: str
    part: str
    place: str
    """`percentile 42 of 310 accepted H200`; empty without a percentile."""
    trend: str
    """`704 TFLOP/s to 712 TFLOP/s over 5 runs`: the oldest value, that of this run, and the number of runs including this one;
    empty without values in former runs."""
    line: str
    """SVG path of the sparkline through these values; empty without values in former runs."""


def places(report: FleetReport) -> Mapping[tuple[str, str, Key], str]:
    """Return (host, scope, comparison key) -> `percentile 42 of 310`, for each figure that has a percentile."""
    figures = report.history.figures if report.history else ()
    return {
        (part.host, part.part, _key(figure)): _place(figure, part)
        for figure in figures
        for part in figure.parts
        if part.percentile is not None
    }


def has_trends(report: FleetReport) -> bool:
    """Return whether any part has values in former runs."""
    return any(part.values for figure in (report.history.figures if report.history else ()) for part in figure.parts)


def key_of(host: str, item: Observation) -> tuple[str, str, Key]:
    """Return the key of an observation in `places`."""
    return host, item.scope, comparison_key(item, "")


def _key(figure: FigureHistory) -> Key:
    return figure.name, figure.stage, "", tuple(sorted(figure.params.items()))


def _place(figure: FigureHistory, part: PartHistory) -> str:
    return f"percentile {round(part.percentile or 0.0)} of {figure.accepted}"


def rows_by_host(report: FleetReport) -> Mapping[str, Sequence[FormerRow]]:
    """Return host -> a row for each figure of the host and of its GPUs that was compared with former runs."""
    rows: dict[str, list[FormerRow]] = {}
    for figure in report.history.figures if report.history else ():
        settings = ", ".join(filter(None, (params_text(figure.params), figure.stage and f"stage {figure.stage}")))
        for part in figure.parts:
            rows.setdefault(part.host, []).append(_row(figure, part, settings))
    return rows


def _row(figure: FigureHistory, part: PartHistory, settings: str) -> FormerRow:
    is_host = part.part == "host"
    peers = "hosts" if is_host else figure.model.removeprefix("NVIDIA ") or "GPUs"
    return FormerRow(
        name=figure.name,
        settings=settings,
        part="host" if is_host else describe_scope(part.part),
        place=f"{_place(figure, part)} accepted {peers}" if part.percentile is not None else "",
        trend=_trend(figure, part),
        line=_line(part.values) if part.values else "",
    )


def _trend(figure: FigureHistory, part: PartHistory) -> str:
    if not part.values:
        return ""
    first, *_, last = part.values
    return f"{quantity(first, figure.unit)} to {quantity(last, figure.unit)} over {len(part.values)} runs"


def _line(values: tuple[float, ...]) -> str:
    """Return the SVG path of the sparkline: one point per run, at equal horizontal distances."""
    axes = Axes(bucket_s=1.0, ends_s=len(values) - 1, low=min(values), high=max(values))
    return path([(min(WIDTH, axes.x(number)), axes.y(value)) for number, value in enumerate(values)])


def seen_before(report: FleetReport) -> Mapping[int, str]:
    """Return when each cause was seen in former runs, for example `3 times, last on 2026-02-01 in r2`.

    The key is the position, in `report.verdicts`, of the cause's first verdict. Causes that were never seen have no entry.
    """
    causes = report.causes
    items = report.history.causes if report.history else ()
    return {
        causes[item.cause].verdicts[0]: _sentence(item, len(causes[item.cause].parts))
        for item in items
        if item.cause < len(causes)
    }


def _sentence(item: SeenBefore, parts: int) -> str:
    which = f" on {item.parts} of these {parts} parts" if parts > 1 else ""
    times = "once" if item.runs == 1 else f"{item.runs} times"
    return f"{times}{which}, {'' if item.runs == 1 else 'last '}on {item.last} in {item.run[:_MAX_RUN_NAME]}"
