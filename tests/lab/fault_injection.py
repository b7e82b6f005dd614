"""Inject a fault into the ranks of one host, with a module in the Python environment of the agent."""

from __future__ import annotations

from .lab import Lab

PURELIB = ("/opt/rackproof/bin/python", "-c", "import sysconfig; print(sysconfig.get_path('purelib'))")
LAUNCHERS = ("agent.benchmarks.rendezvous", "agent.benchmarks.without_torch")
"""Modules of the launchers, which fork the ranks: the first runs torchrun, the second launches stages that need no torch."""


def inject_fault(lab: Lab, host: str, text: str) -> None:
    """Make each launcher of ranks on the host run the Python code `text` when it starts. The ranks are forks of the launcher."""
    directory = lab.on(host, *PURELIB).stdout.strip()
    lab.put(host, f"{directory}/fault.py", text)
    # Every Python process of the agent reads the .pth file, but only a launcher imports the fault. The guard process, which
    # starts the launcher, also has the launcher's module in its arguments. So the condition checks only the first option `-m`.
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
"""Code for `inject_fault` that is not a fault: it sleeps for 0.1 s before each matrix product. Other tests can use the CPUs
during this time. The benchmark `stress` does not take longer, because it ends after a fixed time."""
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
"""Code for `inject_fault` that is not a fault: two benchmarks that need no torch sleep for the planned `seconds`, and then
measure for only 0.02 s. Other tests can use the CPUs while they sleep. On a host without RDMA ports, `verbs` only sleeps."""
