"""Test figures that became worse on most parts after a change of software or firmware: no single part is blamed for it."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from fleet.judge.changed_software import _share
from fleet.judge.criteria import read_packs
from fleet.judge.judge import judge
from fleet.records import baseline_store
from fleet.records.load import load
from schemas import documents
from schemas.records import Metric, Observation, Record
from schemas.reports import FAIL, Verdict, VerdictKind
from schemas.stages import GANG
from tests.accepted import Change, call, report_of, run_directory

HOSTS = ("h1", "h2")
PARTS = [(host, f"gpu={index}") for host in HOSTS for index in (0, 1)]
FIGURE = "stress.throughput"
LOST = 0.95
"""The limit of FIGURE is 0.96 of the accepted level."""
PACKS = read_packs(())
Versions = Callable[[Record, str], Record]


def rank_software(name: str) -> Versions:
    return lambda record, version: replace(record, software={**record.software, name: version})


def reading(name: str, scope: str = "host") -> Versions:
    def change(record: Record, version: str) -> Record:
        metric = Metric(name=name, unit="1", values={scope: version})
        snapshots = tuple(
            replace(item, metrics=(*(other for other in item.metrics if other.name != name), metric))
            for item in record.snapshots
        )
        return replace(record, snapshots=snapshots)

    return change


WITH_EFFECT: dict[str, Versions] = {
    "nccl": rank_software("nccl"),
    "torch": rank_software("torch"),
    "rackproof": lambda record, version: replace(record, rackproof=version),
    "driver.version": reading("driver.version"),
    "gpu.vbios_version": reading("gpu.vbios_version", "gpu=0"),
    "software.fabric_manager.version": reading("software.fabric_manager.version"),
}


def changed(versions: Versions, version: str, shares: Mapping[tuple[str, str], float]) -> Change:
    """Return a change that sets a version on all hosts, and multiplies FIGURE of each part by its share (default: 1)."""

    def slow(host: str, observation: Observation) -> Observation:
        share = shares.get((host, observation.scope), 1.0) if observation.name == FIGURE else 1.0
        return observation if share == 1 else replace(observation, value=float(observation.value or 0) * share)

    def change(record: Record) -> Record:
        observations = tuple(slow(record.host, observation) for observation in record.observations)
        return versions(replace(record, observations=observations), version)

    return change


def later_run(
    directory: Path,
    versions: Versions,
    shares: Mapping[tuple[str, str], float],
    *,
    now: str = "2.0",
    hosts: Sequence[str] = HOSTS,
) -> Path:
    """Accept a run in which the version is 1.0, then write the run `later`, in which it is `now`. Return the second run."""
    first = run_directory(directory / "first", hosts=hosts, change=changed(versions, "1.0", {}))
    assert call("report", first) == 0
    assert call("baseline", "accept", first, "--baseline", directory / "base", "--by", "Ada") == 0
    later = directory / "later"
    planned = baseline_store.snapshot_baseline(directory / "base", "gpu", hosts, later)
    return run_directory(later, hosts=hosts, change=changed(versions, now, shares), baseline=planned)


def failures(run_dir: Path) -> list[Verdict]:
    run = load(run_dir)
    return [
        item
        for item in judge(run.plan, run.evidence, PACKS)
        if item.criterion == "baseline-stress" and item.verdict == FAIL
    ]


@pytest.mark.parametrize("name", WITH_EFFECT)
def test_no_part_is_blamed_if_most_parts_with_the_same_change_became_worse(name: str, tmp_path: Path) -> None:
    run = later_run(tmp_path, WITH_EFFECT[name], dict.fromkeys(PARTS, LOST))
    verdicts = failures(run)
    assert [(item.host, item.scope) for item in verdicts] == PARTS
    for verdict in verdicts:
        assert (verdict.kind, verdict.action) == (VerdictKind.SOFTWARE, "configure")
        assert verdict.detail == f"4 of 4 such figures are below their limits since {name} changed from 1.0 to 2.0"
    assert call("report", run) == 1
    report = report_of(run)
    assert report["decision"] == "rejected"
    (cause,) = [item for item in report["causes"] if item["problem"] == "software-changed"]
    assert len(cause["parts"]) == len(PARTS)
    assert cause["action"] == "configure"
    assert f"since {name} changed from 1.0 to 2.0" in cause["why"]


SHARES = (1.0, LOST, 0.8)


@pytest.mark.parametrize("shares", list(itertools.combinations_with_replacement(SHARES, len(PARTS))), ids=str)
def test_part_that_is_slower_than_most_is_blamed(shares: tuple[float, ...], accepted: Callable[..., Path]) -> None:
    verdicts = failures(accepted(dict(zip(PARTS, shares, strict=True))))
    level = sorted(shares)[len(shares) // 2]
    by_software = {
        part for part, share in zip(PARTS, shares, strict=True) if level < 0.96 and 0.96 * level <= share < 0.96
    }
    assert {(item.host, item.scope) for item in verdicts if item.kind == VerdictKind.SOFTWARE} == by_software
    for verdict in verdicts:
        is_blamed = (verdict.host, verdict.scope) not in by_software
        assert (verdict.action == "inspect_hardware") is is_blamed


@pytest.fixture(scope="module")
def accepted(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Return a function that writes a run with the given shares, after a change of NCCL. The baseline is accepted only once."""
    directory = tmp_path_factory.mktemp("runs")
    later_run(directory, WITH_EFFECT["nccl"], {})
    numbers = itertools.count()

    def write(shares: Mapping[tuple[str, str], float]) -> Path:
        run = directory / f"run{next(numbers)}"
        planned = baseline_store.snapshot_baseline(directory / "base", "gpu", HOSTS, run)
        return run_directory(run, change=changed(WITH_EFFECT["nccl"], "2.0", shares), baseline=planned)

    return write


@pytest.mark.parametrize(
    ("versions", "now", "hosts"),
    [
        (WITH_EFFECT["nccl"], "1.0", HOSTS),
        (reading("storage.disk.firmware_version", "disk=nvme0"), "2.0", HOSTS),
        (WITH_EFFECT["nccl"], "2.0", HOSTS[:1]),
    ],
    ids=["nothing changed", "only disks changed", "too few parts"],
)
def test_each_part_is_blamed_without_a_change_that_explains_it(
    versions: Versions, now: str, hosts: tuple[str, ...], tmp_path: Path
) -> None:
    run = later_run(tmp_path, versions, dict.fromkeys(PARTS, LOST), now=now, hosts=hosts)
    assert {item.kind for item in failures(run)} == {VerdictKind.LIMIT}


def test_hosts_with_different_changes_are_not_counted_together(tmp_path: Path) -> None:
    """On h2 nothing changed, so its parts are blamed. h1 alone has too few parts to show that the change is the cause."""
    run = later_run(tmp_path, WITH_EFFECT["nccl"], dict.fromkeys(PARTS, LOST))
    path = tmp_path / "later" / "hosts" / "h2.json"
    record = documents.read(path, "record")
    documents.write(path, {**record, "software": {**record["software"], "nccl": "1.0"}})
    assert {item.kind for item in failures(run)} == {VerdictKind.LIMIT}


@pytest.mark.parametrize("share", [1.0, LOST], ids=["healthy without the change", "slow without the change"])
def test_change_is_not_the_cause_if_parts_without_it_are_slow_too(share: float, tmp_path: Path) -> None:
    """Warm air slows all parts, those with an earlier version of NCCL as well."""
    hosts = ("h1", "h2", "h3", "h4")
    slow = {(host, scope): LOST if host in HOSTS else share for host in hosts for scope in ("gpu=0", "gpu=1")}

    def only_on_h1_and_h2(record: Record, version: str) -> Record:
        return WITH_EFFECT["nccl"](record, version if record.host in HOSTS else "1.0")

    verdicts = failures(later_run(tmp_path, only_on_h1_and_h2, slow, hosts=hosts))
    assert {item.kind for item in verdicts} == {VerdictKind.SOFTWARE if share == 1 else VerdictKind.LIMIT}


def test_figures_of_several_hosts_are_not_attributed_to_a_change(tmp_path: Path) -> None:
    """A fault of the network that the hosts share makes them worse together, too."""
    (verdict, *_) = failures(later_run(tmp_path, WITH_EFFECT["nccl"], dict.fromkeys(PARTS, LOST)))
    assert _share(verdict) == pytest.approx(LOST / 0.96)
    assert _share(replace(verdict, stage=GANG)) is None
