"""Describe racks, GPUs and launches of the hosts for the report page."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from fleet.judge.waivers import STAGE_PREFIX
from fleet.report.formatting import clean_log, decision_name, duration, format_time
from fleet.report.links import host_anchor
from fleet.report.tables.verdict_rows import worst_verdict
from schemas.records import Gpu, Launch
from schemas.reports import ACCEPTED, FAIL, INCONCLUSIVE, PASS, RECORD, FleetReport, HostReport, Verdict

NO_GPU = "This host reported no GPU."
NO_GPU_JUDGED = "No GPU was tested: the ranks ran on CPUs."


@dataclass(frozen=True, kw_only=True)
class GpuState:
    """A GPU of a host, and its state."""

    gpu: Gpu
    state: str
    """`pass`, `fail` or `inconclusive`."""


@dataclass(frozen=True, kw_only=True)
class LaunchRow:
    """A launch in words. If it failed, the row has the last lines of its logs."""

    stage: str
    outcome: str
    ok: bool
    members: str
    began: str
    duration: str
    deadline: str
    reason: str
    logs: tuple[tuple[str, str], ...]
    """For each log: the process that wrote it, and the last lines of the log. Empty if the launch succeeded."""


@dataclass(frozen=True, kw_only=True)
class OpenHost:
    """A host that is not accepted: a row of the list that the page shows if JavaScript is disabled."""

    name: str
    anchor: str
    decision: str
    decision_name: str
    counts: str


@dataclass(frozen=True, kw_only=True)
class Rack:
    """A rack: the number of its accepted hosts, and the hosts that are not accepted."""

    name: str
    hosts: int
    accepted: int
    open: tuple[OpenHost, ...]


def racks(report: FleetReport) -> list[Rack]:
    """Return the racks in the order of the inventory."""
    by_rack: dict[str, list[HostReport]] = {}
    for host in report.hosts:
        by_rack.setdefault(host.rack, []).append(host)
    kinds = Counter((verdict.host, verdict.verdict) for verdict in report.verdicts)
    return [
        Rack(
            name=name,
            hosts=len(members),
            accepted=sum(host.decision == ACCEPTED for host in members),
            open=tuple(
                OpenHost(
                    name=host.name,
                    anchor=host_anchor(host.name),
                    decision=host.decision,
                    decision_name=decision_name(report, host.decision),
                    counts=f"{kinds[host.name, FAIL]} failed, {kinds[host.name, INCONCLUSIVE]} inconclusive",
                )
                for host in members
                if host.decision != ACCEPTED
            ),
        )
        for name, members in by_rack.items()
    ]


def gpu_states(host: HostReport, verdicts: Sequence[Verdict], *, passes_left_out: bool = False) -> list[GpuState]:
    """Return the state of each GPU of a host: the worst verdict on it. A waived verdict counts as `pass`.

    A GPU without verdicts is `inconclusive`. If the report leaves out passes, it is `pass`, unless the host has more unmeasured
    observations than inconclusive verdicts (waived or not). In that case, an unmeasured observation of the GPU may have no
    verdict.

    If the record of the host or one of its stages has an inconclusive verdict (waived or not), each GPU that would be `pass` is
    `inconclusive` instead.

    Args:
        host: the host.
        verdicts: the verdicts on the host that the report has.
        passes_left_out: whether the report leaves out verdicts that pass.
    """
    by_part: dict[str, list[Verdict]] = {}
    for verdict in verdicts:
        counted = replace(verdict, verdict=PASS) if verdict.waiver else verdict
        by_part.setdefault(verdict.part_scope, []).append(counted)
    is_judged = not any(verdict.verdict == INCONCLUSIVE and _is_of_record_or_stage(verdict) for verdict in verdicts)
    gap_count = host.coverage.expected - host.coverage.measured
    inconclusive_count = sum(verdict.verdict == INCONCLUSIVE for verdict in verdicts)
    default = PASS if passes_left_out and gap_count <= inconclusive_count else INCONCLUSIVE
    states = []
    for gpu in host.gpus:
        of_gpu = by_part.get(f"gpu={gpu.index}", ())
        state = worst_verdict(of_gpu) if of_gpu else default
        states.append(GpuState(gpu=gpu, state=state if state != PASS or is_judged else INCONCLUSIVE))
    return states


def _is_of_record_or_stage(verdict: Verdict) -> bool:
    return verdict.name == RECORD or verdict.name.startswith(STAGE_PREFIX)


def launch_row(launch: Launch) -> LaunchRow:
    """Return a launch in words."""
    ok = launch.outcome == "finished" and not launch.reason
    logs = [
        (f"rank {rank.rank}{_exit(rank.exit_code)}, {rank.phase or 'no phase'}", rank.log_tail) for rank in launch.ranks
    ]
    logs.append(("the launcher", launch.log_tail))
    return LaunchRow(
        stage=launch.stage,
        outcome={"deadline": "stopped at its deadline"}.get(launch.outcome, launch.outcome),
        ok=ok,
        members=f"{len(launch.members)} host{'s' if len(launch.members) != 1 else ''}",
        began=format_time(launch.began),
        duration=duration(launch.duration_s),
        deadline=duration(launch.deadline_s),
        reason=launch.reason,
        logs=tuple((source, clean_log(tail)) for source, tail in logs if tail.strip() and not ok),
    )


def _exit(exit_code: int | None) -> str:
    return " (no exit code)" if exit_code is None else f" (exit code {exit_code})"
