"""Compare two states of the same hosts and list every change, the most important first."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from fleet.diff.figures import figures
from fleet.diff.folded import fold_changes
from fleet.diff.parts import GpuSlot, gpu_changes, gpu_slots, other_parts
from fleet.diff.versions import version_changes, versions
from fleet.judge.criteria import Criterion
from fleet.records.host_state import HostState
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

HostStates = Mapping[str, HostState]
Criteria = Mapping[str, Sequence[Criterion]]
"""Host -> the criteria that apply to it."""


class Comparison:
    """A comparison to which hosts are added one by one, so that the figures of a large fleet need not stay in memory."""

    def __init__(self) -> None:
        self.compared = 0
        """Figures that both sides have; 0: nothing was compared."""
        self.figures = 0
        """Figures that the new side has."""
        self.hosts = 0
        """Hosts with a record on both sides."""
        self._changes: list[Change] = []
        self._before: dict[str, GpuSlot] = {}
        self._after: dict[str, GpuSlot] = {}
        self._versions: dict[tuple[str, str, str], list[str]] = {}
        self._order: dict[str, int] = {}

    def add(self, host: str, old: HostState | None, new: HostState | None, criteria: Sequence[Criterion]) -> None:
        """Compare one host; None if a side does not have it.

        The criteria with `vs_baseline` define the noise.
        """
        self._order.setdefault(host, len(self._order))
        was, now = old is not None and old.has_record, new is not None and new.has_record
        if new is not None and now:
            self.figures += sum(map(len, new.figures.values()))
        if old is not None and new is not None and was and now:
            self.hosts += 1
            self.compared += _in_common(old, new)
            self._before |= gpu_slots(host, old)
            self._after |= gpu_slots(host, new)
            self._changes += other_parts(host, old.parts, new.parts)
            self._changes += figures(host, old, new, criteria)
            for change in versions(old, new):
                self._versions.setdefault(change, []).append(host)
        elif was:
            text = f"{host} has no record in the new run" if new is not None else f"{host} is not in the new run"
            self._changes.append(Change(kind=GONE, host=host, scope="host", what="host", text=text))
        elif now:
            text = f"{host} has no earlier record"
            self._changes.append(Change(kind=NEW, host=host, scope="host", what="host", text=text))

    def changes(self) -> tuple[Change, ...]:
        """Return every change: regressions and parts that differ first, then by host in the order of addition."""
        changes = [*self._changes, *gpu_changes(self._before, self._after), *version_changes(self._versions)]
        order, last = self._order, len(self._order)
        return tuple(
            sorted(
                fold_changes(changes), key=lambda item: (ORDER.index(item.kind), order.get(item.host, last), item.what)
            )
        )


def compare(old: HostStates, new: HostStates, criteria: Criteria) -> Comparison:
    """Compare all hosts of either side, those of `new` first."""
    comparison = Comparison()
    everywhere = {serial: figures for was in old.values() for serial, figures in was.figures.items() if serial}
    for host in dict.fromkeys((*new, *old)):
        was, now = old.get(host), new.get(host)
        if was and now:  # a GPU that came from another host has its earlier figures there
            moved = {serial: everywhere[serial] for serial in now.figures if serial in everywhere}
            was = replace(was, figures={**moved, **was.figures})
        comparison.add(host, was, now, criteria.get(host, ()))
    return comparison


def difference(old: HostStates, new: HostStates, criteria: Criteria) -> tuple[Change, ...]:
    """Return every change from `old` to `new`, ordered as in `Comparison.changes`.

    Args:
        old: host -> its earlier state; `merge_states` merges several runs.
        new: host -> its state now.
        criteria: host -> the criteria that apply to it; those with `vs_baseline` define the noise.
    """
    return compare(old, new, criteria).changes()


def _in_common(old: HostState, new: HostState) -> int:
    return sum(len(figures.keys() & old.figures.get(serial, {}).keys()) for serial, figures in new.figures.items())
