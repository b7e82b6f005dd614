"""Collect the readings of one BMC as metrics of a snapshot."""

from __future__ import annotations

from schemas.readings import BMC, READINGS
from schemas.records import ERROR, UNSUPPORTED, Metric, Value

NAMES = tuple(sorted(name for name in READINGS if name.startswith(BMC)))
READABLE = "bmc.readable"
MAX_SCOPES = 1000
"""Maximum number of parts with the same reading. A tray of a GB200 has 300 sensors."""


class Readings:
    """The readings of one moment."""

    def __init__(self) -> None:
        self._values: dict[str, dict[str, Value]] = {name: {} for name in NAMES}
        self._absent: dict[str, dict[str, str]] = {name: {} for name in NAMES}

    def scope(self, name: str, *labels: str) -> str:
        """Return a scope for the reading `name` of a part. No part that was added before has this scope in this reading.

        If the labels are those of an earlier part, the last label gets a number: `Fan:2`. The scope is empty if MAX_SCOPES parts
        have these labels.
        """
        kinds = READINGS[name].labels
        used = self._values[name].keys() | self._absent[name].keys()
        for number in range(1, MAX_SCOPES + 1):
            last = labels[-1] if number == 1 else f"{labels[-1]}:{number}"
            scope = ",".join(f"{kind}={text}" for kind, text in zip(kinds, (*labels[:-1], last), strict=True))
            if scope not in used:
                return scope
        return ""

    def add(self, name: str, labels: tuple[str, ...], value: Value, reason: str = "") -> str:
        """Add the value of an installed part. If `value` is None, add `reason` as an error, or nothing if `reason` is empty.

        Return the scope of the part; empty if MAX_SCOPES parts have the reading already.
        """
        scope = self.scope(name, *labels) if labels else "host"
        if not scope or len(self._values[name]) >= MAX_SCOPES:
            self.fail(name, f"more than {MAX_SCOPES} parts have this reading; the others were not read")
            return ""
        if value is not None:
            self._values[name][scope] = value
        elif reason:
            self._absent[name][scope] = f"{ERROR}: {reason}"
        return scope

    def lack(self, name: str, labels: tuple[str, ...], reason: str) -> None:
        """Add a part whose value is not available now. Its status is unsupported, which is not an error."""
        if len(self._absent[name]) < MAX_SCOPES and (scope := self.scope(name, *labels)):
            self._absent[name][scope] = f"{UNSUPPORTED}: {reason}"

    def fail(self, name: str, reason: str) -> None:
        """Add, in the scope of the host, the reason why a reading failed. Only the first reason of a reading is kept."""
        self._absent[name].setdefault("host", f"{ERROR}: {reason}")

    def metrics(self) -> tuple[Metric, ...]:
        """Return the metrics, one for each name. A reading without any part is unsupported."""
        return tuple(
            Metric(
                name=name,
                unit=READINGS[name].unit,
                values=self._values[name],
                absent=self._absent[name]
                or ({} if self._values[name] else {"host": f"{UNSUPPORTED}: the BMC reports none"}),
            )
            for name in NAMES
        )


def unreadable(reason: str) -> tuple[Metric, ...]:
    """Return the metrics of a BMC that could not be read."""
    return (Metric(name=READABLE, unit="1", values={}, absent={"host": f"{ERROR}: {reason}"}),)
