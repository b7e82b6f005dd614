"""Base class of the supervisor's threads that run as long as the ranks of a launch."""

from __future__ import annotations

import threading
from typing import TypeVar

GRACE_S = 5.0
"""Seconds to wait for the thread at the end of the launch."""
Self = TypeVar("Self", bound="LaunchThread")


class LaunchThread(threading.Thread):
    """A driver or a disk that blocks this thread does not block the supervisor. The thread is a context manager.

    At the end of the context, `_ended` is set, and `run` must then return. The supervisor waits up to GRACE_S for that. If the
    context ends with an exception, for example because of SIGTERM, the supervisor does not wait: the sender of the signal
    may send SIGKILL after a few seconds.
    """

    def __init__(self, name: str) -> None:
        super().__init__(name=name, daemon=True)
        self._ended = threading.Event()

    def __enter__(self: Self) -> Self:
        self.start()
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        self._ended.set()
        if kind is None:
            self.join(timeout=GRACE_S)
