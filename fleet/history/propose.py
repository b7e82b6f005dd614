"""Propose floors (lower limits) for a GPU model from the figures of accepted hosts, as a criteria pack that a person reviews.

The centre is the mean of the hosts, where a host has the mean of the medians of its parts. A few parts may be outliers and are
left out (MAX_LEFT_OUT). With more of them there is no limit: the runs were accepted, so the parts may be healthy parts of another
kind, which the limit would reject.

Sigma combines the scatter from host to host, from part to part of one host, and from run to run. The floor is the lower tolerance
limit of a normal distribution: with confidence CONFIDENCE, at least 1 - false_alarm of the healthy parts are above it
(Natrella, NBS Handbook 91, 1963; NIST/SEMATECH e-Handbook, section 7.2.6.3). Parts of one host share its cooling, power and
settings, so the number of hosts is the sample size. Therefore few hosts give a lower floor than many hosts. A figure for which
less is better gets the upper tolerance limit instead.
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
from fleet.judge.baseline import direction, robust_level
from fleet.judge.evidence import from_benchmark
from fleet.judge.power import DETECTION_PROBABILITY, MAX_FALSE_ALARM, mad_sigma
from fleet.quantities import counted, quantity
from schemas.records import Value

CONFIDENCE = 0.95
MIN_HOSTS = 5
"""With fewer hosts, the scatter from host to host is hardly known."""
MAX_LEFT_OUT = 0.05
"""A floor is not proposed if more than this share of the parts are outliers."""
MIN_RUNS = 3
"""Parts with fewer runs are left out."""
NEWEST_RUNS = 20
"""For each figure of a part, only this number of newest values is used."""
MAX_FOUND = 0.5
"""A floor is not proposed if it finds only slowdowns of more than this share of the centre: the figure is too noisy."""
_SCOPES = {(True, ""): "gpu", (True, "peer=*"): "peer", (False, ""): "host"}
"""Whether the figure is of a GPU, and the kind of scope below the part -> scope of the criterion."""


@dataclass(frozen=True, kw_only=True)
class Part:
    """The values of one figure of one part."""

    host: str
    values: Sequence[float]
    runs: int
    """Number of runs, which may exceed the number of values (NEWEST_RUNS)."""


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
    hosts: int
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
        (list(value order by "began" desc))[1:{NEWEST_RUNS}], count(distinct nonce), host
        from figures where accepted and not duplicate and model = $model and value > 0 and isfinite(value)
        group by name, stage, settings, kind, is_gpu, host, serial || ' ' || within
        order by name, stage, settings, kind, is_gpu""",
        {"model": model},
    )
    figures: dict[tuple[Any, ...], list[Part]] = defaultdict(list)
    for name, stage, settings, kind, is_gpu, unit, values, runs, host in rows:
        if from_benchmark(name):
            figures[(name, stage, settings, kind, is_gpu, unit)].append(Part(host=host, values=values, runs=runs))
    results = [floor_of(key, parts, power, false_alarm) for key, parts in figures.items()]
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


def floor_of(key: tuple[Any, ...], parts: Sequence[Part], power: float, false_alarm: float) -> Floor | str:
    """Return the limit of a figure, or why there is none."""
    name, stage, settings, kind, is_gpu, unit = key
    label = f"{name} {settings} {stage}".replace("  ", " ")
    sign, scope, where = direction(name, unit), _SCOPES.get((is_gpu, kind)), _where(settings)
    measured = [part for part in parts if part.runs >= MIN_RUNS]
    hosts = len({part.host for part in measured})
    if not sign:
        return f"{label}: not known whether more or less is better"
    if scope is None or where is None:
        return f"{label}: no criterion can have this scope or setting"
    if hosts < MIN_HOSTS:
        return f"{label}: {counted(hosts, 'host')} with {MIN_RUNS} or more runs, at least {MIN_HOSTS} are needed"
    level = robust_level([statistics.median(part.values) for part in measured])
    if level.left_out > MAX_LEFT_OUT * len(measured):
        return (
            f"{label}: {level.left_out} of {len(measured)} parts differ too much from the others, for example because they have "
            f"another part number; at most {MAX_LEFT_OUT:.0%} may be left out"
        )
    kept = sorted(measured, key=lambda part: abs(statistics.median(part.values) - level.value))[: level.n]
    of_host: dict[str, list[float]] = defaultdict(list)
    for part in kept:
        of_host[part.host].append(statistics.median(part.values))
    centre, between = _centre_and_sigma([*of_host.values()])
    sigma = math.hypot(between, statistics.median(mad_sigma(part.values) for part in kept))
    limit = centre - sign * tolerance_factor(len(of_host), 1 - false_alarm) * sigma
    finds = sign * (centre - limit) / centre + NormalDist().inv_cdf(power) * sigma / centre
    if not sigma or limit <= 0 or finds > MAX_FOUND:
        noise = f"sigma is {sigma / centre:.0%} of the mean of {counted(len(of_host), 'host')}: too noisy for a floor"
        return f"{label}: {noise if sigma else 'all values are equal'}"
    return Floor(
        name=name, stage=stage, scope=scope, where=where, unit=unit, operator="ge" if sign > 0 else "le",
        limit=_rounded(limit, sign), centre=centre, sigma=sigma, hosts=len(of_host), parts=level.n, left_out=level.left_out,
        values=sum(len(part.values) for part in measured), finds=finds,
    )  # fmt: skip


def _centre_and_sigma(of_hosts: Sequence[Sequence[float]]) -> tuple[float, float]:
    """Return the mean of the means of the hosts, and the standard deviation of a part around it.

    Each item of `of_hosts` has the values of the parts of a host. The variance of the means of the hosts contains the variance
    within a host, divided by the number of its parts.
    """
    means = [statistics.fmean(values) for values in of_hosts]
    squares = sum((value - mean) ** 2 for mean, values in zip(means, of_hosts, strict=True) for value in values)
    freedom = sum(map(len, of_hosts)) - len(of_hosts)
    within = squares / freedom if freedom else 0.0
    share = 1 - 1 / statistics.harmonic_mean([len(values) for values in of_hosts])
    return statistics.fmean(means), math.sqrt(statistics.variance(means) + share * within)


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
    centre = f"mean {quantity(item.centre, item.unit)}, sigma {item.sigma / item.centre:.2%}"
    found = f"finds a loss of {item.finds:.1%} with probability {proposal.power:g}"
    return (
        f"{counted(proposal.runs, 'run')} with accepted hosts, {item.parts} parts of {proposal.model} on {item.hosts} hosts"
        f"{outliers}: {centre}; with {CONFIDENCE:.0%} confidence, this limit fails a healthy part with probability at most "
        f"{proposal.false_alarm:g}, and it {found}"
    )


def models(history: History) -> Iterable[str]:
    """Return the GPU models with figures of accepted hosts."""
    return [
        row[0] for row in history.rows("select distinct model from figures where accepted and model <> '' order by 1")
    ]
