"""One row of a tally: how many verdicts of one criterion on one figure or reading are `pass`, `fail` or `inconclusive`.

A row keeps counts, values and the worst parts. It grows with the fleet only if the values are texts that differ from host to
host. Up to MAX_EXACT different numbers are kept exactly. If there are more, they are rounded to about one part in ten thousand.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from schemas.records import Value
from schemas.reports import FAIL, INCONCLUSIVE, PASS, FarthestPart, Judged, Spread, action_rank
from schemas.scopes import Scope

MAX_FARTHEST, MAX_VALUES, MAX_BINS = 10, 8, 24
"""Maximum number of worst parts, and of different texts, that the report lists; number of bins of the histogram of numbers."""
MAX_EXACT = 1000
"""Maximum number of different values that are kept exactly."""
ROUNDING_STEPS = 1 << 14
"""A number is rounded to one of this many steps between 0 and the next power of two."""
MAX_BUFFERED = 2048
"""If this many values are buffered, `flush` counts them."""
_RANK = {FAIL: 0, INCONCLUSIVE: 1, PASS: 2}

Entry = tuple[int, float, int, str, Value, str, str, str]
"""Rank of the verdict (_RANK), quality of the value (`_quality`), position of the host in the plan, scope, value, host, serial,
verdict."""


@dataclass(kw_only=True, slots=True)
class TallyRow:
    """The counts of one row."""

    criterion: str
    name: str
    stage: str
    params: Mapping[str, Value]
    unit: str
    operator: str
    source: str
    basis: str
    action: str = "none"
    limits: set[tuple[str, Value]] = field(default_factory=set)
    """At most two limits, with their types: enough to know whether limits differ."""
    counts: Counter[str] = field(default_factory=Counter)
    numbers: Counter[float] = field(default_factory=Counter)
    rounded: bool = False
    least: float = math.inf
    most: float = -math.inf
    texts: Counter[str] = field(default_factory=Counter)
    farthest: list[Entry] = field(default_factory=list)
    threshold: float = math.inf
    """A pass with a higher quality (`_quality`) than this cannot be among the worst parts."""
    higher_is_better: bool = True
    buffer: list[float] = field(default_factory=list)
    passing: list[float] = field(default_factory=list)
    """Values of passes that are not counted yet; `flush` counts them."""

    def add(self, verdict: str, value: Value, limit: Value, position: int, host: str, scope: str, serial: str) -> None:
        """Count one verdict; `position` is the position of the host in the plan."""
        self.counts[verdict] += 1
        self.add_limit(limit)
        if isinstance(value, float | int) and not isinstance(value, bool):
            if not math.isfinite(value):
                return
            self.buffer.append(value)
            if len(self.buffer) >= MAX_BUFFERED:
                self.flush()
            quality = self._quality(value, limit)
        elif value is None:
            return
        else:
            self.texts[str(value)] += 1
            quality = 0.0
        self._offer((_RANK[verdict], quality, position, scope, value, host, serial, verdict))

    def add_limit(self, limit: Value) -> None:
        if limit is not None and len(self.limits) < 2:
            self.limits.add((type(limit).__name__, limit))

    def add_pass(self, value: float, position: int, host: str, scope: str) -> None:
        """Count a pass with a number, as `add` does, but faster. The row must already have the limit (`add_limit`)."""
        buffer = self.passing
        buffer.append(value)
        if len(buffer) >= MAX_BUFFERED:
            self.flush()
        quality = value if self.higher_is_better else -value
        if quality <= self.threshold:
            self._offer((_RANK[PASS], quality, position, scope, value, host, "", PASS))

    def add_passes(
        self, values: Sequence[float], positions: Sequence[int], hosts: Sequence[str], scopes: Iterable[str]
    ) -> None:
        """Count one pass for each of these hosts, as `add_pass` does. `values` has one value for each host, in the same order."""
        worst = min(values) if self.higher_is_better else -max(values)
        if worst <= self.threshold:
            for value, position, host, scope in zip(values, positions, hosts, scopes, strict=False):
                self.add_pass(value, position, host, scope)
            return
        self.passing += values
        if len(self.passing) >= MAX_BUFFERED:
            self.flush()

    def add_repeated(
        self, value: Value, limit: Value, hosts: Sequence[tuple[int, str]], count: int, scope: str
    ) -> None:
        """Count the same pass on `count` hosts; `hosts`: position in the plan and name of the first MAX_FARTHEST of them."""
        for position, host in hosts:
            self.add(PASS, value, limit, position, host, scope, "")
        more = count - len(hosts)
        self.counts[PASS] += more
        if isinstance(value, float | int) and not isinstance(value, bool):
            if more and math.isfinite(value):
                self.numbers[_rounded(value) if self.rounded else value] += more
        elif value is not None:
            self.texts[str(value)] += more

    def _offer(self, entry: Entry) -> None:
        """Keep the entry if it is among the MAX_FARTHEST worst ones."""
        farthest = self.farthest
        if len(farthest) < MAX_FARTHEST:
            farthest.append(entry)
        elif _order(entry) < _order(farthest[-1]):
            farthest[-1] = entry
        else:
            return
        farthest.sort(key=_order)
        self._set_threshold()

    def _set_threshold(self) -> None:
        if len(self.farthest) == MAX_FARTHEST:
            last = self.farthest[-1]
            self.threshold = last[1] if last[0] == _RANK[PASS] else -math.inf

    def describe(self, source: str, basis: str, unit: str, operator: str) -> None:
        """Update source, basis, unit and operator.

        They may differ between hosts with different packs. The result does not depend on the order of the calls.
        """
        self.source, self.basis = min((self.source, self.basis), (source, basis))
        self.unit, self.operator = max(self.unit, unit), max(self.operator, operator)
        self.higher_is_better = self.operator in ("ge", "gt")

    def _quality(self, value: float, limit: Value) -> float:
        """Return a number that is larger for better values."""
        if self.operator in ("ge", "gt"):
            return value
        if self.operator in ("le", "lt"):
            return -value
        return 0.0 if value == limit else -1.0

    def flush(self) -> None:
        """Count the buffered numbers."""
        if self.passing:
            self.counts[PASS] += len(self.passing)
            self.buffer += self.passing
            self.passing.clear()
        if not self.buffer:
            return
        self.least, self.most = min(self.least, *self.buffer), max(self.most, *self.buffer)
        self.numbers.update(map(_rounded, self.buffer) if self.rounded else self.buffer)
        self.buffer.clear()
        self._limit_size()

    def _limit_size(self) -> None:
        if len(self.numbers) > MAX_EXACT:
            self._round()

    def _round(self) -> None:
        """Round all numbers, including later ones."""
        if not self.rounded:
            self.rounded, exact = True, self.numbers
            self.numbers = Counter()
            for value, count in exact.items():
                self.numbers[_rounded(value)] += count

    def update(self, other: TallyRow) -> None:
        """Add the counts and values of the same row of other hosts."""
        other.flush()
        self.counts.update(other.counts)
        self.texts.update(other.texts)
        self.limits = set(sorted(self.limits | other.limits, key=str)[:2])
        self.least, self.most = min(self.least, other.least), max(self.most, other.most)
        if self.rounded != other.rounded:
            self._round()
            other._round()
        self.numbers.update(other.numbers)
        self._limit_size()
        self.farthest = heapq.nsmallest(MAX_FARTHEST, [*self.farthest, *other.farthest], key=_order)
        self._set_threshold()
        self.action = more_severe(self.action, other.action)
        self.describe(other.source, other.basis, other.unit, other.operator)

    @property
    def total(self) -> int:
        self.flush()
        return self.counts.total()

    def judged(self, serials: Mapping[tuple[str, str], str]) -> Judged:
        """Return the row for the report. `serials`: host and scope of a GPU -> its serial, for verdicts without a serial."""
        self.flush()
        limit = next(iter(self.limits))[1] if len(self.limits) == 1 else None
        differ = len(self.texts) > 1 or self.least < self.most or (self.texts and self.least <= self.most)
        return Judged(
            criterion=self.criterion,
            name=self.name,
            stage=self.stage,
            params=self.params,
            unit=self.unit,
            operator=self.operator,
            limit=limit,
            source=self.source,
            basis=self.basis,
            action=self.action,
            passed=self.counts[PASS],
            failed=self.counts[FAIL],
            inconclusive=self.counts[INCONCLUSIVE],
            spread=self._spread(),
            values=dict(sorted(self.texts.items(), key=lambda item: (-item[1], item[0]))[:MAX_VALUES]),
            farthest=tuple(
                FarthestPart(
                    host=host,
                    scope=scope,
                    value=value,
                    serial=serial or serials.get((host, Scope.parse(scope).device), ""),
                    verdict=verdict,
                )
                for _, _, _, scope, value, host, serial, verdict in self.farthest
            )
            if differ or self.counts[FAIL]
            else (),
        )

    def _spread(self) -> Spread | None:
        """Return the distribution of the numbers; None if the row has no number."""
        if not self.numbers:
            return None
        total, ordered = self.numbers.total(), sorted(self.numbers.items())
        bins = [0] * MAX_BINS if self.least < self.most else []
        width = self.most - self.least
        for value, count in ordered if bins and math.isfinite(width) else ():
            bin_index = int((value - self.least) / width * MAX_BINS)
            bins[min(max(bin_index, 0), MAX_BINS - 1)] += count
        low, middle, high = (_value_at(ordered, share * (total - 1)) for share in (0.05, 0.5, 0.95))
        within = [min(max(value, self.least), self.most) for value in (low, middle, high)]
        least, p05, p50, p95, most = map(_as_int_if_whole, (self.least, *within, self.most))
        return Spread(n=total, min=least, p05=p05, p50=p50, p95=p95, max=most, bins=tuple(bins))


def _order(entry: Entry) -> tuple[int, float, int, str]:
    return entry[:4]


def _as_int_if_whole(value: float) -> float:
    """Return a whole number as an int, so that the JSON of a report does not depend on the order in which values are counted.

    For a Counter, 1 and 1.0 are the same key, and it keeps the one that was added first. But JSON writes them differently.
    """
    return int(value) if float(value).is_integer() and abs(value) < 1 << 53 else float(value)


def _rounded(value: float) -> float:
    fraction, exponent = math.frexp(value)
    return math.ldexp(round(fraction * ROUNDING_STEPS) / ROUNDING_STEPS, exponent)


def _value_at(ordered: Sequence[tuple[float, int]], rank: float) -> float:
    """Return the value at a rank in sorted (value, count) pairs. The rank counts from 0; a fractional rank is rounded down."""
    counted = itertools.accumulate(count for _, count in ordered)
    return next(value for (value, _), total in zip(ordered, counted, strict=True) if total > rank)


def more_severe(first: str, second: str) -> str:
    return min(first, second, key=action_rank)
