"""The run dashboard: the stages of a run on each host, and the benchmark figures compared with the criteria."""

from __future__ import annotations

from typing import Any

from deploy.grafana.board import HOST, POSITION, RACK, RUN_ID, Board, Section
from deploy.grafana.judged import floor, ratios_to_limit
from deploy.grafana.parts import (
    BAD,
    BUSY,
    FINE,
    GONE,
    ODD,
    QUARTER,
    RUN,
    THIRD,
    WARN,
    WHOLE,
    dashed,
    lines,
    query,
    states,
    texts,
)
from deploy.grafana.tables import Column, rows

text = texts("run")
STATES = {"planned": GONE, "running": BUSY, "finished": FINE, "failed": BAD, "deadline": WARN, "silent": ODD}
SILENT_S = 15.0
"""The alert RackproofRankSilent fires if a rank has sent no heartbeat for more than this many seconds."""


def _progress() -> Section:
    numbers = " or ".join(
        f'{number} * (rackproof_stage_state{{state="{state}", {RUN}}} == 1)' for number, state in enumerate(STATES, 1)
    )
    mapping = {str(number): (state, colour) for number, (state, colour) in enumerate(STATES.items(), 1)}
    stages = query(f"max by (host, stage) ({numbers})", "{{host}} {{stage}}")
    progress = f"max by (host, stage) (rackproof_stage_progress_ratio{{{RUN}}})"
    running = 'on (instance, stage) rackproof_stage_state{state="running"} == 1'
    ends = " or ".join(f"rackproof_stage_{end}_timestamp_seconds{{{RUN}}}" for end in ("expected_end", "deadline"))
    # The end is a time of the host's clock, which may differ from that of Prometheus.
    now = f'rackproof_collector_last_success_timestamp_seconds{{collector="run", {RUN}}}'
    remaining = f"max by (host, stage) (({ends}) - ignoring (collector, stage) group_left () {now} and {running})"
    return Section(
        title="Progress",
        panels=[
            states(text("stages"), stages, mappings=mapping, height=10),
            _runs(),
            lines(text("progress"), query(progress, "{{host}} {{stage}}"), unit="percentunit", width=QUARTER, most=1),
            lines(
                text("time-left"),
                query(remaining, "{{host}} {{stage}}"),
                unit="s",
                width=QUARTER,
                limit=0,
                broken_below=True,
            ),
        ],
    )


def _runs() -> Any:
    labels = "host, rack, run_id, profile, gang, device, rehearsal, rackproof"
    began = f"max by (host, rack, run_id) (rackproof_run_started_timestamp_seconds{{{RUN}}})"
    return rows(
        text("runs"),
        {"A": f"max by ({labels}) (rackproof_run_info{{{RUN}}})", "B": f"1000 * {began}"},
        {
            "rack": POSITION["rack"],
            "host": POSITION["host"],
            "run_id": Column(title="Run"),
            "profile": Column(title="Profile"),
            "gang": Column(title="Gang"),
            "device": Column(title="Device"),
            "rehearsal": Column(title="Rehearsal", words={"true": ("REHEARSAL", ODD), "false": ("no", FINE)}),
            "rackproof": Column(title="Rackproof"),
            "B": Column(title="Began", unit="dateTimeAsIso"),
        },
        sort="Host",
        down=False,
    )


def _benchmarks() -> Section:
    outlier_ratio = f"min by (host, benchmark, figure) ({ratios_to_limit('RackproofFleetOutlier', RUN)})"
    return Section(
        title="Benchmarks",
        panels=[
            lines(
                text("relative-to-fleet"),
                query(outlier_ratio, "{{host}} {{benchmark}} {{figure}}"),
                unit="percentunit",
                width=WHOLE,
                limit=1,
                broken_below=True,
                least=0.9,
                most=1.1,
            ),
            _measured("flops", "flop_per_second", "flop_per_second", "flops", "benchmark", "dtype"),
            _measured("bandwidth", "bandwidth_bytes_per_second", "bandwidth", "Bps", "benchmark", "op", "direction"),
            _measured("bus-bandwidth", "bus_bandwidth_bytes_per_second", "bus_bandwidth", "Bps",
                      "benchmark", "op", "placement", "mnnvl", "size_bytes"),
            _measured("items", "items_per_second", "items_per_second", "short", "benchmark", "item", "network"),
            _training("step-time", "s", "step_time_seconds"),
            _training("loss", "none", "loss"),
            _training("accuracy", "percentunit", "accuracy_ratio", "mfu_ratio", most=1),
        ],
    )  # fmt: skip


def _measured(key: str, metric: str, figure: str, unit: str, *labels: str) -> Any:
    """Return a panel of a measured figure (the slowest result of each host) and the lowest value that the criteria allow."""
    names = " ".join(f"{{{{{label}}}}}" for label in labels)
    slowest = f"min by (host, {', '.join(labels)}) (rackproof_benchmark_{metric}{{{RUN}}})"
    allowed = floor(figure, 'run_id=~"$run_id"')  # no matcher for `host`: the fleet median has no such label
    queries = (query(slowest, f"{{{{host}}}} {names}"), query(allowed, f"allowed: {{{{name}}}} {names}"))
    return dashed(lines(text(key), *queries, unit=unit), "allowed")


def _training(key: str, unit: str, *metrics: str, most: float | None = None) -> Any:
    queries = [
        query(
            f"max by (host, benchmark, network) (rackproof_benchmark_{metric}{{{RUN}}})",
            "{{host}} {{benchmark}} {{network}}" + (f" {metric.removesuffix('_ratio')}" if len(metrics) > 1 else ""),
        )
        for metric in metrics
    ]
    return lines(text(key), *queries, unit=unit, width=THIRD, most=most)


def _problems() -> Section:
    wrong = f'label_replace(rackproof_benchmark_wrong_results{{{RUN}}} > 0, "what", "wrong results", "", "")'
    unmeasured = f"rackproof_benchmark_unmeasured{{{RUN}}} > 0"
    unmeasured = f'label_replace({unmeasured}, "what", "not measured: $1", "status", "(.*)")'
    problems = rows(
        text("problems"),
        {"A": f"sum by (what, rack, host, gpu, stage, benchmark) ({wrong} or {unmeasured})"},
        {
            "what": Column(title="What", words={"wrong results": ("wrong results", BAD)}),
            **POSITION,
            "stage": Column(title="Stage"),
            "benchmark": Column(title="Benchmark"),
            "A": Column(title="Count"),
        },
        sort="Count",
    )
    ranks = [
        query(f"max by (host) (rackproof_rank_{what}_seconds{{{RUN}}})", f"{{{{host}}}} {what}")
        for what in ("silent", "waiting")
    ]
    return Section(title="Problems", panels=[problems, lines(text("ranks"), *ranks, unit="s", limit=SILENT_S)])


BOARD = Board(
    name="run",
    title="Rackproof run",
    about="A run in progress or finished: stages, benchmark figures over time, and the limits of the criteria.",
    variables=[RACK, HOST, RUN_ID],
    sections=[_progress(), _benchmarks(), _problems()],
    since="now-3h",
)
