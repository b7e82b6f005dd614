"""The decision in a sentence, and the state of each kind of test: what stands on top of the report."""

from __future__ import annotations

from dataclasses import dataclass

from fleet.report.format import clean
from fleet.report.tables.summary_text import LINE_LIMIT
from schemas.reports import ACCEPTED, FAIL, INCOMPLETE, INCONCLUSIVE, PASS, REJECTED, FleetReport, LineKind

REHEARSAL_NOTICE = (
    "This run rehearsed the pipeline on CPUs. No GPU was looked at and none was judged: it accepts no hardware."
)
SIMULATED_NOTICE = (
    "No host was looked at: rackproof simulate made up every host, every GPU and every figure. It accepts no hardware."
)

_TONES = {ACCEPTED: PASS, REJECTED: FAIL, INCOMPLETE: INCONCLUSIVE}


@dataclass(frozen=True, kw_only=True)
class Check:
    """One kind of test over the whole fleet."""

    title: str
    word: str
    state: str


def notice(report: FleetReport) -> str:
    """Why the report accepts no hardware, whatever it decides; empty where it may."""
    return {"SIMULATED": SIMULATED_NOTICE, "REHEARSAL": REHEARSAL_NOTICE}.get(report.mark, "")


def checks(report: FleetReport) -> list[Check]:
    """Return the state of each kind of test that was judged (`Collectives: PASS`)."""
    return [
        Check(title=line.title, word=line.text, state=line.verdict)
        for line in report.acceptance.lines
        if line.kind == LineKind.CHECK and line.verdict
    ]


def caveats(report: FleetReport) -> list[str]:
    """Return what qualifies the decision: why the run was made, what was left out, and what counts for less."""
    return [clean(str(line), LINE_LIMIT) for line in report.acceptance.lines if line.kind == LineKind.CAVEAT]


def manifest(report: FleetReport) -> str:
    """`64 of 64 parts as ordered`; empty where the run had no manifest."""
    return next((line.text for line in report.acceptance.lines if line.kind == LineKind.MANIFEST), "")


def tone(decision: str) -> str:
    """The verdict that a decision looks like; anything unknown looks inconclusive."""
    return _TONES.get(decision, INCONCLUSIVE)


def sentence(report: FleetReport) -> str:
    """What was decided and on what grounds."""
    failed = [verdict for verdict in report.verdicts if verdict.verdict == FAIL and verdict.stands]
    open_ = sum(verdict.verdict == INCONCLUSIVE and verdict.stands for verdict in report.verdicts)
    waived = sum(verdict.waiver is not None for verdict in report.verdicts)
    if not report.verdicts:
        return "No verdict was reached on anything, so nothing is known of this fleet."
    if report.decision == REJECTED:
        where = len({verdict.host for verdict in failed})
        more = f" {_count(open_, 'more verdict')} could not be reached." if open_ else ""
        are = "is a failure" if len(failed) == 1 else "are failures"
        return f"{_count(len(failed), 'verdict')} on {where} of {_count(len(report.hosts), 'host')} {are}.{more}"
    if report.decision == ACCEPTED:
        passed = sum(verdict.verdict == PASS for verdict in report.verdicts)
        if waived:
            return (
                f"{passed} verdicts on {_count(len(report.hosts), 'host')} are passes; {waived} are not, and are accepted on the "
                "word of those who waived them."
            )
        return (
            f"{report.coverage.measured} of {report.coverage.expected} expected observations were measured, "
            f"and all {passed} verdicts on {_count(len(report.hosts), 'host')} are passes."
        )
    missing = report.coverage.expected - report.coverage.measured
    return (
        f"Nothing failed, but {_count(open_, 'verdict')} could not be reached and "
        f"{_count(missing, 'expected observation')} could not be measured. What is not known is not accepted."
    )


def _count(number: int, one: str) -> str:
    return f"{number} {one if number == 1 else one + 's'}"


def gpu_count(report: FleetReport) -> int:
    """GPUs that the hosts named."""
    return sum(len(host.gpus) for host in report.hosts)


def hosts_and_gpus(report: FleetReport) -> str:
    """`16 hosts, 128 GPUs`; in a rehearsal the hosts alone, and that no GPU counts."""
    gpus = "no GPU judged" if report.rehearsal else _count(gpu_count(report), "GPU")
    made_up = ", all of them simulated" if report.simulated else ""
    return f"{_count(len(report.hosts), 'host')}, {gpus}{made_up}"


def unjudged(report: FleetReport) -> list[tuple[str, tuple[str, ...]]]:
    """Stage (empty where none is told) and the names that were measured in it and judged by no criterion.

    Operations that lack a criterion for the same figure are told together: `collective.{all_gather,broadcast}.algbw`.
    """
    found: dict[str, dict[tuple[str, str], list[str]]] = {}
    for figure in report.not_judged:
        first, *between = figure.name.split(".")
        last = between.pop() if between else ""
        last += f" of {figure.host} {figure.scope}" if figure.host else ""
        found.setdefault(figure.stage, {}).setdefault((first, last), []).append(".".join(between))
    return [
        (stage, tuple(_together(*key, middles) for key, middles in names.items())) for stage, names in found.items()
    ]


def _together(first: str, last: str, middles: list[str]) -> str:
    middle = f"{{{','.join(middles)}}}" if len(middles) > 1 else middles[0]
    return ".".join(part for part in (first, middle, last) if part)
