"""Detect silent data corruption: the same seeded computation on the same GPU model and software must give the same bits.

A digest is one number, computed from all bits of the result of a computation (`agent/benchmarks/compute/digest.py`).

Only a comparison of results finds a part that computes wrongly without reporting an error. See Dixit et al., "Silent Data
Corruptions at Scale", 2021 (Meta); Hochschild et al., "Cores that don't count", HotOS 2021 (Google: a few such cores in several
thousand machines). The observation `digest.mismatches` counts results that differ from the first result of the same GPU, or from
the right result if it is known. This module compares the first results of different GPUs of a host and of the fleet.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from fleet.judge.evidence import Planned
from fleet.judge.host_view import HostView
from schemas.records import MEASURED, Observation, Value
from schemas.reports import FAIL, INCONCLUSIVE, PASS, Verdict, VerdictKind

NAME = "digest.value"
CRITERION = "digest-majority"
SOURCE = (
    "equal computations on equal GPUs and software give equal bits; for parts with silent wrong results, see Dixit et al. 2021 "
    "(Silent Data Corruptions at Scale), Hochschild et al., HotOS 2021 (Cores that don't count)"
)
MIN_GPUS_FOR_MAJORITY = 3
"""A majority needs three GPUs: if two differ, either may be right."""
_ACTIONS: Mapping[Value, str] = {"copy": "inspect_hardware"}
"""Workload -> action on its wrong results, if they may have another cause than the GPU. The workload `copy` also uses the PCIe
link and host memory. For other workloads the action is `rma`."""
_LIBRARIES = ("torch", "cuda", "cublas", "cudnn", "nccl")
"""Libraries whose versions determine the kernels that run. A record that lacks the version of a library is compared only with
records that lack it too."""

DigestKey = tuple[object, ...]
"""GPU model, stage, software versions and settings. Two digests are compared only if their keys are equal."""


@dataclass(frozen=True, kw_only=True)
class GpuDigest:
    """A digest and the GPU that computed it."""

    view: HostView
    observation: Observation

    @property
    def digest(self) -> Value:
        return self.observation.value


class DigestCounts:
    """For each `DigestKey`, how many GPUs computed each digest. Counts of different hosts can be merged in any order."""

    def __init__(self, planned: Planned, views: Iterable[HostView] = ()) -> None:
        self._planned = planned
        self._counts: dict[DigestKey, Counter[Value]] = {}
        for view in views:
            self.add(view)

    def add(self, view: HostView) -> None:
        """Count the digests of the GPUs of a host."""
        for key, gpu in gpu_digests(view, self._planned):
            self._counts.setdefault(key, Counter())[gpu.digest] += 1

    def update(self, other: DigestCounts) -> None:
        """Add the counts of other hosts."""
        for key, counts in other._counts.items():
            self._counts.setdefault(key, Counter()).update(counts)

    def counts(self, key: DigestKey) -> Counter[Value]:
        """Return digest -> number of GPUs that computed it, among the GPUs with this key."""
        return self._counts.get(key, Counter())


def judge_digests(views: Iterable[HostView], planned: Planned, counts: DigestCounts) -> list[Verdict]:
    """Return a verdict on each GPU's digest of each workload, if the digest of at least one other GPU is comparable.

    Digests are comparable if GPU model, settings, stage, driver and the versions of torch, CUDA, cuBLAS, cuDNN, NCCL and
    Rackproof are the same. With other versions, other kernels may run, which add in another order: different digests would then
    be no sign of corruption.
    """
    verdicts = []
    for view in views:
        digests = gpu_digests(view, planned)
        for key, gpu in digests:
            comparable = counts.counts(key)
            if comparable.total() > 1:
                siblings = [other for its_key, other in digests if its_key == key and other is not gpu]
                verdicts.append(_judge(gpu, comparable, siblings))
    return verdicts


def uncompared_digests(view: HostView, planned: Planned, counts: DigestCounts) -> list[tuple[str, str]]:
    """Return each pair (stage, scope) that has digests, but none that is comparable with the digest of another GPU."""
    compared = {
        (gpu.observation.stage, gpu.observation.scope)
        for key, gpu in gpu_digests(view, planned)
        if counts.counts(key).total() > 1
    }
    measured = [(item.stage, item.scope) for item in view.observations[NAME] if item.status == MEASURED]
    return [figure for figure in dict.fromkeys(measured) if figure not in compared]


def gpu_digests(view: HostView, planned: Planned) -> list[tuple[DigestKey, GpuDigest]]:
    """Return the digests of a host's GPUs, each with its key. Of repeated digests only the last one counts."""
    latest = {}
    for observation in view.observations.get(NAME, ()):
        settings = tuple(planned.params(observation).items())
        latest[(observation.stage, observation.scope, settings)] = observation
    software = _software(view) if latest else ()
    return [
        ((model, stage, *software, *_without_ranks(settings)), GpuDigest(view=view, observation=observation))
        for (stage, scope, settings), observation in latest.items()
        if (model := view.names.get(scope)) and observation.status == MEASURED
    ]


def _without_ranks(settings: Sequence[tuple[str, Value]]) -> list[tuple[str, Value]]:
    """Return the settings without the number of ranks, which does not change a digest, because each GPU computes it alone."""
    return [(key, value) for key, value in settings if key != "world_size"]


def _software(view: HostView) -> tuple[str, ...]:
    versions = view.evidence.software()
    driver = [str(item.value) for item in view.observations.get("driver.version", ()) if item.status == MEASURED]
    agents = [record.rackproof for record in view.evidence.records]
    if len({*agents}) > 1 or NAME not in view.observations.benchmark_names():
        agents = [
            record.rackproof
            for record in view.evidence.records
            if any(item.name == NAME for item in record.observations)
        ]
    return (*(versions.get(name, "") for name in _LIBRARIES), driver[-1] if driver else "", *agents[-1:])


def _judge(gpu: GpuDigest, counts: Counter[Value], siblings: Sequence[GpuDigest]) -> Verdict:
    """Return the verdict on the digest of one GPU.

    Args:
        gpu: the digest and its GPU.
        counts: digest -> number of comparable GPUs that computed it, including this GPU.
        siblings: the comparable digests of the other GPUs of its host.
    """
    (digest, agreeing), total = counts.most_common(1)[0], counts.total()
    if agreeing == total:
        return digest_verdict(gpu, PASS, f"found {digest}, as on all {total} comparable GPUs", limit=digest)
    if agreeing * 2 <= total or total < MIN_GPUS_FOR_MAJORITY:
        reason = (
            f"digests differ and no majority shows which is right: {len(counts)} digests on {total} GPUs, "
            f"{gpu.digest} on this GPU"
        )
        return digest_verdict(gpu, INCONCLUSIVE, reason)
    majority = f"{agreeing} of {total} GPUs of its model and software agree on {digest}"
    if gpu.digest == digest:
        return digest_verdict(gpu, PASS, f"found {gpu.digest}; {majority}", limit=digest, detail=majority)
    serial = gpu.view.serial(gpu.observation.scope) or "unknown"
    detail = f"{majority}, the GPU with serial {serial} does not; {_describe_siblings(digest, siblings)}"
    return digest_verdict(gpu, FAIL, f"found {gpu.digest}: {detail}", limit=digest, detail=detail)


def _describe_siblings(digest: Value, siblings: Sequence[GpuDigest]) -> str:
    """Return in words how many other comparable GPUs of the host differ from the majority."""
    differing = sum(other.digest != digest for other in siblings)
    if not siblings:
        return "its host has no other comparable GPU"
    if len(siblings) == 1:
        does = "differs from the majority too: suspect the host" if differing else "agrees with the majority"
        return f"the only other comparable GPU of its host {does}"
    if not differing:
        return f"the {len(siblings)} other comparable GPUs of its host agree with the majority"
    verb = "differs" if differing == 1 else "differ"
    return f"{differing} of the {len(siblings)} other comparable GPUs of its host {verb} from the majority too: suspect the host"


def digest_verdict(gpu: GpuDigest, verdict: str, reason: str, limit: Value = None, detail: str = "") -> Verdict:
    return Verdict(
        host=gpu.view.host.name,
        scope=gpu.observation.scope,
        serial=gpu.view.serial(gpu.observation.scope),
        name=NAME,
        stage=gpu.observation.stage,
        params=gpu.observation.params,
        verdict=verdict,
        criterion=CRITERION,
        kind=VerdictKind.NO_MAJORITY if verdict == INCONCLUSIVE else VerdictKind.PEERS,
        value=gpu.digest,
        limit=limit,
        operator="eq" if limit is not None else "",
        unit="1",
        reason=reason,
        detail=detail,
        action=_ACTIONS.get(gpu.observation.params.get("workload"), "rma") if verdict == FAIL else "none",
        source=SOURCE,
        basis="published",
    )
