"""Measure time and memory of `rackproof report` for simulated fleets of increasing size, on two processors.

    .venv/bin/python docs/measurements/report_scale.py 100 1000 10000

It prints one row per fleet. `MB` is the size of the records, and `s` the time of the complete command (read, validate, judge,
write every format). Two figures hardly depend on the machine and its load: `anchor` is the CPU time of all processes relative to
`json.loads` of the same bytes in one process, and `linear` is the CPU time per host relative to the first row (at most 1.0 means
linear). Memory is the sum over all processes of the command, sampled 20 times per second from /proc. `PSS` counts a shared page
once, `RSS` once per process. To be safe, compare RSS, the larger one, with a memory limit.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

COMMAND = Path(__file__).parents[2] / "rackproof"
SAMPLE_S = 0.05
ANCHORS = 300
"""Number of records that are parsed for the anchor. Their time is extrapolated to the bytes of all records."""


def main() -> int:
    """Print one row per fleet size."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("hosts", type=int, nargs="*", default=[100, 1000, 10_000])
    parser.add_argument("--profile", default="smoke")
    parser.add_argument("--readings", choices=["judged", "all"], default="judged")
    parser.add_argument("--faulty", type=float, default=0.01, help="share of hosts with a fault (default: 0.01)")
    parser.add_argument("--processors", type=int, default=2)
    parser.add_argument("--where", type=Path, help="directory in which to create and keep the fleets")
    options = parser.parse_args()
    print(f"profile {options.profile}, readings {options.readings}, {options.processors} processors, "
          f"load {os.getloadavg()[0]:.1f} on {os.cpu_count()}")  # fmt: skip
    print("  hosts      MB       s   CPU s records/s  anchor  linear  PSS MB  RSS MB    report files")
    first = 0.0
    for count in options.hosts:
        with tempfile.TemporaryDirectory(dir=options.where) as temporary:
            directory = (options.where or Path(temporary)) / f"{options.profile}-{options.readings}-{count}"
            simulate(directory, count, options)
            row = measure(directory, options.processors)
            first = first or row["cpu_s"] / count
            print(f"{count:7} {row['bytes'] / 1e6:7.0f} {row['s']:7.1f} {row['cpu_s']:7.1f} {row['records'] / row['s']:9.0f} "
                  f"{row['cpu_s'] / row['anchor_s']:7.2f} {row['cpu_s'] / count / first:7.2f} {row['pss'] / 1e6:7.0f} "
                  f"{row['rss'] / 1e6:7.0f} {row['report'] / 1e6:6.1f} MB {row['files']}", flush=True)  # fmt: skip
            if not options.where:
                shutil.rmtree(directory)
    return 0


def simulate(directory: Path, count: int, options: argparse.Namespace) -> None:
    """Simulate a fleet of this size unless it exists."""
    if directory.exists():
        return
    faults = ["--fault", "ecc"] * max(1, min(int(count * options.faulty), 200))
    command = [sys.executable, COMMAND, "simulate", directory, "--hosts", str(count), "--profile", options.profile]
    command += ["--readings", options.readings, "--jobs", str(os.cpu_count()), *faults]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)


def measure(directory: Path, processors: int) -> dict[str, float]:
    """Run the report on a fleet and return its figures."""
    paths = sorted([*directory.glob("hosts/*.json"), *directory.glob("gangs/*/*.json")])
    sizes = [path.stat().st_size for path in paths]
    chosen = sorted(os.sched_getaffinity(0))[:processors]
    step = max(1, len(paths) // ANCHORS)
    began, parsed = time.process_time(), 0
    for path in paths[::step]:
        text = path.read_bytes()
        json.loads(text)
        parsed += len(text)
    anchor = (time.process_time() - began) / parsed * sum(sizes)
    began, before = time.perf_counter(), resource.getrusage(resource.RUSAGE_CHILDREN)
    process = subprocess.Popen(
        [sys.executable, COMMAND, "report", directory],
        stdout=subprocess.DEVNULL,
        preexec_fn=lambda: os.sched_setaffinity(0, chosen),
    )
    rss = pss = 0
    while process.poll() is None:
        now = memory(process.pid)
        rss, pss = max(rss, now[0]), max(pss, now[1])
        time.sleep(SAMPLE_S)
    took = time.perf_counter() - began
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    if process.returncode not in (0, 1, 2):
        raise SystemExit(f"rackproof report ended with {process.returncode}")
    written = [path for path in directory.iterdir() if path.is_file() and path.name != "plan.json"]
    return {
        "bytes": sum(sizes),
        "records": len(paths),
        "s": took,
        "cpu_s": after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime,
        "anchor_s": anchor,
        "rss": rss,
        "pss": pss,
        "report": (directory / "report.json").stat().st_size,
        "files": len(written),
    }


def memory(pid: int) -> tuple[int, int]:
    """Return RSS and PSS in bytes of a process and its descendants."""
    rss = pss = 0
    pending = [pid]
    while pending:
        one = pending.pop()
        try:
            for line in Path(f"/proc/{one}/smaps_rollup").read_text().splitlines():
                if line.startswith("Rss:"):
                    rss += int(line.split()[1]) * 1024
                elif line.startswith("Pss:"):
                    pss += int(line.split()[1]) * 1024
            for task in Path(f"/proc/{one}/task").iterdir():
                pending += map(int, (task / "children").read_text().split())
        except (OSError, ValueError):
            continue
    return rss, pss


if __name__ == "__main__":
    sys.exit(main())
