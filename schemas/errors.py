"""Errors that the operator can fix. The message names the wrong value, the cause and the remedy.

If such an error is not caught, `rackproof.main` prints its message on stderr and exits with its code.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar

TROUBLE, USAGE, DEFECT, WRITE, HELD, INTERRUPTED = 2, 64, 70, 74, 75, 130
"""Exit codes of `rackproof` for errors. TROUBLE is also the code of an incomplete run."""


class RackproofError(Exception):
    """Base class of errors that the operator can fix."""

    exit_code: ClassVar[int] = TROUBLE


class UsageError(RackproofError):
    """The operator's input is wrong."""

    exit_code = USAGE


class RunError(RackproofError):
    """A run directory cannot be used, for example because it is missing or incomplete."""


class HeldError(RunError):
    """Another process or run has locked the run or the host, or the run was stopped on this host.

    The message says what to do.
    """

    exit_code = HELD


class WriteError(RackproofError):
    """The report could not be written or uploaded. Files at its destination may be from an earlier judgement, or incomplete."""

    exit_code = WRITE


@contextlib.contextmanager
def writing(directory: Path) -> Iterator[None]:
    """Context manager that converts an OSError from writing in `directory` to a WriteError."""
    try:
        yield
    except OSError as error:
        # If a directory has the name of the file, `rename` fails, and `error.filename2` is that name. `error.filename` may be
        # the name of a temporary file.
        raise WriteError(
            f"{error.filename2 or directory}: {error.strerror or error}; the report is old or incomplete; free disk space, or "
            "use an account with write permission, then run rackproof report again"
        ) from None


def printable(text: str) -> str:
    """Return `text` with its control and format characters escaped, except line breaks and tabs.

    Messages repeat texts and file names of hosts, which must not control the terminal of the operator.
    """
    if text.isprintable():
        return text
    return "".join(
        character if character.isprintable() or character in "\n\t" else character.encode("unicode_escape").decode()
        for character in text
    )
