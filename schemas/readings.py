"""The readings of the collectors: name -> unit, labels and help text.

The control node imports no collector, and the lint must know which readings exist. tests/unit/schemas/test_readings.py generates
`readings.json` from the collectors and fails if the file is out of date.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

PATH = Path(__file__).with_name("readings.json")
PROMETHEUS_SUFFIX = {
    "1": "",
    "ratio": "_ratio",
    "Cel": "_celsius",
    "W": "_watts",
    "J": "_joules",
    "Hz": "_hertz",
    "B": "_bytes",
    "B/s": "_bytes_per_second",
    "s": "_seconds",
}
"""SI unit in the record -> Prometheus' base unit in the name of the exported series."""


@dataclass(frozen=True, kw_only=True)
class Reading:
    """A reading, for all its scopes."""

    unit: str
    help: str
    labels: tuple[str, ...] = ()
    """Labels of its scopes, widest first; empty: the reading is of the host."""
    counter: bool = False
    full_only: bool = False
    """Only the snapshots before and after a launch have it, because it takes long to read or never changes."""


def _read() -> dict[str, Reading]:
    result = json.loads(PATH.read_text(encoding="utf-8"))
    return {name: Reading(**{**item, "labels": tuple(item.get("labels", ()))}) for name, item in result.items()}


READINGS: Mapping[str, Reading] = _read()
