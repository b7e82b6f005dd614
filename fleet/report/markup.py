"""Build Markdown in which text from hosts cannot act as Markdown or HTML."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from fleet.quantities import NONE
from fleet.report.formatting import clean

FENCED = str.maketrans({"`": "ˋ", "<": "‹", ">": "›"})
"""Replacements for text in a fenced code block."""
HARMLESS = {**FENCED, ord("|"): "¦"}
"""Replacements for text anywhere else, including table cells."""
CELL_LIMIT = 300


def code(text: str, limit: int = CELL_LIMIT) -> str:
    """Return `text` as a code span that the text cannot end; NONE if the text is empty."""
    inside = clean(text, limit).translate(HARMLESS).strip()
    return f"`{inside}`" if inside else NONE


def section(title: str, body: str) -> str:
    """Return a section with a heading."""
    return f"## {title}\n\n{body}"


def table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table. The cells must be Markdown already: they are not escaped."""
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
