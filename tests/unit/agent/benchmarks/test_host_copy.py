"""Test which NUMA nodes `host_copy` uses: the node of the GPU, and another node on whose processors this process may run."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from agent.benchmarks.links import host_copy

GPU = torch.device("cpu")  # stands for a GPU; the fixture `nodes` fakes its PCI address
NODES = {0: "0-3", 1: "4-7", 2: ""}
"""NUMA node -> its processors. Node 2 has only memory."""


@pytest.fixture
def nodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for node, cpus in NODES.items():
        (tmp_path / f"node{node}").mkdir()
        (tmp_path / f"node{node}" / "cpulist").write_text(f"{cpus}\n")
    monkeypatch.setattr(host_copy, "NODES", tmp_path)
    address = SimpleNamespace(pci_domain_id=0, pci_bus_id=0x1B, pci_device_id=0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: address)
    return tmp_path


def place(monkeypatch: pytest.MonkeyPatch, node: int | str, cpus: set[int]) -> None:
    """Pretend that the GPU is on NUMA node `node`, and that this process may run only on the processors `cpus`."""
    read = Path.read_text
    numa_file = "/sys/bus/pci/devices/0000:1b:00.0/numa_node"
    monkeypatch.setattr(Path, "read_text", lambda path: f"{node}\n" if str(path) == numa_file else read(path))
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: cpus)


@pytest.mark.parametrize(
    ("node", "cpus", "expected"),
    [
        (0, {0, 4}, (0, 1, "local")),
        (1, {0, 4}, (1, 0, "local")),
        (1, {4, 5}, (1, None, "local")),
        (2, {0, 4}, (2, 0, "local")),
        (0, {4, 5}, (0, None, "local")),
        (-1, {0, 1}, (None, None, "local")),
        (-1, {0, 4}, (None, None, "unknown")),
        ("damaged", {0, 4}, (None, None, "unknown")),
    ],
)
def test_copies_use_the_node_of_the_gpu_and_another_usable_node(
    nodes: Path,
    monkeypatch: pytest.MonkeyPatch,
    node: int | str,
    cpus: set[int],
    expected: tuple[int | None, int | None, str],
) -> None:
    """`expected` has the node of the GPU, the other node, and the `numa` label of copies that do not use the other node."""
    place(monkeypatch, node, cpus)
    assert host_copy.numa_nodes(GPU, nodes) == expected


def test_memory_of_a_node_that_this_process_may_not_use_is_an_error(
    nodes: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Memory of another node must not be used instead: the copies would be slower, and a healthy GPU could fail."""
    place(monkeypatch, 0, {4, 5})
    error = host_copy._allocate(1024, GPU, 0)
    assert isinstance(error, RuntimeError)
    assert str(error).startswith(
        "this process may not use the processors of NUMA node 0 (the GPU's node), only those of node 1: allow processors "
    )


@pytest.mark.parametrize(("node", "cpus"), [(0, {0, 4}), (2, {0}), (None, {4})])
def test_memory_is_allocated_unless_the_processors_of_its_node_are_forbidden(
    nodes: Path, monkeypatch: pytest.MonkeyPatch, node: int | None, cpus: set[int]
) -> None:
    place(monkeypatch, 0, cpus)
    monkeypatch.setattr(os, "sched_setaffinity", lambda *_: None)
    monkeypatch.setattr(host_copy, "CopyBuffers", lambda size, _: size)
    assert host_copy._allocate(1024, GPU, node) == 1024
