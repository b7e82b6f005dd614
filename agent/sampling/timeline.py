"""How figures went over a soak of minutes to days, in a bounded number of buckets: when they are full, each two become one."""

from __future__ import annotations

import math
import re
import threading
from collections.abc import Iterable, Mapping
from dataclasses import replace

from collectors.base import Absent
from collectors.nvml import THROTTLE_REASONS, GpuSample
from schemas.readings import READINGS
from schemas.records import Snapshot, Value
from schemas.timeline import RATES, Event, Series, Timeline

MOST_BUCKETS = 240
FIRST_BUCKET_S = 1.0
MOST_SERIES = 1000
MOST_EVENTS = 200
TOGETHER_S = 600.0
"""What comes again within this time is one event that lasts."""
DIGITS = 5
POWER_CAP = THROTTLE_REASONS["power_cap"]
"""A healthy part under full load runs into its power limit: that is told apart from what holds a clock down for a fault."""
FAULTS = {reason: mask for reason, mask in THROTTLE_REASONS.items() if reason != "power_cap"}
COUNTERS = re.compile(
    r"(gpu\.(ecc|remapped_rows|retired_pages|nvlink)\..*|gpu\.pcie\.replays|pcie\.(port\.)?aer\..*|xid\.(count|fatal)"
    r"|infiniband\.(link_\w+|symbol_error|port_rcv_errors|port_xmit_discards|local_link_integrity_errors)"
    r"|network\.(carrier_changes|rx_crc_errors)|host\.(machine_checks|memory\.ecc_\w+|dimm\.\w+)|storage\.\w+\.(io|media)_errors)"
)
"""Readings of which each rise is an event."""

Key = tuple[str, str, tuple[tuple[str, Value], ...]]
Bucket = tuple[int, float, float, float]
"""Count, lowest, sum, highest."""


class Recorder:
    """Takes what is seen, at any rate, from several threads."""

    def __init__(self, before: Timeline | None = None) -> None:
        """`before`: what an earlier process recorded of the same soak."""
        self._lock = threading.Lock()
        self._bucket_s = before.bucket_s if before else FIRST_BUCKET_S
        self._left_out = before.left_out if before else 0
        self._events = list(before.events) if before else []
        self._units: dict[Key, str] = {}
        self._buckets: dict[Key, dict[int, Bucket]] = {}
        self._counted: dict[tuple[str, str], float] = {}
        self._looked = False
        for one in before.series if before else ():
            key = _key(one.name, one.scope, one.params)
            self._units[key] = one.unit
            columns = zip(one.at, one.n, one.low, one.mean, one.high, strict=True)
            self._buckets[key] = {at: (n, low, mean * n, high) for at, n, low, mean, high in columns}

    def add(
        self, at_s: float, name: str, scope: str, unit: str, value: float, params: Mapping[str, Value] | None = None
    ) -> None:
        """One value, `at_s` seconds after the soak began."""
        if not math.isfinite(value):
            return
        key = _key(name, scope, params or {})
        with self._lock:
            if key not in self._buckets and len(self._buckets) >= MOST_SERIES:
                self._left_out += 1
                return
            self._units[key] = unit
            series = self._buckets.setdefault(key, {})
            while at_s >= MOST_BUCKETS * self._bucket_s:
                self._halve()
                series = self._buckets[key]
            place = int(max(0.0, at_s) / self._bucket_s)
            series[place] = _joined(series.get(place), (1, value, value, value))

    def _halve(self) -> None:
        self._bucket_s *= 2
        for key, series in self._buckets.items():
            halved: dict[int, Bucket] = {}
            for place in sorted(series):
                halved[place // 2] = _joined(halved.get(place // 2), series[place])
            self._buckets[key] = halved

    def note(self, at_s: float, name: str, scope: str, text: str = "", count: float = 1.0) -> None:
        """Something happened; the like of it within TOGETHER_S is the same event."""
        with self._lock:
            for place in range(len(self._events) - 1, -1, -1):
                event = self._events[place]
                if (event.name, event.scope) == (name, scope) and at_s - event.until_s < TOGETHER_S:
                    self._events[place] = replace(
                        event, until_s=round(max(at_s, event.until_s), 1), count=event.count + count
                    )
                    return
            if len(self._events) >= MOST_EVENTS:
                self._left_out += 1
                return
            at_s = round(max(0.0, at_s), 1)
            self._events.append(Event(at_s=at_s, until_s=at_s, name=name, scope=scope, count=count, text=text[:1024]))

    def beats(self, at_s: float, beats: Mapping[int, GpuSample | Absent]) -> None:
        """What each GPU showed at one moment."""
        for index, beat in beats.items():
            scope = f"gpu={index}"
            if isinstance(beat, Absent):
                self.note(at_s, "gpu.power", scope, f"{beat.status}: {beat.reason}")
                continue
            self.add(at_s, "gpu.power", scope, "W", beat.power)
            self.add(at_s, "gpu.clock.sm", scope, "Hz", beat.clock)
            self.add(at_s, "gpu.temperature", scope, "Cel", beat.temperature)
            held = [reason for reason, mask in FAULTS.items() if beat.reasons & mask]
            self.add(
                at_s, "gpu.throttle.active", f"{scope},reason=power_cap", "1", float(bool(beat.reasons & POWER_CAP))
            )
            self.add(at_s, "gpu.throttle.active", f"{scope},reason=other", "1", float(bool(held)))
            for reason in held:
                self.note(at_s, "gpu.throttle.active", f"{scope},reason={reason}", "its clocks were held down")

    def see(self, at_s: float, snapshot: Snapshot) -> None:
        """Notes which counters rose since the snapshot before."""
        for metric in snapshot.metrics:
            if not COUNTERS.fullmatch(metric.name) or not _counts(metric.name):
                continue
            for scope, value in metric.values.items():
                if isinstance(value, bool) or not isinstance(value, int | float):
                    continue
                key = (metric.name, scope)
                # An XID that had never been seen has no reading before its first.
                before = self._counted.get(key, 0.0 if metric.name.startswith("xid.") and self._looked else value)
                self._counted[key] = value
                if value > before:
                    self.note(at_s, metric.name, scope, f"rose from {before:g} to {value:g}", value - before)
        self._looked = True

    def timeline(self, *, whole: bool = True) -> Timeline:
        """Everything so far; or, for the record, what shows how a part fares: its rates, and what the driver told of it."""
        with self._lock:
            series = [
                _series(key, self._units[key], found)
                for key, found in self._buckets.items()
                if whole or _is_main(key[0], self._units[key])
            ]
            return Timeline(
                bucket_s=self._bucket_s,
                series=tuple(series),
                events=tuple(sorted(self._events, key=lambda event: event.at_s)),
                left_out=self._left_out,
            )

    def of(self, name: str, scope: str, params: Mapping[str, Value]) -> Series | None:
        """One series so far."""
        key = _key(name, scope, params)
        with self._lock:
            return _series(key, self._units[key], self._buckets[key]) if key in self._buckets else None


def _is_main(name: str, unit: str) -> bool:
    return name.startswith("gpu.") or (unit in RATES and not name.endswith(".algbw"))


def _counts(name: str) -> bool:
    return name.startswith("xid.") or (name in READINGS and READINGS[name].counter)


def _key(name: str, scope: str, params: Mapping[str, Value]) -> Key:
    return name, scope, tuple(sorted(params.items(), key=lambda item: item[0]))


def _joined(one: Bucket | None, other: Bucket) -> Bucket:
    if one is None:
        return other
    return one[0] + other[0], min(one[1], other[1]), one[2] + other[2], max(one[3], other[3])


def _series(key: Key, unit: str, buckets: Mapping[int, Bucket]) -> Series:
    name, scope, params = key
    places = sorted(buckets)
    rows = [buckets[place] for place in places]
    return Series(
        name=name,
        scope=scope,
        unit=unit,
        params=dict(params),
        at=tuple(places),
        n=tuple(row[0] for row in rows),
        low=_rounded(row[1] for row in rows),
        mean=_rounded(row[2] / row[0] for row in rows),
        high=_rounded(row[3] for row in rows),
    )


def _rounded(values: Iterable[float]) -> tuple[float, ...]:
    return tuple(float(f"{value:.{DIGITS}g}") for value in values)
