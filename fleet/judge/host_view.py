"""One host as the judge sees it: its evidence, its part of the plan, and the criteria that apply to it."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from functools import cached_property

from fleet.judge.baseline import AcceptedRecord
from fleet.judge.criteria import Criterion, Pack
from fleet.judge.evidence import Evidence
from fleet.judge.observation_index import ObservationIndex, ObservationLookup
from fleet.judge.pack_selection import criteria_by_id, select_packs
from schemas.catalogue import Expectation
from schemas.plans import Plan, PlannedHost
from schemas.records import Value
from schemas.reports import INCONCLUSIVE, Verdict, VerdictKind
from schemas.scopes import Scope
from schemas.stages import GANG


class HostView:
    """The facts of one host that every step of the judge needs."""

    def __init__(self, plan: Plan, host: PlannedHost, evidence: Evidence, packs: Sequence[Pack]) -> None:
        self.plan = plan
        self.host = host
        self.evidence = evidence
        self.observations = ObservationIndex(evidence)
        self.lookup = ObservationLookup(self.observations)
        self.snapshot_phases = [(snapshot.stage, snapshot.phase) for snapshot in evidence.snapshots()]
        phases = self.snapshot_phases
        self.first_snapshot, self.last_snapshot = (phases[0], phases[-1]) if phases else (("", ""), ("", ""))
        self.gpus = evidence.gpus()
        self.serials = {f"gpu={gpu.index}": gpu.serial for gpu in self.gpus}
        self.names = {f"gpu={gpu.index}": gpu.name for gpu in self.gpus}
        self.packs, self.no_pack = select_packs(plan, host, self.gpus, packs)
        shipped = {pack.name for pack in packs if not pack.chosen}
        self.operator_packs = {pack.name for pack in packs if pack.chosen} - shipped
        """Packs of the operator. A criterion of theirs that matches nothing is a mistake, never a pass."""
        self.expected = plan.expected_of(host)
        self.accepted = AcceptedRecord(evidence.baseline, self.gpus)

    @property
    def has_record(self) -> bool:
        """Return whether the host's own record is there, not only its gang record."""
        return any(not record.gang for record in self.evidence.records)

    def serial(self, scope: str) -> str:
        """Return the serial of the GPU that a scope begins with, or an empty string."""
        return self.serials.get(Scope.parse(scope).device, "")

    def is_beyond_driver(self, scope: str) -> bool:
        """Return whether the index of a GPU is beyond those of the driver, which counts from 0: another one may be missing.

        The driver still reports something about a GPU that is lost or hangs.
        """
        gpu, named = Scope.parse(scope).device, self.serials.keys()
        counts_from_0 = bool(named) and named == {f"gpu={index}" for index in range(len(named))}
        metrics = (metric for metrics in self.observations.metrics.values() for _, metric in metrics)
        return (
            counts_from_0
            and Scope.parse(gpu).device_kind == "gpu"
            and gpu not in named
            and not any(gpu in metric.values or gpu in metric.absent for metric in metrics)
        )

    @cached_property
    def renumbered(self) -> bool:
        """Return whether two records have different GPUs under one index: one was lost, and the driver renumbered the rest."""
        first: dict[int, str] = {}
        gpus = [gpu for record in self.evidence.records for gpu in record.gpus if gpu.serial]
        return any(first.setdefault(gpu.index, gpu.serial) != gpu.serial for gpu in gpus)

    def members(self, stage: str) -> tuple[str, ...]:
        """Return the members of the last launch of a stage on this host; empty if there was none."""
        launches = [launch for launch in self.evidence.launches() if launch.stage == stage]
        return launches[-1].members if launches else ()

    @cached_property
    def fabric(self) -> float:
        """Return B/s of the host's ports by the inventory, for the slowest host that launched with this one."""
        return self.plan.slowest_fabric(self.host, self.members(GANG))

    @cached_property
    def unmeasured_gpus(self) -> list[str]:
        """Return the scopes of planned GPUs of which nothing at all was measured."""
        scopes = self.host.scopes if self.host.device == "gpu" else ()
        return [scope for scope in scopes if not self.measured_at(scope)]

    def measured_at(self, scope: str) -> bool:
        """Return whether anything was measured in that scope."""
        return self.observations.measured_at(scope)

    @cached_property
    def stages_seen(self) -> set[str]:
        """Return the stages of which there is any observation."""
        return self.observations.stages()

    @cached_property
    def peer_key(self) -> tuple[str, str]:
        """Return what hosts must share to be alike: the models of their GPUs, and the gang."""
        return " and ".join(sorted(set(self.names.values()))), self.host.gang

    @cached_property
    def kind(self) -> Hashable:
        """Return what two hosts must share so that equal readings are judged equally: all that the criteria use but values.

        The gang is not part of it (`peer_key` has it).
        """
        host = self.host
        return (
            *(host.scopes, host.device, host.gpu_model, bool(host.gang), host.fabric_gbps, self.fabric),
            *(tuple(self.snapshot_phases), tuple(self.evidence.gpu_scopes().items()), tuple(self.names.items())),
            *map(id, self.packs),
        )

    def lacks(self, expectation: Expectation) -> bool:
        """Return whether a pack says that this part does not have what the plan expects."""
        return any(
            expectation.params.get(param) in values
            for pack in self.packs
            for param, values in pack.lacks.get(expectation.name, {}).items()
        )

    def must_match(self, criterion: Criterion) -> bool:
        """Return whether a criterion that matches nothing is a mistake: the operator's own, on what every part has."""
        own = criterion.origin in self.operator_packs and not criterion.optional and not self.plan.rehearsal
        return own and (criterion.baseline is None or self.plan.baseline is not None)

    def criteria(self) -> dict[str, Criterion]:
        """Return the criteria that judge this host by id; a pack that the operator named wins."""
        return criteria_by_id(self.packs)

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
