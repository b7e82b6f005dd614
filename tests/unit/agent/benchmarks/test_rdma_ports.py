"""Test which RDMA ports of a host are measured, and the choice of their GID, their partner port and the nearest GPU."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from agent.benchmarks.links.nccl_rdma import nccl_rdma
from agent.benchmarks.links.rdma_ports import RdmaPort, fabric_ports, nearest_gpu, partner_port

IPV4, IPV6 = "0000:0000:0000:0000:0000:ffff:0a00:0001", "fd00:0000:0000:0000:0000:0000:0000:0001"
LOCAL, FREE = "fe80:0000:0000:0000:5054:00ff:fe29:0100", "0000:0000:0000:0000:0000:0000:0000:0000"
"""GIDs as sysfs writes them. LOCAL is a link-local address; FREE is an unused entry of the port's GID table."""
GIDS = [(LOCAL, "IB/RoCE v1"), (LOCAL, "RoCE v2"), (IPV4, "IB/RoCE v1"), (IPV4, "RoCE v2")]


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"{text}\n")


def add_adapter(
    root: Path, hca: str, bus: str, *, layer: str = "InfiniBand", rate: str = "400 Gb/sec (4X NDR)", state: str = "4: ACTIVE",
    link: str = "5: LinkUp", kind: str = "1: CA", gids: list[tuple[str, str]] = GIDS, virtual: bool = False,
    function: int = 0,
) -> None:  # fmt: skip
    """Write the sysfs files of an adapter with one port. A bridge connects the adapter to the PCI root `bus` (hexadecimal)."""
    device = root / f"sys/devices/pci0000:{bus}/0000:{bus}:01.0/0000:{int(bus, 16) + 1:02x}:00.{function}"
    write(device / "numa_node", "1")
    write(device / "local_cpulist", "0-1,4")
    if virtual:
        (device / "physfn").mkdir()
    adapter = root / "sys/class/infiniband" / hca
    write(adapter / "node_type", kind)
    (adapter / "device").symlink_to(device)
    port = adapter / "ports/1"
    for name, text in {"link_layer": layer, "rate": rate, "state": state, "phys_state": link}.items():
        write(port / name, text)
    for index, (gid, of_type) in enumerate(gids if layer == "Ethernet" else []):
        write(port / f"gids/{index}", gid)
        write(port / f"gid_attrs/types/{index}", of_type)
    if layer == "Ethernet":
        write(port / "gid_attrs/ndevs/0", f"eth-{hca}")


def reasons(root: Path, *, fabric: bool = True) -> dict[str, str]:
    """Return adapter -> why its port is not measured; "" if the port is measured."""
    return {port.hca: port.unusable for port in fabric_ports(fabric, root)}


def test_host_without_adapters_has_no_ports(tmp_path: Path) -> None:
    assert fabric_ports(True, tmp_path) == []


def test_port_has_rail_rate_numa_node_and_path(tmp_path: Path) -> None:
    add_adapter(tmp_path, "mlx5_1", "15")
    add_adapter(tmp_path, "mlx5_0", "35")
    first, second = fabric_ports(False, tmp_path)
    assert (first.hca, first.rail, second.hca, second.rail) == ("mlx5_1", 0, "mlx5_0", 1), (
        "rails must be numbered in the order of the PCI slots"
    )
    assert (first.rate, first.numa_node, first.cpus, first.unusable) == (5e10, "1", (0, 1, 4), "")
    assert (first.pci_path, first.slot) == ("pci0000:15/0000:15:01.0/0000:16:00.0", "0000:16:00.0/1")
    assert (first.scope, first.gid_type) == ("hca=mlx5_1,port=1", "IB")


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"state": "1: DOWN", "link": "3: Disabled"}, "no link"),
        ({"state": "2: INIT"}, "no subnet manager"),
        ({"state": ""}, "the state of the port cannot be read"),
        ({"link": ""}, "the state of the port cannot be read"),
        ({"rate": "100 Gb/sec (4X EDR)"}, "less than half"),
        ({"layer": "Ethernet"}, "it is Ethernet"),
        ({"layer": "Unknown"}, "link layer of the port is Unknown"),
    ],
)
def test_reason_is_given_for_a_port_that_is_not_measured(tmp_path: Path, change: dict[str, str], reason: str) -> None:
    add_adapter(tmp_path, "mlx5_0", "15")
    add_adapter(tmp_path, "mlx5_1", "35", **change)  # type: ignore[arg-type]
    result = reasons(tmp_path)
    assert result["mlx5_0"] == ""
    assert reason in result["mlx5_1"]


@pytest.mark.parametrize(
    ("file", "problem"),
    [("present", ""), ("missing", "No such file or directory"), ("denied", "Permission denied"), ("unknown", "")],
)
def test_port_whose_device_file_cannot_be_opened_is_measured_and_has_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, file: str, problem: str
) -> None:
    add_adapter(tmp_path, "mlx5_0", "15")
    add_adapter(tmp_path, "mlx5_1", "35")
    devices = tmp_path / "dev/infiniband"
    write(devices / "uverbs1", "")
    write(tmp_path / "sys/class/infiniband_verbs/uverbs1/ibdev", "mlx5_1")
    if file != "unknown":
        write(tmp_path / "sys/class/infiniband_verbs/uverbs0/ibdev", "mlx5_0")
    if file in ("present", "denied"):
        write(devices / "uverbs0", "")
    if file == "denied":  # root may open the file, whatever its mode is
        really_open = os.open

        def deny(path: Path, flags: int) -> int:
            if path.name == "uverbs0":
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
            return really_open(path, flags)

        monkeypatch.setattr(os, "open", deny)
    first, second = fabric_ports(True, tmp_path)
    assert (first.unusable, second.unusable, second.device_problem) == ("", "", "")
    if problem:
        assert (
            f"/dev/infiniband/uverbs0, the device file of mlx5_0, cannot be opened: {problem}" in first.device_problem
        )
        assert "docs/container.md" in first.device_problem
    else:
        assert first.device_problem == ""


def test_port_at_half_rate_is_measured(tmp_path: Path) -> None:
    add_adapter(tmp_path, "mlx5_0", "15")
    add_adapter(tmp_path, "mlx5_1", "35", rate="200 Gb/sec (2X NDR)")
    assert reasons(tmp_path) == {"mlx5_0": "", "mlx5_1": ""}


def test_virtual_function_is_left_out(tmp_path: Path) -> None:
    add_adapter(tmp_path, "mlx5_0", "15", virtual=True)
    assert fabric_ports(True, tmp_path) == []


def test_smi_device_is_left_out(tmp_path: Path) -> None:
    add_adapter(tmp_path, "mlx5_0", "15", rate="800 Gb/sec (4X XDR)")
    shutil.copytree(tmp_path / "sys/class/infiniband/mlx5_0", tmp_path / "sys/class/infiniband/smi0", symlinks=True)
    write(tmp_path / "sys/class/infiniband_verbs/uverbs0/ibdev", "mlx5_0")
    assert list(reasons(tmp_path)) == ["mlx5_0"]


@pytest.mark.parametrize("kind", ["4: RNIC", "7: unspecified"])
def test_device_that_is_no_channel_adapter_is_not_measured_and_does_not_shift_the_rails(
    tmp_path: Path, kind: str
) -> None:
    add_adapter(tmp_path, "efa_0", "05", kind=kind, layer="Ethernet", rate="800 Gb/sec (8X NDR)")
    add_adapter(tmp_path, "mlx5_0", "15")
    first, second = fabric_ports(True, tmp_path)
    assert (first.hca, first.rail, first.unusable) == ("mlx5_0", 0, "")
    assert kind in second.unusable


def test_roce_port_is_measured_only_if_the_inventory_states_a_fabric(tmp_path: Path) -> None:
    add_adapter(tmp_path, "mlx5_0", "15", layer="Ethernet")
    assert reasons(tmp_path) == {"mlx5_0": ""}
    assert "rackproof_fabric_gbps" in reasons(tmp_path, fabric=False)["mlx5_0"]


VLAN, VLAN_IPV6 = "0000:0000:0000:0000:0000:ffff:0a64:0001", "fd64:0000:0000:0000:0000:0000:0000:0001"
"""GIDs of a VLAN interface."""
UNTAGGED_ONLY_LOCAL = [(LOCAL, "IB/RoCE v1"), (LOCAL, "RoCE v2")]
ON_VLAN = [*UNTAGGED_ONLY_LOCAL, (LOCAL, "IB/RoCE v1"), (LOCAL, "RoCE v2"), (VLAN, "IB/RoCE v1"), (VLAN, "RoCE v2")]


@pytest.mark.parametrize(
    ("gids", "environment", "expected"),
    [
        (GIDS, {}, (3, "RoCE v2 IPv4")),
        ([(FREE, "RoCE v2"), (LOCAL, "RoCE v2"), (IPV6, "RoCE v2")], {}, (2, "RoCE v2 IPv6")),
        ([(LOCAL, "RoCE v2")], {}, (0, "RoCE v2 link-local")),
        ([(IPV4, "RoCE v2"), (IPV4, "RoCE v2")], {}, (0, "RoCE v2 IPv4")),
        ([(IPV4, "IB/RoCE v1"), (FREE, "RoCE v2")], {}, (-1, "")),
        ([("", "RoCE v2"), ("10.0.0.1", "RoCE v2")], {}, (-1, "")),
        ([], {}, (-1, "")),
        (ON_VLAN, {}, (5, "RoCE v2 IPv4")),
        ([(LOCAL, "RoCE v2"), (VLAN, "RoCE v2"), (LOCAL, "RoCE v2")], {}, (1, "RoCE v2 IPv4")),  # Soft-RoCE, Linux 6.1
        ([*GIDS, (VLAN, "RoCE v2")], {}, (3, "RoCE v2 IPv4")),
        ([(VLAN, "RoCE v2"), (IPV4, "RoCE v2")], {}, (0, "RoCE v2 IPv4")),
        ([*UNTAGGED_ONLY_LOCAL, (VLAN_IPV6, "RoCE v2")], {}, (2, "RoCE v2 IPv6")),
        ([*GIDS, (VLAN, "RoCE v2")], {"NCCL_IB_ADDR_RANGE": "10.100.0.0/16"}, (4, "RoCE v2 IPv4")),
        ([*GIDS, (VLAN, "RoCE v2")], {"NCCL_IB_ADDR_RANGE": "10.100.0.0"}, (3, "RoCE v2 IPv4")),
        ([*GIDS, (VLAN, "RoCE v2")], {"NCCL_IB_ADDR_RANGE": "192.168.0.0/16"}, (-1, "")),
        ([*GIDS, (IPV6, "RoCE v2")], {"NCCL_IB_ADDR_FAMILY": "AF_INET6"}, (4, "RoCE v2 IPv6")),
        (
            [(IPV6, "RoCE v2"), (VLAN_IPV6, "RoCE v2")],
            {"NCCL_IB_ADDR_FAMILY": "AF_INET6", "NCCL_IB_ADDR_RANGE": "fd64::/16"},
            (1, "RoCE v2 IPv6"),
        ),
        (GIDS, {"NCCL_IB_ROCE_VERSION_NUM": "1"}, (2, "RoCE v1 IPv4")),
        ([*GIDS, (VLAN, "RoCE v2")], {"NCCL_IB_GID_INDEX": "4"}, (4, "RoCE v2 IPv4")),
        (GIDS, {"NCCL_IB_GID_INDEX": "0"}, (0, "RoCE v1 link-local")),
        (GIDS, {"NCCL_IB_GID_INDEX": "9"}, (9, "unknown")),
        (GIDS, {"NCCL_IB_GID_INDEX": "-1"}, (3, "RoCE v2 IPv4")),
        (GIDS, {"NCCL_IB_GID_INDEX": ""}, (3, "RoCE v2 IPv4")),
    ],
)
def test_roce_port_is_measured_with_the_gid_of_nccl(
    tmp_path: Path, gids: list[tuple[str, str]], environment: dict[str, str], expected: tuple[int, str]
) -> None:
    add_adapter(tmp_path, "mlx5_0", "15", layer="Ethernet", gids=gids)
    (port,) = fabric_ports(True, tmp_path, nccl=nccl_rdma(environment))
    assert (port.gid_index, port.gid_type) == expected
    assert bool(port.unusable) == (expected[0] < 0)
    if "NCCL_IB_ADDR_RANGE" in environment and port.unusable:
        assert environment["NCCL_IB_ADDR_RANGE"] in port.unusable


@pytest.mark.parametrize(
    ("selection", "measured"),
    [
        ("", {"mlx5_0", "mlx5_1", "mlx5_10"}),
        ("mlx5_1", {"mlx5_1", "mlx5_10"}),
        ("=mlx5_1", {"mlx5_1"}),
        ("^mlx5_1", {"mlx5_0"}),
        ("^=mlx5_1", {"mlx5_0", "mlx5_10"}),
        ("mlx5_0:1,mlx5_10:1", {"mlx5_0", "mlx5_10"}),
        ("mlx5_0:2,mlx5_10", {"mlx5_10"}),
        ("^mlx5_0:2", {"mlx5_0", "mlx5_1", "mlx5_10"}),
        ("=mlx5_0:1:0:0,mlx5_1::0:1", {"mlx5_0", "mlx5_1"}),  # rail and plane follow the port (NCCL 2.29)
        ("^=mlx5_0:2:0,mlx5_1:1:1", {"mlx5_0", "mlx5_10"}),
        (",mlx5_0,:1", {"mlx5_0"}),
    ],
)
def test_only_ports_that_nccl_uses_are_measured(tmp_path: Path, selection: str, measured: set[str]) -> None:
    for hca, bus in (("mlx5_0", "15"), ("mlx5_1", "35"), ("mlx5_10", "55")):
        add_adapter(tmp_path, hca, bus)
    ports = fabric_ports(True, tmp_path, nccl=nccl_rdma({"NCCL_IB_HCA": selection}))
    assert {port.hca for port in ports if not port.unusable} == measured
    assert [port.rail for port in ports] == [0, 1, 2], "the selection must not shift the rails"
    assert all(f"NCCL_IB_HCA is {selection}" in port.unusable for port in ports if port.hca not in measured)


def test_roce_ports_that_nccl_uses_are_measured_beside_infiniband_ports_of_a_storage_network(tmp_path: Path) -> None:
    add_adapter(tmp_path, "mlx5_0", "15", layer="Ethernet", rate="400 Gb/sec (4X NDR)")
    add_adapter(tmp_path, "mlx5_8", "35", rate="800 Gb/sec (4X XDR)")
    assert reasons(tmp_path)["mlx5_0"].endswith("it is Ethernet, and the host has InfiniBand ports")
    first, second = fabric_ports(True, tmp_path, nccl=nccl_rdma({"NCCL_IB_HCA": "^mlx5_8"}))
    assert (first.unusable, bool(second.unusable)) == ("", True)


def test_adapter_whose_name_is_not_valid_in_a_scope_is_left_out(tmp_path: Path) -> None:
    """In a scope such as `hca=mlx5_0,port=1`, a comma separates two labels."""
    add_adapter(tmp_path, "mlx5_0,gpu=0", "15")
    assert fabric_ports(True, tmp_path) == []


def test_reason_is_given_for_a_port_with_invalid_files_in_sysfs(tmp_path: Path) -> None:
    add_adapter(tmp_path, "mlx5_0", "15", rate="\x00fast", link="LinkUp")
    write(tmp_path / "sys/devices/pci0000:15/0000:15:01.0/0000:16:00.0/local_cpulist", "all")
    (port,) = fabric_ports(True, tmp_path)
    assert (port.rate, port.cpus, port.unusable) == (0.0, (), "the port is active, but its rate cannot be read")


def ports(root: Path, *buses: str) -> list[RdmaPort]:
    for number, bus in enumerate(buses):
        add_adapter(root, f"mlx5_{number}", bus)
    return fabric_ports(True, root)


def test_partner_is_the_port_in_the_same_slot(tmp_path: Path) -> None:
    own = ports(tmp_path, "15", "35", "55")
    slots = [port.slot for port in own]
    assert partner_port(own[2], slots, [slots[0], slots[2]]) == slots[2]
    assert partner_port(own[1], slots, [slots[0], slots[2]]) is None, (
        "a missing adapter must not shift the rails of the other adapters"
    )


def test_partner_is_the_port_in_the_same_position_if_the_hosts_use_different_slots(tmp_path: Path) -> None:
    own = ports(tmp_path, "15", "35")
    slots = [port.slot for port in own]
    assert partner_port(own[1], slots, ["0000:a1:00.0/1", "0000:b1:00.0/1"]) == "0000:b1:00.0/1"
    assert partner_port(own[1], slots, ["0000:a1:00.0/1"]) is None


def add_gpu(root: Path, bus: str, minor: int | None, *, node: bool = True) -> str:
    """Add a GPU to sysfs, and return its PCI address.

    `minor`: its number in NVIDIA's driver; None if another driver uses the GPU. `node`: whether it has a device node.
    """
    address = f"0000:{bus}:02.0"
    gpu = root / f"sys/devices/pci0000:{bus}/0000:{bus}:01.0/{address}"
    gpu.mkdir(parents=True)
    (root / "sys/bus/pci/devices").mkdir(parents=True, exist_ok=True)
    (root / f"sys/bus/pci/devices/{address}").symlink_to(gpu)
    if minor is not None:
        write(
            root / f"proc/driver/nvidia/gpus/{address}/information", f"Model: \t\t NVIDIA X\nDevice Minor: \t {minor}\n"
        )
        if node:
            write(root / f"dev/nvidia{minor}", "")
    return address


def test_nearest_gpu_shares_the_most_bridges(tmp_path: Path) -> None:
    (port, *_) = ports(tmp_path, "35")
    far, near = add_gpu(tmp_path, "15", 1), add_gpu(tmp_path, "35", 0)
    assert nearest_gpu(port, (0, 1), tmp_path) == near
    assert nearest_gpu(port, (0,), tmp_path) == far, "a GPU that is not tested must not be chosen"
    assert nearest_gpu(port, (), tmp_path) == ""


@pytest.mark.parametrize("hidden", [{"minor": None}, {"minor": 7, "node": False}], ids=["virtual-machine", "container"])
def test_gpu_that_nvml_does_not_list_has_no_index(tmp_path: Path, hidden: dict[str, Any]) -> None:
    """The GPU nearest to the adapter belongs to a virtual machine or to another container. NVML numbers the others from 0."""
    (port, *_) = ports(tmp_path, "35")
    add_gpu(tmp_path, "35", **hidden)
    first, second = add_gpu(tmp_path, "36", 0), add_gpu(tmp_path, "37", 1)
    assert nearest_gpu(port, (0,), tmp_path) == first
    assert nearest_gpu(port, (1,), tmp_path) == second
