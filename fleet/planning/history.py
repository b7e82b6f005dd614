"""Read earlier runs on the control node and narrow a profile by what they showed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any

from fleet.inventory.ansible import Variables
from fleet.planning.test_selection import ALONE, Key, Past, choose
from schemas import documents
from schemas.catalogue import BENCHMARKS, DURATION
from schemas.errors import UsageError
from schemas.plans import Choice, choice_from_json
from schemas.reports import FAIL, INCONCLUSIVE
from schemas.timeline import SOAK

MOST_RUNS, TIMED_RUNS, TIMED_RECORDS = 20, 5, 4
"""Read at most: runs, the newest; runs whose records tell how long benchmarks took; records of each stage of those."""
REPORT_BYTES = 200_000_000
Json = Any


def narrowed(
    profile: Mapping[str, Any],
    hosts: Mapping[str, Variables],
    *,
    budget: object,
    runs: Path | None,
    run_dir: Path | None,
    now: str,
) -> tuple[Mapping[str, Any], Choice | None]:
    """The profile with what is run in `budget` seconds, and the choice; as it is where no budget is given.

    Args:
        runs: directory of the runs that are the history; None: there is none.
        run_dir: of this run; where its plan was made already, the choice in it holds.

    Raises:
        UsageError: the budget is none, too small for anything, or the profile is a burn-in's.
    """
    if budget is None:
        return profile, None
    budget_s = _budget(budget)
    if SOAK in profile["stages"]:
        raise UsageError(f"profile {profile['name']} soaks: rackproof_soak_duration says how long, not a budget")
    stages = _candidates(profile, hosts)
    choice = _made(run_dir, budget_s)
    if choice is None:
        past = [*history(runs, set(hosts), rehearsal=profile["device"] == "cpu", but=run_dir)] if runs else []
        choice = choose(stages, past, budget_s=budget_s, profile=str(profile["name"]), now=now)
    if choice.cost_s > budget_s:
        raise UsageError(
            f"a budget of {budget_s:g} s is too small: the cheapest benchmark of {profile['name']} takes about "
            f"{choice.cost_s:.0f} s with the start of its ranks; give rackproof_budget_s (--budget) at least as much"
        )
    kept = {(item.stage, item.benchmark) for item in choice.items if item.chosen}
    left = {
        stage: {
            **content,
            "benchmarks": {name: what for name, what in content["benchmarks"].items() if (stage, name) in kept},
        }
        for stage, content in profile["stages"].items()
    }
    return {**profile, "stages": {stage: content for stage, content in left.items() if content["benchmarks"]}}, choice


def _budget(budget: object) -> float:
    try:
        found = float(str(budget))
    except ValueError:
        found = 0.0
    if not 0 < found < 1e7:
        raise UsageError(f"rackproof_budget_s {budget!r}: give seconds, more than 0, such as 300")
    return found


def _candidates(profile: Mapping[str, Any], hosts: Mapping[str, Variables]) -> dict[str, list[str]]:
    """What the run could make at all: no stage between hosts where none has a gang, no training where none is wanted."""
    trains = not next(iter(hosts.values())).get("rackproof_validation_only", False)
    together = any(variables.get("rackproof_gang", "rack") != "none" for variables in hosts.values())
    return {
        stage: [name for name in content["benchmarks"] if trains or not BENCHMARKS[name].trains]
        for stage, content in profile["stages"].items()
        if stage == ALONE or together
    }


def _made(run_dir: Path | None, budget_s: float) -> Choice | None:
    """The choice of the run that is resumed: what was learned meanwhile must not change what is measured."""
    if run_dir is None or not (run_dir / "plan.json").exists():
        return None
    try:
        plan = documents.read(run_dir / "plan.json", "plan", max_bytes=REPORT_BYTES)
    except documents.DocumentError:
        return None  # whoever begins the run tells of it
    found = choice_from_json(plan["choice"]) if "choice" in plan else None
    return found if found and found.budget_s == budget_s else None


def history(runs: Path, hosts: set[str], *, rehearsal: bool, but: Path | None = None) -> Iterator[Past]:
    """The newest reported runs of any of these hosts, newest first; what cannot be read tells nothing."""
    reports = [path for path in runs.glob("*/report.json") if but is None or path.parent.resolve() != but.resolve()]
    reports.sort(key=lambda path: (path.stat().st_mtime, path.parent.name), reverse=True)
    for number, path in enumerate(reports[:MOST_RUNS]):
        try:
            report, plan = (_read(path.with_name(name)) for name in ("report.json", "plan.json"))
            ours = plan.get("rehearsal") is rehearsal and not plan.get("simulated") and not report.get("simulated")
            if ours and (found := _past(path.parent, report, plan, hosts, timed=number < TIMED_RUNS)).looks:
                yield found
        except (documents.DocumentError, AttributeError, KeyError, TypeError, ValueError):
            continue


def _read(path: Path) -> Json:
    try:
        with path.open("rb") as file:
            return documents.parse(file.read(REPORT_BYTES + 1), source=str(path), max_bytes=REPORT_BYTES)
    except OSError as error:
        raise documents.DocumentError(f"{path}: {error.strerror}") from None


def _past(directory: Path, report: Json, plan: Json, hosts: set[str], *, timed: bool) -> Past:
    keys = {(_alone(stage["name"]), name) for stage in plan["stages"] for name in stage["benchmarks"]}
    there = [host["name"] for host in report["hosts"] if host["name"] in hosts and host["coverage"]["measured"] > 0]
    failed = _hosts_with(report, FAIL, hosts)
    lost = _hosts_with(report, INCONCLUSIVE, hosts)
    looks = {key: len(set(there) - lost.get(key, set()) | failed.get(key, set())) for key in keys}
    return Past(
        run_id=str(report["run_id"]),
        began=str(report["began"]),
        profile=str(report["profile"]),
        looks={key: count for key, count in looks.items() if count},
        findings={key: len(names) for key, names in failed.items()},
        cost_s=_costs(directory) if timed else {},
    )


def _alone(stage: str) -> str:
    return ALONE if stage == SOAK else stage


def _hosts_with(report: Json, verdict: str, hosts: set[str]) -> dict[Key, set[str]]:
    found: dict[Key, set[str]] = {}
    for item in report["verdicts"]:
        if item["verdict"] == verdict and item["host"] in hosts:
            stage, kind = _alone(item.get("stage", "")), item["name"].removeprefix("drift.").split(".")[0]
            if kind not in BENCHMARKS:
                stage, kind = ("gang", "collective") if item["name"].startswith("gang.") else ("", "")
            if kind:
                found.setdefault((stage, kind), set()).add(item["host"])
    return found


def _costs(directory: Path) -> dict[Key, float]:
    """How long each benchmark took on the slowest of some hosts."""
    longest: Counter[Key] = Counter()
    for pattern in ("hosts/*.json", "gangs/*/*.json"):
        for record in _records(islice(sorted(directory.glob(pattern)), TIMED_RECORDS)):
            for seen in record.get("observations", ()):
                if seen["name"] == DURATION.name and seen["status"] == "measured" and seen["stage"] != SOAK:
                    key = (str(seen["stage"]), str(seen["params"]["benchmark"]))
                    longest[key] = max(longest[key], float(seen["value"]))  # type: ignore[assignment]
    return dict(longest)


def _records(paths: Iterable[Path]) -> Iterator[Json]:
    for path in paths:
        if path.is_file() and not path.is_symlink():
            yield _read(path)
