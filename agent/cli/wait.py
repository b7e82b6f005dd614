"""The verb `wait`: wait until a stage in the background ends."""

from __future__ import annotations

import argparse
import sys
from typing import TextIO

from agent.cli.common import fail
from agent.run import background, lease
from agent.run.record import HostRun, run_directory
from schemas.records import Launch
from schemas.stages import BENCHMARK, GANG, SOAK
from schemas.times import epoch_seconds

NOT_FINISHED = 3
AFTER_DEADLINE_S = 90.0
"""Time after a stage's deadline for its supervisor (the background process) to end the ranks and to write the record."""


def add_verb(verbs: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add wait to the command."""
    parser = verbs.add_parser(
        "wait",
        help="wait until a stage in the background ends; exits 3 if the stage did not finish",
        epilog="example: rackproof wait --run-dir /var/lib/rackproof/runs/r1 --host r12-h01 --stage gang",
    )
    parser.add_argument("--run-dir", type=run_directory, required=True, help="directory of the run on this host")
    parser.add_argument("--host", required=True, help="this host's name in the plan")
    parser.add_argument("--stage", required=True, choices=[BENCHMARK, SOAK, GANG])
    parser.set_defaults(call=_wait)


def _wait(options: argparse.Namespace) -> int:
    run = HostRun(options.run_dir, options.host)
    planned = [stage.name for stage in run.plan.stages]
    if options.stage not in planned:
        return fail(
            f"--stage {options.stage}: not in the plan of run {run.plan.run_id}; it has: {', '.join(planned) or 'no stages'}"
        )
    return wait_for_stage(run, options.stage)


def wait_for_stage(run: HostRun, stage: str, log: TextIO | None = None) -> int:
    """Wait until a background stage ends, and print its outcome; return 0 if it finished, otherwise NOT_FINISHED.

    A gang may have several launches and probes (short test launches), each in a background process of its own.
    Only the launches of the newest process count.

    Args:
        run: the run.
        stage: name of the stage.
        log: where the log of the background process is printed; default: standard output.
    """
    print(background.wait(run.directory, stage, run.plan.stage(stage).longest_s + AFTER_DEADLINE_S), file=log)
    if stage == SOAK:
        from agent.soak.soak_run import format_progress  # imported here, because only a soak needs it

        soak = run.record().soak
        print(format_progress(soak) if soak else "no soak was run")
        return 0 if soak and soak.ended and not soak.reason else NOT_FINISHED
    gang = run.host.gang if stage == GANG else ""
    launches = [
        launch
        for launch in run.record(gang).launches
        if (_end_of(launch) >= background.started_at(run.directory, stage) if gang else launch.stage == stage)
    ]
    finished = bool(launches) and launches[-1].outcome == "finished"
    state = lease.state_directory(run.directory)
    if other := lease.held_by_other(state, run.plan.run_id, run.plan.nonce):
        print(f"this host was taken by {other.describe()}", file=sys.stderr)
    elif not finished and stage == BENCHMARK:  # the run is over on this host, so other runs may use the host
        lease.release(state, run.plan.run_id, run.plan.nonce)
    return 0 if finished else NOT_FINISHED


def _end_of(launch: Launch) -> float:
    """Return when the launch ended, in seconds since 1970-01-01."""
    return epoch_seconds(launch.began) + launch.duration_s
