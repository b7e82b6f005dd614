"""What of a profile is run where there is no time for all of it: risk × coverage ÷ cost. Pure: the same history, the same choice.

`risk` of a benchmark is how often it found something on these hosts, and grows with the time for which nobody looked. `coverage`
is which kinds of parts it looks at, each counted less the more often those chosen before it look there. `cost` is how long
it took when it ran. The idea of choosing so is that of SuperBench's selector (USENIX ATC 2024); the numbers are ours.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from statistics import median
from typing import Any

from schemas.errors import UsageError
from schemas.plans import Choice, Chosen, Plan
from schemas.reports import LineKind, SummaryLine

Key = tuple[str, str]
"""Stage and benchmark."""
Stages = Mapping[str, Sequence[str]]

START_S = 15.0
"""What the ranks of a stage take to start and to meet: 10 to 16 s on hosts with four GPUs."""
WEEK_S = 7 * 86400.0
"""In which the risk of what is not looked at doubles, and then grows on by as much each week."""
NEVER_S = 12 * WEEK_S
"""So long before the first run that we know of, what was never run counts as looked at."""
COST_S = {
    "gemm": 4.0, "memory": 1.0, "host_copy": 15.0, "peer_copy": 8.0, "integrity": 5.0, "stress": 22.0, "digest": 4.0,
    "collective": 48.0, "pairs": 15.0, "training": 4.0, "fashion_mnist": 3.0, "scaling": 8.0, "variants": 72.0, "checkpoint": 2.0,
    "model_parallel": 2.0, "transformer": 6.0, "straggler": 8.0, "overlap": 2.0, "dataloader": 20.0,
}  # fmt: skip
"""Of each benchmark before it was measured here: seconds of `standard` on four H200."""
UNKNOWN_S = 30.0
PARTS = {
    "gemm": ("compute",), "memory": ("GPU memory",), "host_copy": ("PCIe", "CPU"), "peer_copy": ("NVLink",),
    "integrity": ("GPU memory",), "stress": ("compute", "power", "cooling"), "digest": ("compute",),
    "collective": ("NVLink",), "pairs": ("NVLink",), "training": ("compute", "CPU"), "fashion_mnist": ("compute", "NVLink"),
    "scaling": ("compute", "CPU"),
    "variants": ("compute",), "checkpoint": ("disk",), "model_parallel": ("NVLink",),
    "transformer": ("compute", "GPU memory", "NVLink"), "straggler": ("compute", "CPU", "NVLink"),
    "overlap": ("compute", "NVLink"), "dataloader": ("CPU", "disk"),
}  # fmt: skip
"""What each benchmark looks at; between hosts it is the fabric in place of NVLink."""
ALONE = "benchmark"


@dataclass(frozen=True, kw_only=True)
class Past:
    """An earlier run, as far as it was of the hosts that are planned now."""

    run_id: str
    began: str
    """UTC, ISO 8601."""
    profile: str
    looks: Mapping[Key, int] = field(default_factory=dict)
    """Hosts on which it was measured."""
    findings: Mapping[Key, int] = field(default_factory=dict)
    """Hosts on which something of it failed."""
    cost_s: Mapping[Key, float] = field(default_factory=dict)
    """How long it took on the slowest host."""


@dataclass(frozen=True, kw_only=True)
class _Known:
    """What the history says of one benchmark."""

    key: Key
    cost_s: float
    looks: int
    findings: int
    age_s: float
    parts: tuple[str, ...]
    seen: bool

    @property
    def risk(self) -> float:
        """Share of the looks that found something, half a finding assumed, times the weeks for which nobody looked."""
        return (self.findings + 0.5) / (self.looks + 1) * (1 + self.age_s / WEEK_S)

    def why(self) -> str:
        """For people."""
        days = self.age_s / 86400
        when = f"last {days:.0f} days ago" if self.seen else "never run"
        found = f"{self.findings} finding{'' if self.findings == 1 else 's'} in {self.looks} looks"
        return f"{found}, {when}; looks at {', '.join(self.parts)}"


def choose(stages: Stages, history: Sequence[Past], *, budget_s: float, profile: str, now: str) -> Choice:
    """What of `stages` is run in `budget_s`, in the order in which it was chosen, and what is left out and why.

    Without history the cheapest comes first. One benchmark of those that hosts run alone is always chosen, so the choice
    takes more than `budget_s` where that is less than the cheapest takes: `Choice.cost_s` tells.

    Args:
        stages: stage -> its benchmarks, as the profile has them.
        history: earlier runs, in any order.
        budget_s: how long a host may be measured; the snapshots, which are always taken, not counted.
        profile: of the run; what a benchmark took under it goes before what it took under another.
        now: UTC, ISO 8601.
    """
    past = sorted(history, key=lambda run: (run.began, run.run_id))
    keys = [(stage, benchmark) for stage, names in stages.items() for benchmark in names]
    known = [_known(key, past, profile, now) for key in keys]
    picked: list[_Known] = []
    spent, left = 0.0, known
    while fitting := _fitting(left, picked, budget_s - spent):
        best = _best(fitting, picked, bool(past))
        spent += _cost(best, picked)
        picked.append(best)
        left = [item for item in left if item.key != best.key]
    items = [_item(item, bool(past)) for item in picked]
    items += [_item(item, bool(past), without=_without(item, picked, budget_s - spent, budget_s)) for item in left]
    return Choice(budget_s=budget_s, cost_s=round(spent, 1), runs=len(past), items=tuple(items))


def _known(key: Key, past: Sequence[Past], profile: str, now: str) -> _Known:
    looked = [run for run in past if run.looks.get(key)]
    last = looked[-1].began if looked else past[0].began if past else now
    same = [run.cost_s[key] for run in past if key in run.cost_s and run.profile == profile]
    took = same or [run.cost_s[key] for run in past if key in run.cost_s]
    parts = PARTS.get(key[1], ("the whole",))
    return _Known(
        key=key,
        cost_s=max(0.1, median(took)) if took else COST_S.get(key[1], UNKNOWN_S),
        looks=sum(run.looks[key] for run in looked),
        findings=sum(run.findings.get(key, 0) for run in past),
        age_s=max(0.0, _seconds(now) - _seconds(last)) + (0.0 if looked else NEVER_S),
        parts=parts if key[0] == ALONE else tuple({"NVLink": "fabric"}.get(part, part) for part in parts),
        seen=bool(looked),
    )


def _seconds(at: str) -> float:
    return datetime.fromisoformat(at.replace("Z", "+00:00")).timestamp()


def _cost(item: _Known, picked: Sequence[_Known]) -> float:
    """With the start of the ranks, where it is the first of its stage."""
    return item.cost_s + (0.0 if any(other.key[0] == item.key[0] for other in picked) else START_S)


def _fitting(left: Sequence[_Known], picked: Sequence[_Known], remaining_s: float) -> list[_Known]:
    """What there is time for; before anything else one of those that hosts run alone."""
    first = [item for item in left if item.key[0] == ALONE] if not picked else []
    if first:
        return [item for item in first if _cost(item, picked) <= remaining_s] or [min(first, key=lambda it: it.cost_s)]
    return [item for item in left if _cost(item, picked) <= remaining_s]


def _best(items: Sequence[_Known], picked: Sequence[_Known], has_history: bool) -> _Known:
    if not has_history:
        return min(items, key=lambda item: item.cost_s)  # of equals the first, as the profile has them
    covered = [part for other in picked for part in other.parts]
    return max(
        items,
        key=lambda item: item.risk * sum(1 / (1 + covered.count(part)) for part in item.parts) / _cost(item, picked),
    )


def _without(item: _Known, picked: Sequence[_Known], remaining_s: float, budget_s: float) -> str:
    return f"takes {_cost(item, picked):.0f} s, of {budget_s:.0f} s {max(0.0, remaining_s):.0f} s are left"


def _item(item: _Known, has_history: bool, without: str = "") -> Chosen:
    stage, benchmark = item.key
    why = item.why() if has_history else "no earlier run: the cheapest first"
    return Chosen(
        stage=stage,
        benchmark=benchmark,
        chosen=not without,
        cost_s=round(item.cost_s, 1),
        why=f"{without}; {why}" if without else why,
    )


def refuse_budget(profile: Mapping[str, Any], budget: object) -> None:
    """Raises UsageError where a budget is given and the profile must be run as a whole."""
    if budget is not None and not profile.get("may_choose", False):
        raise UsageError(
            f"rackproof_budget_s (--budget) is {budget}, and profile {profile['name']} is run as a whole or not at all: "
            "leave the budget out, or take a profile that says `may_choose: true`, as revalidate does"
        )


def left_out(plan: Plan) -> list[str]:
    """What the profile has and the run was not asked for, for want of time."""
    return [f"{item.benchmark} ({item.stage})" for item in plan.choice.items if not item.chosen] if plan.choice else []


def remark(plan: Plan) -> str:
    """For the status, so that a part is never taken for the whole: ` (5 of 9 benchmarks chosen)`; empty of a whole profile."""
    names = left_out(plan)
    if not plan.choice or not names:
        return ""
    return f" ({len(plan.choice.items) - len(names)} of {len(plan.choice.items)} benchmarks chosen)"


def told(plan: Plan) -> list[SummaryLine]:
    """Return lines for the summary of a report: why the run was made, and what of the profile was left out."""
    lines = [SummaryLine(kind=LineKind.CAVEAT, title="Reason", text=plan.reason)] if plan.reason else []
    if plan.choice:
        names = left_out(plan)
        kept = len(plan.choice.items) - len(names)
        total = len(plan.choice.items)
        text = f"{kept} of {total} benchmarks of {plan.profile}, for {plan.choice.budget_s:.0f} s"
        values = {"chosen": kept, "total": total}
        lines.append(SummaryLine(kind=LineKind.CAVEAT, title="Chosen", text=text, values=values))
        if names:
            lines.append(SummaryLine(kind=LineKind.CAVEAT, title="NOT CHOSEN, so not tested", text=", ".join(names)))
    return lines


def table(choice: Choice) -> str:
    """The choice for people, a line a benchmark."""
    runs = f"{choice.runs} earlier run{'' if choice.runs == 1 else 's'}"
    lines = [f"chosen for {choice.budget_s:.0f} s by {runs} (takes about {choice.cost_s:.0f} s):"]
    for item in choice.items:
        mark = "run     " if item.chosen else "not run "
        lines.append(f"  {mark} {item.stage + ' ' + item.benchmark:<26} {item.cost_s:>6.1f} s  {item.why}")
    return "\n".join(lines)
