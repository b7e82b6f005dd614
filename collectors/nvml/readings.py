"""Every reading of a GPU: what it is called, and how it is taken."""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping
from typing import NamedTuple

from collectors.base import Absent, Labels, Value
from collectors.nvml.calls import read, text
from collectors.nvml.clocks import ANY_THERMAL, THROTTLE_REASONS, THROTTLE_TIMES, throttle_times, throttling
from collectors.nvml.fabric import FABRIC_ROWS
from collectors.nvml.gpm import GPM_KINDS
from collectors.nvml.gpu import Gpu
from collectors.nvml.identity import IDENTITY_ROWS
from collectors.nvml.links import ACTIVE, LINK_KINDS, LINK_ROWS, link_readings, link_states
from collectors.nvml.memory import MEMORY_ROWS
from collectors.nvml.power import POWER_ROWS
from collectors.nvml.rows import ONCE, SLOW, THOROUGH, Row
from collectors.nvml.settings import SETTINGS_ROWS

GPU_READINGS: tuple[Row, ...] = (*IDENTITY_ROWS, *POWER_ROWS, *SETTINGS_ROWS, *MEMORY_ROWS, *LINK_ROWS, *FABRIC_ROWS)


class Kind(NamedTuple):
    """The head of a family. `places` are the labels under which a GPU that does not answer is told."""

    name: str
    unit: str
    counter: bool
    help: str
    places: tuple[Labels, ...] = ({},)


UUID = Kind("gpu.uuid", "1", False, "UUID of the GPU")
THROTTLE_ACTIVE = Kind("gpu.throttle.active", "1", False, "Clocks are held down for this reason",
                       tuple({"reason": reason} for reason in THROTTLE_REASONS))  # fmt: skip
THROTTLE_TIME = Kind("gpu.throttle.time", "s", True, "For how long clocks were held down for this reason",
                     tuple({"reason": reason} for reason in (*THROTTLE_TIMES, ANY_THERMAL)))  # fmt: skip
Told = tuple[str, Labels, Value | Absent]
"""Name, labels beyond the GPU's own, and what was read."""


SLOW_KINDS = (
    *(Kind(*row[:4]) for row in GPU_READINGS if row.pace == SLOW),
    THROTTLE_TIME,
    *(Kind(*kind[:4]) for kind in LINK_KINDS),
)
"""What an exporter has read in the background."""


def kinds(thorough: bool, counters: bool = False) -> list[Kind]:
    """Every family, in the order in which they are told; `counters`: GPM's too."""
    rows = [Kind(*row[:4]) for row in GPU_READINGS if thorough or row.pace != THOROUGH]
    more = [Kind(*kind[:4]) for kind in (ACTIVE, *LINK_KINDS, *(GPM_KINDS if counters else ()))]
    return [UUID, *rows, THROTTLE_ACTIVE, THROTTLE_TIME, *more]


def unanswered(why: Absent, thorough: bool, counters: bool = False) -> list[Told]:
    """What is told of a GPU that does not answer."""
    return [(kind.name, place, why) for kind in kinds(thorough, counters) for place in kind.places]


def uuid(gpu: Gpu) -> str | Absent:
    """The GPU's own name."""
    known: str | Absent = read(lambda: text(gpu.ask("UUID")))
    return known


def everything(gpu: Gpu, thorough: bool, kept: MutableMapping[str, Value | Absent]) -> Iterator[Told]:
    """All that one GPU tells, without what is slow unless `thorough`. `kept` has what never changes, and is added to."""
    yield UUID.name, {}, uuid(gpu)
    for row in GPU_READINGS:
        if row.pace in (SLOW, THOROUGH) and not thorough:
            continue
        if row.name not in kept:
            seen = read(lambda: row.get(gpu))  # noqa: B023
            if row.pace == ONCE and not (isinstance(seen, Absent) and seen.status == "error"):
                kept[row.name] = seen
            yield row.name, {}, seen
        else:
            yield row.name, {}, kept[row.name]
    for reason, held in throttling(gpu):
        yield THROTTLE_ACTIVE.name, {"reason": reason}, held
    yield from link_states(gpu)
    if thorough:
        yield from _apart(gpu)


def slow_readings(gpu: Gpu) -> Iterator[Told]:
    """What `everything` leaves out because it is slow."""
    for row in GPU_READINGS:
        if row.pace == SLOW:
            yield row.name, {}, read(lambda: row.get(gpu))  # noqa: B023
    yield from _apart(gpu)


def _apart(gpu: Gpu) -> Iterator[Told]:
    """Slow readings of which a GPU has several."""
    for reason, seconds in throttle_times(gpu):
        yield THROTTLE_TIME.name, {"reason": reason}, seconds
    yield from link_readings(gpu)
