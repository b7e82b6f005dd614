"""What a run left behind, in the form in which the judge asks for it."""

from __future__ import annotations

import heapq
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from fleet.judge.baseline import Accepted
from fleet.judge.criteria import Criterion, Pack
from fleet.judge.pack_selection import criteria_of, packs_for
from schemas.baselines import HostBaseline
from schemas.catalogue import BENCHMARKS, DURATION, Expectation
from schemas.plans import Plan, PlannedHost
from schemas.records import MEASURED, Gpu, Launch, Metric, Observation, Record, Snapshot, Value
from schemas.reports import INCONCLUSIVE, Verdict, VerdictKind
from schemas.scopes import Scope
from schemas.stages import GANG

_PREFIXES = frozenset(
    {output.name.split(".")[0] for entry in BENCHMARKS.values() for output in entry.outputs}
    | {DURATION.name.split(".")[0], "drift"}
)
LAUNCH = "launch"
"""First component of the names by which the versions that the ranks told are judged: `launch.torch`."""
APART = ("numa", "world_size")
"""Parameters that are no setting of a profile and yet make another figure of it: which memory, how many ranks."""


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """What one host of the plan left behind."""

    records: tuple[Record, ...] = ()
    """Its host record and its gang record, as far as they can be believed."""
    problem: str = ""
    """Why there is no host record, or what the control node saw go wrong."""
    user: str = ""
    """Who uses the host, as the control node saw it, if that is why there is no record."""
    baseline: HostBaseline | None = None
    """What it showed when it was accepted; None where the plan compares with nothing."""

    def observations(self) -> list[Observation]:
        """All of them, in the order in which they were made.

        What the kernel and the bus say of a GPU by its PCI address (`pci=0000:1b:00.0`) is told of that GPU (`gpu=0`).
        """
        places = self.places()
        taken = [seen for snapshot in self.snapshots() for seen in snapshot.observations()]
        return [_placed(seen, places) for seen in (*taken, *self.benchmarks())]

    def places(self) -> dict[str, str]:
        """Scope of each GPU by its PCI address -> its scope by index."""
        return {f"pci={pci_address(gpu.pci_bus_id)}": f"gpu={gpu.index}" for gpu in self.gpus() if gpu.pci_bus_id}

    def snapshots(self) -> list[Snapshot]:
        """Those of all its records, in the order in which they were taken: a stage that was run again may have come last."""
        return list(heapq.merge(*(record.snapshots for record in self.records), key=lambda taken: taken.at))

    def benchmarks(self) -> list[Observation]:
        """What the benchmarks observed, without the snapshots."""
        return [seen for record in self.records for seen in record.observations]

    def gpus(self) -> tuple[Gpu, ...]:
        """The GPUs that the host named, by index."""
        found = {gpu.index: gpu for record in self.records for gpu in record.gpus}
        return tuple(found[index] for index in sorted(found))

    def launches(self) -> tuple[Launch, ...]:
        """Every launch, whatever its outcome."""
        return tuple(launch for record in self.records for launch in record.launches)

    def software(self) -> dict[str, str]:
        """Versions of what the ranks ran on."""
        return {key: value for record in self.records for key, value in record.software.items()}

    def versions(self) -> list[Observation]:
        """The same as observations: `launch.torch`, `launch.nccl`."""
        return [
            Observation(
                name=f"{LAUNCH}.{re.sub('[^a-z0-9_]', '_', key.lower())}",
                scope="host",
                stage="",
                unit="1",
                status=MEASURED,
                value=version,
            )
            for key, version in self.software().items()
        ]


def pci_address(bus_id: str) -> str:
    """A PCI address as sysfs spells it, `0000:1b:00.0`: NVML writes `00000000:1B:00.0`."""
    domain, _, rest = bus_id.lower().partition(":")
    return f"{domain[-4:]}:{rest}"


def _placed(seen: Observation, places: Mapping[str, str]) -> Observation:
    scope = Scope.parse(seen.scope)
    return replace(seen, scope=scope.on(places[scope.device])) if scope.device in places else seen


class Named(Mapping[str, list[Observation]]):
    """A host's observations by name, in the order in which they were made, and the versions that its ranks told.

    Those of a name are made when somebody asks for them: of most that a fleet's hosts show, nobody does. A name that the host
    does not show has none.
    """

    def __init__(self, left: Evidence) -> None:
        self._places = left.places()
        self.metrics: dict[str, list[tuple[Snapshot, Metric]]] = {}
        """Name -> the snapshots that have it."""
        for snapshot in left.snapshots():
            for metric in snapshot.metrics:
                self.metrics.setdefault(metric.name, []).append((snapshot, metric))
        self._others: dict[str, list[Observation]] = {}
        for seen in left.benchmarks():
            self._others.setdefault(seen.name, []).append(seen)
        self._versions = left.versions()
        for seen in self._versions:
            self._others.setdefault(seen.name, []).append(seen)
        self._made: dict[str, list[Observation]] = {}

    def __getitem__(self, name: str) -> list[Observation]:
        found = self._made.get(name)
        if found is None:
            found = self._made[name] = self._make(name)
        return found

    def _make(self, name: str) -> list[Observation]:
        taken = [seen for snapshot, metric in self.metrics.get(name, ()) for seen in snapshot.observations_of(metric)]
        others = self._others.get(name, ())
        return [_placed(seen, self._places) for seen in (*taken, *others)]

    def __contains__(self, name: object) -> bool:
        return name in self.metrics or name in self._others

    def __iter__(self) -> Iterator[str]:
        return iter(dict.fromkeys((*self.metrics, *self._others)))

    def __len__(self) -> int:
        return len(self.metrics.keys() | self._others.keys())

    def measured_at(self, scope: str) -> bool:
        """Whether anything was measured there: what the host says of itself as a whole aside, as is what its ranks ran on."""
        if any(scope in metric.values for told in self.metrics.values() for _, metric in told):
            return True
        return any(seen.scope == scope and seen.status == MEASURED for name in self for seen in self[name])

    def stages(self) -> set[str]:
        """The stages of which anything was seen."""
        found = {
            taken.stage for told in self.metrics.values() for taken, metric in told if metric.values or metric.absent
        }
        versions = set(map(id, self._versions))
        return found | {seen.stage for items in self._others.values() for seen in items if id(seen) not in versions}


class Index:
    """Observations by what an expectation asks for, so that looking one up does not read them all."""

    def __init__(self, observations: Iterable[Observation] | Named) -> None:
        self._named = observations if isinstance(observations, Named) else None
        self._found: dict[tuple[str, str, str], list[Observation]] = defaultdict(list)
        self._filed: set[str] = set()
        self._asked: dict[tuple[str, ...], dict[tuple[Value, ...], list[Observation]]] = {}
        """Of a place the observations by the values of the parameters that were asked for."""
        for seen in observations if not isinstance(observations, Named) else ():
            self._file(seen)

    def _file(self, seen: Observation) -> None:
        self._found[(seen.name, seen.stage, seen.scope)].append(seen)

    def find(self, item: Expectation, scope: str) -> Observation | None:
        """The observation that an expectation asks for in `scope`; the last one where a stage was run again."""
        if self._named is not None and item.name not in self._filed:
            self._filed.add(item.name)
            for seen in self._named[item.name]:
                self._file(seen)
        place = (item.name, item.stage, scope)
        asked = self._asked.get((*place, *item.params))
        if asked is None:
            asked = self._asked[(*place, *item.params)] = defaultdict(list)
            for seen in self._found.get(place, ()):
                if item.params.keys() <= seen.params.keys():
                    asked[tuple(seen.params[name] for name in item.params)].append(seen)
        return _last(asked.get(tuple(item.params.values()), ()))


class Planned:
    """Which parameters of an observation are settings of the plan, and which only say how it went."""

    def __init__(self, plan: Plan) -> None:
        self._keys: dict[tuple[str, str], set[str]] = {}
        for item in plan.expected:
            self._keys.setdefault((item.stage, item.name), set()).update(item.params)

    def params(self, seen: Observation | Verdict) -> dict[str, Value]:
        """The settings that two figures must share to be the same figure."""
        keys = self._keys.get((seen.stage, seen.name))
        return {key: value for key, value in sorted(seen.params.items()) if keys is None or key in keys or key in APART}


class HostView:
    """The facts of one host that every step of the judgement asks for."""

    def __init__(self, plan: Plan, host: PlannedHost, evidence: Evidence, packs: Sequence[Pack]) -> None:
        self.plan = plan
        self.host = host
        self.evidence = evidence
        self.observations = Named(evidence)
        self.index = Index(self.observations)
        snapshots = evidence.snapshots()
        taken = [(snapshot.stage, snapshot.phase) for snapshot in snapshots]
        self.first_snapshot, self.last_snapshot = (taken[0], taken[-1]) if taken else (("", ""), ("", ""))
        self.serials = {f"gpu={gpu.index}": gpu.serial for gpu in evidence.gpus()}
        self.names = {f"gpu={gpu.index}": gpu.name for gpu in evidence.gpus()}
        self.packs, self.no_pack = packs_for(plan, host, evidence.gpus(), packs)
        shipped = {pack.name for pack in packs if not pack.chosen}
        self.operators = {pack.name for pack in packs if pack.chosen} - shipped
        """Packs that the operator wrote: a criterion of theirs that speaks of nothing is a mistake, and no pass."""
        self.expected = plan.expected_of(host)
        self.accepted = Accepted(evidence.baseline, evidence.gpus())

    @property
    def has_record(self) -> bool:
        """The host's own record is there, not only its part in a gang."""
        return any(not record.gang for record in self.evidence.records)

    def serial(self, scope: str) -> str:
        """Serial of the GPU that a scope begins with, or empty."""
        return self.serials.get(Scope.parse(scope).device, "")

    def beyond(self, scope: str) -> bool:
        """Whether a GPU's number is beyond those that the driver has, which it numbers from 0: another one may be missing.

        Of one that is lost, or hangs, the driver tells at least that.
        """
        gpu, named = Scope.parse(scope).device, self.serials.keys()
        from_0 = bool(named) and named == {f"gpu={index}" for index in range(len(named))}
        told = (metric for metrics in self.observations.metrics.values() for _, metric in metrics)
        return (
            from_0
            and Scope.parse(gpu).device_kind == "gpu"
            and gpu not in named
            and not any(gpu in metric.values or gpu in metric.absent for metric in told)
        )

    @cached_property
    def renumbered(self) -> bool:
        """Whether its records call different GPUs by one number: one went away, and the driver numbered the rest anew."""
        first: dict[int, str] = {}
        gpus = [gpu for record in self.evidence.records for gpu in record.gpus if gpu.serial]
        return any(first.setdefault(gpu.index, gpu.serial) != gpu.serial for gpu in gpus)

    def members(self, stage: str) -> tuple[str, ...]:
        """Who took part in the last launch of a stage on this host; nobody where there was none."""
        launches = [launch for launch in self.evidence.launches() if launch.stage == stage]
        return launches[-1].members if launches else ()

    @cached_property
    def fabric(self) -> float:
        """B/s of a host's ports by the inventory: of the slowest with which this one was launched."""
        return self.plan.slowest_fabric(self.host, self.members(GANG))

    def unseen(self) -> list[str]:
        """Scopes of planned GPUs of which nothing at all was measured."""
        return self._unseen

    @cached_property
    def _unseen(self) -> list[str]:
        gpus = self.host.scopes if self.host.device == "gpu" else ()
        return [scope for scope in gpus if not self.measured_at(scope)]

    def measured_at(self, scope: str) -> bool:
        """Whether anything was measured in that scope."""
        return self.observations.measured_at(scope)

    @cached_property
    def stages_seen(self) -> set[str]:
        """Stages of which anything was seen."""
        return self.observations.stages()

    def lacks(self, item: Expectation) -> bool:
        """Whether the pack of the part says that it has no such thing as this observation asks for."""
        return any(
            item.params.get(param) in values
            for pack in self.packs
            for param, values in pack.lacks.get(item.name, {}).items()
        )

    def must_speak(self, criterion: Criterion) -> bool:
        """Whether a criterion that finds nothing to speak of is a mistake: the operator's own, on what every part has."""
        own = criterion.origin in self.operators and not criterion.optional and not self.plan.rehearsal
        return own and (criterion.baseline is None or self.plan.baseline is not None)

    def criteria(self) -> dict[str, Criterion]:
        """The criteria that judge this host by their ids; a pack that the operator named comes last and wins."""
        return criteria_of(self.packs)

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
        """Return an inconclusive verdict."""
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


def _last(observations: Sequence[Observation]) -> Observation | None:
    """The last of those that an expectation asks for.

    Where it was made of local and of remote memory, one that is there does not make up for one that failed.
    """
    if len(observations) < 2:
        return observations[0] if observations else None
    latest: dict[Value, Observation] = {}
    for seen in observations:
        kind = seen.params.get("numa")
        for other in [other for other in latest if kind is None or other is None]:
            del latest[other]
        latest[kind] = seen
    lost = [seen for seen in latest.values() if seen.status != MEASURED]
    return next(iter(lost or reversed(list(latest.values()))), None)


def from_benchmark(name: str) -> bool:
    """A benchmark makes it, so the plan says where it must be; else a collector does, and the criterion says so."""
    return name.split(".")[0] in _PREFIXES
