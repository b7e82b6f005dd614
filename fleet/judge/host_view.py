"""One host as the judge sees it: its evidence, its part of the plan, and the criteria that apply to it."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Collection, Hashable, Mapping, Sequence
from functools import cached_property, lru_cache

from fleet.judge.baseline import AcceptedRecord
from fleet.judge.criteria import Criterion, Pack, name_matches
from fleet.judge.evidence import Evidence
from fleet.judge.observation_index import ObservationIndex, ObservationLookup
from fleet.judge.pack_selection import criteria_by_id, select_packs
from schemas.catalogue import Expectation
from schemas.plans import Plan, PlannedHost
from schemas.records import UNSUPPORTED, Value
from schemas.reports import INCONCLUSIVE, Verdict, VerdictKind
from schemas.scopes import Scope
from schemas.stages import GANG

PCIE_PATHS = frozenset({"X", "PIX", "PXB", "PHB", "NODE", "SYS", "unknown"})
"""Values of the reading `gpu.peer.link` for two GPUs that no NVLink joins. `unknown` is an unknown path over PCIe."""
MIN_HOSTS_OF_FABRIC = 2
INFINIBAND_TRANSPORT = "NET/IB"
"""NCCL's name of its transport over InfiniBand and RoCE ports."""


class HostView:
    """The facts of one host that every step of the judge needs."""

    def __init__(self, plan: Plan, host: PlannedHost, evidence: Evidence, packs: Sequence[Pack]) -> None:
        self.plan = plan
        self.host = host
        self.evidence = evidence
        self.snapshot_phases = [(snapshot.stage, snapshot.phase) for snapshot in evidence.snapshots()]
        phases = self.snapshot_phases
        self.first_snapshot, self.last_snapshot = (phases[0], phases[-1]) if phases else (("", ""), ("", ""))
        self.gpus = evidence.gpus()
        self.serials = {f"gpu={gpu.index}": gpu.serial for gpu in self.gpus}
        self.names = {f"gpu={gpu.index}": gpu.name for gpu in self.gpus}
        self.packs, self.no_pack = select_packs(plan, host, self.gpus, packs)
        self.shipped_packs = [pack for pack in packs if not pack.chosen]
        """All packs that come with Rackproof, also those that do not apply to the host."""
        shipped = {pack.name for pack in self.shipped_packs}
        self.operator_packs = {origin for pack in packs if pack.chosen for origin in pack.origins} - shipped
        """Names of the packs that the operator wrote. `must_match` states which of their criteria must match an observation."""
        self.expected = plan.expected_of(host)
        self.accepted = AcceptedRecord(evidence.baseline, self.gpus)

    @cached_property
    def observations(self) -> ObservationIndex:
        return ObservationIndex(self.evidence)

    @cached_property
    def lookup(self) -> ObservationLookup:
        """Return an index that finds the observation of the host for an expectation of the plan."""
        return ObservationLookup(self.observations)

    @cached_property
    def nvlink_domain(self) -> str:
        """Return the NVLink domain that the host must share with other hosts, as text: `domain 7`; empty if none is required.

        A model that only the inventory names, and no GPU reports, requires none.
        """
        if self.host.nvlink_domain:
            return f"domain {self.host.nvlink_domain}"
        is_required = any(pack.rack_is_nvlink_domain for pack in self.packs) and not self.has_only_other_models
        return f"domain of rack {self.host.rack}" if is_required else ""

    @cached_property
    def other_models(self) -> Mapping[str, str]:
        """Return the scope of each GPU that is of another model than the inventory names -> the name that the GPU reports."""
        named = next((pack for pack in self.packs if pack.name == self.host.gpu_model), None)
        scopes = self.host.scopes if named and self.host.device == "gpu" else ()
        names = {scope: self.names[scope] for scope in scopes if scope in self.names}
        return {scope: name for scope, name in names.items() if named and name not in named.gpu_names}

    @cached_property
    def has_only_other_models(self) -> bool:
        """Return whether every planned GPU that reports its name is of another model than the inventory names."""
        return 0 < len(self.other_models) == sum(scope in self.names for scope in self.host.scopes)

    def packs_of(self, names: Collection[str]) -> list[Pack]:
        """Return the shipped packs of the GPU models with these names; `common` if there is none."""
        found = [pack for pack in self.shipped_packs if set(names) & set(pack.gpu_names)]
        return found or [pack for pack in self.shipped_packs if pack.name == "common"]

    @property
    def has_record(self) -> bool:
        """Return whether the host has a record of its own, not only one of its gang (the hosts of one multi-node launch)."""
        return any(not record.gang for record in self.evidence.records)

    def serial(self, scope: str) -> str:
        """Return the serial of the GPU that a scope begins with, or an empty string."""
        return self.serials.get(Scope.parse(scope).device, "")

    def is_beyond_driver(self, scope: str) -> bool:
        """Return whether the GPU of a scope has a higher index than all GPUs that the driver lists, and is in no snapshot.

        Example: one of eight GPUs is missing from the start. The driver then numbers the remaining GPUs from 0 to 6. So index 7
        is beyond the driver, whichever GPU is missing. A GPU that is lost or hangs during the run is in a snapshot, with readings
        or with reasons why it has none.
        """
        gpu, listed = Scope.parse(scope).device, self.serials.keys()
        counts_from_0 = bool(listed) and listed == {f"gpu={index}" for index in range(len(listed))}
        metrics = (metric for metrics in self.observations.metrics.values() for _, metric in metrics)
        return (
            counts_from_0
            and Scope.parse(gpu).device_kind == "gpu"
            and gpu not in listed
            and not any(gpu in metric.values or gpu in metric.absent for metric in metrics)
        )

    @cached_property
    def renumbered(self) -> bool:
        """Return whether two records of the host have different GPUs with the same index, for example after the loss of a GPU."""
        first: dict[tuple[int, str], str] = {}
        gpus = [gpu for record in self.evidence.records for gpu in record.gpus]
        return any(
            identity and first.setdefault((gpu.index, kind), identity) != identity
            for gpu in gpus
            for kind, identity in (("serial", gpu.serial), ("uuid", gpu.uuid))
        )

    def members(self, stage: str) -> tuple[str, ...]:
        """Return the members of the last launch of a stage on this host; empty if there was none."""
        launches = [launch for launch in self.evidence.launches() if launch.stage == stage]
        return launches[-1].members if launches else ()

    @cached_property
    def fabric(self) -> float:
        """Return the fabric rate of the slowest host in the last gang launch (B/s, from the inventory)."""
        return self.plan.slowest_fabric(self.host, self.members(GANG))

    @cached_property
    def fabric_port(self) -> float:
        """Return the rate (B/s, from the inventory) of a GPU's fabric port: the lowest of all hosts in the last gang launch."""
        return self.plan.slowest_port(self.host, self.members(GANG))

    @cached_property
    def nvlinks(self) -> Mapping[str, int]:
        """Return the scope of each ordered pair of GPUs (`gpu=0,peer=1`) -> the number of NVLinks that join them; 0: PCIe only.

        The number is the highest that either GPU reported in any snapshot: a link that is down at one end still belongs
        to the pair.
        """
        links: dict[str, int] = {}
        # Snapshots with equal readings share one Metric object, which is parsed only once.
        metrics = {id(metric): metric for _, metric in self.observations.metrics.get("gpu.peer.link", ())}
        for metric in metrics.values():
            for scope, path in metric.values.items():
                number = _nvlinks_of_path(str(path))
                if number is not None:
                    for pair in _both_orders(scope):
                        links[pair] = max(links.get(pair, 0), number)
        return links

    def most_between_hosts(self, name: str) -> float:
        """Return the highest rate (B/s) that a figure of this name between hosts can have because of the path inside this host.

        Infinite if NVLinks join all GPUs of the host. Otherwise all data pass the PCIe link of a GPU, so several ports are not
        faster than one, except for all_to_all (NVIDIA/nccl issue 412). The rate is then the least of three rates: that of one
        GPU's port, that of PCIe by the datasheet, and that of the same operation within the host. Rates that are not known are
        left out.
        """
        if len(self.host.devices) > 1 and self._fewest_nvlinks != 0:
            return math.inf
        pcie: list[float] = [pack.datasheet["pcie"]["bandwidth"] for pack in self.packs if "pcie" in pack.datasheet]
        return min(self.fabric_port, *pcie, self._rates_over_pcie.get(name, math.inf))

    @cached_property
    def _rates_over_pcie(self) -> Mapping[str, float]:
        """Return the name of each bandwidth of a collective -> its highest value within the host, if PCIe limits it.

        Empty if no figure between hosts is judged by the rate of the fabric.
        """
        if not (self.host.gang and self.host.fabric_gbps and self._fewest_nvlinks == 0):
            return {}
        names = [name for name in self.observations.benchmark_names() if name_matches("collective.*.busbw", name)]
        figures = {
            name: [
                float(item.value)
                for item in self.observations[name]
                if not Scope.parse(item.scope).is_gang and isinstance(item.value, int | float)
            ]
            for name in names
        }
        return {name: max(values) for name, values in figures.items() if values}

    def nvlinks_between(self, scope: str) -> int | None:
        """Return the number of NVLinks of the pair of GPUs in `scope`.

        For any other scope, return the lowest number of all pairs of the host. None if the number of any of these pairs is not
        known, or the host has no pair.
        """
        if Scope.parse(scope).kind == "peer":
            return self.nvlinks.get(scope)
        return self._fewest_nvlinks

    @cached_property
    def _fewest_nvlinks(self) -> int | None:
        pairs = [f"gpu={first},peer={second}" for first, second in itertools.permutations(self.host.devices, 2)]
        known = [self.nvlinks[pair] for pair in pairs if pair in self.nvlinks]
        return min(known, default=None) if len(known) == len(pairs) else None

    @cached_property
    def wiring(self) -> str:
        """Return the numbers of NVLinks that join two GPUs of the host, such as `0,12`: some pairs have a bridge, others none."""
        return ",".join(map(str, sorted(set(self.nvlinks.values()))))

    @cached_property
    def is_virtual(self) -> bool:
        """Return whether the host is a virtual machine."""
        return True in self._values("host.virtual_machine")

    @cached_property
    def has_lone_gpu(self) -> bool:
        """Return whether the host is a virtual machine with one GPU and nothing at the other end of its NVLinks.

        A hypervisor passes one GPU of an NVSwitch board through without its NVLinks: no link is ever up, the GPU belongs to no
        fabric, and no NVSwitch is on the bus. The number of active links is 0, or the driver does not support the query. On a
        host without a hypervisor the same readings show a fault.
        """
        if len(self.host.devices) != 1 or not self.is_virtual:
            return False
        in_fabric = self._values("gpu.fabric.state")
        links = [metric for _, metric in self.observations.metrics.get("gpu.nvlink.active_links", ())]
        reasons = {reason.partition(":")[0] for metric in links for reason in metric.absent.values()}
        return (
            bool(links)
            and self._values("gpu.nvlink.active_links") <= {0}
            and reasons <= {UNSUPPORTED}
            and not in_fabric
            and self._values("fabric.nvswitch.count") <= {0}
        )

    @cached_property
    def module_models(self) -> Mapping[str, str]:
        """Return the scope of each port with a module -> the part number of the module in the last snapshot that has one."""
        metrics = (metric for _, metric in self.observations.metrics.get("optics.module.part_number", ()))
        return {scope: str(value) for metric in metrics for scope, value in metric.values.items()}

    @cached_property
    def part_numbers(self) -> Mapping[str, str]:
        """Return the scope of each GPU -> its part number in the last snapshot that has one."""
        metrics = (metric for _, metric in self.observations.metrics.get("gpu.part_number", ()))
        return {scope: str(value) for metric in metrics for scope, value in metric.values.items()}

    @cached_property
    def server(self) -> str:
        """Return the product name of the host in the last snapshot that has one; empty if none has.

        A virtual machine also has its number of processors: `Standard PC with 16 processors`, or `a virtual machine with 16
        processors` without a product name. The owner of a virtual machine chooses its size, which the product name does not show.
        """
        product = str(self.observations.last_values("host.system.product").get("host", ""))
        processors = self.observations.last_values("host.cpu.count").get("host")
        return (
            f"{product or 'a virtual machine'} with {processors} processors"
            if processors and self.is_virtual
            else product
        )

    def _values(self, name: str) -> set[Value]:
        """Return the values of a reading in all scopes and snapshots."""
        return {value for _, metric in self.observations.metrics.get(name, ()) for value in metric.values.values()}

    @cached_property
    def uses_fabric(self) -> bool:
        """Return whether the host must have an active fabric port.

        It must if its gang has several hosts, and the inventory states a fabric rate or NCCL used RDMA ports.
        """
        if not self.host.gang or len(self.plan.gangs()[self.host.gang]) < MIN_HOSTS_OF_FABRIC:
            return False
        transports = (item.value for item in self.observations["collective.transport"] if item.stage == GANG)
        return bool(self.host.fabric_gbps) or any(
            name.startswith(INFINIBAND_TRANSPORT) for value in transports for name in str(value).split("+")
        )

    @cached_property
    def unmeasured_gpus(self) -> list[str]:
        """Return the scopes of planned GPUs without any measurement."""
        scopes = self.host.scopes if self.host.device == "gpu" else ()
        with_reading = self.observations.with_reading(scopes)
        return [scope for scope in scopes if scope not in with_reading and not self.measured_at(scope)]

    def measured_at(self, scope: str) -> bool:
        return self.observations.measured_at(scope)

    @cached_property
    def observed_stages(self) -> set[str]:
        """Return the stages that have any observation."""
        return self.observations.stages()

    @cached_property
    def peer_key(self) -> tuple[str, str]:
        """Return what the host shares with the hosts that it is compared with: the GPU models and the gang."""
        return " and ".join(sorted(set(self.names.values()))), self.host.gang

    @cached_property
    def kind(self) -> Hashable:
        """Return a key of the facts about the host that decide which criteria and limits apply to it.

        If two hosts have equal keys and equal observations, criteria that do not compare hosts give equal verdicts. The name of
        the gang is only in `peer_key`.
        """
        host = self.host
        return (
            *(host.scopes, host.device, host.gpu_model, bool(host.gang), host.fabric_gbps, self.fabric),
            *(
                host.infiniband_ports,
                host.dimm_count,
                host.memory_mts,
                host.host_memory_gbyteps,
                host.driver_version,
                host.vbios_version,
            ),
            *(tuple(self.snapshot_phases), tuple(self.evidence.gpu_scopes().items())),
            *(tuple(self.names.items()), tuple(self.part_numbers.items())),
            *(self.server, tuple(self.nvlinks.items()), self.fabric_port, self.has_lone_gpu, bool(self.nvlink_domain)),
            *self._rates_over_pcie.items(),
            *map(id, self.packs),
        )

    def lacks(self, expectation: Expectation) -> bool:
        """Return whether a shipped pack of this host accepts the status `unsupported` for the expectation (`Pack.lacks`)."""
        return any(
            expectation.params.get(param) in values
            for pack in self.packs
            if not pack.chosen
            for param, values in pack.lacks.get(expectation.name, {}).items()
        )

    def must_match(self, criterion: Criterion) -> bool:
        """Return whether the criterion must match an observation, because it is from a pack of the operator and not optional.

        In a rehearsal, no criterion must match. In a run without a baseline, criteria that compare with a baseline need not
        match.
        """
        is_required = criterion.origin in self.operator_packs and not criterion.optional and not self.plan.rehearsal
        return is_required and (criterion.baseline is None or self.plan.baseline is not None)

    def criteria(self) -> dict[str, Criterion]:
        """Return id -> criterion, for the criteria that judge this host."""
        return criteria_by_id(self.packs)

    @cached_property
    def shipped_criteria(self) -> dict[str, Criterion]:
        """Return id -> criterion, for the shipped packs of this host, including criteria that a pack of the operator replaces."""
        return criteria_by_id([pack for pack in self.packs if not pack.chosen])

    @cached_property
    def credible_criteria(self) -> dict[str, Criterion]:
        """Return id -> criterion, for the shipped criteria whose datasheet bounds the figures that this host can reach.

        If all GPUs are of another model than the inventory names, these are the criteria of the model that the GPUs report.
        """
        if not self.has_only_other_models:
            return self.shipped_criteria
        return criteria_by_id(self.packs_of(set(self.other_models.values()))[:1])

    def inconclusive(
        self,
        name: str,
        scope: str,
        reason: str,
        stage: str = "",
        params: Mapping[str, Value] | None = None,
        criterion: Criterion | None = None,
        kind: str = VerdictKind.MISSING,
    ) -> Verdict:
        """Return an inconclusive verdict on this host with its reason."""
        return Verdict(
            host=self.host.name,
            scope=scope,
            serial=self.serial(scope),
            name=name,
            stage=stage,
            params=params or {},
            verdict=INCONCLUSIVE,
            criterion=criterion.id if criterion else "plan",
            kind=kind,
            reason=reason,
            action="none",
            source=criterion.source if criterion else "plan",
        )


@lru_cache(maxsize=1024)
def _both_orders(scope: str) -> tuple[str, ...]:
    """Return the scope of a pair of GPUs, and that of the same pair in the other order; nothing for any other scope."""
    labels = Scope.parse(scope).labels
    return (scope, f"gpu={labels['peer']},peer={labels['gpu']}") if labels.keys() == {"gpu", "peer"} else ()


@lru_cache(maxsize=1024)
def _nvlinks_of_path(path: str) -> int | None:
    """Return the number of NVLinks in a path as `nvidia-smi topo -m` writes it: 18 for `NV18`, 0 for PCIE_PATHS, else None."""
    if path in PCIE_PATHS:
        return 0
    number = re.fullmatch(r"NV([0-9]{1,3})", path)
    return int(number[1]) if number else None
