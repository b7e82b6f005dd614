"""Criteria select figures by parameters. A figure without such a parameter is reported, because no criterion would judge it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import pytest

from fleet.judge.criteria import Criterion, read_packs
from fleet.judge.figure_consistency import STATED, figure_structure
from fleet.judge.host_view import HostView
from fleet.judge.judge import host_views, judge
from schemas.benchmarks import Output
from schemas.catalogue import BENCHMARKS, parameters
from schemas.records import Observation, Value
from tests import builders

PACKS = read_packs([])
PLAN = builders.plan("h1", profile="standard", gpu_count=8, rackproof_gang="none")
(EVIDENCE,) = builders.evidence(PLAN).values()
SCOPES = {
    "device": "gpu=0",
    "pair": "gpu=0,peer=1",
    "peers": "gpu=0,partner=h2",
    "port": "hca=mlx5_0,port=1",
    "directory": "directory=data",
    "numa": "numa=0",
}
"""Scope of an output -> scope of one of its figures. Outputs with any other scope have figures of the host or the gang."""


def selecting() -> Iterator[tuple[Criterion, Output]]:
    """Yield each shipped criterion that selects figures by a parameter, with each output whose figures it judges."""
    outputs = [output for benchmark in BENCHMARKS.values() for output in benchmark.outputs]
    criteria = {
        (item.name, item.scope, repr(item.where)): item for pack in PACKS for item in pack.criteria if item.where
    }
    for criterion in criteria.values():
        for output in outputs:
            if criterion.matches_name(output.name) or output.makes(criterion.name):
                yield criterion, output


SELECTING = list(selecting())


def selected(criterion: Criterion, output: Output) -> Observation:
    """Return a figure that the criterion judges."""
    params = {key: bound(wanted) for key, wanted in criterion.where.items()}
    name = criterion.name.replace("*", "all_reduce")
    scope = "gang=r1" if criterion.scope == "gang" else SCOPES.get(output.scope, "host")
    return builders.observation(
        name, 1.0, scope=scope, unit=output.unit, stage=criterion.stage or "benchmark", **params
    )


def bound(wanted: Any) -> Value:
    """Return a value that fulfils the condition `wanted`: the required value, or the limit of a range."""
    if not isinstance(wanted, Mapping):
        return wanted  # type: ignore[no-any-return]
    return next(iter(wanted.values()))  # type: ignore[no-any-return]


def not_stated(view: HostView, *figures: Observation) -> list[str]:
    """Return the problems that report a figure without a parameter by which a criterion selects figures."""
    return [reason for _, reason in figure_structure(view, figures).problems if ", by which " in reason]


def view_with(criterion: Criterion) -> HostView:
    """Return a view of the host. Its only shipped criterion is `criterion`."""
    (view,) = host_views(PLAN, {"h1": EVIDENCE}, PACKS)
    view.__dict__["shipped_criteria"] = {criterion.id: criterion}
    return view


@pytest.mark.parametrize(("criterion", "output"), SELECTING, ids=[f"{item.id}-{out.name}" for item, out in SELECTING])
def test_figure_cannot_escape_a_criterion_by_lacking_a_parameter(criterion: Criterion, output: Output) -> None:
    view, figure = view_with(criterion), selected(criterion, output)
    # STATED maps figures to parameters. Such a parameter is required only if the figure was measured.
    states = {key: name for name, key in STATED.items() if name.partition(".")[0] == figure.name.partition(".")[0]}
    stating = [
        builders.observation(name, figure.params[key], scope=figure.scope, unit="1", stage=figure.stage)
        for key, name in states.items()
        if key in figure.params
    ]
    assert not_stated(view, figure, *stating) == []
    for key in criterion.where:
        without = replace(figure, params={name: value for name, value in figure.params.items() if name != key})
        assert any(f"does not state `{key}`" in reason for reason in not_stated(view, without, *stating)), key


def test_criteria_select_only_by_parameters_of_the_catalogue() -> None:
    assert len(SELECTING) > 50
    for criterion, output in SELECTING:
        benchmark = BENCHMARKS[output.name.partition(".")[0]]
        assert criterion.where.keys() <= parameters(output, benchmark).keys() | output.over.keys()


def test_figure_may_lack_the_parameter_nvls_if_the_use_of_nvls_was_not_measured() -> None:
    criterion = next(item for item, _ in SELECTING if "nvls" in item.where)
    figure = builders.observation(criterion.name, 1.0, **{key: bound(item) for key, item in criterion.where.items()})
    without = replace(figure, params={key: value for key, value in figure.params.items() if key != "nvls"})
    assert not_stated(view_with(criterion), without) == []


def test_all_reduce_without_the_parameter_nvls_is_reported() -> None:
    name = "collective.all_reduce.busbw"

    def without(item: Observation) -> Observation:
        params = {key: value for key, value in item.params.items() if key != "nvls" or item.name != name}
        return replace(item, params=params)

    changed = builders.with_observations(EVIDENCE, without)
    reasons = {item.reason for item in judge(PLAN, {"h1": changed}, PACKS) if item.name == name}
    assert any(reason.startswith("it does not state `nvls`, by which ") for reason in reasons)
    healthy = {item.reason for item in judge(PLAN, {"h1": EVIDENCE}, PACKS) if item.name == name}
    assert not any("does not state" in reason for reason in healthy)


def test_copy_is_reported_if_it_states_more_gpus_than_the_host_has() -> None:
    def change(item: Observation) -> Observation:
        return replace(item, params={**item.params, "devices": 9}) if "devices" in item.params else item

    changed = builders.with_observations(EVIDENCE, change)
    reasons = {item.reason for item in judge(PLAN, {"h1": changed}, PACKS) if item.name == "host_copy.bandwidth"}
    assert "copies of 9 GPUs at once, but only 8 GPUs of the host are under test" in reasons
