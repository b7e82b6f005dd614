"""Render detection power (the smallest slowdown that each floor, a lower limit, finds) as tables for a terminal."""

from __future__ import annotations

from collections.abc import Sequence

from fleet.judge.power import (
    DETECTION_PROBABILITY,
    MAX_FALSE_ALARM,
    MIN_VALUES_FOR_OUTLIERS,
    Gate,
    Power,
    Repeatability,
)
from fleet.quantities import number, quantity
from fleet.report.formatting import clean, params_text
from schemas.stages import BENCHMARK

NOTHING = "nothing"


def render_power(power: Power) -> str:
    """Return what each floor can detect, how well each figure repeats from run to run, and the assumptions."""
    parts = [
        clean(f"{len(power.runs)} runs: {', '.join(power.runs)}"),
        _table(
            ("figure", "settings", "criterion", "n", "mean", "sigma", "floor", "false alarm", "finds", "could find"),
            [_gate(gate) for gate in power.gates],
        )
        if power.gates
        else "No criterion with a numeric floor judged these runs.",
        "n: number of values, one per part and run. sigma: scatter from run to run and from part to part together, as a share\n"
        "of the mean. Each of the two is estimated from a median absolute deviation. "
        f"For fewer than {MIN_VALUES_FOR_OUTLIERS} runs or parts,\n"
        "the standard deviation replaces this estimate if it is larger.\n"
        "false alarm: probability that a healthy part fails. finds: smallest slowdown that this floor finds with "
        f"{DETECTION_PROBABILITY:.0%}\n"
        "probability. could find: the same for the best possible floor, the highest at which at most "
        f"{MAX_FALSE_ALARM:.1%} of the\n"
        "healthy parts fail. The values are assumed to be normally distributed, because so few runs do not show the tails.",
        _table(
            ("figure", "settings", "parts", "(max - min) / median, worst part", "worst part"),
            [_repeat(item) for item in power.repeats if item.group],
        ),
        _table(
            ("group", "worst repeatability", "figure"),
            [
                (group, _percent(item.worst), f"{item.name} {params_text(item.params)}")
                for group, item in power.worst.items()
            ],
        ),
    ]
    if power.left_out:
        parts.append(
            f"Floors left out, because no part has values from three or more runs: {clean(', '.join(power.left_out))}"
        )
    return "\n\n".join(part for part in parts if part)


def _gate(gate: Gate) -> tuple[str, ...]:
    return (
        gate.name,
        _settings(gate),
        gate.criterion,
        str(gate.n),
        quantity(gate.mean, gate.unit),
        _percent(gate.sigma / gate.mean),
        quantity(gate.limit, gate.unit),
        _probability(gate.false_alarm),
        NOTHING if gate.finds is None else _percent(gate.finds),
        _percent(gate.could_find),
    )


def _repeat(item: Repeatability) -> tuple[str, ...]:
    return item.name, _settings(item), str(item.parts), _percent(item.worst), item.where


def _settings(item: Gate | Repeatability) -> str:
    text = params_text(item.params)
    return text if item.stage == BENCHMARK else f"{text} ({item.stage})"


def _percent(share: float) -> str:
    return f"{number(share * 100, 3)} %"


def _probability(share: float) -> str:
    """Return a probability as a percentage. Below 0.0001 % return `< 0.0001 %`: so few runs cannot show a smaller one."""
    return "< 0.0001 %" if share < 1e-6 else _percent(share)


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return columns two spaces apart, with text from hosts cleaned."""
    if not rows:
        return ""
    lines = [columns, *([clean(cell, 80) for cell in row] for row in rows)]
    widths = [max(len(line[index]) for line in lines) for index in range(len(columns))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines
    )
