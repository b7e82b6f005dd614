"""Check that the figures of a host's benchmarks are possible and agree with each other.

Hosts whose benchmarks made the same observations share a layout (fleet/judge/layout.py). What does not depend on values, such as
units and settings, is checked once for each layout; the result is a `FigureStructure`. For each host only values are compared.
"""

from __future__ import annotations

import math
import operator
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from typing import Any

from fleet.judge.baseline import outcome_params
from fleet.judge.bounded_cache import BoundedCache
from fleet.judge.credibility import most_of_figure, problem_of_figure, unit_problem
from fleet.judge.criteria import Criterion
from fleet.judge.direction import RATE_UNITS
from fleet.judge.evidence import Planned
from fleet.judge.host_view import HostView
from fleet.judge.layout import values_at
from fleet.judge.matching import matches
from fleet.quantities import counted
from schemas.benchmarks.communication import bus_factor
from schemas.catalogue import BENCHMARKS, DURATION, output_of
from schemas.catalogue import settings as settings_of
from schemas.records import MEASURED, Observation, Samples, Value
from schemas.scopes import HOST, Scope
from schemas.stages import GANG

Problem = tuple[str, str, str, str]
"""Name, scope, reason, stage."""

EQUAL_PARAMS = ("size", "size_bytes", "batch_size", "dtype", "data", "backend", "world_size", "workload", "network")
"""Parameters that must be equal for the same figure on all devices of a host, because they state what was measured."""
OPTIONAL_PARAMS = frozenset(
    {
        "algorithm",
        "protocol",
        "places",
        "moved_bytes",
        "transport",
        "directories",
        "first_wrong",
        "readers",
        "pcie_rate",
    }
)
"""Parameters that some observations of a figure may lack."""
CREDIBLE_RATIO = 20.0
"""A rate is at most this many times the rate of comparable devices of the host; a higher rate means a wrong unit or counter. Most
durations are not compared, because they include waiting: the faster of two healthy GPUs waits long, the slower one
hardly at all. Bandwidths and latency of one collective come from one measurement, and must agree within this factor too."""
COMPARED_TIMES = ("straggler.compute",)
"""Times that are compared between devices, because they do not include waiting. A time far below that of the other devices is
not credible."""
LEAST: Mapping[str, tuple[float, str]] = {
    "overlap.slowdown": (0.5, "both operations together took less than half the time of the longer one"),
    "pairs.latency": (1e-7, "no message takes so little time"),
    "peer_copy.latency": (1e-7, "no message takes so little time"),
    "verbs.latency": (1e-7, "no message takes so little time"),
    "straggler.compute": (1e-6, "no step of a training takes so little time"),
}
"""Figure -> its lowest credible value, and the reason. For latencies: in 0.1 us, light passes 20 m of cable, and a GPU needs
longer than that to read even its own memory."""
ELEMENT_BYTES = 4
"""Bytes of an element. A collective moves the same whole number of elements for each rank, so `moved_bytes`, the size that it
moves, may differ from `size_bytes`, the size in the settings."""
DURATION_TOLERANCE_S = 1.0
"""Seconds by which the sum of the durations of the benchmarks of a launch may exceed the duration of the launch, because times
are rounded. The benchmarks run one after the other."""
RELATIVE = 1e-3
"""Relative difference between a value and its samples that rounding may cause."""
STEP_TIMES = ("training.step_time", "transformer.step_time", "mixture_of_experts.step_time")
"""Step times of the trainings whose throughput is in images or tokens per second."""
FACTORS = {
    ("stress.flop_per_cycle", "stress.clock"): "stress.throughput",
    ("stress.efficiency", "stress.power"): "stress.throughput",
}
"""Two figures of a device -> the figure that is their product."""
STATED = {"collective.transport": "transport", "collective.nvls": "nvls", "peer_copy.access": "access"}
"""Figure -> parameter with which other figures of the same benchmark repeat its value. Of a text, they may repeat only a part."""
LEAST_FOR_PRECISION = 6
"""Smallest number of samples that gives a 95 % confidence interval of the median."""
SUFFICIENCY, LOADING_RATE, TRAINING_RATE = "dataloader.sufficiency", "dataloader.throughput", "training.throughput"
"""The sufficiency of a data loader is the images per second that it prepares for a rank, divided by the images per second with
which the device of the rank trains. The training rate is that of all ranks together."""
GROUP_COPY = "group_copy"
"""Benchmark of copies between a GPU and other GPUs of the host. If NVLink joins only some pairs of them, the copies of some GPUs
take slower paths."""
MAX_STRUCTURES = 100
_NUMBERS, _TEXTS = frozenset({bool, float, int}), frozenset({str})


@dataclass(frozen=True, kw_only=True)
class FigureStructure:
    """What is the same for the figures of every host of a layout. A position is an index in the list of figures of a host."""

    problems: tuple[tuple[int, str], ...]
    """Position of a figure -> a reason why it cannot be right, whatever its value."""
    most: tuple[float | None, ...]
    """For each figure: the highest value that is certainly possible; None if the value of the figure is not checked."""
    texts: tuple[int, ...]
    """Positions of the figures that have an entry in `most` and whose value is a text."""
    siblings: tuple[tuple[int, ...], ...]
    """For each rate, and each time of COMPARED_TIMES, that several devices have: the positions of their figures."""
    sampled: tuple[int, ...]
    """Positions of the measured figures with samples."""
    stated: tuple[tuple[int, Value], ...]
    """Position of a figure -> the value that the parameters of other figures state for it."""
    products: tuple[tuple[int, int, float], ...]
    """Positions of a rate and of a time -> the amount that is their product."""
    factors: tuple[tuple[int, int, int], ...]
    """Positions of two figures, and of the figure that is their product (`FACTORS`)."""
    ratios: tuple[tuple[int, int, float], ...]
    """Positions of two figures -> the first figure divided by the second."""
    bounded: tuple[int, ...] = ()
    """Positions of the figures of `LEAST`."""
    loaders: tuple[tuple[int, int, int, float], ...] = ()
    """Positions of a `dataloader.sufficiency`, of a loading rate of the same device, and of the training rate of all ranks; then
    the factor by which loading rate / training rate is multiplied to estimate the sufficiency. The factor is the number of ranks.
    The training rate depends on the batch size. So if loader and training have different batch sizes, the factor includes the
    larger size divided by the smaller one, whichever of the two is larger. The estimate is then too high rather than too low."""
    durations: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """Stage -> positions of the durations of its benchmarks."""
    is_soak: bool = False
    """Whether the figures are aggregates of the rounds of a soak."""

    def are_possible(self, values: Sequence[Value]) -> bool:
        """Return whether the values of the figures of a host are certainly possible.

        On most hosts they are, so this fast check (by `map` and `issuperset`) comes before the slower check of each figure.
        """
        numbers, texts = self._numbers_of(values), self._texts_of(values)
        return (
            _NUMBERS.issuperset(map(type, numbers))
            and _TEXTS.issuperset(map(type, texts))
            and all(map(operator.le, numbers, self._limits))  # type: ignore[arg-type]
            and min(numbers, default=0) >= 0  # type: ignore[operator, type-var]
        )

    @cached_property
    def _positions(self) -> list[int]:
        texts = {*self.texts}
        return [position for position, most in enumerate(self.most) if most is not None and position not in texts]

    @cached_property
    def _limits(self) -> list[float | None]:
        return [self.most[position] for position in self._positions]

    @cached_property
    def _numbers_of(self) -> Callable[[Sequence[Value]], tuple[Value, ...]]:
        return values_at(self._positions)

    @cached_property
    def _texts_of(self) -> Callable[[Sequence[Value]], tuple[Value, ...]]:
        return values_at(self.texts)


Figures = tuple[Sequence[Observation], FigureStructure | None]
"""Figures, and their structure; None if the structure is not determined yet."""


class PartnerStructures:
    """The structures of the figures of pairs of hosts. Hosts share a structure even if their figures have different partners."""

    def __init__(self) -> None:
        self._structures: BoundedCache[Hashable, FigureStructure] = BoundedCache(MAX_STRUCTURES)

    def of_host(self, view: HostView, items: Sequence[Observation]) -> FigureStructure:
        """Return the structure of `items`, the figures of a host that are measured with partners.

        Observations with equal tokens have equal name, stage, unit, status and parameters (`Observation.token`).
        """
        if not all(item.token for item in items):
            return figure_structure(view, items)
        numbers: dict[str, int] = {}
        key = tuple(
            (
                item.token,
                Scope.parse(item.scope).device,
                item.samples is None,
                numbers.setdefault(item.scope, len(numbers)),
            )
            for item in items
        )
        structure = self._structures.get(key)
        if structure is None:
            structure = figure_structure(view, items)
            if not structure.problems:  # a problem has a scope in its text, and scopes differ from host to host
                self._structures[key] = structure
        return structure


def figure_structure(view: HostView, items: Sequence[Observation], *, is_soak: bool = False) -> FigureStructure:
    """Return the structure of figures of a host. `is_soak`: the figures are aggregates of the rounds of a soak."""
    # How often a figure may be in `items`. A launch that was repeated later keeps its figures in `Launch.observations`, so they
    # are not in `items`. A soak has each figure once, for all rounds together.
    launches = Counter(launch.stage for launch in view.evidence.launches() if not launch.observations and not is_soak)
    planned = Planned(view.plan)
    settings_of_plan: dict[tuple[str, str], Mapping[str, Any]] = {}
    settings: dict[tuple[str, ...], tuple[str, ...]] = {}
    required: dict[tuple[str, str], frozenset[str]] = {}
    groups: dict[tuple[object, ...], list[int]] = defaultdict(list)
    seen: Counter[tuple[object, ...]] = Counter()
    sampled: dict[tuple[str, str], bool] = {}
    problems: list[tuple[int, str]] = []
    most: list[float | None] = []
    for position, item in enumerate(items):
        most.append(None)
        if item.status != MEASURED:
            continue
        kind, params = (item.stage, item.name), item.params
        reason = unit_problem(item.name, item.unit)
        if reason:
            problems.append((position, reason))
        else:
            most[-1] = most_of_figure(view.credible_criteria, item)
        benchmark = _benchmark(item)
        fixed = settings_of_plan.get((item.stage, benchmark))
        if fixed is None:
            fixed = settings_of_plan[(item.stage, benchmark)] = _fixed_settings(view, item.stage, benchmark)
        if reason := _wrong_param(view, item, fixed):
            problems.append((position, reason))
        figure = (*kind, item.scope, *params.values())
        seen[figure] += 1
        if seen[figure] > max(1, launches[item.stage]):
            problems.append((position, f"the record has this figure {seen[figure]} times"))
        if item.name == DURATION.name:
            continue
        shared = settings.get((*kind, *params))
        if shared is None:  # the first figure with these parameters
            names = frozenset(params.keys() - OPTIONAL_PARAMS)
            shared = settings[(*kind, *params)] = tuple(planned.params(item))
            if required.setdefault(kind, names) != names:
                difference = ", ".join(sorted(required[kind] ^ names))
                problems.append((position, f"only some figures of this name have the parameter {difference}"))
        if not is_soak and sampled.setdefault(kind, item.samples is not None) != (item.samples is not None):
            problems.append((position, "only some figures of this name have samples"))
        if item.scope != "host":
            groups[(*kind, Scope.parse(item.scope).device_kind, *[params[name] for name in shared])].append(position)
    siblings = [tuple(group) for group in groups.values() if len(group) > 1]
    for group in siblings:
        problems += _different_settings(items, group)
    problems += _wrong_participants(view, items)
    products, ratios = _relations(items)
    problems += _without_ranks(items)
    problems += _without_judged_params(view, items)
    return FigureStructure(
        problems=tuple(problems),
        most=tuple(most),
        texts=tuple(
            position
            for position, item in enumerate(items)
            if most[position] is not None and isinstance(item.value, str)
        ),
        siblings=tuple(
            compared
            for group in siblings
            if items[group[0]].unit in RATE_UNITS or items[group[0]].name in COMPARED_TIMES
            for compared in _compared_devices(view, items, group)
        ),
        sampled=tuple(position for position, item in enumerate(items) if item.samples and item.status == MEASURED),
        stated=tuple(_stated_values(items)),
        products=tuple(products),
        factors=tuple(_factors(items)),
        ratios=tuple(ratios),
        bounded=tuple(
            position
            for position, item in enumerate(items)
            # The processes of a rehearsal wait for shared processors, so a ratio of their times proves nothing.
            if item.name in LEAST and (item.unit == "s" or not view.plan.rehearsal)
        ),
        loaders=tuple(_loaders(items)),
        durations={} if is_soak else _durations(items),
        is_soak=is_soak,
    )


def figure_problems(
    view: HostView, items: Sequence[Observation], structure: FigureStructure | None = None
) -> Iterator[Problem]:
    """Yield what cannot be right about figures of a host. `structure` is the result of `figure_structure`; None: call it here."""
    structure = structure or figure_structure(view, items)
    for position, reason in structure.problems:
        yield _problem(items[position], reason)
    for item in _doubtful(items, structure):
        if reason := problem_of_figure(view.credible_criteria, item):
            yield _problem(item, reason)
    for position in structure.sampled:
        item = items[position]
        if item.samples is not None and type(item.value) in (int, float):
            reason = _sample_problem(item.samples, float(item.value), has_rounds=structure.is_soak)  # type: ignore[arg-type]
            if reason:
                yield _problem(item, reason)
    for position, value in structure.stated:
        item = items[position]
        if item.value != value and not (isinstance(item.value, str) and str(value) in item.value):
            yield _problem(item, f"it is {item.value}, but other figures of the benchmark state {value}")
    yield from _wrong_relations(items, structure)
    for position in structure.bounded:
        item = items[position]
        least, why = LEAST[item.name]
        if isinstance(item.value, int | float) and item.value < least:
            yield _problem(item, f"{item.value:g} {item.unit} is not credible: {why}")
    # The processes of a rehearsal share processors. A process that waits has a low rate, so these rates are not compared.
    if not view.plan.rehearsal:
        yield from _incredible_sufficiency(items, structure)
        for group in structure.siblings:
            yield from _different_magnitude([items[position] for position in group])
    for stage, positions in structure.durations.items():
        launches = [launch.duration_s for launch in view.evidence.launches() if launch.stage == stage]
        times = [value for position in positions if isinstance(value := items[position].value, int | float)]
        if launches and sum(times) > sum(launches) + DURATION_TOLERANCE_S:
            reason = f"the benchmarks took {sum(times):.0f} s, but their launches took only {sum(launches):.0f} s"
            yield DURATION.name, "host", reason, stage


def _doubtful(items: Sequence[Observation], structure: FigureStructure) -> list[Observation]:
    """Return the figures whose value is negative or above `FigureStructure.most`."""
    if structure.are_possible([item.value for item in items]):
        return []
    return [
        item
        for item, most in zip(items, structure.most, strict=True)
        if most is not None and type(item.value) in (int, float) and not 0.0 <= item.value <= most  # type: ignore[operator]
    ]


def _problem(item: Observation, reason: str) -> Problem:
    return item.name, item.scope, reason, item.stage


def _wrong_param(view: HostView, item: Observation, planned: Mapping[str, Any]) -> str:
    """Return why a parameter of a figure cannot be right; empty if all can be. `planned` is the result of `_fixed_settings`."""
    output = output_of(item.name)
    constants = output.constants if output else {}
    for key, value in item.params.items():
        if type(value) in (int, float) and value < 0:  # type: ignore[operator]
            return f"its parameter {key} is {value}, but must not be negative"
        if value != constants.get(key, value):
            return f"{key} is {value}, but it is always {constants[key]}"
        wanted: Any = value if key in constants else planned.get(key, value)
        is_shortened = key == "epochs" and planned.get("max_steps") and _is_positive(value) and value < wanted
        if value != wanted and not (isinstance(wanted, list | tuple) and value in wanted) and not is_shortened:
            return f"{key} is {value}, but the plan has {wanted}"
    return _wrong_moved_bytes(item) or _wrong_replicas(view, item)


def _wrong_moved_bytes(item: Observation) -> str:
    """Return why `moved_bytes` of a collective does not match its `size_bytes`; empty if it does.

    Each rank moves the same number of whole elements, so the two may differ by less than one element for each rank.
    """
    size, moved, ranks = (item.params.get(key) for key in ("size_bytes", "moved_bytes", "world_size"))
    if moved is None or not isinstance(size, int) or not isinstance(ranks, int):
        return ""
    if type(moved) is int and abs(moved - size) < ELEMENT_BYTES * ranks:
        return ""
    if type(moved) is not int:
        return f"moved_bytes is {moved}, which is not an integer"
    most = ELEMENT_BYTES * ranks
    rule = f"it must differ from size_bytes, {size}, by less than {most} ({ELEMENT_BYTES} for each rank)"
    return f"moved_bytes is {moved}, but {rule}"


def _wrong_replicas(view: HostView, item: Observation) -> str:
    """Return why `replicas` and `left_out`, the number of ranks without a replica, cannot be right; empty if they can.

    Two neighbouring ranks of a host form a replica, so at most one rank of each host is left out.
    """
    ranks, replicas, left_out = (item.params.get(key) for key in ("world_size", "replicas", "left_out"))
    if replicas is None and left_out is None:
        return ""
    if not type(ranks) is type(replicas) is type(left_out) is int:
        return f"world_size {ranks}, replicas {replicas} and left_out {left_out} must all be integers"
    hosts = len(view.plan.gangs().get(view.host.gang, ())) if item.stage == GANG else 1
    if ranks != 2 * replicas + left_out or left_out > hosts:
        return (
            f"world_size is {ranks}, replicas is {replicas}, left_out is {left_out}: world_size must be 2 * replicas + left_out, "
            "and left_out at most the number of hosts"
        )
    return ""


def _fixed_settings(view: HostView, stage: str, benchmark: str) -> Mapping[str, Any]:
    """Return the settings of a benchmark in a stage of the plan, without those that the benchmark adapts to the host."""
    planned = next((item.benchmarks for item in view.plan.stages if item.name == stage), {})
    if benchmark not in planned:
        return {}
    adapted = BENCHMARKS[benchmark].adapted
    return {key: value for key, value in settings_of(benchmark, planned[benchmark]).items() if key not in adapted}


def _different_settings(items: Sequence[Observation], group: Sequence[int]) -> Iterator[tuple[int, str]]:
    """Yield each figure of `group` whose EQUAL_PARAMS differ from those of the first figure of the group."""
    first = items[group[0]]
    benchmark = BENCHMARKS.get(_benchmark(first))
    outcomes = {*outcome_params(first.name), *(benchmark.adapted if benchmark else ())}
    for position in group[1:]:
        params = items[position].params
        for key in EQUAL_PARAMS:
            if key not in outcomes and key in first.params and key in params and params[key] != first.params[key]:
                yield position, f"{key} is {params[key]}, but it is {first.params[key]} on {first.scope}"
                break


def _compared_devices(view: HostView, items: Sequence[Observation], group: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """Yield groups of positions in `group`. The values of each yielded group must have the same magnitude.

    `group` has the positions of one rate, or one time, of several devices of the host. The following are not compared:
    - figures of a gang: a bandwidth may be measured both with and without NVLink between the hosts (`mnnvl`);
    - directories: a disk has a thousandth of the operations per second of an NVMe drive;
    - NUMA nodes: a container may use one processor of a node and all processors of another;
    - GROUP_COPY, if NVLink joins only some pairs of the host's GPUs.
    Pairs that NVLink joins are compared only with each other: NVLink may be forty times as fast as another path.
    """
    first = Scope.parse(items[group[0]].scope)
    if first.is_gang or first.device_kind in ("directory", "numa"):
        return
    if first.kind == "peer" or "partner" in first.labels:
        by_path: dict[bool | None, list[int]] = defaultdict(list)
        for position in group:
            scope = Scope.parse(items[position].scope)
            joined = (
                view.nvlinks.get(scope.text) if first.kind == "peer" else _shares_domain(view, scope.get("partner"))
            )
            by_path[None if joined is None else bool(joined)].append(position)
        by_path.pop(None, None)  # the path of these pairs was not read
        yield from map(tuple, by_path.values())
    elif _benchmark(items[group[0]]) != GROUP_COPY or len({*map(bool, view.nvlinks.values())}) < 2:
        yield tuple(group)


def _shares_domain(view: HostView, partner: str) -> bool:
    """Return whether NVLink may join the host and its partner.

    It may if both are in the same NVLink domain. A host without a domain counts as in the domain of its rack.
    """
    other = next((host for host in view.plan.hosts if host.name == partner), view.host)
    return (other.nvlink_domain or other.rack) == (view.host.nvlink_domain or view.host.rack)


def _different_magnitude(items: Sequence[Observation]) -> Iterator[Problem]:
    """Yield each rate that is far above the lower median of the host's devices, and each time that is far below it.

    With two devices, yield one problem of the host instead. A rate far below the median, or a time far above it, is credible: it
    is a fault, which the criteria find.
    """
    is_time = items[0].name in COMPARED_TIMES
    values = sorted(
        float(item.value) for item in items if isinstance(item.value, int | float) and (item.value or is_time)
    )
    if len(values) < 2 or values[-1] <= CREDIBLE_RATIO * values[0] or values[0] < 0:
        return
    if len(values) == 2:  # there is no majority: either may be the wrong one
        first = items[0]
        reason = (
            f"{values[0]:g} and {values[1]:g} {first.unit} of two devices cannot both be right: "
            f"one is more than {CREDIBLE_RATIO:g} times the other"
        )
        yield first.name, HOST, reason, first.stage
        return
    median = values[(len(values) - 1) // 2]
    for item in items:
        if not isinstance(item.value, int | float):
            continue
        if item.value * CREDIBLE_RATIO < median if is_time else item.value > CREDIBLE_RATIO * median:
            relation = f"less than 1/{CREDIBLE_RATIO:g} of" if is_time else f"more than {CREDIBLE_RATIO:g} times"
            reason = f"it is {relation} the lower median of the host's devices, {median:g} {item.unit}"
            yield _problem(item, f"{item.value:g} {item.unit} is not credible: {reason}")


def _wrong_participants(view: HostView, items: Sequence[Observation]) -> Iterator[tuple[int, str]]:
    """Yield figures that state a number of ranks that no launch of their stage had.

    For each such number, only the first figure of the stage is yielded.
    """
    sizes: dict[str, set[int]] = defaultdict(set)
    for launch in view.evidence.launches():
        members = launch.members if launch.stage == GANG else (view.host.name,)
        sizes[launch.stage].add(view.plan.ranks(members))
    reported: set[tuple[str, Value]] = set()
    for position, item in enumerate(items):
        size = item.params.get("world_size")
        # Another check reports figures of a stage without a launch.
        if size is None or item.stage not in sizes or size in sizes[item.stage] or (item.stage, size) in reported:
            continue
        reported.add((item.stage, size))
        expected = " or ".join(map(str, sorted(sizes[item.stage]))) or "no"
        yield position, f"measured by {size} rank{'' if size == 1 else 's'}, but the launch had {expected}"


def _stated_values(items: Sequence[Observation]) -> Iterator[tuple[int, Value]]:
    """Yield each figure of STATED with each value that its parameter has in other figures of the same measurement.

    The figures of STATED are choices of NCCL (`collective.transport`, `collective.nvls`) and the peer access of two GPUs.
    """
    stated: dict[tuple[str, ...], dict[Value, None]] = defaultdict(dict)
    for item in items:
        if item.status == MEASURED and item.name not in STATED:
            for name in STATED.values():
                if name in item.params:
                    stated[(*_measurement(item), name)][item.params[name]] = None
    for position, item in enumerate(items):
        if item.status == MEASURED and item.name in STATED:
            for value in stated[(*_measurement(item), STATED[item.name])]:
                yield position, value


def _without_judged_params(view: HostView, items: Sequence[Observation]) -> Iterator[tuple[int, str]]:
    """Yield each figure that lacks a parameter of `Criterion.where`, if a shipped criterion would otherwise select the figure.

    A parameter of STATED may be missing if the figure that has its value was not measured: then the value is unknown.
    """
    names = {item.name for item in items}
    selecting: dict[str, list[Criterion]] = defaultdict(list)
    for criterion in view.shipped_criteria.values():
        for name in criterion.matched(names) if criterion.where else ():
            selecting[name].append(criterion)
    measured = {(*_measurement(item), item.name) for item in items if item.status == MEASURED and item.name in STATED}
    for position, item in enumerate(items):
        for criterion in selecting[item.name] if item.status == MEASURED else ():
            missing = criterion.where.keys() - item.params.keys()
            if not missing:
                continue
            missing -= Scope.parse(item.scope).labels.keys()
            for name, key in STATED.items():
                if name.startswith(f"{_benchmark(item)}.") and (*_measurement(item), name) not in measured:
                    missing -= {key}
            others = {key: value for key, value in criterion.where.items() if key not in missing}
            if missing and matches(replace(criterion, where=others), item):
                keys = ", ".join(f"`{key}`" for key in sorted(missing))
                yield position, f"it does not state {keys}, by which the criterion `{criterion.id}` selects figures"
                break


def _relations(items: Sequence[Observation]) -> tuple[list[tuple[int, int, float]], list[tuple[int, int, float]]]:
    """Return `products` (of collectives and trainings) and `ratios` (of collectives) of `FigureStructure`."""
    parts: dict[tuple[str, str, str, Value, Value, Value], dict[str, int]] = defaultdict(dict)
    for position, item in enumerate(items):
        benchmark, _, rest = item.name.partition(".")
        op, _, kind = rest.partition(".")
        if benchmark == "collective" and kind in ("algbw", "busbw", "latency") and item.status == MEASURED:
            params = item.params
            key = (
                op,
                item.stage,
                item.scope,
                params.get("size_bytes"),
                params.get("placement"),
                params.get("world_size"),
            )
            parts[key][kind] = position
    products, ratios = [], []
    for (op, _, _, size, _, ranks), positions in parts.items():
        if not isinstance(size, int) or "algbw" not in positions:
            continue
        algbw = positions["algbw"]
        moved = items[algbw].params.get("moved_bytes", size)
        if "latency" in positions and isinstance(moved, int):
            products.append((algbw, positions["latency"], float(moved)))
        if "busbw" in positions and isinstance(ranks, int) and ranks > 1:
            ratios.append((positions["busbw"], algbw, bus_factor(op, ranks)))
    return [*products, *_training_steps(items)], ratios


def _training_steps(items: Sequence[Observation]) -> Iterator[tuple[int, int, float]]:
    """Yield, for each training, the positions of its rate and its step time, and the images or tokens of a step of all ranks."""
    rates = {_training(item): position for position, item in enumerate(items) if item.name.endswith(".throughput")}
    for position, item in enumerate(items):
        params = item.params
        size, ranks, length = params.get("batch_size"), params.get("world_size"), params.get("sequence", 1)
        is_step = item.name in STEP_TIMES and item.status == MEASURED and _training(item) in rates
        if is_step and isinstance(size, int) and isinstance(ranks, int) and isinstance(length, int):
            yield rates[_training(item)], position, float(size * length * ranks)


def _training(item: Observation) -> tuple[str, str, str, Value, Value]:
    return (*_measurement(item), item.params.get("network"), item.params.get("data"))


def _factors(items: Sequence[Observation]) -> Iterator[tuple[int, int, int]]:
    """Yield, for each device and dtype, the positions of two figures and of their product (FACTORS)."""
    names = {name for pair, product in FACTORS.items() for name in (*pair, product)}
    positions: dict[tuple[str, str, Value], dict[str, int]] = defaultdict(dict)
    for position, item in enumerate(items):
        if item.name in names and item.status == MEASURED:
            positions[(item.stage, item.scope, item.params.get("dtype"))][item.name] = position
    for of_device in positions.values():
        for (first, second), product in FACTORS.items():
            if first in of_device and second in of_device and product in of_device:
                yield of_device[first], of_device[second], of_device[product]


def _loaders(items: Sequence[Observation]) -> Iterator[tuple[int, int, int, float]]:
    """Yield the positions for `FigureStructure.loaders`."""
    rates: dict[tuple[str, str, Value], list[int]] = defaultdict(list)
    trainings: dict[tuple[str, Value], tuple[int, int, Value]] = {}
    for position, item in enumerate(items):
        ranks = item.params.get("world_size")
        if item.name == LOADING_RATE and item.status == MEASURED:
            rates[item.stage, item.scope, item.params.get("network")].append(position)
        elif item.name == TRAINING_RATE and item.status == MEASURED and isinstance(ranks, int):
            trainings[item.stage, item.params.get("network")] = position, ranks, item.params.get("batch_size")
    for position, item in enumerate(items):
        network = item.params.get("network")
        if item.name == SUFFICIENCY and (item.stage, network) in trainings:
            training, ranks, batch = trainings[item.stage, network]
            own = item.params.get("batch_size")
            ratio = max(own / batch, batch / own) if _is_positive(own) and _is_positive(batch) else 1.0  # type: ignore[operator]
            for rate in rates[item.stage, item.scope, network]:
                yield position, rate, training, ranks * ratio


def _is_positive(value: Value) -> bool:
    return type(value) in (int, float) and value > 0  # type: ignore[operator]


def _incredible_sufficiency(items: Sequence[Observation], structure: FigureStructure) -> Iterator[Problem]:
    """Yield each sufficiency that is far above the one that follows from the measured loading and training rates."""
    possible: dict[int, float] = {}
    for position, loader, training, factor in structure.loaders:
        loaded, trained = items[loader].value, items[training].value
        if isinstance(loaded, int | float) and isinstance(trained, int | float) and trained > 0:
            possible[position] = max(loaded * factor / trained, possible.get(position, 0.0))
    for position, share in possible.items():
        stated = items[position].value
        if isinstance(stated, int | float) and stated > CREDIBLE_RATIO * share:
            yield _problem(items[position], f"{stated:g} is not credible: the measured rates give about {share:.2g}")


def _durations(items: Sequence[Observation]) -> dict[str, tuple[int, ...]]:
    positions: dict[str, list[int]] = defaultdict(list)
    for position, item in enumerate(items):
        if item.name == DURATION.name and item.status == MEASURED:
            positions[item.stage].append(position)
    return {stage: tuple(each) for stage, each in positions.items()}


def _without_ranks(items: Sequence[Observation]) -> Iterator[tuple[int, str]]:
    """Yield the figures that do not state the number of ranks, although they should and other figures of their benchmark do."""
    with_ranks = {(item.stage, _benchmark(item)) for item in items if "world_size" in item.params}
    for position, item in enumerate(items):
        lacks = item.status == MEASURED and "world_size" not in item.params
        if lacks and (item.stage, _benchmark(item)) in with_ranks and _states_ranks(item.name):
            yield position, "it does not state how many ranks measured it"


@cache
def _states_ranks(name: str) -> bool:
    output, benchmark = output_of(name), BENCHMARKS.get(name.partition(".")[0])
    return benchmark is not None and (
        "world_size" in benchmark.params or (output is not None and output.scope == "world")
    )


def _benchmark(item: Observation) -> str:
    return item.name.partition(".")[0]


def _measurement(item: Observation) -> tuple[str, str, str]:
    """Return stage and scope of a figure, and its benchmark."""
    return item.stage, item.scope, _benchmark(item)


def _wrong_relations(items: Sequence[Observation], structure: FigureStructure) -> Iterator[Problem]:
    for first, second, amount in structure.products:
        rate, time = items[first], items[second]
        if isinstance(rate.value, str) or isinstance(time.value, str) or rate.value is None or time.value is None:
            continue
        product = rate.value * time.value
        if not amount / CREDIBLE_RATIO <= product <= amount * CREDIBLE_RATIO:
            unit = rate.unit.removesuffix("/s")
            measured = f"{rate.value:g} {rate.unit} times {time.value:g} {time.unit} is {product:g} {unit}"
            yield _problem(rate, f"{measured}, but the settings give {amount:g} {unit}")
    for first, second, third in structure.factors:
        one, other, whole = items[first], items[second], items[third]
        values = (one.value, other.value, whole.value)
        if any(isinstance(value, str) or not value for value in values):
            continue
        share = one.value * other.value / whole.value  # type: ignore[operator]
        if not 1 / CREDIBLE_RATIO <= share <= CREDIBLE_RATIO:
            factors = f"{one.value:g} {one.unit} times {other.value:g} {other.unit}"
            yield _problem(one, f"{factors} is not the {whole.value:g} {whole.unit} of {whole.name}")
    for first, second, ratio in structure.ratios:
        bus, rate = items[first], items[second]
        if isinstance(bus.value, str) or isinstance(rate.value, str) or bus.value is None or not rate.value:
            continue
        if not ratio / CREDIBLE_RATIO <= bus.value / rate.value <= ratio * CREDIBLE_RATIO:
            reason = f"{bus.value:g} {bus.unit} is not {ratio:g} times the {rate.value:g} {rate.unit} of {rate.name}"
            yield _problem(bus, reason)


def _sample_problem(samples: Samples, value: float, *, has_rounds: bool) -> str:
    """Return why the samples and the value cannot belong together; empty if they can.

    `has_rounds`: the samples are the rounds of a soak. Their coefficient of variation is only an estimate.
    """
    least, greatest = samples.min, samples.max
    margin = RELATIVE * max(abs(least), abs(greatest))
    if not least - margin <= samples.p50 <= greatest + margin:
        return f"the median {samples.p50:g} of the samples is not between the lowest, {least:g}, and the highest, {greatest:g}"
    if not least - margin <= value <= greatest + margin:
        return f"the value {value:g} is not between the lowest sample, {least:g}, and the highest, {greatest:g}"
    needed = 1 if samples.precision is None else LEAST_FOR_PRECISION
    if samples.n < needed:
        purpose = "" if samples.precision is None else " for its `precision`"
        return f"it has {counted(samples.n, 'sample')}, but needs at least {needed}{purpose}"
    if (negative := min(least, samples.p50)) < 0:
        return f"a sample is negative: {negative:g}"
    if least > 0:
        lowest, highest = _possible_variation(samples, has_rounds=has_rounds)
        wrong = f"the coefficient of variation {samples.cv:g} is too"
        possible = f"{samples.n} samples between {least:g} and {greatest:g} have"
        if not samples.cv <= highest:
            return f"{wrong} high: {possible} at most {highest:g}"
        if not lowest <= samples.cv:
            return f"{wrong} low: {possible} at least {lowest:g}"
    return ""


def _possible_variation(samples: Samples, *, has_rounds: bool) -> tuple[float, float]:
    """Return the lowest and the highest possible coefficient of variation of samples with these extremes, with tolerance.

    The range is the highest sample minus the lowest. The standard deviation of n samples is at least range / sqrt(2 n), and never
    more than the range. The mean lies between the extremes. The record estimates the deviation of a soak's rounds, so even
    range / (2 n) is accepted for them.
    """
    spread = samples.max - samples.min
    least = spread / (2 * samples.n if has_rounds else math.sqrt(2 * samples.n)) / samples.max
    return least * (1 - RELATIVE) - RELATIVE, spread / samples.min + RELATIVE
