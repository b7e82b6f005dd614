"""Inject a fault into the ranks of one host, with a module in the Python environment of the agent."""

from __future__ import annotations

from .lab import Lab

PURELIB = ("/opt/rackproof/bin/python", "-c", "import sysconfig; print(sysconfig.get_path('purelib'))")
LAUNCHERS = ("agent.benchmarks.rendezvous", "agent.benchmarks.without_torch")
"""Modules of the launchers, which fork the ranks: torchrun, and the launcher of stages that need no torch."""


def inject_fault(lab: Lab, host: str, text: str) -> None:
    """Let each launcher of ranks on a host first run the Python code `text`."""
    directory = lab.on(host, *PURELIB).stdout.strip()
    lab.put(host, f"{directory}/fault.py", text)
    # The condition excludes the guard process: its arguments contain the module of the launcher too, but it needs no torch.
    lab.put(
        host,
        f"{directory}/fault.pth",
        f"import sys; sys.orig_argv[1:2] == ['-m'] and sys.orig_argv[2] in {LAUNCHERS} and __import__('fault')\n",
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
"""Not a fault: sleep for 0.1 s before each matrix product. A stress test takes as long as without the sleep, but other tests can
use the CPUs meanwhile."""
IDLE_WITHOUT_TORCH = """
import time
import agent.benchmarks.links.verbs as verbs
import agent.benchmarks.storage.local_storage as local_storage

def idle(run):
    def slow(context, settings):
        end = time.monotonic() + settings["seconds"]
        while time.monotonic() < end:
            context.heartbeat.record_progress()
            time.sleep(0.1)
        run(context, {**settings, "seconds": 0.02})
    return slow

for benchmark in (local_storage, verbs):
    benchmark.run = idle(benchmark.run)
"""
"""Not a fault: two benchmarks that need no torch first sleep for the planned `seconds`, and then measure for only 0.02 s.
Other tests can use the CPUs meanwhile. On a host without RDMA ports, `verbs` only sleeps."""
