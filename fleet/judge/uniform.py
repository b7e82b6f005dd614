"""Parts that were ordered alike must be alike: one value against the value that most of its group show.

A group is the GPUs, or the hosts, of one GPU model that launch together (one gang; all of them where nothing launches
together). Which side of a difference is wrong nobody can tell, only which one is the odd one: it fails. Where as many show
one value as another, each fails and names the others, for such a fleet is not what was ordered either.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from fleet.judge.criteria import Criterion
from fleet.judge.evidence import HostView
from fleet.judge.held import concerns, shown, spoken_of
from schemas.records import ERROR, MEASURED, UNSUPPORTED, Observation, Value
from schemas.reports import FAIL, PASS, Verdict

_NAMED_VALUES = 4

Key = tuple[str, str, str, str, str]
"""Criterion, name, GPU model, gang and place: what two values must share to be compared."""
Part = tuple[str, str]
"""Host and scope."""


@dataclass(kw_only=True)
class Group:
    """The last value of each part of a group."""

    what: str
    values: dict[Part, Value] = field(default_factory=dict)

    def told(self) -> list[tuple[Value, int]]:
        """Each value and how many parts show it, the commonest first."""
        counts = Counter(map(_exact, self.values.values()))
        return [
            (value, count) for (_, value), count in sorted(counts.items(), key=lambda item: (-item[1], str(item[0])))
        ]

    @property
    def plural(self) -> str:
        """`GPUs`, `hosts`."""
        return f"{self.what}s"


def _exact(value: Value) -> tuple[bool, Value]:
    """To Python, True and 1 are the same."""
    return isinstance(value, bool), value


class Groups:
    """Every value that some criterion wants to be the same over its group."""

    def __init__(self, views: Iterable[HostView]) -> None:
        self._groups: dict[Key, Group] = {}
        self._told: dict[tuple[str, str, str], set[str]] = defaultdict(set)
        for view in views:
            for criterion in view.criteria().values():
                if criterion.same_as_fleet:
                    self._add(view, criterion)

    def _add(self, view: HostView, criterion: Criterion) -> None:
        for seen in spoken_of(view, criterion):
            if seen.status == MEASURED and concerns(criterion, seen):
                key, what = _key(view, criterion, seen)
                group = self._groups.setdefault(key, Group(what=what))
                group.values[(view.host.name, seen.scope)] = seen.value
                self._told[(criterion.id, *_kin(view))].add(view.host.name)

    def of(self, view: HostView, criterion: Criterion, seen: Observation) -> Group:
        """The group that a value of this host belongs to."""
        key, what = _key(view, criterion, seen)
        return self._groups.get(key, Group(what=what))

    def others_tell(self, view: HostView, criterion: Criterion) -> bool:
        """Whether another host of the group shows what this criterion compares."""
        return bool(self._told[(criterion.id, *_kin(view))] - {view.host.name})


def _kin(view: HostView) -> tuple[str, str]:
    """What hosts must share to be alike: the models of their GPUs, and the gang."""
    return " and ".join(sorted(set(view.names.values()))), view.host.gang


def _key(view: HostView, criterion: Criterion, seen: Observation) -> tuple[Key, str]:
    """The group of an observation, and what a part of it is called.

    GPUs of a model are alike wherever they sit. Anything else is compared with what has its name on the other hosts: an
    adapter for storage need not be like the one beside it.
    """
    first, _, rest = seen.scope.partition(",")
    models, gang = _kin(view)
    if first.startswith("gpu="):
        return (criterion.id, seen.name, view.names.get(first, ""), gang, f"gpu,{rest}"), "GPU" if not rest else "place"
    return (criterion.id, seen.name, models, gang, seen.scope), "host"


def observed(view: HostView, criterion: Criterion) -> bool:
    """Whether the host observed anything that the criterion is for."""
    return any(concerns(criterion, seen) for seen in spoken_of(view, criterion))


def uniform(view: HostView, criterion: Criterion, groups: Groups) -> Iterator[Verdict]:
    """Every verdict that one criterion gives on one host; none where there is nothing to compare it with."""
    if not criterion.same_as_fleet:
        return
    series: dict[tuple[str, str], list[Observation]] = defaultdict(list)
    for seen in spoken_of(view, criterion):
        if concerns(criterion, seen):
            series[(seen.name, seen.scope)].append(seen)
    for items in series.values():
        yield from _on_series(view, criterion, items, groups)
    if not series and not criterion.optional and groups.others_tell(view, criterion):
        yield view.inconclusive(criterion.name, "host", "not observed, and other hosts tell it", criterion=criterion)


def _on_series(view: HostView, criterion: Criterion, items: Sequence[Observation], groups: Groups) -> Iterator[Verdict]:
    measured, last = [seen for seen in items if seen.status == MEASURED], items[-1]
    group = groups.of(view, criterion, last)
    if not group.values.keys() - {(view.host.name, last.scope)}:
        return
    if measured and last.status != ERROR:
        yield _compared(view, criterion, measured, group)
    elif not (criterion.optional and last.status == UNSUPPORTED):
        yield view.inconclusive(last.name, last.scope, f"{last.status}: {last.reason}", last.stage, criterion=criterion)


def _compared(view: HostView, criterion: Criterion, measured: Sequence[Observation], group: Group) -> Verdict:
    told = group.told()
    value, count = told[0]
    if len(told) > 1 and told[1][1] == count:
        return _verdict(view, criterion, measured[-1], None, _tie(criterion, told, group))
    # A text or a flag must never have been another during the run; a number may be regulated.
    looked = measured[-1:] if isinstance(value, float | int) and not isinstance(value, bool) else measured
    odd = [seen for seen in looked if _exact(seen.value) != _exact(value)]
    most = f"{count} of {len(group.values)} {group.plural} have {shown(criterion, value)}"
    if odd:
        return _verdict(view, criterion, odd[-1], value, most)
    alike = (
        f"as on all {count} {group.plural}"
        if len(told) == 1
        else f"as on {count} of {len(group.values)} {group.plural}"
    )
    return _verdict(view, criterion, measured[-1], value, alike)


def _tie(criterion: Criterion, told: Sequence[tuple[Value, int]], group: Group) -> str:
    """`1 of 2 hosts has X, 1 has Y`."""
    named = [(f"{count} of {len(group.values)} {group.plural}" if not index else str(count), value, count)
             for index, (value, count) in enumerate(told[:_NAMED_VALUES])]  # fmt: skip
    texts = [f"{many} {'has' if count == 1 else 'have'} {shown(criterion, value)}" for many, value, count in named]
    more = [f"{len(told) - _NAMED_VALUES} more values"] if len(told) > _NAMED_VALUES else []
    return ", ".join([*texts, *more])


def _verdict(view: HostView, criterion: Criterion, seen: Observation, limit: Value, detail: str) -> Verdict:
    """The verdict on one value; without a limit there is no value that most show, and every side fails."""
    passed = limit is not None and _exact(seen.value) == _exact(limit)
    return Verdict(
        host=view.host.name,
        scope=seen.scope,
        serial=view.serial(seen.scope),
        name=seen.name,
        stage=seen.stage,
        params=seen.params,
        verdict=PASS if passed else FAIL,
        criterion=criterion.id,
        value=seen.value,
        limit=limit,
        operator="eq" if limit is not None else "",
        unit=criterion.unit,
        reason=f"found {shown(criterion, seen.value)}, {detail}",
        detail=detail,
        action="none" if passed else criterion.action,
        source=criterion.source,
        basis=criterion.basis,
    )
