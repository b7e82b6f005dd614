"""Show the progress of long work on a terminal. Without a terminal, or outside the context `progress_bar`, nothing is written."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import time
from collections.abc import Iterator
from typing import TextIO

DELAY_S = 1.0
"""Work that takes less time than this shows no bar."""
_REFRESH_S = 0.1
"""Minimum time between two drawings."""


class _Bar:
    """A bar on a terminal. Forked processes advance it too, but only the process that created the bar draws it."""

    def __init__(self, stream: TextIO) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        # No thread refreshes the bar, because a fork of a process that runs another thread may deadlock.
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            console=Console(file=stream, force_terminal=True, no_color=bool(os.environ.get("NO_COLOR")) or None),
            auto_refresh=False,
            transient=True,
            redirect_stdout=False,
            redirect_stderr=False,
        )
        self._counter = multiprocessing.get_context("fork").Value("L", 0)
        self._process = os.getpid()
        self._start = time.monotonic()
        self._drawn = 0.0
        self._task = self._progress.add_task("", total=None)

    def begin(self, label: str, total: int) -> None:
        self._counter.value = 0
        self._progress.update(self._task, description=label, total=total, completed=0)
        self.draw()

    def advance(self, count: int) -> None:
        with self._counter.get_lock():
            self._counter.value += count
        if os.getpid() == self._process:
            self.draw()

    def draw(self) -> None:
        now = time.monotonic()
        if now - self._start < DELAY_S or now - self._drawn < _REFRESH_S:
            return
        self._drawn = now
        self._progress.start()
        self._progress.update(self._task, completed=self._counter.value, refresh=True)

    def stop(self) -> None:
        self._progress.stop()


_active: _Bar | None = None


@contextlib.contextmanager
def progress_bar(stream: TextIO) -> Iterator[None]:
    """Draw a bar for the calls of `begin` and `advance` in this context, and remove it at the end.

    Nothing is drawn if the stream is not a terminal, if TERM is unset or `dumb`, or if an outer `progress_bar` draws already.
    """
    global _active
    if _active or not stream.isatty() or os.environ.get("TERM", "dumb") in ("", "dumb"):
        yield
        return
    _active = _Bar(stream)
    try:
        yield
    finally:
        _active.stop()
        _active = None


def begin(label: str, total: int) -> None:
    """Start a step of the work, with `total` items."""
    if _active:
        _active.begin(label, total)


def advance(count: int = 1) -> None:
    """Report that items of the step are finished. Forked processes may call this function too."""
    if _active:
        _active.advance(count)


def draw() -> None:
    """Draw the progress that forked processes have reported. Call this function while waiting for these processes."""
    if _active:
        _active.draw()
