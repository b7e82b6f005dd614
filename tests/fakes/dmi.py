"""Build the SMBIOS table of a host (DMTF DSP0134): a memory array (structure type 16) and its slots (structure type 17)."""

from __future__ import annotations

import struct
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

GIB = 1 << 30
TABLE = "sys/firmware/dmi/tables/DMI"
SYSTEM_MEMORY, FLASH = 3, 5
DDR4, NON_VOLATILE, DDR5 = 0x1A, 0x1F, 0x22
ARRAY = 0x1000
"""Handle of the memory array."""


@dataclass(frozen=True, kw_only=True)
class Slot:
    """A slot for a memory module.

    `size` is that of the module in bytes; 0: the slot is empty; None: the firmware does not report the size. `rate` is the rate
    at which the module runs, and `rated` its highest rate, both in MT/s; 0: not reported.
    """

    name: str
    bank: str = ""
    size: int | None = 128 * GIB
    rate: int = 4800
    rated: int = 4800
    kind: int = DDR5
    maker: str = "Samsung"
    part_number: str = "M321RAJA0MB0-CWMNY"
    serial: str = "80CE0123"
    length: int = 0x5C
    """Length of the structure in bytes, without its texts. In older versions of SMBIOS, it is shorter and has fewer fields."""
    array: int = ARRAY
    """Handle of the array that the slot belongs to."""


def slots(sockets: int = 2, channels: str = "ABCDEFGH", **options: Any) -> list[Slot]:
    """Return the slots of a healthy host: one slot with a module for each channel of each socket."""
    return [
        Slot(name=f"P{socket}-DIMM{channel}1", bank=f"P{socket}_Node0_Channel0_Dimm0", **options)
        for socket in range(1, sockets + 1)
        for channel in channels
    ]


def without(chosen: Iterable[Slot], *names: str) -> list[Slot]:
    """Return a copy of the slots. Those with these names are empty, and have the texts that firmware reports for empty slots."""
    empty = {
        "size": 0,
        "rate": 0,
        "rated": 0,
        "kind": 2,
        "maker": "NO DIMM",
        "part_number": "NO DIMM",
        "serial": "NO DIMM",
    }
    return [replace(slot, **empty) if slot.name in names else slot for slot in chosen]


def table(chosen: Iterable[Slot], use: int = SYSTEM_MEMORY) -> bytes:
    """Return an SMBIOS table: a BIOS structure, a memory array for `use`, the slots and the end-of-table structure."""
    bios = struct.pack("<BBH", 0, 0x1A, 0) + bytes(0x16) + b"American Megatrends\x002.3\0\0"
    array = struct.pack("<BBHBBBIHH", 16, 0x17, ARRAY, 3, use, 6, 0x80000000, 0xFFFE, 32) + bytes(8) + b"\0\0"
    devices = b"".join(_device(number, slot) for number, slot in enumerate(chosen))
    return bios + array + devices + struct.pack("<BBH", 127, 4, 0xFEFF) + b"\0\0"


def _device(number: int, slot: Slot) -> bytes:
    texts: list[bytes] = []

    def text(value: str) -> int:
        if not value:
            return 0
        texts.append(value.encode())
        return len(texts)

    mib = (slot.size or 0) >> 20
    size = 0xFFFF if slot.size is None else 0x7FFF if mib >= 0x7FFF else mib
    data = struct.pack("<BBHHHHHHBBBBBHH", 17, slot.length, 0x1100 + number, slot.array, 0xFFFE, 80, 64, size, 9, 0,
                       text(slot.name), text(slot.bank), slot.kind, 0x2080, _short(slot.rated))  # fmt: skip
    data += bytes([text(slot.maker), text(slot.serial), 0, text(slot.part_number), 2])
    data += struct.pack("<IH", mib if size == 0x7FFF else 0, _short(slot.rate))
    data = data.ljust(0x54, b"\0") + struct.pack("<II", slot.rated, slot.rate)
    return data[: slot.length] + (b"\0".join(texts) or b"\0") + (b"\0\0" if texts else b"\0")


def _short(rate: int) -> int:
    return 0xFFFF if rate >= 0xFFFF else rate
