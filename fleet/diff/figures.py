"""Figures that changed by more than what is taken for their noise, and those that only one side has."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from fleet.judge.baseline import READINGS, WIDEST, direction, noise
from fleet.judge.criteria import Criterion
from fleet.judge.matching import concerns
from fleet.quantities import apart
from fleet.records.host_state import Figure, Sight, serials
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
"""Share by which a figure must move to be told, where no criterion says how well it repeats."""
SIGMAS = 4.0
_NAMED = 6


def figures(host: str, old: Sight, new: Sight, criteria: Sequence[Criterion]) -> Iterator[Change]:
    asked = [item for item in criteria if item.baseline is not None]
    gone, came = 0, 0
    missing: Counter[str] = Counter()
    there = {"", *serials(new.gpus)}
    for serial, before in old.figures.items():
        if serial in there and serial not in new.figures:  # the part is in its place, and nothing of it was measured
            gone += len(before)
            missing.update(key[0] for key in before)
    for serial, now in new.figures.items():
        was = old.figures.get(serial)
        if was is None:
            continue  # a part that was not there before: told as a part
        came += len(now.keys() - was.keys())
        for key in was.keys() - now.keys():
            gone += 1
            missing[key[0]] += 1
        for key in now.keys() & was.keys():
            change = _figure(host, serial, key, was[key].level, now[key], asked)
            if change:
                yield change
    if gone:
        names = ", ".join(name for name, _ in missing.most_common(_NAMED)) + (" …" if len(missing) > _NAMED else "")
        text = f"{host}: {gone} earlier figures were not measured this time ({names})"
        yield Change(kind=FIGURES_GONE, host=host, scope="host", what="figures", old=gone, text=text)
    if came:
        text = f"{host}: {came} figures have nothing earlier to be compared with"
        yield Change(kind=FIGURES_NEW, host=host, scope="host", what="figures", new=came, text=text)


@dataclass(frozen=True, kw_only=True)
class _Noise:
    """What of a figure is taken for noise."""

    share: float
    basis: str
    judged: bool
    """A criterion says so: beyond it the figure is better or worse."""
    told: bool = True
    """Small enough for a change to be seen beyond it."""


def _figure(host: str, serial: str, key: Key, was: Level, now: Figure, asked: Sequence[Criterion]) -> Change | None:
    before, after = was.value, now.level.value
    if before == after:
        return None
    allowed = _noise(was, now, asked)
    share = (after - before) / abs(before) if before else None
    if share is not None and abs(share) <= allowed.share:
        return None
    kind = CHANGED
    if allowed.judged:
        better = (after - before) * direction(was.name, was.unit) > 0
        kind = (IMPROVED if better else REGRESSED) if allowed.told else UNCLEAR
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
    beyond = f"beyond {(change.noise or 0) * 100:.3g} % of noise"
    if change.kind == UNCLEAR:
        beyond = "and no change can be told from noise"
    before, after = apart(change.old, change.new, change.unit)
    settings = ", ".join(f"{name}={value}" for name, value in change.params.items())
    figure = f"{change.what}[{settings}]" if settings else change.what
    return f"{part}: {figure} {before} → {after} ({by}), {beyond}: {change.basis}"


def _noise(was: Level, now: Figure, asked: Sequence[Criterion]) -> _Noise:
    own = noise(was)
    known = _own(was, own)
    seen = Observation(
        name=was.name,
        scope=now.scope or "host",
        stage=was.stage,
        unit=was.unit,
        status=MEASURED,
        value=was.value,
        params=was.params,
    )
    for criterion in asked:
        if criterion.baseline and criterion.speaks_of(was.name) and concerns(criterion, seen):
            limit = criterion.baseline
            floor = abs(limit.change / was.value) if limit.change is not None and was.value else abs(1 - limit.fraction)
            share = round(max(floor, limit.sigmas * own), 6)
            if limit.sigmas * own > floor:
                return _Noise(
                    share=share,
                    basis=f"{limit.sigmas:g} times its own, which is {known}",
                    judged=True,
                    told=limit.sigmas * own <= WIDEST,
                )
            return _Noise(share=share, basis=f"criterion {criterion.id}; its own is {known}", judged=True)
    if was.name in READINGS:
        return _Noise(share=0.0, basis="a count, which has none", judged=True)
    return _Noise(share=max(OTHERWISE, SIGMAS * own), basis="no criterion says how well it repeats", judged=False)


def _own(was: Level, own: float) -> str:
    """What is known of a figure's own noise."""
    if was.sigma is not None:
        return f"{own * 100:.2g} % (sigma) over {len(was.values) - was.left_out} runs"
    return f"{own * 100:.2g} % (sigma) within a run, and unknown from run to run" if own else "not known"
