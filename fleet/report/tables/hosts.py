"""What the report says of each host, and where each host stands in its rack."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from urllib.parse import quote

from fleet.report.format import clean, clean_log, decision_name, duration, when
from fleet.report.tables.rows import worst
from schemas.records import Gpu, Launch
from schemas.reports import ACCEPTED, FAIL, INCONCLUSIVE, PASS, FleetReport, HostReport, Verdict

NO_GPU = "This host named no GPU."
NO_GPU_JUDGED = "No GPU was looked at: the ranks ran on CPUs."


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
class Open:
    """A host that is not accepted, for readers whose browser runs no script."""

    name: str
    anchor: str
    decision: str
    word: str
    counts: str


@dataclass(frozen=True, kw_only=True)
class Rack:
    """A rack: how many of its hosts are accepted, and those that are not."""

    name: str
    hosts: int
    accepted: int
    open: tuple[Open, ...]


def anchor_of(name: str) -> str:
    """The fragment by which a host's page is linked: `host=NAME`, with what no link can hold written as %XX."""
    return f"host={quote(clean(name), safe='')}"


def anchors_of(report: FleetReport) -> dict[str, str]:
    """Host -> the fragment that leads to its page."""
    return {host.name: anchor_of(host.name) for host in report.hosts}


def racks(report: FleetReport) -> list[Rack]:
    """The racks, in the order in which the inventory first names them."""
    found: dict[str, list[HostReport]] = {}
    for host in report.hosts:
        found.setdefault(host.rack, []).append(host)
    kinds = Counter((verdict.host, verdict.verdict) for verdict in report.verdicts)
    return [
        Rack(
            name=name,
            hosts=len(members),
            accepted=sum(host.decision == ACCEPTED for host in members),
            open=tuple(
                Open(
                    name=host.name,
                    anchor=anchor_of(host.name),
                    decision=host.decision,
                    word=decision_name(report, host.decision),
                    counts=f"{kinds[host.name, FAIL]} failed, {kinds[host.name, INCONCLUSIVE]} inconclusive",
                )
                for host in members
                if host.decision != ACCEPTED
            ),
        )
        for name, members in found.items()
    ]


def parts(host: HostReport, verdicts: Sequence[Verdict], *, passes_left_out: bool = False) -> list[Part]:
    """The GPUs of a host, each with the worst of the verdicts on it; without one nothing is known, unless passes are left out."""
    of_gpu: dict[str, list[Verdict]] = {}
    for verdict in verdicts:
        of_gpu.setdefault(verdict.place, []).append(verdict)
    quiet = PASS if passes_left_out else INCONCLUSIVE
    found = [of_gpu.get(f"gpu={gpu.index}", ()) for gpu in host.gpus]
    return [Part(gpu=gpu, state=worst(own) if own else quiet) for gpu, own in zip(host.gpus, found, strict=True)]


def start(launch: Launch) -> Start:
    """A launch in words."""
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
