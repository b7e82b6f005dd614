"""Check criteria packs against the datasheet and the benchmark catalogue, before a wrong limit judges a rack.

A floor above the part's peak rejects every host. A floor a thousand times too low accepts every host. A criterion judges
nothing if no observation has its name. In none of these cases does the report show that the pack is wrong.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from functools import cache

from fleet.criteria_lint.parameters import check_parameters
from fleet.criteria_lint.physics import LEAST_OF_DATASHEET, check_physics, check_share_of_datasheet
from fleet.criteria_lint.plausibility import check_plausibility
from fleet.judge.criteria import MODEL, Criterion, Pack, name_matches, with_datasheet
from fleet.judge.finding import CEILINGS, FLOORS, Finding, finding_on, use_one_of
from schemas.benchmarks import Benchmark, Output
from schemas.catalogue import BENCHMARKS, DURATION
from schemas.documents import nearest, number_for_yaml
from schemas.readings import READINGS
from schemas.records import Value, is_number
from schemas.stages import BENCHMARK, GANG, PREFLIGHT, SOAK

COLLECTED = frozenset(
    {name.split(".")[0] for name in READINGS} | {"launch", "collector", "drift", "fabric_ports", "vulnerability"}
)
"""First components of the names of observations that are not in the benchmark catalogue. These are the readings of collectors
and observations that the agent or the judge adds: launches, status of collectors, drift over a soak, totals over the ports of a
host, and CVSS scores of versions with published vulnerabilities."""
MEASURING = frozenset({BENCHMARK, SOAK, GANG})
"""Stages that run benchmarks."""
STAGES = MEASURING | {PREFLIGHT}
SCOPES: Mapping[str, frozenset[str]] = {
    "device": frozenset({"gpu", "cpu"}),
    "pair": frozenset({"peer"}),
    "host": frozenset({"host"}),
    "world": frozenset({"host", "gang"}),
    "peers": frozenset({"partner"}),
    "port": frozenset({"port", "partner"}),
    "directory": frozenset({"directory"}),
    "numa": frozenset({"numa"}),
}
"""Scope of a benchmark output in the catalogue -> the scopes that a criterion on this output may have."""
COLLECTED_SCOPES = frozenset({"host"} | {label for reading in READINGS.values() for label in reading.labels})
TRUTHS = frozenset(
    {
        "peer_copy.access",
        "training.loss_finite",
        "variants.loss_finite",
        "mixture_of_experts.loss_finite",
        "checkpoint.identical",
        "collective.nvls",
    }
)
"""Benchmark figures that are true or false."""
TEXTS = frozenset({"collective.transport", "digest.value", "pulse.wave"})
"""Benchmark figures that are texts."""
LEAST_OF_EXPECTED = 0.75
"""Lowest floor (lower limit) that the lint accepts, as a share of the expected value. The highest ceiling (upper limit) is
2 - LEAST_OF_EXPECTED = 1.25 times the expected value."""
MAX_FRACTION = 10
"""A higher fraction is taken for a percentage. The highest ceiling in VARYING is 10."""
VARYING = {
    "local_storage.": (0.2, 10.0),
    "shared_storage.": (0.2, 10.0),
    "training.throughput": (0.5, 2.0),
    "variants.throughput": (0.5, 2.0),
}
"""Prefix of the names of figures that differ between healthy hosts -> the lowest floor and the highest ceiling, as multiples of
the fleet's median. Healthy file systems differ by fill level, wear and load. The rate of a training with small kernels depends on
how fast the processors start them."""
LIGHT, LEAST_OF_LIGHT = frozenset({"optics.rx_power", "optics.tx_power"}), 0.1
"""Optical powers, and the lowest floor for them, as a share of the expected value: 0.1, which is 10 dB below it. This floor
is low, because healthy ports differ by several dB."""
MUST_JUDGE = (
    "gemm.throughput", "memory.bandwidth", "host_copy.bandwidth", "peer_copy.bandwidth", "stress.throughput", "stress.power",
    "collective.all_reduce.busbw", "gpu.pcie.generation", "gpu.pcie.width",
)  # fmt: skip
"""The pack of a GPU model must judge each of these observations, or list it under `unknown`. A criterion of the stage `gang` does
not suffice, nor does a limit that depends on other parts or earlier runs."""


def lint(pack: Pack) -> list[Finding]:
    """Return what is wrong in `pack` and in the packs that it includes, each finding once."""
    criteria = [with_datasheet(item, pack.datasheet) for item in pack.criteria]
    findings = [*_check_pack(pack, criteria)]
    for criterion in criteria:
        if infinite := [*_check_finite(criterion)]:
            findings += infinite
            continue
        for check in (_check_contract, _check_type, check_plausibility, _check_expectation, check_share_of_datasheet):
            findings += check(criterion)
        findings += check_parameters(criterion, _matching_outputs(criterion.name))
        findings += check_physics(criterion, pack)
    return list(dict.fromkeys(findings))


@cache
def _observation_names() -> tuple[tuple[str, Output, Benchmark | None], ...]:
    """Return every name that a benchmark's observation can have, with its output and benchmark."""
    return tuple(_catalogue())


def _catalogue() -> Iterator[tuple[str, Output, Benchmark | None]]:
    yield DURATION.name, DURATION, None
    for benchmark in BENCHMARKS.values():
        for output in benchmark.outputs:
            ops = benchmark.settings[output.over["op"]] if "{op}" in output.name else [""]
            yield from ((output.name.replace("{op}", op), output, benchmark) for op in ops)


@cache
def _explain_unknown_name(name: str) -> str:
    """Return why no observation can have this name; an empty text if an observation can have it."""
    first = name.split(".")[0]
    if first in COLLECTED:
        siblings = [reading for reading in READINGS if reading.startswith(f"{first}.")]
        if not siblings or any(name_matches(name, reading) for reading in siblings):
            return ""
        return f"no collector reads {name}{nearest(name, siblings)}"
    names = [known for known, _, _ in _observation_names()]
    return "" if name in names else f"no observation is called {name}{nearest(name, names)}"


def _check_finite(criterion: Criterion) -> Iterator[Finding]:
    """Report limits that are infinite or NaN."""
    baseline = (criterion.baseline.fraction, criterion.baseline.change) if criterion.baseline else ()
    fleet = (criterion.fleet_fraction, criterion.fleet_deviations)
    for part in (criterion.value, criterion.expected, criterion.fraction, *fleet, *baseline):
        if isinstance(part, float) and not math.isfinite(part):
            yield finding_on(criterion, part, "not a finite number: every value passes, or none does", "write a number")


def _check_pack(pack: Pack, criteria: Sequence[Criterion]) -> Iterator[Finding]:
    """Report what is wrong with the pack as a whole. `criteria` are its criteria, with the datasheet's figures filled in."""

    def finding(value: Value, why: str, remedy: str) -> Finding:
        return Finding(pack=pack.name, criterion="(pack)", value=value, why=why, remedy=remedy)

    for part, names in (("unknown", pack.unknown), ("lacks", pack.lacks)):
        for name in names:
            if why := _explain_unknown_name(name):
                yield finding(name, f"`{part}`: {why}", "use a name from schemas/catalogue.py")
    if not pack.gpu_names:
        return
    if not pack.datasheet:
        yield finding(
            pack.gpu_names[0], "a GPU model without a datasheet cannot be checked", "add the datasheet's peaks"
        )
    for name in MUST_JUDGE:
        absolute = (
            item
            for item in criteria
            if item.matches_name(name) and (item.value is not None or item.expected is not None or item.variable)
        )
        if name not in pack.unknown and not any(item.stage != GANG for item in absolute):
            yield finding(
                name,
                "neither judged nor listed as unknown",
                "add a criterion whose limit does not depend on other parts, or an entry in `unknown`",
            )


def _matches(pattern: str, name: str) -> bool:
    return name == pattern or ("*" in pattern and name_matches(pattern, name))


@cache
def _matching_outputs(pattern: str) -> tuple[tuple[Output, Benchmark | None], ...]:
    """Return the benchmark outputs whose names match the pattern, with their benchmarks; empty if it matches only readings."""
    return tuple((output, benchmark) for name, output, benchmark in _observation_names() if _matches(pattern, name))


@cache
def _matching_units(pattern: str) -> frozenset[str]:
    """Return the units of the readings whose names match the pattern."""
    return frozenset(reading.unit for name, reading in READINGS.items() if _matches(pattern, name))


def _check_contract(criterion: Criterion) -> Iterator[Finding]:
    """Compare name, unit, scope and stage with the catalogue."""
    outputs = _matching_outputs(criterion.name)
    for name in criterion.group_by:
        if why := _explain_unknown_name(name):
            yield finding_on(criterion, name, f"`group_by`: {why}", "use a name from schemas/readings.json")
    stages = MEASURING if outputs else STAGES
    if criterion.stage and criterion.stage not in stages:
        why = f"not observed in this stage{nearest(criterion.stage, stages)}"
        yield finding_on(criterion, criterion.stage, why, use_one_of(stages))
    if not outputs and criterion.name.split(".")[0] in COLLECTED:
        if why := _explain_unknown_name(criterion.name):
            yield finding_on(criterion, criterion.name, why, "use a name from schemas/readings.json")
        if criterion.scope and criterion.scope not in COLLECTED_SCOPES:
            yield finding_on(criterion, criterion.scope, "unknown kind of scope", use_one_of(COLLECTED_SCOPES))
        units = _matching_units(criterion.name)
        if units and criterion.unit not in units:
            yield finding_on(criterion, criterion.unit, "not the unit of the reading", use_one_of(units))
        return
    if not outputs:
        yield finding_on(
            criterion, criterion.name, _explain_unknown_name(criterion.name), "use a name from schemas/catalogue.py"
        )
        return
    units = frozenset(output.unit for output, _ in outputs)
    if criterion.unit not in units:
        yield finding_on(criterion, criterion.unit, "not the unit of the observation", use_one_of(units))
    scopes = frozenset().union(*(SCOPES[output.scope] for output, _ in outputs))
    if criterion.scope and criterion.scope not in scopes:
        yield finding_on(criterion, criterion.scope, "not a scope of the observation", use_one_of(scopes))


def _check_type(criterion: Criterion) -> Iterator[Finding]:
    """Check that the limit has the observation's type and that the operator can compare it."""
    value, name = criterion.value, criterion.name
    if isinstance(value, str) and name not in TEXTS and (written := number_for_yaml(value)):
        yield finding_on(criterion, value, "YAML reads it as text", f"write {written}")
        return
    if isinstance(value, str | bool) and criterion.operator != "eq":
        kind = "text" if isinstance(value, str) else "true and false"
        yield finding_on(
            criterion, value, f"{kind} cannot be compared by `{criterion.operator}`", "use `eq`, or a number"
        )
        return
    number = value is None or is_number(value)
    if name in TRUTHS and not isinstance(value, bool):
        yield finding_on(criterion, value, "the observation is true or false", "write true or false")
    elif name in TEXTS and not isinstance(value, str):
        yield finding_on(criterion, value, "the observation is a text", "write the text")
    elif name.split(".")[0] not in COLLECTED and name not in TRUTHS | TEXTS and not number:
        yield finding_on(criterion, value, "the observation is a number", "write a number")
    elif criterion.unit != "1" and not number:
        yield finding_on(criterion, value, f"a figure in {criterion.unit} is a number", "write a number")


def _check_distance(criterion: Criterion) -> Iterator[Finding]:
    """Report a limit relative to the fleet or to the baseline that is useless because of its operator or fraction."""
    if (criterion.fleet_deviations or criterion.baseline) and criterion.operator == "eq":
        yield finding_on(criterion, "eq", "no two measurements are equal", "use `ge` or `le`")
    fraction = criterion.baseline.fraction if criterion.baseline and criterion.baseline.change is None else 1.0
    if (criterion.operator in FLOORS and fraction > 1) or (criterion.operator in CEILINGS and fraction < 1):
        yield finding_on(
            criterion, fraction, "half of the healthy parts would fail", "use 1 / fraction, or the opposite operator"
        )


def _check_expectation(criterion: Criterion) -> Iterator[Finding]:
    """Check that the limit is near the expected value, which is a figure in the pack or the inventory, or the fleet's median."""
    fraction = criterion.fraction if criterion.fleet_fraction is None else criterion.fleet_fraction
    of_baseline = criterion.baseline.fraction if criterion.baseline else 0.0
    if (highest := max(fraction, of_baseline)) > MAX_FRACTION:
        yield finding_on(criterion, highest, "a fraction is 1 for the whole, not 100", f"write {highest / 100:g}")
        return
    yield from _check_distance(criterion)
    if criterion.datasheet or (
        criterion.expected is None and not criterion.variable and criterion.fleet_fraction is None
    ):
        return
    # With `vs_inventory` and the basis `model`, the limit is an estimate from figures of other hardware. Such a floor may be
    # so low that it finds only gross faults.
    least = LEAST_OF_DATASHEET if criterion.variable and criterion.basis == MODEL else LEAST_OF_EXPECTED
    least = LEAST_OF_LIGHT if criterion.name in LIGHT else least
    most = 2 - LEAST_OF_EXPECTED
    if criterion.vs_fleet:
        bounds = (bounds for prefix, bounds in VARYING.items() if criterion.name.startswith(prefix))
        least, most = next(bounds, (least, most))
    distance = 1 - least if criterion.operator in FLOORS else most - 1
    remedy = f"keep within {distance * 100:.0f} % of the expected value, or correct that value"
    if criterion.operator in FLOORS and fraction < least:
        yield finding_on(criterion, fraction, f"floor {(1 - fraction) * 100:.0f} % below the expected value", remedy)
    if criterion.operator in CEILINGS and fraction > most:
        yield finding_on(criterion, fraction, f"ceiling {(fraction - 1) * 100:.0f} % above the expected value", remedy)
    if (criterion.operator in FLOORS and fraction > 1) or (criterion.operator in CEILINGS and fraction < 1):
        yield finding_on(
            criterion, fraction, "half of the healthy parts would fail", "use 1 / fraction, or the opposite operator"
        )
