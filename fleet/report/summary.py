"""The words of a report: its status, and the lines that are printed under it. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from fleet.diff.against_baseline import BaselineDiff
from fleet.diff.against_baseline import summary as changes_summary
from fleet.judge.drift import DRIFT, FIRST_S, span
from fleet.judge.evidence import pci_address
from fleet.judge.localization.faults import CRITERION as LOCALISED
from fleet.judge.manifest import as_ordered
from fleet.judge.waivers import summary as waivers_summary
from fleet.planning.test_selection import selection_summary, status_suffix
from fleet.report.causes import causes
from fleet.report.facts import HostFacts
from fleet.report.titles import TITLES, VALUES_ONLY
from fleet.report.unjudged import speed_unjudged, unjudged_bandwidth, unjudged_digests
from schemas.catalogue import DURATION
from schemas.plans import Plan, PlannedHost
from schemas.records import Gpu
from schemas.reports import (
    ACCEPTED,
    CRITICAL,
    FAIL,
    INCOMPLETE,
    INCONCLUSIVE,
    PASS,
    REJECTED,
    Acceptance,
    HostReport,
    Judged,
    LineKind,
    SummaryLine,
    Verdict,
    mark,
)
from schemas.scopes import Scope
from schemas.stages import SOAK

STATUS = {ACCEPTED: "PASS", REJECTED: "FAIL", INCOMPLETE: "INCOMPLETE"}
UNJUDGED = "NOT JUDGED (no criterion applies)"
_SUMMARY_LINES = 20
MOST_NAMES, MOST_LEFT, MOST_OF_NAME = 10, 30, 40
_MOST_SUSPECTS = 5
_TOLD_PARAMS = (
    "op",
    "dtype",
    "direction",
    "sharing",
    "workload",
    "pattern",
    "size_bytes",
    "placement",
    "network",
    "variant",
)


@dataclass(frozen=True, kw_only=True)
class Findings:
    """What the summary of a fleet is made of."""

    plan: Plan
    hosts: Sequence[HostReport]
    facts: Mapping[str, HostFacts]
    """Facts of each host, in the order of the plan."""
    judged: Sequence[Judged]
    """Every verdict of the fleet, summed up."""
    exceptions: Sequence[Verdict]
    """All verdicts that do not pass."""
    manifest: Sequence[Verdict]
    """All verdicts on what was ordered."""
    since: BaselineDiff


def acceptance(result: Findings, decision: str) -> Acceptance:
    """Return the decision in a word, and the lines that are printed under it."""
    plan, hosts = result.plan, result.hosts
    accepted = sum(host.decision == ACCEPTED for host in hosts)
    gpus = sum(len(host.gpus) for host in hosts)
    what = f"{gpus} GPUs" if not plan.rehearsal else "no GPU was looked at: this rehearses the pipeline on CPUs"
    if plan.simulated:
        what = f"no GPU was looked at: rackproof simulate made up the records of {gpus} GPUs"
    passed = "passed" if plan.rehearsal or plan.simulated else "accepted"
    words = ((REJECTED, "failed"), (INCOMPLETE, "incomplete"))
    others = ((sum(host.decision == decided for host in hosts), word) for decided, word in words)
    counted = f"{accepted} of {len(hosts)} {passed}{''.join(f', {n} {word}' for n, word in others if n)} ({what})"
    values = {"total": len(hosts), "accepted": accepted, "gpus": gpus}
    lines = [SummaryLine(kind=LineKind.COUNT, title="Hosts", text=counted, values=values)]
    lines += _smaller_gangs(plan, result.facts)
    lines += _soaked(result)
    lines += selection_summary(plan)
    lines += _stages(result)
    if ordered := as_ordered(plan, result.manifest):
        lines.append(SummaryLine(kind=LineKind.MANIFEST, title="Manifest", text=ordered))
    lines += unjudged_bandwidth(plan, result.facts)
    lines += unjudged_digests(plan, hosts, result.facts)
    lines += allowances(plan.hosts)
    lines += waivers_summary(plan.waivers, result.exceptions, plan.created)
    lines += changes_summary(plan, result.since)
    lines += reasons(result.exceptions, slots((host.name, gpu) for host in hosts for gpu in host.gpus))
    packs = ", ".join(dict.fromkeys(pack for host in hosts for pack in host.packs)) or "none"
    lines.append(SummaryLine(kind=LineKind.CRITERIA, title="Criteria", text=packs))
    return Acceptance(status=status_of(plan, decision, result.exceptions), lines=tuple(lines))


def status_of(plan: Plan, decision: str, verdicts: Iterable[Verdict]) -> str:
    """Return the decision in a word with its caveats: no GPU tested, waivers, benchmarks left out."""
    waived = decision == ACCEPTED and any(verdict.waiver for verdict in verdicts)
    status = f"{STATUS[decision]} WITH WAIVERS" if waived else STATUS[decision]
    return f"{mark(simulated=plan.simulated, rehearsal=plan.rehearsal)} {status}{status_suffix(plan)}".strip()


def allowances(hosts: Sequence[PlannedHost]) -> Iterator[SummaryLine]:
    """Yield what the inventory permits on some hosts and what qualifies their figures, or their number of GPUs."""
    if shared := [host.name for host in hosts if host.share_gpus]:
        text = (
            f"other processes were allowed to use the GPUs during the run (rackproof_share_gpus) on {_names(shared, 5)}"
        )
        yield SummaryLine(kind=LineKind.CAVEAT, title="GPUs shared", text=text, values={"hosts": len(shared)})
    if counted := [host.name for host in hosts if host.count_found]:
        text = f"the inventory gives no number, so the detected one is expected, on {_names(counted, 5)}"
        yield SummaryLine(kind=LineKind.CAVEAT, title="GPU count", text=text, values={"hosts": len(counted)})


def _names(names: Sequence[str], most: int) -> str:
    """`h1, h2 and 3 more`."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return f"{', '.join(name[:MOST_OF_NAME] for name in names[:most])}{more}"


def _soaked(result: Findings) -> Iterator[SummaryLine]:
    """Yield how long the hosts soaked, if the plan has a soak."""
    plan, hosts = result.plan, result.hosts
    planned = next((stage.duration_s for stage in plan.stages if stage.name == SOAK), 0.0)
    soaks = [host.soak for host in hosts if host.soak]
    if planned:
        whole = [soak for soak in soaks if soak.ended and not soak.reason]
        least = f", the shortest {span(min(soak.soaked_s for soak in soaks))}" if 0 < len(soaks) != len(whole) else ""
        rounds = sum(soak.rounds for soak in soaks)
        short_soaks = [host.name for host in hosts if host.soak and host.soak.planned_s < FIRST_S]
        short = sorted({name for host in short_soaks for name in result.facts[host].rates_without_drift})
        text = f"{len(whole)} of {len(hosts)} hosts soaked {span(planned)}{least} ({rounds} rounds in all)"
        values = {"total": len(hosts), "finished": len(whole), "rounds": rounds}
        yield SummaryLine(kind=LineKind.SOAK, title="Soak", text=text, values=values)
        if short and not plan.rehearsal:
            text = f"NOT JUDGED for {', '.join(short)} (the soak is too short: drift needs an hour or more)"
            yield SummaryLine(kind=LineKind.NOT_JUDGED, title="Drift", text=text)


def _smaller_gangs(plan: Plan, facts: Mapping[str, HostFacts]) -> Iterator[SummaryLine]:
    """Yield the hosts that measured together, for each gang that left hosts out: their figures are not those of the gang."""
    # If a rank has no device, the launch ends well on the other hosts, and measures nothing.
    launches = [(host, launch) for host, of_host in facts.items() for launch in of_host.gang_launches]
    without_result = {(launch.number, launch.members) for _, launch in launches if launch.culprit}
    last = {
        host: launch.members
        for host, launch in launches
        if launch.outcome == "finished" and (launch.number, launch.members) not in without_result
    }
    for gang, planned in plan.gangs().items():
        groups = sorted(dict.fromkeys(last[host] for host in planned if host in last), key=len, reverse=True)
        for members in (group for group in groups if set(group) != set(planned)):
            names = ", ".join(members[:MOST_NAMES]) + (" …" if len(members) > MOST_NAMES else "")
            without = [host for host in planned if host not in members]
            but = f", without {', '.join(without[:MOST_NAMES])}{' …' if len(without) > MOST_NAMES else ''}"
            text = f"{len(members)} of {len(planned)} hosts were measured together ({names}){but if without else ''}"
            values = {"total": len(planned), "measured": len(members)}
            yield SummaryLine(kind=LineKind.CAVEAT, title=f"Gang {gang}", text=text, values=values)
        if not groups and any(facts[host].gang_launches for host in planned):
            text = f"no launch of its {len(planned)} hosts finished"
            values = {"total": len(planned), "measured": 0}
            yield SummaryLine(kind=LineKind.CAVEAT, title=f"Gang {gang}", text=text, values=values)


def _kind(item: Verdict | Judged) -> str:
    """Return the benchmark that a verdict is about; empty for the health of host or GPU."""
    first = item.name.removeprefix(f"{DRIFT}.").split(".")[0]
    if item.name == DURATION.name:
        first = str(item.params.get("benchmark", ""))
    return first if first in TITLES else ""


def _stages(result: Findings) -> Iterator[SummaryLine]:
    """Yield the state of each kind of measurement over the fleet, the health readings first."""
    plan = result.plan
    planned = {benchmark for stage in plan.stages for benchmark in stage.benchmarks}
    lists = {id(expected): expected for expected in map(plan.expected_of, plan.hosts)}
    planned &= {item.name.split(".")[0] for expected in lists.values() for item in expected}
    states: dict[str, set[tuple[str, bool]]] = {}
    for row in result.judged:
        if row.passed:
            states.setdefault(_kind(row), set()).add((PASS, False))
    for verdict in result.exceptions:
        state = verdict.verdict, verdict.waiver is not None
        states.setdefault(_kind(verdict), set()).add(state)
        # A stage that a host did not run is missing from each kind of measurement of that stage.
        for stage in plan.stages:
            if verdict.name in ("record", f"stage.{stage.name}"):
                for benchmark in stage.benchmarks:
                    states.setdefault(benchmark, set()).add(state)
    health = "Host health" if plan.rehearsal else "Host and GPU health"
    titles = {"": health, **{name: title for name, title in TITLES.items() if name in planned}}
    slow = speed_unjudged(result.facts, result.judged)
    for kind, title in titles.items():
        gravest, word = _state(states.get(kind, set()))
        word = VALUES_ONLY if gravest == PASS and kind in slow else word
        yield SummaryLine(kind=LineKind.CHECK, title=title, text=word, verdict=gravest)


def _state(verdicts: set[tuple[str, bool]]) -> tuple[str, str]:
    """Return the gravest of the verdicts, each with whether it is waived, and the word for it."""
    words = {
        (FAIL, False): "FAIL",
        (INCONCLUSIVE, False): "INCOMPLETE",
        (FAIL, True): "FAIL (waived)",
        (INCONCLUSIVE, True): "INCOMPLETE (waived)",
        (PASS, False): "PASS",
    }
    return next(((state[0], word) for state, word in words.items() if state in verdicts), ("", UNJUDGED))


def slots(gpus: Iterable[tuple[str, Gpu]]) -> dict[tuple[str, str], str]:
    """Host and scope of each GPU -> its place on the PCI bus, as sysfs and lspci spell it."""
    return {(host, f"gpu={gpu.index}"): pci_address(gpu.pci_bus_id) for host, gpu in gpus if gpu.pci_bus_id}


def reasons(verdicts: Iterable[Verdict], keys: Mapping[tuple[str, str], str]) -> list[SummaryLine]:
    """Return one line per reason: parts that stopped or slowed a gang first, then critical failures, then the others.

    A GPU is named with its PCI address (`slots`). Equal reasons of one host share a line, and so do the verdicts of one
    criterion on one part. If there are too many, the first culprits of a gang stay; then each host gets a line, then each
    failed part, then each failed criterion. Hosts without a line are named, or counted if there are many.
    """
    result = sorted(causes(verdict for verdict in verdicts if verdict.stands), key=_rank)
    suspects = [at for at, group in enumerate(result) if _explains(group)]
    tiers = _tiers(result) | dict.fromkeys(suspects[:_MOST_SUSPECTS], -1)
    kept = sorted(sorted(tiers, key=tiers.__getitem__)[:_SUMMARY_LINES])
    kept.sort(key=lambda at: not _explains(result[at]))
    lines = [_line(result[at], keys) for at in kept]
    if more := len(result) - len(kept):
        text = f"… and {more} more reasons in the report"
        lines.append(SummaryLine(kind=LineKind.MORE, text=text, values={"reasons": more}))
    return [*lines, *_unnamed(result, {result[at][0].host for at in kept})]


def _tiers(result: Sequence[Sequence[Verdict]]) -> dict[int, int]:
    """How much each reason adds to those before it: the less, the sooner it is left out."""
    hosts: set[str] = set()
    text: set[tuple[str, ...]] = set()
    tiers = {}
    for at, group in enumerate(result):
        first, failed = group[0], group[0].verdict == FAIL
        parts = {(verdict.verdict, verdict.host, verdict.place) for verdict in group}
        what = (first.host, first.place, first.name, first.verdict)
        new = (first.host not in hosts, failed and not parts <= text, failed and what not in text, not parts <= text)
        tiers[at] = next((tier for tier, is_new in enumerate(new) if is_new), len(new))
        hosts.add(first.host)
        text |= {*parts, what}
    return tiers


def _unnamed(result: Iterable[Sequence[Verdict]], named: Collection[str]) -> Iterator[SummaryLine]:
    """Yield the hosts that no line names."""
    left: dict[str, str] = {}
    for group in result:
        if group[0].host not in named:
            left.setdefault(group[0].host, group[0].verdict)
    for verdict, word in ((FAIL, "Failed as well"), (INCONCLUSIVE, "Incomplete as well")):
        hosts = [host for host, gravest in left.items() if gravest == verdict]
        more = f" and {len(hosts) - MOST_LEFT} more hosts" if len(hosts) > MOST_LEFT else ""
        if hosts:
            text = f"{', '.join(hosts[:MOST_LEFT])}{more}"
            yield SummaryLine(kind=LineKind.MORE, title=word, text=text, verdict=verdict, values={"hosts": len(hosts)})


def _rank(group: Sequence[Verdict]) -> int:
    return 2 if group[0].verdict != FAIL else int(group[0].severity != CRITICAL)


def _explains(group: Sequence[Verdict]) -> bool:
    return group[0].verdict == FAIL and group[0].criterion == LOCALISED


def _line(group: Sequence[Verdict], keys: Mapping[tuple[str, str], str]) -> SummaryLine:
    first = group[0]
    scope = first.part or first.scope
    part = f" {scope}" if scope != "host" else ""
    slot = keys.get((first.host, Scope.parse(scope).device), "")
    known = ", ".join(f"{what} {value}" for what, value in (("serial", first.serial), ("PCI", slot)) if value)
    identity = f" ({known})" if known else ""
    more = f" (and {len(group) - 1} more like it)" if len(group) > 1 else ""
    stage = f" in stage {first.stage}" if first.stage else ""
    action = f"; {first.action.replace('_', ' ')}" if first.verdict == FAIL and first.action != "none" else ""
    params = ", ".join(f"{key}={value}" for key, value in first.params.items() if key in _TOLD_PARAMS)
    named = f"{first.name}[{params}]" if params else first.name
    return SummaryLine(
        kind=LineKind.REASON,
        title="FAIL" if first.verdict == FAIL else "INCOMPLETE",
        text=f"{first.host}{part}{identity}: {named}{stage}: {first.reason}{action}{more}",
        verdict=first.verdict,
        host=first.host,
        part=scope,
        values={"verdicts": len(group)},
    )
