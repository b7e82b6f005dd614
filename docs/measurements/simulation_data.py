"""Create the data file of `rackproof simulate` from the records in this directory: median, extremes and spread of each figure.

    python docs/measurements/simulation_data.py > fleet/simulate/h200-sxm.json

Run it again after new measurements; tests/unit/fleet/simulate compares the file with the records.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from hashlib import sha256
from pathlib import Path
from typing import Any

from schemas.benchmarks.hardware import TESTS_OVER_TIME
from schemas.catalogue import BENCHMARKS, DURATION
from schemas.scopes import Scope

SCHEMA = "rackproof.simulate/1"
MODEL = "h200-sxm"
DIRECTORY = Path(__file__).parent
FIGURE_RECORDS = (
    "h200x4-standard/hosts/h200x4.json",
    "h200x4-gated/hosts/h200x4.json",
)
"""Records of four GPUs each. Figures of GPUs come from all records, figures of hosts only from the first.

The spread of a figure of a host is that of its repetitions.
"""
READINGS_RECORD = "h200x4-standard/hosts/h200x4.json"
"""The record from which the readings in snapshots are taken."""
PREFIXES_OF_SMALL_IMAGES = ("fashion_mnist.", "training.")
"""Figures of the network `convnet`. The records have them for synthetic images, so they are assumed for Fashion-MNIST."""
PREFIXES_OF_ONE_RECORD = ("memory.",)
"""Figures of GPUs that come only from the first record: the GPUs of the other record have memory with other rates."""
HOST_PREFIXES = ("dataloader.",)
"""Figures of a GPU that depend on its host, and are treated as figures of the host."""
SMALL_BYTES = 1 << 20
"""Below this size, the duration of a collective depends on the kernel launch by the host."""
MIN_SIGMA, MAX_SIGMA, DEFAULT_SIGMA = 0.002, 0.02, 0.01
"""Standard deviation of a host's figure, relative to the figure: minimum, maximum, and the value used without repetitions."""
SEPARATE_PARAMS = ("numa",)
"""Parameters that distinguish figures although they are not settings of the benchmark."""
OUTCOME_PARAMS = (
    "world_size",
    "devices",
    "bytes",
    "free_bytes",
    "repetitions",
    "samples_per_second",
    "replicas",
    "left_out",
    "passes",
    "elapsed_s",
    "wrong_addresses",
    "wrong_bits",
)
"""Parameters that are results of the run, or depend on the number of ranks."""
IDENTIFYING_READINGS = ("host.kernel.command_line", "storage.disk.serial", "network.address", "host.boot_id")
"""Readings that identify a machine; they are left out."""
SIMULATED_READINGS = (
    *("optics.*", "collector.optics", "port.*", "network.switch*", "fabric.imex.*"),
    *("host.dimm.*", "host.memory.speed", "host.memory.usable_share"),
)
"""Readings that are left out, because the measured virtual machine lacks them. The simulator makes those that it needs."""
READINGS_OF_THE_RECORD = ("fabric.imex.running", "host.dimm.corrected", "host.dimm.uncorrected", "host.dimm.label")
"""Readings that match SIMULATED_READINGS, but are taken from the record."""
WHOLE_NODE = {"host.numa.memory_total": "host.memory.total", "host.numa.memory_free": "host.memory.available"}
"""Reading of the only NUMA node -> reading of the host from which it is taken. The kernel of the measured virtual machine reports
nodes with only a part of the memory."""
_SETTINGS = [(output, frozenset(output.over)) for entry in BENCHMARKS.values() for output in entry.outputs]

Doc = dict[str, Any]


# --- figures that are in no record

_ASSUMED = "assumed: not in any record of an H200"
_ASSUMED_PULSE = (
    "assumed: bf16 products of 4096 x 4096 at 630 TFLOP/s, 4.6 in each millisecond of load; the spread is assumed"
)
_ASSUMED_FABRIC = "assumed: an NDR port of 400 Gb/s at 97 % of its line rate; the spread is assumed"


def _assumed_figure(name: str, unit: str, median: float, deviation: float, source: str, **params: Any) -> Doc:
    """Return a figure that varies by ±`deviation` (relative to its median); a third of that is its standard deviation."""
    numbers = [median, median * (1 - deviation), median * (1 + deviation), median * deviation / 3]
    spread = [float(f"{number:.6g}") for number in numbers]
    return {"name": name, "unit": unit, **({"params": params} if params else {}), "spread": spread, "source": source}


def _assumed_constant(name: str, unit: str, value: float, **params: Any) -> Doc:
    return {"name": name, "unit": unit, **({"params": params} if params else {}), "value": value, "source": _ASSUMED}


_DISK = {"filesystem": "xfs", "device": "nvme1n1", "model": "assumed NVMe disk of PCIe Gen4"}
_SHARED = {"filesystem": "nfs4", "device": "10.0.0.1:/export", "model": ""}

ASSUMED_STORAGE = [
    *(
        figure
        for op, rate, iops, latency in (("read", 6.5e9, 9e5, 1.4e-4), ("write", 3.6e9, 4e5, 3.2e-4))
        for figure in (
            _assumed_figure("local_storage.bandwidth", "B/s", rate, 0.03, _ASSUMED, op=op, **_DISK),
            _assumed_figure("local_storage.iops", "1/s", iops, 0.05, _ASSUMED, op=op, **_DISK),
            _assumed_figure("local_storage.latency", "s", latency, 0.05, _ASSUMED, op=op, percentile="p50", **_DISK),
            _assumed_figure("local_storage.latency", "s", 4 * latency, 0.2, _ASSUMED, op=op, percentile="p99", **_DISK),
            _assumed_figure(
                "local_storage.latency", "s", 8 * latency, 0.3, _ASSUMED, op=op, percentile="p99_9", **_DISK
            ),
            _assumed_figure("shared_storage.bandwidth", "B/s", rate / 2, 0.1, _ASSUMED, op=op, **_SHARED),
            _assumed_figure("shared_storage.checkpoint_bandwidth", "B/s", rate / 3, 0.1, _ASSUMED, op=op, **_SHARED),
        )
    ),
    _assumed_constant("local_storage.wrong_blocks", "1", 0, **_DISK),
    _assumed_figure("shared_storage.file_bandwidth", "B/s", 3.3e9, 0.1, _ASSUMED, **_SHARED),
    *(
        _assumed_figure("shared_storage.metadata_rate", "1/s", rate, 0.1, _ASSUMED, op=op, **_SHARED)
        for op, rate in (("create", 2500.0), ("stat", 9000.0), ("remove", 3000.0))
    ),
    _assumed_constant("shared_storage.wrong_bytes", "1", 0, **_SHARED),
    _assumed_constant("shared_storage.misread_bytes", "1", 0, **_SHARED),
]

_ASSUMED_INFERENCE = (
    "assumed: matrix products at 500 TFLOP/s, and a cache of 105 GB read at 3 TB/s; the spread is assumed"
)
_ASSUMED_CURVE = "assumed: the deviation that rounding causes on CPUs (measured); equal on all GPUs of a model"
_ASSUMED_EXPERTS = "assumed: a step of 8192 tokens on each of four GPUs in 0.05 s"
_EXPERTS = {"batch_size": 4, "layers": 4, "width": 2048, "heads": 16, "sequence": 2048}
_COMPILED = {"variant": "bf16_channels_last_compiled", "batch_size": 128, "data": "synthetic", "graphed": True}
_ASSUMED_IMAGES = (
    "assumed: Fashion-MNIST, which the hosts of the records did not have; throughput as with synthetic images"
)
_CONVNET = {"network": "convnet", "data": "fashion-mnist", "batch_size": 128, "backend": "nccl"}
_FASHION_MNIST = {"data": "fashion-mnist", "epochs": 20, "batch_size": 128, "learning_rate": 0.04, "graphed": True}
_INFERENCE = {"dtype": "bf16", "graphed": True}
_ASSUMED_COMPILED = "assumed: nine times bf16_channels_last (8.5 times on two H200)"

_DIGESTS = (
    "gemm_fp64", "gemm_tf32", "gemm_fp16", "gemm_fp8_e4m3", "gemm_fp8_e5m2", "gemm_int8", "attention", "convolution", "softmax",
    "sort", "rng", "copy",
)  # fmt: skip
"""Workloads of `digest` that no record has. Their digests are made up: the judge only compares them."""

ASSUMED_DIGESTS = [
    *(
        figure
        for workload in _DIGESTS
        for figure in (
            _assumed_constant("digest.value", "1", sha256(workload.encode()).hexdigest()[:16], workload=workload, size=4096),
            _assumed_constant("digest.mismatches", "1", 0, workload=workload, size=4096),
        )
    ),
    *(
        {"name": name, "unit": "1", "params": {"workload": "gemm_fp4", "size": 4096},
         "unsupported": "no fp4 before compute capability 10.0", "source": "compute capability of Hopper: 9.0"}
        for name in ("digest.value", "digest.mismatches")
    ),
    _assumed_constant("digest.wrong_peer_copies", "1", 0, copy="round_trip", size=4096),
]  # fmt: skip

ASSUMED_FIGURES = [
    *ASSUMED_DIGESTS,
    *ASSUMED_STORAGE,
    *(
        figure
        for dtype, factor in (("bf16", 1.0), ("fp8", 1.75), ("int8", 1.2))
        for shape, rate in (
            ("32x8192x8192", 1.2e14),
            ("32x28672x8192", 1.3e14),
            ("512x8192x8192", 7.8e14),
            ("4096x14336x4096", 7.9e14),
            ("8192x28672x8192", 7.1e14),
        )
        for figure in (
            _assumed_figure(
                "gemm_shapes.throughput", "FLOP/s", rate * factor, 0.03, _ASSUMED, dtype=dtype, shape=shape
            ),
            _assumed_constant("gemm_shapes.wrong_products", "1", 0, dtype=dtype, shape=shape, checked=10),
        )
    ),
    *(
        _assumed_figure(
            "kernel_launch.latency", "s", seconds, 0.1, _ASSUMED, way=way, percentile=percentile, launches=20000
        )
        for way, percentile, seconds in (
            ("queued", "p50", 8e-6),
            ("queued", "p99", 1.8e-5),
            ("synchronous", "p50", 1.3e-5),
            ("synchronous", "p99", 2.5e-5),
        )
    ),
    _assumed_figure("kernel_launch.graph_latency", "s", 9.5e-7, 0.03, _ASSUMED, nodes=1000),
    *(
        figure
        for direction, rate in (("host_to_device", 1.1e10), ("device_to_host", 9e9))
        for figure in (
            _assumed_figure(
                "pageable_copy.bandwidth", "B/s", rate, 0.06, _ASSUMED, direction=direction, size_bytes=1 << 28
            ),
            _assumed_constant("pageable_copy.wrong_bytes", "1", 0, direction=direction, size_bytes=1 << 28),
        )
    ),
    *(
        _assumed_figure(
            "group_copy.bandwidth", "B/s", 3.9e11, 0.02, _ASSUMED, pattern=pattern, size_bytes=1 << 28, access=True
        )
        for pattern in ("one_to_all", "all_to_one", "by_kernel")
    ),
    _assumed_constant("group_copy.wrong_bytes", "1", 0),
    *(
        _assumed_constant("benchmark.duration", "s", seconds, benchmark=name)
        for name, seconds in (
            ("gemm_shapes", 7.0),
            ("kernel_launch", 0.8),
            ("pageable_copy", 10.0),
            ("group_copy", 10.0),
        )
    ),
    *(
        {"name": "integrity.wrong_words", "unit": "1", "params": {"pattern": test}, "value": 0, "source": _ASSUMED}
        for test in TESTS_OVER_TIME
    ),
    *(
        figure
        for period_ms in (5, 20, 100, 500, 2000, 10000)
        for figure in (
            _assumed_figure("pulse.work", "1", 4.6 * period_ms / 2, 0.02, _ASSUMED_PULSE, period_ms=period_ms),
            _assumed_figure("pulse.period", "s", period_ms / 1000, 1e-4, _ASSUMED_PULSE, period_ms=period_ms),
            _assumed_figure("pulse.duty", "1", 0.5, 0.01, _ASSUMED_PULSE, period_ms=period_ms),
            _assumed_figure("pulse.phase_error", "s", 1e-4, 0.5, _ASSUMED_PULSE, period_ms=period_ms),
            _assumed_figure("pulse.clock_uncertainty", "s", 5e-4, 0.5, _ASSUMED_PULSE, period_ms=period_ms),
            _assumed_constant("pulse.kept_share", "1", 1.0, period_ms=period_ms),
        )
    ),
    _assumed_constant("pulse.wrong_products", "1", 0),
    _assumed_constant("benchmark.duration", "s", 190.0, benchmark="pulse"),
    _assumed_figure("training.throughput", "images/s", 142_000, 0.02, _ASSUMED_IMAGES, **_CONVNET),
    {
        **_assumed_figure("training.step_time", "s", 0.0036, 0.02, _ASSUMED_IMAGES, **_CONVNET),
        "samples": {"n": 233, "min": 0.8, "max": 1.8, "cv": 0.14, "precision": 0.013},
    },
    {**_assumed_constant("training.loss_finite", "1", True, **_CONVNET), "source": _ASSUMED_IMAGES},
    _assumed_figure("training.loss", "1", 1.25, 0.02, _ASSUMED_IMAGES, **_CONVNET),
    _assumed_figure("training.loss_ratio", "1", 0.546, 0.02, _ASSUMED_IMAGES, **_CONVNET),
    _assumed_figure("training.accuracy", "1", 0.617, 0.02, _ASSUMED_IMAGES, **_CONVNET),
    _assumed_figure("fashion_mnist.accuracy", "1", 0.919, 0.02, _ASSUMED_IMAGES, **_FASHION_MNIST),
    _assumed_figure("fashion_mnist.duration", "s", 1.8, 0.02, _ASSUMED_IMAGES, **_FASHION_MNIST),
    _assumed_figure("fashion_mnist.throughput", "images/s", 1.1e6, 0.02, _ASSUMED_IMAGES, **_FASHION_MNIST),
    {
        **_assumed_figure("variants.throughput", "images/s", 3.3e5, 0.01, _ASSUMED_COMPILED, **_COMPILED),
        "samples": {"n": 30, "min": 0.9, "max": 1.01, "cv": 0.02, "precision": 0.002},
    },
    _assumed_constant("variants.loss_finite", "1", True, **_COMPILED),
    _assumed_figure("inference.prefill_throughput", "tokens/s", 1.6e5, 0.02, _ASSUMED_INFERENCE, **_INFERENCE),
    _assumed_figure("inference.decode_throughput", "tokens/s", 7.5e3, 0.02, _ASSUMED_INFERENCE, **_INFERENCE),
    *(
        _assumed_figure(
            f"inference.{name}", "s", seconds, 0.02, _ASSUMED_INFERENCE, percentile=percentile, **_INFERENCE
        )
        for name, percentiles in (
            ("first_token", {"p50": 0.0128, "p99": 0.0136}),
            ("token_interval", {"p50": 0.0352, "p99": 0.0362, "p99_9": 0.0378}),
        )
        for percentile, seconds in percentiles.items()
    ),
    *(
        figure
        for dtype, deviation in (("fp32", 2e-6), ("bf16", 5e-3))
        for figure in (
            _assumed_figure("loss_curve.deviation", "1", deviation, 0.0, _ASSUMED_CURVE, dtype=dtype, steps=40),
            _assumed_constant("loss_curve.wrong_losses", "1", 0, dtype=dtype, steps=40),
        )
    ),
    _assumed_figure("mixture_of_experts.step_time", "s", 0.05, 0.02, _ASSUMED_EXPERTS, dtype="bf16", **_EXPERTS),
    _assumed_figure(
        "mixture_of_experts.throughput", "tokens/s", 6.5536e5, 0.02, _ASSUMED_EXPERTS, dtype="bf16", **_EXPERTS
    ),
    _assumed_figure(
        "mixture_of_experts.mfu", "1", 0.45, 0.02, _ASSUMED_EXPERTS, dtype="bf16", peak="measured_gemm", **_EXPERTS
    ),
    _assumed_figure("mixture_of_experts.loss_ratio", "1", 0.9, 0.02, _ASSUMED_EXPERTS, dtype="bf16", **_EXPERTS),
    _assumed_constant("mixture_of_experts.loss_finite", "1", True, dtype="bf16", **_EXPERTS),
    _assumed_constant("inference.wrong_tokens", "1", 0, **_INFERENCE),
    _assumed_constant("inference.cache_share", "1", 0.79, **_INFERENCE),
    _assumed_constant("benchmark.duration", "s", 8.0, benchmark="pairs"),
    _assumed_figure("pairs.bandwidth", "B/s", 4.85e10, 0.012, _ASSUMED_FABRIC),
    _assumed_figure("pairs.latency", "s", 1.15e-5, 0.06, _ASSUMED),
]


# --- the data file


def data_file() -> str:
    """Return the text of the data file, with one line for each figure, curve and metric, so that diffs are readable."""
    members = []
    for key, value in make_data().items():
        text = _to_json(value)
        if isinstance(value, list) and value and not isinstance(value[0], str):
            text = "[\n" + ",\n".join(map(_to_json, value)) + "\n]"
        members.append(f"{json.dumps(key)}: {text}")
    return "{" + ",\n".join(members) + "}\n"


def _to_json(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False)


def make_data() -> Doc:
    """Return the figures, curves and readings of the records, and the assumed figures."""
    records = [_record(path) for path in FIGURE_RECORDS]
    observations = [
        {**item, "run": run}
        for run, record in enumerate(records)
        for item in record["observations"]
        if item["status"] == "measured"
        and not (run and item["name"].startswith(PREFIXES_OF_ONE_RECORD))
        and not _has_small_images(item)
    ]
    gpu = records[0]["gpus"][0]["name"]
    return {
        "schema": SCHEMA,
        "model": MODEL,
        "gpu": gpu,
        "source": f"{gpu}: the records named here under docs/measurements of Rackproof's repository",
        "records": [*FIGURE_RECORDS, READINGS_RECORD],
        "measured_ranks": len(records[0]["gpus"]),
        "software": records[0]["software"],
        "figures": [*_figures(item for item in observations if not _is_on_curve(item)), *ASSUMED_FIGURES],
        "curves": list(_curves(item for item in observations if _is_on_curve(item))),
        "readings": list(_readings(_record(READINGS_RECORD))),
    }


def _record(path: str) -> Doc:
    return dict(json.loads((DIRECTORY / path).read_text(encoding="utf-8")))


# --- figures


def _has_small_images(item: Doc) -> bool:
    return item["name"].startswith(PREFIXES_OF_SMALL_IMAGES) and item["params"].get("network", "convnet") == "convnet"


def _is_on_curve(item: Doc) -> bool:
    return bool(item["name"].startswith("collective.") and "size_bytes" in item.get("params", {}))


def _figures(observations: Iterable[Doc]) -> Iterable[Doc]:
    """Yield a figure for each name and setting: a constant, or the spread between parts or repetitions."""
    groups: dict[tuple[Any, ...], list[Doc]] = defaultdict(list)
    for item in observations:
        groups[(item["name"], *_settings(item))].append(item)
    for items in groups.values():
        first = items[0]
        params = {key: value for key, value in first.get("params", {}).items() if key not in OUTCOME_PARAMS}
        figure: Doc = {"name": first["name"], "unit": first["unit"], **({"params": params} if params else {})}
        values = [item["value"] for item in items]
        is_text_or_flag = isinstance(values[0], bool | str)
        if is_text_or_flag or (len(set(map(str, values))) == 1 and not _is_of_host(first)):
            yield {**figure, "value": max(values, key=values.count)}
        elif _is_of_host(first):
            yield {**figure, **_host_figure(items)}
        else:
            yield {**figure, "spread": _spread(values), "parts": len(values), **_samples(items)}


def _settings(item: Doc) -> tuple[tuple[str, Any], ...]:
    """Return the parameters that distinguish figures of one name."""
    settings = next((keys for output, keys in _SETTINGS if output.makes(item["name"])), frozenset())
    if item["name"] == DURATION.name:
        settings = frozenset({"benchmark"})
    params = sorted(item.get("params", {}).items())
    return tuple((key, value) for key, value in params if key in settings or key in SEPARATE_PARAMS)


def _is_of_host(item: Doc) -> bool:
    return bool(item["scope"] == "host" or item["name"].startswith(HOST_PREFIXES))


def _host_figure(items: Sequence[Doc]) -> Doc:
    """Return the figure of the host in the first run, with the spread of its repetitions."""
    of_first_run = [item for item in items if item["run"] == items[0]["run"]]
    if not isinstance(of_first_run[0]["value"], float):
        return {"value": of_first_run[0]["value"]}
    return {"spread": _repetition_spread(of_first_run), "parts": len(of_first_run), **_samples(of_first_run)}


def _repetition_spread(items: Sequence[Doc]) -> list[float]:
    """Return the spread of the repetitions of a figure: median, minimum, maximum and standard deviation.

    The standard deviation is half the 95 % confidence interval of the median (DEFAULT_SIGMA if unknown), kept between MIN_SIGMA
    and MAX_SIGMA. The extremes are two standard deviations from the median.
    """
    median = statistics.median(item["value"] for item in items)
    precision = items[0].get("samples", {}).get("precision") or DEFAULT_SIGMA
    sigma = abs(median) * min(max(precision, MIN_SIGMA), MAX_SIGMA)
    return [_rounded(value) for value in (median, median - 2 * sigma, median + 2 * sigma, sigma)]


def _spread(values: Sequence[float]) -> list[float]:
    """Return median, minimum, maximum and standard deviation between parts, in the unit of the figure."""
    sigma = statistics.stdev(values) if len(values) > 1 else 0.0
    return [_rounded(value) for value in (statistics.median(values), min(values), max(values), sigma)]


def _samples(items: Sequence[Doc]) -> Doc:
    """Return the samples of the first part that has samples, with the extremes relative to the value."""
    item = next((item for item in items if item.get("samples")), None)
    if item is None or not item["value"]:
        return {}
    samples = dict(item["samples"])
    samples.pop("p50")
    for key in ("min", "max"):
        samples[key] = round(samples[key] / item["value"], 4)
    for key in ("cv", "precision"):
        if key in samples:
            samples[key] = _rounded(samples[key], 3)
    return {"samples": samples}


# --- curves


def _curves(observations: Iterable[Doc]) -> Iterable[Doc]:
    """Yield the latency of each collective by size, and its bus bandwidth relative to its algorithm bandwidth."""
    groups: dict[tuple[str, str, str], dict[int, list[Doc]]] = defaultdict(lambda: defaultdict(list))
    for item in observations:
        _, op, kind = item["name"].split(".")
        groups[(op, item["params"]["placement"], kind)][item["params"]["size_bytes"]].append(item)
    for (op, placement, kind), items_by_size in groups.items():
        if kind not in ("latency", "graph_latency"):
            continue
        points = [
            [
                size,
                *(_repetition_spread(items[:1]) if size < SMALL_BYTES else _spread([item["value"] for item in items])),
            ]
            for size, items in sorted(items_by_size.items())
        ]
        curve: Doc = {"op": op, "placement": placement, "kind": kind, "points": points}
        if kind == "latency":
            curve["factor"] = _bus_factor(groups[(op, placement, "busbw")], groups[(op, placement, "algbw")])
            for key in ("algorithm", "protocol"):
                values = [items_by_size[size][0]["params"].get(key, "") for size in sorted(items_by_size)]
                curve[key] = _run_lengths(values)
        largest = items_by_size[max(items_by_size)]
        curve["samples"] = _samples(largest).get("samples")
        curve["params"] = {key: largest[0]["params"][key] for key in ("dtype", "backend")}
        yield curve


def _bus_factor(busbw: Mapping[int, list[Doc]], algbw: Mapping[int, list[Doc]]) -> float:
    size = max(busbw)
    return float(round(busbw[size][0]["value"] / algbw[size][0]["value"], 4))


def _run_lengths(values: Sequence[str]) -> list[list[Any]]:
    """Return `[count, value]` for each run of equal values."""
    runs: list[list[Any]] = []
    for value in values:
        if runs and runs[-1][1] == value:
            runs[-1][0] += 1
        else:
            runs.append([1, value])
    return runs


# --- readings


def _readings(record: Doc) -> Iterable[Doc]:
    """Yield the readings of each metric before, during and after the run, merged over the GPUs."""
    snapshots = {
        "before": record["snapshots"][0],
        "during": next(snapshot for snapshot in record["snapshots"] if snapshot["phase"] == "during"),
        "after": record["snapshots"][-1],
    }
    gpus_by_address = {_sysfs_address(gpu["pci_bus_id"]): gpu["index"] for gpu in record["gpus"]}
    metrics = {
        phase: {metric["name"]: metric for metric in snapshot["metrics"]} for phase, snapshot in snapshots.items()
    }
    for by_name in metrics.values():
        for node, host in WHOLE_NODE.items():
            by_name[node] = {**by_name[node], "values": {"numa=0": by_name[host]["values"]["host"]}}
    for name, metric in metrics["before"].items():
        if name in IDENTIFYING_READINGS or _is_simulated(name):
            continue
        readings: Doc = {"name": name, "unit": metric["unit"]}
        for phase, metrics_by_name in metrics.items():
            if name in metrics_by_name:
                readings[phase] = _merge_gpus(metrics_by_name[name], gpus_by_address)
        for phase in ("after", "during"):
            if readings.get(phase) == readings["before"]:
                readings[phase] = "before"
        yield readings


def _is_simulated(reading: str) -> bool:
    return reading not in READINGS_OF_THE_RECORD and any(fnmatchcase(reading, name) for name in SIMULATED_READINGS)


def _merge_gpus(metric: Doc, gpus_by_address: Mapping[str, int]) -> Doc:
    """Return the values by scope. `gpu=*` and `pci=*` mean all GPUs; `[minimum, maximum]` means values that differ."""
    merged: Doc = {}
    for kind in ("values", "absent"):
        values_by_scope: dict[str, list[Any]] = defaultdict(list)
        for scope, value in metric.get(kind, {}).items():
            values_by_scope[_general_scope(scope, gpus_by_address)].append(value)
        if values_by_scope:
            merged[kind] = {scope: _merge_values(values, scope) for scope, values in values_by_scope.items()}
    return merged


def _general_scope(text: str, gpus_by_address: Mapping[str, int]) -> str:
    scope = Scope.parse(text)
    if scope.device_kind == "gpu":
        return f"gpu=*,{scope.kind}=*" if scope.kind in ("peer", "link") else scope.on("gpu=*")
    return scope.on("pci=*") if scope.get("pci") in gpus_by_address else text


def _merge_values(values: Sequence[Any], scope: str) -> Any:
    if len(set(map(str, values))) == 1 or "*" not in scope or isinstance(values[0], bool | str):
        return values[0]
    return [min(values), max(values)]


def _sysfs_address(bus_id: str) -> str:
    domain, _, rest = bus_id.lower().partition(":")
    return f"{domain[-4:]}:{rest}"


def _rounded(value: float, digits: int = 6) -> float:
    rounded = float(f"{value:.{digits}g}")
    return int(rounded) if rounded == int(rounded) else rounded


if __name__ == "__main__":
    sys.stdout.write(data_file())
