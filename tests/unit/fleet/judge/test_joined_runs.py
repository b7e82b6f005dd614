"""Judge healthy hosts of several kept runs together, as one fleet.

Each host was accepted in its own run. Criteria that compare hosts must accept it beside other healthy hosts too.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from functools import cache

import pytest

from fleet.judge.criteria import read_packs
from fleet.judge.evidence import Evidence
from fleet.judge.judge import judge
from fleet.records.load import Run, load
from schemas.reports import FAIL
from tests import ROOT

PACKS = read_packs([])
MACHINES = {
    "one H100": (
        ("h100x1", "h100x1"), ("h100x1-standard", "h100x1"), ("h100x1-standard-again", "h100x1"),
        ("h100x1-extended", "h100x1"),
    ),
    "two H100": (("h100x2", "h100x2"),),
    "one H200": (("h200x1", "h200x1"), ("h200x1-extended", "h200x1")),
    "two H200": (
        ("h200x2", "h200x2"), ("h200x2-standard", "h200x2"), ("h200x2-standard-again", "h200x2"), ("h200x2-extended", "h200x2"),
    ),
    "four H200": (("h200x4-standard", "h200x4"), ("h200x4-gated", "h200x4"), ("h200x4-gated-again", "h200x4")),
    "parts of four H200": (("h200x4-two-hosts", "host1"), ("h200x4-two-hosts", "host2")),
}  # fmt: skip
"""Size of the virtual machine -> runs and hosts in docs/measurements. Machines of one size have equally many processors."""
OF_THE_JOIN = ("uniform-", "digest-")
"""Prefixes of criteria that may fail, because the runs had other kernels, settings and versions of the workloads."""


@cache
def kept(run: str) -> Run:
    return load(ROOT / "docs/measurements" / run)


def failures(hosts: Sequence[tuple[str, str]]) -> set[tuple[str, str, str]]:
    """Return host, scope and criterion of each failure of these hosts (run, name) in one plan."""
    planned, evidence, first = [], {}, kept(hosts[0][0]).plan
    for at, (run, name) in enumerate(hosts):
        loaded = kept(run)
        new = f"{run}-{name}"
        planned.append(replace(loaded.plan.host(name), name=new, gang="", address=f"10.0.0.{at + 1}"))
        records = (
            replace(record, host=new, run_id=first.run_id, nonce=first.nonce)
            for record in loaded.evidence[name].records
            if not record.gang
        )
        evidence[new] = Evidence(records=tuple(records))
    verdicts = judge(replace(first, hosts=tuple(planned)), evidence, PACKS)
    return {(item.host, item.scope, item.criterion) for item in verdicts if item.verdict == FAIL}


@pytest.mark.parametrize("size", [size for size, hosts in MACHINES.items() if len(hosts) >= 3])
def test_healthy_machines_of_one_size_are_accepted_together(size: str) -> None:
    failed = failures(MACHINES[size])
    assert {item for item in failed if not item[2].startswith(OF_THE_JOIN) or item[2] == "uniform-numa-memory"} == set()


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("model", ["H100", "H200"])
def test_healthy_machines_of_several_sizes_are_accepted_together(model: str, seed: int) -> None:
    chance = random.Random(seed)  # noqa: S311 - reproducible
    machines = [host for size, hosts in MACHINES.items() if size.endswith(model) for host in hosts]
    failed = failures(chance.sample(machines, chance.choice((3, 4, 5))))
    assert {item for item in failed if not item[2].startswith(OF_THE_JOIN)} == set()


def test_data_loaders_are_compared_only_on_hosts_with_equally_many_gpus() -> None:
    """Each part has two GPUs, and as many processors as the machine with four GPUs."""
    failed = failures([*MACHINES["parts of four H200"], ("h200x4-standard", "h200x4")])
    assert [item for item in failed if item[2].startswith("dataloader")] == []
