"""The verb that ends what runs on the host for a run, and gives the host back."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from agent.run import background, lease


def add_verb(verbs: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds stop to the command."""
    stop = verbs.add_parser(
        "stop",
        help="end a run's stage or soak on this host, and what `export --detach` started; exits 75 where another run has it",
        description="Ends what `export --detach` started. With --end or --take-over also what measures; records stay.",
        epilog="example: rackproof stop /var/lib/rackproof/exporter --run-dir /var/lib/rackproof/runs/rack12 --end",
    )
    stop.add_argument("directory", type=Path, help="directory that was given to --detach")
    stop.add_argument(
        "--run-dir", type=Path, help="give the host back where this run has it and measures nothing there"
    )
    stop.add_argument("--end", action="store_true", help="end what measures here for the run of --run-dir")
    stop.add_argument("--claim", help="lock.json of the run on the control node: who asks")
    stop.add_argument("--take-over", action="store_true", help="end whatever measures here, for whichever run")
    stop.set_defaults(call=_stop)


def _stop(options: argparse.Namespace) -> int:
    state, run_id = options.directory.absolute().parent, options.run_dir.name if options.run_dir else ""
    by = lease.load_claim(options.claim, run_id, options.directory) if options.claim else None
    other = lease.held_by_other(state, run_id, by)
    if other and not options.take_over:
        print(
            f"rackproof: this host is held by {other.describe()}: wait for its end, or set rackproof_take_over",
            file=sys.stderr,
        )
        return lease.HELD
    if run_id or options.take_over:
        end = options.end or options.take_over
        if note := lease.release(state, run_id, any_run=options.take_over, end=end):
            print(note)
        began = [*([options.run_dir] if run_id else []), *([state / lease.RUNS / other.run_id] if other else [])]
        _end_what_began(began if end else [])
    print(background.stop(options.directory, "exporter"))
    return 0


def _end_what_began(run_dirs: list[Path]) -> None:
    """What was started in the background and has not come to write itself into the lease."""
    for path in sorted(path for directory in run_dirs for path in directory.glob("*.pid")):
        if background.is_running(path.parent, path.stem):
            print(background.stop(path.parent, path.stem))
