"""Build small plans, evidence, readings and criteria. Judging them takes milliseconds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from fleet.judge.criteria import Criterion, Pack
from fleet.judge.evidence import Evidence
from fleet.judge.host_view import HostView
from schemas.plans import Plan
from schemas.records import Launch, Metric, Record, Snapshot, Value
from schemas.reports import FAIL, Verdict
from schemas.waivers import Waiver
from tests import builders

SNAPSHOTS = (("preflight", "before"), ("benchmark", "before"), ("benchmark", "after"))
"""Stage and phase of the snapshots in the host record."""


def one_figure_plan(*hosts: str, gpu_count: int = 1, **variables: Any) -> Plan:
    """Return a plan that expects one figure for each GPU: `memory.bandwidth` with `op` "copy"."""
    plan = builders.plan(
        *(hosts or ("h1",)), profile="smoke", gpu_count=gpu_count, **{"rackproof_gang": "none", **variables}
    )
    kept = [item for item in plan.expected if item.name == "memory.bandwidth" and item.params["op"] == "copy"]
    return replace(plan, expected=tuple(kept))


def host_evidence(plan: Plan, host: str = "h1", *metrics: Metric, **fields: Any) -> Evidence:
    """Return the evidence of a host: one record with every planned figure.

    Args:
        plan: the plan of the run.
        host: name of the host.
        metrics: readings. Every snapshot has the same ones.
        fields: fields of the record to replace.
    """
    devices = range(len(plan.host(host).devices))
    snapshots = [
        Snapshot(stage=stage, phase=phase, at=f"2026-11-21T04:00:0{at}Z", duration_s=0.1, metrics=metrics)
        for at, (stage, phase) in enumerate(SNAPSHOTS)
    ]
    default: dict[str, Any] = {
        "run_id": plan.run_id,
        "nonce": plan.nonce,
        "host": host,
        "began": builders.WHEN,
        "ended": builders.WHEN,
        "rackproof": "0",
        "gpus": tuple(builders.gpu(host, index) for index in devices),
        "snapshots": tuple(snapshots),
        "observations": tuple(builders.results(plan, host, "benchmark")),
        "software": builders.SOFTWARE,
        "launches": (builders.launch("benchmark", (host,), devices=len(devices)),),
    }
    return Evidence(records=(Record(**{**default, **fields}),))


def host_view(plan: Plan, host: str = "h1", *metrics: Metric, packs: Sequence[Pack] = (), **fields: Any) -> HostView:
    """Return the judge's view of a host with the evidence of `host_evidence`."""
    return HostView(plan, plan.host(host), host_evidence(plan, host, *metrics, **fields), packs)


def criterion(name: str = "gpu.thing", **fields: Any) -> Criterion:
    """Return a criterion that requires the reading `name` of each GPU to be 1. `fields` replaces fields of the criterion."""
    default = {
        "id": "c", "name": name, "operator": "eq", "unit": "1", "action": "reseat", "source": "a test's own", "scope": "gpu",
        "value": None if fields.keys() & {"expected", "variable", "fleet_fraction", "fleet_deviations"} else 1,
    }  # fmt: skip
    return Criterion(**{**default, **fields})


def pack(*criteria: Criterion, chosen: bool = False, **fields: Any) -> Pack:
    """Return a pack (list of criteria) for the H200. `chosen`: the operator selected it. `fields` replaces fields of the pack."""
    return Pack(**{"name": "h200-sxm", "gpu_names": ("NVIDIA H200",), "criteria": criteria, "chosen": chosen, **fields})


def reading(value: Any = None, *, name: str = "gpu.thing", scope: str = "gpu=0", absent: str = "") -> Metric:
    """Return a metric with this value in one scope, or with the reason `absent` why it has no value there."""
    return Metric(
        name=name,
        unit="s" if name.startswith("collector.") else "1",
        values={} if absent else {scope: value},
        absent={scope: absent} if absent else {},
    )


def metric(name: str, readings: Mapping[str, Value]) -> Metric:
    """Return a metric with these readings (scope -> value). A text `status: reason` is the reason why the scope has no value."""
    absent = {scope: str(value) for scope, value in readings.items() if ": " in str(value)}
    values = {scope: value for scope, value in readings.items() if scope not in absent}
    return Metric(name=name, unit="1", values=values, absent=absent)


def stage_snapshots(stage: str, *snapshots: Mapping[str, Mapping[str, Value]]) -> tuple[Snapshot, ...]:
    """Return a snapshot for each mapping from reading to `metric`'s readings: one before the stage, the others after it."""
    return tuple(
        Snapshot(
            stage=stage,
            phase="after" if number else "before",
            at=builders.WHEN,
            duration_s=0.1,
            metrics=tuple(metric(name, values) for name, values in readings.items()),
        )
        for number, readings in enumerate(snapshots)
    )


def benchmark_launch(outcome: str, reason: str = "") -> Launch:
    """Return a launch of the benchmark stage on h1."""
    return builders.launch("benchmark", ("h1",), outcome, reason)


FAILED = Verdict(host="h1", scope="gpu=1", serial="s1", name="a.b", verdict=FAIL, criterion="c", reason="bad")


def waiver(**fields: Any) -> Waiver:
    """Return a waiver of criterion `c` on h1 until 2026-11-21. `fields` replaces fields of the waiver."""
    default = {"criterion": "c", "who": "me", "why": "known", "until": "2026-11-21", "host": "h1"}
    return Waiver(**{**default, **fields})
