"""Test scaling studies: the cells of a matrix, the next cell, the results, the page, and the processors of the ranks.

A cell is one training with one combination of settings.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from agent.benchmarks.runtime.host_cpu import parse_cpu_list, pin_to_cpus, select_cpus
from agent.gang.protocol import Gang
from agent.launch.request import LaunchRequest
from agent.launch.stage import count_attempt, run_launch
from agent.launch.torchrun import LaunchError, launcher_command
from agent.run.record import HostRun
from fleet.judge.evidence import Evidence
from fleet.planning.begin import begin
from fleet.planning.plan import PROFILES, make_plan, read_profile
from fleet.records.load import load
from fleet.scaling.page import COLUMN_NOTES, GKE_NOTES, render_html, render_lines, render_markdown, summarize
from fleet.scaling.plots import plots
from fleet.scaling.published import RUNS, closest_cell
from fleet.scaling.results import FAILED, MEASURED, NOT_YET, OPEN, SKIPPED, StudyResults, evaluate_study, next_cell
from rackproof.main import main
from schemas import documents
from schemas.errors import RunError, UsageError
from schemas.plans import Plan, plan_from_json
from schemas.records import ERROR, Launch, Record, to_json
from schemas.stages import CELL
from schemas.studies import Cell
from tests import builders

PROFILE: dict[str, Any] = {
    "schema": "rackproof.profile/1",
    "summary": "a study",
    "device": "gpu",
    "study": {"matrix": [{"hosts": [1, 2, 4], "gpus": [2], "batch_size": [64, 128]}, {"gpus": [1], "cpus": [0, 1]}]},
    "stages": {
        "gang": {"deadline_s": 60, "collective_timeout_s": 30, "benchmarks": {"scaling": {"workers": 2}}},
    },
}
"""Profile of a study with eight cells.

Cells 1 to 6: 1, 2 and 4 hosts with 2 GPUs each, each with batch sizes 64 and 128.
Cells 7 and 8: one GPU, with all CPUs and with one CPU.
"""
REHEARSAL = {**PROFILE, "device": "cpu", "processes_per_host": 2}


def study(tmp_path: Path, *hosts: str, profile: dict[str, Any] = PROFILE, gpu_count: int = 2, **settings: Any) -> Plan:
    """Return the plan of a study; `settings` replaces settings of the study."""
    path = tmp_path / "study.yml"
    path.write_text(yaml.safe_dump({**profile, "study": {**profile["study"], **settings}}))
    return planned(path, *hosts, gpu_count=gpu_count)


def planned(path: Path, *hosts: str, gpu_count: int = 2, **variables: Any) -> Plan:
    """Return the plan for the profile file `path`, and an inventory with these hosts and variables."""
    inventory = builders.inventory(*(hosts or ("h1", "h2")), rackproof_gpu_count=gpu_count, **variables)
    return make_plan(read_profile(str(path)), inventory, run_id="s1", nonce=builders.NONCE, created=builders.WHEN)


# --- the matrix


def test_matrix_is_expanded_in_order_without_duplicate_cells(tmp_path: Path) -> None:
    plan = study(
        tmp_path, matrix=[{"gpus": [1, 2], "batch_size": [64, 128]}, {"gpus": [2], "precision": ["fp32", "bf16"], "epochs": [3]},
                          {"gpus": [1]}]
    )  # fmt: skip
    assert plan.study
    assert [(cell.gpus, cell.batch_size, cell.precision, cell.epochs) for cell in plan.study.cells] == [
        (1, 64, "fp32", 1),
        (1, 128, "fp32", 1),
        (2, 64, "fp32", 1),
        (2, 128, "fp32", 1),
        (2, 64, "fp32", 3),
        (2, 64, "bf16", 3),
    ]
    assert {(cell.hosts, cell.cpus) for cell in plan.study.cells} == {(1, 0)}


def test_plan_with_a_study_can_be_written_and_read(tmp_path: Path) -> None:
    plan = study(tmp_path, price={"per_host_hour": 12, "currency": "USD"}, stop={"hours": 2})
    document = json.loads(json.dumps(to_json(plan)))
    documents.validate(document, "plan", source="the plan")
    assert plan_from_json(document) == plan
    assert plan.expected == (), "no figure may be expected, because a study is not judged"
    assert plan.gangs() == {"all": ("h1", "h2")}


def test_plan_of_a_cell_has_its_gpus_and_settings(tmp_path: Path) -> None:
    plan = study(tmp_path)
    cell = plan.of_cell(8)
    assert [host.devices for host in cell.hosts] == [(0,), (0,)]
    (stage,) = cell.stages
    assert (stage.name, stage.cpus, stage.deadline_s) == (CELL, 1, 60)
    assert stage.benchmarks == {"scaling": {"workers": 2, "batch_size": 64, "epochs": 1, "precision": "fp32"}}
    for number in (0, 9):
        with pytest.raises(KeyError, match=f"cell {number}"):
            plan.of_cell(number)


@pytest.mark.parametrize(
    ("over", "message"),
    [
        ({"matrix": [{"hosts": [1]}]}, "study.matrix.0: 'gpus' is a required property"),
        ({"matrix": [{"gpus": [0]}]}, "study.matrix.0.gpus.0: 0 is less than the minimum of 1"),
        ({"matrix": [{"gpus": [2.0]}]}, "study.matrix.0.gpus.0: 2.0 is not a whole number: write 2"),
        ({"matrix": [{"gpus": [1], "cpu": [1]}]}, "unknown cpu (did you mean cpus?)"),
        ({"matrix": [{"gpus": [1], "precision": ["bf61"]}]}, "'bf61' is not one of fp32, bf16 (did you mean bf16?)"),
        ({"matrix": [{"gpus": [1], "batch_size": ["64"]}]}, "batch_size.0: '64' is not a whole number"),
        (
            {"matrix": [{"gpus": [1, 2], "batch_size": list(range(1, 52))}]},
            "the matrix has 102 cells; the maximum is 100",
        ),
        ({"stop": {"cost": 50}}, "study.stop.cost is 50, but there is no price: add study.price.per_host_hour"),
        ({"price": {"per_host_hour": -1}}, "study.price.per_host_hour: -1 is less than or equal to the minimum of 0"),
        ({"price": {"per_host_hour": 1, "currency": "<b>"}}, "study.price.currency"),
        (
            {"price": {"per_host_hour": 1e13}},
            "per_host_hour: 10000000000000.0 is greater than the maximum of 1000000000000",
        ),
        (
            {
                "matrix": [
                    {"gpus": list(range(1, 129)), "batch_size": list(range(1, 9999)), "epochs": list(range(1, 9999))}
                ]
            },
            "the matrix has 12794880512 cells; the maximum is 100",
        ),
    ],
)
def test_invalid_study_is_an_error(tmp_path: Path, over: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError) as caught:
        study(tmp_path, **over)
    assert message in str(caught.value)


def test_inventory_variables_that_contradict_a_study_are_errors(tmp_path: Path) -> None:
    for name, value in {"rackproof_epochs": 3, "rackproof_batch_size": 64, "rackproof_validation_only": True}.items():
        with pytest.raises(
            UsageError, match=rf"{name} is {value}, but profile scaling is a study: .*; remove the variable"
        ):
            planned(PROFILES / "scaling.yml", **{name: value})


def test_study_with_other_benchmarks_is_an_error(tmp_path: Path) -> None:
    stages = {"gang": {**PROFILE["stages"]["gang"], "benchmarks": {"training": {}, "scaling": {}}}}
    with pytest.raises(
        UsageError, match="runs gang: scaling, training: a study has only the stage gang with the benchmark scaling"
    ):
        study(tmp_path, profile={**PROFILE, "stages": stages})
    stages["gang"]["benchmarks"] = {"scaling": {"precision": "fp23"}}
    with pytest.raises(
        UsageError, match=r"scaling.precision does not accept fp23 \(did you mean fp32\?\): choose from fp32, bf16"
    ):
        study(tmp_path, profile={**PROFILE, "stages": stages})


@pytest.mark.parametrize("name", ["scaling", "scaling-rehearsal"])
def test_shipped_studies_can_be_planned(name: str) -> None:
    plan = planned(PROFILES / f"{name}.yml", "h1", gpu_count=2)
    assert plan.study
    fitting = [cell for cell in plan.study.cells if cell.hosts == 1 and cell.gpus <= 2]
    assert len(fitting) == {"scaling": 12, "scaling-rehearsal": 3}[name]
    assert {cell.cpus for cell in plan.study.cells} == {0, 1}


# --- results of the cells


@dataclass
class SimulatedHosts:
    """Simulated hosts that run the cells. Each doubling of the ranks reduces the throughput per rank by a tenth."""

    plan: Plan
    unreachable: set[str] = field(default_factory=set)
    change: Callable[[int, str, Launch], Launch | None] = lambda number, host, launch: launch
    """Returns the launch as the host records it, or None if the host does not record it."""
    begun: list[int] = field(default_factory=list)
    """Numbers of the cells launched by `run_study`, in order."""
    launches: dict[str, list[Launch]] = field(default_factory=dict)

    def evidence(self) -> dict[str, Evidence]:
        return {
            host: Evidence(records=(record(self.plan, host, launches),)) for host, launches in self.launches.items()
        }

    def run_study(self) -> StudyResults:
        """Launch cells until there is no next cell, and return the results."""
        present = [host.name for host in self.plan.hosts if host.name not in self.unreachable]
        while launches := next_cell(self.plan, self.evidence(), present).launches:
            (start,) = launches
            assert start.number not in self.begun, "no cell may be measured twice"
            assert self.plan.study
            self.begun.append(start.number)
            cell = self.plan.study.cells[start.number - 1]
            for host in start.members:
                if reported := self.change(start.number, host, launched(start.number, start.members, cell)):
                    self.launches.setdefault(host, []).append(reported)
        return evaluate_study(self.plan, self.evidence())


def launched(number: int, members: tuple[str, ...], cell: Cell, **params: Any) -> Launch:
    efficiency = 0.9 ** (cell.ranks.bit_length() - 1)
    figures = {
        "hookup": (8.0, "s"),
        "duration": (60.0, "s"),
        "throughput": (1000.0 * cell.batch_size / 64 * cell.ranks * efficiency / (3 if cell.cpus else 1), "images/s"),
        "accuracy": (0.73, "1"),
        "loss": (0.66, "1"),
    }
    params = {"world_size": cell.ranks, "data": "fashion-mnist", "max_steps": 0, **params}
    return replace(
        builders.launch(CELL, members),
        number=number,
        duration_s=72.0,
        observations=tuple(
            builders.observation(f"scaling.{kind}", value, scope="gang=all", unit=unit, stage=CELL, **params)
            for kind, (value, unit) in figures.items()
        ),
    )


def record(plan: Plan, host: str, launches: list[Launch]) -> Record:
    return Record(
        run_id=plan.run_id,
        nonce=plan.nonce,
        host=host,
        began=builders.WHEN,
        ended=builders.WHEN,
        rackproof="0",
        gang="all",
        launches=tuple(launches),
    )


def states(results: StudyResults) -> list[str]:
    return [row.state for row in results.rows]


def test_each_cell_is_measured_once_and_cells_too_large_for_the_fleet_are_skipped(tmp_path: Path) -> None:
    simulated = SimulatedHosts(study(tmp_path))
    results = simulated.run_study()
    assert simulated.begun == [1, 2, 3, 4, 7, 8]
    assert states(results) == [*[MEASURED] * 4, SKIPPED, SKIPPED, MEASURED, MEASURED]
    assert results.rows[4].reason == "capacity: hosts with at least 2 GPUs: 4 needed, 2 in the inventory"
    assert [row.members for row in results.rows[1:4]] == [("h1",), ("h1", "h2"), ("h1", "h2")]
    assert results.is_complete
    assert summarize(results) == "6 of 8 cells were measured, 2 skipped."


def test_efficiency_is_throughput_per_rank_relative_to_the_smallest_comparable_cell(tmp_path: Path) -> None:
    rows = SimulatedHosts(study(tmp_path)).run_study().rows
    values = {row.number: (round(row.efficiency, 3), row.against) for row in rows if row.efficiency is not None}
    # Batch size 64: cell 7 has one rank, cell 1 two, cell 3 four. Batch size 128: cell 2 has two ranks, cell 4 four.
    # Cell 8 is the only cell with one CPU, so it is compared with itself.
    assert values == {7: (1.0, 7), 1: (0.9, 7), 3: (0.81, 7), 2: (1.0, 2), 4: (0.9, 2), 8: (1.0, 8)}


def test_cell_with_limited_cpus_is_compared_with_the_cell_with_all_cpus(tmp_path: Path) -> None:
    results = SimulatedHosts(study(tmp_path)).run_study()
    values = {row.number: (row.share, row.unconfined) for row in results.rows if row.share is not None}
    assert values == {8: (pytest.approx(1 / 3), 7)}
    assert render_lines(results, "").endswith(", 33 % of the images/s of cell 7")
    block = {"gpus": [2], "batch_size": [64]}
    rows = SimulatedHosts(study(tmp_path, matrix=[{**block, "epochs": [8]}, {**block, "cpus": [1]}])).run_study().rows
    assert rows[1].unconfined == 1, (
        "cells with different numbers of epochs must be compared: the rate does not depend on the epochs"
    )
    rows = (
        SimulatedHosts(study(tmp_path, matrix=[{"gpus": [2], "batch_size": [128]}, {**block, "cpus": [1]}]))
        .run_study()
        .rows
    )
    assert rows[1].share is None


def test_cost_counts_only_the_hosts_of_each_launch(tmp_path: Path) -> None:
    plan = study(tmp_path, price={"per_host_hour": 10, "currency": "EUR"})
    simulated = SimulatedHosts(plan)
    results = simulated.run_study()
    assert [row.cost for row in results.rows] == pytest.approx([0.2, 0.2, 0.4, 0.4, None, None, 0.2, 0.2])
    assert results.cost == pytest.approx(1.6)
    assert results.hours == pytest.approx(6 * 72 / 3600)
    at_new_price = evaluate_study(plan, simulated.evidence(), price=20)
    assert at_new_price.cost == pytest.approx(3.2)
    assert evaluate_study(study(tmp_path), simulated.evidence()).cost is None, (
        "without a price the cost must be unknown"
    )


@pytest.mark.parametrize(
    ("stop", "message"),
    [
        ({"cost": 0.5}, "budget: earlier cells cost 0.80, limit 0.5 EUR"),
        ({"hours": 0.05}, "budget: earlier cells took 0.06 h, limit 0.05 h"),
    ],
)
def test_study_stops_at_its_budget(tmp_path: Path, stop: dict[str, float], message: str) -> None:
    simulated = SimulatedHosts(study(tmp_path, price={"per_host_hour": 10, "currency": "EUR"}, stop=stop))
    results = simulated.run_study()
    assert simulated.begun == [1, 2, 3]
    assert states(results) == [*[MEASURED] * 3, *[SKIPPED] * 5]
    assert results.rows[3].reason == results.stopped == message
    assert results.rows[4].reason.startswith("capacity"), (
        "the reason of a cell that needs too many hosts must be the capacity, not the budget"
    )
    assert results.is_complete, (
        "a study that ends at its budget must count as complete, because the operator chose this limit"
    )


def test_failed_cell_has_a_reason_and_does_not_stop_the_study(tmp_path: Path) -> None:
    def change(number: int, host: str, launch: Launch) -> Launch:
        out_of_memory = replace(launch, outcome="failed", reason="rank 0 in scaling (exit code 1): out of memory")
        return out_of_memory if number == 2 else launch

    simulated = SimulatedHosts(study(tmp_path, price={"per_host_hour": 10}), change=change)
    results = simulated.run_study()
    assert states(results) == [MEASURED, FAILED, MEASURED, MEASURED, SKIPPED, SKIPPED, MEASURED, MEASURED]
    row = results.rows[1]
    assert row.reason == "rank 0 in scaling (exit code 1): out of memory"
    assert (row.throughput, row.efficiency) == (None, None)
    assert row.cost == pytest.approx(0.2), "the cost must include failed launches"
    assert (results.rows[3].efficiency, results.rows[3].against) == (1.0, 4), (
        "cell 2 failed, so the reference for batch size 128 must be cell 4, the next larger cell"
    )
    assert not results.is_complete


def with_throughput(launch: Launch, **change: Any) -> Launch:
    """Return the launch after these fields of its observation `scaling.throughput` were changed."""
    observed = [replace(item, **change) if item.name == "scaling.throughput" else item for item in launch.observations]
    return replace(launch, observations=tuple(observed))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda launch: replace(launch, observations=()), "scaling.hookup: missing in the record"),
        (
            lambda launch: with_throughput(launch, status=ERROR, value=None, reason="no room in /dev/shm"),
            "scaling.throughput: no room in /dev/shm",
        ),
        (lambda launch: with_throughput(launch, value="fast"), "scaling.throughput: not a number"),
        (lambda launch: with_throughput(launch, value=True), "scaling.throughput: not a number"),
        (lambda launch: replace(launch, outcome="deadline"), "deadline"),
        (lambda launch: replace(launch, reason="no results of rank 1: missing"), "no results of rank 1: missing"),
        (lambda launch: with_throughput(launch, params={"world_size": 1}), "1 rank took part, expected 2"),
        (
            lambda launch: with_throughput(launch, params={"world_size": 2, "batch_size": 32, "epochs": 1}),
            "settings differ from the plan: batch_size was 32",
        ),
        (lambda launch: with_throughput(launch, value=0.0), "scaling.throughput: invalid value 0"),
        (lambda launch: with_throughput(launch, value=-5.0), "scaling.throughput: invalid value -5"),
        (lambda launch: with_throughput(launch, value=5e-324), "scaling.throughput: invalid value 4.94066e-324"),
        (lambda launch: with_throughput(launch, value=1e308), "scaling.throughput: invalid value 1e+308"),
        (lambda launch: replace(launch, duration_s=30.0), "scaling.duration: invalid value 60"),
        (lambda launch: replace(launch, duration_s=1e308), "invalid launch duration: 1e+308 s"),
    ],
)
def test_cell_without_valid_results_fails(tmp_path: Path, change: Callable[[Launch], Launch], message: str) -> None:
    plan = study(tmp_path, "h1", matrix=[{"gpus": [2]}])
    results = SimulatedHosts(plan, change=lambda number, host, launch: change(launch)).run_study()
    (row,) = results.rows
    assert (row.state, row.reason) == (FAILED, message)
    assert not results.is_complete


def test_cell_fails_without_the_record_of_one_host(tmp_path: Path) -> None:
    simulated = SimulatedHosts(
        study(tmp_path), change=lambda number, host, launch: None if (number, host) == (3, "h2") else launch
    )
    results = simulated.run_study()
    assert (results.rows[2].state, results.rows[2].reason) == (FAILED, "no record of this launch from h2")


def test_large_cells_stay_open_while_hosts_are_unreachable(tmp_path: Path) -> None:
    simulated = SimulatedHosts(study(tmp_path, "h1", "h2", "h3"), unreachable={"h1", "h3"})
    results = simulated.run_study()
    assert simulated.begun == [1, 2, 7, 8]
    assert {row.members for row in results.rows if row.members} == {("h2",)}
    assert (results.rows[2].state, results.rows[2].reason) == (OPEN, NOT_YET)
    assert not results.is_complete
    simulated.unreachable.clear()
    assert simulated.run_study().is_complete
    assert simulated.begun == [1, 2, 7, 8, 3, 4]


def test_cell_that_was_launched_again_is_reported_with_the_launch_that_measured_it(tmp_path: Path) -> None:
    """The first launch of the cell failed on h1, which then was unreachable. A second launch on h2 measured the cell.

    Now the records of both hosts are present.
    """
    plan = study(tmp_path, matrix=[{"gpus": [2]}], price={"per_host_hour": 3600})
    assert plan.study
    failed_launch = replace(
        launched(1, ("h1",), plan.study.cells[0]), outcome="failed", reason="the link went down", duration_s=300
    )
    simulated = SimulatedHosts(
        plan, launches={"h1": [failed_launch], "h2": [launched(1, ("h2",), plan.study.cells[0])]}
    )
    (row,) = simulated.run_study().rows
    assert simulated.begun == []
    assert (row.state, row.members, row.wall_s) == (MEASURED, ("h2",), 72.0)
    assert row.cost == pytest.approx(372), "the cost must include both launches"
    assert evaluate_study(plan, simulated.evidence()).hours == pytest.approx(372 / 3600)


def test_measurement_of_a_cell_counts_if_one_of_its_hosts_had_a_later_launch_with_another_host(tmp_path: Path) -> None:
    """h1 and h2 measured the cell, but their records were not fetched, so that h1 and h3 were launched, and failed."""
    plan = study(tmp_path, "h1", "h2", "h3", matrix=[{"gpus": [4]}])
    assert plan.study
    first = launched(1, ("h1", "h2"), plan.study.cells[0])
    second = replace(launched(1, ("h1", "h3"), plan.study.cells[0]), outcome="failed", reason="the link went down")
    for of_h1 in ([first, second], [second, first]):
        simulated = SimulatedHosts(plan, launches={"h1": of_h1, "h2": [first], "h3": [second]})
        results = evaluate_study(plan, simulated.evidence())
        (row,) = results.rows
        assert (row.state, row.members) == (MEASURED, ("h1", "h2"))
        assert results.hours == pytest.approx(144 / 3600), "the duration must include both launches"


def test_study_without_measured_cells_is_incomplete(tmp_path: Path) -> None:
    results = SimulatedHosts(study(tmp_path, matrix=[{"gpus": [4]}])).run_study()
    assert states(results) == [SKIPPED]
    assert not results.is_complete


def test_training_ended_by_max_steps_is_noted_in_every_format(tmp_path: Path) -> None:
    plan, message = study(tmp_path, "h1"), "stopped at max_steps before its last epoch was complete"
    whole = SimulatedHosts(plan).run_study()
    cut = SimulatedHosts(plan, change=lambda number, host, launch: with_params(launch, {"max_steps": 20})).run_study()
    for render in (render_html, render_markdown, lambda _, results, currency: render_lines(results, currency)):
        assert message not in render(plan, whole, "")
        assert render(plan, cut, "").count(message) == len(cut.rows) - cut.count(SKIPPED)


def test_launch_recorded_by_a_host_that_is_not_a_member_is_ignored(tmp_path: Path) -> None:
    plan = study(tmp_path)
    assert plan.study
    reported = launched(1, ("h2",), plan.study.cells[0])
    results = evaluate_study(plan, {"h1": Evidence(records=(record(plan, "h1", [reported]),))})
    assert set(states(results)) == {OPEN, SKIPPED}


# --- comparison with the published figures


def test_only_comparable_cells_are_shown_with_published_figures(tmp_path: Path) -> None:
    plan = study(tmp_path)
    rows = SimulatedHosts(plan).run_study().rows
    small, large = RUNS[0], RUNS[2]
    assert (small.machine, small.epochs, small.batch_size) == ("n1-standard-4", 1, 64)
    assert closest_cell(large, rows) == rows[0], (
        "a run with two GPUs must be compared with the cell of one host with two GPUs"
    )
    assert closest_cell(small, rows) == rows[7], "a run with few CPUs must be compared with the cell with limited CPUs"
    assert closest_cell(RUNS[-1], rows) is None, (
        "a run of twenty epochs must not be compared: no cell has twenty epochs"
    )
    for params in ({"data": "synthetic"}, {"max_steps": 20}):
        simulated = SimulatedHosts(plan, change=lambda number, host, launch, params=params: with_params(launch, params))  # type: ignore[misc]
        assert closest_cell(large, simulated.run_study().rows) is None


def with_params(launch: Launch, params: dict[str, Any]) -> Launch:
    observed = [replace(item, params={**item.params, **params}) for item in launch.observations]
    return replace(launch, observations=tuple(observed))


# --- the page


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Return the run directory of a study with one failed cell."""

    def change(number: int, host: str, launch: Launch) -> Launch:
        hostile = "<script>alert(1)</script> | \x1b[31mred"
        return replace(launch, outcome="failed", reason=hostile) if number == 2 else launch

    return write_study(
        tmp_path, SimulatedHosts(study(tmp_path, price={"per_host_hour": 12, "currency": "USD"}), change=change)
    )


def write_study(tmp_path: Path, simulated: SimulatedHosts) -> Path:
    simulated.run_study()
    directory = tmp_path / "runs" / "s1"
    begin(directory, json.loads(json.dumps(to_json(simulated.plan))))
    for host, evidence in simulated.evidence().items():
        documents.write(directory / "gangs" / "all" / f"{host}.json", to_json(evidence.records[0]))
    return directory


def test_page_has_every_cell_and_escapes_text_from_hosts(run: Path) -> None:
    assert main(["scaling", str(run)]) == 2
    page = (run / "scaling.html").read_text()
    assert "5 of 8 cells were measured, 1 failed, 2 skipped." in page
    assert page.count('<tr class="fail">') == 1
    assert "<script" not in page.replace("&lt;script", "")
    assert not re.search(r'(?:src|href)="(?!#)', page), "the page must use no external resources"
    assert "default-src &#39;none&#39;" in page
    assert "REHEARSAL" not in page
    assert page.count("<figure>") == 3
    assert "characters)" not in page, "no text of Rackproof may be truncated"
    assert all(note in page for note in (COLUMN_NOTES, GKE_NOTES))
    markdown = (run / "scaling.md").read_text()
    assert "‹script›alert(1)‹/script› ¦ red" in markdown
    assert "\x1b" not in page + markdown
    assert (
        "| 3 | 2 × 2 | 64 | 1 | fp32 | all | 72 s | 8 s | 3240 | 81 % | 0.7300 | 0.6600 | 0.48 | measured |" in markdown
    )
    assert "| 2 × 4 | n1-standard-16 | 128 | 20 | 2 min 21 s | 0.8849 | 0.3264 | – | – | – | – |" in markdown


def test_same_records_give_the_same_files(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    names = ("scaling.html", "scaling.md", "scaling.json")
    main(["scaling", str(run)])
    first = [(run / name).read_bytes() for name in names]
    main(["scaling", str(run), "--json"])
    assert [(run / name).read_bytes() for name in names] == first
    document = json.loads(capsys.readouterr().out.partition("page: ")[2].partition("\n")[2])
    assert (document["complete"], document["currency"], len(document["cells"])) == (False, "USD", 8)
    assert [cell["number"] for cell in document["cells"] if "throughput" not in cell] == [2, 5, 6]


def test_price_option_replaces_the_price_of_the_study(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["scaling", str(run), "--price", "120", "--currency", "EUR"])
    assert (
        "3: 2 × 2, batch 64, fp32: 72 s (hookup 8 s), 3240 images/s, efficiency 81 %, accuracy 0.7300, loss 0.6600, 4.80 EUR"
        in (capsys.readouterr().out)
    )


def test_complete_study_exits_0(tmp_path: Path) -> None:
    assert main(["scaling", str(write_study(tmp_path, SimulatedHosts(study(tmp_path))))]) == 0


def test_rehearsal_is_marked_on_the_pages_and_has_processes_in_place_of_gpus(tmp_path: Path) -> None:
    plan = study(tmp_path, profile=REHEARSAL)
    results = SimulatedHosts(plan).run_study()
    assert "REHEARSAL" in render_html(plan, results, "")
    assert "REHEARSAL" in render_markdown(plan, results, "")
    assert "hosts with at least 2 processes: 4 needed, 2 in the inventory" in render_lines(results, "")


def test_page_states_that_no_cell_was_measured(tmp_path: Path) -> None:
    plan = study(tmp_path)
    results = evaluate_study(plan, {})
    assert plots(results) == []
    assert "No cell was measured." in render_html(plan, results, "")
    assert not results.is_complete


def test_pages_state_that_accuracy_and_loss_do_not_apply_to_synthetic_images(tmp_path: Path) -> None:
    plan = study(tmp_path)
    results = SimulatedHosts(
        plan, change=lambda number, host, launch: with_params(launch, {"data": "synthetic"})
    ).run_study()
    assert "accuracy and loss do not apply" in render_html(plan, results, "")
    assert "accuracy and loss do not apply" in render_markdown(plan, results, "")


# --- the command


def test_next_cell_is_returned_to_the_playbook(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for path in (run / "gangs" / "all").iterdir():
        document = json.loads(path.read_text())
        document["launches"] = [launch for launch in document["launches"] if launch["number"] != 3]
        documents.write(path, document)
    assert main(["gangs", "--run-dir", str(run), "--hosts", "h2,h1", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {
        "launches": [["--members=h1,h2", "--number=3"]],
        "hosts": {"h1": 0, "h2": 0},
        "excluded": {},
        "awaited": [],
    }


def test_report_rejects_studies_and_scaling_rejects_other_runs(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["report", str(run)]) == 2
    assert f"run s1 is a scaling study, which is not judged: use rackproof scaling {run}" in capsys.readouterr().err
    with pytest.raises(RunError):
        load(run)
    other = tmp_path / "r1"
    begin(other, json.loads(json.dumps(to_json(builders.plan()))))
    assert main(["scaling", str(other)]) == 64
    assert f"{other} is not a scaling study: run rackproof report {other}" in capsys.readouterr().err
    assert main(["scaling", str(tmp_path / "none")]) == 2


def test_rejected_record_is_reported_in_every_format(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (run / "gangs" / "all" / "h2.json").write_text("{")
    (run / "gangs" / "all" / "<b>\x1b[31m.json").write_text("{}")
    assert main(["scaling", str(run)]) == 2
    output = [capsys.readouterr().out, *((run / f"scaling.{kind}").read_text() for kind in ("md", "html", "json"))]
    for text in output:
        assert "gangs/all/h2.json: " in text
        assert "the plan expects no such record" in text
        assert "\x1b" not in text
    assert "<b>.json" not in output[1] + output[2]


def test_control_characters_in_the_currency_are_removed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan = study(tmp_path, price={"per_host_hour": 12, "currency": "\x1b[31m"})
    directory = write_study(tmp_path, SimulatedHosts(plan))
    assert main(["scaling", str(directory)]) == 0
    texts = [capsys.readouterr().out, *((directory / f"scaling.{kind}").read_text() for kind in ("md", "html"))]
    assert "\x1b" not in "".join(texts)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--price", "0"], "--price 0.0: give the price of a host per hour, more than 0"),
        (["--price", "nan"], "--price nan: give the price of a host per hour"),
        (["--price", "1e308"], "--price 1e+308: give the price of a host per hour, more than 0 and at most 1e+12"),
        (["--currency", "U S"], "--currency U S: give a short name, such as USD"),
    ],
)
def test_invalid_options_are_errors(
    run: Path, options: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["scaling", str(run), *options]) == 64
    assert message in capsys.readouterr().err


def test_local_run_of_a_study_measures_no_cell_twice(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    small = {"gang": {**PROFILE["stages"]["gang"], "benchmarks": {"scaling": {"max_steps": 2, "batch_size": 8}}}}
    matrix = [{"hosts": [1, 2], "gpus": [1], "cpus": [1]}, {"gpus": [1], "cpus": [9999]}]
    profile = {**PROFILE, "device": "cpu", "processes_per_host": 1, "stages": small, "study": {"matrix": matrix}}
    (tmp_path / "small.yml").write_text(yaml.safe_dump(profile))
    arguments = ["run", "--profile", str(tmp_path / "small.yml"), "--run-dir", str(tmp_path / "s1"), "--host", "me"]
    assert main(arguments) == 2
    reported = capfd.readouterr()
    assert "1 of 3 cells were measured, 1 failed, 1 skipped." in reported.out
    assert "3: 1 × 1, batch 8, fp32, 9999 CPUs per GPU: failed: host me has" in reported.out
    assert "cell 1: finished" in reported.err
    document = json.loads((tmp_path / "s1" / "scaling.json").read_text())
    first = document["cells"][0]
    assert first["wall_s"] > first["hookup_s"] > first["train_s"] > 0
    assert main(arguments) == 2
    assert "finished" not in capfd.readouterr().err, "no cell may be measured again"
    assert json.loads((tmp_path / "s1" / "scaling.json").read_text()) == document


def test_cell_fails_after_its_supervisor_was_killed_three_times(tmp_path: Path) -> None:
    """Without a limit, a cell without a record would be launched forever, and its cost would not count towards the budget."""
    plan = study(tmp_path, "h1", matrix=[{"gpus": [1]}], profile=REHEARSAL)
    run = HostRun.begin(tmp_path / "host", "h1", json.dumps(to_json(plan)))
    cell = run.for_cell(1)
    for _ in range(3):  # each time, the supervisor is killed before it writes a record
        assert next_cell(plan, {}, ["h1"]).launches[0].number == 1
        assert not count_attempt(cell, 1)
    record = run_launch(cell, LaunchRequest(stage=cell.plan.stage(CELL), members=("h1",), number=1))
    (row,) = evaluate_study(plan, {"h1": Evidence(records=(record,))}).rows
    assert row.state == FAILED
    assert row.reason.startswith("the cell was started 3 times on host h1, and each time its supervisor was killed")
    assert not count_attempt(cell, 2), "attempts must be counted per cell"


# --- processors


def test_ranks_get_separate_processors_and_share_a_core_only_if_all_cores_are_in_use(tmp_path: Path) -> None:
    for cpu in range(8):  # two threads per core: 0 and 4, 1 and 5 …
        directory = tmp_path / f"sys/devices/system/cpu/cpu{cpu}/topology"
        directory.mkdir(parents=True)
        (directory / "thread_siblings_list").write_text(f"{cpu % 4},{cpu % 4 + 4}\n")
    assert [select_cpus(range(8), 1, local_rank, tmp_path) for local_rank in range(5)] == [[0], [1], [2], [3], [4]]
    assert select_cpus(range(8), 3, 1, tmp_path) == [3, 4, 5]
    assert select_cpus([1, 4, 5, 6], 1, 2, tmp_path) == [6], (
        "processor 6 must come before 5, because 5 shares core 1 with processor 1"
    )
    assert select_cpus(range(4), 2, 1, tmp_path / "none") == [2, 3], (
        "without a core topology, processors must be taken in order"
    )
    assert parse_cpu_list("0-2,64\n") == {0, 1, 2, 64}


def test_pinning_fails_without_enough_processors() -> None:
    available = os.sched_getaffinity(0)
    with pytest.raises(ValueError, match=rf"too few processors: this process may use {len(available)}; rank 1 needs"):
        pin_to_cpus(len(available), 1)
    assert os.sched_getaffinity(0) == available


def test_too_many_processors_per_rank_are_an_error_before_the_launch(tmp_path: Path) -> None:
    plan = study(tmp_path, "h1", matrix=[{"gpus": [2], "cpus": [10_000]}]).of_cell(1)
    host = plan.hosts[0]
    gang = Gang.from_plan(plan, host, "cell 1", ["h1"], 29500)
    request = LaunchRequest(stage=plan.stages[0], members=("h1",))
    with pytest.raises(LaunchError, match=r"host h1 has \d+ CPUs, and 2 ranks with 10000 each need 20000"):
        launcher_command(plan, host, request, gang=gang, work=tmp_path, data=tmp_path, uuids={})
