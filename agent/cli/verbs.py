"""The verbs of a GPU host. Each has a module of its own with `add_verb`, which is imported only if the verb is used.

A run starts verbs a dozen times on each host: none of them should wait for the imports of the others.
"""

from __future__ import annotations

import argparse
import importlib

VERBS = {
    "inspect": "agent.cli.inspect",
    "doctor": "agent.cli.doctor",
    "bench": "agent.cli.bench",
    "launch": "agent.cli.launch",
    "soak": "agent.cli.soak",
    "wait": "agent.cli.wait",
    "export": "agent.cli.export",
    "stop": "agent.cli.stop",
    "busy": "agent.cli.busy",
    "run-host": "agent.cli.run_host",
    "emit-record": "agent.cli.emit_record",
}


def add_verbs(verbs: argparse._SubParsersAction[argparse.ArgumentParser], asked: str = "") -> None:
    """Add the verb `asked` to the command, or all verbs."""
    for verb, module in VERBS.items():
        if asked in ("", verb):
            importlib.import_module(module).add_verb(verbs)
