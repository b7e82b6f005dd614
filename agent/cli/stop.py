"""The verb `stop`: end the exporter on this host; on request also end a run's stage or soak, and release the host."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

from agent.cli.common import fail
from agent.run import background, lease


def add_verb(verbs: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add stop to the command."""
    parser = verbs.add_parser(
        "stop",
        help="end the exporter on this host, and on request a run's stage or soak; exits 75 if another run holds the host",
        description="Ends the exporter of `export --detach`; with --end or --take-over also a stage or soak. Records are kept.",
        epilog="example: rackproof stop /var/lib/rackproof/exporter --run-dir /var/lib/rackproof/runs/rack12 --end",
    )
    parser.add_argument("directory", type=Path, help="directory that was given to `export --detach`")
    parser.add_argument(
        "--run-dir",
        type=Path,
        help="run directory on this host: if this run holds the host and is running no stage, release the host",
    )
    parser.add_argument("--end", action="store_true", help="first end the stage or soak of the run in --run-dir")
    parser.add_argument(
        "--claim", help="content of lock.json in the run directory on the control node; it identifies the operator"
    )
    parser.add_argument(
        "--take-over",
        action="store_true",
        help="end the stage or soak of whichever run holds the host, and release the host",
    )
    parser.add_argument(
        "--json", action="store_true", help="print a JSON object: whether a process was ended, and the messages"
    )
    parser.set_defaults(call=_stop)


def _stop(options: argparse.Namespace) -> int:
    if options.end and not options.run_dir and not options.take_over:
        return fail("--end without --run-dir: name the run whose stage is to end")
    state, run_id = options.directory.absolute().parent, options.run_dir.name if options.run_dir else ""
    claim = lease.load_claim(options.claim, run_id, options.directory) if options.claim else None
    other = lease.held_by_other(state, run_id, by=claim)
    if other and not options.take_over:
        remedy = "wait until that run ends, or use --take-over (rackproof_take_over in Ansible)"
        return fail(f"this host is held by {other.describe()}: {remedy}", lease.HELD)
    messages, stopped = [], []
    end = (options.end and bool(run_id)) or options.take_over
    if run_id or options.take_over:
        if message := lease.release(state, run_id, any_run=options.take_over, end=end):
            messages.append(message)
        if end:
            run_directories = [options.run_dir] if run_id else []
            stopped = _stop_background([*run_directories, *([state / lease.RUNS / other.run_id] if other else [])])
    has_ended_stage = end and bool(messages)
    stopped.append(background.stop(options.directory, "exporter"))
    messages += map(str, stopped)
    outcome = {"ended": has_ended_stage or any(process.has_ended for process in stopped), "messages": messages}
    print(json.dumps(outcome) if options.json else "\n".join(messages))
    return 0


def _stop_background(run_directories: Sequence[Path]) -> list[background.Stopped]:
    """End the background processes of these runs.

    This includes a process that has just started: `lease.release` cannot end it, because its process id is not in the lease yet.
    """
    paths = sorted(path for directory in run_directories for path in directory.glob("*.pid"))
    return [background.stop(path.parent, path.stem) for path in paths if background.is_running(path.parent, path.stem)]
