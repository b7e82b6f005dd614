"""A run directory of a fleet that does not exist: the real plan of an inventory that is made up, and every host's records."""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from fleet.inventory.ansible import Variables
from fleet.planning.plan import make_plan, read_profile
from fleet.simulate import measured, records
from fleet.simulate.faults import FAULTS, Case, Effect, Fault
from fleet.simulate.gangs import gang_records
from fleet.simulate.measured import draw
from fleet.simulate.records import ALL, Shape, cells, members_text, ranks_text, times_of
from fleet.simulate.template import GANG, HOST, Template
from schemas import documents
from schemas.catalogue import settings
from schemas.errors import UsageError
from schemas.plans import Plan, PlannedHost
from schemas.records import to_json
from schemas.run_directory import RunDirectory, record_name
from schemas.stages import GANG as GANG_STAGE
from schemas.tournament import partners

Doc = dict[str, Any]
STAGES = ("benchmark", "gang")
BATCH = 64
"""Hosts without a gang that one job writes at a time."""
AGAIN_S = 10.0
"""From the end of one launch of a gang to the next."""
MOST_GPUS = 16


@dataclass(frozen=True, kw_only=True)
class Fleet:
    """What is to be simulated."""

    hosts: int = 8
    gpus: int = 8
    racks: int = 1
    model: str = "h200-sxm"
    profile: str = "standard"
    gang: str = "rack"
    """As `rackproof_gang`: rack, all or none."""
    fabric_gbps: float = 400.0
    seed: int = 0
    readings: str = ALL

    def inventory(self) -> dict[str, Variables]:
        """The hosts as an inventory would have them, rack after rack."""
        result: dict[str, Variables] = {}
        width = (len(str(self.racks)), len(str(-(-self.hosts // self.racks))))
        for number in range(self.hosts):
            rack, index = number * self.racks // self.hosts, 0
            index = number - -(-rack * self.hosts // self.racks)
            name = f"r{rack + 1:0{max(width[0], 2)}}"
            result[f"{name}-h{index + 1:0{max(width[1], 2)}}"] = {
                "ansible_host": f"10.{number >> 16 & 255}.{number >> 8 & 255}.{number & 255}",
                "rackproof_rack": name,
                "rackproof_gpu_count": self.gpus,
                "rackproof_gpu_model": self.model,
                "rackproof_gang": self.gang,
                "rackproof_fabric_gbps": self.fabric_gbps,
                "rackproof_profile": self.profile,
            }
        return result

    def plan(self, run_id: str, created: str) -> Plan:
        """The plan that a real run of these hosts would have, marked as simulated. Raises UsageError."""
        measured.read(self.model)
        plan = make_plan(
            read_profile(self.profile),
            self.inventory(),
            run_id=run_id,
            nonce=hashlib.sha256(f"{run_id} {created} {self.seed}".encode()).hexdigest()[:32],
            created=created,
        )
        strange = [stage.name for stage in plan.stages if stage.name not in STAGES or stage.duration_s]
        if plan.rehearsal or strange or plan.study:
            what = f"its stage {strange[0]}" if strange else "a scaling study" if plan.study else "a profile of CPUs"
            raise UsageError(f"profile {self.profile}: {what} is not simulated; choose smoke or standard")
        return replace(plan, simulated=True)


@dataclass(frozen=True, kw_only=True)
class Placed:
    """A fault and where it is."""

    fault: Fault
    host: str
    gpu: int

    def __str__(self) -> str:
        return f"{self.fault.kind}: {self.host}" + (f" gpu={self.gpu}" if self.fault.of_gpu else "")


def placed(wanted: Sequence[str], plan: Plan, seed: int) -> list[Placed]:
    """`KIND[:HOST[:GPU]]` with a place for each; where none is given, one that is free, by the seed.

    Raises:
        UsageError: no such kind, host or GPU, or more faults than hosts.
    """
    names = [host.name for host in plan.hosts]
    chance = random.Random(f"faults {seed}")  # noqa: S311 - no secret
    asked = [text.split(":") for text in wanted]
    taken = {parts[1] for parts in asked if len(parts) > 1}
    free = [name for name in names if name not in taken]
    chance.shuffle(free)
    result = []
    for text, (kind, *rest) in zip(wanted, asked, strict=True):
        if kind not in FAULTS:
            near = documents.nearest(kind, FAULTS)
            raise UsageError(
                f"--fault {text}: no fault is called {kind}{near}: rackproof simulate --list-faults shows all"
            )
        if len(rest) > 1 and not FAULTS[kind].of_gpu:
            raise UsageError(f"--fault {text}: {kind} is a fault of a whole host: leave out :{':'.join(rest[1:])}")
        host = _host(text, rest, names, free)
        devices = plan.host(host).devices
        gpu = rest[1] if len(rest) > 1 else str(chance.choice(devices))
        if len(rest) > 2 or not gpu.isdecimal() or int(gpu) not in devices:
            raise UsageError(f"--fault {text}: GPU {':'.join(rest[1:])}: give one of {devices[0]} to {devices[-1]}")
        result.append(Placed(fault=FAULTS[kind], host=host, gpu=int(gpu)))
    return result


def _host(text: str, rest: Sequence[str], names: Sequence[str], free: list[str]) -> str:
    if rest and rest[0]:
        if rest[0] not in names:
            near = documents.nearest(rest[0], names)
            raise UsageError(f"--fault {text}: no host is called {rest[0]}{near}: they are {names[0]} to {names[-1]}")
        return rest[0]
    if not free:
        raise UsageError(f"--fault {text}: every host has a fault already: give more --hosts, or name one")
    return free.pop()


@dataclass(kw_only=True)
class Writer:
    """Writes the records of some hosts at a time."""

    directory: Path
    fleet: Fleet
    plan: Plan
    faults: Mapping[str, Sequence[Placed]]
    """Host -> what is wrong with it."""
    templates: dict[tuple[str, Shape], Template] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.data = measured.read(self.fleet.model)
        self.numbers = {host.name: number for number, host in enumerate(self.plan.hosts)}
        self.run = {"run_id": self.plan.run_id, "nonce": self.plan.nonce}
        times = records.timing(self.plan, self.data)
        self.again_s = times.after_gang - times.gang + AGAIN_S

    def batches(self) -> list[tuple[str, tuple[str, ...]]]:
        """Gang and hosts: a gang is written by one job."""
        gangs = self.plan.gangs() if any(stage.name == GANG_STAGE for stage in self.plan.stages) else {}
        rest = [host.name for host in self.plan.hosts if host.gang not in gangs]
        lone = [("", tuple(rest[start : start + BATCH])) for start in range(0, len(rest), BATCH)]
        return [*gangs.items(), *lone]

    def write(self, gang: str, names: Sequence[str]) -> list[Doc]:
        """Writes the records of a gang, or of hosts without one; what the journal would say of them."""
        hosts = [self.plan.hosts[self.numbers[name]] for name in names]
        events: list[Doc] = []
        together = self._together(gang, hosts) if gang else {}
        for host in hosts:
            wrong = self.faults.get(host.name, ())
            texts: dict[str, str | None] = {"alone": self._alone(host), "gang": together.get(host.name)}
            if wrong:
                texts, values_by_key = self._spoilt(host, wrong, texts)
                events += values_by_key
            self._put(record_name(host.name), texts["alone"])
            self._put(record_name(host.name, gang), texts["gang"])
        return events

    def _put(self, path: str, text: str | None) -> None:
        if text is not None:
            documents.write_text(self.directory / path, text, durable=False)

    def _spoilt(
        self, host: PlannedHost, wrong: Sequence[Placed], texts: Mapping[str, str | None]
    ) -> tuple[dict[str, str | None], list[Doc]]:
        """The records with the faults in them, and the journal's lines."""
        case = Case(
            plan=self.plan,
            host=host,
            gpu=0,
            neighbour=(self.numbers[host.name] + 1) % len(self.plan.hosts),
            documents={name: json.loads(text) for name, text in texts.items() if text},
        )
        for injection in wrong:
            case.gpu = injection.gpu
            injection.fault.apply(case)
        written = {name: json.dumps(document, separators=(",", ":")) for name, document in case.documents.items()}
        at = records.moment(self.plan.created, 4.0)
        return {"gang": None, **written, **case.texts}, [{"at": at, **event} for event in case.events]

    def _levels(self, template: Template, part: str, whose: str) -> bytes:
        """A draw for each group: what the part is like, and how this run went."""
        parts, run = random.Random(f"part {part}"), random.Random(f"run {self.fleet.seed} {part}")  # noqa: S311
        return draw(parts, run, max(len(template.groups[whose]), 1))

    def _alone(self, host: PlannedHost) -> str:
        shape = Shape(devices=len(host.devices), partners=0, members=0, readings=self.fleet.readings)
        key = ("alone", shape)
        if key not in self.templates:
            self.templates[key] = records.alone(self.plan, host, self.data, shape)
        return self._filled(self.templates[key], host, {}, "", 0.0)

    def _filled(self, template: Template, host: PlannedHost, more: Mapping[str, str], gang: str, later: float) -> str:
        texts = {
            **cells(self.run, host.name, self.numbers[host.name], len(host.devices)),
            **times_of(template, self.plan.created, later),
            **more,
        }
        of_gang = self._levels(template, f"gang {gang}", GANG) if gang else b""
        return template.text(texts, self._levels(template, host.name, HOST), of_gang)

    def _together(self, gang: str, hosts: Sequence[PlannedHost]) -> dict[str, str]:
        """Host -> its gang record."""
        away = {
            host.name for host in hosts if any(injection.fault.away for injection in self.faults.get(host.name, ()))
        }
        present = [host.name for host in hosts if host.name not in away]
        effects = {
            injection.host: (injection.gpu, effect)
            for name in present
            for injection in self.faults.get(name, ())
            if (effect := injection.fault.in_gang(injection.gpu)) != Effect()
        }
        if effects:
            result = gang_records(self.plan, gang, present, effects, lambda members, number: {
                name: json.loads(text) for name, text in self._launch(gang, members, number)
            })  # fmt: skip
            return {name: json.dumps(record, separators=(",", ":")) for name, record in result.items()}
        return dict(self._launch(gang, present, 1)) if len(present) > 1 else {}

    def _launch(self, gang: str, members: Sequence[str], number: int) -> Iterator[tuple[str, str]]:
        """What each host of a launch leaves of it, were nothing wrong."""
        planned = self.plan.gangs()[gang]
        rounds = int(settings("pairs", self.plan.stage(GANG_STAGE).benchmarks.get("pairs", {}))["rounds"])
        for position, name in enumerate(members):
            host = self.plan.hosts[self.numbers[name]]
            met = [other for other in partners(planned, name, rounds) if other in members]
            shape = Shape(
                devices=len(host.devices), partners=len(met), members=len(members), readings=self.fleet.readings
            )
            key = ("together", shape)
            if key not in self.templates:
                self.templates[key] = records.together(self.plan, host, self.data, shape)
            more = {
                "gang": gang,
                "number": str(number),
                "members": members_text(members),
                "ranks": ranks_text(position * len(host.devices), len(host.devices)),
                **{f"partner{index}": other for index, other in enumerate(met)},
            }
            yield name, self._filled(self.templates[key], host, more, gang, (number - 1) * self.again_s)


def simulate(directory: Path, fleet: Fleet, faults: Sequence[Placed], plan: Plan, *, jobs: int = 1) -> None:
    """Writes the run. The plan comes last: without it there is no run, so that a part of one cannot be taken for it.

    Raises:
        UsageError: the plan is not one that a real run could have.
        OSError: the file system refused.
    """
    document = json.loads(json.dumps(to_json(plan)))
    try:
        documents.validate(document, "plan", source="the plan")
    except documents.DocumentError as error:
        raise UsageError(str(error)) from None
    of_host: dict[str, list[Placed]] = {}
    for injection in faults:
        of_host.setdefault(injection.host, []).append(injection)
    writer = Writer(directory=directory, fleet=fleet, plan=plan, faults=of_host)
    paths = RunDirectory(directory)
    paths.make(plan)
    batches = writer.batches()
    events = [event for result in _written(writer, batches, jobs) for event in result]
    if events:
        lines = "".join(json.dumps(event) + "\n" for event in events)
        documents.write_text(paths.events, lines)
    documents.write(paths.plan, document)


_writer: Writer | None = None
"""Arguments of a process that writes for another one."""


def _written(writer: Writer, batches: Sequence[tuple[str, tuple[str, ...]]], jobs: int) -> Iterator[list[Doc]]:
    if jobs <= 1 or len(batches) <= 1:
        yield from (writer.write(*batch) for batch in batches)
        return
    with multiprocessing.get_context("fork").Pool(min(jobs, len(batches)), _begin, (writer,)) as pool:
        yield from pool.imap(_one, batches)


def _begin(writer: Writer) -> None:
    global _writer
    _writer = writer


def _one(batch: tuple[str, tuple[str, ...]]) -> list[Doc]:
    assert _writer is not None  # noqa: S101 - for the type checker
    return _writer.write(*batch)
