"""Parts that were ordered alike must be alike: one value against the value that most of its group show.

A group is the GPUs, or the hosts, of one GPU model that launch together (one gang; all of them where nothing launches
together). Which side of a difference is wrong nobody can tell, only which one is the odd one: it fails. Where as many show
one value as another, each fails and names the others, for such a fleet is not what was ordered either.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from fleet.judge.absence import with_absence
from fleet.judge.criteria import Criterion
from fleet.judge.evaluate import concerns, spoken_of
from fleet.judge.evidence import HostView
from fleet.quantities import digits_for, quantity
from schemas.records import ERROR, MEASURED, UNSUPPORTED, Observation, Value
from schemas.reports import FAIL, PASS, Verdict, VerdictKind
from schemas.scopes import Scope

_NAMED_VALUES = 4
_AS_MOST = "; give it what they have, and measure again"
_AS_ONE = "; give all of them one, and measure again"
_CHANGED = "; it changed during the run: measure again"
"""What to do where no part is to be touched (action `none`): the version is another."""

Key = tuple[str, str, str, str, str]
"""Criterion, name, GPU model, gang and place: what two values must share to be compared."""


@dataclass(kw_only=True)
class Group:
    """How many parts of a group show which last value."""

    what: str
    counts: Counter[tuple[bool, Value]] = field(default_factory=Counter)
    _told: list[tuple[Value, int]] = field(default_factory=list)

    def add(self, value: Value) -> None:
        """Counts one part."""
        self.counts[_exact(value)] += 1
        self._told = []

    def update(self, other: Group) -> None:
        """Counts the parts of another."""
        self.counts.update(other.counts)
        self._told = []

    @property
    def total(self) -> int:
        """Its parts."""
        return self.counts.total()

    def told(self) -> list[tuple[Value, int]]:
        """Each value and how many parts show it, the commonest first."""
        if not self._told:
            found = sorted(self.counts.items(), key=lambda item: (-item[1], str(item[0])))
            self._told = [(value, count) for (_, value), count in found]
        return self._told

    @property
    def plural(self) -> str:
        """`GPUs`, `hosts`."""
        return f"{self.what}s"


def _exact(value: Value) -> tuple[bool, Value]:
    """To Python, True and 1 are the same."""
    return isinstance(value, bool), value


class Groups:
    """Every value that some criterion wants to be the same over its group; several, each of other hosts, can be put together."""

    def __init__(self, views: Iterable[HostView] = ()) -> None:
        self._groups: dict[Key, Group] = {}
        self._told: set[tuple[str, str, str]] = set()
        for view in views:
            self.add(view)

    def add(self, view: HostView) -> None:
        """Takes what the host shows of it."""
        for criterion in view.criteria().values():
            if criterion.same_as_fleet:
                self._add(view, criterion)

    def _add(self, view: HostView, criterion: Criterion) -> None:
        own: dict[tuple[Key, str], tuple[str, Value]] = {}
        for seen in spoken_of(view, criterion):
            if seen.status == MEASURED and concerns(criterion, seen):
                key, what = group_key(view, criterion, seen)
                own[(key, seen.scope)] = what, seen.value
        for (key, _), (what, value) in own.items():
            self.feed(key, what, value, (criterion.id, *kin(view)))

    def feed(self, key: Key, what: str, value: Value, told: tuple[str, str, str]) -> None:
        """Counts the last value of one part; `told` as `told` is asked for it."""
        group = self._groups.get(key)
        if group is None:
            group = self._groups[key] = Group(what=what)
        group.add(value)
        self._told.add(told)

    def update(self, other: Groups) -> None:
        """Takes what another has of other hosts."""
        for key, group in other._groups.items():
            self._groups.setdefault(key, Group(what=group.what)).update(group)
        self._told |= other._told

    def of(self, view: HostView, criterion: Criterion, seen: Observation) -> Group:
        """The group that a value of this host belongs to."""
        key, what = group_key(view, criterion, seen)
        return self._groups.get(key) or Group(what=what)

    def at(self, key: Key) -> Group:
        """The group of that key."""
        return self._groups.get(key) or Group(what="")

    def told(self, key: tuple[str, str, str]) -> bool:
        """Whether any host of these (criterion, models, gang) shows what the criterion compares."""
        return key in self._told

    def others_tell(self, view: HostView, criterion: Criterion) -> bool:
        """Whether another host of the group shows what this criterion compares, where this one does not."""
        return (criterion.id, *kin(view)) in self._told


def kin(view: HostView) -> tuple[str, str]:
    """What hosts must share to be alike: the models of their GPUs, and the gang."""
    return " and ".join(sorted(set(view.names.values()))), view.host.gang


def group_key(view: HostView, criterion: Criterion, seen: Observation | Verdict) -> tuple[Key, str]:
    """The group of an observation, and what a part of it is called.

    GPUs of a model are alike wherever they sit. Anything else is compared with what has its name on the other hosts: an
    adapter for storage need not be like the one beside it.
    """
    scope = Scope.parse(seen.scope)
    models, gang = kin(view)
    if scope.device_kind == "gpu":
        key = (criterion.id, seen.name, view.names.get(scope.device, ""), gang, f"gpu,{scope.below}")
        return key, "place" if scope.below else "GPU"
    return (criterion.id, seen.name, models, gang, seen.scope), "host"


def observed(view: HostView, criterion: Criterion) -> bool:
    """Whether the host observed anything that the criterion is for."""
    return any(concerns(criterion, seen) for seen in spoken_of(view, criterion))


def uniform(view: HostView, criterion: Criterion, groups: Groups) -> Iterator[Verdict]:
    """Every verdict that one criterion gives on one host; none where there is nothing to compare it with."""
    if not criterion.same_as_fleet:
        return
    series = same_series(view, criterion)
    for items in series:
        yield from _on_series(view, criterion, items, groups)
    if not series and not criterion.optional and groups.others_tell(view, criterion):
        yield view.inconclusive(criterion.name, "host", "not observed, and other hosts tell it", criterion=criterion)


def same_series(view: HostView, criterion: Criterion) -> list[list[Observation]]:
    """What a criterion compares, each figure of each part by itself, in the order in which it was observed."""
    found: dict[tuple[str, str], list[Observation]] = defaultdict(list)
    for seen in spoken_of(view, criterion):
        if concerns(criterion, seen):
            found[(seen.name, seen.scope)].append(seen)
    return list(found.values())


def _on_series(view: HostView, criterion: Criterion, items: Sequence[Observation], groups: Groups) -> Iterator[Verdict]:
    measured, last = [seen for seen in items if seen.status == MEASURED], items[-1]
    group = groups.of(view, criterion, last)
    if group.total == bool(measured):
        return  # there is no other part
    if measured and last.status != ERROR:
        yield _compared(view, criterion, measured, group)
    elif not (criterion.optional and last.status == UNSUPPORTED):
        reason = f"{last.status}: {last.reason}"
        yield with_absence(view.inconclusive(last.name, last.scope, reason, last.stage, criterion=criterion), last)


def _compared(view: HostView, criterion: Criterion, measured: Sequence[Observation], group: Group) -> Verdict:
    told = group.told()
    value, count = told[0]
    if len(told) > 1 and told[1][1] == count:
        seen = measured[-1]
        digits = digits_for([seen.value, *(value for value, _ in told[:_NAMED_VALUES])], criterion.unit)
        return _verdict(view, criterion, seen, None, _tie(criterion, told, group, digits), digits, _AS_ONE)
    # A text or a flag must never have been another during the run; a number may be regulated.
    looked = measured[-1:] if isinstance(value, float | int) and not isinstance(value, bool) else measured
    odd = [seen for seen in looked if _exact(seen.value) != _exact(value)]
    if odd:
        digits = digits_for([odd[-1].value, value], criterion.unit)
        most = f"{count} of {group.total} {group.plural} have {quantity(value, criterion.unit, digits)}"
        remedy = _CHANGED if _exact(measured[-1].value) == _exact(value) else _AS_MOST
        return _verdict(view, criterion, odd[-1], value, most, digits, remedy)
    alike = f"as on all {count} {group.plural}" if len(told) == 1 else f"as on {count} of {group.total} {group.plural}"
    return _verdict(view, criterion, measured[-1], value, alike)


def _tie(criterion: Criterion, told: Sequence[tuple[Value, int]], group: Group, digits: int) -> str:
    """`1 of 2 hosts has X, 1 has Y`."""
    named = [(f"{count} of {group.total} {group.plural}" if not index else str(count), value, count)
             for index, (value, count) in enumerate(told[:_NAMED_VALUES])]  # fmt: skip
    texts = [
        f"{many} {'has' if count == 1 else 'have'} {quantity(value, criterion.unit, digits)}"
        for many, value, count in named
    ]
    more = [f"{len(told) - _NAMED_VALUES} more values"] if len(told) > _NAMED_VALUES else []
    return ", ".join([*texts, *more])


def _verdict(
    view: HostView,
    criterion: Criterion,
    seen: Observation,
    limit: Value,
    detail: str,
    digits: int = 4,
    remedy: str = "",
) -> Verdict:
    """The verdict on one value; without a limit there is no value that most show, and every side fails."""
    passed = limit is not None and _exact(seen.value) == _exact(limit)
    detail += remedy if not passed and criterion.action == "none" else ""
    return Verdict(
        host=view.host.name,
        scope=seen.scope,
        serial=view.serial(seen.scope),
        name=seen.name,
        stage=seen.stage,
        params=seen.params,
        verdict=PASS if passed else FAIL,
        criterion=criterion.id,
        kind=VerdictKind.PEERS,
        value=seen.value,
        limit=limit,
        operator="eq" if limit is not None else "",
        unit=criterion.unit,
        reason=f"found {quantity(seen.value, criterion.unit, digits)}, {detail}",
        detail=detail,
        action="none" if passed else criterion.action,
        source=criterion.source,
        basis=criterion.basis,
        severity="" if passed else criterion.severity,
    )
