"""Copy bandwidth within each device, and between it and its host's pinned memory."""

from __future__ import annotations

from typing import Any

import torch

from agent.benchmarks.context import Context, failed, summarize
from schemas.records import UNSUPPORTED


def run(context: Context, settings: dict[str, Any]) -> None:
    """Reports `memory_copy.bandwidth` in B/s for each direction; within a device bytes read and written both count."""
    size = int(settings["size_bytes"])
    for direction in settings["directions"]:
        context.phase(f"memory_copy {direction}")
        common: dict[str, Any] = {
            "unit": "B/s",
            "scope": context.device_scope,
            "direction": direction,
            "size_bytes": size,
        }
        within = direction == "device_to_device"
        if not within and context.device.type == "cpu":
            context.absent("memory_copy.bandwidth", status=UNSUPPORTED, reason="device and host are one", **common)
            continue
        # All GPUs at once share the host's memory: measured, 39.6 GB/s each instead of 55.4. So they take turns.
        for turn in range(1 if within else context.local_world_size):
            if within or turn == context.local_rank:
                _report(context, settings, common)
            context.total(0.0)


def _report(context: Context, settings: dict[str, Any], common: dict[str, Any]) -> None:
    direction, size = common["direction"], common["size_bytes"]
    try:
        source, target = _buffers(direction, size, context.device)
        seconds = context.time(lambda: target.copy_(source, non_blocking=True), int(settings["repetitions"]))
        if not torch.equal(source.to(target.device), target):
            raise ValueError("the copy differs from its source")
    except (RuntimeError, ValueError) as error:
        status, reason = failed(error)
        context.absent("memory_copy.bandwidth", status=status, reason=reason, **common)
        return
    moved = 2 * size if direction == "device_to_device" else size
    rates = summarize([moved / second for second in seconds])
    context.measured("memory_copy.bandwidth", rates.p50, samples=rates, **common)


def _buffers(direction: str, size: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    here = torch.randint(0, 256, (size,), dtype=torch.uint8, device=device)
    if direction == "device_to_device":
        return here, torch.empty_like(here)
    host = torch.randint(0, 256, (size,), dtype=torch.uint8).pin_memory()
    return (host, here) if direction == "host_to_device" else (here, host)
