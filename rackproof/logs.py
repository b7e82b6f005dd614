"""Logging of the command: one line per record, plus a traceback if it has one, on standard error."""

from __future__ import annotations

import contextlib
import logging
import sys


class _StandardError(logging.Handler):
    """A handler that uses the current `sys.stderr` for each record, so that a later redirection takes effect."""

    def emit(self, record: logging.LogRecord) -> None:
        with contextlib.suppress(OSError):  # standard error may be closed; the command continues
            print(self.format(record), file=sys.stderr, flush=True)


def configure_logging() -> None:
    """Log INFO and above to standard error."""
    root = logging.getLogger()
    if not any(isinstance(handler, _StandardError) for handler in root.handlers):
        root.addHandler(_StandardError())
    root.setLevel(logging.INFO)
