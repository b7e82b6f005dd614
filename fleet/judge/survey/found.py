"""What a first look finds of a host, and how it is held against the criteria."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from fleet.judge.criteria import Criterion
from fleet.judge.evidence import HostView
from fleet.judge.row import Row
from schemas.records import Observation, Value
from schemas.reports import PASS, Verdict
from schemas.scopes import Scope

MOST_KEPT = 50_000
"""Outcomes that are remembered; then it begins anew."""

Key = tuple[Any, ...]


@dataclass(kw_only=True, slots=True)
class Check:
    """One series of a benchmark's observations against a limit."""

    criterion: Criterion
    limit: Value
    places: tuple[int, ...]
    chosen: int
    template: Verdict
    row: Row
    fast: bool
    """Whether the row takes numbers that pass as they are."""


@dataclass(kw_only=True)
class Program:
    """What is done with the observations of hosts that made the same ones."""

    plain: bool = True
    checks: list[Check] = field(default_factory=list)
    claims: list[tuple[Criterion, Any, tuple[int, ...], Verdict]] = field(default_factory=list)
    same: list[tuple[Criterion, tuple[int, ...], Verdict]] = field(default_factory=list)
    statuses: Counter[str] = field(default_factory=Counter)
    """Of what the plan expects, but for what hosts exchange with each other; empty for what is missing."""
    figures: list[tuple[Any, str, int]] = field(default_factory=list)
    """What the fleet is measured by: its key, scope, and which observation."""
    ranks: list[tuple[tuple[str, str], str, int]] = field(default_factory=list)
    kinds: tuple[Observation, ...] = ()
    """One observation of each name, stage and status, digests apart."""


@dataclass(kw_only=True)
class Looked:
    """What one host brought, as long as it is not known whether its gang is in order."""

    view: HostView
    program: Program = field(default_factory=Program)
    partners: int = 0
    """Observations that it made with other hosts, as the plan wants them."""
    passed: list[tuple[Verdict, Value]] = field(default_factory=list)
    checked: list[tuple[Check, Value]] = field(default_factory=list)
    values: Sequence[Value] = ()
    """Of what its benchmarks observed, as the program numbers them."""
    figures: list[tuple[Any, str, float]] = field(default_factory=list)
    ranks: list[tuple[tuple[str, str], str, Value]] = field(default_factory=list)
    outcomes: list[list[Verdict]] = field(default_factory=list)
    claims: list[tuple[Criterion, Any, float, str, Verdict]] = field(default_factory=list)
    same: list[tuple[str, Any, Value, str, Verdict]] = field(default_factory=list)
    silent: list[Key] = field(default_factory=list)
    alike: list[tuple[str, Any, str, Value]] = field(default_factory=list)
    """Criterion, group, what a part of it is called, and value."""


def own_scope(view: HostView, template: Verdict) -> str:
    """The scope of the verdict on this host: its own gang's."""
    return f"gang={view.host.gang}" if Scope.parse(template.scope).is_gang else template.scope


def template_of(view: HostView, criterion: Criterion, seen: Observation) -> Verdict:
    """A pass of that criterion, for whichever host."""
    return Verdict(
        host=view.host.name,
        scope=seen.scope,
        name=seen.name,
        stage=seen.stage,
        params=seen.params,
        verdict=PASS,
        criterion=criterion.id,
        value=seen.value,
        operator=criterion.operator if not criterion.same_as_fleet else "eq",
        unit=criterion.unit,
        reason="",
        source=criterion.source,
        basis=criterion.basis,
    )
