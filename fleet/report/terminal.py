"""Draw tables for a terminal with rich, or as plain text for a file or a pipe."""

from __future__ import annotations

import argparse
import io
import os
import sys
from collections.abc import Iterable
from typing import TextIO

from rich.console import Console
from rich.table import Table
from rich.text import Text

AUTO, ALWAYS, NEVER = "auto", "always", "never"
_UNLIMITED = 100_000
_MIN_WIDTH = 60


def add_color_option(parser: argparse.ArgumentParser) -> None:
    """Add `--color` to a subcommand that prints tables."""
    parser.add_argument(
        "--color",
        choices=[AUTO, ALWAYS, NEVER],
        default=AUTO,
        help="colour the output; auto: only on a terminal, and only if NO_COLOR is not set (default: %(default)s)",
    )


def has_colour(choice: str, stream: TextIO | None = None) -> bool:
    """Return whether to colour the output to `stream` (default: stdout). `choice` is the value of `--color`."""
    if choice == AUTO:
        is_dumb = os.environ.get("TERM", "dumb") in ("", "dumb")
        return (stream or sys.stdout).isatty() and not is_dumb and not os.environ.get("NO_COLOR")
    return choice == ALWAYS


def width_of(stream: TextIO | None = None) -> int | None:
    """Return the width of the terminal in characters, at least _MIN_WIDTH; None (no wrapping) if the stream is not a terminal."""
    stream = stream or sys.stdout
    return max(_MIN_WIDTH, Console(file=stream).width) if stream.isatty() else None


def plain_table(*columns: str) -> Table:
    """Return a table without borders. The last column takes the remaining width. If no column has a name, there is no header."""
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, show_header=any(columns), header_style="dim")
    for number, name in enumerate(columns, 1):
        table.add_column(name, no_wrap=False, overflow="fold", ratio=1 if number == len(columns) else None)
    return table


def render_blocks(blocks: Iterable[Table | Text], *, width: int | None = None, colour: bool = False) -> str:
    """Return the blocks one below the other, without spaces at the ends of lines.

    Args:
        blocks: tables and lines.
        width: maximum length of a line in characters; None: a row is one line of any length.
        colour: whether to use colours.
    """
    output = io.StringIO()
    console = Console(
        file=output,
        width=width or _UNLIMITED,
        force_terminal=colour,
        color_system="standard" if colour else None,
        no_color=not colour,
        highlight=False,
        markup=False,
        emoji=False,
        legacy_windows=False,
        _environ={},
    )
    for block in blocks:
        console.print(block, soft_wrap=isinstance(block, Text) and width is None)
    return "\n".join(line.rstrip() for line in output.getvalue().splitlines())
