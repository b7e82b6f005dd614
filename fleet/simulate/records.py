"""Make templates of the two records that a healthy host writes: its host record and its gang record.

The host record has what the host measures alone. The gang record has what it measures in one launch together with the other hosts
of its gang.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from functools import cache, lru_cache
from typing import Any

from fleet.judge.criteria import read_packs
from fleet.judge.derived_readings import MODULE, OF_MODULES, TOGETHER
from fleet.simulate.cabling import HOSTS_PER_LEAF, cabling_metrics, cabling_values
from fleet.simulate.figures import SimulatedRanks, healthy_observations
from fleet.simulate.gpu_data import LEVELS, GpuData, json_numbers
from fleet.simulate.memory_modules import memory_module_metrics
from fleet.simulate.ports import VERBS, port_metrics, port_observations, port_values, verbs_seconds
from fleet.simulate.template import Placeholder, Slot, Template, compile_template
from fleet.simulate.timelines import make_timeline
from schemas import VERSION
from schemas.catalogue import DURATION, needs_torch
from schemas.plans import Plan, PlannedHost
from schemas.readings import READINGS
from schemas.records import RECORD_SCHEMA
from schemas.scopes import Scope
from schemas.stages import BENCHMARK, GANG

Doc = dict[str, Any]
ALL, JUDGED = "all", "judged"
"""ALL: records have all readings. JUDGED: records are small, with only the readings that a criterion names and a few more."""
_ALWAYS_INCLUDED = ("gpu.serial", "gpu.uuid", "gpu.peer.link", "host.uptime", "infiniband.link_layer", "collector.")
"""JUDGED includes the readings with these name prefixes, even if no criterion names them."""
_REPORTED_TOGETHER = frozenset({*TOGETHER, MODULE, *OF_MODULES})
"""Readings that the agent always reports together with certain other readings (see `derived_readings`).

JUDGED includes them. Otherwise, the judge would report them as missing from records that have the other readings.
"""
NVLINKS = 18
"""Number of NVLinks of each GPU."""
READINGS_GPUS = 4
"""Number of GPUs of the real host whose readings are in the data file of the GPU model."""
PROPORTIONAL_READINGS = (
    "host.cpu.count",
    "host.cpu.cores",
    "host.cpu.threads",
    "host.memory.total",
    "host.memory.available",
    "host.numa.memory_total",
    "host.numa.memory_free",
)
"""Readings that are proportional to the number of GPUs of the host."""
TIMES = {"gpu.throttle.time": 38.6}
"""Reading that counts seconds under load -> its highest value in the data file, which is from a real run. A simulated run may be
shorter, so `_values` scales the reading down."""
GPU_COUNTS = ("gpu.count", "gpu.pci_count", "pcie.device_count")
"""Readings whose value for the host is its number of GPUs."""
DURING_GANG = "during the gang launch"
"""Source of the readings of a snapshot during a gang launch.

Counters are taken from the phase `after` of the data file, because the host record already ended with these values, and a counter
must not fall. All other readings are taken from the phase `during`.
"""
BOOT_ID: Doc = {"name": "host.boot_id", "unit": "1", "values": {"host": Placeholder("boot")}}
"""The reading that identifies the boot of a host."""
UPTIME_S = 86_400.0
"""Uptime of each host in seconds when the plan was made."""
START_S, STAGE_GAP_S = 12.0, 4.0
"""Seconds from the start of a launch to its first benchmark; seconds from the end of one stage to the start of the next."""
FIRST_LAUNCH_S = 20.0
"""Start of the first launch, in seconds after the plan was made."""
DEFAULT_DURATION_S = 5.0
"""Assumed duration in seconds of a benchmark that has no duration in the data file."""


@dataclass(frozen=True, kw_only=True)
class RecordShape:
    """What hosts must have in common to share a template."""

    devices: int
    partners: int
    """Number of partners of the host in the benchmark `pairs`; 0 for a host record."""
    members: int
    """Number of hosts in the gang launch; 0 for a host record."""
    port_partners: int = 0
    """Number of partners of the host in the benchmark `verbs`, which measures RDMA ports; 0 for a host record."""
    later_port_partners: int = 0
    """Number of partners in `verbs` that come after the host in the gang."""
    readings: str = ALL
    """ALL or JUDGED."""


@dataclass(frozen=True, kw_only=True)
class RunTiming:
    """When stages begin and end, in seconds after the plan was made."""

    benchmark: float
    after_benchmark: float
    gang: float
    after_gang: float


Snapshots = Sequence[tuple[str, str, str, float]]
"""For each snapshot: its stage, its phase, the source of its readings (a phase in the data file, or DURING_GANG), and its time in
seconds after the plan was made."""


def timing(plan: Plan, data: GpuData) -> RunTiming:
    """Return when the stages of a plan begin and end. The times are the same on every host."""
    durations = {
        stage.name: START_S + sum(benchmark_durations(plan, stage.name, data).values()) for stage in plan.stages
    }
    after_benchmark = FIRST_LAUNCH_S + durations.get(BENCHMARK, 0.0)
    gang = after_benchmark + STAGE_GAP_S
    return RunTiming(
        benchmark=FIRST_LAUNCH_S,
        after_benchmark=after_benchmark,
        gang=gang,
        after_gang=gang + durations.get(GANG, 0.0),
    )


def benchmark_durations(plan: Plan, stage: str, data: GpuData) -> dict[str, float]:
    """Return benchmark -> its duration in seconds, for the benchmarks of a stage in the order of the plan."""
    medians = {
        figure["params"]["benchmark"]: float(figure["spread"][0] if "spread" in figure else figure["value"])
        for figure in data.figures[DURATION.name]
    }
    medians |= {VERBS: verbs_seconds(plan, stage)} if VERBS in plan.stage(stage).benchmarks else {}
    return {name: medians.get(name, DEFAULT_DURATION_S) for name in plan.stage(stage).benchmarks}


def _timeline(plan: Plan, stage: str, data: GpuData, shape: RecordShape) -> Doc:
    """Return the member `timeline` to add to a launch; no member (`{}`) if the record has only the JUDGED readings."""
    if shape.readings != ALL:
        return {}
    return {"timeline": make_timeline(stage, shape.devices, benchmark_durations(plan, stage, data), START_S)}


def time_after(start: str, seconds: float) -> str:
    """Return the ISO time that is `seconds` after `start`."""
    time = datetime.fromisoformat(start.replace("Z", "+00:00")) + timedelta(seconds=seconds)
    return f"{time:%Y-%m-%dT%H:%M:%S}.{time.microsecond:06}Z"


def host_template(plan: Plan, host: PlannedHost, data: GpuData, shape: RecordShape) -> Template:
    """Return the template of the host record: what a host measures alone."""
    times, has_benchmarks = timing(plan, data), any(stage.name == BENCHMARK for stage in plan.stages)
    snapshots = [("preflight", "before", "before", 5.0)]
    launches: list[Doc] = []
    observations: list[Doc] = []
    if has_benchmarks:
        snapshots += [
            (BENCHMARK, "before", "before", times.benchmark - 4),
            (BENCHMARK, "during", "during", (times.benchmark + times.after_benchmark) / 2),
            (BENCHMARK, "after", "after", times.after_benchmark),
        ]
        group = SimulatedRanks(stage=BENCHMARK, ranks=shape.devices, ranks_per_host=shape.devices)
        members, ranks = Placeholder("host", '["%s"]'), _ranks(range(shape.devices))
        launch = _launch(plan, BENCHMARK, members, ranks, times.benchmark, times.after_benchmark)
        launches = [launch | _timeline(plan, BENCHMARK, data, shape)]
        observations = [*healthy_observations(data, plan, host, group), *port_observations(plan, host, BENCHMARK, 0, 0)]
    last = times.after_benchmark if has_benchmarks else 6.0
    return compile_template(_record(plan, host, shape, data, snapshots, observations, launches, last))


def gang_template(plan: Plan, host: PlannedHost, data: GpuData, shape: RecordShape) -> Template:
    """Return the template of the gang record: what a host measures in one launch with the other hosts of its gang."""
    times = timing(plan, data)
    snapshots = [
        (GANG, "before", "after", times.gang - 2),
        (GANG, "during", DURING_GANG, (times.gang + times.after_gang) / 2),
        (GANG, "after", "after", times.after_gang),
    ]
    group = SimulatedRanks(
        stage=GANG,
        ranks=shape.members * shape.devices,
        ranks_per_host=shape.devices,
        partners=shape.partners,
    )
    observations = [
        *healthy_observations(data, plan, host, group),
        *port_observations(plan, host, GANG, shape.port_partners, shape.later_port_partners),
    ]
    members, ranks = Placeholder("members", "%s"), Placeholder("ranks", "%s")
    launch = {
        **_launch(plan, GANG, members, ranks, times.gang, times.after_gang),
        "number": Placeholder("number", "%s"),
        **_timeline(plan, GANG, data, shape),
    }
    record = _record(plan, host, shape, data, snapshots, observations, [launch], times.after_gang)
    return compile_template({**record, "gang": Placeholder("gang")})


def _record(
    plan: Plan,
    host: PlannedHost,
    shape: RecordShape,
    data: GpuData,
    snapshots: Snapshots,
    observations: Sequence[Doc],
    launches: Sequence[Doc],
    last: float,
) -> Doc:
    times = timing(plan, data)
    loaded_s = times.after_benchmark - times.benchmark
    stages = {launch["stage"] for launch in launches}
    uses_torch = any(needs_torch(stage.benchmarks) for stage in plan.stages if stage.name in stages)
    return {
        "schema": RECORD_SCHEMA,
        "simulated": True,
        "run_id": Placeholder("run_id"),
        "nonce": Placeholder("nonce"),
        "host": Placeholder("host"),
        "began": _at(5.0),
        "ended": _at(last + 1),
        "rackproof": VERSION,
        "gpus": [_gpu(data, index) for index in range(shape.devices)],
        "software": dict(data.software) if uses_torch else {},
        "snapshots": [
            {
                "stage": stage,
                "phase": phase,
                "at": _at(at),
                "duration_s": 0.5,
                "metrics": [
                    *_metrics(data, shape, readings_phase, at, loaded_s),
                    *(each for each in port_metrics(host, shape.devices) if _is_wanted(each["name"], shape.readings)),
                    *(
                        (BOOT_ID, *cabling_metrics(shape.devices), *memory_module_metrics())
                        if phase != "during"
                        else ()
                    ),
                ],
            }
            for stage, phase, readings_phase, at in _selected(snapshots, shape.readings)
        ],
        "observations": observations,
        "launches": launches,
    }


def _selected(snapshots: Snapshots, readings: str) -> Snapshots:
    """Return the snapshots for a record. With `readings` JUDGED, omit the phase `during`, which a record need not have."""
    return snapshots if readings == ALL else [item for item in snapshots if item[1] != "during"]


def _at(seconds: float) -> Placeholder:
    return Placeholder(f"at {seconds}")


def time_values(template: Template, created: str, delay_s: float = 0.0) -> dict[str, str]:
    """Return placeholder -> its text, for the placeholders of times and uptimes.

    Args:
        template: the template of a record.
        created: when the plan was made.
        delay_s: seconds to add to all times and uptimes in the template.
    """
    values = {}
    for name in template.placeholders:
        kind, _, seconds = name.partition(" ")
        if kind == "at":
            values[name] = time_after(created, float(seconds) + delay_s)
        elif kind == "up":
            values[name] = f"{UPTIME_S + float(seconds) + delay_s:.2f}"
    return values


def _gpu(data: GpuData, index: int) -> Doc:
    return {
        "index": index,
        "serial": Placeholder(f"serial{index}"),
        "uuid": Placeholder(f"uuid{index}"),
        "name": data.gpu,
        "pci_bus_id": bus_id(index),
    }


def bus_id(index: int) -> str:
    """Return the PCI address of a GPU in the format of NVML."""
    return f"00000000:{6 + index:02X}:00.0"


def pci(index: int) -> str:
    """Return the PCI address of a GPU in the format of sysfs."""
    return bus_id(index)[4:].lower()


def _ranks(numbers: Sequence[int]) -> list[Doc]:
    return [
        {"rank": number, "local_rank": index, "phase": "end", "exit_code": 0, "log_tail": ""}
        for index, number in enumerate(numbers)
    ]


def ranks_json(first: int, count: int) -> str:
    """Return the `count` ranks of one host of a gang as JSON. `first` is the number of the first of them in the gang."""
    return json.dumps(_ranks(range(first, first + count)), separators=(",", ":"))


def members_json(members: Sequence[str]) -> str:
    """Return the names of the hosts of a launch as JSON."""
    return json.dumps(list(members), separators=(",", ":"))


def _launch(plan: Plan, stage: str, members: Any, ranks: Any, began: float, ended: float) -> Doc:
    return {
        "stage": stage,
        "outcome": "finished",
        "reason": "",
        "members": members,
        "began": _at(began),
        "duration_s": round(ended - began - 1, 3),
        "deadline_s": plan.stage(stage).deadline_s,
        "ranks": ranks,
        "log_tail": "",
    }


@cache
def judged_names() -> tuple[str, ...]:
    """Return the names of readings and figures in the criteria of the shipped packs. Some are patterns such as `launch.*`."""
    return tuple({criterion.name for pack in read_packs([]) for criterion in pack.criteria})


def _is_wanted(name: str, readings: str) -> bool:
    is_named = name in judged_names() or name in _REPORTED_TOGETHER
    return readings == ALL or name.startswith(_ALWAYS_INCLUDED) or is_named


def _metrics(data: GpuData, shape: RecordShape, phase: str, at: float, loaded_s: float) -> Iterator[Doc]:
    """Yield the metrics of one snapshot from the data file, except those of InfiniBand.

    Args:
        data: data file of the GPU model.
        shape: shape of the record.
        phase: phase in the data file, or DURING_GANG.
        at: time of the snapshot in seconds after the plan was made.
        loaded_s: seconds for which the benchmark stage loads the GPUs.
    """
    for family in data.readings:
        if family["name"].startswith("infiniband."):
            continue  # `port_metrics` makes these
        readings = family.get("during" if phase == DURING_GANG else phase)
        known = READINGS.get(family["name"])
        if phase == DURING_GANG and readings is not None and known and known.counter:
            readings = family["after"]
        # If the readings of a phase equal those of the phase `before`, the data file has only the word `before` for that phase.
        readings = family["before"] if readings == "before" else readings
        if readings is None or not _is_wanted(family["name"], shape.readings):
            continue
        metric: Doc = {"name": family["name"], "unit": family["unit"]}
        for key in ("values", "absent"):
            if key in readings:
                metric[key] = dict(_values(family["name"], readings[key], shape.devices, at, loaded_s))
        yield metric


def _values(
    name: str, readings: Mapping[str, Any], devices: int, at: float, loaded_s: float
) -> Iterator[tuple[str, Any]]:
    """Yield scope and value of each reading of a metric."""
    for general_scope, value in readings.items():
        if name in TIMES and isinstance(value, list):
            # The real run may have been longer than the simulated one: scale the value so that it is at most 45 % of `loaded_s`.
            value = [number * min(1.0, 0.45 * loaded_s / TIMES[name]) for number in value]
        for gpu, scope in _scopes(general_scope, devices):
            yield scope, _value(name, value, gpu, devices, at)


def _scopes(general_scope: str, devices: int) -> Iterator[tuple[int, str]]:
    """Expand a scope with `*`, such as `gpu=*`: yield each GPU index with its scope.

    If the scope has no `*`, yield -1 and the unchanged scope.
    """
    if "*" not in general_scope:
        yield -1, general_scope
        return
    labels = Scope.parse(general_scope)
    for gpu in range(devices):
        if labels.device_kind == "pci":
            yield gpu, general_scope.replace("pci=*", f"pci={pci(gpu)}")
        elif labels.get("link") == "*":
            yield from ((gpu, f"gpu={gpu},link={link}") for link in range(NVLINKS))
        elif labels.get("peer") == "*":
            yield from ((gpu, f"gpu={gpu},peer={peer}") for peer in range(devices) if peer != gpu)
        else:
            yield gpu, general_scope.replace("gpu=*", f"gpu={gpu}")


_IDENTITIES: Mapping[str, Callable[[int, float], Any]] = {
    "gpu.uuid": lambda gpu, _at: Placeholder(f"uuid{gpu}"),
    "gpu.serial": lambda gpu, _at: Placeholder(f"serial{gpu}"),
    "gpu.pci_bus_id": lambda gpu, _at: bus_id(max(gpu, 0)),
    "gpu.minor_number": lambda gpu, _at: gpu,
    "gpu.module_id": lambda gpu, _at: gpu + 1,
    "gpu.board_id": lambda gpu, _at: gpu,
    "host.uptime": lambda _gpu, at: Placeholder(f"up {at}", "%s"),
}
"""Reading -> function that takes the index of the GPU and the time of the snapshot, and returns the value."""


def _value(name: str, value: Any, gpu: int, devices: int, at: float) -> Any:
    """Return the value of a reading.

    - identities, such as serials: those of the simulated host
    - GPU_COUNTS: the number of GPUs of the simulated host
    - PROPORTIONAL_READINGS: the measured value, scaled to that number
    - readings with a measured minimum and maximum: a slot with levels between these two
    - other readings: the measured value
    """
    if make_identity := _IDENTITIES.get(name):
        return make_identity(gpu, at)
    if name in GPU_COUNTS and gpu < 0:
        return devices
    if name in PROPORTIONAL_READINGS:
        return value * devices // READINGS_GPUS
    if isinstance(value, list):
        return Slot(texts=_steps(*value), group=f"gpu={gpu}/readings")
    return value


@lru_cache(maxsize=4096, typed=True)
def _steps(minimum: float, maximum: float) -> Sequence[str]:
    """Return the value at each level as JSON. Between integers, all values are integers."""
    steps = [minimum + (maximum - minimum) * level / (LEVELS - 1) for level in range(LEVELS)]
    is_integer = isinstance(minimum, int) and isinstance(maximum, int)
    return [str(round(step)) for step in steps] if is_integer else json_numbers(steps)


def host_values(
    run: Mapping[str, str], host: str, number: int, devices: int, hosts_per_leaf: int = HOSTS_PER_LEAF
) -> dict[str, str]:
    """Return placeholder -> its text for a host: run, name, identities of boot and GPUs, cables and ports.

    Between simulations of the same fleet, only the texts in `run` differ.

    Args:
        run: run id and nonce.
        host: name of the host.
        number: position of the host in the plan.
        devices: number of GPUs of the host.
        hosts_per_leaf: number of hosts at each leaf switch.
    """
    serials = {f"serial{gpu}": serial(number, gpu) for gpu in range(devices)}
    uuids = {f"uuid{gpu}": f"GPU-51400000-0000-4000-8000-{number:08x}{gpu:04x}" for gpu in range(devices)}
    identity = {"host": host, "boot": f"51400000-0000-4000-8000-{number:012x}", **serials, **uuids}
    return {**run, **identity, **cabling_values(number, hosts_per_leaf), **port_values(number)}


def serial(number: int, gpu: int) -> str:
    """Return the serial of a simulated GPU. No real GPU has such a serial."""
    return f"SIM{number:06d}{gpu:02d}"
