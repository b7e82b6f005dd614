"""Compare parts that must be alike: each value with the most common value of its group.

A group is the GPUs, or the hosts, of one GPU model that launch together (one gang; all of them if nothing launches together).
The correct value is not known, so parts in the minority fail. If two values are equally common, every part fails, and the reason
lists the values.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from fleet.judge.absence import with_absence
from fleet.judge.criteria import Criterion
from fleet.judge.evaluate import with_matching_name
from fleet.judge.host_view import HostView
from fleet.judge.matching import matches
from fleet.quantities import digits_for, quantity
from schemas.records import ERROR, MEASURED, UNSUPPORTED, Observation, Value
from schemas.reports import FAIL, PASS, Verdict, VerdictKind
from schemas.scopes import Scope

_MAX_LISTED_VALUES = 4
"""Number of values of a group that a verdict lists."""
_USE_MAJORITY = "; set the value of the majority, and measure again"
_USE_ONE = "; set one value on all of them, and measure again"
_CHANGED = "; it changed during the run: measure again"
"""Remedies for criteria with the action `none`: a version or setting differs, and no part is faulty."""

GroupKey = tuple[str, str, str, str, str]
"""Criterion, name, GPU model, gang and scope, which comparable values share."""
KindKey = tuple[str, str, str]
"""Criterion, GPU models and gang of a group of hosts: if one host reports the value, all must."""


@dataclass(kw_only=True)
class ValueGroup:
    """The number of parts of a group per last value."""

    what: str
    counts: Counter[tuple[bool, Value]] = field(default_factory=Counter)
    _by_count: list[tuple[Value, int]] = field(default_factory=list)

    def add(self, value: Value, parts: int = 1) -> None:
        """Count parts with this value."""
        self.counts[_exact(value)] += parts
        self._by_count = []

    def update(self, other: ValueGroup) -> None:
        """Add the counts of other hosts."""
        self.counts.update(other.counts)
        self._by_count = []

    @property
    def total(self) -> int:
        """Return the number of parts."""
        return self.counts.total()

    def by_count(self) -> list[tuple[Value, int]]:
        """Return each value and the number of parts with it, the most common first."""
        if not self._by_count:
            counts = sorted(self.counts.items(), key=lambda item: (-item[1], str(item[0])))
            self._by_count = [(value, count) for (_, value), count in counts]
        return self._by_count

    @property
    def plural(self) -> str:
        """Return the name of several parts: `GPUs`, `hosts`."""
        return f"{self.what}s"


def _exact(value: Value) -> tuple[bool, Value]:
    """Return a key that distinguishes True from 1, which are equal in Python."""
    return isinstance(value, bool), value


@dataclass(frozen=True, kw_only=True)
class PartValue:
    """The last value of one part, for a criterion that requires the same value in the group."""

    key: GroupKey
    what: str
    value: Value
    kind: KindKey


class ValueGroups:
    """The values of all groups. Statistics of different hosts can be merged in any order."""

    def __init__(self, views: Iterable[HostView] = ()) -> None:
        self._groups: dict[GroupKey, ValueGroup] = {}
        self._kinds: set[KindKey] = set()
        for view in views:
            self.add(view)

    def add(self, view: HostView) -> None:
        """Count the values of a host."""
        for criterion in view.criteria().values():
            if criterion.same_as_fleet:
                for part in part_values(view, criterion):
                    self.add_part(part)

    def add_part(self, part: PartValue, parts: int = 1) -> None:
        """Count the value of one part, or of `parts` equal parts of other hosts too."""
        group = self._groups.get(part.key)
        if group is None:
            group = self._groups[part.key] = ValueGroup(what=part.what)
        group.add(part.value, parts)
        self._kinds.add(part.kind)

    def update(self, other: ValueGroups) -> None:
        """Add the values of other hosts."""
        for key, group in other._groups.items():
            self._groups.setdefault(key, ValueGroup(what=group.what)).update(group)
        self._kinds |= other._kinds

    def of(self, view: HostView, criterion: Criterion, observation: Observation) -> ValueGroup:
        """Return the group of an observation of this host."""
        key, what = group_key(view, criterion, observation)
        return self._groups.get(key) or ValueGroup(what=what)

    def has_value(self, view: HostView, criterion: Criterion) -> bool:
        """Return whether any host of the group reports a value for this criterion."""
        return (criterion.id, *view.peer_key) in self._kinds


def part_values(view: HostView, criterion: Criterion) -> list[PartValue]:
    """Return the last value of each part of a host that the criterion compares."""
    values: dict[tuple[GroupKey, str], PartValue] = {}
    kind = (criterion.id, *view.peer_key)
    for observation in with_matching_name(view, criterion):
        if observation.status == MEASURED and matches(criterion, observation):
            key, what = group_key(view, criterion, observation)
            values[(key, observation.scope)] = PartValue(key=key, what=what, value=observation.value, kind=kind)
    return list(values.values())


def group_key(view: HostView, criterion: Criterion, item: Observation | Verdict) -> tuple[GroupKey, str]:
    """Return the group of an observation, and the name of its parts.

    GPUs of a model must be alike in every slot. Other parts are compared with the part of the same scope on other hosts: two
    storage adapters of one host may differ.
    """
    scope = Scope.parse(item.scope)
    models, gang = view.peer_key
    if scope.device_kind == "gpu":
        key = (criterion.id, item.name, view.names.get(scope.device, ""), gang, f"gpu,{scope.below}")
        return key, "part" if scope.below else "GPU"
    return (criterion.id, item.name, models, gang, item.scope), "host"


def has_observation(view: HostView, criterion: Criterion) -> bool:
    """Return whether the host observed anything that the criterion applies to."""
    return any(matches(criterion, observation) for observation in with_matching_name(view, criterion))


def uniform(view: HostView, criterion: Criterion, groups: ValueGroups) -> Iterator[Verdict]:
    """Yield every verdict of one criterion on one host; none if no other part is comparable."""
    if not criterion.same_as_fleet:
        return
    series = _series(view, criterion)
    for items in series:
        yield from _judge_series(view, criterion, items, groups)
    if not series and not criterion.optional and groups.has_value(view, criterion):
        yield view.inconclusive(criterion.name, "host", "not observed, but other hosts report it", criterion=criterion)


def _series(view: HostView, criterion: Criterion) -> list[list[Observation]]:
    """Return the observations that a criterion compares, one list for each figure of each part, in the order of time."""
    series: dict[tuple[str, str], list[Observation]] = defaultdict(list)
    for observation in with_matching_name(view, criterion):
        if matches(criterion, observation):
            series[(observation.name, observation.scope)].append(observation)
    return list(series.values())


def _judge_series(
    view: HostView, criterion: Criterion, items: Sequence[Observation], groups: ValueGroups
) -> Iterator[Verdict]:
    measured, last = [item for item in items if item.status == MEASURED], items[-1]
    group = groups.of(view, criterion, last)
    if group.total == bool(measured):
        return  # there is no other part
    if measured and last.status != ERROR:
        yield _compare(view, criterion, measured, group)
    elif not (criterion.optional and last.status == UNSUPPORTED):
        reason = f"{last.status}: {last.reason}"
        yield with_absence(view.inconclusive(last.name, last.scope, reason, last.stage, criterion=criterion), last)


def _compare(view: HostView, criterion: Criterion, measured: Sequence[Observation], group: ValueGroup) -> Verdict:
    by_count = group.by_count()
    value, count = by_count[0]
    if len(by_count) > 1 and by_count[1][1] == count:
        last = measured[-1]
        digits = digits_for([last.value, *(value for value, _ in by_count[:_MAX_LISTED_VALUES])], criterion.unit)
        return _verdict(view, criterion, last, None, _describe_tie(criterion, group, digits), digits, _USE_ONE)
    # A text or a flag must be the same during the whole run. A number, such as a clock, may change.
    is_number = isinstance(value, float | int) and not isinstance(value, bool)
    deviating = [item for item in (measured[-1:] if is_number else measured) if _exact(item.value) != _exact(value)]
    if deviating:
        digits = digits_for([deviating[-1].value, value], criterion.unit)
        most = f"{count} of {group.total} {group.plural} have {quantity(value, criterion.unit, digits)}"
        remedy = _CHANGED if _exact(measured[-1].value) == _exact(value) else _USE_MAJORITY
        return _verdict(view, criterion, deviating[-1], value, most, digits, remedy)
    alike = (
        f"as on all {count} {group.plural}" if len(by_count) == 1 else f"as on {count} of {group.total} {group.plural}"
    )
    return _verdict(view, criterion, measured[-1], value, alike)


def _describe_tie(criterion: Criterion, group: ValueGroup, digits: int) -> str:
    """Return the values in words, the most common first: `1 of 2 hosts has X, 1 has Y`."""
    by_count, texts = group.by_count(), []
    for index, (value, count) in enumerate(by_count[:_MAX_LISTED_VALUES]):
        many = str(count) if index else f"{count} of {group.total} {group.plural}"
        texts.append(f"{many} {'has' if count == 1 else 'have'} {quantity(value, criterion.unit, digits)}")
    more = [f"{len(by_count) - _MAX_LISTED_VALUES} more values"] if len(by_count) > _MAX_LISTED_VALUES else []
    return ", ".join([*texts, *more])


def _verdict(
    view: HostView,
    criterion: Criterion,
    observation: Observation,
    limit: Value,
    detail: str,
    digits: int = 4,
    remedy: str = "",
) -> Verdict:
    """Return the verdict on one value. The limit is None, and every part fails, if no value is the most common."""
    passed = limit is not None and _exact(observation.value) == _exact(limit)
    detail += remedy if not passed and criterion.action == "none" else ""
    return Verdict(
        host=view.host.name,
        scope=observation.scope,
        serial=view.serial(observation.scope),
        name=observation.name,
        stage=observation.stage,
        params=observation.params,
        verdict=PASS if passed else FAIL,
        criterion=criterion.id,
        kind=VerdictKind.PEERS,
        value=observation.value,
        limit=limit,
        operator="eq" if limit is not None else "",
        unit=criterion.unit,
        reason=f"found {quantity(observation.value, criterion.unit, digits)}, {detail}",
        detail=detail,
        action="none" if passed else criterion.action,
        source=criterion.source,
        basis=criterion.basis,
        severity="" if passed else criterion.severity,
    )
