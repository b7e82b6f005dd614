"""The network collector reads NICs and teams from /sys, and bonds from /sys and /proc. It omits all other interfaces."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from collectors.base import Absent, Value, scope
from collectors.network import NetworkCollector, parse_speed
from tests.fakes import links

Readings = dict[tuple[str, str], Value | Absent]
NIC, SCOPE = links.PLAIN_INTERFACE, f"nic={links.PLAIN_INTERFACE}"


def readings(root: Path, *, full_snapshot: bool = True) -> Readings:
    """Return (name without `network.`, scope) -> the reading."""
    return {
        (family.name.removeprefix("network."), scope(labels)): value
        for family in NetworkCollector(root, full_snapshot=full_snapshot).collect()
        for labels, value in family.readings
    }


def changed(root: Path, fault: Callable[[Path], None]) -> Readings:
    """Call `fault`, which changes files under `root`. Return the readings that differ afterwards, with their new values."""
    before = readings(root)
    fault(root)
    after = readings(root)
    assert before.keys() == after.keys()
    return {key: value for key, value in after.items() if value != before[key]}


def write(root: Path, **files: object) -> None:
    """Write files of the interface NIC in /sys: name of the file -> content."""
    for name, text in files.items():
        (links.interface(root, NIC) / name).write_text(f"{text}\n")


@pytest.fixture
def root() -> Iterator[Path]:
    """Yield the root directory of a simulated host with two NICs."""
    with links.temporary_tree(gpus=1) as root:
        yield root


def test_healthy_nic_reports_all_readings(root: Path) -> None:
    assert {name: value for (name, location), value in readings(root).items() if location == SCOPE} == {
        "operstate": "up",
        "carrier": True,
        "carrier_changes": 2,
        "speed": 3.125e9,
        "duplex": "full",
        "half_duplex": False,
        "mtu": 9000,
        "rx_errors": 0,
        "tx_errors": 0,
        "rx_dropped": 0,
        "tx_dropped": 0,
        "rx_crc_errors": 0,
        "rx_missed_errors": 0,
        "driver": "bnxt_en",
        "address": "b8:3f:d2:00:00:a2",
        "pci_address": links.PLAIN_NIC,
    }


def test_only_nics_are_counted(root: Path) -> None:
    observed = readings(root)
    assert observed["nic_count", "host"] == 2
    assert {location for _, location in observed} == {"host", SCOPE, f"nic={links.ROCE_INTERFACE}"}


def test_scrape_omits_constants(root: Path) -> None:
    scrape, snapshot = readings(root, full_snapshot=False), readings(root)
    assert {name for name, _ in snapshot.keys() - scrape.keys()} == {"mtu", "driver", "address", "pci_address"}


def test_exporter_reads_the_identity_of_nics(root: Path) -> None:
    families = NetworkCollector(root, identity=True).collect()
    exported = {family.name: {scope(labels): value for labels, value in family.readings} for family in families}
    assert "network.mtu" not in exported
    assert exported["network.address"][SCOPE] == "b8:3f:d2:00:00:a2"
    assert exported["network.pci_address"][SCOPE] == links.PLAIN_NIC


@pytest.mark.parametrize(
    "name", ["rx_errors", "tx_errors", "rx_dropped", "tx_dropped", "rx_crc_errors", "rx_missed_errors"]
)
def test_raised_error_counter_changes_only_its_reading(root: Path, name: str) -> None:
    changes = changed(root, lambda root: (links.interface(root, NIC) / "statistics" / name).write_text("4\n"))
    assert changes == {(name, SCOPE): 4}


def test_carrier_changes_are_counted(root: Path) -> None:
    assert changed(root, lambda root: write(root, carrier_changes=4)) == {("carrier_changes", SCOPE): 4}


def test_half_duplex_is_reported(root: Path) -> None:
    changes = changed(root, lambda root: write(root, duplex="half"))
    assert changes == {("duplex", SCOPE): "half", ("half_duplex", SCOPE): True}


def test_nic_without_a_cable_has_no_speed_and_no_duplex(root: Path) -> None:
    changes = changed(root, lambda root: write(root, operstate="down", carrier=0, speed=-1, duplex="unknown"))
    values = {name: value for (name, _), value in changes.items() if not isinstance(value, Absent)}
    assert values == {"operstate": "down", "carrier": False}
    absent = {name: value.status for (name, _), value in changes.items() if isinstance(value, Absent)}
    assert absent == dict.fromkeys(("speed", "duplex", "half_duplex"), "unsupported")


def test_disabled_nic_has_no_carrier_speed_or_duplex(root: Path) -> None:
    for name in ("carrier", "speed", "duplex"):
        (links.interface(root, NIC) / name).unlink()
        # Reading clear_refs fails with EINVAL, like reading these three files of a disabled interface. The test needs root,
        # because other users cannot open clear_refs for reading.
        (links.interface(root, NIC) / name).symlink_to("/proc/self/clear_refs")
    absent = {name: value for (name, _), value in readings(root).items() if isinstance(value, Absent)}
    assert absent == dict.fromkeys(
        ("carrier", "speed", "duplex", "half_duplex"), Absent(status="unsupported", reason="the interface is down")
    )


def test_missing_statistic_is_an_error(root: Path) -> None:
    changes = changed(root, lambda root: (links.interface(root, NIC) / "statistics/rx_errors").unlink())
    assert {key: getattr(value, "status", "") for key, value in changes.items()} == {("rx_errors", SCOPE): "error"}


@pytest.mark.parametrize(("text", "rate"), [("400000", 50e9), ("1000", 125e6), ("10", 1.25e6)])
def test_speed_is_in_bytes_per_second(text: str, rate: float) -> None:
    assert parse_speed(text) == rate


@pytest.mark.parametrize("text", ["-1", "0"])
def test_unknown_speed_is_unsupported(text: str) -> None:
    assert getattr(parse_speed(text), "status", "") == "unsupported"


# ---- excluded interfaces ----


@pytest.mark.parametrize("name", ["p0", "p1", "p0s1", "l1p2", "sfp0", "n0", "swp1s0", ""])
def test_uplink_of_a_switch_in_the_nic_is_a_nic(root: Path, name: str) -> None:
    healthy = readings(root)
    write(root, phys_port_name=name)
    assert readings(root) == healthy


@pytest.mark.parametrize("name", ["pf0vf3", "pf1sf88", "c1pf0vf3", "c1pf0sf1", "c1pf0", "pf0", "p0pf0vf1", "pf0vf-1"])
def test_representor_is_omitted(root: Path, name: str) -> None:
    write(root, phys_port_name=name)
    observed = readings(root)
    assert observed["nic_count", "host"] == 1
    assert [key for key in observed if key[1] == SCOPE] == []


@pytest.mark.parametrize("name", ["on USB", "a virtual function", "InfiniBand"])
def test_interface_of_another_kind_is_omitted(root: Path, name: str) -> None:
    device = links.pci(root, links.PLAIN_NIC)
    if name == "on USB":
        (device / "subsystem").unlink()
        (device / "subsystem").symlink_to("../../../bus/usb")
    elif name == "a virtual function":
        (device / "physfn").symlink_to("..")
    else:
        write(root, type="32")
    observed = readings(root)
    assert observed["nic_count", "host"] == 1
    assert [key for key in observed if key[1] == SCOPE] == []


# ---- bonds and other machines ----


@pytest.mark.parametrize(("state", "up"), [("up", 2), ("down", 1)])
def test_bond_counts_its_active_interfaces(root: Path, state: str, up: int) -> None:
    links.add_bond(root, "bond0", {links.ROCE_INTERFACE: "up", NIC: state})
    observed = readings(root)
    assert {name: value for (name, location), value in observed.items() if location == "nic=bond0"} == {
        "bond.slave_count": 2,
        "bond.slaves_up": up,
    }
    assert members(observed, "bond0") == {links.ROCE_INTERFACE: True, NIC: state == "up"}


def members(observed: dict[tuple[str, str], object], bond: str) -> dict[str, object]:
    """Return member -> its reading `network.bond.member_up`."""
    start = f"nic={bond},member="
    return {
        location.removeprefix(start): value for (_, location), value in observed.items() if location.startswith(start)
    }


@pytest.mark.parametrize("state", ["up", "down", "going down", "going back"])
@pytest.mark.parametrize(
    "mode",
    ["balance-rr 0", "active-backup 1", "balance-xor 2", "broadcast 3", "802.3ad 4", "balance-tlb 5", "balance-alb 6"],
)
def test_member_of_a_bond_is_up_only_if_its_mii_status_is_up(root: Path, mode: str, state: str) -> None:
    links.add_bond(root, "bond0", {links.ROCE_INTERFACE: "up", NIC: state})
    links.write(root, "sys/class/net/bond0/bonding/mode", f"{mode}\n")
    assert members(readings(root), "bond0") == {links.ROCE_INTERFACE: True, NIC: state == "up"}


@pytest.mark.parametrize(("mode", "aggregators", "is_up"), [
    ("802.3ad 4", (1, 1), True), ("802.3ad 4", (1, 2), False), ("active-backup 1", (1, 2), True),
])  # fmt: skip
def test_member_outside_the_active_aggregator_is_down_only_in_lacp_mode(
    root: Path, mode: str, aggregators: tuple[int, int], is_up: bool
) -> None:
    links.add_bond(root, "bond0", {links.ROCE_INTERFACE: "up", NIC: "up"})
    links.write(root, "sys/class/net/bond0/bonding/mode", f"{mode}\n")
    links.write(root, "sys/class/net/bond0/bonding/ad_aggregator", "1\n")
    for slave, aggregator in zip((links.ROCE_INTERFACE, NIC), aggregators, strict=True):
        links.write(root, f"sys/class/net/{slave}/bonding_slave/ad_aggregator_id", f"{aggregator}\n")
    assert members(readings(root), "bond0") == {links.ROCE_INTERFACE: True, NIC: is_up}


PROC_BOND = """Ethernet Channel Bonding Driver: v6.8.0

Bonding Mode: {mode}
MII Status: up
MII Polling Interval (ms): 100
{active}
Slave Interface: eth1
MII Status: up
Speed: 25000 Mbps
Duplex: full
Link Failure Count: 0
Aggregator ID: 1

Slave Interface: eth2
MII Status: {state}
Speed: Unknown
Duplex: Unknown
Link Failure Count: 1
Aggregator ID: {aggregator}
"""


@pytest.mark.parametrize(
    ("mode", "active", "state", "aggregator", "is_up"),
    [
        ("fault-tolerance (active-backup)", "", "up", 1, True),
        ("fault-tolerance (active-backup)", "", "down", 1, False),
        ("IEEE 802.3ad Dynamic link aggregation", "Active Aggregator Info:\n\tAggregator ID: 1\n", "up", 1, True),
        ("IEEE 802.3ad Dynamic link aggregation", "Active Aggregator Info:\n\tAggregator ID: 1\n", "up", 2, False),
        ("IEEE 802.3ad Dynamic link aggregation", "", "going back", 1, False),
    ],
)
def test_member_of_a_bond_is_read_from_proc(
    root: Path, mode: str, active: str, state: str, aggregator: int, is_up: bool
) -> None:
    text = PROC_BOND.format(mode=mode, active=active, state=state, aggregator=aggregator)
    links.write(root, "proc/net/bonding/bond7", text)
    assert members(readings(root), "bond7") == {"eth1": True, "eth2": is_up}


def test_member_is_down_if_either_sys_or_proc_reports_it_as_down(root: Path) -> None:
    links.add_bond(root, "bond0", {links.ROCE_INTERFACE: "up", NIC: "up"})
    text = PROC_BOND.format(mode="x", active="", state="down", aggregator=1)
    links.write(root, "proc/net/bonding/bond0", text.replace("eth1", links.ROCE_INTERFACE).replace("eth2", NIC))
    assert members(readings(root), "bond0") == {links.ROCE_INTERFACE: True, NIC: False}


ADDRESSES = ("b8:3f:d2:00:00:a2", "b8:3f:d2:00:00:a3")


@pytest.mark.parametrize("bond_address", [*ADDRESSES, "02:00:00:00:00:01"])
def test_member_of_a_bond_reports_its_permanent_address(root: Path, bond_address: str) -> None:
    """In /sys, bonding gives all members the address of the bond."""
    members_of_bond = (links.ROCE_INTERFACE, NIC)
    links.add_bond(root, "bond0", dict.fromkeys(members_of_bond, "up"))
    for member in members_of_bond:
        (links.interface(root, member) / "address").write_text(f"{bond_address}\n")
    shared = readings(root)
    assert [shared["address", f"nic={member}"] for member in members_of_bond] == [bond_address] * 2
    text = PROC_BOND.format(mode="IEEE 802.3ad Dynamic link aggregation", active="", state="up", aggregator=1)
    for name, member, address in zip(("eth1", "eth2"), members_of_bond, ADDRESSES, strict=True):
        head, tail = text.split(f"Slave Interface: {name}\n")
        tail = tail.replace("\nAggregator ID", f"\nPermanent HW addr: {address}\nSlave queue ID: 0\nAggregator ID", 1)
        text = f"{head}Slave Interface: {member}\n{tail}"
    links.write(root, "proc/net/bonding/bond0", text)
    own = readings(root)
    assert [own["address", f"nic={member}"] for member in members_of_bond] == list(ADDRESSES)
    assert {key for key in own if own[key] != shared[key]} <= {
        ("address", f"nic={member}") for member in members_of_bond
    }


def add_master(root: Path, name: str, kind: str = "") -> None:
    """Add an interface that has two members but is no bond.

    `kind` is the DEVTYPE line of the interface's uevent file; empty: the file has no such line, as with a team.
    """
    links.write(root, f"sys/devices/virtual/net/{name}/type", "1\n")
    links.write(root, f"sys/devices/virtual/net/{name}/uevent", f"{kind}INTERFACE={name}\nIFINDEX=7\n")
    (root / "sys/class/net" / name).symlink_to(f"../../devices/virtual/net/{name}")
    for member in (links.ROCE_INTERFACE, NIC):
        (root / "sys/class/net" / name / f"lower_{member}").symlink_to(f"../../../class/net/{member}")
        interface = links.interface(root, member).resolve()
        (interface / "master").symlink_to(os.path.relpath(root.resolve() / "sys/devices/virtual/net" / name, interface))


@pytest.mark.parametrize("carrier", ["1", "0"])
def test_member_of_a_team_is_up_if_it_has_a_carrier(root: Path, carrier: str) -> None:
    add_master(root, "team0")
    write(root, carrier=carrier)
    assert members(readings(root), "team0") == {links.ROCE_INTERFACE: True, NIC: carrier == "1"}


@pytest.mark.parametrize(("name", "kind"), [("br0", "DEVTYPE=bridge\n"), ("vrf0", "DEVTYPE=vrf\n"), ("ovs-system", "")])
def test_interfaces_of_a_bridge_vrf_or_open_vswitch_have_no_member_readings(root: Path, name: str, kind: str) -> None:
    add_master(root, name, kind)
    write(root, carrier="0")
    assert members(readings(root), name) == {}


def test_virtio_nic_has_driver_and_pci_address_but_no_speed(root: Path) -> None:
    nic = links.interface(root, NIC).resolve()
    virtio = nic.parents[1] / "virtio0"
    (virtio / "net").mkdir(parents=True)
    nic.rename(virtio / "net" / NIC)
    links.interface(root, NIC).unlink()
    links.interface(root, NIC).symlink_to(Path("../..") / (virtio / "net" / NIC).relative_to(root / "sys"))
    (virtio / "subsystem").symlink_to("../../../bus/virtio")
    (virtio / "driver").symlink_to("../../../bus/virtio/drivers/virtio_net")
    write(root, duplex="unknown", speed=-1)
    observed = readings(root)
    assert (observed["driver", SCOPE], observed["pci_address", SCOPE]) == ("virtio_net", links.PLAIN_NIC)
    assert {name for (name, _), value in observed.items() if isinstance(value, Absent)} == {
        "speed",
        "duplex",
        "half_duplex",
    }


def test_host_without_interfaces_has_no_nics(tmp_path: Path) -> None:
    (tmp_path / "sys/devices").mkdir(parents=True)
    assert readings(tmp_path) == {("nic_count", "host"): 0}


def test_number_of_nics_is_an_error_if_sys_is_not_mounted(tmp_path: Path) -> None:
    assert readings(tmp_path) == {("nic_count", "host"): Absent.error("/sys/class/net: /sys is not mounted")}


def test_local_machine_has_no_errors() -> None:
    observed = readings(Path("/"))
    assert [value for value in observed.values() if isinstance(value, Absent) and value.status == "error"] == []
