"""Find figures that changed by more than their noise, and figures that only one side has."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from fleet.judge.baseline import MAX_RELATIVE_SIGMA, READINGS, direction, noise
from fleet.judge.criteria import Criterion
from fleet.judge.matching import matches
from fleet.quantities import apart
from fleet.records.host_state import Figure, HostState, gpus_by_serial
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

OTHERWISE = 0.25
"""Share by which a figure must change to be listed if no criterion states how well it repeats."""
SIGMAS = 4.0
_NAMED = 6


def figures(host: str, old: HostState, new: HostState, criteria: Sequence[Criterion]) -> Iterator[Change]:
    """Yield the figures of a host that changed, and the number of figures that only one side has."""
    with_baseline = [item for item in criteria if item.baseline is not None]
    added = 0
    missing: Counter[str] = Counter()
    present = {"", *gpus_by_serial(new.gpus)}
    for serial, before in old.figures.items():
        if (
            serial in present and serial not in new.figures
        ):  # the part is still installed, but nothing was measured on it
            missing.update(key[0] for key in before)
    for serial, now in new.figures.items():
        was = old.figures.get(serial)
        if was is None:
            continue  # a new part: listed as a part
        added += len(now.keys() - was.keys())
        missing.update(key[0] for key in was.keys() - now.keys())
        for key in now.keys() & was.keys():
            change = _figure(host, serial, key, was[key].level, now[key], with_baseline)
            if change:
                yield change
    if count := missing.total():
        names = ", ".join(name for name, _ in missing.most_common(_NAMED)) + (" …" if len(missing) > _NAMED else "")
        text = f"{host}: {count} earlier figures were not measured this time ({names})"
        yield Change(kind=FIGURES_GONE, host=host, scope="host", what="figures", old=count, text=text)
    if added:
        text = f"{host}: {added} figures have no earlier value to compare with"
        yield Change(kind=FIGURES_NEW, host=host, scope="host", what="figures", new=added, text=text)


@dataclass(frozen=True, kw_only=True)
class _Noise:
    """The noise of a figure."""

    share: float
    basis: str
    judged: bool
    """A criterion defines it: a larger change is a regression or an improvement."""
    is_clear: bool = True
    """Small enough that a change beyond it is significant."""


def _figure(host: str, serial: str, key: Key, was: Level, now: Figure, criteria: Sequence[Criterion]) -> Change | None:
    before, after = was.value, now.level.value
    if before == after:
        return None
    allowed = _noise(was, now, criteria)
    share = (after - before) / abs(before) if before else None
    if share is not None and abs(share) <= allowed.share:
        return None
    kind = CHANGED
    if allowed.judged:
        better = (after - before) * direction(was.name, was.unit) > 0
        kind = (IMPROVED if better else REGRESSED) if allowed.is_clear else UNCLEAR
    change = Change(
        kind=kind,
        host=host,
        scope=now.scope,
        what=was.name,
        serial=serial,
        stage=key[1],
        params=was.params,
        unit=was.unit,
        old=before,
        new=after,
        share=share,
        noise=allowed.share,
        basis=allowed.basis,
        text="",
    )
    return replace(change, text=figure_text(change, f"{host} {now.scope}" if now.scope != "host" else host))


def figure_text(change: Change, part: str) -> str:
    """Return the sentence on the change of a figure of `part`."""
    by = f"{change.share * 100:+.3g} %" if change.share is not None else f"from {change.old:g}"
    beyond = f"beyond {(change.noise or 0) * 100:.3g} % noise"
    if change.kind == UNCLEAR:
        beyond = "but the noise is too large to be sure"
    before, after = apart(change.old, change.new, change.unit)
    settings = ", ".join(f"{name}={value}" for name, value in change.params.items())
    figure = f"{change.what}[{settings}]" if settings else change.what
    return f"{part}: {figure} {before} → {after} ({by}), {beyond}: {change.basis}"


def _noise(was: Level, now: Figure, criteria: Sequence[Criterion]) -> _Noise:
    own = noise(was)
    source = _noise_source(was, own)
    observation = Observation(
        name=was.name,
        scope=now.scope or "host",
        stage=was.stage,
        unit=was.unit,
        status=MEASURED,
        value=was.value,
        params=was.params,
    )
    for criterion in criteria:
        if criterion.baseline and criterion.matches_name(was.name) and matches(criterion, observation):
            limit = criterion.baseline
            floor = abs(limit.change / was.value) if limit.change is not None and was.value else abs(1 - limit.fraction)
            share = round(max(floor, limit.sigmas * own), 6)
            if limit.sigmas * own > floor:
                return _Noise(
                    share=share,
                    basis=f"{limit.sigmas:g} × its own noise, {source}",
                    judged=True,
                    is_clear=limit.sigmas * own <= MAX_RELATIVE_SIGMA,
                )
            return _Noise(share=share, basis=f"criterion {criterion.id}; own noise {source}", judged=True)
    if was.name in READINGS:
        return _Noise(share=0.0, basis="a count has no noise", judged=True)
    return _Noise(share=max(OTHERWISE, SIGMAS * own), basis="no criterion states how well it repeats", judged=False)


def _noise_source(was: Level, own: float) -> str:
    if was.sigma is not None:
        return f"{own * 100:.2g} % (sigma) over {len(was.values) - was.left_out} runs"
    return f"{own * 100:.2g} % (sigma) within one run, unknown from run to run" if own else "unknown"
