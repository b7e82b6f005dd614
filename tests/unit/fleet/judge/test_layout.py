"""Hosts share a layout if their benchmark observations differ only in values, and if each host is regular (`is_regular`).

A layout is what the observations of these hosts have in common: all except their values.

`quick.Reader` gives each reading and each observation a number, the token. Readings with the same token are equal. Observations
with the same token have the same name, stage, status, unit and parameters. Without a token, the field `token` is 0.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from fleet.judge.evidence import Evidence
from fleet.judge.host_view import HostView
from fleet.judge.layout import HostValues, LayoutCache, are_numbers, is_regular, kind_of, split_pairs, values_at
from schemas.records import ERROR, SKIPPED, Observation, Record
from tests import builders
from tests.unit.fleet.judge.small_fleet import host_view, one_figure_plan, reading

PLAN = one_figure_plan("h1", "h2")
GANG_PLAN = builders.plan("h1", "h2", gpu_count=1)


def figure(value: Any = 1.0, scope: str = "gpu=0", name: str = "gemm.throughput", **params: Any) -> Observation:
    return builders.observation(name, value, scope=scope, **params)


def values(*figures: Observation, plan: Any = GANG_PLAN) -> HostValues:
    return HostValues(host_view(plan, "h1", observations=figures))


def test_observations_on_pairs_of_hosts_are_separated_and_keep_their_order() -> None:
    alone, pair = figure(), figure(scope="gpu=0,partner=h2")
    assert split_pairs([alone, pair, figure(2.0)]) == ([alone, figure(2.0)], [pair])
    assert split_pairs([alone]) == ([alone], [])
    assert split_pairs([pair]) == ([], [pair])


def test_kind_of_an_observation_is_its_token_or_else_its_name_stage_status_unit_and_parameters() -> None:
    assert kind_of(figure(1.0)) == kind_of(figure(2.0, "gpu=1"))
    different = [
        figure(name="memory.bandwidth"), figure(dtype="bf16"), replace(figure(), unit="1"), replace(figure(), stage="gang"),
        replace(figure(), status=SKIPPED, value=None, reason="no"),
    ]  # fmt: skip
    assert len({kind_of(item) for item in (figure(), *different)}) == 1 + len(different)
    with_token = figure()
    vars(with_token)["token"] = 7
    assert kind_of(with_token) == 7


def test_layout_has_the_scope_of_the_gang_without_the_name_of_the_gang() -> None:
    in_gang, alone = values(), values(plan=PLAN)
    assert in_gang.gang_scope == "gang=r1"
    assert (in_gang.layout_scope("gang=r1"), in_gang.host_scope("gang=")) == ("gang=", "gang=r1")
    assert (in_gang.layout_scope("gpu=0"), in_gang.host_scope("gpu=0")) == ("gpu=0", "gpu=0")
    assert (alone.gang_scope, alone.layout_scope("gang=r1")) == ("", "gang=r1")


def pairs_of(view: HostView) -> list[Observation]:
    """Return all observations that the plan expects on pairs of hosts."""
    return [
        builders.observation(item.name, 1.0, scope=scope, stage=item.stage)
        for item in view.expected
        if item.scope == "peers"
        for scope in view.plan.scopes_of(view.host, item)
    ]


PAIRS = pairs_of(host_view(GANG_PLAN))


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda pairs: pairs, True),
        (lambda pairs: pairs[1:], False),
        (lambda pairs: [*pairs[1:], replace(pairs[0], status=SKIPPED, value=None, reason="no")], False),
        (lambda pairs: [*pairs, figure(scope="gpu=0,partner=h9")], True),
        (lambda pairs: [*pairs, replace(pairs[0], status=ERROR, value=None, reason="no")], False),
        (lambda pairs: [*pairs, replace(pairs[0], status=SKIPPED, value=None, reason="no")], True),
    ],
    ids=[
        "all pairs",
        "a pair is missing",
        "a pair is skipped",
        "a pair that is not planned",
        "a pair has a measured and a failed figure",
        "a pair has a measured and a skipped figure",
    ],
)
def test_all_planned_pairs_must_be_measured_without_an_error(
    change: Callable[[list[Observation]], list[Observation]], expected: bool
) -> None:
    assert PAIRS
    host = values(*change(PAIRS))
    assert host.has_all_pairs() is expected
    assert host.expected_pair_count == len(PAIRS)


def test_host_without_planned_pairs_has_all_pairs() -> None:
    assert values(plan=PLAN).has_all_pairs()
    assert values(plan=PLAN).expected_pair_count == 0


@pytest.mark.parametrize(("tokens", "key"), [((3,), (3,)), ((0,), None), ((3, 4), (3, 4)), ((3, 0), None)])
def test_key_of_readings_is_their_tokens_if_all_have_one(tokens: tuple[int, ...], key: tuple[int, ...] | None) -> None:
    metrics = [reading(1, name=f"gpu.r{at}") for at in range(len(tokens))]
    for metric, token in zip(metrics, tokens, strict=True):
        vars(metric)["token"] = token
    host = HostValues(host_view(PLAN, "h1", *metrics))
    # The host has three snapshots. Each has all of these readings, with the same tokens.
    assert host.readings_key([metrics[0].name]) == ((tokens[0],) * 3 if tokens[0] else None)
    key_of_all = tuple(token for token in key for _ in range(3)) if key else None
    assert host.readings_key([metric.name for metric in metrics]) == key_of_all


def test_position_of_an_observation_is_the_index_of_its_value_in_the_values_of_the_host() -> None:
    first, second = figure(), figure(2.0, "gpu=1")
    host = values(first, second)
    assert {id(item): at for at, item in enumerate(host.observations)} == host.positions()
    assert host.values == [1.0, 2.0]


def test_hosts_that_differ_only_in_values_share_a_layout() -> None:
    compiled: list[tuple[HostValues, int]] = []
    cache: LayoutCache[int] = LayoutCache(lambda host, number: compiled.append((host, number)) or number)  # type: ignore[func-returns-value]
    first, second, other = values(figure(1.0)), values(figure(2.0)), values(figure("text"))
    # The value of `other` is a text, not a number, so `other` has another layout.
    assert [cache.of_host(host) for host in (first, second, other, second, other)] == [1, 1, 2, 1, 2]
    assert [number for _, number in compiled] == [1, 2]
    cache.clear()
    assert cache.of_host(first) == 3


def test_layout_of_the_previous_host_is_found_without_computing_a_key(monkeypatch: pytest.MonkeyPatch) -> None:
    cache: LayoutCache[int] = LayoutCache(lambda _, number: number)
    assert cache.of_host(values(figure(1.0))) == 1
    monkeypatch.setattr(HostValues, "key", property(lambda _: pytest.fail("the key takes long to compute")))
    assert cache.of_host(values(figure(2.0))) == 1


@pytest.mark.parametrize(("positions", "expected"), [((), ()), ((1,), ("b2",)), ((2, 0), ("c3", "a1"))])
def test_values_are_selected_by_position(positions: tuple[int, ...], expected: tuple[str, ...]) -> None:
    assert values_at(positions)(["a1", "b2", "c3"]) == expected


@pytest.mark.parametrize(
    ("items", "expected"), [([], True), ([1, 2.0], True), ([1, True], False), ([1, None], False), (["1"], False)]
)
def test_only_whole_and_floating_numbers_are_numbers(items: list[Any], expected: bool) -> None:
    assert are_numbers(items) is expected


def regular(change: Callable[[Record], Record], plan: Any = GANG_PLAN, gang: bool = True) -> bool:
    """Return whether h1 is regular after a change of its gang record (if `gang`) or of its host record (otherwise)."""
    records = tuple(change(item) if bool(item.gang) == gang else item for item in builders.records(plan, "h1"))
    return is_regular(HostView(plan, plan.hosts[0], Evidence(records=records), ()))


def launches(**fields: Any) -> Callable[[Record], Record]:
    return lambda record: replace(record, launches=tuple(replace(item, **fields) for item in record.launches))


@pytest.mark.parametrize(
    ("change", "gang", "expected"),
    [
        (lambda record: record, True, True),
        (launches(outcome="failed"), True, False),
        (launches(outcome="deadline"), False, False),
        (launches(reason="rank 1 ended"), True, False),
        (launches(reason="rank 1 ended"), False, False),
        (launches(members=("h1",)), True, False),
        (launches(members=("h2", "h1")), True, True),
        (lambda record: replace(record, gang="other"), False, False),
    ],
    ids=[
        "healthy", "failed launch of the gang", "single-host launch stopped at its deadline", "launch of the gang with a reason",
        "single-host launch with a reason", "launch of the gang without h2", "other order of hosts",
        "no host record, only gang records",
    ],
)  # fmt: skip
def test_host_is_regular_if_it_has_a_host_record_and_every_launch_had_all_hosts_and_succeeded(
    change: Callable[[Record], Record], gang: bool, expected: bool
) -> None:
    assert regular(change, gang=gang) is expected


@pytest.mark.parametrize(("name", "expected"), [("gpu.power", False), ("launch.mpi", True)], ids=["reading", "version"])
def test_benchmark_results_of_a_regular_host_may_include_versions_but_no_readings(name: str, expected: bool) -> None:
    assert regular(lambda record: replace(record, observations=(*record.observations, figure(name=name)))) is expected


def test_host_with_a_benchmark_result_in_a_snapshot_is_irregular() -> None:
    result = reading(1, name="gemm.throughput")
    assert is_regular(host_view(PLAN, "h1", reading(1)))
    assert not is_regular(host_view(PLAN, "h1", reading(1), result))


def test_host_with_a_gpu_without_any_measurement_is_irregular() -> None:
    assert not is_regular(host_view(one_figure_plan("h1", gpu_count=2), "h1", reading(1), observations=(figure(),)))
