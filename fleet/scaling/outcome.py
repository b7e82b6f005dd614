"""Plan + the records fetched so far -> what became of each cell of a study, and which one is measured next. Pure functions."""

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
"""Every host of a study's plan is in this gang, of which a cell launches some."""
MEASURED, FAILED, SKIPPED, OPEN = "measured", "failed", "skipped", "open"
"""State of a cell: it has its figures; it was launched without figures; it must not be launched; it was not launched yet."""
LONGEST_S = 366 * 86400.0
"""A launch that says it took longer is not believed."""
_LEAST, _MOST = 1e-9, 1e15
FIGURES: Mapping[str, tuple[float, float]] = {
    "hookup": (_LEAST, LONGEST_S),
    "duration": (_LEAST, LONGEST_S),
    "throughput": (_LEAST, _MOST),
    "accuracy": (0.0, 1.0),
    "loss": (0.0, math.inf),
}
"""What a measured cell has, and between which values each can be: nothing trains in no time, or 0 images a second."""
NOT_YET = "not measured yet: start the study again with the same run id"


@dataclass(frozen=True, kw_only=True)
class Row:
    """A cell and what came of it. A figure that is not there is None, and `reason` says why."""

    number: int
    cell: Cell
    state: str
    reason: str = ""
    members: tuple[str, ...] = ()
    """The hosts that took part, in rank order."""
    began: str = ""
    wall_s: float | None = None
    """From the launch to the end of the last host's ranks."""
    spent_s: float = 0.0
    """The same of all its launches: of two, where the hosts of the first were out of reach when their records were fetched."""
    host_s: float = 0.0
    """The same, times the hosts that took part."""
    hookup_s: float | None = None
    """From the launch to the end of the first step, on the host where it took longest."""
    train_s: float | None = None
    """From there to the end of the last step."""
    throughput: float | None = None
    """Images a second of all ranks, in `train_s`."""
    accuracy: float | None = None
    loss: float | None = None
    """Accuracy and mean loss on the test images."""
    data: str = ""
    cut: bool = False
    """The study's settings end the training before its epochs are over."""
    cost: float | None = None
    """None where no price is known, or nothing was launched."""
    efficiency: float | None = None
    """Throughput a rank, as a share of that of cell `against`."""
    against: int = 0
    """The smallest measured cell with the same batch a rank, epochs, CPUs and precision."""
    share: float | None = None
    """Throughput of a cell with few CPUs, as a share of that of cell `unconfined`."""
    unconfined: int = 0
    """A cell that differs in having all CPUs, or in that and its epochs."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What became of a study."""

    rows: tuple[Row, ...]
    hours: float
    """That the launches took."""
    cost: float | None
    stopped: str = ""
    """Why no further cell is begun; empty where nothing stops it."""
    gpus: tuple[str, ...] = ()
    """Names of the GPUs that the hosts have."""
    software: tuple[str, ...] = ()
    """Versions of what the ranks ran on."""
    refused: tuple[str, ...] = ()
    """Files that are not believed, and why."""

    def count(self, state: str) -> int:
        """Cells in that state."""
        return sum(row.state == state for row in self.rows)

    @property
    def complete(self) -> bool:
        """Every cell was measured, or must not be by the inventory or the operator's own limit; and at least one was."""
        return bool(self.count(MEASURED)) and not self.count(FAILED) and not self.count(OPEN)


def outcome(plan: Plan, evidence: Mapping[str, Evidence], *, price: float | None = None) -> Outcome:
    """What became of each cell.

    Args:
        plan: plan of a study.
        evidence: what the hosts left; gang records are enough.
        price: replaces the plan's; the reason why the study stopped still uses the plan's.
    """
    study = plan.study or Study(cells=())
    by_host = _launches(evidence)
    rows = [
        _launched(number, cell, by_host[number]) if number in by_host else _not_launched(plan, number, cell)
        for number, cell in enumerate(study.cells, 1)
    ]
    hours = sum(row.spent_s for row in rows) / 3600
    stopped = _stopped(study, rows, hours)
    if stopped:
        rows = [replace(row, state=SKIPPED, reason=stopped) if row.state == OPEN else row for row in rows]
    priced = study.price if price is None else price
    if priced:
        rows = [replace(row, cost=row.host_s / 3600 * priced) if row.members else row for row in rows]
    return Outcome(
        rows=tuple(_against_all_cpus(_against_the_smallest(row, rows), rows) for row in rows),
        hours=hours,
        cost=sum(row.cost or 0.0 for row in rows) if priced else None,
        stopped=stopped,
        gpus=tuple(sorted({gpu.name for left in evidence.values() for gpu in left.gpus()})),
        software=tuple(sorted({" ".join(item) for left in evidence.values() for item in left.software().items()})),
    )


def next_cell(plan: Plan, evidence: Mapping[str, Evidence], present: Collection[str]) -> Decision:
    """The first cell that was not launched and for which enough hosts are there; none where all is done that can be.

    Cells are launched one by one, since two at once would share what lies between the hosts.
    """
    for row in outcome(plan, evidence).rows:
        able = [host.name for host in plan.hosts if host.name in present and len(host.devices) >= row.cell.gpus]
        if row.state == OPEN and len(able) >= row.cell.hosts:
            return Decision(
                launches=(LaunchPlan(gang=GANG, members=tuple(able[: row.cell.hosts]), number=row.number),), excluded={}
            )
    return Decision(launches=(), excluded={})


def _launches(evidence: Mapping[str, Evidence]) -> dict[int, dict[str, Launch]]:
    """Number of a cell -> host -> its own account of the launch."""
    found: dict[int, dict[str, Launch]] = {}
    for host, left in evidence.items():
        for launch in left.launches():
            if launch.stage == CELL and host in launch.members:
                found.setdefault(launch.number, {})[host] = launch
    return found


def _not_launched(plan: Plan, number: int, cell: Cell) -> Row:
    able = sum(len(host.devices) >= cell.gpus for host in plan.hosts)
    if able >= cell.hosts:
        return Row(number=number, cell=cell, state=OPEN, reason=NOT_YET)
    device = "processes" if plan.rehearsal else "GPUs"
    why = f"capacity: hosts with {cell.gpus} {device}: {cell.hosts} wanted, {able} in the inventory"
    return Row(number=number, cell=cell, state=SKIPPED, reason=why)


def _launched(number: int, cell: Cell, by_host: Mapping[str, Launch]) -> Row:
    """By its launch; by the one that measured it, or else the last, where other hosts launched it as well."""
    launches: dict[tuple[str, ...], dict[str, Launch]] = {}
    for host, launch in by_host.items():
        launches.setdefault(launch.members, {})[host] = launch
    rows = [_of_launch(number, cell, those) for those in launches.values()]
    best = max(rows, key=lambda row: (row.state == MEASURED, row.began))
    return replace(best, spent_s=sum(row.spent_s for row in rows), host_s=sum(row.host_s for row in rows))


def _of_launch(number: int, cell: Cell, by_host: Mapping[str, Launch]) -> Row:
    """By what the hosts say of one launch, whose members all of them name alike."""
    first, wall_s = next(iter(by_host.values())), max(launch.duration_s for launch in by_host.values())
    row = Row(
        number=number,
        cell=cell,
        state=FAILED,
        members=first.members,
        began=min(launch.began for launch in by_host.values()),
    )
    if wall_s > LONGEST_S:
        return replace(row, reason=f"its launch cannot have taken {wall_s:g} s")
    row = replace(row, wall_s=wall_s, spent_s=wall_s, host_s=wall_s * len(first.members))
    if silent := [host for host in first.members if host not in by_host]:
        return replace(row, reason=f"no record of it from {', '.join(silent)}")
    if bad := [launch for launch in by_host.values() if not launch.good]:
        return replace(row, reason=next((launch.reason for launch in bad if launch.reason), bad[0].outcome))
    observation = {item.name: item for item in by_host[first.members[0]].observations}
    figures: dict[str, float] = {}
    for kind, (least, most) in FIGURES.items():
        longest = wall_s + 1.0 if kind in ("hookup", "duration") else most  # they are parts of it
        value = _figure(observation.get(f"{WORKLOAD}.{kind}"), least, min(most, longest))
        if isinstance(value, str):
            return replace(row, reason=f"{WORKLOAD}.{kind}: {value}")
        figures[kind] = value
    params = observation[f"{WORKLOAD}.throughput"].params
    if params.get("world_size") != cell.ranks:
        return replace(row, reason=f"{params.get('world_size')} ranks took part, and not {cell.ranks}")
    wanted = {**cell.settings, **({"cpus": cell.cpus} if cell.cpus else {})}
    if other := [f"{key} was {params[key]}" for key, value in wanted.items() if params.get(key, value) != value]:
        return replace(row, reason=f"another cell was measured: {', '.join(other)}")
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


def _figure(observation: Observation | None, least: float, most: float) -> float | str:
    """The figure, or why there is none."""
    if observation is None:
        return "it is not in the record"
    if (
        isinstance(observation.value, bool)
        or not isinstance(observation.value, int | float)
        or not math.isfinite(observation.value)
    ):
        return observation.reason or "it is no number"
    if not least <= observation.value <= most:
        return f"it cannot be {observation.value:g}"
    return float(observation.value)


def _stopped(study: Study, rows: Collection[Row], hours: float) -> str:
    cost = sum(row.host_s for row in rows) / 3600 * study.price
    if study.stop_cost and cost >= study.stop_cost:
        return f"budget: the cells before it cost {cost:.2f} of {study.stop_cost:g} {study.currency}".rstrip()
    if study.stop_hours and hours >= study.stop_hours:
        return f"budget: the cells before it took {hours:.2f} of {study.stop_hours:g} h"
    return ""


def _against_the_smallest(row: Row, rows: Collection[Row]) -> Row:
    """Weak scaling: the batch is that of a rank, so that at 100 % twice the ranks do twice the images a second."""
    if row.throughput is None:
        return row
    like = [other for other in rows if other.throughput and other.cell.series == row.cell.series]
    if not like:
        return row
    least = min(like, key=lambda other: (other.cell.ranks, other.cell.hosts, other.number))
    of_each = (least.throughput or 0.0) / least.cell.ranks
    return replace(row, efficiency=row.throughput / row.cell.ranks / of_each, against=least.number)


def _against_all_cpus(row: Row, rows: Collection[Row]) -> Row:
    if row.throughput is None or not row.cell.cpus:
        return row
    alike = [
        other
        for other in rows
        if other.throughput and replace(other.cell, epochs=row.cell.epochs) == replace(row.cell, cpus=0)
    ]
    if not alike:
        return row
    best = min(alike, key=lambda other: (other.cell.epochs != row.cell.epochs, other.number))
    return replace(row, share=row.throughput / (best.throughput or 1.0), unconfined=best.number)
