"""Criteria packs against physics and the catalogue: a limit that cannot be right is told before it judges a rack.

A floor above the part's peak rejects every host, one a thousand times too low accepts every host, and a name that nothing
is ever called judges none: none of them shows in a report.
"""

from __future__ import annotations

import fnmatch
import math
from collections.abc import Iterator, Mapping
from functools import cache

from fleet.criteria_lint.parameters import where
from fleet.criteria_lint.physics import physics
from fleet.criteria_lint.plausibility import sense
from fleet.judge.criteria import Criterion, Pack
from fleet.judge.finding import CEILINGS, FLOORS, Finding, about, one_of
from schemas.catalogue import BENCHMARKS, DURATION, Benchmark, Output
from schemas.documents import nearest
from schemas.readings import READINGS
from schemas.records import Value

COLLECTED = frozenset({name.split(".")[0] for name in READINGS} | {"launch", "collector", "drift"})
"""First components of what the collectors read, of what the ranks ran on, of how a collector fared, and of how a soak went."""
STAGES, MEASURING = frozenset({"preflight", "benchmark", "soak", "gang"}), frozenset({"benchmark", "soak", "gang"})
SCOPES: Mapping[str, frozenset[str]] = {
    "device": frozenset({"gpu", "cpu"}),
    "pair": frozenset({"peer"}),
    "host": frozenset({"host"}),
    "world": frozenset({"host", "gang"}),
    "peers": frozenset({"partner"}),
}
COLLECTED_SCOPES = frozenset({"host"} | {label for reading in READINGS.values() for label in reading.labels})
TRUTHS = frozenset(
    {"peer_copy.access", "training.loss_finite", "variants.loss_finite", "checkpoint.identical", "collective.nvls"}
)
TEXTS = frozenset({"collective.transport", "digest.value"})
LEAST_OF_EXPECTED = 0.75
MUST_SPEAK = (
    "gemm.throughput", "memory.bandwidth", "host_copy.bandwidth", "peer_copy.bandwidth", "stress.throughput", "stress.power",
    "collective.all_reduce.busbw", "gpu.pcie.generation", "gpu.pcie.width",
)  # fmt: skip
"""What the pack of a GPU model judges by a figure of its own, or lists under `unknown`."""


def lint(pack: Pack) -> list[Finding]:
    """Everything in `pack`, and in what it includes, that cannot be right; the same finding once."""
    found = [*_pack(pack)]
    for criterion in pack.criteria:
        if endless := [*_endless(criterion)]:
            found += endless
            continue
        for check in (_contract, _type, sense, _expectation):
            found += check(criterion)
        found += where(criterion, _spoken(criterion))
        found += physics(criterion, pack)
    return list(dict.fromkeys(found))


@cache
def _known() -> tuple[tuple[str, Output, Benchmark | None], ...]:
    """Every name that an observation of a benchmark can have, and what makes it."""
    return tuple(_catalogue())


def _catalogue() -> Iterator[tuple[str, Output, Benchmark | None]]:
    yield DURATION.name, DURATION, None
    for benchmark in BENCHMARKS.values():
        for output in benchmark.outputs:
            ops = benchmark.settings[output.over["op"]] if "{op}" in output.name else [""]
            yield from ((output.name.replace("{op}", op), output, benchmark) for op in ops)


def _unknown_name(name: str) -> str:
    """Why nothing can be called that; empty where something is."""
    first = name.split(".")[0]
    if first in COLLECTED:
        own = [known for known in READINGS if known.startswith(f"{first}.")]
        if not own or any(fnmatch.fnmatchcase(known, name) for known in own):
            return ""
        return f"no collector reads {name}{nearest(name, own)}"
    if any(name == known for known, _, _ in _known()):
        return ""
    return f"no observation is called {name}{nearest(name, (known for known, _, _ in _known()))}"


def _endless(criterion: Criterion) -> Iterator[Finding]:
    """A limit that is no number, or beyond all numbers."""
    accepted = (criterion.baseline.fraction, criterion.baseline.change) if criterion.baseline else ()
    fleet = (criterion.fleet_fraction, criterion.fleet_deviations)
    for part in (criterion.value, criterion.expected, criterion.fraction, *fleet, *accepted):
        if isinstance(part, float) and not math.isfinite(part):
            yield about(
                criterion, part, "not a finite number: nothing, or everything, holds against it", "write a number"
            )


def _pack(pack: Pack) -> Iterator[Finding]:
    """What holds for the pack as a whole."""

    def finding(value: Value, why: str, remedy: str) -> Finding:
        return Finding(pack=pack.name, criterion="(pack)", value=value, why=why, remedy=remedy)

    for part, names in (("unknown", pack.unknown), ("lacks", pack.lacks)):
        for name in names:
            if why := _unknown_name(name):
                yield finding(name, f"{part}: {why}", "name an observation of schemas/catalogue.py")
    if not pack.gpu_names:
        return
    if not pack.datasheet:
        yield finding(
            pack.gpu_names[0], "a GPU model without a datasheet cannot be checked", "add the datasheet's peaks"
        )
    for name in MUST_SPEAK:
        own = (
            item
            for item in pack.criteria
            if item.speaks_of(name) and not (item.vs_fleet or item.baseline) and item.same_as_fleet is None
        )
        if name not in pack.unknown and not any(item.stage != "gang" for item in own):
            yield finding(name, "neither judged nor called unknown", "add a criterion, or a line under unknown")


def _spoken(criterion: Criterion) -> list[tuple[Output, Benchmark | None]]:
    """The catalogue's outputs that it judges; none where a collector makes what it judges."""
    return [(output, benchmark) for name, output, benchmark in _known() if criterion.speaks_of(name)]


def _contract(criterion: Criterion) -> Iterator[Finding]:
    """Name, unit, scope and parameters, against the catalogue."""
    spoken = _spoken(criterion)
    stages = MEASURING if spoken else STAGES
    if criterion.stage and criterion.stage not in stages:
        why = f"no stage in which it is observed{nearest(criterion.stage, stages)}"
        yield about(criterion, criterion.stage, why, one_of(stages))
    if not spoken and criterion.name.split(".")[0] in COLLECTED:
        if why := _unknown_name(criterion.name):
            yield about(criterion, criterion.name, why, "name one of schemas/readings.json")
        if criterion.scope and criterion.scope not in COLLECTED_SCOPES:
            yield about(criterion, criterion.scope, "unknown kind of scope", one_of(COLLECTED_SCOPES))
        units = {reading.unit for name, reading in READINGS.items() if criterion.speaks_of(name)}
        if units and criterion.unit not in units:
            yield about(criterion, criterion.unit, "not the unit of the reading", one_of(units))
        return
    if not spoken:
        yield about(criterion, criterion.name, _unknown_name(criterion.name), "name one of schemas/catalogue.py")
        return
    units = {output.unit for output, _ in spoken}
    if criterion.unit not in units:
        yield about(criterion, criterion.unit, "not the unit of the observation", one_of(units))
    scopes = frozenset().union(*(SCOPES[output.scope] for output, _ in spoken))
    if criterion.scope and criterion.scope not in scopes:
        yield about(criterion, criterion.scope, "not a scope of the observation", one_of(scopes))


def _type(criterion: Criterion) -> Iterator[Finding]:
    """Whether the limit is of the observation's kind, and can be compared like that."""
    value, name = criterion.value, criterion.name
    if isinstance(value, str | bool) and criterion.operator != "eq":
        kind = "text" if isinstance(value, str) else "true and false"
        yield about(criterion, value, f"{kind} cannot be compared by {criterion.operator}", "use eq, or a number")
        return
    number = value is None or (isinstance(value, int | float) and not isinstance(value, bool))
    if name in TRUTHS and not isinstance(value, bool):
        yield about(criterion, value, "the observation is true or false", "write true or false")
    elif name in TEXTS and not isinstance(value, str):
        yield about(criterion, value, "the observation is a text", "write the text")
    elif name.split(".")[0] not in COLLECTED and name not in TRUTHS | TEXTS and not number:
        yield about(criterion, value, "the observation is a number", "write a number")
    elif criterion.unit != "1" and not number:
        yield about(criterion, value, f"a figure in {criterion.unit} is a number", "write a number")


def _distance(criterion: Criterion) -> Iterator[Finding]:
    """Whether a limit by distance, or from the accepted record, lies on the side on which it finds something."""
    if (criterion.fleet_deviations or criterion.baseline) and criterion.operator == "eq":
        yield about(criterion, "eq", "no two measurements are equal", "use ge or le")
    fraction = criterion.baseline.fraction if criterion.baseline and criterion.baseline.change is None else 1.0
    if (criterion.operator in FLOORS and fraction > 1) or (criterion.operator in CEILINGS and fraction < 1):
        yield about(criterion, fraction, "half of the healthy parts miss it", "turn the fraction or the operator")


def _expectation(criterion: Criterion) -> Iterator[Finding]:
    """Whether the limit is near what is expected: the part's figure, the inventory's or the fleet's median."""
    fraction = criterion.fraction if criterion.fleet_fraction is None else criterion.fleet_fraction
    yield from _distance(criterion)
    if criterion.expected is None and not criterion.variable and criterion.fleet_fraction is None:
        return
    remedy = f"keep within {(1 - LEAST_OF_EXPECTED) * 100:.0f} % of it, or correct the expectation"
    if criterion.operator in FLOORS and fraction < LEAST_OF_EXPECTED:
        yield about(criterion, fraction, f"floor {(1 - fraction) * 100:.0f} % under the expectation", remedy)
    if criterion.operator in CEILINGS and fraction > 2 - LEAST_OF_EXPECTED:
        yield about(criterion, fraction, f"ceiling {(fraction - 1) * 100:.0f} % over the expectation", remedy)
    if (criterion.operator in FLOORS and fraction > 1) or (criterion.operator in CEILINGS and fraction < 1):
        yield about(criterion, fraction, "half of the healthy parts miss it", "turn the fraction or the operator")
