"""Compare a report with the former runs in the history: percentiles, earlier values of each part, and causes seen before.

Four queries are enough for any number of figures and parts. The comparison is made after the run was judged, and only adds a
section to the report: it does not change the decision, the verdicts or the causes.
"""

from __future__ import annotations

import json
import statistics
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from fleet.history.database import History, open_history
from fleet.history.peers import MIN_PARTS
from fleet.history.rows import DRIVER, clean_text, host_model, part_serial, settings_text, timestamp
from fleet.judge.baseline import comparison_key, is_baseline_figure, part_of_scope
from fleet.judge.gpu_identity import identities
from fleet.records.baseline_store import kind_of
from schemas import documents
from schemas.baselines import Key
from schemas.plans import Plan
from schemas.records import Value, to_json
from schemas.reports import (
    FAIL,
    CausePart,
    FigureHistory,
    FleetReport,
    HostReport,
    PartHistory,
    RunHistory,
    SeenBefore,
)

MAX_VALUES = 8
"""Maximum number of former values that the report shows for a figure of one part."""
SIZE = "size_bytes"
_FORMER = 'nonce <> $nonce and "began" < $began::timestamp'
_HOST = "case when serial = '' then host else '' end"
"""SQL expression: the name of the host if the part has no serial, else empty. Together with the serial it identifies a part."""
_CAUSE_PART = "case when serial <> '' then 'serial ' || serial else 'host ' || host || ' ' || slot end"
_GROUP = "name, settings, stage, model, driver"
PartKey = tuple[str, str]
"""Serial, and the value of _HOST: exactly one of the two is empty."""
GroupKey = tuple[str, str, str, str, str, bool]
"""The values of _GROUP, and whether the figure is of a GPU."""


@dataclass(frozen=True, kw_only=True)
class _Figure:
    """A figure of one part of the report."""

    host: str
    scope: str
    part: PartKey
    name: str
    stage: str
    params: Mapping[str, Value]
    unit: str
    model: str
    driver: str
    value: float

    @property
    def settings(self) -> str:
        return settings_text(self.params)

    @property
    def group(self) -> GroupKey:
        return self.name, self.settings, self.stage, self.model, self.driver, self.part[0] != ""


def with_history(directory: Path, plan: Plan, report: FleetReport) -> tuple[FleetReport, str]:
    """Return the report with its comparison, and a message of one line if the comparison is missing or lacks runs.

    The message is empty if nothing is wrong. Raises no exception.
    """
    try:
        history = open_history(directory, kind_of(plan))
        if history is None:
            return report, f"note: no history in {directory} yet: the report compares nothing with former runs"
        section = compared(history, plan, report)
        document = to_json(section)
        json.dumps(document, allow_nan=False)
        documents.validate(document, "report#/$defs/history", source="the comparison")
    except Exception as error:  # noqa: BLE001 - an error in the history must not prevent the report
        reason = " ".join(str(error).split()) or type(error).__name__
        return report, f"warning: the report compares nothing with former runs: {reason}"
    if not history.problems:
        return replace(report, history=section), ""
    more = f"; and {len(history.problems) - 1} more" if history.problems[1:] else ""
    return replace(report, history=section), f"warning: history: {history.problems[0]}{more}"


def compared(history: History, plan: Plan, report: FleetReport) -> RunHistory:
    """Return the comparison of a report with the runs that began before the run of the report.

    Raises:
        RunError: the history cannot be read.
    """
    former: dict[str, object] = {"nonce": plan.nonce, "began": timestamp(plan.created)}
    figures = list(_figures(report.hosts))
    ((runs,),) = history.rows(f"select count(*) from runs where {_FORMER}", former)
    return RunHistory(
        runs=runs,
        figures=tuple(_compare(figures, _accepted(history, figures, former), _earlier(history, figures, former))),
        causes=tuple(_seen_before(history, report, former)),
    )


def _figures(hosts: Iterable[HostReport]) -> Iterator[_Figure]:
    """Yield the figures of hosts and GPUs at their largest message size. Figures of links, for example, are left out."""
    for host in hosts:
        gpus = {f"gpu={gpu.index}": gpu for gpu in host.gpus}
        names = identities(host.gpus)
        driver = clean_text(host.software.get(DRIVER, ""))
        of_host: dict[tuple[str, Key], _Figure] = {}
        for item in host.measurements:
            if not is_baseline_figure(item) or not isinstance(item.value, int | float):
                continue
            serial, within = part_of_scope(names, item.scope)
            if within:
                continue
            key = comparison_key(item, "")
            of_host[(item.scope, key)] = _Figure(
                host=host.name,
                scope=item.scope,
                part=(clean_text(serial), "" if serial else clean_text(host.name)),
                name=item.name,
                stage=key[1],
                params=dict(key[3]),
                unit=item.unit,
                model=clean_text(gpus[item.scope].name) if serial else host_model(host.gpus),
                driver=driver,
                value=float(item.value),
            )
        yield from _largest_sizes(of_host.values())


def _largest_sizes(figures: Iterable[_Figure]) -> Iterable[_Figure]:
    """Return each figure at its largest message size only. The other sizes would add hundreds of figures for each host."""
    largest: dict[object, _Figure] = {}
    for figure in figures:
        rest = tuple(sorted((key, value) for key, value in figure.params.items() if key != SIZE))
        key = (figure.scope, figure.name, figure.stage, rest)
        if key not in largest or _size(figure) > _size(largest[key]):
            largest[key] = figure
    return largest.values()


def _size(figure: _Figure) -> float:
    size = figure.params.get(SIZE)
    return size if isinstance(size, int | float) else 0


def _asked(figures: Iterable[_Figure]) -> dict[str, list[object]]:
    """Return the distinct groups of the figures as query parameters: column of the table `asked` -> its value for each group."""
    groups = dict.fromkeys(figure.group for figure in figures)
    names = ("name", "settings", "stage", "model", "driver", "is_gpu")
    return {name: [group[at] for group in groups] for at, name in enumerate(names)}


def _accepted(
    history: History, figures: Sequence[_Figure], former: Mapping[str, object]
) -> dict[GroupKey, list[float]]:
    """Return group of figures -> sorted values, one for each part: the newest value from a former run that accepted the host."""
    if not figures:
        return {}
    rows = history.rows(
        f"""
        with asked as (
          select unnest($name) as name, unnest($settings) as settings, unnest($stage) as stage, unnest($model) as model,
            unnest($driver) as driver, unnest($is_gpu::boolean[]) as is_gpu
        ), newest as (
          select {_GROUP}, is_gpu, serial, {_HOST} as host, arg_max(value, "began") as value
          from figures join asked using ({_GROUP})
          where accepted and not duplicate and within = '' and (serial <> '') = is_gpu and {_FORMER} group by all
        )
        select {_GROUP}, is_gpu, list_sort(list(value)) from newest group by {_GROUP}, is_gpu""",
        {**_asked(figures), **former},
    )
    return {(name, settings, stage, model, driver, is_gpu): values
            for name, settings, stage, model, driver, is_gpu, values in rows}  # fmt: skip


def _earlier(
    history: History, figures: Sequence[_Figure], former: Mapping[str, object]
) -> dict[tuple[PartKey, str, str, str], list[float]]:
    """Return (part, name, settings, stage) -> the last MAX_VALUES values of this figure in former runs, the oldest first."""
    if not figures:
        return {}
    rows = history.rows(
        f"""
        select serial, {_HOST} as host, name, settings, stage, list_reverse(arg_max(value, "began", {MAX_VALUES})) from figures
        where serial in (select unnest($serials)) and (serial <> '' or host in (select unnest($hosts)))
          and name in (select unnest($names)) and not duplicate and within = '' and {_FORMER} group by all""",
        {
            "serials": sorted({figure.part[0] for figure in figures}),
            "hosts": sorted({figure.part[1] for figure in figures}),
            "names": sorted({figure.name for figure in figures}),
            **former,
        },
    )
    return {((serial, host), name, settings, stage): values for serial, host, name, settings, stage, values in rows}


def _compare(
    figures: Iterable[_Figure],
    accepted: Mapping[GroupKey, Sequence[float]],
    earlier: Mapping[tuple[PartKey, str, str, str], Sequence[float]],
) -> Iterator[FigureHistory]:
    """Yield the comparison of each group of figures, with the parts that have a percentile or earlier values.

    A group without such parts is left out.
    """
    groups: dict[GroupKey, list[_Figure]] = {}
    for figure in figures:
        groups.setdefault(figure.group, []).append(figure)
    for group, members in groups.items():
        peers = accepted.get(group, ())
        is_enough = len(peers) >= MIN_PARTS
        parts = []
        for figure in members:
            values = earlier.get((figure.part, figure.name, figure.settings, figure.stage), ())
            if is_enough or values:
                parts.append(
                    PartHistory(
                        host=figure.host,
                        part=figure.scope,
                        percentile=percentile(peers, figure.value) if is_enough else None,
                        values=tuple(map(_shortened, (*values, figure.value))) if values else (),
                    )
                )
        if parts:
            first = members[0]
            yield FigureHistory(
                **{name: getattr(first, name) for name in ("name", "stage", "params", "unit", "model", "driver")},
                accepted=len(peers),
                median=_shortened(statistics.median(peers)) if is_enough else None,
                parts=tuple(parts),
            )


def _shortened(value: float) -> float:
    """Return the value with 6 significant digits: enough for a chart, and the report of many hosts stays small."""
    return float(f"{value:.6g}")


def percentile(values: Sequence[float], value: float) -> float:
    """Return the percentage of the sorted `values` that are below `value`. A member of `values` equal to `value` counts half."""
    return round(50 * (bisect_left(values, value) + bisect_right(values, value)) / len(values), 1)


def _seen_before(history: History, report: FleetReport, former: Mapping[str, object]) -> Iterator[SeenBefore]:
    """Yield the causes of failures that were seen before: a part of the cause had the same problem in a former run.

    A part is identified by its serial or, without a serial, by host and slot.
    """
    hosts = {host.name: host for host in report.hosts}
    asked = [
        (number, clean_text(cause.problem), _cause_part(part, hosts.get(part.host)))
        for number, cause in enumerate(report.causes)
        if cause.verdict == FAIL
        for part in cause.parts
    ]
    if not asked:
        return
    columns: dict[str, Any] = {
        name: [item[at] for item in asked] for at, name in enumerate(("number", "problem", "part"))
    }
    rows = history.rows(
        f"""
        with asked as (
          select unnest($number) as number, unnest($problem) as problem, unnest($part) as part
        ), former as (
          select problem, {_CAUSE_PART} as part, nonce, run, "began" from causes where {_FORMER}
        )
        select number, count(distinct part), count(distinct nonce), strftime(max("began"), '%Y-%m-%d'), arg_max(run, "began")
        from asked join former using (problem, part) group by number order by number""",
        {**columns, **former},
    )
    for number, parts, runs, last, run in rows:
        yield SeenBefore(cause=number, parts=parts, runs=runs, last=last, run=run)


def _cause_part(part: CausePart, host: HostReport | None) -> str:
    """Return the text that identifies this part, in the form of the SQL expression _CAUSE_PART."""
    if serial := part_serial(part, host):
        return f"serial {clean_text(serial)}"
    return f"host {clean_text(part.host)} {'' if part.scope == 'host' else clean_text(part.scope)}"


def history_from_json(document: Mapping[str, Any]) -> RunHistory:
    """Return the comparison from the object `history` of a report.json, which must be valid under report.schema.json."""
    figures = (
        FigureHistory(**{**figure, "parts": tuple(
            PartHistory(**{**part, "values": tuple(part.get("values", ()))}) for part in figure.get("parts", ()))})
        for figure in document.get("figures", ())
    )  # fmt: skip
    causes = (SeenBefore(**cause) for cause in document.get("causes", ()))
    return RunHistory(runs=document["runs"], figures=tuple(figures), causes=tuple(causes))
