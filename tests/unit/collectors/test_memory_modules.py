"""Memory modules are read from the SMBIOS table of the firmware. If this table cannot be parsed, each reading is an error."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from collectors.base import Absent, Value, scope
from collectors.files import Files
from collectors.host.memory_modules import MAX_SLOTS, memory_modules
from collectors.host.smbios import MAX_TEXT, memory_slots
from tests.fakes import dmi

SLOTS = dmi.slots()
MEMINFO = "MemTotal:       2113404636 kB\n"


def readings(
    root: Path, table: bytes | None, *, virtual: Value | Absent = False, meminfo: str = MEMINFO
) -> dict[str, Value | Absent]:
    """Return `name scope` -> reading of a host with this SMBIOS table.

    `table` is None if the host has no table. `virtual` is whether the host is a virtual machine, or why this is unknown.
    """
    path = root / dmi.TABLE
    path.parent.mkdir(parents=True)
    (root / "proc").mkdir()
    (root / "proc/meminfo").write_text(meminfo)
    if table is not None:
        path.write_bytes(table)
    families = memory_modules(Files(root), virtual)
    return {f"{item.name} {scope(labels)}": value for item in families for labels, value in item.readings}


def test_all_readings_of_a_module_and_of_the_host_are_reported(tmp_path: Path) -> None:
    values = readings(tmp_path, dmi.table(SLOTS))
    assert {name: value for name, value in values.items() if name.endswith(("dimm=P2-DIMMC1", "host"))} == {
        "host.dimm.populated dimm=P2-DIMMC1": True,
        "host.dimm.size dimm=P2-DIMMC1": 128 * dmi.GIB,
        "host.dimm.type dimm=P2-DIMMC1": "DDR5",
        "host.dimm.speed dimm=P2-DIMMC1": 4_800_000_000,
        "host.dimm.speed_rated dimm=P2-DIMMC1": 4_800_000_000,
        "host.dimm.manufacturer dimm=P2-DIMMC1": "Samsung",
        "host.dimm.part_number dimm=P2-DIMMC1": "M321RAJA0MB0-CWMNY",
        "host.dimm.serial dimm=P2-DIMMC1": "80CE0123",
        "host.dimm.slot_count host": 16,
        "host.dimm.count host": 16,
        "host.memory.speed host": 4_800_000_000,
        "host.memory.usable_share host": 0.9841,
    }


def test_readings_of_an_empty_slot_are_unsupported_and_other_slots_are_unchanged(tmp_path: Path) -> None:
    before = readings(tmp_path / "before", dmi.table(SLOTS))
    managed = f"MemTotal: {2113404636 * 15 // 16} kB\n"
    after = readings(tmp_path / "after", dmi.table(dmi.without(SLOTS, "P2-DIMMC1")), meminfo=managed)
    changed = {name: value for name, value in after.items() if value != before[name]}
    assert changed.pop("host.dimm.populated dimm=P2-DIMMC1") is False
    assert changed.pop("host.dimm.count host") == 15
    assert {name.split()[1] for name in changed} == {"dimm=P2-DIMMC1"}
    assert set(changed.values()) == {Absent.unsupported("the slot is empty")}


@pytest.mark.parametrize(
    ("slot", "expected"),
    [
        ({"size": 16 * dmi.GIB}, {"size": 16 * dmi.GIB}),
        ({"size": 31 * dmi.GIB}, {"size": 31 * dmi.GIB}),
        ({"size": None}, {"size": None}),
        ({"rate": 0}, {"rate": None}),
        ({"rate": 70000, "rated": 70000}, {"rate": 70_000_000_000, "rated": 70_000_000_000}),
        ({"length": 0x22}, {"rate": 4_800_000_000, "size": 128 * dmi.GIB}),  # SMBIOS 2.7
        ({"length": 0x1B, "size": 16 * dmi.GIB}, {"rate": None, "rated": 4_800_000_000, "serial": "80CE0123"}),  # SMBIOS 2.3
        ({"length": 0x15, "size": 16 * dmi.GIB}, {"rated": None, "serial": "", "part_number": ""}),  # SMBIOS 2.1
        ({"kind": dmi.DDR4}, {"kind": "DDR4"}),
        ({"kind": 0xEE}, {"kind": "other"}),
        ({"part_number": "M321\x1b[31m\x07" + "A" * 300}, {"part_number": ("M321[31m" + "A" * 300)[:64]}),
    ],
)  # fmt: skip
def test_fields_of_a_slot_are_parsed(slot: Mapping[str, object], expected: Mapping[str, object]) -> None:
    """The cases with a `length` are structures of older versions of SMBIOS, which are shorter."""
    (parsed,) = memory_slots(dmi.table([replace(SLOTS[0], **slot)]))  # type: ignore[arg-type]
    assert {name: getattr(parsed, name) for name in expected} == expected


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        ([("DIMM 0", "P0 CHANNEL A"), ("DIMM 0", "P0 CHANNEL B")], ["P0 CHANNEL A DIMM 0", "P0 CHANNEL B DIMM 0"]),
        ([("A1", "B"), ("A2", "B")], ["A1", "A2"]),
        ([("DIMM", "BANK"), ("DIMM", "BANK")], ["BANK DIMM 0", "BANK DIMM 1"]),
        ([("", ""), ("", "")], ["0", "1"]),
        ([("", "")], ["0"]),
    ],
)
def test_slots_have_unique_names(names: Sequence[tuple[str, str]], expected: Sequence[str]) -> None:
    slots = [replace(SLOTS[0], name=name, bank=bank) for name, bank in names]
    assert [slot.name for slot in memory_slots(dmi.table(slots))] == expected


def test_flash_memory_is_not_listed_as_memory_modules(tmp_path: Path) -> None:
    values = readings(tmp_path, dmi.table(SLOTS, dmi.FLASH))
    assert set(values.values()) == {Absent.unsupported(f"/{dmi.TABLE} lists no slots for memory modules")}


def test_modules_of_a_virtual_machine_are_not_read(tmp_path: Path) -> None:
    values = readings(tmp_path, dmi.table(SLOTS), virtual=True)
    assert len(values) == 12
    for value in values.values():
        assert isinstance(value, Absent)
        assert (value.status, "hypervisor" in value.reason) == ("unsupported", True)


def test_host_without_tables_reports_no_modules(tmp_path: Path) -> None:
    (tmp_path / "sys/devices").mkdir(parents=True)
    families = memory_modules(Files(tmp_path), Absent.unsupported("not reported"))
    statuses = [value.status for item in families for _, value in item.readings if isinstance(value, Absent)]
    assert statuses == ["unsupported"] * 12


def test_readings_of_a_damaged_table_are_errors_that_name_the_table(tmp_path: Path) -> None:
    table = dmi.table(SLOTS)
    cases = {"short": table[:400], "zeros": b"\0" * 100, "tiny": b"\x11"}
    for name, content in cases.items():
        values = list(readings(tmp_path / name, content).values())
        assert all(
            isinstance(value, Absent) and value.status == "error" and dmi.TABLE in value.reason for value in values
        )
        assert len(values) == 12, name


def test_every_truncated_or_altered_table_gives_slots_or_a_reason() -> None:
    table = dmi.table(SLOTS[:2])
    for position in range(len(table)):
        for content in (table[:position], table[:position] + b"\xff" + table[position + 1 :]):
            with contextlib.suppress(ValueError):  # the only exception that becomes the reason of a reading
                for slot in memory_slots(content):
                    assert len(slot.part_number) <= MAX_TEXT
                    assert slot.part_number.isprintable()


def test_slots_beyond_the_maximum_are_ignored(tmp_path: Path) -> None:
    slots = [replace(SLOTS[0], name=f"S{number}") for number in range(2000)]
    values = readings(tmp_path, dmi.table(slots))
    assert values["host.dimm.count host"] == MAX_SLOTS


OPTANE = replace(SLOTS[0], name="P1-DIMMB2", kind=dmi.NON_VOLATILE, size=512 * dmi.GIB)


@pytest.mark.parametrize(
    ("slots", "managed_gib"),
    [
        ([*SLOTS[:2], *(replace(OPTANE, name=f"P1-DIMMB{number}") for number in range(4))], 4 * 512 - 40),
        ([*SLOTS[:2], OPTANE], 512 - 10),
        (SLOTS, 16 * 128 + 512 - 40),
        (SLOTS, 16 * 128 + 64),
    ],
    ids=["Optane in Memory Mode", "one Optane module in Memory Mode", "large CXL memory", "small CXL memory"],
)
def test_usable_share_is_unsupported_if_other_memory_is_managed_too(
    tmp_path: Path, slots: Sequence[dmi.Slot], managed_gib: int
) -> None:
    observed = readings(tmp_path, dmi.table(slots), meminfo=f"MemTotal: {managed_gib << 20} kB\n")
    value = observed["host.memory.usable_share host"]
    assert isinstance(value, Absent)
    assert (value.status, "non-volatile modules or of CXL" in value.reason) == ("unsupported", True)
    assert observed["host.dimm.count host"] == len(slots)


@pytest.mark.parametrize("managed_gib", [16 * 128, 16 * 128 + 8, 1000])
def test_usable_share_has_a_value_up_to_the_size_of_the_volatile_modules(tmp_path: Path, managed_gib: int) -> None:
    observed = readings(tmp_path, dmi.table(SLOTS), meminfo=f"MemTotal: {managed_gib << 20} kB\n")
    assert observed["host.memory.usable_share host"] == round(managed_gib / (16 * 128), 4)


def test_usable_share_ignores_non_volatile_modules_and_needs_the_size_of_every_module(tmp_path: Path) -> None:
    optane = replace(SLOTS[0], name="P1-DIMMA2", kind=dmi.NON_VOLATILE, size=512 * dmi.GIB)
    assert readings(tmp_path / "a", dmi.table([*SLOTS, optane]))["host.memory.usable_share host"] == 0.9841
    unknown = replace(SLOTS[0], size=None)
    value = readings(tmp_path / "b", dmi.table([*SLOTS[1:], unknown]))["host.memory.usable_share host"]
    assert isinstance(value, Absent)
