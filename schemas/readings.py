"""The readings of the collectors: name -> unit, labels and help text.

The lint of criteria packs needs this list on the control node, which does not import the collectors.
tests/unit/schemas/test_readings.py fails if `readings.json` is out of date; with UPDATE_GOLDEN=1 it writes the file.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

PATH = Path(__file__).with_name("readings.json")
BMC_PATH = Path(__file__).with_name("bmc_readings.json")
"""The readings of BMCs, which the control node reads (`fleet/bmc`)."""
BMC = "bmc."
"""Prefix of the readings of BMCs. A host cannot report them."""
PROMETHEUS_SUFFIX = {
    "1": "",
    "ratio": "_ratio",
    "Cel": "_celsius",
    "W": "_watts",
    "J": "_joules",
    "Hz": "_hertz",
    "B": "_bytes",
    "B/s": "_bytes_per_second",
    "s": "_seconds",
    "V": "_volts",
    "A": "_amperes",
    "transfers/s": "_transfers_per_second",
}
"""Unit in the record -> the ending for this unit in the name of the exported series."""

PROMETHEUS_NAMES: Mapping[str, str] = {
    "fabric.imex.node_count": "fabric_imex_nodes",
    "fabric.nvswitch.count": "fabric_nvswitches",
    "gpu.c2c.link_count": "gpu_c2c_links",
    "gpu.core_count": "gpu_cores",
    "gpu.count": "gpus",
    "gpu.nvlink.link_count": "gpu_nvlink_links",
    "gpu.pci_count": "pci_gpus",
    "host.cpu.count": "host_cpus",
    "host.dimm.count": "host_dimms",
    "host.dimm.slot_count": "host_dimm_slots",
    "host.hugepages.count": "host_hugepages",
    "host.numa.count": "host_numa_nodes",
    "host.process.count": "host_processes",
    "infiniband.port_count": "infiniband_ports",
    "kernel.event.count": "kernel_events",
    "network.bond.slave_count": "network_bond_slaves",
    "network.nic_count": "network_nics",
    "pcie.device_count": "pcie_devices",
    "storage.disk.count": "storage_disks",
    "sxid.count": "sxid_errors",
    "xid.count": "xid_errors",
}
"""Reading -> its name in Prometheus without `rackproof_`, if the usual name would end in `_count`: Prometheus reserves this
ending for histograms and summaries."""


def metric_name(name: str) -> str:
    """Return the name of a reading in Prometheus, without the unit and the `_total` of a counter."""
    return f"rackproof_{PROMETHEUS_NAMES.get(name, name.replace('.', '_'))}"


@dataclass(frozen=True, kw_only=True)
class Reading:
    """One kind of reading."""

    unit: str
    help: str
    labels: tuple[str, ...] = ()
    """Labels of its scopes, the widest first; empty if its scope is the host."""
    counter: bool = False
    varies: bool = False
    """Whether the value may change while the host runs. Counters may always change, so they do not set this."""
    signed: bool = False
    """Whether the value may be negative."""
    fractional: bool = False
    """Whether a value with the unit 1 may be other than a whole number."""
    bounds: tuple[float, float] | None = None
    """Lowest and highest possible value; None if the bounds of the unit apply (`fleet/judge/credibility.py`)."""
    full_only: bool = False
    """Whether only the snapshots before and after a launch have the reading, because it is slow to read or never changes."""


def _read() -> dict[str, Reading]:
    result = {**json.loads(PATH.read_text(encoding="utf-8")), **json.loads(BMC_PATH.read_text(encoding="utf-8"))}
    for item in result.values():
        item.update((key, tuple(item[key])) for key in ("labels", "bounds") if key in item)
    return {name: Reading(**item) for name, item in result.items()}


READINGS: Mapping[str, Reading] = _read()
