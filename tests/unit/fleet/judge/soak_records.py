"""Records of soaks for the tests of the judge. A soak repeats benchmarks in rounds, and each round is a launch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from schemas.records import Record
from schemas.timeline import Event, Series, Soak, Timeline
from tests import builders


def soak_record(
    numbers: tuple[int, ...],
    finished: int,
    series: tuple[Series, ...] = (),
    events: tuple[Event, ...] = (),
    **fields: Any,
) -> Callable[[Record], Record]:
    """Return a change that adds a soak of host h2, which has two GPUs, to a record.

    The record of a soak need not keep all launches, but at least the first one and the last three.

    Args:
        numbers: rounds whose launches the record has.
        finished: number of finished rounds that the record states.
        series: series of the timeline.
        events: events of the timeline.
        fields: other fields of the soak.
    """
    soak = Soak(
        began=builders.WHEN,
        planned_s=60.0,
        soaked_s=60.0,
        finished=finished,
        timeline=Timeline(bucket_s=1.0, series=series, events=events),
        **fields,
    )
    kept = tuple(replace(builders.launch("soak", ("h2",), devices=2), number=number) for number in numbers)
    return lambda record: replace(record, launches=(*record.launches, *kept), soak=soak)
