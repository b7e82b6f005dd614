"""Propose floors (lower limits) for a GPU model from the figures of accepted hosts, as a criteria pack that a person reviews.

The centre is the median of the medians of the parts, without outliers (`robust_level`: up to 40 % of the parts may be faulty).
Sigma combines the scatter from part to part with the scatter from run to run. The floor is the lower tolerance limit
of a normal distribution: with confidence CONFIDENCE, at least 1 - false_alarm of the healthy parts are above it
(Natrella, NBS Handbook 91, 1963; NIST/SEMATECH e-Handbook, section 7.2.6.3). Therefore few parts give a lower floor than many
parts. A figure for which less is better gets the upper tolerance limit instead.
"""

from __future__ import annotations

import json
import math
import re
import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any

import yaml

from fleet.history.database import History
from fleet.history.tables import WITHIN_KIND
from fleet.judge.baseline import OUTLIER_SIGMAS, direction, robust_level
from fleet.judge.evidence import from_benchmark
from fleet.judge.power import DETECTION_PROBABILITY, MAX_FALSE_ALARM, mad_sigma
from fleet.quantities import counted, quantity
from schemas.records import Value

CONFIDENCE = 0.95
MIN_PARTS = 5
"""With fewer parts, no outlier can be identified."""
MIN_RUNS = 3
"""Parts with fewer runs are left out."""
NEWEST_RUNS = 20
"""For each figure of a part, only this number of newest values is used."""
MAX_FOUND = 0.5
"""A floor is not proposed if it finds only slowdowns of more than this share of the centre: the figure is too noisy."""
_SCOPES = {(True, ""): "gpu", (True, "peer=*"): "peer", (False, ""): "host"}
"""Whether the figure is of a GPU, and the kind of scope below the part -> scope of the criterion."""


@dataclass(frozen=True, kw_only=True)
class Floor:
    """A proposed limit: a floor, or an upper limit for a figure for which less is better."""

    name: str
    stage: str
    scope: str
    where: Mapping[str, Value]
    unit: str
    operator: str
    """`ge`, or `le` for a figure for which less is better."""
    limit: float
    centre: float
    sigma: float
    """Standard deviation of a single measurement of a part around the centre, in `unit`."""
    parts: int
    left_out: int
    """Number of parts that are outliers."""
    values: int
    finds: float
    """Slowdown that the limit finds with the probability `Proposal.power`, as a share of the centre."""


@dataclass(frozen=True, kw_only=True)
class Proposal:
    """The proposed limits of a model."""

    model: str
    runs: int
    """Number of runs in which a host with this model was accepted."""
    power: float
    false_alarm: float
    floors: tuple[Floor, ...]
    left_out: tuple[str, ...]
    """Figures without a limit, and why."""


def propose(
    history: History, model: str, *, power: float = DETECTION_PROBABILITY, false_alarm: float = MAX_FALSE_ALARM
) -> Proposal:
    """Return limits for the benchmark figures of a model.

    Args:
        history: the history.
        model: GPU model, as NVML reports it.
        power: probability with which a limit finds the slowdown `Floor.finds`.
        false_alarm: probability that a healthy part fails a limit.
    """
    rows = history.rows(
        f"""select name, stage, settings, {WITHIN_KIND} as kind, serial <> '' as is_gpu, any_value(unit),
        (list(value order by "began" desc))[1:{NEWEST_RUNS}], count(distinct nonce)
        from figures where accepted and not duplicate and model = $model and value > 0 and isfinite(value)
        group by name, stage, settings, kind, is_gpu, host || ' ' || serial || ' ' || within
        order by name, stage, settings, kind, is_gpu""",
        {"model": model},
    )
    figures: dict[tuple[Any, ...], list[tuple[list[float], int]]] = defaultdict(list)
    for name, stage, settings, kind, is_gpu, unit, values, runs in rows:
        if from_benchmark(name):
            figures[(name, stage, settings, kind, is_gpu, unit)].append((values, runs))
    results = [_floor(key, parts, power, false_alarm) for key, parts in figures.items()]
    ((runs,),) = history.rows(
        "select count(distinct nonce) from figures where accepted and model = $model", {"model": model}
    )
    return Proposal(
        model=model,
        runs=runs,
        power=power,
        false_alarm=false_alarm,
        floors=tuple(item for item in results if isinstance(item, Floor)),
        left_out=tuple(item for item in results if isinstance(item, str)),
    )


def _floor(
    key: tuple[Any, ...], parts: Sequence[tuple[list[float], int]], power: float, false_alarm: float
) -> Floor | str:
    """Return the limit of a figure, or why there is none."""
    name, stage, settings, kind, is_gpu, unit = key
    label = f"{name} {settings} {stage}".replace("  ", " ")
    sign, scope, where = direction(name, unit), _SCOPES.get((is_gpu, kind)), _where(settings)
    measured = [values for values, runs in parts if runs >= MIN_RUNS]
    if not sign:
        return f"{label}: not known whether more or less is better"
    if scope is None or where is None:
        return f"{label}: no criterion can have this scope or setting"
    if len(measured) < MIN_PARTS:
        return (
            f"{label}: {counted(len(measured), 'part')} with {MIN_RUNS} or more runs, at least {MIN_PARTS} are needed"
        )
    medians = [statistics.median(values) for values in measured]
    level = robust_level(medians)
    healthy = [values for values, median in zip(measured, medians, strict=True)
               if abs(median - level.value) <= OUTLIER_SIGMAS * level.sigma or not level.sigma]  # fmt: skip
    sigma = math.hypot(level.sigma, statistics.median(map(mad_sigma, healthy)))
    limit = level.value - sign * tolerance_factor(level.n, 1 - false_alarm) * sigma
    finds = sign * (level.value - limit) / level.value + NormalDist().inv_cdf(power) * sigma / level.value
    if not sigma or limit <= 0 or finds > MAX_FOUND:
        noise = f"sigma is {sigma / level.value:.0%} of the median: too noisy for a floor"
        return f"{label}: {noise if sigma else 'all values are equal'}"
    return Floor(
        name=name, stage=stage, scope=scope, where=where, unit=unit, operator="ge" if sign > 0 else "le",
        limit=_rounded(limit, sign), centre=level.value, sigma=sigma, parts=level.n, left_out=level.left_out,
        values=sum(map(len, measured)), finds=finds,
    )  # fmt: skip


def tolerance_factor(count: int, share: float) -> float:
    """Return k such that, with confidence CONFIDENCE, at least `share` of a normal distribution is above mean - k * sigma.

    `mean` and `sigma` are estimates from `count` values.
    """
    z_share, z_confidence = NormalDist().inv_cdf(share), NormalDist().inv_cdf(CONFIDENCE)
    a = 1 - z_confidence**2 / (2 * (count - 1))
    b = z_share**2 - z_confidence**2 / count
    return (z_share + math.sqrt(max(0.0, z_share**2 - a * b))) / a


def _rounded(limit: float, sign: int) -> float:
    """Return the limit with four significant digits, rounded to the lenient side."""
    unit = 10.0 ** (math.floor(math.log10(limit)) - 3)
    digits = math.floor(limit / unit) if sign > 0 else math.ceil(limit / unit)
    return float(f"{digits * unit:.4g}")


def _where(settings: str) -> dict[str, Value] | None:
    """Return setting -> value, with numbers as numbers; None if a word of the text is not `name=value`."""
    where: dict[str, Value] = {}
    for word in settings.split():
        name, equals, text = word.partition("=")
        if not equals:
            return None
        try:
            value = json.loads(text)
        except ValueError:
            value = text
        where[name] = value if isinstance(value, str | int | float) else text
    return where


def pack_text(proposal: Proposal) -> str:
    """Return the proposal as the YAML text of a criteria pack."""
    used: set[str] = set()
    criteria = [
        {
            "id": _id(item, used), "name": item.name, "scope": item.scope, **({"stage": item.stage} if item.stage else {}),
            **({"where": dict(item.where)} if item.where else {}), "operator": item.operator, "value": item.limit,
            "unit": item.unit, "action": "inspect_hardware", "basis": "measured", "source": _source(proposal, item),
        }
        for item in proposal.floors
    ]  # fmt: skip
    document = {
        "schema": "rackproof.criteria/1",
        "summary": f"Proposed limits for {proposal.model}, from {counted(proposal.runs, 'run')} with accepted hosts",
        "criteria": criteria,
    }
    head = [
        "Proposed by `rackproof criteria propose`. This pack is not used until rackproof_criteria names it.",
        "Review each limit, remove the limits that you do not want to require, and check this file:",
        "rackproof criteria lint THIS_FILE; rackproof power RUN RUN RUN --criteria THIS_FILE.",
        f"The pack applies to every host of a run that names the pack: name it only for hosts with {proposal.model}.",
        *(f"No limit: {text}" for text in proposal.left_out),
    ]
    comments = "".join(f"# {' '.join(line.split())}\n" for line in head)
    return f"---\n{comments}{yaml.safe_dump(document, sort_keys=False, width=150, allow_unicode=True)}"


def _id(item: Floor, used: set[str]) -> str:
    words = [item.name, *(str(value) for value in item.where.values()), item.stage]
    base = "proposed-" + re.sub("[^a-z0-9]+", "-", " ".join(words).lower()).strip("-")
    name, number = base, 2
    while name in used:
        name, number = f"{base}-{number}", number + 1
    used.add(name)
    return name


def _source(proposal: Proposal, item: Floor) -> str:
    outliers = f", {counted(item.left_out, 'outlier')} left out" if item.left_out else ""
    centre = f"median {quantity(item.centre, item.unit)}, sigma {item.sigma / item.centre:.2%}"
    found = f"finds a loss of {item.finds:.1%} with probability {proposal.power:g}"
    return (
        f"{counted(proposal.runs, 'run')} with accepted hosts, {item.parts} parts of {proposal.model}{outliers}: {centre}; "
        f"this limit fails a healthy part with probability {proposal.false_alarm:g}, and {found}"
    )


def models(history: History) -> Iterable[str]:
    """Return the GPU models with figures of accepted hosts."""
    return [
        row[0] for row in history.rows("select distinct model from figures where accepted and model <> '' order by 1")
    ]
