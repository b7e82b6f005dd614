"""Counters that only the Elastic Fabric Adapter (EFA) of AWS has.

Names: Linux, drivers/infiniband/hw/efa/efa_verbs.c. Meaning: https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/efa-working-monitor.html
"""

from __future__ import annotations

from collections.abc import Callable

from collectors.base import Absent, Value
from collectors.files import Files

DRIVER = "efa"
_NAMES = (
    "rx_drops", "retrans_pkts", "retrans_timeout_events", "impaired_remote_conn_events", "unresponsive_remote_events",
    "rdma_read_wr_err", "rdma_write_wr_err", "cmds_err",
)  # fmt: skip
EFA_COUNTERS = {f"efa.{name}": f"Counter {name} of an EFA adapter" for name in _NAMES}
"""Name of the reading without the leading `infiniband.` -> help text."""


def read_efa(files: Files, port: str, read: Callable[[str], Value | Absent]) -> dict[str, Value | Absent]:
    """Return the counters of a port of an EFA adapter; empty for other adapters.

    Args:
        files: the files of the host.
        port: path of the port's directory, `sys/class/infiniband/ADAPTER/ports/NUMBER`.
        read: returns the counter in the file at the given path.
    """
    adapter = port.partition("/ports/")[0]
    if files.target_name(f"{adapter}/device/driver") != DRIVER:
        return {}
    readings: dict[str, Value | Absent] = {}
    for name in _NAMES:
        # Some versions of the driver create the counter's file in the adapter's directory instead of the port's directory.
        of_port = read(f"{port}/hw_counters/{name}")
        readings[f"efa.{name}"] = read(f"{adapter}/hw_counters/{name}") if isinstance(of_port, Absent) else of_port
    return readings
