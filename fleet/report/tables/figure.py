"""A figure as people read it: its value, how sure it is, of how many samples, and whether the time for it ran out."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from fleet.quantities import NONE, finite, number, quantity
from fleet.report.format import params_text
from schemas.catalogue import BENCHMARKS
from schemas.records import MEASURED, Observation, Samples, Value
from schemas.reports import FleetReport, HostReport, Verdict
from schemas.stages import BENCHMARK

MANY_HOSTS = 12
"""From here on tables tell the span over the hosts, and by themselves only those with findings."""
TIMED_OUT = "†"
LEGEND = "± half the 95 % interval of the median, then the number of samples; † ended by time, not by the precision asked for."

Key = tuple[str, str, tuple[tuple[str, Value], ...]]
"""Name, stage and settings of a figure."""

_OVER: Mapping[str, tuple[str, ...]] = {
    output.name: tuple(output.over) for entry in BENCHMARKS.values() for output in entry.outputs
}


@dataclass(frozen=True, kw_only=True)
class Cell:
    """A place in a table."""

    text: str
    note: str = ""
    """`±0.1 %, 40`, in smaller letters."""
    css: str = ""
    """`fail` where a criterion failed it."""

    @property
    def whole(self) -> str:
        """Both on one line."""
        return f"{self.text} ({self.note})" if self.note else self.text


@dataclass(frozen=True, kw_only=True)
class Row:
    """A line of a table."""

    head: str
    note: str
    cells: tuple[Cell, ...]


@dataclass(frozen=True, kw_only=True)
class Table:
    """A table with one or two lines of heads."""

    caption: str
    groups: tuple[tuple[str, int], ...]
    """What stands over the columns, and over how many of them."""
    columns: tuple[str, ...]
    rows: tuple[Row, ...]


EMPTY = Cell(text=NONE)


def key_of(item: Observation | Verdict) -> Key:
    """What two figures share that are the same figure of two parts: name, stage, and what the catalogue runs through."""
    names = _OVER.get(item.name)
    wanted = item.params if names is None else (*names, "numa")
    return item.name, item.stage, tuple((name, item.params[name]) for name in wanted if name in item.params)


def cell(seen: Observation, factor: float = 1.0, state: str = "") -> Cell:
    """The observation, its value divided by `factor`; a dash where it was not measured."""
    value = finite(seen.value)
    if seen.status != MEASURED:
        return Cell(text=seen.status, css="inconclusive")
    text = number(value / factor) if value is not None else quantity(seen.value, seen.unit)
    return Cell(text=text, note=sureness(seen.samples), css=state)


def sureness(samples: Samples | None) -> str:
    """`±0.1 %, 40`: precision and number of samples; empty where there are none."""
    if samples is None:
        return ""
    sure = f"±{number(samples.precision * 100, 2)} %, " if samples.precision is not None else ""
    return f"{sure}{samples.n}{TIMED_OUT if samples.stopped == 'time' else ''}"


def label(key: Key) -> str:
    """`bf16`, `host to device, alone`; with the stage where it is not the host's own."""
    text = params_text(dict(key[2])) or key[0].partition(".")[2].replace("_", " ")
    return text if key[1] == BENCHMARK else f"{text} ({key[1]})"


def shown(report: FleetReport) -> list[HostReport]:
    """The hosts that tables tell of one by one: all of a few, of many the first that have findings."""
    if len(report.hosts) <= MANY_HOSTS:
        return list(report.hosts)
    return [host for host in report.hosts if host.decision != "accepted"][:MANY_HOSTS]


def states(verdicts: Iterable[Verdict]) -> dict[tuple[str, str, Key], str]:
    """Host, scope and figure -> the verdict on it; a failure where there are several."""
    found: dict[tuple[str, str, Key], str] = {}
    for verdict in verdicts:
        place = (verdict.host, verdict.scope, key_of(verdict))
        found[place] = verdict.verdict if found.get(place) != "fail" else "fail"
    return found
