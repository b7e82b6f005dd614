"""Compare two states of the same hosts and list every change, the most important first."""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from dataclasses import replace

from fleet.diff.figures import changed_figures
from fleet.diff.merged import merge_changes
from fleet.diff.parts import GpuSlot, gpu_changes, gpu_slots, other_parts
from fleet.diff.versions import changed_versions, version_changes
from fleet.judge.criteria import Criterion
from fleet.records.host_state import Figure, HostState
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
    Key,
)

KINDS_BY_IMPORTANCE = (
    REGRESSED,
    REPLACED,
    MOVED,
    GONE,
    NEW,
    UNCLEAR,
    FIGURES_GONE,
    VERSION,
    CHANGED,
    IMPROVED,
    FIGURES_NEW,
)

HostStates = Mapping[str, HostState]
Criteria = Mapping[str, Sequence[Criterion]]
"""Host -> the criteria that apply to it."""


class Comparison:
    """A comparison to which hosts are added one by one, so that the figures of a large fleet need not stay in memory."""

    def __init__(self, planned: Container[str]) -> None:
        """Begin a comparison. `planned`: the hosts of the new run."""
        self._planned = planned
        self.compared = 0
        """Number of figures that both states of a host have."""
        self.figures = 0
        """Number of figures in the new states, compared or not."""
        self.hosts = 0
        """Number of hosts with a record in both states."""
        self._changes: list[Change] = []
        self._before: dict[str, GpuSlot] = {}
        self._after: dict[str, GpuSlot] = {}
        self._versions: dict[tuple[str, str, str], list[str]] = {}
        self._order: dict[str, int] = {}

    def add(self, host: str, old: HostState | None, new: HostState | None, criteria: Sequence[Criterion]) -> None:
        """Compare one host.

        Args:
            host: name of the host.
            old: earlier state of the host; None if it has none.
            new: new state of the host; None if it has none.
            criteria: criteria that apply to the host. Only those with `vs_baseline` are used. They determine which changes of
                figures are large enough to be listed.
        """
        self._order.setdefault(host, len(self._order))
        had_record, has_record = old is not None and old.has_record, new is not None and new.has_record
        if new is not None and has_record:
            self.figures += sum(map(len, new.figures.values()))
        if old is not None and new is not None and had_record and has_record:
            self.hosts += 1
            self.compared += _count_common_figures(old, new)
            self._before |= gpu_slots(host, old)
            self._after |= gpu_slots(host, new)
            self._changes += other_parts(host, old.parts, new.parts)
            self._changes += changed_figures(host, old, new, criteria, self._planned)
            for change in changed_versions(old, new):
                self._versions.setdefault(change, []).append(host)
        elif had_record:
            text = f"{host} has no record in the new run" if new is not None else f"{host} is not in the new run"
            self._changes.append(Change(kind=GONE, host=host, scope="host", what="host", text=text))
        elif has_record:
            text = f"{host} has no earlier record"
            self._changes.append(Change(kind=NEW, host=host, scope="host", what="host", text=text))

    def changes(self) -> tuple[Change, ...]:
        """Return every change, the most important kinds first. Changes of one kind follow the order of the hosts."""
        changes = [*self._changes, *gpu_changes(self._before, self._after), *version_changes(self._versions)]

        def sort_key(change: Change) -> tuple[int, int, str]:
            host_number = self._order.get(change.host, len(self._order))
            return KINDS_BY_IMPORTANCE.index(change.kind), host_number, change.what

        return tuple(sorted(merge_changes(changes), key=sort_key))


def compare(old: HostStates, new: HostStates, criteria: Criteria) -> Comparison:
    """Compare all hosts that are in `old` or `new`, those of `new` first.

    Args:
        old: host -> its earlier state; `merge_states` merges the states from several runs.
        new: host -> its state now.
        criteria: host -> the criteria that apply to it. Only those with `vs_baseline` are used. They determine which changes of
            figures are large enough to be listed.
    """
    comparison = Comparison(new)
    figures_by_serial: dict[str, Mapping[Key, Figure]] = {
        serial: {} for state in old.values() for serial in state.gpus_by_identity()
    }
    figures_by_serial |= {
        serial: figures for state in old.values() for serial, figures in state.figures.items() if serial
    }
    for host in dict.fromkeys((*new, *old)):
        before, after = old.get(host), new.get(host)
        if before and after:  # if a GPU moved, its earlier figures are in the state of its previous host
            moved = {serial: figures_by_serial[serial] for serial in after.figures if serial in figures_by_serial}
            before = replace(before, figures={**moved, **before.figures})
        comparison.add(host, before, after, criteria.get(host, ()))
    return comparison


def _count_common_figures(old: HostState, new: HostState) -> int:
    """Return the number of figures that both states have."""
    return sum(len(figures.keys() & old.figures.get(serial, {}).keys()) for serial, figures in new.figures.items())
