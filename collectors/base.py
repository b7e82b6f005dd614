"""What a collector is: something that reads one source and yields families.

A family is read once and used twice: exported to Prometheus while the run goes on, and snapshotted into the record before
and after each stage. A collector takes its source as an argument, does nothing at import, and never raises for a reading
that cannot be had: the reading says why.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

Labels = Mapping[str, str]
Value = float | int | bool | str

HOST: Labels = {}
"""The labels of a reading that concerns the whole host."""


@dataclass(frozen=True, kw_only=True)
class Absent:
    """Why a reading is not there: `error` (it should be) or `unsupported` (this hardware or driver has none)."""

    status: str
    reason: str


@dataclass(kw_only=True)
class Family:
    """One kind of reading over all its scopes.

    `name` is dotted and singular, `unit` an SI unit (`1` for counts and flags, `ratio` for shares of one). A text value is
    identity: Prometheus sees it as a label of the scope's `_info` series.
    """

    name: str
    unit: str
    help: str
    counter: bool = False
    readings: list[tuple[Labels, Value | Absent]] = field(default_factory=list)

    def add(self, labels: Labels, value: Value | Absent) -> None:
        """One reading. `labels` name its scope from the outside in, e.g. gpu, then link; empty: the host."""
        self.readings.append((labels, value))


class Collector(Protocol):
    """One source of readings."""

    name: str

    def collect(self) -> Iterable[Family]:
        """Reads the source now.

        Raises:
            OSError: the source as a whole cannot be read. The caller records that and goes on with the other collectors.
        """
        ...


def scope(labels: Labels) -> str:
    """`gpu=0,link=3`, or `host`: how a record spells the labels. Labels of identity are not part of it.

    A character that a scope cannot have, such as the `/` of a path, becomes `_`.
    """
    places = [
        f"{key}={re.sub(r'[^A-Za-z0-9_.:-]', '_', value)}" for key, value in labels.items() if key not in IDENTITY
    ]
    return ",".join(places) or "host"


IDENTITY = frozenset({"uuid"})
"""Labels that Prometheus series carry and that a record keeps once, in its list of GPUs."""
