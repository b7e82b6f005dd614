"""For every test: a machine that is busy fails none of hypothesis' examples, and no more than it must of the lab's deadlines."""

import gc
import os
import signal
import sys
from collections.abc import Iterator

import pytest
from hypothesis import settings

from tests import ROOT

# What hundreds of processes of ours are started with is compiled once, and not by each of them.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False
# numpy, which torch imports, has a thread for each processor otherwise: a tenth of what importing torch costs.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
# A playbook's terminal, which no test looks at but those that say so, costs a process beside every ansible-playbook.
os.environ.setdefault("RACKPROOF_HEARTBEAT", "0")
# A shell ignores Ctrl-C for what it starts with `&`, and whatever that starts inherits it: Python then never interrupts.
signal.signal(signal.SIGINT, signal.default_int_handler)

gc.disable()  # while the tests are collected, of which nothing is garbage

settings.register_profile("no-clock", deadline=None)
settings.load_profile("no-clock")
LONGEST = (
    *(
        "unit/fleet/records/test_hostile",
        "lab/test_resume",
        "lab/test_acceptance",
        "lab/test_roles",
        "lab/test_revalidate",
    ),
    *("lab/test_burnin", "lab/test_gangs", "unit/playbooks/test_collection", "lab/test_schedule", "lab/test_silence"),
    *("lab/test_monitoring", "lab/test_faults_over_ssh", "lab/test_strangers", "lab/test_dashboards"),
)
"""From five minutes to half a minute: begun first, so that in the end no worker is left alone with one of them."""


@pytest.fixture(autouse=True)
def _signals() -> Iterator[None]:
    """A verb that was tried leaves its handlers: forks of later tests would not end by SIGTERM, and who waits for them hangs."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    yield
    for number, handler in before.items():
        if signal.getsignal(number) is not handler:
            signal.signal(number, handler)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The files in the order in which workers take them, one after the other."""
    place = {name: number for number, name in enumerate(LONGEST)}
    items.sort(key=lambda item: place.get(str(item.path.relative_to(ROOT / "tests").with_suffix("")), len(place)))


def pytest_collection_finish() -> None:
    """Thousands of tests live until the end: the collector of garbage need not look at them all again and again."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)
    gc.enable()
