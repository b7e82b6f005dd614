"""Run calls in parallel with a common deadline. Their starts are staggered (STAGGER_S)."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, MutableMapping
from typing import Any, Generic, TypeVar

from collectors.base import Absent, ReadingError

K = TypeVar("K")
T = TypeVar("T")
STAGGER_S = 0.05
"""Longest wait between the starts of two successive calls, in seconds. The next call starts earlier if the previous call ends
earlier. Calls that start together compete for the interpreter lock, which costs CPU time."""


class PendingCall(threading.Thread, Generic[T]):
    """A call in a daemon thread, so that a call that never returns does not keep the process alive."""

    def __init__(self, function: Callable[[], T]) -> None:
        super().__init__(daemon=True)
        self._function = function
        self.value: T | Absent = Absent.error("no answer")
        self.start()

    def run(self) -> None:
        try:
            self.value = self._function()
        except ReadingError as error:
            self.value = error.absent
        except Exception as error:  # noqa: BLE001 - a failure must not affect the other calls
            self.value = Absent.error(f"{type(error).__name__}: {error}")


def call_with_deadline(
    functions: Mapping[K, Callable[[], T]],
    deadline_s: float,
    stuck: MutableMapping[K, PendingCall[Any]] | None = None,
) -> dict[K, T | Absent]:
    """Return the result of each function, or an `Absent` with the reason for its failure.

    Args:
        functions: key (e.g. the index of a GPU) -> function.
        deadline_s: shared by all functions.
        stuck: key -> call that exceeded its deadline; updated here. Pass the same dictionary every time: a function whose earlier
            call still runs is then not called again, and its result is an `error`.
    """
    stuck = {} if stuck is None else stuck
    for key in [key for key, call in stuck.items() if not call.is_alive()]:
        del stuck[key]
    end = time.monotonic() + deadline_s
    # The last call must have at least half of the deadline.
    stagger_s = min(STAGGER_S, deadline_s / 2 / max(1, len(functions)))
    calls: dict[K, PendingCall[T]] = {}
    for key in [key for key in functions if key not in stuck]:
        calls[key] = PendingCall(functions[key])
        calls[key].join(stagger_s)
    for key, call in calls.items():
        call.join(max(0.0, end - time.monotonic()))
        if call.is_alive():
            stuck[key] = call
    late = Absent.error(f"no answer within {deadline_s:g} s")
    return {key: late if key in stuck else calls[key].value for key in functions}
