"""Take snapshots for the record. A snapshot has the families (kinds) of readings that the collectors return."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

from collectors.base import Absent, Collector, Family, Labels, Value, scope
from collectors.deadline import PendingCall, call_with_deadline
from schemas.records import Gpu, Metric, Snapshot
from schemas.semantic_validation import LEAST, MOST
from schemas.times import utc_now

COLLECT_DEADLINE_S = 20.0
"""Seconds for all collectors, which run in parallel. A collector that has not returned by then is reported as an error, because a
hung driver may block forever."""

Stuck = dict[str, PendingCall[Any]]
"""Name of a collector -> its call that has exceeded the deadline."""


def collect(
    collectors: Iterable[Collector], deadline_s: float = COLLECT_DEADLINE_S, stuck: Stuck | None = None
) -> tuple[list[Family], dict[str, float | str]]:
    """Return the families of the collectors that succeeded, and name of a collector -> its duration in seconds, or why it failed.

    If a collector blocks or fails, only its own readings are lost. If the caller passes the same `stuck` to every call, a
    collector whose earlier call still blocks is not called again, but reported as an error. A number that is not a measurement
    becomes an error, and all texts have a UTF-8 encoding, so that one reading cannot make a record or a metrics page invalid.
    """
    readers = {collector.name: partial(_timed, collector) for collector in collectors}
    families: list[Family] = []
    outcome: dict[str, float | str] = {}
    for name, result in call_with_deadline(readers, deadline_s, stuck).items():
        if isinstance(result, Absent):
            outcome[name] = result.reason
        else:
            collected, outcome[name] = result
            families += collected
    return families, outcome


def _timed(collector: Collector) -> tuple[list[Family], float]:
    start = time.monotonic()
    families = list(collector.collect())
    for family in families:
        if isinstance(family, Family):  # the exporter's sources return metrics of prometheus_client
            family.readings = [(_encodable_labels(labels), _measurement(value)) for labels, value in family.readings]
    return families, time.monotonic() - start


def take_snapshot(
    collectors: Iterable[Collector],
    *,
    stage: str,
    phase: str,
    clock: Callable[[], str] = utc_now,
    stuck: Stuck | None = None,
) -> tuple[Snapshot, tuple[Gpu, ...]]:
    """Return a snapshot of the readings of all collectors, and the GPUs that it identifies. `stuck` is passed to `collect`."""
    at, began = clock(), time.monotonic()
    families, outcome = collect(collectors, COLLECT_DEADLINE_S, stuck)
    metrics = [_metric(family) for family in families]
    for name, result in outcome.items():
        failed = isinstance(result, str)
        metrics.append(
            Metric(
                name=f"collector.{name}",
                unit="s",
                values={} if failed else {"host": round(float(result), 6)},
                absent={"host": _text(f"error: {result}")} if failed else {},
            )
        )
    snapshot = Snapshot(
        stage=stage,
        phase=phase,
        at=at,
        duration_s=round(time.monotonic() - began, 6),
        metrics=tuple(metrics),
    )
    return snapshot, identities(families)


def _metric(family: Family) -> Metric:
    readings = {scope(labels): _text(value) if isinstance(value, str) else value for labels, value in family.readings}
    return Metric(
        name=family.name,
        unit=family.unit,
        values={where: value for where, value in readings.items() if not isinstance(value, Absent)},
        absent={
            where: _text(f"{value.status}: {value.reason.strip() or 'no reason given'}")
            for where, value in readings.items()
            if isinstance(value, Absent)
        },
    )


def _measurement(value: Value | Absent) -> Value | Absent:
    """Return the value, or an error instead of a number that would make the whole record invalid."""
    if isinstance(value, str):
        return _encodable(value)
    if isinstance(value, int) and abs(value) >= 1 << 64:
        return Absent.error("not a measurement: a number of more than 64 bits")
    if isinstance(value, float) and value and not (math.isfinite(value) and LEAST <= abs(value) <= MOST):
        return Absent.error(f"not a measurement: {value:g}")
    return value


def _encodable_labels(labels: Labels) -> Labels:
    if all(map(str.isascii, labels.values())):
        return labels
    return {key: _encodable(value) for key, value in labels.items()}


def _encodable(text: str) -> str:
    """Return a text in which `?` replaces each character without a UTF-8 encoding (lone surrogate)."""
    return text if text.isascii() else text.encode(errors="replace").decode()


def _text(text: str) -> str:
    """Return the first 1024 characters of `_encodable`."""
    return _encodable(text)[:1024]


IDENTITY_FAMILIES = ("gpu.name", "gpu.serial", "gpu.uuid", "gpu.pci_bus_id")


def identities(families: Iterable[Family]) -> tuple[Gpu, ...]:
    """Return the GPUs, identified by the readings in IDENTITY_FAMILIES. A GPU without a reading of its name is left out."""
    parts_by_gpu: dict[str, dict[str, str]] = {}
    for family in families:
        if family.name in IDENTITY_FAMILIES:
            for labels, value in family.readings:
                if not isinstance(value, Absent):
                    parts_by_gpu.setdefault(labels["gpu"], {})[family.name.removeprefix("gpu.")] = str(value)
    return tuple(
        Gpu(
            index=int(index),
            serial=parts.get("serial", ""),
            uuid=parts.get("uuid", ""),
            name=parts["name"],
            pci_bus_id=parts.get("pci_bus_id", ""),
        )
        for index, parts in sorted(parts_by_gpu.items(), key=lambda item: int(item[0]))
        if "name" in parts
    )
