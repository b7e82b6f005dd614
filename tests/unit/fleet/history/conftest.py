"""The history (a database of runs) of a simulated fleet, created once for all tests of this directory."""

from __future__ import annotations

from pathlib import Path

import pytest

from fleet.history.store import add_run, merge_runs
from schemas.baselines import SIMULATED
from tests.histories import Faults, FleetHistory


@pytest.fixture(scope="session")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> tuple[Faults, Path]:
    """Return the faults that the simulation planted, and the directory of the history.

    The history has 20 monthly runs. All except the last two are merged into monthly files.
    """
    directory = tmp_path_factory.mktemp("history")
    simulated = FleetHistory(racks=7, hosts=4, gpus=4, months=20, seed=1)
    for number, rows in enumerate(simulated.runs()):
        add_run(directory, rows)
        if number == 17:
            assert merge_runs(directory, SIMULATED) == 18
    return simulated.planted, directory
