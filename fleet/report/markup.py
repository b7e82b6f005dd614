"""Pieces of Markdown in which what a host said is only text."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from fleet.quantities import NONE
from fleet.report.formatting import clean

FENCED = str.maketrans({"`": "ˋ", "<": "‹", ">": "›"})
HARMLESS = {**FENCED, ord("|"): "¦"}
CELL_LIMIT = 300


def code(text: str, limit: int = CELL_LIMIT) -> str:
    """`text` as a code span that nothing in it can leave."""
    inside = clean(text, limit).translate(HARMLESS).strip()
    return f"`{inside}`" if inside else NONE


def section(title: str, body: str) -> str:
    """A section under a heading of ours."""
    return f"## {title}\n\n{body}"


def table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table; its cells are Markdown already."""
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
