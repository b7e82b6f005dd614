"""What the lint says of a criterion."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from fleet.judge.criteria import Criterion
from schemas.records import Value

FLOORS, CEILINGS = ("ge", "gt"), ("le", "lt")


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One thing in a pack that cannot be right."""

    pack: str
    criterion: str
    value: Value
    why: str
    remedy: str

    def __str__(self) -> str:
        shown = f"{self.value:g}" if isinstance(self.value, float) else self.value
        return f"{self.pack}: {self.criterion}: {shown}: {self.why}; {self.remedy}"


def about(criterion: Criterion, value: Value, why: str, remedy: str) -> Finding:
    """A finding on that criterion, which names the pack in whose file it stands."""
    return Finding(pack=criterion.origin, criterion=criterion.id, value=value, why=why, remedy=remedy)


def one_of(values: Iterable[object]) -> str:
    """`use a or b`."""
    return f"use {' or '.join(sorted(map(str, values)))}"
