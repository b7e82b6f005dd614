"""The criteria packs of a run, refused where they cannot judge."""

from __future__ import annotations

from collections.abc import Sequence

from fleet.criteria_lint.lint import lint
from fleet.judge.criteria import Pack, read_packs
from schemas.errors import UsageError


def checked_packs(names: Sequence[str]) -> tuple[Pack, ...]:
    """The shipped packs and the named ones; raises UsageError where one of those would judge something else than it says."""
    packs = read_packs(names)
    wrong = [str(finding) for pack in packs if pack.chosen for finding in lint(pack)]
    if wrong:
        more = f"\n({len(wrong) - 5} more: rackproof criteria lint)" if len(wrong) > 5 else ""
        raise UsageError("criteria that cannot judge:\n" + "\n".join(wrong[:5]) + more)
    return packs
