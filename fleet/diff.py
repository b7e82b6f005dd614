"""What is not as it was: parts, versions, and figures beyond their noise. A pure function of two sights of the same hosts.

A figure counts as regressed or improved where a criterion with `vs_baseline` speaks of it: the share that it allows, or the
figure's own noise from run to run where that is larger, is what is taken for noise, and each change states it. Other figures are
told where they moved far, without a judgement.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from fleet.baseline.sight import Figure, Sight, accepted, serials, sight
from fleet.judge.baseline import READINGS, WIDEST, direction, noise
from fleet.judge.concern import concerns
from fleet.judge.criteria import Criterion, Pack
from fleet.judge.evidence import Evidence, packs_for
from schemas.baselines import (
    CHANGED,
    FIGURES_GONE,
    FIGURES_NEW,
    GONE,
    IMPROVED,
    MOVED,
    NEW,
    PARTS,
    REGRESSED,
    REPLACED,
    UNCLEAR,
    VERSION,
    Change,
    Key,
    Level,
    Place,
)
from schemas.plans import Plan, PlannedHost
from schemas.records import MEASURED, Gpu, Observation, Value

OTHERWISE = 0.25
"""Share by which a figure must move to be told, where no criterion says how well it repeats."""
SIGMAS = 4.0
ORDER = (REGRESSED, REPLACED, MOVED, GONE, NEW, UNCLEAR, FIGURES_GONE, VERSION, CHANGED, IMPROVED, FIGURES_NEW)
PARTNER = ",partner="
MOST_LINES = 12
LONGEST = 1000
"""Characters of what a version was or is."""
_NAMED = 6

Sights = Mapping[str, Sight]
Criteria = Mapping[str, Sequence[Criterion]]
"""Host -> the criteria that judge it."""


class Comparison:
    """A comparison to which host after host is added, so that of a large fleet the figures need not be kept."""

    def __init__(self) -> None:
        self.compared = 0
        """Figures that both sides have: with none of them nothing was compared."""
        self.figures = 0
        """Figures that the new side has."""
        self.hosts = 0
        """Hosts of which both sides have a record."""
        self._found: list[Change] = []
        self._before: dict[str, _Seat] = {}
        self._after: dict[str, _Seat] = {}
        self._versions: dict[tuple[str, str, str], list[str]] = {}
        self._order: dict[str, int] = {}

    def add(self, host: str, old: Sight | None, new: Sight | None, criteria: Sequence[Criterion]) -> None:
        """Takes one host; None where a side does not know it.

        Of `criteria`, those that judge the host, the ones with `vs_baseline` say what is noise.
        """
        self._order.setdefault(host, len(self._order))
        was, now = old is not None and old.known, new is not None and new.known
        if new is not None and now:
            self.figures += sum(map(len, new.figures.values()))
        if old is not None and new is not None and was and now:
            self.hosts += 1
            self.compared += _in_common(old, new)
            self._before |= _seats(host, old)
            self._after |= _seats(host, new)
            self._found += _parts(host, old.parts, new.parts)
            self._found += _figures(host, old, new, criteria)
            for told in _versions(old, new):
                self._versions.setdefault(told, []).append(host)
        elif was:
            text = f"{host} left no record in the new run" if new is not None else f"{host} is not in the new run"
            self._found.append(Change(kind=GONE, host=host, scope="host", what="host", text=text))
        elif now:
            text = f"{host} has no earlier record"
            self._found.append(Change(kind=NEW, host=host, scope="host", what="host", text=text))

    def changes(self) -> tuple[Change, ...]:
        """Every change, regressions and parts that differ first, then by host in the order in which they were added."""
        found = [*self._found, *_gpus(self._before, self._after), *_told_once(self._versions)]
        order, last = self._order, len(self._order)
        return tuple(
            sorted(_folded(found), key=lambda item: (ORDER.index(item.kind), order.get(item.host, last), item.what))
        )


def compare(old: Sights, new: Sights, criteria: Criteria) -> Comparison:
    """The comparison of all hosts of either side, those of `new` in their order first."""
    found = Comparison()
    everywhere = {serial: figures for was in old.values() for serial, figures in was.figures.items() if serial}
    for host in dict.fromkeys((*new, *old)):
        was, now = old.get(host), new.get(host)
        if was and now:  # what came from another host has its figures there
            moved = {serial: everywhere[serial] for serial in now.figures if serial in everywhere}
            was = replace(was, figures={**moved, **was.figures})
        found.add(host, was, now, criteria.get(host, ()))
    return found


def difference(old: Sights, new: Sights, criteria: Criteria) -> tuple[Change, ...]:
    """Every change from `old` to `new`, as `Comparison.changes` orders them.

    Args:
        old: host -> what it showed then; several runs as one by `sight.together`.
        new: host -> what it shows now.
        criteria: host -> those that judge it; of these the ones with `vs_baseline` say what is noise.
    """
    return compare(old, new, criteria).changes()


def _in_common(old: Sight, new: Sight) -> int:
    return sum(len(figures.keys() & old.figures.get(serial, {}).keys()) for serial, figures in new.figures.items())


# --- parts


@dataclass(frozen=True, kw_only=True)
class _Seat:
    """A GPU in its place."""

    host: str
    gpu: Gpu

    @property
    def slot(self) -> tuple[str, str]:
        """What stays when the part is changed: the PCI address, or the index where none is told."""
        return self.host, self.gpu.pci_bus_id.lower() or f"index {self.gpu.index}"

    def __str__(self) -> str:
        return f"{self.host} gpu={self.gpu.index}"


def _seats(host: str, found: Sight) -> dict[str, _Seat]:
    """Serial -> where it is."""
    return {serial: _Seat(host=host, gpu=gpu) for serial, gpu in serials(found.gpus).items()}


def _gpus(before: Mapping[str, _Seat], after: Mapping[str, _Seat]) -> Iterator[Change]:
    """GPUs of hosts that both sides know."""
    was_in = {seat.slot: serial for serial, seat in before.items()}
    now_in = {seat.slot: serial for serial, seat in after.items()}
    for serial, seat in after.items():
        gone = was_in.get(seat.slot, "")
        if serial in before:
            if before[serial].slot != seat.slot:
                text = f"GPU {serial} moved from {before[serial]} to {seat}"
                yield _gpu(MOVED, serial, seat, str(before[serial]), str(seat), text)
        elif gone and gone not in after:
            text = f"{seat}: GPU {gone} is gone, {serial} is in its place"
            yield _gpu(REPLACED, serial, seat, gone, serial, text)
        else:
            yield _gpu(NEW, serial, seat, None, serial, f"{seat}: GPU {serial} was not there before")
    for serial, seat in before.items():
        replaced = now_in.get(seat.slot, "")
        if serial not in after and (not replaced or replaced in before):
            yield _gpu(GONE, serial, seat, serial, None, f"{seat}: GPU {serial} is gone")


def _gpu(kind: str, serial: str, seat: _Seat, was: Value, now: Value, text: str) -> Change:
    scope = f"gpu={seat.gpu.index}"
    return Change(kind=kind, host=seat.host, scope=scope, what="GPU", serial=serial, old=was, new=now, text=text)


def _parts(host: str, old: Iterable[Place], new: Iterable[Place]) -> Iterator[Change]:
    """Serials of what else the host holds; the names of disks and NICs may change without one of them being another."""
    before, after = _by_kind(old), _by_kind(new)
    for kind, was in before.items():
        now = after.get(kind)
        if now is None:
            yield Change(
                kind=UNCLEAR,
                host=host,
                scope="host",
                what=kind,
                text=f"{host}: no {kind} tells its serial any more, {len(was)} did before",
            )
            continue
        came = {place.slot: place for serial, place in now.items() if serial not in was}
        for serial, place in was.items():
            if serial in now:
                continue
            other = came.pop(place.slot, None)
            if other:
                text = f"{host} {place.slot}: {kind} {serial} is gone, {other.serial} is in its place"
            else:
                text = f"{host} {place.slot}: {kind} {serial} is gone"
            yield _part(REPLACED if other else GONE, host, place, other, text)
        for other in came.values():
            yield _part(NEW, host, None, other, f"{host} {other.slot}: {kind} {other.serial} was not there before")


def _part(kind: str, host: str, was: Place | None, now: Place | None, text: str) -> Change:
    place = now or was or Place(kind="", slot="", serial="")
    return Change(
        kind=kind,
        host=host,
        scope=place.slot,
        what=place.kind,
        serial=place.serial,
        old=was.serial if was else None,
        new=now.serial if now else None,
        text=text,
    )


def _by_kind(parts: Iterable[Place]) -> dict[str, dict[str, Place]]:
    found: dict[str, dict[str, Place]] = defaultdict(dict)
    for place in parts:
        found[place.kind][place.serial] = place
    return found


# --- versions


def _versions(old: Sight, new: Sight) -> Iterator[tuple[str, str, str]]:
    """Component, what it was and what it is."""
    was, now = _told(old.versions), _told(new.versions)
    for name in sorted(was.keys() & now.keys()):
        if was[name] != now[name]:
            yield name, was[name], now[name]


def _told_once(found: Mapping[tuple[str, str, str], Sequence[str]]) -> Iterator[Change]:
    """What reads the same on several hosts is told once."""
    for (name, before, after), where in found.items():
        more = f" and {len(where) - _NAMED} more" if len(where) > _NAMED else ""
        names = f"{', '.join(where[:_NAMED])}{more}"
        text = f"{names}: {name} {before} → {after}"
        yield Change(kind=VERSION, host=where[0], scope="host", what=name, old=before, new=after, text=text)


def _told(versions: Mapping[str, str]) -> dict[str, str]:
    """Component -> its version, or all that its parts have: `NAME[gpu=3]` is told with `NAME`."""
    found: dict[str, dict[str, str]] = defaultdict(dict)
    for name, version in versions.items():
        base, _, at = name.partition("[")
        found[base][at.rstrip("]")] = version
    return {base: ", ".join(sorted(set(of_part.values())))[:LONGEST] for base, of_part in found.items()}


# --- figures


def _figures(host: str, old: Sight, new: Sight, criteria: Sequence[Criterion]) -> Iterator[Change]:
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
    by = f"{share * 100:+.3g} %" if share is not None else f"from {before:g}"
    beyond = f"beyond {allowed.share * 100:.3g} % of noise" if allowed.told else "and no change can be told from noise"
    at = f"{host} {now.scope}" if now.scope != "host" else host
    settled = ", ".join(f"{name}={value}" for name, value in was.params.items())
    named = f"{was.name}[{settled}]" if settled else was.name
    return Change(
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
        text=f"{at}: {named} {_shown(before, was.unit)} → {_shown(after, was.unit)} ({by}), {beyond}: {allowed.basis}",
    )


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


def _shown(value: float, unit: str) -> str:
    return f"{value:.4g}{'' if unit == '1' else f' {unit}'}"


# --- what several hosts tell of one thing


def _folded(changes: Sequence[Change]) -> Iterator[Change]:
    """What a gang did together is told once, and what is slow with one host alone is told of that host."""
    culprits: dict[str, str] = {}
    pairs: dict[str, list[Change]] = defaultdict(list)
    gangs: dict[tuple[Value, ...], list[Change]] = defaultdict(list)
    for change in changes:
        if change.kind == REGRESSED and PARTNER in change.scope:
            pairs[change.what].append(change)
        elif change.kind == REGRESSED and change.scope.startswith("gang="):
            params = tuple(f"{key}={value}" for key, value in change.params.items())
            gangs[(change.scope, change.what, change.stage, *params)].append(change)
        else:
            yield change
    for found in pairs.values():
        host = _common(found)
        if host:
            culprits[host] = host
            yield _slow_with_all(host, found)
        else:
            yield from found
    for found in gangs.values():
        worst = min(found, key=lambda item: item.share or 0.0)
        named = next((item for item in found if item.host in culprits), worst)
        yield replace(named, text=f"{named.scope}: {worst.text.partition(': ')[2]}", share=worst.share, new=worst.new)


def _common(found: Sequence[Change]) -> str:
    """The one host that has a part in every pair that became slow, where that is more than one pair; else empty."""
    ends = [{change.host, change.scope.partition(PARTNER)[2]} for change in found]
    shared = set.intersection(*ends)
    return shared.pop() if len(shared) == 1 else ""


def _slow_with_all(host: str, found: Sequence[Change]) -> Change:
    partners = sorted(set().union(*({change.host, change.scope.partition(PARTNER)[2]} for change in found)) - {host})
    worst = min(found, key=lambda item: item.share or 0.0)
    named = ", ".join(partners[:_NAMED]) + (" …" if len(partners) > _NAMED else "")
    shares = sorted((change.share or 0.0) * 100 for change in found)
    text = (
        f"{host}: {worst.what} with {named} changed by {shares[0]:+.3g} to {shares[-1]:+.3g} %, that of the others with each "
        f"other did not, beyond {(worst.noise or 0) * 100:.3g} % of noise: {worst.basis}"
    )
    return replace(worst, host=host, scope="host", serial="", text=text)


# --- a run against its baseline


@dataclass(frozen=True, kw_only=True)
class Since:
    """What came of a comparison with the accepted records, and of how much of the run."""

    changes: tuple[Change, ...] = ()
    compared: int = 0
    figures: int = 0
    """Those of the run, compared or not."""


def since_accepted(plan: Plan, evidence: Mapping[str, Evidence], packs: Sequence[Pack]) -> Since:
    """What is not as it was when the hosts of a run were accepted; nothing where its plan names no baseline."""
    if plan.baseline is None:
        return Since()
    found = Comparison()
    for host in plan.hosts:
        take(found, plan, host, evidence.get(host.name, Evidence()), packs)
    return Since(changes=found.changes(), compared=found.compared, figures=found.figures)


def take(found: Comparison, plan: Plan, host: PlannedHost, left: Evidence, packs: Sequence[Pack]) -> None:
    """Adds a host of a run that is compared with its accepted record, which its evidence has."""
    found.add(host.name, accepted(left.baseline), sight(left), criteria_of(plan, host, left, packs))


def criteria_of(plan: Plan, host: PlannedHost, left: Evidence, packs: Sequence[Pack]) -> list[Criterion]:
    """The criteria by which a host is held against a baseline, as the judge chooses them."""
    applied = packs_for(plan, host, left.gpus(), packs)[0]
    chosen = {item.id: item for pack in applied for item in pack.criteria}
    return [item for item in chosen.values() if item.baseline is not None]


def summary(plan: Plan, since: Since) -> Iterator[str]:
    """What of the changes stands on top of the report: how much, and each regression and part that differs."""
    if plan.baseline is None:
        return
    kinds = Counter(change.kind for change in since.changes)
    gone = sum(int(change.old or 0) for change in since.changes if change.kind == FIGURES_GONE)
    parts = sum(kinds[kind] for kind in PARTS)
    told = [
        f"{kinds[REGRESSED]} regressed" if kinds[REGRESSED] else "",
        f"{_count(parts, 'part')} differ" if parts else "",
    ]
    same = "nothing regressed, the parts are the same" if since.compared else "nothing can be told of how they were"
    found = ", ".join(text for text in told if text) or same
    found = f"{since.compared} of {since.figures} figures compared, {found}"
    unclear = f", {kinds[UNCLEAR]} cannot be told" if kinds[UNCLEAR] else ""
    lost = f", {_count(gone, 'accepted figure')} not measured" if gone else ""
    yield f"Against the accepted records (baseline {plan.baseline.digest[:12]}): {found}{unclear}{lost}"
    shown = [change for change in since.changes if change.counts]
    yield from (f"{change.kind.upper()}: {change.text}" for change in shown[:MOST_LINES])
    if len(shown) > MOST_LINES:
        yield f"… and {len(shown) - MOST_LINES} more changes in the report"


def _count(number: int, one: str) -> str:
    return f"{number} {one if number == 1 else one + 's'}"
