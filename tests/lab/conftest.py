"""Fixture for all labs (simulated hosts) of a test run."""

from __future__ import annotations

import os
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def agent_archive(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the path of the tar file of the installed agent: the same for all pytest workers. `install_agent` creates it."""
    base = tmp_path_factory.getbasetemp()
    return (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "agent.tar"
