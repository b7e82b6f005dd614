"""Find figures that changed by more than their noise, and figures that only the earlier or only the new state has."""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass, replace

from fleet.judge.baseline import MAX_NOISE_MARGIN, READINGS, direction, noise
from fleet.judge.criteria import Criterion
from fleet.judge.finding import CEILINGS, FLOORS
from fleet.judge.matching import matches
from fleet.quantities import format_pair
from fleet.records.host_state import Figure, HostState
from schemas.baselines import (
    CHANGED,
    FIGURES_GONE,
    FIGURES_NEW,
    IMPROVED,
    REGRESSED,
    UNCLEAR,
    Change,
    Key,
    Level,
)
from schemas.records import MEASURED, Observation

UNJUDGED_SHARE = 0.25
UNJUDGED_SIGMAS = 4.0
"""If no criterion judges a figure against a baseline, its change is listed only if it exceeds both limits: UNJUDGED_SHARE of the
earlier value, and UNJUDGED_SIGMAS standard deviations. A figure in READINGS has no such limits: every change is listed."""
_MAX_NAMED_FIGURES = 6


def changed_figures(
    host: str, old: HostState, new: HostState, criteria: Sequence[Criterion], planned: Container[str]
) -> Iterator[Change]:
    """Yield the changed figures of a host, then how many figures only the earlier state has, and how many only the new state has.

    GPUs that are no longer installed, and parts that the earlier state does not have, are left out. A figure does not count as
    missing if it names a part that was removed before the last earlier run (`_former_labels`).

    `planned`: the hosts of the new run.
    """
    with_baseline = [item for item in criteria if item.baseline is not None]
    added = 0
    missing: Counter[str] = Counter()
    known = {"", *old.gpus_by_identity(), *old.figures}
    installed = {"", *new.gpus_by_identity()}
    former = _former_labels(old, new, planned)

    def was_expected(key: Key) -> bool:
        return former.isdisjoint(_labels(key))

    for serial, before in old.figures.items():
        if serial in installed and serial not in new.figures:  # the part is installed, but nothing was measured on it
            missing.update(key[0] for key in filter(was_expected, before))
    for serial, after in new.figures.items():
        if serial not in known:
            continue  # a new part, which `fleet.diff.parts` lists
        before = old.figures.get(serial, {})
        added += len(after.keys() - before.keys())
        missing.update(key[0] for key in filter(was_expected, before.keys() - after.keys()))
        for key in after.keys() & before.keys():
            change = _figure_change(host, serial, key, before[key].level, after[key], with_baseline)
            if change:
                yield change
    if count := missing.total():
        names = ", ".join(name for name, _ in missing.most_common(_MAX_NAMED_FIGURES)) + (
            " …" if len(missing) > _MAX_NAMED_FIGURES else ""
        )
        text = (
            f"{host}: {count} earlier {'figure was' if count == 1 else 'figures were'} not measured this time ({names})"
        )
        yield Change(kind=FIGURES_GONE, host=host, scope="host", what="figures", old=count, text=text)
    if added:
        text = f"{host}: {added} {'figure has' if added == 1 else 'figures have'} no earlier value to compare with"
        yield Change(kind=FIGURES_NEW, host=host, scope="host", what="figures", new=added, text=text)


def _former_labels(old: HostState, new: HostState, planned: Container[str]) -> set[str]:
    """Return the labels, such as `peer=SERIAL`, of peer GPUs, partner hosts and adapters that were removed before `old.last_run`.

    The last run of the earlier state has no figure with such a label, and the part is not in the new run. So figures with this
    label cannot be measured any more.
    """
    keys = {key: figure.level.values for figures in old.figures.values() for key, figure in figures.items()}
    labels = {label for key in keys for label in _labels(key)}
    current = {label for key, values in keys.items() if old.last_run in values for label in _labels(key)}
    present = {*new.labels, *(f"peer={name}" for name in new.gpus_by_identity())}
    return {label for label in labels - current - present if not _is_planned(label, planned)}


def _labels(key: Key) -> list[str]:
    """Return the labels of a figure that name a peer GPU, a partner host or an adapter."""
    return [label for label in key[2].split(",") if label.partition("=")[0] in ("peer", "partner", "hca", "interface")]


def _is_planned(label: str, planned: Container[str]) -> bool:
    kind, _, name = label.partition("=")
    return kind == "partner" and name in planned


@dataclass(frozen=True, kw_only=True)
class _Noise:
    """The noise of a figure."""

    share: float
    """Largest change that counts as noise, divided by the earlier value."""
    basis: str
    """How `share` was determined, as text."""
    better: int = 0
    """1 if more is better, -1 if less is better, 0 if the better direction is unknown.

    A figure that is not in READINGS and that no criterion judges against a baseline always has 0.
    """
    is_clear: bool = True
    """Whether the noise is small enough that a change beyond it is significant."""


def _figure_change(
    host: str, serial: str, key: Key, old: Level, new: Figure, criteria: Sequence[Criterion]
) -> Change | None:
    before, after = old.value, new.level.value
    if before == after:
        return None
    allowed = _noise(old, new, criteria)
    share = (after - before) / abs(before) if before else None
    if share is not None and abs(share) <= allowed.share:
        return None
    kind = CHANGED
    if allowed.better:
        is_better = (after - before) * allowed.better > 0
        kind = (IMPROVED if is_better else REGRESSED) if allowed.is_clear else UNCLEAR
    change = Change(
        kind=kind,
        host=host,
        scope=new.scope,
        what=old.name,
        serial=serial,
        stage=key[1],
        params=old.params,
        unit=old.unit,
        old=before,
        new=after,
        share=share,
        noise=allowed.share,
        basis=allowed.basis,
        text="",
    )
    return replace(change, text=figure_text(change, f"{host} {new.scope}" if new.scope != "host" else host))


def figure_text(change: Change, part: str) -> str:
    """Return the sentence that describes the change of a figure of `part`."""
    difference = f"{change.share * 100:+.3g} %" if change.share is not None else f"from {change.old:g}"
    beyond = f"beyond {(change.noise or 0) * 100:.3g} % noise"
    if change.kind == UNCLEAR:
        beyond = "but the noise is too large to be sure"
    before, after = format_pair(change.old, change.new, change.unit)
    settings = ", ".join(f"{name}={value}" for name, value in change.params.items())
    figure = f"{change.what}[{settings}]" if settings else change.what
    return f"{part}: {figure} {before} → {after} ({difference}), {beyond}: {change.basis}"


def _noise(old: Level, new: Figure, criteria: Sequence[Criterion]) -> _Noise:
    """Return the noise of a figure, from the first matching criterion with `vs_baseline`, or from the figure itself."""
    own_noise = noise(old)
    source = _noise_source(old, own_noise)
    observation = Observation(
        name=old.name,
        scope=new.scope or "host",
        stage=old.stage,
        unit=old.unit,
        status=MEASURED,
        value=old.value,
        params=old.params,
    )
    for criterion in criteria:
        if criterion.baseline and criterion.matches_name(old.name) and matches(criterion, observation):
            limit = criterion.baseline
            floor = abs(limit.change / old.value) if limit.change is not None and old.value else abs(1 - limit.fraction)
            share = round(max(floor, limit.sigmas * own_noise), 6)
            better = direction(old.name, old.unit) or _side(criterion.operator)
            if limit.sigmas * own_noise > floor:
                return _Noise(
                    share=share,
                    basis=f"{limit.sigmas:g} × its own noise, {source}",
                    better=better,
                    is_clear=limit.sigmas * own_noise <= MAX_NOISE_MARGIN,
                )
            return _Noise(share=share, basis=f"criterion {criterion.id}; own noise {source}", better=better)
    if old.name in READINGS:
        return _Noise(share=0.0, basis="this reading has no noise", better=READINGS[old.name])
    return _Noise(
        share=max(UNJUDGED_SHARE, UNJUDGED_SIGMAS * own_noise),
        basis="no criterion judges this figure against a baseline",
    )


def _side(operator: str) -> int:
    """Return 1 if figures above the limit are good, -1 if figures below it are, 0 for an operator without a good side."""
    return 1 if operator in FLOORS else -1 if operator in CEILINGS else 0


def _noise_source(old: Level, own_noise: float) -> str:
    """Return how large the noise of the figure is, and from how many runs it is known."""
    if old.sigma is not None:
        return f"{own_noise * 100:.2g} % (sigma) over {len(old.values) - old.left_out} runs"
    return f"{own_noise * 100:.2g} % (sigma) within one run, unknown from run to run" if own_noise else "unknown"
