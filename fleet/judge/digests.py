"""Silent corruption: the same seeded computation on like GPUs and like software must give the same bits.

A part that computes wrongly and raises no error is found by nothing but its results: Dixit et al., "Silent Data Corruptions
at Scale", 2021 (Meta); Hochschild et al., "Cores that don't count", HotOS 2021 (Google: a few mercurial cores in several
thousand machines). Whether a GPU repeats itself is the observation `digest.mismatches`; here each is compared with the
others, within its host and across the fleet alike.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from fleet.judge.evidence import HostView, Planned
from schemas.records import MEASURED, Observation, Value
from schemas.reports import FAIL, INCONCLUSIVE, PASS, Verdict, VerdictKind

NAME = "digest.value"
CRITERION = "digest-majority"
SOURCE = (
    "equal computations on equal GPUs and software give equal bits; parts that silently do not: Dixit et al. 2021 "
    "(Silent Data Corruptions at Scale), Hochschild et al., HotOS 2021 (Cores that don't count)"
)
LEAST = 3
"""Of two that differ, either may be right."""
_LIBRARIES = ("torch", "cuda", "cudnn", "nccl")

Key = tuple[object, ...]


@dataclass(frozen=True, kw_only=True)
class Told:
    """A digest and the GPU that computed it."""

    view: HostView
    seen: Observation

    @property
    def digest(self) -> Value:
        return self.seen.value


class Digests:
    """How many GPUs that are comparable computed which digest; several, each of other hosts, can be put together."""

    def __init__(self, planned: Planned, views: Iterable[HostView] = ()) -> None:
        self._planned = planned
        self._counts: dict[Key, Counter[Value]] = {}
        for view in views:
            self.add(view)

    def add(self, view: HostView) -> None:
        """Counts the GPUs of a host."""
        self.count(told_digests(view, self._planned))

    def count(self, digests: Iterable[tuple[Key, Told]]) -> None:
        """Counts GPUs by what they told."""
        for key, told in digests:
            self._counts.setdefault(key, Counter())[told.digest] += 1

    def update(self, other: Digests) -> None:
        """Counts the GPUs that another has counted."""
        for key, counts in other._counts.items():
            self._counts.setdefault(key, Counter()).update(counts)

    def of(self, key: Key) -> Counter[Value]:
        """What the comparable GPUs computed."""
        return self._counts.get(key, Counter())


def judge_digests(views: Iterable[HostView], planned: Planned, known: Digests) -> list[Verdict]:
    """A verdict on each GPU's digest of each workload, where at least one other GPU is comparable.

    GPUs are comparable when model, settings, stage, driver and the versions of torch, CUDA, cuDNN and NCCL are the same.
    """
    found = []
    for view in views:
        own = told_digests(view, planned)
        for key, told in own:
            counts = known.of(key)
            if counts.total() > 1:
                siblings = [other for its_key, other in own if its_key == key and other is not told]
                found.append(_judged(told, counts, siblings))
    return found


def told_digests(view: HostView, planned: Planned) -> list[tuple[Key, Told]]:
    """The digests of a host, each with what it must share with those that it is compared with."""
    latest = {}
    for seen in view.observations.get(NAME, ()):
        latest[(seen.stage, seen.scope, tuple(planned.params(seen).items()))] = seen
    software = _software(view) if latest else ()
    return [
        ((model, stage, *software, *_without_ranks(settings)), Told(view=view, seen=seen))
        for (stage, scope, settings), seen in latest.items()
        if (model := view.names.get(scope)) and seen.status == MEASURED
    ]


def _without_ranks(settings: Sequence[tuple[str, Value]]) -> list[tuple[str, Value]]:
    """The settings but for the number of ranks: each GPU computes by itself."""
    return [(key, value) for key, value in settings if key != "world_size"]


def _software(view: HostView) -> tuple[str, ...]:
    versions = view.evidence.software()
    driver = [str(seen.value) for seen in view.observations.get("driver.version", ()) if seen.status == MEASURED]
    return (*(versions.get(name, "") for name in _LIBRARIES), driver[-1] if driver else "")


def _judged(told: Told, counts: Counter[Value], siblings: Sequence[Told]) -> Verdict:
    """The verdict on one GPU, from how many computed what, itself among them, and from the others of its host."""
    (digest, agreeing), total = counts.most_common(1)[0], counts.total()
    if agreeing == total:
        return digest_verdict(told, PASS, f"found {digest}, as on all {total} GPUs of its kind", limit=digest)
    if agreeing * 2 <= total or total < LEAST:
        reason = (
            f"digests differ and no majority tells which is right: {len(counts)} digests on {total} GPUs, "
            f"{told.digest} on this one"
        )
        return digest_verdict(told, INCONCLUSIVE, reason)
    majority = f"{agreeing} of {total} GPUs of its model and software agree on {digest}"
    if told.digest == digest:
        return digest_verdict(told, PASS, f"found {told.digest}; {majority}", limit=digest, detail=majority)
    serial = told.view.serial(told.seen.scope) or "unknown"
    detail = f"{majority}, the GPU of serial {serial} does not; {_siblings(digest, siblings)}"
    return digest_verdict(told, FAIL, f"found {told.digest}: {detail}", limit=digest, detail=detail)


def agrees(digest: Value, counts: Counter[Value]) -> bool:
    """Whether it is what all the comparable GPUs computed, or so many of them that they must be right."""
    (usual, agreeing), total = counts.most_common(1)[0], counts.total()
    return digest == usual and (agreeing == total or (agreeing * 2 > total and total >= LEAST))


def _siblings(digest: Value, others: Sequence[Told]) -> str:
    """Whether the host or the part is to be suspected: what the host's other GPUs computed."""
    differing = sum(other.digest != digest for other in others)
    if not others:
        return "its host has no other GPU to compare with"
    if not differing:
        return f"the {len(others)} other GPUs of its host agree with the majority"
    return f"{differing} of the {len(others)} other GPUs of its host differ from the majority too: suspect the host"


def digest_verdict(told: Told, verdict: str, reason: str, limit: Value = None, detail: str = "") -> Verdict:
    return Verdict(
        host=told.view.host.name,
        scope=told.seen.scope,
        serial=told.view.serial(told.seen.scope),
        name=NAME,
        stage=told.seen.stage,
        params=told.seen.params,
        verdict=verdict,
        criterion=CRITERION,
        kind=VerdictKind.PEERS,
        value=told.digest,
        limit=limit,
        operator="eq" if limit is not None else "",
        unit="1",
        reason=reason,
        detail=detail,
        action="rma" if verdict == FAIL else "none",
        source=SOURCE,
        basis="published",
    )
