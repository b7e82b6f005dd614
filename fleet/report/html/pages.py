"""What the page draws by itself: every host in columns, and of as many hosts as there is room for all that is known.

A text stands once in the block and is meant by its number. All of it is cleaned here and put into the page as text alone.
"""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from typing import Any

from fleet.quantities import NONE
from fleet.report.format import ACTIONS, clean, decision_name
from fleet.report.html import pairs
from fleet.report.html.block import Block, as_json
from fleet.report.html.timeline_launch import Course, courses, has_courses, hosts_with_courses
from fleet.report.tables import hosts
from fleet.report.tables.reasons import Reason, reasons
from fleet.report.tables.rows import Row, fold
from fleet.report.tables.versions import version_order
from schemas.readings import READINGS
from schemas.records import Launch
from schemas.reports import (
    ACCEPTED,
    ALL,
    FAIL,
    INCOMPLETE,
    INCONCLUSIVE,
    PASS,
    REJECTED,
    FleetReport,
    HostReport,
    Verdict,
)

_DECISIONS = (ACCEPTED, REJECTED, INCOMPLETE)
_STATES = {"pass": "p", FAIL: "f", INCONCLUSIVE: "i"}
_MOST_ROWS = 600


def embedded(report: FleetReport, room: int) -> str:
    """The data block of the page, in at most `room` bytes where the columns of the hosts alone are not more.

    Pages of hosts that are not accepted come first, then the serials to search by, then pages of accepted hosts, and what went
    on over time where there is room left for it.
    """
    of_host: dict[str, list[Verdict]] = {host.name: [] for host in report.hosts}
    for verdict in report.verdicts:
        of_host.setdefault(verdict.host, []).append(verdict)
    block = Block()
    data = _columns(report, of_host, block)
    serials = [" ".join(clean(gpu.serial) for gpu in host.gpus if gpu.serial) for host in report.hosts]
    left = room - len(as_json(data).encode()) - block.size - 64
    pages: dict[str, Any] = {}
    numbered = list(enumerate(report.hosts))
    left = _add(report, [item for item in numbered if item[1].decision != ACCEPTED], of_host, block, pages, left)
    size = len(as_json(serials).encode())
    if any(serials) and size < left:
        data["serials"] = serials
        left -= size
    left = _add(report, [item for item in numbered if item[1].decision == ACCEPTED], of_host, block, pages, left)
    _add_courses(report, block, pages, left)
    return as_json({**data, "pages": pages, "s": block.all})


def _columns(report: FleetReport, of_host: Mapping[str, Sequence[Verdict]], block: Block) -> dict[str, Any]:
    """What is known of every host: columns as long as there are hosts, runs of the same value, or values by number."""
    racks = list(dict.fromkeys(host.rack for host in report.hosts))
    numbers = {rack: number for number, rack in enumerate(racks)}
    found: dict[str, Any] = {
        "names": [clean(host.name) for host in report.hosts],
        "racks": [clean(rack) for rack in racks],
        "rack": _runs(numbers[host.rack] for host in report.hosts),
        "decision": "".join(str(_DECISIONS.index(host.decision)) for host in report.hosts),
        "words": [decision_name(report, decision) for decision in _DECISIONS],
        "gpus": _runs(_states(report, host, of_host[host.name]) for host in report.hosts),
        "seen": _runs(f"{host.coverage.measured}/{host.coverage.expected}" for host in report.hosts),
        "actions": [name or "No action named" for name in ACTIONS.values()],
        "run": f"runs/{clean(report.run_id)}",
        "mark": report.mark,
    }
    counts, why, acts = {}, {}, {}
    for number, host in enumerate(report.hosts):
        verdicts = of_host[host.name]
        standing = [verdict for verdict in verdicts if verdict.stands]
        kinds = Counter(verdict.verdict for verdict in standing)
        waived = sum(verdict.waiver is not None for verdict in verdicts)
        if standing or waived:
            counts[number] = [kinds[FAIL], kinds[INCONCLUSIVE], waived]
        if first := _gravest(standing or verdicts):
            why[number] = block.text(_phrase(first))
            acts[number] = sorted({_action(verdict) for verdict in standing if verdict.verdict == FAIL})
    return {**found, "counts": counts, "why": why, "acts": {key: value for key, value in acts.items() if value}}


def _runs(values: Iterable[Any]) -> list[list[Any]]:
    """Each value and how often it comes in a row."""
    return [[value, len(list(same))] for value, same in groupby(values)]


def _states(report: FleetReport, host: HostReport, verdicts: Sequence[Verdict]) -> str:
    """A letter a GPU. Of an accepted host a large report keeps no verdict: all of its GPUs passed."""
    if host.decision == ACCEPTED:
        return "p" * len(host.gpus)
    return "".join(_STATES[part.state] for part in _parts(report, host, verdicts))


def _parts(report: FleetReport, host: HostReport, verdicts: Sequence[Verdict]) -> list[hosts.Part]:
    against = [replace(verdict, verdict=PASS) if verdict.waiver else verdict for verdict in verdicts]
    return hosts.parts(host, against, passes_left_out=report.detail != ALL)


def _action(verdict: Verdict) -> int:
    known = list(ACTIONS)
    return known.index(verdict.action) if verdict.action in known else known.index("none")


def _gravest(verdicts: Iterable[Verdict]) -> Verdict | None:
    open_ = [verdict for verdict in verdicts if verdict.verdict in (FAIL, INCONCLUSIVE)]
    return min(open_, key=lambda verdict: (verdict.verdict != FAIL, _action(verdict)), default=None)


def _phrase(verdict: Verdict) -> str:
    """One finding in a line of the list of hosts."""
    [reason] = reasons([verdict])
    place = f"{reason.scope}: " if reason.scope not in ("", "host") else ""
    said = f"{reason.found}, wanted {reason.wanted}" if reason.found else reason.text
    return f"{place}{reason.name} {said}"[:200]


def _add(
    report: FleetReport,
    chosen: Iterable[tuple[int, HostReport]],
    of_host: Mapping[str, Sequence[Verdict]],
    block: Block,
    pages: dict[str, Any],
    room: int,
) -> int:
    """Pages of the chosen hosts, one by one until the next finds no room; how much is left then."""
    for number, host in chosen:
        mark = block.mark()
        if report.detail != ALL and host.decision == ACCEPTED:
            break
        page = _page(report, host, of_host[host.name], block)
        size = len(as_json({str(number): page}).encode()) + block.size - mark[1]
        if size > room:
            block.back(mark)
            return 0
        pages[str(number)] = page
        room -= size
    return room


def _add_courses(report: FleetReport, block: Block, pages: dict[str, Any], room: int) -> None:
    """How power, temperature and clocks went, on the pages that are there: nothing was left out to make room for it."""
    chosen = {host.name for host in hosts_with_courses(report)}
    for number, host in enumerate(report.hosts):
        page = pages.get(str(number))
        if page is None or not has_courses(host):
            continue
        mark, found = block.mark(), []
        if host.name in chosen:
            found = [_course(course, block) for course in courses(host)]
        size = len(as_json(found).encode()) + block.size - mark[1] + len(',"courses":')
        if size > room:
            block.back(mark)
            found, size = [], len(',"courses":[]')
        page["courses"] = found  # none: the page tells how they are had
        room -= size


def _course(course: Course, block: Block) -> list[Any]:
    """Stage, how long, where benchmarks began, which, columns, GPUs with a picture a column, and how many more there are."""
    return [
        *block.texts((course.stage, course.ends)),
        course.begun,
        [block.texts(benchmark) for benchmark in course.benchmarks],
        [block.texts((column.name, column.range)) for column in course.columns],
        [
            [
                *block.texts((part.head, part.serial, part.lost)),
                [
                    [block.text(words), found.band, found.line, found.held] if found else 0
                    for words, found in zip(part.figures, part.sparks, strict=True)
                ],
            ]
            for part in course.parts
        ],
        course.left_out,
    ]


def _page(report: FleetReport, host: HostReport, verdicts: Sequence[Verdict], block: Block) -> dict[str, Any]:
    """All that is known of one host."""
    text, texts = block.text, block.texts
    lines = fold(verdicts)
    kinds = Counter(verdict.verdict for verdict in verdicts)
    told = [(name, host.software[name]) for name in sorted(host.software, key=version_order)]
    return {
        "lede": text(_lede(host)),
        "counts": [kinds[FAIL], kinds[INCONCLUSIVE], kinds["pass"]],
        "record": text(host.record),
        "events": texts(host.events),
        "gpus": [
            [
                _STATES[part.state],
                *texts((f"GPU {part.gpu.index}", part.gpu.name, part.gpu.serial, part.gpu.uuid, part.gpu.pci_bus_id)),
            ]
            for part in _parts(report, host, verdicts)
        ],
        "no_gpu": text(hosts.NO_GPU_JUDGED if report.rehearsal else hosts.NO_GPU),
        "software": [texts(pair) for pair in told],
        "starts": [_start(launch, block) for launch in host.launches],
        "reasons": [_reason(host, found, block) for found in reasons(verdicts)],
        "rows": [_row(line, block) for line in lines[:_MOST_ROWS]],
        "more": max(0, len(lines) - _MOST_ROWS),
        "pairs": pairs.of_host(host),
    }


def _lede(host: HostReport) -> str:
    """How much of it was seen, and by what it was judged."""
    seen = host.coverage
    odd = [
        f"{count} {name}" for name in ("missing", "error", "skipped", "unsupported") if (count := getattr(seen, name))
    ]
    measured = (
        f"{seen.measured} of {seen.expected} expected observations measured{''.join(f', {part}' for part in odd)}."
    )
    packs = f"Judged by {', '.join(host.packs)}." if host.packs else "No criteria pack applied."
    return f"{measured if seen.expected else 'The plan expects no observation of this host.'} {packs}"


def _start(launch: Launch, block: Block) -> list[Any]:
    text, start = block.text, hosts.start(launch)
    return [
        int(start.ok),
        *block.texts(
            (start.stage, start.outcome, start.members, start.began, start.took, start.deadline, start.reason)
        ),
        [[text(who), text(tail, log=True)] for who, tail in start.tails],
    ]


def _reason(host: HostReport, found: Reason, block: Block) -> list[Any]:
    """Verdict, action and count, then texts: part, serial, name, settings, stage, found, wanted, margin, why, criterion,
    source, waiver, evidence, the command that measures it again, severity."""
    compared = bool(found.found)
    evidence = ", ".join(part for part in (host.record, found.stage and f"stage {found.stage}") if part)
    return [
        _STATES.get(found.verdict, "i"),
        found.count,
        *block.texts(
            (
                *(found.action, found.scope, found.serial, found.name, found.params, found.stage),
                *(found.found, found.wanted, found.margin if found.margin != NONE else ""),
                found.detail if compared else found.text,
                "" if found.criterion == "plan" else found.criterion,
                "the plan expects it" if found.criterion == "plan" else found.source,
                *(found.waiver, evidence, again(host.name, found.name), found.severity),
            )
        ),
    ]


def _row(line: Row, block: Block) -> list[Any]:
    """Verdict, then texts: name, settings, part, found, wanted, margin, origin, criterion, why."""
    why = "" if line.verdict == PASS else line.detail or (line.reason if NONE in (line.found, line.wanted) else "")
    settings = ", ".join(part for part in (line.params, line.stage and f"stage {line.stage}") if part)
    names = (line.name, settings, line.scope, line.found, line.wanted, line.margin, line.origin, line.criterion, why)
    return [_STATES.get(line.verdict, "i"), *block.texts(names)]


def again(host: str, name: str) -> str:
    """The command by which a figure of a host is measured anew: a reading at once, a benchmark by a run of its own."""
    quoted = shlex.quote(clean(host))
    if name in READINGS:
        return f"ssh {quoted} sudo /opt/rackproof/bin/rackproof doctor"
    return f"ansible-playbook -i INVENTORY playbooks/acceptance.yml --limit {quoted}"
