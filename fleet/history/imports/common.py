"""Code shared by the readers of the outputs of other tools."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fleet.history.rows import Row, clean_text, settings_text


class NotThisTool(Exception):  # noqa: N818 - not an error: the next reader is tried
    """The text is not an output of the tool that the reader is for."""


@dataclass(frozen=True, kw_only=True)
class Imported:
    """The figures of one file."""

    source: str
    version: str
    rows: tuple[Row, ...]


def number(value: object) -> float | None:
    """Return a number, or the number in a text, as a float; None for NaN, infinities, booleans and anything else."""
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    try:
        result = float(value)
    except ValueError:
        return None
    return result if math.isfinite(result) else None


def row(name: str, value: float, unit: str, settings: Mapping[str, object], **place: str) -> Row:
    """Return a row of the table `imported`.

    Args:
        name: name of the figure.
        value: in SI units.
        unit: the SI unit.
        settings: settings of the figure, under the names that Rackproof uses.
        place: `tool_name` (the test or figure, as the tool names it), and if known `host`, `slot`, `model`, `driver`.
    """
    known = {key: clean_text(text) for key, text in place.items()}
    empty: dict[str, Any] = {"tool_name": "", "host": "", "slot": "", "model": "", "driver": ""}
    return {
        **empty,
        **known,
        "name": clean_text(name),
        "value": value,
        "unit": unit,
        "settings": settings_text(settings),
    }


def as_dict(value: object) -> dict[str, Any]:
    """Return `value` if it is a JSON object, else an empty one."""
    return value if isinstance(value, dict) else {}


def as_list(value: object) -> list[Any]:
    """Return `value` if it is a JSON array, else an empty one."""
    return value if isinstance(value, list) else []
