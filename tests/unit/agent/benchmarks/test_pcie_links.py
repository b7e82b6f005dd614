"""Test which data rate the PCIe links between an adapter and the memory of the host or of a GPU allow."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import pytest

from agent.benchmarks.links.pcie_links import allowed_rate, links_above, links_to_gpu
from tests.unit.agent.benchmarks.test_rdma_ports import write

GIGABIT = 1e9 / 8
GEN3, GEN4, GEN5, GEN6 = "8.0 GT/s PCIe", "16.0 GT/s PCIe", "32.0 GT/s PCIe", "64.0 GT/s PCIe"
ROOT, SWITCH = "0000:15:01.0", ("0000:16:00.0", "0000:17:00.0")
ADAPTER, SECOND, GPU = "0000:18:00.0", "0000:18:00.1", "0000:19:00.0"


def add_device(root: Path, path: Sequence[str], speed: str, width: str = "16", vendor: str = "0x15b3") -> Path:
    """Add a PCI device below the bridges that `path` names first; return its directory."""
    device = root.joinpath("sys/devices/pci0000:15", *path)
    current = {"current_link_speed": "2.5 GT/s PCIe", "current_link_width": "1"}
    for name, text in {"max_link_speed": speed, "max_link_width": width, "vendor": vendor, **current}.items():
        write(device / name, text)
    return device


def gigabits(rate: float) -> float:
    return round(rate / GIGABIT, 1)


@pytest.mark.parametrize(
    ("port", "adapter", "width", "expected"),
    [
        (GEN5, GEN6, "16", 453.7),  # ConnectX-8 in a host whose processors have PCIe 5
        (GEN5, GEN5, "16", 453.7),
        (GEN4, GEN5, "16", 226.9),
        (GEN4, GEN4, "8", 113.4),
        (GEN3, GEN4, "16", 113.4),
        ("5.0 GT/s PCIe", GEN4, "16", 57.6),
        ("Unknown", GEN5, "16", math.inf),
        (GEN5, GEN5, "0", math.inf),
        (GEN5, GEN5, "", math.inf),
    ],
)
def test_rate_is_that_of_the_generation_which_both_ends_of_the_link_support(
    tmp_path: Path, port: str, adapter: str, width: str, expected: float
) -> None:
    add_device(tmp_path, [ROOT], port)
    links = links_above(add_device(tmp_path, [ROOT, ADAPTER], adapter, width))
    assert gigabits(allowed_rate(links, [links])) == expected


def test_slot_with_fewer_lanes_than_the_adapter_does_not_lower_the_rate(tmp_path: Path) -> None:
    add_device(tmp_path, [ROOT], GEN5, "8")
    links = links_above(add_device(tmp_path, [ROOT, ADAPTER], GEN5))
    assert gigabits(allowed_rate(links, [links])) == 453.7


def test_slowest_link_between_adapter_and_processor_limits_the_rate(tmp_path: Path) -> None:
    """The step from one port of a PCIe switch to another port of it is no link."""
    add_device(tmp_path, [ROOT], GEN4)
    add_device(tmp_path, [ROOT, SWITCH[0]], GEN5)
    add_device(tmp_path, [ROOT, *SWITCH], GEN5)
    adapter = add_device(tmp_path, [ROOT, *SWITCH, ADAPTER], GEN5)
    links = links_above(adapter)
    assert [upper for upper, _ in links] == [SWITCH[1], ROOT]
    assert gigabits(allowed_rate(links, [links])) == 226.9


def test_ports_that_transfer_at_the_same_time_share_their_common_links(tmp_path: Path) -> None:
    add_device(tmp_path, [ROOT], GEN4)
    first, second = (links_above(add_device(tmp_path, [ROOT, name], GEN4)) for name in (ADAPTER, SECOND))
    other = (("0000:a1:01.0", 1e10),)
    assert gigabits(allowed_rate(first, [first])) == 226.9
    assert gigabits(allowed_rate(first, [first, other])) == 226.9
    assert gigabits(allowed_rate(first, [first, second, other])) == 113.4


def test_link_that_carried_more_than_its_stated_rate_is_ignored(tmp_path: Path) -> None:
    add_device(tmp_path, [ROOT], "2.5 GT/s PCIe")
    first, second = (links_above(add_device(tmp_path, [ROOT, name], GEN4)) for name in (ADAPTER, SECOND))
    raw = 2.5e9 * 16 * 0.8 / 8
    assert allowed_rate(first, [first], raw) == pytest.approx(0.9 * raw)
    assert allowed_rate(first, [first, second], raw) == pytest.approx(0.9 * raw / 2)
    assert allowed_rate(first, [first], 1.01 * raw) == math.inf


def test_link_of_the_processor_does_not_limit_transfers_to_a_gpu_at_the_same_switch(tmp_path: Path) -> None:
    add_device(tmp_path, [ROOT], GEN5)
    add_device(tmp_path, [ROOT, SWITCH[0]], GEN6)
    for port in (SWITCH[1], "0000:17:01.0"):
        add_device(tmp_path, [ROOT, SWITCH[0], port], GEN6)
    adapter = links_above(add_device(tmp_path, [ROOT, *SWITCH, ADAPTER], GEN6))
    gpu = add_device(tmp_path, [ROOT, SWITCH[0], "0000:17:01.0", GPU], GEN6, vendor="0x10de")
    links = links_to_gpu(adapter, gpu)
    assert [upper for upper, _ in links] == [SWITCH[1], "0000:17:01.0"]
    assert gigabits(allowed_rate(links, [links])) == 907.4
    assert gigabits(allowed_rate(adapter, [adapter])) == 453.7


def test_slowest_link_limits_transfers_to_a_gpu_at_another_port_of_the_processor(tmp_path: Path) -> None:
    add_device(tmp_path, [ROOT], GEN5)
    add_device(tmp_path, ["0000:15:02.0"], GEN4)
    adapter = links_above(add_device(tmp_path, [ROOT, ADAPTER], GEN5))
    gpu = add_device(tmp_path, ["0000:15:02.0", GPU], GEN5, vendor="0x10de")
    links = links_to_gpu(adapter, gpu)
    assert gigabits(allowed_rate(links, [links])) == 226.9


def test_pcie_link_of_a_gpu_with_nvlink_c2c_carries_no_data(tmp_path: Path) -> None:
    add_device(tmp_path, [ROOT], GEN5)
    add_device(tmp_path, ["0000:15:02.0"], GEN3, vendor="0x10de")
    adapter = links_above(add_device(tmp_path, [ROOT, ADAPTER], GEN5))
    assert links_to_gpu(adapter, add_device(tmp_path, ["0000:15:02.0", GPU], GEN3, vendor="0x10de")) == adapter


def test_device_without_pcie_links_has_no_limit(tmp_path: Path) -> None:
    assert links_above(tmp_path / "missing") == ()
    assert links_above(add_device(tmp_path, ["0000:00:02.0"], GEN5)) == ()
    assert allowed_rate((), [()]) == math.inf
