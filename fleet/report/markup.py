"""Build Markdown in which text from hosts is only text."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from fleet.quantities import NONE
from fleet.report.formatting import clean

FENCED = str.maketrans({"`": "ˋ", "<": "‹", ">": "›"})
"""Replacements for text in a code block."""
HARMLESS = {**FENCED, ord("|"): "¦"}
"""Replacements for text anywhere else, including table cells."""
CELL_LIMIT = 300


def code(text: str, limit: int = CELL_LIMIT) -> str:
    """Return `text` as a code span. The text cannot end the span."""
    inside = clean(text, limit).translate(HARMLESS).strip()
    return f"`{inside}`" if inside else NONE


def section(title: str, body: str) -> str:
    """Return a section with a heading."""
    return f"## {title}\n\n{body}"


def table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table of cells that are already Markdown."""
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
