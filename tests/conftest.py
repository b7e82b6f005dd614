"""Configure all tests: environment, signal handlers, garbage collection, hypothesis, order of the test files, summary."""

import gc
import os
import signal
import sys
from collections.abc import Iterator

import pytest
from hypothesis import settings

from tests import ROOT

# Let Python write bytecode files: otherwise each of the hundreds of processes of the tests compiles the sources again.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False
# Limit OpenBLAS to one thread: by default, `import numpy` starts one for each processor, which takes time.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
# Limit torch to one thread: more threads would only wait, because several test processes share the processors.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Disable the heartbeat lines of playbooks, which cost one more process per ansible-playbook. Tests of these lines enable them.
os.environ.setdefault("RACKPROOF_HEARTBEAT", "0")
# A shell starts background jobs with SIGINT ignored, and Python inherits this. Let SIGINT raise KeyboardInterrupt again.
signal.signal(signal.SIGINT, signal.default_int_handler)

gc.disable()  # pytest creates little garbage while it collects the tests

settings.register_profile("no-clock", deadline=None)
settings.load_profile("no-clock")
SLOWEST_FILES = (
    # Each of the four workers of `make test` starts with one of the first four files. lab/test_resume installs the agent on a lab
    # host. Later files that call `install_agent` wait for this installation and copy the installed files.
    *("lab/test_resume", "unit/fleet/judge/test_alterations", "unit/fleet/records/test_hostile", "browser/test_report"),
    *("lab/test_roles", "lab/test_mpi"),
    # The files below are not sorted by duration.
    *("lab/test_dashboards", "lab/test_revalidate", "lab/test_acceptance"),
    *("lab/test_silence", "lab/test_burnin", "lab/test_faults_over_ssh", "lab/test_gangs", "lab/test_schedule"),
    *("lab/test_parts_over_ssh", "lab/test_hostile_host", "lab/test_strangers"),
    *("lab/test_monitoring", "lab/test_run_host"),
    # In each line below, the first file mostly waits, and the others compute. Neighbours in this list run at the same time.
    *("unit/agent/launch/test_supervise", "unit/playbooks/test_collection", "unit/roles/test_roles"),
    *("unit/collectors/test_nvml", "unit/agent/benchmarks/test_training_benchmarks", "unit/fleet/judge/test_judge"),
    *("unit/agent/benchmarks/test_verbs", "unit/fleet/report/test_run_report", "unit/fleet/judge/test_every_reading"),
    *("unit/agent/benchmarks/test_shared_storage", "unit/collectors/test_faults", "unit/playbooks/test_nothing_done"),
    *("unit/agent/cli/test_run_host", "unit/fleet/report/test_report", "unit/docs/test_guides"),
    *("unit/agent/exporter/test_sampler", "unit/fleet/simulate/test_simulate", "unit/fleet/judge/test_consistency"),
    *("unit/agent/benchmarks/test_common_start", "unit/agent/sampling/test_timeline"),
)
"""Test files that take about 10 s or more: paths below `tests`, without `.py`. They start first, so that at the end of the run no
worker is still busy with a long file while the others are idle."""


@pytest.fixture(autouse=True)
def _restore_signal_handlers() -> Iterator[None]:
    """Restore the signal handlers of this process, which a tested command may have replaced.

    Otherwise, processes that later tests fork would ignore SIGTERM and hang.
    """
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
    """Print the tables that tests recorded with `record_property("table", …)`."""
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
