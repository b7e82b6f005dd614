"""Compare the figures of a run with those of nccl-tests, nvbandwidth and gpu-burn on the same machine. Print Markdown tables.

Usage: python docs/measurements/compare.py RUN/hosts/HOST.json REFERENCE
       REFERENCE is a directory with nccl/OP.txt, nccl/OP_graph.txt, nvbandwidth/{host,peer,local}.json and gpu_burn/smi.csv.
       The commands in docs/measurements/README.md write these files. If one is missing, its table says so.
"""

from __future__ import annotations

import csv
import json
import re
import statistics
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

NAMES = {"all_to_all": "alltoall", "send_recv": "sendrecv"}
"""Operation -> its name in nccl-tests, if it differs."""
LARGE = 64 << 20
"""Bytes from which bandwidths are compared."""


def main() -> None:
    """Print the tables, each with its lowest, median and highest ratio."""
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    record = json.loads(Path(sys.argv[1]).read_text())
    reference = Path(sys.argv[2])
    observations = [
        item for item in record["observations"] if item["status"] == "measured" and item["stage"] == "benchmark"
    ]
    for table in (bandwidths, latencies, graphs, copies, burn):
        table(observations, reference)


def report(ratios: list[float], what: str) -> None:
    """Print the summary line of a table."""
    if ratios:
        low, middle, high = min(ratios), statistics.median(ratios), max(ratios)
        print(f"\n{what}: lowest {low:.3f}, median {middle:.3f}, highest {high:.3f}, {len(ratios)} figures.\n")
    else:
        print(f"\n{what}: nothing to compare with.\n")


def nccl_tests(path: Path, placement: str) -> dict[int, tuple[float, float]]:
    """Return size in bytes -> (time in s, busbw in B/s) from the output of nccl-tests: medians if it has several runs."""
    times: dict[int, list[tuple[float, float]]] = {}
    for line in path.read_text().splitlines() if path.exists() else ():
        cells = line.split()  # 13 cells, or 12 for hypercube, which has no column for the reduction
        if len(cells) in (12, 13) and re.fullmatch(r"[1-9]\d*", cells[0]):
            time, _, busbw = (float(cell) for cell in (cells[-4:-1] if placement == "in_place" else cells[-8:-5]))
            times.setdefault(int(cells[0]), []).append((time * 1e-6, busbw * 1e9))
    medians = {size: [statistics.median(column) for column in zip(*runs, strict=True)] for size, runs in times.items()}
    return {size: (time, busbw) for size, (time, busbw) in medians.items()}


def collectives(observations: list[dict[str, Any]], kind: str) -> Iterator[tuple[str, str, int, float]]:
    """Yield operation, placement, size and value of every observation of a kind, such as `busbw`."""
    for item in observations:
        match = re.fullmatch(rf"collective\.(\w+)\.{kind}", item["name"])
        if match:
            yield match[1], item["params"]["placement"], item["params"]["size_bytes"], item["value"]


def bandwidths(observations: list[dict[str, Any]], reference: Path) -> None:
    """Compare the bus bandwidth of large messages with nccl-tests."""
    print("| operation | placement | size, MiB | busbw, GB/s | nccl-tests | ratio |\n|---|---|---:|---:|---:|---:|")
    ratios = []
    for op, placement, size, busbw in collectives(observations, "busbw"):
        theirs = nccl_tests(reference / "nccl" / f"{NAMES.get(op, op)}.txt", placement)
        if size >= LARGE and size in theirs:
            ratios.append(busbw / theirs[size][1])
            print(
                f"| {op} | {placement} | {size >> 20:,} | {busbw / 1e9:.1f} | {theirs[size][1] / 1e9:.1f} | {ratios[-1]:.3f} |"
            )
    report(ratios, "busbw / nccl-tests at 64 MiB and above")


def latencies(observations: list[dict[str, Any]], reference: Path) -> None:
    """Compare the time of small messages that are launched one by one."""
    _times(observations, reference, "latency", "")


def graphs(observations: list[dict[str, Any]], reference: Path) -> None:
    """Compare the time of small messages in a CUDA graph."""
    _times(observations, reference, "graph_latency", "_graph")


def _times(observations: list[dict[str, Any]], reference: Path, kind: str, suffix: str) -> None:
    print(f"| operation | placement | size, B | {kind}, µs | nccl-tests | ratio |\n|---|---|---:|---:|---:|---:|")
    ratios = []
    for op, placement, size, latency in collectives(observations, kind):
        theirs = nccl_tests(reference / "nccl" / f"{NAMES.get(op, op)}{suffix}.txt", placement)
        if size <= 32768 and size in theirs:
            ratios.append(latency / theirs[size][0])
            print(
                f"| {op} | {placement} | {size:,} | {latency * 1e6:.1f} | {theirs[size][0] * 1e6:.1f} | {ratios[-1]:.3f} |"
            )
    report(ratios, f"{kind} / nccl-tests up to 32 KiB")


def nvbandwidth(path: Path) -> dict[str, list[list[str]]]:
    """Return test case -> matrix of GB/s, as text."""
    if not path.exists():
        return {}
    cases = json.loads(path.read_text())["nvbandwidth"]["testcases"]
    return {case["name"]: case["bandwidth_matrix"] for case in cases if "bandwidth_matrix" in case}


def copies(observations: list[dict[str, Any]], reference: Path) -> None:
    """Compare copies with nvbandwidth: to and from the host, between GPUs, and within a GPU."""
    print("| copy | GPU | GB/s | nvbandwidth | ratio |\n|---|---|---:|---:|---:|")
    theirs = {
        name: matrix
        for part in ("host", "peer", "local")
        for name, matrix in nvbandwidth(reference / "nvbandwidth" / f"{part}.json").items()
    }
    ratios = []
    for what, scope, value in _copies(observations):
        reference_value = _reference(theirs, what, *(int(part.partition("=")[2]) for part in scope.split(",")))
        if reference_value:
            ratios.append(value / 1e9 / reference_value)
            print(f"| {what} | {scope} | {value / 1e9:.1f} | {reference_value:.1f} | {ratios[-1]:.3f} |")
    report(ratios, "copies / nvbandwidth")


def _copies(observations: list[dict[str, Any]]) -> Iterator[tuple[str, str, float]]:
    for item in observations:
        params = item.get("params", {})
        if item["name"] == "host_copy.bandwidth" and (params["sharing"], params["numa"]) == ("alone", "local"):
            yield f"host {params['direction']}", item["scope"], item["value"]
        if item["name"] == "peer_copy.bandwidth":
            yield f"peer {params['direction']}", item["scope"], item["value"]
        if item["name"] == "memory.bandwidth" and params["op"] == "copy":
            yield "device copy, read + written", item["scope"], item["value"]


def _reference(theirs: Mapping[str, list[list[str]]], what: str, source: int, target: int = -1) -> float:
    """Return nvbandwidth's figure in GB/s, or 0. For host copies in both directions it is the sum of the two directions."""

    def cell(case: str, row: int, column: int) -> float:
        matrix = theirs.get(case, [])
        return float(matrix[row][column]) if row < len(matrix) else 0.0

    if what == "host both_ways":
        ways = [cell(f"{way}_bidirectional_memcpy_ce", 0, source) for way in ("host_to_device", "device_to_host")]
        return sum(ways) if all(ways) else 0.0
    if what.startswith("device copy"):
        return 2 * cell("device_local_copy", 0, source)
    both = "device_to_device_bidirectional_memcpy_write_ce"
    case, row, column = {
        "host host_to_device": ("host_to_device_memcpy_ce", 0, source),
        "host device_to_host": ("device_to_host_memcpy_ce", 0, source),
        "peer one_way": ("device_to_device_memcpy_write_ce", source, target),
        # The output has three matrices in sequence: one for each direction, and their sum.
        "peer both_ways": (both, 2 * len(theirs.get(both, [[]])[0]) + source, target),
    }[what]
    return cell(case, row, column)


def burn(observations: list[dict[str, Any]], reference: Path) -> None:
    """Compare power under stress with gpu-burn: means of instantaneous samples in the steady state."""
    print("| GPU | stress, W | gpu-burn -tc, W | ratio | SM clock, MHz | gpu-burn | °C | gpu-burn |")
    print("|---|---:|---:|---:|---:|---:|---:|---:|")
    ratios = []
    figures = {
        (item["name"], item["scope"]): item["value"] for item in observations if item["name"].startswith("stress.")
    }
    for index, (watts, clock, temperature) in _burned(reference / "gpu_burn" / "smi.csv").items():
        scope = f"gpu={index}"
        if ("stress.power", scope) in figures:
            ours, at, heat = (figures[(f"stress.{kind}", scope)] for kind in ("power", "clock", "temperature"))
            ratios.append(ours / watts)
            print(
                f"| {index} | {ours:.1f} | {watts:.1f} | {ratios[-1]:.3f} "
                f"| {at / 1e6:.0f} | {clock:.0f} | {heat:.0f} | {temperature:.0f} |"
            )
    report(ratios, "watts / gpu-burn")


def _burned(path: Path) -> dict[str, tuple[float, float, float]]:
    """Return GPU -> mean W, MHz and °C of the last 60 % of the time under load, from samples of nvidia-smi."""
    samples: dict[str, list[list[float]]] = {}
    with path.open() if path.exists() else open("/dev/null") as file:  # noqa: PTH123
        for row in list(csv.reader(file, skipinitialspace=True))[1:]:
            try:
                watts, _, clock, temperature = (float(cell.split()[0]) for cell in row[2:6])
            except (ValueError, IndexError):
                continue  # the last line is incomplete if nvidia-smi was ended while it wrote
            samples.setdefault(row[1], []).append([watts, clock, temperature])
    rates = {}
    for index, rows in sorted(samples.items()):
        loaded = [row for row in rows if row[0] > 0.6 * max(row[0] for row in rows)]
        watts, clock, temperature = (
            statistics.fmean(column) for column in zip(*loaded[len(loaded) * 2 // 5 :], strict=True)
        )
        rates[index] = (watts, clock, temperature)
    return rates


if __name__ == "__main__":
    main()
