"""The host dashboard: GPUs, links, memory, the host itself, and missing readings."""

from __future__ import annotations

from typing import Any

from deploy.grafana.board import GPU, ONE_HOST, RACK, Board, Section
from deploy.grafana.parts import (
    BAD,
    FINE,
    GPUS,
    HALF,
    HOSTS,
    THIRD,
    WARN,
    WHOLE,
    band,
    dashed,
    engines,
    lines,
    query,
    states,
    steps,
    texts,
)
from deploy.grafana.tables import Column, rows

text = texts("host")
RATE = "[$__rate_interval]"
SLOW = "[15m]"
"""PromQL range for counters that the exporter reads only every five minutes, because the driver takes long to return them."""
REMAPS = {"0": ("nothing pending", FINE), "1": ("waits for a reset", WARN), "2": ("failed", BAD), "3": ("failed", BAD)}
THROTTLED = f"rackproof_gpu_throttle_sampled_seconds_total{{{GPUS}}}{RATE}"

READINGS = {
    "temperature_celsius": Column(title="Temperature", unit="celsius"),
    "power_watts": Column(title="Power", unit="watt", decimals=0),
    "power_limit_watts": Column(title="Limit", unit="watt", decimals=0),
    "clock_sm_hertz": Column(title="SM clock", unit="hertz"),
    "utilization_ratio": Column(title="Busy", unit="percentunit", decimals=0),
    "memory_used_bytes": Column(title="Memory used", unit="bytes"),
    "nvlink_active_links": Column(title="NVLinks up"),
    "pcie_generation": Column(title="PCIe Gen"),
    "pcie_width": Column(title="PCIe lanes"),
    "ecc_uncorrectable_volatile_total": Column(title="ECC uncorrectable", steps=steps(FINE, (1, BAD))),
    "remapped_rows_pending": Column(title="Remap pending", words={"0": ("no", FINE), "1": ("yes", BAD)}),
}
"""Reading -> its column in the table of GPUs."""


def _by_gpu(name: str, aggregation: str = "max") -> str:
    """Return a query for a reading of each GPU. If a GPU has several series, `aggregation` combines them."""
    return f"{aggregation} by (gpu) (rackproof_gpu_{name}{{{GPUS}}})"


def _of_host(name: str) -> str:
    return f"max by (host) (rackproof_host_{name}{{{HOSTS}}})"


def _gpu_table() -> Section:
    letters = dict(zip("BCDEFGHIJKL", READINGS, strict=True))
    absent = f'rackproof_readings_absent{{{GPUS}, gpu!="", status="error"}}'
    known = f"rackproof_gpu_info{{{GPUS}}}"
    return Section(
        title="Now",
        panels=[
            rows(
                text("gpus"),
                {
                    "A": f"max by (gpu, name, serial, pci_bus_id) ({known})",
                    **{letter: _by_gpu(name) for letter, name in letters.items()},
                    "M": f"sum by (gpu) ({absent} or 0 * {known})",
                },
                {
                    "gpu": Column(title="GPU", width=60),
                    "name": Column(title="Model"),
                    "serial": Column(title="Serial"),
                    "pci_bus_id": Column(title="PCI address"),
                    **{letter: READINGS[name] for letter, name in letters.items()},
                    "M": Column(title="Absent", steps=steps(FINE, (1, WARN))),
                },
                width=WHOLE,
                sort="GPU",
                down=False,
            )
        ],
    )


def _compared() -> Section:
    """Return the panels that compare the GPUs, so that an outlier stands out."""
    limit = f"on (instance, gpu) rackproof_gpu_power_limit_watts{{{GPUS}}}"
    power = f"max by (gpu) (rackproof_gpu_power_window_mean_watts{{{GPUS}}} / {limit})"
    throttled = query(f"max by (reason) (rate({THROTTLED}))", "{{reason}}")
    return Section(
        title="GPUs compared",
        panels=[
            _gpus("clock", _by_gpu("clock_sm_window_min_hertz", "min"), "hertz"),
            _gpus("power", power, "percentunit", limit=1),
            _gpus("temperature", _by_gpu("temperature_window_max_celsius"), "celsius", least=20),
            _gpus("memory-temperature", _by_gpu("memory_temperature_celsius"), "celsius", least=20),
            lines(text("throttling"), throttled, unit="percentunit", most=1),
            _gpus("memory-in-use", _by_gpu("memory_used_bytes"), "bytes"),
            _gpus("utilization", _by_gpu("utilization_ratio"), "percentunit", most=1),
            lines(text("engines"), *engines(_by_gpu("gpm_%s"), "GPU {{gpu}}"), unit="percentunit", by_gpu=True, most=1),
        ],
    )


def _gpus(key: str, promql: str, unit: str, **more: Any) -> Any:
    return lines(text(key), query(promql, "GPU {{gpu}}"), unit=unit, by_gpu=True, **more)


def _each_gpu() -> Section:
    """Return the collapsed section with the panels of one GPU. Grafana repeats the section for each GPU."""
    highest = query(_by_gpu("clock_sm_max_hertz"), "limit: highest supported clock")
    limit = query(_by_gpu("power_limit_watts"), "limit in force")
    memory = query(_by_gpu("memory_temperature_celsius"), "memory")
    throttled = query(f"sum by (reason) (rate({THROTTLED}))", "{{reason}}")
    return Section(
        title="GPU $gpu",
        repeat="gpu",
        panels=[
            dashed(_window("window-clock", "clock_sm", "hertz", "hertz", highest), "limit"),
            dashed(_window("window-power", "power", "watts", "watt", limit), "limit"),
            _window("window-temperature", "temperature", "celsius", "celsius", memory, least=20),
            lines(text("throttling-of-gpu"), throttled, unit="percentunit", most=1),
        ],
    )


def _window(key: str, what: str, suffix: str, unit: str, *also: Any, **more: Any) -> Any:
    """Return a panel with the mean of a reading in the exporter's window (default 30 s), and a band from minimum to maximum."""
    window = [query(_by_gpu(f"{what}_window_{kind}_{suffix}"), kind) for kind in ("min", "mean", "max")]
    return band(lines(text(key), *window, *also, unit=unit, **more), "min", "max")


def _links() -> Section:
    nvlink = " or ".join(
        f'label_replace(sum by (gpu) (increase(rackproof_gpu_nvlink_{kind}_total{{{GPUS}}}{SLOW})), "kind", "{kind}", "", "")'
        for kind in ("replays", "recoveries", "crc_errors")
    )
    aer = " or ".join(
        f'label_replace(increase(rackproof_pcie_aer_{kind}_total{{{HOSTS}}}{RATE}), "kind", "{kind}", "", "")'
        for kind in ("correctable", "nonfatal", "fatal")
    )
    replays = f"sum by (gpu) (increase(rackproof_gpu_pcie_replays_total{{{GPUS}}}{SLOW}))"
    pcie = (query(aer, "{{pci}} {{kind}}"), query(replays, "GPU {{gpu}} replays"))
    active = query(f"max by (hca, port) (rackproof_infiniband_active{{{HOSTS}}})", "{{hca}} port {{port}}")
    errors = [
        query(
            f"sum by (hca, port) (increase(rackproof_infiniband_{kind}_total{{{HOSTS}}}{RATE}))",
            f"{{{{hca}}}} port {{{{port}}}} {kind}",
        )
        for kind in ("symbol_error", "link_downed", "port_rcv_errors")
    ]
    third: dict[str, Any] = {"width": THIRD, "by_gpu": True}
    return Section(
        title="Links",
        panels=[
            _gpus("nvlinks", _by_gpu("nvlink_active_links", "min"), "short", width=THIRD),
            lines(text("nvlink-errors"), query(nvlink, "GPU {{gpu}} {{kind}}"), unit="short", **third),
            lines(text("nvlink-traffic"), *_traffic("nvlink"), unit="Bps", least=None, **third),
            _gpus("pcie-lanes", _by_gpu("pcie_width", "min"), "short", width=THIRD),
            lines(text("pcie-errors"), *pcie, unit="short", **third),
            lines(text("pcie-traffic"), *_traffic("pcie"), unit="Bps", least=None, **third),
            states(text("fabric-ports"), active, mappings={"0": ("down", BAD), "1": ("active", FINE)}, width=HALF),
            lines(text("fabric-errors"), *errors, unit="short"),
        ],
    )


def _traffic(link: str) -> list[Any]:
    return [
        query(f"{sign}{_by_gpu(f'gpm_{link}_{way}_bytes_per_second')}", f"GPU {{{{gpu}}}} {way}")
        for sign, way in (("", "sent"), ("-", "received"))
    ]


def _memory() -> Section:
    kinds = (
        "ecc_corrected_volatile",
        "ecc_uncorrectable_volatile",
        "remapped_rows_correctable",
        "remapped_rows_uncorrectable",
    )
    errors = [query(_by_gpu(f"{kind}_total"), f"GPU {{{{gpu}}}} {kind}") for kind in kinds]
    failed = f"2 * rackproof_gpu_remapped_rows_failed{{{GPUS}}}"
    state = query(f"max by (gpu) (rackproof_gpu_remapped_rows_pending{{{GPUS}}} + {failed})", "GPU {{gpu}}")
    return Section(
        title="Memory errors",
        panels=[
            lines(text("memory-errors"), *errors, unit="short", by_gpu=True),
            states(text("remaps"), state, mappings=REMAPS, width=HALF),
        ],
    )


def _host() -> Section:
    load = query(f"max by (host) (rackproof_host_load{{{HOSTS}}} / rackproof_host_cpus)", "load")
    pressure = [query(_of_host(f"pressure_{kind}_ratio"), kind) for kind in ("cpu", "memory", "io")]
    memory = (
        query(_of_host("memory_available_bytes"), "available"),
        query(_of_host("memory_total_bytes"), "limit: installed"),
    )
    success, took = (
        query(f"max by (collector) (rackproof_collector_{what}{{{HOSTS}}})", "{{collector}}")
        for what in ("success", "duration_seconds")
    )
    absent = query(f"sum by (gpu, status) (rackproof_readings_absent{{{HOSTS}}})", "GPU {{gpu}} {{status}}")
    answered = {"0": ("failed", BAD), "1": ("answered", FINE)}
    return Section(
        title="Host and exporter",
        panels=[
            lines(text("load"), load, unit="percentunit", width=THIRD, most=1),
            lines(text("pressure"), *pressure, unit="percentunit", width=THIRD, most=1),
            dashed(lines(text("memory"), *memory, unit="bytes", width=THIRD), "limit", WARN),
            states(text("collectors"), success, mappings=answered, width=THIRD),
            lines(text("scrape-time"), took, unit="s", width=THIRD),
            lines(text("absent"), absent, unit="short", width=THIRD),
        ],
    )


BOARD = Board(
    name="host",
    title="Rackproof host",
    about="One host: clocks, power, temperature, links and memory of its GPUs, the host itself, and missing readings.",
    variables=[RACK, ONE_HOST, GPU],
    sections=[_gpu_table(), _compared(), _each_gpu(), _links(), _memory(), _host()],
)
