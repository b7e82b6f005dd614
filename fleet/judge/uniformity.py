"""Compare parts that must be alike: each value with the most common value of its group.

A group is the GPUs, or the hosts, of one GPU model in one gang (the hosts of one multi-node launch). The hosts without a gang are
compared with each other. A criterion may compare within a rack, within an NVLink domain, within the host, or within a device
instead.
The correct value is not known, so parts that do not have the most common value fail. If several values are equally common, the
one that the criterion prefers counts as correct. Without a preference every part fails, and the reason lists the values.
"""

from __future__ import annotations

import bisect
import itertools
from collections import Counter, defaultdict
from collections.abc import Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from fleet.judge.absence import with_absence
from fleet.judge.criteria import Criterion
from fleet.judge.evaluate import with_matching_name
from fleet.judge.evidence import from_benchmark
from fleet.judge.finding import CEILINGS, FLOORS
from fleet.judge.host_view import HostView
from fleet.judge.matching import matches
from fleet.quantities import counted, digits_for, quantity
from schemas.records import ERROR, MEASURED, UNSUPPORTED, Observation, Value, is_number
from schemas.reports import FAIL, PASS, Verdict, VerdictKind
from schemas.scopes import Scope

_MAX_LISTED_VALUES = 4
"""Maximum number of values of a group that the reason of a verdict lists."""
MIN_ALIKE = 4
"""Parts of one host, or of one device, are compared with each other only if at least this many are of one kind. For whole GPUs,
two are enough."""
MIN_ALIKE_SHARE = 0.75
"""Parts to which MIN_ALIKE applies are compared only if at least this share of them agrees. So at most two of eight, or one of
four, fail."""
PCI_READINGS = "pcie."
"""Prefix of the names of readings of PCI devices."""
SLOT_READINGS = (PCI_READINGS, "gpu.nvlink.active_links")
"""Prefixes of the names of readings that depend on the slot: a GPU is compared with the GPU of the same index on other hosts. For
example, only GPUs in some slots may have NVLink bridges."""
BY_PART_NUMBER = ("gpu.vbios_version", "gpu.inforom.version")
"""Readings that belong to a part number of a GPU: a replacement GPU with another part number has another VBIOS and InfoROM."""
BY_PART: Mapping[str, str] = {
    "bmc.firmware.version": "bmc.firmware.part",
    "infiniband.hca.firmware_version": "infiniband.hca.board_id",
}
"""Reading on the firmware of a part -> reading that names the model of the part. Hosts of one order may have parts of several
vendors in the same place, for example power supplies. Their firmware is compared within a model."""
PCI_KIND, DRIVE = "pcie.kind", "nvme"
"""Reading that names the kind of a PCI device, and its value for a drive."""
NODE_MEMORY, MEMORY, MIN_NODE_SHARE = "host.numa.memory_total", "host.memory.total", 0.98
"""The memory of each NUMA node, and that of the host. The sizes of the nodes are compared only if all nodes together have at
least this share of the memory of the host. In some virtual machines they have less: the kernel reported a node of 4.7 GiB at the
start of a run and of 14.1 GiB at its end, in a machine of 126 GiB (measured). Such sizes do not show what is installed."""
HOST, RACK, DOMAIN, DEVICE = "host", "rack", "domain", "device"
"""Values of `Criterion.among`."""
WITHIN_HOST = (HOST, DEVICE)
_USE_MAJORITY = "; set the value of the majority, and measure again"
_USE_ONE = "; set one value on all of them, and measure again"
_CHANGED = "; the value changed during the run: measure again"
"""What to do if a criterion with the action `none` or `configure` fails: a version or setting differs, and no part is faulty."""

GroupKey = tuple[str, str, str, str, str]
"""Id of the criterion, name of the observation (with the model of the part, see BY_PART), GPU model, group of hosts
(`group_name`) and scope. Values with the same key are compared with each other."""
KindKey = tuple[str, str, str]
"""Id of a criterion, GPU models of a host, and group of hosts (`group_name`). If one host with this key reports a value for the
criterion, all hosts with this key must."""


@dataclass(kw_only=True, slots=True)
class ValueGroup:
    """How many parts of a group have each value. The last value of a part counts."""

    what: str
    """Name of one part, such as `GPU` or `host`."""
    counts: dict[tuple[bool, Value], int] = field(default_factory=dict)
    """Value, as `_exact` returns it -> the number of parts that have it."""
    _by_count: Sequence[tuple[Value, int]] = ()
    _reference: tuple[Value, int] | None = None

    def add(self, value: Value, parts: int = 1) -> None:
        """Count parts with this value."""
        key = _exact(value)
        self.counts[key] = self.counts.get(key, 0) + parts
        self._by_count, self._reference = (), None

    def merged(self, other: ValueGroup) -> ValueGroup:
        return ValueGroup(what=self.what, counts=dict(Counter(self.counts) + Counter(other.counts)))

    @property
    def total(self) -> int:
        return sum(self.counts.values())

    def by_count(self) -> Sequence[tuple[Value, int]]:
        """Return each value and the number of parts with it, the most common first."""
        if not self._by_count:
            counts = sorted(self.counts.items(), key=lambda item: (-item[1], str(item[0])))
            self._by_count = tuple((value, count) for (_, value), count in counts)
        return self._by_count

    def reference(self, criterion: Criterion) -> tuple[Value, int]:
        """Return the value that the parts must have and the number of parts that have it; (None, 0) if no value can be chosen.

        Numbers within the tolerance of the criterion count as the same value. Among values that are equally common, the criterion
        may prefer one: `prefer`, or the greatest with the operator `ge` and the least with `le`.
        """
        if self._reference is None:
            self._reference = _most_common(self.by_count(), criterion)
        return self._reference

    @property
    def plural(self) -> str:
        """Return the name of several parts: `GPUs`, `hosts`."""
        return f"{self.what}s"


def _most_common(by_count: Sequence[tuple[Value, int]], criterion: Criterion) -> tuple[Value, int]:
    """Return `ValueGroup.reference` of a group that has these values and numbers of parts."""
    supported = _with_tolerance(by_count, criterion.within) if criterion.within else list(by_count)
    if not supported:
        return None, 0
    most = max(count for _, count in supported)
    value = next(value for value, count in supported if count == most)
    tied = [other for other, count in supported if count == most and not _is_near(other, value, criterion.within)]
    if not tied:
        return value, most
    tied.append(value)
    if any(_exact(other) == _exact(criterion.prefer) for other in tied):
        return criterion.prefer, most
    numbers = [other for other in tied if isinstance(other, int | float)]
    if len(numbers) == len(tied) and criterion.operator in FLOORS + CEILINGS:
        return (max if criterion.operator in FLOORS else min)(numbers), most
    return None, 0


def _with_tolerance(by_count: Sequence[tuple[Value, int]], within: float) -> list[tuple[Value, int]]:
    """Return each value of `by_count`, in the same order, and the number of parts whose values are within the tolerance of it.

    `within` is the tolerance, as a fraction of the value.
    """
    numbers = sorted((value, count) for value, count in by_count if is_number(value))
    ordered: list[float] = [number for number, _ in numbers]
    totals = [0, *itertools.accumulate(count for _, count in numbers)]
    supported = []
    for value, count in by_count:
        if is_number(value):
            margin = abs(value) * within
            first, end = bisect.bisect_left(ordered, value - margin), bisect.bisect_right(ordered, value + margin)
            count = totals[end] - totals[first]
        supported.append((value, count))
    return supported


def _is_near(value: Value, other: Value, within: float) -> bool:
    """Return whether two values count as the same: equal, or numbers that differ by at most `within` of the larger one."""
    if within and isinstance(value, float | int) and isinstance(other, float | int):
        return abs(value - other) <= within * max(abs(value), abs(other))
    return _exact(value) == _exact(other)


def is_alike(criterion: Criterion, value: Value, reference: Value) -> bool:
    """Return whether a value passes: it is preferred, the same as the reference, or, by the criterion's operator, better."""
    if criterion.prefer is not None and _exact(value) == _exact(criterion.prefer):
        return True
    if _is_near(value, reference, criterion.within):
        return True
    if not isinstance(value, int | float) or not isinstance(reference, int | float):
        return False
    better = value > reference if criterion.operator in FLOORS else value < reference
    return criterion.operator != "eq" and better and isinstance(value, bool) == isinstance(reference, bool)


def group_name(view: HostView, criterion: Criterion) -> str:
    """Return the name of the group of hosts in which a criterion compares this host: its gang, its rack or its NVLink domain."""
    return name_of_group(criterion, view.host.gang, view.host.rack, view.nvlink_domain)


def name_of_group(criterion: Criterion, gang: str, rack: str, domain: str) -> str:
    """Return the name of the group in which a criterion compares the hosts of this gang, rack and NVLink domain."""
    return {RACK: f"rack {rack}", DOMAIN: domain}.get(criterion.among, gang)


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

    def in_group(self, group: str) -> PartValue:
        """Return the same value of a part in another group of hosts (`group_name`)."""
        return replace(self, key=(*self.key[:3], group, self.key[4]), kind=(*self.kind[:2], group))


class ValueGroups:
    """The values of all groups. Statistics of different hosts can be merged in any order."""

    def __init__(self, views: Iterable[HostView] = ()) -> None:
        self._groups: dict[GroupKey, ValueGroup] = {}
        self._kinds: set[KindKey] = set()
        self._common: dict[str, dict[KindKey, dict[str, ValueGroup]]] = {}
        """Id of a criterion -> the results of `common_parts` for the groups of hosts. They are computed when first needed."""
        for view in views:
            self.add(view)

    def add(self, view: HostView) -> None:
        """Count the values of a host."""
        for criterion in view.criteria().values():
            if criterion.same_as_fleet and criterion.among not in WITHIN_HOST:
                for part in part_values(view, criterion):
                    self.add_part(part)

    def add_part(self, part: PartValue, parts: int = 1) -> None:
        """Count the value of a part. `parts`: number of parts, on this and other hosts, that have the same key and value."""
        group = self._groups.get(part.key)
        if group is None:
            group = self._groups[part.key] = ValueGroup(what=part.what)
        group.add(part.value, parts)
        self._kinds.add(part.kind)
        self._common.clear()

    def share_equal_groups(self) -> None:
        """Save memory: make equal groups share one object, because a large fleet has many gangs with the same values.

        Do not call `add` or `add_part` afterwards: they would change all groups that share the object.
        """
        shared: dict[tuple[object, ...], ValueGroup] = {}
        for key, group in self._groups.items():
            content = (key[0], group.what, *group.counts.items(), *(type(value) for _, value in group.counts))
            self._groups[key] = shared.setdefault(content, group)

    def update(self, other: ValueGroups) -> None:
        """Add the values of other hosts. Groups are replaced, not changed: keys may share one group (`share_equal_groups`)."""
        for key, group in other._groups.items():
            known = self._groups.get(key)
            self._groups[key] = known.merged(group) if known else group
        self._kinds |= other._kinds
        self._common.clear()

    def of(self, view: HostView, criterion: Criterion, observation: Observation) -> ValueGroup:
        """Return the group of an observation of this host; an empty group if no value was counted."""
        key, what = group_key(view, criterion, observation)
        return self._groups.get(key) or ValueGroup(what=what)

    def common_parts(self, view: HostView, criterion: Criterion) -> dict[str, ValueGroup]:
        """Return scope -> values of each part that is common among the hosts of this host's group.

        Let n be the number of hosts with the most frequent part. A part is common if more than n / 2 hosts have it.
        """
        if criterion.id not in self._common:
            self._common[criterion.id] = self._common_of_kinds(criterion.id)
        return self._common[criterion.id].get(_kind_key(view, criterion), {})

    def _common_of_kinds(self, criterion: str) -> dict[KindKey, dict[str, ValueGroup]]:
        of_kinds: dict[KindKey, dict[str, ValueGroup]] = defaultdict(dict)
        for key, group in self._groups.items():
            if key[0] == criterion:
                of_kinds[(criterion, key[2], key[3])][key[4]] = group
        for kind, of_kind in of_kinds.items():
            hosts = max(group.total for group in of_kind.values())
            of_kinds[kind] = {scope: group for scope, group in of_kind.items() if 2 * group.total > hosts}
        return of_kinds

    def majority(self, view: HostView, criterion: Criterion, keys: Iterable[GroupKey]) -> Hashable:
        """Return a summary of what this criterion requires of a host: the values of its groups, and the parts that it must have.

        If two hosts have equal summaries and equal readings, the criterion passes on both or on neither.

        Args:
            view: the host.
            criterion: the criterion.
            keys: the `group_keys` of any host with the same readings.
        """
        name = group_name(view, criterion)
        groups = [self._groups.get((*key[:3], name, key[4])) for key in keys]
        required = [
            (min(group.total, 2), type(value := group.reference(criterion)[0]), value) if group else None
            for group in groups
        ]
        parts = frozenset(self.common_parts(view, criterion)) if criterion.complete else None
        return tuple(required), parts, self.has_value(view, criterion)

    def has_value(self, view: HostView, criterion: Criterion) -> bool:
        """Return whether any host of the group reports a value for this criterion."""
        return _kind_key(view, criterion) in self._kinds


def _kind_key(view: HostView, criterion: Criterion) -> KindKey:
    return criterion.id, view.peer_key[0], group_name(view, criterion)


def _compared(view: HostView, criterion: Criterion) -> Iterator[Observation]:
    """Yield the observations that the criterion compares.

    PCI readings of drives are left out: hosts of one purchase order may have different drives. The sizes of NUMA nodes are left
    out if the nodes have only a part of the memory (NODE_MEMORY).
    """
    drives: set[str] = set()
    left_out = NODE_MEMORY if criterion.matches_name(NODE_MEMORY) and _has_partial_nodes(view) else ""
    if criterion.name.startswith(PCI_READINGS):
        drives = {scope for scope, kind in view.observations.last_values(PCI_KIND).items() if kind == DRIVE}
    for observation in with_matching_name(view, criterion):
        if observation.scope not in drives and observation.name != left_out and matches(criterion, observation):
            yield observation


def _has_partial_nodes(view: HostView) -> bool:
    """Return whether the NUMA nodes of the host, whose sizes are all known, together have less memory than the host."""
    readings = view.observations.metrics.get(NODE_MEMORY, ())
    total = view.observations.last_values(MEMORY).get("host")
    if not readings or readings[-1][1].absent:
        return False
    sizes = [size for size in readings[-1][1].values.values() if isinstance(size, int | float)]
    return isinstance(total, int | float) and sum(sizes) < MIN_NODE_SHARE * total


def part_values(view: HostView, criterion: Criterion) -> list[PartValue]:
    """Return the last value of each part of a host that the criterion compares."""
    values = []
    kind = _kind_key(view, criterion)
    for items in _series(view, criterion):
        last = next((item for item in reversed(items) if item.status == MEASURED), None)
        if last:
            key, what = group_key(view, criterion, last)
            values.append(PartValue(key=key, what=what, value=last.value, kind=kind))
    return values


def group_key(view: HostView, criterion: Criterion, item: Observation | Verdict) -> tuple[GroupKey, str]:
    """Return the key of the group of an observation, and the name of one of its parts (`GPU`, `part` or `host`).

    GPUs of a model must be alike in every slot, except for readings that depend on the slot, such as the path between two GPUs.
    Readings in BY_PART_NUMBER are compared between GPUs of one part number (without its last group of digits, the revision).
    Other parts are compared with the part of the same scope on other hosts: two storage adapters of one host may differ. For
    readings in BY_PART, the part must also be of the same model.
    """
    scope = Scope.parse(item.scope)
    models, group = view.peer_key[0], group_name(view, criterion)
    by_slot = scope.kind == "peer" or item.name.startswith(SLOT_READINGS)
    if scope.device_kind == "gpu" and not by_slot:
        model = view.names.get(scope.device, "")
        if item.name in BY_PART_NUMBER:
            model = f"{model} {view.part_numbers.get(scope.device, '').rpartition('-')[0]}"
        key = (criterion.id, item.name, model, group, f"gpu,{scope.below}")
        return key, "part" if scope.below else "GPU"
    part = view.observations.last_values(BY_PART[item.name]).get(item.scope, "") if item.name in BY_PART else ""
    return (criterion.id, f"{item.name} {part}".strip(), models, group, item.scope), "host"


def part_readings(view: HostView, criterion: Criterion) -> tuple[str, ...]:
    """Return the other readings of this host that decide what the criterion compares (BY_PART, MEMORY)."""
    others = [BY_PART[name] for name in criterion.matched(BY_PART)] if criterion.same_as_fleet else []
    if criterion.same_as_fleet and criterion.matches_name(NODE_MEMORY):
        others.append(MEMORY)
    return tuple(name for name in others if name in view.observations.metrics)


def group_keys(view: HostView, criterion: Criterion) -> tuple[GroupKey, ...]:
    """Return the keys of the groups of all observations of a host that the criterion compares."""
    return tuple(dict.fromkeys(group_key(view, criterion, items[0])[0] for items in _series(view, criterion)))


def has_observation(view: HostView, criterion: Criterion) -> bool:
    """Return whether the host observed anything that the criterion applies to."""
    return any(matches(criterion, observation) for observation in with_matching_name(view, criterion))


def uniform(view: HostView, criterion: Criterion, groups: ValueGroups) -> Iterator[Verdict]:
    """Yield the verdicts of one criterion on one host. A part without another part to compare with gets no verdict."""
    if not criterion.same_as_fleet or (criterion.among == DOMAIN and not view.nvlink_domain):
        return
    series, own_groups = _series(view, criterion), _OwnGroups(view, criterion)
    for items in series:
        yield from _judge_series(view, criterion, items, groups, own_groups)
    if criterion.complete and series:
        yield from _missing_parts(view, criterion, {items[-1].scope for items in series}, groups)
    if not series and not criterion.optional and groups.has_value(view, criterion):
        yield view.inconclusive(criterion.name, "host", "not observed, but other hosts report it", criterion=criterion)


def _missing_parts(
    view: HostView, criterion: Criterion, present: Collection[str], groups: ValueGroups
) -> Iterator[Verdict]:
    """Yield a failure for each part that the host does not have, although it is common in its group (`common_parts`)."""
    for scope, group in sorted(groups.common_parts(view, criterion).items()):
        if scope in present:
            continue
        reason = f"not on this host; {group.total} other {'host has' if group.total == 1 else 'hosts have'} it"
        missing = view.inconclusive(criterion.name, scope, reason, criterion=criterion, kind=VerdictKind.PEERS)
        yield replace(
            missing,
            verdict=FAIL,
            unit=criterion.unit,
            action=criterion.action,
            basis=criterion.basis,
            severity=criterion.severity,
        )


def _series(view: HostView, criterion: Criterion) -> list[list[Observation]]:
    """Return the observations that a criterion compares: for each name and scope one list, in the order of time."""
    series: dict[tuple[str, str], list[Observation]] = defaultdict(list)
    for observation in _compared(view, criterion):
        series[(observation.name, observation.scope)].append(observation)
    return list(series.values())


def _judge_series(
    view: HostView, criterion: Criterion, items: Sequence[Observation], groups: ValueGroups, own_groups: _OwnGroups
) -> Iterator[Verdict]:
    """Yield the verdict on the observations of one name and scope.

    Yield nothing if there is no other part to compare with, except for an error in place of a reading that every host must have
    (a criterion that is not optional).
    """
    measured, last = [item for item in items if item.status == MEASURED], items[-1]
    if criterion.among in WITHIN_HOST or (criterion.group_by and groups.of(view, criterion, last).total <= 1):
        group = _own_parts(view, criterion, last, own_groups)
    else:
        group = groups.of(view, criterion, last)
    is_required = not criterion.optional and criterion.among not in WITHIN_HOST
    if group.total <= bool(measured) and not (is_required and last.status == ERROR):
        return  # no other part has a value
    may_be_absent = criterion.optional and last.status == UNSUPPORTED
    # If a benchmark reports its result as unsupported, `expectations.missing_observations` yields the verdict.
    is_lost = last.status == ERROR or (last.status == UNSUPPORTED and not from_benchmark(last.name))
    if measured and (may_be_absent or not is_lost):
        yield _compare(view, criterion, measured, group)
    elif not may_be_absent:
        reason = f"{last.status}: {last.reason}"
        yield with_absence(view.inconclusive(last.name, last.scope, reason, last.stage, criterion=criterion), last)


class _OwnGroups:
    """The values of the parts of one host, in groups of parts of the same kind.

    `_key` returns the kind of a part. The parts that have a reading are counted when this reading is first needed.
    """

    def __init__(self, view: HostView, criterion: Criterion) -> None:
        self._view, self._criterion = view, criterion
        self._groups: dict[str, dict[tuple[Value, ...], ValueGroup]] = {}

    @cached_property
    def _kinds(self) -> list[Mapping[str, Value]]:
        return [self._view.observations.last_values(name) for name in self._criterion.group_by]

    def of(self, name: str, scope: Scope) -> ValueGroup:
        """Return the values of the reading `name` for the parts of the same kind as the part `scope`.

        The group is empty if a reading that decides the kind (`Criterion.group_by`) has no value for this part.
        """
        if name not in self._groups:
            groups = self._groups[name] = {}
            for other, value in self._view.observations.last_values(name).items():
                parsed = Scope.parse(other)
                key = self._key(parsed)
                group = groups.get(key)
                if group is None:
                    group = groups[key] = _empty_group(parsed)
                group.add(value)
        is_known = None not in _kind_of(scope, self._kinds)
        return (self._groups[name].get(self._key(scope)) if is_known else None) or _empty_group(scope)

    def _key(self, scope: Scope) -> tuple[Value, ...]:
        """Return the kind of a part: what the parts that are compared with each other have in common."""
        alike = (scope.device, scope.kind) if self._criterion.among == DEVICE else (scope.device_kind, scope.below)
        return (*alike, *_kind_of(scope, self._kinds))


def _empty_group(scope: Scope) -> ValueGroup:
    return ValueGroup(what="GPU" if scope.is_one_device else scope.kind)


def _own_parts(view: HostView, criterion: Criterion, item: Observation, own_groups: _OwnGroups) -> ValueGroup:
    """Return the values of this host's parts of the same kind as the observed part; an empty group if they cannot be compared.

    Any number of GPUs can be compared with each other. Of other parts, such as ports or links, some may be unused by design, so
    they are compared only if enough of them agree (MIN_ALIKE, MIN_ALIKE_SHARE). If the inventory states how many ports must be up
    (rackproof_infiniband_ports), the rest may be down. So criteria with `group_by` and `prefer` do not compare ports of one host.
    """
    scope = Scope.parse(item.scope)
    group = own_groups.of(item.name, scope)
    if scope.is_one_device:
        return group
    decides = group.total >= MIN_ALIKE and group.reference(criterion)[1] >= MIN_ALIKE_SHARE * group.total
    by_design = criterion.group_by and criterion.prefer is not None and view.host.infiniband_ports
    return group if decides and not by_design else ValueGroup(what=group.what)


def _kind_of(scope: Scope, kinds: Sequence[Mapping[str, Value]]) -> tuple[Value, ...]:
    """Return for each of these readings the value of the part, or else that of its device, or None if neither has a value."""
    return tuple(values.get(scope.text, values.get(scope.device)) for values in kinds)


def _compare(view: HostView, criterion: Criterion, measured: Sequence[Observation], group: ValueGroup) -> Verdict:
    """Return the verdict on the measured values of one part, compared with the reference value of its group."""
    reference, count = group.reference(criterion)
    last = measured[-1]
    if reference is None:
        by_count = group.by_count()
        digits = digits_for([last.value, *(value for value, _ in by_count[:_MAX_LISTED_VALUES])], criterion.unit)
        return _verdict(view, criterion, last, None, _describe_tie(criterion, group, digits), digits, _USE_ONE)
    # A text or a flag must be the same during the whole run. A number, such as a clock, may change: only its last value counts.
    considered = measured[-1:] if is_number(last.value) else measured
    deviating = [item for item in considered if not is_alike(criterion, item.value, reference)]
    if deviating:
        digits = digits_for([deviating[-1].value, reference], criterion.unit)
        most = f"{count} of {group.total} {group.plural} have {quantity(reference, criterion.unit, digits)}"
        remedy = _CHANGED if is_alike(criterion, last.value, reference) else _USE_MAJORITY
        return _verdict(view, criterion, deviating[-1], reference, most, digits, remedy)
    alike = (
        f"as on all {count} {group.plural}"
        if count == group.total
        else f"as on {count} of {group.total} {group.plural}"
    )
    if not _is_near(last.value, reference, criterion.within):
        alike = f"{count} of {group.total} {group.plural} have {quantity(reference, criterion.unit)}"
    return _verdict(view, criterion, last, reference, alike)


def _describe_tie(criterion: Criterion, group: ValueGroup, digits: int) -> str:
    """Return the equally common values, and then the others, in words: `1 of 2 hosts has X, 1 has Y`."""
    by_count, texts = group.by_count(), []
    for index, (value, count) in enumerate(by_count[:_MAX_LISTED_VALUES]):
        many = str(count) if index else f"{count} of {group.total} {group.plural}"
        texts.append(f"{many} {'has' if count == 1 else 'have'} {quantity(value, criterion.unit, digits)}")
    more = [counted(len(by_count) - _MAX_LISTED_VALUES, "more value")] if len(by_count) > _MAX_LISTED_VALUES else []
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
    """Return the verdict on one value. `limit` is the reference value; None if there is none, so that every part fails."""
    passed = limit is not None and is_alike(criterion, observation.value, limit)
    detail += remedy if not passed and criterion.action in ("none", "configure") else ""
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
        operator=criterion.operator if limit is not None else "",
        unit=criterion.unit,
        reason=f"found {quantity(observation.value, criterion.unit, digits)}, {detail}",
        detail=detail,
        action="none" if passed else criterion.action_for(observation, observation.value),
        source=criterion.source,
        basis=criterion.basis,
        severity="" if passed else criterion.severity,
    )
