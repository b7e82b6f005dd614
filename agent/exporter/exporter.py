"""The collectors' families -> /metrics, while a run goes on."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Protocol, cast

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily, Metric

from agent.exporter.dcgm_names import DcgmRenamer
from agent.exporter.metric_names import EVERY, PREFIX, info_label, prometheus_name
from agent.exporter.web import FRESH_S, Server
from agent.exporter.web_config import WebConfig
from agent.sampling.snapshot import Stuck, collect
from collectors.base import IDENTITY, Absent, Collector, Family, Labels

NAMES = {"dcgm": DcgmRenamer}
"""Exporters whose names are given beside our own where asked for."""
SCRAPE_DEADLINE_S = 8.0
"""Under Prometheus' default scrape time-out of 10 s."""


class Source(Protocol):
    """What is exported and is no collector's: the run that goes on, the samples."""

    name: str

    def collect(self) -> Iterable[Metric]:
        """Its families now. What it raises is told as a collector that failed."""
        ...


class Exporter:
    """A prometheus_client collector over ours. A reading that cannot be had is left out, and counted as absent."""

    def __init__(
        self, collectors: Sequence[Collector], compat: str | None = None, sources: Sequence[Source] = ()
    ) -> None:
        """`compat` adds the names of another exporter, one of NAMES."""
        self._collectors, self._sources = collectors, sources
        self._compat = NAMES[compat]() if compat else None
        self._one_at_a_time = threading.Lock()
        self._stuck: Stuck = {}
        self._stuck_since: dict[str, float] = {}
        self._last_success: dict[str, float] = {}

    def collect(self) -> Iterator[Metric]:
        """Yield every family as Prometheus sees it, and how each collector performed."""
        with self._one_at_a_time:
            # The families of the sources are Prometheus families already; they are collected in the same way.
            every = [*self._collectors, *cast("Sequence[Any]", self._sources)]
            collected, outcome = collect(every, SCRAPE_DEADLINE_S, self._stuck)
            collector_metrics = self._collector_metrics(outcome)
        families = [family for family in collected if isinstance(family, Family)]
        yield from metrics(families)
        if self._compat:
            yield from self._compat(families)
        yield from (family for family in cast("list[Any]", collected) if isinstance(family, Metric))
        yield _absences(families)
        yield from collector_metrics

    def _collector_metrics(self, outcome: dict[str, float | str]) -> list[Metric]:
        """Return how each collector performed: success, duration, time of the last success, time stuck."""
        now = time.time()
        success = _gauge("rackproof_collector_success")
        duration = _gauge("rackproof_collector_duration_seconds")
        last_success = _gauge("rackproof_collector_last_success_timestamp_seconds")
        stuck = _gauge("rackproof_collector_stuck_seconds")
        for name, result in outcome.items():
            success.add_metric([name], float(not isinstance(result, str)))
            if not isinstance(result, str):
                duration.add_metric([name], result)
                self._last_success[name] = now
            if name in self._stuck and self._stuck[name].is_alive():
                self._stuck_since.setdefault(name, now)
            else:
                self._stuck_since.pop(name, None)
            stuck.add_metric([name], now - self._stuck_since.get(name, now))
        for name, at in self._last_success.items():
            last_success.add_metric([name], at)
        return [success, duration, last_success, stuck]


def _gauge(name: str) -> GaugeMetricFamily:
    own = EVERY[name]
    return GaugeMetricFamily(own.name, own.help, labels=own.labels)


def metrics(families: Iterable[Family]) -> Iterator[Metric]:
    """Numbers as gauges and counters; texts as labels of one `_info` series a scope."""
    texts: dict[tuple[tuple[str, str], ...], dict[str, str]] = {}
    for family in families:
        numbers = []
        for labels, value in family.readings:
            if isinstance(value, str):
                texts.setdefault(tuple(labels.items()), {})[info_label(family.name)] = value
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
    name = prometheus_name(family.name, family.unit)
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
    metric = _gauge("rackproof_readings_absent")
    for place, count in sorted(missing.items()):
        metric.add_metric(place, count)
    return metric


def registry(
    collectors: Sequence[Collector], compat: str | None = None, sources: Sequence[Source] = ()
) -> CollectorRegistry:
    """What is served, or written: the collectors as Prometheus sees them."""
    found = CollectorRegistry(auto_describe=False)
    found.register(_Undescribed(Exporter(collectors, compat, sources)))
    return found


def serve(
    collectors: Sequence[Collector],
    address: str,
    port: int,
    web: WebConfig | None = None,
    compat: str | None = None,
    sources: Sequence[Source] = (),
    fresh_s: float = FRESH_S,
) -> Server:
    """Serves /metrics in a thread of its own, what the exporter itself costs (`process_…`) among it.

    Whoever asks again within `fresh_s` seconds is given the same page.

    Raises:
        OSError: the address cannot be listened on.
        WebConfigError: the certificates of `web` cannot be used.
    """
    found = registry(collectors, compat, sources)
    ProcessCollector(registry=found)  # not in a file for node_exporter, which has families of these names
    return Server(found, address, port, web, fresh_s)


class _Undescribed:
    """Registering must not read the hardware, so nothing is described beforehand."""

    def __init__(self, exporter: Exporter) -> None:
        self.collect = exporter.collect

    def describe(self) -> list[Metric]:
        """Nothing."""
        return []
