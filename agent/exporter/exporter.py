"""Export the families (kinds of readings) of the collectors to Prometheus."""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol, cast

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily, Metric

from agent.exporter.dcgm_names import DcgmRenamer
from agent.exporter.defaults import COLLECT_S, FRESH_S
from agent.exporter.earlier_names import earlier_metrics
from agent.exporter.metric_names import EVERY, PREFIX, info_label, prometheus_name
from agent.exporter.web import Server
from agent.exporter.web_config import WebConfig
from agent.sampling.snapshot import Stuck, collect
from collectors.base import IDENTITY_LABELS, Absent, Collector, Family, Labels
from schemas.scopes import pci_address

log = logging.getLogger(__name__)

COMPATIBLE_NAMES: Mapping[str, Callable[[], Callable[[Sequence[Family]], Iterable[Metric]]]] = {
    "dcgm": DcgmRenamer,
    "1.0": lambda: earlier_metrics,
}
"""Value of `--compat` -> function that returns a converter from families to metrics with the names of dcgm-exporter (`dcgm`) or
of Rackproof 1.0 (`1.0`)."""


class Source(Protocol):
    """A source of Prometheus families that is not a collector: `RunSource` or `GpuSampler`."""

    name: str

    def collect(self) -> Iterable[Metric]:
        """Return the current families. If this raises, the exporter reports the source like a failed collector."""
        ...


class Exporter:
    """A prometheus_client collector that reads Rackproof's collectors. Missing readings are counted but have no series."""

    def __init__(
        self, collectors: Sequence[Collector], compat: Iterable[str] = (), sources: Sequence[Source] = ()
    ) -> None:
        """Prepare the exporter.

        Args:
            collectors: Rackproof's collectors.
            compat: keys of COMPATIBLE_NAMES. For each key, the readings are exported once more, with the names of that key.
            sources: sources of further metrics.
        """
        self._collectors, self._sources = collectors, sources
        self._compat = {name: COMPATIBLE_NAMES[name]() for name in compat}
        self._lock = threading.Lock()
        self._stuck: Stuck = {}
        self._stuck_since: dict[str, float] = {}
        self._last_success: dict[str, float] = {}
        self._failures: dict[str, str] = {}

    def collect(self) -> Iterator[Metric]:
        """Yield every family in Prometheus form, and the state of each collector."""
        with self._lock:
            # Sources are read like collectors, but they return Prometheus families.
            every = [*self._collectors, *cast("Sequence[Any]", self._sources)]
            collected, outcome = collect(every, COLLECT_S.get(), self._stuck)
            families = [family for family in collected if isinstance(family, Family)]
            renamed = [metric for name in self._compat for metric in self._rename(name, families, outcome)]
            self._log_changes(outcome)
            collector_metrics = self._collector_metrics(outcome)
        yield from metrics(families)
        yield from renamed
        yield from (family for family in cast("list[Any]", collected) if isinstance(family, Metric))
        yield _absences(families)
        yield from collector_metrics

    def _rename(self, name: str, families: Sequence[Family], outcome: dict[str, float | str]) -> list[Metric]:
        """Return the families with the names of a key of COMPATIBLE_NAMES.

        If this fails, add the error to `outcome` and return an empty list: the metrics with the usual names are still exported.
        """
        try:
            return list(self._compat[name](families))
        except Exception as error:
            log.exception("metrics with the names of --compat %s cannot be exported", name)
            outcome[name] = f"{type(error).__name__}: {error}"
            return []

    def _log_changes(self, outcome: dict[str, float | str]) -> None:
        """Log each collector that begins to fail, fails for another reason than in the previous scrape, or works again."""
        for name, result in outcome.items():
            previous = self._failures.get(name, "")
            reason = result if isinstance(result, str) else ""
            if reason and reason != previous:
                log.warning("collector %s failed: %s", name, reason)
            elif previous and not reason:
                log.info("collector %s recovered", name)
            self._failures[name] = reason

    def _collector_metrics(self, outcome: dict[str, float | str]) -> list[Metric]:
        """Return for each collector: success, duration, time of the last success, and how long its current call has hung."""
        now, monotonic = time.time(), time.monotonic()
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
                self._stuck_since.setdefault(name, monotonic)
            else:
                self._stuck_since.pop(name, None)
            stuck.add_metric([name], monotonic - self._stuck_since.get(name, monotonic))
        for name, at in self._last_success.items():
            last_success.add_metric([name], at)
        return [success, duration, last_success, stuck]


def _gauge(name: str) -> GaugeMetricFamily:
    spec = EVERY[name]
    return GaugeMetricFamily(spec.name, spec.help, labels=spec.labels)


def metrics(families: Iterable[Family]) -> Iterator[Metric]:
    """Yield readings that are numbers as gauges and counters, and texts as labels of one `_info` series per scope."""
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
    for labels_of_scope, names in texts.items():
        if address := names.get("pci_bus_id"):
            # Alert rules join the series of a PCI device with its GPU by the label `pci`. NVML's `pci_bus_id` spells the address
            # in another way than the kernel log and sysfs do.
            names["pci"] = pci_address(address)
        kind = PREFIX + ("_".join(key for key, _ in labels_of_scope if key not in IDENTITY_LABELS) or "host")
        info = kinds.setdefault(kind, InfoMetricFamily(kind, "Identity"))
        info.add_sample(f"{kind}_info", {**names, **dict(labels_of_scope)}, 1.0)
    yield from kinds.values()


def _metric(family: Family, numbers: Sequence[tuple[Labels, float]]) -> Metric:
    name = prometheus_name(family.name, family.unit)
    kind = CounterMetricFamily if family.counter else GaugeMetricFamily
    metric = kind(name, family.help)
    for labels, value in numbers:
        metric.add_sample(name + ("_total" if family.counter else ""), dict(labels), value)
    return metric


def _absences(families: Iterable[Family]) -> Metric:
    """Return the number of missing readings by status, for each GPU and for all other parts together.

    The metric is needed because a missing reading has no series, and in Prometheus the end of a series is easily overlooked.
    """
    missing = Counter(
        (labels.get("gpu", ""), value.status)
        for family in families
        for labels, value in family.readings
        if isinstance(value, Absent)
    )
    metric = _gauge("rackproof_readings_absent")
    for labels, count in sorted(missing.items()):
        metric.add_metric(labels, count)
    return metric


def registry(
    collectors: Sequence[Collector], compat: Iterable[str] = (), sources: Sequence[Source] = ()
) -> CollectorRegistry:
    """Return a registry with the exporter's metrics, which can be served or written to a file."""
    result = CollectorRegistry(auto_describe=False)
    result.register(Exporter(collectors, compat, sources))
    return result


def serve(
    collectors: Sequence[Collector],
    address: str,
    port: int,
    web: WebConfig | None = None,
    compat: Iterable[str] = (),
    sources: Sequence[Source] = (),
    fresh_s: float = FRESH_S,
) -> Server:
    """Serve /metrics in a separate thread.

    The page also has the processor time and memory of the exporter itself (`process_…`). All clients that request the same format
    and compression within `fresh_s` seconds get the same page.

    Raises:
        OSError: the server cannot listen on the address.
        WebConfigError: the certificates of `web` cannot be used.
    """
    served = registry(collectors, compat, sources)
    ProcessCollector(registry=served)  # not for --textfile, because node_exporter has families with these names too
    return Server(served, address, port, web, fresh_s)
