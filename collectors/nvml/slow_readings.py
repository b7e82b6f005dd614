"""Slow readings. An exporter reads them in the background, so that no scrape waits for them.

Per GPU, the counters of 18 NVLinks take 46 ms, the energy 3 ms, and other slow readings 0.3 ms each. Most other readings take
0.01 ms. (Measured on H200 with R580; during a training run all take three times as long.) The driver serves one GPU at a time.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial

from collectors.base import Absent
from collectors.deadline import PendingCall
from collectors.nvml.gpu import NvmlGpu
from collectors.nvml.readings import SLOW_KINDS, Sample, read_slow

REFRESH_S = 300.0
"""Age in seconds at which readings are refreshed. During a training run a refresh takes 0.17 s of CPU time per GPU, which is
0.06 % of one CPU."""
STALE_S = 900.0
"""Age in seconds from which readings are replaced by an error."""


class SlowReadings:
    """The newest slow readings of one GPU."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._samples: Sequence[Sample] = ()
        self._read_at = self._started_at = 0.0
        self._pending: PendingCall[Sequence[Sample]] | None = None

    def read(self, gpu: NvmlGpu, *, wait: bool) -> Sequence[Sample]:
        """Return the newest readings. If they are older than REFRESH_S, start a refresh, whose result a later call returns.

        The first call reads and waits for the result. So does a call if the newest readings are older than STALE_S and no refresh
        is running.

        Args:
            wait: wait for the refresh in this call, because NVML may be closed after the call.
        """
        now = self._clock()
        if self._pending and not self._pending.is_alive():
            value, self._read_at, self._pending = self._pending.value, self._started_at, None
            self._samples = _all_absent(value) if isinstance(value, Absent) else value
        is_old = now - self._read_at > REFRESH_S
        # If no refresh is running, no call to the driver hangs. So this call can wait for new readings.
        was_idle = self._pending is None and now - self._read_at > STALE_S
        if not self._samples or was_idle or (wait and is_old):
            self._samples, self._read_at = _read_all(gpu), now
        elif is_old and self._pending is None:
            self._started_at, self._pending = now, PendingCall(partial(_read_all, gpu.without_cache()))
        if now - self._read_at > STALE_S:
            return _all_absent(Absent.error(f"no answer for {now - self._read_at:.0f} s"))
        return self._samples


def _read_all(gpu: NvmlGpu) -> Sequence[Sample]:
    return list(read_slow(gpu))


def _all_absent(absent: Absent) -> list[Sample]:
    return [(kind.name, labels, absent) for kind in SLOW_KINDS for labels in kind.labels]
