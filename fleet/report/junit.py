"""`junit.xml` for CI: a suite a host, a case a series of observations that a criterion judged.

What failed is a failure. What could not be told is an error, never `skipped`, which CI systems take for success; `skipped` is
what somebody answers for, by name, until a day (a waiver). The first suite is the fleet's; its case `decision` passes where the
fleet is accepted and nowhere else, so that no report without a verdict is green.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from xml.sax.saxutils import escape, quoteattr

from fleet.report.formatting import TEXT_LIMIT, action_name, clean, decision_name, params_text, status, value_and_limit
from fleet.report.observations import by_host
from fleet.report.tables import headline
from fleet.report.tables.summary_text import LINE_LIMIT
from schemas.reports import (
    ACCEPTED,
    EXCEPTIONS,
    FAIL,
    INCONCLUSIVE,
    PASS,
    REJECTED,
    FleetReport,
    HostReport,
    Judged,
    Verdict,
)

_ILLEGAL = str.maketrans({"\ufffe": "\ufffd", "\uffff": "\ufffd"})
"""Of what `clean` leaves, the characters that XML 1.0 does not allow."""
WAIVED = "waived"
_ELEMENTS = {FAIL: "failure", INCONCLUSIVE: "error", WAIVED: "skipped"}
_VERDICTS = {ACCEPTED: PASS, REJECTED: FAIL}
_MOST_STRAYS = 100


@dataclass(frozen=True, kw_only=True)
class Case:
    """One test case."""

    place: str
    """Its class: run, rack and host."""
    name: str
    verdict: str
    """pass, fail, inconclusive or waived; anything else is an error."""
    kind: str = ""
    message: str = ""
    lines: tuple[str, ...] = ()
    note: str = ""
    """Of a case that passes."""


def render_junit(report: FleetReport) -> Iterator[str]:
    """The document in pieces, one a host."""
    of_host = by_host(report.verdicts)
    yield '<?xml version="1.0" encoding="UTF-8"?>\n'
    yield f"<testsuites name={_quoted(_marked(report, f'rackproof {report.run_id}: {status(report)}'))}>\n"
    yield _fleet(report)
    for host in report.hosts:
        yield _host(report, host, of_host.get(host.name, ()))
    yield "</testsuites>\n"


def _fleet(report: FleetReport) -> str:
    """The decision; in a large fleet also what passed, a case a criterion, which stands in no host's suite."""
    place = _place(report, "fleet")
    verdict = _VERDICTS.get(report.decision, INCONCLUSIVE)
    cases = [
        Case(
            place=place,
            name=_marked(report, "decision"),
            verdict=verdict,
            kind=report.decision,
            message=headline.sentence(report),
            lines=report.acceptance.summary,
            note=headline.sentence(report),
        )
    ]
    if report.detail == EXCEPTIONS:
        cases += [_passed(place, row) for row in report.judged if row.passed]
    strays = [f"not believed: {item.path}: {item.reason}" for item in report.quarantined[:_MOST_STRAYS]]
    about = {"run_id": report.run_id, "profile": report.profile, "mark": report.mark, "rackproof": report.rackproof}
    about |= {"decision": decision_name(report, report.decision), "status": status(report)}
    about |= {f"caveat.{number}": line for number, line in enumerate(headline.caveats(report), 1)}
    return _suite(_marked(report, "fleet"), cases, about, strays)


def _passed(place: str, row: Judged) -> Case:
    params = params_text(row.params)
    name = f"{row.criterion}: {row.name}{f' ({params})' if params else ''}{f', stage {row.stage}' if row.stage else ''}"
    return Case(
        place=place, name=f"{name}: what passed", verdict=PASS, note=f"{row.passed} verdicts pass: {row.source}"
    )


def _host(report: FleetReport, host: HostReport, verdicts: Sequence[Verdict]) -> str:
    place = _place(report, host.rack, host.name)
    cases = [_case(place, verdict) for verdict in verdicts]
    explained = any(case.verdict not in (PASS, WAIVED) for case in cases)
    if not cases or (host.decision != ACCEPTED and not explained):
        told = f"the host is {decision_name(report, host.decision)}"
        verdict = _VERDICTS.get(host.decision, INCONCLUSIVE)
        note = f"{told}; what passed is told of the fleet as a whole"
        cases.append(Case(place=place, name="decision", verdict=verdict, kind=host.decision, message=told, note=note))
    about = {"rack": host.rack, "decision": decision_name(report, host.decision), "record": host.record}
    return _suite(_marked(report, host.name), cases, about, host.events, host.name, report.began)


def _case(place: str, verdict: Verdict) -> Case:
    params = params_text(verdict.params)
    part = "" if verdict.scope == "host" else f" {verdict.scope}"
    # A case is known by its name from run to run: whom its failure is laid to is no part of it.
    serial = f" serial {verdict.serial}" if verdict.serial and not verdict.part else ""
    stage = f", stage {verdict.stage}" if verdict.stage else ""
    found, wanted = value_and_limit(verdict)
    facts = {
        "criterion": verdict.criterion,
        "found": found if verdict.value is not None else "",
        "wanted": wanted if verdict.limit is not None else "",
        "action": action_name(verdict.action),
        "source": verdict.source,
        "basis": verdict.basis,
        "detail": verdict.detail,
        "severity": verdict.severity,
    }
    waived = f"{verdict.verdict}, {verdict.waiver}: " if verdict.waiver else ""
    return Case(
        place=place,
        name=f"{verdict.criterion}: {verdict.name}{f' ({params})' if params else ''}{part}{serial}{stage}",
        verdict=WAIVED if verdict.waiver else verdict.verdict,
        kind=verdict.criterion if verdict.verdict != FAIL or verdict.action == "none" else verdict.action,
        message=f"{waived}{verdict.reason}",
        lines=tuple(f"{key}: {text}" for key, text in facts.items() if text),
    )


def _suite(
    name: str,
    cases: Sequence[Case],
    about: Mapping[str, str],
    lines: Iterable[str] = (),
    host: str = "",
    began: str = "",
) -> str:
    failed = sum(case.verdict == FAIL for case in cases)
    waived = sum(case.verdict == WAIVED for case in cases)
    errors = sum(case.verdict != PASS for case in cases) - failed - waived
    where = f" hostname={_quoted(host)}" if host else ""
    when = f" timestamp={_quoted(began.removesuffix('Z'))}" if began else ""
    counts = f'tests="{len(cases)}" failures="{failed}" errors="{errors}" skipped="{waived}"'
    pieces = [f"  <testsuite name={_quoted(name)} {counts}{where}{when}>\n    <properties>\n"]
    pieces += [
        f"      <property name={_quoted(key)} value={_quoted(text, LINE_LIMIT)}/>\n"
        for key, text in about.items()
        if text
    ]
    pieces += ["    </properties>\n", *map(_xml, cases)]
    told = "\n".join(map(_text, lines))
    pieces += [f"    <system-out>{told}</system-out>\n"] if told else []
    return "".join([*pieces, "  </testsuite>\n"])


def _xml(case: Case) -> str:
    head = f"    <testcase classname={_quoted(case.place)} name={_quoted(case.name)}"
    if case.verdict == PASS:
        return f"{head}><system-out>{_text(case.note)}</system-out></testcase>\n" if case.note else f"{head}/>\n"
    element = _ELEMENTS.get(case.verdict, "error")
    lines = "\n".join(map(_text, case.lines))
    return (
        f"{head}>\n      <{element} type={_quoted(case.kind)} message={_quoted(case.message)}>{lines}</{element}>\n"
        "    </testcase>\n"
    )


def _place(report: FleetReport, *parts: str) -> str:
    """A class name; CI systems make a tree of its dots."""
    return ".".join(part.replace(".", "_") for part in (report.mark, "rackproof", *parts) if part)


def _marked(report: FleetReport, text: str) -> str:
    """`text`, after SIMULATED or REHEARSAL where no GPU was looked at."""
    return f"{report.mark} {text}".strip()


def _text(text: str) -> str:
    return escape(clean(text).translate(_ILLEGAL))


def _quoted(text: str, limit: int = TEXT_LIMIT) -> str:
    return quoteattr(clean(text, limit).translate(_ILLEGAL))
