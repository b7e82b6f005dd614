"""Build the tables of GPUs: performance, performance under stress, and error counters."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from fleet.quantities import counted, finite, number, quantity, scale
from fleet.report.formatting import params_text, percent
from fleet.report.tables import former_runs
from fleet.report.tables.figure import (
    EMPTY,
    MANY_HOSTS,
    FigureKey,
    Table,
    TableCell,
    TableRow,
    detailed_hosts,
    failing_figures,
    figure_key,
    serial_of,
    value_cell,
)
from fleet.report.titles import benchmark_title
from fleet.scope_text import describe_scope
from schemas.records import MEASURED, Observation
from schemas.reports import FAIL, FleetReport, HostReport

SPEEDS = ("gemm.throughput", "memory.bandwidth", "host_copy.bandwidth")
STRESS = (
    "stress.throughput",
    "stress.power",
    "stress.efficiency",
    "stress.flop_per_cycle",
    "stress.clock",
    "stress.temperature",
)
THROTTLED = "stress.throttled_share"
COUNTERS = ("integrity.wrong_words", "stress.wrong_products", "digest.mismatches")
IN_OTHER_TABLES = frozenset({*STRESS[1:], THROTTLED, *COUNTERS, "integrity.tested_share"})
"""Figures that the table of `devices.py` omits. They have a strip plot only if a criterion judges them."""
_ALL = (*SPEEDS, *STRESS, THROTTLED)
_MAX_ERRORS = 20

Device = tuple[str, str]
"""Host and scope."""


@dataclass(frozen=True, kw_only=True)
class ErrorCounter:
    """A counter of errors that must be zero, summarized over all devices."""

    title: str
    name: str
    readings: int
    devices: int
    not_checked: int
    """Number of devices on which at least one reading of the counter is missing."""
    errors: tuple[str, ...]
    """Host, part and value of at most _MAX_ERRORS readings that are not zero; then `and 3 more`."""

    @property
    def gap(self) -> str:
        """Return `not checked on 2 devices`; empty if no reading is missing."""
        return f"not checked on {counted(self.not_checked, 'device')}" if self.not_checked else ""


class _Figures:
    """The figures for these tables, by device and key, and which of them fail."""

    def __init__(self, report: FleetReport) -> None:
        self._places = former_runs.places(report)
        self.failing = failing_figures(verdict for verdict in report.verdicts if verdict.name in _ALL)
        self.by_device: dict[Device, dict[FigureKey, Observation]] = {}
        self._keys: dict[str, dict[FigureKey, None]] = {}
        for host in report.hosts:
            for observation in host.measurements:
                if observation.name in _ALL:
                    key = figure_key(observation)
                    self.by_device.setdefault((host.name, observation.scope), {})[key] = observation
                    self._keys.setdefault(observation.name, {})[key] = None

    def columns(self, names: Iterable[str]) -> list[FigureKey]:
        """Return the keys of the figures that were reported, in the order of `names`, and for each name in record order."""
        return [key for name in names for key in self._keys.get(name, ())]

    def values(self, key: FigureKey) -> list[float]:
        """Return the measured values of one figure on all devices."""
        items = [figures[key] for figures in self.by_device.values() if key in figures]
        return [value for item in items if item.status == MEASURED and (value := finite(item.value)) is not None]

    def scale(self, name: str) -> tuple[float, str]:
        """Return the divisor for the values of all figures with this name, and their unit after the division."""
        values = [value for key in self._keys[name] for value in self.values(key)]
        unit = next(
            item.unit for figures in self.by_device.values() for key, item in figures.items() if key.name == name
        )
        return scale(max(values, key=abs, default=0.0), unit)

    def cell(self, device: Device, key: FigureKey, factor: float) -> TableCell:
        """Return one device's figure as a cell, with the percentile of its value among the accepted parts of former runs."""
        item = self.by_device.get(device, {}).get(key)
        if item is None:
            return EMPTY
        cell = value_cell(item, factor, FAIL if (*device, key) in self.failing else "")
        place = self._places.get(former_runs.key_of(device[0], item), "") if item.status == MEASURED else ""
        return replace(cell, note=", ".join(filter(None, (cell.note, place))))


def speeds(report: FleetReport) -> Table | None:
    """Return a table with a row per GPU: throughput of matrix products in each precision, memory bandwidth, host copies."""
    figures = _Figures(report)
    columns = figures.columns(SPEEDS)
    if not columns:
        return None
    scales = {key.name: figures.scale(key.name) for key in columns}
    groups: dict[str, int] = {}
    for key in columns:
        text = f"{benchmark_title(key.benchmark)}, {scales[key.name][1]}"
        groups[text] = groups.get(text, 0) + 1
    return Table(
        caption="Performance of each GPU",
        groups=tuple(groups.items()),
        columns=tuple(key.label for key in columns),
        rows=tuple(_rows(report, figures, columns, scales)),
    )


def stress(report: FleetReport) -> Table | None:
    """Return a table with a row per GPU: the reported figures of STRESS, and the share of time of each throttle reason."""
    figures = _Figures(report)
    columns = figures.columns(STRESS)
    if not columns:
        return None
    scales = {key.name: figures.scale(key.name) for key in columns}
    settings = {(key.stage, key.settings) for key in columns}
    names = tuple(
        ", ".join(text for text in (scales[key.name][1], key.label if len(settings) > 1 else "") if text)
        for key in columns
    )
    rows = _rows(report, figures, columns, scales, figures.columns([THROTTLED]))
    params = params_text(columns[0].params) if len(settings) == 1 else ""
    return Table(
        caption=f"Matrix products on all GPUs at once{f', {params}' if params else ''}",
        groups=(),
        columns=(*names, "throttled by"),
        rows=tuple(rows),
    )


def _rows(
    report: FleetReport,
    figures: _Figures,
    columns: Sequence[FigureKey],
    scales: Mapping[str, tuple[float, str]],
    throttled: Sequence[FigureKey] | None = None,
) -> Iterable[TableRow]:
    """Yield a row per device of `detailed_hosts`; before them, for a large fleet, rows with lowest, median and highest value."""
    if len(report.hosts) > MANY_HOSTS:
        statistic: Callable[[list[float]], float]
        for word, statistic in (("lowest", min), ("median", statistics.median), ("highest", max)):
            cells = [_fleet_cell(figures.values(key), statistic, scales[key.name][0]) for key in columns]
            more = [EMPTY] if throttled is not None else []
            yield TableRow(head=f"{word} of the fleet", note="", cells=(*cells, *more))
    for host in detailed_hosts(report):
        for scope in _devices(host, figures):
            cells = [figures.cell((host.name, scope), key, scales[key.name][0]) for key in columns]
            more = [_throttled_cell(figures, (host.name, scope), throttled)] if throttled is not None else []
            head = f"{host.name} {describe_scope(scope)}"
            yield TableRow(head=head, note=serial_of(host, scope), cells=(*cells, *more))


def _fleet_cell(values: list[float], statistic: Callable[[list[float]], float], factor: float) -> TableCell:
    return TableCell(text=number(float(statistic(values)) / factor)) if values else EMPTY


def _devices(host: HostReport, figures: _Figures) -> list[str]:
    return [scope for name, scope in figures.by_device if name == host.name]


def _throttled_cell(figures: _Figures, device: Device, keys: Sequence[FigureKey]) -> TableCell:
    """Return each throttle reason that was active, with its share of the time (`power cap 38 %`).

    A reason whose share was not measured is listed with the status of the observation (`power cap error`).
    """
    items = {key: item for key, item in figures.by_device.get(device, {}).items() if key in keys}
    if not items:
        return EMPTY
    one_dtype = len({key.params.get("dtype") for key in keys}) == 1
    left_out = ("dtype",) if one_dtype else ()
    shares = {key: finite(item.value) for key, item in items.items() if item.status == MEASURED}
    texts = [f"{params_text(key.params, left_out)} {percent(share)}" for key, share in shares.items() if share]
    texts += [f"{params_text(key.params, left_out)} {item.status}" for key, item in items.items() if key not in shares]
    failed = any((*device, key) in figures.failing for key in keys)
    css = FAIL if failed else "inconclusive" if len(shares) < len(items) else ""
    return TableCell(text="; ".join(texts) or "nothing", css=css)


def error_counters(report: FleetReport) -> list[ErrorCounter]:
    """Return the counters in COUNTERS that were reported, each with its readings that are not zero."""
    counters = []
    for name in COUNTERS:
        items = [(host, item) for host in report.hosts for item in host.measurements if item.name == name]
        if not items:
            continue
        measured = [(host, item) for host, item in items if item.status == MEASURED]
        errors = [
            f"{host.name} {describe_scope(item.scope)}, {params_text(figure_key(item).params)}: "
            f"{quantity(item.value, item.unit)}"
            for host, item in measured
            if item.value != 0
        ]
        benchmark, _, what = name.partition(".")
        more = [f"and {len(errors) - _MAX_ERRORS} more"] if len(errors) > _MAX_ERRORS else []
        counters.append(
            ErrorCounter(
                title=f"{benchmark_title(benchmark)}: {what.replace('_', ' ')}",
                name=name,
                readings=len(measured),
                devices=len({(host.name, item.scope) for host, item in measured}),
                not_checked=len({(host.name, item.scope) for host, item in items if item.status != MEASURED}),
                errors=(*errors[:_MAX_ERRORS], *more),
            )
        )
    return counters
