"""Figures of a stage as series: the newest of each, from what its ranks have left so far or the record has."""

from __future__ import annotations

import contextlib
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from agent.exporter.metric_names import BENCHMARK, label_name
from schemas import documents
from schemas.records import MEASURED
from schemas.scopes import Scope

MOST_FIGURES = 512
"""Of one stage."""
WRONG = re.compile(r"\.(wrong_\w+|mismatches)$")
LABELS = {spec.name: tuple(label_name(label) for label in spec.labels) for spec in BENCHMARK}

Json = dict[str, Any]
Sample = tuple[str, dict[str, str], float]
"""Metric, labels and value."""


class Results:
    """What one rank has left so far; read again only where it has changed."""

    def __init__(self, work: Path, rank: int) -> None:
        self._files = {kind: work / f"rank{rank}{kind}.json" for kind in ("", ".now")}
        self._known: dict[str, tuple[object, list[Json]]] = {}

    def read(self) -> list[Json]:
        """Its observations."""
        return self._of("")

    def now(self) -> list[Json]:
        """What it tells of a training that goes on."""
        return self._of(".now")

    def _of(self, kind: str) -> list[Json]:
        path = self._files[kind]
        with contextlib.suppress(OSError):
            found = path.stat()
            mark = (found.st_mtime_ns, found.st_size, found.st_ino)
            if self._known.get(kind, (None,))[0] != mark:
                self._known[kind] = (mark, _observations(path))
        return self._known.get(kind, (None, []))[1]


def _observations(path: Path) -> list[Json]:
    """Those that have the parts they need. Not checked by the schema, which takes seconds of a processor for a large file."""
    with contextlib.suppress(documents.DocumentError, KeyError, TypeError):
        every = documents.parse(path.read_bytes(), source=path.name)["observations"]
        return [item for item in every if _sound(item)]
    return []


def _sound(item: Any) -> bool:
    texts = isinstance(item, dict) and all(
        isinstance(item.get(key), str) for key in ("name", "scope", "status", "unit")
    )
    params = item.get("params", {}) if texts else None
    return isinstance(params, dict) and isinstance(params.get("size_bytes", 0), int)


def fold(seen: Iterable[Json], now: Iterable[Json] = ()) -> tuple[list[Json], int]:
    """The newest figure of each series, and how many there were beyond MOST_FIGURES.

    Args:
        seen: observations.
        now: what is told of a training that goes on, where nothing final is known yet.
    """
    series: dict[tuple[str, tuple[tuple[str, str], ...]], float] = {}
    counts: defaultdict[tuple[str, tuple[tuple[str, str], ...]], float] = defaultdict(float)
    largest: dict[tuple[str, str], int] = {}
    for item in [*now, *seen]:
        for metric, labels, value in _counts(item):
            counts[metric, tuple(labels.items())] += value
        for metric, labels, value in _figures(item):
            if "size_bytes" in labels:  # of each operation the largest size
                key = (labels.get("op", ""), labels.get("placement", ""))
                if int(labels["size_bytes"]) < largest.get(key, 0):
                    continue
                for old in [old for old in series if old[0] == metric and key == _operation(dict(old[1]))]:
                    del series[old]
                largest[key] = int(labels["size_bytes"])
            series[metric, tuple(labels.items())] = value
    every = [*counts.items(), *series.items()]
    figures = [
        {"metric": metric, "labels": dict(labels), "value": value} for (metric, labels), value in every[:MOST_FIGURES]
    ]
    return figures, len(every) - len(figures)


def _operation(labels: Mapping[str, str]) -> tuple[str, str]:
    return labels.get("op", ""), labels.get("placement", "")


def _counts(item: Json) -> Iterator[Sample]:
    """What is added up over a stage: results found wrong, observations that could not be made."""
    benchmark, value = item["name"].split(".")[0], item.get("value")
    if item["status"] != MEASURED:
        yield "rackproof_benchmark_unmeasured", {"benchmark": benchmark, "status": item["status"][:16]}, 1
    elif WRONG.search(item["name"]) and isinstance(value, int | float):
        yield "rackproof_benchmark_wrong_results", {"benchmark": benchmark, **_device(item["scope"])}, value


def _figures(item: Json) -> Iterator[Sample]:
    """The observation as a series; nothing where it is none of those that are told while a stage runs."""
    name, value, params = item["name"], item.get("value"), item.get("params", {})
    benchmark, _, what = name.partition(".")
    metric = _metric(what, item["unit"])
    pair = item["scope"].count("=") > 1
    if item["status"] != MEASURED or not metric or pair or isinstance(value, bool | str | None):
        return
    if metric.endswith("duration_seconds"):
        benchmark = str(params.get("benchmark", ""))
    known = {"op": what.split(".")[0]} if "." in what else {}
    known |= {"item": item["unit"].partition("/")[0]} if metric.endswith("items_per_second") else {}
    known |= {key: str(params[key])[:64] for key in LABELS[metric] if key in params and key != "benchmark"}
    yield metric, {"benchmark": benchmark, **_device(item["scope"]), **known}, value


def _metric(what: str, unit: str) -> str:
    """The metric of an observation, by the last part of its name and its unit; empty: none."""
    last = what.rpartition(".")[2]
    by_unit = {"FLOP/s": "flop_per_second", "images/s": "items_per_second", "tokens/s": "items_per_second"}
    by_name = {
        "busbw": "bus_bandwidth_bytes_per_second",
        "bandwidth": "bandwidth_bytes_per_second",
        "step_time": "step_time_seconds",
        "loss": "loss",
        "accuracy": "accuracy_ratio",
        "mfu": "mfu_ratio",
        "duration": "duration_seconds",
    }
    found = by_unit.get(unit) or by_name.get(last)
    return f"rackproof_benchmark_{found}" if found else ""


def _device(scope: str) -> dict[str, str]:
    parsed = Scope.parse(scope)
    return {parsed.device_kind: parsed.get(parsed.device_kind)} if parsed.device_kind in ("gpu", "cpu") else {}
