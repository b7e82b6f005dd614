"""What the collectors read: name -> unit, labels and meaning.

The control node imports no collector, and the lint has to know what a criterion may speak of. `readings.json` is written by
tests/unit/test_readings.py out of the collectors themselves, and a test says where the two differ.
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
    """One kind of reading over all its scopes."""

    unit: str
    help: str
    labels: tuple[str, ...] = ()
    """Labels of its scopes, from the outside in; none: it concerns the host."""
    counter: bool = False


def _read() -> dict[str, Reading]:
    found = json.loads(PATH.read_text(encoding="utf-8"))
    return {name: Reading(**{**item, "labels": tuple(item.get("labels", ()))}) for name, item in found.items()}


READINGS: Mapping[str, Reading] = _read()
