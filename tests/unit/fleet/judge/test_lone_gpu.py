"""A virtual machine with one GPU of an NVSwitch board has no active NVLinks. This is not a fault."""

from __future__ import annotations

from typing import Any

import pytest

from fleet.judge.criteria import read_packs
from fleet.judge.evaluate import evaluate
from fleet.judge.evidence import Planned
from fleet.judge.host_view import HostView
from fleet.judge.outliers import FleetFigures
from schemas.records import Metric
from schemas.reports import FAIL
from tests import builders
from tests.unit.fleet.judge.small_fleet import host_evidence

PACKS = read_packs([])
LINKS = "nvlink-active"
NO_FABRIC = "unsupported: the part belongs to no NVLink fabric"


def metric(name: str, value: Any, devices: int = 0) -> Metric:
    scopes = [f"gpu={index}" for index in range(devices)] if devices else ["host"]
    if isinstance(value, str) and value.startswith("unsupported"):
        return Metric(name=name, unit="1", absent=dict.fromkeys(scopes, value))
    return Metric(name=name, unit="1", values=dict.fromkeys(scopes, value))


@pytest.mark.parametrize("model", ["a100-sxm-80", "h100-sxm", "h200-sxm", "b200"])
@pytest.mark.parametrize(
    ("changed", "fails"),
    [
        ({}, False),
        # A virtual machine with one H200 in a cloud reported this:
        ({"gpu.nvlink.active_links": "unsupported: the part has no NVLink"}, False),
        ({"host.virtual_machine": False}, True),
        ({"gpus": 2}, True),
        ({"gpu.fabric.state": "completed"}, True),
        ({"gpu.fabric.state": "not_started"}, True),
        ({"fabric.nvswitch.count": 4}, True),
        ({"gpu.nvlink.active_links": 1}, True),
    ],
)
def test_lone_gpu_of_a_virtual_machine_may_have_no_active_nvlinks(
    model: str, changed: dict[str, Any], fails: bool
) -> None:
    """A GPU with some active links fails. So does a GPU on a host that reports a fabric or an NVSwitch."""
    values = {
        "gpus": 1,
        "host.virtual_machine": True,
        "gpu.fabric.state": NO_FABRIC,
        "fabric.nvswitch.count": 0,
        "gpu.nvlink.active_links": 0,
        **changed,
    }
    count = values.pop("gpus")
    plan = builders.plan("h1", gpu_count=count, rackproof_gang="none", rackproof_gpu_model=model)
    metrics = [metric(name, value, count if name.startswith("gpu.") else 0) for name, value in values.items()]
    view = HostView(plan, plan.host("h1"), host_evidence(plan, "h1", *metrics), PACKS)
    verdicts = list(evaluate(view, view.criteria()[LINKS], FleetFigures(Planned(plan))))
    assert {verdict.verdict for verdict in verdicts} == ({FAIL} if fails else set())
