"""The GPUs as tables: what each does, what it does under stress, and which checks found anything wrong."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from fleet.quantities import finite, number, quantity, scale
from fleet.report.format import params_text, percent_of
from fleet.report.tables.figure import EMPTY, MANY_HOSTS, Cell, Key, Row, Table, cell, key_of, label, shown, states
from fleet.report.tables.places import scope_name
from fleet.report.titles import title
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
CHECKS = ("integrity.wrong_words", "stress.wrong_products", "digest.mismatches")
ELSEWHERE = frozenset({*STRESS[1:], THROTTLED, *CHECKS, "integrity.tested_share"})
"""Figures of single devices that these tables tell, and no strip of dots."""
_ALL = (*SPEEDS, *STRESS, THROTTLED)

Device = tuple[str, str]
"""Host and scope."""


@dataclass(frozen=True, kw_only=True)
class Check:
    """A count that must be nothing, over all devices."""

    title: str
    name: str
    looked: int
    """Counts that were made."""
    devices: int
    wrong: tuple[str, ...]
    """Where it was something, and how much."""


class _Figures:
    """The figures of single devices by device and key."""

    def __init__(self, report: FleetReport) -> None:
        self.states = states(verdict for verdict in report.verdicts if verdict.name in _ALL)
        self.seen: dict[Device, dict[Key, Observation]] = {}
        self.keys: dict[str, dict[Key, None]] = {}
        for host in report.hosts:
            for item in host.measurements:
                if item.name in _ALL:
                    self.seen.setdefault((host.name, item.scope), {})[key_of(item)] = item
                    self.keys.setdefault(item.name, {})[key_of(item)] = None

    def columns(self, names: Iterable[str]) -> list[Key]:
        """The figures there are, in the order of the names and then as the hosts told them."""
        return [key for name in names for key in self.keys.get(name, ())]

    def values(self, key: Key) -> list[float]:
        """All devices' values of one figure."""
        found = [figures[key] for figures in self.seen.values() if key in figures]
        return [value for item in found if item.status == MEASURED and (value := finite(item.value)) is not None]

    def scale(self, key: Key) -> tuple[float, str]:
        """By what to divide the figures of one name, and their unit then."""
        values = [value for other in self.keys[key[0]] for value in self.values(other)]
        unit = next(
            item.unit for figures in self.seen.values() for other, item in figures.items() if other[0] == key[0]
        )
        return scale(max(values, key=abs, default=0.0), unit)

    def cell(self, device: Device, key: Key, factor: float) -> Cell:
        """One device's figure."""
        item = self.seen.get(device, {}).get(key)
        state = self.states.get((*device, key), "")
        return cell(item, factor, state if state == FAIL else "") if item else EMPTY


def speeds(report: FleetReport) -> Table | None:
    """A row a GPU: matrix products in each precision, memory, copies from and to the host."""
    found = _Figures(report)
    columns = found.columns(SPEEDS)
    if not columns:
        return None
    scales = {key[0]: found.scale(key) for key in columns}
    groups: dict[str, int] = {}
    for key in columns:
        text = f"{title(key[0].partition('.')[0])}, {scales[key[0]][1]}"
        groups[text] = groups.get(text, 0) + 1
    return Table(
        caption="What each GPU does",
        groups=tuple(groups.items()),
        columns=tuple(label(key) for key in columns),
        rows=tuple(_rows(report, found, columns, scales)),
    )


def stress(report: FleetReport) -> Table | None:
    """A row a GPU: throughput, power, clock, temperature, and for what share of the time it was throttled and why."""
    found = _Figures(report)
    columns = found.columns(STRESS)
    if not columns:
        return None
    scales = {key[0]: found.scale(key) for key in columns}
    settings = {key[1:]: None for key in columns}
    names = tuple(
        ", ".join(text for text in (scales[key[0]][1], label(key) if len(settings) > 1 else "") if text)
        for key in columns
    )
    throttled = found.columns([THROTTLED])
    rows = _rows(report, found, columns, scales, throttled)
    what = params_text(dict(columns[0][2])) if len(settings) == 1 else ""
    return Table(
        caption=f"Matrix products on all GPUs at once{f', {what}' if what else ''}",
        groups=(),
        columns=(*names, "throttled by"),
        rows=tuple(rows),
    )


def _rows(
    report: FleetReport,
    found: _Figures,
    columns: Sequence[Key],
    scales: Mapping[str, tuple[float, str]],
    throttled: Sequence[Key] | None = None,
) -> Iterable[Row]:
    """The span over the fleet where there are many hosts, then the devices of the hosts that are told one by one."""
    if len(report.hosts) > MANY_HOSTS:
        spans: Mapping[str, Callable[[list[float]], float]] = {
            "lowest": min,
            "median": statistics.median,
            "highest": max,
        }
        for word, of in spans.items():
            cells = [_spanned(found.values(key), of, scales[key[0]][0]) for key in columns]
            more = [EMPTY] if throttled is not None else []
            yield Row(head=f"{word} of the fleet", note="", cells=(*cells, *more))
    for host in shown(report):
        for scope in _devices(host, found):
            cells = [found.cell((host.name, scope), key, scales[key[0]][0]) for key in columns]
            more = [_throttled(found, (host.name, scope), throttled)] if throttled is not None else []
            serial = next((gpu.serial for gpu in host.gpus if f"gpu={gpu.index}" == scope), "")
            yield Row(head=f"{host.name} {scope_name(scope)}", note=serial, cells=(*cells, *more))


def _spanned(values: list[float], of: Callable[[list[float]], float], factor: float) -> Cell:
    return Cell(text=number(float(of(values)) / factor)) if values else EMPTY


def _devices(host: HostReport, found: _Figures) -> list[str]:
    return [scope for name, scope in found.seen if name == host.name]


def _throttled(found: _Figures, device: Device, keys: Sequence[Key]) -> Cell:
    """`power_cap 38 %`: every reason that held for any of the time."""
    mine = found.seen.get(device, {})
    shares = {key: finite(mine[key].value) for key in keys if key in mine and mine[key].status == MEASURED}
    if not shares:
        return EMPTY
    one = len({dict(key[2]).get("dtype") for key in keys}) == 1
    without = ("dtype",) if one else ()
    held = [f"{params_text(dict(key[2]), without)} {percent_of(share)}" for key, share in shares.items() if share]
    failed = any(found.states.get((*device, key)) == FAIL for key in keys)
    return Cell(text="; ".join(held) or "nothing", css=FAIL if failed else "")


def checks(report: FleetReport) -> list[Check]:
    """Each count that must be nothing, and where it was something."""
    found = []
    for name in CHECKS:
        items = [(host, seen) for host in report.hosts for seen in host.measurements if seen.name == name]
        measured = [(host, seen) for host, seen in items if seen.status == MEASURED]
        if not items:
            continue
        wrong = [
            f"{host.name} {scope_name(seen.scope)}, {params_text(dict(key_of(seen)[2]))}: {quantity(seen.value, seen.unit)}"
            for host, seen in measured
            if seen.value != 0
        ]
        devices = len({(host.name, seen.scope) for host, seen in measured})
        what = f"{title(name.partition('.')[0])}: {name.partition('.')[2].replace('_', ' ')}"
        found.append(Check(title=what, name=name, looked=len(measured), devices=devices, wrong=tuple(wrong[:20])))
    return found
