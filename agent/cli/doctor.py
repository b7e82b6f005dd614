"""The verb that looks at a GPU host and judges it at once: doctor."""

from __future__ import annotations

import argparse
import json
import socket

import collectors
from agent.cli.common import complain
from agent.diagnose.doctor import examine, table
from fleet.judge.criteria import read_packs
from schemas.records import to_json

MOST_GPUS, MOST_SECONDS = 128, 3600.0


def add_verb(verbs: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds doctor to the command."""
    doctor = verbs.add_parser(
        "doctor",
        help="look at this host and judge it at once, without a plan; exits 1 where something failed",
        epilog="example: sudo rackproof doctor --gpus 8. Exit codes: 0 nothing found, 1 something failed, "
        "2 nothing failed, but something could not be told.",
    )
    doctor.add_argument(
        "--gpus",
        type=int,
        help="GPUs that this host should have (where left out, what is gone from the PCI bus is not missed, and it exits 2)",
    )
    doctor.add_argument("--criteria", action="append", default=[], help="one more pack: a name or a .yml file")
    doctor.add_argument("--seconds", type=float, default=2.0, help="between two looks at the counters (default: 2)")
    doctor.add_argument("--json", action="store_true", help="print the findings as JSON")
    doctor.set_defaults(call=_doctor)


def _doctor(options: argparse.Namespace) -> int:
    if options.gpus is not None and not 1 <= options.gpus <= MOST_GPUS:
        return complain(f"--gpus {options.gpus}: give the number of GPUs, 1 to {MOST_GPUS}")
    if not 0 <= options.seconds <= MOST_SECONDS:
        return complain(f"--seconds {options.seconds:g}: give 0 to {MOST_SECONDS:g} seconds")
    found = examine(
        collectors.build_collectors(full_snapshot=True),
        read_packs(options.criteria),
        host=socket.gethostname(),
        gpu_count=options.gpus,
        wait_s=options.seconds,
    )
    print(json.dumps(to_json(found), indent=1) if options.json else table(found))
    return found.exit_code
