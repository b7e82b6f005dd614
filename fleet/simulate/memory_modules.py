"""Readings of the memory modules of a simulated host, which has one module in each memory channel of its two processors."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

Doc = dict[str, Any]
SLOTS = tuple(f"dimm=P{socket}-DIMM{channel}1" for socket in (1, 2) for channel in "ABCDEFGH")
FAULTY_SLOT = SLOTS[10]
"""Slot that a simulated fault empties, or in which it puts a slower module."""
SIZE, SPEED, LOWER_SPEED = 64 << 30, 4_800_000_000, 4_400_000_000
"""Size of a module in bytes; its speed in transfers per second; the speed of the slower module in FAULTY_SLOT."""
LESS_INTERLEAVED = 0.6
"""Assumed memory bandwidth of a host if FAULTY_SLOT is empty, as a share of the bandwidth with all modules."""
_USABLE_SHARE = 0.98
_OF_SLOTS: dict[str, tuple[str, Any]] = {  # reading of each slot -> unit, value
    "host.dimm.populated": ("1", True),
    "host.dimm.size": ("B", SIZE),
    "host.dimm.type": ("1", "DDR5"),
    "host.dimm.speed_rated": ("transfers/s", SPEED),
}
OF_MODULE = tuple(_OF_SLOTS)[1:]
"""Names of the readings that an empty slot does not have."""
_OF_HOST: dict[str, tuple[str, Any]] = {  # reading of the host -> unit, value
    "host.dimm.slot_count": ("1", len(SLOTS)),
    "host.dimm.count": ("1", len(SLOTS)),
    "host.memory.speed": ("transfers/s", SPEED),
    "host.memory.usable_share": ("ratio", _USABLE_SHARE),
}


def memory_module_metrics() -> Iterator[Doc]:
    """Yield the readings of the memory modules of a healthy host."""
    for name, (unit, value) in _OF_SLOTS.items():
        yield {"name": name, "unit": unit, "values": dict.fromkeys(SLOTS, value)}
    for name, (unit, value) in _OF_HOST.items():
        yield {"name": name, "unit": unit, "values": {"host": value}}
