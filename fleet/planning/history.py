"""Apply a time budget to a profile: select tests by the history of earlier runs, and remove the other tests.

A test is a benchmark in a stage.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from fleet.inventory.ansible import Variables
from fleet.planning.plan import expected_costs
from fleet.planning.test_selection import Key, PastRun, select_tests
from fleet.records.newest import newest_first
from schemas import documents
from schemas.catalogue import BENCHMARKS, DURATION
from schemas.errors import UsageError
from schemas.plans import BudgetSelection, selection_from_json
from schemas.reports import FAIL, INCONCLUSIVE, Verdict
from schemas.run_directory import RECORDS, RunDirectory, is_run
from schemas.stages import BENCHMARK, SOAK
from schemas.times import epoch_seconds

MAX_RUNS, MAX_TIMED_RUNS, MAX_TIMED_RECORDS = 20, 5, 4
"""The reports of the newest MAX_RUNS runs are read. To find how long benchmarks take, records of the newest MAX_TIMED_RUNS runs
are read too, at most MAX_TIMED_RECORDS of each kind from each run. The kinds are records of hosts alone, of hosts in gangs (the
hosts of one multi-node launch), and of BMCs."""
REPORT_BYTES = 200_000_000
"""Maximum size, in bytes, of a report, plan or record that is read. A run is skipped if one of the files to read is larger."""
Json = Any
StoredRuns = Callable[[set[str], bool], Sequence[PastRun]]
"""Function that returns earlier runs. Arguments: names of hosts, and whether to return rehearsals instead of other runs."""


def apply_budget(
    profile: Mapping[str, Any],
    hosts: Mapping[str, Variables],
    *,
    budget: object,
    runs: Path | None,
    run_dir: Path | None,
    now: str,
    stored: StoredRuns | None = None,
) -> tuple[Mapping[str, Any], BudgetSelection | None]:
    """Return the profile with only the tests that fit the budget, and the selection of these tests.

    Without a budget, return the unchanged profile and None.

    Args:
        profile: from `without_unused_benchmarks`.
        hosts: from `read_inventory`.
        budget: seconds per host, as text or number; None: no budget.
        runs: directory of earlier runs; None: no history.
        run_dir: directory of this run. If it already has a plan with the same budget, the selection of that plan is kept.
        now: the present time in UTC, ISO 8601.
        stored: returns earlier runs from the fleet's history database. If it returns any, those in `runs` are not read. None:
            there is no database.

    Raises:
        UsageError: the budget is invalid or too small for even the cheapest test, or the profile has a soak (a burn-in).
    """
    if budget is None:
        return profile, None
    budget_s = _budget(budget)
    if SOAK in profile["stages"]:
        raise UsageError(f"profile {profile['name']} is a burn-in: set rackproof_soak_duration in place of a budget")
    choice = _planned_choice(run_dir, budget_s)
    if choice is None:
        rehearsal = profile["device"] == "cpu"
        past = stored(set(hosts), rehearsal) if stored else []
        if runs and not past:
            past = [*history(runs, set(hosts), rehearsal=rehearsal, excluded=run_dir)]
        choice = select_tests(
            expected_costs(profile, hosts), past, budget_s=budget_s, profile=str(profile["name"]), now=now
        )
    if choice.cost_s > budget_s:
        raise UsageError(
            f"a budget of {budget_s:g} s is too small: the cheapest benchmark of {profile['name']} takes about "
            f"{math.ceil(choice.cost_s)} s including the start of its ranks; raise rackproof_budget_s (--budget)"
        )
    selected = {(item.stage, item.benchmark) for item in choice.items if item.chosen}
    reduced = {
        stage: {
            **content,
            "benchmarks": {
                name: settings for name, settings in content["benchmarks"].items() if (stage, name) in selected
            },
        }
        for stage, content in profile["stages"].items()
    }
    return {
        **profile,
        "stages": {stage: content for stage, content in reduced.items() if content["benchmarks"]},
    }, choice


def _budget(budget: object) -> float:
    try:
        seconds = float(str(budget))
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < 1e7:
        raise UsageError(f"rackproof_budget_s {budget!r}: give a number of seconds greater than 0, such as 300")
    return seconds


def _planned_choice(run_dir: Path | None, budget_s: float) -> BudgetSelection | None:
    """Return the selection in the plan of a resumed run, so that newer history does not change it.

    None if the run is new or its plan has another budget.
    """
    if run_dir is None or not is_run(run_dir):
        return None
    try:
        plan = documents.read(RunDirectory(run_dir).plan, "plan", max_bytes=REPORT_BYTES)
    except documents.DocumentError:
        return None  # `begin` reports the damaged plan
    choice = selection_from_json(plan["choice"]) if "choice" in plan else None
    return choice if choice and choice.budget_s == budget_s else None


def history(runs: Path, hosts: set[str], *, rehearsal: bool, excluded: Path | None = None) -> Iterator[PastRun]:
    """Yield earlier runs that measured any of these hosts, newest first, from the newest MAX_RUNS runs that have a report.

    Simulated and unreadable runs are skipped.

    Args:
        runs: directory with the directories of runs.
        hosts: names of the hosts.
        rehearsal: yield only rehearsals; False: only runs that are no rehearsals.
        excluded: directory of a run to leave out.
    """
    reports = [
        RunDirectory(path).report
        for path in newest_first(runs)
        if excluded is None or path.resolve() != excluded.resolve()
    ]
    for number, path in enumerate(islice((path for path in reports if path.exists()), MAX_RUNS)):
        try:
            report, plan = map(_read, (path, RunDirectory(path.parent).plan))
            comparable = (
                plan.get("rehearsal") is rehearsal and not plan.get("simulated") and not report.get("simulated")
            )
            if not comparable:
                continue
            past_run = _past_run(path.parent, report, plan, hosts, timed=number < MAX_TIMED_RUNS)
            if past_run.measured:
                yield past_run
        except (documents.DocumentError, AttributeError, KeyError, TypeError, ValueError):
            continue


def _read(path: Path) -> Json:
    try:
        with path.open("rb") as file:
            return documents.parse(file.read(REPORT_BYTES + 1), source=str(path), max_bytes=REPORT_BYTES)
    except OSError as error:
        raise documents.DocumentError(f"{path}: {error.strerror}") from None


def _past_run(directory: Path, report: Json, plan: Json, hosts: set[str], *, timed: bool) -> PastRun:
    """Return an earlier run, with the counts of `hosts` only. With `timed`, read from its records how long each test took."""
    keys = {(stage_key(stage["name"]), name) for stage in plan["stages"] for name in stage["benchmarks"]}
    measured_hosts = {
        host["name"] for host in report["hosts"] if host["name"] in hosts and host["coverage"]["measured"] > 0
    }
    failed = _hosts_with(report, FAIL, hosts)
    inconclusive = _hosts_with(report, INCONCLUSIVE, hosts)
    measured = {key: len(measured_hosts - inconclusive.get(key, set()) | failed.get(key, set())) for key in keys}
    epoch_seconds(report["began"])  # raises ValueError if it is not a time
    return PastRun(
        run_id=str(report["run_id"]),
        began=str(report["began"]),
        profile=str(report["profile"]),
        measured={key: count for key, count in measured.items() if count},
        findings={key: len(names) for key, names in failed.items()},
        cost_s=_costs(directory) if timed else {},
        settings={
            (stage["name"], name): chosen for stage in plan["stages"] for name, chosen in stage["benchmarks"].items()
        },
        devices=max(len(host["devices"]) for host in plan["hosts"]),
    )


def stage_key(stage: str) -> str:
    """Return the stage of a test in the selection: a benchmark in a soak is the same test as in the stage `benchmark`."""
    return BENCHMARK if stage == SOAK else stage


def test_of(name: str, stage: str) -> Key | None:
    """Return the test to which a verdict with this name and stage belongs; None if it belongs to none.

    `drift.` precedes the name of a rate that fell during a soak. `gang.fault`, on a host that stopped a gang launch, belongs to
    the test `collective`.
    """
    benchmark = name.removeprefix("drift.").split(".")[0]
    if benchmark in BENCHMARKS:
        return stage_key(stage), benchmark
    return ("gang", "collective") if name.startswith("gang.") else None


def tests_with(verdicts: Iterable[Verdict], verdict: str) -> dict[str, set[Key]]:
    """Return host -> the tests that have this verdict, such as `fail`, on the host at least once."""
    tests: dict[str, set[Key]] = {}
    for item in verdicts:
        if item.verdict == verdict and (key := test_of(item.name, item.stage)):
            tests.setdefault(item.host, set()).add(key)
    return tests


def _hosts_with(report: Json, verdict: str, hosts: set[str]) -> dict[Key, set[str]]:
    """Return test -> those of `hosts` on which the test has this verdict at least once."""
    hosts_by_key: dict[Key, set[str]] = {}
    for item in report["verdicts"]:
        key = test_of(item["name"], item.get("stage", ""))
        if key and item["verdict"] == verdict and item["host"] in hosts:
            hosts_by_key.setdefault(key, set()).add(item["host"])
    return hosts_by_key


def _costs(directory: Path) -> dict[Key, float]:
    """Return test -> the seconds that it took on the slowest of the hosts whose records are read. Soaks are left out."""
    cost_s: Counter[Key] = Counter()
    for pattern in RECORDS:
        for record in _records(islice(sorted(directory.glob(f"{pattern}.json")), MAX_TIMED_RECORDS)):
            for observation in record.get("observations", ()):
                if (
                    observation["name"] == DURATION.name
                    and observation["status"] == "measured"
                    and observation["stage"] != SOAK
                ):
                    key = (str(observation["stage"]), str(observation["params"]["benchmark"]))
                    cost_s[key] = max(cost_s[key], float(observation["value"]))  # type: ignore[assignment]
    return dict(cost_s)


def _records(paths: Iterable[Path]) -> Iterator[Json]:
    for path in paths:
        if path.is_file() and not path.is_symlink():
            yield _read(path)
