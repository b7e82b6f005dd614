"""For every test: a machine that is busy fails none of hypothesis' examples, and no more than it must of the lab's deadlines."""

import os
import sys
from itertools import islice

import pytest
from hypothesis import settings

# What hundreds of processes of ours are started with is compiled once, and not by each of them.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False
# A playbook's terminal, which no test looks at but those that say so, costs a process beside every ansible-playbook.
os.environ.setdefault("RACKPROOF_HEARTBEAT", "0")

settings.register_profile("no-clock", deadline=None)
settings.load_profile("no-clock")
BETWEEN = 3


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The lab's files come early, since they are long, and others between them, so that not every worker is at one of them."""
    files = dict.fromkeys(item.path for item in items)
    others = iter([path for path in files if path.parent.name != "lab"])
    spread = [path for file in files if file.parent.name == "lab" for path in (file, *islice(others, BETWEEN))]
    order = {path: place for place, path in enumerate([*spread, *others])}
    items.sort(key=lambda item: order[item.path])
