"""The host collector over trees of /proc and /sys, and its parsers over single files."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from collectors.base import HOST, Absent, Family, Value
from collectors.host import HostCollector, cpu_model, load_average, memory
from tests.fakes import host

GIB = 1 << 30


def readings(root: Path) -> dict[str, Value | Absent]:
    """The one reading of each family."""
    families: list[Family] = list(HostCollector(root=root).collect())
    assert all([labels for labels, _ in family.readings] == [HOST] for family in families)
    return {family.name: family.readings[0][1] for family in families}


def test_a_host_reads_in_full(tmp_path: Path) -> None:
    assert readings(host.tree(tmp_path)) == {
        "host.kernel_version": "6.8.0-45-generic",
        "host.cpu.model": "Intel(R) Xeon(R) Platinum 8480C",
        "host.cpu.count": len(os.sched_getaffinity(0)),
        "host.load": 1.52,
        "host.memory.total": 2113404636 * 1024,
        "host.memory.available": 2078127008 * 1024,
        "host.uptime": 864213.57,
        "gpu.pci_count": 8,
    }


@pytest.mark.parametrize(
    ("file", "text", "reasons"),
    [
        (
            "meminfo",
            "MemTotal:  lots\n",
            {
                "host.memory.total": "/proc/meminfo: no MemTotal",
                "host.memory.available": "/proc/meminfo: no MemAvailable",
            },
        ),
        ("meminfo", "MemTotal: 1048576 kB\n", {"host.memory.available": "/proc/meminfo: no MemAvailable"}),
        ("cpuinfo", "processor\t: 0\n", {"host.cpu.model": "/proc/cpuinfo: no processor model"}),
        ("loadavg", "", {"host.load": "/proc/loadavg: list index out of range"}),
        ("loadavg", "busy\n", {"host.load": "/proc/loadavg: could not convert string to float: 'busy'"}),
        ("uptime", "\n", {"host.uptime": "/proc/uptime: list index out of range"}),
        ("osrelease", None, {"host.kernel_version": "/proc/sys/kernel/osrelease: [Errno 2] No such file or directory"}),
    ],
)
def test_a_broken_file_costs_its_own_readings_only(
    tmp_path: Path, file: str, text: str | None, reasons: dict[str, str]
) -> None:
    seen = readings(host.tree(tmp_path, **{file: text}))
    absent = {name: value for name, value in seen.items() if isinstance(value, Absent)}
    assert {name: value.status for name, value in absent.items()} == dict.fromkeys(reasons, "error")
    for name, reason in reasons.items():
        assert absent[name].reason.startswith(reason)


def test_bytes_that_are_not_text_do_no_harm(tmp_path: Path) -> None:
    host.tree(tmp_path)
    (tmp_path / "proc/cpuinfo").write_bytes(b"model name\t: \xff\xfe CPU\n")
    assert readings(tmp_path)["host.cpu.model"] == "\ufffd\ufffd CPU"


@pytest.mark.parametrize("gpus", [0, 1, 8])
def test_only_nvidia_gpus_count(tmp_path: Path, gpus: int) -> None:
    assert readings(host.tree(tmp_path, gpus=gpus))["gpu.pci_count"] == gpus


def test_a_host_without_sys_and_proc_gives_reasons_only(tmp_path: Path) -> None:
    seen = readings(tmp_path)
    assert [name for name, value in seen.items() if not isinstance(value, Absent)] == ["host.cpu.count"]
    assert str(seen["gpu.pci_count"]).find("/sys/bus/pci/devices: ") > 0


def test_this_machine_reads_in_full() -> None:
    seen = readings(Path("/"))
    assert [value for name, value in seen.items() if isinstance(value, Absent) and name != "gpu.pci_count"] == []


# ---- parsers ----


@pytest.mark.parametrize(
    ("text", "model"),
    [
        ("model name\t: AMD EPYC 9654 96-Core Processor\nmodel name\t: other\n", "AMD EPYC 9654 96-Core Processor"),
        ("processor\t: 0\nCPU implementer\t: 0x41\n", "0x41"),
        ("Processor\t: ARMv8\n", "ARMv8"),
    ],
)
def test_cpu_model(text: str, model: str) -> None:
    assert cpu_model(text) == model


@pytest.mark.parametrize("text", ["", "model name\n", "my model name: x\n"])
def test_no_cpu_model(text: str) -> None:
    with pytest.raises(ValueError, match="no processor model"):
        cpu_model(text)


def test_load_average() -> None:
    assert load_average("0.05 0.10 0.20 1/200 4711\n") == 0.05


@pytest.mark.parametrize(("key", "value"), [("MemTotal", 64 * GIB), ("MemAvailable", 32 * GIB)])
def test_memory(key: str, value: int) -> None:
    assert memory("MemTotal:       67108864 kB\nMemAvailable:   33554432 kB\n", key) == value


@pytest.mark.parametrize("text", ["", "MemTotal: 1 MB\n", "MemTotal: -1 kB\n", "MemTotals: 1 kB\n"])
def test_no_memory(text: str) -> None:
    with pytest.raises(ValueError, match="no MemTotal"):
        memory(text, "MemTotal")
