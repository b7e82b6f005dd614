"""Check the parameters in `where` of criteria.

A criterion judges nothing if no observation has the parameter, or if the value in `where` has another type than the parameter.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

from fleet.judge.criteria import Criterion, Range
from fleet.judge.finding import Finding, finding_on, use_one_of
from schemas.benchmarks import THROTTLE_REASONS, Benchmark, Output, Parameter
from schemas.catalogue import BENCHMARKS, parameters
from schemas.documents import nearest
from schemas.readings import READINGS
from schemas.records import Value

_WHOLE, _TRUTH, _NUMBER, _TEXT = "a whole number", "true or false", "a number", "a text"
_KINDS = {int: _WHOLE, bool: _TRUTH, float: _NUMBER, str: _TEXT}
THROTTLE_LABELS = (*THROTTLE_REASONS, "thermal", "sync_boost", "board_limit", "reliability")
"""Values of the label `reason` of the collectors' readings."""
COLLECTED_LABELS = frozenset({"phase"} | {label for reading in READINGS.values() for label in reading.labels})
"""Parameters of readings: their labels, and `phase`, which says in which snapshot a reading was taken."""
LABELS = COLLECTED_LABELS - {"phase"} | {"gpu", "cpu", "peer", "partner", "gang", "host", "reason", "link", "directory"}
"""Labels of readings, and names in scopes (such as `gpu` and `peer` in `gpu=0,peer=1`). Their values are texts."""
AT_LEAST_1 = frozenset({"size_bytes", "world_size", "batch_size"})
"""Parameters that are at least 1. Other whole numbers can be 0, for example a count, or the number of the first node or rank."""
DECIMAL_SIZE = 10**9
"""A size that is a multiple of this number of bytes was probably written in GB, but sizes in profiles are in GiB."""
COLLECTOR_PREFIXES = tuple({f"{name.split('.')[0]}." for name in READINGS})

Outputs = Sequence[tuple[Output, Benchmark | None]]


def check_parameters(criterion: Criterion, outputs: Outputs) -> Iterator[Finding]:
    """Check each parameter in the `where` of a criterion.

    `outputs` are the benchmark outputs that the criterion matches. It is empty for a criterion on readings.
    """
    known = _parameters(outputs)
    if not outputs and criterion.name.startswith(COLLECTOR_PREFIXES):
        known = dict.fromkeys(COLLECTED_LABELS, str)
        if criterion.name.startswith("gpu."):
            known |= {"reason": THROTTLE_LABELS}
    for key, value in criterion.where.items():
        if known and key not in known and not (outputs and key in LABELS):
            why = f"no such parameter{nearest(key, known)}"
            yield finding_on(criterion, key, why, "use a parameter of the observation")
            continue
        # If no parameters are known, look the key up in those of all benchmarks. A key that is not found is a label, whose values
        # are texts.
        parameter = known.get(key, str if known else ANY_BENCHMARK.get(key, str))
        if isinstance(value, Mapping):
            yield from _range(criterion, key, value, parameter)
        else:
            yield from _value(criterion, key, value, parameter)


def _parameters(outputs: Outputs) -> dict[str, Parameter]:
    """Return the parameters of all these outputs. If several outputs list the permitted texts of a parameter, join the lists."""
    merged: dict[str, Parameter] = {}
    for output, benchmark in outputs:
        for key, parameter in parameters(output, benchmark).items():
            before = merged.get(key, ())
            if isinstance(parameter, type) or isinstance(before, type):
                merged[key] = parameter
            else:
                merged[key] = [*before, *parameter]
    # A key can be a scope of one benchmark and a parameter of another, with different values. For example, `numa` is the number
    # of a node in scopes of `host_memory`, but `local` or `remote` as a parameter of `host_copy`. Such a key accepts any text.
    labels = {output.scope for output, _ in outputs} & merged.keys()
    return merged | dict.fromkeys(labels, str)


ANY_BENCHMARK = _parameters([(output, benchmark) for benchmark in BENCHMARKS.values() for output in benchmark.outputs])
"""Parameters of all benchmarks, for criteria on observations that are derived from benchmarks, such as `drift.…`."""


def _value(criterion: Criterion, key: str, value: Value, parameter: Parameter) -> Iterator[Finding]:
    listed: Sequence[str] = () if isinstance(parameter, type) else parameter
    kind = _KINDS[parameter] if isinstance(parameter, type) and key not in LABELS else _TEXT
    if not _is(kind, value):
        shown = repr(value) if isinstance(value, str) else value
        yield finding_on(criterion, shown, f"{key} is {kind}, so this never matches", f"write {kind}")
    elif isinstance(value, int) and kind == _WHOLE and value < (least := int(key in AT_LEAST_1)):
        yield finding_on(
            criterion, value, f"{key} is at least {least}, so this never matches", f"write at least {least}"
        )
    elif isinstance(value, int) and key == "size_bytes" and value % DECIMAL_SIZE == 0:
        why = "no shipped profile has this size: the sizes in profiles are powers of two"
        yield finding_on(criterion, value, why, "write 8589934592 for 8 GiB")
    elif kind == _TEXT and listed and value not in listed:
        yield finding_on(criterion, value, f"no such {key}{nearest(str(value), listed)}", use_one_of(listed))


def _range(criterion: Criterion, key: str, bounds: Range, parameter: Parameter) -> Iterator[Finding]:
    shown = ", ".join(f"{name} {bound:g}" for name, bound in bounds.items())
    if parameter not in (int, float):
        yield finding_on(criterion, shown, f"{key} is not a number, so bounds never match", f"write one value of {key}")
    elif bounds.get("ge", -math.inf) > bounds.get("le", math.inf):
        yield finding_on(criterion, shown, f"no {key} is within these bounds", "write a `ge` below `le`")


def _is(kind: str, value: Value) -> bool:
    if isinstance(value, bool):
        return kind == _TRUTH
    if kind == _WHOLE:
        return isinstance(value, int)
    return isinstance(value, int | float) if kind == _NUMBER else kind == _TEXT and isinstance(value, str)
