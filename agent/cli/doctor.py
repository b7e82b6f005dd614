"""The verb `doctor`: take two snapshots of this host and judge them, without a plan."""

from __future__ import annotations

import argparse
import json
import socket

from agent.cli.common import fail
from agent.diagnose.doctor import examine, table
from collectors.table import build_collectors
from fleet.judge.criteria import read_packs
from schemas.records import to_json

MAX_GPUS, MAX_SECONDS = 128, 3600.0


def add_verb(verbs: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add doctor to the command."""
    parser = verbs.add_parser(
        "doctor",
        help="check this host and judge it at once, without a plan; exits 1 if a check failed",
        epilog="example: sudo rackproof doctor --gpus 8. Exit codes: 0 every check passed, 1 a check failed, "
        "2 a check could not be evaluated.",
    )
    parser.add_argument(
        "--gpus",
        type=int,
        help="number of GPUs that this host should have (without it, a GPU that is missing on the PCI bus is not noticed, and "
        "the exit code is never 0)",
    )
    parser.add_argument(
        "--criteria", action="append", default=[], help="additional criteria pack (its name or a .yml file)"
    )
    parser.add_argument(
        "--seconds", type=float, default=2.0, help="seconds between the two snapshots that are judged (default: 2)"
    )
    parser.add_argument("--json", action="store_true", help="print the findings as JSON")
    parser.set_defaults(call=_doctor)


def _doctor(options: argparse.Namespace) -> int:
    if options.gpus is not None and not 1 <= options.gpus <= MAX_GPUS:
        return fail(f"--gpus {options.gpus}: give the number of GPUs, 1 to {MAX_GPUS}")
    if not 0 <= options.seconds <= MAX_SECONDS:
        return fail(f"--seconds {options.seconds:g}: give 0 to {MAX_SECONDS:g} seconds")
    examination = examine(
        build_collectors(full_snapshot=True),
        read_packs(options.criteria),
        host=socket.gethostname(),
        gpu_count=options.gpus,
        wait_s=options.seconds,
    )
    print(json.dumps(to_json(examination), indent=1) if options.json else table(examination))
    return examination.exit_code
