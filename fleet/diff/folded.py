"""What several hosts tell of one thing, told once: of a gang, or of the one host that is slow with all others."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace

from fleet.diff.figures import figure_text
from schemas.baselines import REGRESSED, Change
from schemas.records import Value
from schemas.scopes import Scope

_NAMED = 6


def folded(changes: Sequence[Change]) -> Iterator[Change]:
    """What a gang did together is told once, and what is slow with one host alone is told of that host."""
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
    for found in pairs.values():
        host = _common(found)
        if host:
            culprits[host] = host
            yield _slow_with_all(host, found)
        else:
            yield from found
    for found in gangs.values():
        worst = min(found, key=lambda item: item.share or 0.0)
        named = next((item for item in found if item.host in culprits), worst)
        yield replace(named, text=figure_text(worst, named.scope), share=worst.share, new=worst.new)


def _partner(change: Change) -> str:
    """Return the host that the figure was measured with, or an empty string."""
    return Scope.parse(change.scope).get("partner")


def _common(found: Sequence[Change]) -> str:
    """The one host that has a part in every pair that became slow, where that is more than one pair; else empty."""
    ends = [{change.host, _partner(change)} for change in found]
    shared = set.intersection(*ends)
    return shared.pop() if len(shared) == 1 else ""


def _slow_with_all(host: str, found: Sequence[Change]) -> Change:
    partners = sorted(set().union(*({change.host, _partner(change)} for change in found)) - {host})
    worst = min(found, key=lambda item: item.share or 0.0)
    named = ", ".join(partners[:_NAMED]) + (" …" if len(partners) > _NAMED else "")
    shares = sorted((change.share or 0.0) * 100 for change in found)
    text = (
        f"{host}: {worst.what} with {named} changed by {shares[0]:+.3g} to {shares[-1]:+.3g} %, that of the others with each "
        f"other did not, beyond {(worst.noise or 0) * 100:.3g} % of noise: {worst.basis}"
    )
    return replace(worst, host=host, scope="host", serial="", text=text)
