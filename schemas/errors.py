"""What ours raise where the caller can do something about it: the message names the value, the cause and the remedy.

`rackproof.main` makes a line on stderr and an exit code of whatever of it nobody caught.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar


class RackproofError(Exception):
    """The root of them. What is none of them, nor of the operating system, is a defect of ours: exit code 70."""

    exit_code: ClassVar[int] = 2


class UsageError(RackproofError):
    """The operator's input is wrong."""

    exit_code = 64


class RunError(RackproofError):
    """A run directory cannot be used: absent, incomplete."""


class HeldError(RunError):
    """Somebody else carries out this run, or has this host: the message says who, since when, and what to do."""

    exit_code = 75


class WriteError(RackproofError):
    """What was judged could not be written: the caller must take nothing that lies there for it."""

    exit_code = 74


@contextlib.contextmanager
def writing(directory: Path) -> Iterator[None]:
    """Makes a WriteError of what keeps files from being written in `directory`."""
    try:
        yield
    except OSError as error:
        raise WriteError(
            f"{directory}: {error.strerror or error}: the report there is old, or not whole: make room, or write as a user who "
            "may, and report again"
        ) from None
