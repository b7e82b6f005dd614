"""Collect the readings of one BMC, and convert them to the metrics of a snapshot."""

from __future__ import annotations

from schemas.readings import BMC, READINGS
from schemas.records import ERROR, UNSUPPORTED, Metric, Value

NAMES = tuple(sorted(name for name in READINGS if name.startswith(BMC)))
READABLE = "bmc.readable"
MAX_SCOPES = 1000
"""Maximum number of parts of a BMC that have the same reading. A GB200 tray has 300 sensors."""


class Readings:
    """The readings of one BMC at one moment."""

    def __init__(self) -> None:
        self._values: dict[str, dict[str, Value]] = {name: {} for name in NAMES}
        self._absent: dict[str, dict[str, str]] = {name: {} for name in NAMES}

    def scope(self, name: str, *labels: str) -> str:
        """Return a scope for the reading `name` of a part, from the labels of the part.

        If a part with these labels was already added to the reading, a number makes the last label unique: `Fan:2`. The scope is
        empty if MAX_SCOPES parts have these labels.
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
        """Add the reading `name` of an installed part: its value, or the error `reason` if `value` is None.

        Add nothing if `value` is None and `reason` is empty. Return the scope of the part; empty if MAX_SCOPES parts already have
        this reading.
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
        """Add the reading `name` of a part that reports no value. Its status is `unsupported`, which is not an error."""
        if len(self._absent[name]) < MAX_SCOPES and (scope := self.scope(name, *labels)):
            self._absent[name][scope] = f"{UNSUPPORTED}: {reason}"

    def fail(self, name: str, reason: str) -> None:
        """Add the reason why the reading `name` failed, in the scope `host`. Only the first such reason is kept."""
        self._absent[name].setdefault("host", f"{ERROR}: {reason}")

    def metrics(self) -> tuple[Metric, ...]:
        """Return one metric for each name in NAMES. A reading that no part has is `unsupported`."""
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
