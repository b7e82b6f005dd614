"""`rackproof tell`: this host's records as lines of the log, for `rackproof collect`."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

from agent.placement.membership import find_host
from agent.run.record import PLAN_BYTES, HostRun
from schemas import documents, frames
from schemas.plans import plan_from_json

NODE = "RACKPROOF_NODE"
"""How the cluster names the machine: a pod has a name of its own."""
NOTHING = 2


def add_verb(verbs: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds tell to the command."""
    tell = verbs.add_parser(
        "tell",
        help="print this host's records as lines that `rackproof collect` reads from a log; exits 2 where there are none",
        epilog="example: rackproof tell --run-dir /var/lib/rackproof/runs/r1",
    )
    tell.add_argument("--run-dir", type=Path, required=True, help="directory of the run on this host")
    tell.add_argument("--host", help="this host's name in the plan (default: found by the names that it goes by)")
    tell.set_defaults(call=_tell)


def _tell(options: argparse.Namespace) -> int:
    name = options.host
    if not name:
        document = documents.read(options.run_dir / "plan.json", "plan", max_bytes=PLAN_BYTES)
        name = find_host(plan_from_json(document), os.environ)
    if told(HostRun(options.run_dir, name)):
        return 0
    sys.stderr.write(f"rackproof: {options.run_dir} has no record of {name} yet: run `rackproof attend` first\n")
    return NOTHING


def told(run: HostRun, environment: Mapping[str, str] = os.environ) -> int:
    """Writes the records that this host has; how many there were. A line is written in one piece."""
    count = 0
    for gang, path in _records(run):
        # Whoever reads the log believes nothing that the schema does not allow: nor is it told.
        text = path.read_bytes()
        document = documents.parse(text, source=str(path))
        documents.validate(document, "record", source=str(path))
        if document["host"] != run.host.name:
            raise documents.DocumentError(f"{path}: a record of {document['host']}, not of {run.host.name}")
        for line in frames.lines(
            text, run_id=run.plan.run_id, host=run.host.name, gang=gang, node=environment.get(NODE, "")
        ):
            sys.stdout.flush()
            _write(f"{line}\n".encode())
        count += 1
    return count


def _write(line: bytes) -> None:
    try:
        descriptor = sys.stdout.fileno()
    except (OSError, ValueError):  # not a file, as in a notebook
        sys.stdout.write(line.decode())
        return
    while line:
        line = line[os.write(descriptor, line) :]


def _records(run: HostRun) -> Iterator[tuple[str, Path]]:
    for gang in dict.fromkeys(("", run.host.gang)):
        if run.path(gang).exists():
            yield gang, run.path(gang)
