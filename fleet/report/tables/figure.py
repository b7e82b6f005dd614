"""Build table cells from figures: the value, its precision, the number of samples, and a mark if sampling hit the time limit."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from fleet.quantities import NONE, finite, number, quantity
from fleet.report.formatting import params_text
from fleet.scope_text import describe_scope
from schemas.catalogue import BENCHMARKS
from schemas.records import MEASURED, Observation, Samples, Value
from schemas.reports import ACCEPTED, FAIL, FleetReport, HostReport, Verdict
from schemas.scopes import Scope
from schemas.stages import BENCHMARK

MANY_HOSTS = 12
"""Maximum number of hosts that tables list one by one. For a larger fleet, tables show the range over the fleet, and list at most
this number of the hosts that are not accepted."""
TIMED_OUT = "†"
LEGEND = (
    "± half the 95 % confidence interval of the median, then the number of samples; "
    "† the measurement stopped at the time limit before it reached the requested precision."
)

_OUTPUT_PARAMS: Mapping[str, tuple[str, ...]] = {
    output.name: tuple(output.over) for entry in BENCHMARKS.values() for output in entry.outputs
}
"""Name of a figure in the catalogue of benchmarks -> the parameters that the benchmark varies to measure it (`Output.over`)."""


class FigureKey(NamedTuple):
    """Name, stage and settings: equal for the values of the same figure on different parts."""

    name: str
    stage: str
    settings: tuple[tuple[str, Value], ...]

    @property
    def params(self) -> dict[str, Value]:
        """Return the settings as parameters of an observation."""
        return dict(self.settings)

    @property
    def benchmark(self) -> str:
        """Return the first part of the name."""
        return self.name.partition(".")[0]

    @property
    def label(self) -> str:
        """Return the settings in words, such as `host to device, alone`; without settings, the name after its first part.

        Append the stage if it is not `benchmark`.
        """
        text = params_text(self.params) or self.name.partition(".")[2].replace("_", " ")
        return text if self.stage == BENCHMARK else f"{text} ({self.stage})"


class RankGroup(NamedTuple):
    """The ranks that reported a figure: those of one host, or of a gang (the hosts of one multi-node launch).

    All hosts of a gang report the same figure, so `host` is empty for a gang.
    """

    host: str
    scope: str
    stage: str
    world_size: str = ""
    """Number of ranks of a gang; empty for one host. If a gang is launched again without some hosts, the number is lower."""

    @property
    def kind(self) -> str:
        """Return `host` for the ranks of one host, `gang` for those of several."""
        return "host" if self.host else "gang"

    def label(self, hosts: int = 0) -> str:
        """Return the name of the host or gang.

        The stage follows the name of a host, unless it is `benchmark`. `hosts` follows the name of a gang, unless it is 0.
        """
        if self.host:
            return self.host if self.stage == BENCHMARK else f"{self.host}, {self.stage}"
        count = f" ({hosts} host{'s' if hosts != 1 else ''})" if hosts else ""
        return f"{describe_scope(self.scope)}{count}"


@dataclass(frozen=True, kw_only=True)
class TableCell:
    """One cell of a table."""

    text: str
    note: str = ""
    """Text in smaller letters, such as the `precision_text` `±0.1 %, 40`."""
    css: str = ""
    """CSS class: `fail` if the value fails a criterion, `inconclusive` if there is no value, `heat1` and so on in matrices."""

    @property
    def whole(self) -> str:
        """Return text and note on one line."""
        return f"{self.text} ({self.note})" if self.note else self.text


@dataclass(frozen=True, kw_only=True)
class TableRow:
    """One row of a table."""

    head: str
    note: str
    cells: tuple[TableCell, ...]


@dataclass(frozen=True, kw_only=True)
class Table:
    """A table with one or two header lines."""

    caption: str
    groups: tuple[tuple[str, int], ...]
    """Headings above the columns, each with the number of columns it spans."""
    columns: tuple[str, ...]
    rows: tuple[TableRow, ...]


EMPTY = TableCell(text=NONE)


def figure_key(item: Observation | Verdict) -> FigureKey:
    """Return name, stage, and the parameters that distinguish figures of this name: those in _OUTPUT_PARAMS, and `numa`.

    If the name is not in the catalogue, return all parameters.
    """
    names = _OUTPUT_PARAMS.get(item.name)
    varied = item.params if names is None else (*names, "numa")
    return FigureKey(item.name, item.stage, tuple((name, item.params[name]) for name in varied if name in item.params))


def rank_group(host: str, item: Observation | Verdict) -> RankGroup:
    """Return the ranks that `item` of `host` is about: those of its gang if the scope is a gang, else those of the host."""
    if Scope.parse(item.scope).is_gang:
        return RankGroup("", item.scope, item.stage, str(item.params.get("world_size", "")))
    return RankGroup(host, item.scope, item.stage)


def serial_of(host: HostReport, scope: str) -> str:
    """Return the serial of the GPU `gpu=N` of a host; empty if the host has no such GPU."""
    return next((gpu.serial for gpu in host.gpus if f"gpu={gpu.index}" == scope), "")


def value_cell(observation: Observation, factor: float, state: str) -> TableCell:
    """Return the observation's value divided by `factor`, or its status if it was not measured."""
    value = finite(observation.value)
    if observation.status != MEASURED:
        return TableCell(text=observation.status, css="inconclusive")
    text = number(value / factor) if value is not None else quantity(observation.value, observation.unit)
    return TableCell(text=text, note=precision_text(observation.samples), css=state)


def precision_text(samples: Samples | None) -> str:
    """Return `±0.1 %, 40`: half the 95 % confidence interval of the median, and the number of samples; empty without samples."""
    if samples is None:
        return ""
    precision = f"±{number(samples.precision * 100, 2)} %, " if samples.precision is not None else ""
    return f"{precision}{samples.n}{TIMED_OUT if samples.stopped == 'time' else ''}"


def detailed_hosts(report: FleetReport) -> list[HostReport]:
    """Return the hosts that tables list one by one: all of a small fleet, else the first that are not accepted."""
    if len(report.hosts) <= MANY_HOSTS:
        return list(report.hosts)
    return [host for host in report.hosts if host.decision != ACCEPTED][:MANY_HOSTS]


def failing_figures(verdicts: Iterable[Verdict]) -> set[tuple[str, str, FigureKey]]:
    """Return (host, scope, figure) of each verdict that fails."""
    return {(verdict.host, verdict.scope, figure_key(verdict)) for verdict in verdicts if verdict.verdict == FAIL}
