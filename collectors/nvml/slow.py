"""Readings for which the driver takes long. An exporter has them read in the background, so that no scrape waits for them.

The counters of 18 NVLinks take 46 ms a GPU, its energy 3 ms, and what else is marked so 0.3 ms each, where most take 0.01 ms
(measured, H200, R580; beside a training three times that); and the driver serves one GPU after the other.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial

from collectors.base import Absent
from collectors.nvml.beside import Answer
from collectors.nvml.gpu import Gpu
from collectors.nvml.readings import SLOW_KINDS, Told, slow_readings

SLOW_S = 300.0
"""What is older is read anew: 0.17 s of a processor a GPU beside a training, 0.06 % of it."""
STALE_S = 900.0
"""What is older is no reading any more."""


class Slow:
    """What the slow getters of one GPU gave last."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._told: Sequence[Told] = ()
        self._at = self._asked = 0.0
        self._answer: Answer[Sequence[Told]] | None = None

    def read(self, gpu: Gpu, *, wait: bool) -> Sequence[Told]:
        """What is known; where that is older than SLOW_S it is asked for anew, and told once it is there.

        Args:
            wait: no later than now: NVML may be closed after this.
        """
        now = self._clock()
        if self._answer and not self._answer.is_alive():
            value, self._at, self._answer = self._answer.value, self._asked, None
            self._told = _all(value) if isinstance(value, Absent) else value
        old = now - self._at > SLOW_S
        unasked = self._answer is None and now - self._at > STALE_S  # nobody came for so long: no fault of the driver's
        if not self._told or unasked or (wait and old):
            self._told, self._at = _ask(gpu), now
        elif old and self._answer is None:
            self._asked, self._answer = now, Answer(partial(_ask, gpu.again()))
        if now - self._at > STALE_S:
            return _all(Absent(status="error", reason=f"no answer for {now - self._at:.0f} s"))
        return self._told


def _ask(gpu: Gpu) -> list[Told]:
    return list(slow_readings(gpu))


def _all(why: Absent) -> list[Told]:
    return [(kind.name, place, why) for kind in SLOW_KINDS for place in kind.places]
