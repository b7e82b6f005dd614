"""Read the criteria packs of a run, and refuse those of the operator that have lint findings."""

from __future__ import annotations

from collections.abc import Iterable

from fleet.criteria_lint.lint import lint
from fleet.judge.criteria import Pack, read_packs
from schemas.errors import UsageError


def checked_packs(names: Iterable[str]) -> tuple[Pack, ...]:
    """Return the shipped packs and the named ones.

    Raises:
        UsageError: as for `read_packs`, or a named pack has lint findings.
    """
    packs = read_packs(names)
    problems = [str(finding) for pack in packs if pack.chosen for finding in lint(pack)]
    if problems:
        more = f"\n({len(problems) - 5} more: rackproof criteria lint)" if len(problems) > 5 else ""
        raise UsageError("invalid criteria:\n" + "\n".join(problems[:5]) + more)
    return packs
