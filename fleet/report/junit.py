"""Render `junit.xml` for CI systems: a suite for the fleet, then a suite for each host.

The suite of a host has a case for each cause (one problem, with all checks that show it or follow from it). If the report lists
passes, the suite also has a case for each passed check. A cause that several hosts share is a case only in the suite of the first
of them. The text of the case lists the checks of the cause.

A failed cause becomes a `failure`, and an inconclusive one an `error`. CI systems count `skipped` cases as success, so only what
is waived becomes `skipped`. The case `decision` of the fleet passes only if the fleet is accepted.

The names of the cases of a suite are distinct, because GitLab shows only the first of several cases with one name.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from xml.sax.saxutils import escape, quoteattr

from fleet.diagnosis.diagnose import NOT_VERIFIED, ONE_PER_READING, WITHOUT_COMPARISON
from fleet.quantities import counted
from fleet.report.formatting import (
    TEXT_LIMIT,
    action_name,
    cause_action,
    clean,
    decision_name,
    params_text,
    status,
    value_and_limit,
)
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
    Cause,
    FleetReport,
    HostReport,
    Judged,
    Verdict,
)

_ILLEGAL = str.maketrans({"\ufffe": "\ufffd", "\uffff": "\ufffd"})
"""Characters that `clean` keeps, although XML 1.0 does not allow them, and their replacements."""
WAIVED = "waived"
_ELEMENTS = {FAIL: "failure", INCONCLUSIVE: "error", WAIVED: "skipped"}
_VERDICTS = {ACCEPTED: PASS, REJECTED: FAIL}
_MAX_REJECTED = 100
"""Maximum number of rejected input files that the suite of the fleet lists."""
_MAX_CHECKS = 40
"""Maximum number of checks that the text of a case lists for its cause."""
_SEVERAL_PER_PART = (*ONE_PER_READING, NOT_VERIFIED, *WITHOUT_COMPARISON.values())
"""Problems that a part may have several times. The names of their cases include the name of the reading."""
_NUMBERED_LIMIT = TEXT_LIMIT - 50
"""A name to which a number is added is cut to this many characters, so that the number is not cut off."""


@dataclass(frozen=True, kw_only=True)
class JunitCase:
    """One test case."""

    class_name: str
    """`rackproof.RACK.HOST` or `rackproof.fleet`; begins with `REHEARSAL.` or `SIMULATED.` if no GPU was tested."""
    name: str
    verdict: str
    """`pass`, `fail`, `inconclusive` or `waived`. Any other text is rendered like `inconclusive`."""
    kind: str = ""
    """Attribute `type` of the element (`failure`, `error` or `skipped`) of a case that does not pass."""
    message: str = ""
    lines: tuple[str, ...] = ()
    """Text of that element."""
    note: str = ""
    """Output of a case that passes."""


def render_junit(report: FleetReport) -> Iterator[str]:
    """Yield the document in pieces: the suite of the fleet, then one piece per host."""
    positions_in_causes = {position for cause in report.causes for position in cause.verdicts}
    of_host = by_host(
        [verdict for position, verdict in enumerate(report.verdicts) if position not in positions_in_causes]
    )
    causes: dict[str, list[Cause]] = {}
    titles: dict[str, str] = {}
    for cause in report.causes:
        causes.setdefault(cause.host, []).append(cause)
        for name in (*cause.hosts, *(report.verdicts[position].host for position in cause.verdicts)):
            titles.setdefault(name, cause.title)
    yield '<?xml version="1.0" encoding="UTF-8"?>\n'
    yield f"<testsuites name={_quoted(_marked(report, f'rackproof {report.run_id}: {status(report)}'))}>\n"
    yield _fleet(report)
    for host in report.hosts:
        class_name = _class_name(report, host.rack, host.name)
        cases = [_cause(class_name, cause, report.verdicts) for cause in causes.get(host.name, ())]
        cases += [_case(class_name, verdict) for verdict in of_host.get(host.name, ())]
        yield _host(report, host, cases, titles.get(host.name, ""))
    yield "</testsuites>\n"


def _fleet(report: FleetReport) -> str:
    """Return the suite of the fleet.

    It has the case `decision`. If the report lists no passes, the suite also counts them: one case for each entry of
    `report.judged` whose `passed` is not 0.
    """
    class_name = _class_name(report, "fleet")
    verdict = _VERDICTS.get(report.decision, INCONCLUSIVE)
    cases = [
        JunitCase(
            class_name=class_name,
            name=_marked(report, "decision"),
            verdict=verdict,
            kind=report.decision,
            message=headline.sentence(report),
            lines=report.acceptance.summary,
            note=headline.sentence(report),
        )
    ]
    if report.detail == EXCEPTIONS:
        cases += [_passed(class_name, row) for row in report.judged if row.passed]
    rejected = [f"rejected input file: {item.path}: {item.reason}" for item in report.quarantined[:_MAX_REJECTED]]
    if (more := len(report.quarantined) - _MAX_REJECTED) > 0:
        rejected.append(f"and {counted(more, 'more rejected input file')} in report.json")
    about = {"run_id": report.run_id, "profile": report.profile, "mark": report.mark, "rackproof": report.rackproof}
    about |= {"decision": decision_name(report, report.decision), "status": status(report)}
    about |= {f"caveat.{number}": line for number, line in enumerate(headline.caveats(report), 1)}
    return _suite(_marked(report, "fleet"), cases, about, rejected)


def _passed(class_name: str, row: Judged) -> JunitCase:
    params = params_text(row.params)
    name = f"{row.criterion}: {row.name}{f' ({params})' if params else ''}{f', stage {row.stage}' if row.stage else ''}"
    return JunitCase(
        class_name=class_name,
        name=f"{name}: passed",
        verdict=PASS,
        note=f"{counted(row.passed, 'check')} passed: {row.source}",
    )


def _host(report: FleetReport, host: HostReport, cases: list[JunitCase], title: str) -> str:
    """Return the suite of a host.

    It also has the case `decision` if `cases` is empty, or if the host is not accepted and every case passes or is waived.

    Args:
        report: the report.
        host: the host.
        cases: the cases of its causes and passed checks.
        title: the title of the host's most urgent cause. The case of this cause may be in the suite of another host.
    """
    class_name = _class_name(report, host.rack, host.name)
    has_problem = any(case.verdict not in (PASS, WAIVED) for case in cases)
    if not cases or (host.decision != ACCEPTED and not has_problem):
        message = f"the host is {decision_name(report, host.decision)}{f': {title}' if title else ''}"
        verdict = _VERDICTS.get(host.decision, INCONCLUSIVE)
        note = f"{message}; its passed checks are counted in the fleet's suite"
        cases.append(
            JunitCase(
                class_name=class_name, name="decision", verdict=verdict, kind=host.decision, message=message, note=note
            )
        )
    about = {"rack": host.rack, "decision": decision_name(report, host.decision), "record": host.record}
    return _suite(_marked(report, host.name), cases, about, host.events, host.name, report.began)


def _cause(class_name: str, cause: Cause, verdicts: Sequence[Verdict]) -> JunitCase:
    """Return the case of a cause. CI systems match cases by name from run to run, so the name has no values and no serial."""
    group = [verdicts[position] for position in cause.verdicts]
    part = "" if cause.part in ("", "host") else f" {cause.part}"
    reading = f": {group[0].name}" if group and cause.problem in _SEVERAL_PER_PART else ""
    # A part may have the same problem once with and once without a waiver.
    criterion = f", waived: {cause.waiver.criterion}" if cause.waiver else ""
    facts = {
        "hosts": ", ".join(cause.hosts) if len(cause.hosts) > 1 else "",
        "serial": cause.serial,
        "action": cause_action(cause.verdict, cause.action, cause.problem),
        "severity": cause.severity,
        "confidence": cause.confidence,
        "source": group[0].source if group else "",
    }
    checks = list(dict.fromkeys(f"{item.host} {item.scope}: {item.name}: {item.reason}" for item in group))
    more = (
        [f"and {counted(len(checks) - _MAX_CHECKS, 'more check')} in report.json"] if len(checks) > _MAX_CHECKS else []
    )
    waived = f"{cause.verdict}, {cause.waiver}: " if cause.waiver else ""
    return JunitCase(
        class_name=class_name,
        name=f"{cause.problem}{part}{reading}{criterion}",
        verdict=WAIVED if cause.waiver else cause.verdict,
        kind=cause.action if cause.verdict == FAIL and cause.action != "none" else cause.problem,
        message=f"{waived}{cause.title}{f': {cause.why}' if cause.why else ''}",
        lines=(*(f"{key}: {text}" for key, text in facts.items() if text), *checks[:_MAX_CHECKS], *more),
    )


def _case(class_name: str, verdict: Verdict) -> JunitCase:
    params = params_text(verdict.params)
    part = "" if verdict.scope == "host" else f" {verdict.scope}"
    # CI systems match cases by name from run to run. If `verdict.part` is set, the serial is that of the part to which the
    # failure is attributed. That part may differ from run to run, so the name does not contain its serial.
    serial = f" serial {verdict.serial}" if verdict.serial and not verdict.part else ""
    stage = f", stage {verdict.stage}" if verdict.stage else ""
    value, limit = value_and_limit(verdict)
    facts = {
        "criterion": verdict.criterion,
        "value": value if verdict.value is not None else "",
        "limit": limit if verdict.limit is not None else "",
        "action": action_name(verdict.action),
        "source": verdict.source,
        "basis": verdict.basis,
        "detail": verdict.detail,
        "severity": verdict.severity,
    }
    waived = f"{verdict.verdict}, {verdict.waiver}: " if verdict.waiver else ""
    return JunitCase(
        class_name=class_name,
        name=f"{verdict.criterion}: {verdict.name}{f' ({params})' if params else ''}{part}{serial}{stage}",
        verdict=WAIVED if verdict.waiver else verdict.verdict,
        kind=verdict.criterion if verdict.verdict != FAIL or verdict.action == "none" else verdict.action,
        message=f"{waived}{verdict.reason}",
        lines=tuple(f"{key}: {text}" for key, text in facts.items() if text),
    )


def _suite(
    name: str,
    cases: Sequence[JunitCase],
    about: Mapping[str, str],
    lines: Iterable[str] = (),
    host: str = "",
    began: str = "",
) -> str:
    cases = list(_with_distinct_names(cases))
    failed = sum(case.verdict == FAIL for case in cases)
    waived = sum(case.verdict == WAIVED for case in cases)
    errors = sum(case.verdict != PASS for case in cases) - failed - waived
    hostname = f" hostname={_quoted(host)}" if host else ""
    timestamp = f" timestamp={_quoted(began.removesuffix('Z'))}" if began else ""
    counts = f'tests="{len(cases)}" failures="{failed}" errors="{errors}" skipped="{waived}"'
    pieces = [f"  <testsuite name={_quoted(name)} {counts}{hostname}{timestamp}>\n    <properties>\n"]
    pieces += [
        f"      <property name={_quoted(key)} value={_quoted(text, LINE_LIMIT)}/>\n"
        for key, text in about.items()
        if text
    ]
    pieces += ["    </properties>\n", *map(_xml, cases)]
    output = "\n".join(map(_text, lines))
    pieces += [f"    <system-out>{output}</system-out>\n"] if output else []
    return "".join([*pieces, "  </testsuite>\n"])


def _with_distinct_names(cases: Iterable[JunitCase]) -> Iterator[JunitCase]:
    """Yield the cases of a suite. If several have the same name, all except the first get a number: `NAME (2)`."""
    names: set[str] = set()
    numbers: dict[str, int] = {}
    for case in cases:
        name = first = _legal(case.name)
        while name in names:
            numbers[first] = numbers.get(first, 1) + 1
            name = f"{_legal(case.name, _NUMBERED_LIMIT)} ({numbers[first]})"
        names.add(name)
        yield case if name == first else replace(case, name=name)


def _xml(case: JunitCase) -> str:
    head = f"    <testcase classname={_quoted(case.class_name)} name={_quoted(case.name)}"
    if case.verdict == PASS:
        return f"{head}><system-out>{_text(case.note)}</system-out></testcase>\n" if case.note else f"{head}/>\n"
    element = _ELEMENTS.get(case.verdict, "error")
    lines = "\n".join(map(_text, case.lines))
    return (
        f"{head}>\n      <{element} type={_quoted(case.kind)} message={_quoted(case.message)}>{lines}</{element}>\n"
        "    </testcase>\n"
    )


def _class_name(report: FleetReport, *parts: str) -> str:
    """Return a class name. CI systems split it at its dots, so dots in the names of hosts and racks become `_`."""
    return ".".join(part.replace(".", "_") for part in (report.mark, "rackproof", *parts) if part)


def _marked(report: FleetReport, text: str) -> str:
    """Return `text`, preceded by SIMULATED or REHEARSAL if no GPU was tested."""
    return f"{report.mark} {text}".strip()


def _text(text: str) -> str:
    return escape(_legal(text))


def _quoted(text: str, limit: int = TEXT_LIMIT) -> str:
    return quoteattr(_legal(text, limit))


def _legal(text: str, limit: int = TEXT_LIMIT) -> str:
    """Return `text` on one line, with characters that XML allows; a text of more than `limit` characters is cut."""
    return clean(text, limit).translate(_ILLEGAL)
