"""Record figures over a launch or a soak, which may last for seconds or for days, in a bounded number of time buckets.

When a value is too late for the last of MAX_BUCKETS buckets, neighbouring buckets are merged in pairs. All buckets are then twice
as long.
"""

from __future__ import annotations

import math
import re
import threading
from collections.abc import Iterable, Mapping
from dataclasses import replace

from collectors.base import Absent
from collectors.nvml import THROTTLE_REASONS, GpuSample
from schemas.readings import READINGS
from schemas.records import Snapshot, Value, is_number
from schemas.timeline import Event, Series, Timeline, is_recorded

MAX_BUCKETS = 240
FIRST_BUCKET_S = 1.0
MAX_SERIES = 1000
MAX_EVENTS, MAX_EVENTS_OF_NAME = 1000, 100
"""Events of one name also have a maximum, so that many events of one kind leave room for those of other kinds."""
SAME_EVENT_S = 600.0
"""If an event of the same name and scope occurs less than this many seconds after the end of an earlier one, the earlier event is
extended."""
DIGITS = 5
"""Significant digits of the values in a series."""
POWER_CAP = THROTTLE_REASONS["power_cap"]
"""Mask of the throttle reason for the power limit. It is not a fault: a healthy GPU under full load reaches its power limit."""
FAULTS = {reason: mask for reason, mask in THROTTLE_REASONS.items() if reason != "power_cap"}
"""Throttle reason that is a fault -> its mask."""
COUNTERS = re.compile(
    r"(gpu\.(ecc|remapped_rows|retired_pages|nvlink)\..*|gpu\.pcie\.replays|pcie\.(port\.)?aer\..*"
    r"|xid\.(count|fatal|message)|sxid\.count|kernel\.event\.count"
    r"|infiniband\.(link_downed|link_error_recovery|symbol_error|port_rcv_errors|port_rcv_remote_physical_errors"
    r"|port_xmit_discards|local_link_integrity_errors|excessive_buffer_overrun_errors|vl15_dropped)"
    r"|port\.(fec_uncorrectable|symbol_errors|link_downs|link_recoveries|module_errors|pause_storms)"
    r"|network\.(carrier_changes|rx_crc_errors|rx_errors|tx_errors)"
    r"|host\.(machine_checks|memory\.ecc_\w+|dimm\.\w+)|storage\.\w+\.(io|media)_errors)"
)
"""Pattern of names of counters of errors. Each increase of such a counter is an event.

Retransmissions are not included, because a healthy RoCE fabric has many of them.
"""
LOGGED = ("xid.", "sxid.", "kernel.event.")
"""Name prefixes of counters from the kernel log."""

Key = tuple[str, str, tuple[tuple[str, Value], ...]]
"""Name, scope and parameters of a series."""
Bucket = tuple[int, float, float, float]
"""Number of values in the time bucket, their minimum, sum and maximum."""


class Recorder:
    """Records values and events; thread-safe."""

    def __init__(self, before: Timeline | None = None) -> None:
        """Start with an empty timeline, or with `before`, the timeline that an earlier supervisor recorded in the same soak."""
        self._lock = threading.Lock()
        self._bucket_s = before.bucket_s if before else FIRST_BUCKET_S
        self._left_out = before.left_out if before else 0
        self._events = list(before.events) if before else []
        self._units: dict[Key, str] = {}
        self._buckets: dict[Key, dict[int, Bucket]] = {}
        self._counters: dict[tuple[str, str], float] = {}
        self._has_counters = False
        for series in before.series if before else ():
            key = _key(series.name, series.scope, series.params)
            self._units[key] = series.unit
            columns = zip(series.at, series.n, series.low, series.mean, series.high, strict=True)
            self._buckets[key] = {index: (n, low, mean * n, high) for index, n, low, mean, high in columns}

    def add_value(
        self, at_s: float, name: str, scope: str, unit: str, value: float, params: Mapping[str, Value] | None = None
    ) -> None:
        """Add one value, `at_s` seconds after the launch or soak began. Ignore a value that is not finite.

        A value of a new series is not recorded, only counted as left out, if there are already MAX_SERIES series.
        """
        if not math.isfinite(value):
            return
        key = _key(name, scope, params or {})
        with self._lock:
            if key not in self._buckets and len(self._buckets) >= MAX_SERIES:
                self._left_out += 1
                return
            self._units[key] = unit
            self._buckets.setdefault(key, {})
            while at_s >= MAX_BUCKETS * self._bucket_s:
                self._merge_pairs()
            series, index = self._buckets[key], int(max(0.0, at_s) / self._bucket_s)
            series[index] = _merge(series.get(index), (1, value, value, value))

    def _merge_pairs(self) -> None:
        self._bucket_s *= 2
        for key, series in self._buckets.items():
            merged: dict[int, Bucket] = {}
            for index in sorted(series):
                merged[index // 2] = _merge(merged.get(index // 2), series[index])
            self._buckets[key] = merged

    def add_event(self, at_s: float, name: str, scope: str, text: str = "", count: float = 1.0) -> None:
        """Add an event, or extend the last event of this name and scope that ended less than SAME_EVENT_S before `at_s`."""
        with self._lock:
            for index in range(len(self._events) - 1, -1, -1):
                event = self._events[index]
                if (event.name, event.scope) == (name, scope) and at_s - event.until_s < SAME_EVENT_S:
                    until_s = round(max(at_s, event.until_s), 1)
                    self._events[index] = replace(event, until_s=until_s, count=event.count + count)
                    return
            of_name = sum(event.name == name for event in self._events)
            if of_name >= MAX_EVENTS_OF_NAME or len(self._events) >= MAX_EVENTS:
                self._left_out += 1
                return
            at_s = round(max(0.0, at_s), 1)
            self._events.append(Event(at_s=at_s, until_s=at_s, name=name, scope=scope, count=count, text=text[:1024]))

    def add_samples(self, at_s: float, samples: Mapping[int, GpuSample | Absent]) -> None:
        """Add a sample of each GPU, all taken at the same time. A sample that failed, or that shows a fault, becomes an event."""
        for index, sample in samples.items():
            scope = f"gpu={index}"
            if isinstance(sample, Absent):
                self.add_event(at_s, "gpu.power", scope, f"{sample.status}: {sample.reason}")
                continue
            faults = [reason for reason, mask in FAULTS.items() if sample.reasons & mask]
            for name, where, unit, value in (
                ("gpu.power", scope, "W", sample.power),
                ("gpu.clock.sm", scope, "Hz", sample.clock),
                ("gpu.temperature", scope, "Cel", sample.temperature),
                ("gpu.throttle.active", f"{scope},reason=power_cap", "1", float(bool(sample.reasons & POWER_CAP))),
                ("gpu.throttle.active", f"{scope},reason=other", "1", float(bool(faults))),
            ):
                self.add_value(at_s, name, where, unit, value)
            for reason in faults:
                self.add_event(at_s, "gpu.throttle.active", f"{scope},reason={reason}", "its clocks were throttled")

    def add_counters(self, at_s: float, snapshot: Snapshot) -> None:
        """Add an event for each counter that increased since the previous snapshot."""
        for metric in snapshot.metrics:
            if not COUNTERS.fullmatch(metric.name) or not _is_counter(metric.name):
                continue
            for scope, value in metric.values.items():
                if not is_number(value):
                    continue
                key = (metric.name, scope)
                # A counter from the kernel log has no reading until the first error. If it appears after the first
                # snapshot, it rose from 0.
                default = 0.0 if metric.name.startswith(LOGGED) and self._has_counters else value
                before = self._counters.get(key, default)
                self._counters[key] = value
                if value > before:
                    text = f"rose from {before:g} to {value:g}"
                    self.add_event(at_s, metric.name, scope, text, value - before)
        self._has_counters = True

    def timeline(self, *, whole: bool = True) -> Timeline:
        """Return the timeline so far. If `whole` is False, leave out series that the record does not keep (`_is_for_record`)."""
        with self._lock:
            series = [
                _series(key, self._units[key], buckets)
                for key, buckets in self._buckets.items()
                if whole or _is_for_record(key[0], self._units[key])
            ]
            return Timeline(
                bucket_s=self._bucket_s,
                series=tuple(series),
                events=tuple(sorted(self._events, key=lambda event: event.at_s)),
                left_out=self._left_out,
            )

    def series(self, name: str, scope: str, params: Mapping[str, Value]) -> Series | None:
        """Return one series so far; None if it has no value."""
        key = _key(name, scope, params)
        with self._lock:
            return _series(key, self._units[key], self._buckets[key]) if key in self._buckets else None


def _is_for_record(name: str, unit: str) -> bool:
    """Return whether the record keeps the series: it keeps readings of GPUs (`gpu.…`), and the figures of `is_recorded`."""
    return name.startswith("gpu.") or is_recorded(name, unit)


def _is_counter(name: str) -> bool:
    return name.startswith(LOGGED) or (name in READINGS and READINGS[name].counter)


def _key(name: str, scope: str, params: Mapping[str, Value]) -> Key:
    return name, scope, tuple(sorted(params.items(), key=lambda item: item[0]))


def _merge(first: Bucket | None, second: Bucket) -> Bucket:
    if first is None:
        return second
    return first[0] + second[0], min(first[1], second[1]), first[2] + second[2], max(first[3], second[3])


def _series(key: Key, unit: str, buckets: Mapping[int, Bucket]) -> Series:
    name, scope, params = key
    indices = sorted(buckets)
    rows = [buckets[index] for index in indices]
    return Series(
        name=name,
        scope=scope,
        unit=unit,
        params=dict(params),
        at=tuple(indices),
        n=tuple(row[0] for row in rows),
        low=_round(row[1] for row in rows),
        mean=_round(row[2] / row[0] for row in rows),
        high=_round(row[3] for row in rows),
    )


def _round(values: Iterable[float]) -> tuple[float, ...]:
    return tuple(float(f"{value:.{DIGITS}g}") for value in values)
