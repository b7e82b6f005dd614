"""Build the data from which the script of report.html draws a page for each network adapter.

An adapter has a page only if report.html has a page of its host. A page has all readings of the adapter, its ports, its optical
modules and its PCI device, with the verdicts on them. It shows the optical power of each lane beside the limits of the module. It
also has the figures of the benchmark `verbs` (RDMA between ports).
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from fleet.diagnosis.words import label
from fleet.quantities import NONE, PER_HOUR, finite, quantity
from fleet.report.formatting import params_text, value_and_limit
from fleet.report.html.text_table import TextTable, as_json
from fleet.report.tables.verdict_rows import worst_verdict
from fleet.scope_text import describe_scope, describe_scopes
from schemas.readings import READINGS
from schemas.records import MEASURED, Observation, Value
from schemas.reports import (
    ALL,
    FAIL,
    INCONCLUSIVE,
    PASS,
    Adapter,
    AdapterReading,
    Cause,
    FleetReport,
    HostReport,
    Verdict,
)
from schemas.scopes import Scope

STATES = {PASS: "p", FAIL: "f", INCONCLUSIVE: "i"}
POWERS = ("optics.rx_power", "optics.tx_power")
LIMITS = ("alarm_low", "warning_low", "warning_high", "alarm_high")
_VERBS = "verbs."
_PORT_PARAMS = ("rail", "gid_index", "gid_type", "numa_node", "pci_path", "mtu", "partners", "pcie_rate")
"""Parameters of a figure of `verbs` that describe the port. All its other parameters are settings of the test."""
_SECTIONS = {"hca": "Adapter", "nic": "Interface", "pci": "PCI device"}
_MAX_TEXT = 120
"""Maximum number of characters of each reading in the summary of an adapter."""

Verdicts = Mapping[tuple[str, str], Sequence[Verdict]]
"""Name and scope of an observation -> the verdicts on it, for one host."""


def add_adapter_pages(
    report: FleetReport,
    verdicts: Mapping[str, Sequence[Verdict]],
    causes: Mapping[str, Sequence[Cause]],
    table: TextTable,
    pages: dict[str, Any],
    budget: int,
) -> int:
    """Add the pages of network adapters to `pages`, the pages of hosts, in at most `budget` bytes; return the remaining bytes."""
    for number, host in enumerate(report.hosts):
        page = pages.get(str(number))
        if page is None or not host.adapters:
            continue
        mark = table.mark()
        adapters = adapter_pages(
            host, verdicts[host.name], causes.get(host.name, ()), table, passes_left_out=report.detail != ALL
        )
        size = len(as_json(adapters).encode()) + table.size - mark[1] + len(',"adapters":')
        if size > budget:
            table.restore(mark)
            adapters, size = [], len(',"adapters":[]')
        page["adapters"] = adapters  # if empty, the page names the command that adds the adapters
        budget -= size
    return budget


def adapter_pages(
    host: HostReport,
    verdicts: Iterable[Verdict],
    causes: Sequence[Cause],
    table: TextTable,
    *,
    passes_left_out: bool = False,
) -> list[list[Any]]:
    """Return a page for each adapter of a host.

    A page is a list: name, state, summary, slot, positions in `causes` of the causes on this adapter, sections, figures. The
    state is the letter (STATES) of the worst verdict that blocks acceptance, or of PASS if none does. It is empty if `verdicts`
    is complete but has no verdict on the adapter.

    Args:
        host: the host.
        verdicts: all verdicts on the host in the report.
        causes: the causes on the page of the host, in order.
        table: stores the texts; a page has the number of a text in its place.
        passes_left_out: whether passes are left out of `verdicts`.
    """
    by_scope: dict[tuple[str, str], list[Verdict]] = defaultdict(list)
    by_device: dict[str, list[Verdict]] = defaultdict(list)
    for verdict in verdicts:
        by_scope[verdict.name, verdict.scope].append(verdict)
        for device in {Scope.parse(verdict.scope).device, Scope.parse(verdict.part_scope).device}:
            by_device[device].append(verdict)
    return [_page(host, adapter, by_scope, by_device, causes, table, passes_left_out) for adapter in host.adapters]


def _page(
    host: HostReport,
    adapter: Adapter,
    by_scope: Verdicts,
    by_device: Mapping[str, Sequence[Verdict]],
    causes: Sequence[Cause],
    table: TextTable,
    passes_left_out: bool,
) -> list[Any]:
    verdicts = [verdict for scope in adapter.scopes for verdict in by_device.get(scope, ())]
    blocking = [verdict for verdict in verdicts if verdict.blocks_acceptance]
    state = STATES[worst_verdict(blocking)] if blocking else "p" if verdicts or passes_left_out else ""
    parts = [{part.scope for part in cause.parts if part.host == host.name} for cause in causes]
    causes_of_adapter = [at for at, of_cause in enumerate(parts) if any(_is_in(adapter, scope) for scope in of_cause)]
    readings: dict[str, list[AdapterReading]] = defaultdict(list)
    for reading in adapter.readings:
        readings[Scope.parse(reading.scope).without("lane")].append(reading)
    order = {scope: position for position, scope in enumerate(adapter.scopes)}
    sections = sorted(readings, key=lambda scope: (order.get(Scope.parse(scope).device, 0), scope))
    return [
        *table.numbers((adapter.name,)),
        state,
        *table.numbers((_summary(adapter), adapter.slot)),
        causes_of_adapter,
        [_section(scope, readings[scope], by_scope, table) for scope in sections],
        [_figure(group, by_scope, table) for group in _groups(host, adapter)],
    ]


def _is_in(adapter: Adapter, scope: str) -> bool:
    return Scope.parse(scope).device in adapter.scopes


def _summary(adapter: Adapter) -> str:
    """Return type, link layer and rate of an adapter, its NUMA node and its nearest GPUs in one line."""
    by_name: dict[str, list[Value]] = defaultdict(list)
    units = {}
    for reading in adapter.readings:
        if reading.value is not None:
            by_name[reading.name].append(reading.value)
            units[reading.name] = reading.unit
    texts = []
    for name in ("infiniband.hca.type", "infiniband.link_layer", "infiniband.rate", "network.speed"):
        texts += [quantity(value, units[name]) for value in dict.fromkeys(by_name[name])]
    texts += [f"NUMA node {quantity(value, '1')}" for value in by_name["infiniband.hca.numa_node"][:1]]
    if adapter.gpus:
        texts.append(f"nearest to {describe_scopes(adapter.gpus)} ({adapter.path})")
    return ", ".join(text[:_MAX_TEXT] for text in texts)


def _section(scope: str, readings: Sequence[AdapterReading], by_scope: Verdicts, table: TextTable) -> list[Any]:
    """Return title, rows, counters that are 0, readings without a value, columns and rows of the lanes, and pictures.

    Args:
        scope: the scope of the adapter, one of its ports, its PCI device, or one of its network interfaces.
        readings: the readings of this scope and of the lanes below it.
        by_scope: name and scope of a reading -> the verdicts on it.
        table: stores the texts; the result has the number of a text in its place.
    """
    parsed = Scope.parse(scope)
    is_port = parsed.device_kind == "hca" and bool(parsed.below)
    title = f"Port {parsed.get('port')}" if is_port else _title(parsed)
    of_lanes = [reading for reading in readings if Scope.parse(reading.scope).kind == "lane"]
    of_scope = [reading for reading in readings if Scope.parse(reading.scope).kind != "lane"]
    limits = {f"{name}.{limit}" for name in POWERS for limit in LIMITS}
    shown = [item for item in of_scope if item.value is not None and item.name not in limits]
    zeros = [item for item in shown if _is_zero(item) and not _not_passing(item, by_scope)]
    absent: dict[str, list[str]] = defaultdict(list)
    measured_on_a_lane = {item.name for item in of_lanes if item.value is not None}
    for item in readings:
        # A reading with a value on some lanes is a column of the table of lanes; the other lanes show `–` there.
        if item.value is None and item.name not in measured_on_a_lane and item.name not in absent[item.reason]:
            absent[item.reason].append(item.name)
    return [
        table.number(title),
        [_row(item, by_scope, table) for item in shown if item not in zeros],
        table.numbers(READINGS[item.name].help for item in zeros),
        [table.numbers((", ".join(READINGS[name].help for name in names), why)) for why, names in absent.items()],
        *_lane_table(of_lanes, by_scope, table),
        [picture for name in POWERS if (picture := _picture(name, readings, by_scope, table))],
    ]


def _title(scope: Scope) -> str:
    text = _SECTIONS.get(scope.device_kind, scope.device_kind)
    name = scope.get(scope.device_kind)
    return text if scope.device_kind == "hca" else f"{text} {name}{', port and module' if scope.below else ''}"


def _is_zero(item: AdapterReading) -> bool:
    return READINGS[item.name].counter and not item.value


def _not_passing(item: AdapterReading, by_scope: Verdicts) -> bool:
    return any(verdict.verdict != PASS for verdict in by_scope.get((item.name, item.scope), ()))


def _worst(verdicts: Sequence[Verdict]) -> Verdict | None:
    order = [FAIL, INCONCLUSIVE, PASS]
    return min(verdicts, key=lambda verdict: order.index(verdict.verdict)) if verdicts else None


def _judged(verdict: Verdict | None, table: TextTable) -> list[Any]:
    """Return limit, criterion and the letter of the verdict; all are empty if `verdict` is None."""
    if verdict is None:
        return [*table.numbers(("", "")), ""]
    limit = value_and_limit(verdict)[1] if verdict.limit is not None else ""
    return [*table.numbers((limit, verdict.criterion)), STATES[verdict.verdict]]


def _row(item: AdapterReading, by_scope: Verdicts, table: TextTable) -> list[Any]:
    """Return reading in words, value, increase during the run, rate before the run, limit, criterion, letter of the verdict."""
    increase = "" if item.increase is None else quantity(item.increase, item.unit)
    rate = "" if item.per_hour is None else quantity(item.per_hour, PER_HOUR)
    texts = (READINGS[item.name].help, _text(item.name, item.value, item.unit), increase, rate)
    return [*table.numbers(texts), *_judged(_worst(by_scope.get((item.name, item.scope), ())), table)]


def _text(name: str, value: Value, unit: str) -> str:
    power = finite(value) if name.startswith(POWERS) and unit == "W" else None
    if power is None:
        return quantity(value, unit)
    return f"{quantity(power, unit)}, {_dbm(power)} dBm".replace("-", "−") if power > 0 else "no light"


def _dbm(watts: float) -> float:
    return round(10 * math.log10(watts / 1e-3), 2)


def _lane_table(lanes: Sequence[AdapterReading], by_scope: Verdicts, table: TextTable) -> tuple[list[int], list[Any]]:
    """Return the columns, and for each lane its number, its cells and the letter of its worst verdict."""
    names = list(dict.fromkeys(item.name for item in lanes if item.value is not None))
    columns = [name for name in names if not name.endswith((".alarm", ".warning"))]
    rows: dict[str, dict[str, AdapterReading]] = defaultdict(dict)
    for item in lanes:
        rows[Scope.parse(item.scope).get("lane")][item.name] = item
    result = []
    for lane, cells in sorted(rows.items(), key=lambda row: (len(row[0]), row[0])):
        texts = [_text(name, cells[name].value, cells[name].unit) if name in cells else NONE for name in columns]
        verdicts = [verdict for item in cells.values() for verdict in by_scope.get((item.name, item.scope), ())]
        letter = STATES[worst_verdict(verdicts)] if verdicts else ""
        result.append([*table.numbers((lane,)), table.numbers(texts), letter])
    return table.numbers(READINGS[name].help for name in columns), result if columns else []


def _picture(name: str, readings: Sequence[AdapterReading], by_scope: Verdicts, table: TextTable) -> list[Any]:
    """Return the picture of one of POWERS: title, limits in dBm in the order of LIMITS (None if unknown), and lanes.

    A lane is: number, power in dBm (None for no light), and letter of the worst verdict. The picture is an empty list if no lane
    has a reading of this power.
    """
    powers = {
        Scope.parse(item.scope).get("lane"): item
        for item in readings
        if item.name == name and finite(item.value) is not None
    }
    if not powers:
        return []
    known = {item.name: finite(item.value) for item in readings}
    limits = [known.get(f"{name}.{limit}") for limit in LIMITS]
    lanes = []
    for lane, item in sorted(powers.items(), key=lambda each: (len(each[0]), each[0])):
        power = finite(item.value) or 0.0
        sides = [
            verdict for end in ("", ".alarm", ".warning") for verdict in by_scope.get((name + end, item.scope), ())
        ]
        lanes.append(
            [table.number(lane), _dbm(power) if power > 0 else None, STATES[worst_verdict(sides)] if sides else ""]
        )
    return [
        table.number(READINGS[name].help),
        [_dbm(limit) if limit and limit > 0 else None for limit in limits],
        lanes,
    ]


def _groups(host: HostReport, adapter: Adapter) -> list[list[Observation]]:
    """Return the figures of the adapter's ports in groups.

    A group has the values of one figure of one port with the same settings. If the figure is measured with partners (ports of
    other hosts), the group has a value for each partner.
    """
    groups: dict[tuple[object, ...], list[Observation]] = defaultdict(list)
    for item in host.measurements:
        if item.name.startswith(_VERBS) and _is_in(adapter, item.scope):
            scope = Scope.parse(item.scope)
            settings = tuple((key, value) for key, value in item.params.items() if key not in _PORT_PARAMS)
            groups[item.name, item.unit, scope.without("partner"), scope.kind == "partner", settings].append(item)
    return list(groups.values())


def _figure(group: Sequence[Observation], by_scope: Verdicts, table: TextTable) -> list[Any]:
    """Return name in words, port and settings, partners, values, worst partner, limit, criterion, letter of the verdict."""
    first = group[0]
    values = {item.scope: value for item in group if (value := finite(item.value)) is not None}
    with_partner = Scope.parse(first.scope).kind == "partner"
    partners = f"{len(group)} partners" if len(group) > 1 else f"with {Scope.parse(first.scope).get('partner')}"
    worst = ""
    if not values:
        text = next((f"{item.status}: {item.reason}" for item in group if item.status != MEASURED), NONE)
    elif len(values) == 1:
        text = quantity(next(iter(values.values())), first.unit)
    else:
        low, high = min(values.values()), max(values.values())
        text = f"{quantity(low, first.unit, like=high)} … {quantity(high, first.unit)}"
        pick = max if first.unit == "s" else min
        worst = Scope.parse(pick(values, key=lambda scope: values[scope])).get("partner")
    verdicts = [verdict for item in group for verdict in by_scope.get((item.name, item.scope), ())]
    settings = params_text({key: value for key, value in first.params.items() if key not in _PORT_PARAMS})
    port = describe_scope(Scope.parse(first.scope).without("partner")).partition(", ")[2]
    texts = (
        label(first.name),
        ", ".join(filter(None, (port, settings))),
        partners if with_partner else "",
        text,
        worst,
    )
    return [*table.numbers(texts), *_judged(_worst(verdicts), table)]
