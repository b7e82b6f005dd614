"""What ours raise where the caller can do something about it: the message names the value, the cause and the remedy.

`rackproof.main` makes a line on stderr and an exit code of whatever of it nobody caught.
"""

from __future__ import annotations

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
