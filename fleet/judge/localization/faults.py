"""Judge `gang.fault`: the part that stopped a launch of a gang (the hosts of one multi-node launch).

The heartbeats of the ranks identify the part. If they do not, probe launches of some of the hosts identify it (`bisection`).
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence

from fleet.judge.host_view import HostView
from fleet.judge.localization.bisection import ProbeConclusion
from fleet.judge.localization.launches import EVEN_ODDS, Attempt, is_stuck, probe_result
from fleet.judge.localization.matrix import FABRIC, HOST, LINK, Suspect
from schemas.records import UNABLE
from schemas.reports import FAIL, INCONCLUSIVE, Verdict, VerdictKind
from schemas.stages import GANG

CRITERION = "localise"
STAGE = GANG
OBSERVATION_NAME = "gang.fault"
SOURCE = "Rackproof policy: a host that stops a launch cannot be trained on (docs/localisation.md)"


def with_last_hosts(attempts: Sequence[Attempt]) -> Iterator[tuple[Attempt, frozenset[str]]]:
    """Yield each launch that was the last one for some hosts, and these hosts; latest launch first. Probes do not count."""
    hosts_of_later: set[str] = set()
    for attempt in reversed([attempt for attempt in attempts if attempt.stage == GANG]):
        if last_hosts := frozenset(attempt.launches) - hosts_of_later:
            yield attempt, last_hosts
        hosts_of_later |= attempt.launches.keys()


def judge_faults(attempts: Sequence[Attempt], views: Mapping[str, HostView]) -> Iterator[Verdict]:
    """Yield verdicts on the hosts that stopped a launch and took part in no later launch that worked.

    Two hosts that fail only together get verdicts even if one of them worked in a later launch.

    Args:
        attempts: every launch and probe of one gang.
        views: the hosts of the gang with valid records, by name.
    """
    decided: set[str] = set()  # hosts with a verdict, and hosts of later launches that worked
    for attempt in reversed([attempt for attempt in attempts if attempt.stage == GANG or attempt.unable_ranks]):
        if attempt.worked:
            decided |= set(attempt.members)
        verdicts = [*_heartbeat_verdicts(attempt, views, decided), *_probe_verdicts(attempts, attempt, views, decided)]
        yield from verdicts
        decided |= {verdict.host for verdict in verdicts}


def _heartbeat_verdicts(attempt: Attempt, views: Mapping[str, HostView], decided: Collection[str]) -> Iterator[Verdict]:
    """Yield verdicts on the hosts that the heartbeats or the hosts themselves report as culprits.

    Hosts that started no rank get no such verdict: the verdict on the stage gives the reason. If a rank has no working device,
    the verdict on its host is inconclusive, because other criteria judge the device (by the driver and the kernel log).
    """
    for host, reason in attempt.culprits().items():
        culprit = attempt.unable_ranks.get(host) or (attempt.culprit if host not in attempt.start_failures else None)
        if culprit and host in views and host not in decided:
            is_index_unreliable = views[host].is_beyond_driver(culprit.scope) or (
                culprit.kind == UNABLE and views[host].renumbered
            )
            scope = "host" if is_index_unreliable else culprit.scope or "host"
            yield _verdict(views[host], scope, reason, fails=attempt.is_certain(host))


def _probe_verdicts(
    attempts: Sequence[Attempt], attempt: Attempt, views: Mapping[str, HostView], decided: Collection[str]
) -> Iterator[Verdict]:
    """Yield verdicts on the hosts of each suspect that probes found, if the launch failed without a known culprit.

    If two hosts fail only together, both get a verdict, even if one of them worked in a later launch.
    """
    result = probe_result(attempts, attempt) if is_stuck(attempt) else None
    for suspect in result.suspects if isinstance(result, ProbeConclusion) else ():
        is_bad_link = suspect.kind == LINK and suspect.confidence > EVEN_ODDS
        for host in suspect.hosts or attempt.members:
            if host in views and (is_bad_link or host not in decided):
                scope = "host" if suspect.kind == HOST else f"gang={attempt.gang}"
                fails = suspect.kind != FABRIC and suspect.confidence > EVEN_ODDS
                yield _verdict(views[host], scope, _suspect_reason(suspect), fails=fails)


def _suspect_reason(suspect: Suspect) -> str:
    part = f"{suspect.kind} {suspect.where}".strip()
    return f"suspect {part} (confidence {suspect.confidence:.2f}): {suspect.evidence}"


def _verdict(view: HostView, scope: str, reason: str, *, fails: bool) -> Verdict:
    return Verdict(
        host=view.host.name,
        scope=scope,
        serial=view.serial(scope),
        name=OBSERVATION_NAME,
        stage=STAGE,
        verdict=FAIL if fails else INCONCLUSIVE,
        criterion=CRITERION,
        kind=VerdictKind.SUSPECT,
        reason=reason,
        action="inspect_hardware" if fails else "none",
        source=SOURCE,
        basis="policy",
    )
