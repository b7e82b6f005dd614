"""Find figures that became worse because of other software or firmware than when the parts were accepted.

A new driver, NCCL, torch or firmware, or a new version of Rackproof, can change a figure on all parts. If most parts on which the
same versions changed miss the limit from the baseline, no single part is at fault. The verdicts remain failures, with the kind
`software` and the action `configure`. A part that is slower than the others still has a failure of its own.

If most parts without a change miss the limit too, they have another cause, such as warm air, and the change explains nothing.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from fleet.judge.baseline import outcome_params
from fleet.judge.criteria import Criterion
from fleet.judge.evaluate import evaluate
from fleet.judge.evidence import RACKPROOF, from_benchmark
from fleet.judge.finding import FLOORS
from fleet.judge.host_view import HostView
from fleet.judge.outliers import FleetFigures
from fleet.quantities import counted, finite
from schemas.records import Value
from schemas.reports import FAIL, PASS, Verdict, VerdictKind
from schemas.stages import GANG

MIN_PARTS = 3
"""With fewer parts, it is not known whether the change or a fault of a part is the cause."""
_SUFFIXES = ("version", "firmware", "release")
_WITHOUT_EFFECT = ("storage.", "optics.", "host.dimm.", "bmc.")
"""Prefixes of versions that the compared figures do not depend on."""
_MAX_NAMED = 3
_MAX_CHARACTERS = 100

_Change = tuple[tuple[str, str, str], ...]
"""Component, earlier and present version of each component that has another version than when the host was accepted."""
_NO_CHANGE: _Change = ()
_Key = tuple[_Change, str, str, str, tuple[tuple[str, Value], ...]]
"""Change, id of the criterion, name and stage of the figure, and its settings."""


@dataclass(frozen=True)
class _Loss:
    """A figure that most parts miss."""

    median: float
    """Median of the figure, as a share of its limit."""
    missed: int
    parts: int


class SoftwareChanges:
    """The figures of parts as shares of their limits, by what changed in their software since they were accepted.

    The objects of several hosts can be merged (`update`) in any order. Call `complete` after the last merge.
    """

    def __init__(self) -> None:
        self._shares: dict[_Key, list[float]] = defaultdict(list)
        self._losses: dict[_Key, _Loss] = {}

    def add(self, view: HostView, figures: FleetFigures) -> None:
        """Add a host. `figures` is only passed on: a criterion that compares with a baseline does not compare with the fleet."""
        change = changed_versions(view)
        if change is None:
            return
        for criterion in filter(_is_floor_of_figure, view.criteria().values()):
            for verdict in evaluate(view, criterion, figures):
                if verdict.verdict in (PASS, FAIL) and (share := _share(verdict)) is not None:
                    self._shares[_key(change, verdict)].append(share)

    def update(self, other: SoftwareChanges) -> None:
        """Add the hosts of another object."""
        for key, shares in other._shares.items():
            self._shares[key] += shares

    def complete(self) -> None:
        """Find the figures that most parts miss. The shares are then removed, to save memory."""
        for key, shares in self._shares.items():
            if len(shares) >= MIN_PARTS and (median := statistics.median_high(shares)) < 1:
                self._losses[key] = _Loss(median, sum(share < 1 for share in shares), len(shares))
        self._shares.clear()

    def explain(self, change: _Change, criterion: Criterion, verdict: Verdict) -> str:
        """Return which change explains the failure; empty if none does.

        A change does not explain that a part is slower than the median part by more than the criterion allows.
        """
        share, rule = _share(verdict), criterion.baseline
        loss = self._losses.get(_key(change, verdict))
        if loss is None or share is None or rule is None or share < rule.fraction * loss.median:
            return ""
        if _key(_NO_CHANGE, verdict) in self._losses:
            return ""
        return f"{loss.missed} of {loss.parts} such figures are below their limits since {_describe(change)}"


def with_changed_software(view: HostView, verdicts: Sequence[Verdict], changes: SoftwareChanges) -> list[Verdict]:
    """Return the verdicts on one host. Failures that a change of the software explains get the kind `software`."""
    change, criteria = changed_versions(view), view.criteria()
    if not change:
        return list(verdicts)

    def explained(verdict: Verdict) -> Verdict:
        criterion = criteria.get(verdict.criterion)
        if verdict.verdict != FAIL or criterion is None or not _is_floor_of_figure(criterion):
            return verdict
        why = changes.explain(change, criterion, verdict)
        if not why:
            return verdict
        reason = f"{verdict.reason}; {why}"
        return replace(verdict, reason=reason, detail=why, kind=VerdictKind.SOFTWARE, action="configure", severity="")

    return [explained(verdict) for verdict in verdicts]


def changed_versions(view: HostView) -> _Change | None:
    """Return the versions of the host that differ from those with which it was accepted; None if this is not known."""
    host = view.evidence.baseline.host if view.evidence.baseline else None
    if not (view.plan.baseline and host and view.has_record):
        return None
    # Earlier versions of Rackproof did not accept the versions of the ranks' software, so these may have changed, too.
    return tuple(_changes(view, host.versions)) or (_NO_CHANGE if RACKPROOF in host.versions else None)


def _changes(view: HostView, accepted: Mapping[str, str]) -> Iterator[tuple[str, str, str]]:
    software = view.evidence.measuring_software()
    before: dict[str, set[str]] = defaultdict(set)
    for name, version in accepted.items():
        before[name.partition("[")[0]].add(version)
    for name in sorted(before):
        if name not in software and (name.startswith(_WITHOUT_EFFECT) or not name.endswith(_SUFFIXES)):
            continue
        now = {software[name]} if name in software else set(map(str, view.observations.last_values(name).values()))
        if now and now != before[name]:
            yield name, _join(before[name]), _join(now)


def _join(versions: Iterable[str]) -> str:
    return ", ".join(sorted(versions))[:_MAX_CHARACTERS]


def _is_floor_of_figure(criterion: Criterion) -> bool:
    rule = criterion.baseline
    return rule is not None and rule.change is None and criterion.operator in FLOORS and from_benchmark(criterion.name)


def _share(verdict: Verdict) -> float | None:
    """Return the value as a share of its limit; None for figures of several hosts.

    All hosts share the network. If it has a fault, their figures become worse together, whatever their software.
    """
    if verdict.stage == GANG:
        return None
    value, limit = finite(verdict.value), finite(verdict.limit)
    return None if value is None or not limit else value / limit


def _key(change: _Change, verdict: Verdict) -> _Key:
    outcomes = outcome_params(verdict.name)
    settings = sorted((name, value) for name, value in verdict.params.items() if name not in outcomes)
    return change, verdict.criterion, verdict.name, verdict.stage, tuple(settings)


def _describe(change: _Change) -> str:
    texts = [f"{name} changed from {before} to {now}" for name, before, now in change[:_MAX_NAMED]]
    more = [counted(len(change) - _MAX_NAMED, "more version")] if len(change) > _MAX_NAMED else []
    return ", ".join([*texts, *more])
