"""Test hosts whose GPUs are of another model than `rackproof_gpu_model` names."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache

import pytest

from fleet.diagnosis.handling import handling
from fleet.judge.criteria import model_packs, read_packs
from fleet.judge.evidence import Evidence
from fleet.report.merge import merge
from fleet.rma.parts import failed_parts
from schemas.records import Gpu, Observation, Record
from schemas.reports import FAIL, REJECTED, FleetReport, VerdictKind
from schemas.waivers import Waiver
from tests import builders

PACKS = read_packs([])
OTHERS = [name for name in model_packs() if name != "h200-sxm"]
Change = Callable[[Observation], Observation]


@cache
def report(
    model: str,
    names: tuple[tuple[str, int, str], ...] = (),
    gpu_count: int = 4,
    change: Change = lambda item: item,
    waivers: tuple[Waiver, ...] = (),
) -> FleetReport:
    """Return the report on two hosts of H200 if the inventory names `model`.

    Args:
        names: host, index and name of each GPU that is not an H200.
        gpu_count: number of GPUs of each host.
        change: applied to each figure.
    """
    plan = replace(builders.plan(gpu_count=gpu_count, rackproof_gpu_model=model), waivers=waivers)
    name_of = {(host, index): name for host, index, name in names}
    evidence = {
        host: Evidence(records=tuple(_renamed(record, host, name_of) for record in of_host.records))
        for host, of_host in builders.evidence(plan).items()
    }
    changed = {host: builders.with_observations(of_host, change) for host, of_host in evidence.items()}
    return merge(plan, changed, PACKS)


def _renamed(record: Record, host: str, names: Mapping[tuple[str, int], str]) -> Record:
    def renamed(gpu: Gpu) -> Gpu:
        return replace(gpu, name=names.get((host, gpu.index), gpu.name))

    return replace(record, gpus=tuple(map(renamed, record.gpus)))


def usual() -> set[str]:
    """Return the problems of the causes that healthy hosts of `builders` have, too."""
    return {cause.problem for cause in report("h200-sxm").causes}


@pytest.mark.parametrize("model", OTHERS)
def test_wrong_model_in_the_inventory_is_the_only_cause_and_blames_no_part(model: str) -> None:
    result = report(model, gpu_count=2)
    first, *others = result.causes
    assert result.decision == REJECTED
    assert (first.problem, first.verdict, first.action) == ("gpu-model", FAIL, "configure")
    assert first.title.endswith(f"each is an NVIDIA H200, but the inventory names {model}")
    assert len(first.parts) == 4
    assert {cause.problem for cause in others if cause.verdict == FAIL} <= usual()
    assert [part for part in failed_parts(result.causes, result.verdicts) if part.needs_part_work] == []
    how = handling(first)
    assert "correct it" in how.now
    assert "new run" in how.now
    assert "claim it from the vendor" in how.if_it_returns


def test_single_gpu_of_another_model_is_named_as_a_wrong_part() -> None:
    result = report("h200-sxm", names=(("h1", 2, "NVIDIA H100 80GB HBM3"),))
    (cause,) = (cause for cause in result.causes if cause.problem == "gpu-model")
    assert cause.title == "GPU 2 of h1 is an NVIDIA H100 80GB HBM3, but the inventory names h200-sxm"
    assert (cause.action, cause.serial) == ("inspect_hardware", "h1-2")
    assert "wrong part" in handling(cause).now
    assert [part.serial for part in failed_parts(result.causes, result.verdicts) if part.needs_part_work] == ["h1-2"]


def test_host_of_another_model_and_single_gpu_of_that_model_are_separate_causes() -> None:
    places = [("h1", 0), ("h1", 1), ("h1", 2), ("h1", 3), ("h2", 1)]
    names = tuple((host, index, "NVIDIA H100 80GB HBM3") for host, index in places)
    causes = [cause for cause in report("h200-sxm", names=names).causes if cause.problem == "gpu-model"]
    assert [(cause.action, cause.hosts, len(cause.parts)) for cause in causes] == [
        ("inspect_hardware", ("h2",), 1),
        ("configure", ("h1",), 4),
    ]


def slow_copies(item: Observation) -> Observation:
    """Return the observation as if GPU 1 copied at a twentieth of the rate, which is too slow on every model."""
    if item.name == "host_copy.bandwidth" and item.scope == "gpu=1" and isinstance(item.value, float):
        return replace(item, value=item.value / 20)
    return item


@pytest.mark.parametrize("model", ["h200-sxm", "h100-sxm", "h200-nvl", "b200"])
def test_gpu_that_is_too_slow_for_every_model_has_a_separate_cause(model: str) -> None:
    result = report(model, change=slow_copies)
    slow = [cause for cause in result.causes if cause.problem == "slow-host-copies"]
    assert {(cause.host, cause.part) for cause in slow} == {("h1", "gpu=1"), ("h2", "gpu=1")}
    assert {cause.action for cause in slow} == {"reseat"}


def test_failures_by_limits_of_the_named_model_keep_their_verdict() -> None:
    explained = [item for item in report("b200").verdicts if item.kind == VerdictKind.MODEL]
    assert {item.verdict for item in explained} == {FAIL}
    assert {"gpu.name", "memory.bandwidth", "gemm.throughput", "peer_copy.bandwidth"} <= {
        item.name for item in explained
    }


def test_wrong_model_is_the_only_cause_for_gpus_whose_model_has_no_pack() -> None:
    names = tuple((host, index, "NVIDIA Z900") for host in ("h1", "h2") for index in range(4))
    result = report("b200", names=names)
    assert {cause.problem for cause in result.causes if cause.verdict == FAIL} - usual() == {"gpu-model"}


def test_waiver_for_the_model_does_not_blame_parts_for_its_limits() -> None:
    waiver = Waiver(criterion="gpu-model", who="Ann", why="agreed", until="2099-12-31", host="h1")
    result = report("b200", waivers=(waiver, replace(waiver, host="h2")))
    failed = [cause for cause in result.causes if cause.verdict == FAIL and cause.waiver is None]
    (cause,) = (cause for cause in failed if cause.problem not in usual())
    assert (cause.problem, cause.action, cause.hosts) == ("limits-of-other-model", "configure", ("h1", "h2"))
    assert "which is not the model of its GPUs" in cause.title
    assert [part for part in failed_parts(result.causes, result.verdicts) if part.needs_part_work] == []
