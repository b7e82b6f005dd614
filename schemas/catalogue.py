"""The settings and outputs of all benchmarks, in one table for the plan and for the benchmarks.

A plan combines this table with a profile and an inventory. The plan takes the expected observations from this table, and the
benchmarks take their settings from it, so both always agree about what is measured.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from schemas.benchmarks import Benchmark, Output, Parameter, Settings
from schemas.benchmarks.communication import COMMUNICATION
from schemas.benchmarks.hardware import HARDWARE
from schemas.benchmarks.storage import STORAGE
from schemas.benchmarks.training import TRAINING
from schemas.documents import nearest
from schemas.records import is_number

NO_IN_PLACE = frozenset({"all_to_all", "send_recv", "hypercube"})
"""Collectives that cannot run in place."""
TORCH_ONLY_IN_PLACE = frozenset({"all_reduce", "broadcast", "reduce"})
"""Collectives that a rehearsal can run only in place, because torch.distributed offers no other form of them."""

BENCHMARKS: Mapping[str, Benchmark] = {**HARDWARE, **COMMUNICATION, **TRAINING, **STORAGE}
"""Name -> benchmark, in the order in which reports show them."""
DURATION = Output(name="benchmark.duration", unit="s", scope="host", params={"benchmark": tuple(BENCHMARKS)})
"""Duration of a benchmark. Every benchmark reports it."""
_WRONG_RESULTS = re.compile(r"(wrong_\w+|mismatches|misread_bytes)")


@dataclass(frozen=True, kw_only=True)
class Expectation:
    """An observation that the plan requires of the hosts that run the stage."""

    stage: str
    name: str
    scope: str
    params: Mapping[str, Any]
    peers: bool = False
    """Whether it is measured between ranks, so that a host with one device cannot measure it alone."""


def settings(benchmark: str, chosen: Settings) -> dict[str, Any]:
    """Return the benchmark's settings: those of the profile, or else the defaults. Numbers have the type of the default."""
    defaults = BENCHMARKS[benchmark].settings
    return {key: _convert(chosen[key], default) if key in chosen else default for key, default in defaults.items()}


def _convert(value: Any, default: Any) -> Any:
    return type(default)(value) if isinstance(default, int | float) else value


def value_problem(benchmark: str, key: str, value: Any) -> str:
    """Return why a benchmark's setting cannot have this value, as the end of a sentence; empty if the value is valid."""
    default = BENCHMARKS[benchmark].settings[key]
    if value == default == []:
        return ""
    items, examples = (item if isinstance(item, list) else [item] for item in (value, default))
    examples = examples or [*BENCHMARKS[benchmark].choices[key]]
    is_same_kind = isinstance(value, list) is isinstance(default, list) and (bool(items) or key in _OPEN_LISTS)
    if not is_same_kind or not all(_has_type(item, examples[0]) for item in items):
        return f"is {value!r}, expected a value such as {default or examples[:1]!r}"
    choices = items if key in _OPEN_LISTS else BENCHMARKS[benchmark].choices.get(key, examples)
    return _range_problem(value, items, examples[0]) if is_number(examples[0]) else _choice_problem(items, choices)


_OPEN_LISTS = frozenset({"data_directories", "compiled_variants"})
"""Lists that may be empty, and may have any texts, not only those in the benchmark's choices or default. Another list may be
empty only if its default is."""


def _has_type(item: object, example: object) -> bool:
    """Return whether a value has the type of the default. A float default also accepts integers, but not the other way round."""
    if not is_number(example):
        return isinstance(item, type(example))
    return is_number(item) and (isinstance(example, float) or isinstance(item, int))


def _range_problem(value: object, numbers: Sequence[float], default: float) -> str:
    minimum = 0 if default == 0 else 1 if isinstance(default, int) else None
    if all(number >= minimum if minimum is not None else number > 0 for number in numbers):
        return ""
    return f"is {value!r}, expected {f'at least {minimum}' if minimum is not None else 'more than 0'}"


def _choice_problem(items: Sequence[str], choices: Sequence[str]) -> str:
    unknown = next((item for item in items if item not in choices), None)
    if unknown is None:
        return ""
    return f"does not accept {unknown}{nearest(unknown, choices)}: choose from {', '.join(choices)}"


def needs_torch(benchmarks: Collection[str]) -> bool:
    """Return whether a stage with these benchmarks needs torch. A stage without benchmarks needs it to join a process group."""
    return not benchmarks or any(BENCHMARKS[name].needs_torch for name in benchmarks)


def supports_placement(op: str, placement: str, device: str) -> bool:
    """Return whether a collective supports the placement (`in_place`, `out_of_place`) on the device (`gpu`, `cpu`)."""
    if placement == "in_place":
        return op not in NO_IN_PLACE
    return device == "gpu" or op not in TORCH_ONLY_IN_PLACE


def can_observe(name: str, ranks: int) -> bool:
    """Return whether this number of ranks can make the observation. (`collective.hypercube.*` needs a power of two.)"""
    return not name.startswith("collective.hypercube.") or ranks & (ranks - 1) == 0


def counts_wrong_results(name: str) -> bool:
    """Return whether observations of that name count wrong results: `….wrong_*`, `….mismatches` or `….misread_bytes`."""
    return _WRONG_RESULTS.fullmatch(name.rpartition(".")[2]) is not None


def expand(stage: str, benchmark: str, chosen: Settings, device: str = "gpu") -> Iterator[Expectation]:
    """Yield every observation that `benchmark` must make with these settings, on a `gpu` or a `cpu`.

    The last one is the duration of the benchmark.
    """
    values = settings(benchmark, chosen)
    for output in outputs(benchmark, device):
        if not output.demanded:
            continue
        for combination in itertools.product(*(values[key] for key in output.over.values())):
            params = dict(zip(output.over, combination, strict=True))
            if "placement" in params and not supports_placement(params["op"], params["placement"], device):
                continue
            yield Expectation(
                stage=stage,
                name=output.name.format(**params),
                scope=output.scope,
                params={key: value for key, value in params.items() if not _in_name(key, output)},
                peers=BENCHMARKS[benchmark].needs_peers or output.scope == "pair",
            )
    yield Expectation(stage=stage, name=DURATION.name, scope=DURATION.scope, params={"benchmark": benchmark})


def outputs(benchmark: str, device: str) -> Iterator[Output]:
    """Return the benchmark's outputs on a `gpu` or a `cpu`."""
    return (output for output in BENCHMARKS[benchmark].outputs if device == "gpu" or not output.gpu_only)


def parameters(output: Output, benchmark: Benchmark | None) -> dict[str, Parameter]:
    """Return the parameters of the output's observations, each with its type or its possible texts."""
    if benchmark is None:
        return dict(output.params)
    listed: dict[str, Parameter] = {}
    for key, setting in output.over.items():
        values = benchmark.choices.get(setting, benchmark.settings[setting])
        if not _in_name(key, output):
            listed[key] = values if isinstance(values[0], str) else type(values[0])
    return {**benchmark.params, **output.params, **listed}


@cache
def output_of(name: str) -> Output | None:
    """Return the output whose observations have that name; None if no benchmark has such an output."""
    if name == DURATION.name:
        return DURATION
    outputs = (output for benchmark in BENCHMARKS.values() for output in benchmark.outputs)
    return next((output for output in outputs if output.makes(name)), None)


def _in_name(key: str, output: Output) -> bool:
    return f"{{{key}}}" in output.name
