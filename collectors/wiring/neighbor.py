"""The neighbor of a port of the host: the switch port at the other end of the cable."""

from __future__ import annotations

import unicodedata
from dataclasses import dataclass

from collectors.base import Absent, Value

MAX_TEXT = 80
"""Maximum length of a text from a neighbor, in characters; the rest is cut. LLDP allows 255."""
NO_NAME, NO_LABEL = Absent.unsupported("the switch sends no name"), Absent.unsupported("the switch sends no port label")
NO_PORT = Absent.error(
    "the switch sends its own ID instead of the name of the port, as SONiC does before it configures LLDP"
)


@dataclass(frozen=True, kw_only=True)
class Neighbor:
    """A switch port. The switch sent all of these texts; `clean_text` was applied to them."""

    id: str
    """Chassis ID or GUID of the switch."""
    name: str
    """Name of the switch; may be empty."""
    port: str
    """Name of the port, as the switch sends it; empty if the switch sends only its own ID (NO_PORT)."""
    label: str = ""
    """Description of the port. Some switches, such as SONiC, send the label of the port on the front panel here."""

    def readings(self) -> dict[str, Value | Absent]:
        """Return the readings: name without the prefix `network.` or `infiniband.` -> value."""
        return {
            "switch": self.name or NO_NAME,
            "switch_id": self.id,
            "switch_port": self.port or NO_PORT,
            "switch_port_label": self.label or NO_LABEL,
        }


def clean_text(text: object) -> str:
    """Return a text as one line of at most MAX_TEXT characters, without control and format characters."""
    printable = (
        char for char in str(text)[: 4 * MAX_TEXT] if char.isspace() or not unicodedata.category(char).startswith("C")
    )
    return " ".join("".join(printable).split())[:MAX_TEXT].rstrip()
