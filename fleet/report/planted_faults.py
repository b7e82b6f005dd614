"""Render the probabilities of finding a planted fault (a GPU returns wrong bits without an error) as Markdown tables.

The tables are for a terminal and for docs/criteria.md.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from fleet.judge.planted_faults import FOUND, PATTERNS, RATE, Comparison
from fleet.report.formatting import clean


def render_planted_faults(items: Sequence[Comparison]) -> Iterator[str]:
    """Yield the lines of two tables: how likely a digest misses each pattern of wrong bits, and how likely tests find a fault."""
    yield (
        "Faults in the second table: `always`: every repetition has the same wrong bits. `1 in 10⁶`: an element, or a whole "
        f"repetition, is wrong with a probability p of {RATE:g}. `99 %`: the smallest p with which the fault is found with a "
        f"probability of {FOUND:.0%}."
    )
    yield ""
    yield "| pattern of wrong bits | digest stays the same with a probability of at most |"
    yield "|---|---|"
    for pattern, bound in PATTERNS.items():
        yield f"| {pattern} | {f'{bound:.1e}' if bound else '0'} |"
    yield ""
    yield (
        "| GPU | profile | test | results compared | elements each | always, GPU alone | always, three equal GPUs | "
        "1 in 10⁶ elements | 1 in 10⁶ repetitions | 99 %: per element | 99 %: per repetition |"
    )
    yield f"|---|---|---|{'---:|' * 8}"
    for item in items:
        if item.repetitions is None:
            continue
        cells = [
            clean(item.model),
            item.profile,
            f"{item.benchmark} {item.case}",
            f"{item.repetitions:.0f}",
            f"{item.elements:.3g}",
            _probability(item.always_alone),
            _probability(item.always_compared),
            *(_probability(item.found(RATE, per_element)) for per_element in (True, False)),
            *(_rate(item.smallest_rate(per_element)) for per_element in (True, False)),
        ]
        yield f"| {' | '.join(cells)} |"
    unmeasured: dict[tuple[str, str], list[str]] = {}
    for item in items:
        if item.repetitions is None:
            unmeasured.setdefault((item.model, item.profile), []).append(f"{item.benchmark} {item.case}")
    if unmeasured:
        yield ""
    for (model, profile), names in unmeasured.items():
        tests = ", ".join(names)
        why = "because no run shows how often these tests repeat their computation"
        yield f"- {clean(model)}, {profile}: not in the table, {why}: {tests}"


def _probability(value: float | None) -> str:
    if value is None:
        return ""
    if value == 0:
        return "not found"
    if 1 > value > 1 - 1e-6:
        return "> 99.9999 %"
    return f"{100 * value:.3g} %" if value < 0.99 else f"{100 * value:.6g} %"


def _rate(value: float | None) -> str:
    return "" if value is None else f"{value:.1e}"
