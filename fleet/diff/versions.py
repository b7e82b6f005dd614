"""Versions that are not as they were; what reads the same on several hosts is told once."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence

from fleet.records.host_state import Sight
from schemas.baselines import VERSION, Change

LONGEST = 1000
"""Characters of what a version was or is."""
_NAMED = 6


def versions(old: Sight, new: Sight) -> Iterator[tuple[str, str, str]]:
    """Component, what it was and what it is."""
    was, now = _told(old.versions), _told(new.versions)
    for name in sorted(was.keys() & now.keys()):
        if was[name] != now[name]:
            yield name, was[name], now[name]


def told_once(found: Mapping[tuple[str, str, str], Sequence[str]]) -> Iterator[Change]:
    """What reads the same on several hosts is told once."""
    for (name, before, after), where in found.items():
        more = f" and {len(where) - _NAMED} more" if len(where) > _NAMED else ""
        names = f"{', '.join(where[:_NAMED])}{more}"
        text = f"{names}: {name} {before} → {after}"
        yield Change(kind=VERSION, host=where[0], scope="host", what=name, old=before, new=after, text=text)


def _told(versions: Mapping[str, str]) -> dict[str, str]:
    """Component -> its version, or all that its parts have: `NAME[gpu=3]` is told with `NAME`."""
    found: dict[str, dict[str, str]] = defaultdict(dict)
    for name, version in versions.items():
        base, _, at = name.partition("[")
        found[base][at.rstrip("]")] = version
    return {base: ", ".join(sorted(set(of_part.values())))[:LONGEST] for base, of_part in found.items()}
