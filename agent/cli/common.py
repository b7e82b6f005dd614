"""Options and messages shared by the verbs (subcommands of `rackproof`) that run on a GPU host."""

from __future__ import annotations

import argparse
import json
import sys

from agent.run.background import Started
from agent.run.record import run_directory
from schemas.errors import USAGE


def run_options() -> argparse.ArgumentParser:
    """Return a parent parser with the options of the verbs that measure for a run."""
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--run-dir", type=run_directory, required=True, help="directory of the run on this host")
    parser.add_argument(
        "--host", help="this host's name in the plan (default: the planned host whose name matches this machine)"
    )
    parser.add_argument(
        "--interface", default="", help="network interface for NCCL and gloo (default: they choose one)"
    )
    parser.add_argument("--detach", action="store_true", help="run in the background and return at once")
    parser.add_argument(
        "--wait",
        action="store_true",
        help="with --detach: then wait until the stage has ended, as `rackproof wait` does",
    )
    parser.add_argument(
        "--json",
        action="store_true",
        help="print the outcome as JSON; if --detach is given without --wait: {pid, started}",
    )
    return parser


def print_started(started: Started, *, as_json: bool) -> None:
    """Print the process id of a background process, and whether it was started now or already ran."""
    print(json.dumps({"pid": started.pid, "started": started.is_new}) if as_json else started)


def print_progress(line: str) -> None:
    """Print a line of progress to standard error."""
    print(line, file=sys.stderr, flush=True)


def fail(message: str, code: int = USAGE) -> int:
    """Print an error message to standard error; return the exit code."""
    print(f"rackproof: {message}", file=sys.stderr)
    return code
