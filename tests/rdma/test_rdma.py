"""Verbs between virtual machines with real Soft-RoCE and perftest: a port with another MTU is named, and nothing else is.

The machines measure; this process puts what they measured into the records of a run, and judges it as the control node does.
Soft-RoCE has no rate of its own (it states 2.5 Gb/s for every interface), and a port with itself measures the emulated
processor. Therefore these two limits are replaced; the others are the shipped ones.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fleet.judge.criteria import read_packs
from fleet.judge.judge import Evidence, judge
from schemas.catalogue import settings
from schemas.plans import Plan
from schemas.records import Observation
from schemas.reports import PASS
from tests import builders

from .machines import Machines, machines

pytestmark = pytest.mark.rdma
HOSTS = ("h1", "h2")
RATE = "20mbit"
SETTINGS = {**settings("verbs", {}), "figures": ["bandwidth"], "directions": ["one_way"], "sharings": ["alone"],
            "size_bytes": 4096, "seconds": 3}  # fmt: skip
LIMIT_S = 180.0
SITE = """---
schema: rackproof.criteria/1
summary: Soft-RoCE has no rate of its own
criteria:
"""
REPLACED = """  - id: {id}-lab
    replaces: {id}
    name: {name}
    scope: port
    stage: {stage}
    operator: ge
    value: 0.0
    unit: "{unit}"
    action: none
    optional: true
    basis: policy
    source: "Soft-RoCE: see the test"
"""


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machines]:
    with machines(HOSTS, rails=2, rate=RATE, directory=tmp_path_factory.mktemp("rdma")) as running:
        yield running


Observed = Mapping[str, Sequence[Mapping[str, Any]]]


def findings(observed: Observed, stage: str, tmp_path: Path) -> set[tuple[str, str, str]]:
    """Return host, scope and criterion of every finding on RDMA ports."""
    plan = builders.plan(*HOSTS, gpu_count=2, rackproof_gang="all")
    evidence = {host: with_figures(plan, host, observed[host], stage) for host in HOSTS}
    verdicts = judge(plan, evidence, read_packs([site_pack(tmp_path)]))
    for item in verdicts:
        if item.name.startswith("verbs.") and item.verdict != PASS:
            print(item.host, item.scope, item.criterion, item.reason)
    return {
        (item.host, item.scope, item.criterion)
        for item in verdicts
        if item.name.startswith("verbs.") and item.verdict != PASS
    }


def with_figures(plan: Plan, host: str, items: Sequence[Mapping[str, Any]], stage: str) -> Evidence:
    evidence = builders.evidence(plan)[host]
    figures = tuple(Observation(stage=stage, **item) for item in items)
    records = [
        replace(record, observations=(*record.observations, *figures))
        if bool(record.gang) == (stage == "gang")
        else record
        for record in evidence.records
    ]
    return replace(evidence, records=tuple(records))


def site_pack(directory: Path) -> str:
    path = directory / "soft-roce.yml"
    replaced = [
        ("verbs-port-rate", "verbs.rate_ratio", "benchmark", "1"), ("verbs-port-rate-any", "verbs.rate_ratio", "benchmark", "1"),
        ("verbs-port-fleet", "verbs.bandwidth", "benchmark", "B/s"), ("verbs-best-partner", "verbs.best_ratio", "gang", "1"),
    ]  # fmt: skip
    texts = [REPLACED.format(id=of, name=name, stage=stage, unit=unit) for of, name, stage, unit in replaced]
    path.write_text(SITE + "".join(texts))
    return str(path)


def statuses(observed: Observed, host: str) -> dict[str, str]:
    return {str(item["scope"]): str(item["status"]) for item in observed[host] if item["name"] == "verbs.bandwidth"}


def test_port_with_a_lower_mtu_is_named_and_one_without_a_link_is_reported(lab: Machines, tmp_path: Path) -> None:
    changes = {"h2": "ip link set eth1 mtu 700", "h1": "ip link set eth1 down"}
    observed = lab.measure("benchmark", SETTINGS, LIMIT_S, **changes)
    assert findings(observed, "benchmark", tmp_path) == {("h2", "hca=rxe1,port=1", "verbs-port-mtu")}
    (absent,) = (item for item in observed["h1"] if item["status"] == "unsupported")
    assert (absent["scope"], absent["reason"]) == ("hca=rxe1,port=1", "the port has no link")
    assert statuses(observed, "h1") == {"hca=rxe0,port=1": "measured", "hca=rxe1,port=1": "unsupported"}
    assert statuses(observed, "h2") == {"hca=rxe0,port=1": "measured", "hca=rxe1,port=1": "measured"}


def test_rail_that_both_hosts_have_is_measured_between_them(lab: Machines) -> None:
    observed = lab.measure("gang", SETTINGS, LIMIT_S)
    assert statuses(observed, "h1") == {"hca=rxe1,port=1": "unsupported", "hca=rxe0,port=1,partner=h2": "measured"}
    assert statuses(observed, "h2") == {
        "hca=rxe1,port=1,partner=h1": "skipped",
        "hca=rxe0,port=1,partner=h1": "measured",
    }
    for host in HOSTS:
        (sent,) = (
            item for item in observed[host] if item["name"] == "verbs.bandwidth" and item["status"] == "measured"
        )
        assert sent["value"] < 2.5e6, "a port cannot send more than tc lets through: it went over the network"
        assert (sent["params"]["mtu"], sent["params"]["gid_type"]) == (1024, "RoCE v2 IPv4")
