"""The row type of the reading tables, and factories for common getters."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

from collectors.base import Value
from collectors.nvml.calls import available, decode
from collectors.nvml.gpu import NvmlGpu

Getter = Callable[[NvmlGpu], Value]

CONSTANT, VARIES, COUNTER = "constant", "varies", "counter"
"""How a reading may change while the host runs: not at all, in any way (`Family.varies`), or as a counter (`Family.counter`)."""
ALWAYS, ONCE, SLOW, SNAPSHOT_ONLY = "always", "once", "slow", "snapshot_only"
"""When a reading is taken. A full snapshot takes all readings. An exporter takes ALWAYS whenever it renders its page, ONCE once
because it never changes, and SLOW in the background. It never takes SNAPSHOT_ONLY, which is very slow or useless in a graph."""


class Row(NamedTuple):
    """A reading with one value per GPU. `change` is CONSTANT, VARIES or COUNTER. Without a value, `get` raises ReadingError."""

    name: str
    unit: str
    change: str
    help: str
    get: Getter
    pace: str = ALWAYS
    signed: bool = False


def number(getter: str, *arguments: int, factor: float = 1) -> Getter:
    """Return a getter of a number. `factor` converts it to SI units."""
    return lambda gpu: gpu.query(getter, *arguments) * factor


def count(getter: str, *arguments: int) -> Getter:
    """Return a getter of a whole number."""
    return lambda gpu: int(gpu.query(getter, *arguments))


def flag(getter: str, *arguments: int) -> Getter:
    """Return a getter of a flag."""
    return lambda gpu: bool(gpu.query(getter, *arguments))


def item(getter: str, index: int, kind: Callable[[int], Value]) -> Getter:
    """Return a getter of the result at `index`, for a function of NVML with several results."""
    return lambda gpu: kind(available(gpu.query(getter)[index]))


def attribute(getter: str, name: str, kind: Callable[[int], Value] = int) -> Getter:
    """Return a getter of one attribute of a structure."""
    return lambda gpu: kind(available(getattr(gpu.query(getter), name)))


def text(getter: str) -> Getter:
    """Return a getter of a text."""
    return lambda gpu: decode(gpu.query(getter))


def named(getter: str, names: Mapping[int, str], *arguments: int) -> Getter:
    """Return a getter that translates the number that NVML returns to its name in `names`."""
    return lambda gpu: name_of(gpu.query(getter, *arguments), names)


def name_of(code: int, names: Mapping[int, str]) -> str:
    """Return the name of a number; `unknown (7)` if 7 has no name here."""
    return names.get(int(code), f"unknown ({code})")
