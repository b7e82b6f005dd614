"""The collectors' families -> a snapshot for the record."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from datetime import datetime, timezone

from collectors.base import Absent, Collector, Family, scope
from schemas.records import Gpu, Metric, Snapshot

COLLECT_DEADLINE_S = 20.0
"""A driver that is wedged blocks for ever; what has not answered by then is told as an error."""
PATIENCE_S = 0.05
"""Before the next begins beside it. All at once they fight for the interpreter, and take twice the CPU time. Of so many
that the last would begin late, less: it has half the deadline."""


def now() -> str:
    """UTC, ISO 8601 with `Z`."""
    return datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%S.%fZ")


def collect(
    collectors: Iterable[Collector], deadline_s: float = COLLECT_DEADLINE_S, stuck: dict[str, Reading] | None = None
) -> tuple[list[Family], dict[str, float | str]]:
    """Every family of every collector, and a line a collector: seconds it took, or why it failed.

    Each has a thread, so that one that blocks or breaks costs its own readings only; one that is slow is not waited for, but
    goes on beside the next. Where the caller keeps `stuck` from call to call, a collector that still blocks is neither started
    nor waited for again.
    """
    families: list[Family] = []
    outcome: dict[str, float | str] = {}
    stuck = {} if stuck is None else stuck
    blocked = {name: reading for name, reading in stuck.items() if reading.is_alive()}
    every = list(collectors)
    ends, patience_s = time.monotonic() + deadline_s, min(PATIENCE_S, deadline_s / 2 / max(1, len(every)))
    running = []
    for collector in every:
        if collector.name not in blocked:
            reading = Reading(collector)
            reading.join(patience_s)
        running.append((collector.name, blocked.get(collector.name) or reading))
    for name, reading in running:
        reading.join(0.0 if name in blocked else max(0.0, ends - time.monotonic()))
        if reading.is_alive():
            stuck[name] = reading
            outcome[name] = f"no answer within {deadline_s:g} s"
        elif reading.error:
            outcome[name] = reading.error
        else:
            families += reading.families
            outcome[name] = reading.seconds
    return families, outcome


class Reading(threading.Thread):
    """One collector at work. A daemon: a call that never returns must not keep the process."""

    def __init__(self, collector: Collector) -> None:
        super().__init__(daemon=True)
        self._collector = collector
        self.families: list[Family] = []
        self.error = ""
        self.seconds = 0.0
        self.start()

    def run(self) -> None:
        began = time.monotonic()
        try:
            self.families = list(self._collector.collect())
        except Exception as error:  # noqa: BLE001 - whatever a collector runs into is its own result, and a named one
            self.error = f"{type(error).__name__}: {error}"
        self.seconds = time.monotonic() - began


def take(
    collectors: Iterable[Collector], *, stage: str, phase: str, clock: Callable[[], str] = now
) -> tuple[Snapshot, tuple[Gpu, ...]]:
    """A snapshot of everything, and the GPUs that it names."""
    at, began = clock(), time.monotonic()
    families, outcome = collect(collectors)
    metrics = [_metric(family) for family in families]
    for name, result in outcome.items():
        failed = isinstance(result, str)
        metrics.append(
            Metric(
                name=f"collector.{name}",
                unit="s",
                values={} if failed else {"host": round(float(result), 6)},
                absent={"host": f"error: {result}"[:1024]} if failed else {},
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
    return Metric(
        name=family.name,
        unit=family.unit,
        values={
            scope(labels): value[:1024] if isinstance(value, str) else value
            for labels, value in family.readings
            if not isinstance(value, Absent)
        },
        absent={
            scope(labels): f"{value.status}: {value.reason or 'no reason given'}"[:1024]
            for labels, value in family.readings
            if isinstance(value, Absent)
        },
    )


def identities(families: Iterable[Family]) -> tuple[Gpu, ...]:
    """The GPUs by which a record names its parts. A GPU that does not tell its name is not among them."""
    known: dict[str, dict[str, str]] = {}
    for family in families:
        if family.name in ("gpu.name", "gpu.serial", "gpu.uuid", "gpu.pci_bus_id"):
            for labels, value in family.readings:
                if not isinstance(value, Absent):
                    known.setdefault(labels["gpu"], {})[family.name.removeprefix("gpu.")] = str(value)
    return tuple(
        Gpu(
            index=int(index),
            serial=parts.get("serial", ""),
            uuid=parts.get("uuid", ""),
            name=parts["name"],
            pci_bus_id=parts.get("pci_bus_id", ""),
        )
        for index, parts in sorted(known.items(), key=lambda item: int(item[0]))
        if "name" in parts
    )
