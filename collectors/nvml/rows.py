"""The row type of the tables of readings, and functions that return common getters.

The argument `getter` of these functions is the name of an NVML function without its prefix `nvmlDeviceGet`.
"""

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
"""Pace: when a reading is taken. A full snapshot takes all readings. An exporter takes an ALWAYS reading each time that it builds
its metrics page. It takes a ONCE reading only once, because the value never changes, and a SLOW reading in the background. It
never takes a SNAPSHOT_ONLY reading, which is very slow or useless in a graph."""


class Row(NamedTuple):
    """A reading with one value per GPU. `get` returns the value; if there is none, it raises ReadingError.

    `change` is CONSTANT, VARIES or COUNTER. `signed` states whether the value may be negative.
    """

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
    """Return a getter of one result of an NVML function with several results: the result at `index`."""
    return lambda gpu: kind(available(gpu.query(getter)[index]))


def attribute(getter: str, name: str, kind: Callable[[int], Value] = int) -> Getter:
    """Return a getter of one attribute of the structure that NVML returns."""
    return lambda gpu: kind(available(getattr(gpu.query(getter), name)))


def text(getter: str) -> Getter:
    """Return a getter of a text."""
    return lambda gpu: decode(gpu.query(getter))


def named(getter: str, names: Mapping[int, str], *arguments: int) -> Getter:
    """Return a getter that converts the number from NVML to its name in `names`."""
    return lambda gpu: name_of(gpu.query(getter, *arguments), names)


def name_of(code: int, names: Mapping[int, str]) -> str:
    """Return the name of a number. If `names` lacks it, return the number in a text such as `unknown (7)`."""
    return names.get(int(code), f"unknown ({code})")
