"""`rackproof doctor`: inspect and judge this host in seconds, without Ansible, a plan or a benchmark."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
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
SLEEPING = ("gpu.pcie.generation", "pcie.slowed")
AT_IDLE = "links may save power at idle: only a benchmark can show a fault"
NOT_SAID = "how many GPUs were ordered was not said: give --gpus, or one that is gone from the PCI bus is not missed"


@dataclass(frozen=True, kw_only=True)
class Diagnosis:
    """The findings on one host."""

    host: str
    gpus: tuple[Gpu, ...]
    packs: tuple[str, ...]
    readings: int
    seconds: float
    """Time that the two snapshots took."""
    findings: tuple[Verdict, ...]
    """Failed checks, the most severe action first."""
    untold: tuple[Verdict, ...]
    """Checks that could not be evaluated."""
    passed: int

    @property
    def exit_code(self) -> int:
        """0: no findings; 1: a check failed; 2: no check failed, but one could not be evaluated."""
        return 1 if self.findings else 2 if self.untold else 0


def examine(
    collectors: Sequence[Collector],
    packs: Sequence[Pack],
    *,
    host: str,
    gpu_count: int | None,
    wait_s: float,
    sleep: Callable[[float], None] = time.sleep,
) -> Diagnosis:
    """Take two snapshots and judge them, and the changes between them.

    Args:
        gpu_count: GPUs that the host should have; None: as many as are on its PCI bus.
        wait_s: seconds between the two snapshots.
    """
    first, _ = take_snapshot(collectors, stage=STAGE, phase="before")
    sleep(wait_s)
    second, gpus = take_snapshot(collectors, stage=STAGE, phase="after")
    plan = plan_of(host, _on_the_bus(second) if gpu_count is None else gpu_count, first.at)
    verdicts = list(_at_idle(judged(plan, (first, second), gpus, packs), packs))
    if gpu_count is None:
        verdicts.append(_not_said(host))
    chosen, _ = select_packs(plan, plan.hosts[0], gpus, packs)
    return Diagnosis(
        host=host,
        gpus=gpus,
        packs=tuple(pack.name for pack in chosen),
        readings=sum(len(metric.values) + len(metric.absent) for metric in second.metrics),
        seconds=first.duration_s + second.duration_s,
        findings=tuple(sorted((verdict for verdict in verdicts if verdict.verdict == FAIL), key=_severity)),
        untold=tuple(verdict for verdict in verdicts if verdict.verdict == INCONCLUSIVE),
        passed=sum(verdict.verdict == PASS for verdict in verdicts),
    )


def plan_of(host: str, gpu_count: int, created: str) -> Plan:
    """Return a plan of one host with this many GPUs and without stages."""
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


def judged(plan: Plan, snapshots: Sequence[Snapshot], gpus: Iterable[Gpu], packs: Sequence[Pack]) -> list[Verdict]:
    """Return the verdicts on the only host of the plan after these snapshots."""
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


def _not_said(host: str) -> Verdict:
    return Verdict(host=host, scope="host", name="gpu.count", verdict=INCONCLUSIVE, criterion="plan", reason=NOT_SAID)


def _on_the_bus(snapshot: Snapshot) -> int:
    """Return the number of GPUs on the PCI bus or in the driver, whichever is higher."""
    read = {metric.name: metric.values.get("host") for metric in snapshot.metrics}
    counts = [read.get(name) for name in ("gpu.pci_count", "gpu.count")]
    return max((int(count) for count in counts if isinstance(count, int | float)), default=0)


def _at_idle(verdicts: Iterable[Verdict], packs: Sequence[Pack]) -> Iterable[Verdict]:
    """Make findings about slow links inconclusive: without load a link may be in a power-saving state."""
    criteria = [criterion for pack in packs for criterion in pack.criteria if criterion.best_of_run]
    asleep = {criterion.id for criterion in criteria if criterion.name in SLEEPING}
    for verdict in verdicts:
        if verdict.verdict == FAIL and verdict.criterion in asleep:
            yield replace(verdict, verdict=INCONCLUSIVE, action="none", reason=f"{verdict.reason}; {AT_IDLE}")
        else:
            yield verdict


def _severity(verdict: Verdict) -> tuple[int, str, str]:
    return ACTIONS.index(verdict.action), verdict.scope, verdict.name


def table(result: Diagnosis) -> str:
    """The diagnosis for people."""
    names = sorted({gpu.name for gpu in result.gpus})
    lines = [
        f"{result.host}: {len(result.gpus)} GPUs ({', '.join(names) or 'no driver answers for any'}); "
        f"{result.readings} readings, two snapshots in {result.seconds:.1f} s; criteria {', '.join(result.packs)}"
    ]
    lines += _rows("FOUND", [(item.action.replace("_", " "), item) for item in result.findings])
    lines += _rows("NOT TOLD", [("", item) for item in result.untold])
    lines.append(
        f"{result.passed} checks passed, {len(result.findings)} failed, {len(result.untold)} could not be told; "
        "bandwidth and speed are the benchmarks' to tell"
    )
    return "\n".join(lines)


def _rows(title: str, rows: Sequence[tuple[str, Verdict]]) -> list[str]:
    if not rows:
        return []
    parts = [f"{item.scope} {item.serial}".strip() for _, item in rows]
    width, wide = max(len(action) for action, _ in rows), max(map(len, parts))
    return (
        ["", title]
        + [
            f"  {action:<{width}}  {part:<{wide}}  {item.name}: {item.reason} [{item.criterion}]".rstrip()
            for (action, item), part in zip(rows, parts, strict=True)
        ]
        + [""]
    )
