"""The plan of a run: the observations that must exist, from a profile and an inventory. It is fixed when the run begins."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from schemas.baselines import PlannedBaseline
from schemas.catalogue import BENCHMARKS, Expectation, can_observe, expand, settings
from schemas.scopes import directory_scope
from schemas.stages import CELL, GANG
from schemas.studies import Study, study_from_json
from schemas.tournament import partners
from schemas.waivers import Waiver

LOCAL_RUN = "run"
"""`rackproof run` began the run, on the machine that it measures."""
PLAN_SCHEMA = "rackproof.plan/1"
GPU, NIC, MODULE, LINK = "gpu", "nic", "module", "link"
"""Kinds of lines of a manifest: three kinds of parts, and the cable between a network port and a switch port."""


@dataclass(frozen=True, kw_only=True)
class Stage:
    """A stage of the run.

    `benchmark` measures each host alone, `soak` repeats this in rounds, and `gang` measures the hosts of a gang (one multi-node
    launch) together.
    """

    name: str
    deadline_s: float
    collective_timeout_s: float
    benchmarks: Mapping[str, Mapping[str, Any]]
    """Benchmark -> its settings that differ from the catalogue."""
    duration_s: float = 0.0
    """How long the stage is repeated in rounds, with `deadline_s` for each round; 0: it runs once."""
    stop_on: str = ""
    """Which findings on a host end the stage there early: one of `timeline.STOP_ON`."""
    cpus: int = 0
    """Processors that each rank may use; 0: all processors of its host."""

    @property
    def longest_s(self) -> float:
        """Maximum duration of the stage. A round that began in time is finished, so this includes one more round."""
        return self.duration_s + self.deadline_s


@dataclass(frozen=True, kw_only=True)
class PlannedHost:
    """A host as the inventory describes it: the expected hardware, not the detected one."""

    name: str
    address: str
    rack: str
    device: str
    """`gpu`, or `cpu` in a rehearsal."""
    devices: tuple[int, ...]
    """NVML indices of the GPUs under test, or the numbers of a rehearsal's processes."""
    gpu_model: str = ""
    """Criteria pack named in the inventory; empty: selected by the name of the GPU."""
    gang: str = ""
    nvlink_domain: str = ""
    """Name of the NVLink domain that the host shares with others; empty if not in the inventory."""
    fabric_gbps: float = 0.0
    """Line rate of the fabric port of one GPU in Gb/s; 0 if not in the inventory."""
    infiniband_ports: int = 0
    """InfiniBand and RoCE ports that must be up; 0 if not in the inventory."""
    verbs_required: bool = False
    """Whether perftest must measure the RDMA ports: `infiniband_ports` of them, or at least one if that number is 0."""
    dimm_count: int = 0
    """Memory modules that the host was ordered with; 0 if not in the inventory."""
    memory_mts: float = 0.0
    """Millions of transfers per second at which the memory must run; 0 if not in the inventory."""
    local_storage: tuple[str, ...] = ()
    """Directories to measure, on disks of the host."""
    shared_storage: tuple[str, ...] = ()
    """Directories to measure, which the host shares with other hosts."""
    storage_floors: Mapping[str, float] = field(default_factory=dict)
    """Required bandwidths in B/s: `local_read`, `local_write`, `shared_read`, `shared_write`."""
    host_memory_gbyteps: float = 0.0
    """Required bandwidth of the host's memory in 10^9 bytes/s, of all cores together; 0 if not in the inventory."""
    driver_version: str = ""
    """Required driver version or branch; empty: any."""
    vbios_version: str = ""
    """Required VBIOS version; empty: any."""
    environment: Mapping[str, str] = field(default_factory=dict)
    share_gpus: bool = False
    """Measure even if other processes use the GPUs."""
    bmc: bool = False
    """Whether the inventory names the BMC of the host. If it does, the BMC must be read."""
    count_found: bool = False
    """Whether the number of GPUs to expect was not given (`rackproof run` without `--gpus`). Then `devices` are those of
    `--devices`, or else all GPUs of the host."""

    @cached_property
    def scopes(self) -> tuple[str, ...]:
        """Scopes of the devices: `gpu=0`, `gpu=1` … or `cpu=0` …"""
        return tuple(f"{self.device}={index}" for index in self.devices)

    def directories(self, kind: str) -> tuple[str, ...]:
        """Return the directories to measure: `local_storage` or `shared_storage`."""
        return {"local_storage": self.local_storage, "shared_storage": self.shared_storage}[kind]

    @property
    def fabric(self) -> float:
        """Sum of the line rates of the fabric ports of all devices of the host in B/s; 0 if not in the inventory."""
        return self.fabric_gbps * 1e9 / 8 * len(self.devices)


@dataclass(frozen=True, kw_only=True)
class Part:
    """An ordered part or cable: one line of the manifest."""

    host: str
    kind: str
    """`gpu`, `nic`, `module` (a transceiver, or an end of a cable with modules) or `link`."""
    serial: str = ""
    """Serial of a GPU or module, or node GUID or MAC address of a NIC, as written in the manifest; empty for a link."""
    slot: str = ""
    """Where the part is; empty: anywhere in the host.

    - GPU: its PCI address as in sysfs, or its NVML index.
    - NIC: its PCI address as in sysfs, or its name.
    - Module or link: the network port of the host, as interface, adapter (`mlx5_0`), adapter and port (`mlx5_0/1`) or PCI
      address.
    """
    switch: str = ""
    """Name or ID of the switch of a link."""
    switch_port: str = ""
    """Port of the switch of a link, by its name or its label."""
    origin: str = ""
    """File and line of the manifest, for messages."""


@dataclass(frozen=True, kw_only=True)
class BenchmarkChoice:
    """A benchmark of the profile, and whether it is selected or left out for lack of time."""

    stage: str
    benchmark: str
    chosen: bool
    cost_s: float
    """Expected duration."""
    why: str


@dataclass(frozen=True, kw_only=True)
class BudgetSelection:
    """The benchmarks selected from a profile for a time budget (`fleet/planning/test_selection.py`)."""

    budget_s: float
    cost_s: float
    runs: int
    """Number of earlier runs that the selection is based on."""
    items: tuple[BenchmarkChoice, ...]
    """All benchmarks of the profile: first the selected ones, in the order of selection."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The observations that must exist on each host, and the time limits of the stages."""

    run_id: str
    nonce: str
    created: str
    profile: str
    rehearsal: bool
    criteria: tuple[str, ...]
    """Criteria packs in addition to those of the GPU model: names of shipped packs, or paths."""
    stages: tuple[Stage, ...]
    hosts: tuple[PlannedHost, ...]
    expected: tuple[Expectation, ...]
    manifest: tuple[Part, ...] = ()
    """The ordered parts; empty if the inventory names no manifest."""
    grafana_url: str = ""
    """Base URL of Grafana, which the report links to."""
    site: str = ""
    purchase_order: str = ""
    operator: str = ""
    """Who runs the acceptance. The report shows site, purchase order and operator; they have no other effect."""
    simulated: bool = False
    """Whether `rackproof simulate` generated the plan and its records. Such a run never accepts hardware."""
    reason: str = ""
    """The operator's reason for the run."""
    choice: BudgetSelection | None = None
    """The benchmarks selected for a time budget; None if the whole profile runs."""
    waivers: tuple[Waiver, ...] = ()
    """The waivers at the beginning of the run."""
    baseline: PlannedBaseline | None = None
    """The baseline that the run is compared with; None if there is none."""
    study: Study | None = None
    """Set for a scaling study, in which nothing is judged and each cell (combination of settings) is a separate launch."""
    begun_by: str = ""
    """What began the run: a playbook (a key of `PLAYBOOKS`), or LOCAL_RUN; empty if this is not known."""
    durations_s: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    """Stage -> benchmark -> its seconds in an earlier run with the same settings and devices; missing without such a run."""
    schema: str = PLAN_SCHEMA

    def host(self, name: str) -> PlannedHost:
        """Return the planned host of that name. Raises KeyError."""
        return self._by_name[name]

    @cached_property
    def _by_name(self) -> dict[str, PlannedHost]:
        return {host.name: host for host in reversed(self.hosts)}

    @cached_property
    def _of_gang(self) -> dict[str, list[PlannedHost]]:
        result: dict[str, list[PlannedHost]] = {}
        for host in self.hosts:
            if host.gang:
                result.setdefault(host.gang, []).append(host)
        return result

    @cached_property
    def _expected(self) -> dict[tuple[bool, int, int], list[Expectation]]:
        """Cache: (whether a host is in a gang, its number of devices, the gang's number of devices) -> expected observations."""
        return {}

    def only(self, hosts: Iterable[str]) -> Plan:
        """Return the plan of these hosts, in this order, without the manifest.

        `expected_of` is right in the result only if `hosts` has all or none of the hosts of each gang.
        """
        part = replace(self, hosts=tuple(self._by_name[name] for name in hosts), manifest=())
        vars(part)["_expected"] = self._expected  # the cache is valid for both plans
        return part

    def ranks(self, hosts: Iterable[str]) -> int:
        """Return the number of devices of these hosts. Hosts that are not in the plan are ignored."""
        return sum(len(self._by_name[name].devices) for name in set(hosts) if name in self._by_name)

    def slowest_fabric(self, host: PlannedHost, members: Iterable[str]) -> float:
        """Return the fabric rate (B/s) that limits these members of the host's gang: that of the slowest member."""
        if host.gang not in self._mixed:
            return host.fabric
        names = set(members)
        rates = (other.fabric for other in self._of_gang[host.gang] if other.name in names and other.fabric)
        return min(rates, default=host.fabric)

    def slowest_port(self, host: PlannedHost, members: Iterable[str]) -> float:
        """Return the rate (B/s) of one GPU's fabric port, on the slowest of these members of the host's gang."""
        if host.gang not in self._mixed:
            return host.fabric_gbps * 1e9 / 8
        names = set(members)
        rates = (other.fabric_gbps for other in self._of_gang[host.gang] if other.name in names and other.fabric_gbps)
        return min(rates, default=host.fabric_gbps) * 1e9 / 8

    @cached_property
    def _mixed(self) -> set[str]:
        """The gangs whose hosts have different rates of the fabric or of a port."""
        return {
            gang
            for gang, hosts in self._of_gang.items()
            if len({(host.fabric, host.fabric_gbps) for host in hosts}) > 1
        }

    def stage(self, name: str) -> Stage:
        """Return the planned stage of that name. Raises KeyError."""
        return next((stage for stage in self.stages if stage.name == name), None) or _missing(name)

    def of_cell(self, number: int) -> Plan:
        """Return the plan of one cell of the study, with its GPUs and settings. Raises KeyError."""
        cells = self.study.cells if self.study else ()
        if not 0 < number <= len(cells):
            _missing(f"cell {number}")
        cell, gang = cells[number - 1], self.stage(GANG)
        benchmarks = {name: {**chosen, **cell.settings} for name, chosen in gang.benchmarks.items()}
        hosts = tuple(replace(host, devices=host.devices[: cell.gpus]) for host in self.hosts)
        return replace(self, stages=(replace(gang, name=CELL, cpus=cell.cpus, benchmarks=benchmarks),), hosts=hosts)

    def expected_of(self, host: PlannedHost) -> list[Expectation]:
        """Return the observations that must exist on `host`."""
        alone = len(host.devices)
        together = sum(len(other.devices) for other in self._of_gang.get(host.gang, ()))
        key = bool(host.gang), alone, together
        if key not in self._expected:
            self._expected[key] = [
                item
                for item in self.expected
                if (host.gang if item.stage == GANG else not item.peers or alone > 1)
                and can_observe(item.name, together if item.stage == GANG else alone)
            ]
        return self._expected[key]

    def scopes_of(self, host: PlannedHost, expectation: Expectation) -> tuple[str, ...]:
        """Return the scopes in which the expected observation must exist on `host`."""
        if expectation.scope == "device":
            return host.scopes
        if expectation.scope == "pair":
            pairs = itertools.permutations(host.devices, 2)
            return tuple(f"{host.device}={source},peer={target}" for source, target in pairs)
        if expectation.scope == "peers":
            return self._partner_scopes(host, expectation)
        if expectation.scope == "host":
            return ("host",)
        if expectation.scope == "directory":
            return tuple(map(directory_scope, host.directories(BENCHMARKS[expectation.name.split(".")[0]].directories)))
        return (f"gang={host.gang}" if expectation.stage == GANG else "host",)

    def _partner_scopes(self, host: PlannedHost, expectation: Expectation) -> tuple[str, ...]:
        """Return one scope for each pair of a device and a partner host, only for devices that all hosts of the gang have."""
        gang = self._of_gang.get(host.gang, [])
        if expectation.stage != GANG or not gang:
            return ()
        benchmark = expectation.name.split(".")[0]
        chosen = settings(benchmark, self.stage(expectation.stage).benchmarks.get(benchmark, {}))
        rails = min(len(other.devices) for other in gang)
        partner_hosts = partners([other.name for other in gang], host.name, int(chosen["rounds"]))
        return tuple(f"{scope},partner={other}" for other in partner_hosts for scope in host.scopes[:rails])

    def judges_ports(self, host: PlannedHost) -> bool:
        """Return whether the RDMA ports of a host, and their cables, are judged.

        The hosts of a rehearsal may be one machine. Their ports are judged only if the inventory sets `rackproof_verbs_required`
        and the run measures the ports.
        """
        return not self.rehearsal or (host.verbs_required and self._measures_ports)

    @cached_property
    def _measures_ports(self) -> bool:
        return any("verbs" in stage.benchmarks for stage in self.stages)

    def gangs(self) -> dict[str, tuple[str, ...]]:
        """Return each gang with its hosts, in inventory order."""
        return self._gangs

    @cached_property
    def _gangs(self) -> dict[str, tuple[str, ...]]:
        return {gang: tuple(host.name for host in hosts) for gang, hosts in self._of_gang.items()}


def expectations(stages: Iterable[Stage], *, rehearsal: bool) -> tuple[Expectation, ...]:
    """Return every observation that the stages must make, on GPUs or on the CPUs of a rehearsal."""
    device = "cpu" if rehearsal else GPU
    return tuple(
        expectation
        for stage in stages
        for benchmark, chosen in stage.benchmarks.items()
        for expectation in expand(stage.name, benchmark, chosen, device)
    )


def _missing(name: str) -> Any:
    raise KeyError(name)


def plan_from_json(document: Mapping[str, Any]) -> Plan:
    """Return the plan in a document that matches plan.schema.json."""
    parts: dict[str, Any] = {
        "criteria": tuple(document["criteria"]),
        "stages": tuple(Stage(**stage) for stage in document["stages"]),
        "hosts": tuple(_planned_host(host) for host in document["hosts"]),
        "expected": tuple(Expectation(**item) for item in document["expected"]),
        "manifest": tuple(Part(**item) for item in document.get("manifest", ())),
        "choice": selection_from_json(document["choice"]) if "choice" in document else None,
        "waivers": tuple(Waiver(**item) for item in document.get("waivers", ())),
        "baseline": PlannedBaseline(**document["baseline"]) if "baseline" in document else None,
        "study": study_from_json(document["study"]) if "study" in document else None,
    }
    return Plan(**{**document, **parts})


def _planned_host(document: Mapping[str, Any]) -> PlannedHost:
    lists = {key: tuple(document[key]) for key in ("devices", "local_storage", "shared_storage") if key in document}
    return PlannedHost(**{**document, **lists})


def selection_from_json(document: Mapping[str, Any]) -> BudgetSelection:
    """Return the benchmarks selected for a time budget, from the `choice` of a plan."""
    return BudgetSelection(**{**document, "items": tuple(BenchmarkChoice(**item) for item in document["items"])})
