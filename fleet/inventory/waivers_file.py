"""The file of waivers that an inventory names by `rackproof_waivers`, or an operator by `--waivers`."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from datetime import date
from pathlib import Path
from typing import Any

from fleet.judge.waivers import NEVER, STAGE
from fleet.records.load import Run
from fleet.yaml_files import read_yaml
from schemas.errors import UsageError
from schemas.waivers import Waiver

PLAN = "plan"
"""The criterion of what the plan alone demands."""


def read_waivers(name: str, hosts: Collection[str]) -> tuple[Waiver, ...]:
    """The waivers in that file that can be for these hosts: those that name one of them, and those that go with a serial.

    Raises:
        UsageError: unreadable, not what waivers.schema.json says, a day that is none, or a waiver that can never hold.
    """
    path = Path(name)
    document = read_yaml(path, "waivers")
    found = []
    for number, line in enumerate(document["waivers"], 1):
        waiver = Waiver(**{key: _tidy(value) for key, value in line.items()}, origin=f"{path.name} waiver {number}")
        _check(waiver)
        if not waiver.host or waiver.host in hosts:
            found.append(waiver)
    return tuple(found)


def given(names: Sequence[str], run: Run) -> tuple[Waiver, ...]:
    """The waivers of those files that can be for the hosts of the run."""
    hosts = {host.name for host in run.plan.hosts}
    return tuple(waiver for name in names for waiver in read_waivers(name, hosts))


def with_waivers(run: Run, names: Sequence[str]) -> Run:
    """The run with more waivers than its plan has."""
    more = given(names, run)
    return replace(run, plan=replace(run.plan, waivers=(*run.plan.waivers, *more))) if more else run


def _tidy(value: Any) -> Any:
    return " ".join(value.split()) if isinstance(value, str) else value


def _check(waiver: Waiver) -> None:
    try:
        date.fromisoformat(waiver.until)
    except ValueError:
        raise UsageError(f"{waiver.origin}: until {waiver.until} is no day: write it as 2026-12-31") from None
    if waiver.absent and (waiver.name in NEVER or waiver.name.startswith(STAGE)):
        raise UsageError(
            f"{waiver.origin}: {waiver.name} cannot be waived: nothing is known of the host, the GPU or the stage; "
            "measure it again"
        )
    if waiver.criterion == PLAN and not waiver.absent:
        raise UsageError(
            f"{waiver.origin}: criterion plan fails nothing, it says what is absent: write `absent: true` with host and name"
        )
