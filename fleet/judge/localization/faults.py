"""Verdicts `gang.fault` on the part that stopped a launch of a gang, by the heartbeats or else by the probes."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence

from fleet.judge.host_view import HostView
from fleet.judge.localization.bisection import Conclusion
from fleet.judge.localization.launches import EITHER, UNABLE, Attempt, conclusion, is_stuck
from fleet.judge.localization.matrix import FABRIC, HOST, LINK, Suspect
from schemas.reports import FAIL, INCONCLUSIVE, Verdict, VerdictKind
from schemas.stages import GANG

CRITERION = "localise"
STAGE = GANG
NAME = "gang.fault"
SOURCE = "ours: who stops a launch is no host to train on (docs/localisation.md)"


def last_of(launched: Sequence[Attempt]) -> Iterator[tuple[Attempt, frozenset[str]]]:
    """Each launch, without the probes, with the hosts whose last one it was."""
    later: set[str] = set()
    for attempt in reversed([attempt for attempt in launched if attempt.stage == GANG]):
        if last := frozenset(attempt.told) - later:
            yield attempt, last
        later |= attempt.told.keys()


def judge_faults(launched: Sequence[Attempt], views: Mapping[str, HostView]) -> Iterator[Verdict]:
    """The verdicts on those who stopped a launch and did not work in a later one.

    Args:
        launched: every launch and probe of one gang.
        views: its hosts whose records are believed.
    """
    settled: set[str] = set()
    for attempt in reversed([attempt for attempt in launched if attempt.stage == GANG or attempt.unable]):
        if attempt.worked:
            settled |= set(attempt.members)
        result = [*_named(attempt, views, settled), *_probed(launched, attempt, views, settled)]
        yield from result
        settled |= {verdict.host for verdict in result}


def _named(attempt: Attempt, views: Mapping[str, HostView], settled: Collection[str]) -> Iterator[Verdict]:
    """Whom the heartbeats named; of those who did not start the stage itself is inconclusive, and says why.

    That a rank has no device that works is no proof of a fault of the device: what its driver and its kernel say is.
    """
    for host, why in attempt.culprits().items():
        culprit = attempt.unable.get(host) or (attempt.culprit if host not in attempt.not_started else None)
        if culprit and host in views and host not in settled:
            unknown = views[host].is_beyond_driver(culprit.scope) or (culprit.kind == UNABLE and views[host].renumbered)
            scope = "host" if unknown else culprit.scope or "host"
            yield _verdict(views[host], scope, why, fails=attempt.is_certain(host))


def _probed(
    launched: Sequence[Attempt], attempt: Attempt, views: Mapping[str, HostView], settled: Collection[str]
) -> Iterator[Verdict]:
    """Yield verdicts on the hosts that the probes found after a launch without a culprit.

    If two hosts fail only together, both get a verdict, although each works with the others.
    """
    result = conclusion(launched, attempt) if is_stuck(attempt) else None
    for suspect in result.suspects if isinstance(result, Conclusion) else ():
        between = suspect.kind == LINK and suspect.confidence > EITHER
        for host in suspect.hosts or attempt.members:
            if host in views and (between or host not in settled):
                scope = "host" if suspect.kind == HOST else f"gang={attempt.gang}"
                fails = suspect.kind != FABRIC and suspect.confidence > EITHER
                yield _verdict(views[host], scope, _told(suspect), fails=fails)


def _told(suspect: Suspect) -> str:
    where = f"{suspect.kind} {suspect.where}".strip()
    return f"suspect {where} (confidence {suspect.confidence:.2f}): {suspect.evidence}"


def _verdict(view: HostView, scope: str, reason: str, *, fails: bool) -> Verdict:
    return Verdict(
        host=view.host.name,
        scope=scope,
        serial=view.serial(scope),
        name=NAME,
        stage=STAGE,
        verdict=FAIL if fails else INCONCLUSIVE,
        criterion=CRITERION,
        kind=VerdictKind.SUSPECT,
        reason=reason,
        action="inspect_hardware" if fails else "none",
        source=SOURCE,
        basis="policy",
    )
