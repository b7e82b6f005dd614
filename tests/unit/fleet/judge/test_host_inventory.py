"""The parts that a host reports, with serials and slots, and why the list of parts may be incomplete."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from fleet.judge.host_inventory import (
    GUID,
    LAYER,
    MAC,
    MODULE_SERIAL,
    SERIAL,
    HostInventory,
    LocatedPart,
    UnreadPort,
    host_inventory,
    identity,
)
from schemas.records import Value
from tests import builders
from tests.unit.fleet.judge.small_fleet import host_view, metric, one_figure_plan

PLAN = one_figure_plan("h1")
HCA_ADDRESS, NIC_ADDRESS = "infiniband.hca.pci_address", "network.pci_address"
INTERFACE = "infiniband.interface"
PORT, SECOND_PORT = "hca=a,port=1", "hca=a,port=2"


def inventory(readings: dict[str, dict[str, Value]], **fields: Any) -> HostInventory:
    """Return the parts of a host with these readings: name -> scope -> value."""
    return host_inventory(
        host_view(PLAN, "h1", *(metric(name, of_name) for name, of_name in readings.items()), **fields)
    )


def parts(name: str, readings: dict[str, dict[str, Value]], **fields: Any) -> list[LocatedPart]:
    return [part for part in inventory(readings, **fields).parts if part.name == name]


@pytest.mark.parametrize(
    ("kind", "serial", "normalized"),
    [
        ("gpu", " 00ab1 ", "AB1"),
        ("module", " 00mt-1 ", "MT-1"),
        ("nic", " 0x0C42-A1:03.00 65 ", "0c42a1030065"),
    ],
)
def test_identity_normalizes_serials_and_addresses(kind: str, serial: str, normalized: str) -> None:
    assert identity(kind, serial) == normalized


def test_gpu_has_its_index_and_its_address_as_slots() -> None:
    first, second, third = (builders.gpu("h1", index) for index in range(3))
    gpus = (replace(first, pci_bus_id="00000000:1B:00.0"), replace(second, serial=""), replace(third, pci_bus_id=""))
    result = parts(SERIAL, {}, gpus=gpus)
    assert [(part.scope, part.serial, {*part.slots}) for part in result] == [
        ("gpu=0", "h1-0", {"0", "0000:1b:00.0"}),
        ("gpu=2", "h1-2", {"2"}),
    ]
    assert [part.location for part in result] == ["h1 gpu=0", "h1 gpu=2"]
    assert not any(part.ethernet for part in result)


@pytest.mark.parametrize(("name", "kind", "address"), [(GUID, "hca", HCA_ADDRESS), (MAC, "nic", NIC_ADDRESS)])
def test_adapter_has_its_name_and_its_address_as_slots(name: str, kind: str, address: str) -> None:
    first, second, third = (f"{kind}={adapter}" for adapter in "abc")
    readings: dict[str, dict[str, Value]] = {
        name: {first: "0c42:a103", second: "0c42:a104", third: "0c42:a105"},
        address: {first: "00000000:1A:00.0", second: "error: lost"},
    }
    result = parts(name, readings)
    assert [(part.host, part.scope, part.serial, {*part.slots}) for part in result] == [
        ("h1", first, "0c42:a103", {"a", "0000:1a:00.0"}),
        ("h1", second, "0c42:a104", {"b"}),
        ("h1", third, "0c42:a105", {"c"}),
    ]


@pytest.mark.parametrize("serial", ["0000:0000:0000:0000", "", "error: lost"])
@pytest.mark.parametrize(("name", "scope"), [(GUID, "hca=a"), (MAC, "nic=a")])
def test_adapter_without_a_guid_or_mac_address_is_not_a_part(name: str, scope: str, serial: str) -> None:
    assert parts(name, {name: {scope: serial}}) == []


@pytest.mark.parametrize(
    ("layers", "is_ethernet"),
    [
        ({}, False),
        ({PORT: "Ethernet"}, True),
        ({PORT: "Ethernet", SECOND_PORT: "InfiniBand"}, False),
        ({PORT: "Ethernet", SECOND_PORT: "error: lost"}, True),
        ({PORT: "error: lost"}, False),
        ({"hca=a": "Ethernet"}, False),
        ({"hca=b,port=1": "Ethernet"}, False),
    ],
)
def test_adapter_is_ethernet_if_a_port_is_ethernet_and_none_is_infiniband(
    layers: dict[str, Value], is_ethernet: bool
) -> None:
    readings: dict[str, dict[str, Value]] = {GUID: {"hca=a": "0c42:a103"}, MAC: {"nic=a": "0c:42"}, LAYER: layers}
    assert [part.ethernet for part in parts(GUID, readings)] == [is_ethernet]
    assert [part.ethernet for part in parts(MAC, readings)] == [False], "`ethernet` is true only for parts with a GUID"


@pytest.mark.parametrize(
    ("scope", "slots"),
    [
        ("hca=a", {"a", "a/1", "0000:1a:00.0"}),
        (PORT, {"a", "a/1", "0000:1a:00.0", "eth4"}),
        (SECOND_PORT, {"a/2", "eth5"}),
        ("hca=b,port=1", {"b", "b/1"}),
        ("hca=c,port=1", {"c", "c/1"}),
        ("nic=a,port=1", {"a", "0000:2a:00.0"}),
    ],
)
def test_slots_of_a_module_are_the_names_of_its_port(scope: str, slots: set[str]) -> None:
    named: dict[str, dict[str, Value]] = {
        HCA_ADDRESS: {"hca=a": "00000000:1A:00.0", "hca=b": "error: lost"},
        NIC_ADDRESS: {"nic=a": "0000:2a:00.0"},
        INTERFACE: {PORT: "eth4", SECOND_PORT: "eth5", "hca=b,port=1": "error: lost"},
    }
    (module,) = parts(MODULE_SERIAL, {**named, MODULE_SERIAL: {scope: "X1"}})
    assert (module.host, module.scope, module.serial, {*module.slots}) == ("h1", scope, "X1", slots)
    assert inventory({**named, MODULE_SERIAL: {scope: "X1"}}).unread_ports == ()
    (unread,) = inventory({**named, MODULE_SERIAL: {scope: "error: lost"}}).unread_ports
    assert unread.names == slots


@pytest.mark.parametrize(("why", "is_error"), [("error: ethtool: timed out", True), ("unsupported: no module", False)])
def test_port_whose_module_is_not_reported_has_the_reason(why: str, is_error: bool) -> None:
    result = inventory({MODULE_SERIAL: {PORT: why}})
    assert result.unread_ports == (
        UnreadPort(
            names=frozenset({"a", "a/1"}),
            reason=f"adapter a, port 1 does not report its module ({why})",
            is_error=is_error,
        ),
    )
    assert [part for part in result.parts if part.name == MODULE_SERIAL] == []


def test_module_with_a_serial_of_zeros_is_not_a_part_but_its_port_counts_as_read() -> None:
    result = inventory({MODULE_SERIAL: {PORT: "000"}})
    assert (parts(MODULE_SERIAL, {MODULE_SERIAL: {PORT: "000"}}), result.unread_ports) == ([], ())


UNREAD = "adapter a, port 2 does not report its module (unsupported: no module)"
NOT_REPORTED = "the host did not report the module at port c"


@pytest.mark.parametrize(
    ("slot", "why"),
    [("a", ""), ("a/1", ""), ("a/2", UNREAD), ("", UNREAD), ("c", NOT_REPORTED)],
)
def test_whether_a_module_is_missing_is_unknown_if_its_port_was_not_read(slot: str, why: str) -> None:
    result = inventory(
        {
            MODULE_SERIAL: {PORT: "X1", "hca=b,port=1": "X2", SECOND_PORT: "unsupported: no module"},
            GUID: {"hca=c": "0c42"},
        }
    )
    assert result.why_unknown(MODULE_SERIAL, slot) == why
    assert [result.why_unknown(GUID, each) for each in (slot, "c")] == ["", ""]


def test_it_is_unknown_whether_a_module_is_missing_at_an_unreported_port() -> None:
    result = inventory({MODULE_SERIAL: {PORT: "X1"}})
    assert [result.why_unknown(MODULE_SERIAL, slot) for slot in ("", "a", "a/2")] == [
        "", "", "the host did not report the module at port a/2"
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "readings", "why"),
    [
        (GUID, {}, "the host did not report the GUID of any NIC"),
        (GUID, {"hca=a": "0c42"}, ""),
        (GUID, {"hca=a": "0c42", "hca=b": "error: lost"}, "hca=b does not report its GUID"),
        (MAC, {}, "the host did not report the MAC address of any NIC"),
        (MAC, {"nic=a": "error: lost", "nic=b": "error: lost"}, "nic=a does not report its MAC address"),
        (
            MODULE_SERIAL,
            {},
            "the host did not report any module: ethtool or mlxlink is missing, or the host has no port",
        ),
        (MODULE_SERIAL, {PORT: "X1"}, ""),
        (MODULE_SERIAL, {PORT: "error: lost"}, ""),  # `unread_ports` has the reason for a single port
    ],
)
def test_reason_why_the_list_of_parts_may_be_incomplete(name: str, readings: dict[str, Value], why: str) -> None:
    assert inventory({name: readings}).unknown[name] == why


@pytest.mark.parametrize(
    ("serials", "counts", "why"),
    [
        ((), {}, "1 GPU of the host does not report a serial"),
        ((), {"gpu.count": 0}, ""),
        (("x",), {}, ""),
        (("x", ""), {}, "1 GPU of the host does not report a serial"),
        (("x", "", ""), {"gpu.count": 1}, "2 GPUs of the host do not report a serial"),
        (("x",), {"gpu.count": 1, "gpu.pci_count": 3}, "2 GPUs of the host do not report a serial"),
        (("x",), {"gpu.count": 2, "gpu.pci_count": 1}, "1 GPU of the host does not report a serial"),
        (("x",), {"gpu.pci_count": "error: lost"}, ""),
    ],
)
def test_gpus_without_a_serial_are_counted(serials: tuple[str, ...], counts: dict[str, Value], why: str) -> None:
    """If the host has no reading of its number of GPUs, at least one GPU is expected."""
    gpus = tuple(replace(builders.gpu("h1", index), serial=serial) for index, serial in enumerate(serials))
    assert inventory({name: {"host": count} for name, count in counts.items()}, gpus=gpus).unknown[SERIAL] == why


def test_serial_comes_from_the_last_snapshot() -> None:
    view = host_view(PLAN, "h1", metric(GUID, {"hca=a": "0c42"}))
    first, *others = view.evidence.records[0].snapshots
    late = replace(others[-1], metrics=(metric(GUID, {"hca=a": "0c43"}),))
    result = parts(GUID, {}, snapshots=(first, late))
    assert [part.serial for part in result] == ["0c43"]
