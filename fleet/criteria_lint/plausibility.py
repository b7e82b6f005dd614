"""Which way a limit must point: a floor on what should be low, or a ceiling on what should be high, accepts every bad part."""

from __future__ import annotations

from collections.abc import Iterator

from fleet.judge.criteria import Criterion
from fleet.judge.finding import CEILINGS, FLOORS, Finding, about
from schemas.records import Value

RATES = frozenset({"B/s", "FLOP/s", "FLOP/J", "FLOP/cycle", "images/s", "tokens/s"})
"""Units of which more is better."""
HIGH = frozenset(
    {"accuracy", "mfu", "tested_share", "hidden_share", "sufficiency", "generation", "width", "active_links"}
)
"""Last parts of names of which more is better."""
LOW = frozenset(
    {
        "latency", "graph_latency", "step_time", "save_time", "restore_time", "duration", "slowdown", "loss", "loss_ratio",
        "throttled_share", "replays", "failed", "pending", "last_seen", "temperature",
    }
)  # fmt: skip
"""Last parts of names of which less is better."""
NEVER = frozenset({"wrong_elements", "wrong_words", "wrong_products", "mismatches", "uncorrectable_volatile"})
"""Counts of what must not be at all."""
MUST_BE_TRUE = frozenset({"access", "loss_finite", "identical"})
LEAST_TESTED = 0.9
LONGEST_LATENCY_S = 1.0
REHEARSAL = "rehearsal"
"""The pack that asks only whether a share was tested at all: a rehearsal's machine is not under test."""


def sense(criterion: Criterion) -> Iterator[Finding]:
    """Operators and limits with which the criterion would find nothing wrong."""
    last = criterion.name.rpartition(".")[2]
    limit = criterion.value if criterion.expected is None else criterion.expected * criterion.fraction
    if isinstance(limit, str) or (isinstance(limit, bool) and criterion.operator != "eq"):
        return  # told by its type
    if (criterion.unit in RATES or last in HIGH) and criterion.operator in CEILINGS:
        yield about(criterion, criterion.operator, "more of it is better: this lets slow and missing through", "use ge")
    elif criterion.unit in RATES and criterion.operator == "eq" and not isinstance(limit, bool):
        yield about(criterion, criterion.operator, "no two measurements give the same rate", "use ge")
    elif last in LOW | NEVER and criterion.operator in FLOORS:
        yield about(criterion, criterion.operator, "less of it is better: this lets all that is bad through", "use le")
    elif last in NEVER:
        yield from _count(criterion)
    elif last == "tested_share" and _under(limit, LEAST_TESTED) and criterion.origin != REHEARSAL:
        yield about(criterion, limit, "memory that was not tested may be bad", f"ask for {LEAST_TESTED} and more")
    elif last.endswith("latency") and isinstance(limit, int | float) and limit > LONGEST_LATENCY_S:
        yield about(criterion, limit, "no message between GPUs takes that long", "write the latency in seconds")
    elif last in MUST_BE_TRUE and limit is False:
        yield about(criterion, limit, "this asks for the fault", "write true")


def _count(criterion: Criterion) -> Iterator[Finding]:
    """Nothing but none will do."""
    limit = criterion.value
    if criterion.value is None:
        yield about(
            criterion, criterion.name, "a count of wrong things has one limit, whatever others show", "use value: 0"
        )
    elif isinstance(limit, int | float) and not isinstance(limit, bool):
        most = 1 if criterion.operator == "lt" else 0
        if limit > most:
            yield about(criterion, limit, "a count of wrong things must be 0", "write eq and 0")


def _under(limit: Value, least: float) -> bool:
    return isinstance(limit, int | float) and not isinstance(limit, bool) and limit < least
