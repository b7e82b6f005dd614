"""`rackproof bmc`: read the BMCs of a run's hosts, and add the readings to the run directory."""

from __future__ import annotations

import argparse
import fcntl
import os
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from fleet.bmc.read_fleet import read_all
from fleet.bmc.readings import READABLE
from fleet.bmc.record import add_snapshot, is_damaged, marks, read_record
from fleet.bmc.target import REDFISH, BmcTarget
from schemas import documents
from schemas.errors import RunError, UsageError
from schemas.plans import Plan
from schemas.records import Record, Snapshot
from schemas.run_directory import BMCS, RunDirectory
from schemas.times import utc_now

DURING, DELAY_S = "during", 30.0
"""Phase of a reading during a stage, and the seconds to wait before it, so that the hosts are under load."""
MAX_INPUT_BYTES = 64_000_000


def add_verb(verbs: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add bmc to the command."""
    bmc = verbs.add_parser(
        "bmc",
        help="read the BMCs of a run's hosts into the run directory",
        description="Reads the inventory variables of the hosts from standard input, as JSON (host -> rackproof_bmc_address, "
        "rackproof_bmc_user, rackproof_bmc_password …), so that no credential is in a file or in the process list.",
        epilog="example, with the variables on standard input: rackproof bmc runs/r1 --stage benchmark --phase after. "
        "Exit codes: 0 the BMCs were queried, even if none answered; also 0 if the phase is `during` and the stage has already "
        "finished; 2 the run has no valid plan; 64 wrong usage.",
    )
    bmc.add_argument("run_dir", type=Path, help="directory of the run")
    bmc.add_argument("--stage", required=True, help="stage that the reading belongs to, such as benchmark")
    bmc.add_argument(
        "--phase", required=True, choices=["before", "during", "after"], help="when to read, relative to the stage"
    )
    bmc.set_defaults(call=call)


def call(options: argparse.Namespace) -> int:
    """Run the verb."""
    plan = _plan(options.run_dir)
    targets = list(targets_of(_variables(), plan))
    sys.stdin.close()
    if options.phase == DURING:
        time.sleep(DELAY_S)
    with _locked(options.run_dir):
        damaged = {target.host for target in targets if is_damaged(options.run_dir, target.host)}
        not_read = [
            f"{host}: its record is damaged, so no reading was added to it: start a new run" for host in damaged
        ]
        known = {
            target.host: read_record(options.run_dir, plan, target.host)
            for target in targets
            if target.host not in damaged
        }
        if options.phase == DURING and any(_is_over(record, options.stage) for record in known.values()):
            print(f"stage {options.stage} has already finished: no BMC is read")
            return 0
        began = utc_now()
        jobs = [(target, marks(known[target.host])) for target in targets if target.host in known]
        for target, metrics, duration_s in read_all(jobs):
            at = began if options.phase == "before" else utc_now()
            taken = Snapshot(
                stage=options.stage, phase=options.phase, at=at, duration_s=round(duration_s, 3), metrics=metrics
            )
            add_snapshot(options.run_dir, plan, target.host, taken)
            reasons = [why for metric in metrics if metric.name == READABLE for why in metric.absent.values()]
            not_read += [f"{target.host}: {reason.partition(': ')[2]}" for reason in reasons]
    sys.stderr.writelines(f"rackproof: BMC of {reason}\n" for reason in sorted(not_read))
    print(f"{len(targets) - len(not_read)} of {len(targets)} BMCs read")
    sys.stdout.flush()
    return 0


def targets_of(variables: Mapping[str, Any], plan: Plan) -> Iterator[BmcTarget]:
    """Yield the BMC of each planned host that has a BMC. Raises UsageError if a variable is not valid."""
    for host in plan.hosts:
        own = variables.get(host.name)
        if not host.bmc or not isinstance(own, dict):
            continue
        texts = {name: own.get(f"rackproof_bmc_{name}", "") for name in ("address", "user", "password", "ca")}
        if wrong := [name for name, value in texts.items() if not isinstance(value, str)]:
            raise UsageError(f"host {host.name}: rackproof_bmc_{wrong[0]} is not a string: put it in quotes")
        yield BmcTarget(
            host=host.name,
            protocol=str(own.get("rackproof_bmc_protocol", REDFISH)),
            verify=own.get("rackproof_bmc_verify", True) is not False,
            **texts,
        )


def _is_over(record: Record | None, stage: str) -> bool:
    """Return whether the BMC has already been read after the stage."""
    return record is not None and any((taken.stage, taken.phase) == (stage, "after") for taken in record.snapshots)


def _variables() -> Mapping[str, Any]:
    try:
        document = documents.parse(sys.stdin.read(MAX_INPUT_BYTES), source="standard input", max_bytes=MAX_INPUT_BYTES)
    except documents.DocumentError:
        document = None
    if not isinstance(document, dict):
        raise UsageError("standard input: expected JSON that maps each host to its variables")
    return document


def _plan(directory: Path) -> Plan:
    try:
        return RunDirectory(directory).read_plan()
    except documents.DocumentError as error:
        raise RunError(f"{error}: give the directory of a run") from None


@contextmanager
def _locked(directory: Path) -> Iterator[None]:
    """Hold the lock of the run's BMC records: only one process of the run reads BMCs at a time.

    So a late reading `during` a stage waits for the reading `after` the stage, finds it in the records, and is skipped.
    """
    path = directory / BMCS
    path.mkdir(exist_ok=True)
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)
