"""The verb that ends what `export --detach` started, and gives the host back."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from agent import background, lease


def add_verb(verbs: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds stop to the command."""
    stop = verbs.add_parser(
        "stop",
        help="end what `export --detach` started; exits 75 where another run has this host",
        epilog="example: rackproof stop /var/lib/rackproof/exporter",
    )
    stop.add_argument("directory", type=Path, help="directory that was given to --detach")
    stop.add_argument("--run-dir", type=Path, help="give the host back, too, where the lease is that of this run")
    stop.add_argument("--claim", help="lock.json of the run on the control node: who asks")
    stop.add_argument("--take-over", action="store_true", help="although another run has this host")
    stop.set_defaults(call=_stop)


def _stop(options: argparse.Namespace) -> int:
    state, run_id = options.directory.absolute().parent, options.run_dir.name if options.run_dir else ""
    by = lease.given(options.claim, run_id, options.directory) if options.claim else None
    other = lease.another(state, run_id, by)
    if other and not options.take_over:
        held = f"this host is held by {other.who()}"
        if run_id:  # what runs here is not ours any more, and so not ours to stop
            print(held)
            return 0
        print(f"rackproof: {held}: wait for its end, or set rackproof_take_over", file=sys.stderr)
        return lease.HELD
    if run_id:
        lease.release(state, run_id)
    print(background.stop(options.directory, "exporter"))
    return 0
