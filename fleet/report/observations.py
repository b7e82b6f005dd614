"""Render `observations.csv`: a row per observation, with the verdict on it, and a row per verdict without an observation.

The rows of a host do not depend on other hosts, so a fleet of any size is written host by host.
"""

from __future__ import annotations

import csv
import io
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from fleet.judge.evidence import Evidence
from fleet.quantities import finite
from fleet.report.facts import is_of_missing_record
from fleet.report.formatting import clean
from schemas.records import SKIPPED, Observation, Value
from schemas.reports import (
    ACCEPTED,
    EXCEPTIONS,
    FAIL,
    INCONCLUSIVE,
    PASS,
    FleetReport,
    HostReport,
    Verdict,
)
from schemas.scopes import Scope

COLUMNS = (
    *("mark", "run_id", "host", "rack", "serial", "scope", "stage", "phase", "launch", "name", "params", "unit"),
    *("status", "value", "value_text", "reason", "samples", "min", "p50", "max", "cv"),
    *("verdict", "criterion", "operator", "limit", "limit_text", "severity", "action", "waiver", "verdicts"),
)
WHOLE_NUMBERS = frozenset({"launch", "samples", "verdicts"})
NUMBERS = frozenset({"value", "min", "p50", "max", "cv", "limit"})
"""Columns of floats. Columns that are neither in NUMBERS nor in WHOLE_NUMBERS are text, so that each column has one type."""
MISSING = "missing"
"""Status of an expected observation that was not reported. The verdict on it has a row of its own."""
NOT_LISTED = "not listed"
"""Value of the column `verdict` if the report leaves out verdicts and lists none on the observation: it passed, no criterion
judges it, or the verdict on it is beyond the maximum number (`merge.MAX_VERDICTS`)."""
CELL_LIMIT = 2000
_NO_VERDICT = Verdict(host="", scope="", name="", verdict=INCONCLUSIVE, criterion="", reason="")
_RANK = {FAIL: 0, INCONCLUSIVE: 1, PASS: 2}
_MANY = 50
"""Number of observations of one name and scope above which those with the parameters of a verdict are looked up."""
_FORMULA = re.compile(r"\s*[=+\-@＝＋－＠]")
_AFTER_SEPARATOR = re.compile(r"([;|]\s*)(?=[=+\-@＝＋－＠])")


@dataclass(frozen=True, kw_only=True)
class ObservationRow:
    """One observation and the verdict on it; or a verdict without an observation."""

    host: str
    rack: str
    serial: str
    scope: str
    name: str
    observation: Observation | None
    launch: int = 0
    """Number of the launch (`Launch.number`) if the observation is in `Launch.observations`; otherwise 0."""
    verdict: Verdict | None = None
    verdicts: int = 0
    """Number of verdicts on the observation. `verdict` is the most severe of them (`_severity`)."""


@dataclass(frozen=True, kw_only=True)
class SharedFields:
    """The fields that all rows share."""

    mark: str
    run_id: str
    default_verdict: str = ""
    """Value of the column `verdict` for an observation without a verdict."""


def shared_fields(report: FleetReport) -> SharedFields:
    """Return the fields that all rows of the report share."""
    return SharedFields(
        mark=report.mark, run_id=report.run_id, default_verdict=NOT_LISTED if report.detail == EXCEPTIONS else ""
    )


def fields_of_host(shared: SharedFields, verdicts: Sequence[Verdict]) -> SharedFields:
    """Return the shared fields of a host's rows.

    If the host record is missing, only the observations of the BMC are judged. `not listed` would suggest that the others passed.
    So the default verdict is empty.
    """
    return replace(shared, default_verdict="") if any(map(is_of_missing_record, verdicts)) else shared


def render_csv(report: FleetReport, evidence: Mapping[str, Evidence], *, all_hosts: bool = False) -> Iterator[str]:
    """Yield the file in pieces: the header, then one piece per host of the report.

    Args:
        report: the report. The pieces are in the order of its hosts.
        evidence: host -> its evidence; used for one host at a time.
        all_hosts: in a large fleet, include the observations of accepted hosts too.
    """
    shared, verdicts = shared_fields(report), by_host(report.verdicts)
    yield ",".join(COLUMNS) + "\r\n"
    for host in report.hosts:
        if report.detail == EXCEPTIONS and host.decision == ACCEPTED and not all_hosts:
            yield rows_as_csv(shared, [_pointer_to_record(host)])
        else:
            host_evidence, of_host = evidence.get(host.name, Evidence()), verdicts.get(host.name, ())
            host_rows = rows(host.name, host.rack, host_evidence, of_host)
            yield rows_as_csv(fields_of_host(shared, of_host), host_rows)


def _pointer_to_record(host: HostReport) -> ObservationRow:
    """Return a row that names the records with the host's observations."""
    records = " and ".join(filter(None, (host.record, host.gang_record)))
    note = Observation(
        name="host.observations",
        scope="host",
        stage="",
        unit="1",
        status=SKIPPED,
        reason=f"host is accepted; in a large fleet its observations are only in {records}",
    )
    return ObservationRow(host=host.name, rack=host.rack, serial="", scope="host", name=note.name, observation=note)


def by_host(verdicts: Iterable[Verdict]) -> dict[str, list[Verdict]]:
    """Return host -> its verdicts, in the given order."""
    verdicts_of: dict[str, list[Verdict]] = {}
    for verdict in verdicts:
        verdicts_of.setdefault(verdict.host, []).append(verdict)
    return verdicts_of


def rows(host: str, rack: str, evidence: Evidence, verdicts: Sequence[Verdict]) -> list[ObservationRow]:
    """Return a row per observation of one host, in the order of the evidence, then a row per verdict without an observation."""
    serials = {f"gpu={gpu.index}": gpu.serial for gpu in evidence.gpus()}
    numbered = [(item, 0) for item in (*evidence.observations(), *evidence.versions())]
    numbered += [(item, launch.number) for launch in evidence.launches() for item in launch.observations]
    of_observation, others = _assign([item for item, _ in numbered], verdicts)
    observed = [
        ObservationRow(
            host=host,
            rack=rack,
            serial=serials.get(Scope.parse(item.scope).device, ""),
            scope=item.scope,
            name=item.name,
            observation=item,
            launch=launch,
            verdict=min(of_observation[index], key=_severity) if index in of_observation else None,
            verdicts=len(of_observation.get(index, ())),
        )
        for index, (item, launch) in enumerate(numbered)
    ]
    return observed + [
        ObservationRow(
            host=host,
            rack=rack,
            serial=item.serial,
            scope=item.scope,
            name=item.name,
            observation=None,
            verdict=item,
            verdicts=1,
        )
        for item in others
    ]


def _assign(
    observations: Sequence[Observation], verdicts: Sequence[Verdict]
) -> tuple[dict[int, list[Verdict]], list[Verdict]]:
    """Return the verdicts on each observation, by its index, and the verdicts without an observation."""
    judged = {(verdict.name, verdict.scope) for verdict in verdicts}
    indexes: dict[tuple[str, str], list[int]] = {}
    for index, item in enumerate(observations):
        if (item.name, item.scope) in judged:
            indexes.setdefault((item.name, item.scope), []).append(index)
    of_observation: dict[int, list[Verdict]] = {}
    others = []
    by_parameter: dict[tuple[str, str], dict[tuple[str, Value], list[int]]] = {}
    found: dict[object, int | None] = {}
    for verdict in verdicts:
        key = (verdict.name, verdict.scope)
        candidates: Sequence[int] = indexes.get(key, ())
        if len(candidates) <= _MANY:
            match = _find(observations, candidates, verdict)
        else:
            needed = frozenset(item for item in verdict.params.items() if verdict.stage or item[0] != "phase")
            same = (key, verdict.stage, needed, len(verdict.params))  # `_find` depends on nothing else of the verdict
            if same not in found:
                if key not in by_parameter:
                    by_parameter[key] = _by_parameter(observations, candidates)
                fewest = min((candidates, *(by_parameter[key].get(item, ()) for item in needed)), key=len)
                found[same] = _find(observations, fewest, verdict)
            match = found[same]
        if match is None:
            others.append(verdict)
        else:
            of_observation.setdefault(match, []).append(verdict)
    return of_observation, others


def _by_parameter(observations: Sequence[Observation], indexes: Iterable[int]) -> dict[tuple[str, Value], list[int]]:
    """Return name and value of a parameter -> indexes of the observations that have it, in ascending order."""
    found: dict[tuple[str, Value], list[int]] = {}
    for index in indexes:
        for item in observations[index].params.items():
            found.setdefault(item, []).append(index)
    return found


def _severity(verdict: Verdict) -> tuple[bool, int]:
    return not verdict.blocks_acceptance, _RANK[verdict.verdict]


def _find(observations: Sequence[Observation], candidates: Iterable[int], verdict: Verdict) -> int | None:
    """Return the index of the observation that the verdict judges; None if there is none.

    The observation must have all parameters of the verdict. For a verdict without a stage, the parameter `phase` is ignored. If
    several observations match, those with exactly the parameters of the verdict are preferred. If several remain, the last one is
    returned.
    """
    params = verdict.params.items()
    matches = []
    for index in candidates:
        item = observations[index]
        if verdict.stage:
            matching = item.stage == verdict.stage and params <= item.params.items()
        else:
            matching = params <= {**item.params, "phase": verdict.params.get("phase")}.items()
        if matching:
            matches.append(index)
    exact = [index for index in matches if len(params) == len(observations[index].params)]
    return next(reversed(exact or matches), None)


def rows_as_csv(shared: SharedFields, rows: Iterable[ObservationRow]) -> str:
    """Return rows as RFC 4180 CSV."""
    text = io.StringIO(newline="")
    csv.writer(text).writerows(
        [value if value is None else cell(value) for value in values(shared, row)]
        for row in rows  # most values are None: not calling `cell` for them saves time
    )
    return text.getvalue()


def values(shared: SharedFields, row: ObservationRow) -> tuple[Value, ...]:
    """Return a row's values in the order of COLUMNS; None or an empty text for a missing value."""
    verdict = row.verdict or _NO_VERDICT
    item = row.observation or verdict
    samples = row.observation.samples if row.observation else None
    return (
        *(shared.mark, shared.run_id, row.host, row.rack, row.serial, row.scope, item.stage),
        *(item.params.get("phase"), row.launch or None, row.name, _params(item.params), item.unit),
        *(status(row), *_number_or_text(item.value), item.reason),
        *((samples.n, samples.min, samples.p50, samples.max, samples.cv) if samples else (None,) * 5),
        row.verdict.verdict if row.verdict else shared.default_verdict,
        *(verdict.criterion, verdict.operator, *_number_or_text(verdict.limit), verdict.severity),
        "" if verdict.action == "none" else verdict.action,
        str(verdict.waiver) if verdict.waiver else "",
        row.verdicts,
    )


def _number_or_text(value: Value) -> tuple[Value, Value]:
    """Return (number, None) or (None, text) for the two columns of a value. A boolean is not a number."""
    return (value, None) if finite(value) is not None else (None, value)


def status(row: ObservationRow) -> str:
    """Return the observation's status. Without an observation, return `missing` if one was expected, else an empty string."""
    if row.observation:
        return row.observation.status
    expected = row.verdict is not None and row.verdict.verdict == INCONCLUSIVE and row.verdict.value is None
    return MISSING if expected else ""


def _params(params: Mapping[str, Value]) -> str:
    """Return the parameters as JSON, without the phase, which has its own column."""
    shown = {key: value for key, value in sorted(params.items()) if key != "phase"}
    return json.dumps(shown, ensure_ascii=False) if shown else ""


def cell(value: Value) -> Value:
    """Return a number unchanged, a boolean as `true` or `false`, and text in a form that no spreadsheet evaluates."""
    if type(value) is str:
        return escape_formula(value)
    return ("true" if value else "false") if isinstance(value, bool) else value


@lru_cache(maxsize=1 << 16)
def escape_formula(text: str) -> str:
    """Return `text` on one line in a form that no spreadsheet evaluates, even one that splits cells at `;`."""
    escaped = _AFTER_SEPARATOR.sub(r"\1'", clean(text, CELL_LIMIT))
    return f"'{escaped}" if _FORMULA.match(escaped) else escaped
