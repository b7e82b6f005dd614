"""The plan of a run: profile × inventory -> the observations that must exist. Frozen when the run begins."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from schemas.catalogue import Expectation, possible, settings
from schemas.tournament import partners

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

    @property
    def scopes(self) -> tuple[str, ...]:
        """The scope of each device: `gpu=0`, `gpu=1` … or `cpu=0` …"""
        return tuple(f"{self.device}={index}" for index in self.devices)


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
    schema: str = PLAN_SCHEMA

    def host(self, name: str) -> PlannedHost:
        """The planned host of that name. Raises KeyError."""
        return next((host for host in self.hosts if host.name == name), None) or _missing(name)

    def stage(self, name: str) -> Stage:
        """The planned stage of that name. Raises KeyError."""
        return next((stage for stage in self.stages if stage.name == name), None) or _missing(name)

    def expected_of(self, host: PlannedHost) -> list[Expectation]:
        """What `host` must observe."""
        alone = len(host.devices)
        together = sum(len(other.devices) for other in self.hosts if host.gang and other.gang == host.gang)
        return [
            item
            for item in self.expected
            if (host.gang if item.stage == "gang" else not item.peers or alone > 1)
            and possible(item.name, together if item.stage == "gang" else alone)
        ]

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
        return (f"gang={host.gang}" if expectation.stage == "gang" else "host",)

    def _partner_scopes(self, host: PlannedHost, expectation: Expectation) -> tuple[str, ...]:
        """The devices that every host of the gang has, each with every host that its own meets."""
        gang = [other for other in self.hosts if host.gang and other.gang == host.gang]
        if expectation.stage != "gang" or not gang:
            return ()
        benchmark = expectation.name.split(".")[0]
        chosen = settings(benchmark, self.stage(expectation.stage).benchmarks.get(benchmark, {}))
        rails = min(len(other.devices) for other in gang)
        met = partners([other.name for other in gang], host.name, int(chosen["rounds"]))
        return tuple(f"{scope},partner={other}" for other in met for scope in host.scopes[:rails])

    def gangs(self) -> dict[str, tuple[str, ...]]:
        """Gang -> its hosts, in inventory order."""
        found: dict[str, tuple[str, ...]] = {}
        for host in self.hosts:
            if host.gang:
                found[host.gang] = (*found.get(host.gang, ()), host.name)
        return found


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
    }
    return Plan(**{**document, **parts})
