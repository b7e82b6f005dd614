"""Convert the file `runs/live.json` in the state directory, which describes this host's latest run, to Prometheus families."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from prometheus_client import Metric
from prometheus_client.core import InfoMetricFamily

from agent.exporter.live import FILE, SILENT_S
from agent.exporter.metric_names import BENCHMARK, EVERY, GAUGE, RUN
from agent.run.lease import RUNS
from schemas import documents
from schemas.scopes import Scope
from schemas.stages import STATES

LINGER_S = 300.0
"""Figures of a stage are exported for this long after its end, so that the last figures are scraped too."""
LASTING = frozenset({"rackproof_benchmark_wrong_results", "rackproof_benchmark_unmeasured"})
"""Families that are exported until another run starts on this host, because the faults that they report outlast the stage."""
MAX_BYTES = 2_000_000


class RunSource:
    """Reads `live.json`. Before its first run, a host has no such file. Then there are no families, and this is not a failure."""

    name = "run"

    def __init__(self, state_directory: Path) -> None:
        self._path = state_directory / RUNS / FILE
        self._version: object = None
        self._document: Mapping[str, Any] = {}

    def collect(self) -> Iterable[Metric]:
        """Return every family of the run; empty if the file does not exist.

        Raises:
            OSError, DocumentError: the file exists but cannot be read or is invalid.
        """
        try:
            status = self._path.stat()
        except FileNotFoundError:
            return []
        version = (status.st_mtime_ns, status.st_size, status.st_ino)
        if version != self._version:
            self._document = documents.read(self._path, "live", max_bytes=MAX_BYTES)
            self._version = version
        return families(self._document, time.time())


def families(live: Mapping[str, Any], now: float) -> list[Metric]:
    """Return the families of the document `live.json`. `now` is the current time, in seconds since 1970."""
    run, written = live["run"], live["written"]
    metrics = {spec.name: Metric(spec.name, spec.help, GAUGE) for spec in (*RUN, *BENCHMARK) if spec.kind == GAUGE}

    def add(name: str, value: float, **labels: str) -> None:
        metrics[name].add_sample(name, labels, float(value))

    add("rackproof_run_started_timestamp_seconds", run["began"])
    add("rackproof_run_updated_timestamp_seconds", written)
    for stage in live["stages"]:
        silent = stage["state"] == "running" and now - written > SILENT_S
        for name, labels, value in _stage_samples(stage, "silent" if silent else stage["state"]):
            add(name, value, stage=stage["name"], **labels)
        if stage["state"] == "running" and not silent:
            for name, labels, value in _rank_samples(stage, max(0.0, now - written)):
                add(name, value, **labels)
        current = stage["state"] == "running" or now - stage.get("ended", 0.0) < LINGER_S
        for figure in stage.get("figures", ()):
            if figure["metric"] in metrics and (current or figure["metric"] in LASTING):
                add(figure["metric"], figure["value"], stage=stage["name"], **figure["labels"])
        if current:
            add("rackproof_benchmark_series_left_out", stage.get("left_out", 0), stage=stage["name"])
    return [_info(run), *(metric for metric in metrics.values() if metric.samples)]


def _info(run: Mapping[str, Any]) -> Metric:
    spec = EVERY["rackproof_run_info"]
    info = InfoMetricFamily(spec.name.removesuffix("_info"), spec.help)
    values = {key: str(run[key]).lower() if key == "rehearsal" else str(run[key]) for key in spec.labels}
    info.add_sample(spec.name, values, 1.0)
    return info


Sample = tuple[str, dict[str, str], float]


def _stage_samples(stage: Mapping[str, Any], state: str) -> Iterator[Sample]:
    for each in STATES:
        yield "rackproof_stage_state", {"state": each}, each == state
    for key, name in (
        ("began", "started"),
        ("deadline", "deadline"),
        ("expected_end", "expected_end"),
        ("ended", "ended"),
    ):
        if key in stage:
            yield f"rackproof_stage_{name}_timestamp_seconds", {}, stage[key]
    if "progress" in stage:
        yield "rackproof_stage_progress_ratio", {}, stage["progress"]
    for outcome, times in stage.get("attempts", {}).items():
        yield "rackproof_stage_finished", {"outcome": outcome}, times
    if state == "running":
        for benchmark, ranks in Counter(rank["at"] for rank in stage.get("ranks", ())).items():
            yield "rackproof_stage_ranks", {"benchmark": benchmark}, ranks


def _rank_samples(stage: Mapping[str, Any], age: float) -> Iterator[Sample]:
    for rank in stage.get("ranks", ()):
        labels = {"rank": str(rank["rank"]), **Scope.parse(rank["scope"]).labels}
        yield "rackproof_rank_silent_seconds", labels, rank["silent_s"] + age
        waiting = rank["waiting_s"]
        yield "rackproof_rank_waiting_seconds", labels, waiting + age if waiting else 0.0
