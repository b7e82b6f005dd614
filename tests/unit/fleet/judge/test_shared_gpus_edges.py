"""A slow GPU is explained by another process on it, if a snapshot before or after the launches shows this process."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from fleet.judge.host_view import HostView
from fleet.judge.shared_gpus import with_other_processes
from schemas.records import Metric, Snapshot
from schemas.reports import FAIL, INCONCLUSIVE, PASS, Verdict
from tests.unit.fleet.judge.small_fleet import host_view, one_figure_plan

PLAN = one_figure_plan("h1", gpu_count=3)
ALLOWED = replace(PLAN, hosts=(replace(PLAN.hosts[0], share_gpus=True),))


def snapshot(phase: str, **counts: int) -> Snapshot:
    """Return a snapshot; `counts`: `gpu0` -> number of processes."""
    values = {f"gpu={name[3:]}": count for name, count in counts.items()}
    processes = Metric(name="gpu.processes", unit="1", values=values)
    return Snapshot(stage="benchmark", phase=phase, at="2026-11-21T04:00:00Z", duration_s=0.1, metrics=(processes,))


def view(*snapshots: Snapshot, share: bool = True) -> HostView:
    return host_view(ALLOWED if share else PLAN, snapshots=snapshots)


def slow(**fields: Any) -> Verdict:
    """Return a verdict that fails because gpu=1 is slow; `fields` replace its fields."""
    default = {"host": "h1", "scope": "gpu=1", "name": "gemm.throughput", "operator": "ge", "unit": "FLOP/s"}
    return Verdict(**{**default, "verdict": FAIL, "criterion": "c", "reason": "found 1", "action": "rma", **fields})


USED = (snapshot("before", gpu0=0, gpu1=1), snapshot("after", gpu1=1, gpu2=2))


def text(gpus: str) -> str:
    """Return the note in a verdict on GPUs that another process used."""
    return f"another process used {gpus}, which rackproof_share_gpus allows: end that process, and measure again"


@pytest.mark.parametrize(
    ("scope", "gpus"),
    [
        ("gpu=1", "gpu=1"),
        ("gpu=0,peer=1", "gpu=1"),
        ("gpu=2,peer=1", "gpu=1, gpu=2"),
        ("host", "gpu=1, gpu=2"),
        ("numa=0", "gpu=1, gpu=2"),
    ],
)
def test_slow_figure_names_the_used_gpus_of_its_scope(scope: str, gpus: str) -> None:
    result = with_other_processes(view(*USED), slow(scope=scope, detail="of the fleet"))
    assert (result.action, result.reason) == ("configure", f"found 1; {text(gpus)}")
    assert result.detail == f"{text(gpus)}; of the fleet"
    assert with_other_processes(view(*USED), slow(scope=scope)).detail == text(gpus)


@pytest.mark.parametrize(
    "fields",
    [
        {"scope": "gpu=0"},
        {"verdict": PASS},
        {"verdict": INCONCLUSIVE},
        {"operator": "eq"},
        {"operator": "le", "unit": "1"},
        {"name": "gpu.power"},
        {"name": "fashion_mnist.accuracy", "unit": "1"},
        {"name": "verbs.mtu", "unit": "B"},
    ],
    ids=[
        "other GPU",
        "passes",
        "inconclusive",
        "equality",
        "upper limit of a count",
        "reading",
        "accuracy",
        "setting",
    ],
)
def test_verdict_other_than_a_failed_speed_of_a_used_gpu_is_not_changed(fields: dict[str, Any]) -> None:
    verdict = slow(**fields)
    assert with_other_processes(view(*USED), verdict) is verdict


@pytest.mark.parametrize("operator", ["le", "lt"])
def test_upper_limit_of_a_time_counts_as_a_speed(operator: str) -> None:
    assert with_other_processes(view(*USED), slow(operator=operator, unit="s")).action == "configure"


def test_nothing_is_explained_if_sharing_is_not_allowed_or_the_processes_are_those_of_the_run() -> None:
    verdict = slow()
    assert with_other_processes(view(*USED, share=False), verdict) is verdict
    assert with_other_processes(view(snapshot("during", gpu1=1)), verdict) is verdict
    assert with_other_processes(view(), verdict) is verdict
