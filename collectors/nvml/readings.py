"""All readings of a GPU, and the functions that take them."""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping
from typing import NamedTuple

from collectors.base import Absent, Family, Labels, Value
from collectors.nvml.calls import ResetRequired, decode, try_read
from collectors.nvml.clocks import ANY_THERMAL, THROTTLE_REASONS, THROTTLE_TIMES, throttle_times, throttling
from collectors.nvml.fabric import FABRIC_ROWS
from collectors.nvml.gpm import GPM_KINDS
from collectors.nvml.gpu import NvmlGpu
from collectors.nvml.identity import IDENTITY_ROWS
from collectors.nvml.links import ACTIVE, LINK_KINDS, LINK_ROWS, link_readings, link_states
from collectors.nvml.memory import MEMORY_ROWS
from collectors.nvml.power import POWER_ROWS
from collectors.nvml.rows import CONSTANT, COUNTER, ONCE, SLOW, SNAPSHOT_ONLY, VARIES, Row
from collectors.nvml.settings import RECOVERY, RESET, SETTINGS_ROWS

GPU_READINGS: tuple[Row, ...] = (*IDENTITY_ROWS, *POWER_ROWS, *SETTINGS_ROWS, *MEMORY_ROWS, *LINK_ROWS, *FABRIC_ROWS)


class ReadingKind(NamedTuple):
    """Declaration of a family. If a GPU does not answer, the family has one absent reading for each set of labels in `labels`."""

    name: str
    unit: str
    change: str
    help: str
    labels: tuple[Labels, ...] = ({},)
    signed: bool = False

    def family(self, label_names: tuple[str, ...]) -> Family:
        """Return the family without readings."""
        return Family(
            name=self.name,
            unit=self.unit,
            help=self.help,
            counter=self.change == COUNTER,
            varies=self.change == VARIES,
            signed=self.signed,
            labels=label_names,
        )


def _kind(row: Row) -> ReadingKind:
    return ReadingKind(*row[:4], signed=row.signed)


UUID = ReadingKind("gpu.uuid", "1", CONSTANT, "UUID of the GPU")
THROTTLE_ACTIVE = ReadingKind("gpu.throttle.active", "1", VARIES, "Clocks are throttled for this reason",
                              tuple({"reason": reason} for reason in THROTTLE_REASONS))  # fmt: skip
THROTTLE_TIME = ReadingKind("gpu.throttle.time", "s", COUNTER, "Time for which clocks were throttled for this reason",
                            tuple({"reason": reason} for reason in (*THROTTLE_TIMES, ANY_THERMAL)))  # fmt: skip
Sample = tuple[str, Labels, Value | Absent]
"""Name of a reading; its labels other than `gpu` and `uuid`; its value."""


SLOW_KINDS = (
    *(_kind(row) for row in GPU_READINGS if row.pace == SLOW),
    THROTTLE_TIME,
    *(ReadingKind(*kind[:4]) for kind in LINK_KINDS),
)
"""Readings that an exporter takes in the background."""


def reading_kinds(full_snapshot: bool, counters: bool = False) -> list[ReadingKind]:
    """Return the kind of every family, in the order of the output. With `counters`, include GPM_KINDS."""
    rows = [_kind(row) for row in GPU_READINGS if full_snapshot or row.pace != SNAPSHOT_ONLY]
    links = [ReadingKind(*kind[:4]) for kind in (ACTIVE, *LINK_KINDS, *(GPM_KINDS if counters else ()))]
    return [UUID, *rows, THROTTLE_ACTIVE, THROTTLE_TIME, *links]


def absent_samples(absent: Absent, full_snapshot: bool, counters: bool = False) -> list[Sample]:
    """Return the samples of a GPU that does not answer: each is `absent`."""
    return [(kind.name, labels, absent) for kind in reading_kinds(full_snapshot, counters) for labels in kind.labels]


def with_required_reset(samples: list[Sample]) -> list[Sample]:
    """Return the samples of one GPU. If the driver refuses any reading until a reset, set `gpu.recovery_action` to `gpu_reset`.

    This is needed because drivers before R570 report no recovery action. If the driver reports an action other than `none`, that
    action is kept.
    """
    if not any(isinstance(value, ResetRequired) for _, _, value in samples):
        return samples
    return [
        (name, labels, RESET if name == RECOVERY and (isinstance(value, Absent) or value == "none") else value)
        for name, labels, value in samples
    ]


def read_uuid(gpu: NvmlGpu) -> str | Absent:
    """Return the GPU's UUID."""
    uuid: str | Absent = try_read(lambda: decode(gpu.query("UUID")))
    return uuid


def read_samples(gpu: NvmlGpu, full_snapshot: bool, constants: MutableMapping[str, Value]) -> Iterator[Sample]:
    """Yield the samples of one GPU. Without `full_snapshot`, leave out SLOW_KINDS and the readings of pace SNAPSHOT_ONLY.

    `constants` is a cache for the values of pace ONCE.
    """
    yield UUID.name, {}, read_uuid(gpu)
    for row in GPU_READINGS:
        if row.pace in (SLOW, SNAPSHOT_ONLY) and not full_snapshot:
            continue
        if row.name in constants:
            yield row.name, {}, constants[row.name]
            continue
        value = try_read(lambda: row.get(gpu))  # noqa: B023
        if row.pace == ONCE and not isinstance(value, Absent):
            constants[row.name] = value
        yield row.name, {}, value
    for reason, is_active in throttling(gpu):
        yield THROTTLE_ACTIVE.name, {"reason": reason}, is_active
    yield from link_states(gpu)
    if full_snapshot:
        yield from _slow_series(gpu)


def read_slow(gpu: NvmlGpu) -> Iterator[Sample]:
    """Yield the samples of SLOW_KINDS, which `read_samples` leaves out without `full_snapshot`."""
    for row in GPU_READINGS:
        if row.pace == SLOW:
            yield row.name, {}, try_read(lambda: row.get(gpu))  # noqa: B023
    yield from _slow_series(gpu)


def _slow_series(gpu: NvmlGpu) -> Iterator[Sample]:
    """Yield the slow readings with several values per GPU."""
    for reason, seconds in throttle_times(gpu):
        yield THROTTLE_TIME.name, {"reason": reason}, seconds
    yield from link_readings(gpu)
