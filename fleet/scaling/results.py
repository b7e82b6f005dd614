"""Evaluate the cells of a scaling study from the records fetched so far, and select the next cell to measure.

A cell is one combination of settings, such as the number of hosts, and is measured in a launch of its own. This module reads and
writes no files.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace

from fleet.judge.evidence import Evidence
from fleet.planning.next_launch import Decision, LaunchPlan
from schemas.plans import Plan
from schemas.records import Launch, Observation
from schemas.stages import CELL
from schemas.studies import WORKLOAD, Cell, Study

GANG = "all"
"""Name of the gang (the hosts of one multi-node launch) with all hosts of a study. Each cell launches some or all of them."""
MEASURED, FAILED, SKIPPED, OPEN = "measured", "failed", "skipped", "open"
"""State of a cell.

MEASURED: all its figures are valid. FAILED: it was launched, but has no valid result; `CellResult.reason` states why. SKIPPED:
the inventory has too few hosts, or the budget is used up. OPEN: not launched yet.
"""
MAX_LAUNCH_S = 366 * 86400.0
"""Maximum duration of a launch in seconds. A cell whose record has a longer one fails."""
_MIN_POSITIVE, _MAX_NUMBER = 1e-9, 1e15
FIGURE_RANGES: Mapping[str, tuple[float, float]] = {
    "hookup": (_MIN_POSITIVE, MAX_LAUNCH_S),
    "duration": (_MIN_POSITIVE, MAX_LAUNCH_S),
    "throughput": (_MIN_POSITIVE, _MAX_NUMBER),
    "accuracy": (0.0, 1.0),
    "loss": (0.0, math.inf),
}
"""Figure of a measured cell -> its valid minimum and maximum, in s (`hookup`, `duration`), images/s (`throughput`) or 1."""
NOT_YET = "not measured yet: start the study again with the same run id"


@dataclass(frozen=True, kw_only=True)
class CellResult:
    """The result of one cell. Missing figures are None. If the cell was not measured, `reason` states why."""

    number: int
    """Position of the cell in the study, from 1."""
    cell: Cell
    state: str
    reason: str = ""
    members: tuple[str, ...] = ()
    """The hosts that took part, in rank order."""
    began: str = ""
    wall_s: float | None = None
    """Seconds from the launch of the ranks to the end of the last rank."""
    spent_s: float = 0.0
    """Total seconds of the launches of this cell.

    If the records of a launch cannot be fetched, other hosts launch the cell again. If the records are fetched later, both
    launches count.
    """
    host_s: float = 0.0
    """Total host-seconds of these launches. The host-seconds of a launch are its seconds times its number of hosts."""
    hookup_s: float | None = None
    """Seconds from the launch to the end of the first training step, on the slowest rank."""
    train_s: float | None = None
    """Seconds from the end of the first training step to the end of the last one, on the slowest rank."""
    throughput: float | None = None
    """Images per second of all ranks during `train_s`."""
    accuracy: float | None = None
    """Share of the test images that are classified correctly."""
    loss: float | None = None
    """Mean loss on the test images."""
    data: str = ""
    """Name of the data set; `synthetic` if the hosts had no Fashion-MNIST."""
    cut: bool = False
    """Whether `max_steps` ended the training before its last epoch was complete."""
    cost: float | None = None
    """`host_s` at the price of a host; None if the price is unknown, or the cell was not launched."""
    efficiency: float | None = None
    """Throughput per rank, divided by the throughput per rank of cell `against`."""
    against: int = 0
    """Number of the measured cell with the fewest ranks and the same batch per rank, epochs, CPUs and precision as this cell."""
    share: float | None = None
    """Throughput divided by the throughput of cell `unconfined`; None if the CPUs of this cell are not limited."""
    unconfined: int = 0
    """Number of a measured cell whose ranks may use all CPUs. Its other settings are equal, except perhaps `epochs`."""


@dataclass(frozen=True, kw_only=True)
class StudyResults:
    """The results of a study."""

    rows: tuple[CellResult, ...]
    hours: float
    """Duration of all launches in hours."""
    cost: float | None
    stopped: str = ""
    """Which limit of the budget is reached, so that no further cell is launched; empty if none."""
    gpus: tuple[str, ...] = ()
    """Names of the GPU models."""
    software: tuple[str, ...] = ()
    """Software versions of the hosts."""
    rejected: tuple[str, ...] = ()
    """Rejected input files, and why."""

    def count(self, state: str) -> int:
        """Return the number of cells in a state."""
        return sum(row.state == state for row in self.rows)

    @property
    def is_complete(self) -> bool:
        """Return whether at least one cell was measured, and every other cell was measured or skipped."""
        return bool(self.count(MEASURED)) and not self.count(FAILED) and not self.count(OPEN)


def evaluate_study(plan: Plan, evidence: Mapping[str, Evidence], *, price: float | None = None) -> StudyResults:
    """Return the results of a study.

    Args:
        plan: plan of the study.
        evidence: host -> its evidence; gang records suffice.
        price: price of one host for an hour, with which the costs in the results are computed; None: the price in the plan.
            Whether the budget is used up always depends on the price in the plan.
    """
    study = plan.study or Study(cells=())
    launches = _launches_by_cell(evidence)
    rows = [
        _row_of_cell(number, cell, launches[number]) if number in launches else _row_without_launch(plan, number, cell)
        for number, cell in enumerate(study.cells, 1)
    ]
    hours = sum(row.spent_s for row in rows) / 3600
    stopped = _stop_reason(study, rows, hours)
    if stopped:
        rows = [replace(row, state=SKIPPED, reason=stopped) if row.state == OPEN else row for row in rows]
    host_hour = study.price if price is None else price
    if host_hour:
        rows = [replace(row, cost=row.host_s / 3600 * host_hour) if row.members else row for row in rows]
    return StudyResults(
        rows=tuple(_with_cpu_share(_with_efficiency(row, rows), rows) for row in rows),
        hours=hours,
        cost=sum(row.cost or 0.0 for row in rows) if host_hour else None,
        stopped=stopped,
        gpus=tuple(sorted({gpu.name for host_evidence in evidence.values() for gpu in host_evidence.gpus()})),
        software=tuple(
            sorted({" ".join(item) for host_evidence in evidence.values() for item in host_evidence.software().items()})
        ),
    )


def next_cell(plan: Plan, evidence: Mapping[str, Evidence], present: Collection[str]) -> Decision:
    """Return the launch of the first open cell for which enough hosts with enough GPUs are present; none if no cell is suitable.

    Cells are launched one at a time, because two at once would share the network between the hosts.
    """
    for row in evaluate_study(plan, evidence).rows:
        suitable = [host.name for host in plan.hosts if host.name in present and len(host.devices) >= row.cell.gpus]
        if row.state == OPEN and len(suitable) >= row.cell.hosts:
            return Decision(
                launches=(LaunchPlan(gang=GANG, members=tuple(suitable[: row.cell.hosts]), number=row.number),),
                excluded={},
            )
    return Decision(launches=(), excluded={})


def _launches_by_cell(evidence: Mapping[str, Evidence]) -> dict[int, dict[tuple[str, ...], dict[str, Launch]]]:
    """Return cell number -> members -> host -> launch of the cell by these members, as that host reports it.

    Several launches of a cell differ in their members, because the agent launches a cell only once with the same members.
    """
    launches: dict[int, dict[tuple[str, ...], dict[str, Launch]]] = {}
    for host, host_evidence in evidence.items():
        for launch in host_evidence.launches():
            if launch.stage == CELL and host in launch.members:
                launches.setdefault(launch.number, {}).setdefault(launch.members, {})[host] = launch
    return launches


def _row_without_launch(plan: Plan, number: int, cell: Cell) -> CellResult:
    suitable = sum(len(host.devices) >= cell.gpus for host in plan.hosts)
    if suitable >= cell.hosts:
        return CellResult(number=number, cell=cell, state=OPEN, reason=NOT_YET)
    one, several = ("process", "processes") if plan.rehearsal else ("GPU", "GPUs")
    device = one if cell.gpus == 1 else several
    reason = f"capacity: hosts with at least {cell.gpus} {device}: {cell.hosts} needed, {suitable} in the inventory"
    return CellResult(number=number, cell=cell, state=SKIPPED, reason=reason)


def _row_of_cell(number: int, cell: Cell, by_members: Mapping[tuple[str, ...], Mapping[str, Launch]]) -> CellResult:
    """Return the result of the launch that measured a cell, or of the last launch if none measured it.

    `by_members`: members -> host -> the launch of the cell by these members, as this host reports it.
    """
    rows = [_row_of_launch(number, cell, by_host) for by_host in by_members.values()]
    best = max(rows, key=lambda row: (row.state == MEASURED, row.began))
    return replace(best, spent_s=sum(row.spent_s for row in rows), host_s=sum(row.host_s for row in rows))


def _row_of_launch(number: int, cell: Cell, by_host: Mapping[str, Launch]) -> CellResult:
    """Return the result of one launch. `by_host`: host -> the launch as this host reports it. All have the same members."""
    first, wall_s = next(iter(by_host.values())), max(launch.duration_s for launch in by_host.values())
    row = CellResult(
        number=number,
        cell=cell,
        state=FAILED,
        members=first.members,
        began=min(launch.began for launch in by_host.values()),
    )
    if wall_s > MAX_LAUNCH_S:
        return replace(row, reason=f"invalid launch duration: {wall_s:g} s")
    row = replace(row, wall_s=wall_s, spent_s=wall_s, host_s=wall_s * len(first.members))
    if missing := [host for host in first.members if host not in by_host]:
        return replace(row, reason=f"no record of this launch from {', '.join(missing)}")
    if failed := [launch for launch in by_host.values() if not launch.succeeded]:
        return replace(row, reason=next((launch.reason for launch in failed if launch.reason), failed[0].outcome))
    observations = {item.name: item for item in by_host[first.members[0]].observations}
    figures: dict[str, float] = {}
    for kind, (minimum, maximum) in FIGURE_RANGES.items():
        if kind in ("hookup", "duration"):  # both are within the launch
            maximum = min(maximum, wall_s + 1.0)
        value = _read_figure(observations.get(f"{WORKLOAD}.{kind}"), minimum, maximum)
        if isinstance(value, str):
            return replace(row, reason=f"{WORKLOAD}.{kind}: {value}")
        figures[kind] = value
    params = observations[f"{WORKLOAD}.throughput"].params
    if params.get("world_size") != cell.ranks:
        ranks = params.get("world_size")
        return replace(row, reason=f"{ranks} rank{'' if ranks == 1 else 's'} took part, expected {cell.ranks}")
    expected = {**cell.settings, **({"cpus": cell.cpus} if cell.cpus else {})}
    if differences := [
        f"{key} was {params[key]}" for key, value in expected.items() if params.get(key, value) != value
    ]:
        return replace(row, reason=f"settings differ from the plan: {', '.join(differences)}")
    return replace(
        row,
        state=MEASURED,
        hookup_s=figures["hookup"],
        train_s=figures["duration"],
        throughput=figures["throughput"],
        accuracy=figures["accuracy"],
        loss=figures["loss"],
        data=str(params.get("data", "")),
        cut=bool(params.get("max_steps")),
    )


def _read_figure(observation: Observation | None, minimum: float, maximum: float) -> float | str:
    """Return the value of a figure, or why it is missing or invalid."""
    if observation is None:
        return "missing in the record"
    if (
        isinstance(observation.value, bool)
        or not isinstance(observation.value, int | float)
        or not math.isfinite(observation.value)
    ):
        return observation.reason or "not a number"
    if not minimum <= observation.value <= maximum:
        return f"invalid value {observation.value:g}"
    return float(observation.value)


def _stop_reason(study: Study, rows: Collection[CellResult], hours: float) -> str:
    """Return which limit of the budget is reached, cost or hours; empty if neither."""
    cost = sum(row.host_s for row in rows) / 3600 * study.price
    if study.stop_cost and cost >= study.stop_cost:
        return f"budget: earlier cells cost {cost:.2f}, limit {study.stop_cost:g} {study.currency}".rstrip()
    if study.stop_hours and hours >= study.stop_hours:
        return f"budget: earlier cells took {hours:.2f} h, limit {study.stop_hours:g} h"
    return ""


def _with_efficiency(row: CellResult, rows: Collection[CellResult]) -> CellResult:
    """Add the efficiency of weak scaling. The batch size is per rank: at 100 %, twice the ranks have twice the throughput."""
    if row.throughput is None:
        return row
    series = [other for other in rows if other.throughput and other.cell.series == row.cell.series]
    if not series:
        return row
    smallest = min(series, key=lambda other: (other.cell.ranks, other.cell.hosts, other.number))
    per_rank = (smallest.throughput or 0.0) / smallest.cell.ranks
    return replace(row, efficiency=row.throughput / row.cell.ranks / per_rank, against=smallest.number)


def _with_cpu_share(row: CellResult, rows: Collection[CellResult]) -> CellResult:
    """Add `share`, if the CPUs of the cell are limited: its throughput relative to the same cell with all CPUs."""
    if row.throughput is None or not row.cell.cpus:
        return row
    with_all_cpus = [
        other
        for other in rows
        if other.throughput and replace(other.cell, epochs=row.cell.epochs) == replace(row.cell, cpus=0)
    ]
    if not with_all_cpus:
        return row
    best = min(with_all_cpus, key=lambda other: (other.cell.epochs != row.cell.epochs, other.number))
    return replace(row, share=row.throughput / (best.throughput or 1.0), unconfined=best.number)
