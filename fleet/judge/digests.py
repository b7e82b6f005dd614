"""Silent corruption: the same seeded computation on like GPUs and like software must give the same bits.

A part that computes wrongly and raises no error is found by nothing but its results: Dixit et al., "Silent Data Corruptions
at Scale", 2021 (Meta); Hochschild et al., "Cores that don't count", HotOS 2021 (Google: a few mercurial cores in several
thousand machines). Whether a GPU repeats itself is the observation `digest.mismatches`; here each is compared with the
others, within its host and across the fleet alike.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from fleet.judge.evidence import HostView, Planned
from schemas.records import MEASURED, Observation, Value
from schemas.reports import FAIL, INCONCLUSIVE, PASS, Verdict

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
class _Told:
    """A digest and the GPU that computed it."""

    view: HostView
    seen: Observation

    @property
    def digest(self) -> Value:
        return self.seen.value


def judge_digests(views: Iterable[HostView], planned: Planned) -> list[Verdict]:
    """A verdict on each GPU's digest of each workload, where at least one other GPU is comparable.

    GPUs are comparable when model, settings, stage, driver and the versions of torch, CUDA, cuDNN and NCCL are the same.
    """
    return [verdict for group in _groups(views, planned).values() if len(group) > 1 for verdict in _judged(group)]


def _groups(views: Iterable[HostView], planned: Planned) -> dict[Key, list[_Told]]:
    groups: dict[Key, list[_Told]] = defaultdict(list)
    for view in views:
        software = _software(view)
        latest = {}
        for seen in view.observations.get(NAME, ()):
            settings = tuple(planned.params(seen).items())
            latest[(seen.stage, seen.scope, settings)] = seen
        for (stage, scope, settings), seen in latest.items():
            model = view.names.get(scope)
            if model and seen.status == MEASURED:
                groups[(model, stage, *software, *_without_ranks(settings))].append(_Told(view=view, seen=seen))
    return groups


def _without_ranks(settings: Sequence[tuple[str, Value]]) -> list[tuple[str, Value]]:
    """The settings but for the number of ranks: each GPU computes by itself."""
    return [(key, value) for key, value in settings if key != "world_size"]


def _software(view: HostView) -> tuple[str, ...]:
    versions = view.evidence.software()
    driver = [str(seen.value) for seen in view.observations.get("driver.version", ()) if seen.status == MEASURED]
    return (*(versions.get(name, "") for name in _LIBRARIES), driver[-1] if driver else "")


def _judged(group: Sequence[_Told]) -> Iterator[Verdict]:
    digest, agreeing = Counter(told.digest for told in group).most_common(1)[0]
    if agreeing == len(group):
        for told in group:
            yield _verdict(told, PASS, f"found {digest}, as on all {len(group)} GPUs of its kind", limit=digest)
    elif agreeing * 2 > len(group) and len(group) >= LEAST:
        for told in group:
            yield _against(told, digest, agreeing, group)
    else:
        for told in group:
            kinds = len({other.digest for other in group})
            reason = (
                f"digests differ and no majority tells which is right: {kinds} digests on {len(group)} GPUs, "
                f"{told.digest} on this one"
            )
            yield _verdict(told, INCONCLUSIVE, reason)


def _against(told: _Told, digest: Value, agreeing: int, group: Sequence[_Told]) -> Verdict:
    """The verdict on one GPU where a majority is known."""
    majority = f"{agreeing} of {len(group)} GPUs of its model and software agree on {digest}"
    if told.digest == digest:
        return _verdict(told, PASS, f"found {told.digest}; {majority}", limit=digest, detail=majority)
    serial = told.view.serial(told.seen.scope) or "unknown"
    detail = f"{majority}, the GPU of serial {serial} does not; {_siblings(told, digest, group)}"
    return _verdict(told, FAIL, f"found {told.digest}: {detail}", limit=digest, detail=detail)


def _siblings(told: _Told, digest: Value, group: Sequence[_Told]) -> str:
    """Whether the host or the part is to be suspected: what the host's other GPUs computed."""
    others = [other for other in group if other.view is told.view and other is not told]
    differing = sum(other.digest != digest for other in others)
    if not others:
        return "its host has no other GPU to compare with"
    if not differing:
        return f"the {len(others)} other GPUs of its host agree with the majority"
    return f"{differing} of the {len(others)} other GPUs of its host differ from the majority too: suspect the host"


def _verdict(told: _Told, verdict: str, reason: str, limit: Value = None, detail: str = "") -> Verdict:
    return Verdict(
        host=told.view.host.name,
        scope=told.seen.scope,
        serial=told.view.serial(told.seen.scope),
        name=NAME,
        stage=told.seen.stage,
        params=told.seen.params,
        verdict=verdict,
        criterion=CRITERION,
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
