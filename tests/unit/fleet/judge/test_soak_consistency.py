"""The record of a soak is inconclusive if its rounds, its times and the series of its timeline contradict each other.

A soak repeats benchmarks in rounds, and each round is a launch. Its timeline has a series of every figure and reading.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache

import pytest

from fleet.judge.criteria import read_packs
from fleet.judge.host_view import HostView
from fleet.judge.judge import host_views
from fleet.judge.soak_consistency import soak_problems
from fleet.records.load import load
from schemas.records import ERROR, Launch, Observation, Record
from schemas.stages import SOAK
from schemas.timeline import Event, Series, Soak
from tests import ROOT, builders
from tests.unit.fleet.judge.soak_records import soak_record

PACKS = read_packs([])
PLAN = builders.plan("h1", "h2", profile="smoke", gpu_count=2)
LATER = "2026-11-21T04:00:10Z"
Change = Callable[[Record], Record]


def reasons(change: Change) -> list[str]:
    """Return what `soak_problems` finds in the host record of h2 after the change, which adds a soak."""
    evidence = builders.evidence(PLAN)
    view = next(item for item in host_views(PLAN, evidence, PACKS) if item.host.name == "h2")
    problems = list(soak_problems(view, change(evidence["h2"].records[0])))
    assert {(name, scope, stage) for name, scope, _, stage in problems} <= {("stage.soak", "host", SOAK)}
    return [reason for _, _, reason, _ in problems]


REPLAY = Event(at_s=1.0, until_s=2.0, name="gpu.pcie.replays", scope="gpu=0", count=1)
POWER = Series(name="gpu.power", scope="gpu=0", unit="W")
ROUNDS: dict[str, tuple[Change, list[str]]] = {
    "no soak": (lambda record: record, []),
    "few rounds": (soak_record((1, 2), 2), []),
    "nine rounds, of which the launches of four are kept": (soak_record((1, 7, 8, 9), 9), []),
    "series of two GPUs": (soak_record((1,), 1, (POWER, replace(POWER, scope="gpu=1"))), []),
    "more launches than rounds": (
        soak_record((1, 2, 3), 2),
        [
            "the record has launches of 3 finished rounds, but states that only 2 rounds finished",
            "the record has a launch of round 3, but only 2 rounds ended or were cut off",
        ],
    ),
    "one of the last three launches is missing": (
        soak_record((1, 8, 9), 9),
        ["9 rounds finished, but the record has only 3 launches, expected at least 4"],
    ),
    "the same round twice": (soak_record((1, 2, 2, 3), 4), ["the rounds are not in order: 1, 2, 2, 3"]),
    "two rounds exchanged": (soak_record((2, 1), 2), ["the rounds are not in order: 2, 1"]),
    "a round that was cut off": (soak_record((1, 3), 2, cut=1), []),
    "a launch of a round that the soak does not count": (
        soak_record((1, 3), 2),
        ["the record has a launch of round 3, but only 2 rounds ended or were cut off"],
    ),
    "end without a cause": (
        soak_record((1,), 1, ended=LATER),
        [f"the soak ended at {LATER}, but the record does not state what ended it"],
    ),
    "cause without an end": (
        soak_record((1,), 1, ended_by="time"),
        ["the soak was ended by time, but the record does not state when"],
    ),
    "the same event twice": (soak_record((1,), 1, (), (REPLAY, REPLAY)), ["the timeline has a duplicate event"]),
    "the same series twice": (soak_record((1,), 1, (POWER, POWER)), ["the timeline has a duplicate series"]),
    "the same series twice, with parameters in another order": (
        soak_record((1,), 1, (replace(POWER, params={"a": 1, "b": 2}), replace(POWER, params={"b": 2, "a": 1}))),
        ["the timeline has a duplicate series"],
    ),
}


@pytest.mark.parametrize("kind", ROUNDS)
def test_rounds_of_a_soak_must_be_in_order_and_complete(kind: str) -> None:
    change, expected = ROUNDS[kind]
    assert reasons(change) == expected


RATE, COPY = "stress.throughput", "memory.bandwidth"


@cache
def burn_in() -> tuple[HostView, Record]:
    """Return the host and the record of an accepted soak of seven rounds on one H200."""
    run = load(ROOT / "docs" / "measurements" / "h200x1-burnin")
    (view,) = host_views(run.plan, run.evidence, PACKS)
    (record,) = view.evidence.records
    return view, record


def problems(
    soak: Callable[[Soak], Soak] = lambda soak: soak,
    launches: Callable[[list[Launch]], list[Launch]] = lambda launches: launches,
    figure: Callable[[Observation], Observation] = lambda figure: figure,
) -> list[str]:
    """Return what `soak_problems` finds in the burn-in after changes of its soak, its launches and each of its figures."""
    view, record = burn_in()
    assert record.soak
    changed = replace(
        record,
        soak=soak(record.soak),
        launches=tuple(launches([*record.launches])),
        observations=tuple(map(figure, record.observations)),
    )
    return [f"{scope} {name}: {reason}" for name, scope, reason, _ in soak_problems(view, changed)]


def at(field: str, day: int) -> Callable[[Soak], Soak]:
    """Return a change that gives a time of the soak another day in November 2026. The soak ran on the 29th."""
    return lambda soak: replace(soak, **{field: getattr(soak, field).replace("-29T", f"-{day}T")})


def with_bucket(factor: float) -> Callable[[Soak], Soak]:
    return lambda soak: replace(soak, timeline=replace(soak.timeline, bucket_s=soak.timeline.bucket_s * factor))


def of_series(name: str, change: Callable[[Series], Series]) -> Callable[[Soak], Soak]:
    """Return a change of the series of one name."""

    def changed(soak: Soak) -> Soak:
        series = tuple(change(item) if item.name == name else item for item in soak.timeline.series)
        return replace(soak, timeline=replace(soak.timeline, series=series))

    return changed


TIMES: dict[str, tuple[Callable[[], list[str]], list[str]]] = {
    "unchanged": (problems, []),
    "beginning the day before": (
        lambda: problems(at("began", 28)),
        ["the soak began at 2026-11-28T05:56:06.631691Z, but the record begins at 2026-11-29T05:56:03.818715Z"],
    ),
    "beginning the day after": (
        lambda: problems(at("began", 30)),
        [
            "the soak began at 2026-11-30T05:56:06.631691Z and ended at 2026-11-29T06:06:30.074807Z, but states that it ran for "
            "624 s",
            "the soak began at 2026-11-30T05:56:06.631691Z, but its round 1 began at 2026-11-29T05:56:07.274466Z",
            "the soak ran for 624 s, but the last figure of the timeline was recorded after 620 s",
        ],
    ),
    "beginning four minutes before the first round, as if the first launch could not start": (
        lambda: problems(lambda soak: replace(soak, began=soak.began.replace("T05:56", "T05:52"))),
        [],
    ),
    "beginning five minutes before the record": (
        lambda: problems(lambda soak: replace(soak, began="2026-11-29T05:51:03.818715Z")),
        [],
    ),
    "series without values": (
        lambda: problems(of_series(RATE, lambda item: replace(item, at=(), n=(), low=(), mean=(), high=()))),
        [],
    ),
    "end the day after": (
        lambda: problems(at("ended", 30)),
        ["the soak ended at 2026-11-30T06:06:30.074807Z, but the record ends at 2026-11-29T06:06:30.189306Z"],
    ),
    "end before the beginning": (
        lambda: problems(at("ended", 28)),
        [
            "the soak began at 2026-11-29T05:56:06.631691Z and ended at 2026-11-28T06:06:30.074807Z, but states that it ran for "
            "624 s",
            "the soak ran for 624 s, but the last figure of the timeline was recorded after 620 s",
        ],
    ),
    "no valid time": (
        lambda: problems(lambda soak: replace(soak, ended="never")),
        ["the soak began at 2026-11-29T05:56:06.631691Z and ended at never, but states that it ran for 624 s"],
    ),
    "not ended yet": (lambda: problems(lambda soak: replace(soak, ended="", ended_by="")), []),
    "longer than its times": (
        lambda: problems(lambda soak: replace(soak, soaked_s=1e6)),
        [
            "the soak began at 2026-11-29T05:56:06.631691Z and ended at 2026-11-29T06:06:30.074807Z, but states that it ran for "
            "1000000 s",
            "the soak ran for 1000000 s, but the last figure of the timeline was recorded after 620 s",
        ],
    ),
    "shorter than its launches": (
        lambda: problems(lambda soak: replace(soak, soaked_s=0.6)),
        ["the soak ran for 1 s, but its launches took 354 s"],
    ),
    "clock corrected by an hour during the soak": (
        lambda: problems(
            lambda soak: replace(soak, ended=soak.ended.replace("T06:", "T07:")),
            lambda launches: [*launches[:-1], replace(launches[-1], began=launches[-1].began.replace("T06:", "T07:"))],
        ),
        ["the soak ended at 2026-11-29T07:06:30.074807Z, but the record ends at 2026-11-29T06:06:30.189306Z"],
    ),
    "buckets 1000 times as long": (
        lambda: problems(with_bucket(1000)),
        ["the soak ran for 624 s, but the last figure of the timeline was recorded after 620000 s"],
    ),
    "buckets a thousandth as long": (
        lambda: problems(with_bucket(0.001)),
        ["the soak ran for 624 s, but the last figure of the timeline was recorded after 1 s"],
    ),
    "buckets a thousandth as long, but another round was interrupted at the end": (
        lambda: problems(lambda soak: replace(with_bucket(0.001)(soak), cut=1)),
        [],
    ),
}
"""Case -> the problems after a change of a real burn-in, and the reasons that are expected."""


@pytest.mark.parametrize("kind", TIMES)
def test_times_of_a_soak_must_fit_its_record_its_launches_and_its_timeline(kind: str) -> None:
    result, expected = TIMES[kind]
    assert result() == [f"host stage.soak: {reason}" for reason in expected]


def with_first(**values: float) -> Callable[[Series], Series]:
    """Return a change that multiplies the first entry of some columns of a series. `values`: column -> factor."""
    return lambda series: replace(
        series, **{key: (getattr(series, key)[0] * factor, *getattr(series, key)[1:]) for key, factor in values.items()}
    )


SERIES: dict[str, tuple[str, Callable[[Series], Series], str]] = {
    "unit of a figure": (
        RATE,
        lambda item: replace(item, unit="B/s"),
        "has the unit B/s, but this figure is in FLOP/s",
    ),
    "unit of a reading": (
        "gpu.power",
        lambda item: replace(item, unit="Cel"),
        "has the unit Cel, but this reading is in W",
    ),
    "negative reading": ("gpu.power", with_first(low=-1), "-78.208 W is not credible: the lowest possible value is 1"),
    "negative rate": (RATE, with_first(low=-1), "-6.5998e+14 FLOP/s is not credible: it cannot be negative"),
    "temperature in K": (
        "gpu.temperature",
        lambda item: replace(item, high=tuple(value + 273 for value in item.high)),
        "336 Cel is not credible: the highest possible value is 150",
    ),
    "lowest above the mean": (
        "gpu.power",
        with_first(low=1.01),
        "the mean 78.4 W is not between the lowest value 78.9901 and the highest value 78.907",
    ),
    "mean above the highest": (
        "gpu.power",
        with_first(mean=1.5),
        "the mean 117.6 W is not between the lowest value 78.208 and the highest value 78.907",
    ),
    "mean above the highest by rounding": ("gpu.power", with_first(mean=1.007), ""),
    "highest in another unit": (
        RATE,
        with_first(high=1e-3),
        "the mean 6.5998e+14 FLOP/s is not between the lowest value 6.5998e+14 and the highest value 6.5998e+11",
    ),
    "other part": (
        RATE,
        lambda item: replace(item, scope="gpu=1"),
        "the record has no figure with the scope and the parameters of this series",
    ),
    "other settings": (
        COPY,
        lambda item: replace(item, params={"op": "read"}),
        "the record has no figure with the scope and the parameters of this series",
    ),
    "settings missing": (
        COPY,
        lambda item: replace(item, params={}),
        "the record has no figure with the scope and the parameters of this series",
    ),
    "more values than rounds": (
        RATE,
        with_first(n=5),
        "it has 11 values, but only 7 rounds ended or were cut off",
    ),
    "value below the samples of the figure": (
        COPY,
        with_first(low=0.9),
        "it has values of 3.87045e+12 to 4.3009e+12 B/s, but the samples of the figure are 4.2999e+12 to 4.3009e+12 B/s",
    ),
    "value above the samples of the figure": (
        COPY,
        with_first(high=1.1),
        "it has values of 4.2999e+12 to 4.73055e+12 B/s, but the samples of the figure are 4.2999e+12 to 4.3009e+12 B/s",
    ),
    "value within the rounding of the samples": (COPY, with_first(low=0.9993), ""),
    "fewer values than samples, as if a supervisor was killed": (
        COPY,
        lambda item: replace(
            item, at=item.at[:6], n=item.n[:6], low=item.low[:6], mean=item.mean[:6], high=item.high[:6]
        ),
        "",
    ),
}
"""Case -> the name of a series, a change of it, and the reason that is expected; empty: none."""


@pytest.mark.parametrize("kind", SERIES)
def test_series_must_be_possible_and_fit_the_figure_over_all_rounds(kind: str) -> None:
    name, change, reason = SERIES[kind]
    scopes = {item.scope for item in changed_series(name, change)}
    expected = [f"{scope} {name}: the timeline of the soak: {reason}" for scope in scopes] if reason else []
    assert problems(of_series(name, change)) == expected


def changed_series(name: str, change: Callable[[Series], Series]) -> list[Series]:
    _, record = burn_in()
    assert record.soak
    return [change(item) for item in record.soak.timeline.series if item.name == name]


def test_series_may_have_up_to_three_values_more_than_rounds() -> None:
    """If a supervisor is killed while it adds a round to the record, the next one adds the values of this round again.

    The samples of the figure then include these values too.
    """

    def more(figure: Observation) -> Observation:
        return (
            replace(figure, samples=replace(figure.samples, n=10)) if figure.name == RATE and figure.samples else figure
        )

    assert problems(of_series(RATE, with_first(n=4)), figure=more) == []


def test_values_of_a_series_are_judged_with_all_parameters_of_its_figure() -> None:
    """Data of 64 MiB may fit into the L2 cache of the GPU. The cache is faster than the memory rate in the datasheet."""
    fast = of_series(
        COPY,
        lambda item: replace(item, low=(2e13,) * 7, mean=(2e13,) * 7, high=(2e13,) * 7),
    )

    def with_size(size: int) -> Callable[[Observation], Observation]:
        def changed(figure: Observation) -> Observation:
            if figure.name != COPY or not figure.samples:
                return figure
            samples = replace(figure.samples, min=2e13, p50=2e13, max=2e13)
            return replace(figure, value=2e13, samples=samples, params={**figure.params, "size_bytes": size})

        return changed

    assert problems(fast, figure=with_size(1 << 26)) == []
    (reason,) = problems(fast, figure=with_size(1 << 32))
    assert "more than 3 times the rate in the datasheet" in reason


def test_series_must_not_have_more_values_than_the_figure_has_samples() -> None:
    def fewer(figure: Observation) -> Observation:
        return (
            replace(figure, samples=replace(figure.samples, n=6)) if figure.name == RATE and figure.samples else figure
        )

    assert problems(figure=fewer) == [
        f"gpu=0 {RATE}: the timeline of the soak: it has 7 values, but the figure has 6 samples"
    ]


def test_series_of_a_figure_that_one_round_could_not_measure_is_not_compared() -> None:
    """The agent then keeps the failure of that round as the figure over all rounds."""

    def failed(figure: Observation) -> Observation:
        return replace(figure, status=ERROR, reason="no", value=None, samples=None) if figure.name == RATE else figure

    def changed(soak: Soak) -> Soak:
        return of_series(RATE, lambda item: replace(item, params={"dtype": "fp8"}))(soak)

    assert problems(changed, figure=failed) == []
    assert len(problems(changed)) == 1


def test_single_value_is_not_compared_with_the_samples_of_the_figure() -> None:
    """After one round, the samples are the repetitions within this round."""

    def one_value(soak: Soak) -> Soak:
        one = of_series(COPY, lambda item: replace(item, at=(23,), n=(1,), low=(4e12,), mean=(4e12,), high=(4e12,)))
        return one(soak)

    assert problems(one_value) == []


def test_series_of_unknown_name_is_not_compared() -> None:
    assert problems(of_series(RATE, lambda item: replace(item, name="new.throughput"))) == []
