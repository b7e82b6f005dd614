"""The collectors' families -> /metrics, while a run goes on."""

from __future__ import annotations

import re
import threading
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily, Metric

from agent.dcgm_names import renamed
from agent.snapshot import Reading, collect
from agent.web import Server
from agent.web_config import WebConfig
from collectors.base import IDENTITY, Absent, Collector, Family, Labels

PREFIX = "rackproof_"
SUFFIX = {
    "1": "",
    "ratio": "_ratio",
    "Cel": "_celsius",
    "W": "_watts",
    "J": "_joules",
    "Hz": "_hertz",
    "B": "_bytes",
    "B/s": "_bytes_per_second",
    "s": "_seconds",
}
"""SI unit in the record -> Prometheus' base unit in the name."""
NAMES = {"dcgm": renamed}
"""Exporters whose names are given beside our own where asked for."""
SCRAPE_DEADLINE_S = 8.0
"""Under Prometheus' default scrape time-out of 10 s."""


class Exporter:
    """A prometheus_client collector over ours. A reading that cannot be had is left out, and counted as absent."""

    def __init__(self, collectors: Sequence[Collector], compat: str | None = None) -> None:
        """`compat` adds the names of another exporter, one of NAMES."""
        self._collectors = collectors
        self._compat = NAMES.get(compat or "")
        self._one_at_a_time = threading.Lock()
        self._stuck: dict[str, Reading] = {}
        self._answered: dict[str, float] = {}

    def collect(self) -> Iterator[Metric]:
        """Every family as Prometheus sees it, and how each collector fared."""
        with self._one_at_a_time:
            families, outcome = collect(self._collectors, SCRAPE_DEADLINE_S, self._stuck)
        yield from metrics(families)
        if self._compat:
            yield from self._compat(families)
        yield _absences(families)
        success = GaugeMetricFamily(
            f"{PREFIX}collector_success", "1 where the collector answered", labels=["collector"]
        )
        duration = GaugeMetricFamily(
            f"{PREFIX}collector_duration_seconds", "How long the collector took", labels=["collector"]
        )
        for name, result in outcome.items():
            answered = not isinstance(result, str)
            success.add_metric([name], float(answered))
            if answered:
                duration.add_metric([name], float(result))
                self._answered[name] = time.time()
        last = GaugeMetricFamily(
            f"{PREFIX}collector_last_success_timestamp_seconds",
            "When the collector last answered",
            labels=["collector"],
        )
        for name, when in self._answered.items():
            last.add_metric([name], when)
        yield from (success, duration, last)


def metrics(families: Iterable[Family]) -> Iterator[Metric]:
    """Numbers as gauges and counters; texts as labels of one `_info` series a scope."""
    texts: dict[tuple[tuple[str, str], ...], dict[str, str]] = {}
    for family in families:
        numbers = []
        for labels, value in family.readings:
            if isinstance(value, str):
                texts.setdefault(tuple(labels.items()), {})[_label(family.name)] = value
            elif not isinstance(value, Absent):
                numbers.append((labels, float(value)))
        if numbers:
            yield _metric(family, numbers)
    kinds: dict[str, InfoMetricFamily] = {}
    for places, names in texts.items():
        kind = PREFIX + ("_".join(key for key, _ in places if key not in IDENTITY) or "host")
        info = kinds.setdefault(kind, InfoMetricFamily(kind, "Identity"))
        info.add_sample(f"{kind}_info", {**names, **dict(places)}, 1.0)
    yield from kinds.values()


def _metric(family: Family, numbers: Sequence[tuple[Labels, float]]) -> Metric:
    name = PREFIX + family.name.replace(".", "_") + SUFFIX.get(family.unit, f"_{_label(family.unit.lower())}")
    kind = CounterMetricFamily if family.counter else GaugeMetricFamily
    metric = kind(name, family.help)
    for labels, value in numbers:
        metric.add_sample(name + ("_total" if family.counter else ""), dict(labels), value)
    return metric


def _absences(families: Iterable[Family]) -> Metric:
    """How many readings of each GPU, or of the host, could not be had: a series that only ends is easily overlooked."""
    missing = Counter(
        (labels.get("gpu", ""), value.status)
        for family in families
        for labels, value in family.readings
        if isinstance(value, Absent)
    )
    metric = GaugeMetricFamily(f"{PREFIX}readings_absent", "Readings that could not be had", labels=["gpu", "status"])
    for place, count in sorted(missing.items()):
        metric.add_metric(place, count)
    return metric


def _label(name: str) -> str:
    return re.sub(
        r"[^a-z0-9_]", "_", name.split(".", 1)[1] if name.startswith(("gpu.", "host.")) else name.replace(".", "_")
    )


def registry(collectors: Sequence[Collector], compat: str | None = None) -> CollectorRegistry:
    """What is served, or written: the collectors as Prometheus sees them."""
    found = CollectorRegistry(auto_describe=False)
    found.register(_Undescribed(Exporter(collectors, compat)))
    return found


def serve(
    collectors: Sequence[Collector], address: str, port: int, web: WebConfig | None = None, compat: str | None = None
) -> Server:
    """Serves /metrics in a thread of its own.

    Raises:
        OSError: the address cannot be listened on.
        WebConfigError: the certificates of `web` cannot be used.
    """
    return Server(registry(collectors, compat), address, port, web)


class _Undescribed:
    """Registering must not read the hardware, so nothing is described beforehand."""

    def __init__(self, exporter: Exporter) -> None:
        self.collect = exporter.collect

    def describe(self) -> list[Metric]:
        """Nothing."""
        return []
