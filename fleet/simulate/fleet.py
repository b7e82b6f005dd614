"""Write the run directory of a simulated fleet: a real plan for a made-up inventory, and the records of all hosts."""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import random
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from fleet import progress
from fleet.inventory.ansible import Variables
from fleet.planning.plan import make_plan, read_profile
from fleet.simulate import records
from fleet.simulate.bmcs import bmc_record
from fleet.simulate.cabling import HOSTS_PER_LEAF
from fleet.simulate.faults import FAULTS, Effect, Fault, FaultyHost
from fleet.simulate.gangs import gang_records
from fleet.simulate.gpu_data import draw_levels, read_gpu_data
from fleet.simulate.nvlink_domains import join_domain
from fleet.simulate.ports import VERBS
from fleet.simulate.records import ALL, RecordShape, host_values, members_json, ranks_json, time_values
from fleet.simulate.template import GANG, HOST, Template
from schemas import documents
from schemas.catalogue import settings
from schemas.errors import RunError, UsageError
from schemas.plans import Plan, PlannedHost
from schemas.records import to_json
from schemas.run_directory import BMCS, RunDirectory, record_name
from schemas.stages import GANG as GANG_STAGE
from schemas.tournament import partners

Doc = dict[str, Any]
SIMULATED_STAGES = ("benchmark", "gang")
BATCH_HOSTS = 64
"""Maximum number of hosts in a batch of hosts without a gang.

A process writes one batch at a time. All hosts of a gang (the hosts of one multi-node launch) are in one batch.
"""
RELAUNCH_GAP_S = 10.0
"""Seconds from the end of a launch of a gang to its next launch."""
MAX_GPUS = 16
NAMED_DIRECTORIES: Variables = {
    "rackproof_local_storage": [f"/data{number}" for number in range(1, 5)],
    "rackproof_shared_storage": ["/mnt/shared"],
}
"""Inventory variables that name the directories to measure. Every host has them if `Fleet.storage` is true."""


@dataclass(frozen=True, kw_only=True)
class Fleet:
    """The fleet to simulate."""

    hosts: int = 8
    gpus: int = 8
    """GPUs of each host."""
    racks: int = 1
    model: str = "h200-sxm"
    profile: str = "standard"
    gang: str = "rack"
    """The value of `rackproof_gang`: rack, all or none."""
    fabric_gbps: float = 400.0
    nvlink_domains: bool = False
    """Whether the hosts of a rack are one NVLink domain."""
    storage: bool = False
    """Whether the inventory names directories to measure: four on disks of each host, and one that all hosts share."""
    bmcs: bool = False
    """Whether the inventory names the BMC of each host."""
    hosts_per_leaf: int = HOSTS_PER_LEAF
    seed: int = 0
    readings: str = ALL
    """Which readings the records have: `records.ALL` or `records.JUDGED`."""

    def inventory(self) -> dict[str, Variables]:
        """Return the hosts of the inventory with their variables, rack after rack."""
        hosts: dict[str, Variables] = {}
        rack_digits, host_digits = max(len(str(self.racks)), 2), max(len(str(-(-self.hosts // self.racks))), 2)
        for number in range(self.hosts):
            rack = number * self.racks // self.hosts
            first_number = -(
                -rack * self.hosts // self.racks
            )  # number of the first host in the rack; -(-a // b) rounds up
            index = number - first_number
            rack_name = f"r{rack + 1:0{rack_digits}}"
            hosts[f"{rack_name}-h{index + 1:0{host_digits}}"] = {
                "ansible_host": f"10.{number >> 16 & 255}.{number >> 8 & 255}.{number & 255}",
                "rackproof_rack": rack_name,
                "rackproof_gpu_count": self.gpus,
                "rackproof_gpu_model": self.model,
                "rackproof_gang": self.gang,
                "rackproof_fabric_gbps": self.fabric_gbps,
                "rackproof_profile": self.profile,
                **({"rackproof_nvlink_domain": rack_name} if self.nvlink_domains else {}),
                **(NAMED_DIRECTORIES if self.storage else {}),
                **({"rackproof_bmc_address": f"bmc{number}"} if self.bmcs else {}),
            }
        return hosts

    def plan(self, run_id: str, created: str) -> Plan:
        """Return the plan that a real run of these hosts would have, marked as simulated.

        Raises:
            UsageError: the model has no data, or the profile cannot be simulated.
        """
        read_gpu_data(self.model)
        plan = make_plan(
            read_profile(self.profile),
            self.inventory(),
            run_id=run_id,
            nonce=hashlib.sha256(f"{run_id} {created} {self.seed}".encode(errors="replace")).hexdigest()[:32],
            created=created,
        )
        unsupported = [stage.name for stage in plan.stages if stage.name not in SIMULATED_STAGES or stage.duration_s]
        if plan.rehearsal or unsupported or plan.study:
            part = f"its stage {unsupported[0]}" if unsupported else "a scaling study" if plan.study else "a rehearsal"
            raise UsageError(f"profile {self.profile}: {part} is not simulated; choose smoke or standard")
        return replace(plan, simulated=True)


@dataclass(frozen=True, kw_only=True)
class Injection:
    """A fault, and the host and GPU that have it."""

    fault: Fault
    host: str
    gpu: int

    def __str__(self) -> str:
        return f"{self.fault.kind}: {self.host}" + (f" gpu={self.gpu}" if self.fault.of_gpu else "")


def place_faults(requests: Sequence[str], plan: Plan, seed: int) -> list[Injection]:
    """Return the faults with a host and a GPU for each.

    Args:
        requests: `KIND[:HOST[:GPU]]` each. Without HOST, the seed selects a host that no request names and that has no fault yet.
        plan: plan of the run.
        seed: selects hosts and GPUs.

    Raises:
        UsageError: a kind, host or GPU does not exist, a host cannot have the fault, or there is no host left to select.
    """
    names = [host.name for host in plan.hosts]
    generator = random.Random(f"faults {seed}")  # noqa: S311 - no secret
    split_requests = [request.split(":") for request in requests]
    named = {parts[1] for parts in split_requests if len(parts) > 1}
    free = [name for name in names if name not in named]
    generator.shuffle(free)
    injections = []
    for request, (kind, *position) in zip(requests, split_requests, strict=True):
        if kind not in FAULTS:
            suggestion = documents.nearest(kind, FAULTS)
            raise UsageError(
                f"--fault {request}: no fault is called {kind}{suggestion}: rackproof simulate --list-faults shows all"
            )
        if len(position) > 1 and not FAULTS[kind].of_gpu:
            raise UsageError(
                f"--fault {request}: {kind} is a fault of a whole host: leave out :{':'.join(position[1:])}"
            )
        host = _choose_host(request, position, names, free)
        if FAULTS[kind].breaks_domain and not plan.host(host).nvlink_domain:
            raise UsageError(f"--fault {request}: {host} is in no NVLink domain; add --nvlink-domains")
        if FAULTS[kind].of_storage and not plan.host(host).local_storage:
            raise UsageError(f"--fault {request}: no directory of {host} is measured; add --storage")
        if FAULTS[kind].of_bmc and not plan.host(host).bmc:
            raise UsageError(f"--fault {request}: {host} has no BMC; add --bmcs")
        if len(names) < FAULTS[kind].least_hosts:
            raise UsageError(f"--fault {request}: {kind} needs {FAULTS[kind].least_hosts} hosts; add --hosts")
        devices = plan.host(host).devices
        if len(devices) < FAULTS[kind].least_gpus:
            needed = FAULTS[kind].least_gpus
            raise UsageError(f"--fault {request}: {kind} needs {needed} GPUs in a host, and {host} has {len(devices)}")
        gpu = position[1] if len(position) > 1 else str(generator.choice(devices))
        if len(position) > 2 or not gpu.isdecimal() or int(gpu) not in devices:
            raise UsageError(
                f"--fault {request}: GPU {':'.join(position[1:])}: give one of {devices[0]} to {devices[-1]}"
            )
        injections.append(Injection(fault=FAULTS[kind], host=host, gpu=int(gpu)))
    return injections


def _choose_host(request: str, position: Sequence[str], names: Sequence[str], free: list[str]) -> str:
    if position and position[0]:
        if position[0] not in names:
            suggestion = documents.nearest(position[0], names)
            raise UsageError(
                f"--fault {request}: no host is called {position[0]}{suggestion}: give one of {names[0]} to {names[-1]}"
            )
        return position[0]
    if not free:
        raise UsageError(f"--fault {request}: every host has a fault already: give more --hosts, or name a host")
    return free.pop()


@dataclass(kw_only=True)
class RunWriter:
    """Writes the records of a run in batches of hosts."""

    directory: Path
    fleet: Fleet
    plan: Plan
    faults: Mapping[str, Sequence[Injection]]
    """Host -> its faults."""
    templates: dict[tuple[str, RecordShape], Template] = field(default_factory=dict)
    """(Kind of record, `host` or `gang`; shape of the record) -> its template."""

    def __post_init__(self) -> None:
        self.data = read_gpu_data(self.fleet.model)
        self.numbers = {host.name: number for number, host in enumerate(self.plan.hosts)}
        self.racks = {
            rack: number for number, rack in enumerate(dict.fromkeys(host.rack for host in self.plan.hosts), 1)
        }
        self.run = {"run_id": self.plan.run_id, "nonce": self.plan.nonce}
        times = records.timing(self.plan, self.data)
        # Seconds from the beginning of a gang's launch to the beginning of its next launch.
        self.relaunch_s = times.after_gang - times.gang + RELAUNCH_GAP_S

    def batches(self) -> list[tuple[str, tuple[str, ...]]]:
        """Return the name of the gang (empty if none) and the hosts of each batch. All hosts of a gang are in one batch."""
        gangs = self.plan.gangs() if any(stage.name == GANG_STAGE for stage in self.plan.stages) else {}
        others = [host.name for host in self.plan.hosts if host.gang not in gangs]
        batches = [("", tuple(others[start : start + BATCH_HOSTS])) for start in range(0, len(others), BATCH_HOSTS)]
        return [*gangs.items(), *batches]

    def write(self, gang: str, names: Sequence[str]) -> list[Doc]:
        """Write the records of the hosts of a gang, or of hosts without a gang (`gang` is empty).

        Return the lines of events.jsonl about these hosts.
        """
        hosts = [self.plan.hosts[self.numbers[name]] for name in names]
        all_events: list[Doc] = []
        gang_texts = self._gang_texts(gang, hosts) if gang else {}
        for host in hosts:
            texts: dict[str, str | None] = {"host": self._host_text(host), "gang": gang_texts.get(host.name)}
            injections = self.faults.get(host.name, ())
            bmc = bmc_record(self.plan, host, self.numbers[host.name]) if host.bmc else None
            if injections or host.nvlink_domain:
                texts, events = self._with_faults(host, injections, texts, bmc)
                all_events += events
            self._write_record(record_name(host.name), texts["host"])
            self._write_record(record_name(host.name, gang), texts["gang"])
            self._write_record(f"{BMCS}/{host.name}.json", _to_text(bmc) if bmc else None)
        return all_events

    def _write_record(self, path: str, text: str | None) -> None:
        if text is not None:
            documents.write_text(self.directory / path, text, durable=False)

    def _with_faults(
        self, host: PlannedHost, injections: Sequence[Injection], texts: Mapping[str, str | None], bmc: Doc | None
    ) -> tuple[dict[str, str | None], list[Doc]]:
        """Change the records of the host as its NVLink domain and its faults require.

        Return the text of each changed record (None: it is not written), and the lines of events.jsonl about the host. The record
        `bmc` is changed in place.
        """
        faulty_host = FaultyHost(
            plan=self.plan,
            planned=host,
            gpu=0,
            twin=(self.numbers[host.name] + 1) % len(self.plan.hosts),
            documents={name: json.loads(text) for name, text in texts.items() if text},
            bmc=bmc,
        )
        if host.nvlink_domain:
            self._join_domain(host, faulty_host.documents)
        for injection in injections:
            faulty_host.gpu = injection.gpu
            injection.fault.apply(faulty_host)
        changed = {name: _to_text(document) for name, document in faulty_host.documents.items()}
        at = records.time_after(self.plan.created, 4.0)
        events = [{"at": at, **event} for event in faulty_host.events]
        return {"gang": None, **changed, **faulty_host.texts}, events

    def _join_domain(self, host: PlannedHost, host_documents: Mapping[str, Doc]) -> None:
        """Change the records of a host (`host_documents`) so that the host is in the NVLink domain of its rack."""
        members = [other.name for other in self.plan.hosts if other.nvlink_domain == host.nvlink_domain]
        kinds = {name: [item.fault for item in self.faults.get(name, ())] for name in members}
        join_domain(
            host_documents,
            members,
            host.name,
            self.racks[host.rack],
            down={name for name, faults in kinds.items() if FAULTS["imex_down"] in faults},
            is_whole=not any(fault.breaks_domain for faults in kinds.values() for fault in faults),
        )

    def _host_text(self, host: PlannedHost) -> str:
        """Return the record of a healthy host."""
        shape = RecordShape(devices=len(host.devices), partners=0, members=0, readings=self.fleet.readings)
        key = ("host", shape)
        if key not in self.templates:
            self.templates[key] = records.host_template(self.plan, host, self.data, shape)
        return self._render(self.templates[key], host)

    def _gang_texts(self, gang: str, hosts: Sequence[PlannedHost]) -> dict[str, str]:
        """Return the gang record of each reachable host of the gang; empty if fewer than two are reachable."""
        unreachable = {
            host.name
            for host in hosts
            if any(injection.fault.is_unreachable for injection in self.faults.get(host.name, ()))
        }
        present = [host.name for host in hosts if host.name not in unreachable]
        effects = [
            (name, injection.gpu, effect)
            for name in present
            for injection in self.faults.get(name, ())
            if (effect := injection.fault.in_gang(injection.gpu)) != Effect()
        ]
        if not effects:
            return dict(self._launch_texts(gang, present, 1)) if len(present) > 1 else {}

        def make_records(members: Sequence[str], number: int) -> dict[str, Doc]:
            return {name: json.loads(text) for name, text in self._launch_texts(gang, members, number)}

        gang_documents = gang_records(self.plan, gang, present, effects, make_records)
        return {name: _to_text(document) for name, document in gang_documents.items()}

    def _launch_texts(self, gang: str, members: Sequence[str], number: int) -> Iterator[tuple[str, str]]:
        """Yield the name and the gang record of each host in a launch, as if all hosts were healthy."""
        planned = self.plan.gangs()[gang]
        rounds = int(settings("pairs", self.plan.stage(GANG_STAGE).benchmarks.get("pairs", {}))["rounds"])
        for position, name in enumerate(members):
            host = self.plan.hosts[self.numbers[name]]
            present_partners = [partner for partner in partners(planned, name, rounds) if partner in members]
            later, earlier = self._port_partners(planned, name, members)
            shape = RecordShape(
                devices=len(host.devices),
                partners=len(present_partners),
                members=len(members),
                port_partners=len(later) + len(earlier),
                later_port_partners=len(later),
                readings=self.fleet.readings,
            )
            key = ("gang", shape)
            if key not in self.templates:
                self.templates[key] = records.gang_template(self.plan, host, self.data, shape)
            gang_values = {
                "gang": gang,
                "number": str(number),
                "members": members_json(members),
                "ranks": ranks_json(position * len(host.devices), len(host.devices)),
                **{f"partner{index}": partner for index, partner in enumerate(present_partners)},
                **{f"port_partner{index}": partner for index, partner in enumerate([*later, *earlier])},
            }
            delay_s = (number - 1) * self.relaunch_s
            yield name, self._render(self.templates[key], host, gang_values, delay_s)

    def _port_partners(self, planned: Sequence[str], host: str, members: Sequence[str]) -> tuple[list[str], list[str]]:
        """Return the partners of the host in tests of RDMA ports: those after it in the gang, and those before it."""
        benchmarks = self.plan.stage(GANG_STAGE).benchmarks
        if VERBS not in benchmarks:
            return [], []
        rounds = int(settings(VERBS, benchmarks[VERBS])["rounds"])
        present = [partner for partner in partners(planned, host, rounds) if partner in members]
        later = [other for other in present if planned.index(host) < planned.index(other)]
        return later, [other for other in present if other not in later]

    def _render(
        self, template: Template, host: PlannedHost, gang_values: Mapping[str, str] | None = None, delay_s: float = 0.0
    ) -> str:
        values = {
            **host_values(self.run, host.name, self.numbers[host.name], len(host.devices), self.fleet.hosts_per_leaf),
            **time_values(template, self.plan.created, delay_s),
            **(gang_values or {}),
        }
        gang_levels = self._draw_levels(template, f"gang {gang_values['gang']}", GANG) if gang_values else b""
        return template.render(values, self._draw_levels(template, host.name, HOST), gang_levels)

    def _draw_levels(self, template: Template, part: str, drawn_by: str) -> bytes:
        """Draw a level for each group of slots.

        A level consists of a quantile and of noise (see `gpu_data`). The quantile depends only on `part`, so it is the same in
        all runs. The noise also depends on the seed of the fleet.
        """
        part_generator = random.Random(f"part {part}")  # noqa: S311 - no secret
        run_generator = random.Random(f"run {self.fleet.seed} {part}")  # noqa: S311 - no secret
        return draw_levels(part_generator, run_generator, max(len(template.groups[drawn_by]), 1))


def _to_text(document: Doc) -> str:
    return json.dumps(document, separators=(",", ":"))


def write_run(directory: Path, fleet: Fleet, faults: Sequence[Injection], plan: Plan, *, jobs: int = 1) -> None:
    """Write the run directory.

    The plan is written last. A directory without a plan does not count as a run, so an interrupted simulation leaves no run.

    Raises:
        UsageError: the plan is invalid.
        RunError: a process that writes records was killed.
        OSError: a file cannot be written.
    """
    document = json.loads(json.dumps(to_json(plan)))
    try:
        documents.validate(document, "plan", source="the plan")
    except documents.DocumentError as error:
        raise UsageError(str(error)) from None
    faults_by_host: dict[str, list[Injection]] = {}
    for injection in faults:
        faults_by_host.setdefault(injection.host, []).append(injection)
    writer = RunWriter(directory=directory, fleet=fleet, plan=plan, faults=faults_by_host)
    paths = RunDirectory(directory)
    paths.make(plan)
    batches = writer.batches()
    events = [event for batch_events in _write_batches(writer, batches, jobs) for event in batch_events]
    if events:
        lines = "".join(json.dumps(event) + "\n" for event in events)
        documents.write_text(paths.events, lines)
    documents.write(paths.plan, document)


_worker_writer: RunWriter | None = None
"""The writer of a worker process."""


def _write_batches(writer: RunWriter, batches: Sequence[tuple[str, tuple[str, ...]]], jobs: int) -> Iterator[list[Doc]]:
    progress.begin("writing records", sum(len(names) for _, names in batches))
    if jobs <= 1 or len(batches) <= 1:
        for batch in batches:
            yield writer.write(*batch)
            progress.advance(len(batch[1]))
        return
    processes = min(jobs, len(batches))
    fork = multiprocessing.get_context("fork")
    try:
        with ProcessPoolExecutor(
            processes, mp_context=fork, initializer=_set_worker_writer, initargs=(writer,)
        ) as pool:
            for batch, events in zip(batches, pool.map(_write_batch, batches), strict=True):
                yield events
                progress.advance(len(batch[1]))
    except BrokenProcessPool:
        raise RunError(
            f"one of the {processes} processes that write the records was killed, perhaps because memory ran out: free memory, "
            "or use --jobs 1, and simulate again into a new directory"
        ) from None


def _set_worker_writer(writer: RunWriter) -> None:
    global _worker_writer
    _worker_writer = writer


def _write_batch(batch: tuple[str, tuple[str, ...]]) -> list[Doc]:
    assert _worker_writer is not None  # noqa: S101 - for the type checker
    return _worker_writer.write(*batch)
