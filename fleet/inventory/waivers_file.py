"""Read waiver files. With a waiver, a named person accepts a failure until a date.

The inventory variable `rackproof_waivers` and the option `--waivers` name the files.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from datetime import date
from pathlib import Path
from typing import Any

from fleet.judge.waivers import NOT_WAIVABLE, STAGE_PREFIX
from fleet.records.load import Run
from fleet.yaml_files import read_yaml
from schemas.errors import UsageError
from schemas.waivers import Waiver

PLAN = "plan"
"""Criterion id of verdicts on missing data."""


def read_waivers(name: str, hosts: Collection[str] | None = None) -> tuple[Waiver, ...]:
    """Return the waivers in a file. If `hosts` is given, leave out those for other hosts.

    Raises:
        UsageError: the file is unreadable or invalid, or a waiver has an invalid date or can never apply.
    """
    path = Path(name)
    document = read_yaml(path, "waivers")
    waivers = []
    for number, entry in enumerate(document["waivers"], 1):
        waiver = Waiver(**{key: _tidy(value) for key, value in entry.items()}, origin=f"{path.name} waiver {number}")
        _check(waiver)
        if hosts is None or not waiver.host or waiver.host in hosts:
            waivers.append(waiver)
    return tuple(waivers)


def with_waiver_files(run: Run, names: Sequence[str]) -> Run:
    """Return the run with the waivers in the files `names` added to those of its plan.

    Waivers for hosts that are not in the run are added too, so that the report lists a misspelt host as unused.
    """
    more = tuple(waiver for name in names for waiver in read_waivers(name))
    return replace(run, plan=replace(run.plan, waivers=(*run.plan.waivers, *more))) if more else run


def _tidy(value: Any) -> Any:
    return " ".join(value.split()) if isinstance(value, str) else value


def _check(waiver: Waiver) -> None:
    try:
        date.fromisoformat(waiver.until)
    except ValueError:
        raise UsageError(f"{waiver.origin}: invalid date {waiver.until!r} in `until`: write it as 2026-12-31") from None
    if waiver.absent and (waiver.name in NOT_WAIVABLE or waiver.name.startswith(STAGE_PREFIX)):
        raise UsageError(
            f"{waiver.origin}: {waiver.name} cannot be waived with `absent: true`: without this observation too little is known "
            "of the host, the GPU or the stage; measure it again"
        )
    if waiver.criterion == PLAN and not waiver.absent:
        raise UsageError(
            f"{waiver.origin}: criterion `plan` applies only to missing data: write `absent: true` with host and name"
        )
