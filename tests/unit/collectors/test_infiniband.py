"""Test that the InfiniBand collector reads the /sys of hosts with InfiniBand, RoCE, Soft-RoCE and EFA ports."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from agent.benchmarks.links.rdma_ports import fabric_ports
from collectors.base import Absent, Value, scope
from collectors.infiniband import HARDWARE, InfinibandCollector, parse_rate, parse_state
from tests.fakes import links

Readings = dict[tuple[str, str], Value | Absent]
HCA, SCOPE = links.IB[1], f"hca={links.IB[1]},port=1"
ROCE = f"hca={links.ROCE},port=1"


def readings(root: Path, *, full_snapshot: bool = True) -> Readings:
    """Return (name without `infiniband.`, scope) -> the reading."""
    return {
        (family.name.removeprefix("infiniband."), scope(labels)): value
        for family in InfinibandCollector(root, full_snapshot=full_snapshot).collect()
        for labels, value in family.readings
    }


def changed(root: Path, fault: Callable[[Path], None]) -> Readings:
    """Call `fault`, which changes files under `root`. Return the readings that differ afterwards, with their new values."""
    before = readings(root)
    fault(root)
    after = readings(root)
    assert before.keys() == after.keys()
    return {key: value for key, value in after.items() if value != before[key]}


def write(root: Path, **files: str) -> None:
    """Write files in the directory of HCA's port. `files`: name of the file -> its text."""
    for name, text in files.items():
        (links.port(root, HCA) / name).write_text(f"{text}\n")


@pytest.fixture
def root() -> Iterator[Path]:
    """Yield a tree with two InfiniBand ports and one RoCE port."""
    with links.temporary_tree(gpus=2) as root:
        yield root


def test_healthy_port_and_adapter_report_all_readings(root: Path) -> None:
    observed = {name: value for (name, location), value in readings(root).items() if location in (SCOPE, f"hca={HCA}")}
    counters = {name.lower() for name in (*links.ERRORS, *links.HARDWARE)} - {"port_rcv_switch_relay_errors"}
    assert observed == {
        "hca.firmware_version": "28.39.1002",
        "hca.board_id": "MT_0000000838",
        "hca.type": "MT4129",
        "hca.node_guid": "a088:c203:0012:3401",
        "hca.pci_address": links.HCAS[1],
        "hca.numa_node": 0,
        "link_layer": "InfiniBand",
        "state": "ACTIVE",
        "phys_state": "LinkUp",
        "active": True,
        "unmanaged": False,
        "rate": 50e9,
        "width": 4,
        "narrowed": False,
        "lid": 18,
        "sm_lid": 1,
        "port_rcv_data": 4000,
        "port_xmit_data": 8000,
        **dict.fromkeys(counters, 0),
    }


def test_roce_port_reports_its_interface(root: Path) -> None:
    observed = {name: value for (name, location), value in readings(root).items() if location == ROCE}
    reported = ("link_layer", "interface", "roce_v2", "rate", "active", "unmanaged", "narrowed", "lid")
    assert {name: observed[name] for name in reported} == {
        "link_layer": "Ethernet",
        "interface": links.ROCE_INTERFACE,
        "roce_v2": True,
        "rate": 12.5e9,
        "active": True,
        "unmanaged": False,
        "narrowed": False,
        "lid": 0,
    }


def test_every_port_reports_all_readings() -> None:
    with links.temporary_tree() as root:
        observed = readings(root)
    assert observed["port_count", "host"] == 9
    assert {location for name, location in observed if name == "state"} == {
        f"hca={hca},port=1" for hca in (*links.IB, links.ROCE)
    }
    assert [key for key, value in observed.items() if isinstance(value, Absent)] == []


def test_scrape_omits_lids_and_roce_interfaces(root: Path) -> None:
    scrape, snapshot = readings(root, full_snapshot=False), readings(root)
    assert {name for name, _ in snapshot.keys() - scrape.keys()} == {"lid", "sm_lid", "interface", "roce_v2"}


# ---- states ----


@pytest.mark.parametrize("state", ["2: INIT", "3: ARMED"])
def test_port_without_a_subnet_manager_is_unmanaged(root: Path, state: str) -> None:
    changes = changed(root, lambda root: write(root, state=state))
    assert changes == {("state", SCOPE): state[3:], ("active", SCOPE): False, ("unmanaged", SCOPE): True}


@pytest.mark.parametrize(("state", "physical"), [("1: DOWN", "2: Polling"), ("1: DOWN", "3: Disabled")])
def test_port_without_a_link_has_no_rate_and_no_error(root: Path, state: str, physical: str) -> None:
    changes = changed(root, lambda root: write(root, state=state, phys_state=physical, rate="2.5 Gb/sec (1X SDR)"))
    reported = {name: value for (name, _), value in changes.items() if not isinstance(value, Absent)}
    assert reported == {"state": "DOWN", "phys_state": physical[3:], "active": False}
    absent = {name: value.status for (name, _), value in changes.items() if isinstance(value, Absent)}
    assert absent == dict.fromkeys(("rate", "width", "narrowed"), "unsupported")


def test_missing_state_is_an_error_in_every_dependent_reading(root: Path) -> None:
    changes = changed(root, lambda root: (links.port(root, HCA) / "state").unlink())
    assert {name for name, _ in changes} == {"state", "active", "unmanaged"}
    assert {getattr(value, "status", "") for value in changes.values()} == {"error"}


@pytest.mark.parametrize("text", ["", "ACTIVE", "x: ACTIVE"])
def test_invalid_state_is_an_error(text: str) -> None:
    with pytest.raises(ValueError, match="not a port state"):
        parse_state(text)


# ---- rate and width ----


def test_port_with_one_of_four_lanes_is_narrowed(root: Path) -> None:
    changes = changed(root, lambda root: write(root, rate="100 Gb/sec (1X NDR)"))
    assert changes == {("rate", SCOPE): 12.5e9, ("width", SCOPE): 1, ("narrowed", SCOPE): True}


def test_port_with_two_lanes_of_a_splitter_cable_is_not_narrowed(root: Path) -> None:
    changes = changed(root, lambda root: write(root, rate="200 Gb/sec (2X NDR)"))
    assert changes == {("rate", SCOPE): 25e9, ("width", SCOPE): 2}


def test_ethernet_port_is_never_narrowed(root: Path) -> None:
    (links.port(root, links.ROCE) / "rate").write_text("25 Gb/sec (1X EDR)\n")
    observed = readings(root)
    assert (observed["width", ROCE], observed["narrowed", ROCE]) == (1, False)


@pytest.mark.parametrize(
    ("text", "rate", "width"),
    [("2.5 Gb/sec (1X SDR)", 2.5e9 / 8, 1), ("56 Gb/sec (4X FDR)", 7e9, 4), ("800 Gb/sec (4X XDR)", 100e9, 4)],
)
def test_rate_is_in_bytes_per_second(text: str, rate: float, width: int) -> None:
    assert parse_rate(text) == (rate, width)


def test_rate_is_read_without_a_width() -> None:
    rate, width = parse_rate("100 Gb/sec")
    assert rate == 12.5e9
    assert getattr(width, "status", "") == "unsupported"


@pytest.mark.parametrize("text", ["", "fast", "400 Gb/sec (4X NDR) and more"])
def test_invalid_rate_is_an_error(text: str) -> None:
    assert {getattr(value, "status", "") for value in parse_rate(text)} == {"error"}


# ---- counters ----


@pytest.mark.parametrize("name", ["symbol_error", "link_downed", "VL15_dropped", "out_of_sequence", "np_cnp_sent"])
def test_raised_counter_changes_only_its_reading(root: Path, name: str) -> None:
    assert changed(root, lambda root: links.set_counter(root, HCA, name, 3)) == {(name.lower(), SCOPE): 3}


@pytest.mark.parametrize(
    ("file", "name"),
    [
        ("seq_err_naks_rcvd", "packet_seq_err"), ("oos_drop_count", "out_of_sequence"), ("rnr_naks_rcvd", "rnr_nak_retry_err"),
        ("to_retransmits", "local_ack_timeout_err"), ("tx_cnp_pkts", "np_cnp_sent"), ("rx_cnp_pkts", "rp_cnp_handled"),
        ("cnpSent", "np_cnp_sent"), ("cnpHandled", "rp_cnp_handled"),
    ],
)  # fmt: skip
def test_counter_of_another_driver_has_the_name_of_that_of_mlx5(root: Path, file: str, name: str) -> None:
    counters = links.port(root, HCA) / "hw_counters"
    shutil.rmtree(counters)
    links.write(counters, file, "5\n")
    values = {key: value for key, value in readings(root).items() if key[1] == SCOPE and key[0] in HARDWARE}
    assert values.pop((name, SCOPE)) == 5
    assert {getattr(value, "status", "") for value in values.values()} == {"unsupported"}


def test_data_counters_are_converted_to_bytes(root: Path) -> None:
    changes = changed(root, lambda root: links.set_counter(root, HCA, "port_rcv_data", 1 << 40))
    assert changes == {("port_rcv_data", SCOPE): 4 << 40}


@pytest.mark.parametrize(
    ("name", "maximum"),
    [("symbol_error", 65535), ("link_downed", 255), ("local_link_integrity_errors", 15), ("port_xmit_wait", 2**32 - 1)],
)
def test_saturated_counter_is_an_error(root: Path, name: str, maximum: int) -> None:
    assert changed(root, lambda root: links.set_counter(root, HCA, name, maximum - 1)) == {(name, SCOPE): maximum - 1}
    changes = changed(root, lambda root: links.set_counter(root, HCA, name, maximum))
    assert getattr(changes.pop((name, SCOPE)), "status", "") == "error"
    assert changes == {}


@pytest.mark.parametrize("text", [None, "N/A (no PMA)"])
def test_counter_without_a_value_is_unsupported(root: Path, text: str | None) -> None:
    counter = links.port(root, HCA) / "counters/symbol_error"

    def remove_value(_: Path) -> None:
        counter.unlink() if text is None else counter.write_text(f"{text}\n")

    changes = changed(root, remove_value)
    assert {key: getattr(value, "status", "") for key, value in changes.items()} == {
        ("symbol_error", SCOPE): "unsupported"
    }


def test_counters_are_marked_as_counters(root: Path) -> None:
    families = list(InfinibandCollector(root, full_snapshot=True).collect())
    counting = {family.name.removeprefix("infiniband.") for family in families if family.counter}
    expected = {name.lower() for name in (*links.ERRORS, *links.HARDWARE)} - {"port_rcv_switch_relay_errors"}
    assert counting == expected | {"port_rcv_data", "port_xmit_data"}


# ---- other machines ----


def test_host_without_adapters_has_no_ports(tmp_path: Path) -> None:
    assert readings(tmp_path) == {("port_count", "host"): 0}


def test_missing_adapter_has_no_readings(root: Path) -> None:
    (root / "sys/class/infiniband" / HCA).unlink()
    observed = readings(root)
    assert observed["port_count", "host"] == 2
    assert [key for key in observed if HCA in key[1]] == []


@pytest.mark.parametrize("interface", ["docker0", "lo", "gone0", ""])
def test_virtual_functions_and_soft_roce_without_a_nic_are_excluded(interface: str, root: Path) -> None:
    links.write(root, "sys/class/infiniband/rxe0/ports/1/state", "4: ACTIVE\n")
    if interface:
        links.write(root, "sys/class/infiniband/rxe0/parent", f"{interface}\n")
    (links.pci(root, links.HCAS[0]) / "physfn").symlink_to("..")
    observed = readings(root)
    assert observed["port_count", "host"] == 2
    assert [key for key in observed if "rxe0" in key[1] or links.IB[0] in key[1]] == []


UP, DOWN = ("4: ACTIVE", "5: LinkUp"), ("1: DOWN", "3: Disabled")


@pytest.mark.parametrize(
    ("others", "uplinks"),
    [
        ({2: ("pf0vf0", UP), 3: ("pf0vf1", DOWN), 4: (None, DOWN)}, ["1"]),
        ({2: (None, DOWN), 3: ("p1", UP)}, ["1", "3"]),
        ({1: ("c1pf0", UP), 2: ("pf0sf0", UP), 3: ("p0", UP)}, ["3"]),
        ({2: ("p1", DOWN)}, ["1", "2"]),
        ({1: (None, DOWN), 2: (None, DOWN)}, ["1", "2"]),
    ],
    ids=["vf", "two-uplinks", "uplink-last", "two-ports-of-one-adapter", "no-interface"],
)
def test_ports_of_representors_are_left_out(
    root: Path, others: dict[int, tuple[str | None, tuple[str, str]]], uplinks: list[str]
) -> None:
    for number, (phys_port_name, state) in others.items():
        links.add_roce_port(root, number, phys_port_name, state)
    observed = readings(root)
    of_adapter = {location for _, location in observed if location.startswith(f"hca={links.ROCE},")}
    assert of_adapter == {f"hca={links.ROCE},port={number}" for number in uplinks}
    assert observed["port_count", "host"] == 2 + len(uplinks)
    links.write(root, f"sys/class/infiniband/{links.ROCE}/node_type", "1: CA\n")
    measured = [port for port in fabric_ports(True, root) if port.hca == links.ROCE]
    assert [str(port.number) for port in measured] == uplinks


@pytest.mark.parametrize("verbs", [(HCA,), (HCA, "smi1"), ()], ids=["smi-device", "two-adapters", "no-verbs"])
def test_adapter_without_a_verbs_device_is_excluded_if_another_adapter_of_its_function_has_one(
    verbs: tuple[str, ...], root: Path
) -> None:
    healthy = readings(root)
    smi = links._infiniband(root, "smi1", links.HCAS[1], 1)  # four planes, as `rdma dev add smi1 type SMI` creates them
    links.write(smi, "ports/1/rate", "200 Gb/sec (1X XDR)\n")
    for plane in range(2, 5):
        shutil.copytree(smi / "ports/1", smi / f"ports/{plane}")
    for number, name in enumerate(verbs):
        links.write(root, f"sys/class/infiniband_verbs/uverbs{number}/ibdev", f"{name}\n")
    links.write(root, "sys/class/infiniband_verbs/abi_version", "6\n")
    observed = readings(root)
    if verbs == (HCA,):
        assert observed == healthy
    else:
        assert observed["port_count", "host"] == 7


@pytest.mark.parametrize("state", [("4: ACTIVE", "5: LinkUp"), ("1: DOWN", "3: Disabled")])
def test_soft_roce_on_a_nic_is_read_with_and_without_a_link(state: tuple[str, str], root: Path) -> None:
    adapter = "sys/devices/virtual/infiniband/rxe0"
    files = {"state": state[0], "phys_state": state[1], "link_layer": "Ethernet", "rate": "2.5 Gb/sec (1X SDR)"}
    for name, text in files.items():
        links.write(root, f"{adapter}/ports/1/{name}", f"{text}\n")
    links.write(root, f"{adapter}/parent", f"{links.PLAIN_INTERFACE}\n")
    (root / "sys/class/infiniband/rxe0").symlink_to(f"../../../{adapter}")
    links.write(root, f"{adapter}/ports/1/gid_attrs/ndevs/0", f"{links.PLAIN_INTERFACE}\n")
    observed = {name: value for (name, location), value in readings(root).items() if location == "hca=rxe0,port=1"}
    is_up = state[0] == "4: ACTIVE"
    assert (observed["state"], observed["active"]) == (state[0][3:], is_up)
    assert observed["interface"] == links.PLAIN_INTERFACE
    assert observed["rate"] == (2.5e9 / 8 if is_up else Absent.unsupported("the port has no link"))
    assert readings(root)["hca.pci_address", "hca=rxe0"] == Absent.unsupported("not on a PCI bus")


def test_adapter_without_ports_keeps_its_own_readings(root: Path) -> None:
    shutil.rmtree(links.port(root, HCA).parent)
    observed = readings(root)
    assert observed["port_count", "host"] == 2
    assert observed["hca.type", f"hca={HCA}"] == "MT4129"


def test_only_an_efa_adapter_reports_efa_counters(root: Path) -> None:
    links.add_efa(root)
    efa = {key: value for key, value in readings(root).items() if key[0].startswith("efa.")}
    expected = {**links.EFA_COUNTERS, "cmds_err": 0}
    del expected["keep_alive_rcvd"]  # the collector does not read this counter
    assert efa == {(f"efa.{name}", f"hca={links.EFA},port=1"): value for name, value in expected.items()}
    assert {name for name, _ in readings(root, full_snapshot=False)} >= {name for name, _ in efa}


def test_efa_counters_are_read_in_the_directory_of_the_adapter_if_the_port_has_none(root: Path) -> None:
    links.add_efa(root)
    adapter = root / "sys/class/infiniband" / links.EFA
    shutil.copytree(adapter / "ports/1/hw_counters", adapter / "hw_counters", dirs_exist_ok=True)
    shutil.rmtree(adapter / "ports/1/hw_counters")
    efa = readings(root)
    assert efa["efa.retrans_pkts", f"hca={links.EFA},port=1"] == 3321
    (adapter / "hw_counters/retrans_pkts").unlink()
    missing = readings(root)["efa.retrans_pkts", f"hca={links.EFA},port=1"]
    assert isinstance(missing, Absent)
    assert missing.status == "unsupported"


def test_refused_counter_is_read_again_after_an_hour(root: Path) -> None:
    """The kernel logs each refusal: reading the counter in every scrape would fill the kernel log."""
    now = 1000.0
    collector = InfinibandCollector(root, clock=lambda: now)

    def symbol_errors() -> Value | Absent:
        (family,) = (family for family in collector.collect() if family.name == "infiniband.symbol_error")
        return {scope(labels): value for labels, value in family.readings}[SCOPE]

    counter = links.port(root, HCA) / "counters" / "symbol_error"
    counter.unlink()
    counter.symlink_to("/sys/class/net/lo/speed")  # the kernel answers with EINVAL
    refused = Absent.unsupported("the adapter does not allow this counter to be read")
    assert symbol_errors() == refused
    counter.unlink()
    counter.write_text("7\n")
    now += 3599.0
    assert symbol_errors() == refused, "the counter must not be read again within an hour"
    now += 2.0
    assert symbol_errors() == 7
    counter.unlink()
    assert symbol_errors() == Absent.unsupported("the adapter has no such counter")
    counter.write_text("8\n")
    assert symbol_errors() == 8, "a counter whose file was missing must be read at once when the file appears"
