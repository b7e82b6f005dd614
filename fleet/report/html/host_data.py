"""Build the data from which the script of report.html draws the hosts: columns with a value per host, and pages of single hosts.

There are pages for as many hosts as the size limit permits. Each text of the pages is stored once and has a number, by which the
pages refer to it. All texts are cleaned here; the script inserts them as text nodes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from typing import Any

from fleet.quantities import NONE
from fleet.report.formatting import ACTIONS, clean, decision_name
from fleet.report.html import pairs
from fleet.report.html.adapter_data import STATES, add_adapter_pages
from fleet.report.html.former_data import add_former_runs
from fleet.report.html.launch_traces import LaunchTrace, has_traces, launch_traces
from fleet.report.html.power_waves import has_waves, power_waves
from fleet.report.html.text_table import TextTable, as_json
from fleet.report.tables import former_runs, hosts
from fleet.report.tables.figure import detailed_hosts
from fleet.report.tables.reasons import Reason, next_command, reasons
from fleet.report.tables.verdict_rows import VerdictRow, merge_verdicts
from fleet.report.tables.versions import version_order
from schemas.readings import BMC
from schemas.records import Launch
from schemas.reports import (
    ACCEPTED,
    ALL,
    FAIL,
    INCOMPLETE,
    INCONCLUSIVE,
    PASS,
    REJECTED,
    Cause,
    FleetReport,
    HostReport,
    Verdict,
)
from schemas.run_directory import BMCS
from schemas.stages import GANG_STAGES

_DECISIONS = (ACCEPTED, REJECTED, INCOMPLETE)
_MAX_ROWS = 600
"""Maximum number of rows of verdicts on the page of a host."""
PLOTS = (("traces", has_traces, launch_traces), ("waves", has_waves, power_waves))
"""For each kind of plot: key in the data of a page, function that returns whether a host has data for it, and function that
returns the plots."""
_PHRASE_CHARACTERS = 200
"""Maximum number of characters of the most urgent cause in the list of hosts."""

VerdictsOfHost = Mapping[str, Sequence[Verdict]]
CausesOfHost = Mapping[str, Sequence[Cause]]
"""Host -> causes of the verdicts on it that do not pass, the most urgent first. A cause may be a fault of another host."""


def embedded_data(report: FleetReport, budget: int) -> str:
    """Return the data as JSON, in at most `budget` bytes, unless the columns alone need more.

    The other data is added in this order, and left out if it does not fit: pages of hosts that are not accepted; serials for the
    search; pages of accepted hosts, unless the report leaves out their verdicts; plots over time; pages of network adapters;
    comparisons with former runs.
    """
    verdicts: dict[str, list[Verdict]] = {host.name: [] for host in report.hosts}
    for verdict in report.verdicts:
        verdicts.setdefault(verdict.host, []).append(verdict)
    causes = _causes_of_hosts(report)
    seen = former_runs.seen_before(report)
    table = TextTable()
    data = {**_host_columns(report, verdicts), **_finding_columns(report, verdicts, causes, table)}
    serials = [" ".join(clean(gpu.serial) for gpu in host.gpus if gpu.serial) for host in report.hosts]
    remaining = budget - len(as_json(data).encode()) - table.size - 64
    pages: dict[str, Any] = {}
    numbered = list(enumerate(report.hosts))
    not_accepted = [item for item in numbered if item[1].decision != ACCEPTED]
    remaining = _add_pages(report, not_accepted, verdicts, causes, seen, table, pages, remaining)
    size = len(as_json(serials).encode())
    if any(serials) and size < remaining:
        data["serials"] = serials
        remaining -= size
    if report.detail == ALL:
        accepted = [item for item in numbered if item[1].decision == ACCEPTED]
        remaining = _add_pages(report, accepted, verdicts, causes, seen, table, pages, remaining)
    remaining = _add_traces(report, table, pages, remaining)
    remaining = add_adapter_pages(report, verdicts, causes, table, pages, remaining)
    add_former_runs(report, table, pages, remaining)
    return as_json({**data, "pages": pages, "texts": table.texts})


def _host_columns(report: FleetReport, verdicts: VerdictsOfHost) -> dict[str, Any]:
    """Return the columns, each with one property of all hosts; some are run-length encoded (`_runs`).

    Also return the names of racks, decisions and actions, to which columns refer by number, and path and mark of the run.
    """
    racks = list(dict.fromkeys(host.rack for host in report.hosts))
    numbers = {rack: number for number, rack in enumerate(racks)}
    return {
        "names": [clean(host.name) for host in report.hosts],
        "racks": [clean(rack) for rack in racks],
        "rack": _runs(numbers[host.rack] for host in report.hosts),
        "decision": "".join(str(_DECISIONS.index(host.decision)) for host in report.hosts),
        "decisions": [decision_name(report, decision) for decision in _DECISIONS],
        "gpus": _runs(_gpu_letters(report, host, verdicts[host.name]) for host in report.hosts),
        "measured": _runs(f"{host.coverage.measured}/{host.coverage.expected}" for host in report.hosts),
        "actions": [name or "No action named" for name in ACTIONS.values()],
        "run": f"runs/{clean(report.run_id)}",
        "mark": report.mark,
    }


def _finding_columns(
    report: FleetReport, verdicts: VerdictsOfHost, causes: CausesOfHost, table: TextTable
) -> dict[str, Any]:
    """Return three mappings from the position of a host: to its counts of findings, to its most urgent cause, and to its actions.

    A mapping lacks the hosts for which it has no value.
    """
    counts, findings, actions = {}, {}, {}
    for number, host in enumerate(report.hosts):
        effective = [verdict for verdict in verdicts[host.name] if verdict.blocks_acceptance]
        kinds = Counter(verdict.verdict for verdict in effective)
        waived = sum(verdict.waiver is not None for verdict in verdicts[host.name])
        if effective or waived:
            counts[number] = [kinds[FAIL], kinds[INCONCLUSIVE], waived]
        if of_host := causes.get(host.name):
            findings[number] = table.number(of_host[0].title[:_PHRASE_CHARACTERS])
        if failed := sorted({_action_number(verdict) for verdict in effective if verdict.verdict == FAIL}):
            actions[number] = failed
    return {"counts": counts, "finding": findings, "action": actions}


def _runs(values: Iterable[Any]) -> list[list[Any]]:
    """Return the values run-length encoded: each value and how often it is repeated."""
    return [[value, len(list(same))] for value, same in groupby(values)]


def _gpu_letters(report: FleetReport, host: HostReport, verdicts: Sequence[Verdict]) -> str:
    """Return a letter of STATES per GPU. On an accepted host all GPUs passed; a large report has no verdicts on them."""
    if host.decision == ACCEPTED:
        return "p" * len(host.gpus)
    return "".join(STATES[gpu.state] for gpu in _gpu_states(report, host, verdicts))


def _gpu_states(report: FleetReport, host: HostReport, verdicts: Sequence[Verdict]) -> list[hosts.GpuState]:
    return hosts.gpu_states(host, verdicts, passes_left_out=report.detail != ALL)


def _action_number(verdict: Verdict) -> int:
    actions = list(ACTIONS)
    return actions.index(verdict.action) if verdict.action in actions else actions.index("none")


def _add_pages(
    report: FleetReport,
    numbered: Iterable[tuple[int, HostReport]],
    verdicts: VerdictsOfHost,
    causes: CausesOfHost,
    seen: Mapping[int, str],
    table: TextTable,
    pages: dict[str, Any],
    budget: int,
) -> int:
    """Add a page for each host, until one does not fit into `budget` bytes; return the remaining bytes, 0 if one did not fit."""
    for number, host in numbered:
        mark = table.mark()
        page = _page(report, host, verdicts[host.name], causes.get(host.name, ()), seen, table)
        size = len(as_json({str(number): page}).encode()) + table.size - mark[1]
        if size > budget:
            table.restore(mark)
            return 0
        pages[str(number)] = page
        budget -= size
    return budget


def _add_traces(report: FleetReport, table: TextTable, pages: dict[str, Any], budget: int) -> int:
    """Add the plots of PLOTS to `pages`, in at most `budget` bytes; return the remaining bytes.

    They show power, temperature and clocks over a launch, and power over one period of a pulsed load.
    """
    drawn = {host.name for host in detailed_hosts(report)}
    for number, host in enumerate(report.hosts):
        page = pages.get(str(number))
        for key, has_data, plots in PLOTS:
            if page is None or not has_data(host):
                continue
            mark, traces = table.mark(), []
            if host.name in drawn:
                traces = [_trace(trace, table) for trace in plots(host)]
            size = len(as_json(traces).encode()) + table.size - mark[1] + len(f',"{key}":')
            if size > budget:
                table.restore(mark)
                traces, size = [], len(f',"{key}":[]')
            page[key] = traces  # if empty, the page names the command that adds the sparklines
            budget -= size
    return budget


def _trace(trace: LaunchTrace, table: TextTable) -> list[Any]:
    """Return stage, duration, lines and names of benchmarks, columns, GPUs with sparklines, number of GPUs that are left out."""
    return [
        *table.numbers((trace.stage, trace.ends)),
        trace.benchmark_lines,
        [table.numbers(benchmark) for benchmark in trace.benchmarks],
        [table.numbers((column.name, column.range)) for column in trace.columns],
        [
            [
                *table.numbers((gpu.head, gpu.serial, gpu.lost)),
                [
                    [table.number(text), spark.band, spark.line, spark.throttled] if spark else 0
                    for text, spark in zip(gpu.figures, gpu.sparks, strict=True)
                ],
            ]
            for gpu in trace.gpus
        ],
        trace.left_out,
    ]


def _causes_of_hosts(report: FleetReport) -> CausesOfHost:
    causes: dict[str, dict[int, Cause]] = {}
    for number, cause in enumerate(report.causes):
        for position in cause.verdicts:
            causes.setdefault(report.verdicts[position].host, {})[number] = cause
    return {host: tuple(of_host.values()) for host, of_host in causes.items()}


def _page(
    report: FleetReport,
    host: HostReport,
    verdicts: Sequence[Verdict],
    causes: Sequence[Cause],
    seen: Mapping[int, str],
    table: TextTable,
) -> dict[str, Any]:
    """Return the page of one host."""
    number, numbers = table.number, table.numbers
    rows = merge_verdicts(verdicts)
    kinds = Counter(verdict.verdict for verdict in verdicts)
    software = [(name, host.software[name]) for name in sorted(host.software, key=version_order)]
    return {
        "coverage": number(_coverage_sentence(host)),
        "counts": [kinds[FAIL], kinds[INCONCLUSIVE], kinds[PASS]],
        "records": numbers(filter(None, (host.record, host.gang_record))),
        "events": numbers(host.events),
        "gpus": [
            [
                STATES[item.state],
                *numbers((f"GPU {item.gpu.index}", item.gpu.name, item.gpu.serial, item.gpu.uuid, item.gpu.pci_bus_id)),
            ]
            for item in _gpu_states(report, host, verdicts)
        ],
        "no_gpu": number(hosts.NO_GPU_JUDGED if report.rehearsal else hosts.NO_GPU),
        "software": [numbers(pair) for pair in software],
        "launches": [_launch(launch, table) for launch in host.launches],
        "reasons": [_reason(report, reason, table) for reason in reasons(report.verdicts, causes, seen)],
        "verdicts": [_row(row, table) for row in rows[:_MAX_ROWS]],
        "more": max(0, len(rows) - _MAX_ROWS),
        "pairs": pairs.host_pairs(host),
    }


def _coverage_sentence(host: HostReport) -> str:
    """Return how many expected observations were measured, and which packs judged them."""
    coverage = host.coverage
    statuses = ("missing", "error", "skipped", "unsupported")
    others = "".join(f", {count} {name}" for name in statuses if (count := getattr(coverage, name)))
    measured = f"{coverage.measured} of {coverage.expected} expected observations measured{others}."
    packs = f"Judged by {', '.join(host.packs)}." if host.packs else "No criteria pack applied."
    return f"{measured if coverage.expected else 'The plan expects no observation of this host.'} {packs}"


def _launch(launch: Launch, table: TextTable) -> list[Any]:
    row = hosts.launch_row(launch)
    texts = (row.stage, row.outcome, row.members, row.began, row.duration, row.deadline, row.reason)
    logs = [[table.number(source), table.number(tail, log=True)] for source, tail in row.logs]
    return [int(row.ok), *table.numbers(texts), logs]


def _reason(report: FleetReport, reason: Reason, table: TextTable) -> list[Any]:
    """Return letter of the verdict, number of verdicts, then the numbers of the texts in the text table.

    The texts are: title, action, part, serial, name, settings, stage, value, wanted, margin, why, criterion, source, waiver,
    evidence, what the next command does, next command, severity, what to do, and what to do if the cause comes back. If the cause
    was seen in former runs, the last text names them.
    """
    what, command = next_command(reason, report.run_id, report.measure_again)
    planned = reason.criterion == "plan"
    evidence = ", ".join(
        part for part in (_record_of(report, reason), reason.stage and f"stage {reason.stage}") if part
    )
    texts = (
        *(reason.title, reason.action, reason.scope, reason.serial, reason.name, reason.params, reason.stage),
        *(reason.value, reason.wanted, reason.margin if reason.margin != NONE else ""),
        reason.why,
        "" if planned else reason.criterion,
        "required by the plan" if planned else reason.source,
        *(reason.waiver, evidence, what, command, reason.severity),
        *reason.handling,
        *filter(None, (reason.seen,)),
    )
    return [STATES.get(reason.verdict, "i"), reason.count, *table.numbers(texts)]


def _record_of(report: FleetReport, reason: Reason) -> str:
    """Return the path of the record with the reading or figure of the leading verdict, which may be of another host."""
    host = report.host_of[reason.lead.host]
    if reason.name.startswith(BMC):
        return f"{BMCS}/{host.name}.json"
    return host.gang_record if reason.stage in GANG_STAGES and host.gang else host.record


def _row(row: VerdictRow, table: TextTable) -> list[Any]:
    """Return letter of the verdict, and numbers of texts: name, settings, part, value, wanted, margin, origin, criterion, why."""
    why = "" if row.verdict == PASS else row.detail or (row.reason if NONE in (row.value, row.wanted) else "")
    settings = ", ".join(part for part in (row.params, row.stage and f"stage {row.stage}") if part)
    texts = (row.name, settings, row.scope, row.value, row.wanted, row.margin, row.origin, row.criterion, why)
    return [STATES.get(row.verdict, "i"), *table.numbers(texts)]
