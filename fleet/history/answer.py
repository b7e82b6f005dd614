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
    """Key in the rows -> heading of the column. Values whose key is in QUANTITIES are shown with the unit of their row."""
    rows: Sequence[Mapping[str, Any]]
    empty: str = ""
    """Text that is shown if there are no rows. If this text is empty, a section without rows is left out."""


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
