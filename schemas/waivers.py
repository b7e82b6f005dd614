"""Waivers. With a waiver, a named person accepts a failure until a date. The verdict does not change."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Waiver:
    """One waiver of a waiver file."""

    criterion: str
    who: str
    """The person responsible."""
    why: str
    until: str
    """Last day on which the waiver is valid, in UTC: `2026-12-31`. It is compared with the day on which the plan was made."""
    host: str = ""
    serial: str = ""
    """Serial of a part, or the UUID of a GPU whose serial other GPUs have too. Without `host`, the waiver applies in any host."""
    scope: str = ""
    """Scope, such as `gpu=3`; it includes all scopes below, such as `gpu=3,link=0`. Empty: the whole host or part."""
    name: str = ""
    """Name of the observation; empty: every observation. Required if `absent` is true."""
    absent: bool = False
    """Whether the waiver applies to inconclusive verdicts instead of failures."""
    origin: str = ""
    """File name and number of the waiver in that file, for messages: `waivers.yml waiver 2`."""

    @property
    def target(self) -> str:
        """What is waived, for messages: `memory-vs-fleet on h1 gpu=3`."""
        parts = (self.host, self.scope, f"serial {self.serial}" if self.serial else "", self.name)
        return f"{self.criterion} on {' '.join(part for part in parts if part)}"

    def __str__(self) -> str:
        return f"waived by {self.who} until {self.until}: {self.why}"
