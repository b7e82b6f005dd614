"""The words of a report: its status, and the lines that are printed under it. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

from fleet.diff.against_baseline import Since
from fleet.diff.against_baseline import summary as changes_summary
from fleet.judge.drift import DRIFT, FIRST_S, span, untold
from fleet.judge.evidence import pci_address
from fleet.judge.localization.faults import CRITERION as LOCALISED
from fleet.judge.manifest import as_ordered
from fleet.judge.waivers import summary as waivers_summary
from fleet.planning.test_selection import selection_summary, status_suffix
from fleet.report.causes import causes
from fleet.report.titles import MANIFEST, TITLES, VALUES_ONLY
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
    Verdict,
    mark,
)
from schemas.timeline import SOAK

STATUS = {ACCEPTED: "PASS", REJECTED: "FAIL", INCOMPLETE: "INCOMPLETE"}
WAIVED = " waived"
UNJUDGED = "NOT JUDGED (no criterion applies)"
_SUMMARY_LINES = 20
MOST_NAMES, MOST_LEFT = 10, 30
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


def acceptance(
    plan: Plan, decision: str, verdicts: Sequence[Verdict], hosts: Sequence[HostReport], since: Since
) -> Acceptance:
    """The decision in a word, and the lines that are printed under it."""
    accepted = sum(host.decision == ACCEPTED for host in hosts)
    gpus = sum(len(host.gpus) for host in hosts)
    what = f"{gpus} GPUs" if not plan.rehearsal else "no GPU was looked at: this rehearses the pipeline on CPUs"
    if plan.simulated:
        what = f"no GPU was looked at: rackproof simulate made up the records of {gpus} GPUs"
    passed = "passed" if plan.rehearsal or plan.simulated else "accepted"
    words = ((REJECTED, "failed"), (INCOMPLETE, "incomplete"))
    others = ((sum(host.decision == decided for host in hosts), word) for decided, word in words)
    lines = [
        f"Hosts: {accepted} of {len(hosts)} {passed}{''.join(f', {n} {word}' for n, word in others if n)} ({what})"
    ]
    lines += _smaller_gangs(plan, hosts)
    lines += _soaked(plan, hosts)
    lines += selection_summary(plan)
    lines += [f"{name}: {state}" for name, state in _stages(plan, hosts, verdicts)]
    if ordered := as_ordered(plan, verdicts):
        lines.append(f"{MANIFEST}{ordered}")
    lines += unjudged_bandwidth(plan, hosts, verdicts)
    lines += unjudged_digests(plan, hosts, verdicts)
    lines += allowances(plan.hosts)
    lines += waivers_summary(plan.waivers, verdicts, plan.created)
    lines += changes_summary(plan, since)
    lines += reasons(verdicts, slots((host.name, gpu) for host in hosts for gpu in host.gpus))
    lines.append(f"Criteria: {', '.join(dict.fromkeys(pack for host in hosts for pack in host.packs)) or 'none'}")
    return Acceptance(status=status_of(plan, decision, verdicts), summary=tuple(lines))


def status_of(plan: Plan, decision: str, verdicts: Iterable[Verdict]) -> str:
    """The decision in a word, with all that must be read with it: no GPU looked at, waivers, benchmarks left out."""
    waived = decision == ACCEPTED and any(verdict.waiver for verdict in verdicts)
    status = f"{STATUS[decision]} WITH WAIVERS" if waived else STATUS[decision]
    return f"{mark(simulated=plan.simulated, rehearsal=plan.rehearsal)} {status}{status_suffix(plan)}".strip()


def allowances(hosts: Sequence[PlannedHost]) -> Iterator[str]:
    """What the inventory allows some hosts that makes their figures, or their GPUs, worth less."""
    if shared := [host.name for host in hosts if host.share_gpus]:
        yield f"GPUs were measured beside other processes, if there were any, on {', '.join(shared[:5])}"[:200]
    if counted := [host.name for host in hosts if host.count_found]:
        yield f"GPU count: as found on {', '.join(counted[:5])}: nobody said how many there should be"[:200]


def _soaked(plan: Plan, hosts: Sequence[HostReport]) -> Iterator[str]:
    """How long the hosts soaked, where the plan asks for it."""
    planned = next((stage.duration_s for stage in plan.stages if stage.name == SOAK), 0.0)
    soaks = [host.soak for host in hosts if host.soak]
    if planned:
        whole = [soak for soak in soaks if soak.ended and not soak.reason]
        least = f", the shortest {span(min(soak.soaked_s for soak in soaks))}" if 0 < len(soaks) != len(whole) else ""
        rounds = sum(soak.rounds for soak in soaks)
        short = sorted({name for soak in soaks if soak.planned_s < FIRST_S for name in untold(soak)})
        yield f"Soak: {len(whole)} of {len(hosts)} hosts soaked {span(planned)}{least} ({rounds} rounds in all)"
        if short and not plan.rehearsal:
            yield f"Drift: NOT JUDGED for {', '.join(short)} (too short a soak: an hour and more tells)"


def _smaller_gangs(plan: Plan, hosts: Sequence[HostReport]) -> Iterator[str]:
    """With whom each gang was measured, where some of its hosts were left out: figures of fewer hosts are not the gang's."""
    # Where a rank had no device, the other hosts came to a good end, with nothing measured.
    spoilt = {(launch.number, launch.members) for host in hosts for launch in host.launches if launch.culprit}
    last = {
        host.name: launch.members
        for host in hosts
        for launch in host.launches
        if launch.stage == "gang" and launch.outcome == "finished" and (launch.number, launch.members) not in spoilt
    }
    for gang, planned in plan.gangs().items():
        groups = sorted(dict.fromkeys(last[host] for host in planned if host in last), key=len, reverse=True)
        for members in (group for group in groups if set(group) != set(planned)):
            names = ", ".join(members[:MOST_NAMES]) + (" …" if len(members) > MOST_NAMES else "")
            without = [host for host in planned if host not in members]
            but = f", without {', '.join(without[:MOST_NAMES])}{' …' if len(without) > MOST_NAMES else ''}"
            yield f"Gang {gang}: {len(members)} of {len(planned)} hosts were measured together ({names}){but if without else ''}"
        if not groups and any(
            launch.stage == "gang" for host in hosts if host.name in planned for launch in host.launches
        ):
            yield f"Gang {gang}: no launch of its {len(planned)} hosts came to its end"


def _kind(verdict: Verdict) -> str:
    """The benchmark that a verdict is about; empty where it is about the health of host or GPU."""
    first = verdict.name.removeprefix(f"{DRIFT}.").split(".")[0]
    if verdict.name == DURATION.name:
        first = str(verdict.params.get("benchmark", ""))
    return first if first in TITLES else ""


def _stages(plan: Plan, hosts: Sequence[HostReport], verdicts: Sequence[Verdict]) -> list[tuple[str, str]]:
    """The state of each kind of measurement over the fleet, the health snapshots among them."""
    planned = {benchmark for stage in plan.stages for benchmark in stage.benchmarks}
    planned &= {item.name.split(".")[0] for host in plan.hosts for item in plan.expected_of(host)}
    seen: dict[str, set[str]] = {}
    for verdict in verdicts:
        told = f"{verdict.verdict}{WAIVED}" if verdict.waiver else verdict.verdict
        seen.setdefault(_kind(verdict), set()).add(told)
        # What a stage or a host left out as a whole is missing from each kind that it should have measured.
        for stage in plan.stages:
            if verdict.name in ("record", f"stage.{stage.name}"):
                for benchmark in stage.benchmarks:
                    seen.setdefault(benchmark, set()).add(told)
    health = "Host health" if plan.rehearsal else "Host and GPU health"
    titles = {"": health, **{name: title for name, title in TITLES.items() if name in planned}}
    slow = speed_unjudged(hosts, verdicts)
    states = {kind: _state(seen.get(kind, set())) for kind in titles}
    return [
        (title, VALUES_ONLY if states[kind] == "PASS" and kind in slow else states[kind])
        for kind, title in titles.items()
    ]


def _state(verdicts: set[str]) -> str:
    words = {
        FAIL: "FAIL",
        INCONCLUSIVE: "INCOMPLETE",
        f"{FAIL}{WAIVED}": "FAIL (waived)",
        f"{INCONCLUSIVE}{WAIVED}": "INCOMPLETE (waived)",
        PASS: "PASS",
    }
    return next((word for kind, word in words.items() if kind in verdicts), UNJUDGED)


def slots(gpus: Iterable[tuple[str, Gpu]]) -> dict[tuple[str, str], str]:
    """Host and scope of each GPU -> its place on the PCI bus, as sysfs and lspci spell it."""
    return {(host, f"gpu={gpu.index}"): pci_address(gpu.pci_bus_id) for host, gpu in gpus if gpu.pci_bus_id}


def reasons(verdicts: Iterable[Verdict], places: Mapping[tuple[str, str], str]) -> list[str]:
    """One line a reason, failures first: who stopped or slowed a gang, the critical ones, the others. Host, part, what was found.

    A GPU is told with its place on the PCI bus (`slots`). Equal reasons of one host are told once, and what one criterion lays
    to one part of it. Where those are too many, the first who spoilt a gang stay, and each host has a line, then each part that
    fails, and each thing that it fails; hosts for which no line is left are named, and counted where they are many.
    """
    found = sorted(causes(verdict for verdict in verdicts if verdict.stands), key=_rank)
    suspects = [at for at, group in enumerate(found) if _explains(group)]
    tiers = _tiers(found) | dict.fromkeys(suspects[:_MOST_SUSPECTS], -1)
    kept = sorted(sorted(tiers, key=tiers.__getitem__)[:_SUMMARY_LINES])
    kept.sort(key=lambda at: not _explains(found[at]))
    more = [f"… and {len(found) - len(kept)} more reasons in the report"] if len(found) > len(kept) else []
    return [*(_line(found[at], places) for at in kept), *more, *_unnamed(found, {found[at][0].host for at in kept})]


def _tiers(found: Sequence[Sequence[Verdict]]) -> dict[int, int]:
    """How much each reason adds to those before it: the less, the sooner it is left out."""
    hosts: set[str] = set()
    told: set[tuple[str, ...]] = set()
    tiers = {}
    for at, group in enumerate(found):
        first, failed = group[0], group[0].verdict == FAIL
        parts = {(verdict.verdict, verdict.host, verdict.place) for verdict in group}
        what = (first.host, first.place, first.name, first.verdict)
        new = (first.host not in hosts, failed and not parts <= told, failed and what not in told, not parts <= told)
        tiers[at] = next((tier for tier, is_new in enumerate(new) if is_new), len(new))
        hosts.add(first.host)
        told |= {*parts, what}
    return tiers


def _unnamed(found: Iterable[Sequence[Verdict]], named: Collection[str]) -> Iterator[str]:
    """The hosts that no line names."""
    left: dict[str, str] = {}
    for group in found:
        if group[0].host not in named:
            left.setdefault(group[0].host, group[0].verdict)
    for verdict, word in ((FAIL, "Failed as well"), (INCONCLUSIVE, "Incomplete as well")):
        hosts = [host for host, gravest in left.items() if gravest == verdict]
        more = f" and {len(hosts) - MOST_LEFT} more hosts" if len(hosts) > MOST_LEFT else ""
        if hosts:
            yield f"{word}: {', '.join(hosts[:MOST_LEFT])}{more}"


def _rank(group: Sequence[Verdict]) -> int:
    return 2 if group[0].verdict != FAIL else int(group[0].severity != CRITICAL)


def _explains(group: Sequence[Verdict]) -> bool:
    return group[0].verdict == FAIL and group[0].criterion == LOCALISED


def _line(group: Sequence[Verdict], places: Mapping[tuple[str, str], str]) -> str:
    first = group[0]
    scope = first.part or first.scope
    part = f" {scope}" if scope != "host" else ""
    slot = places.get((first.host, scope.partition(",")[0]), "")
    known = ", ".join(f"{what} {value}" for what, value in (("serial", first.serial), ("PCI", slot)) if value)
    identity = f" ({known})" if known else ""
    more = f" (and {len(group) - 1} more like it)" if len(group) > 1 else ""
    stage = f" in stage {first.stage}" if first.stage else ""
    action = f"; {first.action.replace('_', ' ')}" if first.verdict == FAIL and first.action != "none" else ""
    params = ", ".join(f"{key}={value}" for key, value in first.params.items() if key in _TOLD_PARAMS)
    named = f"{first.name}[{params}]" if params else first.name
    verdict = "FAIL" if first.verdict == FAIL else "INCOMPLETE"
    return f"{verdict}: {first.host}{part}{identity}: {named}{stage}: {first.reason}{action}{more}"
