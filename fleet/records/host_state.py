"""What a host shows, in the form in which two of them are compared: a run's evidence, or an accepted record. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from fleet.judge.baseline import READINGS, identity, is_kept, key_of, level_of, owner, precision, settings
from fleet.judge.evidence import Evidence
from fleet.records.versions import versions
from schemas.baselines import HostBaseline, Key, Level, Place
from schemas.records import MEASURED, Gpu, Observation

SERIALS = {
    "host.system.serial": "host",
    "infiniband.hca.node_guid": "InfiniBand adapter",
    "network.address": "NIC",
    "storage.disk.serial": "disk",
}
"""Reading -> kind of the part whose serial it tells."""
LONGEST = 512
"""Characters of a serial."""


@dataclass(frozen=True, kw_only=True)
class Figure:
    """A level, and where it was measured last."""

    level: Level
    scope: str = ""


@dataclass(frozen=True, kw_only=True)
class Sight:
    """A host and its parts at one time."""

    gpus: tuple[Gpu, ...] = ()
    parts: tuple[Place, ...] = ()
    versions: Mapping[str, str] = field(default_factory=dict)
    figures: Mapping[str, Mapping[Key, Figure]] = field(default_factory=dict)
    """By serial of the GPU; empty for the host's own."""
    known: bool = True
    """There is a record of it."""


def sight(left: Evidence) -> Sight:
    """What a host showed in one run."""
    if not any(not record.gang for record in left.records):
        return Sight(known=False)
    gpus = {f"gpu={gpu.index}": gpu for gpu in left.gpus()}
    found: dict[str, dict[Key, Figure]] = defaultdict(dict)
    run_id = left.records[0].run_id
    parts: dict[tuple[str, str], Place] = {}
    for seen in left.observations():
        if seen.name in SERIALS and seen.status == MEASURED and str(seen.value).strip():
            kind = SERIALS[seen.name]
            parts[(kind, seen.scope)] = Place(kind=kind, slot=seen.scope, serial=str(seen.value).strip()[:LONGEST])
        if is_kept(seen):
            serial, within = owner(gpus, seen.scope)
            key = key_of(seen, within)
            found[serial][key] = _figure(seen, within, run_id, found[serial].get(key))
    return Sight(gpus=left.gpus(), parts=tuple(parts.values()), versions=versions(left, ()), figures=dict(found))


def _figure(seen: Observation, within: str, run_id: str, before: Figure | None) -> Figure:
    value = float(seen.value) if isinstance(seen.value, int | float) else 0.0
    if before and "phase" in seen.params and READINGS.get(seen.name) == 1:
        value = max(value, before.level.value)
    stage = "" if "phase" in seen.params else seen.stage
    level = level_of(seen.name, seen.unit, stage, within, settings(seen), {run_id: value})
    return Figure(level=replace(level, precision=precision(seen.samples)), scope=seen.scope)


def accepted(left: HostBaseline | None) -> Sight:
    """What a host showed when it was accepted."""
    if left is None or left.host is None:
        return Sight(known=False)
    figures = {"": left.host.figures, **{serial: kept.figures for serial, kept in left.gpus.items()}}
    return Sight(
        gpus=left.host.gpus,
        parts=left.host.parts,
        versions=left.host.versions,
        figures={serial: {level.key: Figure(level=level) for level in levels} for serial, levels in figures.items()},
    )


def together(sights: Sequence[Sight]) -> Sight:
    """Several runs of one host as one: its figures settled over all of them, and the rest as the last one has it."""
    known = [one for one in sights if one.known]
    if len(known) < 2:
        return known[0] if known else Sight(known=False)
    found: dict[str, dict[Key, list[Figure]]] = defaultdict(lambda: defaultdict(list))
    for one in known:
        for serial, figures in one.figures.items():
            for key, figure in figures.items():
                found[serial][key].append(figure)
    return replace(
        known[-1],
        figures={
            serial: {key: _settled(figures) for key, figures in of_part.items()} for serial, of_part in found.items()
        },
    )


def _settled(figures: Sequence[Figure]) -> Figure:
    last = figures[-1]
    return replace(last, level=merged([figure.level for figure in figures]))


def merged(levels: Sequence[Level]) -> Level:
    """The same figure of several runs as one level."""
    last = levels[-1]
    values: dict[str, float] = {}
    for level in levels:
        values |= level.values
    told = [level.precision for level in levels if level.precision is not None]
    found = level_of(last.name, last.unit, last.stage, last.within, dict(last.params), values)
    return replace(found, precision=max(told, default=None))


def serials(gpus: Iterable[Gpu]) -> dict[str, Gpu]:
    """The GPUs by what they are known by; those that tell neither serial nor UUID are left out."""
    return {identity(gpu): gpu for gpu in gpus if identity(gpu)}
