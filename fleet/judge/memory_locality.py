"""Check what a record states about copies between GPU and host: the NUMA node of the memory, and how many GPUs copied at once.

Copies from or to the memory of another NUMA node are slower than those of the GPU's own node, so their minimum bandwidth is
lower. This lower minimum also applies if the GPU's node is unknown. If a record wrongly stated that the node is another one, or
unknown, a slow link to a GPU would pass. The minimum for copies of more than eight GPUs at once is lower too, because GPUs may
share links.
"""

from __future__ import annotations

from collections.abc import Iterator

from fleet.judge.host_view import HostView
from schemas.records import MEASURED, Observation

Problem = tuple[str, str, str, str]
"""Name and scope of the observation, the reason why it is wrong, and its stage."""

COPY, NODE_OF_GPU, NODES = "host_copy.bandwidth", "pcie.numa_node", "host.numa.count"
LOCAL, REMOTE, UNKNOWN = "local", "remote", "unknown"
"""Values of the parameter `numa`: the memory is on the GPU's own node, it is on another node, or the GPU's node is unknown."""


def locality_problems(view: HostView) -> Iterator[Problem]:
    """Yield each copy whose parameter `numa` or `devices` contradicts other copies of the GPU, or what is known of the host.

    Copies from or to another node are measured in addition to copies from or to the GPU's own node. The node of a GPU is
    unknown only if the host has several nodes and does not report which of them is the GPU's.
    """
    copies = [item for item in view.observations[COPY] if item.status == MEASURED]
    local = {_copy(item) for item in copies if item.params.get("numa") == LOCAL}
    nodes_of_gpus, nodes = view.observations.last_values(NODE_OF_GPU), view.observations.last_values(NODES).get("host")
    for item in copies:
        numa, node = item.params.get("numa"), nodes_of_gpus.get(item.scope)
        reason, devices = "", item.params.get("devices")
        if isinstance(devices, int) and devices > len(view.host.devices):
            reason = (
                f"copies of {devices} GPUs at once, but only {len(view.host.devices)} GPUs of the host are under test"
            )
        elif numa not in (LOCAL, REMOTE, UNKNOWN):
            reason = f"its parameter `numa` is {numa}, expected `{LOCAL}`, `{REMOTE}` or `{UNKNOWN}`"
        elif numa == REMOTE and _copy(item) not in local:
            reason = (
                "the copy uses memory of another NUMA node, "
                "but the record has no copy of the same GPU, stage, direction and size that uses memory of the GPU's own node"
            )
        elif numa == UNKNOWN and isinstance(node, int) and node >= 0:
            reason = f"the NUMA node of the memory is unknown, but the host reports node {node} for the GPU"
        elif numa == UNKNOWN and nodes == 1:
            reason = "the NUMA node of the memory is unknown, but the host has only one NUMA node"
        if reason:
            yield COPY, item.scope, reason, item.stage


def _copy(item: Observation) -> tuple[object, ...]:
    """Return a key that is equal for copies that differ only in the NUMA node of the memory and in the number of GPUs at once."""
    return item.scope, item.stage, item.params.get("direction"), item.params.get("size_bytes")
