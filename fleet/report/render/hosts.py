"""What the report says of each host, and where each host stands in its rack."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from fleet.report.render.format import clean_log, decision_name, duration, when
from fleet.report.render.rows import Row, fold, worst
from fleet.report.render.versions import version_order
from schemas.records import Gpu, Launch
from schemas.reports import ACCEPTED, FAIL, INCONCLUSIVE, PASS, Coverage, FleetReport, HostReport, Verdict

FEW_HOSTS = 4
_SAFE = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,252}")


@dataclass(frozen=True, kw_only=True)
class Part:
    """A GPU of a host, and the worst that was found of it."""

    gpu: Gpu
    state: str


@dataclass(frozen=True, kw_only=True)
class Start:
    """A launch in words, with the tails of its logs where it did not finish."""

    stage: str
    outcome: str
    ok: bool
    members: str
    began: str
    took: str
    deadline: str
    reason: str
    tails: tuple[tuple[str, str], ...]
    """What wrote it, and its last lines."""


@dataclass(frozen=True, kw_only=True)
class Host:
    """A host's section."""

    name: str
    anchor: str
    rack: str
    decision: str
    word: str
    open: bool
    record: str
    coverage: Coverage
    parts: tuple[Part, ...]
    software: tuple[tuple[str, str], ...]
    packs: tuple[str, ...]
    events: tuple[str, ...]
    starts: tuple[Start, ...]
    rows: tuple[Row, ...]
    counts: Mapping[str, int]
    """Verdicts by kind."""


@dataclass(frozen=True, kw_only=True)
class Rack:
    """A rack and its hosts, in inventory order."""

    name: str
    hosts: tuple[Host, ...]


def hosts(report: FleetReport) -> list[Host]:
    """Every host of the plan, in its order."""
    verdicts: dict[str, list[Verdict]] = {}
    for verdict in report.verdicts:
        verdicts.setdefault(verdict.host, []).append(verdict)
    anchors = anchors_of(report)
    few = len(report.hosts) <= FEW_HOSTS
    return [_host(report, host, verdicts.get(host.name, []), anchors[host.name], few) for host in report.hosts]


def anchors_of(report: FleetReport) -> dict[str, str]:
    """Host -> the id of its section: `host-NAME`, or a number where the name would not do as one."""
    return {
        host.name: f"host-{host.name if _SAFE.fullmatch(host.name) else number}"
        for number, host in enumerate(report.hosts, 1)
    }


def racks(found: Sequence[Host]) -> list[Rack]:
    """The racks, in the order in which the inventory first names them."""
    names = dict.fromkeys(host.rack for host in found)
    return [Rack(name=name, hosts=tuple(host for host in found if host.rack == name)) for name in names]


def _host(report: FleetReport, host: HostReport, verdicts: Sequence[Verdict], anchor: str, few: bool) -> Host:
    counts = Counter(verdict.verdict for verdict in verdicts)
    return Host(
        name=host.name,
        anchor=anchor,
        rack=host.rack,
        decision=host.decision,
        word=decision_name(report, host.decision),
        open=few or host.decision != ACCEPTED,
        record=host.record,
        coverage=host.coverage,
        parts=tuple(Part(gpu=gpu, state=_state(gpu, verdicts)) for gpu in host.gpus),
        software=tuple((name, host.software[name]) for name in sorted(host.software, key=version_order)),
        packs=host.packs,
        events=host.events,
        starts=tuple(_start(launch) for launch in host.launches),
        rows=tuple(fold(verdicts)),
        counts={kind: counts[kind] for kind in (PASS, FAIL, INCONCLUSIVE)},
    )


def _state(gpu: Gpu, verdicts: Sequence[Verdict]) -> str:
    return worst(verdict for verdict in verdicts if verdict.scope.partition(",")[0] == f"gpu={gpu.index}")


def _start(launch: Launch) -> Start:
    ok = launch.outcome == "finished" and not launch.reason
    tails = [
        (f"rank {rank.rank}{_end(rank.exit_code)}, {rank.phase or 'no phase'}", rank.log_tail) for rank in launch.ranks
    ]
    tails.append(("the launcher", launch.log_tail))
    return Start(
        stage=launch.stage,
        outcome={"deadline": "ended at its deadline"}.get(launch.outcome, launch.outcome),
        ok=ok,
        members=f"{len(launch.members)} host{'s' if len(launch.members) != 1 else ''}",
        began=when(launch.began),
        took=duration(launch.duration_s),
        deadline=duration(launch.deadline_s),
        reason=launch.reason,
        tails=tuple((who, clean_log(tail)) for who, tail in tails if tail.strip() and not ok),
    )


def _end(exit_code: int | None) -> str:
    return " (no exit of its own)" if exit_code is None else f" (exit code {exit_code})"
