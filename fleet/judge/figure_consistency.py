"""Check that the figures of a host's benchmarks are possible and agree with each other.

Units, settings and the number of figures are the same for all hosts of one layout (fleet/judge/layout.py). They are checked once
for each layout, and the result is a `FigureStructure`. After that only numbers are compared.
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
"""Parameters that are the same for a figure on all devices of a host: what was measured, not how it went."""
OPTIONAL_PARAMS = frozenset({"algorithm", "protocol", "places", "moved_bytes", "transport"})
"""Parameters that only some measurements of a figure have."""
CREDIBLE_RATIO = 20.0
"""A rate is at most this many times the rate of the other devices of the host; more is a wrong unit or a wrong counter. Most
durations are not compared, because they include waiting: of two healthy GPUs, the faster one waits for the other, which hardly
waits at all. Bandwidths and latency of one collective come from one measurement, and must agree within this factor too."""
COMPARED_TIMES = ("straggler.compute",)
"""Times that are compared too, because they do not include waiting for other devices. A time far below the others' is not
credible."""
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
"""Bytes of an element. A collective moves the same whole number of elements for each rank, so the requested size is rounded."""
DURATION_TOLERANCE_S = 1.0
"""Seconds by which the benchmarks of a launch, which run one after the other, may seem to take longer than the launch, because
times are rounded."""
RELATIVE = 1e-3
"""Relative difference that rounding may cause between a value and its samples."""
STEP_TIMES = ("training.step_time", "transformer.step_time", "mixture_of_experts.step_time")
"""Times of trainings whose throughput counts the images or tokens of a batch."""
FACTORS = {
    ("stress.flop_per_cycle", "stress.clock"): "stress.throughput",
    ("stress.efficiency", "stress.power"): "stress.throughput",
}
"""Two figures of a device -> the figure that is their product."""
STATED = {"collective.transport": "transport", "collective.nvls": "nvls", "peer_copy.access": "access"}
"""Figure -> the parameter of other figures of the same benchmark that states the same value, or a part of the value."""
LEAST_FOR_PRECISION = 6
"""Smallest number of samples that gives a 95 % confidence interval of the median."""
SUFFICIENCY, LOADING_RATE, TRAINING_RATE = "dataloader.sufficiency", "dataloader.throughput", "training.throughput"
MAX_STRUCTURES = 100
_NUMBERS, _TEXTS = frozenset({bool, float, int}), frozenset({str})


@dataclass(frozen=True, kw_only=True)
class FigureStructure:
    """The facts about figures that are the same on every host of a layout. A position is an index in the list of figures."""

    problems: tuple[tuple[int, str], ...]
    """Position of a figure -> a reason why it cannot be right, whatever its value."""
    most: tuple[float | None, ...]
    """For each figure: the value up to which the figure is certainly possible; None if the value of the figure is not checked."""
    texts: tuple[int, ...]
    """Positions of the figures that have an entry in `most` and whose value is a text."""
    siblings: tuple[tuple[int, ...], ...]
    """Positions of the same rate, or time of COMPARED_TIMES, on several devices."""
    sampled: tuple[int, ...]
    """Positions of the figures with samples."""
    stated: tuple[tuple[int, Value], ...]
    """Position of a figure -> the value that the parameters of other figures state for it."""
    products: tuple[tuple[int, int, float], ...]
    """Positions of a rate and of a time -> the amount that is their product."""
    factors: tuple[tuple[int, int, int], ...]
    """Positions of two figures, and of their product."""
    ratios: tuple[tuple[int, int, float], ...]
    """Positions of two figures -> the first divided by the second."""
    bounded: tuple[int, ...] = ()
    """Positions of the figures of `LEAST`."""
    loaders: tuple[tuple[int, int, int, float], ...] = ()
    """Positions of a `dataloader.sufficiency`, of a loading rate of the same device, and of the training rate of all ranks; then
    the factor that turns loading rate / training rate into the sufficiency. The factor is the number of ranks, times the ratio of
    the batch sizes if these differ, because small batches train more slowly."""
    durations: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """Stage -> positions of the times that its benchmarks took."""
    is_soak: bool = False
    """The figures are aggregates of several rounds."""

    def are_possible(self, values: Sequence[Value]) -> bool:
        """Return whether the values of the figures of a host are certainly possible.

        This is true on most hosts, so it is computed by `map` and `issuperset`, which are fast, before any slower check.
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
"""Figures, and their structure if it is known."""


class PartnerStructures:
    """The structures of figures of pairs of hosts. Hosts share them, although their figures name different partners."""

    def __init__(self) -> None:
        self._structures: BoundedCache[Hashable, FigureStructure] = BoundedCache(MAX_STRUCTURES)

    def of_host(self, view: HostView, items: Sequence[Observation]) -> FigureStructure:
        """Return the structure of `items`, the figures of a host that are measured with partners."""
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
            if not structure.problems:  # the reasons of problems name scopes, which differ from host to host
                self._structures[key] = structure
        return structure


def figure_structure(view: HostView, items: Sequence[Observation], *, is_soak: bool = False) -> FigureStructure:
    """Return the structure of figures of a host. The figures of a soak (`is_soak`) are aggregates of its rounds."""
    # A launch that was repeated later keeps its figures in `Launch.observations`; these figures are not in `items`. A soak has
    # each figure once, for all rounds together.
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
            most[-1] = most_of_figure(view.shipped_criteria, item)
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
                problems.append((position, f"only some of these figures have the parameter {difference}"))
        if not is_soak and sampled.setdefault(kind, item.samples is not None) != (item.samples is not None):
            problems.append((position, "only some of these figures have samples"))
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
            group for group in siblings if items[group[0]].unit in RATE_UNITS or items[group[0]].name in COMPARED_TIMES
        ),
        sampled=tuple(position for position, item in enumerate(items) if item.samples and item.status == MEASURED),
        stated=tuple(_stated_values(items)),
        products=tuple(products),
        factors=tuple(_factors(items)),
        ratios=tuple(ratios),
        bounded=tuple(
            position
            for position, item in enumerate(items)
            # Processes of a rehearsal share processors: two operations together may be faster than one of them was alone.
            if item.name in LEAST and (item.unit == "s" or not view.plan.rehearsal)
        ),
        loaders=tuple(_loaders(items)),
        durations={} if is_soak else _durations(items),
        is_soak=is_soak,
    )


def figure_problems(
    view: HostView, items: Sequence[Observation], structure: FigureStructure | None = None
) -> Iterator[Problem]:
    """Yield what cannot be right about figures of a host; `structure`: structure of its layout, by default determined here."""
    structure = structure or figure_structure(view, items)
    for position, reason in structure.problems:
        yield _problem(items[position], reason)
    for item in _doubtful(items, structure):
        if reason := problem_of_figure(view.shipped_criteria, item):
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
    # The processes of a rehearsal share processors, so one may wait for the others. Therefore their rates are not compared.
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
    """Return the figures whose value is not certainly possible."""
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
    """Return why a parameter of a figure cannot be right; empty if there is none. `planned`: see `_fixed_settings`."""
    for key, value in item.params.items():
        if type(value) in (int, float) and value < 0:  # type: ignore[operator]
            return f"its parameter {key} is {value}"
        wanted = planned.get(key, value)
        is_shortened = key == "epochs" and planned.get("max_steps") and _is_positive(value) and value < wanted
        if value != wanted and not (isinstance(wanted, list | tuple) and value in wanted) and not is_shortened:
            return f"{key} is {value}, but the plan has {wanted}"
    return _wrong_share(item) or _wrong_replicas(view, item)


def _wrong_share(item: Observation) -> str:
    """Return why the bytes that a collective moved do not match its size; empty if they do.

    Each rank moves the same number of whole elements, so moved bytes and size may differ by less than one element per rank.
    """
    size, moved, ranks = (item.params.get(key) for key in ("size_bytes", "moved_bytes", "world_size"))
    if moved is None or not isinstance(size, int) or not isinstance(ranks, int):
        return ""
    if type(moved) is int and abs(moved - size) < ELEMENT_BYTES * ranks:
        return ""
    return f"moved_bytes is {moved}, which is not {size} bytes rounded to whole elements for each of {ranks} ranks"


def _wrong_replicas(view: HostView, item: Observation) -> str:
    """Return why the numbers of replicas and of ranks without a replica cannot be right; empty if they can.

    Two neighbouring ranks of a host form a replica, so at most one rank of each host has none.
    """
    ranks, replicas, left_out = (item.params.get(key) for key in ("world_size", "replicas", "left_out"))
    if replicas is None and left_out is None:
        return ""
    if not type(ranks) is type(replicas) is type(left_out) is int:
        return f"{replicas} replicas and {left_out} ranks without one are not whole numbers"
    hosts = len(view.plan.gangs().get(view.host.gang, ())) if item.stage == GANG else 1
    if ranks != 2 * replicas + left_out or left_out > hosts:
        return f"{replicas} replicas of two ranks each, and {left_out} ranks without one, cannot be the {ranks} ranks"
    return ""


def _fixed_settings(view: HostView, stage: str, benchmark: str) -> Mapping[str, Any]:
    """Return the settings with which a stage of the plan runs a benchmark, without those that the benchmark adapts."""
    planned = next((item.benchmarks for item in view.plan.stages if item.name == stage), {})
    if benchmark not in planned:
        return {}
    adapted = BENCHMARKS[benchmark].adapted
    return {key: value for key, value in settings_of(benchmark, planned[benchmark]).items() if key not in adapted}


def _different_settings(items: Sequence[Observation], group: Sequence[int]) -> Iterator[tuple[int, str]]:
    """Yield each figure that was measured with other settings than the same figure of the first device."""
    first = items[group[0]]
    outcomes = outcome_params(first.name)
    for position in group[1:]:
        params = items[position].params
        for key in EQUAL_PARAMS:
            if key not in outcomes and key in first.params and key in params and params[key] != first.params[key]:
                yield position, f"{key} is {params[key]}, but {first.params[key]} at {first.scope}"
                break


def _different_magnitude(items: Sequence[Observation]) -> Iterator[Problem]:
    """Yield each rate that is far above the rates of the host's other devices, and each time that is far below their times.

    A rate far below the others', or a time far above the others', is a fault, which the criteria find.
    """
    is_time = items[0].name in COMPARED_TIMES
    values = sorted(
        float(item.value) for item in items if isinstance(item.value, int | float) and (item.value or is_time)
    )
    if len(values) < 2 or values[-1] <= CREDIBLE_RATIO * values[0] or values[0] < 0:
        return
    if len(values) == 2:  # there is no majority: either may be the wrong one
        first = items[0]
        reason = f"{values[0]:g} and {values[1]:g} {first.unit} of two devices cannot both be right"
        yield first.name, HOST, reason, first.stage
        return
    median = values[(len(values) - 1) // 2]
    for item in items:
        if not isinstance(item.value, int | float):
            continue
        if item.value * CREDIBLE_RATIO < median if is_time else item.value > CREDIBLE_RATIO * median:
            yield _problem(item, f"{item.value:g} {item.unit} is not credible: the other devices have {median:g}")


def _wrong_participants(view: HostView, items: Sequence[Observation]) -> Iterator[tuple[int, str]]:
    """Yield the first figure of each stage and number of ranks, if no launch of the stage had that number of ranks."""
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
    """Yield each figure that is also a parameter of other figures of its benchmark, with each value that these figures state.

    Such figures are the choices of NCCL (`collective.transport`, `collective.nvls`) and the access of two GPUs.
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
    """Yield each figure that escapes a shipped criterion because it lacks a parameter by which the criterion selects figures.

    Ranks state all of these parameters, except that a choice of NCCL may be unknown. Then the figure that states the choice
    is absent too.
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
                yield position, f"it does not state {', '.join(sorted(missing))}, by which {criterion.id} judges it"
                break


def _relations(items: Sequence[Observation]) -> tuple[list[tuple[int, int, float]], list[tuple[int, int, float]]]:
    """Return the products and ratios of the bandwidths and latencies of each collective, and the products of each training."""
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
    """Yield the positions of rate and time of each training -> the images or tokens of one step of all ranks."""
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
    """Yield the positions of two figures and their product, for each device and type."""
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
    """Yield each ratio of loading and training that would need a far faster loader than the one that was measured."""
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
    """Yield the figures that should state the number of ranks, but do not, although other figures of their benchmark do."""
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
            measured = f"{rate.value:g} {rate.unit} for {time.value:g} {time.unit} give {product:g}"
            yield _problem(rate, f"{measured}, but the settings give {amount:g}")
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
    """Return why the samples and the value derived from them cannot belong together; empty if they can.

    `has_rounds`: the samples are the rounds of a soak, and their variation is the variation of means of several rounds.
    """
    least, greatest = samples.min, samples.max
    margin = RELATIVE * max(abs(least), abs(greatest))
    if not least - margin <= samples.p50 <= greatest + margin:
        return f"the median {samples.p50:g} is not between {least:g} and {greatest:g}"
    if not least - margin <= value <= greatest + margin:
        return f"the value {value:g} is not between {least:g} and {greatest:g}"
    needed = 1 if samples.precision is None else LEAST_FOR_PRECISION
    if samples.n < needed:
        return f"it has {counted(samples.n, 'sample')}, but needs at least {needed}"
    if least < 0:
        return f"a sample is negative: {least:g}"
    if least > 0 and not _possible_variation(samples, has_rounds=has_rounds):
        return f"{samples.n} samples cannot vary by {samples.cv:g} between {least:g} and {greatest:g}"
    return ""


def _possible_variation(samples: Samples, *, has_rounds: bool) -> bool:
    """Return whether samples between the extremes can have this coefficient of variation.

    With the extremes among n samples, the standard deviation is at least range / sqrt(2 n), and never more than the range. The
    mean lies between the extremes. Means of several rounds vary less than the rounds: their standard deviation is at least
    range / (2 n).
    """
    spread = samples.max - samples.min
    least = spread / (2 * samples.n if has_rounds else math.sqrt(2 * samples.n)) / samples.max
    return least * (1 - RELATIVE) - RELATIVE <= samples.cv <= spread / samples.min + RELATIVE
