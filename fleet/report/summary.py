"""Compose the status of a report and the summary lines under it. This module reads and writes no files."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from fleet.diff.against_baseline import BaselineDiff
from fleet.diff.against_baseline import summary as changes_summary
from fleet.judge.drift import DRIFT, REFERENCE_S
from fleet.judge.manifest import manifest_summary
from fleet.judge.stated_values import Excess
from fleet.judge.waivers import summary as waivers_summary
from fleet.planning.test_selection import selection_summary, status_suffix
from fleet.quantities import counted
from fleet.report.facts import MAX_STOLEN, HostFacts, is_of_missing_record
from fleet.report.formatting import cause_action, join_names
from fleet.report.replaced import replaced_lines
from fleet.report.titles import TITLES, VALUES_ONLY
from fleet.report.unjudged import speed_unjudged, uncompared_hosts, unjudged_bandwidth, unjudged_digests
from schemas.catalogue import DURATION
from schemas.plans import Plan, PlannedHost
from schemas.records import Gpu
from schemas.reports import (
    ACCEPTED,
    FAIL,
    INCOMPLETE,
    INCONCLUSIVE,
    PASS,
    REJECTED,
    Acceptance,
    Cause,
    HostReport,
    Judged,
    LineKind,
    Replaced,
    SummaryLine,
    Verdict,
    mark,
)
from schemas.scopes import Scope, pci_address
from schemas.stages import SOAK
from schemas.times import format_span

STATUS = {ACCEPTED: "PASS", REJECTED: "FAIL", INCOMPLETE: "INCOMPLETE"}
UNJUDGED = "NOT JUDGED (no criterion applies)"
UNCOMPARED = "NOT COMPARED (the median of the fleet needs three GPUs, or three hosts, of the same model)"
_MAX_CAUSES = 20
"""Maximum number of causes that a summary shows."""
MAX_GANG_NAMES, MAX_OTHER_HOSTS, MAX_NAME_LENGTH, MAX_MACHINES = 10, 30, 40, 4
"""Maximum numbers in one line. MAX_GANG_NAMES: hosts of one gang (the hosts of one multi-node launch), or hosts that share a
machine. MAX_OTHER_HOSTS: hosts that no cause names. MAX_NAME_LENGTH: characters of a name. MAX_MACHINES: machines that several
hosts share."""


@dataclass(frozen=True, kw_only=True)
class SummaryInput:
    """The data from which the summary of a fleet is written."""

    plan: Plan
    hosts: Sequence[HostReport]
    facts: Mapping[str, HostFacts]
    """Facts of each host, in the order of the plan."""
    judged: Sequence[Judged]
    """All verdicts of the fleet, counted by criterion."""
    exceptions: Sequence[Verdict]
    """All verdicts that do not pass."""
    listed: Sequence[Verdict]
    """The verdicts that the report lists. A large report does not list all."""
    causes: Sequence[Cause]
    """Causes of the listed verdicts that do not pass."""
    manifest: Sequence[Verdict]
    """All verdicts of `judge_inventories` (parts) and `judge_links` (cables)."""
    wiring: str
    """`Wiring.summary`."""
    diff: BaselineDiff
    replaced: Sequence[Replaced] = ()
    """Shipped criteria that packs of the operator replaced."""
    version_caveats: Sequence[SummaryLine] = ()
    """The lines of `vulnerability_lines`."""
    machines: Sequence[Sequence[str]] = ()
    """For each machine that the inventory lists as several hosts: the names of these hosts."""
    excesses: Sequence[Excess] = ()
    """Values of the inventory that are too low: every host for which the value is stated has more."""
    compared: Collection[str] = ()
    """Benchmarks with a figure that a criterion compares with the median of the fleet."""


def acceptance(summary: SummaryInput, decision: str) -> Acceptance:
    """Return the status of the report and the summary lines under it."""
    plan, hosts = summary.plan, summary.hosts
    accepted = sum(host.decision == ACCEPTED for host in hosts)
    gpus = sum(len(host.gpus) for host in hosts)
    what = counted(gpus, "GPU") if not plan.rehearsal else "no GPU was tested: this run rehearsed the pipeline on CPUs"
    if plan.simulated:
        what = f"no GPU was tested: rackproof simulate generated the records of {counted(gpus, 'GPU')}"
    passed = "passed" if plan.rehearsal or plan.simulated else "accepted"
    words = ((REJECTED, "failed"), (INCOMPLETE, "incomplete"))
    others = ((sum(host.decision == decided for host in hosts), word) for decided, word in words)
    text = f"{accepted} of {len(hosts)} {passed}{''.join(f', {n} {word}' for n, word in others if n)} ({what})"
    values = {"total": len(hosts), "accepted": accepted, "gpus": gpus}
    lines = [SummaryLine(kind=LineKind.COUNT, title="Hosts", text=text, values=values)]
    lines += _incomplete_gang_lines(plan, summary.facts)
    lines += _soak_lines(summary)
    lines += selection_summary(plan)
    lines += _check_lines(summary)
    if ordered := manifest_summary(plan, summary.manifest):
        lines.append(SummaryLine(kind=LineKind.MANIFEST, title="Manifest", text=ordered))
    if summary.wiring:
        lines.append(SummaryLine(kind=LineKind.WIRING, title="Cabling", text=summary.wiring))
    without_record = {verdict.host for verdict in summary.exceptions if is_of_missing_record(verdict)}
    facts = {host: of_host for host, of_host in summary.facts.items() if host not in without_record}
    lines += unjudged_bandwidth(plan, facts)
    lines += unjudged_digests(plan, hosts, summary.facts)
    lines += uncompared_hosts(plan, hosts)
    lines += allowances(plan.hosts)
    lines += [] if plan.rehearsal else shared_machines(summary.machines)
    lines += [] if plan.rehearsal else untested_gpus(plan.hosts, facts, summary.machines)
    lines += [] if plan.rehearsal else low_limits(summary.excesses)
    lines += stolen_time(facts)
    lines += limited_processors(facts)
    lines += other_processes(facts)
    lines += summary.version_caveats
    lines += replaced_lines(summary.replaced)
    lines += waivers_summary(plan.waivers, summary.exceptions, plan.created, [host.name for host in plan.hosts])
    lines += changes_summary(plan, summary.diff)
    slots = pci_slots((host.name, gpu) for host in hosts for gpu in host.gpus)
    lines += cause_lines(summary.causes, summary.listed, slots, hosts)
    packs = ", ".join(dict.fromkeys(pack for host in hosts for pack in host.packs)) or "none"
    lines.append(SummaryLine(kind=LineKind.CRITERIA, title="Criteria", text=packs))
    return Acceptance(status=status_of(plan, decision, summary.exceptions), lines=tuple(lines))


def status_of(plan: Plan, decision: str, verdicts: Iterable[Verdict]) -> str:
    """Return the status: PASS, FAIL or INCOMPLETE, marked if no GPU was tested, a waiver applied, or benchmarks were left out."""
    waived = decision == ACCEPTED and any(verdict.waiver for verdict in verdicts)
    status = f"{STATUS[decision]} WITH WAIVERS" if waived else STATUS[decision]
    return f"{mark(simulated=plan.simulated, rehearsal=plan.rehearsal)} {status}{status_suffix(plan)}".strip()


def allowances(hosts: Sequence[PlannedHost]) -> Iterator[SummaryLine]:
    """Yield caveats that follow from the settings of the run: shared GPUs, and hosts whose number of GPUs was not given."""
    if shared := [host.name for host in hosts if host.share_gpus]:
        text = (
            f"other processes were allowed to use the GPUs during the run (rackproof_share_gpus) on {_names(shared, 5)}"
        )
        yield SummaryLine(kind=LineKind.CAVEAT, title="GPUs shared", text=text, values={"hosts": len(shared)})
    if without_count := [host.name for host in hosts if host.count_found]:
        text = (
            "the number of GPUs to expect was not given (rackproof run --gpus), so a missing GPU may go unnoticed on "
            f"{_names(without_count, 5)}"
        )
        yield SummaryLine(kind=LineKind.CAVEAT, title="GPU count", text=text, values={"hosts": len(without_count)})


def shared_machines(machines: Sequence[Sequence[str]]) -> Iterator[SummaryLine]:
    """Yield a caveat if several hosts of the run are one machine. `machines`: for each such machine, the names of its hosts."""
    if machines:
        more = f"; {counted(len(machines) - MAX_MACHINES, 'more machine')}" if len(machines) > MAX_MACHINES else ""
        groups = "; ".join(f"{_names(hosts, MAX_GANG_NAMES)} share a machine" for hosts in machines[:MAX_MACHINES])
        text = f"{groups}{more} (the same host.boot_id)"
        values = {"hosts": len({host for hosts in machines for host in hosts})}
        yield SummaryLine(kind=LineKind.CAVEAT, title="Hosts on one machine", text=text, values=values)


def untested_gpus(
    hosts: Sequence[PlannedHost], facts: Mapping[str, HostFacts], machines: Sequence[Sequence[str]]
) -> Iterator[SummaryLine]:
    """Yield a caveat if hosts have more GPUs than are under test. `machines`: for each shared machine, the names of its hosts."""
    tested = {host.name: len(host.devices) for host in hosts}
    for names in machines:
        together = frozenset[str]().union(*(facts[name].gpus_under_test for name in names if name in facts))
        tested |= {name: max(tested[name], len(together)) for name in names}
    partly = [
        f"{name[:MAX_NAME_LENGTH]} ({tested[name]} of {on_bus})"
        for name, of_host in facts.items()
        if (on_bus := of_host.gpus_on_bus) > tested[name]
    ]
    if partly:
        variables = "rackproof_gpu_count, rackproof_gpu_devices"
        text = f"only some GPUs of these hosts are under test ({variables}): {join_names(partly, 5)}"
        yield SummaryLine(kind=LineKind.CAVEAT, title="GPUs not tested", text=text, values={"hosts": len(partly)})


def low_limits(excesses: Sequence[Excess]) -> Iterator[SummaryLine]:
    """Yield a caveat for each value of the inventory that is too low (`SummaryInput.excesses`)."""
    for item in excesses:
        text = (
            f"{item.variable} states {item.stated} for {counted(item.hosts, 'host')}, all of which have at least {item.found}: "
            "limits that follow from this variable are too low, so a fault may go unnoticed"
        )
        yield SummaryLine(kind=LineKind.CAVEAT, title="Inventory", text=text, values={"hosts": item.hosts})


def stolen_time(facts: Mapping[str, HostFacts]) -> Iterator[SummaryLine]:
    """Yield a caveat if the hypervisor of hosts took much time from their processors."""
    text = (
        f"the hypervisor took more than {MAX_STOLEN * 100:.0f} % of the time for which processors had work, so rates may be "
        "low or vary without a fault of the host"
    )
    found = {name: host.stolen for name, host in facts.items() if host.stolen}
    shares = {name: f"{share * 100:.0f} % in stage {stage}" for name, (stage, share) in found.items()}
    return _caveat_on_hosts("Processor time stolen", text, shares)


def limited_processors(facts: Mapping[str, HostFacts]) -> Iterator[SummaryLine]:
    """Yield a caveat if the agent could not use all processors of hosts."""
    text = (
        "a cpuset, a CPU quota or the kernel option isolcpus kept the agent from some processors, so rates may be low "
        "without a fault of the host"
    )
    found = {name: host.processors for name, host in facts.items() if host.processors}
    return _caveat_on_hosts(
        "Processors limited", text, {name: f"{usable} of {all_}" for name, (usable, all_) in found.items()}
    )


def other_processes(facts: Mapping[str, HostFacts]) -> Iterator[SummaryLine]:
    """Yield a caveat if processes that were not part of a launch used GPUs during it."""
    text = (
        "another process used a GPU during a launch, so rates of the stage may be low, or memory short, without a fault of the "
        "GPU"
    )
    uses = {name: host.other_processes for name, host in facts.items() if host.other_processes}
    return _caveat_on_hosts(
        "GPUs in use",
        text,
        {name: f"{gpu} in stage {stage}: {process}" for name, (stage, gpu, process) in uses.items()},
    )


def _caveat_on_hosts(title: str, text: str, found: Mapping[str, str]) -> Iterator[SummaryLine]:
    """Yield a caveat if it applies to a host. `found`: host -> what was found there."""
    if found:
        hosts = join_names([f"{name[:MAX_NAME_LENGTH]} ({what})" for name, what in found.items()], 5)
        yield SummaryLine(kind=LineKind.CAVEAT, title=title, text=f"{text}: {hosts}", values={"hosts": len(found)})


def _names(names: Sequence[str], most: int) -> str:
    return join_names([name[:MAX_NAME_LENGTH] for name in names], most)


def _soak_lines(summary: SummaryInput) -> Iterator[SummaryLine]:
    """If the plan has a soak (a long test under load), yield how long it lasted, and the rates whose drift is not judged."""
    plan, hosts = summary.plan, summary.hosts
    planned = next((stage.duration_s for stage in plan.stages if stage.name == SOAK), 0.0)
    soaks = [host.soak for host in hosts if host.soak]
    if planned:
        finished = [soak for soak in soaks if soak.ended and not soak.reason]
        unequal = 0 < len(soaks) != len(finished)
        shortest = f"; the shortest soak was {format_span(min(soak.soaked_s for soak in soaks))}" if unequal else ""
        rounds = sum(soak.rounds for soak in soaks)
        in_all = f"{counted(rounds, 'round')} in all"
        short_soaks = [host.name for host in hosts if host.soak and host.soak.planned_s < REFERENCE_S]
        not_judged = sorted({name for host in short_soaks for name in summary.facts[host].rates_without_drift})
        text = f"{len(finished)} of {len(hosts)} hosts soaked {format_span(planned)}{shortest} ({in_all})"
        values = {"total": len(hosts), "finished": len(finished), "rounds": rounds}
        yield SummaryLine(kind=LineKind.SOAK, title="Soak", text=text, values=values)
        if not_judged and not plan.rehearsal:
            text = f"NOT JUDGED for {', '.join(not_judged)} (too few values: plan a soak of at least one hour)"
            yield SummaryLine(kind=LineKind.NOT_JUDGED, title="Drift", text=text)


def _incomplete_gang_lines(plan: Plan, facts: Mapping[str, HostFacts]) -> Iterator[SummaryLine]:
    """Yield caveats on gangs (a gang: the hosts of one multi-node launch) that were not measured with all of their hosts.

    For each host, the last launch that finished with a result counts. A gang whose launches all ended without a result has a
    caveat too.
    """
    # If a rank has no device, the launch finishes on the other hosts but measures nothing. Such a launch has a `culprit`.
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
            names = ", ".join(members[:MAX_GANG_NAMES]) + (" …" if len(members) > MAX_GANG_NAMES else "")
            absent = [host for host in planned if host not in members]
            without = f", without {', '.join(absent[:MAX_GANG_NAMES])}{' …' if len(absent) > MAX_GANG_NAMES else ''}"
            text = f"{len(members)} of {len(planned)} hosts were measured together ({names}){without if absent else ''}"
            values = {"total": len(planned), "measured": len(members)}
            yield SummaryLine(kind=LineKind.CAVEAT, title=f"Gang {gang}", text=text, values=values)
        if not groups and any(facts[host].gang_launches for host in planned):
            text = f"no launch of its {len(planned)} hosts finished with a result"
            values = {"total": len(planned), "measured": 0}
            yield SummaryLine(kind=LineKind.CAVEAT, title=f"Gang {gang}", text=text, values=values)


def _benchmark(item: Verdict | Judged) -> str:
    """Return the benchmark whose result was judged; empty for anything else, such as a health reading of host or GPU."""
    first = item.name.removeprefix(f"{DRIFT}.").split(".")[0]
    if item.name == DURATION.name:
        first = str(item.params.get("benchmark", ""))
    return first if first in TITLES else ""


def _check_lines(summary: SummaryInput) -> Iterator[SummaryLine]:
    """Yield one line for the health readings, then one for each benchmark, with the most severe state over the fleet."""
    plan = summary.plan
    planned = {benchmark for stage in plan.stages for benchmark in stage.benchmarks}
    lists = {id(expected): expected for expected in map(plan.expected_of, plan.hosts)}
    # A planned benchmark is shown only if a host must measure one of its figures. The plan lists no figures of RDMA ports, so a
    # benchmark with verdicts is shown too.
    judged = {*map(_benchmark, summary.judged), *map(_benchmark, summary.exceptions)}
    planned &= {item.name.split(".")[0] for expected in lists.values() for item in expected} | judged
    states: dict[str, dict[tuple[str, bool], set[tuple[str, str]]]] = {}
    for row in summary.judged:
        if row.passed:
            states.setdefault(_benchmark(row), {}).setdefault((PASS, False), set())
    for verdict in summary.exceptions:
        state = verdict.verdict, verdict.waiver is not None
        part = verdict.host, verdict.part_scope
        states.setdefault(_benchmark(verdict), {}).setdefault(state, set()).add(part)
        # A verdict on the record of a host applies to every benchmark, and a verdict on a stage to every benchmark of this stage.
        for stage in plan.stages:
            if verdict.name in ("record", f"stage.{stage.name}"):
                for benchmark in stage.benchmarks:
                    states.setdefault(benchmark, {}).setdefault(state, set()).add(part)
    health = "Host health" if plan.rehearsal else "Host and GPU health"
    titles = {"": health, **{name: title for name, title in TITLES.items() if name in planned}}
    values_only = speed_unjudged(summary.facts, summary.judged)
    for benchmark, title in titles.items():
        worst, text, parts = _worst_state(states.get(benchmark, {}))
        text = VALUES_ONLY if worst == PASS and benchmark in values_only else text
        text = UNCOMPARED if not worst and benchmark in summary.compared else text
        yield SummaryLine(
            kind=LineKind.CHECK, title=title, text=text, verdict=worst, values=_affected(parts, summary.hosts)
        )


def _affected(parts: Collection[tuple[str, str]], hosts: Sequence[HostReport]) -> dict[str, int]:
    """Return the number of affected GPUs, and of affected hosts without an affected GPU, each with the total. Leave out zeros."""
    gpus = {(host, scope) for host, scope in parts if Scope.parse(scope).device_kind == "gpu"}
    other_hosts = {host for host, _ in parts} - {host for host, _ in gpus}
    counts = {"gpus": len(gpus), "gpus_total": sum(len(host.gpus) for host in hosts)} if gpus else {}
    return counts | ({"hosts": len(other_hosts), "hosts_total": len(hosts)} if other_hosts else {})


def _worst_state(
    states: Mapping[tuple[str, bool], Collection[tuple[str, str]]],
) -> tuple[str, str, Collection[tuple[str, str]]]:
    """Return verdict, text and parts of the most severe state; an empty verdict and UNJUDGED if there is no state.

    `states`: (verdict, whether it is waived) -> parts.
    """
    texts = {
        (FAIL, False): "FAIL",
        (INCONCLUSIVE, False): "INCOMPLETE",
        (FAIL, True): "FAIL (waived)",
        (INCONCLUSIVE, True): "INCOMPLETE (waived)",
        (PASS, False): "PASS",
    }
    worst = ((state[0], text, states[state]) for state, text in texts.items() if state in states)
    return next(worst, ("", UNJUDGED, ()))


def pci_slots(gpus: Iterable[tuple[str, Gpu]]) -> dict[tuple[str, str], str]:
    """Return (host, scope) of each GPU -> its PCI address in the notation of sysfs and lspci."""
    return {(host, f"gpu={gpu.index}"): pci_address(gpu.pci_bus_id) for host, gpu in gpus if gpu.pci_bus_id}


def cause_lines(
    causes: Iterable[Cause],
    verdicts: Sequence[Verdict],
    slots: Mapping[tuple[str, str], str],
    hosts: Iterable[HostReport] = (),
) -> list[SummaryLine]:
    """Return one line per cause that is not waived, the most urgent first; after _MAX_CAUSES lines, one line counts the rest.

    If there are too many causes, the first causes of all hosts are preferred to their later causes. The last lines name
    other hosts that are not accepted: one line for the rejected hosts, and one for the incomplete ones.

    Args:
        causes: the causes; `Cause.verdicts` are positions in `verdicts`.
        verdicts: all verdicts of the report.
        slots: (host, scope) of each GPU -> its PCI address (`pci_slots`).
        hosts: the hosts that the last lines may name. Hosts in the cause lines are not named again.
    """
    shown, rest = select_causes(causes)
    lines = [_cause_line(cause, describe_cause(cause, verdicts[cause.verdicts[0]], slots)) for cause in shown]
    if rest:
        text = f"… and {rest} more cause{'s' if rest > 1 else ''} in the report"
        lines.append(SummaryLine(kind=LineKind.MORE, text=text, values={"reasons": rest}))
    return [*lines, *_other_host_lines(hosts, {host for cause in shown for host in cause.hosts})]


def select_causes(causes: Iterable[Cause]) -> tuple[list[Cause], int]:
    """Return the causes that a summary shows, and the number of the others. Waived causes are in neither."""
    blocking = [cause for cause in causes if cause.waiver is None]
    first_of_host = {cause.host: number for number, cause in reversed([*enumerate(blocking)])}
    by_need = sorted(range(len(blocking)), key=lambda number: first_of_host[blocking[number].host] != number)
    shown = [blocking[number] for number in sorted(by_need[:_MAX_CAUSES])]
    return shown, len(blocking) - len(shown)


def _other_host_lines(hosts: Iterable[HostReport], named: Collection[str]) -> Iterator[SummaryLine]:
    """Yield lines with the hosts that are not accepted and are not in `named`."""
    decisions = {host.name: host.decision for host in hosts if host.name not in named}
    for decision, verdict, title in (
        (REJECTED, FAIL, "Failed as well"),
        (INCOMPLETE, INCONCLUSIVE, "Incomplete as well"),
    ):
        names = [host for host, decided in decisions.items() if decided == decision]
        more = f" and {counted(len(names) - MAX_OTHER_HOSTS, 'more host')}" if len(names) > MAX_OTHER_HOSTS else ""
        if names:
            text = f"{', '.join(names[:MAX_OTHER_HOSTS])}{more}"
            yield SummaryLine(kind=LineKind.MORE, title=title, text=text, verdict=verdict, values={"hosts": len(names)})


@dataclass(frozen=True, kw_only=True)
class CauseText:
    """A cause in words."""

    result: str
    """FAIL or INCOMPLETE."""
    action: str
    """What to do, for example `Inspect the hardware`; empty if there is nothing to do."""
    what: str
    """The part, what is wrong with it, its serial and PCI address, and why."""
    checks: str
    """Name of the first verdict in `Cause.verdicts`, and number of the other verdicts: `xid.count and 280 more checks`."""


def describe_cause(cause: Cause, first: Verdict, slots: Mapping[tuple[str, str], str]) -> CauseText:
    """Return a cause in words. `first` is the first of its verdicts; `slots` is the result of `pci_slots`."""
    slot = slots.get((cause.host, Scope.parse(cause.part).device), "") if len(cause.hosts) == 1 else ""
    serial = cause.serial if len(cause.hosts) == 1 else ""
    identity = ", ".join(f"{name} {value}" for name, value in (("serial", serial), ("PCI", slot)) if value)
    more = len(cause.verdicts) - 1
    return CauseText(
        result="FAIL" if cause.verdict == FAIL else "INCOMPLETE",
        action=cause_action(cause.verdict, cause.action, cause.problem),
        what=f"{cause.title}{f' ({identity})' if identity else ''}{f': {cause.why}' if cause.why else ''}",
        checks=f"{first.name} and {more} more check{'s' if more > 1 else ''}" if more else first.name,
    )


def _cause_line(cause: Cause, text: CauseText) -> SummaryLine:
    return SummaryLine(
        kind=LineKind.REASON,
        title=text.result,
        text=f"{text.what}{f'; {text.action}' if text.action else ''} [{text.checks}]",
        verdict=cause.verdict,
        host=cause.host,
        part=cause.part,
        values={"verdicts": len(cause.verdicts)},
    )
