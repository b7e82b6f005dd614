"""Waivers: a failure that somebody answers for, by name, until a day. The verdict stays what it is."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Waiver:
    """One line of a waiver file."""

    criterion: str
    who: str
    """Who answers for it."""
    why: str
    until: str
    """Last day on which it holds, `2026-12-31`, UTC; a run holds it against the day on which its plan was made."""
    host: str = ""
    serial: str = ""
    """Of the GPU: the waiver goes with the part."""
    scope: str = ""
    """`gpu=3`, and what is below it; empty: anywhere in the host."""
    name: str = ""
    """Of the observation; what is absent is waived by its name alone."""
    absent: bool = False
    """It is for what could not be judged, and not for what failed."""
    origin: str = ""
    """File and number of the line in it, for people."""

    @property
    def target(self) -> str:
        """`memory-vs-fleet on h1 gpu=3`."""
        places = (self.host, self.scope, f"serial {self.serial}" if self.serial else "", self.name)
        return f"{self.criterion} on {' '.join(place for place in places if place)}"

    def __str__(self) -> str:
        return f"waived by {self.who} until {self.until}: {self.why}"
