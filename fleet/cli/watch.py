"""`rackproof watch`: show a run in progress."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
import time
from pathlib import Path
from typing import Any, TextIO

from fleet.records.newest import run_or_newest
from fleet.watch.lines import HeartbeatLines, changes
from fleet.watch.view import View
from fleet.watch.watcher import Watcher
from schemas.errors import INTERRUPTED, UsageError

HEARTBEAT_S = 30.0
PLAIN_COLUMNS = 160
"""Width of the output if it is not a terminal."""


def add_verb(verbs: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add watch to the command."""
    watch = verbs.add_parser(
        "watch",
        help="show a run in progress: hosts, stages, progress and findings so far",
        description="Show a run in progress. Any user who can read its directory may do so. A terminal shows a screen that is "
        "updated until the run has a report; other outputs get one line per change. Times are UTC.",
        epilog="examples: rackproof watch; rackproof watch runs/20261121T040000Z; for a program: "
        "rackproof watch runs/rack12 --once --json",
    )
    watch.add_argument("run_dir", type=Path, nargs="?", help="directory of the run (default: the newest in runs/)")
    watch.add_argument("--once", action="store_true", help="print the current state and exit")
    watch.add_argument(
        "--json", action="store_true", help="print JSON: one line with the whole state of the run for each change"
    )
    watch.add_argument("--lines", action="store_true", help="print lines even on a terminal")
    watch.add_argument("--every", type=float, default=2.0, help="seconds between updates (default: %(default)g)")
    watch.add_argument(
        "--no-judge",
        action="store_true",
        help="do not judge the records fetched so far (judging takes about one CPU second per record)",
    )
    watch.add_argument("--no-ask", action="store_true", help="do not scrape the exporters on the hosts")
    # Seconds between heartbeat lines. Only the callback plugin rackproof_events.py uses this option.
    watch.add_argument("--beats", type=float, help=argparse.SUPPRESS)
    watch.set_defaults(call=call)


def call(options: argparse.Namespace) -> int:
    """Run the verb."""
    if not 0.1 <= options.every <= 3600:
        raise UsageError(f"--every {options.every:g}: give 0.1 to 3600 seconds")
    options.run_dir = run_or_newest(options.run_dir)
    watcher = Watcher(
        options.run_dir, judge_records=not options.no_judge and not options.beats, scrape_exporters=not options.no_ask
    )
    reconfigure = getattr(sys.stdout, "reconfigure", None)
    if reconfigure:  # a terminal whose encoding lacks `…` shows a question mark
        reconfigure(errors="replace")
    try:
        if options.beats:
            _print_heartbeats(watcher, options.beats)
        elif options.once:
            _once(watcher, options.json)
        elif not options.json and not options.lines and _has_screen(sys.stdout):
            _screen(watcher, options.every)
        else:
            _follow(watcher, options.every, options.json)
    except KeyboardInterrupt:
        return INTERRUPTED
    return 0


def _once(watcher: Watcher, as_json: bool) -> None:
    view = watcher.read_view(background=False)
    if as_json:
        _print_line(json.dumps(view.json()))
    else:
        _print_view(view)


def _print_view(view: View) -> None:
    from fleet.watch.screen import plain_text  # needs rich; lines and JSON do not

    _print_line(plain_text(view, None if sys.stdout.isatty() else PLAIN_COLUMNS))


def _has_screen(stream: TextIO) -> bool:
    """Return whether the stream is a terminal that can show a full screen."""
    return stream.isatty() and os.environ.get("TERM", "dumb") not in ("", "dumb")


def _screen(watcher: Watcher, every_s: float) -> None:
    """Redraw the screen until the run has a report, then leave the result on the terminal."""
    from fleet.watch.screen import RunScreen, full_screen

    with full_screen() as live:
        while True:
            view = watcher.read_view()
            live.update(RunScreen(view, fit_height=True))
            if view.decision:
                break
            time.sleep(every_s)
    _print_view(watcher.read_view(background=False))


def _follow(watcher: Watcher, every_s: float, as_json: bool) -> None:
    """Print one line for each change, until the run has ended."""
    previous: View | None = None
    heartbeats = HeartbeatLines(HEARTBEAT_S)
    while True:
        view = watcher.read_view()
        if view.is_over:  # the background thread may not have read the last records
            view = watcher.read_view(background=False)
        if as_json:
            if previous is None or _stable_fields(view) != _stable_fields(previous):
                _print_line(json.dumps(view.json()))
        else:
            for line in [*changes(previous, view), *heartbeats.due(view)]:
                _print_line(line)
        previous = view
        if view.is_over:
            return
        time.sleep(every_s)


def _stable_fields(view: View) -> dict[str, object]:
    """Return the view without the fields that change although nothing happens, and with progress in whole percent."""
    document = {key: value for key, value in view.json().items() if key not in ("at", "judged", "expected_s")}
    return {**document, "hosts": [_stable_host(host) for host in document["hosts"]]}


def _stable_host(host: dict[str, Any]) -> dict[str, object]:
    cells = {
        stage: {**cell, "progress": None if cell["progress"] is None else round(cell["progress"], 2)}
        for stage, cell in host["cells"].items()
    }
    return {**host, "cells": cells, "last_seen": None, "remaining_s": None, "expected_s": None}


def _print_heartbeats(watcher: Watcher, every_s: float) -> None:
    """Print heartbeat lines until the parent process exits.

    The parent process is ansible-playbook, whose callback plugin rackproof_events.py displays the lines.
    """
    parent, heartbeats = os.getppid(), HeartbeatLines(every_s)
    while os.getppid() == parent:
        for line in heartbeats.due(watcher.read_view()):
            _print_line(line)
        time.sleep(min(1.0, every_s / 2))


def _print_line(text: str) -> None:
    """Write a line. If the reader closed the pipe, end as if interrupted; the rest of the output goes to /dev/null."""
    with contextlib.suppress(BrokenPipeError):
        print(text, flush=True)
        return
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    raise KeyboardInterrupt
