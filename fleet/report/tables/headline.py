"""Build the top of the report: decision, numbers, facts, state of each kind of test. List the figures without a criterion."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from fleet.quantities import counted
from fleet.report.formatting import clean, elapsed, format_time, join_names
from fleet.report.summary import pci_slots
from fleet.report.tables.summary_text import LINE_LIMIT
from fleet.scope_text import describe_scope
from schemas.reports import ACCEPTED, FAIL, INCOMPLETE, INCONCLUSIVE, PASS, REJECTED, FleetReport, LineKind
from schemas.scopes import Scope

REHEARSAL_NOTICE = "This run rehearsed the pipeline on CPUs. No GPU was tested or judged. This run accepts no hardware."
SIMULATED_NOTICE = (
    "No host was tested: rackproof simulate generated every host, GPU and figure. This run accepts no hardware."
)

_MAX_NAMES = 4
_TONES = {ACCEPTED: PASS, REJECTED: FAIL, INCOMPLETE: INCONCLUSIVE}


@dataclass(frozen=True, kw_only=True)
class Check:
    """The result of one kind of test over the whole fleet."""

    title: str
    word: str
    """The result as text, such as `PASS` or `FAIL (waived)`."""
    state: str
    """The verdict: `pass`, `fail` or `inconclusive`."""


class PartToReturn(NamedTuple):
    """A part to return to its vendor."""

    host: str
    part: str
    serial: str
    slot: str
    """PCI address; empty if it is not known."""


def notice(report: FleetReport) -> str:
    """Return why the report accepts no hardware even if it passes; empty for a report on real hardware."""
    return {"SIMULATED": SIMULATED_NOTICE, "REHEARSAL": REHEARSAL_NOTICE}.get(report.mark, "")


def checks(report: FleetReport) -> list[Check]:
    """Return the state of each kind of test that was judged (`Collectives: PASS`)."""
    return [
        Check(title=line.title, word=line.text, state=line.verdict)
        for line in report.acceptance.lines
        if line.kind == LineKind.CHECK and line.verdict
    ]


def caveats(report: FleetReport) -> list[str]:
    """Return the caveats of the decision."""
    return [clean(str(line), LINE_LIMIT) for line in report.acceptance.lines if line.kind == LineKind.CAVEAT]


def manifest(report: FleetReport) -> str:
    """Return `64 of 64 parts as ordered`; empty if no ordered parts were compared, for example without a manifest."""
    return _line(report, LineKind.MANIFEST)


def _line(report: FleetReport, kind: str) -> str:
    """Return the text of the first summary line of this kind; empty if there is none."""
    return next((line.text for line in report.acceptance.lines if line.kind == kind), "")


def tone(decision: str) -> str:
    """Return the verdict that has the same color as the decision; `inconclusive` for an unknown decision."""
    return _TONES.get(decision, INCONCLUSIVE)


def sentence(report: FleetReport) -> str:
    """Return the decision and the reason for it in one or two sentences."""
    failed, inconclusive = _blocking(report, FAIL), _blocking(report, INCONCLUSIVE)
    waived = sum(verdict.waiver is not None for verdict in report.verdicts)
    hosts = counted(len(report.hosts), "host")
    if not report.verdicts and not report.left_out:
        return "No observation was judged, so there is no result for this fleet."
    if report.decision == REJECTED:
        failing_hosts = sum(host.decision == REJECTED for host in report.hosts)
        more = f" {counted(inconclusive, 'more check')} could not be evaluated." if inconclusive else ""
        return f"{counted(failed, 'check')} failed on {failing_hosts} of {hosts}.{more}"
    if report.decision == ACCEPTED:
        # The report of a large fleet leaves out passes, and has their number in `left_out`.
        passed = counted(sum(verdict.verdict == PASS for verdict in report.verdicts) + report.left_out, "check")
        if waived:
            return f"{passed} passed on {hosts}; {waived} {'was' if waived == 1 else 'were'} waived."
        return (
            f"{report.coverage.measured} of {report.coverage.expected} expected observations were measured, "
            f"and all {passed} on {hosts} passed."
        )
    missing = report.coverage.expected - report.coverage.measured
    unmeasured = f" and {counted(missing, 'expected observation')} could not be measured" if missing else ""
    return (
        f"No check failed, but {counted(inconclusive, 'check')} could not be evaluated{unmeasured}. "
        "Anything not verified is not accepted."
    )


def _blocking(report: FleetReport, kind: str) -> int:
    """Return the number of verdicts of this kind without a waiver. Verdicts that the report does not list count as not waived."""
    listed = [verdict for verdict in report.verdicts if verdict.verdict == kind]
    # In the report on one host (`--host`), `judged` is empty. Then `total` is 0, and only the listed verdicts count.
    total = sum(row.failed if kind == FAIL else row.inconclusive for row in report.judged)
    return max(total - len(listed), 0) + sum(verdict.blocks_acceptance for verdict in listed)


def causes_sentence(report: FleetReport) -> str:
    """Return how many causes keep how many hosts from acceptance, and how many parts must be returned; empty without a cause."""
    causes = [cause for cause in report.causes if cause.waiver is None]
    if not causes:
        return ""
    hosts = sum(host.decision != ACCEPTED for host in report.hosts)
    parts = len(parts_to_return(report))
    found = counted(len(causes), "cause") + (" keeps " if len(causes) == 1 else " keep ")
    return (
        f"{found}{hosts} of {counted(len(report.hosts), 'host')} from {'passing' if report.mark else 'acceptance'}. "
        + (f"{counted(parts, 'part')} must be returned." if parts else "No part needs to be returned.")
    )


def parts_to_return(report: FleetReport) -> list[PartToReturn]:
    """Return the parts that must be returned because of their failures, the most urgent first."""
    slots = pci_slots((host.name, gpu) for host in report.hosts for gpu in host.gpus)
    parts: dict[tuple[str, str], PartToReturn] = {}
    for cause in report.causes:
        if cause.verdict != FAIL or cause.action != "rma" or cause.waiver is not None:
            continue
        for part in cause.parts:
            slot = slots.get((part.host, Scope.parse(part.scope).device), "")
            to_return = PartToReturn(part.host, describe_scope(part.scope), part.serial, slot)
            parts.setdefault((part.host, part.scope), to_return)
    return list(parts.values())


def numbers(report: FleetReport) -> list[tuple[str, str, str]]:
    """Return the numbers at the top: number, what it counts, and the verdict whose color it has (empty: no color)."""
    words = ("passed", "failed", "incomplete") if report.mark else ("accepted", "rejected", "incomplete")
    rows = []
    for decision, word in zip((ACCEPTED, REJECTED, INCOMPLETE), words, strict=True):
        count = sum(host.decision == decision for host in report.hosts)
        rows.append((str(count), f"{'host' if count == 1 else 'hosts'} {word}", _TONES[decision] if count else ""))
    if not report.rehearsal:
        on = sum(bool(host.gpus) for host in report.hosts)
        where = "" if on == len(report.hosts) else f" on {on} of {len(report.hosts)} hosts"
        rows.append((str(gpu_count(report)), f"{'GPU' if gpu_count(report) == 1 else 'GPUs'} reported{where}", ""))
    parts = len(parts_to_return(report))
    return [*rows, (str(parts), f"{'part' if parts == 1 else 'parts'} to return", FAIL if parts else "")]


def certificate(report: FleetReport) -> list[tuple[str, str]]:
    """Return the facts of the run, such as site and GPU model, as (name, value). Facts without a value are left out."""
    racks = list(dict.fromkeys(host.rack for host in report.hosts))
    models = Counter(gpu.name for host in report.hosts for gpu in host.gpus)
    packs = list(dict.fromkeys(pack for host in report.hosts for pack in host.packs))
    tested, took = len(checks(report)), elapsed(report.began, report.ended)
    facts = [
        ("Site", report.site),
        ("Rack" if len(racks) == 1 else f"{len(racks)} racks", _few(racks)),
        ("Purchase order", report.purchase_order),
        ("Operator", report.operator),
        ("GPU model", _few([f"{name} × {count}" if len(models) > 1 else name for name, count in models.most_common()])),
        ("Tested", ", ".join(text for text in (counted(tested, "kind") + " of tests", took) if text)),
        ("Profile", report.profile),
        ("Ended", format_time(report.ended)),
        ("Run", report.run_id),
        ("Criteria", f"{_few(packs)}, Rackproof {report.rackproof}" if packs else f"Rackproof {report.rackproof}"),
        ("Manifest", manifest(report)),
        ("Cabling", _line(report, LineKind.WIRING)),
    ]
    return [(name, text) for name, text in facts if text]


def _few(names: Sequence[str]) -> str:
    return join_names([clean(name) for name in names], _MAX_NAMES)


def gpu_count(report: FleetReport) -> int:
    """Return the number of GPUs that the hosts reported."""
    return sum(len(host.gpus) for host in report.hosts)


def hosts_and_gpus(report: FleetReport) -> str:
    """Return `16 hosts, 128 GPUs`; in a rehearsal `16 hosts, no GPU judged`."""
    gpus = "no GPU judged" if report.rehearsal else counted(gpu_count(report), "GPU")
    simulated = ", all of them simulated" if report.simulated else ""
    return f"{counted(len(report.hosts), 'host')}, {gpus}{simulated}"


def unjudged(report: FleetReport) -> list[tuple[str, tuple[str, ...]]]:
    """Return (stage, figures) for the figures that no criterion judges. The stage is empty for observations without a stage.

    Figures that differ only in the operation share an entry: `collective.{all_gather,broadcast}.algbw`.
    """
    by_stage: dict[str, dict[tuple[str, str], list[str]]] = {}
    for figure in report.not_judged:
        first, *between = figure.name.split(".")
        last = between.pop() if between else ""
        last += f" of {figure.host} {figure.scope}" if figure.host else ""
        by_stage.setdefault(figure.stage, {}).setdefault((first, last), []).append(".".join(between))
    return [
        (stage, tuple(_join_operations(*key, middles) for key, middles in names.items()))
        for stage, names in by_stage.items()
    ]


def _join_operations(first: str, last: str, middles: list[str]) -> str:
    middle = f"{{{','.join(middles)}}}" if len(middles) > 1 else middles[0]
    return ".".join(part for part in (first, middle, last) if part)
