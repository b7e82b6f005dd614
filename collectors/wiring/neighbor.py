"""The neighbor of a port: the switch, and the port of the switch."""

from __future__ import annotations

import unicodedata
from dataclasses import dataclass

from collectors.base import Absent, Value

MAX_TEXT = 80
"""Maximum length of a text from a neighbor; the rest is cut. LLDP allows 255 characters."""
NO_NAME, NO_LABEL = Absent.unsupported("the switch sends no name"), Absent.unsupported("the switch sends no port label")
NO_PORT = Absent.error(
    "the switch sends its own ID instead of the name of the port, as SONiC does before it configures LLDP"
)


@dataclass(frozen=True, kw_only=True)
class Neighbor:
    """A switch port. All texts were chosen by the switch; `clean_text` was applied to them."""

    id: str
    """Chassis ID or GUID of the switch."""
    name: str
    """Name of the switch; may be empty."""
    port: str
    """Port of the switch, as the switch itself calls it; empty if it sends only its own ID."""
    label: str = ""
    """Description of the port. Some switches, such as SONiC, send the label on the front here."""

    def readings(self) -> dict[str, Value | Absent]:
        """Return the readings: name without the prefix `network.` or `infiniband.` -> value."""
        return {
            "switch": self.name or NO_NAME,
            "switch_id": self.id,
            "switch_port": self.port or NO_PORT,
            "switch_port_label": self.label or NO_LABEL,
        }


def clean_text(text: object) -> str:
    """Return a text from a neighbor in one line: without control and format characters, and at most MAX_TEXT long."""
    printable = ("" if unicodedata.category(char).startswith("C") else char for char in str(text)[: 4 * MAX_TEXT])
    return " ".join("".join(printable).split())[:MAX_TEXT].rstrip()
