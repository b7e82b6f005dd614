"""What the verbs that run on a GPU host have in common: options of a run, and words for people."""

from __future__ import annotations

import argparse
import sys

from agent.run.record import run_directory

USAGE = 64


def run_options() -> argparse.ArgumentParser:
    """Options of the verbs that measure for a run, as a parent of their parsers."""
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--run-dir", type=run_directory, required=True, help="directory of the run on this host")
    parser.add_argument("--host", help="this host's name in the plan (default: found by the names that it goes by)")
    parser.add_argument("--interface", default="", help="network interface for NCCL and gloo (default: they choose)")
    parser.add_argument("--detach", action="store_true", help="return at once; `rackproof wait` waits for the end")
    parser.add_argument("--wait", action="store_true", help="with --detach: wait for the end like `rackproof wait`")
    parser.add_argument("--json", action="store_true", help="print the outcome as JSON")
    return parser


def progress(line: str) -> None:
    """Tells what goes on."""
    print(line, file=sys.stderr, flush=True)


def complain(message: str, code: int = USAGE) -> int:
    """Tells why the verb does not do it; the exit code."""
    print(f"rackproof: {message}", file=sys.stderr)
    return code
