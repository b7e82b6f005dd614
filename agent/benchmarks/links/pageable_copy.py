"""Copies between each GPU and ordinary (pageable) memory of the host. The driver passes the data through its own pinned memory.

Many programs copy this way. A pageable copy is slower than a copy to or from pinned memory (`host_copy`), and its rate also
depends on the CPU and the host's memory.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from agent.benchmarks.links.host_copy import memory_from_node, numa_nodes
from agent.benchmarks.runtime.context import Context
from agent.gang.heartbeat import describe_error
from schemas.records import ERROR


def run(context: Context, settings: Mapping[str, Any]) -> None:
    """Report `pageable_copy.bandwidth` in B/s and `pageable_copy.wrong_bytes` for each direction. One GPU copies at a time."""
    size = settings["size_bytes"]
    near, _, _ = numa_nodes(context.device)
    for turn in range(context.local_world_size):
        context.host_barrier("turn")
        for direction in settings["directions"] if turn == context.local_rank else ():
            context.set_phase(f"pageable_copy {direction}")
            common: dict[str, Any] = {"scope": context.device_scope, "direction": direction, "size_bytes": size}
            try:
                with memory_from_node(near):
                    on_device = torch.randint(0, 256, (size,), dtype=torch.uint8, device=context.device)
                    on_host = on_device.cpu()
                to_device = direction == "host_to_device"
                target, source = (on_device, on_host) if to_device else (on_host, on_device)
                right = source.clone()
                target.zero_()
                series = context.sample(
                    lambda target=target, source=source: target.copy_(source),  # type: ignore[misc]
                    precision=settings["precision"],
                    seconds=settings["seconds"],
                )
                wrong = int((target.to(right.device) != right).sum())
            except RuntimeError as error:
                for name, unit in (("bandwidth", "B/s"), ("wrong_bytes", "1")):
                    reason = describe_error(error)
                    context.report_absent(f"pageable_copy.{name}", unit=unit, status=ERROR, reason=reason, **common)
                continue
            context.report_rate("pageable_copy.bandwidth", size, series, unit="B/s", **common)
            context.report("pageable_copy.wrong_bytes", wrong, unit="1", **common)
    context.host_barrier("done")
