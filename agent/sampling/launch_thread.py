"""A thread that works while the ranks of a launch run."""

from __future__ import annotations

import threading
from typing import TypeVar

GRACE_S = 5.0
"""How long to wait for the thread at the end of the launch."""
Self = TypeVar("Self", bound="LaunchThread")


class LaunchThread(threading.Thread):
    """Context manager with a thread, so that a driver or a disk that blocks does not delay the supervisor.

    When the context ends, the thread is asked to end, and the supervisor waits up to GRACE_S for it. After an exception, for
    example because of SIGTERM, the supervisor does not wait: the process that sent the signal may wait only a few seconds.
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
