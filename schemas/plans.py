"""The plan of a run: profile × inventory -> the observations that must exist. Frozen when the run begins."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from schemas.baselines import PlannedBaseline
from schemas.catalogue import Expectation, possible, settings
from schemas.stages import CELL, GANG
from schemas.studies import Study, study_from_json
from schemas.tournament import partners
from schemas.waivers import Waiver

PLAN_SCHEMA = "rackproof.plan/1"
GPU, NIC = "gpu", "nic"
"""Kinds of parts that a manifest lists."""


@dataclass(frozen=True, kw_only=True)
class Stage:
    """One launch of benchmarks: on each host alone (`benchmark`), or across the hosts of a gang (`gang`)."""

    name: str
    deadline_s: float
    collective_timeout_s: float
    benchmarks: Mapping[str, Mapping[str, Any]]
    """Benchmark -> its settings where they differ from the catalogue's."""
    duration_s: float = 0.0
    """For which it is carried out again and again, round after round; 0: once. `deadline_s` is then that of a round."""
    stop_on: str = ""
    """By which findings of its own a host ends that early: one of `timeline.STOP_ON`."""
    cpus: int = 0
    """Processors that each rank may use; 0: all that its host gives."""

    @property
    def longest_s(self) -> float:
        """What it may take: a round that began in time comes to its end."""
        return self.duration_s + self.deadline_s


@dataclass(frozen=True, kw_only=True)
class PlannedHost:
    """A host as the inventory states it: what is expected, not what was found."""

    name: str
    address: str
    rack: str
    device: str
    """`gpu`, or `cpu` in a rehearsal."""
    devices: tuple[int, ...]
    """NVML indices of the GPUs under test, or the numbers of a rehearsal's processes."""
    gpu_model: str = ""
    """Criteria pack that the inventory names; empty: found by the GPU's own name."""
    gang: str = ""
    fabric_gbps: float = 0.0
    """Line rate of the fabric port of one GPU in Gb/s; 0 where the inventory does not say."""
    environment: Mapping[str, str] = field(default_factory=dict)
    share_gpus: bool = False
    """Measure although other processes use the GPUs."""
    count_found: bool = False
    """`devices` are those that were found: nobody said how many there should be."""

    @cached_property
    def scopes(self) -> tuple[str, ...]:
        """The scope of each device: `gpu=0`, `gpu=1` … or `cpu=0` …"""
        return tuple(f"{self.device}={index}" for index in self.devices)

    @property
    def fabric(self) -> float:
        """Line rate of the fabric ports of all its devices in B/s; 0 where the inventory does not say."""
        return self.fabric_gbps * 1e9 / 8 * len(self.devices)


@dataclass(frozen=True, kw_only=True)
class Part:
    """A part that was ordered, as one line of the manifest has it."""

    host: str
    kind: str
    """`gpu` or `nic`."""
    serial: str
    """Serial of a GPU; node GUID or MAC address of a NIC; as it is written."""
    slot: str = ""
    """PCI address as sysfs spells it, NVML index of a GPU or name of a NIC; empty: anywhere in the host."""
    origin: str = ""
    """File and line, for people."""


@dataclass(frozen=True, kw_only=True)
class Chosen:
    """A benchmark of the profile that is run, or left out for want of time."""

    stage: str
    benchmark: str
    chosen: bool
    cost_s: float
    """What it is thought to take."""
    why: str


@dataclass(frozen=True, kw_only=True)
class Choice:
    """What of a profile is run within a given time (`fleet/planning/test_selection.py`)."""

    budget_s: float
    cost_s: float
    runs: int
    """Earlier runs by which it was chosen."""
    items: tuple[Chosen, ...]
    """All that the profile has: first what is run, in the order in which it was chosen."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What must be observed, by whom, and how long it may take."""

    run_id: str
    nonce: str
    created: str
    profile: str
    rehearsal: bool
    criteria: tuple[str, ...]
    """Packs named by the inventory beside the GPU model's own: names of shipped packs or paths."""
    stages: tuple[Stage, ...]
    hosts: tuple[PlannedHost, ...]
    expected: tuple[Expectation, ...]
    manifest: tuple[Part, ...] = ()
    """The parts that were ordered; empty where the inventory names no manifest."""
    grafana_url: str = ""
    """Where Grafana shows the run; the report leads there."""
    simulated: bool = False
    """`rackproof simulate` made it up: its records say so too, and nothing that comes of it accepts hardware."""
    reason: str = ""
    """Why the run is made, in the operator's words."""
    choice: Choice | None = None
    """Where there was no time for all of the profile: what was chosen and what was not."""
    waivers: tuple[Waiver, ...] = ()
    """What somebody answers for, as it stood when the run began."""
    baseline: PlannedBaseline | None = None
    """The accepted records that the run is compared with."""
    study: Study | None = None
    """Where the run is a scaling study: nothing is judged, and each cell is a launch of its own."""
    schema: str = PLAN_SCHEMA

    def host(self, name: str) -> PlannedHost:
        """The planned host of that name. Raises KeyError."""
        return self._by_name[name]

    @cached_property
    def _by_name(self) -> dict[str, PlannedHost]:
        return {host.name: host for host in reversed(self.hosts)}

    @cached_property
    def _of_gang(self) -> dict[str, list[PlannedHost]]:
        found: dict[str, list[PlannedHost]] = {}
        for host in self.hosts:
            if host.gang:
                found.setdefault(host.gang, []).append(host)
        return found

    @cached_property
    def _expected(self) -> dict[tuple[bool, int, int], list[Expectation]]:
        """What hosts of one kind must observe, as far as somebody asked."""
        return {}

    def only(self, hosts: Iterable[str]) -> Plan:
        """The plan of these hosts alone, whole gangs of them, in their order; without what was ordered."""
        part = replace(self, hosts=tuple(self._by_name[name] for name in hosts), manifest=())
        vars(part)["_expected"] = self._expected  # hosts of one kind must observe the same in either
        return part

    def ranks(self, hosts: Iterable[str]) -> int:
        """How many devices those of the named hosts have that are of the plan."""
        return sum(len(self._by_name[name].devices) for name in set(hosts) if name in self._by_name)

    def slowest_fabric(self, host: PlannedHost, members: Iterable[str]) -> float:
        """B/s of the host's ports, or of a member's of its gang that brings less: what all do together is no faster."""
        if host.gang not in self._mixed:
            return host.fabric
        there = set(members)
        told = (other.fabric for other in self._of_gang[host.gang] if other.name in there and other.fabric)
        return min(told, default=host.fabric)

    @cached_property
    def _mixed(self) -> set[str]:
        """The gangs whose hosts do not all bring the same to the fabric."""
        return {gang for gang, hosts in self._of_gang.items() if len({host.fabric for host in hosts}) > 1}

    def stage(self, name: str) -> Stage:
        """The planned stage of that name. Raises KeyError."""
        return next((stage for stage in self.stages if stage.name == name), None) or _missing(name)

    def of_cell(self, number: int) -> Plan:
        """The plan of one cell of the study, by its number: its GPUs of every host, its settings. Raises KeyError."""
        cells = self.study.cells if self.study else ()
        if not 0 < number <= len(cells):
            _missing(f"cell {number}")
        cell, gang = cells[number - 1], self.stage(GANG)
        benchmarks = {name: {**chosen, **cell.settings} for name, chosen in gang.benchmarks.items()}
        hosts = tuple(replace(host, devices=host.devices[: cell.gpus]) for host in self.hosts)
        return replace(self, stages=(replace(gang, name=CELL, cpus=cell.cpus, benchmarks=benchmarks),), hosts=hosts)

    def expected_of(self, host: PlannedHost) -> list[Expectation]:
        """What `host` must observe."""
        alone = len(host.devices)
        together = sum(len(other.devices) for other in self._of_gang.get(host.gang, ()))
        key = bool(host.gang), alone, together
        if key not in self._expected:
            self._expected[key] = [
                item
                for item in self.expected
                if (host.gang if item.stage == GANG else not item.peers or alone > 1)
                and possible(item.name, together if item.stage == GANG else alone)
            ]
        return self._expected[key]

    def scopes_of(self, host: PlannedHost, expectation: Expectation) -> tuple[str, ...]:
        """The scopes in which `host` must make that observation."""
        if expectation.scope == "device":
            return host.scopes
        if expectation.scope == "pair":
            pairs = itertools.permutations(host.devices, 2)
            return tuple(f"{host.device}={source},peer={target}" for source, target in pairs)
        if expectation.scope == "peers":
            return self._partner_scopes(host, expectation)
        if expectation.scope == "host":
            return ("host",)
        return (f"gang={host.gang}" if expectation.stage == GANG else "host",)

    def _partner_scopes(self, host: PlannedHost, expectation: Expectation) -> tuple[str, ...]:
        """The devices that every host of the gang has, each with every host that its own meets."""
        gang = self._of_gang.get(host.gang, [])
        if expectation.stage != GANG or not gang:
            return ()
        benchmark = expectation.name.split(".")[0]
        chosen = settings(benchmark, self.stage(expectation.stage).benchmarks.get(benchmark, {}))
        rails = min(len(other.devices) for other in gang)
        met = partners([other.name for other in gang], host.name, int(chosen["rounds"]))
        return tuple(f"{scope},partner={other}" for other in met for scope in host.scopes[:rails])

    def gangs(self) -> dict[str, tuple[str, ...]]:
        """Gang -> its hosts, in inventory order."""
        return self._gangs

    @cached_property
    def _gangs(self) -> dict[str, tuple[str, ...]]:
        return {gang: tuple(host.name for host in hosts) for gang, hosts in self._of_gang.items()}


def _missing(name: str) -> Any:
    raise KeyError(name)


def plan_from_json(document: Mapping[str, Any]) -> Plan:
    """The plan in a document that plan.schema.json has passed."""
    parts: dict[str, Any] = {
        "criteria": tuple(document["criteria"]),
        "stages": tuple(Stage(**stage) for stage in document["stages"]),
        "hosts": tuple(PlannedHost(**{**host, "devices": tuple(host["devices"])}) for host in document["hosts"]),
        "expected": tuple(Expectation(**item) for item in document["expected"]),
        "manifest": tuple(Part(**item) for item in document.get("manifest", ())),
        "choice": choice_from_json(document["choice"]) if "choice" in document else None,
        "waivers": tuple(Waiver(**item) for item in document.get("waivers", ())),
        "baseline": PlannedBaseline(**document["baseline"]) if "baseline" in document else None,
        "study": study_from_json(document["study"]) if "study" in document else None,
    }
    return Plan(**{**document, **parts})


def choice_from_json(document: Mapping[str, Any]) -> Choice:
    """The choice of a plan."""
    return Choice(**{**document, "items": tuple(Chosen(**item) for item in document["items"])})
