"""Format SI values for people: with readable units (`GB/s` instead of `B/s`), and few digits."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from functools import lru_cache

from schemas.records import MEASURED, Observation, Value, is_number

NONE = "–"
"""Text for a missing value."""
SIGNS: Mapping[str, str] = {"eq": "=", "ge": "≥", "le": "≤", "gt": ">", "lt": "<"}
"""Criterion operator -> sign."""

_SCALES: Mapping[str, tuple[tuple[float, str], ...]] = {
    "B/s": ((1e8, "GB/s"), (1e5, "MB/s"), (1e2, "kB/s"), (0, "B/s")),
    "FLOP/s": ((1e11, "TFLOP/s"), (1e8, "GFLOP/s"), (1e5, "MFLOP/s"), (0, "FLOP/s")),
    "s": ((1, "s"), (1e-3, "ms"), (0, "µs")),
    "W": ((0.1, "W"), (1e-4, "mW"), (0, "µW")),
    "A": ((0.5, "A"), (0, "mA")),
    "Hz": ((1e6, "MHz"), (0, "Hz")),
    "transfers/s": ((1e6, "MT/s"), (0, "transfers/s")),
    "FLOP/J": ((1e11, "TFLOP/s/W"), (1e8, "GFLOP/s/W"), (0, "FLOP/s/W")),
    "FLOP/cycle": ((1e3, "kFLOP/cycle"), (0, "FLOP/cycle")),
}
"""SI unit -> units for people, each with the smallest value for which it is used; the largest unit first."""
_FACTORS = {
    "GB/s": 1e9,
    "MB/s": 1e6,
    "kB/s": 1e3,
    "TFLOP/s": 1e12,
    "GFLOP/s": 1e9,
    "MFLOP/s": 1e6,
    "ms": 1e-3,
    "µs": 1e-6,
    "mW": 1e-3,
    "µW": 1e-6,
    "mA": 1e-3,
    "MHz": 1e6,
    "MT/s": 1e6,
    "TFLOP/s/W": 1e12,
    "GFLOP/s/W": 1e9,
    "kFLOP/cycle": 1e3,
}
"""Unit for people -> its size in the SI unit. A unit that is missing here has the size 1."""
PER_HOUR = "1/h"
"""Unit of the hourly rate of a counter."""
_PLAIN_UNITS = {"1": "", PER_HOUR: "an hour", "Cel": "°C", "ratio": "", "FLOP/J": "FLOP/s/W"}
"""Unit -> its text, if `_SCALES` lacks the unit or the value is 0. A unit that is missing here is its own text."""


def number(value: float, digits: int = 4) -> str:
    """Format `value` with `digits` significant digits: below 0.0001 with an exponent, from 10 000 on with thousands separated.

    Digits before the decimal point are never dropped, so an integer keeps all its digits.
    """
    value = value or 0  # no "-0"
    is_fixed_point = abs(value) >= 10 ** (digits - 1)
    separator = "," if abs(round(value)) >= 10_000 else ""
    if isinstance(value, int):
        text = f"{value:{separator}d}"
    elif is_fixed_point:
        text = f"{value:{separator}.{max(0, digits - len(str(abs(round(value)))))}f}"
    else:
        text = f"{value:{separator}.{digits}g}"
    text = text.replace(",", "\N{NARROW NO-BREAK SPACE}")
    return f"−{text[1:]}" if text.startswith("-") else text


def finite(value: Value) -> float | None:
    """Return the value as a float; None if it is not a finite number, or too large for a float."""
    if not is_number(value):
        return None
    try:
        as_float = float(value)
    except OverflowError:
        return None
    return as_float if math.isfinite(as_float) else None


def measured_number(observation: Observation) -> float | None:
    """Return the value as a float; None if it was not measured, or if `finite` returns None."""
    return finite(observation.value) if observation.status == MEASURED else None


def number_or_zero(value: Value) -> float:
    """Return the value as a float, or 0 if `finite` returns None."""
    return finite(value) or 0.0


def scale(value: float, unit: str) -> tuple[float, str]:
    """Return the divisor that makes the value readable, and the resulting unit."""
    if unit == "B":
        return _binary(value)
    for least, name in _SCALES.get(unit, ()) if value else ():
        if abs(value) >= least:
            return _FACTORS.get(name, 1.0), name
    return 1.0, _PLAIN_UNITS.get(unit, unit)


def _binary(value: float) -> tuple[float, str]:
    if abs(value) < 1024**2 and value % 1024:
        return 1.0, "B"  # 1500 B, not 1.465 KiB
    for power, name in ((4, "TiB"), (3, "GiB"), (2, "MiB"), (1, "KiB")):
        if abs(value) >= 1024**power:
            return 1024.0**power, name
    return 1.0, "B"


def quantity(value: Value, unit: str, digits: int = 4, like: float | None = None) -> str:
    """Format a value with its unit: `364.8 GB/s`, `22.5 µs`, `1 GiB`, `yes`.

    If `like` is given, the unit is the one that suits `like`, so that two values can have the same unit.
    """
    if value is None:
        return NONE
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, str):
        return value
    if finite(value) is None:
        return "not a finite number"
    factor, name = scale(value if like is None else like, unit)
    scaled = value if factor == 1 else value / factor
    if name == "B":
        return f"{number(scaled, 12)} B"
    return f"{number(scaled, digits)} {name}".rstrip()


def counted(number: int, noun: str) -> str:
    """Return the number with the noun: `1 host`, `2 hosts`. The plural of the noun must end in a plain `s`."""
    return f"{number} {noun if number == 1 else noun + 's'}"


def size(value: Value) -> str:
    """Format a message or buffer size: `8 B`, `64 KiB`, `8 GiB`."""
    return quantity(value, "B", 3) if is_number(value) else str(value)


@lru_cache(maxsize=4096, typed=True)  # most verdicts compare 0 with 0, so the same arguments recur
def format_pair(value: Value, limit: Value, unit: str) -> tuple[str, str]:
    """Format a value and its limit, with enough digits to distinguish them.

    Both texts have the same unit. But if neither number is 0, and one is more than a thousand times the other, each text has its
    own unit.
    """
    like = _larger(value, limit)
    value_text, limit_text = quantity(value, unit, like=like), quantity(limit, unit, like=like)
    if value_text != limit_text or value == limit:
        return value_text, limit_text
    digits = digits_for((value, limit), unit, like)
    return quantity(value, unit, digits, like), quantity(limit, unit, digits, like)


def digits_for(values: Collection[Value], unit: str, like: float | None = None) -> int:
    """Return the first of 4, 6, 9, 12 and 17 significant digits with which different values have different texts, or else 17."""
    distinct = len({(isinstance(value, bool), value) for value in values})
    choices = (4, 6, 9, 12, 17)
    return next(
        (n for n in choices if len({quantity(value, unit, n, like) for value in values}) >= distinct), choices[-1]
    )


def _larger(value: Value, limit: Value) -> float | None:
    """Return the larger magnitude of two numbers.

    Return None if one of them is not a finite number. Also return None if neither is 0 and one is more than 1000 times the other.
    """
    numbers = finite(value), finite(limit)
    if numbers[0] is None or numbers[1] is None:
        return None
    smaller, larger = sorted((abs(numbers[0]), abs(numbers[1])))
    return larger if not smaller or larger <= 1000 * smaller else None
