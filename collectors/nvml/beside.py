"""Several questions, each with a thread of its own: one that gets no answer costs the others next to nothing."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, MutableMapping
from typing import Generic, TypeVar

from collectors.base import Absent
from collectors.nvml.calls import UnreadError

T = TypeVar("T")
PATIENCE_S = 0.05
"""Before the next is asked beside it. At once they would only fight for the interpreter; the driver serves one by one anyway."""


class Answer(threading.Thread, Generic[T]):
    """One question being asked. A daemon: a call that never returns must not keep the process."""

    def __init__(self, ask: Callable[[], T]) -> None:
        super().__init__(daemon=True)
        self._ask = ask
        self.value: T | Absent = Absent(status="error", reason="no answer")
        self.start()

    def run(self) -> None:
        try:
            self.value = self._ask()
        except UnreadError as missing:
            self.value = missing.absent
        except Exception as error:  # noqa: BLE001 - whatever one GPU runs into is its own result, and a named one
            self.value = Absent(status="error", reason=f"{type(error).__name__}: {error}")


def side_by_side(
    questions: Mapping[int, Callable[[], T]], deadline_s: float, stuck: MutableMapping[int, Answer[T]]
) -> dict[int, T | Absent]:
    """The answer to each question, or why there is none.

    Args:
        questions: by the GPU that they are put to.
        deadline_s: for all of them together.
        stuck: kept from call to call; a GPU that still has not answered an earlier one is not asked again.
    """
    late = Absent(status="error", reason=f"no answer within {deadline_s:g} s")
    for gpu in [gpu for gpu, answer in stuck.items() if not answer.is_alive()]:
        del stuck[gpu]
    # Of so many GPUs that the last would be asked late, it has half the deadline.
    ends, patience_s = time.monotonic() + deadline_s, min(PATIENCE_S, deadline_s / 2 / max(1, len(questions)))
    asked = {}
    for gpu in [gpu for gpu in questions if gpu not in stuck]:
        asked[gpu] = Answer(questions[gpu])
        asked[gpu].join(patience_s)
    for gpu, answer in asked.items():
        answer.join(max(0.0, ends - time.monotonic()))
        if answer.is_alive():
            stuck[gpu] = answer
    return {gpu: late if gpu in stuck else asked[gpu].value for gpu in questions}
