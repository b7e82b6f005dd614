"""Two sights of the same hosts held against each other: every change, in the order in which it is told."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from fleet.diff.figures import figures
from fleet.diff.folded import folded
from fleet.diff.parts import Seat, gpus, other_parts, seats
from fleet.diff.versions import told_once, versions
from fleet.judge.criteria import Criterion
from fleet.records.host_state import Sight
from schemas.baselines import (
    CHANGED,
    FIGURES_GONE,
    FIGURES_NEW,
    GONE,
    IMPROVED,
    MOVED,
    NEW,
    REGRESSED,
    REPLACED,
    UNCLEAR,
    VERSION,
    Change,
)

ORDER = (REGRESSED, REPLACED, MOVED, GONE, NEW, UNCLEAR, FIGURES_GONE, VERSION, CHANGED, IMPROVED, FIGURES_NEW)

Sights = Mapping[str, Sight]
Criteria = Mapping[str, Sequence[Criterion]]
"""Host -> the criteria that judge it."""


class Comparison:
    """A comparison to which host after host is added, so that of a large fleet the figures need not be kept."""

    def __init__(self) -> None:
        self.compared = 0
        """Figures that both sides have: with none of them nothing was compared."""
        self.figures = 0
        """Figures that the new side has."""
        self.hosts = 0
        """Hosts of which both sides have a record."""
        self._found: list[Change] = []
        self._before: dict[str, Seat] = {}
        self._after: dict[str, Seat] = {}
        self._versions: dict[tuple[str, str, str], list[str]] = {}
        self._order: dict[str, int] = {}

    def add(self, host: str, old: Sight | None, new: Sight | None, criteria: Sequence[Criterion]) -> None:
        """Takes one host; None where a side does not know it.

        Of `criteria`, those that judge the host, the ones with `vs_baseline` say what is noise.
        """
        self._order.setdefault(host, len(self._order))
        was, now = old is not None and old.known, new is not None and new.known
        if new is not None and now:
            self.figures += sum(map(len, new.figures.values()))
        if old is not None and new is not None and was and now:
            self.hosts += 1
            self.compared += _in_common(old, new)
            self._before |= seats(host, old)
            self._after |= seats(host, new)
            self._found += other_parts(host, old.parts, new.parts)
            self._found += figures(host, old, new, criteria)
            for told in versions(old, new):
                self._versions.setdefault(told, []).append(host)
        elif was:
            text = f"{host} left no record in the new run" if new is not None else f"{host} is not in the new run"
            self._found.append(Change(kind=GONE, host=host, scope="host", what="host", text=text))
        elif now:
            text = f"{host} has no earlier record"
            self._found.append(Change(kind=NEW, host=host, scope="host", what="host", text=text))

    def changes(self) -> tuple[Change, ...]:
        """Every change, regressions and parts that differ first, then by host in the order in which they were added."""
        found = [*self._found, *gpus(self._before, self._after), *told_once(self._versions)]
        order, last = self._order, len(self._order)
        return tuple(
            sorted(folded(found), key=lambda item: (ORDER.index(item.kind), order.get(item.host, last), item.what))
        )


def compare(old: Sights, new: Sights, criteria: Criteria) -> Comparison:
    """The comparison of all hosts of either side, those of `new` in their order first."""
    found = Comparison()
    everywhere = {serial: figures for was in old.values() for serial, figures in was.figures.items() if serial}
    for host in dict.fromkeys((*new, *old)):
        was, now = old.get(host), new.get(host)
        if was and now:  # what came from another host has its figures there
            moved = {serial: everywhere[serial] for serial in now.figures if serial in everywhere}
            was = replace(was, figures={**moved, **was.figures})
        found.add(host, was, now, criteria.get(host, ()))
    return found


def difference(old: Sights, new: Sights, criteria: Criteria) -> tuple[Change, ...]:
    """Every change from `old` to `new`, as `Comparison.changes` orders them.

    Args:
        old: host -> what it showed then; several runs as one by `sight.together`.
        new: host -> what it shows now.
        criteria: host -> those that judge it; of these the ones with `vs_baseline` say what is noise.
    """
    return compare(old, new, criteria).changes()


def _in_common(old: Sight, new: Sight) -> int:
    return sum(len(figures.keys() & old.figures.get(serial, {}).keys()) for serial, figures in new.figures.items())
