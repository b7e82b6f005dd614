"""The training benchmark as a table: one row a network and a group of ranks that trained it together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from fleet.quantities import NONE, finite, number, quantity
from fleet.report.tables.places import scope_name
from schemas.records import MEASURED, Observation
from schemas.reports import FAIL, FleetReport
from schemas.scopes import Scope

SYNTHETIC = "synthetic"
MANY_HOSTS = 12

Key = tuple[str, str, str, str, str]
"""Host (empty for a gang, whose members all report the same figures), scope, stage, network, and a gang's number of ranks."""


@dataclass(frozen=True, kw_only=True)
class Training:
    """One network on one host or gang, or the span over many hosts. A figure that is not there reads as a dash."""

    place: str
    network: str
    data: str
    ranks: str
    throughput: str
    step_time: str
    loss_ratio: str
    losses: str
    """First and last, where both are known."""
    accuracy: str
    failed: bool
    problem: str
    """Why a figure is not there."""

    @property
    def synthetic(self) -> bool:
        """The images were made up, so the accuracy says nothing about learning real ones."""
        return self.data == SYNTHETIC


@dataclass(frozen=True, kw_only=True)
class Table:
    """The trainings to show; where there are many hosts, those of each host are folded away under their span."""

    rows: tuple[Training, ...] = ()
    folded: tuple[Training, ...] = ()

    @property
    def synthetic(self) -> bool:
        """Any of them was trained on made-up images."""
        return any(row.synthetic for row in self.rows + self.folded)


def table(report: FleetReport) -> Table:
    """Every training that a host or a gang reported, whether it ended with figures or with a reason."""
    found, members = _collect(report)
    failing = {
        _key(verdict.host, verdict.scope, verdict.stage, verdict.params)
        for verdict in report.verdicts
        if verdict.verdict == FAIL and verdict.name.startswith("training.")
    }
    rows = {key: _training(_place(key, members[key]), key[3], [seen], key in failing) for key, seen in found.items()}
    gangs = [row for key, row in rows.items() if not key[0]]
    alone = {key: row for key, row in rows.items() if key[0]}
    if len({key[0] for key in alone}) <= MANY_HOSTS:
        return Table(rows=(*gangs, *alone.values()))
    marked = [row for row in alone.values() if row.failed or row.problem]
    return Table(rows=(*gangs, *_spans(found, alone), *marked), folded=tuple(alone.values()))


def _key(host: str, scope: str, stage: str, params: Mapping[str, object]) -> Key:
    gang = Scope.parse(scope).is_gang
    ranks = str(params.get("world_size", "")) if gang else ""
    return "" if gang else host, scope, stage, str(params.get("network", "")), ranks


def _collect(report: FleetReport) -> tuple[dict[Key, dict[str, Observation]], dict[Key, int]]:
    """The observations of each training by their kind, and how many hosts reported it."""
    found: dict[Key, dict[str, Observation]] = {}
    members: dict[Key, set[str]] = {}
    for host in report.hosts:
        for seen in host.measurements:
            if seen.name.startswith("training."):
                key = _key(host.name, seen.scope, seen.stage, seen.params)
                members.setdefault(key, set()).add(host.name)
                kinds, kind = found.setdefault(key, {}), seen.name.removeprefix("training.")
                if kind not in kinds or (kinds[kind].status != MEASURED and seen.status == MEASURED):
                    kinds[kind] = seen
    return found, {key: len(names) for key, names in members.items()}


def _place(key: Key, members: int) -> str:
    host, scope, stage, *_ = key
    if host:
        return host if stage == "benchmark" else f"{host}, {stage}"
    return f"{scope_name(scope)} ({members} host{'s' if members != 1 else ''})"


def _spans(found: Mapping[Key, Mapping[str, Observation]], alone: Mapping[Key, Training]) -> list[Training]:
    """One row a network: the lowest and the highest figure of all hosts that trained it."""
    groups: dict[tuple[str, str], list[Mapping[str, Observation]]] = {}
    for key, row in alone.items():
        if not row.problem:
            groups.setdefault((row.network, row.data), []).append(found[key])
    return [_training(f"{len(group)} hosts", network, group, failed=False) for (network, _), group in groups.items()]


def _training(place: str, network: str, group: Sequence[Mapping[str, Observation]], failed: bool) -> Training:
    measured = [{kind: seen for kind, seen in found.items() if seen.status == MEASURED} for found in group]
    params = next((seen.params for found in measured for seen in found.values()), {})
    absent = [seen for found in group for seen in found.values() if seen.status != MEASURED]
    return Training(
        place=place,
        network=network,
        data=str(params.get("data", NONE)),
        ranks=f"{params['world_size']} × {params.get('batch_size', NONE)}" if "world_size" in params else NONE,
        throughput=_span(measured, "throughput"),
        step_time=_span(measured, "step_time"),
        loss_ratio=_span(measured, "loss_ratio"),
        losses=_losses(measured[0]) if len(measured) == 1 else "",
        accuracy=_span(measured, "accuracy"),
        failed=failed,
        problem="; ".join(dict.fromkeys(f"{seen.status}: {seen.reason}" for seen in absent)),
    )


def _span(measured: Sequence[Mapping[str, Observation]], kind: str) -> str:
    """The figure, or the lowest and the highest of several."""
    seen = [found[kind] for found in measured if kind in found]
    values = [value for item in seen if (value := finite(item.value)) is not None]
    texts = [_text(value, kind, seen[0].unit) for value in (min(values), max(values))] if values else [NONE]
    return " … ".join(dict.fromkeys(texts))


def _text(value: float, kind: str, unit: str) -> str:
    return f"{value * 100:.1f} %" if kind == "accuracy" else quantity(value, unit)


def _losses(measured: Mapping[str, Observation]) -> str:
    last, ratio = (finite(measured[kind].value) if kind in measured else None for kind in ("loss", "loss_ratio"))
    return f"{number(last / ratio, 3)} → {number(last, 3)}" if last is not None and ratio else ""
