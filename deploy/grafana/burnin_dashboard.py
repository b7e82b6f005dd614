"""The burn-in dashboard: what changed over hours or days in which nothing should change."""

from __future__ import annotations

from typing import Any

from deploy.grafana.board import HOST, POSITION, RACK, RUN_ID, TO_RUNBOOK, Board, Section
from deploy.grafana.fleet_dashboard import CRITICAL, FIRING, SEVERITIES, WARNING
from deploy.grafana.judged import limit, ratios_to_limit
from deploy.grafana.parts import BAD, FINE, GONE, HALF, HOSTS, PLAIN, RUN, WARN, lines, query, states, steps, texts
from deploy.grafana.tables import Column, matrix, rows

text = texts("burnin")
SHOWN_REASONS = "hw_thermal|sw_thermal|thermal|hw_power_brake|reliability"
"""Throttle reasons that the dashboard shows. `reliability` (highest voltage) also occurs on a healthy GPU, the others do not."""
COUNTERS = {
    "gpu": (
        "ecc_corrected_volatile",
        "ecc_uncorrectable_volatile",
        "remapped_rows_correctable",
        "remapped_rows_uncorrectable",
        "pcie_replays",
        "nvlink_replays",
        "nvlink_recoveries",
        "nvlink_crc_errors",
        "sample_failures",
    ),
    "pcie": tuple(f"{port}aer_{kind}" for port in ("", "port_") for kind in ("correctable", "nonfatal", "fatal")),
    "infiniband": (
        "symbol_error",
        "link_error_recovery",
        "link_downed",
        "port_rcv_errors",
        "port_rcv_remote_physical_errors",
        "port_xmit_discards",
        "local_link_integrity_errors",
        "packet_seq_err",
        "local_ack_timeout_err",
        "rnr_nak_retry_err",
    ),
    "network": ("carrier_changes", "rx_errors", "tx_errors", "rx_crc_errors"),
    "host": ("memory_ecc_corrected", "memory_ecc_uncorrected", "oom_kills"),
    "storage": ("disk_io_errors",),
}
"""Prefix -> error counters. The metric of a counter is `rackproof_PREFIX_COUNTER_total`."""


def _changes() -> Section:
    over_time = f"max by (host, alertname) (2 * {CRITICAL} or {WARNING})"
    levels = {"1": ("warning", WARN), "2": ("critical", BAD)}
    return Section(
        title="What changed",
        panels=[
            states(text("alerts-over-time"), query(over_time, "{{host}} {{alertname}}"), mappings=levels),
            _first_failures(),
            _risen_counters(),
        ],
    )


def _first_failures() -> Any:
    labels = "alertname, severity, rack, host, gpu, pci, stage, criterion"
    return rows(
        text("first-failures"),
        {"A": f"1000 * min by ({labels}) (min_over_time(timestamp({FIRING})[$__range:]))"},
        {
            "A": Column(title="First", unit="dateTimeAsIso", width=170),
            "severity": Column(title="Severity", words=SEVERITIES, width=90),
            "alertname": Column(title="Alert", link=TO_RUNBOOK),
            **POSITION,
            "pci": Column(title="PCI address"),
            "stage": Column(title="Stage"),
            "criterion": Column(title="Criterion"),
        },
        sort="First",
        down=False,
        height=10,
    )


def _risen_counters() -> Any:
    """Return a table of the counters that rose in the time range, with their increase."""
    names = [f"{source}_{name}" for source, counters in COUNTERS.items() for name in counters]
    rises = " or ".join(
        f'label_replace(increase(rackproof_{name}_total{{{HOSTS}}}[$__range]) > 0.5, "counter", "{name}", "", "")'
        for name in names
    )
    return rows(
        text("counters"),
        {"A": f"sum by (counter, rack, host, gpu, pci, link, hca, port, nic, disk, mc) (round({rises}))"},
        {
            "counter": Column(title="Counter", width=230),
            "A": Column(title="Increase", decimals=0),
            **POSITION,
            "pci": Column(title="PCI address"),
            "link": Column(title="NVLink"),
            "hca": Column(title="HCA"),
            "port": Column(title="Port"),
            "nic": Column(title="NIC"),
            "disk": Column(title="Disk"),
            "mc": Column(title="Memory controller"),
        },
        sort="Increase",
        height=10,
    )


def _drift() -> Section:
    mean = f"rackproof_gpu_temperature_window_mean_celsius{{{HOSTS}}}"
    clock = query(f"min by (host) (rackproof_gpu_clock_sm_window_min_hertz{{{HOSTS}}})", "{{host}}")
    spread = query(f"max by (host) ({mean}) - min by (host) ({mean})", "{{host}}")
    return Section(
        title="Drift",
        panels=[
            _relative_throughput("drift-from-start", "RackproofThroughputDrift"),
            _relative_throughput("relative-to-fleet", "RackproofFleetOutlier"),
            lines(text("lowest-clock"), clock, unit="hertz"),
            lines(text("temperature-spread"), spread, unit="celsius"),
        ],
    )


def _relative_throughput(key: str, alert: str) -> Any:
    promql = f"min by (host, benchmark, figure) ({ratios_to_limit(alert, RUN)})"
    ratio = query(promql, "{{host}} {{benchmark}} {{figure}}")
    return lines(text(key), ratio, unit="percentunit", limit=1, broken_below=True, least=0.9, most=1.1)


def _load() -> Section:
    rise = f'increase(rackproof_gpu_throttle_time_seconds_total{{reason=~"{SHOWN_REASONS}", {HOSTS}}}[$__range])'
    throttled = f'sum by (where, reason) (label_join({rise}, "where", " GPU ", "host", "gpu"))'
    most = limit("hw-thermal-time")
    below = f'rate(rackproof_gpu_power_of_limit_ratio_bucket{{le="0.95", {HOSTS}}}[$__rate_interval])'
    all_samples = "on (instance, gpu) rate(rackproof_gpu_power_of_limit_ratio_count[$__rate_interval])"
    loaded = query(f"1 - avg by (host) ({below} / {all_samples})", "{{host}}")
    power = query(f"sum by (host) (rackproof_gpu_power_window_mean_watts{{{HOSTS}}})", "{{host}}")
    ended = f"sum by (stage, outcome) (rackproof_stage_finished{{{RUN}}})"
    return Section(
        title="Load",
        panels=[
            matrix(text("throttling", most=most), throttled, ("where", "GPU"), "reason", scale=steps(PLAIN, (most, BAD)),
                   unit="s", width=HALF),
            matrix(text("ended"), ended, ("stage", "Stage"), "outcome", scale=steps(GONE, (1, FINE)), width=HALF),
            lines(text("loaded"), loaded, unit="percentunit", most=1),
            lines(text("power"), power, unit="watt"),
        ],
    )  # fmt: skip


BOARD = Board(
    name="burnin",
    title="Rackproof burn-in",
    about="What changed during a burn-in, when it first changed, and by how much.",
    variables=[RACK, HOST, RUN_ID],
    sections=[_changes(), _drift(), _load()],
    since="now-24h",
    refresh="5m",
)
