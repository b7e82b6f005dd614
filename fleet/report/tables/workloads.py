"""What the larger workloads did: one line a figure, a column a host or a gang, or the span where there are many."""

from __future__ import annotations

import statistics
from collections.abc import Sequence, Set

from fleet.quantities import finite, quantity
from fleet.report.format import params_text
from fleet.report.tables.figure import EMPTY, Cell, Key, Row, Table, key_of, states, sureness
from fleet.report.tables.places import scope_name
from fleet.report.titles import title
from schemas.records import MEASURED, Observation
from schemas.reports import FAIL, FleetReport
from schemas.scopes import Scope

NAMES = ("fashion_mnist", "variants", "checkpoint", "model_parallel", "transformer", "overlap")
_PREFIXES = tuple(f"{name}." for name in NAMES)
_FEW = 4
"""So many hosts and gangs have a column each."""

Place = tuple[str, str, str]
"""Host (empty for a gang), stage and scope."""


def workloads(report: FleetReport) -> Table | None:
    """Every figure of the workloads that hosts or gangs told as a whole."""
    found: dict[tuple[str, Key], dict[Place, Observation]] = {}
    places: dict[Place, None] = {}
    for host in report.hosts:
        for seen in host.measurements:
            if seen.name.startswith(_PREFIXES) and Scope.parse(seen.scope).device_kind not in ("gpu", "cpu"):
                gang = Scope.parse(seen.scope).is_gang
                place = ("" if gang else host.name, seen.stage, seen.scope)
                places[place] = None
                name, _, settings = key_of(seen)
                found.setdefault(("gang" if gang else "host", (name, "", settings)), {})[place] = seen
    if not found:
        return None
    failed = {
        ("" if Scope.parse(scope).is_gang else host, key[1], scope, key[0], key[2])
        for (host, scope, key), state in states(report.verdicts).items()
        if state == FAIL
    }
    few = len(places) <= _FEW
    return Table(
        caption="Workloads",
        groups=(),
        columns=tuple(_name(place) for place in places) if few else ("lowest", "median", "highest", "told by"),
        rows=tuple(
            _row(kind, key, found[(kind, key)], list(places) if few else None, failed)
            for kind, key in sorted(found, key=lambda item: _order(*item))
        ),
    )


def _order(kind: str, key: Key) -> tuple[int, bool]:
    return NAMES.index(key[0].partition(".")[0]), kind == "gang"


def _name(place: Place) -> str:
    host, stage, scope = place
    return scope_name(scope) if not host else host if stage == "benchmark" else f"{host}, {stage}"


def _row(
    kind: str,
    key: Key,
    seen: dict[Place, Observation],
    places: Sequence[Place] | None,
    failed: Set[tuple[object, ...]],
) -> Row:
    benchmark, _, figure = key[0].partition(".")
    what = ", ".join(text for text in (figure.replace("_", " "), params_text(dict(key[2]))) if text)
    if places is None:
        what += " (between hosts)" if kind == "gang" else ""
        return Row(head=title(benchmark), note=what, cells=_span(list(seen.values())))
    cells = tuple(
        _cell(seen[place], (*place, key[0], key[2]) in failed) if place in seen else EMPTY for place in places
    )
    return Row(head=title(benchmark), note=what, cells=cells)


def _cell(seen: Observation, failed: bool) -> Cell:
    if seen.status != MEASURED:
        return Cell(text=f"{seen.status}: {seen.reason}", css="inconclusive")
    return Cell(text=_text(seen, finite(seen.value)), note=sureness(seen.samples), css=FAIL if failed else "")


def _text(seen: Observation, value: float | None) -> str:
    if value is not None and seen.name.endswith((".accuracy", ".mfu", ".hidden_share")):
        return f"{value * 100:.1f} %"
    return quantity(seen.value if value is None else value, seen.unit)


def _span(seen: Sequence[Observation]) -> tuple[Cell, ...]:
    """Lowest, median, highest, and how many told it; of what is no number how many said what."""
    measured = [item for item in seen if item.status == MEASURED]
    values = [value for item in measured if (value := finite(item.value)) is not None]
    told = Cell(text=f"{len(measured)} of {len(seen)}", css="" if len(measured) == len(seen) else "inconclusive")
    if not values:
        words = sorted({quantity(item.value, item.unit) for item in measured})
        return (Cell(text=" and ".join(words)), EMPTY, EMPTY, told) if words else (EMPTY, EMPTY, EMPTY, told)
    three = (min(values), statistics.median(values), max(values))
    return (*(Cell(text=_text(measured[0], value)) for value in three), told)
