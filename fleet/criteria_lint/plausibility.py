"""Find operators and limits with which no fault can be found, such as a floor on a figure that should be low."""

from __future__ import annotations

from collections.abc import Iterator

from fleet.judge.criteria import Criterion
from fleet.judge.direction import HIGHER_IS_BETTER, LOWER_IS_BETTER, MUST_BE_ZERO, RATE_UNITS
from fleet.judge.finding import CEILINGS, FLOORS, Finding, finding_on
from schemas.records import Value, is_number

MUST_BE_TRUE = frozenset({"access", "loss_finite", "identical"})
LEAST_TESTED = 0.9
LONGEST_LATENCY_S = 1.0
REHEARSAL = "rehearsal"
"""Name of the pack for rehearsals. Its limit for `tested_share` may be low, because a rehearsal tests no GPU."""


def check_plausibility(criterion: Criterion) -> Iterator[Finding]:
    """Report operators and limits with which the criterion could not find a fault."""
    last = criterion.name.rpartition(".")[2]
    limit = criterion.value if criterion.expected is None else criterion.expected * criterion.fraction
    if isinstance(limit, str) or (isinstance(limit, bool) and criterion.operator != "eq"):
        return  # the type check reports it
    if (criterion.unit in RATE_UNITS or last in HIGHER_IS_BETTER) and criterion.operator in CEILINGS:
        yield finding_on(criterion, criterion.operator, "higher is better: this accepts slow parts", "use `ge`")
    elif criterion.unit in RATE_UNITS and criterion.operator == "eq" and not isinstance(limit, bool):
        yield finding_on(criterion, criterion.operator, "no two measurements give the same rate", "use `ge`")
    elif last in LOWER_IS_BETTER | MUST_BE_ZERO and criterion.operator in FLOORS:
        yield finding_on(criterion, criterion.operator, "lower is better: this accepts bad parts", "use `le`")
    elif last in MUST_BE_ZERO:
        yield from _check_error_count(criterion)
    elif last == "tested_share" and _is_below(limit, LEAST_TESTED) and criterion.origin != REHEARSAL:
        yield finding_on(criterion, limit, "memory that was not tested may be bad", f"require at least {LEAST_TESTED}")
    elif last.endswith("latency") and isinstance(limit, int | float) and limit > LONGEST_LATENCY_S:
        yield finding_on(
            criterion,
            limit,
            f"no healthy part has a latency of more than {LONGEST_LATENCY_S:g} s",
            "the unit is seconds: is the limit in another unit?",
        )
    elif last in MUST_BE_TRUE and limit is False:
        yield finding_on(criterion, limit, "only a faulty part meets this limit", "write true")


def _check_error_count(criterion: Criterion) -> Iterator[Finding]:
    """Report a limit that permits an error, or that is not an absolute `value`."""
    limit = criterion.value
    if criterion.value is None:
        yield finding_on(
            criterion,
            criterion.name,
            "an error count must be 0, so it must not be compared with other parts",
            "use `value: 0`",
        )
    elif is_number(limit):
        most = 1 if criterion.operator == "lt" else 0
        if limit > most:
            yield finding_on(criterion, limit, "an error count must be 0", "write `eq` and 0")


def _is_below(limit: Value, least: float) -> bool:
    return is_number(limit) and limit < least
