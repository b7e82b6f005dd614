"""`rackproof doctor`: inspect and judge this host in seconds, without Ansible, a plan or a benchmark."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from agent.sampling.snapshot import take_snapshot
from collectors.base import Collector
from fleet.judge.criteria import Pack
from fleet.judge.evidence import Evidence
from fleet.judge.judge import judge
from fleet.judge.pack_selection import select_packs
from schemas import VERSION
from schemas.plans import Plan, PlannedHost
from schemas.records import Gpu, Record, Snapshot
from schemas.reports import ACTIONS, FAIL, INCONCLUSIVE, PASS, Verdict

STAGE = "doctor"
FAULTY_AT_IDLE = ("gpu.pcie.generation", "pcie.slowed")
"""Readings that look faulty while an idle PCIe link saves power: its generation is lower, and `pcie.slowed` is true."""
IDLE_REASON = "an idle link may be in a power-saving state: only a benchmark shows whether the link is faulty"
NO_GPU_COUNT = (
    "expected number of GPUs unknown: give --gpus N; otherwise a GPU that is missing on the PCI bus is not noticed"
)


@dataclass(frozen=True, kw_only=True)
class Diagnosis:
    """The findings on one host."""

    host: str
    gpus: tuple[Gpu, ...]
    packs: tuple[str, ...]
    readings: int
    """Number of readings in the second snapshot, including those that have a reason for their absence instead of a value."""
    seconds: float
    """Time that the two snapshots took, without the wait between them."""
    findings: tuple[Verdict, ...]
    """Failed checks, the most severe action first."""
    not_reported: tuple[Verdict, ...]
    """Checks that could not be evaluated, for example because a reading is missing or a link is idle."""
    passed: int

    @property
    def exit_code(self) -> int:
        """0: every check passed; 1: a check failed; 2: no check failed, but one could not be evaluated."""
        return 1 if self.findings else 2 if self.not_reported else 0


def examine(
    collectors: Sequence[Collector],
    packs: Sequence[Pack],
    *,
    host: str,
    gpu_count: int | None,
    wait_s: float,
) -> Diagnosis:
    """Take two snapshots of the collectors' readings, judge the readings and their changes, and return the diagnosis.

    Args:
        gpu_count: expected number of GPUs; None: the number on the PCI bus or in the driver, whichever is higher.
        wait_s: seconds between the two snapshots.
    """
    first, _ = take_snapshot(collectors, stage=STAGE, phase="before")
    time.sleep(wait_s)
    second, gpus = take_snapshot(collectors, stage=STAGE, phase="after")
    plan = build_plan(host, _detected_gpu_count(second) if gpu_count is None else gpu_count, first.at)
    verdicts = list(_excuse_idle_links(judge_snapshots(plan, (first, second), gpus, packs), packs))
    if gpu_count is None:
        verdicts.append(_gpu_count_verdict(host))
    selected, _ = select_packs(plan, plan.hosts[0], gpus, packs)
    return Diagnosis(
        host=host,
        gpus=gpus,
        packs=tuple(pack.name for pack in selected),
        readings=sum(len(metric.values) + len(metric.absent) for metric in second.metrics),
        seconds=first.duration_s + second.duration_s,
        findings=tuple(sorted((verdict for verdict in verdicts if verdict.verdict == FAIL), key=_severity)),
        not_reported=tuple(verdict for verdict in verdicts if verdict.verdict == INCONCLUSIVE),
        passed=sum(verdict.verdict == PASS for verdict in verdicts),
    )


def build_plan(host: str, gpu_count: int, created: str) -> Plan:
    """Return a plan without stages for one host with `gpu_count` GPUs."""
    planned = PlannedHost(name=host, address="", rack="", device="gpu", devices=tuple(range(gpu_count)))
    return Plan(
        run_id=STAGE,
        nonce="0" * 32,
        created=created,
        profile=STAGE,
        rehearsal=False,
        criteria=(),
        stages=(),
        hosts=(planned,),
        expected=(),
    )


def judge_snapshots(
    plan: Plan, snapshots: Sequence[Snapshot], gpus: Iterable[Gpu], packs: Sequence[Pack]
) -> list[Verdict]:
    """Return the verdicts on the only host of the plan, judged from these snapshots."""
    host = plan.hosts[0]
    record = Record(
        run_id=plan.run_id,
        nonce=plan.nonce,
        host=host.name,
        began=snapshots[0].at,
        ended=snapshots[-1].at,
        rackproof=VERSION,
        gpus=tuple(gpus),
        snapshots=tuple(snapshots),
    )
    return judge(plan, {host.name: Evidence(records=(record,))}, packs)


def _gpu_count_verdict(host: str) -> Verdict:
    return Verdict(
        host=host, scope="host", name="gpu.count", verdict=INCONCLUSIVE, criterion="plan", reason=NO_GPU_COUNT
    )


def _detected_gpu_count(snapshot: Snapshot) -> int:
    """Return the number of GPUs on the PCI bus or in the driver, whichever is higher."""
    host_values = {metric.name: metric.values.get("host") for metric in snapshot.metrics}
    counts = [host_values.get(name) for name in ("gpu.pci_count", "gpu.count")]
    return max((int(count) for count in counts if isinstance(count, int | float)), default=0)


def _excuse_idle_links(verdicts: Iterable[Verdict], packs: Sequence[Pack]) -> Iterable[Verdict]:
    """Yield the verdicts. Those that failed on a reading in FAULTY_AT_IDLE become inconclusive: the link may be saving power.

    This applies only to criteria with `best_of_run`, which pass if the link is fast in any snapshot of a run. Here no benchmark
    puts load on the link.
    """
    criteria = [criterion for pack in packs for criterion in pack.criteria if criterion.best_of_run]
    idle_criteria = {criterion.id for criterion in criteria if criterion.name in FAULTY_AT_IDLE}
    for verdict in verdicts:
        if verdict.verdict == FAIL and verdict.criterion in idle_criteria:
            yield replace(verdict, verdict=INCONCLUSIVE, action="none", reason=f"{verdict.reason}; {IDLE_REASON}")
        else:
            yield verdict


def _severity(verdict: Verdict) -> tuple[int, str, str]:
    return ACTIONS.index(verdict.action), verdict.scope, verdict.name


def table(diagnosis: Diagnosis) -> str:
    """Return the diagnosis as text for the terminal."""
    names = sorted({gpu.name for gpu in diagnosis.gpus})
    lines = [
        f"{diagnosis.host}: {len(diagnosis.gpus)} GPUs ({', '.join(names) or 'no GPU could be identified'}); "
        f"two snapshots of {diagnosis.readings} readings took {diagnosis.seconds:.1f} s; "
        f"criteria packs: {', '.join(diagnosis.packs)}"
    ]
    lines += _rows("FAILED", [(item.action.replace("_", " "), item) for item in diagnosis.findings])
    lines += _rows("NOT EVALUATED", [("", item) for item in diagnosis.not_reported])
    lines.append(
        f"{diagnosis.passed} checks passed, {len(diagnosis.findings)} failed, "
        f"{len(diagnosis.not_reported)} could not be evaluated; "
        "bandwidth and speed were not checked: only benchmarks measure them"
    )
    return "\n".join(lines)


def _rows(title: str, rows: Sequence[tuple[str, Verdict]]) -> list[str]:
    if not rows:
        return []
    parts = [f"{item.scope} {item.serial}".strip() for _, item in rows]
    action_width, part_width = max(len(action) for action, _ in rows), max(map(len, parts))
    return (
        ["", title]
        + [
            f"  {action:<{action_width}}  {part:<{part_width}}  {item.name}: {item.reason} [{item.criterion}]".rstrip()
            for (action, item), part in zip(rows, parts, strict=True)
        ]
        + [""]
    )
