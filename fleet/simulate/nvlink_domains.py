"""Change the records of the hosts of a simulated rack so that the rack is one NVLink domain.

The hosts get a common cluster UUID and clique ID, the state of IMEX (the daemon with which hosts share GPU memory), and NCCL's
transport over NVLink. No record of a real NVLink domain was available, so these readings imitate the output of NVIDIA's programs,
and the bandwidths and latencies of the benchmarks stay those of hosts without NVLink between them.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from fleet.judge.reading_consistency import FULL_PHASES
from schemas.readings import READINGS

Doc = dict[str, Any]
CLIQUE = 32766
"""Clique ID that GPUs in the default partition of an NVLink domain report."""
TRANSPORT = "P2P/MNNVL"


def join_domain(
    documents: Mapping[str, Doc], members: Sequence[str], host: str, rack: int, down: Collection[str], *, is_whole: bool
) -> None:
    """Change the records of a host so that the host is in the NVLink domain of its rack.

    Args:
        documents: kind of record (`host` or `gang`) -> the host's record of this kind.
        members: names of the hosts of the domain, in the order in which IMEX numbers them.
        host: name of the host.
        rack: number of the rack.
        down: names of the members on which IMEX does not work.
        is_whole: whether all ranks are in one clique and IMEX works on all hosts, so that NCCL uses NVLink between hosts.
    """
    readings = _imex_readings(members, host, down)
    identity = {"gpu.fabric.cluster_uuid": f"51400000-0000-4000-8000-{rack:012x}", "gpu.fabric.clique_id": CLIQUE}
    for document in documents.values():
        for snapshot in document["snapshots"]:
            for metric in snapshot["metrics"]:
                if metric["name"] in identity:
                    metric["values"] = dict.fromkeys(metric.get("values", {}), identity[metric["name"]])
            if snapshot["phase"] in FULL_PHASES:
                snapshot["metrics"] += [
                    {"name": name, "unit": READINGS[name].unit, "values": dict(values)}
                    for name, values in readings.items()
                ]
        if is_whole and "gang" in document:
            _use_nvlink(document["observations"])


def _imex_readings(members: Sequence[str], host: str, down: Collection[str]) -> dict[str, Mapping[str, Any]]:
    def connection(other: str) -> str:
        return "invalid" if host in down else "never_connected" if other in down else "connected"

    return {
        "fabric.imex.state": {"host": "unavailable" if host in down else "ready"},
        "fabric.imex.domain_state": {"host": "degraded" if down else "up"},
        "fabric.imex.node_count": {"host": len(members)},
        "fabric.imex.address": {"host": host},
        "fabric.imex.node_address": {f"imex={number}": name for number, name in enumerate(members)},
        "fabric.imex.connection": {
            f"imex={number}": connection(name) for number, name in enumerate(members) if name != host
        },
    }


def _use_nvlink(observations: Sequence[Doc]) -> None:
    for item in observations:
        if item["name"] == "collective.transport":
            item["value"] = TRANSPORT
        elif "transport" in item.get("params", {}):
            item["params"]["transport"] = TRANSPORT
