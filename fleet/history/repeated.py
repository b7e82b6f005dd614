"""Answer which parts, slots, hosts and racks fail repeatedly, and which figures drift or changed with the driver."""

from __future__ import annotations

from dataclasses import asdict

from fleet.history.answer import Answer, Section
from fleet.history.database import History
from fleet.history.driver_effects import driver_effects
from fleet.history.lemons import lemons
from fleet.history.trends import drifts

_REPEATED = {
    "kind": "kind", "id": "part", "host": "last host", "slot": "slot", "episodes": "episodes", "runs": "runs",
    "problems": "problems", "serials": "serials", "first": "first", "last": "last", "by_chance": "expected by chance",
    "is_lemon": "lemon",
}  # fmt: skip
_DRIFTS = {
    "level": "kind", "id": "part", "rack": "rack", "meaning": "better or worse", "shape": "shape", "at": "at", "name": "figure",
    "settings": "settings", "per_year": "per year", "error": "± (95 %)", "change": "total change", "points": "points",
    "first": "first", "last": "last", "others": "other figures",
}  # fmt: skip
_DRIVERS = {
    "name": "figure", "settings": "settings", "stage": "stage", "model": "model", "old": "old driver", "new": "new driver",
    "change": "change", "error": "± (95 %)", "hosts": "hosts", "weeks_old": "weeks old", "weeks_new": "weeks new",
    "meaning": "better or worse", "finding": "finding",
}  # fmt: skip


def lemons_answer(history: History) -> Answer:
    """Return the parts, slots, hosts and racks that failed repeatedly, and the GPUs, hosts and racks that drift."""
    repeated = [asdict(item) for item in lemons(history)]
    drifting = [asdict(item) for item in drifts(history)]
    sections = [
        Section(name="repeated", title="Failed repeatedly", rows=repeated, columns=_REPEATED,
                empty="no part, slot, host or rack failed repeatedly"),
        Section(name="drifts", title="Drifting away from their peers", rows=drifting, columns=_DRIFTS,
                empty="no drift was found in any part, host or rack"),
    ]  # fmt: skip
    return Answer(sections=sections)


def drivers_answer(history: History) -> Answer:
    """Return the figures whose level changed with the driver."""
    rows = [asdict(item) for item in driver_effects(history)]
    return Answer(
        sections=[
            Section(
                name="drivers",
                title="Figures that changed with the driver",
                rows=rows,
                columns=_DRIVERS,
                empty="on hosts measured under both drivers, no figure changed by more than it varies from week to week",
            )
        ]
    )
