"""Describe what criteria find by logic: every value that does not meet the limit, however much healthy values vary.

Also describe why nothing is stated about criteria and benchmarks without values.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

from fleet.judge.criteria import Criterion
from fleet.judge.detection import LOGIC, Detection, settings_text
from fleet.judge.evidence import from_benchmark
from fleet.quantities import quantity
from schemas.records import Value

Stages = Mapping[str, Mapping[str, Mapping[str, object]]]
"""Stage -> benchmark -> its settings."""

CONFIDENCE = 0.95


def logic_groups(detections: Sequence[Detection], criteria: Iterable[Criterion] = ()) -> dict[str, dict[str, str]]:
    """Return kind of value that is found (one of LOGIC_TITLES) -> id of a criterion -> its limit with unit.

    The limit is empty if it is a text, if the criterion compares parts with each other, or if parts have different limits. A
    criterion in `criteria` that judged no value is added if its definition alone shows what it finds.
    """
    groups: dict[str, dict[str, str]] = {title: {} for title in LOGIC_TITLES}
    for item in detections:
        if item.kind == LOGIC:
            limits = groups[_logic_title(item)]
            limit = (
                ""
                if item.peers or isinstance(item.limit, str | None)
                else _limit_text(item.operator, item.limit, item.unit)
            )
            # A limit that differs between parts, such as the number of GPUs of a host, is left out.
            same = limits.setdefault(item.key.criterion, limit) == limit
            limits[item.key.criterion] = limit if same else ""
    judged = {item.key.criterion for item in detections}
    for criterion in criteria:
        if criterion.id not in judged and (title := _logic_of(criterion)):
            groups[title][criterion.id] = (
                ""
                if title == PEERS or isinstance(criterion.value, str | None)
                else _limit_text(criterion.operator, criterion.value, criterion.unit)
            )
    return {title: dict(sorted(limits.items())) for title, limits in groups.items() if limits}


EQUAL, INCREASE, PEERS, BEYOND = LOGIC_TITLES = (
    "any value other than the required one, such as a wrong state or a count that is not 0",
    "any change during the run that is beyond the limit (`≤`: an increase; `≥`: a decrease; `≤ 0 s`: a new event, because the "
    "value is the time of the newest event)",
    "any value that differs from that of most other parts, if there are other parts to compare with",
    "any value beyond the limit (the value is a count, or it does not vary between healthy parts)",
)


def _logic_title(item: Detection) -> str:
    if item.peers:
        return PEERS
    if item.change:
        return INCREASE
    return EQUAL if item.operator == "eq" else BEYOND


def _logic_of(criterion: Criterion) -> str:
    """Return the title in LOGIC_TITLES that follows from the definition alone; empty if it depends on the measured values."""
    if criterion.same_as_fleet:
        return PEERS
    if criterion.same_as_fleet is False or criterion.baseline or criterion.per_hour:
        return ""
    if criterion.delta:
        return INCREASE
    if criterion.operator == "eq":
        return EQUAL
    is_count = criterion.unit == "1" and isinstance(criterion.value, int) and criterion.operator in ("le", "lt")
    return BEYOND if is_count and not from_benchmark(criterion.name) else ""


def _limit_text(operator: str, limit: Value, unit: str) -> str:
    signs = {"eq": "", "ge": "≥ ", "gt": "> ", "le": "≤ ", "lt": "< "}
    return f"{signs[operator]}{quantity(limit, unit)}"


def logic_false_alarms(detections: Sequence[Detection]) -> tuple[int, int, float]:
    """Return how many healthy values were judged by logic, how many failed, and an upper limit of the share that fails.

    The upper limit holds with the confidence CONFIDENCE. If none of n independent values failed, it is 1 - 0.05^(1/n), about 3/n.
    If any failed, or if there are no values, it is 1, which states nothing. The values of all criteria are counted together,
    because a single criterion has too few values.
    """
    values = sum(item.values for item in detections if item.kind == LOGIC)
    failed = sum(item.failed for item in detections if item.kind == LOGIC)
    return values, failed, 1.0 if failed or not values else 1 - (1 - CONFIDENCE) ** (1 / values)


def not_judged(criteria: Iterable[Criterion], detections: Sequence[Detection]) -> dict[str, list[str]]:
    """Return reason -> ids of the criteria that judged no value and whose definition alone does not show what they find.

    Criteria with `same_as_fleet: false`, which switch a comparison off, are left out.
    """
    judged = {item.key.criterion for item in detections}
    reasons: dict[str, list[str]] = defaultdict(list)
    for criterion in criteria:
        if criterion.id not in judged and criterion.same_as_fleet is not False and not _logic_of(criterion):
            reasons[_why(criterion)].append(criterion.id)
    return {reason: sorted(ids) for reason, ids in sorted(reasons.items())}


def _why(criterion: Criterion) -> str:
    if criterion.baseline:
        return "no run is compared with a baseline"
    if criterion.name.startswith("drift."):
        return "no soak gave a drift that the criterion judges (soak too short, or too few parts)"
    if criterion.fleet_fraction is not None or criterion.fleet_deviations is not None:
        return "no run has enough comparable parts with the figure"
    if criterion.variable:
        return "no inventory sets the variable that gives the limit"
    return "no host has the part, the reading, or the number of GPUs that the criterion is for"


def unmeasured(detections: Sequence[Detection], profiles: Mapping[str, Sequence[Stages]]) -> dict[str, list[str]]:
    """Return profile -> its benchmarks that no run measured with any of the profile's settings."""
    known = {(item.key.stage, item.key.name.split(".")[0], item.key.settings) for item in detections}
    result = {}
    for profile, choices in profiles.items():
        covered = {
            (stage, name)
            for stages in choices
            for stage, benchmarks in stages.items()
            for name, chosen in benchmarks.items()
            if (stage, name, settings_text(name, chosen)) in known
        }
        missing = [
            name if stage == "benchmark" else f"{name} ({stage})"
            for stage, benchmarks in choices[0].items()
            for name in benchmarks
            if (stage, name) not in covered
        ]
        if missing:
            result[profile] = missing
    return result
