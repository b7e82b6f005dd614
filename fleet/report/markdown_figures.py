"""The figures of the report as Markdown tables."""

from __future__ import annotations

from collections.abc import Iterator

from fleet.quantities import NONE
from fleet.report.markup import code, table
from fleet.report.tables import (
    collectives,
    communication,
    devices,
    figure,
    gpus,
    peers,
    soak_timeline,
    timing,
    training,
    workloads,
)
from schemas.reports import FleetReport


def measurements(report: FleetReport) -> Iterator[tuple[str, str]]:
    """Title and body of each section that tells of figures."""
    yield "Time", _time(report)
    if any(host.soak for host in report.hosts):
        yield "Soak", _soak(report)
    yield "Collectives", "\n\n".join([_collectives(report), *_routes(report)])
    yield "Devices", "\n\n".join([_devices(report), *_gpus(report)])
    yield "Peers", _peers(report)
    yield "Training and workloads", "\n\n".join([_training(report), *_workloads(report)])


def _time(report: FleetReport) -> str:
    rows = [
        (code(line.name), code(line.stage), code(line.median), code(line.share), code(f"{line.longest} {line.where}"))
        for line in timing.times(report).lines
    ]
    columns = ("Benchmark", "Stage", "Median", "Share", "Longest")
    return table(columns, rows) if rows else "No host told how long its benchmarks took."


def _soak(report: FleetReport) -> str:
    lasted = [f"- {code(host.name)}: {code(soak_timeline.summary(host.soak))}" for host in report.hosts if host.soak]
    rows = [tuple(cell if cell == NONE else code(cell) for cell in row) for row in soak_timeline.table_rows(report)]
    columns = ("Host", "Part", "Power", "Temperature", "SM clock", "Stress", "Drift", "Clocks held down")
    happened = [
        (code(found.host), code(item.when), code(item.where), code(item.what))
        for found in soak_timeline.timelines(report)
        for item in found.happenings
    ]
    parts = ["\n".join(lasted), *([table(columns, rows)] if rows else [])]
    parts += [table(("Host", "When", "Where", "What happened"), happened)] if happened else []
    return "\n\n".join(parts)


def _collectives(report: FleetReport) -> str:
    found = collectives.charts(report)
    if not found:
        return "No bandwidth of any collective operation was measured."
    places = {"host": "within each host", "gang": "between hosts"}
    rows = [(code(chart.op), places[chart.kind], str(chart.lines), code(chart.peak), _wanted(chart)) for chart in found]
    return table(("Operation", "Where", "Measured by", "Bus bandwidth", "Criterion"), rows)


def _wanted(chart: collectives.Chart) -> str:
    return "; ".join(code(limit.title) for limit in chart.limits) or "none"


def _devices(report: FleetReport) -> str:
    rows = [
        (
            code(f"{row.name} {row.label}"),
            str(row.count),
            *(code(text) for text in (row.lowest, row.median, row.highest)),
            code(row.limit_text) if row.limit_text else "no criterion",
            f"**{row.failed}**" if row.failed else "0",
            f"**{row.absent}**" if row.absent else "0",
        )
        for row in devices.table(report)
    ]
    columns = ("Figure", "Devices", "Lowest", "Median", "Highest", "Wanted", "Failing", "Without a figure")
    return table(columns, rows) if rows else "Nothing was measured of any single device."


def _training(report: FleetReport) -> str:
    rows = [
        (
            code(row.place) + (" **fail**" if row.failed else ""),
            code(row.network),
            "**synthetic**" if row.synthetic else code(row.data),
            *(code(row.throughput), code(row.step_time), code(row.loss_ratio), code(row.accuracy)),
            code(row.problem),
        )
        for row in training.table(report).rows
    ]
    columns = ("Where", "Network", "Data", "Throughput", "Step", "Loss, last to first", "Accuracy", "Why not")
    return table(columns, rows) if rows else "No training was reported."


def _cells(found: figure.Table, head: str) -> str:
    over = [name for name, span in found.groups for _ in range(span)] or [""] * len(found.columns)
    columns = [f"{group} {name}".strip() for group, name in zip(over, found.columns, strict=True)]
    rows = [
        (
            code(f"{row.head} {row.note}"),
            *(code(cell.whole) + (" **fail**" if cell.css == "fail" else "") for cell in row.cells),
        )
        for row in found.rows
    ]
    return f"{code(found.caption)}\n\n{table((head, *map(code, columns)), rows)}"


def _routes(report: FleetReport) -> Iterator[str]:
    rows = [
        (code(route.where), code(route.transport), code(route.nvls), code(route.channels), code(route.choices))
        for route in communication.routes(report)
    ]
    if rows:
        yield table(("Who talked", "Transport", "NVLS", "Channels", "Algorithm and protocol at the largest size"), rows)
    yield from (_cells(found, "Operation") for found in communication.latencies(report))


def _gpus(report: FleetReport) -> Iterator[str]:
    rows = [
        (
            check.title,
            code("; ".join(check.wrong)) if check.wrong else "none" if check.looked else "nobody looked",
            str(check.looked),
            str(check.devices),
        )
        for check in gpus.checks(report)
    ]
    if rows:
        yield table(("What must be nothing", "Found", "Looks", "Devices"), rows)
    tables = [found for found in (gpus.speeds(report), gpus.stress(report)) if found]
    yield from (_cells(found, "Where") for found in tables)
    if tables:
        yield figure.LEGEND


def _peers(report: FleetReport) -> str:
    found = peers.peers(report)
    if not found.pairs:
        return "No copies between the GPUs of a host were measured."
    parts = [f"GB/s one way from row to column, over {found.pairs} ordered pairs: {found.span}."]
    for matrix in found.matrices:
        rows = [
            (f"GPU {source}", *(code(f"{square.text} {square.note}") for square in row))
            for source, row in zip(matrix.devices, matrix.rows, strict=True)
        ]
        parts.append(table((code(matrix.host), *(f"GPU {device}" for device in matrix.devices)), rows))
    return "\n\n".join(parts)


def _workloads(report: FleetReport) -> Iterator[str]:
    found = workloads.workloads(report)
    if found:
        yield _cells(found, "Workload")
