"""Build the plan and the records of a small healthy fleet. A test changes one thing in them."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from fleet.judge.criteria import read_pack
from fleet.judge.judge import Evidence
from fleet.planning.plan import make_plan, read_profile
from schemas import documents, quick
from schemas.catalogue import Expectation, output_of
from schemas.plans import Plan, PlannedHost, expectations
from schemas.readings import BMC, READINGS
from schemas.records import MEASURED, Gpu, Launch, Metric, Observation, Rank, Record, Snapshot, to_json

NONCE = "0123456789abcdef" * 2
WHEN = "2026-11-21T04:00:00Z"
"""Time of everything in a record: began, ended, snapshots and launches."""
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
"""Reading of a healthy GPU -> its unit and value."""
NEVER_ABSENT: dict[str, Any] = {
    "clock.synchronized": True,
    "host.module.nouveau": False,
    "storage.disk.count": 2,
    "storage.state.read_only": False,
}
"""Reading for which the judge requires a value from a bare-metal host -> its value on a healthy host."""
RATES = {
    "gemm.throughput": {
        "bf16": 8.0e14,
        "fp16": 7.7e14,
        "tf32": 4.17e14,
        "fp32": 5.1e13,
        "fp64": 6.1e13,
        "fp8": 1.38e15,
    },
    "memory.bandwidth": dict.fromkeys(("copy", "read", "write", "triad"), 4.27e12),
    "host_copy.bandwidth": {"host_to_device": 5.55e10, "device_to_host": 5.54e10, "both_ways": 9.9e10},
    "peer_copy.bandwidth": {"one_way": 3.9e11, "both_ways": 7.6e11},
    "stress.throughput": {"bf16": 7.0e14},
}
"""Rates of an H200 SXM in FLOP/s or B/s: name of the observation -> value of a parameter -> rate. SETTINGS has the names of these
parameters."""
SETTINGS = ("dtype", "op", "direction")
"""Each observation in RATES has one of these parameters."""
FIGURES: dict[str, Any] = {
    "peer_copy.access": True,
    "peer_copy.latency": 2e-6,
    "pairs.bandwidth": 4.85e10,
    "integrity.wrong_words": 0,
    "integrity.tested_share": 0.98,
    "stress.wrong_products": 0,
    "stress.power": 690.0,
    "stress.efficiency": 1.01e12,
    "stress.flop_per_cycle": 4.67e5,
    "stress.clock": 1.5e9,
    "stress.temperature": 62,
    "stress.throttled_share": 0.0,
    "pulse.wrong_products": 0,
    "pulse.work": 1000.0,
    "pulse.kept_share": 1.0,
    "pulse.duty": 0.5,
    "digest.value": "00c0ffee00c0ffee",
    "digest.mismatches": 0,
    "digest.wrong_peer_copies": 0,
    "collective.transport": "P2P/CUMEM",
    "collective.nvls": True,
    "collective.channels": 24,
    "training.accuracy": 0.85,
    "fashion_mnist.accuracy": 0.92,
    "fashion_mnist.throughput": 1e6,
    "training.throughput": 4e4,
    "variants.throughput": 3e4,
    "transformer.throughput": 5e4,
    "transformer.flops": 4e14,
    "transformer.mfu": 0.45,
    "transformer.memory_peak": 6e10,
    "inference.prefill_throughput": 1.6e5,
    "inference.decode_throughput": 7.5e3,
    "inference.first_token": 0.013,
    "inference.token_interval": 0.035,
    "inference.cache_share": 0.79,
    "loss_curve.deviation": 1e-6,
    "mixture_of_experts.throughput": 5e4,
    "mixture_of_experts.mfu": 0.45,
    "overlap.hidden_share": 0.9,
    "overlap.slowdown": 1.1,
    "dataloader.throughput": 1e4,
    "dataloader.sufficiency": 2.0,
    "host_memory.total_bandwidth": 3.6e11,
    "host_memory.nodes": 2,
    "host_compute.throughput": 4e12,
    "host_compute.wrong_elements": 0,
    "benchmark.duration": 0.01,
}
"""Other observations of a healthy H200: name -> value."""
FIGURES_BY_SUFFIX: dict[str, Any] = {
    "wrong_elements": 0,
    "wrong_blocks": 0,
    "wrong_bytes": 0,
    "wrong_products": 0,
    "wrong_tokens": 0,
    "wrong_losses": 0,
    "wrong_parameters": 0,
    "misread_bytes": 0,
    "busbw": 4.8e11,
    "algbw": 2.4e11,
    "latency": 2e-5,
    "graph_latency": 1e-5,
    "loss_ratio": 0.5,
    "loss_finite": True,
    "identical": True,
}
"""Last part of the name of an observation -> value, for names that are not in FIGURES."""
EXTRA_PARAMS = {
    "host_copy.bandwidth": {"numa": "local"},
    "dataloader.sufficiency": {"network": "resnet18"},
    "fashion_mnist.accuracy": {"data": "fashion-mnist", "epochs": 20},
}
"""Name of an observation -> parameters that a benchmark reports in addition to those of the plan. `_extra_params` has more."""
SOFTWARE = {"torch": "2.11.0", "cuda": "13.0", "nccl": "2.28.9", "cudnn": "91900"}


def inventory(*names: str, **variables: Any) -> dict[str, dict[str, Any]]:
    """Return an inventory of hosts (default: h1 and h2) in rack r1, each with its own address and these variables."""
    return {
        name: {"ansible_host": f"10.0.0.{number}", "rackproof_rack": "r1", **variables}
        for number, name in enumerate(names or ("h1", "h2"), 1)
    }


SIZES = {"benchmark": [8, 128 << 20, 1 << 30, 8 << 30], "gang": [8, 64 << 20, 1 << 30, 4 << 30]}
"""Stage -> sizes of the collectives in a plan, in bytes: the smallest and the three largest of the profile `standard`."""
OPS = {
    "benchmark": ["all_reduce", "all_gather", "broadcast", "gather", "hypercube"],
    "gang": ["all_reduce", "all_to_all"],
}
"""Stage -> collectives in a plan. With all collectives and sizes of the profile `standard`, judging would take three times as
long."""


def plan(
    *names: str,
    profile: str = "standard",
    gpu_count: int = 2,
    with_all_sizes: bool = False,
    with_all_ops: bool = False,
    **variables: Any,
) -> Plan:
    """Return the plan of a run on these hosts.

    With the profile `standard`, the plan has only the collectives in OPS with the sizes in SIZES. `with_all_ops`: it has all
    collectives of the profile, with the sizes in SIZES. `with_all_sizes`: it has all collectives and all sizes of the profile.
    """
    hosts = inventory(*names, rackproof_gpu_count=gpu_count, **variables)
    document = read_profile(profile)
    for stage, sizes in SIZES.items() if profile == "standard" and not with_all_sizes else ():
        settings = {"sizes_bytes": sizes} if with_all_ops else {"ops": OPS[stage], "sizes_bytes": sizes}
        document["stages"][stage]["benchmarks"]["collective"] |= settings
    return make_plan(document, hosts, run_id="r1", nonce=NONCE, created=WHEN)


def gpu(host: str, index: int) -> Gpu:
    """Return a GPU whose serial is made of host and index."""
    return Gpu(
        index=index,
        serial=f"{host}-{index}",
        uuid=f"GPU-{host}-{index}",
        name="NVIDIA H200",
        pci_bus_id=f"0000:{index:02}:00.0",
    )


def observation(
    name: str, value: Any, *, scope: str = "host", unit: str = "", stage: str = "benchmark", **params: Any
) -> Observation:
    """Return a measured observation, by default with the unit that `schemas/catalogue.py` has for this name."""
    unit = unit or _unit(name)
    return Observation(name=name, scope=scope, stage=stage, unit=unit, status=MEASURED, value=value, params=params)


def snapshot(devices: range, *, stage: str = "preflight", phase: str = "before", **changes: Any) -> Snapshot:
    """Return a snapshot of healthy GPUs.

    Args:
        devices: indices of the GPUs.
        changes: reading (with `__` for `.`) -> value of every GPU, or a mapping from the scope of each GPU to its value.
    """
    values = HEALTHY | {key.replace("__", "."): ("1", value) for key, value in changes.items()}
    metrics = [
        Metric(
            name=name,
            unit=unit,
            values={f"gpu={index}": value[f"gpu={index}"] if isinstance(value, dict) else value for index in devices},
        )
        for name, (unit, value) in values.items()
    ]
    reasons = ("power_cap", "hw_slowdown", "sw_thermal", "hw_thermal", "hw_power_brake")
    links = {f"gpu={first},peer={second}": "NV18" for first, second in itertools.permutations(devices, 2)}
    throttle = {f"gpu={index},reason={reason}": False for index in devices for reason in reasons}
    metrics += [
        Metric(name="gpu.count", unit="1", values={"host": len(devices)}),
        Metric(name="gpu.pci_count", unit="1", values={"host": len(devices)}),
        Metric(name="xid.last_seen", unit="s", values={"host": 0.0}),
        Metric(name="gpu.throttle.active", unit="1", values=throttle),
        Metric(name="gpu.peer.link", unit="1", values=links),
    ]
    metrics += optional_readings(devices, frozenset(metric.name for metric in metrics))
    return Snapshot(stage=stage, phase=phase, at=WHEN, duration_s=0.1, metrics=tuple(metrics))


@cache  # most tests call it with the same arguments
def optional_readings(devices: range, exported: frozenset[str]) -> tuple[Metric, ...]:
    """Return the readings in NEVER_ABSENT, and those that optional H200 criteria judge.

    Readings in NEVER_ABSENT have the values given there; all others are unsupported. Readings of BMCs are left out. So are those
    in `exported`, because the snapshot has them already.
    """
    metrics: dict[str, Metric] = {}
    for item in read_pack("h200-sxm").criteria:
        if item.name.startswith(BMC):
            continue  # read by the control node, not by hosts
        if item.name not in READINGS or item.name in exported or not (item.optional or item.name in NEVER_ABSENT):
            continue
        labels = "".join(f",{key}={value}" for key, value in item.where.items() if item.scope == "reason")
        is_per_gpu = item.scope in ("gpu", "reason", "link")
        scopes = [f"gpu={index}{labels}" for index in devices] if is_per_gpu else ["host"]
        metric = metrics.get(item.name, Metric(name=item.name, unit=item.unit, values={}, absent={}))
        if item.name in NEVER_ABSENT:
            metric = replace(metric, values=dict.fromkeys(scopes, NEVER_ABSENT[item.name]))
        else:
            why = dict.fromkeys(scopes, "unsupported: not on this host")
            metric = replace(metric, absent={**metric.absent, **why})
        metrics[item.name] = metric
    return tuple(metrics.values())


def ranks(number: int, first: int = 0) -> tuple[Rank, ...]:
    """Return `number` ranks of one host, of which the first is rank `first`. All of them exited with 0."""
    return tuple(
        Rank(rank=first + index, local_rank=index, phase="end", exit_code=0, log_tail="") for index in range(number)
    )


def with_benchmarks(run_plan: Plan, **benchmarks: Mapping[str, Mapping[str, Any]]) -> Plan:
    """Return the plan with only these benchmarks.

    Args:
        benchmarks: stage -> benchmark -> settings. A stage that is not given has no benchmarks.
    """
    stages = tuple(replace(stage, benchmarks=benchmarks.get(stage.name, {})) for stage in run_plan.stages)
    return replace(run_plan, stages=stages, expected=expectations(stages, rehearsal=run_plan.rehearsal))


def launch(
    stage: str,
    members: tuple[str, ...],
    outcome: str = "finished",
    reason: str = "",
    *,
    devices: int = 1,
    first: int = 0,
) -> Launch:
    """Return a launch that ended with `outcome`, because of `reason`.

    If `outcome` is `finished`, the launch has `devices` ranks, numbered from `first`. Otherwise it has none.
    """
    return Launch(
        stage=stage,
        outcome=outcome,
        reason=reason,
        members=members,
        began=WHEN,
        duration_s=1.0,
        deadline_s=60.0,
        ranks=ranks(devices, first) if outcome == "finished" else (),
        log_tail="",
    )


def results(run_plan: Plan, host: str, stage: str) -> list[Observation]:
    """Return every observation that the plan expects of this host in a stage, with values of a healthy H200.

    If the plan expects `host_memory.nodes`, the figures of the NUMA nodes are added.
    """
    planned = run_plan.host(host)
    expected = [
        Observation(
            name=item.name,
            scope=scope,
            stage=stage,
            unit=_unit(item.name),
            status=MEASURED,
            value=_value(item.name, item.params),
            params={**_world_size(run_plan, planned, stage), **_extra_params(planned, item), **item.params},
        )
        for item in run_plan.expected_of(planned)
        if item.stage == stage
        for scope in run_plan.scopes_of(planned, item)
    ]
    nodes = int(FIGURES["host_memory.nodes"]) if any(item.name == "host_memory.nodes" for item in expected) else 0
    return [*expected, *(item for node in range(nodes) for item in node_figures(f"numa={node}", stage))]


def node_figures(scope: str, stage: str = "benchmark") -> list[Observation]:
    """Return the figures of a NUMA node, which the plan does not list."""
    figures = [("wrong_elements", "1", 0, {})]
    for placement in ("local", "remote"):
        figures.append(("latency", "s", 1.1e-7, {"placement": placement}))
        figures += [("bandwidth", "B/s", 1.8e11, {"placement": placement, "op": op}) for op in ("copy", "triad")]
    return [
        observation(f"host_memory.{name}", value, scope=scope, unit=unit, stage=stage, **params)
        for name, unit, value, params in figures
    ]


def _world_size(run_plan: Plan, host: PlannedHost, stage: str) -> dict[str, int]:
    """Return the parameter `world_size`: the number of ranks of the host or, in the stage `gang`, of all hosts of its gang."""
    return {"world_size": run_plan.ranks(run_plan.gangs()[host.gang]) if stage == "gang" else len(host.devices)}


def _extra_params(host: PlannedHost, item: Expectation) -> Mapping[str, Any]:
    """Return the parameters that a benchmark reports in addition to those of the plan."""
    if item.name.startswith("collective.") and "placement" in item.params:
        return {name: FIGURES[f"collective.{name}"] for name in ("transport", "nvls")}
    extra = EXTRA_PARAMS.get(item.name, {})
    sharing = item.params.get("sharing") if item.name == "host_copy.bandwidth" else None
    return {**extra, "devices": len(host.devices) if sharing == "all_gpus" else 1} if sharing else extra


@cache
def _unit(name: str) -> str:
    """Return the unit of an observation in the catalogue, or `1` if the catalogue does not have the observation."""
    output = output_of(name)
    return output.unit if output else "1"


def _value(name: str, params: Any) -> Any:
    if name in RATES:
        return RATES[name][next(params[key] for key in SETTINGS if key in params)]
    if name.startswith("collective.") and name.endswith(".latency"):
        return params["size_bytes"] / FIGURES_BY_SUFFIX["algbw"]
    return FIGURES.get(name, FIGURES_BY_SUFFIX.get(name.rsplit(".", 1)[-1], 1.0))


def slowed_collective(observation: Observation, *, op: str) -> Observation:
    """Return the observation as if the collective `op` had a rate of 1 GB/s. Other observations are returned unchanged."""
    if observation.name in (f"collective.{op}.algbw", f"collective.{op}.busbw"):
        return replace(observation, value=1e9)
    if observation.name == f"collective.{op}.latency":
        return replace(observation, value=observation.params["size_bytes"] / 1e9)  # type: ignore[operator]
    return observation


def records(run_plan: Plan, host: str) -> tuple[Record, ...]:
    """Return the host record of a healthy host and, if it launches with other hosts (a gang), its gang record."""
    planned = run_plan.host(host)
    devices = range(len(planned.devices))
    common: dict[str, Any] = {
        "run_id": run_plan.run_id,
        "nonce": run_plan.nonce,
        "host": host,
        "began": WHEN,
        "ended": WHEN,
        "rackproof": "0",
    }
    gpus = tuple(gpu(host, index) for index in devices)
    host_record = Record(
        **common,
        gpus=gpus,
        software=SOFTWARE,
        snapshots=(
            snapshot(devices),
            snapshot(devices, stage="benchmark"),
            snapshot(devices, stage="benchmark", phase="after"),
        ),
        observations=tuple(results(run_plan, host, "benchmark")),
        launches=(launch("benchmark", (host,), devices=len(devices)),),
    )
    if not planned.gang:
        return (host_record,)
    members = run_plan.gangs()[planned.gang]
    gang_record = Record(
        **common,
        gang=planned.gang,
        gpus=gpus,
        software=SOFTWARE,
        snapshots=(snapshot(devices, stage="gang"), snapshot(devices, stage="gang", phase="after")),
        observations=tuple(results(run_plan, host, "gang")),
        launches=(launch("gang", members, devices=len(devices), first=run_plan.ranks(members[: members.index(host)])),),
    )
    return (host_record, gang_record)


def write_record(path: Path, record: Record) -> None:
    """Write a record. `quick.text` is faster than `documents.write`, and a test needs no sync to the disk."""
    documents.write_text(path, quick.text(to_json(record)), durable=False)


def evidence(run_plan: Plan) -> dict[str, Evidence]:
    """Return host -> evidence for a healthy fleet."""
    return {host.name: Evidence(records=records(run_plan, host.name)) for host in run_plan.hosts}


def with_snapshot(evidence: Evidence, taken: Snapshot) -> Evidence:
    """Return the evidence with the snapshot `taken` in the last record, in place of any of the same stage and phase.

    `taken` becomes the last snapshot of the record, or the last but one if its phase is `during`.
    """
    *others, last = evidence.records
    kept = [
        snapshot_ for snapshot_ in last.snapshots if (snapshot_.stage, snapshot_.phase) != (taken.stage, taken.phase)
    ]
    after = kept[-1:] if taken.phase == "during" else []
    return replace(
        evidence, records=(*others, replace(last, snapshots=(*kept[: len(kept) - len(after)], taken, *after)))
    )


def with_observations(evidence: Evidence, change: Any, gang: bool = False) -> Evidence:
    """Return the evidence with `change` applied to the observations of the host record or, if `gang`, of the gang record.

    `change` returns the new observation, or None to remove it.
    """
    changed = [
        replace(
            record,
            observations=tuple(
                observation_ for item in record.observations if (observation_ := change(item)) is not None
            ),
        )
        if bool(record.gang) == gang
        else record
        for record in evidence.records
    ]
    return replace(evidence, records=tuple(changed))
