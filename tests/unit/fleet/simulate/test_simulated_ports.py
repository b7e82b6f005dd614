"""Test RDMA ports of simulated fleets.

Healthy ports pass. A faulty NIC, cable, path, switch or rail is the only cause. Each of two faults of a host is in the evidence.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from itertools import combinations_with_replacement
from pathlib import Path
from typing import Any

import pytest
import yaml

from fleet.judge.criteria import Pack, read_packs
from fleet.judge.evidence import Evidence
from fleet.records.load import Run, load
from fleet.report.merge import merge
from fleet.simulate.faults import FAULTS
from fleet.simulate.fleet import Fleet, place_faults, write_run
from fleet.simulate.records import JUDGED
from rackproof.main import main
from schemas.records import MEASURED, Metric, Observation
from schemas.reports import ACCEPTED, FAIL, INCOMPLETE, INCONCLUSIVE, PASS, REJECTED, FleetReport
from schemas.scopes import Scope
from tests import ROOT, fleets

CREATED = "2026-11-21T04:00:00Z"
PROFILE = str(ROOT / "docs/measurements/ports.yml")


def run_of(directory: Path, *faults: str, **changed: Any) -> Run:
    """Write and load a run. By default, the fleet has six hosts, three rails, and two leaf switches per rail."""
    settings = {"hosts": 6, "gpus": 3, "hosts_per_leaf": 3, "gang": "all", "profile": PROFILE, "readings": JUDGED}
    fleet = Fleet(**{**settings, **changed})
    plan = fleet.plan(directory.name, CREATED)
    write_run(directory, fleet, place_faults(faults, plan, 0), plan)
    return load(directory)


def report_of(run: Run, packs: Sequence[Pack] = ()) -> FleetReport:
    """Return the report on a run. `packs`: criteria (default: all)."""
    return merge(run.plan, run.evidence, packs or read_packs([]), events=run.events, quarantined=run.quarantined)


@pytest.fixture
def profile_with_both_sharings(tmp_path: Path) -> str:
    """Return the path of a profile in which each pair of hosts measures each rail alone, then all rails together."""
    document = yaml.safe_load(Path(PROFILE).read_text())
    document["stages"]["gang"]["benchmarks"]["verbs"]["sharings"] = ["alone", "together"]
    path = tmp_path / "both-sharings.yml"
    path.write_text(yaml.safe_dump(document))
    return str(path)


def test_ports_measured_alone_and_together_pass_if_healthy(tmp_path: Path, profile_with_both_sharings: str) -> None:
    report = report_of(run_of(tmp_path / "run", profile=profile_with_both_sharings))
    assert [item.reason for item in report.verdicts if item.verdict != PASS] == []


@pytest.mark.parametrize("fault", ["slow_nic:r01-h02:1", "slow_cable:r01-h02:1", "slow_switch:r01-h02:1"])
def test_slow_part_is_the_only_cause_if_ports_are_measured_alone_and_together(
    tmp_path: Path, profile_with_both_sharings: str, fault: str
) -> None:
    report = report_of(run_of(tmp_path / "run", fault, profile=profile_with_both_sharings))
    assert [(cause.problem, cause.verdict) for cause in report.causes] == [("slow-network", FAIL)]


def test_healthy_ports_pass_and_have_figures_with_all_other_hosts(tmp_path: Path) -> None:
    run = run_of(tmp_path / "run")
    report = report_of(run)
    assert [item.reason for item in report.verdicts if item.verdict != PASS] == []
    assert report.acceptance.status == "SIMULATED PASS"
    assert [line.text for line in report.acceptance.lines if line.title == "RDMA ports"] == ["PASS"]
    (gang,) = (record for record in run.evidence["r01-h02"].records if record.gang)
    items = [item for item in gang.observations if item.name.startswith("verbs.")]
    assert {item.status for item in items} == {MEASURED}
    partners = {Scope.parse(item.scope).get("partner") for item in items} - {""}
    assert partners == {f"r01-h0{number}" for number in (1, 3, 4, 5, 6)}, "one launch must measure all pairs of hosts"
    with_latency = {Scope.parse(item.scope).get("partner") for item in items if item.name == "verbs.latency"}
    assert with_latency == partners - {"r01-h01"}, "the latency of a pair must be measured only by its first host"
    for rail in range(3):
        port = f"hca=mlx5_{rail},port=1"
        shares = [float(item.value or 0) for item in items if item.name == "verbs.rate_ratio" and item.scope.startswith(port)
                  and item.params["direction"] == "one_way"]  # fmt: skip
        (best,) = (item for item in items if item.name == "verbs.best_ratio" and item.scope == port)
        assert (best.value, best.params["partners"], len(shares)) == (max(shares), 5, 5)


PORT = "hca=mlx5_1,port=1"
DOWN = {"infiniband.state": "DOWN", "infiniband.phys_state": "Polling", "infiniband.active": False}


def with_port_down(evidence: Evidence) -> Evidence:
    """Return the evidence of a host after its port PORT lost the link.

    In place of the figures of this port, the records have the reason that the agent reports for a port without a link.
    """

    def without_link(metric: Metric) -> Metric:
        is_of_port = metric.name in DOWN and PORT in metric.values
        return replace(metric, values={**metric.values, PORT: DOWN[metric.name]}) if is_of_port else metric

    return replace(
        evidence,
        records=tuple(
            replace(
                record,
                snapshots=tuple(
                    replace(item, metrics=tuple(map(without_link, item.metrics))) for item in record.snapshots
                ),
                observations=unmeasured(record.observations, PORT, "unsupported", "the port has no link"),
            )
            for record in evidence.records
        ),
    )


def unmeasured(items: Sequence[Observation], scope: str, status: str, reason: str) -> tuple[Observation, ...]:
    """Return the observations after the port figures of `scope` were replaced. `scope` is a port, or a port and a partner host.

    In their place, each stage has one observation with this status and reason, and without a value.
    """
    of_scope = [item for item in items if item.name.startswith("verbs.") and item.scope.startswith(scope)]
    reasons = [
        Observation(name="verbs.bandwidth", scope=scope, stage=stage, unit="B/s", status=status, reason=reason)
        for stage in sorted({item.stage for item in of_scope})
    ]
    return (*(item for item in items if item not in of_scope), *reasons)


def test_port_that_is_down_is_the_only_cause_in_a_gang_of_two(tmp_path: Path) -> None:
    """The port of the other host is healthy, but cannot be measured without a partner.

    It must not be a cause, even if the inventory requires that ports are measured.
    """
    fleet = Fleet(hosts=2, gpus=2, profile="standard", readings=JUDGED)
    plan = fleet.plan("run", CREATED)
    write_run(tmp_path / "run", fleet, [], plan)
    run = load(tmp_path / "run")
    evidence = {"r01-h01": with_port_down(run.evidence["r01-h01"]), "r01-h02": run.evidence["r01-h02"]}
    host_record, gang_record = sorted(evidence["r01-h02"].records, key=lambda record: bool(record.gang))
    without_ratio = [item for item in gang_record.observations if (item.name, item.scope) != ("verbs.best_ratio", PORT)]
    skipped = unmeasured(without_ratio, f"{PORT},partner=r01-h01", "skipped", "r01-h01 measures no port on this rail")
    evidence["r01-h02"] = replace(
        evidence["r01-h02"], records=(host_record, replace(gang_record, observations=skipped))
    )
    for is_required in (False, True):
        hosts = tuple(replace(host, verbs_required=is_required, infiniband_ports=2) for host in plan.hosts)
        report = merge(replace(plan, hosts=hosts), evidence, read_packs([]))
        (cause,) = report.causes
        assert (cause.problem, cause.host, cause.part) == ("port-down", "r01-h01", "hca=mlx5_1")
        decisions = {host.name: host.decision for host in report.hosts}
        assert decisions == {"r01-h01": REJECTED, "r01-h02": INCOMPLETE if is_required else ACCEPTED}


@pytest.mark.parametrize(
    ("fault", "hosts", "parts", "words", "verdict"),
    [
        ("slow_nic:r01-h02:1", {"r01-h02"}, {"hca=mlx5_1"}, "suspect NIC r01-h02 rail 1", FAIL),
        ("slow_cable:r01-h02:1", {"r01-h02"}, {"hca=mlx5_1"}, "suspect cable r01-h02 rail 1", FAIL),
        ("slow_path:r01-h02:1", {"r01-h02", "r01-h03"}, {"gang=all"}, "link r01-h02 - r01-h03 rail 1", INCONCLUSIVE),
        (
            "slow_switch:r01-h02:1", {"r01-h01", "r01-h02", "r01-h03"}, {"switch=0x5140000000000001"},
            "; the switch is leaf01-rail1", FAIL,
        ),
        ("slow_rail:r01-h02:1", {f"r01-h0{number}" for number in range(1, 7)}, {"rail=1"}, "rail 1", FAIL),
    ],
)  # fmt: skip
def test_slow_part_of_the_fabric_is_the_only_cause(
    tmp_path: Path, fault: str, hosts: set[str], parts: set[str], words: str, verdict: str
) -> None:
    report = report_of(run_of(tmp_path / "run", fault))
    (cause,) = report.causes
    assert (cause.problem, cause.verdict) == ("slow-path" if fault.startswith("slow_path") else "slow-network", verdict)
    assert set(cause.hosts) == hosts
    assert {part.scope for part in cause.parts} == parts
    assert any(words in item.reason for item in report.verdicts if item.verdict == verdict)
    assert {host.name for host in report.hosts if host.decision != "accepted"} == hosts
    if verdict == FAIL and len(hosts) > 1:
        assert cause.title.startswith(f"{parts.copy().pop().replace('=', ' ')} ({len(hosts)} hosts) is slow")


def test_slow_switch_of_most_hosts_is_not_reported_as_a_slow_rail(tmp_path: Path) -> None:
    """Four of six hosts are at the slow switch. The other two are on the same rail and not slow, so the rail is not slow."""
    report = report_of(run_of(tmp_path / "run", "slow_switch:r01-h02:1", hosts_per_leaf=4))
    (cause,) = report.causes
    assert cause.part == "switch=0x5140000000000001"
    assert len(cause.hosts) == 4


def test_report_and_rma_name_the_slow_switch(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = tmp_path / "run"
    run_of(run, "slow_switch:r01-h02:1")
    assert main(["report", str(run)]) == 1
    assert "Check the switch: temperature and power" in capsys.readouterr().out
    assert main(["rma", str(run), "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert {(row["place"], row["serial"]) for row in rows} == {("switch=0x5140000000000001", "")}


def test_option_sets_the_number_of_hosts_on_a_leaf_switch(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--hosts", "4", "--gpus", "1", "--hosts-per-leaf", "2", "--profile", PROFILE]
    assert main(["simulate", str(tmp_path / "run"), *options]) == 0
    switches = set()
    for path in (tmp_path / "run/hosts").iterdir():
        metrics = json.loads(path.read_text(encoding="utf-8"))["snapshots"][-1]["metrics"]
        switches |= {
            value for each in metrics if each["name"] == "infiniband.switch" for value in each["values"].values()
        }
    assert switches == {"leaf01-rail0", "leaf02-rail0"}


FAULTY = "r01-h02"
NETWORK_FAULTS = (
    *("slow_nic", "slow_cable", "slow_path", "slow_switch", "slow_rail", "slow_host", "swapped_cables"),
    *("dark_lane", "degrading_cable"),
)
PAIRS = [
    pair for pair in combinations_with_replacement(NETWORK_FAULTS, 2) if len({*pair}) == 2 or FAULTS[pair[0]].of_gpu
]
"""Pairs of network faults. A pair of the same kind is on two rails; a fault of the whole host occurs once."""
ONE_CAUSE = [
    *[{"slow_host", kind} for kind in NETWORK_FAULTS if kind not in ("dark_lane", "degrading_cable")],
    {"slow_path"},
    {"dark_lane", "degrading_cable"},
]
"""Pairs in which one fault can hide the cause of the other, so the report need not have both causes."""


def request(kind: str, gpu: int) -> str:
    return f"{kind}:{FAULTY}:{gpu}" if FAULTS[kind].of_gpu else f"{kind}:{FAULTY}"


@dataclass
class Signs:
    """What a run with faults of FAULTY shows."""

    run: Run

    @cached_property
    def contents(self) -> dict[tuple[Any, ...], Any]:
        """Return each reading and figure of FAULTY."""
        found: dict[tuple[Any, ...], Any] = {}
        for record in self.run.evidence[FAULTY].records:
            for snapshot in record.snapshots:
                for metric in snapshot.metrics:
                    of_snapshot = (record.gang, snapshot.stage, snapshot.phase, metric.name)
                    found |= {(*of_snapshot, scope): value for scope, value in metric.values.items()}
            for item in record.observations:
                found[record.gang, item.stage, item.name, item.scope, json.dumps(item.params, sort_keys=True)] = (
                    item.value
                )
        return found

    @cached_property
    def causes(self) -> set[tuple[str, str]]:
        """Return the causes in a report that judges only the network."""
        packs = fleets.packs_about("verbs", "infiniband", "port", "optics", "network")
        return {(cause.problem, cause.part) for cause in report_of(self.run, packs).causes}


@pytest.fixture(scope="module")
def signs_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Signs]:
    """Return a function that takes faults in the form of `request` and returns the signs of a run with them.

    The function simulates each run only once.
    """

    @cache
    def signs(*faults: str) -> Signs:
        return Signs(run_of(tmp_path_factory.mktemp("run") / "run", *faults, hosts=5, gpus=4))

    return signs


@pytest.mark.parametrize("kinds", PAIRS, ids="-".join)
def test_two_network_faults_of_a_host_are_both_in_the_evidence(
    signs_of: Callable[..., Signs], kinds: tuple[str, str]
) -> None:
    """If the pair is not in ONE_CAUSE, both causes are in the report too."""
    requests = [request(kind, gpu) for kind, gpu in zip(kinds, (0, 2), strict=True)]
    healthy, both = signs_of(), signs_of(*requests)
    for one in map(signs_of, requests):
        changed = {
            key: healthy.contents.get(key) for key, value in one.contents.items() if healthy.contents.get(key) != value
        }
        assert changed
        assert [key for key, value in changed.items() if both.contents.get(key) == value] == []
        if {*kinds} not in ONE_CAUSE:
            assert one.causes
            assert both.causes >= one.causes


@pytest.mark.parametrize("kinds", PAIRS[::7], ids="-".join)
def test_order_of_the_faults_of_a_host_does_not_matter(
    tmp_path: Path, signs_of: Callable[..., Signs], kinds: tuple[str, str]
) -> None:
    requests = [request(kind, gpu) for kind, gpu in zip(kinds, (0, 2), strict=True)]
    assert (
        signs_of(*requests).contents == Signs(run_of(tmp_path / "run", *reversed(requests), hosts=5, gpus=4)).contents
    )


@pytest.mark.parametrize(
    ("kinds", "culprit"),
    [
        *[({"xid79", other}, "rank_ended") for other in ("slow_nic", "slow_host")],
        *[({"missing_gpu", other}, "rank_unable") for other in ("slow_nic", "xid79", "hung")],
        ({"hung", "slow_cable"}, "rank_silent"),
    ],
)
def test_fault_that_ends_a_launch_does_so_in_spite_of_another_fault_of_its_host(
    tmp_path: Path, kinds: set[str], culprit: str
) -> None:
    for number, order in enumerate((sorted(kinds), sorted(kinds, reverse=True))):
        run = run_of(tmp_path / f"run{number}", *(request(kind, 1) for kind in order), hosts=3, gpus=2)
        (gang,) = (record for record in run.evidence[FAULTY].records if record.gang)
        assert [launch.culprit.kind for launch in gang.launches if launch.culprit] == [culprit]


def test_slowest_of_several_faulty_parts_determines_the_speed(tmp_path: Path) -> None:
    """A pair of hosts with two slow cables on one rail is as fast as with one, and so is a collective."""
    cables = [f"slow_cable:r01-h0{number}:1" for number in (1, 2)]
    both = [run_of(tmp_path / f"run{number}", *faults) for number, faults in enumerate((cables[1:], cables))]
    one, two = (
        {key: value for key, value in Signs(run).contents.items() if "partner=r01-h01" in key[3]} for run in both
    )
    assert one == two
