"""A fault in the ranks of one host: a module that changes the agent's, put into the Python that the agent is installed in."""

from __future__ import annotations

from .lab import Lab

PURELIB = ("/opt/rackproof/bin/python", "-c", "import sysconfig; print(sysconfig.get_path('purelib'))")
LAUNCHER = "agent.benchmarks.rendezvous"
"""Whose forks the ranks are."""


def put_beneath(lab: Lab, host: str, text: str) -> None:
    """Runs `text` in the launcher of the host's ranks, before its program."""
    directory = lab.on(host, *PURELIB).stdout.strip()
    lab.put(host, f"{directory}/fault.py", text)
    # Not in its guard, which has the same in its arguments, and would import torch for nothing.
    lab.put(
        host,
        f"{directory}/fault.pth",
        f"import sys; sys.orig_argv[1:3] == ['-m', '{LAUNCHER}'] and __import__('fault')\n",
    )


IDLE = """
import time
import agent.benchmarks.compute.gemm as benchmark

build_product = benchmark.build_product

def slow(*arguments, **named):
    multiply, check = build_product(*arguments, **named)
    return lambda: time.sleep(0.1) or multiply(), check

benchmark.build_product = slow
"""
"""What a stress test multiplies, put beneath the agent: it goes on for as long, and leaves the processors to others."""
