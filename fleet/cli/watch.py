"""`rackproof watch`: show a run in progress."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
import time
from pathlib import Path
from typing import TextIO

from fleet.watch.lines import HeartbeatLines, changes
from fleet.watch.screen import render
from fleet.watch.terminal import Screen, has_colour, is_screen
from fleet.watch.view import View
from fleet.watch.watcher import Watcher
from schemas.errors import INTERRUPTED, UsageError

BEAT_S = 30.0
PLAIN_COLUMNS = 160


def add_verb(verbs: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add watch to the command."""
    watch = verbs.add_parser(
        "watch",
        help="show a run in progress: hosts, stages, progress and findings so far",
        description="Shows a run in progress to every user who can read its directory: on a terminal as a screen that is "
        "redrawn until the run has a report, elsewhere as a line per change. Times are UTC.",
        epilog="example: rackproof watch runs/20261121T040000Z; for a program: rackproof watch runs/rack12 --once --json",
    )
    watch.add_argument("run_dir", type=Path, help="directory of the run")
    watch.add_argument("--once", action="store_true", help="print the current state and exit")
    watch.add_argument("--json", action="store_true", help="print JSON: one document per line, at each change")
    watch.add_argument("--lines", action="store_true", help="print lines even on a terminal")
    watch.add_argument("--every", type=float, default=2.0, help="seconds between updates (default: %(default)g)")
    watch.add_argument(
        "--no-judge",
        action="store_true",
        help="do not judge the records fetched so far, which takes about a CPU second each",
    )
    watch.add_argument("--no-ask", action="store_true", help="do not scrape the exporters on the hosts")
    watch.add_argument("--beats", type=float, help=argparse.SUPPRESS)  # for the callback plugin
    watch.set_defaults(call=call)


def call(options: argparse.Namespace) -> int:
    """Run the verb."""
    if not 0.1 <= options.every <= 3600:
        raise UsageError(f"--every {options.every:g}: give 0.1 to 3600 seconds")
    watcher = Watcher(options.run_dir, judging=not options.no_judge and not options.beats, asking=not options.no_ask)
    reconfigure = getattr(sys.stdout, "reconfigure", None)
    if reconfigure:  # a terminal without `…` shows a question mark
        reconfigure(errors="replace")
    try:
        if options.beats:
            _beat(watcher, options.beats)
        elif options.once:
            _once(watcher, options.json)
        elif not options.json and not options.lines and is_screen(sys.stdout):
            _screen(watcher, options.every)
        else:
            _follow(watcher, options.every, options.json)
    except KeyboardInterrupt:
        return INTERRUPTED
    return 0


def _once(watcher: Watcher, as_json: bool) -> None:
    view = watcher.look(background=False)
    columns = Screen(sys.stdout).size[0] if sys.stdout.isatty() else PLAIN_COLUMNS
    _say(sys.stdout, json.dumps(view.json()) if as_json else "\n".join(render(view, columns)))


def _screen(watcher: Watcher, every_s: float) -> None:
    """Redraw the screen until the run has a report, then leave the result on the terminal."""
    with Screen(sys.stdout).shown() as screen:
        while True:
            view = watcher.look()
            columns, rows = screen.size
            screen.draw(render(view, columns, rows, colour=has_colour()))
            if view.decision:
                break
            screen.wait(every_s)
    _say(sys.stdout, "\n".join(render(watcher.look(background=False), screen.size[0])))


def _follow(watcher: Watcher, every_s: float, as_json: bool) -> None:
    """Print a line per change until no playbook runs the run."""
    old: View | None = None
    heartbeats = HeartbeatLines(BEAT_S)
    while True:
        view = watcher.look()
        if view.over:  # judge and scrape once more for the last line
            view = watcher.look(background=False)
        if as_json:
            if old is None or _shown(view) != _shown(old):
                _say(sys.stdout, json.dumps(view.json()))
        else:
            for line in [*changes(old, view), *heartbeats.hear(view)]:
                _say(sys.stdout, line)
        old = view
        if view.over:
            return
        time.sleep(every_s)


def _shown(view: View) -> dict[str, object]:
    """Return the view without fields that change with time alone."""
    document = {key: value for key, value in view.json().items() if key not in ("at", "judged")}
    return {**document, "hosts": [{**host, "last_seen": None, "remaining_s": None} for host in document["hosts"]]}


def _beat(watcher: Watcher, every_s: float) -> None:
    """Print heartbeat lines for the callback plugin, as long as the playbook runs."""
    parent, heartbeats = os.getppid(), HeartbeatLines(every_s)
    while os.getppid() == parent:
        for line in heartbeats.hear(watcher.look()):
            _say(sys.stdout, line)
        time.sleep(min(1.0, every_s / 2))


def _say(stream: TextIO, text: str) -> None:
    with contextlib.suppress(BrokenPipeError):
        stream.write(f"{text}\n")
        stream.flush()
        return
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
    raise KeyboardInterrupt
