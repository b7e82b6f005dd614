"""Takes a snapshot of NVML for each line on standard input, a JSON list of NVML indices, and prints it as a line of JSON.

The collector and the library stay the same from line to line, as they do in the exporter.
"""

from __future__ import annotations

import json
import sys
from functools import cache

from agent.snapshot import take
from collectors.nvml import NvmlCollector
from schemas.records import to_json


@cache
def collector(*devices: int) -> NvmlCollector:
    """One collector for each choice of devices; none chosen: all."""
    return NvmlCollector(devices or None)


for line in sys.stdin:
    snapshot, gpus = take([collector(*json.loads(line))], stage="preflight", phase="before")
    print(json.dumps({"snapshot": to_json(snapshot), "gpus": [to_json(gpu) for gpu in gpus]}), flush=True)
