"""The records that hosts in order would have left: templates of the host record and of the gang record."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from functools import cache
from typing import Any

from fleet.judge.criteria import read_packs
from fleet.simulate.figures import Crowd, observations
from fleet.simulate.measured import LEVELS, Measured, shortened
from fleet.simulate.template import Cell, Slot, Template, compiled
from fleet.simulate.traces import trace
from schemas import VERSION
from schemas.catalogue import DURATION
from schemas.plans import Plan, PlannedHost
from schemas.records import RECORD_SCHEMA
from schemas.scopes import Scope
from schemas.stages import BENCHMARK, GANG

Doc = dict[str, Any]
ALL, JUDGED = "all", "judged"
"""Which readings a record has: all, or only those that a criterion matches, to keep large fleets small."""
_ALWAYS = ("gpu.serial", "gpu.uuid", "gpu.peer.link", "host.uptime", "collector.")
LINKS = 18
PER_GPU = ("host.cpu.count", "host.cpu.cores", "host.cpu.threads", "host.memory.total", "host.memory.available")
"""Counts of the measured host, which had two GPUs; a host with more GPUs gets proportionally more."""
PER_HOST = ("gpu.count", "gpu.pci_count", "pcie.device_count", "storage.disk.count")
READINGS_GPUS = 2
UP_S = 86_400.0
"""Uptime when the run begins."""
START_S, BETWEEN_S = 12.0, 4.0
"""What a launch takes before the first benchmark, and what lies between two stages."""


@dataclass(frozen=True, kw_only=True)
class Shape:
    """What hosts must have in common to share a template."""

    devices: int
    partners: int
    """Hosts that it meets in its gang."""
    members: int
    """Hosts of its gang that launch together; 0: it is in none."""
    readings: str = ALL


@dataclass(frozen=True, kw_only=True)
class Timing:
    """Seconds from the plan's making to what happens."""

    benchmark: float
    after_benchmark: float
    gang: float
    after_gang: float


def timing(plan: Plan, measured: Measured) -> Timing:
    """When the stages of a plan begin and end on every host."""
    took = {stage.name: START_S + sum(lasted(plan, stage.name, measured).values()) for stage in plan.stages}
    after = 20.0 + took.get("benchmark", 0.0)
    return Timing(
        benchmark=20.0,
        after_benchmark=after,
        gang=after + BETWEEN_S,
        after_gang=after + BETWEEN_S + took.get(GANG, 0.0),
    )


def lasted(plan: Plan, stage: str, measured: Measured) -> dict[str, float]:
    """Benchmark -> seconds, in the order of the plan."""
    durations = {figure["params"]["benchmark"]: _usual(figure) for figure in measured.figures[DURATION.name]}
    return {name: durations.get(name, 5.0) for name in plan.stage(stage).benchmarks}


def _over_time(plan: Plan, stage: str, measured: Measured, shape: Shape) -> Doc:
    """What the GPUs showed meanwhile, where a record has more than is judged."""
    if shape.readings != ALL:
        return {}
    return {"timeline": trace(stage, shape.devices, lasted(plan, stage, measured), START_S)}


def _usual(figure: Mapping[str, Any]) -> float:
    return float(figure["spread"][0] if "spread" in figure else figure["value"])


def moment(created: str, seconds: float) -> str:
    """ISO time so long after another."""
    then = datetime.fromisoformat(created.replace("Z", "+00:00")) + timedelta(seconds=seconds)
    return f"{then:%Y-%m-%dT%H:%M:%S}.{then.microsecond:06}Z"


def alone(plan: Plan, host: PlannedHost, measured: Measured, shape: Shape) -> Template:
    """The host record: what it measured by itself."""
    times, has_stage = timing(plan, measured), any(stage.name == BENCHMARK for stage in plan.stages)
    shots = [("preflight", "before", "before", 5.0)]
    launches: list[Doc] = []
    observation: list[Doc] = []
    if has_stage:
        shots += [
            ("benchmark", "before", "before", times.benchmark - 4),
            ("benchmark", "during", "during", (times.benchmark + times.after_benchmark) / 2),
            ("benchmark", "after", "after", times.after_benchmark),
        ]
        group = Crowd(stage="benchmark", ranks=shape.devices, per_host=shape.devices)
        launch = _launch(plan, "benchmark", Cell("host", '["%s"]'), _ranks(range(shape.devices)), times.benchmark,
                         times.after_benchmark)  # fmt: skip
        launches = [launch | _over_time(plan, "benchmark", measured, shape)]
        observation = list(observations(measured, plan, host, group))
    last = times.after_benchmark if has_stage else 6.0
    return compiled(_record(shape, measured, shots, observation, launches, last))


def together(plan: Plan, host: PlannedHost, measured: Measured, shape: Shape) -> Template:
    """The gang record: what it measured with the others, in one launch."""
    times = timing(plan, measured)
    shots = [
        (GANG, "before", "after", times.gang - 2),
        (GANG, "during", "during", (times.gang + times.after_gang) / 2),
        (GANG, "after", "after", times.after_gang),
    ]
    group = Crowd(stage=GANG, ranks=shape.members * shape.devices, per_host=shape.devices, partners=shape.partners)
    observation = list(observations(measured, plan, host, group))
    more = _over_time(plan, GANG, measured, shape)
    launch = _launch(plan, GANG, Cell("members", "%s"), Cell("ranks", "%s"), times.gang, times.after_gang)
    document = _record(
        shape, measured, shots, observation, [{**launch, "number": Cell("number", "%s"), **more}], times.after_gang
    )
    return compiled({**document, "gang": Cell("gang")})


def _record(
    shape: Shape,
    measured: Measured,
    shots: Sequence[tuple[str, str, str, float]],
    observation: Sequence[Doc],
    launches: Sequence[Doc],
    last: float,
) -> Doc:
    return {
        "schema": RECORD_SCHEMA,
        "simulated": True,
        "run_id": Cell("run_id"),
        "nonce": Cell("nonce"),
        "host": Cell("host"),
        "began": _at(5.0),
        "ended": _at(last + 1),
        "rackproof": VERSION,
        "gpus": [_gpu(measured, index) for index in range(shape.devices)],
        "software": dict(measured.software),
        "snapshots": [
            {"stage": stage, "phase": phase, "at": _at(at), "duration_s": 0.5,
             "metrics": list(_metrics(measured, shape, kind, at))}
            for stage, phase, kind, at in _kept(shots, shape.readings)
        ],
        "observations": observation,
        "launches": launches,
    }  # fmt: skip


def _kept(shots: Sequence[tuple[str, str, str, float]], readings: str) -> list[tuple[str, str, str, float]]:
    """Return every snapshot, or only the first and the last, which counters need, if only judged readings are kept."""
    return list(shots) if readings == ALL else [*dict.fromkeys([shots[0], shots[-1]])]


def _at(seconds: float) -> Cell:
    return Cell(f"at {seconds}")


def times_of(template: Template, created: str, later: float = 0.0) -> dict[str, str]:
    """The texts of a template's cells that are moments of the run, or uptimes then; all of it so many seconds later."""
    values_by_key = {}
    for name in template.cells:
        kind, _, seconds = name.partition(" ")
        if kind == "at":
            values_by_key[name] = moment(created, float(seconds) + later)
        elif kind == "up":
            values_by_key[name] = f"{UP_S + float(seconds) + later:.2f}"
    return values_by_key


def _gpu(measured: Measured, index: int) -> Doc:
    return {
        "index": index,
        "serial": Cell(f"serial{index}"),
        "uuid": Cell(f"uuid{index}"),
        "name": measured.gpu,
        "pci_bus_id": bus_id(index),
    }


def bus_id(index: int) -> str:
    """PCI address of a GPU, as NVML spells it."""
    return f"00000000:{6 + index:02X}:00.0"


def pci(index: int) -> str:
    """The same as sysfs spells it."""
    return bus_id(index)[4:].lower()


def _ranks(numbers: Sequence[int]) -> list[Doc]:
    return [
        {"rank": number, "local_rank": index, "phase": "end", "exit_code": 0, "log_tail": ""}
        for index, number in enumerate(numbers)
    ]


def ranks_text(first: int, count: int) -> str:
    """The ranks of one host of a gang, as JSON."""
    return json.dumps(_ranks(range(first, first + count)), separators=(",", ":"))


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
    """Names of which some shipped criterion speaks."""
    return tuple({criterion.name for pack in read_packs([]) for criterion in pack.criteria})


def _wanted(name: str, readings: str) -> bool:
    return readings == ALL or name.startswith(_ALWAYS) or name in judged_names()


def _metrics(measured: Measured, shape: Shape, kind: str, at: float) -> Iterator[Doc]:
    """Return the readings of every collector at one moment."""
    for family in measured.readings:
        texts = family.get(kind)
        texts = family["before"] if texts == "before" else texts
        if texts is None or not _wanted(family["name"], shape.readings):
            continue
        result: Doc = {"name": family["name"], "unit": family["unit"]}
        for part in ("values", "absent"):
            if part in texts:
                result[part] = dict(_values(family["name"], texts[part], shape.devices, at))
        yield result


def _values(name: str, texts: Mapping[str, Any], devices: int, at: float) -> Iterator[tuple[str, Any]]:
    for scope, value in texts.items():
        for number, index in _places(scope, devices):
            yield index, _value(name, value, number, devices, at)


def _places(scope: str, devices: int) -> Iterator[tuple[int, str]]:
    """GPU (-1: none) and scope, for each that a general one stands for."""
    if "*" not in scope:
        yield -1, scope
        return
    general = Scope.parse(scope)
    for index in range(devices):
        if general.device_kind == "pci":
            yield index, scope.replace("pci=*", f"pci={pci(index)}")
        elif general.get("link") == "*":
            yield from ((index, f"gpu={index},link={link}") for link in range(LINKS))
        elif general.get("peer") == "*":
            yield from ((index, f"gpu={index},peer={peer}") for peer in range(devices) if peer != index)
        else:
            yield index, scope.replace("gpu=*", f"gpu={index}")


def _value(name: str, value: Any, index: int, devices: int, at: float) -> Any:
    own: Mapping[str, Any] = {
        "gpu.uuid": Cell(f"uuid{index}"),
        "gpu.serial": Cell(f"serial{index}"),
        "gpu.pci_bus_id": bus_id(max(index, 0)),
        "gpu.minor_number": index,
        "gpu.module_id": index + 1,
        "gpu.board_id": index,
        "host.uptime": Cell(f"up {at}", "%s"),
    }
    if name in own:
        return own[name]
    if name in PER_HOST and index < 0 and name != "storage.disk.count":
        return devices
    if name in PER_GPU:
        return value * devices // READINGS_GPUS
    if isinstance(value, list):
        least, greatest = value
        steps = [least + (greatest - least) * level / (LEVELS - 1) for level in range(LEVELS)]
        whole = isinstance(least, int) and isinstance(greatest, int)
        texts = [str(round(step)) for step in steps] if whole else shortened(steps)
        return Slot(texts=texts, group=f"gpu={index}/readings")
    return value


def members_text(members: Sequence[str]) -> str:
    """The hosts of a launch, as JSON."""
    return json.dumps(list(members), separators=(",", ":"))


def cells(run: Mapping[str, str], host: str, number: int, devices: int) -> dict[str, str]:
    """What is a host's own: its name, and the identity of each GPU, which is the same in every simulated run."""
    serials = {f"serial{index}": serial(number, index) for index in range(devices)}
    uuids = {f"uuid{index}": f"GPU-51400000-0000-4000-8000-{number:08x}{index:04x}" for index in range(devices)}
    return dict(itertools.chain(run.items(), serials.items(), uuids.items(), [("host", host)]))


def serial(number: int, index: int) -> str:
    """Return the serial of a simulated GPU, which cannot be mistaken for a real one."""
    return f"SIM{number:06d}{index:02d}"
