"""Inject a fault into the ranks of one host, by a module in the Python environment of the agent."""

from __future__ import annotations

from .lab import Lab

PURELIB = ("/opt/rackproof/bin/python", "-c", "import sysconfig; print(sysconfig.get_path('purelib'))")
LAUNCHER = "agent.benchmarks.rendezvous"
"""Module of the launcher, which forks the ranks."""


def inject_fault(lab: Lab, host: str, text: str) -> None:
    """Run `text` in the launcher of the ranks of a host, before its own code."""
    directory = lab.on(host, *PURELIB).stdout.strip()
    lab.put(host, f"{directory}/fault.py", text)
    # Not in the guard process: its arguments contain the same words, and it would import torch needlessly.
    lab.put(
        host,
        f"{directory}/fault.pth",
        f"import sys; sys.orig_argv[1:3] == ['-m', '{LAUNCHER}'] and __import__('fault')\n",
    )


IDLE_STRESS = """
import time
import agent.benchmarks.compute.gemm as benchmark

build_product = benchmark.build_product

def slow(*arguments, **named):
    multiply, check = build_product(*arguments, **named)
    return lambda: time.sleep(0.1) or multiply(), check

benchmark.build_product = slow
"""
"""Not a fault: each matrix product of a benchmark first sleeps. A stress test takes the same time, and other tests can use the
CPUs."""
