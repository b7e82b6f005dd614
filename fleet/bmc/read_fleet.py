"""Read the BMCs of many hosts at once. If a BMC hangs, only its own readings are lost."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Iterable, Iterator

from fleet.bmc.ipmi_reading import read_ipmi
from fleet.bmc.readings import Readings, unreadable
from fleet.bmc.redfish_reading import Marks, read_redfish
from fleet.bmc.target import IPMI, BmcError, BmcTarget
from schemas.records import Metric

DEADLINE_S = 120.0
"""Maximum time in seconds to read one BMC. BMCs of GB200 trays need up to a minute."""
GRACE_S = 2.0
"""Time in seconds after the deadline in which a thread may still return its readings."""
WORKERS = 128
"""Maximum number of BMCs that are read at once."""

Job = tuple[BmcTarget, Marks | None]
Result = tuple[BmcTarget, tuple[Metric, ...], float]
"""A BMC, its readings, and how many seconds it took to read it."""


def read_bmc(target: BmcTarget, marks: Marks | None, deadline: float) -> Readings:
    """Return the readings of a BMC, read by the protocol of `target`. Raises BmcError."""
    return (read_ipmi if target.protocol == IPMI else read_redfish)(target, marks, deadline)


def read_all(jobs: Iterable[Job], deadline_s: float = DEADLINE_S) -> Iterator[Result]:
    """Yield the readings of each BMC as they arrive.

    Each BMC is read in a daemon thread with a deadline. A thread that does not return in time is abandoned, because no client can
    interrupt a name lookup that hangs.
    """
    pending = list(jobs)
    results: queue.Queue[Result] = queue.Queue()
    began: dict[str, tuple[BmcTarget, float]] = {}
    while pending or began:
        while pending and len(began) < WORKERS:
            target, marks = pending.pop(0)
            began[target.host] = target, time.monotonic()
            threading.Thread(target=_read_one, args=(target, marks, deadline_s, results), daemon=True).start()
        try:
            result = results.get(timeout=0.2)
        except queue.Empty:
            result = None
        if result and result[0].host in began:
            del began[result[0].host]
            yield result
        for host, (target, start) in list(began.items()):
            if time.monotonic() > start + deadline_s + GRACE_S:
                del began[host]
                yield target, unreadable(f"no complete answer within {deadline_s:g} s"), deadline_s


def _read_one(target: BmcTarget, marks: Marks | None, deadline_s: float, results: queue.Queue[Result]) -> None:
    start = time.monotonic()
    try:
        metrics = read_bmc(target, marks, start + deadline_s).metrics()
    except BmcError as error:
        metrics = unreadable(str(error))
    except Exception as error:  # noqa: BLE001 - whatever a BMC answers, the other BMCs must be read
        metrics = unreadable(f"answers with unexpected data ({type(error).__name__})")
    results.put((target, metrics, time.monotonic() - start))
