"""Plans and records for tests: a small fleet that is in order, to which a test does one thing."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from fleet.judge.verdict import Evidence
from fleet.plan import make_plan, read_profile
from schemas.plans import Plan
from schemas.records import MEASURED, Gpu, Launch, Metric, Observation, Record, Snapshot

NONCE = "0123456789abcdef" * 2
WHEN = "2026-11-21T04:00:00Z"

HEALTHY: dict[str, tuple[str, Any]] = {
    "gpu.ecc.enabled": ("1", True),
    "gpu.ecc.uncorrectable_volatile": ("1", 0),
    "gpu.ecc.uncorrectable_sram_aggregate": ("1", 0),
    "gpu.remapped_rows.pending": ("1", False),
    "gpu.remapped_rows.failed": ("1", False),
    "gpu.remapped_rows.uncorrectable": ("1", 0),
    "gpu.pcie.generation": ("1", 5),
    "gpu.pcie.width": ("1", 16),
    "gpu.pcie.replays": ("1", 0),
    "gpu.nvlink.active_links": ("1", 18),
}
RATES = {
    "gemm.throughput": {"bf16": 7.8e14, "fp16": 7.4e14, "tf32": 3.6e14, "fp32": 5.1e13},
    "memory_copy.bandwidth": {"device_to_device": 4.27e12, "host_to_device": 5.5e10, "device_to_host": 5.5e10},
}


def inventory(*names: str, **variables: Any) -> dict[str, dict[str, Any]]:
    """Hosts with an address each and the same variables."""
    return {
        name: {"ansible_host": f"10.0.0.{number}", "rackproof_rack": "r1", **variables}
        for number, name in enumerate(names or ("h1", "h2"), 1)
    }


def plan(*names: str, profile: str = "standard", gpu_count: int = 2, **variables: Any) -> Plan:
    """The plan of a run over these hosts."""
    hosts = inventory(*names, rackproof_gpu_count=gpu_count, **variables)
    return make_plan(read_profile(profile), hosts, run_id="r1", nonce=NONCE, created=WHEN)


def gpu(host: str, index: int) -> Gpu:
    """A GPU whose serial tells where it is."""
    return Gpu(
        index=index,
        serial=f"{host}-{index}",
        uuid=f"GPU-{host}-{index}",
        name="NVIDIA H200",
        pci_bus_id=f"0000:{index:02}:00.0",
    )


def observation(
    name: str, value: Any, *, scope: str = "host", unit: str = "1", stage: str = "benchmark", **params: Any
) -> Observation:
    """Something measured."""
    return Observation(name=name, scope=scope, stage=stage, unit=unit, status=MEASURED, value=value, params=params)


def snapshot(devices: range, *, stage: str = "preflight", phase: str = "before", **over: Any) -> Snapshot:
    """What healthy GPUs show. `over`: a name with `__` for `.` to a value for all, or to {scope: value}."""
    values = HEALTHY | {key.replace("__", "."): ("1", value) for key, value in over.items()}
    metrics = [
        Metric(
            name=name,
            unit=unit,
            values={f"gpu={index}": value[f"gpu={index}"] if isinstance(value, dict) else value for index in devices},
        )
        for name, (unit, value) in values.items()
    ]
    reasons = ("power_cap", "hw_slowdown", "sw_thermal", "hw_thermal", "hw_power_brake")
    throttle = {f"gpu={index},reason={reason}": False for index in devices for reason in reasons}
    metrics += [
        Metric(name="gpu.count", unit="1", values={"host": len(devices)}),
        Metric(name="gpu.pci_count", unit="1", values={"host": len(devices)}),
        Metric(name="xid.last_seen", unit="s", values={"host": 0.0}),
        Metric(name="gpu.throttle.active", unit="1", values=throttle),
    ]
    return Snapshot(stage=stage, phase=phase, at=WHEN, duration_s=0.1, metrics=tuple(metrics))


def launch(stage: str, members: tuple[str, ...], outcome: str = "finished", reason: str = "") -> Launch:
    """A launch and how it ended."""
    return Launch(
        stage=stage,
        outcome=outcome,
        reason=reason,
        members=members,
        began=WHEN,
        duration_s=1.0,
        deadline_s=600.0,
        ranks=(),
        log_tail="",
    )


def results(of: Plan, host: str, stage: str) -> list[Observation]:
    """Everything that the plan expects of a stage, with figures of a healthy H200."""
    planned = of.host(host)
    found = []
    for item in of.expected_of(planned):
        if item.stage == stage:
            for scope in of.scopes_of(planned, item):
                found.append(
                    Observation(
                        name=item.name,
                        scope=scope,
                        stage=stage,
                        unit="B/s" if item.name.endswith(("bw", "bandwidth")) else "1",
                        status=MEASURED,
                        value=_value(item.name, item.params),
                        params={"world_size": 4, **item.params},
                    )
                )
    return found


def _value(name: str, params: Any) -> Any:
    if name in RATES:
        return RATES[name][params.get("dtype") or params.get("direction")]
    kind = name.rsplit(".", 1)[-1]
    return {"wrong_elements": 0, "loss_ratio": 0.5, "loss_finite": True, "latency": 2e-5, "busbw": 3.6e11}.get(
        kind, 1.0
    )


def records(of: Plan, host: str) -> tuple[Record, ...]:
    """Host record and gang record of a host that is in order."""
    planned = of.host(host)
    devices = range(len(planned.devices))
    common: dict[str, Any] = {
        "run_id": of.run_id,
        "nonce": of.nonce,
        "host": host,
        "began": WHEN,
        "ended": WHEN,
        "rackproof": "0",
    }
    gpus = tuple(gpu(host, index) for index in devices)
    alone = Record(
        **common,
        gpus=gpus,
        software={"torch": "2.11.0", "nccl": "2.28.9"},
        snapshots=(snapshot(devices), snapshot(devices, stage="benchmark", phase="after")),
        observations=tuple(results(of, host, "benchmark")),
        launches=(launch("benchmark", (host,)),),
    )
    if not planned.gang:
        return (alone,)
    members = of.gangs()[planned.gang]
    together = Record(
        **common,
        gang=planned.gang,
        gpus=gpus,
        observations=tuple(results(of, host, "gang")),
        launches=(launch("gang", members),),
    )
    return (alone, together)


def evidence(of: Plan) -> dict[str, Evidence]:
    """What a fleet that is in order leaves behind."""
    return {host.name: Evidence(records=records(of, host.name)) for host in of.hosts}


def with_snapshot(left: Evidence, taken: Snapshot) -> Evidence:
    """The evidence with one more snapshot in the host record."""
    first, *rest = left.records
    return replace(left, records=(replace(first, snapshots=(*first.snapshots, taken)), *rest))


def with_observations(left: Evidence, change: Any, gang: bool = False) -> Evidence:
    """The evidence with `change` (observation -> observation or None) applied to every observation of one record."""
    changed = [
        replace(record, observations=tuple(seen for item in record.observations if (seen := change(item)) is not None))
        if bool(record.gang) == gang
        else record
        for record in left.records
    ]
    return replace(left, records=tuple(changed))
