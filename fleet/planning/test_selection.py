"""Select the tests of a profile that fit a time budget, by risk × coverage ÷ cost. Equal inputs give equal selections.

A test is a benchmark in a stage. Its risk is how often it failed on these hosts, and grows with the time since its last run.
Its coverage is the number of kinds of parts that it exercises; a kind counts less if tests that are already selected exercise
it. Its cost is the time that it took in earlier runs. The approach is from SuperBench's selector (USENIX ATC 2024); the
constants are Rackproof's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from fleet.quantities import counted
from schemas.catalogue import BENCHMARKS
from schemas.durations import END_S, START_S
from schemas.errors import UsageError
from schemas.plans import BenchmarkChoice, BudgetSelection, Plan
from schemas.reports import LineKind, SummaryLine
from schemas.stages import BENCHMARK
from schemas.times import epoch_seconds

Key = tuple[str, str]
"""Stage and benchmark."""

LAUNCH_S = START_S + END_S
"""Time for the ranks of a stage to start and to end."""
LEAST_S = 0.1
"""Least cost of a test, in seconds. For example, a test that needs several GPUs takes no time on a single one."""
WEEK_S = 7 * 86400.0
"""Each week since the last run of a test adds as much risk as the test had right after that run."""
NEVER_RUN_S = 12 * WEEK_S
"""The age of a test that never ran is the time since the oldest known run, plus these seconds."""


@dataclass(frozen=True, kw_only=True)
class PastRun:
    """An earlier run, restricted to the hosts that are planned now."""

    run_id: str
    began: str
    """UTC, ISO 8601."""
    profile: str
    measured: Mapping[Key, int] = field(default_factory=dict)
    """Number of hosts on which the test was measured."""
    findings: Mapping[Key, int] = field(default_factory=dict)
    """Number of hosts on which a check of the test failed."""
    cost_s: Mapping[Key, float] = field(default_factory=dict)
    """Seconds that the test took on the slowest of the few hosts whose records were read."""
    settings: Mapping[Key, Mapping[str, Any]] = field(default_factory=dict)
    """Settings of the test in the plan of that run; the catalogue has the defaults of all other settings."""
    devices: int = 0
    """Largest number of devices of a host; 0: unknown."""


@dataclass(frozen=True, kw_only=True)
class _Candidate:
    """A test of the profile, with its history."""

    key: Key
    cost_s: float
    measured: int
    findings: int
    age_s: float
    parts: tuple[str, ...]
    """Kinds of parts that the test exercises; empty if it measures nothing in this run."""
    has_run: bool

    @property
    def risk(self) -> float:
        """Return (findings + 0.5) ÷ (measurements + 1) × (1 + weeks since the last run).

        The summand 0.5 keeps the risk of a test without findings above 0. The summand 1 prevents a division by 0.
        """
        return (self.findings + 0.5) / (self.measured + 1) * (1 + self.age_s / WEEK_S)

    def reason(self) -> str:
        """Return the history of the test and the kinds of parts that it covers, as text."""
        when = f"last run {counted(round(self.age_s / 86400), 'day')} ago" if self.has_run else "never run"
        findings = f"{counted(self.findings, 'finding')} in {counted(self.measured, 'measurement')}"
        return f"{findings}, {when}; covers {', '.join(self.parts) or 'no part in this run'}"


def select_tests(
    estimates_s: Mapping[Key, float], history: Sequence[PastRun], *, budget_s: float, profile: str, now: str
) -> BudgetSelection:
    """Return the tests that fit into `budget_s`, in order of selection, and the skipped ones with the reason.

    Without history the cheapest come first. At least one test of the stage `benchmark` that measures a part is always selected,
    if there are any. If all of them exceed the budget, the cheapest is selected, and `BudgetSelection.cost_s` is more than
    `budget_s`.

    Args:
        estimates_s: test -> its expected seconds, in the profile's order. They are the cost of a test that no earlier run has
            timed. 0: the test measures nothing in this run.
        history: earlier runs, in any order.
        budget_s: seconds for the benchmarks of a host. Snapshots are always taken and do not count.
        profile: profile of the run; costs measured under it take precedence over costs under other profiles.
        now: UTC, ISO 8601.
    """
    past = sorted(history, key=lambda run: (run.began, run.run_id))
    remaining = [_candidate(key, estimate_s, past, profile, now) for key, estimate_s in estimates_s.items()]
    picked: list[_Candidate] = []
    spent = 0.0
    while fitting := _fitting(remaining, picked, budget_s - spent):
        best = _best(fitting, picked, bool(past))
        spent += _cost(best, picked)
        picked.append(best)
        remaining = [item for item in remaining if item.key != best.key]
    items = [_item(item, bool(past)) for item in picked]
    items += [
        _item(item, bool(past), skipped=_shortage(item, picked, budget_s - spent, budget_s)) for item in remaining
    ]
    return BudgetSelection(budget_s=budget_s, cost_s=round(spent, 1), runs=len(past), items=tuple(items))


def _candidate(key: Key, estimate_s: float, past: Sequence[PastRun], profile: str, now: str) -> _Candidate:
    """Return a test with its history.

    Its cost is the median in earlier runs of `profile`, else in all earlier runs, else `estimate_s`.
    """
    runs_with_key = [run for run in past if run.measured.get(key)]
    last = runs_with_key[-1].began if runs_with_key else past[0].began if past else now
    costs_s = [run.cost_s[key] for run in past if key in run.cost_s and run.profile == profile]
    costs_s = costs_s or [run.cost_s[key] for run in past if key in run.cost_s]
    benchmark = BENCHMARKS.get(key[1])
    parts: tuple[str, ...] = tuple(benchmark.parts) if benchmark else ("unknown parts",)
    if not estimate_s:
        parts = ()
    return _Candidate(
        key=key,
        cost_s=max(LEAST_S, median(costs_s) if costs_s else estimate_s),
        measured=sum(run.measured[key] for run in runs_with_key),
        findings=sum(run.findings.get(key, 0) for run in past),
        age_s=max(0.0, epoch_seconds(now) - epoch_seconds(last)) + (0.0 if runs_with_key else NEVER_RUN_S),
        parts=parts if key[0] == BENCHMARK else tuple({"NVLink": "fabric"}.get(part, part) for part in parts),
        has_run=bool(runs_with_key),
    )


def _cost(item: _Candidate, picked: Sequence[_Candidate]) -> float:
    """Return the cost of a test. The first test of a stage also costs LAUNCH_S."""
    return item.cost_s + (0.0 if any(other.key[0] == item.key[0] for other in picked) else LAUNCH_S)


def _fitting(remaining: Sequence[_Candidate], picked: Sequence[_Candidate], remaining_s: float) -> list[_Candidate]:
    """Return the tests that fit into the remaining time.

    The first test to be picked is one of the stage `benchmark` that measures a part, if there are any. If none of these fits,
    return the cheapest.
    """
    first = [item for item in remaining if item.key[0] == BENCHMARK and item.parts] if not picked else []
    if first:
        return [item for item in first if _cost(item, picked) <= remaining_s] or [min(first, key=lambda it: it.cost_s)]
    return [item for item in remaining if _cost(item, picked) <= remaining_s]


def _best(items: Sequence[_Candidate], picked: Sequence[_Candidate], has_history: bool) -> _Candidate:
    """Return the test with the highest risk × coverage ÷ cost; without history, the cheapest."""
    if not has_history:
        return min(items, key=lambda item: item.cost_s)  # ties: profile order
    covered = [part for other in picked for part in other.parts]
    return max(
        items,
        key=lambda item: item.risk * sum(1 / (1 + covered.count(part)) for part in item.parts) / _cost(item, picked),
    )


def _shortage(item: _Candidate, picked: Sequence[_Candidate], remaining_s: float, budget_s: float) -> str:
    return f"takes {_cost(item, picked):.0f} s; {max(0.0, remaining_s):.0f} s of {budget_s:.0f} s remain"


def _item(item: _Candidate, has_history: bool, skipped: str = "") -> BenchmarkChoice:
    stage, benchmark = item.key
    why = item.reason() if has_history else "no earlier run: cheapest first"
    return BenchmarkChoice(
        stage=stage,
        benchmark=benchmark,
        chosen=not skipped,
        cost_s=round(item.cost_s, 1),
        why=f"{skipped}; {why}" if skipped else why,
    )


def refuse_budget(profile: Mapping[str, Any], budget: object) -> None:
    """Raise UsageError if a budget is given and the profile must run completely."""
    if budget is not None and not profile.get("may_choose", False):
        raise UsageError(
            f"rackproof_budget_s (--budget) is {budget}, but profile {profile['name']} always runs completely: "
            "omit the budget, or use a profile with `may_choose: true`, such as revalidate"
        )


def skipped_tests(plan: Plan) -> list[str]:
    """Return the tests of the profile that did not fit into the budget."""
    return [f"{item.benchmark} ({item.stage})" for item in plan.choice.items if not item.chosen] if plan.choice else []


def status_suffix(plan: Plan) -> str:
    """Return ` (5 of 9 benchmarks chosen)` for the status line; empty if the whole profile runs."""
    skipped = skipped_tests(plan)
    if not plan.choice or not skipped:
        return ""
    return f" ({len(plan.choice.items) - len(skipped)} of {len(plan.choice.items)} benchmarks chosen)"


def selection_summary(plan: Plan) -> list[SummaryLine]:
    """Return summary lines of a report: the reason for the run, and the tests that were skipped."""
    lines = [SummaryLine(kind=LineKind.CAVEAT, title="Reason", text=plan.reason)] if plan.reason else []
    if plan.choice:
        skipped = skipped_tests(plan)
        chosen = len(plan.choice.items) - len(skipped)
        total = len(plan.choice.items)
        text = f"{chosen} of {total} benchmarks of {plan.profile} chosen for {plan.choice.budget_s:.0f} s"
        values = {"chosen": chosen, "total": total}
        lines.append(SummaryLine(kind=LineKind.CAVEAT, title="Time budget", text=text, values=values))
        if skipped:
            lines.append(SummaryLine(kind=LineKind.CAVEAT, title="NOT CHOSEN, so not judged", text=", ".join(skipped)))
    return lines


def selection_table(choice: BudgetSelection) -> str:
    """Return the selection as text: a heading, and one line per benchmark."""
    runs = counted(choice.runs, "earlier run")
    lines = [f"selected for {choice.budget_s:.0f} s by the history of {runs} (takes about {choice.cost_s:.0f} s):"]
    for item in choice.items:
        mark = "run     " if item.chosen else "skip    "
        lines.append(f"  {mark} {item.stage + ' ' + item.benchmark:<26} {item.cost_s:>6.1f} s  {item.why}")
    return "\n".join(lines)
