"""Render the figures of the report as Markdown tables."""

from __future__ import annotations

from collections.abc import Iterator

from fleet.quantities import NONE
from fleet.report.markup import code, table
from fleet.report.tables import (
    collectives,
    communication,
    devices,
    figure,
    former_runs,
    gpus,
    peers,
    soak_timeline,
    timing,
    training,
    workloads,
)
from schemas.reports import FleetReport


def measurements(report: FleetReport) -> Iterator[tuple[str, str]]:
    """Yield title and body of each section with figures."""
    yield "Time", _time(report)
    if any(host.soak for host in report.hosts):
        yield "Soak", _soak(report)
    yield "Collectives", "\n\n".join([_collectives(report), *_communication(report)])
    yield "Devices", "\n\n".join([_devices(report), *_gpus(report)])
    yield "Peers", _peers(report)
    yield "Training and workloads", "\n\n".join([_training(report), *_workloads(report)])


def _time(report: FleetReport) -> str:
    rows = [
        (code(row.name), code(row.stage), code(row.median), code(row.share), code(f"{row.longest} {row.slowest_host}"))
        for row in timing.times(report).rows
    ]
    columns = ("Benchmark", "Stage", "Median", "Share", "Longest")
    return table(columns, rows) if rows else "No host reported how long its benchmarks took."


def _soak(report: FleetReport) -> str:
    summaries = [f"- {code(host.name)}: {code(soak_timeline.summary(host.soak))}" for host in report.hosts if host.soak]
    rows = [tuple(cell if cell == NONE else code(cell) for cell in row) for row in soak_timeline.table_rows(report)]
    columns = ("Host", "Part", "Power", "Temperature", "SM clock", "Stress", "Drift", "Throttled")
    events = [
        (code(host.host), code(event.when), code(event.part), code(event.text))
        for host in soak_timeline.timelines(report)
        for event in host.events
    ]
    parts = ["\n".join(summaries), *([table(columns, rows)] if rows else [])]
    parts += [table(("Host", "When", "Part", "Event"), events)] if events else []
    return "\n\n".join(parts)


def _collectives(report: FleetReport) -> str:
    charts = collectives.charts(report)
    if not charts:
        return "No bandwidth of any collective operation was measured."
    where = {"host": "within each host", "gang": "between hosts"}
    rows = [(code(chart.op), where[chart.kind], str(chart.lines), code(chart.peak), _wanted(chart)) for chart in charts]
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
        for row in devices.device_figures(report)
    ]
    columns = ("Figure", "Devices", "Lowest", "Median", "Highest", "Wanted", "Failing", "Without a figure")
    return table(columns, rows) if rows else "No figure of a single device was measured."


def _training(report: FleetReport) -> str:
    rows = [
        (
            code(row.trained_by) + (" **fail**" if row.failed else ""),
            code(row.network),
            "**synthetic**" if row.synthetic else code(row.data),
            *(code(row.throughput), code(row.step_time), code(row.loss_ratio), code(row.accuracy)),
            code(row.problem),
        )
        for row in training.training_table(report).rows
    ]
    columns = ("Where", "Network", "Data", "Throughput", "Step", "Loss, last to first", "Accuracy", "Problem")
    return table(columns, rows) if rows else "No training was reported."


def _cells(cells: figure.Table, head: str) -> str:
    over = [name for name, span in cells.groups for _ in range(span)] or [""] * len(cells.columns)
    columns = [f"{group} {name}".strip() for group, name in zip(over, cells.columns, strict=True)]
    rows = [
        (
            code(f"{row.head} {row.note}"),
            *(code(cell.whole) + (" **fail**" if cell.css == "fail" else "") for cell in row.cells),
        )
        for row in cells.rows
    ]
    return f"{code(cells.caption)}\n\n{table((head, *map(code, columns)), rows)}"


def _communication(report: FleetReport) -> Iterator[str]:
    rows = [
        (code(path.used_by), code(path.transport), code(path.nvls), code(path.channels), code(path.algorithms))
        for path in communication.communication_paths(report)
    ]
    if rows:
        columns = ("Communication paths", "Transport", "NVLS", "Channels", "Algorithm and protocol at the largest size")
        yield table(columns, rows)
    yield from (_cells(latency, "Operation") for latency in communication.latencies(report))


def _gpus(report: FleetReport) -> Iterator[str]:
    rows = [
        (
            counter.title,
            "; ".join(filter(None, (_errors(counter), counter.gap))),
            str(counter.readings),
            str(counter.devices),
        )
        for counter in gpus.error_counters(report)
    ]
    if rows:
        yield table(("Error counters", "Errors", "Readings", "Devices"), rows)
    tables = [item for item in (gpus.speeds(report), gpus.stress(report)) if item]
    yield from (_cells(item, "Where") for item in tables)
    if tables:
        yield figure.LEGEND
        if report.history:
            yield former_runs.LEGEND


def _errors(counter: gpus.ErrorCounter) -> str:
    return code("; ".join(counter.errors)) if counter.errors else "none" if counter.readings else ""


def _peers(report: FleetReport) -> str:
    measured = peers.peers(report)
    if not measured.pairs:
        return "No copies between the GPUs of a host were measured."
    parts = [f"GB/s one way from row to column, over {measured.pairs} ordered pairs: {measured.range}."]
    for matrix in measured.matrices:
        rows = [
            (f"GPU {source}", *(code(f"{cell.text} {cell.note}") for cell in row))
            for source, row in zip(matrix.devices, matrix.rows, strict=True)
        ]
        parts.append(table((code(matrix.host), *(f"GPU {device}" for device in matrix.devices)), rows))
    return "\n\n".join(parts)


def _workloads(report: FleetReport) -> Iterator[str]:
    figures = workloads.workloads(report)
    if figures:
        yield _cells(figures, "Workload")
