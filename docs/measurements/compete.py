"""Run matrix products on one GPU beside a benchmark, to test whether a criterion detects that the GPU is slower.

Usage: python docs/measurements/compete.py GPU SHARE SECONDS      e.g. 2 0.05 60
"""

from __future__ import annotations

import sys
import time

import torch

SIZE = 4096


def main() -> None:
    """Compute for SHARE of the time and sleep for the rest, until SECONDS have passed."""
    if len(sys.argv) != 4:
        sys.exit(__doc__)
    device, share, seconds = torch.device("cuda", int(sys.argv[1])), float(sys.argv[2]), float(sys.argv[3])
    factor = torch.randn(SIZE, SIZE, device=device, dtype=torch.bfloat16)
    ends, worked = time.monotonic() + seconds, 0.0
    began = time.monotonic()
    while time.monotonic() < ends:
        start = time.monotonic()
        torch.mm(factor, factor)
        torch.cuda.synchronize(device)
        took = time.monotonic() - start
        worked += took
        time.sleep(took * (1 - share) / share)
    print(f"worked {worked / (time.monotonic() - began):.3f} of the time")


if __name__ == "__main__":
    main()
