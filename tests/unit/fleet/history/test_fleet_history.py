"""In the history of a simulated fleet over 20 months, exactly the faults that the simulation planted are found.

A lemon is a rack, host, slot or part that fails again and again.
"""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest

from fleet.history.database import History
from fleet.history.figure import Selection, figure_answer
from fleet.history.lemons import lemons
from fleet.history.part import part_answer
from fleet.history.peers import PeerFigure, percentiles
from fleet.history.rows import RunRows
from fleet.history.store import add_run
from fleet.history.trends import drifts
from schemas.baselines import SIMULATED
from tests.histories import AGING_PER_YEAR, DRIVERS, MODEL, STEP, Faults, FleetHistory, found_faults


def test_exactly_the_planted_faults_are_found(fleet: tuple[Faults, Path]) -> None:
    planted, directory = fleet
    assert found_faults(History(directory, SIMULATED)) == planted


def test_drift_has_the_planted_slope_and_a_small_error(fleet: tuple[Faults, Path]) -> None:
    history = History(fleet[1], SIMULATED)
    found_drifts = drifts(history)
    aging = [item for item in found_drifts if item.level == "gpu" and item.shape == "drift"]
    assert len(aging) == 3
    (stepped,) = (item for item in found_drifts if item.shape == "step")
    assert (stepped.per_year, stepped.error) == (None, None)
    assert stepped.change == pytest.approx(math.expm1(STEP), abs=0.003), (
        "the change must be the size of the step, not the slope of a line"
    )
    for item in aging:
        assert item.error
        assert item.per_year == pytest.approx(math.expm1(AGING_PER_YEAR), abs=0.008)
        assert 0.001 < item.error < 0.008
        assert item.meaning == "worse"
        # An aging GPU drifts in gemm.throughput and stress.throughput. One Drift has both: one in `name`, one in `others`.
        assert item.others


def test_each_failing_gpu_of_a_bad_slot_is_named(fleet: tuple[Faults, Path]) -> None:
    """Two slots are lemons: a GPU slot and a DIMM slot. Only the GPU slot has `serials`."""
    (slot,) = (
        item for item in lemons(History(fleet[1], SIMULATED)) if item.kind == "slot" and item.serials and item.is_lemon
    )
    assert slot.episodes == len(slot.serials) == 5


def test_history_of_a_replaced_part_has_its_place_causes_and_repair(fleet: tuple[Faults, Path]) -> None:
    history = History(fleet[1], SIMULATED)
    (slot,) = (item for item in lemons(history) if item.kind == "slot" and item.serials and item.is_lemon)
    sections = {section.name: section.rows for section in part_answer(history, slot.serials[0], values=True).sections}
    (place,) = sections["places"]
    assert (place["host"], place["slot"], place["runs"]) == (slot.host, slot.slot, 3)
    assert [row["problem"] for row in sections["causes"]] == ["gpu-memory"]
    assert slot.serials[1] in sections["repairs"][0]["text"]
    assert {row["runs"] for row in sections["figures"]} == {3}
    assert len(sections["values"]) == 3 * len(sections["figures"])
    assert all(0 <= row["percentile"] <= 100 and row["peers"] > 20 for row in sections["figures"])


def test_distribution_is_listed_by_rack_by_driver_and_by_month(fleet: tuple[Faults, Path]) -> None:
    history = History(fleet[1], SIMULATED)
    answer = figure_answer(
        history, Selection(name="gemm.throughput", settings="dtype=bf16", accepted_only=False), 7.1e14
    )
    sections = {section.name: section.rows for section in answer.sections}
    assert (len(sections["by_rack"]), len(sections["by_driver"]), len(sections["by_month"])) == (7, 3, 20)
    first, second, third = (row["median"] for row in sections["by_driver"])
    assert second / first == pytest.approx(1.02, abs=0.005)
    assert third / second == pytest.approx(1.0, abs=0.005)
    # 7.1e14 FLOP/s is the average level under the first driver. Under the second and third driver, GPUs are 2 % faster, so the
    # percentile of 7.1e14 is lower.
    assert [row["percentile"] > 30 for row in sections["place"]] == [True, False, False]


def test_percentile_is_among_accepted_parts_of_the_same_model_driver_and_stage(fleet: tuple[Faults, Path]) -> None:
    history = History(fleet[1], SIMULATED)

    def figure(value: float, **changed: object) -> PeerFigure:
        fields: dict[str, object] = {
            "name": "memory.bandwidth", "settings": "op=copy", "stage": "benchmark", "model": MODEL, "driver": DRIVERS[0],
            "value": value, **changed,
        }  # fmt: skip
        return PeerFigure(**fields)  # type: ignore[arg-type]

    same = history.rows(
        "select value from figures where accepted and name = 'memory.bandwidth' and driver = $driver",
        {"driver": DRIVERS[0]},
    )
    values = sorted(row[0] for row in same)
    low, middle, high, *others = percentiles(history, [
        figure(values[0] / 2), figure(values[len(values) // 4]), figure(values[-1] * 2), figure(1.0, driver="unknown"),
        figure(1.0, model="NVIDIA H100"), figure(1.0, stage="soak"), figure(1.0, is_gpu=False),
    ])  # fmt: skip
    assert low is not None
    assert middle is not None
    assert high is not None
    assert (low.below, high.below) == (pytest.approx(0.0), pytest.approx(1.0))
    assert (low.values, low.parts) == (len(values), high.parts)
    assert middle.below == pytest.approx(0.25, abs=0.01)
    assert others == [None] * 4


def test_rack_that_drifts_is_found_if_each_run_has_only_one_rack(tmp_path: Path) -> None:
    """No run has other racks to compare with. The seasonal change of stress.throughput (up to 2 %) must not count as a drift.

    The history has the rack that drifts and two other racks.
    """
    simulated = FleetHistory(racks=6, hosts=3, gpus=4, months=10, seed=2)
    (rack,) = (item for item in simulated.planted.drifts if item[0] == "rack")
    others = [name for name in ("r00", "r01", "r02") if name != rack[1]][:2]
    for rows in simulated.rack_runs():
        if rows.entry["run"].endswith((rack[1], *others)):
            add_run(tmp_path, rows)
    result = {(item.level, item.id) for item in drifts(History(tmp_path, SIMULATED))}
    assert rack in result
    assert result <= simulated.planted.drifts.keys()


@pytest.mark.parametrize("is_measured", [True, False])
def test_only_a_run_that_measured_the_host_ends_a_failure(tmp_path: Path, is_measured: bool) -> None:
    """Every second run has a failure of the host. `is_measured`: whether the other runs measured the host.

    If they did not, the failures count as one long failure, and the host is no lemon.
    """
    failure = {
        "host": "r00-h00", "rack": "r00", "slot": "", "serial": "", "problem": "power-supply", "title": "power supply",
        "action": "inspect_hardware", "severity": "critical", "confidence": "certain", "waived": False,
    }  # fmt: skip

    def with_causes(rows: RunRows, fails: bool) -> RunRows:
        hosts = [host if fails or is_measured else replace(host, tests=()) for host in rows.hosts]
        return replace(rows, causes=(failure,) if fails else (), hosts=tuple(hosts))

    for number, rows in enumerate(FleetHistory(racks=6, hosts=3, gpus=4, months=6).runs()):
        add_run(tmp_path, with_causes(rows, number % 2 == 0))
    history = History(tmp_path, SIMULATED)
    assert [item.episodes for item in lemons(history)] == ([3] if is_measured else [])
    repairs = next(s.rows for s in part_answer(history, "r00-h00").sections if s.name == "repairs")
    # The problem has one row, although it was repaired three times.
    assert len(repairs) == (1 if is_measured else 0)
