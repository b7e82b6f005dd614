"""Return the runs in the history that measured any of the given hosts.

`fleet.planning.history` uses these runs to select the tests that fit a time budget.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

from fleet.history.database import History, open_history
from fleet.history.index import INDEX, KINDS, home, versions
from fleet.history.rows import clean_text
from fleet.planning.test_selection import Key, PastRun
from schemas.baselines import REAL, REHEARSAL

MAX_COSTS = 5
"""For each profile and test (stage and benchmark), only this number of newest durations is used. Older durations mislead,
because the settings of a test change."""


def is_history(directory: Path) -> bool:
    """Return whether a directory is a history, and not a directory of runs."""
    return any((home(directory, kind) / INDEX).is_file() or versions(home(directory, kind)) for kind in KINDS)


def former_tests(directory: Path, hosts: Collection[str], *, rehearsal: bool) -> tuple[list[PastRun], str]:
    """Return the runs that measured any of these hosts, newest first, and a warning of one line.

    The warning is empty if nothing is wrong, or if there is no history. Raises no exception.

    Args:
        directory: the history.
        hosts: names of the hosts to plan for.
        rehearsal: whether to return rehearsals; if false, return runs on real GPUs. Simulated runs are never returned.
    """
    try:
        history = open_history(directory, REHEARSAL if rehearsal else REAL)
        if history is None:
            return [], ""
        runs = _past_runs(history, hosts)
    except Exception as error:  # noqa: BLE001 - an error in the history must not prevent a run
        reason = " ".join(str(error).split()) or type(error).__name__
        return (
            [],
            f"warning: the history cannot be used, so tests are selected from the newest run directories instead: {reason}",
        )
    if not history.problems:
        return runs, ""
    more = f"; and {len(history.problems) - 1} more" if history.problems[1:] else ""
    return runs, f"warning: history: {history.problems[0]}{more}"


def _past_runs(history: History, hosts: Collection[str]) -> list[PastRun]:
    rows = history.rows(
        """
        with counted as (
          select nonce, stage, benchmark, count(*) filter (measured and host in (select unnest($hosts::varchar[]))) as measured,
            count(*) filter (failed and host in (select unnest($hosts::varchar[]))) as failed, max(seconds) as seconds
          from tests group by nonce, stage, benchmark
        )
        select * from counted where nonce in (select nonce from counted where measured > 0)""",
        {"hosts": sorted(map(clean_text, hosts))},
    )
    by_nonce: dict[str, dict[Key, tuple[int, int, float | None]]] = {}
    for nonce, stage, benchmark, *counts in rows:
        by_nonce.setdefault(nonce, {})[(stage, benchmark)] = tuple(counts)
    known = [(history.index.runs[nonce], tests) for nonce, tests in by_nonce.items() if nonce in history.index.runs]
    known.sort(key=lambda item: (item[0]["began"], item[0]["run"]), reverse=True)
    return _with_newest_costs(known)


def _with_newest_costs(
    runs: Iterable[tuple[Mapping[str, Any], Mapping[Key, tuple[int, int, float | None]]]],
) -> list[PastRun]:
    costs: Counter[tuple[str, Key]] = Counter()
    past = []
    for entry, tests in runs:
        cost_s = {}
        for key, (_, _, seconds) in tests.items():
            if seconds is not None and costs[(entry["profile"], key)] < MAX_COSTS:
                costs[(entry["profile"], key)] += 1
                cost_s[key] = seconds
        past.append(
            PastRun(
                run_id=entry["run"],
                began=f"{entry['began'].replace(' ', 'T')}Z",
                profile=entry["profile"],
                measured={key: measured for key, (measured, _, _) in tests.items() if measured},
                findings={key: failed for key, (_, failed, _) in tests.items() if failed},
                cost_s=cost_s,
            )
        )
    return past
