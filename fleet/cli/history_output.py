"""Print the answers of `rackproof history` as text, JSON or CSV."""

from __future__ import annotations

import argparse
import csv
import io
import json
from collections.abc import Sequence
from typing import Any

from rich.table import Table
from rich.text import Text

from fleet.history.answer import QUANTITIES, SHARES, Answer, Section
from fleet.quantities import quantity
from fleet.report.formatting import clean
from fleet.report.observations import cell
from fleet.report.terminal import has_colour, plain_table, render_blocks, width_of
from schemas.baselines import REAL


def print_answer(options: argparse.Namespace, answer: Answer, notes: Sequence[str]) -> None:
    """Print an answer with its notes. CSV has only one section: `values` if the answer has it, else the first."""
    if options.json:
        sections = {section.name: section.rows for section in answer.sections}
        print(json.dumps({"kind": options.kind, **sections, "notes": list(notes)}, indent=1, default=str))
    elif options.csv:
        main = next((section for section in answer.sections if section.name == "values"), answer.sections[0])
        _print_csv(list(main.columns), [[row.get(name) for name in main.columns] for row in main.rows])
    else:
        mark = "" if options.kind == REAL else f"{options.kind.upper()}: not figures of GPUs\n"
        blocks = [block for section in answer.sections for block in _blocks(section)]
        text = render_blocks(blocks, width=width_of(), colour=has_colour(options.color))
        print("\n".join([f"{mark}{text}", *(f"note: {clean(note)}" for note in notes)]))


def print_rows(options: argparse.Namespace, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
    """Print the result of a SELECT. Several columns may have the same name."""
    if options.json:
        keys = _unique(columns)
        print(json.dumps([dict(zip(keys, row, strict=True)) for row in rows], indent=1, default=str))
    elif options.csv:
        _print_csv(columns, rows)
    else:
        table = plain_table(*columns)
        for row in rows:
            table.add_row(*(clean(_text(value)) for value in row))
        print(render_blocks([table], width=width_of(), colour=has_colour(options.color)))


def _unique(columns: Sequence[str]) -> list[str]:
    """Return a unique JSON key for each column: `host` for the first column of that name, `host_2` for the second."""
    keys: list[str] = []
    for column in columns:
        key, number = column, 1
        while key in keys or (number > 1 and key in columns):
            number += 1
            key = f"{column}_{number}"
        keys.append(key)
    return keys


def _print_csv(columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
    text = io.StringIO(newline="")
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(columns)
    writer.writerows([cell(_plain(value)) for value in row] for row in rows)
    print(text.getvalue(), end="")


def _plain(value: Any) -> Any:
    if isinstance(value, int | float):
        return value
    return ", ".join(map(str, value)) if isinstance(value, list | tuple) else _text(value)


def _blocks(section: Section) -> list[Table | Text]:
    """Return the heading and the table of a section."""
    if not section.rows and not section.empty:
        return []
    heading: list[Table | Text] = [Text(""), Text(f"{section.title}:", style="bold")]
    if not section.rows:
        return [*heading, Text(f"  {section.empty}")]
    table = plain_table(*section.columns.values())
    for row in section.rows:
        table.add_row(*(clean(_shown(name, row)) for name in section.columns))
    return [*heading, table]


def _shown(name: str, row: Any) -> str:
    """Return cell `name` as text: a figure with its unit, a share in percent, a time to the minute or, at midnight, a date."""
    value = row[name]
    if value is None:
        return ""
    if name in QUANTITIES:
        return quantity(value, row["unit"], 4)
    if name in SHARES:
        return f"{100 * value:.3g} %" if name in ("error", "accepted_share") else f"{100 * value:+.3g} %"
    if name in ("began", "first", "last"):
        return str(value)[:16].removesuffix(" 00:00")
    return _text(value)


def _text(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else ""
    if isinstance(value, list | tuple):
        return ", ".join(map(str, value))
    return "" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)
