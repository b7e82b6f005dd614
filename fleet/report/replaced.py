"""List the shipped criteria that the operator's own packs replace. This module reads and writes no files."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import fields, replace

from fleet.judge.criteria import Criterion, Pack
from fleet.judge.pack_selection import REHEARSAL, port_pack, resolve
from fleet.report.criterion_text import describe
from schemas.reports import HostReport, LineKind, Replaced, SummaryLine

_MAX_LINES = 10
_TEXTS = frozenset({"id", "origin", "replaces", "source", "basis", "note"})
"""Fields of a criterion that affect neither whether a value passes nor what a failure means."""


def replaced_criteria(packs: Sequence[Pack], hosts: Iterable[HostReport]) -> tuple[Replaced, ...]:
    """Return each shipped criterion that a criterion of the operator replaces on at least one of these hosts."""
    of_operator = [pack for pack in packs if pack.chosen]
    if not any(item.replaces for pack in of_operator for item in pack.criteria):
        return ()
    shipped = {pack.name: pack for pack in packs if not pack.chosen}
    replaced: dict[tuple[str, ...], Replaced] = {}
    by_names = Counter(tuple(name for name in host.packs if name in shipped) for host in hosts)
    for names, count in by_names.items():
        applied = [shipped[name] for name in names]
        if REHEARSAL in names:
            applied = [pack if pack.name == REHEARSAL else port_pack(pack) for pack in applied]
        selection = resolve([*applied, *of_operator])
        for new_id, olds in selection.replaced.items():
            for old in olds:
                item = _replaced(old, selection.criteria[new_id], count)
                key = item.criterion, item.pack, item.by
                replaced[key] = replace(item, hosts=item.hosts + replaced[key].hosts) if key in replaced else item
    return tuple(sorted(replaced.values(), key=lambda item: (item.criterion, item.pack, item.by)))


def _replaced(old: Criterion, new: Criterion, hosts: int) -> Replaced:
    changed = [
        item.name
        for item in fields(Criterion)
        if item.name not in _TEXTS and getattr(old, item.name) != getattr(new, item.name)
    ]
    return Replaced(
        criterion=old.id,
        pack=old.origin,
        old=describe(old),
        by=new.id,
        by_pack=new.origin,
        new=describe(new),
        changed=tuple(changed),
        source=new.source,
        hosts=hosts,
    )


def replaced_lines(items: Sequence[Replaced]) -> Iterator[SummaryLine]:
    """Yield a caveat for each of the first _MAX_LINES replaced criteria, then one line with the number of the rest."""
    for item in items[:_MAX_LINES]:
        new = f"{item.by} of {item.by_pack}: {item.new}"
        text = f"{item.criterion} of {item.pack}: {item.old}; replaced by {new} (changed: {changes(item)})"
        values = {"hosts": item.hosts}
        yield SummaryLine(kind=LineKind.CAVEAT, title="Criterion replaced", text=text, values=values)
    more = len(items) - _MAX_LINES
    if more > 0:
        text, values = f"{more} more, listed in report.json", {"criteria": more}
        yield SummaryLine(kind=LineKind.CAVEAT, title="Criteria replaced", text=text, values=values)


def changes(item: Replaced) -> str:
    """Return the names of the settings in which the two criteria differ, as text."""
    return ", ".join(item.changed) or "nothing"
