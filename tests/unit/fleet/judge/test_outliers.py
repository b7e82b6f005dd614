"""Test limits that depend on the fleet: a fraction of its median, or a number of robust deviations from its median.

A figure is compared with the figures of its peers: all comparable parts, or only those in the same position of their hosts.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest

from fleet.criteria_lint.lint import lint
from fleet.judge.criteria import Criterion, Pack, read_pack
from fleet.judge.evidence import Evidence, Planned
from fleet.judge.host_view import HostView
from fleet.judge.judge import judge
from fleet.judge.outliers import (
    FleetFigures,
    PeerGroup,
    compared_names,
    explanation,
    has_enough_peers,
    limit,
    model_readings,
    too_few_reason,
)
from schemas.errors import UsageError
from schemas.records import ERROR, Metric, Observation, Record
from schemas.reports import FAIL, INCONCLUSIVE, PASS, Verdict
from tests import builders
from tests.accepted import small_plan
from tests.unit.fleet.judge.small_fleet import host_view, one_figure_plan

NORMAL = (1.0, 1.001, 0.999, 1.002, 0.998, 1.0005, 0.9995, 1.0015, 0.9985, 1.0)
"""Factors by which the rate of a healthy GPU is multiplied. Their robust standard deviation is about 0.15 %."""


def criterion(**fields: object) -> Criterion:
    default = {"id": "relative", "name": "stress.throughput", "scope": "gpu", "operator": "ge", "unit": "FLOP/s"}
    return Criterion(**{**default, "action": "inspect_hardware", "source": "a test", **fields})  # type: ignore[arg-type]


def relative_verdicts(
    criterion: Criterion,
    shares: dict[str, tuple[float, float]],
    part_numbers: Mapping[str, str] = MappingProxyType({}),
    products: Mapping[str, str] = MappingProxyType({}),
) -> dict[tuple[str, str], Verdict]:
    """Return (host, scope) -> verdict.

    Args:
        criterion: the only criterion.
        shares: host -> factors of the rates of its two GPUs.
        part_numbers: host -> part number of its GPUs. The GPUs of hosts that are not listed report no part number.
        products: host -> its product name. Hosts that are not listed report none.
    """
    plan = small_plan(*shares)
    evidence = {}
    for host in shares:

        def share(record: Record, host: str = host) -> Record:
            observed = tuple(
                replace(item, value=float(item.value) * shares[host][int(item.scope[-1])])
                if item.name == criterion.name and isinstance(item.value, float)
                else item
                for item in record.observations
            )
            record = with_part_number(replace(record, observations=observed), part_numbers.get(host, ""))
            return with_reading(record, "host.system.product", {"host": products[host]}) if host in products else record

        evidence[host] = Evidence(records=tuple(map(share, builders.records(plan, host))))
    packs = (Pack(name="h200-sxm", gpu_names=("NVIDIA H200",), criteria=(criterion,)),)
    return {(item.host, item.scope): item for item in judge(plan, evidence, packs) if item.criterion == "relative"}


def with_part_number(record: Record, part_number: str) -> Record:
    """Return the record with this part number of both GPUs in all snapshots, or unchanged if `part_number` is empty."""
    values = dict.fromkeys(("gpu=0", "gpu=1"), part_number)
    return with_reading(record, "gpu.part_number", values) if part_number else record


def with_reading(record: Record, name: str, values: Mapping[str, str]) -> Record:
    """Return the record with this reading in all snapshots."""
    metric = Metric(name=name, unit="1", values=dict(values))
    snapshots = tuple(replace(taken, metrics=(*taken.metrics, metric)) for taken in record.snapshots)
    return replace(record, snapshots=snapshots)


def normal_factors(count: int, **odd: tuple[float, float]) -> dict[str, tuple[float, float]]:
    """Return host -> factors of the rates of its two GPUs.

    The `count` hosts h0, h1, … have factors from NORMAL. `odd`: hosts to replace or to add, with their factors.
    """
    usual = {f"h{number}": (NORMAL[number % 10], NORMAL[(number + 3) % 10]) for number in range(count)}
    return {**usual, **odd}


def test_only_the_outlier_fails_and_its_verdict_explains_the_limit() -> None:
    verdicts = relative_verdicts(criterion(fleet_deviations=6.0), normal_factors(6, h2=(0.98, 1.0)))
    assert [position for position, item in verdicts.items() if item.verdict == FAIL] == [("h2", "gpu=0")]
    assert "6 robust deviations" in verdicts[("h2", "gpu=0")].detail
    assert "over 12 GPUs" in verdicts[("h2", "gpu=0")].detail


def test_deviation_limit_needs_eight_parts() -> None:
    verdicts = relative_verdicts(criterion(fleet_deviations=6.0), normal_factors(3, h2=(0.5, 1.0)))
    assert {item.verdict for item in verdicts.values()} == {INCONCLUSIVE}
    assert "a deviation needs at least 8" in next(iter(verdicts.values())).reason
    assert relative_verdicts(criterion(fleet_deviations=6.0, optional=True), normal_factors(3)) == {}


def test_gang_that_is_added_after_a_comparison_is_included_in_later_comparisons() -> None:
    figures = FleetFigures(Planned(small_plan("h1", "h2")))
    key = ("NVIDIA H200", "collective.all_reduce.busbw", "gang", "gang", (), "")
    for number in (1, 2):
        figures.add_figures(key, f"gang=r{number}", [float(number)])
        assert len(figures.peers_at(key, "gang=r1").values) == number


def test_looser_of_fraction_and_deviations_is_the_limit() -> None:
    """A rate 1.2 % below the median is many deviations away, but within the 2 % that the fraction allows."""
    slow = normal_factors(6, h2=(0.988, 1.0))
    assert relative_verdicts(criterion(fleet_deviations=4.0), slow)[("h2", "gpu=0")].verdict == FAIL
    assert (
        relative_verdicts(criterion(fleet_deviations=4.0, fleet_fraction=0.98), slow)[("h2", "gpu=0")].verdict == PASS
    )
    # If the fleet is too small for deviations, only the fraction applies.
    few = relative_verdicts(criterion(fleet_deviations=4.0, fleet_fraction=0.98), normal_factors(3, h2=(0.95, 1.0)))
    assert [position for position, item in few.items() if item.verdict == FAIL] == [("h2", "gpu=0")]


def test_parts_are_compared_by_position_only_if_enough_parts_share_the_position() -> None:
    """The second GPU of every host is 4 % slower than the first, so a slow first GPU is found only by position."""
    warm = {host: (first, second * 0.96) for host, (first, second) in normal_factors(10).items()}
    warm["h3"] = (0.97, 0.96)
    by_model = relative_verdicts(criterion(fleet_fraction=0.985), warm)
    assert {item.verdict for item in by_model.values()} == {PASS}
    verdicts = relative_verdicts(criterion(fleet_fraction=0.985, by_position=True), warm)
    assert [position for position, item in verdicts.items() if item.verdict == FAIL] == [("h3", "gpu=0")]
    assert "over 10 GPUs at gpu=0" in verdicts[("h3", "gpu=0")].detail
    few = {host: warm[host] for host in ("h0", "h1", "h2", "h4")}
    assert (
        "over 8 GPUs"
        in next(iter(relative_verdicts(criterion(fleet_fraction=0.5, by_position=True), few).values())).detail
    )


MEMORY = criterion(name="memory.bandwidth", where={"op": "copy"}, unit="B/s", fleet_fraction=0.98)


@pytest.mark.parametrize("hosts", [2, 3, 6, 40])
def test_gpus_are_compared_with_gpus_of_the_same_part_number(hosts: int) -> None:
    """GPUs with the second part number are 3 % slower than GPUs with the first one.

    For each part number, one GPU is 3 % slower than the other GPUs with this part number.
    """
    first = normal_factors(hosts)
    second = {f"slower-{host}": (one * 0.97, two * 0.97) for host, (one, two) in first.items()}
    numbers = {**dict.fromkeys(first, "692-2G520-0282-001"), **dict.fromkeys(second, "692-2G520-0282-000")}
    first["h1"], second["slower-h1"] = (0.97, 1.0), (0.97**2, 0.97)
    rule = MEMORY
    verdicts = relative_verdicts(rule, {**first, **second}, numbers)
    failed = {position: item for position, item in verdicts.items() if item.verdict == FAIL}
    assert set(failed) == {("h1", "gpu=0"), ("slower-h1", "gpu=0")}
    assert f"over {2 * hosts} GPUs with part number 692-2G520-0282-000" in failed["slower-h1", "gpu=0"].detail
    assert "part number" not in relative_verdicts(rule, first, numbers)["h1", "gpu=0"].detail


@pytest.mark.parametrize("usual", ["692-2G520-0282-000", "692-2G520-0282-001"])
@pytest.mark.parametrize("share", [0.5, 0.97, 1.03])
@pytest.mark.parametrize("hosts", [1, 2, 6])
def test_gpus_are_not_compared_with_gpus_of_other_part_numbers(hosts: int, share: float, usual: str) -> None:
    """Host `odd` has another part number. Its two GPUs are too few for a median."""
    rates = {**normal_factors(hosts, h0=(1.0, 0.5)), "odd": (share, share)}
    numbers = {host: "692-2G520-0280-010" if host == "odd" else usual for host in rates}
    verdicts = relative_verdicts(MEMORY, rates, numbers)
    assert {(item.verdict, item.action) for (host, _), item in verdicts.items() if host == "odd"} == {
        (INCONCLUSIVE, "none")
    }
    too_few = (
        "the run has 2 GPUs with part number 692-2G520-0280-010 of NVIDIA H200 with this figure, but a median needs"
    )
    assert too_few in verdicts["odd", "gpu=0"].reason
    failed = {place for place, item in verdicts.items() if item.verdict == FAIL}
    assert failed == ({("h0", "gpu=1")} if hosts > 1 else set()), "GPUs of the usual part number are still compared"
    optional = relative_verdicts(replace(MEMORY, optional=True), rates, numbers)
    assert not [host for host, _ in optional if host == "odd"], "not judged"


@pytest.mark.parametrize(
    ("known", "peers"),
    [
        ((), "12 GPUs"),
        (("000",), "12 GPUs"),
        (("000", "000"), "12 GPUs"),
        (("000", "001"), "8 GPUs with part number unknown"),
    ],
)
def test_gpus_of_an_unknown_part_number_count_as_those_of_the_only_known_one(
    known: tuple[str, ...], peers: str
) -> None:
    """`known`: part numbers of the first hosts."""
    verdicts = relative_verdicts(
        MEMORY, normal_factors(6, h5=(0.9, 1.0)), {f"h{at}": number for at, number in enumerate(known)}
    )
    assert verdicts["h5", "gpu=0"].detail.endswith(f"over {peers}")
    assert {place for place, item in verdicts.items() if item.verdict == FAIL} == {("h5", "gpu=0")}


def test_only_figures_of_memory_are_compared_by_part_number() -> None:
    rates = {**normal_factors(6), **{f"odd{number}": (0.97, 0.97) for number in range(4)}}
    numbers = {host: "odd" if host.startswith("odd") else "usual" for host in rates}
    by_model = relative_verdicts(criterion(fleet_fraction=0.98), rates, numbers)
    assert {host for (host, _), item in by_model.items() if item.verdict == FAIL} == {
        f"odd{number}" for number in range(4)
    }
    assert {item.verdict for item in relative_verdicts(MEMORY, rates, numbers).values()} == {PASS}


@pytest.mark.parametrize("unknown", [1, 5])
def test_gpus_without_part_number_are_compared_with_all_gpus_of_the_model(unknown: int) -> None:
    rates = normal_factors(6, h5=(0.97, 1.0))
    numbers = dict.fromkeys(list(rates)[unknown:], "692-2G520-0282-001")
    verdicts = relative_verdicts(MEMORY, rates, numbers)
    assert [position for position, item in verdicts.items() if item.verdict == FAIL] == [("h5", "gpu=0")]
    assert "over 12 GPUs" in verdicts["h0", "gpu=0"].detail


OF_HOST = criterion(
    name="host_copy.bandwidth",
    where={"sharing": "alone", "direction": "host_to_device"},
    unit="B/s",
    fleet_fraction=0.90,
    optional=True,
)


@pytest.mark.parametrize("hosts", [3, 8])
def test_figures_of_the_host_are_compared_with_hosts_of_the_same_product(hosts: int) -> None:
    """Hosts of the second product have 30 % slower PCIe links. Of each product, one host is 20 % slower than the others."""
    first = normal_factors(hosts)
    second = {f"other-{host}": (one * 0.7, two * 0.7) for host, (one, two) in first.items()}
    products = {**dict.fromkeys(first, "PowerEdge XE9680"), **dict.fromkeys(second, "SYS-821GE-TNHR")}
    assert set(of_verdict(FAIL, relative_verdicts(OF_HOST, {**first, **second}, products=products))) == set()
    first["h1"], second["other-h1"] = (0.8, 1.0), (0.7, 0.56)
    verdicts = relative_verdicts(OF_HOST, {**first, **second}, products=products)
    assert set(of_verdict(FAIL, verdicts)) == {("h1", "gpu=0"), ("other-h1", "gpu=1")}
    assert f"over {2 * hosts} GPUs" in verdicts["other-h1", "gpu=1"].detail


@pytest.mark.parametrize(("odd", "judged"), [(1, False), (2, True)])
def test_hosts_of_a_rare_product_are_not_compared_with_those_of_another_product(odd: int, judged: bool) -> None:
    """The GPUs of two hosts are enough for a comparison, those of one host are not."""
    rare = {f"odd{number}": (0.7, 0.7) for number in range(odd)}
    rates = {**normal_factors(4), **rare}
    products = {host: "odd" if host in rare else "usual" for host in rates}
    verdicts = relative_verdicts(OF_HOST, rates, products=products)
    assert of_verdict(FAIL, verdicts) == {}
    assert (("odd0", "gpu=0") in verdicts) is judged


def test_product_of_a_host_does_not_matter_for_figures_of_gpus_or_if_no_host_reports_a_product() -> None:
    rates = {**normal_factors(4), "odd0": (0.7, 0.7)}
    products = {host: "odd" if host == "odd0" else "usual" for host in rates}
    of_gpu = relative_verdicts(criterion(fleet_fraction=0.9), rates, products=products)
    assert {host for host, _ in of_verdict(FAIL, of_gpu)} == {"odd0"}
    assert {host for host, _ in of_verdict(FAIL, relative_verdicts(OF_HOST, rates))} == {"odd0"}


def of_verdict(kind: str, verdicts: Mapping[tuple[str, str], Verdict]) -> dict[tuple[str, str], Verdict]:
    return {position: item for position, item in verdicts.items() if item.verdict == kind}


PACK = """\
schema: rackproof.criteria/1
summary: ours
criteria:
  - {{id: a, name: stress.throughput, scope: gpu, operator: {operator}, {limit}, unit: FLOP/s, action: rma, source: "ours alone"}}
"""


@pytest.mark.parametrize(
    ("operator", "limit", "finding"),
    [
        ("ge", "vs_fleet: {deviations: 5}", ""),
        ("ge", "vs_fleet: {fraction: 0.95, deviations: 5, by: position}", ""),
        ("ge", "vs_baseline: {fraction: 0.95}", ""),
        ("ge", "vs_baseline: {fraction: 1.05}", "half of the healthy parts would fail"),
        ("eq", "vs_baseline: {fraction: 0.95}", "no two measurements"),
        ("eq", "vs_fleet: {deviations: 5}", "no two measurements"),
    ],
)
def test_lint_checks_fleet_and_baseline_limits(operator: str, limit: str, finding: str, tmp_path: Path) -> None:
    path = tmp_path / "ours.yml"
    path.write_text(PACK.format(operator=operator, limit=limit))
    result = [str(item) for item in lint(read_pack(str(path)))]
    assert any(finding in text for text in result) if finding else result == []


@pytest.mark.parametrize(
    "limit",
    [
        "vs_fleet: {by: position}",
        "vs_fleet: {deviations: 1}",
        "vs_baseline: {sigmas: 4}",
        "vs_baseline: {fraction: 0.9, change: 1}",
        "vs_baseline: {fraction: 0.9}, value: 1.0",
    ],
)
def test_limit_with_missing_conflicting_or_too_small_values_is_refused(limit: str, tmp_path: Path) -> None:
    path = tmp_path / "ours.yml"
    path.write_text(PACK.format(operator="ge", limit=limit))
    with pytest.raises(UsageError):
        read_pack(str(path))


# ---- peers ----

PLAN = one_figure_plan("h1", "h2", gpu_count=2)
KEY = ("NVIDIA H200", "stress.throughput", "benchmark", "gpu", (), "")
DISK, LIGHT, PART_NUMBER = "local_storage.read_bandwidth", "optics.rx_power", "optics.module.part_number"


def peer_group(*values: float, kind: str = "gpu", position: str = "") -> PeerGroup:
    return PeerGroup(model="NVIDIA H200", kind=kind, values=values, position=position)


@pytest.mark.parametrize(
    ("kind", "count", "position", "text"),
    [
        ("gpu", 0, "", "0 GPUs"),
        ("gpu", 1, "", "1 GPU"),
        ("gpu", 2, "gpu=3", "2 GPUs at gpu=3"),
        ("cpu", 2, "", "2 processes"),  # in a run without GPUs, the scope of a process is `cpu=0`, `cpu=1` ...
        ("bridge", 1, "", "1 part"),
        ("bridge", 2, "", "2 parts"),
    ],
)
def test_text_with_the_number_of_peers_names_their_kind_and_position(
    kind: str, count: int, position: str, text: str
) -> None:
    assert peer_group(*range(count), kind=kind, position=position).count == text


def test_median_needs_three_peers_and_deviation_eight() -> None:
    assert [peer_group(*range(count)).has_median for count in (2, 3)] == [False, True]
    assert [peer_group(*range(count)).deviation is None for count in (7, 8)] == [True, False]
    values = peer_group(1, 2, 3, 4, 5, 6, 7, 80)
    assert values.median == 4.5
    assert values.deviation == pytest.approx(1.4826 * 2)
    assert [has_enough_peers(criterion(fleet_fraction=0.9), peer_group(*range(count))) for count in (2, 3)] == [
        False, True
    ]  # fmt: skip
    assert [has_enough_peers(criterion(fleet_deviations=4.0), peer_group(*range(count))) for count in (7, 8)] == [
        False, True
    ]  # fmt: skip


TEN = (98.0, 99.0, 99.0, 100.0, 100.0, 100.0, 101.0, 101.0, 102.0, 150.0)
"""Values with the median 100 and a robust deviation of 1.4826."""


@pytest.mark.parametrize(
    ("fields", "values", "expected", "text"),
    [
        ({"fleet_fraction": 0.95}, TEN, 95.0, "95 % of the fleet's median M over 10 GPUs"),
        ({"fleet_fraction": 1.2, "operator": "le"}, TEN, 120.0, "120 % of the fleet's median M over 10 GPUs"),
        (
            {"fleet_deviations": 4.0}, TEN, 100 - 4 * 1.4826,
            "4 robust deviations from the fleet's median M over 10 GPUs (a deviation is 1.5 % of the median)",
        ),
        (
            {"fleet_deviations": 4.0, "operator": "le"}, TEN, 100 + 4 * 1.4826,
            "4 robust deviations from the fleet's median M over 10 GPUs (a deviation is 1.5 % of the median)",
        ),
        (
            {"fleet_deviations": 4.0, "operator": "le"}, tuple(-value for value in TEN), -100 + 4 * 1.4826,
            "4 robust deviations from the fleet's median M over 10 GPUs (a deviation is 1.5 % of the median)",
        ),
        (
            {"fleet_deviations": 4.0, "operator": "le"}, tuple(value - 100 for value in TEN), 4 * 1.4826,
            "4 robust deviations from the fleet's median M over 10 GPUs",
        ),
        (
            {"fleet_deviations": 4.0, "fleet_fraction": 0.98}, TEN, 100 - 4 * 1.4826,
            "4 robust deviations from the fleet's median M over 10 GPUs (a deviation is 1.5 % of the median)",
        ),
        (
            {"fleet_deviations": 4.0, "fleet_fraction": 0.9}, TEN, 90.0,
            "90 % of the fleet's median M over 10 GPUs",
        ),
        (
            {"fleet_deviations": 4.0, "fleet_fraction": 1.02, "operator": "le"}, TEN, 100 + 4 * 1.4826,
            "4 robust deviations from the fleet's median M over 10 GPUs (a deviation is 1.5 % of the median)",
        ),
        (
            {"fleet_deviations": 60.0, "fleet_fraction": 0.9}, TEN, 45.0,
            "45 % of the fleet's median M over 10 GPUs",
        ),
        (
            {"fleet_deviations": 70.0, "fleet_fraction": 1.02, "operator": "le"}, TEN, 100 + 70 * 1.4826,
            "70 robust deviations from the fleet's median M over 10 GPUs (a deviation is 1.5 % of the median)",
        ),
        (
            {"fleet_deviations": 4.0, "fleet_fraction": 0.98}, TEN[2:5], 98.0,
            "98 % of the fleet's median M over 3 GPUs",
        ),
    ],
)  # fmt: skip
def test_limit_that_is_farther_from_the_median_applies_and_its_origin_is_explained(
    fields: dict[str, Any], values: tuple[float, ...], expected: float, text: str
) -> None:
    rule, peers = criterion(**fields), peer_group(*values)
    assert limit(rule, peers) == pytest.approx(expected)
    assert explanation(rule, peers, "M") == f"the limit is {text}"


def test_limit_cannot_be_computed_from_too_few_peers() -> None:
    with pytest.raises(ValueError, match="3 GPUs are too few for criterion `relative`"):
        limit(criterion(fleet_deviations=4.0), peer_group(1, 2, 3))


@pytest.mark.parametrize(
    ("fields", "needs"),
    [
        ({"fleet_fraction": 0.9}, "a median needs at least 3"),
        ({"fleet_fraction": 0.9, "fleet_deviations": 4.0}, "a median needs at least 3"),
        ({"fleet_deviations": 4.0}, "a deviation needs at least 8"),
    ],
)
def test_reason_for_too_few_peers_names_the_number_that_is_needed(fields: dict[str, Any], needs: str) -> None:
    reason = too_few_reason(peer_group(1, 2), criterion(**fields))
    assert reason == f"the run has 2 GPUs of NVIDIA H200 with this figure, but {needs}"


def figure(value: Any, name: str = "stress.throughput", scope: str = "gpu=0", **params: Any) -> Observation:
    return builders.observation(name, value, scope=scope, unit="1", **params)


def view(*observations: Observation, metrics: tuple[Metric, ...] = (), packs: tuple[Pack, ...] = ()) -> HostView:
    return host_view(PLAN, "h1", *metrics, observations=observations, packs=packs)


def test_figure_of_a_part_is_its_last_finite_value() -> None:
    lost = replace(figure(1.0, scope="gpu=1"), status=ERROR, value=None, reason="lost")
    host = view(figure(5.0), figure(6.0), figure(math.inf), figure("text"), figure(7.0, scope="gpu=1"), lost)
    result = FleetFigures(Planned(PLAN)).figures(host, "stress.throughput")
    assert [(scope, number) for _, scope, number in result] == [("gpu=0", 6.0), ("gpu=1", 7.0)]


@pytest.mark.parametrize(
    ("item", "model", "kind"),
    [
        (figure(1.0), "NVIDIA H200", "gpu"),
        (figure(1.0, scope="gpu=0,link=1"), "NVIDIA H200", "link"),
        (figure(1.0, scope="host"), "NVIDIA H200", "host"),
        (figure(1.0, DISK, "directory=data", model="PM1743"), "PM1743", "directory"),
        (figure(1.0, DISK, "directory=data", model="PM1743", directories=1), "PM1743", "directory"),
        (figure(1.0, DISK, "directory=data", model="PM1743", directories=2), "PM1743, 2 directories", "directory"),
        (figure(1.0, DISK, "directory=data"), "an unknown model", "directory"),
        (figure(1.0, LIGHT, "hca=a,port=1,lane=2"), "AC-400", "lane"),
        (figure(1.0, LIGHT, "hca=a,port=1"), "AC-400", "port"),
        (figure(1.0, LIGHT, "hca=b,port=1"), "an unknown model", "port"),
    ],
)
def test_parts_are_compared_with_parts_of_the_same_model(item: Observation, model: str, kind: str) -> None:
    module = Metric(name=PART_NUMBER, unit="1", values={"hca=a,port=1": "AC-400"})
    host, figures = view(item, metrics=(module,)), FleetFigures(Planned(PLAN))
    key = figures.key(host, item)
    assert key[:4] == (model, item.name, "benchmark", kind)
    assert [*figures.latest(host, host.observations[item.name])] == (
        [] if model == "an unknown model" else [(key, item.scope)]
    )


def test_peers_are_the_parts_in_the_same_position_if_there_are_eight_or_else_all_parts() -> None:
    figures, by_position = FleetFigures(Planned(PLAN)), criterion(fleet_fraction=0.9, by_position=True)
    figures.add_figures(KEY, "gpu=0", [3.0, 1.0, 2.0, 4.0, 5.0, 6.0, 7.0])
    other = FleetFigures(Planned(PLAN))
    other.add_figures(KEY, "gpu=1", [10.0])
    assert figures.peers_at(KEY, "gpu=0", by_position).values == (1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0)
    assert figures.peers_at(KEY, "gpu=0", by_position).position == "", "seven in one position are too few"
    figures.update(other)
    assert figures.peers_at(KEY, "gpu=0", by_position).values[-1] == 10.0
    other.add_figures(KEY, "gpu=0", [8.0])
    figures.update(other)
    group = figures.peers_at(KEY, "gpu=0", by_position)
    assert (group.values, group.position) == ((1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0), "gpu=0")
    assert len(figures.peers_at(KEY, "gpu=0", criterion(fleet_fraction=0.9)).values) == 10
    assert len(figures.peers_at(KEY, "gpu=0").values) == 10
    assert figures.peers_at(KEY, "gpu=7", by_position).position == "", "no part is in this position"


def test_only_the_last_figure_of_each_gang_is_compared() -> None:
    key = ("", "collective.all_reduce.busbw", "gang", "gang", (), "")
    figures, other = FleetFigures(Planned(PLAN)), FleetFigures(Planned(PLAN))
    figures.add_figures(key, "gang=a", [1.0, 2.0])
    figures.add_figures(key, "gang=a", [3.0])
    other.add_figures(key, "gang=a", [3.0])
    other.add_figures(key, "gang=b", [4.0])
    figures.update(other)
    group = figures.peers_at(key, "gang=a")
    assert (group.values, group.model, group.kind) == ((3.0, 4.0), "this kind", "gang")
    many = FleetFigures(Planned(PLAN))
    for number in range(9):
        many.add_figures(key, f"gang={number}", [float(number)])
    by_position = criterion(fleet_fraction=0.9, by_position=True)
    group = many.peers_at(key, "gang=1", by_position)
    assert (len(group.values), group.position) == (9, ""), "a gang has no position in a host"


@pytest.mark.parametrize(
    ("name", "fields", "expected"),
    [
        (LIGHT, {"fleet_fraction": 0.25}, (PART_NUMBER,)),
        (LIGHT, {"value": 1}, ()),
        ("stress.throughput", {"fleet_fraction": 0.9}, ()),
    ],
)
def test_part_number_of_a_module_is_read_only_for_a_comparison_with_the_fleet(
    name: str, fields: dict[str, Any], expected: tuple[str, ...]
) -> None:
    assert model_readings(criterion(name=name, **fields)) == expected


def test_only_figures_that_a_criterion_compares_with_the_fleet_are_added() -> None:
    rules = (
        criterion(fleet_fraction=0.9),
        criterion(id="floor", name="stress.power", value=1, unit="W"),
    )
    host = view(
        figure(5.0), figure(7.0, "stress.power"), packs=(Pack(name="h200-sxm", gpu_names=("NVIDIA H200",), criteria=rules),)
    )  # fmt: skip
    assert compared_names(host, ["stress.power", "stress.throughput", "other.thing"]) == ["stress.throughput"]
    figures = FleetFigures(Planned(PLAN), [host])
    assert [figures.peers(host, item).values for item in (figure(5.0), figure(7.0, "stress.power"))] == [(5.0,), ()]
