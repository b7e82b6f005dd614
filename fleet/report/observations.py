"""Every observation of a run as a row, with the verdict that it decided: `observations.csv`.

A host is a piece of the file that needs nothing of the others, so a fleet of any size is written host by host.
"""

from __future__ import annotations

import csv
import io
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

from fleet.judge.evidence import Evidence
from fleet.report.format import clean
from schemas.records import SKIPPED, Observation, Value
from schemas.reports import ACCEPTED, EXCEPTIONS, FAIL, INCONCLUSIVE, PASS, FleetReport, HostReport, Verdict
from schemas.scopes import Scope

COLUMNS = (
    *("mark", "run_id", "host", "rack", "serial", "scope", "stage", "phase", "launch", "name", "params", "unit"),
    *("status", "value", "reason", "samples", "min", "p50", "max", "cv"),
    *("verdict", "criterion", "operator", "limit", "severity", "action", "waiver", "verdicts"),
)
MISSING = "missing"
"""Status of what the plan expects and nobody saw: a row of its own, so that it is not overlooked."""
NOT_LISTED = "not listed"
"""Verdict where a large fleet's report holds those alone that do not pass."""
CELL_LIMIT = 2000
_NOTHING = Verdict(host="", scope="", name="", verdict=INCONCLUSIVE, criterion="", reason="")
_RANK = {FAIL: 0, INCONCLUSIVE: 1, PASS: 2}
_FORMULA = re.compile(r"\s*[=+\-@＝＋－＠]")
_SECOND = re.compile(r"([;|]\s*)(?=[=+\-@＝＋－＠])")


@dataclass(frozen=True, kw_only=True)
class Row:
    """One observation and the verdict that it decided; or a verdict on what is in no observation."""

    host: str
    rack: str
    serial: str
    scope: str
    name: str
    seen: Observation | None
    launch: int = 0
    """Number of the launch, where a later one of its stage took its place, or where it was a probe."""
    verdict: Verdict | None = None
    verdicts: int = 0
    """How many criteria judged it; `verdict` is the gravest."""


@dataclass(frozen=True, kw_only=True)
class Head:
    """What stands in every row."""

    mark: str
    run_id: str
    otherwise: str = ""
    """Verdict of an observation that decided none."""


def head(report: FleetReport) -> Head:
    """What stands in every row of that report's observations."""
    return Head(mark=report.mark, run_id=report.run_id, otherwise=NOT_LISTED if report.detail == EXCEPTIONS else "")


def render_csv(report: FleetReport, evidence: Mapping[str, Evidence], *, whole: bool = False) -> Iterator[str]:
    """The file in pieces, one a host of the report.

    Args:
        report: names the hosts, in their order, and holds the verdicts.
        evidence: host -> what it left behind; asked for one host at a time.
        whole: every host's observations also where the report itself leaves out what accepted hosts measured.
    """
    every, of_host = head(report), by_host(report.verdicts)
    yield ",".join(COLUMNS) + "\r\n"
    for host in report.hosts:
        if report.detail == EXCEPTIONS and host.decision == ACCEPTED and not whole:
            yield piece(every, [_left_out(host)])
        else:
            left = evidence.get(host.name, Evidence())
            yield piece(every, rows(host.name, host.rack, left, of_host.get(host.name, ())))


def _left_out(host: HostReport) -> Row:
    """One row that tells where the host's observations are."""
    told = Observation(
        name="host.observations",
        scope="host",
        stage="",
        unit="1",
        status=SKIPPED,
        reason=f"accepted, and left out of this file as one of many: {host.record} has them",
    )
    return Row(host=host.name, rack=host.rack, serial="", scope="host", name=told.name, seen=told)


def by_host(verdicts: Iterable[Verdict]) -> dict[str, list[Verdict]]:
    """Host -> its verdicts, in their order."""
    found: dict[str, list[Verdict]] = {}
    for verdict in verdicts:
        found.setdefault(verdict.host, []).append(verdict)
    return found


def rows(host: str, rack: str, left: Evidence, verdicts: Sequence[Verdict]) -> list[Row]:
    """Everything that one host observed, in the order in which it did, then the verdicts on what it did not."""
    serials = {f"gpu={gpu.index}": gpu.serial for gpu in left.gpus()}
    seen = [(item, 0) for item in (*left.observations(), *left.versions())]
    seen += [(item, launch.number) for launch in left.launches() for item in launch.observations]
    decided, others = _decided([item for item, _ in seen], verdicts)
    found = [
        Row(
            host=host,
            rack=rack,
            serial=serials.get(Scope.parse(item.scope).device, ""),
            scope=item.scope,
            name=item.name,
            seen=item,
            launch=launch,
            verdict=min(decided[number], key=_gravity) if number in decided else None,
            verdicts=len(decided.get(number, ())),
        )
        for number, (item, launch) in enumerate(seen)
    ]
    return found + [
        Row(
            host=host,
            rack=rack,
            serial=item.serial,
            scope=item.scope,
            name=item.name,
            seen=None,
            verdict=item,
            verdicts=1,
        )
        for item in others
    ]


def _decided(
    seen: Sequence[Observation], verdicts: Sequence[Verdict]
) -> tuple[dict[int, list[Verdict]], list[Verdict]]:
    """Number of an observation -> the verdicts that it decided; and those that none did."""
    wanted = {(verdict.name, verdict.scope) for verdict in verdicts}
    places: dict[tuple[str, str], list[int]] = {}
    for number, item in enumerate(seen):
        if (item.name, item.scope) in wanted:
            places.setdefault((item.name, item.scope), []).append(number)
    found: dict[int, list[Verdict]] = {}
    others = []
    for verdict in verdicts:
        place = _place(seen, places.get((verdict.name, verdict.scope), ()), verdict)
        if place is None:
            others.append(verdict)
        else:
            found.setdefault(place, []).append(verdict)
    return found, others


def _gravity(verdict: Verdict) -> tuple[bool, int]:
    return not verdict.stands, _RANK[verdict.verdict]


def _place(seen: Sequence[Observation], there: Iterable[int], verdict: Verdict) -> int | None:
    """The observation that a verdict is about; the last of them, where it is about a series over all stages.

    A verdict has the parameters of its observation, or those of them that the plan asks for.
    """
    params = verdict.params.items()
    if verdict.stage:
        fits = [item for item in there if seen[item].stage == verdict.stage and params <= seen[item].params.items()]
    else:
        fits = [item for item in there if params <= {**seen[item].params, "phase": verdict.params.get("phase")}.items()]
    exact = [item for item in fits if len(params) == len(seen[item].params)]
    return next(reversed(exact or fits), None)


def piece(every: Head, found: Iterable[Row]) -> str:
    """Rows as RFC 4180 has them."""
    text = io.StringIO(newline="")
    csv.writer(text).writerows(map(cell, values(every, row)) for row in found)
    return text.getvalue()


def values(every: Head, row: Row) -> tuple[Value, ...]:
    """A row's values in the order of COLUMNS, as they were told; None where there is none."""
    seen, verdict = row.seen, row.verdict or _NOTHING
    told = seen or verdict
    samples = seen.samples if seen else None
    return (
        *(every.mark, every.run_id, row.host, row.rack, row.serial, row.scope, told.stage),
        *(told.params.get("phase"), row.launch or None, row.name, _params(told.params), told.unit),
        *(status(row), told.value, told.reason),
        *((samples.n, samples.min, samples.p50, samples.max, samples.cv) if samples else (None,) * 5),
        row.verdict.verdict if row.verdict else every.otherwise,
        *(verdict.criterion, verdict.operator, verdict.limit, verdict.severity),
        "" if verdict.action == "none" else verdict.action,
        str(verdict.waiver) if verdict.waiver else "",
        row.verdicts,
    )


def status(row: Row) -> str:
    """Status of the observation; `missing` where one is asked for that is not there; else empty."""
    if row.seen:
        return row.seen.status
    asked = row.verdict is not None and row.verdict.verdict == INCONCLUSIVE and row.verdict.value is None
    return MISSING if asked else ""


def _params(params: Mapping[str, Value]) -> str:
    """Parameters as JSON, without the phase, which has its own column."""
    told = {key: value for key, value in sorted(params.items()) if key != "phase"}
    return json.dumps(told, ensure_ascii=False) if told else ""


def cell(value: Value) -> Value:
    """A number as it is, so that it stays one; a flag as `true` or `false`; text so that no program calculates it."""
    if type(value) is str:
        return safe(value)
    return ("true" if value else "false") if isinstance(value, bool) else value


@lru_cache(maxsize=1 << 16)
def safe(text: str) -> str:
    """`text` on one line, with nothing that a spreadsheet takes for a formula, also where it splits lines at `;`."""
    told = _SECOND.sub(r"\1'", clean(text, CELL_LIMIT))
    return f"'{told}" if _FORMULA.match(told) else told
