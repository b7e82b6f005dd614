"""Build a complete GPU host without hardware: /proc, /sys, /dev and programs under a root directory, and the fake NVML.

Run as a program with the root directory as argument, this module prints a full snapshot for each phase that it reads from
standard input. With the further argument `readings` it prints the catalogue of readings instead. With `metrics` it prints the
text of docs/metrics.md.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from agent.exporter.metrics_page import page
from agent.sampling.snapshot import take_snapshot
from collectors import table
from collectors.base import IDENTITY_LABELS, Collector
from collectors.clock import ClockCollector, ClockState
from collectors.storage import StorageCollector
from schemas.records import to_json
from tests.fakes import host, links, nvml, optics, wiring

SYNCHRONIZED = ClockState(offset=0.0, error_max=0.004, error_estimated=0.0001)
SMART = "smart.bin"
"""File under the root with the health log that every NVMe disk returns."""
CLOCK = "clock.json"
"""File under the root with the maximum error of the clock, in seconds. Without the file, the clock is as in SYNCHRONIZED."""
HEALTHY_LOG = bytes([0, 0x2E, 0x01, 100, 10, 3]) + bytes(506)
"""Health log with no warning, 302 K, full spare capacity, 3 % used and no errors."""
NVML = (
    f"DriverVersion={host.DRIVER}",
    *(f"gpu.{number}.PciInfo=0000{address}" for number, address in enumerate(links.GPUS)),
)
"""Lines of the NVML scenario: the driver version of this host, and the PCI addresses of its GPUs."""


BOOTED = "5,0,0,-;Linux version 6.8.0-45-generic (buildd@lcy02) #45-Ubuntu SMP\n"
"""Kernel log of a healthy host."""


def build_host(root: Path) -> Path:
    """Build a healthy host with eight GPUs, four NVSwitches, ten network adapters with optical modules and two disks."""
    links.build_tree(root)
    host.build_tree(root, gpus=None)
    links.write(root, "proc/1/comm", "systemd\n")
    links.write(root, "proc/900/comm", "nv-fabricmanage\n")
    for address in links.NVSWITCHES:
        links.write(
            root, f"proc/driver/nvidia-nvswitch/devices/{address}/information", "BIOS Version: 96.10.57.00.01\n"
        )
    links.write(root, "dev/kmsg", BOOTED)
    wiring.install_programs(root)
    (root / SMART).write_bytes(HEALTHY_LOG)
    optics.install_programs(root)
    return root


def append_kernel_log(root: Path, *messages: str) -> None:
    """Append messages to the kernel log, about 5 s after boot and 1 µs apart."""
    path = root / "dev/kmsg"
    records = path.read_text().splitlines()
    for text in messages:
        records.append(f"4,{len(records)},{5_000_000 + len(records)},-;{text}")
    path.write_text("\n".join(records) + "\n")


def run_program(root: Path, library: Path, *arguments: str, requests: str = "") -> str:
    """Run this module as a program on the host built under `root`, with healthy GPUs; return its output.

    `library` is the directory of the fake NVML library. Its scenario is written to a file under `root`.
    """
    scenario = nvml.write(root / "scenario", "healthy-h100x8", *NVML)
    return subprocess.run(
        [sys.executable, "-m", "tests.fakes.whole", root, *arguments],
        input=requests,
        env={**os.environ, **nvml.environment(library, scenario)},
        cwd=nvml.CHECKOUT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout


def build_collectors(
    root: Path, *, full_snapshot: bool = True, identity: bool = False, keep_nvml_open: bool = False
) -> Iterator[Collector]:
    """Yield the collectors of the agent. They read NVMe health logs and the state of the clock from files under the root."""

    def read_clock() -> ClockState:
        clock_file = root / CLOCK
        return (
            ClockState(offset=0.0, error_max=float(clock_file.read_text()), error_estimated=0.0)
            if clock_file.exists()
            else SYNCHRONIZED
        )

    for collector in table.build_collectors(
        full_snapshot=full_snapshot, identity=identity, root=root, keep_nvml_open=keep_nvml_open
    ):
        if collector.name == "storage":
            yield StorageCollector(root, full_snapshot, identity, read_log=lambda _: (root / SMART).read_bytes())
        elif collector.name == "clock":
            yield ClockCollector(root, read_clock)
        else:
            yield collector


def catalogue_readings(root: Path) -> dict[str, dict[str, Any]]:
    """Return reading name -> its unit, help text, labels, flags and bounds. `full_only`: only full snapshots have the reading."""
    result: dict[str, dict[str, Any]] = {}
    fast = {family.name for collector in build_collectors(root, full_snapshot=False) for family in collector.collect()}
    for family in (family for collector in build_collectors(root) for family in collector.collect()):
        labels = [key for key in family.label_names() if key not in IDENTITY_LABELS]
        result[family.name] = {"unit": family.unit, "help": family.help}
        result[family.name] |= {"labels": labels} if labels else {}
        flags = ("counter", "varies", "signed", "fractional")
        result[family.name] |= {flag: True for flag in flags if getattr(family, flag)}
        result[family.name] |= {"bounds": list(family.bounds)} if family.bounds else {}
        result[family.name] |= {} if family.name in fast else {"full_only": True}
    return dict(sorted(result.items()))


def main(root: Path) -> None:
    """Read the name of a phase from each line of standard input; print a full snapshot and its GPUs as a line of JSON."""
    for phase in sys.stdin:
        snapshot, gpus = take_snapshot(build_collectors(root), stage="doctor", phase=phase.strip())
        print(json.dumps({"snapshot": to_json(snapshot), "gpus": [to_json(gpu) for gpu in gpus]}), flush=True)


if __name__ == "__main__":
    if sys.argv[2:] == ["metrics"]:
        scraped = build_collectors(Path(sys.argv[1]), full_snapshot=False, identity=True, keep_nvml_open=True)
        print(page(family for collector in scraped for family in collector.collect()), end="")
    elif sys.argv[2:] == ["readings"]:
        print(json.dumps(catalogue_readings(Path(sys.argv[1])), indent=1, ensure_ascii=False))
    else:
        main(Path(sys.argv[1]))
