"""Fixture for all labs (a lab: hosts simulated on this machine) of a test run."""

from __future__ import annotations

import os
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def agent_archive(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the path of the tar file of the installed agent. `install_agent` creates the file; all pytest workers use it."""
    base = tmp_path_factory.getbasetemp()
    return (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "agent.tar"
