"""Draw full screens on a terminal and restore it afterwards, with plain ANSI sequences."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from types import FrameType
from typing import TextIO

ENTER = "\x1b[?1049h\x1b[?25l\x1b[2J"
LEAVE = "\x1b[?25h\x1b[?1049l"
"""Alternate screen and cursor visibility."""
BEGIN, END = "\x1b[?2026h", "\x1b[?2026l"
"""Synchronized output of one frame; terminals without it ignore the sequence."""

POLL_S = 0.1


def is_screen(stream: TextIO) -> bool:
    """Return whether the stream is a terminal that can show a screen."""
    return stream.isatty() and os.environ.get("TERM", "dumb") not in ("", "dumb")


def has_colour() -> bool:
    """Return whether colours are wanted (https://no-color.org)."""
    return not os.environ.get("NO_COLOR")


class Screen:
    """Draw whole screens without flicker: each line overwrites the old one and clears the rest of it."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._woken = False

    @property
    def size(self) -> tuple[int, int]:
        """Return the current columns and rows."""
        with contextlib.suppress(OSError, ValueError):
            parsed = os.get_terminal_size(self._stream.fileno())
            if parsed.columns and parsed.lines:
                return parsed.columns, parsed.lines
        return 80, 24

    def draw(self, lines: Sequence[str]) -> None:
        """Show these lines, which must fit."""
        body = "\x1b[K\r\n".join(lines)
        self._write(f"{BEGIN}\x1b[H{body}\x1b[K\x1b[J{END}")

    def wait(self, seconds: float) -> None:
        """Wait, or until the window is resized."""
        ends = time.monotonic() + seconds
        while not self._woken and (rest := ends - time.monotonic()) > 0:  # a handler may not set a threading.Event
            time.sleep(min(POLL_S, rest))
        self._woken = False

    def _write(self, text: str) -> None:
        self._stream.write(text)
        self._stream.flush()

    @contextlib.contextmanager
    def shown(self) -> Iterator[Screen]:
        """Use the alternate screen and restore the terminal on any exit: Ctrl-C, SIGTERM, a lost connection, Ctrl-Z."""
        handlers = {
            signal.SIGTERM: self._end,
            signal.SIGHUP: self._end,
            signal.SIGWINCH: self._wake,
            signal.SIGTSTP: self._pause,
        }
        before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
        try:
            self._write(ENTER)
            yield self
        finally:
            with contextlib.suppress(OSError, ValueError):
                self._write(LEAVE)
            for number, handler in before.items():
                signal.signal(number, handler)

    def _end(self, number: int, frame: FrameType | None) -> None:
        sys.exit(128 + number)

    def _wake(self, number: int, frame: FrameType | None) -> None:
        self._woken = True

    def _pause(self, number: int, frame: FrameType | None) -> None:
        """Handle Ctrl-Z: restore the shell's screen; `fg` shows ours again."""
        os.write(self._stream.fileno(), LEAVE.encode())
        os.kill(os.getpid(), signal.SIGSTOP)
        os.write(self._stream.fileno(), ENTER.encode())
        self._woken = True
