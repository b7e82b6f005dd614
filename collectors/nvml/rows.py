"""What a row of the table of readings is, and the shapes that getters come in."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

from collectors.base import Value
from collectors.nvml.calls import text
from collectors.nvml.gpu import Gpu

Getter = Callable[[Gpu], Value]

ALWAYS, ONCE, SLOW, THOROUGH = "always", "once", "slow", "thorough"
"""When a reading is taken: at every collection; by an exporter once, since it never changes; by an exporter in the background,
since it is slow; in snapshots only, since it is very slow or of no use to a graph. Snapshots take all of them every time."""


class Row(NamedTuple):
    """A reading that each GPU has one of. `get` raises UnreadError."""

    name: str
    unit: str
    counter: bool
    help: str
    get: Getter
    pace: str = ALWAYS


def number(getter: str, *arguments: int, factor: float = 1) -> Getter:
    """A number, in SI units by `factor`."""
    return lambda gpu: gpu.ask(getter, *arguments) * factor


def count(getter: str, *arguments: int) -> Getter:
    """A number of things."""
    return lambda gpu: int(gpu.ask(getter, *arguments))


def flag(getter: str, *arguments: int) -> Getter:
    """Whether something is so."""
    return lambda gpu: bool(gpu.ask(getter, *arguments))


def place(getter: str, at: int, kind: Callable[[int], Value]) -> Getter:
    """One of several results."""
    return lambda gpu: kind(gpu.ask(getter)[at])


def part(getter: str, attribute: str, kind: Callable[[int], Value] = int) -> Getter:
    """One attribute of a structure."""
    return lambda gpu: kind(getattr(gpu.ask(getter), attribute))


def words(getter: str) -> Getter:
    """A text."""
    return lambda gpu: text(gpu.ask(getter))


def named(getter: str, names: Mapping[int, str], *arguments: int) -> Getter:
    """The name of a number."""
    return lambda gpu: name_of(gpu.ask(getter, *arguments), names)


def name_of(code: int, names: Mapping[int, str]) -> str:
    """The name of a number; the number itself where the library is newer than the names."""
    return names.get(int(code), f"unknown ({code})")
