"""Prints a snapshot of NVML, and the GPUs that it names, as JSON: `python -m tests.fakes.nvml.take [NVML index …]`."""

from __future__ import annotations

import json
import sys

from agent.snapshot import take
from collectors.nvml import NvmlCollector
from schemas.records import to_json

devices = [int(index) for index in sys.argv[1:]]
taken, gpus = take([NvmlCollector(devices or None)], stage="preflight", phase="before")
print(json.dumps({"snapshot": to_json(taken), "gpus": [to_json(gpu) for gpu in gpus]}))
