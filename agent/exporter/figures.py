"""Convert the observations of a stage to Prometheus series. A figure is one series with its value."""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from agent.exporter.metric_names import BENCHMARK, label_name
from schemas import documents
from schemas.catalogue import counts_wrong_results
from schemas.records import MEASURED
from schemas.scopes import Scope

MAX_FIGURES = 512
"""Maximum number of series per stage."""
LABELS = {spec.name: tuple(label_name(label) for label in spec.labels) for spec in BENCHMARK}
"""Metric -> names of its labels."""

Json = dict[str, Any]
Sample = tuple[str, dict[str, str], float]
"""Metric, labels and value."""
Series = tuple[str, tuple[tuple[str, str], ...]]
"""Metric and labels."""


class RankFiles:
    """The result files of one rank. A file is read again only if it has changed. After its removal, its last content is used."""

    def __init__(self, work: Path, rank: int) -> None:
        self._results = work / f"rank{rank}.json"
        self._training = work / f"rank{rank}.now.json"
        self._cache: dict[Path, tuple[object, list[Json]]] = {}

    def observations(self) -> list[Json]:
        """Return the observations that the rank has written so far; empty if it has written no valid file."""
        return self._read(self._results)

    def training_progress(self) -> list[Json]:
        """Return the observations that the rank last wrote during a training; empty if it has written none."""
        return self._read(self._training)

    def _read(self, path: Path) -> list[Json]:
        with contextlib.suppress(OSError):
            status = path.stat()
            version = (status.st_mtime_ns, status.st_size, status.st_ino)
            if self._cache.get(path, (None,))[0] != version:
                self._cache[path] = (version, _read_observations(path))
        return self._cache.get(path, (None, []))[1]


def _read_observations(path: Path) -> list[Json]:
    """Return the usable observations of a result file; empty if it cannot be read.

    The schema is not used, because validating a large file takes seconds of CPU time.
    """
    with contextlib.suppress(documents.DocumentError, KeyError, TypeError):
        observations = documents.parse(path.read_bytes(), source=path.name)["observations"]
        return [item for item in observations if _is_usable(item)]
    return []


def _is_usable(item: Any) -> bool:
    """Return whether an item has the keys that this module reads, with values of the right types."""
    keys = ("name", "scope", "status", "unit")
    texts = isinstance(item, dict) and all(isinstance(item.get(key), str) for key in keys)
    params = item.get("params", {}) if texts else None
    return isinstance(params, dict) and isinstance(params.get("size_bytes", 0), int)


def newest_figures(observations: Iterable[Json], training: Iterable[Json] = ()) -> tuple[list[Json], int]:
    """Return the metric, labels and value of at most MAX_FIGURES series, and the number of series that are left out.

    Wrong results are summed, and observations without a value are counted. Any other series has the value of its newest
    observation. A collective operation has a series for its largest message size only.

    Args:
        observations: in order of time.
        training: rates that ranks wrote during a training. If a series is in both, the value from `observations` is used.
    """
    series: dict[Series, float] = {}
    counts: defaultdict[Series, float] = defaultdict(float)
    largest: dict[Series, int] = {}
    observations = list(observations)
    for item in observations:
        for metric, labels, value in _counts(item):
            counts[metric, tuple(labels.items())] += value
    for item in [*training, *observations]:
        for metric, labels, value in _figures(item):
            if "size_bytes" in labels and not _drop_smaller_sizes(series, largest, metric, labels):
                continue
            series[metric, tuple(labels.items())] = value
    every = [*counts.items(), *series.items()]
    figures = [
        {"metric": metric, "labels": dict(labels), "value": value} for (metric, labels), value in every[:MAX_FIGURES]
    ]
    return figures, len(every) - len(figures)


def _drop_smaller_sizes(
    series: dict[Series, float], largest: dict[Series, int], metric: str, labels: Mapping[str, str]
) -> bool:
    """Prepare `series` for a new series with these labels; return False if the new series must not be added.

    It must not be added if the same operation already has a series with a larger size. Otherwise, the series that the operation
    has so far are removed. Series belong to the same operation if their metric and all labels other than `size_bytes` are equal.
    """
    operation, size = _without_size(metric, labels), int(labels["size_bytes"])
    if size < largest.get(operation, 0):
        return False
    for key in [key for key in series if key[0] == metric and _without_size(metric, dict(key[1])) == operation]:
        del series[key]
    largest[operation] = size
    return True


def _without_size(metric: str, labels: Mapping[str, str]) -> Series:
    return metric, tuple(item for item in labels.items() if item[0] != "size_bytes")


def _counts(item: Json) -> Iterator[Sample]:
    """Yield the counts that are summed over a stage: wrong results, and observations without a value."""
    benchmark, value = item["name"].split(".")[0], item.get("value")
    if item["status"] != MEASURED:
        yield "rackproof_benchmark_unmeasured", {"benchmark": benchmark, "status": item["status"][:16]}, 1
    elif counts_wrong_results(item["name"]) and isinstance(value, int | float):
        yield "rackproof_benchmark_wrong_results", {"benchmark": benchmark, **_device(item["scope"])}, value


def _figures(item: Json) -> Iterator[Sample]:
    """Yield the observation as a sample.

    Yield nothing if its value is not a measured number, if neither its unit nor its name has a metric, or if its scope has
    more than one label (a pair of GPUs).
    """
    name, value, params = item["name"], item.get("value"), item.get("params", {})
    benchmark, _, quantity = name.partition(".")
    metric = _metric(quantity, item["unit"])
    is_pair = item["scope"].count("=") > 1
    if item["status"] != MEASURED or not metric or is_pair or isinstance(value, bool | str | None):
        return
    if metric.endswith("duration_seconds"):
        benchmark = str(params.get("benchmark", ""))
    labels = {"op": quantity.split(".")[0]} if "." in quantity else {}
    labels |= {"item": item["unit"].partition("/")[0]} if metric.endswith("items_per_second") else {}
    labels |= {"phase": phase} if (phase := quantity.removesuffix("_throughput")) != quantity else {}
    labels |= {key: str(params[key])[:64] for key in LABELS[metric] if key in params and key != "benchmark"}
    yield metric, {"benchmark": benchmark, **_device(item["scope"]), **labels}, value


METRIC_BY_UNIT = {"FLOP/s": "flop_per_second", "images/s": "items_per_second", "tokens/s": "items_per_second"}
"""Unit of an observation -> metric, without the prefix `rackproof_benchmark_`. This takes precedence over METRIC_BY_NAME."""
METRIC_BY_NAME = {
    "busbw": "bus_bandwidth_bytes_per_second",
    "bandwidth": "bandwidth_bytes_per_second",
    "step_time": "step_time_seconds",
    "loss": "loss",
    "accuracy": "accuracy_ratio",
    "mfu": "mfu_ratio",
    "duration": "duration_seconds",
}
"""Last part of an observation's name -> metric, without the prefix `rackproof_benchmark_`."""


def _metric(quantity: str, unit: str) -> str:
    """Return the metric of an observation; empty if it has none."""
    metric = METRIC_BY_UNIT.get(unit) or METRIC_BY_NAME.get(quantity.rpartition(".")[2])
    return f"rackproof_benchmark_{metric}" if metric else ""


LABEL_OF_DEVICE = {"gpu": "gpu", "cpu": "cpu", "directory": "directory", "numa": "numa_node"}
"""Device kind of a scope -> label of its series. The label of a NUMA node is not `numa`, because the benchmark of host copies has
a parameter `numa` with another meaning: whether the host memory is local to the GPU."""


def _device(scope: str) -> dict[str, str]:
    parsed = Scope.parse(scope)
    label = LABEL_OF_DEVICE.get(parsed.device_kind)
    return {label: parsed.get(parsed.device_kind)} if label else {}
