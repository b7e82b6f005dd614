"""A slow GPU is explained by another process on it, if a snapshot before or after the launches shows this process."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from fleet.judge.host_view import HostView
from fleet.judge.shared_gpus import with_other_processes
from schemas.records import Metric, Snapshot
from schemas.reports import FAIL, INCONCLUSIVE, PASS, Verdict
from tests import builders
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


def annotated(verdict: Verdict, *views: HostView) -> Verdict:
    """Return the verdict, with the note on other processes if they explain it."""
    (result,) = with_other_processes(views, [verdict])
    return result


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
    result = annotated(slow(scope=scope, detail="of the fleet"), view(*USED))
    assert (result.action, result.reason) == ("configure", f"found 1; {text(gpus)}")
    assert result.detail == f"{text(gpus)}; of the fleet"
    assert annotated(slow(scope=scope), view(*USED)).detail == text(gpus)


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
    assert annotated(verdict, view(*USED)) is verdict


@pytest.mark.parametrize("operator", ["le", "lt"])
def test_upper_limit_of_a_time_counts_as_a_speed(operator: str) -> None:
    assert annotated(slow(operator=operator, unit="s"), view(*USED)).action == "configure"


def test_nothing_is_explained_if_sharing_is_not_allowed_or_the_processes_are_those_of_the_run() -> None:
    verdict = slow()
    assert annotated(verdict, view(*USED, share=False)) is verdict
    assert annotated(verdict, view(snapshot("during", gpu1=1))) is verdict
    assert annotated(verdict, view()) is verdict


HOSTS = ("h1", "h2", "h3")
GANG = builders.plan(*HOSTS, profile="smoke", gpu_count=2)
USES = {"gpu=1": "process 1 (a)"}


@pytest.mark.parametrize(
    ("fields", "user"),
    [
        ({"scope": "gang=all", "name": "collective.all_reduce.busbw"}, "h2"),
        ({"scope": "gpu=0,partner=h2", "name": "pairs.bandwidth"}, "h2"),
        ({"scope": "gpu=0,partner=h3", "name": "pairs.bandwidth"}, ""),
        ({"scope": "gpu=0", "name": "straggler.compute", "operator": "le", "unit": "s"}, ""),
        ({"scope": "gang=all", "name": "pairs.bandwidth", "part": "rail=1"}, ""),
        ({"scope": "gang=all", "name": "collective.all_reduce.busbw", "stage": "benchmark"}, ""),
    ],
    ids=["gang", "partner", "other partner", "own GPU", "rail", "other stage"],
)
def test_slow_figure_of_several_hosts_names_the_used_gpu_of_another_host(fields: dict[str, str], user: str) -> None:
    views = [
        host_view(
            GANG,
            name,
            launches=(replace(builders.launch("gang", HOSTS), other_processes=USES if name == "h2" else {}),),
        )
        for name in HOSTS
    ]
    verdict = slow(**{"stage": "gang", **fields})
    result = annotated(verdict, *views)
    assert (result.action == "configure") is bool(user)
    assert result.detail == (f"process 1 (a) used gpu=1 of {user}: end that process, and measure again" if user else "")


def test_text_names_only_the_first_of_many_used_gpus() -> None:
    """Many jobs may start on a large fleet while its hosts are measured together."""
    plan = builders.plan(*(f"h{number}" for number in range(40)), profile="smoke", gpu_count=2)
    names = tuple(host.name for host in plan.hosts)
    launches = (replace(builders.launch("gang", names), other_processes=USES),)
    verdict = slow(scope="gang=all", name="collective.all_reduce.busbw", stage="gang", host=names[0])
    assert annotated(verdict, *(host_view(plan, name, launches=launches) for name in names)).detail.count(" of h") <= 8
