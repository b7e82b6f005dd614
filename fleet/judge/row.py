"""One row of a tally as it fills: the verdicts of one criterion on one figure, whatever the size of the fleet.

What is kept of a row does not grow with the fleet: counts, the values (exact while few of them differ, else to one part in
ten thousand), and the parts that lie farthest on the wrong side.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from schemas.records import Value
from schemas.reports import ACTIONS, FAIL, INCONCLUSIVE, PASS, Far, Judged, Spread, Verdict
from schemas.scopes import Scope

MOST_FAR, MOST_VALUES, MOST_BINS = 10, 8, 24
MOST_EXACT = 1000
"""Different numbers of a row that are told apart exactly."""
DIGITS = 1 << 14
"""Steps between two powers of two, beyond that."""
BUFFERED = 2048
_RANK = {FAIL: 0, INCONCLUSIVE: 1, PASS: 2}


@dataclass(kw_only=True, slots=True)
class Row:
    """One row as it fills."""

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
    """At most two, by which it is known that they differ."""
    counts: Counter[str] = field(default_factory=Counter)
    numbers: Counter[float] = field(default_factory=Counter)
    rounded: bool = False
    least: float = math.inf
    most: float = -math.inf
    texts: Counter[str] = field(default_factory=Counter)
    far: list[tuple[int, float, int, str, Value, str, str, str]] = field(default_factory=list)
    """Rank of the verdict, how well it is, place and name of the host, scope, value, serial, verdict."""
    edge: float = math.inf
    """A pass that is better than this is none of the farthest."""
    upward: bool = True
    buffer: list[float] = field(default_factory=list)
    passing: list[float] = field(default_factory=list)
    """Of passes that are not counted yet."""

    def add(self, verdict: str, value: Value, limit: Value, place: int, host: str, scope: str, serial: str) -> None:
        """Counts one verdict."""
        self.counts[verdict] += 1
        self.note(limit)
        if isinstance(value, float | int) and not isinstance(value, bool):
            if not math.isfinite(value):
                return
            self.buffer.append(value)
            if len(self.buffer) >= BUFFERED:
                self.settle()
            good = self._good(value, limit)
        elif value is None:
            return
        else:
            self.texts[str(value)] += 1
            good = 0.0
        self._offer((_RANK[verdict], good, place, scope, value, host, serial, verdict))

    def note(self, limit: Value) -> None:
        """Knows a limit of the row."""
        if limit is not None and len(self.limits) < 2:
            self.limits.add((type(limit).__name__, limit))

    def put(self, value: float, place: int, host: str, scope: str) -> None:
        """Counts a number that passes, as `add` does; the limit is known to the row."""
        buffer = self.passing
        buffer.append(value)
        if len(buffer) >= BUFFERED:
            self.settle()
        good = value if self.upward else -value
        if good <= self.edge:
            self._offer((_RANK[PASS], good, place, scope, value, host, "", PASS))

    def many(self, value: Value, limit: Value, hosts: Sequence[tuple[int, str]], count: int, scope: str) -> None:
        """Counts the same pass of `count` hosts, of which `hosts` are the first, MOST_FAR of them if there are so many."""
        for place, host in hosts:
            self.add(PASS, value, limit, place, host, scope, "")
        more = count - len(hosts)
        self.counts[PASS] += more
        if isinstance(value, float | int) and not isinstance(value, bool):
            if more and math.isfinite(value):
                self.numbers[_rounded(value) if self.rounded else value] += more
        elif value is not None:
            self.texts[str(value)] += more

    def _offer(self, entry: tuple[int, float, int, str, Value, str, str, str]) -> None:
        far = self.far
        if len(far) < MOST_FAR:
            far.append(entry)
        elif _order(entry) < _order(far[-1]):
            far[-1] = entry
        else:
            return
        far.sort(key=_order)
        self._set_edge()

    def _set_edge(self) -> None:
        if len(self.far) == MOST_FAR:
            last = self.far[-1]
            self.edge = last[1] if last[0] == _RANK[PASS] else -math.inf

    def describe(self, source: str, basis: str, unit: str, operator: str) -> None:
        """Of several descriptions always the same one: packs of two GPU models may have a criterion of one name."""
        self.source, self.basis = min(told for told in ((self.source, self.basis), (source, basis)))
        self.unit, self.operator = max(self.unit, unit), max(self.operator, operator)

    def _good(self, value: float, limit: Value) -> float:
        """The larger, the farther on the right side."""
        if self.operator in ("ge", "gt"):
            return value
        if self.operator in ("le", "lt"):
            return -value
        return 0.0 if value == limit else -1.0

    def settle(self) -> None:
        """Takes what was put aside into the counts."""
        if self.passing:
            self.counts[PASS] += len(self.passing)
            self.buffer += self.passing
            self.passing.clear()
        if not self.buffer:
            return
        self.least, self.most = min(self.least, *self.buffer), max(self.most, *self.buffer)
        self.numbers.update(map(_rounded, self.buffer) if self.rounded else self.buffer)
        self.buffer.clear()
        self._round()

    def _round(self) -> None:
        if len(self.numbers) > MOST_EXACT:
            self._coarse()

    def _coarse(self) -> None:
        """From now on numbers are rounded, and so are those that are there."""
        if not self.rounded:
            self.rounded, exact = True, self.numbers
            self.numbers = Counter()
            for value, count in exact.items():
                self.numbers[_rounded(value)] += count

    def update(self, other: Row) -> None:
        """Adds the same row of other hosts."""
        other.settle()
        self.counts.update(other.counts)
        self.texts.update(other.texts)
        self.limits = set(sorted(self.limits | other.limits, key=str)[:2])
        self.least, self.most = min(self.least, other.least), max(self.most, other.most)
        if self.rounded != other.rounded:
            self._coarse()
            other._coarse()
        self.numbers.update(other.numbers)
        self._round()
        self.far = heapq.nsmallest(MOST_FAR, [*self.far, *other.far], key=_order)
        self._set_edge()
        self.action = worst(self.action, other.action)
        self.describe(other.source, other.basis, other.unit, other.operator)

    def stand_in(self) -> Verdict:
        """A pass of the row, of no host in particular."""
        return Verdict(
            host="",
            scope="",
            name=self.name,
            stage=self.stage,
            params=self.params,
            verdict=PASS,
            criterion=self.criterion,
            limit=min((limit for _, limit in self.limits), default=None, key=str),
            reason="",
        )

    def judged(self, serials: Mapping[tuple[str, str], str]) -> Judged:
        """The row as the report has it; `serials`: host and scope of each GPU -> its serial, where verdicts did not tell."""
        self.settle()
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
            values=dict(sorted(self.texts.items(), key=lambda item: (-item[1], item[0]))[:MOST_VALUES]),
            farthest=tuple(
                Far(
                    host=host,
                    scope=scope,
                    value=value,
                    serial=serial or serials.get((host, Scope.parse(scope).device), ""),
                    verdict=verdict,
                )
                for _, _, _, scope, value, host, serial, verdict in self.far
            )
            if differ or self.counts[FAIL]
            else (),
        )

    def _spread(self) -> Spread | None:
        if not self.numbers:
            return None
        total, ordered = self.numbers.total(), sorted(self.numbers.items())
        bins = [0] * MOST_BINS if self.least < self.most else []
        width = self.most - self.least
        for value, count in ordered if bins and math.isfinite(width) else ():
            place = int((value - self.least) / width * MOST_BINS)
            bins[min(max(place, 0), MOST_BINS - 1)] += count
        low, middle, high = (_at(ordered, share * (total - 1)) for share in (0.05, 0.5, 0.95))
        within = [min(max(value, self.least), self.most) for value in (low, middle, high)]
        least, p05, p50, p95, most = map(_plain, (self.least, *within, self.most))
        return Spread(n=total, min=least, p05=p05, p50=p50, p95=p95, max=most, bins=tuple(bins))


def _order(entry: tuple[int, float, int, str, Value, str, str, str]) -> tuple[int, float, int, str]:
    return entry[:4]


def _plain(value: float) -> float:
    """A whole number without a point: 1 and 1.0 are the same to a counter, and are written differently."""
    return int(value) if float(value).is_integer() and abs(value) < 1 << 53 else float(value)


def _rounded(value: float) -> float:
    fraction, exponent = math.frexp(value)
    return math.ldexp(round(fraction * DIGITS) / DIGITS, exponent)


def _at(ordered: Sequence[tuple[float, int]], place: float) -> float:
    """The value at a place of the sorted list, by nearest rank."""
    reached = itertools.accumulate(count for _, count in ordered)
    return next(value for (value, _), seen in zip(ordered, reached, strict=True) if seen > place)


def worst(first: str, second: str) -> str:
    """The graver of two actions."""
    return min(first, second, key=lambda action: ACTIONS.index(action) if action in ACTIONS else len(ACTIONS))
