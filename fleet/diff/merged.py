"""Merge regressions of several hosts: those of one gang, and those of pairs that have one host in common."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace

from fleet.diff.figures import figure_text
from schemas.baselines import REGRESSED, Change
from schemas.records import Value
from schemas.scopes import Scope

_MAX_NAMED_HOSTS = 6


def merge_changes(changes: Sequence[Change]) -> Iterator[Change]:
    """Yield the changes with the regressions of several hosts merged.

    A regression of a gang figure is reported by each host of the gang, and becomes one change. A figure of pairs of hosts may
    regress for several pairs. If these pairs have one host in common, their regressions become one change of that host. Other
    changes are not merged.
    """
    slow_hosts: set[str] = set()
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
            slow_hosts.add(host)
            yield _slow_host_change(host, group)
        else:
            yield from group
    for group in gangs.values():
        worst = max(group, key=_size)
        host = next((item.host for item in group if item.host in slow_hosts), worst.host)
        yield replace(worst, host=host, text=figure_text(worst, worst.scope))


def _size(regression: Change) -> float:
    """Return the size of the relative change, without its sign; infinity if it is unknown."""
    return math.inf if regression.share is None else abs(regression.share)


def _partner(change: Change) -> str:
    """Return the host that the figure was measured with, or an empty string."""
    return Scope.parse(change.scope).get("partner")


def _common_host(changes: Sequence[Change]) -> str:
    """Return the only host that is in every pair that regressed; empty if there is none, or only one pair of hosts regressed."""
    hosts_of_pairs = [{change.host, _partner(change)} for change in changes]
    shared = set.intersection(*hosts_of_pairs)
    return shared.pop() if len(shared) == 1 else ""


def _slow_host_change(host: str, changes: Sequence[Change]) -> Change:
    partners = sorted(set().union(*({change.host, _partner(change)} for change in changes)) - {host})
    worst = max(changes, key=_size)
    partner_names = ", ".join(partners[:_MAX_NAMED_HOSTS]) + (" …" if len(partners) > _MAX_NAMED_HOSTS else "")
    shares = sorted((change.share or 0.0) * 100 for change in changes)
    lowest, highest = (f"{share:+.3g}" for share in (shares[0], shares[-1]))
    span = lowest if lowest == highest else f"{lowest} to {highest}"
    text = (
        f"{host}: {worst.what} with {partner_names} changed by {span} %, beyond "
        f"{(worst.noise or 0) * 100:.3g} % noise ({worst.basis}); the figure did not regress between other hosts"
    )
    return replace(worst, host=host, scope="host", serial="", text=text)
