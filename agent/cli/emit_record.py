"""The verb `emit-record`: print this host's records as lines, which `rackproof collect` reads from the log."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator
from pathlib import Path

from agent.cli.common import fail
from agent.launch import options as launch_options
from agent.placement.membership import find_host
from agent.run import lease
from agent.run.record import HostRun
from schemas import documents, frames

NODE_VARIABLE = "RACKPROOF_NODE"
"""Environment variable with the name of the cluster node, which differs from the host name of a pod."""
NO_RECORD = 2
"""Exit code if this host has no record yet."""


def add_verb(verbs: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add emit-record to the command."""
    parser = verbs.add_parser(
        "emit-record",
        help="print this host's records as lines that `rackproof collect` reads from a log; exits 2 if this host has no record",
        epilog="example: rackproof emit-record --run-dir /var/lib/rackproof/runs/r1",
    )
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--run-dir", type=Path, help="directory of the run on this host")
    source.add_argument(
        "--plan", help=f"plan of the run, if `rackproof run-host` had no --run-dir and used {lease.STATE}/runs/RUN_ID"
    )
    parser.add_argument(
        "--host", help="this host's name in the plan (default: the planned host whose name matches this machine)"
    )
    parser.set_defaults(call=_emit_record, detach=False)


def _emit_record(options: argparse.Namespace) -> int:
    plan = launch_options.read_plan(options).plan
    directory = options.run_dir or lease.STATE / lease.RUNS / plan.run_id
    host = options.host or find_host(plan, os.environ)
    if emit_records(HostRun(directory, host)):
        return 0
    return fail(f"{directory} has no record of {host} yet: run `rackproof run-host` first", NO_RECORD)


def emit_records(run: HostRun) -> int:
    """Print the records of this host; return the number of records.

    Raises:
        documents.DocumentError: a record is invalid or belongs to another host. `rackproof collect` would reject it.
    """
    count = 0
    for gang, path in record_files(run):
        text = path.read_bytes()
        document = documents.parse(text, source=str(path))
        documents.validate(document, "record", source=str(path))
        if document["host"] != run.host.name:
            raise documents.DocumentError(f"{path}: a record of {document['host']}, not of {run.host.name}")
        node = os.environ.get(NODE_VARIABLE, "")
        for line in frames.lines(text, run_id=run.plan.run_id, host=run.host.name, gang=gang, node=node):
            sys.stdout.flush()
            _write_line(f"{line}\n".encode())
        count += 1
    return count


def _write_line(line: bytes) -> None:
    try:
        descriptor = sys.stdout.fileno()
    except (OSError, ValueError):  # stdout has no descriptor, as in a notebook
        sys.stdout.write(line.decode())
        return
    while line:
        line = line[os.write(descriptor, line) :]


def record_files(run: HostRun) -> Iterator[tuple[str, Path]]:
    """Yield gang and path of each existing record of this host. The record of the stages that it runs alone has no gang ("")."""
    for gang in dict.fromkeys(("", run.host.gang)):
        if run.path(gang).exists():
            yield gang, run.path(gang)
