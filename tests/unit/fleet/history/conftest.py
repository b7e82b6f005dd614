"""The history (a database of runs) of a simulated fleet, created once for all tests of this directory."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

import pytest

from fleet.history.store import add_run, merge_runs
from schemas.baselines import SIMULATED
from tests.histories import Faults, FleetHistory


@pytest.fixture(scope="session")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> tuple[Faults, Path]:
    """Return the faults that the simulation planted, and the directory of the history, which tests must not change.

    The history has 20 monthly runs. All except the last two are merged into monthly files. The first pytest worker that needs the
    history creates it for all workers.
    """
    base = tmp_path_factory.getbasetemp()
    shared = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    simulated, directory = FleetHistory(racks=7, hosts=4, gpus=4, months=20, seed=1), shared / "fleet-history"
    with (shared / "fleet-history.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not directory.exists():
            new = tmp_path_factory.mktemp("history") / "new"
            for number, rows in enumerate(simulated.runs()):
                add_run(new, rows)
                if number == 17:
                    assert merge_runs(new, SIMULATED) == 18
            new.rename(directory)
    return simulated.planted, directory
