"""Parse the memory modules in the SMBIOS tables of the firmware (DMTF DSP0134, structures 16 and 17). Pure functions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace

_ARRAY, _DEVICE, _END = 16, 17, 127
_SYSTEM_MEMORY = 3
"""Value of the field `Use` of a memory array that is system memory. Other arrays are video memory, flash memory or caches."""
_HEADER, _LEAST_DEVICE = 4, 0x15
"""Bytes in the header of a structure, and minimum bytes in a structure that describes a memory device (SMBIOS 2.1)."""
_MIB, _KIB, _MEGA = 1 << 20, 1 << 10, 1_000_000
_UNKNOWN, _IN_EXTENDED_SIZE = 0xFFFF, 0x7FFF
MAX_TEXT = 64
NON_VOLATILE = "non-volatile"
_TYPES = {
    0x12: "DDR", 0x13: "DDR2", 0x18: "DDR3", 0x1A: "DDR4", 0x1B: "LPDDR", 0x1C: "LPDDR2", 0x1D: "LPDDR3", 0x1E: "LPDDR4",
    0x1F: NON_VOLATILE, 0x20: "HBM", 0x21: "HBM2", 0x22: "DDR5", 0x23: "LPDDR5", 0x24: "HBM3",
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class MemorySlot:
    """A slot for a memory module, or soldered memory.

    A text that the firmware does not state is "". A number that it does not state is None.
    """

    name: str
    """Unique name: the slot's locator in the table, which is also printed on the board. If several slots have the same locator,
    the bank's locator is put before it. If names are still equal, a number is appended."""
    bank: str
    size: int | None
    """Bytes; 0 if the slot is empty, None if the size is unknown."""
    kind: str
    """A text of _TYPES, such as `DDR5`, or `other`."""
    rate: int | None
    """Transfers per second, as configured by the firmware."""
    rated: int | None
    """Transfers per second that the module supports."""
    maker: str
    part_number: str
    serial: str


def memory_slots(table: bytes) -> list[MemorySlot]:
    """Return the slots for system memory, in the order of the table.

    Raises:
        ValueError: the table is truncated, or a structure is shorter than the standard permits.
    """
    others, slots = set(), []
    for kind, handle, data, texts in _structures(table):
        if kind == _ARRAY and len(data) > 5 and data[5] != _SYSTEM_MEMORY:
            others.add(handle)
        elif kind == _DEVICE:
            if len(data) < _LEAST_DEVICE:
                raise ValueError(f"a memory device has only {len(data)} bytes")
            slots.append((_number(data, 4, 2), _slot(data, texts)))
    return _unique([slot for array, slot in slots if array not in others])


def _structures(table: bytes) -> Iterator[tuple[int, int, bytes, list[str]]]:
    """Yield type, handle, formatted area and texts of each structure."""
    start = 0
    while start < len(table):
        if len(table) - start < _HEADER or table[start + 1] < _HEADER:
            raise ValueError(f"no structure at byte {start} of {len(table)}")
        kind, length = table[start], table[start + 1]
        end = table.find(b"\0\0", start + length)
        if end < 0:
            raise ValueError(f"truncated after {len(table)} bytes")
        texts = [_printable(text) for text in table[start + length : end].split(b"\0")]
        yield kind, int.from_bytes(table[start + 2 : start + 4], "little"), table[start : start + length], texts
        if kind == _END:
            return
        start = end + 2


def _printable(text: bytes) -> str:
    decoded = text.decode("ascii", errors="replace")
    return "".join(letter for letter in decoded if letter.isprintable()).strip()[:MAX_TEXT]


def _slot(data: bytes, texts: list[str]) -> MemorySlot:
    def text(offset: int) -> str:
        number = data[offset] if offset < len(data) else 0
        return texts[number - 1] if 0 < number <= len(texts) else ""

    return MemorySlot(
        name=text(0x10),
        bank=text(0x11),
        size=_size(data),
        kind=_TYPES.get(data[0x12], "other"),
        rate=_rate(data, 0x20, 0x58),
        rated=_rate(data, 0x15, 0x54),
        maker=text(0x17),
        part_number=text(0x1A),
        serial=text(0x18),
    )


def _size(data: bytes) -> int | None:
    size = _number(data, 0x0C, 2)
    if size == _UNKNOWN:
        return None
    if size == _IN_EXTENDED_SIZE:
        return (_number(data, 0x1C, 4) & 0x7FFFFFFF) * _MIB or None
    return (size & 0x7FFF) * (_KIB if size & 0x8000 else _MIB)


def _rate(data: bytes, offset: int, extended: int) -> int | None:
    rate = _number(data, offset, 2)
    if rate == _UNKNOWN:
        rate = _number(data, extended, 4) & 0x7FFFFFFF
    return rate * _MEGA or None


def _number(data: bytes, offset: int, size: int) -> int:
    """Return a number in the formatted area; 0 (unknown) if the area ends before it, as in older versions of SMBIOS."""
    field = data[offset : offset + size]
    return int.from_bytes(field, "little") if len(field) == size else 0


def _unique(slots: list[MemorySlot]) -> list[MemorySlot]:
    """Return the slots with unique names. The firmware of some boards names every slot `DIMM 0`, and only the banks differ."""
    in_banks = _renamed(slots, [f"{slot.bank} {slot.name}".strip() for slot in slots])
    return _renamed(in_banks, [f"{slot.name} {number}".strip() for number, slot in enumerate(in_banks)])


def _renamed(slots: list[MemorySlot], names: list[str]) -> list[MemorySlot]:
    """Return the slots. A slot whose name is empty or not unique gets the name at its position in `names`."""
    counts = Counter(slot.name for slot in slots)
    return [
        replace(slot, name=name) if counts[slot.name] > 1 or not slot.name else slot
        for slot, name in zip(slots, names, strict=True)
    ]
