"""The output of a command that reads the history: tables of plain values, printed as text, JSON or CSV."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Section:
    """One table."""

    name: str
    """Key of the table in the JSON answer, such as `causes`."""
    title: str
    """Heading in text."""
    columns: Mapping[str, str]
    """Key of a row -> heading of the column. A key in QUANTITIES is shown with the unit of the row."""
    rows: Sequence[Mapping[str, Any]]
    empty: str = ""
    """Text that is shown if there are no rows; empty: the section is left out."""


@dataclass(frozen=True, kw_only=True)
class Answer:
    """The output of one command."""

    sections: Sequence[Section]
    notes: Sequence[str] = field(default=())
    """Caveats, one sentence each."""


QUANTITIES = frozenset({"value", "least", "p05", "median", "p95", "most", "last_value"})
"""Keys whose values are shown with the unit that the row has under `unit`."""
SHARES = frozenset({"per_year", "error", "change", "accepted_share"})
"""Keys whose values are shares, shown in percent."""
