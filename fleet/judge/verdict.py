"""judge(plan, evidence, packs) -> verdicts. A pure function: the same input, the same verdicts, today or in a year.

What the plan expects and nobody saw is inconclusive. What was seen is held against every criterion that speaks of it.
"""

from __future__ import annotations

import itertools
import operator
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from fleet.judge.criteria import Criterion, Pack
from schemas.catalogue import BENCHMARKS, Expectation
from schemas.plans import Plan, PlannedHost
from schemas.records import ERROR, MEASURED, UNSUPPORTED, Gpu, Launch, Observation, Record, Value
from schemas.reports import FAIL, INCONCLUSIVE, PASS, Verdict

_HOLDS: Mapping[str, Callable[[float, float], bool]] = {
    "eq": operator.eq,
    "ge": operator.ge,
    "le": operator.le,
    "gt": operator.gt,
    "lt": operator.lt,
}
_SIGN = {"eq": "=", "ge": "≥", "le": "≤", "gt": ">", "lt": "<"}
_BENCHMARK_PREFIXES = tuple(
    {output.name.split("{")[0].split(".")[0] for entry in BENCHMARKS.values() for output in entry.outputs}
)


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """What one host of the plan left behind."""

    records: tuple[Record, ...] = ()
    """Its host record and its gang record, as far as they can be believed."""
    problem: str = ""
    """Why there is no host record, or what the control node saw go wrong."""

    def observations(self) -> list[Observation]:
        """All of them, in the order in which they were made."""
        return [seen for record in self.records for seen in record.everything()]

    def gpus(self) -> tuple[Gpu, ...]:
        """The GPUs that the host named, by index."""
        found = {gpu.index: gpu for record in self.records for gpu in record.gpus}
        return tuple(found[index] for index in sorted(found))

    def launches(self) -> tuple[Launch, ...]:
        """Every launch, whatever its outcome."""
        return tuple(launch for record in self.records for launch in record.launches)


def judge(plan: Plan, evidence: Mapping[str, Evidence], packs: Sequence[Pack]) -> list[Verdict]:
    """Every verdict on every host of the plan, in plan order.

    Args:
        plan: what must exist. A host of the plan that `evidence` lacks is inconclusive.
        evidence: host -> what it left behind.
        packs: every pack that may apply; which ones do is read from the plan and the GPUs' names.
    """
    verdicts = [
        verdict
        for host in plan.hosts
        for verdict in _HostJudge(plan, host, evidence.get(host.name, Evidence()), packs).verdicts()
    ]
    left = {host.name: evidence.get(host.name, Evidence()) for host in plan.hosts}
    return verdicts + _duplicates(left) + _divided(plan, left)


def packs_for(plan: Plan, host: PlannedHost, gpus: Sequence[Gpu], packs: Sequence[Pack]) -> tuple[list[Pack], str]:
    """The packs that judge `host`, and why none of them is for its GPU model (empty where one is)."""
    named = [pack for pack in packs if pack.chosen]
    packs = [pack for pack in packs if not pack.chosen]
    if plan.rehearsal:
        return [*(pack for pack in packs if pack.name == "rehearsal"), *named], ""
    found = sorted({gpu.name for gpu in gpus})
    if host.gpu_model:
        model = [pack for pack in packs if pack.name == host.gpu_model]
    else:
        model = [pack for pack in packs if found and set(found) <= set(pack.gpu_names)]
    common = [pack for pack in packs if pack.name == "common"]
    if len(model) == 1:
        return [*model, *named], ""
    what = host.gpu_model or ", ".join(found) or "a GPU that nobody saw"
    return [*common, *named], f"no criteria pack for {what}"


class _HostJudge:
    """The judgement of one host: the same facts are asked for by every step."""

    def __init__(self, plan: Plan, host: PlannedHost, evidence: Evidence, packs: Sequence[Pack]) -> None:
        self.plan = plan
        self.host = host
        self.evidence = evidence
        self.observations: dict[str, list[Observation]] = defaultdict(list)
        for seen in evidence.observations():
            self.observations[seen.name].append(seen)
        taken = [snapshot for record in evidence.records for snapshot in record.snapshots]
        self.last_snapshot = (taken[-1].stage, taken[-1].phase) if taken else ("", "")
        self.serials = {f"gpu={gpu.index}": gpu.serial for gpu in evidence.gpus()}
        self.packs, self.no_pack = packs_for(plan, host, evidence.gpus(), packs)
        self.expected = plan.expected_of(host)

    def verdicts(self) -> Iterator[Verdict]:
        if not any(not record.gang for record in self.evidence.records):
            yield self._inconclusive("record", "host", self.evidence.problem or "the host left no record")
            return
        if self.evidence.problem:
            yield self._inconclusive("host.events", "host", self.evidence.problem)
        yield from self._model()
        yield from self._constancy()
        yield from self._collectors()
        yield from self._planned()
        unseen = set()
        for scope in self.host.scopes:
            if self.host.device == "gpu" and not self._seen(scope):
                unseen.add(scope)
                yield self._inconclusive("gpu", scope, "nothing was observed of this GPU")
        for criterion in {item.id: item for pack in self.packs for item in pack.criteria}.values():
            yield from self._criterion(criterion, unseen)

    def _seen(self, scope: str) -> bool:
        return any(
            seen.scope == scope and seen.status == MEASURED for items in self.observations.values() for seen in items
        )

    def _model(self) -> Iterator[Verdict]:
        if self.no_pack:
            yield self._inconclusive(
                "gpu.name", "host", f"{self.no_pack}: name one by rackproof_gpu_model, or write one (CONTRIBUTING.md)"
            )
        expected = next((pack for pack in self.packs if pack.name == self.host.gpu_model), None)
        names = {f"gpu={gpu.index}": gpu.name for gpu in self.evidence.gpus()}
        for scope in self.host.scopes if self.host.device == "gpu" else ():
            if scope not in names and self._seen(scope):
                yield self._inconclusive("gpu.name", scope, "the GPU does not tell its name")
            elif scope in names and expected:
                right = names[scope] in expected.gpu_names
                reason = f"found {names[scope]}, the inventory says {self.host.gpu_model}"
                yield self._fact(
                    "gpu.name", scope, "gpu-model", names[scope], reason, right, "inventory: rackproof_gpu_model"
                )

    def _constancy(self) -> Iterator[Verdict]:
        """A part that was swapped, or a host that rebooted, in mid-run leaves figures that are not one part's."""
        for name in ("gpu.serial", "gpu.uuid"):
            for scope in self.host.scopes:
                seen = [item for item in self.observations[name] if item.scope == scope and item.status == MEASURED]
                values = list(dict.fromkeys(item.value for item in seen))
                if len(values) > 1:
                    reason = f"changed during the run: {', then '.join(map(str, values))}"
                    yield self._fact(
                        name, scope, "identity-constant", values[-1], reason, False, "a serial names one part"
                    )
        uptimes = [_number(item.value) for item in self.observations["host.uptime"] if item.status == MEASURED]
        if any(later < earlier for earlier, later in itertools.pairwise(uptimes)):
            yield self._inconclusive("host.uptime", "host", "the host rebooted during the run: its counters began anew")

    def _fact(
        self, name: str, scope: str, criterion: str, value: Value, reason: str, right: bool, source: str
    ) -> Verdict:
        return Verdict(
            host=self.host.name,
            scope=scope,
            serial=self.serials.get(scope, ""),
            name=name,
            verdict=PASS if right else FAIL,
            criterion=criterion,
            value=value,
            unit="1",
            reason=reason,
            action="none" if right else "inspect_hardware",
            source=source,
            basis="policy",
        )

    def _collectors(self) -> Iterator[Verdict]:
        """A collector that failed in any snapshot took with it what would have been seen then."""
        for name, items in self.observations.items():
            for item in items if name.startswith("collector.") else ():
                if item.status != MEASURED:
                    when = f"{item.params['phase']} {item.stage}"
                    yield self._inconclusive(name, item.scope, f"{item.status} {when}: {item.reason}", item.stage)

    def _planned(self) -> Iterator[Verdict]:
        """Inconclusive for every observation that the plan expects and that was not measured."""
        for stage in self.plan.stages:
            wanted = [item for item in self.expected if item.stage == stage.name]
            why = self._stage_problem(stage.name)
            missing = []
            for item in wanted:
                for scope in self.plan.scopes_of(self.host, item):
                    found = find(self.observations[item.name], item, scope)
                    if found is None:
                        missing.append(
                            self._inconclusive(item.name, scope, f"not observed; {why}", stage.name, item.params)
                        )
                    elif found.status != MEASURED:
                        yield self._inconclusive(
                            item.name, scope, f"{found.status}: {found.reason}", stage.name, item.params
                        )
            seen_any = any(item.stage == stage.name for items in self.observations.values() for item in items)
            if missing and not seen_any:
                yield self._inconclusive(f"stage.{stage.name}", "host", f"nothing was observed; {why}", stage.name)
                continue
            yield from missing
            last = [launch for launch in self.evidence.launches() if launch.stage == stage.name][-1:]
            if wanted and last and last[0].outcome != "finished":
                yield self._inconclusive(
                    f"stage.{stage.name}", "host", f"{last[0].outcome}: {last[0].reason}", stage.name
                )

    def _stage_problem(self, stage: str) -> str:
        launches = [launch for launch in self.evidence.launches() if launch.stage == stage]
        if not launches:
            return "the stage did not start on this host"
        reasons = [launch.reason for launch in launches if launch.outcome != "finished"]
        return reasons[-1] if reasons else "the launch finished without it"

    def _criterion(self, criterion: Criterion, unseen: set[str]) -> Iterator[Verdict]:
        if criterion.variable == "fabric_bytes_per_second" and not self.host.fabric_gbps:
            return  # the inventory does not say what to expect; the report lists what went unjudged
        from_benchmark = criterion.name.startswith(tuple(f"{prefix}." for prefix in _BENCHMARK_PREFIXES))
        candidates = [seen for seen in self.observations[criterion.name] if _concerns(criterion, seen)]
        groups: dict[tuple[str, ...], list[Observation]] = defaultdict(list)
        for seen in candidates:
            params = sorted(f"{key}={value}" for key, value in seen.params.items() if key != "phase")
            groups[(seen.scope, *params, seen.stage if from_benchmark else "")].append(seen)
        for group in groups.values():
            measured = [seen for seen in group if seen.status == MEASURED]
            lost = [seen for seen in group if seen.status == ERROR]
            held = self._held(criterion, measured) if measured else None
            if held and lost and held.verdict == PASS and not from_benchmark and not criterion.best_of_run:
                reason = f"{lost[-1].status} {lost[-1].params.get('phase', '')} {lost[-1].stage}: {lost[-1].reason}"
                yield self._inconclusive(criterion.name, lost[-1].scope, reason, lost[-1].stage, criterion=criterion)
            elif held:
                yield held
            elif not from_benchmark and not (criterion.optional and group[-1].status == UNSUPPORTED):
                last = group[-1]
                reason = f"{last.status}: {last.reason}"
                yield self._inconclusive(criterion.name, last.scope, reason, last.stage, criterion=criterion)
        if not from_benchmark:
            yield from self._unobserved(criterion, {seen.scope for seen in candidates} | unseen)

    def _unobserved(self, criterion: Criterion, seen: set[str]) -> Iterator[Verdict]:
        """A criterion on what every host or GPU must show, where nothing was read at all."""
        if criterion.scope in ("host", "") and not seen:
            yield self._inconclusive(criterion.name, "host", "not observed", criterion=criterion)
        if criterion.scope in ("gpu", "reason", "link") and self.host.device == "gpu":
            below = {scope.split(",")[0] for scope in seen}
            for scope in self.host.scopes:
                if scope not in below:
                    yield self._inconclusive(criterion.name, scope, "not observed", criterion=criterion)

    def _held(self, criterion: Criterion, seen: list[Observation]) -> Verdict:
        """The verdict on one series of observations: the worst of them, the best, or the change over the run."""
        chosen = seen[-1]
        limit = self._limit(criterion)
        value: Value
        if criterion.delta:
            if len(seen) < 2 or (seen[-1].stage, seen[-1].params.get("phase")) != self.last_snapshot:
                reason = "not read both before and after the run: no change can be told"
                return self._inconclusive(criterion.name, chosen.scope, reason, chosen.stage, criterion=criterion)
            steps = [
                (_number(later.value) - _number(earlier.value), later) for earlier, later in itertools.pairwise(seen)
            ]
            value = _number(seen[-1].value) - _number(seen[0].value)
            chosen = max(steps, key=lambda step: step[0])[1]
        else:
            failing = [item for item in seen if not _holds(criterion.operator, item.value, limit)]
            holding = [item for item in seen if item not in failing]
            chosen = (holding or failing)[0] if criterion.best_of_run else (failing or holding)[-1]
            value = chosen.value
        passed = _holds(criterion.operator, value, limit)
        return Verdict(
            host=self.host.name,
            scope=chosen.scope,
            serial=self.serials.get(chosen.scope.split(",")[0], ""),
            name=criterion.name,
            stage=chosen.stage,
            params=chosen.params,
            verdict=PASS if passed else FAIL,
            criterion=criterion.id,
            value=value,
            limit=limit,
            operator=criterion.operator,
            unit=criterion.unit,
            reason=sentence(criterion, value, limit),
            action="none" if passed else criterion.action,
            source=criterion.source,
            basis=criterion.basis,
        )

    def _limit(self, criterion: Criterion) -> Value:
        if criterion.expected is not None:
            return criterion.expected * criterion.fraction
        if criterion.variable == "gpu_count":
            return len(self.host.devices)
        if criterion.variable == "fabric_bytes_per_second":
            return self.host.fabric_gbps * 1e9 / 8 * len(self.host.devices) * criterion.fraction
        return criterion.value

    def _inconclusive(
        self,
        name: str,
        scope: str,
        reason: str,
        stage: str = "",
        params: Mapping[str, Value] | None = None,
        criterion: Criterion | None = None,
    ) -> Verdict:
        return Verdict(
            host=self.host.name,
            scope=scope,
            serial=self.serials.get(scope.split(",")[0], ""),
            name=name,
            stage=stage,
            params=params or {},
            verdict=INCONCLUSIVE,
            criterion=criterion.id if criterion else "plan",
            reason=reason,
            action="none",
            source=criterion.source if criterion else "plan",
        )


def find(observations: Iterable[Observation], item: Expectation, scope: str) -> Observation | None:
    """The observation that an expectation asks for in `scope`; the last one where a stage was run again."""
    found = None
    for seen in observations:
        if seen.stage == item.stage and seen.scope == scope and item.params.items() <= seen.params.items():
            found = seen
    return found


def sentence(criterion: Criterion, value: Value, limit: Value) -> str:
    """`found 5, wanted = 8`, numbers rounded to four digits and with their unit."""
    unit = "" if criterion.unit == "1" else f" {criterion.unit}"
    change = "changed by" if criterion.delta else "found"
    return f"{change} {_short(value)}{unit}, wanted {_SIGN[criterion.operator]} {_short(limit)}{unit}"


def _short(value: Value) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _concerns(criterion: Criterion, seen: Observation) -> bool:
    kind = seen.scope.rsplit(",", 1)[-1].split("=")[0]
    if criterion.scope and criterion.scope != kind:
        return False
    if criterion.stage and criterion.stage != seen.stage:
        return False
    labels = dict(part.split("=", 1) for part in seen.scope.split(",") if "=" in part)
    return all(seen.params.get(key, labels.get(key)) == value for key, value in criterion.where.items())


def _number(value: Value) -> float:
    return float(value) if isinstance(value, int | float) else float("nan")


def _holds(how: str, value: Value, limit: Value) -> bool:
    """Whether the comparison holds; a value of another kind than its limit never does."""
    if isinstance(value, int | float) and isinstance(limit, int | float):
        return isinstance(value, bool) == isinstance(limit, bool) and _HOLDS[how](value, limit)
    return how == "eq" and value is not None and type(value) is type(limit) and value == limit


def _duplicates(evidence: Mapping[str, Evidence]) -> list[Verdict]:
    """The same serial or UUID seen twice: each place fails, and names the other."""
    places: dict[tuple[str, str], list[tuple[str, Gpu]]] = defaultdict(list)
    for host, left in evidence.items():
        for gpu in left.gpus():
            for kind, identity in (("gpu.serial", gpu.serial), ("gpu.uuid", gpu.uuid)):
                if identity:
                    places[(kind, identity)].append((host, gpu))
    return [
        _duplicate(host, gpu, kind, identity, [place for place in found if place != (host, gpu)])
        for (kind, identity), found in places.items()
        if len(found) > 1
        for host, gpu in found
    ]


def _divided(plan: Plan, evidence: Mapping[str, Evidence]) -> list[Verdict]:
    """Hosts of one gang that were each measured, but not with each other. A host that was not at all is told elsewhere."""
    members = {
        host: launch.members
        for host, left in evidence.items()
        for launch in left.launches()
        if launch.stage == "gang" and launch.outcome == "finished"
    }
    found = []
    for gang, planned in plan.gangs().items():
        for host in planned:
            apart = [other for other in planned if other in members and host in members and other not in members[host]]
            if apart:
                found.append(
                    Verdict(
                        host=host,
                        scope=f"gang={gang}",
                        name="stage.gang",
                        stage="gang",
                        verdict=INCONCLUSIVE,
                        criterion="plan",
                        reason=f"launched with {', '.join(members[host])}, and not with {', '.join(apart)}",
                        source="plan",
                    )
                )
    return found


def _duplicate(host: str, gpu: Gpu, kind: str, identity: str, others: list[tuple[str, Gpu]]) -> Verdict:
    return Verdict(
        host=host,
        scope=f"gpu={gpu.index}",
        serial=gpu.serial,
        name=kind,
        verdict=FAIL,
        criterion="identity-unique",
        value=identity,
        reason=f"{identity} is also {' and '.join(f'{other} gpu={its.index}' for other, its in others)}",
        action="inspect_hardware",
        source="a serial or UUID names one part",
        basis="policy",
    )
