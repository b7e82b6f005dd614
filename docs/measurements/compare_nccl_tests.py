"""Puts the collectives of a run beside nccl-tests' figures from the same machine, as a Markdown table.

Usage: python docs/measurements/compare_nccl_tests.py RUN/hosts/HOST.json OP=OUTPUT…
       OP is all_reduce, all_gather, …; OUTPUT what `OP_perf -b 8 -e 8G -f 8 -g 4 -n 20 -w 5` printed.
Beside each size stands the figure of nccl-tests for the same placement: all_reduce and broadcast in place, the others not.
"""

from __future__ import annotations

import json
import re
import statistics
import sys
from pathlib import Path

IN_PLACE = ("all_reduce", "broadcast")
LARGE = 64 << 20


def theirs(text: str, in_place: bool) -> dict[int, tuple[float, float]]:
    """Size in bytes -> (time in s, busbw in B/s) out of nccl-tests' table."""
    found = {}
    for line in text.splitlines():
        cells = line.split()
        if len(cells) == 13 and re.fullmatch(r"\d+", cells[0]):
            time, _, busbw = (float(cell) for cell in (cells[9:12] if in_place else cells[5:8]))
            found[int(cells[0])] = (time * 1e-6, busbw * 1e9)
    return found


def main() -> None:
    """Prints the table, and the worst ratio of the large sizes."""
    record = json.loads(Path(sys.argv[1]).read_text())
    ours = {
        (item["name"], item["params"]["size_bytes"]): item["value"]
        for item in record["observations"]
        if item["name"].startswith("collective.") and item["stage"] == "benchmark"
    }
    print("| operation | size | busbw, GB/s | nccl-tests | ratio | latency, µs | nccl-tests |")
    print("|---|---:|---:|---:|---:|---:|---:|")
    large: list[float] = []
    for argument in sys.argv[2:]:
        op, _, path = argument.partition("=")
        for size, (time, busbw) in theirs(Path(path).read_text(), op in IN_PLACE).items():
            if (f"collective.{op}.busbw", size) not in ours:
                continue  # nccl-tests rounds 8 B over 4 ranks down to nothing
            mine = ours[(f"collective.{op}.busbw", size)]
            latency = ours[(f"collective.{op}.latency", size)] * 1e6
            ratio = mine / busbw if size >= LARGE else 0.0
            large += [ratio] if ratio else []
            rates = f"{mine / 1e9:.1f} | {busbw / 1e9:.1f} | {ratio:.3f}" if ratio else " | | "
            print(f"| {op} | {size:,} | {rates} | {latency:.1f} | {time * 1e6:.1f} |")
    print(
        f"\nRatio at 64 MiB and above: worst {min(large):.3f}, median {statistics.median(large):.3f}, {len(large)} figures."
    )


if __name__ == "__main__":
    main()
