"""The collector interface: a collector reads one source and yields families of readings.

A family is one kind of reading, such as the temperature of every GPU. A scope is the part that a reading is about: the host, a
GPU, a link. The families are used twice: they are exported to Prometheus, and recorded in the snapshots before, during and after
a stage. A collector gets its source as an argument, and does nothing at import. If a single reading is not available, the
collector raises no exception; it adds an `Absent` with the reason instead of the value.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Protocol

Labels = Mapping[str, str]
Value = float | int | bool | str

MAX_LABEL_LENGTH = 100
"""Maximum length of the value of one label in a scope, in characters."""
HOST_LABELS: Labels = {}
"""A reading of the whole host has no labels."""
IDENTITY_LABELS = frozenset({"uuid"})
"""Labels that are exported to Prometheus but are not part of a scope. A record stores their values once, in its list of GPUs."""


@dataclass(frozen=True, kw_only=True)
class Absent:
    """Why a reading is missing. `error`: it should exist. `unsupported`: this hardware, driver or kernel does not have it."""

    status: str
    reason: str

    @classmethod
    def error(cls, reason: str) -> Absent:
        """Return an `Absent` for a reading that should exist."""
        return cls(status="error", reason=reason)

    @classmethod
    def unsupported(cls, reason: str) -> Absent:
        """Return an `Absent` for a reading that this hardware, driver or kernel does not have."""
        return cls(status="unsupported", reason=reason)


class ReadingError(Exception):
    """A reading is not available; `absent` says why."""

    def __init__(self, absent: Absent) -> None:
        super().__init__(absent.reason)
        self.absent = absent


@dataclass(kw_only=True)
class Family:
    """One kind of reading over all its scopes.

    `name` has parts separated by dots. `unit` is an SI unit, `1` for counts, flags and texts, or `ratio` for shares, where 1 is
    the whole. If a value is a text, the exporter exports it as a label of an `_info` series.
    """

    name: str
    unit: str
    help: str
    counter: bool = False
    varies: bool = False
    """Whether the value may change while the host runs. It is not set for counters. A reading that is no counter and does not
    vary describes a part or its configuration. If its value differs between two snapshots of a record, the judge reports a
    contradiction."""
    signed: bool = False
    """Whether the value may be negative. If False, the judge reports a negative value as not credible."""
    fractional: bool = False
    """Whether a value with the unit 1 may have a fraction. Values with other units always may."""
    bounds: tuple[float, float] | None = None
    """Lowest and highest possible value. None: the limits of the unit apply (`fleet.judge.credibility`)."""
    labels: tuple[str, ...] = ()
    """Names of the labels of the family's scopes. Needed only if the family may have no readings: a reading adds its own."""
    readings: list[tuple[Labels, Value | Absent]] = field(default_factory=list)

    def add(self, labels: Labels, value: Value | Absent) -> None:
        """Add one reading. `labels` are its scope, the outer part first, e.g. gpu, then link; empty means the host."""
        self.readings.append((labels, value))

    def label_names(self) -> list[str]:
        """Return the names of the labels in `labels` and in the readings, each once."""
        return list(dict.fromkeys([*self.labels, *(key for labels, _ in self.readings for key in labels)]))


class Collector(Protocol):
    """One source of readings."""

    name: str

    def collect(self) -> Iterable[Family]:
        """Read the source now.

        Raises:
            OSError: the source as a whole cannot be read. The caller records the reason and continues with the other collectors.
        """
        ...


def scope(labels: Labels) -> str:
    """Return the labels as the scope of a record: `gpu=0,link=3`, or `host`. IDENTITY_LABELS are not part of a scope.

    Characters that a scope cannot contain, such as the `/` of a path, become `_`. If the value of a label is longer than
    MAX_LABEL_LENGTH, its end is replaced with a checksum of the whole value, because a record accepts scopes of at most 256
    characters.
    """
    return (
        ",".join(f"{key}={_scope_value(value)}" for key, value in labels.items() if key not in IDENTITY_LABELS)
        or "host"
    )


@lru_cache(maxsize=4096)  # most labels are the same in every reading and every snapshot
def _scope_value(text: str) -> str:
    if len(text) > MAX_LABEL_LENGTH:
        text = f"{text[: MAX_LABEL_LENGTH - 9]}_{zlib.crc32(text.encode(errors='replace')):08x}"
    return re.sub(r"[^A-Za-z0-9_.:-]", "_", text) or "_"


def host_family(
    name: str, unit: str, help: str, value: Value | Absent, *, counter: bool = False, varies: bool = False
) -> Family:
    """Return a family with one reading of the whole host."""
    return Family(name=name, unit=unit, help=help, counter=counter, varies=varies, readings=[(HOST_LABELS, value)])


def add_parts(family: Family, label: str, parts: list[str] | Absent, read: Callable[[str], Value | Absent]) -> Family:
    """Add a reading of each part to the family, and return the family.

    If `parts` is an Absent (the parts could not be listed), add it as the only reading, with the whole host as its scope.
    """
    if isinstance(parts, Absent):
        family.add(HOST_LABELS, parts)
        return family
    for part in parts:
        family.add({label: part}, read(part))
    return family


def mark_varying(families: Iterable[Family]) -> Iterator[Family]:
    """Set `varies` of each family, to False for counters and True for all others, and yield the family."""
    for family in families:
        family.varies = not family.counter
        yield family


Kinds = Mapping[str, tuple[str, str]]
"""Family name -> unit and help."""


def empty_families(kinds: Kinds, counters: Iterable[str] = (), varying: Iterable[str] = ()) -> dict[str, Family]:
    """Return family name -> a family of that kind without readings.

    `counters` and `varying` are names of families. A name in both is a counter.
    """
    counter_names, varying_names = frozenset(counters), frozenset(varying)
    return {
        name: Family(
            name=name,
            unit=unit,
            help=text,
            counter=name in counter_names,
            varies=name in varying_names and name not in counter_names,
        )
        for name, (unit, text) in kinds.items()
    }


def first_absent(*values: object) -> Absent | None:
    """Return the first of the values that is an `Absent`; None if there is none."""
    return next((value for value in values if isinstance(value, Absent)), None)
