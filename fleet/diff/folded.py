"""Fold changes that several hosts report into one: those of a gang, or of one host that is slow with all others."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace

from fleet.diff.figures import figure_text
from schemas.baselines import REGRESSED, Change
from schemas.records import Value
from schemas.scopes import Scope

_NAMED = 6


def fold_changes(changes: Sequence[Change]) -> Iterator[Change]:
    """Yield one change per gang figure, and one per host that is slow with all its partners."""
    culprits: dict[str, str] = {}
    pairs: dict[str, list[Change]] = defaultdict(list)
    gangs: dict[tuple[Value, ...], list[Change]] = defaultdict(list)
    for change in changes:
        if change.kind == REGRESSED and _partner(change):
            pairs[change.what].append(change)
        elif change.kind == REGRESSED and Scope.parse(change.scope).is_gang:
            params = tuple(f"{key}={value}" for key, value in change.params.items())
            gangs[(change.scope, change.what, change.stage, *params)].append(change)
        else:
            yield change
    for group in pairs.values():
        host = _common_host(group)
        if host:
            culprits[host] = host
            yield _slow_with_all(host, group)
        else:
            yield from group
    for group in gangs.values():
        worst = min(group, key=lambda item: item.share or 0.0)
        shown = next((item for item in group if item.host in culprits), worst)
        yield replace(shown, text=figure_text(worst, shown.scope), share=worst.share, new=worst.new)


def _partner(change: Change) -> str:
    """Return the host that the figure was measured with, or an empty string."""
    return Scope.parse(change.scope).get("partner")


def _common_host(changes: Sequence[Change]) -> str:
    """Return the one host that is part of every slower pair, if there are several; else an empty string."""
    ends = [{change.host, _partner(change)} for change in changes]
    shared = set.intersection(*ends)
    return shared.pop() if len(shared) == 1 else ""


def _slow_with_all(host: str, changes: Sequence[Change]) -> Change:
    partners = sorted(set().union(*({change.host, _partner(change)} for change in changes)) - {host})
    worst = min(changes, key=lambda item: item.share or 0.0)
    named = ", ".join(partners[:_NAMED]) + (" …" if len(partners) > _NAMED else "")
    shares = sorted((change.share or 0.0) * 100 for change in changes)
    text = (
        f"{host}: {worst.what} with {named} changed by {shares[0]:+.3g} to {shares[-1]:+.3g} %; between the other hosts it did "
        f"not, beyond {(worst.noise or 0) * 100:.3g} % noise: {worst.basis}"
    )
    return replace(worst, host=host, scope="host", serial="", text=text)
