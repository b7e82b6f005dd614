"""Make readings and figures of a host with two network adapters.

The readings of the optical modules come from captured outputs of ethtool. Those of the physical layer come from a captured output
of mlxlink.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from collectors.base import Absent
from collectors.optics.ethtool_module import parse_module
from collectors.optics.mlxlink import parse_rows, port_of
from fleet.judge.evidence import Evidence
from schemas.readings import READINGS
from schemas.records import MEASURED, SKIPPED, Metric, Observation, Snapshot, Value
from tests.fakes import optics

SLOTS = ("0000:1a:00.0", "0000:3a:00.0")
"""PCI address of each adapter."""
HEALTHY, DARK = "osfp-800g-healthy.v6.15.txt", "osfp-800g-lane5-dark.v6.15.txt"
"""Files with captured outputs of ethtool for a healthy optical module, and for one that receives no light on lane 5."""
ADAPTER_READINGS: Mapping[str, Value] = {
    "hca.type": "MT4129", "hca.board_id": "MT_0000000838", "hca.firmware_version": "28.39.1002", "hca.numa_node": 0,
}  # fmt: skip
PORT_READINGS: Mapping[str, Value] = {
    "state": "ACTIVE", "phys_state": "LinkUp", "active": True, "link_layer": "InfiniBand", "rate": 50e9, "width": 4,
    "narrowed": False, "unmanaged": False, "port_rcv_data": 10**15, "symbol_error": 0, "switch": "leaf01",
    "switch_id": "0xfc6a1c0300aa0100", "switch_port": "7",
}  # fmt: skip


def metrics(host: int, module: str = HEALTHY, *, gpus: int = 2, symbol_errors: int = 0) -> tuple[Metric, ...]:
    """Return the readings of `mlx5_0` and `mlx5_1`, the PCIe paths of the GPUs to these adapters, and the uptime of the host.

    Args:
        host: number of the host. It is part of the GUIDs of the adapters. Both adapters report it as the number of the switch
            port to which they are connected.
        module: file with the output of ethtool for the optical module of the first adapter: HEALTHY or DARK.
        gpus: number of GPUs of the host; half of them are below the PCIe switch of each adapter.
        symbol_errors: symbol errors of the port of the first adapter.
    """
    values: dict[str, dict[str, Value]] = {}
    absent: dict[str, dict[str, str]] = {}

    def add(name: str, scope: str, value: Value | Absent) -> None:
        if isinstance(value, Absent):
            absent.setdefault(name, {})[scope] = f"{value.status}: {value.reason}"
        else:
            values.setdefault(name, {})[scope] = value

    for number, slot in enumerate(SLOTS):
        hca, port = f"hca=mlx5_{number}", f"hca=mlx5_{number},port=1"
        adapter_readings = {
            **ADAPTER_READINGS,
            "hca.pci_address": slot,
            "hca.node_guid": f"a088:c203:{host:04x}:340{number}",
        }
        for name, value in adapter_readings.items():
            add(f"infiniband.{name}", hca, value)
        for name, value in PORT_READINGS.items():
            value = {"symbol_error": value if number else symbol_errors, "switch_port": str(host)}.get(name, value)
            add(f"infiniband.{name}", port, value)
        for name, value in (("kind", "network"), ("generation", 5), ("width", 16), ("narrowed", False)):
            add(f"pcie.{name}", f"pci={slot}", value)
        optical = parse_module(optics.ethtool(HEALTHY if number else module)).readings(has_link=True)
        for prefix, readings in (
            ("optics", optical),
            ("port", port_of(parse_rows(optics.mlxlink(optics.HEALTHY_LINK)))),
        ):
            for (name, lane), reading in readings.items():
                add(f"{prefix}.{name}", f"{port},lane={lane}" if lane else port, reading)
    for gpu in range(gpus):
        for name, value in (("kind", "gpu"), ("nic_path", "PIX"), ("nearest_nics", SLOTS[2 * gpu // gpus])):
            add(f"pcie.{name}", f"pci=0000:{gpu:02x}:00.0", value)
    add("host.uptime", "host", 864000.0)
    names = dict.fromkeys((*values, *absent))
    return tuple(
        Metric(name=name, unit=READINGS[name].unit, values=values.get(name, {}), absent=absent.get(name, {}))
        for name in names
    )


def with_adapters(evidence: Evidence, first: tuple[Metric, ...], last: tuple[Metric, ...]) -> Evidence:
    """Return the evidence with these readings in its snapshots: `last` in the last snapshot, `first` in the earlier ones.

    In each stage that has observations, the host also reports `verbs.bandwidth` as skipped, because perftest is missing.
    """

    def extended(snapshot: Snapshot, readings: tuple[Metric, ...]) -> Snapshot:
        names = {metric.name for metric in readings}
        kept = [metric for metric in snapshot.metrics if metric.name not in names]
        return replace(snapshot, metrics=(*kept, *readings))

    final = evidence.snapshots()[-1]
    records = [
        replace(record, snapshots=tuple(extended(item, last if item is final else first) for item in record.snapshots))
        for record in evidence.records
    ]
    records = [
        replace(
            record,
            observations=(*record.observations, *(_not_measured(stage) for stage in _stages(record.observations))),
        )
        for record in records
    ]
    return replace(evidence, records=tuple(records))


def _stages(observations: Sequence[Observation]) -> list[str]:
    return list(dict.fromkeys(item.stage for item in observations))


def _not_measured(stage: str) -> Observation:
    reason = "ib_write_bw not found: install perftest"
    return Observation(name="verbs.bandwidth", scope="host", stage=stage, unit="B/s", status=SKIPPED, reason=reason)


def figure(name: str, scope: str, value: float, unit: str, **params: Value) -> Observation:
    """Return a figure of the benchmark `verbs`, on rail 0 if `params` has no other rail."""
    return Observation(
        name=name, scope=scope, stage="benchmark", unit=unit, status=MEASURED, value=value, params={"rail": 0, **params}
    )
