"""Show the training benchmark as a table, with one row per network and group of ranks that trained the network together.

The ranks are those of one host, or those of a gang (the hosts of one multi-node launch).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from fleet.quantities import NONE, counted, finite, number, quantity
from fleet.report.tables.figure import MANY_HOSTS, RankGroup, rank_group
from schemas.records import MEASURED, Observation
from schemas.reports import FAIL, FleetReport, Verdict

SYNTHETIC = "synthetic"
_PREFIX = "training."

Observations = Mapping[str, Observation]
"""Kind of figure (`throughput`, `accuracy`, …) -> observation."""


TrainingKey = tuple[RankGroup, str]
"""The ranks that trained a network, and the name of the network."""


@dataclass(frozen=True, kw_only=True)
class TrainingRow:
    """The figures of one network on one host or gang, or their range over many hosts. A missing figure is shown as a dash."""

    trained_by: str
    network: str
    data: str
    ranks: str
    """`8 × 256`: number of ranks, and images per rank in a step."""
    throughput: str
    step_time: str
    loss_ratio: str
    losses: str
    """First and last loss, `2.31 → 0.42`; empty if one of them is unknown, or for a range over several hosts."""
    accuracy: str
    failed: bool
    problem: str
    """Status and reason of each figure that was not measured; empty if there is none."""

    @property
    def synthetic(self) -> bool:
        """Return whether the images are generated. If so, the accuracy does not apply to real images."""
        return self.data == SYNTHETIC


@dataclass(frozen=True, kw_only=True)
class TrainingTable:
    """The rows to show.

    For up to MANY_HOSTS hosts, `rows` has the gangs and the hosts. For more hosts, `rows` has the gangs, the range over the hosts
    for each network and data set, and the hosts with a failed or missing figure. `folded`, which the page collapses, then has
    every host.
    """

    rows: tuple[TrainingRow, ...] = ()
    folded: tuple[TrainingRow, ...] = ()

    @property
    def synthetic(self) -> bool:
        """Return whether any row was trained on generated images."""
        return any(row.synthetic for row in self.rows + self.folded)


def training_table(report: FleetReport) -> TrainingTable:
    """Return a row for every training on a host or gang, with its figures or why they are missing."""
    trainings, members = _collect(report)
    failing = {
        _key(verdict.host, verdict)
        for verdict in report.verdicts
        if verdict.verdict == FAIL and verdict.name.startswith(_PREFIX)
    }
    rows = {
        key: _row(key[0].label(len(members[key])), key[1], [observations], key in failing)
        for key, observations in trainings.items()
    }
    gangs = [row for (group, _), row in rows.items() if group.kind == "gang"]
    of_hosts = {key: row for key, row in rows.items() if key[0].kind == "host"}
    if len({group.host for group, _ in of_hosts}) <= MANY_HOSTS:
        return TrainingTable(rows=(*gangs, *of_hosts.values()))
    findings = [row for row in of_hosts.values() if row.failed or row.problem]
    return TrainingTable(rows=(*gangs, *_ranges(trainings, of_hosts), *findings), folded=tuple(of_hosts.values()))


def _key(host: str, item: Observation | Verdict) -> TrainingKey:
    return rank_group(host, item), str(item.params.get("network", ""))


def _collect(report: FleetReport) -> tuple[dict[TrainingKey, dict[str, Observation]], dict[TrainingKey, set[str]]]:
    """Return the observations of each training, and the hosts that reported it.

    If several hosts of a gang report the same figure, a measured observation is preferred to one without a value.
    """
    trainings: dict[TrainingKey, dict[str, Observation]] = {}
    members: dict[TrainingKey, set[str]] = {}
    for host in report.hosts:
        for item in host.measurements:
            if item.name.startswith(_PREFIX):
                key = _key(host.name, item)
                members.setdefault(key, set()).add(host.name)
                kinds, kind = trainings.setdefault(key, {}), item.name.removeprefix(_PREFIX)
                if kind not in kinds or (kinds[kind].status != MEASURED and item.status == MEASURED):
                    kinds[kind] = item
    return trainings, members


def _ranges(
    trainings: Mapping[TrainingKey, Observations], of_hosts: Mapping[TrainingKey, TrainingRow]
) -> list[TrainingRow]:
    """Return one row per network and data set, with the lowest and highest value of each figure.

    Hosts on which a figure is missing are left out.
    """
    groups: dict[tuple[str, str], list[Observations]] = {}
    for key, row in of_hosts.items():
        if not row.problem:
            groups.setdefault((row.network, row.data), []).append(trainings[key])
    return [_row(counted(len(group), "host"), network, group, failed=False) for (network, _), group in groups.items()]


def _row(trained_by: str, network: str, group: Sequence[Observations], failed: bool) -> TrainingRow:
    measured = [{kind: item for kind, item in kinds.items() if item.status == MEASURED} for kinds in group]
    params = next((item.params for kinds in measured for item in kinds.values()), {})
    missing = [item for kinds in group for item in kinds.values() if item.status != MEASURED]
    return TrainingRow(
        trained_by=trained_by,
        network=network,
        data=str(params.get("data", NONE)),
        ranks=f"{params['world_size']} × {params.get('batch_size', NONE)}" if "world_size" in params else NONE,
        throughput=_range(measured, "throughput"),
        step_time=_range(measured, "step_time"),
        loss_ratio=_range(measured, "loss_ratio"),
        losses=_losses(measured[0]) if len(measured) == 1 else "",
        accuracy=_range(measured, "accuracy"),
        failed=failed,
        problem="; ".join(dict.fromkeys(f"{item.status}: {item.reason}" for item in missing)),
    )


def _range(measured: Sequence[Observations], kind: str) -> str:
    """Return the figure `kind` as text; if its values differ, the lowest and the highest."""
    items = [kinds[kind] for kinds in measured if kind in kinds]
    values = [value for item in items if (value := finite(item.value)) is not None]
    texts = [_text(value, kind, items[0].unit) for value in (min(values), max(values))] if values else [NONE]
    return " … ".join(dict.fromkeys(texts))


def _text(value: float, kind: str, unit: str) -> str:
    return f"{value * 100:.1f} %" if kind == "accuracy" else quantity(value, unit)


def _losses(measured: Observations) -> str:
    last, ratio = (finite(measured[kind].value) if kind in measured else None for kind in ("loss", "loss_ratio"))
    return f"{number(last / ratio, 3)} → {number(last, 3)}" if last is not None and ratio else ""
