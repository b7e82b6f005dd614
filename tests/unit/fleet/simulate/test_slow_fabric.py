"""Test slow networks of simulated fleets.

A NIC, cable, rail, host, path or whole fabric with 50 % or 2 % of its speed is reported as a cause. No GPU is reported.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import yaml

from fleet.records.load import load
from fleet.report.merge import merge
from fleet.rma.parts import failed_parts
from fleet.simulate import fleet as simulated
from fleet.simulate.faults import FAULTS, RAIL, Effect
from fleet.simulate.fleet import Fleet, place_faults, write_run
from fleet.simulate.records import JUDGED
from schemas.reports import FAIL, FleetReport
from schemas.scopes import Scope
from tests import fleets

CREATED = "2026-11-21T04:00:00Z"
HOST, GPU = "r01-h03", 1


def slowed(kind: str, share: float, gpu: int) -> Effect:
    """Return the effect of a fault that leaves `share` of the speed. The kind `fabric` slows all rails of all hosts."""
    if kind == "fabric":
        return Effect(speed=share, rails=(), reach=RAIL)
    in_gang = FAULTS[kind].in_gang
    assert in_gang
    return replace(in_gang(gpu), speed=share)


def judged(directory: Path, monkeypatch: pytest.MonkeyPatch, effects: dict[str, tuple[str, float]]) -> FleetReport:
    """Return the report on one gang of four hosts. `effects`: host -> kind of fault, share of the speed that remains."""
    profile = directory.with_suffix(".yml")
    profile.write_text(yaml.safe_dump(fleets.NETWORK_PROFILE))
    fleet = Fleet(profile=str(profile), readings=JUDGED, gpus=3, hosts=4, gang="all")
    plan = fleet.plan(directory.name, CREATED)
    requests = []
    faults = dict(FAULTS)
    for host, (kind, share) in effects.items():
        base = FAULTS["slow_rail" if kind == "fabric" else kind]
        faults[base.kind] = replace(base, in_gang=partial(slowed, kind, share))
        requests.append(f"{base.kind}:{host}:{GPU}" if base.of_gpu else f"{base.kind}:{host}")
    monkeypatch.setattr(simulated, "FAULTS", faults)
    write_run(directory, fleet, place_faults(requests, plan, 0), plan)
    run = load(directory)
    packs = fleets.packs_about("memory", "collective", "pairs", "verbs", "infiniband", "network")
    return merge(run.plan, run.evidence, packs)


@pytest.mark.parametrize("share", [0.5, 0.02])
@pytest.mark.parametrize(
    ("kind", "parts"),
    [
        ("slow_nic", {"hca=mlx5_1"}),
        ("slow_cable", {"hca=mlx5_1"}),
        ("slow_host", {"host"}),
        ("slow_rail", {"rail=1"}),
        ("fabric", {"gang=all", "rail=0", "rail=1", "rail=2"}),
    ],
)
def test_slow_network_is_not_attributed_to_gpus(
    kind: str, parts: set[str], share: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    report = judged(tmp_path / "run", monkeypatch, {HOST: (kind, share)})
    failed = [cause for cause in report.causes if cause.verdict == FAIL]
    assert {cause.part for cause in failed} <= parts, [cause.title for cause in failed]
    assert {cause.problem for cause in failed} == {"slow-network"}
    assert [
        part.serial for part in failed_parts(report.causes, report.verdicts) if Scope.parse(part.scope).is_one_device
    ] == []
    of_one_host = kind not in ("slow_rail", "fabric")
    assert {row.name for row in report.hosts if row.decision != "accepted"} == (
        {HOST} if of_one_host else {row.name for row in report.hosts}
    )


@pytest.mark.parametrize("share", [0.5, 0.02])
def test_slow_path_between_two_hosts_is_one_cause_without_a_part_to_return(
    share: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The collectives of the gang are slow too. The other hosts are measured again without these two hosts, and are accepted."""
    report = judged(tmp_path / "run", monkeypatch, {HOST: ("slow_path", share)})
    (cause,) = report.causes
    assert (cause.problem, cause.verdict, cause.hosts) == ("slow-path", FAIL, (HOST, "r01-h04"))
    assert cause.title.startswith(f"path {HOST} - r01-h04 rail {GPU} is slow: bandwidth between hosts ")
    assert failed_parts(report.causes, report.verdicts) == []
    assert {row.name for row in report.hosts if row.decision != "accepted"} == {HOST, "r01-h04"}


def test_slow_host_is_the_only_slow_network_cause_beside_a_slow_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    effects = {"r01-h02": ("slow_host", 0.3), HOST: ("slow_path", 0.5)}
    report = judged(tmp_path / "run", monkeypatch, effects)
    failed = [cause for cause in report.causes if cause.verdict == FAIL]
    assert {cause.host for cause in failed if cause.problem == "slow-network"} == {"r01-h02"}


def test_slow_pair_of_two_faulty_hosts_is_not_a_separate_cause(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On the rail of the slow cable, each faulty host reaches 0.2 of the normal bandwidth with every other host.

    The pair of the two faulty hosts must not become a third cause.
    """
    report = judged(tmp_path / "run", monkeypatch, {"r01-h02": ("slow_host", 0.2), HOST: ("slow_cable", 0.2)})
    assert sorted((cause.host, cause.part) for cause in report.causes if cause.verdict == FAIL) == [
        ("r01-h02", "host"),
        (HOST, "hca=mlx5_1"),
    ]
