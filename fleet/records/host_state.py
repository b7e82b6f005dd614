"""Build the state of a host (parts, versions, figures) from the evidence of a run or from the baseline, to compare the two."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from fleet.judge.baseline import (
    READINGS,
    comparison_key,
    is_baseline_figure,
    level_of,
    part_of_scope,
    precision,
    settings,
)
from fleet.judge.evidence import Evidence
from fleet.judge.gpu_identity import identities, shared_serials
from fleet.records.versions import versions
from schemas.baselines import HostBaseline, InstalledPart, Key, Level
from schemas.records import MEASURED, Gpu, Observation
from schemas.scopes import Scope

NIC = "NIC"
SERIALS = {
    "host.system.serial": "host",
    "infiniband.hca.node_guid": "InfiniBand adapter",
    "network.address": NIC,
    "optics.module.serial": "module",
    "storage.disk.serial": "disk",
}
"""Reading -> kind of the part whose serial it reports."""
MAX_SERIAL_LENGTH = 512
"""Longer serials are cut to this many characters."""


@dataclass(frozen=True, kw_only=True)
class Figure:
    """A benchmark result or a reading of a host, in one run or in its baseline."""

    level: Level
    """The value: in a baseline, the median over its runs."""
    scope: str = ""
    """Where the value was measured last; empty in a baseline."""


@dataclass(frozen=True, kw_only=True)
class HostState:
    """Parts, versions and figures of a host at one time."""

    gpus: tuple[Gpu, ...] = ()
    shared: frozenset[str] = frozenset()
    """Serials that several GPUs share, in this state or in the one that it is compared with (`fleet.judge.gpu_identity`)."""
    parts: tuple[InstalledPart, ...] = ()
    versions: Mapping[str, str] = field(default_factory=dict)
    figures: Mapping[str, Mapping[Key, Figure]] = field(default_factory=dict)
    """Identity of a GPU, or an empty string for the host -> its figures."""
    labels: frozenset[str] = frozenset()
    """Labels of the scopes of all observations, measured or not, such as `hca=mlx5_1`; empty for the state in a baseline."""
    last_run: str = ""
    """Id of the run. In a baseline or a merged state, of its last run."""
    has_record: bool = True
    """Whether the run has a record of the host alone (not only of its gang). For the state in a baseline: whether the host has a
    baseline. If False, all other fields are empty."""

    def gpus_by_identity(self) -> dict[str, Gpu]:
        """Return the GPUs by identity. GPUs that report neither serial nor UUID are left out."""
        names = identities(self.gpus, self.shared)
        return {name: gpu for gpu in self.gpus if (name := names[f"gpu={gpu.index}"])}


def host_state(evidence: Evidence, shared: frozenset[str] = frozenset()) -> HostState:
    """Return the state of a host in one run. `shared`: serials that GPUs share in the state that it is compared with."""
    if not any(not record.gang for record in evidence.records):
        return HostState(has_record=False)
    shared |= shared_serials(evidence.gpus())
    gpus = identities(evidence.gpus(), shared)
    figures: dict[str, dict[Key, Figure]] = defaultdict(dict)
    run_id = evidence.records[0].run_id
    parts: dict[tuple[str, str], InstalledPart] = {}
    scopes = set[str]()
    for item in evidence.observations():
        scopes.add(item.scope)
        if item.name in SERIALS and item.status == MEASURED and str(item.value).strip():
            kind = SERIALS[item.name]
            parts[(kind, item.scope)] = InstalledPart(
                kind=kind, slot=item.scope, serial=str(item.value).strip()[:MAX_SERIAL_LENGTH]
            )
        if is_baseline_figure(item):
            serial, within = part_of_scope(gpus, item.scope)
            key = comparison_key(item, within)
            figures[serial][key] = _figure(item, within, run_id, figures[serial].get(key))
    return HostState(
        gpus=evidence.gpus(),
        shared=shared,
        parts=tuple(parts.values()),
        versions={**versions(evidence, ()), **evidence.measuring_software()},
        figures=dict(figures),
        labels=frozenset(f"{kind}={name}" for scope in scopes for kind, name in Scope.parse(scope).labels.items()),
        last_run=run_id,
    )


def _figure(observation: Observation, within: str, run_id: str, earlier: Figure | None) -> Figure:
    """Return the figure of an observation. Of several values in a run, use the last.

    Of a reading for which more is better, use the highest. Readings are the observations with the parameter `phase`, and
    READINGS says for which of them more is better.

    Args:
        observation: a benchmark result, or a reading.
        within: the scope below the GPU; the whole scope if the observation is not of a GPU (`part_of_scope`).
        run_id: the run of the observation.
        earlier: the figure from earlier observations of the run with the same key; None if this is the first.
    """
    value = float(observation.value) if isinstance(observation.value, int | float) else 0.0
    if earlier and "phase" in observation.params and READINGS.get(observation.name) == 1:
        value = max(value, earlier.level.value)
    stage = "" if "phase" in observation.params else observation.stage
    level = level_of(observation.name, observation.unit, stage, within, settings(observation), {run_id: value})
    return Figure(level=replace(level, precision=precision(observation.samples)), scope=observation.scope)


def accepted_state(baseline: HostBaseline | None, gpus: Iterable[Gpu]) -> HostState:
    """Return the state of a host in its baseline. `gpus`: the GPUs in the state that it is compared with."""
    if baseline is None or baseline.host is None:
        return HostState(has_record=False)
    figures = {"": baseline.host.figures, **{serial: part.figures for serial, part in baseline.gpus.items()}}
    return HostState(
        gpus=baseline.host.gpus,
        shared=shared_serials(baseline.host.gpus) | shared_serials(gpus),
        parts=baseline.host.parts,
        versions=baseline.host.versions,
        figures={serial: {level.key: Figure(level=level) for level in levels} for serial, levels in figures.items()},
        last_run=baseline.host.runs[-1].run_id,
    )


def merge_states(states: Sequence[HostState]) -> HostState:
    """Merge the states of one host in several runs: figures of all runs, everything else of the last run with a record."""
    recorded = [state for state in states if state.has_record]
    if len(recorded) < 2:
        return recorded[0] if recorded else HostState(has_record=False)
    by_part: dict[str, dict[Key, list[Figure]]] = defaultdict(lambda: defaultdict(list))
    for state in recorded:
        for serial, figures in state.figures.items():
            for key, figure in figures.items():
                by_part[serial][key].append(figure)
    return replace(
        recorded[-1],
        figures={
            serial: {key: _merge_figures(figures) for key, figures in part_figures.items()}
            for serial, part_figures in by_part.items()
        },
    )


def _merge_figures(figures: Sequence[Figure]) -> Figure:
    return replace(figures[-1], level=merge_levels([figure.level for figure in figures]))


def merge_levels(levels: Sequence[Level]) -> Level:
    """Merge the levels of one figure from several runs."""
    last = levels[-1]
    values: dict[str, float] = {}
    for level in levels:
        values |= level.values
    precisions = [level.precision for level in levels if level.precision is not None]
    merged = level_of(last.name, last.unit, last.stage, last.within, dict(last.params), values)
    return replace(merged, precision=max(precisions, default=None))
