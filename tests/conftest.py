"""Configure all tests: environment, signal handlers, garbage collection, hypothesis, order of the test files, summary."""

import gc
import os
import signal
import sys
from collections.abc import Iterator

import pytest
from hypothesis import settings

from tests import ROOT

# Compile once, not in each of the hundreds of processes that the tests start.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False
# Otherwise numpy starts a thread for each processor, which takes a tenth of the time of importing torch.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
# Torch would start a thread for each processor, which would mostly wait: several processes of tests use the processors.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# The heartbeat lines of a playbook cost one more process per ansible-playbook; tests that need them set this themselves.
os.environ.setdefault("RACKPROOF_HEARTBEAT", "0")
# A shell starts background jobs with SIGINT ignored, which Python inherits: restore KeyboardInterrupt.
signal.signal(signal.SIGINT, signal.default_int_handler)

gc.disable()  # little becomes garbage while pytest collects the tests

settings.register_profile("no-clock", deadline=None)
settings.load_profile("no-clock")
SLOWEST_FILES = (
    # Each worker starts with one of these files. The first file installs the agent on lab hosts, and all other labs wait for it.
    *("lab/test_resume", "unit/fleet/judge/test_alterations", "unit/fleet/records/test_hostile", "browser/test_report"),
    *("lab/test_roles", "lab/test_mpi"),
    # The order is such that a worker that ran one of the longest files above runs a short one next.
    *("lab/test_dashboards", "lab/test_revalidate", "lab/test_acceptance"),
    *("lab/test_silence", "lab/test_burnin", "lab/test_faults_over_ssh", "lab/test_gangs", "lab/test_schedule"),
    *("lab/test_parts_over_ssh", "lab/test_hostile_host", "lab/test_strangers"),
    *("lab/test_monitoring", "lab/test_run_host"),
    *("unit/playbooks/test_collection", "unit/roles/test_roles"),
    *("unit/agent/benchmarks/test_training_benchmarks", "unit/fleet/judge/test_judge"),
    *("unit/fleet/report/test_run_report", "unit/fleet/judge/test_every_reading", "unit/collectors/test_faults"),
    *("unit/playbooks/test_nothing_done", "unit/fleet/report/test_report", "unit/docs/test_guides"),
)
"""Test files that take 10 s or more. They start first, so that no worker runs one of them alone at the end."""


@pytest.fixture(autouse=True)
def _restore_signal_handlers() -> Iterator[None]:
    """Restore signal handlers that a tested command has set: otherwise forks of later tests ignore SIGTERM and hang."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    yield
    for number, handler in before.items():
        if signal.getsignal(number) is not handler:
            signal.signal(number, handler)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Sort the tests so that the slowest files come first."""
    positions = {name: number for number, name in enumerate(SLOWEST_FILES)}
    items.sort(
        key=lambda item: positions.get(str(item.path.relative_to(ROOT / "tests").with_suffix("")), len(positions))
    )


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print the tables that tests recorded."""
    for report in terminalreporter.getreports("passed"):
        for name, value in report.user_properties:
            if name == "table":
                terminalreporter.section(report.nodeid)
                terminalreporter.write_line(str(value))


def pytest_collection_finish() -> None:
    """Exclude the collected tests from garbage collection, since they live until the end."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)
    gc.enable()
