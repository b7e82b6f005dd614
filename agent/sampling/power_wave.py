"""Power of a GPU under a load that is switched on and off at a fixed period: plateaus, rise and shape of one period.

NVML gives a new power value only every 20 to 100 ms, depending on the GPU, and each value may be a mean over up to 1 s. So only
readings at which the value changes are used. NVML's values resolve a period only if each of its two phases (load on, load off) is
long enough: at least VALUES_PER_PHASE times the time between two new values, and the same multiple of the time over which NVML
averages.
"""

from __future__ import annotations

import bisect
import itertools
import statistics
from array import array
from collections.abc import Sequence
from dataclasses import dataclass

STUCK_S = 3.0
"""A power value that stays the same for at least this many seconds and at least two periods of the load is not a measurement:
NVML has a new value every 20 to 100 ms, and each value is a mean over at most 1 s."""
UPDATE_S = 0.1
"""The longest time that a GPU may need for a new power value in NVML, in seconds."""
PAUSE_S = 1.0
"""If two successive equal readings are more than this many seconds apart, the value does not count as unchanged between them. If
two successive failed readings are more than this many seconds apart, they belong to different time spans."""
FAST_TELEMETRY = "fast-telemetry"
"""First part of the names of the files `fast-telemetry.RANK` in the work directory of a launch. While such a file exists, the
supervisor reads the power of the GPUs every `telemetry.FAST_PERIOD_S`, which is more often than NVML has new values."""
VALUES_PER_PHASE = 2.0
"""Minimum length of each phase (load on, load off), as a multiple of the time between two new values of NVML or of the time over
which NVML averages, whichever is longer. A phase of twice that time contains the whole averaging time of at least one value."""
MIN_VALUES = 3
"""Minimum number of new values on each of the two plateaus (power with and without load), counted over all periods. With only
one or two values, a single outlier could move the median far."""
WAVE_POINTS = 64
GAP = "."
MAX_VALUES = 2_000_000
"""Maximum number of values that are kept for each GPU: enough for 11 hours at 50 new values per second."""
MAX_STRETCHES = 10_000
"""Maximum number of recorded time spans in which the value did not change for STUCK_S, and of those in which readings failed. A
healthy GPU under load has neither."""
BLOCK = 1000
"""Number of successive values that are kept or removed together, because a rise is the difference of two successive values. NVML
needs at least 20 s for 1000 new values, so a block contains several complete periods of the load."""
LAGS = 32
"""Number of delays between the load and NVML's values that are tried. They are evenly spread over half a period."""


@dataclass(frozen=True, kw_only=True)
class PowerValue:
    """A power reading of one GPU."""

    at: float
    """When it was read, by `time.monotonic()`."""
    power: float
    """W"""
    averaged_s: float = 0.0
    """Time over which NVML averages the value, as far as it is documented; 0: the power at that moment."""


@dataclass(frozen=True, kw_only=True)
class PowerWave:
    """The power of a GPU over one period of the load."""

    low: float
    """W without load."""
    high: float
    """W under load."""
    slew: float
    """The fastest rise in a period, in W/s: the median of all periods. A rise is measured between two successive values of NVML,
    so the real rise may be faster."""
    update_s: float
    """Lower quartile of the times between two new values of NVML, in seconds."""
    wave: str
    """Mean power in each of WAVE_POINTS equal parts of the period, over all periods, as whole numbers of W separated by spaces.
    `.` is a part without a value. The first part begins when the load is switched on."""

    @property
    def amplitude(self) -> float:
        """Return the difference between the power with and without load, in W."""
        return self.high - self.low


class UnresolvedError(Exception):
    """NVML's values do not resolve the period of the load; the message says why."""


def power_wave(values: Sequence[PowerValue], begin: float, period_s: float) -> PowerWave:
    """Return the power over one period, from readings during a whole number of periods.

    The first period begins at `begin`. The load is on in the first half of each period, and off in the second half.

    Raises:
        UnresolvedError: the readings do not resolve the period, or are too few.
    """
    updates = _updates(values)
    if len(updates) < 2 * MIN_VALUES:
        raise UnresolvedError(
            f"NVML gave only {len(updates)} new power values during the load, and at least {2 * MIN_VALUES} are needed"
        )
    gaps = sorted(later.at - earlier.at for earlier, later in itertools.pairwise(updates))
    update_s = gaps[len(gaps) // 4]  # not the median: NVML's values may be equal on a plateau, which makes gaps longer
    least_s = 2 * VALUES_PER_PHASE * max(update_s, *(value.averaged_s for value in updates))
    if period_s < least_s:
        raise UnresolvedError(
            f"NVML's power values do not resolve this period: NVML has a new value every {update_s:.3g} s"
            + (f", averaged over {updates[0].averaged_s:g} s" if updates[0].averaged_s else "")
            + f"; the shortest period that they resolve is {least_s:.3g} s"
        )
    moments = [(value.at - begin) % period_s / period_s for value in updates]
    powers = [value.power for value in updates]
    lag = max(range(LAGS), key=lambda step: _contrast(moments, powers, step / LAGS / 2)) / LAGS / 2
    shifted = [(moment - lag) % 1 for moment in moments]
    plateaus = [
        [power for moment, power in zip(shifted, powers, strict=True) if first <= moment < first + 0.25]
        for first in (0.2, 0.7)  # leave out values near the moments at which the load is switched
    ]
    if min(map(len, plateaus)) < MIN_VALUES:
        raise UnresolvedError(
            f"on the plateaus of the power, NVML gave {len(plateaus[0])} new values with load and {len(plateaus[1])} without; "
            f"at least {MIN_VALUES} of each are needed"
        )
    high, low = map(statistics.median, plateaus)
    return PowerWave(
        low=low, high=high, slew=_slew(updates, begin, period_s), update_s=update_s, wave=_wave(moments, powers)
    )


def _updates(values: Sequence[PowerValue]) -> list[PowerValue]:
    """Return the readings at which the value changed."""
    return [later for earlier, later in itertools.pairwise(values) if later.power != earlier.power]


def _contrast(moments: Sequence[float], powers: Sequence[float], lag: float) -> float:
    """Return the mean power in the half period that begins at `lag`, minus that in the other half.

    `lag` and the moments are shares of a period.
    """
    halves: tuple[list[float], list[float]] = ([], [])
    for moment, power in zip(moments, powers, strict=True):
        halves[(moment - lag) % 1 >= 0.5].append(power)
    return statistics.fmean(halves[0]) - statistics.fmean(halves[1]) if all(halves) else float("-inf")


def _slew(updates: Sequence[PowerValue], begin: float, period_s: float) -> float:
    """Return the fastest rise in a period, in W/s: the median of all periods."""
    largest: dict[int, float] = {}
    for earlier, later in itertools.pairwise(updates):
        number = int((later.at - begin) // period_s)
        rise = (later.power - earlier.power) / (later.at - earlier.at)
        largest[number] = max(rise, largest.get(number, 0.0))
    return statistics.median(largest.values())


def _wave(moments: Sequence[float], powers: Sequence[float]) -> str:
    points: list[list[float]] = [[] for _ in range(WAVE_POINTS)]
    for moment, power in zip(moments, powers, strict=True):
        points[min(int(moment * WAVE_POINTS), WAVE_POINTS - 1)].append(power)
    return " ".join(f"{statistics.fmean(point):.0f}" if point else GAP for point in points)


class PowerLog:
    """The power values of one GPU that differ from the previous value, at most MAX_VALUES of them. A value takes 16 bytes.

    When the log is full, every other block of BLOCK values is removed. From then on, only half as many of the new blocks are
    kept.
    """

    def __init__(self) -> None:
        self._times, self._powers, self._averaged_s = array("d"), array("d"), 0.0
        self._latest: PowerValue | None = None
        self._since = 0.0
        """When the latest value was first read."""
        self._unchanged: dict[float, tuple[float, float]] = {}
        """When a value was first read -> when it was last read, and the value. Only if it did not change for STUCK_S."""
        self._failures: list[tuple[float, float, str]] = []
        """First and last moment of each time span of failed readings, and the reason of its last failure."""
        self._count, self._interval = 0, 1
        """Number of values so far that differed from the previous value; one of every `_interval` blocks of them is kept."""

    def add(self, value: PowerValue) -> None:
        """Add a reading that is later than all earlier readings."""
        before, self._latest = self._latest, value
        if before is None or value.power != before.power or value.at - before.at > PAUSE_S:
            self._since = value.at
        elif value.at - self._since >= STUCK_S and len(self._unchanged) < MAX_STRETCHES:
            self._unchanged[self._since] = (value.at, value.power)
        if before is not None and value.power == before.power:
            return
        block, self._count = self._count // BLOCK, self._count + 1
        if len(self._times) >= MAX_VALUES:
            self._interval *= 2
            self._times, self._powers = _even_blocks(self._times), _even_blocks(self._powers)
        if block % self._interval == 0:
            self._times.append(value.at)
            self._powers.append(value.power)
            self._averaged_s = max(self._averaged_s, value.averaged_s)

    def select(self, begin: float, end: float) -> list[PowerValue]:
        """Return the kept values between two moments."""
        first, last = bisect.bisect_left(self._times, begin), bisect.bisect_right(self._times, end)
        columns = zip(self._times[first:last], self._powers[first:last], strict=True)
        return [PowerValue(at=at, power=power, averaged_s=self._averaged_s) for at, power in columns]

    def add_failure(self, at: float, reason: str) -> None:
        """Add a reading that failed. If MAX_STRETCHES time spans are recorded, extend the last one."""
        first, last, _ = self._failures[-1] if self._failures else (at, float("-inf"), "")
        if at - last <= PAUSE_S or len(self._failures) >= MAX_STRETCHES:
            self._failures[-1] = (first, at, reason)
        else:
            self._failures.append((at, at, reason))

    def failure_between(self, begin: float, end: float) -> str:
        """Return why readings failed in the last time span of failed readings that overlaps `begin` to `end`.

        Return an empty text if there is no such time span.
        """
        reasons = [reason for first, last, reason in self._failures if first <= end and last >= begin]
        return reasons[-1] if reasons else ""

    def why_stuck(self, begin: float, end: float, period_s: float) -> str:
        """Return why the readings between two moments, under a pulsed load, are not a measurement; empty if they may be valid.

        If NVML's values cannot resolve the period, return an empty text: all values of a working GPU may then be equal.
        """
        if period_s < 2 * VALUES_PER_PHASE * max(UPDATE_S, self._averaged_s):
            return ""
        stretches = ((min(end, last) - max(begin, first), power) for first, (last, power) in self._unchanged.items())
        longest_s, power = max(stretches, default=(0.0, 0.0))
        is_stuck = longest_s >= max(STUCK_S, 2 * period_s)
        return f"the power stayed at {power:g} W for {longest_s:.3g} s of pulsed load" if is_stuck else ""


def _even_blocks(values: array[float]) -> array[float]:
    """Return the blocks 0, 2, 4 and so on."""
    result = array("d")
    for first in range(0, len(values), 2 * BLOCK):
        result.extend(values[first : first + BLOCK])
    return result
