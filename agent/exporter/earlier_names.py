"""Export renamed readings also under their names in Rackproof 1.0, for rules and dashboards that still use the old names."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from prometheus_client.core import GaugeMetricFamily, Metric

from agent.exporter.metric_names import PREFIX, prometheus_name
from collectors.base import Absent, Family
from schemas.readings import PROMETHEUS_NAMES


def earlier_name(name: str) -> str:
    """Return the metric name that a renamed reading had in Rackproof 1.0."""
    return PREFIX + name.replace(".", "_")


def earlier_metrics(families: Iterable[Family]) -> Iterator[Metric]:
    """Yield each renamed family with its old name, as a gauge. Leave out families without a value."""
    for family in families:
        if family.name in PROMETHEUS_NAMES:
            new_name = prometheus_name(family.name, family.unit)
            metric = GaugeMetricFamily(earlier_name(family.name), f"Old name of {new_name}")
            for labels, value in family.readings:
                if not isinstance(value, Absent):
                    metric.add_sample(metric.name, dict(labels), float(value))
            if metric.samples:
                yield metric
