"""The memory modules that the firmware lists: which slots have a module, and its size, speed and manufacturer."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial

from collectors.base import HOST_LABELS, Absent, Family, Value, empty_families, host_family
from collectors.files import Files, MissingError
from collectors.host.memory import memory_total
from collectors.host.parsing import firmware_text
from collectors.host.smbios import NON_VOLATILE, MemorySlot, memory_slots

TABLE = "sys/firmware/dmi/tables/DMI"
MAX_TABLE_BYTES, MAX_SLOTS = 1 << 20, 512
_VIRTUAL = Absent.unsupported("the hypervisor invents the memory modules of a virtual machine")
_EMPTY = Absent.unsupported("the slot is empty")
_MOST_USABLE = 1.01
"""Highest possible share, with a margin for rounded sizes, if the kernel manages only the memory of volatile modules."""
_OTHER_MEMORY = Absent.unsupported(
    "the kernel manages more memory than the volatile modules have: that of non-volatile modules or of CXL devices, too"
)
_KINDS = {
    "host.dimm.populated": ("1", "The slot has a memory module"),
    "host.dimm.size": ("B", "Size of the memory module"),
    "host.dimm.type": ("1", "Type of the memory module"),
    "host.dimm.speed": ("transfers/s", "Transfers per second that the firmware configured for the memory module"),
    "host.dimm.speed_rated": ("transfers/s", "Transfers per second that the memory module supports"),
    "host.dimm.manufacturer": ("1", "Manufacturer of the memory module"),
    "host.dimm.part_number": ("1", "Part number of the memory module"),
    "host.dimm.serial": ("1", "Serial number of the memory module"),
}


def memory_modules(files: Files, virtual: Value | Absent) -> Iterable[Family]:
    """Yield the readings of each slot, and of all modules together. Only root can read TABLE.

    `virtual` is True if the host is a virtual machine. The slots of a virtual machine are not read.
    """
    slots = _VIRTUAL if virtual is True else _read(files)
    families = empty_families(_KINDS)
    for family in families.values():
        family.labels = ("dimm",)
    if isinstance(slots, Absent):
        for family in families.values():
            family.add(HOST_LABELS, slots)
    else:
        for slot in slots:
            for name, value in _readings(slot).items():
                families[name].add({"dimm": slot.name}, value)
    yield from families.values()
    yield from _totals(files, slots)


def _read(files: Files) -> list[MemorySlot] | Absent:
    directory, _, name = TABLE.rpartition("/")
    none = f"no /{TABLE}: the firmware has no SMBIOS tables, or a container hides them"
    if isinstance(found := files.matching(directory, name, none), Absent):
        return found
    try:
        with files.path(TABLE).open("rb") as file:
            slots = memory_slots(file.read(MAX_TABLE_BYTES))
    except (OSError, ValueError) as error:
        return Absent.error(f"/{TABLE}: {getattr(error, 'strerror', None) or error}")
    return slots[:MAX_SLOTS] or Absent.unsupported(f"/{TABLE} lists no slots for memory modules")


def _readings(slot: MemorySlot) -> dict[str, Value | Absent]:
    if slot.size == 0:
        return {"host.dimm.populated": False, **dict.fromkeys(list(_KINDS)[1:], _EMPTY)}
    return {
        "host.dimm.populated": True,
        "host.dimm.size": _known(slot.size),
        "host.dimm.type": slot.kind,
        "host.dimm.speed": _known(slot.rate),
        "host.dimm.speed_rated": _known(slot.rated),
        "host.dimm.manufacturer": _text(slot.maker),
        "host.dimm.part_number": _text(slot.part_number),
        "host.dimm.serial": _text(slot.serial),
    }


def _known(number: int | None) -> int | Absent:
    return Absent.unsupported("the firmware does not report it") if number is None else number


def _text(text: str) -> str | Absent:
    try:
        return firmware_text(text)
    except MissingError as error:
        return Absent.unsupported(str(error))


def _totals(files: Files, slots: list[MemorySlot] | Absent) -> Iterable[Family]:
    """Yield the numbers of slots and modules, the rate of the slowest module, and the share of memory that the kernel manages."""

    def total(compute: Callable[[list[MemorySlot]], Value | Absent]) -> Value | Absent:
        if isinstance(slots, Absent):
            return slots
        modules = [slot for slot in slots if slot.size != 0]
        return (
            compute(modules)
            if modules
            else Absent.error(f"/{TABLE} lists only empty slots, although the host has memory")
        )

    count = slots if isinstance(slots, Absent) else len(slots)
    yield host_family("host.dimm.slot_count", "1", "Slots for memory modules", count)
    yield host_family("host.dimm.count", "1", "Memory modules", total(len))
    text = "Transfers per second of the slowest memory module, as configured"
    yield host_family("host.memory.speed", "transfers/s", text, total(_slowest))
    text = "Memory that the kernel manages, as a share of the total size of the volatile memory modules"
    yield host_family("host.memory.usable_share", "ratio", text, total(partial(_usable_share, files)))


def _slowest(modules: list[MemorySlot]) -> int | Absent:
    rates = [slot.rate for slot in modules if slot.rate is not None]
    return _known(min(rates, default=None))


def _usable_share(files: Files, modules: list[MemorySlot]) -> float | Absent:
    modules = [slot for slot in modules if slot.kind != NON_VOLATILE]
    sizes = [slot.size for slot in modules if slot.size is not None]
    managed = memory_total(files)
    if isinstance(managed, Absent):
        return managed
    if not sizes or len(sizes) < len(modules):
        return _known(None)
    share = round(managed / sum(sizes), 4)
    return share if share <= _MOST_USABLE else _OTHER_MEMORY
