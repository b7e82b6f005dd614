"""Render which faults each criterion detects: as text for a terminal, and as the tables of docs/criteria.md."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from fleet.judge.criteria import Criterion
from fleet.judge.detection import (
    ABSOLUTE,
    LOGIC,
    MIN_PARTS,
    Detection,
    settings_text,
)
from fleet.judge.evidence import from_benchmark
from fleet.judge.power import DETECTION_PROBABILITY, MAX_FALSE_ALARM
from fleet.quantities import number, quantity
from fleet.report.detection_logic import CONFIDENCE, Stages, logic_false_alarms, logic_groups, not_judged, unmeasured
from fleet.report.formatting import clean
from fleet.report.titles import benchmark_title
from schemas.catalogue import BENCHMARKS

TOO_FEW = "too few"
"""First words of a cell that states no fault, because fewer than MIN_PARTS parts were measured. The number of parts follows."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """The smallest fault that a criterion detects in a figure, for each GPU model. All values have the same settings."""

    profiles: tuple[str, ...]
    """The profiles that measure the figure with these settings."""
    stage: str
    test: str
    """Title of the benchmark, or `Readings`."""
    criterion: str
    name: str
    cells: Mapping[str, str]
    """GPU model -> text of its cell, such as `5.9 % less (14, 22)` (`_cell`)."""

    @property
    def is_unknown(self) -> bool:
        """Return whether no cell states a fault, because too few parts of every GPU model were measured."""
        return all(cell.startswith(TOO_FEW) for cell in self.cells.values())


def rows(detections: Sequence[Detection], profiles: Mapping[str, Sequence[Stages]]) -> list[Row]:
    """Return a row for each criterion, figure and set of settings, except criteria that find faults by logic (LOGIC).

    The rows are sorted by stage, then in the order of the benchmarks in the catalogue.

    Args:
        detections: from `fleet.judge.detection`.
        profiles: name of a profile -> its stages, in several variants if the settings depend on the planned duration. A row
            names the profiles that measure the figure with the settings of the row; there may be none.
    """
    groups: dict[tuple[str, str, str, str], list[Detection]] = defaultdict(list)
    for item in detections:
        if item.kind != LOGIC:
            groups[(item.key.stage, item.key.settings, item.key.criterion, _figure(item))].append(item)
    result = []
    for (stage, settings, criterion, name), members in groups.items():
        models = sorted({item.key.model for item in members})
        result.append(
            Row(
                profiles=_profiles(stage, settings, name, profiles),
                stage=stage,
                test=benchmark_title(name.split(".")[0]) if from_benchmark(name) else "Readings",
                criterion=criterion,
                name=name,
                cells={model: _cell([item for item in members if item.key.model == model]) for model in models},
            )
        )
    order = {benchmark_title(name): position for position, name in enumerate(BENCHMARKS)}
    return sorted(result, key=lambda row: (row.stage, order.get(row.test, len(order)), row.name, row.criterion))


def _figure(item: Detection) -> str:
    """Return the name of the figure, with `*` in place of the operation of a collective: `collective.*.busbw`."""
    parts = item.key.name.split(".")
    return ".".join((parts[0], "*", *parts[2:])) if parts[0] == "collective" and len(parts) > 2 else item.key.name


def _profiles(stage: str, settings: str, name: str, profiles: Mapping[str, Sequence[Stages]]) -> tuple[str, ...]:
    """Return the profiles that measure the figure `name` with these settings. A reading has no settings: return all profiles."""
    benchmark = name.split(".")[0]
    if not settings:
        return tuple(profiles)
    return tuple(
        profile
        for profile, choices in profiles.items()
        if any(
            benchmark in stages.get(stage, {}) and settings_text(benchmark, stages[stage][benchmark]) == settings
            for stages in choices
        )
    )


def _cell(items: Sequence[Detection]) -> str:
    """Return the smallest fault that is detected, then the number of parts and the number of values in brackets.

    Several `items` differ in their parameters, or in the operation of a collective. The text is that of the item
    with the largest fault. But items with too many false alarms take precedence over all others. An item without a fault has too
    few parts, because no item is of the kind LOGIC.
    """
    stated = [item for item in items if item.is_stated]
    if not stated:
        parts = max(item.parts for item in items)
        return f"{TOO_FEW}: {parts}"
    worst = max(stated, key=lambda item: (not item.is_reliable, item.fault if item.fault is not None else math.inf))
    text = fault_text(worst)
    if not worst.is_reliable:
        text += f"; false alarms {probability_text(worst.false_alarm or 0.0)}"
    return f"{text} ({worst.parts}, {worst.values})"


def fault_text(item: Detection) -> str:
    """Return the smallest fault as text: `5.9 % less`, `4.3 times as much`, `12 °C more`.

    Return `nothing` for a floor (lower limit) that finds only faults of 100 % or more.
    """
    fault, is_floor = item.fault, item.operator in ("ge", "gt")
    if fault is None:
        return "any value beyond the limit"
    if item.kind == ABSOLUTE:
        return f"{quantity(_rounded(fault), item.unit)} {'less' if is_floor else 'more'}"
    if is_floor:
        return "nothing" if fault >= 1 else f"{number(_rounded(fault * 100), 3)} % less"
    return (
        f"{number(_rounded(fault * 100), 3)} % more" if fault < 1 else f"{number(_rounded(1 + fault), 3)} times as much"
    )


def _rounded(value: float) -> float:
    """Return the value rounded up to three significant digits, so that a fault or a probability is not understated."""
    if value <= 0:
        return 0.0
    step = 10.0 ** (math.floor(math.log10(value)) - 2)
    return math.ceil(value / step - 1e-9) * step


def probability_text(share: float) -> str:
    """Return a probability in percent, with two significant digits."""
    return "< 0.0001 %" if share < 1e-6 else f"{number(_rounded(share * 100), 2)} %"


ASSUMPTIONS = (
    f"For each criterion: the smallest fault that it finds with a probability of {DETECTION_PROBABILITY:.0%}, as the difference "
    "from the mean of the healthy parts. In brackets: the number of parts, then the number of their values in all runs. "
    f"`nothing`: no loss is found reliably, however large. `{TOO_FEW}: 2`: only 2 parts were measured; for fewer than "
    f"{MIN_PARTS}, no fault is stated. `false alarms`: the probability that a further healthy part fails. It is shown only above "
    f"{MAX_FALSE_ALARM:.1%}. A normal distribution is assumed, with quantiles of Student's t: with few parts, the stated faults "
    "and probabilities are large. GPUs of one host count as independent."
)


def render_detection(detections: Sequence[Detection]) -> str:
    """Return which faults every criterion detects, as text for a terminal."""
    lines = ["What each criterion detects", ASSUMPTIONS, ""]
    for row in rows(detections, {}):
        cells = "; ".join(f"{model}: {cell}" if model else cell for model, cell in row.cells.items())
        stage = "" if row.stage in ("", "benchmark") else f" ({row.stage})"
        lines.append(f"{row.criterion}  {row.name}{stage}  {cells}")
    values, failed, most = logic_false_alarms(detections)
    if values:
        lines += ["", "Found by logic. Each line states which values are found, then the criteria that find them:"]
        for title, limits in logic_groups(detections).items():
            lines.append(f"- {title}: {', '.join(_with_limit(name, limit) for name, limit in limits.items())}")
        lines.append(f"{failed} of {values} healthy values failed these criteria" + _bound(most))
    return "\n".join(clean(line, 20_000) for line in lines)


def _with_limit(name: str, limit: str) -> str:
    return f"{name} ({limit})" if limit else name


def _bound(most: float) -> str:
    return (
        f" (so with {CONFIDENCE:.0%} confidence, at most {probability_text(most)} of healthy values fail)."
        if most < 1
        else "."
    )


def markdown_detection(
    detections: Sequence[Detection], profiles: Mapping[str, Sequence[Stages]], criteria: Sequence[Criterion]
) -> str:
    """Return the table and the lists of docs/criteria.md, without the rows whose settings no profile has."""
    table = [row for row in rows(detections, profiles) if row.profiles]
    models = sorted({model for row in table for model in row.cells})
    lines = [
        f"{ASSUMPTIONS} If a criterion judges several sizes, data types or collective operations, the cell is for the worst of "
        "them.",
        "",
        f"| profile | test | criterion | {' | '.join(models)} |",
        f"|---|---|---|{'---|' * len(models)}",
    ]
    for row in [row for row in table if not row.is_unknown]:
        names = "all" if len(row.profiles) == len(profiles) else ", ".join(row.profiles)
        stage = "" if row.stage in ("", "benchmark") else f", {row.stage}"
        cells = " | ".join(row.cells.get(model, "") for model in models)
        lines.append(f"| {names} | {row.test}{stage} | `{row.criterion}` | {cells} |")
    values, failed, most = logic_false_alarms(detections)
    lines += [
        "",
        "**Found by logic**: these criteria need no statistics. Each line states which values are found, then the criteria "
        "that find them. After an id: the limit that a healthy value meets. It is left out if it is a text, or if parts have "
        "different limits.",
        "",
    ]
    for title, limits in logic_groups(detections, criteria).items():
        lines.append(f"- {title}: {', '.join(_code(name, limit) for name, limit in limits.items())}")
    lines += [
        "",
        "The false alarms of these criteria were counted: "
        f"{failed} of {values} healthy values in the runs failed{_bound(most)}",
        "These criteria find a fault only if it changes the value that is read. For example, a digest (a checksum of the results "
        "of a computation) shows only faults during that computation.",
        "",
        "**Nothing is stated** about the following criteria and benchmarks. Each line begins with the reason. In brackets: the "
        "stage of the benchmark, if it is not `benchmark`.",
        "",
    ]
    shown = {row.criterion for row in table if not row.is_unknown} | {
        item.key.criterion for item in detections if item.kind == LOGIC
    }
    unknown = sorted({item.key.criterion for item in detections} - shown)
    if unknown:
        names = ", ".join(f"`{name}`" for name in unknown)
        lines.append(f"- fewer than {MIN_PARTS} parts were measured with the settings of a profile: {names}")
    lines += [
        f"- no run measured the benchmark with the settings of profile `{name}`: {', '.join(tests)}"
        for name, tests in unmeasured(detections, profiles).items()
    ]
    for reason, ids in not_judged(criteria, detections).items():
        lines.append(f"- {reason}: {', '.join(f'`{name}`' for name in ids)}")
    return "\n".join(lines) + "\n"


def _code(name: str, limit: str) -> str:
    return f"`{name}` {limit}" if limit else f"`{name}`"
