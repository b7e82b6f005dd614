"""`rackproof watch`: arguments to calls, and the loops."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
import time
from pathlib import Path
from typing import TextIO

from fleet.watch.lines import Beats, changes
from fleet.watch.screen import render
from fleet.watch.terminal import Screen, has_colour, is_screen
from fleet.watch.view import View
from fleet.watch.watcher import Watcher
from schemas.errors import UsageError

INTERRUPTED = 130
BEAT_S = 30.0
PLAIN_COLUMNS = 160


def add_verb(verbs: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add watch to the command."""
    watch = verbs.add_parser(
        "watch",
        help="a run as it goes on: hosts and stages, how far each is, what was found so far",
        description="Shows a run as it goes on, to anybody who may read its directory. On a terminal it is one screen, "
        "drawn again and again until the run is reported; elsewhere a line for each change. Times are UTC.",
        epilog="example: rackproof watch runs/20261121T040000Z; for a program: rackproof watch runs/rack12 --once --json",
    )
    watch.add_argument("run_dir", type=Path, help="directory of the run")
    watch.add_argument("--once", action="store_true", help="print how the run stands, and end")
    watch.add_argument("--json", action="store_true", help="as JSON: one document a line, each time something changed")
    watch.add_argument("--lines", action="store_true", help="lines also on a terminal")
    watch.add_argument("--every", type=float, default=2.0, help="seconds between two looks (default: %(default)g)")
    watch.add_argument(
        "--no-judge",
        action="store_true",
        help="do not judge the records fetched so far, which takes about a second of a processor for each",
    )
    watch.add_argument("--no-ask", action="store_true", help="do not ask the hosts' exporters how far they are")
    watch.add_argument("--beats", type=float, help=argparse.SUPPRESS)  # for the playbook's own terminal
    watch.set_defaults(call=call)


def call(options: argparse.Namespace) -> int:
    """Run the verb."""
    if not 0.1 <= options.every <= 3600:
        raise UsageError(f"--every {options.every:g}: give 0.1 to 3600 seconds")
    watcher = Watcher(options.run_dir, judging=not options.no_judge and not options.beats, asking=not options.no_ask)
    reconfigure = getattr(sys.stdout, "reconfigure", None)
    if reconfigure:  # a terminal that knows no `…` shows a question mark
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
    """Until the run is reported; what it came to then stays on the terminal."""
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
    """A line for each change, until nobody carries out the run any more."""
    old: View | None = None
    beats = Beats(BEAT_S)
    while True:
        view = watcher.look()
        if view.over:  # the last line says all that there is to say
            view = watcher.look(background=False)
        if as_json:
            if old is None or _shown(view) != _shown(old):
                _say(sys.stdout, json.dumps(view.json()))
        else:
            for line in [*changes(old, view), *beats.hear(view)]:
                _say(sys.stdout, line)
        old = view
        if view.over:
            return
        time.sleep(every_s)


def _shown(view: View) -> dict[str, object]:
    """What of a view is worth telling: not the time alone."""
    told = {key: value for key, value in view.json().items() if key not in ("at", "judged")}
    return {**told, "hosts": [{**host, "heard": None, "left_s": None} for host in told["hosts"]]}


def _beat(watcher: Watcher, every_s: float) -> None:
    """For the callback plugin, as long as the playbook that began this lives."""
    parent, beats = os.getppid(), Beats(every_s)
    while os.getppid() == parent:
        for line in beats.hear(watcher.look()):
            _say(sys.stdout, line)
        time.sleep(min(1.0, every_s / 2))


def _say(stream: TextIO, text: str) -> None:
    with contextlib.suppress(BrokenPipeError):
        stream.write(f"{text}\n")
        stream.flush()
        return
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
    raise KeyboardInterrupt
