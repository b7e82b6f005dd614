"""Findings of the criteria lint, and the operators of floors and ceilings."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from fleet.judge.criteria import Criterion
from schemas.records import Value

FLOORS, CEILINGS = ("ge", "gt"), ("le", "lt")
"""Operators of criteria whose limit is a lower bound (floor), and of those whose limit is an upper bound (ceiling)."""


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One mistake in a criteria pack. `value` is the wrong value."""

    pack: str
    criterion: str
    value: Value
    why: str
    remedy: str

    def __str__(self) -> str:
        shown = f"{self.value:g}" if isinstance(self.value, float) else self.value
        return f"{self.pack}: {self.criterion}: {shown}: {self.why}; {self.remedy}"


def finding_on(criterion: Criterion, value: Value, why: str, remedy: str) -> Finding:
    """Return a finding on a criterion. Its `pack` is the one whose file contains the criterion."""
    return Finding(pack=criterion.origin, criterion=criterion.id, value=value, why=why, remedy=remedy)


def use_one_of(values: Iterable[object]) -> str:
    """Return a remedy such as `use a or b`."""
    return f"use {' or '.join(sorted(map(str, values)))}"
