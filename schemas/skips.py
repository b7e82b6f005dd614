"""The reason of skipped observations, in the form that the host writes and the control node reads."""

from __future__ import annotations

IN_USE = "busy: "
"""Start of the reason of an observation that was skipped because the host is in use. The user of the host follows."""


def skipped_for(user: str) -> str:
    """Return the reason of an observation that is skipped because `user` uses the host."""
    return f"{IN_USE}{user}"


def user_of(reason: str) -> str:
    """Return who uses the host, or an empty string if the observation was skipped for another reason."""
    return reason.removeprefix(IN_USE) if reason.startswith(IN_USE) else ""
