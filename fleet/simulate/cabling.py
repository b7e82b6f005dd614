"""The cables of a simulated fleet: a rail-optimized InfiniBand fabric with one adapter and one rail for each GPU."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from fleet.simulate.template import Placeholder

Doc = dict[str, Any]
HOSTS_PER_LEAF = 32
"""Default number of hosts at each leaf switch: 32 of its 64 ports (NVIDIA DGX SuperPOD reference architecture)."""


def adapter_scope(rail: int) -> str:
    """Return the scope of the adapter port that a host has on a rail."""
    return f"hca=mlx5_{rail},port=1"


def cabling_metrics(devices: int) -> Iterator[Doc]:
    """Yield the readings that name the switch port to which the adapter of each rail is connected.

    They contain placeholders for the values that `cabling_values` returns.
    """
    scopes = {adapter_scope(rail): rail for rail in range(devices)}
    readings = {
        "infiniband.switch": {scope: Placeholder("pod", f'"leaf%s-rail{rail}"') for scope, rail in scopes.items()},
        "infiniband.switch_id": {
            scope: Placeholder("pod_guid", f'"0x51400000%s00{rail:02x}"') for scope, rail in scopes.items()
        },
        "infiniband.switch_port": {scope: Placeholder("leaf_port") for scope in scopes},
    }
    for name, values in readings.items():
        yield {"name": name, "unit": "1", "values": values}


def cabling_values(number: int, hosts_per_leaf: int = HOSTS_PER_LEAF) -> dict[str, str]:
    """Return name of a placeholder -> its value, for the host at position `number` (from 0) in the plan."""
    pod, port = divmod(number, hosts_per_leaf)
    return {"pod": f"{pod + 1:02d}", "pod_guid": f"{pod:04x}", "leaf_port": str(port + 1)}
