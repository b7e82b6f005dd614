"""Take an NVML snapshot for each line on standard input, and print it as a line of JSON.

Each input line is a JSON list of two values: a list of NVML indices of GPUs (empty: all GPUs), and whether slow NVML functions
are called too. Like the exporter, the process keeps its collectors and the loaded library from one line to the next.
"""

from __future__ import annotations

import json
import sys
from functools import cache

from agent.sampling.snapshot import take_snapshot
from collectors.nvml import NvmlCollector
from schemas.records import to_json


@cache
def collector(full_snapshot: bool, *devices: int) -> NvmlCollector:
    """Return the collector of the GPUs with these NVML indices (none: of all GPUs). Each collector is created only once."""
    return NvmlCollector(devices or None, full_snapshot, pauses_s=[0.0] * 3)


for line in sys.stdin:
    devices, full_snapshot = json.loads(line)
    snapshot, gpus = take_snapshot([collector(full_snapshot, *devices)], stage="preflight", phase="before")
    print(json.dumps({"snapshot": to_json(snapshot), "gpus": [to_json(gpu) for gpu in gpus]}), flush=True)
